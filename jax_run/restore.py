"""Reads the parameters of a run, or LoRA's updates, from a checkpoint. jax_run/load.py merges the
updates into their base model."""
import os

import jax

from jax_flags import UserError
from jax_run.checkpoints import MODEL_ITEMS, choose_checkpoint, is_run, restore_items
from jax_transformer import GPTConfig, init_params


def restore_run(out_dir, which, layout, base):
    """Restores a checkpoint of a run. Returns (config, params, lora, metadata). lora: the settings
    of LoRA that the checkpoint's metadata have; None for a run without LoRA. With LoRA, params are
    only LoRA's updates (create_updates). which: 'best' or 'latest'. layout: a Layout or OnHost.
    base: the new path of LoRA's base model, see move_base; '' keeps the path that is in the
    checkpoint. Raises UserError if there is no checkpoint."""
    step, meta = choose_checkpoint(out_dir, which, items=MODEL_ITEMS)
    config = GPTConfig(**meta['model'])
    lora = move_base(meta.get('lora'), base) if base else meta.get('lora')
    params = restore_params(out_dir, step, config, meta, layout)
    return config, params, lora, meta


def restore_params(out_dir, step, config, meta, layout):
    """Restores the parameters of a checkpoint, sharded as `layout` says. For a LoRA run, restores
    only LoRA's updates. If the checkpoint has a running mean of the parameters (--ema), restores
    this mean instead of the parameters, because the mean is evaluated, sampled and exported.

    config: the model's config. meta: the checkpoint's metadata. Raises UserError if no model can be
    built from config and meta, or if the checkpoint does not fit that model."""
    try:
        params = layout.abstract_state(make_params, config, meta.get('lora'))
    except (OverflowError, TypeError, ValueError) as error:
        raise UserError(f'checkpoint {step} in {out_dir} describes a model that cannot be '
                        f'built: {error}') from error
    name = meta.get('weights', ['params'])[-1]
    return restore_items(out_dir, step, {name: params})[name]


def make_params(config, lora):
    """Initializes the parameters of a model, or in a LoRA run only LoRA's updates (create_updates).
    restore_params needs only the shapes of the parameters, so it traces this function without
    computing them. config: the model's config. lora: the LoRA entry of a checkpoint, None for a
    model without LoRA."""
    if not lora:
        return init_params(jax.random.key(0), config)
    from jax_train_utils import create_updates  # sampling needs no training
    return create_updates(jax.random.key(0), init_params(jax.random.key(0), config), lora['rank'])


def move_base(lora, base):
    """Returns `lora`, the LoRA entry of a checkpoint, with the place of its base model changed to
    `base`. base: a pretrained model, or the out_dir of the run whose checkpoint is LoRA's base
    model. Raises UserError if `lora` is None, that is, for a run without LoRA."""
    if not lora:
        raise UserError('base is for a LoRA run, and this one is not')
    path = full_path(base)
    if is_run(path):  # the checkpoint that LoRA has updated
        path = os.path.join(path, 'ckpt', os.path.basename(lora['base']))
    return {**lora, 'base': path}


def full_path(source):
    """Returns the absolute path of a model's folder or file. A checkpoint keeps this path, because
    it is valid in other working directories, too. Returns the name of a model on a hub
    unchanged."""
    on_disk = os.path.expanduser(source)
    return os.path.abspath(on_disk) if os.path.exists(on_disk) else source
