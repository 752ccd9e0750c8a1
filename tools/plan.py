"""Plans a step of training or decoding for devices that this machine does not have. Compiles the
step, and returns its memory, FLOPs and communication as XLA reports them for the compiled program.
The functions in this file have a parameter `flags`, an object that has the flags of bench_jax.py as
attributes."""
import functools
import math
import re
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_devices.choose import config_for_decoding
from jax_devices.layout import setup_distributed_training
from jax_generate import Controls, DecodeState, choose_slots, step_cached
from jax_ops.decode_weights import cast_matrices, order_columns_by_rank, quantize_params
from jax_run.program import Options, assemble
from jax_train_utils import (
    create_learning_rate_schedule, create_optimizer_with_schedule, create_train_state, split_batch)
from jax_transformer import count_params, init_cache
from tools.topologies import DEVICE_MEMORY

COLLECTIVES = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'


def plan_step(flags, config, devices):
    """Compiles a step of the model of `config` for `devices`. flags: an object that has the flags
    of bench_jax.py as attributes.

    Returns {name: value}:
    - the choices that lower_train_step or lower_decode returns;
    - compile_s: the seconds of compilation;
    - the memory of one device in GB, and whether the step fits into it (`fits`; missing if the
      size of the device's memory is unknown);
    - tflop and accessed_gb: the floating-point operations of the program, and the bytes that it
      reads and writes; missing if the compiler does not report them, as for GPUs;
    - the number and the megabytes of each kind of collective, see count_collectives.

    Operations, bytes and collectives in the body of a loop are counted once, however often the loop
    runs. So these numbers are too low for a program with loops."""
    start = time.perf_counter()
    lower = lower_decode if flags.plan == 'decode' else lower_train_step
    lowered, parts, results = lower(flags, config, devices)
    program = lowered.compile()
    results['compile_s'] = time.perf_counter() - start

    # Memory: of each part of the arguments, of temporaries, and of all that is there at once. A
    # compiler may say less than the sum of arguments, new results and temporaries.
    memory = program.memory_analysis()
    for name, part in parts.items():
        results[f'{name}_gb'] = shard_bytes(part) / 1e9
    results['temporary_gb'] = memory.temp_size_in_bytes / 1e9
    new_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = memory.argument_size_in_bytes + new_results + memory.temp_size_in_bytes
    peak = max(memory.peak_memory_in_bytes, needed)
    results['peak_gb'] = peak / 1e9
    limit = DEVICE_MEMORY[flags.topology.partition(':')[0]]
    if limit is not None:
        results['memory_gb'] = limit / 1e9
        results['fits'] = peak <= limit

    # What it computes, reads, writes and sends. The compiler for GPUs does not say the first three.
    cost = program.cost_analysis()
    if cost:
        results['tflop'] = cost['flops'] / 1e12
        results['accessed_gb'] = cost['bytes accessed'] / 1e9
    results.update(count_collectives(program.as_text()))
    return results


def lower_train_step(flags, config, devices):
    """Lowers the step that train_jax.py runs. Returns (the lowered step; {'parameters': tree,
    'optimizer': tree} of ShapeDtypeStructs with shardings; choices). choices: {'attention': its
    implementation and the reason for this choice, a text; 'experts': the way in which experts are
    computed and the reason, a text, missing in a model without experts; 'n_params': the number of
    parameters}."""
    # The model, the optimizer and the shapes of the state, as in train_jax.py.
    layout = setup_distributed_training(
        devices, flags.fsdp, flags.tensor, flags.expert, flags.context, flags.zero)
    program = assemble(config, layout, Options.from_flags(vars(flags)))
    config = program.config
    schedule = create_learning_rate_schedule(6e-4, warmup_iters=2000, lr_decay_iters=600000)
    key = jax.random.key(flags.seed)
    state = layout.abstract_state(create_train_state, key, config, program.tx)
    state = state.replace(schedule=layout.abstract_state(lambda: schedule))

    # The batch.
    shape = split_batch(
        flags.gradient_accumulation_steps, flags.batch_size, layout.n_data_shards)

    def abstract(dtype, *rest):
        whole, spec = layout.whole_batch(shape, rest)
        sharding = NamedSharding(layout.mesh, spec)
        return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)

    tokens = abstract(np.int32, flags.block_size)
    batch = {'x': tokens, 'y': tokens, 'seq_id': abstract(np.uint32)}

    # The step.
    parts = {'parameters': state.params, 'optimizer': state.opt_state}
    chosen = {kind: f'{getattr(config, kind)} ({why})' for kind, why in program.reasons.items()}
    chosen['n_params'] = count_params(state.params, non_embedding=False)
    return program.step.lower(state, batch), parts, chosen


