"""--verify: a run is trained again from checkpoint to checkpoint, and what was changed in it is named; rows of
tools/five_minutes.py, of which the beginning is."""
import hashlib
import json
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jax_run.checkpoints import checkpoint_steps, choose_checkpoint
from jax_run.log import read_metrics
from jax_run.manifest import describe_file
from jax_run.verify import Found, Logged, compare_file, verify_run
from tests.common import (
    FAMILIES, RESUME, ROOT, assert_refused, copy_folder, prepare, refusal, run_script, slow, succeeded, train,
    write_dataset, write_random_data)
from tools.five_minutes import print_row

TRAIN = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--eval_iters=1',
         '--learning_rate=1e-2', '--warmup_iters=1', '--lr_decay_iters=6', '--max_iters=6', '--eval_interval=2',
         '--log_interval=1', '--gradient_accumulation_steps=2', '--keep=2']


def verify(out, *flags):
    """(exit code, the lines from the first that says what is verified)."""
    result = train(out, *RESUME, '--verify=9', *flags)
    lines = result.stdout.splitlines()
    first = next((i for i, line in enumerate(lines) if 'can be verified' in line), 0)
    return result.returncode, lines[first:]


def edit_manifest(out, **changes):
    """Changes parts of the manifest in all checkpoints, as if the run had had them."""
    for step in (out / 'ckpt').iterdir():
        (step / 'checksums.json').write_text('{}')
        path = step / 'meta' / 'metadata'
        meta = json.loads(path.read_text())
        for part, values in changes.items():
            meta['manifest'][part] |= values
        path.write_text(json.dumps(meta))


def flip_a_bit(out):
    """Flips the last bit of a weight of the latest checkpoint."""
    step = out / 'ckpt' / str(checkpoint_steps(out)[0])
    (step / 'checksums.json').write_text('{}')
    with ocp.StandardCheckpointer() as checkpointer:
        params = jax.tree.map(np.array, checkpointer.restore(step / 'params'))
        params['ln_f']['scale'].view(np.uint32)[5] ^= 1
        checkpointer.save(step / 'params', params, force=True)


def edit_log(out, by=0.01):
    """Changes the loss of an iteration in metrics.jsonl, by hand."""
    path = out / 'metrics.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    record = next(line for line in lines if line['iter'] == 13 and 'loss' in line)
    record['loss'] -= by
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def test_a_run_has_the_same_bits_and_nothing_is_written(run_copy):
    before = {path: path.read_bytes() for path in run_copy.rglob('*') if path.is_file()}
    code, lines = verify(run_copy)
    assert code == 0
    assert lines[0].startswith('2 intervals between checkpoints can be verified; training the last 2 again, 20 '
                               'iterations, which took about ')
    assert lines[1:] == ['iterations 0 to 10: the same bits', 'iterations 10 to 20: the same bits']
    assert {path: path.read_bytes() for path in run_copy.rglob('*') if path.is_file()} == before
    assert train(run_copy, *RESUME, '--verify=1').stdout.count('the same bits') == 1


@pytest.mark.parametrize('split, i, is_read', [('train', 7, True), ('val', 30, False)])
def test_one_token_of_the_data_is_named(dataset, run_copy, tmp_path, split, i, is_read):
    other = copy_folder(dataset, tmp_path / 'other')
    tokens = np.fromfile(other / f'{split}.bin', np.uint16)
    tokens[i] ^= 1
    tokens.tofile(other / f'{split}.bin')
    code, lines = verify(run_copy, f'--dataset={other}')
    assert code == 1 and lines[1] == f'data {split}.bin: other content'
    assert ('iterations 0 to 10: the same bits' in lines) != is_read


def test_all_of_a_file_is_read_if_its_digest_is_known():
    tokens = np.arange(9000, dtype=np.uint16)
    before = describe_file(tokens, hashlib.sha256(tokens).hexdigest())
    assert compare_file(before, tokens) == ''
    tokens[5000] ^= 1
    assert compare_file(before, tokens) == 'other content'


