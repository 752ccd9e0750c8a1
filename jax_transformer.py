"""The model: what a GPT computes, in one file. GPT-2 first and without a gap; what newer models change comes last.

References: nanoGPT, https://github.com/karpathy/nanoGPT/blob/master/model.py;
OpenAI's GPT-2, https://github.com/openai/gpt-2/blob/master/src/model.py

Everything beyond GPT-2 (RoPE, GQA, sliding windows, MLA, MoE) is in the section "other models" and off by default.
jax_ops/ says how things are computed and sharded; the first line of each docstring there is the plain equivalent.

Shapes are in the names, so `q_BxTxHxK` needs no comment:
    B  batch (sequences)        D  n_embd, the width        H  attention heads
    T  positions of this call   F  MLP width, 4 D           K  head width, D / H
    S  slots of the KV cache    V  vocabulary               G  key and value heads (GQA; G = H in GPT-2)
A name that ends in _B holds one value per sequence.
"""
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

from jax_flags import DTYPES, UserError, check_choice, check_ranges
from jax_ops.attention import blockwise_attention, causal_mask, fused_causal_attention
from jax_ops.cpu import held_dtype, scatter_to_slots
from jax_ops.dropout import flat_index, hash_dropout
from jax_ops.experts import mix_experts
from jax_ops.layers import remat_policy, scan_blocks
from jax_ops.matmul import Int8, LowRank, Transposed, all_gather_param, fused_linear, linear, quantize, soft_cap
from jax_ops.sharding import COLUMN_PARALLEL, ROW_PARALLEL, create_mesh  # noqa: F401, create_mesh: public here
from jax_ops.vocabulary import (  # noqa: F401, ParallelLMHead and VocabParallelEmbedding: public here
    INIT_STD, ParallelLMHead, VocabParallelEmbedding, embed_tokens, lm_logits, map_sequence_chunks,
    masked_cross_entropy)

ACTIVATIONS = ('gelu', 'gelu_tanh')  # exact (erf), as in nanoGPT; the tanh approximation of the published GPT-2
ATTENTION = ('xla', 'chunked', 'cudnn', 'splash')  # 'xla': dot_product_attention; others: jax_ops/attention.py
REMAT = ('none', 'dots', 'full')  # recomputed in the backward pass: nothing; all but matmul outputs; whole blocks


# -----------------------------------------------------------------------------
# config

@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What the model is. The defaults are nanoGPT's GPT (GPT-2 124M with a padded vocabulary).

    Groups (rope_scaling, mla, moe) may be dicts, tuples may be lists. Raises UserError for what makes no model."""
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded up to a multiple of 64 for efficiency
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in Dense layers and LayerNorms, as GPT-2. False: a bit better and faster
    # numerics
    activation: str = 'gelu'  # of mlp='gelu' and 'geglu', one of ACTIVATIONS
    norm_eps: float = 1e-5
    dtype: str = 'float32'  # of activations and matmuls; parameters, softmax, logits and loss are always float32
    # execution: same parameters, same results up to rounding; not stored in checkpoints
    attention: str = 'xla'  # one of ATTENTION; a call with a KV cache always uses 'xla'
    scan_layers: bool = False  # compile one block and loop over the layers; dropout draws other masks
    remat: str = 'none'  # one of REMAT
    # other models, see the last section
    tied_head: bool = True  # False: lm_head is a matrix of its own
    embed_scale: float = 1.0  # of the token embeddings
    norm: str = 'layer'  # one of NORMS
    block_norms: str = 'pre'  # which norms a block has, one of BLOCK_NORMS
    position: str = 'learned'  # one of POSITIONS
    rope_theta: float = 10000.0  # RoPE base
    rope_scaling: 'RopeScaling | None' = None
    window_rope_theta: float = 0.0  # RoPE base of 'window' layers, which then have no rope_scaling; 0 is as the others
    n_kv_head: int = 0  # key and value heads (GQA); 0 is n_head
    head_dim: int = 0  # 0 is n_embd / n_head
    attention_scale: float = 0.0  # of the scores; 0 is head_dim**-0.5
    attention_cap: float = 0.0  # soft_cap of the scaled scores; 0 is none
    logit_cap: float = 0.0  # soft_cap of the logits
    qkv_bias: bool = False  # a bias of q, k and v even if the other layers have none
    qk_norm: str = ''  # RMSNorm of queries and keys, one of QK_NORMS
    sinks: bool = False  # a learned attention-sink logit per head (arXiv:2309.17453)
    layer_types: tuple = ('full',)  # of LAYER_TYPES, one per layer; a shorter pattern repeats
    window: int = 0  # sliding-window size of 'window' layers, current token included
    chunk: int = 0  # 'chunk' layers attend within chunks of this many positions
    query_growth: float = 0.0  # attention temperature of 'nope' layers (Llama 4): the query at position p is scaled by
    query_growth_every: int = 8192  # 1 + query_growth * ln(1 + floor((p + 1) / query_growth_every))
    mlp: str = 'gelu'  # one of MLPS; 'gelu' is the MLP without gate, whose function is `activation`
    n_inner: int = 0  # MLP width; 0 is 4 n_embd
    swiglu_limit: float = 7.0  # of 'swiglu_clamped'
    mla: 'MLAConfig | None' = None
    moe: 'MoEConfig | None' = None

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
        """(layer type, whether the MLP is a mixture of experts) of layer i."""
        is_moe = self.moe is not None and self.moe.layers[i % len(self.moe.layers)]
        return self.layer_types[i % len(self.layer_types)], is_moe

    def __post_init__(self):
        init_config(self)

    def architecture(self):
        """{name: value} of the fields that say what the model is: GPTConfig(**config.architecture())."""
        execution = ('attention', 'scan_layers', 'remat')
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in execution}


# -----------------------------------------------------------------------------
# norm, dense, dropout

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


def norm(config, name=None):
    if name in BLOCK_NORMS['both'] and name not in BLOCK_NORMS[config.block_norms]:  # GPT-2 has no ln_1_post, ln_2_post
        return lambda x: x
    return (RMSNorm if config.norm == 'rms' else LayerNorm)(config, name=name)


def matrix_param(module, name, shape, init_std=INIT_STD):
    """A float32 parameter of a module, or the Int8, Transposed or LowRank that decoding or LoRA puts in its place."""
    value = module.get_variable('params', name)
    if isinstance(value, (Int8, Transposed, LowRank)):
        return value
    return module.param(name, nn.initializers.normal(init_std), shape)


class Dense(nn.Module):
    """x [..., I] @ kernel + bias -> [..., features] in the config's dtype. A tuple of features stores several
    projections side by side in one kernel and returns a list (c_attn: q, k, v)."""
    config: GPTConfig
    features: int | tuple
    init_std: float = INIT_STD
    tp: tuple = COLUMN_PARALLEL  # how tensor parallelism shards the kernel, or ROW_PARALLEL, or () for not at all

    @nn.compact
    def __call__(self, x):
        n_out = int(np.sum(self.features))
        kernel = matrix_param(self, 'kernel', (x.shape[-1], n_out), self.init_std)
        bias = self.param('bias', nn.initializers.zeros, (n_out,)) if self.config.bias else None
        if isinstance(self.features, tuple):
            return fused_linear(x, kernel, bias, self.features)
        return linear(x, kernel, bias, tp=self.tp)


def residual_dense(config):
    """The Dense layer that writes to the residual stream; initial values scaled by 1 / sqrt(2 n_layer), as GPT-2's."""
    return Dense(config, config.n_embd, INIT_STD / (2 * config.n_layer)**0.5, ROW_PARALLEL, name='c_proj')


