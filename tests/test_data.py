"""The folders of data sets: what is read from them, and what is refused."""
import mmap
import os
import pickle
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jax_flags import UserError
from jax_run.data import (
    DataChanged, load_dataset, load_dataset_meta, load_ends, load_masks, load_mixture_meta, open_tokens, parse_mixture,
    read_soon)
from jax_run.manifest import describe_file
from jax_run.sources import Pairs, open_source
from tests.common import ROOT, edit_json, refusal, write_dataset

# -----------------------------------------------------------------------------
# data

@pytest.mark.parametrize('row_length', [None, 7])
def test_a_token_file_is_the_array_that_is_in_it(tmp_path, row_length):
    tokens = np.arange(40, dtype=np.uint32) * 1001
    tokens.tofile(tmp_path / 'train.bin')
    file = open_tokens(tmp_path / 'train.bin', np.uint32, row_length)
    array = tokens[:35].reshape(-1, 7) if row_length else tokens
    np.testing.assert_array_equal(file, array)
    of_file, of_array = (open_source(tokens, block_size=6, seed=3) for tokens in (file, array))
    for name, values in of_file.draw(np.arange(18, 27)).items():
        np.testing.assert_array_equal(values, of_array.draw(np.arange(18, 27))[name])


@pytest.mark.skipif(not os.path.exists('/proc/self/smaps'), reason='Linux only')
def test_the_system_reads_no_more_than_the_windows_of_tokens_and_masks_and_fetches_the_blocks_of_the_manifest(
        tmp_path, monkeypatch):
    tokens = np.arange(60_000, dtype=np.uint16) % 7
    write_dataset(tmp_path, tokens, tokens, vocab_size=7, kind='chats')
    for split in ('train', 'val'):
        np.ones(60_000, np.uint8).tofile(tmp_path / f'{split}_mask.bin')
    splits = load_dataset(tmp_path, 16)
    masks = load_masks(tmp_path, splits)
    mappings = re.split(r'\n(?=[0-9a-f]+-[0-9a-f]+ )', Path('/proc/self/smaps').read_text())
    for name in ('train', 'val', 'train_mask', 'val_mask'):
        mapping, = [text for text in mappings if f'{tmp_path}/{name}.bin\n' in text]
        assert ' rr ' in re.search('VmFlags:.*', mapping)[0] + ' '  # read at random: no read-ahead

    asked = []

    class Mapping:
        def madvise(self, *args):
            asked.append(args)

        def size(self):
            return 120_000

    array = splits['train'].view()
    array._mmap = Mapping()
    read_soon(array, [0, 5000, 100_000], 65_536)
    expected = [(0, 65_536), (4096, 904 + 65_536), (98_304, 120_000 - 98_304)]
    assert asked == [(mmap.MADV_WILLNEED, *span) for span in expected]
    asked.clear()
    describe_file(array)
    assert asked == [(mmap.MADV_WILLNEED, 0, 65_536), (mmap.MADV_WILLNEED, 65_536, 120_000 - 65_536)]
    masks.clear()


@pytest.mark.parametrize('row_length', [None, 100])
def test_a_token_file_that_is_cut_short_is_told_and_one_that_is_replaced_stays(tmp_path, row_length):
    path = tmp_path / 'train.bin'
    tokens = np.arange(10**5, dtype=np.uint16)
    tokens.tofile(path)
    file = open_tokens(path, np.uint16, row_length)
    (tmp_path / 'other.bin').write_bytes(b'others')
    os.replace(tmp_path / 'other.bin', path)
    source = open_source(file, block_size=99, seed=3)
    assert source.draw(np.arange(3))['x'].shape == (3, 99)
    tokens.tofile(path)
    source = open_source(open_tokens(path, np.uint16, row_length), block_size=99, seed=3)
    os.truncate(path, 2001)
    with pytest.raises(DataChanged, match=r'train.bin was cut short while it was .* 2,001 bytes now, 200,000'):
        source.draw(np.arange(3))


@pytest.mark.parametrize('name', ['tokens', 'mask'])
def test_pairs_whose_tokens_or_mask_are_cut_short_are_told(tmp_path, name):
    for file, dtype in (('tokens', np.uint16), ('mask', np.uint8)):
        np.ones(60, dtype).tofile(tmp_path / file)
    tokens, mask = open_tokens(tmp_path / 'tokens', np.uint16), open_tokens(tmp_path / 'mask', np.uint8)
    pairs = Pairs(tokens, mask, np.array([30, 60]), length_normalized=False, block_size=40, split='train', seed=0)
    os.truncate(tmp_path / name, 20)
    with pytest.raises(DataChanged, match=f'{name} was cut short while it was read'):
        pairs.draw(np.arange(2))


