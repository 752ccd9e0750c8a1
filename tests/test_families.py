"""The checkpoint families. tests/golden/make_families.py made the models, and what transformers computes from them."""
import dataclasses
import functools
import json
import shutil
import tracemalloc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from jax_pretrained import load_pretrained, param_shapes, read_config, save_pretrained
from jax_train_utils import make_train_step, setup_distributed_training
from jax_ops import UserError, attend, quantize_params, rope_frequencies
from jax_transformer import (
    GPT, MLA, GPTConfig, MoE, RopeScaling, RoutedMLP, Router, TrainState, cache_bytes, decoding_params, estimate_mfu, generate,
    init_cache)

FOLDERS = Path(__file__).parent / 'golden' / 'families'
EXPECTED = np.load(FOLDERS / 'expected.npz')
IDX = EXPECTED['idx']
NAMES = sorted(folder.name for folder in FOLDERS.iterdir() if folder.is_dir())
BASIC = [name for name in NAMES if not name.endswith(('_packed', '_published'))]


@functools.cache
def load(name):
    return load_pretrained(FOLDERS / name)


def expected(name, what):
    return EXPECTED[f'{name.removesuffix("_published")}/{what}']


def apply(config, params, idx, **how):
    return jax.jit(lambda params: GPT(config).apply({'params': params}, idx, **how))(params)


# -----------------------------------------------------------------------------
# what is read computes what transformers does


@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_transformers(name):
    np.testing.assert_allclose(apply(*load(name), IDX), expected(name, 'logits'), rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', BASIC)
def test_greedy_continuation_through_the_cache_is_that_of_transformers_without(name):
    config, params = load(name)
    prompt = expected(name, 'greedy')[:, :29]
    tokens = generate(params, config, prompt, 12, rng=jax.random.key(0), temperature=0)
    np.testing.assert_array_equal(tokens, expected(name, 'greedy'))


@pytest.mark.parametrize('name', BASIC)
def test_gradient_is_that_of_torch(name):
    config, params = load(name)

    def loss(wte):
        logits = GPT(config).apply({'params': params | {'wte': wte}}, IDX[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, IDX[:, 1:]).mean()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(params['wte']), expected(name, 'grad'), rtol=0, atol=1e-5)


@pytest.mark.parametrize('name', BASIC)
def test_both_styles_of_config_json_mean_the_same(name):
    path = FOLDERS / name / 'config_published.json'
    if not path.exists():
        path = next(FOLDERS.glob(f'{name}_p*')) / 'config.json'
    published = read_config(json.loads(path.read_text()), 'published')[0]
    written = read_config(json.loads((FOLDERS / name / 'config.json').read_text()), 'written')[0]
    assert published == written


def test_a_config_survives_json():
    for name in BASIC:
        config = load(name)[0]
        assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


# -----------------------------------------------------------------------------
# the published sizes have the published numbers of parameters

LLAMA = dict(model_type='llama', vocab_size=128256, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=5e5, rms_norm_eps=1e-5,
             rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type='llama3'))
QWEN3 = dict(model_type='qwen3', vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1000000,
             rope_scaling=None, rms_norm_eps=1e-6, sliding_window=None, use_sliding_window=False, max_window_layers=28)
QWEN3_MOE = QWEN3 | dict(model_type='qwen3_moe', num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
                         intermediate_size=6144, decoder_sparse_step=1, mlp_only_layers=[])
GPT_OSS = dict(model_type='gpt_oss', hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
               vocab_size=201088, num_experts_per_tok=4, experts_per_token=4, max_position_embeddings=131072, rope_theta=150000,
               sliding_window=128, attention_bias=True, rope_scaling=dict(
                   beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type='yarn', truncate=False))
DEEPSEEK = dict(model_type='deepseek_v3', hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
                intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
                q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vocab_size=129280,
                first_k_dense_replace=3, n_group=8, topk_group=4, max_position_embeddings=163840, rope_theta=10000, rope_scaling=dict(
                    type='yarn', factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096))
KIMI = DEEPSEEK | dict(model_type='kimi_k2', num_attention_heads=64, n_routed_experts=384, vocab_size=163840, first_k_dense_replace=1,
                       n_group=1, topk_group=1, routed_scaling_factor=2.827, num_key_value_heads=64)