def dropout_keys(module, seq_id_B):
    """One dropout key per sequence, fold_in(key, seq_id_B[b]); None where dropout is off. Masks do not depend on
    micro-batching or sharding, so 1 and 8 devices give the same loss curve."""
    if seq_id_B is None or module.config.dropout == 0:
        return None
    return jax.vmap(jax.random.fold_in, (None, 0))(module.make_rng('dropout'), seq_id_B)


def dropout(module, x, seq_id_B):
    """Dropout of x [B, ...]; seq_id_B: ids of the sequences, None where dropout is off."""
    key_B = dropout_keys(module, seq_id_B)
    return x if key_B is None else hash_dropout(x, module.config.dropout, key_B, flat_index(x.shape[1:]))

# -----------------------------------------------------------------------------
# attention

def dot_product_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, *, scale=None, cap=0.0, sinks_H=None,
                          dropout_rate=0.0, key_B=None):
    """For G = H: softmax(einsum('bthk,bshk->bhts', q, k) * scale) v over the keys that the mask allows -> [B, T, H, K].

    Softmax is in float32. scale: K**-0.5 if not given. cap: of soft_cap. GQA: query head h attends to key head
    h // Q, Q = H / G; the Q heads of a group are folded into the time axis. sinks_H: one more logit per head, whose
    probability goes nowhere. key_B: dropout keys of the sequences, if any. Values may have another width than keys."""
    B, T, H, K = q_BxTxHxK.shape
    S, G = k_BxSxGxK.shape[1:3]
    Q = H // G
    if T < S and T * S >= 2**18:  # a piece of a long prompt with its KV cache: neither dropout nor gradients
        return blockwise_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, scale=scale, cap=cap, sinks_H=sinks_H)
    q_BxTQxGxK = q_BxTxHxK.reshape(B, T, G, Q, K).swapaxes(2, 3).reshape(B, T * Q, G, K)
    # heads first, as the KV cache is stored
    q_BxGxTQxK, k_BxGxSxK, v_BxGxSxK = (x.swapaxes(1, 2) for x in (q_BxTQxGxK, k_BxSxGxK, v_BxSxGxK))
    scores_BxGxTQxS = jnp.einsum('bgtk,bgsk->bgts', q_BxGxTQxK, k_BxGxSxK, preferred_element_type=jnp.float32)
    scores_BxGxTQxS = soft_cap(scores_BxGxTQxS * (scale or K**-0.5), cap)
    mask_Bx1xTQxS = jnp.repeat(mask_BxTxS, Q, axis=1)[:, None]
    scores_BxGxTQxS = jnp.where(mask_Bx1xTQxS, scores_BxGxTQxS, jnp.finfo(jnp.float32).min)
    if sinks_H is not None:
        sinks_BxGxTQx1 = jnp.broadcast_to(jnp.tile(sinks_H.reshape(G, Q), T)[..., None], (B, G, T * Q, 1))
        scores_BxGxTQxS = jnp.concatenate([scores_BxGxTQxS, sinks_BxGxTQx1], axis=-1)
    probs_BxGxTQxS = jax.nn.softmax(scores_BxGxTQxS)[..., :S].astype(v_BxSxGxK.dtype)
    if key_B is not None:
        probs_BxGxTQxS = hash_dropout(probs_BxGxTQxS, dropout_rate, key_B, flat_index(probs_BxGxTQxS.shape[1:]))
    y_BxTQxGxK = jnp.einsum('bgts,bgsk->bgtk', probs_BxGxTQxS, v_BxGxSxK).swapaxes(1, 2)
    return y_BxTQxGxK.reshape(B, T, Q, G, -1).swapaxes(2, 3).reshape(B, T, H, -1)


