"""
Prepare texts of your own, with a vocabulary of their own or with that of a model. A path is a text
file, a file of rows (JSON lines, a JSON array, CSV, parquet; .gz, .zst, .bz2 and .xz too), or a
folder of such files. Each text file and each row is a document:
$ python data/text/prepare.py mytext.txt --tokenizer=bpe:4096 --out_dir data/mine
$ python data/text/prepare.py mycode mynotes --suffix=.py,.md --tokenizer=bpe:4096 --out_dir data/mine
$ python data/text/prepare.py chunks/*.jsonl --key=content --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mine
Every tenth document is for validation. If there are fewer than 20 documents, the last tenth of each
document is for validation. The texts may be larger than the memory. Interrupted at any moment and
started again, the script continues where it stopped. Saves train.bin and val.bin with the ids,
meta.json that says how to read them, and the folder tokenizer.
"""
import contextlib
import itertools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    TOKENIZER_HELP, choose_vocabulary, create_encoder, create_parser, cut, fail, finish_data_set,
    join, locked_folder, positive)
from jax_flags import digest, read_json, whole_characters, write_json
from reading import PACKED_ENDINGS, ROW_ENDINGS, TABLE_ENDINGS, ending, read_blocks, read_rows

import numpy as np
from tqdm import tqdm

FEW = 20  # if there are fewer documents, each has a part in train and in val
RAGGED = 'another number of fields than the header (quote texts that have commas)'
# bpe:N learns from about so many bytes of a larger input, taken evenly from the train part
BPE_BYTES = 2**27


def find_files(paths, suffixes):
    """Returns the files that `paths` name. For a folder these are the files in it with one of the
    endings `suffixes`, in the order of their names. A compressed file counts as one with the ending
    of its content (a.txt.gz), unless the folder also has the file that is not compressed (a.txt).
    A file that is named more than once, also by links, is returned once. Raises UserError if a path
    is neither a file nor a folder, or if no file is found."""
    found = []
    for root in paths:
        if not os.path.exists(root):
            fail(f'there is no {root}; name text files, files of rows, or folders of such')
        if os.path.isfile(root):
            found.append(root)
            continue
        if not os.path.isdir(root):
            fail(f'{root} is neither a file nor a folder: write its text to a file first')
        for folder, subfolders, names in os.walk(root, onerror=refuse):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith('.'))
            beside = set(names)
            for name in sorted(names):
                plain, end = os.path.splitext(name)
                is_packed = end.lower() in PACKED_ENDINGS and plain not in beside
                content = plain if is_packed else name
                if name.lower().endswith(suffixes) or content.lower().endswith(suffixes):
                    found.append(os.path.join(folder, name))
    if not found:
        fail(f'{", ".join(paths)} has no file that ends in {" or ".join(suffixes)}; name another '
             'end with --suffix')

    # A text that is read twice would be in train and in val.
    once = {}
    for path in found:
        once.setdefault(os.path.realpath(path), path)
    if len(once) < len(found):
        print(f'{len(found) - len(once):,} files are named more than once, and read once',
              file=sys.stderr)
    return list(once.values())


def refuse(error):
    """Raises the error of a folder that cannot be read. Without this function, os.walk would leave
    the folder out and go on."""
    raise error


