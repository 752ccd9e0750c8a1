"""LoRA (arXiv:2106.09685): low-rank updates of frozen weights; runs with their updates merged."""
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_devices.parallel import setup_distributed_training
from jax_files.checkpoints import (
    NUMBER, choose_checkpoint, is_checkpoint, is_run, open_checkpoint, restore_items, saved_layers,
    split_checkpoint)
from jax_flags import UserError, is_url
from jax_ops.decode_weights import quantize_param
from jax_ops.matmul import Int8, LowRank
from jax_pretrained import (
    Placing, checksum_of_weights, config_of_base, largest_first, load_weights)
from jax_transformer import GPTConfig, check_layers, count_params, create_train_state


def create_lora_state(rng, config, tx, rank):
    """Makes a TrainState whose params are the updates {'a': [I, rank], 'b': [rank, O]} of every
    kernel [I, O] of attention and MLPs, not of experts: a is random, b zero.

    Its `frozen`, {'weights', 'scale'}, is filled in by load_frozen. Call it under jit: the model's
    own initial parameters, of which only the shapes are used, are then not computed."""
    state = create_train_state(rng, config, optax.identity())

    # With b zero, the first forward pass is that of the base.
    updates = {}
    for i, (path, kernel) in enumerate(flatten_dict(state.params).items()):
        is_kernel = path[-1] == 'kernel' and kernel.ndim == 2
        if is_kernel and path[-2] != 'router':
            n_in, n_out = kernel.shape
            a = jax.random.normal(jax.random.fold_in(rng, i), (n_in, rank)) * n_in**-0.5
            updates[path] = {'a': a, 'b': jnp.zeros((rank, n_out))}
    updates = unflatten_dict(updates)
    return state.replace(params=updates, tx=tx, opt_state=tx.init(updates))


def state_creator(lora):
    """Returns the function of (rng, config, tx) that makes the TrainState of a run; lora: what its
    checkpoint says of LoRA, or None."""
    if not lora:
        return create_train_state
    return functools.partial(create_lora_state, rank=lora['rank'])


def model_params(params, frozen):
    """Returns the parameters of the model, given those of a TrainState and its `frozen`: LowRank
    where LoRA trains a kernel."""
    if frozen is None:
        return params

    def join(weights, updates):
        if updates.keys() == {'a', 'b'}:
            return LowRank(weights, **updates, scale=frozen['scale'])
        joined = dict(weights)
        for name in updates:
            joined[name] = join(weights[name], updates[name])
        return joined

    return join(frozen['weights'], params)


def base_params(params):
    """Returns the parameters of the model without LoRA's updates, given those with them, of
    model_params."""
    def is_low_rank(x):
        return isinstance(x, LowRank)

    def base(x):
        return x.base if is_low_rank(x) else x

    return jax.tree.map(base, params, is_leaf=is_low_rank)


def count_frozen(frozen):
    """Counts the parameters of the model that LoRA updates, as count_params does; scales of int8
    do not count."""
    return count_params(without_scales(frozen['weights']))


def without_scales(params):
    """Returns the tree of parameters with the values alone of what is Int8."""
    def is_int8(x):
        return isinstance(x, Int8)

    def values(x):
        return x.values if is_int8(x) else x

    return jax.tree.map(values, params, is_leaf=is_int8)


def load_frozen(lora, config, parallel):
    """Loads the weights to which LoRA adds: ({'weights', 'scale'} for TrainState.frozen, their
    checksum). lora: what a checkpoint says of LoRA; see load_base."""
    change = quantize_param if lora['quantize'] else None
    weights, crc = load_base(lora, config, parallel, change)
    scale = parallel.device_put(np.float32(lora['alpha'] / lora['rank']))
    return {'weights': weights, 'scale': scale}, crc


def load_merged(lora, config, parallel, updates):
    """Loads the parameters of a LoRA run with its updates added to the weights, in float32; see
    load_base."""
    updates = flatten_dict(updates)

    def change(path, array):
        if lora['quantize']:
            array = quantize_param(path, array)
        return merge(path, array, lora, updates)

    return load_base(lora, config, parallel, change)[0]


