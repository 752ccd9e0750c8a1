"""Times training or decoding with random weights and random tokens, or compiles a step for devices that are not here
and says what it needs. Prints a table, then one JSON line.

$ python bench_jax.py --mode=train --preset=nanogpt_cpu --repeats=100
$ python bench_jax.py --mode=train --preset=gpt2 --batch_size=1 --dtype=bfloat16 --ablate=True
$ python bench_jax.py --mode=decode --prompt_len=16 --max_new_tokens=128
$ python bench_jax.py --mode=decode --out_dir=out-shakespeare-char --dataset=shakespeare_char --ablate=True
$ python bench_jax.py config/train_gpt2.py --mode=compile --topology=h100:1x8 --fsdp=8
$ python bench_jax.py --mode=compile --plan=decode --topology=v5e:2x4 --tensor=4 --quantize=int8 --batch_size=32
"""
import ctypes
import dataclasses
import functools
import importlib.util
import json
import math
import os
import platform
import re
import sys
import time
from pathlib import Path

from jax_flags import UserError, config_block, read_flags, start_script

# -----------------------------------------------------------------------------
mode = 'train' # 'train', 'decode' or 'compile' (a step for devices that are not here)
preset = '' # a model and batch size: 'nanogpt_cpu', 'baby' (nanoGPT's two for Shakespeare) or 'gpt2'; flags override it
ablate = False # measure again with each choice changed, one at a time, and print the table
batch_size = 12 # sequences per micro-batch (train), or generated together (decode)
gradient_accumulation_steps = 1 # micro-batches per update (train)
block_size = 1024 # maximum number of tokens per sequence
vocab_size = 50304 # number of tokens in the vocabulary; GPT-2 has 50257
n_layer = 12 # transformer blocks
n_head = 12 # attention heads
n_embd = 768 # width
dropout = 0.0 # on embeddings, attention and residuals (train)
bias = True # in LayerNorm and Dense layers
norm = 'layer' # 'layer' or 'rms'
position = 'learned' # 'learned' or 'rope'
n_kv_head = 0 # heads of keys and values (GQA if fewer than n_head); 0 is n_head
qk_norm = '' # 'learned' normalizes queries and keys
layer_types = 'full' # 'full' or 'window' attention of each layer, as in 'window,full'; a short pattern repeats
window = 0 # sliding-window size of the 'window' layers, the current token included
mlp = 'gelu' # 'gelu', 'swiglu' or 'geglu'
n_inner = 0 # width of the MLP, or of each expert; 0 is 4 * n_embd
tied_head = True # the head is the token embedding (weight tying)
n_expert = 0 # MLPs per layer of which a token uses n_expert_used (mixture of experts); 0 is one MLP for all
n_expert_used = 2 # experts per token
expert_balance = 0.01 # weight of the loss that keeps the experts equally busy (train)
prompt_len = 16 # tokens of each prompt (decode)
max_new_tokens = 128 # tokens generated per sequence, greedily (decode)
optimizer = 'adamw' # or 'muon' (train)
attention = 'auto' # as in train_jax.py, like the next three (train)
loss_chunk = 0 # positions whose logits are materialized at a time; 0 is all
scan_layers = False # compile one block and loop over it
remat = 'none' # gradient checkpointing: 'dots', 'full'
quantize = '' # 'int8' weights, as in sample_jax.py, like the next two (decode)
cache_dtype = 'auto' # of the KV cache
n_draft = 0 # draft tokens per step
out_dir = '' # a run, a Hugging Face folder or a ckpt.pt, whose weights to use instead of random ones (decode)
dataset = '' # its folder under data/: takes prompts from val.bin, and measures perplexity and agreement there (decode)
plan = 'train' # the step to compile: 'train' or 'decode' (compile)
topology = 'h100:1x8' # devices to compile for: hosts x GPUs, or a TPU slice as in 'v5e:4x4' (compile)
fsdp = 1 # as in train_jax.py, like the next four (compile)
zero = 0 # optimizer state (1), gradients (2) sharded over all replicas
tensor = 1 # heads, MLP width and vocabulary over this many devices
expert = 1 # experts over this many devices
context = 1 # each sequence over this many devices
repeats = 20 # timed iterations (train) or calls (decode), not counting those that compile
seed = 1337 # of weights and tokens
device = 'auto' # as in train_jax.py
dtype = 'auto' # 'float32', 'bfloat16', 'float16'
# -----------------------------------------------------------------------------
start_script()
PRESETS = {
    '': {},
    'nanogpt_cpu': dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, vocab_size=65),
    'baby': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, vocab_size=65, dropout=0.2),
    'gpt2': dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=12, vocab_size=50304),
}
TRAIN_FLAGS = config_block(Path(__file__).with_name('train_jax.py'))  # its config files may be used as they are
flags, given = read_flags(__file__, globals(), ignored=TRAIN_FLAGS)  # all flags of the block above, the user's
preset = flags['preset']
if preset not in PRESETS:
    raise UserError(f"preset must be one of {', '.join(filter(None, PRESETS))}, not {preset!r}")
