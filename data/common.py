"""What the scripts data/*/prepare.py share: tokenizers and writing a data set; reading.py reads.
Importing this file makes their errors one line, with exit code 2."""
import argparse
import array
import bisect
import collections
import http.client
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import urllib.request
from typing import NamedTuple

import numpy as np  # the rest is imported where it is needed: most scripts need little

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from jax_flags import UserError, exit_on_user_error
from reading import read_text  # noqa: F401 (of the scripts)


class Stopped(KeyboardInterrupt):
    """A signal has come that ends the script: Ctrl-C, SIGTERM, or SIGHUP of a terminal that
    closes."""
    number = signal.SIGINT


class Signals:
    """What stop() is to do."""
    held = False  # whether to wait for the end of an unstopped() block
    number = None  # of the signal that has come


def stop(number, frame):
    """Handles a signal: raises Stopped, once, so that another one does not disturb what is tidied
    up then."""
    if Signals.number is None:
        Signals.number = number
        if not Signals.held:
            raise_stopped()


def raise_stopped():
    error = Stopped()
    error.number = Signals.number
    raise error


@contextlib.contextmanager
def unstopped():
    """Holds a signal until the block has ended."""
    Signals.held = True
    try:
        yield
    finally:
        Signals.held = False
    if Signals.number is not None:
        raise_stopped()


def end_at_signals():
    """Ends the script at a signal, after tidying up; nohup, which ignores one, still does."""
    for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
        number = getattr(signal, name, None)  # Windows lacks one
        if number is None:
            continue
        is_heeded = signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        if is_heeded:
            signal.signal(number, stop)


def say_stopped(error, remedy):
    """Says on stderr that a signal has ended the script. Returns the exit code."""
    number = getattr(error, 'number', signal.SIGINT)
    if number == signal.SIGINT:
        said = '\ninterrupted'
    else:
        said = f'stopped by {signal.Signals(number).name}'
    with contextlib.suppress(OSError):  # the terminal is gone
        print(f'{said}; run the same command {remedy}', file=sys.stderr)
    return 128 + number


def end_script(kind, error, traceback):
    """Acts as sys.excepthook, as exit_on_user_error does, with a line for a signal."""
    if isinstance(error, KeyboardInterrupt):
        sys.exit(say_stopped(error, 'again'))
    exit_on_user_error(kind, error, traceback)


sys.excepthook = end_script
SHAKESPEARE = ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
               'input.txt')


def fail(message):
    """Raises UserError."""
    raise UserError(message)


ROWS_HELP = ('instead of documents one after the other, rows for a training with this block_size, '
             'each of which begins with a document')