LLAMA4 = dict(model_type='llama4_text', hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
              intermediate_size=8192, intermediate_size_mlp=16384, vocab_size=202048, num_experts_per_tok=1,
              max_position_embeddings=1048576, no_rope_layers=[], rope_scaling=None)


def sized(base, n_layer, width, heads, inner=None, tied=None, **more):
    return base | dict(num_hidden_layers=n_layer, hidden_size=width, num_attention_heads=heads) | (
        {'intermediate_size': inner} if inner else {}) | ({'tie_word_embeddings': True} if tied else {}) | more


PUBLISHED = {
    'Llama-3.2-1B': (sized(LLAMA, 16, 2048, 32, 8192, True), 1_235_814_400),
    'Llama-3.2-3B': (sized(LLAMA, 28, 3072, 24, 8192, True), 3_212_749_824),
    'Llama-3.1-8B': (sized(LLAMA, 32, 4096, 32, 14336), 8_030_261_248),
    'Llama-3.1-70B': (sized(LLAMA, 80, 8192, 64, 28672), 70_553_706_496),
    'Qwen3-0.6B': (sized(QWEN3, 28, 1024, 16, 3072, True), 596_049_920),
    'Qwen3-1.7B': (sized(QWEN3, 28, 2048, 16, 6144, True), 1_720_574_976),
    'Qwen3-4B': (sized(QWEN3, 36, 2560, 32, 9728, True), 4_022_468_096),
    'Qwen3-8B': (sized(QWEN3, 36, 4096, 32, 12288), 8_190_735_360),
    'Qwen3-14B': (sized(QWEN3, 40, 5120, 40, 17408), 14_768_307_200),
    'Qwen3-32B': (sized(QWEN3, 64, 5120, 64, 25600), 32_762_123_264),
    'Qwen3-30B-A3B': (sized(QWEN3_MOE, 48, 2048, 32, moe_intermediate_size=768), 30_532_122_624),
    'Qwen3-235B-A22B': (sized(QWEN3_MOE, 94, 4096, 64, moe_intermediate_size=1536), 235_093_634_560),
    'gpt-oss-20b': (GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32), 20_914_757_184),
    'gpt-oss-120b': (GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128), 116_829_156_672),
    'DeepSeek-V3': (DEEPSEEK, 671_026_404_352),
    'Kimi-K2': (KIMI, 1_026_408_209_408),
    'Llama-4-Scout': (LLAMA4 | dict(num_local_experts=16), 107_769_861_120),
    'Llama-4-Maverick': (LLAMA4 | dict(num_local_experts=128, interleave_moe_layer_step=2), 400_711_848_960),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_sizes_have_the_published_number_of_parameters(name):
    hf, total = PUBLISHED[name]
    shapes = param_shapes(read_config(hf, name)[0])
    buffers = sum(shape[0] for path, shape in shapes.items() if path[-1] == 'selection_bias')  # not counted as parameters
    assert sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values()) - buffers == total


def test_published_configs_are_read_whole():
    config, _ = read_config(DEEPSEEK, 'DeepSeek-V3')
    assert config.attention_scale == pytest.approx(1.8738 / 192**0.5, rel=1e-4) and config.rope_scaling.amplitude == 1
    assert config.moe == MoE(256, 8, 2048, 2048, (False,) * 3 + (True,) * 58, 'sigmoid', True, 2.5, True, 8, 4)
    config, _ = read_config(GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32), 'gpt-oss-20b')
    assert config.rope_scaling.amplitude == pytest.approx(1.3466, abs=1e-4) and not config.rope_scaling.truncate
    assert [config.layer(i)[0] for i in range(3)] == ['window', 'full', 'window'] and config.sinks and config.window == 128
    config, _ = read_config(LLAMA4 | dict(num_local_experts=16), 'Scout')
    assert [config.layer(i)[0] for i in range(5)] == ['chunk', 'chunk', 'chunk', 'nope', 'chunk'] and config.chunk == 8192
    assert read_config(QWEN3 | PUBLISHED['Qwen3-0.6B'][0], 'Qwen3')[0].layer_types == ('full',)


# -----------------------------------------------------------------------------
# mechanisms

SMALL = dict(block_size=32, vocab_size=29, n_layer=2, n_head=4, n_embd=16)


