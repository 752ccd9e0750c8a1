"""The families of models on Hugging Face's hub: from the config.json of each to a GPTConfig.

Reference: https://github.com/huggingface/transformers/tree/main/src/transformers/models,
configuration_*.py
"""

from jax_files.config_json import JsonConfig, OrNull, shown
from jax_files.weight_files import require_keys
from jax_flags import UserError
from jax_ropes import read_phi3_rope, read_rope, read_ropes_by_layer_type, yarn_mscale
from jax_transformer import GPTConfig

# -----------------------------------------------------------------------------
# what a config.json without a key means, as in transformers 5; a key that is not here has to be
# there

LLAMA = {'num_key_value_heads': OrNull(None), 'rms_norm_eps': 1e-6, 'tie_word_embeddings': False}
QWEN = dict(
    LLAMA,
    num_key_value_heads=OrNull(32),
    use_sliding_window=False,
    sliding_window=OrNull(4096),
    max_window_layers=28,
)
GEMMA = dict(
    LLAMA,
    use_bidirectional_attention=OrNull(False),
    num_key_value_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    sliding_window=OrNull(4096),
    query_pre_attn_scalar=256,
)
GEMMA3 = dict(
    GEMMA,
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    max_position_embeddings=131072,
    sliding_window_pattern=6,
)  # published files leave sizes out
DEEPSEEK = dict(
    LLAMA,
    q_lora_rank=OrNull(1536),
    n_shared_experts=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
)
LLAMA4 = dict(
    LLAMA,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    interleave_moe_layer_step=1,
    no_rope_layer_interval=4,
    use_qk_norm=True,
    attention_chunk_size=OrNull(8192),
    floor_scale=8192,
    attn_scale=0.1,
    attn_temperature_tuning=True,
)

DEFAULTS = {  # by model_type
    'gpt2': {
        'activation_function': 'gelu_new',
        'layer_norm_epsilon': 1e-5,
        'tie_word_embeddings': True,
        'n_inner': OrNull(None),
    },
    'llama': dict(LLAMA, head_dim=OrNull(None)),
    'mistral': dict(
        LLAMA, head_dim=OrNull(None), num_key_value_heads=8, sliding_window=OrNull(4096)
    ),
    'phi3': dict(LLAMA, rms_norm_eps=1e-5, sliding_window=OrNull(None)),
    'qwen2': QWEN,
    'qwen3': dict(QWEN, head_dim=128),
    'qwen3_moe': dict(
        LLAMA,
        num_key_value_heads=4,
        use_sliding_window=False,
        decoder_sparse_step=1,
        mlp_only_layers=OrNull(None),
        norm_topk_prob=False,
    ),
    'smollm3': dict(
        LLAMA, num_key_value_heads=OrNull(4), tie_word_embeddings=True, no_rope_layer_interval=4
    ),
    'olmo2': dict(LLAMA, rms_norm_eps=1e-5),
    'olmo3': dict(LLAMA, rms_norm_eps=1e-5, sliding_window=OrNull(4096)),
    'gemma2': dict(
        GEMMA, attn_logit_softcapping=OrNull(50.0), final_logit_softcapping=OrNull(30.0)
    ),
    'gemma3_text': GEMMA3,
    'gemma3': GEMMA3,
    'gpt_oss': dict(
        LLAMA,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        sliding_window=OrNull(128),
        swiglu_limit=7.0,
    ),
    'deepseek_v3': DEEPSEEK,
    'kimi_k2': DEEPSEEK,
    'llama4_text': LLAMA4,
    'llama4': LLAMA4,
}

COMPOSITE = ('gemma3', 'llama4')  # with a text_config beside the one of what sees

# -----------------------------------------------------------------------------
# the families

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
}  # all that GPT computes
HF_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}


def gpt2_config(hf):
    """Returns GPT-2's fields."""
    activation = hf.get('activation_function')
    if activation not in HF_ACTIVATIONS:
        raise UserError(
            f'{hf.source}: activation_function {shown(activation)} is not supported; supported: '
            f'{", ".join(HF_ACTIVATIONS)}'
        )
    fields = {field: hf.get(key) for field, key in GPT2_SIZES.items()}
    hf.require_value(**GPT2_FIXED, n_inner=4 * fields['n_embd'])
    fields.update(
        activation=HF_ACTIVATIONS[activation],
        norm_eps=hf.get('layer_norm_epsilon'),
        tied_head=hf.get('tie_word_embeddings'),
    )
    return fields


