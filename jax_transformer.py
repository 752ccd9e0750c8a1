"""The model, whole, in one file: a GPT in flax.linen, its KV cache, and generation.

References:
1) nanoGPT's model: https://github.com/karpathy/nanoGPT/blob/master/model.py
2) GPT-2 as released by OpenAI: https://github.com/openai/gpt-2/blob/master/src/model.py

Shapes are in the names, so `q_BxTxHxK` needs no comment:
    B  batch (sequences)      T  positions of this call     S  slots of the KV cache (keys)
    D  n_embd, the width      H  heads                      K  width of one head, D / H
    F  MLP width, 4 D         V  vocabulary                 N  width of the token buffer
A name that ends in _B holds one value per sequence.
"""
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from flax.training import train_state

DTYPES = ('float32', 'bfloat16', 'float16')
ACTIVATIONS = ('gelu', 'gelu_tanh')  # exact (erf), as in nanoGPT; the tanh approximation of the published GPT-2


class UserError(ValueError):
    """A mistake that the user can mend. The scripts print it as one line and exit with code 2."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What the model is. The defaults are nanoGPT's GPT (GPT-2 124M with a padded vocabulary).

    Raises UserError for values that cannot make a model."""
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded up to a multiple of 64 for efficiency
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in Dense layers and LayerNorms, as GPT-2. False: a bit better and faster
    activation: str = 'gelu'  # one of ACTIVATIONS
    norm_eps: float = 1e-5
    dtype: str = 'float32'  # of activations and matmuls; parameters, softmax, logits and loss are always float32

    def __post_init__(self):
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'):
            if getattr(self, name) < 1:
                raise UserError(f'{name} must be at least 1, not {getattr(self, name)}')
        if self.n_embd % self.n_head:
            valid = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            raise UserError(f'n_head={self.n_head} does not divide n_embd={self.n_embd}; it may be one of {valid}')
        if not 0 <= self.dropout < 1:
            raise UserError(f'dropout must be in [0, 1), not {self.dropout}')
        for name, known in (('dtype', DTYPES), ('activation', ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise UserError(f'{name} must be one of {", ".join(known)}, not {getattr(self, name)!r}')


# -----------------------------------------------------------------------------
# layers

INIT_STD = 0.02


def dropout(module, x, rate, row_B, deterministic=False):
    """Zeroes elements of x [B, ...] with probability `rate` and scales the rest by 1 / (1 - rate).

    Row b draws from its own key, fold_in(key, row_B[b]): what a sequence sees does not depend on which
    micro-batch or device it sits in, so a run gives the same curve on 1 or 8 devices. deterministic: x as it is."""
    if deterministic or rate == 0:
        return x
    key_B = jax.vmap(jax.random.fold_in, (None, 0))(module.make_rng('dropout'), row_B)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(key_B)
    return jnp.where(keep, x / (1 - rate), 0)


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias (Ba et al. 2016, arXiv:1607.06450); statistics in float32."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD):
        x = x_BxTxD.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        var = jnp.square(x - mean).mean(-1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(var + self.config.norm_eps)
        y *= self.param('scale', nn.initializers.ones, x.shape[-1:])
        if self.config.bias:
            y += self.param('bias', nn.initializers.zeros, x.shape[-1:])
        return y.astype(self.config.dtype)


@jax.custom_vjp
def matmul(x, kernel):
    """x [..., in] @ kernel [in, out]. Its gradient for the kernel has x on the left of the product, where JAX's own has
    the incoming gradient there: XLA:CPU would transpose that inside the element-wise chain that made it, which cost a
    fifth of the training step."""
    return x @ kernel


def matmul_bwd(saved, g):
    x, kernel = saved
    return g @ kernel.T, x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])


matmul.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), matmul_bwd)


class Dense(nn.Module):
    """x [..., in] -> x @ kernel + bias [..., features], in the config's dtype."""
    config: GPTConfig
    features: int
    init_std: float = INIT_STD

    @nn.compact
    def __call__(self, x):
        dtype = self.config.dtype
        kernel = self.param('kernel', nn.initializers.normal(self.init_std), (x.shape[-1], self.features))
        y = matmul(x, kernel.astype(dtype))
        if self.config.bias:
            y += self.param('bias', nn.initializers.zeros, (self.features,)).astype(dtype)
        return y


