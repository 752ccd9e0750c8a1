"""Loops shaped for XLA:CPU, some of which use private names of JAX.

No other platform runs these loops, because every caller chooses by jax.lax.platform_dependent
between a loop and the plain form. Without this file CPUs would compute the same results, but
slower; docs/lab_log.md has what the loops gain."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as Spec

from jax_flags import ceil_div
from jax_ops.sharding import COLUMN_PARALLEL, ROW_PARALLEL, current_mesh

# The number of sums that are computed side by side for a row of weights, in float and in int8.
FLOAT_LANES = 16
INT_LANES = 32


def as_row_major(x):
    """Returns x. On a CPU without a mesh, asks XLA to store x row-major at this point. On a mesh,
    does not ask, because XLA could not partition such a layout constraint."""
    try:
        from jax.experimental.layout import Layout, with_layout_constraint
    except ImportError:  # without it, this is only slower
        return x
    if current_mesh():
        return x

    def row_major(x):
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def as_it_is(x):
        return x

    return jax.lax.platform_dependent(x, cpu=row_major, default=as_it_is)


def transpose_materialized(x):
    """Computes x.swapaxes(-1, -2). A bfloat16 result is stored row-major on a CPU without a mesh
    (see as_row_major), because XLA:CPU's fast bfloat16 matmul takes only operands [M, K] and [K, N]
    that are stored row-major. XLA:CPU converts an operand in another memory order to float32, which
    makes the matmul 2.3 times slower (docs/lab_log.md#matmul)."""
    x = x.swapaxes(-1, -2)
    if x.dtype == jnp.bfloat16:
        x = as_row_major(x)
    return x


def two_rows(multiply, x, y):
    """Computes multiply(x, y). If x [..., 1, K] has one row, duplicates this row, calls multiply
    with the two rows, and returns the first row of the result.

    The duplicate is for XLA:CPU. If a matmul has one row, XLA:CPU converts a bfloat16 y to float32,
    and keeps these float32 copies of all weights during the decode loop."""
    has_several_rows = x.size > x.shape[-1]
    if has_several_rows:
        return multiply(x, y)
    return multiply(jnp.concatenate([x, x], axis=-2), y)[..., :1, :]


def nt(x_RxI, w_OxI, dtype=jnp.float32):
    """Computes x @ w.T, accumulated in dtype, by XLA's matmul. The functions below compute the same
    product in ways that are faster on CPUs."""
    last_axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x_RxI, w_OxI, last_axes, preferred_element_type=dtype)


def nt_weights_left(x_RxI, w_OxI, dtype=jnp.float32):
    """Computes x @ w.T as (w @ x.T).T. XLA:CPU repacks the right operand of a matmul. In this form
    the right operand is x.T, which is small (docs/lab_log.md#weights-on-the-left)."""
    # five rows take longer than eight
    R = len(x_RxI)
    n_padding = -R % 4 if R > 1 else 0
    x_RxI = jnp.pad(x_RxI, ((0, n_padding), (0, 0)))
    if w_OxI.dtype == jnp.uint8:
        y_OxR = nt_uint8().bind(w_OxI, x_RxI)
    else:
        y_OxR = nt(w_OxI, x_RxI, dtype)
    # the barrier keeps XLA from swapping the operands back, and from fusing the next operations
    return jax.lax.optimization_barrier(y_OxR).T[:R]


def fusion_barrier(f, *args, asked):
    """Computes f(*args) inside a jax.lax.cond, because XLA:CPU moves nothing into or out of a cond.
    Where f multiplies x by weights, XLA:CPU would otherwise compute x again for each row of the
    weights, or convert the weights to another dtype before the decode loop.

    asked: one of args. The condition of the cond is that the first element of `asked` is greater
    than the smallest value of the dtype (-infinity for floats). Positions, int16 activations and
    finite weights always meet this condition. XLA cannot prove that, so it does not remove the
    cond. If the condition is not met, f is not computed. The result is then all NaN if `asked` is a
    float array, and all 0 if it is an integer array."""
    y = jax.eval_shape(f, *args)
    is_float = jnp.issubdtype(asked.dtype, jnp.floating)
    smallest = -jnp.inf if is_float else jnp.iinfo(asked.dtype).min

    def constant(*args):
        return jnp.full(y.shape, jnp.nan if is_float else 0, y.dtype)

    return jax.lax.cond(asked[(0,) * asked.ndim] > smallest, f, constant, *args)


