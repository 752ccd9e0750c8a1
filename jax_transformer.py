"""The model, whole, in one file: a GPT in flax.linen, its KV cache, and generation.

References:
1) nanoGPT's model: https://github.com/karpathy/nanoGPT/blob/master/model.py
2) GPT-2 as released by OpenAI: https://github.com/openai/gpt-2/blob/master/src/model.py

GPT-2 is Block, CausalSelfAttention, MLP and GPT. What other models have instead, or besides, is in the section "what
GPT-2 does not have": each part can be read alone, and none of them acts unless the config asks for it.

Shapes are in the names, so `q_BxTxHxK` needs no comment:
    B  batch (sequences)      T  positions of this call     S  slots of the KV cache (keys)
    D  n_embd, the width      H  heads                      K  width of one head, D / H
    F  MLP width, 4 D         V  vocabulary                 N  width of the token buffer
    G  heads of keys and values, each shared by Q = H / G of the H heads of queries (G = H in GPT-2)
    C  width of a latent      P  tokens of a call, B T      E  experts, of which a token uses U
    R  pairs of a token and an expert that it uses, P U     n  blocks of b rows for one expert each
A name that ends in _B holds one value per sequence.
"""
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training import train_state
from jax.ad_checkpoint import checkpoint_name

from jax_ops import (
    BATCH, CACHE_DTYPES, COLUMNS, INIT_STD, ROWS, Decoding, Knobs, Sampling, UserError, add_bias, append_token, attend,
    attend_in_chunks, bucket, cast_matrices, current_mesh, drop, element_numbers, embed, gather, gelu, head, look_up,
    map_chunks, matmul, matmul_int8, matmul_rows, pick_token, quantize_params, read_cache, rms_normalize, rope_frequencies,
    rows_first, shard, share_experts, through_experts, write_cache)
from jax_ops import ParallelLMHead, VocabParallelEmbedding, create_mesh  # noqa: F401, for users of this file

DTYPES = ('float32', 'bfloat16', 'float16')
ACTIVATIONS = ('gelu', 'gelu_tanh')  # exact (erf), as in nanoGPT; the tanh approximation of the published GPT-2
ATTENTION = ('xla', 'chunked', 'cudnn')  # see attend, attend_in_chunks, jax.nn.dot_product_attention
REMAT = ('none', 'dots', 'full')  # computed anew for the gradients: nothing, all but the Dense layers, whole blocks
NORMS = ('layer', 'rms')
POSITIONS = ('learned', 'rope')  # a table as GPT-2; rotation of queries and keys
MLPS = ('gelu', 'swiglu', 'swiglu_clamped')  # as GPT-2; with a gate (arXiv:2002.05202); that of gpt-oss
QK_NORMS = ('', 'learned', 'plain')
LAYER_TYPES = ('full', 'window', 'chunk', 'nope')  # 'nope': full attention without rope


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rope's frequencies change for sequences longer than those of the first training, see rope_frequencies."""
    kind: str  # 'llama3' or 'yarn'
    factor: float  # by which the slow pairs turn slower
    original_length: int  # of the first training
    low: float = 1.0  # pairs that turn less often than this over the original length are slow (yarn: beta_slow)
    high: float = 4.0  # pairs that turn more often than this stay as they are (yarn: beta_fast)
    truncate: bool = True  # yarn: the range between the two begins and ends with a whole pair
    amplitude: float = 1.0  # of cosine and sine

    def __post_init__(self):
        if self.kind not in ('llama3', 'yarn'):
            raise UserError(f'the kind of rope scaling must be llama3 or yarn, not {self.kind!r}')


@dataclasses.dataclass(frozen=True)
class MLA:
    """Sizes of multi-head latent attention, see LatentAttention."""
    q_rank: int  # width that queries are compressed to; 0 is not at all
    kv_rank: int  # width that keys and values are compressed to
    nope_dim: int  # of a query or key head, without position
    rope_dim: int  # of a query head, and of the one key that all heads share, with rope
    v_dim: int  # of a value head


