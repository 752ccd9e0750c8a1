"""Weights of any model on disk: safetensors, shards, MXFP4 and fp8 blocks, torch.save, GGUF, Hugging Face's hub."""
import atexit
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

from jax_files.adapters import find_adapter_file, is_adapter, merge_adapter, read_adapter_config
from jax_files.gguf_files import GGUF_PATH, gguf_tensors, open_gguf
from jax_files.torch_files import read_state_dict
from jax_flags import DTYPES, UserError, printable, read_json, regular_file, write_json


def find_config_json(path):
    """The path of the config.json of a Hugging Face folder, or of one of its files; None for nanoGPT's ckpt.pt."""
    folder, name = os.path.split(weight_file(path))
    return regular_file(folder, 'config.json') if name in WEIGHT_FILES else None


def kept_config_json(out_dir):
    """The path in a run's out_dir of the config.json of the Hugging Face model that it trains further."""
    return regular_file(out_dir, os.path.join('tokenizer', 'config.json'))


def keep_config_json(source, out_dir):
    """Copies a config.json to kept_config_json(out_dir). None: a run without one, which removes an earlier run's."""
    kept = kept_config_json(out_dir)
    if source:
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        shutil.copyfile(source, kept)
    elif os.path.exists(kept):
        os.remove(kept)


def write_folder(folder, hf_config, shapes, make_tensor, dtype, tokenizer, shard_bytes):
    """Writes a new folder, which appears when it is complete. make_tensor(name): called when a tensor is written."""
    unfinished = f'{folder}.tmp-{os.getpid()}'
    try:
        if os.path.exists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
            raise UserError(f'{folder} exists and is not an empty folder; remove it or choose another')
        os.makedirs(unfinished)
        if tokenizer:
            copy_tokenizer_files(tokenizer, unfinished)
            settings = os.path.join(unfinished, 'tokenizer_config.json')
            if os.path.exists(os.path.join(unfinished, 'tokenizer.json')) and not os.path.exists(settings):
                # without a class transformers takes that of the model type, which may split text in its own way
                write_json(settings, {'tokenizer_class': 'PreTrainedTokenizerFast',
                                      'clean_up_tokenization_spaces': False})
        write_json(os.path.join(unfinished, 'config.json'), hf_config)
        write_shards(unfinished, shapes, make_tensor, dtype, shard_bytes)
        if os.path.isdir(folder):
            os.rmdir(folder)  # empty; Windows replaces no folder
        os.replace(unfinished, folder)
    except OSError as error:
        raise UserError(f'cannot write {folder}: {error}') from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


SPECIAL_TOKENS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def check_tensors(tensors, shapes, source):
    """Raises UserError unless `tensors` has exactly the names of `shapes`, with these shapes, in floating point."""
    refuse_mlx(tensors, source)
    names = {'lacks': shapes.keys() - tensors.keys(),
             'has unknown': set(map(printable, tensors.keys() - shapes.keys()))}
    wrong = [f'{what} {", ".join(sorted(those)[:8])}' + f' and {len(those) - 8} more' * (len(those) > 8)
             for what, those in names.items() if those]
    if wrong:
        raise UserError(f'{source} is not for a model of this config: it {" and it ".join(wrong)}')
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f'{source}: {name} should have shape {shape} for this config but has {tensors[name].shape}')
        if tensors[name].dtype.name not in ('float32', 'bfloat16', 'float16', 'float64', 'float8_e5m2'):
            raise UserError(f'{source}: {name} is {tensors[name].dtype}; floating point of 16 bits or more can be '
                            'loaded, E5M2, MXFP4, and E4M3 with scales')


def refuse_mlx(tensors, source):
    """Raises UserError for the weights that MLX quantizes: several numbers in 32 bits, with scales and biases."""
    for name, x in tensors.items():
        scales = f'{name.removesuffix("weight")}scales'
        if name.endswith('.weight') and scales in tensors and x.dtype.name == 'uint32':
            raise UserError(f'{source} is of MLX, quantized ({name} with {scales}), which only MLX computes; take the '
                            'model that it was made from, or where mlx-lm is installed: mlx_lm.convert --dequantize '
                            '--hf-path THIS --mlx-path NEW')


def common_dtype(arrays):
    """The one of DTYPES that all arrays have, or 'float32'."""
    names = {x.dtype.name for x in arrays}
    return names.pop() if len(names) == 1 and names <= set(DTYPES) else 'float32'


def aligned_empty(shape, dtype):
    """np.empty at a multiple of 64 bytes: a CPU device takes such an array over, and copies others."""
    n_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(n_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start:start + n_bytes].view(dtype).reshape(shape)


