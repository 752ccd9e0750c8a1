"""nano_jax.py, a specification: with the same flags and seed it computes what the product computes."""
import dataclasses
import functools
import sys

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import nano_jax
from jax_devices.layout import setup_distributed_training, split_batch
from jax_generate import generate
from jax_run.program import Options, assemble
from jax_run.sources import get_batch_jax
from jax_train_utils import create_learning_rate_schedule, create_train_state
from jax_transformer import GPT, GPTConfig, init_params
from tests.common import ROOT, start

FLAGS = nano_jax.Config(
    n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=37, bias=True, batch_size=4,
    gradient_accumulation_steps=2, learning_rate=1e-2, min_lr=1e-3, warmup_iters=5, lr_decay_iters=20, grad_clip=0.5,
    seed=7, temperature=0, max_new_tokens=40)
# with the versions of constraints.txt to the bit; others round the product of a draw and its size otherwise
ATOL = 0 if jax.__version__.startswith('0.10.') else 1e-7
TOKENS = (np.arange(900)**2 % 37).astype(np.uint16)  # there is something to learn


def gpt_config(flags):
    names = {field.name for field in dataclasses.fields(GPTConfig)} & vars(flags).keys()
    return GPTConfig(**{name: getattr(flags, name) for name in names})


@pytest.mark.parametrize('bias', [True, False])
def test_new_parameters_are_the_products_to_the_bit(bias):
    flags = dataclasses.replace(FLAGS, bias=bias)
    ours = flatten_dict(nano_jax.init(jax.random.key(7), flags))
    expected = flatten_dict(init_params(jax.random.key(7), gpt_config(flags)))
    assert ours.keys() == expected.keys()
    for path in expected:
        np.testing.assert_allclose(ours[path], expected[path], rtol=0, atol=ATOL, err_msg=str(path))


def test_batches_are_the_products_over_several_epochs():
    for iteration in range(30):
        ours = nano_jax.get_batch(TOKENS, FLAGS, iteration)
        for a, b in zip(ours, get_batch_jax(TOKENS, 16, 8, FLAGS.seed, iteration), strict=True):
            np.testing.assert_array_equal(a, b)


def test_logits_loss_and_gradients_are_the_products():
    params = jax.tree.map(lambda p: p + 0.1 * np.random.default_rng(p.size).normal(size=p.shape).astype(np.float32),
                          nano_jax.init(jax.random.key(7), FLAGS))
    x, y = nano_jax.get_batch(TOKENS, FLAGS, 0)
    model = GPT(gpt_config(FLAGS))

    @jax.jit
    def loss_of(params):
        return model.apply({'params': params}, x, y, method='loss').mean()

    np.testing.assert_allclose(
        nano_jax.forward(params, x, FLAGS)[0], model.apply({'params': params}, x), atol=1e-5)
    ours = jax.value_and_grad(nano_jax.loss_fn)(params, x, y, FLAGS)
    expected = jax.value_and_grad(loss_of)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, expected)


def losses_of_the_product(flags, n):
    layout = setup_distributed_training(jax.devices()[:1])
    program = assemble(gpt_config(flags), layout, Options.from_flags(vars(flags)))
    schedule = create_learning_rate_schedule(
        flags.learning_rate, warmup_iters=flags.warmup_iters, lr_decay_iters=flags.lr_decay_iters, min_lr=flags.min_lr)
    state = create_train_state(jax.random.key(flags.seed), program.config, program.tx)
    state = state.replace(schedule=schedule, apply_fn=None)
    n_rows = flags.batch_size * flags.gradient_accumulation_steps
    losses = []
    for i in range(n):
        x, y = get_batch_jax(TOKENS, flags.block_size, n_rows, flags.seed, i)
        batch = {'x': x, 'y': y, 'seq_id': (i * n_rows + np.arange(n_rows)).astype(np.uint32)}
        shape = split_batch(flags.gradient_accumulation_steps, flags.batch_size, 1)
        state, metrics = program.step(state, layout.shard_batch(batch, shape))
        losses.append(float(metrics['loss']))
    return losses, state.params


@pytest.mark.parametrize('n_devices', [1, 4])
def test_twenty_updates_have_the_products_losses_on_any_number_of_devices(n_devices):
    expected, expected_params = losses_of_the_product(FLAGS, 20)
    state = nano_jax.init_state(FLAGS)
    step = nano_jax.compile_step(FLAGS, jax.devices()[:n_devices])
    losses = []
    for i in range(20):
        state, loss = step(state, *nano_jax.get_batch(TOKENS, FLAGS, i))
        losses.append(float(loss))
    assert losses[0] - losses[-1] > 0.3
    np.testing.assert_allclose(losses, expected, atol=2e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), state['params'], expected_params)


def test_greedy_text_is_the_products_also_past_the_context():
    params = jax.tree.map(lambda p: 8 * p, nano_jax.init(jax.random.key(7), FLAGS))  # so that no two tokens are close
    expected = generate(params, gpt_config(FLAGS), np.array([[5, 6, 7]]), 40, rng=jax.random.key(0), temperature=0)
    assert nano_jax.sample(params, [5, 6, 7], FLAGS) == expected[0].tolist()


def test_it_is_short_and_alone():
    text = (ROOT / 'nano_jax.py').read_text(encoding='utf-8')
    assert len(text.splitlines()) <= 280
    imports = [line.split()[1] for line in text.splitlines() if line.startswith(('import ', 'from '))]
    imported = {name.partition('.')[0] for name in imports}
    assert imported - sys.stdlib_module_names == {'jax', 'numpy'}
    users = [path.name for path in ROOT.glob('*.py') if path.name != 'nano_jax.py' and 'nano_jax' in path.read_text()]
    assert users == []


@pytest.mark.slow
def test_the_script_trains_and_samples(dataset):
    flags = ['--n_layer=1', '--n_embd=16', '--n_head=2', '--block_size=8', '--batch_size=4', '--max_iters=20',
             '--warmup_iters=2', '--lr_decay_iters=20', '--eval_interval=10', '--max_new_tokens=12', '--eval_iters=2']
    process = start('nano_jax.py', f'--dataset={dataset}', *flags)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert 'step 20: train loss' in out and 'iter 10: loss' in out
