"""Token files, contiguous uint16 or uint32 without a header -> batches, by seed and iteration alone."""
import functools
import json
import math
import os
import re
import sys
import threading
import weakref
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jax_files.tokenizers import locate_tokenizer, same_tokens
from jax_flags import UserError, plain_file, read_text


LARGEST_VOCABULARY = 2**22  # of a data set: the largest that are known have a million tokens


def relative_path(path):
    """The path from the current folder, short in messages; unchanged if it is on another drive (Windows)."""
    try:
        return Path(os.path.relpath(path))
    except ValueError:
        return Path(path)


class DataChanged(UserError):
    """A data set has changed while it was read."""


class TokenFile:
    """The numbers of a file without a header, as an array [n_numbers], or [n_rows, row_length], of which
    slices and rows are read when they are asked for. What does not fill a row is left out.

    Not mapped into memory: a mapped file that is cut short ends the process by a signal, without a
    word. The file stays the one that was opened, also if another one gets its name."""

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
        """The numbers, or rows, of a slice without a step, of an integer, or of an array of integers [n]."""
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
        """[len(starts), n] numbers, or [len(starts), n, row_length] of rows: n from each start on. Raises DataChanged
        if the file has become shorter."""
        found = np.empty((len(starts), n, *self.shape[1:]), self.dtype)
        n_bytes = found[:1].nbytes
        width = self.dtype.itemsize * math.prod(self.shape[1:])
        buffer = memoryview(found.reshape(-1).view(np.uint8))
        for i, start in enumerate(np.asarray(starts).tolist()):
            part = buffer[i * n_bytes:(i + 1) * n_bytes]
            offset = start * width
            while part:
                n_read = self.read_into(part, offset)
                if not n_read:
                    size = os.fstat(self.descriptor).st_size
                    raise DataChanged(f'{self.path} was cut short while it was read: it has {size:,} bytes '
                                      f'now, {self.size * self.dtype.itemsize:,} at the start')
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
    """What to do about a data set that is missing or damaged."""
    prepare = data_dir / 'prepare.py'
    return f'run: python {prepare}' if prepare.exists() else (
        f'there is no {prepare} to make it; see "Your own text" in README.md')


NANOGPT_META = {'vocab_size': 50257, 'dtype': 'uint16', 'tokenizer': {'kind': 'gpt2'}}  # without a meta.json
META_LIMITS = {  # the least and the largest value of the integers of meta.json; all but the first may be missing
    'vocab_size': (1, LARGEST_VOCABULARY), 'row_length': (2, 2**31), 'max_id': (0, 2**32), 'train_tokens': (0, 2**62),
    'val_tokens': (0, 2**62)}


def check_meta(meta):
    """Raises ValueError, or what its types raise, for what a meta.json cannot say."""
    for name, (least, largest) in META_LIMITS.items():
        value = meta[name]
        is_missing = value is None and name != 'vocab_size'
        if not is_missing and not (type(value) is int and least <= value <= largest):
            raise ValueError(f'{name} {value!r:.100} is not a number from {least} to {largest:,}')
    if meta['dtype'] not in ('uint16', 'uint32'):
        raise ValueError(f'dtype {meta["dtype"]!r:.100} is not uint16 or uint32')
    if meta['kind'] not in (None, 'chats', 'pairs'):
        raise ValueError(f'kind {meta["kind"]!r:.100} is neither chats nor pairs')
    tokenizer = meta['tokenizer']
    is_known = tokenizer['kind'] == 'gpt2'
    if tokenizer['kind'] == 'char':
        chars = tokenizer['chars']
        is_known = isinstance(chars, str) and len(chars) == meta['vocab_size']
        chars.encode()  # half a character cannot be written
    if tokenizer['kind'] == 'folder':
        is_known = isinstance(tokenizer['path'], str) and '\0' not in tokenizer['path']
    if not is_known:
        raise ValueError('tokenizer is none of {"kind": "gpt2"}, {"kind": "char", "chars": all characters}, '
                         '{"kind": "folder", "path": where its tokenizer.json is}')


