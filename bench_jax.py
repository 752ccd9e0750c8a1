"""Times training or decoding with random weights and random tokens. Or only compiles a step for
other devices, and reports the step's memory and communication. Prints a table, then one JSON line.

$ python bench_jax.py --mode=train --preset=nanogpt_cpu --repeats=100
$ python bench_jax.py --mode=train --preset=gpt2 --batch_size=1 --dtype=bfloat16
$ python bench_jax.py --mode=decode --prompt_len=16 --max_new_tokens=128
$ python bench_jax.py --mode=decode --out_dir=out-char --dataset=shakespeare_char --n_draft=4
$ python bench_jax.py config/train_gpt2.py --mode=compile --topology=h100:1x8 --fsdp=8
$ python bench_jax.py --mode=compile --plan=decode --topology=v5e:2x4 --tensor=4 --quantize=int8"""
import functools
import json
import re
import sys
import types
from pathlib import Path

from jax_flags import (
    UserError, check_choice, check_needs, check_ranges, config_block, is_on_command_line,
    read_flags, start_script)

# -----------------------------------------------------------------------------
mode = 'train' # 'train', 'decode' or 'compile' (a step for other devices)
preset = '' # a model and batch size: 'nanogpt_cpu', 'baby' (nanoGPT's two for Shakespeare) or 'gpt2'; flags override it
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
n_expert = 0 # MLPs per layer; a token uses n_expert_used of them (mixture of experts); 0 is one MLP for all
n_expert_used = 2 # experts per token
expert_balance = 0.01 # weight of the loss that keeps the experts equally busy (train)
prompt_len = 16 # tokens of each prompt (decode)
max_new_tokens = 128 # tokens generated per sequence (decode)
temperature = 0.0 # of these tokens; 0 is greedy (decode)
top_k = 200 # sample from the top_k most likely tokens only; 0 is all (decode, with a temperature)
optimizer = 'adamw' # or 'muon' (train)
attention = 'auto' # as in train_jax.py, like the next three (train)
loss_chunk = 0 # materialize the logits of this many positions at a time; 0 is all
scan_layers = False # compile one block and loop over it
remat = 'none' # gradient checkpointing: 'dots', 'full'
quantize = '' # 'int8' weights, as in sample_jax.py, like the next two (decode)
cache_dtype = 'auto' # dtype of the KV cache
n_draft = 0 # draft tokens per step
out_dir = '' # a run, a Hugging Face folder or a ckpt.pt: its weights instead of random ones (decode; not in configs)
dataset = '' # as in train_jax.py: prompts from its val.bin instead of random ones (decode; not in configs)
plan = 'train' # the step to compile: 'train' or 'decode' (compile)
topology = 'h100:1x8' # devices to compile for: hosts x GPUs, or a TPU slice as in 'v5e:4x4' (compile)
fsdp = 1 # as in train_jax.py, like the next four (train, compile)
zero = 0 # optimizer state (1), gradients (2) sharded over all replicas
tensor = 1 # heads, MLP width and vocabulary over this many devices
expert = 1 # experts over this many devices
context = 1 # each sequence over this many devices
repeats = 20 # timed iterations (train) or calls (decode), after compilation
seed = 1337 # seeds weights and tokens
device = 'auto' # as in train_jax.py
dtype = 'auto' # 'float32', 'bfloat16', 'float16'
# -----------------------------------------------------------------------------
start_script()

# {preset: the flags that it sets}
PRESETS = {
    '': {},
    'nanogpt_cpu': {
        'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'block_size': 64, 'batch_size': 12,
        'vocab_size': 65},
    'baby': {
        'n_layer': 6, 'n_head': 6, 'n_embd': 384, 'block_size': 256, 'batch_size': 64,
        'vocab_size': 65, 'dropout': 0.2},
    'gpt2': {
        'n_layer': 12, 'n_head': 12, 'n_embd': 768, 'block_size': 1024, 'batch_size': 12,
        'vocab_size': 50304},
}


def check_typed_flags():
    """Raises UserError for a flag on the command line that has no effect with the given --mode and
    --plan. Flags in config files are not checked, because these files are made for training."""
    typed = [arg[2:].partition('=')[0] for arg in sys.argv[1:] if arg.startswith('--')]
    facts = dict(flags)
    facts['step'] = f'compile {plan}' if mode == 'compile' else mode
    typed_here = {name: flags[name] for name in typed if name in flags}
    check_needs('bench_jax', facts, typed_here)

    # compile and backend are flags of nanoGPT, which have no effect in train_jax.py either.
    for name in typed:
        if name not in flags and name not in ('compile', 'backend'):
            raise UserError(f'bench_jax.py does not read {name}, a flag of train_jax.py: leave it '
                            'out')