def lower_decode(flags, config, devices):
    """Lowers the loop of max_new_tokens decode steps for batch_size sequences, as sample_jax.py
    decodes. The loop runs on the first `tensor` * `expert` devices. Returns (the lowered loop;
    {'parameters': tree, 'cache': tree} of ShapeDtypeStructs with shardings; choices). choices:
    {'experts': the way in which experts are computed, one of EXPERT_WAYS}; {} for a model without
    experts."""
    layout = setup_distributed_training(
        devices[:flags.tensor * flags.expert], tensor=flags.tensor, expert=flags.expert)
    config = config_for_decoding(config, layout, config.dtype)

    def placed(shapes, spec):
        sharding = NamedSharding(layout.mesh, spec)

        def place(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, shapes)

    # The shapes of the parameters, of the cache and of the state.
    params = abstract_decode_params(flags, config, layout)
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

    state = placed(jax.eval_shape(make_state), P()).replace(cache=cache)

    def decode(params, state):
        def step(_, state):
            return step_cached(params, state, ~state.done_B, config, Controls(config.vocab_size))

        return jax.lax.fori_loop(0, flags.max_new_tokens, step, state)

    lowered = jax.jit(layout.on_mesh(decode), donate_argnums=1).lower(params, state)
    parts = {'parameters': params, 'cache': cache}
    return lowered, parts, {'experts': config.experts} if config.moe else {}


def abstract_decode_params(flags, config, layout):
    """Returns the parameters as decoding reads them (matrices in config.dtype, or in int8 with
    flags.quantize), as a tree of ShapeDtypeStructs with shardings."""
    tx = create_optimizer_with_schedule(lambda step: 0)
    state = layout.abstract_state(
        create_train_state, jax.random.key(flags.seed), config, tx)

    @jax.jit
    def convert(params):
        if flags.quantize:
            params = quantize_params(params)
        return order_columns_by_rank(cast_matrices(params, config.dtype), config)

    def place(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with layout.mesh_context():
        shardings = convert.lower(state.params).compile().output_shardings
        shapes = jax.eval_shape(convert, state.params)
        return jax.tree.map(place, shapes, shardings)


def shard_bytes(tree):
    """Returns the total size in bytes of one device's shards of a tree of ShapeDtypeStructs. Keys
    of random numbers are not counted."""
    total = 0
    for x in jax.tree.leaves(tree):
        is_array = hasattr(x, 'shape') and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        if is_array:
            total += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return total


def count_collectives(text):
    """Counts the collectives in the text of a compiled program. Returns {'all_gather_count':
    number, 'all_gather_mb': megabytes of their results on a device, ...}, two entries for each
    kind."""
    # An asynchronous collective starts and ends: the end counts, because it has only the result. On
    # a TPU a collective may be in pieces, one in each fusion that runs at the same time; the pieces
    # have the same chain_id.
    found = {}  # {(kind, chain or number): shapes of the results}
    collectives = re.findall(rf' = (.*?) ({COLLECTIVES})(?:-done)?\((.*)', text)
    for number, (shapes, kind, rest) in enumerate(collectives):
        chain = re.search(r'chain_id="\d+"', rest)
        found[kind, chain[0] if chain else number] = shapes

    counts = {}
    for (kind, _), shapes in found.items():
        name = kind.replace('-', '_')
        counts[f'{name}_count'] = counts.get(f'{name}_count', 0) + 1
        counts[f'{name}_mb'] = counts.get(f'{name}_mb', 0) + bytes_of(shapes) / 1e6
    return counts


def bytes_of(shapes):
    """Returns the total size of arrays in bytes. shapes: the dtypes and shapes of the arrays, as
    they are written in the text of a compiled program, such as '(f32[8,2], pred[])'."""
    n_bits = 0
    for bits, dims in re.findall(r'[a-z]+(\d*)\w*\[([\d,]*)\]', shapes):
        n_bits += int(bits or 8) * math.prod(int(size) for size in dims.split(',') if size)
    return n_bits // 8
