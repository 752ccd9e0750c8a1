"""eval_jax.py: bits per byte of texts, and accuracy in tasks, by the log-probabilities of tests/test_text.py."""
import importlib.util
import io
import itertools
import json
import math
import os
import random
import sys
import types

import numpy as np
import pytest

from jax_text import load
from tests.common import GOLDEN, ROOT, TEXT, assert_refused, refusal, run_script, slow, succeeded, train

ITEMS = [
    {'query': 'the quick brown', 'choices': ['fox', 'dog', 'lazy dog'], 'gold': 0},
    {'query': 'over the', 'choices': ['lazy', 'fox jumps'], 'gold': 1},
    {'context_options': ['the quick', 'the lazy', 'and'], 'continuation': 'dog runs', 'gold': 1},
    {'context': 'the lazy dog and runs', 'continuation': 'away'}, {'context': 'the', 'continuation': 'x'}]


@pytest.fixture(scope='module')
def run(tmp_path_factory, dataset):
    """The out_dir of a run that has learned something."""
    out = tmp_path_factory.mktemp('eval') / 'out'
    succeeded(train(out, f'--dataset={dataset}', '--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=64',
                    '--batch_size=8', '--gradient_accumulation_steps=2', '--max_iters=60', '--eval_interval=60',
                    '--eval_iters=2', '--learning_rate=2e-2', '--warmup_iters=5', '--device=cpu:0'))
    return out


def write_lines(path, items):
    path.write_text(''.join(json.dumps(item) + '\n' for item in items))
    return path


def evaluate(run, *flags):
    """The results, which are on the last line of stdout."""
    done = succeeded(run_script('eval_jax.py', f'--out_dir={run}', '--device=cpu', *flags))
    return json.loads(done.stdout.strip().split('\n')[-1])


def logprob(model, context, continuation):
    """Sum of the log-probabilities of a continuation, in one row of its own."""
    ids, n = model.encode_document(context + continuation), len(model.encode_document(context))
    return float(model.score([[(ids, n)]])[0][0][0].sum())


@pytest.mark.parametrize('flags', [
    [], slow(['--tensor=2']), slow(['--quantize=int8']), slow(['--cache_dtype=int8']), slow(['--batch_size=1'])])
def test_bits_per_byte_of_a_text_of_characters_is_its_loss_over_ln_2(flags, run, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT * 3)
    found = evaluate(run, f"--text={tmp_path / 'a.txt'}", '--max_length=20', *flags)
    result = found['results']['texts'][str(tmp_path / 'a.txt')]
    assert found['program'] == 'eval_jax' and result['tokens'] == result['bytes'] == 3 * len(TEXT) - 1
    _, logprobs = load(run, device='cpu:0').logprobs([TEXT * 3], max_length=20)[0]
    tolerance = 1e-6 if flags in ([], ['--batch_size=1']) else 1e-5 if 'tensor' in flags[0] else 0.05
    assert result['nats_per_token'] == pytest.approx(-logprobs.mean(), rel=tolerance)
    assert result['bits_per_byte'] == pytest.approx(result['nats_per_token'] / math.log(2), rel=1e-12)
    assert result['perplexity'] == pytest.approx(math.exp(result['nats_per_token']))


class Terminal(io.StringIO):
    """A standard output before which a person sits."""

    def isatty(self):
        return True


