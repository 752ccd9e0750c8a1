"""The folders of data sets: meta.json, token files (uint16 or uint32, no header) and masks."""
import json
import math
import os
import re
import sys
import threading
import weakref
from pathlib import Path

import jax
import numpy as np

from jax_files.tokenizers import locate_tokenizer, same_tokens
from jax_flags import UserError, check_url, is_url, plain_file, read_text


LARGEST_VOCABULARY = 2**22  # of a data set: the largest that are known have a million tokens


def relative_path(path):
    """Returns the path from the current folder, short in messages; unchanged if it is on another
    drive (Windows)."""
    try:
        return Path(os.path.relpath(path))
    except ValueError:
        return Path(path)


class DataChanged(UserError):
    """A data set has changed while it was read."""


class TokenFile:
    """The numbers of a file without a header, as an array [n_numbers], or [n_rows, row_length], of
    which slices and rows are read when they are asked for. What does not fill a row is left out.

    It is not mapped into memory: a mapped file that is cut short ends the process by a signal,
    without a word. The file stays the one that was opened, also if another one gets its name."""

    lock = threading.Lock()  # of the position in a file, where there is no pread (Windows)

    def __init__(self, path, dtype, row_length=None):
        self.path = path
        self.dtype = np.dtype(dtype)
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, 'O_BINARY', 0))
        weakref.finalize(self, os.close, self.descriptor)
        size = os.fstat(self.descriptor).st_size // self.dtype.itemsize
        self.shape = (size // row_length, row_length) if row_length else (size,)
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        """Reads the numbers, or rows, of a slice without a step, of an integer, or of an array of
        integers [n]."""
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return self.read([start], max(0, stop - start))[0]
        if np.ndim(index) == 0:
            return self.read([range(len(self))[index]], 1)[0, 0]
        return self.read(index, 1)[:, 0]

    def __array__(self, dtype=None, copy=None):
        return np.array(self[:], dtype)

    def tolist(self):
        return self[:].tolist()

    def read(self, starts, n):
        """Reads n numbers from each start on, [len(starts), n], or n rows, [len(starts), n,
        row_length]. Raises DataChanged if the file has become shorter."""
        # Space for all numbers, which is filled as bytes.
        found = np.empty((len(starts), n, *self.shape[1:]), self.dtype)
        n_bytes = found[:1].nbytes
        width = self.dtype.itemsize * math.prod(self.shape[1:])
        buffer = memoryview(found.reshape(-1).view(np.uint8))

        # A read may return less than was asked for: it goes on until all is there.
        for i, start in enumerate(np.asarray(starts).tolist()):
            part = buffer[i * n_bytes:(i + 1) * n_bytes]
            offset = start * width
            while part:
                n_read = self.read_into(part, offset)
                if not n_read:
                    size = os.fstat(self.descriptor).st_size
                    raise DataChanged(
                        f'{self.path} was cut short while it was read: it has {size:,} bytes now, '
                        f'{self.size * self.dtype.itemsize:,} at the start')
                part = part[n_read:]
                offset += n_read
        return found

    def read_into(self, buffer, offset):
        """Fills the buffer with bytes of the file from there on; returns how many there were."""
        if hasattr(os, 'preadv'):
            return os.preadv(self.descriptor, (buffer,), offset)
        with self.lock:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            content = os.read(self.descriptor, len(buffer))
        buffer[:len(content)] = content
        return len(content)


def remedy_for(data_dir):
    """Says what to do about a data set that is missing or damaged."""
    prepare = data_dir / 'prepare.py'
    if prepare.exists():
        return f'run: python {prepare}'
    return f'there is no {prepare} to make it; see "Your own text" in README.md'


# without a meta.json
NANOGPT_META = {'vocab_size': 50257, 'dtype': 'uint16', 'tokenizer': {'kind': 'gpt2'}}

# the least and the largest value of the integers of meta.json; all but the first may be missing
META_LIMITS = {
    'vocab_size': (1, LARGEST_VOCABULARY), 'row_length': (2, 2**31), 'max_id': (0, 2**32),
    'train_tokens': (0, 2**62), 'val_tokens': (0, 2**62)}


def check_meta(meta):
    """Raises ValueError, or what its types raise, for what a meta.json cannot say."""
    # Numbers, in the ranges that make sense.
    for name, (least, largest) in META_LIMITS.items():
        value = meta[name]
        is_missing = value is None and name != 'vocab_size'
        if not is_missing and not (type(value) is int and least <= value <= largest):
            raise ValueError(f'{name} {value!r:.100} is not a number from {least} to {largest:,}')

    # Names, of those that are known.
    if meta['dtype'] not in ('uint16', 'uint32'):
        raise ValueError(f'dtype {meta["dtype"]!r:.100} is not uint16 or uint32')
    if meta['kind'] not in (None, 'chats', 'pairs'):
        raise ValueError(f'kind {meta["kind"]!r:.100} is neither chats nor pairs')

    # The description of a tokenizer, with what its kind needs.
    tokenizer = meta['tokenizer']
    is_known = tokenizer['kind'] == 'gpt2'
    if tokenizer['kind'] == 'char':
        chars = tokenizer['chars']
        is_known = isinstance(chars, str) and len(chars) == meta['vocab_size']
        chars.encode()  # half a character cannot be written
    if tokenizer['kind'] == 'folder':
        is_known = isinstance(tokenizer['path'], str) and '\0' not in tokenizer['path']
        tokenizer['path'].encode()  # as above
    if not is_known:
        raise ValueError(
            'tokenizer is none of {"kind": "gpt2"}, {"kind": "char", "chars": all characters}, '
            '{"kind": "folder", "path": where its tokenizer.json is}')


def load_dataset_meta(data_dir):
    """Reads what meta.json says of a data set: {'vocab_size', 'dtype', 'tokenizer', 'max_id',
    'train_tokens', 'val_tokens', 'kind', 'row_length'}, of which the last five are None if it lacks
    them. Data of the kinds 'chats' and 'pairs' have masks.

    A folder without meta.json is nanoGPT's: uint16 tokens of GPT-2's BPE. Raises UserError for a
    missing data set and a damaged meta.json."""
    data_dir = relative_path(data_dir)
    remedy = remedy_for(data_dir)
    path = data_dir / 'meta.json'
    meta = dict(NANOGPT_META)
    # as prepare.py counts
    counted = dict.fromkeys(('max_id', 'train_tokens', 'val_tokens', 'kind', 'row_length'))

    # What the file says, checked.
    if path.exists():
        text = read_text(plain_file(path))
        try:
            found = json.loads(text)
            meta = {key: found[key] for key in meta}
            counted = {key: found.get(key) for key in counted}
            check_meta({**meta, **counted})
            meta['tokenizer'] = locate_tokenizer(meta['tokenizer'], data_dir)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f'{path} is damaged ({error}); {remedy}') from None
    # Without one: nanoGPT's older form, nothing at all, or GPT-2's tokens.
    elif (data_dir / 'meta.pkl').exists():
        program = relative_path(Path(__file__).parents[1] / 'data' / 'convert_meta.py')
        raise UserError(
            f'{data_dir / "meta.pkl"} is a pickle, which can run programs and is not loaded; if '
            f'you trust it, convert it once: {sys.executable} {program} {data_dir}')
    elif not (data_dir / 'train.bin').exists():
        raise UserError(f'there is no {data_dir / "train.bin"}; {remedy}')
    return {**meta, **counted}


