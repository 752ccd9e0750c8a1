"""Reads the config and the tensors of models that other programs have written. The tensors are in
safetensors or in a file of torch.save, whole or in shards. Dequantizes MXFP4 and float8. Writes
safetensors, whole or in shards."""
import json
import math
import os
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from jax_flags import DTYPES, UserError, ceil_div, printable, read_json, write_json
from jax_hub.families import GPT2_SIZES, make_config, read_config
from jax_hub.folders import find_config_json, local_path, path_inside, read_config_json, weight_file
from jax_hub.torch_files import read_torch_checkpoint, state_dict

FLOATS = ('float32', 'bfloat16', 'float16', 'float64')  # names of dtypes


# -----------------------------------------------------------------------------
# checks of tensors

def check_tensors(tensors, shapes, source):
    """Checks that `tensors` has exactly the names of `shapes`, with these shapes, in floating point
    of 16 bits or more, or in E5M2. Raises UserError otherwise.

    tensors: {name: array}. shapes: {name: shape}. source: the name of the tensors' file, for
    messages."""
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
    """Returns a text with the first eight names of a set, sorted, and how many more there are, such
    as 'a, b, c, d, e, f, g, h and 3 more'."""
    listed = ', '.join(sorted(names)[:8])
    if len(names) > 8:
        listed += f' and {len(names) - 8} more'
    return listed


def refuse_mlx(tensors, source):
    """Raises UserError for weights that MLX has quantized: several numbers in 32 bits, with scales
    and biases. tensors: {name: array}. source: the name of their file, for the message."""
    for name, x in tensors.items():
        scales = f'{name.removesuffix("weight")}scales'
        if name.endswith('.weight') and scales in tensors and x.dtype.name == 'uint32':
            raise UserError(f'{source} is quantized by MLX ({name} with {scales}), and only MLX can '
                            'compute it; take the model that it was made from, or where mlx-lm is '
                            'installed: mlx_lm.convert --dequantize --hf-path THIS --mlx-path NEW')


def common_dtype(arrays):
    """If all arrays have the same dtype, and it is one of DTYPES, returns its name. Otherwise
    returns 'float32'."""
    names = {x.dtype.name for x in arrays}
    if len(names) == 1 and names <= set(DTYPES):
        return names.pop()
    return 'float32'


def require_keys(keys, values, source, what):
    """Checks that `values` is a dict with all `keys`. Raises UserError otherwise.

    source: the file that the values are from. what: the kind of file that it should be."""
    if isinstance(values, dict):
        missing = [key for key in keys if key not in values]
    else:
        missing = ['keys']
    if missing:
        raise UserError(f'{source} lacks {", ".join(missing)}, so it is not {what}')


# -----------------------------------------------------------------------------
# a model on disk

def open_model(path_or_name):
    """Returns (config; family; {name: array}; file of the weights) of a model for load_pretrained.
    family: the model_type of its config.json, or 'nanogpt'. The arrays of safetensors are
    memory-mapped, and quantized arrays dequantize when they are indexed."""
    file = weight_file(local_path(path_or_name))
    source = find_config_json(file)
    if source is None:
        config, tensors = read_nanogpt(file)
        return config, 'nanogpt', tensors, file
    hf = read_config_json(os.path.dirname(source))
    config, family = read_config(hf, source)
    tensors = dequantize_lazily(read_tensors(file), read_block(hf, source), file)
    return config, family, tensors, file


def read_nanogpt(path):
    """Returns (config; {name: array}) of a ckpt.pt that nanoGPT's train.py wrote."""
    checkpoint = read_torch_checkpoint(path)
    require_keys(['model', 'model_args'], checkpoint, path, 'a checkpoint of nanoGPT')
    args = checkpoint['model_args']
    require_keys(GPT2_SIZES, args, f"{path}'s model_args", 'a checkpoint of nanoGPT')
    # nanoGPT's first checkpoints lack the entry; they have biases
    bias = args.get('bias') is not False
    fields = {name: args[name] for name in GPT2_SIZES}
    config = make_config({**fields, 'bias': bias}, path)
    # torch.compile's prefix
    tensors = state_dict(checkpoint['model'], path)
    return config, {name.removeprefix('_orig_mod.'): x for name, x in tensors.items()}


# -----------------------------------------------------------------------------
# reading

