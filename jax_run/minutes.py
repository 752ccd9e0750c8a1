"""Turns --minutes into max_iters. Before the run, times the training step; the run then starts as
if the number of iterations had been given. While the run trains, times the step again, and moves
the end of the run if the speed has changed."""
import math
import time

import jax

from jax_flags import ceil_div
from jax_train_utils import fitting_warmup

FOR_SAVES = 0.02  # share of the time
MEASURING = 0.03  # share of the time, at least one iteration
FEW = 50  # with fewer iterations than this, a line says so
CHECKED = 8  # the speed is measured again after every 8th part of the iterations that are left
MOVED = 0.02  # the end of a run is moved by at least this share of the iterations


def iterations_that_fit(run, state, step, layout, *, make_batch, evaluate, clock, stop):
    """Computes max_iters of a run with --minutes: the iterations that are done, plus the iterations
    that fit into the remaining time. At least one iteration is added, even if none fits. Runs some
    training steps and an evaluation to measure how long they take. The minutes begin at
    clock.started. All processes call this function and get the same number.

    state: a TrainState like that of the run; this function uses it up. step: the compiled step.
    make_batch(iteration): returns a batch, or None if none of its tokens counts in the loss.
    evaluate(state): evaluates the model. clock: a Stopwatch. stop: the StopSignal of this
    process."""
    flags = run.flags

    # steps; the first one of a process takes longer
    state, _ = step(state, first_batch(make_batch))
    jax.block_until_ready(state.params)
    at_least = 60 * flags['minutes'] * MEASURING

    def must_stop(seconds):
        is_enough = seconds > at_least or stop.signum > 0
        return int(layout.max_over_processes(int(is_enough))) > 0

    state, n_timed, seconds = time_iterations(state, step, make_batch, must_stop)

    # an evaluation
    begun = time.perf_counter() - clock.compiling
    evaluate(state)
    eval_s = time.perf_counter() - clock.compiling - begun

    # the remaining time, without the evaluations at the start and at the end
    left = time_of_end(flags, clock.started) - time.perf_counter() - 2 * eval_s
    n = run.iter_num + count_fitting(layout, left, seconds, eval_s, flags['eval_interval'])
    warmup = fitting_warmup(flags['warmup_iters'], n)
    print(f"minutes={flags['minutes']:g}: max_iters={n}, also lr_decay_iters, "
          f'warmup_iters={warmup} ({n_timed} iterations took {seconds * 1000:.2f}ms each)')
    clock.lap()  # the time of this measurement does not count as the run's
    return n


def time_of_end(flags, started):
    """Returns the time.perf_counter() at which a run that began at `started` should stop training.
    The rest of its --minutes is for the last save."""
    return started + 60 * flags['minutes'] * (1 - FOR_SAVES)


def count_fitting(layout, left, seconds, eval_s, eval_interval):
    """Returns how many iterations fit into `left` seconds; 1 if none fits. All processes return the
    number that process 0 computes. seconds: the time of an iteration. eval_s: the time of an
    evaluation. eval_interval: the number of iterations between two evaluations."""
    n = 0
    if jax.process_index() == 0:
        n = max(1, int(left / (seconds + eval_s / eval_interval)))
    return int(layout.max_over_processes(n))


