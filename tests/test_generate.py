"""Generation beyond the short text of test_jax_transformer.py: prompts in pieces, caches that grow, wrap and are kept
between calls, texts longer than block_size, sampling without a sort."""
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer
import jax_generate
from jax_devices.layout import setup_distributed_training
from jax_flags import Sampling, TextSampling, UserError
from jax_generate import (
    Controls, PrefixCache, check_cache_dtype, create_controls, decode, draw, draw_on_cpu, generate, generate_stream,
    prefill_layer, sample_token, score, stack_controls)
from jax_ops.decode_weights import convert_params_for_decoding
from jax_ops.sampling import draw_of_candidates, find_candidates, keep_largest
from jax_ops.vocabulary import embed_tokens
from jax_pretrained import load_pretrained
from jax_transformer import PAD, MoEConfig, Stream, init_cache, update_ring_cache, without_tables
from tests.common import FAMILIES, TINY, apply, guess, random_params, random_tokens, refusal
from jax_run.speed import bytes_read_per_step, cache_bytes_read, expected_experts

EXPECTED = np.load(FAMILIES / 'expected.npz')
ROPE = dataclasses.replace(TINY, position='rope', norm='rms', bias=False)
LARGE_VOCAB = dataclasses.replace(TINY, vocab_size=5000)
RNG = jax.random.key(0)


def last_result(config, idx, n, **options):
    """The last GenerationResult of random parameters, greedily if nothing else is said."""
    *_, result = generate_stream(random_params(config), config, idx, n, **dict(rng=RNG, temperature=0) | options)
    return result


def greedy_loop(config, params, prompt, n, block_size):
    """The prompt and n more tokens, each the likeliest after the full text, which is read without a cache."""
    row = list(prompt)
    for _ in range(n):
        idx = np.pad(row, (0, block_size - len(row)))[None]  # one compilation
        row.append(int(apply(config, params, idx)[0, len(row) - 1].argmax()))
    return row


@pytest.fixture
def prefilled(monkeypatch):
    """The positions [B, T] of each piece that is prefilled from now on, without padding."""
    pieces, prefill = [], jax_generate.prefill

    def record(params, cache, idx_BxT, position_BxT, *, config):
        pieces.append([row[row < PAD].tolist() for row in position_BxT])
        return prefill(params, cache, idx_BxT, position_BxT, config=config)

    monkeypatch.setattr(jax_generate, 'prefill', record)
    return pieces


# -----------------------------------------------------------------------------
# prefill


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt_oss', 'llama4', 'deepseek_v3'])  # windows, chunks, latent attention
def test_prompts_in_pieces_give_the_greedy_tokens_of_transformers(name, monkeypatch):
    config, params = load_pretrained(FAMILIES / name)
    monkeypatch.setattr(jax_generate, 'piece_length', lambda *args: 8)
    tokens = generate(params, config, EXPECTED[f'{name}/greedy'][:, :29], 12, rng=RNG, temperature=0)
    np.testing.assert_array_equal(tokens, EXPECTED[f'{name}/greedy'])


@pytest.mark.slow
@pytest.mark.parametrize('options', [dict(cache_dtype='int8'), dict(n_draft=3)])
def test_pieces_of_any_width_give_the_same_text(options, monkeypatch):
    config = dataclasses.replace(ROPE, block_size=64, layer_types=('window', 'full'), window=5)
    idx, lengths = random_tokens(3, 40), [40, 17, 1]
    expected = last_result(config, idx, 12, prompt_lengths_B=lengths, **options).tokens
    for width in (4, 16):
        monkeypatch.setattr(jax_generate, 'piece_length', lambda *args: width)
        tokens = last_result(config, idx, 12, prompt_lengths_B=lengths, **options).tokens
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.slow
def test_a_long_prompt_never_has_all_its_scores_in_memory_and_gives_the_same_text(monkeypatch):
    config = dataclasses.replace(ROPE, block_size=4096)
    params = random_params(config)
    idx, lengths = random_tokens(2, 1500), [1500, 700]
    options = dict(prompt_lengths_B=lengths, rng=RNG, temperature=0)
    in_blocks = generate(params, config, idx, 6, **options)
    monkeypatch.setattr(jax_generate, 'piece_length', lambda *args: 64)  # too short for blocks of keys
    np.testing.assert_array_equal(in_blocks, generate(params, config, idx, 6, **options))

    cache = jax.eval_shape(lambda: jax_transformer.init_cache(config, 1, 4096))
    memory = prefill_layer.lower(
        params['h_0'], cache['h_0'], Stream(jnp.zeros((1, 512, config.n_embd))), *jnp.zeros((2, 1, 512), jnp.int32),
        config=config, layer=config.layer(0), is_last=False).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.7 * config.n_head * 512 * 4096 * 4  # bytes of all scores of a piece


