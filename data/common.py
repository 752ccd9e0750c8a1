"""Shared code of the scripts data/*/prepare.py: flags and signals, tokenizers, writing a data set.
A script that imports this file prints a UserError, a missing package, an error of the disk or a
lack of memory as one line, not as a traceback. It then exits with code 2 (exit_on_user_error)."""
import argparse
import bisect
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import os
import signal
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from jax_flags import NOT_HERE, UserError, is_url, lock_file, new_file, start_script, write_json

start_script()  # before the first package, which may be missing

import numpy as np  # other imports are in the functions, because most scripts need few

SHAKESPEARE = ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
               'input.txt')


def fail(message):
    """Raises UserError."""
    raise UserError(message)


def end_at_signals():
    """Makes Ctrl-C, SIGTERM and the SIGHUP of a closed terminal end the script with one line and
    exit code 128 + n, after the script has tidied up. A signal that nohup ignores stays ignored."""
    script = os.getpid()

    def stop(number, frame):
        if os.getpid() != script:  # a worker of datasets, which has a copy of this function
            os._exit(128 + number)
        # no error is printed from here on, nor that of a library that fails as it tidies up
        sys.excepthook = lambda *error: sys.exit(128 + number)
        sys.unraisablehook = lambda error: None
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(2, b'\ninterrupted; run the same command again\n')
        sys.exit(128 + number)

    for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
        number = getattr(signal, name, None)  # Windows lacks one
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def positive(text):
    """Returns the number above 0 that `text`, the value of a flag, stands for. Raises ValueError
    for any other value."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def folder_name(text):
    """Returns the path for `text`, the value of --out_dir, which may begin with ~. Raises
    ArgumentTypeError if it is empty."""
    if not text:
        raise argparse.ArgumentTypeError('it is empty; name a folder')
    return os.path.expanduser(text)


def create_parser(doc, out_dir, *, rows=False):
    """Returns the parser of a script, with the flag --out_dir, and with --rows if `rows`. doc: the
    script's docstring, which --help prints. out_dir: the default of --out_dir. From this call on, a
    signal ends the script with one line (end_at_signals)."""
    end_at_signals()
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', default=out_dir, type=folder_name,
                        help="where the files go (default: this script's folder)")
    if rows:
        parser.add_argument('--rows', type=positive, default=0, metavar='BLOCK_SIZE',
                            help='instead of documents one after the other, rows for a training '
                                 'with this block_size, each of which begins with a document')
    parser.error = fail  # one line instead of the usage
    return parser


def download(url, path):
    """Downloads a file unless it is there already. Raises UserError if the download fails."""
    if os.path.exists(path):
        return
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    except OSError as e:
        fail(f'cannot download {url} ({e}); save it by hand as {path}, or name a text file of your '
             'own')
    with new_file(path) as unfinished:
        Path(unfinished).write_bytes(content)


# -----------------------------------------------------------------------------
# tokenizers

TOKENIZER_HELP = ("char: a token per character; gpt2: GPT-2's BPE; bpe:4096: a BPE of 4,096 "
                  'tokens, learned from the train part; a Hugging Face folder or owner/name, a '
                  'run or a data set: its tokens')
END = '<|endoftext|>'


class Vocabulary(NamedTuple):
    """A tokenizer, and how documents are written with it."""
    tokenizer: dict  # its description in meta.json
    size: int
    begin: list = []  # the ids before and after a document
    end: list = []
    files: dict = {}  # {name: text} of the folder tokenizer/ of the data set

    @property
    def dtype(self):
        return np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)


# the special tokens of a chat, beside END, that bpe:N has with --chat
CHAT_TOKENS = ('<|system|>', '<|user|>', '<|assistant|>', '<|end|>')


def choose_vocabulary(wanted, texts=None, train_texts=None, *, has_chat=False):
    """Returns the Vocabulary for `wanted`, the value of the flag --tokenizer (see TOKENIZER_HELP).

    has_chat: whether bpe:N also has CHAT_TOKENS. texts: a function that returns an iterable of all
    texts, from which char learns. train_texts: a function that returns an iterable of the training
    texts, from which bpe:N learns. Both are None in a script that learns no vocabulary. Raises
    UserError for a value that is not possible."""
    kind, _, size = wanted.partition(':')
    if has_chat and kind != 'bpe':
        fail(f'--chat is for a vocabulary of its own, as --tokenizer=bpe:4096, not {wanted}')
    if kind in ('char', 'bpe') and texts is None:
        fail(f'--tokenizer={wanted}: data/text/prepare.py learns a vocabulary, also from parquet')
    if wanted == 'char':
        chars = set()
        for text in texts():
            chars.update(text)
        return Vocabulary({'kind': 'char', 'chars': ''.join(sorted(chars))}, len(chars))
    if wanted == 'gpt2':
        enc = gpt2_encoding()
        return Vocabulary({'kind': 'gpt2'}, enc.n_vocab, end=[enc.eot_token])
    if kind == 'bpe' and size.isdecimal() and 257 <= int(size) <= 2**20:
        return train_bpe(train_texts(), int(size), has_chat)
    if '/' not in wanted and not os.path.exists(wanted):
        fail(f'--tokenizer={wanted}: it may be char, gpt2, bpe:4096 (at least bpe:257, the bytes '
             f'and {END}), or the folder or owner/name of a model')

    # the characters of a run or a data set
    found = find_tokenizer(wanted)
    if found['kind'] == 'char':
        return Vocabulary(found, len(found['chars']))

    # A document has to end.
    _, vocabulary = load_model_tokenizer(wanted)
    if not vocabulary.end:
        fail(f'the tokenizer {wanted} has no end token: name one, "eos_token", in its '
             'tokenizer_config.json')
    return vocabulary


def train_bpe(texts, size, has_chat=False):
    """Learns a byte-level BPE from `texts`, and returns its Vocabulary. It has at most `size`
    tokens: END; with has_chat also CHAT_TOKENS; the 256 bytes; and the merges that occur at least
    twice in the texts.

    A pattern splits the text into matches. A match is a word with the space before it, a digit, or
    punctuation with the newlines after it. A token is a part of one match. The pattern is Qwen2's,
    because llama.cpp only splits by patterns that it knows. Another pattern, which keeps a newline
    and the indentation after it in one match, would encode Python with 4% (bpe:1024) to 6%
    (bpe:4096) fewer tokens, but llama.cpp does not know that pattern."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from jax_hub.gguf_files import QWEN2_SPLIT

    # How text is split, and ids become text again.
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()

    # Learn the merges; any byte has a token from the start.
    special = [END, *CHAT_TOKENS] if has_chat else [END]
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, special_tokens=special,
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator((piece for text in texts for piece, _ in cut([text], 2**16)), trainer)

    # What transformers reads.
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': END,
              'clean_up_tokenization_spaces': False}
    files = {'tokenizer.json': bpe.to_str(pretty=True),
             'tokenizer_config.json': json.dumps(config, indent=2) + '\n'}
    if has_chat:  # an answer ends with <|end|>, a document with END
        ends = [bpe.token_to_id(END), bpe.token_to_id('<|end|>')]
        files['generation_config.json'] = json.dumps({'eos_token_id': ends}) + '\n'
    return Vocabulary({'kind': 'folder', 'path': 'tokenizer'}, bpe.get_vocab_size(), [],
                      [bpe.token_to_id(END)], files)


