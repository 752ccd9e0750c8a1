"""Reads and writes weights without PyTorch: Hugging Face folders and nanoGPT's ckpt.pt.

References:
1) transformers: https://github.com/huggingface/transformers/tree/main/src/transformers/models
2) nanoGPT's model: https://github.com/karpathy/nanoGPT/blob/master/model.py

A family of models has two parts: a function that turns its config.json into a GPTConfig
(jax_hub/families.py), and a row in NAMINGS, which says how the family's tensors on disk differ from
Llama's.
From these two parts, family_tensor_maps makes a table {parameter path: [TensorMap]}.

Loading and saving use the same table. Saving writes the original config.json back. SAVED_AS lists
the families that are saved under another name. To be saved as GGUF, a family needs an entry in
ARCHITECTURES of jax_hub/gguf_files.py. If GGUF orders the rows of some matrices in another way, the
family also needs an entry in NAMINGS, with 'gguf ' before its name."""
import contextlib
import dataclasses
import functools
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_devices.processes import check_agreement
from jax_flags import DTYPES, UserError, check_choice, is_url, read_json, write_json
from jax_hub.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Halves, make_adapter
from jax_hub.families import (
    COMPOSITE, GPT2_FIXED, GPT2_SIZES, HF_ACTIVATIONS, read_config)
from jax_hub.folders import is_on_hub, kept_config_json, local_path, name_on_hub, new_folder
from jax_hub.gguf_files import GGUF_DTYPES, write_gguf
from jax_hub.tokenizer_files import copy_tokenizer
from jax_hub.tokenizers import load_tokenizer
from jax_hub.weights import (
    check_tensors, common_dtype, open_model, write_safetensors, write_shards)
from jax_transformer import GPT, GPTConfig

# keys of config.json that name tokens
SPECIAL_TOKENS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def keep_in_place(path, array):
    """Returns a parameter unchanged: the default for `place` of load_pretrained."""
    return array


def load_pretrained(path_or_name: str | Path, dtype: str = 'float32',
                    place: Callable = keep_in_place) -> tuple[GPTConfig, dict]:
    """Returns (config; params) of a Hugging Face folder or hub name, or nanoGPT's ckpt.pt (or its
    folder).

    config.dropout is 0 and config.dtype is `dtype`. params is the tree of GPT(config).init as numpy
    arrays: matrices in `dtype`, vectors in float32. All kernels have the shape [in, out]. If the
    file stores a kernel with two axes as [out, in], the parameter is a transposed view of the array
    that was read, which avoids a slow copy. Then parameter.T is C-contiguous.

    dtype: one of DTYPES, or 'stored'. With 'stored', config.dtype is 'float32', and each matrix
    keeps the file's dtype if that is one of DTYPES, else becomes float32.
    place: a function of (path in the tree, array). It is called for each parameter before the next
    parameter is read, for example to move the parameter to its devices. params holds the results of
    `place`.
    Raises UserError for missing or damaged files, models that GPT does not compute, and an unknown
    dtype."""
    check_choice('dtype', dtype, (*DTYPES, 'stored'))
    config, sources = open_parameters(path_or_name)
    params = {}
    # The largest first, so that its temporary copies do not add to the rest.
    for path in largest_first(config):
        array = sources[path].read(dtype)
        params[path] = place(path, array)
        del array
    compute_dtype = 'float32' if dtype == 'stored' else dtype
    return dataclasses.replace(config, dtype=compute_dtype), unflatten_dict(params)


def load_together(path_or_name, dtype, place):
    """Returns load_pretrained(path_or_name, dtype, place). All processes call this function. Raises
    UserError if they read different weights: each process reads its own files. Compares a corner
    of each parameter."""
    crc = 0

    def compared(path, array):
        nonlocal crc
        corner = array[(slice(32),) * array.ndim]
        crc = zlib.crc32(corner.tobytes(), crc)
        return place(path, array)

    loaded = load_pretrained(path_or_name, dtype, compared)
    check_agreement('weights', {'their checksum': crc})
    return loaded


def open_pretrained(path_or_name):
    """Returns the same (config, params) as load_pretrained(path_or_name, 'float32'), but reads no
    weights yet. Each parameter is a ParameterOnDisk, which np.asarray reads from its file in
    float32. An export uses this function, because it needs only a few parameters at a time."""
    config, sources = open_parameters(path_or_name)
    return dataclasses.replace(config, dtype='float32'), unflatten_dict(sources)


