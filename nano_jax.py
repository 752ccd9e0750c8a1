"""A GPT in one file of JAX: model, loss, optimizer, data, training on all devices, sampling.

$ python data/shakespeare_char/prepare.py
$ python nano_jax.py --dataset=shakespeare_char --max_iters=2000

It is a specification: with the same flags and seed it has the initial parameters, batches and losses of train_jax.py
(tests/test_nano_jax.py), which it neither imports nor is imported by. What is not here: dropout, checkpoints, logs.
Letters of shapes: B sequences, T tokens, D channels, H heads of K channels, V tokens in the vocabulary.
"""
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

@dataclasses.dataclass(frozen=True)
class Config:  # nanoGPT's names; each is a flag, as --n_layer=6
    dataset: str = 'shakespeare_char'  # the folder under data/ whose prepare.py has been run
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64  # tokens of a sequence
    vocab_size: int = 0  # of the data set
    bias: bool = False  # in LayerNorm and in the matrices
    batch_size: int = 12  # sequences of a micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches of an update, all devices together
    max_iters: int = 2000
    learning_rate: float = 1e-3
    min_lr: float = 1e-4
    warmup_iters: int = 100
    lr_decay_iters: int = 2000
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0
    eval_interval: int = 250
    eval_iters: int = 20
    log_interval: int = 10
    max_new_tokens: int = 200
    temperature: float = 0.8  # 0 takes the likeliest token
    top_k: int = 200
    seed: int = 1337

# --- the model: a nested dictionary of parameters, and functions of it
def draw(key, path, count, shape, std):
    # Each parameter has a key of its own: the seed's, and a hash of where it is. (flax makes it so, with the count of
    # the parameters of that module before this one, from 1 on.)
    digest = hashlib.sha1(''.join(path).encode() + bytes([count])).digest()
    key = jax.random.fold_in(key, jnp.uint32(int.from_bytes(digest[:4], 'big')))
    return jax.random.normal(key, shape) * std

@partial(jax.jit, static_argnums=1)  # under jit, because compiled code rounds otherwise than one operation at a time
def init(key, config):
    D, L = config.n_embd, config.n_layer
    def dense(n_in, n_out, path, std=0.02):
        layer = {'kernel': draw(key, path, 1, (n_in, n_out), std)}
        return layer | ({'bias': jnp.zeros(n_out)} if config.bias else {})
    def norm():
        return {'scale': jnp.ones(D)} | ({'bias': jnp.zeros(D)} if config.bias else {})

    params = {'wte': draw(key, (), 1, (config.vocab_size, D), 0.02),
              'wpe': draw(key, (), 2, (config.block_size, D), 0.02), 'ln_f': norm()}
    for i in range(L):
        h, residual_std = f'h_{i}', 0.02 / math.sqrt(2 * L)  # what is added to the stream 2 L times starts smaller
        params[h] = {
            'ln_1': norm(), 'ln_2': norm(),
            'attn': {'c_attn': dense(D, 3 * D, (h, 'attn', 'c_attn')),
                     'c_proj': dense(D, D, (h, 'attn', 'c_proj'), residual_std)},
            'mlp': {'c_fc': dense(D, 4 * D, (h, 'mlp', 'c_fc')),
                    'c_proj': dense(4 * D, D, (h, 'mlp', 'c_proj'), residual_std)}}
    return params

def dense(p, x):
    return x @ p['kernel'] + p.get('bias', 0)

def layer_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p['scale'] + p.get('bias', 0)

def attention(p, x_BxTxD, config, cache=None, position=0):
    # queries, keys and values of every head
    B, T, D = x_BxTxD.shape
    q, k, v = jnp.split(dense(p['c_attn'], x_BxTxD), 3, axis=-1)
    q, k, v = (a.reshape(B, T, config.n_head, -1).swapaxes(1, 2) for a in (q, k, v))  # [B, H, T, K]
    # with a cache, the keys and values of the tokens before are there already
    if cache is not None:
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, 0, 0, position, 0))
        k, v = cache
    # each token attends to those before it, and to itself
    scores_BxHxTxS = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    is_past_TxS = jnp.arange(k.shape[2]) <= position + jnp.arange(T)[:, None]
    probs_BxHxTxS = jax.nn.softmax(jnp.where(is_past_TxS, scores_BxHxTxS, -jnp.inf))
    y_BxTxD = (probs_BxHxTxS @ v).swapaxes(1, 2).reshape(B, T, D)
    return dense(p['c_proj'], y_BxTxD), cache

