"""Compares runs in one table and one figure, from their metrics.jsonl, config.json and
manifests."""
import math
import statistics
from pathlib import Path

import numpy as np

from jax_flags import UserError, check_choice, is_in_bucket, read_json
from jax_run.checkpoints import comparable_since, list_steps
from jax_run.log import read_metrics
from jax_run.manifest import val_digest

# flags that change neither the updates nor the validation losses
WITHOUT_EFFECT = {
    'out_dir', 'overwrite', 'eval_interval', 'log_interval', 'sample_prompt',
    'always_save_checkpoint', 'save_interval', 'keep', 'wandb_log', 'wandb_project',
    'wandb_run_name', 'profile', 'minutes', 'manifest', 'coordinator_address', 'num_processes',
    'process_id'}

# the flags whose product is the number of tokens of an iteration
SIZES = ('gradient_accumulation_steps', 'batch_size', 'block_size')

IN_AXES = 10  # with more runs the legend is beside the axes
NAMED = 60  # the legend names so many runs at most, the best ones


def compare_runs(folders, x='iterations'):
    """Prints a table of runs, the best run first, with the flags that differ and the losses.
    Returns a matplotlib figure of the runs' curves.

    folders: a list of out_dirs, also of runs that are under way. x: the horizontal axis,
    'iterations', 'tokens' or 'seconds' (of training, without evaluations). Raises UserError for an
    empty list, and for a folder that has no evaluation."""
    check_choice('x', x, ('iterations', 'tokens', 'seconds'))
    if isinstance(folders, str) or not folders:
        raise UserError('the runs to compare are a list of folders with at least one')
    runs = sorted((read_run(folder, x) for folder in folders), key=lambda run: run['best'])
    mark_val_data(runs)
    say_if_evaluations_differ(runs)
    print_table(runs)
    return draw(runs, x)


def files_of(folder):
    """Returns the folder on this disk with the files of a run: `folder` itself, or a copy if the
    run is in a bucket (gs://...)."""
    if not is_in_bucket('a run', folder):
        return Path(folder)
    from jax_run.buckets import bucket_run
    return bucket_run(str(folder)).files


def read_run(folder, x):
    """Returns a dict on the run in a folder: 'folder'; 'flags'; 'points', [(x, train loss, val
    loss)] of the evaluations; 'unit' of these losses; 'best', see below; 'val_data', a digest of
    the validation data, or '' if that is not known; 'seconds'; 'speed', the median of the tokens
    per second.

    'best' is the lowest val loss since the last change of the data or of the sequences' length
    (comparable_since). If there was no evaluation since then, 'best' is the last val loss before
    the change.

    x: 'iterations', 'tokens' or 'seconds' (of training, without evaluations). Raises UserError if
    the run has no evaluation."""
    files = files_of(folder)
    settings = read_json(files / 'config.json', optional=True)
    sizes = {name: settings.get(name, 0) for name in SIZES}
    # a run of an earlier version has its manifest in the checkpoints alone
    manifest = settings.pop('manifest', None) or read_manifest(files)
    since = comparable_since(manifest)
    evaluations, iterations, seconds, speeds = read_log(files)
    points, best = [], math.inf
    for record in evaluations:
        n_tokens = count_tokens(sizes, record['iter'], manifest or {})
        at = {'iterations': record['iter'], 'tokens': n_tokens,
              'seconds': float(np.interp(record['iter'], iterations, seconds))}
        kind = 'bpb' if record.get('val_bpb') else 'loss'
        train = record.get(f'train_{kind}') or math.nan
        points.append((at[x], train, record[f'val_{kind}']))
        # the best loss is that on the data that the run has now
        is_anew = record['iter'] == since and 'anew' in record
        if record['iter'] > since or not since or is_anew:
            best = min(best, record[f'val_{kind}'])
    if not points:
        raise UserError(f'{folder} has no evaluation in metrics.jsonl; name the out_dir of a run')
    unit = 'nats per token'
    if 'val_margin' in record:
        unit = "DPO's loss, which depends on beta"
    elif kind == 'bpb':
        unit = 'bits per byte'
        if settings.get('bpb_bytes') == 'text':  # not the bytes of the tokens
            unit = 'bits per byte of the text'
    return {'folder': str(folder), 'flags': settings, 'points': points, 'seconds': seconds[-1],
            'best': best if best < math.inf else points[-1][2],
            'val_data': val_digest(manifest)[:8] if manifest else '',
            'speed': statistics.median(speeds or [0]),
            'unit': unit}


def read_log(files):
    """Reads metrics.jsonl in the folder of a run. Returns (evaluations, iterations, seconds,
    speeds). evaluations: the records with a validation loss. The first iterations[i] iterations
    took seconds[i] (of training, without evaluations). speeds: the tokens per second in each line
    that was printed for an iteration.

    A printed line has the mean time of the iterations since the line before. Iterations after the
    last line count as long as those before it."""
    evaluations = []
    iterations, seconds, speeds = [0], [0.0], []
    each = 0.0
    for record in read_metrics(files):
        if isinstance(record.get('time_ms'), float):
            each = record['time_ms'] / 1000
            n = record['iter'] + 1
            seconds.append(seconds[-1] + each * (n - iterations[-1]))
            iterations.append(n)
            speeds.append(record.get('tokens_per_sec') or 0)
        if record.get('val_loss') is not None:
            evaluations.append(record)

    n_after = evaluations[-1]['iter'] - iterations[-1] if evaluations else 0
    if n_after > 0:
        seconds.append(seconds[-1] + each * n_after)
        iterations.append(iterations[-1] + n_after)
    return evaluations, iterations, seconds, speeds