def save_pretrained(params: dict, config: GPTConfig, folder: str | Path, *,
                    config_json: str | Path | None = None, dtype: str = 'float32',
                    tokenizer: str | dict | None = None, shard_bytes: int = 5 * 10**9) -> None:
    """Writes params as a Hugging Face folder: config.json, the weights as safetensors, and the
    tokenizer's files.

    transformers loads the folder as the model that equals GPT(config). A GPT-2 without biases is
    saved with biases of zero, which gives the same logits.
    folder: the path of a folder that does not exist or is empty. The folder appears when it is
    complete. If its name ends in .gguf, a GGUF file for llama.cpp is written instead.
    config_json: the path of the original model's config.json. The new config.json has the keys
    of this file, except for a few that are changed or removed (see read_config_json_of). If
    config_json is None, the new config.json is derived from `config`; this works for most models
    that flags of train_jax.py make.
    dtype: the dtype of the file, one of DTYPES, or of GGUF_DTYPES for a GGUF file.
    tokenizer: the path of a folder with tokenizer.json and the tokenizer's other files, which are
    copied; or a description of a tokenizer (a dict, see load_tokenizer). A GGUF file needs a
    description.
    shard_bytes: weights of more bytes are split into several files with an index.
    Raises UserError if the folder cannot be written, if params do not belong to GPT(config), if the
    file config_json does not exist or belongs to another model, or if no config.json can be derived
    from `config`."""
    is_gguf = str(folder).endswith('.gguf')
    check_choice('dtype', dtype, GGUF_DTYPES if is_gguf else DTYPES)
    if config_json:
        hf_config = read_config_json_of(config, config_json)
    else:
        hf_config = derive_config_json(config)
    family = hf_config['model_type']

    # the parameters, of the expected shapes
    arrays = flatten_dict(params)
    shapes = {'/'.join(path): shape for path, shape in param_shapes(config).items()}
    check_tensors({'/'.join(path): x for path, x in arrays.items()}, shapes, 'params')
    if family == 'gpt2' and not config.bias:
        config = dataclasses.replace(config, bias=True)
        zeros = {path: np.zeros(shape) for path, shape in param_shapes(config).items()}
        arrays = {**zeros, **arrays}

    # {name of a tensor on disk: the parts that fill it, [(parameter path, TensorMap)]}
    naming = f'gguf {family}' if is_gguf else family
    tensor_maps = family_tensor_maps(config, naming, prefix='transformer.')
    sources = {}
    for path, group in tensor_maps.items():
        for tensor_map in group:
            sources.setdefault(tensor_map.name, []).append((path, tensor_map))
    shapes = {name: parts[0][1].shape for name, parts in sources.items()}

    def make_tensor(name):
        tensor = np.zeros(shapes[name], 'float32' if is_gguf else dtype)
        with finite(name, tensor, dtype):
            for path, tensor_map in sources[name]:
                tensor_map.fill(tensor, np.asarray(arrays[path]))
        return tensor

    if is_gguf:
        return write_gguf(folder, config, family, shapes, make_tensor, dtype,
                          load_tokenizer(tokenizer))
    hf_config['dtype'] = dtype
    description = describe_folder(tokenizer)
    if description:
        # the ids of special tokens come from the tokenizer's folder
        for file in ('config.json', 'generation_config.json'):
            ids = read_json(os.path.join(description['path'], file), optional=True)
            for key in SPECIAL_TOKENS:
                if ids.get(key) is not None:
                    hf_config[key] = ids[key]
    with new_folder(folder) as unfinished:
        if description:
            copy_tokenizer(description, unfinished)
            if not config_json:
                suppress_padding(unfinished, load_tokenizer(description), config.vocab_size)
        write_json(os.path.join(unfinished, 'config.json'), hf_config)
        write_shards(unfinished, shapes, make_tensor, dtype, shard_bytes)


def suppress_padding(folder, tokenizer, vocab_size):
    """Makes transformers sample no id without a token, as sample_jax.py does not: the ids from the
    number of tokens to vocab_size, which pads it. Adds them to "suppress_tokens" of the folder's
    generation_config.json."""
    if tokenizer.vocab_size < vocab_size:
        path = os.path.join(folder, 'generation_config.json')
        padding = list(range(tokenizer.vocab_size, vocab_size))
        write_json(path, {**read_json(path, optional=True), 'suppress_tokens': padding})


@contextlib.contextmanager
def finite(name, tensor, dtype):
    """Context manager. The `with` block fills `tensor`, a numpy array. After the block, raises
    UserError if `tensor` has an infinity or NaN. name, dtype: the name and dtype of the tensor, for
    the error message.

    float16 ends at 65,504: larger weights, which a merged LoRA may have, would be infinite in the
    file."""
    with np.errstate(over='ignore'):  # numbers that do not fit are refused below
        yield
    if not np.isfinite(tensor).all():
        raise UserError(f'{name} has numbers that are not finite in {dtype}; choose '
                        '--dtype=bfloat16 or float32, or check the model')


def describe_folder(tokenizer):
    """Returns the description of the tokenizer in a folder, a dict. tokenizer: the path of the
    folder. If `tokenizer` is a description already, or None, returns it unchanged."""
    if tokenizer is None or isinstance(tokenizer, dict):
        return tokenizer
    return {'kind': 'folder', 'path': str(tokenizer)}


def public_name(model):
    """Returns a model's name for a file that other people will read: the full name on the hub, or
    the last part of a path, because the earlier parts of a path may hold the name of a user."""
    if is_on_hub(model):
        return name_on_hub(model)
    return os.path.basename(os.path.abspath(model))


def save_adapter(updates, config, folder, *, base, rank, alpha, dtype='float32', tokenizer=None):
    """Writes LoRA's updates as a folder that peft reads: adapter_config.json and
    adapter_model.safetensors. If peft loads `base` and this adapter, it computes the same logits as
    a model in which the updates are merged into the weights of `base`.

    updates: the tree {..., 'a': [in, rank], 'b': [rank, out]} of create_updates, in the memory of
    the host. config: a GPTConfig. base: the Hugging Face folder or hub name of the model that the
    updates are for. rank, alpha: an update is alpha / rank * a b. folder, dtype, tokenizer: as for
    save_pretrained. Raises UserError if the base is not a model of Hugging Face, or if the folder
    cannot be written."""
    check_choice('dtype', dtype, DTYPES)
    hf_config = config_of_base(base)
    family = hf_config['model_type']
    modules, others = adapter_modules(updates, config, family)

    # peft looks for the base by its full name on the hub; short names are this project's.
    settings, tensors = make_adapter(
        modules, rank=rank, alpha=alpha, base=public_name(base), model_type=family, others=others)
    shapes = {name: x.shape for name, x in tensors.items()}

    def make_tensor(name):
        tensor = np.zeros(shapes[name], dtype)
        with finite(name, tensor, dtype):
            tensor[...] = tensors[name]
        return tensor

    with new_folder(folder) as unfinished:
        if tokenizer:
            copy_tokenizer(describe_folder(tokenizer), unfinished)
        write_json(os.path.join(unfinished, ADAPTER_CONFIG), settings)
        write_safetensors(os.path.join(unfinished, ADAPTER_FILE), shapes, make_tensor, dtype)


