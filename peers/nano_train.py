"""Training throughput of nano_jax.py on random tokens, without bench_jax.py's kernels: its peer, in the same
environment. The last line on stdout is a JSON object.

$ python peers/nano_train.py --preset=nanogpt_cpu --repeats=100
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent))
import nano_jax

PRESETS = {  # the same as bench_jax.py's, without dropout
    'nanogpt_cpu': dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, batch_size=12),
    'baby': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65, batch_size=64),
    'gpt2': dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, batch_size=12)}
parser = argparse.ArgumentParser()
parser.add_argument('--preset', default='nanogpt_cpu', choices=PRESETS)
parser.add_argument('--batch_size', type=int, help="the preset's if not given")
parser.add_argument('--repeats', type=int, default=20)
args = parser.parse_args()
if args.repeats < 1:
    parser.error('--repeats must be at least 1')

shape = PRESETS[args.preset]
cfg = nano_jax.Config(**nano_jax.DEFAULTS | shape | {'batch_size': args.batch_size or shape['batch_size']})
mesh = Mesh(np.array(jax.devices()), ('data',))
params = nano_jax.init_params(jax.random.key(0), cfg)
moments = {name: jax.tree.map(jnp.zeros_like, params) for name in 'mv'} | {'n': jnp.zeros(())}
params, moments = jax.device_put((params, moments), NamedSharding(mesh, P()))
train_step = nano_jax.make_train_step(cfg, mesh)
tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=(cfg.batch_size, cfg.block_size + 1), dtype=np.int32)

seconds = []
for _ in range(args.repeats + 3):  # the first three compile and warm up
    start = time.perf_counter()
    params, moments, loss = train_step(params, moments, tokens[:, :-1], tokens[:, 1:], cfg.learning_rate)
    loss.block_until_ready()
    seconds.append(time.perf_counter() - start)
step = statistics.median(seconds[3:])
n_tokens = cfg.batch_size * cfg.block_size
print(json.dumps({'settings': vars(args), 'results': {'step_ms': step * 1000, 'tokens_per_sec': n_tokens / step}}))
