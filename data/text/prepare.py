"""
Prepare texts of your own, with a vocabulary of their own or with that of a model. A path is a text
file, a file of rows (JSON lines, a JSON array, CSV, parquet; .gz and .zst too), or a folder of
such; a text file or a row is a document:
$ python data/text/prepare.py mytext.txt --tokenizer=bpe:4096 --out_dir data/mine
$ python data/text/prepare.py mycode mynotes --suffix=.py,.md --tokenizer=bpe:4096 --out_dir data/mine
$ python data/text/prepare.py chunks/*.jsonl --key=content --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mine
Every tenth document is for validation; of fewer than 20 documents, the last tenth of each. The
texts may be larger than the memory. Interrupted at any moment and started again, it continues where
it stopped. Saves train.bin and val.bin with the ids, meta.json that says how to read them, and the
folder tokenizer.
"""
import collections
import itertools
import os
import sys
from typing import NamedTuple

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    BEFORE, TOKENIZER_HELP, Unit, UserError, choose_vocabulary, create_parser, cut, fail, positive)
from jax_flags import whole_characters
from reading import (
    COMPRESSED_ENDINGS, REMEDY, BadRow, kind_of_file, name_some, read_blocks, read_rows)
from stream import run, stream

few = 20 # documents: of fewer, each has a part in train and in val
# of larger inputs, bpe:N learns from about as much, taken evenly from the train part
bpe_bytes = 2**27
first_rows = 1000 # a file in which none of so many has a text is refused at once

def refuse(error):
    """Raises UserError for an OSError."""
    fail(f'cannot read {error.filename} ({error.strerror}); make it readable or leave it out')

def truth(text):
    """Returns the bool that a flag gives. Raises KeyError for another value."""
    return {'true': True, 'false': False}[text.lower()]

class Files(NamedTuple):
    """What a command names."""
    found: list  # (name, path) of each file to read
    left_out: collections.Counter  # how many files of a folder end in what is not asked for
    folders: list  # those in folders that are not read, with the reason: '.git (hidden)'

def find_files(paths, suffixes):
    """Returns the Files of these paths: the files, and those in the folders that end in one of the
    suffixes, in whatever case, in the order of their names. Raises UserError for what is no regular
    file."""
    files = Files([], collections.Counter(), [])
    for root in paths:
        if os.path.isfile(root):
            files.found.append((os.path.basename(root), root))
        elif os.path.isdir(root):
            find_in_folder(root, suffixes, files)
        elif os.path.exists(root):
            fail(f'{root} is no regular file; save what it gives as one first')
        else:
            fail(f'there is no {root}; name text files, JSON lines, parquet files, or folders of '
                 'such')
    if not files.found:
        others = f'; it has {name_endings(files)}' if files.left_out else ''
        fail(f'{", ".join(paths)} has no file that ends in {" or ".join(suffixes)}{others}; name '
             'another end with --suffix')
    return files

def find_in_folder(root, suffixes, files):
    """Adds the files of a folder to these Files, see find_files."""
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        # which folders in it are read, too
        for name in sorted(subfolders):
            path = os.path.join(folder, name)
            if name.startswith('.'):
                files.folders.append(f'{os.path.relpath(path, root)} (hidden)')
            elif os.path.islink(path):
                files.folders.append(f'{os.path.relpath(path, root)} (a link)')
        subfolders[:] = sorted(name for name in subfolders if not name.startswith('.'))

        # its files, by their endings
        for name in sorted(names):
            path = os.path.join(folder, name)
            if not name.lower().endswith(suffixes):
                files.left_out[os.path.splitext(name)[1].lower() or 'without an ending'] += 1
            elif os.path.isfile(path):
                files.found.append((os.path.relpath(path, root), path))
            else:
                files.left_out['no regular file'] += 1

def name_endings(files):
    """Returns how many files are left out, by ending: '3 .csv, 1 .png'."""
    most = files.left_out.most_common(5)
    n_named = sum(n for _, n in most)
    return and_others([f'{n:,} {end}' for end, n in most], files.left_out.total() - n_named)

def name_folders(files):
    """Returns which folders are left out, the first five by name."""
    return and_others(files.folders[:5], len(files.folders[5:]))

def and_others(names, n_more):
    """Returns the names with commas between them, and how many others there are."""
    said = ', '.join(names)
    if n_more:
        said += f' and {n_more:,} others'
    return said

def count_bytes(path, key):
    """Returns the bytes of a file; of a parquet file, those of this column before compression."""
    n_bytes = os.path.getsize(path)
    if kind_of_file(path, [key]) != 'parquet':
        if path.lower().endswith(COMPRESSED_ENDINGS):
            n_bytes *= 4 # a text shrinks to a quarter or so
        return n_bytes

    # A parquet file says it of each column, in each of its parts.
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    n_bytes = 0
    for group in groups:
        for j in range(group.num_columns):
            column = group.column(j)
            if column.path_in_schema == key:
                n_bytes += column.total_uncompressed_size
    return n_bytes

