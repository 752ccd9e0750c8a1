"""Opens the folders of data sets: meta.json; token files (uint16 or uint32, no header); masks."""
import mmap
import os
import re
import shlex
import sys
from pathlib import Path

import jax
import numpy as np

from jax_flags import INSTALLED, UserError, digest, find_shipped, is_in_bucket, read_json, warn
from jax_hub.tokenizers import (
    GPT2_PROBE, load_tokenizer, locate_tokenizer, probe_ids, tokens_digest)


def relative_path(path):
    """Returns the path relative to the current folder, because that is shorter in messages. A path
    on another drive (Windows) is returned unchanged."""
    try:
        return Path(os.path.relpath(path))
    except ValueError:
        return Path(path)


class DataChanged(UserError):
    """A data set has changed while it was read."""


def open_tokens(path, dtype, row_length=None):
    """Maps the numbers in a file without a header into memory. Returns a read-only array of
    `dtype`, [n_numbers]. With row_length, the array is [n_rows, row_length] and leaves out an
    incomplete last row. The array shows the file that was opened, even if another file later takes
    the path."""
    numbers = np.memmap(path, dtype, 'r')
    if row_length:
        return numbers[:len(numbers) // row_length * row_length].reshape(-1, row_length)
    return numbers


def read_at_random(array):
    """Turns off the read-ahead of the operating system for an array that open_tokens returned. Call
    it before reads at random places, for which read-ahead would fetch up to thousands of times as
    many bytes as are needed."""
    file = getattr(array, '_mmap', None)
    if file is not None and hasattr(mmap, 'MADV_RANDOM'):
        file.madvise(mmap.MADV_RANDOM)


def read_soon(array, starts, n_bytes):
    """Asks the operating system to fetch several parts of an array into memory, all at once. Call
    this function just before reading the parts. Arrays that read_at_random was called for have no
    read-ahead, so without this call the system would fetch them page by page.

    array: what open_tokens returned. starts: the offset of each part, in bytes. n_bytes: the number
    of bytes of each part; the last part may reach beyond the end of the file."""
    file = getattr(array, '_mmap', None)
    if file is not None and hasattr(mmap, 'MADV_WILLNEED'):
        for start in starts:
            page = start - start % mmap.PAGESIZE
            file.madvise(mmap.MADV_WILLNEED, page, min(start + n_bytes, file.size()) - page)


def check_not_cut(array):
    """Raises DataChanged if `array`, which open_tokens returned, is of a file that has become
    shorter. Reading beyond the end of the file would kill this process by SIGBUS, without a
    message. Does nothing for other kinds of arrays."""
    file = getattr(array, '_mmap', None)
    if file is not None and file.size() < array.nbytes:
        raise DataChanged(f'{array.filename} was cut short while it was read: it has '
                          f'{file.size():,} bytes now, {array.nbytes:,} at the start')


def remedy_for(data_dir):
    """Returns a text for a message: what to do about a data set that is missing or damaged."""
    prepare = data_dir / 'prepare.py'
    if INSTALLED in prepare.resolve().parents and prepare.exists():
        return f'run: prepare-jax {data_dir.name}'
    if prepare.exists():
        return f'run: python {shlex.quote(str(prepare))}'
    return (f'there is no {prepare} to make it; name the place where it is with --dataset, or see '
            '"Your own text" in README.md')


# the meta.json of a folder that has none
NANOGPT_META = {'vocab_size': 50257, 'dtype': 'uint16', 'tokenizer': {'kind': 'gpt2'}}

# the other keys that prepare.py may write into a meta.json
COUNTED = (
    'max_id', 'train_tokens', 'val_tokens', 'kind', 'row_length', 'digests', 'bytes', 'token_bytes')


SPLITS = ('train', 'val')


def check_meta(meta):
    """Raises an exception, such as ValueError or KeyError, if a value of `meta`, the content of a
    meta.json, is missing or not valid."""
    for name in ('vocab_size', 'row_length', 'max_id'):
        is_optional = name != 'vocab_size'
        if type(meta[name]) is not int and not (is_optional and meta[name] is None):
            raise ValueError(f'{name} {meta[name]!r} is not a whole number')
    if meta['dtype'] not in ('uint16', 'uint32'):
        raise ValueError(f'dtype {meta["dtype"]!r} is not uint16 or uint32')
    for name in ('bytes', 'token_bytes'):
        if meta[name] is not None and not all(
                type(meta[name][split]) is int and meta[name][split] >= 0 for split in SPLITS):
            raise ValueError(f'{name} {meta[name]!r} is not of whole numbers')
    if meta['kind'] not in (None, 'chats', 'pairs'):
        raise ValueError(f'kind {meta["kind"]!r} is neither chats nor pairs')

    if not isinstance(meta['digests'], dict | None):
        raise ValueError(f'digests {meta["digests"]!r} is not {{file: SHA-256}}')

    # The description of a tokenizer.
    tokenizer = meta['tokenizer']
    is_known = tokenizer['kind'] in ('gpt2', 'folder')
    if tokenizer['kind'] == 'char':
        is_known = len(tokenizer['chars']) == meta['vocab_size']
    if not is_known:
        raise ValueError(
            'tokenizer is none of {"kind": "gpt2"}, {"kind": "char", "chars": all characters}, '
            '{"kind": "folder", "path": where its tokenizer.json is}')


def load_dataset_meta(data_dir):
    """Reads the meta.json of a data set. Returns a dict with the keys:
    - 'vocab_size': the number of token ids;
    - 'dtype': 'uint16' or 'uint32', the dtype of the tokens in the files;
    - 'tokenizer': the description of the tokenizer, as load_tokenizer takes it;
    - 'max_id': the largest token id;
    - 'train_tokens' and 'val_tokens': the number of tokens of each split;
    - 'kind': 'chats' or 'pairs', the kinds of data sets that have masks;
    - 'row_length': the number of tokens of a prepared row;
    - 'digests': {file: SHA-256};
    - 'bytes': {split: number of UTF-8 bytes of the split's text};
    - 'token_bytes': {split: number of bytes of the split's tokens, added up token by token
      (load_token_bytes)}. It differs from 'bytes' if the tokenizer changes the text, for example
      puts a space before it.
    In a data set of chats, 'bytes' and 'token_bytes' include only the text that counts in the loss.
    meta.json must have 'vocab_size', 'dtype' and 'tokenizer'. Every other key that is missing in
    meta.json has the value None in the dict.

    A folder with train.bin but no meta.json counts as nanoGPT's: uint16 tokens of GPT-2's BPE.
    Raises UserError for a missing data set, a damaged meta.json, or a meta.pkl without
    meta.json."""
    data_dir = relative_path(data_dir)
    path = data_dir / 'meta.json'
    meta = dict.fromkeys(COUNTED) | NANOGPT_META

    # Read the file, and check its values.
    if path.exists():
        try:
            meta = dict.fromkeys(COUNTED) | read_json(path)
            meta['tokenizer'] = locate_tokenizer(meta['tokenizer'], data_dir)
            check_meta(meta)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f'{path} is damaged ({error}); {remedy_for(data_dir)}') from None
    # Without one: nanoGPT's older form, nothing at all, or GPT-2's tokens.
    elif (data_dir / 'meta.pkl').exists():
        program = relative_path(Path(__file__).parents[1] / 'data' / 'convert_meta.py')
        raise UserError(
            f'{data_dir / "meta.pkl"} is a pickle, which can run programs and is not loaded; if '
            f'you trust it, convert it once: {sys.executable} {program} {data_dir}')
    elif not (data_dir / 'train.bin').exists():
        raise UserError(f'there is no {data_dir / "train.bin"}; {remedy_for(data_dir)}')
    return meta


