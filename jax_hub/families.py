"""Maps the config.json of the families of models on Hugging Face's hub to a GPTConfig.

The file is read with transformers, which fills in the defaults of missing keys, understands older
keys, knows which layers have windows, and gives RoPE's parameters in one form. The functions here
map the config of transformers to the fields of GPTConfig, and refuse values that GPT does not
compute.

Reference: https://github.com/huggingface/transformers/tree/main/src/transformers/models,
configuration_*.py"""
import copy
import math

from jax_flags import UserError, printable
from jax_hub.folders import import_transformers, telling_warnings
from jax_transformer import GPTConfig

# model_type: the model_type of the class of transformers that reads it
CLASS_OF = {'kimi_k2': 'deepseek_v3', 'gemma3': 'gemma3_text', 'llama4': 'llama4_text'}
COMPOSITE = ('gemma3', 'llama4')  # with a text_config beside a vision_config
# keys that do not belong to the language model
NOT_READ = ('quantization_config', 'num_labels', 'id2label', 'label2id')
QUANTIZATIONS = (None, 'mxfp4', 'fp8')
GPT2_SIZES = {
    'block_size': 'n_positions',
    'vocab_size': 'vocab_size',
    'n_layer': 'n_layer',
    'n_head': 'n_head',
    'n_embd': 'n_embd',
}  # field of GPTConfig and nanoGPT: key in config.json
GPT2_FIXED = {
    'scale_attn_weights': True,
    'scale_attn_by_inverse_layer_idx': False,
    'reorder_and_upcast_attn': False,
    'add_cross_attention': False,
}  # the only values that GPT computes
HF_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}
LAYER_TYPES = {
    'full_attention': 'full',
    'sliding_attention': 'window',
    'chunked_attention': 'chunk',
}


def require(hf, **supported):
    """Raises UserError if a key of `hf`, a config of transformers, has another value than in
    `supported`. A key that `hf` lacks passes."""
    for key, value in supported.items():
        found = getattr(hf, key, value)
        if found != value:
            raise UserError(f'{key}={found!r:.80} is not supported, only {value!r}')


# -----------------------------------------------------------------------------
# The families. Each function takes hf, a config object of transformers, and returns fields of
# GPTConfig, {name: value}.

def gpt2_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a GPT-2 model. hf: the config of the
    model, as transformers reads it."""
    require(hf, **GPT2_FIXED)
    if hf.activation_function not in HF_ACTIVATIONS:
        raise UserError(f'activation_function {hf.activation_function!r} is not supported')
    fields = {field: getattr(hf, key) for field, key in GPT2_SIZES.items()}
    return fields | dict(
        n_inner=hf.n_inner or 0,
        activation=HF_ACTIVATIONS[hf.activation_function],
        norm_eps=hf.layer_norm_epsilon,
        tied_head=hf.tie_word_embeddings,
    )


def llama_fields(hf, *, activation='silu', attention_bias=False):
    """Returns the fields of GPTConfig, {name: value}, with which all families except GPT-2 start. A
    family may replace some of these fields, and adds others. RoPE's fields are not included, see
    rope_fields.

    hf: the config of the model, as transformers reads it. activation, attention_bias: the values
    that the family supports. Raises UserError if `hf` has another activation or attention_bias, or
    mlp_bias=True."""
    name = 'hidden_activation' if hasattr(hf, 'hidden_activation') else 'hidden_act'
    require(hf, **{name: activation}, attention_bias=attention_bias, mlp_bias=False)
    return dict(
        vocab_size=hf.vocab_size,
        block_size=hf.max_position_embeddings,
        n_layer=hf.num_hidden_layers,
        n_head=hf.num_attention_heads,
        n_embd=hf.hidden_size,
        n_kv_head=hf.num_key_value_heads,
        head_dim=head_width(hf),
        n_inner=hf.intermediate_size,
        tied_head=hf.tie_word_embeddings,
        norm='rms',
        norm_eps=hf.rms_norm_eps,
        position='rope',
        bias=False,
        mlp='swiglu',
    )


def head_width(hf):
    """Returns the number of channels per attention head of a model. hf: the model's config, as
    transformers reads it. Raises UserError if head_dim is null."""
    width = getattr(hf, 'head_dim', hf.hidden_size // hf.num_attention_heads)
    if width is None:
        raise UserError('head_dim=null is not supported for this family')
    return width


def llama_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Llama model. hf: the config of the
    model, as transformers reads it."""
    return llama_fields(hf) | rope_fields(hf)