class Texts:
    """The documents of text files and of files of rows. A document is read when it is needed."""

    def __init__(self, paths, key, strict):
        """Reads the first documents, at most `FEW` (20), and keeps their lengths in characters in
        `sizes`. If there are fewer documents than `FEW`, parts() needs the lengths: it splits each
        document after nine tenths of its length, into a part for train and a part for val.

        key: the key of the text in a row. If `key` is '', a file of rows is read as a text. strict:
        whether a row without a text is refused, instead of skipped."""
        self.paths = paths
        self.key = key
        self.strict = strict
        first = itertools.islice(self.documents(), FEW)
        self.sizes = [sum(map(len, blocks)) for blocks in first]

    def documents(self):
        """Yields each document as an iterator of blocks, without empty files. Counts documents,
        bytes, skipped rows, and documents with a NUL character."""
        self.n_documents = self.n_bytes = self.n_skipped = self.n_ragged = self.n_with_nul = 0
        for path in self.paths:
            if self.key and ending(path) in ROW_ENDINGS:
                for text in self.rows(path):
                    yield self.count([text])
                continue
            blocks = read_blocks(path)
            first = next(blocks, '')
            if first:
                yield self.count(itertools.chain([first], blocks))

    def rows(self, path):
        """Yields the text of each row of a file. The text of a row is the string under self.key. In
        JSON, a row may also be a string itself.

        A row without a text, or with the empty text '', adds 1 to n_skipped and yields nothing.
        With `strict`, raises UserError for such a row.

        With or without `strict`, raises UserError if a row lacks the key and no earlier row of the
        file had a text, because --key is then probably wrong."""
        has_text = False
        for where, row in read_rows(path, [self.key]):
            text = row.get(self.key) if isinstance(row, dict) else row
            if isinstance(text, str) and text:
                has_text = True
                yield whole_characters(text)
                continue

            # It has none: either the key is wrong, or it is skipped.
            if not has_text and isinstance(row, dict) and self.key not in row:
                as_it_is = ', or take the file as it is with --key='
                if path.lower().endswith('.parquet'):
                    as_it_is = ''
                fail(f'{path}, {where} has no {self.key!r}, only {", ".join(row):.200}; name what '
                     f'is the text with --key{as_it_is}')
            # read_rows gives a list for a row of a table with another number of fields
            is_ragged = isinstance(row, list) and ending(path) in TABLE_ENDINGS
            reason = RAGGED if is_ragged else f'no text under {self.key!r}'
            if self.strict:
                fail(f'{path}, {where} has {reason}; mend it, or leave out --strict')
            self.n_skipped += 1
            self.n_ragged += is_ragged

    def count(self, blocks):
        """Yields the blocks of a document. Adds their bytes to the number of bytes, and 1 to the
        number of documents; and to the number of documents with a NUL character, if it has one."""
        has_nul = False
        for block in blocks:
            self.n_bytes += len(block.encode())
            has_nul |= '\0' in block
            yield block
        self.n_documents += 1
        self.n_with_nul += has_nul

    def parts(self):
        """Splits the documents into train and val. Yields (is_val; blocks). blocks: an iterator of
        strings, which together are a document or a part of one.

        If there are at least `FEW` (20) documents, every tenth document is val as a whole. If there
        are fewer, each document is split in two. The first nine tenths of its characters are train,
        and the rest is val. In this case, the train parts of all documents come first."""
        # Many documents: every tenth as a whole.
        if len(self.sizes) == FEW:
            for i, blocks in enumerate(self.documents()):
                yield i % 10 == 9, blocks
            return

        # Few: of each the first nine tenths, then of each the rest.
        for n, blocks in zip(self.sizes, self.documents(), strict=True):
            yield False, clip(blocks, 0, int(n*0.9))
        for n, blocks in zip(self.sizes, self.documents(), strict=True):
            yield True, clip(blocks, int(n*0.9), n)

    def pieces(self):
        """Yields (text; is_first; is_last; is_val) for each document, or for each part of a
        document (see parts). A document or part of more than a million characters is yielded in
        pieces of at most this length; is_first and is_last mark its first and its last piece.
        Counts the bytes of each split in self.split_bytes."""
        self.split_bytes = {'train': 0, 'val': 0}
        for is_val, blocks in self.parts():
            is_first = True
            for text, is_last in cut(blocks):
                if text:
                    self.split_bytes['val' if is_val else 'train'] += len(text.encode())
                    yield text, is_first, is_last, is_val
                is_first = False

    def all_texts(self):
        return itertools.chain.from_iterable(self.documents())

    def train_texts(self):
        """Yields the texts from which bpe:N learns."""
        step = 1 + sum(map(os.path.getsize, self.paths)) // BPE_BYTES
        train = (text for text, _, _, is_val in self.pieces() if not is_val)
        return itertools.islice(train, 0, None, step)


def clip(blocks, start, stop):
    """Yields the characters [start:stop] of a document, block by block; a block outside of this
    range gives ''. blocks: the texts that the document consists of."""
    at = 0
    for block in blocks:
        yield block[max(0, start - at):max(0, stop - at)]
        at += len(block)


def in_batches(pieces, size):
    """Yields the pieces in lists of about `size` characters each. pieces: the tuples that
    Texts.pieces yields."""
    batch = []
    n = 0
    for piece in pieces:
        batch.append(piece)
        n += len(piece[0]) + 100  # the shortest takes time, too
        if n >= size:
            yield batch
            batch = []
            n = 0
    yield batch


def by_split(lengths):
    """Splits an array of lengths into train and val. In `lengths`, the lengths of val are negative.
    Returns {'train': array, 'val': array}, both without a sign: [5, -2, 7] gives {'train': [5, 7],
    'val': [2]}."""
    return {'train': lengths[lengths >= 0], 'val': -lengths[lengths < 0]}


def cut_back(files, log, width):
    """Removes the last, incomplete piece that an interrupted run of this script may have left in
    its files, and returns the number of complete pieces. write_tokens can then go on with the next
    piece. A piece is complete if `log` has its number of tokens. Truncates each file of tokens
    after the last complete piece. If a file of tokens is shorter than `log` says, as after a power
    failure, empties the files of tokens and `log`, and returns 0.

    files: the open files of tokens, of train and of val. log: the open file of lengths. It has the
    number of tokens of each complete piece, see by_split. width: the number of bytes of a token."""
    lengths = np.fromfile(log.name, np.int32)
    ends = [width * int(part.sum()) for part in by_split(lengths).values()]
    if any(os.path.getsize(file.name) < end for file, end in zip(files, ends)):
        lengths = lengths[:0]
        ends = [0, 0]
    for file, end in zip(files, ends):
        file.truncate(end)
    log.truncate(lengths.nbytes)
    return len(lengths)


