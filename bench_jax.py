"""Times training or decoding on random weights and random tokens: a table, then one JSON line.

$ python bench_jax.py --mode=train --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --vocab_size=65
$ python bench_jax.py --mode=decode --prompt_len=16 --max_new_tokens=128
"""
import json
import platform
import sys

import jax
import jaxlib
import numpy as np

from jax_train_utils import (
    Stopwatch, create_learning_rate_schedule, create_optimizer_with_schedule, device_peak_flops, exit_on_user_error,
    make_train_step, measure_bandwidth, read_flags, setup_distributed_training, setup_jax_environment, split_rows)
from jax_transformer import (
    GPTConfig, UserError, cast_matrices, count_params, create_train_state, estimate_mfu, generate_in_chunks)

# -----------------------------------------------------------------------------
mode = 'train' # 'train' or 'decode'
batch_size = 12 # sequences per micro-batch (train), or generated together (decode)
gradient_accumulation_steps = 1 # micro-batches per update (train)
block_size = 1024 # tokens per sequence, at most
vocab_size = 50304 # tokens there are; GPT-2 has 50257
n_layer = 12 # transformer blocks
n_head = 12 # attention heads
n_embd = 768 # width
dropout = 0.0 # on embeddings, attention and residuals (train)
bias = True # in LayerNorm and Dense layers
prompt_len = 16 # tokens of each prompt (decode)
max_new_tokens = 128 # generated per sequence, greedily (decode)
repeats = 20 # timed iterations (train) or calls (decode), after those that compile
seed = 1337 # of weights and tokens
device = 'auto' # as in train_jax.py
dtype = 'auto' # 'float32', 'bfloat16', 'float16'
# -----------------------------------------------------------------------------
sys.excepthook = exit_on_user_error
config, given = read_flags(__file__, globals())
globals().update(config)
if mode not in ('train', 'decode'):
    raise UserError(f'mode must be train or decode, not {mode!r}')
for name in ('batch_size', 'gradient_accumulation_steps', 'prompt_len', 'repeats'):
    if config[name] < 1:
        raise UserError(f'{name} must be at least 1, not {config[name]}')
if mode == 'decode' and (max_new_tokens < 2 or prompt_len + max_new_tokens > block_size):
    raise UserError(f'max_new_tokens must be at least 2, and prompt_len + max_new_tokens at most block_size={block_size}')
devices, dtype, reason = setup_jax_environment(device, dtype)
config['dtype'] = dtype
model_config = GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
                         dropout=dropout, bias=bias, dtype=dtype)
rng = np.random.default_rng(seed)
clock = Stopwatch()


def bench_train():
    """One training step after the other, data on the device beforehand, waiting for each."""
    schedule = create_learning_rate_schedule(6e-4, decay_lr=False)
    parallel = setup_distributed_training(devices)
    state = create_train_state(jax.random.key(seed), model_config, create_optimizer_with_schedule(schedule))
    n_params = count_params(state.params)
    state = parallel.replicate(state)
    step = parallel.train_step(make_train_step(model_config, seed, 1.0, schedule))
    n_rows = gradient_accumulation_steps * batch_size
    tokens = rng.integers(vocab_size, size=(n_rows, block_size + 1)).astype(np.int32)
    batch = parallel.place({'x': tokens[:, :-1], 'y': tokens[:, 1:], 'row': np.arange(n_rows, dtype=np.uint32)},
                           split_rows(gradient_accumulation_steps, batch_size, len(devices)))
    clock.lap()
    seconds = []
    for i in range(repeats + 2):
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        lap = clock.lap()
        if i == 0:
            compile_s = lap.compiling
        if i > 1:
            seconds.append(lap.running)
    tokens_per_sec = n_rows * block_size / np.median(seconds)
    peak = device_peak_flops(devices[0])
    return {'ms_per_iter': np.median(seconds) * 1e3, 'ms_per_iter_min': min(seconds) * 1e3, 'tokens_per_sec': tokens_per_sec,
            'mfu': peak and estimate_mfu(n_params, model_config, tokens_per_sec, peak * len(devices)),
            'compile_s': compile_s, 'n_params': n_params, 'peak_memory_gb': peak_memory_gb()}


def bench_decode():
    """Whole calls of generate: the prompts in one pass, then a token per step and sequence."""
    params = create_train_state(jax.random.key(seed), model_config, create_optimizer_with_schedule(lambda step: 0)).params
    params = jax.device_put(cast_matrices(params, dtype), devices[0])
    prompts = rng.integers(vocab_size, size=(batch_size, prompt_len))
    calls = []
    for _ in range(repeats + 1):
        clock.lap()
        calls.append([clock.lap() for _ in generate_in_chunks(
            params, model_config, prompts, max_new_tokens, rng=jax.random.key(seed), temperature=0)])
    prefill, decode = (np.median([call[i].running for call in calls[1:]]) for i in (0, 1))
    ms_per_iter = decode * 1e3 / (max_new_tokens - 1)
    # what a step must read: all weights (the token table as the head) but the position table
    gb_per_step = (sum(p.nbytes for p in jax.tree.leaves(params)) - params['wpe'].nbytes) / 1e9
    gb_per_sec, peak = gb_per_step / ms_per_iter * 1e3, measure_bandwidth(devices[0])
    return {'ms_per_iter': ms_per_iter, 'tokens_per_sec': batch_size * max_new_tokens / (prefill + decode),
            'tokens_per_sec_decode': batch_size / ms_per_iter * 1e3, 'prefill_ms': prefill * 1e3,
            'compile_s': sum(lap.compiling for lap in calls[0]), 'weights_gb': gb_per_step, 'gb_per_sec': gb_per_sec,
            'measured_bandwidth_gb_per_sec': peak, 'share_of_bandwidth': gb_per_sec / peak,
            'peak_memory_gb': peak_memory_gb()}


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


results = bench_train() if mode == 'train' else bench_decode()
environment = {'device': devices[0].device_kind, 'n_devices': len(devices), 'machine': platform.machine(),
               'python': platform.python_version(), 'jax': jax.__version__, 'jaxlib': jaxlib.__version__}
print(f'{mode}, {len(devices)} x {devices[0].device_kind}, {dtype} ({reason}), jax {jax.__version__}')
for name, value in results.items():
    print(f'{name:>30}  {"n/a" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"}')
results = {name: value if value is None else float(f'{value:.6g}') for name, value in results.items()}
print(json.dumps({'program': 'bench_jax', 'settings': config, 'environment': environment, 'results': results}))