def load_dataset_meta(data_dir):
    """{'vocab_size', 'dtype', 'tokenizer', 'max_id', 'train_tokens', 'val_tokens', 'kind', 'row_length'} of a data set,
    from its meta.json, the last five None if it lacks them; 'chats' and 'pairs' have masks. A folder without meta.json
    is nanoGPT's: uint16 tokens of GPT-2's BPE. Raises UserError for a missing data set and a damaged meta.json."""
    data_dir = relative_path(data_dir)
    remedy = remedy_for(data_dir)
    meta = dict(NANOGPT_META)
    checked = dict.fromkeys(('max_id', 'train_tokens', 'val_tokens', 'kind', 'row_length'))  # as prepare.py counts
    if (data_dir / 'meta.json').exists():
        text = read_text(plain_file(data_dir / 'meta.json'))
        try:
            found = json.loads(text)
            meta = {key: found[key] for key in meta}
            checked = {key: found.get(key) for key in checked}
            check_meta(meta | checked)
            meta['tokenizer'] = locate_tokenizer(meta['tokenizer'], data_dir)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f'{data_dir / "meta.json"} is damaged ({error}); {remedy}') from None
    elif (data_dir / 'meta.pkl').exists():
        program = relative_path(Path(__file__).parents[1] / 'data' / 'convert_meta.py')
        raise UserError(f'{data_dir / "meta.pkl"} is a pickle, which can run programs and is not loaded; if you trust '
                        f'it, convert it once: {sys.executable} {program} {data_dir}')
    elif not (data_dir / 'train.bin').exists():
        raise UserError(f'there is no {data_dir / "train.bin"}; {remedy}')
    return meta | checked


def load_dataset(data_dir, block_size):
    """Opens data_dir/{train,val}.bin as prepare.py wrote them. Where meta.json holds the largest id, max_id, and the
    numbers of tokens, only the sizes are checked; otherwise all tokens are read, each process its share.

    Returns ({'train': TokenFile, 'val': TokenFile}, vocab_size, tokenizer description), see load_dataset_meta; a file
    is [n_tokens], or [n_rows, block_size + 1] if the data set was prepared in rows. Raises UserError for missing, short
    or damaged files, rows of another length, and token ids outside the vocabulary."""
    data_dir = relative_path(data_dir)
    meta = load_dataset_meta(data_dir)
    remedy = remedy_for(data_dir)
    width = np.dtype(meta['dtype']).itemsize
    splits = {}
    row_length = meta['row_length']
    if row_length not in (None, block_size + 1):
        raise UserError(f'{data_dir} has rows of {row_length} tokens, one more than a block_size that fits; prepare it '
                        f'with --rows={block_size}, or use another --block_size')
    for split in ('train', 'val'):
        path = data_dir / f'{split}.bin'
        if not path.exists():
            raise UserError(f'there is no {path}; {remedy}')
        size, rest = divmod(plain_file(path).stat().st_size, width)
        if rest:
            raise UserError(f'{path} has {size * width + rest} bytes, not a multiple of {width} ({meta["dtype"]}): '
                            f'it is cut short or of another type; {remedy}')
        if size <= block_size:
            raise UserError(f'{path} has {size} tokens, and block_size={block_size} needs {block_size + 1}; '
                            'use more text or a smaller --block_size')
        n_tokens = meta[f'{split}_tokens']
        if n_tokens not in (None, size):
            raise UserError(f'{path} has {size} tokens, its meta.json says {n_tokens}: the file is damaged or '
                            f'of another data set; {remedy}')
        tokens = TokenFile(path, meta['dtype'])
        largest = meta['max_id']
        if type(largest) is not int or n_tokens is None:  # a wrong id would train silently: read every token
            starts = range(0, size, 10**7)[jax.process_index()::jax.process_count()]
            largest = max((int(tokens[i:i + 10**7].max()) for i in starts), default=0)
        if largest >= meta['vocab_size']:
            raise UserError(f"{path} has token id {largest}, outside the vocabulary of {meta['vocab_size']}; {remedy}")
        splits[split] = TokenFile(path, meta['dtype'], row_length) if row_length else tokens
    return splits, meta['vocab_size'], meta['tokenizer']