def byte_scale(meta, split):
    """Returns the factor from bytes of tokens to bytes of text, for the metric "bits per byte":
    meta['bytes'], the bytes of a split's text, divided by meta['token_bytes'], the bytes that its
    tokens stand for. The factor is below 1 if the tokenizer puts a space before each text. If
    `meta` lacks these numbers, as in older data sets, returns 1. meta: what load_dataset_meta
    returns. split: 'train' or 'val'."""
    if meta['bytes'] is None or not (meta['token_bytes'] or {}).get(split):
        return 1
    return meta['bytes'][split] / meta['token_bytes'][split]


def load_dataset(data_dir, block_size):
    """Opens data_dir/{train,val}.bin as prepare.py wrote them. If meta.json has max_id (the largest
    id) and the numbers of tokens, these values are trusted, and only the sizes of the files are
    compared with the numbers of tokens. Otherwise all tokens are read, a share in each process.

    Returns {'train': array, 'val': array}. An array is uint16 or uint32, [n_tokens], or [n_rows,
    block_size + 1] if the data set was prepared in rows. Raises UserError for missing, short or
    damaged files, for rows of another length, and for token ids outside the vocabulary."""
    data_dir = relative_path(data_dir)
    meta = load_dataset_meta(data_dir)

    # Rows have a length; training must have the same.
    row_length = meta['row_length']
    if row_length not in (None, block_size + 1):
        raise UserError(
            f'{data_dir} has rows for block_size={row_length - 1}, not {block_size}: prepare it with '
            f'--rows={block_size}, or use --block_size={row_length - 1}')

    # The two files, each compared with what meta.json says of it.
    splits = {}
    for split in ('train', 'val'):
        path = data_dir / f'{split}.bin'
        check_size(path, meta, split, block_size)
        splits[split] = tokens = open_tokens(path, meta['dtype'], row_length)

        # a token id outside the vocabulary would train silently
        largest = meta['max_id']
        if largest is None or meta[f'{split}_tokens'] is None:
            # prepare.py has not counted: each process reads its share of the tokens
            n = 10**7 // tokens[0].size
            starts = range(0, len(tokens), n)[jax.process_index()::jax.process_count()]
            largest = max((int(tokens[i:i + n].max()) for i in starts), default=0)
        if largest >= meta['vocab_size']:
            raise UserError(f"{path.name} has token id {largest}, outside the vocabulary of "
                            f"{meta['vocab_size']}; {remedy_for(data_dir)}")
        read_at_random(tokens)
    return splits


