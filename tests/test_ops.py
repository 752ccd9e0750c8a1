"""What jax_ops.py promises: each way to compute something gives the values and gradients of its plain equivalent.

tests/test_parallel.py has the tests of sharding and of the vocabulary-parallel layers."""
import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ops
from jax_flags import UserError
from jax_generate import convert_params_for_decoding
from jax_ops import (
    BATCH, Transposed, as_int8, as_uint8, bfloat16_lane_terms, blockwise_attention, causal_mask, chunked_attention,
    cpu_multiplies_uint8, create_mesh, flat_index, fused_causal_attention, hash_dropout, int16_levels, linear, matmul,
    matmul_int8, matmul_nt, quantize, splash_attention, splash_kernel)
from jax_train_utils import make_train_step
from jax_transformer import GPT, GPTConfig, MLAConfig, create_train_state, dot_product_attention
from tests.common import random_params, random_tokens, skip_without_matmul_of

# 160 positions: one full chunk of attention and a shorter one
CONFIG = GPTConfig(block_size=160, vocab_size=37, n_layer=1, n_head=2, n_embd=16)
DEEP = GPTConfig(block_size=32, vocab_size=37, n_layer=4, n_head=2, n_embd=64)


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
# matmul


def test_matmul_has_the_gradients_of_the_plain_one():
    x, kernel = jax.random.normal(jax.random.key(0), (3, 5, 7)), jax.random.normal(jax.random.key(1), (7, 11))
    plain = jax.grad(lambda x, k: jnp.sin(x @ k).sum(), (0, 1))(x, kernel)
    ours = jax.grad(lambda x, k: jnp.sin(matmul(x, k)).sum(), (0, 1))(x, kernel)
    for a, b in zip(plain, ours):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_switch_turns_on_jaxs_own_matmul_gradients(monkeypatch):
    def program():
        return str(jax.make_jaxpr(lambda x, y: matmul(x, y))(jnp.ones((3, 5)), jnp.ones((5, 7))))

    assert 'custom_vjp' in program()
    monkeypatch.setattr(jax_ops, 'CUSTOM_MATMUL_GRADIENTS', False)
    assert 'custom_vjp' not in program()


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 0.01)])
@pytest.mark.parametrize('x_shape, y_shape, transpose_rhs', [
    ((3, 5, 7), (7, 11), False),
    ((3, 5, 7), (11, 7), True),
    ((3, 5, 7), (3, 11, 7), True),
    ((3, 5, 70), (3, 70, 2), False)])
def test_matmul_has_the_values_and_gradients_of_the_plain_one_in_every_layout(
        dtype, tolerance, x_shape, y_shape, transpose_rhs):
    x, y = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((x_shape, y_shape)))

    def plain(x, y):
        return jnp.sin(x @ (y.swapaxes(-1, -2) if transpose_rhs else y)).sum()

    def ours(x, y):
        return jnp.sin(matmul(x.astype(dtype), y, transpose_rhs=transpose_rhs, dtype=jnp.float32)).sum()

    rounded = (a.astype(dtype).astype(jnp.float32) for a in (x, y))
    expected = jax.value_and_grad(plain, (0, 1))(*rounded)
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
    w = jax.random.normal(jax.random.key(1), (1000, 96))
    for n_rows in (1, 2, 4, 5, 16, 64, 65):
        x = jax.random.normal(jax.random.key(0), (n_rows, 96))
        got = jax.jit(matmul_nt)(x.astype(dtype), w)
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