@pytest.mark.slow
def test_a_prompt_longer_than_a_large_ring_is_prefilled_without_a_copy_of_the_ring(monkeypatch):
    config = dataclasses.replace(ROPE, block_size=2048, n_layer=3, layer_types=('full', 'window', 'chunk'), window=32,
                                 chunk=2048)
    slots = [jax_transformer.count_slots(config, layer_type, 2048) for layer_type in config.layer_types]
    assert slots == [2048 + 512, 32, 2048 + 512]
    assert jax_transformer.count_slots(config, 'full', 2047) == 2047  # not yet a ring

    cache = jax_transformer.init_cache(config, 1, 2048)
    new_kv = {name: jnp.zeros((1, 512, heads, width))
              for name, (heads, width) in jax_transformer.cache_entry_shapes(config).items()}
    copies_ring = ['concatenate[dimension=1]' in str(jax.make_jaxpr(update_ring_cache, static_argnums=(0, 1))(
        config, layer_type, cache[f'h_{i}'], new_kv, jnp.arange(512)[None]))
        for i, layer_type in enumerate(config.layer_types)]
    assert copies_ring == [False, True, False]

    idx, lengths = random_tokens(2, 2700), [2700, 2100]
    in_large_pieces = last_result(config, idx, 6, prompt_lengths_B=lengths).tokens
    monkeypatch.setattr(jax_generate, 'piece_length', lambda *args: 64)
    np.testing.assert_array_equal(in_large_pieces, last_result(config, idx, 6, prompt_lengths_B=lengths).tokens)


def test_a_piece_has_one_of_six_widths():
    width = jax_generate.piece_length
    lengths = (0, 8, 9, 16, 17, 32, 33, 64, 65, 256, 257, 5000)
    assert [width(n) for n in lengths] == [8, 8, 16, 16, 32, 32, 64, 64, 128, 128, 512, 512]


@pytest.mark.slow
def test_a_prompt_of_several_samples_is_prefilled_once(prefilled):
    idx = np.repeat(random_tokens(2, 9), 3, axis=0)
    result = last_result(TINY, idx, 5, temperature=1.0)
    assert [len(piece) for piece in prefilled] == [2]
    for b in (0, 5):
        alone = last_result(TINY, idx[b:b + 1], 5, temperature=1.0, sample_index_B=[b])
        np.testing.assert_array_equal(result.tokens[b], alone.tokens[0])



def test_other_numbers_of_equal_prompts_are_prefilled_in_the_same_shape(prefilled):
    distinct = random_tokens(4, 9)
    for rows, n_prefilled in (([0] * 9, 1), ([0, 1, 2] * 3, 4), ([0, 1, 2, 3, 2, 1, 0, 1, 2], 4),
                              ([3, 2, 1, 2], 4)):
        prefilled.clear()
        tokens = last_result(TINY, distinct[rows], 5).tokens
        assert [len(piece) for piece in prefilled] == [n_prefilled]
        np.testing.assert_array_equal(tokens, last_result(TINY, distinct, 5).tokens[rows])

# -----------------------------------------------------------------------------
# the cache grows


def test_a_cache_grows_by_four_unless_all_fits_into_twice_its_size():
    slots = jax_generate.choose_slots
    assert slots(20, 520, 8192) == 640  # four sizes per doubling
    assert slots(20, 8020, 8192) == 512
    assert slots(513, 8020, 8192) == 2048
    assert slots(2049, 8020, 8192) == 8192
    assert slots(20, 8020, 1000) == 1000  # no position needs more slots than block_size


@pytest.mark.slow
@pytest.mark.parametrize('config, options', [
    (TINY, dict(n_draft=3)),
    (dataclasses.replace(ROPE, layer_types=('window', 'full'), window=20), dict(cache_dtype='int8'))])
def test_a_cache_that_grows_gives_the_same_text(config, options, monkeypatch):
    config = dataclasses.replace(config, block_size=48)
    idx, lengths = random_tokens(2, 8), [8, 3]
    expected = last_result(config, idx, 38, prompt_lengths_B=lengths, **options)
    monkeypatch.setattr(jax_generate, 'choose_slots', lambda needed, *args: 12 if needed <= 12 else 48)
    grown = last_result(config, idx, 38, prompt_lengths_B=lengths, **options)
    np.testing.assert_array_equal(grown.tokens, expected.tokens)
    assert grown.cache_bytes == expected.cache_bytes
    assert last_result(config, idx, 4, prompt_lengths_B=lengths, **options).cache_bytes < expected.cache_bytes


# -----------------------------------------------------------------------------
# past block_size