@pytest.mark.parametrize('dtype', ['uint16', 'uint32'])
def test_a_dataset_is_read_as_its_meta_json_says(tmp_path, dtype):
    write_dataset(tmp_path, np.arange(30), np.arange(20), dtype=dtype)
    splits = load_dataset(tmp_path, 8)
    assert splits['train'].tolist() == list(range(30))
    assert splits['val'].tolist() == list(range(20))
    meta = load_dataset_meta(tmp_path)
    assert meta['vocab_size'] == 37
    assert meta['tokenizer']['kind'] == 'char'


def test_a_folder_without_meta_json_is_nanogpts_bpe(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    (tmp_path / 'meta.json').unlink()
    meta = load_dataset_meta(tmp_path)
    assert (meta['vocab_size'], meta['tokenizer']) == (50257, {'kind': 'gpt2'})
    assert load_dataset(tmp_path, 8)['train'].tolist() == list(range(30))


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
    write_dataset(tmp_path, np.arange(30), np.arange(9, 29), vocab_size=25)
    counted = dict(train_tokens=30, val_tokens=20, max_id=24)  # a lie: ids go to 29
    edit_json(tmp_path / 'meta.json', **counted)
    assert len(load_dataset(tmp_path, 8)['train']) == 30
    edit_json(tmp_path / 'meta.json', max_id=25)
    assert 'has token id 25, outside the vocabulary of 25' in refusal(load_dataset, tmp_path, 8)
    edit_json(tmp_path / 'meta.json', max_id=None)
    assert 'has token id 29, outside' in refusal(load_dataset, tmp_path, 8)
    edit_json(tmp_path / 'meta.json', max_id=24, val_tokens=None)  # not all of it is counted
    assert 'val.bin has token id 28, outside' in refusal(load_dataset, tmp_path, 8)
    edit_json(tmp_path / 'meta.json', **counted | {'train_tokens': 31})
    assert 'train.bin has 30 tokens, but its meta.json says 31' in refusal(load_dataset, tmp_path, 8)


def test_a_dataset_on_another_drive_than_the_current_folder_is_read(tmp_path, monkeypatch):
    def relpath(path):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")  # as on Windows
    monkeypatch.setattr(os.path, 'relpath', relpath)
    write_dataset(tmp_path, np.arange(30), np.arange(20), vocab_size=30)
    splits = load_dataset(tmp_path, 8)
    assert len(splits['train']) == 30 and load_masks(tmp_path, splits) == {}


@pytest.mark.parametrize('change, message', [
    ({'dtype': 'int64'}, "dtype 'int64' is not uint16 or uint32"), ({'kind': 'chat'}, 'neither chats nor pairs'),
    ({'vocab_size': 28.5}, 'vocab_size 28.5 is not a whole number'), ({'vocab_size': None}, 'vocab_size'),
    ({'row_length': 9.0}, 'row_length 9.0'), ({'max_id': '36'}, "max_id '36'"), ({'tokenizer': 'gpt2'}, ''),
    ({'tokenizer': {'kind': 'word'}}, 'tokenizer is none of'), ({'tokenizer': {'kind': 'folder'}}, 'path'),
    ({'tokenizer': {'kind': 'char', 'chars': 'ab'}}, 'tokenizer is none of'), ({'digests': ['abc']}, 'digests'),
    ({'bytes': {'train': 30, 'val': -1}}, 'bytes'), ({'token_bytes': {'train': 30}}, '')])
def test_a_dataset_with_a_wrong_meta_json_is_refused(tmp_path, change, message):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    edit_json(tmp_path / 'meta.json', **change)
    with pytest.raises(UserError, match=f'meta.json is damaged .*{message}'):
        load_dataset(tmp_path, 8)
    for text in ('{"vocab_size":', '{}', '[' * 100_000):
        (tmp_path / 'meta.json').write_text(text)
        with pytest.raises(UserError, match='meta.json is damaged'):
            load_dataset(tmp_path, 8)


@pytest.mark.parametrize('ends', [
    [], b'\x02', [4, 2], [2, 6], [-2, 4], [1, 4], [2, 2, 4, 4], [2, 4, 6], [0, 4], [4], [4, 4]])
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
    chars = "\n'bcdefghijkl"
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 13, 'itos': dict(enumerate(chars)), 'stoi': {}}))
    with pytest.raises(UserError) as error:
        load_dataset_meta(tmp_path)
    command = ' '.join(str(error.value).split()).partition('convert it once: ')[2]
    subprocess.run(command, shell=True, check=True, timeout=300)
    assert load_dataset_meta(tmp_path)['tokenizer'] == {'kind': 'char', 'chars': chars}


