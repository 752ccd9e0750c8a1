"""What data/*/prepare.py promise. Each script runs as a user runs it, in a process of its own, without a network; the
table of mistakes alone is gone through in one.

GPT-2's BPE files would have to be downloaded; a small byte-level BPE replaces them. The scripts get it through a
sitecustomize.py, which Python imports at its start.
"""
import glob
import gzip
import hashlib
import importlib
import json
import os
import pickle
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jax_hub.tokenizers import tokens_digest
from jax_run.data import load_dataset_meta, same_tokens
from tests.common import (
    GOLDEN, INTERRUPTED_PREPARE, ROOT, assert_refused, edit_json, needs_hangup, run_script, succeeded, wait_for)

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
WORDS = ['alpha', ' beta', '.gamma(', ')\n', '    return', '\n\n', '  12345', ' \u00e9t\u00e9', '\U0001f600', '\r\n',
         '\tx', '--']


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


def copied(script, folder):
    """The script, where its folder has no data: in a copy of the repository as far as the script needs it."""
    copy = folder / 'data' / script / 'prepare.py'
    copy.parent.mkdir(parents=True)
    shutil.copy(DATA / script / 'prepare.py', copy)
    for name in ('data/common.py', 'data/reading.py', 'jax_flags.py'):
        shutil.copy(DATA.parent / name, folder / name)
    return copy


def files_in(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*') if p.is_file()) if folder.exists() else []


def read(folder):
    """(train ids, val ids, meta) of a finished data set. It has no other files, and its meta.json agrees with them."""
    tokenizer = [name for name in files_in(folder) if name.startswith('tokenizer/')]
    assert files_in(folder) == ['meta.json', *tokenizer, 'train.bin', 'val.bin']
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    train, val = (np.fromfile(folder / f'{split}.bin', meta['dtype']) for split in ('train', 'val'))
    assert set(meta) - {'row_length', 'bytes', 'token_bytes'} == {
        'format', 'vocab_size', 'dtype', 'tokenizer', 'train_tokens', 'val_tokens', 'max_id', 'digests'}
    assert meta['format'] == 2
    assert meta['digests'] == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
                               for name in ('train.bin', 'val.bin')}
    assert meta['max_id'] == max(train.max(), val.max())
    assert (len(train), len(val)) == (meta['train_tokens'], meta['val_tokens'])
    return train, val, meta


def decoded(folder):
    """(train text, val text) of a data set of characters."""
    train, val, meta = read(folder)
    return tuple(''.join(meta['tokenizer']['chars'][i] for i in ids) for ids in (train, val))


def snapshot(folder):
    return {name: (folder / name).read_bytes() for name in files_in(folder)}


def text_file(tmp_path, text, name='mytext.txt'):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def words(n, seed=0):
    return ''.join(np.random.default_rng(seed).choice(WORDS, n))


def tokenizer_of(folder):
    return Tokenizer.from_file(str(folder / 'tokenizer' / 'tokenizer.json'))


def json_lines(path, texts):
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    return path


def parquet(folder, documents, n_files=3, column='text'):
    """A folder of parquet files with these documents, in order."""
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    pytest.importorskip('datasets')
    folder.mkdir(parents=True)
    size = -(-len(documents) // n_files)
    for i in range(n_files):
        rows = pa.table({column: pa.array(documents[i*size:(i+1)*size], pa.string())})
        pq.write_table(rows, folder / f'train-{i:05d}.parquet', row_group_size=700)
    return folder


def code_base(folder, files):
    for name, content in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


# -----------------------------------------------------------------------------
# the bytes that nanoGPT's scripts write

def test_char_bins_are_what_nanogpt_writes(tmp_path, env):
    prepare('shakespeare_char', text_file(tmp_path, '\ufeff' + TEXT), '--out_dir', tmp_path / 'out', env=env)
    chars = sorted(list(set(TEXT)))  # a byte order mark is no character
    stoi = {ch: i for i, ch in enumerate(chars)}
    n = len(TEXT)
    for split, part in (('train', TEXT[:int(n*0.9)]), ('val', TEXT[int(n*0.9):])):
        ids = np.array([stoi[c] for c in part], dtype=np.uint16)
        assert (tmp_path / 'out' / f'{split}.bin').read_bytes() == ids.tobytes()
    _, _, meta = read(tmp_path / 'out')
    assert (meta['vocab_size'], meta['dtype']) == (len(chars), 'uint16')
    assert meta['tokenizer'] == {'kind': 'char', 'chars': ''.join(chars)}
    assert ''.join(decoded(tmp_path / 'out')).encode() == TEXT.encode()


def test_bpe_bins_are_what_nanogpt_writes(tmp_path, bpe_env, encode):
    prepare('shakespeare', text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'out', env=bpe_env)
    n = len(TEXT)
    for split, part in (('train', TEXT[:int(n*0.9)]), ('val', TEXT[int(n*0.9):])): # characters are split, not tokens
        assert (tmp_path / 'out' / f'{split}.bin').read_bytes() == np.array(encode(part), dtype=np.uint16).tobytes()
    _, _, meta = read(tmp_path / 'out')
    assert (meta['vocab_size'], meta['dtype'], meta['tokenizer']) == (50257, 'uint16', {'kind': 'gpt2'})


def test_a_meta_pkl_of_nanogpt_becomes_a_meta_json(tmp_path):
    assert_refused(run_script('data/convert_meta.py', tmp_path), 'name the folder that has the meta.pkl')
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 2, 'itos': {0: 'a', 1: 'b'}}))
    assert run_script('data/convert_meta.py', tmp_path).returncode == 0
    assert json.loads((tmp_path / 'meta.json').read_text())['tokenizer'] == {'kind': 'char', 'chars': 'ab'}
    for content in (b'', pickle.dumps({'vocab_size': 2}), pickle.dumps([1])):
        (tmp_path / 'meta.pkl').write_bytes(content)
        assert_refused(run_script('data/convert_meta.py', tmp_path), "meta.pkl is not nanoGPT's")


@pytest.mark.slow
def test_a_vocabulary_above_65536_takes_uint32(tmp_path, env):
    text = ''.join(chr(i) for i in range(0x10000, 0x10000 + 65537))
    prepare('shakespeare_char', text_file(tmp_path, text), '--out_dir', tmp_path / 'out', env=env)
    train, val, meta = read(tmp_path / 'out')
    assert (meta['dtype'], meta['vocab_size']) == ('uint32', 65537)
    assert [*train, *val] == list(range(65537))


@pytest.mark.slow
def test_a_missing_input_is_downloaded_once_and_kept_beside_the_script(tmp_path, env):
    copy = copied('shakespeare_char', tmp_path)
    line = refuse(copy, env=env)
    assert 'tinyshakespeare/input.txt' in line and str(copy.with_name('input.txt')) in line
    (tmp_path / 'shim').mkdir()
    (tmp_path / 'shim' / 'sitecustomize.py').write_text(
        'import io, urllib.request\n'
        'def urlopen(url, timeout):\n'
        '    assert url.endswith("/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")\n'
        f'    return io.BytesIO({TEXT.encode()!r})\n'
        'urllib.request.urlopen = urlopen\n')
    online = env | {'PYTHONPATH': str(tmp_path / 'shim')}
    assert '1,003,854 and 111,540' in prepare(copy, '--out_dir', tmp_path / 'out', env=online)
    assert snapshot(copy.parent) == {'prepare.py': copy.read_bytes(), 'input.txt': TEXT.encode()}
    prepare(copy, '--out_dir', tmp_path / 'again', env=env) # offline now
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'again')


