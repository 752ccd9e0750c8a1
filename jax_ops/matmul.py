"""Matrix multiplication, and the kernels (flax's word for weight matrices) that linear()
accepts."""
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from jax_ops.cpu import (
    as_row_major, float_lane_terms, fusion_barrier, int16_lane_terms, int16_levels,
    multiply_integers, nt, nt_bfloat16_row, nt_chosen, nt_weights_left, on_tensor_ranks,
    transpose_materialized, two_rows)
from jax_ops.sharding import (
    COLUMN_PARALLEL, ROW_PARALLEL, current_mesh, gather_positions, shard, shard_positions)


def all_gather_param(param, dtype, tp=()):
    """All-gathers a parameter over fsdp. Without a mesh, or if the parameter is a Kernel, returns
    it unchanged. The gather moves the parameter in `dtype`, which reduces traffic. The result is
    cast back to the parameter's own dtype, with values that are rounded to `dtype`. The gradient is
    summed in the parameter's dtype.

    tp: a pair, the sharding of the parameter before the gather and its sharding after the gather.
    COLUMN_PARALLEL is such a pair. With the default (), for a parameter that is not sharded, there
    is no gather: the parameter is only rounded to `dtype`."""
    if not current_mesh() or is_kernel(param):
        return param

    def gather(param):
        with jax.named_scope('all_gather'):
            for spec in tp:
                param = shard(param, *spec)
        return param

    return computed_in(dtype, gather, param)


def matmul_f32_acc(x, y, dtype=None):
    """Returns x [..., M, K] @ y [..., K, N] as dtype (default: x's), with sums in float32."""
    dtype = dtype or x.dtype
    direct = functools.partial(jnp.matmul, preferred_element_type=dtype)

    def through_f32(x, y):
        multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        return two_rows(multiply, x, y).astype(dtype)

    if x.dtype != jnp.bfloat16:
        return direct(x, y)
    # GPUs and TPUs accumulate in float32 in either case; XLA:CPU does only where the result is
    # float32
    return jax.lax.platform_dependent(x, y, cpu=through_f32, default=direct)


