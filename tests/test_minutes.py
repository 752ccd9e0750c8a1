"""--minutes: how many iterations fit."""
import json
import time
import types

import numpy as np
import pytest

from jax_flags import UserError, read_ends, write_json
from jax_run import minutes
from jax_run.checkpoints import choose_checkpoint
from jax_run.log import MetricsLog
from jax_run.minutes import Deadline, iterations_that_fit, say_if_few_iterations
from jax_run.sources import Rows
from jax_run.start import Run, schedule_end
from tests.common import RESUME, assert_refused, final_state, records_of, succeeded, train

ONE_PROCESS = types.SimpleNamespace(max_over_processes=lambda number: number)


def fit(minutes, eval_interval, signum=0, warmup_iters=2):
    """The iterations that fit, of which one takes 10 ms, an evaluation 50 ms."""
    def step(state, batch):
        time.sleep(0.01)
        return state, {}

    run = types.SimpleNamespace(iter_num=0, flags={
        'minutes': minutes, 'warmup_iters': warmup_iters, 'eval_interval': eval_interval})
    clock = types.SimpleNamespace(compiling=0.0, lap=lambda: None, started=time.perf_counter())
    return iterations_that_fit(
        run, types.SimpleNamespace(params=np.zeros(1)), step, ONE_PROCESS, make_batch=lambda iteration: {'x': 0},
        evaluate=lambda state: time.sleep(0.05), clock=clock, stop=types.SimpleNamespace(signum=signum))