def gpt2_encoding():
    """Returns GPT-2's BPE, of tiktoken. Raises UserError if its files cannot be downloaded."""
    import tiktoken
    try:
        return tiktoken.get_encoding('gpt2')
    except (OSError, ValueError) as e:  # no network, or a damaged download
        fail(f"cannot download GPT-2's BPE files ({type(e).__name__}); data/shakespeare/readme.md "
             'says how to put them into a TIKTOKEN_CACHE_DIR by hand')


def load_model_tokenizer(model, template=None, stop_text=None):
    """Returns (HFTokenizer; Vocabulary) of a model. model: a Hugging Face folder or owner/name, the
    out_dir of a run, a data set, or gpt2. template: a chat template, a text, in place of the
    model's. stop_text: the text that ends the answers of this template. It is ignored if the model
    has an end-of-text token. Raises UserError if the tokenizer cannot be read."""
    from jax_hub.tokenizer_files import write_template, write_tokenizer
    from jax_hub.tokenizers import HFTokenizer
    source = find_tokenizer(model)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(source, folder)
        if template:
            write_template(folder, template)
        enc = HFTokenizer(folder, is_copy=True)
        if stop_text and enc.end_token is None:
            write_json(os.path.join(folder, 'generation_config.json'),
                       {'stop_strings': [stop_text]})
            enc = HFTokenizer(folder, is_copy=True)
        files = {path.relative_to(folder).as_posix(): path.read_bytes().decode()
                 for path in Path(folder).rglob('*') if path.is_file()}
    end = [] if enc.end_token is None else [enc.end_token]
    begin = [i for i in enc.encode('') if i not in end]
    return enc, Vocabulary({'kind': 'folder', 'path': 'tokenizer'}, enc.vocab_size, begin, end,
                           files)