def positive(text):
    """Returns the number above 0 that a flag gives. Raises ValueError for another value."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def create_parser(doc, out_dir, *, rows=False):
    """Returns the parser of a script with this docstring, with the flag --out_dir and its default,
    and with --rows if asked. From here on a signal ends the script with a line."""
    end_at_signals()
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', default=out_dir,
                        help="where the files go (default: this script's folder)")
    if rows:
        parser.add_argument('--rows', type=positive, default=0, metavar='BLOCK_SIZE',
                            help=ROWS_HELP)
    parser.error = fail # one line instead of the usage
    return parser


def download(url, path):
    """Downloads a file unless it is there already. Raises UserError."""
    if os.path.exists(path):
        return
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as e:
        fail(f'cannot download {url} ({e}); save it by hand as {path}, or name a text file of your '
             'own')
    save(os.path.dirname(path), {os.path.basename(path): content})


def cut(blocks, size=2**20):
    """Yields (piece, is_last) of a text that comes in blocks.

    A piece has at most `size` characters, and ends where a line begins with a character that is no
    space, if there is such a place: GPT-2's BPE, bpe:N and their like start a new token there. Else
    it ends before a space between two words, where most others do, too."""
    rest = ''
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > size:
            # The last line in reach that does not begin with a space.
            newline = rest.rfind('\n', start, start + size)
            while newline > start and rest[newline + 1].isspace():
                newline = rest.rfind('\n', start, newline)

            # Without one, the end of a word.
            if newline > start:
                end = newline + 1
            else:
                end = end_of_word(rest, start, start + size)
            yield rest[start:end], False
            start = end
        rest = rest[start:]
    yield rest, True


def end_of_word(text, start, stop):
    """Returns where the last word of text[start:stop] ends that a single space and another word
    follow; stop if none does."""
    end = text.rfind(' ', start + 1, stop)
    while end > start and (text[end - 1].isspace() or text[end + 1].isspace()):
        end = text.rfind(' ', start + 1, end)
    return end if end > start else stop


# -----------------------------------------------------------------------------
# tokenizers

TOKENIZER_HELP = ("char: a token per character; gpt2: GPT-2's BPE; bpe:4096: a BPE of 4,096 "
                  'tokens, learned from the train part; a Hugging Face folder or owner/name: its '
                  'tokens')
END = '<|endoftext|>'


class Vocabulary(NamedTuple):
    """How text becomes ids. All of it fits into JSON and goes to other processes."""
    tokenizer: dict  # its description in meta.json
    size: int
    begin: list = []  # the ids before and after a document
    end: list = []
    files: dict = {}  # {name: text} of the folder tokenizer/ of the data set


def choose_vocabulary(wanted, texts=None, train_texts=None):
    """Returns the vocabulary that --tokenizer asks for, see TOKENIZER_HELP.

    texts, train_texts: functions that return an iterable of all texts, and of those that bpe:N
    learns from. Raises UserError."""
    if wanted == 'char':
        chars = set()
        for text in texts():
            chars.update(text)
        return Vocabulary({'kind': 'char', 'chars': ''.join(sorted(chars))}, len(chars))
    if wanted == 'gpt2':
        enc = gpt2_encoding()
        return Vocabulary({'kind': 'gpt2'}, enc.n_vocab, end=[enc.eot_token])
    if wanted.startswith('bpe:'):
        size = wanted.removeprefix('bpe:')
        if not (size.isdecimal() and 257 <= int(size) <= 2**20):
            fail(f'--tokenizer={wanted}: give a number of tokens, at least 257 (the bytes and '
                 f'{END}), as in bpe:4096')
        return train_bpe(train_texts(), int(size))
    if '/' not in wanted and not os.path.exists(wanted):
        fail(f'--tokenizer={wanted}: it may be char, gpt2, bpe:4096, or the folder or owner/name '
             'of a model')

    # A document has to end.
    _, vocabulary = load_model_tokenizer(wanted)
    if not vocabulary.end:
        fail(f'the tokenizer {wanted} has no end token: name one, "eos_token", in its '
             'tokenizer_config.json')
    return vocabulary


def train_bpe(texts, size):
    """Returns a byte-level BPE of at most `size` tokens: END, the 256 bytes, and the merges that
    occur twice in the texts.

    A token is a part of one match: a word with the space before it, a digit, or punctuation with
    the newlines after it. The pattern is Qwen2's, because llama.cpp splits by patterns that it
    knows only; one in which a newline takes the indentation that follows has 4% (bpe:1024) to 6%
    (bpe:4096) fewer tokens of Python."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from jax_files.tokenizer_library import QWEN2_SPLIT

    # How text is split, and ids become text again.
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()

    # Learn the merges; any byte has a token from the start.
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, special_tokens=[END],
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    pieces = (piece for text in texts for piece, _ in cut([text], 2**16))
    bpe.train_from_iterator(pieces, trainer)

    # What transformers reads.
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': END,
              'clean_up_tokenization_spaces': False}
    files = {'tokenizer.json': bpe.to_str(pretty=True),
             'tokenizer_config.json': json.dumps(config, indent=2) + '\n'}
    return Vocabulary({'kind': 'folder', 'path': 'tokenizer'}, bpe.get_vocab_size(), [],
                      [bpe.token_to_id(END)], files)