def mistral_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Mistral model. hf: the config of the
    model, as transformers reads it."""
    return llama_config(hf) | window_of_all_layers(hf)


def window_of_all_layers(hf):
    """Returns the fields window and layer_types of GPTConfig for a model in which all layers have
    the same window. Returns {} if no layer has a window. hf: the config of the model, as
    transformers reads it."""
    if hf.sliding_window is None:
        return {}
    return {'window': hf.sliding_window, 'layer_types': ('window',)}


def phi3_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Phi 3 model, which may rotate a part of
    each head. hf: the config of the model, as transformers reads it."""
    part = hf.rope_parameters['partial_rotary_factor']
    width = int(head_width(hf) * part)
    if width < 2 or width % 2 or part > 1:
        raise UserError(f'partial_rotary_factor={part!r:.80} leaves no even number of channels')
    is_part = width < head_width(hf)
    return (llama_fields(hf) | window_of_all_layers(hf) | rope_fields(hf, width=width)
            | {'rope_width': width if is_part else 0})


def qwen2_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Qwen 2 model. hf: the config of the
    model, as transformers reads it."""
    return llama_config(hf) | window_fields(hf) | {'qkv_bias': True}


def qwen3_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Qwen 3 model. hf: the config of the
    model, as transformers reads it."""
    return llama_config(hf) | window_fields(hf) | {'qk_norm': 'learned'}


def window_fields(hf):
    """Returns the fields window and layer_types of GPTConfig, or {} if `hf`, the config of
    transformers, has no sliding_window. Raises UserError if a layer has a window but the window's
    size is missing."""
    types = tuple(LAYER_TYPES[layer_type] for layer_type in hf.layer_types)
    if hf.sliding_window is not None:
        return {'window': hf.sliding_window, 'layer_types': types}
    if 'window' in types:
        raise UserError('it lacks sliding_window, which its layers of sliding_attention need')
    return {}


def smollm3_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a SmolLM3 model, a Llama with some layers
    without RoPE. hf: the config of the model, as transformers reads it."""
    require(hf, use_sliding_window=False, layer_types=['full_attention'] * hf.num_hidden_layers)
    types = tuple('full' if has_rope else 'nope' for has_rope in layers_with_rope(hf))
    return llama_config(hf) | {'layer_types': types}


def layers_with_rope(hf):
    """Returns a list that says for each layer whether it has RoPE: no_rope_layers of config.json.
    Despite this name, 1 means that a layer has RoPE. hf: the config of the model, as transformers
    reads it. Raises UserError if the list does not have num_hidden_layers elements."""
    if len(hf.no_rope_layers) != hf.num_hidden_layers:
        raise UserError(f'no_rope_layers lists {len(hf.no_rope_layers)} of the '
                        f'{hf.num_hidden_layers} layers')
    return hf.no_rope_layers


# OLMo 2 and 3 normalize outputs of attention and MLP, and all heads of a token together
OLMO_NORMS = {'block_norms': 'post', 'qk_norm': 'all_heads'}


def olmo2_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for an OLMo 2 model. hf: the config of the
    model, as transformers reads it."""
    return llama_config(hf) | OLMO_NORMS


def olmo3_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for an OLMo 3 model. hf: the config of the
    model, as transformers reads it."""
    return llama_fields(hf) | ropes_by_layer_type(hf) | window_fields(hf) | OLMO_NORMS


def gemma_fields(hf):
    """Returns the fields of GPTConfig, {name: value}, that Gemma 2 and 3 have in common. RoPE's
    fields are not included. hf: the config of the model, as transformers reads it."""
    if hf.use_bidirectional_attention:
        require(hf, use_bidirectional_attention=False)
    return llama_fields(hf, activation='gelu_pytorch_tanh') | window_fields(hf) | dict(
        embed_scale=hf.hidden_size**0.5,
        block_norms='both',
        mlp='geglu',
        activation='gelu_tanh',
        attention_scale=hf.query_pre_attn_scalar**-0.5,
    )


def gemma2_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Gemma 2 model. A cap of null means no
    cap. hf: the config of the model, as transformers reads it."""
    return gemma_fields(hf) | rope_fields(hf) | dict(
        attention_cap=hf.attn_logit_softcapping or 0.0,
        logit_cap=hf.final_logit_softcapping or 0.0,
    )


