"""The model in one file, from token ids to logits and loss: config, GPT-2, KV cache, other models.

References: nanoGPT, https://github.com/karpathy/nanoGPT/blob/master/model.py;
OpenAI's GPT-2, https://github.com/openai/gpt-2/blob/master/src/model.py

Everything beyond GPT-2, such as RMSNorm, RoPE and GQA, is off by default. The code of GPT-2 has the
branches that switch these parts on. The section "other models" defines the parts, and can wait for
a second reading. jax_ops/ says *how* things are computed and sharded. Each docstring there begins
with the plain equivalent.

Shapes are in the names, so `q_BxTxHxK` needs no comment:
    B  batch (sequences)        D  n_embd, the width        H  attention heads
    T  positions of this call   F  MLP width, 4 D           K  head width, D / H
    S  slots of the KV cache    V  vocabulary               G  key and value heads (GPT-2: G = H)
A name that ends in _B holds one value per sequence."""
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax import Array

from jax_flags import DTYPES, UserError, check_choice, check_ranges
from jax_ops.attention import (
    ATTENTION, Dropout, Scores, attend_to_used_slots, blockwise_attention, causal_mask, span_limits)
from jax_ops.cpu import computed_once
from jax_ops.dropout import dropout, dropout_keys, flat_index, hash_dropout
from jax_ops.layers import EXPERT_WAYS, REMAT_POLICIES, map_sequence_chunks, scan_blocks
from jax_ops.matmul import (
    all_gather_param, as_kernel, is_kernel, linear, quantize, soft_cap)
from jax_ops.sharding import COLUMN_PARALLEL, ROW_PARALLEL, shard
from jax_ops.sharding import create_mesh  # noqa: F401, public here
from jax_ops.vocabulary import INIT_STD, cross_entropy, embed_tokens, lm_logits
from jax_ops.vocabulary import ParallelLMHead, VocabParallelEmbedding  # noqa: F401, public here

# -----------------------------------------------------------------------------
# config

@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The architecture. The defaults are nanoGPT's GPT (GPT-2 124M with a padded vocabulary).

    rope_scaling, mla and moe are a RopeScaling, an MLAConfig and a MoEConfig; each may also be
    given as a dict of its fields. Tuples, such as layer_types, may be given as lists. Raises
    UserError for impossible values, see check_numbers and check_config."""
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded up to a multiple of 64 for efficiency
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in Dense layers and LayerNorms, as GPT-2. False: a bit better and faster
    # numerics
    activation: str = 'gelu'  # the GELU of mlp='gelu' and 'geglu', a key of ACTIVATIONS
    norm_eps: float = 1e-5
    dtype: str = 'float32'  # activations and matmuls; params, softmax, logits, loss are float32
    # execution: same parameters, same results up to rounding; not stored in checkpoints
    attention: str = 'xla'  # one of ATTENTION; a call with a KV cache does not read it
    experts: str = 'loop'  # how a mixture of experts is computed, one of EXPERT_WAYS
    scan_layers: bool = False  # compile one block and loop over it; dropout draws other masks
    remat: str = 'none'  # recomputation in the backward pass: a key of REMAT_POLICIES
    # other models
    tied_head: bool = True  # False: lm_head is a matrix of its own
    embed_scale: float = 1.0  # factor of the token embeddings
    norm: str = 'layer'  # a key of NORMS
    block_norms: str = 'pre'  # which norms a block has, a key of BLOCK_NORMS
    position: str = 'learned'  # one of POSITIONS
    rope_theta: float = 10000.0  # RoPE base
    rope_scaling: 'RopeScaling | None' = None
    rope_width: int = 0  # number of first channels of a head that RoPE rotates; 0 is all
    window_rope_theta: float = 0.0  # RoPE base of 'window' layers, unscaled; 0: as other layers
    n_kv_head: int = 0  # key and value heads (GQA); 0 is n_head
    head_dim: int = 0  # 0 is n_embd / n_head
    attention_scale: float = 0.0  # factor of the scores; 0 is head_dim**-0.5
    attention_cap: float = 0.0  # soft_cap of the scaled scores; 0 is none
    logit_cap: float = 0.0  # soft_cap of the logits
    qkv_bias: bool = False  # q, k and v have a bias even if the other layers have none
    qk_norm: str = ''  # RMSNorm of queries and keys, a key of QK_NORMS
    sinks: bool = False  # a learned attention-sink logit per head (arXiv:2309.17453)
    layer_types: tuple = ('full',)  # keys of LAYER_TYPES, one per layer; a shorter pattern repeats
    window: int = 0  # sliding-window size of 'window' layers, current token included
    chunk: int = 0  # 'chunk' layers attend within chunks of this many positions
    query_growth: float = 0.0  # attention temperature of 'nope' layers, see apply_positions
    query_growth_every: int = 8192
    mlp: str = 'gelu'  # a key of MLPS; 'gelu' has no gate, and the function `activation`
    n_inner: int = 0  # MLP width; 0 is 4 n_embd
    swiglu_limit: float = 7.0  # clamp of 'swiglu_clamped'
    mla: 'MLAConfig | None' = None
    moe: 'MoEConfig | None' = None
    # derived by __post_init__ from the fields; ClassVar, so that they are no fields themselves
    kv_heads: ClassVar[int]
    head_width: ClassVar[int]
    mlp_width: ClassVar[int]
    has_gate: ClassVar[bool]

    def __post_init__(self) -> None:
        """Converts dicts to RopeScaling, MLAConfig and MoEConfig, checks all fields, and sets the
        derived attributes kv_heads, head_width, mlp_width and has_gate."""
        # a frozen dataclass is set by its __dict__
        for name, group in (('rope_scaling', RopeScaling), ('mla', MLAConfig), ('moe', MoEConfig)):
            values = getattr(self, name)
            if isinstance(values, dict):
                vars(self)[name] = group(**values)
        vars(self)['layer_types'] = tuple(self.layer_types)
        check_numbers(self)
        vars(self).update(
            kv_heads=self.n_kv_head or self.n_head,
            head_width=self.head_dim or self.n_embd // self.n_head,
            mlp_width=self.n_inner or 4 * self.n_embd,
            has_gate=self.mlp in GATED)
        check_config(self)

    def layer(self, i: int) -> tuple[str, bool]:
        """Returns (layer type, whether the MLP is a mixture of experts) of layer i."""
        is_moe = self.moe is not None and self.moe.layers[i % len(self.moe.layers)]
        return self.layer_types[i % len(self.layer_types)], is_moe

    def architecture(self) -> dict[str, Any]:
        """Returns {name: value} of all fields except the execution options.
        GPTConfig(**config.architecture()) is the same model."""
        values = dataclasses.asdict(self)
        for execution_option in ('attention', 'experts', 'scan_layers', 'remat'):
            del values[execution_option]
        return values


class Stream(struct.PyTreeNode):
    """The arrays that flow from block to block. To carry more arrays across blocks, such as the
    first layer's values or a skip connection, add a field here."""
    x_BxTxD: Array


class Call(struct.PyTreeNode):
    """The inputs that all blocks of a call share."""
    position_BxT: Array  # position of each token in its sequence; [1, T] if the same in all
    # number of each sequence in the run, for dropout's random numbers; None: dropout is off
    seq_id_B: Array | None = None
    start_BxT: Array | None = None  # where packed conversations start, see GPT.loss
    padding_BxT: Array | None = None  # True for padding, see GPT.loss
    # whether a kernel may compute the attention: it masks by the indices of consecutive tokens
    may_use_kernel: bool = struct.field(pytree_node=False, default=False)


def create_call(idx_BxT: Array, position_BxT: Array | None = None, *, deterministic: bool = True,
                seq_id_B: Array | None = None, start_BxT: Array | None = None,
                padding_BxT: Array | None = None) -> Call:
    """Returns the Call of the tokens idx_BxT. The parameters are described at GPT.__call__ and
    GPT.loss. If position_BxT is not given, the positions are 0 .. T-1; with start_BxT (packed
    rows), they are counted from the start of each conversation."""
    B, T = idx_BxT.shape[:2]
    is_consecutive = position_BxT is None
    if is_consecutive:
        position_BxT = jnp.arange(T)[None]
        if start_BxT is not None:
            position_BxT -= start_BxT
    # dropout is on where the sequences have ids
    if deterministic:
        seq_id_B = None
    elif seq_id_B is None:
        seq_id_B = jnp.arange(B)
    return Call(position_BxT, seq_id_B, start_BxT, padding_BxT, may_use_kernel=is_consecutive)


# -----------------------------------------------------------------------------
# norm, dense, dropout

class LayerNorm(nn.Module):
    """LayerNorm with an optional bias (Ba et al. 2016, arXiv:1607.06450); statistics in float32."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD: Array) -> Array:
        x = x_BxTxD.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        var = jnp.square(x - mean).mean(-1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(var + self.config.norm_eps)
        y *= self.param('scale', nn.initializers.ones, x.shape[-1:])
        if self.config.bias:
            y += self.param('bias', nn.initializers.zeros, x.shape[-1:])
        return y.astype(self.config.dtype)


def matrix_param(module: nn.Module, name: str, shape: tuple, init_std: float = INIT_STD) -> Any:
    """Returns module.param(name, nn.initializers.normal(init_std), shape), in float32. If decoding
    or LoRA has put a Kernel in the parameter's place, returns the Kernel."""
    value = module.get_variable('params', name)
    if is_kernel(value):
        return value
    return module.param(name, nn.initializers.normal(init_std), shape)