def computed_once(f, position_BxT):
    """Computes f(position_BxT), an array, such as RoPE's cosines.

    On a CPU without a mesh, f runs in a fusion_barrier if T > 1. Without the barrier, XLA:CPU would
    fuse f into each operation that reads the result, and compute each cosine again for every head.
    A prompt of 512 tokens of SmolLM2 in int8 would take 480 ms, not 455."""
    is_decoding = position_BxT.shape[-1] == 1  # a step computes too few elements
    if is_decoding or current_mesh():
        return f(position_BxT)

    def on_cpu(position_BxT):
        return fusion_barrier(f, position_BxT, asked=position_BxT)

    return jax.lax.platform_dependent(position_BxT, cpu=on_cpu, default=f)


def lane_terms(n, lanes, least, most):
    """Returns the largest t from `least` to `most` such that lanes * t divides n; None if there is
    no such t. A row of n elements can then be split into blocks of lanes * t elements. The sum of a
    block is computed as `lanes` partial sums, each of t elements."""
    for terms in range(most, least - 1, -1):
        if n % (lanes * terms) == 0:
            return terms
    return None


def float_lane_terms(n):
    """Returns the number of terms of each partial sum in nt_bfloat16_row and nt_chosen, from 4 to
    20; None if these functions cannot take rows of n elements. See lane_terms."""
    return lane_terms(n, FLOAT_LANES, least=4, most=20)


def int16_lane_terms(n):
    """Returns the number of terms of each partial sum in int16_sums, from 3 to 6; None if
    int16_sums cannot take rows of n elements. See lane_terms."""
    return lane_terms(n, INT_LANES, least=3, most=6)


def nt_bfloat16_row(x_1xI, w_OxI):
    """Computes x @ w.T -> float32 [1, O] for one row x [1, I] and w [O, I], both bfloat16. This
    takes half the time of XLA:CPU's matmul (docs/lab_log.md#bfloat16-rows). float_lane_terms(I)
    must not be None.

    Each row of w is multiplied by x, element by element. The I products of a row are then summed in
    two steps:
    1. The products are split into blocks of t * FLOAT_LANES, where t is float_lane_terms(I). Each
       block is reshaped to [t, FLOAT_LANES] and summed over its first axis. This gives FLOAT_LANES
       partial sums of t products each.
    2. A matmul with ones adds up the partial sums of all blocks of the row.

    The steps have this form for XLA:CPU:
    - FLOAT_LANES is 16 because of nt_chosen, which computes the same sums with float32 weights.
      There, 16 weights are one cache line. LLVM's vectors hold 8 values. So a loop over the t rows
      of a block sums 8 of the FLOAT_LANES columns, and the next loop sums the next 8 columns. With
      16 columns, each loop reads every cache line, in order. With 32 columns, each loop would read
      only every second cache line, which is slower. With the bfloat16 weights of this function, 32
      columns are a little slower, too (docs/lab_log.md#sixteen-lanes).
    - t is at most 20, because LLVM does not unroll a longer sum.
    - Step 1 sums two rows of w in one reduction with two operands: row i of the first half of w,
      and row i of the second half. XLA would compile a reduction with one operand to a slower
      library call. A core also reads two streams of weights faster than one."""
    O, I = w_OxI.shape
    n_pairs, terms = O // 2, float_lane_terms(I)
    n_blocks = I // (FLOAT_LANES * terms)

    def multiply(x_I, w_OxI):
        # both halves of the rows
        w_2xPxNxtxL = w_OxI[:2 * n_pairs].astype(jnp.float32).reshape(
            2, n_pairs, n_blocks, terms, FLOAT_LANES)
        x_NxtxL = x_I.reshape(n_blocks, terms, FLOAT_LANES)
        halves = add_up([half * x_NxtxL for half in w_2xPxNxtxL])
        # the last row, if their number is odd
        odd_row = nt(x_I[None], w_OxI[2 * n_pairs:].astype(jnp.float32))
        return jnp.concatenate([*halves, odd_row], axis=1)

    x_I = x_1xI[0].astype(jnp.float32)
    return fusion_barrier(multiply, x_I, w_OxI, asked=w_OxI)


