"""The checkpoint families: what jax_transformer.py computes for them, and what jax_pretrained.py reads and writes.

tests/golden/make_families.py made the checkpoints and the numbers that transformers computes from them."""
import dataclasses
import functools
import json
import re
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

import jax_ops.attention
from jax_devices.layout import setup_distributed_training
from jax_flags import UserError
from jax_generate import generate
from jax_ops.cpu import cpu_multiplies_uint8
from jax_ops.decode_weights import convert_params_for_decoding, order_columns_by_rank, quantize_params
from jax_pretrained import load_pretrained, open_pretrained, param_shapes, read_config, save_pretrained
from jax_train_utils import TrainState, create_train_state
from jax_transformer import (
    GPTConfig, MLAConfig, MoEConfig, MoELayer, RopeScaling, Router, cache_bytes, create_call, dot_product_attention,
    estimate_mfu, init_cache, rope_inv_freq)
from tests.common import (
    FAMILIES, apply, cached_logits, copy_folder, edit_json, edit_tensors, long, make_step, random_params, refusal)

EXPECTED = np.load(FAMILIES / 'expected.npz')
IDX = EXPECTED['idx']
NAMES = sorted(folder.name for folder in FAMILIES.iterdir() if folder.is_dir())
BASIC = [name for name in NAMES if not name.endswith(('_packed', '_published'))]


@functools.cache
def load(name):
    return load_pretrained(FAMILIES / name)


def expected(name, what):
    return EXPECTED[f'{name.removesuffix("_published")}/{what}']


def greedy(params, config, prompt, **options):
    """The prompt [B, T] and twelve more tokens."""
    return generate(params, config, prompt, 12, rng=jax.random.key(0), temperature=0, **options)


def bytes_in(cache):
    return sum(x.nbytes for x in jax.tree.leaves(cache))

# -----------------------------------------------------------------------------
# a loaded checkpoint computes what transformers computes


@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_transformers(name):
    np.testing.assert_allclose(apply(*load(name), IDX), expected(name, 'logits'), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('name', BASIC)
def test_greedy_continuation_through_the_cache_is_that_of_transformers_without(name):
    config, params = load(name)
    tokens = expected(name, 'greedy')
    np.testing.assert_array_equal(greedy(params, config, tokens[:, :29]), tokens)


@pytest.mark.slow
@pytest.mark.parametrize('name', BASIC)
def test_gradient_is_that_of_torch(name):
    config, params = load(name)

    def loss(wte):
        logits = apply(config, params | {'wte': wte}, IDX[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, IDX[:, 1:]).mean()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(params['wte']), expected(name, 'grad'), rtol=0, atol=1e-5)


@pytest.mark.parametrize('name', BASIC)
def test_both_styles_of_config_json_mean_the_same(name):
    path = FAMILIES / name / 'config_published.json'
    if not path.exists():
        path = next(FAMILIES.glob(f'{name}_p*')) / 'config.json'
    published, _ = read_config(json.loads(path.read_text()), 'published')
    written, _ = read_config(json.loads((FAMILIES / name / 'config.json').read_text()), 'written')
    assert published == written


@pytest.mark.parametrize('name', BASIC)
def test_a_config_survives_json(name):
    config, _ = load(name)
    assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


# -----------------------------------------------------------------------------
# the published sizes have the published numbers of parameters

LLAMA = dict(
    model_type='llama', vocab_size=128256, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=5e5,
    rms_norm_eps=1e-5, rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
        rope_type='llama3'))
QWEN3 = dict(
    model_type='qwen3', vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    rope_theta=1000000, rope_scaling=None, rms_norm_eps=1e-6, sliding_window=None, use_sliding_window=False,
    max_window_layers=28)
QWEN3_MOE = QWEN3 | dict(
    model_type='qwen3_moe', num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    intermediate_size=6144, decoder_sparse_step=1, mlp_only_layers=[])
GPT_OSS = dict(
    model_type='gpt_oss', hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, vocab_size=201088, num_experts_per_tok=4, experts_per_token=4, max_position_embeddings=131072,
    rope_theta=150000, sliding_window=128, attention_bias=True, rope_scaling=dict(
        beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type='yarn',
        truncate=False))
DEEPSEEK = dict(
    model_type='deepseek_v3', hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, vocab_size=129280, first_k_dense_replace=3, n_group=8, topk_group=4,
    max_position_embeddings=163840, rope_theta=10000, rope_scaling=dict(
        type='yarn', factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=4096))
KIMI = DEEPSEEK | dict(
    model_type='kimi_k2', num_attention_heads=64, n_routed_experts=384, vocab_size=163840, first_k_dense_replace=1,
    n_group=1, topk_group=1, routed_scaling_factor=2.827, num_key_value_heads=64)
OLMO2 = dict(
    model_type='olmo2', vocab_size=100352, max_position_embeddings=4096, rope_theta=500000, rms_norm_eps=1e-6)
OLMO3 = dict(
    model_type='olmo3', vocab_size=100278, max_position_embeddings=65536, rope_theta=500000, rms_norm_eps=1e-6,
    sliding_window=4096, rope_scaling=dict(
        rope_type='yarn', factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836,
        beta_fast=32.0, beta_slow=1.0))
GEMMA2 = dict(
    model_type='gemma2', vocab_size=256000, num_key_value_heads=4, head_dim=256, max_position_embeddings=8192,
    sliding_window=4096, rope_theta=10000.0, rms_norm_eps=1e-6, hidden_act='gelu_pytorch_tanh',
    hidden_activation='gelu_pytorch_tanh', query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0)
GEMMA3 = dict(
    model_type='gemma3_text', vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
    num_attention_heads=4, num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, sliding_window=512,
    rope_theta=1000000, rope_local_base_freq=10000, sliding_window_pattern=6, query_pre_attn_scalar=256)
GEMMA3_4B = dict(model_type='gemma3', vision_config={}, text_config=dict(  # the rest is Gemma3TextConfig's defaults
    model_type='gemma3_text', hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024,
    rope_scaling=dict(factor=8.0, rope_type='linear')))
LLAMA4 = dict(
    model_type='llama4_text', hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
    head_dim=128, intermediate_size=8192, intermediate_size_mlp=16384, vocab_size=202048, num_experts_per_tok=1,
    max_position_embeddings=1048576, no_rope_layers=[], rope_scaling=None)


def sized(base, n_layer, width, heads, **more):
    return base | dict(num_hidden_layers=n_layer, hidden_size=width, num_attention_heads=heads) | more