# Config files of train_jax.py can be used unchanged: flags that only train_jax.py has are ignored.
train_flags = config_block(Path(__file__).with_name('train_jax.py'))
flags, given = read_flags(__file__, globals(), ignored=train_flags)
check_choice('preset', flags['preset'], PRESETS)
check_choice('mode', flags['mode'], ('train', 'decode', 'compile'))
check_choice('plan', flags['plan'], ('train', 'decode'))
check_choice('quantize', flags['quantize'], ('', 'int8'))

# The user's flags override a preset.
flags.update(PRESETS[flags['preset']])
flags.update(given)
# In a config file of train_jax.py, out_dir and dataset are those of the training, not weights and
# prompts for decoding.
for name in ('out_dir', 'dataset'):
    if not is_on_command_line(name):
        flags[name] = ''
globals().update(flags)
check_ranges(flags)
check_typed_flags()
if mode == 'decode' and max_new_tokens < 2:
    raise UserError(f'max_new_tokens must be at least 2, not {max_new_tokens}')
if mode == 'compile':
    device = 'cpu'  # this process needs no other device
    if dtype == 'auto' and not topology.startswith('cpu'):
        dtype = 'bfloat16'

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_devices.choose import config_for_decoding
from jax_devices.layout import setup_distributed_training
from jax_devices.setup import (
    Stopwatch, describe_environment, device_peak_flops, is_synchronous, measure_bandwidth,
    setup_jax_environment, trim_malloc)
from jax_generate import generate_stream
from jax_ops.decode_weights import convert_params_for_decoding
from jax_pretrained import param_shapes
from jax_run.data import dataset_folder, load_dataset
from jax_run.model import config_from_flags, flags_from_config
from jax_run.program import Options, assemble
from jax_run.sources import open_source
from jax_text import load
from jax_train_utils import create_learning_rate_schedule, create_train_state, split_batch
from jax_transformer import INIT_STD, count_params, estimate_mfu
from tools.plan import plan_step
from jax_run.speed import bytes_read_per_step, cache_bytes_read, expected_experts, tokens_per_step
from tools.topologies import topology_devices

devices, dtype, reason = setup_jax_environment(device, dtype)
if mode == 'compile' and 'dtype' not in given:
    reason = 'the default there'
flags['dtype'] = dtype
model_config = config_from_flags(flags, vocab_size=vocab_size, dtype=dtype)
clock = Stopwatch()

# -----------------------------------------------------------------------------
# training


def bench_train():
    """Times training steps on a batch that is already on the devices, and returns {name: value}."""
    # The model, the optimizer and the state, as in train_jax.py.
    layout = setup_distributed_training(devices, fsdp, tensor, expert, context, zero)
    program = assemble(model_config, layout, Options.from_flags(flags))
    config = program.config
    schedule = create_learning_rate_schedule(6e-4, decay_lr=False)
    state = layout.init_sharded(create_train_state, jax.random.key(seed), config, program.tx)
    state = state.replace(schedule=layout.device_put(schedule))
    n_params = count_params(state.params)

    # A batch of random tokens.
    n_rows = gradient_accumulation_steps * batch_size
    random = np.random.default_rng(seed)
    tokens = random.integers(vocab_size, size=(n_rows, block_size + 1)).astype(np.int32)
    seq_id = np.arange(n_rows, dtype=np.uint32)
    batch = {'x': tokens[:, :-1], 'y': tokens[:, 1:], 'seq_id': seq_id}
    shape = split_batch(gradient_accumulation_steps, batch_size, layout.n_data_shards)
    batch = layout.shard_batch(batch, shape)

    # The step.
    clock.lap()
    step = program.step.lower(state, batch).compile()
    compile_s = sum(clock.lap())

    # Time it. As in train_jax.py, accelerators keep one step in flight: the loop waits for the
    # metrics of the step before.
    seconds = []
    running = None
    for _ in range(repeats + 3):  # the first three warm up
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics if is_synchronous(devices[0]) else running)
        running = metrics
        seconds.append(clock.lap().running)
    seconds = seconds[3:]
    median = np.median(seconds)

    # The share of the devices' peak FLOP/s, if the peak is known.
    tokens_per_sec = n_rows * block_size / median
    peak = device_peak_flops(devices[0])
    mfu = None
    if peak:
        mfu = estimate_mfu(n_params, config, tokens_per_sec, peak * len(devices))
    return {
        'ms_per_iter': median * 1e3,
        'ms_per_iter_min': min(seconds) * 1e3,
        'tokens_per_sec': tokens_per_sec,
        'mfu': mfu,
        'compile_s': compile_s,
        'n_params': n_params,
        # temporaries of a step by the compiler's plan, without parameters, optimizer state, batch
        'temporary_gb': step.memory_analysis().temp_size_in_bytes / 1e9,
        'peak_memory_gb': peak_memory_gb(),
    }