@pytest.mark.parametrize('change, is_same, said', [
    (flip_a_bit, False, "iterations 10 to 20: 1 of "),
    (edit_log, False, 'iterations 10 to 20: the same weights, bit for bit; 1 values of the log differ, first: loss of '
                      'iteration 13 is '),
    (lambda out: edit_manifest(out, sources={'jax_ops/layers.py': 'abc'}), True,
     'source jax_ops/layers.py: abc in the run, '),
    (lambda out: edit_manifest(out, versions={'optax': '0.1'}), True, 'version optax: 0.1 in the run, '),
    (lambda out: edit_manifest(out, settings={'jax_default_prng_impl': 'rbg'}), True,
     'setting jax_default_prng_impl: rbg in the run, threefry2x32 here'),
    (lambda out: edit_manifest(out, flags={'weight_decay': 0.3}), True,
     'flag weight_decay: 0.3 in the run, 0.1 here')])
def test_what_was_changed_is_named(change, is_same, said, run_copy):
    change(run_copy)
    code, lines = verify(run_copy)
    assert any(line.startswith(said) for line in lines), lines
    assert code == (0 if is_same else 1)


def test_a_run_is_verified_by_one_process(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    assert 'is for one process; JAX_NUM_CPU_DEVICES=2' in refusal(verify_run, *[None] * 5)


def test_a_flag_that_the_run_did_not_have_is_refused_by_name(run_copy):
    assert_refused(train(run_copy, *RESUME, '--verify=1', '--beta2=0.9'), 'earlier iterations had another beta2')


@pytest.mark.parametrize('values, n_compared, is_accepted', [
    ([1.01], 9, True), ([1.03], 9, False), ([1.01, float('nan')], 9, False), ([], 0, False), ([], 9, True)])
def test_what_another_kind_of_machine_may_differ_in(values, n_compared, is_accepted):
    found = Found('', [Logged(i, 'loss', value, 1.0) for i, value in enumerate(values)], n_compared)
    assert found.is_within_bound == is_accepted


@pytest.mark.parametrize('by, code, said', [
    (0.01, 0, 'another machine, losses within 0.01 (at most 0.02 is expected)'),
    (0.03, 1, 'the same weights, bit for bit; 1 values of the log differ, first: loss of iteration 13 is ')])
def test_another_kind_of_machine_has_losses_within_a_bound(by, code, said, run_copy):
    edit_log(run_copy, by)
    edit_manifest(run_copy, devices={'cpu': 'another one'})
    found, lines = verify(run_copy)
    assert found == code and lines[1].startswith('machine: 1 x cpu another one in the run, 1 x cpu ')
    assert lines[3].startswith(f'iterations 10 to 20: {said}')


@pytest.mark.parametrize('name, iteration', [('val_bpb', 20), ('lr', 13)])
def test_every_value_of_the_log_is_compared(name, iteration, run_copy):
    path = run_copy / 'metrics.jsonl'
    records = [json.loads(line) for line in path.read_text().splitlines()]
    next(record for record in records if record['iter'] == iteration and name in record)[name] += 0.5
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
    code, lines = verify(run_copy, '--verify=1')
    assert code == 1 and f'1 values of the log differ, first: {name} of iteration {iteration}' in lines[-1]


def test_another_number_of_devices_is_another_machine(run_copy):
    code, lines = verify(run_copy, '--device=cpu')
    assert code == 0
    assert lines[1].startswith('machine: 1 x cpu') and f' in the run, {jax.device_count()} x cpu' in lines[1]
    assert all('another machine, losses within' in line for line in lines[2:]) and len(lines) == 4


@pytest.mark.parametrize('kinds, flags', [
    (['text'], ['--optimizer=muon', '--ema=0.9']),
    slow(['text'], ['--dtype=bfloat16']),
    slow(['text'], ['--dtype=float16']),
    slow(['text'], ['--device=cpu', '--fsdp=2']),
    slow(['text'], ['--device=cpu', '--zero=2']),
    slow(['text'], ['--device=cpu']),
    slow(['text'], ['--n_expert=4']),
    slow(['packed'], []),
    slow(['chats', 'text'], []),
    slow(['text'], ['--dropout=0.1', '--position=rope'])])
def test_an_honest_run_of_any_kind_verifies(kinds, flags, tmp_path):
    names = []
    for kind in kinds:
        write_random_data(tmp_path / kind, kind, 17, seed=1)
        names.append(str(tmp_path / kind))
    dataset = names[0] if len(names) == 1 else ','.join(f'{name}:0.5' for name in names)
    flags = [f'--dataset={dataset}', '--device=cpu:0', *TRAIN, *flags]
    succeeded(train(tmp_path / 'out', *flags))
    device = '--device=cpu' if '--device=cpu' in flags else '--device=cpu:0'
    code, lines = verify(tmp_path / 'out', device)
    assert code == 0 and lines[-1].endswith(': the same bits') and len(lines) >= 3, lines


def test_the_loss_of_each_data_set_of_a_mixture_is_compared(tmp_path):
    for name in ('web', 'code'):
        write_random_data(tmp_path / name, 'text', 17, seed=1)
    out = tmp_path / 'out'
    mixture = f'{tmp_path / "web"}:0.5,{tmp_path / "code"}:0.5'
    succeeded(train(out, f'--dataset={mixture}', '--device=cpu:0', *TRAIN))
    path = out / 'metrics.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line['iter'] == 6 and 'val_loss' in line)['val_loss_web'] -= 0.5
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    code, lines = verify(out, '--device=cpu:0')
    assert code == 1 and '1 values of the log differ, first: val_loss_web of iteration 6' in lines[-1], lines


def test_evaluations_of_another_size_begin_anew_and_are_not_compared(dataset, tmp_path):
    out = tmp_path / 'out'
    succeeded(train(out, f'--dataset={dataset}', '--device=cpu:0', *TRAIN))
    records = [record for record in read_metrics(out) if 'val_loss' in record]
    n = records[-1]['iter']
    longer = [f'--max_iters={2 * n}', f'--lr_decay_iters={2 * n}']
    said = succeeded(train(out, *RESUME, '--eval_iters=7', *longer)).stdout
    size = 7 * choose_checkpoint(out)[1]['flags']['batch_size']
    assert f'sequences of an evaluation: {size} from iteration {n} on, ' in said
    latest = choose_checkpoint(out, 'latest')[1]
    since = [record['val_loss'] for record in read_metrics(out) if record['iter'] >= n and 'val_loss' in record]
    assert latest['best_val_loss'] in since and choose_checkpoint(out)[0] > n
    code, lines = verify(out)
    assert code == 0 and all(line.endswith(': the same bits') for line in lines[1:]), lines
    assert not any('iterations 0 to' in line for line in lines)


def test_a_run_that_was_resumed_in_between_verifies(dataset, tmp_path):
    out = tmp_path / 'out'
    succeeded(train(out, f'--dataset={dataset}', '--device=cpu:0', *TRAIN, '--max_iters=3'))
    succeeded(train(out, *RESUME, '--max_iters=6'))
    code, lines = verify(out)
    assert code == 0 and all(line.endswith(': the same bits') for line in lines[1:]), lines


@pytest.mark.slow
@pytest.mark.long
def test_lora_and_dpo_verify_from_their_start(chatting, tmp_path):
    base = copy_folder(FAMILIES / 'llama', tmp_path)
    n = json.loads((base / 'config.json').read_text())['vocab_size']
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / 'data', rng.integers(8, size=600), rng.integers(8, size=600), vocab_size=n)
    lora = ['--lora_rank=4', '--lora_alpha=8', '--batch_size=4', '--gradient_accumulation_steps=2', '--eval_iters=2',
            '--eval_interval=2', '--max_iters=4', '--learning_rate=1e-2', '--decay_lr=False', '--device=cpu:0']
    succeeded(train(tmp_path / 'lora', f'--dataset={tmp_path / "data"}', f'--init_from={base}', '--block_size=16',
                    *lora))
    pairs = tmp_path / 'pairs.jsonl'
    pairs.write_text('\n'.join(json.dumps({
        'messages': [{'role': 'user', 'content': 'abc'[:1 + i % 3]}], 'chosen': 'a', 'rejected': 'b'})
        for i in range(40)))
    succeeded(prepare('chat', pairs, f'--tokenizer={chatting}', f'--out_dir={tmp_path / "dpo"}'))
    succeeded(train(tmp_path / 'dpo-out', f'--dataset={tmp_path / "dpo"}', f'--init_from={chatting}',
                    '--block_size=32', *lora))
    for name in ('lora', 'dpo-out'):
        code, lines = verify(tmp_path / name)
        assert code == 0 and lines[1] == 'iterations 0 to 2: the same bits', lines


