"""The parts of training: schedule, optimizer, objectives, state, training step, evaluation step and
evaluation."""
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training import train_state
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from jax_devices.layout import Layout
from jax_devices.layout import pmap_train_step, setup_distributed_training  # noqa: F401, public here
from jax_devices.setup import (  # noqa: F401, public here
    check_device_availability, setup_jax_environment)
from jax_flags import CHOICES, UserError, ceil_div, check_choice
from jax_ops.matmul import LowRank, map_nodes, without_scales
from jax_run.checkpoints import load_checkpoint, save_checkpoint  # noqa: F401, public here
from jax_run.sources import get_batch_jax  # noqa: F401, public here
from jax_transformer import GPT, WEIGHTS, GPTConfig, count_params, init_params

DROPOUT = 1  # folded into the seed's key, so that dropout has its own numbers; sources.DATA is 0

# -----------------------------------------------------------------------------
# schedule

class Schedule(struct.PyTreeNode):
    """The learning rate as a function of the number of updates made, schedule(n). The float32
    fields are arguments of the compiled step, so that a change of rate or length does not recompile
    the step.

    XLA may round x / y differently if y is an argument than if y is a constant. Therefore
    create_learning_rate_schedule computes all quotients beforehand. Compiled code only multiplies
    and adds, so the rate has the same bits as with constant fields."""
    peak: Any  # learning_rate
    first_less_peak: Any  # the first rate minus the peak
    peak_less_min: Any
    min_rate: Any
    min_share: Any  # min_lr / learning_rate
    rest_share: Any  # 1 - min_share
    warmup_iters: Any
    per_warmup: Any  # 1 / warmup_iters
    decay_from: Any  # the number of updates before the decay
    decay_iters: Any
    per_decay: Any  # 1 / decay_iters
    name: str = struct.field(pytree_node=False)  # a key of SCHEDULES, or '' for peak throughout

    def __call__(self, n: Array | int) -> Array:
        if not self.name:
            return jnp.float32(self.peak)
        n_warm = jnp.clip(n, 0, self.warmup_iters)
        warm_up = self.first_less_peak * (1 - n_warm * self.per_warmup) + self.peak
        return jnp.where(n < self.warmup_iters, warm_up, SCHEDULES[self.name](self, n))


def cosine(schedule: Schedule, n: Array | int) -> Array:
    """Returns the learning rate after n updates: nanoGPT's cosine from the peak to the minimum."""
    n_decayed = jnp.minimum(n - schedule.decay_from, schedule.decay_iters)
    share = 0.5 * (1 + jnp.cos(jnp.pi * n_decayed * schedule.per_decay))
    return schedule.peak * (schedule.rest_share * share + schedule.min_share)


def linear(schedule: Schedule, n: Array | int) -> Array:
    """Returns the learning rate after n updates: the peak until schedule.decay_from, then a linear
    decay to the minimum."""
    n_decayed = jnp.clip(n - schedule.decay_from, 0, schedule.decay_iters)
    rate = schedule.peak_less_min * (1 - n_decayed * schedule.per_decay) + schedule.min_rate
    rate = jnp.maximum(rate, schedule.min_rate)  # rounding ends below
    return jnp.where(n < schedule.decay_from, schedule.peak, rate)


def constant(schedule: Schedule, n: Array | int) -> Array:
    """Returns the peak, whatever n is."""
    return schedule.peak


SCHEDULES = {'cosine': cosine, 'linear': linear, 'wsd': linear, 'constant': constant}