class Dense(nn.Module):
    """Computes x [..., I] @ kernel + bias -> [..., features] in the config's dtype. If `features`
    is a tuple, one kernel holds several projections side by side, and the result is a list with the
    output of each (c_attn: q, k, v)."""
    config: GPTConfig
    features: int | tuple
    init_std: float = INIT_STD
    # how tensor parallelism shards the kernel: COLUMN_PARALLEL, ROW_PARALLEL, or () for not at all
    tp: tuple = COLUMN_PARALLEL

    @nn.compact
    def __call__(self, x: Array) -> Any:
        n_out = int(np.sum(self.features))
        kernel = as_kernel(matrix_param(self, 'kernel', (x.shape[-1], n_out), self.init_std))
        bias = None
        if self.config.bias:
            bias = self.param('bias', nn.initializers.zeros, (n_out,))
        if isinstance(self.features, tuple):
            return kernel.fused_linear(x, bias, self.features)
        return kernel.linear(x, bias, self.tp)


def residual_dense(config: GPTConfig) -> Dense:
    """Returns the Dense layer that writes to the residual stream. Its initial values are smaller
    than those of other layers, by the factor 1 / sqrt(2 n_layer)."""
    init_std = INIT_STD / (2 * config.n_layer)**0.5
    return Dense(config, config.n_embd, init_std, ROW_PARALLEL, name='c_proj')


# -----------------------------------------------------------------------------
# attention

def dot_product_attention(
        q_BxTxHxK: Array, k_BxSxGxK: Array, v_BxSxGxK: Array, mask_BxTxS: Array, *,
        scale: float | None = None, cap: float = 0.0, sinks_H: Array | None = None,
        dropout_rate: float = 0.0, key_B: Array | None = None) -> Array:
    """Computes softmax(einsum('bthk,bshk->bhts', q, k) * scale) v (for G = H) over the keys where
    mask_BxTxS is True -> [B, T, H, K].

    Softmax is in float32. scale: K**-0.5 if None or 0. cap: the limit of the scores, see soft_cap;
    0 is no limit. GQA: query head h attends to key head h // Q, where Q = H / G. The Q query heads
    of a group are folded into the time axis. sinks_H: for each head, one more logit in the softmax.
    The probability of this logit is thrown away. dropout_rate: the share of the probabilities that
    is dropped. key_B: a dropout key for each sequence; None is no dropout. If values have another
    width than keys, the result has the width of the values."""
    B, T, H, K = q_BxTxHxK.shape
    S, G = k_BxSxGxK.shape[1:3]
    Q = H // G
    # the Q heads of a group become Q times as many queries
    q_BxTQxGxK = q_BxTxHxK.reshape(B, T, G, Q, K).swapaxes(2, 3).reshape(B, T * Q, G, K)
    # heads first, as the KV cache is stored
    q_BxGxTQxK = q_BxTQxGxK.swapaxes(1, 2)
    k_BxGxSxK = k_BxSxGxK.swapaxes(1, 2)
    v_BxGxSxK = v_BxSxGxK.swapaxes(1, 2)

    # scores of the keys that the mask allows
    scores_BxGxTQxS = jnp.einsum('bgtk,bgsk->bgts', q_BxGxTQxK, k_BxGxSxK,
                                 preferred_element_type=jnp.float32)
    scores_BxGxTQxS *= scale or K**-0.5
    if cap:
        scores_BxGxTQxS = soft_cap(scores_BxGxTQxS, cap)
    mask_Bx1xTQxS = jnp.repeat(mask_BxTxS, Q, axis=1)[:, None]
    least = jnp.finfo(jnp.float32).min
    scores_BxGxTQxS = jnp.where(mask_Bx1xTQxS, scores_BxGxTQxS, least)
    if sinks_H is not None:
        sinks_GxTQ = jnp.tile(sinks_H.reshape(G, Q), T)
        sinks_BxGxTQx1 = jnp.broadcast_to(sinks_GxTQ[..., None], (B, G, T * Q, 1))
        scores_BxGxTQxS = jnp.concatenate([scores_BxGxTQxS, sinks_BxGxTQx1], axis=-1)

    # probabilities, and the values that they weigh
    probs_BxGxTQxS = jax.nn.softmax(scores_BxGxTQxS)[..., :S].astype(v_BxSxGxK.dtype)
    if key_B is not None:
        index_GxTQxS = flat_index(probs_BxGxTQxS.shape[1:])
        probs_BxGxTQxS = hash_dropout(probs_BxGxTQxS, dropout_rate, key_B, index_GxTQxS)
    y_BxGxTQxK = jnp.einsum('bgts,bgsk->bgtk', probs_BxGxTQxS, v_BxGxSxK)
    y_BxTQxGxK = y_BxGxTQxK.swapaxes(1, 2)
    return y_BxTQxGxK.reshape(B, T, Q, G, -1).swapaxes(2, 3).reshape(B, T, H, -1)


class CausalSelfAttention(nn.Module):
    """Multi-head attention; a query attends to the keys at its own position and before."""
    config: GPTConfig
    layer_type: str = 'full'  # a key of LAYER_TYPES

    @nn.compact
    def __call__(self, x_BxTxD: Array, stream: Stream | None = None, call: Call | None = None,
                 cache: dict | None = None) -> tuple[Array, Stream | None, dict | None]:
        """Returns (y_BxTxD, the output; `stream`, unchanged; the layer's new KV cache).

        x_BxTxD: the normalized input. stream: the arrays that flow from block to block; this layer
        neither reads nor changes them, but another kind of attention may. call: the inputs that
        all blocks share; by default, positions 0 .. T-1. cache: the layer's KV cache, see
        update_kv_cache; None is no cache."""
        cfg = self.config
        B, T, D = x_BxTxD.shape
        H, G, K = cfg.n_head, cfg.kv_heads, cfg.head_width
        call = call or create_call(x_BxTxD)

        # queries, keys and values of all heads, in one matmul
        qkv_cfg = dataclasses.replace(cfg, bias=cfg.bias or cfg.qkv_bias)
        q, k, v = Dense(qkv_cfg, (H * K, G * K, G * K), name='c_attn')(x_BxTxD)
        q_BxTxHxK = q.reshape(B, T, H, K)
        k_BxTxGxK = k.reshape(B, T, G, K)
        v_BxTxGxK = v.reshape(B, T, G, K)
        if cfg.qk_norm in ('learned', 'all_heads'):
            q_BxTxHxK = norm_heads(cfg, 'q_norm', q_BxTxHxK)
            k_BxTxGxK = norm_heads(cfg, 'k_norm', k_BxTxGxK)
        if cfg.position == 'rope':
            q_BxTxHxK, k_BxTxGxK = apply_positions(
                cfg, self.layer_type, q_BxTxHxK, k_BxTxGxK, call.position_BxT)

        # with a KV cache, the queries attend to all that it holds
        sinks_H = self.param('sinks', nn.initializers.zeros, (H,)) if cfg.sinks else None
        scale = cfg.attention_scale
        qkv_of = lambda kv: (q_BxTxHxK, kv['k'], kv['v'])
        kv = {'k': k_BxTxGxK, 'v': v_BxTxGxK}
        y_BxTxHxK, cache = attend(self, qkv_of, kv, call, cache, scale=scale, sinks_H=sinks_H)
        if self.is_mutable_collection('intermediates'):
            record_attention(self, q_BxTxHxK, k_BxTxGxK, call, scale=scale, sinks_H=sinks_H)
        y_BxTxD = residual_dense(cfg)(y_BxTxHxK.reshape(B, T, H * K))
        return dropout(self, y_BxTxD, call), stream, cache


# -----------------------------------------------------------------------------
# MLP, block, GPT