def text_of(row, key):
    """Returns (text, None) of a row, or (None, the reason why it has none)."""
    text = row.get(key) if isinstance(row, dict) else row
    if isinstance(text, bytes): # a parquet column of bytes
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return None, 'not UTF-8'
    if isinstance(text, BadRow):
        return None, text.reason
    if text is None or text == '':
        return None, f'without a text under {key!r}'
    if not isinstance(text, str):
        return None, f'whose {key!r} is no text'
    return whole_characters(text), None

class Counts:
    """What one reading of all documents has found."""

    def __init__(self):
        self.documents = 0
        self.characters = 0
        self.n_bytes = 0
        self.skipped = {} # {reason: [number of rows, place of the first]}
        self.empty = [] # paths of files without a document

    def skip(self, reason, place):
        """Counts a row without a text."""
        found = self.skipped.setdefault(reason, [0, place])
        found[0] += 1

    def count(self, blocks):
        """Yields the blocks of a document."""
        size = 0
        for block in blocks:
            size += len(block)
            self.n_bytes += len(block) if block.isascii() else len(block.encode())
            yield block
        self.documents += size > 0
        self.characters += size

    def lines(self, n_files):
        """Returns what is said of them at the end."""
        said = [f'read {self.documents:,} documents of {n_files:,} files: {self.characters:,} '
                f'characters, {self.n_bytes:,} bytes']
        if self.skipped:
            reasons = [f'{n:,} {reason} (the first: {place})'
                       for reason, (n, place) in self.skipped.items()]
            n_rows = sum(n for n, _ in self.skipped.values())
            said.append(f'skipped {n_rows:,} rows: {", ".join(reasons)}')
        if self.empty:
            n_files = 'a file' if len(self.empty) == 1 else f'{len(self.empty):,} files'
            said.append(f'skipped {n_files} without a text (the first: {self.empty[0]})')
        return said

def clip(blocks, start, stop):
    """Yields the characters from start to stop of a document."""
    at = 0
    for block in blocks:
        yield block[max(0, start - at):max(0, stop - at)]
        at += len(block)

class Texts:
    """The documents of text files and files of rows, which are read as they are needed."""

    def __init__(self, paths, key, strict):
        """key: the name of the text in a row. strict: whether a row without a text is refused,
        which is skipped otherwise."""
        self.paths = paths
        self.key = key
        self.strict = strict
        self.reading = '' # the path of the file that is being read
        self.counts = Counts() # of the last reading that came to the end
        try:
            self.kinds = [kind_of_file(path, [key] if key else []) for path in paths]
            self.file_sizes = [os.path.getsize(path) for path in paths]
            first = itertools.islice(self.documents(), few)
            self.sizes = [sum(map(len, blocks)) for blocks in first]
            self.n_bytes = 0
            for self.reading in paths:
                self.n_bytes += count_bytes(self.reading, key)
        except UserError:
            raise
        except Exception as e: # whatever pyarrow raises
            fail(f'cannot read {self.reading} ({type(e).__name__}: {e}); {REMEDY}')

    def documents(self):
        """Yields each document in blocks."""
        counts = Counts()
        for path, kind, size in zip(self.paths, self.kinds, self.file_sizes):
            self.reading = path
            n_before = counts.documents
            if kind == 'text':
                yield counts.count(read_blocks(path))
            else:
                for text in self.texts(path, counts):
                    yield counts.count([text])
            if counts.documents == n_before:
                counts.empty.append(path)
            if os.path.getsize(path) != size:
                fail(f'{path} has changed while it was read; {REMEDY}')
        self.counts = counts

    def texts(self, path, counts):
        """Yields the text of each row of a file; '' for an empty one, which takes its turn in the
        split. Raises UserError if the rows are others than asked for."""
        # Rows are counted with and without a text: a file in which no row has one has other keys.
        n_rows = n_texts = 0
        first = None # that has no text: (place, row, reason)
        for where, row in read_rows(path, [self.key], [self.key]):
            n_rows += 1
            text, reason = text_of(row, self.key)
            if text is not None:
                n_texts += 1
                yield text
                continue

            # This row has none: it ends the script, or is counted.
            place = f'{path}, {where}'
            if self.strict:
                fail(f'{place} is a row {reason}; mend it, or leave out --strict')
            first = first or (place, row, reason)
            if n_texts == 0 and n_rows == first_rows:
                break
            counts.skip(reason, place)
            if row == '' or isinstance(row, dict) and row.get(self.key) == '':
                yield ''
        if n_texts == 0 and first:
            self.refuse_rows(*first)

    def refuse_rows(self, place, row, reason):
        """Raises UserError if a file of which no row has a text, such as this one, has it by
        another name."""
        if isinstance(row, dict) and self.key not in row:
            fail(f'{place} and all others have no {self.key!r}, only {name_some(row)}; name what '
                 'is the text with --key, or take files as they are with --key=')
        if not isinstance(row, dict) or row[self.key] not in (None, ''):
            fail(f'{place} and all others are rows {reason}; name what is the text with --key')

    def parts(self):
        """Yields (is_val, blocks) of each document, or of each part of one."""
        # Many documents: every tenth as a whole.
        if len(self.sizes) == few:
            for i, blocks in enumerate(self.documents()):
                yield i % 10 == 9, blocks
            return

        # Few: of each the first nine tenths, then of each the rest.
        for is_val in (False, True):
            for n, blocks in zip(self.sizes, self.documents(), strict=True):
                n_train = int(n*0.9)
                if is_val:
                    yield True, clip(blocks, n_train, n)
                else:
                    yield False, clip(blocks, 0, n_train)

    def units(self):
        """Yields the documents as Units."""
        for is_val, blocks in self.parts():
            is_first = True
            before = ''
            for piece, is_last in cut(blocks):
                if piece:
                    yield Unit(piece, is_first, is_last, is_val, before)
                is_first = False
                before = piece[-BEFORE:]

    def batches(self, done):
        """Yields lists of units, after the first `done`, of a million characters or a few more."""
        batch = []
        size = 0
        for unit in itertools.islice(self.units(), done, None):
            batch.append(unit)
            size += len(unit.text) + 100 # the shortest takes time, too
            if size >= 2**20:
                yield batch
                batch = []
                size = 0
        yield batch