def create_learning_rate_schedule(learning_rate: float, *, decay_lr: bool = True,
                                  warmup_iters: int = 0, lr_decay_iters: int = 0,
                                  min_lr: float = 0.0, lr_schedule: str = 'cosine') -> Schedule:
    """Makes a Schedule, a function of the number of updates that returns the learning rate.

    The rate warms up linearly from learning_rate / (warmup_iters + 1) to learning_rate in
    warmup_iters updates, follows nanoGPT's cosine down to min_lr at lr_decay_iters updates, and
    stays at min_lr.
    lr_schedule: 'linear' decays linearly instead; 'wsd' (warm-up, stable, decay; arXiv:2404.06395)
    decays linearly in the last fifth of the updates between warm-up and lr_decay_iters; 'constant'
    stays at learning_rate after the warm-up.
    decay_lr: False keeps the rate at learning_rate throughout, without a warm-up.
    Raises UserError for an unknown schedule or a decay that ends within the warm-up."""
    check_choice('lr_schedule', lr_schedule, SCHEDULES)
    decay_iters = lr_decay_iters - warmup_iters
    if decay_lr and lr_schedule != 'constant' and decay_iters <= 0:
        raise UserError(f'lr_decay_iters={lr_decay_iters} must be more than '
                        f'warmup_iters={warmup_iters}: add --warmup_iters={lr_decay_iters // 10}')
    if lr_schedule == 'wsd':
        decay_iters = ceil_div(decay_iters, 5)
    min_share = min_lr / learning_rate if learning_rate else 0.0
    numbers: dict[str, Any] = {
        'peak': learning_rate,
        'first_less_peak': learning_rate / (warmup_iters + 1) - learning_rate,
        'peak_less_min': learning_rate - min_lr,
        'min_rate': min_lr,
        'min_share': min_share,
        'rest_share': 1 - min_share,
        'warmup_iters': warmup_iters,
        'per_warmup': 1 / np.float32(warmup_iters or 1),
        'decay_from': lr_decay_iters - decay_iters,
        'decay_iters': decay_iters,
        'per_decay': 1 / np.float32(decay_iters or 1)}
    numbers = {name: np.float32(value) for name, value in numbers.items()}
    return Schedule(**numbers, name=lr_schedule if decay_lr else '')


def fitting_warmup(warmup_iters: int, n_iters: int) -> int:
    """Returns warmup_iters if it is less than n_iters, else n_iters // 10."""
    return warmup_iters if warmup_iters < n_iters else n_iters // 10


# -----------------------------------------------------------------------------
# optimizer: gradients to updates, by AdamW, and by Muon for the matrices of the blocks

class Group(NamedTuple):
    """How the parameters of a group are trained."""
    is_decayed: bool  # whether weight decay applies
    has_muon: bool  # with --optimizer=muon; the others have AdamW


GROUPS = {
    'embedding': Group(is_decayed=True, has_muon=False),  # wte, wpe
    'head': Group(is_decayed=True, has_muon=False),  # lm_head, if it is not tied to wte
    'matrix': Group(is_decayed=True, has_muon=True),  # matrices of the blocks, except the router's
    'router': Group(is_decayed=True, has_muon=False),
    'update': Group(is_decayed=True, has_muon=False),  # LoRA's a and b
    'vector': Group(is_decayed=False, has_muon=False)}  # norms and biases, also those of experts


def group_of(path: tuple, p: Array) -> str:
    """Returns the group of a parameter, a key of GROUPS, from the parameter's path in the tree and
    its number of dimensions."""
    name = path[-1].key
    if name == 'bias' or p.ndim < 2:
        return 'vector'
    if name in ('a', 'b'):
        return 'update'
    if name == 'lm_head':
        return 'head'
    if len(path) == 1:  # a table outside of the blocks: wte, wpe
        return 'embedding'
    return 'router' if path[-2].key == 'router' else 'matrix'