def load_masks(data_dir, splits):
    """{split: mask} of data_dir/{train,val}_mask.bin, a byte for each token: 1 where it counts in the loss, as an
    assistant's tokens do, else 0; in packed rows 2 where a conversation, or the padding, starts. {} for a data set
    without masks, in which all tokens count. Raises UserError for a mask that is missing or of another length."""
    paths = {split: relative_path(data_dir) / f'{split}_mask.bin' for split in splits}
    sizes = {split: plain_file(path).stat().st_size for split, path in paths.items() if path.exists()}
    if (sizes or load_dataset_meta(data_dir)['kind']) and sizes != {split: splits[split].size for split in splits}:
        raise UserError(f'the masks of {data_dir} are missing or of other tokens; {remedy_for(Path(data_dir))}')
    masks = {}
    for split in sizes:
        tokens = splits[split]
        masks[split] = TokenFile(paths[split], np.uint8, tokens.shape[1] if tokens.ndim == 2 else None)
    return masks

# -----------------------------------------------------------------------------
# mixtures of data sets

class DataSet(NamedTuple):
    name: str
    fraction: float  # of the sequences of a run
    splits: dict  # {'train', 'val'}: tokens, see load_dataset
    masks: dict  # see load_masks


def parse_mixture(dataset, root):
    """{folder: fraction} for the flag --dataset: a folder, by its name under `root` or its path, or a mixture such as
    'web:0.7,code:0.3'. Raises UserError for anything else."""
    if ':' not in dataset or (Path(root) / dataset).is_dir():
        return {Path(root) / dataset: 1.0}
    parts = [re.fullmatch(r'([^:]+):([01]?\.\d+|1)', part) for part in dataset.split(',')]
    shares = {Path(root) / part[1].strip(): float(part[2]) for part in parts if part and float(part[2]) >= 1e-6}
    if len({folder.name for folder in shares}) < len(parts) or abs(sum(shares.values()) - 1) > 1e-6:
        raise UserError(f'dataset={dataset} must be a folder, or a mixture such as web:0.7,code:0.3 of data sets with '
                        'different names, whose fractions are above 0 and sum to 1')
    return shares


def load_mixture_meta(dataset, root):
    """(parse_mixture, load_dataset_meta of its first data set). Raises UserError if another cannot be mixed with it."""
    shares = parse_mixture(dataset, root)
    (first, meta), *others = [(relative_path(folder), load_dataset_meta(folder)) for folder in shares]
    for folder, other in others:
        if 'pairs' in (meta['kind'], other['kind']):
            raise UserError('pairs of answers cannot be mixed with other data: give --dataset one folder')
        if other['vocab_size'] != meta['vocab_size'] or not same_tokens(other['tokenizer'], meta['tokenizer']):
            raise UserError(f'{folder} has other tokens than {first}: prepare both with the same --tokenizer')
    return shares, meta


def load_mixture(shares, block_size):
    """The DataSets of {folder: fraction}. If one has masks, all have: every token of the others counts."""
    splits = [load_dataset(folder, block_size)[0] for folder in shares]
    masks = [load_masks(folder, split) for folder, split in zip(shares, splits)]
    if any(masks):
        ones = lambda split: {name: np.broadcast_to(np.uint8(1), tokens.shape) for name, tokens in split.items()}
        masks = [mask or ones(split) for mask, split in zip(masks, splits)]
    return [DataSet(folder.name, *of_set) for (folder, *of_set) in zip(shares, shares.values(), splits, masks)]


def assign(numbers, fractions):
    """(which data set, which sequence of its own stream), int64 [B], for the sequences of these numbers of a run. Of
    the first N sequences each set has its fraction, for every N, to within as many sequences as there are sets."""
    ends = np.rint(np.cumsum(fractions) * 10**6).astype(np.int64)
    which, own = np.zeros_like(numbers), numbers
    for k in range(len(ends) - 1, 0, -1):  # set k against all before it
        before, after = own * ends[k - 1] // ends[k], (own + 1) * ends[k - 1] // ends[k]  # how many theirs are
        is_here = (which == 0) & (before == after)
        own = np.where(which > 0, own, np.where(is_here, own - before, before))
        which = np.where(is_here, k, which)
    return which, own


