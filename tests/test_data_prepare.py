"""What data/*/prepare.py promise. Each script runs as a user runs it, in a process of its own, without a network.

GPT-2's BPE files would have to be downloaded; a small byte-level BPE replaces them. The scripts and their worker
processes get it through a sitecustomize.py, which Python imports at its start.
"""
import hashlib
import importlib.util
import inspect
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from jax_files.data import load_dataset_meta
from jax_files.tokenizers import same_tokens
from jax_flags import UserError
from tests.common import PADDED, edit_json, needs_hangup, wait_for

DATA = Path(__file__).resolve().parent.parent / 'data'
EOT = 50256
STANDIN = '''
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler) # a shell starts its background jobs with SIGINT ignored

def standin():
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)} | {b'th': 256, b'the': 257, b'er': 258}
    class Encoding(tiktoken.Encoding):
        def encode_to_numpy(self, text, **options):
            time.sleep(float(os.environ.get('SECONDS_PER_DOCUMENT', 0)))
            return super().encode_to_numpy(text, **options)
    return Encoding('gpt2', pat_str=r'[a-z]+|[^a-z]', mergeable_ranks=ranks, special_tokens={'<|endoftext|>': 50256})
'''
INSTALL = '''
import tiktoken
tiktoken.get_encoding = lambda name: {'gpt2': standin()}[name]
'''
# characters of all kinds: both newlines, a tab, a line separator, beyond ASCII, beyond 16 bits
TEXT = 40 * (
    'First Citizen:\nBefore we proceed any further, hear me speak.\r\n'
    '\tAll: the weather\u2028 \u00e9\u4e16\U0001f600\n')


