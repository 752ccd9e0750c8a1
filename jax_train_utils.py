"""What training is made of: the model's flags, the schedule, objectives, train and eval steps."""
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_devices.parallel import fit_layout
from jax_devices.processes import check_agreement, in_all_processes
from jax_devices.setup import setup_jax_environment
from jax_files.checkpoints import checkpoint_steps, choose_checkpoint
from jax_files.data import (
    DROPOUT, Pairs, check_ids, counted_bytes, counted_share, evaluated_windows, find_starts, get_windows)
from jax_flags import (
    CHOICES, UserError, ceil_div, check_choice, check_flags, check_given, rising_learning_rate)
from jax_lora import base_params, model_params
from jax_optimizers import create_optimizer_with_schedule
from jax_transformer import GPT, GPTConfig

# public here, defined in jax_devices/ and jax_files/
from jax_devices.parallel import pmap_train_step, setup_distributed_training  # noqa: F401
from jax_devices.setup import check_device_availability  # noqa: F401
from jax_files.checkpoints import load_checkpoint, save_checkpoint  # noqa: F401
from jax_files.data import get_batch_jax  # noqa: F401

# -----------------------------------------------------------------------------
# the model's flags

# the flags that a checkpoint fixes
MODEL_FLAGS = {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'norm', 'position', 'n_kv_head', 'qk_norm',
               'layer_types', 'window', 'mlp', 'n_inner', 'tied_head', 'n_expert', 'n_expert_used'}

# the flags that a resumed run does not take from its checkpoint
NOT_RESUMED = ('device', 'overwrite', 'eval_only', 'out_dir', 'coordinator_address', 'num_processes', 'process_id',
               'profile', 'base')


def merge_resumed_flags(flags, given, saved):
    """The flags of a resumed run: those `saved` in its checkpoint, overridden by those `given` now. Another batch_size
    continues elsewhere in the data. flags: of read_flags, for what the checkpoint lacks or what is not resumed.

    Raises UserError if the given flags ask for another optimizer or architecture."""
    saved = {name: value for name, value in saved.items() if name in flags and name not in NOT_RESUMED}
    for name, value in saved.items():
        if type(value) is not type(flags[name]) and not (type(value) is int and type(flags[name]) is float):
            raise UserError(f"the checkpoint in {flags['out_dir']} says {name}={str(value)[:100]!r}, which is no value "
                            f'of this flag: it is damaged, or of another program')
    if given.get('minutes'):  # the command that started the run; what it has measured stays
        if given['minutes'] != saved.get('minutes'):
            raise UserError(f"minutes is for a new run: leave it out, and {flags['out_dir']} continues to its "
                            f"max_iters={saved['max_iters']}, or give --minutes=0 with another max_iters")
        fixed = 'max_iters', 'lr_decay_iters', 'warmup_iters'
        given = {name: value for name, value in given.items() if name not in fixed}
    optimizer = saved.get('optimizer', 'adamw')
    if given.get('optimizer', optimizer) != optimizer:
        raise UserError(f"cannot resume with another optimizer: {flags['out_dir']} holds the state of {optimizer}")
    saved = {'lora_rank': 0, 'quantize': ''} | saved
    for name in (MODEL_FLAGS | {'lora_rank', 'lora_alpha', 'quantize'}) & given.keys() & saved.keys():
        if given[name] != saved[name]:
            raise UserError(f"cannot resume with another architecture: {flags['out_dir']} was trained with "
                            f"{name}={saved[name]!r}, not {name}={given[name]!r}")
    return {**flags, **saved, **given}


