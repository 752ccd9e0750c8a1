"""What jax_train_utils.py promises, on one device; tests/test_parallel.py has several."""
import dataclasses
import functools
import math
import tests.common

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_devices.layout import setup_distributed_training
from jax_flags import UserError
from jax_pretrained import load_pretrained
from jax_run.sources import get_batch_jax, open_source
from jax_train_utils import (
    Objective, clip_gradients, create_learning_rate_schedule, create_optimizer_with_schedule, create_train_state,
    estimate_loss_jax)
from tests.common import GOLDEN, apply, make_step, slow

TINY = dataclasses.replace(tests.common.TINY, n_layer=1)


def initial_state(config, schedule, tx):
    """The TrainState of a config at the start, with a schedule."""
    state = jax.jit(lambda: create_train_state(jax.random.key(0), config, tx))()
    return state.replace(schedule=schedule)


SCHEDULE = create_learning_rate_schedule(1e-2, decay_lr=False)
fresh_state = functools.partial(initial_state, schedule=SCHEDULE, tx=create_optimizer_with_schedule(SCHEDULE))


@functools.cache
def compiled_step(config):
    return jax.jit(make_step(config))


def batch_of(g, b, iteration):
    """The batch of an iteration of g micro-batches of b sequences."""
    tokens = np.random.default_rng(0).integers(8, size=4000).astype(np.uint16)  # only 8 kinds: quick to learn
    x, y = get_batch_jax(tokens, 16, g * b, 0, iteration)
    batch = {'x': x, 'y': y, 'seq_id': (iteration * g * b + np.arange(g * b)).astype(np.uint32)}
    return {name: a.reshape(g, b, *a.shape[1:]) for name, a in batch.items()}


def run_steps(n_iters, config, g=2, b=8):
    """(state after n_iters iterations of g micro-batches of b sequences, [metrics of each iteration as floats])."""
    state, log = fresh_state(config), []
    for i in range(n_iters):
        state, metrics = compiled_step(config)(state, batch_of(g, b, i))
        log.append({name: float(value) for name, value in metrics.items()})
    return state, log

# -----------------------------------------------------------------------------
# schedule and clipping

@pytest.mark.parametrize('warmup', [0, 1, 10])
def test_the_schedule_is_nanogpts(warmup):
    def nanogpt(it, top=1e-3, low=1e-4, decay=100):
        if it < warmup:
            return top * (it + 1) / (warmup + 1)
        if it > decay:
            return low
        return low + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (decay - warmup))) * (top - low)

    schedule = create_learning_rate_schedule(1e-3, warmup_iters=warmup, lr_decay_iters=100, min_lr=1e-4)
    np.testing.assert_allclose([schedule(i) for i in range(130)], [nanogpt(i) for i in range(130)], rtol=1e-5)
    assert create_learning_rate_schedule(1e-3, decay_lr=False)(57) == pytest.approx(1e-3)
    with pytest.raises(UserError, match='lr_decay_iters=10 must be more than warmup_iters=10'):
        create_learning_rate_schedule(1e-3, warmup_iters=10, lr_decay_iters=10)


def test_schedules_are_what_they_are_called():
    make = functools.partial(create_learning_rate_schedule, 1.0, warmup_iters=10, lr_decay_iters=110, min_lr=0.1)
    iterations = (0, 5, 10, 60, 90, 100, 110, 200)
    rates = lambda name: [float(make(lr_schedule=name)(i)) for i in iterations]
    warm_up = [1 / 11, 6 / 11, 1]
    assert rates('linear') == pytest.approx(warm_up + [0.55, 0.28, 0.19, 0.1, 0.1])
    assert rates('wsd') == pytest.approx(warm_up + [1, 1, 0.55, 0.1, 0.1])
    assert rates('constant') == pytest.approx(warm_up + [1] * 5)
    assert rates('cosine')[:4] == pytest.approx(warm_up + [0.55])
    for n in range(11, 60):
        linear = create_learning_rate_schedule(4e-3, warmup_iters=1, lr_decay_iters=n, lr_schedule='linear')
        assert 0 <= jax.jit(linear)(n) < 1e-9  # compiled, it is rounded
    assert make(lr_schedule='linear', decay_lr=False)(0) == 1  # nanoGPT's flag has precedence
    with pytest.raises(UserError, match='lr_schedule must be one of cosine'):
        make(lr_schedule='step')


def test_clipping_is_torchs():
    grads = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[4.0]])}
    clipped, norm = clip_gradients(grads, 1.0)
    assert norm == 5
    assert optax.tree.norm(clipped) == pytest.approx(1, abs=1e-5)
    for max_norm in (0.0, 6.0):
        np.testing.assert_array_equal(clip_gradients(grads, max_norm)[0]['a'], grads['a'])


# -----------------------------------------------------------------------------
# the training step

DROPOUT_ON = dataclasses.replace(TINY, dropout=0.2)


def test_micro_steps_make_the_update_of_the_big_batch():
    big, big_log = run_steps(3, DROPOUT_ON, g=1, b=8)
    small, log = run_steps(3, DROPOUT_ON, g=4, b=2)
    for expected, metrics in zip(big_log, log):
        assert metrics == pytest.approx(expected, rel=1e-4)
    for expected, got in zip(jax.tree.leaves(big.params), jax.tree.leaves(small.params)):
        np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.slow
