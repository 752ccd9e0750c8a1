"""Weights in and out: folders of Hugging Face models and nanoGPT's ckpt.pt; none of it needs PyTorch.

References:
1) transformers: https://github.com/huggingface/transformers/tree/main/src/transformers/models
2) nanoGPT's model: https://github.com/karpathy/nanoGPT/blob/master/model.py

A family is two things: a function from config.json to GPTConfig, in FAMILIES, and the names that its tensors have on
disk, a list of Pieces for every parameter of ours (gpt2_pieces, llama_pieces). The pieces serve both directions.
"""
import dataclasses
import functools
import io
import json
import logging
import math
import os
import pickle
import re
import shutil
import sys
import zipfile
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_ops import UserError
from jax_transformer import GPT, GPTConfig, MoE

PUBLISHED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # openai-community/<name> on the Hugging Face hub
WEIGHT_FILES = ('model.safetensors', 'model.safetensors.index.json', 'pytorch_model.bin')


def load_pretrained(path_or_name, dtype='float32', place=lambda path, array: array):
    """(config, params) of a Hugging Face folder or hub name, or of nanoGPT's ckpt.pt (or the folder it is in).

    params is the tree of GPT(config).init: numpy arrays, matrices in `dtype` (one of DTYPES), the rest in float32;
    kernels are [in, out]. config.dropout is 0 and config.dtype is `dtype`. Tensors are read one at a time, and each
    parameter goes through place(path in the tree, array), which may put it on its devices before the next is read.
    Raises UserError for what cannot be found, read, or computed by GPT."""
    path = local_path(path_or_name)
    for file in [path] + [os.path.join(path, name) for name in (*WEIGHT_FILES, 'ckpt.pt')]:
        if os.path.isfile(file):
            load = load_hugging_face if os.path.basename(file) in WEIGHT_FILES else load_nanogpt
            return load(file, dtype, place)
    if os.path.isdir(path):
        raise UserError(f'{path} holds no weights that can be read: none of {", ".join(WEIGHT_FILES)}, ckpt.pt')
    raise UserError(f'{path} does not exist; give a folder, a nanoGPT ckpt.pt, or one of {", ".join(PUBLISHED)}')


def local_path(path_or_name):
    """The path itself, or the folder into which the hub's model of that name was downloaded."""
    path = os.path.expanduser(path_or_name)
    on_hub = path_or_name in PUBLISHED or re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(path_or_name))
    return download(path_or_name) if on_hub and not os.path.exists(path) else path


def save_pretrained(params, config, folder):
    """Writes params as a Hugging Face folder, config.json and model.safetensors (float32), for the model of
    transformers that computes what GPT(config) does: GPT-2, Llama, Qwen3 or Qwen3-MoE.

    A GPT-2 without biases gets biases of zero, which gives the same logits. The folder must not exist or be empty; it
    appears when it is complete. Raises UserError if it cannot be written or params are not those of GPT(config)."""
    family, hf_config = hugging_face_config(config)
    pieces = gpt2_pieces(config, prefix='transformer.') if family == 'gpt2' else llama_pieces(config, LAYOUTS[family])
    arrays = flatten_dict(params)
    check_tensors({'/'.join(path): np.asarray(x) for path, x in arrays.items()},
                  {'/'.join(path): shape for path, shape in param_shapes(config).items()}, 'params')
    tensors = {piece.name: np.ascontiguousarray(piece.to_ours(np.asarray(arrays[path])[piece.at]), np.float32)
               for path in arrays for piece in pieces[path]}  # to_ours turns a matrix, or nothing: its own inverse
    if family == 'gpt2' and not config.bias:
        with_bias = gpt2_pieces(dataclasses.replace(config, bias=True), prefix='transformer.')
        tensors = {piece.name: np.zeros(piece.shape, np.float32) for (piece,) in with_bias.values()} | tensors

    folder = os.path.abspath(os.path.expanduser(folder))
    unfinished = f'{folder}.tmp-{os.getpid()}'
    try:
        if os.path.exists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
            raise UserError(f'{folder} exists and is not an empty folder; remove it or choose another')
        os.makedirs(unfinished)
        config_file, weight_file = (os.path.join(unfinished, file) for file in ('config.json', 'model.safetensors'))
        with open(config_file, 'w', encoding='utf-8') as f:
            json.dump(hf_config, f, indent=2)
        safetensors.numpy.save_file(tensors, weight_file, metadata={'format': 'pt'})
        shutil.copymode(config_file, weight_file)  # safetensors makes it unreadable for others
        os.replace(unfinished, folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f'cannot write {folder}: {error}') from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# -----------------------------------------------------------------------------
# config.json