def dense(base, n_layer, width, heads, inner):
    return sized(base, n_layer, width, heads, intermediate_size=inner)


def tied(base, n_layer, width, heads, inner):
    return sized(base, n_layer, width, heads, intermediate_size=inner, tie_word_embeddings=True)


PUBLISHED = {
    'Llama-3.2-1B': (tied(LLAMA, 16, 2048, 32, 8192), 1_235_814_400),
    'Llama-3.2-3B': (tied(LLAMA, 28, 3072, 24, 8192), 3_212_749_824),
    'Llama-3.1-8B': (dense(LLAMA, 32, 4096, 32, 14336), 8_030_261_248),
    'Llama-3.1-70B': (dense(LLAMA, 80, 8192, 64, 28672), 70_553_706_496),
    'Qwen3-0.6B': (tied(QWEN3, 28, 1024, 16, 3072), 596_049_920),
    'Qwen3-1.7B': (tied(QWEN3, 28, 2048, 16, 6144), 1_720_574_976),
    'Qwen3-4B': (tied(QWEN3, 36, 2560, 32, 9728), 4_022_468_096),
    'Qwen3-8B': (dense(QWEN3, 36, 4096, 32, 12288), 8_190_735_360),
    'Qwen3-14B': (dense(QWEN3, 40, 5120, 40, 17408), 14_768_307_200),
    'Qwen3-32B': (dense(QWEN3, 64, 5120, 64, 25600), 32_762_123_264),
    'Qwen3-30B-A3B': (sized(QWEN3_MOE, 48, 2048, 32, moe_intermediate_size=768), 30_532_122_624),
    'Qwen3-235B-A22B': (sized(QWEN3_MOE, 94, 4096, 64, moe_intermediate_size=1536), 235_093_634_560),
    'OLMo-2-7B': (dense(OLMO2, 32, 4096, 32, 11008), 7_298_617_344),
    'OLMo-3-7B': (dense(OLMO3, 32, 4096, 32, 11008), 7_298_011_136),
    'Gemma-2-2B': (dense(GEMMA2, 26, 2304, 8, 9216), 2_614_341_888),
    'Gemma-2-9B': (dense(GEMMA2 | dict(num_key_value_heads=8), 42, 3584, 16, 14336), 9_241_705_984),
    'Gemma-3-1B': (GEMMA3, 999_885_952),
    'Gemma-3-4B': (GEMMA3_4B, 3_880_263_168),  # without the vision tower
    'gpt-oss-20b': (GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32), 20_914_757_184),
    'gpt-oss-120b': (GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128), 116_829_156_672),
    'DeepSeek-V3': (DEEPSEEK, 671_026_404_352),
    'Kimi-K2': (KIMI, 1_026_408_209_408),
    'Llama-4-Scout': (LLAMA4 | dict(num_local_experts=16), 107_769_861_120),
    'Llama-4-Maverick': (LLAMA4 | dict(num_local_experts=128, interleave_moe_layer_step=2), 400_711_848_960),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PUBLISHED)
def test_published_sizes_have_the_published_number_of_parameters(name):
    hf, total = PUBLISHED[name]
    shapes = param_shapes(read_config(hf, name)[0])
    counted = [shape for path, shape in shapes.items() if path[-1] != 'selection_bias']  # a buffer, no parameter
    assert sum(int(np.prod(shape, dtype=np.int64)) for shape in counted) == total


def test_published_configs_are_read_in_full():
    deepseek, _ = read_config(DEEPSEEK, 'DeepSeek-V3')
    assert deepseek.attention_scale == pytest.approx(1.8738 / 192**0.5, rel=1e-4)
    assert deepseek.rope_scaling.amplitude == 1
    assert deepseek.moe == MoEConfig(
        n_expert=256, n_used=8, width=2048, shared_width=2048, layers=(False,) * 3 + (True,) * 58, score='sigmoid',
        normalize=True, scale=2.5, selection_bias=True, n_group=8, n_group_used=4)

    gpt_oss, _ = read_config(PUBLISHED['gpt-oss-20b'][0], 'gpt-oss-20b')
    assert gpt_oss.rope_scaling.amplitude == pytest.approx(1.3466, abs=1e-4)
    assert not gpt_oss.rope_scaling.truncate
    assert [gpt_oss.layer(i)[0] for i in range(3)] == ['window', 'full', 'window']
    assert gpt_oss.sinks
    assert gpt_oss.window == 128

    scout, _ = read_config(PUBLISHED['Llama-4-Scout'][0], 'Scout')
    assert [scout.layer(i)[0] for i in range(5)] == ['chunk', 'chunk', 'chunk', 'nope', 'chunk']
    assert scout.chunk == 8192

    qwen3, _ = read_config(PUBLISHED['Qwen3-0.6B'][0], 'Qwen3')
    assert qwen3.layer_types == ('full',)

    gemma3, _ = read_config(GEMMA3_4B, 'Gemma-3-4B')
    assert [gemma3.layer(i)[0] for i in range(7)] == ['window'] * 5 + ['full', 'window']
    assert (gemma3.rope_theta, gemma3.window_rope_theta, gemma3.rope_scaling.factor) == (1e6, 1e4, 8.0)
    assert gemma3.attention_scale == 256**-0.5

    gemma2, _ = read_config(PUBLISHED['Gemma-2-2B'][0], 'Gemma-2-2B')
    assert [gemma2.layer(i)[0] for i in range(3)] == ['window', 'full', 'window']
    assert (gemma2.attention_cap, gemma2.logit_cap, gemma2.attention_scale) == (50.0, 30.0, 256**-0.5)
    uncapped, _ = read_config(PUBLISHED['Gemma-2-2B'][0] | {'attn_logit_softcapping': None}, 'Gemma-2-2B')
    assert (uncapped.attention_cap, uncapped.logit_cap) == (0.0, 30.0)

    olmo3, _ = read_config(PUBLISHED['OLMo-3-7B'][0], 'OLMo-3-7B')
    assert [olmo3.layer(i)[0] for i in range(5)] == ['window', 'window', 'window', 'full', 'window']
    assert (olmo3.rope_theta, olmo3.window_rope_theta, olmo3.rope_scaling.factor) == (5e5, 5e5, 8.0)


def test_of_a_model_with_two_ropes_yarn_may_keep_its_bounds_as_they_are():
    values = json.loads((FAMILIES / 'olmo3' / 'config.json').read_text())
    for truncate in (True, False):  # beside the layer types, where transformers looks for it
        values['rope_parameters']['truncate'] = truncate
        assert read_config(values, 'olmo3')[0].rope_scaling.truncate == truncate