def resolve_flags(flags, given):
    """(the flags of this run, the metadata of the checkpoint that it resumes or None, its devices, its compute dtype),
    from what read_flags returned: init_from=auto becomes 'resume' or 'scratch', a resumed run keeps its flags except
    for those given now, and takes a layout that fits the devices. All processes must agree. Raises UserError for flags
    that are out of range, ask for another architecture or optimizer than the checkpoint's, or for devices not here."""
    own = ('process_id', 'out_dir', 'dataset')  # each process may have its own, if the content is the same
    check_agreement('flags', {name: value for name, value in flags.items() if name not in own} | {
        'the list of given flags': sorted(given.keys() - own)})
    out_dir = flags['out_dir']
    steps = checkpoint_steps(out_dir)
    if flags['init_from'] == 'auto':
        init_from = 'resume' if steps else 'scratch'
        flags, given = flags | {'init_from': init_from}, given | {'init_from': init_from}
    check_agreement('out_dir', {'init_from': flags['init_from'], 'checkpoints': steps})
    resumed = None
    if flags['init_from'] == 'resume':
        _, resumed = choose_checkpoint(out_dir)
        flags = merge_resumed_flags(flags, given, resumed['flags'])
    elif flags['minutes']:
        flags = flags | {'max_iters': 0, 'lr_decay_iters': 0}  # not known yet
    for name in ('compile', 'backend'):
        if name in given:
            print(f'--{name}={flags[name]} has no effect here: JAX always compiles, and picks its own communication')
    check_flags(flags)
    check_given(flags, given)
    warning = rising_learning_rate(flags)
    if warning:
        print(f'warning: {warning}')
    devices, dtype, reason = in_all_processes(setup_jax_environment, flags['device'], flags['dtype'])
    if resumed:
        layout = {name: flags[name] for name in ('fsdp', 'tensor', 'expert', 'context')}
        fitting = fit_layout(layout, given, len(devices), resumed['model']['n_embd'])
        if fitting != layout:
            print(f'{layout} of the resumed run does not fit {len(devices)} devices: taking {fitting}')
        flags = flags | fitting
    print(f'{len(devices)} x {devices[0].device_kind}, compute in {dtype} ({reason})')
    return flags, resumed, devices, dtype


def config_from_flags(flags, **more):
    """The GPTConfig that the model's flags mean, with `more` of its fields. n_inner is the width of each expert too."""
    fields = {name: flags[name] for name in (*MODEL_FLAGS, 'dropout') if name not in ('n_expert', 'n_expert_used')}
    fields['layer_types'] = tuple(layer_type.strip() for layer_type in flags['layer_types'].split(','))
    if flags['n_expert']:
        fields['moe'] = {'n_expert': flags['n_expert'], 'n_used': flags['n_expert_used'],
                         'width': flags['n_inner'] or 4 * flags['n_embd'], 'balance': flags['expert_balance']}
    config = GPTConfig(**fields, **more)
    if config.window and 'window' not in config.layer_types:
        raise UserError(f'window={config.window} needs window layers, as in --layer_types=window,full')
    return config


def flags_from_config(config, given=None):
    """The model's flags for a config that did not come from flags; fields without a flag are left out. Raises UserError
    if the flags `given` by the user, but for block_size, are others."""
    flags = {name: getattr(config, name) for name in MODEL_FLAGS if name not in ('n_expert', 'n_expert_used')}
    flags['layer_types'] = ','.join(config.layer_types)
    flags['n_expert'] = config.moe.n_expert if config.moe else 0
    flags['n_expert_used'] = config.moe.n_used if config.moe else 2
    if config.moe:
        flags['expert_balance'] = config.moe.balance
    for name in sorted((MODEL_FLAGS - {'block_size'}) & (given or {}).keys()):
        if given[name] != flags[name]:
            raise UserError(f'{name}={given[name]} is not of this model, which has {name}={flags[name]}: leave it out')
    return flags


def for_this_run(config, flags, given, dtype):
    """The config of a trained model with the dropout, the dtype and, if it is given, the expert_balance of this run."""
    moe = config.moe
    if moe and 'expert_balance' in given:
        moe = dataclasses.replace(moe, balance=flags['expert_balance'])
    return dataclasses.replace(config, dropout=flags['dropout'], dtype=dtype, moe=moe)

# -----------------------------------------------------------------------------
# optimizer and schedule

