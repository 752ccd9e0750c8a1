"""Causal attention for training, without materialized scores: chunked attention, and the flash
attention kernels of cuDNN and of TPUs (splash).

fused_causal_attention calls one of them, on one device or on a mesh. The classes Scores and Dropout
(attention.py) hold the options of the computation, the class Qkv its inputs. The class Piece says
which part of a sequence is on a device. The classes Sequence and Common hold the inputs of the
blocks of chunked_attention."""
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec as Spec

from jax_flags import UserError
from jax_ops.attention import (
    NO_DROPOUT, Dropout, Scores, causal_mask, fold_groups, unfold_groups)
from jax_ops.dropout import hash_dropout
from jax_ops.matmul import matmul
from jax_ops.sharding import batch_axes, current_mesh


# -----------------------------------------------------------------------------
# the choice between the kernels, on one device and on a mesh

class Qkv(NamedTuple):
    """The queries, keys and values of a batch of sequences.

    start_BxT: for packed rows, the first position of each token's conversation (GPT.loss). A query
    then attends only to keys of its own conversation. None elsewhere."""
    q_BxTxHxK: jax.Array
    k_BxSxGxK: jax.Array  # S is T, but in a piece of a sequence
    v_BxSxGxK: jax.Array
    start_BxT: jax.Array | None = None


def fused_causal_attention(implementation, qkv, scores, *, sinks_H=None, dropout=NO_DROPOUT):
    """Computes dot_product_attention of jax_transformer.py with a causal mask over the positions 0
    to T-1. Returns [B, T, H, K]. On a mesh each device computes its heads of its sequences.

    implementation: 'chunked' (any backend), 'cudnn' (NVIDIA GPUs) or 'splash' (TPUs).
    qkv: a Qkv. scores: a Scores. dropout: a Dropout. sinks_H: see dot_product_attention.
    In packed rows the chunks of scores.chunk are counted from the start of the conversation, not of
    the row. ('splash' counts them from the start of the row; choose_attention refuses it for packed
    rows with chunks.)
    Raises UserError for options that the kernels of cuDNN and TPUs lack."""
    mesh = current_mesh()
    if mesh is None:
        return attend_on_device(implementation, qkv, scores, sinks_H=sinks_H, dropout=dropout)

    # splash's tables are sharded with the queries, so they enter shard_map as an argument
    B, T, H = qkv.q_BxTxHxK.shape[:3]
    n_context = mesh.shape['context']
    kernel, kernel_spec = None, None
    if n_context > 1 and implementation == 'splash':
        kernel = splash_kernel(T, H // mesh.shape['tensor'], scores, n_context)
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, Spec(None, 'context')))

    def attend_local(kernel, qkv, sinks_H, key_B):
        first_group = jax.lax.axis_index('tensor') * qkv.k_BxSxGxK.shape[2]
        options = {'sinks_H': sinks_H, 'dropout': Dropout(key_B, dropout.rate, first_group)}
        if n_context == 1:
            return attend_on_device(implementation, qkv, scores, **options)
        if implementation == 'cudnn':
            raise UserError('cudnn attention does not shard a sequence: use attention=chunked with '
                            'context')
        return context_attention(qkv, scores, kernel=kernel, **options)

    # sequences over the batch axes, positions over context, heads over tensor
    batch = batch_axes(B)
    heads = Spec(batch, 'context', 'tensor')
    specs = (kernel_spec, Qkv(heads, heads, heads, Spec(batch, 'context')), Spec('tensor'),
             Spec(batch))
    attend_sharded = jax.shard_map(attend_local, in_specs=specs, out_specs=heads, check_vma=False)
    return attend_sharded(kernel, qkv, sinks_H, dropout.key_B)


def attend_on_device(implementation, qkv, scores, *, sinks_H, dropout):
    """Computes fused_causal_attention of whole sequences on one device. Raises UserError for
    dropout with another implementation than 'chunked'."""
    if implementation == 'chunked':
        return chunked_attention(qkv, scores, sinks_H=sinks_H, dropout=dropout)
    if dropout.key_B is not None:
        raise UserError(f'{implementation} attention has no dropout: use attention=chunked, or '
                        'dropout=0')
    attend = splash_attention if implementation == 'splash' else cudnn_attention
    return attend(qkv, scores, sinks_H=sinks_H)


