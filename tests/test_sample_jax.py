"""The sampling script: prompts, streams, chats."""
import io
import jax_run.checkpoints
import jax_generate
import jax_run.speed
import json
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import tokenizers

import jax_apps.terminal
from jax_apps.terminal import Chat, read_turn
from jax_devices.setup import Lap
from jax_flags import TextSampling
from jax_generate import GenerationResult
from jax_hub.tokenizers import HFTokenizer
from jax_run.speed import report_decoding
from jax_text import load
from jax_transformer import GPTConfig
from tests.common import (
    GOLDEN, MODEL, RESUME, ROOT, SHORT, TEXT, assert_refused, edit_json, final_state, prepare, records_of, refusal,
    run_script, sample, samples_of, start, succeeded, train, write_dataset)

# -----------------------------------------------------------------------------
# sampling

@pytest.mark.slow
def test_sampling_needs_nothing_but_out_dir(finished, tmp_path):
    shutil.copytree(finished[0] / 'ckpt', tmp_path / 'moved' / 'ckpt')
    arguments = [tmp_path / 'moved', '--num_samples=3', '--max_new_tokens=40', '--start=the quick']
    result = sample(*arguments)
    samples = samples_of(result)
    assert len(samples) == 3
    assert len(set(samples)) == 3
    *_, header, cost = result.stderr.splitlines()  # without --speed, all costs are in one line
    assert 'checkpoint of iteration' in header
    assert re.fullmatch(r'3 samples of 1 prompts, 120 tokens, in [\d.]+ s, [\d,]+ tok/s once compiled; beyond the '
                        'context of 16 tokens, each token computes all of them again, .*', cost)
    for text in samples:
        assert text.startswith('the quick')
        assert len(text) == 49
        assert set(text) <= set(TEXT)
    assert samples_of(sample(*arguments)) == samples


@pytest.mark.slow
def test_prompts_come_from_files_too_and_temperature_0_is_greedy(finished, tmp_path):
    (tmp_path / 'prompt.txt').write_text('lazy dog')
    result = sample(finished[0], f'--start=FILE:{tmp_path}/prompt.txt', '--max_new_tokens=9', '--temperature=0')
    text, = samples_of(result)
    assert 'at temperature=0 the 10 samples of a prompt are equal: one is made\n' in result.stderr
    assert text.startswith('lazy dog')
    assert len(text) == 17


def test_sampling_takes_the_best_or_the_latest(finished):
    out, _ = finished

    def iteration(which):
        err = sample(out, '--max_new_tokens=1', f'--checkpoint={which}').stderr
        return int(re.search(r'checkpoint of iteration (\d+)', err)[1])

    evaluations = [record for record in records_of(out, 'val_loss') if record['iter'] > 0]
    assert iteration('latest') == 20
    assert iteration('best') == min(evaluations, key=lambda record: record['val_loss'])['iter']


@pytest.mark.slow
def test_sampling_says_that_a_later_checkpoint_than_the_best_exists(run_copy, tmp_path):
    best = re.search(r'checkpoint of iteration (\d+)', sample(run_copy, '--max_new_tokens=1').stderr)[1]
    worse = ['--max_iters=22', '--learning_rate=10.0', '--warmup_iters=0', '--decay_lr=False']
    succeeded(train(run_copy, *RESUME, *worse))
    line = f'taking the best checkpoint, iteration {best}; a later one, 22, is there: --checkpoint=latest\n'
    assert line in sample(run_copy, '--max_new_tokens=1').stderr
    assert 'a later one' not in sample(run_copy, '--max_new_tokens=1', '--checkpoint=latest').stderr
    exported = succeeded(run_script('export_jax.py', f'--out_dir={run_copy}', f'--folder={tmp_path / "model"}'))
    assert line in exported.stderr


@pytest.mark.slow
def test_streamed_text_is_the_text(finished):
    arguments = [finished[0], '--num_samples=2', '--max_new_tokens=30', '--start=the fox', '--stop=o']
    assert samples_of(sample(*arguments, '--stream=True')) == samples_of(sample(*arguments))


def test_streaming_shows_nothing_of_a_stop_text_that_is_longer_than_the_text_so_far(finished):
    arguments = [finished[0], '--num_samples=1', '--max_new_tokens=30', '--start=a', '--temperature=0']
    text, = samples_of(sample(*arguments))
    arguments.append(f'--stop={text[1:20]}')
    assert samples_of(sample(*arguments, '--stream=True')) == samples_of(sample(*arguments)) == ['a']


def test_each_line_of_a_file_is_continued_as_if_alone(finished, tmp_path):
    (tmp_path / 'prompts.txt').write_text('the quick\nfox\n\na\n')
    arguments = [finished[0], '--num_samples=2', '--max_new_tokens=12']
    together = samples_of(sample(*arguments, f'--start=FILE:{tmp_path}/prompts.txt', '--each_line=True'))
    alone = [samples_of(sample(*arguments, f'--start={prompt}')) for prompt in ('the quick', 'fox', 'a')]
    assert together == sum(alone, [])