def gemma3_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Gemma 3 model. hf: the config of the
    model, as transformers reads it."""
    require(hf, final_logit_softcapping=None, attn_logit_softcapping=None)
    return gemma_fields(hf) | ropes_by_layer_type(hf) | {'qk_norm': 'learned'}


def qwen3_moe_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Qwen 3 model with experts. hf: the
    config of the model, as transformers reads it."""
    require(hf, use_sliding_window=False)
    are_moe = [i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0
               for i in range(hf.num_hidden_layers)]
    moe = dict(
        n_expert=hf.num_local_experts,
        n_used=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size,
        normalize=hf.norm_topk_prob,
        layers=are_moe,
    )
    return llama_config(hf) | {'qk_norm': 'learned', 'moe': moe}


def gpt_oss_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a gpt-oss model. hf: the config of the
    model, as transformers reads it."""
    require(hf, swiglu_alpha=1.702)
    moe = dict(
        n_expert=hf.num_local_experts,
        n_used=hf.num_experts_per_tok,
        width=hf.intermediate_size,
    )
    return llama_fields(hf, attention_bias=True) | rope_fields(hf) | window_fields(hf) | dict(
        bias=True, sinks=True, mlp='swiglu_clamped', swiglu_limit=hf.swiglu_limit, moe=moe
    )


def deepseek_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a DeepSeek V3 or Kimi K2 model. hf: the
    config of the model, as transformers reads it."""
    require(
        hf,
        scoring_func='sigmoid',
        topk_method='noaux_tc',
        moe_layer_freq=1,
        rope_interleave=True,
        num_key_value_heads=hf.num_attention_heads,
    )
    mla = dict(
        q_rank=hf.q_lora_rank or 0,  # null: queries are not compressed
        kv_rank=hf.kv_lora_rank,
        nope_dim=hf.qk_nope_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        v_dim=hf.v_head_dim,
    )
    scale = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    rope = hf.rope_parameters
    if rope['rope_type'] != 'default' and rope.get('mscale_all_dim'):
        scale *= yarn_mscale(rope['factor'], rope['mscale_all_dim']) ** 2
    moe = dict(
        n_expert=hf.n_routed_experts,
        n_used=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size,
        shared_width=hf.moe_intermediate_size * hf.n_shared_experts,
        score='sigmoid',
        selection_bias=True,
        normalize=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        n_group=hf.n_group,
        n_group_used=hf.topk_group,
        layers=[i >= hf.first_k_dense_replace for i in range(hf.num_hidden_layers)],
    )
    return llama_config(hf) | dict(head_dim=0, n_kv_head=0, mla=mla, attention_scale=scale, moe=moe)


def llama4_config(hf):
    """Returns the fields of GPTConfig, {name: value}, for a Llama 4 model. hf: the config of the
    model, as transformers reads it."""
    types = []
    for layer_type, has_rope in zip(hf.layer_types, layers_with_rope(hf)):
        is_chunked = layer_type == 'chunked_attention'
        if is_chunked and (not has_rope or hf.attention_chunk_size is None):
            raise UserError('chunked_attention needs attention_chunk_size and RoPE')
        types.append(LAYER_TYPES[layer_type] if has_rope else 'nope')
    moe = dict(
        n_expert=hf.num_local_experts,
        n_used=hf.num_experts_per_tok,
        width=hf.intermediate_size,
        shared_width=hf.intermediate_size,
        score='sigmoid',
        normalize=False,
        weigh_input=True,
        layers=[i in hf.moe_layers for i in range(hf.num_hidden_layers)],
    )
    return llama_config(hf) | dict(
        n_inner=hf.intermediate_size_mlp,
        chunk=hf.attention_chunk_size or 0,
        qk_norm='plain' if hf.use_qk_norm else '',
        layer_types=tuple(types),
        query_growth=hf.attn_scale if hf.attn_temperature_tuning else 0.0,
        query_growth_every=hf.floor_scale,
        moe=moe,
    )