def load_dataset(data_dir, block_size):
    """Opens data_dir/{train,val}.bin as prepare.py wrote them. Where meta.json holds the largest
    id, max_id, and the numbers of tokens, only the sizes are checked; otherwise all tokens are
    read, each process its share.

    Returns ({'train': TokenFile, 'val': TokenFile}, vocab_size, tokenizer description), see
    load_dataset_meta; a file is [n_tokens], or [n_rows, block_size + 1] if the data set was
    prepared in rows. Raises UserError for missing, short or damaged files, rows of another length,
    and token ids outside the vocabulary."""
    data_dir = relative_path(data_dir)
    meta = load_dataset_meta(data_dir)

    # Rows have a length, which is that of the training.
    row_length = meta['row_length']
    if row_length not in (None, block_size + 1):
        raise UserError(
            f'{data_dir} has rows of {row_length} tokens, one more than a block_size that fits; '
            f'prepare it with --rows={block_size}, or use another --block_size')

    # The two files, each compared with what meta.json says of it.
    splits = {}
    for split in ('train', 'val'):
        path = data_dir / f'{split}.bin'
        check_size(path, meta, split, block_size)
        check_largest_id(path, meta, split)
        splits[split] = TokenFile(path, meta['dtype'], row_length)
    return splits, meta['vocab_size'], meta['tokenizer']


def check_size(path, meta, split, block_size):
    """Raises UserError unless the file of a split has as many tokens as its meta.json says, and
    more than block_size."""
    remedy = remedy_for(path.parent)
    if not path.exists():
        raise UserError(f'there is no {path}; {remedy}')

    # A whole number of tokens, and at least one sequence.
    width = np.dtype(meta['dtype']).itemsize
    size, rest = divmod(plain_file(path).stat().st_size, width)
    if rest:
        raise UserError(
            f'{path} has {size * width + rest} bytes, not a multiple of {width} ({meta["dtype"]}): '
            f'it is cut short or of another type; {remedy}')
    if size <= block_size:
        raise UserError(
            f'{path} has {size} tokens, and block_size={block_size} needs {block_size + 1}; use '
            'more text or a smaller --block_size')

    # As many as were written.
    n_tokens = meta[f'{split}_tokens']
    if n_tokens not in (None, size):
        raise UserError(
            f'{path} has {size} tokens, its meta.json says {n_tokens}: the file is damaged or of '
            f'another data set; {remedy}')