def attention_mask(config, layer_type, key_position_BxS, position_BxT, start_BxT=None):
    """[B, T, S], True where a query may attend to a key: at its own position and before, within its window or chunk."""
    limits = span_limits(config, layer_type)
    if not limits and key_position_BxS.shape[1] > config.block_size:  # a ring and the keys that overwrite it
        limits = {'window': config.block_size}
    mask_BxTxS = causal_mask(key_position_BxS[:, None, :], position_BxT[:, :, None], **limits)
    return mask_BxTxS if start_BxT is None else mask_BxTxS & (start_BxT[:, None, :] == start_BxT[:, :, None])


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a query attends to the keys at its own position and before."""
    config: GPTConfig
    layer_type: str = 'full'  # one of LAYER_TYPES

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT=None, cache=None, seq_id_B=None, start_BxT=None):
        """Returns (y_BxTxD, cache). position_BxT: position ids; None is 0 .. T-1 without a KV cache, where a fused
        kernel can be used. cache: see update_kv_cache. seq_id_B: see dropout(). start_BxT: see GPT.loss."""
        cfg = self.config
        B, T, D = x_BxTxD.shape
        H, G, K = cfg.n_head, cfg.kv_heads, cfg.head_width
        is_default = position_BxT is None or start_BxT is not None
        position_BxT = jnp.arange(T)[None] if position_BxT is None else position_BxT

        qkv_cfg = dataclasses.replace(cfg, bias=cfg.bias or cfg.qkv_bias)
        q, k, v = Dense(qkv_cfg, (H * K, G * K, G * K), name='c_attn')(x_BxTxD)
        if cfg.qk_norm == 'all_heads':
            q, k = RMSNorm(cfg, name='q_norm')(q), RMSNorm(cfg, name='k_norm')(k)
        q_BxTxHxK, k_BxTxGxK, v_BxTxGxK = q.reshape(B, T, H, K), k.reshape(B, T, G, K), v.reshape(B, T, G, K)
        if cfg.qk_norm == 'learned':
            q_BxTxHxK, k_BxTxGxK = RMSNorm(cfg, name='q_norm')(q_BxTxHxK), RMSNorm(cfg, name='k_norm')(k_BxTxGxK)
        if cfg.position == 'rope':
            q_BxTxHxK, k_BxTxGxK = apply_positions(cfg, self.layer_type, q_BxTxHxK, k_BxTxGxK, position_BxT)
        sinks_H = self.param('sinks', nn.initializers.zeros, (H,)) if cfg.sinks else None
        new_kv = {'k': k_BxTxGxK, 'v': v_BxTxGxK}
        kv, key_position_BxS, cache = update_kv_cache(cfg, self.layer_type, cache, new_kv, position_BxT)

        options = {'scale': cfg.attention_scale, 'cap': cfg.attention_cap, 'sinks_H': sinks_H,
                   'dropout_rate': cfg.dropout, 'key_B': dropout_keys(self, seq_id_B)}
        # in training jax_devices/parallel.py chooses the path; the kernels mask in jax_ops/attention.py. init has T = 1
        if is_default and cfg.attention != 'xla' and not self.is_initializing():
            y_BxTxHxK = fused_causal_attention(cfg.attention, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, start_BxT=start_BxT,
                                               **span_limits(cfg, self.layer_type), **options)
        else:
            mask_BxTxS = attention_mask(cfg, self.layer_type, key_position_BxS, position_BxT, start_BxT)
            y_BxTxHxK = dot_product_attention(q_BxTxHxK, kv['k'], kv['v'], mask_BxTxS, **options)
        return dropout(self, residual_dense(cfg)(y_BxTxHxK.reshape(B, T, H * K)), seq_id_B), cache


# -----------------------------------------------------------------------------
# KV cache: the token at position p has slot p, or slot p % S in a ring buffer (windows, chunks, RoPE), which is the
# same until the ring is full. Right-padded prompts of different lengths need no bookkeeping: PAD is never written.

CACHE_DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16, 'float16': jnp.float16, 'int8': jnp.int8,
                'float8': jnp.float8_e4m3fn}
PAD = 2**30  # position of a padding token: after every query, hence masked, and outside the cache, hence not written


def update_kv_cache(config, layer_type, cache, new_kv, position_BxT):
    """Writes the keys and values of this call, new_kv {name: [B, T, G, K]}, to a layer's cache.

    Returns (what queries attend to, {name: [B, S, G, K]}, without a cache new_kv; its positions [B, S]; new cache)."""
    if cache is None:
        return new_kv, position_BxT, None
    if has_ring_cache(config, layer_type):
        return update_ring_cache(config, layer_type, cache, new_kv, position_BxT)
    cache = write_cache(cache, new_kv, position_BxT)
    n_slots = cache[next(iter(new_kv))].shape[2]  # slot == position, so the causal mask hides slots not yet written
    return read_cache(cache, config.dtype), jnp.arange(n_slots)[None], cache


def write_cache(cache, new_kv, slot_BxT):
    """A layer's cache {name: [B, G, S, K]} with new_kv {name: [B, T, G, K]} in the given slots; out-of-range slots are
    ignored. int8 and float8 caches have a scale per vector, {name_scale: [B, G, S]}."""
    new_cache = {}
    for name, x_BxTxGxK in new_kv.items():
        slots = jnp.broadcast_to(slot_BxT, x_BxTxGxK.shape[:2])
        if f'{name}_scale' in cache:
            x_BxTxGxK, scale_BxTxG = quantize(x_BxTxGxK, held_dtype(cache[name]))
            new_cache[f'{name}_scale'] = scatter_to_slots(cache[f'{name}_scale'], scale_BxTxG, slots)
        new_cache[name] = scatter_to_slots(cache[name], x_BxTxGxK, slots)
    return new_cache


def read_cache(cache, dtype):
    """All slots of a layer's cache, {name: [B, S, G, K]}, in dtype."""
    kv = {}
    for name, x_BxGxSxK in cache.items():
        if name.endswith('_scale'):
            continue
        x_BxGxSxK = jax.lax.bitcast_convert_type(x_BxGxSxK, held_dtype(x_BxGxSxK))
        if f'{name}_scale' in cache:
            x_BxGxSxK = x_BxGxSxK.astype(jnp.float32) * cache[f'{name}_scale'][..., None]
        kv[name] = x_BxGxSxK.astype(dtype).swapaxes(1, 2)
    return kv


# -----------------------------------------------------------------------------
# MLP, block, GPT

