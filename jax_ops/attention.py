"""The causal mask, the scores of attention, and attention to a KV cache. For a piece of a long
prompt, attention to a KV cache is computed block by block (blockwise).

The classes Scores and Dropout hold the settings of an attention. fused_attention.py uses them,
too."""
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jax_ops.matmul import matmul, soft_cap

# 'xla' is dot_product_attention of jax_transformer.py; the others are in fused_attention.py
ATTENTION = ('xla', 'chunked', 'cudnn', 'splash')

MASKED = jnp.finfo(jnp.float32).min  # the score of a key that a query may not see


# -----------------------------------------------------------------------------
# the computation

@dataclasses.dataclass(frozen=True)
class Scores:
    """How a layer's products q k^T become scores. Hashable, because jit takes it as a static
    argument."""
    scale: float | None = None  # factor of the products; None is K**-0.5, K the width of a head
    cap: float = 0.0  # soft_cap keeps scores within +-cap; 0 is no cap
    window: int = 0  # number of last positions that a query sees (causal_mask); 0 is all
    chunk: int = 0  # number of positions in a chunk (causal_mask); 0 is one chunk for all

    def scale_of(self, width):
        """Returns the factor of q k^T: scale, or the default for heads of `width` channels."""
        return self.scale or width**-0.5

    def of_keys(self, q, k, mask):
        """Returns soft_cap(q k^T * scale, cap) for q [..., T, K] and k [..., S, K], float32 [...,
        T, S]; MASKED where the mask is False."""
        scores = matmul(q, k, transpose_rhs=True, dtype=jnp.float32)
        scores *= self.scale_of(q.shape[-1])
        if self.cap:
            scores = soft_cap(scores, self.cap)
        return jnp.where(mask, scores, MASKED)


class Dropout(struct.PyTreeNode):
    """The dropout of attention probabilities, see hash_dropout."""
    key_B: jax.Array | None = None  # a key for each sequence; None is no dropout
    rate: float = struct.field(pytree_node=False, default=0.0)  # share that is dropped
    first_group: Any = 0  # number of the first key head of this device


NO_DROPOUT = Dropout()


def span_limits(config, layer_type):
    """Returns the options of causal_mask that limit a layer's attention: {'window': n}, {'chunk':
    n}, or {} for no limit."""
    if layer_type in ('window', 'chunk'):
        return {layer_type: getattr(config, layer_type)}
    return {}


def causal_mask(key_position, position, *, window=0, chunk=0):
    """Returns a bool array, True where a query at `position` may attend to a key at key_position:
    the key is at the query's position or before. The two arrays of positions are broadcast.

    window: a query sees only this many positions, its own and those just before it; 0 is all.
    chunk: positions are divided into chunks of this many, and a query sees only its own chunk; 0 is
    one chunk for all.

    All attention follows this rule. Two functions need the mask as an array and call causal_mask:
    attention_mask in jax_transformer.py, with the positions in a KV cache; and attend_block in
    fused_attention.py, with the indices of queries and keys. The kernels of cuDNN and TPUs
    (cudnn_attention, splash_kernel) do not need the array: window and chunk are options of
    theirs."""
    mask = key_position <= position
    if window:
        mask &= key_position > position - window
    if chunk:
        mask &= key_position // chunk == position // chunk
    return mask


