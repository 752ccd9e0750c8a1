"""Turns --minutes into max_iters: times the training step before the run, which then starts as if
the number of iterations had been given."""
import math
import time

import jax

from jax_train_utils import fitting_warmup

FOR_SAVES = 0.02  # share of the time
MEASURING = 0.03  # share of the time, at least one iteration
FEW = 50  # with fewer iterations than this, a line says so


def iterations_that_fit(run, state, step, layout, *, make_batch, evaluate, clock, stop):
    """Times training steps and an evaluation. Returns max_iters: the iterations that the run has
    made, plus those that fit into the rest of its --minutes, at least one. The minutes begin at
    clock.started. All processes call this and get the same number.

    state: a TrainState like the run's; it is used up. step: the compiled step. make_batch: a
    function of the iteration. evaluate: a function of the state. clock: a Stopwatch. stop: the
    StopSignal of this process."""
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
    n = 0
    if jax.process_index() == 0:  # the others take the number of process 0
        left = clock.started + 60 * flags['minutes'] * (1 - FOR_SAVES) - time.perf_counter()
        left -= 2 * eval_s
        fitting = int(left / (seconds + eval_s / flags['eval_interval']))
        n = run.iter_num + max(1, fitting)
    n = int(layout.max_over_processes(n))
    warmup = fitting_warmup(flags['warmup_iters'], n)
    print(f"minutes={flags['minutes']:g}: max_iters={n}, also lr_decay_iters, "
          f'warmup_iters={warmup} ({n_timed} iterations took {seconds * 1000:.2f}ms each)')
    clock.lap()  # the time of this measurement does not count as the run's
    return n


def say_if_few_iterations(flags, source, seconds):
    """Prints, if fewer than FEW iterations fit, how many fit and what has taken the time. flags:
    of the run, with the max_iters that fit. source: the training data. seconds: since the start."""
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
    """Runs iterations, including the drawing of batches, until must_stop(seconds since the first
    began) is true. Returns (state, number of iterations, mean seconds of one)."""
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
    """Returns the first batch, from `iteration` on, with a token that counts in the loss.
    make_batch returns None if no token counts."""
    batch = make_batch(iteration)
    while batch is None:
        iteration += 1
        batch = make_batch(iteration)
    return batch
