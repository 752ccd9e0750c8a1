"""Causal attention without materialized scores (chunked, blockwise, cuDNN, splash), and the causal
mask."""
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as Spec

from jax_flags import UserError
from jax_ops.dropout import hash_dropout
from jax_ops.matmul import matmul, soft_cap
from jax_ops.sharding import batch_axes, current_mesh

# 'xla': dot_product_attention of jax_transformer.py; others: here
ATTENTION = ('xla', 'chunked', 'cudnn', 'splash')


def causal_mask(key_position, position, *, window=0, chunk=0):
    """True where a query may attend to a key: at its own position and before; with `window` among
    the last `window` positions only, with `chunk` within its chunk of that many positions.

    Training and decoding mask in different places, because a kernel of training knows its keys by
    index, and decoding by the positions in the slots of a KV cache (attend in jax_transformer.py
    chooses): attention_mask makes the mask for dot_product_attention and blockwise_attention, which
    apply it; chunked_attention applies it in its attend_block; cudnn_attention and splash_kernel
    have their kernels do so."""
    mask = key_position <= position
    if window:
        mask &= key_position > position - window
    if chunk:
        mask &= key_position // chunk == position // chunk
    return mask


def first_key_of(position, window, chunk, start_BxT=None):
    """The first position to which causal_mask lets a query at this position attend. In packed rows
    chunks begin where a conversation does, so that a query may see chunk positions before it."""
    if start_BxT is not None:
        window, chunk = window or chunk, 0
    if chunk:
        return position // chunk * chunk
    return max(0, position + 1 - window) if window else 0


def fused_causal_attention(implementation, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, *, scale=None, cap=0.0, window=0,
                           chunk=0, sinks_H=None, dropout_rate=0.0, key_B=None, start_BxT=None):
    """dot_product_attention of jax_transformer.py with the causal_mask of positions 0 .. T-1 -> [B,
    T, H, K].

    start_BxT: of packed rows (GPT.loss): a query attends to the keys from its start on, and chunks
    begin there.

    implementation: 'chunked' (any backend), 'cudnn' (NVIDIA GPUs) or 'splash' (TPUs). On a mesh
    each device computes its heads of its sequences. Raises UserError for what the kernels of cuDNN
    and TPUs do not compute."""
    options = {'scale': scale or q_BxTxHxK.shape[-1]**-0.5, 'cap': cap, 'window': window, 'chunk': chunk}

    def attend(first_group, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B, start_BxT):
        qkv = q_BxTxHxK, k_BxTxGxK, v_BxTxGxK
        if implementation == 'chunked':
            return chunked_attention(*qkv, sinks_H=sinks_H, dropout_rate=dropout_rate, key_B=key_B,
                                     first_group=first_group, start_BxT=start_BxT, **options)
        if key_B is not None:
            raise UserError(f'{implementation} attention has no dropout: use attention=chunked, or dropout=0')
        if implementation == 'splash':
            return splash_attention(*qkv, sinks_H=sinks_H, start_BxT=start_BxT, **options)
        if sinks_H is not None or cap or start_BxT is not None:
            raise UserError('cudnn attention has no sinks, cap of scores or packed rows: use attention=chunked')
        return cudnn_attention(*qkv, scale=options['scale'], window=window, chunk=chunk)

    mesh = current_mesh()
    if mesh is None:
        return attend(0, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B, start_BxT)
    T, H = q_BxTxHxK.shape[1:3]
    n_context = mesh.shape['context']
    kernel, kernel_spec = None, None
    if n_context > 1 and implementation == 'splash':
        kernel = splash_kernel(T, H // mesh.shape['tensor'], window, chunk, n_context, cap)
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, Spec(None, 'context')))

    def attend_local(kernel, *args):
        q_BxTxHxK, k_BxTxGxK, *_ = args
        first_group = jax.lax.axis_index('tensor') * k_BxTxGxK.shape[2]
        if n_context == 1:
            return attend(first_group, *args)
        if implementation == 'cudnn':
            raise UserError('cudnn attention does not shard a sequence: use attention=chunked with context')
        return context_attention(*args, kernel=kernel, first_group=first_group, dropout_rate=dropout_rate, **options)

    batch = batch_axes(len(q_BxTxHxK))
    heads = Spec(batch, 'context', 'tensor')
    specs = (kernel_spec, heads, heads, heads, Spec('tensor'), Spec(batch), Spec(batch, 'context'))
    attend_sharded = jax.shard_map(attend_local, in_specs=specs, out_specs=heads, check_vma=False)
    return attend_sharded(kernel, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B, start_BxT)


