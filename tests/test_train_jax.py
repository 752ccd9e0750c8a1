"""The training script: runs, resumes, mistakes."""
import ast
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
import jax_devices.layout
import jax_devices.setup
import jax_run.log
import jax_run.sources
import jax_train_utils

import jax
import numpy as np
import pytest

from jax_flags import TextSampling, UserError, config_block
from jax_hub.tokenizer_files import write_char_tokenizer
from jax_pretrained import load_pretrained
from jax_run.checkpoints import (
    DiskRun, checkpoint_steps, choose_checkpoint, find_damage, read_val_loss, run_folder)
from jax_run.load import load_run
from jax_run.log import RunLog, read_metrics
from jax_run.minutes import Deadline
from jax_run.model import MODEL_FLAGS, config_from_flags, flags_from_config
from jax_run.out_dir import OutDir
from jax_run.program import Options
from jax_run.start import merge_resumed_flags
from jax_transformer import count_params, estimate_mfu
from tests.common import (
    FAMILIES, GOLDEN, MODEL, RESUME, ROOT, SHORT, assert_refused, copy_folder, edit_json, final_state, needs_hangup,
    records_of, refusal, run_script, sample, samples_of, slow, start, succeeded, train, wait_for,
    write_dataset)


def files_and_times(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob('*'))


def saved_iterations(out_dir):
    return sorted(int(path.name) for path in (out_dir / 'ckpt').iterdir() if path.name.isdigit())

# -----------------------------------------------------------------------------
# flags

