"""Experts in decoding: rows of several experts, in the forms in which weights are stored for a CPU."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops.decode_weights import convert_params_for_decoding, quantize_params
from jax_ops.experts import experts_one_by_one, grouped_experts
from jax_ops.matmul import Int8, Transposed, linear
from tests.common import skip_without_matmul_of

E, D, F = 6, 384, 128
ROWS = {
    'one row': [2],
    'fewer rows than experts': [5, 0],
    'all rows on one expert': [3] * E,
    'an expert without rows': [0, 1, 1, 5, 4, 1],
    'many rows': [*range(E - 1)] * 10,  # in blocks
}


def stacks(n_out):
    """Parameters of E MLPs D -> F -> n_out with biases, by the names of MoELayer."""
    rng = np.random.default_rng(0)
    params = {}
    for name, shape in (('experts_c_fc', (D, F)), ('experts_c_proj', (F, n_out))):
        kernel = rng.normal(size=(E, *shape), scale=shape[0]**-0.5).astype(np.float32)
        params[name] = {'kernel': kernel, 'bias': rng.normal(size=(E, shape[1])).astype(np.float32)}
    return params


def stored(params, form):
    """The parameters as convert_params_for_decoding stores them for a CPU."""
    if 'int8' in form:
        skip_without_matmul_of(form)
        return quantize_params(params, jnp.dtype(form))
    return convert_params_for_decoding(dict(params), form)


def mlp(weights, x):
    return linear(jnp.tanh(linear(x, **weights['experts_c_fc'])), **weights['experts_c_proj'])


@pytest.mark.parametrize('form, kind, tolerance', [
    ('float32', Transposed, 1e-6), ('bfloat16', Transposed, 0.01), ('int8', Int8, 0.02), ('uint8', Int8, 0.02)])
def test_every_row_is_multiplied_with_the_weights_of_its_expert_in_every_form_of_decoding(form, kind, tolerance):
    params = stacks(D)
    weights = stored(params, form)
    assert isinstance(weights['experts_c_proj']['kernel'], kind)
    up, down = (jax.tree.map(np.float64, params[name]) for name in ('experts_c_fc', 'experts_c_proj'))
    for rows in ROWS.values():
        x = np.random.default_rng(len(rows)).normal(size=(len(rows), D)).astype(np.float32)
        x = jnp.asarray(x, 'bfloat16' if form == 'bfloat16' else 'float32')
        want = []
        for row, e in zip(np.float64(x), rows):
            h = np.tanh(row @ up['kernel'][e] + up['bias'][e])
            want.append(h @ down['kernel'][e] + down['bias'][e])
        got = jax.jit(functools.partial(grouped_experts, mlp))(weights, x, np.array(rows))
        assert got.dtype == x.dtype
        np.testing.assert_allclose(np.float64(got), want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize('form', ['float32', 'bfloat16', 'uint8'])
def test_an_odd_number_of_outputs_is_multiplied_too(form):
    weights = stored(stacks(D + 1), form)
    x = jnp.ones((2, D), 'bfloat16' if form == 'bfloat16' else 'float32')

    def project(weights, x):
        return linear(x[:, :F], **weights['experts_c_proj'])

    one_by_one = jax.jit(functools.partial(experts_one_by_one, project))(weights, x, np.array([4, 1]))
    for y, e in zip(one_by_one, (4, 1)):
        expert = jax.tree.map(lambda w: w[e], weights)
        np.testing.assert_allclose(np.float64(y), np.float64(project(expert, x)[0]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize('form', ['float32', 'bfloat16', 'uint8'])
def test_a_decode_step_of_few_tokens_copies_no_experts(form):
    weights = stored(stacks(D), form)

    def step(weights, x, expert):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(grouped_experts(mlp, weights, x, expert + i)), x)

    x = jnp.ones((2, D), 'bfloat16' if form == 'bfloat16' else 'float32')
    compiled = jax.jit(step).lower(weights, x, np.array([1, 2])).compile()
    sums = 0 if form == 'uint8' else 2 * D * 32 * 4  # 32 of each output, which integers need not store
    one_matrix = weights['experts_c_fc']['kernel'].values.dtype.itemsize * D * F
    assert compiled.memory_analysis().temp_size_in_bytes < sums + one_matrix