# -----------------------------------------------------------------------------
# attention, rope and the cache

SMALL = GPTConfig(block_size=32, vocab_size=29, n_layer=2, n_head=4, n_embd=16)


def small(**settings):
    """A config, and parameters far from their small initial values."""
    config = dataclasses.replace(SMALL, **settings)
    return config, random_params(config)


def test_llama3_frequencies_blend_between_the_two_numbers_of_rotations():
    scaling = RopeScaling('llama3', factor=8.0, original_length=8192, low=1.0, high=4.0)
    plain, scaled = rope_inv_freq(5e5, 128), rope_inv_freq(5e5, 128, scaling)
    rotations = plain * 8192 / (2 * np.pi)
    high, low, middle = rotations > 4, rotations < 1, (rotations < 4) & (rotations > 1)
    np.testing.assert_allclose(scaled[high], plain[high])
    np.testing.assert_allclose(scaled[low], plain[low] / 8)
    assert (scaled[middle] / plain[middle] > 1 / 8).all()
    assert (scaled[middle] / plain[middle] < 1).all()
    without_a_middle = rope_inv_freq(5e5, 128, dataclasses.replace(scaling, high=1.0))
    np.testing.assert_allclose(without_a_middle, np.where(rotations > 1, plain, plain / 8))


def test_yarn_frequencies_are_the_formulas_of_the_paper():
    got = rope_inv_freq(150000.0, 64, RopeScaling('yarn', 32.0, 4096, 1.0, 32.0, truncate=False))
    j, f = np.arange(32), 150000.0 ** (-np.arange(32) / 32)
    low, high = (64 * np.log(4096 / (2 * np.pi * rotations)) / (2 * np.log(150000.0)) for rotations in (32, 1))
    ramp = np.clip((j - low) / (high - low), 0, 1)
    np.testing.assert_allclose(got, f / 32 * ramp + f * (1 - ramp))


def test_rope_scores_depend_on_the_distance_alone():
    config, params = small(position='rope', norm='rms', n_kv_head=2, bias=False, n_layer=1)
    idx = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    here, moved = (apply(config, params, idx, position_BxT=start + jnp.arange(8)[None]) for start in (0, 100))
    np.testing.assert_allclose(here, moved, rtol=0, atol=1e-4 * np.abs(here).max())


def test_shared_key_heads_are_those_of_attention_with_repeated_ones():
    n_heads = (6, 2, 2)
    q, k, v = (np.random.default_rng(i).normal(size=(2, 5, n, 8)).astype(np.float32) for i, n in enumerate(n_heads))
    mask = jnp.tril(jnp.ones((5, 5), bool))[None]
    repeated = dot_product_attention(q, k.repeat(3, 2), v.repeat(3, 2), mask)
    np.testing.assert_allclose(dot_product_attention(q, k, v, mask), repeated, atol=1e-6)


def test_a_sink_takes_its_share_of_the_probability():
    q, k = jax.random.normal(jax.random.key(0), (1, 3, 2, 4)), jnp.zeros((1, 3, 2, 4))
    sinks = jnp.array([0.0, np.log(9)])
    y = dot_product_attention(q, k, jnp.ones_like(k), jnp.ones((1, 3, 3), bool), sinks_H=sinks)
    np.testing.assert_allclose(y[0, :, :, 0], [[3 / 4, 3 / 12]] * 3, rtol=1e-6)


@pytest.mark.parametrize('layer_type, sees', [
    ('window', lambda query, key: query - 4 < key <= query),
    ('chunk', lambda query, key: key <= query and key // 4 == query // 4),
    ('full', lambda query, key: key <= query)])
def test_a_layer_sees_its_window_or_chunk(layer_type, sees):
    config, params = small(layer_types=(layer_type,), window=4, chunk=4, position='rope', n_layer=1)
    no_mlp = jax.tree.map(jnp.zeros_like, params['h_0']['mlp'])
    params = params | {'h_0': params['h_0'] | {'mlp': no_mlp}}
    idx = np.random.default_rng(0).integers(29, size=(1, 10))
    logits = apply(config, params, idx)
    for key in range(10):
        other = idx.copy()
        other[0, key] = (idx[0, key] + 7) % 29
        change_T = np.abs(apply(config, params, other) - logits)[0].max(-1)
        assert (change_T > 1e-6).tolist() == [sees(query, key) for query in range(10)], key


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt_oss', 'llama4', 'deepseek_v3'])
@pytest.mark.parametrize('least_slots', [64, long(4)])
def test_cached_logits_equal_uncached_ones_for_any_split_into_calls(name, least_slots, monkeypatch):
    config, params = load(name)
    jax.clear_caches()  # compiled with 64
    monkeypatch.setattr(jax_ops.attention, 'LEAST_SLOTS', least_slots)
    logits, _ = cached_logits(config, params, IDX, init_cache(config, 2, 40), (29, 30, 31, 40))
    np.testing.assert_allclose(logits, expected(name, 'logits'), rtol=0, atol=1e-4)
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize('name, attention', [('gemma2', 'chunked'), ('olmo3', 'xla')])
def test_training_learns_a_sequence_through_chunked_and_plain_attention(name, attention):
    config, params = load(name)
    config = dataclasses.replace(config, attention=attention)
    state = create_train_state(jax.random.key(0), config, optax.adamw(1e-2)).replace(params=params)
    step = jax.jit(make_step(config))
    batch = {'x': IDX[None, :, :-1], 'y': IDX[None, :, 1:], 'seq_id': np.zeros((1, 2), np.uint32)}
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    first = optax.softmax_cross_entropy_with_integer_labels(expected(name, 'logits')[:, :-1], IDX[:, 1:]).mean()
    assert losses[0] == pytest.approx(float(first), abs=1e-4)
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt_oss', 'llama4'])
def test_prompts_of_different_lengths_share_windowed_caches(name):
    config, params = load(name)
    tokens = expected(name, 'greedy')
    prompts = tokens[:, :29]
    together = greedy(params, config, prompts, prompt_lengths_B=[29, 13])
    short = greedy(params, config, prompts[[1, 1]], prompt_lengths_B=[13, 13])
    np.testing.assert_array_equal(together[0], tokens[0])
    np.testing.assert_array_equal(together[1], short[0])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt_oss', 'llama4'])
def test_rejected_drafts_leave_a_windowed_cache_intact(name):
    config, params = load(name)
    tokens = expected(name, 'greedy')
    np.testing.assert_array_equal(greedy(params, config, tokens[:, :29], n_draft=3), tokens)


@pytest.mark.slow
@pytest.mark.parametrize('name, stored_as', [
    ('gpt_oss', 'int8'), ('deepseek_v3', 'uint8')])
def test_int8_weights_and_caches_keep_the_logits_within_a_few_percent(name, stored_as):
    if stored_as == 'uint8' and not cpu_multiplies_uint8():
        pytest.skip('XLA has no matmul of uint8 by int8 for this CPU')
    config, params = load(name)
    quantized = quantize_params(params, jnp.dtype(stored_as))
    mlp = quantized['h_1']['mlp']
    assert mlp['router']['kernel'].dtype == jnp.float32
    assert quantized['lm_head'].values.dtype == stored_as
    experts = mlp['experts_c_proj']['kernel'].values
    assert experts.dtype == stored_as
    assert experts.shape[1:] == (config.n_embd, config.moe.width)  # [out, in]
    cache = init_cache(config, 2, 40, 'int8')
    assert bytes_in(cache) == 2 * cache_bytes(config, 40, 'int8')
    assert bytes_in(cache) < 0.6 * 2 * cache_bytes(config, 40)
    logits, _ = cached_logits(config, quantized, IDX, cache, (36, 40))
    exact = expected(name, 'logits')[:, 36:]
    rms_error = np.sqrt(((logits[:, 36:] - exact)**2).mean())
    assert rms_error > 1e-4
    assert rms_error < 0.1 * exact.std()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['olmo2', 'gemma3', 'gemma2'])
