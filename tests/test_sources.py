"""Token files become batches: windows, rows, mixtures. tests/test_dpo.py has the pairs."""
import dataclasses
import json
import types

import jax
import numpy as np
import optax
import pytest

import jax_run.sources
from jax_ops.vocabulary import cross_entropy
from jax_run.data import load_dataset_meta
from jax_run.sources import (
    Data, DataSet, Mixture, Pairs, assign, epochs_of, find_padding, find_starts, get_batch_jax, open_data,
    open_source, window_order)
from jax_train_utils import create_train_state
from jax_transformer import GPT
from tests.common import TINY, copy_folder, edit_json, make_step, refusal, succeeded, train, write_dataset


def open_folders(shares, seed):
    """The data of {folder: fraction}."""
    return open_data(shares, load_dataset_meta(next(iter(shares))), block_size=16, seed=seed)

def test_what_fills_up_a_row_is_padding_and_a_conversation_that_ends_it_is_not():
    # 2: a conversation starts, 1: its answers
    mask = np.array([[2, 0, 1, 2, 0, 0], [2, 0, 1, 2, 0, 1], [2, 0, 0, 0, 1, 1]])
    assert find_padding(mask).tolist() == [[False] * 3 + [True] * 3, [False] * 6, [False] * 6]
    assert find_starts(mask).tolist() == [[0, 0, 0, 3, 3, 3]] * 2 + [[0] * 6]


def test_pairs_that_are_too_long_are_never_drawn():
    lengths = [3, 3, 9, 3, 4, 4, 3, 9]  # of the answers of four pairs, of which the second and the last do not fit
    mask = np.ones(sum(lengths), np.uint8)
    pairs = Pairs(np.arange(sum(lengths)), mask, np.cumsum(lengths), length_normalized=False, block_size=4, seed=0,
                  split='train')
    assert sorted(pairs.locate(np.arange(4))) == [0, 1, 4, 5]
    assert pairs.evaluation(4).places.tolist() == pairs.evaluation(100).places.tolist() == [0, 1, 4, 5]
    assert pairs.count_passes(12) == 3


# -----------------------------------------------------------------------------
# windows

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
    n_windows = window_order(n, 16, 0).n
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
        offset, order = epochs_of(window_order(16 * (n_windows + 2), 16, 7))(3)
        rng = np.random.default_rng([7, 0, 3])
        assert offset == rng.integers(32)
        np.testing.assert_array_equal(order, rng.permutation(n_windows))
        assert order.itemsize == itemsize


@pytest.mark.slow
def test_the_loss_of_masked_tokens_counts_the_others_only_however_the_batch_is_split():
    mask = np.random.default_rng(0).integers(2, size=500).astype(np.uint8)
    tokens = np.random.default_rng(1).integers(37, size=500)
    source = open_source(tokens, mask, block_size=16, seed=0)
    numbers = 3 * 8 + np.arange(8)
    batch = source.draw(numbers)
    x, y, weights = batch['x'], batch['y'], batch['weight']
    targets = get_batch_jax(mask, 16, 8, 0, 3)[1]
    assert (weights[targets == 0] == 0).all()
    np.testing.assert_allclose(weights.mean(), 1, rtol=1e-6)
    np.testing.assert_array_equal(source.draw(numbers, np.arange(2, 5))['weight'], weights[2:5])
    # a step with weights has the gradient of the mean over the tokens that count
    config = dataclasses.replace(TINY, n_layer=1)
    step = make_step(config, grad_clip=0.0)
    state = create_train_state(jax.random.key(0), config, optax.sgd(1.0))
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

def test_the_example_of_how_sequences_are_assigned_to_the_parts_of_a_mixture():
    which, own = assign(np.arange(8), [0.5, 0.25, 0.25])
    assert which.tolist() == [2, 1, 0, 0, 2, 1, 0, 0] and own.tolist() == [0, 0, 0, 1, 1, 1, 2, 3]


ARRAYS = [(np.arange(400, dtype=np.uint16), 0.7), (np.arange(1000, 1230, dtype=np.uint16), 0.2),
         (np.arange(2000, 2300, dtype=np.uint16), 0.1)]


def mixture(block_size=16, seed=7):
    sources = [open_source(tokens, block_size=block_size, seed=seed) for tokens, _ in ARRAYS]
    return Mixture(sources, [fraction for _, fraction in ARRAYS])


def draw(source, n_rows, iteration, rows=slice(None)):
    """(x, y) of an iteration."""
    batch = source.draw(iteration * n_rows + np.arange(n_rows), rows)
    return batch['x'], batch['y']