def in_train_test_split_order(folder, encode):
    """What nanoGPT's script makes of the folder with train_test_split of the package datasets: [train ids, val ids]."""
    datasets = pytest.importorskip('datasets')
    dataset = datasets.load_dataset('parquet', data_files=sorted(map(str, folder.glob('*.parquet'))), split='train',
                                    cache_dir=str(folder / 'cache'))
    split = dataset.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    ids = [[i for row in split[name] for i in encode(row['text']) + [EOT]] for name in ('train', 'test')]
    return [np.array(x, np.uint16) for x in ids]


@pytest.mark.parametrize('n, num_proc', [(3, 1), pytest.param(4001, 2, marks=pytest.mark.slow)])
def test_openwebtext_is_what_nanogpt_writes(tmp_path, bpe_env, encode, n, num_proc):
    texts = [f'document {i}<|endoftext|>: ' + 'the weather there\n' * (i % 5) for i in range(n)]
    folder = parquet(tmp_path / 'in', ['', *texts[1:]])
    out = tmp_path / 'out'
    prepare('openwebtext', folder, f'--num_proc={num_proc}', '--out_dir', out, env=bpe_env)
    expected = in_train_test_split_order(folder, encode)
    assert [ids.tolist() for ids in read(out)[:2]] == [ids.tolist() for ids in expected]
    before = snapshot(out)
    parquet(tmp_path / 'nulls', [text for pair in zip(['', *texts[1:]], [None] * n) for text in pair], 1)
    said = prepare('openwebtext', tmp_path / 'nulls' / '*.parquet', '--out_dir', out, env=bpe_env)
    assert f'skipped {n:,} rows without a text' in said
    assert snapshot(out) == before


def test_fineweb_has_its_documents_in_order_each_behind_the_end_token(tmp_path, bpe_env, encode):
    texts = [f'document {i}<|endoftext|>: ' + 'the weather there\n' * (i % 5) for i in range(2400)]
    files = sorted(parquet(tmp_path / 'in', texts).iterdir())
    said = prepare('fineweb', *files, '--val_tokens=100', '--out_dir', tmp_path / 'out', env=bpe_env)
    train, val, meta = read(tmp_path / 'out')
    assert [*val, *train] == [i for text in texts for i in [EOT, *encode(text)]]
    assert len(val) == 100 and meta['tokenizer'] == {'kind': 'gpt2'} and 'val has 100 tokens' in said
    prepare('fineweb', *files[::-1], '--val_tokens=100', '--out_dir', tmp_path / 'out', env=bpe_env)
    assert read(tmp_path / 'out')[1].tolist() != val.tolist()  # in the order in which they are named


def test_fineweb_skips_rows_without_a_text_and_says_what_is_left_for_train(tmp_path, bpe_env, encode):
    pyarrow = pytest.importorskip('pyarrow')
    pytest.importorskip('pyarrow.parquet')
    texts = ['the weather there ' * 9, None, 'the weather here ' * 9]
    file = parquet(tmp_path / 'in', texts, n_files=1) / 'train-00000.parquet'
    said = prepare('fineweb', file, '--val_tokens=5', '--out_dir', tmp_path / 'out', env=bpe_env)
    train, val, _ = read(tmp_path / 'out')
    assert [*val, *train] == [i for text in texts if text for i in [EOT, *encode(text)]]
    assert 'skipped 1 rows without a text' in said
    assert 'the first 100,000,000 tokens are for val; give a smaller --val_tokens' in refuse(
        'fineweb', file, '--out_dir', tmp_path / 'none', env=bpe_env)
    assert files_in(tmp_path / 'none') == []
    numbers = tmp_path / 'numbers.parquet'
    pyarrow.parquet.write_table(pyarrow.table({'text': [1, 2]}), numbers)
    assert 'a column "text" of another type, int' in refuse(
        'fineweb', numbers, '--out_dir', tmp_path / 'none', env=bpe_env)


def test_the_files_of_fineweb_are_taken_in_the_order_of_their_names(tmp_path, bpe_env, encode):
    """The order in which a file system lists them is another on another machine."""
    texts = [f'document {i}' for i in range(30)]
    parquet(tmp_path / 'hub' / 'sample' / '10BT', texts)
    (tmp_path / 'shim' / 'sitecustomize.py').write_text(STANDIN + INSTALL + textwrap.dedent(f"""
        import os
        import huggingface_hub
        huggingface_hub.snapshot_download = lambda *args, **options: {str(tmp_path / 'hub')!r}
        listdir = os.listdir
        os.listdir = lambda *args: sorted(listdir(*args), reverse=True)
        """))
    prepare('fineweb', '--val_tokens=7', '--out_dir', tmp_path / 'out', env=bpe_env)
    train, val, _ = read(tmp_path / 'out')
    assert [*val, *train] == [i for text in texts for i in [EOT, *encode(text)]]


def test_openwebtext_takes_a_folder_whose_name_is_a_pattern_with_its_folders(tmp_path, bpe_env, encode):
    texts = [f'document {i}' for i in range(6)]
    folder = parquet(tmp_path / 'in [1]', texts[:3])
    parquet(folder / 'more', texts[3:])
    prepare('openwebtext', folder, '--num_proc=1', '--out_dir', tmp_path / 'out', env=bpe_env)
    train, val, _ = read(tmp_path / 'out')
    assert sorted([*train, *val]) == sorted(i for text in texts for i in [*encode(text), EOT])


# -----------------------------------------------------------------------------
# a user's mistakes

INPUTS = {  # {name: content}
    'mytext.txt': TEXT, 'empty.txt': '', 'ten.txt': '0123456789', 'latin.txt': b'caf\xe9 au lait ' * 9,
    'a.jsonl': '{"text": "a"}', 'bad.jsonl': '{"text": "a"}\n{', 'number.jsonl': '{"text": 1}',
    'a.csv': 'id,body\n1,a\n', 'twice.csv': 'text,text\na,b\n', 'bad.parquet': 'garbage'}
MISTAKES = [  # script, arguments, what is said
    ('shakespeare_char', 'nothing.txt', 'No such file'), ('shakespeare_char', 'empty.txt', 'train has only 0 tokens'),
    ('shakespeare_char', 'ten.txt', 'val has only 1 tokens, too few'), ('shakespeare_char', 'latin.txt', 'in UTF-8'),
    ('shakespeare', 'nothing.txt', 'No such file'), ('shakespeare', 'empty.txt', 'only 0 tokens, too few'),
    ('shakespeare', 'latin.txt', 'in UTF-8'), ('shakespeare', 'mytext.txt --outdir=x', '--outdir'),
    ('shakespeare', 'mytext.txt --tokenizer=bpe:256', 'at least bpe:257'),
    ('pystdlib', 'nothing', 'is not a folder'), ('pystdlib', '.', 'too few Python files'),
    ('text', 'nothing', 'there is no'), ('text', '. --suffix=.rst', 'no file that ends in .rst; name'),
    ('text', 'latin.txt', 'in UTF-8'), ('text', 'empty.txt', 'too few'), ('text', 'ten.txt --num_proc=-1', 'num_proc'),
    ('text', 'mytext.txt --tokenizer=word', 'may be char, gpt2, bpe:4096'), ('text', 'bad.jsonl', 'line 2 is not JSON'),
    ('text', 'a.jsonl --key=content', "line 1 has no 'content', only text; name what is the text with --key"),
    ('text', 'a.csv', "row 1 has no 'text', only id, body"), ('text', 'number.jsonl', "none of 1 rows has a text"),
    ('text', 'twice.csv', 'two columns with the name text'), ('text', 'mytext.txt --out_dir=', 'name a folder'),
    ('text', '/dev/null', 'neither a file nor a folder'),
    ('text', 'number.jsonl --strict=True', 'line 1 has no text under'), ('text', 'bad.parquet', 'cannot read'),
    ('text', 'mytext.txt --tokenizer=char --rows=0', "invalid positive value: '0'"),
    ('text', 'mytext.txt --tokenizer=char --rows=100000', 'do not fill a row of 100001; use fewer --rows or more'),
    ('openwebtext', 'nothing', 'parquet files'), ('openwebtext', 'mytext.txt', 'parquet files'),
    ('openwebtext', '. --tokenizer=bpe:512', 'data/text/prepare.py learns'),
    ('fineweb', 'bad.parquet', 'cannot read')]


