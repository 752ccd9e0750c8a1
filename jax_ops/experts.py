"""Mixture of experts: sends tokens to the experts that the router chose, and sums the results."""
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as Spec

from jax_flags import ceil_div
from jax_ops.matmul import as_kernel, is_kernel
from jax_ops.sharding import EXPERTS, batch_axes, current_mesh


def mix_experts(f, weights, x_PxD, expert_PxU, weight_PxU, *, scale_input=False, way='loop'):
    """Computes sum over u of weight_PxU[p, u] * f(weights[expert_PxU[p, u]], x_PxD[p]) -> [P, D] in
    x's dtype.

    f: a function of (one expert's weights, x [b, D]) that returns [b, D]. weights: a tree of arrays
    [E, ...]. scale_input: whether the weight scales f's input instead of its output. way: how
    blocks of rows are computed, one of EXPERT_WAYS (layers.py).

    On a mesh (expert parallelism) a device has some of the experts. There are three cases:
    - The tokens are not sharded, because batch_axes finds no even split. Each device computes its
      own experts for all tokens, and the partial sums are all-reduced.
    - The expert axis has at least 4 * U ranks, where U is the number of experts per token, and a
      device has at least 128 tokens. Each token is sent only to the ranks of its experts
      (exchange_tokens).
    - Otherwise, the tokens are all-gathered over the expert axis, each device computes its own
      experts, and the partial sums are reduce-scattered."""
    mix = functools.partial(mix_range, f, scale_input, way)
    mesh = current_mesh()
    if mesh is None:
        return mix(0, weights, x_PxD, expert_PxU, weight_PxU)

    # experts are sharded over expert and, where they divide, over tensor; tokens over the batch
    E = len(jax.tree.leaves(weights)[0])
    n_ranks = mesh.shape['expert']
    axes = EXPERTS if E % (n_ranks * mesh.shape['tensor']) == 0 else ('expert',)
    batch = batch_axes(len(x_PxD))

    # sum over tensor; also over expert, if the tokens are replicated over it
    sum_axes = [axis for axis in axes if axis != 'expert' or not batch]

    def mix_own(weights, *tokens):
        """Computes mix_experts with this device's experts only. In the sum over a token's U
        experts, an expert of another device adds 0. All-reduces these partial sums over the mesh
        axes sum_axes, and returns them, [P, D]. If sum_axes lacks the axis 'expert', the caller
        must still add up what the ranks of this axis return.

        weights: the weights of this device's experts. tokens: x_PxD, expert_PxU and weight_PxU."""
        first_expert = jax.lax.axis_index(axes) * len(jax.tree.leaves(weights)[0])
        y_PxD = mix(first_expert, weights, *tokens)
        with jax.named_scope('reduce_scatter'):
            return jax.lax.psum(y_PxD, sum_axes)

    def mix_local(weights, *tokens):
        if not batch:
            return mix_own(weights, *tokens)
        # send tokens to the ranks of their experts, if that is at most half of what the all-gather
        # sends. There is space for twice the rows of balanced routing, because the number of rows
        # varies if they are few
        n_tokens, U = tokens[1].shape
        capacity = max(64, ceil_div(2 * n_tokens * U, n_ranks))
        if 2 * capacity <= n_tokens:
            return exchange_tokens(mix_own, E // n_ranks, capacity, weights, *tokens)
        # or all tokens to all ranks
        with jax.named_scope('all_gather'):
            tokens = [jax.lax.all_gather(x, 'expert', tiled=True) for x in tokens]
        y_PxD = mix_own(weights, *tokens)
        with jax.named_scope('reduce_scatter'):
            return jax.lax.psum_scatter(y_PxD, 'expert', tiled=True)

    in_specs = (Spec(axes), Spec(batch), Spec(batch), Spec(batch))
    mix_sharded = jax.shard_map(mix_local, in_specs=in_specs, out_specs=Spec(batch),
                                check_vma=False)
    return mix_sharded(weights, x_PxD, expert_PxU, weight_PxU)


def mix_range(f, scale_input, way, first_expert, weights, x_PxD, expert_PxU, weight_PxU):
    """Computes mix_experts on one device that has the `weights` of some consecutive experts,
    beginning with the expert first_expert. The results of all other experts count as 0. f,
    scale_input, way: as in mix_experts."""
    D = x_PxD.shape[1]
    x_PxUxD = jnp.broadcast_to(x_PxD[:, None], (*expert_PxU.shape, D))
    scale_PxUx1 = weight_PxU[..., None]
    if scale_input:
        x_PxUxD = (x_PxUxD * scale_PxUx1).astype(x_PxD.dtype)
        scale_PxUx1 = 1
    own_expert_R = expert_PxU.ravel() - first_expert
    y_RxD = grouped_experts(f, weights, x_PxUxD.reshape(-1, D), own_expert_R, way)
    y_PxUxD = y_RxD.reshape(x_PxUxD.shape)
    # cast the sum over u here, before it is sent to other devices
    return (y_PxUxD * scale_PxUx1).sum(1).astype(x_PxD.dtype)


def exchange_tokens(mix, experts_per_rank, capacity, weights, x_PxD, expert_PxU, weight_PxU):
    """Computes the outputs of mix_experts for the tokens (x_PxD, expert_PxU, weight_PxU) of this
    device, inside shard_map. Returns [P, D]. The result is the same as that of three steps:
    all-gather the tokens over the expert axis; call `mix`; reduce-scatter the outputs. But here a
    token is sent only to the ranks of its experts, once to each rank.

    mix: a function of (weights, *tokens) that computes the experts of its rank, and ignores the
    experts of other ranks. experts_per_rank: the number of experts of each rank. capacity: the
    number of rows that a device sends to each rank in a round. weights: those of this device's
    experts.

    A round is an all-to-all of the rows (unused rows have expert -1), then mix, then an all-to-all
    of the results. Rounds are repeated until every rank has sent all its rows, so no token is
    dropped. With balanced routing one round is enough. (ragged_all_to_all needs no capacity, but
    XLA:CPU cannot run it.)"""
    n_tokens, U = expert_PxU.shape
    M = jax.lax.axis_size('expert')

    # the rank that each row is sent to; M (none) if an earlier expert of its token has that rank
    rank_PxU = expert_PxU // experts_per_rank
    is_repeat_PxU = jnp.tril(rank_PxU[:, :, None] == rank_PxU[:, None], -1).any(2)
    rank_R = jnp.where(is_repeat_PxU, M, rank_PxU).ravel()
    is_sent_RxM = jax.nn.one_hot(rank_R, M, dtype=jnp.int32)

    # the number of each row among the rows for its rank, -1 if it is not sent
    slot_R = (jnp.cumsum(is_sent_RxM, 0) * is_sent_RxM).sum(1) - 1
    n_rounds = ceil_div(jax.lax.pmax(is_sent_RxM.sum(0).max(), 'expert'), capacity)

    def all_to_all(x_RxD):
        with jax.named_scope('all_to_all'):
            return jax.lax.all_to_all(x_RxD, 'expert', split_axis=0, concat_axis=0, tiled=True)

    def exchange(i, routing, args):
        expert_PxU, rank_R, slot_R = routing
        weights, x_PxD, weight_PxU = args

        # the index of each row of this round among the rows that are sent; other rows get an index
        # out of range
        out_of_range_R = M * capacity + jnp.arange(len(slot_R))
        is_in_round_R = slot_R // capacity == i
        sent_row_R = rank_R * capacity + slot_R % capacity
        row_R = jnp.where(is_in_round_R, sent_row_R, out_of_range_R)

        def send(x_PxW, unused):
            rows = jnp.full((M * capacity, x_PxW.shape[1]), unused, x_PxW.dtype)
            x_RxW = jnp.repeat(x_PxW, U, axis=0)
            rows = rows.at[row_R].set(x_RxW, mode='drop', unique_indices=True)
            return all_to_all(rows)

        # send the rows, mix them there, and send the results back
        sent = send(x_PxD, 0), send(expert_PxU, -1), send(weight_PxU, 0)
        y_RxD = all_to_all(mix(weights, *sent))
        y_RxD = y_RxD.at[row_R].get(mode='fill', fill_value=0, unique_indices=True)
        return y_RxD.reshape(n_tokens, U, -1).sum(1, dtype=jnp.float32)

    routing = expert_PxU, rank_R, slot_R
    args = weights, x_PxD, weight_PxU  # the inputs that have gradients
    y_PxD = sum_rounds(exchange, n_rounds, routing, args)
    return y_PxD.astype(x_PxD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rounds(f, n, constants, args):
    """Computes sum(f(i, constants, args) for i in range(n)) for a traced n, which is usually 1.
    Only the first call of f saves what its backward pass needs. The backward pass computes the
    other calls again."""
    def add_round(i, y):
        return y + f(i, constants, args)

    return jax.lax.fori_loop(1, n, add_round, f(0, constants, args))


def sum_rounds_fwd(f, n, constants, args):
    def add_round(i, y):
        return y + f(i, constants, args)

    y, vjp = jax.vjp(functools.partial(f, 0, constants), args)
    y = jax.lax.fori_loop(1, n, add_round, y)
    return y, (vjp, n, constants, args)


def sum_rounds_bwd(f, residuals, g):
    vjp, n, constants, args = residuals

    def add_round(i, grads):
        _, vjp = jax.vjp(functools.partial(f, i, constants), args)
        return jax.tree.map(jnp.add, grads, vjp(g)[0])

    return None, None, jax.lax.fori_loop(1, n, add_round, vjp(g)[0])


sum_rounds.defvjp(sum_rounds_fwd, sum_rounds_bwd)


def grouped_experts(f, weights, x_RxD, expert_R, way='loop'):
    """Computes [f(weights[expert_R[r]], x_RxD[r]) for r in range(R)], with zeros if expert_R[r] is
    not in 0 .. E-1.

    way: one of EXPERT_WAYS (layers.py).

    Rows are usually computed in blocks (experts_in_blocks). Each block has rows of one expert. A
    few rows, as in decoding, are computed without blocks (experts_one_by_one), if all of the
    following is true:
    - the device is a CPU, and there is no mesh;
    - `way` is 'loop';
    - the weights have the form of convert_params_for_decoding;
    - R is small enough for this form. Kernel.can_be_chosen checks the form and R."""
    in_blocks = functools.partial(experts_in_blocks, f, way)
    # on a mesh a device has only some experts; current_mesh() would be None inside shard_map
    has_all_experts = jax.sharding.get_abstract_mesh().empty
    leaves = [as_kernel(leaf) for leaf in jax.tree.leaves(weights, is_leaf=is_kernel)]
    matrices = [leaf for leaf in leaves if leaf.values.ndim > 2]  # without biases [E, O]
    are_few = all(matrix.can_be_chosen(len(expert_R)) for matrix in matrices)
    if way != 'loop' or not has_all_experts or not are_few:
        return in_blocks(weights, x_RxD, expert_R)
    one_by_one = functools.partial(experts_one_by_one, f)
    return jax.lax.platform_dependent(weights, x_RxD, expert_R, cpu=one_by_one, default=in_blocks)


def experts_one_by_one(f, weights, x_RxD, expert_R):
    """Does the same as grouped_experts, but without grouping the rows into blocks. All elements of
    expert_R must be in 0 .. E-1.

    Calls f once, with all rows. f gets each kernel as a Chosen: its linear() multiplies each row of
    x by the matrix of the row's expert, without copying the matrix first. f gets the biases of the
    rows' experts, [R, O], in place of each bias [E, O]."""
    def choose(w):
        return as_kernel(w).choose(expert_R)

    return f(jax.tree.map(choose, weights, is_leaf=is_kernel), x_RxD)


def experts_in_blocks(f, way, weights, x_RxD, expert_R):
    """Does the same as grouped_experts, in blocks of rows: computes f(weights[expert_R[r]],
    x_RxD[r]) for each row r, [R, D], with zeros where the expert is not in 0 .. E-1.

    Rows are sorted by expert and padded to blocks of b rows of one expert each. Example with b = 2,
    experts of the rows [1, 0, 1, 1]: sorted rows 1 | 0 2 3, blocks [1, -] [0, 2] [3, -], experts of
    the blocks [0, 1, 1]. The number of blocks is fixed, and is enough for every assignment of the R
    rows to experts. way: how blocks are computed, one of EXPERT_WAYS (layers.py)."""
    E = len(jax.tree.leaves(weights)[0])
    R, D = x_RxD.shape
    # rows without an expert are sorted to the end
    expert_R = jnp.where((expert_R >= 0) & (expert_R < E), expert_R, E)
    b, n = block_sizes(way, R, E)

    # the rows and blocks of each expert
    rows_E = jnp.zeros(E, jnp.int32).at[expert_R].add(1, mode='drop')
    blocks_E = ceil_div(rows_E, b)
    block_end_E = jnp.cumsum(blocks_E)

    # the slot of each row in the blocks: sorted row s goes to slot s + shift of its expert; rows
    # without an expert have the shift n * b, which is out of range
    shift_E = (block_end_E - blocks_E) * b - (jnp.cumsum(rows_E) - rows_E)
    order_R = jnp.argsort(expert_R)
    sorted_expert_R = expert_R[order_R]
    shift_R = jnp.where(sorted_expert_R < E, shift_E[sorted_expert_R], n * b)
    slot_R = jnp.zeros(R, jnp.int32).at[order_R].set(shift_R + jnp.arange(R))

    # the expert of each block, E for unused blocks
    expert_n = jnp.searchsorted(
        block_end_E, jnp.arange(n), side='right', method='compare_all')

    # rows to blocks, and back
    x_SxD = jnp.zeros((n * b, D), x_RxD.dtype)
    x_SxD = x_SxD.at[slot_R].set(x_RxD, mode='drop', unique_indices=True)
    x_nxbxD = x_SxD.reshape(n, b, D)
    if way == 'loop':
        y_nxbxD = grouped_apply(f, weights, x_nxbxD, expert_n.clip(0, E - 1), block_end_E[-1])
    else:
        y_nxbxD = batched_apply(f, weights, x_nxbxD, expert_n)
    return y_nxbxD.reshape(n * b, D).at[slot_R].get(mode='fill', fill_value=0)


def block_sizes(way, R, E):
    """Returns (the number of rows of a block; an upper bound of the number of blocks). The bound
    holds for any distribution of R rows in total over E experts. way: one of EXPERT_WAYS
    (layers.py)."""
    if way == 'loop':
        # larger blocks pad more, smaller ones read weights more often
        b = max(1, min(ceil_div(R, E), 64))
        return b, R // b + min(E, R)
    # each block reads its expert's weights: take as few blocks as pad less than 12.5% if routing is
    # balanced
    b = max(1, R // (4 * E))
    # the last block of each expert may have one row only
    return b, (R + min(E, R) * (b - 1)) // b


def batched_apply(f, weights, x_nxbxD, expert_n):
    """Computes [f(weights[expert_n[i]], x[i]) for i in range(n)] in batched matmuls -> [n, b, D].

    x_nxbxD: n blocks of b rows. expert_n: the expert of each block. An unused block has expert_n[i]
    = E, the number of experts. It is computed with the weights of the last expert, and callers
    ignore its result.

    The forward pass copies the weights of each block's expert. These copies are not kept in memory
    for the backward pass, which makes them again."""
    def apply(weights, x_nxbxD):
        def take(w):
            return checkpoint_name(jnp.take(w, expert_n, axis=0, mode='clip'), 'of_blocks')

        return jax.vmap(f)(jax.tree.map(take, weights), x_nxbxD)

    keep = jax.checkpoint_policies.save_anything_except_these_names('of_blocks')
    return jax.checkpoint(apply, policy=keep)(weights, x_nxbxD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_apply(f, weights, x_nxbxD, expert_n, n_used):
    """Computes f(weights[expert_n[i]], x[i]) for the first n_used of n blocks, in a loop -> [n, b,
    D]. The later blocks of the result are zeros. x_nxbxD: n blocks of b rows. expert_n: the expert
    of each block. n_used: a scalar, which may be traced.

    The gradients of the weights are accumulated in place. JAX's own gradient rule would add zeros
    for all experts in every iteration."""
    def block(i, y):
        return y.at[i].set(f(take_expert(weights, expert_n[i]), x_nxbxD[i]))

    return jax.lax.fori_loop(0, n_used, block, jnp.zeros_like(x_nxbxD))


def take_expert(weights, e):
    """Returns the weights of expert e: the tree `weights` with leaf[e] in place of each leaf [E,
    ...]."""
    def take(w):
        return jax.lax.dynamic_index_in_dim(w, e, keepdims=False)

    return jax.tree.map(take, weights)


def grouped_apply_fwd(f, *args):
    return grouped_apply(f, *args), args


def grouped_apply_bwd(f, residuals, g_nxbxD):
    weights, x_nxbxD, expert_n, n_used = residuals

    def block(i, grads):
        dweights, dx_nxbxD = grads
        e = expert_n[i]

        def add_to_expert(total, d):
            return total.at[e].add(d)

        _, vjp = jax.vjp(f, take_expert(weights, e), x_nxbxD[i])
        dw, dx = vjp(g_nxbxD[i])
        return jax.tree.map(add_to_expert, dweights, dw), dx_nxbxD.at[i].set(dx)

    zeros = jax.tree.map(jnp.zeros_like, (weights, x_nxbxD))
    dweights, dx_nxbxD = jax.lax.fori_loop(0, n_used, block, zeros)
    return dweights, dx_nxbxD, None, None


grouped_apply.defvjp(grouped_apply_fwd, grouped_apply_bwd)
