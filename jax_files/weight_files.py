"""Weights of any model on disk: safetensors, shards, MXFP4 and fp8 blocks, torch.save, GGUF,
Hugging Face's hub."""
import atexit
import contextlib
import functools
import json
import logging
import math
import os
import re
import shutil
import tempfile
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from jax_files.adapters import (
    ADAPTER_CONFIG, ADAPTER_FILES, find_adapter_file, is_adapter, merge_adapter, read_adapter_config)
from jax_files.chats import copy_more_templates
from jax_files.config_json import JsonConfig, shown
from jax_files.gguf_files import GGUF_PATH, gguf_tensors, open_gguf
from jax_files.tokenizer_classes import AS_FILED, class_of
from jax_files.tokenizers import copy_tokenizer
from jax_files.torch_files import read_state_dict
from jax_flags import (
    DTYPES, UserError, ceil_div, printable, read_json, regular_file, write_json)

# The keys of config.json that name tokens.
FLOATS = ('float32', 'bfloat16', 'float16', 'float64')  # names of dtypes
SPECIAL_TOKENS = ('bos_token_id', 'eos_token_id', 'pad_token_id')

# Models on the Hugging Face hub that have a short name: openai-community/<name>.
PUBLISHED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')

# The file in the folder of open_adapter that says where the adapter is.
ADAPTER_PATH = 'adapter_path'

# The files of a folder that hold or list its weights; the first one that is there counts.
WEIGHT_FILES = (
    'model.safetensors', 'model.safetensors.index.json',
    'pytorch_model.bin', 'pytorch_model.bin.index.json',
    GGUF_PATH, ADAPTER_PATH)

# The files of a model that are downloaded. The second line tells a tokenizer that has no
# tokenizer.json.
HUB_FILES = (
    '*.json', '*.safetensors', '*.jinja',
    'merges.txt', 'vocab.txt', '*.model', '*.tiktoken')
# The files of a model without safetensors.
HUB_FILES_OF_TORCH = (*HUB_FILES, 'pytorch_model*.bin', 'adapter_model.bin')


# -----------------------------------------------------------------------------
# the config.json and the folder of a model

def find_config_json(path):
    """Returns the path of the config.json of a Hugging Face folder, or of one of its files; None
    for nanoGPT's ckpt.pt."""
    folder, name = os.path.split(weight_file(path))
    if name not in WEIGHT_FILES:
        return None
    return regular_file(folder, 'config.json')


def kept_config_json(out_dir):
    """Returns where a run in out_dir keeps the config.json of the Hugging Face model that it trains
    further. There need not be one."""
    return regular_file(out_dir, os.path.join('tokenizer', 'config.json'))


def keep_config_json(source, out_dir):
    """Copies a config.json to kept_config_json(out_dir).

    source: the path of the config.json; None for a run without one, where an earlier run's is
    removed."""
    kept = kept_config_json(out_dir)
    if source:
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        shutil.copyfile(source, kept)
    elif os.path.exists(kept):
        os.remove(kept)


def write_folder(folder, hf_config, shapes, make_tensor, dtype, tokenizer, shard_bytes):
    """Writes a new Hugging Face folder, which appears when it is complete.

    hf_config: the content of its config.json. shapes: {name: shape} of the tensors, which
    make_tensor(name) returns when they are written. dtype: the name of their type. tokenizer: a
    folder whose tokenizer is copied, or None. shard_bytes: the size of the largest file of weights.

    Raises UserError if the folder cannot be written, or is there and not empty."""
    with new_folder(folder) as unfinished:
        if tokenizer:
            write_tokenizer_files(tokenizer, unfinished, hf_config)
        write_json(os.path.join(unfinished, 'config.json'), hf_config)
        write_shards(unfinished, shapes, make_tensor, dtype, shard_bytes)