def forward(params, idx_BxT, config, caches=None, position=0):
    # (the logits of the token after each, [B, T, V]; the caches); idx begins at `position`
    T = idx_BxT.shape[1]
    x_BxTxD = params['wte'][idx_BxT] + jax.lax.dynamic_slice_in_dim(params['wpe'], position, T)
    new_caches = []
    for i, cache in enumerate(caches or [None] * config.n_layer):
        p = params[f'h_{i}']
        y_BxTxD, cache = attention(p['attn'], layer_norm(p['ln_1'], x_BxTxD), config, cache, position)
        x_BxTxD += y_BxTxD
        h_BxTxF = jax.nn.gelu(dense(p['mlp']['c_fc'], layer_norm(p['ln_2'], x_BxTxD)), approximate=False)
        x_BxTxD += dense(p['mlp']['c_proj'], h_BxTxF)
        new_caches.append(cache)
    # weight tying: the head is the token embedding
    return layer_norm(params['ln_f'], x_BxTxD) @ params['wte'].T, new_caches

def loss_fn(params, x_BxT, y_BxT, config):
    logits_BxTxV, _ = forward(params, x_BxT, config)
    logprob_BxTxV = jax.nn.log_softmax(logits_BxTxV)
    return -jnp.take_along_axis(logprob_BxTxV, y_BxT[..., None], axis=-1).mean()

# --- one update: gradients of all micro-batches on all devices, clipping, AdamW
def learning_rate(n, config):  # nanoGPT's: linear warm-up, then a cosine down to min_lr
    warm_up = config.learning_rate * (n + 1) / (config.warmup_iters + 1)
    share = jnp.clip((n - config.warmup_iters) / max(1, config.lr_decay_iters - config.warmup_iters), 0, 1)
    decayed = config.min_lr + 0.5 * (1 + jnp.cos(jnp.pi * share)) * (config.learning_rate - config.min_lr)
    return jnp.where(n < config.warmup_iters, warm_up, decayed)

def init_state(config):
    params = init(jax.random.key(config.seed), config)
    mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return {'params': params, 'mean': mean, 'square': square, 'n': jnp.int32(0)}

def train_step(state, x_RxT, y_RxT, config):
    # On one of the devices: its rows R, a micro-batch at a time. Their gradients are averaged.
    rows = min(config.batch_size, len(x_RxT))
    micro_batches = tuple(a.reshape(-1, rows, a.shape[-1]) for a in (x_RxT, y_RxT))

    def micro_step(total, xy):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(state['params'], *xy, config)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state['params'])
    total, _ = jax.lax.scan(micro_step, zeros, micro_batches)
    # The mean over all devices: this is what data parallelism is.
    loss, grads = jax.lax.pmean(jax.tree.map(lambda a: a / len(micro_batches[0]), total), 'data')

    # clip the gradients to a norm of at most grad_clip
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    if config.grad_clip:
        scale = jnp.minimum(1, config.grad_clip / (norm + 1e-6))
        grads = jax.tree.map(lambda g: g * scale, grads)

    # AdamW: means of the gradients and of their squares, without their bias towards the zeros that they start from
    n = state['n'] + 1
    lr = learning_rate(state['n'], config)
    mean = jax.tree.map(lambda m, g: config.beta1 * m + (1 - config.beta1) * g, state['mean'], grads)
    square = jax.tree.map(lambda s, g: config.beta2 * s + (1 - config.beta2) * g * g, state['square'], grads)

    def update(p, m, s):
        step = (m / (1 - config.beta1**n)) / (jnp.sqrt(s / (1 - config.beta2**n)) + 1e-8)
        if p.ndim >= 2:  # weight decay, of matrices and embeddings, not of biases and norms
            step += config.weight_decay * p
        return p - lr * step

    params = jax.tree.map(update, state['params'], mean, square)
    return {'params': params, 'mean': mean, 'square': square, 'n': n}, loss

def compile_step(config, devices):
    # All devices have the state; each has its rows of the batch.
    mesh = Mesh(np.array(devices), ('data',))
    step = jax.shard_map(partial(train_step, config=config), mesh=mesh, in_specs=(P(), P('data'), P('data')),
                         out_specs=(P(), P()), check_vma=False)
    return jax.jit(step, donate_argnums=0)

