"""Matrix multiplication and the kernels of linear()."""
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops.cpu import cpu_multiplies_uint8
from jax_ops.matmul import matmul, matmul_nt, quantize

# -----------------------------------------------------------------------------
# matmul

def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def test_matmul_has_the_gradients_of_the_plain_one():
    x, kernel = normal(3, 5, 7), normal(7, 11)
    plain = jax.jit(jax.grad(lambda x, k: jnp.sin(x @ k).sum(), (0, 1)))(x, kernel)
    ours = jax.jit(jax.grad(lambda x, k: jnp.sin(matmul(x, k)).sum(), (0, 1)))(x, kernel)
    for a, b in zip(plain, ours):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 0.01)])
@pytest.mark.parametrize('x_shape, y_shape, transpose_rhs', [
    ((3, 5, 7), (7, 11), False),
    ((3, 5, 7), (11, 7), True),
    ((3, 5, 7), (3, 11, 7), True),
    ((3, 5, 70), (3, 70, 2), False)])
def test_matmul_has_the_values_and_gradients_of_the_plain_one_in_every_layout(
        dtype, tolerance, x_shape, y_shape, transpose_rhs):
    x, y = normal(*x_shape), normal(*y_shape)

    def plain(x, y):
        return jnp.sin(x @ (y.swapaxes(-1, -2) if transpose_rhs else y)).sum()

    def ours(x, y):
        return jnp.sin(matmul(x.astype(dtype), y, transpose_rhs=transpose_rhs, dtype=jnp.float32)).sum()

    rounded = (a.astype(jnp.dtype(dtype)).astype(np.float32) for a in (x, y))
    expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(*rounded)
    got = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, y)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got)):
        assert b.dtype == jnp.float32  # the gradient of a float32 kernel is not rounded to bfloat16
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(a).max() + tolerance)


def test_bfloat16_matmul_and_its_weight_gradient_accumulate_in_float32():
    x, y = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 1))
    assert matmul(x, y, dtype=jnp.float32).item() == 4096  # in bfloat16 the sum would stop at 256
    weight_gradient = jax.grad(lambda y: matmul(x.T, y, dtype=jnp.float32).sum())(jnp.ones((1, 1)))
    assert weight_gradient.item() == 4096


@pytest.mark.parametrize('dtype, tolerance', [('float32', 2e-6), ('bfloat16', 0.01)])
def test_matmul_with_transposed_weights_is_a_matmul_for_any_number_of_rows(dtype, tolerance):
    w = normal(1000, 96)
    for n_rows in (1, 2, 4, 5, 16, 64, 65):
        x = normal(n_rows, 96)
        got = jax.jit(matmul_nt)(x.astype(jnp.dtype(dtype)), w)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, np.float64(x) @ np.float64(w).T, rtol=0, atol=tolerance * np.abs(got).max())

# -----------------------------------------------------------------------------
# int8

def test_quantization_rounds_to_the_nearest_of_255_steps_of_each_row():
    x = jnp.array([[0.0, 0.5, -1.27, 0.004], [0.0, 0.0, 0.0, 0.0], [1e4, -254.0, 1.0, 0.0]])
    values, scale = quantize(x, jnp.int8)
    assert values.tolist() == [[0, 50, -127, 0], [0, 0, 0, 0], [127, -3, 0, 0]]
    error = np.abs(values * scale[:, None] - x).max(-1)
    assert (error <= scale / 2 * 1.0001).all()


@pytest.mark.skipif(sys.platform != 'linux' or 'avx512_vnni' not in Path('/proc/cpuinfo').read_text(),
                    reason='knows of no such matmul on this CPU')
def test_a_cpu_with_vnni_multiplies_uint8():
    assert cpu_multiplies_uint8()
