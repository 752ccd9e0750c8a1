"""What jax_train_utils.py promises on one device and replicated over several; tests/test_parallel.py has the curves of
all layouts."""
import dataclasses
import functools
import math
import tests.common
from tests.common import (
    GOLDEN, apply, column, compiled_once, device_batch, eval_step_of, fresh_run, host_batch,
    make_step, run_steps, slow, sources_of, write_dataset)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_devices.layout import Layout, split_batch
from jax_flags import UserError
from jax_pretrained import load_pretrained
from jax_run.data import load_dataset
from jax_train_utils import (
    Objective, clip_gradients, create_learning_rate_schedule, create_optimizer_with_schedule, create_train_state,
    estimate_loss_jax)
from jax_transformer import GPT
from tests.common import mean_loss

TINY = dataclasses.replace(tests.common.TINY, n_layer=1)

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
    big, big_log = run_steps((1,), 3, DROPOUT_ON, g=1, b=8)
    small, log = run_steps((1,), 3, DROPOUT_ON, g=4, b=2)
    for expected, metrics in zip(big_log, log):
        assert metrics == pytest.approx(expected, rel=1e-4)
    for expected, got in zip(jax.tree.leaves(big.params), jax.tree.leaves(small.params)):
        np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.slow
def test_replicas_stay_equal_to_the_bit():
    state, _ = run_steps((8,), 5, DROPOUT_ON, g=1)
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == 8
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.slow
@pytest.mark.parametrize('n_devices', [1, 8])
def test_the_state_is_donated(n_devices):
    parallel, state, step = fresh_run((n_devices,), TINY)
    step(state, device_batch(parallel, 1, 8, 0, TINY))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_the_loss_is_the_mean_over_all_micro_steps_and_devices():
    parallel, state, step = fresh_run((4,), TINY)
    batch = host_batch(parallel, 16, 0, TINY)
    expected = mean_loss(TINY, state.params, batch['x'], batch['y'])
    _, metrics = step(state, parallel.shard_batch(batch, split_batch(8, 2, 4)))
    assert float(metrics['loss']) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_the_logged_learning_rate_is_the_one_applied():
    schedule = create_learning_rate_schedule(1e-2, warmup_iters=3, lr_decay_iters=6, min_lr=1e-3)
    state = jax.jit(lambda: create_train_state(jax.random.key(0), TINY, optax.sgd(schedule)))()
    state = state.replace(schedule=schedule)
    step = jax.jit(make_step(TINY, grad_clip=0.0))
    distance = jax.jit(lambda before, after: optax.tree.norm(jax.tree.map(jnp.subtract, before, after)))
    parallel = Layout(jax.devices()[:1])
    for i in range(8):
        before = state.params
        state, metrics = step(state, device_batch(parallel, 1, 8, i, TINY))
        moved = distance(before, state.params)
        assert moved / metrics['grad_norm'] == pytest.approx(float(metrics['lr']), rel=1e-3)
        assert metrics['lr'] == pytest.approx(float(schedule(i)))


@pytest.mark.slow
@pytest.mark.parametrize('n_micro, n_loops', [(1, 0), (2, 1)])
def test_one_micro_step_is_not_a_loop(n_micro, n_loops):
    _, make, _ = compiled_once((1,), TINY)
    step = make_step(TINY)
    tokens = jax.ShapeDtypeStruct((n_micro, 2, 16), jnp.int32)
    batch = {'x': tokens, 'y': tokens, 'seq_id': jax.ShapeDtypeStruct((n_micro, 2), jnp.uint32)}
    lowered = jax.jit(step).lower(jax.eval_shape(make), batch)
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
    _, make, _ = compiled_once((1,), TINY)
    tokens = jax.ShapeDtypeStruct((n_micro, 2, 16), jnp.int32)
    batch = {'x': tokens, 'y': tokens, 'seq_id': jax.ShapeDtypeStruct((n_micro, 2), jnp.uint32)}
    step = make_step(TINY, objective=objective)
    _, metrics = jax.eval_shape(step, jax.eval_shape(make), batch)
    assert metrics.keys() == {'loss', 'worst', 'grad_norm', 'lr'}
    assert all(metric.shape == () for metric in metrics.values())


# -----------------------------------------------------------------------------
# float16

HALF = dataclasses.replace(TINY, dtype='float16')


def test_float16_trains_like_float32_and_scales_its_loss():
    full, half = (run_steps((1,), 10, config)[1] for config in (TINY, HALF))
    np.testing.assert_allclose(column(half, 'loss'), column(full, 'loss'), atol=0.02)
    np.testing.assert_allclose(half[0]['grad_norm'], full[0]['grad_norm'], rtol=0.02)  # the scale is divided out again
    assert half[0]['loss_scale'] == 2**16
    assert 'loss_scale' not in full[0]


