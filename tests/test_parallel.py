"""A run on many devices has the curve of one device; what is stored where, and what the compiled program sends."""
import dataclasses
import functools
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_devices.choose
import jax_devices.layout
import jax_ops.matmul
from jax_devices.choose import choose_attention
from jax_devices.layout import setup_distributed_training
from jax_flags import UserError
from jax_generate import Controls, DecodeState, decode, prefill
from jax_ops.attention import Dropout, Scores
from jax_ops.decode_weights import convert_params_for_decoding, order_columns_by_rank
from jax_ops.experts import mix_experts
from jax_ops.fused_attention import Qkv, fused_causal_attention
from jax_ops.matmul import linear, matmul_int8
from jax_ops.sharding import (
    AXES, BATCH, COLUMN_PARALLEL, EXPERTS, ROW_PARALLEL, create_mesh, partition_specs, shard)
from jax_ops.vocabulary import cross_entropy, embed_tokens
from jax_run.checkpoints import (
    choose_checkpoint, finish_checkpoints, load_checkpoint, open_checkpoints, opt_state_item, save_checkpoint)
from jax_run.load import load_run
from jax_run.sources import get_batch_jax, open_source
from jax_run.start import fit_sizes
from jax_train_utils import (
    create_learning_rate_schedule, create_optimizer_with_schedule, create_train_state, estimate_loss_jax,
    language_model, make_eval_step, split_batch)
from jax_transformer import GPT, GPTConfig, MoEConfig, init_cache
from tests.common import (
    META, MODEL, RESUME, SHORT, TINY, assert_refused, long, make_step, random_params, run_script, slow, train)

# no tensor axis divides the vocabulary
CONFIG = GPTConfig(block_size=16, vocab_size=37, n_layer=1, n_head=4, n_embd=16, dropout=0.2)
PLAIN = dataclasses.replace(CONFIG, dropout=0.0)
HALF = dataclasses.replace(PLAIN, dtype='float16')

# layouts: (devices, fsdp, tensor, expert, context, zero), of which the last may be left out
ONE, PMAP, FSDP, TENSOR, BOTH, ALL = (1,), (8,), (2, 2), (2, 1, 2), (4, 2, 2), (8, 4, 2)
ZERO_1, ZERO_2, ZERO_2_ON_MESH = (8, 1, 1, 1, 1, 1), (8, 1, 1, 1, 1, 2), (8, 2, 2, 1, 1, 2)

SCHEDULE = create_learning_rate_schedule(1e-2, decay_lr=False)
ADAMW = create_optimizer_with_schedule(SCHEDULE)


def layout_of(n_devices, *sizes):
    return setup_distributed_training(jax.devices()[:n_devices], *sizes)


@functools.partial(jax.jit, static_argnums=0)
def initial_state(config):
    """The TrainState of all layouts."""
    return create_train_state(jax.random.key(0), config, ADAMW).replace(schedule=SCHEDULE)


@functools.cache
def compiled_step(layout, config):
    """(the Layout, the training step of `config` on it)."""
    parallel = layout_of(*layout)
    return parallel, parallel.jit_step(make_step(config, parallel))


def fresh_run(layout, config):
    """(the Layout, a new initial state, the training step)."""
    parallel, step = compiled_step(layout, config)
    return parallel, parallel.device_put(initial_state(config)), step


def batch_of(parallel, g, b, iteration, config):
    """The batch of an iteration of g micro-batches of b sequences on the devices of a Layout."""
    tokens = np.random.default_rng(0).integers(8, size=4000).astype(np.uint16)  # only 8 kinds: quick to learn
    x, y = get_batch_jax(tokens, config.block_size, g * b, 0, iteration)
    batch = {'x': x, 'y': y, 'seq_id': (iteration * g * b + np.arange(g * b)).astype(np.uint32)}
    return parallel.shard_batch(batch, split_batch(g, b, parallel.n_data_shards))


def run_steps(layout, n_iters, config, g=2, b=8, state=None, first=0):
    """(state after n_iters iterations of g micro-batches of b sequences, [[loss, gradient norm]] of each iteration)."""
    parallel, step = compiled_step(layout, config)
    state = state or parallel.device_put(initial_state(config))
    log = []
    for i in range(first, first + n_iters):
        state, metrics = step(state, batch_of(parallel, g, b, i, config))
        log.append([float(metrics['loss']), float(metrics['grad_norm'])])
    return state, np.array(log)


@functools.cache
def curve(layout, dtype='float32'):
    return run_steps(layout, 30, dataclasses.replace(CONFIG, dtype=dtype))[1]


# of [loss, gradient norm] between layouts, in 30 iterations; seen in bfloat16: 2.2e-4 and 1.7e-3
BOUNDS = {'float32': [2e-4, 2e-4], 'bfloat16': [1e-3, 5e-3]}


