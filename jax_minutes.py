"""--minutes to max_iters: a training step is timed before the run, which then starts as if the
number of iterations had been given."""
import time

import jax

from jax_start import optimizer_from_flags, start_state

FOR_SAVES = 0.02  # of the time
MEASURING = 0.03  # of the time, at least one iteration


def fit_to_minutes(run, config, parallel, *, started, clock, make_step, make_batch, evaluate,
                   get_signal):
    """Times training steps and an evaluation on a state that is thrown away, and returns the flags
    of the run with max_iters, lr_decay_iters and warmup_iters set to what fits.

    started: the time.perf_counter() from which the minutes count. clock: a Stopwatch.
    make_step: a function of a schedule that returns the compiled step. make_batch: one of an
    iteration. evaluate: one of a state. get_signal: a function that returns the number of the
    signal that asks this process to stop, or 0. All processes call this, and all return the same.

    The schedule is a constant of the compiled step, so that it is compiled twice: here, with a
    constant learning rate, and by the run itself."""
    flags = run.flags
    schedule, tx = optimizer_from_flags({**flags, 'lr_schedule': 'constant'})

    # a state like that of the run
    begun = time.perf_counter()
    state = start_state(run, config, parallel, tx)
    jax.block_until_ready(state.params)
    state_s = time.perf_counter() - begun

    # the first iteration compiles the step
    step = make_step(schedule)
    begun = clock.compiling + clock.saved
    batch = first_batch(make_batch)
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    compile_s = clock.compiling + clock.saved - begun

    # the next ones are timed, with the drawing of their batches
    n_timed = 0
    is_enough = False
    begun = time.perf_counter()
    while not is_enough:
        batch = make_batch(n_timed) or batch
        previous = metrics
        state, metrics = step(state, batch)
        jax.block_until_ready(previous)  # as the log does, one iteration late
        n_timed += 1
        seconds = time.perf_counter() - begun
        is_last = seconds > 60 * flags['minutes'] * MEASURING or get_signal() > 0
        is_enough = int(parallel.max_over_processes(int(is_last))) > 0
    jax.block_until_ready(metrics)
    seconds = (time.perf_counter() - begun) / n_timed

    # an evaluation
    begun = time.perf_counter() - clock.compiling
    evaluate(state)
    eval_s = time.perf_counter() - clock.compiling - begun

    n = 0
    if jax.process_index() == 0:  # the others take its number
        left = started + 60 * flags['minutes'] * (1 - FOR_SAVES) - time.perf_counter()
        left -= state_s + compile_s  # once more
        left -= 2 * eval_s  # at the start and at the end
        fitting = int(left / (seconds + eval_s / flags['eval_interval']))
        n = run.iter_num + max(1, fitting)
    n = int(parallel.max_over_processes(n))
    warmup = flags['warmup_iters'] if flags['warmup_iters'] < n else n // 10
    print(f"minutes={flags['minutes']:g}: max_iters={n}, also lr_decay_iters, "
          f'warmup_iters={warmup} ({n_timed} iterations took {seconds * 1000:.2f}ms each)')
    clock.lap()  # what was measured here does not count as the run's
    return {**flags, 'max_iters': n, 'lr_decay_iters': n, 'warmup_iters': warmup}


def first_batch(make_batch):
    """Returns the batch of the first iteration of which a token counts."""
    iteration = 0
    while True:
        batch = make_batch(iteration)
        if batch:
            return batch
        iteration += 1
