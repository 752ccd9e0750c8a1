"""What train_jax.py and sample_jax.py promise on many devices and in many processes."""
import dataclasses
import functools
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

from jax_train_utils import *
from jax_train_utils import MeshParallel, join_processes, optimizer_item, partition_specs
from jax_ops import AXES, BATCH, Decoding, Knobs, Sampling, UserError, shard
from jax_transformer import (
    GPTConfig, MoE, ParallelLMHead, VocabParallelEmbedding, create_mesh, create_train_state, decode, prefill)
from test_scripts import ROOT, dataset, numbers, refused, run, train  # noqa: F401, dataset is a fixture
from test_train_utils import META

CONFIG = GPTConfig(block_size=16, vocab_size=37, n_layer=1, n_head=4, n_embd=16, dropout=0.2)  # no tensor axis divides 37
ONE, PMAP, FSDP, TENSOR, BOTH, ALL = (1, 1, 1), (8, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (8, 4, 2)  # devices, fsdp, tensor


@functools.cache
def compiled_once(layout, config):
    schedule = create_learning_rate_schedule(1e-2, decay_lr=False)
    n_devices, *axes = layout
    parallel = setup_distributed_training(jax.devices()[:n_devices], *axes)
    make = functools.partial(create_train_state, jax.random.key(0), config, create_optimizer_with_schedule(schedule))
    return parallel, make, parallel.train_step(make_train_step(config, 3, 1.0, schedule))


def place_rows(parallel, g, b, i, config):
    tokens = np.random.default_rng(0).integers(8, size=4000).astype(np.uint16)  # few, so that there is something to learn
    rows = parallel.local_rows(g * b)
    x, y = get_batch_jax(tokens, config.block_size, g * b, 0, i, rows)
    return parallel.place({'x': x, 'y': y, 'row': (i * g * b + rows).astype(np.uint32)}, split_rows(g, b, parallel.n_shares))


def run_layout(layout, n_iters, config=CONFIG, state=None, first=0):
    """The state after n_iters iterations on the layout, and [[loss, gradient norm]] of each."""
    parallel, make, step = compiled_once(layout, config)
    state, log = state or parallel.create(make), []
    for i in range(first, first + n_iters):
        state, metrics = step(state, place_rows(parallel, 2, 8, i, config))
        log.append([float(metrics['loss']), float(metrics['grad_norm'])])
    return state, np.array(log)


@functools.cache
def curve(layout):
    return run_layout(layout, 30)[1]


# -----------------------------------------------------------------------------
# the same run on every layout


@pytest.mark.parametrize('layout', [FSDP, TENSOR, BOTH, ALL])
def test_every_mesh_gives_the_curve_of_one_device(layout):
    one, mesh = curve(ONE), curve(layout)
    assert one[-1, 0] < one[0, 0] - 1  # it learns
    np.testing.assert_allclose(mesh, one, atol=2e-4)


@pytest.mark.parametrize('layout', [(2, 1, 1), (8, 2, 2, 2)])  # the last number is expert
def test_experts_on_several_devices_learn_as_on_one(layout):
    moe = MoE(n_expert=4, n_used=2, width=8, shared_width=8, balance=0.1)
    config = dataclasses.replace(CONFIG, mlp='swiglu', moe=moe, dropout=0.0)
    (_, one), (state, log) = run_layout(ONE, 5, config), run_layout(layout, 5, config)
    np.testing.assert_allclose(log, one, atol=2e-4)
    experts = state.params['h_0']['mlp']['experts_c_fc']['kernel']
    held = experts.addressable_shards[0].data.size / experts.size
    assert held == 1 / math.prod(layout[1:])  # fsdp, tensor and expert all share out what is stored


def test_float16_scales_its_loss_on_a_mesh_as_on_one_device():
    half = dataclasses.replace(CONFIG, dtype='float16', dropout=0.0)
    results = []
    for layout in (ONE, BOTH):
        parallel, make, step = compiled_once(layout, half)
        state = parallel.create(make)
        state, first = step(state, place_rows(parallel, 2, 8, 0, half))
        scale = parallel.put({'scale': np.float32(2.0**40), 'good_steps': np.int32(7)})
        state, overflow = step(state.replace(loss_scale=scale), place_rows(parallel, 2, 8, 1, half))
        assert not np.isfinite(overflow['grad_norm']) and state.step == 1
        assert state.loss_scale == {'scale': 2.0**39, 'good_steps': 0}
        results.append(float(first['loss']))
    assert results[0] == pytest.approx(results[1], abs=2e-3)


def test_other_ways_to_compute_and_to_optimize_give_the_curve_of_one_device_too():
    config = dataclasses.replace(CONFIG, n_layer=2, scan_layers=True, remat='full')
    schedule = create_learning_rate_schedule(1e-2, decay_lr=False)
    tx, logs = create_optimizer_with_schedule(schedule, optimizer='muon'), []
    for n_devices, fsdp, tensor in (ONE, BOTH):
        parallel = setup_distributed_training(jax.devices()[:n_devices], fsdp, tensor)
        state = parallel.create(create_train_state, jax.random.key(0), config, tx)
        step, log = parallel.train_step(make_train_step(config, 3, 1.0, schedule, loss_chunk=4)), []
        for i in range(4):
            state, metrics = step(state, place_rows(parallel, 1, 8, i, config))
            log.append(float(metrics['loss']))
        logs.append(log)
    np.testing.assert_allclose(logs[1], logs[0], atol=2e-4)


def test_evaluation_is_the_same_on_a_mesh():
    splits = {'train': np.arange(3000) % 37, 'val': np.arange(2000) % 31}
    losses = []
    for layout in (ONE, BOTH):
        parallel, make, _ = compiled_once(layout, CONFIG)
        losses.append(estimate_loss_jax(parallel.eval_step(make_eval_step(CONFIG)), parallel.create(make).params, splits,
                                        parallel, block_size=16, batch_size=4, eval_iters=3))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_process_reads_the_rows_of_its_own_devices_only():
    devices = [types.SimpleNamespace(process_index=i // 2) for i in range(8)]  # four processes with two devices each

    def rows(n_rows, fsdp=1, tensor=1):
        layout = MeshParallel(tuple(devices), fsdp, tensor) if fsdp * tensor > 1 else DataParallel(tuple(devices))
        shape = dict(zip(AXES, (8 // (fsdp * tensor), fsdp, tensor, 1)))
        object.__setattr__(layout, 'mesh', types.SimpleNamespace(
            devices=np.array(devices).reshape(*shape.values()), shape=shape))
        return layout.local_rows(n_rows).tolist()

    assert jax.process_index() == 0
    assert rows(16) == [0, 1, 2, 3] == rows(16, fsdp=4) == rows(16, tensor=2) == rows(8, tensor=4)
    tokens = np.arange(1000, dtype=np.uint16)
    some = get_batch_jax(tokens, 16, 12, 7, 5, np.array([3, 4, 11]))
    np.testing.assert_array_equal(some, np.array(get_batch_jax(tokens, 16, 12, 7, 5))[:, [3, 4, 11]])


# -----------------------------------------------------------------------------
# what lies where


def test_every_matrix_and_its_optimizer_state_are_shared_out_and_stay_so():
    config = dataclasses.replace(CONFIG, vocab_size=64)
    parallel, make, step = compiled_once(ALL, config)
    state = parallel.create(make)
    placed = [x.sharding for x in jax.tree.leaves(state)]
    for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        n_parts = x.size / x.addressable_shards[0].data.size
        assert n_parts == (4 if 'wpe' in str(path) else 8) or x.ndim < 2, jax.tree_util.keystr(path)
    assert jax.tree.map(lambda x: x.sharding, state.params) == jax.tree.map(lambda x: x.sharding, state.opt_state[0].mu)
    state, _ = step(state, place_rows(parallel, 2, 8, 0, config))
    assert all(x.sharding.is_equivalent_to(was, x.ndim) for x, was in zip(jax.tree.leaves(state), placed))
    state, _ = step(state, place_rows(parallel, 2, 8, 1, config))
    assert step._cache_size() == 1  # one compilation does


def test_what_does_not_divide_is_cut_by_fewer_axes():
    mesh = create_mesh(jax.devices(), 2, 4)
    specs = lambda **shapes: partition_specs({k: np.zeros(shape) for k, shape in shapes.items()}, mesh)
    assert specs(wte=(37, 16))['wte'] == P(None, 'fsdp') and specs(wte=(38, 18))['wte'] == P('tensor')
    kernel = lambda shape: partition_specs({'c_attn': {'kernel': np.zeros(shape)}}, mesh)['c_attn']['kernel']
    assert kernel((16, 48)) == P(('fsdp', 'tensor')) and kernel((12, 36)) == P('fsdp')
    assert kernel((3, 16, 48)) == P(None, ('fsdp', 'tensor'))  # layers on a leading axis


def test_no_device_ever_holds_the_whole_model():
    config = GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=4, n_embd=128)
    parallel = setup_distributed_training(jax.devices(), 8, 1)
    make = functools.partial(create_train_state, jax.random.key(0), config, optax.adamw(1e-3))
    whole = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(jax.eval_shape(make)))
    before = {id(x) for x in jax.live_arrays()}
    state = parallel.create(make)
    live = [x for x in jax.live_arrays() if id(x) not in before]
    held = {}
    for x in live:
        for part in x.addressable_shards:
            held[part.device] = held.get(part.device, 0) + part.data.nbytes
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == whole and max(held.values()) < whole / 7
    # nor while it was made
    leaves = jax.jit(lambda: jax.tree.leaves(make()), out_shardings=jax.tree.leaves(parallel.shardings(jax.eval_shape(make))))
    memory = leaves.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < whole / 4


# -----------------------------------------------------------------------------
# vocabulary parallelism


@pytest.mark.parametrize('tp_size', [1, 2, 4, 8])
@pytest.mark.parametrize('V', [40, 37])
def test_vocabulary_parallel_layers_equal_the_dense_ones_in_values_and_gradients(V, tp_size):
    table, bias, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(V, 6), (V,), (4, 3, 6)]))
    tokens = np.random.default_rng(0).integers(V, size=(4, 3))
    mesh = create_mesh(jax.devices(), tp_size)
    embedding = VocabParallelEmbedding(V, 6, tp_size)
    lm_head = ParallelLMHead(V, 6, tp_size, bias=True)

    def sharded(table, bias, x):
        x += embedding.apply({'params': {'weight': table}}, tokens, mesh, method='sharded_forward')
        logits = lm_head.apply({'params': {'weight': table, 'bias': bias}}, x, mesh, method='sharded_forward')
        return cross_entropy(logits, tokens)

    dense = lambda table, bias, x: cross_entropy((x + table[tokens]) @ table.T + bias, tokens)
    value = lambda f: jax.jit(lambda *args: (f(*args), jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2))(*args)))
    for ours, expected in zip(*(jax.tree.leaves(value(f)(table, bias, x)) for f in (sharded, dense))):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_the_ranks_of_the_layers_each_do_their_part():
    V, tp_size, size = 37, 4, 6
    table, bias, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(V, size), (V,), (4, 3, size)]))
    tokens = np.random.default_rng(0).integers(V, size=(4, 3))
    embeddings, logits = [], []
    for rank in range(tp_size):
        layer = VocabParallelEmbedding(num_embeddings=V, embedding_dim=size, tp_size=tp_size, tp_rank=rank)
        weight = layer.load_weight_shard(table)
        assert weight.shape == (10, size) == layer.init(jax.random.key(0), tokens)['params']['weight'].shape
        embeddings.append(layer.apply({'params': {'weight': weight}}, tokens))
        np.testing.assert_array_equal(np.any(embeddings[-1], -1), tokens // 10 == rank)  # zeros for ids of others
        head = ParallelLMHead(V, size, tp_size, rank, bias=True)
        params = {'weight': head.load_weight_shard(table), 'bias': head.load_weight_shard(bias)}
        logits.append(head.apply({'params': params}, x))
        last = head.apply({'params': params}, x, jnp.array([2, 0, 1, 2]))
        np.testing.assert_allclose(last[:, 0], logits[-1][np.arange(4), [2, 0, 1, 2]], atol=1e-6)
    np.testing.assert_array_equal(sum(embeddings), table[tokens])
    logits = np.concatenate(logits, -1)
    np.testing.assert_allclose(logits[..., :V], x @ table.T + bias, atol=1e-5)
    assert (logits[..., V:] == -np.inf).all()
    assert VocabParallelEmbedding(V, size, dtype='bfloat16').apply({'params': {'weight': table}}, tokens).dtype == jnp.bfloat16
    with pytest.raises(UserError, match='table of 36 rows is not one of 37'):
        head.load_weight_shard(table[:-1])


def test_logits_are_gathered_on_request_only():
    mesh = create_mesh(jax.devices(), 4)
    lm_head, x = ParallelLMHead(40, 6, 4), jnp.ones((2, 3, 6))
    params = {'params': {'weight': jax.random.normal(jax.random.key(0), (40, 6))}}
    apply = lambda **how: jax.jit(lambda: lm_head.apply(params, x, mesh, method='sharded_forward', **how))()
    assert apply().addressable_shards[0].data.shape[-1] == 10
    assert apply(gathered=True).addressable_shards[0].data.shape == (2, 3, 40)
    assert apply(last_B=jnp.array([0, 2])).shape == (2, 1, 40)


# -----------------------------------------------------------------------------
# the compiled program


def collectives(program):
    """[(name, number of elements of each array it gives)] of all in a compiled program."""
    text = program if isinstance(program, str) else program.as_text()
    found = re.findall(r'= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(', text)
    return [(name, [math.prod(map(int, filter(None, dims.split(',')))) for dims in re.findall(r'\w\[([\d,]*)\]', shapes)])
            for shapes, name in found]


def compile_step(layout, config, b=8, options=None):
    """The compiled training step and the abstract state."""
    parallel, make, step = compiled_once(layout, config)
    state = parallel.abstract(make)
    x = np.zeros((b * parallel.n_shares, config.block_size), np.int32)
    batch = parallel.place({'x': x, 'y': x, 'row': np.zeros(len(x), np.uint32)}, (1, b))
    return step.lower(state, batch).compile(compiler_options=options), state


def test_fsdp_gathers_each_kernel_by_itself_once_forward_and_once_backward():
    config = GPTConfig(block_size=4, vocab_size=64, n_layer=2, n_head=2, n_embd=32)
    compiled, state = compile_step((8, 8, 1), config, b=2)
    found = collectives(compiled)
    gathered = sorted(size for name, sizes in found if name == 'all-gather' for size in sizes)
    D, tables = 32, [64 * 32, 4 * 32]
    assert gathered == sorted(tables + 2 * config.n_layer * [3 * D * D, D * D, 4 * D * D, 4 * D * D])
    # every gradient is reduced, as a reduce-scatter or (on the CPU) an all-reduce of which a device keeps its part
    reduced = sum(size for name, sizes in found if name in ('all-reduce', 'reduce-scatter') for size in sizes)
    assert reduced >= sum(x.size for x in jax.tree.leaves(state.params))


def test_no_device_gets_the_logits_of_other_vocabulary_ranges():
    mesh, B, T, V, D = create_mesh(jax.devices(), 4), 4, 6, 64, 8
    on = lambda *spec: NamedSharding(mesh, P(*spec))

    def loss(table, x, y):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            f = lambda table, x: cross_entropy(shard(jnp.einsum('btd,vd->btv', x, table), BATCH, None, 'tensor'), y).mean()
            return jax.value_and_grad(f, (0, 1))(table, x)

    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype, where in (
        ((V, D), jnp.float32, on('tensor')), ((B, T, D), jnp.float32, on(BATCH)), ((B, T), jnp.int32, on(BATCH)))]
    found = collectives(jax.jit(loss).lower(*shapes).compile())
    assert [name for name, _ in found if name == 'all-reduce'] and not [f for f in found if f[0] != 'all-reduce']
    # at most the gradients of x and of the table's own rows; the logits of a device's sequences would be B / 2 * T * V
    assert max(size for _, sizes in found for size in sizes) <= max(B // 2 * T * D, V // 4 * D) < B // 2 * T * V // 4


def test_gpt2_xl_on_eight_fsdp_devices_takes_less_than_a_sixth_of_the_memory():
    xl = GPTConfig(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600, scan_layers=True)  # unrolled it compiles for a minute
    parallel, make, step = compiled_once((8, 8, 1), xl)
    where = NamedSharding(parallel.mesh, P(None, BATCH))
    batch = {'x': (1, 8, 4), 'y': (1, 8, 4), 'row': (1, 8)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where) for name, shape in batch.items()}
    fast = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}  # it is not going to run
    memory = step.lower(parallel.abstract(make), batch).compile(compiler_options=fast).memory_analysis()
    replicated = 3 * 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(make).params))  # and AdamW's moments
    assert replicated > 18e9 and memory.argument_size_in_bytes < replicated / 6