def config_of_base(base):
    """Returns the content of config.json of `base`, the model that an adapter is for. Raises
    UserError if `base` has no config.json with a model_type, because peft cannot load such a
    model."""
    config_json = os.path.join(base if is_url(base) else local_path(base), 'config.json')
    settings = read_json(config_json, optional=True)
    if 'model_type' not in settings:  # a ckpt.pt, or a run's own config.json with flags
        raise UserError(f'peft cannot load {base}, the model that LoRA has updated: export that as '
                        'a folder and name it with --base=FOLDER, or export the run merged, with '
                        '--folder instead of --adapter')
    return settings


def adapter_modules(updates, config, family):
    """Returns LoRA's updates in peft's form: ({name of a module: Halves}; [name of each module
    without an update]). The names are those of transformers. Halves are the matrices a [rank, in]
    and b [out, rank] of a module.

    family: a model_type of Hugging Face.
    updates: LoRA's tree, with {'a': [in, rank], 'b': [rank, out]} for each matrix of GPT that has
    an update. Usually a matrix of GPT is one module. There are two other cases. If a matrix is
    several modules (q, k and v), each module gets the same a, and its own part of b. If several
    matrices are one module (gate and up of Phi 3), their updates are concatenated along the rank,
    and the ranks add up."""
    updates = flatten_dict(updates)
    found = {}  # {module: [Halves]}
    others = []
    for path, tensor_maps in family_tensor_maps(config, family, prefix='transformer.').items():
        for tensor_map in tensor_maps:
            module = module_in_transformers(tensor_map.name.removesuffix('.weight'), family)

            # LoRA leaves embeddings, norms, experts and routers alone.
            if (*path, 'a') not in updates:
                others.append(module)
                continue
            a = np.asarray(updates[*path, 'a'])
            b = np.asarray(updates[*path, 'b'])
            if tensor_map.transpose:
                # b's columns become the rows of a tensor in the same way as the parameter's columns
                b_on_disk = np.zeros((tensor_map.shape[0], b.shape[0]), b.dtype)
                tensor_map.fill(b_on_disk, b)
            else:
                b_on_disk = b.T
            found.setdefault(module, []).append(Halves(a.T, b_on_disk))

    # Several updates of one tensor: b @ a of the halves side by side is their sum.
    modules = {}
    for module, parts in found.items():
        a = np.concatenate([part.a for part in parts])
        b = np.concatenate([part.b for part in parts], axis=1)
        modules[module] = Halves(a, b)
    return modules, others


def module_in_transformers(module, family):
    """Translates the name of a module on disk into the module's name in the model that
    transformers' AutoModelForCausalLM loads. The two names differ only if the language model is
    part of a model that also reads images. module: the name on disk. family: a model_type of
    Hugging Face."""
    bare = module.removeprefix('language_model.')
    if bare != module and family == 'gemma3':
        return f"model.language_model.{bare.removeprefix('model.')}"
    return bare


# -----------------------------------------------------------------------------
# GPTConfig -> config.json

# model_type and architecture to save, if transformers has the model under another name or as a part
# of a larger one
SAVED_AS = {'gemma3': ('gemma3_text', 'Gemma3ForCausalLM'),
            'llama4': ('llama4_text', 'Llama4ForCausalLM'),
            'kimi_k2': ('deepseek_v3', 'DeepseekV3ForCausalLM')}

# keys of a config.json that would be wrong in an export: the packed format, code beside the file,
# the older dtype
NOT_SAVED = ('quantization_config', 'auto_map', 'torch_dtype')


def read_config_json_of(config, path):
    """Returns the config.json to save beside the weights of GPT(config): the content of the file at
    `path`, with a few keys changed or removed. For example, if the file describes a model that also
    reads images, the keys of the language model are kept and the keys of the vision model are
    removed. GPT-2's number of positions becomes config.block_size. Raises UserError if the file
    does not describe the model GPT(config)."""
    hf = read_json(path)
    read_config(hf, path)
    family = hf['model_type']
    if family in COMPOSITE and 'text_config' in hf:
        # only the language model is saved
        ids = {key: hf[key] for key in SPECIAL_TOKENS if key in hf}
        hf = {'model_type': family, **ids, **hf['text_config']}
        hf['tie_word_embeddings'] = config.tied_head  # Gemma 3 has the key outside of text_config
    if family in SAVED_AS:
        hf['model_type'], architecture = SAVED_AS[family]
        hf['architectures'] = [architecture]
    hf = {key: value for key, value in hf.items() if key not in NOT_SAVED}
    # GPT-2's number of positions; a run may have kept only the first ones
    for key in ('n_positions', 'n_ctx'):
        if key in hf:
            hf[key] = config.block_size
    # RoPE has learned to read longer sequences, with the scaling of the shorter ones
    if config.block_size > hf.get('max_position_embeddings', config.block_size):
        hf['max_position_embeddings'] = config.block_size
        if config.rope_scaling and config.rope_scaling.kind == 'yarn':
            rope = hf.get('rope_scaling') or hf['rope_parameters']
            rope = rope.get('full_attention', rope)
            rope.setdefault('original_max_position_embeddings', config.rope_scaling.original_length)
            rope['factor'] = config.rope_scaling.factor
    wrong = differences(config, hf, path)
    if wrong:
        raise UserError(f'{path} is not that of the model to be saved, which has '
                        f'{", ".join(wrong)}')
    return hf


