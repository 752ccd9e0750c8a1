"""Loads the weights of a run of train_jax.py. For a LoRA run there are two ways. To use the model,
LoRA's updates are merged into the base model. To go on training, only the base model is loaded
here, and it stays as it is."""
import os

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_devices.layout import setup_distributed_training
from jax_flags import UserError, is_url
from jax_ops.decode_weights import quantize_param
from jax_ops.matmul import as_kernel
from jax_pretrained import Placing, checksum_of_weights, config_of_base, largest_first, load_weights
from jax_run.checkpoints import is_checkpoint, open_checkpoint, run_folder, split_checkpoint
from jax_run.restore import restore_params, restore_run
from jax_transformer import WEIGHTS, GPTConfig


def load_frozen(lora, config, layout):
    """Loads the frozen weights of a LoRA run. Returns ({'weights', 'scale'} for TrainState.frozen;
    checksum of the weights). Matrices are int8 if the run has --quantize. scale is alpha / rank.
    lora: the LoRA entry of a checkpoint (see Model). Raises UserError as load_base does."""
    change = quantize_param if lora['quantize'] else None
    weights, crc = load_base(lora, config, layout, change)
    scale = layout.device_put(np.float32(lora['alpha'] / lora['rank']))
    return {'weights': weights, 'scale': scale}, crc


def load_merged(lora, config, layout, updates):
    """Loads the base model of a LoRA run and adds LoRA's `updates` to the weights of that model. If
    the run has --quantize, the base model's matrices are rounded to int8 first, as in training.
    Returns the parameters, float32. lora: the LoRA entry of a checkpoint (see Model). Raises
    UserError as load_base does."""
    updates = flatten_dict(updates)

    def change(path, array):
        if lora['quantize']:
            array = quantize_param(path, array)
        return merge(path, array, lora, updates)

    return load_base(lora, config, layout, change)[0]


def merge_updates(weights, lora, updates):
    """Adds LoRA's `updates` to frozen weights that are loaded already. Returns the parameters,
    float32, as load_merged does. weights: the frozen parameters, TrainState.frozen['weights'].
    updates: the trained matrices a and b, see create_updates. lora: the LoRA entry of a checkpoint,
    with the rank and alpha. Weights and updates are in the memory of the host."""
    updates = flatten_dict(updates)
    merged = {}
    for path, array in flatten_dict(weights).items():
        merged[path] = merge(path, array, lora, updates)
    return unflatten_dict(merged)


def merge(path, array, lora, updates):
    """Adds LoRA's update to one frozen parameter, if `updates` has an update of it. Returns the
    parameter in float32. path: the path of the parameter in the tree, a tuple of names. array: the
    frozen parameter. lora: the LoRA entry of a checkpoint. updates: {(*path, 'a'): array, (*path,
    'b'): array} of all parameters that have an update."""
    array = as_kernel(array).to_float32(path[-1] != 'kernel')
    if (*path, 'a') in updates:
        a = np.asarray(updates[*path, 'a'])
        b = np.asarray(updates[*path, 'b'])
        array = array + lora['alpha'] / lora['rank'] * (a @ b)
    return np.asarray(array, np.float32)


def load_base(lora, config, layout, change):
    """Loads the weights of LoRA's base model. Returns (weights; checksum), as load_weights does.
    lora: the LoRA entry of a checkpoint (see Model). change: see load_weights. Raises UserError if
    the base model has moved or changed."""
    check_place(lora)
    params, crc = load_start_weights(lora['base'], config, layout, change)
    check_checksum(lora, crc)
    return params, crc


def check_place(lora, remedy='name its new place with --base=FOLDER'):
    """Raises UserError if the base model of a LoRA run has moved, that is, if lora['base'] is an
    absolute path or a URL that no longer exists. remedy: the end of the message."""
    base = lora['base']
    has_gone = os.path.isabs(base) and not os.path.exists(base)
    if is_url(base):
        has_gone = not is_checkpoint(base)
    if has_gone:
        raise UserError(f'{base}, the model that LoRA has updated, does not exist; {remedy}')


