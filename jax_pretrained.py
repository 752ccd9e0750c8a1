"""Weights in and out: Hugging Face GPT-2 folders and nanoGPT's ckpt.pt, neither of which needs PyTorch here.

References:
1) GPT-2 of transformers: https://github.com/huggingface/transformers/tree/main/src/transformers/models/gpt2
2) nanoGPT's model: https://github.com/karpathy/nanoGPT/blob/master/model.py

Both name a tensor `h.0.attn.c_attn.weight`, we name it `h_0/attn/c_attn/kernel`: see `torch_name`. What differs is the
orientation of the matrices, [in, out] in GPT-2 and here, [out, in] in nanoGPT, and the GELU, tanh or exact.
"""
import dataclasses
import io
import json
import logging
import os
import pickle
import re
import shutil
import sys
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_transformer import GPT, GPTConfig, UserError

PUBLISHED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # openai-community/<name> on the Hugging Face hub
WEIGHT_FILES = ('model.safetensors', 'model.safetensors.index.json', 'pytorch_model.bin')

SIZES = {'block_size': 'n_positions', 'vocab_size': 'vocab_size', 'n_layer': 'n_layer', 'n_head': 'n_head',
         'n_embd': 'n_embd'}  # the name here and in nanoGPT: the key in config.json
HF_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}
HF_FIXED = {'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False, 'reorder_and_upcast_attn': False,
            'tie_word_embeddings': True, 'add_cross_attention': False}  # the one value that GPT computes


def load_pretrained(path_or_name):
    """(config, params) of a published GPT-2, a Hugging Face folder, or nanoGPT's ckpt.pt (or the folder it is in).

    params is the tree of GPT(config).init in float32 numpy arrays; kernels are [in, out]. config.dropout is 0.
    Raises UserError for what cannot be found, read, or computed by GPT."""
    path = download(path_or_name) if path_or_name in PUBLISHED else os.path.expanduser(path_or_name)
    for file in [path] + [os.path.join(path, name) for name in (*WEIGHT_FILES, 'ckpt.pt')]:
        if os.path.isfile(file):
            return load_hugging_face(file) if os.path.basename(file) in WEIGHT_FILES else load_nanogpt(file)
    if os.path.isdir(path):
        raise UserError(f'{path} holds no weights that can be read: none of {", ".join(WEIGHT_FILES)}, ckpt.pt')
    raise UserError(f'{path} does not exist; give a folder, a nanoGPT ckpt.pt, or one of {", ".join(PUBLISHED)}')


def save_pretrained(params, config, folder):
    """Writes params as a Hugging Face folder: config.json and model.safetensors (float32) for GPT2LMHeadModel.

    A model without biases gets biases of zero, which gives the same logits. The folder must not exist or be empty; it
    appears when it is complete. Raises UserError if it cannot be written or params are not those of GPT(config)."""
    tensors = {torch_name(path): np.asarray(x) for path, x in flatten_dict(params).items()}
    check_tensors(tensors, {name: shape for name, (_, shape) in torch_names(config).items()}, 'params')
    if not config.bias:
        with_bias = torch_names(dataclasses.replace(config, bias=True))
        tensors = {name: np.zeros(shape) for name, (_, shape) in with_bias.items()} | tensors
    end_of_text = 50256 if config.vocab_size > 50256 else None  # GPT-2's; other vocabularies do not have it there
    hf_config = {
        'architectures': ['GPT2LMHeadModel'], 'model_type': 'gpt2', 'dtype': 'float32',
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()}, 'layer_norm_epsilon': config.norm_eps,
        'activation_function': next(k for k, ours in HF_ACTIVATIONS.items() if ours == config.activation),
        **{key: config.dropout for key in ('attn_pdrop', 'embd_pdrop', 'resid_pdrop')},
        'bos_token_id': end_of_text, 'eos_token_id': end_of_text, **HF_FIXED}

    folder = os.path.abspath(os.path.expanduser(folder))
    unfinished = f'{folder}.tmp-{os.getpid()}'
    try:
        if os.path.exists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
            raise UserError(f'{folder} exists and is not an empty folder; remove it or choose another')
        os.makedirs(unfinished)
        config_file, weight_file = (os.path.join(unfinished, file) for file in ('config.json', 'model.safetensors'))
        with open(config_file, 'w', encoding='utf-8') as f:
            json.dump(hf_config, f, indent=2)
        tensors = {'transformer.' + name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
        safetensors.numpy.save_file(tensors, weight_file, metadata={'format': 'pt'})
        shutil.copymode(config_file, weight_file)  # safetensors makes it unreadable for others
        os.replace(unfinished, folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f'cannot write {folder}: {error}') from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# -----------------------------------------------------------------------------
# names and shapes

def torch_name(path):
    """('h_0', 'attn', 'c_attn', 'kernel') -> 'h.0.attn.c_attn.weight'; ('wte',) -> 'wte.weight'"""
    *scope, leaf = path
    scope = [re.sub(r'^h_(\d+)$', r'h.\1', part) for part in scope]
    return '.'.join(scope + {'kernel': ['weight'], 'scale': ['weight'], 'bias': ['bias']}.get(leaf, [leaf, 'weight']))


def torch_names(config):
    """{torch name: (path in params, shape)} of every parameter of GPT(config)."""
    init = lambda: GPT(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))['params']
    return {torch_name(path): (path, x.shape) for path, x in flatten_dict(jax.eval_shape(init)).items()}


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
        if tensors[name].shape != shape:
            raise UserError(f'{source}: {name} should have shape {shape} for this config but has {tensors[name].shape}')
        if tensors[name].dtype.name not in ('float32', 'bfloat16', 'float16', 'float64'):
            raise UserError(f'{source}: {name} is {tensors[name].dtype}; only unquantized weights can be loaded')


