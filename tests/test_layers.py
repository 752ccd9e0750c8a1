"""Layers in a loop, gradient checkpointing."""
import dataclasses
from tests.common import random_params

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_train_utils import create_train_state
from jax_transformer import GPT, GPTConfig
from tests.common import LONG_BLOCK, assert_same_loss_and_gradients, loss_and_gradients, temporary_bytes


DEEP = GPTConfig(block_size=32, vocab_size=37, n_layer=4, n_head=2, n_embd=64)


# -----------------------------------------------------------------------------
# memory: the loss in chunks, scanned layers, gradient checkpointing

@pytest.mark.slow
def test_scanned_layers_are_the_layers():
    scanned = dataclasses.replace(DEEP, scan_layers=True)
    assert_same_loss_and_gradients(loss_and_gradients(DEEP), loss_and_gradients(scanned), 1e-4)
    assert set(random_params(scanned)) == {'wte', 'wpe', 'ln_f', 'h_0', 'h_1', 'h_2', 'h_3'}


@pytest.mark.slow
def test_scanned_layers_drop_and_recompute_the_same_elements():
    scanned = dataclasses.replace(DEEP, scan_layers=True)
    dropping = dataclasses.replace(scanned, dropout=0.3)
    recomputing = dataclasses.replace(dropping, remat='full')
    assert abs(loss_and_gradients(dropping)[0] - loss_and_gradients(scanned)[0]) > 0.01
    assert_same_loss_and_gradients(loss_and_gradients(dropping), loss_and_gradients(recomputing), 1e-4)


@pytest.mark.slow
def test_scanned_layers_are_compiled_once_for_any_depth():
    def n_matmuls(n_layer, *, scan_layers):
        config = dataclasses.replace(LONG_BLOCK, n_layer=n_layer, scan_layers=scan_layers)
        make = lambda: create_train_state(jax.random.key(0), config, optax.identity())
        run = lambda params: GPT(config).apply({'params': params}, jnp.zeros((1, 8), jnp.int32))
        return jax.jit(run).lower(jax.eval_shape(make).params).as_text().count('dot_general')

    assert n_matmuls(2, scan_layers=True) == n_matmuls(9, scan_layers=True)
    assert n_matmuls(2, scan_layers=True) < n_matmuls(2, scan_layers=False)
    assert n_matmuls(2, scan_layers=False) < n_matmuls(9, scan_layers=False)


@pytest.mark.slow
@pytest.mark.parametrize('scan_layers', [False, True])
def test_remat_keeps_less_and_computes_the_same(scan_layers):
    config = dataclasses.replace(DEEP, scan_layers=scan_layers)
    needs = {}
    for remat in ('none', 'dots', 'full') if scan_layers else ('none', 'full'):
        changed = dataclasses.replace(config, remat=remat)
        assert_same_loss_and_gradients(loss_and_gradients(DEEP), loss_and_gradients(changed), 1e-4)
        needs[remat] = temporary_bytes(changed)
    if scan_layers or jax.__version_info__ >= (0, 11):  # unrolled, jaxlib 0.10 recomputes long before it is needed
        assert all(needs[remat] < needs['none'] for remat in needs if remat != 'none'), needs
