"""Times training or decoding with random weights and random tokens, or computes the communication of sharded training.
Prints a table, then one JSON line.

$ python bench_jax.py --mode=train --preset=nanogpt_cpu --repeats=100
$ python bench_jax.py --mode=train --preset=gpt2 --batch_size=1 --dtype=bfloat16 --ablate=True
$ python bench_jax.py --mode=decode --prompt_len=16 --max_new_tokens=128
$ python bench_jax.py --mode=decode --out_dir=out-shakespeare-char --dataset=shakespeare_char --ablate=True
$ python bench_jax.py --mode=scaling --n_devices=64 --accelerator=H100 --dtype=bfloat16
"""
import dataclasses
import functools
import json
import os
import platform
import sys
import time

import jax
import jaxlib
import numpy as np
import optax

import jax_ops
from jax_generate import bucket_length, bytes_read_per_step, convert_params_for_decoding, generate_stream, init_cache
from jax_ops import UserError
from jax_train_utils import (
    PEAK_FLOPS, Stopwatch, choose_attention, config_from_flags, create_learning_rate_schedule,
    create_optimizer_with_schedule, device_peak_flops, exit_on_user_error, get_windows, load_dataset, load_run,
    make_train_step, measure_bandwidth, read_flags, setup_distributed_training, setup_jax_environment, split_batch)
from jax_transformer import GPT, count_params, create_train_state, cross_entropy, estimate_mfu

# -----------------------------------------------------------------------------
mode = 'train' # 'train', 'decode' or 'scaling'
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
mlp = 'gelu' # 'gelu' or 'swiglu'
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
out_dir = '' # a run whose weights to use instead of random ones (decode)
dataset = '' # its folder under data/: takes prompts from val.bin, and measures perplexity and agreement there (decode)
n_devices = 8 # number of devices that train together (scaling)
accelerator = 'H100' # whose peak FLOP/s to assume, a name in PEAK_FLOPS of jax_train_utils.py (scaling)
repeats = 20 # timed iterations (train) or calls (decode), not counting those that compile
seed = 1337 # of weights and tokens
device = 'auto' # as in train_jax.py
dtype = 'auto' # 'float32', 'bfloat16', 'float16'
# -----------------------------------------------------------------------------
sys.excepthook = exit_on_user_error
PRESETS = {
    '': {},
    'nanogpt_cpu': dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, vocab_size=65),
    'baby': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, vocab_size=65, dropout=0.2),
    'gpt2': dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=12, vocab_size=50304),
}
flags, given = read_flags(__file__, globals())  # all knobs of the block above, and those that the user gave
preset = flags['preset']
if preset not in PRESETS:
    raise UserError(f"preset must be one of {', '.join(filter(None, PRESETS))}, not {preset!r}")
flags |= PRESETS[preset] | given
globals().update(flags)
if mode not in ('train', 'decode', 'scaling'):
    raise UserError(f'mode must be train, decode or scaling, not {mode!r}')
if accelerator not in PEAK_FLOPS:
    raise UserError(f'accelerator must be one of {", ".join(PEAK_FLOPS)}, not {accelerator!r}')
for name in ('batch_size', 'gradient_accumulation_steps', 'prompt_len', 'repeats', 'n_devices'):
    if flags[name] < 1:
        raise UserError(f'{name} must be at least 1, not {flags[name]}')
if mode == 'decode' and max_new_tokens < 2:
    raise UserError(f'max_new_tokens must be at least 2, not {max_new_tokens}')
