"""The log of a training run: lines on the screen, metrics.jsonl, loss.png, wandb, a profile."""
import array
import contextlib
import datetime
import functools
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

from jax_flags import UserError, ceil_div, free_name, new_file, warn, write_text

# functions of a Run, called when its log begins and after each evaluation: see jax_run/notebook.py
watchers = []


class RunLog:
    """Logs the iterations and evaluations of a run. On accelerators an iteration is logged after
    the next step is dispatched, because fetching the metrics waits for the device.

    run: a Run. metrics_log: a MetricsLog, or None in processes that do not log. wandb_run: what
    start_wandb returns, or None.
    tokens_per_iter: the number of tokens of an iteration. mfu: None if the device's peak is
    unknown, else a function of the tokens per second that returns the model FLOPs utilization.
    is_synchronous: whether a step is done when its call returns, as on CPUs.
    started: the time.perf_counter() of the script's start. imports_s: the seconds that the script's
    imports took.
    printed: names of metrics to print at the end of an iteration's line. metrics.jsonl has all
    metrics of a step.

    The time in a line is the mean per iteration since the previous line. While the model is
    evaluated or saved, between pause() and resume(), the clock stands still."""

    def __init__(self, run, metrics_log=None, wandb_run=None, *, tokens_per_iter, mfu=None,
                 is_synchronous=True, started=0.0, imports_s=0.0, printed=()):
        self.run = run
        self.metrics_log = metrics_log
        self.wandb_run = wandb_run
        self.out_dir = run.flags['out_dir']
        self.log_interval = run.flags['log_interval']
        self.max_iters = run.flags['max_iters']
        self.tokens_per_iter = tokens_per_iter
        self.estimate_mfu = mfu
        self.is_synchronous = is_synchronous
        self.started = started
        self.imports_s = imports_s
        self.printed = printed
        # a bar on a terminal, or in a notebook that has widgets: without widgets each state of the
        # bar would stay in the notebook as text. write() prints a line above the bar
        has_widgets = 'ipykernel' in sys.modules and importlib.util.find_spec('ipywidgets')
        if has_widgets:
            from tqdm.notebook import tqdm
        else:
            from tqdm import tqdm
        is_hidden = not sys.stderr.isatty() and not has_widgets
        self.bar = tqdm(initial=run.iter_num, total=self.max_iters, unit='iter', leave=False,
                        disable=is_hidden)
        self.say = self.bar.write
        self.pending = None  # (iter_num, metrics) of the latest iteration, until they are fetched
        self.lr = None  # learning rate of the latest iteration fetched
        self.mfu = None  # the latest
        self.is_first = True  # no iteration fetched yet
        self.is_paused = False
        self.start = time.perf_counter()
        self.seconds = 0.0  # time of the iterations since the line before, up to the latest pause
        self.n_timed = 0  # iterations fetched since the line before
        self.paused_at = self.start  # the time of the latest pause
        self.evaluating_s = 0.0  # seconds of all evaluations so far
        for watch in watchers:
            watch(run)

    def close(self):
        """Closes the progress bar. If an iteration is still pending, for example after a failure,
        logs this iteration first."""
        with contextlib.suppress(Exception):
            self.flush()
        self.bar.close()

    # --- the clock

    def pause(self):
        """Logs the pending iteration, and stops the clock."""
        self.flush()
        if not self.is_paused:
            self.paused_at = time.perf_counter()
            self.seconds += self.paused_at - self.start
            self.is_paused = True

    def resume(self):
        """Lets the clock run again after a pause."""
        if self.is_paused:
            self.start = time.perf_counter()
            self.is_paused = False

    # --- iterations

    def iteration(self, iter_num, metrics):
        """Takes the metrics of iteration iter_num. On a CPU, logs them at once. On other devices,
        logs the metrics of the previous iteration and keeps the new ones for the next call, so that
        the host does not wait for the step that has just begun.

        metrics: {name: scalar on the device} of the step; None if there was no update, because no
        token of the iteration counts in the loss. Such an iteration is logged at once, as
        skipped."""
        self.flush()
        if metrics is None:
            self.bar.update()
            self.say(f'iter {iter_num}: skipped, none of its tokens counts in the loss')
            if self.metrics_log:
                record = {'iter': iter_num, 'loss': None, 'grad_norm': None, 'lr': None}
                self.metrics_log.write(record)
            return
        self.pending = iter_num, metrics
        if self.is_synchronous:
            self.flush()

    def flush(self):
        """Fetches the pending metrics and logs them. Raises NotFinite, a UserError, if the loss or
        the gradients' norm is not finite. (With float16 such a norm is accepted while the loss
        scale is at least 1.)"""
        if self.pending is None:
            return
        iter_num, metrics = self.pending
        self.pending = None

        # this waits for the device
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        loss, grad_norm = metrics['loss'], metrics['grad_norm']
        # float16 may overflow: such an update is skipped, until the loss scale is below 1
        may_overflow = metrics.get('loss_scale', 0) >= 1
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or may_overflow):
            raise NotFinite(f'iteration {iter_num} has loss {loss}, gradient norm {grad_norm}: '
                            f'stopping; any checkpoints in {self.out_dir} are from before; try a '
                            'lower learning_rate, longer warmup_iters or dtype=float32')

        # count it
        self.lr = metrics['lr']
        self.n_timed += 1
        self.bar.update()
        self.bar.set_postfix_str(f'loss {metrics["loss"]:.4f}', refresh=False)

        if self.is_first:
            self.is_first = False
            seconds = time.perf_counter() - self.started
            self.say(f'first iteration: {seconds:.2f} s after the start (imports took '
                     f'{self.imports_s:.2f} s)')
        if iter_num % self.log_interval == 0 and self.metrics_log:
            self.write(iter_num, metrics)

    def write(self, iter_num, metrics):
        """Writes an iteration to metrics.jsonl and to the screen. metrics: {name: float}."""
        # the mean of the iterations since the line before; the next line's begins now
        now = time.perf_counter()
        seconds = (self.seconds + now - self.start) / self.n_timed
        self.start, self.seconds, self.n_timed = now, 0.0, 0
        tokens_per_sec = self.tokens_per_iter / seconds
        mfu = 'n/a'
        if self.estimate_mfu:
            self.mfu = self.estimate_mfu(tokens_per_sec)
            mfu = f'{self.mfu:.2%}'
        speed = {'time_ms': seconds * 1000, 'tokens_per_sec': tokens_per_sec, 'mfu': self.mfu}
        self.metrics_log.write({'iter': iter_num, **metrics, **speed})

        eta = 'n/a'
        if self.max_iters:
            remaining_s = round((self.max_iters - iter_num - 1) * seconds)
            eta = datetime.timedelta(seconds=remaining_s)
        line = (f'iter {iter_num}: loss {metrics["loss"]:.4f}, time {seconds * 1000:.2f}ms, '
                f'mfu {mfu}, {tokens_per_sec:,.0f} tok/s, grad norm {metrics["grad_norm"]:.3f}, '
                f'eta {eta}')
        for name in self.printed:
            line += f', {name} {metrics[name]:.4f}'
        self.say(line)

    def move_end(self, run, iter_num):
        """Logs that max_iters of the run has changed, and gives the new max_iters to the progress
        bar. The training loop calls this method at the beginning of iteration iter_num, after a
        Deadline has changed max_iters. run: the Run with the new max_iters."""
        self.max_iters = run.flags['max_iters']
        self.bar.total = self.max_iters
        decay_iters = run.flags['lr_decay_iters']
        shown = 'also lr_decay_iters'
        if decay_iters != self.max_iters:
            shown = f'lr_decay_iters={decay_iters}, after the warm-up'
        self.say(f'iter {iter_num}: the speed has changed: max_iters={self.max_iters}, {shown}')
        if self.metrics_log:
            self.metrics_log.write({'iter': iter_num, 'max_iters': self.max_iters})

    # --- evaluations

    def evaluation(self, iter_num, losses, sample=''):
        """Logs an evaluation and draws loss.png. losses: what estimate_losses returns, {'val':
        {'loss': ..., ...}, ...}. sample: a text by the model, or ''. Raises NotFinite, a UserError,
        if a loss is not finite."""
        # say them
        flat = flat_losses(losses)
        more = ''
        for name, value in flat.items():
            if name.startswith('val_') and name != 'val_loss':
                more += f', {name.replace("_", " ", 2)} {value:.4f}'
        self.say(f"step {iter_num}: train loss {flat['train_loss']:.4f}, "
                 f"val loss {flat['val_loss']:.4f}{more}")
        if not math.isfinite(sum(flat.values())):
            raise NotFinite(f'the loss is not finite at iteration {iter_num}; any checkpoints in '
                            f'{self.out_dir} are from before')

        # record them
        if sample:
            self.say(f'{sample}\n---------------')
            flat['sample'] = sample
        if self.metrics_log:
            self.metrics_log.write({'iter': iter_num, **flat})
            plot_losses(self.metrics_log.path.parent)
        if self.wandb_run:
            train, val = flat.pop('train_loss'), flat.pop('val_loss')
            try:
                self.wandb_run.log({
                    'iter': iter_num, 'train/loss': train, 'val/loss': val, **flat, 'lr': self.lr,
                    'mfu': self.mfu and 100 * self.mfu})  # percent
            except Exception as error:  # training continues without it
                warn(f'wandb does not log any more, from iteration {iter_num} on: {error}')
                self.wandb_run = None
        for watch in watchers:
            watch(self.run)
        self.evaluating_s += time.perf_counter() - self.paused_at


