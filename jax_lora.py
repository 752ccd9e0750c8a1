"""Pretrained weights to train, and LoRA (arXiv:2106.09685): low-rank updates of frozen weights."""
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_files.weight_files import local_path
from jax_flags import UserError
from jax_ops.decode_weights import quantize_param
from jax_ops.matmul import Int8, LowRank
from jax_pretrained import load_pretrained
from jax_transformer import count_params, create_train_state


def load_weights(source, config, parallel, change=None):
    """(parameters of a pretrained model, sharded as `parallel` says; a checksum of them).

    change(path in the tree, array): what becomes of each float32 parameter before it is moved to its devices, and
    before the next one is read. Of a position table, the first block_size rows are taken."""
    crc = 0

    def place(path, array):
        nonlocal crc
        crc = zlib.crc32(np.ascontiguousarray(array), crc)
        if path == ('wpe',):
            array = array[:config.block_size]
        array = change(path, array) if change else array
        return flatten_dict(parallel.device_put(unflatten_dict({path: array})))[path]

    return load_pretrained(local_path(source), place=place)[1], crc


def create_lora_state(rng, config, tx, rank):
    """TrainState whose params are the updates {'a': [I, rank], 'b': [rank, O]} of every kernel [I, O] of attention and
    MLPs, not of experts: a is random, b zero. Its `frozen`, {'weights', 'scale'}, is filled in by load_frozen. Call it
    under jit: the model's own initial parameters, of which only the shapes are used, are then not computed."""
    state = create_train_state(rng, config, optax.identity())
    updates = {}
    for i, (path, kernel) in enumerate(flatten_dict(state.params).items()):
        if path[-1] == 'kernel' and path[-2] != 'router' and kernel.ndim == 2:
            a = jax.random.normal(jax.random.fold_in(rng, i), (len(kernel), rank)) * len(kernel)**-0.5
            updates[path] = {'a': a, 'b': jnp.zeros((rank, kernel.shape[1]))}
    updates = unflatten_dict(updates)
    return state.replace(params=updates, tx=tx, opt_state=tx.init(updates))


def model_params(params, frozen):
    """The parameters of the model, given those of a TrainState and its `frozen`: LowRank where LoRA trains a kernel."""
    if frozen is None:
        return params

    def join(weights, updates):
        if updates.keys() == {'a', 'b'}:
            return LowRank(weights, **updates, scale=frozen['scale'])
        return {name: join(part, updates[name]) if name in updates else part for name, part in weights.items()}

    return join(frozen['weights'], params)


def base_params(params):
    """The parameters of the model without LoRA's updates, given those with them (model_params)."""
    is_low_rank = lambda x: isinstance(x, LowRank)
    return jax.tree.map(lambda x: x.base if is_low_rank(x) else x, params, is_leaf=is_low_rank)


def count_frozen(frozen):
    """Number of parameters of the model that LoRA updates, as count_params; scales of int8 do not count."""
    is_int8 = lambda x: isinstance(x, Int8)
    return count_params(jax.tree.map(lambda x: x.values if is_int8(x) else x, frozen['weights'], is_leaf=is_int8))


def load_frozen(lora, config, parallel):
    """({'weights', 'scale'}, checksum) for TrainState.frozen, from what a checkpoint says of LoRA; see load_base."""
    weights, crc = load_base(lora, config, parallel, quantize_param if lora['quantize'] else None)
    return {'weights': weights, 'scale': parallel.device_put(np.float32(lora['alpha'] / lora['rank']))}, crc


def load_merged(lora, config, parallel, updates):
    """The parameters of a LoRA run with its updates added to the weights, in float32; see load_base."""
    def change(path, array):
        return merge(path, quantize_param(path, array) if lora['quantize'] else array, lora, updates)

    updates = flatten_dict(updates)
    return load_base(lora, config, parallel, change)[0]


def merge_updates(weights, lora, updates):
    """What load_merged returns, given the weights of `frozen` and the updates in the memory of the host."""
    updates = flatten_dict(updates)
    return unflatten_dict({path: merge(path, array, lora, updates) for path, array in flatten_dict(weights).items()})


def merge(path, array, lora, updates):
    """A frozen parameter with its update, if it has one, float32; updates: {path: array}."""
    if isinstance(array, Int8):
        array = np.asarray(array.values, np.float32) * np.asarray(array.scale)[..., None]
        array = array.swapaxes(-1, -2) if path[-1] == 'kernel' else array
    if (*path, 'a') in updates:
        a, b = (np.asarray(updates[*path, name]) for name in 'ab')
        array = array + lora['alpha'] / lora['rank'] * (a @ b)
    return np.asarray(array, np.float32)


def load_base(lora, config, parallel, change):
    """load_weights of the model that LoRA updates. Raises UserError if it has moved or changed."""
    if os.path.isabs(lora['base']) and not os.path.exists(lora['base']):
        raise UserError(f"{lora['base']}, the model that LoRA has updated, does not exist; name its new place with "
                        '--base=FOLDER')
    params, crc = load_weights(lora['base'], config, parallel, change)
    if lora['checksum'] not in (None, crc):
        raise UserError(f"{lora['base']} has other weights than those that LoRA was trained with; put these back, or "
                        'name where they are with --base=FOLDER')
    return params, crc


def move_base(lora, base):
    """What a checkpoint says of LoRA, with the place where its base is now; '' is the same. UserError without LoRA."""
    if base and not lora:
        raise UserError('base is for a LoRA run, and this one is not')
    return lora | {'base': full_path(base)} if base else lora


def full_path(source):
    """The absolute path of a model's folder or file, which a checkpoint can remember; a hub's name as it is."""
    on_disk = os.path.expanduser(source)
    return os.path.abspath(on_disk) if os.path.exists(on_disk) else source