def test_the_json_goes_to_a_file_and_to_a_pipe_but_not_to_a_terminal(run, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text(TEXT)
    flags = [f'--text={tmp_path / "a.txt"}', f'--output={tmp_path / "results" / "a.json"}']
    piped = evaluate(run, *flags)
    assert json.loads((tmp_path / 'results' / 'a.json').read_text()) == piped
    monkeypatch.setattr('tests.common.io.StringIO', Terminal)
    lines = run_script('eval_jax.py', f'--out_dir={run}', '--device=cpu', *flags).stdout.splitlines()
    assert len(lines) == 1 and 'bits_per_byte' in lines[0] and '{' not in lines[0]
    result = run_script('eval_jax.py', f'--out_dir={run}', flags[0], f'--output={tmp_path}')
    assert_refused(result, 'is a folder; name a file')
    monkeypatch.setattr(os, 'access', lambda path, mode: str(path) != str(tmp_path))  # root may write to any folder
    result = run_script('eval_jax.py', f'--out_dir={run}', flags[0], f'--output={tmp_path / "new.json"}')
    assert_refused(result, 'cannot write output=.*: the folder is read-only')
    monkeypatch.undo()
    tasks = write_lines(tmp_path / 'items.jsonl', ITEMS[:1])
    for name in ('output', 'logprobs'):
        path = tmp_path / 'a.txt' / 'b'  # a file is in the way
        result = run_script('eval_jax.py', f'--out_dir={run}', f'--tasks={tasks}', f'--{name}={path}')
        assert_refused(result, f'cannot write {name}=.*: (File exists|Not a directory)')


def test_files_may_be_listed_with_a_space_after_the_comma(run, tmp_path):
    for name in ('a.txt', 'b.txt'):
        (tmp_path / name).write_text(TEXT)
    found = evaluate(run, f'--text={tmp_path / "a.txt"}, {tmp_path / "b.txt"}')
    assert list(found['results']['texts']) == [str(tmp_path / 'a.txt'), str(tmp_path / 'b.txt')]


@pytest.mark.slow
@pytest.mark.parametrize('flags', [[], ['--tensor=2'], ['--batch_size=1']])
def test_a_task_counts_what_each_item_alone_gives(flags, run, tmp_path):
    path, out = write_lines(tmp_path / 'mine.jsonl', ITEMS), tmp_path / 'out.jsonl'
    result = evaluate(run, f'--tasks={path}', f'--logprobs={out}', *flags)['results']['tasks']['mine']
    model = load(run, device='cpu:0')
    right = right_norm = 0
    for i, (item, line) in enumerate(zip(ITEMS, map(json.loads, out.read_text().splitlines()), strict=True)):
        if 'query' in item:
            options = [(item['query'], ' ' + choice) for choice in item['choices']]
        else:
            contexts = item.get('context_options', [item.get('context')])
            options = [(context, ' ' + item['continuation']) for context in contexts]
        sums = [logprob(model, *option) for option in options]
        assert line['task'] == 'mine' and line['item'] == i and line['best'] == np.argmax(sums)
        np.testing.assert_allclose(line['logprobs'], sums, atol=1e-4)
        if 'gold' in item:
            right += np.argmax(sums) == item['gold']
            right_norm += np.argmax([x / (len(b) - 1) for x, (_, b) in zip(sums, options)]) == item['gold']
        else:
            context, continuation = options[0]
            text = model.generate([context], max_new_tokens=len(continuation), temperature=0)[0]
            right, right_norm = right + (text == context + continuation), right_norm + (text == context + continuation)
    assert result == {'accuracy': right / 5, 'accuracy_norm': right_norm / 5, 'n': 5}


def test_accuracy_norm_divides_by_the_characters_of_a_choice_without_the_space(run, tmp_path):
    """The item is one of which another divisor chooses another option."""
    model = load(run, device='cpu:0')
    text = TEXT.replace(' ', '')
    found = []
    for i, n in itertools.product(range(0, 30, 3), range(1, 6)):
        choices = [text[i], text[i + 1:i + 2 + n]]
        sums = np.array([logprob(model, text[:9], f' {choice}') for choice in choices])
        best = [int(np.argmax(sums / ([len(choice) + more for choice in choices]))) for more in (0, 1)]
        if best[0] != best[1]:
            found.append({'query': text[:9], 'choices': choices, 'gold': best[0]})
    assert found
    path = write_lines(tmp_path / 'mine.jsonl', found[:4])
    assert evaluate(run, f'--tasks={path}')['results']['tasks']['mine']['accuracy_norm'] == 1


def test_a_bundle_gets_nanochats_centered_accuracy(run, tmp_path):
    """One task of each kind, of which the expected accuracy is computed prompt by prompt."""
    words = TEXT.split()
    rng = random.Random(0)
    mc = [{'query': ' '.join(words[:n]), 'choices': rng.sample(words, 3), 'gold': n % 3, 'more': 1}
          for n in range(1, 8)]
    schema = [{'context_options': [words[n], words[n + 1]], 'continuation': words[n + 2], 'gold': n % 2}
              for n in range(6)]
    lm = [{'context': ' '.join(words[:n]) + ' ', 'continuation': words[n]} for n in range(2, 8)]
    (tmp_path / 'eval_data').mkdir()
    tasks, expected, in_order = [], {}, []
    model = load(run, device='cpu:0')
    for kind, items, n_shots in (('multiple_choice', mc, 2), ('schema', schema, 0), ('language_modeling', lm, 1)):
        write_lines(tmp_path / 'eval_data' / f'{kind}.jsonl', items)
        tasks.append(f'- {{label: my_{kind}, dataset_uri: {kind}.jsonl, num_fewshot: [{n_shots}], '
                     f"icl_task_type: {kind}, continuation_delimiter: ' '}}\n")
        shuffled = list(items)
        random.Random(1337).shuffle(shuffled)
        in_order += [(f'my_{kind}', items.index(item)) for item in shuffled]
        right = 0
        for i, item in enumerate(shuffled):
            others = [j for j in range(len(shuffled)) if j != i]
            before = ''
            for j in random.Random(1234 + i).sample(others, n_shots):
                shot = shuffled[j]
                before += {'multiple_choice': lambda: f"{shot['query']} {shot['choices'][shot['gold']]}",
                           'schema': lambda: '', 'language_modeling':
                           lambda: f"{shot['context'].strip()} {shot['continuation']}"}[kind]() + '\n\n'
            if kind == 'language_modeling':
                context = before + item['context'].strip()
                answer = ' ' + item['continuation']
                text = model.generate([context + ' '], max_new_tokens=len(answer) - 1, temperature=0)[0]
                after_context = model.generate([context], max_new_tokens=1, temperature=0)[0]
                right += text == context + answer and after_context == context + ' '
                continue
            if kind == 'multiple_choice':
                rows = [model.encode_document(f"{before}{item['query']} {choice}") for choice in item['choices']]
                starts = [common(rows)] * 3
            else:
                rows = [model.encode_document(f"{before}{c} {item['continuation']}") for c in item['context_options']]
                starts = [len(row) - common([r[::-1] for r in rows]) for row in rows]
            means = [model.score([[(row[-64:], max(1, start - max(0, len(row) - 64)))]])[0][0][0].mean()
                     for row, start in zip(rows, starts)]
            right += int(np.argmax(means)) == item['gold']
        guess = {'multiple_choice': 1 / 4, 'schema': 1 / 2, 'language_modeling': 0}[kind]
        expected[f'my_{kind}'] = (right / len(items) - guess) / (1 - guess)
    (tmp_path / 'core.yaml').write_text('icl_tasks:\n' + ''.join(tasks))
    (tmp_path / 'eval_meta_data.csv').write_text(
        'Eval Task,Task Category,Random baseline\n'
        'my_multiple_choice,a,25\nmy_schema,a,50.0\nmy_language_modeling,b,0\n')
    found = evaluate(run, f'--tasks={tmp_path}', f'--logprobs={tmp_path / "out.jsonl"}')['results']
    assert {name: task['centered'] for name, task in found['tasks'].items()} == pytest.approx(expected, abs=1e-6)
    assert found['core'] == pytest.approx(np.mean(list(expected.values())), abs=1e-6)
    lines = map(json.loads, (tmp_path / 'out.jsonl').read_text().splitlines())
    assert [(line['task'], line['item']) for line in lines] == in_order


def common(rows):
    return next((i for i, tokens in enumerate(zip(*rows)) if len(set(tokens)) > 1), min(map(len, rows)))


def test_a_chat_is_right_if_its_answer_is_what_the_model_says(chatting, tmp_path):
    model = load(chatting, device='cpu:0')
    questions = [[{'role': 'user', 'content': text}] for text in ('ab', 'cab', 'b')]
    items = [{'messages': [*q, {'role': 'assistant', 'content': model.chat(q, temperature=0, max_new_tokens=8)}]}
             for q in questions]
    # those that end by themselves, and one that the model would not say
    ended = [item for item in items if model.score([[model.encode_answer(item['messages'])]])[0][0][1].all()]
    wrong = {'messages': [*questions[0], {'role': 'assistant', 'content': 'zzz'}]}
    path = write_lines(tmp_path / 'chats.jsonl', [*items, wrong])
    done = succeeded(run_script('eval_jax.py', f'--init_from={chatting}', '--device=cpu:0', f'--tasks={path}'))
    found = json.loads(done.stdout.strip().split('\n')[-1])
    assert found['results']['tasks']['chats']['accuracy'] == len(ended) / 4 and found['checkpoint'] is None


def test_results_name_the_checkpoint_by_digests(run, tmp_path):
    path = write_lines(tmp_path / 'one.jsonl', [{'context': 'the', 'continuation': ' quick'}])
    about = evaluate(run, f'--tasks={path}')['checkpoint']
    assert about['iteration'] == 60 and about['digests'].keys() >= {'manifest', 'params', 'opt_state'}
    assert about == evaluate(run, f'--tasks={path}')['checkpoint']


@pytest.mark.parametrize('line, message', [
    ('{"messages": [{"role": "user", "content": "a"}]}', 'messages must be a list that ends with an answer'),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', 'no chat template'),
    ('{"query": "a", "choices": ["b", "c"], "gold": 2}', 'gold must be an index below 2, not 2'),
    ('{"query": "a", "choices": ["b", "c"], "gold": true}', 'gold must be an index below 2, not True'),
    ('{"query": "a", "choices": ["b", ""], "gold": 0}', 'choices: a text is empty'),
    ('{"query": "a", "choices": [], "gold": 0}', 'choices must be a list of texts'),
    ('{"context": "a", "continuation": ""}', 'continuation: a text is empty'),
    ('{"context": "a", "continuation": 3}', 'continuation must be a text'),
    ('{"context": "a", "continuation": "b", "extra": 1}', 'an item has the keys'),
    ('{"context": "a"', 'not JSON'), ('[1]', 'an item has the keys'),
    ('{"context": "a", "continuation": "\u00e9"}', 'does not know')])
def test_a_bad_item_is_one_line_with_its_file_and_line(line, message, run, tmp_path):
    path = tmp_path / 'bad.jsonl'
    path.write_text('{"context": "a", "continuation": "b"}\n\n' + line + '\n')
    done = run_script('eval_jax.py', f'--out_dir={run}', '--device=cpu:0', f'--tasks={path}')
    assert done.returncode == 2 and done.stderr.strip().split('\n')[-1].startswith(f'error: {path}, line 3: ')
    assert message in done.stderr


@pytest.mark.parametrize('content, message', [
    ('t', 'is too short: it has no token to score'),
    ('th\u00e9', 'does not know'), ('th\r\n', "not know: '\\r'"), (None, 'cannot read')])
def test_a_bad_text_is_one_line_with_its_name(content, message, run, tmp_path):
    path = tmp_path / 'a.txt'
    if content:
        path.write_text(content, encoding='utf-8')
    done = run_script('eval_jax.py', f'--out_dir={run}', '--device=cpu:0', f'--text={path}')
    assert done.returncode == 2 and str(path) in done.stderr and message in done.stderr


def test_special_tokens_that_a_text_names_are_counted_and_said(tmp_path, monkeypatch):
    path = tmp_path / 'a.txt'
    for content, said in (('ab</s>cd</s>', '2 of 6 tokens are special tokens'), ('abcd', '')):
        path.write_text(content)
        done = succeeded(run_script('eval_jax.py', f'--init_from={GOLDEN / "letters"}', '--device=cpu:0',
                                    f'--text={path}'))
        assert said in done.stderr and bool(said) == ("special" in done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])['results']['texts'][str(path)]
        nats = found['nats_per_token']
        assert found['perplexity'] == pytest.approx(np.exp(nats)) and found['bytes'] == len(content)
        assert found['bits_per_byte'] == pytest.approx(nats / np.log(2) * found['tokens'] / len(content))
    monkeypatch.setenv('HOME', str(tmp_path))
    names = ['a.JSONL', 'a.jsonlines', 'a.ndjson', 'a.json', 'a.csv', 'a.tsv']
    for name in names:
        (tmp_path / name).write_text('abcd')
    texts = ','.join(f'~/{name}' for name in names)
    done = succeeded(run_script('eval_jax.py', f'--init_from={GOLDEN / "letters"}', f'--text={texts}'))
    for name in names:
        said = f'{tmp_path / name}: the file is scored as it is, with the keys and marks of its rows\n'
        assert done.stderr.count(said) == 1