def count_tokens(run, iteration, manifest):
    """Returns the number of tokens that a run has trained on, up to `iteration`. run: the flags of
    the run. manifest: the run's manifest, which lists the flags that resumes have changed."""
    sizes = {name: run[name] for name in SIZES}
    n_tokens = 0
    for change in reversed(manifest.get('earlier', [])):
        n_tokens += max(0, iteration - change['until']) * math.prod(sizes.values())
        iteration = min(iteration, change['until'])
        for name, (before, _) in change.get('flags', {}).items():
            if name in sizes:
                sizes[name] = before
    return n_tokens + iteration * math.prod(sizes.values())


def read_manifest(files):
    """Returns the manifest in the latest checkpoint that can be read. Returns None if no checkpoint
    can be read, or if that checkpoint has no manifest, because an earlier version of this project
    wrote it. files: the folder of the run."""
    for step in list_steps(files / 'ckpt'):
        try:
            return read_json(files / 'ckpt' / str(step) / 'meta' / 'metadata').get('manifest')
        except UserError:
            continue
    return None


def mark_val_data(runs):
    """Marks runs that have different validation data, because their losses cannot be compared.
    runs: the results of read_run.

    If the known digests of the validation data differ, sets run['marked'] to {'val data': digest}
    in each run, with '?' for an unknown digest, and prints a line. print_table shows the digest as
    a column. Otherwise sets run['marked'] to {}."""
    known = {run['val_data'] for run in runs if run['val_data']}
    for run in runs:
        run['marked'] = {'val data': run['val_data'] or '?'} if len(known) > 1 else {}
    if len(known) > 1:
        print('the runs have different validation data, so their losses cannot be compared: see '
              'the column "val data"')


def say_if_evaluations_differ(runs):
    """Prints a line if an evaluation of one run has more sequences than that of another run. Their
    losses are then means over different parts of the validation data. runs: the results of
    read_run."""
    numbers = {run['flags']['eval_iters'] * run['flags']['batch_size'] for run in runs
               if {'eval_iters', 'batch_size'} <= run['flags'].keys()}
    if len(numbers) > 1:
        shown = ', '.join(f'{n:,}' for n in sorted(numbers))
        print(f'the runs evaluate different numbers of sequences ({shown}: eval_iters * '
              'batch_size), so small differences of their losses say nothing')


def print_table(runs):
    """Prints a line for each of `runs` with the flags that differ, the losses, the speed and the
    seconds."""
    names = sorted({name for run in runs for name in run['flags']} - WITHOUT_EFFECT)
    different = []
    for name in names:
        if len({str(run['flags'].get(name)) for run in runs}) > 1:
            different.append(name)
    marks = list(runs[0]['marked'])
    rows = [['run', *different, *marks, 'best val', 'last val', 'in', 'tok/s', 'seconds']]
    for run in runs:
        values = [str(run['flags'].get(name)) for name in different]
        last = run['points'][-1][2]
        values += run['marked'].values()
        rows.append([run['folder'], *values, f'{run["best"]:.4f}', f'{last:.4f}', run['unit'],
                     f'{run["speed"]:,.0f}', f'{run["seconds"]:,.0f}'])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def draw(runs, x):
    """Draws the curves of `runs`, the results of read_run. Val curves are solid, train curves
    dotted. x: the label of the horizontal axis. Returns the figure."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    # the legend of many runs stands beside the axes
    is_crowded = len(runs) > IN_AXES
    size = (8 + 4 * is_crowded, max(5, 0.18 * min(len(runs), NAMED)))
    figure = FigureCanvasAgg(Figure(figsize=size, layout='constrained')).figure
    units = sorted({run['unit'] for run in runs})
    axes = figure.add_subplot(xlabel=x, ylabel=' or '.join(units))
    colors = colormaps['viridis'].resampled(len(runs)) if is_crowded else None
    for i, run in enumerate(runs):
        positions, train, val = zip(*run['points'])
        # matplotlib reads $...$ as mathematics, and leaves out labels that begin with _
        name = run['folder'].replace('$', r'\$')
        prefix = './' if name.startswith('_') else ''
        label = f'{prefix}{name}, best {run["best"]:.4f}'
        if run['marked']:
            label += f' on {run["marked"]["val data"]}'
        if i >= NAMED:
            label = f'{len(runs) - NAMED} more, see the table' if i == NAMED else None
        if colors:  # from the best to the worst: ten colors in turn would show no order
            axes.set_prop_cycle(color=[colors(i)])
        line, = axes.plot(positions, val, marker='.', label=label)
        axes.plot(positions, train, linestyle=':', color=line.get_color())
    axes.plot([], [], linestyle=':', color='gray', label='train')
    axes.grid(alpha=0.3)
    if is_crowded:
        axes.legend(loc='upper left', bbox_to_anchor=(1.01, 1), fontsize=7, borderaxespad=0)
    else:
        axes.legend()
    return figure