@functools.partial(jax.checkpoint, static_argnums=1)
def gelu(x: Array, approximate: bool) -> Array:
    """Computes GELU (arXiv:1606.08415) in float32, with the result in x's dtype. The backward pass
    computes GELU again from x. approximate: whether GELU is approximated by tanh."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate).astype(x.dtype)


class MLP(nn.Module):
    config: GPTConfig
    width: int

    @nn.compact
    def __call__(self, x_BxTxD: Array, call: Call | None = None) -> Array:
        cfg = self.config
        h_BxTxF = Dense(cfg, self.width, name='c_fc')(x_BxTxD)
        gate_BxTxF = Dense(cfg, self.width, name='c_gate')(x_BxTxD) if cfg.has_gate else None
        h_BxTxF = MLPS[cfg.mlp](cfg, h_BxTxF, gate_BxTxF)
        return dropout(self, residual_dense(cfg)(h_BxTxF), call)


class Block(nn.Module):
    config: GPTConfig
    layer_type: str = 'full'  # a key of LAYER_TYPES
    is_moe: bool = False  # a mixture of experts in place of the MLP

    @nn.compact
    def __call__(self, stream: Stream, call: Call | None = None,
                 cache: dict | None = None) -> tuple[Stream, dict | None]:
        """Computes x += attention(ln_1(x)); x += mlp(ln_2(x)) for x = stream.x_BxTxD, as GPT-2.
        Other models have other norms, see BLOCK_NORMS. Returns (the Stream with the new x; the
        layer's new KV cache). call: the inputs that all blocks share. cache: the layer's KV cache;
        None is no cache."""
        cfg = self.config
        attention = LatentAttention if cfg.mla else CausalSelfAttention
        mlp = MoELayer(cfg, name='mlp') if self.is_moe else MLP(cfg, cfg.mlp_width, name='mlp')

        def norm(name, x):
            is_there = name in BLOCK_NORMS[cfg.block_norms]
            return NORMS[cfg.norm](cfg, name=name)(x) if is_there else x

        x_BxTxD = stream.x_BxTxD
        y_BxTxD = norm('ln_1', x_BxTxD)
        y_BxTxD, stream, cache = attention(cfg, self.layer_type, name='attn')(
            y_BxTxD, stream, call, cache)
        x_BxTxD += norm('ln_1_post', y_BxTxD)

        y_BxTxD = mlp(norm('ln_2', x_BxTxD), call)
        x_BxTxD += norm('ln_2_post', y_BxTxD)
        return stream.replace(x_BxTxD=x_BxTxD), cache


class GPT(nn.Module):
    """GPT(config).apply({'params': params}, idx_BxT) -> float32 logits [B, T, vocab_size]. With
    method='loss' or method='with_cache' apply calls that method instead."""
    config: GPTConfig

    def setup(self) -> None:
        cfg = self.config
        size = cfg.vocab_size, cfg.n_embd
        self.wte = matrix_param(self, 'wte', size)
        if cfg.position == 'learned':
            wpe = matrix_param(self, 'wpe', (cfg.block_size, cfg.n_embd))  # [positions, D]
            self.wpe = all_gather_param(wpe, cfg.dtype, ((None, 'fsdp'), (None, None)))
        self.h = [Block(cfg, *cfg.layer(i)) for i in range(cfg.n_layer)]
        self.ln_f = NORMS[cfg.norm](cfg)
        # weight tying: the head multiplies by the token embeddings
        table_VxD = self.wte if cfg.tied_head else matrix_param(self, 'lm_head', size)
        self.head_table = all_gather_param(table_VxD, cfg.dtype, ROW_PARALLEL)

    def __call__(self, idx_BxT: Array, *, position_BxT: Array | None = None,
                 deterministic: bool = True, seq_id_B: Array | None = None,
                 logit_position_B: Array | None = None) -> Array:
        """Computes the logits of the token after each position, float32 [B, T, V].

        position_BxT: position ids; 0 .. T-1 if not given. deterministic: False turns dropout on,
        and needs rngs={'dropout': key}. seq_id_B: the ids of the sequences, for dropout's random
        numbers; 0, 1, 2, ... if not given.
        logit_position_B: if given, only the logits at index logit_position_B[b] of each sequence b
        are computed, [B, 1, V]."""
        call = create_call(
            idx_BxT, position_BxT, deterministic=deterministic, seq_id_B=seq_id_B)
        stream, _ = self.hidden(idx_BxT, call)
        x_BxTxD = stream.x_BxTxD
        if logit_position_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, logit_position_B[:, None, None], axis=1)
        return self.head(x_BxTxD, training=False)

    def with_cache(self, idx_BxT: Array, cache: dict, *, position_BxT: Array) -> tuple[Array, dict]:
        """Adds the T tokens to the KV cache, and computes their logits. A token attends to the
        tokens in the cache up to its own position. Returns (the logits, float32 [B, T, V], as in
        __call__; the new cache). cache: see init_cache. position_BxT: PAD marks padding."""
        stream, cache = self.hidden(idx_BxT, create_call(idx_BxT, position_BxT), cache)
        return self.head(stream.x_BxTxD, training=False), cache

    def loss(self, idx_BxT: Array, targets_BxT: Array, *, loss_chunk: int = 0,
             deterministic: bool = True, seq_id_B: Array | None = None,
             start_BxT: Array | None = None, padding_BxT: Array | None = None) -> Array:
        """Computes the cross-entropy of each target, float32 [B, T].

        loss_chunk: the number of positions whose logits are materialized at a time, a divisor of T;
        0 is all.
        deterministic, seq_id_B: as in __call__.
        start_BxT: for rows that are packed with conversations. It says where the conversation of
        each token starts, as an index in the row. A token attends to its own conversation only, and
        its position counts from this start.
        padding_BxT: True for padding, which the load-balancing loss of experts does not count."""
        call = create_call(
            idx_BxT, deterministic=deterministic, seq_id_B=seq_id_B, start_BxT=start_BxT,
            padding_BxT=padding_BxT)
        stream, _ = self.hidden(idx_BxT, call)

        def loss_of(x_BxTxD, target_BxT):
            return cross_entropy(self.head(x_BxTxD, training=True), target_BxT)

        if 0 < loss_chunk < idx_BxT.shape[1]:
            return map_sequence_chunks(loss_of, loss_chunk, stream.x_BxTxD, targets_BxT)
        return loss_of(stream.x_BxTxD, targets_BxT)

    def head(self, x_BxTxD: Array, *, training: bool) -> Array:
        """Returns the logits, float32 [B, T, V]. training: see lm_logits."""
        x_BxTxD = x_BxTxD.astype(self.config.dtype)
        return lm_logits(self.head_table, x_BxTxD, cap=self.config.logit_cap, training=training)

    def embed(self, idx_BxT: Array, call: Call) -> Stream:
        """Returns the Stream into the first block: the embeddings of the tokens idx_BxT, plus
        the embeddings of their positions if the model has a wpe. Dropout applies to the sum."""
        cfg = self.config
        x_BxTxD = embed_tokens(self.wte, idx_BxT, cfg.dtype)
        x_BxTxD *= jnp.asarray(cfg.embed_scale, cfg.dtype)
        if cfg.position == 'learned':
            wpe_BxTxD = jnp.take(self.wpe, call.position_BxT, axis=0, mode='clip')
            x_BxTxD += wpe_BxTxD.astype(cfg.dtype)
        return Stream(dropout(self, x_BxTxD, call))

    def hidden(self, idx_BxT: Array, call: Call,
               cache: dict | None = None) -> tuple[Stream, dict | None]:
        """Returns (the Stream after the last norm; the new cache, or None without a cache). call:
        see create_call. cache: see init_cache. Raises ValueError if T is more than block_size."""
        cfg = self.config
        T = idx_BxT.shape[1]
        if T > cfg.block_size:
            raise ValueError(f'{T} tokens do not fit in block_size {cfg.block_size}')
        if self.is_initializing():
            call = call.replace(may_use_kernel=False)  # no kernel is for a single token
        stream = self.embed(idx_BxT, call)

        # all blocks in one compiled loop
        if cfg.scan_layers and cache is None and not self.is_initializing():
            stream = scan_blocks(self, stream, call)
            return stream.replace(x_BxTxD=self.ln_f(stream.x_BxTxD)), None

        # or block after block
        run = Block.__call__
        if cache is not None:
            run = nn.jit(run)  # traced and lowered once for all layers of a kind
        elif cfg.remat != 'none':
            run = nn.remat(run, policy=REMAT_POLICIES[cfg.remat])
        new_cache = {}
        for i, block in enumerate(self.h):
            layer_cache = cache[f'h_{i}'] if cache else None
            stream, new_cache[f'h_{i}'] = run(block, stream, call, layer_cache)
        return stream.replace(x_BxTxD=self.ln_f(stream.x_BxTxD)), new_cache if cache else None


# -----------------------------------------------------------------------------
# attention: the choice between three ways to compute it, and its mask

def attend(module: nn.Module, qkv_of: Callable[[Any], tuple[Array, Array, Array]], kv: Any,
           call: Call, cache: dict | None = None, *, scale: float,
           sinks_H: Array | None = None) -> tuple[Array, dict | None]:
    """Computes a layer's attention. Returns (y_BxTxHxK; the new KV cache, None without a cache).

    - With a KV cache: attend_to_cache.
    - Without a cache, if call.may_use_kernel is True and config.attention is not 'xla', as in
      training and evaluation: the kernel that config.attention names (see choose_attention,
      jax_devices).
    - Without a cache, in all other cases: dot_product_attention, the plain formula.

    module: the attention layer, for its config, layer_type and dropout key.
    kv: what this call adds to the cache, {name: [B, T, G, K]}: keys and values, or latents in
    latent attention.
    qkv_of: a function that returns (queries, keys, values) for dot_product_attention. The layer
    makes this function, after it has computed the queries. The argument of qkv_of is kv, or, with a
    cache, all that the cache holds after kv has been added. In latent attention, qkv_of computes
    the keys and values from the latents.
    call: the inputs that all blocks share.
    scale, sinks_H: see dot_product_attention."""
    config, layer_type = module.config, module.layer_type
    if cache is not None:
        return attend_to_cache(module, qkv_of, kv, call, cache, scale=scale, sinks_H=sinks_H)
    key_B = dropout_keys(module, call)
    if call.may_use_kernel and config.attention != 'xla':
        from jax_ops.fused_attention import Qkv, fused_causal_attention  # sampling needs neither
        scores = Scores(scale, config.attention_cap, **span_limits(config, layer_type))
        return fused_causal_attention(
            config.attention, Qkv(*qkv_of(kv), call.start_BxT), scores, sinks_H=sinks_H,
            dropout=Dropout(key_B, config.dropout)), None
    mask_BxTxT = attention_mask(config, layer_type, call)
    return dot_product_attention(
        *qkv_of(kv), mask_BxTxT, scale=scale, cap=config.attention_cap, sinks_H=sinks_H,
        dropout_rate=config.dropout, key_B=key_B), None


def attend_to_cache(module: nn.Module, qkv_of: Callable, new_kv: dict, call: Call, cache: dict,
                    **options: Any) -> tuple[Array, dict]:
    """Writes the keys and values of this call to a layer's KV cache, and computes the layer's
    attention to all that the cache then holds. Returns (y_BxTxHxK, the new cache).

    A decode step has few queries, for which the plain formula is best. A piece of a prompt with a
    long cache (T S >= 2^18) is computed blockwise, without materializing all scores.

    new_kv: the parameter kv of attend. options: the keyword arguments scale and sinks_H of attend.
    The other parameters are those of attend, too."""
    config, layer_type = module.config, module.layer_type
    held, key_position_BxS, cache = update_kv_cache(
        config, layer_type, cache, new_kv, call.position_BxT)
    mask_BxTxS = attention_mask(config, layer_type, call, key_position_BxS)
    T, S = mask_BxTxS.shape[1:]
    is_long = T < S and T * S >= 2**18
    formula: Callable = blockwise_attention if is_long else dot_product_attention

    def attend_to(held, mask_BxTxS):
        kv = read_cache(held, config.dtype)
        return formula(*qkv_of(kv), mask_BxTxS, cap=config.attention_cap, **options)

    if is_long:
        # padding at the end of a prompt sees no key, so that its blocks are skipped
        mask_BxTxS &= (call.position_BxT < PAD)[:, :, None]
        return attend_to(held, mask_BxTxS), cache
    return attend_to_used_slots(attend_to, held, mask_BxTxS), cache


def attention_span(config: GPTConfig, layer_type: str) -> int:
    """Returns the largest number of positions that a query attends to, its own included."""
    return span_limits(config, layer_type).get(layer_type, config.block_size)


def attention_mask(config: GPTConfig, layer_type: str, call: Call,
                   key_position_BxS: Array | None = None) -> Array:
    """Returns bool [B, T, S], True where a query may attend to a key. The key must be at the
    query's position or before, and within the query's window or chunk. In packed rows the key must
    also be in the query's conversation: two tokens are in the same conversation if their
    conversations start at the same position. key_position_BxS: the positions of the keys in a KV
    cache; None if the keys are those of the call's own tokens."""
    limits = span_limits(config, layer_type)
    if key_position_BxS is None:
        key_position_BxS = call.position_BxT
    elif has_ring_cache(config, layer_type) and not limits:
        limits = {'window': config.block_size}  # queries do not see older keys in the ring
    mask_BxTxS = causal_mask(
        key_position_BxS[:, None, :], call.position_BxT[:, :, None], **limits)
    if call.start_BxT is None:
        return mask_BxTxS
    return mask_BxTxS & (call.start_BxT[:, None, :] == call.start_BxT[:, :, None])


def record_attention(module: nn.Module, q_BxTxHxK: Array, k_BxSxGxK: Array, call: Call,
                     **options: Any) -> None:
    """Records the attention probabilities of a layer, [B, T, H, S], in flax's collection
    `intermediates`, where look_inside (jax_run/inside.py) reads them.

    The probabilities are the result of attend with unit vectors as values, so that masks, caps and
    sinks apply. options: the keyword arguments scale and sinks_H of attend."""
    B, S, G = k_BxSxGxK.shape[:3]
    unit_BxSxGxS = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, G, S))
    probs_BxTxHxS, _ = attend(
        module, lambda unit: (q_BxTxHxK, k_BxSxGxK, unit), unit_BxSxGxS,
        call.replace(seq_id_B=None), **options)
    module.sow('intermediates', 'probs', probs_BxTxHxS)