class HFConfig:
    """The values of a config.json; what is missing, of a wrong type or not supported is a UserError that names it."""

    def __init__(self, values, source):
        self.values, self.source = values, source

    def __call__(self, key, default=None, kind=None):
        """The value of `key`; where it is missing or null the default, without which it is an error."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise UserError(f'{self.source} lacks {key}, so it is not that of a {self.values["model_type"]}')
            return default
        kind = kind or type(default if default is not None else 0)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            right = {int: 'a whole number', float: 'a number like 1e-05', bool: 'true or false', list: 'a list'}[kind]
            raise UserError(f'{self.source}: {key} should be {right}, not {value!r}')
        return value

    def only(self, **known):
        """Raises UserError for keys of another value than the one that we compute."""
        for key, value in known.items():
            if self.values.get(key) not in (None, value):
                found, known = json.dumps(self.values[key]), json.dumps(value)
                raise UserError(f'{self.source}: {key}={found} is not supported, only {known}')


def gpt2_config(hf):
    activation = hf.values.get('activation_function') or 'gelu_new'
    if activation not in list(HF_ACTIVATIONS):
        known = ', '.join(HF_ACTIVATIONS)
        raise UserError(f'{hf.source}: activation_function {activation!r} is not supported; supported: {known}')
    values = {ours: hf(theirs) for ours, theirs in GPT2_SIZES.items()}
    hf.only(**GPT2_FIXED, n_inner=4 * values['n_embd'])
    return values | {'activation': HF_ACTIVATIONS[activation], 'norm_eps': hf('layer_norm_epsilon', 1e-5)}


GPT2_SIZES = {'block_size': 'n_positions', 'vocab_size': 'vocab_size', 'n_layer': 'n_layer', 'n_head': 'n_head',
              'n_embd': 'n_embd'}  # the name here and in nanoGPT: the key in config.json
GPT2_KNOBS = (*GPT2_SIZES, 'dropout', 'bias', 'activation', 'norm_eps', 'dtype', 'attention', 'scan_layers', 'remat')
HF_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}
GPT2_FIXED = {'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False, 'reorder_and_upcast_attn': False,
              'tie_word_embeddings': True, 'add_cross_attention': False}  # the one value that GPT computes


def rope_config(hf, theta=10000.0):
    """rope_theta and rope_scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    values = hf.values.get('rope_parameters')
    if not values:
        values = {'rope_theta': hf.values.get('rope_theta')} | (hf.values.get('rope_scaling') or {})
    rope = HFConfig(values | {'model_type': 'scaled rope'}, hf.source)
    theta, kind = rope('rope_theta', theta), values.get('rope_type') or values.get('type') or 'default'
    if kind == 'default':
        return {'rope_theta': theta}
    if kind not in ('llama3', 'yarn'):
        raise UserError(f'{hf.source}: rope scaling {kind!r} is not supported; supported: llama3, yarn')
    longest = hf('max_position_embeddings')
    original = rope('original_max_position_embeddings', longest)
    factor = rope('factor', longest / original)
    scaling = {'kind': kind, 'factor': factor, 'original_length': original}
    if kind == 'llama3':
        scaling |= {'low': rope('low_freq_factor', kind=float), 'high': rope('high_freq_factor', kind=float)}
    else:
        mscale, all_dim, amplitude = values.get('mscale'), values.get('mscale_all_dim'), yarn_growth(factor)
        if mscale and all_dim:
            amplitude = yarn_growth(factor, mscale) / yarn_growth(factor, all_dim)
        scaling |= {'low': rope('beta_slow', 1.0), 'high': rope('beta_fast', 32.0), 'truncate': rope('truncate', True),
                    'amplitude': rope('attention_factor', amplitude)}
    return {'rope_theta': theta, 'rope_scaling': scaling}