@pytest.mark.slow
@pytest.mark.parametrize('change, options', [
    (dict(), dict()),
    (dict(n_kv_head=1), dict(n_draft=3)),
    (dict(), dict(n_draft=2)),
    (dict(mla=dict(q_rank=0, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6)), dict())])
def test_past_block_size_rope_attends_to_the_last_block_size_keys(change, options):
    config = dataclasses.replace(ROPE, **change)
    params = random_params(config)
    windowed = dataclasses.replace(config, block_size=64, layer_types=('window',), window=16)
    idx, lengths = random_tokens(3, 23), [3, 16, 23]
    result = last_result(config, idx, 30, prompt_lengths_B=lengths, **options)
    for row, prompt, length in zip(result.tokens, idx, lengths):
        assert row[:length + 30].tolist() == greedy_loop(windowed, params, prompt[:length], 30, 64)


@pytest.mark.slow
def test_past_block_size_every_rope_token_takes_one_step_of_the_cache():
    assert last_result(ROPE, random_tokens(1, 12), 40).steps == 39


@pytest.mark.slow
def test_a_long_row_does_not_slow_down_the_short_ones_beside_it():
    lengths = [3, 16]
    result = last_result(TINY, random_tokens(2, 16), 10, prompt_lengths_B=lengths)
    assert result.steps == 9 + 9  # the short row through the cache, and the long one without it
    assert last_result(TINY, random_tokens(2, 16), 10, prompt_lengths_B=[3, 6]).steps == 9


# -----------------------------------------------------------------------------
# the cache is kept


@pytest.mark.slow
@pytest.mark.parametrize('change, options', [
    (dict(), dict()),
    (dict(position='learned'), dict()),
    (dict(layer_types=('window', 'full'), window=40), dict(cache_dtype='int8')),
    (dict(), dict(n_draft=3))])
def test_a_text_that_continues_another_computes_only_what_is_new(change, options, prefilled):
    config = dataclasses.replace(ROPE, block_size=100, **change)
    prefix_cache = PrefixCache()
    text, n_known = random_tokens(1, 20), 0
    for _ in range(3):
        prefilled.clear()
        result = last_result(config, text, 6, prefix_cache=prefix_cache, **options)
        positions = [p for piece in prefilled for p in piece[0]]
        assert positions == list(range(n_known, text.shape[1] - 1))
        np.testing.assert_array_equal(result.tokens, last_result(config, text, 6, **options).tokens)
        n_known = result.lengths[0] - 1  # the last token has been sampled, but not read
        text = np.concatenate([result.tokens, random_tokens(1, 7, seed=1)], axis=1)


@pytest.mark.parametrize('before, after', [
    (dict(n_draft=3), dict()), (dict(), dict(n_draft=3)), (dict(), dict(cache_dtype='int8'))])
def test_a_text_with_other_drafts_or_another_cache_begins_anew(before, after):
    config = dataclasses.replace(ROPE, block_size=32, layer_types=('window',), window=12)
    prefix_cache = PrefixCache()
    text = last_result(config, random_tokens(1, 30), 6, prefix_cache=prefix_cache, **before).tokens
    result = last_result(config, text, 20, prefix_cache=prefix_cache, **after)
    np.testing.assert_array_equal(result.tokens, last_result(config, text, 20, **after).tokens)


def test_a_text_of_other_parameters_begins_anew():
    prefix_cache = PrefixCache()
    text = last_result(ROPE, random_tokens(1, 20), 6, prefix_cache=prefix_cache).tokens
    others = jax.tree.map(lambda x: 2 * x, random_params(ROPE))
    *_, result = generate_stream(others, ROPE, text, 6, rng=RNG, temperature=0, prefix_cache=prefix_cache)
    np.testing.assert_array_equal(result.tokens, generate(others, ROPE, text, 6, rng=RNG, temperature=0))


@pytest.mark.slow
@pytest.mark.parametrize('window', [40, 5])
def test_a_text_that_leaves_the_kept_one_in_the_middle_is_computed_right(window, prefilled):
    config = dataclasses.replace(ROPE, block_size=64, layer_types=('window', 'full'), window=window)
    prefix_cache = PrefixCache()
    text = random_tokens(1, 30)
    last_result(config, text, 6, prefix_cache=prefix_cache)
    other = text.copy()
    other[0, 20:] = (other[0, 20:] + 1) % 37
    prefilled.clear()
    result = last_result(config, other, 6, prefix_cache=prefix_cache)
    assert prefilled[0][0][0] == (20 if window == 40 else 0)  # the ring of a small window has lost its past
    np.testing.assert_array_equal(result.tokens, last_result(config, other, 6).tokens)


