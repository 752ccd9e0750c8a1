"""Rows in blocks of one expert each, times the weights of their experts: on GPUs and TPUs one kernel
for all experts."""
import functools

import jax
import jax.numpy as jnp
from flax import struct

from jax_flags import ceil_div

# The shape of the tiles that a program of the Triton kernels computes, and what it loads at a time:
# 3 x 64 x (128 + 128) values are 96 KiB, which GPUs from compute capability 8.0 on have.
TILE = 128
STEP = 64


class Blocks(struct.PyTreeNode):
    """Rows sorted by expert in n blocks, of which the first ones are in use."""
    expert_n: jax.Array  # the expert of each block, in ascending order; E if it is not in use
    first_F: jax.Array  # [E + 1]: the first block of each expert, and the number of blocks in use
    way: str = struct.field(pytree_node=False)  # 'triton' or 'ragged'


class Grouped(struct.PyTreeNode):
    """The matrices of all experts in the place of a kernel, see linear() in matmul.py."""
    weights: jax.Array  # [E, I, O], or [E, O, I] if is_transposed
    blocks: Blocks  # of the rows that are multiplied
    is_transposed: bool = struct.field(pytree_node=False, default=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x_nxbxI, w_ExIxO, blocks, transpose_rhs=False):
    """[x[i] @ w[blocks.expert_n[i]] for i in range(n)] (@ w.T with transpose_rhs), zeros for blocks
    that are not in use; in x's dtype, accumulated in float32."""
    n, b, I = x_nxbxI.shape
    multiply = {'triton': triton_matmul, 'ragged': ragged_matmul}[blocks.way]
    y_SxO = multiply(
        x_nxbxI.reshape(n * b, I), w_ExIxO.astype(x_nxbxI.dtype), blocks, transpose_rhs)
    return y_SxO.reshape(n, b, -1)


def grouped_matmul_fwd(x_nxbxI, w_ExIxO, blocks, transpose_rhs):
    return grouped_matmul(x_nxbxI, w_ExIxO, blocks, transpose_rhs), (x_nxbxI, w_ExIxO, blocks)


def grouped_matmul_bwd(transpose_rhs, residuals, g_nxbxO):
    x_nxbxI, w_ExIxO, blocks = residuals
    dx_nxbxI = grouped_matmul(g_nxbxO, w_ExIxO, blocks, not transpose_rhs)

    # of the weights: a sum over the rows of each expert
    x_SxI = x_nxbxI.reshape(-1, x_nxbxI.shape[-1])
    g_SxO = g_nxbxO.reshape(-1, g_nxbxO.shape[-1])
    weight_grad = {'triton': triton_weight_grad, 'ragged': ragged_weight_grad}[blocks.way]
    if transpose_rhs:
        x_SxI, g_SxO = g_SxO, x_SxI
    return dx_nxbxI, weight_grad(x_SxI, g_SxO, blocks, w_ExIxO.dtype), None


grouped_matmul.defvjp(grouped_matmul_fwd, grouped_matmul_bwd)


# -----------------------------------------------------------------------------
# jax.lax.ragged_dot and a kernel of JAX's, for TPUs; on a CPU they are interpreted, for tests

def rows_of_experts(n_rows, blocks):
    """The number of rows [E] in the blocks of each expert, of n_rows in all blocks."""
    b = n_rows // len(blocks.expert_n)
    return jnp.diff(blocks.first_F) * b


def ragged_matmul(x_SxI, w_ExIxO, blocks, transpose_rhs):
    """grouped_matmul by jax.lax.ragged_dot, of rows [S, I]."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        (((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
    return jax.lax.ragged_dot_general(
        x_SxI, w_ExIxO, rows_of_experts(len(x_SxI), blocks), numbers,
        preferred_element_type=x_SxI.dtype)


def ragged_weight_grad(x_SxI, g_SxO, blocks, dtype):
    """[x[rows of e].T @ g[rows of e] for e in range(E)] in dtype, by megablox: of this form of
    ragged_dot XLA:TPU makes a matmul of every expert with every row."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
    S = len(x_SxI)
    tiles = S // len(blocks.expert_n), widest_tile(x_SxI.shape[1]), widest_tile(g_SxO.shape[1])
    arrays = x_SxI.T, g_SxO, rows_of_experts(S, blocks)

    def sums(*arrays, interpret):
        return tgmm(*arrays, dtype, tiles, interpret=interpret)

    return jax.lax.platform_dependent(
        *arrays, cpu=functools.partial(sums, interpret=True),
        default=functools.partial(sums, interpret=False))


def widest_tile(width):
    """Returns the width of megablox's tiles: what divides `width`, else 128, of which it masks the
    rest."""
    for tile in (512, 384, 256):
        if width % tile == 0:
            return tile
    return 128