GPT2_FIELDS = (*GPT2_SIZES, 'n_inner', 'dropout', 'bias', 'activation', 'norm_eps', 'dtype',
               'attention', 'scan_layers', 'remat', 'tied_head')


def derive_config_json(config):
    """Returns the content of a config.json with which transformers computes the same as
    GPT(config). transformers can compute most models that the flags of train_jax.py describe.
    Raises UserError for the others."""
    if config == GPTConfig(**{name: getattr(config, name) for name in GPT2_FIELDS}):
        return derive_gpt2_config_json(config)

    # The family of transformers that has the model's parts.
    layer_types, is_moe = zip(*[config.layer(i) for i in range(config.n_layer)])
    family, name = 'llama', 'Llama'
    if config.moe:
        family, name = 'qwen3_moe', 'Qwen3Moe'
    elif config.qk_norm:
        family, name = 'qwen3', 'Qwen3'
    elif set(layer_types) == {'window'}:
        family, name = 'mistral', 'Mistral'
    hf = {
        'architectures': [f'{name}ForCausalLM'],
        'model_type': family,
        'vocab_size': config.vocab_size,
        'tie_word_embeddings': config.tied_head,
        'hidden_size': config.n_embd,
        'num_hidden_layers': config.n_layer,
        'num_attention_heads': config.n_head,
        'num_key_value_heads': config.kv_heads,
        'head_dim': config.head_width,
        'intermediate_size': config.mlp_width,
        'max_position_embeddings': config.block_size,
        'rms_norm_eps': config.norm_eps,
        'hidden_act': 'silu',
        'rope_parameters': {'rope_type': 'default', 'rope_theta': config.rope_theta},
        'attention_bias': False,
        'attention_dropout': config.dropout,
        'bos_token_id': None,
        'eos_token_id': None,
        'pad_token_id': None,
    }

    # Keys of single families: windows, and which layers have windows or experts.
    if family in ('mistral', 'qwen3'):
        hf['sliding_window'] = config.window or None
    if family == 'qwen3':
        names = {'window': 'sliding_attention'}
        hf['layer_types'] = [names.get(layer_type, 'full_attention') for layer_type in layer_types]
        hf['use_sliding_window'] = 'window' in layer_types
        hf['max_window_layers'] = config.n_layer
    if family == 'qwen3_moe':
        hf['num_experts'] = config.moe.n_expert
        hf['num_experts_per_tok'] = config.moe.n_used
        hf['moe_intermediate_size'] = config.moe.width
        hf['norm_topk_prob'] = config.moe.normalize
        hf['decoder_sparse_step'] = 1
        hf['mlp_only_layers'] = [i for i in range(config.n_layer) if not is_moe[i]]

    # Flags can also make models of no such family: then the file would mean another model.
    wrong = differences(config, hf, 'the derived config.json')
    if wrong:
        raise UserError(f'no config.json can be derived for a model with {", ".join(wrong)}; if it '
                        'was trained from a published one, copy the config.json of that to '
                        f'{kept_config_json("out_dir")}, where the export reads it; a model from '
                        'scratch needs the flags of GPT-2 or of config/train_llama_char.py')
    return hf


def derive_gpt2_config_json(config):
    """Returns the config.json of a GPT-2."""
    # GPT-2's token; smaller vocabularies have no such id
    end_of_text = 50256 if config.vocab_size > 50256 else None
    activations = [theirs for theirs, ours in HF_ACTIVATIONS.items() if ours == config.activation]
    return {
        'architectures': ['GPT2LMHeadModel'],
        'model_type': 'gpt2',
        'dtype': 'float32',
        'vocab_size': config.vocab_size,
        'tie_word_embeddings': config.tied_head,
        **{key: getattr(config, field) for field, key in GPT2_SIZES.items()},
        'n_inner': config.n_inner or None,  # null is 4 n_embd
        'layer_norm_epsilon': config.norm_eps,
        'activation_function': activations[0],
        'attn_pdrop': config.dropout,
        'embd_pdrop': config.dropout,
        'resid_pdrop': config.dropout,
        'bos_token_id': end_of_text,
        'eos_token_id': end_of_text,
        **GPT2_FIXED,
    }


def differences(config, hf, source):
    """Compares the models of a GPTConfig and of `hf`, a dict read from a config.json. Returns a
    list of 'name=value' for the fields that differ; the values are those of `config`. source: the
    path of the config.json, for messages."""
    theirs = meaning(read_config(hf, source)[0])
    different = []
    for name, value in meaning(config).items():
        if value != theirs[name]:
            different.append(f'{name}={getattr(config, name)!r}')
    return different


def meaning(config):
    """Returns {field: value} of a GPTConfig, for comparing models: equal dicts mean the same model.
    If the default of a field stands for a value that depends on other fields, the dict has that
    value. For example, n_kv_head=0 becomes the number of heads. Fields without effect on the
    logits, such as dropout, are cleared."""
    layer_types, is_moe = zip(*[config.layer(i) for i in range(config.n_layer)])
    values = config.architecture()
    values['head_dim'] = config.head_width
    values['n_kv_head'] = config.kv_heads
    values['n_inner'] = config.mlp_width
    values['layer_types'] = layer_types
    values['window'] = config.window if 'window' in layer_types else 0
    values['dropout'] = 0.0
    values['dtype'] = ''
    if config.rope_scaling and config.rope_scaling.kind == 'linear':
        values['rope_scaling']['original_length'] = 0
    if config.moe:
        values['moe']['layers'] = is_moe
        values['moe']['balance'] = 0.0
    return values


