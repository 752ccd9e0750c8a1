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

    bar: of progress_bar. metrics_log: a MetricsLog, or None in processes that do not log.
    mfu: a function of the tokens per second that returns the model FLOPs utilization, or None if
    the device's peak is unknown.
    started: the time.perf_counter() at which the script started. imports_s: seconds that its
    imports took.
    in_line: names of metrics that are printed at the end of an iteration's line. metrics.jsonl
    has all metrics that a step returns.

    The time of a line is the mean of the iterations since the line before. While the model is
    evaluated or saved, between pause() and resume(), the clock stands still."""

    def __init__(self, bar, metrics_log, *, out_dir, log_interval, max_iters, tokens_per_iter, mfu,
                 started, imports_s, in_line=()):
        self.bar = bar
        self.metrics_log = metrics_log
        self.out_dir = out_dir
        self.log_interval = log_interval
        self.max_iters = max_iters
        self.tokens_per_iter = tokens_per_iter
        self.estimate_mfu = mfu
        self.started = started
        self.imports_s = imports_s
        self.in_line = in_line
        self.pending = None  # (iter_num, metrics) of the latest iteration, until they are fetched
        self.first_line = None  # that of the first iteration, until its eta is known
        self.mfu = None  # the latest
        self.is_first = True  # no iteration fetched yet
        self.is_paused = False
        self.restart_clock()

    def restart_clock(self):
        """Starts the time of the next line."""
        self.start = time.perf_counter()
        self.seconds = 0.0  # of the iterations since the line before, up to the latest pause
        self.n_timed = 0  # iterations fetched since the line before

    def pause(self):
        """Logs the pending iteration, and stops the clock."""
        self.flush()
        self.write_first_line(seconds=None)
        if not self.is_paused:
            self.seconds += time.perf_counter() - self.start
            self.is_paused = True

    def resume(self):
        """Lets the clock run again after a pause."""
        if self.is_paused:
            self.start = time.perf_counter()
            self.is_paused = False

    def exclude(self, seconds):
        """Takes what was no training, as the seconds of compilation, out of the time."""
        self.seconds -= seconds

    def mean_seconds(self):
        """Returns the mean time of the iterations since the line before."""
        return (self.seconds + time.perf_counter() - self.start) / self.n_timed

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

        # this waits for the device
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.check_finite(iter_num, metrics)
        self.n_timed += 1
        self.bar.update()
        self.bar.set_postfix_str(f'loss {metrics["loss"]:.4f}', refresh=False)

        # the first iteration tells how long the start took, the second one how long the run takes
        is_first = self.is_first
        self.is_first = False
        if is_first:
            seconds = time.perf_counter() - self.started
            self.bar.write(f'first iteration: {seconds:.2f} s after the start, of which imports '
                           f'took {self.imports_s:.2f} s')
        else:
            self.write_first_line(self.mean_seconds())

        if iter_num % self.log_interval == 0 and self.metrics_log:
            self.write(iter_num, metrics, is_first)

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

    def write(self, iter_num, metrics, is_first):
        """Records and prints an iteration."""
        seconds = self.mean_seconds()
        self.restart_clock()
        tokens_per_sec = self.tokens_per_iter / seconds
        mfu = 'n/a'
        if self.estimate_mfu:
            self.mfu = self.estimate_mfu(tokens_per_sec)
            mfu = f'{self.mfu:.2%}'
        speed = {'time_ms': seconds * 1000, 'tokens_per_sec': tokens_per_sec, 'mfu': self.mfu}
        self.metrics_log.write({'iter': iter_num, **metrics, **speed})

        line = (f'iter {iter_num}: loss {metrics["loss"]:.4f}, time {seconds * 1000:.2f}ms, '
                f'mfu {mfu}, {tokens_per_sec:,.0f} tok/s, grad norm {metrics["grad_norm"]:.3f}')
        more = ''.join(f', {name} {metrics[name]:.4f}' for name in self.in_line)
        if is_first:
            self.first_line = iter_num, seconds, line, more
        else:
            self.print_line(iter_num, seconds, line, more)

    def write_first_line(self, seconds):
        """Prints the line of the first iteration, if that is yet to be done. It takes several
        times as long as those that follow, so its eta is by the time of the second one.

        seconds: of the second iteration; None if the run pauses before it."""
        if self.first_line is None:
            return
        iter_num, first_seconds, line, more = self.first_line
        self.first_line = None
        self.print_line(iter_num, seconds or first_seconds, line, more)

    def print_line(self, iter_num, seconds, line, more):
        """Prints a line with its eta, given the seconds of an iteration."""
        eta = 'n/a'
        if self.max_iters:
            remaining_s = round((self.max_iters - iter_num - 1) * seconds)
            eta = datetime.timedelta(seconds=remaining_s)
        self.bar.write(f'{line}, eta {eta}{more}')


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