def write_tokens(folder, source, texts, vocabulary, num_threads):
    """Writes the tokens of all texts to train.part.bin and val.part.bin, piece by piece. Returns a
    dict: for 'train' and for 'val' the number of tokens of each piece.

    After a piece is written, its number of tokens is appended to lengths.part.bin. If an earlier
    call with the same source was interrupted, this call continues after the last piece in
    lengths.part.bin. source: a JSON value that says which input and which options the tokens are
    made from. texts: a Texts. num_threads: the number of threads that tokenize."""
    with contextlib.ExitStack() as stack:
        *files, log = [stack.enter_context(open(os.path.join(folder, f'{name}.part.bin'), 'ab'))
                       for name in ('train', 'val', 'lengths')]
        source_path = os.path.join(folder, 'source.part.json')
        if read_json(source_path, optional=True) != source:
            log.truncate(0)
            write_json(source_path, source)
        n_done = cut_back(files, log, vocabulary.dtype.itemsize)
        if n_done:
            print(f'continuing after {n_done:,} documents or pieces', file=sys.stderr)

        # What is left, a batch at a time: the tokens first, then the lengths.
        encode = create_encoder(vocabulary, num_threads)
        bar = stack.enter_context(tqdm(unit=' characters', unit_scale=True, disable=None))
        pieces = itertools.islice(texts.pieces(), n_done, None)
        for batch in in_batches(pieces, num_threads * 2**20):
            lengths = []
            encoded = encode([text for text, _, _, _ in batch])
            for (text, is_first, is_last, is_val), ids in zip(batch, encoded):
                ids = join((vocabulary.begin * is_first, ids, vocabulary.end * is_last),
                           vocabulary.dtype)
                files[is_val].write(ids)
                lengths.append(-len(ids) if is_val else len(ids))
                bar.update(len(text))
            for file in files:
                file.flush()
            log.write(np.array(lengths, np.int32))
            log.flush()
        return by_split(np.fromfile(log.name, np.int32))


def main():
    """Prepares the data set that the flags ask for."""
    parser = create_parser(__doc__, os.path.dirname(os.path.abspath(__file__)), rows=True)
    parser.add_argument('input', nargs='+', help='text files, files of rows, or folders')
    parser.add_argument('--tokenizer', default='bpe:4096',
                        help=f'{TOKENIZER_HELP} (default: bpe:4096)')
    parser.add_argument('--suffix', default='.txt,.md,.jsonl,.ndjson,.parquet',
                        help='of files in folders, in whatever case (%(default)s)')
    parser.add_argument('--key', default='text',
                        help='the text of a row of JSON, CSV or parquet (default: text); --key= '
                             'takes JSON and CSV as they are, with their keys')
    parser.add_argument('--chat', action='store_true',
                        help='reserve tokens for conversations in bpe:N, for --template=chatml of '
                             'data/chat/prepare.py')
    parser.add_argument('--strict', nargs='?', const='True', default='', choices=('True',),
                        help='refuse a row without a text, which is skipped and counted otherwise')
    parser.add_argument('--num_proc', type=positive, default=os.cpu_count(),
                        help='threads that tokenize (default: one per core)')
    args = parser.parse_args()
    os.environ['RAYON_NUM_THREADS'] = str(args.num_proc)  # threads of the library tokenizers

    # Texts to tokens, tokens to a data set.
    suffixes = tuple(suffix.strip() for suffix in args.suffix.lower().split(','))
    files = find_files(args.input, suffixes)
    texts = Texts(files, args.key, args.strict)
    if texts.n_skipped and not texts.sizes:
        fail(f'none of {texts.n_skipped:,} rows has a text under {args.key!r} that is not '
             'empty; --strict names the first such row')
    vocabulary = choose_vocabulary(
        args.tokenizer, texts.all_texts, texts.train_texts, has_chat=args.chat)
    states = [[os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns]
              for path in files]
    source = {'files': states, 'vocabulary': digest([vocabulary.tokenizer, vocabulary.files]),
              'tokenizer': args.tokenizer, 'chat': args.chat, 'key': args.key, 'pieces': 3}
    with locked_folder(args.out_dir):
        lengths = write_tokens(args.out_dir, source, texts, vocabulary, args.num_proc)
        sizes = finish_data_set(args.out_dir, vocabulary, lengths, args.rows,
                                n_bytes=texts.split_bytes)

    # What was read, and what has become of it.
    print(f'read {texts.n_documents:,} documents of {len(files):,} files, {texts.n_bytes:,} bytes')
    if texts.n_skipped:
        print(f'skipped {texts.n_skipped:,} rows without a text; --strict names the first')
    if texts.n_ragged:
        print(f'{texts.n_ragged:,} of them have {RAGGED}')
    if texts.n_with_nul:  # English in UTF-16 is valid UTF-8, with a NUL after each letter
        print(f'{texts.n_with_nul:,} documents have NUL characters: are they texts in UTF-8?')
    for split, n in sizes.items():
        print(f'{split} has {n:,} tokens')
    n = sum(int(part.sum()) for part in lengths.values())
    print(f'{n:,} tokens, {texts.n_bytes / n:.2f} bytes per token')


if __name__ == '__main__':
    main()
