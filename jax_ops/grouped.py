"""Rows in blocks of one expert each, times the weights of their experts: on TPUs one kernel for all
experts."""
import functools

import jax
import jax.numpy as jnp
from flax import struct

from jax_flags import ceil_div


class Blocks(struct.PyTreeNode):
    """Rows sorted by expert in n blocks, of which the first ones are in use."""
    expert_n: jax.Array  # the expert of each block, in ascending order; E if it is not in use
    first_F: jax.Array  # [E + 1]: the first block of each expert, and the number of blocks in use


class Grouped(struct.PyTreeNode):
    """The matrices of all experts in the place of a kernel, see linear() in matmul.py."""
    weights: jax.Array  # [E, I, O], or [E, O, I] if is_transposed
    blocks: Blocks  # whose expert multiplies which rows
    is_transposed: bool = struct.field(pytree_node=False, default=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x_nxbxI, w_ExIxO, blocks, transpose_rhs=False):
    """[x[i] @ w[blocks.expert_n[i]] for i in range(n)] (@ w.T with transpose_rhs), zeros for blocks
    that are not in use; in x's dtype, accumulated in float32."""
    n, b, I = x_nxbxI.shape
    y_SxO = ragged_matmul(
        x_nxbxI.reshape(n * b, I), w_ExIxO.astype(x_nxbxI.dtype), blocks, transpose_rhs)
    return y_SxO.reshape(n, b, -1)


def grouped_matmul_fwd(x_nxbxI, w_ExIxO, blocks, transpose_rhs):
    return grouped_matmul(x_nxbxI, w_ExIxO, blocks, transpose_rhs), (x_nxbxI, w_ExIxO, blocks)


def grouped_matmul_bwd(transpose_rhs, residuals, g_nxbxO):
    x_nxbxI, w_ExIxO, blocks = residuals
    dx_nxbxI = grouped_matmul(g_nxbxO, w_ExIxO, blocks, not transpose_rhs)

    # the gradient of the weights is a sum over the rows of each expert
    x_SxI = x_nxbxI.reshape(-1, x_nxbxI.shape[-1])
    g_SxO = g_nxbxO.reshape(-1, g_nxbxO.shape[-1])
    if transpose_rhs:
        x_SxI, g_SxO = g_SxO, x_SxI
    return dx_nxbxI, ragged_weight_grad(x_SxI, g_SxO, blocks, w_ExIxO.dtype), None


grouped_matmul.defvjp(grouped_matmul_fwd, grouped_matmul_bwd)


# -----------------------------------------------------------------------------
# jax.lax.ragged_dot and a kernel of JAX's; on a CPU they are interpreted, for tests

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


def rows_per_block(n_rows, n_experts):
    """Returns the rows of a block in one kernel for all experts: a power of 2 from 16 to 128, so
    that balanced routing pads less than 12.5% where there are 64 rows for each expert."""
    balanced = ceil_div(n_rows, 4 * n_experts)
    return min(max(16, 1 << (balanced.bit_length() - 1)), 128)