FAMILIES = {  # by model_type
    'gpt2': gpt2_config,
    'llama': llama_config,
    'mistral': mistral_config,
    'qwen2': qwen2_config,
    'phi3': phi3_config,
    'smollm3': smollm3_config,
    'qwen3': qwen3_config,
    'qwen3_moe': qwen3_moe_config,
    'olmo2': olmo2_config,
    'olmo3': olmo3_config,
    'gemma2': gemma2_config,
    'gemma3_text': gemma3_config,
    'gemma3': gemma3_config,
    'gpt_oss': gpt_oss_config,
    'deepseek_v3': deepseek_config,
    'kimi_k2': deepseek_config,
    'llama4_text': llama4_config,
    'llama4': llama4_config,
}


# -----------------------------------------------------------------------------
# RoPE, see modeling_rope_utils.py of transformers

def rope_fields(hf, rope=None, width=None):
    """Returns the fields rope_theta and rope_scaling of GPTConfig, and block_size if RoPE limits it
    (LongRoPE).

    hf: the config of the model, as transformers reads it. rope: RoPE's parameters, by default
    hf.rope_parameters. width: the number of rotated channels, for a family that may rotate only a
    part of a head; None for other families."""
    rope = hf.rope_parameters if rope is None else rope
    theta = rope['rope_theta']
    if type(theta) not in (int, float) or not 0 < theta < 1e300:
        raise UserError(f'rope_theta should be a number above 0, not {theta!r:.80}')
    part = rope.get('partial_rotary_factor', 1.0)
    if width is None and part != 1:
        raise UserError(f'partial_rotary_factor={part} is not supported for this family, only 1.0')
    fields = {'rope_theta': float(theta)}
    kind = rope['rope_type']
    if kind == 'default':
        return fields
    if kind not in SCALINGS:
        raise UserError(f'rope scaling {kind!r} is not supported; supported: {", ".join(SCALINGS)}')

    # the factor, and the length from which it applies
    length = hf.max_position_embeddings
    if kind != 'linear':
        length = rope.get('original_max_position_embeddings', length)
    factor = rope.get('factor') if kind == 'longrope' else rope['factor']
    if factor is None and kind in ('yarn', 'longrope'):
        factor = hf.max_position_embeddings / length
    if kind == 'yarn' and theta == 1:
        raise UserError('rope_theta=1 cannot be scaled by yarn')
    if kind == 'longrope':
        fields['block_size'] = min(hf.max_position_embeddings, length)
    more = SCALINGS[kind](rope, factor, length)
    scaling = {'kind': kind, 'factor': float(factor), 'original_length': length, **more}
    return fields | {'rope_scaling': scaling}


def linear(rope, factor, length):
    """Returns {}, because linear scaling needs no more fields than those that rope_fields sets.
    Linear scaling divides positions by the field `factor`.

    rope_fields sets the fields kind, factor and original_length of RopeScaling. The functions
    linear, llama3, yarn and longrope return the other fields that their kind of scaling needs,
    {name: value}. All four functions take the same arguments:
    rope: RoPE's parameters, see rope_fields.
    factor, length: the values of the fields factor and original_length."""
    return {}


def llama3(rope, factor, length):
    """Returns the fields low and high of RopeScaling for Llama 3. The arguments are those of the
    function linear() in this file."""
    return {'low': float(rope['low_freq_factor']), 'high': float(rope['high_freq_factor'])}


def yarn(rope, factor, length):
    """Returns the fields low, high, truncate and amplitude of RopeScaling for YaRN
    (arXiv:2309.00071). The arguments are those of the function linear() in this file."""
    amplitude = rope.get('attention_factor')
    if amplitude is None:
        amplitude = yarn_mscale(factor)
        if rope.get('mscale') and rope.get('mscale_all_dim'):
            amplitude = yarn_mscale(factor, rope['mscale'])
            amplitude /= yarn_mscale(factor, rope['mscale_all_dim'])
    return {
        'low': float(rope.get('beta_slow') or 1),
        'high': float(rope.get('beta_fast') or 32),
        'truncate': bool(rope.get('truncate', True)),
        'amplitude': float(amplitude),
    }