def gpt2_encoding():
    """Returns GPT-2's BPE, of tiktoken. Raises UserError without its files."""
    try:
        import tiktoken
        return tiktoken.get_encoding('gpt2')
    except ImportError:
        fail('tiktoken is not installed; pip install tiktoken')
    except (OSError, ValueError) as e: # no network, or a damaged download
        url = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/'
        fail(f"cannot download GPT-2's BPE files ({type(e).__name__}); set TIKTOKEN_CACHE_DIR to a "
             f'folder that holds {url}encoder.json named '
             '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 and '
             f'{url}vocab.bpe named 6d1cbeee0f20b3d9449abfede4726ed8212e3aee (each the sha1 of its '
             'URL)')


def load_model_tokenizer(model):
    """Returns the tokenizer of a Hugging Face folder or owner/name, and its vocabulary. Raises
    UserError."""
    from jax_files.tokenizers import READ_FILES, copy_tokenizer, load_tokenizer
    from jax_files.weight_files import local_path
    source = {'kind': 'folder', 'path': local_path(model, READ_FILES)}
    enc = load_tokenizer(source)
    with tempfile.TemporaryDirectory() as folder:
        copy_tokenizer(source, folder)
        files = {}
        for name in list_files(folder):
            with open(os.path.join(folder, name), 'rb') as f:
                files[name] = f.read().decode()
    end = [] if enc.end_token is None else [enc.end_token]
    begin = [i for i in enc.encode('') if i not in end]
    return enc, Vocabulary({'kind': 'folder', 'path': 'tokenizer'}, enc.vocab_size, begin, end,
                           files)


def encode_function(vocabulary):
    """Returns text -> ids, without those at the beginning and the end of a document. Names of
    special tokens are plain text."""
    # Of characters: a table of all that Unicode has, which takes a text at once.
    if vocabulary.tokenizer['kind'] == 'char':
        chars = vocabulary.tokenizer['chars']
        table = np.full(sys.maxunicode + 1, -1, np.int32) # from code point to id
        code_points = [ord(c) for c in chars]
        table[code_points] = np.arange(len(chars))

        def encode(text):
            ids = table[np.frombuffer(text.encode('utf-32-le'), '<u4')]
            if (ids < 0).any():
                fail('a character that was not there when the vocabulary was made: an input has '
                     'changed')
            return ids

        return encode
    if vocabulary.tokenizer['kind'] == 'gpt2':
        enc = gpt2_encoding() # encode_ordinary makes a list, which takes 15% longer

        def encode(text):
            return enc.encode_to_numpy(text, disallowed_special=()) if text else []

        return encode
    tokenizer = read_tokenizer(vocabulary)
    return tokenizer.encode_fast  # without offsets it takes half the time


def read_tokenizer(vocabulary):
    """Returns the SafeTokenizer of a vocabulary of the kind 'folder'; for it names of special
    tokens are plain text."""
    from jax_files.tokenizer_library import SafeTokenizer
    tokenizer = SafeTokenizer.from_str(vocabulary.files['tokenizer.json'])
    tokenizer.raw.encode_special_tokens = True
    return tokenizer


def drop_counter(vocabulary):
    """Returns a function from a text to {character: how often} of those that the vocabulary lacks
    and leaves out."""
    # characters raise an error, and GPT-2 has all bytes
    if vocabulary.tokenizer['kind'] != 'folder':
        return lambda text: {}
    return read_tokenizer(vocabulary).count_dropped


class Unit(NamedTuple):
    """A document, or a piece of one."""
    text: str
    is_first: bool = True  # of its document
    is_last: bool = True
    is_val: bool = False
    before: str = ''  # the end of the piece before it, BEFORE characters or less


BEFORE = 200


def starts_with(ids, head):
    return list(ids[:len(head)]) == list(head)