@functools.cache
def small(**settings):
    """A config and parameters far from their small initial values."""
    config, rng = GPTConfig(**SMALL | settings), np.random.default_rng(0)
    return config, unflatten_dict({path: np.float32((path[-1] == 'scale') + 0.3 * rng.normal(size=shape))
                                   for path, shape in param_shapes(config).items()})


def test_llama3_frequencies_blend_between_the_two_numbers_of_turns():
    scaling = RopeScaling('llama3', 8.0, 8192, 1.0, 4.0)
    plain, scaled = rope_frequencies(5e5, 128), rope_frequencies(5e5, 128, scaling)
    turns = plain * 8192 / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8)
    assert ((scaled[(turns < 4) & (turns > 1)] / plain[(turns < 4) & (turns > 1)]) > 1 / 8).all()
    without_a_middle = rope_frequencies(5e5, 128, dataclasses.replace(scaling, high=1.0))
    np.testing.assert_allclose(without_a_middle, np.where(turns > 1, plain, plain / 8))


def test_yarn_frequencies_are_the_formulas_of_the_paper():
    got = rope_frequencies(150000.0, 64, RopeScaling('yarn', 32.0, 4096, 1.0, 32.0, truncate=False))
    j, f = np.arange(32), 150000.0 ** (-np.arange(32) / 32)
    low, high = (64 * np.log(4096 / (2 * np.pi * turns)) / (2 * np.log(150000.0)) for turns in (32, 1))
    ramp = np.clip((j - low) / (high - low), 0, 1)
    np.testing.assert_allclose(got, f / 32 * ramp + f * (1 - ramp))


def test_rope_scores_depend_on_the_distance_alone():
    config, params = small(position='rope', norm='rms', n_kv_head=2, bias=False, n_layer=1)
    idx = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    here, moved = (apply(config, params, idx, position_BxT=start + jnp.arange(8)[None]) for start in (0, 100))
    np.testing.assert_allclose(here, moved, rtol=0, atol=1e-4 * np.abs(here).max())


def test_shared_key_heads_are_those_of_attention_with_repeated_ones():
    q, k, v = (np.random.default_rng(i).normal(size=(2, 5, heads, 8)).astype(np.float32) for i, heads in enumerate((6, 2, 2)))
    seen = jnp.tril(jnp.ones((5, 5), bool))[None]
    np.testing.assert_allclose(attend(q, k, v, seen), attend(q, k.repeat(3, 2), v.repeat(3, 2), seen), atol=1e-6)


def test_a_sink_takes_its_share_of_the_probability():
    q, k = jax.random.normal(jax.random.key(0), (1, 3, 2, 4)), jnp.zeros((1, 3, 2, 4))
    y = attend(q, k, jnp.ones_like(k), jnp.ones((1, 3, 3), bool), sinks_H=jnp.array([0.0, np.log(9)]))
    np.testing.assert_allclose(y[0, :, :, 0], [[3 / 4, 3 / 12]] * 3, rtol=1e-6)


