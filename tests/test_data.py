"""Token files become batches."""
import dataclasses
import os
import pickle
import re
import subprocess
from tests.common import TINY, edit_json, make_step, refusal, write_dataset

import jax
import numpy as np
import optax
import pytest

from jax_files.data import (
    DataChanged, DataSet, TokenFile, count_windows, describe_data, draw_batch, evaluated_windows, get_batch_jax,
    get_loss_weights, get_windows, load_dataset, load_dataset_meta, load_masks, load_mixture, load_mixture_meta,
    load_pairs, parse_mixture, shuffled_windows)
from jax_flags import UserError
from jax_train_utils import create_learning_rate_schedule
from jax_transformer import GPT, create_train_state, cross_entropy

# -----------------------------------------------------------------------------
# data

def test_targets_are_the_next_tokens_and_batches_a_function_of_seed_and_iteration():
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = get_batch_jax(tokens, 16, 12, 1337, 5)
    assert x.shape == (12, 16)
    assert x.dtype == np.int32
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(x, get_batch_jax(tokens, 16, 12, 1337, 5)[0])
    for other in ((1338, 5), (1337, 6)):
        assert not np.array_equal(x, get_batch_jax(tokens, 16, 12, *other)[0])


def test_the_sequences_do_not_depend_on_how_they_are_batched():
    tokens = np.arange(500, dtype=np.uint16)
    small = np.concatenate([get_batch_jax(tokens, 16, 4, 7, i)[0] for i in range(30)])
    large = np.concatenate([get_batch_jax(tokens, 16, 12, 7, i)[0] for i in range(10)])
    np.testing.assert_array_equal(small, large)


@pytest.mark.parametrize('n', [17, 18, 33, 40, 500])
def test_an_epoch_shows_every_window_once_and_the_next_one_others(n):
    tokens = np.arange(n, dtype=np.uint16)
    n_windows = count_windows(n, 16)
    first, second = (get_batch_jax(tokens, 16, n_windows, 7, i)[0] for i in (0, 1))
    assert len(np.unique(first)) == first.size  # no token twice
    assert first.size >= min(n - 1, max(16, n - 3 * 16))
    assert first.max() <= n - 2  # the last token has a target
    if n >= 40:
        assert not np.array_equal(np.sort(first, 0), np.sort(second, 0))


def test_the_order_of_the_windows_has_not_changed():
    tokens = np.arange(500, dtype=np.uint16)
    assert [get_batch_jax(tokens, 16, 4, 7, i)[0][:, 0].tolist() for i in (0, 9)] == [
        [242, 178, 370, 82], [462, 286, 126, 414]]


def test_the_order_takes_the_smallest_integers_and_is_that_of_the_larger_ones():
    for n_windows, itemsize in ((200, 1), (2000, 2), (70_000, 4)):
        offset, order = shuffled_windows(16 * (n_windows + 2), 16, 7, 3)
        rng = np.random.default_rng([7, 0, 3])
        assert offset == rng.integers(32)
        np.testing.assert_array_equal(order, rng.permutation(n_windows))
        assert order.itemsize == itemsize


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
    for one, other in zip(get_batch_jax(file, 6, 9, 3, 2), get_batch_jax(array, 6, 9, 3, 2)):
        np.testing.assert_array_equal(one, other)


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


def test_the_fingerprint_of_data_tells_one_token_and_the_tokenizer():
    splits = {'train': np.arange(50, dtype=np.uint16), 'val': np.arange(9, dtype=np.uint16)}
    describe = lambda splits, kind='gpt2': describe_data([DataSet('', 1.0, splits, {})], {'kind': kind})
    one = describe(splits)
    assert one == describe(splits)
    other = describe(splits | {'val': splits['val'] ^ np.uint16(1)}, 'char')
    assert {name for name in one if one[name] != other[name]} == {'content of val.bin', 'the tokenizer'}
    shorter = describe(splits | {'train': splits['train'][:-1]})
    assert {name for name in one if one[name] != shorter[name]} == {'tokens in train.bin', 'content of train.bin'}


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
        load_pairs(tmp_path, {'val': np.arange(20)}, {'val': np.ones(20)}, 16, False)


@pytest.mark.parametrize('ends', [
    b'', b'\x02', np.array([2, 4]).tobytes() + b'\0', [4, 2], [2, 6], [-2, 4], [1, 4], [2, 2, 4, 4], [2, 4, 6],
    [2**62, 2**63 - 1, -2**63, 4], [0, 4], [4], [4, 4]])