def test_what_cannot_be_verified_is_one_line_with_exit_code_2(run_copy, tmp_path, dataset):
    assert_refused(train(tmp_path / 'none', '--verify=1'), 'verify needs an existing run: --init_from=resume')
    assert_refused(train(tmp_path / 'none', *RESUME, '--verify=1', '--eval_only=True'),
                   'verify trains and eval_only does not: give only one')
    # flags of the earlier iterations are others
    succeeded(train(run_copy, *RESUME, '--max_iters=22', '--lr_decay_iters=22', '--weight_decay=0.2', '--keep=1'))
    assert_refused(train(run_copy, *RESUME, '--verify=1'), 'no two checkpoints between which it could be trained '
                   'again; earlier iterations had another lr_decay_iters, weight_decay: save more')


@pytest.fixture(scope='module')
def row(dataset, tmp_path_factory):
    """(the row that the tool has made of a small config, its file)."""
    folder = tmp_path_factory.mktemp('row')
    config = folder / 'small.py'
    names = [flag[2:].split('=') for flag in TRAIN]
    config.write_text('\n'.join(f'{name} = {value}' for name, value in names)
                      + f'\nminutes = 0.0\nmax_iters = 6\ndataset = {str(dataset)!r}\ndevice = "cpu:0"\n')
    file = folder / 'row.json'
    made = succeeded(run_script('tools/five_minutes.py', f'--config={config}', '--seeds=1,2', f'--save={file}'))
    return made.stdout, file