def test_a_folder_that_is_no_bundle_is_refused(run, tmp_path):
    (tmp_path / 'core.yaml').write_text('tasks: 1')
    (tmp_path / 'eval_meta_data.csv').write_text('Eval Task,Random baseline\n')
    done = run_script('eval_jax.py', f'--out_dir={run}', f'--tasks={tmp_path}')
    assert done.returncode == 2 and 'not in the form of the CORE bundle' in done.stderr


@pytest.mark.parametrize('uri, link', [
    ('../../secret.jsonl', None), ('link.jsonl', 'eval_data/link.jsonl'), ('a.jsonl', 'core.yaml'),
    ('a.jsonl', 'eval_meta_data.csv')])
def test_a_bundle_reads_no_file_outside_of_its_folder(uri, link, run, tmp_path):
    bundle = tmp_path / 'bundle'
    (bundle / 'eval_data').mkdir(parents=True)
    for path in (tmp_path / 'secret.jsonl', bundle / 'eval_data' / 'a.jsonl', bundle / 'eval_data' / 'link.jsonl'):
        write_lines(path, [{'context': 'a', 'continuation': 'b'}] * 2)
    (bundle / 'core.yaml').write_text(f'icl_tasks:\n- {{label: a, dataset_uri: {uri}, num_fewshot: [0], '
                                      'icl_task_type: language_modeling}\n')
    (bundle / 'eval_meta_data.csv').write_text('Eval Task,Random baseline\na,0\n')
    if link:
        (bundle / link).rename(tmp_path / 'moved')
        (bundle / link).symlink_to(tmp_path / 'moved')
    done = run_script('eval_jax.py', f'--out_dir={run}', f'--tasks={bundle}')
    assert_refused(done, 'leads out of its folder')