flags |= PRESETS[preset] | given
globals().update(flags)
if mode not in ('train', 'decode', 'compile'):
    raise UserError(f'mode must be train, decode or compile, not {mode!r}')
for name in ('batch_size', 'gradient_accumulation_steps', 'prompt_len', 'repeats'):
    if flags[name] < 1:
        raise UserError(f'{name} must be at least 1, not {flags[name]}')
if plan not in ('train', 'decode'):
    raise UserError(f'plan must be train or decode, not {plan!r}')
if mode == 'decode' and max_new_tokens < 2:
    raise UserError(f'max_new_tokens must be at least 2, not {max_new_tokens}')
if mode == 'compile':
    device = 'cpu'  # this process needs no other
    if dtype == 'auto' and not topology.startswith('cpu'):
        dtype = 'bfloat16'

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import jax
import jaxlib
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ops
from jax_generate import (
    DecodeState, Sampling, bytes_read_per_step, cast_matrices, choose_slots,
    convert_params_for_decoding, generate_stream, init_cache, order_columns_by_rank, params_read_per_step,
    quantize_params, step_cached)
from jax_ops import BATCH
from jax_pretrained import load_pretrained, local_path
from jax_train_utils import (
    Stopwatch, choose_attention, config_from_flags, create_learning_rate_schedule, create_optimizer_with_schedule,
    device_peak_flops, get_windows, load_dataset, load_run, make_train_step, measure_bandwidth,
    setup_distributed_training, setup_jax_environment, split_batch)
from jax_transformer import GPT, count_params, create_train_state, cross_entropy, estimate_mfu

devices, dtype, reason = setup_jax_environment(device, dtype)
if mode == 'compile' and 'dtype' not in given:
    reason = 'the default there'
flags['dtype'] = dtype
model_config = config_from_flags(flags, vocab_size=vocab_size, dtype=dtype)
clock = Stopwatch()

# -----------------------------------------------------------------------------
# training


def bench_train(loss_chunk=loss_chunk, **changes):
    """Times training steps on a batch that is already on the devices, waiting for each. changes: of the config."""
    parallel = setup_distributed_training(devices)
    config = dataclasses.replace(model_config, **{'scan_layers': scan_layers, 'remat': remat} | changes)
    if 'attention' not in changes:
        config = dataclasses.replace(config, attention=choose_attention(attention, config, devices[0])[0])
    schedule = create_learning_rate_schedule(6e-4, decay_lr=False)
    tx = create_optimizer_with_schedule(schedule, optimizer=optimizer)
    state = parallel.init_sharded(create_train_state, jax.random.key(seed), config, tx)
    n_params = count_params(state.params)
    n_rows = gradient_accumulation_steps * batch_size
    tokens = np.random.default_rng(seed).integers(vocab_size, size=(n_rows, block_size + 1)).astype(np.int32)
    batch = {'x': tokens[:, :-1], 'y': tokens[:, 1:], 'seq_id': np.arange(n_rows, dtype=np.uint32)}
    batch = parallel.shard_batch(batch, split_batch(gradient_accumulation_steps, batch_size, len(devices)))
    clock.lap()
    step = parallel.train_step(make_train_step(config, seed, 1.0, schedule, loss_chunk)).lower(state, batch).compile()
    compile_s = sum(clock.lap())
    seconds = []
    for _ in range(repeats + 2):  # the first two warm up
        clock.lap()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        seconds.append(clock.lap().running)
    seconds = seconds[2:]
    tokens_per_sec = n_rows * block_size / np.median(seconds)
    peak = device_peak_flops(devices[0])
    return {
        'ms_per_iter': np.median(seconds) * 1e3, 'ms_per_iter_min': min(seconds) * 1e3,
        'tokens_per_sec': tokens_per_sec,
        'mfu': peak and estimate_mfu(n_params, config, tokens_per_sec, peak * len(devices)),
        'compile_s': compile_s, 'n_params': n_params,
        # the compiler's plan for what a step needs in addition to parameters, optimizer state and batch
        'temporary_gb': step.memory_analysis().temp_size_in_bytes / 1e9, 'peak_memory_gb': peak_memory_gb()}


