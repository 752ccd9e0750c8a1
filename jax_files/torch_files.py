"""Files of torch.save, read without torch and without running what they ask for.

Such a file is a zip archive of a pickle and of the bytes of its storages, the memory behind
tensors.
"""
import io
import math
import os
import pickle
import re
import sys
import zipfile
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_flags import UserError, printable

MAX_PICKLE = 2**24  # bytes; a pickle has about 300 bytes for each tensor
MAX_DIMENSIONS = 32  # of a tensor


def read_torch_checkpoint(path):
    """Returns what torch.save wrote to `path`, with numpy arrays in place of tensors, and runs
    nothing that the file asks for.

    The arrays are read-only, and tensors that shared memory still do. Raises UserError for a
    damaged file, for the format of torch before 1.6, and for a file that holds anything but
    containers, numbers, strings and tensors."""
    try:
        # A zip archive holds a pickle and the bytes of the tensors.
        with open(path, 'rb') as f:
            start = f.read(4)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                check_archive(archive, path)
                return TorchUnpickler(archive, path).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        reason = printable(str(error)) or type(error).__name__
        raise UserError(f'cannot read {path} ({reason}); if it is damaged, copy or download it '
                        'again') from None

    # It is no zip archive. Its first bytes tell what it is.
    if start == b'PK\3\4':
        raise UserError(f'{path} is cut off; copy or download it again')
    if start[:1] == b'\x80':
        raise UserError(f'{path} was not loaded: it is a pickle without the zip container of torch '
                        '>= 1.6; where torch is installed, convert it: '
                        'torch.save(torch.load(path, weights_only=True), path)')
    raise UserError(f'{path} is not a file of torch.save')


def read_state_dict(path):
    """Returns {name: array} of a file of torch.save that holds tensors by their names, such as
    pytorch_model.bin."""
    tensors = read_torch_checkpoint(path)
    if not is_state_dict(tensors):
        raise UserError(f'{path} does not hold a state dict, names with their tensors')
    return tensors


def is_state_dict(tensors):
    """Returns whether an object of read_torch_checkpoint is a dict of names and arrays."""
    if not isinstance(tensors, dict):
        return False
    for name, x in tensors.items():
        if type(name) is not str or type(x) is not np.ndarray:
            return False
    return True


def check_archive(archive, path):
    """Raises UserError unless everything in a zip archive is as large as it says, and together not
    larger than the file.

    torch.save compresses nothing: what is small on disk and large in memory is not its work."""
    total = 0
    for entry in archive.infolist():
        is_compressed = entry.compress_type != zipfile.ZIP_STORED
        if is_compressed or entry.file_size != entry.compress_size:
            raise UserError(f'{path} was not loaded: {entry.filename!r} in it is compressed, which '
                            'torch.save does not do; save the checkpoint again')
        total += entry.file_size
    if total > os.path.getsize(path):
        raise UserError(f'{path} was not loaded: what it holds is larger than the file; copy or '
                        'download it again')


class Storage(NamedTuple):
    """The memory behind one or more tensors. A pickle can make one only through
    `persistent_load`."""
    data: bytes
    dtype: np.dtype


class StateDict(dict):
    """Stands for OrderedDict, and drops the attribute `_metadata` that torch sets on it."""

    def __setstate__(self, state):
        pass


class Instructions(dict):
    """The instructions that a pickle of tensors needs, {code: method}. Others can ask for any
    memory."""
    NAMES = (
        # the program, and what it remembers
        'PROTO', 'FRAME', 'MARK', 'STOP', 'BINPUT', 'LONG_BINPUT', 'MEMOIZE', 'BINGET',
        'LONG_BINGET',
        # numbers and texts
        'NONE', 'NEWTRUE', 'NEWFALSE', 'BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT',
        'BINUNICODE', 'SHORT_BINUNICODE',
        # containers
        'EMPTY_DICT', 'EMPTY_LIST', 'EMPTY_TUPLE', 'TUPLE', 'TUPLE1', 'TUPLE2', 'TUPLE3', 'APPEND',
        'APPENDS', 'SETITEM', 'SETITEMS',
        # calls, of the names that find_class knows
        'GLOBAL', 'STACK_GLOBAL', 'REDUCE', 'BUILD', 'BINPERSID')

    def __init__(self, path):
        super().__init__()
        for name in self.NAMES:
            code = getattr(pickle, name)[0]
            self[code] = pickle._Unpickler.dispatch[code]

        # These check what they are given.
        self[pickle.SETITEM[0]] = TorchUnpickler.set_item
        self[pickle.SETITEMS[0]] = TorchUnpickler.set_items
        self[pickle.BUILD[0]] = TorchUnpickler.build
        self.path = path

    def __missing__(self, code):
        raise UserError(f'{self.path} was not loaded: its pickle has the instruction '
                        f'{bytes([code])!r}, which tensors do not need; save the checkpoint again')