@pytest.mark.parametrize('kind, seen', [('window', lambda q, k: q - 4 < k <= q), ('chunk', lambda q, k: k <= q and k // 4 == q // 4),
                                        ('full', lambda q, k: k <= q)])
def test_a_layer_sees_its_window_or_chunk(kind, seen):
    config, params = small(layer_types=(kind,), window=4, chunk=4, position='rope', n_layer=1)
    params = params | {'h_0': params['h_0'] | {'mlp': jax.tree.map(jnp.zeros_like, params['h_0']['mlp'])}}
    idx = np.random.default_rng(0).integers(29, size=(1, 10))

    other = idx.copy()
    for at in range(10):
        for key in range(10):
            other[:] = idx
            other[0, key] = (idx[0, key] + 7) % 29
            changed = np.abs(logits_small(config, params, other)[0, at] - logits_small(config, params, idx)[0, at]).max() > 1e-6
            assert changed == seen(at, key), (at, key)


@functools.partial(jax.jit, static_argnums=0)
def logits_small_jit(config, params, idx):
    return GPT(config).apply({'params': params}, idx)


def logits_small(config, params, idx):
    return np.asarray(logits_small_jit(config, params, idx))


@pytest.mark.parametrize('name', ['gpt_oss', 'llama4', 'deepseek_v3'])
def test_cached_logits_equal_uncached_ones_however_the_calls_are_cut(name):
    config, params = load(name)
    step = jax.jit(lambda params, idx, position, cache: GPT(config).apply({'params': params}, idx, position_BxT=position, cache=cache))
    cache, logits = init_cache(config, 2, 40), []
    for first, end in ((0, 29), (29, 30), (30, 31), (31, 40)):
        out, cache = step(params, IDX[:, first:end], np.arange(first, end, dtype=np.int32)[None], cache)
        logits.append(out)
    np.testing.assert_allclose(np.concatenate(logits, 1), expected(name, 'logits'), rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', ['gpt_oss', 'llama4'])
def test_prompts_of_different_lengths_share_windowed_caches(name):
    config, params = load(name)
    prompts = expected(name, 'greedy')[:, :29]
    run = lambda rows, lengths: generate(params, config, prompts[rows], 12, rng=jax.random.key(0), temperature=0, prompt_lengths_B=lengths)
    together, short = run([0, 1], [29, 13]), run([1, 1], [13, 13])
    np.testing.assert_array_equal(together[0], expected(name, 'greedy')[0])
    np.testing.assert_array_equal(together[1], short[0])


@pytest.mark.parametrize('name', ['gpt_oss', 'llama4'])
def test_rejected_drafts_cost_a_windowed_cache_nothing(name):
    config, params = load(name)
    tokens = generate(params, config, expected(name, 'greedy')[:, :29], 12, rng=jax.random.key(0), temperature=0, n_draft=3)
    np.testing.assert_array_equal(tokens, expected(name, 'greedy'))


@pytest.mark.parametrize('name', ['qwen3_moe', 'gpt_oss', 'deepseek_v3'])
def test_int8_weights_and_caches_keep_the_logits_of_every_family_within_a_few_percent(name):
    config, params = load(name)
    quantized = quantize_params(params)
    flat = flatten_dict(quantized)
    assert flat[('h_1', 'mlp', 'router', 'kernel')].dtype == jnp.float32 and flat[('lm_head_int8',)].dtype == jnp.int8
    experts = flat[('h_1', 'mlp', 'experts_c_proj', 'kernel_int8')]
    assert experts.dtype == jnp.int8 and experts.shape[1:] == (config.n_embd, config.moe.width)  # [out, in]
    cache = init_cache(config, 2, 40, 'int8')
    kept = sum(x.nbytes for layer in cache.values() for x in layer.values())
    assert kept == 2 * cache_bytes(config, 40, 'int8') < 0.6 * 2 * cache_bytes(config, 40)
    step = jax.jit(lambda params, idx, position, cache: GPT(config).apply({'params': params}, idx, position_BxT=position, cache=cache))
    _, cache = step(quantized, IDX[:, :36], np.arange(36, dtype=np.int32)[None], cache)
    logits, _ = step(quantized, IDX[:, 36:], np.arange(36, 40, dtype=np.int32)[None], cache)
    error = logits - expected(name, 'logits')[:, 36:]
    assert 1e-4 < np.sqrt((error**2).mean()) < 0.1 * expected(name, 'logits').std()


@pytest.mark.parametrize('name, numbers', [
    ('gpt_oss', 2 * 2 * 8 * (5 + 40)),  # two layers, one with a window of 5: keys and values of 2 heads of 8
    ('llama4', 2 * 2 * 8 * (3 * 8 + 40)),  # three of four layers keep a chunk of 8
    ('deepseek_v3', (16 + 4) * 2 * 40), ('llama', 2 * 2 * 8 * 2 * 40)])
def test_a_cache_holds_what_the_formula_says(name, numbers):
    config, _ = load(name)
    cache = init_cache(config, 3, 40)
    kept = sum(x.nbytes for layer in cache.values() for x in layer.values())
    assert kept == 3 * cache_bytes(config, 40) == 3 * 4 * numbers


def every_expert_on_every_token(config, mlp, x_PxD):
    """The reference: nothing is sorted, all experts compute all tokens, and the weights of those not chosen are 0."""
    moe = config.moe
    expert, weight = jax.nn.softmax(x_PxD @ mlp['router']['kernel']), None
    weight, chosen = jax.lax.top_k(expert, moe.n_used)
    weight_PxE = (jax.nn.one_hot(chosen, moe.n_expert) * (weight / weight.sum(-1, keepdims=True))[..., None]).sum(1)
    gate, up, down = (mlp[f'experts_{name}']['kernel'] for name in ('c_gate', 'c_fc', 'c_proj'))
    h = jax.nn.silu(jnp.einsum('pd,edf->pef', x_PxD, gate)) * jnp.einsum('pd,edf->pef', x_PxD, up)
    return jnp.einsum('pef,efd,pe->pd', h, down, weight_PxE)


@pytest.mark.parametrize('n_expert, n_used, tokens', [(8, 2, 40), (8, 3, 1), (3, 1, 200), (2, 2, 5)])
def test_grouped_experts_and_their_gradients_equal_every_expert_on_every_token(n_expert, n_used, tokens):
    config, params = small(mlp='swiglu', bias=False, moe=MoE(n_expert, n_used, 24))
    mlp, x = params['h_0']['mlp'], np.random.default_rng(7).normal(size=(1, tokens, 16)).astype(np.float32)
    x[:, tokens // 2:] = x[:, :1]  # many tokens with the same experts
    ours = lambda mlp, x: RoutedMLP(config).apply({'params': mlp}, x)
    theirs = lambda mlp, x: every_expert_on_every_token(config, mlp, x[0])[None]

    def outcome(f):
        y, vjp = jax.vjp(f, mlp, x)
        return y, vjp(jnp.cos(y))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
                 jax.jit(functools.partial(outcome, ours))(), jax.jit(functools.partial(outcome, theirs))())


def test_experts_may_be_mlps_of_gpt2_with_biases():
    config, params = small(moe=MoE(4, 4, 24))
    mlp, x = params['h_0']['mlp'], np.random.default_rng(7).normal(size=(1, 6, 16)).astype(np.float32)
    score = jax.nn.softmax(x[0] @ mlp['router']['kernel'] + mlp['router']['bias'])
    each = [jax.nn.gelu(x[0] @ mlp['experts_c_fc']['kernel'][e] + mlp['experts_c_fc']['bias'][e], approximate=False)
            @ mlp['experts_c_proj']['kernel'][e] + mlp['experts_c_proj']['bias'][e] for e in range(4)]
    expected = sum(score[:, e, None] * y for e, y in enumerate(each))
    np.testing.assert_allclose(RoutedMLP(config).apply({'params': mlp}, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_the_balancing_loss_is_its_weight_if_experts_are_equally_busy_and_more_if_not():
    config, params = small(mlp='swiglu', bias=False, moe=MoE(4, 1, 8, balance=0.5), n_embd=4, n_layer=1)
    apply = lambda kernel, x: Router(config).apply({'params': {'kernel': kernel}}, x[None], mutable=['losses'])
    router = jax.jit(lambda kernel, x: apply(kernel, x)[1]['losses']['balance'][0])
    assert router(10 * jnp.eye(4), jnp.eye(4)) == pytest.approx(0.5, rel=1e-3)
    assert router(10 * jnp.eye(4), jnp.eye(4)[jnp.zeros(4, int)]) == pytest.approx(0.5 * 4, rel=1e-2)
    grad = jax.grad(router)(jnp.eye(4), jnp.eye(4)[jnp.array([0, 0, 0, 1])])
    assert grad[0, 0] > 0 > grad[0, 2]  # away from the busy expert


@pytest.mark.parametrize('scan_layers', [False, True])
def test_the_training_loss_pushes_experts_into_balance_but_reports_cross_entropy(scan_layers):
    idx = np.random.default_rng(0).integers(29, size=(1, 4, 17))
    batch = {'x': jnp.asarray(idx[..., :-1]), 'y': jnp.asarray(idx[..., 1:]), 'row': jnp.zeros((1, 4), jnp.uint32)}
    results = {}
    for balance in (0.0, 1.0):
        config, params = small(mlp='swiglu', bias=False, moe=MoE(4, 1, 8, balance=balance), n_layer=1, scan_layers=scan_layers)
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
        new, metrics = jax.jit(make_train_step(config, 0, 0.0, lambda step: 1.0))(state, batch)
        results[balance] = float(metrics['loss']), np.asarray(params['h_0']['mlp']['router']['kernel'] - new.params['h_0']['mlp']['router']['kernel'])
    assert results[0.0][0] == results[1.0][0]
    assert np.abs(results[0.0][1] - results[1.0][1]).max() > 1e-3


def test_latent_attention_is_the_same_with_absorbed_projections():
    config, params = load('kimi_k2')  # the tests above show that it is the same: one token per step, and all at once
    assert config.mla == MLA(q_rank=0, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6)
    cache = init_cache(config, 2, 40)
    run = lambda idx: GPT(config).apply({'params': params}, idx, position_BxT=jnp.arange(idx.shape[1])[None], cache=cache)
    keys_of_all_heads = 'f32[2,40,4,8]'
    assert keys_of_all_heads in str(jax.make_jaxpr(run)(IDX[:, :29]))
    assert keys_of_all_heads not in str(jax.make_jaxpr(run)(IDX[:, :1]))


@pytest.mark.parametrize('bad, message', [
    (dict(n_kv_head=3), r'n_kv_head=3 does not divide n_head=4; one of \[1, 2, 4\] does'), (dict(norm='batch'), 'norm must be one of layer, rms'),
    (dict(position='alibi'), 'position must be'), (dict(mlp='relu'), 'mlp must be'), (dict(layer_types=('window',)), "'window'"),
    (dict(layer_types=('sparse',), window=3), "'sparse'"), (dict(layer_types=()), 'layer_types'), (dict(qk_norm='yes'), 'qk_norm'),
    (dict(position='rope', head_dim=3), 'even'), (dict(moe=dict(n_expert=4, n_used=5, width=8)), '1 to 4 of 4'),
    (dict(moe=dict(n_expert=4, n_used=1, width=8, score='tanh')), 'softmax or sigmoid'),
    (dict(moe=dict(n_expert=4, n_used=1, width=8, n_group=3)), '3 equal groups'),
    (dict(rope_scaling=dict(kind='ntk', factor=2.0, original_length=8)), 'llama3 or yarn'),
    (dict(attention='chunked', sinks=True), 'attention=chunked does not compute'),
    (dict(scan_layers=True, layer_types=('window', 'full'), window=3), 'all alike')])
def test_a_config_that_makes_no_model_is_refused(bad, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(**SMALL | bad)


def test_mfu_counts_the_experts_that_are_used_and_the_keys_that_are_seen():
    config = GPTConfig(**SMALL | dict(layer_types=('window', 'full'), window=8, moe=MoE(8, 2, 24, layers=(False, True)), mlp='swiglu'))
    used = 100_000 - 6 * 3 * 16 * 24
    assert estimate_mfu(100_000, config, 1.0, 1.0) == pytest.approx(6 * used + 12 * 16 * (8 + 32))


@pytest.mark.parametrize('name, tensor, expert', [
    ('qwen3', 2, 1), ('qwen3_moe', 1, 2), ('gpt_oss', 2, 2), ('deepseek_v3', 2, 2), ('llama4', 2, 2)])
def test_a_model_shared_out_over_a_mesh_gives_the_logits_of_one_device(name, tensor, expert):
    config, params = load(name)
    parallel = setup_distributed_training(jax.devices()[:2 * tensor * expert], fsdp=2, tensor=tensor, expert=expert)
    parallel.check(config)
    placed = parallel.put(params)
    with parallel.entered():
        logits = jax.jit(lambda params: GPT(config).apply({'params': params}, IDX))(placed)
    assert placed['h_0']['attn']['c_proj']['kernel'].sharding.shard_shape((32, 32)) == (32 // tensor, 16)
    np.testing.assert_allclose(logits, expected(name, 'logits'), rtol=0, atol=1e-4)


@pytest.mark.parametrize('name, quantize', [('qwen3_moe', ''), ('gpt_oss', 'int8')])
def test_experts_on_several_devices_continue_a_text_as_on_one(name, quantize):
    config, params = load(name)
    texts = []
    for tensor, expert in ((1, 1), (1, 2) if name == 'qwen3_moe' else (2, 2)):
        parallel = setup_distributed_training(jax.devices()[:tensor * expert], tensor=tensor, expert=expert)
        placed = decoding_params(parallel.put(params), 'float32', quantize)
        with parallel.entered():
            texts.append(generate(placed, config, IDX[:, :9], 12, rng=jax.random.key(0), temperature=0))
    np.testing.assert_array_equal(*texts)


# -----------------------------------------------------------------------------
# writing


@pytest.mark.parametrize('name', ['llama', 'qwen3', 'qwen3_moe'])
def test_what_is_saved_is_what_transformers_saves(name, tmp_path):
    config, params = load(name)
    save_pretrained(params, config, tmp_path / 'model')
    ours, theirs = (load_file(folder / 'model.safetensors') for folder in (tmp_path / 'model', FOLDERS / name))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    ours, theirs = (json.loads((folder / 'config.json').read_text()) for folder in (tmp_path / 'model', FOLDERS / name))
    ours['num_local_experts'] = ours.pop('num_experts', None)
    same = {'hidden_size', 'num_key_value_heads', 'intermediate_size', 'tie_word_embeddings', 'layer_types', 'num_local_experts',
            'mlp_only_layers', 'architectures', 'model_type', 'norm_topk_prob', 'max_position_embeddings', 'rms_norm_eps'}
    assert {key: ours[key] for key in same & theirs.keys()} == {key: theirs[key] for key in same & theirs.keys()}
    config_again, params_again = load_pretrained(tmp_path / 'model')
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


@pytest.mark.parametrize('name, reason', [('gpt_oss', 'sinks=True'), ('deepseek_v3', 'mla='), ('llama4', "'chunk'")])
def test_what_transformers_would_compute_otherwise_is_not_saved(name, reason, tmp_path):
    config, params = load(name)
    with pytest.raises(UserError, match=reason):
        save_pretrained(params, config, tmp_path / 'model')
    assert not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# what is read: dtypes, shards, memory; and what is refused with one line


def copy(name, tmp_path):
    return Path(shutil.copytree(FOLDERS / name, tmp_path / name))


def edit_tensors(folder, edit):
    path = folder / 'model.safetensors'
    tensors = edit(load_file(path))
    save_file(tensors, path)


def edit_config(folder, **changes):
    values = json.loads((folder / 'config.json').read_text()) | changes
    (folder / 'config.json').write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def refusal(folder):
    with pytest.raises(UserError) as error:
        load_pretrained(folder)
    assert '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_files_and_parameters_may_be_in_16_bits(dtype, tmp_path):
    folder = copy('llama', tmp_path)
    edit_tensors(folder, lambda tensors: {name: x.astype(dtype) for name, x in tensors.items()})
    exact, low = load('llama')[1], load_pretrained(folder, dtype)
    assert low[0].dtype == dtype

    def check(a, b):
        assert b.dtype == (dtype if b.ndim >= 2 else 'float32')
        np.testing.assert_array_equal(a.astype(dtype).astype(b.dtype), b)

    jax.tree.map(check, exact, low[1])


def test_shards_are_read_together_and_each_parameter_is_placed_before_the_next_is_read(tmp_path):
    folder = copy('qwen3_moe', tmp_path)
    tensors = load_file(folder / 'model.safetensors')
    (folder / 'model.safetensors').unlink()
    parts = {f'model-0000{i + 1}-of-00003.safetensors': sorted(tensors)[i::3] for i in range(3)}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps(
        {'weight_map': {name: file for file, some in parts.items() for name in some}}))
    device, alive, placed = jax.devices()[3], [], []

    def place(path, array):
        assert not any(ref() is not None for ref in alive)  # the one before has left the host
        alive.append(weakref.ref(array))
        placed.append('/'.join(path))
        return jax.device_put(jnp.array(array, copy=True), device)

    config, params = load_pretrained(folder, place=place)
    assert all(x.devices() == {device} for x in jax.tree.leaves(params)) and len(placed) == len(jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params, load('qwen3_moe')[1])
    (folder / 'model-00002-of-00003.safetensors').unlink()
    assert 'names model-00002-of-00003.safetensors, which is not beside it' in refusal(folder)


def test_the_host_holds_no_more_than_the_parameters_and_one_tensor(tmp_path):
    config = GPTConfig(block_size=8, vocab_size=64, n_layer=8, n_head=4, n_embd=128, norm='rms', position='rope', bias=False,
                       mlp='swiglu', n_inner=512, tied_head=False)
    shapes = param_shapes(config)
    rng = np.random.default_rng(0)
    save_pretrained(unflatten_dict({path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}), config,
                    tmp_path / 'model')
    tracemalloc.start()
    load_pretrained(tmp_path / 'model', 'bfloat16')
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size, largest = (f(int(np.prod(shape)) for shape in shapes.values()) for f in (sum, max))
    assert 2 * size <= peak < 2 * size + 4 * largest + 500_000  # 2 bytes each, one in float32, and what Python needs


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    folder = copy('deepseek_v3', tmp_path)
    edit_tensors(folder, lambda t: {k: x for k, x in t.items() if k != 'model.layers.1.mlp.experts.5.up_proj.weight'} | {
        'model.layers.0.mlp.gate.weight': np.ones(3, np.float32)})
    message = refusal(folder)
    assert 'lacks model.layers.1.mlp.experts.5.up_proj.weight' in message and 'unknown model.layers.0.mlp.gate.weight' in message


def test_a_wrong_shape_is_named_with_what_was_expected(tmp_path):
    folder = copy('gpt_oss', tmp_path)
    name = 'model.layers.1.mlp.experts.gate_up_proj'
    edit_tensors(folder, lambda t: t | {name: t[name][:, :, :-2]})
    assert all(part in refusal(folder) for part in (name, '(4, 32, 64)', '(4, 32, 62)'))


@pytest.mark.parametrize('name', ['llama', 'gpt_oss_packed'])
@pytest.mark.parametrize('keep', [5, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_refused(name, keep, tmp_path):
    path = copy(name, tmp_path) / 'model.safetensors'
    content = path.read_bytes()
    path.write_bytes(content[:keep if keep >= 1 else int(keep * len(content))])
    assert 'cannot read' in refusal(path.parent) and 'model.safetensors' in refusal(path.parent)


@pytest.mark.parametrize('name, key', [
    ('llama', 'hidden_size'), ('llama', 'vocab_size'), ('qwen3', 'sliding_window'), ('qwen3_moe', 'moe_intermediate_size'),
    ('gpt_oss', 'num_local_experts'), ('deepseek_v3', 'kv_lora_rank'), ('llama4', 'intermediate_size_mlp'), ('llama', 'model_type')])
def test_a_key_missing_from_the_config_is_named(name, key, tmp_path):
    folder = copy(name, tmp_path)
    edit_config(folder, **{key: None})
    assert f'lacks {key}' in refusal(folder) and 'config.json' in refusal(folder)


@pytest.mark.parametrize('name, key, value', [
    ('llama', 'model_type', 'mamba'), ('llama', 'hidden_act', 'gelu'), ('llama', 'attention_bias', True), ('llama', 'mlp_bias', True),
    ('llama', 'rope_scaling', {'rope_type': 'longrope'}), ('qwen3', 'layer_types', ['full_attention', 'linear_attention', 'full_attention']),
    ('qwen3', 'layer_types', ['full_attention']), ('gpt_oss', 'swiglu_alpha', 1.5), ('gpt_oss', 'quantization_config', {'quant_method': 'gptq'}),
    ('deepseek_v3', 'topk_method', 'greedy'), ('deepseek_v3', 'scoring_func', 'softmax'), ('llama4', 'hidden_size', '32'),
    ('llama', 'num_key_value_heads', 3), ('deepseek_v3', 'n_group', 3)])
def test_a_config_that_we_do_not_compute_is_refused_by_name(name, key, value, tmp_path):
    folder = copy(name, tmp_path)
    if key == 'rope_scaling':
        edit_config(folder, rope_parameters=None)
    edit_config(folder, **{key: value})
    known = {'rope_scaling': 'longrope', 'quantization_config': 'gptq', 'num_key_value_heads': 'n_kv_head=3', 'n_group': '3 equal groups'}
    message = refusal(folder)
    assert known.get(key, key) in message and 'config.json' in message


@pytest.mark.parametrize('name, tensor', [('gpt_oss_packed', 'model.layers.0.mlp.experts.down_proj_scales'),
                                          ('deepseek_v3_packed', 'model.layers.0.self_attn.o_proj.weight_scale_inv')])
def test_packed_weights_without_their_scales_are_refused(name, tensor, tmp_path):
    folder = copy(name, tmp_path)
    path = folder / 'model.safetensors'
    content = path.read_bytes()
    path.write_bytes(content.replace(tensor.encode(), tensor.encode()[:-3] + b'xyz'))
    assert tensor[:-3] + 'xyz' in refusal(folder)