@dataclasses.dataclass(frozen=True)
class MoE:
    """A mixture of experts in place of an MLP, see RoutedMLP."""
    n_expert: int
    n_used: int  # experts per token
    width: int  # of an expert, as n_inner is of an MLP
    shared_width: int = 0  # of an MLP that every token goes through besides; 0 is none
    layers: tuple = (True,)  # which layers have it; a shorter pattern repeats
    score: str = 'softmax'  # or 'sigmoid': what makes the router's logits the weights of the experts
    normalize: bool = True  # the weights of the chosen experts add up to 1
    scale: float = 1.0  # of the weights
    selection_bias: bool = False  # added to the scores when experts are chosen, not to their weights
    n_group: int = 1  # groups of experts, of which only
    n_group_used: int = 1  # the best ones are open to a token
    weigh_input: bool = False  # the weight multiplies an expert's input, not its output
    balance: float = 0.0  # weight of the load-balancing loss in training

    def __post_init__(self):
        object.__setattr__(self, 'layers', tuple(bool(x) for x in self.layers))
        if not 1 <= self.n_used <= self.n_expert:
            raise UserError(f'a token can use 1 to {self.n_expert} of {self.n_expert} experts, not {self.n_used}')
        if self.score not in ('softmax', 'sigmoid'):
            raise UserError(f"the experts' score must be softmax or sigmoid, not {self.score!r}")
        if self.n_expert % self.n_group or not 1 <= self.n_group_used <= self.n_group:
            raise UserError(f'{self.n_expert} experts cannot be {self.n_group} equal groups of which '
                            f'{self.n_group_used} are used')


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What the model is. The defaults are nanoGPT's GPT (GPT-2 124M with a padded vocabulary).

    Nested groups may be given as dicts, and tuples as lists: dataclasses.asdict() and JSON give them back.
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
    # how it is computed, which changes neither parameters nor, but for rounding, results; no checkpoint remembers it
    attention: str = 'xla'  # one of ATTENTION; a call with a cache or positions of its own is always 'xla'
    scan_layers: bool = False  # compile one block and loop over it, instead of n_layer blocks
    remat: str = 'none'  # one of REMAT
    # what newer models have instead, or besides
    tied_head: bool = True  # the head is the embedding; False: a matrix of its own
    norm: str = 'layer'  # one of NORMS
    position: str = 'learned'  # one of POSITIONS
    rope_theta: float = 10000.0  # the longest wavelength of rope is nearly 2 pi rope_theta positions
    rope_scaling: RopeScaling | None = None
    n_kv_head: int = 0  # heads of keys and values; 0 is n_head
    head_dim: int = 0  # 0 is n_embd / n_head
    attention_scale: float = 0.0  # of the scores; 0 is head_dim**-0.5
    qk_norm: str = ''  # 'learned': RMSNorm of queries and keys before rope; 'plain': without gain, where there is rope
    sinks: bool = False  # each head has a logit to which attention may go instead of to a key (arXiv:2309.17453)
    layer_types: tuple = ('full',)  # of LAYER_TYPES, one per layer; a shorter pattern repeats
    window: int = 0  # keys that a query sees in 'window' layers, its own included
    chunk: int = 0  # length of the chunks beyond which queries do not look in 'chunk' layers
    query_growth: float = 0.0  # 'nope' layers scale the query at position p by 1 + query_growth * ln(1 + floor((p + 1)
    query_growth_every: int = 8192  # / query_growth_every)), to keep attention sharp over long texts
    mlp: str = 'gelu'  # one of MLPS
    n_inner: int = 0  # MLP width; 0 is 4 n_embd
    swiglu_limit: float = 7.0  # of 'swiglu_clamped'
    mla: MLA | None = None
    moe: MoE | None = None

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def head_width(self):
        return self.head_dim or self.n_embd // self.n_head

    @property
    def mlp_width(self):
        return self.n_inner or 4 * self.n_embd

    def layer(self, i):
        """(kind of attention, whether the MLP is routed) of layer i."""
        routed = self.moe is not None and self.moe.layers[i % len(self.moe.layers)]
        return self.layer_types[i % len(self.layer_types)], routed

    def __post_init__(self):
        for name, group in (('rope_scaling', RopeScaling), ('mla', MLA), ('moe', MoE)):
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, group(**getattr(self, name)))
        object.__setattr__(self, 'layer_types', tuple(self.layer_types))
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'):
            if getattr(self, name) < 1:
                raise UserError(f'{name} must be at least 1, not {getattr(self, name)}')
        if self.n_embd % self.n_head and not self.head_dim and not self.mla:
            valid = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            raise UserError(f'n_head={self.n_head} does not divide n_embd={self.n_embd}; it may be one of {valid}')
        if not 0 <= self.dropout < 1:
            raise UserError(f'dropout must be in [0, 1), not {self.dropout}')
        for name, known in (('dtype', DTYPES), ('activation', ACTIVATIONS), ('attention', ATTENTION), ('remat', REMAT),
                            ('norm', NORMS), ('position', POSITIONS), ('mlp', MLPS), ('qk_norm', QK_NORMS)):
            if getattr(self, name) not in known:
                raise UserError(f'{name} must be one of {", ".join(known)}, not {getattr(self, name)!r}')
        if self.n_head % self.kv_heads:
            valid = [h for h in range(1, self.n_head + 1) if self.n_head % h == 0]
            raise UserError(f'n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}; one of {valid} does')
        if self.position == 'rope' and self.head_width % 2 and not self.mla:
            raise UserError(f'rope turns pairs: the width of a head must be even, not {self.head_width}')
        for kind in set(self.layer_types) or {''}:
            if kind not in LAYER_TYPES or (kind in ('window', 'chunk') and getattr(self, kind) < 1):
                raise UserError(f'layer_types has {kind!r}; it may have {", ".join(LAYER_TYPES)}, and window or chunk '
                                'with a size of at least 1')

        if self.attention != 'xla' and not self.plain_attention:
            raise UserError(f'attention={self.attention} does not compute windows, chunks, shared key heads, sinks or '
                            'latent attention: use attention=xla')
        if self.scan_layers and len(set(map(self.layer, range(self.n_layer)))) > 1:
            raise UserError('scan_layers needs layers that are all alike; these differ in layer_types or experts')

    @property
    def plain_attention(self):
        """Whether attention is that of GPT-2 in all layers, whatever the positions: any implementation computes it."""
        return not (self.mla or self.sinks or self.attention_scale or self.kv_heads != self.n_head
                    or {'window', 'chunk'} & set(self.layer_types))

    def architecture(self):
        """{name: value} of the fields that say what the model is, which GPTConfig(**...) reads."""
        how = ('attention', 'scan_layers', 'remat')
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in how}


# -----------------------------------------------------------------------------
# layers

def dropout_keys(module, row_B):
    """Row b draws from its own key, fold_in(key, row_B[b]): what a sequence sees does not depend on which micro-batch or
    device it sits in, so a run gives the same curve on 1 or 8 devices."""
    return jax.vmap(jax.random.fold_in, (None, 0))(module.make_rng('dropout'), row_B)


def dropout(module, x, rate, row_B, deterministic=False):
    """drop() with a key for each row of x [B, ...], see dropout_keys(). deterministic: x as it is."""
    if deterministic or rate == 0:
        return x
    return drop(x, rate, dropout_keys(module, row_B), element_numbers(x.shape[1:]))


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