def test_ends_of_conversations_that_cannot_be_are_refused(tmp_path, ends):
    write_dataset(tmp_path, np.arange(4), np.arange(4))
    splits = load_dataset(tmp_path, 1)[0]
    masks = {split: np.ones(4, np.uint8) for split in splits}
    for split in splits:
        (tmp_path / f'{split}_ends.bin').write_bytes(np.array([2, 4]).tobytes())
    assert load_pairs(tmp_path, splits, masks, 8, False)['val'].bounds.tolist() == [0, 2, 4]
    content = ends if isinstance(ends, bytes) else np.array(ends, np.int64).tobytes()
    (tmp_path / 'val_ends.bin').write_bytes(content)
    with pytest.raises(UserError, match='val_ends.bin is missing or damaged'):
        load_pairs(tmp_path, splits, masks, 8, False)


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


@pytest.mark.slow
def test_the_loss_of_masked_tokens_counts_the_others_only_however_the_batch_is_split():
    mask = np.random.default_rng(0).integers(2, size=500).astype(np.uint8)
    weights = get_loss_weights(mask, 16, 8, 0, 3, np.arange(8))['weight']
    targets = get_batch_jax(mask, 16, 8, 0, 3)[1]
    assert (weights[targets == 0] == 0).all()
    np.testing.assert_allclose(weights.mean(), 1, rtol=1e-6)
    np.testing.assert_array_equal(get_loss_weights(mask, 16, 8, 0, 3, np.arange(2, 5))['weight'], weights[2:5])
    # a step with weights has the gradient of the mean over the tokens that count
    config = dataclasses.replace(TINY, n_layer=1)
    schedule = create_learning_rate_schedule(1e-2, decay_lr=False)
    step = make_step(config, schedule, grad_clip=0.0)
    state = create_train_state(jax.random.key(0), config, optax.sgd(1.0))
    tokens = np.random.default_rng(1).integers(37, size=500)
    x, y = get_batch_jax(tokens, 16, 8, 0, 3)
    by_micro_batch = lambda a: a.reshape(2, 4, *a.shape[1:])
    batch = {'x': x, 'y': y, 'seq_id': np.arange(8, dtype=np.uint32), 'weight': weights}
    after, metrics = jax.jit(step)(state, jax.tree.map(by_micro_batch, batch))

    def mean_loss(params):
        return (cross_entropy(GPT(config).apply({'params': params}, x), y) * targets).sum() / targets.sum()

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
    check = lambda before, after, grad: np.testing.assert_allclose(before - after, grad, atol=1e-6)
    jax.tree.map(check, state.params, after.params, grads)

# -----------------------------------------------------------------------------
# mixtures

MIXED = [(np.arange(400, dtype=np.uint16), 0.7), (np.arange(1000, 1230, dtype=np.uint16), 0.2),
         (np.arange(2000, 2300, dtype=np.uint16), 0.1)]


