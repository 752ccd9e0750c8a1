"""jax_apps/batching.py: answers that are decoded together, as TextModel.serve does; test_serve.py has the server's."""
import dataclasses
import random

import jax
import numpy as np
import pytest

import jax_generate
import jax_apps.batching
from jax_apps.batching import Batch
from jax_flags import TextSampling, UserError
from jax_generate import PrefixCache, Prompts, start_rows
from jax_ops.decode_weights import convert_params_for_decoding
from jax_text import Generation, load
from tests.common import (
    MODELS, assert_as_alone, generate_alone, long, random_model, random_params, random_request, slow)

@pytest.fixture(scope='module')
def model(finished):
    """A model of random weights; its context has 16 tokens."""
    return random_model(finished[0])


def begin(model, batch, prompt='the fox', **options):
    """The chunks of a Generation in a Batch."""
    return iter(Generation(model, [model.encode(prompt)], TextSampling(**options), logprobs=True, batch=batch))


# -----------------------------------------------------------------------------
# requests from Python

@pytest.mark.parametrize('batch_size, n_requests', [(4, 12), slow(1, 6), long(8, None)])
def test_each_request_has_the_text_that_it_has_alone(model, batch_size, n_requests, pytestconfig):
    n_requests = n_requests or pytestconfig.getoption('--requests') // 2
    rng = random.Random(batch_size)
    requests = [random_request(rng, 'the fox') for _ in range(n_requests)]
    answers = list(model.serve(requests, batch_size=batch_size))
    assert sorted(answer['number'] for answer in answers) == list(range(n_requests))
    for answer in answers:
        request = requests[answer['number']]
        alone = generate_alone(model, request)
        assert_as_alone(alone, answer['text'])
        if answer['text'] == alone.texts[0][len(request['prompt']):]:
            assert answer == {'number': answer['number'], **alone.describe(0),
                              'logprob': pytest.approx(alone.describe(0)['logprob'], abs=1e-3)}


def test_an_answer_that_has_ended_makes_room_for_the_next_request(model, batches, monkeypatch):
    monkeypatch.setattr(jax_apps.batching, 'CHUNK', 1)
    taken = []

    def requests():
        for n_new in (9, 2, 2, 2):
            taken.append(n_new)
            yield {'prompt': 'the fox', 'max_new_tokens': n_new}

    numbers = []
    for answer in model.serve(requests(), batch_size=2, temperature=0):
        numbers.append(answer['number'])
        assert len(taken) <= len(numbers) + 2
    assert numbers == [1, 2, 3, 0]
    assert batches == [2] * 6 + [1] * 3  # at once: no chunk is decoded between an end and the next answer


def test_answers_that_end_together_are_followed_by_answers_that_begin_together(model, batches, monkeypatch):
    monkeypatch.setattr(jax_apps.batching, 'SLOW_STEP', float('inf'))  # steps are slow while they are compiled
    answers = list(model.serve(['the fox'] * 6, batch_size=2, max_new_tokens=5))
    assert len(answers) == 6
    assert batches == [2] * 6  # a chunk of one token and a chunk of four, for each pair


def test_what_a_request_leaves_out_the_call_says(model):
    requests = ['the fox', {'prompt': 'the fox', 'first_sample': 1}, {'prompt': 'the fox', 'seed': 3}]
    answers = sorted(model.serve(requests, max_new_tokens=9, seed=5), key=lambda answer: answer['number'])
    texts = [answer['prompt'] + answer['text'] for answer in answers]
    assert texts[:2] == model.generate(['the fox'], num_samples=2, max_new_tokens=9, seed=5)
    assert texts[2] == model.generate('the fox', max_new_tokens=9, seed=3)


@pytest.mark.parametrize('requests, options, match', [
    ([{'seed': 1}], {}, 'request 0 needs a prompt'),
    (['a', {'prompt': 'a', 'num_samples': 2}], {}, r"request 1 .* not \['num_samples'\]"),
    (['a'], {'batch_size': 0}, 'batch_size'),
    (['a', {'prompt': 'a', 'cache_dtype': 'int8'}], {}, 'the same cache_dtype'),
    (['~'], {}, '~')])
def test_requests_that_make_no_sense_are_refused(model, requests, options, match):
    with pytest.raises(UserError, match=match):
        list(model.serve(requests, max_new_tokens=20, **options))


def test_a_chat_is_answered_as_by_chat_which_keeps_the_final_channel(monkeypatch):
    model = load('tests/golden/letters', device='cpu:0')
    chat = [{'role': 'user', 'content': 'ab'}]
    monkeypatch.setattr('jax_hub.chats.final_answer', lambda text: f'the end of {text}')
    answer, = model.serve([chat], max_new_tokens=9)
    assert answer['text'] == model.chat(chat, max_new_tokens=9)