def check_largest_id(path, meta, split):
    """Raises UserError for a token id outside the vocabulary, which would train silently."""
    largest = meta['max_id']
    if largest is None or meta[f'{split}_tokens'] is None:
        # prepare.py has not counted: each process reads its share of the tokens
        tokens = TokenFile(path, meta['dtype'])
        starts = range(0, len(tokens), 10**7)[jax.process_index()::jax.process_count()]
        largest = max((int(tokens[i:i + 10**7].max()) for i in starts), default=0)
    if largest >= meta['vocab_size']:
        raise UserError(f"{path} has token id {largest}, outside the vocabulary of "
                        f"{meta['vocab_size']}; {remedy_for(path.parent)}")


def load_masks(data_dir, splits):
    """Opens the masks of a data set, data_dir/{train,val}_mask.bin: {split: TokenFile}.

    A mask has a byte for each token: 1 where it counts in the loss, as an assistant's tokens do,
    else 0; in packed rows 2 where a conversation, or the padding, starts. {} for a data set without
    masks, in which all tokens count. Raises UserError for a mask that is missing or of another
    length."""
    paths = {}
    sizes = {}
    for split in splits:
        paths[split] = relative_path(data_dir) / f'{split}_mask.bin'
        if paths[split].exists():
            sizes[split] = plain_file(paths[split]).stat().st_size

    # Both or none, and a byte for each token.
    needs_masks = bool(sizes) or load_dataset_meta(data_dir)['kind'] is not None
    if needs_masks and sizes != {split: tokens.size for split, tokens in splits.items()}:
        raise UserError(f'the masks of {data_dir} are missing or of other tokens; '
                        f'{remedy_for(Path(data_dir))}')

    # Opened as the tokens are: in rows, if these have rows.
    masks = {}
    for split in sizes:
        tokens = splits[split]
        row_length = tokens.shape[1] if tokens.ndim == 2 else None
        masks[split] = TokenFile(paths[split], np.uint8, row_length)
    return masks


def load_ends(path, n_tokens):
    """Reads where the conversations of a split of n_tokens end, int64: increasing, of at least two
    tokens each, an even number. Raises UserError for a file that is missing or says something
    else."""
    damaged = UserError(f'{path} is missing or damaged; {remedy_for(path.parent)}')
    if not path.exists():
        raise damaged

    # A whole number of pairs, in which the last one ends with the file.
    size = path.stat().st_size
    ends = np.fromfile(plain_file(path), np.int64)
    is_whole = size > 0 and size == ends.nbytes and len(ends) % 2 == 0
    # the range first: differences of what lies outside could overflow
    is_inside = is_whole and ends.min() > 0 and ends.max() == ends[-1] == n_tokens
    if not is_inside or np.diff(ends, prepend=0).min() < 2:
        raise damaged
    return ends


# -----------------------------------------------------------------------------
# mixtures of data sets

def parse_mixture(dataset, root):
    """Returns {folder: fraction} for the flag --dataset: a folder, by its name under `root` or its
    path, or a mixture such as 'web:0.7,code:0.3'. Raises UserError for anything else."""
    check_url('dataset', dataset)
    if ':' not in dataset or (Path(root) / dataset).is_dir():
        return {Path(root) / dataset: 1.0}
    is_one_url = is_url(dataset) and dataset.count(':') == 1
    if is_one_url:
        return {dataset_folder(dataset, root): 1.0}

    # Each part is a name and a fraction.
    parts = dataset.split(',')
    shares = {}
    for part in parts:
        found = re.fullmatch(r' *((?:gs://)?[^:]+):([01]?\.\d+|1)', part)
        if found and float(found[2]) >= 1e-6:
            shares[found[1].strip()] = float(found[2])

    # None is left out, named twice, or too much.
    names = {Path(folder).name for folder in shares}
    if len(names) < len(parts) or abs(sum(shares.values()) - 1) > 1e-6:
        raise UserError(
            f'dataset={dataset} must be a folder, or a mixture such as web:0.7,code:0.3 of data '
            'sets with different names, whose fractions are above 0 and sum to 1')
    return {dataset_folder(name, root): fraction for name, fraction in shares.items()}


def dataset_folder(name, root):
    """Returns the folder of a data set, given its name under `root` or its path. That of
    gs://bucket/folder is a copy on this machine, which is fetched if it is not there."""
    check_url('dataset', name)
    if not is_url(name):
        return Path(root) / name
    from jax_files.buckets import fetch_dataset
    return fetch_dataset(name)


def load_mixture_meta(dataset, root):
    """Returns (parse_mixture, load_dataset_meta of its first data set). Raises UserError if another
    cannot be mixed with it."""
    shares = parse_mixture(dataset, root)
    folders = [relative_path(folder) for folder in shares]
    metas = [load_dataset_meta(folder) for folder in shares]
    meta = metas[0]

    # The others have the same tokens, and are no pairs.
    for folder, other in zip(folders[1:], metas[1:]):
        if 'pairs' in (meta['kind'], other['kind']):
            raise UserError('pairs of answers cannot be mixed with other data: give --dataset one '
                            'folder')
        has_same_size = other['vocab_size'] == meta['vocab_size']
        if not has_same_size or not same_tokens(other['tokenizer'], meta['tokenizer']):
            raise UserError(f'{folder} has other tokens than {folders[0]}: prepare both with the '
                            'same --tokenizer')
    return shares, meta