# -----------------------------------------------------------------------------
# decoding

def bench_decode():
    """Times calls of generate_stream, each a prefill and then the decode steps, and returns {name:
    value}."""
    config, params = load_model()
    if prompt_len + max_new_tokens > config.block_size:
        raise UserError('prompt_len + max_new_tokens must be at most '
                        f'block_size={config.block_size}')
    prompts = make_prompts(config.vocab_size)

    # Time it. The bandwidth is measured after each call, because it varies on a shared machine.
    calls = []  # [lap of the prefill, lap of decoding] of each call
    bandwidths = []  # GB/s
    for _ in range(repeats + 1):
        clock.lap()
        laps = []
        for result in generate_stream(
                params, config, prompts, max_new_tokens, rng=jax.random.key(seed),
                temperature=temperature, top_k=top_k, n_draft=n_draft, cache_dtype=cache_dtype):
            laps.append(clock.lap())
        calls.append(laps)
        # give back the memory of the compiler: the measurement must fit beside the weights
        trim_malloc()
        bandwidths.append(measure_bandwidth(devices[0], 2**28))

    # The first call compiles.
    compile_s = sum(lap.compiling for lap in calls[0])
    calls = calls[1:]
    bandwidths = bandwidths[1:]
    seconds = [[prefill.running, decoding.running] for prefill, decoding in calls]
    prefill_s, decode_s = np.median(seconds, axis=0)

    # A step reads the weights and the cache. The share of the bandwidth that this takes, by call.
    n_tokens = tokens_per_step(result)
    weight_bytes = bytes_read_per_step(params, config, n_tokens)
    step_bytes = weight_bytes + cache_bytes_read(result, config, cache_dtype, devices[0])
    gb_read = step_bytes / 1e9 * result.steps
    shares = []
    for (_, decoding), bandwidth in zip(calls, bandwidths):
        # the bandwidth is at least what decoding has read per second, so a share is at most 1
        shares.append(min(1.0, gb_read / decoding.running / bandwidth))
    accepted = None
    if result.drafted:
        accepted = result.accepted / result.drafted
    experts_per_layer = None
    if config.moe:
        experts_per_layer = expected_experts(config.moe, n_tokens)
    return {
        'ms_per_iter': decode_s * 1e3 / result.steps,
        'tokens_per_sec': batch_size * max_new_tokens / (prefill_s + decode_s),
        'tokens_per_sec_decode': batch_size * (max_new_tokens - 1) / decode_s,
        'prefill_ms': prefill_s * 1e3,
        'compile_s': compile_s,
        'weights_mb': weight_bytes / 1e6,
        # distinct experts of a layer that a step reads: weights_mb counts these
        'expected_experts': experts_per_layer,
        'cache_mb': result.cache_bytes / 1e6,
        'gb_per_sec': gb_read / decode_s,
        'measured_bandwidth_gb_per_sec': np.median(bandwidths),
        'share_of_bandwidth': np.median(shares),
        'accepted': accepted,
    }


def load_model():
    """Returns (config, parameters for decoding) of the model in out_dir, or else of a new random
    model."""
    if out_dir:
        of_chars = dataset if 'dataset' in given and out_dir.endswith('.pt') else ''
        model = load(out_dir, dataset=of_chars, device=device, dtype=dtype, quantize=quantize)
        flags.update(flags_from_config(model.config, given), vocab_size=model.config.vocab_size)
        return model.config, model.params
    config = config_for_decoding(model_config, setup_distributed_training(devices[:1]), dtype)
    return config, random_params(model_config)