def add_pairs(a, b):
    """Returns [a[0] + b[0], a[1] + b[1]]. With this function, lax.reduce sums two operands at
    once."""
    return [a[0] + b[0], a[1] + b[1]]


def add_up(products):
    """Sums each of two arrays [rows, blocks, terms, lanes], float32, over its last three axes.
    Returns a list of two sums, float32 [1, rows] each.

    products: the two arrays. The callers nt_bfloat16_row and nt_chosen multiply x by the rows of w,
    element by element. The first array has the products of x and the first half of the rows of w,
    the second array those of x and the second half.

    The sum has two steps, for the reasons in nt_bfloat16_row. First, one reduction sums both arrays
    over `terms`. Second, for each array, a matmul with ones sums over `blocks` and `lanes`."""
    # the terms of each sum, then the sums of all lanes and blocks
    sums = jax.lax.reduce(products, [np.float32(0)] * 2, add_pairs, (2,))
    n_rows, n_blocks, n_lanes = sums[0].shape
    sums = [half.reshape(n_rows, n_blocks * n_lanes) for half in jax.lax.optimization_barrier(sums)]
    return [nt_weights_left(jnp.ones((1, half.shape[1])), half) for half in sums]


# -----------------------------------------------------------------------------
# A matrix of a stack for each row of x: in decoding, the experts that tokens chose.

def chosen_rows(w_ExOxI, matrix_R, shape):
    """Returns w_ExOxI[matrix_R], with the last axis reshaped to `shape`: [R, O, *shape].

    w_ExOxI[matrix_R] is R matrices of O rows each. This function gathers them as R * O single rows,
    because XLA:CPU fuses such a gather into the loop that reads the result, without a copy. The
    loop loads an index once for each row.

    Slices w[e] of whole matrices would be slower (docs/lab_log.md#experts-in-decoding). In some
    places XLA:CPU would copy each slice. In others it would fuse the slice into the loop, but LLVM
    would load e again for each element, and would not vectorize the loop."""
    E, O, _ = w_ExOxI.shape
    row_RxO = matrix_R[:, None] * O + jnp.arange(O)
    return w_ExOxI.reshape(E * O, *shape).at[row_RxO].get(mode='promise_in_bounds')


def halves_of_outputs(w):
    """Splits w [..., O, N, t, lanes] into two halves along the axis O, the outputs of a matmul. One
    reduction with add_pairs then computes the sums of two outputs side by side, one of each half
    (see nt_bfloat16_row). N, t, lanes: each row of weights is N blocks of t * lanes elements (see
    lane_terms).

    Returns a list of two arrays: the first and the last ceil(O / 2) outputs. The reduction needs
    arrays of equal shape. So if O is odd, both arrays have the middle output, and join_halves drops
    one of its two results."""
    O = w.shape[-4]
    n = ceil_div(O, 2)
    return [w[..., :n, :, :, :], w[..., O - n:, :, :, :]]


def join_halves(halves, O):
    """Joins the results of a matmul with each of the two arrays of halves_of_outputs. halves: two
    arrays [..., ceil(O / 2)]. Returns [..., O]. If O is odd, both halves contain the middle output,
    and the result has it once."""
    first, second = halves
    return jnp.concatenate([first, second[..., O % 2:]], axis=-1)


def nt_chosen(x_RxI, w_ExOxI, matrix_R):
    """Computes [x[r] @ w[matrix_R[r]].T for r in range(R)], float32 [R, O]. x and w are bfloat16 or
    float32. Each row is computed in the same way as in nt_bfloat16_row. float_lane_terms(I) must
    not be None."""
    R, I = x_RxI.shape
    O = w_ExOxI.shape[1]
    terms = float_lane_terms(I)

    def multiply(x_RxI, w_ExOxI, matrix_R):
        w_RxOxNxtxL = chosen_rows(w_ExOxI, matrix_R, (-1, terms, FLOAT_LANES))
        x_Rx1xNxtxL = x_RxI.reshape(R, 1, -1, terms, FLOAT_LANES)
        products = []
        for half in halves_of_outputs(w_RxOxNxtxL):
            product = half.astype(jnp.float32) * x_Rx1xNxtxL
            products.append(product.reshape(-1, *product.shape[2:]))
        return join_halves([half.reshape(R, -1) for half in add_up(products)], O)

    x_RxI = x_RxI.astype(jnp.float32)
    return fusion_barrier(multiply, x_RxI, w_ExOxI, matrix_R, asked=w_ExOxI)


