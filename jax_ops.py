"""How the model is computed and sharded, never what it computes: the docstring of each operation opens with its plain
equivalent, where a reader of the model may stop. The measurements behind the choices are in docs/performance.md.

Sections: sharding, matrix multiplication, dropout, attention and cache kernels, experts, vocabulary, stand-alone
layers. Letters of the shapes are jax_transformer.py's; in addition I and O are input and output features, R is rows
(tokens)."""
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as Spec

from jax_flags import UserError


def ceil_div(a, b):
    """ceil(a / b) of integers."""
    return -(-a // b)


# -----------------------------------------------------------------------------
# sharding
#
# The batch is sharded over data, fsdp and expert, its positions over context; parameters and optimizer state over fsdp
# (ZeRO-3); heads, MLP width and vocabulary over tensor; experts over expert and tensor.

AXES = ('data', 'fsdp', 'tensor', 'expert', 'context')
BATCH = ('data', 'fsdp', 'expert')
EXPERTS = ('expert', 'tensor')

# How each parameter (and its optimizer state) is stored, by the end of its path; parameters not listed are replicated.
# c_attn stores [q | k | v], so column shards would not align with heads. It is stored row-sharded and all-gathered per
# use: 3 D^2 / tensor elements, less than moving q, k and v (3 B T D / tensor) whenever there are more tokens than
# channels.
PARTITION_RULES = (
    ('(wte|lm_head)', Spec('tensor', 'fsdp')),
    ('wpe', Spec(None, 'fsdp')),
    ('c_attn/kernel', Spec(('fsdp', 'tensor'), None)),
    ('(c_fc|c_gate)/kernel', Spec('fsdp', 'tensor')),
    ('(c_fc|c_gate)/bias', Spec('tensor')),
    ('c_proj/kernel', Spec('tensor', 'fsdp')),
    (r'experts_\w+/kernel', Spec(EXPERTS, 'fsdp', None)),
    (r'experts_\w+/bias', Spec(EXPERTS, None)),
)

# (storage, compute) sharding of the kernels of column-parallel and row-parallel layers (Megatron-LM, arXiv:1909.08053)
COLUMN_PARALLEL = ('fsdp', 'tensor'), (None, 'tensor')
ROW_PARALLEL = ('tensor', 'fsdp'), ('tensor', None)


def create_mesh(devices, tp_size=1, fsdp=1, expert=1, context=1):
    """Mesh of `devices` with the axes AXES, of sizes (the rest, fsdp, tp_size, expert, context); ranks of a tensor
    group, which communicate most, are neighbours. Raises UserError if the sizes do not divide the number of devices."""
    if min(tp_size, fsdp, expert, context) < 1 or len(devices) % (tp_size * fsdp * expert * context):
        valid = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise UserError(f'fsdp={fsdp} x tensor={tp_size} x expert={expert} x context={context} does not divide '
                        f'{len(devices)} devices; the product may be one of {valid}')
    shape = (len(devices) // (fsdp * expert * context * tp_size), fsdp, expert, context, tp_size)
    if devices[0].platform == 'tpu':  # neighbours on the torus of links
        from jax.experimental import mesh_utils
        devices = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    devices = np.moveaxis(np.reshape(devices, shape), -1, AXES.index('tensor'))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def current_mesh():
    """The mesh set by the caller (jax.set_mesh), or None, also inside shard_map, where code is that of one device. pmap
    sets a mesh too, without our axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES and AxisType.Manual not in mesh.axis_types else None


def shard(x, *spec):
    """x; on a mesh, sharded by `spec`: per dimension the name of an axis, a tuple of names, or None (replicated)."""
    return jax.lax.with_sharding_constraint(x, Spec(*spec)) if current_mesh() else x


def position_axes(n_positions, *axes):
    """Those of `axes` over which n_positions are sharded on the current mesh: the last ones are dropped until they
    divide."""
    mesh = current_mesh()
    while axes and (mesh is None or n_positions % math.prod(mesh.shape[axis] for axis in axes)):
        axes = axes[:-1]
    return axes


def shard_positions(x):
    """x [B, T, ...]; on a mesh, its positions are sharded over context and tensor, as between blocks, where norms and
    sums need one position at a time (sequence parallelism, arXiv:2205.05198)."""
    return shard(x, BATCH, position_axes(x.shape[1], 'context', 'tensor'), *[None] * (x.ndim - 2))


def gather_positions(x):
    """x [B, T, ...] of shard_positions; on a mesh, its positions are all-gathered over tensor."""
    x = shard_positions(x)  # or XLA would gather it before a cast
    return shard(x, BATCH, position_axes(x.shape[1], 'context'), *[None] * (x.ndim - 2))


def batch_axes(n_rows):
    """The axes of the current mesh over which n_rows rows are sharded: BATCH, or () if they do not divide or there is
    no mesh."""
    mesh = current_mesh()
    return () if not mesh or n_rows % math.prod(mesh.shape[axis] for axis in BATCH) else BATCH


def partition_specs(tree, mesh, *, over_replicas=False):
    """PARTITION_RULES applied to the leaves of a parameter tree or TrainState. A rule describes the last dimensions of
    a leaf; where a dimension is not divisible, mesh axes are dropped from the right until it is. over_replicas: what is
    sharded over fsdp is sharded over data and context in addition."""
    def spec_of(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        rule = next((spec for end, spec in PARTITION_RULES if re.search(rf'(^|/){end}$', name)), Spec())
        shape = np.shape(leaf)
        n_leading = len(shape) - len(rule)
        if n_leading < 0:
            return Spec()
        spec = [None] * n_leading
        for size, axes in zip(shape[n_leading:], rule):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            if over_replicas and 'fsdp' in axes:
                axes = (*axes, 'data', 'context')  # last: a part of what the device holds without them
            while size % math.prod(mesh.shape[axis] for axis in axes):
                axes = axes[:-1]
            spec.append(axes or None)
        while spec and spec[-1] is None:
            spec.pop()
        return Spec(*spec)

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def shard_params(tree, *, over_replicas=False):
    """The same parameters, gradients or optimizer state; on a mesh, sharded as partition_specs says."""
    mesh = current_mesh()
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, partition_specs(tree, mesh, over_replicas=over_replicas))


def all_gather_param(param, dtype, tp=()):
    """The same parameter; on a mesh, cast to dtype and all-gathered over fsdp. tp is (storage, compute) sharding. The
    cast comes first to reduce traffic. Int8 weights pass unchanged."""
    if isinstance(param, Int8):
        return param
    if current_mesh():
        param = param.astype(dtype)
    with jax.named_scope('all_gather'):
        for spec in tp:
            param = shard(param, *spec)
    return param


# -----------------------------------------------------------------------------
# matrix multiplication

CUSTOM_MATMUL_GRADIENTS = True  # False: the gradients that JAX derives, for bench_jax.py --ablate=True


def as_row_major(x):
    """x. On a CPU, XLA is told to lay it out row-major at this point; on a mesh it could not partition that."""
    try:
        from jax.experimental.layout import Layout, with_layout_constraint
        row_major = lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    except ImportError:  # only slower
        return x
    return x if current_mesh() else jax.lax.platform_dependent(x, cpu=row_major, default=lambda x: x)


def transpose_materialized(x):
    """x.swapaxes(-1, -2). bfloat16 on a CPU is also moved in memory: XLA:CPU's fast bfloat16 matmul takes row-major [M,
    K] and [K, N] only, and converts everything else to float32 (2.3 times slower, docs/performance.md#matmul)."""
    x = x.swapaxes(-1, -2)
    return as_row_major(x) if x.dtype == jnp.bfloat16 else x


def matmul_f32_acc(x, y, dtype=None):
    """x [..., M, K] @ y [..., K, N] in dtype (default: x's), accumulated in float32."""
    dtype = dtype or x.dtype
    # GPUs and TPUs accumulate in float32 in either case; XLA:CPU does only where the result is float32
    multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    through_f32 = lambda x, y: two_rows(multiply, x, y).astype(dtype)
    direct = lambda x, y: jnp.matmul(x, y, preferred_element_type=dtype)
    if x.dtype != jnp.bfloat16:
        return direct(x, y)
    return jax.lax.platform_dependent(x, y, cpu=through_f32, default=direct)


def two_rows(multiply, x, y):
    """multiply(x, y). A single row x [..., 1, K] is multiplied twice: for a matmul of one row XLA:CPU converts a
    bfloat16 matrix to float32, and hoists the copies of all weights out of the decode loop."""
    if x.size > x.shape[-1]:
        return multiply(x, y)
    return multiply(jnp.concatenate([x, x], axis=-2), y)[..., :1, :]


def weight_grad(x, g, dtype):
    """x.T @ g for x [..., R, I] and g [..., R, O].

    Transposes the activation x. JAX's rule transposes the cotangent g, which XLA:CPU fuses into its element-wise
    producer (20% slower training step). In bfloat16 a transpose is a copy: if g and the result together are smaller
    than x, (g.T @ x).T is computed instead."""
    result_size = math.prod(x.shape[:-2]) * x.shape[-1] * g.shape[-1]
    if x.dtype == jnp.bfloat16 and x.size > g.size + result_size:
        return as_row_major(matmul_f32_acc(transpose_materialized(g), x, dtype)).swapaxes(-1, -2)
    return matmul_f32_acc(transpose_materialized(x), g, dtype)


def matmul(x, y, *, transpose_rhs=False, dtype=None, tp=()):
    """x @ y (x @ y.T with transpose_rhs) in x's dtype, accumulated in float32; the result in dtype (default: x's).

    x is [..., I] with a kernel y [I, O] of any dtype, or both have the same leading axes. tp: COLUMN_PARALLEL or
    ROW_PARALLEL for a kernel on a mesh: it is all-gathered over fsdp, and again in the backward pass, because keeping
    it would materialize the full model (ZeRO-3, arXiv:1910.02054)."""
    if CUSTOM_MATMUL_GRADIENTS:
        return matmul_vjp(x, y, transpose_rhs, dtype, tp)
    y = y.astype(x.dtype)
    return (x @ (y.swapaxes(-1, -2) if transpose_rhs else y)).astype(dtype or x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul_vjp(x, y, transpose_rhs, dtype, tp):
    y = all_gather_param(y, x.dtype, tp).astype(x.dtype)
    return matmul_f32_acc(x, transpose_materialized(y) if transpose_rhs else y, dtype)


def matmul_fwd(x, y, transpose_rhs, dtype, tp):
    return matmul_vjp(x, y, transpose_rhs, dtype, tp), (x, y)


def matmul_bwd(transpose_rhs, dtype, tp, residuals, g):
    x, y_stored = residuals
    g = g.astype(x.dtype)
    if tp == ROW_PARALLEL:
        g = gather_positions(g)
    if tp and current_mesh():
        # The barrier prevents CSE with the forward all-gather, and moving this one out of a loop of micro-steps. It
        # ties the weights to x, not to g, so that XLA can prefetch them before g is known
        # (docs/parallelism.md#overlap).
        y_stored, x = jax.lax.optimization_barrier((y_stored, x))
    y = all_gather_param(y_stored, x.dtype, tp).astype(x.dtype)
    dx = matmul_f32_acc(g, y if transpose_rhs else transpose_materialized(y))
    if y.ndim == 2:
        x = x.reshape(-1, x.shape[-1])
        g = g.reshape(-1, g.shape[-1])
    dy = weight_grad(g, x, y_stored.dtype) if transpose_rhs else weight_grad(x, g, y_stored.dtype)
    return dx, shard(dy, *tp[0]) if tp else dy  # reduce-scattered to the stored shard


matmul_vjp.defvjp(matmul_fwd, matmul_bwd)


def matmul_nt(x, w_OxI):
    """x [..., I] @ w.T -> float32 [..., O]: the matmul of decoding, where weights [O, I] are read once per step.

    XLA:CPU repacks the right operand, so for few rows the weights are the left one
    (docs/performance.md#weights-on-the-left). In bfloat16 one row has a loop of its own."""
    x_RxI = x.reshape(-1, x.shape[-1])
    w_OxI = w_OxI.astype(x.dtype)
    R, I = x_RxI.shape
    on_cpu = functools.partial(two_rows, nt)
    if R <= 64 and x.dtype == jnp.float32:  # 64 rows take 15% less time, 256 rows the same time on either side
        on_cpu = nt_weights_left
    elif R == 1 and x.dtype == jnp.bfloat16 and bfloat16_lane_terms(I) and not current_mesh():
        on_cpu = nt_bfloat16_row
    y_RxO = jax.lax.platform_dependent(x_RxI, w_OxI, cpu=on_cpu, default=nt)
    return y_RxO.reshape(*x.shape[:-1], -1)


def nt(x_RxI, w_OxI, dtype=jnp.float32):
    """x @ w.T, accumulated in dtype."""
    if x_RxI.dtype == jnp.uint8:
        return nt_uint8().bind(x_RxI, w_OxI)
    return jax.lax.dot_general(x_RxI, w_OxI, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def nt_weights_left(x_RxI, w_OxI, dtype=jnp.float32):
    """x @ w.T as (w @ x.T).T. The barrier keeps XLA from swapping the operands back and from fusing what follows."""
    R = len(x_RxI)
    n_padding = -R % 4 if R > 1 else 0  # five rows take longer than eight
    x_RxI = jnp.pad(x_RxI, ((0, n_padding), (0, 0)))
    return jax.lax.optimization_barrier(nt(w_OxI, x_RxI, dtype)).T[:R]


@functools.cache
def nt_uint8():
    """The primitive x @ w.T of uint8 x and int8 w -> int32. CPUs have instructions for this pair (VNNI), which XLA:CPU
    uses: int8 by int8 takes 1.4 to 2.6 times as long. JAX's own lowering converts operands of two dtypes to int32."""
    from jax.extend.core import Primitive
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    def lower(context, x_RxI, w_OxI):
        y_RxO = ir.RankedTensorType.get(context.avals_out[0].shape, ir.IntegerType.get_signless(32))
        return [stablehlo.dot_general(y_RxO, x_RxI, w_OxI, stablehlo.DotDimensionNumbers.get([], [], [1], [1]))]

    primitive = Primitive('nt_uint8')
    primitive.def_abstract_eval(lambda x, w: jax.core.ShapedArray((x.shape[0], w.shape[0]), np.dtype('int32')))
    mlir.register_lowering(primitive, lower, platform='cpu')
    return primitive


@functools.cache
def cpu_multiplies_uint8():
    """Whether nt_uint8 compiles: XLA may not have it for this CPU, and a later JAX not what it is made of."""
    shapes = (jax.ShapeDtypeStruct((64, 64), jnp.uint8), jax.ShapeDtypeStruct((2, 64), jnp.int8))
    try:
        with jax.default_device(jax.local_devices(backend='cpu')[0]):
            jax.jit(nt_uint8().bind).lower(*shapes).compile()
    except (ImportError, AttributeError, jax.errors.JaxRuntimeError):
        return False
    return True


def lane_terms(n, least, most):
    """The largest t from `least` to `most` for which 32 t divides n, or None: a row of n elements is then split into
    blocks, each summed as 32 sums of t terms side by side."""
    return max((terms for terms in range(least, most + 1) if n % (32 * terms) == 0), default=None)


bfloat16_lane_terms = functools.partial(lane_terms, least=4, most=20)  # of nt_bfloat16_row
int8_lane_terms = functools.partial(lane_terms, least=3, most=6)  # of int8_matvec


def nt_bfloat16_row(x_1xI, w_OxI):
    """x @ w.T -> float32 [1, O] of bfloat16 arrays, one row of x: reads weights at twice the rate of the matmul of two
    rows (docs/performance.md#bfloat16).

    The loop is shaped for XLA:CPU: 32 sums side by side fill vector registers; at most 20 terms each, or LLVM does not
    unroll them; two halves of the rows in one reduction, because a reduction of one operand is compiled as a library
    call, which is slower, and because two streams are prefetched faster than one; a matmul with ones adds up the 32."""
    O, I = w_OxI.shape
    n_pairs, terms = O // 2, bfloat16_lane_terms(I)
    n_blocks = I // (32 * terms)

    def multiply(x_I, w_OxI):
        halves = w_OxI[:2 * n_pairs].astype(jnp.float32).reshape(2, n_pairs, n_blocks, terms, 32)
        products = [half * x_I.reshape(n_blocks, terms, 32) for half in halves]
        sums = jax.lax.reduce(products, [np.float32(0)] * 2, lambda a, b: [a[0] + b[0], a[1] + b[1]], (2,))
        sums = [half.reshape(n_pairs, n_blocks * 32) for half in jax.lax.optimization_barrier(sums)]
        sums = [nt_weights_left(jnp.ones((1, n_blocks * 32)), half) for half in sums]
        odd_row = nt(x_I[None], w_OxI[2 * n_pairs:].astype(jnp.float32))
        return jnp.concatenate([*sums, odd_row], axis=1)

    x_I = x_1xI[0].astype(jnp.float32)
    return fusion_barrier(~jnp.isnan(x_I[0]), multiply, np.nan, x_I, w_OxI)


def fusion_barrier(condition, f, otherwise, *args):
    """f(*args), which is `otherwise` everywhere where the condition is false. XLA:CPU moves nothing across a condition:
    it neither computes x again for each row of the weights (5 times as slow), nor converts the weights of all layers
    ahead of the decode loop."""
    y = jax.eval_shape(f, *args)
    return jax.lax.cond(condition, f, lambda *args: jnp.full(y.shape, otherwise, y.dtype), *args)


# Kernels of decoding (see convert_params_for_decoding in jax_generate.py) are values of their own, which linear() takes
# in place of an array [I, O]. All hold one row per output. n_ranks: the outputs of a fused kernel are in the order of
# this many tensor ranks, see order_by_rank.

class Int8(struct.PyTreeNode):
    """A matrix [I, O] quantized to int8 with one scale per output: values [..., O, I] and float32 scale [..., O]. As an
    embedding table [V, D] it has one scale per token. For CPUs, values may be stored as uint8, see as_uint8."""
    values: jax.Array
    scale: jax.Array
    n_ranks: int = struct.field(pytree_node=False, default=1)


class Transposed(struct.PyTreeNode):
    """A matrix [I, O] stored as values [O, I], which a CPU reads faster for one row: float32 by 7 to 15%, bfloat16
    twice as fast (nt_bfloat16_row)."""
    values: jax.Array
    n_ranks: int = struct.field(pytree_node=False, default=1)


class LowRank(struct.PyTreeNode):
    """A frozen matrix [I, O] and its update in training: base + scale * a @ b (LoRA, arXiv:2106.09685), with base an
    array or Int8, a [I, r], b [r, O] and a scalar scale."""
    base: Any
    a: jax.Array
    b: jax.Array
    scale: jax.Array


def low_rank_update(x, kernel):
    """What the update of a LowRank kernel adds to x @ kernel.base, in x's dtype."""
    return matmul(matmul(x, kernel.a), kernel.b) * kernel.scale.astype(x.dtype)


def linear(x, kernel, bias=None, *, tp=()):
    """x [..., I] @ kernel [I, O] + bias [O], in x's dtype; the kernel is an array, Int8, Transposed or LowRank."""
    if isinstance(kernel, LowRank):
        return linear(x, kernel.base, bias, tp=tp) + low_rank_update(x, kernel)
    if tp == COLUMN_PARALLEL:
        x = gather_positions(x)
    if isinstance(kernel, Int8):
        y = matmul_int8(x, kernel.values, kernel.scale, tp).astype(x.dtype)
    elif isinstance(kernel, Transposed):
        y = matmul_nt(x, kernel.values).astype(x.dtype)
    else:
        y = matmul(x, kernel, tp=tp)
    if tp == ROW_PARALLEL:  # each rank holds a partial sum
        with jax.named_scope('reduce_scatter'):
            y = shard_positions(y)
    if bias is not None:
        y = add_bias(y, bias)
    return checkpoint_name(y, 'dense')


def fused_linear(x, kernel, bias, widths):
    """jnp.split(linear(x, kernel, bias), ...): several projections fused into one kernel [I, sum(widths)] (c_attn: q,
    k, v).

    With tensor parallelism the fused columns are brought into the order of ranks (order_by_rank), unless Int8 or
    Transposed are stored in that order."""
    if isinstance(kernel, LowRank):
        updates = jnp.split(low_rank_update(x, kernel), np.cumsum(widths)[:-1], axis=-1)
        return [y + update for y, update in zip(fused_linear(x, kernel.base, bias, widths), updates)]
    mesh = current_mesh()
    if isinstance(kernel, (Int8, Transposed)):
        n_ranks = kernel.n_ranks
    else:
        n_ranks = mesh.shape['tensor'] if mesh else 1
        if n_ranks > 1:  # stored sharded by rows, so that the order is local; an all-to-all follows, once per step
            order = lambda kernel: shard(order_by_rank(kernel, widths, n_ranks), *COLUMN_PARALLEL[0])
            kernel = computed_in(x.dtype, order, kernel)
    bias = None if bias is None else order_by_rank(bias, widths, n_ranks)
    y = linear(x, kernel, bias, tp=COLUMN_PARALLEL)
    ends = np.cumsum(widths)[:-1] // n_ranks
    parts = jnp.split(y.reshape(*y.shape[:-1], n_ranks, -1), ends, axis=-1)
    return [part.reshape(*y.shape[:-1], width) for part, width in zip(parts, widths)]


def order_by_rank(x, widths, n_ranks):
    """x [..., sum(widths)] with its columns [q | k | v] as [q0 k0 v0 | q1 k1 v1 | ...], so that an equal split over
    n_ranks keeps heads whole."""
    parts = [part.reshape(*x.shape[:-1], n_ranks, -1) for part in jnp.split(x, np.cumsum(widths)[:-1], axis=-1)]
    return jnp.concatenate(parts, axis=-1).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def computed_in(dtype, f, x):
    """f(x) for a linear f that only moves elements, of x cast to dtype; the gradient stays in x's dtype."""
    return f(x.astype(dtype)).astype(x.dtype)


def computed_in_fwd(dtype, f, x):
    return computed_in(dtype, f, x), x


def computed_in_bwd(dtype, f, x, g):
    return jax.vjp(f, x)[1](g)


computed_in.defvjp(computed_in_fwd, computed_in_bwd)


@jax.custom_vjp
def add_bias(x, bias):
    """x [..., O] + bias [O], in x's dtype. The gradient of the bias, a sum over all tokens, is accumulated in
    float32."""
    return x + bias.astype(x.dtype)


def add_bias_fwd(x, bias):
    return add_bias(x, bias), bias.dtype.type(0)  # residual: a scalar that carries the dtype


def add_bias_bwd(zero, g):
    return g, g.sum(range(g.ndim - 1), dtype=jnp.float32).astype(zero.dtype)


add_bias.defvjp(add_bias_fwd, add_bias_bwd)


def quantize(x, dtype, largest=None):
    """x [..., n] -> (values [..., n] in dtype, an integer or a float8; float32 scale [...]), x being about values *
    scale: the scale maps the largest magnitude of the last axis to `largest`, by default 127 or the largest float8."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = largest or (127 if is_integer else float(jnp.finfo(dtype).max))
    magnitude = jnp.maximum(x.max(-1), -x.min(-1))  # for abs(x).max(-1) XLA:CPU stores abs(x)
    scale = jnp.maximum(magnitude.astype(jnp.float32), 1e-30) / largest
    x = x.astype(jnp.float32) / scale[..., None]
    return (jnp.round(x) if is_integer else x).astype(dtype), scale


def as_uint8(x):
    """int8 x as uint8 x + 128: another highest bit."""
    return jax.lax.bitcast_convert_type(x ^ -128, jnp.uint8)


def as_int8(values):
    """The values of an Int8, which may be stored by as_uint8, in int8."""
    return jax.lax.bitcast_convert_type(values ^ 128, jnp.int8) if values.dtype == jnp.uint8 else values


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def matmul_int8(x, w_OxI, scale_O, tp=()):
    """x [..., I] @ (w * scale).T -> float32 [..., O], for the values and scales of an Int8; tp as in linear().

    On a CPU decoding is bound by reading the weights, and XLA:CPU has fast integer matmuls, so up to 64 rows of x (32
    where values are int8) are quantized as well, each with one scale: to int16, because in int8 a few large activations
    would cost the others their precision (docs/performance.md#what-int8-costs). More rows, and other devices, convert
    the weights instead."""
    def in_integers(x_RxI, w_OxI):
        R, I = x_RxI.shape
        if R > (64 if w_OxI.dtype == jnp.uint8 else 32):
            return fusion_barrier(x_RxI.any(), converted, 0, x_RxI, w_OxI)
        x_RxI, scale_R = quantize(x_RxI, jnp.int16, int16_levels(I))
        return fusion_barrier((scale_R > 1e-32).any(), multiply_integers, 0, x_RxI, w_OxI) * scale_R[:, None]

    converted = lambda x_RxI, w_OxI: nt(x_RxI, as_int8(w_OxI).astype(x_RxI.dtype))
    on_cpu = functools.partial(on_tensor_ranks, in_integers, tp=tp)
    y_RxO = jax.lax.platform_dependent(x.reshape(-1, x.shape[-1]), w_OxI, cpu=on_cpu, default=converted)
    return (y_RxO * scale_O).reshape(*x.shape[:-1], -1)


def matmul_int8_fwd(x, w_OxI, scale_O, tp):
    return matmul_int8(x, w_OxI, scale_O, tp), (x.dtype.type(0), w_OxI, scale_O)


def matmul_int8_bwd(tp, residuals, g):
    """The gradient of x; the weights are frozen."""
    zero, w_OxI, scale_O = residuals
    return matmul_f32_acc((g * scale_O).astype(zero.dtype), as_int8(w_OxI).astype(zero.dtype)), None, None


matmul_int8.defvjp(matmul_int8_fwd, matmul_int8_bwd)


def on_tensor_ranks(multiply, x_RxI, w_OxI, tp):
    """multiply(x, w) -> [R, O]; on a mesh, each tensor rank multiplies with its shard of w. XLA's partitioner would
    gather w where int8_matvec splits its rows."""
    mesh = current_mesh()
    n_ranks = mesh.shape['tensor'] if mesh else 1
    if n_ranks > 1 and tp == COLUMN_PARALLEL and len(w_OxI) % n_ranks == 0:
        specs = {'in_specs': (Spec(), Spec('tensor')), 'out_specs': Spec(None, 'tensor')}
        return jax.shard_map(multiply, **specs, axis_names={'tensor'}, check_vma=False)(x_RxI, w_OxI)
    if n_ranks > 1 and tp == ROW_PARALLEL and x_RxI.shape[1] % n_ranks == 0:
        partial_sum = lambda x_RxI, w_OxI: jax.lax.psum(multiply(x_RxI, w_OxI), 'tensor')
        specs = {'in_specs': (Spec(None, 'tensor'), Spec(None, 'tensor')), 'out_specs': Spec()}
        return jax.shard_map(partial_sum, **specs, axis_names={'tensor'}, check_vma=False)(x_RxI, w_OxI)
    return multiply(x_RxI, w_OxI)


def int16_levels(n):
    """The largest magnitude to which n activations are quantized: a sum of n matmul terms fits into int32, and a level
    is 256 a + b with a and b in int8. 22,016 for 768 activations."""
    return min(127 * 256 + 127, (2**31 - 1) // (127 * n))


def multiply_integers(x_RxI, w_OxI):
    """x @ w.T of int16 x and the values of an Int8, exact, then in float32."""
    multiply = int8_matvec if len(x_RxI) == 1 and int8_lane_terms(x_RxI.shape[1]) else int8_matmul
    y_RxO = multiply(x_RxI, w_OxI)
    if w_OxI.dtype == jnp.uint8:  # values + 128: int32 wraps around, and the difference is exact
        y_RxO -= 128 * x_RxI.sum(1, keepdims=True, dtype=jnp.int32)
    return y_RxO.astype(jnp.float32)


def int8_matmul(x_RxI, w_OxI):
    """x @ w.T -> int32 of int16 x and int8 or uint8 weights. XLA:CPU's fast matmuls take x in int8: x = 256 high + low,
    which are twice as many rows."""
    high_RxI = (x_RxI + 128) >> 8
    low_RxI = x_RxI - 256 * high_RxI
    y_2RxO = nt_weights_left(jnp.concatenate([high_RxI, low_RxI]).astype(jnp.int8), w_OxI, jnp.int32)
    high_RxO, low_RxO = jnp.split(y_2RxO, 2)
    return 256 * high_RxO + low_RxO


def int8_matvec(x_1xI, w_OxI):
    """int8_matmul for one row: 32 integer sums side by side, which read weights at nearly the rate of the memory
    (docs/lab_log.md#int8-matmuls). The terms of a block are added one by one: a reduction over terms and another over
    the sums are one loop in jaxlib 0.10 only; 0.12 stores the sums between its two."""
    terms = int8_lane_terms(x_1xI.shape[1])
    w, x = (a.reshape(len(a), -1, terms, 32) for a in (w_OxI, x_1xI))
    sums = sum(w[:, :, i].astype(jnp.int32) * x[:, :, i].astype(jnp.int32) for i in range(terms))
    return sums.sum((1, 2))[None]


# -----------------------------------------------------------------------------
# dropout

def hash_dropout(x, rate, key_B, counter):
    """jnp.where(bernoulli(1 - rate), x / (1 - rate), 0) for x [B, ...], from a counter-based hash.

    The mask is a hash of (the sequence's key, counter), so tiling and sharding do not change it; counter numbers the
    elements, uint32 [...], usually flat_index(x.shape[1:]). On a CPU the hash is 100 times as fast as
    jax.random.bernoulli, and it fuses."""
    words = jax.random.key_data(key_B).reshape(len(x), -1, *(1,) * (x.ndim - 1))
    bits = mix_bits(mix_bits(counter + words[:, 0]) ^ words[:, 1])
    scaled = x.astype(jnp.float32) / (1 - rate)  # bfloat16 would round 1 / (1 - rate) by up to 0.2%
    return jnp.where(bits < jnp.uint32(min(round((1 - rate) * 2**32), 2**32 - 1)), scaled, 0).astype(x.dtype)


def mix_bits(x):
    """A bijective hash of uint32 (lowbias32, https://nullprogram.com/blog/2018/07/31)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7feb352d)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846ca68b)
    return x ^ (x >> 16)


def flat_index(shape):
    """jnp.arange(prod(shape)).reshape(shape) in uint32, modulo 2**32."""
    index = jnp.uint32(0)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


# -----------------------------------------------------------------------------
# attention and cache kernels

def causal_mask(key_position, position, *, window=0, chunk=0):
    """True where a query may attend to a key: at its own position and before; with `window` among the last `window`
    positions only, with `chunk` within its chunk of that many positions."""
    mask = key_position <= position
    if window:
        mask &= key_position > position - window
    if chunk:
        mask &= key_position // chunk == position // chunk
    return mask


def first_key_of(position, window, chunk):
    """The first position to which causal_mask lets a query at this position attend."""
    if chunk:
        return position // chunk * chunk
    return max(0, position + 1 - window) if window else 0


def fused_causal_attention(implementation, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, *, scale=None, window=0, chunk=0,
                           sinks_H=None, dropout_rate=0.0, key_B=None):
    """dot_product_attention of jax_transformer.py with the causal_mask of positions 0 .. T-1 -> [B, T, H, K].

    implementation: 'chunked' (any backend), 'cudnn' (NVIDIA GPUs) or 'splash' (TPUs). On a mesh each device computes
    its heads of its sequences. Raises UserError for what the kernels of cuDNN and TPUs do not compute."""
    options = {'scale': scale or q_BxTxHxK.shape[-1]**-0.5, 'window': window, 'chunk': chunk}

    def attend(first_group, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B):
        qkv = q_BxTxHxK, k_BxTxGxK, v_BxTxGxK
        if implementation == 'chunked':
            return chunked_attention(*qkv, sinks_H=sinks_H, dropout_rate=dropout_rate, key_B=key_B,
                                     first_group=first_group, **options)
        if key_B is not None:
            raise UserError(f'{implementation} attention has no dropout: use attention=chunked, or dropout=0')
        if implementation == 'splash':
            return splash_attention(*qkv, sinks_H=sinks_H, **options)
        if sinks_H is not None:
            raise UserError('cudnn attention has no sinks: use attention=chunked')
        return cudnn_attention(*qkv, **options)

    mesh = current_mesh()
    if mesh is None:
        return attend(0, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B)
    T, H = q_BxTxHxK.shape[1:3]
    n_context = mesh.shape['context']
    kernel, kernel_spec = None, None
    if n_context > 1 and implementation == 'splash':
        kernel = splash_kernel(T, H // mesh.shape['tensor'], window, chunk, n_context)
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
    specs = (kernel_spec, heads, heads, heads, Spec('tensor'), Spec(batch))
    attend_sharded = jax.shard_map(attend_local, in_specs=specs, out_specs=heads, check_vma=False)
    return attend_sharded(kernel, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B)


def context_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, sinks_H, key_B, *, kernel, first_group, window, chunk, scale,
                      dropout_rate):
    """fused_causal_attention on one of C (n_context) devices, each with T consecutive positions of a sequence, inside
    shard_map. kernel: of splash_kernel; None is chunked attention.

    Keys and values are all-gathered. The queries are exchanged so that every device has the same work: of each of the C
    parts of the sequence, device i computes the i-th of C pieces, which attends to the parts up to its own. That is
    (C + 1) / 2C of all scores, where causal attention needs 1/2."""
    n_context = jax.lax.axis_size('context')
    T = q_BxTxHxK.shape[1]
    n = T // n_context
    exchange = functools.partial(jax.lax.all_to_all, axis_name='context', split_axis=1, concat_axis=1, tiled=True)
    with jax.named_scope('all_to_all'):
        q_BxTxHxK = exchange(q_BxTxHxK)
    with jax.named_scope('all_gather'):
        k_BxSxGxK, v_BxSxGxK = (jax.lax.all_gather(x, 'context', axis=1, tiled=True) for x in (k_BxTxGxK, v_BxTxGxK))
    if kernel:
        return exchange(splash_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, scale=scale, sinks_H=sinks_H, kernel=kernel))
    ys = []
    for part in range(n_context):
        first_key = first_key_of(part * T, window, chunk)
        seen = slice(first_key, (part + 1) * T)
        ys.append(chunked_attention(
            q_BxTxHxK[:, part * n:(part + 1) * n], k_BxSxGxK[:, seen], v_BxSxGxK[:, seen], scale=scale, window=window,
            chunk=chunk, sinks_H=sinks_H, dropout_rate=dropout_rate, key_B=key_B, first_group=first_group,
            first=part * T + jax.lax.axis_index('context') * n, first_key=first_key, n_positions=n_context * T))
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


def splash_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, *, scale, window=0, chunk=0, sinks_H=None, interpret=False,
                     kernel=None):
    """fused_causal_attention by the splash attention kernel for TPUs that JAX ships. kernel: of splash_kernel, if it
    is not that of window and chunk."""
    T, H = q_BxTxHxK.shape[1:3]
    attend = kernel or splash_kernel(T, H, window, chunk, interpret=interpret)
    q, k, v = (x.swapaxes(1, 2) for x in ((q_BxTxHxK * scale).astype(q_BxTxHxK.dtype), k_BxTxGxK, v_BxTxGxK))
    return jax.vmap(lambda q, k, v: attend(q, k, v, sinks=sinks_H))(q, k, v).swapaxes(1, 2)


@functools.lru_cache(maxsize=8)  # its tables are computed on the CPU, a minute for T = 131,072
def splash_kernel(T, H, window=0, chunk=0, context=1, *, interpret=False):
    """The splash attention kernel for H heads of T positions, of which `context` devices compute the queries as
    context_attention says. Blocks of 512 positions, as MaxText has them, where they divide a device's queries; else
    128."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    mask = masks.CausalMask((T, T))
    if window:
        mask = masks.LocalMask((T, T), (window - 1, 0), 0)
    if chunk and chunk < T:
        mask = masks.ChunkedCausalMask((T, T), chunk)
    positions = np.arange(T, dtype=np.int32).reshape(context, context, -1)  # [part, piece, position]
    mask.q_sequence = np.ascontiguousarray(positions.swapaxes(0, 1)).ravel()
    block = 512 if T // context % 512 == 0 else 128
    names = [field.name for field in dataclasses.fields(kernel.BlockSizes) if field.name.startswith('block_')]
    with jax.ensure_compile_time_eval():
        return kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * H), head_shards=1, q_seq_shards=context, interpret=interpret,
            block_sizes=kernel.BlockSizes(**dict.fromkeys(names, block)))


@functools.partial(jax.jit, static_argnames=('scale', 'window', 'chunk', 'dropout_rate', 'first_key', 'n_positions'))
def chunked_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, *, scale=None, window=0, chunk=0, sinks_H=None, dropout_rate=0.0,
                      key_B=None, first_group=0, first=0, first_key=0, n_positions=None):
    """fused_causal_attention in blocks of queries, on any backend. Values may be wider or narrower than keys.

    A block of queries is computed at a time, against the keys that it may attend to: on a CPU 128 queries of one
    sequence, so that the probabilities stay in its L2 cache, elsewhere 512 of all sequences. Probabilities are never
    stored, but recomputed in the backward pass (docs/performance.md#chunked-attention). first_group: the number of this
    device's first key head, for the dropout masks. n_positions: length of the sequence, if these are not all of its
    positions; first and first_key are then the positions of the first query and the first key. jit makes JAX trace this
    once for all layers of a kind."""
    B, T, H, K = q_BxTxHxK.shape
    in_pieces = n_positions is not None
    n_positions = n_positions or T
    G = k_BxTxGxK.shape[2]
    Q = H // G  # query heads of a group are folded into the time axis, as in dot_product_attention
    first_counter = jnp.uint32(first_group) * jnp.uint32(n_positions * Q * n_positions % 2**32)

    def attend_block(first, first_key, q_GxTQxK, k_GxSxK, v_GxSxK, key):
        n, end = q_GxTQxK.shape[1] // Q, first_key + k_GxSxK.shape[1]
        scores_GxTQxS = matmul(q_GxTQxK, k_GxSxK, transpose_rhs=True, dtype=jnp.float32) * (scale or K**-0.5)
        position_TQx1 = jnp.repeat(first + jnp.arange(n), Q)[:, None]
        mask_TQxS = causal_mask(jnp.arange(first_key, end), position_TQx1, window=window, chunk=chunk)
        scores_GxTQxS = jnp.where(mask_TQxS, scores_GxTQxS, jnp.finfo(jnp.float32).min)
        if sinks_H is not None:
            sinks_GxTQx1 = jnp.tile(sinks_H.reshape(G, Q), n)[..., None]
            scores_GxTQxS = jnp.concatenate([scores_GxTQxS, sinks_GxTQx1], axis=-1)
        probs_GxTQxS = jax.nn.softmax(scores_GxTQxS)[..., :end - first_key]
        if key is not None:
            g, tq, s = (jax.lax.broadcasted_iota(jnp.uint32, scores_GxTQxS.shape[:2] + (end - first_key,), axis)
                        for axis in range(3))
            tq += jnp.uint32(first * Q)
            # flat_index of this block in the probabilities of all devices, [H / Q, n_positions Q, n_positions]
            counter_GxTQxS = first_counter + (g * jnp.uint32(n_positions * Q) + tq) * jnp.uint32(n_positions) + (
                s + jnp.uint32(first_key))
            probs_GxTQxS = hash_dropout(probs_GxTQxS[None], dropout_rate, key[None], counter_GxTQxS)[0]
        return matmul(probs_GxTQxS.astype(v_GxSxK.dtype), v_GxSxK)

    def attend_sequence(sequence, n, in_loop):
        q_GxTQxK, k_GxTxK, v_GxTxK, key = sequence
        n *= max(1, T // (64 * n))  # at most 64 blocks, because each is compiled
        attend = jax.checkpoint(attend_block, prevent_cse=not in_loop, static_argnums=(0, 1))
        sizes = [min(n, T - first) for first in range(0, T, n)]
        # split and concatenated again, in float32: the gradients of a key are then added by block, none padded to [T]
        qs = jax.lax.split(q_GxTQxK, [size * Q for size in sizes], axis=1)
        ks = jax.lax.split(k_GxTxK.astype(jnp.float32), sizes, axis=1)
        vs = jax.lax.split(v_GxTxK.astype(jnp.float32), sizes, axis=1)
        ys = []
        for i, q in enumerate(qs):
            seen = slice(first_key_of(i * n, window, chunk) // n, i + 1)
            k, v = (jnp.concatenate(blocks[seen], axis=1).astype(v_GxTxK.dtype) for blocks in (ks, vs))
            ys.append(attend(i * n, seen.start * n, q, k, v, key))
        return jnp.concatenate(ys, axis=1)

    def attend_piece(sequence):
        q_GxTQxK, k_GxSxK, v_GxSxK, key = sequence
        n = math.gcd(T, 128)
        k_GxSxK, v_GxSxK = k_GxSxK.astype(jnp.float32), v_GxSxK.astype(jnp.float32)  # so that gradients are added in it
        attend = jax.checkpoint(attend_block, prevent_cse=False, static_argnums=1)

        def attend_next(block):
            k, v = k_GxSxK.astype(v_BxTxGxK.dtype), v_GxSxK.astype(v_BxTxGxK.dtype)
            return attend(first + block[0] * n, first_key, block[1], k, v, key)

        blocks = q_GxTQxK.reshape(G, T // n, n * Q, K).swapaxes(0, 1)
        return jax.lax.map(attend_next, (jnp.arange(T // n), blocks)).swapaxes(0, 1).reshape(G, T * Q, -1)

    q_BxGxTQxK = q_BxTxHxK.reshape(B, T, G, Q, K).swapaxes(1, 2).reshape(B, G, T * Q, K)
    sequences = q_BxGxTQxK, k_BxTxGxK.swapaxes(1, 2), v_BxTxGxK.swapaxes(1, 2), key_B
    # checkpointed again, so that the loop does not stack the keys of each block (the baby GPT's attention: 0.71 of the
    # time in bfloat16)
    attend_one = jax.checkpoint(functools.partial(attend_sequence, n=128, in_loop=True), prevent_cse=False)
    one_by_one = functools.partial(jax.lax.map, attend_one)
    all_at_once = jax.vmap(functools.partial(attend_sequence, n=512, in_loop=False))
    if in_pieces:
        y_BxGxTQxK = jax.lax.map(attend_piece, sequences)
    else:
        y_BxGxTQxK = jax.lax.platform_dependent(sequences, cpu=one_by_one, default=all_at_once)
    return y_BxGxTQxK.reshape(B, G, T, Q, -1).swapaxes(1, 2).reshape(B, T, H, -1)


def blockwise_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, *, scale=None, sinks_H=None):
    """dot_product_attention of jax_transformer.py, for a piece of a long prompt; without dropout and gradients.

    256 queries at a time, and blocks of n = 256 keys with a running softmax (arXiv:2205.14135): scores take [B, G, TQ,
    n], not [B, G, TQ, S], and blocks of which the mask allows no key are skipped. In a cache of more than 2,048 slots n
    is 512: larger matmuls, 0.95 of the time for 4,096 tokens of SmolLM2."""
    B, T, H, K = q_BxTxHxK.shape
    S, G = k_BxSxGxK.shape[1:3]
    if T > 256 and T % 256 == 0:
        def attend(queries):
            q_Bx256xHxK, mask_Bx256xS = queries
            return blockwise_attention(q_Bx256xHxK, k_BxSxGxK, v_BxSxGxK, mask_Bx256xS, scale=scale, sinks_H=sinks_H)

        split = lambda x: x.reshape(B, T // 256, 256, *x.shape[2:]).swapaxes(0, 1)
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
        scores_BxGxTQxn = jnp.where(jnp.repeat(mask_BxTxn, Q, axis=1)[:, None], scores_BxGxTQxn * (scale or K**-0.5),
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


STORED_AS = {'bfloat16': 'uint16', 'float8_e4m3fn': 'uint8'}  # on CPUs, see init_cache in jax_generate.py


def held_dtype(cache):
    """cache.dtype; of an array that holds floats as their bits (STORED_AS), their dtype."""
    return jnp.dtype(next((held for held, stored in STORED_AS.items() if stored == cache.dtype), cache.dtype))


def scatter_to_slots(cache_BxGxS, x_BxTxG, slot_BxT):
    """cache.at[b, :, slot].set(x), cast to the dtype that the cache holds; out-of-range slots are ignored. Both arrays
    may have a last axis K in addition.

    Each head is indexed, too: otherwise XLA:TPU stores the cache with heads next to K, and copies all of it before and
    after a loop of decoding. XLA:CPU lowers a one-slot scatter to an update that is fused again into every reader and
    copies the cache each step (3.7 ms a step instead of 0.7 ms). Writing the vector twice, once out of range, keeps it
    a scatter."""
    x_BxTxG = jax.lax.bitcast_convert_type(x_BxTxG.astype(held_dtype(cache_BxGxS)), cache_BxGxS.dtype)
    if slot_BxT.size == 1:
        x_BxTxG = jnp.concatenate([x_BxTxG, x_BxTxG], axis=1)
        out_of_range = jnp.full_like(slot_BxT, cache_BxGxS.shape[2])
        slot_BxT = jnp.concatenate([slot_BxT, out_of_range], axis=1)
    slot_BxTxG = jnp.broadcast_to(slot_BxT[..., None], x_BxTxG.shape[:3])
    write = lambda cache_S, x_T, slot_T: cache_S.at[slot_T].set(x_T, mode='drop')
    return jax.vmap(jax.vmap(write, (0, 1, 1)))(cache_BxGxS, x_BxTxG, slot_BxTxG)


# -----------------------------------------------------------------------------
# layers in a loop, gradient checkpointing

def scan_blocks(gpt, x_BxTxD, position_BxT, seq_id_B):
    """for block in gpt.h: x = block(x, ...), compiled as one loop over parameters that are stacked in every call; the
    state and checkpoints keep h_0, h_1, ..."""
    cfg = gpt.config
    block = gpt.h[0].clone(parent=None)
    layers = [gpt.variables['params'][f'h_{i}'] for i in range(cfg.n_layer)]
    key = gpt.make_rng('dropout') if gpt.has_rng('dropout') else None

    def body(x, layer):
        params, i = layer
        rngs = None if key is None else {'dropout': jax.random.fold_in(key, i)}
        (x, _), sown = block.apply({'params': params}, x, position_BxT, None, seq_id_B, rngs=rngs, mutable=['losses'])
        return x, sum(jax.tree.leaves(sown), jnp.float32(0))

    if cfg.remat != 'none':
        body = jax.checkpoint(body, policy=remat_policy(cfg.remat), prevent_cse=False)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x_BxTxD, losses = jax.lax.scan(body, x_BxTxD, (stacked, jnp.arange(cfg.n_layer)))
    gpt.sow('losses', 'balance', losses.sum())
    return x_BxTxD


def remat_policy(remat):
    """Which activations are saved for the backward pass: 'dots' saves the outputs of linear(), 'full' nothing."""
    policies = jax.checkpoint_policies
    return {'dots': policies.save_only_these_names('dense'), 'full': policies.nothing_saveable}[remat]


# -----------------------------------------------------------------------------
# experts

def mix_experts(f, weights, x_PxD, expert_PxU, weight_PxU, *, scale_input=False):
    """sum over u of weight_PxU[p, u] * f(weights[expert_PxU[p, u]], x_PxD[p]) -> [P, D] in x's dtype: a mixture of
    experts.

    weights: tree of [E, ...]. scale_input: the weight scales f's input instead of its output. On a mesh (expert
    parallelism) a device has some experts: it all-gathers the tokens over the expert axis, computes its own experts,
    and reduce-scatters the sums back. With at least 4 U ranks it sends each token to the ranks of its experts only
    (exchange_tokens)."""
    def mix(weights, first_expert, x_PxD, expert_PxU, weight_PxU):
        x_PxUxD = jnp.broadcast_to(x_PxD[:, None], (*expert_PxU.shape, x_PxD.shape[1]))
        scale_PxUx1 = weight_PxU[..., None]
        if scale_input:
            x_PxUxD = (x_PxUxD * scale_PxUx1).astype(x_PxD.dtype)
            scale_PxUx1 = 1
        y_RxD = grouped_experts(f, weights, x_PxUxD.reshape(-1, x_PxD.shape[1]), expert_PxU.ravel() - first_expert)
        return (y_RxD.reshape(x_PxUxD.shape) * scale_PxUx1).sum(1).astype(x_PxD.dtype)  # before it is sent

    mesh = current_mesh()
    if mesh is None:
        return mix(weights, 0, x_PxD, expert_PxU, weight_PxU)
    E, n_ranks = len(jax.tree.leaves(weights)[0]), mesh.shape['expert']
    axes = EXPERTS if E % (n_ranks * mesh.shape['tensor']) == 0 else ('expert',)
    batch = batch_axes(len(x_PxD))

    def mix_own(weights, *tokens):
        """The part of this device's experts, summed over tensor; over expert, too, if tokens are replicated there."""
        first_expert = jax.lax.axis_index(axes) * len(jax.tree.leaves(weights)[0])
        y_PxD = mix(weights, first_expert, *tokens)
        with jax.named_scope('reduce_scatter'):
            return jax.lax.psum(y_PxD, [axis for axis in axes if axis != 'expert' or not batch])

    def mix_local(weights, *tokens):
        n_tokens, U = tokens[1].shape
        capacity = max(64, ceil_div(2 * n_tokens * U, n_ranks))  # twice those of balanced routing; few rows vary more
        if batch and 2 * capacity <= n_tokens:  # at most half of what the all-gather sends
            return exchange_tokens(mix_own, E // n_ranks, capacity, weights, *tokens)
        if batch:
            with jax.named_scope('all_gather'):
                tokens = [jax.lax.all_gather(x, 'expert', tiled=True) for x in tokens]
        y_PxD = mix_own(weights, *tokens)
        with jax.named_scope('reduce_scatter'):
            return jax.lax.psum_scatter(y_PxD, 'expert', tiled=True) if batch else y_PxD

    in_specs = (Spec(axes), Spec(batch), Spec(batch), Spec(batch))
    mix_sharded = jax.shard_map(mix_local, in_specs=in_specs, out_specs=Spec(batch), check_vma=False)
    return mix_sharded(weights, x_PxD, expert_PxU, weight_PxU)


def exchange_tokens(mix, experts_per_rank, capacity, weights, x_PxD, expert_PxU, weight_PxU):
    """reduce_scatter(mix(weights, *all_gather(tokens))) over the expert axis, inside shard_map, where mix computes the
    experts of its rank and ignores the others; each token is sent only to the ranks of its experts, once to each.

    A round is an all-to-all of `capacity` rows for each of M ranks, unused ones with expert -1, mix, and an all-to-all
    of the results. There are as many rounds as the largest number of rows from one rank to another needs, so no token
    is dropped; with balanced routing one is enough. (ragged_all_to_all needs no capacity; XLA:CPU cannot run it.)"""
    n_tokens, U = expert_PxU.shape
    M = jax.lax.axis_size('expert')
    rank_PxU = expert_PxU // experts_per_rank
    is_repeat_PxU = jnp.tril(rank_PxU[:, :, None] == rank_PxU[:, None], -1).any(2)  # an earlier expert has this rank
    rank_R = jnp.where(is_repeat_PxU, M, rank_PxU).ravel()
    is_sent_RxM = jax.nn.one_hot(rank_R, M, dtype=jnp.int32)
    slot_R = (jnp.cumsum(is_sent_RxM, 0) * is_sent_RxM).sum(1) - 1  # among the rows for this rank; -1 is not sent
    n_rounds = ceil_div(jax.lax.pmax(is_sent_RxM.sum(0).max(), 'expert'), capacity)

    def all_to_all(x_RxD):
        with jax.named_scope('all_to_all'):
            return jax.lax.all_to_all(x_RxD, 'expert', split_axis=0, concat_axis=0, tiled=True)

    def exchange(i, args, routing):
        weights, x_PxD, weight_PxU = args
        expert_PxU, rank_R, slot_R = routing
        out_of_range_R = M * capacity + jnp.arange(len(slot_R))
        row_R = jnp.where(slot_R // capacity == i, rank_R * capacity + slot_R % capacity, out_of_range_R)

        def send(x_PxW, unused):
            rows = jnp.full((M * capacity, x_PxW.shape[1]), unused, x_PxW.dtype)
            rows = rows.at[row_R].set(jnp.repeat(x_PxW, U, axis=0), mode='drop', unique_indices=True)
            return all_to_all(rows)

        y_RxD = all_to_all(mix(weights, send(x_PxD, 0), send(expert_PxU, -1), send(weight_PxU, 0)))
        y_RxD = y_RxD.at[row_R].get(mode='fill', fill_value=0, unique_indices=True)
        return y_RxD.reshape(n_tokens, U, -1).sum(1, dtype=jnp.float32)

    y_PxD = sum_rounds(exchange, n_rounds, (weights, x_PxD, weight_PxU), (expert_PxU, rank_R, slot_R))
    return y_PxD.astype(x_PxD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rounds(f, n, args, constants):
    """sum(f(i, args, constants) for i in range(n)), where n is traced, and 1 as a rule: only the first call saves what
    its backward pass needs, the others are recomputed."""
    return jax.lax.fori_loop(1, n, lambda i, y: y + f(i, args, constants), f(0, args, constants))


def sum_rounds_fwd(f, n, args, constants):
    y, vjp = jax.vjp(lambda args: f(0, args, constants), args)
    y = jax.lax.fori_loop(1, n, lambda i, y: y + f(i, args, constants), y)
    return y, (vjp, n, args, constants)


def sum_rounds_bwd(f, residuals, g):
    vjp, n, args, constants = residuals

    def add_round(i, grads):
        _, vjp = jax.vjp(lambda args: f(i, args, constants), args)
        return jax.tree.map(jnp.add, grads, vjp(g)[0])

    return None, jax.lax.fori_loop(1, n, add_round, vjp(g)[0]), None


sum_rounds.defvjp(sum_rounds_fwd, sum_rounds_bwd)


def grouped_experts(f, weights, x_RxD, expert_R):
    """[f(weights[expert_R[r]], x_RxD[r]) for every row r], zeros where expert_R[r] is not in 0 .. E-1; a grouped
    matmul.

    Rows are sorted by expert and padded to blocks of b rows of one expert each. Example with b = 2, experts of the rows
    [1, 0, 1, 1]: sorted rows 1 | 0 2 3, blocks [1, -] [0, 2] [3, -], experts of the blocks [0, 1, 1]. The
    arrays have n blocks, the most that R rows can need; only those in use are computed."""
    E = len(jax.tree.leaves(weights)[0])
    R, D = x_RxD.shape
    expert_R = jnp.where((expert_R >= 0) & (expert_R < E), expert_R, E)  # rows of no expert are sorted to the end
    b = max(1, min(ceil_div(R, E), 64))  # larger blocks pad more, smaller ones read weights more often
    n = R // b + min(E, R)
    rows_E = jnp.zeros(E, jnp.int32).at[expert_R].add(1, mode='drop')
    blocks_E = ceil_div(rows_E, b)
    block_end_E = jnp.cumsum(blocks_E)
    # row s of the sorted rows belongs in slot s + shift of its expert
    shift_E = (block_end_E - blocks_E) * b - (jnp.cumsum(rows_E) - rows_E)
    order_R = jnp.argsort(expert_R)
    sorted_expert_R = expert_R[order_R]
    shift_R = jnp.where(sorted_expert_R < E, shift_E[sorted_expert_R], n * b)  # n * b is out of range
    slot_R = jnp.zeros(R, jnp.int32).at[order_R].set(shift_R + jnp.arange(R))
    expert_n = jnp.searchsorted(block_end_E, jnp.arange(n), side='right').clip(0, E - 1)
    x_nxbxD = jnp.zeros((n * b, D), x_RxD.dtype).at[slot_R].set(x_RxD, mode='drop', unique_indices=True)
    y_nxbxD = grouped_apply(f, weights, x_nxbxD.reshape(n, b, D), expert_n, block_end_E[-1])
    return y_nxbxD.reshape(n * b, D).at[slot_R].get(mode='fill', fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_apply(f, weights, x_nxbxD, expert_n, n_used):
    """[f(weights[expert_n[i]], x[i]) for i in range(n_used)], zeros for the other blocks [b, D].

    The gradients of the weights are accumulated in place; JAX's own rule adds a zero gradient for all experts in every
    iteration of the loop."""
    def block(i, y):
        return y.at[i].set(f(take_expert(weights, expert_n[i]), x_nxbxD[i]))

    return jax.lax.fori_loop(0, n_used, block, jnp.zeros_like(x_nxbxD))


def take_expert(weights, e):
    """weights[e] of every leaf [E, ...]."""
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, e, keepdims=False), weights)


def grouped_apply_fwd(f, *args):
    return grouped_apply(f, *args), args


def grouped_apply_bwd(f, residuals, g_nxbxD):
    weights, x_nxbxD, expert_n, n_used = residuals

    def block(i, grads):
        dweights, dx_nxbxD = grads
        e = expert_n[i]
        dw, dx = jax.vjp(f, take_expert(weights, e), x_nxbxD[i])[1](g_nxbxD[i])
        return jax.tree.map(lambda total, d: total.at[e].add(d), dweights, dw), dx_nxbxD.at[i].set(dx)

    dweights, dx_nxbxD = jax.lax.fori_loop(0, n_used, block, jax.tree.map(jnp.zeros_like, (weights, x_nxbxD)))
    return dweights, dx_nxbxD, None, None


grouped_apply.defvjp(grouped_apply_fwd, grouped_apply_bwd)


# -----------------------------------------------------------------------------
# vocabulary, sharded over the tensor axis

INIT_STD = 0.02


def embed_tokens(table_VxD, idx_BxT, dtype=None):
    """table[idx] -> [B, T, D] in dtype (default: the table's); an id beyond the table gives its last row.

    On a mesh a device has some columns (fsdp) of the rows of one vocabulary range (tensor). It looks up these columns
    for all sequences of its fsdp group: zeros for ids of other ranges, an all-reduce over tensor, then an all-to-all
    over fsdp, columns for sequences. The table itself does not move, and its gradient is a sum in the table's dtype,
    float32: in bfloat16 a sum over the many tokens of one id stagnates."""
    if isinstance(table_VxD, Int8):
        x_BxTxD = as_int8(jnp.take(table_VxD.values, idx_BxT, axis=0, mode='clip')).astype(dtype)
        return x_BxTxD * jnp.take(table_VxD.scale, idx_BxT, mode='clip')[..., None].astype(dtype)
    dtype = dtype or table_VxD.dtype
    mesh = current_mesh()
    if mesh is None:
        if table_VxD.dtype == jnp.bfloat16:  # or XLA:CPU would make a float32 copy of the table ahead of a decode loop
            table_VxD, idx_BxT = jax.lax.optimization_barrier((table_VxD, idx_BxT))
        return jnp.take(table_VxD, idx_BxT, axis=0, mode='clip').astype(dtype)
    batch = batch_axes(len(idx_BxT))
    tokens = Spec(batch, position_axes(idx_BxT.shape[1], 'context'))

    def lookup(rows_VxD, idx_BxT):
        if batch:
            idx_BxT = jax.lax.all_gather(idx_BxT, 'fsdp', tiled=True)
        x_BxTxD = lookup_range(rows_VxD, idx_BxT, jax.lax.axis_index('tensor') * len(rows_VxD)).astype(dtype)
        with jax.named_scope('all_reduce'):
            x_BxTxD = jax.lax.psum(x_BxTxD, 'tensor')
        return jax.lax.all_to_all(x_BxTxD, 'fsdp', split_axis=0, concat_axis=2, tiled=True) if batch else x_BxTxD

    padded_VxD = pad_rows(table_VxD, mesh.shape['tensor'])
    idx_BxT = jnp.clip(idx_BxT, 0, len(table_VxD) - 1)
    table_spec = Spec('tensor', 'fsdp' if batch else None)  # a batch that is not sharded: with all columns
    return jax.shard_map(lookup, in_specs=(table_spec, tokens), out_specs=tokens)(padded_VxD, idx_BxT)


def pad_rows(table, n_ranges):
    """The table with rows of zeros appended until n_ranges divides their number."""
    return jnp.pad(table, ((0, -len(table) % n_ranges), *[(0, 0)] * (table.ndim - 1)))


def lookup_range(rows_VxD, idx, start):
    """table[idx] for the ids start .. start + V - 1, whose rows these are; zeros for all others."""
    row = idx - start
    in_range = (row >= 0) & (row < len(rows_VxD))
    return jnp.where(in_range[..., None], jnp.take(rows_VxD, row, axis=0, mode='clip'), 0)


def lm_logits(x_BxTxD, table_VxD, *, training=False):
    """x @ table.T -> float32 [B, T, V]. On a mesh each device keeps the logits of its vocabulary range.

    training: use matmul(), whose own gradients and transposed bfloat16 table pay for many tokens; without it the table
    is read in place, which suits decoding."""
    x_BxTxD = gather_positions(x_BxTxD)
    if isinstance(table_VxD, Int8):
        logits_BxTxV = matmul_int8(x_BxTxD, table_VxD.values, table_VxD.scale, COLUMN_PARALLEL)
    elif training:
        logits_BxTxV = matmul(x_BxTxD, table_VxD, transpose_rhs=True, dtype=jnp.float32)
    else:
        logits_BxTxV = matmul_nt(x_BxTxD, table_VxD)
    return shard(logits_BxTxV, BATCH, position_axes(logits_BxTxV.shape[1], 'context'), 'tensor')


def map_sequence_chunks(f, chunk, *xs_BxT):
    """f(*xs) -> [B, T], computed for `chunk` of the T positions at a time and recomputed in the backward pass, so that
    f's intermediate values exist for one chunk only. chunk divides T; 0 is all positions at once. On a mesh a chunk has
    as many positions of each context rank."""
    B, T = xs_BxT[0].shape[:2]
    if not chunk or chunk >= T:
        return f(*xs_BxT)
    mesh = current_mesh()
    n = mesh.shape['context'] if mesh and chunk % mesh.shape['context'] == 0 else 1

    def split(x):
        x = gather_positions(x).reshape(B, n, T // chunk, chunk // n, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0).reshape(T // chunk, B, chunk, *x.shape[4:])

    f_recomputed = jax.checkpoint(lambda xs: f(*xs), prevent_cse=False)
    y = jax.lax.map(f_recomputed, tuple(map(split, xs_BxT))).reshape(T // chunk, B, n, chunk // n)
    return jnp.moveaxis(y, 0, 2).reshape(B, T)


# -----------------------------------------------------------------------------
# stand-alone layers with a vocabulary-parallel table; GPT uses the functions above instead

class VocabParallel(nn.Module):
    """A table [num_embeddings, embedding_dim] whose rows are sharded over tp_size ranks: rank r has the n_rows ids from
    r * n_rows on, n_rows = ceil(num_embeddings / tp_size), padded with rows of zeros.

    Calling a layer computes the part of its tp_rank on any device: its parameter `weight` is that rank's
    [n_rows, embedding_dim], as load_weight_shard slices it. sharded_forward computes all parts on a mesh: its parameter
    `weight` is the full [num_embeddings, embedding_dim]."""
    num_embeddings: int
    embedding_dim: int
    tp_size: int = 1
    tp_rank: int = 0
    dtype: Any = 'float32'

    @property
    def n_rows(self):
        return ceil_div(self.num_embeddings, self.tp_size)

    def load_weight_shard(self, full):
        """This rank's rows of a table, or bias, of num_embeddings rows. Raises UserError for another number of rows."""
        if len(full) != self.num_embeddings:
            raise UserError(f'a table of {len(full)} rows is not one of {self.num_embeddings}')
        return pad_rows(jnp.asarray(full), self.tp_size)[self.tp_rank * self.n_rows:][:self.n_rows]

    def table(self, n_rows):
        return self.param('weight', nn.initializers.normal(INIT_STD), (n_rows, self.embedding_dim)).astype(self.dtype)


class VocabParallelEmbedding(VocabParallel):
    """Embedding of tokens [B, T] by a table sharded over ranks, see VocabParallel."""

    @nn.compact
    def __call__(self, tokens):
        """This rank's partial sum [B, T, D] of the embedding: zeros for ids of other ranks."""
        return lookup_range(self.table(self.n_rows), tokens, self.tp_rank * self.n_rows)

    @nn.compact
    def sharded_forward(self, tokens, mesh):
        """The embedding [B, T, D], looked up on the devices of a mesh (create_mesh) and all-reduced."""
        return run_on_mesh(embed_tokens, mesh)(self.table(self.num_embeddings), tokens)


class ParallelLMHead(VocabParallel):
    """Logits of x [B, T, D] by a table sharded over ranks, see VocabParallel. bias: adds a parameter `bias`, [n_rows]
    or, in sharded_forward, [num_embeddings]. last_B: logits of position last_B[b] of each sequence only, [B, 1, ...],
    which is all that a prefill needs."""
    bias: bool = False

    @nn.compact
    def __call__(self, x_BxTxD, last_B=None):
        """This rank's logits, float32 [B, T, n_rows]; those beyond the vocabulary are -inf."""
        logits = self.logits(x_BxTxD, last_B, self.n_rows)
        ids = self.tp_rank * self.n_rows + jnp.arange(self.n_rows)
        return jnp.where(ids < self.num_embeddings, logits, -jnp.inf)

    @nn.compact
    def sharded_forward(self, x_BxTxD, mesh, last_B=None, gathered=False):
        """All logits, float32 [B, T, num_embeddings]: each device of the mesh keeps its range, or all if `gathered`."""
        logits = self.logits(x_BxTxD, last_B, self.num_embeddings, mesh)
        return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, Spec())) if gathered else logits

    def logits(self, x_BxTxD, last_B, n_rows, mesh=None):
        if last_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, last_B[:, None, None], axis=1)
        multiply = lambda table, x: lm_logits(x, table, training=True)
        if mesh is not None:
            multiply = run_on_mesh(multiply, mesh)
        logits = multiply(self.table(n_rows), x_BxTxD.astype(self.dtype))
        return logits + self.param('bias', nn.initializers.zeros, (n_rows,)) if self.bias else logits


def run_on_mesh(function, mesh):
    """function(table, ...) with the rows of the table sharded over the mesh's tensor axis."""
    @jax.jit
    def run(table, *args):
        table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, Spec('tensor')))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(table, *args)
    return run
