"""What training logs <-> out_dir: metrics.jsonl, and its curves in loss.png."""
import array
import functools
import json
import math
import os
from pathlib import Path

import numpy as np

from jax_flags import UserError, ceil_div, plain_file, write_text


class MetricsLog:
    """out_dir/metrics.jsonl, one JSON object per line. Opening it for iteration `iter_num` drops the records of an
    earlier run from there on, and an incomplete last line: after a resume every iteration is there once. An evaluation
    at iter_num is kept, and not written again."""

    def __init__(self, out_dir, iter_num=0):
        self.path = Path(out_dir) / 'metrics.jsonl'
        records = read_metrics(out_dir) if iter_num else ()
        kept = [json.dumps(r) + '\n' for r in records if r['iter'] < iter_num + ('val_loss' in r)]
        last = json.loads(kept[-1]) if kept else {}
        self.evaluated = last['iter'] if 'val_loss' in last else None
        write_text(self.path, ''.join(kept))
        self.file = open(self.path, 'a', buffering=1)  # flushed after every line
        loss_figure()  # imports matplotlib now, not in the first evaluation

    def write(self, record):
        """Appends a record; a float that is not finite becomes null. Raises UserError if it cannot be written."""
        if 'val_loss' in record and record['iter'] == self.evaluated:
            return
        if not os.fstat(self.file.fileno()).st_nlink:  # deleted under the running process
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, 'a', buffering=1)
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            self.file.write(json.dumps(record) + '\n')
        except OSError as error:
            raise UserError(f'cannot write {self.path}: {error.strerror}; the checkpoints in its folder are complete, '
                            'continue with --init_from=resume') from error

    def plot(self):
        """Draws loss.png beside it."""
        plot_losses(self.path.parent)


def read_metrics(out_dir):
    """Yields the records of out_dir/metrics.jsonl up to an incomplete or damaged line, as a killed run may leave it."""
    path = Path(out_dir) / 'metrics.jsonl'
    if not path.exists():
        return
    with open(plain_file(path), encoding='utf-8', errors='replace') as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not is_record(record):
                return
            yield record


def is_record(record):
    """Whether this is a record of training or of an evaluation: an iteration, and losses that are numbers or null."""
    if not isinstance(record, dict) or type(record.get('iter')) is not int or not 0 <= record['iter'] < 2**31:
        return False
    losses = [value for name, value in record.items() if 'loss' in name or 'bpb' in name]
    return all(value is None or type(value) is float or type(value) is int and abs(value) < 2**31 for value in losses)


@functools.cache
def loss_figure():
    """(figure, {key of metrics.jsonl: line}) without points, the same in every call: matplotlib's figures are full of
    reference cycles, so a new one for every evaluation would keep 1.4 MB each until a full garbage collection."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = FigureCanvasAgg(Figure(figsize=(7, 4.5))).figure
    axes = figure.add_axes((0.09, 0.11, 0.89, 0.86))
    axes.set(xlabel='iteration', ylabel='loss (nats per token)')
    axes.grid(alpha=0.3)
    lines = {'loss': axes.plot([], [], label='train, iterations', color='0.8', lw=0.8)[0],
             'train_loss': axes.plot([], [], label='train', marker='.')[0],
             'val_loss': axes.plot([], [], label='val', marker='.')[0]}
    return figure, lines


def plot_losses(out_dir):
    """Draws out_dir/loss.png from out_dir/metrics.jsonl: the loss of the logged iterations, of at most 5,000 of them,
    and train and val of every evaluation. Holds 16 bytes per record: a long run's records would fill the memory."""
    figure, lines = loss_figure()
    curves = {key: array.array('d') for key in lines}
    for record in read_metrics(out_dir):
        if 'val_bpb' in record:
            lines['val_loss'].set_label(f"val, {record['val_bpb'] or math.nan:.4f} bits per byte")
        for key, points in curves.items():
            if isinstance(record.get(key), (int, float)):
                points.extend((record['iter'], record[key]))
    for key, line in lines.items():
        points = np.asarray(curves[key]).reshape(-1, 2)
        line.set_data(points[::ceil_div(max(len(points), 1), 5000)].T)
    axes, = figure.axes
    axes.relim()
    axes.autoscale_view()
    axes.legend(handles=[line for line in lines.values() if len(line.get_xdata())])
    figure.savefig(Path(out_dir) / 'loss.tmp.png', dpi=120)
    os.replace(Path(out_dir) / 'loss.tmp.png', Path(out_dir) / 'loss.png')
