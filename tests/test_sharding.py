"""What is stored where, and what the compiled program sends."""
import dataclasses
import functools
import math
from tests.common import compiled_once, device_batch, fresh_run

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_devices.layout import setup_distributed_training
from jax_ops.matmul import linear
from jax_ops.sharding import BATCH, ROW_PARALLEL, create_mesh, partition_specs, shard
from jax_ops.vocabulary import cross_entropy
from jax_train_utils import create_train_state
from jax_transformer import GPTConfig
from tests.common import ALL, CONFIG, ZERO_1, ZERO_2, ZERO_2_ON_MESH, collectives, compile_step, sizes_of

# -----------------------------------------------------------------------------
# what is stored where

def test_what_is_sharded_over_fsdp_is_in_the_optimizer_state_sharded_over_data_and_context_too():
    mesh = create_mesh(jax.devices(), fsdp=2, context=2)
    wpe = {'wpe': np.zeros((16, 16))}
    assert partition_specs(wpe, mesh) == {'wpe': P(None, ('fsdp',))}
    assert partition_specs(wpe, mesh, over_replicas=True) == {'wpe': P(None, ('fsdp', 'data', 'context'))}


@pytest.mark.slow
def test_every_matrix_and_its_optimizer_state_are_sharded_and_stay_so():
    config = dataclasses.replace(CONFIG, vocab_size=64)
    parallel, make, step = compiled_once(ALL, config)
    state = parallel.init_sharded(make)
    initial = [x.sharding for x in jax.tree.leaves(state)]
    for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        if x.ndim >= 2:
            n_parts = x.size / x.addressable_shards[0].data.size
            assert n_parts == (4 if 'wpe' in str(path) else 8), jax.tree_util.keystr(path)
    shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert shardings(state.params) == shardings(state.opt_state[0].mu)
    for i in range(2):
        state, _ = step(state, device_batch(parallel, 2, 8, i, config))
        for x, sharding in zip(jax.tree.leaves(state), initial, strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert step._cache_size() == 1  # the second step needs no second compilation


@pytest.mark.slow
@pytest.mark.parametrize('layout, n_copies', [(ZERO_1, 8), (ZERO_2, 8), (ZERO_2_ON_MESH, 2)])
def test_zero_shards_the_optimizer_state_over_the_replicas_of_a_parameter(layout, n_copies):
    parallel, state, step = fresh_run(layout, CONFIG)
    state, _ = step(state, device_batch(parallel, 2, 8, 0, CONFIG))
    n_stored = lambda x: x.addressable_shards[0].data.size
    for name in ('c_attn', 'c_proj'):
        param, mean = (tree['h_0']['attn'][name]['kernel'] for tree in (state.params, state.opt_state[0].mu))
        assert n_stored(param) == param.size * n_copies // 8
        assert n_stored(mean) == mean.size // 8


@pytest.mark.slow
def test_zero_1_reduces_gradients_once_per_step_not_per_micro_batch():
    parallel, make, step = compiled_once(ZERO_1, CONFIG)
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *[device_batch(parallel, 1, 8, i, CONFIG) for i in range(3)])
    text = step.lower(parallel.abstract_state(make), batch).compile().as_text()
    loops = [part for part in text.split('\n\n') if not part.startswith('ENTRY')]
    assert not [found for part in loops for found in collectives(part) if max(found[1]) >= 16]
    n_params = sum(x.size for x in jax.tree.leaves(parallel.abstract_state(make).params))
    assert sum(sizes_of(collectives(text), 'all-reduce', 'reduce-scatter')) <= n_params + 100


def test_what_does_not_divide_is_sharded_over_fewer_axes():
    mesh = create_mesh(jax.devices(), 2, 4)

    def spec(name, shape):
        return partition_specs({'c_attn': {'kernel': np.zeros(shape)}, 'wte': np.zeros(shape)}, mesh)[name]

    assert spec('wte', (37, 16)) == P(None, 'fsdp')
    assert spec('wte', (38, 18)) == P('tensor')
    assert spec('c_attn', (16, 48))['kernel'] == P(('fsdp', 'tensor'))
    assert spec('c_attn', (12, 36))['kernel'] == P('fsdp')
    assert spec('c_attn', (3, 16, 48))['kernel'] == P(None, ('fsdp', 'tensor'))  # layers on a leading axis