class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv:1910.07467); statistics in float32."""
    config: GPTConfig
    eps: float | None = None  # norm_eps, if not given

    @nn.compact
    def __call__(self, x):
        scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
        return (rms_normalize(x, self.eps or self.config.norm_eps) * scale).astype(self.config.dtype)


def norm(config, name):
    return (RMSNorm if config.norm == 'rms' else LayerNorm)(config, name=name)


class Dense(nn.Module):
    """x [..., in] -> x @ kernel + bias [..., features], in the config's dtype. Several `features` are the widths of as
    many results, side by side in one kernel. See quantize_params for the int8 kernel."""
    config: GPTConfig
    features: int | tuple
    init_std: float = INIT_STD
    cut: tuple = COLUMNS

    @nn.compact
    def __call__(self, x):
        cfg, widths = self.config, self.features if isinstance(self.features, tuple) else (self.features,)
        n_ranks = current_mesh().shape['tensor'] if current_mesh() and self.cut == COLUMNS else 1
        if self.has_variable('params', 'kernel_int8'):
            n_ranks = 1
            kernel, scale = (self.get_variable('params', name) for name in ('kernel_int8', 'kernel_scale'))
            y = matmul_int8(x, kernel, scale).astype(cfg.dtype)
        elif self.has_variable('params', 'kernel_rows'):  # see decoding_params
            y = matmul_rows(x, self.get_variable('params', 'kernel_rows')).astype(cfg.dtype)
        else:
            kernel = self.param('kernel', nn.initializers.normal(self.init_std), (x.shape[-1], sum(widths)))
            y = matmul(x, by_rank(kernel, widths, n_ranks), False, None, self.cut)
        if self.cut == ROWS:  # each rank has multiplied its inputs, which gives a term of the sum
            with jax.named_scope('all_reduce'):
                y = shard(y, BATCH, *[None] * (y.ndim - 1))
        if cfg.bias:
            bias = self.param('bias', nn.initializers.zeros, (sum(widths),))
            y = add_bias(y, by_rank(bias, widths, n_ranks))
        y = checkpoint_name(y, 'dense')
        if not isinstance(self.features, tuple):
            return y
        parts = jnp.split(y.reshape(*y.shape[:-1], n_ranks, -1), np.cumsum(widths)[:-1] // n_ranks, axis=-1)
        return [part.reshape(*y.shape[:-1], width) for part, width in zip(parts, widths)]


def by_rank(x, widths, n_ranks):
    """Columns in the order q q k k v v, of `widths`, to q k v q k v: equal parts have the columns of whole heads."""
    if n_ranks == 1 or len(widths) == 1:
        return x
    parts = jnp.split(x, np.cumsum(widths)[:-1], axis=-1)
    return jnp.concatenate([part.reshape(*x.shape[:-1], n_ranks, -1) for part in parts], axis=-1).reshape(x.shape)


def look_back(config, kind):
    """Positions that a query sees in a layer of this kind, its own included, at most."""
    return {'window': config.window, 'chunk': config.chunk}.get(kind, config.block_size)


def visible(config, kind, key_position_BxS, position_BxT):
    """Which keys a query sees [B, T, S]: those at its own position and before, in its window or chunk."""
    key, query = key_position_BxS[:, None, :], position_BxT[:, :, None]
    seen = key <= query
    if kind == 'window':
        seen &= key > query - config.window
    if kind == 'chunk':
        seen &= key // config.chunk == query // config.chunk
    return seen


def extend(config, kind, cache, fresh, position_BxT):
    """Adds the keys and values of this call, fresh {name: [B, T, G, K]}, to a layer's cache. Returns (what the queries
    attend to, {name: [B, S, G, K]}; the positions of that, [B, S]; the new cache)."""
    if cache is None:
        return fresh, position_BxT, None
    if kind in ('window', 'chunk'):
        return extend_ring(config, kind, cache, fresh, position_BxT)
    cache = write_cache(cache, fresh, position_BxT)
    keys = read_cache(cache, config.dtype)
    return keys, jnp.arange(next(iter(keys.values())).shape[1])[None], cache  # no query sees a slot that is behind it


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a query sees the keys at its own position and before."""
    config: GPTConfig
    kind: str = 'full'  # one of LAYER_TYPES

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT, *, cache=None, causal=False, deterministic=True, row_B=None):
        """causal: the positions are 0 .. T-1 and there is no cache, so that any implementation of attention will do."""
        cfg = self.config
        B, T, D = x_BxTxD.shape
        H, G, K = cfg.n_head, cfg.kv_heads, cfg.head_width

        q_BxTxHxK, k_BxTxGxK, v_BxTxGxK = (
            a.reshape(B, T, -1, K) for a in Dense(cfg, (H * K, G * K, G * K), name='c_attn')(x_BxTxD))
        if cfg.qk_norm == 'learned':
            q_BxTxHxK, k_BxTxGxK = RMSNorm(cfg, name='q_norm')(q_BxTxHxK), RMSNorm(cfg, name='k_norm')(k_BxTxGxK)
        if cfg.position == 'rope':
            q_BxTxHxK, k_BxTxGxK = place(cfg, self.kind, q_BxTxHxK, k_BxTxGxK, position_BxT)
        keys, key_position_BxS, cache = extend(cfg, self.kind, cache, {'k': k_BxTxGxK, 'v': v_BxTxGxK}, position_BxT)
        drops = cfg.dropout > 0 and not deterministic
        key_B = dropout_keys(self, row_B) if drops else None

        def drop_probs(probs_BxGxTQxS, key_B=key_B, queries=slice(None)):
            if not drops:
                return probs_BxGxTQxS
            number = element_numbers((G, T * H // G, keys['k'].shape[1]))[:, queries, :probs_BxGxTQxS.shape[-1]]
            return drop(probs_BxGxTQxS, cfg.dropout, key_B, number)

        if causal and cfg.attention == 'chunked':
            y_BxTxHxK = attend_in_chunks(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, drop_probs, key_B)
        elif causal and cfg.attention == 'cudnn':
            if drops:
                raise UserError('cuDNN has no dropout in its attention: use attention=xla or chunked, or dropout=0')
            y_BxTxHxK = jax.nn.dot_product_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, is_causal=True, implementation='cudnn')
        else:
            sinks_H = self.param('sinks', nn.initializers.zeros, (H,)) if cfg.sinks else None
            seen_BxTxS = visible(cfg, self.kind, key_position_BxS, position_BxT)
            y_BxTxHxK = attend(q_BxTxHxK, keys['k'], keys['v'], seen_BxTxS, drop_probs, cfg.attention_scale, sinks_H)

        y_BxTxD = Dense(cfg, D, INIT_STD / (2 * cfg.n_layer)**0.5, ROWS, name='c_proj')(y_BxTxHxK.reshape(B, T, H * K))
        return dropout(self, y_BxTxD, cfg.dropout, row_B, deterministic), cache


def mlp_hidden(config, dense, x):
    """What an MLP computes before its last layer, c_proj. dense(name, x) are its layers."""
    up = dense('c_fc', x)
    if config.mlp == 'gelu':
        return jax.checkpoint(gelu, static_argnums=1)(up, config.activation == 'gelu_tanh')
    gate = dense('c_gate', x)
    if config.mlp == 'swiglu':
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, config.swiglu_limit), jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


class MLP(nn.Module):
    config: GPTConfig
    width: int

    @nn.compact
    def __call__(self, x_BxTxD, *, deterministic=True, row_B=None):
        cfg = self.config
        h_BxTxF = mlp_hidden(cfg, lambda name, x: Dense(cfg, self.width, name=name)(x), x_BxTxD)
        y_BxTxD = Dense(cfg, cfg.n_embd, INIT_STD / (2 * cfg.n_layer)**0.5, ROWS, name='c_proj')(h_BxTxF)
        return dropout(self, y_BxTxD, cfg.dropout, row_B, deterministic)


class Block(nn.Module):
    config: GPTConfig
    kind: str = 'full'  # one of LAYER_TYPES
    routed: bool = False  # a mixture of experts in place of the MLP

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT, *, cache=None, causal=False, deterministic=True, row_B=None):
        cfg, how = self.config, dict(deterministic=deterministic, row_B=row_B)
        attention = LatentAttention if cfg.mla else CausalSelfAttention
        mlp = RoutedMLP(cfg, name='mlp') if self.routed else MLP(cfg, cfg.mlp_width, name='mlp')
        y_BxTxD, cache = attention(cfg, self.kind, name='attn')(
            norm(cfg, 'ln_1')(x_BxTxD), position_BxT, cache=cache, causal=causal, **how)
        x_BxTxD += y_BxTxD
        x_BxTxD += mlp(norm(cfg, 'ln_2')(x_BxTxD), **how)
        return x_BxTxD, cache


# -----------------------------------------------------------------------------
# what GPT-2 does not have: rope, layers with a window, latent attention, experts

def rope(config, x_BxTxHxK, position_BxT):
    """Turns the pairs (x_j, x_{j + K/2}) by position * frequency_j (arXiv:2104.09864), in float32."""
    frequencies = rope_frequencies(config.rope_theta, x_BxTxHxK.shape[-1], config.rope_scaling)
    angle_BxTx1xJ = position_BxT[..., None, None] * jnp.asarray(frequencies, jnp.float32)
    amplitude = config.rope_scaling.amplitude if config.rope_scaling else 1.0
    cos, sin = amplitude * jnp.cos(angle_BxTx1xJ), amplitude * jnp.sin(angle_BxTx1xJ)
    a, b = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxTxHxK.dtype)