def create_optimizer_with_schedule(schedule: Callable, *, beta1: float = 0.9, beta2: float = 0.95,
                                   weight_decay: float = 0.1,
                                   optimizer: str = 'adamw') -> optax.GradientTransformation:
    """Makes the optax optimizer: AdamW (arXiv:1711.05101), or Muon for the matrices of the blocks.

    schedule: a function of the number of updates made, which returns the learning rate.
    beta1, beta2: those of AdamW.
    weight_decay: applies to the groups with is_decayed in GROUPS, with both optimizers.
    optimizer: 'adamw' is AdamW for all parameters. 'muon' is Muon for the matrices of the blocks
    (groups with has_muon in GROUPS) and AdamW for all other parameters, both at the same learning
    rate.

    The optimizer's update() accepts the keyword argument `schedule`, which replaces the `schedule`
    given here. The training step passes a Schedule there. A Schedule is a pytree and is an argument
    of the compiled step, so another learning rate does not recompile the step.

    The tree of the optimizer's state is part of the file format of checkpoints. Gradients are
    clipped elsewhere, see clip_gradients. Raises UserError for an unknown optimizer."""
    check_choice('optimizer', optimizer, CHOICES['optimizer'])

    def decay_mask(params):
        return jax.tree.map_with_path(lambda *leaf: GROUPS[group_of(*leaf)].is_decayed, params)

    def optimizers(params):
        return jax.tree.map_with_path(
            lambda *leaf: 'muon' if GROUPS[group_of(*leaf)].has_muon else 'adamw', params)

    adamw = optax.chain(
        optax.scale_by_adam(b1=beta1, b2=beta2, eps=1e-8),
        optax.add_decayed_weights(weight_decay, decay_mask),
        scale_by_schedule(schedule))
    if optimizer == 'adamw':
        return adamw
    from jax_ops.muon import orthogonalize
    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        orthogonalize,
        optax.add_decayed_weights(weight_decay),  # no mask: Muon gets matrices only
        scale_by_schedule(schedule))
    return optax.partition({'muon': muon, 'adamw': adamw}, optimizers)


def scale_by_schedule(default: Callable) -> optax.GradientTransformation:
    """Makes optax.scale_by_learning_rate(default) with one addition. Its update() accepts the
    keyword argument `schedule`, which replaces `default`. See create_optimizer_with_schedule."""
    def update(updates, state, params=None, *, schedule=None, **more):
        return optax.scale_by_learning_rate(schedule or default).update(updates, state)

    return optax.GradientTransformationExtraArgs(
        optax.scale_by_learning_rate(default).init, update)


def clip_gradients(grads: dict, max_norm: float) -> tuple[dict, Array]:
    """Scales gradients down to a global norm of at most max_norm, as torch's clip_grad_norm_ does;
    max_norm=0 does not clip. Returns (clipped gradients; norm before clipping)."""
    norm = optax.tree.norm(grads)
    if max_norm:
        scale = jnp.minimum(1, max_norm / (norm + 1e-6))
        grads = optax.tree.scale(scale, grads)
    return grads, norm


# -----------------------------------------------------------------------------
# objectives: the loss of a batch

@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss that a training step minimizes, and the sums that an evaluation measures.

    The functions `means` and `sums` have the arguments (loss_BxT, batch), and return {name:
    scalar}. loss_BxT is the model's loss of each token. batch is {'x', 'y' [B, T], ...}.
    means: for training. Returns the means over the batch. The step minimizes the one named 'loss'.
    sums: for evaluation. Returns the sums over the sequences with is_row [B] = 1. Sequences with
    is_row = 0 only fill up the last batch. In DPO, a pair has two sequences but only one value, so
    `sums` adds the value of each pair twice. The caller divides the sums by the number of
    sequences, which gives the mean over the pairs.
    metrics: the names that a training step returns and logs.
    has_reference: whether the batch needs 'reference_loss' [B, T]: the loss of each token, computed
    with the model without LoRA's updates and without dropout."""
    means: Callable
    sums: Callable
    metrics: tuple[str, ...] = ('loss',)
    has_reference: bool = False


def language_model_means(loss_BxT: Array, batch: dict) -> dict:
    """Returns {'loss': the mean over all tokens}. If the batch has 'weight' [B, T], each token's
    loss is first multiplied by the token's weight."""
    if 'weight' in batch:
        loss_BxT = loss_BxT * batch['weight']
    return {'loss': loss_BxT.mean()}