# -----------------------------------------------------------------------------
# the rows of a batch

@pytest.mark.parametrize('name', ['windows', slow('learned positions'), long('experts'), long('latent attention')])
def test_rows_join_and_leave_any_model_while_its_cache_grows(name, monkeypatch):
    monkeypatch.setattr(jax_generate, 'round_up_slots', lambda n: max(8, jax_generate.power_of_two(int(n))))
    monkeypatch.setattr(jax_generate, 'choose_slots', lambda needed, longest, block_size: min(
        jax_generate.round_up_slots(needed), block_size))
    config = dataclasses.replace(MODELS[name], block_size=32)
    params, rng = random_params(config), random.Random(3)

    def start(seed, reads=True):
        draw = np.random.default_rng(seed)
        idx = draw.integers(37, size=(1, draw.integers(1, 30)))
        sampling = jax_generate.Sampling(
            max_new_tokens=int(draw.integers(1, 25)), temperature=float(draw.choice([0, 1])))
        return start_rows(
            params, config, Prompts(idx, jax.random.key(seed)), sampling, logprobs=True, reads=reads)

    batch, under_way, n_begun = Batch(), {}, 0
    while under_way or n_begun < 12:
        while n_begun < 12 and len(under_way) < 6 and rng.random() < 0.8:
            under_way[n_begun] = batch.join(start(n_begun, reads=rng.random() < 0.2))
            n_begun += 1
        if not under_way:
            continue
        seed = rng.choice(list(under_way))
        row = under_way[seed]
        result = row.advance(rng.randint(1, 8))
        is_cancelled = rng.random() < 0.03
        if row.is_over or is_cancelled:
            row.close()
            under_way.pop(seed)
        if row.is_over:
            expected = start(seed).advance(100)
            np.testing.assert_array_equal(result.tokens, expected.tokens)
            np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)
            assert result.finish_reasons == expected.finish_reasons
    assert batch.decoder is None and batch.rows == []


def test_a_longer_row_joins_shorter_ones(monkeypatch):
    """The batch then gets more columns while the shorter rows stay in it."""
    monkeypatch.setattr(jax_generate, 'round_up_slots', lambda n: max(8, jax_generate.power_of_two(int(n))))
    config = MODELS['windows']
    params = random_params(config)

    def start(n_prompt, n_new):
        idx = np.random.default_rng(n_prompt).integers(37, size=(1, n_prompt))
        sampling = jax_generate.Sampling(max_new_tokens=n_new, temperature=0)
        return start_rows(params, config, Prompts(idx, jax.random.key(0)), sampling, logprobs=True)

    batch = Batch()
    sizes = (2, 6), (3, 5), (9, 23)
    rows = [batch.join(start(*size)) for size in sizes[:2]]
    rows[0].advance(2)
    rows[1].advance(2)
    n_before = batch.decoder.n_columns
    rows.append(batch.join(start(*sizes[2])))
    rows[2].advance(2)
    assert n_before == 8 and batch.decoder.n_columns == 32 and rows[0].place is not None
    for row, size in zip(rows, sizes):
        while not row.is_over:
            result = row.advance(8)
        row.close()
        expected = start(*size).advance(100)
        np.testing.assert_array_equal(result.tokens, expected.tokens)
        np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize('name, how', [
    ('learned positions', {}), *[slow(name, {}) for name in MODELS if name != 'learned positions'],
    slow('learned positions', dict(dtype='bfloat16')), slow('learned positions', dict(quantize='int8')),
    slow('experts', dict(dtype='bfloat16', quantize='int8'))])
def test_with_one_number_of_rows_bits_do_not_depend_on_the_company(name, how, finished):
    model, rng = load(finished[0], device='cpu:0', **how), random.Random(1)
    dtype = how.get('dtype', 'float32')
    config = dataclasses.replace(MODELS[name], dtype=dtype)
    params = convert_params_for_decoding(dict(random_params(config)), dtype, how.get('quantize', ''))
    model = dataclasses.replace(model, config=config, params=params)
    asked = {'prompt': 'the', 'max_new_tokens': 9, 'seed': 4}
    found = []
    for n_others in (0, 2, 3, 3):
        batch = Batch(4)  # whose cache has 16 slots, the context of the model
        others = [begin(model, batch, **random_request(rng, 'the fox', longest=7)) for _ in range(n_others)]
        for other in others:
            next(other)
        for generation in begin(model, batch, **asked):
            for other in others:
                next(other, None)
        found.append(generation.result)
    for result in found[1:]:
        np.testing.assert_array_equal(result.tokens, found[0].tokens)
        np.testing.assert_array_equal(result.logprobs, found[0].logprobs)
        np.testing.assert_array_equal(result.sampling_logprobs, found[0].sampling_logprobs)