# -----------------------------------------------------------------------------
# checkpoints move


def test_a_checkpoint_goes_on_on_any_other_layout_and_bit_for_bit_on_its_own(tmp_path):
    for saved_on, goes_on_on in ((ALL, (ALL, ONE, PMAP)), (PMAP, (BOTH,))):
        state, _ = run_layout(saved_on, 8)
        manager = open_checkpoints(tmp_path / str(saved_on))
        save_checkpoint(manager, 8, state, META)
        finish_checkpoints(manager)
        saved = jax.tree.map(np.asarray, (state.params, optimizer_item(state)))
        expected = run_layout(saved_on, 3, state=state, first=8)[1]
        for layout in goes_on_on:
            parallel, make, _ = compiled_once(layout, CONFIG)
            restored = load_checkpoint(tmp_path / str(saved_on), 8, parallel.abstract(make))
            jax.tree.map(np.testing.assert_array_equal, (restored.params, optimizer_item(restored)), saved)
            log = run_layout(layout, 3, state=restored, first=8)[1]
            np.testing.assert_allclose(log, expected, atol=0 if layout == saved_on else 2e-4)


# -----------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize('flags, message', [
    (['--fsdp=3'], r'fsdp=3 x tensor=1 x expert=1 does not divide 8 devices; the product may be one of \[1, 2, 4, 8\]'),
    (['--tensor=0'], 'fsdp=1 x tensor=0 x expert=1 does not divide'),
    (['--tensor=4', '--n_head=2'], r'tensor=4 does not divide n_head=2; on 8 devices it may be one of \[1, 2\]'),
    (['--fsdp=4', '--n_embd=18', '--n_head=2'], r'fsdp=4 does not divide n_embd=18; on 8 devices it may be one of \[1, 2\]'),
    (['--expert=2'], r'expert=2 does not divide n_expert=1; on 8 devices it may be one of \[1\]'),
    (['--fsdp=2', '--batch_size=3'], 'cannot be shared equally by 8 devices'),
    (['--fsdp=2', '--attention=chunked'], 'attention=chunked goes sequence by sequence'),
    (['--coordinator_address=localhost'], 'needs --num_processes and --process_id'),
    (['--num_processes=2'], 'several processes need --coordinator_address=host:port'),
    (['--num_processes=2', '--process_id=2', '--coordinator_address=localhost:1'], '--process_id=0 to N-1')])
