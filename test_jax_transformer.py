"""What jax_transformer.py and jax_generate.py promise. `python test_jax_transformer.py` runs this file, `python -m
pytest` all tests."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jax_generate
import jax_transformer
from jax_flags import UserError
from jax_generate import (
    Controls, PrefixCache, generate, generate_stream, penalize_repetition, prompt_lookup_draft, sample_token,
    sampling_logits, score)
from jax_ops.decode_weights import cast_matrices, convert_params_for_decoding, quantize_params, transpose_kernels
from jax_ops.matmul import Transposed
from jax_train_utils import create_train_state
from jax_transformer import GPTConfig, count_params, create_call, estimate_mfu, init_cache
from tests.common import TINY, apply, cached_logits, guess, random_params, random_tokens, slow


def init_params(config):
    return create_train_state(jax.random.key(0), config, optax.identity()).params


def generated(idx, max_new_tokens, seed=0, **options):
    """All tokens [B, T + max_new_tokens] of the prompts and of what TINY generates after them."""
    rng = jax.random.key(seed)
    return np.asarray(generate(random_params(TINY), TINY, idx, max_new_tokens, rng=rng, **options))

# -----------------------------------------------------------------------------
# the model


@pytest.mark.slow
@pytest.mark.parametrize('shape, total', [
    ((12, 12, 768), 124_439_808),
    ((24, 16, 1024), 354_823_168),
    ((36, 20, 1280), 774_030_080),
    ((48, 25, 1600), 1_557_611_200)])
def test_gpt2_sizes_have_the_published_number_of_parameters(shape, total):
    n_layer, n_head, n_embd = shape
    config = GPTConfig(vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    params = jax.eval_shape(lambda: init_params(config))
    assert count_params(params, non_embedding=False) == total
    assert count_params(params) == total - 1024 * n_embd


def test_a_position_depends_on_itself_and_the_past_only():
    params = random_params(TINY)

    @jax.jit
    def sensitivity(position):
        """Gradient of the sum of one position's logits with respect to the embedding of every position."""
        total = lambda wpe: apply(TINY, params | {'wpe': wpe}, random_tokens(1, 16))[0, position].sum()
        return jax.grad(total)(params['wpe'])

    for position in (0, 7, 15):
        matters = np.abs(sensitivity(position)).sum(-1) > 0
        assert matters.tolist() == [other <= position for other in range(16)]


@pytest.mark.slow
def test_initial_weights_are_gpt2s():
    config = GPTConfig(block_size=256, vocab_size=512, n_layer=2, n_head=4, n_embd=256)
    params = init_params(config)
    block = params['h_1']
    for weight, std in (
            (params['wte'], 0.02), (params['wpe'], 0.02),
            (block['attn']['c_attn']['kernel'], 0.02), (block['attn']['c_proj']['kernel'], 0.02 / 2),
            (block['mlp']['c_fc']['kernel'], 0.02), (block['mlp']['c_proj']['kernel'], 0.02 / 2)):
        assert abs(weight.mean()) < std / 50
        assert weight.std() == pytest.approx(std, rel=0.02)
    assert (block['ln_1']['scale'] == 1).all()
    assert (block['ln_1']['bias'] == 0).all()
    assert (block['mlp']['c_fc']['bias'] == 0).all()
    # the first loss is that of a uniform guess: ln(512)
    idx = random_tokens(8, 256, config=config)
    logits = apply(config, params, idx[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, idx[:, 1:]).mean()
    assert loss == pytest.approx(np.log(512), abs=0.1)


def test_without_bias_there_is_none():
    params = random_params(dataclasses.replace(TINY, bias=False))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert not [name for name in names if 'bias' in name]


@pytest.mark.slow
def test_head_and_embedding_are_one_parameter_and_its_gradient_is_the_sum_of_both():
    params, idx = random_params(TINY), random_tokens(2, 8)
    loss = lambda wte: jnp.sin(apply(TINY, params | {'wte': wte}, idx)).sum()
    wte = params['wte']
    grad = jax.grad(loss)(wte)
    step = jax.random.normal(jax.random.key(3), grad.shape) * 1e-3
    difference = loss(wte + step) - loss(wte - step)
    assert difference / 2 == pytest.approx(float((grad * step).sum()), rel=2e-2)


@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 0.2), ('float16', 0.03)])
def test_low_precision_computes_in_it_but_parameters_and_logits_are_float32(dtype, tolerance):
    low = dataclasses.replace(TINY, dtype=dtype)
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(init_params(low)))
    exact = apply(TINY, random_params(TINY), random_tokens(2, 16))
    rounded = apply(low, random_params(TINY), random_tokens(2, 16))
    assert rounded.dtype == jnp.float32
    error = np.abs(exact - rounded).max()
    assert error > 1e-5
    assert error < tolerance * np.abs(exact).max()