def main():
    """Prepares the data set that the flags ask for."""
    parser = create_parser(__doc__, os.path.dirname(os.path.abspath(__file__)), rows=True)
    parser.add_argument('input', nargs='+',
                        help='text files, files of rows (.jsonl, .json, .csv, .parquet), or '
                             'folders')
    parser.add_argument('--tokenizer', default='bpe:4096',
                        help=f'{TOKENIZER_HELP} (default: bpe:4096)')
    parser.add_argument('--suffix', default='.txt,.md,.jsonl,.ndjson,.parquet',
                        help='of files in folders, in whatever case (%(default)s)')
    parser.add_argument('--key', default='text',
                        help='the text of a row of JSON, CSV or parquet (default: text); --key= '
                        'takes JSON and CSV as they are, with their keys')
    parser.add_argument('--strict', nargs='?', const=True, default=False, type=truth,
                        metavar='True',
                        help='refuse a row without a text, which is skipped and counted otherwise')
    parser.add_argument('--num_proc', type=positive,
                        help='worker processes (default: one per core, if much is to do)')
    args = parser.parse_args()
    files = find_files(args.input, tuple(args.suffix.lower().split(',')))
    # a folder may move, but not change
    source = [[name, os.path.getsize(path)] for name, path in files.found]
    texts = Texts([path for _, path in files.found], args.key, args.strict)

    # Processes take a second to start: a small input needs none.
    num_proc = args.num_proc
    if not num_proc:
        num_proc = 1 if texts.n_bytes < 2**24 else os.cpu_count()

    # What write_data_set asks for as it goes: the vocabulary, what was read, which documents are
    # for validation.
    def choose():
        return choose_vocabulary(args.tokenizer, all_texts, train_texts)

    def all_texts():
        return itertools.chain.from_iterable(texts.documents())

    def train_texts():
        train = (unit.text for unit in texts.units() if not unit.is_val)
        return itertools.islice(train, 0, None, 1 + texts.n_bytes // bpe_bytes)

    def report():
        lines = texts.counts.lines(len(files.found))
        if files.left_out:
            lines.append(f'left out {files.left_out.total():,} files: {name_endings(files)}; '
                         '--suffix names what to read')
        if files.folders:
            lines.append(f'left out {len(files.folders):,} folders: {name_folders(files)}')
        return {'lines': lines, 'bytes': texts.counts.n_bytes}

    def split(lengths):
        return np.flatnonzero(lengths >= 0), np.flatnonzero(lengths < 0)

    name = ', '.join(args.input[:3])
    if len(args.input) > 3:
        name += f' and {len(args.input) - 3} more'
    stream(args.out_dir, name, [source, args.tokenizer, args.key], choose, texts.batches, split,
           num_proc=num_proc, block_size=args.rows, remedy=REMEDY, report=report)

if __name__ == '__main__':
    run(main)