@pytest.mark.slow
def test_a_sample_ends_before_the_stop_text_and_the_prompt_may_hold_it(finished):
    arguments = [finished[0], '--num_samples=4', '--max_new_tokens=200', '--start=the fox']
    free = samples_of(sample(*arguments))
    stopped = samples_of(sample(*arguments, '--stop=o'))
    ends = [text.find('o', len('the fox')) for text in free]
    assert stopped == [text if end < 0 else text[:end] for text, end in zip(free, ends)]
    assert stopped != free
    assert samples_of(sample(*arguments, '--stop=never comes')) == free


@pytest.mark.slow
def test_drafting_gives_the_same_samples_and_tells_how_many_guesses_were_right(finished):
    out, _ = finished
    arguments = [out, '--num_samples=2', '--max_new_tokens=6', '--start=the the ']
    drafted = sample(*arguments, '--n_draft=3')
    assert samples_of(drafted) == samples_of(sample(*arguments))
    found = re.search(r'drafts: ([\d,]+) of ([\d,]+) tokens accepted, (\d+)%', drafted.stderr)
    n_accepted, n_drafted, percent = map(int, found.groups())
    assert n_drafted > 0
    assert percent == round(100 * n_accepted / n_drafted)


def test_tokens_per_second_leave_out_the_first_token_of_each_sequence(monkeypatch):
    def made(n):
        """A Generation of n sequences of five new tokens: 9 s for the first of each, 1 s for the others."""
        result = types.SimpleNamespace(steps=4, drafted=0, accepted=0)
        return types.SimpleNamespace(laps=[Lap(0, 9.0), Lap(0, 1.0)], prompts=[[1]] * n, result=result)

    model = types.SimpleNamespace(
        params=None, config=GPTConfig(), layout=types.SimpleNamespace(devices=[None]))
    for name in ('bytes_read_per_step', 'cache_bytes_read', 'tokens_per_step', 'measure_bandwidth'):
        monkeypatch.setattr(jax_run.speed, name, lambda *args: 1)
    said = report_decoding(model, [made(16), made(1)], 5 * 17, 'float32')  # the last batch is smaller
    assert ', then 34 tok/s (2 per sequence) for 85 tokens' in said


@pytest.mark.slow
def test_samples_come_from_int8_weights_and_caches_too(finished):
    arguments = [finished[0], '--num_samples=2', '--max_new_tokens=20']
    plain = sample(*arguments, '--speed=True')
    small = sample(*arguments, '--quantize=int8', '--cache_dtype=int8', '--dtype=float32', '--speed=True')
    assert [len(text) for text in samples_of(small)] == [len(text) for text in samples_of(plain)]
    plain_mb, small_mb = (float(re.search(r'weights ([\d.]+) MB', result.stderr)[1]) for result in (plain, small))
    assert small_mb < 0.5 * plain_mb
    assert re.search(r'[\d.]+ GB/s, which is \d+% of the [\d.]+ GB/s that this machine reads', small.stderr)


@pytest.mark.slow
def test_the_prompt_loop_continues_the_text_so_far(finished, monkeypatch):
    arguments = [finished[0], '--max_new_tokens=3', '--temperature=0']
    monkeypatch.setattr('sys.stdin', io.StringIO('the\nfox\n/clear\nfox\nFox\n'))
    answers = succeeded(sample(*arguments, '--interactive=True')).stdout.split('> ')[1:]
    first, second, _, cleared, wrong, _ = answers

    def answer_to(prompt):
        text, = samples_of(sample(*arguments, '--num_samples=1', f'--start={prompt}'))
        return text.removeprefix(prompt)

    cut = '\n(cut at max_new_tokens=3)\n'
    assert first == answer_to('the') + cut
    text_so_far = 'the' + answer_to('the') + '\nfox'
    assert second == answer_to(text_so_far) + cut
    assert cleared == answer_to('fox') + cut
    assert wrong.startswith("error: the text has characters that the model does not know: 'F'")


def test_without_a_chat_template_each_line_of_the_user_begins_a_new_line(finished):
    model = load(finished[0], device='cpu:0')
    said = [{'role': 'user', 'content': 'the'}, {'role': 'assistant', 'content': ' dog'},
            {'role': 'user', 'content': 'fox'}]
    assert Chat(model, '', TextSampling()).encode(said) == model.encode('the dog\nfox')


def test_no_new_tokens_print_the_prompt(finished):
    assert samples_of(sample(finished[0], '--max_new_tokens=0', '--start=fox', '--num_samples=1')) == ['fox']


# -----------------------------------------------------------------------------
# other weights

@pytest.mark.slow
def test_foreign_weights_are_sampled_with_the_tokenizer_of_their_dataset(dataset, tmp_path):
    shutil.copy(dataset / 'meta.json', tmp_path)  # sampling needs no other file of a data set
    flags = [f'--init_from={GOLDEN / "nanogpt" / "ckpt.pt"}', '--num_samples=1', '--max_new_tokens=30', '--start=fox']
    text, = samples_of(sample('none', *flags, f'--dataset={tmp_path}'))
    assert text.startswith('fox')
    assert len(text) == 33
    assert set(text) <= set(TEXT)
    assert_refused(sample('none', *flags), 'name the data set')