@functools.cache  # all files of a run's checkpoint are read
def find_tokenizer(model):
    """Returns the description of the tokenizer of a model. model: see load_model_tokenizer."""
    from jax_hub.folders import local_path
    from jax_hub.tokenizers import READ_FILES
    if model == 'gpt2':
        return {'kind': 'gpt2'}
    folder = os.path.expanduser(model)
    if os.path.isfile(os.path.join(folder, 'meta.json')):  # a data set
        from jax_run.data import load_dataset_meta
        return load_dataset_meta(folder)['tokenizer']
    if os.path.isdir(os.path.join(folder, 'ckpt')):  # a run
        from jax_run.checkpoints import choose_checkpoint
        return choose_checkpoint(folder)[1]['tokenizer']
    return {'kind': 'folder', 'path': local_path(model, READ_FILES)}


@functools.cache
def library_tokenizer(content):
    """Makes a Tokenizer from the content of a tokenizer.json. If a text contains the name of a
    special token, such as <|endoftext|>, the Tokenizer encodes it as plain text."""
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def create_encoder(vocabulary, num_threads=None):
    """Returns a function that takes a list of texts and returns an iterator over the ids of each
    text. The ids are those of the text alone, without the ids that begin and end a document
    (vocabulary.begin, vocabulary.end). Names of special tokens in a text are plain text.

    vocabulary: a Vocabulary. num_threads: the number of threads for GPT-2's BPE and for characters.
    Hugging Face's tokenizers use threads of their own; the environment variable RAYON_NUM_THREADS
    sets how many."""
    kind = vocabulary.tokenizer['kind']
    if kind == 'folder':
        tokenizer = library_tokenizer(vocabulary.files['tokenizer.json'])

        def encode_all(texts):  # without offsets it takes half the time
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return (encoding.ids for encoding in encodings)

        return encode_all
    if kind == 'gpt2':
        encode = functools.partial(gpt2_encoding().encode_to_numpy, disallowed_special=())
    else:
        encode = functools.partial(
            encode_characters, {c: i for i, c in enumerate(vocabulary.tokenizer['chars'])})
    if num_threads == 1:
        return functools.partial(map, encode)
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    return functools.partial(pool.map, encode)


def encode_characters(stoi, text):
    """Returns the ids of a text. stoi: {character: id}. Raises UserError for unknown characters."""
    try:
        return [stoi[c] for c in text]
    except KeyError as e:
        fail(f'the vocabulary has no character {e}: take it out of the texts, or if the script has '
             'just made the vocabulary, an input has changed')