def place(config, kind, q_BxTxHxK, k_BxTxGxK, position_BxT):
    """Queries and keys with their positions in them; those of 'nope' layers know no position, see query_growth."""
    if kind == 'nope':
        growth_BxT = jnp.log1p((position_BxT + 1) // config.query_growth_every)
        return (q_BxTxHxK * (1 + config.query_growth * growth_BxT)[..., None, None]).astype(q_BxTxHxK.dtype), k_BxTxGxK
    q_BxTxHxK, k_BxTxGxK = (rope(config, x, position_BxT) for x in (q_BxTxHxK, k_BxTxGxK))
    if config.qk_norm == 'plain':
        return (rms_normalize(x, config.norm_eps).astype(x.dtype) for x in (q_BxTxHxK, k_BxTxGxK))
    return q_BxTxHxK, k_BxTxGxK


def extend_ring(config, kind, cache, fresh, position_BxT):
    """extend() for a layer that looks back no further than n positions, with n slots or some more: the token at position
    p is in slot p % S, until a later one needs that."""
    (B, T), n = fresh[next(iter(fresh))].shape[:2], look_back(config, kind)
    position_BxT = jnp.broadcast_to(position_BxT, (B, T))
    slot_S = jnp.arange(cache[next(iter(fresh))].shape[2])
    S = len(slot_S)
    # the latest position of a slot, where the last token is at `last`; one before the beginning is none
    held = lambda last_Bx1: (lambda p: jnp.where(p < 0, PAD, p))(last_Bx1 - (last_Bx1 - slot_S) % S)
    last_Bx1 = jnp.where(position_BxT < PAD, position_BxT, -1).max(1, keepdims=True)
    stays_BxT = (position_BxT < PAD) & (position_BxT > last_Bx1 - S)
    new = write_cache(cache, fresh, jnp.where(stays_BxT, position_BxT % S, S))
    if T - 1 + n <= S or S < n:
        return read_cache(new, config.dtype), held(last_Bx1), new
    # a slot that is taken now may hold what an earlier query of this call sees
    keys = {name: jnp.concatenate([x, fresh[name]], axis=1) for name, x in read_cache(cache, config.dtype).items()}
    return keys, jnp.concatenate([held(position_BxT[:, :1] - 1), position_BxT], axis=1), new


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made from one
    narrow vector per token, the latent; one more, with rope, is a part of every head's key. The cache holds these two
    and nothing else."""
    config: GPTConfig
    kind: str = 'full'

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT, *, cache=None, causal=False, deterministic=True, row_B=None):
        cfg, mla, H = self.config, self.config.mla, self.config.n_head
        B, T, D = x_BxTxD.shape
        drop = lambda x: dropout(self, x, cfg.dropout, row_B, deterministic)
        c_BxTxD = x_BxTxD
        if mla.q_rank:
            c_BxTxD = RMSNorm(cfg, 1e-6, name='q_norm')(Dense(cfg, mla.q_rank, cut=(), name='q_a')(x_BxTxD))
        q_BxTxHxK = Dense(cfg, H * (mla.nope_dim + mla.rope_dim), name='q_b')(c_BxTxD).reshape(B, T, H, -1)
        qn_BxTxHxK, qr_BxTxHxK = jnp.split(q_BxTxHxK, [mla.nope_dim], axis=-1)
        qr_BxTxHxK = rope(cfg, qr_BxTxHxK, position_BxT)
        latent_BxTxC, kr_BxTxK = jnp.split(
            Dense(cfg, mla.kv_rank + mla.rope_dim, cut=(), name='kv_a')(x_BxTxD), [mla.kv_rank], axis=-1)
        latent_BxTxC = RMSNorm(cfg, 1e-6, name='kv_norm')(latent_BxTxC)
        kr_BxTx1xK = rope(cfg, kr_BxTxK[:, :, None], position_BxT)
        keys, key_position_BxS, cache = extend(
            cfg, self.kind, cache, {'latent': latent_BxTxC[:, :, None], 'rope': kr_BxTx1xK}, position_BxT)
        latent_BxSx1xC, kr_BxSx1xK = keys['latent'], keys['rope']

        w_CxHxK = self.param('kv_b', nn.initializers.normal(INIT_STD), (mla.kv_rank, H * (mla.nope_dim + mla.v_dim)))
        wk_CxHxK, wv_CxHxK = jnp.split(w_CxHxK.astype(cfg.dtype).reshape(mla.kv_rank, H, -1), [mla.nope_dim], axis=-1)
        seen_BxTxS = visible(cfg, self.kind, key_position_BxS, position_BxT)
        scale = cfg.attention_scale or (mla.nope_dim + mla.rope_dim)**-0.5
        # Keys and values of all heads from the latents: S C H (nope + v) multiplications, then T S H (nope + v) and
        # some. Or, for few queries, as if the latents were the keys and values of one head: T S H 2 C.
        if T * (2 * mla.kv_rank - mla.nope_dim - mla.v_dim) < mla.kv_rank * (mla.nope_dim + mla.v_dim):
            q_BxTxHxC = jnp.concatenate([jnp.einsum('bthk,chk->bthc', qn_BxTxHxK, wk_CxHxK), qr_BxTxHxK], axis=-1)
            k_BxSx1xC = jnp.concatenate([latent_BxSx1xC, kr_BxSx1xK], axis=-1)
            y_BxTxHxC = attend(q_BxTxHxC, k_BxSx1xC, latent_BxSx1xC, seen_BxTxS, drop, scale)
            y_BxTxHxK = jnp.einsum('bthc,chk->bthk', y_BxTxHxC, wv_CxHxK)
        else:
            latent_BxSxC = latent_BxSx1xC[:, :, 0]
            k_BxSxHxK = jnp.einsum('bsc,chk->bshk', latent_BxSxC, wk_CxHxK)
            kr_BxSxHxK = jnp.broadcast_to(kr_BxSx1xK, (*k_BxSxHxK.shape[:3], mla.rope_dim))
            y_BxTxHxK = attend(jnp.concatenate([qn_BxTxHxK, qr_BxTxHxK], axis=-1),
                               jnp.concatenate([k_BxSxHxK, kr_BxSxHxK], axis=-1),
                               jnp.einsum('bsc,chk->bshk', latent_BxSxC, wv_CxHxK), seen_BxTxS, drop, scale)
        y_BxTxD = Dense(cfg, D, INIT_STD / (2 * cfg.n_layer)**0.5, ROWS, name='c_proj')(y_BxTxHxK.reshape(B, T, -1))
        return drop(y_BxTxD), cache


class Router(nn.Module):
    """x [B, T, D] -> the experts of each token and their weights, [P, n_used]; in float32."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD):
        cfg, moe = self.config, self.config.moe
        (B, T, D), E = x_BxTxD.shape, moe.n_expert
        x_PxD, P = x_BxTxD.reshape(-1, D), B * T
        kernel = self.param('kernel', nn.initializers.normal(INIT_STD), (D, E))
        logits_PxE = x_PxD.astype(jnp.float32) @ kernel.astype(jnp.float32)
        if cfg.bias:
            logits_PxE += self.param('bias', nn.initializers.zeros, (E,))
        score_PxE = jax.nn.softmax(logits_PxE) if moe.score == 'softmax' else jax.nn.sigmoid(logits_PxE)
        rank_PxE = score_PxE
        if moe.selection_bias:
            rank_PxE += self.param('selection_bias', nn.initializers.zeros, (E,))
        if moe.n_group > 1:  # a group is as good as its two best experts together
            rank_PxGxE = rank_PxE.reshape(P, moe.n_group, -1)
            _, best = jax.lax.top_k(jax.lax.top_k(rank_PxGxE, 2)[0].sum(-1), moe.n_group_used)
            open_PxG = jax.nn.one_hot(best, moe.n_group, dtype=bool).any(1)
            rank_PxE = jnp.where(open_PxG[..., None], rank_PxGxE, -jnp.inf).reshape(P, E)
        _, expert_PxU = jax.lax.top_k(rank_PxE, moe.n_used)
        weight_PxU = jnp.take_along_axis(score_PxE, expert_PxU, axis=-1)
        if moe.normalize:
            weight_PxU /= weight_PxU.sum(-1, keepdims=True) + 1e-20

        # Switch's loss (arXiv:2101.03961): share of the tokens times mean score, 1 if all experts get the same of both. By
        # sequence, as DeepSeek-V3's (arXiv:2412.19437): over the batch it would depend on how devices share that out.
        share_BxE = jax.nn.one_hot(expert_PxU, E).reshape(B, -1, E).mean(1)
        mean_BxE = (score_PxE / score_PxE.sum(-1, keepdims=True)).reshape(B, -1, E).mean(1)
        self.sow('losses', 'balance', moe.balance * E * (share_BxE * mean_BxE).sum(-1).mean())
        return expert_PxU, weight_PxU * moe.scale


class ExpertDense(nn.Module):
    """The parameters of a Dense layer of every expert: kernel [E, in, out], and bias [E, out]."""
    config: GPTConfig
    shape: tuple  # (in, out)
    init_std: float = INIT_STD

    @nn.compact
    def __call__(self):
        E, (n_in, n_out) = self.config.moe.n_expert, self.shape
        if self.has_variable('params', 'kernel_int8'):  # see quantize_params
            params = {name: self.get_variable('params', name) for name in ('kernel_int8', 'kernel_scale')}
        else:
            params = {'kernel': self.param('kernel', nn.initializers.normal(self.init_std), (E, n_in, n_out))}
        if self.config.bias:
            params['bias'] = self.param('bias', nn.initializers.zeros, (E, n_out))
        return params


class RoutedMLP(nn.Module):
    """A mixture of experts: a router sends each token through n_used of n_expert MLPs; no token is dropped."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, *, deterministic=True, row_B=None):
        cfg, moe = self.config, self.config.moe
        D = cfg.n_embd
        x_PxD, choice = x_BxTxD.reshape(-1, D), Router(cfg, name='router')(x_BxTxD)
        names = ('c_fc', 'c_proj') if cfg.mlp == 'gelu' else ('c_gate', 'c_fc', 'c_proj')
        weights = {name: ExpertDense(cfg, (D, moe.width), name=f'experts_{name}')() for name in names[:-1]}
        weights['c_proj'] = ExpertDense(cfg, (moe.width, D), INIT_STD / (2 * cfg.n_layer)**0.5, name='experts_c_proj')()

        def expert(weights, x_bxD):
            def dense(name, x):
                w = weights[name]
                if 'kernel_int8' in w:
                    y = matmul_int8(x, w['kernel_int8'], w['kernel_scale']).astype(cfg.dtype)
                else:
                    y = x @ w['kernel'].astype(cfg.dtype)
                return y + w['bias'].astype(cfg.dtype) if cfg.bias else y
            return dense('c_proj', mlp_hidden(cfg, dense, x_bxD))

        def mix(weights, first, x_PxD, expert_PxU, weight_PxU):
            weight_PxUx1 = weight_PxU[..., None]
            x_PxUxD = jnp.broadcast_to(x_PxD[:, None], (*expert_PxU.shape, D))
            if moe.weigh_input:
                x_PxUxD, weight_PxUx1 = (x_PxUxD * weight_PxUx1).astype(cfg.dtype), 1
            y_PxUxD = through_experts(expert, weights, x_PxUxD.reshape(-1, D), expert_PxU.ravel() - first)
            return (y_PxUxD.reshape(x_PxUxD.shape) * weight_PxUx1).sum(1)

        y_BxTxD = share_experts(mix, weights, x_PxD, *choice).astype(cfg.dtype).reshape(x_BxTxD.shape)
        if moe.shared_width:
            y_BxTxD += MLP(cfg, moe.shared_width, name='shared')(x_BxTxD)
        return dropout(self, y_BxTxD, cfg.dropout, row_B, deterministic)


# -----------------------------------------------------------------------------
# the whole

class GPT(nn.Module):
    """GPT(config).apply({'params': params}, idx_BxT) -> float32 logits [B, T, vocab_size]."""
    config: GPTConfig

    @nn.compact
    def __call__(self, idx_BxT, *, deterministic=True, row_B=None, position_BxT=None, cache=None, at_B=None,
                 targets_BxT=None, loss=None, loss_chunk=0):
        """Logits of the token after each position.

        deterministic: False turns dropout on; it needs rngs={'dropout': key}.
        row_B: the number by which dropout knows each sequence; 0, 1, 2, ... if not given.
        position_BxT: where the tokens stand in their sequence; 0 .. T-1 if not given. PAD marks padding.
        cache: from init_cache(). The T tokens go into it, and (logits, cache) is returned.
        at_B: compute logits for this one index into T of each sequence only, [B, 1, vocab_size].
        targets_BxT, loss, loss_chunk: return loss(logits, targets), [B, T], instead of the logits, which only ever exist
        for loss_chunk positions at a time (0: all)."""
        cfg = self.config
        B, T = idx_BxT.shape
        if T > cfg.block_size:
            raise ValueError(f'{T} tokens do not fit in block_size {cfg.block_size}')
        if row_B is None:
            row_B = jnp.arange(B)
        causal = position_BxT is None and cache is None
        if position_BxT is None:
            position_BxT = jnp.arange(T)[None]

        def table(name, n, cut=ROWS):
            """(matrix [n, D], None), or, see quantize_params, (int8 matrix [n, D], scale [n])."""
            if self.has_variable('params', f'{name}_int8'):
                return tuple(self.get_variable('params', f'{name}_{part}') for part in ('int8', 'scale'))
            return gather(self.param(name, nn.initializers.normal(INIT_STD), (n, cfg.n_embd)), cfg.dtype, cut), None

        wte_VxD, scale_V = table('wte', cfg.vocab_size)
        if scale_V is None:
            x_BxTxD = embed(wte_VxD, idx_BxT).astype(cfg.dtype)
        else:
            x_BxTxD = jnp.take(wte_VxD, idx_BxT, axis=0, mode='clip').astype(cfg.dtype)
            x_BxTxD *= jnp.take(scale_V, idx_BxT, mode='clip')[..., None].astype(cfg.dtype)
        if cfg.position == 'learned':
            wpe_PxD, _ = table('wpe', cfg.block_size, ((None, 'fsdp'), (None, None)))
            x_BxTxD += jnp.take(wpe_PxD, position_BxT, axis=0, mode='clip').astype(cfg.dtype)
        x_BxTxD = dropout(self, x_BxTxD, cfg.dropout, row_B, deterministic)
        how = dict(causal=causal, deterministic=deterministic, row_B=row_B)
        layers = {}
        if cfg.scan_layers and cache is None and not self.is_initializing():
            x_BxTxD = self.scan_blocks(x_BxTxD, position_BxT, how)
        else:
            for i in range(cfg.n_layer):
                name = f'h_{i}'
                run = lambda block, x: block(x, position_BxT, cache=cache and cache[name], **how)
                if cfg.remat != 'none' and cache is None:
                    run = nn.remat(run, policy=remat_policy(cfg.remat))
                x_BxTxD, layers[name] = run(Block(cfg, *cfg.layer(i), name=name), x_BxTxD)
        x_BxTxD = norm(cfg, 'ln_f')(x_BxTxD)
        head_VxD, scale_V = (wte_VxD, scale_V) if cfg.tied_head else table('lm_head', cfg.vocab_size)
        if targets_BxT is not None:
            return map_chunks(lambda x, targets: loss(head(x, head_VxD), targets), loss_chunk, x_BxTxD, targets_BxT)
        if at_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, at_B[:, None, None], axis=1)
        # as head(), but without its transpose of the table for large bfloat16 products: here may be a single token
        logits_BxTxV = matmul_rows(x_BxTxD, head_VxD) if scale_V is None else matmul_int8(x_BxTxD, head_VxD, scale_V)
        logits_BxTxV = shard(logits_BxTxV, BATCH, None, 'tensor')
        return logits_BxTxV if cache is None else (logits_BxTxV, layers)

    def scan_blocks(self, x_BxTxD, position_BxT, how):
        """All blocks as one loop over their parameters, which are stacked for it in every call: h_0, h_1, ... stay apart in
        the state and on disk."""
        cfg = self.config
        blocks = [self.variables['params'][f'h_{i}'] for i in range(cfg.n_layer)]
        key = self.make_rng('dropout') if self.has_rng('dropout') else None

        def block(x, layer):
            params, i = layer
            rngs = None if key is None else {'dropout': jax.random.fold_in(key, i)}
            (x, _), sown = Block(cfg, *cfg.layer(0), parent=None).apply(
                {'params': params}, x, position_BxT, rngs=rngs, mutable=['losses'], **how)
            return x, sum(jax.tree.leaves(sown), jnp.float32(0))

        if cfg.remat != 'none':
            block = jax.checkpoint(block, policy=remat_policy(cfg.remat), prevent_cse=False)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        x_BxTxD, losses = jax.lax.scan(block, x_BxTxD, (stacked, jnp.arange(cfg.n_layer)))
        self.sow('losses', 'balance', losses.sum())
        return x_BxTxD


def remat_policy(remat):
    """What is kept for the gradients."""
    policies = jax.checkpoint_policies
    return {'dots': policies.save_only_these_names('dense'), 'full': policies.nothing_saveable}[remat]


# -----------------------------------------------------------------------------
# parameters and training state

class TrainState(train_state.TrainState):
    """flax's TrainState (step, params, opt_state, tx) and what float16 needs to keep its gradients representable."""
    loss_scale: Any = None  # {'scale': float32, 'good_steps': int32}, or None where nothing is scaled


def create_train_state(rng, config, tx):
    """Freshly initialised float32 parameters and the state of the optax optimizer `tx` for them."""
    model = GPT(config)
    params = jax.jit(model.init)(rng, jnp.zeros((1, 1), jnp.int32))['params']
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, loss_scale=initial_loss_scale(config.dtype))
    # flax's own 0 is of a weaker type than what a step returns: steps would be compiled twice
    return state.replace(step=jnp.int32(0))


