"""Flags, config files, and how a script ends."""
import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from jax_flags import (
    NEEDS, TryAgain, UserError, check_given, check_needs, config_block, exit_if_peer_died, exit_on_user_error,
    find_shipped, is_url, new_file, read_flags, read_json, read_text, rising_learning_rate, write_text)
from jax_hub.folders import path_inside
from tests.common import ROOT, run_script, start

# -----------------------------------------------------------------------------
# flags

SCRIPT = '''"""A script."""
# -----------------------------------------------------------------------------
batch_size = 12 # sequences
learning_rate = 6e-4 # the highest
start = 'A # b' # the prompt
compile = True # no effect
# -----------------------------------------------------------------------------
other = 3 # not a knob
'''


@pytest.fixture
def read(tmp_path):
    """read_flags of SCRIPT, where the argument CONFIG stands for a config file."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'config.py').write_text('import math\nbatch_size = 4 * 8 # arithmetic\nlearning_rate = 1\n')
    namespace = {}
    exec(SCRIPT, namespace)

    def read(*argv):
        argv = [arg.replace('CONFIG', str(tmp_path / 'config.py')) for arg in argv]
        return read_flags(tmp_path / 'script.py', namespace, argv)
    return read


def test_a_path_may_begin_with_the_home_folder_and_a_text_stays(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    monkeypatch.setenv('USERPROFILE', '/home/me')  # Windows
    script = tmp_path / 'script.py'
    line = f'# {"-" * 77}\n'
    script.write_text(f"{line}out_dir = 'out' # a folder\nstart = 'A' # a text\n{line}")
    flags, given = read_flags(script, {'out_dir': 'out', 'start': 'A'}, ['--out_dir=~/run', '--start=~/run'])
    assert flags == given == {'out_dir': '/home/me/run', 'start': '~/run'}


def test_data_and_config_beside_the_caller_come_before_those_that_came_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, name in (('data', 'shakespeare_char'), ('config', 'train_shakespeare_char.py')):
        assert find_shipped(kind, name) == ROOT / kind / name
        (tmp_path / kind / name).mkdir(parents=True)
        assert find_shipped(kind, name) == Path(kind, name)
    assert find_shipped('data', 'none') == ROOT / 'data' / 'none'


def test_flags_and_config_files_apply_in_the_order_given(read):
    assert read()[0] == {'batch_size': 12, 'learning_rate': 6e-4, 'start': 'A # b', 'compile': True}
    flags, given = read('--batch_size=3', 'CONFIG', '--compile=False')
    assert flags == {'batch_size': 32, 'learning_rate': 1.0, 'start': 'A # b', 'compile': False}
    assert given == {'batch_size': 32, 'learning_rate': 1.0, 'compile': False}
    assert type(flags['learning_rate']) is float
    assert read('CONFIG', '--batch_size=3')[0]['batch_size'] == 3
    assert read('--batch_size=3', 'CONFIG')[1]['batch_size'] == 32


def test_a_value_may_hold_equals_signs_and_a_prompt_may_look_like_a_number(read):
    assert read('--start=a=b')[0]['start'] == 'a=b'
    assert read('--start=123')[0]['start'] == '123'
    assert read('--start=')[0]['start'] == ''
    assert read('--learning_rate=1e-3')[0]['learning_rate'] == 1e-3


@pytest.mark.parametrize('arg, message', [
    ('--batch_sise=3', 'unknown flag --batch_sise; did you mean --batch_size'),
    ('--zzz=3', '--help lists all'),
    ('--lr=1e-3', 'did you mean --learning_rate'),
    ('config/train_pystdlb.py', 'no config file config/train_pystdlb.py .did you mean config/train_pystdlib.py'),
    ('--batch_size', '--name=value, as --batch_size=12; got --batch_size'),
    ('--batch_size=1.5', '--batch_size takes a value of type int'),
    ('--compile=1', 'type bool'),
    ('--batch_size={[]}', 'type int'),
    ('--batch_size=99999999999', '--batch_size must be below 2..31'),
    ('--batch_size=' + '(' * 1000, 'type int'),
    ('--learning_rate=fast', 'type float'),
    ('--other=4', 'unknown flag'),
    ('train_pystdlib', 'no config file train_pystdlib .did you mean config/train_pystdlib.py'),
    ('--config=x.py', 'a config file is given by its path alone'),
    ('nosuchfile.py', 'no config file nosuchfile.py')])
def test_a_flag_that_is_wrong_is_refused_by_name(read, arg, message):
    with pytest.raises(UserError, match=message):
        read(arg)


@pytest.mark.parametrize('path, expected', [
    ('gs://bucket/run', True), ('s3://bucket', True), ('file:///run', True), ('C:\\run', False), ('C:/run', False),
    ('gs:/bucket/run', True), ('d://run', False), ('D:', False), ('out', False), ('/run/a://b', False),
    ('a/gs://b', False)])
def test_a_drive_of_windows_is_no_url(path, expected):
    assert is_url(path) == expected


@pytest.mark.parametrize('text, message', [
    ('batch_sise = 3', 'unknown flag --batch_sise'),
    ('batch_size = ', 'SyntaxError'),
    ('batch_size = 1 / 0', 'ZeroDivisionError'),
    ('batch_size = "12"', 'type int'),
    ('exec("batch_sise = 3")', 'unknown flag --batch_sise')])  # as of another file that it runs
def test_a_config_file_that_is_wrong_is_refused(read, tmp_path, text, message):
    (tmp_path / 'config.py').write_text(text)
    with pytest.raises(UserError, match=message):
        read('CONFIG')


BASE = 'import math\nbatch_size = 7\nhelper = 3\n'


@pytest.mark.parametrize('text, expected', [
    ('from base_of_configs import *', {'batch_size': 7}),  # its helper is no mistake of this file
    ('exec(open(PATH).read())\nlearning_rate = 1e-3', {'batch_size': 7, 'learning_rate': 1e-3}),
    ('globals().update(batch_size=7)', {'batch_size': 7}),
    ('def choose():\n    global batch_size\n    batch_size = 7\nchoose()', {'batch_size': 7}),
    ('from base_of_configs import *\nbatch_size = 12', {'batch_size': 12}),  # the default, on purpose
    ('batch_size += 1', {'batch_size': 13}),
    ('(batch_size, start), compile = (1, "a"), False', {'batch_size': 1, 'start': 'a', 'compile': False}),
    ('if True:\n    with open(PATH):\n        try:\n            batch_size = 12\n        finally:\n            pass',
     {'batch_size': 12}),
    ('for batch_size in (3, 12): pass', {'batch_size': 12}),
    ('del batch_size', {}),
    ('\ufeffbatch_size = 7', {'batch_size': 7})])  # as Windows' editor begins a file
def test_a_config_file_gives_what_it_assigns_and_what_it_changes(read, tmp_path, monkeypatch, text, expected):
    (tmp_path / 'base_of_configs.py').write_text(BASE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'base_of_configs', raising=False)
    (tmp_path / 'config.py').write_text(text.replace('PATH', repr(str(tmp_path / 'base_of_configs.py'))))
    assert read('CONFIG')[1] == expected


@pytest.mark.parametrize('text', [
    'def scaled(x):\n    learning_rate = x * 2\n    return learning_rate\nscaled(3)',
    'class Sizes:\n    batch_size = 3',
    '_ = [batch_size for batch_size in range(3)], {start: 1 for start in "ab"}, {start for start in "ab"}',
    '_ = list(batch_size for batch_size in range(3))',
    '_ = (lambda: [learning_rate for learning_rate in range(3)])()'])
def test_a_local_variable_named_like_a_flag_gives_nothing(read, tmp_path, text):
    (tmp_path / 'config.py').write_text(text)
    assert read('--batch_size=3', 'CONFIG')[1] == {'batch_size': 3}


def test_a_flag_without_a_comment_is_refused(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT.replace(' # sequences', ''))
    with pytest.raises(UserError, match='the flag batch_size has no comment'):
        read_flags(script, {}, [])


def test_help_prints_every_knob_with_its_default_and_comment(read, capsys):
    with pytest.raises(SystemExit) as exit:
        read('--help')
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert '--batch_size=12  # sequences\n' in out
    assert '--learning_rate=0.0006  # the highest\n' in out
    assert "--start='A # b'  # the prompt\n" in out
    assert '--compile=True  # no effect\n' in out
    assert 'other' not in out


# -----------------------------------------------------------------------------
# flags that nothing reads

@pytest.mark.parametrize('given, flags, is_refused', [
    ({'lora_alpha': 32.0}, {'lora_rank': 0}, True),
    ({'lora_alpha': 32.0}, {'lora_rank': 8}, False),
    ({'lora_alpha': 32.0, 'lora_rank': 0}, {'lora_rank': 0}, False),  # a config file, and its switch turned off
    ({'quantize': ''}, {'lora_rank': 0}, False),  # not asked for
    ({'beta': 0.1}, {}, False),  # the data set is not known yet
    ({'beta': 0.1}, {'is_pairs': False}, True),
    ({}, {'lora_rank': 0, 'lora_alpha': 32.0}, False)])  # of a checkpoint
def test_a_given_flag_that_nothing_reads_is_refused(given, flags, is_refused):
    if not is_refused:
        return check_needs('train_jax', given | flags, given)
    with pytest.raises(UserError, match=f'nothing reads {[*given][0]}='):
        check_needs('train_jax', given | flags, given)


@pytest.mark.parametrize('script', NEEDS)
def test_the_table_names_flags_that_are_there(script):
    flags = config_block(ROOT / f'{script}.py').keys()
    facts = {'is_pairs', 'is_chat', 'takes_prompts', 'has_batches', 'is_alone', 'has_file', 'step'}
    assert NEEDS[script].keys() <= flags
    assert {need.switch for need in NEEDS[script].values()} <= flags | facts


FALLING = {'init_from': 'scratch', 'decay_lr': True, 'lr_schedule': 'cosine', 'learning_rate': 1e-3, 'min_lr': 1e-4}


@pytest.mark.parametrize('changes, warns', [
    ({}, False), ({'min_lr': 1e-3}, False), ({'min_lr': 2e-3}, True), ({'learning_rate': 1e-5}, True),
    ({'min_lr': 2e-3, 'decay_lr': False}, False), ({'min_lr': 2e-3, 'lr_schedule': 'constant'}, False)])
def test_a_learning_rate_that_would_rise_is_refused_if_min_lr_was_given(changes, warns):
    flags = FALLING | changes
    assert bool(rising_learning_rate(flags)) == warns
    check_given(flags, {'learning_rate': flags['learning_rate']})  # with nanoGPT's default of min_lr
    if warns:
        with pytest.raises(UserError, match='min_lr=.* is above learning_rate='):
            check_given(flags, {'min_lr': flags['min_lr']})


# -----------------------------------------------------------------------------
# how a script ends

PRINTS = """
import sys
from jax_flags import start_script
start_script()
print('first')  # is read before the script goes on: no line stays in a buffer
sys.stdin.read()  # until the reader has gone
print('second' * {times}, end={end!r})
{then}
"""


@pytest.mark.parametrize('options, times, end, then, code', [
    ([], 10**5, '\n', '', 141),
    (['-u'], 1, '\n', '', 141),
    ([], 1, '\n', '', 141),
    ([], 1, '', '', 0),  # text without a newline stays in the buffer until the interpreter exits
    ([], 1, '', 'raise ValueError("a bug")', 1)])
def test_a_reader_that_goes_away_ends_a_script_quietly(options, times, end, then, code):
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}
    program = PRINTS.format(times=times, end=end, then=then)
    with start(*options, '-c', program, env=environment, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == 'first\n'
        process.stdout.close()
        process.stdin.close()
        err = process.stderr.read()
    assert process.returncode == code
    if then:
        assert err.splitlines()[-1] == 'ValueError: a bug'
    else:
        assert err == ''


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='Linux only')
def test_a_full_disk_behind_stdout_is_one_line(monkeypatch):
    monkeypatch.delenv('PYTHONUNBUFFERED', raising=False)
    for arguments in (['plot_jax.py', '--help'], ['-c', PRINTS.format(times=1, end='', then='print()')]):
        with open('/dev/full', 'w') as full:
            done = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=full,
                                  stderr=subprocess.PIPE, text=True, timeout=300)
        assert done.returncode == 2
        assert done.stderr == 'error: cannot print: No space left on device\n'


def test_a_setting_of_jax_that_is_wrong_is_one_line():
    done = subprocess.run([sys.executable, 'sample_jax.py', '--out_dir=none'], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, 'JAX_DEBUG_NANS': 'x'}, timeout=300)
    assert done.returncode == 2
    assert done.stderr == "error: JAX refuses its settings: invalid truth value 'x' for environment 'JAX_DEBUG_NANS'\n"


def test_help_names_the_arguments_of_the_script():
    for script, arguments in (('train_jax.py', '[config/file.py ...]'), ('plot_jax.py', 'OUT_DIR ...')):
        said = run_script(script, '--help').stdout
        assert said.startswith(f'usage: python {script} {arguments} [--name=value ...]\n')


def test_a_broken_pipe_elsewhere_stays_a_traceback(capsys):
    error = BrokenPipeError('of a socket')
    exit_on_user_error(BrokenPipeError, error, None)
    assert 'BrokenPipeError: of a socket' in capsys.readouterr().err


@pytest.mark.parametrize('error, lost', [
    (jax.errors.JaxRuntimeError('INTERNAL: the other side has closed the connection'), True),
    (ValueError('UNKNOWN: Gloo all-reduce failed: Connection closed by peer'), True),
    (RuntimeError('the barrier of the save was not reached'), True),
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory'), False), (ValueError('a bug'), False)])
def test_what_the_death_of_another_process_raises_ends_this_one_with_75(monkeypatch, capsys, error, lost):
    codes = []
    monkeypatch.setattr(os, '_exit', codes.append)
    exit_if_peer_died(error)
    assert codes == []  # there are no others
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    exit_if_peer_died(error)
    assert codes == [75] * lost
    assert ('error: process 0 of 2 has lost the others' in capsys.readouterr().err) == lost


def test_an_error_whose_cause_may_soon_be_over_is_one_line_and_exit_code_75(capsys):
    with pytest.raises(SystemExit) as caught:
        exit_on_user_error(TryAgain, TryAgain('no answer'), None)
    assert caught.value.code == 75 and capsys.readouterr().err == 'error: no answer\n'


@pytest.mark.parametrize('process, seconds', [(0, 3), (1, 0.5)])
@pytest.mark.parametrize('error, code', [(UserError('a mistake'), 2), (ValueError('a bug'), 1)])
def test_one_of_several_processes_that_fails_does_not_wait_for_the_others(monkeypatch, error, code, process, seconds):
    ends = []
    monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(jax, 'process_index', lambda: process)
    monkeypatch.setattr(time, 'sleep', ends.append)
    monkeypatch.setattr(os, '_exit', lambda code: ends.append(f'exit code {code}'))
    with contextlib.suppress(SystemExit):  # os._exit would not have returned
        exit_on_user_error(type(error), error, None)
    assert ends == [seconds, f'exit code {code}']


def test_a_file_whose_writing_is_interrupted_is_not_there(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / 'a') as unfinished:
        Path(unfinished).write_text('half of i')
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('text', ['{"a": 1', '[1]', '[' * 100_000])
def test_a_damaged_json_file_is_refused_with_what_to_do(text, tmp_path):
    (tmp_path / 'a.json').write_text(text)
    with pytest.raises(UserError, match='a.json is not .*; copy or download it again$'):
        read_json(tmp_path / 'a.json')


def test_a_text_is_written_and_read_as_it_is_beside_files_of_any_name(tmp_path):
    (tmp_path / 'a.tmp').write_text('mine')
    for path in (tmp_path / 'a.txt', tmp_path / 'b.tmp', tmp_path / 'new' / 'c.txt'):
        write_text(path, 'one\r\ntwo\n')
        assert (read_text(path), read_text(path, newline='')) == ('one\ntwo\n', 'one\r\ntwo\n')
    assert (tmp_path / 'a.tmp').read_text() == 'mine'
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['a.tmp', 'a.txt', 'b.tmp', 'c.txt', 'new']


@pytest.mark.skipif(os.name != 'posix', reason='links and pipes of posix')
def test_a_link_and_a_pipe_that_are_written_stay_what_they_are(tmp_path):
    link, pipe, read = tmp_path / 'link', tmp_path / 'pipe', []
    link.symlink_to('a.txt')
    write_text(link, 'one')
    assert link.is_symlink() and (tmp_path / 'a.txt').read_text() == 'one'
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, 'two')
    reader.join()
    assert read == ['two'] and pipe.is_fifo()


# -----------------------------------------------------------------------------
# files of an untrusted folder

@pytest.mark.parametrize('number', [errno.EFBIG, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_an_error_of_the_disk_is_one_line(number, capsys):
    with pytest.raises(SystemExit) as caught:
        exit_on_user_error(OSError, OSError(number, os.strerror(number), 'ckpt'), None)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: [Errno {number}] {os.strerror(number)}: 'ckpt'\n"


@pytest.fixture
def untrusted(tmp_path):
    """A folder with a file and a folder in it, beside a file that is none of its own."""
    folder = tmp_path / 'model'
    (folder / 'sub').mkdir(parents=True)
    (folder / 'a.json').write_text('{}')
    (folder / 'sub' / 'b.json').write_text('{}')
    (tmp_path / 'secret').write_text('{}')
    return folder


@pytest.mark.parametrize('name', [
    '../secret', 'sub/../../secret', '/etc/passwd', '..', 'link', 'sub/link', 'linked/secret'])
def test_no_name_and_no_link_leads_out_of_a_folder(name, untrusted):
    (untrusted / 'link').symlink_to('../secret')
    (untrusted / 'sub' / 'link').symlink_to('/etc/passwd')
    (untrusted / 'linked').symlink_to('..')
    with pytest.raises(UserError, match='leads out of its folder'):
        path_inside(untrusted, name)


def test_links_within_a_folder_and_a_folder_that_is_a_link_are_read(untrusted, tmp_path):
    (untrusted / 'link').symlink_to('sub/b.json')
    (tmp_path / 'other').symlink_to(untrusted)
    for folder in (untrusted, tmp_path / 'other'):
        for name in ('a.json', 'sub/b.json', 'sub/../a.json', 'link', 'not there'):
            assert path_inside(folder, name) == os.path.join(folder, name)


def test_the_links_of_hugging_faces_cache_lead_to_the_files_of_the_same_model_only(tmp_path):
    model, other = tmp_path / 'models--me--mine', tmp_path / 'models--me--other'
    snapshot = model / 'snapshots' / '0123abcd'
    for folder in (model / 'blobs', other / 'blobs', snapshot / 'onnx'):
        folder.mkdir(parents=True)
    for folder in (model, other):
        (folder / 'blobs' / 'ff').write_text('{}')
    (snapshot / 'config.json').symlink_to('../../blobs/ff')
    (snapshot / 'onnx' / 'config.json').symlink_to('../../../blobs/ff')
    (snapshot / 'theirs').symlink_to(other / 'blobs' / 'ff')
    assert path_inside(snapshot, 'config.json') == os.path.join(snapshot, 'config.json')
    assert path_inside(snapshot / 'onnx', 'config.json') == os.path.join(snapshot, 'onnx', 'config.json')
    with pytest.raises(UserError, match='leads out of its folder'):
        path_inside(snapshot, 'theirs')