def write_adapter(folder, settings, tensors, dtype, tokenizer, hf_config):
    """Writes the folder of a LoRA adapter, which appears when it is complete, as write_folder.

    settings: the content of its adapter_config.json. tensors: {name: array}. dtype: the name of
    the type that they get. hf_config: the content of its model's config.json."""
    shapes = {name: x.shape for name, x in tensors.items()}

    def make_tensor(name):
        return np.ascontiguousarray(tensors[name], dtype)

    with new_folder(folder) as unfinished:
        if tokenizer:
            write_tokenizer_files(tokenizer, unfinished, hf_config)
        write_json(os.path.join(unfinished, ADAPTER_CONFIG), settings)
        path = os.path.join(unfinished, ADAPTER_FILES[0])
        write_safetensors(path, shapes, make_tensor, dtype)


@contextlib.contextmanager
def new_folder(folder):
    """Gives the path of a folder to fill, which gets the name `folder` at the end of the block, if
    that does not fail. Raises UserError if it cannot be written, or is there and not empty."""
    unfinished = f'{folder}.tmp-{os.getpid()}'
    try:
        is_empty_folder = os.path.isdir(folder) and not os.listdir(folder)
        if os.path.exists(folder) and not is_empty_folder:
            raise UserError(f'{folder} exists and is not an empty folder; remove it or choose '
                            'another')
        os.makedirs(unfinished)
        yield unfinished

        # The folder gets its name. Windows does not replace one, not even an empty one.
        if os.path.isdir(folder):
            os.rmdir(folder)
        os.replace(unfinished, folder)
    except OSError as error:
        raise UserError(f'cannot write {folder}: {error}') from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tokenizer_files(source, folder, hf_config):
    """Copies the files of a tokenizer into a new folder, and adds the settings that transformers
    needs to split text as they say.

    hf_config: the content of the new folder's config.json. transformers may split text in the way
    of its model type, regardless of the files."""
    copy_tokenizer_files(source, folder)
    if not os.path.exists(os.path.join(folder, 'tokenizer.json')):
        return
    path = os.path.join(folder, 'tokenizer_config.json')
    has_settings = os.path.exists(path)
    settings = read_json(path) if has_settings else {'clean_up_tokenization_spaces': False}
    source_config = read_json(regular_file(source, 'config.json'), optional=True)
    kind = class_of(settings, source_config)
    is_changed = kind != class_of(settings, hf_config)
    if kind == 'generic' and (is_changed or not has_settings):
        write_json(path, {**settings, 'tokenizer_class': AS_FILED})
    elif is_changed:
        copy_tokenizer({'kind': 'folder', 'path': source}, folder)


def copy_tokenizer_files(source, folder):
    """Copies what describes a model's tokenizer and its use from the folder `source`: no
    config.json, and nothing of the weights."""
    for file in os.listdir(source):
        is_of_weights = file.startswith('adapter_') or 'safetensors' in file or '.bin.' in file
        is_description = file.endswith(('.json', '.jinja', '.model'))
        if file in ('merges.txt', 'vocab.txt'):
            is_wanted = True
        else:
            is_wanted = is_description and file != 'config.json' and not is_of_weights
        if is_wanted:
            shutil.copyfile(regular_file(source, file), os.path.join(folder, file))
    copy_more_templates(source, folder)


# -----------------------------------------------------------------------------
# checks of tensors

def check_tensors(tensors, shapes, source):
    """Raises UserError unless `tensors` has exactly the names of `shapes`, with these shapes, in
    floating point.

    tensors: {name: array}. shapes: {name: shape}. source: where they are from, for messages."""
    refuse_mlx(tensors, source)

    # The same names on both sides.
    missing = shapes.keys() - tensors.keys()
    unknown = {printable(name) for name in tensors.keys() - shapes.keys()}
    wrong = []
    if missing:
        wrong.append(f'lacks {first_names(missing)}')
    if unknown:
        wrong.append(f'has unknown {first_names(unknown)}')
    if wrong:
        raise UserError(f'{source} is not for a model of this config: it {" and it ".join(wrong)}')

    # The same shapes, in types that can be converted.
    for name, shape in shapes.items():
        x = tensors[name]
        if tuple(x.shape) != shape:
            raise UserError(f'{source}: {name} should have shape {shape} for this config but has '
                            f'{x.shape}')
        if x.dtype.name not in (*FLOATS, 'float8_e5m2'):
            raise UserError(f'{source}: {name} is {x.dtype}; floating point of 16 bits or more can '
                            'be loaded, E5M2, MXFP4, and E4M3 with scales')