class TorchUnpickler(pickle._Unpickler):
    """Reads the pickle of a file of torch.save.

    A pickle is a program that may call anything that find_class returns. This one knows only the
    names that tensors need, and returns its own class methods (on which a pickle cannot set
    attributes), a builtin type and strings.

    It is the library's reader that is written in Python: the one in C makes a list as long as a
    number in the file says, and crashes on the hash of a key that is nested deeply."""

    # {the name of a class in torch: the dtype of its storages}
    STORAGES = {
        'FloatStorage': 'float32',
        'DoubleStorage': 'float64',
        'HalfStorage': 'float16',
        'BFloat16Storage': 'bfloat16',
        'LongStorage': 'int64',
        'IntStorage': 'int32',
        'ShortStorage': 'int16',
        'CharStorage': 'int8',
        'ByteStorage': 'uint8',
        'BoolStorage': 'bool',
    }

    def __init__(self, archive, path):
        # All files in the archive are in one folder.
        names = archive.namelist()
        pickles = [name for name in names if re.fullmatch(r'[^/]+/data\.pkl', name)]
        if len(pickles) != 1:
            raise UserError(f'{path} is a zip file, but not one of torch.save: it has no data.pkl')
        self.archive = archive
        self.path = path
        self.folder = pickles[0].removesuffix('data.pkl')
        self.storages = {}  # {key: bytes} of those that were read
        self.dispatch = Instructions(path)

        # Torch before 2.1 did not write its byte order; it was this machine's.
        byteorder = self.folder + 'byteorder'
        self.swapped = byteorder in names and archive.read(byteorder).decode() != sys.byteorder

        if archive.getinfo(pickles[0]).file_size > MAX_PICKLE:
            raise UserError(f'{path} was not loaded: its data.pkl is larger than that of any model')
        super().__init__(io.BytesIO(archive.read(pickles[0])))

    def find_class(self, module, name):
        """Returns what stands for `module.name` in this pickle."""
        # All that a file of tensors needs.
        allowed = {
            ('collections', 'OrderedDict'): self.new_dict,
            ('torch', 'Size'): tuple,
            ('torch._utils', '_rebuild_tensor_v2'): self.rebuild_tensor,
            ('torch._utils', '_rebuild_parameter'): self.rebuild_parameter,
        }
        for storage, dtype in self.STORAGES.items():
            allowed['torch', storage] = dtype
        if (module, name) not in allowed:
            asked = f'{module}.{name}'
            raise UserError(f'{self.path} was not loaded: it asks to run {asked!r}, which tensors '
                            'do not need and which was not run; save the checkpoint again without '
                            'it')
        return allowed[module, name]

    def persistent_load(self, pid):
        """Returns the Storage that a pickle names. Raises ValueError for one that is not there, or
        is shorter than the pickle says."""
        # A pickle can put anything here.
        kind, dtype, key, _, count = pid  # the fourth is the device
        if kind != 'storage' or dtype not in self.STORAGES.values():
            raise ValueError('malformed storage')
        if type(key) is not str or type(count) is not int:
            raise ValueError('malformed storage')

        # Several tensors may share a storage, which is read once.
        dtype = jnp.dtype(dtype)
        if key not in self.storages:
            data = self.archive.read(f'{self.folder}data/{key}')
            if self.swapped:
                data = np.frombuffer(data, f'u{dtype.itemsize}').byteswap().tobytes()
            self.storages[key] = data
        data = self.storages[key]
        n_bytes = count * dtype.itemsize
        if len(data) < n_bytes:
            raise ValueError(f'storage {key} has {len(data)} bytes instead of {n_bytes}')
        return Storage(data, dtype)

    def set_item(self):
        """Does the instruction SETITEM: the stack holds a dict, a key and a value."""
        value = self.stack.pop()
        key = self.stack.pop()
        self.add_items([(key, value)])

    def set_items(self):
        """Does the instruction SETITEMS: the stack holds a dict, a mark, keys and values."""
        items = self.pop_mark()
        self.add_items(zip(items[::2], items[1::2], strict=True))

    def add_items(self, items):
        """Puts items into the dict on top of the stack."""
        target = self.stack[-1]
        if type(target) not in (dict, StateDict):
            raise ValueError('items of what is no dict')
        for key, value in items:
            check_key(key)
            target[key] = value

    def build(self):
        """Does the instruction BUILD, which sets attributes."""
        self.stack.pop()  # the state, of which a StateDict has no use
        if type(self.stack[-1]) is not StateDict:
            raise ValueError('attributes of what has none')

    @classmethod
    def new_dict(cls, items=()):
        """Stands for collections.OrderedDict."""
        items = [(key, value) for key, value in items]
        for key, _ in items:
            check_key(key)
        return StateDict(items)

    @classmethod
    def rebuild_parameter(cls, tensor, requires_grad, backward_hooks):
        """Stands for torch._utils._rebuild_parameter: a parameter is its tensor."""
        return tensor

    @classmethod
    def rebuild_tensor(cls, storage, offset, size, stride, *unused):
        """Stands for torch._utils._rebuild_tensor_v2, and returns an array that views its storage.

        offset and stride count elements. Raises ValueError for a tensor that its storage cannot
        hold."""
        if type(storage) is not Storage or len(size) != len(stride) or len(size) > MAX_DIMENSIONS:
            raise ValueError('malformed tensor')
        if not all(type(n) is int and 0 <= n < 2**63 for n in (offset, *size, *stride)):
            raise ValueError('malformed tensor')
        if 0 in size:
            return np.empty(size, storage.dtype)

        # The last element is in the storage. numpy checks this too, but may overflow.
        itemsize = storage.dtype.itemsize
        last = offset + sum((n - 1) * step for n, step in zip(size, stride))
        if (last + 1) * itemsize > len(storage.data):
            raise ValueError(f'a tensor of shape {tuple(size)} reaches beyond its storage')

        # A stride of 0 would give any shape to a few bytes.
        if math.prod(size) * itemsize > len(storage.data):
            raise ValueError(f'a tensor of shape {tuple(size)} has more elements than its storage')

        byte_offset = offset * itemsize
        byte_strides = [step * itemsize for step in stride]
        return np.ndarray(size, storage.dtype, storage.data, byte_offset, byte_strides)


def check_key(key):
    """Raises ValueError unless the key of a dict is a text or a number: the hash of others may take
    any time."""
    if type(key) not in (str, int, float, bool):
        raise ValueError(f'a key of the type {type(key).__name__}')
