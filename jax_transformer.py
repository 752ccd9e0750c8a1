"""The model: what a GPT computes, in one file. Config, then GPT-2 without a gap; other models last.

References: nanoGPT, https://github.com/karpathy/nanoGPT/blob/master/model.py;
OpenAI's GPT-2, https://github.com/openai/gpt-2/blob/master/src/model.py

Everything beyond GPT-2 is off by default. What most newer models share (RMSNorm, RoPE, GQA) stands
where GPT-2's counterpart does; the rest is in the section "other models", for a second reading.
jax_ops/ says *how* things are computed and sharded: the first line of each docstring there is the
plain equivalent. jax_cache.py has the KV cache.

Shapes are in the names, so `q_BxTxHxK` needs no comment:
    B  batch (sequences)        D  n_embd, the width        H  attention heads
    T  positions of this call   F  MLP width, 4 D           K  head width, D / H
    S  slots of the KV cache    V  vocabulary               G  key and value heads (GPT-2: G = H)
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

from jax_cache import update_kv_cache
from jax_flags import DTYPES, MOST, MOST_FLOAT, UserError, check_choice, check_ranges
from jax_ops.attention import (
    ATTENTION, Dropout, Scores, blockwise_attention, causal_mask, fused_causal_attention)
from jax_ops.choose_experts import EXPERT_WAYS
from jax_ops.dropout import flat_index, hash_dropout
from jax_ops.experts import mix_experts
from jax_ops.layers import map_sequence_chunks, remat_policy, scan_blocks
from jax_ops.matmul import (
    Int8, LowRank, Transposed, all_gather_param, fused_linear, linear, soft_cap)
# create_mesh, ParallelLMHead and VocabParallelEmbedding are public names of this module
from jax_ops.sharding import COLUMN_PARALLEL, ROW_PARALLEL, create_mesh  # noqa: F401
from jax_ops.vocabulary import (  # noqa: F401
    INIT_STD, ParallelLMHead, VocabParallelEmbedding, embed_tokens, lm_logits,
    masked_cross_entropy)

# -----------------------------------------------------------------------------
# config

# exact (erf), as in nanoGPT; the tanh approximation of the published GPT-2
ACTIVATIONS = ('gelu', 'gelu_tanh')
# recomputed in the backward pass: nothing; all but matmul outputs; whole blocks
REMAT = ('none', 'dots', 'full')
NORMS = ('layer', 'rms')
# of the inputs of attention and MLP (GPT-2), of their outputs (OLMo 2), of both (Gemma 3)
BLOCK_NORMS = {
    'pre': ('ln_1', 'ln_2'),
    'post': ('ln_1_post', 'ln_2_post'),
    'both': ('ln_1', 'ln_1_post', 'ln_2', 'ln_2_post')}
POSITIONS = ('learned', 'rope')
ROPE_SCALINGS = ('linear', 'llama3', 'yarn', 'longrope')
# of each head, of all together; without gain, in layers with RoPE
QK_NORMS = ('', 'learned', 'all_heads', 'plain')
# attention to all keys; a sliding window; a chunk; all, no RoPE
LAYER_TYPES = ('full', 'window', 'chunk', 'nope')
# GPT-2; gated (arXiv:2002.05202), clamped (gpt-oss), by GELU
UNGATED = ('gelu',)  # MLPs of two matrices
GATED = ('swiglu', 'swiglu_clamped', 'geglu')  # of three
MLPS = UNGATED + GATED


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies change for sequences longer than those of pretraining, see
    rope_inv_freq."""
    kind: str  # one of ROPE_SCALINGS
    factor: float  # context extension factor
    original_length: int  # of pretraining
    # low_freq_factor (yarn: beta_slow): pairs with fewer rotations are slowed down by the factor
    low: float = 1.0
    # high_freq_factor (yarn: beta_fast): pairs with more rotations keep their frequency
    high: float = 4.0
    truncate: bool = True  # yarn: the transition starts and ends at whole pairs
    amplitude: float = 1.0  # of cosine and sine
    pair_factors: tuple = ()  # longrope: by how much each pair is slowed down

    def __post_init__(self):
        object.__setattr__(self, 'pair_factors', tuple(self.pair_factors))


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
    # a bias added to the scores for choosing experts, not to their weights
    selection_bias: bool = False
    n_group: int = 1  # expert groups (group-limited routing)
    n_group_used: int = 1  # groups a token may route to
    weigh_input: bool = False  # the weight scales an expert's input, not its output
    balance: float = 0.0  # coefficient of the load-balancing loss

    def __post_init__(self):
        object.__setattr__(self, 'layers', tuple(bool(x) for x in self.layers))
        if not 1 <= self.n_used <= self.n_expert:
            raise UserError(f'a token can use 1 to {self.n_expert} of {self.n_expert} experts, '
                            f'not {self.n_used}')
        check_choice("the experts' score", self.score, ('softmax', 'sigmoid'))
        # two experts rank a group
        has_pairs = self.n_group == 1 or self.n_expert >= 2 * self.n_group
        uses_groups_that_are_there = 1 <= self.n_group_used <= self.n_group
        if self.n_expert % self.n_group or not has_pairs or not uses_groups_that_are_there:
            raise UserError(f'{self.n_expert} experts cannot be {self.n_group} equal groups '
                            f'of which {self.n_group_used} are used')


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What the model is. The defaults are nanoGPT's GPT (GPT-2 124M with a padded vocabulary).

    Groups (rope_scaling, mla, moe) may be dicts, tuples may be lists. Raises UserError for what
    makes no model."""
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
    # of activations and matmuls; parameters, softmax, logits and loss are always float32
    dtype: str = 'float32'
    # execution: same parameters, same results up to rounding; not stored in checkpoints
    attention: str = 'xla'  # one of ATTENTION; a call with a KV cache always uses 'xla'
    experts: str = 'loop'  # how a mixture of experts is computed, one of EXPERT_WAYS
    # compile one block and loop over the layers; dropout draws other masks
    scan_layers: bool = False
    remat: str = 'none'  # one of REMAT
    # other models
    tied_head: bool = True  # False: lm_head is a matrix of its own
    embed_scale: float = 1.0  # of the token embeddings
    norm: str = 'layer'  # one of NORMS
    block_norms: str = 'pre'  # which norms a block has, one of BLOCK_NORMS
    position: str = 'learned'  # one of POSITIONS
    rope_theta: float = 10000.0  # RoPE base
    rope_scaling: RopeScaling | None = None
    rope_width: int = 0  # the first channels of a head, which RoPE rotates; 0 is all
    # RoPE base of 'window' layers, which then have no rope_scaling; 0 is as the others
    window_rope_theta: float = 0.0
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
    # attention temperature of 'nope' layers (Llama 4): the query at position p is scaled by
    # 1 + query_growth * ln(1 + floor((p + 1) / query_growth_every))
    query_growth: float = 0.0
    query_growth_every: int = 8192
    mlp: str = 'gelu'  # one of MLPS; 'gelu' is the MLP without gate, whose function is `activation`
    n_inner: int = 0  # MLP width; 0 is 4 n_embd
    swiglu_limit: float = 7.0  # of 'swiglu_clamped'
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None

    def __post_init__(self):
        init_config(self)

    @property
    def has_gate(self):
        return self.mlp in GATED

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

    def span_limits(self, layer_type):
        """The options of causal_mask that limit a layer's attention: {'window': n}, {'chunk': n},
        or {}."""
        if layer_type in ('window', 'chunk'):
            return {layer_type: getattr(self, layer_type)}
        return {}

    def attention_span(self, layer_type):
        """The number of positions that a query attends to at most, its own included."""
        return self.span_limits(layer_type).get(layer_type, self.block_size)

    def architecture(self):
        """{name: value} of the fields that say what the model is:
        GPTConfig(**config.architecture())."""
        values = dataclasses.asdict(self)
        for execution_option in ('attention', 'experts', 'scan_layers', 'remat'):
            del values[execution_option]
        return values


def init_config(config):
    """Makes the groups of a GPTConfig from dicts. Raises UserError for values out of range or in
    conflict."""
    for name, group in (('rope_scaling', RopeScaling), ('mla', MLAConfig), ('moe', MoEConfig)):
        values = getattr(config, name)
        if isinstance(values, dict):
            object.__setattr__(config, name, group(**values))
        check_numbers(getattr(config, name))
    object.__setattr__(config, 'layer_types', tuple(config.layer_types))
    check_numbers(config)
    check_ranges(vars(config))
    check_choices(config)
    check_heads(config)
    check_layer_types(config)
    if config.attention in ('cudnn', 'splash') and config.mla:
        raise UserError(f'attention={config.attention} has no latent attention: '
                        'use attention=chunked')
    if config.scan_layers and len(set(map(config.layer, range(config.n_layer)))) > 1:
        raise UserError('scan_layers needs layers that are all alike; these differ in layer_types '
                        'or experts')
    # its masks are hashes of 32-bit counters, which number a sequence's probabilities
    if config.dropout and config.n_head * config.block_size**2 > 2**32:
        raise UserError(f'dropout numbers the attention probabilities of a sequence up to 2^32; '
                        f'n_head={config.n_head} x block_size={config.block_size}^2 are more: use '
                        'dropout=0')


def check_choices(config):
    """Raises UserError for a field whose value is none of the known ones."""
    choices = {
        'dtype': DTYPES,
        'activation': ACTIVATIONS,
        'attention': ATTENTION,
        'experts': EXPERT_WAYS,
        'remat': REMAT,
        'norm': NORMS,
        'block_norms': BLOCK_NORMS,
        'position': POSITIONS,
        'mlp': MLPS,
        'qk_norm': QK_NORMS,
    }
    for name, known in choices.items():
        check_choice(name, getattr(config, name), known)
    if config.rope_scaling:
        check_choice('rope scaling', config.rope_scaling.kind, ROPE_SCALINGS)


def check_heads(config):
    """Raises UserError for numbers and widths of heads that do not fit together."""
    if config.n_embd % config.n_head and not config.head_dim and not config.mla:
        valid = [h for h in range(1, config.n_embd + 1) if config.n_embd % h == 0]
        raise UserError(f'n_head={config.n_head} does not divide n_embd={config.n_embd}; '
                        f'it may be one of {valid}')
    if config.n_head % config.kv_heads:
        valid = [h for h in range(1, config.n_head + 1) if config.n_head % h == 0]
        raise UserError(f'n_kv_head={config.n_kv_head} does not divide n_head={config.n_head}; '
                        f'one of {valid} does')
    widths = {'n_head * head_dim': config.n_head * config.head_width, 'n_inner': config.mlp_width}
    for name, width in widths.items():
        if width > MOST['n_inner']:
            raise UserError(f'{name} must be at most {MOST["n_inner"]}, not {width}')
    if config.mla and config.mla.rope_dim % 2:
        raise UserError(f'rope turns pairs: rope_dim must be even, not {config.mla.rope_dim}')
    if config.rope_width % 2 or config.rope_width > config.head_width:
        raise UserError(f'rope_width must be even and at most the width of a head, '
                        f'not {config.rope_width}')
    turns_whole_heads = config.position == 'rope' and not config.mla and not config.rope_width
    if turns_whole_heads and config.head_width % 2:
        raise UserError(f'rope turns pairs: the width of a head must be even, '
                        f'not {config.head_width}')


def check_layer_types(config):
    """Raises UserError for layer types that are unknown or lack what they need."""
    if config.position != 'rope' and (config.qk_norm == 'plain' or 'nope' in config.layer_types):
        raise UserError("qk_norm=plain and nope layers need position='rope'")
    for layer_type in set(config.layer_types) or {''}:
        check_choice('layer_types', layer_type, LAYER_TYPES)
        if layer_type in ('window', 'chunk') and getattr(config, layer_type) < 1:
            raise UserError(f'{layer_type} layers need a size, as in {layer_type}=64')


def check_numbers(group):
    """Raises UserError for a number of a GPTConfig or of one of its groups that is of a wrong type,
    negative, not finite or larger than MOST says. None: a group that is not there."""
    if group is None:
        return
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if field.type in (int, 'int'):
            most = MOST[field.name]
            if type(value) is not int or not 0 <= value <= most:
                raise UserError(f'{field.name} must be a whole number of at most {most}, '
                                f'not {str(value)[:40]}')
        if field.type in (float, 'float'):
            is_number = type(value) in (int, float)
            if not is_number or not 0 <= value < MOST_FLOAT:
                raise UserError(f'{field.name} must be a finite number of at least 0, '
                                f'not {str(value)[:40]}')


def check_layers(config, layers, source):
    """Raises UserError if a file holds fewer layers than its config says.

    layers: the numbers of the layers of which the file has parameters. source: its path."""
    held = len(layers.intersection(range(config.n_layer)))
    if held < config.n_layer:
        raise UserError(f'{source} holds {held} layers, but its config says {config.n_layer}')


def check_room(config, n_numbers, source):
    """Raises UserError if a file of n_numbers numbers is too small to be that of a model of this
    config."""
    D, moe, mla = config.n_embd, config.moe, config.mla
    n_moe = sum(config.layer(i)[1] for i in range(config.n_layer))
    sizes = {'vocab_size * n_embd': config.vocab_size * D,
             'layers * n_embd * n_inner': (config.n_layer - n_moe) * D * config.mlp_width}
    if config.position == 'learned':
        sizes['block_size * n_embd'] = config.block_size * D
    if moe:
        sizes['layers * n_expert * n_embd * width'] = n_moe * moe.n_expert * D * moe.width
        sizes['layers * n_embd * shared_width'] = n_moe * D * moe.shared_width
    if mla:
        ranks = mla.q_rank + mla.kv_rank + mla.rope_dim
        sizes['layers * n_embd * rank'] = config.n_layer * D * ranks
        sizes['kv_rank * n_head * width'] = mla.kv_rank * config.n_head * (mla.nope_dim + mla.v_dim)
        sizes['n_head * q width'] = config.n_head * (mla.nope_dim + mla.rope_dim)
    else:
        heads = config.n_head * config.head_width
        sizes['layers * n_embd * n_head * head_dim'] = config.n_layer * D * heads
    for name, size in sizes.items():
        if size > n_numbers:
            raise UserError(f'{source} holds {n_numbers:,} numbers, but its config says '
                            f'{name} = {size:,}')


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


class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv:1910.07467); statistics in float32."""
    config: GPTConfig
    eps: float | None = None  # config.norm_eps if not given

    @nn.compact
    def __call__(self, x):
        scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
        y = rms_normalize(x, self.eps or self.config.norm_eps) * scale
        return y.astype(self.config.dtype)


