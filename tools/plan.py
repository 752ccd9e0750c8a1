"""A step of training or decoding -> its plan for devices that are not here: what it needs and what
it sends.

The step is compiled by XLA for the devices of a topology, and its program is read. Nothing is a
measurement: times are bounds, bytes divided by the speeds of data sheets. `flags` are those of
bench_jax.py, as attributes.
"""
import dataclasses
import functools
import math
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cache import init_cache
from jax_devices.parallel import setup_distributed_training, split_batch
from jax_devices.setup import device_peak_flops
from jax_generate import DecodeState, Sampling, bytes_read_per_step, step_cached
from jax_ops.choose_attention import choose_attention
from jax_ops.choose_experts import choose_experts
from jax_ops.decode_weights import cast_matrices, order_columns_by_rank, quantize_params
from jax_ops.sharding import BATCH
from jax_sizes import choose_slots
from jax_train_utils import (
    create_learning_rate_schedule, create_optimizer_with_schedule, language_model, make_train_step)
from jax_transformer import count_params, create_train_state, estimate_mfu
from tools.hlo import (
    collective_table, count_kernels, loops_of_unknown_length, memory_traffic, parse_hlo)
from tools.topologies import DATA_SHEETS


@dataclasses.dataclass
class CompiledStep:
    """A compiled program, and what its arguments are."""
    program: object  # jax's compiled function
    mesh: jax.sharding.Mesh
    attention: str  # the implementation and its reason
    experts: str  # the way of computing them and its reason
    parts: dict  # {'parameters': tree, ...} of ShapeDtypeStructs with shardings
    n_steps: int = 1  # the number of steps that the program makes


def compile_train_step(flags, config, devices):
    """Compiles the step that train_jax.py runs, and returns a CompiledStep."""
    # The model, the optimizer and the shapes of the state, as in train_jax.py.
    parallel = setup_distributed_training(
        devices, flags.fsdp, flags.tensor, flags.expert, flags.context, flags.zero)
    config = dataclasses.replace(config, scan_layers=flags.scan_layers, remat=flags.remat)
    implementation, reason = choose_attention(
        flags.attention, config, devices[0], tensor=flags.tensor, context=flags.context)
    experts, why_experts = choose_experts(config, devices[0])
    config = dataclasses.replace(config, attention=implementation, experts=experts)
    parallel.validate(config)
    schedule = create_learning_rate_schedule(6e-4, warmup_iters=2000, lr_decay_iters=600000)
    tx = create_optimizer_with_schedule(schedule, optimizer=flags.optimizer)
    state = parallel.abstract_state(create_train_state, jax.random.key(flags.seed), config, tx)

    # The batch: [micro-steps, sequences, T] on a mesh; replicas have an axis of devices in front.
    n_shards = parallel.n_data_shards
    n_micro, per_device = split_batch(
        flags.gradient_accumulation_steps, flags.batch_size, n_shards)
    if hasattr(parallel, 'fsdp'):
        shape = (n_micro, per_device * n_shards)
        spec = (None, BATCH, 'context')
    elif len(devices) > 1:
        shape = (len(devices), n_micro, per_device)
        spec = ('data',)
    else:
        shape = (n_micro, per_device)
        spec = ()

    def abstract(shape, dtype):
        sharding = NamedSharding(parallel.mesh, P(*spec[:len(shape)]))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    tokens = abstract((*shape, flags.block_size), np.int32)
    batch = {'x': tokens, 'y': tokens, 'seq_id': abstract(shape, np.uint32)}

    # The step.
    step = parallel.train_step(make_train_step(
        config, language_model, parallel, schedule, seed=flags.seed, grad_clip=1.0,
        loss_chunk=flags.loss_chunk))
    program = step.lower(state, batch).compile()
    parts = {'parameters': state.params, 'optimizer': state.opt_state}
    return CompiledStep(
        program, parallel.mesh, f'{implementation} ({reason})', f'{experts} ({why_experts})', parts)