def yarn_growth(factor, m=1.0):
    """YaRN's factor for the amplitude of queries and keys."""
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def llama_config(hf, eps=1e-6, theta=10000.0, attention_bias=False):
    hf.only(hidden_act='silu', attention_bias=attention_bias, mlp_bias=False, partial_rotary_factor=1.0)
    return dict(
        vocab_size=hf('vocab_size'), n_layer=hf('num_hidden_layers'), n_head=hf('num_attention_heads'),
        n_embd=hf('hidden_size'), block_size=hf('max_position_embeddings'),
        n_kv_head=hf('num_key_value_heads', hf('num_attention_heads')),
        head_dim=hf('head_dim', hf('hidden_size') // hf('num_attention_heads')), n_inner=hf('intermediate_size'),
        norm='rms', norm_eps=hf('rms_norm_eps', eps), position='rope', bias=False, mlp='swiglu',
        tied_head=hf('tie_word_embeddings', False), **rope_config(hf, theta))


def qwen3_config(hf):
    values = llama_config(hf) | {'qk_norm': 'learned', 'head_dim': hf('head_dim', 128)}
    if hf('use_sliding_window', False):
        first = hf('max_window_layers', 28)
        kinds = ['sliding_attention' if i >= first else 'full_attention' for i in range(values['n_layer'])]
        values |= {'window': hf('sliding_window'), 'layer_types': layer_types(hf, kinds)}
    return values


def layer_types(hf, default):
    names = {'full_attention': 'full', 'sliding_attention': 'window', 'chunked_attention': 'chunk'}
    kinds = hf('layer_types', default)
    if len(kinds) != hf('num_hidden_layers') or not set(kinds) <= names.keys():
        raise UserError(f'{hf.source}: layer_types should name one of {", ".join(names)} for each layer, not {kinds}')
    return tuple(names[kind] for kind in kinds)


def qwen3_moe_config(hf):
    hf.only(use_sliding_window=False)
    n, step, dense = hf('num_hidden_layers'), hf('decoder_sparse_step', 1), hf('mlp_only_layers', [])
    return llama_config(hf) | {'qk_norm': 'learned', 'moe': dict(
        n_expert=hf('num_experts', hf.values.get('num_local_experts')), n_used=hf('num_experts_per_tok'),
        width=hf('moe_intermediate_size'), normalize=hf('norm_topk_prob', False),
        layers=[i not in dense and (i + 1) % step == 0 for i in range(n)])}


def gpt_oss_config(hf):
    hf.only(swiglu_alpha=1.702)
    default = ['full_attention' if i % 2 else 'sliding_attention' for i in range(hf('num_hidden_layers'))]
    return llama_config(hf, 1e-5, 150000.0, attention_bias=True) | {
        'head_dim': hf('head_dim', 64), 'bias': True, 'sinks': True, 'mlp': 'swiglu_clamped',
        'swiglu_limit': hf('swiglu_limit', 7.0), 'window': hf('sliding_window', 128),
        'layer_types': layer_types(hf, default), 'moe': dict(
            n_expert=hf('num_local_experts'), n_used=hf('num_experts_per_tok'), width=hf('intermediate_size'))}


def deepseek_config(hf):
    hf.only(scoring_func='sigmoid', topk_method='noaux_tc', moe_layer_freq=1, rope_interleave=True)
    values, width = llama_config(hf), hf('moe_intermediate_size')
    mla = dict(q_rank=hf('q_lora_rank', 0 if 'q_lora_rank' in hf.values else 1536), kv_rank=hf('kv_lora_rank'),
               nope_dim=hf('qk_nope_head_dim'), rope_dim=hf('qk_rope_head_dim'), v_dim=hf('v_head_dim'))
    rope, growth = hf.values.get('rope_parameters') or hf.values.get('rope_scaling') or {}, 1
    if 'rope_scaling' in values:
        growth = yarn_growth(values['rope_scaling']['factor'], rope.get('mscale_all_dim') or 0)
    return values | {
        'head_dim': 0, 'n_kv_head': 0, 'mla': mla,
        'attention_scale': growth**2 * (mla['nope_dim'] + mla['rope_dim'])**-0.5, 'moe': dict(
            n_expert=hf('n_routed_experts'), n_used=hf('num_experts_per_tok'), width=width,
            shared_width=width * hf('n_shared_experts', 1), score='sigmoid', selection_bias=True,
            normalize=hf('norm_topk_prob', True), scale=hf('routed_scaling_factor', 2.5),
            n_group=hf('n_group', 8), n_group_used=hf('topk_group', 4),
            layers=[i >= hf('first_k_dense_replace', 3) for i in range(values['n_layer'])])}


def llama4_config(hf):
    n, step = hf('num_hidden_layers'), hf('interleave_moe_layer_step', 1)
    uses_rope = hf('no_rope_layers', []) or [(i + 1) % hf('no_rope_layer_interval', 4) != 0 for i in range(n)]
    kinds = layer_types(hf, ['chunked_attention' if rope else 'full_attention' for rope in uses_rope])
    if any(kind != 'full' and not rope for kind, rope in zip(kinds, uses_rope)):
        raise UserError(f'{hf.source}: a layer without rope is supported with full attention only')
    routed = hf('moe_layers', list(range(step - 1, n, step)))
    width = hf('intermediate_size')
    return llama_config(hf, 1e-5, 500000.0) | {
        'head_dim': hf('head_dim', 128), 'n_inner': hf('intermediate_size_mlp'),
        'chunk': hf('attention_chunk_size', 8192),
        'layer_types': tuple(kind if rope else 'nope' for kind, rope in zip(kinds, uses_rope)),
        'qk_norm': 'plain' if hf('use_qk_norm', True) else '', 'query_growth_every': hf('floor_scale', 8192),
        'query_growth': hf('attn_scale', 0.1) if hf('attn_temperature_tuning', True) else 0.0,
        'moe': dict(n_expert=hf('num_local_experts'), n_used=hf('num_experts_per_tok'), width=width, shared_width=width,
                    score='sigmoid', normalize=False, weigh_input=True, layers=[i in routed for i in range(n)])}


FAMILIES = {'gpt2': gpt2_config, 'llama': llama_config, 'qwen3': qwen3_config, 'qwen3_moe': qwen3_moe_config,
            'gpt_oss': gpt_oss_config, 'deepseek_v3': deepseek_config, 'kimi_k2': deepseek_config,
            'llama4_text': llama4_config, 'llama4': llama4_config}  # by model_type


def read_config(hf, source, dtype='float32'):
    """(GPTConfig, family) for the content of a config.json, as published or as written by transformers 5."""
    require(['model_type'], hf, source, 'the config of a Hugging Face model')
    family = hf['model_type']
    if family not in list(FAMILIES):
        raise UserError(f'{source}: model_type {family!r} is not supported; supported: {", ".join(FAMILIES)}')
    if 'text_config' in hf:
        hf = hf['text_config'] | {'quantization_config': hf.get('quantization_config')}
    method = (hf.get('quantization_config') or {}).get('quant_method')
    if method not in (None, 'mxfp4', 'fp8'):
        raise UserError(f'{source}: quantization {method!r} is not supported; supported: mxfp4, fp8')
    values = FAMILIES[family](HFConfig({'model_type': family} | hf, source))
    return make_config(values | {'dtype': dtype}, source), family


def make_config(values, source):
    """GPTConfig(**values); complains about the file where the values come from."""
    for name in GPT2_SIZES:
        if type(values[name]) is not int:
            raise UserError(f'{source}: {name} should be a whole number, not {values[name]!r}')
    try:
        return GPTConfig(**values)
    except UserError as error:
        raise UserError(f'{source}: {error}') from None


def hugging_face_config(config):
    """(family, config.json) of the model of transformers that computes what GPT(config) does, or UserError."""
    kinds = [config.layer(i)[0] for i in range(config.n_layer)]
    both = {'dtype': 'float32', 'vocab_size': config.vocab_size, 'tie_word_embeddings': config.tied_head}
    if config == GPTConfig(**{name: getattr(config, name) for name in GPT2_KNOBS}):
        end_of_text = 50256 if config.vocab_size > 50256 else None  # GPT-2's; other vocabularies do not have it there
        return 'gpt2', {
            'architectures': ['GPT2LMHeadModel'], 'model_type': 'gpt2', **both,
            **{theirs: getattr(config, ours) for ours, theirs in GPT2_SIZES.items()},
            'layer_norm_epsilon': config.norm_eps,
            'activation_function': next(k for k, ours in HF_ACTIVATIONS.items() if ours == config.activation),
            **{key: config.dropout for key in ('attn_pdrop', 'embd_pdrop', 'resid_pdrop')},
            'bos_token_id': end_of_text, 'eos_token_id': end_of_text, **GPT2_FIXED}

    moe, family = config.moe, 'qwen3_moe' if config.moe else 'qwen3' if config.qk_norm else 'llama'
    needed = {'norm': 'rms', 'position': 'rope', 'mlp': 'swiglu', 'bias': False, 'sinks': False, 'mla': None,
              'attention_scale': 0.0, 'qk_norm': '' if family == 'llama' else 'learned'}
    wrong = [f'{name}={getattr(config, name)!r}' for name, value in needed.items() if getattr(config, name) != value]
    if not set(kinds) <= ({'full', 'window'} if family == 'qwen3' else {'full'}):
        wrong.append(f'layer_types={config.layer_types}')
    if moe and moe != MoE(moe.n_expert, moe.n_used, moe.width, layers=moe.layers, normalize=moe.normalize,
                          balance=moe.balance):
        wrong.append(f'moe={moe}')
    if wrong:
        raise UserError(f'transformers has no GPT-2, Llama or Qwen3 with {", ".join(wrong)}, so this model cannot be '
                        'saved for it')
    rope = {'rope_type': 'default', 'rope_theta': config.rope_theta}
    if scaling := config.rope_scaling:
        low, high = ('low_freq_factor', 'high_freq_factor') if scaling.kind == 'llama3' else ('beta_slow', 'beta_fast')
        rope |= {'rope_type': scaling.kind, 'factor': scaling.factor, low: scaling.low, high: scaling.high,
                 'original_max_position_embeddings': scaling.original_length}
        if scaling.kind == 'yarn':
            rope |= {'truncate': scaling.truncate, 'attention_factor': scaling.amplitude}
    hf = {'architectures': [{'llama': 'Llama', 'qwen3': 'Qwen3', 'qwen3_moe': 'Qwen3Moe'}[family] + 'ForCausalLM'],
          'model_type': family, **both, 'hidden_size': config.n_embd, 'num_hidden_layers': config.n_layer,
          'num_attention_heads': config.n_head, 'num_key_value_heads': config.kv_heads, 'head_dim': config.head_width,
          'intermediate_size': config.mlp_width, 'max_position_embeddings': config.block_size,
          'rms_norm_eps': config.norm_eps, 'rope_parameters': rope, 'hidden_act': 'silu', 'attention_bias': False,
          'attention_dropout': config.dropout, 'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
    if family == 'qwen3':
        names = {'full': 'full_attention', 'window': 'sliding_attention'}
        hf |= {'layer_types': [names[kind] for kind in kinds], 'use_sliding_window': 'window' in kinds,
               'sliding_window': config.window or None, 'max_window_layers': config.n_layer}
    if family == 'qwen3_moe':
        hf |= {'num_experts': moe.n_expert, 'num_experts_per_tok': moe.n_used, 'moe_intermediate_size': moe.width,
               'norm_topk_prob': moe.normalize, 'decoder_sparse_step': 1,
               'mlp_only_layers': [i for i in range(config.n_layer) if not config.layer(i)[1]]}
    return family, hf


# -----------------------------------------------------------------------------
# names and shapes

transpose = lambda x: x.T
same = lambda x: x


class Piece(NamedTuple):
    """A part of one of our parameters and where it is on disk: ours[at] = to_ours(tensor `name`[part])."""
    name: str
    shape: tuple  # of the whole tensor on disk
    to_ours: Callable = same
    at: Any = ...
    part: Any = ...


def param_shapes(config):
    """{path: shape} of every parameter of GPT(config)."""
    init = lambda: GPT(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))['params']
    return {path: x.shape for path, x in flatten_dict(jax.eval_shape(init)).items()}


def gpt2_pieces(config, transposed=False, prefix=''):
    """{path: [Piece]} of GPT-2, ('h_0', 'attn', 'c_attn', 'kernel') is h.0.attn.c_attn.weight. transposed: matrices are
    [out, in] on disk, as in nanoGPT."""
    pieces = {}
    for path, shape in param_shapes(config).items():
        *scope, leaf = path
        scope = [re.sub(r'^h_(\d+)$', r'h.\1', part) for part in scope]
        end = {'kernel': ['weight'], 'scale': ['weight'], 'bias': ['bias']}.get(leaf, [leaf, 'weight'])
        name = '.'.join(scope + end)
        turned = transposed and leaf == 'kernel'
        pieces[path] = [Piece(prefix + name, shape[::-1] if turned else shape, transpose if turned else same)]
    return pieces


class Layout(NamedTuple):
    """How the families with Llama's names differ in them. The defaults are Llama's and Qwen3's."""
    prefix: str = ''
    mlp: str = 'mlp'
    router: str = 'gate'
    shared: str = 'shared_experts'
    experts: str = 'apart'  # or all in one tensor, with gate and up in 'halves' or in 'turns'
    turns: bool = False  # rope turns pairs (x_2j, x_2j+1)


LAYOUTS = {
    'llama': Layout(), 'qwen3': Layout(), 'qwen3_moe': Layout(), 'gpt_oss': Layout(router='router', experts='turns'),
    'deepseek_v3': Layout(turns=True), 'kimi_k2': Layout(turns=True),
    'llama4_text': Layout('', 'feed_forward', 'router', 'shared_expert', 'halves', turns=True),
    'llama4': Layout('language_model.', 'feed_forward', 'router', 'shared_expert', 'halves', turns=True)}


def apart(x, width, turned):
    """A matrix [heads * width, in] of which rope turns the last `turned` rows of each head in pairs (2j, 2j + 1), with
    these rows in the order that rope() expects: the first ones of all pairs, then the second ones."""
    heads = x.reshape(-1, width, x.shape[-1])
    fixed, pairs = heads[:, :width - turned], heads[:, width - turned:]
    return np.concatenate([fixed, pairs[:, 0::2], pairs[:, 1::2]], axis=1).reshape(x.shape)


def llama_pieces(config, layout):
    """{path: [Piece]} of the families whose tensors have Llama's names. Linear layers are [out, in] on disk."""
    D, V, H, G, K = config.n_embd, config.vocab_size, config.n_head, config.kv_heads, config.head_width
    prefix, pieces = layout.prefix + 'model.', {}

    def linear(path, name, n_in, n_out, to_ours=transpose, bias=config.bias, columns=...):
        """A layer, or one that is the `columns` of ours."""
        whole = columns is ...
        pieces.setdefault((*path, 'kernel'), []).append(
            Piece(f'{name}.weight', (n_out, n_in), to_ours, ... if whole else (slice(None), columns)))
        if bias:
            pieces.setdefault((*path, 'bias'), []).append(Piece(f'{name}.bias', (n_out,), at=columns))

    def vector(path, name, n):
        pieces[path] = [Piece(name, (n,))]

    def mlp(path, name, width):
        linear((*path, 'c_gate'), name + '.gate_proj', D, width)
        linear((*path, 'c_fc'), name + '.up_proj', D, width)
        linear((*path, 'c_proj'), name + '.down_proj', width, D)

    pieces['wte',] = [Piece(prefix + 'embed_tokens.weight', (V, D))]
    if not config.tied_head:
        pieces['lm_head',] = [Piece(layout.prefix + 'lm_head.weight', (V, D))]
    vector(('ln_f', 'scale'), prefix + 'norm.weight', D)
    for i in range(config.n_layer):
        h, name = f'h_{i}', f'{prefix}layers.{i}.'
        vector((h, 'ln_1', 'scale'), name + 'input_layernorm.weight', D)
        vector((h, 'ln_2', 'scale'), name + 'post_attention_layernorm.weight', D)
        attn, name_attn = (h, 'attn'), name + 'self_attn.'
        if config.mla:
            latent_pieces(config, layout, attn, name_attn, linear, vector, pieces)
        else:
            turn = (lambda x: apart(x, K, K).T) if layout.turns else transpose
            for theirs, first, n, to_ours in (('q', 0, H, turn), ('k', H, G, turn), ('v', H + G, G, transpose)):
                columns = slice(first * K, (first + n) * K)
                linear((*attn, 'c_attn'), f'{name_attn}{theirs}_proj', D, n * K, to_ours, columns=columns)
            linear((*attn, 'c_proj'), name_attn + 'o_proj', H * K, D)
        if config.qk_norm == 'learned':
            vector((*attn, 'q_norm', 'scale'), name_attn + 'q_norm.weight', K)
            vector((*attn, 'k_norm', 'scale'), name_attn + 'k_norm.weight', K)
        if config.sinks:
            vector((*attn, 'sinks'), name_attn + 'sinks', H)
        name_mlp = name + layout.mlp
        if config.layer(i)[1]:
            expert_pieces(config, layout, (h, 'mlp'), name_mlp, linear, vector, pieces)
            if config.moe.shared_width:
                mlp((h, 'mlp', 'shared'), f'{name_mlp}.{layout.shared}', config.moe.shared_width)
        else:
            mlp((h, 'mlp'), name_mlp, config.mlp_width)
    return pieces


def latent_pieces(config, layout, path, name, linear, vector, pieces):
    mla, D, H = config.mla, config.n_embd, config.n_head
    width, turned = mla.nope_dim + mla.rope_dim, mla.rope_dim if layout.turns else 0
    queries = lambda x: apart(x, width, turned).T
    if mla.q_rank:
        linear((*path, 'q_a'), name + 'q_a_proj', D, mla.q_rank)
        vector((*path, 'q_norm', 'scale'), name + 'q_a_layernorm.weight', mla.q_rank)
        linear((*path, 'q_b'), name + 'q_b_proj', mla.q_rank, H * width, queries)
    else:
        linear((*path, 'q_b'), name + 'q_proj', D, H * width, queries)
    n = mla.kv_rank + mla.rope_dim
    linear((*path, 'kv_a'), name + 'kv_a_proj_with_mqa', D, n, lambda x: apart(x, n, turned).T)
    vector((*path, 'kv_norm', 'scale'), name + 'kv_a_layernorm.weight', mla.kv_rank)
    shape = H * (mla.nope_dim + mla.v_dim), mla.kv_rank
    pieces[(*path, 'kv_b')] = [Piece(name + 'kv_b_proj.weight', shape, transpose)]
    linear((*path, 'c_proj'), name + 'o_proj', H * mla.v_dim, D)


def expert_pieces(config, layout, path, name, linear, vector, pieces):
    D, E, F = config.n_embd, config.moe.n_expert, config.moe.width
    linear((*path, 'router'), f'{name}.{layout.router}', D, E)
    if config.moe.selection_bias:
        vector((*path, 'router', 'selection_bias'), f'{name}.{layout.router}.e_score_correction_bias', E)
    if layout.experts == 'apart':
        for ours, theirs, shape in (('c_gate', 'gate', (F, D)), ('c_fc', 'up', (F, D)), ('c_proj', 'down', (D, F))):
            pieces[(*path, f'experts_{ours}', 'kernel')] = [
                Piece(f'{name}.experts.{e}.{theirs}_proj.weight', shape, transpose, at=e) for e in range(E)]
        return
    turns, halves = (slice(0, None, 2), slice(1, None, 2)), (slice(0, F), slice(F, None))
    gate, up = turns if layout.experts == 'turns' else halves
    for ours, theirs, shape, columns in (('c_gate', 'gate_up', (D, 2 * F), gate), ('c_fc', 'gate_up', (D, 2 * F), up),
                                         ('c_proj', 'down', (F, D), slice(None))):
        for leaf, suffix, shape in (('kernel', '', shape), ('bias', '_bias', shape[1:]))[:2 if config.bias else 1]:
            cut = functools.partial(lambda columns, x: x[..., columns], columns)
            pieces[(*path, f'experts_{ours}', leaf)] = [  # one expert at a time: it may be unpacked on the way
                Piece(f'{name}.experts.{theirs}_proj{suffix}', (E, *shape), cut, at=e, part=e) for e in range(E)]


def check_tensors(tensors, shapes, source):
    """Raises UserError unless `tensors` has exactly the names of `shapes`, with these shapes, in floating point."""
    def listed(names):
        more = f' and {len(names) - 8} more' if len(names) > 8 else ''
        return ', '.join(sorted(names)[:8]) + more

    missing, unknown = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys()
    if missing or unknown:
        wrong = [f'lacks {listed(missing)}'] * bool(missing) + [f'has unknown {listed(unknown)}'] * bool(unknown)
        raise UserError(f'{source} is not for a model of this config: it {" and it ".join(wrong)}')
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f'{source}: {name} should have shape {shape} for this config but has {tensors[name].shape}')
        if tensors[name].dtype.name not in ('float32', 'bfloat16', 'float16', 'float64'):
            raise UserError(f'{source}: {name} is {tensors[name].dtype}; floating point of 16 bits or more can be '
                            'loaded, MXFP4, and float8 with scales')