# -----------------------------------------------------------------------------
# mistakes: one line on stderr, exit code 2, nothing lost

def test_resuming_or_sampling_nothing_is_refused(tmp_path):
    assert_refused(train(tmp_path / 'none', '--init_from=resume'), 'no complete checkpoint in .*none/ckpt')
    assert_refused(sample(tmp_path / 'none'), 'no complete checkpoint in .*none/ckpt')
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize('bad, message', [
    (['--system=x'], 'nothing reads system=x without a chat'),
    (['--output=.'], 'output=. is a folder'),
    (['--init_from=gpt2'], 'out_dir is for a run, but init_from=gpt2 is another model'),
    ([f'--stop={"[" * 100_000}'], 'stop begins with .* and is not JSON'),
    (['--quantize=int4'], "quantize must be one of int8, not 'int4'"),
    (['--cache_dtype=int4'], 'cache_dtype must be one of'),
    (['--n_draft=16'], r'n_draft must be between 0 \(no speculation\) and 15, not 16'),
    (['--start=Quick'], "does not know: 'Q'"),
    (['--start='], 'prompt is empty'),
    (['--start=FILE:nosuchfile.txt'], 'cannot read nosuchfile.txt'),
    (['--temperature=-1'], 'temperature must be'),
    (['--num_samples=0'], 'num_samples must be'),
    (['--top_k=-1'], 'top_k'),
    (['--max_new_tokens=-1'], 'max_new_tokens must be'),
    (['--checkpoint=worst'], 'one of latest, best')])
def test_a_sample_that_cannot_be_is_refused(finished, bad, message):
    assert_refused(sample(finished[0], *bad), message)


@pytest.mark.slow
def test_sampling_takes_the_newest_intact_checkpoint_in_place_of_a_damaged_one(run_copy):
    damaged = run_copy / 'ckpt' / '20' / 'metrics' / 'metrics'
    damaged.write_bytes(damaged.read_bytes()[:5])
    for which in ('best', 'latest'):
        result = succeeded(sample(run_copy, f'--checkpoint={which}', '--max_new_tokens=3', '--num_samples=1'))
        assert 'ckpt/20 is damaged' in result.stderr and 'taking checkpoint 10 instead' in result.stderr
    assert damaged.exists()  # sampling changes nothing


def test_sampling_checks_only_what_it_reads(run_copy, monkeypatch):
    read = []
    monkeypatch.setattr(jax_run.checkpoints, 'checksum', lambda path, real=jax_run.checkpoints.checksum: (
        read.append(path), real(path))[1])
    for path in run_copy.glob('ckpt/*/opt_state/**/*'):
        if path.is_file():
            path.write_bytes(b'damaged')
    result = succeeded(sample(run_copy, '--max_new_tokens=3', '--num_samples=1'))
    assert 'damaged' not in result.stderr
    assert {path.relative_to(run_copy / 'ckpt').parts[1] for path in read} == {'params', 'meta', 'metrics'}
    assert_refused(train(run_copy, *RESUME), 'ckpt/20 is damaged .*there is no intact one')

# -----------------------------------------------------------------------------
# newer models

@pytest.mark.slow
def test_a_folder_with_a_tokenizer_speaks_text(speaking):
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.encode('<s>ab') == [36, 36, 0, 1]
    assert tokenizer.decode([36, 0, 1, 37]) == 'ab'
    assert tokenizer.stop_tokens == (37,)
    init_from = f'--init_from={speaking}'
    first, second = samples_of(sample(
        'none', init_from, '--start=ab c', '--num_samples=2', '--max_new_tokens=12', '--temperature=1.5'))
    assert first.startswith('ab c')
    assert second.startswith('ab c')
    assert first != second
    (speaking / 'tokenizer.json').write_text('{')
    assert_refused(sample('none', init_from), 'cannot read the tokenizer in .*EOF while parsing an object')
    (speaking / 'tokenizer.json').unlink()
    assert_refused(sample('none', init_from), 'vocabulary of 44.*tokenizer.json')