devices, dtype, reason = setup_jax_environment(device, dtype)
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
    table = {'as it is': baseline}
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
        print(f'{heading(name):>24}  {r["ms_per_iter"]:9,.1f}  {r["ms_per_iter"] / baseline["ms_per_iter"]:5.2f}  '
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


def window_logits(config, params, cache_dtype):
    """Logits [16, T, V] of the validation windows, with the weights and the KV cache of decoding."""
    idx = validation_windows()[:, :-1]
    cache = init_cache(config, *idx.shape, cache_dtype)
    forward = jax.jit(functools.partial(GPT(config).apply, method='with_cache'))
    return forward({'params': params}, idx, cache)[0]


@functools.lru_cache(maxsize=1)
def float32_tokens():
    """The most likely token at each position of the validation windows, with float32 weights and cache."""
    return window_logits(*load_model_for_decoding('float32', ''), 'float32').argmax(-1)


def measure_quality(config, params, cache_dtype):
    """On the validation windows: the perplexity, and the share of positions whose most likely token is that of float32
    weights and cache."""
    if not dataset:
        return {}
    logits = window_logits(config, params, cache_dtype)
    return {'perplexity': float(np.exp(cross_entropy(logits, validation_windows()[:, 1:]).mean())),
            'agreement': float((logits.argmax(-1) == float32_tokens()).mean())}


def seconds_without_cache(n_tokens):
    """Seconds per token of batch 1 the way nanoGPT decodes: every token recomputes the full text in one jitted call.
    Texts are padded to powers of two, so that few lengths are compiled."""
    config, params = load_model_for_decoding(dtype, quantize)

    @jax.jit
    def next_token(params, idx, length):
        return GPT(config).apply({'params': params}, idx, logit_position_B=length - 1)[:, 0].argmax(-1)

    for _ in range(2):  # the first pass compiles
        text = make_prompts(1)[0].tolist()
        start = time.perf_counter()
        for _ in range(n_tokens):
            width = min(bucket_length(len(text)), config.block_size)
            idx = np.pad(text, (0, width - len(text)))[None]
            text.append(int(next_token(params, idx, np.array([len(text)]))[0]))
    return (time.perf_counter() - start) / n_tokens


def seconds_without_jit():
    """Seconds per step with every operation dispatched from Python: the mean of 2 steps."""
    with jax.disable_jit():
        config, params = load_model_for_decoding(dtype, quantize)
        prompts = make_prompts(batch_size)
        ends = [time.perf_counter() for _ in generate_stream(
            params, config, prompts, 3, rng=jax.random.key(seed), temperature=0)]
    return (ends[1] - ends[0]) / 2


def ablate_decode(baseline):
    """Times decoding with one choice changed at a time, and prints the table. Returns {change: results}."""
    few = min(repeats, 3)
    choices = [('dtype', 'float32'), ('dtype', 'bfloat16'), ('quantize', 'int8'), ('cache_dtype', 'bfloat16'),
               ('cache_dtype', 'int8'), ('cache_dtype', 'float8'), ('n_draft', 4), ('batch_size', 1), ('batch_size', 8)]
    table = {'as it is': baseline}
    for name, value in choices:
        if value != decode_settings[name]:
            table[f'{name}={value}'] = bench_decode(decode_settings | {name: value}, few)
    table['quantize=int8, n_draft=4'] = bench_decode(decode_settings | {'quantize': 'int8', 'n_draft': 4}, few)
    uncached = seconds_without_cache(max_new_tokens)
    table['no cache, batch_size=1'] = {'ms_per_iter': uncached * 1e3, 'tokens_per_sec': 1 / uncached}
    unjitted = seconds_without_jit()
    table['no jit'] = {'ms_per_iter': unjitted * 1e3, 'tokens_per_sec': batch_size / unjitted}
    columns = ['tokens_per_sec', 'ms_per_iter', 'gb_per_sec', 'share_of_bandwidth', 'weights_mb', 'cache_mb',
               'accepted', 'perplexity', 'agreement']
    print(f'{"":>26}' + ''.join(f'{column:>19}' for column in columns))
    for name, results in table.items():
        cells = ['' if results.get(column) is None else f'{results[column]:,.4g}' for column in columns]
        print(f'{heading(name):>26}' + ''.join(f'{cell:>19}' for cell in cells))
    return table


def heading(name):
    """The name of a row in the printed table of an ablation."""
    return 'baseline' if name == 'as it is' else name


# -----------------------------------------------------------------------------
# communication of sharded training, computed


def bytes_sent(config, fsdp, tensor, data, n_micro, n_rows):
    """{what for: bytes} that one device sends in one training step of a GPT-2, with ring collectives: an all-gather or
    reduce-scatter of M bytes among n devices sends M (n - 1) / n from each, an all-reduce twice that.

    n_micro, n_rows: micro-steps, and sequences of each per data shard. Where the compiler replaces a reduce-scatter by
    an all-reduce (XLA:CPU does), it sends twice the bytes."""
    L, D, V, S, T = config.n_layer, config.n_embd, config.vocab_size, config.block_size, config.block_size
    width = 4 if config.dtype == 'float32' else 2  # bytes of a number in the compute dtype
    kernels, tables = 12 * L * D**2, (V + S) * D  # elements; biases and norms are negligible

    def ring(n):
        return (n - 1) / n

    if fsdp == tensor == 1:  # pmap: one all-reduce of float32 gradients after all micro-steps
        return {'gradients': 2 * 4 * (kernels + tables) * ring(data)}
    grads = (4 * kernels + width * V * D) / tensor  # bytes of one rank's gradients: float32, the embedding's in `width`
    sent_per_micro_step = {
        # kernels are all-gathered forward and backward, tables once
        'weights': (2 * width * kernels / tensor + width * (V / tensor + S) * D) * ring(fsdp),
        # reduce-scatter to the stored shards, then all-reduce over their replicas
        'gradients': grads * ring(fsdp) + 2 * grads / fsdp * ring(data),
        # all-gathered over tensor forward and backward, and its float32 gradient
        'c_attn': (2 * width + 4) * 3 * L * D**2 / (fsdp * tensor) * ring(tensor),
        # all-reduces: 2 per layer forward and 2 backward, 1 each for embedding and head
        'activations': 2 * (4 * L + 2) * width * n_rows * T * D * ring(tensor),
    }
    return {name: n_micro * n for name, n in sent_per_micro_step.items()}


def bench_scaling():
    """For each layout of n_devices, the bytes that a device sends per step, and the link bandwidth at which
    communication fully overlaps compute at the accelerator's peak FLOP/s. At 40% utilization, 40% of that bandwidth is
    enough."""
    params = jax.eval_shape(lambda: create_train_state(jax.random.key(0), model_config, optax.identity())).params
    tokens_per_device = gradient_accumulation_steps * batch_size * block_size / n_devices
    # the utilization if that many tokens took one second, which is also the seconds they take at full utilization
    seconds = estimate_mfu(count_params(params), model_config, tokens_per_device, PEAK_FLOPS[accelerator])
    layouts = []
    for tensor in (1, 2, 4, 8):
        if n_devices % tensor or n_head % tensor:
            continue
        for fsdp in dict.fromkeys((1, n_devices // tensor)):
            if n_embd % fsdp:
                continue
            data = n_devices // (tensor * fsdp)
            n_micro, n_rows = split_batch(gradient_accumulation_steps, batch_size, data * fsdp)
            sent = bytes_sent(model_config, fsdp, tensor, data, n_micro, n_rows)
            gb_sent = sum(sent.values()) / 1e9
            layouts.append({
                'data': data, 'fsdp': fsdp, 'tensor': tensor, 'gb_sent': gb_sent,
                'of': {name: n / 1e9 for name, n in sent.items()}, 'hidden_from_gb_per_sec': gb_sent / seconds,
                'state_gb': 12 * count_params(params, non_embedding=False) / (fsdp * tensor) / 1e9})
    print(f'{"data":>5} {"fsdp":>5} {"tensor":>6} {"GB state":>9} {"GB sent":>9} {"overlaps at GB/s":>17}   '
          'breakdown of GB sent')
    for layout in layouts:
        breakdown = ', '.join(f'{name} {n:.3g}' for name, n in layout['of'].items() if n)
        print(f'{layout["data"]:>5} {layout["fsdp"]:>5} {layout["tensor"]:>6} {layout["state_gb"]:>9.3g} '
              f'{layout["gb_sent"]:>9.3g} {layout["hidden_from_gb_per_sec"]:>17.3g}   {breakdown}')
    return {'ms_per_iter_at_peak': seconds * 1e3}, layouts


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
    return {name: value if value is None else float(f'{value:.6g}') for name, value in results.items()}


def formatted(value):
    if value is None:
        return 'n/a'
    return f'{value:,.4g}' if value < 1e4 else f'{value:,.0f}'


if mode == 'train':
    results = bench_train()
elif mode == 'scaling':
    results, layouts = bench_scaling()
else:
    limit = load_model()[0].block_size
    if prompt_len + max_new_tokens > limit:
        raise UserError(f'prompt_len + max_new_tokens must be at most block_size={limit}')
    results = bench_decode(decode_settings) | {'peak_memory_gb': peak_memory_gb()}
hardware = f'{len(devices)} x {devices[0].device_kind}'
if mode == 'scaling':
    hardware = f'{n_devices} x {accelerator}, computed'
print(f'{mode}, {hardware}, {dtype} ({reason}), jax {jax.__version__}')
for name, value in results.items():
    print(f'{name:>30}  {formatted(value)}')

environment = {'device': devices[0].device_kind, 'n_devices': len(devices), 'machine': platform.machine(),
               'python': platform.python_version(), 'jax': jax.__version__, 'jaxlib': jaxlib.__version__}
document = {'program': 'bench_jax', 'settings': flags, 'environment': environment, 'results': rounded(results)}
if mode == 'scaling':
    document['results']['layouts'] = layouts
elif ablate:
    table = ablate_train(results) if mode == 'train' else ablate_decode(results)
    document['ablation'] = {name: rounded(row) for name, row in table.items()}
print(json.dumps(document))
