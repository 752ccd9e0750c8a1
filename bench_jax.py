"""Times training or decoding on random weights and random tokens, or computes what training sends between devices: a
table, then one JSON line.

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
import jax_transformer
from jax_ops import UserError, bucket
from jax_train_utils import (
    PEAK_FLOPS, Stopwatch, choose_attention, config_from_flags, create_learning_rate_schedule,
    create_optimizer_with_schedule, cross_entropy, device_peak_flops, exit_on_user_error, get_windows, load_dataset,
    load_run, make_train_step, measure_bandwidth, read_flags, setup_distributed_training, setup_jax_environment,
    split_rows)
from jax_transformer import (
    GPT, count_params, create_train_state, decoding_params, estimate_mfu, generate_in_chunks, init_cache, weight_bytes)

# -----------------------------------------------------------------------------
mode = 'train' # 'train', 'decode' or 'scaling'
preset = '' # a model and batch by name: 'nanogpt_cpu', 'baby' (nanoGPT's two for Shakespeare) or 'gpt2'; flags override it
ablate = False # measure again with each choice changed, one at a time, and print the table
batch_size = 12 # sequences per micro-batch (train), or generated together (decode)
gradient_accumulation_steps = 1 # micro-batches per update (train)
block_size = 1024 # tokens per sequence, at most
vocab_size = 50304 # tokens there are; GPT-2 has 50257
n_layer = 12 # transformer blocks
n_head = 12 # attention heads
n_embd = 768 # width
dropout = 0.0 # on embeddings, attention and residuals (train)
bias = True # in LayerNorm and Dense layers
norm = 'layer' # 'layer' or 'rms'
position = 'learned' # 'learned' or 'rope'
n_kv_head = 0 # heads of keys and values; 0 is n_head
qk_norm = '' # 'learned' normalizes queries and keys
layer_types = 'full' # 'full' or 'window' of each layer, as in 'window,full'; a short pattern repeats
window = 0 # keys that a query sees in 'window' layers
mlp = 'gelu' # 'gelu' or 'swiglu'
n_inner = 0 # width of the MLP, or of each expert; 0 is 4 * n_embd
tied_head = True # the head is the embedding
n_expert = 0 # MLPs per layer of which a token uses n_expert_used; 0 is one for all
n_expert_used = 2 # experts per token
expert_balance = 0.01 # weight of the loss that keeps the experts equally busy (train)
prompt_len = 16 # tokens of each prompt (decode)
max_new_tokens = 128 # generated per sequence, greedily (decode)
optimizer = 'adamw' # or 'muon' (train)
attention = 'auto' # as in train_jax.py, like the next three (train)
loss_chunk = 0 # positions whose logits exist at a time; 0 is all
scan_layers = False # one compiled block in a loop
remat = 'none' # 'dots', 'full'
quantize = '' # 'int8' weights, as in sample_jax.py, like the next two (decode)
cache_dtype = 'auto' # of the KV cache
n_draft = 0 # tokens to guess per step
out_dir = '' # a run to take the weights from, instead of random ones (decode)
dataset = '' # its folder under data/: prompts from val.bin, and what perplexity and greedy tokens are like (decode)
n_devices = 8 # that share the training (scaling)
accelerator = 'H100' # whose peak FLOP/s to reckon with, as PEAK_FLOPS in jax_train_utils.py names it (scaling)
repeats = 20 # timed iterations (train) or calls (decode), after those that compile
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
config, given = read_flags(__file__, globals())
globals().update(config)
if preset not in PRESETS:
    raise UserError(f"preset must be one of {', '.join(filter(None, PRESETS))}, not {preset!r}")
config |= PRESETS[preset] | given
globals().update(config)
if mode not in ('train', 'decode', 'scaling'):
    raise UserError(f'mode must be train, decode or scaling, not {mode!r}')
if accelerator not in PEAK_FLOPS:
    raise UserError(f'accelerator must be one of {", ".join(PEAK_FLOPS)}, not {accelerator!r}')
for name in ('batch_size', 'gradient_accumulation_steps', 'prompt_len', 'repeats', 'n_devices'):
    if config[name] < 1:
        raise UserError(f'{name} must be at least 1, not {config[name]}')
if mode == 'decode' and max_new_tokens < 2:
    raise UserError(f'max_new_tokens must be at least 2, not {max_new_tokens}')
devices, dtype, reason = setup_jax_environment(device, dtype)
config['dtype'] = dtype
model_config = config_from_flags(config, vocab_size=vocab_size, dtype=dtype)
decoding = dict(batch_size=batch_size, dtype=dtype, quantize=quantize, cache_dtype=cache_dtype, n_draft=n_draft)
clock = Stopwatch()


def bench_train(repeats=repeats, loss_chunk=loss_chunk, **how):
    """One training step after the other, data on the device beforehand, waiting for each. how: changes of the config."""
    parallel = setup_distributed_training(devices)
    config = dataclasses.replace(model_config, **{'scan_layers': scan_layers, 'remat': remat} | how)
    if 'attention' not in how:
        config = dataclasses.replace(config, attention=choose_attention(attention, config, devices[0])[0])
    schedule = create_learning_rate_schedule(6e-4, decay_lr=False)
    tx = create_optimizer_with_schedule(schedule, optimizer=optimizer)
    state = parallel.create(create_train_state, jax.random.key(seed), config, tx)
    n_params = count_params(state.params)
    n_rows = gradient_accumulation_steps * batch_size
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab_size, size=(n_rows, block_size + 1)).astype(np.int32)
    batch = parallel.place({'x': tokens[:, :-1], 'y': tokens[:, 1:], 'row': np.arange(n_rows, dtype=np.uint32)},
                           split_rows(gradient_accumulation_steps, batch_size, len(devices)))
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
    return {'ms_per_iter': np.median(seconds) * 1e3, 'ms_per_iter_min': min(seconds) * 1e3, 'tokens_per_sec': tokens_per_sec,
            'mfu': peak and estimate_mfu(n_params, config, tokens_per_sec, peak * len(devices)),
            'compile_s': compile_s, 'n_params': n_params,
            # what a step needs besides parameters, optimizer state and batch, as the compiler has planned it
            'temporary_gb': step.memory_analysis().temp_size_in_bytes / 1e9, 'peak_memory_gb': peak_memory_gb()}


def plain_matmul(x, y, flip=False, dtype=None, cut=()):
    """jax_ops.matmul with the gradient that JAX makes of it."""
    y = y.astype(x.dtype)
    return (x @ (y.swapaxes(-1, -2) if flip else y)).astype(dtype or x.dtype)


def ablate_train(base):
    """The table: the step as the flags have it, and with each choice changed. Returns {change: results}."""
    changes = {'attention': ('xla', 'chunked', 'cudnn'), 'scan_layers': (False, True), 'remat': ('none', 'dots', 'full'),
               'loss_chunk': (0, max(1, block_size // 8)), 'dtype': ('float32', 'bfloat16')}
    now = dict(attention=choose_attention(attention, model_config, devices[0])[0], scan_layers=scan_layers, remat=remat,
               loss_chunk=loss_chunk, dtype=dtype)
    table = {'as it is': base}
    for name, values in changes.items():
        for value in values:
            if value == now[name]:
                continue
            how = {'attention': now['attention']} | {name: value}
            try:
                choose_attention(how['attention'], dataclasses.replace(model_config, dtype=how.get('dtype', dtype)), devices[0])
            except UserError:  # cuDNN's conditions
                continue
            table[f'{name}={value}'] = bench_train(**how)
    ours, jax_ops.matmul, jax_transformer.matmul = jax_ops.matmul, plain_matmul, plain_matmul
    try:
        table["JAX's matmul gradients"] = bench_train()
    finally:
        jax_ops.matmul = jax_transformer.matmul = ours
    print(f'{"":>24}  {"ms/iter":>9}  {"x":>5}  {"temporary GB":>12}  {"compile s":>9}')
    for name, r in table.items():
        print(f'{name:>24}  {r["ms_per_iter"]:9,.1f}  {r["ms_per_iter"] / base["ms_per_iter"]:5.2f}  '
              f'{r["temporary_gb"]:12.3f}  {r["compile_s"]:9.1f}')
    return table


def bench_decode(how, repeats=repeats):
    """Whole calls of generate: the prompts in one pass, then a step for every token of the batch. how: see
    `decoding`."""
    config, params = decode_model(how['dtype'], how['quantize'])
    prompts = prompts_of(how['batch_size'])
    calls, bandwidths = [], []
    for _ in range(repeats + 1):
        clock.lap()
        stages = []
        for made in generate_in_chunks(
                params, config, prompts, max_new_tokens, rng=jax.random.key(seed), temperature=0, n_draft=how['n_draft'],
                cache_dtype=how['cache_dtype']):
            stages.append(clock.lap())
        calls.append(stages)
        bandwidths.append(measure_bandwidth(devices[0]))  # beside each call: on a shared machine it comes and goes
    prefill, decode = np.median([[lap.running for lap in call] for call in calls[1:]], axis=0)
    weights = weight_bytes(params)
    gb_read = (weights + made.cache_bytes) / 1e9 * made.steps
    return {'ms_per_iter': decode * 1e3 / made.steps, 'tokens_per_sec': how['batch_size'] * max_new_tokens / (prefill + decode),
            'tokens_per_sec_decode': how['batch_size'] * (max_new_tokens - 1) / decode, 'prefill_ms': prefill * 1e3,
            'compile_s': sum(lap.compiling for lap in calls[0]), 'weights_mb': weights / 1e6,
            'cache_mb': made.cache_bytes / 1e6, 'gb_per_sec': gb_read / decode,
            'measured_bandwidth_gb_per_sec': np.median(bandwidths[1:]),
            'share_of_bandwidth': np.median([gb_read / call[1].running / b for call, b in zip(calls[1:], bandwidths[1:])]),
            'accepted': made.accepted / made.drafted if made.drafted else None} | quality(config, params, how['cache_dtype'])


@functools.lru_cache(maxsize=1)
def trained():
    """(config, float32 parameters) of out_dir, or of a new random model."""
    if out_dir:
        return load_run(out_dir, 'best', setup_distributed_training(devices[:1]))[:2]
    params = create_train_state(jax.random.key(seed), model_config, create_optimizer_with_schedule(lambda step: 0)).params
    return model_config, jax.device_put(params, devices[0])


def decode_model(dtype, quantize):
    config, params = trained()
    return dataclasses.replace(config, dtype=dtype), decoding_params(dict(params), dtype, quantize)


@functools.lru_cache(maxsize=1)
def validation_windows():
    """Windows [16, up to 256 tokens and one more] spread evenly over val.bin."""
    width = min(256, trained()[0].block_size)
    tokens = load_dataset(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', dataset), width)[0]['val']
    x, y = get_windows(tokens, np.linspace(0, len(tokens) - width - 1, 16).astype(int), width)
    return np.concatenate([x, y[:, -1:]], axis=1)


def prompts_of(batch_size):
    if not dataset:
        return np.random.default_rng(seed).integers(trained()[0].vocab_size, size=(batch_size, prompt_len))
    return np.resize(validation_windows()[:, :prompt_len], (batch_size, prompt_len))


def window_logits(config, params, cache_dtype):
    """Logits of the validation windows, through the weights and the cache as decoding reads them."""
    idx = validation_windows()[:, :-1]
    return jax.jit(GPT(config).apply)({'params': params}, idx, cache=init_cache(config, *idx.shape, cache_dtype))[0]


@functools.lru_cache(maxsize=1)
def exact_tokens():
    """The likeliest token of each position of the validation windows, in float32."""
    return window_logits(*decode_model('float32', ''), 'float32').argmax(-1)


def quality(config, params, cache_dtype):
    """On the validation windows: the perplexity, and the share of positions where the likeliest token is that of float32
    weights and cache."""
    if not dataset:
        return {}
    logits = window_logits(config, params, cache_dtype)
    return {'perplexity': float(np.exp(cross_entropy(logits, validation_windows()[:, 1:]).mean())),
            'agreement': float((logits.argmax(-1) == exact_tokens()).mean())}


def without_cache(n_tokens):
    """Seconds per token of batch 1 the way nanoGPT decodes: for every token the whole text anew, in one jitted call. Texts
    are padded to powers of two, so that few lengths compile."""
    config, params = decode_model(dtype, quantize)
    next_token = jax.jit(lambda params, idx, n: GPT(config).apply({'params': params}, idx, at_B=n - 1)[:, 0].argmax(-1))
    for _ in range(2):  # the first pass compiles
        text, start = prompts_of(1)[0].tolist(), time.perf_counter()
        for _ in range(n_tokens):
            width = min(bucket(len(text)), config.block_size)
            idx = np.pad(text, (0, width - len(text)))[None]
            text.append(int(next_token(params, idx, np.array([len(text)]))[0]))
    return (time.perf_counter() - start) / n_tokens


def ablate_decode(base):
    """The table: decoding as the flags have it, and with one choice changed. Returns {change: results}."""
    few = min(repeats, 3)
    changes = [('dtype', value) for value in ('float32', 'bfloat16')] + [('quantize', 'int8')]
    changes += [('cache_dtype', value) for value in ('bfloat16', 'int8', 'float8')]
    changes += [('n_draft', 4), ('batch_size', 1), ('batch_size', 8)]
    table = {'as it is': base}
    for name, value in changes:
        if decoding[name] != value:
            table[f'{name}={value}'] = bench_decode(decoding | {name: value}, few)
    table['quantize=int8, n_draft=4'] = bench_decode(decoding | {'quantize': 'int8', 'n_draft': 4}, few)
    uncached = without_cache(max_new_tokens)
    table['no cache, batch_size=1'] = {'ms_per_iter': uncached * 1e3, 'tokens_per_sec': 1 / uncached}
    with jax.disable_jit():  # every operation dispatched from Python; 2 tokens tell
        model, params = decode_model(dtype, quantize)
        ends = [time.perf_counter() for _ in generate_in_chunks(
            params, model, prompts_of(batch_size), 3, rng=jax.random.key(seed), temperature=0)]
    unjitted = (ends[1] - ends[0]) / 2
    table['no jit'] = {'ms_per_iter': unjitted * 1e3, 'tokens_per_sec': batch_size / unjitted}
    columns = ['tokens_per_sec', 'ms_per_iter', 'gb_per_sec', 'share_of_bandwidth', 'weights_mb', 'cache_mb', 'accepted',
               'perplexity', 'agreement']
    print(f'{"":>26}' + ''.join(f'{column:>19}' for column in columns))
    for name, r in table.items():
        print(f'{name:>26}' + ''.join(f'{"" if r.get(column) is None else f"{r[column]:,.4g}":>19}' for column in columns))
    return table


def bytes_sent(config, fsdp, tensor, data, n_micro, rows):
    """What one device sends in one training step, {what for: bytes}, if collectives go round in rings: an all-gather or
    reduce-scatter of M bytes among n devices sends M (n - 1) / n from each, an all-reduce twice that.

    config: a GPTConfig. n_micro, rows: micro-steps, and sequences of each per share. A reduce-scatter that the compiler
    makes an all-reduce (XLA:CPU does) sends twice the bytes."""
    L, D, V, S, T = config.n_layer, config.n_embd, config.vocab_size, config.block_size, config.block_size
    width = 4 if config.dtype == 'float32' else 2
    ring = lambda n: (n - 1) / n
    kernels, tables = 12 * L * D**2, (V + S) * D  # elements; biases and norms are too few to count
    if fsdp == tensor == 1:  # pmap: one all-reduce of float32 gradients after all micro-steps
        return {'gradients': 2 * 4 * (kernels + tables) * ring(data)}
    grads = (4 * kernels + width * V * D) / tensor  # bytes of one rank's gradients, which are float32 but for the table's
    return {name: n_micro * n for name, n in {
        'weights': (2 * width * kernels / tensor + width * (V / tensor + S) * D) * ring(fsdp),  # kernels each way
        'gradients': grads * ring(fsdp) + 2 * grads / fsdp * ring(data),  # to the stored parts, then over their copies
        'c_attn': (2 * width + 4) * 3 * L * D**2 / (fsdp * tensor) * ring(tensor),  # each way, and the gradient
        'activations': 2 * (4 * L + 2) * width * rows * T * D * ring(tensor),  # 2 a layer each way, embedding and head
    }.items()}


def scaling():
    """For each layout of n_devices, the bytes that a device sends per step, and the bandwidth at which sending takes as
    long as computing would at the accelerator's peak: a link of at least that hides behind the computation. At a
    utilization of 40%, 40% of it will do."""
    params = jax.eval_shape(lambda: create_train_state(jax.random.key(0), model_config, optax.identity())).params
    tokens = gradient_accumulation_steps * batch_size * block_size / n_devices  # of a device
    # the utilization, if that many tokens took a second, is the seconds that they take at full utilization
    seconds = estimate_mfu(count_params(params), model_config, tokens, PEAK_FLOPS[accelerator])
    layouts = []
    for tensor in (1, 2, 4, 8):
        for fsdp in dict.fromkeys((1, n_devices // tensor)):
            data = n_devices // (tensor * fsdp)
            if data * fsdp * tensor == n_devices and not n_head % tensor and not n_embd % fsdp:
                n_micro, rows = split_rows(gradient_accumulation_steps, batch_size, data * fsdp)
                sent = bytes_sent(model_config, fsdp, tensor, data, n_micro, rows)
                gb_sent = sum(sent.values()) / 1e9
                layouts.append({
                    'data': data, 'fsdp': fsdp, 'tensor': tensor, 'gb_sent': gb_sent,
                    'of': {name: n / 1e9 for name, n in sent.items()}, 'hidden_from_gb_per_sec': gb_sent / seconds,
                    'state_gb': 12 * count_params(params, non_embedding=False) / (fsdp * tensor) / 1e9})
    print(f'{"data":>5} {"fsdp":>5} {"tensor":>6} {"GB state":>9} {"GB sent":>9} {"hidden from GB/s":>17}   of the sent')
    for row in layouts:
        of = ', '.join(f'{name} {n:.3g}' for name, n in row['of'].items() if n)
        print(f'{row["data"]:>5} {row["fsdp"]:>5} {row["tensor"]:>6} {row["state_gb"]:>9.3g} {row["gb_sent"]:>9.3g} '
              f'{row["hidden_from_gb_per_sec"]:>17.3g}   {of}')
    return {'ms_per_iter_at_peak': seconds * 1e3}, layouts


def peak_memory_gb():
    """Of the first device; of the process, where that is the CPU."""
    stats = devices[0].memory_stats()
    if stats:
        return stats['peak_bytes_in_use'] / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == 'darwin' else 1e6)


def rounded(value):
    return value if value is None else float(f'{value:.6g}')


if mode == 'train':
    results = bench_train()
elif mode == 'scaling':
    results, layouts = scaling()
else:
    if prompt_len + max_new_tokens > (limit := trained()[0].block_size):
        raise UserError(f'prompt_len + max_new_tokens must be at most block_size={limit}')
    results = bench_decode(decoding) | {'peak_memory_gb': peak_memory_gb()}
environment = {'device': devices[0].device_kind, 'n_devices': len(devices), 'machine': platform.machine(),
               'python': platform.python_version(), 'jax': jax.__version__, 'jaxlib': jaxlib.__version__}
on = f'{n_devices} x {accelerator}, computed' if mode == 'scaling' else f'{len(devices)} x {devices[0].device_kind}'
print(f'{mode}, {on}, {dtype} ({reason}), jax {jax.__version__}')
for name, value in results.items():
    print(f'{name:>30}  {"n/a" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"}')
document = {'program': 'bench_jax', 'settings': config, 'environment': environment,
            'results': {name: rounded(value) for name, value in results.items()}}
if mode == 'scaling':
    document['results']['layouts'] = layouts
elif ablate:
    table = ablate_train(results) if mode == 'train' else ablate_decode(results)
    document['ablation'] = {name: {key: rounded(value) for key, value in row.items()} for name, row in table.items()}
print(json.dumps(document))