def to_params(tensors, config, source, transposed):
    """A state dict as parameters of GPT(config). transposed: its matrices are [out, in]."""
    if not (isinstance(tensors, dict) and all(type(k) is str and type(x) is np.ndarray for k, x in tensors.items())):
        raise UserError(f'{source} does not hold a state dict, names with their tensors')
    tensors = {re.sub(r'^(_orig_mod\.)?(transformer\.)?', '', name): x for name, x in tensors.items()
               if not re.search(r'h\.\d+\.attn\.(masked_)?bias$', name)}  # these two are causal masks
    head = tensors.pop('lm_head.weight', None)
    names = torch_names(config)
    turned = {name for name, (path, _) in names.items() if transposed and path[-1] == 'kernel'}
    check_tensors(tensors, {name: shape[::-1] if name in turned else shape for name, (_, shape) in names.items()},
                  source)
    if head is not None and not np.array_equal(head, tensors['wte.weight']):
        raise UserError(f'{source}: lm_head.weight differs from wte.weight; only a head tied to wte is supported')
    return unflatten_dict({
        path: np.ascontiguousarray(tensors[name].T if name in turned else tensors[name], np.float32)
        for name, (path, _) in names.items()})


def make_config(values, source):
    """GPTConfig(**values); complains about the file where the values come from."""
    for name in SIZES:
        if type(values[name]) is not int:
            raise UserError(f'{source}: {name} should be a whole number, not {values[name]!r}')
    try:
        return GPTConfig(**values)
    except UserError as error:
        raise UserError(f'{source}: {error}') from None


def require(keys, values, source, what):
    """Raises UserError unless `values` is a dict with all `keys`."""
    missing = [key for key in keys if key not in values] if isinstance(values, dict) else ['keys']
    if missing:
        raise UserError(f'{source} lacks {", ".join(missing)}, so it is not {what}')


# -----------------------------------------------------------------------------
# Hugging Face

def download(name):
    """The folder of a published model: the hub's local cache where it has it, else downloaded."""
    try:
        from huggingface_hub import hf_hub_download
        logging.getLogger('huggingface_hub').setLevel(logging.ERROR)  # or it reports every retry
        fetch = lambda **how: [hf_hub_download(f'openai-community/{name}', file, **how)
                               for file in ('config.json', 'model.safetensors')]
        try:
            files = fetch(local_files_only=True)
        except FileNotFoundError:
            files = fetch()
    except Exception as error:  # no network, no such package, full disk, ...
        reason = str(error).split('\n')[0]
        raise UserError(
            f'cannot download {name} ({type(error).__name__}: {reason}). Put config.json and model.safetensors of '
            f'openai-community/{name}, Hugging Face hub, into a folder by hand and give its path instead') from None
    return os.path.dirname(files[-1])


def load_hugging_face(weight_file):
    """(config, params) of a GPT-2 from its weights; config.json is beside them."""
    source = os.path.join(os.path.dirname(weight_file), 'config.json')
    hf = read_json(source)
    require(['model_type'], hf, source, 'the config of a Hugging Face model')
    if hf['model_type'] != 'gpt2':
        raise UserError(f'{source}: model_type {hf["model_type"]!r} is not supported; supported: gpt2')
    require(SIZES.values(), hf, source, 'the config of a GPT-2')
    activation, norm_eps = hf.get('activation_function', 'gelu_new'), hf.get('layer_norm_epsilon', 1e-5)
    if activation not in list(HF_ACTIVATIONS):
        known = ', '.join(HF_ACTIVATIONS)
        raise UserError(f'{source}: activation_function {activation!r} is not supported; supported: {known}')
    if type(norm_eps) is not float:
        raise UserError(f'{source}: layer_norm_epsilon should be a number like 1e-05, not {norm_eps!r}')
    config = make_config({ours: hf[theirs] for ours, theirs in SIZES.items()} |
                         {'activation': HF_ACTIVATIONS[activation], 'norm_eps': norm_eps}, source)
    for key, value in (HF_FIXED | {'n_inner': 4 * config.n_embd}).items():
        if hf.get(key) not in (None, value):
            raise UserError(f'{source}: {key}={json.dumps(hf[key])} is not supported, only {json.dumps(value)}')
    if weight_file.endswith('.json'):
        tensors = read_shards(weight_file)
    else:
        tensors = (read_torch_checkpoint if weight_file.endswith('.bin') else read_safetensors)(weight_file)
    return config, to_params(tensors, config, weight_file, transposed=False)


def read_json(path):
    try:
        with open(path, encoding='utf-8') as f:
            return json.load(f)
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from None
    except ValueError as error:
        raise UserError(f'{path} is not JSON ({error}); copy or download it again') from None


def read_safetensors(path):
    try:
        return safetensors.numpy.load_file(path)
    except Exception as error:  # its own, OSError, or KeyError for a dtype that numpy lacks
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


# -----------------------------------------------------------------------------
# nanoGPT, and files of torch.save

def load_nanogpt(path):
    """(config, params) of a ckpt.pt that nanoGPT's train.py wrote."""
    checkpoint = read_torch_checkpoint(path)
    require(['model', 'model_args'], checkpoint, path, 'a checkpoint of nanoGPT')
    checkpoint.pop('optimizer', None)  # twice as large as the model
    args = checkpoint['model_args']
    require(SIZES, args, f"{path}'s model_args", 'a checkpoint of nanoGPT')
    bias = args.get('bias') is not False  # the first checkpoints have no such entry, and biases
    config = make_config({name: args[name] for name in SIZES} | {'bias': bias}, path)
    return config, to_params(checkpoint['model'], config, path, transposed=True)


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