def rms_normalize(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def norm(config, name=None):
    """The config's kind of norm of the width of the residual stream. name: of the module; None is
    flax's choice."""
    kind = RMSNorm if config.norm == 'rms' else LayerNorm
    return kind(config, name=name)


def matrix_param(module, name, shape, init_std=INIT_STD):
    """A float32 parameter of a module, or the Int8, Transposed or LowRank that decoding or LoRA
    puts in its place."""
    value = module.get_variable('params', name)
    if isinstance(value, (Int8, Transposed, LowRank)):
        return value
    return module.param(name, nn.initializers.normal(init_std), shape)


class Dense(nn.Module):
    """x [..., I] @ kernel + bias -> [..., features] in the config's dtype. A tuple of features
    stores several projections side by side in one kernel and returns a list (c_attn: q, k, v)."""
    config: GPTConfig
    features: int | tuple
    init_std: float = INIT_STD
    # how tensor parallelism shards the kernel, or ROW_PARALLEL, or () for not at all
    tp: tuple = COLUMN_PARALLEL

    @nn.compact
    def __call__(self, x):
        n_out = int(np.sum(self.features))
        kernel = matrix_param(self, 'kernel', (x.shape[-1], n_out), self.init_std)
        bias = None
        if self.config.bias:
            bias = self.param('bias', nn.initializers.zeros, (n_out,))
        if isinstance(self.features, tuple):
            return fused_linear(x, kernel, bias, self.features)
        return linear(x, kernel, bias, tp=self.tp)


def residual_dense(config):
    """The Dense layer that writes to the residual stream; initial values scaled by 1 / sqrt(2
    n_layer), as GPT-2's."""
    init_std = INIT_STD / (2 * config.n_layer)**0.5
    return Dense(config, config.n_embd, init_std, ROW_PARALLEL, name='c_proj')


def dropout_keys(module, seq_id_B):
    """One dropout key per sequence, fold_in(key, seq_id_B[b]); None where dropout is off. Masks do
    not depend on micro-batching or sharding, so 1 and 8 devices give the same loss curve."""
    if seq_id_B is None or module.config.dropout == 0:
        return None
    # of the seed and the path of the module; the iteration enters through the ids of its sequences
    key = module.make_rng('dropout')
    return jax.vmap(jax.random.fold_in, (None, 0))(key, seq_id_B)


def dropout(module, x, seq_id_B):
    """Dropout of x [B, ...]; seq_id_B: ids of the sequences, None where dropout is off."""
    key_B = dropout_keys(module, seq_id_B)
    if key_B is None:
        return x
    return hash_dropout(x, module.config.dropout, key_B, flat_index(x.shape[1:]))


# -----------------------------------------------------------------------------
# RoPE: positions as rotations of queries and keys, in place of GPT-2's learned positions

def rope_inv_freq(theta, width, scaling=None):
    """Radians per position by which RoPE rotates each of the width / 2 pairs, numpy.

    scaling: 'linear' slows all pairs down by the factor (arXiv:2306.15595), 'longrope' each by its
    own (arXiv:2402.13753). Otherwise pairs with many rotations over the original length keep their
    frequency and pairs with few are slowed down, with a linear transition between: over the number
    of rotations in Llama 3, over the pairs in YaRN (arXiv:2309.00071)."""
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return frequencies
    if scaling.kind == 'linear':
        return frequencies / scaling.factor
    if scaling.kind == 'longrope':
        return frequencies / np.array(scaling.pair_factors)
    if scaling.kind == 'llama3':
        rotations = frequencies * scaling.original_length / (2 * np.pi)
        keep = (rotations - scaling.low) / max(scaling.high - scaling.low, 1e-9)
    else:
        turns = np.array([scaling.high, scaling.low])
        wavelengths = scaling.original_length / (2 * np.pi * turns)
        first, last = width * np.log(wavelengths) / (2 * np.log(theta))
        if scaling.truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        keep = 1 - (np.arange(width // 2) - first) / (last - first or 1e-3)
    keep = np.clip(keep, 0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def rope_of_layer(config, layer_type, head_width):
    """Returns (radians per position of the pairs that RoPE rotates in a layer, numpy; factor of
    cosine and sine).

    layer_type: one of LAYER_TYPES. head_width: channels of a head, or of the part of it that has
    RoPE."""
    width = config.rope_width or head_width
    if layer_type == 'window' and config.window_rope_theta:
        return rope_inv_freq(config.window_rope_theta, width), 1.0
    amplitude = config.rope_scaling.amplitude if config.rope_scaling else 1.0
    return rope_inv_freq(config.rope_theta, width, config.rope_scaling), amplitude


def apply_rope(config, layer_type, x_BxTxHxK, position_BxT):
    """Rotates the pairs (x_j, x_{j + K/2}) by position * frequency_j (RoPE, arXiv:2104.09864), in
    float32. With config.rope_width the pairs are those of the first channels, and the others stay
    as they are."""
    frequencies, amplitude = rope_of_layer(config, layer_type, x_BxTxHxK.shape[-1])
    # [B, T, 1, K / 2]
    angle = position_BxT[..., None, None] * jnp.asarray(frequencies, jnp.float32)
    cos, sin = amplitude * jnp.cos(angle), amplitude * jnp.sin(angle)
    rotated, rest = jnp.split(x_BxTxHxK, [2 * len(frequencies)], axis=-1)
    a, b = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.astype(x_BxTxHxK.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def apply_positions(config, layer_type, q_BxTxHxK, k_BxTxGxK, position_BxT):
    """RoPE of q and k, then the norm without gain if the config has it; 'nope' layers only scale q
    by query_growth."""
    if layer_type == 'nope':
        growth_BxT = jnp.log1p((position_BxT + 1) // config.query_growth_every)
        scale_BxTx1x1 = (1 + config.query_growth * growth_BxT)[..., None, None]
        return (q_BxTxHxK * scale_BxTx1x1).astype(q_BxTxHxK.dtype), k_BxTxGxK
    q_BxTxHxK = apply_rope(config, layer_type, q_BxTxHxK, position_BxT)
    k_BxTxGxK = apply_rope(config, layer_type, k_BxTxGxK, position_BxT)
    if config.qk_norm == 'plain':
        q_BxTxHxK = rms_normalize(q_BxTxHxK, config.norm_eps).astype(q_BxTxHxK.dtype)
        k_BxTxGxK = rms_normalize(k_BxTxGxK, config.norm_eps).astype(k_BxTxGxK.dtype)
    return q_BxTxHxK, k_BxTxGxK


# -----------------------------------------------------------------------------
# attention

def dot_product_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, *, scale=None, cap=0.0,
                          sinks_H=None, dropout_rate=0.0, key_B=None):
    """For G = H: softmax(einsum('bthk,bshk->bhts', q, k) * scale) v over the keys that the mask
    allows -> [B, T, H, K].

    Softmax is in float32. scale: K**-0.5 if not given. cap: of soft_cap. GQA: query head h attends
    to key head h // Q, Q = H / G; the Q heads of a group are folded into the time axis. sinks_H:
    one more logit per head, whose probability goes nowhere. key_B: dropout keys of the sequences,
    if any. Values may have another width than keys."""
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
    scores_BxGxTQxS = soft_cap(scores_BxGxTQxS * (scale or K**-0.5), cap)
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


def attention_mask(config, layer_type, key_position_BxS, position_BxT, start_BxT=None):
    """[B, T, S], True where a query may attend to a key: at its own position and before, within its
    window or chunk.
    start_BxT: of packed rows, see GPT.loss; a query attends to the keys with its own start."""
    limits = config.span_limits(layer_type)
    # a ring and the keys that overwrite it
    is_longer_than_a_block = key_position_BxS.shape[1] > config.block_size
    if not limits and is_longer_than_a_block:
        limits = {'window': config.block_size}
    mask_BxTxS = causal_mask(key_position_BxS[:, None, :], position_BxT[:, :, None], **limits)
    if start_BxT is None:
        return mask_BxTxS
    return mask_BxTxS & (start_BxT[:, None, :] == start_BxT[:, :, None])


@dataclasses.dataclass(frozen=True)
class Positions:
    """Where the queries and keys of a layer's call are in their sequences."""
    query_BxT: jax.Array
    key_BxS: jax.Array
    start_BxT: jax.Array | None  # of packed rows, see GPT.loss
    # whether queries and keys are the T tokens of this call, in order: there is no KV cache
    are_indices: bool


def attend(config, layer_type, q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, positions, *, scale,
           sinks_H=None, key_B=None):
    """Attention by the best of three ways to compute the same -> [B, T, H, K].

    - Training, and other calls without a KV cache: the keys are those of the call itself, so that
      the kernel that choose_attention (jax_ops) has put into config.attention can mask by index.
    - A piece of a long prompt with its KV cache: blockwise, which never materializes all scores.
    - Otherwise the plain formula: training with attention='xla', and every decode step, where there
      are few queries, and keys are slots of the cache, whose positions decide what is masked.

    positions: Positions. key_B: dropout keys of the sequences; the rest as in
    dot_product_attention."""
    T, S = q_BxTxHxK.shape[1], k_BxSxGxK.shape[1]
    if positions.are_indices and config.attention != 'xla':
        scores = Scores(scale, config.attention_cap, **config.span_limits(layer_type))
        return fused_causal_attention(
            config.attention, q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, scores, sinks_H=sinks_H,
            dropout=Dropout(key_B, config.dropout), start_BxT=positions.start_BxT)
    mask_BxTxS = attention_mask(
        config, layer_type, positions.key_BxS, positions.query_BxT, positions.start_BxT)
    options = {'scale': scale, 'cap': config.attention_cap, 'sinks_H': sinks_H}
    is_piece_of_a_long_prompt = T < S and T * S >= 2**18  # has neither dropout nor gradients
    if is_piece_of_a_long_prompt:
        return blockwise_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, **options)
    return dot_product_attention(
        q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask_BxTxS, **options, dropout_rate=config.dropout,
        key_B=key_B)


def record_attention(module, q_BxTxHxK, k_BxSxGxK, positions, **options):
    """Records the probabilities of a layer's attend, [B, T, H, S], for jax_inside.py, which asks for
    what flax calls intermediates; for everyone else it does nothing.

    They are the attention to unit vectors as values, with its masks, caps and sinks."""
    if not module.is_mutable_collection('intermediates'):
        return
    B, S, G = k_BxSxGxK.shape[:3]
    unit_BxSxGxS = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, G, S))
    probs_BxTxHxS = attend(
        module.config, module.layer_type, q_BxTxHxK, k_BxSxGxK, unit_BxSxGxS, positions, **options)
    module.sow('intermediates', 'probs', probs_BxTxHxS)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a query attends to the keys at its own position and before."""
    config: GPTConfig
    layer_type: str = 'full'  # one of LAYER_TYPES

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT=None, cache=None, seq_id_B=None, start_BxT=None):
        """Returns (y_BxTxD, cache). position_BxT: position ids; None is 0 .. T-1 without a KV
        cache. cache: see update_kv_cache. seq_id_B: see dropout(). start_BxT: see GPT.loss."""
        cfg = self.config
        B, T, D = x_BxTxD.shape
        H, G, K = cfg.n_head, cfg.kv_heads, cfg.head_width
        # packed rows have positions of their own, but the keys of a query are still those of this
        # call
        are_indices = (position_BxT is None or start_BxT is not None) and not self.is_initializing()
        if position_BxT is None:
            position_BxT = jnp.arange(T)[None]

        # queries, keys and values of all heads, in one matmul
        qkv_cfg = dataclasses.replace(cfg, bias=cfg.bias or cfg.qkv_bias)
        q, k, v = Dense(qkv_cfg, (H * K, G * K, G * K), name='c_attn')(x_BxTxD)
        if cfg.qk_norm == 'all_heads':
            q = RMSNorm(cfg, name='q_norm')(q)
            k = RMSNorm(cfg, name='k_norm')(k)
        q_BxTxHxK = q.reshape(B, T, H, K)
        k_BxTxGxK = k.reshape(B, T, G, K)
        v_BxTxGxK = v.reshape(B, T, G, K)
        if cfg.qk_norm == 'learned':
            q_BxTxHxK = RMSNorm(cfg, name='q_norm')(q_BxTxHxK)
            k_BxTxGxK = RMSNorm(cfg, name='k_norm')(k_BxTxGxK)
        if cfg.position == 'rope':
            q_BxTxHxK, k_BxTxGxK = apply_positions(
                cfg, self.layer_type, q_BxTxHxK, k_BxTxGxK, position_BxT)

        # with a KV cache: the keys and values of this call are written to it, and all that it holds
        # is attended to
        new_kv = {'k': k_BxTxGxK, 'v': v_BxTxGxK}
        kv, key_position_BxS, cache = update_kv_cache(
            cfg, self.layer_type, cache, new_kv, position_BxT)

        positions = Positions(position_BxT, key_position_BxS, start_BxT, are_indices)
        sinks_H = self.param('sinks', nn.initializers.zeros, (H,)) if cfg.sinks else None
        options = {'scale': cfg.attention_scale, 'sinks_H': sinks_H}
        y_BxTxHxK = attend(
            cfg, self.layer_type, q_BxTxHxK, kv['k'], kv['v'], positions, **options,
            key_B=dropout_keys(self, seq_id_B))
        record_attention(self, q_BxTxHxK, kv['k'], positions, **options)
        y_BxTxD = residual_dense(cfg)(y_BxTxHxK.reshape(B, T, H * K))
        return dropout(self, y_BxTxD, seq_id_B), cache


# -----------------------------------------------------------------------------
# MLP, block, GPT

@functools.partial(jax.checkpoint, static_argnums=1)
def gelu(x, approximate):
    """GELU (arXiv:1606.08415) in float32, the result in x's dtype; recomputed from x in the
    backward pass."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate).astype(x.dtype)


def activate(config, h, gate=None):
    """Applies the function between the matrices of an MLP to h, the output of c_fc. gate: that of
    c_gate, if config.has_gate. Raises ValueError for one of MLPS that has no branch."""
    if config.mlp == 'gelu':
        return gelu(h, config.activation == 'gelu_tanh')
    if config.has_gate:
        return gated_activation(config, gate, h)
    raise ValueError(f'mlp={config.mlp} has no branch in activate')


class MLP(nn.Module):
    config: GPTConfig
    width: int

    @nn.compact
    def __call__(self, x_BxTxD, seq_id_B=None):
        cfg = self.config
        h_BxTxF = Dense(cfg, self.width, name='c_fc')(x_BxTxD)
        gate_BxTxF = Dense(cfg, self.width, name='c_gate')(x_BxTxD) if cfg.has_gate else None
        h_BxTxF = activate(cfg, h_BxTxF, gate_BxTxF)
        return dropout(self, residual_dense(cfg)(h_BxTxF), seq_id_B)


class Block(nn.Module):
    config: GPTConfig
    layer_type: str = 'full'  # one of LAYER_TYPES
    is_moe: bool = False  # a mixture of experts in place of the MLP

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT=None, cache=None, seq_id_B=None, start_BxT=None):
        """GPT-2: x += attention(ln_1(x)); x += mlp(ln_2(x)). Returns (x_BxTxD, cache)."""
        cfg = self.config
        attention = LatentAttention if cfg.mla else CausalSelfAttention
        mlp = MoELayer(cfg, name='mlp') if self.is_moe else MLP(cfg, cfg.mlp_width, name='mlp')

        def norm_if_there(name, x):
            return norm(cfg, name)(x) if name in BLOCK_NORMS[cfg.block_norms] else x

        y_BxTxD = norm_if_there('ln_1', x_BxTxD)
        y_BxTxD, cache = attention(cfg, self.layer_type, name='attn')(
            y_BxTxD, position_BxT, cache, seq_id_B, start_BxT)
        x_BxTxD += norm_if_there('ln_1_post', y_BxTxD)

        y_BxTxD = mlp(norm_if_there('ln_2', x_BxTxD), seq_id_B)
        x_BxTxD += norm_if_there('ln_2_post', y_BxTxD)
        return x_BxTxD, cache


class GPT(nn.Module):
    """GPT(config).apply({'params': params}, idx_BxT) -> float32 logits [B, T, vocab_size]; with
    method='loss' or method='with_cache', what those methods return."""
    config: GPTConfig

    def setup(self):
        cfg = self.config
        self.wte_VxD = matrix_param(self, 'wte', (cfg.vocab_size, cfg.n_embd))
        if cfg.position == 'learned':
            wpe = matrix_param(self, 'wpe', (cfg.block_size, cfg.n_embd))  # [positions, D]
            self.wpe = all_gather_param(wpe, cfg.dtype, ((None, 'fsdp'), (None, None)))
        self.h = [Block(cfg, *cfg.layer(i)) for i in range(cfg.n_layer)]
        self.ln_f = norm(cfg)
        lm_head_VxD = self.wte_VxD
        if not cfg.tied_head:
            lm_head_VxD = matrix_param(self, 'lm_head', (cfg.vocab_size, cfg.n_embd))
        self.lm_head_VxD = all_gather_param(lm_head_VxD, cfg.dtype, ROW_PARALLEL)

    def __call__(self, idx_BxT, *, position_BxT=None, deterministic=True, seq_id_B=None,
                 logit_position_B=None):
        """Logits of the token after each position, float32 [B, T, V].

        position_BxT: position ids; 0 .. T-1 if not given. deterministic: False turns dropout on,
        which needs rngs={'dropout': key}. seq_id_B: the ids of the sequences, by which dropout
        draws; 0, 1, 2, ... if not given.
        logit_position_B: logits of this one index into T of each sequence only, [B, 1, V]."""
        x_BxTxD, _ = self.hidden(
            idx_BxT, position_BxT, deterministic=deterministic, seq_id_B=seq_id_B)
        if logit_position_B is not None:
            x_BxTxD = jnp.take_along_axis(x_BxTxD, logit_position_B[:, None, None], axis=1)
        return lm_logits(x_BxTxD, self.lm_head_VxD, self.config.logit_cap)

    def with_cache(self, idx_BxT, cache, *, position_BxT):
        """(logits as in __call__, cache): the T tokens are written to the KV cache (see init_cache
        in jax_cache.py), and attend to it. PAD in position_BxT marks padding."""
        x_BxTxD, cache = self.hidden(idx_BxT, position_BxT, cache)
        return lm_logits(x_BxTxD, self.lm_head_VxD, self.config.logit_cap), cache

    def loss(self, idx_BxT, targets_BxT, *, loss_chunk=0, deterministic=True, seq_id_B=None,
             start_BxT=None):
        """Cross-entropy of each target, float32 [B, T]. loss_chunk: logits are materialized for
        this many positions at a time, which must divide T; 0 is all. start_BxT: in rows packed with
        conversations, where that of each token starts: it attends to this conversation alone, and
        its position is counted from there."""
        position_BxT = None
        if start_BxT is not None:
            position_BxT = jnp.arange(idx_BxT.shape[1]) - start_BxT
        x_BxTxD, _ = self.hidden(
            idx_BxT, position_BxT, None, start_BxT, deterministic=deterministic, seq_id_B=seq_id_B)

        def loss_of(x_BxTxD, target_BxT):
            logits_BxTxV = lm_logits(
                x_BxTxD, self.lm_head_VxD, self.config.logit_cap, training=True)
            return cross_entropy(logits_BxTxV, target_BxT)

        return map_sequence_chunks(loss_of, loss_chunk, x_BxTxD, targets_BxT)

    def embed(self, idx_BxT, position_BxT, seq_id_B=None):
        """The input of the first block, [B, T, D]."""
        cfg = self.config
        x_BxTxD = embed_tokens(self.wte_VxD, idx_BxT, cfg.dtype)
        x_BxTxD = x_BxTxD * jnp.asarray(cfg.embed_scale, cfg.dtype)
        if cfg.position == 'learned':
            if position_BxT is None:
                position_BxT = jnp.arange(idx_BxT.shape[1])[None]
            x_BxTxD += jnp.take(self.wpe, position_BxT, axis=0, mode='clip').astype(cfg.dtype)
        return dropout(self, x_BxTxD, seq_id_B)

    def hidden(self, idx_BxT, position_BxT=None, cache=None, start_BxT=None, *, deterministic=True,
               seq_id_B=None):
        """(activations after the last norm [B, T, D], the new cache)."""
        cfg = self.config
        if idx_BxT.shape[1] > cfg.block_size:
            raise ValueError(f'{idx_BxT.shape[1]} tokens do not fit in block_size {cfg.block_size}')
        # dropout is on where the sequences have ids
        if deterministic:
            seq_id_B = None
        elif seq_id_B is None:
            seq_id_B = jnp.arange(len(idx_BxT))
        x_BxTxD = self.embed(idx_BxT, position_BxT, seq_id_B)

        # all blocks in one compiled loop
        if cfg.scan_layers and cache is None and not self.is_initializing():
            x_BxTxD = scan_blocks(self, x_BxTxD, position_BxT, seq_id_B, start_BxT)
            return self.ln_f(x_BxTxD), None

        # or block after block
        run = Block.__call__
        if cfg.remat != 'none' and cache is None:
            run = nn.remat(run, policy=remat_policy(cfg.remat))
        elif cache is not None:
            run = nn.jit(run)  # traced and lowered once for all layers of a kind
        new_cache = {}
        for i, block in enumerate(self.h):
            layer_cache = cache[f'h_{i}'] if cache else None
            x_BxTxD, new_cache[f'h_{i}'] = run(
                block, x_BxTxD, position_BxT, layer_cache, seq_id_B, start_BxT)
        return self.ln_f(x_BxTxD), new_cache


def cross_entropy(logits_BxTxV, targets_BxT):
    """-log softmax(logits)[target], [B, T]. Of vocabulary-sharded logits XLA all-reduces [B, T]
    numbers."""
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
    """TrainState with newly initialized float32 parameters and the state of the optax optimizer
    `tx` for them."""
    model = GPT(config)
    params = jax.jit(model.init)(rng, jnp.zeros((1, 1), jnp.int32))['params']
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=tx, loss_scale=initial_loss_scale(config.dtype))
    # not flax's weakly typed 0, which would trigger a second compilation
    return state.replace(step=jnp.int32(0))