# -----------------------------------------------------------------------------
# parameters <-> tensors on disk

class TensorMap(NamedTuple):
    """Says where the numbers of a tensor on disk belong in a parameter. The rule is
    parameter[dst] = tensor[src][rows] + offset, transposed if `transpose`."""
    name: str  # of the tensor on disk
    shape: tuple  # of the tensor on disk
    transpose: bool = False  # [out, in] on disk, [in, out] in the parameter
    rows: Any = ...  # the rows on disk in our order; ... is the same order
    dst: Any = ...  # index of the part of the parameter that the tensor fills
    src: Any = ...  # index of the part of the tensor that is used
    offset: float = 0.0  # added in float32

    def to_parameter(self, tensor):
        """Returns the values that belong in parameter[self.dst]. tensor: a tensor of a file of
        weights, which contains these values."""
        x = tensor[self.src][self.rows]
        if self.offset:
            x = x.astype(np.float32) + self.offset
        return x.T if self.transpose else x

    def fill(self, tensor, parameter):
        """Does the inverse of to_parameter: writes the part parameter[dst] into `tensor`, in place.
        tensor: a numpy array in memory, with the axes and order of the tensor on disk. parameter:
        an array; it is only read."""
        x = parameter[self.dst]
        if self.offset:
            x = x - self.offset
        tensor[self.src][self.rows] = x.T if self.transpose else x


@functools.lru_cache
def param_shapes(config):
    """Returns {path: shape} of every parameter of GPT(config). Traces only one layer for each
    distinct result of config.layer."""
    # A model with one layer of each kind has parameters of all shapes.
    kind_of_layer = [config.layer(i) for i in range(config.n_layer)]
    kinds = list(dict.fromkeys(kind_of_layer))
    layer_types, is_moe = zip(*kinds)
    moe = config.moe and dataclasses.replace(config.moe, layers=is_moe)
    model = GPT(dataclasses.replace(config, n_layer=len(kinds), layer_types=layer_types, moe=moe,
                                    scan_layers=False))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))['params']
    shapes = {}
    of_kind = {kind: {} for kind in kinds}
    for (first, *rest), x in flatten_dict(params).items():
        if first.startswith('h_'):
            of_kind[kinds[int(first[2:])]][tuple(rest)] = x.shape
        else:
            shapes[first, *rest] = x.shape

    # Each layer of the full model has the shapes of its kind.
    for i, kind in enumerate(kind_of_layer):
        for rest, shape in of_kind[kind].items():
            shapes[f'h_{i}', *rest] = shape
    return shapes


def gpt2_tensor_maps(config, *, transpose, prefix):
    """Returns {path: [TensorMap]} of GPT-2. For example, ('h_0', 'attn', 'c_attn', 'kernel') is
    h.0.attn.c_attn.weight on disk.

    transpose: whether kernels are [out, in] on disk, as in nanoGPT's nn.Linear. Hugging Face's
    Conv1D has [in, out]. prefix: the beginning of all names except lm_head's."""
    tensor_maps = {}
    for path, shape in param_shapes(config).items():
        *modules, leaf = path
        end = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'}.get(leaf, f'{leaf}.weight')
        name = re.sub('^h_', 'h.', '.'.join([*modules, end]))
        if leaf != 'lm_head':
            name = prefix + name
        is_transposed = transpose and leaf == 'kernel'
        tensor_maps[path] = [TensorMap(name, shape[::-1] if is_transposed else shape,
                                       is_transposed)]
    return tensor_maps


class Naming(NamedTuple):
    """The differences between families that use Llama's tensor names. The defaults are those of
    Llama and Qwen3."""
    prefix: str = ''  # every name begins with it
    mlp: str = 'mlp'  # name of the MLP or mixture of experts in a layer
    router: str = 'gate'  # name of the router in a mixture of experts
    # name of the MLP that every token uses in addition to its experts
    shared: str = 'shared_experts'
    # 'separate': a tensor for each expert; 'stacked': one for all experts; else one for gate and up
    # of all experts, whose columns are 'interleaved' (gate, up, gate, up, ...) or 'concatenated'
    # (all of gate, all of up)
    experts: str = 'separate'
    fused: bool = False  # one tensor for q, k and v, and one for gate and up
    # RoPE rotates channels (2j, 2j + 1); apply_rope() rotates (j, j + width / 2)
    interleaved_rope: bool = False
    norm_offset: float = 0.0  # the gain of a norm is the tensor on disk + norm_offset


LLAMA4 = Naming(mlp='feed_forward', router='router', shared='shared_expert', experts='concatenated',
                interleaved_rope=True)

NAMINGS = {  # by model_type; the others have Naming()
    'gemma2': Naming(norm_offset=1.0), 'gemma3_text': Naming(norm_offset=1.0),
    'gemma3': Naming(prefix='language_model.', norm_offset=1.0),
    'gguf llama': Naming(interleaved_rope=True), 'gguf mistral': Naming(interleaved_rope=True),
    'gguf qwen3_moe': Naming(experts='stacked'),
    'phi3': Naming(fused=True), 'gpt_oss': Naming(router='router', experts='interleaved'),
    'deepseek_v3': Naming(interleaved_rope=True), 'kimi_k2': Naming(interleaved_rope=True),
    'llama4_text': LLAMA4, 'llama4': LLAMA4._replace(prefix='language_model.')}

MODEL_NAMES = {('wte',): 'model.embed_tokens.weight', ('ln_f', 'scale'): 'model.norm.weight',
               ('lm_head',): 'lm_head.weight'}  # names on disk of the parameters outside of blocks