class PieceEncoder:
    """Encodes a document in pieces to the ids that it has as a whole.

    Many tokenizers put a space before a text, which a piece in the middle must not have. So it is
    encoded together with the end of the piece before it, whose ids are left out then."""

    def __init__(self, encode):
        """encode: a function from a text to the list of its ids."""
        self.encode = encode
        # then a piece ends before a space: a newline may be a part of the word that follows
        self.puts_space = list(encode('a\nb')) != [*encode('a\n'), *encode('b')]

    def __call__(self, unit):
        """Returns the ids of a Unit."""
        text = unit.text
        before = unit.before

        # characters that belong to the piece behind this one, and to this one
        n_moved = self.count_moved(text[-BEFORE:])
        if n_moved and not unit.is_last:
            text = text[:-n_moved]
        n_moved = self.count_moved(before)
        if n_moved:
            text = before[-n_moved:] + text
            before = before[:-n_moved]
        if not before:
            return self.encode(text)

        # a token may extend over the cut: then after fewer characters, or after what is seldom a
        # part of one
        contexts = [before[-n:] for n in (BEFORE, 20, 5, 3, 2, 1)]
        for context in [*contexts, '\n', '.']:
            head = self.encode(context)
            ids = self.encode(context + text)
            if head and starts_with(ids, head):
                return ids[len(head):]
        return self.encode(text)

    def count_moved(self, end):
        """Returns how many of the last characters of a piece, given its end, go to the next
        piece."""
        if not self.puts_space:
            return 0
        stop = len(end) - 1  # behind the space comes a word
        last_word = end_of_word(end, 0, stop)
        return len(end) - last_word if last_word < stop else 0


def create_encoder(vocabulary):
    """Returns a function that encodes a list of units.

    It returns the number of tokens of each, negative for val, all tokens in a row, how many
    characters they had, and {character: how often} of those that were left out."""
    dtype = token_dtype(vocabulary.size)
    encode = encode_function(vocabulary)
    count_dropped = drop_counter(vocabulary)

    def encode_text(unit):
        return encode(unit.text)

    encode_piece = encode_text
    if vocabulary.tokenizer['kind'] == 'folder':
        encode_piece = PieceEncoder(encode)

    def encode_units(units):
        lengths = []
        parts = [np.array([], dtype)]
        n_characters = 0
        dropped = collections.Counter()
        for unit in units:
            # The ids of this piece, with what begins and ends a document.
            dropped.update(count_dropped(unit.text))
            begin = vocabulary.begin if unit.is_first else []
            end = vocabulary.end if unit.is_last else []
            ids = (begin, encode_piece(unit), end)

            # A negative length says that it is for validation.
            n_tokens = sum(map(len, ids))
            lengths.append(-n_tokens if unit.is_val else n_tokens)
            parts += [np.array(part, dtype) for part in ids]
            n_characters += len(unit.text)
        return np.array(lengths, np.int32), np.concatenate(parts), n_characters, dropped

    return encode_units


def encode_documents(texts, vocabulary, block_size=0):
    """Returns the ids of documents in a row, or of rows of block_size + 1 tokens, see fill_rows."""
    from jax_files.tokenizer_library import warn_of_dropped
    lengths, ids, _, dropped = create_encoder(vocabulary)([Unit(text) for text in texts])
    warn_of_dropped(dropped, 'the texts')
    if block_size:
        documents, taken = fill_rows(lengths, block_size)
        starts = np.cumsum(lengths) - lengths
        parts = [ids[:0]]
        for start, n in zip(starts[documents], taken, strict=True):
            parts.append(ids[start:start + n])
        ids = np.concatenate(parts)
    return ids


def row_length(block_size):
    """Returns the key of meta.json that says that a data set has rows."""
    return {'row_length': block_size + 1} if block_size else {}


def fill_rows(lengths, block_size, n_waiting=1000):
    """Returns which documents fill rows of block_size + 1 tokens, in order, and how many tokens of
    each, given the numbers of tokens of all.

    It is by best fit, as in nanochat's loader: always the longest of the next n_waiting documents
    that fits into the rest of the row; where none does, the shortest, cropped. Prints how much that
    crops. Raises UserError if no row becomes full."""
    # The documents in the order of the rows, and how much of each is used.
    documents = array.array('q')
    taken = array.array('q')
    coming = enumerate(map(int, lengths))
    waiting = [] # (tokens, document), sorted
    space = block_size + 1 # of the row
    n_full = 0 # documents in full rows

    # Each round puts one document into the row.
    while True:
        for i, n in itertools.islice(coming, n_waiting - len(waiting)):
            bisect.insort(waiting, (n, i))
        if not waiting:
            break

        # The longest that fits, or else the shortest.
        best = bisect.bisect(waiting, (space, len(lengths))) - 1
        n, i = waiting.pop(max(0, best))
        n = min(n, space)
        documents.append(i)
        taken.append(n)
        space -= n
        if space == 0:
            space = block_size + 1
            n_full = len(documents) # what follows may be an incomplete row

    # Only full rows count.
    documents = np.array(documents[:n_full], np.int64)
    taken = np.array(taken[:n_full], np.int64)
    if not n_full:
        fail(f'{lengths.sum():,} tokens do not fill a row of {block_size + 1}; use fewer --rows or '
             'more text')

    # Say how much of the text the rows leave out.
    n = taken.sum()
    print(f'{n // (block_size + 1):,} rows of {block_size + 1} tokens; {1 - n / lengths.sum():.1%} '
          'of the tokens are cropped')
    return documents, taken