def context_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B, start_BxT, *, kernel, first_group, window, chunk,
                      scale, cap, dropout_rate):
    """fused_causal_attention on one of C (n_context) devices, each with T consecutive positions of
    a sequence, inside shard_map. kernel: of splash_kernel; None is chunked attention.

    Keys and values are all-gathered. The queries are exchanged so that every device has the same
    work: of each of the C parts of the sequence, device i computes the i-th of C pieces, which
    attends to the parts up to its own. That is (C + 1) / 2C of all scores, where causal attention
    needs 1/2."""
    n_context = jax.lax.axis_size('context')
    T = q_BxTxHxK.shape[1]
    n = T // n_context
    exchange = functools.partial(jax.lax.all_to_all, axis_name='context', split_axis=1, concat_axis=1, tiled=True)
    key_start_BxS = start_BxT if start_BxT is None else jax.lax.all_gather(start_BxT, 'context', axis=1, tiled=True)
    with jax.named_scope('all_to_all'):
        q_BxTxHxK, start_BxT = jax.tree.map(exchange, (q_BxTxHxK, start_BxT))
    with jax.named_scope('all_gather'):
        k_BxSxGxK, v_BxSxGxK = (jax.lax.all_gather(x, 'context', axis=1, tiled=True) for x in (k_BxTxGxK, v_BxTxGxK))
    if kernel:
        return exchange(splash_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, scale=scale, sinks_H=sinks_H, kernel=kernel,
                                         start_BxT=start_BxT, key_start_BxS=key_start_BxS))
    ys = []
    for part in range(n_context):
        first_key = first_key_of(part * T, window, chunk, start_BxT)
        seen = slice(first_key, (part + 1) * T)
        start_Bxn = None if start_BxT is None else start_BxT[:, part * n:(part + 1) * n]
        ys.append(chunked_attention(
            q_BxTxHxK[:, part * n:(part + 1) * n], k_BxSxGxK[:, seen], v_BxSxGxK[:, seen], scale=scale, cap=cap,
            window=window, chunk=chunk, sinks_H=sinks_H, dropout_rate=dropout_rate, key_B=key_B,
            first_group=first_group, first=part * T + jax.lax.axis_index('context') * n, first_key=first_key,
            n_positions=n_context * T, start_BxT=start_Bxn))
    return exchange(jnp.concatenate(ys, axis=1))