def initial_loss_scale(dtype):
    """For float16, the 2**16 that torch.amp.GradScaler starts with; None where nothing is scaled."""
    return {'scale': jnp.float32(2**16), 'good_steps': jnp.int32(0)} if dtype == 'float16' else None


def count_params(params, non_embedding=True):
    """Number of parameters. As in nanoGPT, non_embedding leaves out the position table; the token table counts, unless
    the head is another matrix."""
    total = sum(x.size for x in jax.tree.leaves(params))
    tables = ('wpe', 'wte') if 'lm_head' in params else ('wpe',)
    return total - sum(params[name].size for name in tables if name in params) if non_embedding else total


def estimate_mfu(n_params, config, tokens_per_sec, peak_flops):
    """Model FLOPs utilization: the share of `peak_flops` (FLOP/s of all devices together) that the training achieves.

    6 FLOPs per parameter and token, forward and backward, plus attention's 12 L H K T (PaLM, arXiv:2204.02311,
    appendix B), T being the window where that is shorter. n_params is count_params(params); the experts that a token
    does not use are left out."""
    kinds, routed = zip(*map(config.layer, range(config.n_layer)))
    if moe := config.moe:
        matrices = 2 if config.mlp == 'gelu' else 3
        n_params -= sum(routed) * (moe.n_expert - moe.n_used) * matrices * config.n_embd * moe.width
    seen = sum(min(config.block_size, look_back(config, kind)) for kind in kinds)
    width = (config.mla.nope_dim + config.mla.rope_dim + config.mla.v_dim) / 2 if config.mla else config.head_width
    flops_per_token = 6 * n_params + 12 * config.n_head * width * seen
    return flops_per_token * tokens_per_sec / peak_flops


