"""What a user sees of train_jax.py, sample_jax.py and bench_jax.py: the scripts run unchanged, on small data and small
models."""
import ast
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_generate
import jax_train_utils
from jax_flags import config_block
from jax_generate import GenerationResult
from jax_pretrained import load_pretrained, save_pretrained
from jax_train_utils import (
    MODEL_FLAGS, HFTokenizer, checkpoint_steps, choose_checkpoint, config_from_flags, find_damage, flags_from_config,
    load_run, read_metrics)
from tests.common import (
    CHAT_TEMPLATE, FAMILIES, GOLDEN, RESUME, ROOT, TEXT, assert_refused, assert_same_run, copy_folder, edit_json,
    final_state, next_line, output_of, records_without_times, refusal, run_script, sample, start_training,
    succeeded, train, wait_for_iteration, write_dataset)

MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
         '--gradient_accumulation_steps=2']
SHORT = ['--max_iters=20', '--eval_interval=10', '--eval_iters=2', '--warmup_iters=2', '--lr_decay_iters=20',
         '--learning_rate=1e-2', '--dropout=0.1', '--device=cpu:0']
END = '\n---------------\n'  # after each sample


@pytest.fixture(scope='module')
def flags(dataset):
    """Those of a short training run."""
    return [f'--dataset={dataset}', *MODEL, *SHORT]


@pytest.fixture(scope='module')
def finished(tmp_path_factory, flags):
    """(the out_dir of a run of 20 iterations, what it printed)."""
    out = tmp_path_factory.mktemp('finished') / 'out'
    return out, succeeded(train(out, *flags)).stdout


@pytest.fixture
def run_copy(finished, tmp_path):
    """A copy of the finished run, to be changed."""
    return copy_folder(finished[0], tmp_path)


def files_and_times(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob('*'))


def records_with(out_dir, name):
    """The records of metrics.jsonl that have this key."""
    return [record for record in read_metrics(out_dir) if name in record]


def saved_iterations(out_dir):
    return sorted(int(path.name) for path in (out_dir / 'ckpt').iterdir() if path.name.isdigit())


def samples_of(result):
    *samples, end = succeeded(result).stdout.split(END)
    assert end == ''
    return samples


def report_of(result):
    """The JSON line with which bench_jax.py ends."""
    return json.loads(succeeded(result).stdout.splitlines()[-1])


# -----------------------------------------------------------------------------
# flags


@pytest.mark.parametrize('script', ['train_jax.py', 'sample_jax.py', 'bench_jax.py'])
def test_every_knob_is_live(script):
    tree = ast.parse((ROOT / script).read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= set(re.findall(r"\bflags\['(\w+)'\]", ast.unparse(tree)))
    if 'resolve_flags' in used:  # says that these have no effect
        used |= {'compile', 'backend'}
    if 'config_from_flags' in used:  # reads the model's flags, see the next test
        used |= {*MODEL_FLAGS, 'dropout', 'expert_balance'}
    knobs = config_block(ROOT / script)
    assert len(knobs) > 10
    assert not knobs.keys() - used


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
                          timeout=100)
    assert done.returncode == code, done.stderr
    assert re.match(out.format(script=script), done.stdout, re.S)
    assert re.match(f'{err}.*\n' if err else '$', done.stderr)


@pytest.mark.parametrize('script, arg, message', [
    ('train_jax.py', '--batch_size=0', 'batch_size must be at least 1'),
    ('sample_jax.py', '--top_p=2', 'top_p must be in'),
    ('export_jax.py', '--shard_gb=1.0', 'name the new folder'),
    ('bench_jax.py', '--mode=fly', 'mode must be train')])
def test_a_value_out_of_range_is_refused_without_jax(script, arg, message):
    done = subprocess.run([sys.executable, '-c', NO_JAX, script, arg], cwd=ROOT, capture_output=True, text=True,
                          timeout=100)
    assert_refused(done, message)


