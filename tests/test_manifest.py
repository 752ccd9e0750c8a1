"""The manifest: what a run is made of, compared at a resume and between processes."""
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

import jax_devices.processes
import jax_run.manifest
from jax_hub.tokenizer_files import write_char_tokenizer
from jax_run.checkpoints import checkpoint_steps, choose_checkpoint, read_val_loss
from jax_run.compare import compare_runs, mark_val_data, read_run
from jax_run.data import load_dataset_meta
from jax_run.manifest import (
    BLOCK, N_BLOCKS, check_agreement, describe_data, describe_file, digest_sources, find_changed, find_changes,
    find_commit, find_other_losses, flatten, say_what_differs, spread_blocks, val_digest)
from jax_run.sources import open_data
from tests.common import (
    FAMILIES, MODEL, RESUME, ROOT, SHORT, assert_refused, copy_folder, edit_json, edit_tensors, free_port, long,
    prepare, records_of, refusal, start, succeeded, train, write_dataset)


@pytest.fixture
def data(dataset, tmp_path):
    """A copy of the data set, to be changed."""
    return copy_folder(dataset, tmp_path)


def reverse(path):
    """Prepares a file anew: the same tokens in another order."""
    tokens = np.fromfile(path, np.uint16)[::-1]
    tokens.tofile(path)


def manifest_of(out_dir):
    return choose_checkpoint(out_dir)[1]['manifest']


def strip_manifest(out_dir):
    """Makes the checkpoints those of a version that wrote no manifest."""
    for step in (out_dir / 'ckpt').iterdir():
        (step / 'checksums.json').write_text('{}')
        meta = json.loads((step / 'meta' / 'metadata').read_text())
        del meta['manifest']
        (step / 'meta' / 'metadata').write_text(json.dumps(meta))
    settings = json.loads((out_dir / 'config.json').read_text())
    del settings['manifest']
    (out_dir / 'config.json').write_text(json.dumps(settings))

# -----------------------------------------------------------------------------
# the fingerprint of a file