def first_names(names):
    """Returns the first eight names of a set, sorted, and how many more there are."""
    listed = ', '.join(sorted(names)[:8])
    if len(names) > 8:
        listed += f' and {len(names) - 8} more'
    return listed


def refuse_mlx(tensors, source):
    """Raises UserError for the weights that MLX quantizes: several numbers in 32 bits, with scales
    and biases."""
    for name, x in tensors.items():
        scales = f'{name.removesuffix("weight")}scales'
        if name.endswith('.weight') and scales in tensors and x.dtype.name == 'uint32':
            raise UserError(f'{source} is of MLX, quantized ({name} with {scales}), which only MLX '
                            'computes; take the model that it was made from, or where mlx-lm is '
                            'installed: mlx_lm.convert --dequantize --hf-path THIS --mlx-path NEW')


def common_dtype(arrays):
    """Returns the one of DTYPES that all arrays have, or 'float32'."""
    names = {x.dtype.name for x in arrays}
    if len(names) == 1 and names <= set(DTYPES):
        return names.pop()
    return 'float32'


def aligned_empty(shape, dtype):
    """Returns an array like np.empty, at a multiple of 64 bytes: a CPU device takes such an array
    over, and copies others."""
    n_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(n_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start:start + n_bytes].view(dtype).reshape(shape)


def require_keys(keys, values, source, what):
    """Raises UserError unless `values` is a dict with all `keys`.

    source: the file that they are from. what: the kind of file that it should be."""
    if isinstance(values, dict):
        missing = [key for key in keys if key not in values]
    else:
        missing = ['keys']
    if missing:
        raise UserError(f'{source} lacks {", ".join(missing)}, so it is not {what}')


# -----------------------------------------------------------------------------
# where a model is: a path, the hub, a GGUF file, an adapter

def local_path(path_or_name, files=HUB_FILES, base=''):
    """Returns the local path of a model. That is
    - the path itself;
    - the folder in the hub's cache of the model of that name, downloaded unless it is there;
    - the folder in which a GGUF file, or an adapter of peft, is opened.

    files: patterns of the files that are downloaded. base: where the model of an adapter is; '' is
    where its adapter_config.json says."""
    path = os.path.expanduser(path_or_name)
    if os.fspath(path).endswith('.gguf'):
        path = open_gguf(os.path.abspath(path))
    else:
        path = find_on_hub(path_or_name, files)
    if is_adapter(path):
        return open_adapter(os.path.abspath(path), base)
    if base:
        raise UserError(f'base is for a LoRA run or an adapter of peft, and {path_or_name} is '
                        'neither')
    return path


def is_hub_name(name):
    """Returns whether this may be the name of a model on Hugging Face's hub."""
    return name in PUBLISHED or re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None


def download(repo, files):
    """Returns the folder in the hub's cache of a model, downloaded unless it is there.

    repo: its name on the hub. files: patterns of the files that are wanted."""
    from huggingface_hub import snapshot_download
    logging.getLogger('huggingface_hub').setLevel(logging.ERROR)  # it would report every retry
    try:
        folder = snapshot_download(repo, allow_patterns=files, local_files_only=True)
    except FileNotFoundError:
        folder = snapshot_download(repo, allow_patterns=files)
    if files != HUB_FILES or has_weights(folder):
        return folder

    # The cache lacks the weights: an earlier call asked for the tokenizer alone.
    folder = snapshot_download(repo, allow_patterns=files)
    if has_weights(folder):
        return folder

    # Or the model has no safetensors.
    return snapshot_download(repo, allow_patterns=HUB_FILES_OF_TORCH)