@pytest.mark.parametrize('script, args, said', MISTAKES)
def test_a_mistake_gets_one_line_and_writes_nothing(tmp_path, monkeypatch, script, args, said):
    tiktoken = pytest.importorskip('tiktoken')
    exec(STANDIN, names := {})
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: names['standin']())
    for name, content in INPUTS.items():
        text_file(tmp_path, content, name)
    args = [word if word.startswith('-') else tmp_path / word for word in args.split()]
    # in this process: a table of so many would start one for each
    assert_refused(run_script(f'data/{script}/prepare.py', *args, '--out_dir', tmp_path / 'out'), re.escape(said))
    assert not [name for name in files_in(tmp_path / 'out') if '.part.' not in name]


@pytest.mark.parametrize('script, said', [('openwebtext', 'parquet files'), ('fineweb', 'by hand')])
def test_without_a_network_and_without_files_a_line_says_what_to_do(tmp_path, bpe_env, script, said):
    assert said in refuse(script, '--out_dir', tmp_path / 'out', env=bpe_env)
    assert not [name for name in files_in(tmp_path / 'out') if '.part.' not in name]


@pytest.mark.slow
def test_a_column_of_another_name_and_a_single_document_get_one_line(tmp_path, bpe_env):
    other, one = parquet(tmp_path / 'other', ['a', 'b'], column='body'), parquet(tmp_path / 'one', ['a'], 1)
    for script, given, said in (('openwebtext', other, '"text"'), ('openwebtext', one, 'train set will be empty'),
                                ('text', other, "has no 'text', only body"), ('fineweb', other, 'no column "text"')):
        given = [given] if script != 'fineweb' else sorted(given.iterdir())
        assert said in refuse(script, *given, '--out_dir', tmp_path / 'out', env=bpe_env)
        assert not [name for name in files_in(tmp_path / 'out') if '.part.' not in name]


def test_without_the_bpe_files_the_error_says_where_to_put_them(tmp_path, env):
    pytest.importorskip('tiktoken')
    line = refuse('shakespeare', text_file(tmp_path, TEXT), '--out_dir', tmp_path / 'out', env=env)
    assert 'data/shakespeare/readme.md' in line and 'TIKTOKEN_CACHE_DIR' in line
    readme = (DATA / 'shakespeare' / 'readme.md').read_text()
    for name in ('encoder.json', 'vocab.bpe'): # tiktoken's cache calls a file by the sha1 of its URL
        url = f'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}'
        assert url.rpartition('/')[0] in readme
        assert f'| {name} | {hashlib.sha1(url.encode()).hexdigest()} |' in readme
    assert not (tmp_path / 'out').exists()


def test_a_folder_that_cannot_be_written_gets_one_line_and_keeps_no_half_data_set(tmp_path, env):
    path = text_file(tmp_path, TEXT)
    for script in ('text', 'shakespeare_char'):
        flags = ['--tokenizer=char'] if script == 'text' else []
        assert 'Not a directory' in refuse(script, path, *flags, '--out_dir', path / 'out', env=env)
        out = tmp_path / script
        (out / 'val.bin').mkdir(parents=True) # makes writing it fail
        (out / 'train.bin').write_bytes(b'of an older data set')
        assert 'val.bin' in refuse(script, path, *flags, '--out_dir', out, env=env)
        assert not (out / 'train.bin').exists()
        (out / 'val.bin').rmdir()
        prepare(script, path, *flags, '--out_dir', out, env=env)
        read(out)


def test_files_of_others_are_kept(tmp_path, env):
    text = text_file(tmp_path, TEXT)
    out = tmp_path / 'out'
    (out / 'ckpt').mkdir(parents=True)
    for script in ('text', 'shakespeare_char'):
        assert 'is the folder of a run, which would lose its tokenizer' in refuse(
            script, text, '--out_dir', out, env=env)
    (out / 'ckpt').rmdir()
    (out / 'tokenizer').mkdir()
    for name in ('my_vocab.json', 'tokenizer.json'):
        (out / 'tokenizer' / name).write_text('{}')
    prepare('text', text, '--tokenizer=char', '--out_dir', out, env=env)
    assert files_in(out) == ['meta.json', 'tokenizer/my_vocab.json', 'train.bin', 'val.bin']