def test_int8_weights_keep_the_logits_of_other_norms_within_a_few_percent(name):
    config, params = load(name)
    logits = apply(config, quantize_params(params), IDX)
    rms_error = np.sqrt(((logits - expected(name, 'logits'))**2).mean())
    assert 1e-4 < rms_error < 0.1 * logits.std()


@pytest.mark.slow
def test_layers_in_a_loop_compute_what_unrolled_ones_do():
    config, params = load('olmo2')
    logits = apply(dataclasses.replace(config, scan_layers=True), params, IDX)
    np.testing.assert_allclose(logits, expected('olmo2', 'logits'), rtol=0, atol=1e-4)


@pytest.mark.parametrize('name, n_values', [
    ('gpt_oss', 2 * 2 * 8 * (5 + 40)),  # two layers, one with a window of 5: keys and values of 2 heads of 8
    ('llama4', 2 * 2 * 8 * (3 * 8 + 40)),  # three of four layers keep a chunk of 8
    ('deepseek_v3', (16 + 4) * 2 * 40),
    ('llama', 2 * 2 * 8 * 2 * 40)])
def test_a_cache_holds_what_the_formula_says(name, n_values):
    config, _ = load(name)
    assert cache_bytes(config, 40) == 4 * n_values
    assert bytes_in(init_cache(config, 3, 40)) == 3 * 4 * n_values


@pytest.mark.slow
def test_latent_attention_is_the_same_with_absorbed_projections():
    config, params = load('kimi_k2')
    assert config.mla == MLAConfig(q_rank=0, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6)
    cache = init_cache(config, 2, 40)

    def program(n_tokens):
        call = functools.partial(apply, config, method='with_cache')
        return str(jax.make_jaxpr(call)(params, IDX[:, :n_tokens], cache, position_BxT=np.arange(n_tokens)[None]))

    keys_of_all_heads = 'f32[2,40,4,8]'  # up-projected from the latents
    assert keys_of_all_heads in program(29)
    assert keys_of_all_heads not in program(1)  # absorbed
    logits, _ = cached_logits(config, params, IDX, cache, (29, 30))
    np.testing.assert_allclose(logits, expected('kimi_k2', 'logits')[:, :30], rtol=0, atol=1e-4)

# -----------------------------------------------------------------------------
# experts


def every_expert_on_every_token(config, mlp, x_PxD):
    """The reference: nothing is sorted, all experts compute all tokens, and the weights of those not chosen are 0."""
    score_PxE = jax.nn.softmax(x_PxD @ mlp['router']['kernel'])
    weight_PxU, chosen_PxU = jax.lax.top_k(score_PxE, config.moe.n_used)
    weight_PxU /= weight_PxU.sum(-1, keepdims=True)
    weight_PxE = (jax.nn.one_hot(chosen_PxU, config.moe.n_expert) * weight_PxU[..., None]).sum(1)
    gate, up, down = (mlp[f'experts_{name}']['kernel'] for name in ('c_gate', 'c_fc', 'c_proj'))
    h_PxExF = jax.nn.silu(jnp.einsum('pd,edf->pef', x_PxD, gate)) * jnp.einsum('pd,edf->pef', x_PxD, up)
    return jnp.einsum('pef,efd,pe->pd', h_PxExF, down, weight_PxE)