@pytest.mark.slow
@pytest.mark.long
def test_a_row_of_five_minutes_can_be_checked(row, tmp_path):
    table, file = row
    assert table.splitlines()[0].startswith('| machine | cores |') and '| 6 to 6 |' in table
    values = json.loads(file.read_text())
    assert [one['seed'] for one in values['seeds']] == [1, 2] and values['manifest']['flags']['n_embd'] == 16
    for more in ([], ['--all']):
        checked = succeeded(run_script('tools/five_minutes.py', f'--check={file}', *more))
        assert [line for line in checked.stdout.splitlines() if line.startswith('seed ')] == [
            'seed 1, 6 of 6 iterations: the same bits', 'seed 2, 6 of 6 iterations: the same bits']

    # a row that claims a better model than it trained, in losses or in bits per byte
    values['seeds'][0]['bits_per_byte'] -= 1
    other = tmp_path / 'other.json'
    other.write_text(json.dumps(values))
    result = run_script('tools/five_minutes.py', f'--check={other}', '--all')
    assert result.returncode == 1
    assert 'seed 1, 6 of 6 iterations: differs, losses or bits per byte by up to 1\n' in result.stdout
    values['seeds'][0]['bits_per_byte'] += 1
    values['seeds'][0]['losses']['3'] -= 0.5
    values['seeds'][1]['digest_begin'] = '0' * 16
    values['manifest']['sources']['jax_ops/layers.py'] = 'abc'
    other.write_text(json.dumps(values))
    result = run_script('tools/five_minutes.py', f'--check={other}')
    assert result.returncode == 1
    assert 'seed 1, 6 of 6 iterations: differs, losses or bits per byte by up to 0.5\n' in result.stdout
    assert 'seed 2, 6 of 6 iterations: differs, losses or bits per byte by up to 0\n' in result.stdout
    assert result.stdout.count('source jax_ops/layers.py: abc in the row, ') == 1  # not for each seed
    # nothing to compare
    values['seeds'][0]['losses'] = {}
    for content, message in ((values, 'no losses of seed 1'), ({'a': 1}, 'lacks config, flags, manifest, seeds')):
        other.write_text(json.dumps(content))
        assert_refused(run_script('tools/five_minutes.py', f'--check={other}'), message)


def test_our_row_of_five_minutes_is_that_of_the_table(capsys):
    row = json.loads((ROOT / 'docs' / 'five_minutes' / 'epyc_2_cores.json').read_text())
    print_row(row)
    assert capsys.readouterr().out.splitlines()[-1] in (ROOT / 'docs' / 'lab_log.md').read_text().splitlines()
    assert [one['seed'] for one in row['seeds']] == [1337, 1338, 1339] and row['flags'] == []
    assert re.fullmatch('[0-9a-f]{40}', row['manifest']['commit'])  # of a tree without other changes
    assert all(one['digest_begin'] and one['iterations'] > 1000 for one in row['seeds'])