def test_every_byte_of_a_small_file_counts():
    tokens = np.arange(70_000, dtype=np.uint16)
    for place in (0, 40_000, 69_999):
        other = tokens.copy()
        other[place] ^= 1
        assert describe_file(other) != describe_file(tokens)
    assert describe_file(tokens.reshape(100, 700)) == describe_file(tokens)


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last():
    n = 3 * N_BLOCKS * BLOCK
    starts = spread_blocks(n)
    assert starts[0] == 0 and starts[-1] + BLOCK == n and max(np.diff(starts)) < 3.1 * BLOCK
    content = np.zeros(n, np.uint8)
    other = content.copy()
    other[n // 6:5 * n // 6] = 1  # another middle
    assert describe_file(content)['samples'] != describe_file(other)['samples']


def test_a_digest_tells_what_samples_do_not_and_does_not_count_where_one_is_missing():
    file = {'bytes': 10, 'samples': '1'}
    one, other = ({'name': 'a', 'fraction': 1.0, 'files': {'val.bin': {**file, 'sha256': x}}} for x in 'xy')
    unknown = {'name': 'b', 'fraction': 1.0, 'files': {'val.bin': file}}
    assert find_changes([one], [other]) == ['val.bin: other content']
    assert find_changes([one], [unknown]) == find_changes([unknown], [one]) == []
    assert val_digest({'data': [one]}) == val_digest({'data': [unknown]})
    shorter = {**unknown, 'files': {'val.bin': {**file, 'bytes': 9}}}
    assert find_changes([one], [shorter]) == ['val.bin: 10 bytes before, 9 now']
    assert find_changes([one], [{**one, 'fraction': 0.5}]) == ['fraction: 1 before, 0.5 now']
    assert find_changes([one], [one, one]) == ['1 data sets before, 2 now']


@pytest.mark.parametrize('kind, names', [
    ('pairs', ['train.bin', 'train_mask.bin', 'train_ends.bin', 'val.bin', 'val_mask.bin', 'val_ends.bin']),
    ('chats', ['train.bin', 'val.bin', 'train_mask.bin', 'val_mask.bin'])])
def test_masks_ends_and_the_digests_of_meta_json_are_described(tmp_path, kind, names):
    tokens = np.arange(60) % 7
    write_dataset(tmp_path / kind, tokens, tokens, vocab_size=7, kind=kind, digests={'val_mask.bin': 'abc'})
    for split in ('train', 'val'):
        np.ones(60, np.uint8).tofile(tmp_path / kind / f'{split}_mask.bin')
        if kind == 'pairs':
            np.array([30, 60]).tofile(tmp_path / kind / f'{split}_ends.bin')
    data = open_data({tmp_path / kind: 1.0}, load_dataset_meta(tmp_path / kind), block_size=32, seed=0)
    described, = describe_data(data.sets)
    assert list(described['files']) == names
    assert described['files']['val_mask.bin']['sha256'] == 'abc' and 'sha256' not in described['files']['val.bin']

# -----------------------------------------------------------------------------
# a resume

def test_a_resume_refuses_other_data_until_they_are_named_on_the_command_line(data, flags, tmp_path):
    out, config = tmp_path / 'out', tmp_path / 'c.py'
    flags = [*flags, f'--dataset={data}', '--keep=9']
    succeeded(train(out, *flags, '--max_iters=5', '--eval_interval=5'))
    config.write_text(f'dataset = {str(data)!r}\n')
    before = manifest_of(out)
    assert before['earlier_data'] == [] and before['data'][0]['name'] == data.name
    loss_before = read_val_loss(out / 'ckpt' / '5')

    reverse(data / 'val.bin')
    remedy = f'is not the data of .*val.bin: other content.*--init_from=resume --dataset={data}'
    for given in (RESUME, [config, *RESUME], [*flags, '--init_from=auto'], [*RESUME, '--eval_only=True']):
        assert_refused(train(out, *given), remedy)

    edit_json(out / 'ckpt' / '5' / 'metrics' / 'metrics', val_loss=1e-3)  # nothing on other data may be compared with
    (out / 'ckpt' / '5' / 'checksums.json').write_text('{}')
    result = succeeded(train(out, *RESUME, f'--dataset={data}', '--max_iters=8', '--eval_interval=1'))
    assert 'other data from iteration 5 on (val.bin: other content): the best' in result.stdout
    step, meta = choose_checkpoint(out)
    assert step == 8 and meta['best_val_loss'] > 1e-3
    now = meta['manifest']
    assert now['earlier_data'] == [{'until': 5, 'data': before['data']}] and now['data'] != before['data']
    assert choose_checkpoint(out, 'best')[0] > 5 and loss_before < 5
    succeeded(train(out, *RESUME, '--max_iters=9'))  # the same data: nothing to name, and what was before is kept
    assert manifest_of(out)['earlier_data'] == now['earlier_data']


def test_a_resume_that_only_gets_worse_keeps_the_model_that_it_began_with(run_copy):
    worse = ['--eval_iters=3', '--learning_rate=10.0', '--warmup_iters=0', '--decay_lr=False', '--keep=1']
    for max_iters in (23, 26):  # two saves, of which only the last is kept
        said = succeeded(train(run_copy, *RESUME, *worse, f'--max_iters={max_iters}', '--eval_interval=1')).stdout
        assert 'before training: no checkpoint is better' not in said
    records = [record for record in records_of(run_copy, 'val_loss') if record['iter'] == 20]
    assert ['anew' in record for record in records] == [False, True]  # with the run's data, and with the new
    assert choose_checkpoint(run_copy, 'best')[0] == 20
    assert sorted(checkpoint_steps(run_copy)) == [20, 26]
    assert read_run(run_copy, 'iterations')['best'] == records[1]['val_bpb'] != records[0]['val_bpb']
    # another resume from there begins anew, too
    succeeded(train(run_copy, *RESUME, '--eval_iters=4', '--max_iters=27'))
    assert choose_checkpoint(run_copy, 'best')[0] in (26, 27)


def test_the_best_model_since_the_data_have_changed_is_kept_beside_a_lower_loss_of_before(run_copy):
    before = run_copy / 'ckpt' / '20'
    (before / 'checksums.json').write_text('{}')
    (before / 'metrics' / 'metrics').write_text('{"val_loss": 0.1}')
    for more in (['--eval_iters=3', '--max_iters=24'], ['--learning_rate=10.0', '--max_iters=26']):
        succeeded(train(run_copy, *RESUME, '--decay_lr=False', '--keep=1', *more))
    assert checkpoint_steps(run_copy) == [26, 24, 20] and choose_checkpoint(run_copy, 'best')[0] == 24


def test_the_same_data_in_another_place_are_resumed(data, flags, tmp_path):
    out = tmp_path / 'out'
    succeeded(train(out, *flags, f'--dataset={data}', '--max_iters=2'))
    (tmp_path / 'c.py').write_text(f'dataset = {str(data.rename(tmp_path / "moved"))!r}\n')
    result = succeeded(train(out, tmp_path / 'c.py', *RESUME, '--max_iters=3'))
    assert 'other data' not in result.stdout and manifest_of(out)['earlier_data'] == []


def test_a_run_without_a_manifest_goes_on_with_a_line(run_copy):
    strip_manifest(run_copy)
    result = succeeded(train(run_copy, *RESUME, '--max_iters=21'))
    assert result.stdout.count('does not name its data') == 1
    assert manifest_of(run_copy)['data'][0]['files'].keys() == {'train.bin', 'val.bin'}


def test_config_json_has_the_manifest_of_the_run_which_is_no_flag_of_it(data, run_copy, tmp_path, capsys):
    manifest = json.loads((run_copy / 'config.json').read_text())['manifest']
    assert manifest == manifest_of(run_copy)
    reverse(data / 'train.bin')
    accepted = train(run_copy, *RESUME, f'--dataset={data}', '--max_iters=21')
    assert 'other data from iteration 20 on' in succeeded(accepted).stdout
    now = json.loads((run_copy / 'config.json').read_text())['manifest']
    assert now['earlier_data'] == [{'until': 20, 'data': manifest['data']}] and now == manifest_of(run_copy)
    # beside a run of an earlier version, the table says nothing of it
    strip_manifest(earlier := copy_folder(run_copy, tmp_path / 'earlier'))
    compare_runs([run_copy, earlier])
    assert 'manifest' not in capsys.readouterr().out


def test_a_mixture_with_other_fractions_is_other_data(data, dataset, flags, tmp_path):
    out, other = tmp_path / 'out', data.rename(tmp_path / 'other')
    succeeded(train(out, *flags, f'--dataset={dataset}:0.5,{other}:0.5', '--max_iters=2'))
    (tmp_path / 'c.py').write_text(f'dataset = {f"{dataset}:0.25,{other}:0.75"!r}\n')
    assert_refused(train(out, tmp_path / 'c.py', *RESUME), 'fraction of .*: 0.5 before, 0.25 now')
    # the same fractions, and other content of the second set
    reverse(other / 'train.bin')
    assert_refused(train(out, *RESUME), 'is not the data of .*train.bin of other: other content')
    accepted = train(out, *RESUME, f'--dataset={dataset}:0.5,{other}:0.5', '--max_iters=3')
    assert 'other data from iteration 2 on (train.bin of other: other content)' in succeeded(accepted).stdout


def test_a_resume_says_which_flags_are_others(capsys):
    say_what_differs({'flags': {'weight_decay': [0.1, 0.2], 'max_iters': [10, 20]}})
    assert capsys.readouterr().out == 'other flags than so far: weight_decay 0.1 -> 0.2\n'


def test_another_choice_for_the_devices_is_a_change(finished):
    known = manifest_of(finished[0])
    assert find_changed(known, known) == {}
    assert find_changed(known, {**known, 'dtype': 'bfloat16'}) == {'chosen': {'dtype': ['float32', 'bfloat16']}}


@pytest.mark.parametrize('name, value', [('beta', 0.2), ('length_normalized', True), ('block_size', 8)])
def test_losses_of_another_kind_do_not_compare(name, value):
    flags = {'beta': 0.1, 'length_normalized': False, 'block_size': 16, 'learning_rate': 1e-3}
    assert find_other_losses({'flags': flags}, {'flags': flags | {'learning_rate': 1e-4}}) == {}
    assert find_other_losses({'flags': flags}, {'flags': flags | {name: value}}) == {name: [flags[name], value]}


def test_a_manifest_holds_no_path_host_or_user(finished):
    manifest = manifest_of(finished[0])
    text = json.dumps(manifest)
    assert str(ROOT) not in text and '/home' not in text and '/tmp' not in text
    assert manifest['sources'].keys() >= {'train_jax.py', 'jax_transformer.py', 'jax_run/sources.py'}
    assert manifest['versions'].keys() >= {'python', 'jax', 'jaxlib', 'flax', 'optax', 'numpy'}
    assert manifest.keys() == {
        'format', 'data', 'earlier_data', 'earlier', 'tokenizer', 'start', 'sources', 'commit', 'versions', 'settings',
        'devices', 'flags', 'dtype', 'attention', 'experts'}
    assert manifest['devices'].keys() == {'kind', 'cpu', 'number', 'processes'}
    assert (manifest['dtype'], manifest['attention']) == ('float32', 'xla')
    assert len(text) < 20_000


@pytest.mark.skipif(not shutil.which('git'), reason='needs git')
def test_the_commit_is_that_of_this_checkout_with_a_plus_if_its_files_have_been_changed(tmp_path, monkeypatch):
    def git(*words):
        author = ['-c', 'user.name=a', '-c', 'user.email=a', '-c', 'commit.gpgsign=false']
        subprocess.run(['git', '-C', tmp_path, *author, *words], check=True, capture_output=True)

    monkeypatch.setattr(jax_run.manifest, '__file__', str(tmp_path / 'jax_run' / 'manifest.py'))
    assert find_commit() is None
    git('init')
    git('commit', '--allow-empty', '-m', 'a project around it')
    (tmp_path / 'train_jax.py').write_text('')
    assert find_commit() is None
    git('add', '.')
    git('commit', '-m', 'its own')
    commit = find_commit()
    assert re.fullmatch('[0-9a-f]{40}', commit)
    (tmp_path / 'train_jax.py').write_text('changed')
    assert find_commit() == f'{commit}+'


def test_the_ends_of_lines_in_a_checkout_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(jax_run.manifest, '__file__', str(tmp_path / 'jax_run' / 'manifest.py'))
    found = []
    for content in (b'a = 1\nb = 2\n', b'a = 1\r\nb = 2\r\n', b'a = 1\nb = 3\n'):
        (tmp_path / 'train_jax.py').write_bytes(content)
        found.append(digest_sources.__wrapped__()['train_jax.py'])
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_a_tokenizer_in_another_place_is_the_same(tmp_path):
    """Each of several processes may have the data elsewhere."""
    (tmp_path / 'a.txt').write_text('the weather there\n' * 300)
    succeeded(prepare('text', tmp_path / 'a.txt', '--tokenizer=bpe:260', '--out_dir', tmp_path / 'here'))
    shutil.copytree(tmp_path / 'here', tmp_path / 'there')
    found = []
    for place in ('here', 'there'):
        succeeded(train(tmp_path / 'out', f'--dataset={tmp_path / place}', '--max_iters=1', *MODEL, *SHORT))
        found.append(manifest_of(tmp_path / 'out')['tokenizer'])
        shutil.rmtree(tmp_path / 'out')
    assert found[0] == found[1]


def test_other_fractions_of_a_mixture_are_other_validation_data():
    files = {'val.bin': {'bytes': 8, 'samples': '0'}}
    digests = {val_digest({'data': [{'fraction': x, 'files': files}, {'fraction': 1 - x, 'files': files}]})
               for x in (0.5, 0.25)}
    assert len(digests) == 2


def test_runs_with_different_validation_data_are_marked(data, finished, flags, tmp_path, capsys):
    compare_runs([finished[0], finished[0]])
    assert 'val data' not in capsys.readouterr().out
    reverse(data / 'val.bin')
    succeeded(train(tmp_path / 'out', *flags, f'--dataset={data}', '--max_iters=2'))
    figure = compare_runs([finished[0], tmp_path / 'out'])
    warning, header, *rows = capsys.readouterr().out.splitlines()
    assert 'different validation data, so their losses cannot be compared' in warning and 'val data' in header
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    for folder in (finished[0], tmp_path / 'out'):
        mark = val_digest(manifest_of(folder))[:8]
        assert any(str(folder) in row and mark in row for row in rows) and any(mark in label for label in labels)


def test_a_run_of_unknown_validation_data_is_marked_so(capsys):
    runs = [{'val_data': digest} for digest in ('a', 'b', '')]
    mark_val_data(runs)
    assert [run['marked'] for run in runs] == [{'val data': 'a'}, {'val data': 'b'}, {'val data': '?'}]
    mark_val_data(runs[1:])
    assert [run['marked'] for run in runs[1:]] == [{}, {}]


def test_a_resume_says_which_versions_and_settings_are_others(run_copy, finished, monkeypatch):
    manifest = manifest_of(finished[0])
    assert manifest['settings']['jax_default_prng_impl'] == 'threefry2x32' and manifest['devices']['number'] == 1
    assert manifest['flags']['n_layer'] == 1 and not {'out_dir', 'dataset'} & manifest['flags'].keys()
    assert json.loads((finished[0] / 'config.json').read_text())['manifest'] == manifest
    assert 'differs from the run so far' not in succeeded(train(run_copy, *RESUME, '--max_iters=21')).stdout
    monkeypatch.setattr(jax_run.manifest, 'find_versions', lambda: manifest['versions'] | {'optax': '9.9'})
    monkeypatch.setenv('XLA_FLAGS', f'{os.environ.get("XLA_FLAGS", "")} --xla_other=1 --xla_dump_to=/home/me')
    said = succeeded(train(run_copy, *RESUME, '--max_iters=22')).stdout
    assert f'optax: {manifest["versions"]["optax"]} before, 9.9 now' in said
    assert re.search('XLA_FLAGS: .* before, .*--xla_other=1 now', said) and '/home/me' not in said

# -----------------------------------------------------------------------------
# several processes

@pytest.mark.parametrize('change, said', [
    ({'versions': {'jax': '9'}}, 'the version of jax is .* and 9'),
    ({'attention': 'splash'}, 'attention is xla and splash'),
    ({'settings': {'jax_default_prng_impl': 'rbg'}}, 'jax_default_prng_impl is threefry2x32 and rbg'),
    ({'tokenizer': 'other'}, 'the tokenizer is [0-9a-f]{16} and other'),
    ({'sources': {'jax_train_utils.py': '0'}}, 'jax_train_utils.py is [0-9a-f]{16} and 0'),
    ({'data': {'val.bin': {'bytes': 9, 'samples': '1'}}}, 'val.bin is .* bytes, [0-9a-f]{8}.* and 9 bytes, 1')])
def test_processes_that_differ_in_what_they_compute_are_refused(finished, monkeypatch, change, said):
    mine = manifest_of(finished[0])
    other = json.loads(json.dumps(mine))
    for key, value in change.items():
        if key == 'data':
            other['data'][0]['files'].update(value)
        elif isinstance(value, dict):
            other[key].update(value)
        else:
            other[key] = value
    other['data'][0]['name'] = 'elsewhere'  # which does not count
    texts = [json.dumps(flatten(mine)), json.dumps(flatten(other))]
    monkeypatch.setattr(jax_devices.processes, 'gather_texts', lambda text: texts)
    assert re.search(said, refusal(check_agreement, 'code, versions or data', flatten(mine)))


def test_a_file_with_the_digest_of_meta_json_and_another_content_differs(finished):
    mine = manifest_of(finished[0])
    mine['data'][0]['files']['val.bin']['sha256'] = 'a' * 64
    other = json.loads(json.dumps(mine))
    other['data'][0]['files']['val.bin']['samples'] = '0'  # edited, or copied badly
    assert flatten(mine) != flatten(other)


@pytest.mark.slow
def test_processes_of_other_code_do_not_train_together(flags, tmp_path):
    copy = tmp_path / 'checkout'
    copy.mkdir()
    for path in (*ROOT.glob('*.py'), *ROOT.glob('jax_*')):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy / path.name)
    shutil.copytree(ROOT / 'tools', copy / 'tools')
    with open(copy / 'jax_train_utils.py', 'a') as file:
        file.write('# an older checkout\n')
    together = [f'--out_dir={tmp_path / "out"}', *flags, '--device=cpu', '--num_processes=2',
                f'--coordinator_address=127.0.0.1:{free_port()}']
    processes = [start(root / 'train_jax.py', *together, f'--process_id={i}', cwd=root)
                 for i, root in enumerate((ROOT, copy))]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 2, err
        assert 'error: processes 0 and 1 have different code, versions or data' in err
        assert 'jax_train_utils.py is' in err and err.count('\n') == 1
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
@pytest.mark.parametrize('script, flags, other, said', [
    ('train_jax.py', [], 'weights', 'weights'), long('train_jax.py', ['--lora_rank=2'], 'weights', 'weights'),
    ('sample_jax.py', ['--start=0123'], 'weights', 'weights'),
    long('sample_jax.py', ['--start=0123'], 'letters', 'prompts'),
    ('sample_jax.py', ['--start=FILE:a.txt'], 'text', 'prompts'),
    long('eval_jax.py', ['--text=a.txt'], 'weights', 'weights'),
    ('eval_jax.py', ['--text=a.txt'], 'letters', 'tokenizers'),
    long('eval_jax.py', ['--tasks=a.jsonl'], 'letters', 'tokenizers')])