def check_size(path, meta, split, block_size):
    """Raises UserError if `path`, the file of a split, is missing, or if its size is wrong. The
    file must have a whole number of tokens, and more than block_size. If meta['<split>_tokens'] is
    a number, the file must have exactly this number of tokens."""
    if not path.exists():
        raise UserError(f'there is no {path}; {remedy_for(path.parent)}')

    # A whole number of tokens, and at least one sequence.
    width = np.dtype(meta['dtype']).itemsize
    size, rest = divmod(path.stat().st_size, width)
    if rest:
        raise UserError(
            f'{path} has {size * width + rest} bytes, not a multiple of {width} ({meta["dtype"]}): '
            f'it is cut short or of another type; {remedy_for(path.parent)}')
    if size <= block_size:
        raise UserError(
            f'{path} has {size} tokens, and block_size={block_size} needs {block_size + 1}; use '
            'more text or a smaller --block_size')

    # As many as were written.
    n_tokens = meta[f'{split}_tokens']
    if n_tokens not in (None, size):
        raise UserError(
            f'{path} has {size} tokens, but its meta.json says {n_tokens}: the file is damaged or of '
            f'another data set; {remedy_for(path.parent)}')


def load_masks(data_dir, splits):
    """Opens the masks of a data set, data_dir/{train,val}_mask.bin. splits: {split: tokens}, as
    load_dataset returns. Returns {split: uint8 array with the shape of the tokens}, or {} for a
    data set without masks, in which all tokens count.

    A mask has a byte for each token: 1 if it counts in the loss (an assistant's tokens), else 0. In
    packed rows, the first token of each conversation and of the padding has 2. Like 0, 2 means that
    the token does not count.

    A data set has masks if meta.json has a 'kind', or if a mask exists for at least one split.
    Raises UserError if such a data set lacks the mask of a split, or if a mask has another length
    than the tokens."""
    data_dir = relative_path(data_dir)
    paths = {split: data_dir / f'{split}_mask.bin' for split in splits}
    are_there = [path.exists() for path in paths.values()]
    if not any(are_there) and load_dataset_meta(data_dir)['kind'] is None:
        return {}
    masks = {}
    for split, tokens in splits.items():
        if not all(are_there) or paths[split].stat().st_size != tokens.size:
            raise UserError(f'the masks of {data_dir} are missing or of other tokens; '
                            f'{remedy_for(data_dir)}')
        masks[split] = open_tokens(paths[split], np.uint8).reshape(tokens.shape)
        read_at_random(masks[split])
    return masks


