"""What a transformer is computed with: functions of arrays that know of no particular model.

How arrays lie over a mesh of devices; products of matrices, float and int8; dropout; attention and the KV cache's arrays;
blocks of rows for experts; the embedding and the head, whose vocabulary devices may share out; rows of tokens that grow.
jax_transformer.py builds the model of these, and explains the letters of the shapes.
"""
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


class UserError(ValueError):
    """A mistake that the user can mend. The scripts print it as one line and exit with code 2."""


# -----------------------------------------------------------------------------
# how the arrays lie, where the devices are a mesh
#
# A mesh has the axes data, fsdp, tensor and expert. data, fsdp and expert share out the sequences; fsdp shares out the
# storage of the parameters as well; tensor shares out the heads, the MLP's width and the vocabulary; expert and tensor
# the experts.

AXES = ('data', 'fsdp', 'tensor', 'expert')
BATCH = ('data', 'fsdp', 'expert')
EXPERTS = ('expert', 'tensor')

# Where a parameter is stored, and what the optimizer keeps of it, by the end of its path; what is not here is on every
# device. The columns of c_attn are all q, then all k, then all v: stored in equal parts they would not be the q, k and
# v of whole heads, and q, k and v would have to move for every token. So its rows are cut, and a device fetches the
# columns of its heads when it needs them, 3 D**2 / tensor elements: fewer than the 3 B T D / tensor of q, k and v
# wherever there are more tokens than channels.
PARTITION = (
    ('(wte|lm_head)', P('tensor', 'fsdp')),
    ('wpe', P(None, 'fsdp')),
    ('c_attn/kernel', P(('fsdp', 'tensor'), None)),
    ('(c_fc|c_gate)/kernel', P('fsdp', 'tensor')),
    ('(c_fc|c_gate)/bias', P('tensor')),
    ('c_proj/kernel', P('tensor', 'fsdp')),
    (r'experts_\w+/kernel', P(EXPERTS, 'fsdp', None)),
    (r'experts_\w+/bias', P(EXPERTS, None)),
)


def create_mesh(devices, tp_size=1, fsdp=1, expert=1):
    """A mesh of `devices` with the axes AXES, of sizes what is left, fsdp, tp_size and expert; neighbours share a
    tensor axis, where there is the most to send. Raises UserError if they do not divide."""
    if min(tp_size, fsdp, expert) < 1 or len(devices) % (tp_size * fsdp * expert):
        valid = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise UserError(f'fsdp={fsdp} x tensor={tp_size} x expert={expert} does not divide {len(devices)} devices; the '
                        f'product may be one of {valid}')
    devices = np.array(devices).reshape(-1, fsdp, expert, tp_size).swapaxes(2, 3)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def current_mesh():
    """The mesh that the caller has set (jax.set_mesh), or None. (pmap sets one too, without our axes.)"""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES else None


def shard(x, *spec):
    """x, lying over the current mesh as `spec` says, per dimension: the name of an axis, of several, or None
    (whole)."""
    return jax.lax.with_sharding_constraint(x, P(*spec)) if current_mesh() else x


def batch_axes(n_rows):
    """The axes of the current mesh that share out n_rows rows: BATCH, or none if they do not divide or there is no mesh."""
    mesh = current_mesh()
    return () if not mesh or n_rows % math.prod(mesh.shape[axis] for axis in BATCH) else BATCH