def create_learning_rate_schedule(learning_rate, *, decay_lr=True, warmup_iters=0, lr_decay_iters=0, min_lr=0.0,
                                  lr_schedule='cosine'):
    """step -> learning rate: linear warm-up from learning_rate / (warmup_iters + 1), then nanoGPT's cosine to min_lr at
    lr_decay_iters, and min_lr after that. lr_schedule: 'linear' decays linearly instead; 'wsd' (warm-up, stable, decay;
    arXiv:2404.06395) decays linearly in the last fifth; 'constant' never. decay_lr=False: learning_rate throughout,
    without a warm-up. Raises UserError for an unknown schedule or a decay that ends within the warm-up."""
    check_choice('lr_schedule', lr_schedule, CHOICES['lr_schedule'])
    if not decay_lr:
        return optax.constant_schedule(learning_rate)
    warm_up = optax.linear_schedule(learning_rate / (warmup_iters + 1), learning_rate, warmup_iters)
    stable = optax.constant_schedule(learning_rate)
    if lr_schedule == 'constant':
        return optax.join_schedules([warm_up, stable], [warmup_iters])
    decay_iters = lr_decay_iters - warmup_iters
    if decay_iters <= 0:
        raise UserError(f'lr_decay_iters={lr_decay_iters} must be more than warmup_iters={warmup_iters}')
    if lr_schedule == 'cosine':
        return optax.warmup_cosine_decay_schedule(learning_rate / (warmup_iters + 1), learning_rate, warmup_iters,
                                                  lr_decay_iters, min_lr)
    if lr_schedule == 'wsd':
        decay_iters = ceil_div(decay_iters, 5)
    linear = optax.linear_schedule(learning_rate, min_lr, decay_iters)
    decay = lambda step: jnp.maximum(linear(step), min_lr)  # rounding ends below
    return optax.join_schedules([warm_up, stable, decay], [warmup_iters, lr_decay_iters - decay_iters])


def optimizer_from_flags(flags):
    """(schedule, None, optimizer). With --minutes the schedule is not known when the training step is compiled:
    (schedule, its values, float32 [lr_decay_iters + 1], for the batches, optimizer with learning rate 1). Until
    max_iters is known, the learning rate stays the highest after the warm-up."""
    measuring = flags['minutes'] and not flags['max_iters']
    schedule = create_learning_rate_schedule(
        flags['learning_rate'], lr_schedule='constant' if measuring else flags['lr_schedule'],
        **{name: flags[name] for name in ('decay_lr', 'warmup_iters', 'lr_decay_iters', 'min_lr')})
    n = max(flags['warmup_iters'], flags['lr_decay_iters']) + 1
    lrs = np.asarray(jax.vmap(schedule)(np.arange(n)), np.float32) if flags['minutes'] else None
    return schedule, lrs, create_optimizer_with_schedule(
        (lambda step: 1.0) if flags['minutes'] else schedule,
        **{name: flags[name] for name in ('beta1', 'beta2', 'weight_decay', 'optimizer')})