# -----------------------------------------------------------------------------
# kernels in Triton, for NVIDIA GPUs; on a CPU they are interpreted, for tests

def tile_of(width):
    """Returns the width of a tile: TILE if it divides `width`, else STEP, which has to."""
    return TILE if width % TILE == 0 else STEP


def run_triton(kernel, *args, **options):
    """The result of a Pallas kernel. args: the arrays. options: those of pallas_call."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
    params = triton.CompilerParams(num_warps=8, num_stages=3)
    compiled = pl.pallas_call(kernel, compiler_params=params, **options)
    interpreted = pl.pallas_call(kernel, interpret=True, **options)
    return jax.lax.platform_dependent(*args, cpu=interpreted, default=compiled)


def triton_matmul(x_SxI, w_ExIxO, blocks, transpose_rhs):
    """grouped_matmul in one kernel, of rows [S, I]: a program computes TILE columns of a block.

    Neighbouring programs share a block of x; the weights of an expert, the next ones' too, come
    from the cache. Blocks that are not in use cost zeros."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
    S, I = x_SxI.shape
    n, E = len(blocks.expert_n), len(w_ExIxO)
    O = w_ExIxO.shape[1 if transpose_rhs else 2]
    b, tile = S // n, tile_of(O)

    def kernel(expert_ref, x_ref, w_ref, y_ref):
        expert = expert_ref[pl.program_id(1)]
        is_used = (expert < E).astype(jnp.int32)

        def add(step, y_bxO):
            columns = pl.ds(step * STEP, STEP)
            if transpose_rhs:
                w = w_ref[expert, :, columns]
            else:
                w = w_ref[expert, columns, :]
            return y_bxO + triton.dot(x_ref[:, columns], w, trans_b=transpose_rhs)

        zeros = jnp.zeros(y_ref.shape, jnp.float32)
        y_ref[...] = jax.lax.fori_loop(0, is_used * (I // STEP), add, zeros).astype(y_ref.dtype)

    w_spec = pl.BlockSpec((E, I, tile), lambda j, i: (0, 0, j))
    if transpose_rhs:
        w_spec = pl.BlockSpec((E, tile, I), lambda j, i: (0, j, 0))
    return run_triton(
        kernel, blocks.expert_n, x_SxI, w_ExIxO, grid=(O // tile, n),
        in_specs=[pl.BlockSpec((n,), lambda j, i: (0,)),
                  pl.BlockSpec((b, I), lambda j, i: (i, 0)), w_spec],
        out_specs=pl.BlockSpec((b, tile), lambda j, i: (i, j)),
        out_shape=jax.ShapeDtypeStruct((S, O), x_SxI.dtype))


def triton_weight_grad(x_SxI, g_SxO, blocks, dtype):
    """[x[rows of e].T @ g[rows of e] for e in range(E)] in dtype, in one kernel: a program sums a
    tile of an expert's matrix over its rows, which have no length at compile time."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
    (S, I), O = x_SxI.shape, g_SxO.shape[1]
    n, E = len(blocks.expert_n), len(blocks.first_F) - 1
    b = S // n
    step = min(b, STEP)
    tile_I, tile_O = tile_of(I), tile_of(O)

    def kernel(first_ref, x_ref, g_ref, dw_ref):
        expert = pl.program_id(2)

        def add(i, dw_IxO):
            rows = pl.ds(i * step, step)
            return dw_IxO + triton.dot(x_ref[rows, :], g_ref[rows, :], trans_a=True)

        first = first_ref[expert] * (b // step)
        end = first_ref[expert + 1] * (b // step)
        zeros = jnp.zeros((tile_I, tile_O), jnp.float32)
        dw_ref[0] = jax.lax.fori_loop(first, end, add, zeros).astype(dw_ref.dtype)

    return run_triton(
        kernel, blocks.first_F, x_SxI, g_SxO, grid=(O // tile_O, I // tile_I, E),
        in_specs=[pl.BlockSpec((E + 1,), lambda k, j, e: (0,)),
                  pl.BlockSpec((S, tile_I), lambda k, j, e: (0, j)),
                  pl.BlockSpec((S, tile_O), lambda k, j, e: (0, k))],
        out_specs=pl.BlockSpec((1, tile_I, tile_O), lambda k, j, e: (e, j, k)),
        out_shape=jax.ShapeDtypeStruct((E, I, O), dtype))


def rows_per_block(n_rows, n_experts):
    """Returns the rows of a block in one kernel for all experts: a power of 2 from 16 to TILE, so
    that balanced routing pads less than 12.5% where there are 64 rows for each expert."""
    balanced = ceil_div(n_rows, 4 * n_experts)
    return min(max(16, 1 << (balanced.bit_length() - 1)), TILE)