def context_attention(qkv, scores, *, sinks_H, dropout, kernel):
    """Computes fused_causal_attention on one of C = n_context devices, inside shard_map. Device d
    has the queries, keys and values of T consecutive positions, d T to (d + 1) T - 1. Returns the
    attention of these T queries over the keys of the whole sequence, [B, T, H, K].

    qkv: the Qkv of this device's T positions. kernel: a splash_kernel; None is chunked attention.
    scores, sinks_H, dropout: as in fused_causal_attention.

    Keys and values are all-gathered. An all-to-all exchanges the queries, so that all devices have
    the same work: the T positions of each device are cut into C pieces, and device i computes piece
    i of every device. Example with C = 2, T = 4: device 0 computes the positions 0 1 4 5, device 1
    the positions 2 3 6 7. A second all-to-all exchanges the results back.

    For a piece of device d, chunked attention computes the scores of all keys of the devices 0 to
    d, and masks the later keys. So it computes (C + 1) / 2C of all scores, although the causal mask
    keeps only about half of all scores. Chunked attention computes fewer scores if scores.window or
    scores.chunk limits the keys of a query."""
    n_context = jax.lax.axis_size('context')
    T = qkv.q_BxTxHxK.shape[1]
    n = T // n_context

    def exchange(x):
        return jax.lax.all_to_all(x, 'context', split_axis=1, concat_axis=1, tiled=True)

    def gather(x):
        return jax.lax.all_gather(x, 'context', axis=1, tiled=True)

    # the keys and values of all positions, and this device's pieces of the queries
    q_BxTxHxK, *kv, start_BxT = qkv
    with jax.named_scope('all_gather'):
        k_BxSxGxK, v_BxSxGxK, key_start_BxS = jax.tree.map(gather, (*kv, start_BxT))
    with jax.named_scope('all_to_all'):
        q_BxTxHxK, start_BxT = jax.tree.map(exchange, (q_BxTxHxK, start_BxT))

    # splash: the kernel's mask takes the pieces into account
    if kernel:
        y_BxTxHxK = splash_attention(
            Qkv(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, start_BxT), scores, kernel=kernel,
            sinks_H=sinks_H, key_start_BxS=key_start_BxS)
        return exchange(y_BxTxHxK)

    # chunked: one piece after the other, each with the keys of the parts up to its own
    ys = []
    for part in range(n_context):
        own = slice(part * n, (part + 1) * n)
        first_key = first_key_of(part * T, scores, is_packed=start_BxT is not None)
        seen = slice(first_key, (part + 1) * T)
        piece = Piece(first=part * T + jax.lax.axis_index('context') * n, first_key=first_key,
                      n_positions=n_context * T)
        start_Bxn = None if start_BxT is None else start_BxT[:, own]
        qkv = Qkv(q_BxTxHxK[:, own], k_BxSxGxK[:, seen], v_BxSxGxK[:, seen], start_Bxn)
        ys.append(chunked_attention(
            qkv, scores, sinks_H=sinks_H, dropout=dropout, piece=piece))
    return exchange(jnp.concatenate(ys, axis=1))


# -----------------------------------------------------------------------------
# kernels that come with GPUs and TPUs