@functools.partial(jax.checkpoint, static_argnums=1)
def gelu(x, approximate):
    """GELU (arXiv:1606.08415) in float32, the result in x's dtype; recomputed from x in the backward pass."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate).astype(x.dtype)


class MLP(nn.Module):
    config: GPTConfig
    width: int

    @nn.compact
    def __call__(self, x_BxTxD, seq_id_B=None):
        cfg = self.config
        h_BxTxF = Dense(cfg, self.width, name='c_fc')(x_BxTxD)
        if cfg.mlp == 'gelu':
            h_BxTxF = gelu(h_BxTxF, cfg.activation == 'gelu_tanh')
        else:
            h_BxTxF = gated_activation(cfg, Dense(cfg, self.width, name='c_gate')(x_BxTxD), h_BxTxF)
        return dropout(self, residual_dense(cfg)(h_BxTxF), seq_id_B)


class Block(nn.Module):
    config: GPTConfig
    layer_type: str = 'full'  # one of LAYER_TYPES
    is_moe: bool = False  # a mixture of experts in place of the MLP

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT=None, cache=None, seq_id_B=None, start_BxT=None):
        cfg = self.config
        attend = LatentAttention if cfg.mla else CausalSelfAttention
        mlp = MoELayer(cfg, name='mlp') if self.is_moe else MLP(cfg, cfg.mlp_width, name='mlp')
        h_BxTxD = norm(cfg, 'ln_1')(x_BxTxD)
        y_BxTxD, cache = attend(cfg, self.layer_type, name='attn')(h_BxTxD, position_BxT, cache, seq_id_B, start_BxT)
        x_BxTxD += norm(cfg, 'ln_1_post')(y_BxTxD)
        x_BxTxD += norm(cfg, 'ln_2_post')(mlp(norm(cfg, 'ln_2')(x_BxTxD), seq_id_B))
        return x_BxTxD, cache


class GPT(nn.Module):
    """GPT(config).apply({'params': params}, idx_BxT) -> float32 logits [B, T, vocab_size]; with method='loss' or
    method='with_cache', what those methods return."""
    config: GPTConfig

    def setup(self):
        cfg = self.config
        self.wte_VxD = matrix_param(self, 'wte', (cfg.vocab_size, cfg.n_embd))
        if cfg.position == 'learned':
            wpe = matrix_param(self, 'wpe', (cfg.block_size, cfg.n_embd))  # [positions, D]
            self.wpe = all_gather_param(wpe, cfg.dtype, ((None, 'fsdp'), (None, None)))
        self.h = [Block(cfg, *cfg.layer(i)) for i in range(cfg.n_layer)]
        self.ln_f = norm(cfg)
        lm_head_VxD = self.wte_VxD if cfg.tied_head else matrix_param(self, 'lm_head', (cfg.vocab_size, cfg.n_embd))
        self.lm_head_VxD = all_gather_param(lm_head_VxD, cfg.dtype, ROW_PARALLEL)

    def __call__(self, idx_BxT, *, position_BxT=None, deterministic=True, seq_id_B=None, logit_position_B=None):
        """Logits of the token after each position, float32 [B, T, V].

        position_BxT: position ids; 0 .. T-1 if not given. deterministic: False turns dropout on, which needs
        rngs={'dropout': key}. seq_id_B: the ids of the sequences, by which dropout draws; 0, 1, 2, ... if not given.
        logit_position_B: logits of this one index into T of each sequence only, [B, 1, V]."""
        x_BxTxD, _ = self.hidden(idx_BxT, position_BxT, deterministic=deterministic, seq_id_B=seq_id_B)
        if logit_position_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, logit_position_B[:, None, None], axis=1)
        return lm_logits(x_BxTxD, self.lm_head_VxD, self.config.logit_cap)

    def with_cache(self, idx_BxT, cache, *, position_BxT):
        """(logits as in __call__, cache): the T tokens are written to the KV cache (see init_cache in jax_generate.py),
        and attend to it. PAD in position_BxT marks padding."""
        x_BxTxD, cache = self.hidden(idx_BxT, position_BxT, cache)
        return lm_logits(x_BxTxD, self.lm_head_VxD, self.config.logit_cap), cache

    def loss(self, idx_BxT, targets_BxT, *, loss_chunk=0, deterministic=True, seq_id_B=None, start_BxT=None):
        """Cross-entropy of each target, float32 [B, T]. loss_chunk: logits are materialized for this many positions at
        a time, which must divide T; 0 is all. start_BxT: in rows packed with conversations, where that of each token
        starts: it attends to this conversation alone, and its position is counted from there."""
        position_BxT = None if start_BxT is None else jnp.arange(idx_BxT.shape[1]) - start_BxT
        x_BxTxD, _ = self.hidden(idx_BxT, position_BxT, None, start_BxT, deterministic=deterministic, seq_id_B=seq_id_B)

        def loss_of(x_BxTxD, target_BxT):
            return cross_entropy(lm_logits(x_BxTxD, self.lm_head_VxD, self.config.logit_cap, training=True), target_BxT)

        return map_sequence_chunks(loss_of, loss_chunk, x_BxTxD, targets_BxT)

    def embed(self, idx_BxT, position_BxT, seq_id_B=None):
        """The input of the first block, [B, T, D]."""
        cfg = self.config
        x_BxTxD = embed_tokens(self.wte_VxD, idx_BxT, cfg.dtype) * jnp.asarray(cfg.embed_scale, cfg.dtype)
        if cfg.position == 'learned':
            position_ids = jnp.arange(idx_BxT.shape[1])[None] if position_BxT is None else position_BxT
            x_BxTxD += jnp.take(self.wpe, position_ids, axis=0, mode='clip').astype(cfg.dtype)
        return dropout(self, x_BxTxD, seq_id_B)

    def hidden(self, idx_BxT, position_BxT=None, cache=None, start_BxT=None, *, deterministic=True, seq_id_B=None):
        """(activations after the last norm [B, T, D], the new cache)."""
        cfg = self.config
        if idx_BxT.shape[1] > cfg.block_size:
            raise ValueError(f'{idx_BxT.shape[1]} tokens do not fit in block_size {cfg.block_size}')
        if deterministic:
            seq_id_B = None
        elif seq_id_B is None:
            seq_id_B = jnp.arange(len(idx_BxT))
        x_BxTxD = self.embed(idx_BxT, position_BxT, seq_id_B)
        if cfg.scan_layers and cache is None and not self.is_initializing():
            return self.ln_f(scan_blocks(self, x_BxTxD, position_BxT, seq_id_B, start_BxT)), None

        run = Block.__call__
        if cfg.remat != 'none' and cache is None:
            run = nn.remat(run, policy=remat_policy(cfg.remat))
        elif cache is not None:
            run = nn.jit(run)  # traced and lowered once for all layers of a kind
        new_cache = {}
        for i, block in enumerate(self.h):
            layer_cache = cache[f'h_{i}'] if cache else None
            x_BxTxD, new_cache[f'h_{i}'] = run(block, x_BxTxD, position_BxT, layer_cache, seq_id_B, start_BxT)
        return self.ln_f(x_BxTxD), new_cache


def cross_entropy(logits_BxTxV, targets_BxT):
    """-log softmax(logits)[target], [B, T]. Of vocabulary-sharded logits XLA all-reduces [B, T] numbers."""
    with jax.named_scope('cross_entropy'):
        return jax.lax.platform_dependent(logits_BxTxV, targets_BxT, cuda=masked_cross_entropy,
                                          default=optax.softmax_cross_entropy_with_integer_labels)

# -----------------------------------------------------------------------------
# training state and counts

class TrainState(train_state.TrainState):
    """flax's TrainState (step, params, opt_state, tx) and the loss scale that float16 needs."""
    loss_scale: Any = None  # {'scale': float32, 'good_steps': int32}; None where nothing is scaled
    frozen: Any = None  # the weights to which LoRA adds, see load_frozen in jax_lora.py