@pytest.mark.parametrize('n_rows', [1, 7, 12])
def test_a_mixture_has_its_fractions_after_any_number_of_iterations(n_rows):
    drawn = np.zeros(3)
    for iteration in range(1000):
        x, _ = get_batch_jax(MIXED, 16, n_rows, 7, iteration)
        drawn += np.bincount(x[:, 0] // 1000, minlength=3)
        assert np.abs(drawn - (iteration + 1) * n_rows * np.array([0.7, 0.2, 0.1])).max() < 3  # sequences
    assert np.abs(drawn / drawn.sum() - [0.7, 0.2, 0.1]).max() < 0.001 or n_rows == 1


def test_every_window_of_each_set_of_a_mixture_is_drawn_once_per_epoch_of_that_set():
    drawn = np.concatenate([get_batch_jax(MIXED, 16, 12, 7, i)[0] for i in range(30)])
    for k, (tokens, _) in enumerate(MIXED):
        own = drawn[drawn[:, 0] // 1000 == k]
        n = count_windows(len(tokens), 16)
        assert len(own) > 2 * n
        for epoch in range(2):
            windows = own[epoch * n:][:n]
            assert len(np.unique(windows)) == windows.size  # no token twice
        np.testing.assert_array_equal(own[:n], get_batch_jax(tokens, 16, n, 7, 0)[0])  # the stream it has alone


def test_the_sequences_of_a_mixture_are_the_same_however_they_are_batched_and_shared():
    x, y = get_batch_jax(MIXED, 16, 12, 7, 5)
    np.testing.assert_array_equal(y, x + 1)
    for rows in (np.arange(4), np.array([3, 4, 11])):
        np.testing.assert_array_equal(get_batch_jax(MIXED, 16, 12, 7, 5, rows), (x[rows], y[rows]))
    halves = np.concatenate([get_batch_jax(MIXED, 16, 6, 7, i)[0] for i in (10, 11)])
    np.testing.assert_array_equal(halves, x)


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


def test_beside_a_set_with_masks_every_token_of_the_others_counts(tmp_path):
    for name in 'ab':
        write_dataset(tmp_path / name, np.arange(200) % 37, np.arange(60) % 37)
    for split, n in (('train', 200), ('val', 60)):
        (np.arange(n) % 2).astype(np.uint8).tofile(tmp_path / 'a' / f'{split}_mask.bin')
    sets = load_mixture({tmp_path / 'a': 0.5, tmp_path / 'b': 0.5}, 16)
    batch = draw_batch(sets, 16, 8, 0, 3, np.arange(8), 37)
    assert sorted((batch['weight'] > 0).mean(1).tolist()) == [0.5] * 4 + [1] * 4
    assert batch['weight'].mean() == pytest.approx(1)
    assert len(describe_data(sets, {'kind': 'gpt2'})) == 2 + 2 * 8

# -----------------------------------------------------------------------------
# rows

def write_rows(folder, n, row_length=17, **meta):
    """A data set of n rows in train, whose tokens are the row's number, and 5 in val."""
    for_each = lambda n: np.repeat(np.arange(n), row_length)
    write_dataset(folder, for_each(n), for_each(5))
    edit_json(folder / 'meta.json', row_length=row_length, **meta)


@pytest.mark.parametrize('others', [{}, {'b': 0.25}])
def test_rows_are_drawn_whole_and_each_once_per_epoch(tmp_path, others):
    for name in ('a', *others):
        write_rows(tmp_path / name, 30)
    shares = {tmp_path / name: fraction for name, fraction in {'a': 1 - sum(others.values()), **others}.items()}
    sets = load_mixture(shares, 16)
    drawn = [draw_batch(sets, 16, 12, 7, i, np.arange(12), 37) for i in range(20)]
    rows = np.concatenate([batch['x'] for batch in drawn])
    np.testing.assert_array_equal(rows, np.concatenate([batch['y'] for batch in drawn]))
    assert (rows == rows[:, :1]).all()  # no row has tokens of two
    if not others:
        first, second = rows[:30, 0], rows[30:60, 0]
        assert sorted(first) == sorted(second) == list(range(30)) and list(first) != list(second)
    start = evaluated_windows(sets[0].splits['val'], 16, 5)
    assert get_windows(sets[0].splits['val'], start, 16)[1][:, -1].tolist() == [0, 1, 2, 3, 4]
    assert len(describe_data(sets, {'kind': 'gpt2'})) == 2 + 4 * len(sets)


@pytest.mark.parametrize('n', [1, 2, 3, 7, 40, 1000])
def test_an_evaluation_reads_every_row_as_often_as_any_other_or_once_more(n):
    places = evaluated_windows(np.zeros((n, 17), np.uint16), 16, 40)
    counts = np.bincount(places, minlength=n)
    assert len(places) == 40 and counts.max() - counts.min() <= 1


def test_in_a_mixture_only_the_packed_rows_have_conversations_that_start_within_a_row(tmp_path):
    write_rows(tmp_path / 'chats', 30)
    for split, n in (('train', 30), ('val', 5)):
        np.tile(np.uint8([2, 1, 1, 0, 2, 1] + 11 * [0]), (n, 1)).tofile(tmp_path / 'chats' / f'{split}_mask.bin')
    write_dataset(tmp_path / 'text', np.arange(200) % 7 + 30, np.arange(60) % 7 + 30)
    sets = load_mixture({tmp_path / 'chats': 0.5, tmp_path / 'text': 0.5}, 16)
    batch = draw_batch(sets, 16, 8, 0, 3, np.arange(8), 37)
    of_text = batch['x'][:, 0] >= 30
    assert of_text.sum() == 4
    assert (batch['start'][of_text] == 0).all()
    assert (batch['start'][~of_text] == [0] * 4 + [4] * 12).all()
    assert ((batch['weight'] > 0).sum(1) == np.where(of_text, 16, 3)).all()


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