# -----------------------------------------------------------------------------
# generation: prefill the KV cache with the prompts, then one compiled loop of one token per step

def decoding_params(params, dtype, quantize=''):
    """The parameters as decoding wants them: matrices in `dtype`, or int8 where quantize is 'int8'; on one CPU device
    float32 kernels become rows, see rows_first. Empties the dict `params` block by block on the way, so that memory need
    not hold the model twice."""
    if quantize not in ('', 'int8'):
        raise UserError(f"quantize must be int8 or '' (off), not {quantize!r}")

    def convert(part):
        part = cast_matrices(quantize_params(part) if quantize else part, dtype)
        devices = jnp.asarray(jax.tree.leaves(part)[0]).devices()
        flip = dtype == 'float32' and [device.platform for device in devices] == ['cpu']
        return rows_first(part) if flip else part

    converted = {}
    for name in list(params):  # waiting for each, or the old blocks would all be kept until their turn
        converted |= jax.block_until_ready(convert({name: params.pop(name)}))
    return converted


def weight_bytes(params):
    """Bytes of weights that a step of decoding must read: all, but for tables of which it looks up rows (and though it
    does not read the experts that no token uses)."""
    tables = ('wpe', 'wte', 'wte_int8') if {'lm_head', 'lm_head_int8'} & params.keys() else ('wpe',)
    return sum(p.nbytes for name, part in params.items() if name not in tables for p in jax.tree.leaves(part))