# the names on disk of the norms of a block, by GPTConfig.block_norms
BLOCK_NORM_NAMES = {
    'pre': {'ln_1': 'input_layernorm', 'ln_2': 'post_attention_layernorm'},
    'post': {'ln_1_post': 'post_attention_layernorm', 'ln_2_post': 'post_feedforward_layernorm'},
    'both': {'ln_1': 'input_layernorm', 'ln_1_post': 'post_attention_layernorm',
             'ln_2': 'pre_feedforward_layernorm',
             'ln_2_post': 'post_feedforward_layernorm'}}


def deinterleave_rope(n_rows, head_width, rope_width):
    """Returns an int array `indices` [n_rows], for TensorMap.rows. It reorders the rows of a matrix
    [n_rows, in] from the order on disk to the order that apply_rope() needs. Row i in the new order
    is the row with the number indices[i] on disk.

    n_rows = heads * head_width. Only the last rope_width rows of each head are reordered; they stay
    at the end of the head. On disk they are pairs, such as x0 y0 x1 y1. apply_rope() needs the
    first row of each pair, then the second row of each pair: x0 x1 y0 y1."""
    heads = np.arange(n_rows).reshape(-1, head_width)
    nope = heads[:, :head_width - rope_width]
    rope = heads[:, head_width - rope_width:]
    return np.concatenate([nope, rope[:, 0::2], rope[:, 1::2]], axis=1).reshape(-1)


def llama_names(config, naming):
    """Returns {module: its name on disk} of the modules of a layer, for the families that use
    Llama's tensor names: for example {'attn/c_proj': 'self_attn.o_proj'}. Both names are relative
    to the layer. naming: the family's Naming."""
    # The names that depend on the family, or on the compression of queries.
    attention = 'self_attn'
    mlp = naming.mlp
    shared = f'{mlp}.{naming.shared}'
    has_q_rank = config.mla and config.mla.q_rank
    q_norm = 'q_a_layernorm' if config.mla else 'q_norm'
    q_b = 'q_b_proj' if has_q_rank else 'q_proj'
    return {
        **BLOCK_NORM_NAMES[config.block_norms],
        'attn': attention,
        'attn/c_proj': f'{attention}.o_proj',
        'attn/k_norm': f'{attention}.k_norm',
        'attn/q_norm': f'{attention}.{q_norm}',
        'attn/q_a': f'{attention}.q_a_proj',
        'attn/q_b': f'{attention}.{q_b}',
        'attn/kv_a': f'{attention}.kv_a_proj_with_mqa',
        'attn/kv_norm': f'{attention}.kv_a_layernorm',
        'mlp/c_gate': f'{mlp}.gate_proj',
        'mlp/c_fc': f'{mlp}.up_proj',
        'mlp/c_proj': f'{mlp}.down_proj',
        'mlp/shared/c_gate': f'{shared}.gate_proj',
        'mlp/shared/c_fc': f'{shared}.up_proj',
        'mlp/shared/c_proj': f'{shared}.down_proj',
        'mlp/router': f'{mlp}.{naming.router}',
    }


# the last part of a name on disk, by that of the parameter, where the two differ
LEAF_NAMES = {'kernel': 'weight', 'scale': 'weight', 'selection_bias': 'e_score_correction_bias',
              'kv_b': 'kv_b_proj.weight'}


def llama_tensor_maps(config, naming):
    """Returns {path of a parameter: [TensorMap]} for the families that use Llama's tensor names.
    The kernels of linear layers are [out, in] on disk. naming: the family's Naming."""
    names = llama_names(config, naming)
    rows = latent_rows(config, naming)
    tensor_maps = {}
    for path, shape in param_shapes(config).items():
        *modules, leaf = path
        block = f'{naming.prefix}model.layers.{path[0][2:]}'
        module = '/'.join(modules[1:])

        # The tensors that make up this parameter, one or several.
        if path in MODEL_NAMES:
            parts = [TensorMap(naming.prefix + MODEL_NAMES[path], shape)]
        elif module == 'attn/c_attn':
            parts = qkv_tensor_maps(config, naming, f'{block}.self_attn', leaf)
        elif module.startswith('mlp/experts_'):
            experts = f'{block}.{naming.mlp}.experts'
            parts = expert_tensor_maps(naming, experts, modules[-1], leaf, shape)
        elif naming.fused and module in ('mlp/c_gate', 'mlp/c_fc'):
            parts = [fused_mlp_tensor_map(block, module, shape)]
        elif leaf in ('kernel', 'kv_b'):
            name = f'{block}.{names[module]}.{LEAF_NAMES[leaf]}'
            parts = [TensorMap(name, shape[::-1], transpose=True, rows=rows.get(module, ...))]
        else:
            name = f'{block}.{names[module]}.{LEAF_NAMES.get(leaf, leaf)}'
            parts = [TensorMap(name, shape)]

        # Gemma saves a gain as its difference from 1.
        if leaf == 'scale':
            parts = [part._replace(offset=naming.norm_offset) for part in parts]
        tensor_maps[path] = parts
    return tensor_maps


def latent_rows(config, naming):
    """Returns {module: indices} for TensorMap.rows. The modules are attn/q_b and attn/kv_a. The
    indices reorder the rows of the module's matrix as apply_rope needs them: row i of the result is
    the row with the number indices[i] on disk.

    Only models with multi-head latent attention have these modules. For other models, and for
    families that do not interleave RoPE's channels on disk, returns {}. naming: the family's
    Naming."""
    mla = config.mla
    if not mla or not naming.interleaved_rope:
        return {}
    q_width = mla.nope_dim + mla.rope_dim
    kv_width = mla.kv_rank + mla.rope_dim
    return {'attn/q_b': deinterleave_rope(config.n_head * q_width, q_width, mla.rope_dim),
            'attn/kv_a': deinterleave_rope(kv_width, kv_width, mla.rope_dim)}