def join(parts, dtype):
    """Concatenates lists or arrays of token ids to one array, of type `dtype`."""
    return np.concatenate([np.zeros(0, dtype), *(np.array(part, dtype) for part in parts)])


def encode_documents(texts, vocabulary, num_threads=None):
    """Returns a list with an array of token ids for each document in `texts`. Each array starts
    with the ids vocabulary.begin and ends with the ids vocabulary.end. num_threads: see
    create_encoder."""
    return [join((vocabulary.begin, ids, vocabulary.end), vocabulary.dtype)
            for ids in create_encoder(vocabulary, num_threads)(texts)]


def cut(blocks, size=2**20):
    """Cuts a text into pieces of at most `size` characters that can be tokenized one by one. Yields
    (piece; is_last) for each piece. blocks: an iterable of texts, which are the text when joined.

    A piece ends after a newline that has no space on either side. There, GPT-2's BPE, bpe:N and
    similar tokenizers give the same tokens as for the whole text. If there is no such newline, the
    piece ends before a space in front of a word. There, too, most tokenizers give the same tokens
    as for the whole text. But a tokenizer that puts a space before a text puts one before each
    piece."""
    rest = ''
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > size:
            end = end_of_piece(rest, start, start + size)
            yield rest[start:end], False
            start = end
        rest = rest[start:]
    yield rest, True


def end_of_piece(text, start, stop):
    """Returns the index in a text at which a piece ends. The piece begins at `start`. It ends after
    the last newline before `stop` that has no white space (such as another newline) next to it. If
    there is no such newline, the piece ends before the last space before `stop` that has no white
    space directly after it. This space begins the next piece. If there is no such space either, the
    piece ends at `stop`."""
    end = text.rfind('\n', start + 1, stop)
    while end > start:
        # GPT-2's BPE would join the newline to a space before it, at the end of a text only
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
        end = text.rfind('\n', start + 1, end)
    end = text.rfind(' ', start + 1, stop)
    while end > start and text[end + 1].isspace():
        end = text.rfind(' ', start + 1, end)
    return end if end > start else stop


# -----------------------------------------------------------------------------
# writing a data set

META_FORMAT = 2  # of meta.json; those without "format" have no digests
# the files of an unfinished data set. Only data/text writes lengths, only data/chat writes chats,
# journal and masks; both write source
PARTS = ('train.part.bin', 'val.part.bin', 'train.rows.part.bin', 'val.rows.part.bin',
         'lengths.part.bin', 'source.part.json', 'chats.part.bin', 'chats_mask.part.bin',
         'chats_bytes.part.bin', 'journal.part.jsonl', 'train_mask.part.bin', 'val_mask.part.bin')
# what a data set's folder "tokenizer" may have, beside further chat templates
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'generation_config.json',
                   'special_tokens_map.json', 'chat_template.jinja', 'chat_template.json')


@contextlib.contextmanager
def locked_folder(folder, *, is_emptied=False):
    """Makes the folder of a data set, and locks it within the with block. Where a folder cannot be
    locked (Windows, some file systems), it is not.

    is_emptied: whether the files that an interrupted script has left there (PARTS) are removed, for
    a script that does not continue with them. Raises UserError if another process holds the lock,
    or if it is the folder of a run: a data set there would replace the run's tokenizer."""
    if is_url(str(folder)):
        fail(f'out_dir={folder} {NOT_HERE}')
    if os.path.isdir(os.path.join(folder, 'ckpt')):
        fail(f'{folder} is the folder of a run, which would lose its tokenizer; choose another '
             '--out_dir')
    os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(PermissionError):  # Windows opens no folder
            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)
            if not lock_file(lock):
                fail(f'another process prepares a data set in {folder}; wait for it, or choose '
                     'another --out_dir')
        if is_emptied:
            remove(folder, PARTS)
        yield