IGNORED = (r'(^|\.)h\.\d+\.attn\.(masked_)?bias$',  # causal masks
           r'rotary_emb\.inv_freq$', r'^(vision_model|multi_modal_projector)\.')


def to_params(tensors, config, pieces, source, dtype, place):
    """The tensors {name: array} of a file as parameters of GPT(config), see load_pretrained."""
    layer = lambda name: int((re.search(r'\bmodel\.layers\.(\d+)\.', name) or [0, 0])[1])
    tensors = {name: x for name, x in tensors.items() if not any(re.search(ignored, name) for ignored in IGNORED)
               and (layer(name) < config.n_layer)}  # later ones predict several tokens ahead
    needed = {piece.name: piece.shape for group in pieces.values() for piece in group}
    if ('wte',) in pieces and pieces['wte',][0].name == 'wte.weight':
        tensors = {name.removeprefix('transformer.'): x for name, x in tensors.items()}
    embedding, head = pieces['wte',][0].name, next((name for name in tensors if name.endswith('lm_head.weight')), None)
    tied = tensors.pop(head, None) if config.tied_head else None
    check_tensors(tensors, needed, source)
    if tied is not None and not np.array_equal(tied, tensors[embedding]):
        raise UserError(f'{source}: {head} differs from {embedding}, to which the config says that it is tied')
    params = {}
    for path, shape in param_shapes(config).items():
        array = np.empty(shape, dtype if len(shape) >= 2 else np.float32)
        for piece in pieces[path]:
            array[piece.at] = piece.to_ours(tensors[piece.name][piece.part])
        params[path] = place(path, array)
    return unflatten_dict(params)