def merge_updates(weights, lora, updates):
    """Returns what load_merged does, given the weights of `frozen` and the updates in the memory
    of the host."""
    updates = flatten_dict(updates)
    merged = {}
    for path, array in flatten_dict(weights).items():
        merged[path] = merge(path, array, lora, updates)
    return unflatten_dict(merged)


def merge(path, array, lora, updates):
    """Adds its update to a frozen parameter, if it has one: float32. updates: {path: array}."""
    # Of int8 a row has a scale, and a kernel is [out, in].
    if isinstance(array, Int8):
        array = np.asarray(array.values, np.float32) * np.asarray(array.scale)[..., None]
        if path[-1] == 'kernel':
            array = array.swapaxes(-1, -2)
    if (*path, 'a') in updates:
        a = np.asarray(updates[*path, 'a'])
        b = np.asarray(updates[*path, 'b'])
        array = array + lora['alpha'] / lora['rank'] * (a @ b)
    return np.asarray(array, np.float32)


def load_base(lora, config, parallel, change):
    """Loads the weights of the model that LoRA updates, as load_weights does. Raises UserError if
    it has moved or changed."""
    check_place(lora)
    params, crc = load_start_weights(lora['base'], config, parallel, change)
    check_checksum(lora, crc)
    return params, crc


def check_place(lora):
    """Raises UserError if the model that LoRA updates has moved."""
    base = lora['base']
    has_gone = os.path.isabs(base) and not os.path.exists(base)
    if is_url(base):
        has_gone = not is_checkpoint(base)
    if has_gone:
        raise UserError(f'{base}, the model that LoRA has updated, does not exist; name its new '
                        'place with --base=FOLDER')


def check_checksum(lora, crc):
    """Raises UserError if this is not the checksum of the model that LoRA updates."""
    if lora['checksum'] not in (None, crc):
        raise UserError(f"{lora['base']} has other weights than those that LoRA was trained with; "
                        'put these back, or name where they are with --base=FOLDER')


def move_base(lora, base):
    """Returns what a checkpoint says of LoRA, with the place where its base is now; '' is the same
    place. Raises UserError for a base without LoRA."""
    if not base:
        return lora
    if not lora:
        raise UserError('base is for a LoRA run, and this one is not')
    path = full_path(base)
    if is_run(path):  # of its checkpoints the one that LoRA has updated
        path = os.path.join(path, 'ckpt', os.path.basename(lora['base']))
    return {**lora, 'base': path}


def full_path(source):
    """Returns the absolute path of a model's folder or file, which a checkpoint can remember; a
    hub's name as it is."""
    on_disk = os.path.expanduser(source)
    return os.path.abspath(on_disk) if os.path.exists(on_disk) else source


# -----------------------------------------------------------------------------
# runs, with and without LoRA

def choose_run(out_dir, which='latest', **options):
    """choose_checkpoint, of those whose model this version knows and which hold all its layers."""
    return choose_checkpoint(out_dir, which, check_model=check_saved_model, **options)


def check_saved_model(model, step):
    """Raises an exception if the checkpoint in the folder `step` does not hold this model, before
    anything is made for each of its layers."""
    for field in dataclasses.fields(GPTConfig):
        if field.name in model:  # earlier versions had fewer
            check_field(field, model[field.name])
    config = GPTConfig(**model)
    layers = saved_layers(step)
    if layers is not None:
        check_layers(config, layers, step)


def check_field(field, value):
    """Raises ValueError for a value of another type than that of the default of this field of
    GPTConfig, as JSON has it, or for a number that is too large."""
    kind = type(field.default)
    # In JSON bool, int and str are themselves, tuples are lists, and whole floats may be ints.
    in_json = {float: NUMBER, tuple: list, type(None): (dict, type(None))}
    is_of_kind = isinstance(value, in_json.get(kind, kind))
    is_fitting = is_of_kind and isinstance(value, bool) == (kind is bool)
    is_too_large = isinstance(value, NUMBER) and not abs(value) < 2**31  # or NaN
    if not is_fitting or is_too_large:
        raise ValueError(f'{field.name} of its model is {str(value)[:100]!r}')