def test_a_layout_that_cannot_be_is_refused(dataset, tmp_path, flags, message):
    refused(train(tmp_path / 'out', f'--dataset={dataset}', '--n_layer=1', '--n_head=4', '--n_embd=16', '--block_size=16', '--batch_size=8',
                  '--gradient_accumulation_steps=1', *flags), message)
    assert not (tmp_path / 'out').exists()


def test_processes_are_joined_only_where_flags_or_the_environment_say_so(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **how: joined.append(how.get('process_id', 'auto')))
    for name in ('SLURM_NTASKS', 'SLURM_STEP_NODELIST', 'OMPI_COMM_WORLD_SIZE', 'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'):
        monkeypatch.delenv(name, raising=False)
    join_processes()
    monkeypatch.setenv('SLURM_NTASKS', '4')
    join_processes()  # an allocation, but not a step of it
    assert joined == []
    monkeypatch.setenv('SLURM_STEP_NODELIST', 'node[1-4]')
    join_processes()
    join_processes('host:1234', 2, 1)
    monkeypatch.delenv('SLURM_NTASKS')
    join_processes('auto')
    assert joined == ['auto', 1, 'auto']


# -----------------------------------------------------------------------------
# several processes


FLAGS = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=2', '--dropout=0.1',
         '--max_iters=100', '--eval_interval=100', '--eval_iters=2', '--warmup_iters=2', '--lr_decay_iters=30', '--learning_rate=1e-2',
         '--device=cpu']