def load_ends(path, n_tokens):
    """Reads where each conversation in a split of pairs ends. Returns int64 [n_conversations],
    counted in tokens from the start of the split. path: the split's file of ends, int64. n_tokens:
    the number of tokens of the split. Raises UserError if the file is missing or has no ends, if
    the number of conversations is odd (they come in pairs), if a conversation has fewer than two
    tokens, or if the last conversation does not end at n_tokens."""
    ends = np.fromfile(path, np.int64) if path.exists() else np.zeros(0, np.int64)
    is_whole = len(ends) > 0 and len(ends) % 2 == 0 and ends[-1] == n_tokens
    if not is_whole or np.diff(ends, prepend=0).min() < 2:
        raise UserError(f'{path} is missing or damaged; {remedy_for(path.parent)}')
    return ends


# -----------------------------------------------------------------------------
# mixtures of data sets

def parse_mixture(dataset):
    """Returns {folder: fraction} for the flag --dataset. dataset: one folder (see dataset_folder),
    or a mixture such as 'web:0.7,code:0.3'. Raises UserError for anything else."""
    # one data set: without a colon, except in a URL or in the name of a folder
    is_one = dataset.count(':') == dataset.count('://')
    is_url = is_in_bucket('dataset', dataset)  # the parts of a mixture are fetched below
    if is_one or not is_url and dataset_folder(dataset).is_dir():
        return {dataset_folder(dataset): 1.0}

    # Each part is a name and a fraction.
    parts = dataset.split(',')
    shares = {}
    for part in parts:
        found = re.fullmatch(r' *((?:\w+://)?[^:]+):([01]?\.\d+|1)', part)
        if found and float(found[2]) >= 1e-6:
            shares[found[1].strip()] = float(found[2])

    # Each part was valid, no name comes twice, and the fractions sum to 1.
    names = {Path(folder).name for folder in shares}
    if len(names) < len(parts) or abs(sum(shares.values()) - 1) > 1e-6:
        raise UserError(
            f'dataset={dataset} must be a folder, or a mixture such as web:0.7,code:0.3 of data '
            'sets with different names, whose fractions are above 0 and sum to 1')
    return {dataset_folder(name): fraction for name, fraction in shares.items()}


def dataset_folder(name):
    """Returns the folder of a data set. name: the folder's name under data/ (see find_shipped); or,
    if it is not there, its path; or gs://bucket/folder. A folder of a bucket is copied to this
    machine if no copy is there yet."""
    if is_in_bucket('dataset', name):
        from jax_run.buckets import fetch_dataset
        return fetch_dataset(name)
    folder = find_shipped('data', name)
    if not folder.exists() and os.path.isdir(name):
        return Path(name)
    return folder