@pytest.mark.slow
@pytest.mark.parametrize('n_expert, n_used, n_tokens', [(8, 2, 40), (8, 3, 1), (3, 1, 200), (2, 2, 5)])
def test_grouped_experts_and_their_gradients_equal_every_expert_on_every_token(n_expert, n_used, n_tokens):
    config, params = small(mlp='swiglu', bias=False, moe=MoEConfig(n_expert, n_used, width=24))
    mlp = params['h_0']['mlp']
    x = np.random.default_rng(7).normal(size=(1, n_tokens, 16)).astype(np.float32)
    x[:, n_tokens // 2:] = x[:, :1]  # many tokens choose the same experts

    def grouped(mlp, x):
        return MoELayer(config).apply({'params': mlp}, x)

    def reference(mlp, x):
        return every_expert_on_every_token(config, mlp, x[0])[None]

    def values_and_gradients(function):
        y, vjp = jax.vjp(function, mlp, x)
        return y, vjp(jnp.cos(y))

    got, expected = (jax.jit(functools.partial(values_and_gradients, f))() for f in (grouped, reference))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_experts_may_be_mlps_of_gpt2_with_biases():
    config, params = small(moe=MoEConfig(n_expert=4, n_used=4, width=24))
    mlp = params['h_0']['mlp']
    x = np.random.default_rng(7).normal(size=(1, 6, 16)).astype(np.float32)
    score = jax.nn.softmax(x[0] @ mlp['router']['kernel'] + mlp['router']['bias'])
    c_fc, c_proj = mlp['experts_c_fc'], mlp['experts_c_proj']
    expected = 0
    for e in range(4):
        h = jax.nn.gelu(x[0] @ c_fc['kernel'][e] + c_fc['bias'][e], approximate=False)
        expected += score[:, e, None] * (h @ c_proj['kernel'][e] + c_proj['bias'][e])
    got = jax.jit(MoELayer(config).apply)({'params': mlp}, x)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_balancing_loss_is_its_weight_for_equally_busy_experts_and_more_for_others():
    config, _ = small(mlp='swiglu', bias=False, moe=MoEConfig(4, 1, 8, balance=0.5), n_embd=4, n_layer=1)

    @jax.jit
    def balancing_loss(kernel, x):
        _, sown = Router(config).apply({'params': {'kernel': kernel}}, x[None], mutable=['losses'])
        return sown['losses']['balance'][0]

    one_each, all_to_one = jnp.eye(4), jnp.eye(4)[jnp.zeros(4, int)]
    assert balancing_loss(10 * jnp.eye(4), one_each) == pytest.approx(0.5, rel=1e-3)  # its weight
    assert balancing_loss(10 * jnp.eye(4), all_to_one) == pytest.approx(0.5 * 4, rel=1e-2)
    grad = jax.grad(balancing_loss)(jnp.eye(4), jnp.eye(4)[jnp.array([0, 0, 0, 1])])
    assert grad[0, 0] > 0  # away from the busy expert
    assert grad[0, 2] < 0


def test_a_row_filled_up_balances_its_experts_as_its_text_alone():
    config, params = small(mlp='swiglu', bias=False, moe=MoEConfig(4, 2, 8, balance=0.5), n_layer=1)
    router = {'params': params['h_0']['mlp']['router']}
    text = np.random.default_rng(1).normal(size=(2, 5, config.n_embd)).astype(np.float32)
    filled = np.concatenate([text, np.ones_like(text)], axis=1)  # a padding token is always the same
    is_padding = np.arange(10) >= np.array([[5], [5]])

    def gradient(x, **options):
        def balance(router):
            _, sown = Router(config).apply(router, x, create_call(x, **options), mutable=['losses'])
            return sown['losses']['balance'][0]
        return jax.grad(balance)(router)['params']['kernel']

    alone = gradient(text)
    np.testing.assert_allclose(gradient(filled, padding_BxT=is_padding), alone, atol=1e-6)
    assert np.abs(gradient(filled) - alone).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('scan_layers', [False, True])
def test_the_training_loss_pushes_experts_into_balance_but_reports_cross_entropy(scan_layers):
    idx = np.random.default_rng(0).integers(29, size=(1, 4, 17))
    batch = {'x': jnp.asarray(idx[..., :-1]), 'y': jnp.asarray(idx[..., 1:]), 'seq_id': jnp.zeros((1, 4), jnp.uint32)}
    losses, routers = [], []
    for balance in (0.0, 1.0):
        moe = MoEConfig(4, 1, 8, balance=balance)
        config, params = small(mlp='swiglu', bias=False, moe=moe, n_layer=1, scan_layers=scan_layers)
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
        state, metrics = jax.jit(make_step(config, grad_clip=0.0))(state, batch)
        losses.append(float(metrics['loss']))
        routers.append(np.asarray(state.params['h_0']['mlp']['router']['kernel']))
    assert losses[0] == losses[1]
    assert float(metrics['balance']) > 0  # is logged
    assert np.abs(routers[0] - routers[1]).max() > 1e-3


@pytest.mark.parametrize('bad, message', [
    (dict(n_kv_head=3), r'n_kv_head=3 does not divide n_head=4; one of \[1, 2, 4\] does'),
    (dict(norm='batch'), 'norm must be one of layer, rms'),
    (dict(block_norms='none'), 'block_norms must be one of pre, post, both'),
    (dict(position='alibi'), 'position must be'),
    (dict(mlp='relu'), 'mlp must be'),
    (dict(layer_types=('window',)), 'window layers need a size'),
    (dict(layer_types=('sparse',), window=3), "'sparse'"),
    (dict(layer_types=()), 'layer_types'),
    (dict(qk_norm='yes'), 'qk_norm'),
    (dict(position='rope', head_dim=3), 'even'),
    (dict(moe=dict(n_expert=4, n_used=5, width=8)), '1 to 4 of 4'),
    (dict(moe=dict(n_expert=4, n_used=1, width=8, score='tanh')), 'softmax, sigmoid'),
    (dict(moe=dict(n_expert=4, n_used=1, width=8, n_group=3)), '3 equal groups'),
    (dict(rope_scaling=dict(kind='ntk', factor=2.0, original_length=8)), 'linear, llama3, yarn'),
    (dict(attention='cudnn', mla=dict(q_rank=0, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4)), 'no latent attention'),
    (dict(scan_layers=True, layer_types=('window', 'full'), window=3), 'all alike')])
def test_a_config_that_makes_no_model_is_refused(bad, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMALL, **bad)


def test_mfu_counts_the_experts_that_are_used_and_the_keys_that_are_seen():
    moe = MoEConfig(n_expert=8, n_used=2, width=24, layers=(False, True))
    config = dataclasses.replace(SMALL, layer_types=('window', 'full'), window=8, moe=moe, mlp='swiglu')
    used = 100_000 - 6 * 3 * 16 * 24
    assert estimate_mfu(100_000, config, 1.0, 1.0) == pytest.approx(6 * used + 12 * 16 * (8 + 32))

# -----------------------------------------------------------------------------
# several devices


@pytest.mark.slow
@pytest.mark.parametrize('name, tensor, expert', [
    ('qwen3', 2, 1), ('olmo2', 2, 1), ('gemma3', 2, 1), ('gemma2', 2, 1), ('qwen3_moe', 1, 2), ('gpt_oss', 2, 2),
    ('deepseek_v3', 2, 2), ('llama4', 2, 2)])
def test_a_model_sharded_over_a_mesh_gives_the_logits_of_one_device(name, tensor, expert):
    config, params = load(name)
    devices = jax.devices()[:2 * tensor * expert]
    parallel = setup_distributed_training(devices, fsdp=2, tensor=tensor, expert=expert)
    parallel.validate(config)
    sharded = parallel.device_put(params)
    with parallel.mesh_context():
        logits = apply(config, sharded, IDX)
    sharding = sharded['h_0']['attn']['c_proj']['kernel'].sharding
    assert sharding.shard_shape((32, 32)) == (32 // tensor, 16)
    np.testing.assert_allclose(logits, expected(name, 'logits'), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_experts_in_int8_on_several_devices_continue_a_text_as_on_one():
    config, params = load('gpt_oss')

    def continuation(tensor, expert):
        devices = jax.devices()[:tensor * expert]
        parallel = setup_distributed_training(devices, tensor=tensor, expert=expert)
        converted = convert_params_for_decoding(parallel.device_put(params), 'float32', 'int8')
        with parallel.mesh_context():
            return greedy(order_columns_by_rank(converted, config), config, expected('gpt_oss', 'greedy')[:, :29])

    np.testing.assert_array_equal(continuation(tensor=2, expert=2), continuation(tensor=1, expert=1))

# -----------------------------------------------------------------------------
# writing


@pytest.mark.slow
@pytest.mark.parametrize('name', BASIC)
def test_what_is_saved_is_what_transformers_saves(name, tmp_path):
    config, params = load(name)
    folder = tmp_path / 'model'
    save_pretrained(params, config, folder, config_json=FAMILIES / name / 'config.json')
    tensors = (load_file(path / 'model.safetensors') for path in (folder, FAMILIES / name))
    jax.tree.map(np.testing.assert_array_equal, *tensors)
    ours, theirs = (json.loads((path / 'config.json').read_text()) for path in (folder, FAMILIES / name))
    assert ours == theirs
    config_again, params_again = load_pretrained(folder)
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


@pytest.mark.parametrize('name', ['llama', 'mistral', 'qwen3', 'qwen3_moe'])
def test_a_config_json_is_derived_for_the_models_that_flags_make(name, tmp_path):
    config, params = load(name)
    config = dataclasses.replace(config, rope_scaling=None)
    folder = tmp_path / 'model'
    save_pretrained(params, config, folder)
    tensors = (load_file(path / 'model.safetensors') for path in (folder, FAMILIES / name))
    jax.tree.map(np.testing.assert_array_equal, *tensors)
    ours, theirs = (json.loads((path / 'config.json').read_text()) for path in (folder, FAMILIES / name))
    theirs['num_experts'] = theirs.get('num_local_experts')  # in files of transformers 4
    of_shapes = {'max_window_layers', 'rope_parameters'}  # may be written in several ways
    shared = ours.keys() & theirs.keys() - of_shapes
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert load_pretrained(folder)[0] == config


@pytest.mark.slow
@pytest.mark.parametrize('name', ['kimi_k2/config_published.json', 'gpt_oss_packed/config.json',
                                  'llama4_published/config.json'])
def test_a_packed_model_or_one_of_another_name_is_saved_unpacked(name, tmp_path):
    name, file = name.split('/')
    config, params = load(name)
    save_pretrained(params, config, tmp_path / 'model', config_json=FAMILIES / name / file)
    config_again, params_again = load_pretrained(tmp_path / 'model')
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)
    written = json.loads((tmp_path / 'model' / 'config.json').read_text())
    assert written['model_type'] == {'kimi_k2': 'deepseek_v3', 'llama4_published': 'llama4_text'}.get(name, 'gpt_oss')
    assert written['architectures'][0].endswith('ForCausalLM')
    assert 'quantization_config' not in written


def test_a_config_json_comes_back_with_the_keys_that_we_do_not_know(tmp_path):
    folder = copy_folder(FAMILIES / 'gemma3', tmp_path)
    edit_json(folder / 'config.json', new_in_2030={'a': [1, None]}, auto_map={'AutoModel': 'code.Model'})
    values = json.loads((folder / 'config.json').read_text())
    config, params = load_pretrained(folder)
    save_pretrained(params, config, tmp_path / 'model', config_json=folder / 'config.json', dtype='bfloat16')
    del values['auto_map']  # names a file of code, which is not copied
    assert json.loads((tmp_path / 'model' / 'config.json').read_text()) == values | {'dtype': 'bfloat16'}


def test_a_config_json_of_another_model_is_not_saved(tmp_path):
    config, params = load('llama')
    for name, field in (('qwen3', 'qk_norm'), ('llama', 'rope_theta')):
        config = dataclasses.replace(config, rope_theta=1e4)
        save = functools.partial(save_pretrained, config_json=FAMILIES / name / 'config.json')
        message = refusal(save, params, config, tmp_path / 'model')
        assert 'config.json is not that of the model to be saved' in message
        assert f'{field}=' in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', [
    'llama', 'qwen2', 'smollm3', 'olmo2', 'olmo3', 'gemma2', 'gemma3', 'gpt_oss', 'deepseek_v3', 'llama4'])
