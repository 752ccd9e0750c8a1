"""Tokens reach their experts, and come back."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ops.experts import mix_experts
from jax_ops.sharding import BATCH, EXPERTS, create_mesh
from tests.common import collectives, sizes_of

# -----------------------------------------------------------------------------
# the same run on every layout

@pytest.mark.parametrize('n_used, tensor', [
    (1, 1), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_tokens_sent_to_their_experts_give_the_values_and_gradients_of_one_device_for_every_routing(n_used, tensor):
    E, D, F, M, C, n_tokens = 16, 8, 12, 8 // tensor, 64, 8 // tensor * 128
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    weights, x, weight = {'up': draw(E, D, F), 'down': draw(E, F, D)}, draw(n_tokens, D), draw(n_tokens, n_used)
    balanced = rng.random((n_tokens, E)).argsort()[:, :n_used].astype(np.int32)
    to_one_rank = np.tile(np.arange(n_used, dtype=np.int32), (n_tokens, 1))  # in two rounds of C rows
    some_to_one_rank = np.where(np.arange(n_tokens)[:, None] < 128, to_one_rank, balanced)  # those of one device
    mesh = create_mesh(jax.devices(), tensor, expert=M)

    def expert_mlp(w, x):
        return jnp.tanh(x @ w['up']) @ w['down']

    def total(weights, x, weight, expert):
        y = mix_experts(expert_mlp, weights, x, expert, weight)
        return jnp.sin(y).sum(), y

    gradients_and_values = jax.grad(total, (0, 1, 2), has_aux=True)

    def on_mesh(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return gradients_and_values(*args)

    def arguments(expert):
        tokens = jax.device_put((x, weight, expert), NamedSharding(mesh, P(BATCH)))
        return jax.device_put(weights, NamedSharding(mesh, P(EXPERTS))), *tokens

    program = jax.jit(on_mesh).lower(*arguments(balanced)).compile()
    for expert in balanced, to_one_rank, some_to_one_rank:
        got, expected = program(*arguments(expert)), jax.jit(gradients_and_values)(weights, x, weight, expert)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    first_round = next(part for part in program.as_text().split('\n\n') if part.startswith('ENTRY'))
    found = collectives(first_round)
    assert sum(sizes_of(found, 'all-to-all')) == 4 * M * C * D + 3 * M * C * n_used  # there and back, with gradients
    assert not sizes_of(found, 'all-gather', 'reduce-scatter')