def load_mixture_meta(dataset):
    """Returns (shares; meta) of the flag --dataset. shares: {folder: fraction}, see parse_mixture.
    meta: what load_dataset_meta returns for the first of these folders that has chats, so that the
    run keeps their chat template; else for the first folder. 'max_id' is the largest id of all
    folders. dataset: see parse_mixture. Raises UserError if data sets cannot be mixed, because
    their tokens differ or one of them has pairs."""
    shares = parse_mixture(dataset)
    folders = [relative_path(folder) for folder in shares]
    metas = [load_dataset_meta(folder) for folder in shares]
    meta = metas[0]

    # The others must have the same tokens, and must not be pairs.
    for folder, other in zip(folders[1:], metas[1:]):
        if 'pairs' in (metas[0]['kind'], other['kind']):
            raise UserError('pairs of answers cannot be mixed with other data: give --dataset one '
                            'folder')
        has_same_size = other['vocab_size'] == meta['vocab_size']
        if not has_same_size or not same_tokens(other['tokenizer'], meta['tokenizer']):
            raise UserError(f'{folder} has other tokens than {folders[0]}: prepare both with the '
                            'same --tokenizer')
        if meta['kind'] != 'chats' and other['kind'] == 'chats':
            meta = other
        elif other['kind'] == 'chats' and template_of(other) != template_of(meta):
            warn(f'{folder} has another chat template than the data sets before it, which is kept')
    largest_ids = [each['max_id'] for each in metas]
    largest = None if None in largest_ids else max(largest_ids)
    return shares, {**meta, 'max_id': largest}


def same_tokens(a, b):
    """Returns whether two tokenizers have the same tokens and split a text into the same tokens. a,
    b: the descriptions of the tokenizers."""
    kinds = {a['kind'], b['kind']}
    if kinds == {'folder'}:
        return digest_of(a) == digest_of(b)
    if 'gpt2' not in kinds:
        return load_tokenizer(a).ids == load_tokenizer(b).ids
    if kinds == {'gpt2', 'folder'}:  # without loading GPT-2's BPE, which may need a network
        folder = load_tokenizer(a if a['kind'] == 'folder' else b)
        of_gpt2 = {'the': 1169, '\u0120the': 262, '<|endoftext|>': 50256}
        has_ids = all(folder.ids.get(token) == id for token, id in of_gpt2.items())
        return has_ids and digest(probe_ids(folder.tokenizer)) == GPT2_PROBE
    return kinds == {'gpt2'}


def digest_of(description):
    """Returns the tokens_digest of a tokenizer of the kind 'folder'. This is the digest that
    prepare.py wrote into the description, or else the digest of the folder as it is now."""
    return description.get('digest') or tokens_digest(load_tokenizer(description).tokenizer)


def template_of(meta):
    """Returns the chat template of a data set, None if it has none. meta: what load_dataset_meta
    returns."""
    return load_tokenizer(meta['tokenizer']).chat_template


def with_template_of(meta, tokenizer, dataset):
    """Returns the description of the tokenizer that a run keeps. If the data are conversations of
    another chat template than that of `tokenizer`, it is the data's, so that the model is talked to
    as it was trained, and a line says so. Otherwise it is `tokenizer`.

    meta: what load_mixture_meta returns. tokenizer: the description of a tokenizer with the same
    tokens. dataset: the flag."""
    if meta['kind'] not in ('chats', 'pairs') or meta['tokenizer']['kind'] != 'folder':
        return tokenizer
    of_data = template_of(meta)
    if not of_data or of_data == load_tokenizer(tokenizer).chat_template:
        return tokenizer
    print(f'the chat template is that of dataset {dataset}')
    return meta['tokenizer']


def remedy_for_tokens(description, name):
    """Returns the part of an error message that says how to make a data set with the tokens of a
    tokenizer. description: see load_tokenizer. name: the model or the folder that has the
    tokenizer."""
    if description['kind'] == 'char':
        return 'the model knows characters: take a data set with the same ones'
    if description['kind'] == 'gpt2':
        name = 'gpt2'
    return (f'make it with: python data/text/prepare.py my.txt --tokenizer={name} '
            '--out_dir=data/mine (for conversations: data/chat/prepare.py)')