def require(keys, values, source, what):
    """Raises UserError unless `values` is a dict with all `keys`."""
    missing = [key for key in keys if key not in values] if isinstance(values, dict) else ['keys']
    if missing:
        raise UserError(f'{source} lacks {", ".join(missing)}, so it is not {what}')


# -----------------------------------------------------------------------------
# Hugging Face folders

def download(name):
    """The folder of a model on the hub: its local cache where it has it, else downloaded."""
    repo, files = (f'openai-community/{name}', ['config.json', 'model.safetensors']) if name in PUBLISHED else (
        name, ['*.json', '*.safetensors', '*.jinja'])
    try:
        from huggingface_hub import snapshot_download
        logging.getLogger('huggingface_hub').setLevel(logging.ERROR)  # or it reports every retry
        try:
            return snapshot_download(repo, allow_patterns=files, local_files_only=True)
        except FileNotFoundError:
            return snapshot_download(repo, allow_patterns=files)
    except Exception as error:  # no network, no such package, full disk, ...
        reason = str(error).split('\n')[0]
        raise UserError(
            f'cannot download {name} ({type(error).__name__}: {reason}). Put config.json and model.safetensors of '
            f'{repo}, Hugging Face hub, into a folder by hand and give its path instead') from None


def load_hugging_face(weight_file, dtype, place):
    """(config, params) of a model from its weights; config.json is beside them."""
    source = os.path.join(os.path.dirname(weight_file), 'config.json')
    hf = read_json(source)
    config, family = read_config(hf, source, dtype)
    if weight_file.endswith('.json'):
        tensors = read_shards(weight_file)
    else:
        tensors = (read_torch_checkpoint if weight_file.endswith('.bin') else read_safetensors)(weight_file)
    quantization = hf.get('quantization_config') or {}
    tensors = unpack(tensors, quantization.get('weight_block_size', [128, 128]), weight_file)
    pieces = gpt2_pieces(config) if family == 'gpt2' else llama_pieces(config, LAYOUTS[family])
    return config, to_params(tensors, config, pieces, weight_file, dtype, place)


