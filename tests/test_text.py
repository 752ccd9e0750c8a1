"""A model that takes and gives text, from Python: the same texts as sample_jax.py's, and nothing printed."""
import jax
import pytest

import jax_text
from jax_flags import UserError
from jax_ops.sharding import current_mesh
from jax_text import Generation, load
from tests.common import sample, succeeded, train

END = '\n---------------\n'


@pytest.fixture(scope='module')
def run(tmp_path_factory, dataset):
    """The out_dir of a short run."""
    out = tmp_path_factory.mktemp('text') / 'out'
    succeeded(train(out, f'--dataset={dataset}', '--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16',
                    '--batch_size=4', '--gradient_accumulation_steps=2', '--max_iters=10', '--eval_interval=10',
                    '--eval_iters=2', '--learning_rate=1e-2', '--device=cpu:0'))
    return out


def samples_of(result):
    *samples, end = succeeded(result).stdout.split(END)
    assert end == ''
    return samples


@pytest.mark.parametrize('how', [
    dict(), dict(dtype='bfloat16'), dict(quantize='int8'), dict(tensor=2, draft=True)])
def test_a_model_writes_what_sample_jax_prints(how, run):
    how = how | dict(draft=str(run)) if how.get('draft') else how
    n_draft = 3 if how.get('draft') else 0
    flags = [f'--{name}={value}' for name, value in how.items()]
    printed = samples_of(sample(run, '--start=the quick', '--num_samples=3', '--max_new_tokens=30', '--seed=5',
                                f'--n_draft={n_draft}', *flags, *['--device=cpu'] * ('tensor' in how)))
    model = load(run, device='cpu', **how)
    options = dict(max_new_tokens=30, seed=5, n_draft=n_draft)
    assert model.generate(['the quick'], num_samples=3, **options) == printed
    assert [''.join(model.stream('the quick', first_sample=i, **options)) for i in range(3)] == printed


def test_texts_of_a_batch_are_what_they_are_alone(run):
    model, texts = load(run, device='cpu:0'), ['the quick', 'fox', 'a']
    together = model.generate(texts, max_new_tokens=12)
    assert together == [model.generate([text], max_new_tokens=12)[0] for text in texts]
    assert model.generate(texts, max_new_tokens=12, stop=together[1][6:8])[1] == together[1][:6]


def test_streamed_pieces_join_to_the_text_before_the_stop_text(run):
    model = load(run, device='cpu:0')
    text, = model.generate(['the'], max_new_tokens=40)
    for stop in (text[20:22], text[10:40], 'never'):
        options = dict(max_new_tokens=40, stop=stop)
        assert ''.join(model.stream('the', **options)) == model.generate(['the'], **options)[0]


def test_a_chat_answers_what_sample_jax_prints_and_keeps_the_final_channel(speaking, monkeypatch):
    flags = ['--chat=True', '--start=ab', '--num_samples=1', '--max_new_tokens=9', '--temperature=1.5']
    printed, = samples_of(sample('none', f'--init_from={speaking}', *flags))
    model, messages = load(speaking, device='cpu:0'), [{'role': 'user', 'content': 'ab'}]
    options = dict(max_new_tokens=9, temperature=1.5)
    assert model.chat(messages, **options) == printed.removeprefix('> ab\n')
    assert ''.join(model.stream(messages, **options)) == printed.removeprefix('> ab\n')
    monkeypatch.setattr(jax_text, 'final_answer', lambda text: f'the end of {text}')
    assert model.chat(messages, **options) == f"the end of {printed.removeprefix('> ab' + chr(10))}"


def test_a_second_call_compiles_nothing(run):
    durations = []
    model = load(run, device='cpu:0')
    options = dict(max_new_tokens=20, n_draft=3)
    model.generate(['the quick'], **options)
    list(model.stream('the quick', **options))
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **more: durations.append(event))
    model.generate(['the lazy d'], temperature=0.5, seed=3, **options)
    list(model.stream('the', top_k=5, **options))
    assert not [event for event in durations if event.startswith('/jax/core/compile/backend_compile')]
    model.generate(['a', 'b'], **options)  # another batch size
    assert [event for event in durations if event.startswith('/jax/core/compile/backend_compile')]


def test_the_parameters_are_converted_for_decoding(run):
    kinds = {how: type(load(run, device='cpu:0', quantize=how).params['h_0']['mlp']['c_fc']['kernel']).__name__
             for how in ('', 'int8')}
    assert kinds == {'': 'Transposed', 'int8': 'Int8'}


def test_controls_that_are_not_given_are_the_generation_configs(speaking):
    (speaking / 'generation_config.json').write_text('{"temperature": 2, "top_k": 5}')
    given = load(speaking, device='cpu:0').generate(['ab'], max_new_tokens=12, temperature=2, top_k=5)
    assert load(speaking, device='cpu:0').generate(['ab'], max_new_tokens=12) == given
    (speaking / 'generation_config.json').unlink()
    assert load(speaking, device='cpu:0').generate(['ab'], max_new_tokens=12) != given


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
        generation = Generation(model, [model.encode('the')], max_new_tokens=9, **options).finish()
        assert generation.was_cut(0) == was_cut


@pytest.mark.parametrize('use, error, message', [
    (lambda model: model.generate(['the', '']), UserError, 'the prompt is empty'),
    (lambda model: model.generate([]), UserError, 'at least one token'),
    (lambda model: model.generate(['Z']), UserError, "does not know: 'Z'"),
    (lambda model: model.generate(['the'], top_p=2), UserError, 'top_p must be in'),
    (lambda model: model.generate(['the'], temprature=1), TypeError, 'temprature'),
    (lambda model: model.chat([{'role': 'user', 'content': 'the'}]), UserError, 'has no chat template')])
def test_what_makes_no_sense_is_refused(use, error, message, run):
    with pytest.raises(error, match=message):
        use(load(run, device='cpu:0'))


def test_a_model_that_is_not_there_is_named(run):
    for source, options, message in (
            ('nowhere', dict(), 'nowhere does not exist'),
            ('nowhere', dict(checkpoint='best'), 'no complete checkpoint'),
            (run, dict(tensor=9), 'there are 8 devices'), (run, dict(checkpoint='first'), 'checkpoint must be')):
        with pytest.raises(UserError, match=message):
            load(source, device='cpu', **options)


def test_the_library_prints_nothing(run, capsys):
    model = load(run, device='cpu:0')
    assert ''.join(model.stream('the', max_new_tokens=20)) == model.generate(['the'], max_new_tokens=20)[0]
    assert capsys.readouterr() == ('', '')