def flat_losses(losses):
    """Returns what estimate_losses returns as metrics.jsonl has it. {'val': {'loss': ...}} becomes
    {'val_loss': ...}. One data set of several, {'val_web': {'loss': ...}}, becomes
    {'val_loss_web': ...}."""
    flat = {}
    for split, metrics in losses.items():
        split, _, data_set = split.partition('_')
        for metric, value in metrics.items():
            flat[f'{split}_{metric}_{data_set}' if data_set else f'{split}_{metric}'] = value
    return flat


def start_wandb(**settings):
    """Starts a wandb run and returns it. settings: arguments of wandb.init; the `id` of an
    earlier run continues that run.

    Raises UserError if wandb does not start."""
    try:
        import wandb
        return wandb.init(resume='allow', **settings)
    except Exception as error:
        raise UserError(
            f'wandb does not start: {error}; log in (wandb login), set WANDB_MODE=offline, or '
            'leave it out (--wandb_log=False)') from error


# -----------------------------------------------------------------------------
# metrics.jsonl, and its curves in loss.png

class NotFinite(UserError):
    """The loss or the gradients are not finite, so the parameters are not saved."""


class MetricsLog:
    """The file out_dir/metrics.jsonl, one record (JSON object) per line.

    When a run starts at iteration iter_num, the constructor keeps the records of earlier
    iterations. Of the records at iter_num itself, it keeps an evaluation and a change of max_iters.
    It drops all other records, because the run writes them again. If it has kept an evaluation at
    iter_num, write() leaves out the same evaluation. With begins_anew, the evaluation that was kept
    is one of other data: write() then writes the new one, with the key 'anew'. With iter_num=0, the
    constructor drops all records.

    An incomplete last line is dropped. If other lines cannot be read, they are left out, a message
    says so, and the old file is kept as metrics.jsonl.damaged.

    A line that cannot be written, for example on a full disk, is written with a later line."""

    def __init__(self, out_dir, iter_num=0, *, begins_anew=False):
        self.path = Path(out_dir) / 'metrics.jsonl'
        self.anew = iter_num if begins_anew else None

        # Keep the records of a resumed run. `evaluated` is the iteration of the last one, if it is an
        # evaluation.
        kept = []
        self.evaluated = None
        n_damaged = 0
        if iter_num:
            for record in read_lines(self.path):
                if record is None:
                    n_damaged += 1
                    continue
                is_evaluation = 'val_loss' in record
                # before the iteration itself; 'anew' is of another resume from here
                comes_before = (is_evaluation or 'max_iters' in record) and 'anew' not in record
                if record['iter'] < iter_num or record['iter'] == iter_num and comes_before:
                    kept.append(json.dumps(record) + '\n')
                    self.evaluated = record['iter'] if is_evaluation else None

        if n_damaged:
            aside = free_name(self.path)
            os.replace(self.path, aside)
            print(f'{n_damaged} lines of {self.path} cannot be read and are left out; the file '
                  f'as it was is kept as {aside.name}')
        write_text(self.path, ''.join(kept))
        self.file = open(self.path, 'a+', buffering=1)
        self.unwritten = b''  # the lines, or the rest of one, that could not be written
        loss_figure()  # imports matplotlib now, not in the first evaluation

    def write(self, record):
        """Appends a record, {name: value}. A float that is not finite becomes null. Leaves out an
        evaluation that the file has already, after a resume."""
        if 'val_loss' in record and record['iter'] == self.anew:
            record = {**record, 'anew': True}
        elif 'val_loss' in record and record['iter'] == self.evaluated:
            return

        # JSON has no infinity and no NaN.
        finite = {}
        for name, value in record.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            finite[name] = value if is_finite else None
        could_write = not self.unwritten
        self.unwritten += json.dumps(finite).encode() + b'\n'
        try:
            while self.unwritten:
                n = os.write(self.file.fileno(), self.unwritten)
                self.unwritten = self.unwritten[n:]
        except OSError as error:
            # training goes on without it
            if could_write:
                warn(f'cannot write {self.path} ({error.strerror}): it lacks the lines from '
                     f"iteration {record['iter']} on until that is possible again")

    def renew(self):
        """Writes the file anew, with all its lines, because its folder has gone."""
        n_bytes = os.fstat(self.file.fileno()).st_size
        lines = os.pread(self.file.fileno(), n_bytes, 0).decode()
        self.file.close()
        write_text(self.path, lines)
        self.file = open(self.path, 'a+', buffering=1)

    def close(self):
        """Closes the file. If lines could not be written, warns how many."""
        if self.unwritten:
            n = self.unwritten.count(b'\n')
            warn(f'{self.path} lacks its last {n} lines, which could not be written')
        self.file.close()