def test_of_a_model_that_flags_do_not_make_the_config_json_is_asked_for(name, tmp_path):
    config, params = load(name)
    message = refusal(save_pretrained, params, config, tmp_path / 'model')
    assert 'no config.json can be derived' in message
    assert 'if it was trained from a published one, copy the config.json of that to' in message


@pytest.mark.parametrize('changes', [
    dict(qk_norm='plain'), dict(layer_types=('full', 'window'), window=4), dict(mlp='gelu'), dict(sinks=True)])
def test_what_transformers_would_compute_otherwise_is_not_saved(changes, tmp_path):
    config, params = load('llama')
    with pytest.raises(UserError, match=next(iter(changes))):
        save_pretrained(params, dataclasses.replace(config, **changes), tmp_path / 'model')
    assert not list(tmp_path.iterdir())


def test_a_large_model_is_saved_in_several_files_of_16_bits(tmp_path):
    config, params = load('llama')
    save_pretrained(params, config, tmp_path / 'model', dtype='bfloat16', shard_bytes=20_000,
                    config_json=FAMILIES / 'llama' / 'config.json')
    files = sorted(path.name for path in (tmp_path / 'model').glob('*.safetensors'))
    assert files == ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    for file in files:
        assert sum(x.nbytes for x in load_file(tmp_path / 'model' / file).values()) <= 20_000
    _, again = load_pretrained(tmp_path / 'model')
    low = lambda x: x.astype('bfloat16').astype('float32')
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(low(a), b), params, again)


def peak_of(function, *args):
    """The most bytes that Python and numpy held during a second call, which imports and traces nothing."""
    function(*args)
    tracemalloc.start()
    function(*args)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.fixture(scope='module')
def large():
    """(config, params) of 8 million parameters, of which the largest tensor has an eighth: 4 MB in float32."""
    config = GPTConfig(block_size=8, vocab_size=64, n_layer=2, n_head=4, n_embd=512, norm='rms', position='rope',
                       bias=False, mlp='swiglu', n_inner=2048, tied_head=False)
    return config, unflatten_dict({path: np.ones(shape, np.float32) for path, shape in param_shapes(config).items()})