def fused_mlp_tensor_map(block, module, shape):
    """Returns the TensorMap of the module 'mlp/c_gate' or 'mlp/c_fc'. The two modules together are
    one tensor on disk. block: the layer's name on disk. shape: the parameter's shape, [D, F]."""
    D, F = shape
    rows_of_module = slice(0, F) if module == 'mlp/c_gate' else slice(F, None)
    return TensorMap(f'{block}.mlp.gate_up_proj.weight', (2 * F, D), transpose=True,
                     src=rows_of_module)


def family_tensor_maps(config, family, prefix=''):
    """Returns the table of a family, {path of a parameter: [TensorMap]}. family: a model_type of
    Hugging Face, 'nanogpt', or 'gguf ' and the model_type (for a GGUF file). prefix: for GPT-2, the
    beginning of the names of all tensors, such as 'transformer.'."""
    if family in ('gpt2', 'nanogpt', 'gguf gpt2'):
        return gpt2_tensor_maps(config, transpose=family != 'gpt2', prefix=prefix)
    return llama_tensor_maps(config, NAMINGS.get(family, Naming()))


def qkv_tensor_maps(config, naming, name, leaf):
    """Returns the TensorMaps of c_attn, in which q, k and v are side by side. Query heads may share
    key and value heads. naming: the family's Naming. name: the attention's name on disk. leaf:
    'kernel' or 'bias'."""
    D, H, G, K = config.n_embd, config.n_head, config.kv_heads, config.head_width
    if naming.fused:
        return [TensorMap(f'{name}.qkv_proj.weight', ((H + 2 * G) * K, D), transpose=True)]

    # A tensor for each: the columns of c_attn that it fills, and the order of its rows.
    parts = []
    for theirs, first, n in (('q', 0, H), ('k', H, G), ('v', H + G, G)):
        columns = slice(first * K, (first + n) * K)
        if leaf == 'bias':
            parts.append(TensorMap(f'{name}.{theirs}_proj.bias', (n * K,), dst=columns))
            continue
        rows = ...
        if naming.interleaved_rope and theirs in ('q', 'k'):
            rows = deinterleave_rope(n * K, K, K)
        parts.append(TensorMap(f'{name}.{theirs}_proj.weight', (n * K, D), transpose=True,
                               rows=rows, dst=(slice(None), columns)))
    return parts


def expert_tensor_maps(naming, name, ours, leaf, shape):
    """Returns the TensorMaps of one matrix or bias of all experts. Each expert has a TensorMap of
    its own, because its tensor may be dequantized while it is read.

    naming: the family's Naming. name: the experts' name on disk. ours: the name of the experts'
    module in GPT, such as 'experts_c_fc'. leaf: 'kernel' or 'bias'. shape: the parameter's shape,
    [E, in, out] or [E, out]."""
    E, *_, n_out = shape
    names = {'experts_c_gate': 'gate', 'experts_c_fc': 'up', 'experts_c_proj': 'down'}

    # A tensor for each expert, or one for all.
    if naming.experts == 'separate':
        return [TensorMap(f'{name}.{e}.{names[ours]}_proj.weight', (n_out, shape[1]),
                          transpose=True, dst=e)
                for e in range(E)]
    if naming.experts == 'stacked':
        return [TensorMap(f'{name}.{names[ours]}_proj.weight', (E, n_out, shape[1]),
                          transpose=True, dst=e, src=e)
                for e in range(E)]
    # one tensor for all experts; gate and up share one
    tensor = 'down_proj'
    columns = slice(None)
    if ours != 'experts_c_proj':
        is_gate = ours == 'experts_c_gate'
        tensor = 'gate_up_proj'
        if naming.experts == 'interleaved':
            columns = slice(0, None, 2) if is_gate else slice(1, None, 2)
        else:
            columns = slice(0, n_out) if is_gate else slice(n_out, None)
        shape = (*shape[:-1], 2 * n_out)
    if leaf == 'bias':
        tensor += '_bias'
    return [TensorMap(f'{name}.{tensor}', shape, dst=e, src=(e, ..., columns)) for e in range(E)]


# -----------------------------------------------------------------------------
# the tensors of a file

# tensors that are not parameters of GPT: causal masks, RoPE's frequencies, vision parts
IGNORED = (r'(^|\.)h\.\d+\.attn\.(masked_)?bias$', r'rotary_emb\.inv_freq$',
           r'^(vision_model|vision_tower|multi_modal_projector)\.')


def is_needed(name, config):
    """Returns whether a tensor on disk belongs to a parameter of GPT(config). Only the tensor's
    `name` decides."""
    if any(re.search(pattern, name) for pattern in IGNORED):  # no parameter of any GPT
        return False
    layer = re.search(r'\bmodel\.layers\.(\d+)\.', name)
    # DeepSeek-V3's layers beyond n_layer predict later tokens
    return layer is None or int(layer[1]) < config.n_layer


def largest_first(config):
    """Returns the paths of the parameters of GPT(config), the largest first."""
    shapes = param_shapes(config)
    return sorted(shapes, key=lambda path: math.prod(shapes[path]), reverse=True)