def has_weights(folder):
    """Returns whether a folder has files of weights, of a model or of an adapter."""
    return any(name.endswith(('.safetensors', '.bin')) for name in os.listdir(folder))


def find_on_hub(path_or_name, files):
    """Returns a path as it is, and for the name of a model on the hub its folder in the cache.

    Raises UserError if the model cannot be downloaded."""
    path = os.path.expanduser(path_or_name)
    if not is_hub_name(path_or_name) or os.path.exists(path):
        return path
    repo = path_or_name
    if path_or_name in PUBLISHED:
        repo = f'openai-community/{path_or_name}'
    try:
        return download(repo, files)
    except Exception as error:  # no network, no such package, full disk, ...
        reason = str(error).split('\n')[0]
        raise UserError(f'cannot download {path_or_name} ({type(error).__name__}: {reason}). Put '
                        f'config.json and model.safetensors of {repo}, Hugging Face hub, into a '
                        'folder by hand and give its path instead') from None


# {a folder of open_adapter: function that returns {name: array}}. A folder that a stranger made is
# none of them.
made_folders = {}


@functools.cache  # one folder for each adapter
def open_adapter(adapter, base):
    """Opens an adapter of peft and returns a folder with the config.json of its model and the
    tokenizer of either, which is there until this process ends. The model's weights with the
    adapter's updates are made when they are read.

    adapter: the adapter's folder. base: as for local_path. Raises UserError for settings that are
    not computed here, and if the model is not found."""
    # What the adapter says, and the model that it updates.
    settings = read_adapter_config(adapter)
    file = find_adapter_file(adapter)
    model = find_base(adapter, settings, base)
    config_path = find_config_json(model)
    is_gguf = os.path.exists(os.path.join(model, GGUF_PATH))
    if config_path is None or is_gguf:
        raise UserError(f'{adapter} updates {model}, which is no folder of Hugging Face; name that '
                        'with --base=FOLDER')
    config = read_json(config_path)
    model_folder = os.path.dirname(config_path)

    # The folder has the name of the adapter's, because messages name it.
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = os.path.join(made, os.path.basename(adapter))
    os.mkdir(folder)

    # The adapter's tokenizer, if it has one: training may have added tokens.
    has_tokenizer = os.path.exists(os.path.join(adapter, 'tokenizer.json'))
    copy_tokenizer_files(adapter if has_tokenizer else model_folder, folder)
    generation = regular_file(model_folder, 'generation_config.json')
    copied = os.path.join(folder, 'generation_config.json')
    if os.path.exists(generation) and not os.path.exists(copied):
        shutil.copyfile(generation, copied)
    write_json(os.path.join(folder, 'config.json'), config)
    write_json(os.path.join(folder, ADAPTER_PATH), {'path': adapter})

    # How its tensors are made, once they are asked for.
    def read():
        weights = weight_file(model)
        block = read_block(config, config_path)
        tensors = dequantize_lazily(read_tensors(weights), block, weights)
        updates = read_weight_file(file)
        return merge_adapter(tensors, updates, settings, config.get('model_type'), file)

    made_folders[folder] = read
    return folder