def operands(rows, width):
    """x [rows, width] with an outlier, as the activations of real models have them, and w [40, width] in int8."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, width), (40, width)))
    x[:, 3] *= 100
    return x, *quantize(w, jnp.int8)


def stored(weights, dtype):
    skip_without_matmul_of(dtype)
    return as_uint8(weights) if dtype == 'uint8' else weights


# one row of width 24 is padded to four rows; of 256 and 1536 it takes the matvec of 32 lanes, with 8 and 24 terms each
@pytest.mark.parametrize('stored_as', ['int8', 'uint8'])
@pytest.mark.parametrize('width', [24, 256, 1536])
@pytest.mark.parametrize('rows', [1, 3, 4, 5, 16, 17, 32])
def test_int8_matmul_equals_that_of_the_quantized_operands(rows, width, stored_as):
    x, weights, scale = operands(rows, width)
    inputs, x_scale = quantize(x, jnp.int16, int16_levels(width))
    expected = np.float64(inputs) @ np.float64(weights).T * np.float64(x_scale)[:, None] * np.float64(scale)
    weights = stored(weights, stored_as)
    multiply = jax.jit(matmul_int8)
    got = multiply(x, weights, scale)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(got[:1], multiply(x[:1], weights, scale))  # independent of the batch size
    assert not multiply(0 * x, weights, scale).any()


@pytest.mark.parametrize('stored_as', ['int8', 'uint8'])
@pytest.mark.parametrize('weight', [-127, 127])
def test_sums_of_int16_activations_and_int8_weights_do_not_overflow(weight, stored_as):
    x, w = np.full((2, 3072), -3.0, np.float32), stored(np.full((40, 3072), weight, np.int8), stored_as)
    for rows in (1, 2):
        np.testing.assert_allclose(matmul_int8(x[:rows], w, np.ones(40, np.float32)), -3 * weight * 3072, rtol=1e-6)


@pytest.mark.parametrize('stored_as', ['int8', 'uint8'])
@pytest.mark.parametrize('rows', [1, 4, 33, 65])
def test_int8_weights_are_all_that_an_int8_matmul_rounds_visibly(rows, stored_as):
    x, weights, scale = operands(rows, 768)
    exact = np.float64(x) @ (np.float64(weights) * np.float64(scale)[:, None]).T
    got = jax.jit(matmul_int8)(x, stored(weights, stored_as), scale)
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-3 * np.abs(exact).max())  # in int8, x would give 3e-2


def test_uint8_is_int8_plus_128():
    x = np.arange(-128, 128).astype(np.int8)
    assert as_uint8(x).tolist() == [*range(256)]
    assert as_int8(as_uint8(x)).tolist() == x.tolist()


@pytest.mark.skipif(sys.platform != 'linux' or 'avx512_vnni' not in Path('/proc/cpuinfo').read_text(),
                    reason='knows of no such matmul on this CPU')
def test_a_cpu_with_vnni_multiplies_uint8():
    assert cpu_multiplies_uint8()


def test_where_xla_has_no_matmul_of_uint8_by_int8_weights_stay_int8(monkeypatch):
    def refuse(*operands):
        raise jax.errors.JaxRuntimeError('INTERNAL: no such matmul')

    monkeypatch.setattr(jax_ops.nt_uint8(), 'bind', refuse)
    cpu_multiplies_uint8.cache_clear()
    params = {'wte': np.ones((40, 64), np.float32)}
    assert convert_params_for_decoding(params, 'float32', 'int8')['wte'].values.dtype == jnp.int8
    cpu_multiplies_uint8.cache_clear()


# -----------------------------------------------------------------------------
# attention


def test_chunked_attention_is_attention_also_with_dropout():
    config = dataclasses.replace(CONFIG, dropout=0.2)
    chunked = dataclasses.replace(config, attention='chunked')
    assert_same_loss_and_gradients(loss_and_gradients(config), loss_and_gradients(chunked), 2e-4)
    # dropout is active
    assert abs(loss_and_gradients(config)[0] - loss_and_gradients(CONFIG)[0]) > 0.01


@pytest.mark.parametrize('attention', ['xla', 'chunked'])
def test_attention_in_bfloat16_is_attention(attention):
    low = dataclasses.replace(CONFIG, dtype='bfloat16', attention=attention)
    assert_same_loss_and_gradients(loss_and_gradients(CONFIG), loss_and_gradients(low), 0.05)


def test_chunked_attention_never_holds_all_scores():
    config = dataclasses.replace(CONFIG, block_size=512, n_head=8)
    assert temporary_bytes(dataclasses.replace(config, attention='chunked')) < temporary_bytes(config) / 2


FAMILIES = {
    'GQA with a scale of its own': dict(n_kv_head=2, attention_scale=0.3),
    'a window': dict(layer_types=('window',), window=40, n_kv_head=1),
    'a window across blocks, sinks': dict(layer_types=('window',), window=129, sinks=True, n_kv_head=2),
    'chunks': dict(layer_types=('chunk',), chunk=48, n_kv_head=2),
    'latent attention': dict(position='rope', mla=MLAConfig(q_rank=0, kv_rank=32, nope_dim=8, rope_dim=4, v_dim=6))}


@pytest.mark.parametrize('dropout', [0.0, 0.2])
@pytest.mark.parametrize('family', FAMILIES)
def test_chunked_attention_is_attention_in_every_family(family, dropout):
    config = dataclasses.replace(CONFIG, n_head=4, dropout=dropout, **FAMILIES[family])
    chunked = dataclasses.replace(config, attention='chunked')
    assert_same_loss_and_gradients(loss_and_gradients(config), loss_and_gradients(chunked), 2e-5)


def test_attention_in_chunks_is_traced_once_for_all_layers_of_a_kind(monkeypatch):
    traced = []

    def counted_mask(*args, **limits):
        traced.append(args)
        return causal_mask(*args, **limits)

    monkeypatch.setattr(jax_ops, 'causal_mask', counted_mask)

    def n_traced(config):
        traced.clear()
        params = jax.eval_shape(lambda: random_params(config))
        jax.eval_shape(jax.grad(lambda params, idx: GPT(config).apply({'params': params}, idx).sum()), params,
                       jax.ShapeDtypeStruct((1, config.block_size), jnp.int32))
        return len(traced)

    config = dataclasses.replace(CONFIG, block_size=131, attention='chunked')  # a length that no other test has
    assert n_traced(config) > 0
    assert n_traced(dataclasses.replace(config, n_layer=3)) == 0
    assert n_traced(dataclasses.replace(config, layer_types=('window',), window=9)) > 0


def attention_arguments(B, T, H, G, K):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, T, H, K), (B, T, G, K), (B, T, G, K)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)] + [jax.random.normal(keys[3], (H,))]


@pytest.mark.parametrize('spans', [dict(window=40), dict(chunk=64), {}])
def test_attention_by_blocks_and_the_kernel_for_tpus_are_attention_in_values_and_gradients(spans):
    *qkv, sinks_H = attention_arguments(B=1, T=256, H=4, G=2, K=64)
    position = jnp.arange(256)[None]
    mask = causal_mask(position[:, None], position[:, :, None], **spans)
    plain = functools.partial(dot_product_attention, mask_BxTxS=mask, scale=0.1)
    splash = functools.partial(splash_attention, scale=0.1, interpret=True, **spans)
    chunked = functools.partial(chunked_attention, scale=0.1, **spans)

    def values_and_gradients(attention, **options):
        total = lambda q, k, v: jnp.sin(attention(q, k, v, **options)).sum()
        return jax.tree.leaves(jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*qkv))

    expected = values_and_gradients(plain, sinks_H=sinks_H)
    for got in (values_and_gradients(splash, sinks_H=sinks_H), values_and_gradients(chunked, sinks_H=sinks_H)):
        for a, b in zip(got, expected):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize('T, first, window, sinks, v_dim', [
    (8, 700, 0, False, 8), (8, 1290, 0, True, 8), (8, 900, 100, False, 12), (512, 700, 300, True, 8)])
def test_blockwise_attention_is_dot_product_attention(T, first, window, sinks, v_dim):
    rng = np.random.default_rng(0)
    q, k, v, sinks_H = (jnp.asarray(rng.normal(size=size), jnp.float32)
                        for size in ((2, T, 6, 8), (2, 1300, 3, 8), (2, 1300, 3, v_dim), 6))
    mask = causal_mask(jnp.arange(1300), first + jnp.arange(T)[:, None], window=window)
    mask = jnp.stack([mask, jnp.roll(mask, -200, axis=1)])  # rows of different lengths
    options = dict(scale=0.3, sinks_H=sinks_H if sinks else None)
    np.testing.assert_allclose(blockwise_attention(q, k, v, mask, **options),
                               dot_product_attention(q, k, v, mask, **options), atol=1e-6)


def test_blockwise_attention_never_reads_blocks_of_keys_that_the_mask_forbids():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, n, 2, 8)) for i, n in enumerate((4, 1024, 1024)))
    mask = jnp.zeros((1, 4, 1024), bool).at[..., :10].set(True).at[..., 1000:].set(True)  # blocks 0 and 3 of 256 keys
    expected = dot_product_attention(q, k, v, mask)
    forbidden = slice(256, 768)
    k, v = (x.at[:, forbidden].set(jnp.nan) for x in (k, v))
    np.testing.assert_allclose(blockwise_attention(q, k, v, mask), expected, atol=1e-6)


def test_dropout_of_chunked_attention_on_a_mesh_is_that_of_one_device():
    q, k, v, _ = attention_arguments(B=4, T=160, H=4, G=2, K=8)
    options = dict(dropout_rate=0.3, key_B=jax.random.split(jax.random.key(1), 4))
    attention = functools.partial(fused_causal_attention, 'chunked', **options)
    mesh = create_mesh(jax.devices()[:4], tp_size=2, fsdp=2)
    heads = NamedSharding(mesh, P(BATCH, None, 'tensor'))

    def on_mesh(q, k, v):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attention(q, k, v)

    sharded = jax.jit(on_mesh)(*jax.device_put((q, k, v), heads))
    np.testing.assert_allclose(sharded, jax.jit(attention)(q, k, v), atol=1e-5)
    assert sharded.sharding.is_equivalent_to(heads, 4)  # no device computed the heads or sequences of others


@pytest.mark.parametrize('limits', [{}, {'window': 200}, {'chunk': 256}])
def test_splash_attention_computes_the_queries_of_one_of_several_devices(limits):
    C, T, H, K = 2, 512, 2, 64
    kernel = splash_kernel(T, H, **limits, context=C, interpret=True)
    specs = kernel.manual_sharding_spec(NamedSharding(Mesh(jax.devices()[:C], 'context'), P(None, 'context')))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, T, H, K)), jnp.float32) for _ in range(3))

    def gradients(attend, weight):
        return jax.grad(lambda *qkv: (attend(*qkv) * weight).sum(), (0, 1, 2))

    for rank in range(C):
        # the rank-th piece of each part of the sequence
        own = np.arange(T).reshape(C, C, -1)[:, rank].ravel()
        local = jax.tree.map(lambda x, spec: jnp.split(x, C, list(spec).index('context'))[rank] if any(spec) else x,
                             kernel, specs)
        weight = jnp.zeros(q.shape).at[:, own].set(jnp.cos(jnp.arange(T // C * H * K)).reshape(1, -1, H, K))
        splash = lambda q, k, v: splash_attention(q[:, own], k, v, scale=0.1, kernel=local)
        chunked = lambda q, k, v: chunked_attention(q, k, v, scale=0.1, **limits)
        np.testing.assert_allclose(splash(q, k, v), chunked(q, k, v)[:, own], atol=1e-5)
        for got, expected in zip(gradients(splash, weight[:, own])(q, k, v), gradients(chunked, weight)(q, k, v)):
            np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize('attention', ['cudnn', 'splash'])
def test_flash_attention_refuses_dropout(attention):
    with pytest.raises(UserError, match=f'{attention} attention has no dropout'):
        compiled(dataclasses.replace(CONFIG, attention=attention, dropout=0.1))


# -----------------------------------------------------------------------------
# dropout


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


# -----------------------------------------------------------------------------
# memory: the loss in chunks, scanned layers, gradient checkpointing


def test_the_loss_in_chunks_is_the_loss_and_holds_no_logits():
    config = dataclasses.replace(CONFIG, vocab_size=4096)
    full, chunked = loss_and_gradients(config), loss_and_gradients(config, loss_chunk=32)
    assert_same_loss_and_gradients(full, chunked, 1e-4)
    logits_bytes = 4 * 2 * 160 * 4096  # float32 [B, T, V]
    table_bytes = 4 * 4096 * 16
    assert temporary_bytes(config) > logits_bytes
    assert temporary_bytes(config, loss_chunk=16) - 2 * table_bytes < logits_bytes / 2
    with pytest.raises(UserError, match='loss_chunk=33 does not divide block_size=160'):
        make_train_step(config, 0, 1.0, lambda step: 0.1, loss_chunk=33)


def test_scanned_layers_are_the_layers():
    scanned = dataclasses.replace(DEEP, scan_layers=True)
    assert_same_loss_and_gradients(loss_and_gradients(DEEP), loss_and_gradients(scanned), 1e-4)
    assert set(random_params(scanned)) == {'wte', 'wpe', 'ln_f', 'h_0', 'h_1', 'h_2', 'h_3'}


def test_scanned_layers_drop_and_recompute_the_same_elements():
    scanned = dataclasses.replace(DEEP, scan_layers=True)
    dropping = dataclasses.replace(scanned, dropout=0.3)
    recomputing = dataclasses.replace(dropping, remat='full')
    assert abs(loss_and_gradients(dropping)[0] - loss_and_gradients(scanned)[0]) > 0.01
    assert_same_loss_and_gradients(loss_and_gradients(dropping), loss_and_gradients(recomputing), 1e-4)


def test_scanned_layers_are_compiled_once_for_any_depth():
    def n_matmuls(n_layer, *, scan_layers):
        config = dataclasses.replace(CONFIG, n_layer=n_layer, scan_layers=scan_layers)
        make = lambda: create_train_state(jax.random.key(0), config, optax.identity())
        run = lambda params: GPT(config).apply({'params': params}, jnp.zeros((1, 8), jnp.int32))
        return jax.jit(run).lower(jax.eval_shape(make).params).as_text().count('dot_general')

    assert n_matmuls(2, scan_layers=True) == n_matmuls(9, scan_layers=True)
    assert n_matmuls(2, scan_layers=True) < n_matmuls(2, scan_layers=False)
    assert n_matmuls(2, scan_layers=False) < n_matmuls(9, scan_layers=False)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_remat_keeps_less_and_computes_the_same(scan_layers):
    config = dataclasses.replace(DEEP, scan_layers=scan_layers)
    needs = {}
    for remat in ('none', 'dots', 'full'):
        changed = dataclasses.replace(config, remat=remat)
        assert_same_loss_and_gradients(loss_and_gradients(DEEP), loss_and_gradients(changed), 1e-4)
        needs[remat] = temporary_bytes(changed)
    if scan_layers or jax.__version_info__ >= (0, 11):  # unrolled, jaxlib 0.10 recomputes long before it is needed
        assert needs['dots'] < needs['none'], needs
        assert needs['full'] < needs['none'], needs


@pytest.mark.parametrize('n_out, n_in', [(96, 128), (31, 192), (1, 512), (40, 576), (16, 3072)])
def test_one_bfloat16_row_is_multiplied_without_rounding_products_or_sums(n_out, n_in):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, n_in)), jnp.bfloat16) for n in (1, n_out))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert bfloat16_lane_terms(n_in)
    np.testing.assert_allclose(jax.jit(matmul_nt)(x, w), expected, rtol=0, atol=1e-4)
    for position in (0, n_in - 1):
        assert jnp.isnan(jax.jit(matmul_nt)(x.at[0, position].set(jnp.nan), w)).all()


@pytest.mark.parametrize('n_rows', [1, 2, 65])
def test_bfloat16_rows_of_any_number_and_width_are_multiplied(n_rows):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, 144)), jnp.bfloat16) for n in (n_rows, 40))
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
        values, scale = quantize(jnp.ones((256, 256)), jnp.int8)
        weights.append((stored(values, stored_as), scale))

    @jax.jit
    def decode(x, weights):
        def step(i, x):
            for w in weights:
                x = matmul_int8(x, *w)
            return x
        return jax.lax.fori_loop(0, 10, step, x)

    compiled = decode.lower(jnp.ones((rows, 256)), weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * 256 * 256