def partition_specs(tree, mesh):
    """PARTITION for the leaves of a tree of parameters, or of a whole TrainState. The spec belongs to the last
    dimensions; a dimension that its axes do not divide is cut by fewer of them, the last left out first."""
    def spec_of(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        spec = next((spec for end, spec in PARTITION if re.search(rf'(^|/){end}$', name)), P())
        shape = np.shape(leaf)
        if len(spec) > len(shape):
            return P()
        cut = []
        for size, axes in zip(shape[len(shape) - len(spec):], spec):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            while size % math.prod(mesh.shape[axis] for axis in axes):
                axes = axes[:-1]
            cut.append(axes or None)
        while cut and cut[-1] is None:
            cut.pop()
        return P(*[None] * (len(shape) - len(spec)), *cut) if cut else P()

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def partition(tree):
    """Parameters, gradients or a TrainState, lying over the current mesh as PARTITION says."""
    mesh = current_mesh()
    return jax.lax.with_sharding_constraint(tree, partition_specs(tree, mesh)) if mesh else tree


# How a kernel lies while it is stored, and while it is multiplied with: tensor cuts its outputs, or its inputs.
COLUMNS = ('fsdp', 'tensor'), (None, 'tensor')
ROWS = ('tensor', 'fsdp'), ('tensor', None)


def gather(param, dtype, cut=()):
    """A stored parameter as it is computed with on a mesh; cast first, so that less has to move."""
    if current_mesh():
        param = param.astype(dtype)
    with jax.named_scope('all_gather'):
        for spec in cut:
            param = shard(param, *spec)
    return param


# -----------------------------------------------------------------------------
# products of matrices

def in_rows(x):
    """x; on a CPU, XLA is told to lay it out row by row, here and now."""
    rows = lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return x if current_mesh() else jax.lax.platform_dependent(x, cpu=rows, default=lambda x: x)  # XLA cannot partition it


def transposed(x):
    """x with its last two axes swapped; bfloat16 on a CPU is moved in memory too. XLA:CPU has a fast bfloat16 product (twice
    the float32 one with AVX512_BF16, more with AMX), but only of operands that lie as [M, K] and [K, N]; others it
    converts to float32. Elsewhere the product reads either way."""
    x = x.swapaxes(-1, -2)
    return in_rows(x) if x.dtype == jnp.bfloat16 else x


def dot(x, y, dtype=None):
    """x [..., M, K] @ y [..., K, N] in dtype (x's if not given), summed in float32."""
    dtype = dtype or x.dtype
    wide = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(dtype)
    narrow = lambda x, y: jnp.matmul(x, y, preferred_element_type=dtype)  # GPUs and TPUs sum in float32 anyway
    return jax.lax.platform_dependent(x, y, cpu=wide, default=narrow) if x.dtype == jnp.bfloat16 else narrow(x, y)


def dot_rows(x, y, dtype):
    """x^T y, for x [..., R, M] and y [..., R, N]. It is x that is transposed: as the gradient of a product that is the
    input, where JAX's own rule would take the incoming gradient, and XLA:CPU do it inside the element-wise chain that
    made it, which cost a fifth of the training step. bfloat16 on a CPU, see transposed(): whichever is less to move."""
    M, N = x.shape[-1], y.shape[-1]
    if x.dtype == jnp.bfloat16 and x.size > y.size + x.size // x.shape[-2] * N:
        return in_rows(dot(transposed(y), x, dtype)).swapaxes(-1, -2)  # in_rows: or XLA would undo the swap
    return dot(transposed(x), y, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul(x, y, flip=False, dtype=None, cut=()):
    """x @ y in x's dtype, the result in dtype (x's if not given): x [..., in] with a kernel [in, out] of any dtype, or
    both with the same leading axes. flip: y is [..., out, in].

    cut: ROWS or COLUMNS, of a kernel on a mesh. It is gathered anew for the gradient: kept until then, the layers would
    add up to the whole model."""
    y = gather(y, x.dtype, cut).astype(x.dtype)
    return dot(x, transposed(y) if flip else y, dtype)


def matmul_bwd(flip, dtype, cut, saved, g):
    x, y_stored = saved
    g = g.astype(x.dtype)
    if cut and current_mesh():
        y_stored, g = jax.lax.optimization_barrier((y_stored, g))  # or XLA would find that it has gathered this before
    y = gather(y_stored, x.dtype, cut).astype(x.dtype)
    dx = dot(g, y if flip else transposed(y))
    if y.ndim == 2:
        x, g = (a.reshape(-1, a.shape[-1]) for a in (x, g))
    dy = dot_rows(g, x, y_stored.dtype) if flip else dot_rows(x, g, y_stored.dtype)
    return dx, shard(dy, *cut[0]) if cut else dy  # each device adds up the part that it stores


matmul.defvjp(lambda x, y, flip, dtype, cut: (matmul(x, y, flip, dtype, cut), (x, y)), matmul_bwd)


def product_of_rows(x_RxD, y_FxD, dtype=jnp.float32):
    """x y^T -> [R, F] in dtype, which is what it is summed in."""
    return jax.lax.dot_general(x_RxD, y_FxD, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def weights_first(x_RxD, weights_FxD, dtype=jnp.float32):
    """product_of_rows for a few rows x on a CPU. XLA:CPU packs what is on the right: eight rows take half as long again
    with the weights there. The barrier keeps it from swapping the two back, and from making a slow loop of the product
    and what follows."""
    R = len(x_RxD)
    x_RxD = jnp.pad(x_RxD, ((0, -R % 4 if R > 1 else 0), (0, 0)))  # five rows take longer than eight
    return jax.lax.optimization_barrier(product_of_rows(weights_FxD, x_RxD, dtype)).T[:R]


def matmul_rows(x, weights_FxD):
    """x [..., D] times the transpose of weights that have a row per output -> float32 [..., F]. It is for decoding: a CPU
    reads float32 weights [out, in] faster than [in, out] if there is one row to multiply with, by 7 to 15%."""
    x_RxD, weights_FxD = x.reshape(-1, x.shape[-1]), weights_FxD.astype(x.dtype)
    few = len(x_RxD) <= 64 and x.dtype == jnp.float32  # 64 rows take 15% less time that way, 256 as long
    y_RxF = jax.lax.platform_dependent(
        x_RxD, weights_FxD, cpu=weights_first if few else product_of_rows, default=product_of_rows)
    return y_RxF.reshape(*x.shape[:-1], -1)


def quantize(x, dtype):
    """x [..., n] as (values [..., n] in `dtype`, int8 or a float8; float32 scale [...]): x is about values * scale, where
    scale maps the largest magnitude of the last axis to the largest value."""
    largest = 127 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = jnp.maximum(jnp.abs(x).max(-1).astype(jnp.float32), 1e-30) / largest
    x = x.astype(jnp.float32) / scale[..., None]
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype), scale


def matmul_int8(x, weights_FxD, scale_F):
    """x [..., D] times the transpose of int8 weights with a scale per row -> float32 [..., F].

    On a CPU a step of decoding is bound by reading the weights, and XLA has fast int8 products: x is quantized as well, a
    scale per vector. Elsewhere the weights are converted on their way into the product."""
    def times_row(weights_FxD, x_D, S):
        # XLA:CPU makes vector instructions of a sum of at most 32 terms; a longer one it cuts in two, and stores all terms
        # for that. So there are 32 sums side by side, of S terms each: 4 bytes are stored for S bytes of weights
        weights_FxNxSxL, x_NxSxL = (a.astype(jnp.int32).reshape(*a.shape[:-1], -1, S, 32) for a in (weights_FxD, x_D))
        sums_FxNxL = jax.lax.optimization_barrier((weights_FxNxSxL * x_NxSxL).sum(2))  # or it would be one sum again
        return sums_FxNxL.sum((1, 2))

    def in_int8(x_RxD, weights_FxD):
        R, D = x_RxD.shape
        x_RxD, scale_R = quantize(x_RxD, jnp.int8)
        S = max((n for n in range(8, 33) if D % (32 * n) == 0), default=None)
        if R == 1 and S:
            # reads the weights as fast as memory gives them. The condition, false for zeros, keeps XLA from quantizing x
            # anew for every row of the weights, which takes 5 times as long
            y_F = jax.lax.cond(scale_R[0] > 1e-32, functools.partial(times_row, S=S),
                               lambda weights_FxD, x_D: jnp.zeros(len(weights_FxD), jnp.int32), weights_FxD, x_RxD[0])
            return y_F[None] * scale_R[:, None]
        # XLA:CPU multiplies a single row in a scalar loop, which takes 25 times as long as four rows
        x_RxD = jnp.pad(x_RxD, ((0, -R % 4), (0, 0)))
        product = weights_first if R <= 16 else product_of_rows
        return product(x_RxD, weights_FxD, jnp.int32)[:R] * scale_R[:, None]

    def converted(x_RxD, weights_FxD):
        return product_of_rows(x_RxD, weights_FxD.astype(x_RxD.dtype))

    y_RxF = jax.lax.platform_dependent(x.reshape(-1, x.shape[-1]), weights_FxD, cpu=in_int8, default=converted)
    return (y_RxF * scale_F).reshape(*x.shape[:-1], -1)


def cast_matrices(params, dtype):
    """The matrices in the dtype that the model multiplies in, once and not anew in every step: the same results from
    half the memory traffic, where that is bfloat16."""
    return jax.tree.map(lambda p: p.astype(dtype) if p.ndim >= 2 and p.dtype != jnp.int8 else p, params)


def rows_first(params):
    """The parameters with every kernel [in, out] as kernel_rows [out, in], which matmul_rows reads faster."""
    flipped = {}
    for name, p in params.items():
        if isinstance(p, dict):
            flipped[name] = p if name == 'router' else rows_first(p)
        elif name == 'kernel' and p.ndim == 2:
            flipped['kernel_rows'] = p.T
        else:
            flipped[name] = p
    return flipped


def quantize_params(params):
    """The parameters with int8 matrices, one scale per output channel: kernel [in, out] becomes kernel_int8 [out, in] and
    kernel_scale [out], wte becomes wte_int8 and wte_scale [V], lm_head likewise. A quarter of float32's bytes; for decoding only."""
    quantized = {}
    for name, p in params.items():
        if isinstance(p, dict):
            quantized[name] = p if name == 'router' else quantize_params(p)  # that is small, and much depends on it
        elif name in ('kernel', 'wte', 'lm_head'):
            rows = p.swapaxes(-1, -2) if name == 'kernel' else p
            quantized[f'{name}_int8'], quantized[f'{name}_scale'] = quantize(rows, jnp.int8)
        else:
            quantized[name] = p
    return quantized


# -----------------------------------------------------------------------------
# element by element

@jax.custom_vjp
def add_bias(x, bias):
    """x [..., features] + bias, in x's dtype. The gradient of the bias, a sum over all tokens, is summed in float32."""
    return x + bias.astype(x.dtype)


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), bias.dtype.type(0)),
                lambda zero, g: (g, g.sum(range(g.ndim - 1), dtype=jnp.float32).astype(zero.dtype)))


