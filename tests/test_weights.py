"""The sets of weights of a checkpoint, and the tree of the optimizer state, which is a file format."""
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_run.checkpoints import read_val_loss
from jax_run.load import load_run
from jax_run.log import read_metrics
from jax_train_utils import create_optimizer_with_schedule, create_train_state
from tests.common import (
    MODEL, RESUME, SHORT, TINY, assert_refused, final_state, make_step, records_of, sample, samples_of, succeeded,
    train)

EMA = [*MODEL, *SHORT, '--max_iters=4', '--lr_decay_iters=4', '--eval_interval=2', '--ema=0.8']


@pytest.fixture(scope='module')
def averaged(dataset, tmp_path_factory):
    """The folder of a run with --ema, and its flags."""
    out = tmp_path_factory.mktemp('ema') / 'out'
    flags = [*EMA, f'--dataset={dataset}']
    succeeded(train(out, *flags, '--device=cpu:0'))
    return out, flags


def test_the_running_mean_soon_forgets_the_first_weights():
    state = create_train_state(jax.random.key(0), TINY, optax.sgd(0.1))
    state = state.replace(ema=jax.tree.map(jnp.copy, state.params))
    tokens = np.arange(2 * 3 * 8).reshape(1, 6, 8) % TINY.vocab_size
    batch = {'x': tokens, 'y': tokens, 'seq_id': np.arange(6, dtype=np.uint32)[None]}
    step = jax.jit(make_step(TINY, ema=0.3))
    mean = state.params['wte']
    for decay in (0.1, 2 / 11, 3 / 12, 0.3):
        state, _ = step(state, batch)
        mean = decay * mean + (1 - decay) * state.params['wte']
        np.testing.assert_allclose(state.ema['wte'], mean, rtol=1e-5, atol=1e-7)
    assert state.weights is state.ema


def test_a_run_with_a_mean_resumes_to_the_bit(averaged, tmp_path):
    out, flags = averaged
    succeeded(train(tmp_path / 'out', *flags, '--max_iters=2', '--device=cpu:0'))
    succeeded(train(tmp_path / 'out', *RESUME, '--max_iters=4'))
    assert records_of(tmp_path / 'out') == records_of(out)
    assert final_state(tmp_path / 'out') == final_state(out)
    for a, b in zip(jax.tree.leaves(load_run(out)[1]), jax.tree.leaves(load_run(tmp_path / 'out')[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('sizes', [['--fsdp=2', '--tensor=2', '--zero=2'], ['--zero=1'], []], ids=' '.join)
def test_a_run_on_eight_devices_has_the_mean_of_one(sizes, averaged, tmp_path):
    out, flags = averaged
    succeeded(train(tmp_path / 'out', *flags, *sizes, '--device=cpu'))
    for a, b in zip(jax.tree.leaves(load_run(out)[1]), jax.tree.leaves(load_run(tmp_path / 'out')[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_the_mean_is_what_is_evaluated_sampled_and_started_from(averaged, tmp_path):
    out, flags = averaged
    config, params, meta = load_run(out, 'latest')
    assert meta['weights'] == ['params', 'ema']
    *_, last = read_metrics(out)

    # a new run from these weights begins with their loss
    more = [f'--init_from={out}', '--checkpoint=latest', '--ema=0', '--max_iters=0', '--device=cpu:0']
    succeeded(train(tmp_path / 'more', *flags, *more))
    first = next(read_metrics(tmp_path / 'more'))
    assert first['val_loss'] == pytest.approx(last['val_loss'], abs=1e-6)

    # and so do the weights that were trained, which a resume without --ema evaluates
    found = succeeded(train(out, *RESUME, '--ema=0', '--eval_only=True')).stdout
    without = float(re.findall(r'val loss ([\d.]+)', found)[-1])
    assert abs(without - last['val_loss']) > 1e-3
    assert len(samples_of(sample(out, '--num_samples=1', '--max_new_tokens=4'))) == 1


@pytest.mark.parametrize('ema', ['0', '0.8'])
def test_a_checkpoint_gets_no_loss_of_weights_that_are_not_sampled_from_it(dataset, tmp_path, ema):
    out = tmp_path / 'out'
    flags = [*EMA, f'--dataset={dataset}', '--device=cpu:0', '--max_iters=3']
    succeeded(train(out, *flags, '--eval_interval=100', '--save_interval=2'))
    shutil.rmtree(out / 'ckpt' / '3')
    assert math.isinf(read_val_loss(out / 'ckpt' / '2'))
    succeeded(train(out, *RESUME, f'--ema={ema}', '--eval_interval=2', '--max_iters=4', '--keep=5'))
    assert math.isinf(read_val_loss(out / 'ckpt' / '2')) == (ema == '0')



def test_a_run_without_a_mean_gets_one_when_it_is_resumed(dataset, tmp_path):
    out = tmp_path / 'out'
    succeeded(train(out, *EMA, f'--dataset={dataset}', '--ema=0', '--max_iters=2', '--device=cpu:0'))
    succeeded(train(out, *RESUME, '--ema=0.5', '--max_iters=4'))
    assert load_run(out, 'latest')[2]['weights'] == ['params', 'ema']


# one more stage in optax's chain, or another order, breaks the resume of every earlier run
@pytest.mark.parametrize('optimizer, prefixes', [
    ('adamw', ['[0].count', '[0].mu', '[0].nu', '[2].count']),
    ('muon', [".inner_states['adamw'].inner_state[0].count", ".inner_states['adamw'].inner_state[0].mu",
              ".inner_states['adamw'].inner_state[0].nu", ".inner_states['adamw'].inner_state[2].count",
              ".inner_states['muon'].inner_state[0].trace", ".inner_states['muon'].inner_state[3].count"])])
def test_the_tree_of_the_optimizer_state_is_that_of_every_earlier_run(optimizer, prefixes):
    tx = create_optimizer_with_schedule(lambda n: 1e-3, optimizer=optimizer)
    state = jax.eval_shape(lambda: create_train_state(jax.random.key(0), TINY, tx))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.opt_state)]
    assert sorted({re.match(r'.*?\.(count|mu|nu|trace)\b', path)[0] for path in paths}) == prefixes


def test_an_optimizer_state_of_another_version_is_said_to_be_that(averaged, tmp_path, monkeypatch):
    out, flags = averaged
    monkeypatch.setattr('jax_train_utils.scale_by_schedule', lambda schedule, rates=None: optax.chain(
        optax.scale(1.0), optax.trace(0.5), optax.scale_by_learning_rate(schedule)))
    refused = train(out, *RESUME, '--max_iters=6')
    assert_refused(refused, "opt_state does not fit this version's optimizer, or is damaged; a new run starts from its "
                            'weights with --init_from=')