@pytest.mark.slow
def test_dropout_of_a_sequence_depends_on_its_id_alone():
    config = dataclasses.replace(TINY, dropout=0.5)
    params, idx, rngs = random_params(config), random_tokens(4, 8), {'dropout': jax.random.key(5)}

    def run(rows, ids):
        return apply(config, params, idx[rows], deterministic=False, seq_id_B=jnp.array(ids), rngs=rngs)

    together = run([0, 1, 2, 3], [100, 101, 102, 103])
    alone = run([2], [102])
    np.testing.assert_allclose(together[2], alone[0], atol=1e-4)
    assert np.abs(alone - run([2], [7])).max() > 0.1
    np.testing.assert_array_equal(apply(config, params, idx), apply(TINY, params, idx))  # off by default


@pytest.mark.slow
def test_dropout_zeroes_its_share_and_keeps_the_mean():
    class OnlyDropout(nn.Module):
        config: GPTConfig

        @nn.compact
        def __call__(self, x):
            return jax_transformer.dropout(self, x, create_call(x, deterministic=False))

    model = OnlyDropout(dataclasses.replace(TINY, dropout=0.2))
    y = model.apply({}, jnp.ones((50, 2000)), rngs={'dropout': jax.random.key(0)})
    assert (y == 0).mean() == pytest.approx(0.2, abs=0.01)
    assert y.mean() == pytest.approx(1, abs=0.01)
    assert np.unique(y).tolist() == [0, 1.25]


@pytest.mark.parametrize('bad, message', [
    (dict(n_head=0), r'n_head must be at least 1, not 0'),
    (dict(n_head=16, dropout=0.1, block_size=2**14 + 1), 'dropout numbers the attention probabilities'),
    (dict(n_head=3), r'n_head=3 does not divide n_embd=16.*\[1, 2, 4, 8, 16\]'),
    (dict(dropout=1.0), 'dropout'),
    (dict(dtype='int8'), 'dtype'),
    (dict(activation='relu'), 'activation'),
    (dict(n_layer=0), 'n_layer'),
    (dict(layer_types=('full', 'nope')), "qk_norm=plain and nope layers need position='rope'"),
    (dict(qk_norm='plain'), "qk_norm=plain and nope layers need position='rope'")])
def test_a_config_that_makes_no_model_is_refused(bad, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **bad)


def test_mfu_is_the_palm_formula():
    flops_per_token = 6 * 124e6 + 12 * 12 * 768 * 1024  # 0.857 GFLOPs
    assert estimate_mfu(124e6, GPTConfig(), 1e6, 989e12) == pytest.approx(flops_per_token * 1e6 / 989e12)

# -----------------------------------------------------------------------------
# the KV cache


@pytest.mark.parametrize('changes, tolerance', [
    (dict(), 1e-5), slow(dict(dtype='bfloat16'), 0.05), slow(dict(dtype='float16'), 0.01),
    (dict(position='rope', layer_types=('window', 'full'), window=4), 1e-5)])
def test_cached_logits_equal_uncached_ones_at_every_position(changes, tolerance):
    config = dataclasses.replace(TINY, **changes)
    idx, params = random_tokens(3, 16), random_params(config)
    full = apply(config, params, idx)
    ends = (5, 6, 8, 12, 16)  # prefill, a single token, two, as many as the window has, ...
    logits, _ = cached_logits(config, params, idx, init_cache(config, 3, 20), ends)
    np.testing.assert_allclose(logits, full, rtol=0, atol=tolerance * np.abs(full).max())


@pytest.mark.parametrize('dtype, bytes_per_value, tolerance', [
    ('float32', 4, 1e-5), slow('bfloat16', 2, 0.02), slow('float16', 2, 0.002), ('int8', 1, 0.03),
    slow('float8', 1, 0.15)])