def test_a_folder_is_locked_until_its_data_set_is_whole(tmp_path, env, bpe_env):
    fcntl = pytest.importorskip('fcntl')
    out = tmp_path / 'out'
    out.mkdir()
    text = text_file(tmp_path, TEXT)
    assert 'out_dir=gs://bucket/mine is not on this disk' in refuse('text', text, '--out_dir=gs://bucket/mine', env=env)
    lock = os.open(out, os.O_RDONLY)  # as prepare.py does until it has renamed the last file
    fcntl.flock(lock, fcntl.LOCK_EX)
    for script in ('text', 'shakespeare_char'):
        assert 'another process prepares a data set in' in refuse(script, text, '--out_dir', out, env=env)
    files = parquet(tmp_path / 'in', ['the weather there'] * 9, 1)
    for script, given in (('openwebtext', files), ('fineweb', files / 'train-00000.parquet')):
        assert 'another process prepares a data set in' in refuse(script, given, '--out_dir', out, env=bpe_env)
    row = {'messages': [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'cd'}]}
    (tmp_path / 'chats.jsonl').write_text(f'{json.dumps(row)}\n' * 9)
    chats = run_script(
        'data/chat/prepare.py', tmp_path / 'chats.jsonl', f'--tokenizer={GOLDEN / "letters"}', f'--out_dir={out}')
    assert_refused(chats, 'another process prepares a data set in')
    os.close(lock)
    code = """
import os, runpy, sys
sys.path[:0] = [os.path.dirname(os.path.dirname(sys.argv[1]))]
import common, jax_flags
finish = common.count_tokens
def count_tokens(*args):  # after the last token is written
    lock = os.open(sys.argv[-1], os.O_RDONLY)
    print('locked' if not jax_flags.lock_file(lock) else 'free')
    os.close(lock)
    return finish(*args)
common.count_tokens = count_tokens
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""
    python, *arguments = command('text', text, '--tokenizer=char', '--out_dir', out)
    done = subprocess.run([python, '-c', code, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[:2] == ['locked'] * 2, done.stderr + done.stdout


@pytest.mark.parametrize('model', [models.WordLevel({'[UNK]': 0, 'a': 1, 'b': 2, '</s>': 3}, '[UNK]'),
                                   models.Unigram([('<unk>', 0.0), ('a', -1.0), ('b', -1.0), ('</s>', -9.0)], 0)])
def test_characters_that_a_tokenizer_does_not_know_are_counted(tmp_path, env, model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
    flags = '--tokenizer', tmp_path, '--out_dir', tmp_path / 'out'
    assert 'does not know' not in prepare('text', text_file(tmp_path, 'abab' * 20), *flags, env=env)
    said = prepare('text', text_file(tmp_path, 'abxab' * 20), *flags, env=env)
    assert '20 tokens stand for characters that the tokenizer does not know, which are lost' in said


@pytest.mark.parametrize('options, words, is_said', [
    ({}, pre_tokenizers.Whitespace(), True), ({}, pre_tokenizers.ByteLevel(), False),
    ({'unk_token': '[UNK]'}, pre_tokenizers.Whitespace(), False),
    ({'byte_fallback': True}, pre_tokenizers.Whitespace(), False)])
def test_a_tokenizer_that_can_leave_out_characters_is_named(tmp_path, env, options, words, is_said):
    tokenizer = Tokenizer(models.BPE({'[UNK]': 0, 'a': 1, 'b': 2, '</s>': 3}, [], **options))
    tokenizer.pre_tokenizer = words
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
    said = prepare('text', text_file(tmp_path, 'abab' * 20), '--tokenizer', tmp_path, '--out_dir', tmp_path / 'out',
                   env=env)
    assert ('leaves out characters' in said) == is_said


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # else a folder of the name ~ would stay in the checkout
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'a.txt').write_text('abcd' * 50)
    for flags in (('--tokenizer=char', '--out_dir=~/data'), ('--tokenizer=~/data', '--out_dir=~/more')):
        succeeded(run_script('data/text/prepare.py', tmp_path / 'a.txt', *flags))
    assert (tmp_path / 'data' / 'train.bin').exists() and (tmp_path / 'more' / 'train.bin').exists()


def test_a_file_that_is_named_twice_is_read_once(tmp_path, env):
    folder = tmp_path / 'in'
    folder.mkdir()
    files = [text_file(folder, letter * 200, f'{letter}.txt') for letter in 'ab']
    (folder / 'link.txt').symlink_to(files[0])
    done = run_to_the_end('text', folder, *files, '--tokenizer=char', '--out_dir', tmp_path / 'out', env=env)
    assert 'read 2 documents of 2 files, 400 bytes' in done.stdout
    assert decoded(tmp_path / 'out')[0].startswith('a' * 180)  # in the order of their names
    assert done.stderr == '3 files are named more than once, and read once\n'


def test_the_masks_and_templates_of_an_older_data_set_are_removed(tmp_path, env):
    (tmp_path / 'out/tokenizer/additional_chat_templates').mkdir(parents=True)
    for name in ('train_mask.bin', 'val_mask.bin', 'train_ends.bin', 'val_ends.bin', 'tokenizer/chat_template.jinja',
                 'tokenizer/additional_chat_templates/rag.jinja'):
        (tmp_path / 'out' / name).write_bytes(b'1')
    prepare('text', text_file(tmp_path, TEXT), '--tokenizer=char', '--out_dir', tmp_path / 'out', env=env)
    assert files_in(tmp_path / 'out') == ['meta.json', 'train.bin', 'val.bin']


def test_characters_of_a_data_set_or_a_run_are_used_again(tmp_path, env):
    texts = 'abcd' * 9, 'dcba' * 9, 'abX'
    first, more, other = (text_file(tmp_path, text, f'{i}.txt') for i, text in enumerate(texts))
    prepare('text', first, '--tokenizer=char', '--out_dir', tmp_path / 'first', env=env)
    prepare('text', more, '--tokenizer', tmp_path / 'first', '--out_dir', tmp_path / 'more', env=env)
    assert decoded(tmp_path / 'more')[0].startswith('dcba')
    metas = [load_dataset_meta(tmp_path / name) for name in ('first', 'more')]
    assert metas[0]['tokenizer'] == metas[1]['tokenizer']
    said = refuse('text', other, '--tokenizer', tmp_path / 'first', '--out_dir', tmp_path / 'other', env=env)
    assert "the vocabulary has no character 'X'" in said


def test_the_unfinished_data_set_of_another_script_is_removed_first(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DATA)
    common = importlib.import_module('common')
    for name in common.PARTS:  # with its log, data/text would continue in files of this script
        (tmp_path / name).write_bytes(b'1')
    with common.locked_folder(tmp_path):
        assert files_in(tmp_path) == sorted(common.PARTS)
    with common.locked_folder(tmp_path, is_emptied=True):
        assert files_in(tmp_path) == []


def test_a_closed_stdout_ends_a_script_quietly_with_its_data_set(tmp_path, env):
    args = 'text', text_file(tmp_path, TEXT), '--tokenizer=char', '--out_dir', tmp_path / 'out'
    reader, writer = os.pipe()
    os.close(reader) # as head has done after its last line
    done = subprocess.run(command(*args), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, env=env)
    os.close(writer)
    assert done.stderr == ''
    read(tmp_path / 'out')


def test_a_closed_stderr_does_not_end_a_script(tmp_path, env):
    args = command('text', text_file(tmp_path, TEXT), '--tokenizer=char', '--out_dir', tmp_path / 'out')
    subprocess.run(f'{shlex.join(map(str, args))} 2>&-', shell=True, check=True, timeout=300, env=env)
    read(tmp_path / 'out')


# -----------------------------------------------------------------------------
# the standard library

def parts(text):
    """The data set's text -> {file: content}, in order."""
    pieces = text.split('# ---- ')
    assert pieces[0] == ''
    return dict(piece.split('\n', 1) for piece in pieces[1:])


@pytest.mark.slow
@pytest.mark.long
def test_pystdlib_is_megabytes_of_the_librarys_files(tmp_path):
    said = prepare('pystdlib_char', '--out_dir', tmp_path / 'a', env=None)
    train_ids, val_ids, meta = read(tmp_path / 'a')
    assert f'{len(train_ids):,}' in said and sys.version.split()[0] in said
    assert len(train_ids) + len(val_ids) > 2_000_000
    assert 0.1 <= len(val_ids) / (len(train_ids) + len(val_ids)) < 0.2
    train, val = (parts(text) for text in decoded(tmp_path / 'a'))
    assert not set(train) & set(val)
    assert (train | val)['json/decoder.py'] == Path(json.decoder.__file__).read_text()
    assert not [name for name in train | val if {'site-packages', 'test', 'encodings'} & set(name.split('/'))]
    assert 'vocab size: 2,048' in prepare('pystdlib', '--out_dir', tmp_path / 'bpe', env=None)
    tokenizer = tokenizer_of(tmp_path / 'bpe')
    assert tuple(tokenizer.decode(ids) for ids in read(tmp_path / 'bpe')[:2]) == decoded(tmp_path / 'a')


