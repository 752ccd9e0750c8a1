"""What training is made of: the schedule, objectives, train and eval steps, evaluation."""
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_devices.setup import device_peak_flops
from jax_flags import CHOICES, UserError, ceil_div, check_choice
from jax_lora import base_params, count_frozen, model_params
from jax_transformer import GPT, count_params, estimate_mfu

# public here, defined elsewhere
from jax_devices.parallel import pmap_train_step, setup_distributed_training  # noqa: F401
from jax_devices.setup import check_device_availability, setup_jax_environment  # noqa: F401
from jax_files.checkpoints import load_checkpoint, save_checkpoint  # noqa: F401
from jax_files.sources import get_batch_jax  # noqa: F401
from jax_optimizers import create_optimizer_with_schedule  # noqa: F401

DROPOUT = 1  # the purpose of these random numbers, beside the seed; DATA, of sources.py, is 0

# -----------------------------------------------------------------------------
# schedule and clipping

def create_learning_rate_schedule(
        learning_rate, *, decay_lr=True, warmup_iters=0, lr_decay_iters=0, min_lr=0.0,
        lr_schedule='cosine'):
    """Makes a function of the number of updates that returns the learning rate.

    It warms up linearly from learning_rate / (warmup_iters + 1), follows nanoGPT's cosine to min_lr
    at lr_decay_iters, and is min_lr after that.
    lr_schedule: 'linear' decays linearly instead; 'wsd' (warm-up, stable, decay; arXiv:2404.06395)
    decays linearly in the last fifth; 'constant' never.
    decay_lr: False is learning_rate throughout, without a warm-up.
    Raises UserError for an unknown schedule or a decay that ends within the warm-up."""
    check_choice('lr_schedule', lr_schedule, CHOICES['lr_schedule'])
    if not decay_lr:
        return optax.constant_schedule(learning_rate)
    first = learning_rate / (warmup_iters + 1)
    warm_up = optax.linear_schedule(first, learning_rate, warmup_iters)
    stable = optax.constant_schedule(learning_rate)
    if lr_schedule == 'constant':
        return optax.join_schedules([warm_up, stable], [warmup_iters])
    decay_iters = lr_decay_iters - warmup_iters
    if decay_iters <= 0:
        raise UserError(f'lr_decay_iters={lr_decay_iters} must be more than '
                        f'warmup_iters={warmup_iters}')
    if lr_schedule == 'cosine':
        return optax.warmup_cosine_decay_schedule(
            first, learning_rate, warmup_iters, lr_decay_iters, min_lr)
    if lr_schedule not in ('linear', 'wsd'):
        raise ValueError(f'lr_schedule={lr_schedule} has no branch in '
                         'create_learning_rate_schedule')
    if lr_schedule == 'wsd':
        decay_iters = ceil_div(decay_iters, 5)
    linear = optax.linear_schedule(learning_rate, min_lr, decay_iters)

    def decay(step):
        return jnp.maximum(linear(step), min_lr)  # rounding ends below

    decay_from = lr_decay_iters - decay_iters
    return optax.join_schedules([warm_up, stable, decay], [warmup_iters, decay_from])


def clip_gradients(grads, max_norm):
    """Scales gradients down to a global norm of max_norm, as torch's clip_grad_norm_ does; 0 does
    not clip. Returns (gradients, their norm before)."""
    norm = optax.tree.norm(grads)
    if max_norm:
        scale = jnp.minimum(1, max_norm / (norm + 1e-6))
        grads = jax.tree.map(lambda g: g * scale, grads)
    return grads, norm


# -----------------------------------------------------------------------------
# objectives: what the loss of a batch is

@dataclasses.dataclass(frozen=True)
class Objective:
    """What a training step minimizes, and what an evaluation measures.

    Both functions take (loss_BxT, batch, params, losses_of): the model's loss of each token of the
    batch {'x', 'y' [B, T], ...} with the parameters `params`, and a function losses_of(other
    params) that computes the same of another model, without dropout: DPO's reference. They return
    {name: scalar}.
    means: over the samples of a training batch. The step minimizes 'loss' and logs `metrics`.
    sums: over the sequences of an evaluation's batch whose is_row [B] is 1; the others fill up the
    last batch. A sample of several sequences counts as often as it has sequences."""
    means: Callable
    sums: Callable
    metrics: tuple[str, ...] = ('loss',)


def language_model_means(loss_BxT, batch, params, losses_of):
    """Takes the mean loss of the tokens, times their 'weight' [B, T] if the batch has one."""
    if 'weight' in batch:
        loss_BxT = loss_BxT * batch['weight']
    return {'loss': loss_BxT.mean()}


