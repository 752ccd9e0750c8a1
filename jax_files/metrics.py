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
    """The file out_dir/metrics.jsonl, one JSON object per line.

    Opening it for iteration `iter_num` drops the records of an earlier run from there on, and an
    incomplete last line: after a resume every iteration is there once. An evaluation at iter_num is
    kept, and not written again."""

    def __init__(self, out_dir, iter_num=0):
        self.path = Path(out_dir) / 'metrics.jsonl'

        # What a resumed run keeps. `evaluated` is the iteration of its last record, if that is an
        # evaluation.
        kept = []
        self.evaluated = None
        if iter_num:
            for record in read_metrics(out_dir):
                is_evaluation = 'val_loss' in record
                is_evaluation_here = is_evaluation and record['iter'] == iter_num
                if record['iter'] < iter_num or is_evaluation_here:
                    kept.append(json.dumps(record) + '\n')
                    self.evaluated = record['iter'] if is_evaluation else None

        write_text(self.path, ''.join(kept))
        self.file = open(self.path, 'a', buffering=1)  # flushed after every line
        loss_figure()  # imports matplotlib now, not in the first evaluation

    def write(self, record):
        """Appends a record; a float that is not finite becomes null. Raises UserError if it cannot
        be written."""
        if 'val_loss' in record and record['iter'] == self.evaluated:
            return

        # The file was deleted under the running process: begin it again.
        if not os.fstat(self.file.fileno()).st_nlink:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, 'a', buffering=1)

        # JSON has no infinity and no NaN.
        finite = {}
        for name, value in record.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            finite[name] = value if is_finite else None
        try:
            self.file.write(json.dumps(finite) + '\n')
        except OSError as error:
            raise UserError(f'cannot write {self.path}: {error.strerror}; the checkpoints in its '
                            'folder are complete, continue with --init_from=resume') from error

    def plot(self):
        """Draws loss.png beside it."""
        plot_losses(self.path.parent)


def read_metrics(out_dir):
    """Yields the records of out_dir/metrics.jsonl up to an incomplete or damaged line, as a killed
    run may leave it."""
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
    """Returns whether this is a record of training or of an evaluation: an object with an
    iteration, and with losses that are numbers or null."""
    if not isinstance(record, dict):
        return False

    # An iteration that a run can reach.
    iteration = record.get('iter')
    if type(iteration) is not int or not 0 <= iteration < 2**31:
        return False

    # Losses, of which those that are not finite are null.
    for name, value in record.items():
        is_loss = 'loss' in name or 'bpb' in name
        is_number = type(value) is float or type(value) is int and abs(value) < 2**31
        if is_loss and value is not None and not is_number:
            return False
    return True


@functools.cache
def loss_figure():
    """Returns (figure, {key of metrics.jsonl: line}) without points, the same in every call.

    matplotlib's figures are full of reference cycles, so a new one for every evaluation would keep
    1.4 MB each until a full garbage collection."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = FigureCanvasAgg(Figure(figsize=(7, 4.5))).figure
    axes = figure.add_axes((0.09, 0.11, 0.89, 0.86))
    axes.set(xlabel='iteration', ylabel='loss (nats per token)')
    axes.grid(alpha=0.3)
    loss, = axes.plot([], [], label='train, each iteration', color='0.8', lw=0.8)
    smoothed, = axes.plot([], [], label='train, smoothed', color='0.4', lw=1.2)
    train_loss, = axes.plot([], [], label='train', marker='.')
    val_loss, = axes.plot([], [], label='val', marker='.')
    return figure, {'loss': loss, 'smoothed': smoothed, 'train_loss': train_loss,
                    'val_loss': val_loss}


# Evaluations below which loss.png has a smoothed curve of the iterations.
FEW_EVALUATIONS = 10


def smooth(points):
    """Returns the moving averages [n, 2] of points [N, 2], iterations and losses, over 5% of them."""
    width = max(1, len(points) // 20)
    sums = np.cumsum(np.concatenate([np.zeros((1, 2)), points]), axis=0)
    return (sums[width:] - sums[:-width]) / width


def plot_losses(out_dir):
    """Draws out_dir/loss.png from out_dir/metrics.jsonl: the loss of at most 5,000 of the logged
    iterations, and the losses of training and validation data of every evaluation. With fewer than
    FEW_EVALUATIONS the iterations are drawn smoothed, too, because two or three points are no curve.

    Holds 16 bytes per point: a long run's records would fill the memory."""
    figure, lines = loss_figure()

    # Read the points (iteration, loss) of each curve, one after the other.
    curves = {key: array.array('d') for key in lines}
    for record in read_metrics(out_dir):
        if 'val_bpb' in record:
            bits = record['val_bpb'] or math.nan
            lines['val_loss'].set_label(f'val, {bits:.4f} bits per byte')
        for key, points in curves.items():
            if isinstance(record.get(key), (int, float)):
                points.extend((record['iter'], record[key]))

    # Draw every n-th of them.
    points_of = {key: np.asarray(curve).reshape(-1, 2) for key, curve in curves.items()}
    if len(points_of['train_loss']) < FEW_EVALUATIONS:
        points_of['smoothed'] = smooth(points_of['loss'])
    for key, line in lines.items():
        points = points_of[key]
        every = ceil_div(max(len(points), 1), 5000)
        line.set_data(points[::every].T)

    # Fit the axes, and name the curves that there are.
    axes, = figure.axes
    axes.relim()
    axes.autoscale_view()
    axes.legend(handles=[line for line in lines.values() if len(line.get_xdata())])

    # The image appears when it is complete.
    figure.savefig(Path(out_dir) / 'loss.tmp.png', dpi=120)
    os.replace(Path(out_dir) / 'loss.tmp.png', Path(out_dir) / 'loss.png')
