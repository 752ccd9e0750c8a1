"""Embedding and LM head of a vocabulary that is sharded over the tensor axis."""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec as Spec

from jax_flags import UserError, ceil_div
from jax_ops.matmul import is_kernel, matmul, matmul_nt, soft_cap
from jax_ops.sharding import (
    BATCH, COLUMN_PARALLEL, batch_axes, current_mesh, gather_positions, position_axes, run_on_mesh,
    shard)

INIT_STD = 0.02  # standard deviation of the initial tables and matrices, as GPT-2's


def embed_tokens(table_VxD, idx_BxT, dtype=None):
    """Returns table[idx], [B, T, D], in dtype (default: the table's). table_VxD: an array, or an
    Int8. An id beyond the table gives the table's last row. The gradient of the table is summed in
    the table's dtype, float32, because in bfloat16 a sum over the many tokens of one id
    stagnates."""
    if is_kernel(table_VxD):
        return table_VxD.embed(idx_BxT, dtype)
    dtype = dtype or table_VxD.dtype
    if current_mesh():
        return embed_on_mesh(table_VxD, idx_BxT, dtype)
    if table_VxD.dtype == jnp.bfloat16:
        # else XLA:CPU would copy the table to float32 before a decode loop
        table_VxD, idx_BxT = jax.lax.optimization_barrier((table_VxD, idx_BxT))
    return jnp.take(table_VxD, idx_BxT, axis=0, mode='clip').astype(dtype)


def embed_on_mesh(table_VxD, idx_BxT, dtype):
    """Does the same as embed_tokens, on the current mesh, without moving the table. Each device has
    the rows of one vocabulary range (axis tensor), and some columns of these rows (axis fsdp).
    Returns [B, T, D], in which each device has all D columns of its own sequences.

    A device first looks up its columns for all sequences of its fsdp group, with zeros for ids of
    other ranges. An all-reduce over tensor adds up the ranges. After that, an all-to-all over fsdp
    gives each device the missing columns of its own sequences, in exchange for its columns of the
    other sequences."""
    batch = batch_axes(len(idx_BxT))
    tokens = Spec(batch, position_axes(idx_BxT.shape[1], 'context'))

    def lookup(rows_VxD, idx_BxT):
        # the tokens of all sequences of the fsdp group
        if batch:
            idx_BxT = jax.lax.all_gather(idx_BxT, 'fsdp', tiled=True)
        # the embeddings of these tokens, each from the range that has its id
        start = jax.lax.axis_index('tensor') * len(rows_VxD)
        x_BxTxD = lookup_range(rows_VxD, idx_BxT, start).astype(dtype)
        with jax.named_scope('all_reduce'):
            x_BxTxD = jax.lax.psum(x_BxTxD, 'tensor')
        # all columns for this device's own sequences
        if batch:
            x_BxTxD = jax.lax.all_to_all(x_BxTxD, 'fsdp', split_axis=0, concat_axis=2, tiled=True)
        return x_BxTxD

    # if the batch is not sharded, a device has all columns
    columns = 'fsdp' if batch else None
    padded_VxD = pad_rows(table_VxD, current_mesh().shape['tensor'])
    idx_BxT = jnp.clip(idx_BxT, 0, len(table_VxD) - 1)
    lookup_sharded = jax.shard_map(
        lookup, in_specs=(Spec('tensor', columns), tokens), out_specs=tokens)
    return lookup_sharded(padded_VxD, idx_BxT)


def pad_rows(table, n_ranges):
    """Returns the table with rows of zeros appended until n_ranges divides the number of its
    rows."""
    padding = [(0, 0)] * table.ndim
    padding[0] = (0, -len(table) % n_ranges)
    return jnp.pad(table, padding)


def lookup_range(rows_VxD, idx, start):
    """Looks up rows of a table by ids. rows_VxD are the rows of the ids start .. start + V - 1; all
    other ids give zeros."""
    row = idx - start
    is_here = (row >= 0) & (row < len(rows_VxD))
    return jnp.where(is_here[..., None], jnp.take(rows_VxD, row, axis=0, mode='clip'), 0)