# -----------------------------------------------------------------------------
# int8 weights in a decode step: linear (matmul.py) calls matmul_int8 for an Int8. matmul_int8
# quantizes x to int16 and calls multiply_integers.
# - One row, of a multiple of 96, 128, 160 or 192 features: x and weights are widened to int32
#   (nt_int16_row).
# - Other rows: x is split into two halves in int8, x = 256 high + low (nt_int16). nt_weights_left
#   multiplies them by int8 weights as int8 x int8 -> int32, by uint8 weights with nt_uint8 (VNNI).
# - Many rows (the number is in matmul_int8): the weights are converted to x's dtype instead.
# convert_params_for_decoding (decode_weights.py) makes Int8 of the weights. It stores them as uint8
# (as_uint8) if cpu_multiplies_uint8.

def on_tensor_ranks(multiply, x_RxI, w_OxI, tp):
    """Computes multiply(x, w) -> [R, O]. If w is sharded over tensor ranks, each rank multiplies by
    its own shard of w.

    tp: how w is sharded, as in linear(). COLUMN_PARALLEL: each rank has some outputs. ROW_PARALLEL:
    each rank has some inputs, and the partial sums are all-reduced.

    Without this function, XLA's partitioner would all-gather w on every rank. The reason is that
    nt_int16_row splits w into the first and the second half of its rows, which are not shards of
    w."""
    mesh = current_mesh()
    n_ranks = mesh.shape['tensor'] if mesh else 1
    by_outputs = n_ranks > 1 and tp == COLUMN_PARALLEL and len(w_OxI) % n_ranks == 0
    by_inputs = n_ranks > 1 and tp == ROW_PARALLEL and x_RxI.shape[1] % n_ranks == 0

    def sum_over_ranks(x_RxI, w_OxI):
        return jax.lax.psum(multiply(x_RxI, w_OxI), 'tensor')

    if by_outputs:  # each rank has some outputs
        f, in_specs, out_specs = multiply, (Spec(), Spec('tensor')), Spec(None, 'tensor')
    elif by_inputs:  # each rank has some inputs, and a part of every sum
        f, in_specs, out_specs = sum_over_ranks, Spec(None, 'tensor'), Spec()
    else:
        return multiply(x_RxI, w_OxI)
    multiply_shards = jax.shard_map(
        f, in_specs=in_specs, out_specs=out_specs, axis_names={'tensor'}, check_vma=False)
    return multiply_shards(x_RxI, w_OxI)


def int16_levels(n):
    """Returns the largest magnitude of activations that are quantized to int16, for matmuls that
    sum n terms. The sum must fit into int32, and each activation must equal 256 a + b with a and b
    in int8. For n = 768 the result is 22,017."""
    most_in_two_halves = 127 * 256 + 127
    most_in_a_sum = (2**31 - 1) // (127 * n)
    return min(most_in_two_halves, most_in_a_sum)


def multiply_integers(x_RxI, w_OxI, matrix_R=None):
    """Computes x @ w.T in int32, and returns it as float32 [R, O].

    x_RxI: int16, at most int16_levels(I) in magnitude, so that the result fits into int32. w_OxI:
    the values of an Int8, stored as int8, or as uint8 (value + 128), with the same result.
    matrix_R: if w is a stack [E, O, I], the index of each row's matrix. Called by
    multiply_quantized (matmul.py)."""
    R, I = x_RxI.shape
    if matrix_R is not None:
        w_RxOxI = chosen_rows(w_OxI, matrix_R, (I,))
        y_RxO = int16_sums(x_RxI[:, None], w_RxOxI)
    elif R == 1 and int16_lane_terms(I):
        y_RxO = nt_int16_row(x_RxI, w_OxI)
    else:
        y_RxO = nt_int16(x_RxI, w_OxI)
    # uint8 weights are values + 128; int32 may wrap around, but the difference is exact
    if w_OxI.dtype == jnp.uint8:
        y_RxO -= 128 * x_RxI.sum(1, keepdims=True, dtype=jnp.int32)
    return y_RxO.astype(jnp.float32)


def nt_int16_row(x_1xI, w_OxI):
    """Computes x @ w.T -> int32 [1, O] for one row of int16 x."""
    return int16_sums(x_1xI, w_OxI)[None]