# -----------------------------------------------------------------------------
# mixtures

def test_the_flag_dataset_is_a_folder_or_a_mixture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('data/web', 'data/a:1', 'mine/code'):
        (tmp_path / name).mkdir(parents=True)
    web, text = Path('data/web'), ROOT / 'data' / 'text'  # data/ here, or in this program's folder
    assert parse_mixture('web:0.7, text:0.25,/far/notes:0.05') == {web: 0.7, text: 0.25, Path('/far/notes'): 0.05}
    assert parse_mixture('web') == {web: 1} and parse_mixture('a:1') == {Path('data/a:1'): 1}
    # a path from here, where data/ has no such folder
    assert parse_mixture('mine/code') == {Path('mine/code'): 1} and parse_mixture('data/web') == {web: 1}
    assert parse_mixture('./mine:0.7,text:0.3') == {Path('mine'): 0.7, text: 0.3}
    for bad in ('web:0.7,code', 'web:0.7,code:0.4', 'web:1.5,code:-0.5', 'web:1,code:0', 'web:0.5,a/web:0.5', 'web:x',
                'web:nan,code:0.5', 'web:0.5,,code:0.5', 'web:0.5.5,code:0.5', 'web:0.5,code:0.5,',
                'x:web:0.5,code:0.5', 'web:0.0000001,code:0.9999999', 'web:0.7,code:0.2999'):
        assert 'such as web:0.7,code:0.3' in refusal(parse_mixture, bad)


def test_only_data_sets_of_the_same_tokens_are_mixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, options in {'a': {}, 'b': {}, 'c': {'chars': 'abc' * 12 + 'd'}, 'd': {'vocab_size': 38}}.items():
        write_dataset(tmp_path / name, np.arange(30), np.arange(20), **options)
    shares, meta = load_mixture_meta('a:0.5,b:0.5')
    assert shares == {Path('a'): 0.5, Path('b'): 0.5} and meta['vocab_size'] == 37
    assert meta['max_id'] is None
    edit_json(tmp_path / 'a' / 'meta.json', max_id=29)
    edit_json(tmp_path / 'b' / 'meta.json', max_id=36)
    assert load_mixture_meta('a:0.5,b:0.5')[1]['max_id'] == 36
    for other in 'cd':
        message = refusal(load_mixture_meta, f'a:0.5,{other}:0.5')
        assert f'{other} has other tokens than' in message and 'the same --tokenizer' in message
    edit_json(tmp_path / 'b' / 'meta.json', kind='pairs')
    assert 'cannot be mixed' in refusal(load_mixture_meta, 'a:0.5,b:0.5')


# -----------------------------------------------------------------------------
# rows

def test_rows_need_the_block_size_that_they_were_made_for(tmp_path):
    write_dataset(tmp_path, np.arange(30).repeat(17), np.arange(5).repeat(17), row_length=17)
    assert load_dataset(tmp_path, 16)['train'].shape == (30, 17)
    for block_size in (15, 17, 32):
        message = refusal(load_dataset, tmp_path, block_size)
        assert 'has rows for block_size=16, not' in message and f'prepare it with --rows={block_size}, or' in message


@pytest.mark.parametrize('row_length', [17, None])
def test_conversations_need_their_masks(row_length, tmp_path):
    write_dataset(tmp_path, np.arange(30).repeat(17), np.arange(5).repeat(17), kind='chats', row_length=row_length)
    splits = load_dataset(tmp_path, 16)
    for split in ('train', 'val'):
        assert 'are missing or of other tokens' in refusal(load_masks, tmp_path, splits)
        np.ones(splits[split].size, np.uint8).tofile(tmp_path / f'{split}_mask.bin')
    assert {split: mask.shape for split, mask in load_masks(tmp_path, splits).items()} == {
        split: tokens.shape for split, tokens in splits.items()}
    np.ones(splits['val'].size + 1, np.uint8).tofile(tmp_path / 'val_mask.bin')
    assert 'are missing or of other tokens' in refusal(load_masks, tmp_path, splits)


def test_the_command_that_makes_a_missing_data_set_can_be_copied(tmp_path):
    folder = tmp_path / 'my data'
    folder.mkdir()
    (folder / 'prepare.py').write_text('')
    with pytest.raises(UserError) as refused:
        load_dataset_meta(folder)
    assert shlex.split(str(refused.value).partition('run: ')[2]) == ['python', os.path.relpath(folder / 'prepare.py')]