def test_a_cache_of_any_dtype_gives_the_logits_within_its_precision_and_takes_its_bytes(
        dtype, bytes_per_value, tolerance):
    idx, params = random_tokens(2, 16), random_params(TINY)
    cache = init_cache(TINY, 2, 16, dtype)
    n_values = 2 * TINY.n_layer * 2 * 16 * TINY.n_embd
    scale_bytes = 0 if bytes_per_value > 1 else 4 * n_values // (TINY.n_embd // TINY.n_head)
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == n_values * bytes_per_value + scale_bytes
    logits, _ = cached_logits(TINY, params, idx, cache, (7, 8, 16))
    full = apply(TINY, params, idx)
    error = np.abs(logits - full).max() / np.abs(full).max()
    assert error < tolerance
    if dtype != 'float32':
        assert error > tolerance / 1e4  # the cache does have that precision


@pytest.mark.slow
@pytest.mark.parametrize('dtype, stored_as', [('bfloat16', 'uint16'), ('float8', 'uint8')])
def test_a_cache_stored_as_bits_gives_the_same_logits_bit_for_bit(dtype, stored_as):
    config, idx, params = dataclasses.replace(TINY, dtype='bfloat16'), random_tokens(2, 16), random_params(TINY)
    as_floats, as_bits = (init_cache(config, 2, 16, dtype, as_bits=as_bits) for as_bits in (False, True))
    assert as_bits['h_0']['k'].dtype == stored_as
    ends = (15, 16)
    logits, cache = cached_logits(config, params, idx, as_bits, ends)
    np.testing.assert_array_equal(logits, cached_logits(config, params, idx, as_floats, ends)[0])
    assert cache['h_0']['v'].dtype == stored_as


def test_generation_on_a_cpu_stores_a_bfloat16_cache_as_bits():
    cache = PrefixCache()
    config = dataclasses.replace(TINY, dtype='bfloat16')
    list(generate_stream(random_params(TINY), config, random_tokens(1, 4), 2, rng=jax.random.key(0),
                         prefix_cache=cache))
    assert {x.dtype.name for x in jax.tree.leaves(cache.cache)} == {'uint16'}


@pytest.mark.slow
@pytest.mark.parametrize('cache_dtype', ['int8', 'float8'])
def test_a_cache_in_8_bits_is_refused_beside_key_biases_that_hide_the_keys(cache_dtype):
    config = GPTConfig(block_size=32, vocab_size=37, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, norm='rms',
                       position='rope', bias=False, qkv_bias=True)
    params = jax.tree.map(np.array, random_params(config))
    options = dict(rng=jax.random.key(0), cache_dtype=cache_dtype)
    generate(params, config, random_tokens(1, 4), 3, **options)
    params['h_1']['attn']['c_attn']['bias'][4 * 8:5 * 8] = 60 / 8**0.5  # the first head of keys
    with pytest.raises(UserError, match='h_1 has a bias of the attention with norm 60'):
        generate(params, config, random_tokens(1, 4), 3, **options)
    with pytest.raises(UserError, match='h_1 has a bias'):
        score(params, config, [[([1, 2, 3], 1)]], cache_dtype=cache_dtype)
    generate(params, config, random_tokens(1, 4), 3, **options | {'cache_dtype': 'bfloat16'})


def test_generation_takes_int8_weights_and_the_cache_dtype():
    with pytest.raises(UserError, match='cache_dtype'):
        generated(random_tokens(1, 4), 3, cache_dtype='int4')
    int8 = quantize_params(random_params(TINY))
    tokens = generate(int8, TINY, random_tokens(2, 4), 20, rng=jax.random.key(0), cache_dtype='float8')
    assert tokens.shape == (2, 24)

# -----------------------------------------------------------------------------
# parameters for decoding


@pytest.mark.parametrize('dtype', ['float32', slow('bfloat16')])
def test_int8_weights_take_a_quarter_and_give_nearly_the_same_logits(dtype):
    config, params = dataclasses.replace(TINY, dtype=dtype), random_params(TINY)
    int8 = cast_matrices(quantize_params(params), dtype)
    n_int8 = sum(p.size for p in jax.tree.leaves(int8) if p.dtype == jnp.int8)
    n_matrices = sum(p.size for p in jax.tree.leaves(params) if p.ndim == 2)
    assert n_int8 == n_matrices - params['wpe'].size
    full = apply(TINY, params, random_tokens(2, 16))
    near = apply(config, int8, random_tokens(2, 16))
    error = np.abs(full - near).max() / np.abs(full).max()
    assert error > 1e-4
    assert error < 0.05


