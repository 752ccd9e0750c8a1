"""Compares runs: their curves in one picture, what differs between them in one table.

$ python plot_jax.py out-a out-b out-c
$ python plot_jax.py out-* --x=seconds --output=sweep.png

Reads metrics.jsonl and config.json of each run alone, also of a run that is under way."""
import math
import statistics
import sys
from pathlib import Path

from jax_flags import (
    UserError, check_choice, check_url, is_url, read_flags, read_json, start_script)

# -----------------------------------------------------------------------------
x = 'iterations' # the horizontal axis: 'iterations', 'tokens' or 'seconds' (of training, without evaluations)
output = 'compare.png' # the picture
# -----------------------------------------------------------------------------
start_script()
folders = [arg for arg in sys.argv[1:] if not arg.startswith('-')]
flags, _ = read_flags(__file__, globals(), [arg for arg in sys.argv[1:] if arg.startswith('-')])
check_choice('x', flags['x'], ('iterations', 'tokens', 'seconds'))
if not folders:
    raise UserError('name the runs to compare, as in python plot_jax.py out-a out-b')

from jax_run.log import read_metrics


def files_of(folder):
    """Returns the folder with the files of a run: itself, or of a bucket a copy on this disk."""
    check_url('a run', folder)
    if not is_url(folder):
        return Path(folder)
    from jax_run.buckets import bucket_run
    return bucket_run(folder).files


def read_run(folder):
    """Returns {'flags', 'points': [(x, train, val)], 'unit', 'speed', ...} of the run in a folder.
    Raises UserError if it has no evaluation."""
    files = files_of(folder)
    settings = read_json(files / 'config.json', optional=True)
    sizes = ('gradient_accumulation_steps', 'batch_size', 'block_size')
    tokens_per_iter = math.prod(settings.get(name, 0) for name in sizes)
    points, speeds, seconds, last_iter = [], [], 0.0, -1
    for record in read_metrics(files):
        if isinstance(record.get('time_ms'), float):
            # the mean of the iterations since the line before
            seconds += record['time_ms'] / 1000 * (record['iter'] - last_iter)
            last_iter = record['iter']
            speeds.append(record.get('tokens_per_sec') or 0)
        if record.get('val_loss') is not None:
            at = {'iterations': record['iter'], 'tokens': record['iter'] * tokens_per_iter,
                  'seconds': seconds}
            kind = 'bpb' if record.get('val_bpb') else 'loss'
            train = record.get(f'train_{kind}') or math.nan
            points.append((at[flags['x']], train, record[f'val_{kind}']))
    if not points:
        raise UserError(f'{folder} has no evaluation in metrics.jsonl; name the out_dir of a run')
    return {'folder': folder, 'flags': settings, 'points': points, 'seconds': seconds,
            'best': min(val for _, _, val in points), 'speed': statistics.median(speeds or [0]),
            'unit': 'bits per byte' if kind == 'bpb' else 'nats per token'}


def print_table(runs):
    """Prints a line for each run: the flags in which the runs differ, and what came of them."""
    names = sorted({name for run in runs for name in run['flags']} - {'out_dir'})
    different = []
    for name in names:
        if len({str(run['flags'].get(name)) for run in runs}) > 1:
            different.append(name)
    rows = [['run', *different, 'best val', 'last val', 'in', 'tok/s', 'seconds']]
    for run in runs:
        values = [str(run['flags'].get(name)) for name in different]
        last = run['points'][-1][2]
        rows.append([run['folder'], *values, f'{run["best"]:.4f}', f'{last:.4f}', run['unit'],
                     f'{run["speed"]:,.0f}', f'{run["seconds"]:,.0f}'])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def draw(runs, path):
    """Draws the curves of all runs into one picture: val, and train as a dotted line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = FigureCanvasAgg(Figure(figsize=(8, 5), layout='constrained')).figure
    units = sorted({run['unit'] for run in runs})
    axes = figure.add_subplot(xlabel=flags['x'], ylabel=' or '.join(units))
    for run in runs:
        positions, train, val = zip(*run['points'])
        label = f'{run["folder"]}, best {run["best"]:.4f}'
        line, = axes.plot(positions, val, marker='.', label=label)
        axes.plot(positions, train, linestyle=':', color=line.get_color())
    axes.plot([], [], linestyle=':', color='gray', label='train')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


runs = sorted(map(read_run, folders), key=lambda run: run['best'])
print_table(runs)
draw(runs, flags['output'])
print(f'saved {flags["output"]}')
