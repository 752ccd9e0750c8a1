"""DPO: pairs of answers, from the file to the update, in several layouts; golden/dpo.npz has PyTorch's numbers."""
import functools
import json
import math
import re

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_devices.layout import setup_distributed_training
from jax_pretrained import load_pretrained
from jax_run.data import load_dataset_meta
from jax_run.load import load_frozen
from jax_run.log import read_metrics
from jax_run.sources import Pairs
from jax_train_utils import create_train_state, dpo, split_batch
from tests.common import (
    FAMILIES, GOLDEN, RESUME, assert_refused, edit_json, final_state, make_step, prepare, records_of, refusal,
    run_script, sample, slow, start, succeeded, train, wait_for)

LETTERS = 'abcdefghijklmnop'
FLAGS = ['--batch_size=4', '--gradient_accumulation_steps=2', '--block_size=24',
         '--eval_iters=2', '--eval_interval=4', '--max_iters=8', '--learning_rate=1e-2', '--device=cpu:0',
         '--dtype=float32', '--always_save_checkpoint=True']


def tune(out, *flags):
    return run_script('train_jax.py', 'config/finetune_dpo.py', f'--out_dir={out}', *flags)


def ask(text):
    return {'role': 'user', 'content': text}


def toy_pairs(n):
    """Lines of random questions, where answers of a and b are preferred to answers of c and d."""
    rng = np.random.default_rng(0)
    words = lambda letters: ''.join(rng.choice(list(letters), size=rng.integers(1, 8)))
    return [json.dumps({'messages': [ask(words(LETTERS))], 'chosen': words('ab'), 'rejected': words('cd')})
            for _ in range(n)]


def prepare_pairs(lines, model, folder):
    (folder / 'pairs.jsonl').write_text('\n'.join(lines))
    return prepare('chat', folder / 'pairs.jsonl', f'--tokenizer={model}', f'--out_dir={folder / "data"}')


@pytest.fixture
def toy(chatting, tmp_path):
    """(the flags of a run on toy pairs, their folder)."""
    succeeded(prepare_pairs(toy_pairs(40), chatting, tmp_path))
    return [*FLAGS, f'--dataset={tmp_path / "data"}', f'--init_from={chatting}'], tmp_path / 'data'


def read_pairs(n, block_size, split='train', **options):
    """Pairs of random tokens in which answers follow a prompt of 3 tokens."""
    rng = np.random.default_rng(1)
    lengths = 3 + rng.integers(1, 7, size=2 * n)
    mask = np.concatenate([np.arange(length) >= 3 for length in lengths]).astype(np.uint8)
    tokens = rng.integers(1, 30, size=len(mask)).astype(np.uint16)
    options = {'length_normalized': False, 'seed': 5, **options}
    return Pairs(tokens, mask, np.cumsum(lengths), block_size=block_size, split=split, **options)


# -----------------------------------------------------------------------------
# the files

def test_a_pair_is_two_conversations_of_which_only_the_last_answers_count(chatting, tmp_path):
    messages = [ask('a'), {'role': 'assistant', 'content': 'b'}, ask('c')]
    line = json.dumps({'messages': messages, 'chosen': 'd', 'rejected': 'ee'})
    assert 'val has 1 pairs, 21 tokens, 5 of them' in succeeded(prepare_pairs([line] * 2, chatting, tmp_path)).stdout
    data = tmp_path / 'data'
    user, model, end = 38, 39, 37
    ids, mask = np.fromfile(data / 'val.bin', np.uint16), np.fromfile(data / 'val_mask.bin', np.uint8)
    ends = np.fromfile(data / 'val_ends.bin', np.int64)
    prompt = [user, 0, model, 1, end, user, 2, model]
    assert ends.tolist() == [10, 21]
    assert ids.tolist() == [*prompt, 3, end, *prompt, 4, 4, end]
    assert mask.tolist() == [0] * 8 + [1, 1] + [0] * 8 + [1, 1, 1]
    assert load_dataset_meta(data)['kind'] == 'pairs'


@pytest.mark.parametrize('change, message', [
    ({'rejected': None}, 'has no "rejected", or an empty one'),
    ({'chosen': ' \n'}, 'has no "chosen", or an empty one'),
    ({'messages': []}, 'has no question in front of the answers'),
    ({'messages': [ask('a'), {'role': 'assistant', 'content': 'b'}]}, 'has no question in front of the answers'),
    ({'chosen': None, 'rejected': None, 'messages': [{'role': 'assistant', 'content': 'b'}]}, 'has one answer where')])