@pytest.mark.parametrize('n_text, first', [(8, 0), (12, 9), (40, 37), (1100, 1097)])
def test_what_is_held_is_computed_again_only_if_that_takes_no_longer(n_text, first, prefilled):
    config = dataclasses.replace(ROPE, block_size=2048, n_layer=1)
    prefix_cache = PrefixCache()
    text = random_tokens(1, n_text)
    last_result(config, text[:, :-3], 2, prefix_cache=prefix_cache)
    prefilled.clear()
    other = text.copy()
    other[0, -3:] = (other[0, -3:] + 1) % 37
    result = last_result(config, other, 2, prefix_cache=prefix_cache)
    assert prefilled[0][0][0] == first
    np.testing.assert_array_equal(result.tokens, last_result(config, other, 2).tokens)


@pytest.mark.slow
def test_an_interrupted_text_leaves_a_cache_that_can_be_used(prefilled):
    config = dataclasses.replace(ROPE, block_size=64)
    prefix_cache = PrefixCache()
    stream = generate_stream(random_params(config), config, random_tokens(1, 20), 30, rng=RNG, temperature=0, chunk=4,
                             prefix_cache=prefix_cache)
    next(stream)
    result = next(stream)
    stream.close()
    prefilled.clear()
    text = np.concatenate([result.tokens[:, :25], [[7, 8, 9]]], axis=1)
    continued = last_result(config, text, 6, prefix_cache=prefix_cache)
    assert prefilled == [[[24, 25, 26]]]
    np.testing.assert_array_equal(continued.tokens, last_result(config, text, 6).tokens)
    with pytest.raises(UserError, match='one row, not 2'):
        last_result(config, random_tokens(2, 4), 3, prefix_cache=prefix_cache)


@pytest.mark.slow
def test_a_text_goes_on_after_its_drafts_turned_useless_in_the_last_step_of_the_one_before(monkeypatch):
    config = dataclasses.replace(ROPE, block_size=2048)
    guess(monkeypatch, np.full((1, 2048), 36))
    text = random_tokens(1, 20)
    free = last_result(config, text, 5).tokens[0, 20:]
    assert free[4] not in free[:4]
    prefix_cache = PrefixCache()
    options = dict(n_draft=16, prefix_cache=prefix_cache)
    result = last_result(config, text, 100, stop_tokens=free[4:], **options)
    assert (result.drafted, result.accepted) == (64, 0)
    assert result.lengths == 25
    longer = random_tokens(1, 600)
    longer[0, :25] = result.tokens[0, :25]  # 600 tokens need a larger cache
    continued = last_result(config, longer, 6, **options)
    np.testing.assert_array_equal(continued.tokens, last_result(config, longer, 6).tokens)

# -----------------------------------------------------------------------------
# what is known of the tokens

CONTROLS = dict(rng=RNG, temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.3)


def expected_logprobs(row, n_prompt, length):
    """(of the model, of the distribution that CONTROLS sample from): the log-probabilities of a row's generated tokens,
    by numpy from the logits of the model without a cache."""
    logits_TxV = np.asarray(apply(TINY, random_params(TINY), np.pad(row, (0, 16))[None, :16])[0], np.float64)
    plain, sampled = [], []
    for t in range(n_prompt, length):
        logits = logits_TxV[t - 1]
        plain.append(logits[row[t]] - np.log(np.exp(logits).sum()))
        seen = np.isin(np.arange(len(logits)), row[:t])
        logits = np.where(seen, np.where(logits > 0, logits / 1.3, logits * 1.3), logits) / 0.7
        # k, then p: from the likeliest on, until they reach it; then those that are likely enough
        logits[np.argsort(-logits)[9:]] = -np.inf
        order = np.argsort(-logits)
        probs = np.exp(logits) / np.exp(logits).sum()
        n_kept = (np.cumsum(probs[order]) < 0.9).sum() + 1
        logits[order[n_kept:]] = -np.inf
        logits[logits < logits.max() + np.log(0.05)] = -np.inf
        sampled.append(logits[row[t]] - np.log(np.exp(logits).sum()))
    return plain, sampled


@pytest.mark.parametrize('options', [dict(), dict(n_draft=3)])
def test_log_probabilities_are_those_of_the_model_and_of_the_distribution_sampled_from(options):
    params, idx, n_prompt = random_params(TINY), random_tokens(2, 6), [6, 3]
    options = CONTROLS | options | dict(prompt_lengths_B=n_prompt)
    plain = generate(params, TINY, idx, 8, **options)
    stop = int(plain[0, 9])
    result = generate(params, TINY, idx, 8, logprobs=True, stop_tokens=[stop], **options)
    assert result.lengths[0] == list(plain[0, 6:]).index(stop) + 7 <= 10 and result.finish_reasons[0] == 'stop'
    for b in range(2):
        own = slice(n_prompt[b], result.lengths[b])
        np.testing.assert_array_equal(result.tokens[b, :own.stop], plain[b, :own.stop])
        of_model, of_sampling = expected_logprobs(result.tokens[b], own.start, own.stop)
        np.testing.assert_allclose(result.logprobs[b, own], of_model, atol=1e-5)
        np.testing.assert_allclose(result.sampling_logprobs[b, own], of_sampling, atol=1e-5)
        for logprobs in (result.logprobs[b], result.sampling_logprobs[b]):
            assert not logprobs[:own.start].any() and not logprobs[own.stop:].any()


