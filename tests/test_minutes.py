"""--minutes: how many iterations fit, by a clock of its own."""
import time
import types

import numpy as np
import pytest

import jax_minutes
from jax_files.sources import Rows
from jax_minutes import fit_to_minutes, say_if_few

FLAGS = {
    'minutes': 10.0, 'warmup_iters': 100, 'learning_rate': 1e-3, 'decay_lr': True, 'lr_schedule': 'cosine',
    'lr_decay_iters': 7, 'min_lr': 0.0, 'beta1': 0.9, 'beta2': 0.99, 'weight_decay': 0.1, 'optimizer': 'adamw'}


class Machine:
    """20 s to compile a step, or 1 s to load it, 3 s to make a state, 0.1 s for an iteration, 2 s for an evaluation."""

    def __init__(self, monkeypatch, is_cached):
        self.now = 105.0  # 5 s after the start
        self.compiling = 0.0  # as Stopwatch
        self.saved = 0.0
        self.is_cached = is_cached
        monkeypatch.setattr(time, 'perf_counter', lambda: self.now)
        monkeypatch.setattr(jax_minutes, 'start_state', self.make_state)

    def make_state(self, *args):
        self.now += 3
        return types.SimpleNamespace(params=np.zeros(1))

    def make_step(self, schedule):
        self.is_compiled = False
        return self.step

    def step(self, state, batch):
        if not self.is_compiled:
            seconds = 1 if self.is_cached else 20
            self.now += seconds
            self.compiling += seconds
            self.saved += 19 if self.is_cached else 0
            self.is_compiled = True
        self.now += 0.1
        return state, {}

    def evaluate(self, state):
        self.now += 2

    def lap(self):
        pass


@pytest.mark.parametrize('eval_interval', [1, 50, 10**6])
@pytest.mark.parametrize('is_cached', [False, True])
def test_minutes_are_filled_with_iterations_and_evaluations(monkeypatch, capsys, eval_interval, is_cached):
    machine = Machine(monkeypatch, is_cached)
    run = types.SimpleNamespace(flags=FLAGS | {'eval_interval': eval_interval}, iter_num=0)
    parallel = types.SimpleNamespace(max_over_processes=lambda number: number)
    flags = fit_to_minutes(
        run, None, parallel, started=100.0, clock=machine, make_step=machine.make_step,
        make_batch=lambda iteration: {'x': 0}, evaluate=machine.evaluate, get_signal=lambda: 0)
    n = flags['max_iters']
    assert flags['lr_decay_iters'] == n
    assert flags['warmup_iters'] == 100  # fits
    assert f'minutes=10: max_iters={n}, also lr_decay_iters' in capsys.readouterr().out
    # the run, whose step has another schedule than what the cache holds
    machine.is_cached = False
    machine.make_state()
    machine.make_step(None)
    for _ in range(n):
        machine.step(None, None)
    for _ in range(n // eval_interval + 2):
        machine.evaluate(None)
    assert 570 < machine.now - 100 < 594  # 2% are left for saves


@pytest.mark.parametrize('n, said', [
    (7, 'only 7 iterations fit into 3 minutes (1.6 passes over the data)\n'), (50, '')])
def test_so_few_iterations_that_little_is_learned_are_said(capsys, n, said):
    rows = Rows(np.zeros((18, 5), np.uint16), block_size=4, seed=0)
    say_if_few({'max_iters': n, 'minutes': 3.0, 'gradient_accumulation_steps': 2, 'batch_size': 2}, rows)
    assert capsys.readouterr().out == said


def test_a_signal_ends_the_measuring(monkeypatch):
    machine = Machine(monkeypatch, is_cached=False)
    run = types.SimpleNamespace(flags=FLAGS | {'eval_interval': 50}, iter_num=0)
    parallel = types.SimpleNamespace(max_over_processes=lambda number: number)
    fit_to_minutes(
        run, None, parallel, started=100.0, clock=machine, make_step=machine.make_step,
        make_batch=lambda iteration: {'x': 0}, evaluate=machine.evaluate, get_signal=lambda: 15)
    assert machine.now < 105 + 3 + 20 + 0.3 + 2
