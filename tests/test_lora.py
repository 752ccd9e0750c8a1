"""LoRA: low-rank updates of frozen weights, through the scripts and on meshes."""
import dataclasses
import functools
import json
import random
import time

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from jax_devices.layout import setup_distributed_training
from jax_ops.matmul import Int8
from jax_pretrained import load_pretrained
from jax_run.checkpoints import choose_checkpoint
from jax_run.load import load_frozen, load_run
from jax_run.log import read_metrics
from jax_train_utils import count_frozen, create_train_state, create_updates, model_params, split_batch
from jax_transformer import count_params, estimate_mfu
from tests.common import (
    FAMILIES, RESUME, TINY, apply, assert_refused, copy_folder, edit_tensors, final_state, long, make_step,
    random_params, records_of, run_script, sample, samples_of, start, succeeded, train, wait_for, write_dataset)

FLAGS = ['--lora_rank=4', '--lora_alpha=8', '--batch_size=4', '--gradient_accumulation_steps=2', '--block_size=16',
         '--eval_iters=2', '--eval_interval=2', '--max_iters=4', '--learning_rate=1e-2', '--decay_lr=False',
         '--device=cpu:0', '--dtype=float32']


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """The folder of a small Llama."""
    return copy_folder(FAMILIES / 'llama', tmp_path_factory.mktemp('base'))


@pytest.fixture(scope='module')
def data(base, tmp_path_factory):
    """A data set with as many characters as the model has tokens."""
    folder = tmp_path_factory.mktemp('data')
    n = json.loads((base / 'config.json').read_text())['vocab_size']
    tokens = np.random.default_rng(0).integers(8, size=600)
    write_dataset(folder, tokens, tokens, vocab_size=n)
    return folder


@pytest.fixture(scope='module')
def make_run(base, data, tmp_path_factory):
    """A function of --quantize that returns (the flags of a run, its out_dir), which it makes once."""
    @functools.cache
    def make(quantize):
        out = tmp_path_factory.mktemp('lora') / 'out'
        flags = [f'--dataset={data}', f'--init_from={base}', *FLAGS, f'--quantize={quantize}']
        succeeded(train(out, *flags))
        return flags, out
    return make


@pytest.fixture(scope='module', params=[long(''), 'int8'])
def run(request, make_run):
    return make_run(request.param)


@pytest.fixture(scope='module')
def plain_run(make_run):
    return make_run('')


def losses(out):
    return [record['val_loss'] for record in records_of(out) if 'val_loss' in record]


def test_a_lora_run_starts_at_the_loss_of_its_base_and_learns(run, tmp_path):
    flags, out = run
    full = [flag for flag in flags if 'lora' not in flag and 'quantize' not in flag]
    evaluated = succeeded(train(tmp_path, *full, '--eval_only=True')).stdout
    tolerance = 0.02 if '--quantize=int8' in flags else 5e-5
    assert float(evaluated.rpartition('val loss ')[2].split(',')[0]) == pytest.approx(losses(out)[0], abs=tolerance)
    assert losses(out)[-1] < losses(out)[0] - 0.05


