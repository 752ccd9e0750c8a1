"""metrics.jsonl and loss.png of a run."""
import json
import os
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


DAMAGED = [b'', b'{"iter": 1, "loss": 2.', b'\xff', 100 * b'\0', b'{"it\0er": 1}', b'[1]', b'3', b'{"iter": "x"}']


@pytest.mark.parametrize('line', DAMAGED)
def test_a_line_that_cannot_be_read_does_not_cost_the_lines_behind_it(tmp_path, capsys, line):
    damaged = b'{"iter": 0}\n' + line + b'\n{"iter": 2}\n{"iter": 3}\n{"iter": 4'
    (tmp_path / 'metrics.jsonl').write_bytes(damaged)
    assert [record['iter'] for record in read_metrics(tmp_path)] == [0, 2, 3]
    MetricsLog(tmp_path, 3).close()
    assert [record['iter'] for record in read_metrics(tmp_path)] == [0, 2]
    said = capsys.readouterr().out
    assert said.startswith('1 lines of ') and said.endswith('the file as it was is kept as metrics.jsonl.damaged\n')
    assert (tmp_path / 'metrics.jsonl.damaged').read_bytes() == damaged
    MetricsLog(tmp_path, 3).close()  # nothing is damaged any more, but for a line that is not whole, as after a kill
    assert capsys.readouterr().out == '' and not (tmp_path / 'metrics.jsonl.damaged1').exists()


def test_metrics_that_cannot_be_written_for_a_while_are_written_later(tmp_path, capsys, monkeypatch):
    log = MetricsLog(tmp_path)
    write, is_full = os.write, [False]

    def write_some(file, content):  # a full disk takes a part of the line that fills it
        if is_full[0] and is_full.append(0) is None and len(is_full) > 2:
            raise OSError(28, 'No space left on device')
        return write(file, content[:7])

    monkeypatch.setattr('os.write', write_some)
    for i in range(6):
        is_full[0] = 2 <= i < 5
        log.write({'iter': i})
    assert [record['iter'] for record in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count('No space left on device') == 1
    is_full[0] = True
    log.write({'iter': 6})
    log.close()
    assert 'lacks its last 1 lines' in capsys.readouterr().err


def test_the_loss_curves_become_a_picture(tmp_path):
    log = MetricsLog(tmp_path)
    for i in range(5):
        log.write({'iter': i, 'loss': 4.0 - i})
    log.write({'iter': 5, 'train_loss': 1.0, 'val_loss': 2.0})
    plot_losses(tmp_path)
    assert (tmp_path / 'loss.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


@pytest.mark.parametrize('more, label', [({'val_bpb': None}, 'val, nan bits per byte'), ({}, 'val')])
def test_the_picture_has_the_bits_per_byte_of_its_own_run(tmp_path, more, label):
    for bits, expected in (({'val_bpb': 1.5}, 'val, 1.5000 bits per byte'), (more, label)):
        record = {'iter': 1, 'train_loss': 2.0, 'val_loss': 2.0, **bits}
        (tmp_path / 'metrics.jsonl').write_text(json.dumps(record) + '\n')
        plot_losses(tmp_path)
        assert loss_figure()[1]['val_loss'].get_label() == expected


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