def find_base(adapter, settings, base):
    """Returns the folder of an adapter's model: `base`, else what adapter_config.json names.

    That is a path, a folder of that name in or beside the adapter's, or a name on the hub.
    adapter: the adapter's folder. settings: its adapter_config.json. Raises UserError if there is
    no such folder."""
    # A folder may hold a model and its adapter. Without a word of the user it is not known whether
    # the adapter is merged into that model already.
    own_weights = []
    for name in WEIGHT_FILES:
        if os.path.exists(os.path.join(adapter, name)):
            own_weights.append(name)
    is_own = base and os.path.realpath(os.path.expanduser(base)) == os.path.realpath(adapter)
    if is_own and own_weights:
        return adapter
    if own_weights and not base:
        raise UserError(f'{adapter} holds an adapter and {own_weights[0]}: if that is the model '
                        'that the adapter updates, give --base=FOLDER, too; if it is merged '
                        'already, move adapter_config.json away')
    if base:
        return local_path(base)

    # The model that the adapter names, on this machine.
    named = settings.get('base_model_name_or_path')
    if not isinstance(named, str) or not named or '\0' in named:
        raise UserError(f'{adapter} does not say which model it updates; name it with '
                        '--base=FOLDER')
    name = os.path.basename(os.path.normpath(named))
    places = (
        os.path.expanduser(named),
        os.path.join(adapter, name),
        os.path.join(os.path.dirname(adapter), name))
    for path in places:
        if os.path.exists(path) and not is_adapter(path):
            return local_path(path)

    # Or on the hub.
    if not is_hub_name(named):
        raise UserError(f'{adapter} updates {printable(named)}, which does not exist; name its '
                        'place with --base=FOLDER')
    return local_path(named)


# -----------------------------------------------------------------------------
# reading

def weight_file(path):
    """Returns the file that holds or lists the weights of a folder, or the path itself. Raises
    UserError if there is none."""
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        raise UserError(f'{path} does not exist; give a folder, a nanoGPT ckpt.pt, or one of '
                        f'{", ".join(PUBLISHED)}')
    for name in (*WEIGHT_FILES, 'ckpt.pt'):
        file = regular_file(path, name)
        if os.path.exists(file):
            return file
    raise UserError(f'{path} holds no weights that can be read: none of '
                    f'{", ".join(WEIGHT_FILES[:4])}, ckpt.pt')


def read_tensors(file):
    """Returns {name: array} of one of WEIGHT_FILES, given its path."""
    folder, name = os.path.split(file)

    # What was opened in a folder of its own: a GGUF file, or an adapter with its base.
    if name == GGUF_PATH:
        return gguf_tensors(folder)
    if name == ADAPTER_PATH:
        if folder not in made_folders:
            raise UserError(f"{file} is not of this program; give the adapter's folder")
        read = made_folders[folder]
        return read()
    if file.endswith('.json'):
        return read_shards(file)
    return read_weight_file(file)


def read_weight_file(file):
    """Returns {name: array} of a pytorch_model.bin, of a safetensors file, or of a shard."""
    if file.endswith('.bin'):
        return read_state_dict(file)
    return read_safetensors(file)


# {a type's name in safetensors: its name in numpy, with ml_dtypes}
SAFETENSORS_DTYPES = {
    'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16',
    'F8_E4M3': 'float8_e4m3fn', 'F8_E5M2': 'float8_e5m2', 'F8_E8M0': 'float8_e8m0fnu',
    'I64': 'int64', 'I32': 'int32', 'I16': 'int16', 'I8': 'int8',
    'U64': 'uint64', 'U32': 'uint32', 'U16': 'uint16', 'U8': 'uint8', 'BOOL': 'bool'}


def read_safetensors(path):
    """Returns {name: array} of a safetensors file, memory-mapped.

    The library checks the file, but its numpy reader knows neither bfloat16 nor float8. Raises
    UserError for a file that is damaged, and for a type that is not known."""
    try:
        # The library checks that the header fits the file, and that no tensors overlap.
        with safetensors.safe_open(path, 'numpy'):
            pass

        # The file: the length of the header in 8 bytes, the header in JSON, the tensors.
        file = np.memmap(path, np.uint8, 'r')
        start = 8 + int.from_bytes(file[:8], 'little')
        header = json.loads(bytes(file[8:start]))
        header.pop('__metadata__', None)
        data = file[start:]

        tensors = {}
        for name, x in header.items():
            if x['dtype'] not in SAFETENSORS_DTYPES:
                raise UserError(f"{path}: {printable(name)} is of the type {x['dtype']}, which "
                                f'cannot be read; known are {", ".join(SAFETENSORS_DTYPES)}')
            dtype = jnp.dtype(SAFETENSORS_DTYPES[x['dtype']])
            first, end = x['data_offsets']
            tensors[name] = data[first:end].view(dtype).reshape(x['shape'])
        return tensors
    except UserError:
        raise
    except Exception as error:  # safetensors' own, or OSError
        reason = printable(str(error))
        raise UserError(f'cannot read {path} ({reason}); if it is damaged, copy or download it '
                        'again') from None


