"""Reads files of torch.save (torch 1.6 and newer) without torch, and without running their code.

Such a file is a zip archive. It holds a pickle, and the bytes of the storages, which are the memory
behind tensors.
"""
import collections
import io
import math
import os
import pickle
import zipfile
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_flags import UserError, printable

STORAGES = {
    'FloatStorage': 'float32', 'DoubleStorage': 'float64', 'HalfStorage': 'float16',
    'BFloat16Storage': 'bfloat16', 'LongStorage': 'int64', 'IntStorage': 'int32',
    'ShortStorage': 'int16', 'CharStorage': 'int8', 'ByteStorage': 'uint8', 'BoolStorage': 'bool'}


def read_torch_checkpoint(path):
    """Returns what torch.save wrote to `path`, with read-only numpy arrays in place of tensors. If
    several tensors used the same memory when they were saved, their arrays use the same memory,
    too.

    Raises UserError for a damaged file, for the format of torch before 1.6, and for a file that
    asks for anything but containers, numbers, strings and tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save does not compress: a small file that unpacks to a large one is not its work
            if sum(entry.file_size for entry in archive.infolist()) > os.path.getsize(path):
                raise UserError('what it holds is larger than the file')
            return TorchUnpickler(archive).load()
    except Exception as error:  # a damaged pickle can raise anything
        reason = printable(str(error)) or type(error).__name__
        raise UserError(
            f'{path} was not loaded ({reason}); if it is damaged, copy or download it again; one of '
            'torch before 1.6 is converted by torch.save(torch.load(path, weights_only=True), '
            'path)') from None


def state_dict(tensors, path):
    """Returns `tensors` if it is a state dict, {name: array}. Raises UserError otherwise. path: the
    file that it was read from."""
    is_state_dict = isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(x, np.ndarray) for name, x in tensors.items())
    if not is_state_dict:
        raise UserError(f'{path} does not hold a state dict, names with their tensors')
    return tensors


class Storage(NamedTuple):
    """The memory behind one or more tensors."""
    data: bytes
    dtype: np.dtype


def rebuild_tensor(storage, offset, size, stride, *unused):
    """Takes the place of torch._utils._rebuild_tensor_v2: returns an array that views `storage`, a
    Storage. size: the array's shape. offset, stride: counted in elements. Raises UserError for a
    tensor that reaches beyond its storage."""
    width = storage.dtype.itemsize
    n_elements = len(storage.data) // width
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    is_inside = 0 in size or last < n_elements and all(x >= 0 for x in (offset, *size, *stride))
    if not is_inside or math.prod(size) > n_elements:  # numpy's own check may overflow
        raise UserError(f'a tensor {size} with steps of {stride} is larger than its storage, '
                        f'{n_elements} elements')
    strides = [step * width for step in stride]
    return np.ndarray(size, storage.dtype, storage.data, offset * width, strides)


def rebuild_parameter(tensor, *unused):
    """Takes the place of torch._utils._rebuild_parameter: returns the tensor."""
    return tensor


class TorchUnpickler(pickle.Unpickler):
    """Unpickles tensors. A pickle may call what find_class returns, and nothing else."""
    ALLOWED = {
        ('collections', 'OrderedDict'): collections.OrderedDict,
        ('torch', 'Size'): tuple,
        ('torch._utils', '_rebuild_tensor_v2'): rebuild_tensor,
        ('torch._utils', '_rebuild_parameter'): rebuild_parameter,
        **{('torch', name): dtype for name, dtype in STORAGES.items()}}

    def __init__(self, archive):
        """Reads the pickle in `archive`, an open ZipFile. Raises UserError unless the archive holds
        exactly one data.pkl in a folder."""
        self.archive = archive
        pickles = [name for name in archive.namelist() if name.endswith('/data.pkl')]
        if len(pickles) != 1:
            raise UserError('it holds no data.pkl, so it is not a file of torch.save')
        self.folder = pickles[0].removesuffix('data.pkl')
        self.order = '<'
        if f'{self.folder}byteorder' in archive.namelist():
            self.order = {b'little': '<', b'big': '>'}[archive.read(f'{self.folder}byteorder')]
        self.storages = {}  # {key: Storage}, which tensors share
        super().__init__(io.BytesIO(archive.read(pickles[0])))

    def find_class(self, module, name):
        """Returns the object in ALLOWED for a name in a pickle. Raises UserError for any other
        name, because the pickle could call the object of that name."""
        if (module, name) not in self.ALLOWED:
            raise UserError(f'it asks to run {module}.{name}, which tensors do not need and which '
                            'was not run; save the checkpoint again without it')
        return self.ALLOWED[module, name]

    def persistent_load(self, pid):
        """Returns the Storage for `pid`: ('storage', dtype, key, device, number of elements).
        Raises UserError for an unknown dtype, or if the storage does not have the number of
        elements in `pid`."""
        _, dtype, key, _, n_elements = pid
        if dtype not in STORAGES.values():
            raise UserError(f'a storage of the type {dtype!r:.80}')
        kind = jnp.dtype(dtype).newbyteorder(self.order)
        if key not in self.storages:
            self.storages[key] = Storage(self.archive.read(f'{self.folder}data/{key}'), kind)
        if len(self.storages[key].data) != n_elements * kind.itemsize:
            raise UserError(f'storage {key} has another size than it should have')
        return self.storages[key]