@pytest.mark.parametrize('n_rows', [1, 7, 12])
def test_a_mixture_has_its_fractions_after_any_number_of_iterations(n_rows):
    drawn = np.zeros(3)
    mixed = mixture()
    for iteration in range(1000):
        x, _ = draw(mixed, n_rows, iteration)
        drawn += np.bincount(x[:, 0] // 1000, minlength=3)
        assert np.abs(drawn - (iteration + 1) * n_rows * np.array([0.7, 0.2, 0.1])).max() < 3  # sequences
    assert np.abs(drawn / drawn.sum() - [0.7, 0.2, 0.1]).max() < 0.001 or n_rows == 1


def test_a_small_part_of_a_mixture_has_its_fraction_too():
    which, _ = assign(np.arange(100_000), [0.9961, 0.0039])
    assert abs((which == 1).sum() - 390) <= 2


def test_every_window_of_each_set_of_a_mixture_is_drawn_once_per_epoch_of_that_set():
    drawn = np.concatenate([draw(mixture(), 12, i)[0] for i in range(30)])
    for k, (tokens, _) in enumerate(ARRAYS):
        own = drawn[drawn[:, 0] // 1000 == k]
        n = window_order(len(tokens), 16, 0).n
        assert len(own) > 2 * n
        for epoch in range(2):
            windows = own[epoch * n:][:n]
            assert len(np.unique(windows)) == windows.size  # no token twice
        np.testing.assert_array_equal(own[:n], get_batch_jax(tokens, 16, n, 7, 0)[0])  # the stream it has alone


def test_the_sequences_of_a_mixture_are_the_same_however_they_are_batched_and_shared():
    x, y = draw(mixture(), 12, 5)
    np.testing.assert_array_equal(y, x + 1)
    for rows in (np.arange(4), np.array([3, 4, 11])):
        np.testing.assert_array_equal(draw(mixture(), 12, 5, rows), (x[rows], y[rows]))
    halves = np.concatenate([draw(mixture(), 6, i)[0] for i in (10, 11)])
    np.testing.assert_array_equal(halves, x)


def test_beside_a_set_with_masks_every_token_of_the_others_counts(tmp_path):
    for name in 'ab':
        write_dataset(tmp_path / name, np.arange(200) % 37, np.arange(60) % 37)
    for split, n in (('train', 200), ('val', 60)):
        (np.arange(n) % 2).astype(np.uint8).tofile(tmp_path / 'a' / f'{split}_mask.bin')
    data = open_folders({tmp_path / 'a': 0.5, tmp_path / 'b': 0.5}, seed=0)
    batch = data.train.draw(24 + np.arange(8))
    assert sorted((batch['weight'] > 0).mean(1).tolist()) == [0.5] * 4 + [1] * 4
    assert batch['weight'].mean() == pytest.approx(1)

# -----------------------------------------------------------------------------
# rows

@pytest.mark.parametrize('others', [{}, {'b': 0.25}])
def test_rows_are_drawn_whole_and_each_once_per_epoch(tmp_path, others):
    for name in ('a', *others):
        write_dataset(tmp_path / name, np.arange(30).repeat(17), np.arange(5).repeat(17), row_length=17)
    shares = {tmp_path / name: fraction for name, fraction in {'a': 1 - sum(others.values()), **others}.items()}
    data = open_folders(shares, seed=7)
    drawn = [data.train.draw(12 * i + np.arange(12)) for i in range(20)]
    rows = np.concatenate([batch['x'] for batch in drawn])
    np.testing.assert_array_equal(rows, np.concatenate([batch['y'] for batch in drawn]))
    assert (rows == rows[:, :1]).all()  # no row has tokens of two
    if not others:
        first, second = rows[:30, 0], rows[30:60, 0]
        assert sorted(first) == sorted(second) == list(range(30)) and list(first) != list(second)
    val = data.sets[0].splits['val']
    assert val.read(val.evaluation(5).places)['y'][:, -1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize('n_rows', [2, 3, 40])
def test_an_evaluation_reads_windows_from_the_first_to_the_last_token(n_rows):
    text = open_source(np.arange(1000, dtype=np.uint16), block_size=16, seed=0)
    batch = text.read(text.evaluation(n_rows).places)
    assert len(batch['x']) == n_rows and batch['x'][0, 0] == 0 and batch['y'][-1, -1] == 999


def test_where_nothing_is_to_be_counted_the_start_of_a_run_reads_no_windows(monkeypatch):
    text = open_source(np.arange(1000, dtype=np.uint16), block_size=16, seed=0)
    monkeypatch.setattr(text, 'read', None)  # reading would fail
    evaluation = text.evaluation(5)
    assert (len(evaluation.places), evaluation.share, evaluation.n_bytes) == (5, 1, None)


def test_targets_without_bytes_are_no_division_by_zero():
    text = open_source(np.arange(100, dtype=np.uint16), block_size=16, seed=0)
    evaluation = text.evaluation(2, token_bytes=np.zeros(100, int))
    assert evaluation.n_bytes == 1 and evaluation.has_special


@pytest.mark.parametrize('n', [1, 2, 3, 7, 40, 1000])
def test_an_evaluation_reads_a_row_at_most_once_and_all_if_there_are_few(n):
    rows = open_source(np.zeros((n, 17), np.uint16), block_size=16, seed=0)
    places = rows.evaluation(40).places
    assert len(places) == len(set(places)) == min(n, 40)
    assert max(places) < n


def test_in_a_mixture_only_the_packed_rows_have_conversations_that_start_within_a_row(tmp_path):
    write_dataset(tmp_path / 'chats', np.arange(30).repeat(17), np.arange(5).repeat(17), row_length=17)
    for split, n in (('train', 30), ('val', 5)):
        np.tile(np.uint8([2, 1, 1, 0, 2, 1] + 11 * [0]), (n, 1)).tofile(tmp_path / 'chats' / f'{split}_mask.bin')
    write_dataset(tmp_path / 'text', np.arange(200) % 7 + 30, np.arange(60) % 7 + 30)
    data = open_folders({tmp_path / 'chats': 0.5, tmp_path / 'text': 0.5}, seed=0)
    batch = data.train.draw(24 + np.arange(8))
    of_text = batch['x'][:, 0] >= 30
    assert of_text.sum() == 4
    assert (batch['start'][of_text] == 0).all()
    assert not batch['padding'][of_text].any()

    assert (batch['start'][~of_text] == [0] * 4 + [4] * 12).all()
    assert ((batch['weight'] > 0).sum(1) == np.where(of_text, 16, 3)).all()


@pytest.mark.parametrize('n_rows', [1, 2])
def test_the_batches_of_a_mixture_have_the_same_names_whatever_their_rows_are_of(tmp_path, n_rows):
    write_dataset(tmp_path / 'chats', np.arange(30).repeat(17), np.arange(5).repeat(17), row_length=17)
    for split, n in (('train', 30), ('val', 5)):
        np.tile(np.uint8([2, 1, 1, 0, 2, 1] + 11 * [0]), (n, 1)).tofile(tmp_path / 'chats' / f'{split}_mask.bin')
    write_dataset(tmp_path / 'text', np.arange(200) % 7 + 30, np.arange(60) % 7 + 30)
    data = open_folders({tmp_path / 'chats': 0.25, tmp_path / 'text': 0.75}, seed=0)
    batches = [data.train.draw(n_rows * i + np.arange(n_rows)) for i in range(8)]
    described = {str({name: (x.shape, x.dtype.name) for name, x in sorted(batch.items())}) for batch in batches}
    assert len(described) == 1 and {*batches[0]} == {'x', 'y', 'weight', 'start', 'padding'}
    assert any((batch['x'] >= 30).all() for batch in batches) and any((batch['x'] < 30).any() for batch in batches)


def test_the_passes_of_a_mixture_are_those_over_its_most_repeated_set():
    sources = [open_source(np.zeros((n, 17), np.uint16), block_size=16, seed=0) for n in (100, 10)]
    assert Mixture(sources, [0.75, 0.25]).count_passes(80) == 2  # 20 of 10 rows, 60 of 100


def test_each_split_of_each_set_must_have_a_token_that_counts():
    asked = []
    sets = [DataSet(name, 0.5, {split: types.SimpleNamespace(evaluation=asked.append) for split in ('train', 'val')},
                    {}, {}) for name in 'ab']
    Data(sets, None).check(7)
    assert asked == [7] * 4


def test_the_first_id_outside_the_vocabulary_is_found_also_in_the_last_target():
    tokens = np.arange(17, dtype=np.uint16)
    source = open_source(tokens, block_size=16, seed=0, vocab_size=17)
    assert source.read(np.array([0]))['y'][0, -1] == 16
    source.vocab_size = 16
    assert 'the train tokens have an id outside the vocabulary of 16' in refusal(source.read, np.array([0]))


def test_a_mixture_of_twenty_sets_shuffles_each_epoch_once(monkeypatch):
    calls = []
    shuffle_epoch = jax_run.sources.shuffle_epoch
    monkeypatch.setattr(jax_run.sources, 'shuffle_epoch', lambda *args: calls.append(args) or shuffle_epoch(*args))
    sources = [open_source(np.arange(400 + i, dtype=np.uint16), block_size=16, seed=41) for i in range(20)]
    mixed = Mixture(sources, [0.05] * 20)
    for iteration in range(12):
        draw(mixed, 40, iteration)
    assert len(calls) == len(set(calls)) <= 40


def test_a_resumed_run_says_that_its_bits_per_byte_count_other_bytes(dataset, flags, run_copy, tmp_path):
    data = copy_folder(dataset, tmp_path / 'anew')
    edit_json(data / 'meta.json', bytes={'train': 90, 'val': 80}, token_bytes={'train': 100, 'val': 100})
    again = [f'--dataset={data}', '--init_from=resume', '--max_iters=22', '--eval_interval=22']
    printed = succeeded(train(run_copy, *flags, *again)).stdout
    assert 'bits per byte count the bytes of the text from here on' in printed
    assert json.loads((run_copy / 'config.json').read_text())['bpb_bytes'] == 'text'
    printed = succeeded(train(run_copy, *flags, *again, '--max_iters=24')).stdout
    assert 'from here on' not in printed