def test_a_line_that_is_no_pair_is_named(chatting, change, message, tmp_path):
    line = json.loads(toy_pairs(1)[0])
    bad = {key: value for key, value in (line | change).items() if value is not None}
    result = prepare_pairs([json.dumps(line), json.dumps(bad)], chatting, tmp_path)
    assert_refused(result, f'pairs.jsonl, line 2: {message}')
    assert not (tmp_path / 'data').exists()


def test_pairs_are_not_packed(chatting, tmp_path):
    (tmp_path / 'pairs.jsonl').write_text('\n'.join(toy_pairs(4)))
    packed = prepare('chat', tmp_path / 'pairs.jsonl', f'--tokenizer={chatting}', '--rows=16',
                     f'--out_dir={tmp_path / "data"}')
    assert_refused(packed, '--rows packs conversations, not pairs')
    assert not (tmp_path / 'data').exists()


def test_a_pair_with_an_answer_of_which_the_template_writes_nothing_is_named(chatting, tmp_path):
    template = ('{% for m in messages %}<user>{% if m.role == "user" %}{{ m.content }}{% else %}'
                '{% generation %}{{ m.content.split("p")[-1] }}{% endgeneration %}{% endif %}{% endfor %}')
    edit_json(chatting / 'tokenizer_config.json', chat_template=template)
    lines = [json.dumps({'messages': [ask('a')], 'chosen': 'bpc', 'rejected': rejected}) for rejected in ('dpd', 'dp')]
    said = prepare_pairs(lines, chatting, tmp_path)
    assert_refused(said, 'line 2: has an answer that the chat template leaves out: .dp')


def test_an_epoch_holds_every_pair_once_and_each_process_reads_its_own_rows():
    pairs = read_pairs(7, 12)
    batches = [pairs.draw(4 * i + np.arange(4)) for i in range(7)]  # two epochs
    rows = np.concatenate([batch['x'] for batch in batches]).reshape(14, 2, 12)
    every = pairs.read(np.arange(14))['x'].reshape(7, 2, 12)
    for epoch in (rows[:7], rows[7:]):
        assert sorted(epoch.tolist()) == sorted(every.tolist())
    assert not (rows[:7] == rows[7:]).all()
    part = pairs.draw(12 + np.arange(4), np.array([2, 3]))
    for name, values in part.items():
        np.testing.assert_array_equal(values, batches[3][name][2:])


def test_a_row_holds_a_conversation_the_weights_of_its_answer_and_padding():
    pairs = read_pairs(7, 12)
    row = {name: values[0] for name, values in pairs.read(np.array([3])).items()}
    start, end = pairs.bounds[3:5]
    n = end - start - 1
    np.testing.assert_array_equal(row['x'][:n], pairs.tokens[start:end - 1])
    np.testing.assert_array_equal(row['x'][n + 1:], 0)
    np.testing.assert_array_equal(row['y'], [*pairs.tokens[start + 1:end], *[0] * (12 - n)])
    np.testing.assert_array_equal(row['weight'], [0, 0, *[1] * (n - 2), *[0] * (12 - n)])
    normalized = read_pairs(7, 12, length_normalized=True).read(np.arange(14))['weight']
    np.testing.assert_allclose(normalized.sum(1), 1, rtol=1e-6)
    assert pairs.evaluation(100).places.tolist() == list(range(14))
    assert pairs.evaluation(4).places.tolist() == [0, 1, 6, 7]


def test_pairs_longer_than_a_row_are_left_out_and_counted(capsys):
    pairs = read_pairs(7, 7)
    lengths = np.diff(pairs.bounds).reshape(7, 2).max(1)
    assert pairs.fitting.tolist() == np.flatnonzero(lengths <= 8).tolist() and 0 < len(pairs.fitting) < 7
    assert f'{7 - len(pairs.fitting)} of 7 train pairs are longer than block_size=7' in capsys.readouterr().out
    said = refusal(read_pairs, 7, 2, 'val')
    assert said == f'all val pairs are longer than block_size=2: use at least {lengths.min() - 1}'
    assert len(read_pairs(7, lengths.min() - 1).fitting) > 0


# -----------------------------------------------------------------------------
# the step

@functools.cache
def golden():
    return dict(np.load(GOLDEN / 'dpo.npz'))


def tree_of(prefix):
    """The arrays of golden() whose names begin with the prefix, as a tree of parameters."""
    return unflatten_dict({tuple(name.removeprefix(prefix).split('/')): array
                           for name, array in golden().items() if name.startswith(prefix)})


