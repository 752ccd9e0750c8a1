"""--minutes: how many iterations fit."""
import time
import types

import numpy as np
import pytest

from jax_run.minutes import iterations_that_fit, say_if_few_iterations
from jax_run.sources import Rows
from jax_run.start import Run

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
    assert run.flags == {'warmup_iters': 5, 'max_iters': 50, 'lr_decay_iters': 50} and run.has_length


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
