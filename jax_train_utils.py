"""What training is made of: the model's flags, optimizer and schedule, train and eval steps, logs."""
import dataclasses
import datetime
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from jax_devices.parallel import fit_layout
from jax_devices.processes import check_agreement, in_all_processes
from jax_devices.setup import setup_jax_environment
from jax_files.checkpoints import checkpoint_steps, choose_checkpoint
from jax_files.data import (
    DROPOUT, Pairs, check_ids, counted_bytes, counted_share, evaluated_windows, find_starts, get_windows)
from jax_flags import (
    CHOICES, UserError, ceil_div, check_choice, check_flags, check_given, rising_learning_rate)
from jax_lora import base_params, model_params
from jax_ops.sharding import batch_axes, current_mesh, partition_specs, shard, shard_params
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


# x -> a x + b x^3 + c x^5 + d x^7 + e x^9, one after the other: each brings singular values that were in [0.003, 1] as
# close to 1 as its degree can (arXiv:2505.16932), the last to [0.55, 1.45]
POLAR_EXPRESS = ((14.8009, -144.4595, 480.2614, -617.0302, 268.3830), (6.4106, -15.3546, 13.0939, -4.3580, 0.4929),
                 (2.0034, -0.5702, 0, 0, 0))


@optax.stateless
def orthogonalize(updates, params=None):
    """Replaces every matrix, with the singular value decomposition U S V^T, by about U V^T, as Muon
    (https://kellerjordan.github.io/posts/muon) does, in the three steps of POLAR_EXPRESS. The result is scaled by
    0.2 sqrt(longer side), to the size of AdamW's updates (arXiv:2502.16982).

    The plain equivalent of a step is x = f(x x^T) x with f(g) = a + b g + c g^2 + d g^3 + e g^4, after division by the
    root of |x x^T|, which is at least the largest singular value. Where x is not square, the steps multiply the Gram
    matrix x x^T and the product of all f, which are square of the shorter side, and x once at the end. The Gram matrix
    holds the squares of the singular values, so all matmuls are in float32 (docs/lab_log.md#muon-in-three-steps).

    A leaf [E, I, O] holds E matrices, c_attn three: q, k and v, each by itself. Matrices of the same shape are stacked;
    on a mesh the stack is sharded over the devices, if their number divides it. M matrices, I is the shorter side."""
    leaves, tree = jax.tree.flatten(split_qkv(updates))
    matmul = functools.partial(jnp.matmul, precision='highest')
    for shape in dict.fromkeys(leaf.shape for leaf in leaves):
        indices = [i for i, leaf in enumerate(leaves) if leaf.shape == shape]
        is_tall, is_square = shape[-2] > shape[-1], shape[-2] == shape[-1]
        x_MxIxO = jnp.stack([leaves[i] for i in indices]).astype(jnp.float32).reshape(-1, *shape[-2:])
        x_MxIxO = shard(x_MxIxO, batch_axes(len(x_MxIxO)), None, None)
        x_MxIxO = x_MxIxO.swapaxes(1, 2) if is_tall else x_MxIxO
        gram_MxIxI = matmul(x_MxIxO, x_MxIxO.swapaxes(1, 2))
        norm = jnp.linalg.norm(gram_MxIxI, axis=(1, 2), keepdims=True) + 1e-16
        x_MxIxO /= jnp.sqrt(norm)
        gram_MxIxI /= norm
        product_MxIxI = x_MxIxO if is_square else None
        for a, b, c, d, e in POLAR_EXPRESS:
            factor_MxIxI = a * jnp.eye(gram_MxIxI.shape[-1]) + b * gram_MxIxI
            if c:
                square_MxIxI = matmul(gram_MxIxI, gram_MxIxI)
                factor_MxIxI += c * square_MxIxI + matmul(square_MxIxI, d * gram_MxIxI + e * square_MxIxI)
            product_MxIxI = factor_MxIxI if product_MxIxI is None else matmul(factor_MxIxI, product_MxIxI)
            gram_MxIxI = (matmul(product_MxIxI, product_MxIxI.swapaxes(1, 2)) if is_square
                          else matmul(matmul(factor_MxIxI, gram_MxIxI), factor_MxIxI))
        x_MxIxO = product_MxIxI if is_square else matmul(product_MxIxI, x_MxIxO)
        x_MxIxO = x_MxIxO.swapaxes(1, 2) if is_tall else x_MxIxO
        for i, x in zip(indices, (0.2 * max(shape[-2:])**0.5 * x_MxIxO).reshape(-1, *shape)):
            leaves[i] = x.astype(leaves[i].dtype)
    join = lambda x: jnp.concatenate(x, axis=1) if isinstance(x, list) else x
    return jax.tree.map(join, jax.tree.unflatten(tree, leaves), is_leaf=lambda x: isinstance(x, list))