def test_the_logged_learning_rate_is_the_one_applied():
    schedule = create_learning_rate_schedule(1e-2, warmup_iters=3, lr_decay_iters=6, min_lr=1e-3)
    state = initial_state(TINY, schedule, optax.sgd(schedule))
    step = jax.jit(make_step(TINY, grad_clip=0.0))
    distance = jax.jit(lambda before, after: optax.tree.norm(jax.tree.map(jnp.subtract, before, after)))
    for i in range(8):
        before = state.params
        state, metrics = step(state, batch_of(1, 8, i))
        moved = distance(before, state.params)
        assert moved / metrics['grad_norm'] == pytest.approx(float(metrics['lr']), rel=1e-3)
        assert metrics['lr'] == pytest.approx(float(schedule(i)))


@pytest.mark.slow
@pytest.mark.parametrize('n_micro, n_loops', [(1, 0), (2, 1)])
def test_one_micro_step_is_not_a_loop(n_micro, n_loops):
    lowered = jax.jit(make_step(TINY)).lower(fresh_state(TINY), batch_of(n_micro, 2, 0))
    assert lowered.as_text().count('stablehlo.while') == n_loops


@pytest.mark.parametrize('name', ['train', slow('train_no_bias')])
def test_five_steps_of_adamw_with_clipping_are_torchs(name):
    golden = np.load(GOLDEN / name / 'steps.npz')
    config, params = load_pretrained(GOLDEN / name / 'ckpt.pt')
    schedule = lambda step: jnp.asarray(golden['lrs'])[step]
    state = create_train_state(jax.random.key(0), config, create_optimizer_with_schedule(schedule))
    state = state.replace(params=params)
    step = jax.jit(make_step(config))
    assert (golden['grad_norms'] > 1).any()  # clipping acts
    for x, y, loss, grad_norm in zip(golden['x'], golden['y'], golden['losses'], golden['grad_norms'], strict=True):
        batch = {'x': x[None], 'y': y[None], 'seq_id': np.zeros((1, len(x)), np.uint32)}
        state, metrics = step(state, batch)
        assert float(metrics['loss']) == pytest.approx(float(loss), abs=1e-5)
        assert float(metrics['grad_norm']) == pytest.approx(float(grad_norm), abs=1e-5)
    logits = apply(config, state.params, golden['x'][0])
    np.testing.assert_allclose(logits, golden['logits_after'], atol=1e-4)

@pytest.mark.parametrize('n_micro', [1, 2])
def test_the_step_returns_the_metrics_that_its_objective_names(n_micro):
    def means(loss_BxT, batch):
        return {'loss': loss_BxT.mean(), 'worst': loss_BxT.max(), 'hidden': loss_BxT.min()}

    objective = Objective(means, means, metrics=('loss', 'worst'))
    step = make_step(TINY, objective=objective)
    _, metrics = jax.eval_shape(step, fresh_state(TINY), batch_of(n_micro, 2, 0))
    assert metrics.keys() == {'loss', 'worst', 'grad_norm', 'lr'}
    assert all(metric.shape == () for metric in metrics.values())


# -----------------------------------------------------------------------------
# float16

HALF = dataclasses.replace(TINY, dtype='float16')


def test_float16_trains_like_float32_and_scales_its_loss():
    full, half = (run_steps(10, config)[1] for config in (TINY, HALF))
    losses_of = lambda log: [metrics['loss'] for metrics in log]
    np.testing.assert_allclose(losses_of(half), losses_of(full), atol=0.02)
    np.testing.assert_allclose(half[0]['grad_norm'], full[0]['grad_norm'], rtol=0.02)  # the scale is divided out again
    assert half[0]['loss_scale'] == 2**16
    assert 'loss_scale' not in full[0]


@pytest.mark.slow
def test_an_overflow_skips_the_update_and_halves_the_scale():
    state = fresh_state(HALF).replace(loss_scale={'scale': jnp.float32(2.0**40), 'good_steps': jnp.int32(7)})
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = compiled_step(HALF)(state, batch_of(1, 8, 0))
    assert not np.isfinite(metrics['grad_norm'])
    assert np.isfinite(metrics['loss'])
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    assert state.loss_scale == {'scale': 2.0**39, 'good_steps': 0}
    assert state.step == 0


@pytest.mark.slow
def test_2000_good_steps_double_the_scale():
    state = fresh_state(HALF).replace(loss_scale={'scale': jnp.float32(8), 'good_steps': jnp.int32(1999)})
    state, metrics = compiled_step(HALF)(state, batch_of(1, 8, 1))
    assert np.isfinite(metrics['grad_norm'])
    assert state.loss_scale == {'scale': 16, 'good_steps': 0}
    assert state.step == 1


# -----------------------------------------------------------------------------
# evaluation


def test_an_evaluation_ends_when_a_signal_comes():
    parallel = setup_distributed_training(jax.devices()[:1])
    source = open_source(np.arange(3000, dtype=np.int32) % 37, block_size=16, seed=0, split='train')
    calls = []

    def eval_step(params, batch):
        calls.append(len(calls))
        return {'loss': np.zeros(())}

    evaluate = functools.partial(estimate_loss_jax, eval_step, None, {'train': source}, parallel, batch_size=4)
    assert evaluate(eval_iters=1000, stop_signal=lambda: 15 if len(calls) >= 3 else 0) is None
    assert len(calls) <= 5