def open_parameters(path_or_name):
    """Returns (config; {path in the parameter tree: ParameterOnDisk}) of a pretrained model. Raises
    UserError if a tensor is missing or has a wrong shape, or if a tied head differs from the
    embeddings."""
    config, family, tensors, source = open_model(path_or_name)
    tensor_maps = family_tensor_maps(config, family)
    tensors = {name: x for name, x in tensors.items() if is_needed(name, config)}
    embedding = tensor_maps['wte',][0].name
    if embedding == 'wte.weight':  # GPT-2, with or without a prefix
        tensors = {name.removeprefix('transformer.'): x for name, x in tensors.items()}

    # a file may have a tied head as a second tensor
    heads = [name for name in tensors if name.endswith('lm_head.weight')]
    head, tied = None, None
    if config.tied_head and heads:
        head = heads[0]
        tied = tensors.pop(head)
    shapes = {}
    for group in tensor_maps.values():
        for tensor_map in group:
            shapes[tensor_map.name] = tensor_map.shape
    check_tensors(tensors, shapes, source)
    if tied is not None and not np.array_equal(tied[...], tensors[embedding][...]):
        raise UserError(f'{source}: {head} differs from {embedding}, but the config says that they '
                        'are tied')

    sources = {}
    for path, shape in param_shapes(config).items():
        parts = [(tensor_map, tensors[tensor_map.name]) for tensor_map in tensor_maps[path]]
        sources[path] = ParameterOnDisk(shape, parts)
    return config, sources


@dataclasses.dataclass(eq=False)
class ParameterOnDisk:
    """A parameter of GPT in a file. np.asarray reads it in float32."""
    shape: tuple  # of the parameter
    parts: list  # [(TensorMap, tensor)]

    dtype = np.dtype(np.float32)

    @property
    def size(self):
        return math.prod(self.shape)

    def read(self, dtype):
        """Returns the array. dtype: as for load_pretrained."""
        array = assemble_parameter(self.parts, self.shape, dtype)
        release_pages(tensor for _, tensor in self.parts)
        return array

    def __array__(self, dtype=None, copy=None):
        return recently_read(self)


@functools.lru_cache(maxsize=4)
def recently_read(parameter):
    """Returns the float32 array of a ParameterOnDisk, and keeps the last four arrays. An export
    asks for a parameter again for each tensor that is a part of it (q, k and v, or each expert)."""
    return parameter.read('float32')


def assemble_parameter(parts, shape, dtype):
    """Returns a parameter of this shape from its parts [(TensorMap, tensor)]. dtype: as for
    load_pretrained."""
    if len(shape) < 2:
        dtype = np.float32
    elif dtype == 'stored':
        dtype = common_dtype(tensor for _, tensor in parts)
    # if the file stores [out, in], the array does, too, and the parameter is a transposed view:
    # this avoids a slow copy
    is_transposed = len(shape) == 2 and all(tensor_map.transpose for tensor_map, _ in parts)
    if is_transposed:
        array = aligned_empty(shape[::-1], dtype).T
    else:
        array = aligned_empty(shape, dtype)
    for tensor_map, tensor in parts:
        array[tensor_map.dst] = tensor_map.to_parameter(tensor)
    return array


def aligned_empty(shape, dtype):
    """Returns an array like np.empty at an address that is a multiple of 64 bytes, because a CPU
    device takes over such an array without a copy."""
    n_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(n_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start:start + n_bytes].view(dtype).reshape(shape)


def release_pages(tensors):
    """Releases the pages in memory of those tensors that are memory-mapped files, because they
    would count as memory of this process. The system reads them again when they are used. Other
    tensors are unchanged."""
    for tensor in tensors:
        if isinstance(tensor, np.memmap) and hasattr(tensor._mmap, 'madvise'):
            tensor._mmap.madvise(mmap.MADV_DONTNEED)


# -----------------------------------------------------------------------------
# Hugging Face folders and nanoGPT

def load_config(path_or_name):
    """Returns the GPTConfig of a pretrained model, without the parameters. path_or_name: as for
    load_pretrained.

    Also opens the weight files, as open_model does, but keeps no tensors. A safetensors file is
    only memory-mapped. A file of torch is read as a whole. Raises UserError for missing or damaged
    files, and for models that GPT does not compute."""
    return open_model(path_or_name)[0]


def load_weights(source, config, layout, change=None):
    """Loads the parameters of a pretrained model onto devices, sharded as `layout` says. Returns
    (parameters; a CRC-32 checksum of the file's parameters). source: as path_or_name in
    load_pretrained.

    change: a function of (path in the tree, array) that returns the value to use instead. It is
    called for every parameter, with a float32 array. The returned value is moved to the devices
    before the next parameter is read. config: the run's GPTConfig. A table of position embeddings
    is truncated to config.block_size rows."""
    place = Placing(config, layout, change)
    _, params = load_pretrained(source, place=place)
    return params, place.crc


class Placing:
    """Moves parameters to their devices, one after the other, and computes their checksum `crc`;
    see load_weights."""

    def __init__(self, config, layout, change=None):
        self.config = config
        self.layout = layout
        self.change = change
        self.crc = 0

    def __call__(self, path, array):
        """Adds a float32 parameter to the checksum. Then truncates it if it is wpe, applies
        `change`, and returns it on its devices. path: its path in the tree of parameters."""
        self.crc = zlib.crc32(np.ascontiguousarray(array), self.crc)
        if path == ('wpe',):
            array = array[:self.config.block_size]
        if self.change:
            array = self.change(path, array)
        return flatten_dict(self.layout.device_put(unflatten_dict({path: array})))[path]


def checksum_of_weights(source, config):
    """Returns the checksum that load_weights would return, but holds only one tensor at a time. A
    model without biases that is exported as a GPT-2 has biases of zero in its file, because the
    format requires biases. The checksum leaves these biases out."""
    crc = 0
    shapes = param_shapes(config)

    def place(path, array):
        nonlocal crc
        is_added = path not in shapes and not array.any()
        if not is_added:
            crc = zlib.crc32(np.ascontiguousarray(array), crc)

    load_pretrained(source, place=place)
    return crc
