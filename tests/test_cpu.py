"""Loops shaped for XLA:CPU compute what they replace."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops.cpu
from jax_ops.cpu import cpu_multiplies_uint8, float_lane_terms, int16_levels
from jax_ops.decode_weights import convert_params_for_decoding, quantize_params
from jax_ops.experts import experts_one_by_one, grouped_experts
from jax_ops.matmul import Int8, Transposed, as_int8, as_uint8, linear, matmul_int8, matmul_nt, quantize

# -----------------------------------------------------------------------------
# int8

def skip_without_matmul_of(dtype):
    """Skips a test of weights stored as uint8 where XLA has no matmul for them: decoding then stores int8."""
    if dtype == 'uint8' and not cpu_multiplies_uint8():
        pytest.skip('XLA has no matmul of uint8 by int8 for this CPU')


def operands(rows, width):
    """x [rows, width] with an outlier, as the activations of real models have them, and w [40, width] in int8."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, width), (40, width)))
    x[:, 3] *= 100
    return x, *jax.jit(quantize, static_argnums=1)(w, jnp.int8)


def stored(weights, dtype):
    skip_without_matmul_of(dtype)
    return as_uint8(weights) if dtype == 'uint8' else weights


@pytest.mark.parametrize('stored_as', ['int8', 'uint8'])
@pytest.mark.parametrize('rows', [1, 4, 33, 65])
def test_int8_weights_are_all_that_an_int8_matmul_rounds_visibly(rows, stored_as):
    x, weights, scale = operands(rows, 768)
    exact = np.float64(x) @ (np.float64(weights) * np.float64(scale)[:, None]).T
    got = jax.jit(matmul_int8)(x, stored(weights, stored_as), scale)
    # in int8, x would give 3e-2; many rows by uint8 are in bfloat16
    tolerance = 3e-3 if rows > 64 and stored_as == 'uint8' else 1e-3
    np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance * np.abs(exact).max())


@pytest.mark.parametrize('rows', [4, 65])
def test_a_row_that_is_not_a_number_leaves_the_other_rows_as_they_are(rows):
    x, weights, scale = operands(rows, 768)
    spoiled = x.copy()
    spoiled[0, 0] = np.nan
    multiply, w = jax.jit(matmul_int8), stored(weights, 'uint8')
    got = multiply(spoiled, w, scale)
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1:], multiply(x, w, scale)[1:])


def test_a_prompt_in_bfloat16_differs_from_int8_weights_by_the_rounding_of_x_alone():
    x, weights, scale = operands(65, 768)
    exact = np.float64(x.astype(jnp.bfloat16)) @ (np.float64(weights) * np.float64(scale)[:, None]).T
    got = jax.jit(matmul_int8)(x, stored(weights, 'uint8'), scale)
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


# one row of width 24 is padded to four rows; of 256 and 1536 it takes the matvec of 32 lanes, with 8 and 24 terms each
@pytest.mark.parametrize('stored_as', ['int8', 'uint8'])
@pytest.mark.parametrize('width', [24, 256, 1536])
@pytest.mark.parametrize('rows', [1, 3, 4, 5, 16, 17, 32])
def test_matmul_int8_equals_that_of_the_quantized_operands(rows, width, stored_as):
    x, weights, scale = operands(rows, width)
    inputs, x_scale = jax.jit(quantize, static_argnums=(1, 2))(x, jnp.int16, int16_levels(width))
    expected = np.float64(inputs) @ np.float64(weights).T * np.float64(x_scale)[:, None] * np.float64(scale)
    weights = stored(weights, stored_as)
    multiply = jax.jit(matmul_int8)
    got = multiply(x, weights, scale)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(got[:1], multiply(x[:1], weights, scale))  # independent of the batch size
    assert not np.any(multiply(0 * x, weights, scale))


@pytest.mark.parametrize('stored_as', ['int8', 'uint8'])
@pytest.mark.parametrize('weight', [-127, 127])
def test_sums_of_int16_activations_and_int8_weights_do_not_overflow(weight, stored_as):
    x, w = np.full((2, 3072), -3.0, np.float32), stored(np.full((40, 3072), weight, np.int8), stored_as)
    for rows in (1, 2):
        got = jax.jit(matmul_int8)(x[:rows], w, np.ones(40, np.float32))
        np.testing.assert_allclose(got, -3 * weight * 3072, rtol=1e-6)


def test_uint8_is_int8_plus_128():
    x = np.arange(-128, 128).astype(np.int8)
    assert as_uint8(x).tolist() == [*range(256)]
    assert as_int8(as_uint8(x)).tolist() == x.tolist()


def test_where_xla_has_no_matmul_of_uint8_by_int8_weights_stay_int8(monkeypatch):
    def refuse(*operands):
        raise jax.errors.JaxRuntimeError('INTERNAL: no such matmul')

    monkeypatch.setattr(jax_ops.cpu.nt_uint8(), 'bind', refuse)
    cpu_multiplies_uint8.cache_clear()
    params = {'wte': np.ones((40, 64), np.float32)}
    assert convert_params_for_decoding(params, 'float32', 'int8')['wte'].values.dtype == jnp.int8
    cpu_multiplies_uint8.cache_clear()

# -----------------------------------------------------------------------------
# rows in bfloat16, and loops without copies