def test_saving_holds_one_tensor_at_a_time(large, tmp_path):
    config, params = large
    folders = iter((tmp_path / 'a', tmp_path / 'b'))
    peak = peak_of(lambda: save_pretrained(params, config, next(folders)))
    assert peak < 1.5 * max(x.nbytes for x in jax.tree.leaves(params))


def test_an_export_of_a_folder_holds_four_parameters_and_a_tensor(tmp_path):
    config = GPTConfig(block_size=8, vocab_size=64, n_layer=16, n_head=4, n_embd=256, norm='rms', position='rope',
                       bias=False, mlp='swiglu', n_inner=512, tied_head=False)
    params = random_params(config)
    save_pretrained(params, config, tmp_path / 'model', dtype='bfloat16')
    config, lazy = open_pretrained(tmp_path / 'model')
    folders = iter((tmp_path / 'a', tmp_path / 'b'))
    peak = peak_of(lambda: save_pretrained(lazy, config, next(folders), dtype='bfloat16'))
    sizes = [x.size * 4 for x in jax.tree.leaves(params)]
    assert peak < 6 * max(sizes) < 0.15 * sum(sizes)
    first, again = (tmp_path / name / 'model.safetensors' for name in ('model', 'a'))
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize('family', ['gpt_oss', 'qwen3_moe', 'phi3', 'deepseek_v3_packed'])
def test_a_parameter_that_is_read_when_it_is_used_is_the_same(family):
    config, params = load(family)
    lazy_config, lazy = open_pretrained(FAMILIES / family)
    assert lazy_config == config
    jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(np.asarray, lazy))


def test_weights_that_16_bits_make_infinite_are_not_exported(tmp_path):
    config, params = load('llama')
    params = jax.tree.map(np.array, params)
    params['h_0']['mlp']['c_fc']['kernel'][3, 5] = 7e4
    options = dict(config_json=FAMILIES / 'llama' / 'config.json')
    said = refusal(lambda: save_pretrained(params, config, tmp_path / 'model', dtype='float16', **options))
    assert 'model.layers.0.mlp.up_proj.weight' in said and 'bfloat16' in said
    assert not list(tmp_path.iterdir())
    save_pretrained(params, config, tmp_path / 'model', dtype='bfloat16', **options)


# -----------------------------------------------------------------------------
# reading: dtypes, files, memory


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_files_and_parameters_may_be_in_16_bits(dtype, tmp_path):
    folder = copy_folder(FAMILIES / 'llama', tmp_path)
    edit_tensors(folder, {name: x.astype(dtype) for name, x in load_file(folder / 'model.safetensors').items()})
    _, exact = load('llama')
    config, low = load_pretrained(folder, dtype)
    assert config.dtype == dtype

    def check(a, b):
        assert b.dtype == (dtype if b.ndim >= 2 else 'float32')
        np.testing.assert_array_equal(a.astype(dtype).astype(b.dtype), b)

    jax.tree.map(check, exact, low)


def test_a_matrix_may_be_loaded_in_the_dtype_that_the_file_holds(tmp_path):
    folder = copy_folder(FAMILIES / 'llama', tmp_path)
    tensors = {name: x.astype('bfloat16') for name, x in load_file(folder / 'model.safetensors').items()}
    layer = 'model.layers.0.'
    for name in ('self_attn.q_proj', 'mlp.gate_proj'):  # q, k and v are one matrix, in two dtypes now
        tensors[f'{layer}{name}.weight'] = tensors[f'{layer}{name}.weight'].astype('float32')
    tensors[f'{layer}mlp.up_proj.weight'] = tensors[f'{layer}mlp.up_proj.weight'].astype('float64')
    edit_tensors(folder, tensors)
    config, params = load_pretrained(folder, 'stored')
    assert config.dtype == 'float32'
    in_float32 = {'c_attn', 'c_gate', 'c_fc'}
    dtypes = {path[-2]: x.dtype for path, x in flatten_dict(params['h_0']).items() if path[-1] == 'kernel'}
    assert dtypes == {name: 'float32' if name in in_float32 else 'bfloat16' for name in dtypes}
    assert params['wte'].dtype == 'bfloat16' and params['ln_f']['scale'].dtype == 'float32'
    jax.tree.map(np.testing.assert_array_equal, params, load_pretrained(folder)[1])


def test_of_a_gemma3_that_sees_the_text_part_is_loaded(tmp_path):
    folder = copy_folder(FAMILIES / 'gemma3', tmp_path)
    text_config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({'model_type': 'gemma3', 'text_config': text_config}))
    tensors = load_file(folder / 'model.safetensors')
    seeing = {f'language_model.{name}': x for name, x in tensors.items()}
    edit_tensors(folder, dict.fromkeys(tensors) | seeing | {'vision_tower.weight': np.ones(3, np.float32)})
    config, params = load_pretrained(folder)
    assert config == load('gemma3')[0]
    jax.tree.map(np.testing.assert_array_equal, params, load('gemma3')[1])


def split_into_three_files(folder):
    """Replaces model.safetensors by three files and their index."""
    tensors = load_file(folder / 'model.safetensors')
    (folder / 'model.safetensors').unlink()
    weight_map = {}
    for i in range(3):
        file = f'model-0000{i + 1}-of-00003.safetensors'
        some = sorted(tensors)[i::3]
        save_file({name: tensors[name] for name in some}, folder / file)
        weight_map |= dict.fromkeys(some, file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))


def test_files_are_read_together_and_each_parameter_is_placed_before_the_next_is_read(tmp_path):
    folder = copy_folder(FAMILIES / 'qwen3_moe', tmp_path)
    split_into_three_files(folder)
    device, on_the_host, placed = jax.devices()[3], [], []

    def place(path, array):
        assert all(ref() is None for ref in on_the_host)  # the previous parameter has been freed
        on_the_host.append(weakref.ref(array))
        placed.append('/'.join(path))
        return jax.device_put(jnp.array(array, copy=True), device)

    _, params = load_pretrained(folder, place=place)
    assert all(x.devices() == {device} for x in jax.tree.leaves(params))
    assert len(placed) == len(jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params, load('qwen3_moe')[1])
    (folder / 'model-00002-of-00003.safetensors').unlink()
    assert 'names model-00002-of-00003.safetensors, which is not beside it' in refusal(load_pretrained, folder)


def test_the_host_holds_no_more_than_the_parameters_and_one_tensor(large, tmp_path):
    config, params = large
    save_pretrained(params, config, tmp_path / 'model')
    peak = peak_of(load_pretrained, tmp_path / 'model', 'bfloat16')
    sizes = [x.size for x in jax.tree.leaves(params)]
    assert peak >= 2 * sum(sizes)  # all in bfloat16,
    assert peak < 2 * sum(sizes) + 4 * max(sizes)  # and one in float32