def test_decoding_on_a_cpu_has_transposed_kernels_and_the_same_logits():
    params = dict(random_params(TINY))
    converted = convert_params_for_decoding(params, 'float32')
    assert params == {}  # the memory of one block is free before the next one is converted
    kernel = random_params(TINY)['h_0']['mlp']['c_fc']['kernel']
    c_fc = converted['h_0']['mlp']['c_fc']
    assert isinstance(c_fc['kernel'], Transposed)
    np.testing.assert_array_equal(c_fc['kernel'].values, kernel.T)
    idx = random_tokens(2, 16)
    expected = apply(TINY, random_params(TINY), idx)
    np.testing.assert_allclose(apply(TINY, converted, idx), expected, rtol=0, atol=1e-5)
    low = convert_params_for_decoding(dict(random_params(TINY)), 'bfloat16')['h_0']['mlp']['c_fc']['kernel']
    np.testing.assert_array_equal(low.values, kernel.T.astype(jnp.bfloat16))


@pytest.mark.parametrize('dtype, quantize', [('float32', ''), ('bfloat16', ''), ('float32', 'int8')])
def test_kernels_that_are_transposed_before_conversion_are_converted_to_the_same_bits(dtype, quantize):
    params = random_params(TINY)
    converted = convert_params_for_decoding(dict(params), dtype, quantize)
    again = convert_params_for_decoding(transpose_kernels(params), dtype, quantize)
    jax.tree.map(np.testing.assert_array_equal, again, converted)


def test_gpt2_in_int8_takes_less_than_130_mb():
    shapes = jax.eval_shape(lambda: quantize_params(init_params(GPTConfig(vocab_size=50257))))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) < 130e6


# -----------------------------------------------------------------------------
# speculative decoding


REPETITIVE = np.array([[5, 6, 7, 8, 9, 5, 6, 7], [1, 2, 1, 2, 1, 2, 1, 0]])


@pytest.mark.parametrize('options', [
    dict(temperature=0), dict(temperature=0.7, top_k=5, top_p=0.9),
    dict(temperature=0.3, stop_tokens=[3, 4], repetition_penalty=1.5)])
def test_speculative_decoding_gives_the_same_tokens(options):
    config = dataclasses.replace(TINY, block_size=48)
    params = random_params(config)
    options |= dict(rng=jax.random.key(0), prompt_lengths_B=[8, 7])
    plain = generate(params, config, REPETITIVE, 50, **options)  # also past block_size
    *_, fast = generate_stream(params, config, REPETITIVE, 50, n_draft=3, chunk=9, **options)
    np.testing.assert_array_equal(fast.tokens, plain)
    assert fast.drafted > 0