def describe_data(sets, tokenizer):
    """A fingerprint of DataSets, {name: number}: of the tokenizer, sizes, and the first and last million tokens."""
    values = {'the tokenizer': zlib.crc32(json.dumps(tokenizer).encode()), 'fractions': [s.fraction for s in sets]}
    arrays = [(f'{name}{i or ""}.bin', array) for i, one in enumerate(sets) for name, array in
              (one.splits | {f'{split}_mask': mask for split, mask in one.masks.items()}).items()]
    for name, array in arrays:
        n = 10**6 // array[0].size
        values[f'tokens in {name}'] = len(array)
        values[f'content of {name}'] = zlib.crc32(array[-n:].tobytes(), zlib.crc32(array[:n].tobytes()))
    return values


def check_ids(x, y, vocab_size, split):
    """Raises UserError if windows of a split hold an id that is not below vocab_size: load_dataset trusts meta.json."""
    if max(x.view(np.uint32).max(), y.view(np.uint32).max()) >= vocab_size:
        raise UserError(f'the {split} tokens have an id outside the vocabulary of {vocab_size}, which meta.json '
                        'denies: they have been changed; run the prepare.py of the data set again')


DATA, DROPOUT = range(2)  # RNG stream ids


@functools.cache
def epochs(n_tokens, block_size, seed):
    """shuffled_windows as a function of the epoch; the latest two are remembered, for each data set of a mixture."""
    return functools.lru_cache(maxsize=2)(functools.partial(shuffled_windows, n_tokens, block_size, seed))


def shuffled_windows(n_tokens, block_size, seed, epoch):
    """The windows of an epoch: a random offset, and the order of the contiguous windows of block_size tokens that
    follow it. block_size 0: no offset, and the order of n_tokens rows."""
    n_windows = count_windows(n_tokens, block_size)
    rng = np.random.default_rng([seed, DATA, epoch])
    offset = rng.integers(n_tokens - n_windows * block_size) if block_size else 0
    return offset, rng.permutation(np.arange(n_windows, dtype=np.min_scalar_type(n_windows)))