def test_every_flag_of_the_model_changes_the_model():
    flags = dict(
        n_layer=2, n_head=2, n_embd=16, block_size=16, bias=True, norm='layer', position='learned', n_kv_head=0,
        qk_norm='', window=4, layer_types='full', mlp='gelu', n_inner=0, tied_head=True, n_expert=2, n_expert_used=1,
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
         qk_norm='', window=4, layer_types='full', mlp='gelu', n_inner=0, tied_head=True, n_expert=2, n_expert_used=1,
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
    steps = re.findall(r'^step (\d+): train loss \d+\.\d{4}, val loss \d+\.\d{4}$', out, flags=re.M)
    assert steps == ['0', '10', '20']
    iters = re.findall(r'^iter (\d+): loss \d+\.\d{4}, time (\d+\.\d{2})ms, mfu (?:n/a|[\d.]+%), [\d,]+ tok/s, '
                       r'grad norm [\d.]+, eta \d+:\d\d:\d\d$', out, flags=re.M)
    assert [int(i) for i, _ in iters] == list(range(20))
    assert 'tokens per iteration will be: 128' in out
    assert 'number of parameters: 0.00M' in out
    compile_s = float(re.search(r'compiled the training step in ([\d.]+) s', out)[1])
    _, first_ms = iters[0]
    assert float(first_ms) / 1000 < compile_s  # `time` does not include the compilation
    started = re.findall(r'^first iteration: imports ([\d.]+) s, compiling ([\d.]+) s, running [\d.]+ s$', out, re.M)
    assert len(started) == 1
    ms = sorted(float(time_ms) for _, time_ms in iters)
    assert ms[0] > ms[len(ms) // 2] / 10  # also of the iteration before an evaluation, which ends the timed interval
    assert float(started[0][1]) >= compile_s - 0.1  # the evaluation is compiled in addition


def test_training_learns(finished):
    first, *_, last = records_with(finished[0], 'val_loss')
    assert first['val_loss'] > 3
    assert last['val_loss'] < 2.9


def test_out_dir_holds_what_was_promised(finished):
    out, _ = finished
    assert sorted(path.name for path in out.iterdir()) == [
        'ckpt', 'config.json', 'lock', 'loss.png', 'metrics.jsonl']
    flags = json.loads((out / 'config.json').read_text())
    assert flags.keys() == config_block(ROOT / 'train_jax.py').keys()
    assert flags['n_layer'] == 1
    assert flags['dtype'] == 'float32'
    iterations, evaluations = records_with(out, 'loss'), records_with(out, 'val_loss')
    assert [record['iter'] for record in iterations] == list(range(20))
    assert [record['iter'] for record in evaluations] == [0, 10, 20]
    assert iterations[0].keys() == {'iter', 'loss', 'lr', 'grad_norm', 'time_ms', 'tokens_per_sec', 'mfu'}
    step, meta = choose_checkpoint(out)
    assert step == 20
    assert meta['iter_num'] == 20
    assert meta['best_val_loss'] == min(record['val_loss'] for record in evaluations)
    assert meta['model']['n_embd'] == 16
    assert {'jax', 'jaxlib', 'flax', 'python'} <= meta['versions'].keys()


# -----------------------------------------------------------------------------
# sampling


def test_sampling_needs_nothing_but_out_dir(finished, tmp_path):
    shutil.copytree(finished[0] / 'ckpt', tmp_path / 'moved' / 'ckpt')
    arguments = [tmp_path / 'moved', '--num_samples=3', '--max_new_tokens=40', '--start=the quick']
    samples = samples_of(sample(*arguments))
    assert len(samples) == 3
    assert len(set(samples)) == 3
    for text in samples:
        assert text.startswith('the quick')
        assert len(text) == 49
        assert set(text) <= set(TEXT)
    assert samples_of(sample(*arguments)) == samples


def test_prompts_come_from_files_too_and_temperature_0_is_greedy(finished, tmp_path):
    (tmp_path / 'prompt.txt').write_text('lazy dog')
    result = sample(finished[0], f'--start=FILE:{tmp_path}/prompt.txt', '--max_new_tokens=9', '--temperature=0')
    text, = samples_of(result)
    assert 'at temperature=0 the 10 samples of a prompt are equal: one is made\n' in result.stderr
    assert text.startswith('lazy dog')
    assert len(text) == 17


def test_sampling_takes_the_best_or_the_latest(finished):
    out, _ = finished

    def iteration(which):
        err = sample(out, '--max_new_tokens=1', f'--checkpoint={which}').stderr
        return int(re.search(r'checkpoint of iteration (\d+)', err)[1])

    evaluations = [record for record in records_with(out, 'val_loss') if record['iter'] > 0]
    assert iteration('latest') == 20
    assert iteration('best') == min(evaluations, key=lambda record: record['val_loss'])['iter']


def test_sampling_says_that_a_later_checkpoint_than_the_best_exists(run_copy):
    best = re.search(r'checkpoint of iteration (\d+)', sample(run_copy, '--max_new_tokens=1').stderr)[1]
    worse = ['--max_iters=22', '--learning_rate=10.0', '--warmup_iters=0', '--decay_lr=False']
    succeeded(train(run_copy, *RESUME, *worse))
    line = f'taking the best checkpoint, iteration {best}; a later one, 22, is there: --checkpoint=latest\n'
    assert line in sample(run_copy, '--max_new_tokens=1').stderr
    assert 'a later one' not in sample(run_copy, '--max_new_tokens=1', '--checkpoint=latest').stderr


@pytest.mark.parametrize('stop', [[], ['--stop=o']])
def test_streamed_text_is_the_text(finished, stop):
    arguments = [finished[0], '--num_samples=2', '--max_new_tokens=30', '--start=the fox', *stop]
    assert samples_of(sample(*arguments, '--stream=True')) == samples_of(sample(*arguments))


def test_streaming_shows_nothing_of_a_stop_text_that_is_longer_than_the_text_so_far(finished):
    arguments = [finished[0], '--num_samples=1', '--max_new_tokens=30', '--start=a', '--temperature=0']
    text, = samples_of(sample(*arguments))
    arguments.append(f'--stop={text[1:20]}')
    assert samples_of(sample(*arguments, '--stream=True')) == samples_of(sample(*arguments)) == ['a']


def test_each_line_of_a_file_is_continued_as_if_alone(finished, tmp_path):
    (tmp_path / 'prompts.txt').write_text('the quick\nfox\n\na\n')
    arguments = [finished[0], '--num_samples=2', '--max_new_tokens=12']
    together = samples_of(sample(*arguments, f'--start=FILE:{tmp_path}/prompts.txt', '--each_line=True'))
    alone = [samples_of(sample(*arguments, f'--start={prompt}')) for prompt in ('the quick', 'fox', 'a')]
    assert together == sum(alone, [])


def test_a_sample_ends_before_the_stop_text_and_the_prompt_may_hold_it(finished):
    arguments = [finished[0], '--num_samples=4', '--max_new_tokens=200', '--start=the fox']
    free = samples_of(sample(*arguments))
    stopped = samples_of(sample(*arguments, '--stop=o'))
    ends = [text.find('o', len('the fox')) for text in free]
    assert stopped == [text if end < 0 else text[:end] for text, end in zip(free, ends)]
    assert stopped != free
    assert samples_of(sample(*arguments, '--stop=never comes')) == free


@pytest.mark.parametrize('draft_model', [False, True])
def test_drafting_gives_the_same_samples_and_tells_how_many_guesses_were_right(finished, draft_model):
    out, _ = finished
    arguments = [out, '--num_samples=2', '--max_new_tokens=6', '--start=the the ']
    draft = [f'--draft={out}'] if draft_model else []
    drafted = sample(*arguments, '--n_draft=3', *draft)
    assert samples_of(drafted) == samples_of(sample(*arguments))
    found = re.search(r'drafts: ([\d,]+) of ([\d,]+) tokens accepted, (\d+)%', drafted.stderr)
    n_accepted, n_drafted, percent = map(int, found.groups())
    assert n_drafted > 0
    assert percent == round(100 * n_accepted / n_drafted)
    if draft_model:  # here it is the model itself
        assert n_accepted == n_drafted


def test_samples_come_from_int8_weights_and_caches_too(finished):
    arguments = [finished[0], '--num_samples=2', '--max_new_tokens=20']
    plain = sample(*arguments)
    small = sample(*arguments, '--quantize=int8', '--cache_dtype=int8', '--dtype=float32')
    assert [len(text) for text in samples_of(small)] == [len(text) for text in samples_of(plain)]
    plain_mb, small_mb = (float(re.search(r'weights ([\d.]+) MB', result.stderr)[1]) for result in (plain, small))
    assert small_mb < 0.5 * plain_mb
    assert re.search(r'[\d.]+ GB/s, which is \d+% of the [\d.]+ GB/s that this machine reads', small.stderr)


def test_the_prompt_loop_continues_the_text_so_far(finished, monkeypatch):
    arguments = [finished[0], '--max_new_tokens=3', '--temperature=0']
    monkeypatch.setattr('sys.stdin', io.StringIO('the\nfox\n/clear\nfox\nFox\n'))
    answers = succeeded(sample(*arguments, '--interactive=True')).stdout.split('> ')[1:]
    first, second, _, cleared, wrong, _ = answers

    def answer_to(prompt):
        text, = samples_of(sample(*arguments, '--num_samples=1', f'--start={prompt}'))
        return text.removeprefix(prompt)

    cut = '\n(cut at max_new_tokens=3)\n'
    assert first == answer_to('the') + cut
    text_so_far = 'the' + answer_to('the') + '\nfox'
    assert second == answer_to(text_so_far) + cut
    assert cleared == answer_to('fox') + cut
    assert wrong.startswith("error: the prompt has characters that the model does not know: 'F'")


def test_no_new_tokens_print_the_prompt(finished):
    assert samples_of(sample(finished[0], '--max_new_tokens=0', '--start=fox', '--num_samples=1')) == ['fox']


# -----------------------------------------------------------------------------
# resume


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(finished, flags, tmp_path):
    succeeded(train(tmp_path, *flags, '--max_iters=7'))
    resumed = succeeded(train(tmp_path, *RESUME, '--max_iters=20'))  # all other flags are in the checkpoint
    assert 'at iteration 7' in resumed.stdout
    evaluation_at_7 = lambda record: record['iter'] == 7 and 'val_loss' in record  # at the end of the first part
    records = records_without_times(tmp_path)
    assert len([record for record in records if evaluation_at_7(record)]) == 1
    assert [record for record in records if not evaluation_at_7(record)] == records_without_times(finished[0])
    assert final_state(tmp_path) == final_state(finished[0])


def test_a_run_killed_at_random_moments_equals_an_uninterrupted_one(flags, tmp_path):
    flags = [*flags, '--max_iters=60', '--lr_decay_iters=60', '--save_interval=7', '--dropout=0.2']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    succeeded(train(whole, *flags))
    rng = random.Random(0)
    for iteration in (9, 44):
        has_checkpoint = (killed / 'ckpt').exists() and saved_iterations(killed)
        start_or_resume = '--init_from=resume' if has_checkpoint else '--overwrite=True'
        process = start_training(killed, *flags, start_or_resume)
        wait_for_iteration(killed, iteration, process)
        time.sleep(rng.random() * 0.1)
        process.kill()
        output_of(process)
    succeeded(train(killed, *flags, '--init_from=resume'))
    assert_same_run(killed, whole)


def test_the_same_command_starts_a_run_and_resumes_it(finished, flags, tmp_path):
    (tmp_path / 'ckpt').mkdir()  # left by a run that was killed before its first save: nothing to resume
    command = [*flags, '--init_from=auto']
    assert 'a new model from scratch' in succeeded(train(tmp_path, *command, '--max_iters=10')).stdout
    assert 'at iteration 10' in succeeded(train(tmp_path, *command, '--max_iters=20')).stdout
    assert final_state(tmp_path) == final_state(finished[0])


def test_a_damaged_latest_checkpoint_stays_and_the_run_continues_from_the_one_before_it(finished, run_copy):
    damaged = run_copy / 'ckpt' / '20' / 'opt_state' / '_METADATA'
    damaged.write_bytes(damaged.read_bytes()[:100])
    result = succeeded(train(run_copy, *RESUME))
    assert result.stderr.count('\n') == 1
    assert 'ckpt/20 is damaged' in result.stderr and 'taking checkpoint 10 instead' in result.stderr
    assert (run_copy / 'ckpt' / '20.damaged' / 'opt_state' / '_METADATA').stat().st_size == 100
    assert_same_run(run_copy, finished[0])


def test_without_an_intact_checkpoint_training_and_sampling_end_in_one_line(run_copy):
    for path in run_copy.glob('ckpt/*/*/*'):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    for result in (train(run_copy, *RESUME), train(run_copy, '--init_from=auto', '--device=cpu:0'), sample(run_copy)):
        assert_refused(result, 'ckpt/20 is damaged .*there is no intact one')


def test_a_signal_during_an_evaluation_is_obeyed_at_once(run_copy):
    before = records_without_times(run_copy)
    process = start_training(run_copy, *RESUME, '--max_iters=40', '--eval_iters=1000000')  # would take minutes
    next_line(process.stdout, process, 'tokens per iteration')
    time.sleep(4)
    process.send_signal(signal.SIGTERM)
    started = time.time()
    out, err = output_of(process, seconds=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert time.time() - started < 30
    assert 'step 20' not in out
    assert records_without_times(run_copy) == before


@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits(flags, tmp_path, signum):
    process = start_training(tmp_path, *flags, '--max_iters=100000', '--eval_interval=100000')
    wait_for_iteration(tmp_path, 3, process)
    process.send_signal(signum)
    out, err = output_of(process, seconds=60)
    name = 'Ctrl-C' if signum == signal.SIGINT else 'SIGTERM'
    assert process.returncode == 128 + signum
    assert err == f'stopping after this iteration, then saving; {name} again ends at once, without saving\n'
    iteration = int(re.search(rf'^stopped by {name} at iteration (\d+), saved', out, re.M)[1])
    assert choose_checkpoint(tmp_path)[0] == iteration
    assert (tmp_path / 'loss.png').stat().st_mtime_ns > (tmp_path / 'metrics.jsonl').stat().st_mtime_ns


def test_signals_during_a_slow_save_neither_spoil_it_nor_are_lost(flags, tmp_path, monkeypatch):
    write = jax_train_utils.write_checksums

    def write_slowly(folder):  # Orbax calls it in a thread of its own, the save's last step but one
        if not checkpoint_steps(tmp_path):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
        write(folder)
    monkeypatch.setattr(jax_train_utils, 'write_checksums', write_slowly)
    result = train(tmp_path, *flags, '--max_iters=100000', '--eval_interval=100000', '--save_interval=3',
                   '--keep=100')
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    steps = checkpoint_steps(tmp_path)
    assert f'at iteration {steps[0]}, saved' in result.stdout
    assert steps[-1] == 3 and not any(find_damage(tmp_path / 'ckpt' / str(step)) for step in steps)


def test_a_run_from_scratch_does_not_overwrite_another_by_mistake(finished, run_copy, flags):
    flags = [*flags, '--max_iters=1']
    assert_refused(train(run_copy, *flags), 'holds a run at iteration 20.*--overwrite=True')
    assert records_without_times(run_copy) == records_without_times(finished[0])
    assert choose_checkpoint(run_copy)[0] == 20
    succeeded(train(run_copy, *flags, '--overwrite=True'))
    assert choose_checkpoint(run_copy)[0] == 1


def test_always_save_checkpoint_false_saves_only_what_is_better(flags, tmp_path):
    # with a learning rate of 0 nothing improves: saved is the first evaluation that may be, and the end
    constant, better = tmp_path / 'constant', tmp_path / 'better'
    flags = [*flags, '--always_save_checkpoint=False']
    succeeded(train(constant, *flags, '--learning_rate=0', '--min_lr=0', '--max_iters=40'))
    assert len({record['val_loss'] for record in records_with(constant, 'val_loss')}) == 1
    assert saved_iterations(constant) == [40]
    process = start_training(better, *flags, '--max_iters=100000', '--lr_decay_iters=100000', '--warmup_iters=100')
    wait_for_iteration(better, 25, process)
    process.kill()
    output_of(process)
    assert choose_checkpoint(better)[0] >= 10  # saved while the validation loss was falling


def test_eval_only_writes_nothing(finished, flags, tmp_path):
    result = succeeded(train(tmp_path / 'new', *flags, '--eval_only=True'))
    assert re.search('^step 0: train loss', result.stdout, flags=re.M)
    assert not re.search('^iter ', result.stdout, flags=re.M)
    assert not (tmp_path / 'new').exists()
    out, _ = finished
    before = files_and_times(out)
    result = succeeded(train(out, *RESUME, '--eval_only=True'))
    last = records_with(out, 'val_loss')[-1]
    assert f"step 20: train loss {last['train_loss']:.4f}, val loss {last['val_loss']:.4f}" in result.stdout
    assert files_and_times(out) == before


def test_eight_devices_give_the_curve_of_one_through_the_script(finished, flags, tmp_path):
    def curve(out_dir):
        return [record.get('loss') or record['val_loss'] for record in read_metrics(out_dir)]

    result = succeeded(train(tmp_path, *flags, '--device=cpu'))
    assert '8 x cpu' in result.stdout
    np.testing.assert_allclose(curve(tmp_path), curve(finished[0]), atol=2e-4)
    succeeded(train(tmp_path, *RESUME, '--max_iters=22'))  # one device resumes what eight have saved


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_low_precision_runs_and_resumes(flags, tmp_path, dtype):
    flags = [*flags, f'--dtype={dtype}']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    succeeded(train(whole, *flags))
    succeeded(train(parts, *flags, '--max_iters=10'))
    succeeded(train(parts, *RESUME, '--max_iters=20'))
    assert records_without_times(parts) == records_without_times(whole)
    assert read_metrics(whole)[-1]['val_loss'] < 2.95
    succeeded(sample(whole, '--max_new_tokens=5'))


def test_the_dtype_auto_is_chosen_by_each_machine(finished, run_copy, monkeypatch):
    assert choose_checkpoint(finished[0])[1]['flags']['dtype'] == 'auto'  # a resumed run takes its flags from here
    monkeypatch.setattr(jax_train_utils, 'default_dtype', lambda device: ('bfloat16', 'another machine'))
    resumed = succeeded(train(run_copy, *RESUME, '--max_iters=21'))
    assert 'has computed in float32 so far, and continues in bfloat16' in resumed.stdout


def test_a_resume_may_change_the_dtype(run_copy):
    for dtype, end in (('float16', 22), ('bfloat16', 24)):
        succeeded(train(run_copy, *RESUME, f'--dtype={dtype}', f'--max_iters={end}'))
        last = records_with(run_copy, 'loss')[-1]
        assert ('loss_scale' in last) == (dtype == 'float16')


@pytest.mark.parametrize('source, activation', [('hf', 'gelu_tanh'), ('nanogpt_no_bias', 'gelu')])
def test_finetuning_starts_from_foreign_weights_and_resumes(tmp_path, source, activation):
    data, out = tmp_path / 'data', tmp_path / 'out'
    data.mkdir()
    ids = np.random.default_rng(0).integers(41, size=600).astype(np.uint16)
    ids.tofile(data / 'train.bin')
    ids[:100].tofile(data / 'val.bin')  # shorter than the default block_size, longer than the model's
    tokenizer = {'kind': 'char', 'chars': ''.join(map(chr, range(48, 89)))}
    meta = {'vocab_size': 41, 'dtype': 'uint16', 'tokenizer': tokenizer}
    (data / 'meta.json').write_text(json.dumps(meta))
    flags = [f'--dataset={data}', f'--init_from={GOLDEN / source}', '--gradient_accumulation_steps=1',
             '--batch_size=2', *SHORT, '--max_iters=3', '--learning_rate=1e-4', '--min_lr=1e-5']
    assert 'block_size 24' in succeeded(train(out, *flags)).stdout
    succeeded(train(out, *RESUME, '--max_iters=5'))
    _, meta = choose_checkpoint(out)
    assert meta['iter_num'] == 5
    assert meta['model']['block_size'] == 24
    assert meta['model']['activation'] == activation
    succeeded(sample(out, '--start=0', '--max_new_tokens=5', '--num_samples=1'))
    too_long = train(tmp_path / 'other', *flags, '--block_size=25')
    assert_refused(too_long, 'block_size=25, but .* knows only 24 positions')


def test_foreign_weights_are_sampled_with_the_tokenizer_of_their_dataset(dataset, tmp_path):
    shutil.copy(dataset / 'meta.json', tmp_path)  # sampling needs no other file of a data set
    flags = [f'--init_from={GOLDEN / "nanogpt" / "ckpt.pt"}', '--num_samples=1', '--max_new_tokens=30', '--start=fox']
    text, = samples_of(sample('none', *flags, f'--dataset={tmp_path}'))
    assert text.startswith('fox')
    assert len(text) == 33
    assert set(text) <= set(TEXT)
    assert_refused(sample('none', *flags), 'name the data set')


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
        return self


def test_wandb_gets_nanogpts_values_with_mfu_in_percent(flags, tmp_path, monkeypatch):
    wandb = FakeWandb(monkeypatch)
    monkeypatch.setattr(jax_train_utils, 'device_peak_flops', lambda device: 1e12)
    succeeded(train(tmp_path, *flags, '--wandb_log=True'))
    assert [set(record) for record in wandb.logged] == [{'iter', 'train/loss', 'val/loss', 'lr', 'mfu'}] * 3
    assert [record['iter'] for record in wandb.logged] == [0, 10, 20]
    mfu = {record['iter']: record['mfu'] for record in records_with(tmp_path, 'mfu')}
    assert wandb.logged[0]['mfu'] is None
    assert [record['mfu'] for record in wandb.logged[1:]] == [100 * mfu[9], 100 * mfu[19]]
    assert 0 < mfu[19] < 1


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
    result = subprocess.run([sys.executable, ROOT / script, '--sede=1'], capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert result.stderr == 'error: unknown flag --sede; did you mean --seed?\n'


@pytest.mark.parametrize('bad, message', [
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
    (['--seed=4294967296'], r'seed must be in \[0, 4294967296\)'),
    (['--loss_chunk=5'], r'loss_chunk=5 does not divide block_size=16; it may be one of \[1, 2, 4, 8\]'),
    (['--attention=flash'], 'attention must be auto, xla, chunked, cudnn, splash'),
    (['--attention=cudnn'], 'attention=cudnn does not work here: it is for NVIDIA GPUs'),
    (['--remat=all'], 'remat must be one of none, dots, full'),
    (['--optimizer=sgd'], 'optimizer must be one of adamw, muon'),
    (['--lr_schedule=step'], 'lr_schedule must be one of cosine'),
    (['--n_inner=-5'], 'n_inner must be at least 0, not -5'),
    (['--n_kv_head=-2'], 'n_kv_head must be at least 0, not -2'),
    (['--keep=0'], 'keep must be at least 1'),
    (['--out_dir=' + 'x' * 300], 'File name too long'),
    (['--out_dir=gs://bucket/run'], 'out_dir=gs://bucket/run is a URL; name a folder')])
def test_a_flag_that_cannot_work_is_refused_before_anything_is_written(flags, tmp_path, bad, message):
    if bad == ['--dataset=openwebtext'] and (ROOT / 'data' / 'openwebtext' / 'train.bin').exists():
        pytest.skip('openwebtext has been prepared here')
    assert_refused(train(tmp_path / 'out', *flags, *bad), message)
    assert not (tmp_path / 'out').exists()


def test_an_out_dir_that_cannot_be_is_refused(flags, tmp_path):
    (tmp_path / 'file').touch()
    assert_refused(train(tmp_path / 'file', *flags), 'cannot write to .*file')


def test_a_failing_start_does_not_overwrite_the_run_that_is_there(finished, run_copy, flags, monkeypatch):
    import wandb

    def no_login(**settings):
        raise RuntimeError('no API key')
    monkeypatch.setattr(wandb, 'init', no_login)
    assert_refused(train(run_copy, *flags, '--overwrite=True', '--wandb_log=True'), 'wandb does not start')
    assert_refused(train(run_copy, *flags, '--wandb_log=True'), 'holds a run at iteration 20')  # wandb has not started
    assert records_without_times(run_copy) == records_without_times(finished[0])
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


def test_another_architecture_is_not_resumed(finished):
    out, _ = finished
    before = files_and_times(out)
    assert_refused(train(out, '--init_from=resume', '--n_layer=3'), 'with n_layer=1, not n_layer=3')
    file = ROOT / 'config' / 'train_shakespeare_char.py'
    result = train(out, '--init_from=resume', file, f'--out_dir={out}')
    assert_refused(result, 'cannot resume with another architecture')
    assert files_and_times(out) == before


def test_resuming_or_sampling_nothing_is_refused(tmp_path):
    assert_refused(train(tmp_path / 'none', '--init_from=resume'), 'no complete checkpoint in .*none/ckpt')
    assert_refused(sample(tmp_path / 'none'), 'no complete checkpoint in .*none/ckpt')
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize('bad, message', [
    (['--quantize=int4'], "quantize must be int8 or '' .off., not 'int4'"),
    (['--cache_dtype=int4'], 'cache_dtype must be one of'),
    (['--n_draft=16'], r'n_draft must be between 0 \(no speculation\) and 15, not 16'),
    (['--draft=x'], 'add --n_draft=4'),
    (['--draft=nowhere', '--n_draft=2'], 'nowhere'),
    (['--start=Quick'], "does not know: 'Q'"),
    (['--start='], 'prompt is empty'),
    (['--start=FILE:nosuchfile.txt'], 'cannot read the prompt.*nosuchfile.txt'),
    (['--temperature=-1'], 'temperature must be'),
    (['--num_samples=0'], 'num_samples must be'),
    (['--top_k=-1'], 'top_k'),
    (['--max_new_tokens=-1'], 'max_new_tokens must be'),
    (['--checkpoint=worst'], 'latest or best')])
def test_a_sample_that_cannot_be_is_refused(finished, bad, message):
    assert_refused(sample(finished[0], *bad), message)


def test_sampling_takes_the_newest_intact_checkpoint_in_place_of_a_damaged_one(run_copy):
    damaged = run_copy / 'ckpt' / '20' / 'metrics' / 'metrics'
    damaged.write_bytes(damaged.read_bytes()[:5])
    for which in ('best', 'latest'):
        result = succeeded(sample(run_copy, f'--checkpoint={which}', '--max_new_tokens=3', '--num_samples=1'))
        assert 'ckpt/20 is damaged' in result.stderr and 'taking checkpoint 10 instead' in result.stderr
    assert damaged.exists()  # sampling changes nothing


def test_sampling_checks_only_what_it_reads(run_copy, monkeypatch):
    read = []
    monkeypatch.setattr(jax_train_utils, 'checksum', lambda path, real=jax_train_utils.checksum: (
        read.append(path), real(path))[1])
    for path in run_copy.glob('ckpt/*/opt_state/**/*'):
        if path.is_file():
            path.write_bytes(b'damaged')
    result = succeeded(sample(run_copy, '--max_new_tokens=3', '--num_samples=1'))
    assert 'damaged' not in result.stderr
    assert {path.relative_to(run_copy / 'ckpt').parts[1] for path in read} == {'params', 'meta', 'metrics'}
    assert_refused(train(run_copy, *RESUME), 'ckpt/20 is damaged .*there is no intact one')


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
                            text=True, timeout=100, cwd=ROOT, env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'))
    assert_refused(result, 'cannot write .*Read-only file system')


def test_token_ids_outside_the_vocabulary_are_refused(dataset, flags, tmp_path):
    data = copy_folder(dataset, tmp_path)
    np.full(500, 60, np.uint16).tofile(data / 'val.bin')
    result = train(tmp_path / 'out', *flags, f'--dataset={data}')
    assert_refused(result, 'val.bin has token id 60, outside the vocabulary')


@pytest.mark.parametrize('split', ['train', 'val'])
def test_a_token_id_that_meta_json_denies_is_found_when_it_is_drawn(dataset, flags, tmp_path, split):
    data = copy_folder(dataset, tmp_path)
    sizes = {split: (data / f'{split}.bin').stat().st_size // 2 for split in ('train', 'val')}
    edit_json(data / 'meta.json', max_id=20, train_tokens=sizes['train'], val_tokens=sizes['val'])
    np.full(sizes[split], 60, np.uint16).tofile(data / f'{split}.bin')
    result = train(tmp_path / 'out', *flags, f'--dataset={data}', '--eval_interval=1')
    assert_refused(result, f'the {split} tokens have an id outside the vocabulary of 28')
    assert not checkpoint_steps(tmp_path / 'out')


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_good_checkpoint(flags, tmp_path):
    diverging = ['--decay_lr=False', '--learning_rate=1e30', '--grad_clip=0', '--save_interval=1']
    assert_refused(train(tmp_path, *flags, *diverging), 'stopping')
    assert max(saved_iterations(tmp_path)) < 20
    succeeded(sample(tmp_path, '--max_new_tokens=3', '--checkpoint=latest'))


def test_flags_without_an_effect_say_so_once(flags, tmp_path):
    out = succeeded(train(tmp_path, *flags, '--max_iters=1', '--compile=False')).stdout
    assert out.count('--compile=False has no effect') == 1
    assert '--backend' not in out  # it has its default


# -----------------------------------------------------------------------------
# execution options are no part of a checkpoint


FAST = ['--scan_layers=True', '--remat=full', '--attention=chunked', '--loss_chunk=8']


def test_a_run_with_muon_resumes_bit_for_bit_and_with_other_execution_options(flags, tmp_path):
    flags = [*flags, '--n_layer=2', '--optimizer=muon', '--lr_schedule=wsd']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    succeeded(train(whole, *flags))
    succeeded(train(parts, *flags, '--max_iters=10'))
    other = Path(shutil.copytree(parts, tmp_path / 'other'))
    succeeded(train(parts, *RESUME, '--max_iters=20'))
    assert records_without_times(parts) == records_without_times(whole)
    result = succeeded(train(other, *RESUME, '--max_iters=20', '--dropout=0.0', *FAST))
    assert 'attention: chunked (as asked)' in result.stdout
    assert 'attention' not in choose_checkpoint(other)[1]['model']
    succeeded(sample(other, '--max_new_tokens=20'))
    result = train(parts, '--init_from=resume', '--optimizer=adamw')
    assert_refused(result, 'cannot resume with another optimizer')


@pytest.mark.parametrize('is_synchronous, expected', [
    (False, ['start', *['start', 'read'] * 5, 'read']), (True, ['start', 'read'] * 6)])
def test_the_loop_reads_an_iteration_when_the_next_is_on_its_way_or_at_once_where_calls_are_synchronous(
        is_synchronous, expected, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(jax_train_utils, 'is_synchronous', lambda device: is_synchronous)
    events, compile_step, device_get = [], jax_train_utils.DataParallel.train_step, jax.device_get

    def recording_train_step(self, step):
        compiled = compile_step(self, step)

        def recording_step(*args):
            events.append('start')
            return compiled(*args)
        return recording_step

    def recording_get(tree):
        events.append('read')
        return device_get(tree)

    monkeypatch.setattr(jax_train_utils.DataParallel, 'train_step', recording_train_step)
    monkeypatch.setattr(jax, 'device_get', recording_get)
    succeeded(train(tmp_path / 'out', *flags, '--max_iters=6', '--eval_interval=100'))
    assert events == expected


# -----------------------------------------------------------------------------
# the benchmark


BENCH = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=32', '--vocab_size=40', '--batch_size=2',
         '--repeats=2', '--device=cpu:0']


def test_the_training_benchmark_ends_with_one_json_line():
    report = report_of(run_script('bench_jax.py', '--mode=train', *BENCH, '--gradient_accumulation_steps=2'))
    assert report['settings']['n_embd'] == 16
    assert report['settings']['dtype'] == 'float32'
    assert report['environment']['jax']
    figures = report['results']
    tokens_per_iter = 2 * 2 * 32
    assert figures['tokens_per_sec'] == pytest.approx(tokens_per_iter / figures['ms_per_iter'] * 1e3, rel=1e-3)
    assert figures['compile_s'] > 0


def test_the_decoding_benchmark_ends_with_one_json_line():
    report = report_of(run_script('bench_jax.py', '--mode=decode', *BENCH, '--prompt_len=4', '--max_new_tokens=8'))
    assert report['settings']['n_embd'] == 16
    assert report['settings']['dtype'] == 'float32'
    assert report['environment']['jax']
    figures = report['results']
    assert figures['tokens_per_sec_decode'] == pytest.approx(2 / figures['ms_per_iter'] * 1e3, rel=1e-3)
    assert figures['compile_s'] > 0
    n_params = 40 * 16 + 12 * 16**2 + 13 * 16 + 2 * 16
    assert figures['weights_mb'] * 1e6 == pytest.approx(4 * n_params, rel=1e-3)
    assert figures['cache_mb'] * 1e6 == 2 * 4 * 2 * 16 * 32  # slots: at most block_size


def test_alternated_programs_are_compared_round_by_round(tmp_path, monkeypatch):
    monkeypatch.setattr(jax_train_utils, 'measure_bandwidth', lambda device: 10.0)
    count = f"import pathlib; path = pathlib.Path({str(tmp_path / 'runs')!r}); path.open('a').write('x'); "
    report = "import json; print(json.dumps({'results': {'tokens_per_sec': len(path.read_text())}}))"
    program = f'{sys.executable} -c "{count}{report}"'  # the n-th run of either reports n tokens per second
    table = succeeded(run_script('peers/alternate.py', '--rounds=2', f'ours={program}', f'peer={program}')).stdout
    assert '| ours | 2.00 (1.00 to 3.00) | 0.625 (0.500 to 0.750) |' in table  # 1 / 2 and 3 / 4
    assert '| peer | 3.00 (2.00 to 4.00) | 1.00 (1.00 to 1.00) |' in table
    decodes = program.replace("'tokens_per_sec'", "'tokens_per_sec': 0, 'tokens_per_sec_decode'")
    table = succeeded(run_script('peers/alternate.py', '--rounds=1', '--metric=tokens_per_sec_decode',
                                 f'ours={decodes}', f'peer={program}')).stdout  # runs 5 and 6
    assert '| ours | 5.00 (5.00 to 5.00) | 0.833 (0.833 to 0.833) |' in table
    assert_refused(run_script('peers/alternate.py', f'broken={sys.executable} -c 1/0'), 'ZeroDivisionError')


def test_a_benchmark_that_cannot_be_is_refused():
    assert_refused(run_script('bench_jax.py', '--mode=sleep'), "mode must be train, decode or compile, not 'sleep'")
    too_many = run_script('bench_jax.py', '--mode=decode', *BENCH, '--max_new_tokens=100')
    assert_refused(too_many, 'at most block_size=32')
    too_few = run_script('bench_jax.py', '--mode=decode', *BENCH, '--max_new_tokens=1')
    assert_refused(too_few, 'max_new_tokens must be at least 2')
    assert_refused(run_script('bench_jax.py', '--preset=huge'),
                   "preset must be one of nanogpt_cpu, baby, gpt2, not 'huge'")


def test_the_decoding_ablation_measures_every_choice_and_its_quality(finished, dataset, monkeypatch):
    monkeypatch.setattr(jax_train_utils, 'measure_bandwidth', lambda device: 10.0)
    result = run_script(
        'bench_jax.py', '--mode=decode', f'--out_dir={finished[0]}', f'--dataset={dataset}', '--prompt_len=4',
        '--max_new_tokens=4', '--batch_size=2', '--repeats=1', '--ablate=True', '--device=cpu:0')
    table = report_of(result)['ablation']
    assert table.keys() == {
        'baseline', 'dtype=bfloat16', 'quantize=int8', 'cache_dtype=bfloat16', 'cache_dtype=int8',
        'cache_dtype=float8', 'n_draft=4', 'batch_size=1', 'batch_size=8', 'quantize=int8, n_draft=4'}
    assert all(row['ms_per_iter'] > 0 for row in table.values())
    plain, int8, float8_cache = table['baseline'], table['quantize=int8'], table['cache_dtype=float8']
    assert plain['agreement'] == 1
    assert int8['agreement'] > 0.5
    assert float8_cache['agreement'] > 0.5
    assert int8['perplexity'] == pytest.approx(plain['perplexity'], rel=0.2)
    assert int8['perplexity'] != plain['perplexity']
    assert float8_cache['perplexity'] == pytest.approx(plain['perplexity'], rel=0.2)
    assert int8['weights_mb'] < 0.6 * plain['weights_mb']
    assert float8_cache['cache_mb'] < plain['cache_mb']
    assert 0 <= table['n_draft=4']['accepted'] <= 1


def test_the_benchmark_takes_presets_and_changes_one_choice_at_a_time():
    report = report_of(run_script('bench_jax.py', '--preset=baby', *BENCH, '--repeats=1', '--ablate=True'))
    assert report['settings']['dropout'] == 0.2  # from the preset
    assert report['settings']['n_embd'] == 16  # from the flag
    table = report['ablation']
    assert table.keys() == {
        'baseline', 'attention=chunked', 'scan_layers=True', 'remat=dots', 'remat=full', 'loss_chunk=4',
        'dtype=bfloat16', "JAX's matmul gradients"}
    for row in table.values():
        assert row['ms_per_iter'] > 0
        assert row['temporary_gb'] > 0


# -----------------------------------------------------------------------------
# newer models

QWEN = ['--norm=rms', '--position=rope', '--n_kv_head=1', '--qk_norm=learned', '--mlp=swiglu', '--n_inner=24',
        '--tied_head=False', '--bias=False', '--n_expert=4', '--n_expert_used=2']


@pytest.fixture(scope='module')
def qwen(tmp_path_factory, flags):
    """The out_dir of a small Qwen3-MoE that was trained for 20 iterations."""
    out = tmp_path_factory.mktemp('qwen') / 'out'
    succeeded(train(out, *flags, *QWEN))
    return out


def test_a_model_with_experts_trains_resumes_and_samples(qwen, tmp_path):
    losses = [record['val_loss'] for record in records_with(qwen, 'val_loss')]
    assert losses[-1] < losses[0] - 0.3
    out = copy_folder(qwen, tmp_path)
    succeeded(train(out, *RESUME, '--max_iters=21'))
    assert choose_checkpoint(out)[0] == 21
    assert_refused(train(out, *RESUME, '--n_expert=2'), 'with n_expert=4, not n_expert=2')
    loss = {}
    for balance in ('0.01', '1000'):
        other = copy_folder(qwen, tmp_path / balance)
        succeeded(train(other, *RESUME, '--max_iters=23', f'--expert_balance={balance}'))
        loss[balance] = records_with(other, 'loss')[-1]['loss']
    assert loss['0.01'] != loss['1000']
    sampled = succeeded(sample(qwen, '--num_samples=2', '--max_new_tokens=12', '--start=the '))
    # keys and values of one head of width 8, float32: 64 bytes per token
    assert 'KV cache: 1,024 bytes for a sequence of 16 tokens, 64 per token' in sampled.stderr


def test_an_exported_model_gives_the_same_samples(qwen, dataset, tmp_path):
    config, params, _ = load_run(qwen)
    save_pretrained(params, config, tmp_path / 'model')
    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=the ', f'--dataset={dataset}']
    exported = sample('none', f'--init_from={tmp_path / "model"}', *flags)
    assert samples_of(exported) == samples_of(sample(qwen, *flags))


def test_export_writes_a_folder_that_needs_nothing_else(qwen, tmp_path):
    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=the ']
    succeeded(run_script('export_jax.py', f'--out_dir={qwen}', f'--folder={tmp_path / "model"}'))
    exported = sample('none', f'--init_from={tmp_path / "model"}', *flags)
    assert samples_of(exported) == samples_of(sample(qwen, *flags))
    assert_refused(run_script('export_jax.py', f'--out_dir={qwen}', f'--folder={tmp_path}'), 'not an empty folder')
    assert_refused(run_script('export_jax.py', f'--out_dir={qwen}'), 'name the new folder')


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


def test_a_folder_with_a_tokenizer_speaks_text(speaking):
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.encode('<s>ab') == [36, 36, 0, 1]
    assert tokenizer.decode([36, 0, 1, 37]) == 'ab'
    assert tokenizer.stop_tokens == (37,)
    init_from = f'--init_from={speaking}'
    first, second = samples_of(sample(
        'none', init_from, '--start=ab c', '--num_samples=2', '--max_new_tokens=12', '--temperature=1.5'))
    assert first.startswith('ab c')
    assert second.startswith('ab c')
    assert first != second
    (speaking / 'tokenizer.json').write_text('{')
    assert_refused(sample('none', init_from), 'tokenizer.json')
    (speaking / 'tokenizer.json').unlink()
    assert_refused(sample('none', init_from), 'vocabulary of 44.*tokenizer.json')


def test_a_chat_is_written_as_the_folders_template_says(speaking, monkeypatch):
    chat = [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'c'}, {'role': 'user', 'content': 'd'}]
    assert HFTokenizer(speaking).encode_chat(chat) == [36, 38, 0, 1, 39, 2, 38, 3, 39]
    monkeypatch.setattr('sys.stdin', io.StringIO('ab\nd\nno\n/clear\nab\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=3', '--temperature=0')
    first, _, refused, cleared, _ = succeeded(result).stdout.replace('> ', '').splitlines()
    assert 'ab' not in first  # the answer alone, without the prompt
    assert 'template refuses: too long' in refused
    assert cleared == first


def test_a_chat_keeps_what_was_said_and_answers_again(speaking, tmp_path, monkeypatch):
    monkeypatch.setattr('sys.stdin', io.StringIO(f'/retry\nab\n/retry\n/save {tmp_path}/chat.json\n/save /\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=9', '--temperature=2')
    nothing, first, cut, second, _, saved, error, _ = succeeded(result).stdout.replace('> ', '').splitlines()
    assert nothing == '(there is no answer yet)'
    assert cut == '(cut at max_new_tokens=9)'
    assert first != second
    assert saved == f'(1 turn in {tmp_path}/chat.json)'
    assert error.startswith('error: cannot write /: ')
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert messages == [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': second}]


@pytest.mark.parametrize('leave', ['/exit', '/quit'])
def test_the_commands_of_a_chat_are_never_questions_to_the_model(leave, speaking, monkeypatch):
    monkeypatch.setattr('jax_text.generate_stream', None)  # an answer would fail
    monkeypatch.setattr('sys.stdin', io.StringIO(f'/help\n/save\n/hlep me\n/clear\n{leave}\nab\n'))
    result = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True'))
    commands = '/retry, /clear, /save FILE, /help, /exit; Ctrl-C ends an answer, Ctrl-D leaves'
    assert result.stderr.splitlines()[-1] == commands
    assert result.stdout.split('> ')[1:] == [
        f'({commands})\n', '(/save needs the name of a file)\n', f'(there is no command /hlep me; {commands})\n', '',
        '']


def test_an_answer_that_fails_does_not_end_the_chat(speaking, tmp_path, monkeypatch):
    generate_stream, calls = jax_generate.generate_stream, []

    def fail_once(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError('out of something')
        return generate_stream(*args, **options)

    monkeypatch.setattr('jax_text.generate_stream', fail_once)
    monkeypatch.setattr('sys.stdin', io.StringIO(f'ab\nc\nd\n/save {tmp_path}/chat.json\n'))
    result = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=3'))
    assert '> error: ValueError: out of something\n> ' in result.stdout
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert [message['content'] for message in messages[::2]] == ['ab', 'd']


def test_an_interrupted_answer_stays_in_the_conversation(speaking, tmp_path, monkeypatch):
    calls = []

    def interrupt(text):
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr('jax_text.strip_partial_utf8', interrupt)
    monkeypatch.setattr('sys.stdin', io.StringIO(f'ab\n/save {tmp_path}/chat.json\nc\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=30', '--temperature=2')
    answer, interrupted, *_ = succeeded(result).stdout.replace('> ', '').splitlines()
    assert interrupted == '(interrupted)'
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert messages == [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': answer}]
    assert 'error' not in result.stdout


def test_only_the_final_channel_of_an_answer_stays_in_the_conversation(speaking, tmp_path, monkeypatch):
    channels = '<|channel|>', '<|message|>', '<|start|>', '<|end|>'
    tokenizer = HFTokenizer(speaking).tokenizer
    tokenizer.add_special_tokens(list(channels))
    tokenizer.save(str(speaking / 'tokenizer.json'))
    answers = ['<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so</s>',
               '<|channel|>analysis<|message|>cut']
    prompts = []

    def generate_stream(params, config, idx, *args, prompt_lengths_B, **options):
        prompts.append(idx[0].tolist())
        row = prompts[-1] + tokenizer.encode(answers[len(prompts) - 1], add_special_tokens=False).ids
        yield GenerationResult(np.array([row]), np.array([len(row)]))

    monkeypatch.setattr('jax_text.generate_stream', generate_stream)
    monkeypatch.setattr('sys.stdin', io.StringIO(f'ab\nd\n/save {tmp_path}/chat.json\n'))
    shown = succeeded(sample('none', f'--init_from={speaking}', '--interactive=True')).stdout
    assert answers[0].removesuffix('</s>') in shown
    said = '<s><user>ab<model>so<user>d<model>'
    assert prompts[1] == tokenizer.encode(said, add_special_tokens=False).ids
    messages = json.loads((tmp_path / 'chat.json').read_text())['messages']
    assert [message['content'] for message in messages] == ['ab', 'so', 'd', '']


def test_the_oldest_turns_of_a_chat_go_when_the_context_is_full(speaking, monkeypatch):
    edit_json(speaking / 'tokenizer_config.json', chat_template='{% for m in messages %}{{ m.content }}{% endfor %}')
    edit_json(speaking / 'config.json', max_position_embeddings=32)
    monkeypatch.setattr('sys.stdin', io.StringIO('abcdefgh\nabcdefgh\n' + 'a' * 40 + '\n'))
    result = sample('none', f'--init_from={speaking}', '--interactive=True', '--max_new_tokens=12', '--temperature=2')
    assert '(the context of 32 tokens is full: the oldest turn is forgotten)' in succeeded(result).stdout
    assert 'the prompt has 40 tokens, the context of the model 32: ' in result.stderr


def test_prompts_can_be_questions_of_a_chat(speaking, tmp_path):
    (tmp_path / 'questions.txt').write_text('ab\ncd\n')
    flags = [f'--init_from={speaking}', '--chat=True', '--max_new_tokens=3', '--temperature=0', '--num_samples=1']
    first, second = samples_of(sample('none', *flags, f'--start=FILE:{tmp_path}/questions.txt', '--each_line=True'))
    assert first.startswith('> ab\n')
    assert second.startswith('> cd\n')
    (tmp_path / 'marked.txt').write_text('ab\u2028c\n', encoding='utf-8-sig')
    kept, = samples_of(sample('none', *flags, f'--start=FILE:{tmp_path}/marked.txt', '--each_line=True'))
    assert kept.startswith('> ab\u2028c\n')
    streamed, = samples_of(sample('none', *flags, '--start=ab', '--stream=True'))
    assert streamed.strip() == first.strip()
    (speaking / 'tokenizer_config.json').unlink()
    assert_refused(sample('none', *flags), 'has no chat template')
    assert_refused(sample('none', *flags[:1], '--system=Be brief.'), 'has no chat template')


def test_the_system_prompt_is_the_first_message_of_a_chat(speaking):
    template = '{% if messages[0].role == "system" %}{{ raise_exception(messages[0].content) }}{% endif %}'
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    refused = sample('none', f'--init_from={speaking}', '--chat=True', '--start=a', '--system=be brief')
    assert_refused(refused, 'template refuses: be brief')


@pytest.mark.parametrize('template, text', [
    ([{'name': 'tool', 'template': 'x'}, {'name': 'default', 'template': '{{ messages[0].content }}'}], 'ab'),
    ('{% generation %}{{ messages[0].content }}{% endgeneration %}c', 'abc'),
    ('{{ "a" if messages[0].content|tojson(ensure_ascii=False, indent=1)|length == 4 }}', 'a')])
def test_chat_templates_may_be_a_list_mark_what_is_generated_and_write_json(speaking, template, text):
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.decode(tokenizer.encode_chat([{'role': 'user', 'content': 'ab'}])) == text


@pytest.mark.parametrize('template', ['{{ messages[0].content + 1 }}', '{% for %}', '{{ messages.nothing.at_all }}'])
def test_a_chat_template_that_fails_says_so_in_one_line(speaking, template):
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    message = refusal(HFTokenizer(speaking).encode_chat, [{'role': 'user', 'content': 'ab'}])
    assert 'chat template cannot be rendered: ' in message


def test_a_model_is_sampled_as_its_generation_config_says_unless_told_otherwise(speaking):
    flags = [f'--init_from={speaking}', '--start=ab', '--max_new_tokens=12', '--num_samples=2']
    plain = sample('none', *flags, '--temperature=2.0', '--top_k=5')
    edit_json(speaking / 'generation_config.json', min_p=0.5)
    by_min_p = sample('none', *flags, '--temperature=2.0', '--top_k=5')
    assert samples_of(by_min_p) == samples_of(sample('none', *flags, '--temperature=2.0', '--top_k=5', '--min_p=0.5'))
    assert samples_of(by_min_p) != samples_of(plain)
    assert '; min_p=0.5 (its generation_config.json)' in by_min_p.stderr
    edit_json(speaking / 'generation_config.json', temperature=2, top_k=3, min_p=None)
    result = sample('none', *flags, '--top_k=5')
    assert samples_of(result) == samples_of(plain)
    assert '; temperature=2 (its generation_config.json)' in result.stderr
    assert 'generation_config' not in plain.stderr


def test_a_text_ends_at_every_end_token_that_the_folder_names(speaking):
    edit_json(speaking / 'generation_config.json', eos_token_id=38)
    edit_json(speaking / 'config.json', eos_token_id=[39, 1])
    assert HFTokenizer(speaking).stop_tokens == (1, 37, 38, 39)


@pytest.mark.parametrize('name, settings', [
    ('config.json', {'eos_token_id': [[1]]}), ('generation_config.json', {'eos_token_id': [1, 'x']}),
    ('tokenizer_config.json', {'eos_token': {'id': 1}}), ('tokenizer_config.json', {'eos_token': [1]}),
    ('tokenizer_config.json', {'chat_template': [3]})])
def test_settings_of_a_tokenizer_that_are_malformed_are_refused(speaking, name, settings):
    edit_json(speaking / name, **settings)
    assert "the tokenizer's settings in" in refusal(HFTokenizer, speaking)


def test_a_vocabulary_reaches_up_to_its_largest_id(speaking):
    values = json.loads((speaking / 'tokenizer.json').read_text())
    values['model']['vocab']['D'] = 43
    (speaking / 'tokenizer.json').write_text(json.dumps(values))
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.vocab_size == 44
    assert tokenizer.encode('D')[-1:] == [43]


TUNE = ['--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=1', *SHORT, '--max_iters=2']


def prepare(script, *args):
    command = [sys.executable, str(ROOT / 'data' / script / 'prepare.py'), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture
def tuned(speaking, tmp_path):
    """(folder of a data set with the tokens of the model `speaking`, out_dir of a run that trained it further)."""
    for name in ('a', 'b'):
        (tmp_path / f'{name}.txt').write_text(f'{name} hello, again and again. <s> ' * 20)
    succeeded(prepare('shakespeare', tmp_path / 'a.txt', tmp_path / 'b.txt', f'--tokenizer={speaking}', '--out_dir',
                      tmp_path / 'data'))
    succeeded(train(tmp_path / 'out', f'--dataset={tmp_path / "data"}', f'--init_from={speaking}', *TUNE))
    return tmp_path / 'data', tmp_path / 'out'


def test_a_run_with_a_tokenizer_of_its_own_needs_nothing_but_its_folder(tuned, speaking, tmp_path):
    data, out = tuned
    tokens = np.fromfile(data / 'train.bin', np.uint16).tolist()
    assert tokens[0] == 36  # what begins a text of this model
    assert tokens.count(37) == 2 and tokens[-1] == 37  # each document ends
    assert 38 not in tokens[1:]
    moved = tmp_path / 'moved'
    data.rename(tmp_path / 'data_elsewhere')
    out.rename(moved)
    speaking.rename(tmp_path / 'model_elsewhere')
    assert choose_checkpoint(moved)[1]['model']['block_size'] == 64  # the model's context, not the training's
    assert samples_of(sample(moved, '--start=ab c', '--num_samples=1', '--max_new_tokens=20'))[0].startswith('ab c')
    succeeded(train(moved, *RESUME, f'--dataset={tmp_path / "data_elsewhere"}', '--max_iters=3'))
    succeeded(run_script('export_jax.py', f'--out_dir={moved}', f'--folder={tmp_path / "model"}'))
    assert HFTokenizer(tmp_path / 'model').chat_template == CHAT_TEMPLATE
    config = json.loads((tmp_path / 'model' / 'config.json').read_text())
    assert config['eos_token_id'] == [37]
    assert config['max_position_embeddings'] == 64


def test_data_of_other_tokens_than_the_models_is_refused(tuned, speaking, dataset, tmp_path):
    flags = [f'--init_from={speaking}', *TUNE]
    assert_refused(train(tmp_path / 'new', f'--dataset={dataset}', *flags), 'has other tokens than .*--tokenizer=')
    tokenizer = tuned[0] / 'tokenizer' / 'tokenizer.json'
    tokenizer.write_text(tokenizer.read_text().replace('"a":0,', '"a":1,').replace('"b":1,', '"b":0,')
                         .replace('"a": 0,', '"a": 1,').replace('"b": 1,', '"b": 0,'))
    assert_refused(train(tmp_path / 'new', f'--dataset={tuned[0]}', *flags), 'has other tokens than')
    assert_refused(train(tuned[1], *RESUME), 'was trained with other tokens')
    assert not (tmp_path / 'new').exists()


def test_a_text_with_a_bpe_of_its_own_is_trained_sampled_and_exported(tmp_path):
    (tmp_path / 'a.py').write_text('def f(x):\n    return x + 1\n' * 40)
    succeeded(prepare('text', tmp_path / 'a.py', '--tokenizer=bpe:280', '--out_dir', tmp_path / 'data'))
    flags = ['--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=1', '--n_layer=1', '--n_head=1',
             '--n_embd=16', *SHORT, '--max_iters=2']
    succeeded(train(tmp_path / 'out', f'--dataset={tmp_path / "data"}', *flags))
    (tmp_path / 'data').rename(tmp_path / 'elsewhere')  # the tokenizer is in out_dir, too
    text, = samples_of(sample(tmp_path / 'out', '--start=\u4e16 def', '--num_samples=1', '--max_new_tokens=8'))
    assert text.startswith('\u4e16 def')  # the text has no such character
    succeeded(run_script('export_jax.py', f'--out_dir={tmp_path / "out"}', f'--folder={tmp_path / "model"}'))
    settings = json.loads((tmp_path / 'model' / 'tokenizer_config.json').read_text())
    assert settings['tokenizer_class'] == 'PreTrainedTokenizerFast'
    assert HFTokenizer(tmp_path / 'model').stop_tokens == (0,)


CONVERSATION = {'messages': [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'c'},
                             {'role': 'user', 'content': 'd'}, {'role': 'assistant', 'content': ' ef '}]}


@pytest.fixture
def chatting(speaking):
    template = ('{% for m in messages %}{% if m.role == "user" %}<user>{{ m.content }}{% else %}<model>'
                '{% generation %}{{ m.content|trim }}</s>{% endgeneration %}{% endif %}{% endfor %}'
                '{% if add_generation_prompt %}<model>{% endif %}')
    edit_json(speaking / 'tokenizer_config.json', chat_template=[{'name': 'default', 'template': template}])
    return speaking


def test_only_the_assistants_tokens_count(chatting, tmp_path):
    (tmp_path / 'chats.jsonl').write_text((json.dumps(CONVERSATION) + '\n') * 10)
    data = tmp_path / 'data'
    succeeded(prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={chatting}', f'--out_dir={data}'))
    assert np.fromfile(data / 'val.bin', np.uint16).tolist() == [38, 0, 1, 39, 2, 37, 38, 3, 39, 4, 5, 37]
    assert np.fromfile(data / 'val_mask.bin', np.uint8).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    flags = [f'--init_from={chatting}', f'--dataset={data}', *TUNE, '--block_size=8', '--dropout=0.0',
             '--decay_lr=False', '--max_iters=30']
    succeeded(train(tmp_path / 'out', *flags))
    losses = [record['val_loss'] for record in read_metrics(tmp_path / 'out') if 'val_loss' in record]
    assert losses[-1] < 0.3 < losses[0]  # what the user says, at random for the model, would stay above it
    (data / 'val_mask.bin').write_bytes(b'1')
    assert_refused(train(tmp_path / 'other', *flags), 'masks .* do not belong to its tokens')


def test_conversations_are_split_at_newlines_only_and_may_begin_with_a_byte_order_mark(chatting, tmp_path):
    lines = [json.dumps({'messages': [{'role': 'user', 'content': 'a\u2028b\u2029\x85'},
                                      {'role': 'assistant', 'content': 'c'}]}, ensure_ascii=False)] * 4
    for name, text in (('plain', '\n'.join(lines)), ('windows', '\ufeff' + '\r\n'.join(lines))):
        (tmp_path / f'{name}.jsonl').write_bytes(text.encode())
        succeeded(prepare('chat', tmp_path / f'{name}.jsonl', f'--tokenizer={chatting}',
                          f'--out_dir={tmp_path / name}'))
        assert np.fromfile(tmp_path / name / 'train.bin', np.uint16).tolist() == [38, 0, 1, 39, 2, 37] * 3


CHAT_MASKS = json.loads((ROOT / 'tests' / 'golden' / 'chat_masks.json').read_text(encoding='utf-8'))


@pytest.fixture
def made_tokenizer(tmp_path):
    """A function of (chat template, kind of tokenizer) that makes the HFTokenizer with the golden cases' special
    tokens: 'characters', 'bytes' as GPT-2's, 'newlines', the same with a token for two of them, or 'greedy',
    characters with special tokens that take in the spaces after them, as Phi 3's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    def make(template, kind='characters'):
        if kind in ('bytes', 'newlines'):
            vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
            merges = [('l', 'o'), ('H', 'e'), ('He', 'l'), ('Hel', 'lo'), ('\u0120', 'Y')]
            merges += [('\u010a', '\u010a')] * (kind == 'newlines')
            vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
            tokenizer = Tokenizer(models.BPE(vocab, merges))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            chars = sorted(set(str(CHAT_MASKS) + ''.join(sum((case['pieces'] for case in CHAT_MASKS['cases']), []))))
            tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(chars)}, []))
            tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([AddedToken(token, rstrip=kind == 'greedy') for token in CHAT_MASKS['special']])
        tokenizer.save(str(tmp_path / 'tokenizer.json'))
        settings = {'bos_token': '<s>', 'eos_token': '</s>', 'chat_template': template}
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
        return HFTokenizer(tmp_path)
    return make


def counted_pieces(tokenizer, messages):
    """The text in pieces that in turn do not count and count."""
    ids, mask = tokenizer.encode_training_chat(messages)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    assert mask[0] == 0
    return [tokenizer.tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize('template', CHAT_MASKS['templates'])
def test_every_answer_counts_to_its_end_token_as_transformers_counts(made_tokenizer, template):
    cases = [case for case in CHAT_MASKS['cases'] if case['template'] == template]
    assert len(cases) >= 10
    for kind, templates in (('characters', 'templates'), ('characters', 'marked'), ('bytes', 'templates')):
        tokenizer = made_tokenizer(CHAT_MASKS[templates][template], kind)
        for case in cases:
            assert counted_pieces(tokenizer, case['messages']) == case['pieces']


def test_a_token_counts_if_some_of_it_is_the_answers_unless_it_is_a_special_token_of_the_request(made_tokenizer):
    messages = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': '\n\nYes'}]
    for kind, pieces in (
            ('newlines', ['<|user|>\nHi<|end|>\n<|assistant|>', '\n\n\nYes<|end|>', '\n<|endoftext|>']),
            ('greedy', ['<|user|>Hi<|end|><|assistant|>', 'Yes<|end|>', '<|endoftext|>'])):  # with their newlines
        for templates in ('templates', 'marked'):
            tokenizer = made_tokenizer(CHAT_MASKS[templates]['phi3'], kind)
            assert counted_pieces(tokenizer, messages) == pieces


@pytest.mark.parametrize('request_end, answer', [
    ('<|Assistant|><think>\n', "'<|Assistant|>' + m.content + '</s>'"),  # DeepSeek-R1's
    ('<|Assistant|>', "'<|Assistant|>' + (m.content + m.content) + '</s>'"),
    ('<|Assistant|>', "'</s>'"), ('<|Assistant|>', "'Answer: ' + m.content + '</s>'")])
def test_a_template_that_writes_answers_elsewhere_than_it_asks_for_them_is_refused(made_tokenizer, request_end, answer):
    template = ('{% for m in messages %}{% if m.role == "user" %}{{ m.content }}{% else %}{{ ANSWER }}{% endif %}'
                '{% endfor %}{% if add_generation_prompt %}REQUEST{% endif %}')
    tokenizer = made_tokenizer(template.replace('ANSWER', answer).replace('REQUEST', request_end))
    message = refusal(tokenizer.encode_training_chat, CONVERSATION['messages'])
    assert 'does not write answer 1 where it asks for it; mark' in message


def masked_data(folder, train_mask, val_mask):
    """The flags of a run whose iterations are one window of 16 tokens, of which those count that the masks say."""
    rng = np.random.default_rng(0)
    write_dataset(folder, rng.integers(8, size=len(train_mask)), rng.integers(8, size=len(val_mask)))
    for split, mask in (('train', train_mask), ('val', val_mask)):
        np.asarray(mask, np.uint8).tofile(folder / f'{split}_mask.bin')
    return [f'--dataset={folder}', *MODEL, *SHORT, '--block_size=16', '--batch_size=1',
            '--gradient_accumulation_steps=1', '--eval_iters=8']


def test_an_iteration_without_a_token_that_counts_is_skipped_and_resume_stays_exact(tmp_path):
    train_mask = np.arange(16 * 20) % 64 < 8
    flags = [*masked_data(tmp_path / 'data', train_mask, train_mask), '--eval_interval=6']
    out = succeeded(train(tmp_path / 'a', *flags, '--max_iters=12')).stdout
    skipped = [record for record in records_with(tmp_path / 'a', 'loss') if record['loss'] is None]
    assert 2 <= len(skipped) <= 10
    assert [int(i) for i in re.findall(r'iter (\d+): skipped, none of its tokens counts', out)] == [
        record['iter'] for record in skipped]
    assert all(record['loss'] > 0 for record in records_with(tmp_path / 'a', 'loss') if record not in skipped)
    state = dict(final_state(tmp_path / 'a'))
    step, = (np.frombuffer(value, np.int32) for path, value in state.items() if path.endswith("['step']"))
    assert step == 12 - len(skipped)  # no update, no step of the schedule
    succeeded(train(tmp_path / 'b', *flags, '--max_iters=5'))
    succeeded(train(tmp_path / 'b', *RESUME, '--max_iters=12'))
    assert final_state(tmp_path / 'b') == final_state(tmp_path / 'a')


def test_evaluations_without_a_token_that_counts_are_refused_before_anything_is_written(tmp_path):
    flags = masked_data(tmp_path / 'data', np.ones(400), np.arange(400) == 20)
    assert_refused(train(tmp_path / 'out', *flags), 'none of the 8 val windows .*: use more eval_iters or a larger')
    assert not (tmp_path / 'out').exists()
    succeeded(train(tmp_path / 'out', *flags, '--eval_iters=40', '--max_iters=1'))


@pytest.mark.parametrize('line, message', [
    ('{', 'line 2: is not JSON'), ('[]', 'line 2: has no "messages"'),
    ('{"messages": [{"content": "a"}]}', 'line 2: has messages that are not'),
    ('{"messages": [{"role": "user", "content": "a"}]}', 'line 2: has no message with the role "assistant"')])
def test_a_conversation_that_cannot_be_used_is_named(chatting, line, message, tmp_path):
    (tmp_path / 'chats.jsonl').write_text(json.dumps(CONVERSATION) + '\n' + line + '\n')
    result = prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={chatting}', f'--out_dir={tmp_path / "data"}')
    assert_refused(result, message)
    assert not (tmp_path / 'data').exists()


def test_int8_weights_are_quantized_while_they_are_loaded_and_freed_before_the_bandwidth_is_measured(
        speaking, monkeypatch):
    import jax_pretrained
    load, kinds, weights, held = jax_pretrained.load_pretrained, [], [], []

    def watched(path, dtype, place):
        def watched_place(path, array):
            value = place(path, array)
            kinds.append((path[-1], type(value).__name__))
            weights.extend(map(weakref.ref, jax.tree.leaves(value)))
            return value
        return load(path, dtype, watched_place)

    def bandwidth(*args):
        held.append(sum(weight() is not None for weight in weights))
        return 1.0

    monkeypatch.setattr('jax_text.load_pretrained', watched)
    monkeypatch.setattr('jax_train_utils.measure_bandwidth', bandwidth)
    succeeded(sample('none', f'--init_from={speaking}', '--quantize=int8', '--start=ab', '--num_samples=1',
                     '--max_new_tokens=2'))
    assert {kind for name, kind in kinds if name in ('kernel', 'wte', 'lm_head')} == {'Int8'}
    assert len(weights) > 20 and held == [0]


WITHOUT = """
import runpy, sys
import flax.linen, optax, orbax.checkpoint  # which need some of them
import jax.interpreters.mlir
import jax.lib
del jax.interpreters.mlir.register_lowering, jax.lib.__version__
for name in ('jax.extend.mlir', 'jax.experimental.layout', 'jax.experimental.mesh_utils', 'jax.experimental.topologies',
             'jax.experimental.multihost_utils'):
    sys.modules[name] = None  # to import one of them raises ImportError
for script, *args in eval(sys.argv[1]):
    sys.argv = [script, *args]
    runpy.run_path(script, run_name='__main__')
"""


def test_names_of_jax_that_may_go_are_not_needed_to_train_sample_and_measure(dataset, tmp_path):
    commands = [
        ['train_jax.py', *MODEL, *SHORT, f'--dataset={dataset}', f'--out_dir={tmp_path}', '--dtype=bfloat16'],
        ['sample_jax.py', f'--out_dir={tmp_path}', '--quantize=int8', '--start=the', '--num_samples=2',
         '--max_new_tokens=4', '--device=cpu:0'],
        ['bench_jax.py', '--mode=decode', *MODEL, '--quantize=int8', '--max_new_tokens=2', '--prompt_len=2',
         '--repeats=1', '--device=cpu:0']]
    done = subprocess.run([sys.executable, '-c', WITHOUT, repr(commands)], cwd=ROOT, capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('\nthe') == 2
    assert json.loads(done.stdout.splitlines()[-1])['results']['tokens_per_sec'] > 0