def cudnn_attention(qkv, scores, *, sinks_H):
    """Computes fused_causal_attention by cuDNN's flash attention, which is called without sinks, a
    cap of the scores or packed rows. So this function raises UserError if sinks_H or qkv.start_BxT
    is not None, or if scores.cap is not 0. scores.chunk must be 0, divide T, or be at least T."""
    if sinks_H is not None or scores.cap or qkv.start_BxT is not None:
        raise UserError('cudnn attention has no sinks, cap of scores or packed rows: use '
                        'attention=chunked')
    B, T, H, K = qkv.q_BxTxHxK.shape
    chunk, window = scores.chunk, scores.window
    arrays = qkv[:3]
    if chunk and chunk < T:  # each chunk is computed as a sequence of its own
        arrays = [x.reshape(B * T // chunk, chunk, *x.shape[2:]) for x in arrays]
    local_window_size = None
    if window:
        local_window_size = (window - 1, 0)  # positions before the query, and after it
    y = jax.nn.dot_product_attention(*arrays, scale=scores.scale_of(K), is_causal=True,
                                     implementation='cudnn', local_window_size=local_window_size)
    return y.reshape(B, T, H, K)


def splash_attention(qkv, scores, *, kernel=None, sinks_H=None, key_start_BxS=None):
    """Computes fused_causal_attention by splash attention, a kernel for TPUs that JAX ships.

    kernel: a splash_kernel; by default the kernel for whole sequences on one device. key_start_BxS:
    for each key, the start of its conversation, as qkv.start_BxT for each query; only needed if the
    queries are one device's part of a sequence, and the keys are the whole sequence."""
    q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, start_BxT = qkv
    T, H, K = q_BxTxHxK.shape[1:]
    attend = kernel or splash_kernel(T, H, scores)

    # the kernel has no scale, and takes one sequence, heads first
    scaled_BxTxHxK = (q_BxTxHxK * scores.scale_of(K)).astype(q_BxTxHxK.dtype)
    q_BxHxTxK, k_BxGxSxK, v_BxGxSxK = (
        x.swapaxes(1, 2) for x in (scaled_BxTxHxK, k_BxSxGxK, v_BxSxGxK))

    def attend_sequence(q, k, v, segment_ids):
        return attend(q, k, v, segment_ids, sinks=sinks_H)

    # the start of a conversation serves as its id, because no other conversation has the same start
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds
    if key_start_BxS is None:
        key_start_BxS = start_BxT
    ids = None if start_BxT is None else SegmentIds(q=start_BxT, kv=key_start_BxS)
    return jax.vmap(attend_sequence)(q_BxHxTxK, k_BxGxSxK, v_BxGxSxK, ids).swapaxes(1, 2)


@functools.lru_cache(maxsize=8)  # its tables are computed on the CPU, a minute for T = 131,072
def splash_kernel(T, H, scores, n_context=1, *, interpret=False):
    """Returns the splash attention kernel for H heads of T positions. n_context devices share the
    queries as in context_attention. scores: the Scores of the layer, with its window, chunk and
    cap. interpret: whether the kernel runs without a TPU, slowly.

    The kernel's blocks have 512 positions, as in MaxText, if 512 divides the number of a device's
    queries; else 128."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    mask = masks.CausalMask((T, T))
    if scores.window:
        mask = masks.LocalMask((T, T), (scores.window - 1, 0), 0)
    if scores.chunk and scores.chunk < T:
        mask = masks.ChunkedCausalMask((T, T), scores.chunk)

    # the order of the queries on the devices: [part, piece, position] -> [piece, part, position]
    positions = np.arange(T, dtype=np.int32).reshape(n_context, n_context, -1)
    mask.q_sequence = np.ascontiguousarray(positions.swapaxes(0, 1)).ravel()

    # every block of the forward and the backward pass has the same size
    size = 512 if T // n_context % 512 == 0 else 128
    fields = dataclasses.fields(kernel.BlockSizes)
    names = [field.name for field in fields if field.name.startswith('block_')]
    sizes = kernel.BlockSizes(**dict.fromkeys(names, size))
    with jax.ensure_compile_time_eval():
        return kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * H), head_shards=1, q_seq_shards=n_context,
            interpret=interpret, attn_logits_soft_cap=scores.cap or None, block_sizes=sizes)


# -----------------------------------------------------------------------------
# chunked attention: training on any backend

def first_key_of(position, scores, *, is_packed):
    """Returns the position of the first key that causal_mask allows for a query at `position`.
    scores: the settings of the attention, with its window or chunk. Without a window or chunks,
    returns 0.

    In packed rows (is_packed), chunks are counted from the start of each conversation, not of the
    row. The first key then differs from row to row. In this case returns a lower bound that holds
    for all rows: max(0, position + 1 - scores.chunk)."""
    window, chunk = scores.window, scores.chunk
    if is_packed:
        # wherever the conversation begins, a query sees at most `chunk` positions
        window, chunk = window or chunk, 0
    if chunk:
        return position // chunk * chunk
    if window:
        return max(0, position + 1 - window)
    return 0


class Sequence(NamedTuple):
    """Holds the queries, keys and values of one sequence. The first axis of each array is the
    heads. A Sequence may also hold a whole batch; each array then has a batch axis before the
    heads. The Q = H / G query heads of a group are folded into the time axis, as in
    dot_product_attention."""
    q_GxTQxK: jax.Array
    k_GxSxK: jax.Array
    v_GxSxK: jax.Array
    key: jax.Array | None  # the sequence's dropout key; None is no dropout
    start_T: jax.Array | None  # where each query's conversation begins; None if rows are not packed


class Piece(struct.PyTreeNode):
    """The positions of a sequence that a device computes, if it does not compute all of them."""
    first: Any  # the position of the first query
    first_key: int = struct.field(pytree_node=False)  # the position of the first key
    n_positions: int = struct.field(pytree_node=False)  # the length of the sequence


@dataclasses.dataclass(frozen=True)
class Common:
    """The inputs that all blocks of a call of chunked_attention share."""
    scores: Scores
    Q: int  # query heads of a group
    n_positions: int  # the length of the whole sequence, even if only a piece is computed
    sinks_H: jax.Array | None
    dropout: Dropout  # only rate and first_group are used; each Sequence has its own key


@functools.partial(jax.jit, static_argnames='scores')
def chunked_attention(qkv, scores, *, sinks_H=None, dropout=NO_DROPOUT, piece=None):
    """Computes fused_causal_attention in blocks of queries, on any backend. Values may have another
    width than keys.

    A block of queries is computed at a time, against the keys that it may attend to. On a CPU, a
    block has 128 queries of one sequence, so that the probabilities stay in the L2 cache.
    Elsewhere, a block has 512 queries of each sequence, for all sequences of the batch at once. In
    long sequences, a block has more queries (see attend_sequence). Probabilities are never stored,
    but recomputed in the backward pass (docs/lab_log.md#chunked-attention). The function is under
    jit so that all layers with the same `scores` share one trace.

    piece: a Piece, if the T queries and S keys are only a part of each sequence. The T positions
    are then consecutive, and so are the S positions. For the size of a block of a piece, see
    attend_piece."""
    q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, start_BxT = qkv
    T, H = q_BxTxHxK.shape[1:3]
    G = k_BxSxGxK.shape[2]
    common = Common(scores, H // G, piece.n_positions if piece else T, sinks_H, dropout)
    sequences = Sequence(fold_groups(q_BxTxHxK, G), k_BxSxGxK.swapaxes(1, 2),
                         v_BxSxGxK.swapaxes(1, 2), dropout.key_B, start_BxT)
    if piece:
        attend_one = functools.partial(attend_piece, common, piece)
        return unfold_groups(jax.lax.map(attend_one, sequences), T)

    # checkpointed a second time, so that the loop does not stack the keys of each block: it takes
    # 0.71 of the time (docs/lab_log.md)
    attend_one = functools.partial(attend_sequence, common, n=128, in_loop=True)
    attend_one = jax.checkpoint(attend_one, prevent_cse=False)
    one_by_one = functools.partial(jax.lax.map, attend_one)
    all_at_once = jax.vmap(functools.partial(attend_sequence, common, n=512, in_loop=False))
    y_BxGxTQxK = jax.lax.platform_dependent(sequences, cpu=one_by_one, default=all_at_once)
    return unfold_groups(y_BxGxTQxK, T)


def attend_sequence(common, sequence, n, in_loop):
    """Computes chunked_attention of one Sequence, in blocks of queries. Returns [G, T Q, K], in the
    axes of fold_groups.

    common: the Common of the call. n: the smallest number of queries in a block. If blocks of n
    queries would be more than 128, blocks have a multiple of n queries: the loop over blocks is
    unrolled, so the compiled program contains each block. The last block may have fewer queries.
    in_loop: whether the caller runs this function in the body of a loop.

    The backward pass computes each block again, instead of keeping its probabilities in memory. If
    in_loop is False, jax.checkpoint puts barriers around each block. Without the barriers, XLA
    would merge the second computation of a block with the first, and keep the probabilities. If
    in_loop is True, no barriers are needed, because the forward pass and the backward pass of the
    caller's loop are two separate loops."""
    T = sequence.k_GxSxK.shape[1]
    n *= max(1, T // (64 * n))  # at most 128 blocks: each is compiled
    attend = jax.checkpoint(functools.partial(attend_block, common), prevent_cse=not in_loop,
                            static_argnums=(0, 1))

    # keys and values are split and concatenated again, in float32, so that their gradients are
    # added block by block and are not padded to [T]
    sizes = [min(n, T - first) for first in range(0, T, n)]
    qs = jax.lax.split(sequence.q_GxTQxK, [size * common.Q for size in sizes], axis=1)
    ks, vs = (jax.lax.split(x_GxSxK.astype(jnp.float32), sizes, axis=1)
              for x_GxSxK in (sequence.k_GxSxK, sequence.v_GxSxK))
    dtype = sequence.v_GxSxK.dtype
    is_packed = sequence.start_T is not None
    ys = []
    for i, q in enumerate(qs):
        # the keys; the first block has the first key that any of these queries may see
        first_block = first_key_of(i * n, common.scores, is_packed=is_packed) // n
        seen = slice(first_block, i + 1)
        k, v = (jnp.concatenate(blocks[seen], axis=1).astype(dtype) for blocks in (ks, vs))
        start_n = None
        if is_packed:
            start_n = sequence.start_T[i * n:(i + 1) * n]
        ys.append(attend(i * n, first_block * n, Sequence(q, k, v, sequence.key, start_n)))
    return jnp.concatenate(ys, axis=1)


def attend_piece(common, piece, sequence):
    """Computes chunked_attention of T consecutive queries of one sequence. Returns [G, T * Q, K]
    for G KV heads of width K, each with Q query heads (see fold_groups). One loop goes over the T
    queries in blocks of at most 128.

    Each block of queries is computed against all S keys of `sequence`, with a mask for the keys
    that the block may not see. Which keys these are depends on piece.first, which is known only at
    run time. So the compiled program cannot skip these keys.

    common: the Common of the call. piece: the Piece, with the positions of the first query and the
    first key. sequence: a Sequence that has only these T queries, but S keys: every key that one of
    the queries may see, also at positions before the first query."""
    G, TQ, K = sequence.q_GxTQxK.shape
    T = TQ // common.Q
    n = math.gcd(T, 128)
    dtype = sequence.v_GxSxK.dtype
    attend = jax.checkpoint(functools.partial(attend_block, common), prevent_cse=False,
                            static_argnums=1)

    # in float32, so that the gradients of all blocks are added in float32
    k_GxSxK = sequence.k_GxSxK.astype(jnp.float32)
    v_GxSxK = sequence.v_GxSxK.astype(jnp.float32)

    def attend_next(block):
        i, q_GxnQxK, start_n = block
        k, v = k_GxSxK.astype(dtype), v_GxSxK.astype(dtype)
        return attend(piece.first + i * n, piece.first_key,
                      Sequence(q_GxnQxK, k, v, sequence.key, start_n))

    # [blocks, G, n Q, K]
    q_blocks = sequence.q_GxTQxK.reshape(G, T // n, n * common.Q, K).swapaxes(0, 1)
    start_blocks = None
    if sequence.start_T is not None:
        start_blocks = sequence.start_T.reshape(T // n, n)
    y_blocks = jax.lax.map(attend_next, (jnp.arange(T // n), q_blocks, start_blocks))
    return y_blocks.swapaxes(0, 1).reshape(G, TQ, -1)


def attend_block(common, first, first_key, block):
    """Computes softmax(mask(q k^T * scale)) v of some queries and keys of one sequence -> [G, T Q,
    K].

    common: the Common of the call. first, first_key: the positions of the first query and of the
    first key. block: a Sequence that has these queries and keys only."""
    q_GxTQxK, k_GxSxK, v_GxSxK, key, start_T = block
    G, TQ = q_GxTQxK.shape[:2]
    n_queries, n_keys = TQ // common.Q, k_GxSxK.shape[1]

    # the scores of the keys that each query may see
    position_TQx1 = jnp.repeat(first + jnp.arange(n_queries), common.Q)[:, None]
    key_position = jnp.arange(first_key, first_key + n_keys)
    if start_T is not None:
        # positions count from the start of the query's conversation; earlier keys are masked
        start_TQx1 = jnp.repeat(start_T, common.Q)[:, None]
        key_position = jnp.where(key_position < start_TQx1, 2**30, key_position - start_TQx1)
        position_TQx1 -= start_TQx1
    mask_TQxS = causal_mask(key_position, position_TQx1, window=common.scores.window,
                            chunk=common.scores.chunk)
    scores_GxTQxS = common.scores.of_keys(q_GxTQxK, k_GxSxK, mask_TQxS)

    # probabilities; a sink is one more logit, and its probability is dropped
    if common.sinks_H is not None:
        sinks_GxTQx1 = jnp.tile(common.sinks_H.reshape(G, common.Q), n_queries)[..., None]
        scores_GxTQxS = jnp.concatenate([scores_GxTQxS, sinks_GxTQx1], axis=-1)
    probs_GxTQxS = jax.nn.softmax(scores_GxTQxS)[..., :n_keys]
    if key is not None:
        counter_GxTQxS = count_probs(common, first, first_key, probs_GxTQxS.shape)
        probs_GxTQxS = hash_dropout(
            probs_GxTQxS[None], common.dropout.rate, key[None], counter_GxTQxS)[0]
    return matmul(probs_GxTQxS.astype(v_GxSxK.dtype), v_GxSxK)


def count_probs(common, first, first_key, shape):
    """Returns a number for each attention probability of a block, uint32 [G, T Q, S]. Dropout
    hashes this number.

    The number is the probability's flat index in [all key heads, all queries * Q, all keys], that
    is, in the probabilities of the whole sequence on all devices. So several devices drop the same
    probabilities as one device. Q: the query heads per key head, see fold_groups.

    common: the Common of the call. first, first_key: positions of the block's first query and first
    key. shape: [G, T Q, S]."""
    g, tq, s = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    g += jnp.uint32(common.dropout.first_group)  # this device has the key heads from there on
    tq += jnp.uint32(first * common.Q)
    n_rows = jnp.uint32(common.n_positions * common.Q)
    n_columns = jnp.uint32(common.n_positions)
    return (g * n_rows + tq) * n_columns + (s + jnp.uint32(first_key))