def test_pystdlib_takes_plain_code_in_an_order_that_does_not_depend_on_the_file_system(tmp_path, env):
    good = [(f'pkg{i % 3}/mod{i}.py', b'x = %d\n' % i * 20) for i in range(40)]
    bad = [('tab.py', b'if x:\n\ty\n'), ('cr.py', b'a\rb\n'), ('accent.py', '\u00e9 = 1\n'.encode()), ('empty.py', b''),
           ('notes.txt', b'text\n'), ('_sysconfigdata__linux.py', b'x = 1\n'), ('test/a.py', b'a\n')]
    last = [('windows.py', b'a = 1\r\nb = 2\r\n'), ('unfinished.py', b'a = 1')]
    for name, files in (('up', good + bad + last), ('down', (good + bad + last)[::-1])):
        said = prepare('pystdlib_char', code_base(tmp_path / 'in' / name, files), '--out_dir', tmp_path / name, env=env)
        assert 'left out 3 files with other characters than printable ASCII' in said
    assert snapshot(tmp_path / 'up') == snapshot(tmp_path / 'down')
    train, val = decoded(tmp_path / 'up')
    assert parts(train + val) == {name: content.decode() for name, content in good} | {
        'windows.py': 'a = 1\nb = 2\n', 'unfinished.py': 'a = 1\n'}
    names = list(parts(train + val))
    assert names == sorted(names, key=lambda name: hashlib.sha1(name.encode()).hexdigest())
    first_of_val = f'# ---- {next(iter(parts(val)))}\n' + next(iter(parts(val).values()))
    assert len(train) <= 0.9 * len(train + val) < len(train + first_of_val) # one more file would be too many


# -----------------------------------------------------------------------------
# a vocabulary of one's own

def test_an_own_vocabulary_has_the_tokens_asked_for_and_every_string_survives(tmp_path, env):
    texts = [text_file(tmp_path, words(3000), f'{i}.txt') for i in range(3)]
    for threads in (1, 3):  # on which nothing depends
        prepare('text', *texts, '--tokenizer=bpe:300', f'--num_proc={threads}', '--out_dir', tmp_path / str(threads),
                env=env)
    assert snapshot(tmp_path / '1') == snapshot(tmp_path / '3')
    train, val, meta = read(tmp_path / '3')
    assert (meta['vocab_size'], meta['dtype']) == (300, 'uint16')
    own = Tokenizer.from_file(str(tmp_path / '3' / 'tokenizer' / 'tokenizer.json'))
    assert meta['tokenizer'] == {'kind': 'folder', 'path': 'tokenizer', 'digest': tokens_digest(own)}
    tokenizer = tokenizer_of(tmp_path / '3')
    n = int(len(words(3000))*0.9)
    for ids, part in ((train, words(3000)[:n]), (val, words(3000)[n:])):
        assert tokenizer.decode(ids, skip_special_tokens=False) == (part + '<|endoftext|>') * 3
    for text in ('', ' ', '\u4e16 \u0301\u2028\x85\x00\ufeff', ''.join(map(chr, range(0xd800))), '<|endoftext|'):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize('n_parts, n_more, step', [(1, 1, 1), (1, 0, 2), (2, 0, 3)])
def test_of_a_large_input_a_vocabulary_learns_from_every_second_or_third_document_of_train(
        tmp_path, monkeypatch, n_parts, n_more, step):
    monkeypatch.setattr(sys, 'path', [*sys.path])
    path = json_lines(tmp_path / 'a.jsonl', [f'document {i}' for i in range(40)])
    Texts = runpy.run_path(str(DATA / 'text' / 'prepare.py'))['Texts']
    Texts.train_texts.__globals__['BPE_BYTES'] = path.stat().st_size // n_parts + n_more
    train = [f'document {i}' for i in range(40) if i % 10 != 9]
    assert list(Texts([str(path)], 'text', False).train_texts()) == train[::step]


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


def test_an_own_vocabulary_knows_nothing_of_the_val_part(tmp_path, env):
    for name, end in (('a', 'alpha '), ('b', 'omega ')):
        text = text_file(tmp_path, 'beta gamma ' * 900 + end * 90)
        prepare('text', text, '--tokenizer=bpe:300', '--out_dir', tmp_path / name, env=env)
    a, b = (snapshot(tmp_path / name) for name in 'ab')
    assert a.pop('val.bin') != b.pop('val.bin')
    del a['meta.json'], b['meta.json'] # val_tokens
    assert a == b


@pytest.mark.slow
def test_a_vocabulary_can_be_used_again_also_into_its_own_folder(tmp_path, env):
    text, out, again = text_file(tmp_path, words(3000)), tmp_path / 'out', tmp_path / 'again'
    prepare('text', text, '--tokenizer=bpe:300', '--out_dir', out, env=env)
    padded = Tokenizer.from_file(str(out / 'tokenizer' / 'tokenizer.json'))
    padded.enable_truncation(2)
    padded.enable_padding(length=99)
    padded.save(str(out / 'tokenizer' / 'tokenizer.json')) # no data set is padded
    for script in ('text', 'shakespeare'):
        prepare(script, text, f'--tokenizer={out / "tokenizer"}', '--out_dir', again, env=env)
        assert [a.tolist() for a in read(again)[:2]] == [a.tolist() for a in read(out)[:2]]
        assert files_in(again / 'tokenizer') == ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    before = snapshot(again)
    prepare('text', text, f'--tokenizer={again / "tokenizer"}', '--out_dir', again, env=env)
    assert snapshot(again) == before
    (tmp_path / 'grown').mkdir()
    text_file(tmp_path / 'grown', words(3000) + 'zebras' * 500)
    prepare('text', tmp_path / 'grown', f'--tokenizer={out / "tokenizer"}', '--out_dir', tmp_path / 'more', env=env)
    first, more = load_dataset_meta(out), load_dataset_meta(tmp_path / 'more')
    assert same_tokens(first['tokenizer'], more['tokenizer'])  # what a resumed run asks for


# -----------------------------------------------------------------------------
# texts of any form

@pytest.mark.parametrize('n, val', [(19, 'abcdefghijklmnopqrs'), (20, 'j' * 10 + 't' * 10)])
def test_below_twenty_documents_each_has_a_part_in_val(tmp_path, n, val):
    path = json_lines(tmp_path / 'a.jsonl', [letter * 10 for letter in 'abcdefghijklmnopqrst'[:n]])
    succeeded(run_script('data/text/prepare.py', path, '--tokenizer=char', f'--out_dir={tmp_path / "out"}'))
    assert decoded(tmp_path / 'out')[1] == val