def create_train_state(rng, config, tx):
    """TrainState with newly initialized float32 parameters and the state of the optax optimizer `tx` for them."""
    model = GPT(config)
    params = jax.jit(model.init)(rng, jnp.zeros((1, 1), jnp.int32))['params']
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, loss_scale=initial_loss_scale(config.dtype))
    return state.replace(step=jnp.int32(0))  # not flax's weakly typed 0, which would trigger a second compilation


def initial_loss_scale(dtype):
    """For float16, the 2**16 that torch.amp.GradScaler starts with; None where nothing is scaled."""
    return {'scale': jnp.float32(2**16), 'good_steps': jnp.int32(0)} if dtype == 'float16' else None


def without_tables(params):
    """The parameters by which activations are multiplied: all but wpe, and wte if lm_head is a matrix of its own."""
    tables = ('wpe', 'wte') if 'lm_head' in params else ('wpe',)
    return {name: part for name, part in params.items() if name not in tables}


def count_params(params, non_embedding=True):
    """Number of parameters; non_embedding: of those without_tables, as in nanoGPT."""
    return sum(x.size for x in jax.tree.leaves(without_tables(params) if non_embedding else params))


def estimate_mfu(n_params, config, tokens_per_sec, peak_flops, n_frozen=0):
    """Model FLOPs utilization: the share of `peak_flops` (FLOP/s of all devices together) that the training achieves.
    6 FLOPs per trained parameter and token, forward and backward, 4 per parameter of n_frozen, which have no gradient,
    and attention's 12 L H K T (PaLM, arXiv:2204.02311, appendix B), T being the layer's attention span. n_params, of
    the trained parameters, and n_frozen are count_params(params); experts that a token does not use do not count."""
    layers = [config.layer(i) for i in range(config.n_layer)]
    if moe := config.moe:
        expert_size = (2 if config.mlp == 'gelu' else 3) * config.n_embd * moe.width
        unused = sum(is_moe for _, is_moe in layers) * (moe.n_expert - moe.n_used) * expert_size
        n_params, n_frozen = (n_params, n_frozen - unused) if n_frozen else (n_params - unused, 0)
    spans = sum(min(config.block_size, attention_span(config, layer_type)) for layer_type, _ in layers)
    mla = config.mla
    width = (mla.nope_dim + mla.rope_dim + mla.v_dim) / 2 if mla else config.head_width
    flops_per_token = 6 * n_params + 4 * n_frozen + 12 * config.n_head * width * spans
    return flops_per_token * tokens_per_sec / peak_flops


# -----------------------------------------------------------------------------
# other models (skip on first reading): each part can be read alone, and acts only if the config asks for it.
# More letters: Q query heads per key head, C width of a latent, P tokens of a call (B T), E experts, U used per token
NORMS = ('layer', 'rms')
BLOCK_NORMS = {  # of the inputs of attention and MLP (GPT-2), of their outputs (OLMo 2), or of both (Gemma 3)
    'pre': ('ln_1', 'ln_2'), 'post': ('ln_1_post', 'ln_2_post'), 'both': ('ln_1', 'ln_1_post', 'ln_2', 'ln_2_post')}