@pytest.mark.parametrize('script', ['train_jax.py', 'sample_jax.py', 'eval_jax.py', 'export_jax.py', 'bench_jax.py'])
def test_every_knob_is_live(script):
    tree = ast.parse((ROOT / script).read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= set(re.findall(r"\b(?:flags\['|cfg\.)(\w+)", ast.unparse(tree)))
    for options in (TextSampling, Options):
        if options.__name__ in used or options is Options and 'open_program' in used:
            used |= {field.name for field in dataclasses.fields(options)}
    if "('backend', " in ast.unparse(tree):  # says that these have no effect
        used |= {'compile', 'backend'}
    if 'config_from_flags' in used or 'open_run' in used:  # reads the model's flags, see the next test
        used |= {*MODEL_FLAGS, 'dropout', 'expert_balance'}
    if 'open_run' in used:
        for module in (ROOT / 'jax_run').glob('*.py'):
            used |= set(re.findall(r"\bflags\['(\w+)'\]", module.read_text()))
    knobs = config_block(ROOT / script)
    assert len(knobs) > (8 if script == 'export_jax.py' else 10)
    unread = knobs.keys() - used
    assert not unread, unread


SCRIPTS = ('train_jax.py', 'sample_jax.py', 'export_jax.py', 'bench_jax.py')

NO_JAX = """
import runpy, sys
sys.modules['jax'] = sys.modules['numpy'] = None  # to import them is an ImportError
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.parametrize('script', SCRIPTS)
@pytest.mark.parametrize('arg, code, out, err', [
    ('--help', 0, 'usage: python {script} .*--device=|usage: python {script} .*--folder=', ''),
    ('--seeed=1', 2, '', 'error: unknown flag --seeed')])
def test_help_and_a_wrong_flag_are_answered_without_jax(script, arg, code, out, err):
    done = subprocess.run([sys.executable, '-c', NO_JAX, script, arg], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == code, done.stderr
    assert re.match(out.format(script=script), done.stdout, re.S)
    assert re.match(f'{err}.*\n' if err else '$', done.stderr)


@pytest.mark.parametrize('script, arg, message', [
    ('train_jax.py', '--batch_size=0', 'batch_size must be at least 1'),
    ('sample_jax.py', '--top_p=2', 'top_p must be in'),
    ('train_jax.py', '--dataset=none --optimizer=sgd', 'optimizer must be one of adamw, muon'),
    ('train_jax.py', '--lora_alpha=32', 'nothing reads lora_alpha=32.0 without LoRA'),
    ('sample_jax.py', '--interactive=True --output=x', 'nothing reads output=x without .*leave out --interactive'),
    ('export_jax.py', '--shard_gb=1.0', 'name one new folder or file'),
    ('export_jax.py', '--gguf=x.gguf --shard_gb=1.0', 'nothing reads shard_gb=1.0 without --folder'),
    ('bench_jax.py', '--mode=fly', 'mode must be one of train'),
    ('bench_jax.py', '--mode=decode --fsdp=2', 'nothing reads fsdp=2 without a training step'),
    ('bench_jax.py', '--max_iters=5', 'bench_jax.py does not read max_iters, a flag of train_jax.py')])
def test_a_value_out_of_range_is_refused_without_jax(script, arg, message):
    command = [sys.executable, '-c', NO_JAX, script, *arg.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert_refused(done, message)


def test_every_flag_of_the_model_changes_the_model():
    flags = dict(
        n_layer=2, n_head=2, n_embd=16, block_size=16, bias=True, norm='layer', position='learned', n_kv_head=0,
        qk_norm='', window=4, layer_types='window', mlp='gelu', n_inner=0, tied_head=True, n_expert=2, n_expert_used=1,
        expert_balance=0.0, dropout=0.0)
    other = dict(
        n_layer=1, n_head=4, n_embd=32, block_size=8, bias=False, norm='rms', position='rope', n_kv_head=1,
        qk_norm='learned', window=5, layer_types='window, full', mlp='swiglu', n_inner=8, tied_head=False, n_expert=0,
        n_expert_used=2, expert_balance=1.0, dropout=0.1)
    assert flags.keys() == MODEL_FLAGS | {'dropout', 'expert_balance'}
    assert other.keys() == flags.keys()
    config = config_from_flags(flags, vocab_size=7)
    for name, value in other.items():
        assert config_from_flags(flags | {name: value}, vocab_size=7) != config, name


@pytest.mark.parametrize('flags', [
    dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=True, norm='layer', position='learned', n_kv_head=0,
         qk_norm='', window=0, layer_types='full', mlp='gelu', n_inner=0, tied_head=True, n_expert=2, n_expert_used=1,
         expert_balance=0.5),
    dict(n_layer=1, n_head=4, n_embd=32, block_size=8, bias=False, norm='rms', position='rope', n_kv_head=1,
         qk_norm='learned', window=5, layer_types='window,full', mlp='swiglu', n_inner=8, tied_head=False, n_expert=0,
         n_expert_used=2)])
def test_flags_become_a_config_and_the_config_the_same_flags(flags):
    config = config_from_flags(dict(expert_balance=0.0, dropout=0.0) | flags, vocab_size=7)
    assert flags_from_config(config) == flags


NANOGPT_TRAIN = """
    out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log wandb_project
    wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd dropout bias
    learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend
    device dtype compile""".split()

NANOGPT_SAMPLE = """
    init_from out_dir start num_samples max_new_tokens temperature top_k seed device dtype compile""".split()


def test_all_flags_of_nanogpt_are_there():
    assert not set(NANOGPT_TRAIN) - config_block(ROOT / 'train_jax.py').keys()
    assert not set(NANOGPT_SAMPLE) - config_block(ROOT / 'sample_jax.py').keys()


@pytest.mark.parametrize('config', sorted(path.name for path in (ROOT / 'config').glob('*.py')))
def test_every_config_file_is_understood(config):
    # the flag after the file is the first thing that fails
    result = run_script('train_jax.py', ROOT / 'config' / config, '--nosuchflag=1')
    assert_refused(result, 'unknown flag --nosuchflag')


def test_nanogpts_configs_are_there_by_name():
    names = """train_gpt2 train_shakespeare_char finetune_shakespeare eval_gpt2 eval_gpt2_medium eval_gpt2_large
        eval_gpt2_xl train_pystdlib_char"""
    assert not set(names.split()) - {path.stem for path in (ROOT / 'config').glob('*.py')}


# -----------------------------------------------------------------------------
# a run and what it leaves

def test_log_lines_have_nanogpts_form(finished):
    _, out = finished
    steps = re.findall(r'^step (\d+): train loss \d+\.\d{4}, val loss \d+\.\d{4}, val bpb \d+\.\d{4}$', out, flags=re.M)
    assert steps == ['0', '10', '20']
    iters = re.findall(r'^iter (\d+): loss \d+\.\d{4}, time (\d+\.\d{2})ms, mfu (?:n/a|[\d.]+%), [\d,]+ tok/s, '
                       r'grad norm [\d.]+, eta \d+:\d\d:\d\d$', out, flags=re.M)
    assert [int(i) for i, _ in iters] == list(range(20))
    assert 'tokens per iteration will be: 128' in out
    assert 'number of parameters: 0.00M\n' in out
    compile_s = float(re.search(r'compiled the training step in ([\d.]+) s', out)[1])
    _, first_ms = iters[0]
    assert float(first_ms) / 1000 < compile_s  # `time` does not include the compilation
    assert re.findall('^compil.*', out, re.M)[0] == 'compiling the training step ...'
    assert len(re.findall('^compil', out, re.M)) == 2  # one line before it, one figure after it
    started = re.findall(r'^first iteration: ([\d.]+) s after the start \(imports took [\d.]+ s\)$', out, re.M)
    assert len(started) == 1
    ms = sorted(float(time_ms) for _, time_ms in iters)
    assert ms[0] > ms[len(ms) // 2] / 10  # also of the iteration before an evaluation, which ends the timed interval
    assert float(started[0]) >= compile_s - 0.1


def test_training_learns(finished):
    first, *_, last = records_of(finished[0], 'val_loss')
    assert first['val_loss'] > 3
    assert last['val_loss'] < 2.9


def test_out_dir_holds_what_was_promised(finished):
    out, _ = finished
    assert sorted(path.name for path in out.iterdir()) == [
        'ckpt', 'config.json', 'lock', 'loss.png', 'metrics.jsonl']
    flags = json.loads((out / 'config.json').read_text())
    assert flags.keys() == config_block(ROOT / 'train_jax.py').keys() | {'manifest'}
    assert flags['n_layer'] == 1
    assert flags['dtype'] == 'float32'
    iterations, evaluations = records_of(out, 'loss'), records_of(out, 'val_loss')
    assert [record['iter'] for record in iterations] == list(range(20))
    assert [record['iter'] for record in evaluations] == [0, 10, 20]
    assert not any('anew' in record for record in evaluations)  # no resume with other data
    first = next(record for record in read_metrics(out) if 'loss' in record)
    assert first.keys() == {'iter', 'loss', 'lr', 'grad_norm', 'time_ms', 'tokens_per_sec', 'mfu'}
    step, meta = choose_checkpoint(out)
    assert step == 20
    assert meta['iter_num'] == 20
    assert meta['best_val_loss'] == min(record['val_loss'] for record in evaluations)
    assert meta['model']['n_embd'] == 16
    assert {'jax', 'jaxlib', 'flax', 'python'} <= meta['versions'].keys()

# -----------------------------------------------------------------------------
# mixtures

@pytest.fixture(scope='session')
def mixture(dataset, tmp_path_factory):
    """A flag for 0.75 of the data set of the short runs and 0.25 of another one with its vocabulary."""
    other = copy_folder(dataset, tmp_path_factory.mktemp('other')).rename(dataset.parent / 'other')
    for split in ('train', 'val'):
        tokens = np.fromfile(other / f'{split}.bin', np.uint16)
        tokens[::-1].tofile(other / f'{split}.bin')
    return f'--dataset={dataset}:0.75,{other}:0.25'


def test_a_run_on_a_mixture_reports_each_set_and_resumes_with_the_same_bits(flags, mixture, dataset, tmp_path):
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    out = succeeded(train(whole, *flags, mixture)).stdout
    names = dataset.name, 'other'
    for record in records_of(whole, 'val_loss'):
        for of_val, of_set in (('val_loss', 'val_loss_{}'), ('val_bpb', 'val_bpb_{}')):
            each = [record[of_set.format(name)] for name in names]
            assert each[0] != each[1]
            assert record[of_val] == pytest.approx(0.75 * each[0] + 0.25 * each[1], rel=1e-6)
    assert re.search(rf'^step 20: train loss [\d.]+, val loss [\d.]+, val bpb [\d.]+, val loss {names[0]} [\d.]+, '
                     rf'val bpb {names[0]} [\d.]+, val loss other [\d.]+, val bpb other [\d.]+$', out, re.M)
    succeeded(train(parts, *flags, mixture, '--max_iters=7'))
    succeeded(train(parts, *RESUME, '--max_iters=20'))
    assert final_state(parts) == final_state(whole)


@pytest.mark.slow
def test_a_mixture_gives_eight_devices_the_curve_of_one(flags, mixture, tmp_path):
    for name, device in (('one', 'cpu:0'), ('eight', 'cpu')):
        succeeded(train(tmp_path / name, *flags, mixture, f'--device={device}', '--batch_size=8'))
    losses = [[record['loss'] for record in records_of(tmp_path / name, 'loss')] for name in ('one', 'eight')]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)

# -----------------------------------------------------------------------------
# --minutes

MINUTES = ['--minutes=0.05', '--eval_interval=100000', '--save_interval=20', '--keep=1000', '--lr_schedule=linear',
           '--min_lr=1e-5', '--warmup_iters=5']
SAYS_MINUTES = (r'^minutes=[\d.]+: max_iters=(\d+), also lr_decay_iters, warmup_iters=(\d+) '
                r'\((\d+) iterations took [\d.]+ms each\)$')


def fixed_iterations(said):
    """(max_iters, warmup_iters) as a run with --minutes says."""
    n, warmup, _ = map(int, re.search(SAYS_MINUTES, said, re.M).groups())
    return n, warmup


def has_not_moved(deadline, iter_num, log):
    return False


@pytest.fixture(scope='session')
def timed(flags, tmp_path_factory):
    """(the out_dir of a run with --minutes, what it printed), with the end that was measured before it began."""
    out = tmp_path_factory.mktemp('timed') / 'out'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deadline, 'has_moved', has_not_moved)
        return out, succeeded(train(out, *flags, *MINUTES)).stdout


@pytest.fixture
def steady(monkeypatch):
    """Keeps the end of a run with --minutes where it was measured before the run."""
    monkeypatch.setattr(Deadline, 'has_moved', has_not_moved)


def test_a_run_of_minutes_fixes_its_iterations_and_has_its_schedule_from_the_first_one_on(timed):
    out, said = timed
    n, warmup = fixed_iterations(said)
    assert said.index('minutes=0.05: ') < said.index('step 0: ')
    flags, (step, meta) = json.loads((out / 'config.json').read_text()), choose_checkpoint(out)
    for recorded in (flags, meta['flags'], flags['manifest']['flags'], meta['manifest']['flags']):
        assert (recorded['max_iters'], recorded['lr_decay_iters'], recorded['minutes']) == (n, n, 0.05)
        assert recorded['warmup_iters'] == warmup == (5 if n > 5 else n // 10)
    assert step == n
    rates = np.array([record['lr'] for record in records_of(out, 'lr')])
    assert len(rates) == n
    peak = flags['learning_rate']
    warm_up = peak * (1 + np.arange(warmup)) / (warmup + 1)
    decay = 1e-5 + (peak - 1e-5) * (1 - np.arange(n - warmup) / (n - warmup))
    np.testing.assert_allclose(rates, [*warm_up, *decay], rtol=1e-4)


@pytest.mark.slow
def test_a_run_of_minutes_is_the_run_that_has_its_iterations_given(timed, flags, tmp_path):
    n, warmup = fixed_iterations(timed[1])
    given = [f'--max_iters={n}', f'--lr_decay_iters={n}', f'--warmup_iters={warmup}']
    succeeded(train(tmp_path, *flags, *MINUTES, '--minutes=0', *given))
    assert records_of(tmp_path) == records_of(timed[0])
    assert final_state(tmp_path) == final_state(timed[0])


@pytest.mark.slow
def test_a_run_of_minutes_resumes_with_the_same_bits_and_does_not_measure_again(timed, flags, tmp_path):
    whole, _ = timed
    part = copy_folder(whole, tmp_path)
    saved = saved_iterations(part)
    if len(saved) < 2:
        pytest.skip('this machine is too slow for a checkpoint between the start and the end')
    for iteration in saved[1:]:
        shutil.rmtree(part / 'ckpt' / str(iteration))
    resumed = succeeded(train(part, *flags, *MINUTES, '--init_from=resume')).stdout  # the same command
    assert f'at iteration {saved[0]}' in resumed and 'minutes=0.05: ' not in resumed
    assert records_of(part) == records_of(whole)
    assert final_state(part) == final_state(whole)
    extended = succeeded(train(part, *RESUME, f'--max_iters={saved[-1] + 3}')).stdout
    assert f'step {saved[-1] + 3}: ' in extended
    ended = succeeded(train(part, *RESUME, '--max_iters=0')).stdout
    assert '(max_iters=0); a longer run: ' in ended and 'minutes=0.05: ' not in ended
    assert_refused(train(part, *RESUME, '--minutes=0.2'), 'minutes is for a new run: .*max_iters=')


@pytest.mark.slow
def test_a_run_that_an_earlier_version_stopped_while_it_measured_is_measured_when_it_is_resumed(run_copy, steady):
    step, _ = choose_checkpoint(run_copy)
    folder = run_copy / 'ckpt' / str(step)
    (folder / 'checksums.json').write_text('{}')  # as if it had been written so
    meta = json.loads((folder / 'meta' / 'metadata').read_text())
    meta['flags'].update(minutes=0.02, max_iters=0, lr_decay_iters=0, eval_interval=100000)
    (folder / 'meta' / 'metadata').write_text(json.dumps(meta))
    said = succeeded(train(run_copy, *RESUME, '--minutes=0.02')).stdout
    n, _ = fixed_iterations(said)
    assert f'at iteration {step}' in said and n > step and f'step {n}: ' in said


@pytest.mark.slow
def test_a_warm_up_that_does_not_fit_into_the_minutes_is_a_tenth_of_them(flags, tmp_path, steady):
    said = succeeded(train(tmp_path, *flags, *MINUTES, '--minutes=0.02', '--warmup_iters=1000000')).stdout
    n, warmup = fixed_iterations(said)
    assert warmup == n // 10
    rates = [record['lr'] for record in records_of(tmp_path, 'lr')]
    assert max(rates) == pytest.approx(0.01) and np.argmax(rates) == warmup


@pytest.mark.slow
def test_minutes_on_eight_devices(flags, tmp_path, steady):
    layout = ['--batch_size=8', '--device=cpu', '--fsdp=2']
    out = succeeded(train(tmp_path, *flags, *MINUTES, '--minutes=0.02', *layout)).stdout
    assert choose_checkpoint(tmp_path)[0] == fixed_iterations(out)[0]


@pytest.mark.parametrize('bad, message', [
    ('--minutes=-1', 'minutes must be at least 0'), ('--minutes=1e999', 'minutes must be'), ('--minutes=x', 'float')])
def test_minutes_that_cannot_be_are_refused(flags, tmp_path, bad, message):
    assert_refused(train(tmp_path / 'out', *flags, bad), message)
    assert not (tmp_path / 'out').exists()

# -----------------------------------------------------------------------------
# resume

def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(finished, flags, tmp_path):
    succeeded(train(tmp_path, *flags, '--max_iters=7'))
    resumed = succeeded(train(tmp_path, *RESUME, '--max_iters=20'))  # all other flags are in the checkpoint
    assert 'at iteration 7' in resumed.stdout
    evaluation_at_7 = lambda record: record['iter'] == 7 and 'val_loss' in record  # at the end of the first part
    records = records_of(tmp_path)
    assert len([record for record in records if evaluation_at_7(record)]) == 1
    assert [record for record in records if not evaluation_at_7(record)] == records_of(finished[0])
    assert final_state(tmp_path) == final_state(finished[0])


def wait_for_iteration(out_dir, iteration, process):
    wait_for(f'iteration {iteration}', lambda: any(record['iter'] >= iteration for record in read_metrics(out_dir)),
             process)


def test_a_run_killed_at_a_random_moment_equals_an_uninterrupted_one(flags, tmp_path):
    flags = [*flags, '--max_iters=60', '--lr_decay_iters=60', '--save_interval=7', '--dropout=0.2']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    succeeded(train(whole, *flags))
    process = start('train_jax.py', f'--out_dir={killed}', *flags)
    wait_for_iteration(killed, 30, process)
    time.sleep(random.random() * 0.1)
    process.kill()
    process.communicate()
    succeeded(train(killed, *flags, '--init_from=resume'))
    assert records_of(killed) == records_of(whole)
    assert final_state(killed) == final_state(whole)


@pytest.mark.slow
def test_the_same_command_starts_a_run_and_resumes_it(finished, flags, tmp_path):
    (tmp_path / 'ckpt').mkdir()  # left by a run that was killed before its first save: nothing to resume
    command = [*flags, '--init_from=auto']
    assert 'a new model from scratch' in succeeded(train(tmp_path, *command, '--max_iters=10')).stdout
    assert 'at iteration 10' in succeeded(train(tmp_path, *command, '--max_iters=20')).stdout
    assert final_state(tmp_path) == final_state(finished[0])


@pytest.mark.slow
def test_a_damaged_latest_checkpoint_stays_and_the_run_continues_from_the_one_before_it(finished, run_copy):
    damaged = run_copy / 'ckpt' / '20' / 'opt_state' / '_METADATA'
    damaged.write_bytes(damaged.read_bytes()[:100])
    result = succeeded(train(run_copy, *RESUME))
    assert result.stderr.count('\n') == 1
    assert 'ckpt/20 is damaged' in result.stderr and 'taking checkpoint 10 instead' in result.stderr
    assert (run_copy / 'ckpt' / '20.damaged' / 'opt_state' / '_METADATA').stat().st_size == 100
    assert records_of(run_copy) == records_of(finished[0])
    assert final_state(run_copy) == final_state(finished[0])


def test_without_an_intact_checkpoint_training_and_sampling_end_in_one_line(run_copy):
    for path in run_copy.glob('ckpt/*/*/*'):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    for result in (train(run_copy, *RESUME), train(run_copy, '--init_from=auto', '--device=cpu:0'), sample(run_copy)):
        assert_refused(result, 'ckpt/20 is damaged .*there is no intact one')


@pytest.mark.slow
def test_a_signal_during_an_evaluation_is_obeyed_at_once(run_copy):
    before = records_of(run_copy)
    more = ['--max_iters=40', '--eval_iters=1000000']  # which would take minutes
    process = start('train_jax.py', f'--out_dir={run_copy}', *RESUME, *more)
    next(line for line in process.stdout if line.startswith('tokens per iteration'))
    time.sleep(4)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert 'step 20' not in out
    assert records_of(run_copy) == before


@pytest.mark.parametrize('signum', [slow(signal.SIGTERM), signal.SIGINT])
def test_a_signal_saves_and_exits(flags, tmp_path, signum):
    process = start('train_jax.py', f'--out_dir={tmp_path}', *flags, '--max_iters=100000', '--eval_interval=100000')
    wait_for_iteration(tmp_path, 3, process)
    process.send_signal(signum)
    out, err = process.communicate()
    name = 'Ctrl-C' if signum == signal.SIGINT else 'SIGTERM'
    assert process.returncode == 128 + signum
    assert err == f'stopping after this iteration, then saving; {name} again ends at once, without saving\n'
    iteration = int(re.search(rf'^stopped by {name} at iteration (\d+), saved', out, re.M)[1])
    assert choose_checkpoint(tmp_path)[0] == iteration
    assert float(re.search(r'imports took ([\d.]+) s', out)[1]) > 0.1
    assert (tmp_path / 'loss.png').stat().st_mtime_ns > (tmp_path / 'metrics.jsonl').stat().st_mtime_ns


def start_under(shell_command, out_dir, *args):
    """train_jax.py, started in a session of its own by this command of the shell, in which "$@" stands for it."""
    train_jax = [sys.executable, ROOT / 'train_jax.py', f'--out_dir={out_dir}', *map(str, args)]
    return subprocess.Popen(['sh', '-c', shell_command, 'sh', *train_jax], start_new_session=True, cwd=out_dir,
                            env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'))


ENDLESS = ['--max_iters=100000', '--eval_interval=100000']


def count_records(out_dir):
    return len([*read_metrics(out_dir)])


@pytest.mark.slow
def test_a_folder_that_is_renamed_during_a_run_is_made_anew_and_stays_locked(dataset, flags, tmp_path):
    out, data = tmp_path / 'out', copy_folder(dataset, tmp_path)  # with a tokenizer that a run keeps
    write_char_tokenizer(json.loads((data / 'meta.json').read_text())['tokenizer']['chars'], data)
    edit_json(data / 'meta.json', tokenizer={'kind': 'folder', 'path': '.'})
    process = start('train_jax.py', f'--out_dir={out}', *flags, f'--dataset={data}', *ENDLESS, '--save_interval=300')
    wait_for_iteration(out, 15, process)
    out.rename(tmp_path / 'moved')
    wait_for('a checkpoint', lambda: checkpoint_steps(out), process)
    assert_refused(train(out, *RESUME), f'is in use by process {process.pid}, which has made')
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert f'{out} has been deleted or renamed: it is made anew, without the earlier checkpoints\n' in err
    assert {'config.json', 'tokenizer'} <= {path.name for path in out.iterdir()}
    last, _ = choose_checkpoint(out)
    assert [record['iter'] for record in read_metrics(out) if 'loss' in record] == [*range(last)]
    succeeded(train(out, *RESUME, f'--max_iters={last + 2}'))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['metrics.jsonl', 'config.json'])
def test_a_file_that_is_deleted_during_a_run_is_written_again(flags, tmp_path, name):
    out = tmp_path / 'out'
    process = start('train_jax.py', f'--out_dir={out}', *flags, *ENDLESS, '--save_interval=20')
    wait_for('a checkpoint', lambda: checkpoint_steps(out), process)
    (out / name).unlink()
    wait_for(name, (out / name).exists, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert err.count(f'{out} lacks config.json or metrics.jsonl: they are written again\n') == 1
    last, _ = choose_checkpoint(out)
    assert [record['iter'] for record in read_metrics(out) if 'loss' in record] == [*range(last)]
    succeeded(train(out, *RESUME, f'--max_iters={last + 2}'))


@needs_hangup
@pytest.mark.slow
def test_a_terminal_that_closes_stops_the_run_which_saves(flags, tmp_path):
    terminal, inside = os.openpty()
    name = os.ttyname(inside)  # a session that opens a terminal is controlled by it
    process = start_under(f'exec "$@" <{name} >{name} 2>&1', tmp_path, *flags, *ENDLESS)

    def reads_until_iteration_3():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)  # a terminal that nobody reads blocks
        return count_records(tmp_path) > 3

    wait_for('iteration 3', reads_until_iteration_3, process)
    os.close(inside)
    os.close(terminal)  # the system sends SIGHUP; what is printed after that is an error
    process.send_signal(signal.SIGHUP)  # as a shell does in addition
    assert process.wait(timeout=300) == 128 + signal.SIGHUP
    last = [record['iter'] for record in read_metrics(tmp_path)][-1]
    assert choose_checkpoint(tmp_path)[0] == last + 1


@pytest.mark.slow
def test_nohup_keeps_a_run_alive_when_the_terminal_closes(flags, tmp_path):
    process = start_under('exec nohup "$@" >/dev/null 2>&1', tmp_path, *flags, *ENDLESS)
    wait_for_iteration(tmp_path, 3, process)
    process.send_signal(signal.SIGHUP)
    seen = count_records(tmp_path)
    wait_for('more iterations', lambda: count_records(tmp_path) > seen + 100, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize('signum', [signal.SIGPIPE, pytest.param(signal.SIGHUP, marks=needs_hangup)])
def test_a_reader_of_the_log_that_ends_alone_or_with_the_terminal_does_not_cost_the_save(flags, tmp_path, signum):
    process = start('train_jax.py', f'--out_dir={tmp_path}', *flags, *ENDLESS)  # ... | tee log
    wait_for_iteration(tmp_path, 3, process)
    process.stdout.close()  # tee is gone first
    if signum == signal.SIGHUP:
        process.send_signal(signum)
    assert process.wait(timeout=300) == 128 + signum
    assert checkpoint_steps(tmp_path)
    process.stderr.close()


@pytest.mark.parametrize('error, code', [
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes'), 2),
    (RuntimeError('no network'), 1)])
def test_an_evaluation_that_fails_does_not_cost_what_was_trained(finished, flags, tmp_path, monkeypatch, error, code):
    estimate = jax_train_utils.estimate_losses
    calls = []

    def fail_later(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return estimate(*args, **options)

    monkeypatch.setattr(jax_train_utils, 'estimate_losses', fail_later)
    result = train(tmp_path, *flags, '--max_iters=10')
    assert result.returncode == code and str(error)[:30] in result.stderr
    assert 'the evaluation at iteration 10 has failed; the model is saved' in result.stdout
    assert checkpoint_steps(tmp_path) == [10] and math.isinf(read_val_loss(tmp_path / 'ckpt' / '10'))
    succeeded(train(tmp_path, *RESUME, '--max_iters=20'))
    assert records_of(tmp_path) == records_of(finished[0])  # the evaluation is made at the resume
    assert final_state(tmp_path) == final_state(finished[0])
    assert not math.isinf(read_val_loss(tmp_path / 'ckpt' / '10'))


@pytest.mark.slow
def test_signals_during_a_slow_save_neither_spoil_it_nor_are_lost(flags, tmp_path, monkeypatch):
    write, log, saved = DiskRun.write_checksums, RunLog.write, threading.Event()

    def send_signal():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)

    def write_slowly(run):  # Orbax calls it in a thread of its own, the save's last step but one
        if not saved.is_set():
            send_signal()
            send_signal()
        write(run)
        saved.set()

    def log_late(run_log, iter_num, metrics):  # the loop is in an iteration while the first checkpoint is written
        if iter_num == 3:
            saved.wait(100)
        log(run_log, iter_num, metrics)

    def begin_slowly(params):  # the last checkpoint has been begun, and no file of it
        if saved.is_set():
            time.sleep(1)
            send_signal()
        return jax_train_utils.all_finite(params)

    monkeypatch.setattr(DiskRun, 'write_checksums', write_slowly)
    monkeypatch.setattr(RunLog, 'write', log_late)
    monkeypatch.setattr('jax_run.out_dir.all_finite', begin_slowly)
    result = train(tmp_path, *flags, '--max_iters=100000', '--eval_interval=100000', '--save_interval=3',
                   '--keep=100')
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert result.stderr.splitlines()[1:] == 2 * ['SIGTERM has to wait: a checkpoint is being written']
    steps = checkpoint_steps(tmp_path)
    assert f'at iteration {steps[0]}, saved' in result.stdout
    run = run_folder(tmp_path)
    assert steps[-1] == 3 and not any(find_damage(run, tmp_path / 'ckpt' / str(step)) for step in steps)


@pytest.mark.parametrize('name, value', [
    ('batch_size', 'x'), ('learning_rate', None), ('dataset', 3), ('decay_lr', 1), ('n_layer', [1])])
def test_a_checkpoint_whose_flags_have_other_types_is_not_resumed(name, value):
    flags = {'init_from': 'resume', 'out_dir': 'out', 'batch_size': 1, 'learning_rate': 1e-3, 'dataset': 'fox',
             'decay_lr': True, 'n_layer': 1}
    assert merge_resumed_flags(flags, {}, {'learning_rate': 1}) == flags | {
        'learning_rate': 1, 'lora_rank': 0, 'quantize': ''}
    with pytest.raises(UserError, match=f'the checkpoint in out says {name}='):
        merge_resumed_flags(flags, {}, {name: value})


def test_what_concerns_one_start_of_a_run_is_not_taken_from_its_checkpoint():
    flags = dict(init_from='resume', out_dir='out', device='auto', overwrite=False, eval_only=False, verify=0,
                 profile=False, base='', coordinator_address='', num_processes=0, process_id=-1)
    saved = dict(init_from='scratch', out_dir='moved', device='cuda:1', overwrite=True, eval_only=True, verify=3,
                 profile=True, base='llama', coordinator_address='host:1', num_processes=2, process_id=1)
    assert merge_resumed_flags(flags, {}, saved) == flags | {'lora_rank': 0, 'quantize': ''}


@pytest.mark.parametrize('saved', [
    {'head_lr': 0.5}, {'embedding_lr': 2.0}, {'vector_lr': 0.0}, {'optimizer': 'normuon'}])
def test_a_run_that_was_trained_with_what_is_gone_names_the_commit_that_continues_it(saved):
    flags = {'learning_rate': 0.1, 'out_dir': 'out', 'init_from': 'resume', 'optimizer': 'adamw'}
    [(name, value)] = saved.items()
    with pytest.raises(UserError, match=f'out was trained with {name}={value}, .*: continue it with commit af04d36'):
        merge_resumed_flags(flags, {}, saved)
    off = {'embedding_lr': 1.0, 'head_lr': 1.0, 'vector_lr': 1.0, 'optimizer': 'adamw'}
    assert merge_resumed_flags(flags, {}, off) == flags | {'lora_rank': 0, 'quantize': ''}


def test_flags_given_to_a_resumed_run_are_checked_with_those_of_its_checkpoint(run_copy):
    succeeded(train(run_copy, *RESUME, '--min_lr=5e-3', '--eval_only=True'))  # its learning_rate is 1e-2


def test_a_run_from_scratch_does_not_overwrite_another_by_mistake(finished, run_copy, flags):
    flags = [*flags, '--max_iters=1']
    assert_refused(train(run_copy, *flags), 'holds a run at iteration 20.*--overwrite=True')
    assert records_of(run_copy) == records_of(finished[0])
    assert choose_checkpoint(run_copy)[0] == 20
    succeeded(train(run_copy, *flags, '--overwrite=True'))
    assert choose_checkpoint(run_copy)[0] == 1


def test_the_last_line_says_if_the_best_loss_is_of_no_checkpoint_also_after_a_resume(flags, tmp_path):
    worse = [*flags, '--learning_rate=10', '--eval_interval=3', '--eval_iters=2']
    out = tmp_path / 'a run'
    for command in ([*worse, '--max_iters=3'], [*RESUME, '--max_iters=6']):
        said = succeeded(train(out, *command)).stdout
        assert f" before training: no checkpoint is better); next: python sample_jax.py --out_dir='{out}'\n" in said


@pytest.mark.slow
def test_always_save_checkpoint_false_saves_only_what_is_better(flags, tmp_path):
    # with a learning rate of 0 nothing improves: saved is the first evaluation that may be, and the end
    constant, better = tmp_path / 'constant', tmp_path / 'better'
    flags = [*flags, '--always_save_checkpoint=False']
    said = succeeded(train(constant, *flags, '--learning_rate=0', '--min_lr=0', '--max_iters=40')).stdout
    assert len({record['val_loss'] for record in records_of(constant, 'val_loss')}) == 1
    assert saved_iterations(constant) == [40]
    assert 'before training' not in said  # the last checkpoint is as good
    long = ['--max_iters=100000', '--lr_decay_iters=100000', '--warmup_iters=100']
    process = start('train_jax.py', f'--out_dir={better}', *flags, *long)
    wait_for_iteration(better, 25, process)
    process.kill()
    process.communicate()
    assert choose_checkpoint(better)[0] >= 10  # saved while the validation loss was falling


def test_a_run_without_an_iteration_says_that_it_saves_nothing(flags, tmp_path):
    said = succeeded(train(tmp_path, *flags, '--max_iters=0')).stdout
    assert said.endswith('saved nothing: there was no iteration\n') and saved_iterations(tmp_path) == []


def test_a_learning_rate_below_min_lr_is_said(flags, tmp_path):
    said = succeeded(train(tmp_path, *flags, '--max_iters=0', '--learning_rate=1e-5')).stdout
    assert 'warning: min_lr=6e-05 is above learning_rate=1e-05, which would rise to it' in said


@pytest.mark.slow
def test_an_evaluation_where_a_run_resumes_counts_for_its_checkpoint(flags, tmp_path):
    succeeded(train(tmp_path, *flags, '--eval_interval=100', '--save_interval=5', '--max_iters=10'))
    shutil.rmtree(tmp_path / 'ckpt' / '10')  # 5 was saved without an evaluation, as by a signal during one
    assert math.isinf(read_val_loss(tmp_path / 'ckpt' / '5'))
    succeeded(train(tmp_path, *RESUME, '--eval_interval=5', '--max_iters=20', '--learning_rate=1', '--decay_lr=False'))
    evaluated = {record['iter']: record['val_loss'] for record in records_of(tmp_path, 'val_loss')}
    assert min(evaluated, key=evaluated.get) == 5 and saved_iterations(tmp_path) == [5, 15, 20]
    assert choose_checkpoint(tmp_path, 'best')[0] == 5 and read_val_loss(tmp_path / 'ckpt' / '5') == evaluated[5]
    assert choose_checkpoint(tmp_path)[1]['best_val_loss'] == evaluated[5]


@pytest.mark.slow
def test_eval_only_writes_nothing(finished, flags, tmp_path):
    result = succeeded(train(tmp_path / 'new', *flags, '--eval_only=True'))
    assert re.search('^step 0: train loss', result.stdout, flags=re.M)
    assert not re.search('^iter ', result.stdout, flags=re.M)
    assert not (tmp_path / 'new').exists()
    out, _ = finished
    before = files_and_times(out)
    result = succeeded(train(out, *RESUME, '--eval_only=True', '--sample_prompt=the quick'))
    last = records_of(out, 'val_loss')[-1]
    assert f"step 20: train loss {last['train_loss']:.4f}, val loss {last['val_loss']:.4f}" in result.stdout
    assert files_and_times(out) == before
    assert re.search(r'^the quick(.|\n){100}\n---------------$', result.stdout, flags=re.M)


def test_eight_devices_give_the_curve_of_one_through_the_script(finished, flags, tmp_path):
    def curve(out_dir):
        return [record.get('loss') or record['val_loss'] for record in read_metrics(out_dir)]

    result = succeeded(train(tmp_path, *flags, '--device=cpu'))
    assert '8 x cpu' in result.stdout
    np.testing.assert_allclose(curve(tmp_path), curve(finished[0]), atol=2e-4)
    succeeded(train(tmp_path, *RESUME, '--max_iters=22'))  # one device resumes what eight have saved


@pytest.mark.slow
def test_a_run_in_float16_resumes_with_the_same_bits(flags, tmp_path):
    flags = [*flags, '--dtype=float16']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    succeeded(train(whole, *flags))
    succeeded(train(parts, *flags, '--max_iters=10'))
    succeeded(train(parts, *RESUME, '--max_iters=20'))
    assert records_of(parts) == records_of(whole)
    assert [*read_metrics(whole)][-1]['val_loss'] < 2.95
    succeeded(sample(whole, '--max_new_tokens=5'))


@pytest.mark.slow
def test_the_dtype_auto_is_chosen_by_each_machine(finished, run_copy, monkeypatch):
    assert choose_checkpoint(finished[0])[1]['flags']['dtype'] == 'auto'  # a resumed run takes its flags from here
    monkeypatch.setattr(jax_devices.setup, 'default_dtype', lambda device: ('bfloat16', 'another machine'))
    resumed = succeeded(train(run_copy, *RESUME, '--max_iters=21'))
    assert 'has computed in float32 so far, and continues in bfloat16' in resumed.stdout


@pytest.mark.slow
def test_a_resume_may_change_the_dtype(run_copy):
    for dtype, end in (('float16', 22), ('bfloat16', 24)):
        succeeded(train(run_copy, *RESUME, f'--dtype={dtype}', f'--max_iters={end}'))
        last = records_of(run_copy, 'loss')[-1]
        assert ('loss_scale' in last) == (dtype == 'float16')


def finetuning_flags(data, source):
    """Flags of a short run from the golden weights `source`, on a data set that is made in the folder `data`."""
    ids = np.random.default_rng(0).integers(41, size=600)
    # val is shorter than the default block_size, and longer than the model's
    write_dataset(data, ids, ids[:100], vocab_size=41)
    return [f'--dataset={data}', f'--init_from={GOLDEN / source}', '--gradient_accumulation_steps=1',
            '--batch_size=2', *SHORT, '--max_iters=3', '--learning_rate=1e-4', '--min_lr=1e-5']


@pytest.mark.slow
@pytest.mark.parametrize('source, activation', [('hf', 'gelu_tanh'), ('nanogpt_no_bias', 'gelu')])
def test_finetuning_starts_from_foreign_weights_and_resumes(tmp_path, source, activation):
    out, flags = tmp_path / 'out', finetuning_flags(tmp_path / 'data', source)
    assert 'block_size 24' in succeeded(train(out, *flags)).stdout
    succeeded(train(out, *RESUME, '--max_iters=5'))
    _, meta = choose_checkpoint(out)
    assert meta['iter_num'] == 5
    assert meta['model']['block_size'] == 24
    assert meta['model']['activation'] == activation
    if source == 'hf':  # the other one is sampled in the same way
        succeeded(sample(out, '--start=0', '--max_new_tokens=5', '--num_samples=1'))


@pytest.mark.parametrize('flag, message', [
    ('--block_size=25', 'block_size=25, but .* knows only 24 positions'),
    ('--n_layer=7', 'this model has n_layer=.*, not n_layer=7: leave the flag out'),
    ('--expert_balance=0.1', 'nothing reads expert_balance=0.1 without'),
    ('--lora_alpha=32.0', 'nothing reads lora_alpha=32.0 without')])
def test_flags_that_foreign_weights_do_not_fit_are_refused(tmp_path, flag, message):
    flags = finetuning_flags(tmp_path / 'data', 'hf')
    assert_refused(train(tmp_path / 'out', *flags, flag), message)


@pytest.mark.slow
def test_wandb_offline_needs_no_account_and_a_resumed_run_continues_it(flags, tmp_path, monkeypatch):
    import wandb
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))
    monkeypatch.setenv('WANDB_SILENT', 'true')
    log = ['--wandb_log=True', '--wandb_project=p']
    out = tmp_path / 'out'
    succeeded(train(out, *flags, *log, '--max_iters=2'))
    wandb.finish()
    wandb_id = choose_checkpoint(out)[1]['wandb_id']
    assert wandb_id
    succeeded(train(out, *RESUME, *log, '--max_iters=4'))
    wandb.finish()
    assert choose_checkpoint(out)[1]['wandb_id'] == wandb_id
    assert len(list((tmp_path / 'wandb').glob(f'offline-run-*-{wandb_id}'))) == 2


class FakeWandb:
    """Takes the place of the module wandb; keeps what is logged."""

    def __init__(self, monkeypatch):
        self.started = 0
        self.logged = []
        self.log = self.logged.append
        self.id = 'some-id'
        monkeypatch.setitem(sys.modules, 'wandb', self)

    def init(self, **settings):
        self.started += 1
        self.settings = settings
        return self

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.mark.slow
def test_wandb_gets_nanogpts_values_with_mfu_in_percent(flags, tmp_path, monkeypatch):
    wandb = FakeWandb(monkeypatch)
    monkeypatch.setattr(jax_devices.setup, 'device_peak_flops', lambda device: 1e12)
    succeeded(train(tmp_path, *flags, '--wandb_log=True'))
    assert [set(record) for record in wandb.logged] == [{
        'iter', 'train/loss', 'val/loss', 'train_bpb', 'val_bpb', 'lr', 'mfu'}] * 3
    assert [record['iter'] for record in wandb.logged] == [0, 10, 20]
    mfu = {record['iter']: record['mfu'] for record in read_metrics(tmp_path) if 'mfu' in record}
    assert wandb.logged[0]['mfu'] is None
    assert [record['mfu'] for record in wandb.logged[1:]] == [100 * mfu[9], 100 * mfu[19]]
    rates = {record['iter']: record['lr'] for record in records_of(tmp_path, 'lr')}
    assert [record['lr'] for record in wandb.logged] == [None, rates[9], rates[19]]
    assert 0 < mfu[19] < 1
    assert wandb.exit_code == 0  # finished: the next run of this process is a new one


def test_the_mfu_is_that_of_all_devices_and_counts_the_frozen_weights_of_lora(finished, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(jax_devices.setup, 'device_peak_flops', lambda device: 1e12)
    lora = [f'--init_from={finished[0]}', '--lora_rank=2', '--device=cpu', '--max_iters=1', '--warmup_iters=0']
    succeeded(train(tmp_path, *flags, *lora))
    config, params, _ = load_run(finished[0])
    n_updates = count_params(jax_train_utils.create_updates(jax.random.key(0), params, 2))
    record = next(record for record in read_metrics(tmp_path) if 'mfu' in record)
    assert record['mfu'] == pytest.approx(estimate_mfu(
        n_updates, config, record['tokens_per_sec'], peak_flops=8e12, n_frozen=count_params(params)))


def test_a_run_goes_on_without_wandb_if_that_fails(flags, tmp_path, monkeypatch):
    wandb = FakeWandb(monkeypatch)
    wandb.log = lambda record: 1 / 0
    done = succeeded(train(tmp_path, *flags, '--wandb_log=True'))
    assert done.stderr == 'wandb does not log any more, from iteration 0 on: division by zero\n'
    assert choose_checkpoint(tmp_path)[0] == 20


def test_wandb_learns_that_a_run_has_failed_and_is_asked_for_the_run_that_is_resumed(flags, tmp_path, monkeypatch):
    wandb = FakeWandb(monkeypatch)
    flags = [*flags, '--wandb_log=True']
    with monkeypatch.context() as patch:
        patch.setattr(jax_run.log.RunLog, 'iteration', lambda *args: 1 / 0)
        assert train(tmp_path, *flags, '--max_iters=3').returncode == 1
    assert wandb.exit_code == 1
    assert wandb.settings['id'] is None
    assert (wandb.settings['project'], wandb.settings['name']) == ('owt', 'gpt2')
    succeeded(train(tmp_path, '--init_from=resume', '--wandb_log=True', '--wandb_run_name=b', '--max_iters=4'))
    assert (wandb.settings['id'], wandb.settings['resume'], wandb.exit_code) == ('some-id', 'allow', 0)
    assert wandb.settings['config']['max_iters'] == 4 and wandb.settings['name'] == 'b'


def test_a_model_that_a_run_starts_from_is_not_overwritten_by_it(finished, flags, tmp_path, monkeypatch):
    run = copy_folder(finished[0], tmp_path)
    for more in ([], ['--lora_rank=2']):
        kept = sorted(path.name for path in (run / 'ckpt').iterdir())
        assert_refused(train(run, *flags, f'--init_from={run}', '--overwrite=True', *more),
                       'holds the model that this run starts from')
        assert sorted(path.name for path in (run / 'ckpt').iterdir()) == kept
    model = copy_folder(GOLDEN / 'hf', tmp_path)
    settings = (model / 'config.json').read_bytes()
    assert_refused(train(model, *flags), 'is the folder of a model')
    assert (model / 'config.json').read_bytes() == settings and not (model / 'ckpt').exists()
    monkeypatch.chdir(run / 'ckpt')  # a run from scratch starts from nothing here
    succeeded(train(run, *flags, '--overwrite=True', '--max_iters=1', '--lr_decay_iters=0'))
    assert choose_checkpoint(run)[0] == 1


def test_a_start_that_is_refused_starts_no_wandb_run(finished, flags, tmp_path, monkeypatch):
    wandb = FakeWandb(monkeypatch)
    (tmp_path / 'ckpt').touch()  # a file in the place of the folder
    for out, more, message in (
            (tmp_path, [], 'cannot write to'), (tmp_path, ['--n_head=3'], 'n_head'), (finished[0], [], 'holds a run'),
            (tmp_path, ['--attention=cudnn'], 'does not work here'), (tmp_path, ['--optimizer=sgd'], 'optimizer'),
            (tmp_path, ['--init_from=resume'], 'no complete checkpoint'), (tmp_path, ['--loss_chunk=5'], 'loss_chunk')):
        assert_refused(train(out, *flags, '--wandb_log=True', *more), message)
    assert wandb.started == 0


# -----------------------------------------------------------------------------
# mistakes: one line on stderr, exit code 2, nothing lost

@pytest.mark.parametrize('script', ['train_jax.py', 'sample_jax.py'])
def test_a_mistake_ends_in_one_line_and_exit_code_2_in_a_real_process(script):
    result = subprocess.run([sys.executable, ROOT / script, '--devise=1'], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr == 'error: unknown flag --devise; did you mean --device?\n'


@pytest.mark.parametrize('bad, message', [
    (['--dataset=nosuchdata'], 'there is no .*data/nosuchdata/train.bin'),
    (['--n_expert=2', '--expert_balance=1e999'], 'expert_balance must be at least 0'),
    (['--dataset=openwebtext'], 'run: python data/openwebtext/prepare.py'),
    (['--block_size=5000'], 'needs 5001'),
    (['--n_head=3'], r'n_head=3 does not divide n_embd=16; it may be one of \[1, 2, 4, 8, 16\]'),
    (['--device=cuda'], 'jax sees no cuda'),
    (['--dtype=float8'], 'dtype must be'),
    (['--device=cpu', '--batch_size=3', '--gradient_accumulation_steps=1'], 'cannot be shared equally by 8 devices'),
    (['--batch_size=0'], 'batch_size must be at least 1'),
    (['--learning_rate=-1'], 'learning_rate must be at least 0'),
    (['--beta2=1.0'], r'beta2 must be in \[0, 1\)'),
    (['--dropout=1.0'], 'dropout must be in'),
    (['--warmup_iters=20'], 'lr_decay_iters=20 must be more than warmup_iters=20'),
    (['--init_from=nosuchmodel'], 'nosuchmodel'),
    (['--seed=4294967296'], r'seed must be in \[0, 4294967296\)'),
    (['--loss_chunk=5'], r'loss_chunk=5 does not divide block_size=16; it may be one of \[1, 2, 4, 8\]'),
    (['--attention=flash'], 'attention must be one of auto, xla, chunked, cudnn, splash'),
    (['--attention=cudnn'], 'attention=cudnn does not work here: it is for NVIDIA GPUs'),
    (['--remat=all'], 'remat must be one of none, dots, full'),
    (['--optimizer=sgd'], 'optimizer must be one of adamw, muon'),
    (['--lr_schedule=step'], 'lr_schedule must be one of cosine'),
    (['--n_inner=-5'], 'n_inner must be at least 0, not -5'),
    (['--n_kv_head=-2'], 'n_kv_head must be at least 0, not -2'),
    (['--keep=0'], 'keep must be at least 1'),
    (['--window=8'], 'window=8 needs window layers, as in --layer_types=window,full'),
    (['--layer_types=window,full'], 'window layers need a size, as in window=64'),
    (['--layer_types=windows,full', '--window=8'], "layer_types must be one of full, .* not 'windows'"),
    (['--quantize=int8'], 'nothing reads quantize=int8 without LoRA: add --lora_rank=8'),
    (['--beta=0.5'], 'nothing reads beta=0.5 without a data set of pairs'),
    (['--n_expert_used=4'], 'nothing reads n_expert_used=4 without experts: add --n_expert=8'),
    (['--expert_balance=0.1'], 'nothing reads expert_balance=0.1 without experts'),
    (['--lora_alpha=32'], 'nothing reads lora_alpha=32.0 without LoRA: add --lora_rank=8; or leave lora_alpha out'),
    (['--min_lr=0.02'], 'min_lr=0.02 is above learning_rate=0.01, .*: add --min_lr=0.001, or --decay_lr=False'),
    (['--out_dir=' + 'x' * 300], 'File name too long'),
    (['--out_dir=s3://bucket/run'], 'out_dir=s3://bucket/run cannot be used: Orbax 0.12, .*, takes s3:// for a folder'),
    (['--dataset=s3://bucket/data'], 'dataset=s3://bucket/data cannot be used: .*; name a folder, or gs://bucket')])
def test_a_flag_that_cannot_work_is_refused_before_anything_is_written(flags, tmp_path, bad, message):
    if bad == ['--dataset=openwebtext'] and (ROOT / 'data' / 'openwebtext' / 'train.bin').exists():
        pytest.skip('openwebtext has been prepared here')
    assert_refused(train(tmp_path / 'out', *flags, *bad), message)
    assert not (tmp_path / 'out').exists()


def test_an_out_dir_that_cannot_be_is_refused(flags, tmp_path):
    for name in ('[a]', 'a\\b', 'a\udce9'):
        (tmp_path / name).mkdir()
        assert_refused(train(tmp_path / name / 'out', *flags), 'Orbax loses the checkpoints in a folder that has ')
        assert list((tmp_path / name).iterdir()) == []
    (tmp_path / 'file').touch()
    assert_refused(train(tmp_path / 'file', *flags), 'cannot write to .*file')


def test_a_failing_start_does_not_overwrite_the_run_that_is_there(finished, run_copy, flags, monkeypatch):
    import wandb

    def no_login(**settings):
        raise RuntimeError('no API key')
    monkeypatch.setattr(wandb, 'init', no_login)
    assert_refused(train(run_copy, *flags, '--overwrite=True', '--wandb_log=True'), 'wandb does not start')
    assert_refused(train(run_copy, *flags, '--wandb_log=True'), 'holds a run at iteration 20')  # wandb has not started
    assert records_of(run_copy) == records_of(finished[0])
    assert choose_checkpoint(run_copy)[0] == 20


def test_other_tokens_are_not_resumed(finished, dataset, tmp_path):
    data = copy_folder(dataset, tmp_path)
    meta = json.loads((data / 'meta.json').read_text())
    meta['tokenizer']['chars'] = meta['tokenizer']['chars'][::-1]
    (data / 'meta.json').write_text(json.dumps(meta))
    assert_refused(train(finished[0], *RESUME, f'--dataset={data}'), 'was trained with other tokens')


def test_what_a_config_file_says_overrides_a_resumed_run_even_where_it_says_the_default(run_copy, tmp_path):
    (tmp_path / 'c.py').write_text('eval_interval = 2000\n')
    succeeded(train(run_copy, tmp_path / 'c.py', *RESUME, '--max_iters=21'))
    assert json.loads((run_copy / 'config.json').read_text())['eval_interval'] == 2000


def test_a_flag_that_is_newer_than_a_checkpoint_is_as_its_model_says(run_copy):
    folder = run_copy / 'ckpt' / '20'
    (folder / 'checksums.json').write_text('{}')  # as if it had been written so
    meta = json.loads((folder / 'meta' / 'metadata').read_text())
    del meta['flags']['mlp']
    (folder / 'meta' / 'metadata').write_text(json.dumps(meta))
    assert_refused(train(run_copy, *RESUME, '--mlp=swiglu'), "was trained with mlp='gelu', not mlp='swiglu'")


def test_another_architecture_is_not_resumed(finished):
    out, _ = finished
    before = files_and_times(out)
    assert_refused(train(out, '--init_from=resume', '--n_layer=3'), 'with n_layer=1, not n_layer=3')
    file = ROOT / 'config' / 'train_shakespeare_char.py'
    result = train(out, '--init_from=resume', file, f'--out_dir={out}')
    assert_refused(result, 'cannot resume with another architecture')
    assert files_and_times(out) == before


@pytest.mark.parametrize('name, value', [('lora_rank', 8), ('lora_alpha', 16.0), ('quantize', '')])
def test_updates_of_another_form_are_not_resumed(name, value):
    saved = {'lora_rank': 4, 'lora_alpha': 8.0, 'quantize': 'int8'}
    said = refusal(merge_resumed_flags, {**saved, 'out_dir': 'out'}, {name: value}, saved)
    assert f'out was trained with {name}={saved[name]!r}, not {name}={value!r}' in said


@pytest.mark.slow
def test_a_checkpoint_whose_folders_cannot_be_made_ends_the_run_at_once(flags, tmp_path):
    # made in the background, Orbax's threads would wait for them for 5 minutes
    program = f"""import os, runpy, sys
real = os.mkdir
def mkdir(path, *args, **options):
    if 'opt_state' in os.fspath(path):
        raise OSError(30, 'Read-only file system', path)
    return real(path, *args, **options)
os.mkdir = mkdir
runpy.run_path({str(ROOT / 'train_jax.py')!r}, run_name='__main__')"""
    result = subprocess.run([sys.executable, '-c', program, f'--out_dir={tmp_path}', *flags], capture_output=True,
                            text=True, timeout=200, cwd=ROOT, env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'))
    assert_refused(result, 'cannot write .*Read-only file system')


def test_token_ids_outside_the_vocabulary_are_refused(dataset, flags, tmp_path):
    data = copy_folder(dataset, tmp_path)
    np.full(500, 60, np.uint16).tofile(data / 'val.bin')
    result = train(tmp_path / 'out', *flags, f'--dataset={data}')
    assert_refused(result, 'val.bin has token id 60, outside the vocabulary')


@pytest.mark.slow
@pytest.mark.parametrize('split', ['train', 'val'])
def test_a_token_id_that_meta_json_denies_is_found_when_it_is_drawn(dataset, flags, tmp_path, split):
    data = copy_folder(dataset, tmp_path)
    sizes = {split: (data / f'{split}.bin').stat().st_size // 2 for split in ('train', 'val')}
    edit_json(data / 'meta.json', max_id=20, train_tokens=sizes['train'], val_tokens=sizes['val'])
    np.full(sizes[split], 60, np.uint16).tofile(data / f'{split}.bin')
    result = train(tmp_path / 'out', *flags, f'--dataset={data}', '--eval_interval=1')
    assert_refused(result, f'the {split} tokens have an id outside the vocabulary of 28')
    assert not checkpoint_steps(tmp_path / 'out')


@pytest.mark.parametrize('name', ['train.bin', 'val.bin'])
def test_data_that_is_cut_short_ends_a_run_with_its_last_checkpoint(dataset, flags, tmp_path, monkeypatch, name):
    data = copy_folder(dataset, tmp_path)
    draw = jax_run.sources.Windows.draw

    def cut_later(source, numbers, rows):
        if numbers[0] == 6 * len(numbers):  # iteration 6
            os.truncate(data / name, 40)
        return draw(source, numbers, rows)

    monkeypatch.setattr(jax_run.sources.Windows, 'draw', cut_later)
    changed = ['--save_interval=2', '--eval_interval=8', f'--dataset={data}']
    result = train(tmp_path / 'out', *flags, *changed)
    kept = 6 if name == 'train.bin' else 8  # what was trained is saved first
    assert_refused(result, f'{name} was cut short while it was read: it has 40 bytes now, ')
    assert f'has the checkpoint of iteration {kept}: continue with --init_from=resume' in result.stderr
    assert checkpoint_steps(tmp_path / 'out')[0] == kept


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_good_checkpoint(flags, tmp_path):
    diverging = ['--decay_lr=False', '--learning_rate=1e30', '--grad_clip=0', '--save_interval=1']
    assert_refused(train(tmp_path, *flags, *diverging), 'stopping')
    assert max(saved_iterations(tmp_path)) < 20
    succeeded(sample(tmp_path, '--max_new_tokens=3', '--checkpoint=latest'))


@pytest.mark.parametrize('diverging, message', [
    (['--learning_rate=1e30', '--weight_decay=1e30', '--save_interval=1'], 'parameters are not finite at iteration 1'),
    (['--learning_rate=3e38', '--eval_interval=1'], 'the loss is not finite at iteration 1')])
def test_what_an_update_has_spoilt_is_not_saved(flags, tmp_path, diverging, message):
    assert_refused(train(tmp_path, *flags, '--decay_lr=False', '--grad_clip=0', *diverging), message)
    assert not checkpoint_steps(tmp_path)


@pytest.mark.slow
def test_flags_without_an_effect_say_so_once(flags, tmp_path):
    out = succeeded(train(tmp_path, *flags, '--max_iters=1', '--compile=False')).stdout
    assert out.count('--compile=False has no effect') == 1
    assert '--backend' not in out  # it has its default


# -----------------------------------------------------------------------------
# execution options are no part of a checkpoint

FAST = ['--scan_layers=True', '--remat=full', '--attention=chunked', '--loss_chunk=8']


@pytest.mark.slow
def test_a_run_with_muon_resumes_bit_for_bit_and_with_other_execution_options(flags, tmp_path):
    flags = [*flags, '--n_layer=2', '--optimizer=muon', '--lr_schedule=wsd']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    succeeded(train(whole, *flags))
    succeeded(train(parts, *flags, '--max_iters=10'))
    other = Path(shutil.copytree(parts, tmp_path / 'other'))
    succeeded(train(parts, *RESUME, '--max_iters=20'))
    assert records_of(parts) == records_of(whole)
    result = succeeded(train(other, *RESUME, '--max_iters=20', '--dropout=0.0', *FAST))
    assert 'attention: chunked (--attention says so)' in result.stdout
    assert 'attention' not in choose_checkpoint(other)[1]['model']
    succeeded(sample(other, '--max_new_tokens=20'))
    result = train(parts, '--init_from=resume', '--optimizer=adamw')
    assert_refused(result, 'cannot resume with another optimizer')


@pytest.mark.parametrize('is_synchronous, expected', [
    (False, ['start', *['start', 'read'] * 5, 'read']), (True, ['start', 'read'] * 6)])
def test_the_loop_reads_an_iteration_when_the_next_is_on_its_way_or_at_once_where_calls_are_synchronous(
        is_synchronous, expected, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(jax_devices.setup, 'is_synchronous', lambda device: is_synchronous)
    events, iteration, device_get = [], RunLog.iteration, jax.device_get

    def recording_iteration(*args):
        events.append('start')
        iteration(*args)

    def recording_get(tree):
        events.append('read')
        return device_get(tree)

    monkeypatch.setattr(RunLog, 'iteration', recording_iteration)
    monkeypatch.setattr(jax, 'device_get', recording_get)
    succeeded(train(tmp_path / 'out', *flags, '--max_iters=6', '--eval_interval=100'))
    assert events == expected


# -----------------------------------------------------------------------------
# newer models


@pytest.mark.slow
def test_a_checkpoint_of_any_family_is_trained_further(dataset, tmp_path):
    source = FAMILIES / 'deepseek_v3_packed'
    assert_refused(train(tmp_path / 'out', f'--dataset={dataset}', f'--init_from={source}', '--device=cpu:0'),
                   'has other tokens than')
    dataset = copy_folder(dataset, tmp_path)  # with characters that never occur, as many as the model has tokens
    chars = json.loads((dataset / 'meta.json').read_text())['tokenizer']['chars']
    chars += ''.join(chr(ord('A') + i) for i in range(44 - len(chars)))
    edit_json(dataset / 'meta.json', vocab_size=44, tokenizer={'kind': 'char', 'chars': chars})
    flags = ['--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=1', *SHORT, '--max_iters=2',
             '--dropout=0.0']
    succeeded(train(tmp_path / 'out', f'--dataset={dataset}', f'--init_from={source}', *flags))
    config, params, _ = load_run(tmp_path / 'out', 'latest')
    assert config.mla
    assert config.moe.n_group == 4
    assert config.block_size == 64  # RoPE keeps the model's context
    kernel_of = lambda params: params['h_1']['mlp']['experts_c_fc']['kernel']
    change = np.abs(kernel_of(params) - kernel_of(load_pretrained(source)[1])).max()
    assert change > 0
    assert change < 0.1
    (tmp_path / 'out').rename(tmp_path / 'moved')
    export = ['export_jax.py', f'--out_dir={tmp_path / "moved"}', '--checkpoint=latest', '--dtype=bfloat16']
    succeeded(run_script(*export, f'--folder={tmp_path / "model"}'))
    ours, theirs = (json.loads((folder / 'config.json').read_text()) for folder in (tmp_path / 'model', source))
    assert theirs.pop('quantization_config')
    assert theirs.pop('torch_dtype')
    assert ours == theirs | {'dtype': 'bfloat16'}
    assert load_pretrained(tmp_path / 'model')[0] == load_pretrained(source)[0]
    kept = tmp_path / 'moved' / 'tokenizer' / 'config.json'
    kept.unlink()  # as in a run of an earlier version
    assert_refused(run_script(*export, f'--folder={tmp_path / "other"}'), 'no config.json can be derived .*tokenizer')


# -----------------------------------------------------------------------------
# bits per byte, and a sample at every evaluation

def test_bits_per_byte_of_characters_are_the_loss_over_ln_2(finished):
    out, printed = finished
    for record in records_of(out, 'val_loss'):
        for split in ('train', 'val'):
            assert record[f'{split}_bpb'] == pytest.approx(record[f'{split}_loss'] / math.log(2), rel=1e-6)
        assert f"val loss {record['val_loss']:.4f}, val bpb {record['val_bpb']:.4f}" in printed


@pytest.mark.slow
@pytest.mark.parametrize('layout', [['--device=cpu:0'], ['--device=cpu', '--fsdp=4', '--tensor=2']])
def test_a_run_that_samples_has_the_same_bits_and_sample_jax_gives_its_samples(layout, flags, tmp_path):
    """Also after a kill: the second half is a resumed run."""
    plain, sampled = tmp_path / 'plain', tmp_path / 'sampled'
    succeeded(train(plain, *flags, *layout))
    prompt = ['--sample_prompt=the quick']
    succeeded(train(sampled, *flags, *layout, *prompt, '--max_iters=10'))
    resumed = succeeded(train(sampled, '--init_from=resume', *layout, *prompt, '--max_iters=20'))
    assert losses_and_norms(sampled) == losses_and_norms(plain)
    last = records_of(sampled, 'sample')[-1]
    assert last['iter'] == 20 and last['sample'] in resumed.stdout
    assert [record['iter'] for record in records_of(sampled, 'sample')] == [10, 20]
    text, = samples_of(sample(sampled, '--checkpoint=latest', '--start=the quick', '--num_samples=1',
                              '--max_new_tokens=100'))
    assert last['sample'] == text and len(text) == 109


def losses_and_norms(out):
    names = ('iter', 'loss', 'grad_norm', 'train_loss', 'val_loss')
    return [[record.get(name) for name in names] for record in read_metrics(out)]


def test_a_prompt_that_the_vocabulary_lacks_is_refused_before_training(flags, tmp_path):
    result = train(tmp_path / 'out', *flags, '--sample_prompt=\u00e9')
    assert result.returncode == 2 and 'does not know' in result.stderr and not (tmp_path / 'out').exists()


def test_an_iteration_whose_logging_fails_is_saved_first(finished, flags, tmp_path, monkeypatch):
    write = jax_run.log.RunLog.write

    def fail_later(log, iter_num, metrics):
        write(log, iter_num, metrics)
        if iter_num == 6:
            raise RuntimeError('no network')

    monkeypatch.setattr(jax_run.log.RunLog, 'write', fail_later)
    result = train(tmp_path, *flags)
    assert result.returncode == 1 and 'no network' in result.stderr
    assert checkpoint_steps(tmp_path)[0] == 7
    monkeypatch.undo()
    succeeded(train(tmp_path, *RESUME))
    assert records_of(tmp_path) == records_of(finished[0])
    assert final_state(tmp_path) == final_state(finished[0])


@pytest.mark.parametrize('n_processes, saved', [(1, [7]), (2, [])])
def test_of_several_processes_one_that_fails_saves_nothing_because_the_others_would_not(
        monkeypatch, n_processes, saved):
    monkeypatch.setattr(jax, 'process_count', lambda: n_processes)
    saves = []
    monkeypatch.setattr(OutDir, 'save', lambda out, iter_num, *rest: saves.append(iter_num))
    out = OutDir.__new__(OutDir)
    out.run = out.checkpoints = types.SimpleNamespace(iter_num=0, wait_until_finished=lambda: None)
    with pytest.raises(RuntimeError, match='no network'), out.saved_on_failure('the log', 7, None, 1.0):
        raise RuntimeError('no network')
    assert saves == saved


def test_after_a_step_that_has_failed_a_line_names_the_last_checkpoint(flags, tmp_path, monkeypatch):
    step_of = jax_train_utils.make_train_step

    def failing(*args, **options):
        step = step_of(*args, **options)

        def run(state, batch):
            def check(n):
                if n >= 6:
                    raise RuntimeError('a device is lost')
            jax.debug.callback(check, state.step)
            return step(state, batch)
        return run

    monkeypatch.setattr('jax_run.program.make_train_step', failing)
    result = train(tmp_path, *flags, '--save_interval=4')
    assert result.returncode == 1 and 'the last checkpoint is that of iteration 4' in result.stderr
    assert checkpoint_steps(tmp_path)[0] == 4


def test_an_empty_config_json_does_not_block_a_resume(run_copy):
    (run_copy / 'config.json').write_text('')
    succeeded(train(run_copy, *RESUME, '--max_iters=21'))
    assert json.loads((run_copy / 'config.json').read_text())['max_iters'] == 21


def test_a_picture_that_cannot_be_drawn_is_a_line_and_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # loss.png is drawn
    plot_losses = jax_run.log.plot_losses
    plot_losses(tmp_path / 'gone')
    assert capsys.readouterr().err == f'cannot write {tmp_path}/gone/loss.png: No such file or directory\n'


@pytest.mark.parametrize('what', [slow('renamed'), slow('removed'), 'metrics'])
def test_what_is_no_training_does_not_end_a_run(what, finished, flags, tmp_path, monkeypatch):
    if what == 'metrics' and not os.path.exists('/dev/full'):
        pytest.skip('Linux only')
    out = tmp_path / 'out'
    write = jax_run.log.RunLog.write

    def spoil(log, iter_num, metrics):
        if iter_num == 17 and what == 'renamed':
            time.sleep(1)  # no save is under way
            out.rename(tmp_path / 'moved')
        elif iter_num == 17 and what == 'removed':
            time.sleep(1)
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)  # what was written meanwhile
        elif iter_num >= 6 and what == 'metrics':
            log.metrics_log.file.close()
            log.metrics_log.file = open('/dev/full', 'w')
        write(log, iter_num, metrics)

    monkeypatch.setattr(jax_run.log.RunLog, 'write', spoil)
    result = train(out, *flags)
    assert result.returncode == 0, result.stderr
    assert ('cannot write' in result.stderr) == (what == 'metrics')
    assert final_state(out) == final_state(finished[0])


def test_a_signal_that_a_callback_has_swallowed_deletes_no_earlier_run(run_copy, flags, monkeypatch):
    def check_fits(*args):
        with contextlib.suppress(SystemExit):  # as JAX's callback of the garbage collector
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr('jax_run.start.check_fits', check_fits)
    monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)  # the script sets it
    kept = sorted(path.name for path in (run_copy / 'ckpt').iterdir())
    assert train(run_copy, *flags, '--overwrite=True').returncode == 130
    assert sorted(path.name for path in (run_copy / 'ckpt').iterdir()) == kept


STARTING = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(name, path, target=None):
        if name == module:
            print('importing', name, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
module, *sys.argv = sys.argv[1:]
sys.meta_path.insert(0, Interrupt)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.parametrize('script, module, argument', [
    ('train_jax.py', 'jax', '--dataset=none'), ('sample_jax.py', 'jax', '--out_dir=none'),
    ('eval_jax.py', 'jax', '--text=README.md'), ('export_jax.py', 'jax', '--folder=none'),
    ('bench_jax.py', 'jax', '--mode=train'), ('plot_jax.py', 'matplotlib', 'OUT')])
def test_ctrl_c_while_a_script_starts_is_130_without_a_word(script, module, argument, finished):
    process = start('-c', STARTING, module, script, argument.replace('OUT', str(finished[0])))
    out, err = process.communicate(timeout=100)
    assert out.endswith(f'importing {module}\n')
    assert (process.returncode, err.strip()) == (130, '')


INTERRUPTED = """
import importlib, os, runpy, signal, sys, time
def interrupt(*args, **options):
    print('in', name, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
module, name, *sys.argv = sys.argv[1:]
setattr(importlib.import_module(module), name, interrupt)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.parametrize('module, function, script, arguments', [
    ('jax_run.compare', 'draw', 'plot_jax.py', ['OUT', '--output=TMP/a.png']),
    ('jax_generate', 'score_rows', 'eval_jax.py', ['--out_dir=OUT', '--text=TMP/a.txt', '--output=TMP/a.json']),
    slow('jax_generate', 'prefill_pieces', 'bench_jax.py', ['--mode=decode', *MODEL, '--block_size=256']),
    slow('jax_train_utils', 'clip_gradients', 'bench_jax.py', ['--mode=train', *MODEL])])
def test_ctrl_c_in_the_middle_of_a_script_is_130_without_a_word(
        module, function, script, arguments, finished, tmp_path):
    (tmp_path / 'a.txt').write_text('the quick brown fox')
    arguments = [part.replace('OUT', str(finished[0])).replace('TMP', str(tmp_path)) for part in arguments]
    process = start('-c', INTERRUPTED, module, function, script, *arguments)
    out, err = process.communicate(timeout=300)
    assert f'in {function}\n' in out  # it was reached
    assert process.returncode == 130 and not re.search('Traceback|Error', err), (process.returncode, err)
    assert [path.name for path in tmp_path.iterdir()] == ['a.txt']


def test_a_closed_stderr_does_not_end_a_run(flags, tmp_path):
    command = ' '.join([sys.executable, 'train_jax.py', f'--out_dir={tmp_path}', *map(str, flags), '2>&-'])
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'))
    assert done.returncode == 0 and checkpoint_steps(tmp_path)[0] == 20