class Processes:
    """n processes of train_jax.py that train together, one device each."""

    def __init__(self, n, out_dir, *flags):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        self.out_dir = out_dir
        self.processes = [subprocess.Popen(
            [sys.executable, ROOT / 'train_jax.py', f'--out_dir={out_dir}', *map(str, flags), f'--coordinator_address=127.0.0.1:{port}',
             f'--num_processes={n}', f'--process_id={i}'], env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(n)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait_for_iteration(self, iteration):
        deadline = time.time() + 120
        while time.time() < deadline and all(p.poll() is None for p in self.processes):
            if any(r['iter'] >= iteration for r in read_metrics(self.out_dir)):
                return
            time.sleep(0.02)

    def ends(self):
        """[(exit code, stdout, stderr)] of each."""
        results = [process.communicate(timeout=300) for process in self.processes]
        return [(process.returncode, *result) for process, result in zip(self.processes, results)]


def losses(out_dir):
    return [r['loss'] for r in read_metrics(out_dir) if 'loss' in r]


def restored(out_dir):
    """Parameters and the rest of the state of the latest checkpoint, on one device."""
    step, meta = load_meta(out_dir)
    make = functools.partial(create_train_state, jax.random.key(0), GPTConfig(**meta['model']), create_optimizer_with_schedule(lambda step: 0.1))
    state = load_checkpoint(out_dir, step, setup_distributed_training(jax.devices()[:1]).abstract(make))
    return state.params, optimizer_item(state)


@pytest.fixture(scope='module')
def one_process(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp('one') / 'out'
    assert train(out, f'--dataset={dataset}', *FLAGS, '--device=cpu:0').returncode == 0
    return losses(out)


def test_two_processes_give_the_curve_of_one_and_survive_the_death_of_one_bit_for_bit(dataset, tmp_path, one_process):
    flags = [f'--dataset={dataset}', *FLAGS, '--save_interval=10']
    with Processes(2, tmp_path / 'whole', *flags) as processes:
        (code, out, err), (_, out_1, _) = processes.ends()
    assert code == 0, err
    assert '2 x cpu' in out and 'iter 0' in out and '2 x cpu' not in out_1 and 'iter 0' not in out_1  # process 0 talks
    np.testing.assert_allclose(losses(tmp_path / 'whole')[:30], one_process[:30], atol=2e-4)

    with Processes(2, tmp_path / 'killed', *flags) as processes:
        processes.wait_for_iteration(25)
        processes.processes[1].kill()
        (code, _, err), _ = processes.ends()
    assert code == 1 and re.search(r'error: process 0 of 2 has lost the others; start all of them again, with --init_from=resume', err)
    assert 10 <= load_meta(tmp_path / 'killed')[0] < 100
    with Processes(2, tmp_path / 'killed', '--init_from=resume', '--device=cpu') as processes:
        assert [code for code, *_ in processes.ends()] == [0, 0]
    assert numbers(tmp_path / 'killed') == numbers(tmp_path / 'whole')
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / 'killed'), restored(tmp_path / 'whole'))


def test_four_processes_on_a_mesh_give_the_curve_stop_together_and_one_device_goes_on(dataset, tmp_path, one_process):
    flags = [f'--dataset={dataset}', *FLAGS, '--fsdp=2', '--tensor=2', '--max_iters=100000', '--eval_interval=100000']
    with Processes(4, tmp_path, *flags) as processes:
        processes.wait_for_iteration(30)
        processes.processes[2].send_signal(signal.SIGTERM)
        results = processes.ends()
    assert [code for code, *_ in results] == [128 + signal.SIGTERM] * 4, results[0][2]
    saved = int(re.search(r'at iteration (\d+), saved', results[0][1])[1])
    assert load_meta(tmp_path)[0] == saved
    np.testing.assert_allclose(losses(tmp_path)[:30], one_process[:30], atol=2e-4)
    result = train(tmp_path, '--init_from=resume', '--device=cpu:0', '--fsdp=1', '--tensor=1', f'--max_iters={saved + 2}')
    assert result.returncode == 0 and f'at iteration {saved}' in result.stdout, result.stderr


# -----------------------------------------------------------------------------
# sampling, tracing, scaling


def test_sampling_with_sharded_heads_gives_the_text_of_one_device(dataset, tmp_path):
    out = tmp_path / 'out'
    assert train(out, f'--dataset={dataset}', *FLAGS, '--max_iters=2', '--device=cpu:0').returncode == 0
    flags = [f'--out_dir={out}', '--device=cpu', '--num_samples=2', '--max_new_tokens=30', '--start=the', '--top_k=5']
    one, two = run('sample_jax.py', *flags), run('sample_jax.py', *flags, '--tensor=2')
    assert two.returncode == 0 and '2 x cpu' in two.stderr and two.stdout == one.stdout and len(one.stdout) > 60
    refused(run('sample_jax.py', *flags, '--tensor=9'), 'tensor=9 x expert=1, and there are 8 devices')
    refused(run('sample_jax.py', *flags, '--tensor=4'), 'tensor=4 does not divide n_head=2')


def test_the_kv_cache_is_sharded_over_heads_and_a_token_moves_no_weights():
    config = dataclasses.replace(CONFIG, n_embd=64, n_layer=2)
    parallel = setup_distributed_training(jax.devices()[:4], tensor=4)
    params = parallel.create(create_train_state, jax.random.key(0), config, optax.identity()).params
    state = Decoding(tokens_BxN=jnp.zeros((3, 24), jnp.int32), length_B=jnp.full(3, 4), n_B=jnp.zeros(3, jnp.int32),
                     done_B=jnp.zeros(3, bool), key_B=jax.random.split(jax.random.key(0), 3), cache=None)
    how = dict(config=config, sampling=Sampling(True, None, False, False, False, 37, ()), draft_config=None)
    knobs = Knobs(*np.ones(4, np.float32))
    with parallel.entered():
        state = prefill(params, None, state, knobs, width=16, n_slots=16, cache_dtype='auto', n_draft=0, **how)
        program = decode.lower(params, None, state, knobs, np.int32(8), n_draft=0, **how).compile().as_text()
    assert {x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.cache)} == {(3, 1, 16, 16)}
    loop = [collectives(part) for part in program.split('\n\n') if part.startswith('%')]
    assert max(size for found in loop for _, sizes in found for size in sizes) == 3 * 64  # activations of one token, [B, D]