def test_a_greedy_token_is_certain_and_has_the_log_probability_of_the_model():
    result = generate(random_params(TINY), TINY, random_tokens(1, 4), 5, rng=RNG, temperature=0, logprobs=True)
    assert not result.sampling_logprobs.any()
    assert (result.logprobs[0, 4:] < 0).all() and not result.logprobs[0, :4].any()


def test_lengths_tell_padding_from_token_0_and_reasons_what_ended_a_row():
    idx, params = random_tokens(2, 4), random_params(TINY)
    free = generate(params, TINY, idx, 6, rng=RNG)
    stop = next(token for token in free[0, 4:8].tolist() if token not in free[1, 4:])
    result = generate(params, TINY, idx, 6, rng=RNG, stop_tokens=[stop], as_result=True)
    assert result.finish_reasons == ('stop', 'length') and result.logprobs is None
    assert result.lengths.tolist() == [free[0, 4:].tolist().index(stop) + 5, 10]
    for row, length, expected in zip(result.tokens, result.lengths, free):
        assert row[:length].tolist() == expected[:length].tolist() and not row[length:].any()
    nothing = generate(params, TINY, idx, 0, rng=RNG, logprobs=True)
    assert nothing.finish_reasons == ('length', 'length') and nothing.logprobs.shape == (2, 4)


def test_without_log_probabilities_the_compiled_loop_computes_none():
    def count_logarithms(**more):
        state = jax_generate.create_decode_state(random_tokens(1, 4), np.array([4]), jax.random.split(RNG, 1), 16)
        state = state.replace(cache=init_cache(TINY, 1, 16), **more)
        program = decode.lower(random_params(TINY), state, jax_generate.Controls(37), 8, 16, 16, config=TINY,
                               n_draft=0, use_cache=True)
        return program.as_text().count('stablehlo.log ')

    zeros = jnp.zeros((1, 16))
    assert count_logarithms() == 0
    assert count_logarithms(logprob_BxN=zeros, sampling_logprob_BxN=zeros) > 0


def test_other_stop_tokens_compile_nothing():
    last_result(TINY, random_tokens(1, 4), 3, stop_tokens=[5])
    n_programs = decode._cache_size()
    last_result(TINY, random_tokens(1, 4), 3, stop_tokens=[6])
    assert decode._cache_size() == n_programs


def test_rows_that_the_caller_ends_get_no_more_tokens():
    stream = generate_stream(random_params(TINY), TINY, random_tokens(2, 4), 9, rng=RNG, chunk=3)
    next(stream)
    stream.send([True, False])
    *_, result = stream
    assert result.lengths.tolist() == [5, 13] and result.finish_reasons == ('stop', 'length')
    np.testing.assert_array_equal(
        result.tokens[1], generate(random_params(TINY), TINY, random_tokens(2, 4), 9, rng=RNG)[1])

# -----------------------------------------------------------------------------
# drafts and sampling


@pytest.mark.slow
def test_drafts_that_are_not_accepted_are_switched_off(monkeypatch):
    config = dataclasses.replace(ROPE, block_size=512)
    plain = last_result(config, random_tokens(1, 4), 150)
    guess(monkeypatch, (plain.tokens + 1) % 37)
    fast = last_result(config, random_tokens(1, 4), 150, n_draft=4)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert 64 <= fast.drafted < 64 + 4
    assert fast.accepted < 0.3 * fast.drafted


def test_tokens_are_drawn_as_by_categorical_in_its_fine_mode_which_reaches_rare_ones():
    logits_BxV = 3 * jax.random.normal(RNG, (50, 37))
    logits_BxV = jnp.where(logits_BxV < -3, -jnp.inf, logits_BxV)
    key_B = jax.random.split(RNG, 50)
    expected_B = [jax.random.categorical(key, logits, mode='high') for key, logits in zip(key_B, logits_BxV)]
    tokens_B = sample_token(logits_BxV, key_B, Controls(n_vocab=37, temperature=1.0))
    np.testing.assert_array_equal(tokens_B, expected_B)


