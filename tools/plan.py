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
from jax_generate import DecodeState, Sampling, step_cached
from jax_ops.choose_attention import choose_attention
from jax_ops.decode_weights import cast_matrices, order_columns_by_rank, quantize_params
from jax_ops.sharding import BATCH
from jax_sizes import choose_slots
from jax_train_utils import (
    create_learning_rate_schedule, create_optimizer_with_schedule, language_model, make_train_step)
from jax_transformer import count_params, create_train_state, estimate_mfu, without_tables
from tools.hlo import collective_table, memory_traffic, parse_hlo
from tools.topologies import DATA_SHEETS


@dataclasses.dataclass
class CompiledStep:
    """A program, and what its arguments are."""
    program: object  # jax's compiled function
    mesh: jax.sharding.Mesh
    attention: str  # the implementation and its reason
    parts: dict  # {'parameters': tree, ...} of ShapeDtypeStructs with shardings
    n_steps: int = 1  # that the program makes


def compile_train_step(flags, config, devices):
    """Compiles the step that train_jax.py runs."""
    parallel = setup_distributed_training(
        devices, flags.fsdp, flags.tensor, flags.expert, flags.context, flags.zero)
    config = dataclasses.replace(config, scan_layers=flags.scan_layers, remat=flags.remat)
    implementation, reason = choose_attention(
        flags.attention, config, devices[0], tensor=flags.tensor, context=flags.context)
    config = dataclasses.replace(config, attention=implementation)
    parallel.validate(config)
    schedule = create_learning_rate_schedule(6e-4, warmup_iters=2000, lr_decay_iters=600000)
    tx = create_optimizer_with_schedule(schedule, optimizer=flags.optimizer)
    state = parallel.abstract_state(create_train_state, jax.random.key(flags.seed), config, tx)

    # the batch: [micro-steps, sequences, T] on a mesh; replicas have an axis of devices in front
    n_micro, per_device = split_batch(flags.gradient_accumulation_steps, flags.batch_size, parallel.n_data_shards)
    if hasattr(parallel, 'fsdp'):
        shape, spec = (n_micro, per_device * parallel.n_data_shards), (None, BATCH, 'context')
    elif len(devices) > 1:
        shape, spec = (len(devices), n_micro, per_device), ('data',)
    else:
        shape, spec = (n_micro, per_device), ()

    def abstract(shape, dtype):
        sharding = NamedSharding(parallel.mesh, P(*spec[:len(shape)]))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    tokens = abstract((*shape, flags.block_size), np.int32)
    batch = {'x': tokens, 'y': tokens, 'seq_id': abstract(shape, np.uint32)}
    step = parallel.train_step(make_train_step(
        config, language_model, parallel, schedule, seed=flags.seed, grad_clip=1.0,
        loss_chunk=flags.loss_chunk))
    program = step.lower(state, batch).compile()
    parts = {'parameters': state.params, 'optimizer': state.opt_state}
    return CompiledStep(program, parallel.mesh, f'{implementation} ({reason})', parts)


def compile_decode(flags, config, devices):
    """Compiles the loop of max_new_tokens decode steps for batch_size sequences, on tensor x expert
    of the devices, as sample_jax.py decodes."""
    parallel = setup_distributed_training(
        devices[:flags.tensor * flags.expert], tensor=flags.tensor, expert=flags.expert)
    parallel.validate(config)
    on_mesh = getattr(parallel, 'on_mesh', lambda step: step)

    def placed(shapes, spec):
        sharding = NamedSharding(parallel.mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)

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
    return CompiledStep(program, parallel.mesh, 'xla', {'parameters': params, 'cache': cache}, flags.max_new_tokens)


def abstract_decode_params(flags, config, parallel):
    """The parameters as decoding reads them, as ShapeDtypeStructs with shardings."""
    tx = create_optimizer_with_schedule(lambda step: 0)
    params = parallel.abstract_state(create_train_state, jax.random.key(flags.seed), config, tx).params

    @jax.jit
    def convert(params):
        if flags.quantize:
            params = quantize_params(params)
        return order_columns_by_rank(cast_matrices(params, config.dtype), config)

    with parallel.mesh_context():
        shardings = convert.lower(params).compile().output_shardings
        shapes = jax.eval_shape(convert, params)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings)


