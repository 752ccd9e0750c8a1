"""What is printed and recorded of an iteration and an evaluation."""
import time
import types

import pytest

from jax_flags import UserError
from jax_run.log import RunLog


@pytest.fixture
def log(tmp_path):
    """(a log on an accelerator, the records that it writes)."""
    records = []
    metrics_log = types.SimpleNamespace(write=records.append, path=tmp_path / 'metrics.jsonl')
    run = types.SimpleNamespace(iter_num=0, flags={'out_dir': 'out', 'log_interval': 2, 'max_iters': 9})
    log = RunLog(run, metrics_log, tokens_per_iter=8, is_synchronous=False, started=time.perf_counter() - 3,
                 imports_s=0.5, printed=('margin',))
    return log, records


METRICS = {'loss': 2.0, 'grad_norm': 3.0, 'lr': 0.1, 'margin': 4.0}


def test_every_metric_that_a_step_returns_is_recorded_and_chosen_ones_are_printed(log, capsys):
    log, records = log
    log.iteration(0, METRICS | {'another': 5.0})
    log.pause()
    assert records[0].items() >= {'iter': 0, 'another': 5.0, **METRICS}.items()
    first, line = capsys.readouterr().out.splitlines()
    assert first.startswith('first iteration: 3.0') and first.endswith('(imports took 0.50 s)')
    assert line.startswith('iter 0: loss 2.0000, time ') and line.endswith(', margin 4.0000')
    assert 'another' not in line


def test_the_time_of_a_line_is_the_mean_since_the_line_before_without_evaluations_and_saves(log):
    log, records = log
    for i in range(4):
        time.sleep(0.02)
        log.iteration(i, METRICS)
        if i == 1:
            log.pause()
            log.pause()  # an evaluation, then a save
            time.sleep(0.5)
            log.resume()
    log.flush()
    times = [record['time_ms'] for record in records]
    assert len(times) == 2 and all(20 <= ms < 150 for ms in times)
    assert records[1]['tokens_per_sec'] == pytest.approx(8000 / times[1])


@pytest.fixture
def clock(log, monkeypatch):
    """[the time that the log reads], which starts as it does."""
    now = [log[0].start]
    monkeypatch.setattr('jax_run.log.time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_the_eta_is_the_time_of_the_iterations_that_are_left(log, clock, capsys):
    log, _ = log
    clock[0] += 10
    log.iteration(0, METRICS)
    log.flush()
    assert ', eta 0:01:20, ' in capsys.readouterr().out  # of 8 iterations


def test_the_seconds_of_evaluations_are_added_up_without_what_is_between_them(log, clock):
    log, _ = log
    for i in (0, 5):
        clock[0] += 10
        log.pause()
        clock[0] += 2
        log.evaluation(i, {'train': {'loss': 1.0}, 'val': {'loss': 2.0}})
        clock[0] += 1  # a save
        log.resume()
    assert log.evaluating_s == pytest.approx(4)


def test_an_iteration_is_logged_when_the_next_one_is_under_way_and_every_log_interval(log):
    log, records = log
    for i in range(5):
        log.iteration(i, METRICS)
        assert [record['iter'] for record in records] == list(range(0, i, 2))
    log.close()  # as after a failure
    assert records[-1]['iter'] == 4


def test_a_skipped_iteration_is_said_in_its_place(log, capsys):
    log, records = log
    log.iteration(0, METRICS)
    log.iteration(1, None)
    assert [record['iter'] for record in records] == [0, 1] and records[1]['loss'] is None
    assert capsys.readouterr().out.splitlines()[-1] == 'iter 1: skipped, none of its tokens counts in the loss'


def test_an_end_that_moves_is_a_line_a_record_and_the_end_of_the_bar(log, capsys):
    log, records = log
    log.move_end(types.SimpleNamespace(flags={'max_iters': 12, 'lr_decay_iters': 12}), 3)
    assert records == [{'iter': 3, 'max_iters': 12}] and log.max_iters == log.bar.total == 12
    assert capsys.readouterr().out == 'iter 3: the speed has changed: max_iters=12, also lr_decay_iters\n'


@pytest.mark.parametrize('metrics, is_fine', [
    ({'loss': float('nan')}, False), ({'grad_norm': float('inf')}, False),
    ({'grad_norm': float('inf'), 'loss_scale': 2.0**16}, True),  # float16 skips the update
    ({'grad_norm': float('inf'), 'loss_scale': 0.5}, False)])
def test_a_loss_or_a_gradient_that_is_not_finite_stops_the_run(log, metrics, is_fine):
    log, _ = log
    log.iteration(7, METRICS | metrics)
    if is_fine:
        return log.flush()
    with pytest.raises(UserError, match='iteration 7 has loss .* any checkpoints in out are from before'):
        log.flush()


def test_an_evaluation_is_a_line_and_a_record_with_each_set_of_a_mixture_by_its_name(log, capsys):
    log, records = log
    losses = {'train': {'loss': 1.0, 'bpb': 1.5}, 'val': {'loss': 2.0, 'bpb': 3.0}, 'val_my_web': {'loss': 4.0}}
    log.evaluation(5, losses, 'a text')
    assert records == [{'iter': 5, 'train_loss': 1.0, 'train_bpb': 1.5, 'val_loss': 2.0, 'val_bpb': 3.0,
                        'val_loss_my_web': 4.0, 'sample': 'a text'}]
    assert capsys.readouterr().out.splitlines() == [
        'step 5: train loss 1.0000, val loss 2.0000, val bpb 3.0000, val loss my_web 4.0000', 'a text',
        '---------------']
    with pytest.raises(UserError, match='the loss is not finite at iteration 5'):
        log.evaluation(5, {'train': {'loss': 1.0}, 'val': {'loss': float('inf')}})
