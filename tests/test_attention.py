"""Attention without materialized scores is attention."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ops.fused_attention
from jax_ops.attention import Dropout, Scores, attend_to_used_slots, blockwise_attention, causal_mask
from jax_ops.fused_attention import Qkv, chunked_attention, fused_causal_attention, splash_attention, splash_kernel
from jax_ops.sharding import BATCH, create_mesh
from jax_transformer import GPT, GPTConfig, dot_product_attention
from tests.common import random_params

# -----------------------------------------------------------------------------
# attention


@pytest.mark.slow
def test_attention_in_chunks_is_traced_once_for_all_layers_of_a_kind(monkeypatch):
    traced = []

    def counted_mask(*args, **limits):
        traced.append(args)
        return causal_mask(*args, **limits)

    monkeypatch.setattr(jax_ops.fused_attention, 'causal_mask', counted_mask)

    def n_traced(config):
        traced.clear()
        params = jax.eval_shape(lambda: random_params(config))
        jax.eval_shape(jax.grad(lambda params, idx: GPT(config).apply({'params': params}, idx).sum()), params,
                       jax.ShapeDtypeStruct((1, config.block_size), jnp.int32))
        return len(traced)

    # a length that no other test has
    config = GPTConfig(block_size=131, vocab_size=37, n_head=2, n_embd=16, n_layer=1, attention='chunked')
    assert n_traced(config) > 0
    assert n_traced(dataclasses.replace(config, n_layer=3)) == 0
    assert n_traced(dataclasses.replace(config, layer_types=('window',), window=9)) > 0


def attention_arguments(B, T, H, G, K):
    rng = np.random.default_rng(0)
    shapes = (B, T, H, K), (B, T, G, K), (B, T, G, K), (H,)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize('spans, cap', [(dict(window=40), 0.5), (dict(chunk=64), 0.0), ({}, 0.5)])
def test_attention_by_blocks_and_the_kernel_for_tpus_are_attention_in_values_and_gradients(spans, cap):
    *qkv, sinks_H = attention_arguments(B=1, T=256, H=4, G=2, K=64)
    position = np.arange(256)[None]
    mask = causal_mask(position[:, None], position[:, :, None], **spans)
    plain = functools.partial(dot_product_attention, mask_BxTxS=mask, scale=0.1, cap=cap)
    scores = Scores(scale=0.1, cap=cap, **spans)
    kernel = splash_kernel(256, 4, scores, interpret=True)
    splash = lambda q, k, v, **options: splash_attention(Qkv(q, k, v), scores, kernel=kernel, **options)
    chunked = lambda q, k, v, **options: chunked_attention(Qkv(q, k, v), scores, **options)

    def values_and_gradients(attention, **options):
        total = lambda q, k, v: jnp.sin(attention(q, k, v, **options)).sum()
        return jax.tree.leaves(jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*qkv))

    expected = values_and_gradients(plain, sinks_H=sinks_H)
    for got in (values_and_gradients(splash, sinks_H=sinks_H), values_and_gradients(chunked, sinks_H=sinks_H)):
        for a, b in zip(got, expected):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize('n_used, n_read', [(1, 64), (64, 64), (65, 128), (128, 128), (129, 200), (200, 200)])
def test_on_a_cpu_only_the_first_slots_of_a_cache_are_read_up_to_the_last_one_in_use(n_used, n_read):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 2, 8)).astype(np.float32) for n in (3, 200, 200))
    mask = np.zeros((2, 3, 200), bool)
    mask[0, :, :n_used] = mask[1, :, n_used // 2:n_used // 2 + 1] = True  # the second row is shorter

    @jax.jit
    def attend_to(held, mask):
        return attend_to_used_slots(
            lambda kv, mask: dot_product_attention(q, kv['k'].swapaxes(1, 2), kv['v'].swapaxes(1, 2), mask), held, mask)

    held = {'k': k.swapaxes(1, 2).copy(), 'v': v.swapaxes(1, 2).copy()}
    held['v'][:, :, n_read:] = np.nan  # 0 times NaN is NaN
    np.testing.assert_allclose(attend_to(held, mask), dot_product_attention(q, k, v, mask), atol=1e-6)
    held['v'][:, :, n_read - 1:] = np.nan
    assert np.isnan(attend_to(held, mask)).any()


@pytest.mark.parametrize('T, first, window, sinks, v_dim', [
    (8, 700, 0, False, 8), (8, 1290, 0, True, 8), (8, 900, 100, False, 12), (512, 700, 300, True, 8)])
def test_blockwise_attention_is_dot_product_attention(T, first, window, sinks, v_dim):
    rng = np.random.default_rng(0)
    q, k, v, sinks_H = (rng.normal(size=size).astype(np.float32)
                        for size in ((2, T, 6, 8), (2, 1300, 3, 8), (2, 1300, 3, v_dim), 6))
    mask = causal_mask(np.arange(1300), first + np.arange(T)[:, None], window=window)
    mask = np.stack([mask, np.roll(mask, -200, axis=1)])  # rows of different lengths
    options = dict(scale=0.3, cap=0.7 if sinks else 0.0, sinks_H=sinks_H if sinks else None)
    by_blocks, at_once = (jax.jit(functools.partial(attention, **options))(q, k, v, mask)
                          for attention in (blockwise_attention, dot_product_attention))
    np.testing.assert_allclose(by_blocks, at_once, atol=1e-6)


def test_blockwise_attention_never_reads_blocks_of_keys_that_the_mask_forbids():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 2, 8)).astype(np.float32) for n in (4, 1024, 1024))
    mask = np.zeros((1, 4, 1024), bool)
    mask[..., :10] = mask[..., 1000:] = True  # blocks 0 and 3 of 256 keys
    expected = jax.jit(dot_product_attention)(q, k, v, mask)
    k, v = k.copy(), v.copy()  # `expected` may still be computed from the first ones
    k[:, 256:768] = v[:, 256:768] = np.nan
    np.testing.assert_allclose(jax.jit(blockwise_attention)(q, k, v, mask), expected, atol=1e-6)


def test_blockwise_attention_gives_zeros_to_queries_that_see_no_key():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 512, 2, 8)).astype(np.float32) for _ in range(3))
    mask = np.tril(np.ones((1, 512, 512), bool))
    mask[:, 200:] = False  # the padding at the end of a prompt; its second block of queries sees nothing
    y = jax.jit(blockwise_attention)(q, k, v, mask)
    np.testing.assert_allclose(y[:, :200], jax.jit(dot_product_attention)(q, k, v, mask)[:, :200], atol=1e-6)
    assert not np.any(y[:, 256:])


@pytest.mark.slow
def test_dropout_of_chunked_attention_on_a_mesh_is_that_of_one_device():
    q, k, v, _ = attention_arguments(B=4, T=160, H=4, G=2, K=8)
    dropout = Dropout(jax.random.split(jax.random.key(1), 4), rate=0.3)
    attention = lambda q, k, v: fused_causal_attention('chunked', Qkv(q, k, v), Scores(), dropout=dropout)
    mesh = create_mesh(jax.devices()[:4], tp_size=2, fsdp=2)
    heads = NamedSharding(mesh, P(BATCH, None, 'tensor'))

    def on_mesh(q, k, v):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attention(q, k, v)

    sharded = jax.jit(on_mesh)(*jax.device_put((q, k, v), heads))
    np.testing.assert_allclose(sharded, jax.jit(attention)(q, k, v), atol=1e-5)
    assert sharded.sharding.is_equivalent_to(heads, 4)  # no device computed the heads or sequences of others


@pytest.mark.slow
@pytest.mark.parametrize('limits', [{}, {'window': 200}, {'chunk': 256}])
def test_splash_attention_computes_the_queries_of_one_of_several_devices(limits):
    C, T, H, K = 2, 512, 2, 64
    scores = Scores(scale=0.1, **limits)
    kernel = splash_kernel(T, H, scores, C, interpret=True)
    specs = kernel.manual_sharding_spec(NamedSharding(Mesh(jax.devices()[:C], 'context'), P(None, 'context')))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, T, H, K)).astype(np.float32) for _ in range(3))

    def values_and_gradients(attend, weight):
        def weighted(*qkv):
            values = attend(*qkv)
            return (values * weight).sum(), values

        gradients, values = jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))(q, k, v)
        return values, gradients

    for rank in range(C):
        # the rank-th piece of each part of the sequence
        own = np.arange(T).reshape(C, C, -1)[:, rank].ravel()
        local = jax.tree.map(lambda x, spec: jnp.split(x, C, list(spec).index('context'))[rank] if any(spec) else x,
                             kernel, specs)
        weight = np.zeros_like(q)
        weight[:, own] = np.cos(np.arange(T // C * H * K)).reshape(1, -1, H, K)
        splash = lambda q, k, v: splash_attention(Qkv(q[:, own], k, v), scores, kernel=local)
        chunked = lambda q, k, v: chunked_attention(Qkv(q, k, v), scores)
        values, gradients = values_and_gradients(splash, weight[:, own])
        expected_values, expected_gradients = values_and_gradients(chunked, weight)
        np.testing.assert_allclose(values, expected_values[:, own], atol=1e-5)
        for got, expected in zip(gradients, expected_gradients):
            np.testing.assert_allclose(got, expected, atol=1e-4)