def split_qkv(tree):
    """The tree with [q, k, v] in place of each c_attn kernel [D, (H + 2 G) K]. As one matrix they make the loss 11%
    higher with two of three seeds (docs/lab_log.md#the-recipe-part-by-part)."""
    flat = flatten_dict(tree)
    for path, kernel in flat.items():
        if path[-2:] == ('c_attn', 'kernel'):
            n_query = flat[*path[:-2], 'c_proj', 'kernel'].shape[0]
            flat[path] = jnp.split(kernel, [n_query, (n_query + kernel.shape[1]) // 2], axis=1)
    return unflatten_dict(flat)


def is_decayed(path, p):
    """Whether a parameter has weight decay: matrices and embeddings have; norms and biases (2-D in experts) do not."""
    return p.ndim >= 2 and path[-1].key != 'bias'


def optimizer_of(path, p):
    return 'muon' if path[-1].key in ('kernel', 'kv_b') and path[-2].key != 'router' else 'adamw'


def create_optimizer_with_schedule(schedule, *, beta1=0.9, beta2=0.95, weight_decay=0.1, optimizer='adamw'):
    """AdamW (arXiv:1711.05101) with weight decay where is_decayed says so. 'muon' updates every matrix of the blocks
    except the router's, each expert's by itself, with Muon instead (see orthogonalize), at AdamW's learning rate, and
    the same parameters decay. Clipping is separate: clip_gradients. Raises UserError for any other optimizer."""
    check_choice('optimizer', optimizer, CHOICES['optimizer'])
    adamw = optax.adamw(schedule, b1=beta1, b2=beta2, eps=1e-8, weight_decay=weight_decay,
                        mask=lambda params: jax.tree.map_with_path(is_decayed, params))
    if optimizer == 'adamw':
        return adamw
    muon = optax.chain(optax.trace(0.95, nesterov=True), orthogonalize, optax.add_decayed_weights(weight_decay),
                       optax.scale_by_learning_rate(schedule))
    return optax.partition({'muon': muon, 'adamw': adamw}, lambda params: jax.tree.map_with_path(optimizer_of, params))


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
# train and eval steps

PREFERENCE_METRICS = ('loss', 'margin', 'accuracy')


def preference_terms(config, params, batch, loss_BxT, beta, loss_chunk):
    """DPO (arXiv:2305.18290), float32 [3, P]: loss, margin, and 1 where the margin is positive, of P pairs.

    batch: x, y, weight [B, T] with B = 2 P, as Pairs reads them. params: with LoRA's updates, without which they are
    the reference. loss_BxT: of the model with the updates. The margin is beta times the gain in log probability, over
    the reference, of the chosen answer less that of the rejected one; the loss is -log sigmoid(margin)."""
    reference_BxT = GPT(config).apply({'params': base_params(params)}, batch['x'], batch['y'], loss_chunk=loss_chunk,
                                      method='loss')
    gain_Px2 = ((reference_BxT - loss_BxT) * batch['weight']).sum(-1).reshape(-1, 2)
    margin_P = beta * (gain_Px2[:, 0] - gain_Px2[:, 1])
    return jnp.stack([-jax.nn.log_sigmoid(margin_P), margin_P, (margin_P > 0).astype(jnp.float32)])


def make_train_step(config, seed, grad_clip, schedule, loss_chunk=0, zero=0, beta=0.0):
    """The one train_step(state, batch, axis_name=None) -> (state, metrics): jit it, or wrap it with pmap_train_step.

    batch: x and y [M, B, T], seq_id [M, B]: M micro-batches, whose gradients are averaged into one update; weight
    [M, B, T], if given, multiplies the loss; lr [M, B], if given, is the learning rate, everywhere the same, where
    state.tx has 1. seq_id numbers the sequences of the run; dropout depends on (seed, seq_id) alone.
    loss_chunk: logits are materialized for this many positions at a time; 0 is all. Raises UserError if it does not
    divide block_size.
    zero: above 0 the step runs on a mesh (MeshParallel). 1 (ZeRO-1, arXiv:1910.02054), without other axes than data,
    reduce-scatters the gradients once (reduce_over_replicas); each device updates its shard of the parameters with its
    shard of the optimizer state (MeshParallel.shardings); the parameters are all-gathered again
    (MeshParallel.train_step). 2 (ZeRO-2) reduce-scatters after each micro-batch already.
    beta: above 0, the loss is that of preference_terms, and margin and accuracy are metrics too.
    metrics: float32 scalars loss (mean over micro-batches and devices), grad_norm (before clipping), lr, loss_scale."""
    if 0 < loss_chunk < config.block_size and config.block_size % loss_chunk:
        raise UserError(f'loss_chunk={loss_chunk} does not divide block_size={config.block_size}; '
                        f'it may be one of {[n for n in range(1, config.block_size) if config.block_size % n == 0]}')

    reduce_once = zero == 1  # after the last micro-batch
    shard_each_micro_batch = zero > 1

    def loss_fn(params, frozen, micro_batch, scale):
        params = model_params(params, frozen)
        loss_BxT, sown = GPT(config).apply(
            {'params': params}, micro_batch['x'], micro_batch['y'], loss_chunk=loss_chunk,
            deterministic=False, seq_id_B=micro_batch['seq_id'], start_BxT=micro_batch.get('start'),
            mutable=['losses'], method='loss', rngs={'dropout': jax.random.fold_in(jax.random.key(seed), DROPOUT)})
        if beta:
            reported = preference_terms(config, params, micro_batch, loss_BxT, beta, loss_chunk).mean(1)
            loss = reported[0]
        else:
            if 'weight' in micro_batch:
                loss_BxT *= micro_batch['weight']
            reported = loss = loss_BxT.mean()
        return (loss + sum(jax.tree.leaves(sown))) * scale, reported  # sown: the experts' balancing losses

    def gradients(params, frozen, micro_batch, scale):
        grads, reported = jax.grad(loss_fn, has_aux=True)(params, frozen, micro_batch, scale)
        return shard_params(grads, over_replicas=shard_each_micro_batch), reported

    def sum_gradients(params, batch, scale, frozen=None):
        """(gradients, loss or, with beta, PREFERENCE_METRICS), each the sum over the micro-batches."""
        def micro_step(total, micro_batch):
            return jax.tree.map(jnp.add, total, gradients(params, frozen, micro_batch, scale)), None

        if len(batch['x']) == 1:  # skip accumulation: it would cost another pass over the gradients
            return gradients(params, frozen, jax.tree.map(lambda x: x[0], batch), scale)
        zeros = shard_params(jax.tree.map(jnp.zeros_like, params), over_replicas=shard_each_micro_batch)
        return jax.lax.scan(micro_step, (zeros, jnp.zeros(3 if beta else ())), batch)[0]

    def train_step(state, batch, axis_name=None):
        batch = dict(batch)
        lr_MxB = batch.pop('lr', None)
        lr = schedule(state.step) if lr_MxB is None else lr_MxB[0, 0]
        n_micro = len(batch['x'])  # the scaled loss is their mean, as nanoGPT's: a split batch overflows no earlier
        n_shards = jax.lax.axis_size(axis_name) if axis_name else current_mesh().shape['data'] if reduce_once else 1
        scale = 1.0 if state.loss_scale is None else state.loss_scale['scale'] / (n_micro * n_shards)
        if reduce_once:  # without LoRA, see check_flags
            total = reduce_over_replicas(sum_gradients)(state.params, batch, scale)
        else:
            total = sum_gradients(state.params, batch, scale, state.frozen)
        if axis_name:
            with jax.named_scope('all_reduce'):
                total = jax.lax.pmean(total, axis_name)
        grads, reported = total
        if reduce_once or shard_each_micro_batch:
            grads, params = shard_params((grads, state.params), over_replicas=True)
            state = state.replace(params=params)
        with jax.named_scope('clip'):
            grads, grad_norm = clip_gradients(jax.tree.map(lambda g: g / (n_micro * scale), grads), grad_clip)
        reported = dict(zip(PREFERENCE_METRICS, reported / n_micro)) if beta else {'loss': reported / n_micro}
        metrics = reported | {'grad_norm': grad_norm, 'lr': jnp.float32(lr)}
        with jax.named_scope('optimizer'):
            updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
            if lr_MxB is not None:
                updates = jax.tree.map(lambda u: lr * u, updates)
            params = optax.apply_updates(state.params, updates)
            updated = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        if state.loss_scale is not None:
            metrics['loss_scale'] = state.loss_scale['scale']
            updated = skip_overflow(state, updated, grad_norm)
        return updated, metrics

    return train_step


def reduce_over_replicas(sum_gradients):
    """sum_gradients(params, batch, scale) of the sequences of all devices, on a mesh whose only axis is data: each
    device computes it for its own sequences; then the gradients are reduce-scattered, once."""
    def reduced(params, batch, scale):
        specs = partition_specs(params, current_mesh(), over_replicas=True)

        def mean_shard(spec, grad):
            if not (dims := [dim for dim, axes in enumerate(spec) if 'data' in (axes or ())]):
                return jax.lax.pmean(grad, 'data')
            return jax.lax.psum_scatter(grad, 'data', scatter_dimension=dims[0], tiled=True) / jax.lax.axis_size('data')

        def of_own_sequences(params, batch, scale):
            grads, loss = sum_gradients(params, batch, scale)
            with jax.named_scope('reduce_scatter'):
                return jax.tree.map(mean_shard, specs, grads), jax.lax.pmean(loss, 'data')

        return jax.shard_map(of_own_sequences, in_specs=(P(), P(None, 'data'), P()), out_specs=(specs, P()),
                             check_vma=False)(params, batch, scale)
    return reduced


def skip_overflow(state, updated, grad_norm):
    """float16's dynamic loss scaling, as torch.amp.GradScaler: an update whose gradients overflow is skipped and halves
    the scale; 2000 good updates in a row double it. state.step counts the updates made."""
    finite = jnp.isfinite(grad_norm)
    updated = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
    good_steps = jnp.where(finite, state.loss_scale['good_steps'] + 1, 0)
    factor = jnp.where(finite, jnp.where(good_steps == 2000, 2.0, 1.0), 0.5)
    return updated.replace(loss_scale={'scale': state.loss_scale['scale'] * factor, 'good_steps': good_steps % 2000})


def make_eval_step(config, loss_chunk=0, beta=0.0):
    """eval_step(params, batch, axis_name=None) -> sum over the sequences of weight * mean loss, or mean weight * loss
    if each token has a weight; batch: x, y, weight [B] or [B, T]. With 'spelled' [B, T]: [that, the sum of the mean
    spelled * loss].
    beta: above 0, the sums over the sequences of is_row [B] * PREFERENCE_METRICS of their pairs, [3]."""
    def eval_step(params, batch, axis_name=None):
        loss_BxT = GPT(config).apply({'params': params}, batch['x'], batch['y'], loss_chunk=loss_chunk,
                                     start_BxT=batch.get('start'), method='loss')
        if beta:
            terms_3xP = preference_terms(config, params, batch, loss_BxT, beta, loss_chunk)
            total = (terms_3xP[..., None] * batch['is_row'].reshape(-1, 2)).sum((1, 2))
        elif batch['weight'].ndim == 2:
            total = (loss_BxT * batch['weight']).mean(-1).sum()
        else:
            total = (loss_BxT.mean(-1) * batch['weight']).sum()
        if 'spelled' in batch:
            total = jnp.stack([total, (loss_BxT * batch['spelled']).mean(-1).sum()])
        return jax.lax.psum(total, axis_name) if axis_name else total

    return eval_step


def estimate_loss_jax(eval_step, params, splits, parallel, *, block_size, batch_size, eval_iters,
                      masks=None, vocab_size=2**32, token_bytes=None, stop_signal=lambda: 0):
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
        total = 0.0
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
                batch = {'x': x, 'y': y, 'weight': is_row}
                if masks:
                    mask_x, mask_y = get_windows(masks[split], place, block_size)
                    batch['weight'] = is_row[:, None] * (mask_y == 1)
                    batch |= {'start': find_starts(mask_x)} if tokens.ndim == 2 else {}
            check_ids(batch['x'], batch['y'], vocab_size, split)
            if token_bytes is not None and has_special:  # else it is a step as without bytes
                batch['spelled'] = batch['weight'].reshape(len(rows), -1) * (token_bytes[y] > 0).astype(np.float32)
            total += eval_step(params, parallel.shard_batch(batch, (batch_size,)))
        totals = np.ravel(total).astype(float)
        names = (split, f'{split}_margin', f'{split}_accuracy')[:3 if is_pairs else 1]
        losses |= zip(names, (totals / n_rows / share).tolist())
        if token_bytes is not None:  # the last total is of the tokens that have bytes
            losses[f'{split}_bpb'] = float(totals[-1]) * block_size / math.log(2) / n_bytes
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

# -----------------------------------------------------------------------------
# logging

class IterationLog:
    """Logs the iterations, on accelerators each after the next step is dispatched: fetching metrics waits for it.

    bar: of tqdm. clock: a Stopwatch. metrics_log: a MetricsLog, or None in processes that do not log.
    mfu(tokens per second): the model FLOPs utilization; None if the device's peak is unknown. imports_s: seconds."""

    def __init__(self, bar, clock, metrics_log, *, out_dir, log_interval, max_iters, tokens_per_iter, mfu, imports_s):
        self.bar, self.clock, self.metrics_log, self.out_dir = bar, clock, metrics_log, out_dir
        self.log_interval, self.max_iters, self.tokens_per_iter = log_interval, max_iters, tokens_per_iter
        self.estimate_mfu, self.imports_s = mfu, imports_s
        self.pending = None  # (iter_num, metrics) of the latest iteration, until they are fetched
        self.mfu = None  # the latest
        self.first = True  # no iteration fetched yet
        self.restart_clock()

    def restart_clock(self):
        self.start = time.perf_counter()
        self.n_timed = 0  # iterations fetched since

    def add(self, iter_num, metrics, *, wait):
        """Logs the previous iteration and, if `wait`, this one. metrics: None if it was skipped."""
        self.flush()
        self.pending = iter_num, metrics
        if wait:
            self.flush()

    def flush(self):
        """Fetches the pending metrics and logs them. Raises UserError if they are not finite."""
        if self.pending is None:
            return
        iter_num, metrics = self.pending
        self.pending = None
        self.bar.update()
        if metrics is None:
            self.bar.write(f'iter {iter_num}: skipped, none of its tokens counts in the loss')
            if self.metrics_log:
                self.metrics_log.write({'iter': iter_num, 'loss': None, 'grad_norm': None, 'lr': None})
            return
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        loss = metrics['loss']
        grad_norm = metrics['grad_norm']
        skipped = metrics.get('loss_scale', 0) >= 1  # float16: overflows are skipped, until the scale is below 1
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or skipped):
            raise UserError(f'iteration {iter_num} has loss {loss}, gradient norm {grad_norm}: stopping; the '
                            f'checkpoints in {self.out_dir} are from before; try a lower learning_rate, longer '
                            'warmup_iters or dtype=float32')
        if self.first:
            self.first = False
            lap = self.clock.lap()
            self.bar.write(f'first iteration: imports {self.imports_s:.2f} s, compiling {lap.compiling:.2f} s, '
                           f'running {lap.running:.2f} s')
        self.n_timed += 1
        if iter_num % self.log_interval or not self.metrics_log:
            return
        seconds = (time.perf_counter() - self.start) / self.n_timed  # per iteration, the mean since the last line
        self.restart_clock()
        tokens_per_sec = self.tokens_per_iter / seconds
        self.mfu = self.estimate_mfu and self.estimate_mfu(tokens_per_sec)
        mfu = f'{self.mfu:.2%}' if self.mfu else 'n/a'
        remaining_s = round((self.max_iters - iter_num - 1) * seconds)
        eta = datetime.timedelta(seconds=remaining_s) if self.max_iters else 'n/a'
        of_pairs = ''.join(f', {name} {metrics[name]:.4f}' for name in PREFERENCE_METRICS[1:] if name in metrics)
        self.bar.write(f'iter {iter_num}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, mfu {mfu}, '
                       f'{tokens_per_sec:,.0f} tok/s, grad norm {grad_norm:.3f}, eta {eta}{of_pairs}')
        self.metrics_log.write({'iter': iter_num, **metrics, 'time_ms': seconds * 1000,
                                'tokens_per_sec': tokens_per_sec, 'mfu': self.mfu})


def start_wandb(**settings):
    """A wandb run; with the id of an earlier run it continues that one. Raises UserError if wandb does not start."""
    try:
        import wandb
        return wandb.init(resume='allow', **settings)
    except Exception as error:
        raise UserError(f'wandb does not start: {error}; log in (wandb login), set WANDB_MODE=offline, or leave it out '
                        '(--wandb_log=False)') from error