@pytest.fixture
def env(tmp_path):
    """The environment of a machine without a network and with nothing in its caches."""
    kept = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'TIKTOKEN_CACHE_DIR', 'DATA_GYM_CACHE_DIR')}
    dead = {name: 'http://127.0.0.1:9' for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY')}
    (tmp_path / 'empty').mkdir()
    return kept | dead | {'NO_PROXY': '', 'no_proxy': '', 'TIKTOKEN_CACHE_DIR': str(tmp_path / 'empty'),
                          'HF_HOME': str(tmp_path / 'hf'), 'HF_HUB_OFFLINE': '1'}


@pytest.fixture
def bpe_env(env, tmp_path):
    """The same, with the stand-in for GPT-2's encoding in every Python process."""
    pytest.importorskip('tiktoken')
    (tmp_path / 'shim').mkdir()
    (tmp_path / 'shim' / 'sitecustomize.py').write_text(STANDIN + INSTALL)
    return env | {'PYTHONPATH': str(tmp_path / 'shim')}


@pytest.fixture
def encode():
    pytest.importorskip('tiktoken')
    names = {}
    exec(STANDIN, names)
    return names['standin']().encode_ordinary


def command(script, *args):
    script = script if isinstance(script, Path) else DATA / script / 'prepare.py'
    return [sys.executable, str(script), *map(str, args)]


def run_to_the_end(script, *args, env):
    return subprocess.run(
        command(script, *args), env=env, capture_output=True, text=True, encoding='utf-8', timeout=300)


def copied(script, folder):
    """The script, where its folder has no data: in a copy of the repository as far as the script needs it."""
    copy = folder / 'data' / script / 'prepare.py'
    copy.parent.mkdir(parents=True)
    shutil.copy(DATA / script / 'prepare.py', copy)
    for name in ('common.py', 'reading.py'):
        shutil.copy(DATA / name, folder / 'data')
    shutil.copy(DATA.parent / 'jax_flags.py', folder)
    shutil.copytree(DATA.parent / 'jax_files', folder / 'jax_files', ignore=shutil.ignore_patterns('__pycache__'))
    return copy


def prepare(script, *args, env):
    done = run_to_the_end(script, *args, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(script, *args, env):
    """Runs what cannot work. Returns the one line on stderr."""
    done = run_to_the_end(script, *args, env=env)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith('error: '), done.stderr
    line, = done.stderr.splitlines()
    return line


def load_script(script, monkeypatch):
    """The script as a module, for its functions."""
    monkeypatch.setattr(sys, 'path', [str(DATA), *sys.path])
    spec = importlib.util.spec_from_file_location(f'prepare_{script}', DATA / script / 'prepare.py')
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def wait_for_documents(folder, run):
    """Waits until this run has saved its first documents; returns the file of their lengths."""
    lengths = folder / 'lengths.part.bin'
    wait_for(f'documents in {lengths}', lambda: lengths.exists() and lengths.stat().st_size, run)
    assert run.poll() is None, 'the script ended before it was interrupted'
    return lengths


def files_in(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*') if p.is_file()) if folder.exists() else []


def read(folder):
    """(train ids, val ids, meta) of a finished data set. It has no other files, and its meta.json agrees with them."""
    tokenizer = [name for name in files_in(folder) if name.startswith('tokenizer/')]
    assert files_in(folder) == ['meta.json', *tokenizer, 'train.bin', 'val.bin']
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    train, val = (np.fromfile(folder / f'{split}.bin', meta['dtype']) for split in ('train', 'val'))
    assert set(meta) == {'vocab_size', 'dtype', 'tokenizer', 'train_tokens', 'val_tokens', 'max_id'}
    assert meta['max_id'] >= max(train.max(), val.max())
    assert (len(train), len(val)) == (meta['train_tokens'], meta['val_tokens'])
    return train, val, meta


def snapshot(folder):
    return {name: (folder / name).read_bytes() for name in files_in(folder)}


def text_file(tmp_path, text):
    path = tmp_path / 'mytext.txt'
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -----------------------------------------------------------------------------
# character level

def test_char_bins_are_what_nanogpt_writes(tmp_path, env):
    prepare('shakespeare_char', text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'out', env=env)
    chars = sorted(list(set(TEXT)))
    stoi = {ch: i for i, ch in enumerate(chars)}
    n = len(TEXT)
    for split, part in (('train', TEXT[:int(n*0.9)]), ('val', TEXT[int(n*0.9):])):
        ids = np.array([stoi[c] for c in part], dtype=np.uint16)
        assert (tmp_path / 'out' / f'{split}.bin').read_bytes() == ids.tobytes()
    _, _, meta = read(tmp_path / 'out')
    assert meta['vocab_size'] == len(chars)
    assert meta['dtype'] == 'uint16'
    assert meta['tokenizer'] == {'kind': 'char', 'chars': ''.join(chars)}


def test_char_ids_decode_to_every_byte_of_the_input(tmp_path, env):
    prepare('shakespeare_char', text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'out', env=env)
    train, val, meta = read(tmp_path / 'out')
    assert ''.join(meta['tokenizer']['chars'][i] for i in [*train, *val]).encode() == TEXT.encode()


@pytest.mark.slow
@pytest.mark.parametrize('script', ['shakespeare_char', 'shakespeare'])
def test_a_byte_order_mark_is_no_character_of_the_text(tmp_path, bpe_env, script):
    prepare(script, text_file(tmp_path, '\ufeff' + TEXT), '--out_dir', tmp_path / 'a', env=bpe_env)
    prepare(script, text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'b', env=bpe_env)
    assert snapshot(tmp_path / 'a') == snapshot(tmp_path / 'b')


@pytest.mark.slow
@pytest.mark.parametrize('vocab_size, dtype', [(65536, 'uint16'), (65537, 'uint32')])
def test_a_vocabulary_above_65536_takes_uint32(tmp_path, env, vocab_size, dtype):
    text = ''.join(chr(i) for i in range(0x10000, 0x10000 + vocab_size))
    prepare('shakespeare_char', text_file(tmp_path, text), '--out_dir', tmp_path / 'out', env=env)
    train, val, meta = read(tmp_path / 'out')
    assert (meta['dtype'], meta['vocab_size']) == (dtype, vocab_size)
    assert [*train, *val] == list(range(vocab_size))


@pytest.mark.slow
@pytest.mark.parametrize('script', ['shakespeare_char', 'shakespeare'])
def test_without_input_the_file_beside_the_script_is_taken_and_the_counts_to_expect_printed(tmp_path, bpe_env, script):
    copy = copied(script, tmp_path)
    copy.with_name('input.txt').write_bytes(TEXT.encode())
    out = prepare(copy, '--out_dir', tmp_path / 'a', env=bpe_env)
    assert {'shakespeare_char': '1,003,854 and 111,540', 'shakespeare': '301,966 and 36,059'}[script] in out
    prepare(script, text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'b', env=bpe_env)
    assert snapshot(tmp_path / 'a') == snapshot(tmp_path / 'b')


@pytest.mark.slow
def test_a_missing_input_is_downloaded_once_and_kept_beside_the_script(tmp_path, env):
    copy = copied('shakespeare_char', tmp_path)
    (tmp_path / 'shim').mkdir()
    (tmp_path / 'shim' / 'sitecustomize.py').write_text(
        'import io, urllib.request\n'
        'def urlopen(url, timeout):\n'
        '    assert url.endswith("/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")\n'
        f'    return io.BytesIO({TEXT.encode()!r})\n'
        'urllib.request.urlopen = urlopen\n')
    online = env | {'PYTHONPATH': str(tmp_path / 'shim')}
    prepare(copy, '--out_dir', tmp_path / 'out', env=online)
    assert snapshot(copy.parent) == {'prepare.py': copy.read_bytes(), 'input.txt': TEXT.encode()}
    prepare(copy, '--out_dir', tmp_path / 'again', env=env) # offline now
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'again')

# -----------------------------------------------------------------------------
# BPE

def test_bpe_bins_are_what_nanogpt_writes(tmp_path, bpe_env, encode):
    prepare('shakespeare', text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'out', env=bpe_env)
    n = len(TEXT)
    for split, part in (('train', TEXT[:int(n*0.9)]), ('val', TEXT[int(n*0.9):])): # characters are split, not tokens
        assert (tmp_path / 'out' / f'{split}.bin').read_bytes() == np.array(encode(part), dtype=np.uint16).tobytes()
    _, _, meta = read(tmp_path / 'out')
    assert (meta['vocab_size'], meta['dtype'], meta['tokenizer']) == (50257, 'uint16', {'kind': 'gpt2'})


@pytest.mark.slow
@pytest.mark.parametrize('script', ['shakespeare', 'openwebtext'])
def test_without_the_bpe_files_the_error_says_where_to_put_them(tmp_path, env, script):
    pytest.importorskip('tiktoken')
    given = tmp_path / 'given'
    given.mkdir()
    (given / 'a.parquet').write_bytes(b'not looked into yet')
    given = text_file(tmp_path, TEXT) if script == 'shakespeare' else given
    line = refuse(script, given, '--out_dir', tmp_path / 'out', env=env)
    import tiktoken_ext.openai_public
    for name in ('encoder.json', 'vocab.bpe'): # tiktoken's cache calls a file by the sha1 of its URL
        url = f'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}'
        assert url in inspect.getsource(tiktoken_ext.openai_public)
        assert f'{url} named {hashlib.sha1(url.encode()).hexdigest()}' in line
    assert 'TIKTOKEN_CACHE_DIR' in line
    assert not (tmp_path / 'out').exists()

# -----------------------------------------------------------------------------
# a user's mistakes

@pytest.mark.slow
@pytest.mark.parametrize('script', ['shakespeare_char', 'shakespeare'])
@pytest.mark.parametrize('content, said', [
    (None, 'No such file'),
    (b'', '0 characters'),
    (b'0123456789', '10 characters'),
    (b'caf\xe9 au lait ' * 9, 'not UTF-8')])
def test_an_unusable_input_gets_one_line_and_writes_nothing(tmp_path, bpe_env, script, content, said):
    path = tmp_path / 'mytext.txt'
    if content is not None:
        path.write_bytes(content)
    line = refuse(script, path, '--out_dir', tmp_path / 'out', env=bpe_env)
    assert said in line
    assert str(path) in line
    assert not (tmp_path / 'out').exists()


def test_eleven_characters_are_enough(tmp_path, env):
    prepare('shakespeare_char', text_file(tmp_path, '0123456789a'), '--out_dir', tmp_path / 'out', env=env)
    train, val, _ = read(tmp_path / 'out')
    assert (len(train), len(val)) == (9, 2)


@pytest.mark.slow
@pytest.mark.parametrize('script', ['shakespeare_char', 'shakespeare'])
def test_without_a_network_the_error_says_where_to_put_the_file(tmp_path, env, script):
    copy = copied(script, tmp_path)
    line = refuse(copy, env=env)
    assert 'tinyshakespeare/input.txt' in line
    assert str(copy.with_name('input.txt')) in line
    assert files_in(copy.parent) == ['prepare.py']


@pytest.mark.slow
@pytest.mark.parametrize('script', ['pystdlib_char', 'shakespeare_char', 'shakespeare', 'openwebtext'])
def test_a_closed_stdout_ends_a_script_quietly_with_its_data_set(tmp_path, bpe_env, script):
    inputs = {'pystdlib_char': lambda: code_base(tmp_path / 'in', [(f'{i}.py', b'x = 1\n') for i in range(20)]),
              'openwebtext': lambda: parquet(tmp_path / 'in', documents(50))}
    given = inputs.get(script, lambda: text_file(tmp_path, TEXT))()
    reader, writer = os.pipe()
    os.close(reader) # as head has done after its last line
    try:
        done = subprocess.run(command(script, given, '--out_dir', tmp_path / 'out'), stdout=writer,
                              stderr=subprocess.PIPE, text=True, timeout=300, cwd=tmp_path, env=bpe_env)
    finally:
        os.close(writer)
    assert done.stderr == ''
    read(tmp_path / 'out')


@pytest.mark.parametrize('script', ['pystdlib_char', 'shakespeare_char', 'shakespeare', 'openwebtext'])
def test_an_unknown_flag_gets_one_line(script, env):
    assert '--outdir' in refuse(script, '--outdir=x', env=env)


@pytest.mark.slow
@pytest.mark.parametrize('script', ['pystdlib_char', 'shakespeare_char', 'shakespeare'])
def test_an_out_dir_that_cannot_be_written_gets_one_line(tmp_path, bpe_env, script):
    path = text_file(tmp_path, TEXT)
    args = [] if script == 'pystdlib_char' else [path]
    line = refuse(script, *args, '--out_dir', path / 'out', env=bpe_env) # a file cannot hold a folder
    assert 'cannot write' in line
    assert '--out_dir' in line


def test_a_failed_write_leaves_no_half_data_set(tmp_path, env):
    (tmp_path / 'out' / 'val.bin').mkdir(parents=True) # makes writing the second file fail
    (tmp_path / 'out' / 'val.bin' / 'x').touch()
    (tmp_path / 'out' / 'meta.json').write_text('{"of": "an older data set"}')
    refuse('shakespeare_char', text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'out', env=env)
    assert files_in(tmp_path / 'out') == ['val.bin/x'] # nor meta.json: without it train.bin would be GPT-2's tokens


# -----------------------------------------------------------------------------
# the standard library

def code_base(folder, files):
    for name, content in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def decoded(folder):
    train, val, meta = read(folder)
    chars = meta['tokenizer']['chars']
    return ''.join(chars[i] for i in train), ''.join(chars[i] for i in val)


def parts(text):
    """The data set's text -> {file: content}, in order."""
    pieces = text.split('# ---- ')
    assert pieces[0] == ''
    return dict(piece.split('\n', 1) for piece in pieces[1:])


@pytest.fixture(scope='module')
def stdlib(tmp_path_factory):
    """The default data set, made twice, and what the script said."""
    folders = [tmp_path_factory.mktemp('stdlib') / 'out' for _ in range(2)]
    return *folders, *[prepare('pystdlib_char', '--out_dir', folder, env=None) for folder in folders]


@pytest.mark.slow
def test_pystdlib_is_deterministic(stdlib):
    a, b, said, said_again = stdlib
    assert snapshot(a) == snapshot(b)
    assert said == said_again
    _, _, meta = read(a)
    assert sys.version.split()[0] in said
    assert f'{meta["train_tokens"]:,}' in said
    assert f'{meta["val_tokens"]:,}' in said


@pytest.mark.slow
def test_pystdlib_is_megabytes_of_printable_ascii_with_a_tenth_for_val(stdlib):
    train, val, meta = read(stdlib[0])
    assert set(meta['tokenizer']['chars']) <= set(map(chr, range(32, 127))) | {'\n'}
    assert meta['vocab_size'] == len(meta['tokenizer']['chars'])
    assert meta['vocab_size'] <= 97
    assert meta['dtype'] == 'uint16'
    assert len(train) + len(val) > 2_000_000
    assert 0.1 <= len(val) / (len(train) + len(val)) < 0.2
    assert max(train.max(), val.max()) < meta['vocab_size']


@pytest.mark.slow
def test_pystdlib_files_are_the_librarys_uncut_and_on_one_side_of_the_split(stdlib):
    train, val = (parts(text) for text in decoded(stdlib[0]))
    assert not set(train) & set(val)
    assert {'argparse.py', 'asyncio/base_events.py', 'json/decoder.py'} <= set(train | val)
    assert (train | val)['json/decoder.py'] == Path(json.decoder.__file__).read_text()
    skipped = {'site-packages', 'test', 'tests', 'idle_test', 'lib2to3', 'idlelib', 'turtledemo', 'ensurepip',
               'encodings', 'pydoc_data', '__pycache__'}
    assert not [name for name in train | val if skipped & set(name.split('/'))]


@pytest.mark.slow
def test_pystdlib_order_does_not_depend_on_the_file_system(tmp_path, env):
    files = [(f'pkg{i % 3}/mod{i}.py', b'x = %d\n' % i * 20) for i in range(40)]
    prepare('pystdlib_char', code_base(tmp_path / 'up', files), '--out_dir', tmp_path / 'a', env=env)
    prepare('pystdlib_char', code_base(tmp_path / 'down', files[::-1]), '--out_dir', tmp_path / 'b', env=env)
    assert snapshot(tmp_path / 'a') == snapshot(tmp_path / 'b')
    train, val = decoded(tmp_path / 'a')
    names = list(parts(train)) + list(parts(val))
    assert len(names) == 40
    assert names == sorted(names, key=lambda name: hashlib.sha1(name.encode()).hexdigest())
    first_of_val = len('# ---- pkg0/mod00.py\n') + len(next(iter(parts(val).values())))
    assert len(train) <= 0.9 * (len(train) + len(val))
    assert len(train) + first_of_val > 0.9 * (len(train) + len(val)) # one more file would be too many


@pytest.mark.slow
def test_pystdlib_takes_only_plain_code(tmp_path, env):
    good = [(f'good{i}.py', b'print("%d")\n' % i) for i in range(20)]
    bad = [('tab.py', b'if x:\n\ty\n'), ('cr.py', b'a\rb\n'), ('accent.py', 'é = 1\n'.encode()), ('nul.py', b'\0\n'),
           ('empty.py', b''), ('notes.txt', b'text\n'), ('_sysconfigdata__linux.py', b'x = 1\n'), ('test/a.py', b'a\n'),
           ('deep/er/tests/a.py', b'a\n'), ('site-packages/a.py', b'a\n'), ('encodings/a.py', b'a\n')]
    last = [('windows.py', b'a = 1\r\nb = 2\r\n'), ('unfinished.py', b'a = 1')]
    prepare('pystdlib_char', code_base(tmp_path / 'code', good + bad + last), '--out_dir', tmp_path / 'out', env=env)
    train, val = decoded(tmp_path / 'out')
    assert parts(train + val) == {name: content.decode() for name, content in good} | {
        'windows.py': 'a = 1\nb = 2\n', 'unfinished.py': 'a = 1\n'}


@pytest.mark.slow
@pytest.mark.parametrize('files', [None, [], [('only.py', b'print(1)\n')]])
def test_pystdlib_needs_a_folder_with_enough_code(tmp_path, env, files):
    folder = tmp_path / 'code'
    if files is not None:
        folder.mkdir()
        code_base(folder, files)
    assert str(folder) in refuse('pystdlib_char', folder, '--out_dir', tmp_path / 'out', env=env)
    assert not (tmp_path / 'out').exists()

# -----------------------------------------------------------------------------
# a vocabulary of one's own, and texts of any form

WORDS = ['alpha', ' beta', '.gamma(', ')\n', '    return', '\n\n', '  12345', ' \u00e9t\u00e9', '\U0001f600', '\r\n',
         '\tx', '--']


def words(n, seed=0):
    return ''.join(np.random.default_rng(seed).choice(WORDS, n))


def tokenizer_of(folder):
    return Tokenizer.from_file(str(folder / 'tokenizer' / 'tokenizer.json'))


@pytest.mark.slow
def test_an_own_vocabulary_has_the_tokens_asked_for_and_every_string_survives(tmp_path, env):
    texts = [text_file(tmp_path, words(3000)).rename(tmp_path / f'{i}.txt') for i in range(3)]
    prepare('text', *texts, '--tokenizer=bpe:300', '--out_dir', tmp_path / 'out', env=env)
    train, val, meta = read(tmp_path / 'out')
    assert (meta['vocab_size'], meta['dtype']) == (300, 'uint16')
    assert meta['tokenizer'] == {'kind': 'folder', 'path': 'tokenizer'}
    tokenizer = tokenizer_of(tmp_path / 'out')
    assert tokenizer.get_vocab_size() == 300
    end = tokenizer.token_to_id('<|endoftext|>')
    assert np.count_nonzero(train == end) == np.count_nonzero(val == end) == 3
    for ids, part in ((train, words(3000)[:int(len(words(3000))*0.9)]), (val, words(3000)[int(len(words(3000))*0.9):])):
        assert tokenizer.decode(ids, skip_special_tokens=False) == (part + '<|endoftext|>') * 3
    for text in ('', ' ', '\u4e16 \u0301\u2028\x85\x00\ufeff', ''.join(map(chr, range(0xd800))), '<|endoftext|'):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((tmp_path / 'out' / 'tokenizer' / 'tokenizer_config.json').read_text())
    assert (config['tokenizer_class'], config['eos_token']) == ('PreTrainedTokenizerFast', '<|endoftext|>')


@pytest.mark.slow
def test_transformers_reads_an_own_vocabulary_with_the_same_ids(tmp_path, env):
    transformers = pytest.importorskip('transformers')
    prepare('text', text_file(tmp_path, words(3000)), '--tokenizer=bpe:300', '--out_dir', tmp_path / 'out', env=env)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out' / 'tokenizer')
    text = words(500, seed=1) + '<|endoftext|>\u4e16'
    ids = tokenizer_of(tmp_path / 'out').encode(text).ids
    assert theirs(text)['input_ids'] == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token == '<|endoftext|>'


@pytest.mark.slow
def test_an_own_vocabulary_and_its_ids_do_not_depend_on_threads_or_processes(tmp_path, env):
    text = text_file(tmp_path, words(60_000))
    for threads in (1, 2, 5):
        prepare('text', text, '--tokenizer=bpe:600', f'--num_proc={min(threads, 2)}', '--out_dir',
                tmp_path / str(threads), env=env | {'RAYON_NUM_THREADS': str(threads)})
    assert snapshot(tmp_path / '1') == snapshot(tmp_path / '2') == snapshot(tmp_path / '5')


@pytest.mark.slow
def test_an_own_vocabulary_knows_nothing_of_the_val_part(tmp_path, env):
    for name, end in (('a', 'alpha '), ('b', 'omega ')):
        text_file(tmp_path, 'beta gamma ' * 900 + end * 90).rename(tmp_path / f'{name}.txt')
        prepare('text', tmp_path / f'{name}.txt', '--tokenizer=bpe:300', '--out_dir', tmp_path / name, env=env)
    a, b = (snapshot(tmp_path / name) for name in 'ab')
    assert a.pop('val.bin') != b.pop('val.bin')
    del a['meta.json'], b['meta.json'] # val_tokens
    assert a == b


def test_an_own_vocabulary_learns_from_as_much_of_a_parquet_file_as_of_json_lines(tmp_path, env):
    script = copied('text', tmp_path / 'repo')
    shutil.copy(DATA / 'stream.py', script.parent.parent)
    script.write_text(script.read_text().replace('bpe_bytes = 2**27', 'bpe_bytes = 20_000'))
    texts = [''.join(random.Random(i).choices('abcdefgh ', k=100)) * 14 for i in range(30)] # 2.1 times as much
    (tmp_path / 'lines.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    parquet(tmp_path / 'rows', texts) # compressed to less
    vocabularies = []
    for given in ('lines.jsonl', 'rows'):
        prepare(script, tmp_path / given, '--tokenizer=bpe:400', '--out_dir', tmp_path / 'out',
                env=env | {'PYTHONPATH': str(DATA.parent)})
        vocabularies.append(tokenizer_of(tmp_path / 'out').to_str())
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.slow
def test_a_vocabulary_can_be_used_again(tmp_path, env):
    text, out, again = text_file(tmp_path, words(3000)), tmp_path / 'out', tmp_path / 'again'
    prepare('text', text, '--tokenizer=bpe:300', '--out_dir', out, env=env)
    edit_json(out / 'tokenizer' / 'tokenizer.json', **PADDED) # which no data set is
    for script in ('text', 'shakespeare'):
        (again / 'tokenizer').mkdir(parents=True, exist_ok=True)
        (again / 'tokenizer' / 'chat_template.jinja').write_text('of an older data set')
        prepare(script, text, f'--tokenizer={out / "tokenizer"}', '--out_dir', again, env=env)
        assert [a.tolist() for a in read(again)[:2]] == [a.tolist() for a in read(out)[:2]]
        assert files_in(again / 'tokenizer') == ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    before = snapshot(again)
    prepare('text', text, f'--tokenizer={again / "tokenizer"}', '--out_dir', again, env=env) # into its own folder
    assert snapshot(again) == before


@pytest.mark.slow
@pytest.mark.parametrize('script', ['shakespeare', 'pystdlib'])
def test_other_scripts_take_the_same_tokenizers(tmp_path, bpe_env, script):
    text = 'def f(x):\n    return x + 1\n'
    given = {'shakespeare': lambda: text_file(tmp_path, text * 40),
             'pystdlib': lambda: code_base(tmp_path / 'in', [(f'{i}.py', text.encode()) for i in range(40)])}[script]()
    sizes = {'char': 40, 'gpt2': 50257, 'bpe:290': 290}
    for tokenizer in sizes:
        prepare(script, given, f'--tokenizer={tokenizer}', '--out_dir', tmp_path / tokenizer, env=bpe_env)
        _, _, meta = read(tmp_path / tokenizer)
        assert meta['vocab_size'] <= sizes[tokenizer]
        assert meta['tokenizer']['kind'] == {'char': 'char', 'gpt2': 'gpt2', 'bpe:290': 'folder'}[tokenizer]


@pytest.mark.slow
def test_pystdlib_has_the_text_of_pystdlib_char(tmp_path, stdlib, env):
    said = prepare('pystdlib', '--out_dir', tmp_path, env=env)
    assert 'vocab size: 2,048' in said
    train, val, _ = read(tmp_path)
    tokenizer = tokenizer_of(tmp_path)
    assert (tokenizer.decode(train), tokenizer.decode(val)) == decoded(stdlib[0])


@pytest.mark.slow
@pytest.mark.parametrize('tokenizer', ['char', 'gpt2'])
def test_a_text_has_nanogpts_split(tmp_path, bpe_env, tokenizer):
    text = text_file(tmp_path, TEXT)
    script = {'char': 'shakespeare_char', 'gpt2': 'shakespeare'}[tokenizer]
    prepare('text', text, f'--tokenizer={tokenizer}', '--out_dir', tmp_path / 'a', env=bpe_env)
    prepare(script, text, '--out_dir', tmp_path / 'b', env=bpe_env)
    end = [EOT] if tokenizer == 'gpt2' else []
    for ours, theirs in zip(read(tmp_path / 'a')[:2], read(tmp_path / 'b')[:2], strict=True):
        assert ours.tolist() == theirs.tolist() + end


@pytest.mark.slow
def test_files_folders_lines_and_rows_are_documents_of_which_every_tenth_is_for_val(tmp_path, bpe_env, encode):
    texts = [f'{i:02}\u2028\x85\n' + words(i + 1, seed=i) for i in range(25)]
    (tmp_path / 'files' / 'deeper').mkdir(parents=True)
    for i, text in enumerate(texts):
        (tmp_path / 'files' / f'{"deeper/" * (i > 12)}{i:02}.md').write_bytes(text.encode())
    (tmp_path / 'files' / '.hidden').mkdir()
    for name in ('other.py', '.hidden/a.md'):
        (tmp_path / 'files' / name).write_text('not asked for')
    lines = [json.dumps({'id': 1, 'content': text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    (tmp_path / 'lines.jsonl').write_bytes(b'\xef\xbb\xbf' + '\r\n'.join([*lines[:9], '', *lines[9:]]).encode())
    parquet(tmp_path / 'rows', texts, column='content')
    expected = [sum((encode(text) + [EOT] for i, text in enumerate(texts) if (i % 10 == 9) == is_val), [])
                for is_val in (False, True)]
    for given in ('files', 'lines.jsonl', 'rows'):
        prepare('text', tmp_path / given, '--key=content', '--tokenizer=gpt2', '--out_dir', tmp_path / 'out',
                env=bpe_env)
        assert [ids.tolist() for ids in read(tmp_path / 'out')[:2]] == expected


def test_a_parquet_file_is_not_held_in_memory_while_it_is_read(tmp_path, monkeypatch):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    script = load_script('text', monkeypatch)
    rng = np.random.default_rng(0)
    texts = [rng.integers(32, 127, 2**14, np.uint8).tobytes().decode() for _ in range(2000)]
    pq.write_table(pa.table({'text': texts}), tmp_path / 'rows.parquet', row_group_size=100)
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in script.read_rows(str(tmp_path / 'rows.parquet'), ['text'])]
    assert len(held) == 2000 and max(held) < 2000 * 2**14 // 4


def in_rows(documents, length, n_waiting=1000):
    """Documents in rows by best fit, in the plainest way: [row of characters], and how many characters are not there.
    As nanochat's loader: the longest that fits into the rest of the row, else the shortest, cropped."""
    coming, waiting, rows, row = list(documents), [], [], ''
    while coming or waiting:
        waiting, coming = waiting + coming[:n_waiting - len(waiting)], coming[n_waiting - len(waiting):]
        fitting = [text for text in waiting if len(text) <= length - len(row)]
        text = max(fitting, key=len) if fitting else min(waiting, key=len)
        waiting.remove(text)
        row += text[:length - len(row)]
        if len(row) == length:
            rows, row = [*rows, row], ''
    return rows, sum(map(len, documents)) - length * len(rows)


@pytest.mark.parametrize('n, block_size', [(30, 63), pytest.param(4000, 100, marks=pytest.mark.slow)])
def test_rows_begin_with_documents_and_the_share_that_is_cropped_is_true(tmp_path, env, n, block_size):
    rng = random.Random(0)
    texts = [f'<{i:04}' + 'x' * rng.randrange(2 * block_size) for i in range(n)]
    texts = [text for _, text in sorted({len(text): text for text in texts}.items())] if n < 1000 else texts
    rng.shuffle(texts)
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    out = tmp_path / 'out'
    said = prepare('text', tmp_path / 'a.jsonl', '--tokenizer=char', f'--rows={block_size}', '--out_dir', out, env=env)
    meta = json.loads((out / 'meta.json').read_text())
    assert meta['row_length'] == block_size + 1
    for split, is_val in (('train', False), ('val', True)):
        documents = [text for i, text in enumerate(texts) if (i % 10 == 9) == is_val]
        ids = np.fromfile(out / f'{split}.bin', np.uint16)
        assert len(ids) == meta[f'{split}_tokens']
        rows = [''.join(meta['tokenizer']['chars'][i] for i in row) for row in ids.reshape(-1, block_size + 1)]
        expected, n_cropped = in_rows(documents, block_size + 1)
        assert all(row.startswith('<') for row in rows)
        if n < 1000:  # no two documents have the same length
            assert rows == expected
        assert sorted(map(len, rows)) == sorted(map(len, expected))
        share = n_cropped / sum(map(len, documents))
        assert f'{len(expected):,} rows of {block_size + 1} tokens; {share:.1%} of the tokens are cropped\n' in said


def test_pystdlib_comes_in_rows_too(tmp_path, env):
    root = code_base(tmp_path / 'code', [(f'{name}.py', b'a = 1\n') for name in 'abcdefghijklmnopqrst'])
    prepare('pystdlib', root, '--tokenizer=char', '--rows=20', '--out_dir', tmp_path / 'out', env=env)
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    train = np.fromfile(tmp_path / 'out' / 'train.bin', np.uint16).reshape(-1, meta['row_length'])
    assert meta['row_length'] == 21
    assert all(meta['tokenizer']['chars'][i] == '#' for i in train[:, 0])  # the line with the path


@pytest.mark.parametrize('rows, said', [('0', "invalid positive value: '0'"), ('x', 'invalid positive'),
                                        ('100000', 'do not fill a row of 100001; use fewer --rows or more text')])
def test_rows_that_cannot_be_filled_get_one_line(tmp_path, env, rows, said):
    path = text_file(tmp_path, TEXT)
    assert said in refuse('text', path, '--tokenizer=char', f'--rows={rows}', '--out_dir', tmp_path / 'out', env=env)
    assert not (tmp_path / 'out' / 'meta.json').exists()


def test_a_string_with_half_a_character_is_read(tmp_path, env):
    (tmp_path / 'a.jsonl').write_text('{"text": "ab\\ud83dcd ab cd ab cd ab cd"}\n')
    prepare('text', tmp_path / 'a.jsonl', '--tokenizer=char', '--out_dir', tmp_path / 'out', env=env)
    assert '\ufffd' in read(tmp_path / 'out')[2]['tokenizer']['chars']


ROWS = [{'text': 'one row\n'}, {'text': None}, {'id': 4}, {'text': 'another row\n'}, {'text': ['a']}, {'text': ''}, 5,
        {'text': 'the last row\n'}]


def rows_files(folder):
    """The same rows without and with texts in all forms that can hold them; [paths]."""
    folder.mkdir()
    (folder / 'a.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
    (folder / 'b.json').write_text(json.dumps(ROWS, indent=2))
    (folder / 'C.NDJSON').write_text(''.join(json.dumps(row) + '\r\n\r\n' for row in ROWS), encoding='utf-8-sig')
    return sorted(folder.iterdir(), key=lambda path: path.name.lower())


def test_rows_without_a_text_are_skipped_and_counted(tmp_path, env):
    for path in rows_files(tmp_path / 'in'):
        said = prepare('text', path, '--tokenizer=char', '--out_dir', tmp_path / path.name, env=env)
        train, val, meta = read(tmp_path / path.name)
        text = ''.join(meta['tokenizer']['chars'][i] for i in [*train, *val])
        assert sorted(text) == sorted('one row\nanother row\nthe last row\n')
        where = {'a.jsonl': ('line 2', 'line 5'), 'b.json': ('row 2', 'row 5'), 'C.NDJSON': ('line 3', 'line 9')}
        first, second = where[path.name]
        assert (f"skipped 5 rows: 3 without a text under 'text' (the first: {path}, {first}), "
                f"2 whose 'text' is no text (the first: {path}, {second})") in said
        line = refuse('text', path, '--tokenizer=char', '--strict=True', '--out_dir', tmp_path / 'strict', env=env)
        assert f"{path}, {first} is a row without a text under 'text'" in line
        assert not (tmp_path / 'strict').exists()


def test_rows_of_parquet_without_a_text_are_skipped_and_counted(tmp_path, env):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    texts = [b'one row\n', None, b'not \xe9', b'', b'another row\n']
    for kind in (pa.string(), pa.binary()):
        path = tmp_path / f'{kind}.parquet'
        pq.write_table(pa.table({'text': pa.array(texts, pa.binary()).view(kind)}), path)
        out = tmp_path / str(kind)
        said = prepare('text', path, '--tokenizer=char', '--out_dir', out, env=env)
        assert read(out)[2]['tokenizer']['chars'] == ''.join(sorted(set('one row\nanother row\n')))
        assert (f"skipped 3 rows: 2 without a text under 'text' (the first: {path}, row 2), 1 not UTF-8 "
                f'(the first: {path}, row 3)') in said
        line = refuse('text', path, '--tokenizer=char', '--strict', '--out_dir', tmp_path / 'strict', env=env)
        assert 'row 2 is a row without' in line


def test_what_was_read_is_said(tmp_path, env):
    (tmp_path / 'in' / 'sub').mkdir(parents=True)
    (tmp_path / 'in' / '.git').mkdir()
    (tmp_path / 'in' / 'loop').symlink_to(tmp_path / 'in', target_is_directory=True)
    for name, text in (('a.txt', 'caf\u00e9\n' * 30), ('B.TXT', 'abc\n' * 10), ('empty.md', ''), ('c.csv', 'text\na'),
                       ('d.csv', 'text\nb'), ('sub/e.jsonl', '{"text": "' + 'd' * 40 + '"}'), ('LICENSE', 'x')):
        (tmp_path / 'in' / name).write_text(text)
    said = prepare('text', tmp_path / 'in', '--tokenizer=char', '--out_dir', tmp_path / 'out', env=env)
    train, val, _ = read(tmp_path / 'out')
    assert said.splitlines() == [
        'read 3 documents of 4 files: 230 characters, 260 bytes',
        f'skipped a file without a text (the first: {tmp_path / "in" / "empty.md"})',
        'left out 3 files: 2 .csv, 1 without an ending; --suffix names what to read',
        'left out 2 folders: .git (hidden), loop (a link)',
        f'train has {len(train)} tokens', f'val has {len(val)} tokens', '230 tokens, 1.13 bytes per token']
    line = refuse('text', tmp_path / 'in', '--suffix=.json', '--out_dir', tmp_path / 'no', env=env)
    assert 'no file that ends in .json; it has 2 .txt, 2 .csv, 1 without an ending, 1 .md, 1 .jsonl; name' in line


def test_more_text_in_the_tokens_of_an_earlier_data_set_is_more_of_the_same_data(tmp_path, env):
    notes, grown = tmp_path / 'notes.txt', tmp_path / 'grown'
    grown.mkdir()
    notes.write_text('a note of the first week\n' * 40)
    prepare('text', notes, '--tokenizer=bpe:300', '--out_dir', tmp_path / 'notes', env=env)
    notes.rename(grown / 'notes.txt')
    (grown / 'more.txt').write_text('zebras, which the first notes did not have\n' * 40)
    tokenizer = f'--tokenizer={tmp_path / "notes" / "tokenizer"}'
    prepare('text', grown, tokenizer, '--out_dir', tmp_path / 'notes3', env=env)
    first, more = load_dataset_meta(tmp_path / 'notes'), load_dataset_meta(tmp_path / 'notes3')
    assert first['vocab_size'] == more['vocab_size'] and more['train_tokens'] > 2 * first['train_tokens']
    assert same_tokens(first['tokenizer'], more['tokenizer'])  # what a resumed run asks for


def test_a_table_and_json_are_read_by_their_key_and_with_their_keys_if_that_is_empty(tmp_path, env):
    (tmp_path / 'a.csv').write_text('id,body\n1,"one, two"\n2,"three"\n')
    out = tmp_path / 'out'
    prepare('text', tmp_path / 'a.csv', '--tokenizer=char', '--key=body', '--out_dir', out, env=env)
    assert read(out)[2]['tokenizer']['chars'] == ''.join(sorted(set('one, twothree')))
    prepare('text', tmp_path / 'a.csv', '--tokenizer=char', '--key=', '--out_dir', out, env=env)
    assert '"' in read(out)[2]['tokenizer']['chars']
    (tmp_path / 'a.json').write_text(json.dumps({'name': 'a', 'size': 3}, indent=2))
    for name, said in (('a.csv', 'has no column "text", only id, body'),
                       ('a.json', "line 1 and all others have no 'text', only name, size")):
        assert said in refuse('text', tmp_path / name, '--tokenizer=char', '--out_dir', tmp_path / 'no', env=env)


def spaced_tokenizers(texts):
    """{name: tokenizer} that put a space before a text, each in its way."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    metaspace, split = pre_tokenizers.Metaspace, pre_tokenizers.WhitespaceSplit()
    legacy = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
    as_space = normalizers.Replace('\n', ' ')
    found = {}
    for name, normalizer, pre_tokenizer in (
            ('first', None, metaspace(prepend_scheme='first')), ('always', None, metaspace(prepend_scheme='always')),
            ('whole', None, metaspace(prepend_scheme='first', split=False)), ('llama', legacy, None),
            ('t5', None, pre_tokenizers.Sequence([split, metaspace(prepend_scheme='always')])),
            ('newline is space', as_space, metaspace(prepend_scheme='first')),
            ('gpt2', None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
            ('no space', None, pre_tokenizers.ByteLevel(add_prefix_space=False))):
        tokenizer = Tokenizer(models.BPE(unk_token='?'))
        if normalizer:
            tokenizer.normalizer = normalizer
        # a BPE of a whole text is learned from words, as sentencepiece does
        by_words = metaspace(prepend_scheme='never')
        tokenizer.pre_tokenizer = by_words if name in ('whole', 'llama') else pre_tokenizer
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=['?', '<s>'], show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        if name in ('whole', 'llama'):
            tokenizer = Tokenizer(tokenizer.model)
            tokenizer.decoder = decoders.Metaspace()
            if name == 'llama':
                tokenizer.normalizer = normalizer
            else:
                tokenizer.pre_tokenizer = pre_tokenizer
        found[name] = tokenizer
    return found


@pytest.mark.parametrize('separator', ['\n', ' ', '\n\n', '.\n'])
def test_a_text_in_pieces_has_the_ids_that_it_has_as_a_whole(monkeypatch, separator):
    monkeypatch.setattr(sys, 'path', [str(DATA), *sys.path])
    common = importlib.import_module('common')
    lines = [words(8, seed=i).replace('\n', ' ').strip() for i in range(60)]
    text = separator.join(lines)
    for name, tokenizer in spaced_tokenizers([text, '\n'.join(lines)]).items():
        files = {'tokenizer.json': tokenizer.to_str()}
        vocabulary = common.Vocabulary({'kind': 'folder'}, 400, [], [1], files)
        whole = common.create_encoder(vocabulary)([common.Unit(text)])[1].tolist()
        for size in (150, 400, 10**5):
            units, before = [], ''
            for piece, is_last in common.cut([text], size):
                units.append(common.Unit(piece, not units, is_last, False, before))
                before = piece[-common.BEFORE:]
            lengths, ids, n_characters, _ = common.create_encoder(vocabulary)(units)
            assert ids.tolist() == whole, (name, size)
            assert n_characters == len(text) and lengths.sum() == len(ids) and len(units) > 1 or size == 10**5


def test_a_text_without_words_gets_no_space_where_it_is_cut(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(DATA), *sys.path])
    common = importlib.import_module('common')
    text = ''.join(random.Random(0).choices('\u4e00\u4e01\u4e02', k=1000))
    for name, tokenizer in spaced_tokenizers([text[i:i + 7] + ' ' + text[i:i + 9] for i in range(900)]).items():
        encode = common.create_encoder(common.Vocabulary({'kind': 'folder'}, 400, [], [], {
            'tokenizer.json': tokenizer.to_str()}))
        whole = tokenizer.decode(encode([common.Unit(text)])[1].tolist())
        units, before = [], ''
        for piece, is_last in common.cut([text], 100):
            units.append(common.Unit(piece, not units, is_last, False, before))
            before = piece[-common.BEFORE:]
        assert tokenizer.decode(encode(units)[1].tolist()) == whole, name


@pytest.mark.parametrize('name, code', [
    ('SIGINT', 130), ('SIGTERM', 143), pytest.param('SIGHUP', 129, marks=needs_hangup)])
def test_a_signal_ends_a_preparation_in_one_line_and_it_continues(tmp_path, bpe_env, name, code):
    if not hasattr(signal, name) or not Path('/proc/self/task').is_dir():
        pytest.skip('needs POSIX signals, and finds the workers in /proc')
    (tmp_path / 'in').mkdir()
    for i in range(60):
        (tmp_path / 'in' / f'{i:03}.txt').write_text(words(40_000, seed=i % 3), newline='')
    args = 'text', tmp_path / 'in', '--tokenizer=gpt2', '--num_proc=2', '--out_dir', tmp_path / 'out'
    run = subprocess.Popen(command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                           env=bpe_env | {'SECONDS_PER_DOCUMENT': '0.2'})
    wait_for_documents(tmp_path / 'out', run)
    run.send_signal(getattr(signal, name))
    err = run.communicate(timeout=300)[1]  # the workers share stderr: returns when they have ended too
    said = '\ninterrupted' if name == 'SIGINT' else f'stopped by {name}'
    assert (run.returncode, err) == (code, f'{said}; run the same command to continue\n')
    assert files_in(tmp_path / 'out') == ['lengths.part.bin', 'source.part.json', 'tokens.part.bin']


def test_a_signal_before_anything_is_done_leaves_nothing(tmp_path, env):
    path = text_file(tmp_path, words(10**6))
    for script, flags in (('text', ['--tokenizer=bpe:20000']), ('pystdlib', ['--tokenizer=bpe:20000'])):
        given = path if script == 'text' else []
        args = [*([given] if given else []), *flags, '--out_dir', tmp_path / 'out']
        run = subprocess.Popen(command(script, *args), stderr=subprocess.PIPE, text=True, env=env)
        wait_for('the script to begin', lambda: (tmp_path / 'out').exists() or script == 'pystdlib', run)
        if script == 'pystdlib':
            wait_for('its handler', lambda: caught(run.pid, signal.SIGTERM), run)
        run.send_signal(signal.SIGTERM)
        line, = run.communicate(timeout=300)[1].splitlines()
        assert run.returncode == 143 and line.startswith('stopped by SIGTERM; run the same command')
        assert not (tmp_path / 'out').exists()


def caught(pid, number):
    """Whether a process handles a signal."""
    status = Path(f'/proc/{pid}/status').read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith('SigCgt'))
    return int(mask, 16) >> (number - 1) & 1


@pytest.mark.slow
def test_a_long_text_has_the_ids_that_it_has_as_a_whole(tmp_path, bpe_env, encode):
    text = words(700_000) # more than two pieces
    prepare('text', text_file(tmp_path, text), '--tokenizer=gpt2', '--out_dir', tmp_path / 'a', env=bpe_env)
    prepare('text', tmp_path / 'mytext.txt', '--tokenizer=bpe:400', '--num_proc=2', '--out_dir', tmp_path / 'b',
            env=bpe_env)
    part = text[:int(len(text)*0.9)]
    assert len(part) > 2**21
    assert read(tmp_path / 'a')[0].tolist() == encode(part) + [EOT]
    assert read(tmp_path / 'b')[0].tolist() == tokenizer_of(tmp_path / 'b').encode(part + '<|endoftext|>').ids


@pytest.mark.slow
def test_a_killed_run_on_texts_continues_with_the_same_bytes(tmp_path, bpe_env):
    (tmp_path / 'in').mkdir()
    for i in range(200):
        (tmp_path / 'in' / f'{i:03}.txt').write_text(words(4000, seed=i), newline='')
    args = 'text', tmp_path / 'in', '--tokenizer=gpt2', '--out_dir'
    prepare(*args, tmp_path / 'whole', env=bpe_env)
    run = subprocess.Popen(command(*args, tmp_path / 'out', '--num_proc=2'), start_new_session=True,
                           env=bpe_env | {'SECONDS_PER_DOCUMENT': '0.02'})
    lengths = wait_for_documents(tmp_path / 'out', run)
    assert 'another process prepares' in refuse(*args, tmp_path / 'out', env=bpe_env) # as a new run would, too
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert 0 < lengths.stat().st_size < 4 * 200
    assert 'another tokenizer' in refuse(*args[:2], '--tokenizer=char', '--out_dir', tmp_path / 'out', env=bpe_env)
    (tmp_path / 'out' / 'files.part').mkdir() # as if it had been killed while writing
    (tmp_path / 'out' / 'files.part' / 'val.bin').write_bytes(b'part of it')
    prepare(*args, tmp_path / 'out', env=bpe_env)
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'whole')


def kill_workers(run):
    """Kills the workers that a script has now; returns how many."""
    found = Path(f'/proc/{run.pid}/task').glob('*/children')
    workers = [int(pid) for path in found for pid in path.read_text().split()
               if b'stream.py' in Path(f'/proc/{pid}/cmdline').read_bytes()]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    return len(workers)


def test_a_worker_that_is_killed_or_cannot_start_ends_the_run_with_a_line(tmp_path, env, bpe_env):
    if not Path('/proc/self/task').is_dir():
        pytest.skip('finds the workers in /proc')
    (tmp_path / 'in').mkdir()
    for i in range(200):
        (tmp_path / 'in' / f'{i:03}.txt').write_text(words(4000, seed=i), newline='')
    args = 'text', tmp_path / 'in', '--tokenizer=gpt2', '--num_proc=2', '--out_dir', tmp_path / 'out'
    run = subprocess.Popen(command(*args), stderr=subprocess.PIPE, text=True,
                           env=bpe_env | {'SECONDS_PER_DOCUMENT': '0.02'})
    wait_for_documents(tmp_path / 'out', run)
    assert kill_workers(run) == 2
    line, = run.communicate(timeout=60)[1].splitlines()
    assert run.returncode == 2 and 'a worker process was killed' in line and 'run the same command' in line
    done, line = run_to_the_end(*args, env=env).stderr.splitlines()
    assert done.startswith('continuing after') and line.startswith("error: cannot download GPT-2's BPE files")
    prepare(*args, env=bpe_env)
    prepare(*args[:-1], tmp_path / 'whole', env=bpe_env)
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'whole')


def test_a_worker_that_is_killed_while_it_starts_ends_the_run_with_a_line(tmp_path, env):
    if not Path('/proc/self/task').is_dir():
        pytest.skip('finds the workers in /proc')
    text = tmp_path / 'a.txt'
    text.write_text(''.join(map(chr, range(0x4e00, 0x9fff))) * 20, encoding='utf-8') # the vocabulary fills its pipe
    run = subprocess.Popen(command('text', text, '--tokenizer=char', '--num_proc=2', '--out_dir', tmp_path / 'out'),
                           stderr=subprocess.PIPE, text=True, env=env)
    wait_for('a worker', lambda: kill_workers(run), run)
    line, = run.communicate(timeout=60)[1].splitlines()
    assert run.returncode == 2 and 'a worker process was killed' in line and line.endswith('run it again')
    assert not (tmp_path / 'out').exists()


def test_a_worker_that_is_killed_in_the_middle_of_its_answer_ends_the_wait(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(DATA), *sys.path])
    stream, common = importlib.import_module('stream'), importlib.import_module('common')
    with stream.start_worker() as worker:
        stream.send(worker, common.choose_vocabulary('char', lambda: ['ab']))
        stream.send(worker, [common.Unit('ab' * 2**20)]) # the answer is larger than what the system keeps of it
        worker.stdout.peek(1)
        worker.kill()
        with pytest.raises(stream.PIPE_ERRORS):
            pickle.load(worker.stdout)


def test_work_that_cannot_be_continued_is_refused(tmp_path, env):
    (tmp_path / 'out').mkdir()
    for name, content in (('lengths.part.bin', ''), ('tokens.part.bin', ''), ('source.part.json', '{')):
        (tmp_path / 'out' / name).write_text(content)
    args = 'text', text_file(tmp_path, TEXT), '--tokenizer=char', '--out_dir', tmp_path / 'out'
    assert 'source.part.json is damaged; delete source.part.json, ' in refuse(*args, env=env)
    vocabulary = {'tokenizer': {'kind': 'char', 'chars': 'ab'}, 'size': 2}
    source = [[['mytext.txt', (tmp_path / 'mytext.txt').stat().st_size]], 'char', 'text']
    (tmp_path / 'out' / 'source.part.json').write_text(json.dumps(
        {'name': 'a', 'source': source, 'vocabulary': vocabulary, 'units': None}))
    assert 'an input has changed' in refuse(*args, env=env)


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / 'in' / 'closed').mkdir(parents=True)
    scandir = os.scandir

    def closed(path): # root may read any folder
        if str(path).endswith('closed'):
            raise PermissionError(13, 'Permission denied', str(path))
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', closed)
    with pytest.raises(UserError, match='cannot read .*closed .Permission denied.'):
        load_script('text', monkeypatch).find_files([str(tmp_path / 'in')], ('.txt',))


def test_a_refused_input_leaves_the_folder_that_was_there(tmp_path, env, monkeypatch):
    (tmp_path / 'out').mkdir()
    monkeypatch.chdir(tmp_path / 'out')
    assert 'too few' in refuse('text', text_file(tmp_path, 'a'), '--tokenizer=char', '--out_dir=.', env=env)
    assert 'cannot write to' in refuse('text', text_file(tmp_path, TEXT), '--tokenizer=char', '--out_dir=', env=env)


def test_the_masks_of_an_older_data_set_are_removed(tmp_path, env):
    for script in ('text', 'shakespeare_char'):
        for name in ('train_mask.bin', 'val_mask.bin', 'train_ends.bin', 'val_ends.bin'):
            (tmp_path / 'out').mkdir(exist_ok=True)
            (tmp_path / 'out' / name).write_bytes(b'1')
        flags = ['--tokenizer=char'] if script == 'text' else []
        prepare(script, text_file(tmp_path, TEXT), *flags, '--out_dir', tmp_path / 'out', env=env)
        assert files_in(tmp_path / 'out') == ['meta.json', 'train.bin', 'val.bin']


@pytest.mark.slow
@pytest.mark.parametrize('args, said', [
    (['mytext.txt', '--tokenizer=bpe:256'], 'at least 257'), (['mytext.txt', '--tokenizer=bpe:'], 'as in bpe:4096'),
    (['nothing'], 'there is no'), (['.', '--suffix=.py'], '--suffix'), (['a.jsonl', '--key=content'], 'line 1'),
    (['bad.jsonl'], 'line 2 is not JSON'), (['number.jsonl'], 'is no text'), (['empty.txt'], 'too few'),
    (['latin.txt'], 'not UTF-8'), (['deep.jsonl'], 'line 1 is not JSON'), (['mytext.txt', '--num_proc=-1'], 'num_proc'),
    (['bad.parquet'], 'mend that file'), (['mytext.txt', '--tokenizer=word'], 'it may be char, gpt2, bpe:4096, or')])
def test_texts_that_cannot_be_prepared_get_one_line_and_write_nothing(tmp_path, env, args, said):
    text_file(tmp_path, TEXT)
    for name, content in (('a.jsonl', '{"text": "a"}'), ('bad.jsonl', '{"text": "a"}\n{'), ('empty.txt', ''),
                          ('number.jsonl', '{"text": 1}'), ('deep.jsonl', '[' * 100_000), ('bad.parquet', 'garbage')):
        (tmp_path / name).write_text(content)
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9 ' * 9)
    path, *flags = args
    assert said in refuse('text', tmp_path / path, *flags, '--out_dir', tmp_path / 'out', env=env)
    assert not (tmp_path / 'out').exists()

# -----------------------------------------------------------------------------
# openwebtext

def parquet(folder, documents, n_files=3, column='text'):
    """A folder of parquet files with these documents, in order."""
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    pytest.importorskip('datasets')
    folder.mkdir()
    size = -(-len(documents) // n_files)
    for i in range(n_files):
        rows = pa.table({column: pa.array(documents[i*size:(i+1)*size], pa.string())})
        pq.write_table(rows, folder / f'train-{i:05d}.parquet', row_group_size=700)
    return folder


def documents(n):
    return [f'document {i}: ' + 'the weather there\n' * (i % 5) for i in range(n)]


def in_train_test_split_order(folder, encode):
    """What nanoGPT's script makes of the folder with train_test_split of the package datasets: [train ids, val ids]."""
    datasets = pytest.importorskip('datasets')
    dataset = datasets.load_dataset('parquet', data_files=sorted(map(str, folder.glob('*.parquet'))), split='train',
                                    cache_dir=str(folder / 'cache'))
    split = dataset.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    ids = [[i for row in split[name] for i in encode(row['text']) + [EOT]] for name in ('train', 'test')]
    return [np.array(x, np.uint16) for x in ids]


@pytest.mark.slow
def test_openwebtext_order_equals_train_test_split(tmp_path, bpe_env, encode):
    # val gets 3 of the 4001 documents; the characters of the folder's name must not be read as a glob pattern
    folder = parquet(tmp_path / 'in[1]*', documents(4001))
    prepare('openwebtext', folder, '--out_dir', tmp_path / 'out', env=bpe_env)
    train, val, meta = read(tmp_path / 'out')
    plain = folder.rename(tmp_path / 'in')
    train_expected, val_expected = in_train_test_split_order(plain, encode)
    assert np.array_equal(train, train_expected)
    assert np.array_equal(val, val_expected)
    assert np.count_nonzero(train == EOT) == 3998
    assert np.count_nonzero(val == EOT) == 3
    assert (meta['vocab_size'], meta['dtype'], meta['tokenizer']) == (50257, 'uint16', {'kind': 'gpt2'})


@pytest.mark.slow
def test_openwebtext_skips_rows_without_a_text_and_counts_them(tmp_path, bpe_env):
    texts = documents(60)
    with_nulls = [text for pair in zip(texts, [None, 'x'] * 30) for text in pair if text != 'x']
    said = prepare('openwebtext', parquet(tmp_path / 'in', with_nulls, 1), '--out_dir', tmp_path / 'out', env=bpe_env)
    prepare('openwebtext', parquet(tmp_path / 'without', texts, 1), '--out_dir', tmp_path / 'same', env=bpe_env)
    assert 'skipped 30 rows without a text' in said
    for name in ('train.bin', 'val.bin'):
        assert (tmp_path / 'out' / name).read_bytes() == (tmp_path / 'same' / name).read_bytes()


def test_openwebtext_end_of_text_in_a_document_is_not_the_token(tmp_path, bpe_env, encode):
    texts = ['a<|endoftext|>b', 'c<|endoftext|>']
    prepare('openwebtext', parquet(tmp_path / 'in', texts, 1), '--out_dir', tmp_path / 'out', env=bpe_env)
    train, val, _ = read(tmp_path / 'out')
    assert sorted([list(train), list(val)]) == sorted(encode(text) + [EOT] for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize('how', ['SIGKILL', 'SIGINT'])
def test_openwebtext_interrupted_and_continued_gives_the_same_bytes(tmp_path, bpe_env, how):
    if not hasattr(os, 'killpg'):
        pytest.skip('needs POSIX signals')
    folder, out = parquet(tmp_path / 'in', documents(4500)), tmp_path / 'out'
    prepare('openwebtext', folder, '--out_dir', tmp_path / 'whole', env=bpe_env)

    slow = bpe_env | {'SECONDS_PER_DOCUMENT': '0.001'}
    run = subprocess.Popen(
        command('openwebtext', folder, '--out_dir', out, '--num_proc', 2), env=slow, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        lengths = wait_for_documents(out, run)
        if how == 'SIGKILL':
            run.kill() # only the main process: its workers have to notice
        else:
            os.killpg(run.pid, getattr(signal, how)) # Ctrl-C in a terminal reaches all of them
        _, err = run.communicate(timeout=300) # the workers share stderr: returns when they have ended too
    finally:
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if how == 'SIGINT':
        assert (run.returncode, err) == (130, '\ninterrupted; run the same command to continue\n')
    assert files_in(out) == ['lengths.part.bin', 'source.part.json', 'tokens.part.bin']
    done = lengths.stat().st_size // 4
    assert 0 < done < 4500 # it was interrupted in the middle

    # a crash may also leave tokens whose lengths were never written, and an incomplete length
    with open(out / 'tokens.part.bin', 'ab') as f:
        f.write(b'\x07' * 1001)
    with open(lengths, 'ab') as f:
        f.write(b'\x07\x00')
    again = run_to_the_end('openwebtext', folder, '--out_dir', out, env=bpe_env)
    assert again.returncode == 0
    assert again.stderr == f'continuing after {done:,} documents or pieces\n' # it did not start over
    assert snapshot(out) == snapshot(tmp_path / 'whole')


@pytest.mark.slow
def test_openwebtext_interrupted_while_writing_does_not_tokenize_again(tmp_path, bpe_env):
    folder, out = parquet(tmp_path / 'in', documents(3000)), tmp_path / 'out'
    (out / 'val.bin').mkdir(parents=True) # makes pass 2 fail
    (out / 'meta.json').write_text('{"of": "an older data set"}')
    assert 'cannot write' in refuse('openwebtext', folder, '--out_dir', out, env=bpe_env)
    # pass 1; no file of pass 2, and no meta.json
    assert files_in(out) == ['lengths.part.bin', 'source.part.json', 'tokens.part.bin']
    (out / 'val.bin').rmdir()
    prepare('openwebtext', folder, '--out_dir', out, env=bpe_env | {'SECONDS_PER_DOCUMENT': '100'})
    prepare('openwebtext', folder, '--out_dir', tmp_path / 'whole', env=bpe_env)
    assert snapshot(out) == snapshot(tmp_path / 'whole')


@pytest.mark.slow
def test_openwebtext_refuses_to_continue_with_another_source(tmp_path, bpe_env):
    folder, out = parquet(tmp_path / 'in', documents(100)), tmp_path / 'out'
    (out / 'val.bin').mkdir(parents=True)
    refuse('openwebtext', folder, '--out_dir', out, env=bpe_env) # leaves the files of pass 1
    (out / 'val.bin').rmdir()
    before = snapshot(out)
    line = refuse('openwebtext', parquet(tmp_path / 'other', documents(200)), '--out_dir', out, env=bpe_env)
    assert str(folder) in line
    assert 'tokens.part.bin' in line
    assert snapshot(out) == before
    folder.rename(tmp_path / 'moved') # the same files elsewhere are the same source
    prepare('openwebtext', tmp_path / 'moved', '--out_dir', out, env=bpe_env)
    read(out)


@pytest.mark.slow
@pytest.mark.parametrize('n', [0, 1])
def test_openwebtext_needs_two_documents(tmp_path, bpe_env, n):
    line = refuse('openwebtext', parquet(tmp_path / 'in', documents(n), 1), '--out_dir', tmp_path / 'out', env=bpe_env)
    assert 'too few for a train and a val part' in line
    assert files_in(tmp_path / 'out') == []


@pytest.mark.slow
def test_openwebtext_ends_before_a_thread_left_behind_can_abort_it(tmp_path, bpe_env):
    # pyarrow's threads abort the process now and then when the interpreter shuts down; this object always does
    with open(tmp_path / 'shim' / 'sitecustomize.py', 'a') as f:
        f.write("""
import builtins, sys
class Thread:
    def __del__(self, abort=os.abort):
        abort()
if any(arg.endswith('prepare.py') for arg in sys.orig_argv):
    builtins.left_behind = Thread()
""")
    for n, end in ((1, refuse), (50, prepare)):
        end('openwebtext', parquet(tmp_path / str(n), documents(n), 1), '--out_dir', tmp_path / 'out', env=bpe_env)


@pytest.mark.slow
def test_openwebtext_names_the_columns_when_text_is_not_among_them(tmp_path, bpe_env):
    folder = parquet(tmp_path / 'in', documents(5), column='content')
    line = refuse('openwebtext', folder, '--out_dir', tmp_path / 'out', env=bpe_env)
    assert '"text"' in line
    assert 'content' in line
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
def test_openwebtext_damaged_file_gets_one_line_and_keeps_what_is_done(tmp_path, bpe_env):
    folder, out = parquet(tmp_path / 'in', documents(3000)), tmp_path / 'out'
    last = folder / 'train-00002.parquet'
    whole = last.read_bytes()
    last.write_bytes(b'\0' * len(whole))
    line = refuse('openwebtext', folder, '--out_dir', out, env=bpe_env)
    assert '2,000 documents or pieces are done' in line
    last.write_bytes(whole)
    prepare('openwebtext', folder, '--out_dir', out, env=bpe_env)
    prepare('openwebtext', folder, '--out_dir', tmp_path / 'fresh', env=bpe_env)
    assert snapshot(out) == snapshot(tmp_path / 'fresh')


@pytest.mark.slow
def test_openwebtext_that_fails_at_once_leaves_nothing(tmp_path, bpe_env):
    for name, texts, column in (('other', ['one', 'two'], 'body'), ('nulls', [None, None], 'text')):
        folder = parquet(tmp_path / name, texts, 1, column)
        refuse('openwebtext', folder, '--out_dir', tmp_path / 'out', env=bpe_env)
        assert not (tmp_path / 'out').exists() or files_in(tmp_path / 'out') == []


@pytest.mark.slow
@pytest.mark.parametrize('given', [None, 'nothing/here', 'empty', 'mytext.txt'])
def test_openwebtext_without_its_documents_gets_one_line_and_writes_nothing(tmp_path, bpe_env, given):
    pytest.importorskip('datasets')
    text_file(tmp_path, TEXT)
    args = [] if given is None else [tmp_path / given]
    line = refuse('openwebtext', *args, '--out_dir', tmp_path / 'out', env=bpe_env)
    assert 'folder' in line
    assert 'parquet' in line
    assert not (tmp_path / 'out').exists()