PAD = 2**30  # position of a token that is none: behind every query, and no slot is for it


def cached(config):
    """{name: (heads, width)} of what a layer keeps of a token."""
    if config.mla:
        return {'latent': (1, config.mla.kv_rank), 'rope': (1, config.mla.rope_dim)}
    return {name: (config.kv_heads, config.head_width) for name in ('k', 'v')}


def cache_bytes(config, n_positions, dtype='auto'):
    """Bytes that the cache keeps of one sequence of n_positions."""
    itemsize = CACHE_DTYPES[config.dtype if dtype == 'auto' else dtype].dtype.itemsize
    per_token = sum(heads * (width * itemsize + 4 * (itemsize == 1)) for heads, width in cached(config).values())
    return per_token * sum(min(n_positions, look_back(config, config.layer(i)[0])) for i in range(config.n_layer))


def init_cache(config, batch_size, n_slots, dtype='auto', n_draft=0):
    """An empty KV cache: the token at position p of its sequence has slot p. Prompts of different lengths, padded on the
    right, therefore need no bookkeeping: the padding is in slots that no query sees before a token replaces it. Layers
    that do not look back so far have fewer slots, see extend_ring; they cannot take padding that is not marked as PAD.

    Heads come before slots, [B, G, S, K], as attention's products want them: with slots first XLA:CPU transposed the
    whole cache in every step. dtype: one of CACHE_DTYPES, or 'auto' for the config's; int8 and float8 have a scale per
    vector. n_draft: tokens that are fed beyond a row's last one and may have to be fed anew."""
    dtype = CACHE_DTYPES[config.dtype if dtype == 'auto' else dtype]

    def layer(kind):
        ring, arrays = kind in ('window', 'chunk'), {}
        n = min(look_back(config, kind), n_slots) + n_draft if ring else n_slots
        for name, (heads, width) in cached(config).items():
            arrays[name] = jnp.zeros((batch_size, heads, n, width), dtype)
            if dtype.dtype.itemsize == 1:
                arrays[f'{name}_scale'] = jnp.zeros((batch_size, heads, n), jnp.float32)
        heads = None if config.mla else 'tensor'  # a device of a mesh keeps its own heads; all share the latents
        return {name: shard(x, None, heads, *[None] * (x.ndim - 2)) for name, x in arrays.items()}

    return {f'h_{i}': layer(config.layer(i)[0]) for i in range(config.n_layer)}


@functools.partial(jax.jit, donate_argnames='state', static_argnames=(
    'config', 'sampling', 'width', 'n_slots', 'cache_dtype', 'n_draft', 'draft_config'))
def prefill(params, draft_params, state, knobs, *, config, sampling, width, n_slots, cache_dtype, n_draft, draft_config):
    """Fills a new cache of n_slots with the prompts, which end before column `width`, and generates the first token."""
    idx_BxT = state.tokens_BxN[:, :width]
    position_BxT = jnp.where(jnp.arange(width) < state.length_B[:, None], jnp.arange(width), PAD)
    fill = lambda params, config: GPT(config).apply(
        {'params': params}, idx_BxT, position_BxT=position_BxT, at_B=state.length_B - 1,
        cache=init_cache(config, len(idx_BxT), n_slots, cache_dtype, n_draft))
    logits_Bx1xV, cache = fill(params, config)
    state = state.replace(cache=cache, draft_cache=draft_config and fill(draft_params, draft_config)[1])
    return append_token(state, logits_Bx1xV[:, 0], ~state.done_B, sampling, knobs)[0]


def ask_draft(params, state, n_draft, config, sampling, knobs):
    """Drafts [B, n_draft] by a smaller model, one token after the other. It draws with the random numbers that the model
    will draw with, so both pick the same token wherever they agree. Returns (drafts, state with its cache)."""
    model, drafts = GPT(config), []
    # The token before the last one is fed again: where all drafts were accepted it is new to the draft's cache.
    position_BxT = jnp.maximum(state.length_B[:, None] - jnp.array([2, 1]), 0)
    idx_BxT, cache = jnp.take_along_axis(state.tokens_BxN, position_BxT, axis=1), state.draft_cache
    for n in range(n_draft):
        logits_BxTxV, cache = model.apply({'params': params}, idx_BxT, position_BxT=position_BxT, cache=cache)
        key_B = jax.vmap(jax.random.fold_in)(state.key_B, state.n_B + n)
        drafts.append(pick_token(logits_BxTxV[:, -1], key_B, sampling, knobs).astype(jnp.int32))
        idx_BxT, position_BxT = drafts[-1][:, None], state.length_B[:, None] + n
    return jnp.stack(drafts, axis=1), state.replace(draft_cache=cache)


