"""The folders of data sets: what is read from them, and what is refused."""
import os
import pickle
import re
import subprocess
from tests.common import edit_json, refusal, write_dataset, write_rows

import numpy as np
import pytest

from jax_files.data import (
    DataChanged, TokenFile, load_dataset, load_dataset_meta, load_ends, load_masks,
    load_mixture_meta, parse_mixture)
from jax_files.sources import open_source
from jax_flags import UserError

# -----------------------------------------------------------------------------
# data

@pytest.mark.parametrize('row_length', [None, 7])
def test_a_token_file_is_the_array_that_is_in_it(tmp_path, row_length):
    tokens = np.arange(40, dtype=np.uint32) * 1001
    tokens.tofile(tmp_path / 'train.bin')
    file = TokenFile(tmp_path / 'train.bin', np.uint32, row_length)
    array = tokens[:35].reshape(-1, 7) if row_length else tokens
    assert (file.shape, file.size, file.ndim, len(file)) == (array.shape, array.size, array.ndim, len(array))
    np.testing.assert_array_equal(file, array)
    for index in (slice(2, 4), slice(-3, None), slice(9), slice(4, 2), slice(3, 99), 0, -1, np.array([3, 0, 3]),
                  np.array([], int)):
        np.testing.assert_array_equal(file[index], array[index])
    for outside in (len(array), -len(array) - 1):
        with pytest.raises(IndexError):
            file[outside]
    of_file, of_array = (open_source(tokens, block_size=6, seed=3) for tokens in (file, array))
    for name, values in of_file.draw(np.arange(18, 27)).items():
        np.testing.assert_array_equal(values, of_array.draw(np.arange(18, 27))[name])


def test_a_token_file_that_is_cut_short_is_told_and_one_that_is_replaced_stays(tmp_path):
    path = tmp_path / 'train.bin'
    tokens = np.arange(10**5, dtype=np.uint16)
    tokens.tofile(path)
    file = TokenFile(path, np.uint16)
    tokens[::-1].tofile(tmp_path / 'other.bin')
    os.replace(tmp_path / 'other.bin', path)
    np.testing.assert_array_equal(file, tokens)
    file = TokenFile(path, np.uint16)
    os.truncate(path, 2001)
    assert file[:1000].tolist() == tokens[::-1][:1000].tolist()
    for index in (slice(1000, 1001), slice(0, 50_000), 99_999, np.array([0, 1000])):
        with pytest.raises(DataChanged, match=r'train.bin was cut short while it was .* 2,001 bytes now, 200,000'):
            file[index]


@pytest.mark.parametrize('dtype', ['uint16', 'uint32'])
def test_a_dataset_is_read_as_its_meta_json_says(tmp_path, dtype):
    write_dataset(tmp_path, np.arange(30), np.arange(20), dtype=dtype)
    splits, vocab_size, tokenizer = load_dataset(tmp_path, 8)
    assert splits['train'].tolist() == list(range(30))
    assert splits['val'].tolist() == list(range(20))
    assert vocab_size == 37
    assert tokenizer['kind'] == 'char'