def read_metrics(out_dir):
    """Yields the records of out_dir/metrics.jsonl. Leaves out lines that cannot be read, and an
    incomplete last line, which a killed run may leave."""
    path = Path(out_dir) / 'metrics.jsonl'
    if path.exists():
        yield from (record for record in read_lines(path) if record is not None)


def read_lines(path):
    """Yields the record of each whole line of metrics.jsonl, or None for a line that cannot be
    read. Leaves out an incomplete last line."""
    if not path.exists():
        return
    with open(path, encoding='utf-8', errors='replace') as lines:
        for line in lines:
            if not line.endswith('\n'):
                return
            record = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
            is_record = isinstance(record, dict) and type(record.get('iter')) is int
            yield record if is_record else None


@functools.cache
def loss_figure():
    """Returns (figure; {key of metrics.jsonl: line in the figure}), the same objects in every call.

    matplotlib's figures are full of reference cycles, so each new figure would keep 1.4 MB until a
    full garbage collection."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = FigureCanvasAgg(Figure(figsize=(7, 4.5))).figure
    axes = figure.add_axes((0.09, 0.11, 0.89, 0.86))
    axes.set(xlabel='iteration')
    axes.grid(alpha=0.3)
    loss, = axes.plot([], [], label='train, each iteration', color='0.8', lw=0.8)
    smoothed, = axes.plot([], [], label='train, smoothed', color='0.4', lw=1.2)
    train_loss, = axes.plot([], [], label='train', marker='.')
    val_loss, = axes.plot([], [], label='val', marker='.')
    return figure, {'loss': loss, 'smoothed': smoothed, 'train_loss': train_loss,
                    'val_loss': val_loss}


# With fewer evaluations than this, loss.png has a smoothed curve of the iterations.
FEW_EVALUATIONS = 10


def plot_losses(out_dir):
    """Draws out_dir/loss.png from out_dir/metrics.jsonl: the loss of the logged iterations; and, of
    the evaluations, the losses on training data and on validation data. Each curve has at most
    5,000 points. If there are fewer than FEW_EVALUATIONS evaluations, a smoothed curve of the
    iterations is drawn, too, because two or three points are no curve.

    Reads the file line by line and keeps 16 bytes per point, because all records of a long run
    would fill the memory."""
    figure, lines = loss_figure()

    # Read the points (iteration, loss) of each curve, one after the other.
    curves = {key: array.array('d') for key in lines}
    unit = 'nats per token'
    val_label = 'val'
    for record in read_metrics(out_dir):
        if 'val_margin' in record:
            unit = 'of DPO'
        if 'val_bpb' in record:
            bits = record['val_bpb'] or math.nan
            val_label = f'val, {bits:.4f} bits per byte'
        for key, points in curves.items():
            if isinstance(record.get(key), (int, float)):
                points.extend((record['iter'], record[key]))

    # Draw every n-th of them.
    points_of = {key: np.asarray(curve).reshape(-1, 2) for key, curve in curves.items()}
    if len(points_of['train_loss']) < FEW_EVALUATIONS:
        # moving averages of the points, iterations and losses, over 5% of them
        points = points_of['loss']
        width = max(1, len(points) // 20)
        sums = np.cumsum(np.concatenate([np.zeros((1, 2)), points]), axis=0)
        points_of['smoothed'] = (sums[width:] - sums[:-width]) / width
    for key, line in lines.items():
        points = points_of[key]
        every = ceil_div(max(len(points), 1), 5000)
        line.set_data(points[::every].T)

    # Fit the axes, and name them and the curves that there are.
    axes, = figure.axes
    axes.set_ylabel(f'loss ({unit})')
    lines['val_loss'].set_label(val_label)
    axes.relim()
    axes.autoscale_view()
    axes.legend(handles=[line for line in lines.values() if len(line.get_xdata())])

    try:
        with new_file(Path(out_dir) / 'loss.png') as unfinished:
            figure.savefig(unfinished, dpi=120, format='png')
    except OSError as error:  # the folder has gone, or the disk is full: training goes on
        warn(f'cannot write {out_dir}/loss.png: {error.strerror}')


class Profile:
    """Traces three iterations of training into a folder.

    folder: the folder for the trace. place: the name of this folder in the message. log: an object
    whose method say() prints the message. first_iter: the first iteration of this process.
    max_iters: where the run ends. If fewer than three iterations are left, fewer are traced."""

    def __init__(self, folder, place, log, first_iter, max_iters):
        self.folder = folder
        self.place = place
        self.log = log
        self.is_running = False

        # After the first five iterations, which warm up, if the run has three more.
        last_start = max(first_iter, max_iters - 3)
        self.first = min(first_iter + 5, last_start)
        self.last = self.first

    def start(self, iter_num):
        """Starts the trace if iter_num is the first iteration to trace; else does nothing. Call
        this method before each iteration.

        The first iteration to trace is usually the sixth of this process. If the run ends too early
        for that, it is the third-last iteration of the run, or the first one of this process if
        fewer than three are left. iter_num: the number of the next iteration."""
        if iter_num == self.first:
            jax.profiler.start_trace(self.folder)
            self.is_running = True

    def stop(self, iter_num, state):
        """Stops the trace if it is running and three traced iterations are done.

        iter_num: the number of iterations that are done. state: the TrainState after them."""
        self.last = max(self.first, iter_num - 1)
        if self.is_running and iter_num == self.first + 3:
            jax.block_until_ready(state.params)
            self.close()

    def close(self):
        """Stops the trace, if it is running, and prints which iterations were traced."""
        if self.is_running:
            jax.profiler.stop_trace()
            self.log.say(f'traced iterations {self.first} to {self.last} into {self.place}')
            self.is_running = False
