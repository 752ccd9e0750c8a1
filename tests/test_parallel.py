"""What train_jax.py, sample_jax.py and jax_ops.py promise on many devices and in many processes."""
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ops
from jax_flags import UserError
from jax_generate import (
    DecodeState, Sampling, convert_params_for_decoding, decode, init_cache, order_columns_by_rank,
    prefill)
from jax_ops import (
    AXES, BATCH, COLUMN_PARALLEL, EXPERTS, ROW_PARALLEL, ParallelLMHead, VocabParallelEmbedding, create_mesh,
    embed_tokens, fused_causal_attention, linear, matmul_int8, mix_experts, partition_specs, shard)
from jax_train_utils import (
    DataParallel, MeshParallel, choose_checkpoint, create_learning_rate_schedule, create_optimizer_with_schedule,
    estimate_loss_jax, finish_checkpoints, get_batch_jax, initialize_distributed, load_checkpoint, make_eval_step,
    make_train_step, open_checkpoints, opt_state_item, read_metrics, reduce_over_replicas, save_checkpoint,
    setup_distributed_training)
from jax_transformer import GPTConfig, MoEConfig, create_train_state, cross_entropy
from tests.common import (
    ROOT, assert_refused, column, compiled_once, device_batch, meta_of, output_of, random_params,
    records_without_times, run_script, run_steps, train, wait_for, wait_for_iteration)

# no tensor axis divides the vocabulary
CONFIG = GPTConfig(block_size=16, vocab_size=37, n_layer=1, n_head=4, n_embd=16, dropout=0.2)
# layouts: (devices, fsdp, tensor, expert, context, zero), of which the last may be left out
ONE, PMAP, FSDP, TENSOR, BOTH, ALL = (1,), (8,), (2, 2), (2, 1, 2), (4, 2, 2), (8, 4, 2)
ZERO_1, ZERO_2, ZERO_2_ON_MESH = (8, 1, 1, 1, 1, 1), (8, 1, 1, 1, 1, 2), (8, 2, 2, 1, 1, 2)


def numbers(log):
    """[[loss, gradient norm]] of each iteration."""
    return np.stack([column(log, 'loss'), column(log, 'grad_norm')], axis=1)


@functools.cache
def curve(layout, dtype='float32'):
    return numbers(run_steps(layout, 30, dataclasses.replace(CONFIG, dtype=dtype))[1])


# of [loss, gradient norm] between layouts, in 30 iterations; seen in bfloat16: 2.2e-4 and 1.7e-3
BOUNDS = {'float32': [2e-4, 2e-4], 'bfloat16': [1e-3, 5e-3]}


def assert_same_curve(mesh, one, dtype='float32'):
    assert (abs(mesh - one) <= BOUNDS[dtype]).all(), abs(mesh - one).max(0)


# -----------------------------------------------------------------------------
# the same run on every layout


@pytest.mark.parametrize('dtype, layout', [
    *[('float32', layout) for layout in (FSDP, TENSOR, BOTH, ALL, ZERO_1, ZERO_2, ZERO_2_ON_MESH)],
    *[('bfloat16', layout) for layout in (TENSOR, ZERO_1, ZERO_2)]])
def test_every_mesh_gives_the_curve_of_one_device(dtype, layout):
    one, mesh = curve(ONE, dtype), curve(layout, dtype)
    assert one[-1, 0] < one[0, 0] - 1  # it learns
    assert_same_curve(mesh, one, dtype)


def test_a_mesh_with_data_alone_gives_the_curve_of_pmap():
    parallel = MeshParallel(tuple(jax.devices()))
    schedule = create_learning_rate_schedule(1e-2, decay_lr=False)
    tx = create_optimizer_with_schedule(schedule)
    state = parallel.init_sharded(create_train_state, jax.random.key(0), CONFIG, tx)
    step = parallel.train_step(make_train_step(CONFIG, 3, 1.0, schedule))
    log = []
    for i in range(30):
        state, metrics = step(state, device_batch(parallel, 2, 8, i, CONFIG))
        log.append(jax.tree.map(float, metrics))
    assert_same_curve(numbers(log), curve(PMAP))


def test_frequent_tokens_learn_in_bfloat16_on_a_mesh_as_in_float32():
    # a sum in bfloat16 over 2048 equal tokens would stagnate
    config = dataclasses.replace(CONFIG, vocab_size=8, dropout=0.0, block_size=512)

    def gradient(dtype):
        mesh = create_mesh(jax.devices()[:4], 2, 2)
        table = jax.device_put(random_params(config)['wte'], NamedSharding(mesh, P('tensor', 'fsdp')))
        idx = jax.device_put(np.zeros((4, 512), np.int32), NamedSharding(mesh, P(BATCH)))

        @jax.jit
        def embedding_gradient(table, idx):
            def total(table):
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    return embed_tokens(table, idx, dtype).astype(jnp.float32).sum()
            return jax.grad(total)(table)
        return embedding_gradient(table, idx)

    np.testing.assert_array_equal(gradient('bfloat16'), gradient('float32'))
    assert gradient('bfloat16')[0, 0] == 4 * 512


CONTEXT = dataclasses.replace(CONFIG, block_size=64, attention='chunked')
FEATURES = {
    'GPT-2': {}, 'bfloat16': dict(dtype='bfloat16'), 'remat': dict(n_layer=2, scan_layers=True, remat='full'),
    'window': dict(position='rope', n_kv_head=2, layer_types=('window',), window=20, sinks=True),
    'chunk': dict(position='rope', n_kv_head=2, layer_types=('chunk',), chunk=24, norm='rms', mlp='swiglu'),
    'latent': dict(position='rope', mla=dict(q_rank=8, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=12)),
    'experts': dict(moe=MoEConfig(n_expert=4, n_used=2, width=8))}