def attend(q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, visible_BxTxS, drop=lambda probs: probs):
    """softmax(q k / sqrt(K)) v over the keys that each query sees -> [B, T, H, K]; softmax in float32. `drop` is applied
    to the probabilities [B, H, T, S]."""
    scores_BxHxTxS = jnp.einsum('bthk,bshk->bhts', q_BxTxHxK, k_BxSxHxK, preferred_element_type=jnp.float32)
    scores_BxHxTxS *= q_BxTxHxK.shape[-1]**-0.5
    scores_BxHxTxS = jnp.where(visible_BxTxS[:, None], scores_BxHxTxS, jnp.finfo(jnp.float32).min)
    probs_BxHxTxS = drop(jax.nn.softmax(scores_BxHxTxS).astype(v_BxSxHxK.dtype))
    return jnp.einsum('bhts,bshk->bthk', probs_BxHxTxS, v_BxSxHxK)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a query sees the keys at its own position and before."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT, *, cache=None, deterministic=True, row_B=None):
        cfg = self.config
        B, T, D = x_BxTxD.shape
        H, K = cfg.n_head, cfg.n_embd // cfg.n_head

        qkv_BxTx3D = Dense(cfg, 3 * D, name='c_attn')(x_BxTxD)
        q_BxTxHxK, k_BxSxHxK, v_BxSxHxK = (a.reshape(B, T, H, K) for a in jnp.split(qkv_BxTx3D, 3, axis=-1))
        key_position_BxS = position_BxT
        if cache is not None:  # keys and values of this call go into the next free slots; attend to all that are filled
            key_position_BxS = cache['position']
            k_BxSxHxK = jax.lax.dynamic_update_slice(cache['k'], k_BxSxHxK, (0, cache['slot'], 0, 0))
            v_BxSxHxK = jax.lax.dynamic_update_slice(cache['v'], v_BxSxHxK, (0, cache['slot'], 0, 0))
        visible_BxTxS = key_position_BxS[:, None, :] <= position_BxT[:, :, None]
        y_BxTxHxK = attend(q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, visible_BxTxS,
                           lambda probs: dropout(self, probs, cfg.dropout, row_B, deterministic))

        y_BxTxD = Dense(cfg, D, INIT_STD / (2 * cfg.n_layer)**0.5, name='c_proj')(y_BxTxHxK.reshape(B, T, D))
        return dropout(self, y_BxTxD, cfg.dropout, row_B, deterministic), {'k': k_BxSxHxK, 'v': v_BxSxHxK}


class MLP(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, *, deterministic=True, row_B=None):
        cfg = self.config
        h_BxTxF = Dense(cfg, 4 * cfg.n_embd, name='c_fc')(x_BxTxD)
        h_BxTxF = jax.nn.gelu(h_BxTxF, approximate=cfg.activation == 'gelu_tanh')
        y_BxTxD = Dense(cfg, cfg.n_embd, INIT_STD / (2 * cfg.n_layer)**0.5, name='c_proj')(h_BxTxF)
        return dropout(self, y_BxTxD, cfg.dropout, row_B, deterministic)


class Block(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT, *, cache=None, deterministic=True, row_B=None):
        cfg, how = self.config, dict(deterministic=deterministic, row_B=row_B)
        y_BxTxD, kv = CausalSelfAttention(cfg, name='attn')(
            LayerNorm(cfg, name='ln_1')(x_BxTxD), position_BxT, cache=cache, **how)
        x_BxTxD += y_BxTxD
        x_BxTxD += MLP(cfg, name='mlp')(LayerNorm(cfg, name='ln_2')(x_BxTxD), **how)
        return x_BxTxD, kv