def read_shards(index_file):
    """Returns {name: array} of all files that an index names, given the path of the index."""
    # Which file holds which tensor.
    index = read_json(index_file)
    require_keys(['weight_map'], index, index_file, 'an index of shards')
    weight_map = index['weight_map']
    require_keys([], weight_map, f"{index_file}'s weight_map", 'an index of shards')

    tensors = {}
    for file in sorted({str(file) for file in weight_map.values()}):
        path = regular_file(os.path.dirname(index_file), file)
        if not os.path.exists(path):
            raise UserError(f'{index_file} names {printable(file)}, which is not beside it; copy '
                            'or download that file, too')
        tensors.update(read_weight_file(path))
    return tensors


# -----------------------------------------------------------------------------
# writing

def write_shards(folder, shapes, make_tensor, dtype, shard_bytes):
    """Writes the tensors make_tensor(name) as model.safetensors, or as several files of at most
    shard_bytes with an index. A tensor that is larger than shard_bytes has a file of its own.

    shapes: {name: shape}. dtype: the name of their type."""
    itemsize = jnp.dtype(dtype).itemsize
    n_bytes = {name: math.prod(shapes[name]) * itemsize for name in sorted(shapes)}

    # Fill one file after the other, in the order of the names.
    shards = [[]]
    size = 0
    for name in n_bytes:
        if shards[-1] and size + n_bytes[name] > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n_bytes[name]

    # Write them.
    weight_map = {}
    for i, names in enumerate(shards, start=1):
        file = 'model.safetensors'
        if len(shards) > 1:
            file = f'model-{i:05}-of-{len(shards):05}.safetensors'
        shapes_in_file = {name: shapes[name] for name in names}
        write_safetensors(os.path.join(folder, file), shapes_in_file, make_tensor, dtype)
        for name in names:
            weight_map[name] = file

    # The index of several files.
    if len(shards) > 1:
        index = {'metadata': {'total_size': sum(n_bytes.values())}, 'weight_map': weight_map}
        write_json(os.path.join(folder, 'model.safetensors.index.json'), index)


def write_safetensors(path, shapes, make_tensor, dtype):
    """Writes a safetensors file of the tensors make_tensor(name), each made when it is written:
    memory holds one at a time.

    shapes: {name: shape}. dtype: the name of their type."""
    # The header says where each tensor begins and ends.
    code = next(code for code, name in SAFETENSORS_DTYPES.items() if name == dtype)
    itemsize = jnp.dtype(dtype).itemsize
    header = {'__metadata__': {'format': 'pt'}}
    end = 0
    for name, shape in shapes.items():
        start = end
        end = start + math.prod(shape) * itemsize
        header[name] = {'dtype': code, 'shape': shape, 'data_offsets': [start, end]}

    # Spaces fill it up, so that the tensors begin at a multiple of 8 bytes.
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)

    # The header, then one tensor after the other.
    with open(path, 'wb') as f:
        f.write(len(text).to_bytes(8, 'little') + text)
        for name, shape in shapes.items():
            x = make_tensor(name)
            if shape:
                f.write(x.view(np.uint8).data)  # without a copy
            else:
                f.write(x.tobytes())  # numpy views no scalar in another type
            del x  # or it would be held while the next one is made


# -----------------------------------------------------------------------------
# quantized tensors

