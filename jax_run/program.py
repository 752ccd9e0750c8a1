"""Puts together what runs on the devices: a config with its kernels chosen for a Layout, the
optimizer, and the compiled steps. train_jax.py, bench_jax.py and tools/plan.py use this module.
Decoding uses config_for_decoding (jax_devices/choose.py) instead."""
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import optax

from jax_devices.choose import choose_attention, with_experts
from jax_devices.layout import Layout
from jax_train_utils import (
    create_optimizer_with_schedule, language_model, make_eval_step, make_train_step)
from jax_transformer import GPTConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of training. Each option is a flag of train_jax.py and is described there."""
    seed: int = 1337
    optimizer: str = 'adamw'
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    ema: float = 0.0
    attention: str = 'auto'
    loss_chunk: int = 0
    scan_layers: bool = False
    remat: str = 'none'
    deterministic: bool = False

    @classmethod
    def from_flags(cls, flags):
        """Makes the Options from flags, {name: value}. Names that are not fields of Options are
        ignored."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: flags[name] for name in names if name in flags})


class Program(NamedTuple):
    """The config, the optimizer and the compiled steps of a training. assemble returns a
    Program."""
    config: GPTConfig  # as it is executed: with its attention and its way of computing experts
    reasons: dict  # {'attention': why, 'experts': why, of a model that has some}
    layout: Layout
    # The learning rate comes from state.schedule, an argument of the compiled step, so that another
    # schedule needs no compilation. The constant 0 in tx is never used
    tx: optax.GradientTransformation
    step: Callable  # (state, batch) -> (state, metrics), under jit or pmap
    eval_step: Callable  # (params, batch) -> sums


def assemble(config, layout, options, objective=language_model, *, packed=False):
    """Returns the Program that trains the model of `config` on the devices of a Layout.

    options: an Options. objective: an Objective of jax_train_utils. packed: whether rows of the
    data hold several conversations. Raises UserError if the devices cannot split or compute the
    model."""
    # the config, as it is executed
    attention, reason = choose_attention(
        options.attention, config, layout.devices[0], tensor=layout.sizes.tensor,
        context=layout.sizes.context, deterministic=options.deterministic, packed=packed)
    reasons = {'attention': reason}
    config = dataclasses.replace(
        config, attention=attention, scan_layers=options.scan_layers, remat=options.remat)
    config, more = with_experts(config, layout)
    layout.validate(config)

    # the optimizer; forward and backward of all micro-steps, clipping and the update are one
    # function, step(state, batch)
    tx = create_optimizer_with_schedule(
        optax.constant_schedule(0.0), beta1=options.beta1, beta2=options.beta2,
        weight_decay=options.weight_decay, optimizer=options.optimizer)
    step = layout.jit_step(make_train_step(
        config, objective, layout, seed=options.seed, grad_clip=options.grad_clip,
        loss_chunk=options.loss_chunk, ema=options.ema))
    eval_step = layout.jit_eval_step(make_eval_step(
        config, objective, loss_chunk=options.loss_chunk))
    return Program(config, {**reasons, **more}, layout, tx, step, eval_step)
