"""Makes an adapter of peft from LoRA's updates: adapter_config.json and adapter_model.safetensors.

Reference: https://huggingface.co/docs/peft/developer_guides/checkpoint"""
import re
from typing import NamedTuple

import numpy as np

from jax_flags import UserError

ADAPTER_CONFIG = 'adapter_config.json'
ADAPTER_FILE = 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # every tensor's name begins with it
EXPERT = re.compile(r'\.experts\.\d+\.')  # in the names of the modules of experts


class Halves(NamedTuple):
    """The two LoRA matrices of a module. They change the module's weight by b @ a * alpha /
    rank."""
    a: np.ndarray  # [rank, in]
    b: np.ndarray  # [out, rank]


def make_adapter(modules, *, rank, alpha, base, model_type, others=()):
    """Returns (the content of adapter_config.json; {name: array}) of an adapter.

    modules: {name of a module in transformers: Halves}. rank, alpha: the rank and alpha of the run.
    base: the path of the base model, or its name on the hub. model_type: the model_type in the base
    model's config.json. others: the names of the modules without an update. The adapter has no
    arrays for them. Their names are needed to choose target_modules, because peft must not update
    these modules (see name_targets, which may raise UserError).

    Usually the Halves of a module have the rank of the run. If n matrices of the run are one module
    (gate and up of Phi 3), the Halves hold n updates, concatenated to the rank n * rank.
    adapter_config.json then gives the module n * alpha, which keeps alpha / rank the same."""
    # The tensors of the modules, and the modules with another rank than the run.
    tensors = {}
    ranks = {}
    alphas = {}
    for module, half in modules.items():
        tensors[f'{PREFIX}{module}.lora_A.weight'] = half.a
        tensors[f'{PREFIX}{module}.lora_B.weight'] = half.b
        n_updates = len(half.a) // rank
        if n_updates > 1:
            last = module.split('.')[-1]
            ranks[last] = n_updates * rank
            alphas[last] = as_peft_number(n_updates * alpha)

    # What peft needs to make the modules, and to find the base.
    settings = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'r': rank,
        'lora_alpha': as_peft_number(alpha),
        'rank_pattern': ranks,
        'alpha_pattern': alphas,
        'target_modules': name_targets(modules, others),
        'fan_in_fan_out': model_type == 'gpt2',
        'lora_dropout': 0.0,
        'bias': 'none',
        'use_rslora': False,
        'use_dora': False,
        'inference_mode': True}
    return settings, tensors


def as_peft_number(alpha):
    """Returns alpha as an int if it is a whole number, because peft declares alpha as an int."""
    return int(alpha) if alpha == int(alpha) else alpha


def name_targets(modules, others):
    """Returns the list target_modules of peft's config: the names of the modules of an adapter.

    modules: the names of the modules with an update. others: the names of the model's other
    modules. Usually the last parts of the names suffice, such as 'q_proj'. Returns whole names in
    two cases: if a module in `others` has the same last part as one in `modules`, or if the model
    has a vision part.

    Raises UserError if experts in `others` have the same last part as a module in `modules`. peft
    0.21 would update these experts too, because it compares only the last part of an expert's name,
    even with whole names in the list."""
    ends = {module.split('.')[-1] for module in modules}
    other_ends = {module.split('.')[-1] for module in others}

    # in a model with experts, peft 0.21 takes these names for the experts, whole or not
    expert_ends = {module.split('.')[-1] for module in others if EXPERT.search(module)}
    if not ends.isdisjoint(expert_ends):
        raise UserError(f'peft takes an update of {min(ends & expert_ends)} for one of the '
                        'experts, which have none here: export the run merged, with --folder '
                        'instead of --adapter')

    # A model with a vision part has other modules with these endings, unknown here.
    sees = any('language_model.' in module for module in modules)
    is_ambiguous = sees or not ends.isdisjoint(other_ends)
    return sorted(modules) if is_ambiguous else sorted(ends)
