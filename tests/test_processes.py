"""Several processes: joining, agreeing, failing together; and the signals that stop one."""
import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import jax_devices.processes

import jax
import numpy as np
import pytest

from jax_devices.layout import setup_distributed_training
from jax_devices.processes import STOP_SIGNALS, check_agreement, in_all_processes, initialize_distributed
from jax_flags import UserError
from jax_run.checkpoints import choose_checkpoint, load_checkpoint, opt_state_item
from jax_run.log import read_metrics
from jax_train_utils import create_optimizer_with_schedule, create_train_state
from jax_transformer import GPTConfig
from tests.common import (
    MODEL, ROOT, SHORT, assert_refused, free_port, long, needs_hangup, records_of, refusal, run_script, start,
    succeeded, train, wait_for)

FLAGS = [*MODEL, *SHORT, '--max_iters=100', '--eval_interval=100', '--lr_decay_iters=30', '--device=cpu']

# -----------------------------------------------------------------------------
# agreement of several processes, with the texts of another one made up

@pytest.fixture
def other_says(monkeypatch):
    return lambda text: monkeypatch.setattr(jax_devices.processes, 'gather_texts', lambda mine: [text, mine])


def test_processes_that_differ_are_named_with_what_differs(other_says):
    other_says('{"batch_size": 4, "seed": 1}')
    check_agreement('flags', {'batch_size': 4, 'seed': 1})
    said = refusal(check_agreement, 'flags', {'batch_size': 8, 'seed': 1})
    assert said == 'processes 0 and 1 have different flags, but all processes must have the same: batch_size is 4 and 8'
    other_says('{"seed": 1, "--seed": "given"}')
    assert refusal(check_agreement, 'flags', {'seed': 1}).endswith('the same: --seed is given and missing')


def test_a_mistake_of_one_process_is_reported_by_all(other_says):
    def run(mistake):
        with in_all_processes():
            if mistake:
                raise UserError(mistake)

    other_says('')
    run('')
    assert refusal(run, 'no data') == 'process 1: no data'
    other_says('no data')
    assert refusal(run, 'no data') == 'no data'
    assert refusal(run, '') == 'process 0: no data'


# -----------------------------------------------------------------------------
# mistakes

LAUNCHERS = ('SLURM_NTASKS', 'SLURM_STEP_NODELIST', 'OMPI_COMM_WORLD_SIZE', 'KUBERNETES_SERVICE_HOST',
             'JOB_COMPLETION_INDEX', 'JAX_COORDINATOR_ADDRESS', 'WORLD_SIZE', 'RANK', 'SKYPILOT_NUM_NODES',
             'PMI_SIZE', 'PMI_RANK')


@pytest.fixture
def joined(monkeypatch):
    """The (coordinator_address, num_processes, process_id) that JAX is called with; no launcher has started this."""
    calls = []
    monkeypatch.setattr(jax.distributed, 'initialize', lambda *given, **timeouts: calls.append(given))
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_processes_are_joined_only_where_flags_or_the_environment_say_so(monkeypatch, joined):
    initialize_distributed()
    for name in ('SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE', 'WORLD_SIZE', 'RANK', 'SKYPILOT_NUM_NODES', 'PMI_SIZE',
                 'JAX_COORDINATOR_ADDRESS'):
        monkeypatch.setenv(name, '')  # as a job's template may leave them
    initialize_distributed()
    monkeypatch.setenv('WORLD_SIZE', 'many')
    initialize_distributed()
    monkeypatch.setenv('SLURM_NTASKS', '4')
    initialize_distributed()  # inside an allocation, but not started by srun
    assert joined == []
    detected = (None, None, None)
    monkeypatch.setenv('SLURM_STEP_NODELIST', 'node[1-4]')
    initialize_distributed()
    initialize_distributed('host:1234', 2, 1)
    initialize_distributed(num_processes=1)  # alone, whatever the environment says
    monkeypatch.delenv('SLURM_NTASKS')
    initialize_distributed('auto')
    assert joined == [detected, ('host:1234', 2, 1), detected]
    for name, value in {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '0'}.items():
        initialize_distributed()  # a pod that is not of an indexed job
        monkeypatch.setenv(name, value)
    initialize_distributed()
    monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', 'other:1234')
    initialize_distributed(num_processes=2, process_id=1)
    assert joined[3:] == [detected, ('other:1234', 2, 1)]


