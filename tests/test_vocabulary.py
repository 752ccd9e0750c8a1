"""Embedding, logits and loss of a sharded vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_flags import UserError
from jax_ops.sharding import create_mesh
from jax_ops.vocabulary import ParallelLMHead, VocabParallelEmbedding, cross_entropy, masked_cross_entropy

# -----------------------------------------------------------------------------
# cross-entropy


def test_the_masked_cross_entropy_of_gpus_is_that_of_optax_in_values_and_gradients():
    logits = 10 * jax.random.normal(jax.random.key(0), (2, 5, 37))
    targets = jax.random.randint(jax.random.key(1), (2, 5), 0, 37)
    weighted = lambda loss: lambda logits: (loss(logits, targets) * jnp.arange(10).reshape(2, 5)).sum()
    losses = masked_cross_entropy, optax.softmax_cross_entropy_with_integer_labels
    masked, expected = (jax.value_and_grad(weighted(loss))(logits) for loss in losses)
    np.testing.assert_allclose(masked[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(masked[1], expected[1], atol=1e-5)

# -----------------------------------------------------------------------------
# vocabulary parallelism

def table_bias_and_x(V, D):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((V, D), (V,), (4, 3, D))]


@pytest.mark.parametrize('tp_size', [1, 2, 4, 8])
@pytest.mark.parametrize('V', [40, 37])
def test_vocabulary_parallel_layers_equal_the_dense_ones_in_values_and_gradients(V, tp_size):
    args = table_bias_and_x(V, 6)
    tokens = np.random.default_rng(0).integers(V, size=(4, 3))
    mesh = create_mesh(jax.devices(), tp_size)
    embedding = VocabParallelEmbedding(V, 6, tp_size)
    lm_head = ParallelLMHead(V, 6, tp_size, bias=True)

    def sharded(table, bias, x):
        x += embedding.apply({'params': {'weight': table}}, tokens, mesh, method='sharded_forward')
        logits = lm_head.apply({'params': {'weight': table, 'bias': bias}}, x, mesh, method='sharded_forward')
        return cross_entropy(logits, tokens)

    def dense(table, bias, x):
        return cross_entropy((x + table[tokens]) @ table.T + bias, tokens)

    def values_and_gradients(function):
        total = lambda *args: jnp.sin(function(*args)).sum()
        return jax.jit(lambda *args: (function(*args), jax.grad(total, (0, 1, 2))(*args)))(*args)

    got, expected = values_and_gradients(sharded), values_and_gradients(dense)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_each_rank_of_the_layers_computes_its_vocabulary_range():
    V, D, tp_size = 37, 6, 4
    table, bias, x = table_bias_and_x(V, D)
    tokens = np.random.default_rng(0).integers(V, size=(4, 3))
    embeddings, logits = [], []
    for rank in range(tp_size):
        layer = VocabParallelEmbedding(num_embeddings=V, embedding_dim=D, tp_size=tp_size, tp_rank=rank)
        weight = layer.load_weight_shard(table)
        assert weight.shape == (10, D)
        initial = jax.eval_shape(layer.init, jax.random.key(0), tokens)
        assert initial['params']['weight'].shape == (10, D)
        embeddings.append(layer.apply({'params': {'weight': weight}}, tokens))
        np.testing.assert_array_equal(np.any(embeddings[-1], -1), tokens // 10 == rank)  # zeros for ids of other ranks
        head = ParallelLMHead(V, D, tp_size, rank, bias=True)
        params = {'weight': head.load_weight_shard(table), 'bias': head.load_weight_shard(bias)}
        logits.append(head.apply({'params': params}, x))
        last = head.apply({'params': params}, x, jnp.array([2, 0, 1, 2]))
        np.testing.assert_allclose(last[:, 0], logits[-1][np.arange(4), [2, 0, 1, 2]], atol=1e-6)
    np.testing.assert_array_equal(sum(embeddings), table[tokens])
    logits = np.concatenate(logits, -1)
    np.testing.assert_allclose(logits[..., :V], x @ table.T + bias, atol=1e-5)
    assert (logits[..., V:] == -np.inf).all()
    low = VocabParallelEmbedding(V, D, dtype='bfloat16')
    assert low.apply({'params': {'weight': table}}, tokens).dtype == jnp.bfloat16
    with pytest.raises(UserError, match='table of 36 rows is not one of 37'):
        head.load_weight_shard(table[:-1])


def test_logits_are_gathered_on_request_only():
    mesh = create_mesh(jax.devices(), 4)
    lm_head, x = ParallelLMHead(40, 6, 4), jnp.ones((2, 3, 6))
    params = {'params': {'weight': jax.random.normal(jax.random.key(0), (40, 6))}}

    def logits(**options):
        return jax.jit(lambda: lm_head.apply(params, x, mesh, method='sharded_forward', **options))()

    assert logits().addressable_shards[0].data.shape[-1] == 10
    assert logits(gathered=True).addressable_shards[0].data.shape == (2, 3, 40)
    assert logits(last_B=jnp.array([0, 2])).shape == (2, 1, 40)