def read_json(path):
    try:
        with open(path, encoding='utf-8') as f:
            return json.load(f)
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from None
    except ValueError as error:
        raise UserError(f'{path} is not JSON ({error}); copy or download it again') from None


SAFETENSORS_DTYPES = {
    'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16', 'F8_E4M3': 'float8_e4m3fn',
    'I64': 'int64', 'I32': 'int32', 'I16': 'int16', 'I8': 'int8', 'U8': 'uint8', 'BOOL': 'bool'}


def read_safetensors(path):
    """{name: array}, mapped and not read: the library checks the file, but for numpy it knows no bfloat16 or float8."""
    try:
        with safetensors.safe_open(path, 'numpy'):
            pass
        with open(path, 'rb') as f:
            start = 8 + int.from_bytes(f.read(8), 'little')
            header = json.loads(f.read(start - 8))
        data = np.memmap(path, np.uint8, 'r', start) if os.path.getsize(path) > start else np.zeros(0, np.uint8)
        header.pop('__metadata__', None)
        dtype = lambda x: jnp.dtype(SAFETENSORS_DTYPES[x['dtype']])
        return {name: data[slice(*x['data_offsets'])].view(dtype(x)).reshape(x['shape']) for name, x in header.items()}
    except Exception as error:  # its own, OSError, or KeyError for a dtype that is not listed
        raise UserError(f'cannot read {path} ({error}); if it is damaged, copy or download it again') from None