def cudnn_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, *, scale, window=0, chunk=0):
    """fused_causal_attention by cuDNN's flash attention. `chunk` divides T or is at least T."""
    B, T = q_BxTxHxK.shape[:2]
    qkv = q_BxTxHxK, k_BxTxGxK, v_BxTxGxK
    if chunk and chunk < T:  # chunks attend like sequences of their own
        qkv = [x.reshape(B * T // chunk, chunk, *x.shape[2:]) for x in qkv]
    y = jax.nn.dot_product_attention(*qkv, scale=scale, is_causal=True, implementation='cudnn',
                                     local_window_size=(window - 1, 0) if window else None)
    return y.reshape(q_BxTxHxK.shape)


def splash_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, *, scale, cap=0.0, window=0, chunk=0, sinks_H=None,
                     interpret=False, kernel=None, start_BxT=None, key_start_BxS=None):
    """fused_causal_attention by the splash attention kernel for TPUs that JAX ships. kernel:
    another splash_kernel."""
    T, H = q_BxTxHxK.shape[1:3]
    attend = kernel or splash_kernel(T, H, window, chunk, cap=cap, interpret=interpret)
    q, k, v = (x.swapaxes(1, 2) for x in ((q_BxTxHxK * scale).astype(q_BxTxHxK.dtype), k_BxTxGxK, v_BxTxGxK))
    if start_BxT is None:
        return jax.vmap(lambda q, k, v: attend(q, k, v, sinks=sinks_H))(q, k, v).swapaxes(1, 2)
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds
    ids = SegmentIds(q=start_BxT, kv=start_BxT if key_start_BxS is None else key_start_BxS)
    return jax.vmap(lambda q, k, v, ids: attend(q, k, v, ids, sinks=sinks_H))(q, k, v, ids).swapaxes(1, 2)


@functools.lru_cache(maxsize=8)  # its tables are computed on the CPU, a minute for T = 131,072
def splash_kernel(T, H, window=0, chunk=0, context=1, cap=0.0, *, interpret=False):
    """The splash attention kernel for H heads of T positions, of which `context` devices compute
    the queries as context_attention says. Blocks of 512 positions, as MaxText's, where they divide
    a device's queries; else 128."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    mask = masks.CausalMask((T, T))
    if window:
        mask = masks.LocalMask((T, T), (window - 1, 0), 0)
    if chunk and chunk < T:
        mask = masks.ChunkedCausalMask((T, T), chunk)
    # [part, piece, position]
    positions = np.arange(T, dtype=np.int32).reshape(context, context, -1)
    mask.q_sequence = np.ascontiguousarray(positions.swapaxes(0, 1)).ravel()
    block = 512 if T // context % 512 == 0 else 128
    names = [field.name for field in dataclasses.fields(kernel.BlockSizes) if field.name.startswith('block_')]
    with jax.ensure_compile_time_eval():
        return kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * H), head_shards=1, q_seq_shards=context, interpret=interpret,
            attn_logits_soft_cap=cap or None, block_sizes=kernel.BlockSizes(**dict.fromkeys(names, block)))


@functools.partial(jax.jit, static_argnames=(
    'scale', 'cap', 'window', 'chunk', 'dropout_rate', 'first_key', 'n_positions'))
def chunked_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, *, scale=None, cap=0.0, window=0, chunk=0, sinks_H=None,
                      dropout_rate=0.0, key_B=None, first_group=0, first=0, first_key=0, n_positions=None,
                      start_BxT=None):
    """fused_causal_attention in blocks of queries, on any backend. Values may be wider or narrower
    than keys.

    A block of queries is computed at a time, against the keys that it may attend to: on a CPU 128
    queries of one sequence, so that the probabilities stay in its L2 cache, elsewhere 512 of all
    sequences. Probabilities are never stored, but recomputed in the backward pass
    (docs/lab_log.md#chunked-attention). first_group: the number of this device's first key head,
    for the dropout masks. n_positions: length of the sequence, if these are not all of its
    positions; first and first_key: then the positions of the first query and key. With jit, layers
    share a trace."""
    B, T, H, K = q_BxTxHxK.shape
    in_pieces = n_positions is not None
    n_positions = n_positions or T
    G = k_BxTxGxK.shape[2]
    Q = H // G  # query heads of a group are folded into the time axis, as in dot_product_attention
    first_counter = jnp.uint32(first_group) * jnp.uint32(n_positions * Q * n_positions % 2**32)

    def attend_block(first, first_key, q_GxTQxK, k_GxSxK, v_GxSxK, key, start_T):
        n, end = q_GxTQxK.shape[1] // Q, first_key + k_GxSxK.shape[1]
        scores_GxTQxS = matmul(q_GxTQxK, k_GxSxK, transpose_rhs=True, dtype=jnp.float32) * (scale or K**-0.5)
        scores_GxTQxS = soft_cap(scores_GxTQxS, cap)
        position_TQx1 = jnp.repeat(first + jnp.arange(n), Q)[:, None]
        key_position = jnp.arange(first_key, end)
        # both counted from the start of the query's conversation; what is before is not seen
        if start_T is not None:
            start_TQx1 = jnp.repeat(start_T, Q)[:, None]
            key_position = jnp.where(key_position < start_TQx1, 2**30, key_position - start_TQx1)
            position_TQx1 -= start_TQx1
        mask_TQxS = causal_mask(key_position, position_TQx1, window=window, chunk=chunk)
        scores_GxTQxS = jnp.where(mask_TQxS, scores_GxTQxS, jnp.finfo(jnp.float32).min)
        if sinks_H is not None:
            sinks_GxTQx1 = jnp.tile(sinks_H.reshape(G, Q), n)[..., None]
            scores_GxTQxS = jnp.concatenate([scores_GxTQxS, sinks_GxTQx1], axis=-1)
        probs_GxTQxS = jax.nn.softmax(scores_GxTQxS)[..., :end - first_key]
        if key is not None:
            g, tq, s = (jax.lax.broadcasted_iota(jnp.uint32, scores_GxTQxS.shape[:2] + (end - first_key,), axis)
                        for axis in range(3))
            tq += jnp.uint32(first * Q)
            # flat_index of this block in the probabilities of all devices, [H / Q, n_positions Q,
            # n_positions]
            counter_GxTQxS = first_counter + (g * jnp.uint32(n_positions * Q) + tq) * jnp.uint32(n_positions) + (
                s + jnp.uint32(first_key))
            probs_GxTQxS = hash_dropout(probs_GxTQxS[None], dropout_rate, key[None], counter_GxTQxS)[0]
        return matmul(probs_GxTQxS.astype(v_GxSxK.dtype), v_GxSxK)

    def attend_sequence(sequence, n, in_loop):
        q_GxTQxK, k_GxTxK, v_GxTxK, key, start_T = sequence
        n *= max(1, T // (64 * n))  # at most 64 blocks, because each is compiled
        attend = jax.checkpoint(attend_block, prevent_cse=not in_loop, static_argnums=(0, 1))
        sizes = [min(n, T - first) for first in range(0, T, n)]
        # split and concatenated again, in float32: the gradients of a key are then added by block,
        # none padded to [T]
        qs = jax.lax.split(q_GxTQxK, [size * Q for size in sizes], axis=1)
        ks = jax.lax.split(k_GxTxK.astype(jnp.float32), sizes, axis=1)
        vs = jax.lax.split(v_GxTxK.astype(jnp.float32), sizes, axis=1)
        ys = []
        for i, q in enumerate(qs):
            seen = slice(first_key_of(i * n, window, chunk, start_T) // n, i + 1)
            k, v = (jnp.concatenate(blocks[seen], axis=1).astype(v_GxTxK.dtype) for blocks in (ks, vs))
            starts = None if start_T is None else start_T[i * n:(i + 1) * n]
            ys.append(attend(i * n, seen.start * n, q, k, v, key, starts))
        return jnp.concatenate(ys, axis=1)

    def attend_piece(sequence):
        q_GxTQxK, k_GxSxK, v_GxSxK, key, start_T = sequence
        n = math.gcd(T, 128)
        # so that gradients are added in it
        k_GxSxK, v_GxSxK = k_GxSxK.astype(jnp.float32), v_GxSxK.astype(jnp.float32)
        attend = jax.checkpoint(attend_block, prevent_cse=False, static_argnums=1)

        def attend_next(block):
            k, v = k_GxSxK.astype(v_BxTxGxK.dtype), v_GxSxK.astype(v_BxTxGxK.dtype)
            return attend(first + block[0] * n, first_key, block[1], k, v, key, block[2])

        blocks = q_GxTQxK.reshape(G, T // n, n * Q, K).swapaxes(0, 1)
        starts = start_T if start_T is None else start_T.reshape(T // n, n)
        return jax.lax.map(attend_next, (jnp.arange(T // n), blocks, starts)).swapaxes(0, 1).reshape(G, T * Q, -1)

    q_BxGxTQxK = q_BxTxHxK.reshape(B, T, G, Q, K).swapaxes(1, 2).reshape(B, G, T * Q, K)
    sequences = q_BxGxTQxK, k_BxTxGxK.swapaxes(1, 2), v_BxTxGxK.swapaxes(1, 2), key_B, start_BxT
    # checkpointed again, so that the loop does not stack the keys of each block: 0.71 of the time
    # (docs/lab_log.md)
    attend_one = jax.checkpoint(functools.partial(attend_sequence, n=128, in_loop=True), prevent_cse=False)
    one_by_one = functools.partial(jax.lax.map, attend_one)
    all_at_once = jax.vmap(functools.partial(attend_sequence, n=512, in_loop=False))
    if in_pieces:
        y_BxGxTQxK = jax.lax.map(attend_piece, sequences)
    else:
        y_BxGxTQxK = jax.lax.platform_dependent(sequences, cpu=one_by_one, default=all_at_once)
    return y_BxGxTQxK.reshape(B, G, T, Q, -1).swapaxes(1, 2).reshape(B, T, H, -1)


def blockwise_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, *, scale=None, cap=0.0, sinks_H=None):
    """dot_product_attention of jax_transformer.py, for a piece of a long prompt; without dropout
    and gradients.

    256 queries at a time, and blocks of n = 256 keys with a running softmax (arXiv:2205.14135):
    scores take [B, G, TQ, n], not [B, G, TQ, S], and blocks of which the mask allows no key are
    skipped. In a cache of more than 2,048 slots n is 512: larger matmuls, 0.95 of the time for
    4,096 tokens of SmolLM2."""
    B, T, H, K = q_BxTxHxK.shape
    S, G = k_BxSxGxK.shape[1:3]
    if T > 256 and T % 256 == 0:
        def attend(queries):
            q_Bx256xHxK, mask_Bx256xS = queries
            return blockwise_attention(q_Bx256xHxK, k_BxSxGxK, v_BxSxGxK, mask_Bx256xS, scale=scale, cap=cap,
                                       sinks_H=sinks_H)

        def split(x):
            return x.reshape(B, T // 256, 256, *x.shape[2:]).swapaxes(0, 1)

        y_nxBx256xHxK = jax.lax.map(attend, (split(q_BxTxHxK), split(mask_BxTxS)))
        return y_nxBx256xHxK.swapaxes(0, 1).reshape(B, T, H, -1)
    Q = H // G  # query heads of a group are folded into the time axis, as in dot_product_attention
    n = min(512 if S > 2048 else 256, S)
    q_BxGxTQxK = q_BxTxHxK.reshape(B, T, G, Q, K).swapaxes(1, 2).reshape(B, G, T * Q, K)

    def attend_block(j, carry):
        max_BxGxTQx1, sum_BxGxTQx1, y_BxGxTQxK = carry
        i = block_n[j]
        start = jnp.minimum(i * n, S - n)  # the last block overlaps the one before
        k_BxGxnxK, v_BxGxnxK = (jax.lax.dynamic_slice_in_dim(x, start, n, axis=1).swapaxes(1, 2)
                                for x in (k_BxSxGxK, v_BxSxGxK))
        mask_BxTxn = jax.lax.dynamic_slice_in_dim(mask_BxTxS, start, n, axis=2) & (start + jnp.arange(n) >= i * n)
        scores_BxGxTQxn = matmul(q_BxGxTQxK, k_BxGxnxK, transpose_rhs=True, dtype=jnp.float32)
        scores_BxGxTQxn = soft_cap(scores_BxGxTQxn * (scale or K**-0.5), cap)
        scores_BxGxTQxn = jnp.where(jnp.repeat(mask_BxTxn, Q, axis=1)[:, None], scores_BxGxTQxn,
                                    jnp.finfo(jnp.float32).min)
        new_max_BxGxTQx1 = jnp.maximum(max_BxGxTQx1, scores_BxGxTQxn.max(-1, keepdims=True))
        exp_BxGxTQxn = jnp.exp(scores_BxGxTQxn - new_max_BxGxTQx1)
        decay_BxGxTQx1 = jnp.exp(max_BxGxTQx1 - new_max_BxGxTQx1)
        y_BxGxTQxK = y_BxGxTQxK * decay_BxGxTQx1 + matmul(
            exp_BxGxTQxn.astype(v_BxGxnxK.dtype), v_BxGxnxK, dtype=jnp.float32)
        return new_max_BxGxTQx1, sum_BxGxTQx1 * decay_BxGxTQx1 + exp_BxGxTQxn.sum(-1, keepdims=True), y_BxGxTQxK

    is_used_n = jnp.pad(mask_BxTxS.any((0, 1)), (0, -S % n)).reshape(-1, n).any(1)
    block_n = jnp.argsort(~is_used_n)  # those in use first
    max_BxGxTQx1 = jnp.full((B, G, T * Q, 1), jnp.finfo(jnp.float32).min)
    sum_BxGxTQx1 = jnp.zeros((B, G, T * Q, 1))
    if sinks_H is not None:  # one more logit, whose value is 0
        max_BxGxTQx1 = jnp.maximum(max_BxGxTQx1, jnp.tile(sinks_H.reshape(G, Q), T)[..., None])
        sum_BxGxTQx1 += 1
    y_BxGxTQxK = jnp.zeros((B, G, T * Q, v_BxSxGxK.shape[-1]))
    carry = max_BxGxTQx1, sum_BxGxTQx1, y_BxGxTQxK
    _, sum_BxGxTQx1, y_BxGxTQxK = jax.lax.fori_loop(0, is_used_n.sum(), attend_block, carry)
    y_BxGxTQxK = (y_BxGxTQxK / sum_BxGxTQx1).astype(v_BxSxGxK.dtype)
    return y_BxGxTQxK.reshape(B, G, T, Q, -1).swapaxes(1, 2).reshape(B, T, H, -1)