@pytest.mark.parametrize('n_out, n_in', [
    (96, 128), (40, 144), (31, 192), (1, 512), (40, 576), (16, 3072)])
def test_one_bfloat16_row_is_multiplied_without_rounding_products_or_sums(n_out, n_in):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(n, n_in)).astype(jnp.bfloat16) for n in (1, n_out))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert float_lane_terms(n_in)
    np.testing.assert_allclose(jax.jit(matmul_nt)(x, w), expected, rtol=0, atol=1e-4)
    for position in (0, n_in - 1):
        spoiled = x.copy()
        spoiled[0, position] = np.nan
        assert np.isnan(jax.jit(matmul_nt)(spoiled, w)).all()


@pytest.mark.parametrize('n_rows', [1, 2, 65])
def test_bfloat16_rows_of_any_number_and_width_are_multiplied(n_rows):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(n, 136)).astype(jnp.bfloat16) for n in (n_rows, 40))
    assert not float_lane_terms(136)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(jax.jit(matmul_nt)(x, w), expected, rtol=0, atol=1e-4)


def test_a_loop_over_one_bfloat16_row_keeps_no_float32_copy_of_its_weights():
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16) for _ in range(8)]

    def loop(weights, x, n):
        def body(i, x):
            for w in weights:
                x = jnp.tanh(linear(x, w))
                x = jnp.tanh(linear(x, Transposed(w)))
            return jnp.tanh(matmul_nt(x, weights[0]).astype(x.dtype))

        return jax.lax.fori_loop(0, n, body, x)

    x = jax.ShapeDtypeStruct((1, 1, 256), jnp.bfloat16)
    compiled = jax.jit(loop).lower(weights, x, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 256 * 256


@pytest.mark.parametrize('rows, stored_as', [(40, 'int8'), (72, 'uint8')])
def test_a_loop_over_many_rows_keeps_no_float32_copy_of_its_int8_weights(rows, stored_as):
    weights = []
    for _ in range(4):
        weights.append((stored(np.ones((256, 256), np.int8), stored_as), np.ones(256, np.float32)))

    @jax.jit
    def decode(x, weights):
        def step(i, x):
            for w in weights:
                x = matmul_int8(x, *w)
            return x
        return jax.lax.fori_loop(0, 10, step, x)

    compiled = decode.lower(np.ones((rows, 256), np.float32), weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * 256 * 256

# -----------------------------------------------------------------------------
# rows of several experts, in the forms in which weights are stored for a CPU

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


def stored_experts(params, form):
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
    weights = stored_experts(params, form)
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


@pytest.mark.parametrize('n_rows', [2, 8])
@pytest.mark.parametrize('stored_as', ['int8', 'uint8'])
def test_int8_weights_take_bfloat16_rows_whose_rounding_xla_leaves_out(stored_as, n_rows):
    # between two layers XLA:CPU keeps rows in float32 in one use of them, and rounds them in another
    rng = np.random.default_rng(0)
    up, down = (jnp.asarray(rng.normal(size=(96, 96)) / 10, jnp.float32) for _ in range(2))
    up8, down8 = (Int8(*quantize(w_OxI, jnp.int8)) for w_OxI in (up, down))
    if stored_as == 'uint8':
        skip_without_matmul_of('uint8')
        up8, down8 = (Int8(as_uint8(w.values), w.scale) for w in (up8, down8))
    mlp = jax.jit(lambda x, up, down: linear(jax.nn.gelu(linear(x, up)), down))
    x = jnp.asarray(rng.normal(size=(n_rows, 96)), jnp.bfloat16)
    y, expected = mlp(x, up8, down8), mlp(x.astype(jnp.float32), up.T, down.T)
    assert jnp.abs(y.astype(jnp.float32) - expected).max() < 0.05 * jnp.abs(expected).max()


@pytest.mark.parametrize('form', ['float32', 'bfloat16', 'uint8'])
def test_an_odd_number_of_outputs_is_multiplied_too(form):
    weights = stored_experts(stacks(D + 1), form)
    x = jnp.ones((2, D), 'bfloat16' if form == 'bfloat16' else 'float32')

    def project(weights, x):
        return linear(x[:, :F], **weights['experts_c_proj'])

    one_by_one = jax.jit(functools.partial(experts_one_by_one, project))(weights, x, np.array([4, 1]))
    for y, e in zip(one_by_one, (4, 1)):
        expert = jax.tree.map(lambda w: w[e], weights)
        np.testing.assert_allclose(np.float64(y), np.float64(project(expert, x)[0]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize('form', ['float32', 'bfloat16', 'uint8'])
def test_a_decode_step_of_few_tokens_copies_no_experts(form):
    weights = stored_experts(stacks(D), form)

    def step(weights, x, expert):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(grouped_experts(mlp, weights, x, expert + i)), x)

    x = jnp.ones((2, D), 'bfloat16' if form == 'bfloat16' else 'float32')
    compiled = jax.jit(step).lower(weights, x, np.array([1, 2])).compile()
    sums = 0 if form == 'uint8' else 2 * D * 32 * 4  # 32 of each output, which integers need not store
    one_matrix = weights['experts_c_fc']['kernel'].values.dtype.itemsize * D * F
    assert compiled.memory_analysis().temp_size_in_bytes < sums + one_matrix