@pytest.mark.parametrize('features, layout', [
    ('GPT-2', (8, 1, 1, 1, 8)), ('bfloat16', (2, 1, 1, 1, 2)), ('remat', (8, 1, 2, 1, 4)),
    ('window', (8, 2, 1, 1, 2)), ('chunk', (4, 1, 1, 1, 4)), ('latent', (8, 1, 1, 1, 2, 2)),
    ('experts', (8, 1, 2, 2, 2))])
def test_a_sequence_sharded_over_devices_learns_as_on_one(features, layout):
    config = dataclasses.replace(CONTEXT, **FEATURES[features])
    one, several = (numbers(run_steps(on, 6, config, g=1)[1]) for on in (ONE, layout))
    assert_same_curve(several, one, config.dtype)


def test_positions_of_a_sequence_are_loaded_and_evaluated_where_they_are_computed():
    parallel, make, _ = compiled_once((4, 1, 1, 1, 4), CONTEXT)
    x = device_batch(parallel, 1, 8, 0, CONTEXT)['x']
    assert {part.data.shape for part in x.addressable_shards} == {(1, 8, 16)}
    splits = {'train': np.arange(3000) % 37, 'val': np.arange(2000) % 31}
    losses = []
    for layout in (ONE, (4, 1, 1, 1, 4)):
        parallel, make, _ = compiled_once(layout, CONTEXT)
        eval_step = parallel.eval_step(make_eval_step(CONTEXT, loss_chunk=16))
        losses.append(estimate_loss_jax(
            eval_step, parallel.init_sharded(make).params, splits, parallel, block_size=64, batch_size=4, eval_iters=2))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize('layout', [(2,), (8, 2, 2, 2), (8, 1, 1, 8)])  # the last one by exchange_tokens
def test_experts_on_several_devices_learn_as_on_one(layout):
    moe = MoEConfig(n_expert=8, n_used=2, width=8, shared_width=8, balance=0.1)
    config = dataclasses.replace(CONFIG, mlp='swiglu', moe=moe, dropout=0.0, block_size=128)
    _, one = run_steps(ONE, 5, config)
    state, several = run_steps(layout, 5, config)
    np.testing.assert_allclose(numbers(several), numbers(one), atol=2e-4)
    experts = state.params['h_0']['mlp']['experts_c_fc']['kernel']
    stored = experts.addressable_shards[0].data.size / experts.size
    assert stored == 1 / math.prod(layout[1:])  # sharded over fsdp, tensor and expert