def llama_fields(hf, *, attention_bias=False):
    """Returns the fields that all families but GPT-2 have in common, without those of RoPE.

    attention_bias: the only value of that key that is computed."""
    hf.require_value(hidden_act='silu', attention_bias=attention_bias, mlp_bias=False)
    n_head, n_embd = hf.get('num_attention_heads'), hf.get('hidden_size')
    return dict(
        vocab_size=hf.get('vocab_size'),
        block_size=hf.get('max_position_embeddings'),
        n_layer=hf.get('num_hidden_layers'),
        n_head=n_head,
        n_embd=n_embd,
        n_kv_head=hf.get('num_key_value_heads') or n_head,
        head_dim=hf.get('head_dim', hf.defaults.get('head_dim', n_embd // n_head))
        or n_embd // n_head,
        n_inner=hf.get('intermediate_size'),
        tied_head=hf.get('tie_word_embeddings'),
        norm='rms',
        norm_eps=hf.get('rms_norm_eps'),
        position='rope',
        bias=False,
        mlp='swiglu',
    )


def llama_config(hf, theta=10000.0):
    """Returns Llama's fields. theta: default of rope_theta."""
    fields = llama_fields(hf)
    fields.update(read_rope(hf, theta, fields['head_dim']))
    return fields


def qwen2_config(hf):
    """Returns Qwen 2's fields."""
    fields = llama_config(hf)
    fields.update(qwen_layers(hf), qkv_bias=True)
    return fields


def qwen3_config(hf):
    """Returns Qwen 3's fields."""
    fields = llama_config(hf)
    fields.update(qwen_layers(hf), qk_norm='learned')
    return fields


def qwen_layers(hf):
    """Returns Qwen's window and layer_types, {} where no layer has a window."""
    has_window = hf.get('use_sliding_window')
    window = hf.get('sliding_window') if has_window else None
    first = hf.get('max_window_layers')
    types = read_layer_types(hf, lambda i: window is None or i < first)
    if window is None:
        if 'window' in types:
            raise UserError(
                f'{hf.source} has layers of sliding_attention, but not sliding_window with '
                'use_sliding_window'
            )
        return {}
    return {'window': window, 'layer_types': types}


def mistral_config(hf):
    """Returns Mistral's fields; a sliding_window of null is none."""
    fields = llama_config(hf)
    fields.update(window_of_all_layers(hf))
    return fields


def phi3_config(hf):
    """Returns Phi 3's fields."""
    fields = llama_fields(hf)
    fields.update(window_of_all_layers(hf), **read_phi3_rope(hf, 10000.0, fields['head_dim']))
    return fields


def window_of_all_layers(hf):
    """Returns window and layer_types where all layers are alike, {} where they have no window."""
    window = hf.get('sliding_window')
    return {} if window is None else {'window': window, 'layer_types': ('window',)}


def smollm3_config(hf):
    """Returns the fields of a Llama in which every fourth layer has no RoPE."""
    hf.require_value(use_sliding_window=False)
    fields = llama_config(hf, theta=2000000.0)
    if set(read_layer_types(hf, lambda i: True)) != {'full'}:
        raise UserError(
            f'{hf.source}: layer_types other than full_attention are not supported for this family'
        )
    uses_rope = layers_with_rope(hf)
    fields['layer_types'] = tuple('full' if rope else 'nope' for rope in uses_rope)
    return fields


def layers_with_rope(hf):
    """Returns whether each layer has RoPE: no_rope_layers, in spite of its name, or all but every
    n-th."""
    interval = hf.get('no_rope_layer_interval')
    n_layer = hf.get('num_hidden_layers')
    uses_rope = hf.get_list('no_rope_layers', OrNull(None))
    if uses_rope is None:
        return [(i + 1) % interval != 0 for i in range(n_layer)]
    if len(uses_rope) != n_layer:
        raise UserError(
            f'{hf.source}: no_rope_layers should be a list of {n_layer}, not {len(uses_rope)}'
        )
    return uses_rope


def olmo2_config(hf):
    """Returns OLMo 2's fields."""
    fields = llama_config(hf)
    fields.update(block_norms='post', qk_norm='all_heads')
    return fields


def olmo3_config(hf):
    """Returns OLMo 3's fields. The rope_theta beside its parameters is that of the layers without a
    window alone."""
    fields = llama_fields(hf)
    theta = hf.values.get('rope_theta', 500000.0)
    fields.update(read_ropes_by_layer_type(hf, theta, 500000.0, fields['head_dim']))
    fields.update(window_layers(hf, lambda i: i % 4 == 3), block_norms='post', qk_norm='all_heads')
    return fields


def window_layers(hf, is_full):
    """Returns window and layer_types. is_full(layer): whether it has no window, if there are no
    layer_types."""
    types = read_layer_types(hf, is_full)
    window = hf.get('sliding_window')
    if window is None and 'window' in types:
        raise UserError(
            f'{hf.source} lacks sliding_window, which its layers of sliding_attention need'
        )
    return {'window': window or 0, 'layer_types': types}


def gemma_fields(hf):
    """Returns the fields that Gemma 2 and 3 have in common, without those of RoPE and of
    windows."""
    hf.require_value(hidden_activation='gelu_pytorch_tanh', use_bidirectional_attention=False)
    # Gemma 2 has hidden_act beside hidden_activation, which counts
    values = {key: value for key, value in hf.values.items() if key != 'hidden_act'}
    fields = llama_fields(JsonConfig(values, hf.source, hf.defaults, hf.what))
    fields.update(
        embed_scale=fields['n_embd'] ** 0.5,
        block_norms='both',
        mlp='geglu',
        activation='gelu_tanh',
        attention_scale=hf.get('query_pre_attn_scalar') ** -0.5,
    )
    return fields


def gemma2_config(hf):
    """Returns Gemma 2's fields; a cap of null is none."""
    fields = gemma_fields(hf)
    fields.update(read_rope(hf, 10000.0, fields['head_dim']))
    fields.update(
        window_layers(hf, lambda i: i % 2 == 1),
        attention_cap=hf.get('attn_logit_softcapping') or 0.0,
        logit_cap=hf.get('final_logit_softcapping') or 0.0,
    )
    return fields


def gemma3_config(hf):
    """Returns Gemma 3's fields."""
    hf.require_value(final_logit_softcapping=None, attn_logit_softcapping=None)
    fields = gemma_fields(hf)
    theta = hf.values.get('rope_theta', 1000000.0)
    window_theta = hf.values.get('rope_local_base_freq', 10000.0)
    fields.update(read_ropes_by_layer_type(hf, theta, window_theta, fields['head_dim']))
    full_every = hf.get('sliding_window_pattern')
    fields.update(window_layers(hf, lambda i: (i + 1) % full_every == 0), qk_norm='learned')
    return fields


def read_layer_types(hf, is_full, other='sliding_attention'):
    """Returns GPTConfig.layer_types from config.json's list.

    is_full(layer): whether it has full attention if there is no list; else it has the `other` kind,
    the only one beside full_attention that a list may name."""
    names = {'full_attention': 'full', other: 'chunk' if other == 'chunked_attention' else 'window'}
    n_layer = hf.get('num_hidden_layers')
    types = hf.get_list('layer_types', OrNull(None), kind=str)
    if types is None:
        types = ['full_attention' if is_full(i) else other for i in range(n_layer)]
    if len(types) != n_layer or not set(types) <= names.keys():
        raise UserError(
            f'{hf.source}: layer_types should name one of {", ".join(names)} for each of {n_layer} '
            f'layers, not {shown(types)}'
        )
    return tuple(names[layer_type] for layer_type in types)


def qwen3_moe_config(hf):
    """Returns the fields of a Qwen 3 with experts."""
    hf.require_value(use_sliding_window=False)
    fields = llama_config(hf)
    moe_step = hf.get('decoder_sparse_step')
    dense_layers = set(hf.get_list('mlp_only_layers') or ())
    count = 'num_experts'
    if 'num_local_experts' in hf.values:  # the name in files of transformers 5
        count = 'num_local_experts'
        hf.require_value(num_experts=hf.values[count])
    layers = range(fields['n_layer'])
    fields.update(
        qk_norm='learned',
        moe=dict(
            n_expert=hf.get(count),
            n_used=hf.get('num_experts_per_tok'),
            width=hf.get('moe_intermediate_size'),
            normalize=hf.get('norm_topk_prob'),
            layers=[i not in dense_layers and (i + 1) % moe_step == 0 for i in layers],
        ),
    )
    return fields


GPT_OSS_ROPE = {
    'rope_type': 'yarn',
    'factor': 32.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': False,
    'original_max_position_embeddings': 4096,
}


def gpt_oss_config(hf):
    """Returns gpt-oss's fields. Its RoPE is YaRN where the config says nothing about it."""
    hf.require_value(swiglu_alpha=1.702)
    fields = llama_fields(hf, attention_bias=True)
    fields.update(read_rope(hf, 150000.0, fields['head_dim'], GPT_OSS_ROPE))
    fields.update(
        window_layers(hf, lambda i: i % 2 == 1),
        bias=True,
        sinks=True,
        mlp='swiglu_clamped',
        swiglu_limit=hf.get('swiglu_limit'),
    )
    fields['moe'] = dict(
        n_expert=hf.get('num_local_experts'),
        n_used=hf.get('num_experts_per_tok'),
        width=hf.get('intermediate_size'),
    )
    return fields


def deepseek_config(hf):
    """Returns the fields of DeepSeek V3 and Kimi K2."""
    hf.require_value(
        scoring_func='sigmoid', topk_method='noaux_tc', moe_layer_freq=1, rope_interleave=True
    )
    q_rank = hf.get('q_lora_rank')  # null: queries are not compressed
    mla = dict(
        q_rank=0 if q_rank is None else q_rank,
        kv_rank=hf.get('kv_lora_rank'),
        nope_dim=hf.get('qk_nope_head_dim'),
        rope_dim=hf.get('qk_rope_head_dim'),
        v_dim=hf.get('v_head_dim'),
    )
    # the key head_dim is the width of RoPE in this family, and keys have as many heads as queries
    hf.require_value(head_dim=mla['rope_dim'], num_key_value_heads=hf.get('num_attention_heads'))
    fields = llama_fields(hf)
    fields.update(read_rope(hf, 10000.0, mla['rope_dim']), head_dim=0, n_kv_head=0, mla=mla)
    fields['attention_scale'] = (
        deepseek_scale(hf, fields) * (mla['nope_dim'] + mla['rope_dim']) ** -0.5
    )
    width = hf.get('moe_intermediate_size')
    n_dense = hf.get('first_k_dense_replace')
    fields['moe'] = dict(
        n_expert=hf.get('n_routed_experts'),
        n_used=hf.get('num_experts_per_tok'),
        width=width,
        shared_width=width * hf.get('n_shared_experts'),
        score='sigmoid',
        selection_bias=True,
        normalize=hf.get('norm_topk_prob'),
        scale=hf.get('routed_scaling_factor'),
        n_group=hf.get('n_group'),
        n_group_used=hf.get('topk_group'),
        layers=[i >= n_dense for i in range(fields['n_layer'])],
    )
    return fields


def deepseek_scale(hf, fields):
    """Returns the factor of the scores by which DeepSeek's scaled RoPE changes them, beside YaRN's
    own.

    fields: those of GPTConfig so far."""
    if 'rope_scaling' not in fields:
        return 1.0
    rope = JsonConfig(
        hf.values.get('rope_scaling') or hf.values.get('rope_parameters'),
        hf.source,
        what='a scaled RoPE',
    )
    if not rope.values.get('mscale_all_dim'):
        return 1.0
    factor = rope.get('factor', kind=float)  # here null does not mean that of the context lengths
    return yarn_mscale(factor, rope.get('mscale_all_dim', kind=float)) ** 2


def llama4_config(hf):
    """Returns Llama 4's fields."""
    if hf.values.get('no_rope_layers') == []:  # as published; it means the same as no list
        values = {key: value for key, value in hf.values.items() if key != 'no_rope_layers'}
        hf = JsonConfig(values, hf.source, hf.defaults, hf.what)
    fields = llama_config(hf, theta=500000.0)
    chunk = hf.get('attention_chunk_size')
    width = hf.get('intermediate_size')
    uses_rope = layers_with_rope(hf)
    types = read_layer_types(
        hf, lambda i: not uses_rope[i] or chunk is None, other='chunked_attention'
    )
    if chunk is None and 'chunk' in types:
        raise UserError(
            f'{hf.source} lacks attention_chunk_size, which its layers of chunked_attention need'
        )
    if any(layer_type != 'full' and not rope for layer_type, rope in zip(types, uses_rope)):
        raise UserError(f'{hf.source}: a layer without rope is supported with full attention only')
    n_layer = fields['n_layer']
    moe_step = hf.get('interleave_moe_layer_step')
    moe_layers = hf.get_list('moe_layers', OrNull(None))
    if moe_layers is None:
        moe_layers = range(moe_step - 1, n_layer, moe_step)
    moe_layers = set(moe_layers)
    growth = hf.get('attn_scale') if hf.get('attn_temperature_tuning') else 0.0
    fields.update(
        n_inner=hf.get('intermediate_size_mlp'),
        chunk=chunk or 0,
        qk_norm='plain' if hf.get('use_qk_norm') else '',
        layer_types=tuple(kind if rope else 'nope' for kind, rope in zip(types, uses_rope)),
        query_growth=growth,
        query_growth_every=hf.get('floor_scale'),
    )
    fields['moe'] = dict(
        n_expert=hf.get('num_local_experts'),
        n_used=hf.get('num_experts_per_tok'),
        width=width,
        shared_width=width,
        score='sigmoid',
        normalize=False,
        weigh_input=True,
        layers=[i in moe_layers for i in range(n_layer)],
    )
    return fields


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
# reading


def read_config(hf, source):
    """Returns (GPTConfig, family) for the content of a config.json, as published or as written by
    transformers 5.

    hf: {key: value}. source: its path, for error messages. Raises UserError for what is missing, of
    a wrong type, too large, or not computed."""
    require_keys(['model_type'], hf, source, 'the config of a Hugging Face model')
    family = hf['model_type']
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f'{source}: model_type {shown(family)} is not supported; '
            f'supported: {", ".join(FAMILIES)}'
        )
    values = text_values(hf, source)
    try:
        fields = FAMILIES[family](JsonConfig(values, source, DEFAULTS[family], f'a {family}'))
    except UserError:
        raise
    except (TypeError, AttributeError, ArithmeticError, ValueError, RecursionError) as error:
        raise UserError(f'{source} is malformed ({type(error).__name__}: {error})') from None
    return make_config(fields, source), family


def text_values(hf, source):
    """Returns the keys of a config.json that describe what reads and writes text. Parameters as of
    read_config.

    Raises UserError for a quantization that is not known."""
    quantization = hf.get('quantization_config')
    if quantization is not None:
        method = (
            quantization.get('quant_method') if isinstance(quantization, dict) else quantization
        )
        if method not in (None, 'mxfp4', 'fp8'):
            raise UserError(
                f'{source}: quantization {shown(method)} is not supported; supported: mxfp4, fp8'
            )
    if 'text_config' not in hf:
        return hf
    if hf['model_type'] not in COMPOSITE:
        raise UserError(f'{source}: text_config is not supported for {hf["model_type"]}')
    if not isinstance(hf['text_config'], dict):
        raise UserError(
            f'{source}: text_config should be an object, not {shown(hf["text_config"])}'
        )
    values = dict(hf['text_config'])
    if hf['model_type'] == 'gemma3':  # its head belongs to the whole model
        values['tie_word_embeddings'] = hf.get('tie_word_embeddings', True)
    return values


def make_config(fields, source):
    """Returns GPTConfig(**fields); its UserErrors name the file that the fields come from."""
    try:
        return GPTConfig(**fields)
    except UserError as error:
        raise UserError(f'{source}: {error}') from None