POSITIONS = ('learned', 'rope')
MLPS = ('gelu', 'swiglu', 'swiglu_clamped', 'geglu')  # GPT-2; gated (arXiv:2002.05202), clamped (gpt-oss), by GELU
QK_NORMS = ('', 'learned', 'all_heads', 'plain')  # of each head, of all together; without gain, in layers with RoPE
ROPE_SCALINGS = ('linear', 'llama3', 'yarn')
LAYER_TYPES = ('full', 'window', 'chunk', 'nope')  # attention to all keys; a sliding window; a chunk; all, without RoPE


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies change for sequences longer than those of pretraining, see rope_inv_freq."""
    kind: str  # one of ROPE_SCALINGS
    factor: float  # context extension factor
    original_length: int  # of pretraining
    low: float = 1.0  # low_freq_factor (yarn: beta_slow): pairs with fewer rotations are slowed down by the factor
    high: float = 4.0  # high_freq_factor (yarn: beta_fast): pairs with more rotations keep their frequency
    truncate: bool = True  # yarn: the transition starts and ends at whole pairs
    amplitude: float = 1.0  # of cosine and sine


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Sizes of multi-head latent attention, see LatentAttention."""
    q_rank: int  # rank of the query projection; 0 is full
    kv_rank: int  # width of the latent, from which keys and values are projected
    nope_dim: int  # of a query or key head, the part without position
    rope_dim: int  # of a query head, and of the one key part with RoPE that all heads share
    v_dim: int  # of a value head


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of an MLP, see MoELayer."""
    n_expert: int
    n_used: int  # experts per token
    width: int  # MLP width of an expert
    shared_width: int = 0  # width of an MLP that all tokens go through in addition; 0 is none
    layers: tuple = (True,)  # which layers have experts; a shorter pattern repeats
    score: str = 'softmax'  # or 'sigmoid': turns the router's logits into expert weights
    normalize: bool = True  # the weights of the chosen experts sum to 1
    scale: float = 1.0  # of the weights
    selection_bias: bool = False  # a bias added to the scores for choosing experts, not to their weights
    n_group: int = 1  # expert groups (group-limited routing)
    n_group_used: int = 1  # groups a token may route to
    weigh_input: bool = False  # the weight scales an expert's input, not its output
    balance: float = 0.0  # coefficient of the load-balancing loss

    def __post_init__(self):
        object.__setattr__(self, 'layers', tuple(bool(x) for x in self.layers))
        if not 1 <= self.n_used <= self.n_expert:
            raise UserError(f'a token can use 1 to {self.n_expert} of {self.n_expert} experts, not {self.n_used}')
        check_choice("the experts' score", self.score, ('softmax', 'sigmoid'))
        if self.n_expert % self.n_group or not 1 <= self.n_group_used <= self.n_group:
            raise UserError(f'{self.n_expert} experts cannot be {self.n_group} equal groups of which '
                            f'{self.n_group_used} are used')


def init_config(config):
    """Makes the groups of a GPTConfig from dicts. Raises UserError for values out of range or in conflict."""
    for name, group in (('rope_scaling', RopeScaling), ('mla', MLAConfig), ('moe', MoEConfig)):
        if isinstance(getattr(config, name), dict):
            object.__setattr__(config, name, group(**getattr(config, name)))
    object.__setattr__(config, 'layer_types', tuple(config.layer_types))
    check_ranges(vars(config))
    if config.n_embd % config.n_head and not config.head_dim and not config.mla:
        valid = [h for h in range(1, config.n_embd + 1) if config.n_embd % h == 0]
        raise UserError(f'n_head={config.n_head} does not divide n_embd={config.n_embd}; it may be one of {valid}')
    for name, known in (('dtype', DTYPES), ('activation', ACTIVATIONS), ('attention', ATTENTION), ('remat', REMAT),
                        ('norm', NORMS), ('block_norms', BLOCK_NORMS), ('position', POSITIONS), ('mlp', MLPS),
                        ('qk_norm', QK_NORMS)):
        check_choice(name, getattr(config, name), known)
    if config.rope_scaling:
        check_choice('rope scaling', config.rope_scaling.kind, ROPE_SCALINGS)
    if config.n_head % config.kv_heads:
        valid = [h for h in range(1, config.n_head + 1) if config.n_head % h == 0]
        raise UserError(f'n_kv_head={config.n_kv_head} does not divide n_head={config.n_head}; one of {valid} does')
    if config.position != 'rope' and (config.qk_norm == 'plain' or 'nope' in config.layer_types):
        raise UserError("qk_norm=plain and nope layers need position='rope'")
    if config.position == 'rope' and config.head_width % 2 and not config.mla:
        raise UserError(f'rope turns pairs: the width of a head must be even, not {config.head_width}')
    for layer_type in set(config.layer_types) or {''}:
        check_choice('layer_types', layer_type, LAYER_TYPES)
        if layer_type in ('window', 'chunk') and getattr(config, layer_type) < 1:
            raise UserError(f'{layer_type} layers need a size, as in {layer_type}=64')
    if config.attention in ('cudnn', 'splash') and config.mla:
        raise UserError(f'attention={config.attention} has no latent attention: use attention=chunked')
    if config.scan_layers and len(set(map(config.layer, range(config.n_layer)))) > 1:
        raise UserError('scan_layers needs layers that are all alike; these differ in layer_types or experts')


class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv:1910.07467); statistics in float32."""
    config: GPTConfig
    eps: float | None = None  # config.norm_eps if not given

    @nn.compact
    def __call__(self, x):
        scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
        return (rms_normalize(x, self.eps or self.config.norm_eps) * scale).astype(self.config.dtype)


