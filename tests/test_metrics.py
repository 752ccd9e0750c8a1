"""metrics.jsonl and loss.png of a run."""
import json
import tracemalloc

import numpy as np
import pytest

from jax_run.log import MetricsLog, loss_figure, plot_losses, read_metrics


def test_reopened_metrics_hold_each_iteration_once(tmp_path):
    log = MetricsLog(tmp_path)
    for i in range(5):
        log.write({'iter': i, 'loss': float(i)})
    log.write({'iter': 5, 'grad_norm': float('inf')})
    log.file.write('{"iter": 6, "lo')  # the process was killed while it wrote this line
    assert [*read_metrics(tmp_path)][-1] == {'iter': 5, 'grad_norm': None}
    log = MetricsLog(tmp_path, 3)
    log.write({'iter': 3, 'loss': 3.5})
    assert [record['iter'] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert [*read_metrics(tmp_path)][-1]['loss'] == 3.5


@pytest.mark.slow
def test_the_picture_of_a_long_run_takes_little_memory(tmp_path):
    n = 20000
    with open(tmp_path / 'metrics.jsonl', 'w') as file:
        for i in range(n):
            file.write(json.dumps({'iter': i, 'loss': 4.0, 'lr': 1e-3, 'grad_norm': 1.0, 'time_ms': 1.0}) + '\n')
    plot_losses(tmp_path)  # imports matplotlib and loads its fonts
    tracemalloc.start()
    plot_losses(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6, peak  # the records themselves take 8 MB


@pytest.mark.parametrize('line', [b'', b'{"iter": 1, "loss": 2.', b'\xff'])
def test_metrics_end_at_a_damaged_line(tmp_path, line):
    (tmp_path / 'metrics.jsonl').write_bytes(b'{"iter": 0}\n' + line + b'\n{"iter": 2}\n')
    assert [*read_metrics(tmp_path)] == [{'iter': 0}]


def test_the_loss_curves_become_a_picture(tmp_path):
    log = MetricsLog(tmp_path)
    for i in range(5):
        log.write({'iter': i, 'loss': 4.0 - i})
    log.write({'iter': 5, 'train_loss': 1.0, 'val_loss': 2.0})
    plot_losses(tmp_path)
    assert (tmp_path / 'loss.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


def test_an_evaluation_at_the_iteration_of_a_resume_is_kept_and_not_written_again(tmp_path):
    log = MetricsLog(tmp_path)
    evaluation = {'iter': 2, 'train_loss': 1.0, 'val_loss': 2.0}
    for record in ({'iter': 1, 'loss': 1.5}, evaluation, {'iter': 2, 'loss': 1.4}):
        log.write(record)
    log = MetricsLog(tmp_path, 2)
    for record in (evaluation, {'iter': 2, 'loss': 1.4}, {'iter': 3, 'loss': 1.3}):
        log.write(record)
    assert [record['iter'] for record in read_metrics(tmp_path)] == [1, 2, 2, 3]
    assert [record.get('val_loss') for record in read_metrics(tmp_path)] == [None, 2.0, None, None]


@pytest.mark.parametrize('n_evaluations, has_curve', [(3, True), (12, False)])
def test_with_few_evaluations_the_picture_has_a_smoothed_curve_of_the_iterations(tmp_path, n_evaluations, has_curve):
    records = [{'iter': i, 'loss': 5.0 - i / 100 + i % 2} for i in range(200)]
    records += [{'iter': 10 * i, 'train_loss': 4.0, 'val_loss': 4.5} for i in range(n_evaluations)]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    plot_losses(tmp_path)
    smoothed = loss_figure()[1]['smoothed'].get_ydata()
    assert len(smoothed) == (191 if has_curve else 0)
    if has_curve:
        np.testing.assert_allclose(np.diff(smoothed), -0.01, atol=1e-9)  # the zigzag is gone