@pytest.mark.parametrize('variables', [
    {'WORLD_SIZE': '4', 'RANK': '3'}, {'SKYPILOT_NUM_NODES': '2'}, {'PMI_SIZE': '2', 'PMI_RANK': '0'}])
def test_processes_that_jax_does_not_detect_do_not_train_alone(monkeypatch, joined, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert 'each would train alone: name them as in docs/parallelism.md' in refusal(initialize_distributed)
    initialize_distributed(num_processes=1)
    initialize_distributed('host:1234', 4, 3)
    assert joined == [('host:1234', 4, 3)]


def test_a_process_counts_as_dead_after_60_seconds_of_silence(monkeypatch, joined):
    timeouts = {}
    monkeypatch.setattr(jax.distributed, 'initialize', lambda *given, **options: timeouts.update(options))
    initialize_distributed('host:1234', 2, 0)
    assert timeouts == {'heartbeat_timeout_seconds': 60, 'shutdown_timeout_seconds': 60}


def test_a_wait_for_the_others_is_said(monkeypatch, joined, capfd):
    initialize_distributed('host:1234', 2, 0)
    assert capfd.readouterr().err == ''
    monkeypatch.setattr(jax_devices.processes, 'SAID_AFTER', 0)
    monkeypatch.setattr(jax.distributed, 'initialize', lambda *given, **timeouts: time.sleep(0.5))
    initialize_distributed('host:1234', 2, 0)
    assert capfd.readouterr().err == (
        'waiting for the other processes, for up to 5 minutes: process 0 is at host:1234\n')


@pytest.mark.slow
def test_jax_takes_no_signal_that_comes_before_the_script_handles_it():
    program = """
import os, signal, sys, time
from jax_devices.processes import initialize_distributed
initialize_distributed('127.0.0.1:{}', 2, {})
os.kill(os.getpid(), signal.SIGTERM if sys.argv[1] == '1' else 0)  # the others depend on process 0
time.sleep(60)
"""
    port = free_port()
    first, second = [start('-c', program.format(port, i), i) for i in range(2)]
    assert second.wait(timeout=100) == -signal.SIGTERM
    first.kill()


def test_processes_with_different_numbers_of_devices_are_refused(monkeypatch, joined):
    for name, number in {'process_count': 2, 'device_count': 3, 'local_device_count': 1}.items():
        monkeypatch.setattr(jax, name, lambda number=number: number)
    assert refusal(initialize_distributed, 'host:1234', 2, 0).startswith(
        'process 0 has 1 of the 3 devices: 2 processes need equal numbers')


def test_flags_that_do_not_go_together_are_refused(monkeypatch, joined):
    monkeypatch.undo()
    for flags in (('127.0.0.1:23456', 2, 2), ('127.0.0.1:23456',), ('', 2), ('', 0, 1)):
        said = refusal(initialize_distributed, *flags)
        assert 'do not find each other' in said and '--process_id=0 to N-1' in said
    for address in ('127.0.0.1', ':1234', '127.0.0.1:x'):
        assert 'is not host:port of process 0' in refusal(initialize_distributed, address, 2, 1)


def test_a_second_process_0_and_a_port_that_is_none_are_refused_at_once(joined):
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(initialize_distributed, f'127.0.0.1:{port}', 2, 0)
        assert f'port {port}' in said and 'another one with --process_id=0' in said
        initialize_distributed(f'127.0.0.1:{port}', 2, 1)  # connects to it
    initialize_distributed(f'127.0.0.1:{port}', 2, 0)
    assert 'port 99999' in refusal(initialize_distributed, '127.0.0.1:99999', 2, 0)


# -----------------------------------------------------------------------------
# several processes

class Processes:
    """n processes of train_jax.py, or another script, that work together, with as many devices each."""

    def __init__(self, n, out_dir, *flags, each=None, script='train_jax.py', n_started=None, devices=1):
        self.port = free_port()
        self.out_dir = out_dir
        command = [script, f'--out_dir={out_dir}', *flags, f'--coordinator_address=127.0.0.1:{self.port}',
                   f'--num_processes={n}']
        env = dict(os.environ, JAX_NUM_CPU_DEVICES=str(devices))
        self.processes = [start(*command, f'--process_id={i}', *(each[i] if each else ()), env=env)
                          for i in range(n_started or n)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait_for_iteration(self, iteration):
        wait_for(f'iteration {iteration}', lambda: len(losses_of_run(self.out_dir)) > iteration, *self.processes)

    def results(self):
        """[(exit code, stdout, stderr)] of each, when all have ended."""
        output = [process.communicate() for process in self.processes]
        return [(process.returncode, *texts) for process, texts in zip(self.processes, output)]


def losses_of_run(out_dir):
    return [record['loss'] for record in read_metrics(out_dir) if 'loss' in record]


def restored_state(out_dir):
    """(parameters, the rest of the state) of the latest checkpoint, on one device."""
    step, meta = choose_checkpoint(out_dir)
    tx = create_optimizer_with_schedule(lambda step: 0.1)
    parallel = setup_distributed_training(jax.devices()[:1])
    abstract = parallel.abstract_state(create_train_state, jax.random.key(0), GPTConfig(**meta['model']), tx)
    state = load_checkpoint(out_dir, step, abstract)
    return state.params, opt_state_item(state)


@pytest.fixture(scope='module')
def losses_of_one_process(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('one') / 'out'
    assert train(out, f'--dataset={dataset}', *FLAGS, '--device=cpu:0', '--max_iters=30').returncode == 0
    return losses_of_run(out)


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one_and_survive_the_death_of_one_bit_for_bit(
        dataset, tmp_path, losses_of_one_process):
    flags = [f'--dataset={dataset}', *FLAGS, '--save_interval=10']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    with Processes(2, whole, *flags) as processes:
        (code, out, err), (_, out_1, _) = processes.results()
    assert code == 0, err
    for text in ('2 x cpu', 'iter 0'):  # only process 0 prints
        assert text in out
        assert text not in out_1
    np.testing.assert_allclose(losses_of_run(whole)[:30], losses_of_one_process, atol=2e-4)

    with Processes(2, killed, *flags, '--max_iters=100000') as processes:  # ends by the kill only, however late that is
        processes.wait_for_iteration(25)
        processes.processes[1].kill()
        (code, _, err), _ = processes.results()
    assert code == 75
    assert ('error: process 0 of 2 has lost the others; start all of them again, a training with '
            '--init_from=resume' in err)
    assert 10 <= choose_checkpoint(killed)[0] < 100
    with Processes(2, killed, '--init_from=resume', '--device=cpu', '--max_iters=100') as processes:
        assert [code for code, *_ in processes.results()] == [0, 0]
    assert records_of(killed) == records_of(whole)
    jax.tree.map(np.testing.assert_array_equal, restored_state(killed), restored_state(whole))


@needs_hangup
@pytest.mark.slow
def test_two_processes_of_two_devices_on_a_mesh_give_the_curve_stop_together_and_one_device_resumes(
        dataset, tmp_path, losses_of_one_process):
    endless = ['--max_iters=100000', '--eval_interval=100000']
    flags = [f'--dataset={dataset}', *FLAGS, '--fsdp=2', '--tensor=2', *endless]
    with Processes(2, tmp_path, *flags, devices=2) as processes:
        processes.wait_for_iteration(30)
        processes.processes[1].send_signal(signal.SIGHUP)
        results = processes.results()
    assert [code for code, *_ in results] == [128 + signal.SIGHUP] * 2, results[0][2]
    saved = int(re.search(r'at iteration (\d+), saved', results[0][1])[1])
    assert choose_checkpoint(tmp_path)[0] == saved
    np.testing.assert_allclose(losses_of_run(tmp_path)[:30], losses_of_one_process, atol=2e-4)
    result = train(tmp_path, '--init_from=resume', '--device=cpu:0', f'--max_iters={saved + 2}')
    assert result.returncode == 0, result.stderr
    assert "do not fit 1 devices: taking {'fsdp': 1, 'tensor': 1, 'expert': 1, 'context': 1}" in result.stdout
    assert f'at iteration {saved}' in result.stdout
    refused = train(tmp_path, '--init_from=resume', '--device=cpu:0', '--fsdp=2')
    assert_refused(refused, 'fsdp=2 x tensor=1 x expert=1 x context=1 does not divide 1 devices')


@pytest.mark.slow
def test_two_processes_save_together_where_their_folder_and_their_stderr_have_gone(dataset, tmp_path):
    out = tmp_path / 'out'
    flags = [f'--dataset={dataset}', *FLAGS, '--eval_interval=100000', '--max_iters=100000']
    with Processes(2, out, *flags) as processes:
        processes.wait_for_iteration(25)
        shutil.rmtree(out)
        for process in processes.processes:
            process.stderr.close()
        processes.processes[1].send_signal(signal.SIGTERM)
        said = processes.processes[0].stdout.read()
        codes = [process.wait(timeout=300) for process in processes.processes]
        for process in processes.processes:
            process.stderr = None
    assert codes == [128 + signal.SIGTERM] * 2
    saved = int(re.search(r'at iteration (\d+), saved', said)[1])
    assert choose_checkpoint(out)[0] == saved >= 25
    assert len(losses_of_run(out)) == saved and (out / 'config.json').exists()  # those from before, too
    restored_state(out)


@pytest.mark.slow
def test_processes_with_minutes_agree_on_their_iterations(dataset, tmp_path):
    timed = ['--minutes=0.02', '--save_interval=30', '--eval_interval=100000']
    with Processes(2, tmp_path, f'--dataset={dataset}', *FLAGS, *timed) as processes:
        (code, out, err), (code_1, _, err_1) = processes.results()
    assert (code, code_1) == (0, 0), err + err_1
    n = int(re.findall(r'max_iters=(\d+), also', out)[-1])  # the end may have moved
    assert choose_checkpoint(tmp_path)[0] == n == len(losses_of_run(tmp_path))


def each_with(name, values, out_dir, *flags):
    """Processes of which each has its own value of a flag."""
    return Processes(len(values), out_dir, *flags, each=[[f'--{name}={value}'] for value in values])


@pytest.mark.slow
@pytest.mark.parametrize('name, values, message', [
    ('batch_size', (4, 2), 'processes 0 and 1 have different flags, .*: batch_size is 4 and 2'),
    long('out_dir', ('{tmp}/a', '{tmp}/b'), 'process 1: .*/b is not the folder of process 0')])
def test_processes_that_do_not_agree_all_end_at_the_start_with_the_same_line(dataset, tmp_path, name, values, message):
    values = [value.format(tmp=tmp_path) if type(value) is str else value for value in values]
    with each_with(name, values, tmp_path, f'--dataset={dataset}', *FLAGS) as processes:
        wait_for('the end of a process', lambda: False, *processes.processes)
        first_end = time.monotonic()
        results = processes.results()
    assert time.monotonic() - first_end < 50  # a process that waits for one that has ended takes 60 s
    for code, _, err in results:
        assert code == 2
        assert re.fullmatch(f'error: {message}.*\n', err), err
    assert not list(tmp_path.rglob('ckpt'))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/cmdline'), reason='needs a file that each process sees otherwise')
def test_processes_with_other_texts_end_with_a_line(finished):
    flags = ['--text=/proc/self/cmdline', '--device=cpu', '--tensor=2']
    with Processes(2, finished[0], *flags, script='eval_jax.py') as processes:
        results = processes.results()
    for code, _, err in results:
        assert code == 2
        last = err.splitlines()[-1]
        assert re.fullmatch('error: processes 0 and 1 have different flags, texts or tasks, .* digest.*', last), err


@pytest.mark.slow
@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_process_waits_for_the_others_ends_it(dataset, tmp_path, signum):
    with Processes(2, tmp_path, f'--dataset={dataset}', *FLAGS, n_started=1) as processes:
        waiting, = processes.processes
        with socket.socket() as s:
            wait_for('process 0 to listen', lambda: s.connect_ex(('127.0.0.1', processes.port)) == 0, waiting)
        assert waiting.poll() is None
        waiting.send_signal(signum)
        assert waiting.wait(timeout=300) == -signum  # 128 + signum for a shell
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_signal_before_the_first_iteration_stops_all_processes(dataset, tmp_path):
    endless = ['--max_iters=100000', '--eval_interval=100000']
    with Processes(2, tmp_path, f'--dataset={dataset}', *FLAGS, *endless) as processes:
        lock = tmp_path / 'lock'  # written after joining, before the model is made and compiled
        wait_for(lock, lock.exists, processes.processes[0])
        processes.processes[1].send_signal(signal.SIGTERM)
        results = processes.results()
    assert [code for code, *_ in results] == [128 + signal.SIGTERM] * 2, results


# -----------------------------------------------------------------------------
# signals

SIGNALLED = """
import time
import jax
from jax_devices.processes import StopSignal
stop = StopSignal(nothing_to_save={nothing_to_save})
stop.saving = lambda: {saving}
print('ready', flush=True)
{then}
"""
ENDLESS_STEP = 'jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, jax.numpy.sin, x))(1.0).block_until_ready()'


@contextlib.contextmanager
def signalled(nothing_to_save=False, saving=False, then=ENDLESS_STEP):
    """A process with a StopSignal, and a function that sends it a signal and returns the line that it answers."""
    program = SIGNALLED.format(nothing_to_save=nothing_to_save, saving=saving, then=then)
    with start('-c', program) as process:
        def send(signum):
            process.send_signal(signum)
            return process.stderr.readline()

        try:
            assert process.stdout.readline() == 'ready\n'
            yield process, send
        finally:
            process.kill()


@pytest.mark.slow
def test_a_signal_is_answered_at_once_also_during_a_step_and_a_second_one_ends_the_process():
    with signalled() as (process, send):
        assert send(signal.SIGINT) == ('stopping after this iteration, then saving; Ctrl-C again ends at once, '
                                       'without saving\n')
        time.sleep(0.4)
        assert send(signal.SIGINT) == 'ended by Ctrl-C\n'
        assert process.wait(timeout=300) == 128 + signal.SIGINT


def test_a_signal_that_timeout_sends_to_a_process_and_to_its_group_is_one():
    with signalled(then='time.sleep(60); time.sleep(60); time.sleep(60)') as (process, send):
        assert send(signal.SIGTERM).startswith('stopping after this iteration, then saving')
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        assert process.poll() is None
        assert send(signal.SIGTERM) == 'ended by SIGTERM\n'


@needs_hangup
@pytest.mark.parametrize('first, second', [(signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)])
def test_a_second_signal_has_no_effect_if_one_of_the_two_is_sighup(first, second):
    with signalled(then='time.sleep(60); time.sleep(60); time.sleep(60)') as (process, _):
        for signum in (first, second):
            process.send_signal(signum)
            time.sleep(0.4)
        assert process.poll() is None


def test_a_second_signal_has_to_wait_for_a_save():
    with signalled(saving=True, then='time.sleep(60); time.sleep(60); time.sleep(60)') as (process, send):
        assert send(signal.SIGTERM).startswith('stopping after this iteration, then saving; SIGTERM again ends')
        time.sleep(0.4)
        for _ in range(2):
            assert send(signal.SIGTERM) == 'SIGTERM has to wait: a checkpoint is being written\n'
        assert process.poll() is None


def test_a_signal_within_a_callback_that_ignores_exceptions_ends_the_script(capfd):
    program = """
import gc, os, signal
from jax_devices.processes import StopSignal
stop = StopSignal(nothing_to_save=True)
gc.callbacks.append(lambda phase, info: gc.callbacks.clear() or signal.raise_signal(signal.SIGTERM))
gc.collect()
print('goes on', flush=True)
stop.exit_if_stopped()
print('deletes the earlier run', flush=True)
"""
    with start('-c', program) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert out == 'goes on\n'
    assert err == 'stopping: there is nothing to save; SIGTERM again ends at once\n'


def test_a_signal_while_a_run_starts_ends_it_with_a_line():
    with signalled(nothing_to_save=True, then='time.sleep(60)') as (process, send):
        assert send(signal.SIGINT) == 'stopping: there is nothing to save; Ctrl-C again ends at once\n'
        assert process.wait(timeout=300) == 128 + signal.SIGINT


@needs_hangup
def test_a_terminal_that_closes_before_sighup_comes_raises_nothing():
    then = 'while not stop.signum: print("more", flush=True)'
    program = SIGNALLED.format(nothing_to_save=False, saving=False, then=then)
    terminal, inside = os.openpty()  # of another session: no signal comes with its end
    with subprocess.Popen([sys.executable, '-c', program], cwd=ROOT, stdout=inside, stderr=inside) as process:
        os.close(inside)
        assert b'ready' in os.read(terminal, 100)
        os.close(terminal)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=300) == 0


class TerminalOfTheTest(io.StringIO):
    def isatty(self):
        return True


def test_a_script_leaves_handlers_and_streams_as_they_were(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    monkeypatch.setattr(sys, 'stdout', TerminalOfTheTest())

    def seen():
        return [signal.getsignal(signum) for signum in STOP_SIGNALS], sys.stdout, sys.stderr

    before = seen()
    for max_iters in (1, 2):
        args = [*flags, f'--out_dir={tmp_path}', '--init_from=auto', f'--max_iters={max_iters}']
        monkeypatch.setattr(sys, 'argv', ['train_jax.py', *args])
        runpy.run_path(str(ROOT / 'train_jax.py'), run_name='__main__')
        assert seen() == before and signal.set_wakeup_fd(-1) == -1
    assert 'iter 1:' in sys.stdout.getvalue()


# -----------------------------------------------------------------------------
# sampling

@pytest.mark.slow
def test_two_processes_sample_the_text_of_one_and_process_0_prints_it(finished):
    out, _ = finished
    flags = ['--num_samples=2', '--max_new_tokens=12', '--start=the', '--top_k=5', '--stream=True']
    one = run_script('sample_jax.py', f'--out_dir={out}', '--device=cpu:0', *flags)
    assert len(one.stdout) > 40
    with Processes(2, out, '--device=cpu', *flags, '--tensor=2', script='sample_jax.py') as processes:
        results = processes.results()
    assert [code for code, *_ in results] == [0, 0], results
    texts = [re.sub(r'\[Gloo\].*\n', '', text) for _, text, _ in results]  # which XLA:CPU prints
    assert texts == [one.stdout, '']
    assert [f'{out}, checkpoint of iteration ' in err for *_, err in results] == [True, False]
    assert '; 2 x cpu' in results[0][2]
    with Processes(2, out, '--device=cpu', *flags, script='sample_jax.py') as processes:
        for code, _, err in processes.results():
            assert code == 2
            assert re.fullmatch('error: .*tensor=1 x expert=1 must be 2, all devices of the 2 processes.*\n', err), err


@pytest.mark.slow
@pytest.mark.long
def test_a_file_of_samples_of_several_processes_is_continued_by_one(finished, tmp_path):
    out, path = finished[0], tmp_path / 'a.jsonl'
    flags = ['--num_samples=3', '--max_new_tokens=12', '--start=the', '--device=cpu', '--tensor=2', '--batch_size=1',
             f'--output={path}']
    with Processes(2, out, *flags, script='sample_jax.py') as processes:
        assert [code for code, *_ in processes.results()] == [0, 0]
    whole = path.read_text()
    path.write_text(whole.splitlines(keepends=True)[0])  # as of a command that was killed
    with Processes(2, out, *flags, script='sample_jax.py') as processes:
        results = processes.results()
    assert [code for code, *_ in results] == [2, 2]
    assert all('is there: several processes do not continue it' in err for *_, err in results)
    assert path.read_text() == whole.splitlines(keepends=True)[0]
    again = succeeded(run_script('sample_jax.py', f'--out_dir={out}', *flags))
    assert '1 samples are in' in again.stderr
    texts = [[json.loads(line)['text'] for line in text.splitlines()] for text in (path.read_text(), whole)]
    assert texts[0] == texts[1]


def test_several_processes_do_not_chat(monkeypatch):
    monkeypatch.setattr('jax.process_count', lambda: 2)
    monkeypatch.setattr('jax_devices.processes.check_agreement', lambda *args: None)  # would wait for another
    result = run_script('sample_jax.py', '--interactive=True', '--device=cpu', '--tensor=8')
    assert_refused(result, 'interactive takes one process')