def language_model_sums(loss_BxT: Array, batch: dict) -> dict:
    """Returns {'loss': the sum over the sequences of each sequence's mean loss}. The mean of a
    sequence is the sum of its T token losses, divided by T. Sequences with is_row = 0, which only
    fill up the batch, add 0.

    The batch may have two more arrays [B, T], which are 0 in sequences that only fill up the batch:
    - 'weight': the loss of each token is first multiplied by the token's weight. The mean still
      divides by T.
    - 'byte_weight': the weights for bits per byte, a copy of 'weight' (1 if there is no 'weight'),
      but 0 for tokens that stand for no bytes of text. With this array, the result has a second
      sum, 'byte_loss', which is computed as 'loss' is, with these weights in place of 'weight'."""
    if 'weight' in batch:
        sums = {'loss': (loss_BxT * batch['weight']).mean(-1).sum()}
    else:
        sums = {'loss': (loss_BxT.mean(-1) * batch['is_row']).sum()}
    if 'byte_weight' in batch:
        sums['byte_loss'] = (loss_BxT * batch['byte_weight']).mean(-1).sum()
    return sums


language_model = Objective(language_model_means, language_model_sums)


def dpo(beta: float) -> Objective:
    """Makes the objective of DPO (arXiv:2305.18290), for pairs of answers: sequence 2 p of a batch
    is the chosen answer of pair p, and sequence 2 p + 1 the rejected answer.

    The gain of an answer is its log probability by the model minus its log probability by the
    reference, the model without LoRA's updates. The margin of a pair is beta * (gain of the chosen
    answer - gain of the rejected answer). The loss is -log sigmoid(margin). accuracy is 1 where the
    margin is positive, and 1/2 where it is 0, as in all pairs before the first update."""
    def terms(loss_BxT, batch):
        gain_BxT = (batch['reference_loss'] - loss_BxT) * batch['weight']
        gain_Px2 = gain_BxT.sum(-1).reshape(-1, 2)
        margin_P = beta * (gain_Px2[:, 0] - gain_Px2[:, 1])
        return {
            'loss': -jax.nn.log_sigmoid(margin_P),
            'margin': margin_P,
            'accuracy': jnp.heaviside(margin_P, 0.5)}

    def means(loss_BxT, batch):
        return {name: term_P.mean() for name, term_P in terms(loss_BxT, batch).items()}

    def sums(loss_BxT, batch):
        is_row_Px2 = batch['is_row'].reshape(-1, 2)
        found = terms(loss_BxT, batch)
        return {name: (term_P[:, None] * is_row_Px2).sum() for name, term_P in found.items()}

    return Objective(means, sums, metrics=('loss', 'margin', 'accuracy'), has_reference=True)


# -----------------------------------------------------------------------------
# the state, with LoRA or without

class TrainState(train_state.TrainState):
    """flax's TrainState (step, params, opt_state, tx) with more fields:"""
    # {'scale': float32, 'good_steps': int32} of float16; None elsewhere
    loss_scale: dict | None = None
    ema: dict | None = None  # the running mean of params, with --ema; a set of weights of its own
    # LoRA's base, {'weights', 'scale'}, see load_frozen
    frozen: dict | None = None
    # used in place of the optimizer's schedule; made from the run's flags
    schedule: Schedule | None = None

    def weight_sets(self) -> dict[str, dict]:
        """Returns {name: tree} of the sets of weights that this state has, in the order of
        WEIGHTS."""
        sets = {name: getattr(self, name) for name in WEIGHTS}
        return {name: tree for name, tree in sets.items() if tree is not None}

    @property
    def weights(self) -> dict:
        """Returns the set of weights to evaluate, sample and export: the last of weight_sets."""
        return list(self.weight_sets().values())[-1]


def create_train_state(rng: Array, config: GPTConfig, tx: optax.GradientTransformation,
                       lora_rank: int = 0) -> TrainState:
    """Returns a TrainState with newly initialized float32 parameters and the state of the optax
    optimizer `tx` for them.

    lora_rank: if it is not 0, the parameters are LoRA's updates of this rank (see create_updates),
    and load_frozen fills in `frozen`. In that case call this function under jit. XLA then does not
    compute the model's own parameters, because only their shapes are used."""
    params = init_params(rng, config)
    if lora_rank:
        params = create_updates(rng, params, lora_rank)
    loss_scale = initial_loss_scale() if config.dtype == 'float16' else None
    # no apply_fn: it would be another object in each state, and a compiled step accepts only one
    state = TrainState.create(apply_fn=None, params=params, tx=tx, loss_scale=loss_scale)
    # not flax's weakly typed 0, which would trigger a second compilation
    return state.replace(step=jnp.int32(0))


