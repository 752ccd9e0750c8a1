"""nanoGPT in one file: trains GPT-2 on all devices and samples from it, by jax and numpy.

$ python nano_jax.py --dataset=shakespeare_char --max_iters=2000

With the same flags and seed its numbers are those of train_jax.py (tests/test_nano_jax.py) except
for last bits, because train_jax.py sums in another order and computes the lr in float32. It leaves
out dropout, checkpoints, bfloat16, sharded parameters, and models other than GPT-2. There are two
ideas. First, parameters are dicts of arrays. A training step takes such dicts and returns new ones.
Second, jax.grad makes the gradient of a function, and jax.jit compiles a function. Names give
shapes, as in q_BxTxHxK: B sequences; N sequences of an iteration; T tokens of a sequence; S tokens
attended to; D channels; H heads of K channels; F channels in the MLP; V vocabulary tokens."""
import argparse, ast, collections, functools, hashlib, itertools, json, math, pathlib, sys, time
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

# -----------------------------------------------------------------------------
# nanoGPT's small model for CPUs. --name=value overrides a flag, as in nanoGPT
dataset = 'shakespeare_char' # the folder under data/ whose prepare.py has been run
eval_interval = 250 # evaluate every this many iterations, and at the end
log_interval = 10 # print every this many iterations
eval_iters = 20 # batches per split, at each evaluation
gradient_accumulation_steps = 1 # micro-batches per update, all devices together
batch_size = 12 # sequences per micro-batch
block_size = 64 # tokens per sequence
n_layer = 4 # transformer blocks
n_head = 4 # attention heads
n_embd = 128 # width
bias = False # True: biases in linear layers and LayerNorm, as in GPT-2
learning_rate = 1e-3 # the highest, reached after warmup_iters
max_iters = 2000 # total number of updates
weight_decay = 1e-1 # on matrices and embeddings, not on biases and norms
beta1 = 0.9 # decay of AdamW's mean of gradients
beta2 = 0.99 # decay of AdamW's mean of squared gradients
grad_clip = 1.0 # maximum global norm of the gradients; 0 does not clip
warmup_iters = 100 # iterations of linear warm-up; if not below lr_decay_iters, a tenth of that
lr_decay_iters = 0 # iteration at which the cosine reaches min_lr; 0 is max_iters
min_lr = 1e-4 # lowest learning rate
start = '\n' # the prompt of the sample at the end
max_new_tokens = 500 # tokens to generate
temperature = 0.8 # 1.0 = no change, below less random; 0 takes the likeliest token
top_k = 200 # sample from the top_k most likely tokens only; 0 is all
seed = 1337 # seeds weights, batches and the sample
# -----------------------------------------------------------------------------
DEFAULTS = {k: v for k, v in vars().items() if k[0] != '_' and type(v) in (bool, int, float, str)}
Config = collections.namedtuple('Config', [*DEFAULTS, 'vocab_size'])  # DEFAULTS: the flags above
# jit compiles a function of arrays; its argument cfg is a constant: another Config compiles anew
jit = functools.partial(jax.jit, static_argnames='cfg')

@jit
def init_params(key, cfg):
    """Returns new parameters, {'wte': [V, D], 'wpe': [T, D], 'h_0': {'attn': ...}, ...}."""
    D = cfg.n_embd

    def normal(path, shape, std=0.02, number=1):
        # as flax: its own key, from a hash of its modules' names, joined, and its number therein
        digest = hashlib.sha1(path.encode() + bytes([number])).digest()
        own_key = jax.random.fold_in(key, jnp.uint32(int.from_bytes(digest[:4], 'big')))
        return jax.random.normal(own_key, shape) * std

    def bias_params(width):
        return {'bias': jnp.zeros(width)} if cfg.bias else {}

    def linear_params(path, n_in, n_out, std=0.02):
        return {'kernel': normal(path, (n_in, n_out), std), **bias_params(n_out)}

    norm_params = {'scale': jnp.ones(D), **bias_params(D)}
    params = {'wte': normal('', (cfg.vocab_size, D)), 'ln_f': norm_params,
              'wpe': normal('', (cfg.block_size, D), number=2)}  # the second of the model itself
    # GPT-2 scales residual projections down: the stream adds up 2 n_layer outputs
    std = 0.02 / (2 * cfg.n_layer)**0.5
    for i in range(cfg.n_layer):
        attn = {'c_attn': linear_params(f'h_{i}attnc_attn', D, 3 * D),
                'c_proj': linear_params(f'h_{i}attnc_proj', D, D, std)}
        mlp = {'c_fc': linear_params(f'h_{i}mlpc_fc', D, 4 * D),
               'c_proj': linear_params(f'h_{i}mlpc_proj', 4 * D, D, std)}
        params[f'h_{i}'] = {'ln_1': norm_params, 'attn': attn, 'ln_2': norm_params, 'mlp': mlp}
    return params