def test_a_chat_is_written_as_the_folders_template_says(speaking, monkeypatch):
    chat = [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'c'}, {'role': 'user', 'content': 'd'}]
    assert HFTokenizer(speaking).encode_chat(chat) == [36, 38, 0, 1, 39, 2, 38, 3, 39]
    monkeypatch.setattr('sys.stdin', io.StringIO('ab\nd\nno\n/clear\nab\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=3', '--temperature=0')
    first, _, refused, cleared, _ = succeeded(result).stdout.replace('> ', '').splitlines()
    assert 'ab' not in first  # the answer alone, without the prompt
    assert 'template refuses: too long' in refused
    assert cleared == first


def test_a_chat_keeps_what_was_said_and_answers_again(speaking, tmp_path, monkeypatch):
    monkeypatch.setattr('sys.stdin', io.StringIO(f'/retry\nab\n/retry\n/save {tmp_path}/chat.json\n/save /\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=9', '--temperature=2')
    nothing, first, cut, second, _, saved, error, _ = succeeded(result).stdout.replace('> ', '').splitlines()
    assert nothing == '(there is no answer yet)'
    assert cut == '(cut at max_new_tokens=9)'
    assert first != second
    assert saved == f'(1 turn in {tmp_path}/chat.json)'
    assert error.startswith('error: cannot write /: ')
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert messages == [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': second}]


def test_a_conversation_is_saved_again_into_its_file_but_into_no_other(speaking, tmp_path, monkeypatch):
    file = tmp_path / 'chat.json'
    lines = ['ab', f'/save {file}', 'ab', f'/save {file}', '/clear', 'ba', f'/save {file}']
    monkeypatch.setattr('sys.stdin', io.StringIO('\n'.join(lines)))
    said = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=2')).stdout
    assert f'(1 turn in {file})' in said and f'(2 turns in {file})' in said
    assert f'error: {file} exists; name another file' in said
    assert [turn['content'] for turn in json.loads(file.read_text())['messages'][::2]] == ['ab', 'ab']


def test_a_second_save_overwrites_no_other_file(finished, tmp_path, capsys):
    chat = Chat(load(finished[0], device='cpu:0'), '', TextSampling())
    other = tmp_path / 'other.txt'
    other.write_text('mine')
    for path in (tmp_path / 'chat.jsonl', other):
        chat.save(str(path))
    assert f'error: {other} exists; name another file' in capsys.readouterr().out
    assert other.read_text() == 'mine'


@pytest.mark.parametrize('leave', ['/exit', '/quit'])
def test_the_commands_of_a_chat_are_never_questions_to_the_model(leave, speaking, monkeypatch):
    monkeypatch.setattr('jax_text.start_rows', None)  # an answer would fail
    monkeypatch.setattr('sys.stdin', io.StringIO(f'/help\n/save\n/hlep me\n/clear\n{leave}\nab\n'))
    result = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True'))
    commands = '/retry, /clear, /save FILE, /help, /exit; Ctrl-C ends an answer, Ctrl-D leaves'
    assert result.stderr.splitlines()[-1] == commands
    assert result.stdout.split('> ')[1:] == [
        f'({commands})\n', '(/save needs the name of a file)\n', f'(there is no command /hlep me; {commands})\n', '',
        '']


def test_an_answer_that_fails_does_not_end_the_chat(speaking, tmp_path, monkeypatch):
    start_rows, calls = jax_generate.start_rows, []

    def fail_once(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError('out of something')
        return start_rows(*args, **options)

    monkeypatch.setattr('jax_text.start_rows', fail_once)
    monkeypatch.setattr('sys.stdin', io.StringIO(f'ab\nc\nd\n/save {tmp_path}/chat.json\n'))
    result = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=3'))
    assert '> error: ValueError: out of something\n> ' in result.stdout
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert [message['content'] for message in messages[::2]] == ['ab', 'd']


def test_an_interrupted_answer_stays_in_the_conversation(speaking, tmp_path, monkeypatch):
    calls = []

    def interrupt(text):
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr('jax_text.strip_partial_utf8', interrupt)
    monkeypatch.setattr('sys.stdin', io.StringIO(f'ab\n/save {tmp_path}/chat.json\nc\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=30', '--temperature=2')
    answer, interrupted, *_ = succeeded(result).stdout.replace('> ', '').splitlines()
    assert interrupted == '(interrupted)'
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert messages == [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': answer}]
    assert 'error' not in result.stdout


def test_an_answer_that_is_interrupted_before_its_first_word_is_no_turn(speaking, tmp_path, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr('jax_text.Generation.pieces', interrupt)
    monkeypatch.setattr('sys.stdin', io.StringIO(f'ab\n/save {tmp_path}/chat.json\n'))
    result = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True'))
    assert '(interrupted)' in result.stdout and '(0 turns in' in result.stdout
    assert json.loads((tmp_path / 'chat.json').read_text())['messages'] == []


@pytest.mark.slow
def test_a_chat_ends_without_a_cleanup_that_frees_what_a_computation_uses(speaking):
    program = ('import atexit, runpy, sys; atexit.register(print, "cleanup"); sys.argv = sys.argv[1:]; '
               'runpy.run_path("sample_jax.py", run_name="__main__")')
    flags = [f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=2', '--device=cpu']
    with start('-c', program, 'sample_jax.py', *flags, stdin=subprocess.PIPE) as process:
        out, err = process.communicate('ab\n', timeout=300)
    assert process.returncode == 0, err
    assert '> ' in out and 'cleanup' not in out


def test_only_the_final_channel_of_an_answer_stays_in_the_conversation(speaking, tmp_path, monkeypatch):
    channels = '<|channel|>', '<|message|>', '<|start|>', '<|end|>'
    tokenizer = tokenizers.Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    tokenizer.add_special_tokens(list(channels))
    tokenizer.save(str(speaking / 'tokenizer.json'))
    answers = ['<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so</s>',
               '<|channel|>analysis<|message|>cut']
    prompts = []

    def start_rows(params, config, rows, *args, **options):
        prompts.append(rows.idx_BxT[0].tolist())
        row = prompts[-1] + tokenizer.encode(answers[len(prompts) - 1], add_special_tokens=False).ids
        result = GenerationResult(np.array([row]), np.array([len(row)]), finish_reasons=('stop',))
        return types.SimpleNamespace(advance=lambda n_new: result, is_over=True, close=lambda: None)

    monkeypatch.setattr('jax_text.start_rows', start_rows)
    monkeypatch.setattr('sys.stdin', io.StringIO(f'ab\nd\n/save {tmp_path}/chat.json\n'))
    shown = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True')).stdout
    assert answers[0].removesuffix('</s>') in shown
    said = '<s><user>ab<model>so<user>d<model>'
    assert prompts[1] == tokenizer.encode(said, add_special_tokens=False).ids
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert [message['content'] for message in messages] == ['ab', 'so', 'd', '']


def test_lines_that_are_pasted_together_are_one_question(monkeypatch):
    monkeypatch.setattr('sys.stdin', io.StringIO('a\nb\n\nc\nd\n'))
    more = iter([True, True, True, False, False])
    monkeypatch.setattr(jax_apps.terminal, 'has_more_input', lambda: next(more))
    assert [read_turn(), read_turn()] == ['a\nb\n\nc', 'd']


@pytest.mark.slow
def test_the_oldest_turns_of_a_chat_go_when_the_context_is_full(speaking, monkeypatch):
    edit_json(speaking / 'tokenizer_config.json', chat_template='{% for m in messages %}{{ m.content }}{% endfor %}')
    edit_json(speaking / 'config.json', max_position_embeddings=32)
    monkeypatch.setattr('sys.stdin', io.StringIO('abcdefgh\nabcdefgh\n' + 'a' * 40 + '\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=12', '--temperature=2')
    assert '(the context of 32 tokens is full: the oldest turn is forgotten)' in succeeded(result).stdout
    assert 'the prompt has 40 tokens, the context of the model 32: ' in result.stderr


@pytest.mark.parametrize('max_new_tokens, n_kept', [(5, 3), (12, 3), (13, 2), (100, 2)])
def test_a_chat_keeps_room_for_an_answer_of_at_most_half_the_context(speaking, max_new_tokens, n_kept, capsys):
    edit_json(speaking / 'tokenizer_config.json', chat_template='{% for m in messages %}{{ m.content }}{% endfor %}')
    edit_json(speaking / 'config.json', max_position_embeddings=32)
    chat = Chat(load(speaking, device='cpu:0'), '', TextSampling(max_new_tokens=max_new_tokens))
    turns = [{'role': role, 'content': 'abcd'} for role in ('user', 'assistant')] * 3
    messages = [*turns, {'role': 'user', 'content': 'abcd'}]
    counts = [len(chat.encode(messages[2 * i:])) for i in range(4)]
    assert counts == [28, 20, 12, 4]
    assert chat.forget_oldest(messages) == messages[-(2 * n_kept - 1):]
    assert f'{4 - n_kept} ' in capsys.readouterr().out.replace('turn is', '1 turn')


def test_prompts_can_be_questions_of_a_chat(speaking, tmp_path):
    (tmp_path / 'questions.txt').write_text('ab\ncd\n')
    flags = [f'--init_from={speaking}', '--chat=True', '--max_new_tokens=3', '--temperature=0', '--num_samples=1']
    first, second = samples_of(sample('none', *flags, f'--start=FILE:{tmp_path}/questions.txt', '--each_line=True'))
    assert first.startswith('> ab\n')
    assert second.startswith('> cd\n')
    tokenizer = (speaking / 'tokenizer.json').read_text()
    (speaking / 'tokenizer.json').write_text(tokenizer.replace('"D"', '"\\u2028"'))
    (tmp_path / 'marked.txt').write_text('ab\u2028c\n', encoding='utf-8-sig')
    kept, = samples_of(sample('none', *flags, f'--start=FILE:{tmp_path}/marked.txt', '--each_line=True'))
    assert kept.startswith('> ab\u2028c\n')
    streamed, = samples_of(sample('none', *flags, '--start=ab', '--stream=True'))
    assert streamed.strip() == first.strip()
    (speaking / 'tokenizer_config.json').unlink()
    assert_refused(sample('none', *flags), 'has no chat template.*')
    assert_refused(sample('none', *flags[:1], '--system=Be brief.', '--interactive=True'), 'has no chat template.*')


USERS_ONLY = '{% for m in messages if m.role in ["user", "assistant"] %}{{ m.content }}{% endfor %}'


def test_messages_of_a_line_that_the_chat_template_leaves_out_are_refused(speaking, tmp_path):
    edit_json(speaking / 'tokenizer_config.json', chat_template=USERS_ONLY)
    path, asked = tmp_path / 'prompts.jsonl', {'role': 'user', 'content': 'a'}
    for row, kind in (({'messages': [{'role': 'system', 'content': 'b'}, asked]}, 'messages of the role "system"'),
                      ({'messages': [asked], 'tools': [{'name': 'f'}]}, 'the descriptions of tools')):
        path.write_text(json.dumps(row))
        result = sample('none', f'--init_from={speaking}', '--chat=True', f'--start=FILE:{path}')
        assert_refused(result, f'line 1: .* leaves out {kind}')


def test_a_system_prompt_that_the_template_leaves_out_is_refused_before_the_first_question(speaking):
    edit_json(speaking / 'tokenizer_config.json', chat_template=USERS_ONLY)
    model = load(speaking, device='cpu:0')
    assert 'leaves out messages of the role "system"' in refusal(Chat, model, 'be brief', TextSampling())


def test_the_system_prompt_is_the_first_message_of_a_chat(speaking):
    template = '{% if messages[0].role == "system" %}{{ raise_exception(messages[0].content) }}{% endif %}'
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    refused = sample('none', f'--init_from={speaking}', '--chat=True', '--start=a', '--system=be brief')
    assert_refused(refused, 'template refuses: be brief')


def test_a_saved_chat_begins_with_its_system_prompt(speaking, tmp_path):
    edit_json(speaking / 'tokenizer_config.json', chat_template='{% for m in messages %}{{ m.content }}{% endfor %}')
    chat = Chat(load(speaking, device='cpu:0'), 'be brief', TextSampling(max_new_tokens=1))
    chat.answer([], 'ab')
    chat.save(str(tmp_path / 'chat.json'))
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert [message['role'] for message in messages] == ['system', 'user', 'assistant']
    assert messages[0]['content'] == 'be brief'


@pytest.mark.slow
def test_a_model_is_sampled_as_its_generation_config_says_unless_told_otherwise(speaking):
    flags = [f'--init_from={speaking}', '--start=ab c', '--max_new_tokens=12', '--num_samples=4']
    plain = sample('none', *flags, '--temperature=2.0', '--top_k=5')
    edit_json(speaking / 'generation_config.json', min_p=0.5)
    by_min_p = sample('none', *flags, '--temperature=2.0', '--top_k=5')
    assert samples_of(by_min_p) == samples_of(sample('none', *flags, '--temperature=2.0', '--top_k=5', '--min_p=0.5'))
    assert samples_of(by_min_p) != samples_of(plain)
    assert '; min_p=0.5 (its generation_config.json)' in by_min_p.stderr
    edit_json(speaking / 'generation_config.json', temperature=2, top_k=3, min_p=None)
    result = sample('none', *flags, '--top_k=5')
    assert samples_of(result) == samples_of(plain)
    assert '; temperature=2 (its generation_config.json)' in result.stderr
    assert 'generation_config' not in plain.stderr


def test_a_text_ends_at_every_end_token_that_the_folder_names(speaking):
    edit_json(speaking / 'generation_config.json', eos_token_id=38)
    edit_json(speaking / 'config.json', eos_token_id=[39, 1])
    assert HFTokenizer(speaking).stop_tokens == (1, 37, 38, 39)


def test_a_text_with_a_bpe_of_its_own_is_trained_sampled_and_exported(tmp_path):
    (tmp_path / 'a.py').write_text('def f(x):\n    return x + 1\n' * 40)
    succeeded(prepare('text', tmp_path / 'a.py', '--tokenizer=bpe:280', '--out_dir', tmp_path / 'data'))
    flags = ['--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=1', '--n_layer=1', '--n_head=1',
             '--n_embd=16', *SHORT, '--max_iters=2']
    succeeded(train(tmp_path / 'out', f'--dataset={tmp_path / "data"}', *flags))
    (tmp_path / 'data').rename(tmp_path / 'elsewhere')  # the tokenizer is in out_dir, too
    text, = samples_of(sample(tmp_path / 'out', '--start=\u4e16 def', '--num_samples=1', '--max_new_tokens=8'))
    assert text.startswith('\u4e16 def')  # the text has no such character
    succeeded(run_script('export_jax.py', f'--out_dir={tmp_path / "out"}', f'--folder={tmp_path / "model"}'))
    settings = json.loads((tmp_path / 'model' / 'tokenizer_config.json').read_text())
    assert settings['tokenizer_class'] == 'PreTrainedTokenizerFast'
    assert HFTokenizer(tmp_path / 'model').stop_tokens == (0,)
    # with the tokenizer of other data its ids would be other texts
    (tmp_path / 'b.py').write_text('import os\n\nos.listdir()\n' * 40)
    succeeded(prepare('text', tmp_path / 'b.py', '--tokenizer=bpe:280', '--out_dir', tmp_path / 'other'))
    shutil.copytree(tmp_path / 'other' / 'tokenizer', tmp_path / 'out' / 'tokenizer', dirs_exist_ok=True)
    assert_refused(sample(tmp_path / 'out', '--start=def'), 'tokenizer has been replaced: it has other tokens')


@pytest.mark.slow
def test_conversations_are_split_at_newlines_only_and_may_begin_with_a_byte_order_mark(chatting, tmp_path):
    lines = [json.dumps({'messages': [{'role': 'user', 'content': 'a\u2028b\u2029\x85'},
                                      {'role': 'assistant', 'content': 'c'}]}, ensure_ascii=False)] * 4
    for name, text in (('plain', '\n'.join(lines)), ('windows', '\ufeff' + '\r\n'.join(lines))):
        (tmp_path / f'{name}.jsonl').write_bytes(text.encode())
        succeeded(prepare('chat', tmp_path / f'{name}.jsonl', f'--tokenizer={chatting}',
                          f'--out_dir={tmp_path / name}'))
        assert np.fromfile(tmp_path / name / 'train.bin', np.uint16).tolist() == [38, 0, 1, 39, 2, 37] * 3


def masked_data(folder, train_mask, val_mask):
    """The flags of a run whose iterations are one window of 16 tokens, of which those count that the masks say."""
    rng = np.random.default_rng(0)
    write_dataset(folder, rng.integers(8, size=len(train_mask)), rng.integers(8, size=len(val_mask)))
    for split, mask in (('train', train_mask), ('val', val_mask)):
        np.asarray(mask, np.uint8).tofile(folder / f'{split}_mask.bin')
    return [f'--dataset={folder}', *MODEL, *SHORT, '--block_size=16', '--batch_size=1',
            '--gradient_accumulation_steps=1', '--eval_iters=8']


@pytest.mark.slow
def test_an_iteration_without_a_token_that_counts_is_skipped_and_resume_stays_exact(tmp_path):
    train_mask = np.arange(16 * 20) % 64 < 8
    flags = [*masked_data(tmp_path / 'data', train_mask, train_mask), '--eval_interval=6']
    out = succeeded(train(tmp_path / 'a', *flags, '--max_iters=12')).stdout
    skipped = [record for record in records_of(tmp_path / 'a', 'loss') if record['loss'] is None]
    assert 2 <= len(skipped) <= 10
    assert [int(i) for i in re.findall(r'iter (\d+): skipped, none of its tokens counts', out)] == [
        record['iter'] for record in skipped]
    assert all(record['loss'] > 0 for record in records_of(tmp_path / 'a', 'loss') if record not in skipped)
    state = dict(final_state(tmp_path / 'a'))
    step, = (np.frombuffer(value, np.int32) for path, value in state.items() if path.endswith("['step']"))
    assert step == 12 - len(skipped)  # no update, no step of the schedule
    succeeded(train(tmp_path / 'b', *flags, '--max_iters=5'))
    succeeded(train(tmp_path / 'b', *RESUME, '--max_iters=12'))
    assert final_state(tmp_path / 'b') == final_state(tmp_path / 'a')


@pytest.mark.slow
def test_evaluations_without_a_token_that_counts_are_refused_before_anything_is_written(tmp_path):
    flags = masked_data(tmp_path / 'data', np.ones(400), np.arange(400) == 20)
    assert_refused(train(tmp_path / 'out', *flags), 'none of the 8 val windows .*: use more eval_iters or a larger')
    assert not (tmp_path / 'out').exists()
    succeeded(train(tmp_path / 'out', *flags, '--eval_iters=40', '--max_iters=1'))


@pytest.mark.slow
def test_int8_weights_are_quantized_while_they_are_loaded(
        speaking, monkeypatch):
    import jax_pretrained
    load, kinds = jax_pretrained.load_pretrained, []

    def watched(path, dtype, place):
        def watched_place(path, array):
            value = place(path, array)
            kinds.append((path[-1], type(value).__name__))
            return value
        return load(path, dtype, watched_place)

    def bandwidth(*args):
        return 1e-6  # less than is read

    monkeypatch.setattr('jax_pretrained.load_pretrained', watched)
    monkeypatch.setattr('jax_run.speed.measure_bandwidth', bandwidth)
    done = succeeded(sample('none', f'--init_from={speaking}', '--quantize=int8', '--speed=True', '--start=ab c',
                            '--num_samples=1', '--max_new_tokens=2'))
    assert 'which is 100% of the' in done.stderr  # never more
    assert {kind for name, kind in kinds if name in ('kernel', 'wte', 'lm_head')} == {'Int8'}


WITHOUT = """
import runpy, sys
import flax.linen, optax, orbax.checkpoint  # which need some of them
import jax.interpreters.mlir
import jax.lib
del jax.interpreters.mlir.register_lowering, jax.lib.__version__
for name in ('jax.extend.mlir', 'jax.experimental.layout', 'jax.experimental.mesh_utils', 'jax.experimental.topologies',
             'jax.experimental.multihost_utils'):
    sys.modules[name] = None  # to import one of them raises ImportError
for script, *args in eval(sys.argv[1]):
    sys.argv = [script, *args]
    runpy.run_path(script, run_name='__main__')
"""


@pytest.mark.slow
def test_names_of_jax_that_may_go_are_not_needed_to_train_sample_and_measure(dataset, tmp_path):
    commands = [
        ['train_jax.py', *MODEL, *SHORT, f'--dataset={dataset}', f'--out_dir={tmp_path}', '--dtype=bfloat16'],
        ['sample_jax.py', f'--out_dir={tmp_path}', '--quantize=int8', '--start=the', '--num_samples=2',
         '--max_new_tokens=4', '--device=cpu:0'],
        ['bench_jax.py', '--mode=decode', *MODEL, '--quantize=int8', '--max_new_tokens=2', '--prompt_len=2',
         '--repeats=1', '--device=cpu:0']]
    done = subprocess.run([sys.executable, '-c', WITHOUT, repr(commands)], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('\nthe') == 2
    assert json.loads(done.stdout.splitlines()[-1])['results']['tokens_per_sec'] > 0


@pytest.mark.slow
def test_each_sample_is_a_line_of_json_with_its_reason_and_log_probability(finished, tmp_path):
    from jax_text import load
    prompts, out = tmp_path / 'prompts.jsonl', tmp_path / 'out.jsonl'
    prompts.write_text('"the quick"\n{"prompt": "away\\nthe"}\n')
    result = sample(finished[0], f'--start=FILE:{prompts}', f'--output={out}', '--num_samples=2',
                    '--max_new_tokens=40', '--stop=["o", "\\nt"]')
    texts = samples_of(result)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line['prompt'] + line['text'] for line in lines] == texts
    assert [line['index'] for line in lines] == [0, 1, 0, 1]
    assert re.search(r'^4 samples of 2 prompts, [\d,]+ tokens, in \d+\.\d s, ', result.stderr, flags=re.M)
    model = load(finished[0], device='cpu:0')
    for line in lines:
        assert 'o' not in line['text'] and '\nt' not in line['text']
        assert line['finish_reason'] == ('length' if len(line['text']) == 40 else 'stop')
        ids, n = model.encode(line['prompt'] + line['text']), len(line['prompt'])
        # each token follows the last block_size tokens before it, as it did when it was drawn
        windows = [ids[max(i - model.config.block_size, 0):i + 1] for i in range(n, len(ids))]
        logprobs = [model.score([[(window, len(window) - 1)]])[0][0][0] for window in windows]
        assert line['logprob'] == pytest.approx(float(np.sum(logprobs)), abs=1e-4)


@pytest.mark.slow
def test_a_line_of_prompts_may_be_a_chat_with_tools(speaking, tmp_path):
    template = '{% if tools %}b{% endif %}{{ d }}{% for m in messages %}{{ m.content }}{% endfor %}<model>'
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    row = {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'a'}]}], 'tools': [{'name': 'f'}],
           'chat_template_kwargs': {'d': 'd'}}
    prompts, out = tmp_path / 'prompts.jsonl', tmp_path / 'out.jsonl'
    flags = ['--chat=True', '--num_samples=1', '--max_new_tokens=2', f'--start=FILE:{prompts}', f'--output={out}']
    prompts.write_text(json.dumps(row) + '\n{"prompt": "c"}\n')
    assert sample('none', f'--init_from={speaking}', *flags).returncode == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line['prompt'] for line in found] == [row['messages'][0]['content'], 'c']
    assert [line['rendered'] for line in found] == ['bda<model>', 'c<model>']
    prompts.write_text('"c"\n' + json.dumps(row | {'tools': 3}))
    result = sample('none', f'--init_from={speaking}', *flags)
    assert result.returncode == 2 and 'prompts.jsonl, line 2: tools must be a list of JSON schemas' in result.stderr
    row['messages'].append({'role': 'assistant', 'content': 'b'})
    prompts.write_text('"c"\n' + json.dumps(row))
    result = sample('none', f'--init_from={speaking}', *flags)
    assert_refused(result, 'prompts.jsonl, line 2: the messages end with an answer; leave it out')


@pytest.mark.parametrize('line', ['{"prompt": 3}', '{"text": "a"}', '""', 'the quick'])
def test_a_line_that_is_no_prompt_is_named(line, finished, tmp_path):
    (tmp_path / 'PROMPTS.NDJSON').write_text(f'"a"\n{line}\n')
    result = sample(finished[0], f'--start=FILE:{tmp_path}/PROMPTS.NDJSON')
    assert_refused(result, 'PROMPTS.NDJSON, line 2: neither "a text" nor .*')
    assert '--chat=True' not in result.stderr


def test_a_line_of_messages_outside_of_a_chat_names_the_flag(finished, tmp_path):
    (tmp_path / 'a.jsonlines').write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    result = sample(finished[0], f'--start=FILE:{tmp_path}/a.jsonlines')
    assert_refused(result, 'line 1: neither "a text" nor .*; "messages" need --chat=True')


def test_keys_of_a_line_that_are_not_read_are_said_once(finished, speaking, tmp_path):
    path = tmp_path / 'prompts.jsonl'
    path.write_text('{"prompt": "a", "max_new_tokens": 9}\n' * 2)
    flags = [f'--start=FILE:{path}', '--num_samples=1', '--max_new_tokens=1']
    said = succeeded(sample(finished[0], *flags)).stderr
    assert said.count(f'of the lines of {path} only "prompt" is read\n') == 1
    path.write_text('{"messages": [{"role": "user", "content": "a"}], "id": 7}\n' * 2)
    said = succeeded(sample('none', f'--init_from={speaking}', '--chat=True', *flags)).stderr
    assert said.count(f'of the lines of {path} only "messages", "tools" and "chat_template_kwargs" are read\n') == 1
    path.write_text('{"messages": [{"role": "user", "content": "a"}], "tools": []}\n{"prompt": "a"}\n"a"\n')
    assert 'of the lines' not in succeeded(sample('none', f'--init_from={speaking}', '--chat=True', *flags)).stderr


def test_stop_texts_that_are_no_list_of_texts_are_refused(tmp_path):
    for stop in ('["a"', '[1]'):
        result = sample(tmp_path, f'--stop={stop}')
        assert result.returncode == 2 and 'stop' in result.stderr