def language_model_sums(loss_BxT, batch, params, losses_of):
    """Adds up the mean losses of the sequences.

    'weight' [B, T], if the batch has one, is 0 in sequences that fill it up; so is 'spelled'
    [B, T], the weight of tokens that have bytes, whose sum is returned in addition."""
    if 'weight' in batch:
        sums = {'loss': (loss_BxT * batch['weight']).mean(-1).sum()}
    else:
        sums = {'loss': (loss_BxT.mean(-1) * batch['is_row']).sum()}
    if 'spelled' in batch:
        sums['spelled'] = (loss_BxT * batch['spelled']).mean(-1).sum()
    return sums


language_model = Objective(language_model_means, language_model_sums)


def dpo(beta):
    """Makes the objective of DPO (arXiv:2305.18290), for pairs of answers: sequences 2 p and
    2 p + 1 of a batch are the chosen and the rejected answer of pair p.

    beta: how much the margin counts: beta times the gain in log probability, over the reference,
    of the chosen answer less that of the rejected one. The reference is the model without LoRA's
    updates. The loss is -log sigmoid(margin); accuracy is 1 where the margin is positive, and 1/2
    where it is 0: before the first update, in all pairs."""
    def terms(loss_BxT, batch, params, losses_of):
        reference_BxT = losses_of(base_params(params))
        gain_Px2 = ((reference_BxT - loss_BxT) * batch['weight']).sum(-1).reshape(-1, 2)
        margin_P = beta * (gain_Px2[:, 0] - gain_Px2[:, 1])
        return {
            'loss': -jax.nn.log_sigmoid(margin_P),
            'margin': margin_P,
            'accuracy': jnp.heaviside(margin_P, 0.5)}

    def means(*args):
        return {name: term_P.mean() for name, term_P in terms(*args).items()}

    def sums(loss_BxT, batch, params, losses_of):
        is_row_Px2 = batch['is_row'].reshape(-1, 2)
        found = terms(loss_BxT, batch, params, losses_of)
        return {name: (term_P[:, None] * is_row_Px2).sum() for name, term_P in found.items()}

    return Objective(means, sums, metrics=('loss', 'margin', 'accuracy'))


def choose_objective(has_pairs, beta):
    """Returns dpo(beta) for a data set of pairs of answers, language_model for all others."""
    return dpo(beta) if has_pairs else language_model


def token_losses(config, loss_chunk, batch, params):
    """Computes the loss of each token of a batch, float32 [B, T], without dropout."""
    return GPT(config).apply(
        {'params': params}, batch['x'], batch['y'], loss_chunk=loss_chunk,
        start_BxT=batch.get('start'), method='loss')


# -----------------------------------------------------------------------------
# the training step

def make_train_step(config, objective, layout, schedule, *, seed, grad_clip, loss_chunk=0):
    """Makes train_step(state, batch) -> (state, metrics), which layout.train_step compiles.

    objective: an Objective. layout: of setup_distributed_training; it says how gradients are
    reduced over devices. schedule: the learning rate by the number of updates, to be logged.
    seed: of dropout, whose mask in a layer depends on (seed, seq_id) alone, not on devices or
    micro-batches. grad_clip: see clip_gradients. loss_chunk: number of positions whose logits are
    materialized at a time; 0 is all.

    batch: x and y [M, B, T] and seq_id [M, B], M micro-batches whose gradients are averaged into
    one update; weight and start [M, B, T] where the data has them. seq_id numbers the sequences
    of the run.
    metrics: float32 scalars: those of the objective, means over micro-batches and devices;
    grad_norm, before clipping; lr. A metric that is added here is logged by itself.

    Raises UserError if loss_chunk does not divide block_size."""
    check_loss_chunk(config, loss_chunk)
    sum_gradients = make_gradients(config, objective, layout, seed, loss_chunk)

    def train_step(state, batch, scale=1.0):
        """Makes one update. scale: the factor of each micro-batch's loss, which is divided out of
        the gradients again; only with_loss_scale gives another one than 1."""
        n_micro = len(batch['x'])

        # forward and backward: summed over the micro-batches, reduced over the devices
        compute_gradients = layout.reduce_gradients(sum_gradients)
        grads, totals = compute_gradients(state.params, state.frozen, batch, scale)
        grads, params = layout.shard_update(grads, state.params)

        # clip the mean gradients
        with jax.named_scope('clip'):
            grads = jax.tree.map(lambda g: g / (n_micro * scale), grads)
            grads, grad_norm = clip_gradients(grads, grad_clip)

        # update the parameters
        with jax.named_scope('optimizer'):
            updates, opt_state = state.tx.update(grads, state.opt_state, params)
            params = optax.apply_updates(params, updates)
        updated = state.replace(step=state.step + 1, params=params, opt_state=opt_state)

        # what is logged
        metrics = {name: total / n_micro for name, total in totals.items()}
        metrics['grad_norm'] = grad_norm
        metrics['lr'] = jnp.float32(schedule(state.step))
        return updated, metrics

    if config.dtype == 'float16':
        return with_loss_scale(train_step, layout.n_losses)
    return train_step


