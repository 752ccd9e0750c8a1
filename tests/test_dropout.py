"""Dropout: masks without a pattern, scaled in float32."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops.dropout import flat_index, hash_dropout


@pytest.mark.slow
def test_dropout_in_16_bits_scales_in_float32_and_a_tiny_rate_drops_nothing():
    x = jnp.linspace(1, 2, 1000).astype(jnp.bfloat16).reshape(1, -1)
    key_B = jax.random.split(jax.random.key(0), 1)
    counter = flat_index(x.shape[1:])
    dropped = hash_dropout(x, 0.1, key_B, counter)
    expected = (x.astype(jnp.float32) / np.float32(0.9)).astype(jnp.bfloat16)
    assert dropped.dtype == x.dtype
    np.testing.assert_array_equal(dropped[dropped != 0], expected[dropped != 0])
    assert 50 < (dropped == 0).sum() < 150
    np.testing.assert_array_equal(hash_dropout(x, 1e-10, key_B, counter), x)


@pytest.mark.slow
def test_dropped_elements_have_no_pattern():
    ones, keys = jnp.ones((8, 64, 512)), jax.random.split(jax.random.key(0), 8)
    kept = np.asarray(hash_dropout(ones, 0.2, keys, flat_index((64, 512)))) > 0
    noise = (kept - 0.8) / 0.4  # mean 0, standard deviation 1
    for axis in (0, 1, 2):  # the mean of n independent elements has a standard deviation of n**-0.5
        n = kept.shape[axis]
        assert noise.mean(axis).std() * n**0.5 == pytest.approx(1, abs=0.06)
    for a, b in ((noise[:, :, 1:], noise[:, :, :-1]), (noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]),
                 (noise[:, :, 8:], noise[:, :, :-8])):
        assert abs((a * b).mean()) < 5 / a.size**0.5  # neighbours and sequences are uncorrelated
