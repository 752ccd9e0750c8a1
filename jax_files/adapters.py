"""LoRA adapters of peft: adapter_config.json and adapter_model.safetensors or .bin, merged into a
model; and what such files hold of updates that were trained here.

References:
1) https://huggingface.co/docs/peft/developer_guides/checkpoint
2) peft's merge: https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/layer.py
"""
import json
import math
import os
import re
from typing import NamedTuple

import numpy as np

from jax_flags import UserError, printable, read_json, regular_file

ADAPTER_CONFIG = 'adapter_config.json'
ADAPTER_FILES = ('adapter_model.safetensors', 'adapter_model.bin')

# Settings that are computed with, or change nothing once the adapter is trained. Any other one that
# is set is refused.
KNOWN_SETTINGS = {
    'alpha_pattern', 'auto_mapping', 'base_model_name_or_path', 'bias', 'ensure_weight_tying',
    'eva_config', 'exclude_modules', 'fan_in_fan_out', 'inference_mode', 'init_lora_weights',
    'layers_pattern', 'layers_to_transform', 'lora_alpha', 'lora_dropout', 'megatron_core',
    'modules_to_save', 'peft_type', 'peft_version', 'qalora_group_size', 'r', 'rank_pattern',
    'revision', 'target_modules', 'task_type', 'use_rslora'}

# Values of init_lora_weights. The others of peft change the model's weights, too.
INITIALIZATIONS = (None, True, False, 'gaussian', 'eva', 'orthogonal')

# How the name of each tensor of an adapter begins.
PREFIX = 'base_model.model.'

# The name of a module of one of several experts.
EXPERT = re.compile(r'\.experts\.\d+\.')

# The modules of GPT-2 whose weight is [in, out] on disk; every other one is [out, in].
CONV1D = ('c_attn', 'c_proj', 'c_fc')


class LowRankSum(NamedTuple):
    """A weight with its update, weight + scale * b @ a, which is computed in float32 when it is
    indexed."""
    weight: np.ndarray  # or an object that returns one when it is indexed
    a: np.ndarray  # [rank, in]
    b: np.ndarray  # [out, rank]
    scale: float
    transposed: bool  # whether the weight is [in, out]

    dtype = np.dtype(np.float32)

    @property
    def shape(self):
        return self.weight.shape

    def __getitem__(self, index):
        # as peft merges: in float32, regardless of how the two are stored
        a = np.asarray(self.a, np.float32)
        b = np.asarray(self.b, np.float32)
        update = b @ a * np.float32(self.scale)
        if self.transposed:
            update = update.T
        weight = np.asarray(self.weight[...], np.float32)
        return (weight + update)[index]


def is_adapter(path):
    """Returns whether a path is the folder of an adapter."""
    return os.path.isfile(os.path.join(path, ADAPTER_CONFIG))


def find_adapter_file(folder):
    """Returns the path of the file that holds an adapter's tensors. Raises UserError if it is not
    there."""
    for name in ADAPTER_FILES:
        path = regular_file(folder, name)
        if os.path.exists(path):
            return path
    raise UserError(f'{folder} has an {ADAPTER_CONFIG}, but none of {", ".join(ADAPTER_FILES)} is '
                    'beside it; copy or download it, too')


def read_adapter_config(folder):
    """Returns the settings in a folder's adapter_config.json. Raises UserError for a setting that
    is not computed here, and for a value that no adapter has."""
    path = regular_file(folder, ADAPTER_CONFIG)
    settings = read_json(path)
    kind = settings.get('peft_type')
    if kind != 'LORA':
        raise UserError(f'{path}: peft_type={json.dumps(kind)} is not supported, only "LORA"; '
                        'merge the adapter with peft and give the folder that it saves')

    # A setting that is on and not known may change what is computed.
    for key, value in settings.items():
        if value and key not in KNOWN_SETTINGS:
            refuse_setting(path, key, value)
    if settings.get('revision') not in (None, '', 'main'):
        refuse_setting(path, 'revision', settings['revision'])
    start = settings.get('init_lora_weights')
    has_type = isinstance(start, (str, bool, type(None)))
    if not has_type or start not in INITIALIZATIONS:
        refuse_setting(path, 'init_lora_weights', start)
    if type(settings.get('use_rslora', False)) is not bool:
        refuse_setting(path, 'use_rslora', settings['use_rslora'])

    # Rank and alpha, of all modules and of those that patterns name.
    check_number(path, 'r', settings.get('r'), int)
    check_number(path, 'lora_alpha', settings.get('lora_alpha'), (int, float))
    for name, kind in (('rank_pattern', int), ('alpha_pattern', (int, float))):
        patterns = settings.get(name) or {}
        if not isinstance(patterns, dict):
            refuse_setting(path, name, patterns)
        for pattern, value in patterns.items():
            check_number(path, f'{name} of {pattern}', value, kind)
            check_pattern(path, name, pattern)
    return settings