def initial_loss_scale(dtype):
    """For float16, the 2**16 that torch.amp.GradScaler starts with; None where nothing is
    scaled."""
    if dtype != 'float16':
        return None
    return {'scale': jnp.float32(2**16), 'good_steps': jnp.int32(0)}


def without_tables(params):
    """The parameters by which activations are multiplied: all but wpe, and wte if lm_head is a
    matrix of its own."""
    tables = ('wpe', 'wte') if 'lm_head' in params else ('wpe',)
    return {name: part for name, part in params.items() if name not in tables}


def count_params(params, non_embedding=True):
    """Number of parameters; non_embedding: of those without_tables, as in nanoGPT."""
    if non_embedding:
        params = without_tables(params)
    return sum(x.size for x in jax.tree.leaves(params))


def estimate_mfu(n_params, config, tokens_per_sec, peak_flops, n_frozen=0):
    """Model FLOPs utilization: the share of `peak_flops` (FLOP/s of all devices together) that the
    training achieves. 6 FLOPs per trained parameter and token, forward and backward, 4 per
    parameter of n_frozen, which have no gradient, and attention's 12 L H K T (PaLM,
    arXiv:2204.02311, appendix B), T being the layer's attention span. n_params, of the trained
    parameters, and n_frozen are count_params(params); experts that a token does not use do not
    count."""
    layers = [config.layer(i) for i in range(config.n_layer)]
    moe = config.moe
    if moe:
        n_matrices = 3 if config.has_gate else 2
        expert_size = n_matrices * config.n_embd * moe.width
        n_moe_layers = sum(is_moe for _, is_moe in layers)
        unused = n_moe_layers * (moe.n_expert - moe.n_used) * expert_size
        if n_frozen:
            n_frozen -= unused
        else:
            n_params -= unused
    spans = 0
    for layer_type, _ in layers:
        spans += min(config.block_size, config.attention_span(layer_type))
    mla = config.mla
    width = (mla.nope_dim + mla.rope_dim + mla.v_dim) / 2 if mla else config.head_width
    flops_per_token = 6 * n_params + 4 * n_frozen + 12 * config.n_head * width * spans
    return flops_per_token * tokens_per_sec / peak_flops