def tuned_state(base, tx, rank, scale, parallel):
    config = load_pretrained(base)[0]
    lora = {'base': str(base), 'rank': rank, 'alpha': scale * rank, 'quantize': '', 'checksum': None}
    state = parallel.init_sharded(create_train_state, jax.random.key(0), config, tx, rank)
    return state.replace(frozen=load_frozen(lora, config, parallel)[0]), config


@pytest.mark.parametrize('kind', ['sum', 'mean'])
@pytest.mark.parametrize('n_micro', [1, slow(2)])
def test_loss_margin_accuracy_and_gradients_are_those_of_pytorch(kind, n_micro):
    rank, scale, beta = golden()['rank_scale_beta']
    parallel = setup_distributed_training(jax.devices()[:1])
    state, config = tuned_state(GOLDEN / 'hf', optax.sgd(1.0), int(rank), scale, parallel)
    updates = tree_of('update/')
    state = state.replace(params=parallel.device_put(updates))
    sequences = [golden()[f'{name}/{i}'] for i in range(4) for name in ('chosen', 'rejected')]
    prompts = np.repeat(golden()['prompt_lengths'], 2)
    mask = np.concatenate([np.arange(len(ids)) >= n for ids, n in zip(sequences, prompts)]).astype(np.uint8)
    pairs = Pairs(np.concatenate(sequences), mask, np.cumsum([len(ids) for ids in sequences]),
                  length_normalized=kind == 'mean', block_size=config.block_size, split='train', seed=0)
    batch = pairs.draw(np.arange(8)) | {'seq_id': np.arange(8, dtype=np.uint32)}
    step = parallel.jit_step(make_step(config, parallel, dpo(beta), grad_clip=0.0))
    state, metrics = step(state, parallel.shard_batch(batch, (n_micro, 8 // n_micro)))
    found = [metrics[name] for name in ('loss', 'margin', 'accuracy')]
    np.testing.assert_allclose(found, golden()[f'{kind}/metrics'], rtol=1e-5)
    grads = jax.tree.map(lambda old, new: old - np.asarray(new), updates, state.params)
    expected = flatten_dict(tree_of(f'{kind}/grad/'))
    for path, grad in flatten_dict(grads).items():
        np.testing.assert_allclose(grad, expected[path], rtol=0, atol=1e-5, err_msg=str(path))


def test_a_tie_counts_as_half_a_pair_in_training_and_in_an_evaluation():
    objective = dpo(0.5)
    reference = np.full((6, 1), 3, np.float32)
    batch = {'weight': np.ones((6, 1), np.float32), 'is_row': np.ones(6, np.float32), 'reference_loss': reference}
    loss = np.array([[1.0], [2], [3], [3], [2], [1]], np.float32)  # better, a tie, worse
    means = objective.means(loss, batch)
    sums = objective.sums(loss, batch)
    assert means['accuracy'] == 0.5 and sums['accuracy'] == 6 * 0.5
    at_the_start = objective.means(reference, batch)
    assert at_the_start['accuracy'] == 0.5 and at_the_start['margin'] == 0


@pytest.mark.slow
def test_all_layouts_start_at_ln_2_and_give_the_curve_of_one_device():
    curves = []
    pairs = read_pairs(12, 16, seed=0)
    for layout in (1,), (2,), (8, 2, 2):
        parallel = setup_distributed_training(jax.devices()[:layout[0]], *layout[1:])
        state, config = tuned_state(FAMILIES / 'llama', optax.adam(1e-2), 4, 2.0, parallel)
        step = parallel.jit_step(make_step(config, parallel, dpo(0.5), loss_chunk=8))
        shape = split_batch(2, 8, parallel.n_data_shards)
        curve = []
        for i in range(3):
            rows = parallel.local_rows(16)
            batch = pairs.draw(16 * i + np.arange(16), rows) | {'seq_id': rows.astype(np.uint32)}
            if shape[1] % 2:
                pytest.fail(f'{layout} splits pairs')
            state, metrics = step(state, parallel.shard_batch(batch, shape))
            curve.append([float(metrics[name]) for name in ('loss', 'margin', 'accuracy', 'grad_norm')])
        curves.append(curve)
    curves = np.array(curves)
    assert curves[:, 0, 0] == pytest.approx(math.log(2), abs=1e-6)
    curves[:, 0, 2] = 0  # margins are 0 at the start, but for rounding, which decides how many are above it
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=1e-4, atol=1e-4)
    assert curves[0][2][0] < 0.68 and curves[0][2][1] > 0


# -----------------------------------------------------------------------------
# the script

def test_the_margin_grows_on_pairs_that_were_held_out_and_a_resumed_run_is_the_same(toy, tmp_path):
    flags, _ = toy
    said = succeeded(tune(tmp_path / 'out', *flags)).stdout
    assert re.search(r'step 8: .*, val accuracy 1\.0000, val margin \d\.\d{4}\n', said)
    assert re.search(r'iter 7: .*, margin \d\.\d{4}, accuracy \d\.\d{4}\n', said)
    records = [*read_metrics(tmp_path / 'out')]
    losses = [record['loss'] for record in records if 'loss' in record]
    evaluated = [record for record in records if 'val_loss' in record]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert evaluated[0]['val_loss'] == pytest.approx(math.log(2), abs=1e-6)
    margins = [record['val_margin'] for record in evaluated]
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[0] < margins[1] < margins[2] and margins[2] > 0.05
    assert evaluated[0]['val_accuracy'] == 0.5 and evaluated[-1]['val_accuracy'] == 1
    assert {'margin', 'accuracy'} <= records[-2].keys()
    succeeded(tune(tmp_path / 'again', *flags, '--max_iters=5'))
    succeeded(train(tmp_path / 'again', *RESUME, '--max_iters=8'))
    at_5 = lambda record: record['iter'] == 5 and 'val_loss' in record  # the last evaluation of the shorter run
    resumed = [record for record in records_of(tmp_path / 'again') if not at_5(record)]
    assert resumed == records_of(tmp_path / 'out')
    assert final_state(tmp_path / 'again') == final_state(tmp_path / 'out')
    succeeded(sample(tmp_path / 'out', '--start=a', '--max_new_tokens=5', '--num_samples=1'))


def test_the_margin_is_that_of_beta_and_per_token_if_it_is_normalized(toy, tmp_path):
    succeeded(tune(tmp_path / 'out', *toy[0], '--max_iters=2'))

    def margin(*more):
        said = succeeded(train(tmp_path / 'out', *RESUME, '--eval_only=True', *more)).stdout
        return float(re.search(r'val margin (-?[\d.]+)', said)[1])

    of_sums = margin('--beta=10.0')
    assert of_sums > 0.1 and margin('--beta=20.0') == pytest.approx(2 * of_sums, abs=2e-4)
    # answers of 2 to 8 tokens, with their ends
    assert of_sums / 8 < margin('--beta=10.0', '--length_normalized=True') < of_sums / 2


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_run_goes_on_with_the_same_bits_and_knows_its_pairs(toy, tmp_path):
    flags, data = toy
    flags = [*flags, '--max_iters=40', '--save_interval=5', '--eval_interval=20']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    succeeded(tune(whole, *flags))
    process = start('train_jax.py', 'config/finetune_dpo.py', f'--out_dir={killed}', *flags)
    wait_for('iteration 20', lambda: any(record['iter'] >= 20 for record in read_metrics(killed)), process)
    process.kill()
    process.communicate()
    succeeded(train(killed, *RESUME))
    assert records_of(killed) == records_of(whole) and final_state(killed) == final_state(whole)
    mask = (data / 'val_mask.bin').read_bytes()
    (data / 'val_mask.bin').write_bytes(mask[::-1])
    assert_refused(train(killed, *RESUME, '--max_iters=42'), 'is not the data of .*val_mask.bin: other content')
    accepted = train(killed, *RESUME, '--max_iters=42', f'--dataset={data}')
    assert 'other data from iteration 40 on (val_mask.bin: other content)' in succeeded(accepted).stdout


def test_what_cannot_train_on_pairs_is_refused_in_one_line(toy, tmp_path):
    flags, data = toy
    for more, message in (('--lora_rank=0', 'which LoRA learns from: see config/finetune_dpo.py'),
                          ('--batch_size=3', 'the two sequences of a pair go to one device: .* a multiple of 2'),
                          ('--beta=0', 'beta must be above 0'),
                          ('--block_size=4', 'all train pairs are longer than block_size=4')):
        assert_refused(tune(tmp_path / 'out', *flags, more), message)
    (data / 'val_ends.bin').write_bytes(np.array([3, 9]).tobytes())
    assert_refused(tune(tmp_path / 'out', *flags), 'val_ends.bin is missing or damaged')
    (data / 'train_mask.bin').unlink()
    assert_refused(tune(tmp_path / 'out', *flags), 'the masks of .* are missing or of other tokens')
    edit_json(data / 'meta.json', kind='triples')
    assert_refused(tune(tmp_path / 'out', *flags), "kind 'triples' is neither chats nor pairs")
    assert not (tmp_path / 'out').exists()