def refuse_setting(path, key, value):
    """Raises UserError for a setting that is not computed here."""
    raise UserError(f'{path}: {printable(key)}={json.dumps(value)[:200]} is not supported; merge '
                    'the adapter with peft (merge_and_unload) and give the folder that it saves')


def check_number(path, name, value, kind):
    """Raises UserError unless the value of a setting is a number above 0, and of this type."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not 0 < value < 2**31:
        raise UserError(f'{path}: {printable(name)} should be a number above 0, not '
                        f'{json.dumps(value)[:200]}')


def check_pattern(path, name, pattern):
    """Raises UserError for a regular expression that may take any time: repetitions of groups, or
    many of them."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        refuse_setting(path, name, {pattern: '...'})
    n_repetitions = len(re.findall(r'[*+?{]', pattern))
    repeats_group = re.search(r'\)[*+?{]', pattern) is not None
    if repeats_group or n_repetitions > 4 or len(pattern) > 200:
        refuse_setting(path, name, {pattern: '...'})


def value_for(module, patterns, default):
    """Returns the value of the first pattern that matches the end of a module's name, as peft
    chooses it, or the default.

    patterns: {regular expression: value}, or None."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf'(.*\.)?({pattern})$', module):
            return value
    return default


def merge_adapter(tensors, updates, settings, model_type, source):
    """Returns the tensors {name: array} of a model, merged with the tensors of an adapter; the sums
    are made when they are indexed.

    tensors: the model's. updates: the adapter's. settings: what read_adapter_config returns.
    model_type: a key of the model's config.json. source: the path of the adapter, for messages.
    Raises UserError for a tensor that is of another model or another kind of adapter."""
    # Pair the two halves of each update, and put in place what is saved whole.
    result = dict(tensors)
    halves = {}  # {(name on disk, module, is an embedding): {'A': array, 'B': array}}
    for name, x in updates.items():
        # The tensor is NAME.lora_A.weight, or of an embedding NAME.lora_embedding_A.
        bare = name.removeprefix(PREFIX)
        found = re.fullmatch(r'(.+)\.lora_(embedding_)?([AB])(\.weight)?', bare)
        is_half = found is not None and bool(found[2]) != bool(found[4])
        if is_half and name.startswith(PREFIX):
            module = found[1]
            is_embedding = bool(found[2])
            place = find_tensor(f'{module}.weight', tensors, name, source)
            half = halves.setdefault((place, module, is_embedding), {})
            half[found[3]] = x
        elif 'lora_' in name or not name.startswith(PREFIX):
            raise UserError(f'{source}: the tensor {printable(repr(name))} is not supported; merge '
                            'the adapter with peft (merge_and_unload) and give the folder that it '
                            'saves')
        else:
            # modules_to_save and biases are saved whole, with peft's wrapper in their names.
            wrapper = r'\.(base_layer|modules_to_save\.default)\.(?=weight$|bias$)'
            whole = re.sub(wrapper, '.', bare)
            result[find_tensor(whole, tensors, name, source)] = x

    # Add each update to its weight.
    for (place, module, is_embedding), half in halves.items():
        if half.keys() != {'A', 'B'}:
            raise UserError(f'{source} has one of lora_A and lora_B of {printable(module)}, but '
                            'not both; copy it again')
        is_conv1d = model_type == 'gpt2' and module.split('.')[-1] in CONV1D
        is_transposed = is_embedding or is_conv1d
        scale = scale_of(module, half['A'], settings, source)
        result[place] = LowRankSum(result[place], half['A'], half['B'], scale, is_transposed)
        check_shapes(result[place], module, source)
    return result


def find_tensor(name, tensors, theirs, source):
    """Returns the name in the model of a tensor that an adapter names, with or without the model's
    class around it.

    name: the adapter's name without peft's parts. tensors: the model's. theirs: the adapter's name,
    for messages. Raises UserError if the model has no such tensor."""
    bare = name.removeprefix('transformer.').removeprefix('model.').removeprefix('language_model.')
    candidates = (
        name, bare, f'transformer.{bare}', f'model.{bare}', f'language_model.model.{bare}')
    for candidate in candidates:
        if candidate in tensors:
            return candidate
    raise UserError(f'{source} changes {printable(repr(theirs))}, which the model does not have; '
                    'it is for another one')


def scale_of(module, a, settings, source):
    """Returns the factor of a module's update: alpha / rank, or alpha / sqrt(rank) with rslora.

    a: the module's lora_A, whose rank is checked. Raises UserError if it has another one."""
    # The rank and alpha of this module, which patterns may set.
    rank = value_for(module, settings.get('rank_pattern'), settings['r'])
    alpha = value_for(module, settings.get('alpha_pattern'), settings['lora_alpha'])
    if a.ndim != 2 or len(a) != rank:
        raise UserError(f'{source}: lora_A of {module} has the shape {a.shape}, and its rank '
                        f'should be {rank}')
    if settings.get('use_rslora'):
        return alpha / math.sqrt(rank)
    return alpha / rank