# -----------------------------------------------------------------------------
# KV cache: which token is in which slot, how it is written, read, made and enlarged
#
# THE SLOT RULE. A layer's cache has S slots. The token at position p is in slot p. If the cache is
# a ring buffer (has_ring_cache), it is in slot p % S; both are the same until the ring is full. So
# the position of a key follows from its slot, and training's mask (attention_mask: causal, with the
# layer's window) also works here. An unwritten slot has a later position than any query, and is
# masked.
#
#     position     0  1  2  3  4  5  6  7  8           S = 4, a ring; the newest token is at 8
#     slot         0  1  2  3  0  1  2  3  0           slots hold the positions 8 5 6 7
#
# Prompts of different lengths are padded on the right and need no bookkeeping: a padding token has
# the position PAD. PAD is later than every query, so that the token is masked, and outside of the
# cache, so that it is not written.
#
# A layer's cache is a dict {name: array [B, G, S, K]}, usually of 'k' and 'v'; latent attention has
# 'latent' and 'rope'. int8 and float8 caches have a scale per vector, {name_scale: [B, G, S]}.
# Heads come before slots, because a head's keys are then one piece of memory
# (docs/lab_log.md#kv-cache).

CACHE_DTYPES = {
    'float32': jnp.float32, 'bfloat16': jnp.bfloat16, 'float16': jnp.float16,
    'int8': jnp.int8, 'float8': jnp.float8_e4m3fn}
# On CPUs floats of these dtypes are stored as their bits: XLA:CPU would compute with copies in
# float32 of the whole cache (docs/lab_log.md#kv-cache)
STORED_AS = {'bfloat16': 'uint16', 'float8_e4m3fn': 'uint8'}
PAD = 2**30  # position of a padding token: after every query, and outside of every cache

PIECE = 512  # most tokens of a prompt that are prefilled at a time


# --- one layer's cache in a forward pass

def has_ring_cache(config: GPTConfig, layer_type: str) -> bool:
    """Returns whether a layer's cache is a ring buffer, in which a new key may overwrite a key that
    is out of the attention span.

    A layer with a window or chunks has a ring. So has every layer of a model with RoPE: its texts
    may be longer than block_size, and a token then attends to the last block_size positions only.
    In all other layers, each of the block_size positions has a slot of its own. See count_slots for
    the size of a ring."""
    return bool(span_limits(config, layer_type)) or config.position == 'rope'


def update_kv_cache(config: GPTConfig, layer_type: str, cache: dict, new_kv: dict,
                    position_BxT: Array) -> tuple[dict, Array, dict]:
    """Writes the keys and values of this call, new_kv {name: [B, T, G, K]}, to a layer's cache.

    Returns (all_kv; positions; the new cache). all_kv: the keys and values that the queries
    attend to, in the form of a cache. positions: their positions, [B, S] or [1, S]. S is
    usually the number of slots, and all_kv is the new cache. In a ring buffer (has_ring_cache),
    the last of the T new tokens may overwrite keys that the first of the T tokens attend to.
    Then S is the number of slots plus T: all_kv has the old keys and values of all slots first,
    then the T new ones."""
    if has_ring_cache(config, layer_type):
        return update_ring_cache(config, layer_type, cache, new_kv, position_BxT)
    # slot == position
    cache = write_cache(cache, new_kv, position_BxT)
    n_slots = cache[next(iter(new_kv))].shape[2]
    return cache, jnp.arange(n_slots)[None], cache


def update_ring_cache(config: GPTConfig, layer_type: str, cache: dict, new_kv: dict,
                      position_BxT: Array) -> tuple[dict, Array, dict]:
    """Does the work of update_kv_cache for a ring buffer of S slots, in which a token at `position`
    has the slot position % S. Returns what update_kv_cache returns.

    If S is at least the attention span, a token overwrites the token S positions before it, which
    is out of the span by then. If S is less than the span, nothing may be overwritten: the caller
    must enlarge the cache by grow_cache before it writes position S."""
    B, T = next(iter(new_kv.values())).shape[:2]
    S = next(iter(cache.values())).shape[2]
    span = attention_span(config, layer_type)
    position_BxT = jnp.broadcast_to(position_BxT, (B, T))

    def positions_held(last_Bx1):
        """Returns the position of the token in each slot, [B, S]; PAD for an empty slot. last_Bx1:
        the position of the newest token in the cache."""
        p_BxS = last_Bx1 - (last_Bx1 - jnp.arange(S)) % S
        return jnp.where(p_BxS < 0, PAD, p_BxS)

    # if the call is longer than the ring, only the last S tokens are written
    last_Bx1 = jnp.where(position_BxT < PAD, position_BxT, -1).max(1, keepdims=True)
    stays_BxT = (position_BxT < PAD) & (position_BxT > last_Bx1 - S)
    out_of_range = S
    new_cache = write_cache(cache, new_kv, jnp.where(stays_BxT, position_BxT % S, out_of_range))

    # one token, or enough slots to spare: no query needs a key that this call has overwritten
    if T - 1 + span <= S or S < span:
        return new_cache, positions_held(last_Bx1), new_cache

    # else earlier queries of this call may need keys that its later tokens have overwritten:
    # they attend to the old cache and the new keys, side by side
    both = {}
    for name, x_BxSxGxK in read_cache(cache, config.dtype).items():
        both[name] = jnp.concatenate([x_BxSxGxK, new_kv[name]], axis=1).swapaxes(1, 2)
    old_position_BxS = positions_held(position_BxT[:, :1] - 1)
    return both, jnp.concatenate([old_position_BxS, position_BxT], axis=1), new_cache


def write_cache(cache: dict, new_kv: dict, slot_BxT: Array) -> dict:
    """Writes new_kv {name: [B, T, G, K]} to a layer's cache: token t of row b to slot
    slot_BxT[b, t]. Returns the new cache.

    Tokens with a slot out of range are not written. In int8 and float8 caches each vector is
    quantized by itself."""
    new_cache = {}
    for name, x_BxTxGxK in new_kv.items():
        slots = jnp.broadcast_to(slot_BxT, x_BxTxGxK.shape[:2])
        scale_name = f'{name}_scale'
        if scale_name in cache:
            x_BxTxGxK, scale_BxTxG = quantize(x_BxTxGxK, held_dtype(cache[name]))
            new_cache[scale_name] = scatter_to_slots(cache[scale_name], scale_BxTxG, slots)
        new_cache[name] = scatter_to_slots(cache[name], x_BxTxGxK, slots)
    return new_cache