# -----------------------------------------------------------------------------
# other models (skip on first reading): each part can be read alone, and acts only if the config
# asks for it.
# More letters: Q query heads per key head, C width of a latent, P tokens of a call (B T), E
# experts, U used per token

# --- multi-head latent attention
class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V of all heads are
    projected from one low-rank latent per token; a second key part, shared by all heads, carries
    RoPE. Only these two are cached."""
    config: GPTConfig
    layer_type: str = 'full'

    @nn.compact
    def __call__(self, x_BxTxD, position_BxT=None, cache=None, seq_id_B=None, start_BxT=None):
        """As CausalSelfAttention's; the cache holds {'latent': [B, 1, S, C], 'rope': [B, 1, S,
        rope_dim]}."""
        cfg, mla, H = self.config, self.config.mla, self.config.n_head
        B, T, D = x_BxTxD.shape
        are_indices = (position_BxT is None or start_BxT is not None) and not self.is_initializing()
        if position_BxT is None:
            position_BxT = jnp.arange(T)[None]

        # queries: each head has a part without position and a part with RoPE
        q_in = x_BxTxD
        if mla.q_rank:
            q_in = Dense(cfg, mla.q_rank, tp=(), name='q_a')(x_BxTxD)
            q_in = RMSNorm(cfg, 1e-6, name='q_norm')(q_in)
        q = Dense(cfg, H * (mla.nope_dim + mla.rope_dim), name='q_b')(q_in)
        q_BxTxHxK = q.reshape(B, T, H, -1)
        q_nope_BxTxHxK, q_rope_BxTxHxK = jnp.split(q_BxTxHxK, [mla.nope_dim], axis=-1)
        q_rope_BxTxHxK = apply_rope(cfg, self.layer_type, q_rope_BxTxHxK, position_BxT)

        # keys and values: one latent per token, and one key part with RoPE for all heads
        kv_a = Dense(cfg, mla.kv_rank + mla.rope_dim, tp=(), name='kv_a')(x_BxTxD)
        latent_BxTxC, k_rope_BxTxK = jnp.split(kv_a, [mla.kv_rank], axis=-1)
        latent_BxTxC = RMSNorm(cfg, 1e-6, name='kv_norm')(latent_BxTxC)
        k_rope_BxTx1xK = apply_rope(cfg, self.layer_type, k_rope_BxTxK[:, :, None], position_BxT)
        new_kv = {'latent': latent_BxTxC[:, :, None], 'rope': k_rope_BxTx1xK}
        kv, key_position_BxS, cache = update_kv_cache(
            cfg, self.layer_type, cache, new_kv, position_BxT)

        kv_b_shape = mla.kv_rank, H * (mla.nope_dim + mla.v_dim)
        kv_b = self.param('kv_b', nn.initializers.normal(INIT_STD), kv_b_shape)
        kv_b = kv_b.astype(cfg.dtype).reshape(mla.kv_rank, H, -1)
        wk_CxHxK, wv_CxHxK = jnp.split(kv_b, [mla.nope_dim], axis=-1)
        positions = Positions(position_BxT, key_position_BxS, start_BxT, are_indices)
        scale = cfg.attention_scale or (mla.nope_dim + mla.rope_dim)**-0.5
        key_B = dropout_keys(self, seq_id_B)

        # Two forms of the same result; the one with fewer multiplications is taken. Absorbed
        # (decode): kv_b is folded into q and the output, T S H 2C. Projected (prefill): K and V
        # from latents, (S C + T S) H (nope + v).
        n_kv = mla.nope_dim + mla.v_dim
        absorbed = T * (2 * mla.kv_rank - n_kv) < mla.kv_rank * n_kv
        if absorbed:
            q_latent_BxTxHxC = jnp.einsum('bthk,chk->bthc', q_nope_BxTxHxK, wk_CxHxK)
            q_BxTxHxC = jnp.concatenate([q_latent_BxTxHxC, q_rope_BxTxHxK], axis=-1)
            k_BxSx1xC = jnp.concatenate([kv['latent'], kv['rope']], axis=-1)
            # no kernel has such wide heads
            positions = dataclasses.replace(positions, are_indices=False)
            y_BxTxHxC = attend(
                cfg, self.layer_type, q_BxTxHxC, k_BxSx1xC, kv['latent'], positions, scale=scale,
                key_B=key_B)
            record_attention(self, q_BxTxHxC, k_BxSx1xC, positions, scale=scale)
            y_BxTxHxK = jnp.einsum('bthc,chk->bthk', y_BxTxHxC, wv_CxHxK)
        else:
            latent_BxSxC = kv['latent'][:, :, 0]
            k_nope_BxSxHxK = jnp.einsum('bsc,chk->bshk', latent_BxSxC, wk_CxHxK)
            k_rope_BxSxHxK = jnp.broadcast_to(kv['rope'], (*k_nope_BxSxHxK.shape[:3], mla.rope_dim))
            q_BxTxHxK = jnp.concatenate([q_nope_BxTxHxK, q_rope_BxTxHxK], axis=-1)
            k_BxSxHxK = jnp.concatenate([k_nope_BxSxHxK, k_rope_BxSxHxK], axis=-1)
            v_BxSxHxK = jnp.einsum('bsc,chk->bshk', latent_BxSxC, wv_CxHxK)
            y_BxTxHxK = attend(
                cfg, self.layer_type, q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, positions, scale=scale,
                key_B=key_B)
            record_attention(self, q_BxTxHxK, k_BxSxHxK, positions, scale=scale)
        y_BxTxD = residual_dense(cfg)(y_BxTxHxK.reshape(B, T, -1))
        return dropout(self, y_BxTxD, seq_id_B), cache


# --- gated MLPs
def gated_activation(config, gate, up):
    """SwiGLU or GEGLU (arXiv:2002.05202), or gpt-oss's clamped variant, of the outputs of c_gate
    and c_fc."""
    if config.mlp == 'swiglu':
        return jax.nn.silu(gate) * up
    if config.mlp == 'geglu':
        return gelu(gate, config.activation == 'gelu_tanh') * up
    if config.mlp == 'swiglu_clamped':
        gate = jnp.minimum(gate, config.swiglu_limit)
        up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    raise ValueError(f'mlp={config.mlp} has no branch in gated_activation')


# --- mixture of experts
class Router(nn.Module):
    """x [B, T, D] -> the experts of each token and their weights, [P, U] each; in float32."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD):
        cfg, moe, E = self.config, self.config.moe, self.config.moe.n_expert
        B, T, D = x_BxTxD.shape
        # a score for each expert
        kernel = self.param('kernel', nn.initializers.normal(INIT_STD), (D, E))
        logits_PxE = x_BxTxD.reshape(-1, D).astype(jnp.float32) @ kernel.astype(jnp.float32)
        if cfg.bias:
            logits_PxE += self.param('bias', nn.initializers.zeros, (E,))
        if moe.score == 'softmax':
            score_PxE = jax.nn.softmax(logits_PxE)
        else:
            score_PxE = jax.nn.sigmoid(logits_PxE)

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

        # Load-balancing loss (Switch, arXiv:2101.03961): E * sum(share of tokens * mean score), 1
        # if balanced. Per sequence (DeepSeek-V3, arXiv:2412.19437), so the loss does not depend on
        # batch sharding.
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
        bias = None
        if self.config.bias:
            bias = self.param('bias', nn.initializers.zeros, (E, self.shape[1]))
        return {'kernel': kernel, 'bias': bias}