def test_a_folder_without_meta_json_is_nanogpts_bpe(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    (tmp_path / 'meta.json').unlink()
    assert load_dataset(tmp_path, 8)[1:] == (50257, {'kind': 'gpt2'})


def test_the_tokenizer_of_a_dataset_is_found_without_its_tokens(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    for split in ('train', 'val'):
        (tmp_path / f'{split}.bin').unlink()
    assert load_dataset_meta(tmp_path)['tokenizer']['kind'] == 'char'
    (tmp_path / 'meta.json').unlink()
    with pytest.raises(UserError, match='there is no .*train.bin'):  # an empty folder is no data set of nanoGPT's
        load_dataset_meta(tmp_path)


def test_a_dataset_that_cannot_be_used_is_refused(tmp_path):
    def write(**options):
        write_dataset(tmp_path, np.arange(30), np.arange(20), **options)

    with pytest.raises(UserError, match='there is no .*train.bin'):
        load_dataset(tmp_path / 'nothing', 8)
    write()
    (tmp_path / 'prepare.py').touch()
    (tmp_path / 'val.bin').unlink()
    with pytest.raises(UserError, match='no .*val.bin; run: python .*prepare.py'):
        load_dataset(tmp_path, 8)
    write()
    with pytest.raises(UserError, match='val.bin has 20 tokens, and block_size=20 needs 21'):
        load_dataset(tmp_path, 20)
    write()
    (tmp_path / 'train.bin').write_bytes((tmp_path / 'train.bin').read_bytes()[:-1])
    with pytest.raises(UserError, match='59 bytes, not a multiple of 2'):
        load_dataset(tmp_path, 8)
    write(vocab_size=29)
    with pytest.raises(UserError, match='token id 29, outside the vocabulary of 29'):
        load_dataset(tmp_path, 8)
    write()
    (tmp_path / 'meta.json').unlink()
    (tmp_path / 'meta.pkl').touch()
    with pytest.raises(UserError, match='pickle'):
        load_dataset(tmp_path, 8)


def test_a_dataset_that_prepare_has_counted_is_not_read_at_the_start(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20), vocab_size=25)
    counted = dict(train_tokens=30, val_tokens=20, max_id=24)  # a lie: ids go to 29
    edit_json(tmp_path / 'meta.json', **counted)
    assert len(load_dataset(tmp_path, 8)[0]['train']) == 30
    edit_json(tmp_path / 'meta.json', max_id=25)
    assert 'has token id 25, outside the vocabulary of 25' in refusal(load_dataset, tmp_path, 8)
    edit_json(tmp_path / 'meta.json', max_id=None)
    assert 'has token id 29, outside' in refusal(load_dataset, tmp_path, 8)
    edit_json(tmp_path / 'meta.json', **counted | {'train_tokens': 31})
    assert 'train.bin has 30 tokens, its meta.json says 31' in refusal(load_dataset, tmp_path, 8)


def test_a_dataset_on_another_drive_than_the_current_folder_is_read(tmp_path, monkeypatch):
    def relpath(path):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")  # as on Windows
    monkeypatch.setattr(os.path, 'relpath', relpath)
    write_dataset(tmp_path, np.arange(30), np.arange(20), vocab_size=30)
    splits, *_ = load_dataset(tmp_path, 8)
    assert len(splits['train']) == 30 and load_masks(tmp_path, splits) == {}


@pytest.mark.parametrize('meta, message', [
    ('{"vocab_size":', 'damaged'),
    ('[' * 100000, 'damaged'),
    ('{}', 'damaged'),
    ('{"vocab_size": 5, "dtype": "int64", "tokenizer": {}}', 'int64'),
    ('{"vocab_size": 28.5, "dtype": "uint16", "tokenizer": {}}', '28.5'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": null}', 'damaged'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "gpt2"}, "row_length": 9.0}', '9.0 is not a number'),
    ('{"vocab_size": 274877906944, "dtype": "uint16", "tokenizer": {"kind": "gpt2"}}', 'vocab_size 274877906944'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "gpt2"}, "max_id": -1}', 'max_id -1 is not a number'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "gpt2"}, "row_length": 1}', 'row_length 1 is not'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "gpt2"}, "val_tokens": "9"}', "val_tokens '9'"),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "gpt2"}, "kind": []}', 'neither chats nor pairs'),
    ('{"vocab_size": 2, "dtype": "uint16", "tokenizer": {"kind": "char", "chars": ["a", "b"]}}', 'damaged'),
    ('{"vocab_size": 2, "dtype": "uint16", "tokenizer": {"kind": "char", "chars": "a\\ud800"}}', 'surrogates'),
    ('{"vocab_size": 2, "dtype": "uint16", "tokenizer": {"kind": "folder", "path": "a\\u0000"}}', 'is none of'),
    ('{"vocab_size": 2, "dtype": "uint16", "tokenizer": {"kind": "folder", "path": "a\\ud800"}}', 'surrogates'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "word"}}', 'tokenizer is none of'),
    ('{"vocab_size": 99999999999, "dtype": "uint16", "tokenizer": {"kind": "gpt2"}}', 'from 1 to 4,194,304'),
    ('{"vocab_size": 1, "dtype": "uint16", "tokenizer": {"kind": "char", "chars": [3]}}', 'damaged'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "char", "chars": "ab"}}', 'tokenizer is none of')])
def test_a_dataset_with_a_damaged_meta_json_is_refused(tmp_path, meta, message):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    (tmp_path / 'meta.json').write_text(meta)
    with pytest.raises(UserError, match=message):
        load_dataset(tmp_path, 8)


@pytest.mark.parametrize('name', ['meta.json', 'train.bin'])
def test_a_data_set_of_a_pipe_or_a_device_is_refused_and_a_link_is_read(name, tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    path = tmp_path / name
    path.rename(tmp_path / 'elsewhere')
    path.symlink_to(tmp_path / 'elsewhere')
    load_dataset(tmp_path, 8)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match='is not a regular file'):
        load_dataset(tmp_path, 8)
    path.unlink()
    path.symlink_to('/dev/zero')
    with pytest.raises(UserError, match='is not a regular file'):
        load_dataset(tmp_path, 8)


@pytest.mark.parametrize('ends', [[], [3], [3, 9], [2**63 - 1, 20], [2**63 - 1, -2**63 + 5]])
def test_ends_of_pairs_that_are_not_those_of_the_tokens_are_refused(ends, tmp_path):
    np.array(ends, np.int64).tofile(tmp_path / 'val_ends.bin')
    with pytest.raises(UserError, match='val_ends.bin is missing or damaged'):
        load_ends(tmp_path / 'val_ends.bin', 20)


@pytest.mark.parametrize('ends', [
    b'', b'\x02', np.array([2, 4]).tobytes() + b'\0', [4, 2], [2, 6], [-2, 4], [1, 4], [2, 2, 4, 4], [2, 4, 6],
    [2**62, 2**63 - 1, -2**63, 4], [0, 4], [4], [4, 4]])