PUBLISHED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # openai-community/<name> on the Hugging Face hub
ADAPTER_PATH = 'adapter_path'  # a file in the folder of open_adapter
WEIGHT_FILES = ('model.safetensors', 'model.safetensors.index.json', 'pytorch_model.bin',
                'pytorch_model.bin.index.json', GGUF_PATH, ADAPTER_PATH)  # of a folder


HUB_FILES = ('*.json', '*.safetensors', '*.jinja',  # of a model
             'merges.txt', 'vocab.txt', '*.model', '*.tiktoken')  # that tell a tokenizer without a tokenizer.json
HUB_FILES_OF_TORCH = (*HUB_FILES, 'pytorch_model*.bin', 'adapter_model.bin')  # of one without safetensors


def local_path(path_or_name, files=HUB_FILES, base=''):
    """The path itself, or the local folder of the hub's model of that name, downloaded (these files of it) unless it
    is in the hub's cache, or the folder in which a GGUF file or an adapter of peft is opened.

    base: where the model of an adapter is; '' is where its adapter_config.json says."""
    path = os.path.expanduser(path_or_name)
    if os.fspath(path).endswith('.gguf'):
        path = open_gguf(os.path.abspath(path))
    else:
        path = find_on_hub(path_or_name, files)
    if is_adapter(path):
        return open_adapter(os.path.abspath(path), base)
    if base:
        raise UserError(f'base is for a LoRA run or an adapter of peft, and {path_or_name} is neither')
    return path


def is_hub_name(name):
    """Whether this may be the name of a model on Hugging Face's hub."""
    return name in PUBLISHED or re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None


def download(repo, files):
    """The folder in the hub's cache of these files of a model, downloaded unless the model is there. The cache may lack
    its weights: a tokenizer alone was asked for, or the weights are none of HUB_FILES."""
    from huggingface_hub import snapshot_download
    logging.getLogger('huggingface_hub').setLevel(logging.ERROR)  # it would report every retry
    try:
        folder = snapshot_download(repo, allow_patterns=files, local_files_only=True)
    except FileNotFoundError:
        folder = snapshot_download(repo, allow_patterns=files)
    if files != HUB_FILES or has_weights(folder):
        return folder
    folder = snapshot_download(repo, allow_patterns=files)
    return folder if has_weights(folder) else snapshot_download(repo, allow_patterns=HUB_FILES_OF_TORCH)


def has_weights(folder):
    """Whether a folder has files of weights, of a model or of an adapter."""
    return any(name.endswith(('.safetensors', '.bin')) for name in os.listdir(folder))


def find_on_hub(path_or_name, files):
    """local_path of a folder, a file or a name, as it is there."""
    path = os.path.expanduser(path_or_name)
    if not is_hub_name(path_or_name) or os.path.exists(path):
        return path
    repo = f'openai-community/{path_or_name}' if path_or_name in PUBLISHED else path_or_name
    try:
        return download(repo, files)
    except Exception as error:  # no network, no such package, full disk, ...
        reason = str(error).split('\n')[0]
        raise UserError(
            f'cannot download {path_or_name} ({type(error).__name__}: {reason}). Put config.json and model.safetensors '
            f'of {repo}, Hugging Face hub, into a folder by hand and give its path instead') from None


made_folders = {}  # {the folder of an adapter: function that returns {name: array}}: a stranger's is none of them


@functools.cache  # one folder for each adapter
def open_adapter(adapter, base):
    """The folder with the config.json of an adapter's model and the tokenizer of either, until this process ends. The
    model's weights with the adapter's updates are made when they are read.

    Raises UserError for settings that are not computed here, and if the model is not found; see local_path."""
    settings = read_adapter_config(adapter)
    file = find_adapter_file(adapter)
    model = find_base(adapter, settings, base)
    config_path = find_config_json(model)
    if config_path is None or os.path.exists(os.path.join(model, GGUF_PATH)):
        raise UserError(f'{adapter} updates {model}, which is no folder of Hugging Face; name that with --base=FOLDER')
    config = read_json(config_path)
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = os.path.join(made, os.path.basename(adapter))  # which messages name
    os.mkdir(folder)
    has_tokenizer = os.path.exists(os.path.join(adapter, 'tokenizer.json'))
    copy_tokenizer_files(adapter if has_tokenizer else os.path.dirname(config_path), folder)
    generation = regular_file(os.path.dirname(config_path), 'generation_config.json')
    if os.path.exists(generation) and not os.path.exists(os.path.join(folder, 'generation_config.json')):
        shutil.copyfile(generation, os.path.join(folder, 'generation_config.json'))
    write_json(os.path.join(folder, 'config.json'), config)
    write_json(os.path.join(folder, ADAPTER_PATH), {'path': adapter})

    def read():
        weights = weight_file(model)
        quantization = config.get('quantization_config') or {}
        tensors = dequantize_lazily(read_tensors(weights), quantization.get('weight_block_size', [128, 128]), weights)
        return merge_adapter(tensors, read_weight_file(file), settings, config.get('model_type'), file)

    made_folders[folder] = read
    return folder