@pytest.mark.parametrize('options', [{'temperature': 0}, {'top_k': 5, 'top_p': 0.9}, {'min_p': 0.1}, {'n_draft': 2}])
def test_a_model_that_computes_nan_makes_no_tokens_and_no_log_probabilities(options):
    params = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), random_params(TINY))
    prompt = random_tokens(1, 4)
    with pytest.raises(UserError, match='computes NaN'):
        generate(params, TINY, prompt, 3, rng=RNG, **options)
    with pytest.raises(UserError, match='computes NaN'):
        list(score(params, TINY, [[(prompt[0].tolist(), 1)]]))


@pytest.mark.parametrize('kind', ['random', 'ties', 'half -inf', 'zeros of both signs'])
def test_the_largest_logits_are_kept_as_a_sort_would(kind):
    rng = np.random.default_rng(0)
    x = np.float32(3 * rng.normal(size=(6, 200)))
    if kind == 'ties':
        x = np.round(x)
    if kind == 'half -inf':
        x[:, 1:][rng.random((6, 199)) < 0.5] = -np.inf
    if kind == 'zeros of both signs':
        x = np.zeros_like(x) * rng.choice([-1, 1], size=x.shape).astype(np.float32)
    keep = jax.jit(keep_largest)
    ordered = -np.sort(-x, axis=-1)
    for k in (1, 2, 40, 199, 200, 5000):
        kth = ordered[:, min(k, 200) - 1:][:, :1]
        kept = keep(x, jnp.ones(x.shape, jnp.int32), np.int32(k))
        np.testing.assert_array_equal(kept, np.where(x < kth, -np.inf, x))
    for p in (1e-6, 0.1, 0.5, 0.9):
        probs = np.array(jax.nn.softmax(ordered))
        least = np.where(np.cumsum(probs, -1) - probs < p, ordered, np.inf).min(-1, keepdims=True)
        np.testing.assert_array_equal(keep(x, jax.nn.softmax(x), np.float32(p)), np.where(x < least, -np.inf, x))
    np.testing.assert_array_equal(keep(x, jax.nn.softmax(x), np.float32(1.5)), x)


@pytest.mark.parametrize('ids', [[[1, 2**32 + 2]], [[1.0, 2.7]], [[2**40, 1]], [[-(2**32) + 1]], [['a']]])
def test_ids_are_checked_before_they_become_int32(ids):
    with pytest.raises(UserError, match='token id'):
        generate(random_params(TINY), TINY, ids, 1, rng=RNG)


@pytest.mark.parametrize('row', [([1, -1], 1), ([1, 37], 1), ([1, 2], 0), ([1, 2], 3), ([], 1)])
def test_a_row_that_cannot_be_scored_is_refused(row):
    with pytest.raises(UserError, match=r'a row is \(ids, start\), with ids below 37'):
        score(random_params(TINY), TINY, [[([1, 2], 1)], [row]])


def test_an_item_without_rows_and_a_row_without_scored_tokens_have_no_results():
    first, empty, ((logprobs, _),) = score(random_params(TINY), TINY, [[([1, 2], 1)], [], [([1, 2], 2)]])
    assert len(first) == 1 and empty == [] and len(logprobs) == 0


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('name, low, high', [
    ('temperature', 1e-6, 1e38), ('top_k', 1, 10**38), ('top_p', 1e-37, 1.0), ('min_p', 0.0, 1.0),
    ('repetition_penalty', 1e-6, 1e38)])
def test_the_bounds_of_a_control_are_numbers_that_float32_has(name, low, high):
    for value in (low, high):
        result = last_result(TINY, [[1, 2, 3]], 8, **{'temperature': 0.8, name: value})
        assert result.tokens.max() < TINY.vocab_size
    for value in (-low if name == 'top_k' else low * 0.9 or -0.1, high * 11):
        with pytest.raises(UserError, match=name):
            create_controls(TINY, Sampling(**{name: value}))


def large_logits(seed, n_rows=3, n_vocab=5000):
    """Logits of a vocabulary that has candidates, some rows with many ties, and a random key for each row."""
    logits_BxV = (1 + seed % 4) * np.random.default_rng(seed).normal(size=(n_rows, n_vocab)).astype(np.float32)
    return np.round(logits_BxV) if seed % 3 == 2 else logits_BxV, jax.random.split(jax.random.key(seed), n_rows)


@pytest.mark.parametrize('options', [
    {'top_k': 200}, {'top_k': 50, 'top_p': 0.9}, {'min_p': 0.2}, {'top_p': 0.5}, {'top_k': 1}, {'top_k': 256},
    {'top_k': 3000}, {'top_k': 20, 'n_vocab': 4990}, {'temperature': 0}, 'batch'])