def rms_normalize(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


# --- RoPE
def rope_inv_freq(theta, width, scaling=None):
    """Radians per position by which RoPE rotates each of the width / 2 pairs, numpy.

    scaling: 'linear' slows all pairs down by the factor (arXiv:2306.15595). Otherwise pairs with many rotations over
    the original length keep their frequency and pairs with few are slowed down, with a linear transition between: over
    the number of rotations in Llama 3, over the pairs in YaRN (arXiv:2309.00071)."""
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return frequencies
    if scaling.kind == 'linear':
        return frequencies / scaling.factor
    if scaling.kind == 'llama3':
        rotations = frequencies * scaling.original_length / (2 * np.pi)
        keep = (rotations - scaling.low) / max(scaling.high - scaling.low, 1e-9)
    else:
        turns = np.array([scaling.high, scaling.low])
        first, last = width * np.log(scaling.original_length / (2 * np.pi * turns)) / (2 * np.log(theta))
        if scaling.truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        keep = 1 - (np.arange(width // 2) - first) / max(last - first, 1e-3)
    keep = np.clip(keep, 0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def apply_rope(config, x_BxTxHxK, position_BxT):
    """Rotates the pairs (x_j, x_{j + K/2}) by position * frequency_j (RoPE, arXiv:2104.09864), in float32."""
    frequencies = rope_inv_freq(config.rope_theta, x_BxTxHxK.shape[-1], config.rope_scaling)
    angle = position_BxT[..., None, None] * jnp.asarray(frequencies, jnp.float32)  # [B, T, 1, K / 2]
    amplitude = config.rope_scaling.amplitude if config.rope_scaling else 1.0
    cos, sin = amplitude * jnp.cos(angle), amplitude * jnp.sin(angle)
    a, b = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxTxHxK.dtype)


def apply_positions(config, layer_type, q_BxTxHxK, k_BxTxGxK, position_BxT):
    """RoPE of q and k, then the norm without gain if the config has it; 'nope' layers only scale q by query_growth."""
    if layer_type == 'nope':
        growth_BxT = jnp.log1p((position_BxT + 1) // config.query_growth_every)
        scale_BxTx1x1 = (1 + config.query_growth * growth_BxT)[..., None, None]
        return (q_BxTxHxK * scale_BxTx1x1).astype(q_BxTxHxK.dtype), k_BxTxGxK
    if layer_type == 'window' and config.window_rope_theta:
        config = dataclasses.replace(config, rope_theta=config.window_rope_theta, rope_scaling=None)
    qk = [apply_rope(config, x, position_BxT) for x in (q_BxTxHxK, k_BxTxGxK)]
    if config.qk_norm == 'plain':
        qk = [rms_normalize(x, config.norm_eps).astype(x.dtype) for x in qk]
    return qk


# --- layers with a limited attention span
def span_limits(config, layer_type):
    """The options of causal_mask that limit a layer's attention: {'window': n}, {'chunk': n} or {}."""
    return {layer_type: getattr(config, layer_type)} if layer_type in ('window', 'chunk') else {}


def attention_span(config, layer_type):
    """Number of positions that a query attends to at most, its own included."""
    return span_limits(config, layer_type).get(layer_type, config.block_size)


def has_ring_cache(config, layer_type):
    """Whether a layer's KV cache is a ring of its attention span: positions may exceed it, so keys are overwritten."""
    return bool(span_limits(config, layer_type)) or config.position == 'rope'


def update_ring_cache(config, layer_type, cache, new_kv, position_BxT):
    """update_kv_cache as a ring buffer: position p is stored in slot p % S, and overwritten once it is out of the
    attention span. A cache of S < span slots holds the first S positions only."""
    B, T = next(iter(new_kv.values())).shape[:2]
    S = next(iter(cache.values())).shape[2]
    span = attention_span(config, layer_type)
    position_BxT = jnp.broadcast_to(position_BxT, (B, T))

    def positions_held(last_Bx1):
        """Position held by each slot when the newest token is at `last`, [B, S]; PAD if the slot is empty."""
        p_BxS = last_Bx1 - (last_Bx1 - jnp.arange(S)) % S
        return jnp.where(p_BxS < 0, PAD, p_BxS)

    last_Bx1 = jnp.where(position_BxT < PAD, position_BxT, -1).max(1, keepdims=True)
    stays_BxT = (position_BxT < PAD) & (position_BxT > last_Bx1 - S)
    new_cache = write_cache(cache, new_kv, jnp.where(stays_BxT, position_BxT % S, S))
    if T - 1 + span <= S or S < span:
        return read_cache(new_cache, config.dtype), positions_held(last_Bx1), new_cache
    # this write may evict keys that earlier queries of the same call still need: attend to old cache + new keys
    kv = {name: jnp.concatenate([x, new_kv[name]], axis=1) for name, x in read_cache(cache, config.dtype).items()}
    return kv, jnp.concatenate([positions_held(position_BxT[:, :1] - 1), position_BxT], axis=1), new_cache


# --- multi-head latent attention
class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V of all heads are projected from one low-rank
    latent per token; a second key part, shared by all heads, carries RoPE. Only these two are cached."""
    config: GPTConfig
    layer_type: str = 'full'

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT=None, cache=None, seq_id_B=None, start_BxT=None):
        """As CausalSelfAttention's; the cache holds {'latent': [B, 1, S, C], 'rope': [B, 1, S, rope_dim]}."""
        cfg, mla, H = self.config, self.config.mla, self.config.n_head
        B, T, D = x_BxTxD.shape
        is_default = position_BxT is None or start_BxT is not None
        position_BxT = jnp.arange(T)[None] if position_BxT is None else position_BxT
        q_in = x_BxTxD
        if mla.q_rank:
            q_in = RMSNorm(cfg, 1e-6, name='q_norm')(Dense(cfg, mla.q_rank, tp=(), name='q_a')(x_BxTxD))
        q_BxTxHxK = Dense(cfg, H * (mla.nope_dim + mla.rope_dim), name='q_b')(q_in).reshape(B, T, H, -1)
        q_nope_BxTxHxK, q_rope_BxTxHxK = jnp.split(q_BxTxHxK, [mla.nope_dim], axis=-1)
        q_rope_BxTxHxK = apply_rope(cfg, q_rope_BxTxHxK, position_BxT)
        kv_a = Dense(cfg, mla.kv_rank + mla.rope_dim, tp=(), name='kv_a')(x_BxTxD)
        latent_BxTxC, k_rope_BxTxK = jnp.split(kv_a, [mla.kv_rank], axis=-1)
        latent_BxTxC = RMSNorm(cfg, 1e-6, name='kv_norm')(latent_BxTxC)
        k_rope_BxTx1xK = apply_rope(cfg, k_rope_BxTxK[:, :, None], position_BxT)
        new_kv = {'latent': latent_BxTxC[:, :, None], 'rope': k_rope_BxTx1xK}
        kv, key_position_BxS, cache = update_kv_cache(cfg, self.layer_type, cache, new_kv, position_BxT)

        kv_b = self.param('kv_b', nn.initializers.normal(INIT_STD), (mla.kv_rank, H * (mla.nope_dim + mla.v_dim)))
        wk_CxHxK, wv_CxHxK = jnp.split(kv_b.astype(cfg.dtype).reshape(mla.kv_rank, H, -1), [mla.nope_dim], axis=-1)
        mask_BxTxS = attention_mask(cfg, self.layer_type, key_position_BxS, position_BxT, start_BxT)
        options = {'scale': cfg.attention_scale or (mla.nope_dim + mla.rope_dim)**-0.5, 'cap': cfg.attention_cap,
                   'dropout_rate': cfg.dropout, 'key_B': dropout_keys(self, seq_id_B)}
        # Two forms of the same result; the one with fewer multiplications is taken. Absorbed (decode): kv_b is folded
        # into q and the output, T S H 2C. Projected (prefill): K and V from latents, (S C + T S) H (nope + v).
        if T * (2 * mla.kv_rank - mla.nope_dim - mla.v_dim) < mla.kv_rank * (mla.nope_dim + mla.v_dim):
            q_latent_BxTxHxC = jnp.einsum('bthk,chk->bthc', q_nope_BxTxHxK, wk_CxHxK)
            q_BxTxHxC = jnp.concatenate([q_latent_BxTxHxC, q_rope_BxTxHxK], axis=-1)
            k_BxSx1xC = jnp.concatenate([kv['latent'], kv['rope']], axis=-1)
            y_BxTxHxC = dot_product_attention(q_BxTxHxC, k_BxSx1xC, kv['latent'], mask_BxTxS, **options)
            y_BxTxHxK = jnp.einsum('bthc,chk->bthk', y_BxTxHxC, wv_CxHxK)
        else:
            latent_BxSxC = kv['latent'][:, :, 0]
            k_nope_BxSxHxK = jnp.einsum('bsc,chk->bshk', latent_BxSxC, wk_CxHxK)
            k_rope_BxSxHxK = jnp.broadcast_to(kv['rope'], (*k_nope_BxSxHxK.shape[:3], mla.rope_dim))
            q_BxTxHxK = jnp.concatenate([q_nope_BxTxHxK, q_rope_BxTxHxK], axis=-1)
            k_BxSxHxK = jnp.concatenate([k_nope_BxSxHxK, k_rope_BxSxHxK], axis=-1)
            v_BxSxHxK = jnp.einsum('bsc,chk->bshk', latent_BxSxC, wv_CxHxK)
            if is_default and cfg.attention != 'xla' and not self.is_initializing():
                options |= span_limits(cfg, self.layer_type) | {'start_BxT': start_BxT}
                y_BxTxHxK = fused_causal_attention(cfg.attention, q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, **options)
            else:
                y_BxTxHxK = dot_product_attention(q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, mask_BxTxS, **options)
        return dropout(self, residual_dense(cfg)(y_BxTxHxK.reshape(B, T, -1)), seq_id_B), cache


# --- gated MLPs
def gated_activation(config, gate, up):
    """SwiGLU or GEGLU (arXiv:2002.05202), or gpt-oss's clamped variant, of the outputs of c_gate and c_fc."""
    if config.mlp == 'swiglu':
        return jax.nn.silu(gate) * up
    if config.mlp == 'geglu':
        return gelu(gate, config.activation == 'gelu_tanh') * up
    gate = jnp.minimum(gate, config.swiglu_limit)
    up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


# --- mixture of experts
class Router(nn.Module):
    """x [B, T, D] -> the experts of each token and their weights, [P, U] each; in float32."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD):
        cfg, moe, E = self.config, self.config.moe, self.config.moe.n_expert
        B, T, D = x_BxTxD.shape
        kernel = self.param('kernel', nn.initializers.normal(INIT_STD), (D, E))
        logits_PxE = x_BxTxD.reshape(-1, D).astype(jnp.float32) @ kernel.astype(jnp.float32)
        if cfg.bias:
            logits_PxE += self.param('bias', nn.initializers.zeros, (E,))
        score_PxE = jax.nn.softmax(logits_PxE) if moe.score == 'softmax' else jax.nn.sigmoid(logits_PxE)
        rank_PxE = score_PxE
        if moe.selection_bias:
            rank_PxE += self.param('selection_bias', nn.initializers.zeros, (E,))
        if moe.n_group > 1:  # group score = sum of its top-2 expert scores; experts of other groups are not eligible
            rank_by_group = rank_PxE.reshape(B * T, moe.n_group, -1)
            group_score = jax.lax.top_k(rank_by_group, 2)[0].sum(-1)
            _, best_groups = jax.lax.top_k(group_score, moe.n_group_used)
            eligible = jax.nn.one_hot(best_groups, moe.n_group, dtype=bool).any(1)
            rank_PxE = jnp.where(eligible[..., None], rank_by_group, -jnp.inf).reshape(B * T, E)
        _, expert_PxU = jax.lax.top_k(rank_PxE, moe.n_used)
        weight_PxU = jnp.take_along_axis(score_PxE, expert_PxU, axis=-1)
        if moe.normalize:
            weight_PxU /= weight_PxU.sum(-1, keepdims=True) + 1e-20

        # Load-balancing loss (Switch, arXiv:2101.03961): E * sum(share of tokens * mean score), 1 if balanced. Per
        # sequence (DeepSeek-V3, arXiv:2412.19437), so the loss does not depend on batch sharding.
        share_BxE = jax.nn.one_hot(expert_PxU, E).reshape(B, -1, E).mean(1)
        mean_score_BxE = (score_PxE / score_PxE.sum(-1, keepdims=True)).reshape(B, -1, E).mean(1)
        self.sow('losses', 'balance', moe.balance * E * (share_BxE * mean_score_BxE).sum(-1).mean())
        return expert_PxU, weight_PxU * moe.scale


class ExpertDense(nn.Module):
    """The parameters of a Dense layer for every expert: {'kernel': [E, I, O], 'bias': [E, O]}."""
    config: GPTConfig
    shape: tuple  # (I, O)
    init_std: float = INIT_STD

    @nn.compact
    def __call__(self):
        E = self.config.moe.n_expert
        kernel = matrix_param(self, 'kernel', (E, *self.shape), self.init_std)
        bias = self.param('bias', nn.initializers.zeros, (E, self.shape[1])) if self.config.bias else None
        return {'kernel': kernel, 'bias': bias}


class MoELayer(nn.Module):
    """A mixture of experts: a router sends each token through n_used of n_expert MLPs; no token is dropped."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, seq_id_B=None):
        cfg, moe, D = self.config, self.config.moe, self.config.n_embd
        x_PxD = x_BxTxD.reshape(-1, D)
        expert_PxU, weight_PxU = Router(cfg, name='router')(x_BxTxD)
        names = ('c_fc',) if cfg.mlp == 'gelu' else ('c_gate', 'c_fc')
        weights = {name: ExpertDense(cfg, (D, moe.width), name=f'experts_{name}')() for name in names}
        weights['c_proj'] = ExpertDense(cfg, (moe.width, D), INIT_STD / (2 * cfg.n_layer)**0.5, name='experts_c_proj')()

        def expert(weights, x_bxD):
            """One expert's MLP."""
            h_bxF = linear(x_bxD, **weights['c_fc'])
            if cfg.mlp == 'gelu':
                h_bxF = gelu(h_bxF, cfg.activation == 'gelu_tanh')
            else:
                h_bxF = gated_activation(cfg, linear(x_bxD, **weights['c_gate']), h_bxF)
            return linear(h_bxF, **weights['c_proj'])

        y_PxD = mix_experts(expert, weights, x_PxD, expert_PxU, weight_PxU, scale_input=moe.weigh_input)
        y_BxTxD = y_PxD.reshape(x_BxTxD.shape)
        if moe.shared_width:
            y_BxTxD += MLP(cfg, moe.shared_width, name='shared')(x_BxTxD)
        return dropout(self, y_BxTxD, seq_id_B)


def __getattr__(name):
    """`from jax_transformer import generate` works: jax_generate imports this file, so it is imported on first use."""
    if name == 'generate':
        from jax_generate import generate
        return generate
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