def gelu(x, approximate):
    """GELU in float32, result in x's dtype; x is all that is kept for the gradient."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate).astype(x.dtype)


def rms_normalize(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def hashed(x):
    """A permutation of uint32 that leaves no trace of order (lowbias32, https://nullprogram.com/blog/2018/07/31)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7feb352d)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846ca68b)
    return x ^ (x >> 16)


def drop(x, rate, key_B, number):
    """Zeroes elements of x [B, ...] with probability `rate` and scales the rest by 1 / (1 - rate). An element is dropped or
    not by its number (uint32, [...]) and its row's key alone, however the work is cut up: two rounds of a hash, which a
    CPU computes 100 times as fast as jax.random.bernoulli, and which fuse with what is around them."""
    words = jax.random.key_data(key_B).reshape(len(x), -1, *(1,) * (x.ndim - 1))
    bits = hashed(hashed(number + words[:, 0]) ^ words[:, 1])
    return jnp.where(bits < jnp.uint32(round((1 - rate) * 2**32)), x / (1 - rate), 0)


def element_numbers(shape):
    """0, 1, 2, ... in the given shape, modulo 2**32."""
    number = jnp.uint32(0)
    for axis, size in enumerate(shape):
        number = number * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return number


# -----------------------------------------------------------------------------
# attention

def attend(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, visible_BxTxS, drop=lambda probs: probs, scale=None, sinks_H=None):
    """softmax(q k * scale) v over the keys that each query sees -> [B, T, H, K]; softmax in float32. `drop` is applied
    to the probabilities. scale is K**-0.5 if not given; values may be of another width than keys.

    Query head h looks at key head h // (H / G): to that one, heads that share it are so many more queries. sinks_H: one
    more logit per head, whose share of the probability goes nowhere."""
    B, T, H, K = q_BxTxHxK.shape
    G, Q = k_BxSxGxK.shape[2], H // k_BxSxGxK.shape[2]
    q_BxTQxGxK = q_BxTxHxK.reshape(B, T, G, Q, K).swapaxes(2, 3).reshape(B, T * Q, G, K)
    # heads first: products over the last two axes, of the cache as it lies in memory
    q_BxGxTQxK, k_BxGxSxK, v_BxGxSxK = (x.swapaxes(1, 2) for x in (q_BxTQxGxK, k_BxSxGxK, v_BxSxGxK))
    scores_BxGxTQxS = jnp.einsum('bgtk,bgsk->bgts', q_BxGxTQxK, k_BxGxSxK, preferred_element_type=jnp.float32)
    scores_BxGxTQxS *= scale or K**-0.5
    visible_BxTQxS = jnp.repeat(visible_BxTxS, Q, axis=1)
    scores_BxGxTQxS = jnp.where(visible_BxTQxS[:, None], scores_BxGxTQxS, jnp.finfo(jnp.float32).min)
    if sinks_H is not None:
        sinks_GxTQ = jnp.tile(sinks_H.reshape(G, Q), T)
        sinks_BxGxTQx1 = jnp.broadcast_to(sinks_GxTQ[..., None], (*scores_BxGxTQxS.shape[:3], 1))
        scores_BxGxTQxS = jnp.concatenate([scores_BxGxTQxS, sinks_BxGxTQx1], axis=-1)
    probs_BxGxTQxS = jax.nn.softmax(scores_BxGxTQxS)[..., :k_BxSxGxK.shape[1]]
    probs_BxGxTQxS = drop(probs_BxGxTQxS.astype(v_BxSxGxK.dtype))
    y_BxTQxGxK = jnp.einsum('bgts,bgsk->bgtk', probs_BxGxTQxS, v_BxGxSxK).swapaxes(1, 2)
    return y_BxTQxGxK.reshape(B, T, Q, G, -1).swapaxes(2, 3).reshape(B, T, H, -1)


def attend_in_chunks(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, drop=lambda probs, key_B, queries: probs, key_B=None, chunk=128):
    """attend() where a query sees the keys at its own position and before. One sequence and `chunk` queries at a time, which
    stop at the last key that they see; their probabilities stay in a CPU's cache, are nowhere kept, and are computed
    anew for the gradient. drop(probs [1, H, chunk, end], key [1], slice of the queries) is applied to the probabilities."""
    T, K = q_BxTxHxK.shape[1], q_BxTxHxK.shape[-1]

    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
    def attend_chunk(first, q_HxTxK, k_HxSxK, v_HxSxK, key):
        end = k_HxSxK.shape[1]
        scores_HxTxS = matmul(q_HxTxK, k_HxSxK, True, jnp.float32) * K**-0.5
        visible_TxS = jnp.arange(end) <= jnp.arange(first, end)[:, None]
        scores_HxTxS = jnp.where(visible_TxS, scores_HxTxS, jnp.finfo(jnp.float32).min)
        probs_HxTxS = drop(jax.nn.softmax(scores_HxTxS)[None], key, slice(first, end))[0]
        return matmul(probs_HxTxS.astype(v_HxSxK.dtype), v_HxSxK)

    def attend_row(row):
        q_HxTxK, k_HxTxK, v_HxTxK, key = row
        key = key if key is None else key[None]
        sizes = [min(chunk, T - first) for first in range(0, T, chunk)]
        # cut up and joined again, so that the gradients of a key are added by chunk, not each one padded to [T]; in float32
        cut = lambda x: jax.lax.split(x.astype(jnp.float32), sizes, axis=1)
        upto = lambda chunks, i: jnp.concatenate(chunks[:i + 1], axis=1).astype(v_HxTxK.dtype)
        qs, ks, vs = jax.lax.split(q_HxTxK, sizes, axis=1), cut(k_HxTxK), cut(v_HxTxK)
        return jnp.concatenate([attend_chunk(i * chunk, q, upto(ks, i), upto(vs, i), key) for i, q in enumerate(qs)], axis=1)

    heads_first = (x.swapaxes(1, 2) for x in (q_BxTxHxK, k_BxTxHxK, v_BxTxHxK))
    return jax.lax.map(attend_row, (*heads_first, key_B)).swapaxes(1, 2)


CACHE_DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16, 'float16': jnp.float16, 'int8': jnp.int8,
                'float8': jnp.float8_e4m3fn}