def initial_loss_scale() -> dict:
    """Returns the initial state of float16's loss scale. 'scale': the loss scale, 2**16 as in
    torch.amp.GradScaler. 'good_steps': 0, the number of updates without an overflow
    since the scale last changed."""
    return {'scale': jnp.float32(2**16), 'good_steps': jnp.int32(0)}


def create_updates(rng: Array, params: dict, rank: int) -> dict:
    """Returns LoRA's updates of the model with the parameters `params`: a tree that has {'a': [I,
    rank], 'b': [rank, O]} in place of every kernel [I, O] of attention and MLPs. All other
    parameters, and the kernels of routers and experts, are left out. a is random and b is zero, so
    that the first forward pass gives the same as the base model."""
    updates = {}
    for i, (path, kernel) in enumerate(flatten_dict(params).items()):
        is_matrix = path[-1] == 'kernel' and kernel.ndim == 2
        if is_matrix and path[-2] != 'router':
            n_in, n_out = kernel.shape
            a = jax.random.normal(jax.random.fold_in(rng, i), (n_in, rank)) * n_in**-0.5
            updates[path] = {'a': a, 'b': jnp.zeros((rank, n_out))}
    return unflatten_dict(updates)


def model_params(params: dict, frozen: dict) -> dict:
    """Returns the parameters of the model: the weights in `frozen` (of a TrainState), joined with
    LoRA's updates `params`. A kernel that has updates becomes a LowRank."""
    def join(weights, updates):
        if updates.keys() == {'a', 'b'}:
            return LowRank(weights, **updates, scale=frozen['scale'])
        joined = dict(weights)
        for name in updates:
            joined[name] = join(weights[name], updates[name])
        return joined

    return join(frozen['weights'], params)


def base_params(params: dict) -> dict:
    """Returns the parameters of the base model, without LoRA's updates. params: the result of
    model_params, with a LowRank for each trained kernel."""
    return map_nodes(LowRank, lambda kernel: kernel.base, params)


def count_frozen(frozen: dict | None) -> int:
    """Counts the parameters of LoRA's base model as count_params does, without the scales of int8.
    Returns 0 if `frozen` is None, that is, without LoRA."""
    return count_params(without_scales(frozen['weights'])) if frozen else 0


# -----------------------------------------------------------------------------
# the training step