def read_cache(cache: dict, dtype: str) -> dict:
    """Returns all slots of a layer's cache, {name: [B, S, G, K]}, in dtype."""
    kv = {}
    for name, x_BxGxSxK in cache.items():
        if name.endswith('_scale'):
            continue
        x_BxGxSxK = jax.lax.bitcast_convert_type(x_BxGxSxK, held_dtype(x_BxGxSxK))
        if f'{name}_scale' in cache:
            x_BxGxSxK = x_BxGxSxK.astype(jnp.float32) * cache[f'{name}_scale'][..., None]
        kv[name] = x_BxGxSxK.astype(dtype).swapaxes(1, 2)
    return kv


def held_dtype(cache: Array) -> np.dtype:
    """Returns the dtype of the values in an array of the cache. The array may store floats as bits,
    see STORED_AS."""
    for held, stored in STORED_AS.items():
        if stored == cache.dtype:
            return jnp.dtype(held)
    return jnp.dtype(cache.dtype)


def scatter_to_slots(cache_BxGxS: Array, x_BxTxG: Array, slot_BxT: Array) -> Array:
    """Computes cache.at[b, :, slot].set(x) for each row b, in the cache's dtype. Cache and x may
    have one more axis, K.

    Slots out of range are ignored. Two details are for the compilers:
    - Each head is indexed, too. Otherwise XLA:TPU stores the cache with heads next to K, and copies
      all of it before and after a loop of decoding.
    - XLA:CPU turns a scatter to a single slot into an update, fuses this update into every reader,
      and so copies the cache. Therefore, if there is only one slot, x is also written to a second
      slot, which is out of range: a scatter to two slots stays a scatter."""
    x_BxTxG = x_BxTxG.astype(held_dtype(cache_BxGxS))
    x_BxTxG = jax.lax.bitcast_convert_type(x_BxTxG, cache_BxGxS.dtype)
    if slot_BxT.size == 1:
        x_BxTxG = jnp.concatenate([x_BxTxG, x_BxTxG], axis=1)
        out_of_range = jnp.full_like(slot_BxT, cache_BxGxS.shape[2])
        slot_BxT = jnp.concatenate([slot_BxT, out_of_range], axis=1)
    slot_BxTxG = jnp.broadcast_to(slot_BxT[..., None], x_BxTxG.shape[:3])

    def write(cache_S, x_T, slot_T):
        return cache_S.at[slot_T].set(x_T, mode='drop')

    write_heads = jax.vmap(write, (0, 1, 1))
    return jax.vmap(write_heads)(cache_BxGxS, x_BxTxG, slot_BxTxG)


# --- the caches of all layers: their sizes, new ones, larger ones

def cache_entry_shapes(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """Returns {name: (heads, width)} of the arrays that a layer's cache has for each token."""
    if config.mla:
        return {'latent': (1, config.mla.kv_rank), 'rope': (1, config.mla.rope_dim)}
    return {'k': (config.kv_heads, config.head_width), 'v': (config.kv_heads, config.head_width)}


def count_slots(config: GPTConfig, layer_type: str, n_slots: int) -> int:
    """Returns the number of slots of a layer's KV cache. n_slots: the number of slots that is asked
    for. A layer needs no more slots than its attention span, so the result is min(n_slots, span),
    with one exception.

    The exception: a ring buffer with a span of at least 2,048 and n_slots >= span gets span + PIECE
    slots, that is, 512 more. With these slots update_ring_cache can write a piece of a prompt in
    place. Without them, it would concatenate the old cache and the piece's keys, which copies the
    cache."""
    span = attention_span(config, layer_type)
    if has_ring_cache(config, layer_type) and n_slots >= span >= 2048:
        return span + PIECE
    return min(span, n_slots)


def cache_bytes(config: GPTConfig, n_positions: int, dtype: str = 'auto') -> int:
    """Returns the size in bytes of the KV cache for one sequence of n_positions."""
    cache = jax.eval_shape(functools.partial(init_cache, config, 1, n_positions, dtype))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def init_cache(config: GPTConfig, batch_size: int, n_slots: int, dtype: str = 'auto',
               n_draft: int = 0, *, as_bits: bool = False) -> dict:
    """Returns an empty KV cache, {layer: {name: [B, G, S, K]}}; see THE SLOT RULE above. In a
    forward pass with the cache, padding tokens must have the position PAD.

    n_slots: the number of slots that is asked for. A layer gets count_slots(config, layer_type,
    n_slots) + n_draft slots.
    dtype: one of CACHE_DTYPES, or 'auto' for the config's dtype.
    n_draft: how many draft tokens a step may reject. In a layer with a window, a new token
    overwrites the oldest key. If the new token is a draft and is then rejected, this key is still
    in the window, but lost. The n_draft extra slots prevent that.
    as_bits: whether to store bfloat16 and float8 as unsigned integers, see STORED_AS."""
    held = CACHE_DTYPES[config.dtype if dtype == 'auto' else dtype]
    stored = STORED_AS.get(held.dtype.name, held) if as_bits else held
    is_quantized = held.dtype.itemsize == 1
    caches = {}
    for i in range(config.n_layer):
        layer_type, _ = config.layer(i)
        n = count_slots(config, layer_type, n_slots) + n_draft
        cache = {}
        for name, (heads, width) in cache_entry_shapes(config).items():
            cache[name] = jnp.zeros((batch_size, heads, n, width), stored)
            if is_quantized:
                cache[f'{name}_scale'] = jnp.zeros((batch_size, heads, n), jnp.float32)
        caches[f'h_{i}'] = cache
    # on a mesh a device keeps its own heads; latents, which all heads share, are replicated
    heads_axis = None if config.mla else 'tensor'
    return jax.tree.map(lambda x: shard(x, None, heads_axis), caches)


@functools.partial(
    jax.jit, static_argnames=('config', 'batch_size', 'n_slots', 'dtype', 'n_draft', 'as_bits'))
def grow_cache(cache: dict | None, *, config: GPTConfig, batch_size: int, n_slots: int, dtype: str,
               n_draft: int, as_bits: bool) -> dict:
    """Returns a copy of a KV cache with n_slots slots, or an empty cache if `cache` is None.

    Every token keeps its slot. Therefore the cache must not have wrapped around yet. The other
    parameters are those of init_cache."""
    larger = init_cache(config, batch_size, n_slots, dtype, n_draft, as_bits=as_bits)
    if cache is None:
        return larger

    def copy(to, cache):
        return jax.lax.dynamic_update_slice(to, cache, [0] * cache.ndim)

    return jax.tree.map(copy, larger, cache)


@jax.jit
def select_rows(cache: dict, rows_B: Array) -> dict:
    """Selects rows (sequences) of a KV cache. Row i of the result is row rows_B[i] of `cache`."""
    return jax.tree.map(lambda x: x[rows_B], cache)


# -----------------------------------------------------------------------------
# parameters: new ones, and counts

# The sets of weights that a run may have, by name. It always has 'params'. The last set that it has
# is evaluated, sampled and exported.
WEIGHTS = ('params', 'ema')


def init_params(rng: Array, config: GPTConfig) -> dict:
    """Returns newly initialized float32 parameters, {'wte': [V, D], 'h_0': {...}, ...}."""
    return jax.jit(GPT(config).init)(rng, jnp.zeros((1, 1), jnp.int32))['params']


def without_tables(params: dict) -> dict:
    """Returns the parameters that multiply activations. wpe does not. wte does only if it is also
    the output matrix, that is, if there is no separate lm_head."""
    tables = ('wpe', 'wte') if 'lm_head' in params else ('wpe',)
    return {name: part for name, part in params.items() if name not in tables}


def count_params(params: dict, non_embedding: bool = True) -> int:
    """Returns the number of parameters. non_embedding: count only those that without_tables
    selects, as in nanoGPT."""
    if non_embedding:
        params = without_tables(params)
    return sum(x.size for x in jax.tree.leaves(params))


def estimate_mfu(n_params: int, config: GPTConfig, tokens_per_sec: float, peak_flops: float,
                 n_frozen: int = 0) -> float:
    """Computes the model FLOPs utilization: the share of `peak_flops` (FLOP/s of all devices
    together) that the training achieves.

    A token costs: 6 FLOPs per trained parameter, forward and backward; 4 FLOPs per frozen
    parameter, which has no gradient; in each layer, 12 H K T FLOPs for attention, where T is the
    layer's attention span (PaLM, arXiv:2204.02311, appendix B). n_params: count_params of the
    trained parameters. n_frozen: count_params of the frozen parameters. Experts that a token does
    not use are not counted."""
    mla, moe = config.mla, config.moe
    n_matrices = 3 if config.has_gate else 2
    unused, spans = 0, 0
    for layer_type, is_moe in map(config.layer, range(config.n_layer)):
        spans += min(config.block_size, attention_span(config, layer_type))
        if is_moe:
            unused += (moe.n_expert - moe.n_used) * n_matrices * config.n_embd * moe.width
    if n_frozen:
        n_frozen -= unused
    else:
        n_params -= unused
    width = (mla.nope_dim + mla.rope_dim + mla.v_dim) / 2 if mla else config.head_width
    flops_per_token = 6 * n_params + 4 * n_frozen + 12 * config.n_head * width * spans
    return flops_per_token * tokens_per_sec / peak_flops


# -----------------------------------------------------------------------------
# other models (skip on first reading): each part can be read alone, and acts only if the config
# asks for it.
# More letters: Q query heads per key head, C width of a latent, P tokens of a call (B T), E
# experts, U used per token

# --- norms

class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv:1910.07467); statistics in float32."""
    config: GPTConfig
    eps: float | None = None  # config.norm_eps if not given

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
        y = rms_normalize(x, self.eps or self.config.norm_eps) * scale
        return y.astype(self.config.dtype)


def rms_normalize(x: Array, eps: float) -> Array:
    """Computes x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def norm_heads(config: GPTConfig, name: str, x_BxTxHxK: Array) -> Array:
    """Normalizes queries or keys by the RMSNorm `name`: each head alone, or, with
    config.qk_norm='all_heads', all heads of a token together."""
    x = x_BxTxHxK
    if config.qk_norm == 'all_heads':
        x = x.reshape(*x.shape[:2], -1)
    return RMSNorm(config, name=name)(x).reshape(x_BxTxHxK.shape)