def save_documents(folder, documents, vocabulary, block_size=0, files=None, n_bytes=None, **meta):
    """Writes a data set from memory. Returns a dict with the number of tokens of 'train' and of
    'val'. documents: a dict; for 'train' and for 'val' it has a list of documents, and a document
    is a list of token ids. The other parameters are those of finish_data_set."""
    with locked_folder(folder, is_emptied=True):
        lengths = {}
        for split, parts in documents.items():
            Path(folder, f'{split}.part.bin').write_bytes(join(parts, vocabulary.dtype))
            lengths[split] = list(map(len, parts))
        return finish_data_set(folder, vocabulary, lengths, block_size, files, n_bytes, **meta)


def finish_data_set(folder, vocabulary, lengths=None, block_size=0, files=None, n_bytes=None,
                    **meta):
    """Makes train.bin, val.bin and meta.json of a data set from train.part.bin and val.part.bin in
    `folder`, and removes an older data set there. Returns {'train', 'val': the number of tokens}.

    vocabulary: a Vocabulary, the tokenizer of the data set.
    block_size: if it is not 0, the documents are cut into rows for a training with this block_size,
    see write_rows.
    lengths: {'train', 'val': the number of tokens of each document}; needed only if block_size is
    not 0.
    files: more files for the folder, {name: bytes, or the path of a file that is moved there}.
    n_bytes: {'train', 'val': the number of UTF-8 bytes of the texts}; None if unknown. For chats,
    only the parts of the texts that count in the loss are counted.
    meta: more keys for meta.json.

    If a split has too few tokens or no full row, removes train.part.bin, val.part.bin and the other
    files of the unfinished data set (PARTS), and raises UserError.

    Writes the tokenizer's files, `files` and meta.json first. Then renames the files of tokens,
    train.bin last, because a folder counts as a data set once it has train.bin. Without meta.json,
    its tokens would count as GPT-2's.

    meta.json has "format": META_FORMAT; "digests": {name: SHA-256 in hex} of train.bin, val.bin and
    the other .bin files; "bytes": n_bytes; and "token_bytes": the bytes of the same texts, but
    counted per token (see load_token_bytes). meta.json also has "tokenizer", the result of
    describe(vocabulary)."""
    folder = Path(folder)
    paths = {split: folder / f'{split}.part.bin' for split in ('train', 'val')}
    sizes = {}
    digests = {}
    token_bytes = {}
    largest = 0
    n_unknown = 0
    unknown = unknown_token(vocabulary)
    try:
        for split, path in paths.items():
            n = path.stat().st_size // vocabulary.dtype.itemsize
            if n < 2:  # an input and a target at the very least
                fail(f'{split} has only {n} tokens, too few for a train and a val part; give it '
                     'more text')
            if n_bytes and vocabulary.tokenizer['kind'] == 'folder':
                mask = (files or {}).get(f'{split}_mask.bin')
                token_bytes[split] = count_token_bytes(path, vocabulary, mask)
            if block_size:
                paths[split] = write_rows(path, vocabulary.dtype, lengths[split], block_size)
            counted = count_tokens(paths[split], vocabulary.dtype, unknown)
            n_unknown += counted.n_unknown
            sizes[split] = counted.n
            digests[f'{split}.bin'] = counted.digest
            largest = max(largest, counted.largest)
    except UserError:
        remove(folder, PARTS)
        raise

    # What meta.json says.
    files = files or {}
    digests |= {name: digest_of(content) for name, content in files.items()}
    meta = {'format': META_FORMAT, 'vocab_size': vocabulary.size, 'dtype': vocabulary.dtype.name,
            'tokenizer': describe(vocabulary), 'train_tokens': sizes['train'],
            'val_tokens': sizes['val'], 'max_id': largest, 'digests': digests} | meta
    if n_bytes:
        meta['bytes'] = n_bytes
    if token_bytes and None not in token_bytes.values():
        meta['token_bytes'] = token_bytes
    if block_size:
        meta['row_length'] = block_size + 1
    files = {f'tokenizer/{name}': text.encode() for name, text in vocabulary.files.items()} | (
        files) | {'meta.json': json.dumps(meta, ensure_ascii=False).encode()}

    # Remove an older data set, with its masks, before the first file of the new one is written.
    remove(folder, ('train.bin', 'meta.json', 'train_mask.bin', 'val_mask.bin', 'train_ends.bin',
                    'val_ends.bin'))
    remove(folder / 'tokenizer', TOKENIZER_FILES)
    remove(folder, folder.glob('tokenizer/additional_chat_templates/*.jinja'))
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            content.replace(folder / name)
        else:
            (folder / name).write_bytes(content)
    for split in ('val', 'train'):
        paths[split].replace(folder / f'{split}.bin')
    remove(folder, PARTS)
    if n_unknown:
        print(f'{n_unknown:,} tokens stand for characters that the tokenizer does not know, which '
              'are lost')
    if can_drop_characters(vocabulary):
        print('the tokenizer leaves out characters that it does not know, and nobody counts them: '
              'give it an "unk_token", or use one of bytes')
    return sizes


