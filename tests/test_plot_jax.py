"""plot_jax.py: runs in one picture and one table."""
import json
import os
from pathlib import Path

import pytest

from jax_run.compare import compare_runs, read_run
from jax_run.log import loss_figure, plot_losses
from tests.common import assert_refused, refusal, run_script, succeeded


def write_run(folder, learning_rate, vals, **flags):
    """Makes an out_dir as a run leaves it: settings, and an evaluation for each of vals, in bits per byte."""
    folder.mkdir()
    settings = {'learning_rate': learning_rate, 'batch_size': 4, 'gradient_accumulation_steps': 2, 'block_size': 8}
    (folder / 'config.json').write_text(json.dumps(settings | flags | {'out_dir': str(folder)}))
    records = []
    for i, val in enumerate(vals):
        records.append({'iter': 10 * i, 'train_loss': 2 * val, 'val_loss': 2 * val, 'train_bpb': val, 'val_bpb': val})
        records.append({'iter': 10 * i, 'loss': 2 * val, 'time_ms': 500.0, 'tokens_per_sec': 128.0})
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    return folder


def test_runs_are_compared_by_what_differs_the_best_first(tmp_path):
    a = write_run(tmp_path / 'out-a', 0.1, [3.0, 2.5, 2.75], seed=1)
    b = write_run(tmp_path / 'out-b', 0.3, [3.0, 2.25], seed=1, num_processes=2, process_id=0, minutes=5.0)
    picture = tmp_path / 'sweep.png'
    result = succeeded(run_script('plot_jax.py', a, b, '--x=tokens', f'--output={picture}'))
    header, best, other, saved = result.stdout.splitlines()
    assert header.split() == ['run', 'learning_rate', 'best', 'val', 'last', 'val', 'in', 'tok/s', 'seconds']
    assert best.split() == [str(b), '0.3', '2.2500', '2.2500', 'bits', 'per', 'byte', '128', '6']
    assert other.split() == [str(a), '0.1', '2.5000', '2.7500', 'bits', 'per', 'byte', '128', '10']
    assert picture.read_bytes().startswith(b'\x89PNG') and saved == f'saved {picture}'


