"""Metrics of the training steps to lines on the screen and in metrics.jsonl."""
import datetime
import math
import sys
import time

import jax
from tqdm import tqdm

from jax_flags import UserError


def progress_bar(done, total):
    """Makes a tqdm bar, shown on a terminal only. Its write() prints a line above the bar."""
    is_hidden = not sys.stderr.isatty()
    return tqdm(initial=done, total=total, unit='iter', leave=False, disable=is_hidden)


class IterationLog:
    """Logs the iterations, on accelerators each after the next step is dispatched: fetching the
    metrics waits for the device.

    bar: of progress_bar. clock: a Stopwatch.
    metrics_log: a MetricsLog, or None in processes that do not log.
    mfu: a function of the tokens per second that returns the model FLOPs utilization, or None if
    the device's peak is unknown.
    imports_s: seconds that the start of the script took.
    in_line: names of metrics that are printed at the end of an iteration's line. metrics.jsonl
    has all metrics that a step returns."""

    def __init__(self, bar, clock, metrics_log, *, out_dir, log_interval, max_iters,
                 tokens_per_iter, mfu, imports_s, in_line=()):
        self.bar = bar
        self.clock = clock
        self.metrics_log = metrics_log
        self.out_dir = out_dir
        self.log_interval = log_interval
        self.max_iters = max_iters
        self.tokens_per_iter = tokens_per_iter
        self.estimate_mfu = mfu
        self.imports_s = imports_s
        self.in_line = in_line
        self.pending = None  # (iter_num, metrics) of the latest iteration, until they are fetched
        self.mfu = None  # the latest
        self.first = True  # no iteration fetched yet
        self.restart_clock()

    def restart_clock(self):
        """Starts the time of the next line anew: evaluating and saving are no iterations."""
        self.start = time.perf_counter()
        self.n_timed = 0  # iterations fetched since

    def add(self, iter_num, metrics, *, wait):
        """Logs the previous iteration and, if `wait`, this one."""
        self.flush()
        self.pending = iter_num, metrics
        if wait:
            self.flush()

    def skip(self, iter_num):
        """Logs an iteration that made no update, because none of its tokens counts."""
        self.flush()
        self.bar.update()
        self.bar.write(f'iter {iter_num}: skipped, none of its tokens counts in the loss')
        if self.metrics_log:
            record = {'iter': iter_num, 'loss': None, 'grad_norm': None, 'lr': None}
            self.metrics_log.write(record)

    def flush(self):
        """Fetches the pending metrics and logs them. Raises UserError if they are not finite."""
        if self.pending is None:
            return
        iter_num, metrics = self.pending
        self.pending = None
        self.bar.update()
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.check_finite(iter_num, metrics)
        if self.first:
            self.first = False
            lap = self.clock.lap()
            self.bar.write(f'first iteration: imports {self.imports_s:.2f} s, '
                           f'compiling {lap.compiling:.2f} s, running {lap.running:.2f} s')
        self.n_timed += 1
        if iter_num % self.log_interval == 0 and self.metrics_log:
            self.write(iter_num, metrics)

    def check_finite(self, iter_num, metrics):
        """Raises UserError if the loss or the gradient is not finite. float16 may overflow: such
        an update is skipped, until the loss scale is below 1."""
        loss, grad_norm = metrics['loss'], metrics['grad_norm']
        may_overflow = metrics.get('loss_scale', 0) >= 1
        if math.isfinite(loss) and (math.isfinite(grad_norm) or may_overflow):
            return
        raise UserError(f'iteration {iter_num} has loss {loss}, gradient norm {grad_norm}: '
                        f'stopping; the checkpoints in {self.out_dir} are from before; try a '
                        'lower learning_rate, longer warmup_iters or dtype=float32')

    def write(self, iter_num, metrics):
        """Prints and records an iteration; its time is the mean since the line before."""
        seconds = (time.perf_counter() - self.start) / self.n_timed
        self.restart_clock()
        tokens_per_sec = self.tokens_per_iter / seconds
        mfu = 'n/a'
        if self.estimate_mfu:
            self.mfu = self.estimate_mfu(tokens_per_sec)
            mfu = f'{self.mfu:.2%}'
        eta = 'n/a'
        if self.max_iters:
            remaining_s = round((self.max_iters - iter_num - 1) * seconds)
            eta = datetime.timedelta(seconds=remaining_s)
        more = ''.join(f', {name} {metrics[name]:.4f}' for name in self.in_line)
        self.bar.write(
            f'iter {iter_num}: loss {metrics["loss"]:.4f}, time {seconds * 1000:.2f}ms, mfu {mfu}, '
            f'{tokens_per_sec:,.0f} tok/s, grad norm {metrics["grad_norm"]:.3f}, eta {eta}{more}')
        speed = {'time_ms': seconds * 1000, 'tokens_per_sec': tokens_per_sec, 'mfu': self.mfu}
        self.metrics_log.write({'iter': iter_num, **metrics, **speed})


def start_wandb(**settings):
    """Starts a wandb run; with the id of an earlier run it continues that one.

    Raises UserError if wandb does not start."""
    try:
        import wandb
        return wandb.init(resume='allow', **settings)
    except Exception as error:
        raise UserError(
            f'wandb does not start: {error}; log in (wandb login), set WANDB_MODE=offline, or '
            'leave it out (--wandb_log=False)') from error
