"""Embedding and LM head of a vocabulary that is sharded over the tensor axis."""
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec as Spec

from jax_flags import UserError, ceil_div
from jax_ops.matmul import Int8, as_int8, matmul, matmul_int8, matmul_nt, soft_cap
from jax_ops.sharding import (
    BATCH, COLUMN_PARALLEL, batch_axes, current_mesh, gather_positions, position_axes, run_on_mesh, shard)

INIT_STD = 0.02  # of the initial tables and matrices, as GPT-2's


def embed_tokens(table_VxD, idx_BxT, dtype=None):
    """table[idx] -> [B, T, D] in dtype (default: the table's); an id beyond the table gives its
    last row.

    On a mesh a device has some columns (fsdp) of the rows of one vocabulary range (tensor). It
    looks up these columns for all sequences of its fsdp group: zeros for ids of other ranges, an
    all-reduce over tensor, then an all-to-all over fsdp, columns for sequences. The table itself
    does not move, and its gradient is a sum in the table's dtype, float32: in bfloat16 a sum over
    the many tokens of one id stagnates."""
    if isinstance(table_VxD, Int8):
        x_BxTxD = as_int8(jnp.take(table_VxD.values, idx_BxT, axis=0, mode='clip')).astype(dtype)
        return x_BxTxD * jnp.take(table_VxD.scale, idx_BxT, mode='clip')[..., None].astype(dtype)
    dtype = dtype or table_VxD.dtype
    mesh = current_mesh()
    if mesh is None:
        if table_VxD.dtype == jnp.bfloat16:
            # or XLA:CPU would make a float32 copy of the table ahead of a decode loop
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
    # a batch that is not sharded: with all columns
    table_spec = Spec('tensor', 'fsdp' if batch else None)
    return jax.shard_map(lookup, in_specs=(table_spec, tokens), out_specs=tokens)(padded_VxD, idx_BxT)


def pad_rows(table, n_ranges):
    """The table with rows of zeros appended until n_ranges divides their number."""
    return jnp.pad(table, ((0, -len(table) % n_ranges), *[(0, 0)] * (table.ndim - 1)))


def lookup_range(rows_VxD, idx, start):
    """table[idx] for the ids start .. start + V - 1, whose rows these are; zeros for all others."""
    row = idx - start
    in_range = (row >= 0) & (row < len(rows_VxD))
    return jnp.where(in_range[..., None], jnp.take(rows_VxD, row, axis=0, mode='clip'), 0)


def lm_logits(x_BxTxD, table_VxD, cap=0.0, *, training=False):
    """soft_cap(x @ table.T, cap) -> float32 [B, T, V]. On a mesh each device keeps the logits of
    its vocabulary range.

    training: use matmul(), which pays for many tokens; without it the table is read in place, which
    suits decoding."""
    x_BxTxD = gather_positions(x_BxTxD)
    if isinstance(table_VxD, Int8):
        logits_BxTxV = matmul_int8(x_BxTxD, table_VxD.values, table_VxD.scale, COLUMN_PARALLEL)
    elif training:
        logits_BxTxV = matmul(x_BxTxD, table_VxD, transpose_rhs=True, dtype=jnp.float32)
    else:
        logits_BxTxV = matmul_nt(x_BxTxD, table_VxD)
    return shard(soft_cap(logits_BxTxV, cap), BATCH, position_axes(logits_BxTxV.shape[1], 'context'), 'tensor')


def masked_cross_entropy(logits_BxTxV, targets_BxT):
    """optax.softmax_cross_entropy_with_integer_labels, with a mask in place of a gather: the
    gradient of a gather is a scatter, for which XLA:GPU stores softmax(logits) in float32 first
    (GPT-2's step moves 68 GB instead of 56)."""
    is_target_BxTxV = targets_BxT[..., None] == jnp.arange(logits_BxTxV.shape[-1])
    return jax.nn.logsumexp(logits_BxTxV, axis=-1) - jnp.where(is_target_BxTxV, logits_BxTxV, 0).sum(-1)


class VocabParallel(nn.Module):
    """Embedding and head as layers that can be used alone, outside of GPT.

    GPT itself calls embed_tokens and lm_logits; these classes are the interface for code of one's
    own with a sharded vocabulary (docs/parallelism.md#a-sharded-vocabulary-of-your-own).

    A table [num_embeddings, embedding_dim] whose rows are sharded over tp_size ranks: rank r has
    the n_rows ids from r * n_rows on, n_rows = ceil(num_embeddings / tp_size), padded with rows of
    zeros.

    Calling a layer computes the part of its tp_rank on any device: its parameter `weight` is that
    rank's [n_rows, embedding_dim], as load_weight_shard slices it. sharded_forward computes all
    parts on a mesh: its parameter `weight` is the full [num_embeddings, embedding_dim]."""
    num_embeddings: int
    embedding_dim: int
    tp_size: int = 1
    tp_rank: int = 0
    dtype: Any = 'float32'

    @property
    def n_rows(self):
        return ceil_div(self.num_embeddings, self.tp_size)

    def load_weight_shard(self, full):
        """This rank's rows of a table, or bias, of num_embeddings rows. Raises UserError for
        another number of rows."""
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
        """The embedding [B, T, D], looked up on the devices of a mesh (create_mesh) and
        all-reduced."""
        return run_on_mesh(embed_tokens, mesh)(self.table(self.num_embeddings), tokens)


class ParallelLMHead(VocabParallel):
    """Logits of x [B, T, D] by a table sharded over ranks, see VocabParallel. bias: adds a
    parameter `bias`, [n_rows] or, in sharded_forward, [num_embeddings]. last_B: logits of position
    last_B[b] of each sequence only."""
    bias: bool = False

    @nn.compact
    def __call__(self, x_BxTxD, last_B=None):
        """This rank's logits, float32 [B, T, n_rows]; those beyond the vocabulary are -inf."""
        logits = self.logits(x_BxTxD, last_B, self.n_rows)
        ids = self.tp_rank * self.n_rows + jnp.arange(self.n_rows)
        return jnp.where(ids < self.num_embeddings, logits, -jnp.inf)

    @nn.compact
    def sharded_forward(self, x_BxTxD, mesh, last_B=None, gathered=False):
        """All logits, float32 [B, T, num_embeddings]: each device of the mesh keeps its range, or
        all if `gathered`."""
        logits = self.logits(x_BxTxD, last_B, self.num_embeddings, mesh)
        return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, Spec())) if gathered else logits

    def logits(self, x_BxTxD, last_B, n_rows, mesh=None):
        if last_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, last_B[:, None, None], axis=1)

        def multiply(table, x):
            return lm_logits(x, table, training=True)

        if mesh is not None:
            multiply = run_on_mesh(multiply, mesh)
        logits = multiply(self.table(n_rows), x_BxTxD.astype(self.dtype))
        return logits + self.param('bias', nn.initializers.zeros, (n_rows,)) if self.bias else logits
