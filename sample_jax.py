"""Generates text from a trained model.

$ python sample_jax.py --out_dir=out-pystdlib-char
$ python sample_jax.py --init_from=gpt2-xl --start="The answer to life, the universe and everything is" --num_samples=5
"""
import dataclasses
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

from jax_pretrained import load_pretrained
from jax_train_utils import (
    exit_on_user_error, load_dataset, load_meta, load_params, load_tokenizer, read_flags, setup_distributed_training,
    setup_jax_environment)
from jax_transformer import GPTConfig, UserError, create_train_state, generate

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), 'gpt2' (-medium, -large, -xl), a Hugging Face folder, a nanoGPT ckpt.pt
out_dir = 'out' # the run to sample from; nothing else is needed
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
dataset = '' # the folder under data/ whose meta.json describes the tokenizer, for a ckpt.pt, which does not
start = '\n' # the prompt, or 'FILE:prompt.txt' to take it from a file; '<|endoftext|>' is a token to GPT-2's BPE
num_samples = 10 # how many samples to draw, all in one batch
max_new_tokens = 500 # number of tokens generated in each sample
temperature = 0.8 # below 1.0 is less random, above 1.0 more so; 0 always takes the likeliest token
top_k = 200 # choose among the top_k likeliest tokens; 0 is all
seed = 1337 # of the samples; need not be the training's
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu', 'cuda:1'
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto is bfloat16 where the hardware is fast at it
compile = True # of no effect, JAX always compiles
# -----------------------------------------------------------------------------
sys.excepthook = exit_on_user_error
config, given = read_flags(__file__, globals())
globals().update(config)
if 'compile' in given:
    print(f'--compile={compile} has no effect here: JAX always compiles')
if num_samples < 1 or top_k < 0 or seed < 0:
    raise UserError(f'num_samples must be at least 1, top_k and seed at least 0; got {num_samples}, {top_k}, {seed}')
devices, dtype, reason = setup_jax_environment(device, dtype)
print(f'{devices[0].device_kind}, compute in {dtype} ({reason})', file=sys.stderr)

# model and tokenizer
if init_from == 'resume':
    step, meta = load_meta(out_dir, checkpoint)
    model_config = dataclasses.replace(GPTConfig(**meta['model']), dtype=dtype)
    description = meta['tokenizer']
    one = setup_distributed_training(devices[:1])
    abstract = one.abstract(create_train_state, jax.random.key(0), model_config, optax.identity())
    params = load_params(out_dir, step, abstract.params)
    print(f'{out_dir}, checkpoint of iteration {step}', file=sys.stderr)
else:
    model_config, params = load_pretrained(init_from)
    model_config = dataclasses.replace(model_config, dtype=dtype)
    params = jax.device_put(params, devices[0])
    description = {'kind': 'gpt2'}
    if dataset:
        description = load_dataset(Path(__file__).parent / 'data' / dataset, block_size=1)[2]
    elif model_config.vocab_size < 50257:
        raise UserError(f"{init_from} has a vocabulary of {model_config.vocab_size}, which is not GPT-2's: name the data "
                        'set that it was trained on, --dataset=...')
tokenizer = load_tokenizer(description)
if tokenizer.vocab_size > model_config.vocab_size:
    raise UserError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model only {model_config.vocab_size}')

# prompt
if start.startswith('FILE:'):
    try:
        start = Path(start[5:]).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'cannot read the prompt: {error}') from None
prompt = tokenizer.encode(start)
if not prompt:
    raise UserError('the prompt is empty; give at least one character, as in --start="A"')

# generate, all samples at once
started = time.perf_counter()
samples = generate(params, model_config, np.tile(prompt, (num_samples, 1)), max_new_tokens, rng=jax.random.key(seed),
                   temperature=temperature, top_k=top_k or None, n_vocab=tokenizer.vocab_size)
samples = np.asarray(samples)
seconds = time.perf_counter() - started
for sample in samples.tolist():
    print(tokenizer.decode(sample))
    print('---------------')
print(f'{num_samples} x {max_new_tokens} tokens in {seconds:.1f} s, compilation included', file=sys.stderr)