def int16_sums(x, w):
    """Computes (x * w).sum(-1) -> int32 [..., O], for int16 x [..., 1, I] and int8 or uint8 w [...,
    O, I]. int16_lane_terms(I) must not be None.

    Each dot product of x with a row of w has I terms, summed in two stages. First, the terms are
    split into blocks of t * INT_LANES, where t is int16_lane_terms(I). A Python loop of t
    iterations turns each block into INT_LANES partial sums: each iteration adds one term to each
    sum. Second, a reduction adds up the partial sums of all blocks of a row. The reduction takes
    two rows at a time, as in nt_bfloat16_row; on a mesh, one row at a time.

    XLA compiles the Python loop and the reduction to one loop. If the first stage were a reduction,
    too, jaxlib 0.10 would still compile one loop, but jaxlib 0.12 would compile two loops, which
    are slower (docs/lab_log.md#int8-matmuls)."""
    O, I = w.shape[-2:]
    terms = int16_lane_terms(I)
    w = w.reshape(*w.shape[:-1], -1, terms, INT_LANES)
    x = x.reshape(*x.shape[:-1], -1, terms, INT_LANES).astype(jnp.int32)

    def sum_terms(w):
        sums = 0
        for i in range(terms):
            sums += w[..., i, :].astype(jnp.int32) * x[..., i, :]
        return sums

    if current_mesh():  # the rows of w may be sharded, and XLA's partitioner would gather them
        return sum_terms(w).sum((-2, -1))

    sums = [sum_terms(half) for half in halves_of_outputs(w)]
    axes = (sums[0].ndim - 2, sums[0].ndim - 1)
    return join_halves(jax.lax.reduce(sums, [np.int32(0)] * 2, add_pairs, axes), O)


def nt_int16(x_RxI, w_OxI):
    """Computes x @ w.T -> int32 for int16 x and (u)int8 weights. XLA:CPU's fast matmuls take x in
    int8, so x is split: x = 256 high + low."""
    high_RxI = (x_RxI + 128) >> 8
    low_RxI = x_RxI - 256 * high_RxI
    x_2RxI = jnp.concatenate([high_RxI, low_RxI]).astype(jnp.int8)
    y_2RxO = nt_weights_left(x_2RxI, w_OxI, jnp.int32)
    high_RxO, low_RxO = jnp.split(y_2RxO, 2)
    return 256 * high_RxO + low_RxO


@functools.cache
def nt_uint8():
    """Returns a JAX primitive. Its bind(a, b) computes a @ b.T in int32, for uint8 a and int8 b.
    The caller, nt_weights_left, passes the weights as a, and the activations as b. The weights are
    uint8 because as_uint8 has stored them so. The activations are int8 because nt_int16 has split
    each int16 into two int8.

    The primitive is compiled to the CPU's VNNI instructions; int8 by int8 takes 1.4 to 2.6 times as
    long. A primitive of its own is needed, because JAX's lowering converts operands of two dtypes
    to int32."""
    from jax.extend.core import Primitive
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    def result_type(x_RxI, w_OxI):
        return jax.core.ShapedArray((x_RxI.shape[0], w_OxI.shape[0]), np.dtype('int32'))

    def lower(context, x_RxI, w_OxI):
        int32 = ir.IntegerType.get_signless(32)
        y_RxO = ir.RankedTensorType.get(context.avals_out[0].shape, int32)
        last_axes = stablehlo.DotDimensionNumbers.get([], [], [1], [1])
        return [stablehlo.dot_general(y_RxO, x_RxI, w_OxI, last_axes)]

    primitive = Primitive('nt_uint8')
    primitive.def_abstract_eval(result_type)
    mlir.register_lowering(primitive, lower, platform='cpu')
    return primitive


@functools.cache
def cpu_multiplies_uint8():
    """Returns whether nt_uint8 compiles. XLA may not support it on this CPU, and a later JAX may
    lack the private names that nt_uint8 uses."""
    shapes = (jax.ShapeDtypeStruct((64, 64), jnp.uint8), jax.ShapeDtypeStruct((2, 64), jnp.int8))
    try:
        # on a CPU, also where the default device is another one
        with jax.default_device(jax.local_devices(backend='cpu')[0]):
            jax.jit(nt_uint8().bind).lower(*shapes).compile()
    except (ImportError, AttributeError, jax.errors.JaxRuntimeError):
        return False
    return True
