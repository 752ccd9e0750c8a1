"""A model that takes and gives text, from Python: the same texts as sample_jax.py's, and nothing printed."""
import dataclasses
import inspect
import json
import pydoc
import types

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors

import jax_generate
import jax_text
from jax_flags import TextSampling, UserError
from jax_generate import PrefixCache, generate
from jax_hub.tokenizer_files import write_char_tokenizer, write_tokenizer
from jax_hub.tokenizers import HFTokenizer, load_tokenizer
from jax_ops.decode_weights import convert_params_for_decoding
from jax_ops.sharding import current_mesh
from jax_run.load import load_run
from jax_text import Generation, TextModel, load, load_fitting_tokenizer
from jax_transformer import count_params
from tests.common import (
    GOLDEN, MODELS, TINY, apply, edit_json, random_model, random_params, sample, samples_of, slow)


@pytest.fixture(scope='session')
def run(finished):
    """The out_dir of a short run."""
    return finished[0]


@pytest.mark.parametrize('how', [
    slow(dict(dtype='bfloat16')), dict(quantize='int8'), dict(tensor=2)])
def test_a_model_writes_what_sample_jax_prints(how, run):
    n_draft = 3 if 'tensor' in how else 0
    flags = [f'--{name}={value}' for name, value in how.items()]
    printed = samples_of(sample(run, '--start=the quick', '--num_samples=3', '--max_new_tokens=30', '--seed=5',
                                f'--n_draft={n_draft}', *flags, *['--device=cpu'] * ('tensor' in how)))
    model = load(run, device='cpu', **how)
    options = dict(max_new_tokens=30, seed=5, n_draft=n_draft)
    assert model.generate(['the quick'], num_samples=3, **options) == printed
    assert model.generate('the quick', num_samples=3, **options) == printed
    assert [''.join(model.stream('the quick', first_sample=i, **options)) for i in range(3)] == printed


@pytest.mark.slow
def test_texts_of_a_batch_are_what_they_are_alone(run):
    model, texts = load(run, device='cpu:0'), ['the quick', 'fox', 'a']
    together = model.generate(texts, max_new_tokens=12)
    assert together == [model.generate([text], max_new_tokens=12)[0] for text in texts]
    assert model.generate(texts, max_new_tokens=12, stop=together[1][6:8])[1] == together[1][:6]


def variance_beside_independent_draws(draw, n_seeds=40):
    """The variance over seeds of the share of the texts draw(seed) that end with a letter of the alphabet's first half,
    as a multiple of what it would be if the texts were independent."""
    is_early = np.array([[text[-1] < 'n' for text in draw(seed)] for seed in range(n_seeds)])
    of_each_text = is_early.var(0, ddof=1)
    return is_early.mean(1).var(ddof=1) / (of_each_text.sum() / is_early.shape[1]**2)


@pytest.mark.filterwarnings('error')
def test_numbers_may_be_those_of_numpy(run):
    model = load(run)
    numbers = {'max_new_tokens': 6, 'top_k': 3, 'temperature': 0.5, 'seed': 4}
    theirs = {name: np.float32(n) if name == 'temperature' else np.int64(n) for name, n in numbers.items()}
    assert model.generate('the fox', **theirs) == model.generate('the fox', **numbers)


def test_samples_of_different_prompts_are_independent(run):
    model = random_model(run)
    letters = model.tokenizer.chars.strip()
    prompts = [a + b for a in letters[:12] for b in letters[:10]]
    options = dict(max_new_tokens=1, temperature=1, top_k=0)
    assert variance_beside_independent_draws(lambda seed: model.generate(prompts, seed=seed, **options)) < 1.8
    assert variance_beside_independent_draws(  # in calls of their own
        lambda seed: [model.generate([prompt], seed=seed, **options)[0] for prompt in prompts[::10]]) < 1.8


@pytest.mark.slow
@pytest.mark.parametrize('prompt', ['the quick', 'fox ' * 6])  # the context has 16 tokens
def test_a_sample_depends_on_its_seed_prompt_and_number_alone(prompt, run):
    model = random_model(run)
    options = dict(max_new_tokens=9, temperature=1, seed=5)
    samples = model.generate([prompt], num_samples=3, **options)
    assert len(set(samples)) == 3
    assert model.generate(['a', prompt, 'the', prompt], num_samples=3, **options)[3:6] == samples
    assert model.generate([prompt] * 2, **options) == samples[:1] * 2
    for how in (dict(), dict(n_draft=3), dict(prefix_cache=PrefixCache())):
        assert [''.join(model.stream(prompt, first_sample=i, **how, **options)) for i in range(3)] == samples
    assert model.generate([prompt], **options | dict(seed=6)) != samples[:1]


