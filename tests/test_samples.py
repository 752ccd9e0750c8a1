"""Rows of samples to batches, and the file that a killed command continues."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jax_run.samples import SampleFile, digest_flags
from jax_text import split_rows
from tests.common import ROOT, assert_refused, refusal, sample, samples_of, start, succeeded, wait_for

FLAGS = ['--num_samples=3', '--max_new_tokens=20']


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / 'prompts.jsonl'
    path.write_text('"the quick brown fox"\n"a"\n"jumps over"\n"dog"\n')
    return path


def test_rows_of_similar_length_share_a_batch_in_which_they_are_in_order():
    prompts = [[0] * 9, [0], [0] * 5, [0]]
    assert split_rows(prompts, 2, 4) == [[(1, 0), (1, 1), (3, 0), (3, 1)], [(0, 0), (0, 1), (2, 0), (2, 1)]]
    assert split_rows(prompts, 2, 99, {(0, 1): {}})[0] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_texts_do_not_depend_on_the_batches_and_a_cut_file_is_continued(finished, prompts, tmp_path):
    whole, parts = tmp_path / 'whole.jsonl', tmp_path / 'parts.jsonl'
    command = [finished[0], f'--start=FILE:{prompts}', *FLAGS]
    one = samples_of(sample(*command, f'--output={whole}', '--batch_size=99'))
    several = samples_of(sample(*command, f'--output={parts}', '--batch_size=5'))
    assert several == one and len(one) == 12
    lines = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in (whole, parts)}
    text_of = lambda path: {(line['number'], line['index']): line['text'] for line in lines[path]}
    assert [*text_of(whole)] == [*text_of(parts)] == sorted(text_of(whole))  # in order, when all are there
    assert text_of(whole) == text_of(parts) and {*text_of(whole)} == {(n, i) for n in range(4) for i in range(3)}

    # killed within a line, after the first batch
    text = parts.read_text()
    first_batch = ''.join(f'{line}\n' for line in text.splitlines()[:5])
    parts.write_text(first_batch + text.splitlines()[5][:30])
    result = succeeded(sample(*command, f'--output={parts}', '--batch_size=4'))
    assert '5 samples are in' in result.stderr and result.stdout.count('---------------') == 7
    assert {*first_batch.splitlines()} < {*parts.read_text().splitlines()}
    lines[parts] = [json.loads(line) for line in parts.read_text().splitlines()]
    assert text_of(parts) == text_of(whole)

    before = parts.read_text()
    for other in (['--temperature=0.5'], ['--seed=2'], ['--start=x']):
        assert_refused(sample(*command, f'--output={parts}', *other), 'holds samples of other flags')
    assert parts.read_text() == before


def test_a_file_of_another_program_is_not_touched(tmp_path):
    for text in ('my notes\n', '{"a": 1}\n', '[1]\n', 'my only line, without a newline', '{"a'):
        (tmp_path / 'f').write_text(text)
        assert 'holds samples of other flags' in refusal(SampleFile, tmp_path / 'f', 'x')
        assert (tmp_path / 'f').read_text() == text


def test_the_file_where_the_texts_are_printed_is_refused(tmp_path):
    code = 'from jax_run.samples import SampleFile; SampleFile("/dev/stdout", "x")'
    with open(tmp_path / 'all.txt', 'w') as stdout:
        done = subprocess.run([sys.executable, '-c', code], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert 'output=/dev/stdout is where the texts are printed' in done.stderr


def test_what_no_text_depends_on_is_not_in_the_digest():
    flags = {'seed': 1, 'batch_size': 4, 'output': 'a'}
    assert digest_flags(flags, 'm', [[1]]) == digest_flags(flags | {'batch_size': 8, 'output': 'b'}, 'm', [[1]])
    others = [(flags | {'seed': 2}, 'm', [[1]]), (flags, 'n', [[1]]), (flags, 'm', [[2]])]
    assert len({digest_flags(*other) for other in [(flags, 'm', [[1]]), *others]}) == 4


@pytest.mark.parametrize('seconds', [0, 1])
def test_ctrl_c_while_samples_are_made_is_130(finished, tmp_path, seconds):
    output = tmp_path / 'out.jsonl'
    process = start('sample_jax.py', f'--out_dir={finished[0]}', '--device=cpu', '--max_new_tokens=3000',
                    '--num_samples=8', '--batch_size=4', f'--output={output}')
    wait_for('the output', lambda: os.path.exists(output), process)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and 'Traceback' not in err, (process.returncode, err)