@functools.partial(jax.jit, static_argnames=('config', 'sampling', 'n_draft', 'draft_config'), donate_argnames='state')
def decode(params, draft_params, state, knobs, n_end, *, config, sampling, n_draft, draft_config):
    """Generates until every row has n_end new tokens or is done. A step feeds each row's last token through the cache;
    where the state has no cache, the last block_size tokens anew, which is what nanoGPT does for every token.

    n_draft: so many tokens are guessed and fed along (speculative decoding, arXiv:2211.17192). The model's own choice,
    made with the same random numbers as without drafts, tells how many were right; it is kept, with one token more.
    The result is therefore that of n_draft=0, in fewer steps."""
    model, window = GPT(config), config.block_size

    def step(state):
        state = state.replace(steps=state.steps + 1)
        live_B = ~state.done_B & (state.n_B < n_end)
        if state.cache is None:
            start_B = jnp.maximum(state.length_B - window, 0)
            cut = lambda row, start: jax.lax.dynamic_slice(row, (start,), (window,))
            logits_Bx1xV = model.apply({'params': params}, jax.vmap(cut)(state.tokens_BxN, start_B),
                                       at_B=state.length_B - start_B - 1)
            return append_token(state, logits_Bx1xV[:, 0], live_B, sampling, knobs)[0]

        idx_BxT = jnp.take_along_axis(state.tokens_BxN, state.length_B[:, None] - 1, axis=1)
        if n_draft:
            if draft_config:
                drafts_BxJ, state = ask_draft(draft_params, state, n_draft, draft_config, sampling, knobs)
            else:
                drafts_BxJ = jax.vmap(look_up, (0, 0, None))(state.tokens_BxN, state.length_B, n_draft)
            idx_BxT = jnp.concatenate([idx_BxT, drafts_BxJ], axis=1)
            usable_B = jnp.minimum(n_draft, n_end - state.n_B - 1)
            state = state.replace(drafted=state.drafted + jnp.where(live_B, usable_B, 0).sum())
        position_BxT = state.length_B[:, None] - 1 + jnp.arange(1 + n_draft)
        logits_BxTxV, cache = model.apply({'params': params}, idx_BxT, position_BxT=position_BxT, cache=state.cache)
        state = state.replace(cache=cache)
        for t in range(1 + n_draft):
            state, token_B = append_token(state, logits_BxTxV[:, t], live_B, sampling, knobs)
            if t < n_draft:  # the next logits hold for a row only if its draft was what the model chose
                live_B &= (token_B == drafts_BxJ[:, t]) & (state.n_B < n_end)
                state = state.replace(accepted=state.accepted + live_B.sum())
                live_B &= ~state.done_B
        return state

    return jax.lax.while_loop(lambda state: (~state.done_B & (state.n_B < n_end)).any(), step, state)


def generate(params, config, idx_BxT, max_new_tokens, **how):
    """Continues each prompt by max_new_tokens tokens and returns all tokens, int32 [B, T + max_new_tokens]; what follows
    a row's last token is 0. See generate_in_chunks, which takes the same arguments."""
    for generated in generate_in_chunks(params, config, idx_BxT, max_new_tokens, **how):
        pass
    return generated.tokens


class Generated(NamedTuple):
    """What there is so far: numpy arrays of tokens [B, N] and of the length of each row [B], int32; the steps that
    followed the prompts, and the bytes of the cache that each of them reads; of the tokens that were drafted, how many
    were right."""
    tokens: np.ndarray
    lengths: np.ndarray
    steps: int = 0
    cache_bytes: int = 0
    drafted: int = 0
    accepted: int = 0


def generate_in_chunks(params, config, idx_BxT, max_new_tokens, *, rng, temperature=1.0, top_k=None, top_p=None,
                       min_p=None, repetition_penalty=None, stop_tokens=(), prompt_lengths_B=None, n_vocab=None,
                       sample_index_B=None, chunk=None, cache_dtype='auto', n_draft=0, draft=None):
    """Yields a Generated with tokens [B, T + max_new_tokens] while the rows grow: after the first token, then after every
    `chunk` tokens (all of them at once, if not given).

    idx_BxT: prompts, padded on the right to a common width; prompt_lengths_B: their lengths, T each if not given.
        Every row continues right after its own prompt.
    rng: a jax.random key. Row b draws its n-th token from fold_in(fold_in(rng, sample_index_B[b]), n), whatever else is
        in the batch; sample_index_B is 0, 1, 2, ... if not given.
    temperature: 0 is greedy. top_k: only the k likeliest tokens (clamped to the vocabulary). top_p: only the likeliest
        tokens that together reach this probability, in (0, 1]. min_p: only tokens at least this times as likely as the
        likeliest, in (0, 1]. repetition_penalty: above 1 makes tokens that are already there less likely.
        n_vocab: only ids below it, for padded vocabularies.
    stop_tokens: a row ends with the first of these that it generates.
    cache_dtype: of the KV cache, one of CACHE_DTYPES; 'auto' is the config's dtype.
    n_draft: guess so many tokens per step and check them together: the same tokens, sooner where guesses are right.
        draft: (params, config) of a small model with the same tokens, which guesses; without it the guess is what
        followed the row's last tokens earlier in the row.

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
    if cache_dtype not in ('auto', *CACHE_DTYPES):
        raise UserError(f'cache_dtype must be one of {", ".join(CACHE_DTYPES)}, not {cache_dtype!r}')
    if not 0 <= n_draft <= 16:
        raise UserError(f'n_draft must be between 0 (no speculation) and 16, not {n_draft}')
    draft_params, draft_config = draft if draft and n_draft else (None, None)
    if draft_config and draft_config.vocab_size < n_vocab:
        raise UserError(f'the draft model has a vocabulary of {draft_config.vocab_size}, the model {n_vocab}')
    if max_new_tokens == 0:
        yield Generated(tokens_BxT, length_B)
        return

    sampling = Sampling(temperature == 0, top_k, top_p is not None, min_p is not None, repetition_penalty is not None,
                        n_vocab, stop_tokens)
    knobs = Knobs(*(np.float32(1 if x is None else x) for x in (temperature, top_p, min_p, repetition_penalty)))
    how = dict(config=config, sampling=sampling, n_draft=n_draft, draft_config=draft_config)
    n, n_cached = 0, min(max_new_tokens, config.block_size + 1 - longest)  # how many tokens the cache can give
    N = bucket(T) + max_new_tokens  # columns: for the result and for prefill
    if n_cached < max_new_tokens:
        N = max(N, config.block_size)  # which the sliding window slices
    state = Decoding(
        tokens_BxN=jnp.asarray(np.pad(tokens_BxT, ((0, 0), (0, N - T)))), length_B=jnp.asarray(length_B),
        n_B=jnp.zeros(B, jnp.int32), done_B=jnp.zeros(B, bool), cache=None, steps=jnp.int32(0), drafted=jnp.int32(0),
        accepted=jnp.int32(0), key_B=jax.vmap(jax.random.fold_in, (None, 0))(rng, sample_index_B))
    so_far = lambda state: Generated(  # copies: the state is donated
        np.array(state.tokens_BxN)[:, :T + max_new_tokens], np.array(state.length_B), int(state.steps),
        sum(x.nbytes for x in jax.tree.leaves(state.cache)), int(state.drafted), int(state.accepted))
    if n_cached > 0:
        width = min(bucket(longest), config.block_size)
        n_slots = min(width + max_new_tokens, config.block_size)
        if draft_config and n_slots > draft_config.block_size:
            raise UserError(f'the draft model knows {draft_config.block_size} positions, this takes {n_slots}: use fewer '
                            'max_new_tokens or no draft')
        state = prefill(params, draft_params, state, knobs, width=width, n_slots=n_slots, cache_dtype=cache_dtype, **how)
        n = 1
        yield so_far(state)
    while n < max_new_tokens:
        if n >= n_cached:
            state = state.replace(cache=None, draft_cache=None)
        n = min(max_new_tokens if n >= n_cached else n_cached, n + (chunk or max_new_tokens))
        state = decode(params, draft_params, state, knobs, np.int32(n), **how)
        yield so_far(state)
        if chunk and bool(state.done_B.all()):
            return
