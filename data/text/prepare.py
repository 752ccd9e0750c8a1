"""
Prepare texts of your own, with a vocabulary of their own or with that of a model. A path is a text file, a file of JSON
lines (.jsonl), a parquet file, or a folder of such; a text file, a line or a row is a document:
$ python data/text/prepare.py mytext.txt --tokenizer=bpe:4096 --out_dir data/mine
$ python data/text/prepare.py mycode mynotes --suffix=.py,.md --tokenizer=bpe:4096 --out_dir data/mine
$ python data/text/prepare.py chunks/*.jsonl --key=content --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mine
Every tenth document is for validation; of fewer than 20 documents, the last tenth of each. The texts may be larger than
the memory. Interrupted at any moment and started again, it continues where it stopped.
Saves train.bin and val.bin with the ids, meta.json that says how to read them, and the folder tokenizer.
"""
import itertools
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    TOKENIZER_HELP, Unit, UserError, choose_vocabulary, create_parser, cut, fail, positive, read_blocks,
    read_column)
from jax_flags import whole_characters
from stream import run, stream

few = 20 # documents: of fewer, each has a part in train and in val
bpe_bytes = 2**27 # of larger inputs, bpe:N learns from about as much, taken evenly from the train part
rows_files = ('.jsonl', '.parquet')
remedy = 'mend that file or leave it out'

def refuse(error):
    fail(f'cannot read {error.filename} ({error.strerror}); make it readable or leave it out')

def find_files(paths, suffixes):
    """[(name, path)] of the files, and of those in the folders that have such a suffix, in the order of their names."""
    files = []
    for root in paths:
        if os.path.isfile(root):
            files.append((os.path.basename(root), root))
            continue
        if not os.path.isdir(root):
            fail(f'there is no {root}; name text files, JSON lines, parquet files, or folders of such')
        for folder, subfolders, names in os.walk(root, onerror=refuse):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith('.'))
            found = [os.path.join(folder, name) for name in sorted(names) if name.endswith(suffixes)]
            files += [(os.path.relpath(path, root), path) for path in found if os.path.isfile(path)]
    if not files:
        fail(f'{", ".join(paths)} has no file that ends in {" or ".join(suffixes)}; name another end with --suffix')
    return files

def read_rows(path, key):
    """Yields row[key] of each row of JSON lines or of a parquet file."""
    if path.endswith('.parquet'):
        yield from read_column(path, key)
    for number, line in enumerate(read_lines(path) if path.endswith('.jsonl') else [], 1):
        if line.strip():
            try:
                yield json.loads(line)[key]
            except (ValueError, RecursionError) as e:
                fail(f'{path}, line {number} is not JSON ({e})')
            except (KeyError, TypeError):
                fail(f'{path}, line {number} has no {key!r}; name what is the text with --key')

def count_bytes(path, key):
    """The bytes of a file; of a parquet file, those of this column before compression."""
    if not path.endswith('.parquet'):
        return os.path.getsize(path)
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns = [group.column(j) for group in groups for j in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == key)

def read_lines(path):
    """Yields the lines of a text file, which end at a newline only: JSON may have U+2028 in a string."""
    parts = [] # of a line: adding each block to a string would take quadratic time
    for block in read_blocks(path):
        first, *others = block.split('\n')
        parts.append(first)
        for line in others:
            yield ''.join(parts)
            parts = [line]
    yield ''.join(parts)

def clip(blocks, start, stop):
    """Yields the characters from start to stop of a document."""
    at = 0
    for block in blocks:
        yield block[max(0, start - at):max(0, stop - at)]
        at += len(block)

class Texts:
    """The documents of text files and files of rows, which are read as they are needed."""

    def __init__(self, paths, key):
        self.paths, self.key, self.reading = paths, key, ''
        try:
            self.sizes = [sum(map(len, blocks)) for blocks in itertools.islice(self.documents(), few)]
            self.n_bytes = 0
            for self.reading in paths:
                self.n_bytes += count_bytes(self.reading, key)
        except UserError:
            raise
        except Exception as e: # whatever pyarrow raises
            fail(f'cannot read {self.reading} ({type(e).__name__}: {e}); {remedy}')

    def documents(self):
        """Yields each document in blocks."""
        for path in self.paths:
            self.reading = path
            if not path.endswith(rows_files):
                yield read_blocks(path)
                continue
            for text in read_rows(path, self.key):
                if not isinstance(text, str):
                    fail(f'{path} has a row whose {self.key!r} is no text: {text!r:.100}')
                yield [whole_characters(text)]

    def parts(self):
        """Yields (is_val, blocks) of each document, or of each part of one."""
        if len(self.sizes) == few:
            yield from ((i % 10 == 9, blocks) for i, blocks in enumerate(self.documents()))
            return
        for is_val in (False, True):
            for n, blocks in zip(self.sizes, self.documents(), strict=True):
                yield is_val, clip(blocks, int(n*0.9), n) if is_val else clip(blocks, 0, int(n*0.9))

    def units(self):
        for is_val, blocks in self.parts():
            is_first = True
            for piece, is_last in cut(blocks):
                if piece:
                    yield Unit(piece, is_first, is_last, is_val)
                is_first = False

    def batches(self, done):
        """Yields lists of units, after the first `done`, of a million characters or a few more."""
        batch, size = [], 0
        for unit in itertools.islice(self.units(), done, None):
            batch.append(unit)
            size += len(unit.text) + 100 # the shortest takes time, too
            if size >= 2**20:
                yield batch
                batch, size = [], 0
        yield batch

def main():
    parser = create_parser(__doc__, os.path.dirname(os.path.abspath(__file__)), rows=True)
    parser.add_argument('input', nargs='+', help='text files, .jsonl, .parquet, or folders of such')
    parser.add_argument('--tokenizer', default='bpe:4096', help=f'{TOKENIZER_HELP} (default: bpe:4096)')
    parser.add_argument('--suffix', default='.txt,.md,.jsonl,.parquet', help='of files in folders (%(default)s)')
    parser.add_argument('--key', default='text', help='the text of a JSON line or a parquet row (default: text)')
    parser.add_argument('--num_proc', type=positive, help='worker processes (default: one per core, if much is to do)')
    args = parser.parse_args()
    files = find_files(args.input, tuple(args.suffix.split(',')))
    source = [[name, os.path.getsize(path)] for name, path in files] # a folder may move, but not change
    texts = Texts([path for _, path in files], args.key)
    num_proc = args.num_proc or (1 if texts.n_bytes < 2**24 else os.cpu_count())

    def all_texts():
        return itertools.chain.from_iterable(texts.documents())

    def train_texts():
        train = (unit.text for unit in texts.units() if not unit.is_val)
        return itertools.islice(train, 0, None, 1 + texts.n_bytes // bpe_bytes)

    def split(lengths):
        return np.flatnonzero(lengths >= 0), np.flatnonzero(lengths < 0)

    name = ', '.join(args.input[:3]) + f' and {len(args.input) - 3} more' * (len(args.input) > 3)
    stream(args.out_dir, name, [source, args.tokenizer, args.key],
           lambda: choose_vocabulary(args.tokenizer, all_texts, train_texts), texts.batches, split,
           num_proc=num_proc, block_size=args.rows, remedy=remedy)

if __name__ == '__main__':
    run(main)