def test_prompt_lookup_continues_the_latest_longest_match():
    draft = jax.jit(prompt_lookup_draft, static_argnums=2)

    def find(text, n_draft):
        tokens = jnp.array([ord(c) for c in text.ljust(16, '.')])  # the token buffer is longer than the text
        return ''.join(map(chr, draft(tokens, len(text), n_draft)))

    assert find('abcX abcY abc', 1) == 'Y'  # of two matches of equal length, the latest
    assert find('abcX bcY abc', 1) == 'X'  # a longer match counts more than a later one
    assert find('abcdefgh abc', 3) == 'def'
    assert find('xyxyxy', 5) == 'xyxyx'  # wraps around a repeated suffix
    assert find('aaa', 3) == 'aaa'
    assert len(find('a', 2)) == 2  # no match, no error
    assert len(find('ab', 2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize('options', [dict(temperature=0), dict(temperature=0.7, top_k=5, top_p=0.9)])
def test_right_guesses_save_steps(options, monkeypatch):
    config = dataclasses.replace(TINY, block_size=64)
    params = random_params(config)
    options |= dict(rng=jax.random.key(0))
    *_, plain = generate_stream(params, config, random_tokens(1, 4), 41, **options)
    guess(monkeypatch, plain.tokens)
    *_, fast = generate_stream(params, config, random_tokens(1, 4), 41, n_draft=4, **options)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert plain.steps == 40  # prefill generates the first of the 41 tokens
    assert fast.steps == 8  # 4 drafts and 1 token of the model per step
    assert fast.drafted == 32
    assert fast.accepted == 32


@pytest.mark.parametrize('options, message', [
    (dict(n_draft=-1), 'n_draft'),
    (dict(n_draft=17), 'n_draft')])
def test_drafts_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        generated(random_tokens(2, 4), 3, **options)

# -----------------------------------------------------------------------------
# generate


def uncached_greedy(prompt, max_new_tokens):
    """nanoGPT's loop: every token recomputes the last block_size tokens."""
    row = list(prompt)
    for _ in range(max_new_tokens):
        last = row[-TINY.block_size:]
        idx = np.pad(last, (0, TINY.block_size - len(last)))[None]  # one shape, so one compilation
        logits = apply(TINY, random_params(TINY), idx)
        row.append(int(logits[0, len(last) - 1].argmax()))
    return row


@pytest.mark.parametrize('length', [1, 5, 16, 23])
def test_greedy_equals_the_uncached_loop_within_and_past_block_size(length):
    prompt = random_tokens(length)
    assert generated(prompt[None], 25, temperature=0).tolist() == [uncached_greedy(prompt, 25)]


def test_each_of_different_prompts_gives_what_it_gives_alone():
    lengths = [3, 1, 9, 16]
    idx = random_tokens(4, 16)
    together = generated(idx, 20, temperature=0, prompt_lengths_B=lengths)
    for row, prompt, length in zip(together, idx, lengths):
        assert row.tolist() == uncached_greedy(prompt[:length], 20) + [0] * (16 - length)


@pytest.mark.slow
def test_padding_much_wider_than_the_prompts_changes_nothing():
    config = dataclasses.replace(TINY, block_size=128)
    params, idx = random_params(config), random_tokens(2, 64)
    options = dict(rng=jax.random.key(0), temperature=0)
    padded = generate(params, config, idx, 120, prompt_lengths_B=[20, 12], **options)
    alone = generate(params, config, idx[:1, :20], 120, **options)
    np.testing.assert_array_equal(padded[0, :140], alone[0])


def test_a_sample_depends_on_seed_and_row_and_on_nothing_else_in_the_batch():
    idx = np.tile(random_tokens(4), (3, 1))
    three, one = generated(idx, 30), generated(idx[:1], 30)
    np.testing.assert_array_equal(three[0], one[0])
    np.testing.assert_array_equal(three, generated(idx, 30))
    assert len({tuple(row) for row in three.tolist()}) == 3
    assert not np.array_equal(three, generated(idx, 30, seed=1))
    np.testing.assert_array_equal(three[:, :14], generated(idx, 10))  # max_new_tokens does not change earlier tokens


def picks(logits, n_vocab=None, top_k=None, top_p=None, min_p=None, temperature=1.0):
    """How often each token is drawn from these logits, as a share of 4000 draws."""
    sampling = Controls(n_vocab or len(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits_BxV = jnp.tile(jnp.asarray(logits, jnp.float32), (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)
    ids = jax.jit(lambda logits_BxV: sample_token(sampling_logits(logits_BxV, sampling), keys, sampling))(logits_BxV)
    return np.bincount(ids, minlength=len(logits)) / 4000


def test_tokens_are_drawn_with_their_probabilities():
    p = np.array([0.1, 0.4, 0.2, 0.3])
    np.testing.assert_allclose(picks(np.log(p)), p, atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), temperature=0.5), p**2 / (p**2).sum(), atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_k=100), p, atol=0.03)  # clamped to the vocabulary
    np.testing.assert_allclose(picks(np.log(p), top_p=0.65), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_p=0.01), [0, 1, 0, 0])
    np.testing.assert_allclose(picks(np.log(p), min_p=0.7), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), min_p=1.0), [0, 1, 0, 0])
    np.testing.assert_allclose(picks(np.log(p), temperature=None), [0, 1, 0, 0])
    np.testing.assert_allclose(picks(np.log(p), n_vocab=1), [1, 0, 0, 0])


@pytest.mark.slow
def test_top_k_1_and_tiny_top_p_are_greedy():
    greedy = generated(random_tokens(2, 4), 20, temperature=0)
    np.testing.assert_array_equal(generated(random_tokens(2, 4), 20, top_k=1), greedy)
    np.testing.assert_array_equal(generated(random_tokens(2, 4), 20, top_p=1e-6), greedy)


@pytest.mark.slow
def test_the_repetition_penalty_is_ctrls_and_counts_what_the_row_holds_only():
    logits = jnp.array([[2.0, -2.0, 2.0, -2.0]])
    penalized = penalize_repetition(logits, jnp.array([[0, 1, 0, 2, 3]]), jnp.array([3]), 4.0)
    assert penalized.tolist() == [[0.5, -8.0, 2.0, -2.0]]
    prompt = np.array([[1, 2, 3, 4]])
    free = generated(prompt, 20, temperature=0)[0]
    penalized = generated(prompt, 20, temperature=0, repetition_penalty=1e6)[0]
    assert len(set(penalized.tolist())) == 24
    assert len(set(free.tolist())) < 24