def test_ends_of_conversations_that_cannot_be_are_refused(tmp_path, ends):
    path = tmp_path / 'val_ends.bin'
    path.write_bytes(np.array([2, 4]).tobytes())
    assert load_ends(path, 4).tolist() == [2, 4]
    content = ends if isinstance(ends, bytes) else np.array(ends, np.int64).tobytes()
    path.write_bytes(content)
    with pytest.raises(UserError, match='val_ends.bin is missing or damaged'):
        load_ends(path, 4)


def test_a_meta_pkl_is_converted_by_the_command_that_the_message_gives(tmp_path):
    write_dataset(tmp_path, np.arange(3), np.arange(3))
    (tmp_path / 'meta.json').unlink()
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 3, 'itos': {0: '\n', 1: "'", 2: 'b'}, 'stoi': {}}))
    with pytest.raises(UserError) as error:
        load_dataset_meta(tmp_path)
    command = ' '.join(str(error.value).split()).partition('convert it once: ')[2]
    subprocess.run(command, shell=True, check=True, timeout=300)
    assert load_dataset_meta(tmp_path)['tokenizer'] == {'kind': 'char', 'chars': "\n'b"}
    (tmp_path / 'meta.pkl').write_bytes(b'damaged')
    damaged = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert damaged.returncode == 2 and re.fullmatch(r'error: .*meta.pkl has no characters.*\n', damaged.stderr)


# -----------------------------------------------------------------------------
# mixtures

def test_the_flag_dataset_is_a_folder_or_a_mixture(tmp_path):
    shares = parse_mixture('web:0.7, code:0.25,/far/notes:0.05', tmp_path)
    assert {folder.as_posix(): share for folder, share in shares.items()} == {
        f'{tmp_path.as_posix()}/web': 0.7, f'{tmp_path.as_posix()}/code': 0.25, '/far/notes': 0.05}
    (tmp_path / 'a:1').mkdir()
    assert parse_mixture('web', tmp_path) == {tmp_path / 'web': 1} and parse_mixture('a:1', tmp_path) == {
        tmp_path / 'a:1': 1}
    for bad in ('web:0.7,code', 'web:0.7,code:0.4', 'web:1.5,code:-0.5', 'web:1,code:0', 'web:0.5,a/web:0.5', 'web:x',
                'web:nan,code:0.5', 'web:0.5,,code:0.5', 'web:0.5.5,code:0.5', 'web:0.5,code:0.5,',
                'x:web:0.5,code:0.5', 'web:0.0000001,code:0.9999999'):
        assert 'such as web:0.7,code:0.3' in refusal(parse_mixture, bad, tmp_path)


def test_only_data_sets_of_the_same_tokens_are_mixed(tmp_path):
    for name, options in {'a': {}, 'b': {}, 'c': {'chars': 'abc' * 12 + 'd'}, 'd': {'vocab_size': 38}}.items():
        write_dataset(tmp_path / name, np.arange(30), np.arange(20), **options)
    shares, meta = load_mixture_meta('a:0.5,b:0.5', tmp_path)
    assert shares == {tmp_path / 'a': 0.5, tmp_path / 'b': 0.5} and meta['vocab_size'] == 37
    for other in 'cd':
        message = refusal(load_mixture_meta, f'a:0.5,{other}:0.5', tmp_path)
        assert f'/{other} has other tokens than' in message and 'the same --tokenizer' in message
    edit_json(tmp_path / 'b' / 'meta.json', kind='pairs')
    assert 'cannot be mixed' in refusal(load_mixture_meta, 'a:0.5,b:0.5', tmp_path)


# -----------------------------------------------------------------------------
# rows

def test_rows_need_the_block_size_that_they_were_made_for(tmp_path):
    write_rows(tmp_path, 30)
    assert load_dataset(tmp_path, 16)[0]['train'].shape == (30, 17)
    for block_size in (15, 17, 32):
        message = refusal(load_dataset, tmp_path, block_size)
        assert 'has rows of 17 tokens' in message and f'prepare it with --rows={block_size}, or' in message
    edit_json(tmp_path / 'meta.json', row_length='x')
    assert "row_length 'x' is not a number" in refusal(load_dataset, tmp_path, 16)


@pytest.mark.parametrize('row_length', [17, None])
def test_conversations_need_their_masks(row_length, tmp_path):
    write_rows(tmp_path, 30, row_length or 17)
    edit_json(tmp_path / 'meta.json', kind='chats', row_length=row_length)
    splits, *_ = load_dataset(tmp_path, 16)
    for split in ('train', 'val'):
        assert 'are missing or of other tokens' in refusal(load_masks, tmp_path, splits)
        np.ones(splits[split].size, np.uint8).tofile(tmp_path / f'{split}_mask.bin')
    assert {split: mask.shape for split, mask in load_masks(tmp_path, splits).items()} == {
        split: tokens.shape for split, tokens in splits.items()}
