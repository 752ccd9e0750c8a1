"""What is printed and recorded of an iteration."""
import types

import pytest

from jax_flags import UserError
from jax_log import IterationLog


@pytest.fixture
def log():
    """(a log, the lines that it prints, the records that it writes)."""
    lines, records = [], []
    bar = types.SimpleNamespace(write=lines.append, update=lambda: None)
    clock = types.SimpleNamespace(lap=lambda: types.SimpleNamespace(compiling=1.0, running=2.0))
    metrics_log = types.SimpleNamespace(write=records.append)
    log = IterationLog(bar, clock, metrics_log, out_dir='out', log_interval=2, max_iters=9, tokens_per_iter=8,
                       mfu=None, imports_s=0.5, in_line=('margin',))
    return log, lines, records


METRICS = {'loss': 2.0, 'grad_norm': 3.0, 'lr': 0.1, 'margin': 4.0}


def test_every_metric_that_a_step_returns_is_recorded_and_those_in_line_are_printed(log):
    log, lines, records = log
    log.add(0, METRICS | {'another': 5.0}, wait=True)
    assert records[0].items() >= {'iter': 0, 'another': 5.0, **METRICS}.items()
    assert lines[0] == 'first iteration: imports 0.50 s, compiling 1.00 s, running 2.00 s'
    assert lines[1].startswith('iter 0: loss 2.0000, time ') and lines[1].endswith(', margin 4.0000')
    assert 'another' not in lines[1]


def test_an_iteration_is_logged_when_the_next_one_is_under_way_and_every_log_interval(log):
    log, _, records = log
    for i in range(5):
        log.add(i, METRICS, wait=False)
        assert [record['iter'] for record in records] == list(range(0, i, 2))
    log.flush()
    assert records[-1]['iter'] == 4


def test_a_skipped_iteration_is_said_in_its_place(log):
    log, lines, records = log
    log.add(0, METRICS, wait=False)
    log.skip(1)
    assert [record['iter'] for record in records] == [0, 1] and records[1]['loss'] is None
    assert lines[-1] == 'iter 1: skipped, none of its tokens counts in the loss'


@pytest.mark.parametrize('metrics, is_fine', [
    ({'loss': float('nan')}, False), ({'grad_norm': float('inf')}, False),
    ({'grad_norm': float('inf'), 'loss_scale': 2.0**16}, True),  # float16 skips the update
    ({'grad_norm': float('inf'), 'loss_scale': 0.5}, False)])
def test_a_loss_or_a_gradient_that_is_not_finite_stops_the_run(log, metrics, is_fine):
    log, _, _ = log
    if is_fine:
        return log.add(7, METRICS | metrics, wait=True)
    with pytest.raises(UserError, match='iteration 7 has loss .* the checkpoints in out are from before'):
        log.add(7, METRICS | metrics, wait=True)