def test_an_empty_prompt_is_a_prompt_where_a_token_begins_every_text(speaking):
    model = load(speaking, device='cpu:0')
    options = dict(max_new_tokens=9, temperature=2)
    texts = model.generate(['', 'ab'], **options)
    assert texts == [model.generate([''], **options)[0], ''.join(model.stream('ab', **options))]
    assert texts[0] != texts[1][2:]


class Utf8:
    """A tokenizer of bytes, as far as a Generation decodes with it."""

    @staticmethod
    def decode(ids):
        return bytes(ids).decode('utf-8', 'replace')


@pytest.mark.parametrize('text, n_tokens', [('Hi a\U0001f642', 8), ('Hi a', 4), ('\U0001f642', 4), ('', 0)])
def test_the_tokens_of_a_text_go_to_the_last_byte_of_its_last_character(text, n_tokens):
    """A stop text ends the text; the first byte of a character already decodes to one U+FFFD."""
    tokens = list(f'{text}\nmore'.encode())
    generation = types.SimpleNamespace(
        model=types.SimpleNamespace(tokenizer=Utf8), lengths=[0], texts=[text],
        result=types.SimpleNamespace(tokens=np.array([tokens]), lengths=np.array([len(tokens)])))
    assert Generation.tokens_to_the_end(generation, 0) == n_tokens


def test_an_answer_to_ids_that_end_inside_a_character_has_that_character(run):
    model = load(run, device='cpu:0')
    smile = '\U0001f642'.encode()
    model = TextModel(model.params, model.config, model.tokenizer, model.layout)
    model.tokenizer = types.SimpleNamespace(
        decode=Utf8.decode, stop_texts=(), stop_tokens=(), sampling={}, vocab_size=model.tokenizer.vocab_size)
    generation = Generation(model, [[97, *smile[:2]]], TextSampling(max_new_tokens=3))
    assert generation.prompt_texts == ['a']


@pytest.mark.slow
def test_streamed_pieces_join_to_the_text_before_the_stop_text(run):
    model = load(run, device='cpu:0')
    text, = model.generate(['the'], max_new_tokens=40)
    for stop in (text[20:22], text[10:40], 'never'):
        options = dict(max_new_tokens=40, stop=stop)
        assert ''.join(model.stream('the', **options)) == model.generate(['the'], **options)[0]


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_streams_all_its_tokens(run):
    model = load(run, device='cpu:0')
    prompt = 'the quick brown fox ' * 25  # 500 tokens; 512 slots are the first size of the cache
    options = dict(max_new_tokens=40, prefix_cache=PrefixCache())
    text, = model.generate([prompt], max_new_tokens=40)
    assert ''.join(model.stream(prompt, **options)) == text and len(text) == len(prompt) + 40


def test_a_prompt_longer_than_the_context_is_said(run, capsys):
    model = load(run)
    long = 'the quick brown fox jumps'
    [*model.serve([long], max_new_tokens=2)]
    for answer in (model.generate(long, max_new_tokens=2), ''.join(model.stream(long, max_new_tokens=2))):
        assert answer.startswith(long)
    said = 'the prompt has 25 tokens, the context of the model 16: the text is continued from the last 16\n'
    assert capsys.readouterr().err == 3 * said


def test_of_overlapping_stop_texts_the_first_to_be_complete_counts_in_chunks_of_any_size(run):
    model = load(run, device='cpu:0')
    text, = model.generate(['the'], max_new_tokens=40)
    stops = [text[14:16], text[12:30]]  # the second begins first and is complete later
    expected = text[:text.find(stops[0], 3)]
    assert model.generate(['the'], max_new_tokens=40, stop=stops) == [expected]
    assert ''.join(model.stream('the', max_new_tokens=40, stop=stops)) == expected


