"""--minutes: how many iterations fit."""
import time
import types

import numpy as np
import pytest

from jax_run.minutes import fit_to_minutes, say_if_few_iterations
from jax_run.sources import Rows

ONE_PROCESS = types.SimpleNamespace(max_over_processes=lambda number: number)
CLOCK = types.SimpleNamespace(compiling=0.0, lap=lambda: None)


def fit(minutes, eval_interval, get_signal=lambda: 0, warmup_iters=2):
    """The run's flags after fit_to_minutes; an iteration takes 10 ms, an evaluation 50 ms."""
    def step(state, batch):
        time.sleep(0.01)
        return state, {}

    run = types.SimpleNamespace(iter_num=0, flags={
        'minutes': minutes, 'warmup_iters': warmup_iters, 'eval_interval': eval_interval})
    fit_to_minutes(
        run, types.SimpleNamespace(params=np.zeros(1)), step, ONE_PROCESS, started=time.perf_counter(), clock=CLOCK,
        make_batch=lambda iteration: {'x': 0}, evaluate=lambda state: time.sleep(0.05), get_signal=get_signal)
    return run.flags


@pytest.mark.parametrize('eval_interval, ms', [(1, 60), (5, 20), (10**6, 10)])
def test_minutes_are_filled_with_iterations_and_evaluations(eval_interval, ms, capsys):
    flags = fit(0.05, eval_interval)  # 3 s
    assert 2000 < flags['max_iters'] * ms < 2900
    assert flags['lr_decay_iters'] == flags['max_iters'] and flags['warmup_iters'] == 2
    assert f"minutes=0.05: max_iters={flags['max_iters']}, also lr_decay_iters" in capsys.readouterr().out


def test_a_warm_up_that_does_not_fit_is_a_tenth():
    flags = fit(0.02, 10, warmup_iters=1000)
    assert flags['warmup_iters'] == flags['max_iters'] // 10


def test_a_signal_ends_the_measuring():
    begun = time.perf_counter()
    fit(10.0, 10, get_signal=lambda: 15)
    assert time.perf_counter() - begun < 2


@pytest.mark.parametrize('n, said', [
    (7, 'only 7 iterations fit into 3 minutes (1.6 passes over the data)\n'), (50, '')])
def test_so_few_iterations_that_little_is_learned_are_said(capsys, n, said):
    rows = Rows(np.zeros((18, 5), np.uint16), block_size=4, seed=0)
    say_if_few_iterations({'max_iters': n, 'minutes': 3.0, 'gradient_accumulation_steps': 2, 'batch_size': 2}, rows)
    assert capsys.readouterr().out == said