def test_noise_of_the_candidates_alone_draws_the_tokens_that_noise_of_all_draws(options):
    if options == 'batch':
        rows = {'top_k': 200, 'temperature': 0.8}, {'temperature': 0}, {'top_p': 0.5, 'min_p': 0.1}
        controls = stack_controls([create_controls(LARGE_VOCAB, Sampling(**row)) for row in rows])
    else:
        controls = create_controls(LARGE_VOCAB, Sampling(**options))
    for seed in range(12):
        logits_BxV, key_B = large_logits(seed)
        for of_all, of_candidates in zip(jax.jit(draw)(logits_BxV, key_B, controls),
                                         jax.jit(draw_on_cpu)(logits_BxV, key_B, controls)):
            np.testing.assert_array_equal(of_candidates, of_all)


def test_all_tokens_get_noise_only_if_one_that_is_no_candidate_may_be_drawn():
    logits_BxV, key_B = large_logits(0)
    candidate_BxC = find_candidates(logits_BxV, key_B)

    def drawn(logits_BxV, is_greedy=None):
        return draw_of_candidates(logits_BxV, key_B, candidate_BxC, is_greedy, otherwise=lambda: jnp.full(3, -7))

    kept_BxV = keep_largest(logits_BxV, jnp.ones(logits_BxV.shape, jnp.int32), 255, candidate_BxC)
    assert (drawn(kept_BxV) >= 0).all()
    assert (drawn(logits_BxV) == -7).all()
    np.testing.assert_array_equal(drawn(logits_BxV, np.ones((3, 1), bool)), logits_BxV.argmax(-1))
    assert find_candidates(logits_BxV[:, :4000], key_B) is None  # a small vocabulary
    assert find_candidates(logits_BxV, jax.random.split(jax.random.key(0, impl='rbg'), 3)) is None


@pytest.mark.slow
@pytest.mark.parametrize('n_prompt', [1, 4, 40])
def test_decode_and_prefill_are_compiled_once_for_weights_that_a_script_has_placed(n_prompt):
    config = dataclasses.replace(TINY, block_size=128)
    params = setup_distributed_training(jax.devices()[:1]).device_put(random_params(config))
    params = convert_params_for_decoding(dict(params), 'float32')
    for compiled in (decode, prefill_layer):
        compiled.clear_cache()
    results = generate_stream(params, config, random_tokens(1, n_prompt), 9, rng=jax.random.key(0), chunk=3)
    assert len(list(results)) == 4
    assert decode._cache_size() == 1
    assert prefill_layer._cache_size() == 2 * (n_prompt > 1)  # the last layer is a program of its own