@pytest.mark.parametrize('n_used, tensor', [(1, 1), (2, 1), (1, 2)])
def test_tokens_sent_to_their_experts_give_the_values_and_gradients_of_one_device_for_every_routing(n_used, tensor):
    E, D, F, M, C, n_tokens = 16, 8, 12, 8 // tensor, 64, 8 // tensor * 128
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    weights, x, weight = {'up': draw(E, D, F), 'down': draw(E, F, D)}, draw(n_tokens, D), draw(n_tokens, n_used)
    balanced = rng.random((n_tokens, E)).argsort()[:, :n_used].astype(np.int32)
    to_one_rank = np.tile(np.arange(n_used, dtype=np.int32), (n_tokens, 1))  # in two rounds of C rows
    some_to_one_rank = np.where(np.arange(n_tokens)[:, None] < 128, to_one_rank, balanced)  # those of one device
    mesh = create_mesh(jax.devices(), tensor, expert=M)

    def expert_mlp(w, x):
        return jnp.tanh(x @ w['up']) @ w['down']

    def total(weights, x, weight, expert):
        y = mix_experts(expert_mlp, weights, x, expert, weight)
        return jnp.sin(y).sum(), y

    gradients_and_values = jax.grad(total, (0, 1, 2), has_aux=True)

    def on_mesh(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return gradients_and_values(*args)

    def arguments(expert):
        tokens = jax.device_put((x, weight, expert), NamedSharding(mesh, P(BATCH)))
        return jax.device_put(weights, NamedSharding(mesh, P(EXPERTS))), *tokens

    program = jax.jit(on_mesh).lower(*arguments(balanced)).compile()
    for expert in balanced, to_one_rank, some_to_one_rank:
        got, expected = program(*arguments(expert)), jax.jit(gradients_and_values)(weights, x, weight, expert)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    first_round = next(part for part in program.as_text().split('\n\n') if part.startswith('ENTRY'))
    found = collectives(first_round)
    assert sum(sizes_of(found, 'all-to-all')) == 4 * M * C * D + 3 * M * C * n_used  # there and back, with gradients
    assert not sizes_of(found, 'all-gather', 'reduce-scatter')


def test_float16_scales_its_loss_on_a_mesh_as_on_one_device():
    half = dataclasses.replace(CONFIG, dtype='float16', dropout=0.0)
    losses = []
    for layout in (ONE, BOTH):
        state, (first,) = run_steps(layout, 1, half)
        parallel = compiled_once(layout, half)[0]
        scale = parallel.device_put({'scale': np.float32(2.0**40), 'good_steps': np.int32(7)})
        state, (overflow,) = run_steps(layout, 1, half, state=state.replace(loss_scale=scale), first=1)
        assert not np.isfinite(overflow['grad_norm'])
        assert state.step == 1
        assert state.loss_scale == {'scale': 2.0**39, 'good_steps': 0}
        losses.append(first['loss'])
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_execution_options_and_muon_give_the_curve_of_one_device_too():
    config = dataclasses.replace(CONFIG, n_layer=2, scan_layers=True, remat='full')
    schedule = create_learning_rate_schedule(1e-2, decay_lr=False)
    tx = create_optimizer_with_schedule(schedule, optimizer='muon')
    losses = []
    for n_devices, *axes in (ONE, BOTH):
        parallel = setup_distributed_training(jax.devices()[:n_devices], *axes)
        state = parallel.init_sharded(create_train_state, jax.random.key(0), config, tx)
        step = parallel.train_step(make_train_step(config, 3, 1.0, schedule, loss_chunk=4))
        for i in range(4):
            state, metrics = step(state, device_batch(parallel, 1, 8, i, config))
            losses.append(float(metrics['loss']))
    np.testing.assert_allclose(losses[4:], losses[:4], atol=2e-4)


def test_evaluation_is_the_same_on_a_mesh():
    splits = {'train': np.arange(3000) % 37, 'val': np.arange(2000) % 31}
    losses = []
    for layout in (ONE, BOTH):
        parallel, make, _ = compiled_once(layout, CONFIG)
        eval_step = parallel.eval_step(make_eval_step(CONFIG))
        params = parallel.init_sharded(make).params
        losses.append(estimate_loss_jax(
            eval_step, params, splits, parallel, block_size=16, batch_size=4, eval_iters=3))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_process_reads_the_rows_of_its_own_devices_only():
    devices = [types.SimpleNamespace(process_index=i // 2) for i in range(8)]  # four processes with two devices each

    def rows_of_process_0(n_rows, fsdp=1, tensor=1):
        on_a_mesh = fsdp * tensor > 1
        layout = MeshParallel(tuple(devices), fsdp, tensor) if on_a_mesh else DataParallel(tuple(devices))
        shape = dict(zip(AXES, (8 // (fsdp * tensor), fsdp, tensor, 1, 1)))
        mesh = types.SimpleNamespace(devices=np.array(devices).reshape(*shape.values()), shape=shape)
        object.__setattr__(layout, 'mesh', mesh)
        return layout.local_rows(n_rows).tolist()

    assert jax.process_index() == 0
    assert rows_of_process_0(16) == [0, 1, 2, 3]
    assert rows_of_process_0(16, fsdp=4) == [0, 1, 2, 3]
    assert rows_of_process_0(16, tensor=2) == [0, 1, 2, 3]
    assert rows_of_process_0(8, tensor=4) == [0, 1, 2, 3]
    tokens = np.arange(1000, dtype=np.uint16)
    every_row = np.array(get_batch_jax(tokens, 16, 12, 7, 5))
    some_rows = get_batch_jax(tokens, 16, 12, 7, 5, np.array([3, 4, 11]))
    np.testing.assert_array_equal(some_rows, every_row[:, [3, 4, 11]])


# -----------------------------------------------------------------------------
# what is stored where


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


@pytest.mark.parametrize('layout, n_copies', [(ZERO_1, 8), (ZERO_2, 8), (ZERO_2_ON_MESH, 2)])
def test_zero_shards_the_optimizer_state_over_the_replicas_of_a_parameter(layout, n_copies):
    config = dataclasses.replace(CONFIG, vocab_size=64)
    parallel, make, step = compiled_once(layout, config)
    state, _ = step(parallel.init_sharded(make), device_batch(parallel, 2, 8, 0, config))
    n_stored = lambda x: x.addressable_shards[0].data.size
    for name in ('c_attn', 'c_proj'):
        param, mean = (tree['h_0']['attn'][name]['kernel'] for tree in (state.params, state.opt_state[0].mu))
        assert n_stored(param) == param.size * n_copies // 8
        assert n_stored(mean) == mean.size // 8


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
# vocabulary parallelism


def table_bias_and_x(V, D):
    shapes = (V, D), (V,), (4, 3, D)
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize('tp_size', [1, 2, 4, 8])
@pytest.mark.parametrize('V', [40, 37])
def test_vocabulary_parallel_layers_equal_the_dense_ones_in_values_and_gradients(V, tp_size):
    args = table_bias_and_x(V, 6)
    tokens = np.random.default_rng(0).integers(V, size=(4, 3))
    mesh = create_mesh(jax.devices(), tp_size)
    embedding = VocabParallelEmbedding(V, 6, tp_size)
    lm_head = ParallelLMHead(V, 6, tp_size, bias=True)

    def sharded(table, bias, x):
        x += embedding.apply({'params': {'weight': table}}, tokens, mesh, method='sharded_forward')
        logits = lm_head.apply({'params': {'weight': table, 'bias': bias}}, x, mesh, method='sharded_forward')
        return cross_entropy(logits, tokens)

    def dense(table, bias, x):
        return cross_entropy((x + table[tokens]) @ table.T + bias, tokens)

    def values_and_gradients(function):
        total = lambda *args: jnp.sin(function(*args)).sum()
        return jax.jit(lambda *args: (function(*args), jax.grad(total, (0, 1, 2))(*args)))(*args)

    got, expected = values_and_gradients(sharded), values_and_gradients(dense)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_each_rank_of_the_layers_computes_its_vocabulary_range():
    V, D, tp_size = 37, 6, 4
    table, bias, x = table_bias_and_x(V, D)
    tokens = np.random.default_rng(0).integers(V, size=(4, 3))
    embeddings, logits = [], []
    for rank in range(tp_size):
        layer = VocabParallelEmbedding(num_embeddings=V, embedding_dim=D, tp_size=tp_size, tp_rank=rank)
        weight = layer.load_weight_shard(table)
        assert weight.shape == (10, D)
        assert layer.init(jax.random.key(0), tokens)['params']['weight'].shape == (10, D)
        embeddings.append(layer.apply({'params': {'weight': weight}}, tokens))
        np.testing.assert_array_equal(np.any(embeddings[-1], -1), tokens // 10 == rank)  # zeros for ids of other ranks
        head = ParallelLMHead(V, D, tp_size, rank, bias=True)
        params = {'weight': head.load_weight_shard(table), 'bias': head.load_weight_shard(bias)}
        logits.append(head.apply({'params': params}, x))
        last = head.apply({'params': params}, x, jnp.array([2, 0, 1, 2]))
        np.testing.assert_allclose(last[:, 0], logits[-1][np.arange(4), [2, 0, 1, 2]], atol=1e-6)
    np.testing.assert_array_equal(sum(embeddings), table[tokens])
    logits = np.concatenate(logits, -1)
    np.testing.assert_allclose(logits[..., :V], x @ table.T + bias, atol=1e-5)
    assert (logits[..., V:] == -np.inf).all()
    low = VocabParallelEmbedding(V, D, dtype='bfloat16')
    assert low.apply({'params': {'weight': table}}, tokens).dtype == jnp.bfloat16
    with pytest.raises(UserError, match='table of 36 rows is not one of 37'):
        head.load_weight_shard(table[:-1])


def test_logits_are_gathered_on_request_only():
    mesh = create_mesh(jax.devices(), 4)
    lm_head, x = ParallelLMHead(40, 6, 4), jnp.ones((2, 3, 6))
    params = {'params': {'weight': jax.random.normal(jax.random.key(0), (40, 6))}}

    def logits(**options):
        return jax.jit(lambda: lm_head.apply(params, x, mesh, method='sharded_forward', **options))()

    assert logits().addressable_shards[0].data.shape[-1] == 10
    assert logits(gathered=True).addressable_shards[0].data.shape == (2, 3, 40)
    assert logits(last_B=jnp.array([0, 2])).shape == (2, 1, 40)


# -----------------------------------------------------------------------------
# the compiled program


def collectives(program):
    """[(name, number of elements of each result)] of all collectives in a compiled program."""
    text = program if isinstance(program, str) else program.as_text()
    names = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
    found = []
    for shapes, name in re.findall(rf'= (.*?) ({names})(?:-start)?\(', text):
        dimensions = re.findall(r'\w\[([\d,]*)\]', shapes)
        found.append((name, [math.prod(map(int, filter(None, dims.split(',')))) for dims in dimensions]))
    return found


def sizes_of(found, *names):
    """The numbers of elements of the collectives of these names."""
    return [size for name, sizes in found if name in names for size in sizes]


def compile_step(layout, config, b=8):
    """(the compiled training step of one micro-batch of b sequences per data shard, the abstract state)."""
    parallel, make, step = compiled_once(layout, config)
    state = parallel.abstract_state(make)
    x = np.zeros((b * parallel.n_data_shards, config.block_size), np.int32)
    batch = parallel.shard_batch({'x': x, 'y': x, 'seq_id': np.zeros(len(x), np.uint32)}, (1, b))
    return step.lower(state, batch).compile(), state


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


def test_gpt2_xl_on_eight_fsdp_devices_takes_less_than_a_sixth_of_the_memory():
    xl = GPTConfig(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)
    parallel, make, _ = compiled_once((8, 8), xl)
    n_params = sum(math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(make).params))
    replicated = 3 * 4 * n_params  # float32 parameters and AdamW's two moments
    assert replicated > 18e9
    state = jax.tree.leaves(parallel.abstract_state(make))
    stored = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    assert n_params < stored < replicated / 6


# -----------------------------------------------------------------------------
# checkpoints move between layouts


@pytest.mark.parametrize('saved_on, resumed_on', [
    (ALL, (ALL, ONE, PMAP)), (PMAP, (BOTH, ZERO_1)), (ZERO_1, (ZERO_1, ALL)), (ZERO_2, (ZERO_2, PMAP))])
def test_a_checkpoint_resumes_on_any_other_layout_and_bit_for_bit_on_its_own(tmp_path, saved_on, resumed_on):
    state, _ = run_steps(saved_on, 8, CONFIG)
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 8, state, meta_of(CONFIG))
    finish_checkpoints(manager)
    saved = jax.tree.map(np.asarray, (state.params, opt_state_item(state)))
    expected = numbers(run_steps(saved_on, 3, CONFIG, state=state, first=8)[1])
    for layout in resumed_on:
        parallel, make, _ = compiled_once(layout, CONFIG)
        restored = load_checkpoint(tmp_path, 8, parallel.abstract_state(make))
        jax.tree.map(np.testing.assert_array_equal, (restored.params, opt_state_item(restored)), saved)
        log = run_steps(layout, 3, CONFIG, state=restored, first=8)[1]
        np.testing.assert_allclose(numbers(log), expected, atol=0 if layout == saved_on else 2e-4)


# -----------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize('flags, message', [
    (['--fsdp=3'], r'fsdp=3 x tensor=1 x expert=1 x context=1 does not divide 8 devices; '
                   r'the product may be one of \[1, 2, 4, 8\]'),
    (['--tensor=0'], 'fsdp=1 x tensor=0 x expert=1 x context=1 does not divide'),
    (['--tensor=4', '--n_head=2'], r'tensor=4 does not divide n_head=2; on 8 devices it may be one of \[1, 2\]'),
    (['--fsdp=4', '--n_embd=18', '--n_head=2'],
     r'fsdp=4 does not divide n_embd=18; on 8 devices it may be one of \[1, 2\]'),
    (['--expert=2'], r'expert=2 does not divide n_expert=1; on 8 devices it may be one of \[1\]'),
    (['--zero=1', '--tensor=2'], 'zero=1 goes without fsdp, tensor, expert and context; with them use --zero=2'),
    (['--context=8'], 'context=8: its square must divide block_size=16'),
    (['--context=4', '--attention=xla'], 'attention=xla does not shard a sequence'),
    (['--zero=3'], r'zero must be 0, 1 .ZeRO-1. or 2 .ZeRO-2., not 3; ZeRO-3 is --fsdp'),
    (['--fsdp=2', '--batch_size=3'], 'cannot be shared equally by 8 devices'),
    (['--coordinator_address=localhost'], 'needs --num_processes and --process_id'),
    (['--num_processes=2'], 'several processes need --coordinator_address=host:port'),
    (['--num_processes=2', '--process_id=2', '--coordinator_address=localhost:1'], '--process_id=0 to N-1')])
def test_a_layout_that_cannot_be_is_refused(dataset, tmp_path, flags, message):
    model = ['--n_layer=1', '--n_head=4', '--n_embd=16', '--block_size=16', '--batch_size=8',
             '--gradient_accumulation_steps=1']
    assert_refused(train(tmp_path / 'out', f'--dataset={dataset}', *model, *flags), message)
    assert not (tmp_path / 'out').exists()


TORCHRUN = {'RANK': '3', 'WORLD_SIZE': '4', 'LOCAL_RANK': '1', 'MASTER_ADDR': 'host', 'MASTER_PORT': '29500'}


def test_torchruns_variables_are_understood(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **given: joined.append(given))
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    initialize_distributed()
    expected = dict(coordinator_address='host:29501', num_processes=4, process_id=3, local_device_ids=1)
    assert expected.items() <= joined[0].items()
    monkeypatch.delenv('MASTER_ADDR')
    with pytest.raises(UserError, match="torchrun's variables .* are incomplete .'MASTER_ADDR'"):
        initialize_distributed()
    monkeypatch.setenv('WORLD_SIZE', '1')
    initialize_distributed()
    assert len(joined) == 1


def test_processes_are_joined_only_where_flags_or_the_environment_say_so(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **given: joined.append(given.get('process_id', 'auto')))
    for name in ('SLURM_NTASKS', 'SLURM_STEP_NODELIST', 'OMPI_COMM_WORLD_SIZE', 'KUBERNETES_SERVICE_HOST',
                 'JOB_COMPLETION_INDEX', *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    initialize_distributed()
    monkeypatch.setenv('SLURM_NTASKS', '4')
    initialize_distributed()  # inside an allocation, but not started by srun
    assert joined == []
    monkeypatch.setenv('SLURM_STEP_NODELIST', 'node[1-4]')
    initialize_distributed()
    initialize_distributed('host:1234', 2, 1)
    monkeypatch.delenv('SLURM_NTASKS')
    initialize_distributed('auto')
    assert joined == ['auto', 1, 'auto']


def test_a_kubernetes_job_of_one_pod_needs_no_package_and_one_of_several_names_it(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **given: joined.append(given))
    for name, value in {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '0'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    initialize_distributed(num_processes=1)
    with pytest.raises(UserError, match=r'pip install "jax.k8s."; for a job of one pod add --num_processes=1'):
        initialize_distributed()
    assert not joined
    initialize_distributed('host:1234', 2, 1)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
    initialize_distributed()
    assert len(joined) == 2


# -----------------------------------------------------------------------------
# several processes


FLAGS = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
         '--gradient_accumulation_steps=2', '--dropout=0.1', '--max_iters=100', '--eval_interval=100',
         '--eval_iters=2', '--warmup_iters=2', '--lr_decay_iters=30', '--learning_rate=1e-2', '--device=cpu']


class Processes:
    """n processes of train_jax.py, or another script, that work together, one device each."""

    def __init__(self, n, out_dir, *flags, each=None, script='train_jax.py', n_started=None):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            self.port = s.getsockname()[1]
        self.out_dir = out_dir
        command = [sys.executable, ROOT / script, f'--out_dir={out_dir}', *flags,
                   f'--coordinator_address=127.0.0.1:{self.port}', f'--num_processes={n}']
        self.processes = [
            subprocess.Popen([*command, f'--process_id={i}', *(each[i] if each else ())],
                             env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'), text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
            for i in range(n_started or n)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            output_of(process)

    def wait_for_iteration(self, iteration):
        wait_for_iteration(self.out_dir, iteration, *self.processes)

    def results(self):
        """[(exit code, stdout, stderr)] of each, when all have ended."""
        output = [output_of(process) for process in self.processes]
        return [(process.returncode, *texts) for process, texts in zip(self.processes, output)]


def losses_of_run(out_dir):
    return [record['loss'] for record in read_metrics(out_dir) if 'loss' in record]


def restored_state(out_dir):
    """(parameters, the rest of the state) of the latest checkpoint, on one device."""
    step, meta = choose_checkpoint(out_dir)
    tx = create_optimizer_with_schedule(lambda step: 0.1)
    parallel = setup_distributed_training(jax.devices()[:1])
    abstract = parallel.abstract_state(create_train_state, jax.random.key(0), GPTConfig(**meta['model']), tx)
    state = load_checkpoint(out_dir, step, abstract)
    return state.params, opt_state_item(state)


@pytest.fixture(scope='module')
def losses_of_one_process(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('one') / 'out'
    assert train(out, f'--dataset={dataset}', *FLAGS, '--device=cpu:0').returncode == 0
    return losses_of_run(out)


def test_two_processes_give_the_curve_of_one_and_survive_the_death_of_one_bit_for_bit(
        dataset, tmp_path, losses_of_one_process):
    flags = [f'--dataset={dataset}', *FLAGS, '--save_interval=10']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    with Processes(2, whole, *flags) as processes:
        (code, out, err), (_, out_1, _) = processes.results()
    assert code == 0, err
    for text in ('2 x cpu', 'iter 0'):  # only process 0 prints
        assert text in out
        assert text not in out_1
    np.testing.assert_allclose(losses_of_run(whole)[:30], losses_of_one_process[:30], atol=2e-4)

    with Processes(2, killed, *flags) as processes:
        processes.wait_for_iteration(25)
        processes.processes[1].kill()
        (code, _, err), _ = processes.results()
    assert code == 75
    assert 'error: process 0 of 2 has lost the others; start all of them again, with --init_from=resume' in err
    assert 10 <= choose_checkpoint(killed)[0] < 100
    with Processes(2, killed, '--init_from=resume', '--device=cpu') as processes:
        assert [code for code, *_ in processes.results()] == [0, 0]
    assert records_without_times(killed) == records_without_times(whole)
    jax.tree.map(np.testing.assert_array_equal, restored_state(killed), restored_state(whole))


def test_four_processes_on_a_mesh_give_the_curve_stop_together_and_one_device_resumes(
        dataset, tmp_path, losses_of_one_process):
    endless = ['--max_iters=100000', '--eval_interval=100000']
    with Processes(4, tmp_path, f'--dataset={dataset}', *FLAGS, '--fsdp=2', '--tensor=2', *endless) as processes:
        processes.wait_for_iteration(30)
        processes.processes[2].send_signal(signal.SIGTERM)
        results = processes.results()
    assert [code for code, *_ in results] == [128 + signal.SIGTERM] * 4, results[0][2]
    saved = int(re.search(r'at iteration (\d+), saved', results[0][1])[1])
    assert choose_checkpoint(tmp_path)[0] == saved
    np.testing.assert_allclose(losses_of_run(tmp_path)[:30], losses_of_one_process[:30], atol=2e-4)
    result = train(tmp_path, '--init_from=resume', '--device=cpu:0', f'--max_iters={saved + 2}')
    assert result.returncode == 0, result.stderr
    assert "does not fit 1 devices: taking {'fsdp': 1, 'tensor': 1, 'expert': 1, 'context': 1}" in result.stdout
    assert f'at iteration {saved}' in result.stdout
    refused = train(tmp_path, '--init_from=resume', '--device=cpu:0', '--fsdp=2')
    assert_refused(refused, 'fsdp=2 x tensor=1 x expert=1 x context=1 does not divide 1 devices')


def each_with(name, values, out_dir, *flags):
    """Processes of which each has its own value of a flag."""
    return Processes(len(values), out_dir, *flags, each=[[f'--{name}={value}'] for value in values])


@pytest.mark.parametrize('name, values, message', [
    ('batch_size', (4, 2), 'processes 0 and 1 have different flags, all must have the same: batch_size is 4 and 2'),
    ('dataset', ('{dataset}', 'nowhere'), 'process 1: there is no .*nowhere/train.bin; '),
    ('out_dir', ('{tmp}/a', '{tmp}/b'), 'process 1: .*/b is not the folder of process 0')])
def test_processes_that_do_not_agree_all_end_at_the_start_with_the_same_line(dataset, tmp_path, name, values, message):
    values = [value.format(dataset=dataset, tmp=tmp_path) if type(value) is str else value for value in values]
    started = time.time()
    with each_with(name, values, tmp_path, f'--dataset={dataset}', *FLAGS) as processes:
        results = processes.results()
    assert time.time() - started < 60  # importing and joining included; a process that waits for another one takes 60 s
    for code, _, err in results:
        assert code == 2
        assert re.fullmatch(f'error: {message}.*\n', err), err
    assert not list(tmp_path.rglob('ckpt'))


@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_process_waits_for_the_others_ends_it(dataset, tmp_path, signum):
    with Processes(2, tmp_path, f'--dataset={dataset}', *FLAGS, n_started=1) as processes:
        waiting, = processes.processes
        with socket.socket() as s:
            wait_for('process 0 to listen', lambda: s.connect_ex(('127.0.0.1', processes.port)) == 0, waiting)
        assert waiting.poll() is None
        waiting.send_signal(signum)
        assert waiting.wait(timeout=20) == -signum  # 128 + signum for a shell
    assert not list(tmp_path.iterdir())


def test_a_signal_before_the_first_iteration_stops_all_processes(dataset, tmp_path):
    endless = ['--max_iters=100000', '--eval_interval=100000']
    with Processes(2, tmp_path, f'--dataset={dataset}', *FLAGS, *endless) as processes:
        lock = tmp_path / 'lock'  # written after joining, before the model is made and compiled
        wait_for(lock, lock.exists, processes.processes[0])
        processes.processes[1].send_signal(signal.SIGTERM)
        results = processes.results()
    assert [code for code, *_ in results] == [128 + signal.SIGTERM] * 2, results


# -----------------------------------------------------------------------------
# sampling, tracing, scaling


def test_sampling_with_sharded_heads_gives_the_text_of_one_device(dataset, tmp_path):
    out = tmp_path / 'out'
    assert train(out, f'--dataset={dataset}', *FLAGS, '--max_iters=2', '--device=cpu:0').returncode == 0
    flags = [f'--out_dir={out}', '--device=cpu', '--num_samples=2', '--max_new_tokens=30', '--start=the', '--top_k=5']
    one, two = run_script('sample_jax.py', *flags), run_script('sample_jax.py', *flags, '--tensor=2')
    assert two.returncode == 0, two.stderr
    assert '2 x cpu' in two.stderr
    assert len(one.stdout) > 60
    assert two.stdout == one.stdout
    too_many = run_script('sample_jax.py', *flags, '--tensor=9')
    assert_refused(too_many, 'tensor=9 x expert=1, and there are 8 devices')
    assert_refused(run_script('sample_jax.py', *flags, '--tensor=4'), 'tensor=4 does not divide n_head=2')


def test_two_processes_sample_the_text_of_one_and_process_0_prints_it(dataset, tmp_path):
    out = tmp_path / 'out'
    assert train(out, f'--dataset={dataset}', *FLAGS, '--max_iters=2', '--device=cpu:0').returncode == 0
    flags = ['--num_samples=2', '--max_new_tokens=12', '--start=the', '--top_k=5', '--stream=True']
    one = run_script('sample_jax.py', f'--out_dir={out}', '--device=cpu:0', *flags)
    assert len(one.stdout) > 40
    with Processes(2, out, '--device=cpu', *flags, '--tensor=2', script='sample_jax.py') as processes:
        results = processes.results()
    assert [code for code, *_ in results] == [0, 0], results
    texts = [re.sub(r'\[Gloo\].*\n', '', text) for _, text, _ in results]  # which XLA:CPU prints
    assert texts == [one.stdout, '']
    assert [f'{out}, checkpoint of iteration 2; 2 x cpu' in err for *_, err in results] == [True, False]
    with Processes(2, out, '--device=cpu', *flags, script='sample_jax.py') as processes:
        for code, _, err in processes.results():
            assert code == 2
            assert re.fullmatch('error: .*tensor=1 x expert=1 must be 2, all devices of the 2 processes.*\n', err), err


def test_several_processes_do_not_chat(monkeypatch):
    monkeypatch.setattr('jax.process_count', lambda: 2)
    monkeypatch.setattr('jax_train_utils.check_agreement', lambda *args: None)  # which would wait for the other process
    result = run_script('sample_jax.py', '--interactive=True', '--device=cpu', '--tensor=8')
    assert_refused(result, 'interactive takes one process')


@pytest.mark.parametrize('quantize, B, D', [('', 3, 64), ('int8', 1, 256)])
def test_the_kv_cache_is_sharded_over_heads_and_decoding_moves_no_weights(quantize, B, D):
    config = dataclasses.replace(CONFIG, n_embd=D, n_layer=2)
    parallel = setup_distributed_training(jax.devices()[:4], tensor=4)
    params = parallel.init_sharded(create_train_state, jax.random.key(0), config, optax.identity()).params
    state = DecodeState(
        tokens_BxN=jnp.zeros((B, 24), jnp.int32), length_B=jnp.full(B, 4), n_generated_B=jnp.zeros(B, jnp.int32),
        done_B=jnp.zeros(B, bool), key_B=jax.random.split(jax.random.key(0), B))
    static = dict(configs=(config,), n_draft=0, use_cache=True)
    with parallel.mesh_context():
        params = order_columns_by_rank(convert_params_for_decoding(params, 'float32', quantize), config)
        cache = prefill(params, jax.jit(init_cache, static_argnums=(0, 1, 2))(config, B, 16),
                        np.zeros((B, 16), np.int32), np.arange(16, dtype=np.int32)[None], config=config)
        state = state.replace(caches=(cache,))
        lowered = decode.lower(
            (params,), state, Sampling(n_vocab=37), np.int32(8), np.int32(16), np.int32(16), **static)
        program = lowered.compile().as_text()
    for x in jax.tree.leaves(state.caches):
        assert x.addressable_shards[0].data.shape == (B, 1, 16, D // 4)
    assert max(sum(sizes) for _, sizes in collectives(program)) == B * D  # activations of one token


def test_profile_leaves_a_trace_with_the_names_of_blocks_and_collectives(dataset, tmp_path):
    result = train(tmp_path, f'--dataset={dataset}', *FLAGS, '--max_iters=9', '--profile=True', '--device=cpu:0')
    assert f'traced iterations 5 to 7 into {tmp_path}/profile' in result.stdout, result.stderr
    assert list((tmp_path / 'profile').rglob('*.trace.json.gz'))
    short = tmp_path / 'short'
    result = train(short, f'--dataset={dataset}', *FLAGS, '--max_iters=2', '--profile=True', '--device=cpu:0')
    assert f'traced iterations 0 to 2 into {short}/profile' in result.stdout, result.stderr
    assert list((short / 'profile').rglob('*.trace.json.gz'))
    text = compile_step(BOTH, CONFIG)[0].as_text()
    for scope in ('h_0/attn/c_attn', 'h_0/mlp', 'all_gather', 'all_reduce', 'cross_entropy', 'clip', 'optimizer'):
        assert re.search(f'op_name="[^"]*{scope}', text), scope


PLAN = ['--mode=compile', '--n_layer=1', '--n_head=4', '--n_embd=64', '--block_size=32', '--vocab_size=64',
        '--batch_size=8', '--gradient_accumulation_steps=16']


def test_the_plan_of_a_run_counts_what_each_axis_sends_through_loops():
    result = run_script('bench_jax.py', *PLAN, '--topology=cpu:1x8', '--fsdp=4')
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])['results']
    sent = {(row['kind'], row['axis']): row for row in report['collectives'] if row['dtype'] == 'f32'}
    assert sent['all-gather', 'fsdp']['n'] == 4
    # embedding, in 2 micro-steps forward and backward: a quarter of the columns of 4 x 8 sequences
    assert sent['all-to-all', 'fsdp']['bytes'] == 2 * 2 * 4 * (4 * 8 * 32 * 64 / 4) * 3 / 4
    assert sent['all-to-all', 'fsdp']['exposed'] == sent['all-to-all', 'fsdp']['bytes']  # a CPU's are synchronous
    # every kernel is gathered at least once forward (XLA:CPU moves that out of the loop) and once backward
    assert sent['all-gather', 'fsdp']['bytes'] >= 4 * (2 * 12 * 64**2 + (64 + 32) * 64) * 3 / 4
    matrices, replicated = 12 * 64**2 + (64 + 32) * 64, 15 * 64
    assert report['n_params'] == matrices + replicated
    assert report['parameters_gb'] * 1e9 == 4 * (matrices / 4 + replicated)
    assert report['optimizer_gb'] == pytest.approx(2 * report['parameters_gb'], rel=0.01)
    assert report['peak_gb'] > report['parameters_gb'] + report['optimizer_gb']


def test_the_plan_of_a_decode_step_counts_weights_cache_and_collectives():
    flags = ['--plan=decode', '--topology=cpu:1x8', '--tensor=4', '--batch_size=3', '--prompt_len=8',
             '--max_new_tokens=8']
    reports = []
    for more in ([], ['--quantize=int8', '--cache_dtype=int8']):
        result = run_script('bench_jax.py', *PLAN, *flags, *more)
        assert result.returncode == 0, result.stderr
        assert '4 x cpu, compiled, not run' in result.stdout
        reports.append(json.loads(result.stdout.splitlines()[-1])['results'])
    full, quantized = reports
    assert full['cache_gb'] * 1e9 == pytest.approx(2 * 3 * 32 * 64 * 4 / 4)  # k and v, 32 slots, float32, a quarter
    assert quantized['cache_gb'] * 1e9 == pytest.approx(2 * 3 * 32 * (64 + 4 * 4) / 4)  # and a scale per vector
    assert quantized['parameters_gb'] < full['parameters_gb'] / 2
    moved = sum(row['bytes'] for row in full['collectives'])
    assert full['sent_mb'] * 1e6 == pytest.approx(moved)
    assert 0 < moved < 4 * 20 * 3 * 64  # activations of a token, no weights
    assert_refused(run_script('bench_jax.py', *PLAN, '--plan=prefill'), 'plan must be train or decode')


def test_a_plan_for_a_device_without_its_compiler_says_what_to_install():
    for topology, package, extra in (('v5e:4x4', 'libtpu', 'tpu'), ('h100:1x8', 'jax_cuda12_plugin', 'cuda12')):
        if importlib.util.find_spec(package) is None:
            result = run_script('bench_jax.py', *PLAN, f'--topology={topology}')
            assert_refused(result, re.escape(f'needs its compiler: pip install "jax[{extra}]=='))
    assert_refused(run_script('bench_jax.py', *PLAN, '--topology=abacus:8'), 'topology must be like v5e:4x4')


# -----------------------------------------------------------------------------
# shard_map with check_vma, off in the product: tracing then infers over which axes of the mesh a value differs between
# devices, and refuses an output whose spec calls it replicated

def trace_chunked_attention():
    """On a mesh with a context axis, with dropout, and its gradients."""
    q, kv, keys = jnp.zeros((4, 256, 4, 16)), jnp.zeros((4, 256, 2, 16)), jax.random.split(jax.random.key(0), 4)

    def total(q, k, v):
        return fused_causal_attention('chunked', q, k, v, dropout_rate=0.1, key_B=keys).sum()

    return jax.grad(total, (0, 1, 2))(q, kv, kv)


def trace_experts(n_tokens):
    """Without gradients: those of expert weights are added up in a loop that starts from zeros, which differ nowhere,
    and a loop may not change over which axes its values differ."""
    weights, x, chosen = jnp.zeros((8, 16, 16)), jnp.zeros((n_tokens, 16)), jnp.zeros((n_tokens, 2), jnp.int32)
    return mix_experts(lambda w, x: x @ w, weights, x, chosen, jnp.ones((n_tokens, 2)))


def trace_int8(tp):
    """Without fusion_barrier: one branch of its condition is a constant, which differs nowhere, the other differs."""
    return matmul_int8(jnp.zeros((8, 256)), jnp.zeros((64, 256), jnp.int8), jnp.zeros(64), tp)


def trace_gradient_reduction():
    """Of gradients that do not come from jax.grad, which under the check adds up those of replicated parameters itself,
    after every micro-batch."""
    def sum_gradients(params, batch, scale):
        return {'kernel': batch['x'][0].T @ batch['x'][0], 'bias': batch['x'][0].sum(0)[:3]}, batch['x'].sum()

    params = {'kernel': jnp.zeros((16, 16)), 'bias': jnp.zeros(3)}
    return reduce_over_replicas(sum_gradients)(params, {'x': jnp.zeros((1, 8, 16))}, 1.0)


@pytest.mark.parametrize('trace, axes', [
    (trace_chunked_attention, {'tp_size': 2, 'fsdp': 2}), (trace_chunked_attention, {'tp_size': 2, 'context': 2}),
    (functools.partial(trace_experts, 128), {'tp_size': 2, 'fsdp': 2, 'expert': 2}),
    (functools.partial(trace_experts, 6), {'tp_size': 2, 'fsdp': 2, 'expert': 2}),  # a batch that is not sharded
    (functools.partial(trace_experts, 2048), {'expert': 8}),  # tokens are sent to the ranks of their experts only
    (functools.partial(trace_int8, COLUMN_PARALLEL), {'tp_size': 2}),
    (functools.partial(trace_int8, ROW_PARALLEL), {'tp_size': 2}), (trace_gradient_reduction, {})],
    ids=['heads', 'context', 'experts', 'replicated tokens', 'sent tokens', 'columns', 'rows', 'gradients'])
def test_each_shard_map_returns_what_its_specs_say(trace, axes, monkeypatch):
    checked = []
    shard_map = jax.shard_map

    def shard_map_with_check(f, **options):
        checked.append(f)
        return shard_map(f, **options | {'check_vma': True})

    monkeypatch.setattr(jax, 'shard_map', shard_map_with_check)
    monkeypatch.setattr(jax_ops, 'fusion_barrier', lambda condition, f, otherwise, *args: f(*args))
    with jax.sharding.use_abstract_mesh(create_mesh(jax.devices(), **axes).abstract_mesh):
        jax.eval_shape(trace)
    assert len(checked) == 1