def ablate_train(baseline):
    """Times the step with each choice changed, one at a time, and prints the table. Returns {change: results}."""
    chosen = dict(attention=choose_attention(attention, model_config, devices[0])[0], scan_layers=scan_layers,
                  remat=remat, loss_chunk=loss_chunk, dtype=dtype)
    choices = {'attention': ('xla', 'chunked', 'cudnn'), 'scan_layers': (False, True),
               'remat': ('none', 'dots', 'full'), 'loss_chunk': (0, max(1, block_size // 8)),
               'dtype': ('float32', 'bfloat16')}
    table = {'baseline': baseline}
    for name, values in choices.items():
        for value in values:
            if value == chosen[name]:
                continue
            changes = {'attention': chosen['attention']} | {name: value}
            config = dataclasses.replace(model_config, dtype=changes.get('dtype', dtype))
            try:
                choose_attention(changes['attention'], config, devices[0])
            except UserError:  # cuDNN does not compute this
                continue
            table[f'{name}={value}'] = bench_train(**changes)
    jax_ops.CUSTOM_MATMUL_GRADIENTS = False  # read when a step is traced, and bench_train traces a new one
    try:
        table["JAX's matmul gradients"] = bench_train()
    finally:
        jax_ops.CUSTOM_MATMUL_GRADIENTS = True
    print(f'{"":>24}  {"ms/iter":>9}  {"x":>5}  {"temporary GB":>12}  {"compile s":>9}')
    for name, r in table.items():
        print(f'{name:>24}  {r["ms_per_iter"]:9,.1f}  {r["ms_per_iter"] / baseline["ms_per_iter"]:5.2f}  '
              f'{r["temporary_gb"]:12.3f}  {r["compile_s"]:9.1f}')
    return table


# -----------------------------------------------------------------------------
# decoding

decode_settings = dict(batch_size=batch_size, dtype=dtype, quantize=quantize, cache_dtype=cache_dtype, n_draft=n_draft)


def bench_decode(settings, repeats=repeats):
    """Times calls of generate, each a prefill and then one step per token. settings: see decode_settings."""
    config, params = load_model_for_decoding(settings['dtype'], settings['quantize'])
    prompts = make_prompts(settings['batch_size'])
    calls = []  # (prefill lap, decode lap)
    bandwidths = []
    for _ in range(repeats + 1):  # the first one compiles
        clock.lap()
        laps = []
        for result in generate_stream(
                params, config, prompts, max_new_tokens, rng=jax.random.key(seed), temperature=0,
                n_draft=settings['n_draft'], cache_dtype=settings['cache_dtype']):
            laps.append(clock.lap())
        calls.append(laps)
        bandwidths.append(measure_bandwidth(devices[0]))  # after each call, because it varies on a shared machine
    prefill_s, decode_s = np.median([[lap.running for lap in laps] for laps in calls[1:]], axis=0)
    weight_bytes = bytes_read_per_step(params)
    gb_read = (weight_bytes + result.cache_bytes) / 1e9 * result.steps
    shares = [gb_read / laps[1].running / bandwidth for laps, bandwidth in zip(calls[1:], bandwidths[1:])]
    return {
        'ms_per_iter': decode_s * 1e3 / result.steps,
        'tokens_per_sec': settings['batch_size'] * max_new_tokens / (prefill_s + decode_s),
        'tokens_per_sec_decode': settings['batch_size'] * (max_new_tokens - 1) / decode_s,
        'prefill_ms': prefill_s * 1e3, 'compile_s': sum(lap.compiling for lap in calls[0]),
        'weights_mb': weight_bytes / 1e6, 'cache_mb': result.cache_bytes / 1e6, 'gb_per_sec': gb_read / decode_s,
        'measured_bandwidth_gb_per_sec': np.median(bandwidths[1:]), 'share_of_bandwidth': np.median(shares),
        'accepted': result.accepted / result.drafted if result.drafted else None,
        **measure_quality(config, params, settings['cache_dtype'])}


@functools.lru_cache(maxsize=1)
def load_model():
    """(config, float32 parameters) of out_dir, or of a new random model."""
    if out_dir and not Path(out_dir, 'ckpt').is_dir():
        return load_pretrained(local_path(out_dir), place=lambda path, array: jax.device_put(array, devices[0]))
    if out_dir:
        return load_run(out_dir, 'best', setup_distributed_training(devices[:1]))[:2]
    tx = create_optimizer_with_schedule(lambda step: 0)
    params = create_train_state(jax.random.key(seed), model_config, tx).params
    return model_config, jax.device_put(params, devices[0])


def load_model_for_decoding(dtype, quantize):
    config, params = load_model()
    params = convert_params_for_decoding(dict(params), dtype, quantize)  # empties the dict
    return dataclasses.replace(config, dtype=dtype), params


@functools.lru_cache(maxsize=1)
def validation_windows():
    """16 windows spread evenly over val.bin, [16, T + 1] with T of at most 256."""
    T = min(256, load_model()[0].block_size)
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', dataset)
    tokens = load_dataset(folder, T)[0]['val']
    x, y = get_windows(tokens, np.linspace(0, len(tokens) - T - 1, 16).astype(int), T)
    return np.concatenate([x, y[:, -1:]], axis=1)


def make_prompts(batch_size):
    """Prompts [batch_size, prompt_len] of random tokens, or from val.bin."""
    if not dataset:
        return np.random.default_rng(seed).integers(load_model()[0].vocab_size, size=(batch_size, prompt_len))
    return np.resize(validation_windows()[:, :prompt_len], (batch_size, prompt_len))


@functools.partial(jax.jit, static_argnums=(0, 2))
def decode_windows(config, params, cache_dtype):
    """(loss, most likely token) of each position of the validation windows, [T, 16] each, token by token as decoding
    computes them."""
    windows = validation_windows()

    def step(cache, inputs):
        x_B, y_B, position = inputs
        logits, cache = GPT(config).apply({'params': params}, x_B[:, None], cache, position_BxT=position[None, None],
                                          method='with_cache')
        return cache, (cross_entropy(logits[:, 0], y_B), logits[:, 0].argmax(-1))

    inputs = windows[:, :-1].T, windows[:, 1:].T, np.arange(windows.shape[1] - 1)
    return jax.lax.scan(step, init_cache(config, *windows[:, 1:].shape, cache_dtype), inputs)[1]


@functools.lru_cache(maxsize=1)
def float32_tokens():
    """The most likely token at each position of the validation windows, with float32 weights and cache."""
    return decode_windows(*load_model_for_decoding('float32', ''), 'float32')[1]


def measure_quality(config, params, cache_dtype):
    """On the validation windows: the perplexity, and the share of positions whose most likely token is that of float32
    weights and cache."""
    if not dataset:
        return {}
    loss, tokens = decode_windows(config, params, cache_dtype)
    return {'perplexity': float(np.exp(loss.mean())), 'agreement': float((tokens == float32_tokens()).mean())}


def ablate_decode(baseline):
    """Times decoding with one choice changed at a time, and prints the table. Returns {change: results}."""
    few = min(repeats, 3)
    choices = [('dtype', 'float32'), ('dtype', 'bfloat16'), ('quantize', 'int8'), ('cache_dtype', 'bfloat16'),
               ('cache_dtype', 'int8'), ('cache_dtype', 'float8'), ('n_draft', 4), ('batch_size', 1), ('batch_size', 8)]
    table = {'baseline': baseline}
    for name, value in choices:
        if value != decode_settings[name]:
            table[f'{name}={value}'] = bench_decode(decode_settings | {name: value}, few)
    table['quantize=int8, n_draft=4'] = bench_decode(decode_settings | {'quantize': 'int8', 'n_draft': 4}, few)
    columns = ['tokens_per_sec', 'ms_per_iter', 'gb_per_sec', 'share_of_bandwidth', 'weights_mb', 'cache_mb',
               'accepted', 'perplexity', 'agreement']
    print(f'{"":>26}' + ''.join(f'{column:>19}' for column in columns))
    for name, results in table.items():
        cells = ['' if results.get(column) is None else f'{results[column]:,.4g}' for column in columns]
        print(f'{name:>26}' + ''.join(f'{cell:>19}' for cell in cells))
    return table


# -----------------------------------------------------------------------------
# compiled programs: what one needs and sends, read from the text of its HLO; nothing here depends on the flags

# Data sheets, per device: usable memory in bytes; bytes/s to memory, to devices of the host (NVLink, or all links of a
# TPU) and to other hosts
DATA_SHEETS = {'h100': (84.9e9, 3350e9, 450e9, 50e9), 'v5e': (15.75 * 2**30, 819e9, 200e9, 200e9)}
# Target of XLA's CUDA compiler
H100 = '''gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
    shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
    l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
    cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"'''
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
DTYPE_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2, 'f32': 4, 's32': 4, 'u32': 4,
               's64': 8, 'u64': 8, 'f64': 8}


def topology_devices(topology):
    """Devices to compile for: 'v5e:4x4' (a slice of TPUs), 'h100:2x8' (hosts x GPUs) or 'cpu:1x8' (the CPU devices of
    this process). Raises UserError if the compiler is not installed."""
    kind, _, shape = topology.partition(':')
    if kind not in ('v5e', 'h100', 'cpu') or not all(size.isdigit() for size in shape.split('x')):
        raise UserError(f'topology must be like v5e:4x4 (a TPU slice) or h100:2x8 (hosts x GPUs), not {topology!r}')
    if kind == 'cpu':
        return tuple(jax.devices('cpu')[:math.prod(map(int, shape.split('x')))])
    from jax.experimental import topologies
    package, extra = {'v5e': ('libtpu', 'tpu'), 'h100': ('jax_cuda12_plugin', 'cuda12')}[kind]
    if importlib.util.find_spec(package) is None:
        raise UserError(f'compiling for {kind} needs its compiler: pip install "jax[{extra}]=={jax.__version__}"')
    if kind == 'v5e':
        os.environ.update(TPU_SKIP_MDS_QUERY='1', TPU_WORKER_HOSTNAMES='localhost', ALLOW_MULTIPLE_LIBTPU_LOAD='1',
                          TPU_ACCELERATOR_TYPE='v5litepod-16')
        options = dict(platform='tpu', topology_name=topology)
    else:
        nvidia = Path(importlib.util.find_spec('nvidia').submodule_search_locations[0])
        os.environ.update(CUDA_VISIBLE_DEVICES='-1', JAX_SKIP_CUDA_CONSTRAINTS_CHECK='1')
        os.environ['PATH'] = f'{nvidia}/cuda_nvcc/bin:{os.environ["PATH"]}'
        os.environ['XLA_FLAGS'] = (f'--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={nvidia}/cuda_nvcc '
                                   + os.environ.get('XLA_FLAGS', ''))
        for library in nvidia.glob('nvjitlink/lib/libnvJitLink.so*'):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        name_gpus_cuda()
        options = dict(platform='cuda', topology_name='', target_config=H100, topology=f'1x{shape}')
    try:
        return tuple(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # of many types
        raise UserError(f'{topology}: {" ".join(str(error).split())[:200]}') from error


def name_gpus_cuda():
    """Makes JAX take 'gpu' for 'cuda' without a GPU, where that name means nothing to it (jax-ml/jax#23971)."""
    from jax._src import xla_bridge
    canonical = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: 'cuda' if name == 'gpu' else canonical(name)


def bytes_of(shapes):
    """Bytes of all arrays in a piece of HLO text, as in '(f32[8,2], bf16[])'."""
    arrays = re.findall(r'(\w+)\[([\d,]*)\]', shapes)
    return sum(DTYPE_BYTES.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(',')))) for dtype, dims in arrays)