def plan_step(flags, config, devices):
    """Compiles a step for `devices` and prints its plan. Returns ({name: value}, table of
    collectives).

    Of decoding, bytes and times are those of a step, the mean of max_new_tokens."""
    limit, memory_speed, link_speed, host_speed = DATA_SHEETS[flags.topology.partition(':')[0]]
    is_decode = flags.plan == 'decode'
    start = time.perf_counter()
    compiled = compile_decode(flags, config, devices) if is_decode else compile_train_step(flags, config, devices)
    computations = parse_hlo(compiled.program.as_text())
    table = collective_table(computations, compiled.mesh, compiled.n_steps)
    compile_s = time.perf_counter() - start

    # memory
    memory = compiled.program.memory_analysis()
    unaliased = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = max(memory.peak_memory_in_bytes, unaliased + memory.temp_size_in_bytes)
    results = {f'{name}_gb': shard_bytes(part) / 1e9 for name, part in compiled.parts.items()}
    results['temporary_gb'] = memory.temp_size_in_bytes / 1e9
    results['peak_gb'] = peak / 1e9

    # what moves
    params = compiled.parts['parameters']
    results['sent_gb'] = sum(row['bytes'] for row in table) / 1e9
    results['exposed_gb'] = sum(row['exposed'] for row in table) / 1e9
    results['compile_s'] = compile_s
    if is_decode:
        traffic = shard_bytes(without_tables(params)) + shard_bytes(compiled.parts['cache'])
    else:
        traffic = memory_traffic(computations)
        results['n_params'] = count_params(params, non_embedding=False)
    results['memory_traffic_gb'] = traffic / 1e9
    print(f'attention: {compiled.attention}')
    print_collectives(table)
    if not memory_speed:
        return results, table

    # bounds of the time, by the speeds of the data sheet
    reading_s = traffic / memory_speed
    links_s = sum(row['bytes'] / (host_speed if row['hosts'] else link_speed) for row in table)
    results['memory_bound_ms'] = reading_s * 1e3
    results['link_bound_ms'] = links_s * 1e3
    if is_decode:
        results['tokens_per_sec_at_most'] = flags.batch_size / max(reading_s, links_s)
    else:
        tokens = flags.gradient_accumulation_steps * flags.batch_size * flags.block_size / len(devices)
        compute_s = estimate_mfu(count_params(params), config, tokens, device_peak_flops(devices[0]))
        results['compute_bound_ms'] = compute_s * 1e3
        results['best_bound_ms'] = max(compute_s, links_s) * 1e3
        results['worst_bound_ms'] = (max(compute_s, reading_s) + links_s) * 1e3
    results['fits'] = peak <= limit
    print(f'peak {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB: {"fits" if peak <= limit else "does not fit"}')
    return results, table


def shard_bytes(tree):
    """Bytes of one device's shards of a tree of ShapeDtypeStructs."""
    total = 0
    for x in jax.tree.leaves(tree):
        is_array = hasattr(x, 'shape') and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        if is_array:
            total += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return total


def print_collectives(table):
    """Prints the table of what a device sends."""
    print(f'{"collective":>20} {"axis":>14} {"devices":>8} {"dtype":>10} {"arrays":>7} {"MB sent":>10} {"exposed":>10}')
    for row in table:
        print(f'{row["kind"]:>20} {row["axis"]:>14} {row["n"]:>8} {row["dtype"]:>10} {row["count"]:>7.4g} '
              f'{row["bytes"] / 1e6:>10,.2f} {row["exposed"] / 1e6:>10,.2f}')
    if any(row['kind'] == 'all-to-all' and row['axis'] == 'expert' for row in table):
        print('tokens are sent to experts in one round, as when routing is balanced; others send more')