def make_gradients(config, objective, layout, seed, loss_chunk):
    """Makes sum_gradients(params, frozen, batch, scale) -> (gradients, metrics), each the sum over
    the micro-batches of a batch; see make_train_step. The loss is multiplied by `scale`."""
    def loss_fn(params, frozen, micro_batch, scale):
        """Returns (the loss times scale, the metrics of the objective) of a micro-batch."""
        params = model_params(params, frozen)
        dropout_key = jax.random.fold_in(jax.random.key(seed), DROPOUT)
        loss_BxT, sown = GPT(config).apply(
            {'params': params}, micro_batch['x'], micro_batch['y'], loss_chunk=loss_chunk,
            start_BxT=micro_batch.get('start'), method='loss',
            deterministic=False, seq_id_B=micro_batch['seq_id'], rngs={'dropout': dropout_key},
            mutable=['losses'])
        losses_of = functools.partial(token_losses, config, loss_chunk, micro_batch)
        means = objective.means(loss_BxT, micro_batch, params, losses_of)
        balance = sum(jax.tree.leaves(sown))  # the loss that keeps experts equally busy
        metrics = {name: means[name] for name in objective.metrics}
        return (means['loss'] + balance) * scale, metrics

    def gradients(params, frozen, micro_batch, scale):
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, frozen, micro_batch, scale)
        return layout.shard_gradients(grads), metrics

    def sum_gradients(params, frozen, batch, scale):
        def micro_step(total, micro_batch):
            found = gradients(params, frozen, micro_batch, scale)
            return jax.tree.map(jnp.add, total, found), None

        # one micro-batch is no loop: that would cost another pass over the gradients
        if len(batch['x']) == 1:
            return gradients(params, frozen, jax.tree.map(lambda x: x[0], batch), scale)

        no_gradients = layout.shard_gradients(jax.tree.map(jnp.zeros_like, params))
        no_metrics = {name: jnp.zeros(()) for name in objective.metrics}
        total, _ = jax.lax.scan(micro_step, (no_gradients, no_metrics), batch)
        return total

    return sum_gradients


def check_loss_chunk(config, loss_chunk):
    """Raises UserError if loss_chunk does not divide block_size."""
    if 0 < loss_chunk < config.block_size and config.block_size % loss_chunk:
        divisors = [n for n in range(1, config.block_size) if config.block_size % n == 0]
        raise UserError(f'loss_chunk={loss_chunk} does not divide block_size={config.block_size}; '
                        f'it may be one of {divisors}')


def with_loss_scale(train_step, n_losses):
    """Wraps train_step in float16's dynamic loss scaling, as torch.amp.GradScaler does it.

    An update whose gradients overflow is skipped and halves the scale; 2000 good updates in a row
    double it. state.step counts the updates made. n_losses: number of devices of which each takes
    the mean of its own sequences."""
    def scaled_step(state, batch):
        loss_scale = state.loss_scale['scale']
        # The scaled loss is the mean over micro-batches and devices, as nanoGPT's: so a batch that
        # is split overflows no earlier than as a whole.
        n_micro = len(batch['x'])
        updated, metrics = train_step(state, batch, loss_scale / (n_micro * n_losses))
        metrics['loss_scale'] = loss_scale
        return skip_overflow(state, updated, metrics['grad_norm']), metrics

    return scaled_step


def skip_overflow(state, updated, grad_norm):
    """Returns `updated` with its next loss scale, or `state` with half of it if grad_norm is not
    finite."""
    is_finite = jnp.isfinite(grad_norm)
    chosen = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), updated, state)
    good_steps = jnp.where(is_finite, state.loss_scale['good_steps'] + 1, 0)
    growth = jnp.where(good_steps == 2000, 2.0, 1.0)
    factor = jnp.where(is_finite, growth, 0.5)
    return chosen.replace(loss_scale={
        'scale': state.loss_scale['scale'] * factor,
        'good_steps': good_steps % 2000})


# -----------------------------------------------------------------------------
# evaluation

def make_eval_step(config, objective, layout, *, loss_chunk=0):
    """Makes eval_step(params, batch) -> the sums of the objective over the sequences, in the order
    in which it returns them, float32 [n]; layout.eval_step compiles it.

    batch: x and y [B, T], is_row [B], 0 for sequences that do not count, and what the objective
    reads."""
    def eval_step(params, batch):
        losses_of = functools.partial(token_losses, config, loss_chunk, batch)
        sums = objective.sums(losses_of(params), batch, params, losses_of)
        return layout.sum_over_devices(jnp.stack([*sums.values()]))

    return eval_step