def test_a_stop_text_that_is_one_character_of_a_character_tokenizer_ends_its_row_at_once(run, monkeypatch):
    model, prompts = load(run, device='cpu:0'), ['the', 'fox', 'a']
    free = [text[len(prompt):] for prompt, text in zip(prompts, model.generate(prompts, max_new_tokens=40))]
    for stop in (free[0][12], [free[1][9], free[2][20:22]]):
        def generate():
            ids = [model.encode(prompt) for prompt in prompts]
            return Generation(model, ids, TextSampling(max_new_tokens=40, stop=stop), logprobs=True).finish()

        at_once = generate()
        with monkeypatch.context() as patch:
            patch.setattr(jax_text, 'token_of_letter', lambda text, tokenizer: None)
            searched = generate()
        assert (at_once.texts, at_once.stopped) == (searched.texts, searched.stopped)
        assert [at_once.describe(i) for i in range(3)] == [searched.describe(i) for i in range(3)]
        assert at_once.stopped[isinstance(stop, list)] and (at_once.result.lengths <= searched.result.lengths).all()
        for row, length, was_stopped, text in zip(
                at_once.result.tokens, at_once.result.lengths, at_once.stopped, at_once.texts):
            if was_stopped and isinstance(stop, str):
                assert model.tokenizer.decode(row[:length].tolist()) == text + stop
        assert at_once.must_search == isinstance(stop, list)


def test_only_a_character_that_no_other_token_brings_is_a_stop_token(run, speaking, tmp_path):
    characters = load(run, device='cpu:0').tokenizer
    write_char_tokenizer('abc', tmp_path)
    assert jax_text.token_of_letter('t', characters) == characters.ids['t']
    assert jax_text.token_of_letter('b', HFTokenizer(tmp_path)) == 1
    for text, tokenizer in (('th', characters), ('|', HFTokenizer(tmp_path)), ('a', HFTokenizer(speaking))):
        assert jax_text.token_of_letter(text, tokenizer) is None


def test_a_row_that_has_met_the_stop_text_gets_no_more_tokens(run):
    model = load(run, device='cpu:0')
    free = model.generate(['the', 'fox'], max_new_tokens=40)
    stop = next(free[0][i:i + 3] for i in range(3, 20) if free[0][i:i + 3] not in free[1][3:])
    prompts = [[*map(model.tokenizer.ids.get, text)] for text in ('the', 'fox')]
    generation = Generation(model, prompts, TextSampling(max_new_tokens=40, stop=stop)).finish()
    n_new = free[0].index(stop, 3)  # of characters: before the stop text
    assert n_new + 3 <= generation.result.lengths[0] < n_new + 3 + jax_text.STOP_CHUNK
    assert generation.result.lengths[1] == 43 and generation.texts == [free[0][:n_new], free[1]]


def test_a_chat_answers_what_sample_jax_prints_and_keeps_the_final_channel(speaking, monkeypatch):
    flags = ['--chat=True', '--start=ab', '--num_samples=1', '--max_new_tokens=9', '--temperature=1.5']
    printed, = samples_of(sample('none', f'--init_from={speaking}', *flags))
    model, messages = load(speaking, device='cpu:0'), [{'role': 'user', 'content': 'ab'}]
    options = dict(max_new_tokens=9, temperature=1.5)
    assert model.chat(messages, **options) == model.chat('ab', **options) == printed.removeprefix('> ab\n')
    assert ''.join(model.stream(messages, **options)) == printed.removeprefix('> ab\n')
    monkeypatch.setattr('jax_hub.chats.final_answer', lambda text: f'the end of {text}')
    assert model.chat(messages, **options) == f"the end of {printed.removeprefix('> ab' + chr(10))}"


@pytest.mark.slow
def test_what_the_chat_template_leaves_out_is_refused(speaking):
    template = '{% for m in messages if m.role in ["user", "assistant"] %}{{ m.content }}{% endfor %}'
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    model, asked = load(speaking, device='cpu:0'), {'role': 'user', 'content': 'ab'}
    tool = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}
    assert isinstance(model.chat([asked], max_new_tokens=2), str)
    brief = {'role': 'system', 'content': 'a'}
    for use, kind in ((lambda: model.chat([asked], tools=[tool]), 'the descriptions of tools'),
                      (lambda: model.chat([brief, asked]), 'messages of the role "system"')):
        with pytest.raises(UserError, match=f'leaves out {kind}'):
            use()