def lm_logits(table_VxD, x_BxTxD, *, cap=0.0, training=True):
    """Computes soft_cap(x @ table.T, cap) -> float32 [B, T, V]; a cap of 0 is none. On a mesh each
    device keeps the logits of its vocabulary range.

    table_VxD: as in embed_tokens. training: True uses matmul(), which pays off for many tokens;
    False reads the table in place, which suits decoding."""
    is_on_mesh = current_mesh() is not None
    if is_on_mesh:
        x_BxTxD = gather_positions(x_BxTxD)
    if is_kernel(table_VxD):
        logits_BxTxV = table_VxD.multiply(x_BxTxD, COLUMN_PARALLEL)
    elif training:
        logits_BxTxV = matmul(x_BxTxD, table_VxD, transpose_rhs=True, dtype=jnp.float32)
    else:
        logits_BxTxV = matmul_nt(x_BxTxD, table_VxD)
    if cap:
        logits_BxTxV = soft_cap(logits_BxTxV, cap)
    if is_on_mesh:
        positions = position_axes(logits_BxTxV.shape[1], 'context')
        logits_BxTxV = shard(logits_BxTxV, BATCH, positions, 'tensor')
    return logits_BxTxV


def cross_entropy(logits_BxTxV, targets_BxT):
    """Computes -log softmax(logits)[target], [B, T] in the logits' dtype. If the vocabulary is
    sharded, XLA all-reduces only [B, T] numbers."""
    with jax.named_scope('cross_entropy'):
        return jax.lax.platform_dependent(logits_BxTxV, targets_BxT, cuda=masked_cross_entropy,
                                          default=optax.softmax_cross_entropy_with_integer_labels)


def masked_cross_entropy(logits_BxTxV, targets_BxT):
    """Computes optax.softmax_cross_entropy_with_integer_labels with a mask in place of a gather.
    The gradient of a gather is a scatter, for which XLA:GPU stores softmax(logits) in float32
    (GPT-2's step moves 68 GB instead of 56)."""
    is_target_BxTxV = targets_BxT[..., None] == jnp.arange(logits_BxTxV.shape[-1])
    log_sum_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1)
    target_logit_BxT = jnp.where(is_target_BxTxV, logits_BxTxV, 0).sum(-1)
    return log_sum_BxT - target_logit_BxT


class VocabParallel(nn.Module):
    """The base class of an embedding and of an LM head with a table [num_embeddings,
    embedding_dim]. There are three ways to use such a layer:

    - With tp_size=1, as in GPT, calling the layer computes the full result. If the caller has set a
      mesh, the table and the result are sharded on this mesh. The parameter `weight` is the full
      table.
    - With tp_size > 1, in custom code (docs/parallelism.md#a-sharded-vocabulary-of-your-own),
      calling the layer computes only what rank tp_rank contributes. The rank is this field, on
      whatever device the call runs. An embedding is zero for ids of other ranks, and the sum
      over all ranks is the full embedding. An LM head gives the logits of this rank's ids only.
      Rank r has the n_rows ids from r * n_rows on, where n_rows = ceil(num_embeddings / tp_size).
      The parameter `weight` is this rank's rows of the table, [n_rows, embedding_dim], as
      load_weight_shard returns them. Rows of zeros stand for ids beyond the table.
    - sharded_forward, also for custom code, computes the full result on the mesh that is passed to
      it. The rows of the table are sharded over the mesh axis tensor. tp_size and tp_rank have no
      effect. The parameter `weight` is the full table."""
    num_embeddings: int
    embedding_dim: int
    tp_size: int = 1
    tp_rank: int = 0
    dtype: Any = 'float32'

    @property
    def n_rows(self) -> int:
        """Returns how many rows of the table a rank has."""
        return ceil_div(self.num_embeddings, self.tp_size)

    def load_weight_shard(self, full: Array | np.ndarray) -> Array:
        """Returns this rank's rows of the full table or bias. Raises UserError if `full` does not
        have num_embeddings rows."""
        if len(full) != self.num_embeddings:
            raise UserError(f'a table of {len(full)} rows is not one of {self.num_embeddings}')
        first = self.tp_rank * self.n_rows
        return pad_rows(jnp.asarray(full), self.tp_size)[first:first + self.n_rows]

    def table(self, n_rows: int) -> Array:
        """Returns the layer's parameter `weight`, [n_rows, embedding_dim]."""
        shape = n_rows, self.embedding_dim
        return self.param('weight', nn.initializers.normal(INIT_STD), shape)


