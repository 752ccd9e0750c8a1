"""What is printed and recorded of an iteration."""
import time
import types

import pytest

from jax_flags import UserError
from jax_log import IterationLog


class Clock:
    """Takes the place of time.perf_counter."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, 'perf_counter', lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def log(clock):
    """(a log, the lines that it prints, the records that it writes)."""
    lines, records = [], []
    bar = types.SimpleNamespace(write=lines.append, update=lambda: None, set_postfix_str=lambda text, refresh: None)
    metrics_log = types.SimpleNamespace(write=records.append)
    log = IterationLog(bar, metrics_log, out_dir='out', log_interval=2, max_iters=9, tokens_per_iter=8, mfu=None,
                       started=clock.now - 3, imports_s=0.5, in_line=('margin',))
    return log, lines, records


METRICS = {'loss': 2.0, 'grad_norm': 3.0, 'lr': 0.1, 'margin': 4.0}


def test_every_metric_that_a_step_returns_is_recorded_and_those_in_line_are_printed(log, clock):
    log, lines, records = log
    clock.now += 1
    log.add(0, METRICS | {'another': 5.0}, wait=True)
    log.pause()
    assert records[0].items() >= {'iter': 0, 'another': 5.0, **METRICS}.items()
    assert lines[0] == 'first iteration: 4.00 s after the start, of which imports took 0.50 s'
    assert lines[1].startswith('iter 0: loss 2.0000, time ') and lines[1].endswith(', margin 4.0000')
    assert 'another' not in lines[1]


def make_iterations(log, clock, numbers, seconds):
    for number in numbers:
        clock.now += seconds
        log.add(number, METRICS, wait=True)


def test_the_time_of_a_line_is_the_mean_since_the_line_before_without_evaluations_and_saves(log, clock):
    log, _, records = log
    make_iterations(log, clock, range(3), seconds=1)
    clock.now += 4  # iteration 3
    log.add(3, METRICS, wait=False)
    log.pause()
    log.pause()  # an evaluation, then a save
    clock.now += 1000
    log.resume()
    make_iterations(log, clock, [4], seconds=2)
    assert [record['time_ms'] for record in records] == pytest.approx([1000, 1000, 3000])
    assert records[-1]['tokens_per_sec'] == pytest.approx(8 / 3)


def test_compilation_counts_neither_in_the_time_nor_in_the_first_eta(log, clock):
    log, lines, records = log
    clock.now += 60
    log.exclude(50)
    log.add(0, METRICS, wait=True)
    assert len(lines) == 1  # the first iteration's own line waits for the second's time
    make_iterations(log, clock, [1], seconds=1)
    assert records[0]['time_ms'] == pytest.approx(10_000)
    assert ', eta 0:00:08,' in lines[1] and len(lines) == 2


def test_a_pause_after_the_first_iteration_prints_its_line_before(log, clock):
    log, lines, _ = log
    make_iterations(log, clock, [0], seconds=2)
    log.pause()
    assert ', eta 0:00:16,' in lines[1]


def test_an_iteration_is_logged_when_the_next_one_is_under_way_and_every_log_interval(log, clock):
    log, _, records = log
    for i in range(5):
        clock.now += 1
        log.add(i, METRICS, wait=False)
        assert [record['iter'] for record in records] == list(range(0, i, 2))
    log.flush()
    assert records[-1]['iter'] == 4


def test_a_skipped_iteration_is_said_in_its_place(log, clock):
    log, lines, records = log
    clock.now += 1
    log.add(0, METRICS, wait=False)
    log.skip(1)
    assert [record['iter'] for record in records] == [0, 1] and records[1]['loss'] is None
    assert lines[-1] == 'iter 1: skipped, none of its tokens counts in the loss'


@pytest.mark.parametrize('metrics, is_fine', [
    ({'loss': float('nan')}, False), ({'grad_norm': float('inf')}, False),
    ({'grad_norm': float('inf'), 'loss_scale': 2.0**16}, True),  # float16 skips the update
    ({'grad_norm': float('inf'), 'loss_scale': 0.5}, False)])
def test_a_loss_or_a_gradient_that_is_not_finite_stops_the_run(log, clock, metrics, is_fine):
    log, _, _ = log
    clock.now += 1
    if is_fine:
        return log.add(7, METRICS | metrics, wait=True)
    with pytest.raises(UserError, match='iteration 7 has loss .* the checkpoints in out are from before'):
        log.add(7, METRICS | metrics, wait=True)