def random_params(config):
    """Returns random parameters in the form for decoding, drawn from the same distributions as the
    initial parameters of a new model.

    Each parameter is made on its device and converted before the next parameter is made, so that
    memory holds only one parameter in float32."""
    params = {}
    with jax.default_device(devices[0]):
        for i, (path, shape) in enumerate(param_shapes(config).items()):
            rng = jax.random.fold_in(jax.random.key(seed), i)
            part = unflatten_dict({path: random_param(rng, path, shape)})
            params.update(flatten_dict(convert_params_for_decoding(part, dtype, quantize)))
            # parameters of different sizes leave holes in the heap, which add up to gigabytes
            trim_malloc()
    return unflatten_dict(params)


def random_param(rng, path, shape):
    """Returns a float32 parameter of a new model: a random normal matrix, with smaller values at
    the end of a residual branch; a gain of 1; or a bias of 0."""
    if path[-1] == 'scale':
        return jnp.ones(shape)
    if path[-1] not in ('kernel', 'wte', 'wpe', 'lm_head'):
        return jnp.zeros(shape)
    std = INIT_STD
    if path[-2:-1] in (('c_proj',), ('experts_c_proj',)):
        std /= (2 * model_config.n_layer)**0.5
    return scaled_normal(rng, std, shape)


@functools.partial(jax.jit, static_argnames='shape')
def scaled_normal(rng, std, shape):
    """Returns std times an array of normal random numbers. The function is compiled, because the
    product then needs no second array in memory."""
    return std * jax.random.normal(rng, shape)


def make_prompts(vocab_size):
    """Returns prompts, int [batch_size, prompt_len]: random tokens; or, with --dataset, parts of
    its val.bin at even distances."""
    if not dataset:
        random = np.random.default_rng(seed)
        return random.integers(vocab_size, size=(batch_size, prompt_len))
    datasets = load_dataset(dataset_folder(dataset), prompt_len)
    tokens = datasets['val']
    starts = np.linspace(0, len(tokens) - prompt_len - 1, batch_size).astype(int)
    return open_source(tokens, block_size=prompt_len, seed=seed).read(starts)['x']


# -----------------------------------------------------------------------------
# steps compiled for other devices: their needs by the compiler's plan, not a measurement


def bench_compile(plan_devices):
    """Compiles a step for plan_devices. Returns the figures of plan_step (tools/plan.py), such as
    the memory of the step. If the compiler says that the step needs too much memory, returns only
    {'fits': False, 'why': text}."""
    try:
        return plan_step(types.SimpleNamespace(**flags), model_config, plan_devices)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        message = ' '.join(str(error).split())
        used = re.search(r'Used [\d.]+\w+ of [\d.]+\w+', message)
        return {'fits': False, 'why': used[0] if used else message[:200]}


# -----------------------------------------------------------------------------
# run and report


def peak_memory_gb():
    """Returns the peak memory in GB. This is the peak of the first device if JAX reports it, else
    (as on a CPU) the peak resident memory of this process. Returns None if both are unknown."""
    stats = devices[0].memory_stats()
    if stats:
        return stats['peak_bytes_in_use'] / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == 'darwin':
        return size / 1e9  # bytes
    return size / 1e6  # kilobytes


def formatted(value):
    """Returns a value as a text for the table."""
    if value is None:
        return 'n/a'
    if isinstance(value, (bool, str)):
        return str(value)
    if value < 1e4:
        return f'{value:,.4g}'
    return f'{value:,.0f}'


if mode == 'train':
    results = bench_train()
elif mode == 'compile':
    plan_devices = topology_devices(topology)
    results = bench_compile(plan_devices)
else:
    results = bench_decode()
    results['peak_memory_gb'] = peak_memory_gb()

# The table.
hardware = f'{len(devices)} x {devices[0].device_kind}'
if mode == 'compile':
    n_planned = tensor * expert if plan == 'decode' else len(plan_devices)
    hardware = f'{n_planned} x {plan_devices[0].device_kind}, compiled, not run'
print(f'{mode}, {hardware}, {dtype} ({reason}), jax {jax.__version__}')
for name, value in results.items():
    print(f'{name:>30}  {formatted(value)}')

# The JSON line.
document = {
    'program': 'bench_jax',
    'settings': flags,
    'environment': describe_environment(devices),
    'results': results,
}
print(json.dumps(document))