def test_a_row_that_has_left_holds_no_slots_that_attention_would_read(model, monkeypatch):
    monkeypatch.setattr(jax_apps.batching, 'CHUNK', 2)
    batch = Batch()
    rows = [begin(model, batch, max_new_tokens=n_new) for n_new in (3, 8, 8, 8)]
    for row in rows:
        next(row)
    for _ in rows[0]:  # to its end
        pass
    for _ in range(2):  # at least one chunk without it
        next(rows[1])
    lengths = np.array(batch.decoder.state.length_B)
    assert [length for length, row in zip(lengths, batch.places) if row is None] == [1]
    assert min(length for length, row in zip(lengths, batch.places) if row) > len('the fox')


def test_the_first_token_is_there_at_once_while_others_go_on_by_one(model, monkeypatch):
    monkeypatch.setattr(jax_apps.batching, 'SLOW_STEP', float('inf'))  # else they go on by one anyway
    batch = Batch()
    first = begin(model, batch, max_new_tokens=9)  # it fits into the context, and so into the batch
    next(first)
    second = next(begin(model, batch, 'a', max_new_tokens=5))
    assert second.result.lengths[0] == len('a') + 1
    assert batch.rows[0].n_generated == 2 and batch.rows[0].place is not None


@pytest.mark.parametrize('slow_step, n_chunks', [(0, 9), (float('inf'), 2)])
def test_a_chunk_is_one_token_if_steps_are_slow(model, batches, monkeypatch, slow_step, n_chunks):
    monkeypatch.setattr(jax_apps.batching, 'SLOW_STEP', slow_step)
    assert len(list(model.serve(['a'] * 2, batch_size=2, max_new_tokens=1 + 8))) == 2
    assert batches == [2] * n_chunks  # the first token has a chunk of its own


def test_a_row_that_leaves_the_batch_takes_its_kv_cache_along(model):
    batch, held = Batch(), PrefixCache()
    prompt = model.encode('the fox')
    first, second = (iter(Generation(model, [prompt], TextSampling(max_new_tokens=n, seed=1), batch=batch,
                                     prefix_cache=prefix_cache)) for n, prefix_cache in ((5, held), (9, None)))
    next(first), next(second)
    assert [row.place for row in batch.rows] == [0, 1]
    *_, whole = first
    assert held.tokens.tolist() == whole.result.tokens[0, :len(prompt) + 4].tolist() and held.cache
    alone = Generation(model, [prompt], TextSampling(max_new_tokens=5, seed=1)).finish()
    goes_on = Generation(model, [prompt], TextSampling(max_new_tokens=5, seed=1), prefix_cache=held).finish()
    assert alone.texts == goes_on.texts == whole.texts


@pytest.fixture
def prefilled(monkeypatch):
    """The number of rows of each prefill."""
    sizes, prefill_pieces = [], jax_generate.prefill_pieces

    def record(params, config, cache, tokens_BxT, *args):
        sizes.append(len(tokens_BxT))
        return prefill_pieces(params, config, cache, tokens_BxT, *args)

    monkeypatch.setattr(jax_generate, 'prefill_pieces', record)
    return sizes


PROMPTS = ['abcdef', 'fe', 'ccccd', 'dabdab', 'a' * 20]  # 6 to 8 tokens in one batch, of 2 and of 20 alone


def test_prompts_of_similar_length_that_come_together_are_read_in_one_batch(prefilled):
    model = load('tests/golden/letters', device='cpu:0')
    options = dict(max_new_tokens=8, temperature=0)
    expected = [generate_alone(model, {'prompt': prompt, **options}).texts for prompt in PROMPTS]
    prefilled.clear()
    batch = Batch()
    generations = [Generation(model, [model.encode(prompt)], TextSampling(**options), batch=batch)
                   for prompt in PROMPTS]
    for generation in generations:
        generation.begin()
    assert prefilled == []
    chunks = [iter(generation) for generation in generations]
    next(chunks[0])
    assert sorted(prefilled) == [1, 1, 4]  # three rows, filled up
    for each in chunks:
        list(each)
    assert [generation.texts for generation in generations] == expected
    assert sorted(prefilled) == [1, 1, 4]


def test_one_row_has_drafts_and_several_have_none():
    model = load('tests/golden/letters', device='cpu:0')
    options = dict(max_new_tokens=30, temperature=0, n_draft=3)
    expected = generate_alone(model, {'prompt': 'a', **options})
    batch = Batch()
    alone = begin(model, batch, 'a', **options, stop='never')
    next(alone)
    drafted = next(alone).result.drafted
    assert drafted > 0
    other = begin(model, batch, 'ef', **options)
    next(other)
    for generation in alone:
        assert generation.result.drafted == drafted
    assert generation.texts == expected.texts