@pytest.mark.slow
def test_no_device_ever_holds_the_full_model():
    config = GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=4, n_embd=128)
    parallel = setup_distributed_training(jax.devices(), fsdp=8)
    make = functools.partial(create_train_state, jax.random.key(0), config, optax.adamw(1e-3))
    abstract = jax.eval_shape(make)
    full_bytes = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(abstract))
    before = {id(x) for x in jax.live_arrays()}
    state = parallel.init_sharded(make)
    bytes_on = dict.fromkeys(jax.devices(), 0)
    for x in jax.live_arrays():
        if id(x) not in before:
            for part in x.addressable_shards:
                bytes_on[part.device] += part.data.nbytes
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == full_bytes
    assert max(bytes_on.values()) < full_bytes / 7
    # nor while the state was made
    shardings = jax.tree.leaves(parallel.shardings(abstract))
    program = jax.jit(lambda: jax.tree.leaves(make()), out_shardings=shardings).lower().compile()
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < full_bytes / 4


# -----------------------------------------------------------------------------
# the compiled program

@pytest.mark.slow
def test_fsdp_gathers_each_kernel_by_itself_once_forward_and_once_backward():
    config = GPTConfig(block_size=4, vocab_size=64, n_layer=2, n_head=2, n_embd=32)
    program, state = compile_step((8, 8), config, b=2)
    found = collectives(program)
    D, tables = 32, [64 * 32, 4 * 32]  # of the head (and the position table): embedding gathers ids, not the table
    ids = [8 * 2 * 4]
    kernels = [3 * D * D, D * D, 4 * D * D, 4 * D * D]
    assert sorted(sizes_of(found, 'all-gather')) == sorted(tables + ids + 2 * config.n_layer * kernels)
    # every gradient is reduced: by a reduce-scatter, or by an all-reduce of which a device keeps its shard (on the CPU)
    n_reduced = sum(sizes_of(found, 'all-reduce', 'reduce-scatter'))
    assert n_reduced >= sum(x.size for x in jax.tree.leaves(state.params))


def test_between_blocks_a_device_of_a_tensor_group_has_its_part_of_the_positions():
    mesh = create_mesh(jax.devices(), 4)

    def layer(x, kernel):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return linear(x, kernel, tp=ROW_PARALLEL)

    for T, n_sharded in ((8, 2), (1, 1), (6, 6)):  # 8 / 4; what does not divide is replicated
        x, kernel = jax.device_put((jnp.ones((2, T, 16)), jnp.ones((16, 12))), NamedSharding(mesh, P()))
        y = jax.jit(layer)(x, kernel)
        assert y.addressable_shards[0].data.shape == (1, n_sharded, 12)


def test_no_device_gets_the_logits_of_other_vocabulary_ranges():
    mesh, B, T, V, D = create_mesh(jax.devices(), 4), 4, 6, 64, 8

    def loss(table, x, y):
        logits = shard(jnp.einsum('btd,vd->btv', x, table), BATCH, None, 'tensor')
        return cross_entropy(logits, y).mean()

    def loss_and_gradients(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.value_and_grad(loss, (0, 1))(*args)

    def argument(shape, dtype, axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(axes)))

    args = (argument((V, D), jnp.float32, 'tensor'), argument((B, T, D), jnp.float32, BATCH),
            argument((B, T), jnp.int32, BATCH))
    found = collectives(jax.jit(loss_and_gradients).lower(*args).compile())
    assert {name for name, _ in found} == {'all-reduce'}
    # at most the gradients of x and of the table's own rows: less than the logits of a device's sequences
    largest = max(sizes_of(found, 'all-reduce'))
    assert largest <= max(B // 2 * T * D, V // 4 * D)
    assert largest < B // 2 * T * V // 4


@pytest.mark.slow
def test_gpt2_xl_on_eight_fsdp_devices_takes_less_than_a_sixth_of_the_memory():
    xl = GPTConfig(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)
    parallel, make, _ = compiled_once((8, 8), xl)
    n_params = sum(math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(make).params))
    replicated = 3 * 4 * n_params  # float32 parameters and AdamW's two moments
    assert replicated > 18e9
    state = jax.tree.leaves(parallel.abstract_state(make))
    stored = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    assert n_params < stored < replicated / 6