class GPT(nn.Module):
    """GPT(config).apply({'params': params}, idx_BxT) -> float32 logits [B, T, vocab_size]."""
    config: GPTConfig

    @nn.compact
    def __call__(self, idx_BxT, *, deterministic=True, row_B=None, position_BxT=None, cache=None, at_B=None):
        """Logits of the token after each position.

        deterministic: False turns dropout on; it needs rngs={'dropout': key}.
        row_B: the number by which dropout knows each sequence; 0, 1, 2, ... if not given.
        position_BxT: where the tokens stand in their sequence; 0 .. T-1 if not given. PAD marks padding.
        cache: from init_cache(). The T tokens are added to it, and (logits, cache) is returned.
        at_B: compute logits for this one index into T of each sequence only, [B, 1, vocab_size]."""
        cfg = self.config
        B, T = idx_BxT.shape
        if T > cfg.block_size:
            raise ValueError(f'{T} tokens do not fit in block_size {cfg.block_size}')
        if row_B is None:
            row_B = jnp.arange(B)
        if position_BxT is None:
            position_BxT = jnp.arange(T)[None]
        if cache is not None:
            positions = jnp.broadcast_to(position_BxT, (B, T)).astype(jnp.int32)
            cache |= {'position': jax.lax.dynamic_update_slice(cache['position'], positions, (0, cache['slot']))}

        wte_VxD = self.param('wte', nn.initializers.normal(INIT_STD), (cfg.vocab_size, cfg.n_embd)).astype(cfg.dtype)
        wpe_SxD = self.param('wpe', nn.initializers.normal(INIT_STD), (cfg.block_size, cfg.n_embd)).astype(cfg.dtype)
        x_BxTxD = jnp.take(wte_VxD, idx_BxT, axis=0, mode='clip') + jnp.take(wpe_SxD, position_BxT, axis=0, mode='clip')
        x_BxTxD = dropout(self, x_BxTxD, cfg.dropout, row_B, deterministic)
        layers = {}
        for i in range(cfg.n_layer):
            name = f'h_{i}'
            layer_cache = cache and cache[name] | {'position': cache['position'], 'slot': cache['slot']}
            x_BxTxD, layers[name] = Block(cfg, name=name)(
                x_BxTxD, position_BxT, cache=layer_cache, deterministic=deterministic, row_B=row_B)
        x_BxTxD = LayerNorm(cfg, name='ln_f')(x_BxTxD)
        if at_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, at_B[:, None, None], axis=1)
        # the head is tied to the embedding; float32 out, whatever goes in
        logits_BxTxV = jnp.einsum('btd,vd->btv', x_BxTxD, wte_VxD, preferred_element_type=jnp.float32)
        return logits_BxTxV if cache is None else (logits_BxTxV, cache | layers | {'slot': cache['slot'] + T})


# -----------------------------------------------------------------------------
# parameters and training state

class TrainState(train_state.TrainState):
    """flax's TrainState (step, params, opt_state, tx) and what float16 needs to keep its gradients representable."""
    loss_scale: Any = None  # {'scale': float32, 'good_steps': int32}, or None where nothing is scaled


