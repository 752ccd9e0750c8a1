"""AdamW and Muon: which parameters they update, and how."""
import dataclasses
import functools
import tests.common

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flags import CHOICES, UserError
from jax_ops.muon import POLAR_EXPRESS, orthogonalize
from jax_train_utils import create_learning_rate_schedule, create_optimizer_with_schedule, create_train_state
from jax_transformer import MLPS, MLAConfig, MoEConfig

TINY = dataclasses.replace(tests.common.TINY, n_layer=1)

EXPERTS = dataclasses.replace(TINY, bias=True, moe=MoEConfig(n_expert=4, n_used=2, width=8))


@pytest.mark.parametrize('config, lora_rank', [
    (TINY, 0), (EXPERTS, 0), (dataclasses.replace(TINY, tied_head=False), 0), (TINY, 2)])
def test_decay_touches_matrices_and_embeddings_only(config, lora_rank):
    tx = create_optimizer_with_schedule(lambda step: 0.1, weight_decay=0.5)

    @jax.jit
    def step():
        state = create_train_state(jax.random.key(0), config, tx, lora_rank)
        state = state.replace(params=jax.tree.map(jnp.ones_like, state.params))
        return state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, state.params)).params

    after = step()
    for path, p in jax.tree_util.tree_leaves_with_path(after):
        expected = 0.95 if path[-1].key in ('kernel', 'wte', 'wpe', 'embedding', 'lm_head', 'a', 'b') else 1.0
        np.testing.assert_allclose(p, expected, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize('config', [EXPERTS, dataclasses.replace(
    TINY, position='rope', mla=MLAConfig(q_rank=0, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4))])
def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest(config):
    @functools.partial(jax.jit, static_argnums=0)
    def updates(optimizer):
        tx = create_optimizer_with_schedule(lambda step: 0.1, weight_decay=0.0, optimizer=optimizer)
        state = create_train_state(jax.random.key(0), config, tx)
        grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), state.params)
        return jax.tree.map(jnp.subtract, state.apply_gradients(grads=grads).params, state.params)

    muon, adamw = updates('muon'), updates('adamw')
    for (path, update), by_adamw in zip(jax.tree_util.tree_leaves_with_path(muon), jax.tree.leaves(adamw)):
        if path[-1].key in ('kernel', 'kv_b') and path[-2].key != 'router':
            spectrum = np.linalg.svd(update, compute_uv=False)  # of each expert
            assert (spectrum.min(-1) > 0.37 * spectrum.max(-1)).all()  # nearly orthogonal
            rms = jnp.sqrt(jnp.square(update).mean())
            assert rms == pytest.approx(0.1 * 0.2, rel=0.3)  # a fifth of Adam's first step
        else:
            np.testing.assert_allclose(update, by_adamw, rtol=1e-5)
    with pytest.raises(UserError, match='optimizer must be one of adamw, muon'):
        create_optimizer_with_schedule(lambda step: 0.1, optimizer='sgd')


def muon_steps(values):
    """The singular values after POLAR_EXPRESS."""
    for step in POLAR_EXPRESS:
        values = values * np.polyval(step[::-1], values**2)
    return values


def test_the_steps_of_muon_bring_singular_values_to_between_0_55_and_1_45():
    values = muon_steps(np.geomspace(0.003, 1, 10_000))
    assert values.min() == pytest.approx(0.55, abs=0.01)
    assert values.max() == pytest.approx(1.45, abs=0.01)


@pytest.mark.slow
def test_muon_moves_matrices_by_the_singular_vectors_of_their_momentum_and_the_steps_of_its_singular_values():
    shapes = {'a': (8, 24), 'b': (24, 8), 'c': (8, 24), 'd': (8, 8), 'e': (3, 8, 8), 'f': (3, 8, 10)}  # e, f: experts
    params = {name: jax.random.normal(jax.random.key(ord(name)), shape) for name, shape in shapes.items()}
    grads = jax.tree.map(lambda p: jnp.square(p) - 0.5, params)
    ours = create_optimizer_with_schedule(lambda step: 0.1, optimizer='muon', weight_decay=0.1)
    kernels = lambda tree: {name: {'kernel': leaf} for name, leaf in tree.items()}
    update = jax.jit(ours.update)
    later = jax.tree.map(jnp.cos, params)  # the gradients of a second step
    _, state = update(kernels(grads), ours.init(kernels(params)), kernels(params))
    updates, _ = update(kernels(later), state, kernels(params))
    for name, shape in shapes.items():
        momentum = later[name] + 0.95 * (later[name] + 0.95 * grads[name])  # Nesterov's
        u, values, v = np.linalg.svd(np.asarray(momentum, np.float64), full_matrices=False)
        norm = (values**4).sum(-1, keepdims=True)**0.25
        expected = 0.2 * max(shape[-2:])**0.5 * (u * muon_steps(values / norm)[..., None, :]) @ v
        expected = -0.1 * (expected + 0.1 * params[name])
        np.testing.assert_allclose(updates[name]['kernel'], expected, rtol=1e-3, atol=1e-5)


def test_muon_orthogonalizes_q_k_and_v_each_by_itself():
    q, k, v, c_proj = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(
        ((16, 24), (16, 8), (16, 8), (24, 16))))  # GQA, and heads wider than n_embd / n_head
    attention = {'c_attn': {'kernel': jnp.concatenate([q, k, v], axis=1)}, 'c_proj': {'kernel': c_proj}}
    apart = {name: {'kernel': kernel} for name, kernel in (('q', q), ('k', k), ('v', v), ('c_proj', c_proj))}
    together, apart = (orthogonalize.update(tree, None)[0] for tree in (attention, apart))
    expected = jnp.concatenate([apart[name]['kernel'] for name in 'qkv'], axis=1)
    np.testing.assert_allclose(together['c_attn']['kernel'], expected, rtol=1e-5)
    np.testing.assert_allclose(together['c_proj']['kernel'], apart['c_proj']['kernel'], rtol=1e-5)


def all_different(values):
    return all(not np.array_equal(a, b) for i, a in enumerate(values) for b in values[:i])


def test_each_optimizer_that_can_be_chosen_updates_in_its_own_way():
    params = {'c_fc': {'kernel': jnp.arange(1.0, 7).reshape(2, 3)}}

    def updated(name):
        tx = create_optimizer_with_schedule(lambda step: 0.1, optimizer=name)
        return tx.update(params, tx.init(params), params)[0]['c_fc']['kernel']

    assert all_different([updated(name) for name in CHOICES['optimizer']])


def test_each_schedule_that_can_be_chosen_has_a_curve_of_its_own():
    def curve(name):
        schedule = create_learning_rate_schedule(0.1, warmup_iters=2, lr_decay_iters=20, min_lr=0.01, lr_schedule=name)
        return [float(schedule(step)) for step in range(20)]

    assert all_different([curve(name) for name in CHOICES['lr_schedule']])


def test_each_mlp_that_can_be_chosen_has_a_function_of_its_own():
    x, gate = jnp.linspace(-9, 9, 7), jnp.linspace(8, -8, 7)  # beyond the limit of the clamped one
    assert all_different([MLPS[name](dataclasses.replace(TINY, mlp=name), x, gate) for name in MLPS])