class VocabParallelEmbedding(VocabParallel):
    """Embeds tokens [B, T] by a table that is sharded over ranks, see VocabParallel."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        """Returns the embedding of the tokens, [B, T, D]. With tp_size > 1, returns this rank's
        part of it, with zeros for tokens of other ranks. The caller must sum the parts of all
        ranks."""
        table = self.table(self.n_rows)
        if self.tp_size == 1:
            return embed_tokens(table, tokens, self.dtype)
        return lookup_range(table, tokens, self.tp_rank * self.n_rows).astype(self.dtype)

    @nn.compact
    def sharded_forward(self, tokens: Array, mesh: Mesh) -> Array:
        """Returns the embedding [B, T, D], looked up on the devices of a mesh (create_mesh) and
        all-reduced."""
        embed = run_on_mesh(functools.partial(embed_tokens, dtype=self.dtype), mesh)
        return embed(self.table(self.num_embeddings), tokens)


class ParallelLMHead(VocabParallel):
    """Computes the logits of x [B, T, D] by a table that is sharded over ranks, see VocabParallel.

    bias: whether there is a parameter `bias`, with an element for each row of the table. Both
    __call__ and sharded_forward accept last_B. If it is given, they compute only the logits of
    position last_B[b] of each sequence b, [B, 1, ...]."""
    bias: bool = False

    @nn.compact
    def __call__(self, x_BxTxD: Array, last_B: Array | None = None) -> Array:
        """Returns the logits, float32 [B, T, V]. With tp_size > 1 the logits are those of this
        rank's ids, [B, T, n_rows]; ids beyond the vocabulary have -inf. last_B: see the class. With
        last_B, the axis T has length 1."""
        logits = self.logits(x_BxTxD, last_B, self.n_rows)
        if self.tp_size == 1:
            return logits
        ids = self.tp_rank * self.n_rows + jnp.arange(self.n_rows)
        return jnp.where(ids < self.num_embeddings, logits, -jnp.inf)

    @nn.compact
    def sharded_forward(self, x_BxTxD: Array, mesh: Mesh, last_B: Array | None = None,
                        gathered: bool = False) -> Array:
        """Computes the logits on the devices of a mesh (create_mesh). Returns one global array,
        float32 [B, T, num_embeddings]. Each device keeps the logits of its own vocabulary range. If
        `gathered`, each device gets the full array instead. last_B: see the class. With last_B,
        the axis T has length 1."""
        logits = self.logits(x_BxTxD, last_B, self.num_embeddings, mesh)
        if gathered:
            logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, Spec()))
        return logits

    def logits(self, x_BxTxD: Array, last_B: Array, n_rows: int,
               mesh: Mesh | None = None) -> Array:
        """Computes x @ table.T, the part that __call__ and sharded_forward share. Adds the bias if
        there is one. Returns the logits of all positions,
        float32 [B, T, n_rows]. With last_B, returns the logits of one position of each sequence,
        float32 [B, 1, n_rows].

        last_B: None, or the positions, int32 [B]; see the class. n_rows: the number of rows
        of the table, self.n_rows in __call__ (the rows of this rank) and num_embeddings in
        sharded_forward (the full table). mesh: the mesh of sharded_forward; the table is sharded
        over its axis 'tensor'. __call__ passes None, and the computation uses the mesh that is set
        (jax.set_mesh), if any."""
        if last_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, last_B[:, None, None], axis=1)

        x_BxTxD = x_BxTxD.astype(self.dtype)
        multiply = lm_logits if mesh is None else run_on_mesh(lm_logits, mesh)
        logits = multiply(self.table(n_rows), x_BxTxD)
        if self.bias:
            logits += self.param('bias', nn.initializers.zeros, (n_rows,))
        return logits