def assert_same_curve(mesh, one, dtype='float32'):
    assert (abs(mesh - one) <= BOUNDS[dtype]).all(), abs(mesh - one).max(0)


def evaluate(parallel, config, params, splits, masks=None, *, loss_chunk=0, **options):
    """What estimate_loss_jax returns of arrays {split: tokens} and their masks."""
    sources = {}
    for split, tokens in splits.items():
        mask = masks[split] if masks else None
        sources[split] = open_source(tokens, mask, block_size=config.block_size, seed=0, split=split)
    step = parallel.jit_eval_step(make_eval_step(config, language_model, loss_chunk=loss_chunk))
    return estimate_loss_jax(step, params, sources, parallel, batch_size=4, **options)


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


def jit_step(layout, config, b=8):
    """(the compiled training step of one micro-batch of b sequences per data shard, the abstract state)."""
    parallel, step = compiled_step(layout, config)
    state = parallel.abstract_state(initial_state, config)
    return step.lower(state, batch_of(parallel, 1, b * parallel.n_data_shards, 0, config)).compile(), state

# -----------------------------------------------------------------------------
# the same run on every layout

@pytest.mark.parametrize('dtype, layout', [
    *[('float32', layout) for layout in (PMAP, ALL, ZERO_1, ZERO_2_ON_MESH)], ('bfloat16', TENSOR),
    slow('float32', FSDP), slow('float32', ZERO_2), slow('bfloat16', ZERO_2)])
def test_every_mesh_gives_the_curve_of_one_device(dtype, layout):
    if dtype == 'float32' and layout in (ALL, ZERO_2_ON_MESH):  # `curve` makes the state of all layouts on one device
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6),
                     layout_of(*layout).init_sharded(initial_state, CONFIG), initial_state(CONFIG))
    one, mesh = curve(ONE, dtype), curve(layout, dtype)
    assert one[-1, 0] < one[0, 0] - 1  # it learns
    assert_same_curve(mesh, one, dtype)


@pytest.mark.slow
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
    'window and chunk with remat': dict(position='rope', n_kv_head=2, n_layer=2, layer_types=('window', 'chunk'),
                                        window=20, chunk=24, sinks=True, remat='full'),
    'latent attention and experts': dict(position='rope', moe=MoEConfig(n_expert=4, n_used=2, width=8), mla=dict(
        q_rank=8, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=12))}


@pytest.mark.parametrize('features, layout', [
    long('window and chunk with remat', (8, 1, 1, 1, 8)),
    ('latent attention and experts', (8, 1, 2, 2, 2))])
def test_a_sequence_sharded_over_devices_learns_as_on_one(features, layout):
    config = dataclasses.replace(CONTEXT, **FEATURES[features])
    one, several = (run_steps(on, 4, config, g=1)[1] for on in (ONE, layout))
    assert_same_curve(several, one, config.dtype)