def test_to_choose_settings_the_end_of_train_takes_the_place_of_val(tmp_path):
    path = text_file(tmp_path, 'a' * 81 + 'b' * 9 + 'c' * 10)
    for flags, parts in (([], ('a' * 81 + 'b' * 9, 'c' * 10)), (['--tune'], ('a' * 81, 'b' * 9))):
        succeeded(run_script(
            'data/shakespeare_bpe/prepare.py', path, '--tokenizer=char', f'--out_dir={tmp_path / "out"}', *flags))
        assert decoded(tmp_path / 'out') == parts
        assert read(tmp_path / 'out')[2]['tokenizer']['chars'] == ''.join(sorted(set(''.join(parts))))


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
        text_file(tmp_path / 'files', text, f'{"deeper/" * (i > 12)}{i:02}.{"md" if i % 2 else "TXT"}')
    (tmp_path / 'files' / '.hidden').mkdir()
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'files' / 'link').symlink_to(tmp_path / 'elsewhere')
    for name in ('other.py', '.hidden/a.md', 'link/a.md'):
        (tmp_path / 'files' / name).write_text('not asked for')
    lines = [json.dumps({'id': 1, 'content': text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    text_file(tmp_path, '\ufeff' + '\r\n'.join([*lines[:9], '', *lines[9:]]), 'lines.jsonlines')
    parquet(tmp_path / 'rows', texts, column='content')
    expected = [sum((encode(text) + [EOT] for i, text in enumerate(texts) if (i % 10 == 9) == is_val), [])
                for is_val in (False, True)]
    for given in ('files', 'lines.jsonlines', 'rows'):
        prepare('text', tmp_path / given, '--key=content', '--tokenizer=gpt2', '--out_dir', tmp_path / 'out',
                env=bpe_env)
        assert [ids.tolist() for ids in read(tmp_path / 'out')[:2]] == expected


def test_rows_without_a_text_are_skipped_and_counted(tmp_path, env):
    rows = [{'text': 'one row\n'}, {'text': None}, {'id': 4}, {'text': ['a']}, {'text': ''}, 5, 'half \ud83d\n',
            {'text': 'the last row\n'}]
    text_file(tmp_path, ''.join(json.dumps(row) + '\n' for row in rows), 'a.jsonl')
    text_file(tmp_path, json.dumps(rows, indent=2), 'a.json')
    text_file(tmp_path, 'text,id\n"one row\n",1\ntoo,many,fields\n2\n"half \ufffd\n",2\n,\n"the last row\n",\n',
              'a.csv')
    for name, n, where in (('a.jsonl', 5, 'line 2'), ('a.json', 5, 'row 2'), ('a.csv', 3, 'row 2')):
        said = prepare('text', tmp_path / name, '--tokenizer=char', '--out_dir', tmp_path / 'out', env=env)
        assert sorted(''.join(decoded(tmp_path / 'out'))) == sorted('one row\nhalf \ufffd\nthe last row\n')
        n_bytes = len('one row\nhalf \ufffd\nthe last row\n'.encode())
        assert said.startswith(f'read 3 documents of 1 files, {n_bytes} bytes\nskipped {n} rows without a text; ')
        line = refuse('text', tmp_path / name, '--strict', '--out_dir', tmp_path / 'strict', env=env)
        fields = 'another number of fields than the header (quote texts that have commas)'
        reason = fields if name == 'a.csv' else "no text under 'text'"
        assert f'{name}, {where} has {reason}; mend it' in line
        assert (f'\n2 of them have {fields}\n' in said) == (name == 'a.csv')


def test_rows_and_files_without_a_text_do_not_count_for_every_tenth_document(tmp_path, env):
    texts = [f'document {i}\n' for i in range(40)]
    empty = [text for each in texts for text in (each, '')]
    text_file(tmp_path, ''.join(json.dumps({'text': text}) + '\n' for text in empty), 'a.jsonl')
    text_file(tmp_path, 'id,text\n' + ''.join(f'1,"{text}"\n' for text in empty), 'a.csv')
    (tmp_path / 'files').mkdir()
    for i, text in enumerate(empty):
        text_file(tmp_path, text, f'files/{i:03}.txt')
    for name in ('a.jsonl', 'a.csv', 'files'):
        prepare('text', tmp_path / name, '--tokenizer=char', '--out_dir', tmp_path / 'out', env=env)
        assert decoded(tmp_path / 'out')[1] == ''.join(texts[9::10])


def test_rows_of_which_none_has_a_text_are_refused(tmp_path, env):
    text_file(tmp_path, ''.join(json.dumps({'text': i}) + '\n' for i in range(30)), 'a.jsonl')
    line = refuse('text', tmp_path / 'a.jsonl', '--out_dir', tmp_path / 'out', env=env)
    assert "none of 30 rows has a text under 'text' that is not empty; --strict names the first such row" in line


def test_a_file_whose_first_row_lacks_the_key_is_refused_also_behind_a_file_that_has_it(tmp_path, env):
    json_lines(tmp_path / 'a.jsonl', ['one row\n'] * 30)
    text_file(tmp_path, '{"body": "another row"}\n', 'b.jsonl')
    line = refuse('text', tmp_path / 'a.jsonl', tmp_path / 'b.jsonl', '--out_dir', tmp_path / 'out', env=env)
    assert "b.jsonl, line 1 has no 'text', only body; name what is the text with --key" in line


def test_documents_with_nul_characters_are_counted(tmp_path, env):
    (tmp_path / 'utf16.txt').write_bytes(('the weather there ' * 30).encode('utf-16-le'))
    (tmp_path / 'utf8.txt').write_text('the weather here ' * 30)
    said = prepare('text', tmp_path / 'utf16.txt', tmp_path / 'utf8.txt', '--tokenizer=char',
                   '--out_dir', tmp_path / 'out', env=env)
    assert '\n1 documents have NUL characters: are they texts in UTF-8?\n' in said
    said = prepare('text', tmp_path / 'utf8.txt', '--tokenizer=char', '--out_dir', tmp_path / 'out', env=env)
    assert 'NUL' not in said


def test_with_an_empty_key_files_of_rows_are_texts(tmp_path, env):
    text_file(tmp_path, 'id,body\n1,"one, two"\n2,"three"\n', 'a.csv')
    prepare('text', tmp_path / 'a.csv', '--tokenizer=char', '--key=', '--out_dir', tmp_path / 'out', env=env)
    assert ''.join(decoded(tmp_path / 'out')) == 'id,body\n1,"one, two"\n2,"three"\n'


@pytest.mark.slow
@pytest.mark.long
def test_a_long_text_has_the_ids_that_it_has_as_a_whole(tmp_path, bpe_env, encode):
    text = words(700_000) # more than two pieces
    path = text_file(tmp_path, text)
    prepare('text', path, '--tokenizer=gpt2', '--out_dir', tmp_path / 'a', env=bpe_env)
    prepare('text', path, '--tokenizer=bpe:400', '--out_dir', tmp_path / 'b', env=bpe_env)
    part = text[:int(len(text)*0.9)]
    assert len(part) > 2**21
    assert read(tmp_path / 'a')[0].tolist() == encode(part) + [EOT]
    assert read(tmp_path / 'b')[0].tolist() == tokenizer_of(tmp_path / 'b').encode(part + '<|endoftext|>').ids


def test_a_piece_of_a_text_ends_where_a_line_or_a_word_begins(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(DATA), *sys.path])
    cut = importlib.import_module('common').cut
    for text, ends in (('ab\n  cd\nef gh', ('ab\n  cd\n', 'ef gh')), ('ab cd  ef ghi', ('ab cd  ef', ' ghi')),
                       ('abcd\n  ef gh', ('abcd\n  ef', ' gh')), ('abcd \nef gh', ('abcd \nef', ' gh')),
                       ('abcdefghijkl', ('abcdefghij', 'kl')), ('ab\n\n', ('ab\n\n',))):
        for n in (1, 3, 99):
            blocks = [text[i:i + n] for i in range(0, len(text), n)]
            assert list(cut(blocks, 10)) == [*((piece, False) for piece in ends[:-1]), (ends[-1], True)]


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
    path, out = json_lines(tmp_path / 'a.jsonl', texts), tmp_path / 'out'
    said = prepare('text', path, '--tokenizer=char', f'--rows={block_size}', '--out_dir', out, env=env)
    train, val, meta = read(out)
    assert meta['row_length'] == block_size + 1
    for ids, is_val in ((train, False), (val, True)):
        documents = [text for i, text in enumerate(texts) if (i % 10 == 9) == is_val]
        rows = [''.join(meta['tokenizer']['chars'][i] for i in row) for row in ids.reshape(-1, block_size + 1)]
        expected, n_cropped = in_rows(documents, block_size + 1)
        assert all(row.startswith('<') for row in rows)
        if n < 1000:  # no two documents have the same length
            assert rows == expected
        assert sorted(map(len, rows)) == sorted(map(len, expected))
        share = n_cropped / sum(map(len, documents))
        assert f'{len(expected):,} rows of {block_size + 1} tokens; {share:.1%} of the tokens are cropped\n' in said


def test_pystdlib_and_openwebtext_come_in_rows_too(tmp_path, bpe_env):
    code = code_base(tmp_path / 'code', [(f'{name}.py', b'a = 1\n') for name in 'abcdefghijklmnopqrst'])
    documents = parquet(tmp_path / 'documents', [f'#{i}' + 'the ' * i for i in range(40)])
    for script, given in (('pystdlib', code), ('openwebtext', documents)):
        prepare(script, given, '--tokenizer=gpt2', '--rows=20', '--out_dir', tmp_path / 'out', env=bpe_env)
        train, _, meta = read(tmp_path / 'out')
        assert meta['row_length'] == 21
        assert set(train.reshape(-1, 21)[:, 0]) == {ord('#')}


def test_compressed_files_of_a_folder_are_read_unless_their_content_is_beside_them(tmp_path, env):
    folder = tmp_path / 'in'
    folder.mkdir()
    for name, letter in (('a.txt', 'a'), ('b.txt', 'b')):
        text_file(folder, letter * 100, name)
        with gzip.open(folder / f'{name}.GZ', 'wt') as file:
            file.write(letter * 100)
    (folder / 'b.txt').unlink()
    for suffixes in ([], ['--suffix=.md, .txt']):
        said = prepare('text', folder, '--tokenizer=char', *suffixes, '--out_dir', tmp_path / 'out', env=env)
        assert 'read 2 documents of 2 files, 200 bytes' in said


# -----------------------------------------------------------------------------
# interrupted

@pytest.fixture
def slow(tmp_path, bpe_env):
    """(the arguments of a run on 60 texts that takes 6 s, the data set that it makes)."""
    (tmp_path / 'in').mkdir()
    for i in range(60):
        text_file(tmp_path / 'in', words(40_000, seed=i % 3), f'{i:03}.txt')
    args = 'text', tmp_path / 'in', '--tokenizer=gpt2', '--num_proc=2', '--out_dir'
    prepare(*args, tmp_path / 'whole', env=bpe_env)
    return [*args, tmp_path / 'out'], snapshot(tmp_path / 'whole')


def start(args, env):
    """Starts a run, and waits until it has saved its first documents; returns the process."""
    out = args[-1]
    run = subprocess.Popen(command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                           env=env | {'SECONDS_PER_DOCUMENT': '0.2'})
    lengths = out / 'lengths.part.bin'
    wait_for('documents', lambda: lengths.exists() and lengths.stat().st_size, run)
    assert run.poll() is None, 'the script ended before it was interrupted'
    return run


WORK = ['lengths.part.bin', 'source.part.json', 'train.part.bin', 'val.part.bin']


def assert_lengths_are_those_of_the_tokens(said):
    train, val, of_lengths = [int(n.replace(',', '')) for n in re.findall('([0-9,]+) tokens', said)]
    assert train + val == of_lengths


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_bytes(slow, bpe_env):
    args, expected = slow
    out = args[-1]
    run = start(args, bpe_env)
    assert 'another process prepares' in refuse(*args, env=bpe_env) # as a new run would, too
    run.kill()
    run.communicate()
    assert files_in(out) == WORK
    done = (out / 'lengths.part.bin').stat().st_size // 4
    assert 0 < done < 60
    for name in WORK[:1] + WORK[2:]:  # a crash may leave tokens without their length, and a part of a length
        with open(out / name, 'ab') as file:
            file.write(b'\x07')
    again = run_to_the_end(*args, env=bpe_env)
    assert (again.returncode, again.stderr) == (0, f'continuing after {done} documents or pieces\n')
    assert snapshot(out) == expected
    assert_lengths_are_those_of_the_tokens(again.stdout)  # they make the rows of --rows


@pytest.mark.slow
@pytest.mark.parametrize('change', ['tokens are gone', 'another key', 'a text was written again', 'another version'])
def test_work_that_is_no_longer_right_is_done_again(slow, bpe_env, change):
    args, expected = slow
    out = args[-1]
    run = start([*args[:2], *(['--key=content'] if change == 'another key' else []), *args[2:]], bpe_env)
    run.kill()
    run.communicate()
    if change == 'tokens are gone':
        os.truncate(out / 'train.part.bin', 100)
    if change == 'a text was written again':
        os.utime(args[1] / '000.txt')
    if change == 'another version':
        edit_json(out / 'source.part.json', pieces=None)
    again = run_to_the_end(*args, env=bpe_env)
    assert (again.returncode, again.stderr) == (0, '')
    assert snapshot(out) == expected
    assert_lengths_are_those_of_the_tokens(again.stdout)


def test_work_with_another_vocabulary_is_done_again(tmp_path, env):
    text = text_file(tmp_path, words(20_000, seed=1), 'a.txt')
    other = text_file(tmp_path, words(20_000, seed=2)[::-1], 'b.txt')
    for name in (text, other):
        prepare('text', name, '--tokenizer=bpe:300', '--out_dir', f'{name}_data', env=env)
    shutil.copytree(f'{text}_data/tokenizer', tmp_path / 'model')
    args = 'text', text, f'--tokenizer={tmp_path / "model"}', '--out_dir'
    python, script, *flags = command(*args, tmp_path / 'out')
    assert subprocess.run([python, '-c', INTERRUPTED_PREPARE, script, *flags], env=env).returncode == 3
    assert (tmp_path / 'out' / 'lengths.part.bin').stat().st_size
    shutil.copytree(f'{other}_data/tokenizer', tmp_path / 'model', dirs_exist_ok=True)
    for out in ('out', 'anew'):
        prepare(*args, tmp_path / out, env=env)
    assert snapshot(tmp_path / 'out') == snapshot(tmp_path / 'anew')


@pytest.mark.parametrize('name, code', [
    ('SIGINT', 130), ('SIGTERM', 143), pytest.param('SIGHUP', 129, marks=needs_hangup)])
def test_a_signal_ends_a_preparation_in_one_line_and_it_continues(slow, bpe_env, name, code):
    args, expected = slow
    run = start(args, bpe_env)
    run.send_signal(getattr(signal, name))
    assert run.communicate(timeout=300)[1] == '\ninterrupted; run the same command again\n'
    assert run.returncode == code and files_in(args[-1]) == WORK
    prepare(*args, env=bpe_env)
    assert snapshot(args[-1]) == expected


def test_a_library_that_fails_as_it_tidies_up_after_a_signal_prints_nothing(bpe_env):
    code = f"""
import os, signal, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'data')!r}]
import common
common.end_at_signals()
def results():  # as those of datasets' processes
    try:
        yield 1
    finally:
        raise TimeoutError
running = results()
next(running)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
    run = subprocess.run([sys.executable, '-c', code], env=bpe_env, stderr=subprocess.PIPE, text=True)
    assert run.stderr == '\ninterrupted; run the same command again\n' and run.returncode == 130


@pytest.mark.slow
def test_openwebtext_interrupted_is_one_line_and_the_same_command_does_it(tmp_path, bpe_env):
    folder, out = parquet(tmp_path / 'in', [f'document {i}' for i in range(4000)]), tmp_path / 'out'
    args = 'openwebtext', folder, '--num_proc=2', '--out_dir', out
    run = subprocess.Popen(command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                           env=bpe_env | {'SECONDS_PER_DOCUMENT': '0.005'}, start_new_session=True)
    wait_for('the tokenizing', lambda: len(glob.glob(f'{tmp_path}/hf/**/tmp*', recursive=True)) >= 2, run)
    os.killpg(run.pid, signal.SIGINT) # Ctrl-C in a terminal reaches all processes
    assert run.communicate(timeout=300)[1] == '\ninterrupted; run the same command again\n'
    assert run.returncode == 130 and files_in(out) == []
    prepare(*args, env=bpe_env)
    read(out)


def test_pieces_of_a_text_have_gpt2s_tokens_of_the_whole(monkeypatch):
    import tiktoken
    try:
        encode = tiktoken.get_encoding('gpt2').encode_ordinary
    except Exception:
        pytest.skip("needs the files of GPT-2's BPE")
    monkeypatch.syspath_prepend(DATA)
    cut = importlib.import_module('common').cut
    text = ''.join(f'A line of words {i}.' + ('\n\n', ' \n', '\n', '  two', '\t\n\n')[i % 5] for i in range(400))
    for size in (50, 120, 1000):
        pieces = [piece for piece, _ in cut([text], size)]
        assert ''.join(pieces) == text and len(pieces) > len(text) / size - 1
        assert sum((encode(piece) for piece in pieces), []) == encode(text)


def write_marking_tokenizer(folder, has_space=True, scheme='first', special=('</s>',), **settings):
    """A tokenizer that puts a mark for a space before each text, with and without a token for that mark."""
    from tokenizers import decoders, models, pre_tokenizers
    folder.mkdir()
    names = [*special, *(['\u2581'] if has_space else []), *(f'<0x{i:02X}>' for i in range(256)), *'abcde']
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings | {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '</s>'}))


@pytest.mark.parametrize('has_space', [True, False])
def test_bits_per_byte_count_the_bytes_of_the_text(tmp_path, env, has_space):
    from jax_run.sources import open_data
    folder = tmp_path / 'model'
    write_marking_tokenizer(folder, has_space)
    texts = ['ab cd \u00e9', 'e', 'bad c', 'dab'] * 10
    (tmp_path / 'a.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
    prepare('text', tmp_path / 'a.jsonl', f'--tokenizer={folder}', '--out_dir', tmp_path / 'out', env=env)
    meta = load_dataset_meta(tmp_path / 'out')
    in_val = sum(len(text.encode()) for text in texts[9::10])
    assert meta['bytes'] == {'train': sum(len(text.encode()) for text in texts) - in_val, 'val': in_val}
    assert meta['token_bytes']['val'] > in_val

    # An evaluation of whole documents counts their bytes.
    data = open_data({tmp_path / 'out': 1.0}, meta, block_size=4, seed=1)
    assert data.bpb_bytes == 'text'
    val = data.sets[0].splits['val']
    by_tokens = data.token_bytes[np.array(val.tokens)].sum()
    assert by_tokens * val.byte_scale == pytest.approx(in_val)
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    del meta['bytes'], meta['token_bytes'], meta['format']  # a data set of an older version keeps its numbers
    (tmp_path / 'out' / 'meta.json').write_text(json.dumps(meta))
    old = open_data({tmp_path / 'out': 1.0}, load_dataset_meta(tmp_path / 'out'), block_size=4, seed=1)
    assert old.bpb_bytes == 'tokens' and old.sets[0].splits['val'].byte_scale == 1
    counted = [each.sets[0].splits['val'].evaluation(3, each.token_bytes).n_bytes for each in (data, old)]
    assert counted[0] == pytest.approx(counted[1] * val.byte_scale)


@pytest.mark.parametrize('rows', [(), ('--rows=12',)])
def test_bits_per_byte_of_chats_count_the_bytes_of_the_answers(tmp_path, env, rows):
    from jax_run.sources import open_data
    write_marking_tokenizer(
        tmp_path / 'model', scheme='always', special=['</s>', '<user>', '<assistant>'],
        chat_template='{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}'
                      '{% if add_generation_prompt %}<assistant>{% endif %}')
    answers = ['ab \u00e9c', 'e', 'dab', 'a long answer that --rows cuts'] * 5
    chats = [{'messages': [{'role': 'user', 'content': 'dd'}, {'role': 'assistant', 'content': text}]}
             for text in answers]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, chats)))
    prepare('chat', tmp_path / 'a.jsonl', f'--tokenizer={tmp_path / "model"}', *rows, '--out_dir', tmp_path / 'out',
            env=env)
    meta = load_dataset_meta(tmp_path / 'out')
    # before an answer are <user> _ d d </s> <assistant> _, of which the last counts
    shown = [text[:13 - 7] if rows else text for text in answers]
    in_val = sum(len(text.encode()) for text in shown[18:])
    assert meta['bytes'] == {'train': sum(len(text.encode()) for text in shown[:18]), 'val': in_val}
    assert meta['token_bytes'] == {'train': meta['bytes']['train'] + 18, 'val': in_val + 2}  # a mark in each
    data = open_data({tmp_path / 'out': 1.0}, meta, block_size=12, seed=1)
    val = data.sets[0].splits['val']
    if rows:  # an evaluation of all of it
        assert val.evaluation(2, data.token_bytes).n_bytes == pytest.approx(in_val)
    assert data.bpb_bytes == 'text'


@pytest.mark.parametrize('val_tokens', [2, 5, 6, 7, 1000])
def test_fineweb_counts_the_bytes_of_the_text_in_both_parts(tmp_path, env, val_tokens):
    write_marking_tokenizer(tmp_path / 'model')
    texts = ['ab \u00e9c', 'e', 'bad c'] * 500
    files = parquet(tmp_path / 'in', texts).iterdir()
    prepare('fineweb', *sorted(files), f'--val_tokens={val_tokens}', f'--tokenizer={tmp_path / "model"}', '--out_dir',
            tmp_path / 'out', env=env)
    meta = load_dataset_meta(tmp_path / 'out')
    # each text begins with </s> and a mark; the accent has two tokens, each of a byte
    sizes = [size for text in texts for size in [0, 0] + [1] * len(text.encode())]
    assert sum(meta['bytes'].values()) == sum(sizes)
    # a mark shares the first character with its token, and a part may end within the accent
    assert abs(meta['bytes']['val'] - sum(sizes[:val_tokens])) <= 1
    assert meta['token_bytes']['train'] > meta['bytes']['train']


def test_an_own_vocabulary_counts_the_bytes_of_its_text_as_before(tmp_path, env):
    from jax_run.data import byte_scale
    prepare('text', text_file(tmp_path, words(3000)), '--tokenizer=bpe:300', '--out_dir', tmp_path / 'out', env=env)
    meta = load_dataset_meta(tmp_path / 'out')
    assert meta['bytes'] == meta['token_bytes'] and byte_scale(meta, 'val') == 1