class MXFP4(NamedTuple):
    """Experts [E, in, out] as gpt-oss packs them: 4 bits a number, and 32 numbers along `in` share
    an exponent.

    x[e, ...] dequantizes expert e."""
    blocks: np.ndarray  # uint8 [E, out, in / 32, 16]; the low half of each byte comes first
    scales: np.ndarray  # uint8 [E, out, in / 32]

    dtype = np.dtype(np.float32)

    @property
    def shape(self):
        E, n_out, n_blocks, n_bytes = self.blocks.shape
        return E, n_blocks * n_bytes * 2, n_out

    def __getitem__(self, index):
        e, *part = index
        # The numbers that 4 bits stand for: sign, two bits of exponent, one of mantissa.
        values = np.float32([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6])
        codes = np.stack([self.blocks[e] & 15, self.blocks[e] >> 4], axis=-1)
        exponents = self.scales[e].astype(np.int32)[..., None, None] - 127
        numbers = np.ldexp(values[codes], exponents)  # [out, in / 32, 16, 2]
        return numbers.reshape(len(numbers), -1).T[tuple(part)]


class ScaledBlocks(NamedTuple):
    """A matrix in DeepSeek's float8: weight [out, in] times one scale per block. It dequantizes
    when it is indexed."""
    weight: np.ndarray
    scale: np.ndarray  # float32 [ceil(out / rows), ceil(in / columns)]
    block: tuple  # (rows, columns)

    dtype = np.dtype(np.float32)

    @property
    def shape(self):
        return self.weight.shape

    def __getitem__(self, index):
        block_of_row = np.arange(self.shape[0]) // self.block[0]
        block_of_column = np.arange(self.shape[1]) // self.block[1]
        scale = np.asarray(self.scale)[block_of_row][:, block_of_column]
        return (self.weight.astype(np.float32) * scale)[index]


def read_block(config, source):
    """Returns [rows, columns] of the blocks of numbers that share a scale.

    config: the content of a config.json, source: its path. Raises UserError for other values."""
    quantization = JsonConfig(config.get('quantization_config') or {}, source)
    block = quantization.get_list('weight_block_size', [128, 128])
    if len(block) != 2 or min(block) < 1:
        raise UserError(f'{source}: weight_block_size should list two numbers above 0, '
                        f'not {shown(block)}')
    return block


def dequantize_lazily(tensors, block, source):
    """Returns {name: array}, where each quantized tensor and its scales are replaced by one object
    that dequantizes when it is indexed.

    tensors: {name: array}. block: (rows, columns) of a block of float8. source: where they are
    from, for messages. Raises UserError for scales that do not fit."""
    result = dict(tensors)
    for name in tensors:
        # MXFP4: NAME_blocks and NAME_scales become NAME.
        scales_name = name.removesuffix('blocks') + 'scales'
        if name.endswith('_blocks') and scales_name in tensors:
            blocks = result.pop(name)
            scales = result.pop(scales_name)
            are_bytes = blocks.dtype == scales.dtype == np.uint8
            has_shape = blocks.ndim == 4 and blocks.shape[-1] == 16
            if not are_bytes or not has_shape or scales.shape != blocks.shape[:-1]:
                raise UserError(f'{source}: {name} {blocks.shape} and its scales {scales.shape} '
                                'are not MXFP4')
            result[name.removesuffix('_blocks')] = MXFP4(blocks, scales)

        # float8: NAME.weight and NAME.weight_scale_inv become NAME.weight.
        weight_name = name.removesuffix('_scale_inv')
        if name.endswith('.weight_scale_inv') and weight_name in tensors:
            scale = result.pop(name)
            weight = tensors[weight_name]
            n_blocks = tuple(ceil_div(n, size) for n, size in zip(weight.shape, block))
            if scale.shape != n_blocks or weight.ndim != 2:
                raise UserError(f'{source}: {name} {scale.shape} does not fit {weight_name} '
                                f'{weight.shape} in blocks of {block}')
            if not weight.dtype.name.startswith('float8') or scale.dtype.name not in FLOATS:
                raise UserError(f'{source}: {weight_name} is {weight.dtype} with scales of '
                                f'{scale.dtype}, not float8 with scales in floating point')
            result[weight_name] = ScaledBlocks(weight, scale, tuple(block))
    return result