def check_checksum(lora, crc):
    """Raises UserError if the base model is not the one that LoRA was trained with. crc: the
    checksum of the base model as it is now. lora['checksum']: its checksum in the training; None in
    older runs, for which nothing is compared."""
    if lora['checksum'] not in (None, crc):
        raise UserError(f"{lora['base']} has other weights than those that LoRA was trained with; "
                        'put these back, or name where they are with --base=FOLDER')


# -----------------------------------------------------------------------------
# runs, with and without LoRA

def load_start_weights(source, config, layout, change=None):
    """Loads the parameters that a run starts from. Returns (parameters; checksum), as load_weights
    does. source: a pretrained model, or the checkpoint of a run, out_dir/ckpt/ITERATION. If the
    checkpoint has LoRA's updates, they are merged into their base model. change: see
    load_weights."""
    if not is_checkpoint(source):
        return load_weights(source, config, layout, change)

    # the checkpoint as numpy arrays
    out_dir, step = split_checkpoint(source)
    meta = open_checkpoint(run_folder(out_dir), step, (*WEIGHTS, 'meta'))
    saved = GPTConfig(**meta['model'])
    params = restore_params(out_dir, step, saved, meta, OnHost())
    if meta.get('lora'):
        check_place(meta['lora'], f'put it back, or export {out_dir} to a folder, with --base=WHERE '
                    'THAT MODEL IS NOW, and name this folder with --base=FOLDER')
        params = load_merged(meta['lora'], saved, OnHost(), params)

    # move one parameter after the other to its devices, in the order of load_pretrained: so the
    # checksum is the same if the run is exported to a folder, and loaded from there
    place = Placing(config, layout, change)
    params = flatten_dict(params)
    placed = {}
    for path in largest_first(saved):
        placed[path] = place(path, params[path])
    return unflatten_dict(placed), place.crc


def load_run(out_dir, which='best', layout=None, base=''):
    """Loads a run's model from a checkpoint. Returns (config; params; metadata). which: 'best' or
    'latest'.

    The params are sharded as `layout` says (by default, on the first device), with LoRA's updates
    merged. base: a new path of the base model, if its folder was moved (see move_base); '' is the
    path in the checkpoint. Raises UserError if there is no checkpoint."""
    layout = layout or setup_distributed_training(jax.devices()[:1])
    config, params, lora, meta = restore_run(out_dir, which, layout, base)
    if lora:
        params = load_merged(lora, config, layout, params)
    return config, params, meta


def load_updates(out_dir, which='best', base=''):
    """Loads the updates of a LoRA run, for save_adapter. Returns (config; updates in the memory of
    the host; LoRA entry of the checkpoint; metadata).

    The arguments are those of load_run. Raises UserError for a run without LoRA, and for a base
    model that peft cannot load. Raises UserError also for a base model that has moved or changed,
    because peft would add the adapter to any weights of the same shapes."""
    layout = setup_distributed_training(jax.devices()[:1])
    config, updates, lora, meta = restore_run(out_dir, which, layout, base)
    if not lora:
        raise UserError(f'{out_dir} was not trained with LoRA, so it has no adapter: export it '
                        'with --folder')
    check_place(lora)
    config_of_base(lora['base'])
    check_checksum(lora, checksum_of_weights(lora['base'], config))
    return config, jax.device_get(updates), lora, meta


class OnHost:
    """A stand-in for a Layout, for callers that keep the parameters in the memory of the host
    instead of on devices. It has the two methods of a Layout that these callers need."""

    @staticmethod
    def device_put(tree):
        return tree

    @staticmethod
    def abstract_state(make, *args):
        """Returns a tree of numpy arrays with the shapes and dtypes of make(*args). The content of
        the arrays is undefined, because `make` is only traced, not computed."""
        tree = jax.eval_shape(lambda: make(*args))
        return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), tree)