def test_parameters_are_loaded_the_largest_first_and_a_cpu_device_takes_them_over_without_a_copy():
    sizes = []

    def place(path, array):
        sizes.append(array.size)
        as_on_disk = array.T if path[-1] == 'kernel' else array  # [out, in]
        assert jax.device_put(as_on_disk, jax.devices()[0]).unsafe_buffer_pointer() == array.ctypes.data
        return array

    load_pretrained(FAMILIES / 'llama', place=place)
    assert sizes == sorted(sizes, reverse=True)

# -----------------------------------------------------------------------------
# what cannot be read is refused with one line


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    folder = copy_folder(FAMILIES / 'deepseek_v3', tmp_path)
    missing, unknown = 'model.layers.1.mlp.experts.5.up_proj.weight', 'model.layers.0.mlp.gate.weight'
    edit_tensors(folder, {missing: None, unknown: np.ones(3, np.float32)})
    message = refusal(load_pretrained, folder)
    assert f'lacks {missing}' in message
    assert f'unknown {unknown}' in message


def test_a_wrong_shape_is_named_with_what_was_expected(tmp_path):
    folder = copy_folder(FAMILIES / 'gpt_oss', tmp_path)
    name = 'model.layers.1.mlp.experts.gate_up_proj'
    edit_tensors(folder, {name: load_file(folder / 'model.safetensors')[name][:, :, :-2]})
    message = refusal(load_pretrained, folder)
    for part in (name, '(4, 32, 64)', '(4, 32, 62)'):
        assert part in message


@pytest.mark.parametrize('name', ['llama', 'gpt_oss_packed'])
@pytest.mark.parametrize('keep', [5, 0.5, 0.999])
def test_a_truncated_file_is_refused(name, keep, tmp_path):
    folder = copy_folder(FAMILIES / name, tmp_path)
    content = (folder / 'model.safetensors').read_bytes()
    n_bytes = keep if keep >= 1 else int(keep * len(content))
    (folder / 'model.safetensors').write_bytes(content[:n_bytes])
    message = refusal(load_pretrained, folder)
    assert 'cannot read' in message
    assert 'model.safetensors' in message


@pytest.mark.parametrize('name, key', [
    ('llama', 'hidden_size'), ('llama', 'vocab_size'),
    ('qwen3_moe', 'moe_intermediate_size'), ('gpt_oss', 'num_local_experts'), ('deepseek_v3', 'kv_lora_rank'),
    ('llama4', 'intermediate_size_mlp'), ('llama', 'model_type')])
def test_a_size_missing_from_the_config_is_transformers_default_which_the_tensors_contradict(name, key, tmp_path):
    folder = copy_folder(FAMILIES / name, tmp_path)
    edit_json(folder / 'config.json', **{key: None})
    assert re.search('for this config|its config has|model_type', refusal(load_pretrained, folder))


@pytest.mark.parametrize('name, key, value, named', [
    ('llama', 'model_type', 'mamba', 'model_type'),
    ('llama', 'hidden_act', 'gelu', 'hidden_act'),
    ('llama', 'attention_bias', True, 'attention_bias'),
    ('llama', 'mlp_bias', True, 'mlp_bias'),
    ('llama', 'rope_parameters', {'rope_type': 'dynamic', 'factor': 2.0}, 'dynamic'),
    ('llama', 'num_key_value_heads', 3, 'n_kv_head=3'),
    ('qwen3', 'layer_types', ['full_attention', 'linear_attention', 'full_attention'], 'linear_attention'),
    ('qwen3', 'layer_types', ['full_attention'], 'layer_types'),
    ('gpt_oss', 'swiglu_alpha', 1.5, 'swiglu_alpha'),
    ('gpt_oss', 'quantization_config', {'quant_method': 'gptq'}, 'gptq'),
    ('deepseek_v3', 'topk_method', 'greedy', 'topk_method'),
    ('deepseek_v3', 'scoring_func', 'softmax', 'scoring_func'),
    ('deepseek_v3', 'n_group', 3, '3 equal groups'),
    ('gemma3', 'final_logit_softcapping', 30.0, 'final_logit_softcapping'),
    ('gemma3', 'rope_parameters', {'sliding_attention': {'rope_type': 'linear', 'factor': 2.0}}, 'rope_type'),
    ('smollm3', 'no_rope_layers', [1], 'no_rope_layers'), ('llama4', 'no_rope_layers', [1], 'no_rope_layers'),
    ('llama4', 'hidden_size', '32', 'hidden_size')])
def test_a_config_that_we_do_not_compute_is_refused_by_name(name, key, value, named, tmp_path):
    folder = copy_folder(FAMILIES / name, tmp_path)
    edit_json(folder / 'config.json', **{key: value})
    message = refusal(load_pretrained, folder)
    assert named in message
    assert 'config.json' in message


def test_rope_scaling_in_its_older_place_is_checked_too(tmp_path):
    folder = copy_folder(FAMILIES / 'llama', tmp_path)
    edit_json(folder / 'config.json', rope_parameters=None, rope_scaling={'rope_type': 'dynamic'})
    message = refusal(load_pretrained, folder)
    assert 'dynamic' in message
    assert 'config.json' in message


@pytest.mark.parametrize('name, tensor', [
    ('gpt_oss_packed', 'model.layers.0.mlp.experts.down_proj_scales'),
    ('deepseek_v3_packed', 'model.layers.0.self_attn.o_proj.weight_scale_inv')])
def test_packed_weights_without_their_scales_are_refused(name, tensor, tmp_path):
    path = copy_folder(FAMILIES / name, tmp_path) / 'model.safetensors'
    renamed = tensor[:-3] + 'xyz'
    path.write_bytes(path.read_bytes().replace(tensor.encode(), renamed.encode()))
    assert renamed in refusal(load_pretrained, path.parent)


@pytest.mark.parametrize('name, old, new, message', [
    ('gpt_oss_packed', b'"dtype":"U8"', b'"dtype":"I8"', 'are not MXFP4'),
    ('deepseek_v3_packed', b'"dtype":"F8_E4M3"', b'"dtype":"I8"', 'not float8 with scales')])
def test_packed_weights_of_another_type_are_refused(name, old, new, message, tmp_path):
    path = copy_folder(FAMILIES / name, tmp_path) / 'model.safetensors'
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new.ljust(len(old))))
    assert message in refusal(load_pretrained, path.parent)