def digest_of(content):
    """Returns the SHA-256 in hex of `content`: bytes, or the path of a file."""
    if not isinstance(content, Path):
        return hashlib.sha256(content).hexdigest()
    with open(content, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def remove(folder, names):
    """Removes files of a folder, if they exist."""
    for name in names:
        Path(folder, name).unlink(missing_ok=True)


def describe(vocabulary):
    """Returns the "tokenizer" of meta.json: vocabulary.tokenizer. If the kind is 'folder', adds a
    "digest" of the tokenizer's tokens. The other kinds, 'char' and 'gpt2', have none."""
    if vocabulary.tokenizer['kind'] != 'folder':
        return vocabulary.tokenizer
    from jax_hub.tokenizers import tokens_digest
    tokenizer = library_tokenizer(vocabulary.files['tokenizer.json'])
    return {**vocabulary.tokenizer, 'digest': tokens_digest(tokenizer)}


def count_bytes(texts):
    """Returns the number of bytes of texts in UTF-8."""
    return sum(len(text.encode('utf-8', 'surrogatepass')) for text in texts)


def count_bytes_of(text, n, vocabulary):
    """Returns the number of UTF-8 bytes of the first n tokens of a text."""
    if vocabulary.tokenizer['kind'] == 'gpt2':
        enc = gpt2_encoding()
        return len(enc.decode_bytes(enc.encode(text, disallowed_special=())[:n]))
    tokenizer = library_tokenizer(vocabulary.files['tokenizer.json'])
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    end = max((end for _, end in offsets[:n]), default=0)
    return count_bytes([text[:end]])


@functools.cache
def bytes_of_tokens(files):
    """Returns the number of bytes of each token of a tokenizer, an array; None if these numbers are
    not known. files: the files of the tokenizer, ((name, content), ...)."""
    from jax_hub.tokenizers import load_token_bytes
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files:
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_bytes(content.encode())
        return load_token_bytes({'kind': 'folder', 'path': folder, 'is_copy': True}, 0)


def count_token_bytes(path, vocabulary, mask=None):
    """Returns the number of bytes of text that the tokens in the file `path` stand for; None if the
    bytes of a token are unknown. mask: the path of a file of flags, one uint8 per token. If it is
    given, only tokens with the flag 1 are included, the tokens that count in the loss."""
    of_each = bytes_of_tokens(tuple(sorted(vocabulary.files.items())))
    if of_each is None:
        return None
    ids = np.memmap(path, vocabulary.dtype, 'r')
    mask = np.memmap(mask, np.uint8, 'r') if mask else np.broadcast_to(np.uint8(1), ids.shape)
    n = 0
    for at in range(0, len(ids), 2**20):
        part = slice(at, at + 2**20)
        n += int(of_each[ids[part][mask[part] == 1]].sum())
    return n


def unknown_token(vocabulary):
    """Returns the id of the token that stands for characters without a token, such as [UNK]; None
    if the tokenizer has none, as one of bytes."""
    if vocabulary.tokenizer['kind'] != 'folder':
        return None
    model = json.loads(vocabulary.files['tokenizer.json'])['model']
    unknown = model.get('unk_id')  # of a Unigram; the others have a name
    if unknown is None and model.get('unk_token'):
        tokenizer = library_tokenizer(vocabulary.files['tokenizer.json'])
        unknown = tokenizer.token_to_id(model['unk_token'])
    # GPT-2's is also the token that ends a document
    return None if unknown in vocabulary.begin + vocabulary.end else unknown


def can_drop_characters(vocabulary):
    """Returns whether the tokenizer leaves out characters that it does not know: a BPE model that
    has neither a token for them nor tokens of bytes."""
    if vocabulary.tokenizer['kind'] != 'folder':
        return False
    content = json.loads(vocabulary.files['tokenizer.json'])
    model = content['model']
    has_bytes = model.get('byte_fallback') or 'ByteLevel' in str(
        [content.get('normalizer'), content.get('pre_tokenizer')])
    return 'merges' in model and not model.get('unk_token') and not has_bytes


class Counted(NamedTuple):
    """What count_tokens finds in a file of tokens."""
    n: int
    largest: int  # id
    n_unknown: int
    digest: str  # SHA-256 in hex


def count_tokens(path, dtype, unknown=None):
    """Reads a file of tokens. Returns a Counted: its number of tokens, largest id, number of tokens
    with the id `unknown`, and digest."""
    largest = n_unknown = 0
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while len(ids := np.fromfile(f, dtype, 2**20)):
            largest = max(largest, int(ids.max()))
            if unknown is not None:
                n_unknown += int((ids == unknown).sum())
            digest.update(ids)
    n = path.stat().st_size // dtype.itemsize
    return Counted(n, largest, n_unknown, digest.hexdigest())


def write_rows(path, dtype, lengths, block_size):
    """Writes the documents of a file of tokens as rows of block_size + 1 tokens, see fill_rows.
    Prints how many of the tokens are cropped. Returns the path of the file of rows. lengths: the
    number of tokens of each document. Raises UserError if no row is full."""
    tokens = np.memmap(path, dtype, 'r')
    starts = np.cumsum([0, *lengths])
    path = path.with_suffix('').with_suffix('.rows.part.bin')
    n_bytes = (block_size + 1) * dtype.itemsize
    with open(path, 'wb') as f:
        for document, n in fill_rows(lengths, block_size + 1):
            f.write(tokens[starts[document]:starts[document] + n])
        n_rows = f.tell() // n_bytes
        f.truncate(n_rows * n_bytes)  # the last row may be incomplete
    if not n_rows:
        fail(f'{len(tokens):,} tokens do not fill a row of {block_size + 1}; use fewer --rows or '
             'more text')
    print(f'{n_rows:,} rows of {block_size + 1} tokens; '
          f'{1 - n_rows * (block_size + 1) / len(tokens):.1%} of the tokens are cropped')
    return path


def fill_rows(lengths, size, n_waiting=1000):
    """Yields (index of a document; n) for the documents that fill rows of `size` tokens, one after
    the other. n: the number of tokens that are taken from the document. lengths: the number of
    tokens of each document.

    Uses best fit, as nanochat's loader: takes the longest of the next n_waiting documents that fits
    into the rest of the row. If no document fits, takes the shortest and crops it."""
    coming = enumerate(map(int, lengths))
    waiting = []  # (tokens, document), sorted
    space = size  # the rest of the row
    while True:
        for document, n in itertools.islice(coming, n_waiting - len(waiting)):
            bisect.insort(waiting, (n, document))
        if not waiting:
            return
        best = bisect.bisect(waiting, (space, len(lengths))) - 1
        n, document = waiting.pop(max(0, best))
        n = min(n, space)
        yield document, n
        space = space - n or size
