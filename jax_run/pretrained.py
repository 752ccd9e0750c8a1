"""Starts a run from another model's weights, and samples the model of a run while the run trains.
Training from scratch without --sample_prompt does not import this module."""
import dataclasses
import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_devices.choose import config_for_decoding
from jax_devices.layout import setup_distributed_training
from jax_devices.processes import in_all_processes
from jax_flags import UserError
from jax_hub.folders import local_path
from jax_hub.tokenizers import describe_tokenizer, load_tokenizer
from jax_ops.decode_weights import convert_params_for_decoding
from jax_pretrained import load_config
from jax_run.checkpoints import MODEL_ITEMS, choose_checkpoint, is_run
from jax_run.data import remedy_for_tokens, same_tokens, with_template_of
from jax_run.load import merge_updates
from jax_run.model import Model, flags_from_config, for_this_run, with_block_size
from jax_run.restore import full_path
from jax_text import TextModel
from jax_transformer import GPTConfig

SAMPLE_TOKENS = 100  # length of a sample while training


def pretrained_model(flags, given, meta, dtype):
    """Makes the Model of a run that starts from flags['init_from']: the weights of another run or
    of a pretrained model. Returns (Model; flags). In the returned flags, those that describe the
    model have the values of the loaded model, except block_size: the run may train with shorter
    sequences than the model can read. given: the flags that the user gave. meta: what
    load_mixture_meta returns. dtype: the dtype of computation."""
    source = os.path.expanduser(flags['init_from'])

    # the model and its tokenizer
    if is_run(source):
        with in_all_processes():
            step, saved = choose_checkpoint(source, flags['checkpoint'], MODEL_ITEMS)
        weights = os.path.join(source, 'ckpt', str(step))
        config, known = GPTConfig(**saved['model']), saved['tokenizer']
        name = os.path.join(source, 'tokenizer')
        base = full_path(weights)
        source = f'{source}, iteration {step}'
    else:
        if 'checkpoint' in given:
            raise UserError(f'checkpoint is for a run, but {source} is another model: leave it out')
        weights = local_path(source)
        with in_all_processes():
            config = load_config(weights)
        known = describe_tokenizer(weights, config.vocab_size)
        name = source
        base = full_path(source)
    tokenizer = check_tokens(
        meta['tokenizer'], flags['dataset'], known, name, config.vocab_size)

    tokenizer = with_template_of(meta, tokenizer, flags['dataset'])

    # the sequences of this run may be shorter than the model's, and with RoPE longer
    block_size = flags['block_size']
    if 'block_size' not in given:
        block_size = min(block_size, config.block_size)
    config = with_block_size(config, block_size, source)
    config = for_this_run(config, flags, given, dtype)
    flags = {**flags, **flags_from_config(config, given), 'block_size': block_size}
    lora = None
    if flags['lora_rank']:
        lora = {'base': base, 'rank': flags['lora_rank'], 'alpha': flags['lora_alpha'],
                'quantize': flags['quantize'], 'checksum': None}
    print(f"initializing from {source}, dropout {flags['dropout']}, block_size {block_size}")
    return Model(config, tokenizer, lora, weights), flags


def check_tokens(data, dataset, model, model_name, vocab_size):
    """Checks that a pretrained model can be trained on a data set: the same ids must mean the same
    tokens. Returns the description of the run's tokenizer. This is the model's, or the data set's
    if the model's is unknown.

    data, model: the descriptions of the tokenizers of the data set and of the model; `model` may be
    None (unknown). dataset, model_name: names for the error message. vocab_size: the size of the
    model's vocabulary.

    Raises UserError if ids mean different tokens. If the model's tokenizer is unknown, accepts only
    a data set of characters (kind 'char') with vocab_size characters."""
    if model and same_tokens(data, model):
        return model
    if not model and data['kind'] == 'char' and len(data['chars']) == vocab_size:
        return data
    remedy = f'put the tokenizer.json of {model_name} beside its weights'
    if model:
        remedy = remedy_for_tokens(model, model_name)
    raise UserError(f'dataset {dataset} has other tokens than {model_name}, their ids mean '
                    f'something else; {remedy}')


# -----------------------------------------------------------------------------
# a sample while training

def open_sampler(run):
    """Makes a function that takes a TrainState and returns a text: --sample_prompt with a
    continuation, the same that sample_jax.py would make from a checkpoint of this state. For a new
    model before its first update, that function returns ''. Raises UserError for a prompt that
    cannot be continued."""
    prompt = run.flags['sample_prompt']
    with in_all_processes():
        sampler = create_sampler(prompt, run.model, run.devices[0])

    def sample(state):
        if run.model.source is None and int(state.step) == 0:
            return ''
        return sample_while_training(sampler, state, run.model.lora, prompt, run.flags['seed'])

    return sample


def create_sampler(prompt, model, device):
    """Returns a TextModel without parameters, for sample_while_training. It has the config and the
    tokenizer of `model`, a Model, and is on one device of the same kind as `device`. Raises
    UserError if the model cannot continue `prompt`."""
    layout = setup_distributed_training(jax.local_devices(backend=device.platform)[:1])
    config = config_for_decoding(model.config, layout, model.config.dtype)
    sampler = TextModel({}, config, load_tokenizer(model.tokenizer), layout)
    sampler.encode(prompt)
    return sampler


def sample_while_training(sampler, state, lora, prompt, seed):
    """Returns `prompt` followed by a continuation of up to SAMPLE_TOKENS tokens, as a text. The
    model has the parameters of `state`, a TrainState, which stays unchanged. The text is the
    beginning of the first sample that sample_jax.py makes with these parameters, this prompt and
    this seed. All processes call this function, and all get the text.

    sampler: a TextModel without parameters, as create_sampler returns it. lora: the LoRA entry of
    the checkpoint, None without LoRA."""
    # the parameters as decoding reads them, on one device
    params = jax.tree.map(whole_array, state.weights)
    if lora:
        base = jax.tree.map(whole_array, state.frozen['weights'])
        params = merge_updates(base, lora, params)
    params = sampler.layout.device_put(params)
    params = convert_params_for_decoding(params, sampler.config.dtype)
    model = dataclasses.replace(sampler, params=params)
    return model.generate([prompt], max_new_tokens=SAMPLE_TOKENS, seed=seed)[0]


def whole_array(x):
    """Returns a device array as a numpy array, gathered from all processes if it is sharded over
    them."""
    is_here = x.is_fully_addressable or x.is_fully_replicated
    if not is_here:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