def test_a_second_call_compiles_nothing(run):
    durations = []
    model = load(run, device='cpu:0')
    options = dict(max_new_tokens=20, n_draft=3)
    model.generate(['the quick'], **options)
    list(model.stream('the quick', **options))
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **more: durations.append(event))
    model.generate(['the lazy'], temperature=0.5, seed=3, **options)
    list(model.stream('the', top_k=5, **options))
    assert not [event for event in durations if event.startswith('/jax/core/compile/backend_compile')]
    model.generate(['a', 'b'], **options)  # another batch size
    assert [event for event in durations if event.startswith('/jax/core/compile/backend_compile')]


@pytest.mark.slow
def test_the_parameters_are_converted_for_decoding(run):
    kinds = {how: type(load(run, device='cpu:0', quantize=how).params['h_0']['mlp']['c_fc']['kernel']).__name__
             for how in ('', 'int8')}
    assert kinds == {'': 'Transposed', 'int8': 'Int8'}


def test_controls_that_are_not_given_are_the_generation_configs(speaking):
    (speaking / 'generation_config.json').write_text('{"temperature": 2, "top_k": 5}')
    given = load(speaking, device='cpu:0').generate(['ab c'], max_new_tokens=12, temperature=2, top_k=5)
    assert load(speaking, device='cpu:0').generate(['ab c'], max_new_tokens=12) == given
    (speaking / 'generation_config.json').unlink()
    assert load(speaking, device='cpu:0').generate(['ab c'], max_new_tokens=12) != given


@pytest.mark.slow
def test_between_two_pieces_no_mesh_is_left_behind(run):
    model = load(run, device='cpu', tensor=2)
    one, other = model.stream('the', max_new_tokens=20), model.stream('fox', max_new_tokens=20)
    texts = ['', '']
    for i, pieces in enumerate((one, other, one)):
        texts[i % 2] += next(pieces)
        assert current_mesh() is None
    assert [texts[0] + ''.join(one), texts[1] + ''.join(other)] == model.generate(['the', 'fox'], max_new_tokens=20)


def test_a_sample_that_has_all_its_tokens_was_cut(run):
    model = load(run, device='cpu:0')
    stop = model.generate(['the'], max_new_tokens=9)[0][6:8]
    for options, was_cut in ((dict(), True), (dict(stop=stop), False)):
        generation = Generation(model, [model.encode('the')], TextSampling(max_new_tokens=9, **options)).finish()
        assert generation.was_cut(0) == was_cut


@pytest.mark.parametrize('use, error, message', [
    (lambda model: model.generate(['the', '']), UserError, 'the prompt is empty'),
    (lambda model: model.generate([]), UserError, 'generate takes a text or a list of texts'),
    (lambda model: model.generate(['a', 3]), UserError, r"generate takes a text or a list of texts, not \['a', 3\]"),
    (lambda model: model.generate([{'role': 'user', 'content': 'a'}]), UserError, 'these are messages: call chat'),
    (lambda model: model.stream(['a', 'b']), UserError, 'stream takes one text'),
    (lambda model: model.logprobs(['the quick', 't']), UserError, "'t' is too short: it has no token to score"),
    (lambda model: model.logprobs([3]), UserError, 'logprobs takes a text or a list of texts'),
    (lambda model: model.generate(['Z']), UserError, "does not know: 'Z'"),
    (lambda model: model.generate(['the'], top_p=2), UserError, 'top_p must be in'),
    (lambda model: model.generate(['the'], temperature='hot'), UserError, "temperature must be a number, not 'hot'"),
    (lambda model: model.generate(['the'], top_k=1.5), UserError, 'top_k must be a whole number, not 1.5'),
    (lambda model: model.generate(['the'], max_new_tokens=None), UserError, 'max_new_tokens must be a whole number'),
    (lambda model: model.generate(['the'], seed='x'), UserError, 'seed must be a whole number'),
    (lambda model: model.generate(['the'], stop=None), UserError, 'stop must be a text or a list of texts, not None'),
    (lambda model: model.generate(['the'], num_samples=0), UserError, 'num_samples must be at least 1'),
    (lambda model: model.logits(b'the'), UserError, 'a prompt is a text or a list of messages, not b.the'),
    (lambda model: [*model.serve([{'prompt': 'the', 'first_sample': 'a'}])], UserError,
     "request 0: first_sample must be a number, not 'a'"),
    (lambda model: [*model.serve('the')], UserError, 'serve takes a list of requests'),
    (lambda model: [*model.serve({'prompt': 'the'})], UserError, 'serve takes a list of requests'),
    (lambda model: model.generate(['the'], seed=2**32), UserError, 'seed must be in'),
    (lambda model: model.stream('the', seed=-1), UserError, 'seed must be in'),
    (lambda model: model.stream('the', qqq=1), TypeError, "unexpected keyword argument 'qqq'"),
    (lambda model: model.chat([{'role': 'user', 'content': 'the'}]), UserError, 'has no chat template')])
