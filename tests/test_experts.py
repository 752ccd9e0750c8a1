"""Tokens reach their experts, and come back."""
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_devices.choose import choose_experts
from jax_ops.experts import block_sizes, grouped_experts, mix_experts
from jax_ops.layers import EXPERT_WAYS
from jax_ops.matmul import Int8, Transposed, linear, quantize
from jax_ops.sharding import BATCH, EXPERTS, create_mesh

# -----------------------------------------------------------------------------
# the same results in every way

E, D, F = 4, 64, 128
ROUTINGS = {
    'one row': [2],
    'fewer rows than experts': [1, 1, 3],
    'all rows to one expert': [2] * 70,
    'an expert without rows': [0, 1, 3] * 23 + [1],
    'rows of experts that are elsewhere': [-1, 4] * 20 + [1] * 30,
    'a block for each expert': [0, 1, 2, 3] * 17,
}


def random_experts(rng):
    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32) / 8

    return {'up': {'kernel': draw(E, D, F), 'bias': draw(E, F)}, 'down': {'kernel': draw(E, F, D), 'bias': draw(E, D)}}


def mlp(weights, x):
    return linear(jnp.tanh(linear(x, **weights['up'])), **weights['down'])


def each_row_by_its_expert(weights, x_RxD, expert_R):
    """The plain formula: the matrices of its expert for every row."""
    is_here_Rx1 = ((expert_R >= 0) & (expert_R < E))[:, None]
    matrix_R = np.clip(expert_R, 0, E - 1)
    up, down = ({name: w[matrix_R] for name, w in weights[layer].items()} for layer in ('up', 'down'))
    h_RxF = jnp.tanh(jnp.einsum('rd,rdf->rf', x_RxD, up['kernel']) + up['bias'])
    y_RxD = jnp.einsum('rf,rfd->rd', h_RxF, down['kernel']) + down['bias']
    return jnp.where(is_here_Rx1, y_RxD, 0)


@pytest.mark.parametrize('routing', ROUTINGS)
def test_every_way_has_the_values_and_gradients_of_the_plain_formula(routing):
    rng = np.random.default_rng(0)
    expert_R = np.array(ROUTINGS[routing])
    weights, x_RxD = random_experts(rng), rng.normal(size=(len(expert_R), D)).astype(np.float32)

    def results(apply):
        def total(weights, x_RxD):
            y_RxD = apply(weights, x_RxD)
            return jnp.sin(y_RxD).sum(), y_RxD

        return jax.tree.leaves(jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(weights, x_RxD))

    expected = results(lambda *args: each_row_by_its_expert(*args, expert_R))
    for way in EXPERT_WAYS:
        got = results(lambda *args: grouped_experts(mlp, *args, jnp.asarray(expert_R), way))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4, err_msg=way)


def test_every_way_takes_experts_as_decoding_stores_them():
    rng = np.random.default_rng(0)
    weights, x = random_experts(rng), rng.normal(size=(30, D)).astype(np.float32)
    expert = jnp.asarray(rng.integers(E, size=30))
    expected = grouped_experts(mlp, weights, x, expert, 'loop')
    transposed, int8 = {}, {}
    for layer, w in weights.items():
        kernel_ExOxI = jnp.asarray(w['kernel'].swapaxes(1, 2))
        transposed[layer] = w | {'kernel': Transposed(kernel_ExOxI)}
        int8[layer] = w | {'kernel': Int8(*quantize(kernel_ExOxI, jnp.int8))}
    for way in EXPERT_WAYS:
        apply = jax.jit(lambda weights: grouped_experts(mlp, weights, x, expert, way))
        np.testing.assert_allclose(apply(transposed), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(apply(int8), expected, rtol=0, atol=0.1)


def test_a_mesh_computes_its_experts_in_every_way():
    rng = np.random.default_rng(0)
    weights, x = random_experts(rng), rng.normal(size=(64, D)).astype(np.float32)
    expert, weight = rng.integers(E, size=(64, 2)), rng.random((64, 2)).astype(np.float32)
    expected = mix_experts(mlp, weights, x, expert, weight)
    mesh = create_mesh(jax.devices(), 1, expert=2)
    for way in EXPERT_WAYS:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            got = jax.jit(lambda *args: mix_experts(mlp, *args, way=way))(
                jax.device_put(weights, NamedSharding(mesh, P(EXPERTS))),
                *jax.device_put((x, expert, weight), NamedSharding(mesh, P(BATCH))))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=way)


@pytest.mark.parametrize('n_tokens', [1, 2, 8])
def test_a_mesh_computes_few_rows_of_int8_experts_as_one_device_does(n_tokens):
    rng = np.random.default_rng(0)
    kernel_ExOxI = jnp.asarray(rng.normal(size=(8, 96, 96)).astype(np.float32))
    weights = {'kernel': Int8(*quantize(kernel_ExOxI, jnp.int8)), 'bias': jnp.zeros((8, 96))}
    x = rng.normal(size=(n_tokens, 96)).astype(np.float32)
    expert, weight = rng.integers(8, size=(n_tokens, 2)), np.ones((n_tokens, 2), np.float32)

    def compute():
        mix = jax.jit(lambda *args: mix_experts(lambda w, x: linear(x, **w), *args))
        return np.asarray(mix(weights, x, expert, weight))

    expected = compute()
    with jax.set_mesh(create_mesh(jax.devices()[:2], 1, expert=2)):
        np.testing.assert_allclose(compute(), expected, rtol=0, atol=1e-4)


def test_arrays_hold_every_routing_and_little_more():
    for n_rows, n_experts in ((1, 16), (15, 16), (16, 16), (1000, 16), (24576, 16), (24576, 128)):
        b, n = block_sizes('batched', n_rows, n_experts)
        # the worst routing: all experts but one have one row
        fullest = n_rows - min(n_experts, n_rows) + 1
        assert n >= min(n_experts, n_rows) - 1 + -(-fullest // b)
        if n_rows >= 64 * n_experts:
            assert n * b <= 1.25 * n_rows


@pytest.mark.parametrize('platform, way, reason', [
    ('cpu', 'loop', 'cache'),
    ('tpu', 'batched', 'no loop over experts'),
    ('gpu', 'batched', 'no loop over experts'),
])
def test_the_way_is_chosen_by_device_with_its_reason(platform, way, reason):
    chosen, why = choose_experts(types.SimpleNamespace(platform=platform))
    assert chosen == way and reason in why