@pytest.mark.parametrize('chunk', [1, 7, 100])
def test_chunks_add_up_to_what_one_call_gives(chunk):
    idx, lengths = random_tokens(2, 9), [9, 4]
    full = generated(idx, 20, prompt_lengths_B=lengths)
    stream = list(generate_stream(
        random_params(TINY), TINY, idx, 20, rng=jax.random.key(0), prompt_lengths_B=lengths, chunk=chunk))
    np.testing.assert_array_equal(stream[-1].tokens, full)
    assert stream[-1].lengths.tolist() == [29, 24]
    assert stream[0].lengths[0] == 9 + 1
    assert stream[1].lengths[0] == 9 + min(20, 1 + chunk)
    for so_far in stream:
        for row, length, full_row in zip(so_far.tokens, so_far.lengths, full):
            np.testing.assert_array_equal(row[:length], full_row[:length])


def test_a_row_ends_with_its_first_stop_token():
    free = generated(random_tokens(3, 4), 24)
    stop = int(free[0, 10])
    stopped = generated(random_tokens(3, 4), 24, stop_tokens=[stop])
    for row, free_row in zip(stopped, free):
        end = next((i + 1 for i in range(4, 28) if free_row[i] == stop), 28)
        np.testing.assert_array_equal(row[:end], free_row[:end])
        assert (row[end:] == 0).all()


@pytest.mark.slow
def test_padding_ids_of_the_vocabulary_are_never_generated():
    assert generated(random_tokens(4, 4) % 20, 40, n_vocab=20, temperature=5.0).max() < 20


def test_no_new_tokens_returns_the_prompts():
    np.testing.assert_array_equal(generated(random_tokens(2, 5), 0), random_tokens(2, 5))


@pytest.mark.slow
def test_other_lengths_and_numbers_of_tokens_compile_nothing_new_for_pieces_and_caches_of_the_same_size():
    config = dataclasses.replace(TINY, block_size=64)
    params = init_params(config)

    def run(length, max_new_tokens, top_k):
        generate(params, config, random_tokens(2, length), max_new_tokens, rng=jax.random.key(0), top_k=top_k)

    run(30, 8, 5)
    n_prefill, n_decode = jax_generate.prefill_layer._cache_size(), jax_generate.decode._cache_size()
    for length, max_new_tokens, top_k in ((27, 8, 5), (29, 30, 9), (33, 8, 5), (20, 30, 37)):
        run(length, max_new_tokens, top_k)
    assert jax_generate.prefill_layer._cache_size() == n_prefill
    assert jax_generate.decode._cache_size() == n_decode
    for n_new, length in enumerate((4, 12, 56), 1):  # shorter and longer prompts have pieces of their own
        run(length, 60 - length, 5)
        # the last layer is a program of its own
        assert jax_generate.prefill_layer._cache_size() == n_prefill + 2 * n_new
    assert jax_generate.decode._cache_size() == n_decode


@pytest.mark.parametrize('options, message', [
    (dict(temperature=-1), 'temperature'),
    (dict(temperature=float('nan')), 'temperature'),
    (dict(temperature=float('inf')), 'temperature'),
    (dict(temperature=1e-40), 'temperature'),
    (dict(top_k=-1), 'top_k'),
    (dict(top_p=0.0), 'top_p'),
    (dict(top_p=1.1), 'top_p'),
    (dict(min_p=-0.1), 'min_p'),
    (dict(repetition_penalty=0.0), 'repetition_penalty'),
    (dict(n_vocab=0), 'n_vocab'),
    (dict(prompt_lengths_B=[0, 3]), 'between 1 and 4'),
    (dict(prompt_lengths_B=[1, 5]), 'between 1 and 4'),
    (dict(prompt_lengths_B=[1]), '2 lengths'),
    (dict(prompt_lengths_B=[1.5, 2.0]), '2 lengths')])
def test_controls_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        generated(random_tokens(2, 4), 3, **options)


def test_prompts_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match='at least one token'):
        generated(np.zeros((1, 0)), 3)
    with pytest.raises(UserError, match='token id 37'):
        generated([[3, 37]], 3)
    with pytest.raises(UserError, match='max_new_tokens'):
        generated([[3]], -1)


if __name__ == '__main__':
    raise SystemExit(pytest.main([__file__]))