def weight_grad(x, g, dtype):
    """Computes x.T @ g in dtype, for x [..., R, I] and g [..., R, O]. Returns [..., I, O]: the
    leading axes are batch axes, as in jnp.matmul.

    Usually transposes x, because transposing g, as JAX's rule does, is slower on CPUs
    (docs/lab_log.md#matmul). Only in bfloat16, where a transpose is a copy, the smaller copy
    decides: if g and the result together are smaller than x, computes (g.T @ x).T, which copies g
    and the result instead of x."""
    result_size = math.prod(x.shape[:-2]) * x.shape[-1] * g.shape[-1]
    if x.dtype == jnp.bfloat16 and x.size > g.size + result_size:
        transposed = matmul_f32_acc(transpose_materialized(g), x, dtype)
        return as_row_major(transposed).swapaxes(-1, -2)
    return matmul_f32_acc(transpose_materialized(x), g, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul(x, y, transpose_rhs=False, dtype=None, tp=()):
    """Computes x @ y (x @ y.T with transpose_rhs) in x's dtype, accumulated in float32. The result
    is in dtype (default: x's).

    Either y is a kernel of any dtype, [I, O] or with transpose_rhs [O, I], and x is [..., I]. Or x
    and y have the same leading axes. tp: COLUMN_PARALLEL or ROW_PARALLEL for a kernel on a mesh.
    The kernel is all-gathered over fsdp, and again in the backward pass, because keeping the
    gathered kernels would materialize the full model (ZeRO-3, arXiv:1910.02054)."""
    y = all_gather_param(y, x.dtype, tp).astype(x.dtype)
    if transpose_rhs:
        y = transpose_materialized(y)
    return matmul_f32_acc(x, y, dtype)


def matmul_fwd(x, y, transpose_rhs, dtype, tp):
    return matmul(x, y, transpose_rhs, dtype, tp), (x, y)


def matmul_bwd(transpose_rhs, dtype, tp, residuals, g):
    x, y_stored = residuals
    g = g.astype(x.dtype)
    mesh = current_mesh()
    if mesh and tp == ROW_PARALLEL:
        g = gather_positions(g)
    if mesh and tp:
        # The barrier prevents CSE with the forward all-gather, and keeps this all-gather inside a
        # loop of micro-steps. It ties the weights to x, not to g, so that XLA can prefetch them
        # before g is known (docs/parallelism.md#overlap).
        y_stored, x = jax.lax.optimization_barrier((y_stored, x))

    # the gradient of x
    y = all_gather_param(y_stored, x.dtype, tp).astype(x.dtype)
    if not transpose_rhs:
        y = transpose_materialized(y)
    dx = matmul_f32_acc(g, y)

    # the gradient of y; if y is a kernel, it is a sum over all rows
    if y.ndim == 2 and x.ndim == 3 and mesh and mesh.shape['context'] > 1:
        return dx, sharded_weight_grad(x, g, y_stored.dtype, transpose_rhs, tp)
    if y.ndim == 2:
        x = x.reshape(-1, x.shape[-1])
        g = g.reshape(-1, g.shape[-1])
    if transpose_rhs:  # (x.T g).T
        x, g = g, x
    dy = weight_grad(x, g, y_stored.dtype)
    if tp:
        dy = shard(dy, *tp[0])  # reduce-scattered to the stored shard
    return dx, dy


def sharded_weight_grad(x_BxTxI, g_BxTxO, dtype, transpose_rhs, tp):
    """Computes the gradient of matmul's kernel if T is sharded, as a sum over the two axes B and T.
    If B and T were merged to one axis, this axis would have no sharding (except for B = 1), and
    every device would all-gather x and g. g_BxTxO: the gradient of matmul's result. dtype: the
    kernel's dtype. transpose_rhs, tp: as in matmul."""
    left, right = (g_BxTxO, x_BxTxI) if transpose_rhs else (x_BxTxI, g_BxTxO)
    dy = jax.lax.dot_general(
        left, right, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
    dy = dy.astype(dtype)
    return shard(dy, *tp[0]) if tp else dy


matmul.defvjp(matmul_fwd, matmul_bwd)


def soft_cap(x, cap):
    """Computes cap * tanh(x / cap): scores or logits that stay within +-cap (Gemma 2,
    arXiv:2408.00118)."""
    return cap * jnp.tanh(x / cap)


def matmul_nt(x, w_OxI):
    """Computes x [..., I] @ w.T -> float32 [..., O], the matmul of decoding, in which weights [O,
    I] are read once per step.

    XLA:CPU repacks the right operand, so for up to 64 float32 rows the weights are the left operand
    (docs/lab_log.md#weights-on-the-left). A single row in bfloat16 has a loop of its own."""
    x_RxI = x.reshape(-1, x.shape[-1])
    w_OxI = w_OxI.astype(x.dtype)
    R, I = x_RxI.shape
    # on the left, 64 rows take 15% less time than on the right, and 256 rows the same time
    is_for_weights_left = R <= 64 and x.dtype == jnp.float32
    is_bfloat16_row = R == 1 and x.dtype == jnp.bfloat16 and float_lane_terms(I)
    on_cpu = functools.partial(two_rows, nt)
    if is_for_weights_left:
        on_cpu = nt_weights_left
    elif is_bfloat16_row and not current_mesh():  # it splits the rows of w, see on_tensor_ranks
        on_cpu = nt_bfloat16_row
    y_RxO = jax.lax.platform_dependent(x_RxI, w_OxI, cpu=on_cpu, default=nt)
    return y_RxO.reshape(*x.shape[:-1], -1)


# -----------------------------------------------------------------------------
# Kernels: the forms of a weight matrix. Each class implements its own multiplication. The forms for
# decoding (convert_params_for_decoding in decode_weights.py) hold one row per output.

class Kernel:
    """A matrix [I, O] in one of several forms, which linear() accepts in place of an array."""
    n_ranks = 1  # the outputs of a fused kernel are in the order of this many tensor ranks

    def multiply(self, x, tp):
        """Computes x [..., I] @ the matrix -> [..., O]; the result may have another dtype than x.
        tp: as in linear()."""
        raise NotImplementedError

    def linear(self, x, bias, tp):
        """Computes linear() for this kernel."""
        is_on_mesh = current_mesh() is not None
        if is_on_mesh and tp == COLUMN_PARALLEL:
            x = gather_positions(x)
        y = self.multiply(x, tp).astype(x.dtype)
        if is_on_mesh and tp == ROW_PARALLEL:  # each rank holds a partial sum
            with jax.named_scope('reduce_scatter'):
                y = shard_positions(y)
        if bias is not None:
            y = add_bias(y, bias)
        return checkpoint_name(y, 'dense')

    def in_rank_order(self, dtype, widths):
        """Returns the kernel with its columns grouped by the ranks of tensor parallelism, as
        order_by_rank groups them. By default, returns the kernel unchanged, because its columns
        have this order already; Plain overrides this method. widths: the number of columns of each
        projection, such as q, k and v. dtype: see Plain.in_rank_order."""
        return self

    def fused_linear(self, x, bias, widths):
        """Computes linear(x, self, bias), and splits the result on its last axis into parts of
        `widths` columns. Returns the list of the parts. This kernel, [I, sum(widths)], holds the
        kernels of several projections side by side, as c_attn does.

        With tensor parallelism the matmul needs the kernel's columns in the order of order_by_rank.
        Columns that are stored in another order are reordered first. The returned list is the same
        in both cases."""
        kernel = self.in_rank_order(x.dtype, widths)
        if bias is not None:
            bias = order_by_rank(bias, widths, kernel.n_ranks)
        y = kernel.linear(x, bias, COLUMN_PARALLEL)
        ends = np.cumsum(widths)[:-1] // kernel.n_ranks
        parts = jnp.split(y.reshape(*y.shape[:-1], kernel.n_ranks, -1), ends, axis=-1)
        return [part.reshape(*y.shape[:-1], width) for part, width in zip(parts, widths)]

    def stored(self):
        """Returns the object that as_kernel() was given: an array for a Plain, else the Kernel."""
        return self

    def can_be_chosen(self, n_rows):
        """Returns whether choose() supports this form of kernel with n_rows rows of x; False in the
        base class. The kernel must be a stack of matrices [E, I, O], for example of E experts.
        choose() returns a Chosen, which multiplies each row of x by its own matrix of the stack,
        for example the matrix of the row's expert."""
        return False


class Plain(Kernel, struct.PyTreeNode):
    """A kernel that is stored as an array [I, O], without quantization. as_kernel puts an array
    into a Plain, to give it the methods of Kernel."""
    values: jax.Array
    n_ranks: int = struct.field(pytree_node=False, default=1)

    def multiply(self, x, tp):
        return matmul(x, self.values, tp=tp)

    def in_rank_order(self, dtype, widths):
        """Returns the kernel with its columns in the order of tensor ranks (order_by_rank), sharded
        by columns over the tensor ranks. If there is only one tensor rank, returns the kernel
        unchanged. fused_linear calls this method each time that it uses the kernel.

        The stored kernel is sharded by rows. Each device can therefore order the columns of its own
        rows without communication. An all-to-all then moves each column to its tensor rank. The
        values are cast to `dtype` for this move. widths: the number of columns of each projection,
        such as q, k and v."""
        n_ranks = current_mesh().shape['tensor'] if current_mesh() else 1
        if n_ranks == 1:
            return self

        def order(kernel):
            return shard(order_by_rank(kernel, widths, n_ranks), *COLUMN_PARALLEL[0])

        return Plain(computed_in(dtype, order, self.values), n_ranks)

    def stored(self):
        return self.values

    def choose(self, matrix_R):
        return self.values[matrix_R]

    def quantize(self, is_table, stored_as):
        return quantize_matrix(self.values, transpose=not is_table, stored_as=stored_as)

    def cast(self, dtype):
        return self.values if self.values.ndim < 2 else self.values.astype(dtype)

    def transpose(self):
        return Transposed(self.values.swapaxes(-1, -2))

    def order_columns(self, widths, n_ranks):
        return Transposed(shard(order_by_rank(self.values, widths, n_ranks).T, 'tensor', None),
                          n_ranks)

    def to_float32(self, is_table):
        return np.asarray(self.values, np.float32)


class Int8(Kernel, struct.PyTreeNode):
    """A matrix [I, O], or a stack of such matrices, quantized to int8 with one scale per output.

    values: the matrix transposed, [O, I], or a stack [..., O, I]. For CPUs, values may be stored as
    uint8, see as_uint8. scale: float32 [O] or [..., O]. An embedding table [V, D] is not
    transposed: values [V, D], with one scale per token, [V]."""
    values: jax.Array
    scale: jax.Array
    n_ranks: int = struct.field(pytree_node=False, default=1)

    def multiply(self, x, tp):
        return matmul_int8(x, self.values, self.scale, tp)

    def embed(self, idx_BxT, dtype):
        """Returns the rows idx_BxT of the table, [B, T, D], in dtype; see embed_tokens."""
        x_BxTxD = as_int8(jnp.take(self.values, idx_BxT, axis=0, mode='clip')).astype(dtype)
        scale_BxT = jnp.take(self.scale, idx_BxT, mode='clip')
        return x_BxTxD * scale_BxT[..., None].astype(dtype)

    def can_be_chosen(self, n_rows):
        E, _, I = self.values.shape
        return n_rows <= min(E, MOST_CHOSEN) and int16_lane_terms(I) is not None

    def choose(self, matrix_R):
        return Chosen(self, matrix_R)

    def multiply_chosen(self, x_RxI, matrix_R):
        y_RxO = multiply_quantized(x_RxI, self.values, matrix_R)
        return y_RxO * self.scale[matrix_R]

    def quantize(self, is_table, stored_as):
        return self

    def cast(self, dtype):
        return self

    def transpose(self):
        return self

    def order_columns(self, widths, n_ranks):
        values = order_by_rank(self.values.T, widths, n_ranks).T
        scale = order_by_rank(self.scale, widths, n_ranks)
        return Int8(shard(values, 'tensor', None), shard(scale, 'tensor'), n_ranks)

    def to_float32(self, is_table):
        values = np.asarray(self.values, np.float32) * np.asarray(self.scale)[..., None]
        return values if is_table else values.swapaxes(-1, -2)


class Transposed(Kernel, struct.PyTreeNode):
    """A matrix [I, O] stored as [O, I]. This order is read faster when a single row x [1, I] is
    multiplied by the matrix (docs/lab_log.md#weights-on-the-left)."""
    values: jax.Array
    n_ranks: int = struct.field(pytree_node=False, default=1)

    def multiply(self, x, tp):
        return matmul_nt(x, self.values)

    def can_be_chosen(self, n_rows):
        E, _, I = self.values.shape
        rows_per_expert = 8 if self.values.dtype == jnp.bfloat16 else 2
        is_in_lanes = float_lane_terms(I) is not None
        return n_rows <= min(rows_per_expert * E, MOST_CHOSEN) and is_in_lanes

    def choose(self, matrix_R):
        return Chosen(self, matrix_R)

    def multiply_chosen(self, x_RxI, matrix_R):
        return nt_chosen(x_RxI.astype(self.values.dtype), self.values, matrix_R)

    def quantize(self, is_table, stored_as):
        return quantize_matrix(self.values, transpose=False, stored_as=stored_as)

    def cast(self, dtype):
        return self.replace(values=self.values.astype(dtype))

    def transpose(self):
        return self


# The most rows of Chosen: the sums of more rows take too much memory. With many rows per expert,
# blocks are faster; docs/lab_log.md#experts-in-decoding has the numbers.
MOST_CHOSEN = 128


class Chosen(Kernel, struct.PyTreeNode):
    """A kernel that multiplies row r of x by the matrix stack[matrix_R[r]]. The loop over the
    products reads the weights directly from the stack, so the chosen matrices are not copied first.
    For CPUs only."""
    stack: Any  # an Int8 or Transposed of values [E, O, I]
    matrix_R: jax.Array

    def multiply(self, x, tp):
        return self.stack.multiply_chosen(x, self.matrix_R)


class LowRank(Kernel, struct.PyTreeNode):
    """A frozen matrix with a trained update: base + scale * a @ b (LoRA, arXiv:2106.09685)."""
    base: Any  # [I, O], an array or Int8
    a: jax.Array  # [I, r]
    b: jax.Array  # [r, O]
    scale: jax.Array  # a scalar

    def update(self, x):
        """Computes scale * x @ a @ b, in x's dtype."""
        return matmul(matmul(x, self.a), self.b) * self.scale.astype(x.dtype)

    def linear(self, x, bias, tp):
        return as_kernel(self.base).linear(x, bias, tp) + self.update(x)

    def fused_linear(self, x, bias, widths):
        updates = jnp.split(self.update(x), np.cumsum(widths)[:-1], axis=-1)
        ys = as_kernel(self.base).fused_linear(x, bias, widths)
        return [y + update for y, update in zip(ys, updates)]


def is_kernel(x):
    """Returns whether x is a Kernel. An array is no Kernel; as_kernel makes one of it."""
    return isinstance(x, Kernel)


def as_kernel(x):
    """Returns a Plain of x if x is an array. Returns x unchanged if x is a Kernel."""
    return x if is_kernel(x) else Plain(x)


def map_nodes(kind, f, tree):
    """Returns the tree with each node x of type `kind` replaced by f(x)."""
    def is_node(x):
        return isinstance(x, kind)

    return jax.tree.map(lambda x: f(x) if is_node(x) else x, tree, is_leaf=is_node)


def without_scales(params):
    """Returns the tree of parameters with each Int8 replaced by its array of int8 values. The
    scales are dropped, because they are not counted as parameters."""
    return map_nodes(Int8, lambda matrix: matrix.values, params)


def as_uint8(x):
    """Returns int8 x as uint8 x + 128, the form that the CPU's nt_uint8 takes. To add 128, inverts
    the highest bit of x."""
    return jax.lax.bitcast_convert_type(x ^ -128, jnp.uint8)


def as_int8(values):
    """Returns the values of an Int8 in int8, also if as_uint8 has stored them as uint8."""
    if values.dtype != jnp.uint8:
        return values
    return jax.lax.bitcast_convert_type(values ^ 128, jnp.int8)


def linear(x, kernel, bias=None, *, tp=()):
    """Computes x [..., I] @ kernel [I, O] + bias [O], in x's dtype. kernel: an array or a Kernel.
    tp: COLUMN_PARALLEL or ROW_PARALLEL, if the kernel is sharded over tensor ranks."""
    return as_kernel(kernel).linear(x, bias, tp)


def order_by_rank(x, widths, n_ranks):
    """Reorders the columns of x [..., sum(widths)] from q | k | v to q0 k0 v0 | q1 k1 v1 | ... and
    returns the result. q0, q1, ... are the n_ranks equal parts of q's columns, each of whole heads.
    So the columns of each tensor rank are side by side. widths: the numbers of columns of q, k and
    v."""
    parts = jnp.split(x, np.cumsum(widths)[:-1], axis=-1)
    parts = [part.reshape(*x.shape[:-1], n_ranks, -1) for part in parts]
    return jnp.concatenate(parts, axis=-1).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def computed_in(dtype, f, x):
    """Computes f(x) with x cast to `dtype`, and casts the result back to x's dtype. f: a linear
    function that only moves elements, such as an all-gather. In a smaller dtype, f moves fewer
    bytes between devices. The gradient is computed in x's dtype, without this cast."""
    return f(x.astype(dtype)).astype(x.dtype)


def computed_in_fwd(dtype, f, x):
    return computed_in(dtype, f, x), x


def computed_in_bwd(dtype, f, x, g):
    return jax.vjp(f, x)[1](g)


computed_in.defvjp(computed_in_fwd, computed_in_bwd)


@jax.custom_vjp
def add_bias(x, bias):
    """Computes x [..., O] + bias [O], in x's dtype. The gradient of the bias is accumulated in
    float32."""
    return x + bias.astype(x.dtype)


def add_bias_fwd(x, bias):
    return add_bias(x, bias), bias.dtype.type(0)  # the residual is a scalar with the bias's dtype


def add_bias_bwd(zero, g):
    def as_it_is(g):
        return g

    # without the barrier XLA:GPU stores g also in float32: GPT-2's step moves 56.0 GB, not 51.7
    g = jax.lax.platform_dependent(g, cuda=jax.lax.optimization_barrier, default=as_it_is)
    return g, g.sum(range(g.ndim - 1), dtype=jnp.float32).astype(zero.dtype)


add_bias.defvjp(add_bias_fwd, add_bias_bwd)


def quantize(x, dtype, largest=None):
    """Quantizes x [..., n] -> (values [..., n] in dtype, scale [...] in float32); x is about values
    * scale.

    dtype: an integer type or a float8.
    largest: the value that represents the largest magnitude of the last axis; by default 127 or the
    largest float8."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if not largest:
        largest = 127 if is_integer else float(jnp.finfo(dtype).max)
    magnitude = jnp.maximum(x.max(-1), -x.min(-1))  # for abs(x).max(-1) XLA:CPU stores abs(x)
    scale = jnp.maximum(magnitude.astype(jnp.float32), 1e-30) / largest
    x = x.astype(jnp.float32) / scale[..., None]
    if is_integer:
        # XLA:CPU may leave out a rounding to bfloat16 for x here, but not for the magnitude above:
        # then the largest x is up to 0.2% larger, and would wrap around
        x = jnp.clip(jnp.round(x), -largest, largest)
    return x.astype(dtype), scale


@functools.partial(jax.jit, static_argnames=('transpose', 'stored_as'))
def quantize_matrix(p, *, transpose, stored_as):
    """Returns a matrix p [..., O, I] as Int8. With `transpose`, p is [..., I, O]. The function is
    compiled, so that there are no temporaries as large as p. stored_as: int8 or uint8."""
    if transpose:
        p = p.swapaxes(-1, -2)
    values, scale = quantize(p, jnp.int8)
    if stored_as != jnp.int8:
        values = as_uint8(values)
    return Int8(values, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def matmul_int8(x, w_OxI, scale_O, tp=()):
    """Computes x [..., I] @ (w * scale).T -> float32 [..., O].

    w_OxI, scale_O: the values and scales of an Int8. In training the values are always int8. For
    decoding on a CPU that multiplies uint8 (cpu_multiplies_uint8), they are the int8 values plus
    128, stored as uint8 (see as_uint8). tp: as in linear().

    On GPUs and TPUs the weights are converted to x's dtype. On a CPU there are three cases:
    - x has few rows (up to 64 for uint8 weights, up to 32 for int8 weights), as in decoding.
      Decoding is limited by reading the weights. x is quantized, each row with one scale, and the
      matmul is in integers, which XLA:CPU computes fast. The rows become int16, because int8 costs
      precision (docs/lab_log.md#int8-matmuls).
    - x has more rows, as in the prefill of a prompt, and the weights are uint8. Weights and x are
      converted to bfloat16. bfloat16 represents all values of the weights exactly. On a CPU with
      bfloat16 instructions, a matmul in bfloat16 takes half the time of one in float32
      (docs/lab_log.md#int8-prompts).
    - x has more rows, and the weights are int8. The weights are converted to x's dtype."""
    def converted(x_RxI, w_OxI):
        return nt(x_RxI, as_int8(w_OxI).astype(x_RxI.dtype))

    def in_integers(x_RxI, w_OxI):
        R, I = x_RxI.shape
        most_rows = 64 if w_OxI.dtype == jnp.uint8 else 32
        if R <= most_rows:
            return multiply_quantized(x_RxI, w_OxI)
        if w_OxI.dtype == jnp.uint8:
            x_RxI = x_RxI.astype(jnp.bfloat16)
        return fusion_barrier(converted, x_RxI, w_OxI, asked=w_OxI)

    x_RxI = x.reshape(-1, x.shape[-1])
    on_cpu = functools.partial(on_tensor_ranks, in_integers, tp=tp)
    y_RxO = jax.lax.platform_dependent(x_RxI, w_OxI, cpu=on_cpu, default=converted)
    return (y_RxO * scale_O).reshape(*x.shape[:-1], -1)


def multiply_quantized(x_RxI, *weights):
    """Quantizes x to int16, each row with one scale. Returns multiply_integers(x, *weights) times
    the scales of the rows, float32 [R, O]. weights: the other arguments of multiply_integers, that
    is (w_OxI,) or (w_ExOxI, matrix_R)."""
    x_RxI, scale_R = quantize(x_RxI, jnp.int16, int16_levels(x_RxI.shape[1]))
    y_RxO = fusion_barrier(multiply_integers, x_RxI, *weights, asked=x_RxI)
    return y_RxO * scale_R[:, None]


def matmul_int8_fwd(x, w_OxI, scale_O, tp):
    return matmul_int8(x, w_OxI, scale_O, tp), (x.dtype.type(0), w_OxI, scale_O)


def matmul_int8_bwd(tp, residuals, g):
    """Returns the gradient of x; the weights are frozen."""
    zero, w_OxI, scale_O = residuals
    scaled_g = (g * scale_O).astype(zero.dtype)
    dx = matmul_f32_acc(scaled_g, as_int8(w_OxI).astype(zero.dtype))
    return dx, None, None


matmul_int8.defvjp(matmul_int8_fwd, matmul_int8_bwd)