@pytest.mark.slow
def test_an_overflow_skips_the_update_and_halves_the_scale():
    parallel, state, step = fresh_run((1,), HALF)
    state = state.replace(loss_scale={'scale': jnp.float32(2.0**40), 'good_steps': jnp.int32(7)})
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, device_batch(parallel, 1, 8, 0, HALF))
    assert not np.isfinite(metrics['grad_norm'])
    assert np.isfinite(metrics['loss'])
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    assert state.loss_scale == {'scale': 2.0**39, 'good_steps': 0}
    assert state.step == 0


@pytest.mark.slow
def test_a_batch_that_is_split_overflows_no_earlier_than_as_a_whole():
    def smallest_overflow(layout, g, b):
        for power in range(16, 40):
            parallel, state, step = fresh_run(layout, HALF)
            scale = {'scale': np.float32(2.0**power), 'good_steps': np.int32(0)}
            state = state.replace(loss_scale=parallel.device_put(scale))
            if not np.isfinite(float(step(state, device_batch(parallel, g, b, 0, HALF))[1]['grad_norm'])):
                return power

    whole = smallest_overflow((1,), 1, 8)
    assert whole <= smallest_overflow((1,), 8, 1) and whole <= smallest_overflow((8,), 1, 8)


@pytest.mark.slow
def test_2000_good_steps_double_the_scale():
    parallel, state, step = fresh_run((1,), HALF)
    state = state.replace(loss_scale={'scale': jnp.float32(8), 'good_steps': jnp.int32(1999)})
    state, metrics = step(state, device_batch(parallel, 1, 8, 1, HALF))
    assert np.isfinite(metrics['grad_norm'])
    assert state.loss_scale == {'scale': 16, 'good_steps': 0}
    assert state.step == 1


# -----------------------------------------------------------------------------
# evaluation

@pytest.mark.slow
def test_evaluation_is_the_mean_of_the_same_windows_on_any_number_of_devices(tmp_path):
    write_dataset(tmp_path, np.arange(3000) % 37, np.arange(2000) % 31)
    sources = sources_of(load_dataset(tmp_path, 16)[0], 16)
    results = []
    for n_devices in (1, 2, 8):
        parallel, state, _ = fresh_run((n_devices,), DROPOUT_ON)
        eval_step = eval_step_of(parallel, DROPOUT_ON)
        results.append(estimate_loss_jax(
            eval_step, state.params, sources, parallel, batch_size=4, eval_iters=3))
    batch = sources['val'].read(np.arange(12) * (2000 - 17) // 11)
    x, y = batch['x'], batch['y']
    expected = mean_loss(TINY, state.params, x, y)
    for result in results:
        assert result['val']['loss'] == pytest.approx(float(expected), rel=1e-5)
        assert result['train'] == pytest.approx(results[0]['train'], rel=1e-5)
        assert result['train'] != result['val']


@pytest.mark.parametrize('n_devices, masked', [(1, False), slow(8, False), (1, True)])
def test_the_loss_leaves_out_what_does_not_count_and_bits_per_byte_also_what_has_no_bytes(n_devices, masked, tmp_path):
    write_dataset(tmp_path, np.arange(3000) % 37, np.arange(2000) % 31)
    splits = load_dataset(tmp_path, 16)[0]
    masks = {split: (np.arange(len(tokens)) % 3 > 0).astype(np.uint8) for split, tokens in splits.items()}
    token_bytes = np.arange(37) % 4  # every fourth is a special token
    parallel, state, _ = fresh_run((n_devices,), DROPOUT_ON)
    eval_step = eval_step_of(parallel, DROPOUT_ON)
    options = dict(batch_size=4, eval_iters=3)
    sources = sources_of(splits, 16, masks if masked else None)
    losses = estimate_loss_jax(eval_step, state.params, sources, parallel, token_bytes=token_bytes, **options)
    without = estimate_loss_jax(eval_step, state.params, sources, parallel, **options)
    assert {split: {'loss': losses[split]['loss']} for split in splits} == without
    start = np.arange(12) * (2000 - 17) // 11
    batch = sources['val'].read(start)
    x, y, counts = batch['x'], batch['y'], batch.get('weight', 1)
    nats = jax.jit(functools.partial(GPT(DROPOUT_ON).apply, method='loss'))(
        {'params': jax.device_get(state.params)}, x, y)
    expected = (nats * counts * (token_bytes[y] > 0)).sum() / np.log(2) / (token_bytes[y] * counts).sum()
    assert losses['val']['bpb'] == pytest.approx(float(expected), rel=1e-5)
    of_counted = (nats * counts).sum() / (np.ones(y.shape) * counts).sum()
    assert losses['val']['loss'] == pytest.approx(float(of_counted), rel=1e-5)


def test_an_evaluation_ends_when_a_signal_comes():
    parallel, state, _ = fresh_run((1,), DROPOUT_ON)
    sources = sources_of({'train': np.arange(3000, dtype=np.int32) % 37}, 16)
    calls = []

    def eval_step(params, batch):
        calls.append(len(calls))
        return {'loss': np.zeros(())}

    evaluate = functools.partial(estimate_loss_jax, eval_step, None, sources, parallel, batch_size=4)
    assert evaluate(eval_iters=1000, stop_signal=lambda: 15 if len(calls) >= 3 else 0) is None
    assert len(calls) <= 5