def read_tensors(file):
    """Returns {name: array} of a model. file: the path of its weights, one of WEIGHT_FILES."""
    if file.endswith('.json'):
        return read_shards(file)
    return read_weight_file(file)


def read_weight_file(file):
    """Returns {name: array} of a pytorch_model.bin, of a safetensors file, or of a shard."""
    if file.endswith('.bin'):
        return state_dict(read_torch_checkpoint(file), file)
    return read_safetensors(file)


# {a type's name in safetensors: its name in numpy, with ml_dtypes}
SAFETENSORS_DTYPES = {
    'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16',
    'F8_E4M3': 'float8_e4m3fn', 'F8_E5M2': 'float8_e5m2', 'F8_E8M0': 'float8_e8m0fnu',
    'I64': 'int64', 'I32': 'int32', 'I16': 'int16', 'I8': 'int8',
    'U64': 'uint64', 'U32': 'uint32', 'U16': 'uint16', 'U8': 'uint8', 'BOOL': 'bool'}


def read_safetensors(path):
    """Returns {name: array} of a safetensors file, memory-mapped.

    Uses the library safetensors to check the file, but not to read the arrays, because the
    library's numpy reader supports neither bfloat16 nor float8. Raises UserError if the file cannot
    be read or is damaged, or if an array has a dtype that is not in SAFETENSORS_DTYPES."""
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
    """Returns {name: array} of all shards that an index names. index_file: the path of the index, a
    file such as model.safetensors.index.json."""
    # Which file holds which tensor.
    index = read_json(index_file)
    require_keys(['weight_map'], index, index_file, 'an index of shards')
    weight_map = index['weight_map']
    require_keys([], weight_map, f"{index_file}'s weight_map", 'an index of shards')

    tensors = {}
    for file in sorted({str(file) for file in weight_map.values()}):
        path = path_inside(os.path.dirname(index_file), file)
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

    shapes: {name: shape}. make_tensor: returns the numpy array of a name, of the type `dtype`.
    dtype: the name of this type."""
    from huggingface_hub import split_state_dict_into_shards_factory
    itemsize = jnp.dtype(dtype).itemsize
    shards = split_state_dict_into_shards_factory(
        dict(sorted(shapes.items())), max_shard_size=shard_bytes,
        get_storage_size=lambda shape: math.prod(shape) * itemsize,
        filename_pattern='model{suffix}.safetensors')
    for file, names in shards.filename_to_tensors.items():
        shapes_in_file = {name: shapes[name] for name in names}
        write_safetensors(os.path.join(folder, file), shapes_in_file, make_tensor, dtype)
    if shards.is_sharded:
        index = {'metadata': shards.metadata, 'weight_map': shards.tensor_to_filename}
        write_json(os.path.join(folder, 'model.safetensors.index.json'), index)


def write_safetensors(path, shapes, make_tensor, dtype):
    """Writes a safetensors file of the tensors make_tensor(name). Each tensor is made when it is
    written, so that memory holds one tensor at a time.

    shapes: {name: shape}. make_tensor: returns the numpy array of a name, of the type `dtype`.
    dtype: the name of this type."""
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
    """Experts [E, in, out] as gpt-oss packs them, in 4 bits per number: 32 numbers along `in` share
    an exponent. Indexing an MXFP4 with [e, ...] dequantizes expert e to float32 [in, out]."""
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
    """A matrix in DeepSeek's float8: weight [out, in] times one scale per block. Indexing a
    ScaledBlocks dequantizes the whole matrix, then returns the indexed part."""
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
    """Returns the size of the blocks of float8 numbers that share a scale, [rows, columns], by
    default [128, 128].

    config: the content of a config.json. source: the path of the config.json. Raises UserError if
    the config has something else than two whole numbers above 0."""
    block = (config.get('quantization_config') or {}).get('weight_block_size') or [128, 128]
    are_sizes = isinstance(block, list) and len(block) == 2 and all(
        type(size) is int and size > 0 for size in block)
    if not are_sizes:
        raise UserError(f'{source}: weight_block_size should list two numbers above 0, not '
                        f'{block!r:.80}')
    return block


def dequantize_lazily(tensors, block, source):
    """Returns a copy of the dict `tensors` in which each quantized tensor and its scales are
    replaced by one object. Indexing this object dequantizes the tensor.

    tensors: {name: array}. block: (rows, columns) of a block of float8. source: the name of
    the tensors' file, for messages. Raises UserError for scales that do not fit."""
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