def test_processes_with_other_files_under_the_same_names_do_not_work_together(script, flags, other, said, tmp_path):
    n = json.loads((FAMILIES / 'llama' / 'config.json').read_text())['vocab_size']
    letters = ''.join(map(chr, range(32, 32 + n)))
    write_dataset(tmp_path / 'data', [1] * 600, [1] * 600, chars=letters)
    machines = [tmp_path / name for name in ('a', 'b')]
    for machine in machines:
        shutil.copytree(FAMILIES / 'llama', machine / 'model')
        is_other = machine == machines[1]
        if is_other and other == 'weights':
            edit_tensors(machine / 'model', {'model.norm.weight': np.ones(32, np.float32)})
        write_char_tokenizer(letters[::-1] if is_other and other == 'letters' else letters, machine / 'model')
        (machine / 'a.txt').write_text('0124' if is_other and other == 'text' else '0123')
        (machine / 'a.jsonl').write_text('{"query": "01", "choices": ["2", "3"], "gold": 0}\n')
    if script == 'train_jax.py':
        flags = [*flags, *SHORT, f'--out_dir={tmp_path / "out"}', f'--dataset={tmp_path / "data"}', '--block_size=16']
    else:
        flags = [*flags, '--tensor=2']
    flags = [*flags, '--init_from=model', '--device=cpu', '--num_processes=2',
             f'--coordinator_address=127.0.0.1:{free_port()}']
    processes = [start(ROOT / script, *flags, f'--process_id={i}', cwd=machine) for i, machine in enumerate(machines)]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 2, err
        last = err.splitlines()[-1]
        assert re.fullmatch(f'error: processes 0 and 1 have different {said}, .* (checksum|digest) .*', last), err
    assert not (tmp_path / 'out' / 'ckpt').exists()