@pytest.mark.parametrize('task, message', [
    ('[' * 5000, 'RecursionError'), ('3', "'int' object"), ('{label: [a]}', 'label must be a text'),
    ('{label: a, num_fewshot: [x]}', 'num_fewshot must be'), ('{label: a, num_fewshot: []}', 'num_fewshot must be'),
    ('{label: a, num_fewshot: [0, 1]}', 'num_fewshot must be a list of one'),
    ('{label: a, num_fewshot: [1], dataset_uri: {}}', 'dataset_uri must be a text')])
def test_a_bundle_whose_types_are_wrong_is_refused_in_one_line(tmp_path, task, message):
    (tmp_path / 'core.yaml').write_text(f'icl_tasks:\n- {task}\n')
    (tmp_path / 'eval_meta_data.csv').write_text('Eval Task,Random baseline\na,25\n')
    done = run_script('eval_jax.py', '--out_dir=none', f'--tasks={tmp_path}')
    assert_refused(done, f'not in the form of the CORE bundle .*{message}')


def test_a_bundle_without_tasks_is_refused(tmp_path):
    (tmp_path / 'core.yaml').write_text('icl_tasks: []\n')
    (tmp_path / 'eval_meta_data.csv').write_text('Eval Task,Random baseline\na,25\n')
    assert_refused(run_script('eval_jax.py', '--out_dir=none', f'--tasks={tmp_path}'), 'icl_tasks is empty')