NORMS = {'layer': LayerNorm, 'rms': RMSNorm}
# which norms a block has: they normalize the inputs of attention and MLP (GPT-2), their outputs
# (OLMo 2), or both (Gemma 3)
BLOCK_NORMS = {
    'pre': ('ln_1', 'ln_2'),
    'post': ('ln_1_post', 'ln_2_post'),
    'both': ('ln_1', 'ln_1_post', 'ln_2', 'ln_2_post')}
# RMSNorm of queries and keys: none; of each head; of all heads together; without gain, after RoPE
QK_NORMS = ('', 'learned', 'all_heads', 'plain')
# attention to all keys; to a sliding window; within a chunk; to all, without RoPE
LAYER_TYPES = ('full', 'window', 'chunk', 'nope')


# --- RoPE: positions as rotations of queries and keys, in place of GPT-2's learned positions
POSITIONS = ('learned', 'rope')


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The change of RoPE's frequencies for longer sequences than in pretraining, see
    rope_inv_freq."""
    kind: str  # one of ROPE_SCALINGS
    factor: float  # context extension factor
    original_length: int  # tokens per sequence in pretraining
    # low_freq_factor (yarn: beta_slow): pairs with fewer rotations are slowed down by the factor
    low: float = 1.0
    # high_freq_factor (yarn: beta_fast): pairs with more rotations keep their frequency
    high: float = 4.0
    truncate: bool = True  # yarn: the transition starts and ends at whole pairs
    amplitude: float = 1.0  # cosines and sines are multiplied by it
    pair_factors: tuple = ()  # longrope: by how much each pair is slowed down

    def __post_init__(self) -> None:
        object.__setattr__(self, 'pair_factors', tuple(self.pair_factors))


def rope_inv_freq(theta: float, width: int, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns RoPE's rotation in radians per position for each of the width / 2 pairs of channels,
    a numpy array. theta: RoPE's base.

    scaling: a RopeScaling; None gives theta^(-2 j / width) for pair j."""
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return frequencies
    return ROPE_SCALINGS[scaling.kind](frequencies, scaling, theta)