def saved(out, item):
    """What the last checkpoint of a run holds as 'params' or 'opt_state'."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore((out / 'ckpt' / '4' / item).absolute())


@pytest.mark.slow
def test_a_checkpoint_holds_the_updates_and_their_optimizer_state_alone(run):
    _, out = run
    updates = saved(out, 'params')
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(updates)]
    assert {path[-1].key for path in paths} == {'a', 'b'}
    assert len(paths) == 2 * 2 * 5  # a and b of two layers' c_attn, c_proj, c_gate, c_fc, c_proj
    n_updates = sum(x.size for x in jax.tree.leaves(updates))
    n_state = sum(np.size(x) for x in jax.tree.leaves(saved(out, 'opt_state')))
    assert 2 * n_updates < n_state < 2 * n_updates + 10  # AdamW's moments, and counters


@pytest.mark.slow
def test_a_resumed_lora_run_equals_an_uninterrupted_one_bit_for_bit(run, tmp_path):
    flags, out = run
    succeeded(train(tmp_path, *flags, '--max_iters=2'))
    quantize, = [flag for flag in flags if 'quantize' in flag]
    succeeded(train(tmp_path, *RESUME, '--max_iters=4', quantize))
    assert records_of(tmp_path) == records_of(out)
    assert final_state(tmp_path) == final_state(out)
    assert_refused(train(tmp_path, *RESUME, '--lora_rank=8'), 'trained with lora_rank=4, not lora_rank=8')


def test_what_is_sampled_and_exported_is_the_base_with_its_updates_added(run, base, tmp_path):
    flags, out = run
    config, merged, meta = load_run(out, 'latest')
    parallel = setup_distributed_training(jax.devices()[:1])
    frozen, _ = load_frozen(meta['lora'], config, parallel)
    assert isinstance(frozen['weights']['h_0']['attn']['c_attn']['kernel'], Int8) == ('--quantize=int8' in flags)
    params = model_params(saved(out, 'params'), frozen)
    idx = np.random.default_rng(1).integers(config.vocab_size, size=(3, 20))
    logits = apply(config, merged, idx)
    np.testing.assert_allclose(apply(config, params, idx), logits, rtol=0, atol=1e-4 * np.abs(logits).max())
    assert np.abs(apply(config, load_pretrained(base)[1], idx) - logits).max() > 0.1  # the updates matter
    succeeded(run_script('export_jax.py', f'--out_dir={out}', '--checkpoint=latest', f'--folder={tmp_path / "model"}'))
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path / 'model')[1], merged)
    succeeded(sample(out, '--start=0', '--max_new_tokens=5', '--num_samples=1', '--quantize=int8'))


def test_the_adapter_of_a_run_is_read_as_the_run_and_its_export_says_what_comes_next(run, base, tmp_path):
    flags, out = run
    folder = tmp_path / 'my adapter'
    export = ['export_jax.py', f'--out_dir={out}', '--checkpoint=latest', f'--adapter={folder}']
    said = succeeded(run_script(*export))
    settings = json.loads((folder / 'adapter_config.json').read_text())
    assert settings['base_model_name_or_path'] == base.name and settings['r'] == 4 and settings['lora_alpha'] == 8
    assert f'saved {folder}, weights in float32, ' in said.stdout and '\n  adapter_model.safetensors, ' in said.stdout
    is_int8 = '--quantize=int8' in flags
    assert ('has trained with that model in int8' in said.stdout) == is_int8
    assert 'next: ' not in said.stdout  # this project does not read it
    assert_refused(sample('none', f'--init_from={folder}'), 'is an adapter of peft: merge it into its model')

    assert_refused(run_script(*export), 'exists and is not an empty folder')
    export[-1] = f'--adapter={tmp_path / "other"}'
    for more, message in (([f'--folder={tmp_path / "model"}'], 'name one new folder or file'),
                          (['--dtype=q8_0'], "dtype must be one of .*, not 'q8_0'"),
                          (['--shard_gb=1.0'], 'nothing reads shard_gb=1.0 without --folder')):
        assert_refused(run_script(*export, *more), message)
    assert_refused(run_script('export_jax.py', f'--init_from={base}', f'--adapter={tmp_path / "other"}'),
                   'adapter exports what a LoRA run has trained')
    assert not (tmp_path / 'other').exists()


@pytest.mark.slow
def test_the_adapter_of_a_run_on_top_of_another_run_is_for_the_folder_to_which_that_is_exported(
        finished, dataset, tmp_path):
    out, base, folder = tmp_path / 'out', tmp_path / 'base', tmp_path / 'adapter'
    succeeded(train(out, f'--dataset={dataset}', f'--init_from={finished[0]}', *FLAGS, '--max_iters=2'))
    export = ['export_jax.py', f'--out_dir={out}', '--checkpoint=latest', f'--adapter={folder}']
    assert_refused(run_script(*export), 'peft cannot load .*: export that as a folder and name it with --base=FOLDER')
    succeeded(run_script('export_jax.py', f'--out_dir={finished[0]}', f'--folder={base}'))
    succeeded(run_script(*export, f'--base={base}'))
    settings = json.loads((folder / 'adapter_config.json').read_text())
    assert settings['fan_in_fan_out'] and settings['target_modules'] == ['c_attn', 'c_fc', 'c_proj']


@pytest.mark.slow
def test_a_base_of_the_base_that_has_gone_is_replaced_by_an_export_of_the_base(data, base, tmp_path):
    here = copy_folder(base, tmp_path)
    first, second, folder = tmp_path / 'first', tmp_path / 'second', tmp_path / 'folder'
    flags = [f'--dataset={data}', *FLAGS, '--max_iters=2']
    succeeded(train(first, *flags, f'--init_from={here}'))
    succeeded(train(second, *flags, f'--init_from={first}'))
    prompt = ['--start=0', '--num_samples=1', '--max_new_tokens=20']
    text = succeeded(sample(second, *prompt)).stdout
    there = here.rename(tmp_path / 'elsewhere')
    assert_refused(sample(second, *prompt, f'--base={first}'), f'put it back, or export {first} to a folder, with ')
    succeeded(run_script('export_jax.py', f'--out_dir={first}', f'--base={there}', f'--folder={folder}'))
    assert succeeded(sample(second, *prompt, f'--base={folder}')).stdout == text


@pytest.mark.slow
def test_a_lora_run_that_samples_has_the_same_bits_and_sample_jax_gives_its_samples(plain_run, tmp_path):
    flags, out = plain_run
    succeeded(train(tmp_path, *flags, '--sample_prompt=01'))
    records = records_of(tmp_path)
    samples = [record.pop('sample') for record in records if 'sample' in record]
    assert records == records_of(out) and len(set(samples)) == len(samples) == 3
    text, = samples_of(sample(tmp_path, '--checkpoint=latest', '--start=01', '--num_samples=1',
                              '--max_new_tokens=100'))
    assert text == samples[-1]


@pytest.mark.slow
def test_the_frozen_weights_are_counted_apart_and_their_gradients_not_as_flops(base):
    config, params = load_pretrained(base)
    state, step = lora_run(base, config, 1, quantize='int8')
    n_updates, n_frozen = count_params(state.params), count_frozen(state.frozen)
    assert n_frozen == count_params(params)
    batch = batch_of(setup_distributed_training(jax.devices()[:1]), 1, 4, 0, config)
    n_tokens = batch['x'].size
    flops = step.lower(state, batch).compile().cost_analysis()['flops'] / n_tokens
    counted = estimate_mfu(n_updates, config, 1.0, 1.0, n_frozen)
    assert counted == 6 * n_updates + 4 * n_frozen + estimate_mfu(0, config, 1.0, 1.0)
    assert flops == pytest.approx(counted, rel=0.12)  # XLA counts elementwise operations too; 6 per weight are 25% more


@pytest.mark.slow
def test_training_leaves_the_base_as_it_is(base):
    config = load_pretrained(base)[0]
    state, step = lora_run(base, config, 1)
    before = jax.tree.map(np.array, state.frozen)
    updates = jax.tree.map(np.array, state.params)
    state, _ = step(state, batch_of(setup_distributed_training(jax.devices()[:1]), 2, 4, 0, config))
    jax.tree.map(np.testing.assert_array_equal, state.frozen, before)
    changed = jax.tree.map(lambda old, new: bool((old != new).any()), updates, state.params)
    assert changed['h_0']['attn']['c_attn']['kernel'] == {'a': False, 'b': True}  # a has no gradient while b is zero


def batch_of(parallel, g, b, iteration, config):
    """The batch of an iteration of g micro-batches of b sequences on the devices of a Layout."""
    tokens = np.random.default_rng(iteration).integers(8, size=(g * b, config.block_size + 1))
    batch = {'x': tokens[:, :-1], 'y': tokens[:, 1:], 'seq_id': np.arange(g * b, dtype=np.uint32)}
    return parallel.shard_batch(batch, split_batch(g, b, parallel.n_data_shards))


def lora_run(base, config, *layout, quantize=''):
    """(state, compiled training step) of LoRA on the layout (devices, fsdp, tensor)."""
    parallel = setup_distributed_training(jax.devices()[:layout[0]], *layout[1:])
    tx = optax.adam(1e-2)
    lora = {'base': str(base), 'rank': 4, 'alpha': 8.0, 'quantize': quantize, 'checksum': None}
    state = parallel.init_sharded(create_train_state, jax.random.key(0), config, tx, 4)
    state = state.replace(frozen=load_frozen(lora, config, parallel)[0])
    return state, parallel.jit_step(make_step(config, parallel))


@pytest.mark.slow
@pytest.mark.parametrize('quantize', ['', 'int8'])
def test_pmap_and_meshes_give_the_curve_of_one_device(base, quantize):
    config = load_pretrained(base)[0]
    curves = []
    for layout in (1,), (4, 2, 2) if quantize else (2,):
        state, step = lora_run(base, config, *layout, quantize=quantize)
        parallel = setup_distributed_training(jax.devices()[:layout[0]], *layout[1:])
        curve = []
        for i in range(3):
            state, metrics = step(state, batch_of(parallel, 2, 4, i, config))
            curve.append(float(metrics['loss']))
        curves.append(curve)
    np.testing.assert_allclose(curves[1:], [curves[0]] * (len(curves) - 1), rtol=2e-5 if not quantize else 1e-3)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.slow
def test_a_base_that_has_changed_or_gone_is_named_in_one_line(data, base, tmp_path):
    changed = copy_folder(base, tmp_path)
    out = tmp_path / 'out'
    succeeded(train(out, f'--dataset={data}', f'--init_from={changed}', *FLAGS, '--max_iters=2'))
    edit_tensors(changed, {'model.norm.weight': 2 * load_file(changed / 'model.safetensors')['model.norm.weight']})
    export = run_script('export_jax.py', f'--out_dir={out}', f'--adapter={tmp_path / "adapter"}')
    for result in (sample(out, '--start=0'), train(out, *RESUME, '--max_iters=3'), export):
        assert_refused(result, 'has other weights than those that LoRA was trained with')
    changed.rename(tmp_path / 'elsewhere')
    assert_refused(sample(out, '--start=0'), f'{changed}, .*does not exist; .*--base=FOLDER')


@pytest.mark.slow
def test_a_base_that_has_moved_is_named_with_base_and_remembered_from_then_on(plain_run, base, tmp_path):
    flags, out = plain_run
    here = copy_folder(base, tmp_path)
    flags = [flag for flag in flags if 'init_from' not in flag]
    succeeded(train(tmp_path / 'out', *flags, f'--init_from={here}', '--max_iters=2'))
    prompt = ['--start=0', '--num_samples=1', '--max_new_tokens=20']
    text = succeeded(sample(tmp_path / 'out', *prompt)).stdout
    there = here.rename(tmp_path / 'elsewhere')
    assert_refused(train(tmp_path / 'out', *RESUME), f'{here}, .*does not exist; .*--base=FOLDER')
    other = copy_folder(base, there)
    edit_tensors(other, {'model.norm.weight': 2 * load_file(other / 'model.safetensors')['model.norm.weight']})
    assert_refused(train(tmp_path / 'out', *RESUME, f'--base={other}'), 'has other weights')
    moved = f'--base={there}'
    assert succeeded(sample(tmp_path / 'out', *prompt, moved)).stdout == text
    succeeded(run_script('export_jax.py', f'--out_dir={tmp_path / "out"}', f'--folder={tmp_path / "model"}', moved))
    succeeded(train(tmp_path / 'out', *RESUME, '--max_iters=4', moved))
    assert records_of(tmp_path / 'out') == records_of(out)
    assert final_state(tmp_path / 'out') == final_state(out)
    assert choose_checkpoint(tmp_path / 'out')[1]['lora']['base'] == str(there)
    succeeded(sample(tmp_path / 'out', *prompt))


def test_base_is_refused_where_there_is_no_lora_run_to_continue(base, data, tmp_path):
    flags = [f'--dataset={data}', f'--init_from={base}', *FLAGS, f'--base={base}']
    for given in (flags, [*flags, '--lora_rank=0']):
        assert_refused(train(tmp_path, *given), 'base is for a LoRA run that is resumed')


def test_lora_needs_a_pretrained_model_and_int8_needs_lora(data, base, tmp_path):
    assert_refused(train(tmp_path, f'--dataset={data}', *FLAGS), 'LoRA trains updates of a pretrained model')
    flags = [f'--dataset={data}', f'--init_from={base}', '--quantize=int8']
    assert_refused(train(tmp_path, *flags), 'nothing reads quantize=int8 without LoRA')


def test_updates_begin_as_zero_by_an_a_whose_products_have_the_scale_of_its_inputs():
    updates = create_updates(jax.random.key(0), random_params(dataclasses.replace(TINY, n_embd=64)), rank=64)
    for path, update in flatten_dict(updates).items():
        if path[-1] == 'b':
            assert not update.any()
        else:
            assert update.std() == pytest.approx(update.shape[0]**-0.5, rel=0.1)


def test_int8_experts_are_refused(tmp_path):
    source = FAMILIES / 'qwen3_moe'
    write_dataset(tmp_path / 'data', range(40), range(40), vocab_size=44)
    flags = [f'--dataset={tmp_path / "data"}', f'--init_from={source}', *FLAGS, '--quantize=int8']
    assert_refused(train(tmp_path / 'out', *flags), 'quantize=int8 does not train models with experts; use --quantize=')


def test_lora_with_muon_is_refused(data, base, tmp_path):
    flags = [f'--dataset={data}', f'--init_from={base}', *FLAGS]
    assert_refused(train(tmp_path, *flags, '--optimizer=muon'), 'leave optimizer at adamw')


@pytest.mark.slow
@pytest.mark.parametrize('quantize', ['', long('int8')])
def test_a_killed_run_goes_on_with_the_same_bits_and_exports_the_same_adapter(quantize, base, data, tmp_path):
    flags = [f'--dataset={data}', f'--init_from={base}', *FLAGS, f'--quantize={quantize}', '--max_iters=60',
             '--eval_interval=20', '--save_interval=7', '--dropout=0.1']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    succeeded(train(whole, *flags))
    process = start('train_jax.py', f'--out_dir={killed}', *flags)
    wait_for('iteration 30', lambda: any(record['iter'] >= 30 for record in read_metrics(killed)), process)
    time.sleep(random.random() * 0.1)
    process.kill()
    process.communicate()
    succeeded(train(killed, *RESUME))
    assert records_of(killed) == records_of(whole) and final_state(killed) == final_state(whole)
    if not quantize:
        for out in (whole, killed):
            succeeded(run_script('export_jax.py', f'--out_dir={out}', f'--adapter={out}-adapter'))
        one, other = (load_file(f'{out}-adapter/adapter_model.safetensors') for out in (whole, killed))
        assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.slow
def test_a_resume_of_lora_refuses_other_data_until_they_are_named(base, data, tmp_path):
    data = copy_folder(data, tmp_path)
    succeeded(train(tmp_path / 'out', f'--dataset={data}', f'--init_from={base}', *FLAGS))
    np.fromfile(data / 'train.bin', np.uint16)[::-1].tofile(data / 'train.bin')
    assert_refused(train(tmp_path / 'out', *RESUME, '--max_iters=6'), 'is not the data of .*train.bin: other content')
    accepted = train(tmp_path / 'out', *RESUME, f'--dataset={data}', '--max_iters=6')
    assert 'other data from iteration 4 on' in succeeded(accepted).stdout