def test_what_makes_no_sense_is_refused(use, error, message, run):
    with pytest.raises(error, match=message):
        use(load(run, device='cpu:0'))


def keyword_options(function):
    """{name: default} of the options of a function that are given by name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_the_methods_of_a_model_list_all_options_with_their_defaults():
    of_sampling = {field.name: field.default for field in dataclasses.fields(TextSampling)}
    for method in (TextModel.generate, TextModel.stream, TextModel.chat):
        options = keyword_options(method)
        assert of_sampling.items() <= options.items()
        assert options['temperature'] is None
    of_score = keyword_options(jax_generate.score)
    assert keyword_options(TextModel.score) == of_score
    assert keyword_options(TextModel.logprobs).items() < of_score.items()
    shown = ' '.join(pydoc.render_doc(TextModel.chat).split())  # from 3.13 on, a line for each option
    assert 'temperature: float | None = None, top_k: int | None = None' in shown


def test_a_model_is_one_line_in_a_notebook(run):
    for quantize in ('', 'int8'):
        model = load(run, device='cpu:0', quantize=quantize)
        n_params = count_params(load_run(run, 'best', model.layout)[1], non_embedding=False)
        assert repr(model) == str(model) == f'{model.title}; {n_params:,} parameters, context of 16 tokens'
        assert model.title.startswith(f'{run}, checkpoint of iteration')


def test_the_defaults_of_a_model_are_its_makers_or_nanogpts(speaking):
    (speaking / 'generation_config.json').write_text('{"temperature": 2, "top_p": 0.5}')
    assert load(speaking, device='cpu:0').defaults == {'temperature': 2, 'top_k': 200, 'top_p': 0.5}


def test_without_a_seed_each_call_draws_one(run):
    model = load(run, device='cpu:0')
    options = dict(max_new_tokens=30, temperature=2.0, seed=None)
    assert len({model.generate('the', **options) for _ in range(3)}) == 3
    assert ''.join(model.stream('the', **options)).startswith('the')


def test_a_text_of_one_token_is_scored_where_a_token_precedes_it(speaking):
    ids, logprobs = load(speaking, device='cpu:0').logprobs('a')
    assert len(ids) == len(logprobs) == 1


def test_log_probabilities_of_one_text_are_those_of_a_list_of_it(run, speaking):
    for source, text in ((run, 'the quick'), (speaking, 'hello, again.')):  # the second puts a token before each text
        model = load(source, device='cpu:0')
        ids, logprobs = model.logprobs(text)
        (ids_in_list, in_list), = model.logprobs([text])
        assert ids == ids_in_list and len(ids) > 5
        np.testing.assert_array_equal(logprobs, in_list)


def test_a_model_that_is_not_there_is_named(run):
    for source, options, message in (
            ('nowhere', dict(), 'nowhere does not exist'),
            ('nowhere', dict(checkpoint='best'), 'no complete checkpoint'),
            (run, dict(tensor=9), 'there are 8'), (run, dict(checkpoint='first'), 'checkpoint must be'),
            (run, dict(dataset='mine'), 'dataset=mine describes the tokenizer of a ckpt.pt')):
        with pytest.raises(UserError, match=message):
            load(source, device='cpu', **options)


def test_the_library_prints_nothing(run, capsys):
    model = load(run, device='cpu:0')
    assert ''.join(model.stream('the', max_new_tokens=20)) == model.generate(['the'], max_new_tokens=20)[0]
    assert capsys.readouterr() == ('', '')


# -----------------------------------------------------------------------------
# log-probabilities

def rows_to_score(seed=0):
    """Items as score takes them: choices after a shared context, a long text, rows that are cut and that differ."""
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(37, size=n).tolist()
    items = []
    for n_choices, n_context in ((4, 9), (4, 1), (2, 5), (1, 12), (4, 3), (1, 3), (4, 8)):
        context = draw(n_context)
        items.append([(context + draw(rng.integers(1, 6)), n_context) for _ in range(n_choices)])
    return [*items, [(draw(60), 1)], [(draw(30), 28), (draw(27), 20)]]


def score_uncached(config, params, ids, start, max_length):
    """The log-probabilities of ids[start:], each window in one call of the model without a KV cache."""
    found = []
    for first, scored, end in jax_generate.windows(len(ids), start, max_length):
        idx = np.pad(ids[first:end - 1], (0, max_length - (end - 1 - first)))[None]  # one shape, so one compilation
        logits = apply(config, params, idx)[0]
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(end - first - 1), ids[first + 1:end]]
        found += logprobs[scored - first - 1:].tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_log_probabilities_are_those_of_the_uncached_model_in_any_batch(name):
    config, items = MODELS[name], rows_to_score()
    params = random_params(config)
    converted = convert_params_for_decoding(dict(params), 'float32')
    expected = [[score_uncached(config, params, *row, 16) for row in item] for item in items]
    for batch_size in (1, 16) if name == 'windows' else (16,):
        scores = jax_generate.score(converted, config, items, batch_size=batch_size)
        for item, item_expected in zip(scores, expected):
            for (logprobs, _), row_expected in zip(item, item_expected, strict=True):
                np.testing.assert_allclose(logprobs, row_expected, atol=2e-5)


@pytest.mark.slow
def test_a_token_is_likeliest_if_greedy_sampling_generates_it():
    params = convert_params_for_decoding(dict(random_params(TINY)), 'float32')
    ids = generate(params, TINY, np.array([[3, 4]]), 8, rng=jax.random.key(0), temperature=0)[0].tolist()
    other = [*ids[:5], (ids[5] + 1) % 37, *ids[6:]]
    (_, same), (_, changed) = jax_generate.score(params, TINY, [[(ids, 2), (other, 2)]])[0]
    assert same.all() and changed[:3].all() and not changed[3]


def test_windows_are_those_of_lm_eval():
    assert list(jax_generate.windows(11, 1, 4)) == [(0, 1, 5), (4, 5, 9), (6, 9, 11)]  # the example in lm-eval's docs
    assert list(jax_generate.windows(11, 9, 4)) == [(6, 9, 11)]
    assert list(jax_generate.windows(5, 2, 4)) == [(0, 2, 5)]


@pytest.mark.parametrize('how, tolerance', [
    (dict(), 0), (dict(tensor=2), 1e-5), (dict(quantize='int8'), 0.05), (dict(dtype='bfloat16'), 0.05)])
def test_a_text_of_characters_is_scored_from_the_second_on(how, tolerance, run):
    text = 'the quick brown fox jumps over the lazy dog'
    (ids, logprobs), (_, short) = load(run, device='cpu', **how).logprobs([text, text[:9]])
    model = load(run, device='cpu')
    assert model.tokenizer.decode(ids) == text[1:] and len(logprobs) == len(ids)
    np.testing.assert_allclose(logprobs, model.logprobs([text])[0][1], atol=tolerance)
    np.testing.assert_allclose(logprobs[:8], short, atol=max(tolerance, 1e-5))
    with pytest.raises(UserError, match='is too short: it has no token to score'):
        model.logprobs([text, 't'])


def test_the_pieces_of_a_text_show_no_beginning_of_the_longest_stop_text():
    class Growing:
        """A Generation of which the text is 'ab', then 'abcdefsto', then ended by 'stop!'."""
        stops = ('x', 'stop!')
        stopped = [False]
        prompt_texts = ['']

        def __iter__(self):
            for text in ('ab', 'abcdefsto', 'abcdef'):
                self.texts, self.stopped = [text], [text == 'abcdef']
                yield

    assert list(Generation.pieces(Growing())) == ['', 'abcd', 'ef', '']


def test_a_tokenizer_may_know_special_tokens_that_the_model_does_not(speaking, tmp_path):
    model = load(speaking, device='cpu:0')
    tokenizer = Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    n = model.config.vocab_size
    tokenizer.add_special_tokens([AddedToken(f'<{i}>') for i in range(tokenizer.get_vocab_size(), n + 1)])
    tokenizer.save(str(speaking / 'tokenizer.json'))
    assert tokenizer.get_vocab_size() == n + 1
    assert load(speaking, device='cpu:0').tokenizer.vocab_size == n
    with pytest.raises(UserError, match=f'token id {n}; the model knows 0 to {n - 1}'):
        load(speaking, device='cpu:0').generate([f'a<{n}>'], max_new_tokens=1)
    copy = {'kind': 'folder', 'path': str(tmp_path / 'copy'), 'is_copy': True}  # of a run, without a config.json
    write_tokenizer({'kind': 'folder', 'path': str(speaking)}, tmp_path / 'copy')
    assert load_tokenizer(copy).vocab_size == n + 1
    assert load_fitting_tokenizer(copy, 'a run', model.config).vocab_size == n
    tokenizer.add_tokens(['not special'])
    tokenizer.save(str(speaking / 'tokenizer.json'))
    with pytest.raises(UserError, match=f'the tokenizer has {n + 2} tokens, the model only {n}'):
        load(speaking, device='cpu:0')


def test_a_text_that_begins_with_the_name_of_a_special_token_follows_it_too(speaking):
    tokenizer = Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    tokenizer.post_processor = processors.Sequence([])
    tokenizer.save(str(speaking / 'tokenizer.json'))
    model = load(speaking, device='cpu:0')
    assert model.encode_document('<s>ab') == [model.tokenizer.start_token, *model.tokenizer.encode('<s>ab')]


def test_a_text_follows_the_token_that_begins_a_document(speaking):
    model = load(speaking, device='cpu:0')
    begin = model.tokenizer.start_token
    (ids, logprobs), = model.logprobs(['hello, again.'])
    assert model.encode_document('hello, again.') == [begin, *ids] == model.tokenizer.encode('hello, again.')
    (expected, _), = model.score([[([begin, *ids], 1)]])[0]
    np.testing.assert_array_equal(logprobs, expected)


LM_EVAL = json.loads((GOLDEN / 'scores.json').read_text())


@pytest.mark.parametrize('name', LM_EVAL['cases'])
def test_rows_and_scores_are_those_of_lm_eval_whatever_a_tokenizer_puts_around_a_text(name, speaking):
    case = LM_EVAL['cases'][name]
    tokenizer = Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    ends = [(token, tokenizer.token_to_id(token)) for token in ('<s>', '</s>')]
    tokenizer.post_processor = processors.TemplateProcessing(case['single'], special_tokens=ends)
    tokenizer.save(str(speaking / 'tokenizer.json'))
    model = load(speaking, device='cpu:0')
    rows = [model.encode_pair(*pair) for pair in LM_EVAL['pairs']]
    assert rows == [tuple(row) for row in case['rows']]
    if name in ('begin and end', 'end'):  # the others are scored in the same way
        scores = [float(logprobs.sum()) for (logprobs, _), in model.score([[row] for row in rows])]
        np.testing.assert_allclose(scores, case['scores'], rtol=1e-4)
        rolling = [float(logprobs.sum()) for _, logprobs in model.logprobs(LM_EVAL['texts'])]
        np.testing.assert_allclose(rolling, case['rolling'], rtol=1e-4)


def test_a_prompt_is_not_ended_before_it_is_continued(speaking):
    tokenizer = Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    expected = load(speaking, device='cpu:0').encode('hello')
    ends = [(token, tokenizer.token_to_id(token)) for token in ('<s>', '</s>')]
    tokenizer.post_processor = processors.TemplateProcessing('<s> $0 </s>', special_tokens=ends)
    tokenizer.save(str(speaking / 'tokenizer.json'))
    assert load(speaking, device='cpu:0').encode('hello') == expected


@pytest.mark.parametrize('options, match', [
    (dict(max_length=17), 'between 1 and 16'), (dict(batch_size=0), 'at least 1'), (dict(cache_dtype='x'), 'one of')])
def test_options_of_scoring_that_make_no_sense_are_refused(options, match, run):
    with pytest.raises(UserError, match=match):
        load(run, device='cpu:0').logprobs(['the quick'], **options)