def yarn_mscale(factor, mscale=1.0):
    """Returns the number by which YaRN multiplies queries and keys if a context is extended
    `factor` times: 0.1 * mscale * ln(factor) + 1, or 1.0 without an extension."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def longrope(rope, factor, length):
    """Returns the fields pair_factors and amplitude of RopeScaling for LongRoPE. Their values are
    right for texts up to the context length of pretraining. The arguments are those of the function
    linear() in this file.

    Longer texts are not supported: rope_fields limits block_size to the context length of
    pretraining. LongRoPE uses other factors at all positions of a longer text, so the keys that a
    KV cache already holds would have to be computed again."""
    amplitude = rope.get('attention_factor')
    if amplitude is None:
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return {'pair_factors': rope['short_factor'], 'amplitude': float(amplitude)}


SCALINGS = {'linear': linear, 'llama3': llama3, 'yarn': yarn, 'longrope': longrope}


def ropes_by_layer_type(hf):
    """Returns the fields of GPTConfig that describe RoPE, {name: value}, for a model with two
    RoPEs. One RoPE is for the layers with a window: its theta becomes window_rope_theta. The other
    is for all other layers: it becomes the fields that rope_fields returns. hf: the config of the
    model, as transformers reads it."""
    full, sliding = (hf.rope_parameters[f'{kind}_attention'] for kind in ('full', 'sliding'))
    if sliding['rope_type'] != 'default':
        raise UserError('only the rope_type "default" of sliding_attention is supported')
    # transformers looks for it beside the layer types
    full = {**full, 'truncate': hf.rope_parameters.get('truncate', True)}
    window_theta = rope_fields(hf, sliding)['rope_theta']
    return rope_fields(hf, full) | {'window_rope_theta': window_theta}


# -----------------------------------------------------------------------------
# reading

def read_config(values, source):
    """Makes a GPTConfig from the content of a config.json. Returns (the GPTConfig; the model_type).
    A config class of transformers fills in the defaults of missing keys.

    values: the content as it is in the file, {key: value}; jax_hub.folders.read_config_json returns
    it. source: the path of the config.json, for messages. Raises UserError if a value is missing,
    has a wrong type, or is not supported."""
    family = values.get('model_type')
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f'{source}: model_type {family!r:.80} is not supported; supported: '
                        f'{", ".join(FAMILIES)}')
    quantization = values.get('quantization_config') or {}
    try:
        if quantization.get('quant_method') not in QUANTIZATIONS:
            raise UserError(f'quantization {quantization["quant_method"]!r:.80} is not supported; '
                            'supported: mxfp4, fp8')
        with telling_warnings(source):
            hf = config_of_transformers(values, family)
        fields = FAMILIES[family](hf)
    except UserError as error:
        raise UserError(f'{source}: {error}') from None
    except Exception as error:  # of transformers, or of a value that it accepted
        reason = printable(' '.join(str(error).split()))
        raise UserError(f'{source} is malformed ({type(error).__name__}: {reason})') from None
    return make_config(fields, source), family


def config_of_transformers(values, family):
    """Returns a config object of transformers for the language model that a config.json describes.
    Raises UserError if `values` has a text_config, but the family is not in COMPOSITE.

    values: the content of the config.json. If it has a text_config, only that part is read (for
    gemma3 also tie_word_embeddings beside it). family: the model_type."""
    if 'text_config' in values:
        if family not in COMPOSITE:
            raise UserError(f'text_config is not supported for {family}')
        outer, values = values, values['text_config']
        if family == 'gemma3':  # its head belongs to the whole model
            tied = outer.get('tie_word_embeddings', True)
            values = {**values, 'tie_word_embeddings': tied}
    values = {key: value for key, value in values.items() if key not in NOT_READ}
    classes = import_transformers().CONFIG_MAPPING
    hf = classes[CLASS_OF.get(family, family)].from_dict(copy.deepcopy(values))  # it is changed
    if hasattr(hf, 'rope_parameters'):
        hf.standardize_rope_params()  # as its models do: with keys that the class does not have
    return hf


def make_config(fields, source):
    """Returns GPTConfig(**fields). UserErrors name `source`, the file that the fields come from."""
    try:
        return GPTConfig(**fields)
    except (UserError, TypeError) as error:
        raise UserError(f'{source}: {error}') from None