def fold_groups(q_BxTxHxK, G):
    """Computes q[b, t, g Q + i] -> q[b, g, t Q + i], [B, G, T Q, K]: folds the Q = H / G query
    heads of a group into the time axis, as in dot_product_attention."""
    B, T, H, K = q_BxTxHxK.shape
    q_BxGxTxQxK = q_BxTxHxK.reshape(B, T, G, H // G, K).swapaxes(1, 2)
    return q_BxGxTxQxK.reshape(B, G, T * (H // G), K)


def unfold_groups(y_BxGxTQxK, T):
    """Undoes fold_groups: [B, G, T Q, K] -> [B, T, G Q, K]."""
    B, G, TQ = y_BxGxTQxK.shape[:3]
    y_BxTxGxQxK = y_BxGxTQxK.reshape(B, G, T, TQ // T, -1).swapaxes(1, 2)
    return y_BxTxGxQxK.reshape(B, T, G * (TQ // T), -1)


# -----------------------------------------------------------------------------
# attention to a KV cache

LEAST_SLOTS = 64  # the smallest part of a KV cache that attend_to_used_slots cuts off


def attend_to_used_slots(attend, held, mask_BxTxS):
    """Computes attend(held, mask_BxTxS), the attention to the S slots of a layer's KV cache.

    On CPUs, gives `attend` only the first n slots. n is the smallest of the sizes 64, 128, 256,
    ..., S for which these slots hold every key that a query may see. The compiled program has a
    branch for each size. A cache usually has many more slots than its rows use, and reading the
    unused ones costs as much time as the others (docs/lab_log.md#the-slots-in-use).

    attend: a function of (held, mask). held: {name: [B, G, S, ...]}, the cache as it is stored.
    mask_BxTxS: True where a query may attend to a key."""
    S = mask_BxTxS.shape[2]
    sizes = [LEAST_SLOTS << i for i in range(S.bit_length()) if LEAST_SLOTS << i < S]

    def attend_to_first(n_slots, held, mask_BxTxS):
        first = {name: x_BxGxS[:, :, :n_slots] for name, x_BxGxS in held.items()}
        return attend(first, mask_BxTxS[:, :, :n_slots])

    def attend_on_cpu(held, mask_BxTxS):
        n_used = S - jnp.argmax(mask_BxTxS.any((0, 1))[::-1])
        branches = [functools.partial(attend_to_first, n_slots) for n_slots in (*sizes, S)]
        return jax.lax.switch((n_used > np.array(sizes)).sum(), branches, held, mask_BxTxS)

    if not sizes:
        return attend(held, mask_BxTxS)
    return jax.lax.platform_dependent(held, mask_BxTxS, cpu=attend_on_cpu, default=attend)


# -----------------------------------------------------------------------------
# blockwise attention: a piece of a long prompt

def blockwise_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, *, scale=None, cap=0.0,
                        sinks_H=None):
    """Computes dot_product_attention of jax_transformer.py for a piece of a long prompt, without
    dropout and gradients.

    Takes t = 256 queries at a time, or all T queries if 256 does not divide T. For these queries,
    takes one block of n = 256 keys after the other, with a running softmax (arXiv:2205.14135), and
    skips blocks that the mask rules out. So scores take [B, G, t * H / G, n] at a time, not [B, G,
    T * H / G, S]. For a cache of more than 2,048 slots, n is 512, because larger matmuls are
    faster: 0.95 of the time for 4,096 tokens of SmolLM2."""
    B, T, H, K = q_BxTxHxK.shape

    def attend(queries):
        q_BxnxHxK, mask_BxnxS = queries
        return attend_to_blocks(q_BxnxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxnxS, Scores(scale, cap),
                                sinks_H)

    if T <= 256 or T % 256:
        return attend((q_BxTxHxK, mask_BxTxS))

    def split(x):
        return x.reshape(B, T // 256, 256, *x.shape[2:]).swapaxes(0, 1)

    y_nxBx256xHxK = jax.lax.map(attend, (split(q_BxTxHxK), split(mask_BxTxS)))
    return y_nxBx256xHxK.swapaxes(0, 1).reshape(B, T, H, -1)


def attend_to_blocks(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, scores, sinks_H):
    """Computes blockwise_attention of some queries, in a loop over the blocks of keys that the mask
    allows."""
    B, T, H, K = q_BxTxHxK.shape
    S, G = k_BxSxGxK.shape[1:3]
    Q = H // G
    n = min(512 if S > 2048 else 256, S)
    q_BxGxTQxK = fold_groups(q_BxTxHxK, G)

    def attend_next(j, softmax):
        # the j-th block in use; if the last block overlaps the one before, the mask leaves out the
        # keys that both have
        i = block_n[j]
        start = jnp.minimum(i * n, S - n)
        k_BxGxnxK = jax.lax.dynamic_slice_in_dim(k_BxSxGxK, start, n, axis=1).swapaxes(1, 2)
        v_BxGxnxK = jax.lax.dynamic_slice_in_dim(v_BxSxGxK, start, n, axis=1).swapaxes(1, 2)
        mask_BxTxn = jax.lax.dynamic_slice_in_dim(mask_BxTxS, start, n, axis=2)
        mask_BxTxn &= start + jnp.arange(n) >= i * n

        # the scores of the block
        mask_Bx1xTQxn = jnp.repeat(mask_BxTxn, Q, axis=1)[:, None]
        scores_BxGxTQxn = scores.of_keys(q_BxGxTQxK, k_BxGxnxK, mask_Bx1xTQxn)
        return add_block(softmax, scores_BxGxTQxn, v_BxGxnxK)

    # the numbers of the blocks, those in use first
    is_used_n = jnp.pad(mask_BxTxS.any((0, 1)), (0, -S % n)).reshape(-1, n).any(1)
    block_n = jnp.argsort(~is_used_n)

    # only the sink so far: one more logit, with a value of 0
    max_BxGxTQx1 = jnp.full((B, G, T * Q, 1), MASKED)
    sum_BxGxTQx1 = jnp.zeros((B, G, T * Q, 1))
    if sinks_H is not None:
        sinks_GxTQx1 = jnp.tile(sinks_H.reshape(G, Q), T)[..., None]
        max_BxGxTQx1 = jnp.maximum(max_BxGxTQx1, sinks_GxTQx1)
        sum_BxGxTQx1 += 1
    y_BxGxTQxK = jnp.zeros((B, G, T * Q, v_BxSxGxK.shape[-1]))

    softmax = max_BxGxTQx1, sum_BxGxTQx1, y_BxGxTQxK
    _, sum_BxGxTQx1, y_BxGxTQxK = jax.lax.fori_loop(0, is_used_n.sum(), attend_next, softmax)
    sum_BxGxTQx1 = jnp.maximum(sum_BxGxTQx1, 1)  # below 1 only for queries that see no key
    return unfold_groups((y_BxGxTQxK / sum_BxGxTQx1).astype(v_BxSxGxK.dtype), T)


def add_block(softmax, scores_BxGxTQxn, v_BxGxnxK):
    """Adds a block's scores and values to a running softmax, and returns the new running softmax:
    (the largest score so far; the sum of exp(score - largest score); the sum of the values,
    weighted by these exponentials). The earlier sums are scaled to the new largest score."""
    old_max_BxGxTQx1, sum_BxGxTQx1, y_BxGxTQxK = softmax
    max_BxGxTQx1 = jnp.maximum(old_max_BxGxTQx1, scores_BxGxTQxn.max(-1, keepdims=True))
    exp_BxGxTQxn = jnp.exp(scores_BxGxTQxn - max_BxGxTQx1)
    decay_BxGxTQx1 = jnp.exp(old_max_BxGxTQx1 - max_BxGxTQx1)
    values_BxGxTQxK = matmul(exp_BxGxTQxn.astype(v_BxGxnxK.dtype), v_BxGxnxK, dtype=jnp.float32)
    y_BxGxTQxK = y_BxGxTQxK * decay_BxGxTQx1 + values_BxGxTQxK
    sum_BxGxTQx1 = sum_BxGxTQx1 * decay_BxGxTQx1 + exp_BxGxTQxn.sum(-1, keepdims=True)
    return max_BxGxTQx1, sum_BxGxTQx1, y_BxGxTQxK