def parse_hlo(text):
    """{computation: [(name, shapes of the result, operation, rest of the line)]}; 'ENTRY' is the main one."""
    computations = {}
    for line in text.splitlines():
        if header := re.match(r'(ENTRY )?%?([\w.\-]+) .*\{$', line):
            instructions = computations[header[2]] = []
            if header[1]:
                computations['ENTRY'] = instructions
        elif found := re.match(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)', line):
            instructions.append(found.groups())
    return computations


def trip_count(computations, rest):
    """How often a loop is executed, from its attributes or its condition."""
    if known := re.search(r'known_trip_count\D*(\d+)', rest):
        return int(known[1])
    condition = computations[re.search(r'condition=%?([\w.\-]+)', rest)[1]]
    limits = [int(found[0]) for *_, operation, rest in condition
              if operation == 'constant' and (found := re.match(r'\d+', rest))]
    if not limits:  # the data decide: the blocks of experts, or the rounds of exchange_tokens after the first
        body = executed(computations, re.search(r'body=%?([\w.\-]+)', rest)[1])
        return 0 if any(computations[name][i][2].startswith(COLLECTIVES) for name, i, _ in body) else 1
    limit = max(limits)
    return -(-limit // 2) if 'windowed_dot_general' in rest else limit  # these do two steps at a time


def executed(computations, name='ENTRY', times=1):
    """[(computation, index in it, times executed)] of the instructions of a program, through its loops and calls."""
    found = []
    for i, (_, _, operation, rest) in enumerate(computations[name]):
        found.append((name, i, times))
        if operation in ('while', 'call', 'async-start'):
            called = re.search(r'(?:body|to_apply|calls)=%?([\w.\-]+)', rest)[1]
            n = trip_count(computations, rest) if operation == 'while' else 1
            found += executed(computations, called, times * n)
    return found


def replica_group(rest, n_devices):
    """The numbers of the devices of the first group of a collective, from its attributes."""
    def iota(dims, permutation):
        ids = np.arange(n_devices).reshape([int(n) for n in dims.split(',')])
        return ids.transpose([int(n) for n in permutation.split(',')]) if permutation else ids

    if mesh := re.search(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", rest):
        sizes, dims, permutation, axes = mesh.groups()
        # a part of an axis is written 'axis':(number of parts before it)size
        parts = {axis: (int(first), int(size)) for axis, first, size in re.findall(r"'(\w+)':\((\d+)\)(\d+)", axes)}
        shape = []
        inner = []
        for axis, size in re.findall(r"'(\w+)'=(\d+)", sizes):
            first, part = parts.get(axis, (1, int(size)))
            if f"'{axis}'" in axes:
                inner.append(len(shape) + 1)
            shape += [first, part, int(size) // (first * part)]
        ids = (iota(dims, permutation) if dims else np.arange(n_devices)).reshape(shape)
        ids = np.moveaxis(ids, inner, range(-len(inner), 0))
        return ids.reshape(-1, math.prod(shape[i] for i in inner))[0]
    if groups := re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest):
        return iota(groups[3], groups[4]).reshape(int(groups[1]), int(groups[2]))[0]
    listed = re.search(r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}', rest)
    return np.array(listed[1].split(','), int) if listed else np.arange(n_devices)


def group_of(rest, mesh):
    """(axis names, devices of one group) of a collective."""
    group = replica_group(rest, mesh.devices.size)
    places = np.unravel_index(group, mesh.devices.shape)
    axes = [axis for axis, place in zip(mesh.axis_names, places) if len(set(place)) > 1]
    return '+'.join(axes) or '-', mesh.devices.ravel()[group]


def collectives_in(computations):
    """[(kind, shapes of the result, attributes, times executed, exposed)] of the collectives of a compiled step.
    Exposed: XLA's schedule has no computation between the start and the end."""
    found = []
    fused = {}  # a TPU's asynchronous collective is fused with others: a start, computations beside it, an end
    computing = ('fusion', 'custom-call', 'dot', 'convolution', 'while', 'call')
    for name, i, times in executed(computations):
        result, shapes, operation, rest = computations[name][i]
        kind = operation.removesuffix('-start')
        if kind in COLLECTIVES:
            exposed = True
            if operation != kind:
                later = computations[name][i + 1:]
                uses = rf'%?{re.escape(result)}\b'
                end = next(j for j, (*_, operands) in enumerate(later) if re.match(uses, operands))
                exposed = not any(other in computing for _, _, other, _ in later[:end])
                if kind != 'all-reduce':  # (operands, results, ...)
                    arrays = [array for array in re.findall(r'\w+\[[\d,]*\]', shapes)
                              if kind != 'collective-permute' or not array.endswith('[]')]
                    shapes = ' '.join(arrays[len(arrays) // 2:])
            found.append((kind, shapes, rest, times, exposed))
        elif operation == 'fusion':
            called = re.search(r'calls=%?([\w.\-]+)', rest)[1]
            for _, shapes, kind, rest in computations[called]:
                if kind in COLLECTIVES:
                    kind = 'reduce-scatter' if 'all-reduce-scatter' in called else kind
                    channel = re.search(r'channel_id=(\d+)|$', rest)[1]
                    fused.setdefault(channel, []).append((kind, shapes, rest, times))
    for pieces in fused.values():
        found.append((*pieces[0], len(pieces) <= 2))
    return found


def collective_table(computations, mesh, n_steps=1):
    """[{kind, axis, n, dtype, count, bytes, exposed, hosts}]: what a device sends per step of a program of n_steps, in
    rings, by kind, axes and dtype; how many bytes of it are exposed; whether a group spans hosts."""
    table = {}
    for kind, shapes, rest, times, exposed in collectives_in(computations):
        axis, group = group_of(rest, mesh)
        n = len(group)
        times /= n_steps
        size = bytes_of(shapes)
        if kind == 'reduce-scatter' and 'dimensions=' in rest:  # not in the all-reduce that a TPU's fusion wraps
            size *= n
        sent = times * size * {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1}.get(kind, (n - 1) / n)
        dtypes = '+'.join(sorted(set(re.findall(r'(\w+)\[', shapes))))
        row = table.setdefault((kind, axis, dtypes), dict(
            kind=kind, axis=axis, n=n, dtype=dtypes, count=0, bytes=0, exposed=0,
            hosts=len({device.process_index for device in group}) > 1))
        row['count'] += times * len(re.findall(r'\w+\[', shapes))
        row['bytes'] += sent
        row['exposed'] += sent * exposed
    return sorted(table.values(), key=lambda row: -row['bytes'])


def memory_traffic(computations):
    """Bytes that the operations of a step read and write, each operand and result once, as if there were no cache."""
    free = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call', 'after-all', 'copy-done')
    total = 0
    sizes = {}
    for name, i, times in executed(computations):
        if name not in sizes:
            sizes[name] = {result: bytes_of(shapes) for result, shapes, _, _ in computations[name]}
        result, _, operation, rest = computations[name][i]
        if operation not in free and not operation.endswith('-done'):
            operands = re.findall(r'%([\w.\-]+)', rest.split(')')[0])
            total += times * (sizes[name][result] + sum(sizes[name].get(operand, 0) for operand in operands))
    return total


def shard_bytes(tree):
    """Bytes of one device's shards of a tree of ShapeDtypeStructs."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
               if hasattr(x, 'shape') and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def peak_of(program):
    memory = program.memory_analysis()
    unaliased = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return max(memory.peak_memory_in_bytes, unaliased + memory.temp_size_in_bytes)


def data_sheet(topology):
    """The row of DATA_SHEETS of a topology; no limit and no speeds for CPUs."""
    return DATA_SHEETS.get(topology.partition(':')[0], (math.inf, None, None, None))


def link_seconds(table, topology):
    """Seconds that the links take for what a device sends, given its collective_table."""
    _, _, link_speed, host_speed = data_sheet(topology)
    return sum(row['bytes'] / (host_speed if row['hosts'] else link_speed) for row in table)


def print_peak(peak, limit):
    """Prints the peak memory beside the device's, and returns whether it fits."""
    print(f'peak {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB: {"fits" if peak <= limit else "does not fit"}')
    return peak <= limit


def print_collectives(table):
    print(f'{"collective":>20} {"axis":>14} {"devices":>8} {"dtype":>10} {"arrays":>7} {"MB sent":>10} {"exposed":>10}')
    for row in table:
        print(f'{row["kind"]:>20} {row["axis"]:>14} {row["n"]:>8} {row["dtype"]:>10} {row["count"]:>7.4g} '
              f'{row["bytes"] / 1e6:>10,.2f} {row["exposed"] / 1e6:>10,.2f}')
    if any(row['kind'] == 'all-to-all' and row['axis'] == 'expert' for row in table):
        print('tokens are sent to experts in one round, as when routing is balanced; others send more')


# -----------------------------------------------------------------------------
# steps compiled for devices that are not here: what they need, what they send, never a measurement


def compile_train_step(devices, fsdp=fsdp, loss_chunk=loss_chunk, **changes):
    """(parallel, config, abstract state, the compiled step) of the training step that train_jax.py runs."""
    parallel = setup_distributed_training(devices, fsdp, tensor, expert, context, zero)
    config = dataclasses.replace(model_config, **{'scan_layers': scan_layers, 'remat': remat} | changes)
    implementation, reason = choose_attention(attention, config, devices[0], tensor=tensor, context=context)
    config = dataclasses.replace(config, attention=implementation)
    parallel.validate(config)
    schedule = create_learning_rate_schedule(6e-4, warmup_iters=2000, lr_decay_iters=600000)
    tx = create_optimizer_with_schedule(schedule, optimizer=optimizer)
    state = parallel.abstract_state(create_train_state, jax.random.key(seed), config, tx)
    n_micro, b = split_batch(gradient_accumulation_steps, batch_size, parallel.n_data_shards)
    shape, spec = (n_micro, b * parallel.n_data_shards), (None, BATCH, 'context')
    if not hasattr(parallel, 'fsdp'):  # replicas
        shape, spec = ((len(devices), n_micro, b), ('data',)) if len(devices) > 1 else ((n_micro, b), ())
    place = lambda shape, dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(parallel.mesh, P(*spec[:len(shape)])))
    tokens = place((*shape, block_size), np.int32)
    batch = {'x': tokens, 'y': tokens, 'seq_id': place(shape, np.uint32)}
    step = parallel.train_step(make_train_step(config, seed, 1.0, schedule, loss_chunk, zero))
    program = step.lower(state, batch).compile()
    return parallel, f'{implementation} ({reason})', state, program


def peak_with(devices, **changes):
    """The peak memory of the step with these changes, in bytes; the compiler's message if it does not fit, or cannot
    be compiled."""
    try:
        return peak_of(compile_train_step(devices, **changes)[3])
    except Exception as error:
        message = ' '.join(str(error).split())
        return re.sub(r'.*?(Used [\d.]+\w+ of [\d.]+\w+).*', r'\1', message)[:120]


def what_would_fit(devices, limit):
    """Prints which of a few changes makes the step fit into `limit` bytes; stops at the first that does."""
    chunk = max(1, block_size // 8)
    tries = [dict(loss_chunk=chunk), dict(remat='full', scan_layers=True), dict(
        remat='full', scan_layers=True, loss_chunk=chunk)]
    if fsdp == tensor == expert == context == 1 and len(devices) > 1:
        tries.append(dict(fsdp=len(devices), remat='full', scan_layers=True, loss_chunk=chunk))
    for changes in tries:
        named = ' '.join(f'--{name}={value}' for name, value in changes.items())
        peak = peak_with(devices, **changes)
        fits = not isinstance(peak, str) and peak <= limit
        amount = peak if isinstance(peak, str) else f'peak {peak / 1e9:.2f} GB'
        print(f'with {named}: {amount}, {"fits" if fits else "does not fit"}')
        if fits:
            return named
    return None


def compile_decode(devices):
    """(mesh, abstract parameters, abstract KV cache, the compiled loop) of max_new_tokens tokens for each of batch_size
    sequences, on tensor x expert of the devices, as sample_jax.py decodes."""
    parallel = setup_distributed_training(devices[:tensor * expert], tensor=tensor, expert=expert)
    parallel.validate(model_config)
    on_mesh = getattr(parallel, 'on_mesh', lambda step: step)

    def placed(shapes, spec):
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(parallel.mesh, spec))
        return jax.tree.map(place, shapes)

    tx = create_optimizer_with_schedule(lambda step: 0)
    params = parallel.abstract_state(create_train_state, jax.random.key(seed), model_config, tx).params

    @jax.jit
    def convert(params):
        params = cast_matrices(quantize_params(params) if quantize else params, dtype)
        return order_columns_by_rank(params, model_config)

    with parallel.mesh_context():
        shardings = convert.lower(params).compile().output_shardings
        params = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                              jax.eval_shape(convert, params), shardings)
    n_slots = choose_slots(prompt_len + max_new_tokens, prompt_len + max_new_tokens, block_size)
    make_cache = functools.partial(init_cache, model_config, batch_size, n_slots, cache_dtype)
    cache = placed(jax.eval_shape(make_cache), P(None, 'tensor') if tensor > 1 and not model_config.mla else P())

    def make_state():
        return DecodeState(
            tokens_BxN=np.zeros((batch_size, n_slots), np.int32), length_B=np.zeros(batch_size, np.int32),
            n_generated_B=np.zeros(batch_size, np.int32), done_B=np.zeros(batch_size, bool),
            key_B=jax.random.split(jax.random.key(seed), batch_size))

    state = placed(jax.eval_shape(make_state), P()).replace(caches=(cache,))

    def decode(params, state):
        step = lambda _, state: step_cached(params, state, ~state.done_B, model_config, Sampling(vocab_size))
        return jax.lax.fori_loop(0, max_new_tokens, step, state)

    return parallel.mesh, params, cache, jax.jit(on_mesh(decode), donate_argnums=1).lower(params, state).compile()


def bench_compile_decode():
    """bench_compile of decoding: bytes and times are those of a step, the mean of max_new_tokens."""
    limit, memory_speed, *_ = data_sheet(topology)
    start = time.perf_counter()
    mesh, params, cache, program = compile_decode(plan_devices)
    table = collective_table(parse_hlo(program.as_text()), mesh, max_new_tokens)
    peak = peak_of(program)
    read = shard_bytes(params_read_per_step(params)) + shard_bytes(cache)
    results = {
        'parameters_gb': shard_bytes(params) / 1e9, 'cache_gb': shard_bytes(cache) / 1e9,
        'temporary_gb': program.memory_analysis().temp_size_in_bytes / 1e9, 'peak_gb': peak / 1e9,
        'sent_mb': sum(row['bytes'] for row in table) / 1e6, 'read_gb': read / 1e9,
        'compile_s': time.perf_counter() - start}
    print_collectives(table)
    if memory_speed:
        links = link_seconds(table, topology)
        results |= {'memory_bound_ms': read / memory_speed * 1e3, 'link_bound_ms': links * 1e3,
                    'tokens_per_sec_at_most': batch_size / max(read / memory_speed, links),
                    'fits': print_peak(peak, limit)}
    return results, table


def bench_compile():
    """Compiles the training step for the devices of --topology and prints its plan: ({name: value}, collectives)."""
    limit, memory_speed, *_ = data_sheet(topology)
    start = time.perf_counter()
    parallel, chosen, state, program = compile_train_step(plan_devices)
    computations = parse_hlo(program.as_text())
    table = collective_table(computations, parallel.mesh)
    memory = program.memory_analysis()
    peak = peak_of(program)
    tokens = gradient_accumulation_steps * batch_size * block_size / len(plan_devices)
    results = {
        'n_params': count_params(state.params, non_embedding=False), 'parameters_gb': shard_bytes(state.params) / 1e9,
        'optimizer_gb': shard_bytes(state.opt_state) / 1e9, 'temporary_gb': memory.temp_size_in_bytes / 1e9,
        'peak_gb': peak / 1e9, 'sent_gb': sum(row['bytes'] for row in table) / 1e9,
        'exposed_gb': sum(row['exposed'] for row in table) / 1e9,
        'memory_traffic_gb': memory_traffic(computations) / 1e9, 'compile_s': time.perf_counter() - start}
    print(f'attention: {chosen}')
    print_collectives(table)
    if memory_speed:
        peak_flops = device_peak_flops(plan_devices[0])
        compute = estimate_mfu(count_params(state.params), model_config, tokens, peak_flops)
        links = link_seconds(table, topology)
        traffic = results['memory_traffic_gb'] * 1e9 / memory_speed
        results |= {'compute_bound_ms': compute * 1e3, 'memory_bound_ms': traffic * 1e3, 'link_bound_ms': links * 1e3,
                    'best_bound_ms': max(compute, links) * 1e3,
                    'worst_bound_ms': (max(compute, traffic) + links) * 1e3}
        results['fits'] = print_peak(peak, limit)
        if not results['fits']:
            results['would_fit'] = what_would_fit(plan_devices, limit)
    return results, table


# -----------------------------------------------------------------------------
# run and report


def peak_memory_gb():
    """Of the first device; on a CPU, of the process."""
    stats = devices[0].memory_stats()
    if stats:
        return stats['peak_bytes_in_use'] / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == 'darwin' else 1e6)


def rounded(results):
    """The results with numbers of 6 digits."""
    return {name: float(f'{value:.6g}') if type(value) is not bool and isinstance(value, (int, float)) else value
            for name, value in results.items()}


def formatted(value):
    if value is None:
        return 'n/a'
    if isinstance(value, (bool, str)):
        return str(value)
    return f'{value:,.4g}' if value < 1e4 else f'{value:,.0f}'


if mode == 'train':
    results = bench_train()
elif mode == 'compile':
    plan_devices = topology_devices(topology)
    try:
        results, table = bench_compile_decode() if plan == 'decode' else bench_compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        used = re.search(r'Used [\d.]+\w+ of [\d.]+\w+', str(error))
        print(f'does not fit: {used[0] if used else " ".join(str(error).split())[:200]}')
        results, table = {'fits': False}, []
        if plan == 'train':
            results['would_fit'] = what_would_fit(plan_devices, data_sheet(topology)[0])
else:
    limit = load_model()[0].block_size
    if prompt_len + max_new_tokens > limit:
        raise UserError(f'prompt_len + max_new_tokens must be at most block_size={limit}')
    results = bench_decode(decode_settings) | {'peak_memory_gb': peak_memory_gb()}
hardware = f'{len(devices)} x {devices[0].device_kind}'
if mode == 'compile':
    n_planned = tensor * expert if plan == 'decode' else len(plan_devices)
    hardware = f'{n_planned} x {plan_devices[0].device_kind}, compiled, not run'
print(f'{mode}, {hardware}, {dtype} ({reason}), jax {jax.__version__}')
for name, value in results.items():
    print(f'{name:>30}  {formatted(value)}')

environment = {'device': devices[0].device_kind, 'n_devices': len(devices), 'machine': platform.machine(),
               'python': platform.python_version(), 'jax': jax.__version__, 'jaxlib': jaxlib.__version__}
document = {'program': 'bench_jax', 'settings': flags, 'environment': environment, 'results': rounded(results)}
if mode == 'compile':
    document['results']['collectives'] = table
elif ablate:
    table = ablate_train(results) if mode == 'train' else ablate_decode(results)
    document['ablation'] = {name: rounded(row) for name, row in table.items()}
print(json.dumps(document))