def test_the_time_of_two_evaluations_and_of_the_saves_is_left(monkeypatch):
    now = 0.0

    def spend(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(minutes.time, 'perf_counter', lambda: now)
    run = types.SimpleNamespace(iter_num=0, flags={'minutes': 1.0, 'warmup_iters': 2, 'eval_interval': 10**9})
    n = iterations_that_fit(
        run, types.SimpleNamespace(params=np.zeros(1)), lambda state, batch: (state, spend(0.01)), ONE_PROCESS,
        make_batch=lambda iteration: {'x': 0}, evaluate=lambda state: spend(5.0),
        clock=types.SimpleNamespace(compiling=0.0, lap=lambda: None, started=0.0), stop=types.SimpleNamespace(signum=0))
    measuring = 60 * 0.03 + 5
    assert n * 0.01 == pytest.approx(60 * 0.98 - measuring - 2 * 5, abs=0.05)


@pytest.mark.parametrize('eval_interval, ms', [(1, 60), (5, 20), (10**6, 10)])
def test_minutes_are_filled_with_iterations_and_evaluations(eval_interval, ms, capsys):
    n = fit(0.05, eval_interval)  # 3 s
    assert 1000 < n * ms < 2900  # fewer where other programs run beside it
    assert f'minutes=0.05: max_iters={n}, also lr_decay_iters, warmup_iters=2' in capsys.readouterr().out


def test_the_schedule_has_as_many_iterations_and_a_warm_up_that_does_not_fit_is_a_tenth(capsys):
    n = fit(0.02, 10, warmup_iters=1000)
    assert f'warmup_iters={n // 10} ' in capsys.readouterr().out
    flags = {'warmup_iters': 1000, 'max_iters': 5, 'lr_decay_iters': 0}
    run = Run(flags, {}, [], 'float32', None, {}, {}, None, has_length=False).with_iterations(50)
    assert run.flags == {
        'warmup_iters': 5, 'max_iters': 50, 'lr_decay_iters': 50, 'earlier_ends': ''} and run.has_length


def test_one_iteration_is_made_where_none_fits():
    assert fit(0.001, 10) == 1


def test_a_signal_ends_the_measuring():
    begun = time.perf_counter()
    fit(10.0, 10, signum=15)
    assert time.perf_counter() - begun < 2


@pytest.mark.parametrize('n, said', [
    (7, 'only 7 iterations fit into 3 minutes (1.6 passes over the data): start, compilation and measuring have taken '
        '150 of 180 s; give it more, as --minutes=25\n'), (50, '')])
def test_so_few_iterations_that_little_is_learned_are_said(capsys, n, said):
    rows = Rows(np.zeros((18, 5), np.uint16), block_size=4, seed=0)
    say_if_few_iterations({'max_iters': n, 'minutes': 3.0, 'gradient_accumulation_steps': 2, 'batch_size': 2},
                          rows, 150.0)
    assert capsys.readouterr().out == said


# -----------------------------------------------------------------------------
# the end moves with the speed

class Simulation:
    """A run of 60 s whose iterations take 20 ms at first, and after `change_at` seconds `factor` times as long."""

    def __init__(self, patch, change_at, factor, eval_s=0.5):
        self.now = self.evaluating_s = 0.0
        self.change_at, self.factor, self.eval_s = change_at, factor, eval_s
        patch.setattr(minutes.time, 'perf_counter', lambda: self.now)

    def spend(self, seconds):
        seconds *= self.factor if self.now >= self.change_at else 1
        self.now += seconds
        return seconds

    def train(self, max_iters, eval_interval=500):
        """Trains for a minute. Returns (seconds, number of iterations, how often the end has moved)."""
        run = types.SimpleNamespace(iter_num=0, flags={
            'max_iters': max_iters, 'eval_interval': eval_interval, 'minutes': 1.0})
        deadline = Deadline(run, ONE_PROCESS, 0.0)
        n_moves = 0
        i = 0
        while i < deadline.max_iters:
            n_moves += deadline.has_moved(i, self)
            if i % eval_interval == 0:
                self.evaluating_s += self.spend(self.eval_s)
            self.spend(0.02)
            i += 1
        self.spend(self.eval_s)
        return self.now, i, n_moves


@pytest.mark.parametrize('factor', [0.5, 2.0])
@pytest.mark.parametrize('change_at', [0.0, 20.0, 40.0])
def test_a_run_ends_in_time_if_the_speed_halves_or_doubles_at_any_third(monkeypatch, factor, change_at):
    seconds, _, n_moves = Simulation(monkeypatch, change_at, factor).train(2850)
    assert 60 * 0.97 < seconds < 60 * 1.03
    assert n_moves


def test_the_end_stays_where_the_speed_stays(monkeypatch):
    fitting = 2752  # (58.8 s less two evaluations) / (20 ms and a 500th of an evaluation)
    seconds, n, n_moves = Simulation(monkeypatch, 0.0, 1.0).train(fitting)
    assert (n, n_moves) == (fitting, 0) and 58 < seconds < 60


def test_the_schedule_of_an_iteration_ends_where_it_ended_then():
    flags = {'earlier_ends': '4:8,9:16', 'lr_decay_iters': 12}
    assert [schedule_end(flags, i) for i in (0, 3, 4, 8, 9, 50)] == [8, 8, 16, 16, 12, 12]
    assert schedule_end({**flags, 'earlier_ends': ''}, 3) == 12


def test_an_end_that_moves_into_the_warm_up_trains_on_and_saves(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(minutes, 'iterations_that_fit', lambda *args, **kwargs: 16)
    monkeypatch.setattr(minutes, 'CHECKED', 1000)  # before each iteration
    monkeypatch.setattr(Deadline, 'count_fitting', lambda self, i, evaluating_s: 6 - i)
    said = succeeded(train(tmp_path / 'out', *flags, '--minutes=5', '--warmup_iters=12')).stdout
    assert 'only 16 iterations fit into 5 minutes (' in said
    assert 'the speed has changed: max_iters=6, lr_decay_iters=13, after the warm-up' in said
    assert choose_checkpoint(tmp_path / 'out')[0] == 6


@pytest.mark.parametrize('text', ['4', '4:8,', '9:16,4:8', '4:8,4:9', 'a:b', '-1:4'])
def test_ends_that_cannot_be_read_are_refused(text):
    with pytest.raises(UserError, match='earlier_ends'):
        read_ends(text)


def cosine(i, end, warmup=2, peak=1e-2, low=6e-5):
    return low + 0.5 * (1 + np.cos(np.pi * (i - warmup) / (end - warmup))) * (peak - low)


MOVED = ['--minutes=0', '--max_iters=14', '--lr_decay_iters=14', '--earlier_ends=4:9,8:20', '--save_interval=3',
         '--keep=9']


@pytest.fixture(scope='module')
def moved(tmp_path_factory, flags):
    """A run of 14 iterations with an end that has moved twice."""
    out = tmp_path_factory.mktemp('moved') / 'out'
    succeeded(train(out, *flags, *MOVED))
    return out


def test_the_learning_rate_follows_the_ends(moved):
    rates = {record['iter']: record['lr'] for record in records_of(moved) if 'lr' in record}
    for i in range(3, 14):
        assert rates[i] == pytest.approx(cosine(i, 9 if i < 4 else 20 if i < 8 else 14), rel=1e-5)


def test_a_resume_across_a_moved_end_has_the_same_bits(moved, flags, tmp_path):
    out = tmp_path / 'out'
    succeeded(train(out, *flags, *MOVED, '--max_iters=6'))
    succeeded(train(out, *RESUME, '--max_iters=14'))
    assert final_state(out) == final_state(moved)


def test_verify_trains_across_a_moved_end(moved):
    said = succeeded(train(moved, *RESUME, '--verify=9')).stdout
    assert said.count('the same bits') == 6


def test_a_schedule_that_cannot_be_is_refused_before_it_begins(flags, tmp_path):
    for ends in ('4:1', '4:9,8:1'):
        assert_refused(train(tmp_path / 'out', *flags, '--max_iters=9', f'--earlier_ends={ends}'),
                       'lr_decay_iters=1 must be more than warmup_iters=2')
    assert not (tmp_path / 'out').exists()


@pytest.fixture
def moving(monkeypatch):
    """{iteration: the number of iterations that fit then} of a run in which 16 seem to fit at first."""
    lengths = {2: 18, 5: 11, 9: 14}
    monkeypatch.setattr(minutes, 'iterations_that_fit', lambda *args, **kwargs: 16)
    monkeypatch.setattr(minutes, 'CHECKED', 1000)  # before each iteration
    monkeypatch.setattr(
        Deadline, 'count_fitting', lambda self, i, evaluating_s: lengths.get(i, self.max_iters) - i)
    return lengths


def test_what_config_json_says_gives_the_bits_of_a_run_whose_end_was_moved(flags, tmp_path, moving):
    said = succeeded(train(tmp_path / 'out', *flags, '--minutes=5', '--keep=9', '--save_interval=4')).stdout
    assert 'iter 5: the speed has changed: max_iters=11, also lr_decay_iters' in said
    settings = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert settings['earlier_ends'] == settings['manifest']['flags']['earlier_ends'] == '2:16,5:18,9:11'
    assert settings['max_iters'] == settings['lr_decay_iters'] == 14
    moves = {record['iter']: record['max_iters'] for record in records_of(tmp_path / 'out') if 'max_iters' in record}
    assert moves == moving

    # the same command with what config.json says
    names = ('max_iters', 'lr_decay_iters', 'warmup_iters', 'earlier_ends')
    again = [f'--{name}={settings[name]}' for name in names]
    succeeded(train(tmp_path / 'again', *flags, *again))
    assert final_state(tmp_path / 'again') == final_state(tmp_path / 'out')

    # and a verification, across checkpoints with other ends
    said = succeeded(train(tmp_path / 'out', *RESUME, '--verify=9')).stdout
    assert said.count('the same bits') == 5

    # a resume at the iteration of a move keeps its line
    log = MetricsLog(tmp_path / 'out', 9)
    log.close()
    assert [record for record in records_of(tmp_path / 'out') if record['iter'] == 9] == [{'iter': 9, 'max_iters': 14}]


def test_a_config_json_that_cannot_be_written_again_does_not_end_the_run(flags, tmp_path, moving, monkeypatch):
    def write_once(path, values):
        if path.exists():
            raise OSError(28, 'No space left on device')
        write_json(path, values)

    monkeypatch.setattr('jax_run.out_dir.write_json', write_once)
    result = train(tmp_path / 'out', *flags, '--minutes=5')
    assert result.returncode == 0 and result.stderr.count('config.json anew: No space left on device') == 3
    step, meta = choose_checkpoint(tmp_path / 'out')
    assert step == 14 and meta['flags']['earlier_ends'] == '2:16,5:18,9:11'