def scale_linear(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Divides all frequencies by scaling.factor (arXiv:2306.15595)."""
    return frequencies / scaling.factor


def scale_longrope(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Divides the frequency of each pair by its own factor, scaling.pair_factors
    (arXiv:2402.13753)."""
    return frequencies / np.array(scaling.pair_factors)


def scale_llama3(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Keeps the frequency of each pair that rotates at least scaling.high times over the original
    length. Divides the frequency of each pair that rotates at most scaling.low times by
    scaling.factor. In between, the transition is linear in the number of rotations."""
    rotations = frequencies * scaling.original_length / (2 * np.pi)
    keep = (rotations - scaling.low) / max(scaling.high - scaling.low, 1e-9)
    return slow_down(frequencies, scaling.factor, keep)


def scale_yarn(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Scales RoPE's frequencies for longer texts, as YaRN does (arXiv:2309.00071). As in
    scale_llama3, high frequencies stay, and low ones are divided by the factor. Between them, the
    change from one to the other is linear in the index of the frequency."""
    width = 2 * len(frequencies)
    rotations = np.array([scaling.high, scaling.low])
    wavelengths = scaling.original_length / (2 * np.pi * rotations)
    first, last = width * np.log(wavelengths) / (2 * np.log(theta))
    if scaling.truncate:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    keep = 1 - (np.arange(width // 2) - first) / (last - first or 1e-3)
    return slow_down(frequencies, scaling.factor, keep)


def slow_down(frequencies: np.ndarray, factor: float, keep: np.ndarray) -> np.ndarray:
    """Divides some of RoPE's frequencies by `factor`, and returns the new frequencies. frequencies,
    keep: arrays with an element for each pair of channels that RoPE rotates. A frequency is
    unchanged where keep >= 1, divided by `factor` where keep <= 0, and a linear mix of both in
    between."""
    keep = np.clip(keep, 0, 1)
    return frequencies * keep + frequencies / factor * (1 - keep)


ROPE_SCALINGS = {
    'linear': scale_linear, 'llama3': scale_llama3, 'yarn': scale_yarn, 'longrope': scale_longrope}


def rope_of_layer(config: GPTConfig, layer_type: str, head_width: int) -> tuple[np.ndarray, float]:
    """Returns (frequencies; factor) of RoPE in a layer. frequencies: a numpy array with the radians
    per position of each pair of channels that is rotated. The cosines and sines are multiplied by
    `factor`, which is 1.0 unless YaRN or LongRoPE sets another one.
    layer_type: one of LAYER_TYPES. head_width: the channels of a head, or of the part of a head
    that has RoPE."""
    width = config.rope_width or head_width
    if layer_type == 'window' and config.window_rope_theta:
        return rope_inv_freq(config.window_rope_theta, width), 1.0
    amplitude = config.rope_scaling.amplitude if config.rope_scaling else 1.0
    return rope_inv_freq(config.rope_theta, width, config.rope_scaling), amplitude


def rope_table(config: GPTConfig, layer_type: str, head_width: int,
               position_BxT: Array) -> list[Array]:
    """Returns [the cosines, the sines] of the angles position * frequency_j, float32 [B, T, 1, F]
    each. The F frequencies are those of rope_of_layer, one for each pair of channels. Both results
    are multiplied by the factor that rope_of_layer returns. layer_type, head_width: see
    rope_of_layer."""
    frequencies, amplitude = rope_of_layer(config, layer_type, head_width)

    def cos_and_sin(position_BxT):
        angle = position_BxT[..., None, None] * jnp.asarray(frequencies, jnp.float32)
        return amplitude * jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)

    return jnp.split(computed_once(cos_and_sin, position_BxT), 2, axis=-1)


def apply_rope(x_BxTxHxK: Array, table: list[Array]) -> Array:
    """Rotates the pairs (x_j, x_{j + K/2}) of each head by position * frequency_j (RoPE,
    arXiv:2104.09864), in float32. table: the result of rope_table. If the table was made with
    config.rope_width, rope_width takes the place of K: only the first rope_width channels form
    pairs, and the other channels are unchanged."""
    cos, sin = table
    rotated, rest = jnp.split(x_BxTxHxK, [2 * cos.shape[-1]], axis=-1)
    a, b = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.astype(x_BxTxHxK.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def apply_positions(config: GPTConfig, layer_type: str, q_BxTxHxK: Array, k_BxTxGxK: Array,
                    position_BxT: Array) -> tuple[Array, Array]:
    """Returns (q; k) after RoPE and, if qk_norm is 'plain', after an RMSNorm without gain.

    'nope' layers have neither RoPE nor this norm. They have an attention temperature (Llama 4): the
    query at position p is scaled by 1 + query_growth * ln(1 + floor((p + 1) /
    query_growth_every))."""
    if layer_type == 'nope':
        growth_BxT = jnp.log1p((position_BxT + 1) // config.query_growth_every)
        scale_BxTx1x1 = (1 + config.query_growth * growth_BxT)[..., None, None]
        return (q_BxTxHxK * scale_BxTx1x1).astype(q_BxTxHxK.dtype), k_BxTxGxK
    table = rope_table(config, layer_type, q_BxTxHxK.shape[-1], position_BxT)
    q_BxTxHxK = apply_rope(q_BxTxHxK, table)
    k_BxTxGxK = apply_rope(k_BxTxGxK, table)
    if config.qk_norm == 'plain':
        q_BxTxHxK = rms_normalize(q_BxTxHxK, config.norm_eps).astype(q_BxTxHxK.dtype)
        k_BxTxGxK = rms_normalize(k_BxTxGxK, config.norm_eps).astype(k_BxTxGxK.dtype)
    return q_BxTxHxK, k_BxTxGxK


# --- multi-head latent attention
@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Sizes of multi-head latent attention, see LatentAttention."""
    q_rank: int  # rank of the query projection; 0 is full
    kv_rank: int  # width of the latent; keys and values are projections of it
    nope_dim: int  # width of the part of a query or key head without position
    rope_dim: int  # width of the part with RoPE; all heads share the keys' part
    v_dim: int  # width of a value head


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). K and V of all heads are
    projected from one low-rank latent per token. A second part of the keys, shared by all heads,
    carries RoPE. Only the latent and this part of the keys are cached."""
    config: GPTConfig
    layer_type: str = 'full'

    @nn.compact
    def __call__(self, x_BxTxD: Array, stream: Stream | None = None, call: Call | None = None,
                 cache: dict | None = None) -> tuple[Array, Stream | None, dict | None]:
        """Does the same as CausalSelfAttention.__call__. The cache holds {'latent': [B, 1, S, C],
        'rope': [B, 1, S, rope_dim]}."""
        cfg, mla, H = self.config, self.config.mla, self.config.n_head
        B, T, D = x_BxTxD.shape
        call = call or create_call(x_BxTxD)

        # queries: each head has a part without position and a part with RoPE
        q_in = x_BxTxD
        if mla.q_rank:
            q_in = Dense(cfg, mla.q_rank, tp=(), name='q_a')(x_BxTxD)
            q_in = RMSNorm(cfg, 1e-6, name='q_norm')(q_in)
        q = Dense(cfg, H * (mla.nope_dim + mla.rope_dim), name='q_b')(q_in)
        q_BxTxHxK = q.reshape(B, T, H, -1)
        q_nope_BxTxHxK, q_rope_BxTxHxK = jnp.split(q_BxTxHxK, [mla.nope_dim], axis=-1)
        table = rope_table(cfg, self.layer_type, mla.rope_dim, call.position_BxT)
        q_rope_BxTxHxK = apply_rope(q_rope_BxTxHxK, table)

        # keys and values: one latent per token, and one key part with RoPE for all heads
        kv_a = Dense(cfg, mla.kv_rank + mla.rope_dim, tp=(), name='kv_a')(x_BxTxD)
        latent_BxTxC, k_rope_BxTxK = jnp.split(kv_a, [mla.kv_rank], axis=-1)
        latent_BxTxC = RMSNorm(cfg, 1e-6, name='kv_norm')(latent_BxTxC)
        k_rope_BxTx1xK = apply_rope(k_rope_BxTxK[:, :, None], table)
        kv = {'latent': latent_BxTxC[:, :, None], 'rope': k_rope_BxTx1xK}

        kv_b_shape = mla.kv_rank, H * (mla.nope_dim + mla.v_dim)
        kv_b = self.param('kv_b', nn.initializers.normal(INIT_STD), kv_b_shape)
        kv_b = kv_b.astype(cfg.dtype).reshape(mla.kv_rank, H, -1)
        wk_CxHxK, wv_CxHxK = jnp.split(kv_b, [mla.nope_dim], axis=-1)
        scale = cfg.attention_scale or (mla.nope_dim + mla.rope_dim)**-0.5

        # Two forms give the same result; the one with fewer multiplications is taken. The absorbed
        # form (decode) folds kv_b into q and the output: T S H 2C multiplications. The projected
        # form (prefill) computes K and V from the latents: (S C + T S) H (nope + v).
        n_kv = mla.nope_dim + mla.v_dim
        absorbed = T * (2 * mla.kv_rank - n_kv) < mla.kv_rank * n_kv
        if absorbed:
            # no kernel has such wide heads
            call = call.replace(may_use_kernel=False)

        def qkv_of(kv):
            if absorbed:
                q_latent_BxTxHxC = jnp.einsum('bthk,chk->bthc', q_nope_BxTxHxK, wk_CxHxK)
                q_BxTxHxC = jnp.concatenate([q_latent_BxTxHxC, q_rope_BxTxHxK], axis=-1)
                k_BxSx1xC = jnp.concatenate([kv['latent'], kv['rope']], axis=-1)
                return q_BxTxHxC, k_BxSx1xC, kv['latent']
            latent_BxSxC = kv['latent'][:, :, 0]
            k_nope_BxSxHxK = jnp.einsum('bsc,chk->bshk', latent_BxSxC, wk_CxHxK)
            k_rope_BxSxHxK = jnp.broadcast_to(kv['rope'], (*k_nope_BxSxHxK.shape[:3], mla.rope_dim))
            q_BxTxHxK = jnp.concatenate([q_nope_BxTxHxK, q_rope_BxTxHxK], axis=-1)
            k_BxSxHxK = jnp.concatenate([k_nope_BxSxHxK, k_rope_BxSxHxK], axis=-1)
            v_BxSxHxK = jnp.einsum('bsc,chk->bshk', latent_BxSxC, wv_CxHxK)
            return q_BxTxHxK, k_BxSxHxK, v_BxSxHxK

        y_BxTxHxK, cache = attend(self, qkv_of, kv, call, cache, scale=scale)
        if self.is_mutable_collection('intermediates'):
            q_BxTxHxK, k_BxTxHxK, _ = qkv_of(kv)
            record_attention(self, q_BxTxHxK, k_BxTxHxK, call, scale=scale)
        if absorbed:
            y_BxTxHxK = jnp.einsum('bthc,chk->bthk', y_BxTxHxK, wv_CxHxK)
        y_BxTxD = residual_dense(cfg)(y_BxTxHxK.reshape(B, T, -1))
        return dropout(self, y_BxTxD, call), stream, cache


# --- MLPs
# whether GELU is approximated: exact (erf), as in nanoGPT; by tanh, as in the published GPT-2
ACTIVATIONS = {'gelu': False, 'gelu_tanh': True}


def plain_mlp(config: GPTConfig, h: Array, gate: Array | None) -> Array:
    """Computes gelu(h), as in GPT-2. h: the output of c_fc. gate: not used."""
    return gelu(h, ACTIVATIONS[config.activation])


def swiglu(config: GPTConfig, h: Array, gate: Array) -> Array:
    """Computes SwiGLU (arXiv:2002.05202), silu(gate) * h. h is the output of c_fc, and `gate` is
    the output of c_gate."""
    return jax.nn.silu(gate) * h


def geglu(config: GPTConfig, h: Array, gate: Array) -> Array:
    """Computes GEGLU (arXiv:2002.05202), gelu(gate) * h. h is the output of c_fc, and `gate` is the
    output of c_gate."""
    return gelu(gate, ACTIVATIONS[config.activation]) * h


def swiglu_clamped(config: GPTConfig, h: Array, gate: Array) -> Array:
    """Computes the SwiGLU of gpt-oss, (h + 1) * gate * sigmoid(1.702 gate). Before that, h is
    clamped to [-limit, limit] and gate to at most limit, where limit is config.swiglu_limit. h is
    the output of c_fc, and `gate` is the output of c_gate."""
    gate = jnp.minimum(gate, config.swiglu_limit)
    h = jnp.clip(h, -config.swiglu_limit, config.swiglu_limit)
    return (h + 1) * gate * jax.nn.sigmoid(1.702 * gate)


# the functions between the matrices of an MLP
MLPS = {'gelu': plain_mlp, 'swiglu': swiglu, 'swiglu_clamped': swiglu_clamped, 'geglu': geglu}
GATED = ('swiglu', 'swiglu_clamped', 'geglu')  # MLPs of three matrices; the others have two


# --- mixture of experts
SCORES = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of an MLP, see MoELayer."""
    n_expert: int
    n_used: int  # experts per token
    width: int  # MLP width of an expert
    shared_width: int = 0  # width of an MLP that all tokens go through in addition; 0 is none
    layers: tuple = (True,)  # which layers have experts; a shorter pattern repeats
    score: str = 'softmax'  # turns the router's logits into expert weights, a key of SCORES
    normalize: bool = True  # the weights of the chosen experts sum to 1
    scale: float = 1.0  # factor of the weights
    # a bias added to the scores for choosing experts, not to their weights
    selection_bias: bool = False
    n_group: int = 1  # expert groups (group-limited routing)
    n_group_used: int = 1  # groups a token may route to
    weigh_input: bool = False  # the weight scales an expert's input, not its output
    balance: float = 0.0  # coefficient of the load-balancing loss

    def __post_init__(self) -> None:
        object.__setattr__(self, 'layers', tuple(bool(x) for x in self.layers))
        if not 1 <= self.n_used <= self.n_expert:
            raise UserError(f'a token can use 1 to {self.n_expert} of {self.n_expert} experts, '
                            f'not {self.n_used}')
        check_choice("the experts' score", self.score, SCORES)
        # a group is ranked by its two best experts
        has_pairs = self.n_group == 1 or self.n_expert >= 2 * self.n_group
        uses_groups_that_are_there = 1 <= self.n_group_used <= self.n_group
        if self.n_expert % self.n_group or not has_pairs or not uses_groups_that_are_there:
            raise UserError(f'{self.n_expert} experts cannot be {self.n_group} equal groups, with '
                            f'{self.n_group_used} of them in use')


class Router(nn.Module):
    """Chooses experts: x [B, T, D] -> (the experts of each token, int32 [P, U]; the weights of
    these experts, float32 [P, U]), where P = B T and U = n_used."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD: Array, call: Call | None = None) -> tuple[Array, Array]:
        cfg, moe, E = self.config, self.config.moe, self.config.moe.n_expert
        B, T, D = x_BxTxD.shape
        # a score for each expert
        kernel = self.param('kernel', nn.initializers.normal(INIT_STD), (D, E))
        logits_PxE = x_BxTxD.reshape(-1, D).astype(jnp.float32) @ kernel.astype(jnp.float32)
        if cfg.bias:
            logits_PxE += self.param('bias', nn.initializers.zeros, (E,))
        score_PxE = SCORES[moe.score](logits_PxE)

        # the best experts, by a rank that may differ from the score
        rank_PxE = score_PxE
        if moe.selection_bias:
            rank_PxE += self.param('selection_bias', nn.initializers.zeros, (E,))
        # group score = sum of its top-2 expert scores; experts of other groups are not eligible
        if moe.n_group > 1:
            rank_by_group = rank_PxE.reshape(B * T, moe.n_group, -1)
            group_score = jax.lax.top_k(rank_by_group, 2)[0].sum(-1)
            _, best_groups = jax.lax.top_k(group_score, moe.n_group_used)
            eligible = jax.nn.one_hot(best_groups, moe.n_group, dtype=bool).any(1)
            rank_PxE = jnp.where(eligible[..., None], rank_by_group, -jnp.inf).reshape(B * T, E)
        _, expert_PxU = jax.lax.top_k(rank_PxE, moe.n_used)
        weight_PxU = jnp.take_along_axis(score_PxE, expert_PxU, axis=-1)
        if moe.normalize:
            weight_PxU /= weight_PxU.sum(-1, keepdims=True) + 1e-20

        # balanced over the tokens of a sequence, without padding
        padding_BxT = None if call is None else call.padding_BxT
        balance = balance_loss(
            expert_PxU.reshape(B, T, -1), score_PxE.reshape(B, T, E), padding_BxT)
        self.sow('losses', 'balance', moe.balance * balance)
        return expert_PxU, weight_PxU * moe.scale


def balance_loss(expert_BxTxU: Array, score_BxTxE: Array,
                 padding_BxT: Array | None = None) -> Array:
    """Returns E * sum over experts (share of tokens * mean score), a scalar that is 1 if balanced
    (the load-balancing loss of Switch, arXiv:2101.03961).

    The loss is computed for each sequence by itself and averaged over the sequences (DeepSeek-V3,
    arXiv:2412.19437), so that it does not depend on how the batch is sharded. expert_BxTxU: the
    experts of each token. score_BxTxE: the router's scores. padding_BxT: True for tokens that do
    not count."""
    T, U = expert_BxTxU.shape[1:]
    E = score_BxTxE.shape[-1]
    n_chosen_BxTxE = jax.nn.one_hot(expert_BxTxU, E).sum(2)
    score_BxTxE /= score_BxTxE.sum(-1, keepdims=True)
    n_text_Bx1: Array | int = T
    if padding_BxT is not None:
        is_text_BxTx1 = ~padding_BxT[..., None]
        n_chosen_BxTxE *= is_text_BxTx1
        score_BxTxE *= is_text_BxTx1
        n_text_Bx1 = jnp.maximum(is_text_BxTx1.sum(1), 1)
    share_BxE = n_chosen_BxTxE.sum(1) / (n_text_Bx1 * U)
    mean_score_BxE = score_BxTxE.sum(1) / n_text_Bx1
    return E * (share_BxE * mean_score_BxE).sum(-1).mean()


class ExpertDense(nn.Module):
    """The parameters of a Dense layer for every expert: {'kernel': [E, I, O], 'bias': [E, O]}."""
    config: GPTConfig
    shape: tuple  # (I, O)
    init_std: float = INIT_STD

    @nn.compact
    def __call__(self) -> dict:
        E = self.config.moe.n_expert
        kernel = matrix_param(self, 'kernel', (E, *self.shape), self.init_std)
        bias = None
        if self.config.bias:
            bias = self.param('bias', nn.initializers.zeros, (E, self.shape[1]))
        return {'kernel': kernel, 'bias': bias}


class MoELayer(nn.Module):
    """A mixture of experts: a router sends each token through n_used of n_expert MLPs. No token is
    dropped."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD: Array, call: Call | None = None) -> Array:
        cfg, moe, D = self.config, self.config.moe, self.config.n_embd
        x_PxD = x_BxTxD.reshape(-1, D)
        expert_PxU, weight_PxU = Router(cfg, name='router')(x_BxTxD, call)
        names = ('c_gate', 'c_fc') if cfg.has_gate else ('c_fc',)
        weights = {}
        for name in names:
            weights[name] = ExpertDense(cfg, (D, moe.width), name=f'experts_{name}')()
        init_std = INIT_STD / (2 * cfg.n_layer)**0.5  # as residual_dense
        weights['c_proj'] = ExpertDense(cfg, (moe.width, D), init_std, name='experts_c_proj')()

        def expert(weights, x_bxD):
            """Computes one expert's MLP."""
            h_bxF = linear(x_bxD, **weights['c_fc'])
            gate_bxF = linear(x_bxD, **weights['c_gate']) if cfg.has_gate else None
            return linear(MLPS[cfg.mlp](cfg, h_bxF, gate_bxF), **weights['c_proj'])

        from jax_ops.experts import mix_experts  # here, because other models do not need it
        y_PxD = mix_experts(
            expert, weights, x_PxD, expert_PxU, weight_PxU, scale_input=moe.weigh_input,
            way=cfg.experts)
        y_BxTxD = y_PxD.reshape(x_BxTxD.shape)
        if moe.shared_width:
            y_BxTxD += MLP(cfg, moe.shared_width, name='shared')(x_BxTxD)
        return dropout(self, y_BxTxD, call)


# -----------------------------------------------------------------------------
# checks of a config

# {a field of GPTConfig: the values that it may have}
KNOWN = {
    'dtype': DTYPES,
    'activation': ACTIVATIONS,
    'attention': ATTENTION,
    'experts': EXPERT_WAYS,
    'remat': ('none', *REMAT_POLICIES),
    'norm': NORMS,
    'block_norms': BLOCK_NORMS,
    'position': POSITIONS,
    'mlp': MLPS,
    'qk_norm': QK_NORMS,
}


def check_numbers(config: GPTConfig) -> None:
    """Raises UserError if a number in a GPTConfig, or in its rope_scaling, mla or moe, has the wrong
    type, is negative, is not finite, or is out of range."""
    for group in (config.rope_scaling, config.mla, config.moe, config):
        for field in dataclasses.fields(group) if group else ():
            value = getattr(group, field.name)
            if field.type in (int, 'int') and (type(value) is not int or not 0 <= value < 2**31):
                raise UserError(f'{field.name} must be a whole number below 2^31, not '
                                f'{str(value)[:40]}')
            is_number = type(value) in (int, float)
            if field.type in (float, 'float') and (not is_number or not 0 <= value < 3e38):
                raise UserError(f'{field.name} must be a finite number of at least 0, '
                                f'not {str(value)[:40]}')
    check_ranges(vars(config))


def check_config(config: GPTConfig) -> None:
    """Raises UserError if values of a GPTConfig are unknown, or in conflict."""
    for name, known in KNOWN.items():
        check_choice(name, getattr(config, name), known)
    if config.rope_scaling:
        check_choice('rope scaling', config.rope_scaling.kind, ROPE_SCALINGS)

    # numbers and widths of heads
    if config.n_embd % config.n_head and not config.head_dim and not config.mla:
        valid = [h for h in range(1, config.n_embd + 1) if config.n_embd % h == 0]
        raise UserError(f'n_head={config.n_head} does not divide n_embd={config.n_embd}; '
                        f'it may be one of {valid}')
    if config.n_head % config.kv_heads:
        valid = [h for h in range(1, config.n_head + 1) if config.n_head % h == 0]
        raise UserError(f'n_kv_head={config.n_kv_head} does not divide n_head={config.n_head}; '
                        f'one of {valid} does')
    if config.mla and config.mla.rope_dim % 2:
        raise UserError(f'rope turns pairs: rope_dim must be even, not {config.mla.rope_dim}')
    if config.rope_width % 2 or config.rope_width > config.head_width:
        raise UserError(f'rope_width must be even and at most the width of a head, '
                        f'not {config.rope_width}')
    turns_whole_heads = config.position == 'rope' and not config.mla and not config.rope_width
    if turns_whole_heads and config.head_width % 2:
        raise UserError(f'rope turns pairs: the width of a head must be even, '
                        f'not {config.head_width}')

    # types of layers
    if config.position != 'rope' and (config.qk_norm == 'plain' or 'nope' in config.layer_types):
        raise UserError("qk_norm=plain and nope layers need position='rope'")
    for layer_type in set(config.layer_types) or {''}:
        check_choice('layer_types', layer_type, LAYER_TYPES)
        if layer_type in ('window', 'chunk') and getattr(config, layer_type) < 1:
            raise UserError(f'{layer_type} layers need a size, as in {layer_type}=64')

    # execution options
    if config.attention in ('cudnn', 'splash') and config.mla:
        raise UserError(f'attention={config.attention} has no latent attention: '
                        'use attention=chunked')
    if config.scan_layers and len(set(map(config.layer, range(config.n_layer)))) > 1:
        raise UserError('scan_layers needs layers that are all alike; these differ in layer_types '
                        'or experts')
    # dropout's masks are hashes of 32-bit counters, which number the probabilities of a sequence
    if config.dropout and config.n_head * config.block_size**2 > 2**32:
        raise UserError(f'dropout numbers the attention probabilities of a sequence up to 2^32; '
                        f'n_head={config.n_head} x block_size={config.block_size}^2 are more: use '
                        'dropout=0')


def __getattr__(name: str) -> Any:
    """Imports generate and create_train_state on first use. So `from jax_transformer import
    generate` works, although the modules that define these two functions import this file."""
    if name == 'generate':
        from jax_generate import generate
        return generate
    if name == 'create_train_state':
        from jax_train_utils import create_train_state
        return create_train_state
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