def test_two_tasks_of_one_name_and_none_at_all_are_refused(run, tmp_path):
    (tmp_path / 'more').mkdir()
    paths = [write_lines(folder / 'a.jsonl', ITEMS) for folder in (tmp_path, tmp_path / 'more')]
    done = run_script('eval_jax.py', f'--out_dir={run}', f'--tasks={paths[0]},{paths[1]}')
    assert done.returncode == 2 and 'the same name' in done.stderr
    done = run_script('eval_jax.py', f'--out_dir={run}', '--text=,')
    assert done.returncode == 2 and 'there is nothing to evaluate' in done.stderr


# -----------------------------------------------------------------------------
# peers/lm_eval_jax.py, a model class for lm-eval, with a stand-in for what it takes from lm_eval

CONTEXTS = ['the qu', 'over', 'the lazy d', 'and r']


def normalize(options, most=256):
    """lm_eval.models.utils.normalize_gen_kwargs of 0.4.13, for the options of these tests."""
    options = dict(options)
    until = options.pop('until', [])
    names = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
    given = [x for x in [options.pop(name, None) for name in names] if x is not None]
    temperature = options.get('temperature', 0.0)
    do_sample = options.setdefault('do_sample', temperature > 0)
    return options | {'until': until if isinstance(until, list) else [until], 'max_gen_toks': [*given, most][0],
                      'temperature': temperature if do_sample else 0.0}


@pytest.fixture
def classes(monkeypatch):
    """{the name under which lm-eval finds it: the class}."""
    found = {}
    register_model = lambda name: lambda cls: found.setdefault(name, cls)
    for name, names in (('lm_eval', {}), ('lm_eval.api', {}), ('lm_eval.api.model', {'LM': object}),
                        ('lm_eval.api.registry', {'register_model': register_model}), ('lm_eval.models', {}),
                        ('lm_eval.models.utils', {'normalize_gen_kwargs': normalize})):
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    spec = importlib.util.spec_from_file_location('lm_eval_jax', ROOT / 'peers' / 'lm_eval_jax.py')
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return found


