"""Layers in a loop, gradient checkpointing, attention and the loss in chunks: less memory, and the same results."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_flags import UserError
from jax_ops.layers import map_sequence_chunks
from jax_train_utils import create_train_state
from jax_transformer import GPT, GPTConfig, MLAConfig
from tests.common import make_step, random_params, random_tokens

DEEP = GPTConfig(block_size=32, vocab_size=37, n_layer=4, n_head=2, n_embd=64)

# 160 positions: one full chunk of attention and a shorter one
LONG_BLOCK = GPTConfig(block_size=160, vocab_size=37, n_layer=1, n_head=2, n_embd=16)


@functools.cache
def compiled(config, loss_chunk=0):
    """(the compiled loss and gradients of a batch of two sequences, its arguments)."""
    def mean_loss(params, idx):
        return GPT(config).apply(
            {'params': params}, idx[:, :-1], idx[:, 1:], loss_chunk=loss_chunk, deterministic=False,
            seq_id_B=jnp.array([5, 9]), rngs={'dropout': jax.random.key(1)}, method='loss').mean()

    args = random_params(config), random_tokens(2, config.block_size + 1, config=config)
    return jax.jit(jax.value_and_grad(mean_loss)).lower(*args).compile(), args


@functools.cache
def loss_and_gradients(config, loss_chunk=0):
    step, args = compiled(config, loss_chunk)
    return step(*args)


def temporary_bytes(config, loss_chunk=0):
    step, _ = compiled(config, loss_chunk)
    return step.memory_analysis().temp_size_in_bytes


def assert_same_loss_and_gradients(one, other, tolerance):
    """The tolerance is relative: for the loss to its value, for a gradient to the largest of its parameter."""
    def check(path, a, b):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * np.abs(a).max(), err_msg=jax.tree_util.keystr(path))

    np.testing.assert_allclose(one[0], other[0], rtol=tolerance)
    jax.tree.map_with_path(check, one[1], other[1])


# -----------------------------------------------------------------------------
# layers

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


# -----------------------------------------------------------------------------
# attention

@pytest.mark.slow
@pytest.mark.parametrize('attention', ['xla', 'chunked'])
def test_attention_in_bfloat16_is_attention(attention):
    low = dataclasses.replace(LONG_BLOCK, dtype='bfloat16', attention=attention)
    assert_same_loss_and_gradients(loss_and_gradients(LONG_BLOCK), loss_and_gradients(low), 0.05)


@pytest.mark.slow
def test_chunked_attention_never_holds_all_scores():
    config = dataclasses.replace(LONG_BLOCK, block_size=512, n_head=8)
    assert temporary_bytes(dataclasses.replace(config, attention='chunked')) < temporary_bytes(config) / 2


FAMILIES = {
    'capped scores, a window': dict(
        attention_cap=1.5, attention_scale=2.0, layer_types=('window',), window=40, n_kv_head=1),
    'a window across blocks, sinks': dict(layer_types=('window',), window=129, sinks=True, n_kv_head=2),
    'chunks': dict(layer_types=('chunk',), chunk=48, n_kv_head=2),
    'latent attention': dict(position='rope', mla=MLAConfig(q_rank=0, kv_rank=32, nope_dim=8, rope_dim=4, v_dim=6))}


@pytest.mark.slow
@pytest.mark.parametrize('family, dropout', [
    ('capped scores, a window', 0.0), ('a window across blocks, sinks', 0.2), ('chunks', 0.0),
    ('latent attention', 0.0), ('latent attention', 0.2)])
def test_chunked_attention_is_attention_in_every_family(family, dropout):
    config = dataclasses.replace(LONG_BLOCK, n_head=4, dropout=dropout, **FAMILIES[family])
    chunked = dataclasses.replace(config, attention='chunked')
    assert_same_loss_and_gradients(loss_and_gradients(config), loss_and_gradients(chunked), 2e-5)
    if family == 'latent attention' and dropout:  # which is active
        without = dataclasses.replace(config, dropout=0.0)
        assert abs(loss_and_gradients(config)[0] - loss_and_gradients(without)[0]) > 0.01


def test_cudnn_attention_refuses_capped_scores():
    with pytest.raises(UserError, match='no sinks, cap of scores or packed rows'):
        compiled(dataclasses.replace(LONG_BLOCK, attention='cudnn', attention_cap=50.0))


@pytest.mark.parametrize('attention', ['cudnn', 'splash'])
def test_flash_attention_refuses_dropout(attention):
    with pytest.raises(UserError, match=f'{attention} attention has no dropout'):
        compiled(dataclasses.replace(LONG_BLOCK, attention=attention, dropout=0.1))


# -----------------------------------------------------------------------------
# the loss

@pytest.mark.slow
def test_the_loss_in_chunks_is_the_loss_and_holds_no_logits():
    config = dataclasses.replace(LONG_BLOCK, vocab_size=4096)
    full, chunked = loss_and_gradients(config), loss_and_gradients(config, loss_chunk=32)
    assert_same_loss_and_gradients(full, chunked, 1e-4)
    logits_bytes = 4 * 2 * 160 * 4096  # float32 [B, T, V]
    table_bytes = 4 * 4096 * 16
    assert temporary_bytes(config) > logits_bytes
    assert temporary_bytes(config, loss_chunk=16) - 2 * table_bytes < logits_bytes / 2
    with pytest.raises(UserError, match='loss_chunk=33 does not divide block_size=160'):
        make_step(config, loss_chunk=33)


def test_chunks_of_a_sequence_give_what_the_whole_gives_also_several_arrays():
    x = np.arange(24.0).reshape(2, 12)
    f = lambda x, y: {'sum': x + y, 'is_larger': x > y}
    whole, chunked = f(x, x[::-1]), map_sequence_chunks(f, 4, x, x[::-1])
    for name in whole:
        np.testing.assert_array_equal(whole[name], chunked[name])