def clip_gradients(grads, max_norm):
    """(grads, scaled down to a global norm of max_norm as by torch's clip_grad_norm_, if not 0; the norm before)."""
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

    Both functions take (loss_BxT, batch, params, losses): the model's loss of each token of the
    batch {'x', 'y' [B, T], ...} with the parameters `params`, and losses(other params), the same
    of another model, without dropout. They return {name: scalar}.
    means: over the samples of a training batch. The step minimizes 'loss' and logs `metrics`.
    sums: over the sequences of an evaluation's batch whose is_row [B] is 1; the others fill up the
    last batch. A sample of several sequences counts as often as it has sequences."""
    means: Callable
    sums: Callable
    metrics: tuple[str, ...] = ('loss',)


def language_model_means(loss_BxT, batch, params, losses):
    """Takes the mean loss of the tokens, times their 'weight' [B, T] if the batch has one."""
    if 'weight' in batch:
        loss_BxT = loss_BxT * batch['weight']
    return {'loss': loss_BxT.mean()}


def language_model_sums(loss_BxT, batch, params, losses):
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
    updates. The loss is -log sigmoid(margin); accuracy is 1 where the margin is positive."""
    def terms(loss_BxT, batch, params, losses):
        reference_BxT = losses(base_params(params))
        gain_Px2 = ((reference_BxT - loss_BxT) * batch['weight']).sum(-1).reshape(-1, 2)
        margin_P = beta * (gain_Px2[:, 0] - gain_Px2[:, 1])
        return {
            'loss': -jax.nn.log_sigmoid(margin_P),
            'margin': margin_P,
            'accuracy': (margin_P > 0).astype(jnp.float32)}

    def means(*args):
        return {name: term_P.mean() for name, term_P in terms(*args).items()}

    def sums(loss_BxT, batch, params, losses):
        is_row_Px2 = batch['is_row'].reshape(-1, 2)
        found = terms(loss_BxT, batch, params, losses)
        return {name: (term_P[:, None] * is_row_Px2).sum() for name, term_P in found.items()}

    return Objective(means, sums, metrics=('loss', 'margin', 'accuracy'))


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
    seed: of dropout, which depends on (seed, seq_id) alone. grad_clip: see clip_gradients.
    loss_chunk: number of positions whose logits are materialized at a time; 0 is all.

    batch: x and y [M, B, T] and seq_id [M, B], M micro-batches whose gradients are averaged into
    one update; weight and start [M, B, T] where the data has them. seq_id numbers the sequences
    of the run.
    metrics: float32 scalars: those of the objective, means over micro-batches and devices;
    grad_norm, before clipping; lr. A metric that is added here is logged by itself.

    Raises UserError if loss_chunk does not divide block_size."""
    if 0 < loss_chunk < config.block_size and config.block_size % loss_chunk:
        divisors = [n for n in range(1, config.block_size) if config.block_size % n == 0]
        raise UserError(f'loss_chunk={loss_chunk} does not divide block_size={config.block_size}; '
                        f'it may be one of {divisors}')

    def loss_fn(params, frozen, micro_batch, scale):
        """Returns (the loss times scale, the metrics of the objective) of a micro-batch."""
        params = model_params(params, frozen)
        dropout_key = jax.random.fold_in(jax.random.key(seed), DROPOUT)
        loss_BxT, sown = GPT(config).apply(
            {'params': params}, micro_batch['x'], micro_batch['y'], loss_chunk=loss_chunk,
            start_BxT=micro_batch.get('start'), method='loss',
            deterministic=False, seq_id_B=micro_batch['seq_id'], rngs={'dropout': dropout_key},
            mutable=['losses'])
        losses = functools.partial(token_losses, config, loss_chunk, micro_batch)
        metrics = objective.means(loss_BxT, micro_batch, params, losses)
        balance = sum(jax.tree.leaves(sown))  # the loss that keeps experts equally busy
        return (metrics['loss'] + balance) * scale, metrics

    def gradients(params, frozen, micro_batch, scale):
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, frozen, micro_batch, scale)
        return layout.shard_gradients(grads), metrics

    def sum_gradients(params, frozen, batch, scale):
        """Returns (gradients, metrics), each the sum over the micro-batches."""
        def micro_step(total, micro_batch):
            found = gradients(params, frozen, micro_batch, scale)
            return jax.tree.map(jnp.add, total, found), None

        if len(batch['x']) == 1:
            # without accumulation, which would cost another pass over the gradients
            return gradients(params, frozen, jax.tree.map(lambda x: x[0], batch), scale)
        no_gradients = layout.shard_gradients(jax.tree.map(jnp.zeros_like, params))
        no_metrics = {name: jnp.zeros(()) for name in objective.metrics}
        total, _ = jax.lax.scan(micro_step, (no_gradients, no_metrics), batch)
        return total

    def train_step(state, batch, scale=1.0):
        batch = dict(batch)
        lr_MxB = batch.pop('lr', None)  # --minutes: the schedule was not known when this is traced
        lr = schedule(state.step) if lr_MxB is None else lr_MxB[0, 0]
        n_micro = len(batch['x'])
        # forward and backward: the sums over the micro-batches, reduced over the devices
        total_gradients = layout.reduce_gradients(sum_gradients)
        grads, totals = total_gradients(state.params, state.frozen, batch, scale)
        grads, params = layout.shard_update(grads, state.params)
        with jax.named_scope('clip'):
            grads = jax.tree.map(lambda g: g / (n_micro * scale), grads)
            grads, grad_norm = clip_gradients(grads, grad_clip)
        metrics = {name: total / n_micro for name, total in totals.items()}
        metrics['grad_norm'] = grad_norm
        metrics['lr'] = jnp.float32(lr)
        with jax.named_scope('optimizer'):
            updates, opt_state = state.tx.update(grads, state.opt_state, params)
            if lr_MxB is not None:
                updates = jax.tree.map(lambda u: lr * u, updates)
            params = optax.apply_updates(params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, metrics

    if config.dtype == 'float16':
        return with_loss_scale(train_step, layout.n_losses)
    return train_step


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
        losses = functools.partial(token_losses, config, loss_chunk, batch)
        sums = objective.sums(losses(params), batch, params, losses)
        return layout.sum_over_devices(jnp.stack([*sums.values()]))

    return eval_step


def estimate_loss_jax(eval_step, params, splits, parallel, *, block_size, batch_size, eval_iters,
                      masks=None, vocab_size=2**32, token_bytes=None, metrics=('loss',), stop_signal=lambda: 0):
    """{'train': loss, 'val': loss}, each the mean over eval_iters * batch_size windows spread evenly over the split:
    the same windows at every evaluation, for any seed and number of devices, so that curves can be compared.
    eval_step: parallel.eval_step(make_eval_step(config)), which evaluates batch_size sequences per device and call.
    masks: see load_masks; the mean is that over the tokens that count. Raises UserError if there is none.
    splits: of Pairs, each is evaluated once at most; 'train_margin', 'train_accuracy' and those of val are means too.
    vocab_size: of the data set. Raises UserError for a token id that is not below it.
    token_bytes: of each id; 'train_bpb' and 'val_bpb' are then bits per byte of the tokens that count and have bytes.
    stop_signal(): a number, the same in all processes; None is returned as soon as it is not 0."""
    losses, stop = {}, 0
    per_call = batch_size * parallel.n_data_shards
    for split, tokens in splits.items():
        n_rows = eval_iters * batch_size
        is_pairs = isinstance(tokens, Pairs)
        places = tokens.evaluated(n_rows) if is_pairs else evaluated_windows(tokens, block_size, n_rows)
        n_rows = len(places)
        totals = 0.0
        share = counted_share(masks[split], block_size, n_rows, split) if masks else 1.0
        if token_bytes is not None:
            mask = masks[split] if masks else None
            n_bytes, has_special = counted_bytes(tokens, places, block_size, mask, token_bytes)
        for first in range(0, n_rows, per_call):
            if int(stop):  # one call late: reading it waits for the device
                return None
            stop = stop_signal()
            rows = first + parallel.local_rows(per_call)  # rows past the end have weight 0 and fill up the last call
            place = places[rows % n_rows]
            is_row = (rows < n_rows).astype(np.float32)
            if is_pairs:
                batch = tokens.read(place) | {'is_row': is_row}
            else:
                x, y = get_windows(tokens, place, block_size)
                batch = {'x': x, 'y': y, 'is_row': is_row}
                if masks:
                    mask_x, mask_y = get_windows(masks[split], place, block_size)
                    batch['weight'] = is_row[:, None] * (mask_y == 1)
                    batch |= {'start': find_starts(mask_x)} if tokens.ndim == 2 else {}
            check_ids(batch['x'], batch['y'], vocab_size, split)
            if token_bytes is not None and has_special:  # else it is a step as without bytes
                weight = batch.get('weight', is_row[:, None])
                batch['spelled'] = weight * (token_bytes[y] > 0).astype(np.float32)
            totals += eval_step(params, parallel.shard_batch(batch, (batch_size,)))
        totals = np.asarray(totals, float)
        for name, total in zip(metrics, totals):
            key = split if name == 'loss' else f'{split}_{name}'
            losses[key] = float(total) / n_rows / share
        if token_bytes is not None:
            nats = float(totals[-1]) * block_size  # the last sum is that of the tokens that have bytes
            losses[f'{split}_bpb'] = nats / math.log(2) / n_bytes
    return losses


def estimate_losses(eval_step, params, sets, parallel, **options):
    """estimate_loss_jax of DataSets, of several the mean weighted by their fractions, and in addition each one's:
    'val_loss_NAME', 'val_bpb_NAME'. None is returned as soon as stop_signal() is not 0."""
    found = [estimate_loss_jax(eval_step, params, one.splits, parallel, masks=one.masks, **options) for one in sets]
    if None in found:
        return None
    means = {name: sum(one.fraction * losses[name] for one, losses in zip(sets, found)) for name in found[0]}
    for one, losses in zip(sets, found) if len(sets) > 1 else ():
        means[f'val_loss_{one.name}'] = losses['val']
        if 'val_bpb' in losses:
            means[f'val_bpb_{one.name}'] = losses['val_bpb']
    return means


@jax.jit
def all_finite(tree):
    """Whether all elements of all leaves are finite."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