def read_shards(index_file):
    index = read_json(index_file)
    require(['weight_map'], index, index_file, 'an index of shards')
    require([], index['weight_map'], f"{index_file}'s weight_map", 'an index of shards')
    tensors = {}
    for file in sorted(set(map(str, index['weight_map'].values()))):
        path = os.path.join(os.path.dirname(index_file), file)
        if not os.path.isfile(path):
            raise UserError(f'{index_file} names {file}, which is not beside it; copy or download that file, too')
        tensors |= read_safetensors(path)
    return tensors


class MXFP4(NamedTuple):
    """Experts [E, in, out] as gpt-oss packs them: 32 numbers of 4 bits along `in` share an exponent. x[e] unpacks e."""
    blocks: np.ndarray  # uint8 [E, out, in / 32, 16], of each byte the low half first
    scales: np.ndarray  # uint8 [E, out, in / 32]

    dtype = np.dtype(np.float32)

    @property
    def shape(self):
        E, n_out, n, half = self.blocks.shape
        return E, n * half * 2, n_out

    def __getitem__(self, e):
        values = np.float32([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6])
        blocks = np.stack([self.blocks[e] & 15, self.blocks[e] >> 4], axis=-1)
        numbers = np.ldexp(values[blocks], self.scales[e].astype(np.int32)[..., None, None] - 127)
        return numbers.reshape(len(numbers), -1).T