def compile_decode(flags, config, devices):
    """Compiles the loop of max_new_tokens decode steps for batch_size sequences, on tensor x expert
    of the devices, as sample_jax.py decodes. Returns a CompiledStep."""
    parallel = setup_distributed_training(
        devices[:flags.tensor * flags.expert], tensor=flags.tensor, expert=flags.expert)
    experts, why_experts = choose_experts(config, devices[0])
    config = dataclasses.replace(config, experts=experts)
    parallel.validate(config)
    on_mesh = getattr(parallel, 'on_mesh', lambda step: step)

    def placed(shapes, spec):
        sharding = NamedSharding(parallel.mesh, spec)

        def place(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, shapes)

    # The shapes of the parameters, of the cache and of the state.
    params = abstract_decode_params(flags, config, parallel)
    n_tokens = flags.prompt_len + flags.max_new_tokens
    n_slots = choose_slots(n_tokens, n_tokens, flags.block_size)
    make_cache = functools.partial(init_cache, config, flags.batch_size, n_slots, flags.cache_dtype)
    shards_heads = flags.tensor > 1 and not config.mla
    cache = placed(jax.eval_shape(make_cache), P(None, 'tensor') if shards_heads else P())

    def make_state():
        B = flags.batch_size
        return DecodeState(
            tokens_BxN=np.zeros((B, n_slots), np.int32), length_B=np.zeros(B, np.int32),
            n_generated_B=np.zeros(B, np.int32), done_B=np.zeros(B, bool),
            key_B=jax.random.split(jax.random.key(flags.seed), B))

    state = placed(jax.eval_shape(make_state), P()).replace(caches=(cache,))

    def decode(params, state):
        def step(_, state):
            return step_cached(params, state, ~state.done_B, config, Sampling(config.vocab_size))

        return jax.lax.fori_loop(0, flags.max_new_tokens, step, state)

    program = jax.jit(on_mesh(decode), donate_argnums=1).lower(params, state).compile()
    parts = {'parameters': params, 'cache': cache}
    return CompiledStep(
        program, parallel.mesh, 'xla', f'{experts} ({why_experts})', parts, flags.max_new_tokens)