def estimate_loss_jax(eval_step, params, splits, layout, *, batch_size, eval_iters,
                      token_bytes=None, metrics=('loss',), stop_signal=lambda: 0):
    """Evaluates sources: {'train': loss, 'val': loss}, each the mean over eval_iters * batch_size
    sequences, the same at every evaluation, for any seed and number of devices, so that curves
    can be compared. Of a source with a mask it is the mean over the tokens that count.

    eval_step: layout.eval_step(make_eval_step(...)), which evaluates batch_size sequences per
    device and call. splits: {'train', 'val'}: a source of jax_files/sources.py, not a Mixture.
    token_bytes: number of bytes of each token id. 'train_bpb' and 'val_bpb' are then bits per byte
    of the tokens that count and have bytes.
    metrics: those of the objective. Others than the loss are 'train_NAME' and 'val_NAME'.
    stop_signal: a function that returns a number, the same in all processes. None is returned as
    soon as it is not 0.
    Raises UserError if no token counts, and for a token id outside the vocabulary."""
    results = {}
    stop = 0
    for split, source in splits.items():
        evaluation = source.evaluation(eval_iters * batch_size, token_bytes)
        totals = 0.0
        for batch in evaluation_batches(source, evaluation, layout, batch_size, token_bytes):
            if int(stop):  # one call late: reading it waits for the device
                return None
            stop = stop_signal()
            totals += eval_step(params, layout.shard_batch(batch, (batch_size,)))
        totals = np.asarray(totals, float)
        n_rows = len(evaluation.places)
        for name, total in zip(metrics, totals):
            key = split if name == 'loss' else f'{split}_{name}'
            results[key] = float(total) / n_rows / evaluation.share
        if evaluation.n_bytes is not None:
            # the last sum is that of the tokens that have bytes
            nats = float(totals[-1]) * source.block_size
            results[f'{split}_bpb'] = nats / math.log(2) / evaluation.n_bytes
    return results


def evaluation_batches(source, evaluation, layout, batch_size, token_bytes):
    """Yields this process's part of the batches of an evaluation, see make_eval_step.

    The last one is filled up with sequences that do not count."""
    n_rows = len(evaluation.places)
    per_call = batch_size * layout.n_data_shards
    for first in range(0, n_rows, per_call):
        rows = first + layout.local_rows(per_call)
        batch = source.read(evaluation.places[rows % n_rows])
        is_row = (rows < n_rows).astype(np.float32)
        batch['is_row'] = is_row
        if 'weight' in batch:
            batch['weight'] = is_row[:, None] * batch['weight']
        if evaluation.has_special:  # else all that counts has bytes
            has_bytes = (token_bytes[batch['y']] > 0).astype(np.float32)
            batch['spelled'] = batch.get('weight', is_row[:, None]) * has_bytes
        yield batch


def estimate_losses(eval_step, state, sets, layout, **options):
    """Evaluates the model of a TrainState on DataSets, as estimate_loss_jax on splits.

    Of several sets it returns the means, weighted by their fractions, and in addition each set's
    'val_loss_NAME' and 'val_bpb_NAME'. None is returned as soon as stop_signal() is not 0."""
    params = model_params(state.params, state.frozen)
    found = []
    for one in sets:
        losses = estimate_loss_jax(eval_step, params, one.splits, layout, **options)
        if losses is None:
            return None
        found.append(losses)
    means = {}
    for name in found[0]:
        means[name] = sum(one.fraction * losses[name] for one, losses in zip(sets, found))
    if len(sets) > 1:
        for one, losses in zip(sets, found):
            means[f'val_loss_{one.name}'] = losses['val']
            if 'val_bpb' in losses:
                means[f'val_bpb_{one.name}'] = losses['val_bpb']
    return means


def count_trained(state):
    """Counts the parameters of a TrainState: (those that are trained, those that LoRA updates)."""
    n_frozen = count_frozen(state.frozen) if state.frozen else 0
    return count_params(state.params), n_frozen


def mfu_estimator(state, config, devices):
    """Makes a function of the tokens per second that returns the model FLOPs utilization; None if
    the peak of these devices is unknown."""
    peak_flops = device_peak_flops(devices[0])
    if not peak_flops:
        return None
    n_params, n_frozen = count_trained(state)
    return functools.partial(estimate_mfu, n_params, config, peak_flops=peak_flops * len(devices),
                             n_frozen=n_frozen)


@jax.jit
def all_finite(tree):
    """Whether all elements of all leaves are finite."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