def find_base(adapter, settings, base):
    """The folder of an adapter's model: `base`, else what adapter_config.json names, which is a path, a folder of that
    name in or beside the adapter's, or on the hub."""
    own_weights = [name for name in WEIGHT_FILES if os.path.exists(os.path.join(adapter, name))]
    if base and os.path.realpath(os.path.expanduser(base)) == os.path.realpath(adapter) and own_weights:
        return adapter
    if own_weights and not base:
        raise UserError(f'{adapter} holds an adapter and {own_weights[0]}: if that is the model that the adapter '
                        'updates, give --base=FOLDER, too; if it is merged already, move adapter_config.json away')
    if base:
        return local_path(base)
    named = settings.get('base_model_name_or_path')
    if not isinstance(named, str) or not named or '\0' in named:
        raise UserError(f'{adapter} does not say which model it updates; name it with --base=FOLDER')
    name = os.path.basename(os.path.normpath(named))
    for path in (os.path.expanduser(named), os.path.join(adapter, name), os.path.join(os.path.dirname(adapter), name)):
        if os.path.exists(path) and not is_adapter(path):
            return local_path(path)
    if not is_hub_name(named):
        raise UserError(f'{adapter} updates {printable(named)}, which does not exist; name its place with '
                        '--base=FOLDER')
    return local_path(named)


def copy_tokenizer_files(source, folder):
    """Copies what describes a model's tokenizer and its use, no config.json and nothing of the weights."""
    for file in os.listdir(source):
        is_other = file == 'config.json' or file.startswith('adapter_') or 'safetensors' in file or '.bin.' in file
        if file.endswith(('.json', '.jinja', '.model')) and not is_other or file in ('merges.txt', 'vocab.txt'):
            shutil.copyfile(regular_file(source, file), os.path.join(folder, file))


def weight_file(path):
    """The file that holds or lists the weights of a folder, or the path itself. Raises UserError if there is none."""
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        for name in (*WEIGHT_FILES, 'ckpt.pt'):
            file = regular_file(path, name)
            if os.path.exists(file):
                return file
        raise UserError(f'{path} holds no weights that can be read: none of {", ".join(WEIGHT_FILES[:4])}, ckpt.pt')
    raise UserError(f'{path} does not exist; give a folder, a nanoGPT ckpt.pt, or one of {", ".join(PUBLISHED)}')


def read_tensors(file):
    """{name: array} of one of WEIGHT_FILES."""
    if os.path.basename(file) == GGUF_PATH:
        return gguf_tensors(os.path.dirname(file))
    if os.path.basename(file) == ADAPTER_PATH:
        if os.path.dirname(file) not in made_folders:
            raise UserError(f"{file} is not of this program; give the adapter's folder")
        return made_folders[os.path.dirname(file)]()
    if file.endswith('.json'):
        return read_shards(file)
    return read_weight_file(file)


def read_weight_file(file):
    """{name: array} of a pytorch_model.bin or safetensors file, or of a shard."""
    return read_state_dict(file) if file.endswith('.bin') else read_safetensors(file)


def require_keys(keys, values, source, what):
    """Raises UserError unless `values` is a dict with all `keys`."""
    if missing := [key for key in keys if key not in values] if isinstance(values, dict) else ['keys']:
        raise UserError(f'{source} lacks {", ".join(missing)}, so it is not {what}')


SAFETENSORS_DTYPES = {
    'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16', 'F8_E4M3': 'float8_e4m3fn',
    'F8_E5M2': 'float8_e5m2', 'F8_E8M0': 'float8_e8m0fnu', 'I64': 'int64', 'I32': 'int32', 'I16': 'int16',
    'I8': 'int8', 'U64': 'uint64', 'U32': 'uint32', 'U16': 'uint16', 'U8': 'uint8', 'BOOL': 'bool'}