class OnHost:
    """Stands for a layout over devices where parameters stay in the memory of the host."""

    @staticmethod
    def device_put(tree):
        return tree

    @staticmethod
    def abstract_state(make, *args):
        """Returns a tree like make(*args), which is not run, of arrays with any content."""
        tree = jax.eval_shape(lambda: make(*args))
        return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), tree)


def load_start_weights(source, config, parallel, change=None):
    """Loads the parameters from which a run starts, as load_weights does: of a pretrained model, or
    of the checkpoint of a run in the folder out_dir/ckpt/ITERATION, with LoRA's updates merged."""
    if not is_checkpoint(source):
        return load_weights(source, config, parallel, change)

    # the checkpoint as numpy arrays
    out_dir, step = split_checkpoint(source)
    meta = open_checkpoint(out_dir, step, ('params', 'meta'), check_saved_model)
    saved = GPTConfig(**meta['model'])
    params = restore_params(out_dir, step, saved, meta.get('lora'), OnHost())
    if meta.get('lora'):
        params = load_merged(meta['lora'], saved, OnHost(), params)

    # one parameter after the other to its devices, in the order of load_pretrained: so a folder to
    # which the run is exported has the same checksum
    place = Placing(config, parallel, change)
    params = flatten_dict(params)
    placed = {}
    for path in largest_first(saved):
        placed[path] = place(path, params[path])
    return unflatten_dict(placed), place.crc


def restore_params(out_dir, step, config, lora, parallel):
    """Restores the parameters of a checkpoint, or LoRA's updates alone if it is of a LoRA run, where
    `parallel` puts them. config, lora: what its metadata says. Raises UserError if they make no
    model, or if it does not fit."""
    try:
        state = parallel.abstract_state(
            state_creator(lora), jax.random.key(0), config, optax.identity())
    except (OverflowError, TypeError, ValueError) as error:
        raise UserError(f'checkpoint {step} in {out_dir} is of no model that can be built: '
                        f'{error}') from error
    return restore_items(out_dir, step, {'params': state.params})['params']


def load_run(out_dir, which='best', parallel=None, base=''):
    """Loads a run's model: (config, params, metadata) of its best or latest checkpoint.

    The params are sharded as `parallel` says (by default, on the first device), with LoRA's
    updates merged. base: see move_base. Raises UserError if there is no checkpoint."""
    parallel = parallel or setup_distributed_training(jax.devices()[:1])
    config, params, lora, meta = restore_run(out_dir, which, parallel, base)
    if lora:
        params = load_merged(lora, config, parallel, params)
    return config, params, meta


def restore_run(out_dir, which, parallel, base):
    """Loads what a run has trained: (config, params, what move_base returns, metadata) of its best
    or latest checkpoint. With LoRA params holds the updates alone. Raises UserError if there is no
    checkpoint."""
    step, meta = choose_run(out_dir, which, items=('params', 'meta', 'metrics'))
    config = GPTConfig(**meta['model'])
    lora = move_base(meta.get('lora'), base)
    params = restore_params(out_dir, step, config, lora, parallel)
    return config, params, lora, meta


def load_updates(out_dir, which='best', base=''):
    """Loads what a LoRA run has trained, for save_adapter: (config, updates in the memory of the
    host, what the checkpoint says of LoRA, metadata).

    The arguments are those of load_run. Raises UserError for a run without LoRA, for a model that
    peft cannot load, and for one that has moved or changed: peft adds an adapter to any weights of
    its shapes."""
    parallel = setup_distributed_training(jax.devices()[:1])
    config, updates, lora, meta = restore_run(out_dir, which, parallel, base)
    if not lora:
        raise UserError(f'{out_dir} was not trained with LoRA, so it has no adapter: export it '
                        'with --folder')
    check_place(lora)
    config_of_base(lora['base'])
    check_checksum(lora, checksum_of_weights(lora['base'], config))
    return config, jax.device_get(updates), lora, meta