class Deadline:
    """The end of a run with --minutes. The speed of a run changes, for example if another program
    on the machine begins or ends. So the training loop calls has_moved before each iteration. From
    time to time, has_moved measures the speed. If the number of iterations that fit into --minutes
    has changed enough, has_moved sets max_iters to this number.

    run: a Run with the number of iterations that fit at first. layout: the run's Layout. started:
    the time.perf_counter() at which the minutes began."""

    def __init__(self, run, layout, started):
        self.layout = layout
        self.max_iters = run.flags['max_iters']
        self.eval_interval = run.flags['eval_interval']
        self.at = time_of_end(run.flags, started)
        self.eval_s = 0.0  # seconds of an evaluation
        self.measure_from(run.iter_num, 0.0)

    def measure_from(self, iter_num, evaluating_s):
        """Begins a new measurement of the mean seconds per iteration and per evaluation.
        count_fitting ends it. iter_num: the first iteration that is measured. evaluating_s: the
        present RunLog.evaluating_s, the seconds of all evaluations so far."""
        self.first = iter_num
        self.begun = time.perf_counter()
        self.evaluating_s = evaluating_s
        self.next = iter_num + ceil_div(self.max_iters - iter_num, CHECKED)

    def has_moved(self, iter_num, log):
        """Measures the speed again, if a measurement is due at iteration iter_num. Sets max_iters
        to the number of iterations that fit into --minutes at this speed, if that differs enough
        (MOVED). Returns whether max_iters has changed. All processes call this method, and have the
        same max_iters afterwards. log: the RunLog."""
        if iter_num < self.next or iter_num >= self.max_iters:
            return False
        n = iter_num + self.count_fitting(iter_num, log.evaluating_s)
        is_moved = abs(n - self.max_iters) > MOVED * self.max_iters
        if is_moved:
            self.max_iters = n
        self.measure_from(iter_num, log.evaluating_s)
        return is_moved

    def count_fitting(self, iter_num, evaluating_s):
        """Returns how many iterations fit into the remaining time, from iteration iter_num on; 1 if
        none fits. The time of the evaluation at the end is subtracted from the remaining time
        first. The times of an iteration and of an evaluation are the means since the last call of
        measure_from. If there was no evaluation since that call, assumes the time of earlier
        evaluations, or 0 if there was none.

        evaluating_s: the present RunLog.evaluating_s, the seconds of all evaluations so far. It is
        needed to separate the time of the evaluations from the time of the iterations."""
        now = time.perf_counter()
        evaluating_s -= self.evaluating_s
        every = self.eval_interval
        n_evaluations = ceil_div(iter_num, every) - ceil_div(self.first, every)
        if n_evaluations:
            self.eval_s = evaluating_s / n_evaluations
        # saves between the evaluations belong to the iterations
        seconds = (now - self.begun - evaluating_s) / (iter_num - self.first)
        left = self.at - now - self.eval_s
        return count_fitting(self.layout, left, seconds, self.eval_s, every)


def say_if_few_iterations(flags, source, seconds):
    """If fewer than FEW iterations fit into --minutes, prints how many fit, how many passes over
    the data these are, and how many seconds the preparations have taken (start, compilation,
    measuring). flags: the flags of the run; their max_iters is the number that fits. source: the
    training data. seconds: the seconds since the start."""
    n = flags['max_iters']
    if n >= FEW:
        return
    n_sequences = n * flags['gradient_accumulation_steps'] * flags['batch_size']
    enough = max(1, math.ceil(seconds / 60 * 10))
    print(f"only {n} iterations fit into {flags['minutes']:g} minutes "
          f'({source.count_passes(n_sequences):.1f} passes over the data): start, compilation and '
          f"measuring have taken {seconds:.0f} of {60 * flags['minutes']:.0f} s; give it more, as "
          f'--minutes={enough}')


def time_iterations(state, step, make_batch, must_stop):
    """Runs iterations of `step`, and draws their batches by make_batch (see first_batch), until
    must_stop(seconds) is true. seconds: the time since the first iteration began. Returns (state;
    number of iterations; mean seconds of an iteration)."""
    n_timed = 0
    metrics = None
    is_last = False
    begun = time.perf_counter()
    while not is_last:
        batch = first_batch(make_batch, n_timed)
        previous = metrics
        state, metrics = step(state, batch)
        jax.block_until_ready(previous)  # as the log does, one iteration late
        n_timed += 1
        is_last = must_stop(time.perf_counter() - begun)
    jax.block_until_ready(metrics)
    return state, n_timed, (time.perf_counter() - begun) / n_timed


def first_batch(make_batch, iteration=0):
    """Returns the first batch, from `iteration` on, that has a token that counts in the loss.
    make_batch returns None for a batch in which no token counts."""
    batch = make_batch(iteration)
    while batch is None:
        iteration += 1
        batch = make_batch(iteration)
    return batch