def check_shapes(x, module, source):
    """Raises UserError unless the update of a LowRankSum has the shape of its weight, and is
    floating point."""
    # The two halves fit each other.
    if x.b.ndim != 2 or x.b.shape[1] != len(x.a):
        raise UserError(f'{source}: lora_B {x.b.shape} of {module} does not fit its lora_A '
                        f'{x.a.shape}')

    # Their product fits the weight.
    shape = (x.b.shape[0], x.a.shape[1])
    shape_on_disk = shape[::-1] if x.transposed else shape
    if tuple(x.shape) != shape_on_disk:
        raise UserError(f'{source}: the update of {module} {shape} does not fit its weight '
                        f'{tuple(x.shape)}; the adapter is for another model')

    for half in (x.a, x.b):
        if half.dtype.name not in ('float32', 'bfloat16', 'float16', 'float64'):
            raise UserError(f'{source}: the update of {module} is {half.dtype}, not floating point '
                            'of 16 bits or more')


# -----------------------------------------------------------------------------
# what is saved

class Halves(NamedTuple):
    """The update of a module: b @ a, times alpha / rank."""
    a: np.ndarray  # [rank, in]
    b: np.ndarray  # [out, rank]


def make_adapter(modules, *, rank, alpha, base, model_type, others=()):
    """Returns (the content of adapter_config.json, {name: array}) of an adapter.

    modules: {module of the model of transformers: Halves}. rank, alpha: of the run; where several
    updates became one, its rank is a multiple of it, and so is its alpha. base: the model's path,
    or its name on the hub. model_type: a key of its config.json. others: the modules that have no
    update."""
    # Their tensors, and the modules whose rank is another one.
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
    """Returns an alpha as an int if it is one: peft's type of it."""
    return int(alpha) if alpha == int(alpha) else alpha


def name_targets(modules, others):
    """Returns the modules of an adapter as peft finds them: the ends of their names, such as
    'q_proj', or, where such an end is that of another module too, their whole names. Raises
    UserError if peft would take them for another one anyhow."""
    ends = {module.split('.')[-1] for module in modules}
    other_ends = {module.split('.')[-1] for module in others}

    # peft 0.21 reads these names of a model with experts as those of the experts, whole or not.
    expert_ends = {module.split('.')[-1] for module in others if EXPERT.search(module)}
    if not ends.isdisjoint(expert_ends):
        raise UserError(f'peft takes an update of {min(ends & expert_ends)} for one of the '
                        'experts, which have none here: export the run merged, with --folder '
                        'instead of --adapter')

    # What sees too has modules with these ends of which nothing is known here.
    sees = any('language_model.' in module for module in modules)
    is_ambiguous = sees or not ends.isdisjoint(other_ends)
    return sorted(modules) if is_ambiguous else sorted(ends)
