"""What a user sees of train_jax.py and sample_jax.py: the scripts run as they are, on small data and small models."""
import ast
import contextlib
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jax_pretrained import load_pretrained, save_pretrained
from jax_train_utils import (
    MODEL_FLAGS, FolderTokenizer, config_block, config_from_flags, flags_from_config, load_meta, load_run, read_metrics)

ROOT = Path(__file__).parent.parent
TEXT = 'the quick brown fox jumps over the lazy dog and runs away\n'
MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=2']
SHORT = ['--max_iters=20', '--eval_interval=10', '--eval_iters=2', '--warmup_iters=2', '--lr_decay_iters=20', '--learning_rate=1e-2',
         '--dropout=0.1', '--device=cpu:0']


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'fox'
    folder.mkdir()
    chars = ''.join(sorted(set(TEXT)))
    ids = np.array([chars.index(c) for c in TEXT * 40], np.uint16)
    ids[:-400].tofile(folder / 'train.bin')
    ids[-400:].tofile(folder / 'val.bin')
    (folder / 'meta.json').write_text(json.dumps({'vocab_size': len(chars), 'dtype': 'uint16', 'tokenizer': {'kind': 'char', 'chars': chars}}))
    return folder


def run(script, *args):
    """Runs a script in this process, which saves the start of another; gives what a shell would see of it."""
    argv, hook, handlers = sys.argv, sys.excepthook, {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    sys.argv = [script, *map(str, args)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                try:
                    runpy.run_path(str(ROOT / script), run_name='__main__')
                except Exception:
                    sys.excepthook(*sys.exc_info())  # what the interpreter does; the script has put its own there
                    code = 1
            except SystemExit as exit:
                code = exit.code
    finally:
        sys.argv, sys.excepthook = argv, hook
        for s, handler in handlers.items():
            signal.signal(s, handler)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def train(out_dir, *args):
    return run('train_jax.py', f'--out_dir={out_dir}', *args)


def sample(out_dir, *args):
    return run('sample_jax.py', f'--out_dir={out_dir}', '--device=cpu:0', *args)


def numbers(out_dir):
    """The records of metrics.jsonl without what depends on the clock."""
    return [{k: v for k, v in r.items() if k not in ('time_ms', 'tokens_per_sec', 'mfu')} for r in read_metrics(out_dir)]


@pytest.fixture(scope='module')
def finished(tmp_path_factory, dataset):
    """A run of 20 iterations, and what it printed."""
    out = tmp_path_factory.mktemp('finished') / 'out'
    result = train(out, f'--dataset={dataset}', *MODEL, *SHORT)
    assert result.returncode == 0, result.stderr
    return out, result


# -----------------------------------------------------------------------------
# flags


@pytest.mark.parametrize('script', ['train_jax.py', 'sample_jax.py', 'bench_jax.py'])
def test_every_knob_is_live(script):
    tree = ast.parse((ROOT / script).read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if 'config_from_flags' in used:  # reads the model's flags, see the next test
        used |= {*MODEL_FLAGS, 'dropout', 'expert_balance'}
    knobs = config_block(ROOT / script)
    assert len(knobs) > 10 and not [name for name in knobs if name not in used]


def test_every_flag_of_the_model_changes_the_model():
    flags = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=True, norm='layer', position='learned', n_kv_head=0, qk_norm='', window=4,
                 layer_types='full', mlp='gelu', n_inner=0, tied_head=True, n_expert=2, n_expert_used=1, expert_balance=0.0, dropout=0.0)
    other = dict(n_layer=1, n_head=4, n_embd=32, block_size=8, bias=False, norm='rms', position='rope', n_kv_head=1, qk_norm='learned', window=5,
                 layer_types='window, full', mlp='swiglu', n_inner=8, tied_head=False, n_expert=0, n_expert_used=2, expert_balance=1.0, dropout=0.1)
    assert flags.keys() == other.keys() == MODEL_FLAGS | {'dropout', 'expert_balance'}
    config = config_from_flags(flags, vocab_size=7)
    assert all(config_from_flags(flags | {name: value}, vocab_size=7) != config for name, value in other.items())
    for some in (flags, other):
        assert flags_from_config(config_from_flags(some, vocab_size=7)).items() <= some.items() | {('n_expert_used', 2), ('layer_types', 'window,full')}


NANOGPT_TRAIN = """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log wandb_project wandb_run_name
    dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2
    grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile""".split()
NANOGPT_SAMPLE = 'init_from out_dir start num_samples max_new_tokens temperature top_k seed device dtype compile'.split()


def test_all_flags_of_nanogpt_are_there():
    assert not set(NANOGPT_TRAIN) - config_block(ROOT / 'train_jax.py').keys()
    assert not set(NANOGPT_SAMPLE) - config_block(ROOT / 'sample_jax.py').keys()


@pytest.mark.parametrize('config', sorted(p.name for p in (ROOT / 'config').glob('*.py')))
def test_every_config_file_is_understood(config):
    script = 'train_jax.py'
    result = run(script, ROOT / 'config' / config, '--nosuchflag=1')  # the last thing to be read is what fails
    assert result.returncode == 2 and 'unknown flag --nosuchflag' in result.stderr


def test_nanogpts_configs_are_there_by_name():
    names = 'train_gpt2 train_shakespeare_char finetune_shakespeare eval_gpt2 eval_gpt2_medium eval_gpt2_large eval_gpt2_xl train_pystdlib_char'
    assert not set(names.split()) - {p.stem for p in (ROOT / 'config').glob('*.py')}


# -----------------------------------------------------------------------------
# a run and what it leaves


def test_log_lines_have_nanogpts_form(finished):
    out = finished[1].stdout
    steps = re.findall(r'^step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})$', out, flags=re.M)
    assert [int(s[0]) for s in steps] == [0, 10, 20]
    iters = re.findall(r'^iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d{2})ms, mfu (?:n/a|[\d.]+%), [\d,]+ tok/s, grad norm [\d.]+, eta \d+:\d\d:\d\d$', out, flags=re.M)
    assert [int(i[0]) for i in iters] == list(range(20))
    assert 'tokens per iteration will be: 128' in out and 'number of parameters: 0.00M' in out
    compile_s = float(re.search(r'compiled the training step in ([\d.]+) s', out)[1])
    assert float(iters[0][2]) / 1000 < compile_s  # compilation is not in `time`


def test_training_learns(finished):
    evals = [r for r in read_metrics(finished[0]) if 'val_loss' in r]
    assert evals[0]['val_loss'] > 3 and evals[-1]['val_loss'] < 2.9


def test_out_dir_holds_what_was_promised(finished):
    out = finished[0]
    assert sorted(p.name for p in out.iterdir()) == ['ckpt', 'config.json', 'loss.png', 'metrics.jsonl']
    config = json.loads((out / 'config.json').read_text())
    assert config['n_layer'] == 1 and config['dtype'] == 'float32' and config.keys() == config_block(ROOT / 'train_jax.py').keys()
    records = read_metrics(out)
    assert [r['iter'] for r in records if 'loss' in r] == list(range(20))
    assert {'iter', 'loss', 'lr', 'grad_norm', 'time_ms', 'tokens_per_sec', 'mfu'} == [r for r in records if 'loss' in r][0].keys()
    assert [r['iter'] for r in records if 'val_loss' in r] == [0, 10, 20]
    step, meta = load_meta(out)
    assert step == meta['iter_num'] == 20 and meta['best_val_loss'] == min(r['val_loss'] for r in records if 'val_loss' in r)
    assert {'jax', 'jaxlib', 'flax', 'python'} <= meta['versions'].keys() and meta['model']['n_embd'] == 16


def test_sampling_needs_nothing_but_out_dir(finished, tmp_path):
    shutil.copytree(finished[0] / 'ckpt', tmp_path / 'moved' / 'ckpt')
    result = sample(tmp_path / 'moved', '--num_samples=3', '--max_new_tokens=40', '--start=the quick')
    samples = result.stdout.split('\n---------------\n')
    assert result.returncode == 0, result.stderr
    assert len(samples) == 4 and samples.pop() == ''
    assert all(s.startswith('the quick') and len(s) == 49 and set(s) <= set(TEXT) for s in samples) and len(set(samples)) == 3
    assert sample(tmp_path / 'moved', '--num_samples=3', '--max_new_tokens=40', '--start=the quick').stdout == result.stdout


def test_prompts_come_from_files_too_and_temperature_0_is_greedy(finished, tmp_path):
    (tmp_path / 'prompt.txt').write_text('lazy dog')
    result = sample(finished[0], f'--start=FILE:{tmp_path}/prompt.txt', '--num_samples=2', '--max_new_tokens=9', '--temperature=0')
    first, second, _ = result.stdout.split('\n---------------\n')
    assert first == second and first.startswith('lazy dog') and len(first) == 17


def test_sampling_takes_the_best_or_the_latest(finished):
    iteration = lambda which: int(re.search(r'checkpoint of iteration (\d+)', sample(finished[0], '--max_new_tokens=1', f'--checkpoint={which}').stderr)[1])
    best = min((r for r in read_metrics(finished[0]) if r.get('val_loss') and r['iter']), key=lambda r: r['val_loss'])['iter']
    assert iteration('latest') == 20 and iteration('best') == best


def test_streamed_text_is_the_text(finished):
    flags = ['--num_samples=2', '--max_new_tokens=30', '--start=the fox']
    assert sample(finished[0], *flags, '--stream=True').stdout == sample(finished[0], *flags).stdout
    assert sample(finished[0], *flags, '--stream=True', '--stop=o').stdout == sample(finished[0], *flags, '--stop=o').stdout


def test_each_line_of_a_file_is_continued_as_if_alone(finished, tmp_path):
    (tmp_path / 'prompts.txt').write_text('the quick\nfox\n\na\n')
    flags = ['--num_samples=2', '--max_new_tokens=12']
    together = sample(finished[0], *flags, f'--start=FILE:{tmp_path}/prompts.txt', '--each_line=True').stdout
    assert together == ''.join(sample(finished[0], *flags, f'--start={prompt}').stdout for prompt in ('the quick', 'fox', 'a'))


def test_a_sample_ends_before_the_stop_text_and_the_prompt_may_hold_it(finished):
    flags = ['--num_samples=4', '--max_new_tokens=200', '--start=the fox']
    free, stopped = (sample(finished[0], *flags, *extra).stdout.split('\n---------------\n')[:-1] for extra in ([], ['--stop=o']))
    assert stopped == [text[:text.find('o', 7)] if text.find('o', 7) >= 0 else text for text in free] != free
    assert sample(finished[0], *flags, '--stop=never comes').stdout == sample(finished[0], *flags).stdout


def test_drafting_gives_the_same_samples_and_tells_how_many_guesses_were_right(finished):
    how = ['--num_samples=2', '--max_new_tokens=6', '--start=the the ']
    plain = sample(finished[0], *how)
    for more in ([], [f'--draft={finished[0]}']):
        drafted = sample(finished[0], *how, '--n_draft=3', *more)
        assert drafted.returncode == 0 and drafted.stdout == plain.stdout
        accepted, of, share = re.search(r'drafts: ([\d,]+) of ([\d,]+) tokens accepted, (\d+)%', drafted.stderr).groups()
        assert int(of) > 0 and int(share) == round(100 * int(accepted) / int(of)) and (not more or accepted == of)


def test_samples_come_from_int8_weights_and_caches_too(finished):
    plain, small = (sample(finished[0], '--num_samples=2', '--max_new_tokens=20', *more) for more in (
        [], ['--quantize=int8', '--cache_dtype=int8', '--dtype=float32']))
    assert small.returncode == 0 and len(small.stdout) == len(plain.stdout)
    megabytes = [float(re.search(r'weights ([\d.]+) MB', result.stderr)[1]) for result in (plain, small)]
    assert megabytes[1] < 0.5 * megabytes[0]
    assert re.search(r'[\d.]+ GB/s, which is \d+% of the [\d.]+ GB/s that this machine reads', small.stderr)


def test_the_prompt_loop_goes_on_from_the_text_so_far(finished, monkeypatch):
    flags = ['--interactive=True', '--max_new_tokens=5', '--temperature=0']
    monkeypatch.setattr('sys.stdin', io.StringIO('the\nfox\n/clear\nfox\nFox\n'))
    first, second, _, cleared, wrong, _ = sample(finished[0], *flags).stdout.split('> ')[1:]
    alone = lambda start: sample(finished[0], '--num_samples=1', '--max_new_tokens=5', '--temperature=0', f'--start={start}').stdout.split('\n-----')[0]
    assert 'the' + first == alone('the') + '\n'
    assert f'the{first}fox{second}' == alone(f'the{first}fox') + '\n'
    assert 'fox' + cleared == alone('fox') + '\n'
    assert wrong.startswith("error: the prompt has characters that the model does not know: 'F'")


# -----------------------------------------------------------------------------
# resume


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(finished, dataset, tmp_path):
    first = train(tmp_path, f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=7')
    assert first.returncode == 0, first.stderr
    second = train(tmp_path, '--init_from=resume', '--max_iters=20', '--device=cpu:0')  # everything else it remembers
    assert 'at iteration 7' in second.stdout, second.stderr
    assert [r for r in numbers(tmp_path) if r['iter'] != 7 or 'loss' in r] == numbers(finished[0])
    assert final_params(tmp_path) == final_params(finished[0])


def final_params(out_dir):
    """The bytes of the parameters and the optimizer's state of the latest checkpoint."""
    import orbax.checkpoint as ocp
    from jax_train_utils import open_checkpoints
    step, _ = load_meta(out_dir)
    with open_checkpoints(out_dir, read_only=True) as manager:
        restored = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(), opt_state=ocp.args.StandardRestore()))
    import jax
    return [(jax.tree_util.keystr(path), np.asarray(x).tobytes()) for path, x in jax.tree_util.tree_leaves_with_path((restored['params'], restored['opt_state']))]


def start(out_dir, *args):
    env = dict(os.environ, JAX_NUM_CPU_DEVICES='1')
    return subprocess.Popen([sys.executable, ROOT / 'train_jax.py', f'--out_dir={out_dir}', *map(str, args)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_iteration(out_dir, iteration, process):
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if any(r['iter'] >= iteration for r in read_metrics(out_dir)):
            return
        time.sleep(0.02)
    assert process.poll() is not None, 'the run does not get on'


def test_a_run_killed_at_random_moments_equals_an_uninterrupted_one(dataset, tmp_path):
    flags = [f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=60', '--lr_decay_iters=60', '--save_interval=7', '--dropout=0.2']
    assert train(tmp_path / 'whole', *flags).returncode == 0
    out, random_moment = tmp_path / 'killed', random.Random(0)
    for iteration in (9, 25, 44):
        resume = ['--init_from=resume'] if (out / 'ckpt').exists() and any(p.name.isdigit() for p in (out / 'ckpt').iterdir()) else ['--overwrite=True']
        process = start(out, *flags, *resume)
        wait_for_iteration(out, iteration, process)
        time.sleep(random_moment.random() * 0.1)
        process.kill()
        process.communicate()
    assert train(out, *flags, '--init_from=resume').returncode == 0
    assert numbers(out) == numbers(tmp_path / 'whole')
    assert final_params(out) == final_params(tmp_path / 'whole')


@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves(finished, dataset, tmp_path, signum):
    process = start(tmp_path, f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=100000', '--eval_interval=100000')
    wait_for_iteration(tmp_path, 3, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    saved = int(re.search(r'at iteration (\d+), saved', out)[1])
    assert process.returncode == 128 + signum and err == '' and load_meta(tmp_path)[0] == saved


def test_a_run_from_scratch_does_not_overwrite_another_by_mistake(finished, dataset, tmp_path):
    shutil.copytree(finished[0], tmp_path / 'out')
    flags = [f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=1']
    result = train(tmp_path / 'out', *flags)
    assert result.returncode == 2 and 'holds a run at iteration 20' in result.stderr and '--overwrite=True' in result.stderr
    assert numbers(tmp_path / 'out') == numbers(finished[0]) and load_meta(tmp_path / 'out')[0] == 20
    assert train(tmp_path / 'out', *flags, '--overwrite=True').returncode == 0
    assert load_meta(tmp_path / 'out')[0] == 1


def test_always_save_checkpoint_false_saves_only_what_is_better(dataset, tmp_path):
    flags = [f'--dataset={dataset}', *MODEL, *SHORT, '--always_save_checkpoint=False', '--learning_rate=0', '--min_lr=0', '--max_iters=40']
    process = train(tmp_path, *flags)
    assert process.returncode == 0
    # with a learning rate of 0 the first evaluation stays the best (10 is the first that saves, 40 the end)
    evals = [r['val_loss'] for r in read_metrics(tmp_path) if 'val_loss' in r]
    assert len(set(evals)) == 1 and sorted(int(p.name) for p in (tmp_path / 'ckpt').iterdir()) == [40]
    flags = [f'--dataset={dataset}', *MODEL, *SHORT, '--always_save_checkpoint=False', '--out_dir=' + str(tmp_path / 'better')]
    process = start(tmp_path / 'better', *flags, '--max_iters=100000', '--lr_decay_iters=100000', '--warmup_iters=100')
    wait_for_iteration(tmp_path / 'better', 25, process)
    process.kill()
    process.communicate()
    assert load_meta(tmp_path / 'better')[0] >= 10  # saved while it was getting better


def test_eval_only_writes_nothing(finished, dataset, tmp_path):
    result = train(tmp_path / 'new', f'--dataset={dataset}', *MODEL, *SHORT, '--eval_only=True')
    assert re.findall('^step 0: train loss', result.stdout, flags=re.M) and 'iter ' not in result.stdout.replace('per iter', '')
    assert not (tmp_path / 'new').exists()
    before = sorted((p, p.stat().st_mtime_ns) for p in finished[0].rglob('*'))
    result = train(finished[0], '--init_from=resume', '--eval_only=True', '--device=cpu:0')
    last = [r for r in read_metrics(finished[0]) if 'val_loss' in r][-1]
    assert f"step 20: train loss {last['train_loss']:.4f}, val loss {last['val_loss']:.4f}" in result.stdout
    assert sorted((p, p.stat().st_mtime_ns) for p in finished[0].rglob('*')) == before


def test_eight_devices_give_the_curve_of_one_through_the_script(finished, dataset, tmp_path):
    result = train(tmp_path, f'--dataset={dataset}', *MODEL, *SHORT, '--device=cpu')
    assert '8 x cpu' in result.stdout, result.stderr
    curve = lambda out: [r.get('loss') or r['val_loss'] for r in read_metrics(out)]
    np.testing.assert_allclose(curve(tmp_path), curve(finished[0]), atol=2e-4)
    # and what one layout saved another one takes up
    assert train(tmp_path, '--init_from=resume', '--max_iters=22', '--device=cpu:0').returncode == 0


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_low_precision_runs_and_resumes(dataset, tmp_path, dtype):
    flags = [f'--dataset={dataset}', *MODEL, *SHORT, f'--dtype={dtype}']
    assert train(tmp_path / 'a', *flags).returncode == 0
    assert train(tmp_path / 'b', *flags, '--max_iters=10').returncode == 0
    assert train(tmp_path / 'b', '--init_from=resume', '--max_iters=20', '--device=cpu:0').returncode == 0
    assert numbers(tmp_path / 'b') == numbers(tmp_path / 'a')
    assert numbers(tmp_path / 'a')[-1]['val_loss'] < 2.95
    assert sample(tmp_path / 'a', '--max_new_tokens=5').returncode == 0


def test_a_resume_may_change_the_dtype(finished, dataset, tmp_path):
    shutil.copytree(finished[0], tmp_path / 'out')
    for dtype, end in (('float16', 22), ('bfloat16', 24)):
        result = train(tmp_path / 'out', '--init_from=resume', f'--dtype={dtype}', f'--max_iters={end}', '--device=cpu:0')
        assert result.returncode == 0, result.stderr
        assert ('loss_scale' in [r for r in read_metrics(tmp_path / 'out') if 'loss' in r][-1]) == (dtype == 'float16')


@pytest.mark.parametrize('source', ['hf', 'nanogpt_no_bias'])
def test_finetuning_starts_from_foreign_weights_and_resumes(tmp_path, source):
    data = tmp_path / 'data'
    data.mkdir()
    ids = np.random.default_rng(0).integers(41, size=600).astype(np.uint16)
    ids.tofile(data / 'train.bin')
    ids[:100].tofile(data / 'val.bin')  # shorter than the default block_size, longer than the model's
    (data / 'meta.json').write_text(json.dumps({'vocab_size': 41, 'dtype': 'uint16', 'tokenizer': {'kind': 'char', 'chars': ''.join(map(chr, range(48, 89)))}}))
    model = ROOT / 'tests' / 'golden' / source
    flags = [f'--dataset={data}', f'--init_from={model}', '--gradient_accumulation_steps=1', '--batch_size=2', *SHORT, '--max_iters=3',
             '--learning_rate=1e-4', '--min_lr=1e-5']
    result = train(tmp_path / 'out', *flags)
    assert result.returncode == 0 and 'block_size 24' in result.stdout, result.stderr
    assert train(tmp_path / 'out', '--init_from=resume', '--max_iters=5', '--device=cpu:0').returncode == 0
    meta = load_meta(tmp_path / 'out')[1]
    assert meta['iter_num'] == 5 and meta['model']['block_size'] == 24 and meta['model']['activation'] == ('gelu_tanh' if source == 'hf' else 'gelu')
    assert sample(tmp_path / 'out', '--start=0', '--max_new_tokens=5', '--num_samples=1').returncode == 0
    refused(train(tmp_path / 'other', *flags, '--block_size=25'), 'block_size=25, but .* knows only 24 positions')


def test_foreign_weights_are_sampled_with_the_tokenizer_of_their_dataset(dataset, tmp_path):
    shutil.copy(dataset / 'meta.json', tmp_path)  # which is all it takes
    model = ROOT / 'tests' / 'golden' / 'nanogpt' / 'ckpt.pt'
    flags = [f'--init_from={model}', '--device=cpu:0', '--num_samples=1', '--max_new_tokens=30']
    text = run('sample_jax.py', *flags, f'--dataset={tmp_path}', '--start=fox').stdout
    assert text.startswith('fox') and len(text.split('\n-----')[0]) == 33 and set(text) <= set(TEXT) | {'-'}
    refused(run('sample_jax.py', *flags), 'name the data set')


def test_wandb_offline_needs_no_account_and_a_resumed_run_continues_it(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))
    monkeypatch.setenv('WANDB_SILENT', 'true')
    flags = ['--wandb_log=True', '--wandb_project=p', '--device=cpu:0']
    assert train(tmp_path / 'out', f'--dataset={dataset}', *MODEL, *SHORT, *flags, '--max_iters=2').returncode == 0
    first = load_meta(tmp_path / 'out')[1]['wandb_id']
    import wandb
    wandb.finish()
    assert train(tmp_path / 'out', '--init_from=resume', *flags, '--max_iters=4').returncode == 0
    wandb.finish()
    assert first and load_meta(tmp_path / 'out')[1]['wandb_id'] == first
    assert len(list((tmp_path / 'wandb').glob(f'offline-run-*-{first}'))) == 2


# -----------------------------------------------------------------------------
# mistakes: one line on stderr, exit code 2, nothing lost


def test_a_mistake_ends_in_one_line_and_exit_code_2_in_a_real_process(tmp_path):
    for script in ('train_jax.py', 'sample_jax.py'):
        result = subprocess.run([sys.executable, ROOT / script, '--sede=1'], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (2, 'error: unknown flag --sede; did you mean --seed?\n')


def refused(result, message):
    assert result.returncode == 2 and re.fullmatch(f'error: .*{message}.*\n', result.stderr), result.stderr


def bad_flags(dataset):
    return [
        (['--dataset=nosuchdata'], 'there is no .*data/nosuchdata/train.bin'),
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
        (['--seed=4294967296'], 'seed must be below'),
        (['--loss_chunk=5'], r'loss_chunk=5 does not divide block_size=16; it may be one of \[1, 2, 4, 8\]'),
        (['--attention=flash'], 'attention must be auto, xla, chunked, cudnn'),
        (['--attention=cudnn'], 'attention=cudnn does not work here: it is for NVIDIA GPUs'),
        (['--remat=all'], 'remat must be one of none, dots, full'),
        (['--optimizer=sgd'], 'optimizer must be one of adamw, muon'),
        (['--lr_schedule=step'], 'lr_schedule must be one of cosine'),
    ]


@pytest.mark.parametrize('case', range(20))
def test_a_flag_that_cannot_work_is_refused_before_anything_is_written(dataset, tmp_path, case):
    flags, message = bad_flags(dataset)[case]
    if case == 1 and (ROOT / 'data' / 'openwebtext' / 'train.bin').exists():
        pytest.skip('openwebtext has been prepared here')
    refused(train(tmp_path / 'out', f'--dataset={dataset}', *MODEL, *SHORT, *flags), message)
    assert not (tmp_path / 'out').exists()


def test_an_out_dir_that_cannot_be_is_refused(dataset, tmp_path):
    (tmp_path / 'file').touch()
    refused(train(tmp_path / 'file', f'--dataset={dataset}', *MODEL, *SHORT), 'cannot write to .*file')


def test_a_failing_start_does_not_overwrite_the_run_that_is_there(finished, dataset, tmp_path, monkeypatch):
    import wandb

    def no_login(**settings):
        raise RuntimeError('no API key')
    monkeypatch.setattr(wandb, 'init', no_login)
    shutil.copytree(finished[0], tmp_path / 'out')
    refused(train(tmp_path / 'out', f'--dataset={dataset}', *MODEL, *SHORT, '--overwrite=True', '--wandb_log=True'), 'wandb does not start')
    assert numbers(tmp_path / 'out') == numbers(finished[0]) and load_meta(tmp_path / 'out')[0] == 20


def test_other_tokens_are_not_resumed(finished, dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / 'data')
    meta = json.loads((dataset / 'meta.json').read_text())
    meta['tokenizer']['chars'] = meta['tokenizer']['chars'][::-1]
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps(meta))
    refused(train(finished[0], '--init_from=resume', f"--dataset={tmp_path / 'data'}", '--device=cpu:0'), 'was trained with other tokens')


def test_what_a_config_file_says_overrides_a_resumed_run_even_where_it_says_the_default(finished, tmp_path):
    (tmp_path / 'c.py').write_text('eval_interval = 2000\n')
    shutil.copytree(finished[0], tmp_path / 'out')
    assert train(tmp_path / 'out', tmp_path / 'c.py', '--init_from=resume', '--max_iters=21', '--device=cpu:0').returncode == 0
    assert json.loads((tmp_path / 'out' / 'config.json').read_text())['eval_interval'] == 2000


def test_another_architecture_is_not_resumed(finished):
    before = sorted((p, p.stat().st_mtime_ns) for p in finished[0].rglob('*'))
    refused(train(finished[0], '--init_from=resume', '--n_layer=3'), 'with n_layer=1, not n_layer=3')
    refused(train(finished[0], '--init_from=resume', ROOT / 'config' / 'train_shakespeare_char.py', f'--out_dir={finished[0]}'), 'cannot resume with another architecture')
    assert sorted((p, p.stat().st_mtime_ns) for p in finished[0].rglob('*')) == before


def test_resuming_or_sampling_nothing_is_refused(tmp_path):
    refused(train(tmp_path / 'none', '--init_from=resume'), 'no complete checkpoint in .*none/ckpt')
    refused(sample(tmp_path / 'none'), 'no complete checkpoint in .*none/ckpt')
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize('flags, message', [
    (['--quantize=int4'], "quantize must be int8 or '' .off., not 'int4'"), (['--cache_dtype=int4'], 'cache_dtype must be one of'),
    (['--n_draft=99'], 'n_draft must be between 0'), (['--draft=x'], 'add --n_draft=4'), (['--draft=nowhere', '--n_draft=2'], 'nowhere'),
    (['--start=Quick'], "does not know: 'Q'"), (['--start='], 'prompt is empty'), (['--start=FILE:nosuchfile.txt'], 'cannot read the prompt.*nosuchfile.txt'),
    (['--temperature=-1'], 'temperature must be'), (['--num_samples=0'], 'num_samples must be'), (['--top_k=-1'], 'top_k'),
    (['--max_new_tokens=-1'], 'max_new_tokens must be'), (['--checkpoint=worst'], 'latest or best')])
def test_a_sample_that_cannot_be_is_refused(finished, flags, message):
    refused(sample(finished[0], *flags), message)


def test_no_new_tokens_print_the_prompt(finished):
    assert sample(finished[0], '--max_new_tokens=0', '--start=fox', '--num_samples=1').stdout == 'fox\n---------------\n'


def test_a_damaged_checkpoint_is_refused(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / 'out')
    for path in (tmp_path / 'out' / 'ckpt' / '20' / 'params').rglob('*'):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[:100])
    refused(sample(tmp_path / 'out', '--checkpoint=latest'), 'damaged')


def test_token_ids_outside_the_vocabulary_are_refused(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / 'bad')
    np.full(500, 60, np.uint16).tofile(tmp_path / 'bad' / 'val.bin')
    refused(train(tmp_path / 'out', *MODEL, *SHORT, f"--dataset={tmp_path / 'bad'}"), 'val.bin has token id 60, outside the vocabulary')


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_good_checkpoint(dataset, tmp_path):
    result = train(tmp_path, f'--dataset={dataset}', *MODEL, *SHORT, '--decay_lr=False', '--learning_rate=1e30', '--grad_clip=0', '--save_interval=1')
    refused(result, 'stopping')
    steps = [int(p.name) for p in (tmp_path / 'ckpt').iterdir()]
    assert steps and max(steps) < 20 and sample(tmp_path, '--max_new_tokens=3', '--checkpoint=latest').returncode == 0


BENCH = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=32', '--vocab_size=40', '--batch_size=2', '--repeats=2', '--device=cpu:0']


def test_the_benchmark_ends_with_one_json_line():
    for mode, more in (('train', ['--gradient_accumulation_steps=2']), ('decode', ['--prompt_len=4', '--max_new_tokens=8'])):
        result = run('bench_jax.py', f'--mode={mode}', *BENCH, *more)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout.splitlines()[-1])
        assert report['settings']['n_embd'] == 16 and report['settings']['dtype'] == 'float32' and report['environment']['jax']
        figures = report['results']
        n_tokens = 2 * 2 * 32 if mode == 'train' else 2  # of one iteration
        assert figures['tokens_per_sec' if mode == 'train' else 'tokens_per_sec_decode'] == pytest.approx(n_tokens / figures['ms_per_iter'] * 1e3, rel=1e-3)
        assert figures['compile_s'] > 0
    assert figures['weights_mb'] * 1e6 == pytest.approx(4 * (40 * 16 + 12 * 16**2 + 13 * 16 + 2 * 16), rel=1e-3)
    assert figures['cache_mb'] * 1e6 == 2 * 4 * 2 * 16 * min(16 + 8, 32)
    refused(run('bench_jax.py', '--mode=sleep'), "mode must be train, decode or scaling, not 'sleep'")
    refused(run('bench_jax.py', '--mode=decode', *BENCH, '--max_new_tokens=100'), 'at most block_size=32')
    refused(run('bench_jax.py', '--mode=decode', *BENCH, '--max_new_tokens=1'), 'max_new_tokens must be at least 2')


def test_the_decoding_ablation_measures_every_choice_and_its_quality(finished, dataset):
    result = run('bench_jax.py', '--mode=decode', f'--out_dir={finished[0]}', f'--dataset={dataset}', '--prompt_len=4',
                 '--max_new_tokens=6', '--batch_size=2', '--repeats=1', '--ablate=True', '--device=cpu:0')
    assert result.returncode == 0, result.stderr
    table = json.loads(result.stdout.splitlines()[-1])['ablation']
    assert table.keys() == {'as it is', 'dtype=bfloat16', 'quantize=int8', 'cache_dtype=bfloat16', 'cache_dtype=int8', 'cache_dtype=float8',
                            'n_draft=4', 'batch_size=1', 'batch_size=8', 'quantize=int8, n_draft=4', 'no cache, batch_size=1', 'no jit'}
    plain, int8, low = table['as it is'], table['quantize=int8'], table['cache_dtype=float8']
    assert plain['agreement'] == 1 and min(int8['agreement'], low['agreement']) > 0.5
    assert plain['perplexity'] == pytest.approx(int8['perplexity'], rel=0.2) == pytest.approx(low['perplexity'], rel=0.2)
    assert plain['perplexity'] != int8['perplexity'] and int8['weights_mb'] < 0.6 * plain['weights_mb'] and low['cache_mb'] < plain['cache_mb']
    assert 0 <= table['n_draft=4']['accepted'] <= 1 and all(row['ms_per_iter'] > 0 for row in table.values())


def test_flags_without_an_effect_say_so_once(dataset, tmp_path):
    out = train(tmp_path, f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=1', '--compile=False').stdout
    assert out.count('--compile=False has no effect') == 1 and 'backend' not in out.split('\n')[0].split('--')[0]


# -----------------------------------------------------------------------------
# how it is computed is no part of a checkpoint


FAST = ['--scan_layers=True', '--remat=full', '--attention=chunked', '--loss_chunk=8']


def test_a_run_goes_on_with_muon_bit_for_bit_and_with_other_ways_to_compute(dataset, tmp_path):
    flags = [f'--dataset={dataset}', *MODEL, *SHORT, '--n_layer=2', '--optimizer=muon', '--lr_schedule=wsd']
    assert train(tmp_path / 'whole', *flags).returncode == 0
    assert train(tmp_path / 'parts', *flags, '--max_iters=10').returncode == 0
    shutil.copytree(tmp_path / 'parts', tmp_path / 'other')
    resume = ['--init_from=resume', '--max_iters=20', '--device=cpu:0']  # on other devices it would be equal up to rounding
    assert train(tmp_path / 'parts', *resume).returncode == 0
    assert numbers(tmp_path / 'parts') == numbers(tmp_path / 'whole')
    result = train(tmp_path / 'other', *resume, '--dropout=0.0', *FAST)
    assert result.returncode == 0, result.stderr
    assert 'attention: chunked (as asked)' in result.stdout
    assert 'attention' not in load_meta(tmp_path / 'other')[1]['model']
    assert sample(tmp_path / 'other', '--max_new_tokens=20').returncode == 0
    refused(train(tmp_path / 'parts', '--init_from=resume', '--optimizer=adamw'), 'cannot resume with another optimizer')


def test_the_loop_reads_an_iteration_only_when_the_next_is_on_its_way(dataset, tmp_path, monkeypatch):
    import jax

    import jax_train_utils
    events, compile_step, get = [], jax_train_utils.DataParallel.train_step, jax.device_get

    def recording(self, step):
        compiled = compile_step(self, step)
        return lambda *args: (events.append('start'), compiled(*args))[1]

    monkeypatch.setattr(jax_train_utils.DataParallel, 'train_step', recording)
    monkeypatch.setattr(jax, 'device_get', lambda tree: (events.append('read'), get(tree))[1])
    result = train(tmp_path / 'out', f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=6', '--eval_interval=100')
    assert result.returncode == 0, result.stderr
    assert events == ['start', 'start', 'read', 'start', 'read', 'start', 'read', 'start', 'read', 'start', 'read', 'read']


def test_the_benchmark_takes_presets_and_changes_one_choice_at_a_time():
    result = run('bench_jax.py', '--preset=baby', *BENCH, '--repeats=1', '--ablate=True')
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report['settings']['dropout'] == 0.2 and report['settings']['n_embd'] == 16  # the preset's, and the flag's
    assert set(report['ablation']) == {'as it is', 'attention=chunked', 'scan_layers=True', 'remat=dots', 'remat=full',
                                       'loss_chunk=4', 'dtype=bfloat16', "JAX's matmul gradients"}
    assert all(r['ms_per_iter'] > 0 and r['temporary_gb'] > 0 for r in report['ablation'].values())
    refused(run('bench_jax.py', '--preset=huge'), "preset must be one of nanogpt_cpu, baby, gpt2, not 'huge'")


# -----------------------------------------------------------------------------
# newer models

FAMILIES = ROOT / 'tests' / 'golden' / 'families'
QWEN = ['--norm=rms', '--position=rope', '--n_kv_head=1', '--qk_norm=learned', '--mlp=swiglu', '--n_inner=24', '--tied_head=False', '--bias=False',
        '--n_expert=4', '--n_expert_used=2']


@pytest.fixture(scope='module')
def qwen(tmp_path_factory, dataset):
    """A small Qwen3-MoE that was trained for 20 iterations."""
    out = tmp_path_factory.mktemp('qwen') / 'out'
    result = train(out, f'--dataset={dataset}', *MODEL, *SHORT, *QWEN)
    assert result.returncode == 0, result.stderr
    return out


def test_a_model_with_experts_trains_resumes_and_samples(qwen, tmp_path):
    losses = [r['val_loss'] for r in read_metrics(qwen) if 'val_loss' in r]
    assert losses[-1] < losses[0] - 0.3
    shutil.copytree(qwen, tmp_path / 'out')
    resumed = train(tmp_path / 'out', '--init_from=resume', '--max_iters=21', '--device=cpu:0')
    assert resumed.returncode == 0 and load_meta(tmp_path / 'out')[0] == 21, resumed.stderr
    refused(train(tmp_path / 'out', '--init_from=resume', '--n_expert=2', '--device=cpu:0'), 'with n_expert=4, not n_expert=2')
    sampled = sample(qwen, '--num_samples=2', '--max_new_tokens=12', '--start=the ')
    # one of two heads of 8, keys and values, float32: 64 bytes a token
    assert sampled.returncode == 0 and 'KV cache: 1,024 bytes for a sequence of 16 tokens, 64 per token' in sampled.stderr, sampled.stderr


def test_what_was_trained_here_is_sampled_there(qwen, dataset, tmp_path):
    config, params, _ = load_run(qwen)
    save_pretrained(params, config, tmp_path / 'model')
    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=the ', f'--dataset={dataset}']
    ours, again = sample(qwen, *flags), sample('none', f"--init_from={tmp_path / 'model'}", *flags)
    assert ours.returncode == again.returncode == 0 and ours.stdout == again.stdout


def test_a_checkpoint_of_any_family_is_trained_further(dataset, tmp_path):
    short = ['--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=1', *SHORT, '--max_iters=2', '--dropout=0.0']
    result = train(tmp_path / 'out', f'--dataset={dataset}', f"--init_from={FAMILIES / 'deepseek_v3_packed'}", *short)
    assert result.returncode == 0, result.stderr
    config, params, _ = load_run(tmp_path / 'out', 'latest')
    before = load_pretrained(FAMILIES / 'deepseek_v3_packed')[1]
    assert config.mla and config.moe.n_group == 4 and config.block_size == 16
    change = np.abs(params['h_1']['mlp']['experts_c_fc']['kernel'] - before['h_1']['mlp']['experts_c_fc']['kernel']).max()
    assert 0 < change < 0.1


@pytest.fixture
def speaking(tmp_path):
    """A Llama with a tokenizer of letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    folder = Path(shutil.copytree(FAMILIES / 'llama', tmp_path / 'llama'))
    vocab = {c: i for i, c in enumerate('abcdefghijklmnopqrstuvwxyz ,.!?:ABCD')}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t) for t in ('<s>', '</s>', '<user>', '<model>')])
    tokenizer.post_processor = processors.TemplateProcessing('<s> $0', special_tokens=[('<s>', tokenizer.token_to_id('<s>'))])
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'bos_token': {'content': '<s>'}, 'eos_token': '</s>', 'chat_template': (
        '{{ bos_token }}{% for m in messages %}{% if m.role == "user" %}<user>{% else %}<model>{% endif %}{{ m.content }}{% endfor %}'
        '{% if messages|length > 3 %}{{ raise_exception("too long") }}{% endif %}{% if add_generation_prompt %}<model>{% endif %}')}))
    (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [tokenizer.token_to_id('</s>')]}))
    return folder


def test_a_folder_with_a_tokenizer_speaks_text(speaking):
    tokenizer = FolderTokenizer(speaking)
    assert tokenizer.encode('<s>ab') == [36, 36, 0, 1] and tokenizer.decode([36, 0, 1, 37]) == 'ab' and tokenizer.stop_tokens == (37,)
    result = sample('none', f'--init_from={speaking}', '--start=ab c', '--num_samples=2', '--max_new_tokens=12', '--temperature=1.5')
    assert result.returncode == 0 and result.stdout.startswith('ab c') and len(set(result.stdout.split('\n---------------\n'))) == 3, result.stderr
    (speaking / 'tokenizer.json').write_text('{')
    refused(sample('none', f'--init_from={speaking}'), 'tokenizer.json')
    (speaking / 'tokenizer.json').unlink()
    refused(sample('none', f'--init_from={speaking}'), 'vocabulary of 44.*tokenizer.json')


def test_a_chat_is_written_as_the_folders_template_says(speaking, monkeypatch):
    tokenizer = FolderTokenizer(speaking)
    chat = [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'c'}, {'role': 'user', 'content': 'd'}]
    assert tokenizer.encode_chat(chat) == [36, 38, 0, 1, 39, 2, 38, 3, 39]
    monkeypatch.setattr('sys.stdin', io.StringIO('ab\nd\nno\n/clear\nab\n'))
    flags = ['--interactive=True', '--max_new_tokens=3', '--temperature=0', f'--init_from={speaking}']
    answers = sample('none', *flags).stdout.replace('> ', '').splitlines()
    assert len(answers) == 5 and 'ab' not in answers[0] and answers[0] == answers[3] and "template refuses: too long" in answers[2]