def split_batch(gradient_accumulation_steps: int, batch_size: int,
                n_devices: int) -> tuple[int, int]:
    """Returns (micro-steps; micro-batch size) of each device. The devices first divide the
    micro-steps among them. If more devices are left, they also divide the sequences of a
    micro-batch. Example: 8 devices compute 4 micro-steps of 12 sequences: two devices for each
    micro-step, each with 6 of its sequences, (1; 6).

    Raises UserError if the devices cannot share the sequences equally."""
    # Some devices compute different micro-steps, the others different sequences of a micro-step.
    step_shards = math.gcd(gradient_accumulation_steps, n_devices)
    batch_shards = n_devices // step_shards
    if batch_size % batch_shards:
        valid = [n for n in range(1, n_devices + 1)
                 if batch_size % (n // math.gcd(gradient_accumulation_steps, n)) == 0]
        raise UserError(
            f'gradient_accumulation_steps={gradient_accumulation_steps} x batch_size={batch_size} '
            f'sequences cannot be shared equally by {n_devices} devices; these numbers of devices '
            f'can: {valid}; or make batch_size a multiple of {batch_shards}')
    return gradient_accumulation_steps // step_shards, batch_size // batch_shards


def make_train_step(config: GPTConfig, objective: Objective, layout: Layout, *, seed: int,
                    grad_clip: float, loss_chunk: int = 0, ema: float = 0.0) -> Callable:
    """Makes train_step(state, batch) -> (state, metrics), for layout.jit_step.

    layout: the Layout of setup_distributed_training. seed: the seed of dropout. The dropout mask in
    a layer depends only on (seed, seq_id), not on devices or micro-batches. grad_clip: see
    clip_gradients. loss_chunk: the number of positions whose logits are materialized at a time; 0
    is all. ema: the decay of state.ema (see running_mean).

    batch: M micro-batches, averaged into one update. The batch has x and y [M, B, T]; seq_id [M,
    B], the indices of the sequences in the run; and, if the data has them, weight, start and
    padding [M, B, T].
    metrics: float32 scalars. Means over micro-batches and devices: the objective's metrics, and
    'balance' if there is a load-balancing loss of experts. Not means: grad_norm (before clipping),
    lr, and, in float16, loss_scale. A metric that you add here is logged without more code.

    Raises UserError if loss_chunk is below block_size and does not divide block_size."""
    # with pmap or zero=1, all_reduced adds the reduction over the devices; else it returns
    # sum_gradients itself
    sum_gradients = make_gradients(config, objective, layout, seed, loss_chunk)
    all_reduced_gradients = layout.all_reduced(sum_gradients)

    def train_step(state, batch):
        """Makes one update of the state."""
        n_micro = len(batch['x'])
        # Each micro-batch's loss is multiplied by `scale`; the gradients are divided by it below.
        # In float16, `scale` is the loss scale divided by the number of mean losses that the step
        # computes. So the gradients of a token do not depend on how the batch is split (n_losses).
        scale = 1.0
        if state.loss_scale:
            scale = state.loss_scale['scale'] / (n_micro * layout.n_losses)

        # forward and backward, summed over the micro-batches; the sums of each replica's own
        # sequences are all-reduced (on a mesh XLA inserts the all-reduces)
        grads, totals = all_reduced_gradients(state.params, state.frozen, batch, scale)
        params = state.params
        # with ZeRO, each device updates its shard
        grads, params = layout.shard_update(grads, params)

        # clip the mean gradients
        with jax.named_scope('clip'):
            grads = jax.tree.map(lambda g: g / (n_micro * scale), grads)
            grads, grad_norm = clip_gradients(grads, grad_clip)

        # update the parameters
        with jax.named_scope('optimizer'):
            options = {'schedule': state.schedule} if state.schedule else {}
            updates, opt_state = state.tx.update(grads, state.opt_state, params, **options)
            params = optax.apply_updates(params, updates)
        updated = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        if state.ema is not None:
            updated = updated.replace(ema=running_mean(state.ema, params, ema, state.step))

        # the metrics to log
        metrics = {name: total / n_micro for name, total in totals.items()}
        metrics['grad_norm'] = grad_norm
        if state.schedule:
            metrics['lr'] = state.schedule(state.step)
        if state.loss_scale:
            metrics['loss_scale'] = state.loss_scale['scale']
            updated = skip_overflow(state, updated, grad_norm)
        return updated, metrics

    return train_step


def running_mean(means: dict, params: dict, decay: float, n_updates: Array) -> dict:
    """Returns the next running mean of the weights, decay * mean + (1 - decay) * params. The decay
    is at most (1 + n) / (10 + n) after n = n_updates updates. So the first updates count more, and
    the initial weights are soon forgotten."""
    n = n_updates.astype(jnp.float32)
    share = jnp.minimum(decay, (1 + n) / (10 + n))
    return jax.tree.map(lambda mean, p: share * mean + (1 - share) * p, means, params)


def make_gradients(config: GPTConfig, objective: Objective, layout: Layout, seed: int,
                   loss_chunk: int) -> Callable:
    """Makes sum_gradients(params, frozen, batch, scale) -> (gradients; metrics), each summed over
    the micro-batches of a batch; see make_train_step. `scale` multiplies the loss, and so the
    gradients. Raises UserError if loss_chunk is below block_size and does not divide block_size."""
    if 0 < loss_chunk < config.block_size and config.block_size % loss_chunk:
        divisors = [n for n in range(1, config.block_size) if config.block_size % n == 0]
        raise UserError(f'loss_chunk={loss_chunk} does not divide block_size={config.block_size}; '
                        f'it may be one of {divisors}')
    names = list(objective.metrics)
    has_balance = config.moe is not None and config.moe.balance > 0
    if has_balance:
        names.append('balance')

    def sum_gradients(params, frozen, batch, scale):
        def micro_step(total, micro_batch):
            found = gradients(params, frozen, micro_batch, scale)
            return jax.tree.map(jnp.add, total, found), None

        # one micro-batch is no loop: that would cost another pass over the gradients
        if len(batch['x']) == 1:
            return gradients(params, frozen, jax.tree.map(lambda x: x[0], batch), scale)

        no_gradients = layout.shard_gradients(jax.tree.map(jnp.zeros_like, params))
        no_metrics = {name: jnp.zeros(()) for name in names}
        total, _ = jax.lax.scan(micro_step, (no_gradients, no_metrics), batch)
        return total

    def gradients(params, frozen, micro_batch, scale):
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, frozen, micro_batch, scale)
        return layout.shard_gradients(grads), metrics

    def loss_fn(params, frozen, micro_batch, scale):
        """Returns (loss times scale; metrics) of a micro-batch."""
        if frozen:
            params = model_params(params, frozen)
        dropout_key = jax.random.fold_in(jax.random.key(seed), DROPOUT)
        loss_BxT, sown = GPT(config).apply(
            {'params': params}, micro_batch['x'], micro_batch['y'], loss_chunk=loss_chunk,
            start_BxT=micro_batch.get('start'), padding_BxT=micro_batch.get('padding'),
            method='loss', deterministic=False, seq_id_B=micro_batch['seq_id'],
            rngs={'dropout': dropout_key}, mutable=['losses'])
        if objective.has_reference:
            reference = token_losses(config, loss_chunk, micro_batch, base_params(params))
            micro_batch = {**micro_batch, 'reference_loss': reference}
        metrics = objective.means(loss_BxT, micro_batch)
        # the loss that keeps experts equally busy
        metrics['balance'] = sum(jax.tree.leaves(sown))
        loss = (metrics['loss'] + metrics['balance']) * scale
        return loss, {name: metrics[name] for name in names}

    return sum_gradients


def token_losses(config: GPTConfig, loss_chunk: int, batch: dict, params: dict) -> Array:
    """Computes the loss of each token of a batch, float32 [B, T], without dropout. batch: x, y and,
    for packed rows, start [B, T]. loss_chunk: see make_train_step."""
    model = GPT(config).bind({'params': params})
    return model.loss(
        batch['x'], batch['y'], loss_chunk=loss_chunk, start_BxT=batch.get('start'))


def skip_overflow(state: TrainState, updated: TrainState, grad_norm: Array) -> TrainState:
    """Skips an update that overflows, and adapts the loss scale of float16, as torch.amp.GradScaler
    does.

    Returns `updated` if grad_norm is finite. If not, returns `state` with half of its loss scale.
    2000 good updates in a row double the scale. state.step counts only the updates made."""
    is_finite = jnp.isfinite(grad_norm)
    chosen = optax.tree.where(is_finite, updated, state)
    good_steps = jnp.where(is_finite, state.loss_scale['good_steps'] + 1, 0)
    growth = jnp.where(good_steps == 2000, 2.0, 1.0)
    factor = jnp.where(is_finite, growth, 0.5)
    return chosen.replace(loss_scale={
        'scale': state.loss_scale['scale'] * factor,
        'good_steps': good_steps % 2000})


@jax.jit
def all_finite(tree: Any) -> Array:
    """Returns whether all elements of all leaves are finite."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


# -----------------------------------------------------------------------------
# evaluation

def make_eval_step(config: GPTConfig, objective: Objective, *, loss_chunk: int = 0) -> Callable:
    """Makes eval_step(params, batch) -> {name: sum over the sequences, float32}, for
    layout.jit_eval_step; see Objective. loss_chunk: see make_train_step.

    batch: x and y [B, T]; is_row [B], 0 for sequences that do not count; and the other arrays that
    the objective reads."""
    def eval_step(params, batch):
        loss_BxT = token_losses(config, loss_chunk, batch, params)
        if objective.has_reference:
            reference = token_losses(config, loss_chunk, batch, base_params(params))
            batch = {**batch, 'reference_loss': reference}
        return objective.sums(loss_BxT, batch)

    return eval_step


def estimate_loss_jax(eval_step: Callable, params: dict, splits: dict, layout: Layout, *,
                      batch_size: int, eval_iters: int, token_bytes: np.ndarray | None = None,
                      stop_signal: Callable = lambda: 0) -> dict | None:
    """Evaluates the model with the parameters `params` on the sources in `splits`. Returns
    {'train': {'loss': loss}, 'val': {'loss': loss}}. Each loss is the mean over eval_iters *
    batch_size sequences.

    The sequences are the same at every evaluation, for any seed and number of devices, so that
    curves can be compared. If a source has a mask, the mean is over the tokens that count. The
    other metrics of the objective stand beside 'loss'.

    eval_step: layout.jit_eval_step(make_eval_step(...)), which evaluates batch_size sequences per
    device and call. splits: {'train': source, 'val': source}; a source is an object of a class of
    sources.py other than Mixture.
    token_bytes: number of bytes of each token id. If given, the results have 'bpb', the bits per
    byte of the tokens that count and have bytes. The results for preference pairs (a source of the
    class Pairs) never have 'bpb'.
    stop_signal: a function that returns a number, the same in all processes. Once this number is
    not 0, the evaluation ends and returns None.
    Raises UserError if the masks leave no token to evaluate, and for a token id outside the
    vocabulary."""
    results = {}
    stop = 0
    for split, source in splits.items():
        evaluation = source.evaluation(eval_iters * batch_size, token_bytes)
        n_rows = len(evaluation.places)
        per_call = batch_size * layout.n_data_shards
        totals = {}
        for first in range(0, n_rows, per_call):
            # this process's part of a batch; the last is filled up with rows that do not count
            rows = first + layout.local_rows(per_call)
            is_row = (rows < n_rows).astype(np.float32)
            batch = {**source.read(evaluation.places[rows % n_rows]), 'is_row': is_row}
            if 'weight' in batch:
                batch['weight'] = is_row[:, None] * batch['weight']
            if evaluation.has_special:  # else all tokens that count have bytes
                has_bytes = (token_bytes[batch['y']] > 0).astype(np.float32)
                batch['byte_weight'] = batch.get('weight', is_row[:, None]) * has_bytes

            if int(stop):  # one call late: reading it waits for the device
                return None
            stop = stop_signal()
            sums = eval_step(params, layout.shard_batch(batch, (batch_size,)))
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        totals = {name: float(total) for name, total in totals.items()}

        # the loss of the tokens that have bytes, if not all have
        byte_loss = totals.pop('byte_loss', totals['loss'])
        means = {name: total / n_rows / evaluation.share for name, total in totals.items()}
        if evaluation.n_bytes is not None:
            nats = byte_loss * source.block_size
            means['bpb'] = nats / math.log(2) / evaluation.n_bytes
        results[split] = means
    return results


def estimate_losses(state: TrainState, eval_step: Callable, sets: list, layout: Layout,
                    **options: Any) -> dict | None:
    """Evaluates the model of a TrainState (its `weights`) on the DataSets in `sets`. For one set,
    returns what estimate_loss_jax returns.

    For several sets, returns the means weighted by the sets' fractions, and also 'val_NAME', the
    validation results of the set NAME. Returns None once stop_signal() is not 0. options: options
    of estimate_loss_jax."""
    params = state.weights
    if state.frozen:
        params = model_params(params, state.frozen)
    found = []
    for one in sets:
        losses = estimate_loss_jax(eval_step, params, one.splits, layout, **options)
        if losses is None:
            return None
        found.append(losses)
    if len(sets) == 1:
        return found[0]
    results = {}
    for split, metrics in found[0].items():
        results[split] = {}
        for name in metrics:
            results[split][name] = sum(
                one.fraction * losses[split][name] for one, losses in zip(sets, found))
    for one, losses in zip(sets, found):
        results[f'val_{one.name}'] = losses['val']
    return results