def test_an_evaluation_between_two_lines_of_the_log_has_its_share_of_their_time(tmp_path):
    run = write_run(tmp_path / 'out', 0.1, [])
    records = [{'iter': 0, 'val_loss': 4.0}, {'iter': 0, 'time_ms': 1000.0}, {'iter': 5, 'val_loss': 3.0},
               {'iter': 10, 'time_ms': 2000.0}, {'iter': 15, 'val_loss': 2.0}]
    (run / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    found = read_run(run, 'seconds')
    assert [x for x, _, _ in found['points']] == [0, 1 + 4 * 2, 1 + 10 * 2 + 4 * 2]
    assert found['seconds'] == 1 + 10 * 2 + 4 * 2


def test_the_speed_is_the_median_of_the_log(tmp_path):
    run = write_run(tmp_path / 'out', 0.1, [3.0])
    records = [{'iter': i, 'time_ms': 1.0, 'tokens_per_sec': speed} for i, speed in enumerate([5.0, 130.0, 128.0])]
    with open(run / 'metrics.jsonl', 'a') as file:
        file.writelines(json.dumps(record) + '\n' for record in records)
    assert read_run(run, 'iterations')['speed'] == 128


def test_runs_that_evaluate_different_numbers_of_sequences_are_named(tmp_path, capsys):
    a = write_run(tmp_path / 'out-a', 0.1, [3.0], eval_iters=10)
    b = write_run(tmp_path / 'out-b', 0.1, [3.0], eval_iters=250)
    compare_runs([a, b])
    assert 'different numbers of sequences (40, 1,000: eval_iters * batch_size)' in capsys.readouterr().out
    compare_runs([a, a])
    assert 'different numbers' not in capsys.readouterr().out


def test_tokens_are_counted_by_the_batch_sizes_that_a_run_has_had(tmp_path):
    changes = [{'until': 5, 'flags': {'batch_size': [1, 2]}}, {'until': 10, 'flags': {'batch_size': [2, 4]}}]
    run = write_run(tmp_path / 'out', 0.1, [3.0, 2.5, 2.75], manifest={'data': [], 'earlier': changes})
    sequences = [0, 5 * 2 + 5 * 4, 5 * 2 + 5 * 4 + 10 * 8]
    assert [x for x, _, _ in read_run(run, 'tokens')['points']] == [8 * n for n in sequences]


@pytest.mark.parametrize('vals, best', [([1.0, 2.0, 2.5], 2.5), ([1.0, 2.0], 2.0)])
@pytest.mark.parametrize('is_old', [False, True])
def test_the_best_loss_is_that_on_the_data_that_the_run_has_now(tmp_path, vals, best, is_old):
    manifest = {'data': [], 'earlier_data': [{'until': 10, 'data': []}]}
    run = write_run(tmp_path / 'out', 0.1, vals, **({} if is_old else {'manifest': manifest}))
    (run / 'ckpt' / '10' / 'meta').mkdir(parents=True)  # an earlier version has the manifest in checkpoints only
    (run / 'ckpt' / '10' / 'meta' / 'metadata').write_text(json.dumps({'manifest': manifest}))
    assert read_run(run, 'iterations')['best'] == best
    with open(run / 'metrics.jsonl', 'a') as file:
        file.write(json.dumps({'iter': 10, 'val_loss': 3.0, 'val_bpb': 1.5, 'anew': True}) + '\n')
    assert read_run(run, 'iterations')['best'] == 1.5


def test_a_run_without_an_evaluation_is_refused_and_no_picture_drawn(tmp_path):
    a = write_run(tmp_path / 'out-a', 0.1, [])
    picture = tmp_path / 'compare.png'
    assert_refused(run_script('plot_jax.py', a, f'--output={picture}'), 'has no evaluation in metrics.jsonl')
    assert_refused(run_script('plot_jax.py', '--x=tokens'), 'name the runs to compare')
    assert_refused(run_script('plot_jax.py', a, '--x=hours'), 'x must be one of iterations, tokens, seconds')
    assert not os.path.exists(picture)
    b = write_run(tmp_path / 'out-b', 0.1, [3.0])
    for output in ('none/x.png', 'x.foo'):
        assert_refused(run_script('plot_jax.py', b, f'--output={tmp_path / output}'), 'cannot write .*' + output)
    assert_refused(run_script('plot_jax.py', b, '--output='), 'output= is no file')
    result = succeeded(run_script('plot_jax.py', b, f'--output={tmp_path / "x"}'))
    assert result.stdout.splitlines()[-1] == f'saved {tmp_path / "x.png"}' and (tmp_path / 'x.png').exists()
    for folders in ([], str(b)):
        assert 'are a list of folders' in refusal(compare_runs, folders)


def test_a_run_under_way_is_read_up_to_its_last_whole_line(tmp_path):
    a = write_run(tmp_path / 'out-a', 0.1, [3.0, 2.5])
    with open(a / 'metrics.jsonl', 'a') as file:
        file.write('{"iter": 20, "val_lo')
    result = succeeded(run_script('plot_jax.py', a, f'--output={tmp_path / "c.png"}'))
    assert result.stdout.splitlines()[1].split()[1:3] == ['2.5000', '2.5000']


def test_runs_that_count_other_bytes_are_told_apart(tmp_path, capsys):
    for name, settings in (('old', {}), ('new', {'bpb_bytes': 'text'})):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'config.json').write_text(json.dumps(settings))
        record = {'iter': 1, 'train_loss': 2.0, 'val_loss': 2.0, 'train_bpb': 1.5, 'val_bpb': 1.5}
        (tmp_path / name / 'metrics.jsonl').write_text(json.dumps(record) + '\n')
    compare_runs([tmp_path / 'old', tmp_path / 'new'])
    printed = capsys.readouterr().out
    assert 'bits per byte of the text' in printed.splitlines()[2] + printed.splitlines()[1]
    assert printed.count('of the text') == 1


def test_the_loss_of_dpo_is_none_of_a_language_model(tmp_path, capsys):
    run = write_run(tmp_path / 'out', 0.1, [])
    record = {'iter': 1, 'train_loss': 0.5, 'val_loss': 0.5, 'val_margin': 1.0, 'val_accuracy': 1.0}
    (run / 'metrics.jsonl').write_text(json.dumps(record) + '\n')
    compare_runs([run])
    assert "DPO's loss, which depends on beta" in capsys.readouterr().out
    for more, label in (({}, 'loss (of DPO)'), ({'val_margin': None}, 'loss (nats per token)')):
        lines = {name: value for name, value in (record | more).items() if value is not None}
        (run / 'metrics.jsonl').write_text(json.dumps(lines) + '\n')
        plot_losses(run)
        assert loss_figure()[0].axes[0].get_ylabel() == label


def test_any_name_of_a_run_is_in_the_legend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [write_run(Path(name), 0.1, [3.0]).name for name in ('_under', 'a$_$b')]
    figure = compare_runs(names)
    figure.draw_without_rendering()
    shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert shown == ['./_under, best 3.0000', r'a\$_\$b, best 3.0000', 'train']


def test_the_legend_of_many_runs_stands_beside_the_axes_and_names_the_best(tmp_path):
    folders = [write_run(tmp_path / f'run{i:02}', 0.1, [3.0, 2 + i / 100]) for i in range(70)]
    figure = compare_runs(folders)
    axes, = figure.axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[0].endswith('run00, best 2.0000') and names[-2:] == ['10 more, see the table', 'train']
    assert len(names) == 62
    figure.draw_without_rendering()
    legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.x0 >= inside.x1  # it covers no curve
    assert legend.y1 - legend.y0 <= figure.bbox.height