def write_cache(cache, fresh, slot_BxT):
    """A layer's cache with fresh {name: [B, T, G, K]} in these slots; slots that are not there are dropped."""
    cache = dict(cache)
    slots_BxT = jnp.broadcast_to(slot_BxT, next(iter(fresh.values())).shape[:2])
    for name, x_BxTxGxK in fresh.items():
        slot_BxT = slots_BxT
        if slot_BxT.size == 1:
            # XLA:CPU makes a slice update of the scatter of a single vector, repeats that in every product that reads the
            # cache and copies all of it each time (GPT-2 at 528 slots: 3.7 ms a step instead of 0.7). So write it twice,
            # the second time past the end, where it is dropped.
            x_BxTxGxK = jnp.concatenate([x_BxTxGxK, x_BxTxGxK], axis=1)
            slot_BxT = jnp.concatenate([slot_BxT, jnp.full_like(slot_BxT, cache[name].shape[2])], axis=1)
        new = {name: x_BxTxGxK.astype(cache[name].dtype)}
        if f'{name}_scale' in cache:
            new = dict(zip((name, f'{name}_scale'), quantize(x_BxTxGxK, cache[name].dtype)))
        rows = jnp.arange(len(slot_BxT))[:, None]
        cache |= {key: cache[key].at[rows, :, slot_BxT].set(x, mode='drop') for key, x in new.items()}
    return cache