def abstract_decode_params(flags, config, parallel):
    """Returns the parameters as decoding reads them, as ShapeDtypeStructs with shardings."""
    tx = create_optimizer_with_schedule(lambda step: 0)
    state = parallel.abstract_state(
        create_train_state, jax.random.key(flags.seed), config, tx)

    @jax.jit
    def convert(params):
        if flags.quantize:
            params = quantize_params(params)
        return order_columns_by_rank(cast_matrices(params, config.dtype), config)

    def place(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with parallel.mesh_context():
        shardings = convert.lower(state.params).compile().output_shardings
        shapes = jax.eval_shape(convert, state.params)
        return jax.tree.map(place, shapes, shardings)


def plan_step(flags, config, devices):
    """Compiles a step for `devices` and prints its plan. Returns ({name: value}, table of
    collectives).

    The bytes and times of decoding are those of one step, the mean of max_new_tokens."""
    limit = DATA_SHEETS[flags.topology.partition(':')[0]][0]
    is_decode = flags.plan == 'decode'
    start = time.perf_counter()
    if is_decode:
        compiled = compile_decode(flags, config, devices)
    else:
        compiled = compile_train_step(flags, config, devices)
    computations = parse_hlo(compiled.program.as_text())
    table = collective_table(computations, compiled.mesh, compiled.n_steps)
    compile_s = time.perf_counter() - start

    # Memory.
    memory = compiled.program.memory_analysis()
    peak = peak_of(memory)
    results = {}
    for name, part in compiled.parts.items():
        results[f'{name}_gb'] = shard_bytes(part) / 1e9
    results['temporary_gb'] = memory.temp_size_in_bytes / 1e9
    results['peak_gb'] = peak / 1e9

    # What moves.
    params = compiled.parts['parameters']
    results['sent_gb'] = sum(row['bytes'] for row in table) / 1e9
    results['exposed_gb'] = sum(row['exposed'] for row in table) / 1e9
    results['compile_s'] = compile_s
    if is_decode:
        weights = bytes_read_per_step(params, config, flags.batch_size, shard_bytes)
        traffic = weights + shard_bytes(compiled.parts['cache'])
    else:
        traffic = memory_traffic(computations)
        results['n_params'] = count_params(params, non_embedding=False)
    results['memory_traffic_gb'] = traffic / 1e9
    results['kernels'] = count_kernels(computations) / compiled.n_steps
    loops = loops_of_unknown_length(computations)
    n_loops = sum(times for *_, times in loops.values())
    results['loops_of_unknown_length'] = n_loops / compiled.n_steps
    print(f'attention: {compiled.attention}')
    if config.moe:
        print(f'experts: {compiled.experts}')
    print_loops(loops, compiled.n_steps)
    print_collectives(table)

    # How long that takes at least, and whether it fits. The process's own CPUs have no data sheet.
    if limit == math.inf:
        return results, table
    results.update(time_bounds(flags, config, devices, params, traffic, table))
    results['fits'] = peak <= limit
    verdict = 'fits' if peak <= limit else 'does not fit'
    print(f'peak {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB: {verdict}')
    return results, table


def time_bounds(flags, config, devices, params, traffic, table):
    """Returns {name: milliseconds} of a step by the speeds of the data sheet, or for decoding the
    most tokens per second.

    params: the parameters. traffic: the bytes that the step reads and writes. table: what it
    sends."""
    _, memory_speed, link_speed, host_speed = DATA_SHEETS[flags.topology.partition(':')[0]]
    links_s = 0
    for row in table:
        links_s += row['bytes'] / (host_speed if row['hosts'] else link_speed)
    reading_s = traffic / memory_speed
    bounds = {'memory_bound_ms': reading_s * 1e3, 'link_bound_ms': links_s * 1e3}
    if flags.plan == 'decode':
        bounds['tokens_per_sec_at_most'] = flags.batch_size / max(reading_s, links_s)
        return bounds

    # A training step computes, too. At best all three overlap, at worst the links wait.
    n_sequences = flags.gradient_accumulation_steps * flags.batch_size
    n_tokens = n_sequences * flags.block_size / len(devices)
    peak_flops = device_peak_flops(devices[0])
    compute_s = estimate_mfu(count_params(params), config, n_tokens, peak_flops)
    bounds['compute_bound_ms'] = compute_s * 1e3
    bounds['best_bound_ms'] = max(compute_s, links_s) * 1e3
    bounds['worst_bound_ms'] = (max(compute_s, reading_s) + links_s) * 1e3
    return bounds


def peak_of(memory):
    """Returns the most bytes that a program needs of a device: arguments, results and temporaries,
    if the compiler does not say more. memory: jax's memory_analysis of the program."""
    arguments = memory.argument_size_in_bytes
    new_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return max(memory.peak_memory_in_bytes, arguments + new_results + memory.temp_size_in_bytes)


def shard_bytes(tree):
    """Returns the bytes of one device's shards of a tree of ShapeDtypeStructs."""
    total = 0
    for x in jax.tree.leaves(tree):
        is_array = hasattr(x, 'shape') and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        if is_array:
            total += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return total


def print_loops(loops, n_steps):
    """Prints the loops whose length the data decide, and how often the plan counts them.

    loops: {name: (iterations counted, iterations at most or None, times executed)}."""
    for name, (counted, most, times) in loops.items():
        limit = 'of unknown length' if most is None else f'at most {most:,} iterations'
        print(f'loop {name}: {limit}, counted as {counted:,}; {times / n_steps:,.4g} per step')


def print_collectives(table):
    """Prints the table of what a device sends."""
    print(f'{"collective":>20} {"axis":>14} {"devices":>8} {"dtype":>10} {"arrays":>7} '
          f'{"MB sent":>10} {"exposed":>10}')
    sends_tokens = False
    for row in table:
        print(f'{row["kind"]:>20} {row["axis"]:>14} {row["n"]:>8} {row["dtype"]:>10} '
              f'{row["count"]:>7.4g} {row["bytes"] / 1e6:>10,.2f} {row["exposed"] / 1e6:>10,.2f}')
        if row['kind'] == 'all-to-all' and row['axis'] == 'expert':
            sends_tokens = True
    if sends_tokens:
        print('tokens are sent to experts in one round, as when routing is balanced; others send '
              'more')