class ScaledBlocks(NamedTuple):
    """A matrix in float8 as DeepSeek packs it: weight [out, in] times one scale per block."""
    weight: np.ndarray
    scale: np.ndarray  # float32 [ceil(out / rows), ceil(in / columns)]
    block: tuple  # (rows, columns)

    dtype = np.dtype(np.float32)

    @property
    def shape(self):
        return self.weight.shape

    def __getitem__(self, part):
        rows, columns = (np.arange(n) // size for n, size in zip(self.shape, self.block))
        return (self.weight.astype(np.float32) * np.asarray(self.scale)[rows][:, columns])[part]


def unpack(tensors, block, source):
    """Puts objects that unpack themselves when they are indexed in the place of packed tensors and their scales."""
    unpacked = dict(tensors)
    for name in tensors:
        if name.endswith('_blocks') and name.removesuffix('blocks') + 'scales' in tensors:
            blocks, scales = unpacked.pop(name), unpacked.pop(name.removesuffix('blocks') + 'scales')
            if blocks.ndim != 4 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
                raise UserError(f'{source}: {name} {blocks.shape} and its scales {scales.shape} are not MXFP4')
            unpacked[name.removesuffix('_blocks')] = MXFP4(blocks, scales)
        if name.endswith('.weight_scale_inv') and (weight := name.removesuffix('_scale_inv')) in tensors:
            scale, matrix = unpacked.pop(name), tensors[weight]
            if scale.shape != tuple(-(-n // size) for n, size in zip(matrix.shape, block)):
                raise UserError(f'{source}: {name} {scale.shape} does not fit {weight} {matrix.shape} in blocks of '
                                f'{block}')
            unpacked[weight] = ScaledBlocks(matrix, scale, tuple(block))
    return unpacked


# -----------------------------------------------------------------------------
# nanoGPT, and files of torch.save

def load_nanogpt(path, dtype, place):
    """(config, params) of a ckpt.pt that nanoGPT's train.py wrote."""
    checkpoint = read_torch_checkpoint(path)
    require(['model', 'model_args'], checkpoint, path, 'a checkpoint of nanoGPT')
    checkpoint.pop('optimizer', None)  # twice as large as the model
    args = checkpoint['model_args']
    require(GPT2_SIZES, args, f"{path}'s model_args", 'a checkpoint of nanoGPT')
    bias = args.get('bias') is not False  # the first checkpoints have no such entry, and biases
    config = make_config({name: args[name] for name in GPT2_SIZES} | {'bias': bias}, path)
    tensors = checkpoint['model']
    if not (isinstance(tensors, dict) and all(type(k) is str and type(x) is np.ndarray for k, x in tensors.items())):
        raise UserError(f'{path} does not hold a state dict, names with their tensors')
    tensors = {name.removeprefix('_orig_mod.'): x for name, x in tensors.items()}
    return config, to_params(tensors, config, gpt2_pieces(config, transposed=True), path, dtype, place)


def read_torch_checkpoint(path):
    """What torch.save wrote to `path`, with numpy arrays in place of tensors. Runs nothing that the file asks for.

    The arrays are read-only, and tensors that shared memory still do. Raises UserError for a file with more in it than
    containers, numbers, strings and tensors, a damaged file, and the format of torch before 1.6."""
    try:
        with open(path, 'rb') as f:
            start = f.read(4)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return TorchUnpickler(archive, path).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error) or type(error).__name__
        raise UserError(f'cannot read {path} ({reason}); if it is damaged, copy or download it again') from None
    if start == b'PK\3\4':
        raise UserError(f'{path} is cut off; copy or download it again')
    if start[:1] == b'\x80':
        raise UserError(f'{path} was not loaded: it is a pickle without the zip container of torch >= 1.6; where torch '
                        'is installed, convert it: torch.save(torch.load(path, weights_only=True), path)')
    raise UserError(f'{path} is not a file of torch.save')


class Storage(NamedTuple):
    """The memory behind one or more tensors. No pickle can make one but through `persistent_load`."""
    data: bytes
    dtype: np.dtype


class StateDict(dict):
    """In place of OrderedDict, to drop the attribute `_metadata` that torch sets on it."""

    def __setstate__(self, state):
        pass


class TorchUnpickler(pickle.Unpickler):
    """A pickle is a program that may call whatever find_class hands it. This one hands out, for exactly the names that
    tensors need, its own class methods (of which a pickle can set no attributes), a builtin type and strings."""
    STORAGES = {'FloatStorage': 'float32', 'DoubleStorage': 'float64', 'HalfStorage': 'float16',
                'BFloat16Storage': 'bfloat16', 'LongStorage': 'int64', 'IntStorage': 'int32', 'ShortStorage': 'int16',
                'CharStorage': 'int8', 'ByteStorage': 'uint8', 'BoolStorage': 'bool'}

    def __init__(self, archive, path):
        names = archive.namelist()
        folders = [name.removesuffix('data.pkl') for name in names if re.fullmatch(r'[^/]+/data\.pkl', name)]
        if len(folders) != 1:
            raise UserError(f'{path} is a zip file, but not one of torch.save: it has no data.pkl')
        self.archive, self.path, self.folder, self.storages = archive, path, folders[0], {}
        order = self.folder + 'byteorder'  # absent before torch 2.1
        self.swapped = order in names and archive.read(order).decode() != sys.byteorder
        super().__init__(io.BytesIO(archive.read(self.folder + 'data.pkl')))

    def find_class(self, module, name):
        allowed = {('collections', 'OrderedDict'): self.new_dict, ('torch', 'Size'): tuple,
                   ('torch._utils', '_rebuild_tensor_v2'): self.rebuild_tensor,
                   ('torch._utils', '_rebuild_parameter'): self.rebuild_parameter,
                   **{('torch', storage): dtype for storage, dtype in self.STORAGES.items()}}
        if (module, name) not in allowed:
            raise UserError(f'{self.path} was not loaded: it asks to run {f"{module}.{name}"!r}, which tensors do not '
                            'need and which was not run; save the checkpoint again without it')
        return allowed[module, name]

    def persistent_load(self, pid):
        kind, dtype, key, _, count = pid  # the fourth is the device
        if kind != 'storage' or dtype not in self.STORAGES.values():  # a pickle can put any string here
            raise ValueError('malformed storage')
        dtype = jnp.dtype(dtype)
        if key not in self.storages:
            self.storages[key] = self.archive.read(f'{self.folder}data/{key}')
            if self.swapped:
                self.storages[key] = np.frombuffer(self.storages[key], f'u{dtype.itemsize}').byteswap().tobytes()
        data = self.storages[key]
        if len(data) < count * dtype.itemsize:
            raise ValueError(f'storage {key} has {len(data)} bytes instead of {count * dtype.itemsize}')
        return Storage(data, dtype)

    @classmethod
    def new_dict(cls, *args):
        return StateDict(*args)

    @classmethod
    def rebuild_parameter(cls, tensor, requires_grad, backward_hooks):
        return tensor

    @classmethod
    def rebuild_tensor(cls, storage, offset, size, stride, *unused):
        if type(storage) is not Storage or len(size) != len(stride) or not all(
                type(n) is int and n >= 0 for n in (offset, *size, *stride)):
            raise ValueError('malformed tensor')
        if 0 in size:
            return np.empty(size, storage.dtype)
        itemsize = storage.dtype.itemsize
        end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride))  # numpy checks it too, but may overflow
        if end * itemsize > len(storage.data):
            raise ValueError(f'a tensor of shape {tuple(size)} reaches beyond its storage')
        return np.ndarray(size, storage.dtype, storage.data, offset * itemsize, [step * itemsize for step in stride])