def read_safetensors(path):
    """{name: array}, memory-mapped. The library checks the file; its numpy reader knows neither bfloat16 nor float8."""
    try:
        with safetensors.safe_open(path, 'numpy'):
            pass
        file = np.memmap(path, np.uint8, 'r')
        start = 8 + int.from_bytes(file[:8], 'little')
        header, data = json.loads(bytes(file[8:start])), file[start:]
        header.pop('__metadata__', None)
        tensors = {}
        for name, x in header.items():
            if x['dtype'] not in SAFETENSORS_DTYPES:
                raise UserError(f"{path}: {printable(name)} is of the type {x['dtype']}, which cannot be read; "
                                f'known are {", ".join(SAFETENSORS_DTYPES)}')
            dtype = jnp.dtype(SAFETENSORS_DTYPES[x['dtype']])
            tensors[name] = data[slice(*x['data_offsets'])].view(dtype).reshape(x['shape'])
        return tensors
    except UserError:
        raise
    except Exception as error:  # safetensors' own, or OSError
        reason = printable(str(error))
        raise UserError(f'cannot read {path} ({reason}); if it is damaged, copy or download it again') from None


def read_shards(index_file):
    """{name: array} of all files that an index names."""
    index = read_json(index_file)
    require_keys(['weight_map'], index, index_file, 'an index of shards')
    require_keys([], index['weight_map'], f"{index_file}'s weight_map", 'an index of shards')
    tensors = {}
    for file in sorted(set(map(str, index['weight_map'].values()))):
        path = regular_file(os.path.dirname(index_file), file)
        if not os.path.exists(path):
            raise UserError(f'{index_file} names {printable(file)}, which is not beside it; copy or download that '
                            'file, too')
        tensors |= read_weight_file(path)
    return tensors


def write_shards(folder, shapes, make_tensor, dtype, shard_bytes):
    """Writes the tensors make_tensor(name) as model.safetensors, or as several files of at most shard_bytes with an
    index; shard_bytes is exceeded by a tensor that is larger. shapes: {name: shape}."""
    n_bytes = {name: math.prod(shapes[name]) * jnp.dtype(dtype).itemsize for name in sorted(shapes)}
    shards, size = [[]], 0
    for name in n_bytes:
        if shards[-1] and size + n_bytes[name] > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n_bytes[name]
    weight_map = {}
    for i, names in enumerate(shards, start=1):
        file = f'model-{i:05}-of-{len(shards):05}.safetensors' if len(shards) > 1 else 'model.safetensors'
        write_safetensors(os.path.join(folder, file), {name: shapes[name] for name in names}, make_tensor, dtype)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_json(os.path.join(folder, 'model.safetensors.index.json'),
                   {'metadata': {'total_size': sum(n_bytes.values())}, 'weight_map': weight_map})


def write_safetensors(path, shapes, make_tensor, dtype):
    """A safetensors file of the tensors make_tensor(name), each made when it is written: memory holds one at a time."""
    code = next(code for code, name in SAFETENSORS_DTYPES.items() if name == dtype)
    header, end = {'__metadata__': {'format': 'pt'}}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * jnp.dtype(dtype).itemsize
        header[name] = {'dtype': code, 'shape': shape, 'data_offsets': [start, end]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as f:
        f.write(len(text).to_bytes(8, 'little') + text)
        for name in shapes:
            f.write(make_tensor(name).view(np.uint8).data if shapes[name] else make_tensor(name).tobytes())


class MXFP4(NamedTuple):
    """Experts [E, in, out] as gpt-oss packs them: 4 bits a number, and 32 numbers along `in` share an exponent.

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
        values = np.float32([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6])
        codes = np.stack([self.blocks[e] & 15, self.blocks[e] >> 4], axis=-1)
        exponents = self.scales[e].astype(np.int32)[..., None, None] - 127
        numbers = np.ldexp(values[codes], exponents)  # [out, in / 32, 16, 2]
        return numbers.reshape(len(numbers), -1).T[tuple(part)]


class ScaledBlocks(NamedTuple):
    """A matrix in DeepSeek's float8: weight [out, in] times one scale per block. It dequantizes when it is indexed."""
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


def dequantize_lazily(tensors, block, source):
    """Replaces each quantized tensor and its scales by one object that dequantizes when it is indexed."""
    result = dict(tensors)
    for name in tensors:
        scales_name = name.removesuffix('blocks') + 'scales'
        if name.endswith('_blocks') and scales_name in tensors:
            blocks, scales = result.pop(name), result.pop(scales_name)
            if blocks.ndim != 4 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
                raise UserError(f'{source}: {name} {blocks.shape} and its scales {scales.shape} are not MXFP4')
            result[name.removesuffix('_blocks')] = MXFP4(blocks, scales)
        weight_name = name.removesuffix('_scale_inv')
        if name.endswith('.weight_scale_inv') and weight_name in tensors:
            scale, weight = result.pop(name), tensors[weight_name]
            if scale.shape != tuple(-(-n // size) for n, size in zip(weight.shape, block)):
                raise UserError(f'{source}: {name} {scale.shape} does not fit {weight_name} {weight.shape} in blocks '
                                f'of {block}')
            result[weight_name] = ScaledBlocks(weight, scale, tuple(block))
    return result