class MoELayer(nn.Module):
    """A mixture of experts: a router sends each token through n_used of n_expert MLPs; no token is
    dropped."""
    config: GPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, seq_id_B=None):
        cfg, moe, D = self.config, self.config.moe, self.config.n_embd
        x_PxD = x_BxTxD.reshape(-1, D)
        expert_PxU, weight_PxU = Router(cfg, name='router')(x_BxTxD)
        names = ('c_gate', 'c_fc') if cfg.has_gate else ('c_fc',)
        weights = {}
        for name in names:
            weights[name] = ExpertDense(cfg, (D, moe.width), name=f'experts_{name}')()
        init_std = INIT_STD / (2 * cfg.n_layer)**0.5  # as residual_dense
        weights['c_proj'] = ExpertDense(cfg, (moe.width, D), init_std, name='experts_c_proj')()

        def expert(weights, x_bxD):
            """One expert's MLP."""
            h_bxF = linear(x_bxD, **weights['c_fc'])
            gate_bxF = linear(x_bxD, **weights['c_gate']) if cfg.has_gate else None
            return linear(activate(cfg, h_bxF, gate_bxF), **weights['c_proj'])

        y_PxD = mix_experts(
            expert, weights, x_PxD, expert_PxU, weight_PxU, scale_input=moe.weigh_input,
            way=cfg.experts)
        y_BxTxD = y_PxD.reshape(x_BxTxD.shape)
        if moe.shared_width:
            y_BxTxD += MLP(cfg, moe.shared_width, name='shared')(x_BxTxD)
        return dropout(self, y_BxTxD, seq_id_B)


def __getattr__(name):
    """`from jax_transformer import generate` works: jax_generate imports this file, so it is
    imported on first use."""
    if name == 'generate':
        from jax_generate import generate
        return generate
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