@pytest.fixture
def lm(classes, run):
    """The class with a run; lm-eval gives options as texts, and None for those that it does not know."""
    return classes['jax'](str(run), batch_size='3', device='cpu:0', max_batch_size=None, dtype=None)


@pytest.fixture(scope='module')
def model(run):
    return load(run, device='cpu:0')


def requests(*args):
    return [types.SimpleNamespace(args=arg) for arg in args]


@pytest.mark.slow
def test_loglikelihood_is_of_the_continuation_and_in_the_order_of_the_requests(lm, model):
    pairs = [(context, continuation) for continuation in (' fox', ' d', ' lazy dog') for context in CONTEXTS]
    pairs += [('', 'the fox'), pairs[0]]
    found = lm.loglikelihood(requests(*pairs))
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        (logprobs, _), = model.score([[model.encode_pair(context, continuation)]])[0]
        assert logprob == pytest.approx(logprobs.sum(), abs=1e-4)
        if context:
            text, = model.generate([context], max_new_tokens=len(continuation), temperature=0)
            assert is_greedy == (text == context + continuation)
    greedy = model.generate(['the'], max_new_tokens=3, temperature=0)[0][3:]
    assert lm.loglikelihood(requests(('the', greedy)))[0][1]


def test_loglikelihood_rolling_is_of_the_whole_text(classes, run, model):
    lm = classes['jax'](str(run), device='cpu:0', max_length=7)
    texts = [context * n for n, context in enumerate(CONTEXTS, 1)]
    expected = [logprobs.sum(dtype=np.float64) for _, logprobs in model.logprobs(texts, max_length=7)]
    assert lm.loglikelihood_rolling(requests(*[(text,) for text in texts])) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_generate_until_is_what_follows_each_context_alone(lm, model):
    options = [{'until': ['r', 'w'], 'max_gen_toks': 12}, {'until': ['zz', 'o'], 'max_gen_toks': 9, 'do_sample': False},
               {'max_gen_toks': 5, 'temperature': 0.7, 'do_sample': True, 'top_k': 9},
               {'until': 'e ', 'max_new_tokens': 30}]
    found = lm.generate_until(requests(*[(context, option) for context in CONTEXTS for option in options]))
    for i, text in enumerate(found):
        context, option = CONTEXTS[i // len(options)], options[i % len(options)]
        alone, = model.generate([context], stop=option.get('until', ''), temperature=0.7 if i % 4 == 2 else 0,
                                top_k=option.get('top_k'),
                                max_new_tokens=option.get('max_gen_toks') or option['max_new_tokens'])
        assert context + text == alone
    assert not any(letter in text for text in found[::4] for letter in 'rw')
    assert all(len(text) == 5 for text in found[2::4])
    assert len({*found}) > 8


def test_a_request_that_is_repeated_has_another_sample_each_time(lm, model):
    options = {'until': [], 'max_gen_toks': 12, 'temperature': 1.0, 'do_sample': True}
    asked = requests(*[('the qu', options)] * 4, ('over', options), *[('the qu', options)] * 3)
    found = lm.generate_until(asked)
    samples = model.generate(['the qu'], num_samples=7, max_new_tokens=12, temperature=1.0)
    assert [f'the qu{text}' for text in (*found[:4], *found[5:])] == samples and len({*samples}) > 4
    assert lm.generate_until(asked) == found  # another call draws nothing else


def test_options_of_a_task_act_or_are_refused(lm, model):
    options = {'max_gen_toks': 12, 'temperature': 5.0, 'do_sample': True}
    one, = lm.generate_until(requests(('the', {**options, 'top_p': 1e-6})))
    assert f'the{one}' == model.generate(['the'], temperature=0, max_new_tokens=12)[0]
    assert 'typical_p' in refusal(lm.generate_until, requests(('the', {**options, 'typical_p': 0.5})))


def test_chat_templates_of_lm_eval_have_one_token_that_begins_the_text(classes, speaking):
    lm = classes['jax'](str(speaking), device='cpu:0')
    chat = [{'role': 'user', 'content': 'ab'}]
    text = lm.apply_chat_template(chat)
    assert lm.encode(text) == lm.model.encode(chat)
    assert lm.apply_chat_template([*chat, {'role': 'assistant', 'content': 'ba'}], False).endswith('ba')
    assert lm.chat_template(True) == lm.model.tokenizer.chat_template and lm.tokenizer_name