def token_dtype(vocab_size):
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)

# -----------------------------------------------------------------------------
# a data set from memory

def describe(vocabulary, train_tokens, val_tokens, max_id, **more):
    """Returns the content of meta.json, with `more` keys."""
    meta = {'vocab_size': vocabulary.size, 'dtype': token_dtype(vocabulary.size).name,
            'tokenizer': vocabulary.tokenizer, 'train_tokens': train_tokens,
            'val_tokens': val_tokens,
            'max_id': max_id} | more
    return json.dumps(meta, ensure_ascii=False).encode()


def save_tokens(folder, train_ids, val_ids, vocabulary, files=(), **meta):
    """Writes a data set: train.bin, val.bin, meta.json with the keys of `meta`, the files of its
    tokenizer, and more `files`, {name: bytes}. Raises UserError."""
    dtype = token_dtype(vocabulary.size)
    train_ids, val_ids = np.asarray(train_ids, dtype), np.asarray(val_ids, dtype)
    meta = describe(vocabulary, len(train_ids), len(val_ids),
                    int(max(train_ids.max(), val_ids.max())), **meta)
    save(folder, {'train.bin': train_ids.tobytes(), 'val.bin': val_ids.tobytes(), **dict(files),
                  **tokenizer_files(vocabulary), 'meta.json': meta})


def tokenizer_files(vocabulary):
    return {f'tokenizer/{name}': text.encode() for name, text in vocabulary.files.items()}


def save(folder, files):
    """Writes the files {name: bytes} aside, then renames them, train.bin last: an interrupted run
    leaves no half data set (without meta.json, train.bin would count as GPT-2's tokens). Raises
    UserError."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='tmp-', dir=folder) as tmp:
            for name, content in files.items():
                write_file(os.path.join(tmp, name), content)
            with unstopped():
                if 'meta.json' in files:
                    remove_data_set(folder)
                move_files(tmp, folder, files)
    except OSError as e:
        fail(f'cannot write to {folder} ({e.strerror}); free some space or choose another folder '
             'with --out_dir')


def write_file(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb') as f:
        f.write(content)


def move_files(source, folder, names):
    for name in sorted(names, key='train.bin'.__eq__): # train.bin last, see save
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        os.replace(os.path.join(source, name), os.path.join(folder, name))


def remove_data_set(folder):
    """Removes what says that an older data set is complete, train.bin and meta.json, its tokenizer
    and its masks: new .bin files do not fit them."""
    tokenizer = os.path.join(folder, 'tokenizer')
    names = [os.path.join('tokenizer', name) for name in list_files(tokenizer)]
    remove([os.path.join(folder, 'train.bin')])
    remove([os.path.join(folder, name) for name in ['meta.json', *names]
            if name.endswith(('.json', '.jinja'))])
    remove([os.path.join(folder, f'{split}_{of}.bin') for split in ('train', 'val')
            for of in ('mask', 'ends')])


def list_files(folder):
    """Returns the names of the files of a folder and of its folders, as paths from it; [] if there
    is no such folder."""
    names = []
    for parent, _, files in os.walk(folder):
        for name in files:
            names.append(os.path.relpath(os.path.join(parent, name), folder))
    return names


def remove(paths):
    for path in paths:
        if os.path.exists(path):
            os.remove(path)