def read_cache(cache, dtype):
    """All slots of a layer's cache, {name: [B, S, G, K]}, in `dtype`."""
    arrays = {}
    for name in (name for name in cache if not name.endswith('_scale')):
        x_BxGxSxK = cache[name]
        if f'{name}_scale' in cache:
            x_BxGxSxK = x_BxGxSxK.astype(jnp.float32) * cache[f'{name}_scale'][..., None]
        arrays[name] = x_BxGxSxK.astype(dtype).swapaxes(1, 2)
    return arrays


def rope_frequencies(theta, width, scaling=None):
    """Radians per position by which rope turns each of the width / 2 pairs, numpy.

    scaling: pairs that turn often over the original length stay as they are, those that turn rarely become slower by
    its factor, and between the two is a linear transition: over the number of turns in Llama 3, over the pairs in YaRN
    (arXiv:2309.00071)."""
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return frequencies
    if scaling.kind == 'llama3':
        turns = frequencies * scaling.original_length / (2 * np.pi)
        keep = (turns - scaling.low) / max(scaling.high - scaling.low, 1e-9)
    else:
        pair = lambda turns: width * np.log(scaling.original_length / (2 * np.pi * turns)) / (2 * np.log(theta))
        first, last = pair(scaling.high), pair(scaling.low)
        if scaling.truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        keep = 1 - (np.arange(width // 2) - first) / max(last - first, 1e-3)
    keep = np.clip(keep, 0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


# -----------------------------------------------------------------------------
# experts

def share_experts(mix, weights, *tokens):
    """mix(weights, first, *tokens) -> [P, D], the sum of what the experts make of the tokens [P, ...]: those experts whose
    weights [E, ...] it is given, the first of which is number `first`.

    On a mesh a device has some experts. It gets the tokens of all devices along the expert axis, and what the experts
    make of them is added up where the tokens came from."""
    mesh = current_mesh()
    if mesh is None:
        return mix(weights, 0, *tokens)
    E = len(jax.tree.leaves(weights)[0])
    axes = EXPERTS if E % (mesh.shape['expert'] * mesh.shape['tensor']) == 0 else ('expert',)
    batch = batch_axes(len(tokens[0]))

    def mix_here(weights, *tokens):
        if batch:
            with jax.named_scope('all_gather'):
                tokens = [jax.lax.all_gather(x, 'expert', tiled=True) for x in tokens]
        y_PxD = mix(weights, jax.lax.axis_index(axes) * len(jax.tree.leaves(weights)[0]), *tokens)
        with jax.named_scope('reduce_scatter'):
            y_PxD = jax.lax.psum(y_PxD, [axis for axis in axes if axis != 'expert' or not batch])
            return jax.lax.psum_scatter(y_PxD, 'expert', tiled=True) if batch else y_PxD

    return jax.shard_map(mix_here, in_specs=(P(axes), *[P(batch)] * len(tokens)), out_specs=P(batch), check_vma=False)(
        weights, *tokens)


def through_experts(f, weights, x_RxD, expert_R):
    """f(weights of expert_R[r], x_RxD[r]) of every row r [R, D], each expert computing its own rows only; zeros where
    expert_R[r] is not one of the experts 0 .. E-1 whose weights [E, ...] these are.

    Rows are sorted by expert and laid out in blocks of b rows of one expert each, the last block of an expert filled up
    with zeros. n blocks are enough however the rows are shared out, as many as are needed are computed."""
    n_expert, (R, D) = len(jax.tree.leaves(weights)[0]), x_RxD.shape
    expert_R = jnp.where((expert_R >= 0) & (expert_R < n_expert), expert_R, n_expert)  # all others last
    b = max(1, min(-(-R // n_expert), 64))  # rows; more would be more filling, fewer would read weights more often
    n = R // b + min(n_expert, R)
    count_E = jnp.zeros(n_expert, jnp.int32).at[expert_R].add(1, mode='drop')
    end_E = jnp.cumsum(-(-count_E // b))  # blocks of this expert and those before
    first_E = (end_E - -(-count_E // b)) * b - (jnp.cumsum(count_E) - count_E)  # first row, less the rows before
    order_R = jnp.argsort(expert_R)
    sorted_R = expert_R[order_R]
    start_R = jnp.where(sorted_R < n_expert, first_E[sorted_R], n * b)  # which is past the end
    slot_R = jnp.zeros(R, jnp.int32).at[order_R].set(start_R + jnp.arange(R))
    expert_n = jnp.searchsorted(end_E, jnp.arange(n), side='right').clip(0, n_expert - 1)
    x_nxbxD = jnp.zeros((n * b, D), x_RxD.dtype).at[slot_R].set(x_RxD, mode='drop', unique_indices=True)
    y_nxbxD = map_blocks(f, weights, x_nxbxD.reshape(n, b, D), expert_n, end_E[-1])
    return y_nxbxD.reshape(n * b, D).at[slot_R].get(mode='fill', fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def map_blocks(f, weights, x_nxbxD, expert_n, n_used):
    """f(weights of expert_n[i], x[i]) of the first n_used blocks [n, b, D], zeros for the others. The gradients of the
    weights are added up in place: JAX's own would add a zero gradient for all experts in every step of the loop."""
    def block(i, y):
        return y.at[i].set(f(weights_of(expert_n[i], weights), x_nxbxD[i]))

    return jax.lax.fori_loop(0, n_used, block, jnp.zeros_like(x_nxbxD))


def weights_of(e, weights):
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, e, keepdims=False), weights)


def map_blocks_bwd(f, saved, g_nxbxD):
    weights, x_nxbxD, expert_n, n_used = saved

    def block(i, grads):
        e = expert_n[i]
        dw, dx = jax.vjp(f, weights_of(e, weights), x_nxbxD[i])[1](g_nxbxD[i])
        return jax.tree.map(lambda total, d: total.at[e].add(d), grads[0], dw), grads[1].at[i].set(dx)

    dw, dx_nxbxD = jax.lax.fori_loop(0, n_used, block, jax.tree.map(jnp.zeros_like, (weights, x_nxbxD)))
    return dw, dx_nxbxD, None, None


map_blocks.defvjp(lambda f, *args: (map_blocks(f, *args), args), map_blocks_bwd)


# -----------------------------------------------------------------------------
# the vocabulary, of which each device may have a range

INIT_STD = 0.02


def embed(table_VxD, idx_BxT):
    """The rows of the table that idx names, [B, T, D]; an id beyond the table gives its last row.

    On a mesh a device has the rows of one vocabulary range: it looks up the ids that are in it, has zeros for the
    others, and the sum over the tensor axis is the embedding."""
    mesh = current_mesh()
    if mesh is None:
        return jnp.take(table_VxD, idx_BxT, axis=0, mode='clip')
    V, tp_size, batch = len(table_VxD), mesh.shape['tensor'], batch_axes(len(idx_BxT))

    def lookup(rows_VxD, idx_BxT):
        x_BxTxD = lookup_range(rows_VxD, idx_BxT, jax.lax.axis_index('tensor') * len(rows_VxD))
        with jax.named_scope('all_reduce'):
            return jax.lax.psum(x_BxTxD, 'tensor')

    return jax.shard_map(lookup, in_specs=(P('tensor'), P(batch)), out_specs=P(batch))(
        pad_rows(table_VxD, tp_size), jnp.clip(idx_BxT, 0, V - 1))


def pad_rows(table, n_ranges):
    """The table with as many rows of zeros after it as make its rows divide into n_ranges."""
    return jnp.pad(table, ((0, -len(table) % n_ranges), *[(0, 0)] * (table.ndim - 1)))


def lookup_range(rows_VxD, idx, start):
    """The embeddings of the ids start .. start + V - 1, whose rows these are; zeros for all others."""
    row = idx - start
    mine = (row >= 0) & (row < len(rows_VxD))
    return jnp.where(mine[..., None], jnp.take(rows_VxD, row, axis=0, mode='clip'), 0)


def head(x_BxTxD, wte_VxD):
    """Logits [B, T, V], tied to the embedding; float32 out, whatever goes in. On a mesh a device keeps those of its
    vocabulary range."""
    return shard(matmul(x_BxTxD, wte_VxD, True, jnp.float32), BATCH, None, 'tensor')


def map_chunks(f, chunk, *xs_BxT):
    """f(*xs), which is [B, T], computed for `chunk` of the T positions at a time; what f computes on the way is not kept
    for its gradient. chunk divides T; 0: all at once."""
    B, T = xs_BxT[0].shape[:2]
    if not chunk or chunk >= T:
        return f(*xs_BxT)
    split = lambda x: x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)
    one = jax.checkpoint(lambda xs: f(*xs), prevent_cse=False)
    return jax.lax.map(one, tuple(map(split, xs_BxT))).swapaxes(0, 1).reshape(B, T)


class VocabParallel(nn.Module):
    """A table [num_embeddings, embedding_dim] whose rows are shared out over tp_size ranks: rank r has the n_rows
    ids from r * n_rows on, n_rows = ceil(num_embeddings / tp_size), with rows of zeros beyond the end of the table.

    Called, a layer computes the part of its tp_rank, on whatever device it is: its parameters are that rank's rows,
    `weight` [n_rows, embedding_dim], as load_weight_shard cuts them from the whole. sharded_forward computes the whole
    on a mesh: its parameters are the whole, `weight` [num_embeddings, embedding_dim]. GPT uses the same functions,
    embed and head."""
    num_embeddings: int
    embedding_dim: int
    tp_size: int = 1
    tp_rank: int = 0
    dtype: Any = 'float32'

    @property
    def n_rows(self):
        return -(-self.num_embeddings // self.tp_size)

    def load_weight_shard(self, full):
        """The rows of this rank of a table, or a bias, of all num_embeddings."""
        if len(full) != self.num_embeddings:
            raise UserError(f'a table of {len(full)} rows is not one of {self.num_embeddings}')
        return pad_rows(jnp.asarray(full), self.tp_size)[self.tp_rank * self.n_rows:][:self.n_rows]

    def table(self, n_rows):
        return self.param('weight', nn.initializers.normal(INIT_STD), (n_rows, self.embedding_dim)).astype(self.dtype)


class VocabParallelEmbedding(VocabParallel):
    """The embedding of tokens [B, T] by a table of which each rank has a part, see VocabParallel."""

    @nn.compact
    def __call__(self, tokens):
        """This rank's term [B, T, D] of the sum that is the embedding: zeros for ids of other ranks."""
        return lookup_range(self.table(self.n_rows), tokens, self.tp_rank * self.n_rows)

    @nn.compact
    def sharded_forward(self, tokens, mesh):
        """The embedding [B, T, D], looked up by the devices of a mesh (create_mesh) where the rows are and summed."""
        return on_mesh(embed, mesh)(self.table(self.num_embeddings), tokens)


class ParallelLMHead(VocabParallel):
    """The logits of x [B, T, D] by a table of which each rank has a part, see VocabParallel; bias: a parameter of that
    name is added, [n_rows] or, in sharded_forward, [num_embeddings]. last_B: only the position last_B[b] of each
    sequence, [B, 1, ...], which is all that a prefill needs."""
    bias: bool = False

    @nn.compact
    def __call__(self, x_BxTxD, last_B=None):
        """This rank's logits, float32 [B, T, n_rows]; those beyond the vocabulary are -inf."""
        logits = self.logits(x_BxTxD, last_B, self.n_rows)
        ids = self.tp_rank * self.n_rows + jnp.arange(self.n_rows)
        return jnp.where(ids < self.num_embeddings, logits, -jnp.inf)

    @nn.compact
    def sharded_forward(self, x_BxTxD, mesh, last_B=None, gathered=False):
        """All logits, float32 [B, T, num_embeddings]. A device of the mesh keeps those of its range; gathered: all."""
        logits = self.logits(x_BxTxD, last_B, self.num_embeddings, on_mesh(lambda table, x: head(x, table), mesh))
        return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P())) if gathered else logits

    def logits(self, x_BxTxD, last_B, n_rows, product=lambda table, x: head(x, table)):
        if last_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, last_B[:, None, None], axis=1)
        logits = product(self.table(n_rows), x_BxTxD.astype(self.dtype))
        return logits + self.param('bias', nn.initializers.zeros, (n_rows,)) if self.bias else logits


def on_mesh(function, mesh):
    """function(table, ...) with the table's rows cut over the mesh, wherever the arguments lie."""
    def on(table, *args):
        table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P('tensor')))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(table, *args)
    return jax.jit(on)


# -----------------------------------------------------------------------------
# rows of tokens that grow

class Sampling(NamedTuple):
    """How to pick a token. What is static here recompiles when it changes; the numbers in Knobs do not."""
    greedy: bool
    top_k: int | None
    top_p: bool
    min_p: bool
    penalize: bool
    n_vocab: int  # only ids below it are picked
    stop_tokens: tuple


class Knobs(NamedTuple):
    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float


class Decoding(struct.PyTreeNode):
    """Where a generation stands: row b of tokens_BxN holds length_B[b] tokens, of which n_B[b] were generated."""
    tokens_BxN: jax.Array
    length_B: jax.Array
    n_B: jax.Array
    done_B: jax.Array  # the row has met a stop token
    key_B: jax.Array
    cache: Any
    draft_cache: Any = None  # of the draft model
    steps: Any = 0  # of decode, so far
    drafted: Any = 0  # tokens proposed so far, of all rows that were not finished
    accepted: Any = 0  # those of them that were right


def penalize_repetition(logits_BxV, tokens_BxN, length_B, penalty):
    """Divides positive logits of tokens that the row already has by `penalty`, multiplies negative ones (CTRL,
    arXiv:1909.05858)."""
    filled_BxN = jnp.arange(tokens_BxN.shape[1]) < length_B[:, None]
    seen_BxV = jax.vmap(lambda logits, tokens, filled: jnp.zeros(logits.shape, bool).at[tokens].max(filled))(
        logits_BxV, tokens_BxN, filled_BxN)
    return jnp.where(seen_BxV, jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty), logits_BxV)


def pick_token(logits_BxV, key_B, sampling, knobs):
    """One token id per row of float32 logits."""
    # on a mesh every device gets all of them, to choose among
    logits_BxV = shard(logits_BxV, None, None)[:, :sampling.n_vocab]
    if sampling.greedy:  # the first of the largest; on XLA:CPU two plain reductions are faster than argmax
        is_max_BxV = logits_BxV == logits_BxV.max(-1, keepdims=True)
        return jnp.where(is_max_BxV, jnp.arange(sampling.n_vocab), sampling.n_vocab - 1).min(-1)
    logits_BxV /= knobs.temperature
    if sampling.top_k is not None:
        kth = jax.lax.top_k(logits_BxV, min(sampling.top_k, sampling.n_vocab))[0][:, -1:]
        logits_BxV = jnp.where(logits_BxV < kth, -jnp.inf, logits_BxV)
    if sampling.top_p:  # keep the likeliest tokens until their probabilities reach top_p (arXiv:1904.09751)
        sorted_BxV = jnp.sort(logits_BxV, axis=-1, descending=True)
        probs_BxV = jax.nn.softmax(sorted_BxV)
        before_BxV = jnp.cumsum(probs_BxV, axis=-1) - probs_BxV  # 0 for the first, which is therefore always kept
        least = jnp.where(before_BxV < knobs.top_p, sorted_BxV, jnp.inf).min(-1, keepdims=True)
        logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
    if sampling.min_p:  # keep tokens of at least min_p times the likeliest one's probability (arXiv:2407.01082)
        least = logits_BxV.max(-1, keepdims=True) + jnp.log(knobs.min_p)
        logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
    return jax.vmap(jax.random.categorical)(key_B, logits_BxV)


def append_token(state, logits_BxV, live_B, sampling, knobs):
    """Picks each row's next token and writes it behind the row, where the row is live. Returns (state, token_B)."""
    if sampling.penalize:
        logits_BxV = penalize_repetition(logits_BxV, state.tokens_BxN, state.length_B, knobs.repetition_penalty)
    token_B = pick_token(logits_BxV, jax.vmap(jax.random.fold_in)(state.key_B, state.n_B), sampling, knobs).astype(jnp.int32)
    here_BxN = (jnp.arange(state.tokens_BxN.shape[1]) == state.length_B[:, None]) & live_B[:, None]
    stops = jnp.array(sampling.stop_tokens, jnp.int32)
    return state.replace(
        tokens_BxN=jnp.where(here_BxN, token_B[:, None], state.tokens_BxN),
        length_B=state.length_B + live_B, n_B=state.n_B + live_B,
        done_B=state.done_B | live_B & (token_B[:, None] == stops).any(-1)), token_B


NGRAM = 3  # prompt lookup goes by so many last tokens


def look_up(tokens_N, length, n_draft):
    """Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding): drafts [n_draft] what followed
    where the last tokens of the row (as many as possible of NGRAM) have stood before, most recently. What followed may
    reach the end of the row: it then starts over, as a text that repeats itself does."""
    i_N, last = jnp.arange(len(tokens_N)), length - 1
    matches_N = i_N < last
    matching_N = jnp.zeros(len(tokens_N), jnp.int32)
    for n in range(NGRAM):
        matches_N &= (i_N >= n) & (jnp.roll(tokens_N, n) == tokens_N[last - n])
        matching_N += matches_N
    place = jnp.argmax(jnp.where(i_N < last, matching_N * len(tokens_N) + i_N, -1))
    return tokens_N[place + 1 + jnp.arange(n_draft) % jnp.maximum(last - place, 1)]


def bucket(n):
    """The next power of two, 16 at least: prompts of one bucket share one compilation."""
    return max(16, 1 << (n - 1).bit_length())