def count_windows(n_tokens, block_size):
    """Windows in an epoch: one less than fit, if several do, for block_size offsets or more. block_size 0: all rows."""
    return max(1, (n_tokens - 1) // block_size - 1) if block_size else n_tokens


def get_windows(tokens, start, block_size):
    """x, y, int32 [len(start), block_size]: the windows, or rows, of `tokens` at `start`, and these shifted by one."""
    if tokens.ndim == 2:
        window = tokens[start]
    elif isinstance(tokens, TokenFile):
        window = tokens.read(start, block_size + 1)
    else:
        window = tokens[start[:, None] + np.arange(block_size + 1)]
    window = window.astype(np.int32)
    return window[:, :-1], window[:, 1:]


def get_batch_jax(tokens, block_size, n_rows, seed, iteration, rows=None):
    """The sequences of one iteration, x and y, int32 [n_rows, block_size]; only those numbered `rows`, if given.
    A pure function of its arguments: sequences iteration * n_rows and following of an endless shuffled stream, in which
    an epoch holds every window, or row, once. (nanoGPT draws windows at random: an epoch's worth misses 1/e of the
    tokens.) With another n_rows the same iteration means other sequences. tokens: an array, or a mixture
    [(array, fraction)], each array of which has a stream of its own."""
    mixture = tokens if isinstance(tokens, list) else [(tokens, 1.0)]
    numbers = iteration * n_rows + (np.arange(n_rows) if rows is None else rows)
    which, own = assign(numbers, [fraction for _, fraction in mixture])
    drawn = np.empty((2, len(numbers), block_size), np.int32)
    for k in np.unique(which):
        drawn[:, which == k] = draw_windows(mixture[k][0], block_size, seed, own[which == k])
    return drawn[0], drawn[1]


def draw_windows(tokens, block_size, seed, numbers):
    """x and y, int32 [B, block_size], of the sequences of these numbers, int64 [B], in the stream of one array."""
    step = block_size if tokens.ndim == 1 else 0
    epoch, index = np.divmod(numbers, count_windows(len(tokens), step))
    start = np.empty(len(numbers), np.int64)
    for e in np.unique(epoch):
        offset, order = epochs(len(tokens), step, seed)(int(e))
        start[epoch == e] = offset + max(1, step) * order[index[epoch == e]].astype(np.int64)
    return get_windows(tokens, start, block_size)


def get_loss_weights(mask, block_size, n_rows, seed, iteration, rows):
    """{'weight': that of each target of get_batch_jax(tokens, ...), float32 [len(rows), block_size]}: 0 where the mask
    of the tokens is not 1, and a mean of 1 over all n_rows sequences, so that the mean of the weighted losses is that
    of the tokens that count, however the sequences are split into micro-batches and over devices. None if no token of
    the iteration counts. Of packed rows 'start' too, see find_starts."""
    x, y = get_batch_jax(mask, block_size, n_rows, seed, iteration)
    counts = y == 1
    if not counts.any():
        return None
    weights = {'weight': (counts[rows] * (counts.size / counts.sum())).astype(np.float32)}
    is_packed = any(array.ndim == 2 for array, _ in mask) if isinstance(mask, list) else mask.ndim == 2
    return weights | ({'start': find_starts(x[rows])} if is_packed else {})


def find_starts(mask_x):
    """Where in its row the conversation of each token starts, int32, see GPT.loss; mask_x: of packed rows."""
    return np.maximum.accumulate(np.where(mask_x == 2, np.arange(mask_x.shape[1], dtype=np.int32), 0), axis=1)


def draw_batch(sets, block_size, n_rows, seed, iteration, rows, vocab_size):
    """{'x', 'y', 'weight'}, each [len(rows), block_size]: get_batch_jax of DataSets and, if they have masks,
    get_loss_weights; of Pairs, what they draw. None if no token of it counts. Raises UserError as check_ids does."""
    tokens = [(one.splits['train'], one.fraction) for one in sets]
    if isinstance(tokens[0][0], Pairs):
        batch = tokens[0][0].draw(n_rows, seed, iteration, rows)
    else:
        batch = dict(zip('xy', get_batch_jax(tokens, block_size, n_rows, seed, iteration, rows)))
    check_ids(batch['x'], batch['y'], vocab_size, 'train')
    weights = {}
    if sets[0].masks:
        mask = [(one.masks['train'], one.fraction) for one in sets]
        weights = get_loss_weights(mask, block_size, n_rows, seed, iteration, rows)
    return None if weights is None else batch | weights


def evaluated_windows(tokens, block_size, n_rows):
    """The starts of the n_rows windows of a split that every evaluation reads, spread evenly over the split."""
    if tokens.ndim == 2:  # each row as often as any other, to within one
        return np.arange(n_rows) * len(tokens) // n_rows
    last = len(tokens) - 1 - block_size  # the start of the last window
    return np.arange(n_rows) * last // max(1, n_rows - 1)


def counted_bytes(tokens, start, block_size, mask, token_bytes):
    """(bytes of the targets of the windows at `start` that count, at least 1; whether one that counts has none)."""
    y = get_windows(tokens, start, block_size)[1]
    n_bytes = token_bytes[np.minimum(y, len(token_bytes) - 1)]  # check_ids refuses others later
    counts = get_windows(mask, start, block_size)[1] == 1 if mask is not None else np.ones_like(y)
    return max(1, int((counts * n_bytes).sum())), bool((counts * (n_bytes == 0)).any())


def counted_share(mask, block_size, n_rows, split):
    """The share of the tokens of evaluated_windows that count in the loss. Raises UserError if none does."""
    share = (get_windows(mask, evaluated_windows(mask, block_size, n_rows), block_size)[1] == 1).mean()
    if not share:
        raise UserError(f'none of the {n_rows} {split} windows of an evaluation has a token that counts, such as an '
                        "assistant's: use more eval_iters or a larger block_size")
    return share

# -----------------------------------------------------------------------------
# pairs of answers, for DPO

class Pairs:
    """The pairs of a split that fit in rows of block_size positions. Conversations 2 i and 2 i + 1 are the same prompt
    with the chosen and the rejected answer. Rows 2 p and 2 p + 1 of an iteration are a pair, padded at their ends.

    ends: where each conversation ends in the tokens. mask: 1 for the answers. length_normalized: a token weighs
    1 / number of tokens of its answer, not 1. Raises UserError if no pair fits."""

    def __init__(self, tokens, mask, ends, block_size, length_normalized, split):
        self.tokens, self.mask, self.bounds = tokens, mask, np.append(0, ends)
        self.block_size, self.length_normalized = block_size, length_normalized
        longest = np.diff(self.bounds).reshape(-1, 2).max(1) - 1  # positions of a row
        self.fitting = np.flatnonzero(longest <= block_size)
        if not len(self.fitting):
            raise UserError(f'all {split} pairs are longer than block_size={block_size}: use at least {longest.min()}')
        if n_left_out := len(longest) - len(self.fitting):
            print(f'{n_left_out} of {len(longest)} {split} pairs are longer than block_size={block_size}: left out')

    def read(self, conversations):
        """{'x', 'y', 'weight' [len(conversations), block_size]} of the conversations of these numbers."""
        ids = np.zeros((len(conversations), self.block_size + 1), np.int32)
        counts = np.zeros(ids.shape, np.float32)
        for i, conversation in enumerate(conversations):
            start, end = self.bounds[conversation:conversation + 2]
            ids[i, :end - start] = self.tokens[start:end]
            counts[i, :end - start] = self.mask[start:end]
        weight = counts[:, 1:]
        if self.length_normalized:
            weight /= np.maximum(weight.sum(1, keepdims=True), 1)
        return {'x': ids[:, :-1], 'y': ids[:, 1:], 'weight': weight}

    def draw(self, n_rows, seed, iteration, rows):
        """read() of the rows numbered `rows` of the n_rows of an iteration: as get_batch_jax, of an endless shuffled
        stream in which an epoch holds every pair once."""
        pair, is_rejected = np.divmod(iteration * n_rows + rows, 2)
        epoch, index = np.divmod(pair, len(self.fitting))
        shuffled = epochs(len(self.fitting), 0, seed)
        drawn = [shuffled(int(e))[1][i] for e, i in zip(epoch, index)]
        return self.read(2 * self.fitting[drawn] + is_rejected)

    def evaluated(self, n_rows):
        """The numbers of the n_rows conversations that every evaluation reads, or of all if there are fewer."""
        n = min(n_rows // 2, len(self.fitting))
        return (2 * self.fitting[np.arange(n) * len(self.fitting) // n, None] + [0, 1]).ravel()


def load_pairs(data_dir, splits, masks, block_size, length_normalized):
    """{split: Pairs} of a data set, from data_dir/{train,val}_ends.bin, int64. Raises UserError for damaged files."""
    pairs = {}
    for split, tokens in splits.items():
        ends = load_ends(relative_path(data_dir) / f'{split}_ends.bin', len(tokens))
        pairs[split] = Pairs(tokens, masks[split], ends, block_size, length_normalized, split)
    return pairs


def load_ends(path, n_tokens):
    """The ends of the conversations of a split of n_tokens, int64: increasing, of at least two tokens each, an even
    number. Raises UserError for a file that is missing or says something else."""
    if path.exists():
        size = path.stat().st_size
        ends = np.fromfile(plain_file(path), np.int64)
        is_whole = size > 0 and size == ends.nbytes and len(ends) % 2 == 0
        # the range first: differences of what lies outside could overflow
        if is_whole and ends.min() > 0 and ends.max() == ends[-1] == n_tokens and np.diff(ends, prepend=0).min() >= 2:
            return ends
    raise UserError(f'{path} is missing or damaged; {remedy_for(path.parent)}')