# --- data: windows of a file of tokens
def get_batch(tokens, config, iteration):
    # Sequence number n of the run is a function of the seed and n alone: an epoch holds every window once, in an order
    # of its own, from an offset of its own. So a run can go on anywhere, on any number of devices.
    T, n_rows, starts = config.block_size, config.batch_size * config.gradient_accumulation_steps, []
    n_windows = max(1, (len(tokens) - 1) // T - 1)
    for number in range(iteration * n_rows, (iteration + 1) * n_rows):
        epoch, index = divmod(number, n_windows)
        offset, order = shuffle(config.seed, epoch, n_windows, len(tokens) - n_windows * T)
        starts.append(offset + T * int(order[index]))
    return windows(tokens, np.array(starts), T)

def shuffle(seed, epoch, n_windows, n_offsets, known={}):  # noqa: B006, the last epoch's is kept
    if (seed, epoch, n_windows) not in known:
        known.clear()
        rng = np.random.default_rng([seed, 0, epoch])
        order = np.arange(n_windows, dtype=np.min_scalar_type(n_windows))
        known[seed, epoch, n_windows] = rng.integers(n_offsets), rng.permutation(order)
    return known[seed, epoch, n_windows]

def windows(tokens, starts, T):  # x, and y one token later
    rows = tokens[starts[:, None] + np.arange(T + 1)].astype(np.int32)
    return rows[:, :-1], rows[:, 1:]

def evaluate(params, tokens, config, loss):
    # the same windows every time, spread evenly over the text
    n = config.eval_iters * config.batch_size
    starts = np.arange(n) * (len(tokens) - 1 - config.block_size) // max(1, n - 1)
    x, y = windows(tokens, starts, config.block_size)
    rows = np.arange(n).reshape(config.eval_iters, -1)
    return np.mean([float(loss(params, x[i], y[i])) for i in rows])

# --- sampling
@partial(jax.jit, static_argnames='config')
def next_token(params, idx_1xT, caches, position, key, config):
    logits_BxTxV, caches = forward(params, idx_1xT, config, caches, position)
    logits_V = logits_BxTxV[0, -1]
    if not config.temperature:
        return logits_V.argmax(), caches
    least = jax.lax.top_k(logits_V, min(config.top_k or len(logits_V), len(logits_V)))[0][-1]
    logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V) / config.temperature
    return jax.random.categorical(key, logits_V), caches

def sample(params, prompt, config):
    # The prompt fills the cache; then each step feeds the last token alone. Positions are learned, so that past
    # block_size the last block_size tokens are read anew for every token, as nanoGPT does.
    shape = (2, 1, config.n_head, config.block_size, config.n_embd // config.n_head)
    caches = [jnp.zeros(shape) for _ in range(config.n_layer)]
    tokens, fed = list(prompt), 0
    for i in range(config.max_new_tokens):
        key = jax.random.fold_in(jax.random.key(config.seed), i)
        if len(tokens) <= config.block_size:
            token, caches = next_token(params, np.array([tokens[fed:]]), caches, fed, key, config)
            fed = len(tokens)
        else:
            token, _ = next_token(params, np.array([tokens[-config.block_size:]]), None, 0, key, config)
        tokens.append(int(token))
    return tokens

# --- training
def main():
    # flags, as --n_layer=6
    flags = dict(arg[2:].split('=', 1) for arg in sys.argv[1:])
    kinds = {field.name: field.type for field in dataclasses.fields(Config)}
    config = Config(**{name: value == 'True' if kinds[name] is bool else kinds[name](value)
                       for name, value in flags.items()})

    # the data: tokens, and how they become text; ids are printed where they are not characters
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', config.dataset)
    meta = json.load(open(os.path.join(folder, 'meta.json'), encoding='utf-8'))
    data = {split: np.memmap(os.path.join(folder, f'{split}.bin'), meta['dtype'], 'r') for split in ('train', 'val')}
    chars = meta['tokenizer'].get('chars')
    n_vocab = meta['vocab_size'] if chars else -(-meta['vocab_size'] // 64) * 64
    config = dataclasses.replace(config, vocab_size=n_vocab)

    # the model on all devices
    devices = jax.devices()
    state = init_state(config)
    n_params = sum(p.size for p in jax.tree.leaves(state['params'])) - state['params']['wpe'].size
    print(f'{len(devices)} x {devices[0].device_kind}, number of parameters: {n_params / 1e6:.2f}M')
    step = compile_step(config, devices)
    loss = jax.jit(partial(loss_fn, config=config))

    began = time.time()
    for iteration in range(config.max_iters + 1):
        if iteration % config.eval_interval == 0 or iteration == config.max_iters:
            losses = {split: evaluate(state['params'], tokens, config, loss) for split, tokens in data.items()}
            print(f'step {iteration}: train loss {losses["train"]:.4f}, val loss {losses["val"]:.4f}')
        if iteration == config.max_iters:
            break
        state, train_loss = step(state, *get_batch(data['train'], config, iteration))
        if iteration % config.log_interval == 0:
            train_loss, now = float(train_loss), time.time()  # float() waits for the devices
            print(f'iter {iteration}: loss {train_loss:.4f}, time {(now - began) * 1000 / config.log_interval:.2f}ms')
            began = time.time()

    # a sample: what follows a newline
    start = [chars.index('\n')] if chars and '\n' in chars else [0]
    tokens = sample(state['params'], start, config)
    print(''.join(chars[token] for token in tokens) if chars else tokens)

if __name__ == '__main__':
    main()