@pytest.mark.slow
def test_positions_of_a_sequence_are_loaded_and_evaluated_where_they_are_computed():
    x = batch_of(layout_of(4, 1, 1, 1, 4), 1, 8, 0, CONTEXT)['x']
    assert {part.data.shape for part in x.addressable_shards} == {(1, 8, 16)}
    splits = {'train': np.arange(3000) % 37, 'val': np.arange(2000) % 31}
    losses = []
    for layout in (ONE, (4, 1, 1, 1, 4)):
        parallel, state, _ = fresh_run(layout, CONTEXT)
        losses.append(evaluate(parallel, CONTEXT, state.params, splits, loss_chunk=16, eval_iters=2))
    for split in splits:
        assert losses[1][split] == pytest.approx(losses[0][split], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('layout', [(8, 2, 2, 2), (8, 1, 1, 8)])  # the latter by exchange_tokens
def test_experts_on_several_devices_learn_as_on_one(layout):
    moe = MoEConfig(n_expert=8, n_used=2, width=8, shared_width=8, balance=0.1)
    config = dataclasses.replace(CONFIG, mlp='swiglu', moe=moe, dropout=0.0, block_size=128)
    _, one = run_steps(ONE, 5, config)
    state, several = run_steps(layout, 5, config)
    np.testing.assert_allclose(several, one, atol=2e-4)
    experts = state.params['h_0']['mlp']['experts_c_fc']['kernel']
    stored = experts.addressable_shards[0].data.size / experts.size
    assert stored == 1 / math.prod(layout[1:])  # sharded over fsdp, tensor and expert


@pytest.mark.parametrize('n_used, tensor', [(1, 1), slow(2, 1), slow(1, 2)])
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


@pytest.mark.slow
def test_float16_scales_its_loss_on_a_mesh_as_on_one_device():
    losses = []
    for layout in (ONE, BOTH):
        state, [[loss, _]] = run_steps(layout, 1, HALF)
        scale = layout_of(*layout).device_put({'scale': np.float32(2.0**40), 'good_steps': np.int32(7)})
        state, [[_, grad_norm]] = run_steps(layout, 1, HALF, state=state.replace(loss_scale=scale), first=1)
        assert not np.isfinite(grad_norm)
        assert state.step == 1
        assert state.loss_scale == {'scale': 2.0**39, 'good_steps': 0}
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


@pytest.mark.slow
def test_execution_options_and_muon_give_the_curve_of_one_device_too():
    config = dataclasses.replace(CONFIG, n_layer=2, scan_layers=True, remat='full')
    tx = create_optimizer_with_schedule(SCHEDULE, optimizer='muon')
    initial = jax.device_get(layout_of(*ONE).init_sharded(create_train_state, jax.random.key(0), config, tx))
    losses = []
    for parallel in (layout_of(*ONE), layout_of(*BOTH)):
        state = parallel.device_put(initial)
        step = parallel.jit_step(make_step(config, parallel, loss_chunk=4))
        for i in range(4):
            state, metrics = step(state, batch_of(parallel, 1, 8, i, config))
            losses.append(float(metrics['loss']))
    np.testing.assert_allclose(losses[4:], losses[:4], atol=2e-4)


@pytest.mark.slow
def test_replicas_stay_equal_to_the_bit():
    state, _ = run_steps(PMAP, 5, CONFIG, g=1)
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == 8
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.slow
@pytest.mark.parametrize('layout', [ONE, PMAP])
def test_the_state_is_donated(layout):
    parallel, state, step = fresh_run(layout, CONFIG)
    step(state, batch_of(parallel, 1, 8, 0, CONFIG))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def mean_loss(params, x, y):
    """That of PLAIN, on one device."""
    logits = jax.jit(GPT(PLAIN).apply)({'params': jax.device_get(params)}, x)
    return float(cross_entropy(logits, y).mean())


def test_the_loss_is_the_mean_over_all_micro_steps_and_devices():
    parallel, state, step = fresh_run((4,), PLAIN)
    batch = batch_of(parallel, 8, 2, 0, PLAIN)
    expected = mean_loss(state.params, *(np.reshape(batch[name], (16, 16)) for name in 'xy'))
    _, metrics = step(state, batch)
    assert float(metrics['loss']) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_batch_that_is_split_overflows_no_earlier_than_as_a_whole():
    def smallest_overflow(layout, g, b):
        for power in range(16, 40):
            parallel, state, step = fresh_run(layout, HALF)
            scale = {'scale': np.float32(2.0**power), 'good_steps': np.int32(0)}
            state = state.replace(loss_scale=parallel.device_put(scale))
            if not np.isfinite(float(step(state, batch_of(parallel, g, b, 0, HALF))[1]['grad_norm'])):
                return power

    whole = smallest_overflow(ONE, 1, 8)
    assert whole <= smallest_overflow(ONE, 8, 1) and whole <= smallest_overflow(PMAP, 1, 8)


SPLITS = {'train': np.arange(3000, dtype=np.uint16) % 37, 'val': np.arange(2000, dtype=np.uint16) % 31}
VAL_WINDOWS = (np.arange(12) * (2000 - 17) // 11)[:, None] + np.arange(17)  # of 3 evaluated batches of 4


@pytest.mark.slow
def test_evaluation_is_the_mean_of_the_same_windows_on_every_layout():
    windows = SPLITS['val'][VAL_WINDOWS].astype(np.int32)
    results = []
    for layout in (ONE, (2,), PMAP, BOTH):
        parallel, state, _ = fresh_run(layout, CONFIG)
        results.append(evaluate(parallel, CONFIG, state.params, SPLITS, eval_iters=3))
        assert results[-1]['val']['loss'] == pytest.approx(
            mean_loss(state.params, windows[:, :-1], windows[:, 1:]), rel=1e-5)
        assert results[-1]['train'] == pytest.approx(results[0]['train'], rel=1e-5)
        assert results[-1]['train'] != results[-1]['val']


@pytest.mark.parametrize('layout, masked', [(ONE, False), slow(PMAP, False), (ONE, True)])
def test_the_loss_leaves_out_what_does_not_count_and_bits_per_byte_also_what_has_no_bytes(layout, masked):
    masks = {split: (np.arange(len(tokens)) % 3 > 0).astype(np.uint8) for split, tokens in SPLITS.items()}
    token_bytes = np.arange(37) % 4  # every fourth is a special token
    parallel, state, _ = fresh_run(layout, CONFIG)
    run = functools.partial(evaluate, parallel, CONFIG, state.params, SPLITS, masks if masked else None, eval_iters=3)
    losses = run(token_bytes=token_bytes)
    assert {split: {'loss': losses[split]['loss']} for split in SPLITS} == run()
    windows = SPLITS['val'][VAL_WINDOWS].astype(np.int32)
    x, y = windows[:, :-1], windows[:, 1:]
    counts = masks['val'][VAL_WINDOWS][:, 1:] if masked else np.ones(y.shape)
    nats = jax.jit(functools.partial(GPT(CONFIG).apply, method='loss'))({'params': jax.device_get(state.params)}, x, y)
    expected = (nats * counts * (token_bytes[y] > 0)).sum() / np.log(2) / (token_bytes[y] * counts).sum()
    assert losses['val']['bpb'] == pytest.approx(float(expected), rel=1e-5)
    assert losses['val']['loss'] == pytest.approx(float((nats * counts).sum() / counts.sum()), rel=1e-5)


def test_a_process_reads_the_rows_of_its_own_devices_only(monkeypatch):
    devices = [types.SimpleNamespace(process_index=i // 2) for i in range(8)]  # four processes with two devices each

    def rows_of_process_0(n_rows, fsdp=1, tensor=1):
        shape = dict(zip(AXES, (8 // (fsdp * tensor), fsdp, tensor, 1, 1)))
        mesh = types.SimpleNamespace(devices=np.array(devices).reshape(*shape.values()), shape=shape)
        monkeypatch.setattr(jax_devices.layout, 'create_mesh', lambda *_: mesh)
        monkeypatch.setattr(jax_devices.layout, 'Mesh', lambda *_: mesh)
        return setup_distributed_training(devices, fsdp, tensor).local_rows(n_rows).tolist()

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
# checkpoints move between layouts

@pytest.mark.parametrize('saved_on, resumed_on', [
    (ALL, (ALL, ONE, PMAP)), long(PMAP, (BOTH, ZERO_1)), slow(ZERO_1, (ZERO_1, ALL)), slow(ZERO_2, (ZERO_2, PMAP))])
def test_a_checkpoint_resumes_on_any_other_layout_and_bit_for_bit_on_its_own(tmp_path, saved_on, resumed_on):
    state, _ = run_steps(saved_on, 8, CONFIG)
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 8, state, META)
    finish_checkpoints(manager)
    saved = jax.tree.map(np.asarray, (state.params, opt_state_item(state)))
    expected = run_steps(saved_on, 3, CONFIG, state=state, first=8)[1]
    for layout in resumed_on:
        parallel = layout_of(*layout)
        restored = load_checkpoint(tmp_path, 8, parallel.abstract_state(initial_state, CONFIG))
        restored = restored.replace(schedule=parallel.device_put(SCHEDULE))
        jax.tree.map(np.testing.assert_array_equal, (restored.params, opt_state_item(restored)), saved)
        log = run_steps(layout, 3, CONFIG, state=restored, first=8)[1]
        np.testing.assert_allclose(log, expected, atol=0 if layout == saved_on else 2e-4)


@pytest.mark.slow
def test_a_checkpoint_holds_the_state_of_its_iteration_while_training_continues_during_the_write(tmp_path):
    # large enough for the write to take a while
    config = dataclasses.replace(TINY, n_layer=1, n_embd=256, dtype='float16')
    meta = META | {'model': dataclasses.asdict(config)}
    expected = run_steps((2,), 6, config, g=1)[0]
    expected = jax.tree.map(np.array, (expected.params, opt_state_item(expected)))

    parallel, state, step = fresh_run((2,), config)
    manager = open_checkpoints(tmp_path)
    for i in range(10):
        if i in (4, 6):
            save_checkpoint(manager, i, state, meta, val_loss=1.0 / i)
        state, _ = step(state, batch_of(parallel, 1, 8, i, config))  # donates the state that is being written
    finish_checkpoints(manager)
    iteration, meta_again = choose_checkpoint(tmp_path)
    assert iteration == 6
    assert meta_again == {**json.loads(json.dumps(meta)), 'iter_num': 6, 'weights': ['params']}
    restored = load_checkpoint(tmp_path, iteration, parallel.abstract_state(initial_state, config))
    jax.tree.map(np.testing.assert_array_equal, (restored.params, opt_state_item(restored)), expected)
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path, 'latest')[1], expected[0])
    replicated = NamedSharding(parallel.mesh, P())
    assert all(leaf.sharding == replicated for leaf in jax.tree.leaves(restored.params))

# -----------------------------------------------------------------------------
# mistakes

@pytest.mark.parametrize('flags, message', [
    (['--fsdp=3'], r'fsdp=3 x tensor=1 x expert=1 x context=1 does not divide 8 devices; '
                   r'the product may be one of \[1, 2, 4, 8\]'),
    (['--tensor=0'], 'fsdp=1 x tensor=0 x expert=1 x context=1 does not divide'),
    (['--tensor=4', '--n_head=2'], r'tensor=4 does not divide n_head=2; on 8 devices it may be one of \[1, 2\]'),
    (['--tensor=2', '--n_kv_head=1'], r'tensor=2 does not divide n_kv_head=1; on 8 devices it may be one of \[1\]'),
    (['--fsdp=4', '--n_embd=18', '--n_head=2'],
     r'fsdp=4 does not divide n_embd=18; on 8 devices it may be one of \[1, 2\]'),
    (['--expert=2'], r'expert=2 does not divide n_expert=1; on 8 devices it may be one of \[1\]'),
    (['--zero=1', '--tensor=2'], 'zero=1 does not work with fsdp, tensor, expert or context: with them use --zero=2'),
    (['--context=8'], 'context=8: its square must divide block_size=16'),
    (['--context=4', '--attention=xla'], 'attention=xla does not shard a sequence'),
    (['--zero=3'], r'zero must be 0, 1 .ZeRO-1. or 2 .ZeRO-2., not 3; ZeRO-3 is --fsdp'),
    (['--fsdp=2', '--batch_size=3'], 'cannot be shared equally by 8 devices'),
    (['--coordinator_address=localhost'], 'is not host:port of process 0'),
    (['--num_processes=2'], 'name them with --coordinator_address=host:port'),
    (['--num_processes=2', '--process_id=2', '--coordinator_address=localhost:1'], '--process_id=0 to N-1')])
def test_a_layout_that_cannot_be_is_refused(dataset, tmp_path, flags, message):
    model = ['--n_layer=1', '--n_head=4', '--n_embd=16', '--block_size=16', '--batch_size=8',
             '--gradient_accumulation_steps=1']
    assert_refused(train(tmp_path / 'out', f'--dataset={dataset}', *model, *flags), message)
    assert not (tmp_path / 'out').exists()

# -----------------------------------------------------------------------------
# sampling, tracing, scaling

@pytest.mark.slow
def test_sampling_with_sharded_heads_gives_the_text_of_one_device(finished):
    flags = [f'--out_dir={finished[0]}', '--device=cpu', '--num_samples=2', '--max_new_tokens=30', '--start=the',
             '--top_k=5']
    one, two = run_script('sample_jax.py', *flags), run_script('sample_jax.py', *flags, '--tensor=2')
    assert two.returncode == 0, two.stderr
    assert '2 x cpu' in two.stderr
    assert len(one.stdout) > 60
    assert two.stdout == one.stdout
    too_many = run_script('sample_jax.py', *flags, '--tensor=9')
    assert_refused(too_many, 'tensor=9 x expert=1 needs 9 devices, and there are 8')
    assert_refused(run_script('sample_jax.py', *flags, '--tensor=4'), 'tensor=4 does not divide n_head=2')


@pytest.mark.slow
@pytest.mark.parametrize('quantize, B, D', [('', 3, 64), ('int8', 1, 256)])
def test_the_kv_cache_is_sharded_over_heads_and_decoding_moves_no_weights(quantize, B, D):
    config = dataclasses.replace(CONFIG, n_embd=D, n_layer=2)
    parallel = layout_of(4, 1, 4)
    params = parallel.init_sharded(create_train_state, jax.random.key(0), config, optax.identity()).params
    state = DecodeState(
        tokens_BxN=jnp.zeros((B, 24), jnp.int32), length_B=jnp.full(B, 4), n_generated_B=jnp.zeros(B, jnp.int32),
        done_B=jnp.zeros(B, bool), key_B=jax.random.split(jax.random.key(0), B))
    static = dict(config=config, n_draft=0, use_cache=True)
    with parallel.mesh_context():
        params = order_columns_by_rank(convert_params_for_decoding(params, 'float32', quantize), config)
        cache = prefill(params, jax.jit(init_cache, static_argnums=(0, 1, 2))(config, B, 16),
                        np.zeros((B, 16), np.int32), np.arange(16, dtype=np.int32)[None], config=config)
        state = state.replace(cache=cache)
        lowered = decode.lower(
            params, state, Controls(n_vocab=37), np.int32(8), np.int32(16), np.int32(16), **static)
        program = lowered.compile().as_text()
    for x in jax.tree.leaves(state.cache):
        assert x.addressable_shards[0].data.shape == (B, 1, 16, D // 4)
    assert max(sum(sizes) for _, sizes in collectives(program)) == B * D  # activations of one token


@pytest.mark.slow
def test_profile_leaves_a_trace_with_the_names_of_blocks_and_collectives(dataset, tmp_path):
    result = train(tmp_path, f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=9', '--profile=True')
    assert f'traced iterations 5 to 7 into {tmp_path}/profile' in result.stdout, result.stderr
    assert list((tmp_path / 'profile').rglob('*.trace.json.gz'))
    short = tmp_path / 'short'
    result = train(short, f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=2', '--profile=True')
    assert f'traced iterations 0 to 1 into {short}/profile' in result.stdout, result.stderr
    assert list((short / 'profile').rglob('*.trace.json.gz'))
    result = train(short, *RESUME, '--max_iters=9', '--profile=True')
    assert f'traced iterations 6 to 8 into {short}/profile' in result.stdout, result.stderr
    text = jit_step(BOTH, CONFIG)[0].as_text()
    for scope in ('h_0/attn/c_attn', 'h_0/mlp', 'all_gather', 'all_reduce', 'cross_entropy', 'clip', 'optimizer'):
        assert re.search(f'op_name="[^"]*{scope}', text), scope


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
    parallel, step = compiled_step(ALL, config)
    state = parallel.init_sharded(initial_state, config)
    initial = [x.sharding for x in jax.tree.leaves(state)]
    for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        if x.ndim >= 2:
            n_parts = x.size / x.addressable_shards[0].data.size
            assert n_parts == (4 if 'wpe' in str(path) else 8), jax.tree_util.keystr(path)
    shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert shardings(state.params) == shardings(state.opt_state[0].mu)
    for i in range(2):
        state, _ = step(state, batch_of(parallel, 2, 8, i, config))
        for x, sharding in zip(jax.tree.leaves(state), initial, strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert step._cache_size() == 1  # the second step needs no second compilation


@pytest.mark.slow
@pytest.mark.parametrize('layout, n_copies', [(ZERO_1, 8), (ZERO_2, 8), (ZERO_2_ON_MESH, 2)])
def test_zero_shards_the_optimizer_state_over_the_replicas_of_a_parameter(layout, n_copies):
    parallel, state, step = fresh_run(layout, CONFIG)
    state, _ = step(state, batch_of(parallel, 2, 8, 0, CONFIG))
    n_stored = lambda x: x.addressable_shards[0].data.size
    for name in ('c_attn', 'c_proj'):
        param, mean = (tree['h_0']['attn'][name]['kernel'] for tree in (state.params, state.opt_state[0].mu))
        assert n_stored(param) == param.size * n_copies // 8
        assert n_stored(mean) == mean.size // 8


@pytest.mark.slow
def test_zero_1_reduces_gradients_once_per_step_not_per_micro_batch():
    parallel, step = compiled_step(ZERO_1, CONFIG)
    state = parallel.abstract_state(initial_state, CONFIG)
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *[batch_of(parallel, 1, 8, i, CONFIG) for i in range(3)])
    text = step.lower(state, batch).compile().as_text()
    loops = [part for part in text.split('\n\n') if not part.startswith('ENTRY')]
    assert not [found for part in loops for found in collectives(part) if max(found[1]) >= 16]
    n_params = sum(x.size for x in jax.tree.leaves(state.params))
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
    program, state = jit_step((8, 8), config, b=2)
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
    state = layout_of(8, 8).abstract_state(initial_state, xl)
    n_params = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    replicated = 3 * 4 * n_params  # float32 parameters and AdamW's two moments
    assert replicated > 18e9
    stored = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert n_params < stored < replicated / 6


# -----------------------------------------------------------------------------
# shard_map with check_vma, off in the product: tracing then infers over which axes of the mesh a value differs between
# devices, and refuses an output whose spec calls it replicated

def trace_chunked_attention():
    """On a mesh with a context axis, with dropout, and its gradients."""
    q, kv, keys = jnp.zeros((4, 256, 4, 16)), jnp.zeros((4, 256, 2, 16)), jax.random.split(jax.random.key(0), 4)

    def total(q, k, v):
        return fused_causal_attention('chunked', Qkv(q, k, v), Scores(), dropout=Dropout(keys, 0.1)).sum()

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
    layout = setup_distributed_training(jax.devices(), zero=1)

    def gradients(params, frozen, batch, scale):
        grads = {'kernel': batch['x'][0].T @ batch['x'][0], 'bias': batch['x'][0].sum(0)[:3]}
        return grads, batch['x'].sum()

    params = {'kernel': jnp.zeros((16, 16)), 'bias': jnp.zeros(3)}
    return layout.all_reduced(gradients)(params, None, {'x': jnp.zeros((1, 8, 16))}, 1.0)


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
    monkeypatch.setattr(jax_ops.matmul, 'fusion_barrier', lambda f, *args, asked: f(*args))
    with jax.sharding.use_abstract_mesh(create_mesh(jax.devices(), **axes).abstract_mesh):
        jax.eval_shape(trace)
    assert len(checked) == 1


@pytest.mark.slow
@pytest.mark.parametrize('loss_chunk', [0, 2])
def test_in_bfloat16_the_gradient_of_the_head_is_as_exact_on_a_mesh_as_on_one_device(loss_chunk):
    config = dataclasses.replace(TINY, n_layer=1, block_size=128, tied_head=False)
    params = random_params(config)
    x = np.random.default_rng(0).integers(config.vocab_size, size=(8, 128), dtype=np.int32)

    def grad_of(params, dtype):
        loss_of = functools.partial(GPT(dataclasses.replace(config, dtype=dtype)).apply, method='loss')
        loss = lambda params: loss_of({'params': params}, x, x[:, ::-1], loss_chunk=loss_chunk).mean()
        return np.asarray(jax.jit(jax.grad(loss))(params)['lm_head'])

    exact, alone = grad_of(params, 'float32'), grad_of(params, 'bfloat16')
    parallel = setup_distributed_training(jax.devices(), fsdp=2)
    with parallel.mesh_context():
        sharded = grad_of(parallel.device_put(params), 'bfloat16')
    alone_error, sharded_error = (np.linalg.norm(grad - exact) for grad in (alone, sharded))
    assert 0 < sharded_error < 1.2 * alone_error


# -----------------------------------------------------------------------------
# devices

def test_sequences_are_split_over_devices_without_ever_exceeding_the_micro_batch():
    assert split_batch(40, 12, 1) == (40, 12)
    assert split_batch(40, 12, 8) == (5, 12)
    assert split_batch(1, 64, 8) == (1, 8)
    assert split_batch(4, 12, 8) == (1, 6)
    for g, b, n in ((40, 12, 16), (6, 10, 4), (1, 8, 8)):
        n_micro, micro_batch = split_batch(g, b, n)
        assert n_micro * micro_batch * n == g * b
        assert micro_batch <= b
    with pytest.raises(
            UserError, match=r'12 sequences cannot be shared equally by 8 devices.*\[1, 2, 3, 4, 6\].*multiple of 8'):
        split_batch(1, 12, 8)


def gpu(**changes):
    """What choose_attention asks of a GPU."""
    client = types.SimpleNamespace(platform_version='PJRT C API\ncuda 13000')
    device = dict(platform='gpu', device_kind='NVIDIA H200', compute_capability='9.0', client=client)
    return types.SimpleNamespace(**device | changes)


LONG = dataclasses.replace(TINY, block_size=160)
LONG_BF16 = dataclasses.replace(LONG, dtype='bfloat16')


def test_auto_picks_attention_and_says_why(monkeypatch):
    cpu = jax.devices()[0]
    assert choose_attention('auto', LONG, cpu)[0] == 'chunked'
    assert choose_attention('auto', dataclasses.replace(LONG, block_size=64), cpu)[0] == 'xla'
    assert choose_attention('xla', LONG, cpu) == ('xla', '--attention says so')
    monkeypatch.setattr(jax_devices.choose, 'compile_cudnn', lambda *args: None)
    assert choose_attention('auto', LONG_BF16, gpu(device_kind='NVIDIA H100')) == ('cudnn', 'flash attention')
    assert choose_attention('auto', LONG_BF16, gpu()) == ('cudnn', 'flash attention, not measured on this card')
    with pytest.raises(UserError, match='attention must be one of auto'):
        choose_attention('flash', LONG, cpu)


@pytest.mark.parametrize('changes, device, why', [
    ({}, gpu(compute_capability='7.5'), '8.0'),
    ({}, gpu(client=types.SimpleNamespace(platform_version='rocm')), 'NVIDIA'),
    (dict(dtype='float32'), gpu(), 'float32'),
    (dict(dropout=0.1), gpu(), 'dropout'),
    (dict(sinks=True), gpu(), 'sinks'),
    (dict(layer_types=('chunk',), chunk=48), gpu(), 'chunks of 48 do not divide'),
    (dict(n_embd=24), gpu(), 'heads of 12'),
    (dict(n_embd=2 * 256), gpu(compute_capability='8.9'), 'heads of 256')])
def test_what_cudnn_cannot_do_falls_back_to_xla_and_is_refused_where_cudnn_was_asked_for(
        monkeypatch, changes, device, why):
    monkeypatch.setattr(jax_devices.choose, 'compile_cudnn', lambda *args: None)
    config = dataclasses.replace(LONG_BF16, **changes)
    picked, reason = choose_attention('auto', config, device)
    assert picked == 'xla'
    assert why in reason
    assert choose_attention('auto', dataclasses.replace(config, block_size=2048), device)[0] == 'chunked'
    with pytest.raises(UserError, match=why):
        choose_attention('cudnn', config, device)


@pytest.mark.parametrize('changes', [{}, dict(n_head=4, n_kv_head=2, attention_scale=0.3), dict(
    position='rope', layer_types=('window', 'full', 'nope', 'chunk'), window=8, chunk=80)])
def test_cudnn_takes_shared_key_heads_windows_and_chunks_and_is_compiled_with_them(monkeypatch, changes):
    compiled = []

    def attention(implementation, qkv, scores):
        q, k = qkv[:2]
        compiled.append((q.shape[2], k.shape[2], scores.scale, scores.window, scores.chunk))
        return q

    monkeypatch.setattr('jax_ops.fused_attention.fused_causal_attention', attention)
    config = dataclasses.replace(LONG_BF16, **changes)
    device = jax.devices()[0]
    for layer_type in config.layer_types:
        jax_devices.choose.compile_cudnn(config, device, layer_type, tensor=2)
    assert {heads[:3] for heads in compiled} == {(config.n_head // 2, config.kv_heads // 2, config.attention_scale)}
    assert {spans[3:] for spans in compiled} == {
        {'window': (8, 0), 'chunk': (0, 80)}.get(layer_type, (0, 0)) for layer_type in config.layer_types}


def test_a_tpu_takes_splash_attention_for_heads_of_64_and_128():
    tpu = types.SimpleNamespace(platform='tpu', device_kind='TPU v5 lite')
    config = GPTConfig(block_size=2048, vocab_size=64, n_layer=1, n_head=4, n_kv_head=2, n_embd=256, dtype='bfloat16',
                       layer_types=('window',), window=100, sinks=True)
    assert choose_attention('auto', config, tpu) == ('splash', 'flash attention, not measured on this card')
    refused = (dict(head_dim=32), '32 wide'), (dict(dropout=0.1), 'dropout'), (dict(block_size=2049), '128')
    for changes, why in refused:
        picked, reason = choose_attention('auto', dataclasses.replace(config, **changes), tpu)
        assert picked == 'chunked'
        assert why in reason
    with pytest.raises(UserError, match='splash does not work here: it is for TPUs'):
        choose_attention('splash', config, jax.devices()[0])


def test_auto_falls_back_where_cudnn_does_not_compile():
    # there is no such device here, so compiling fails, as with a cuDNN that is too old
    picked, reason = choose_attention('auto', LONG_BF16, gpu())
    assert picked == 'xla'
    assert '; not cudnn: ' in reason
    assert '\n' not in reason


# -----------------------------------------------------------------------------
# the process

@pytest.mark.parametrize('layout, given, n_devices, expected', [
    ((4, 2, 1), (), 8, (4, 2, 1)), ((4, 2, 1), (), 16, (4, 2, 1)),  # fits
    ((4, 2, 1), (), 1, (1, 1, 1)), ((4, 2, 1), (), 2, (2, 1, 1)), ((1, 2, 1), (), 1, (1, 1, 1)),
    ((4, 2, 1), ('tensor',), 4, (2, 2, 1)), ((4, 2, 1), ('fsdp',), 4, (4, 1, 1)),
    ((4, 2, 1), ('fsdp', 'tensor'), 4, (4, 2, 1)), ((1, 1, 3), ('expert',), 4, (1, 1, 3))])  # left to be refused
def test_a_resumed_layout_that_does_not_fit_the_machine_becomes_one_that_does(layout, given, n_devices, expected):
    names = ('fsdp', 'tensor', 'expert')
    assert fit_sizes(dict(zip(names, layout)), given, n_devices, 48) == dict(zip(names, expected))


def test_a_resumed_layout_shards_no_further_than_the_width_of_the_model_divides():
    assert fit_sizes({'fsdp': 16, 'tensor': 1}, (), 8, n_embd=12) == {'fsdp': 4, 'tensor': 1}


@pytest.mark.slow
def test_a_split_context_gathers_for_several_sequences_what_it_gathers_for_one():
    config = GPTConfig(block_size=512, vocab_size=64, n_layer=2, n_head=8, n_embd=64)
    layout = setup_distributed_training(jax.devices(), context=8)
    step = layout.jit_step(make_step(config, layout))
    state = layout.init_sharded(create_train_state, jax.random.key(0), config, optax.sgd(0.1), 0)
    n_gathers = []
    for n_rows in (1, 2):
        x = np.zeros((n_rows, 512), np.int32)
        batch = layout.shard_batch({'x': x, 'y': x, 'seq_id': np.arange(n_rows, dtype=np.uint32)}, (1, n_rows))
        n_gathers.append(len(re.findall(r'= \S+ all-gather(-start)?\(', step.lower(state, batch).compile().as_text())))
    assert n_gathers[0] == n_gathers[1] > 0  # once 9 and 27: inputs and gradients of all dense layers in addition