@pytest.mark.slow
def test_on_a_cpu_a_bfloat16_decode_loop_makes_no_float32_copy_of_the_embedding():
    table = jnp.asarray(random_tokens(4096, 128), jnp.bfloat16)

    @jax.jit
    def loop(table, idx):
        return jax.lax.fori_loop(0, 9, lambda _, idx: embed_tokens(table, idx).sum(-1).astype(jnp.int32) % 4096, idx)

    memory = loop.lower(table, jnp.zeros((1, 1), jnp.int32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.nbytes / 2
    gradient = jax.grad(lambda table: embed_tokens(table, np.array([[3, 5, 3]])).astype(jnp.float32).sum())(table)
    assert gradient[:6, 0].tolist() == [0, 0, 0, 2, 0, 1]


@pytest.mark.slow
@pytest.mark.long
def test_prompts_of_many_lengths_are_few_programs_with_the_texts_of_other_sizes(monkeypatch):
    sizes = {jax_generate.choose_slots(n, n + 100, 2**17) for n in range(1, 2**17)}
    assert len(sizes) <= 4 * (17 - 7) + 4  # four per doubling from 128 on
    # twenty-five prompts of as many lengths, alone
    config = dataclasses.replace(ROPE, block_size=256, n_embd=40)  # of no other test: nothing is compiled yet
    compiled_before = jax_generate.decode._cache_size(), jax_generate.prefill_layer._cache_size()
    texts = {}
    for length in range(5, 205, 8):
        texts[length] = last_result(config, random_tokens(1, length, config=config), 3).tokens
    compiled = jax_generate.decode._cache_size(), jax_generate.prefill_layer._cache_size()
    n_decode, n_prefill = (after - before for after, before in zip(compiled, compiled_before))
    assert n_decode <= 8 and n_prefill <= 20, (n_decode, n_prefill)
    # as many slots as are needed
    monkeypatch.setattr(jax_generate, 'choose_slots', lambda needed, longest, block_size: longest)
    for length in (5, 69, 197):
        as_needed = last_result(config, random_tokens(1, length, config=config), 3).tokens
        np.testing.assert_array_equal(as_needed, texts[length])


@pytest.mark.parametrize('layer_types, kinds', [(('full',), 1), (('full', 'window'), 2)])
def test_a_step_with_a_cache_is_traced_once_for_all_layers_of_a_kind(layer_types, kinds):
    def n_matmuls(n_layer):
        config = dataclasses.replace(ROPE, n_layer=n_layer, layer_types=layer_types, window=8)
        lowered = apply.lower(config, random_params(config), random_tokens(1, 4), init_cache(config, 1, 16),
                              position_BxT=jnp.arange(4)[None], method='with_cache')
        return lowered.as_text().count('dot_general')

    matmuls_of_a_layer = 6
    assert n_matmuls(2) == n_matmuls(4) == kinds * matmuls_of_a_layer + 1  # and the head


@pytest.mark.slow
@pytest.mark.parametrize('layer_types, kinds', [(('full',), 1), (('full', 'window'), 2)])
def test_prefill_compiles_one_layer_of_each_kind_and_the_last_layer(layer_types, kinds):
    for n_layer in (3, 4):
        config = dataclasses.replace(ROPE, n_layer=n_layer, layer_types=layer_types, window=8)
        prefill_layer.clear_cache()
        generate(random_params(config), config, random_tokens(1, 4), 1, rng=RNG)
        assert prefill_layer._cache_size() == kinds + 1


def test_the_last_layer_is_prefilled_as_far_as_its_cache_needs():
    def n_matmuls(*, is_last):
        lowered = prefill_layer.lower(
            random_params(ROPE)['h_0'], init_cache(ROPE, 1, 16)['h_0'], Stream(jnp.zeros((1, 4, ROPE.n_embd))),
            jnp.zeros((1, 4), int), jnp.arange(4)[None], config=ROPE, layer=ROPE.layer(0), is_last=is_last)
        return lowered.compile().as_text().count(' dot(')

    assert (n_matmuls(is_last=False), n_matmuls(is_last=True)) == (6, 1)


def test_a_step_is_said_to_read_the_slots_in_use_on_a_cpu_and_all_slots_elsewhere():
    config = dataclasses.replace(ROPE, block_size=1024)
    lengths = np.array([5, 70], np.int32)
    result = jax_generate.GenerationResult(None, lengths, cache_bytes=2 * jax_transformer.cache_bytes(config, 1024))
    on_cpu, on_gpu = (cache_bytes_read(result, config, 'auto', types.SimpleNamespace(platform=name))
                      for name in ('cpu', 'gpu'))
    assert on_cpu == 2 * jax_transformer.cache_bytes(config, 128) and on_gpu == result.cache_bytes
    of_16 = jax_transformer.cache_bytes(config, 16)
    result = result._replace(lengths=lengths[:1], cache_bytes=of_16)
    assert cache_bytes_read(result, config, 'auto', types.SimpleNamespace(platform='cpu')) == of_16


@pytest.mark.parametrize('n_tokens, n_chosen', [(1, 2), (2, 3.5), (10**6, 8)])
def test_a_step_is_said_to_read_the_experts_that_its_tokens_choose(n_tokens, n_chosen):
    moe = MoEConfig(n_expert=8, n_used=2, width=8)
    assert expected_experts(moe, n_tokens) == pytest.approx(n_chosen)
    config = dataclasses.replace(TINY, mlp='swiglu', moe=moe, bias=False)
    params = random_params(config)
    one_expert = 4 * 3 * 16 * 8 * config.n_layer  # bytes of three matrices of each layer
    rest = bytes_read_per_step(params, config, 0)
    assert bytes_read_per_step(params, config, n_tokens) == pytest.approx(rest + n_chosen * one_expert)
    assert rest == sum(leaf.nbytes for leaf in jax.tree.leaves(without_tables(params))) - 8 * one_expert


@pytest.mark.parametrize('dtype', ['int8', 'float8'])
def test_caches_of_8_bits_are_refused_beside_large_biases(dtype):
    params = random_params(TINY)
    check_cache_dtype(params, TINY, dtype)

    def with_biases(*norms, of='c_attn'):
        """Those of queries, keys and values, of two heads each, have these norms."""
        bias = np.repeat(norms, TINY.head_width) / TINY.head_width ** 0.5
        return jax.tree.map_with_path(
            lambda path, x: np.resize(bias, x.shape) if [key.key for key in path[-2:]] == [of, 'bias'] else x, params)

    check_cache_dtype(with_biases(*[31] * 6), TINY, dtype)  # each head counts by itself
    check_cache_dtype(with_biases(600, of='c_fc'), TINY, dtype)
    large = with_biases(0, 0, 0, 33, 0, 0)
    check_cache_dtype(large, TINY, 'bfloat16')
    assert 'h_0 has a bias of the attention with norm 33' in refusal(check_cache_dtype, large, TINY, dtype)


def test_a_sampling_is_built_by_name():
    for kind in (Sampling, TextSampling):
        with pytest.raises(TypeError, match='positional'):
            kind(0)