def test_profile_leaves_a_trace_with_the_names_of_blocks_and_collectives(dataset, tmp_path):
    import gzip
    result = train(tmp_path, f'--dataset={dataset}', *FLAGS, '--max_iters=9', '--profile=True', '--device=cpu:0')
    assert f'traced iterations 5 to 7 into {tmp_path}/profile' in result.stdout, result.stderr
    assert list((tmp_path / 'profile').rglob('*.trace.json.gz'))
    text = compile_step(BOTH, CONFIG)[0].as_text()
    for scope in ('h_0/attn/c_attn', 'h_0/mlp', 'all_gather', 'all_reduce', 'cross_entropy', 'clip', 'optimizer'):
        assert re.search(f'op_name="[^"]*{scope}', text), scope


def test_the_bytes_on_paper_are_those_of_the_compiled_program():
    report = run('bench_jax.py', '--mode=scaling', '--n_devices=8', '--n_layer=2', '--n_head=8', '--n_embd=64', '--block_size=8',
                 '--vocab_size=64', '--batch_size=8', '--dtype=float32', '--device=cpu')
    assert report.returncode == 0, report.stderr
    layouts = {(row['data'], row['fsdp'], row['tensor']): row for row in json.loads(report.stdout.splitlines()[-1])['results']['layouts']}
    config = GPTConfig(block_size=8, vocab_size=64, n_layer=2, n_head=8, n_embd=64)
    sizes = lambda found, kind: [size for name, sizes in found if name == kind for size in sizes]
    fsdp = sum(sizes(collectives(compile_step((8, 8, 1), config, 1)[0]), 'all-gather'))
    assert layouts[1, 8, 1]['of']['weights'] * 1e9 == pytest.approx(4 * fsdp * 7 / 8)
    found = collectives(compile_step((8, 1, 8), config, 8)[0])
    activations = [size for size in sizes(found, 'all-reduce') if size == 8 * 8 * 64]
    assert layouts[1, 1, 8]['of']['activations'] * 1e9 == pytest.approx(4 * sum(activations) * 2 * 7 / 8)
    assert layouts[8, 1, 1]['of']['gradients'] * 1e9 == pytest.approx(2 * 4 * (2 * 12 * 64**2 + 72 * 64) * 7 / 8)
    assert layouts[1, 8, 1]['hidden_from_gb_per_sec'] > layouts[8, 1, 1]['hidden_from_gb_per_sec'] > 0
    refused(run('bench_jax.py', '--mode=scaling', '--accelerator=abacus'), 'accelerator must be one of')