def layer_norm(p, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p['scale'] + p.get('bias', 0)

def linear(p, x):
    return x @ p['kernel'] + p.get('bias', 0)

def attention(p, x_BxTxD, cfg, cache=None, first=0):
    """Returns (y_BxTxD; new cache). first: number of earlier tokens. cache: their keys, values."""
    B, T, D = x_BxTxD.shape
    H, K = cfg.n_head, D // cfg.n_head
    # queries, keys and values of all heads, in one product; S is T until the cache is added
    q_BxTxHxK, k_BxSxHxK, v_BxSxHxK = [
        a.reshape(B, T, H, K) for a in jnp.split(linear(p['c_attn'], x_BxTxD), 3, axis=-1)]
    # with a cache: write the new keys and values at their positions; the mask hides unused slots
    if cache is not None:
        k_BxSxHxK = jax.lax.dynamic_update_slice(cache['k'], k_BxSxHxK, (0, first, 0, 0))
        v_BxSxHxK = jax.lax.dynamic_update_slice(cache['v'], v_BxSxHxK, (0, first, 0, 0))
    # how well each query fits each key; a token sees itself and those before it
    scores_BxHxTxS = jnp.einsum('bthk,bshk->bhts', q_BxTxHxK, k_BxSxHxK) / K**0.5
    is_seen_TxS = jnp.arange(k_BxSxHxK.shape[1]) <= first + jnp.arange(T)[:, None]
    probs_BxHxTxS = jax.nn.softmax(jnp.where(is_seen_TxS, scores_BxHxTxS, -jnp.inf))
    # the values, weighed by these probabilities; then all heads are mixed
    y_BxTxHxK = jnp.einsum('bhts,bshk->bthk', probs_BxHxTxS, v_BxSxHxK)
    return linear(p['c_proj'], y_BxTxHxK.reshape(B, T, D)), {'k': k_BxSxHxK, 'v': v_BxSxHxK}

@jit
def forward(params, idx_BxT, cfg, cache=None, first=0):
    """Returns (logits_BxTxV; the new cache) of tokens idx at positions first, first + 1, ..."""
    x_BxTxD = params['wte'][idx_BxT] + params['wpe'][first + jnp.arange(idx_BxT.shape[1])]
    new_cache = {}
    for name in [f'h_{i}' for i in range(cfg.n_layer)]:
        p = params[name]
        # a pre-norm block: x += attention(norm(x)), then x += mlp(norm(x))
        y_BxTxD, new_cache[name] = attention(
            p['attn'], layer_norm(p['ln_1'], x_BxTxD), cfg, cache[name] if cache else None, first)
        x_BxTxD += y_BxTxD
        h_BxTxF = linear(p['mlp']['c_fc'], layer_norm(p['ln_2'], x_BxTxD))
        x_BxTxD += linear(p['mlp']['c_proj'], jax.nn.gelu(h_BxTxF, approximate=False))
    # weight tying: the logit of a token is the product with its embedding
    return layer_norm(params['ln_f'], x_BxTxD) @ params['wte'].T, new_cache

@jit
def loss_fn(params, x_BxT, y_BxT, cfg):
    """Returns the mean cross-entropy of the targets y."""
    log_probs_BxTxV = jax.nn.log_softmax(forward(params, x_BxT, cfg)[0])
    return -jnp.take_along_axis(log_probs_BxTxV, y_BxT[..., None], axis=-1).mean()

def load_data(folder, refuse=sys.exit):
    """Returns ({'train': tokens, 'val': tokens}; vocab_size; the functions encode and decode)."""
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    splits = {split: np.memmap(folder / f'{split}.bin', meta['dtype'], 'r')
              for split in ('train', 'val')}
    kind, chars = meta['tokenizer']['kind'], meta['tokenizer'].get('chars')
    if meta.get('row_length') or kind not in ('char', 'gpt2'):  # row_length: packed rows
        refuse(f'{folder}: this reads texts of characters or of GPT-2 tokens, no other data')
    if kind == 'gpt2':
        import tiktoken  # the one other package, for these data only
        bpe = tiktoken.get_encoding('gpt2')
        decode = lambda ids: bpe.decode([i for i in ids if i < bpe.n_vocab])
        return splits, 50304, bpe.encode_ordinary, decode  # 50257 tokens; nanoGPT pads to 50304
    decode = lambda ids: ''.join(chars[i] for i in ids)
    return splits, len(chars), lambda text: [chars.index(c) for c in text], decode

def shuffled_starts(n_tokens, cfg):
    """Yields starts of windows, endlessly. Each epoch cuts the data into windows, and visits all of
    them in random order. Random starts (nanoGPT) would miss 1/e of the tokens in each epoch."""
    n_windows = max(1, (n_tokens - 1) // cfg.block_size - 1)  # one less: room for the offset
    for epoch in itertools.count():
        rng = np.random.default_rng([cfg.seed, 0, epoch])  # 0: the random stream of the order
        offset = rng.integers(n_tokens - n_windows * cfg.block_size)
        yield from offset + cfg.block_size * rng.permutation(n_windows)

def read_windows(tokens, starts, block_size):
    """Returns (x, y), int32 [B, T] each: x the windows at these starts, y those a token later."""
    windows = tokens[np.array(starts)[:, None] + np.arange(block_size + 1)].astype(np.int32)
    return windows[:, :-1], windows[:, 1:]

def get_lr(n, cfg):
    """Returns the learning rate after n updates: linear warm-up, cosine, min_lr."""
    decay_iters = cfg.lr_decay_iters or cfg.max_iters
    warmup = cfg.warmup_iters if cfg.warmup_iters < decay_iters else decay_iters // 10
    if n < warmup:
        return cfg.learning_rate * (n + 1) / (warmup + 1)
    share = min(1, (n - warmup) / (decay_iters - warmup))
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (cfg.learning_rate - cfg.min_lr)

def adamw(params, grads, moments, lr, cfg):
    """Returns (params; moments) after an update. moments: {'m', 'v', 'n': updates so far}."""
    # clip: scale the gradients down to a global norm of grad_clip
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1, cfg.grad_clip / (norm + 1e-6)) if cfg.grad_clip else 1
    grads = jax.tree.map(lambda g: g * scale, grads)
    # running means of the gradients and of their squares
    n = moments['n'] + 1
    m = jax.tree.map(lambda m, g: cfg.beta1 * m + (1 - cfg.beta1) * g, moments['m'], grads)
    v = jax.tree.map(lambda v, g: cfg.beta2 * v + (1 - cfg.beta2) * g**2, moments['v'], grads)

    def update(p, m, v):
        # bias correction: the means began at 0
        step = (m / (1 - cfg.beta1**n)) / (jnp.sqrt(v / (1 - cfg.beta2**n)) + 1e-8)
        return p - lr * (step + (cfg.weight_decay * p if p.ndim >= 2 else 0))

    return jax.tree.map(update, params, m, v), {'m': m, 'v': v, 'n': n}

def make_train_step(cfg, mesh):
    """Returns one iteration as train_step(params, moments, x, y, lr) -> (params, moments, loss)."""
    # steps per device; if mesh.size does not divide the micro-batches, a step takes a part of one
    n_micro = cfg.gradient_accumulation_steps
    n_micro //= math.gcd(n_micro, mesh.size)

    def train_step(params, moments, x_NxT, y_NxT, lr):
        # forward and backward by micro-batch, added up; x and y are this device's share of N rows
        def micro_step(total, xy):
            loss_grads = jax.value_and_grad(loss_fn)(params, *xy, cfg)
            return jax.tree.map(jnp.add, total, loss_grads), None  # (sum so far, nothing per step)

        micro_xy = [a.reshape(n_micro, -1, cfg.block_size) for a in (x_NxT, y_NxT)]
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(micro_step, zeros, micro_xy)
        # the mean over micro-batches, and over devices: the one all-reduce, as DDP's
        loss, grads = jax.lax.pmean(jax.tree.map(lambda t: t / n_micro, total), 'data')
        return *adamw(params, grads, moments, lr, cfg), loss

    # each device runs train_step. P(): replicated; P('data'): split over the devices. Unless
    # check_vma=False, jax.grad itself would add up over devices, where pmean has to average
    parts = P(), P(), P('data'), P('data'), P()
    step = jax.shard_map(train_step, mesh=mesh, in_specs=parts, out_specs=P(), check_vma=False)
    return jax.jit(step, donate_argnums=(0, 1))  # results reuse the memory of params and moments

def estimate_loss(params, tokens, cfg):
    """Returns the mean loss of evenly spread windows, which are the same at every call."""
    n, last = cfg.eval_iters * cfg.batch_size, len(tokens) - 1 - cfg.block_size
    starts = np.arange(n) * last // max(1, n - 1)
    batches = [read_windows(tokens, b, cfg.block_size) for b in np.split(starts, cfg.eval_iters)]
    return np.mean([loss_fn(params, x_BxT, y_BxT, cfg) for x_BxT, y_BxT in batches])

def generate(params, ids, cfg):
    """Returns the ids of a prompt, followed by max_new_tokens new ids."""
    ids, n_cached = list(ids), 0
    shape = 1, cfg.block_size, cfg.n_head, cfg.n_embd // cfg.n_head
    cache = {f'h_{i}': {name: jnp.zeros(shape) for name in 'kv'} for i in range(cfg.n_layer)}
    for i in range(cfg.max_new_tokens):
        if len(ids) <= cfg.block_size:
            # what is not in the cache yet: first the prompt, then the latest token
            logits_1xTxV, cache = forward(params, np.array([ids[n_cached:]]), cfg, cache, n_cached)
            n_cached = len(ids)
        else:
            # the window moves, and with it the position of each token: all is computed anew
            logits_1xTxV, _ = forward(params, np.array([ids[-cfg.block_size:]]), cfg)
        logits_V = logits_1xTxV[0, -1] / (cfg.temperature or 1)
        if cfg.top_k:
            least_kept = jnp.sort(logits_V)[-min(cfg.top_k, cfg.vocab_size)]
            logits_V = jnp.where(logits_V < least_kept, -jnp.inf, logits_V)
        key = jax.random.fold_in(jax.random.key(cfg.seed), i)
        is_random = cfg.temperature > 0
        ids.append(int(jax.random.categorical(key, logits_V) if is_random else logits_V.argmax()))
    return ids

def main():
    """Trains with the flags of the command line, and prints a sample."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, value in DEFAULTS.items():
        convert = ast.literal_eval if isinstance(value, bool) else type(value)
        parser.add_argument(f'--{name}', type=convert, default=value)
    flags = vars(parser.parse_args())
    folder = pathlib.Path(__file__).parent / 'data' / flags['dataset']
    if not (folder / 'meta.json').is_file():
        parser.error(f'{folder} has no data: run its prepare.py first')
    splits, vocab_size, encode, decode = load_data(folder, parser.error)
    cfg, prompt = Config(**flags, vocab_size=vocab_size), encode(flags['start'] or '\n')
    # all devices, on one axis; each gets a copy of the parameters and of AdamW's moments
    mesh = Mesh(np.array(jax.devices()), ('data',))
    n_rows = cfg.gradient_accumulation_steps * cfg.batch_size
    if n_rows % mesh.size:
        parser.error(f'{mesh.size} devices cannot share {n_rows} sequences: change batch_size')
    params = init_params(jax.random.key(cfg.seed), cfg)
    moments = {name: jax.tree.map(jnp.zeros_like, params) for name in 'mv'} | {'n': jnp.zeros(())}
    params, moments = jax.device_put((params, moments), NamedSharding(mesh, P()))
    train_step = make_train_step(cfg, mesh)
    print(f'number of parameters: {sum(p.size for p in jax.tree.leaves(params)) / 1e6:.2f}M')

    starts = shuffled_starts(len(splits['train']), cfg)
    for iter_num in range(cfg.max_iters + 1):
        if iter_num % cfg.eval_interval == 0 or iter_num == cfg.max_iters:
            train, val = [estimate_loss(params, tokens, cfg) for tokens in splits.values()]
            print(f'step {iter_num}: train loss {train:.4f}, val loss {val:.4f}')
        if iter_num == cfg.max_iters:
            break
        t0 = time.perf_counter()
        rows = [next(starts) for _ in range(n_rows)]
        x_NxT, y_NxT = read_windows(splits['train'], rows, cfg.block_size)
        params, moments, loss = train_step(params, moments, x_NxT, y_NxT, get_lr(iter_num, cfg))
        loss, dt = float(loss), time.perf_counter() - t0  # float() waits for the devices
        if iter_num % cfg.log_interval == 0:
            print(f'iter {iter_num}: loss {loss:.4f}, time {dt * 1000:.2f}ms')
    print(decode(generate(params, prompt, cfg)))

if __name__ == '__main__':
    main()