def create_train_state(rng, config, tx):
    """Freshly initialised float32 parameters and the state of the optax optimizer `tx` for them."""
    model = GPT(config)
    params = jax.jit(model.init)(rng, jnp.zeros((1, 1), jnp.int32))['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx, loss_scale=initial_loss_scale(config.dtype))


def initial_loss_scale(dtype):
    """For float16, the 2**16 that torch.amp.GradScaler starts with; None where nothing is scaled."""
    return {'scale': jnp.float32(2**16), 'good_steps': jnp.int32(0)} if dtype == 'float16' else None


def count_params(params, non_embedding=True):
    """Number of parameters. As in nanoGPT, non_embedding leaves out the position table; the token table counts, as it
    is the head as well."""
    total = sum(x.size for x in jax.tree.leaves(params))
    return total - params['wpe'].size if non_embedding else total


def estimate_mfu(n_params, config, tokens_per_sec, peak_flops):
    """Model FLOPs utilization: the share of `peak_flops` (FLOP/s of all devices together) that the training achieves.

    6 FLOPs per parameter and token, forward and backward, plus attention's 12 L H K T (PaLM, arXiv:2204.02311,
    appendix B). n_params is count_params(params)."""
    flops_per_token = 6 * n_params + 12 * config.n_layer * config.n_embd * config.block_size
    return flops_per_token * tokens_per_sec / peak_flops


# -----------------------------------------------------------------------------
# generation: prefill the KV cache with the prompts, then one compiled loop of one token per step

def cast_matrices(params, dtype):
    """The matrices in the dtype that the model multiplies in, once and not anew in every step: the same results from
    half the memory traffic, where that is bfloat16."""
    return jax.tree.map(lambda p: p.astype(dtype) if p.ndim >= 2 else p, params)


PAD = 2**30  # position of a cache slot that holds no token: later than any query, hence never seen


def init_cache(config, batch_size, n_slots):
    """An empty KV cache. Slots fill in the order of the calls; `position` says where in its sequence a slot's token
    stands, so that prompts of different lengths can share the slots."""
    shape = (batch_size, n_slots, config.n_head, config.n_embd // config.n_head)
    layers = {f'h_{i}': {'k': jnp.zeros(shape, config.dtype), 'v': jnp.zeros(shape, config.dtype)}
              for i in range(config.n_layer)}
    return layers | {'position': jnp.full((batch_size, n_slots), PAD, jnp.int32), 'slot': jnp.int32(0)}


class Sampling(NamedTuple):
    """How to pick a token. What is static here recompiles when it changes; the numbers in Knobs do not."""
    greedy: bool
    top_k: int | None
    top_p: bool
    min_p: bool
    penalize: bool
    n_vocab: int  # only ids below it are picked
    stop_tokens: tuple


class Knobs(NamedTuple):
    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float


class Decoding(struct.PyTreeNode):
    """Where a generation stands: row b of tokens_BxN holds length_B[b] tokens, and n were generated."""
    tokens_BxN: jax.Array
    length_B: jax.Array
    done_B: jax.Array  # the row has met a stop token
    n: jax.Array
    key_B: jax.Array
    cache: Any


def penalize_repetition(logits_BxV, tokens_BxN, length_B, penalty):
    """Divides positive logits of tokens that the row already has by `penalty`, multiplies negative ones (CTRL,
    arXiv:1909.05858)."""
    filled_BxN = jnp.arange(tokens_BxN.shape[1]) < length_B[:, None]
    seen_BxV = jax.vmap(lambda logits, tokens, filled: jnp.zeros(logits.shape, bool).at[tokens].max(filled))(
        logits_BxV, tokens_BxN, filled_BxN)
    return jnp.where(seen_BxV, jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty), logits_BxV)


def pick_token(logits_BxV, key_B, sampling, knobs):
    """One token id per row of float32 logits."""
    logits_BxV = logits_BxV[:, :sampling.n_vocab]
    if sampling.greedy:
        return jnp.argmax(logits_BxV, axis=-1)
    logits_BxV /= knobs.temperature
    if sampling.top_k is not None:
        kth = jax.lax.top_k(logits_BxV, min(sampling.top_k, sampling.n_vocab))[0][:, -1:]
        logits_BxV = jnp.where(logits_BxV < kth, -jnp.inf, logits_BxV)
    if sampling.top_p:  # keep the likeliest tokens until their probabilities reach top_p (arXiv:1904.09751)
        sorted_BxV = jnp.sort(logits_BxV, axis=-1, descending=True)
        probs_BxV = jax.nn.softmax(sorted_BxV)
        before_BxV = jnp.cumsum(probs_BxV, axis=-1) - probs_BxV  # 0 for the first, which is therefore always kept
        least = jnp.where(before_BxV < knobs.top_p, sorted_BxV, jnp.inf).min(-1, keepdims=True)
        logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
    if sampling.min_p:  # keep tokens of at least min_p times the likeliest one's probability (arXiv:2407.01082)
        least = logits_BxV.max(-1, keepdims=True) + jnp.log(knobs.min_p)
        logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
    return jax.vmap(jax.random.categorical)(key_B, logits_BxV)


def append_token(state, logits_BxV, sampling, knobs):
    """Picks each row's next token and writes it behind the row. Rows that are done stay as they are."""
    if sampling.penalize:
        logits_BxV = penalize_repetition(logits_BxV, state.tokens_BxN, state.length_B, knobs.repetition_penalty)
    key_B = jax.vmap(jax.random.fold_in, (0, None))(state.key_B, state.n)
    token_B = pick_token(logits_BxV, key_B, sampling, knobs).astype(jnp.int32)
    here_BxN = (jnp.arange(state.tokens_BxN.shape[1]) == state.length_B[:, None]) & ~state.done_B[:, None]
    stops = jnp.array(sampling.stop_tokens, jnp.int32)
    return state.replace(
        tokens_BxN=jnp.where(here_BxN, token_B[:, None], state.tokens_BxN),
        length_B=state.length_B + ~state.done_B, n=state.n + 1,
        done_B=state.done_B | (token_B[:, None] == stops).any(-1))


@functools.partial(jax.jit, static_argnames=('config', 'sampling', 'width', 'n_slots'), donate_argnames='state')
def prefill(params, state, knobs, *, config, sampling, width, n_slots):
    """Fills a new cache of n_slots with the prompts, which end before column `width`, and generates the first token."""
    idx_BxT = state.tokens_BxN[:, :width]
    position_BxT = jnp.where(jnp.arange(width) < state.length_B[:, None], jnp.arange(width), PAD)
    logits_BxTxV, cache = GPT(config).apply(
        {'params': params}, idx_BxT, position_BxT=position_BxT, at_B=state.length_B - 1,
        cache=init_cache(config, len(idx_BxT), n_slots))
    return append_token(state.replace(cache=cache), logits_BxTxV[:, 0], sampling, knobs)


@functools.partial(jax.jit, static_argnames=('config', 'sampling'), donate_argnames='state')
def decode(params, state, knobs, n_end, *, config, sampling):
    """Generates until there are n_end tokens or all rows are done: one token through the cache per step, or, where
    the state has no cache, the last block_size tokens anew, which is what nanoGPT does for every token."""
    model, width = GPT(config), config.block_size

    def step(state):
        if state.cache is not None:
            idx_BxT = jnp.take_along_axis(state.tokens_BxN, state.length_B[:, None] - 1, axis=1)
            logits_BxTxV, cache = model.apply(
                {'params': params}, idx_BxT, position_BxT=state.length_B[:, None] - 1, cache=state.cache)
            state = state.replace(cache=cache)
        else:
            start_B = jnp.maximum(state.length_B - width, 0)
            window = lambda row, start: jax.lax.dynamic_slice(row, (start,), (width,))
            idx_BxT = jax.vmap(window)(state.tokens_BxN, start_B)
            logits_BxTxV = model.apply({'params': params}, idx_BxT, at_B=state.length_B - start_B - 1)
        return append_token(state, logits_BxTxV[:, 0], sampling, knobs)

    return jax.lax.while_loop(lambda state: (state.n < n_end) & ~state.done_B.all(), step, state)


def bucket(n):
    """The next power of two, 16 at least: prompts of one bucket share one compilation."""
    return max(16, 1 << (n - 1).bit_length())


def generate(params, config, idx_BxT, max_new_tokens, **how):
    """Continues each prompt by max_new_tokens tokens and returns all tokens, int32 [B, T + max_new_tokens]; what follows
    a row's last token is 0. See generate_in_chunks, which takes the same arguments."""
    for tokens_BxN, _ in generate_in_chunks(params, config, idx_BxT, max_new_tokens, **how):
        pass
    return tokens_BxN


def generate_in_chunks(params, config, idx_BxT, max_new_tokens, *, rng, temperature=1.0, top_k=None, top_p=None,
                       min_p=None, repetition_penalty=None, stop_tokens=(), prompt_lengths_B=None, n_vocab=None,
                       sample_index_B=None, chunk=None):
    """Yields (tokens [B, T + max_new_tokens], length of each row [B]), int32 numpy arrays, while the rows grow: after the first token,
    then after every `chunk` tokens (all of them at once, if not given).

    idx_BxT: prompts, padded on the right to a common width; prompt_lengths_B: their lengths, T each if not given.
        Every row continues right after its own prompt.
    rng: a jax.random key. Row b draws its n-th token from fold_in(fold_in(rng, sample_index_B[b]), n), whatever else is
        in the batch; sample_index_B is 0, 1, 2, ... if not given.
    temperature: 0 is greedy. top_k: only the k likeliest tokens (clamped to the vocabulary). top_p: only the likeliest
        tokens that together reach this probability, in (0, 1]. min_p: only tokens at least this times as likely as the
        likeliest, in (0, 1]. repetition_penalty: above 1 makes tokens that are already there less likely.
        n_vocab: only ids below it, for padded vocabularies.
    stop_tokens: a row ends with the first of these that it generates.

    A model knows block_size positions. Up to there every token costs one position (KV cache); past it a token is
    conditioned on the last block_size tokens, as in nanoGPT, which costs block_size positions: the learned position
    of every token changes, and all keys and values with it.

    Raises UserError for prompts or controls that make no sense."""
    tokens_BxT = np.asarray(idx_BxT, np.int32)
    if tokens_BxT.ndim != 2 or 0 in tokens_BxT.shape:
        raise UserError(f'prompts must be [batch, tokens] with at least one token, not of shape {tokens_BxT.shape}')
    B, T = tokens_BxT.shape
    length_B = np.full(B, T) if prompt_lengths_B is None else np.asarray(prompt_lengths_B)
    stop_tokens = tuple(int(token) for token in np.ravel(stop_tokens))
    sample_index_B = np.arange(B) if sample_index_B is None else np.asarray(sample_index_B)
    n_vocab = config.vocab_size if n_vocab is None else n_vocab
    if length_B.shape != (B,) or length_B.dtype.kind not in 'iu' or length_B.min() < 1 or length_B.max() > T:
        raise UserError(f'prompt_lengths_B must be {B} lengths between 1 and {T}, not {length_B.tolist()}')
    length_B, longest = length_B.astype(np.int32), int(length_B.max())
    tokens_BxT = np.where(np.arange(T) < length_B[:, None], tokens_BxT, 0)
    if tokens_BxT.min() < 0 or tokens_BxT.max() >= config.vocab_size:
        wrong = tokens_BxT.min() if tokens_BxT.min() < 0 else tokens_BxT.max()
        raise UserError(f'the prompt has token id {wrong}; the model knows 0 to {config.vocab_size - 1}')
    if max_new_tokens < 0:
        raise UserError(f'max_new_tokens must be at least 0, not {max_new_tokens}')
    if temperature != 0 and not 1e-6 <= temperature < float('inf'):  # less would overflow float32
        raise UserError(f'temperature must be 0 (greedy) or at least 1e-6, not {temperature}')
    if top_k is not None and top_k < 1:
        raise UserError(f'top_k must be at least 1, not {top_k}')
    for name, value in (('top_p', top_p), ('min_p', min_p)):
        if value is not None and not 0 < value <= 1:
            raise UserError(f'{name} must be in (0, 1], not {value}')
    if repetition_penalty is not None and not 0 < repetition_penalty < float('inf'):
        raise UserError(f'repetition_penalty must be above 0, not {repetition_penalty}')
    if not 0 < n_vocab <= config.vocab_size:
        raise UserError(f'n_vocab must be between 1 and {config.vocab_size}, not {n_vocab}')
    if max_new_tokens == 0:
        yield tokens_BxT, length_B
        return

    sampling = Sampling(temperature == 0, top_k, top_p is not None, min_p is not None, repetition_penalty is not None,
                        n_vocab, stop_tokens)
    knobs = Knobs(*(np.float32(1 if x is None else x) for x in (temperature, top_p, min_p, repetition_penalty)))
    how = dict(config=config, sampling=sampling)
    width = bucket(longest)
    # columns: for the result and for prefill; the sliding window needs block_size to slice
    N = max(bucket(T) + max_new_tokens, config.block_size)
    state = Decoding(
        tokens_BxN=jnp.asarray(np.pad(tokens_BxT, ((0, 0), (0, N - T)))), length_B=jnp.asarray(length_B),
        done_B=jnp.zeros(B, bool), n=jnp.int32(0), cache=None,
        key_B=jax.vmap(jax.random.fold_in, (None, 0))(rng, sample_index_B))
    so_far = lambda state: (np.array(state.tokens_BxN)[:, :T + max_new_tokens], np.array(state.length_B))  # copies: donated
    n, n_cached = 0, min(max_new_tokens, config.block_size + 1 - longest)  # how many tokens the cache can give
    if n_cached > 0:
        # Slots for the prompts and for the new tokens until the longest row reaches block_size. Their number must not
        # depend on its exact length, or a new length would recompile: it is longer than width / 2 in all buckets but
        # the smallest.
        width = min(width, config.block_size)
        room = config.block_size - (0 if width <= 16 else width // 2)
        state = prefill(params, state, knobs, width=width, n_slots=width + min(max_new_tokens, room), **how)
        n = 1
        yield so_far(state)
    while n < max_new_tokens:
        if n >= n_cached:
            state = state.replace(cache=None)
        n = min(max_new_tokens if n >= n_cached else n_cached, n + (chunk or max_new_tokens))
        state = decode(params, state, knobs, np.int32(n), **how)
        yield so_far(state)
        if chunk and bool(state.done_B.all()):
            return
