"""What the scripts data/*/prepare.py share. Importing this file calls start_script."""
import argparse
import http.client
import json
import os
import sys
import tempfile
import urllib.request

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from jax_flags import UserError, start_script

start_script()
SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'


def fail(message):
    raise UserError(message)


def create_parser(doc, out_dir):
    """The parser of a script with this docstring, with the flag --out_dir and its default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', default=out_dir, help="where the files go (default: this script's folder)")
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
        fail(f'cannot download {url} ({e}); save it by hand as {path}, or name a text file of your own')
    save(os.path.dirname(path), {os.path.basename(path): content})


def read_text(path):
    """A text file without its byte-order mark, if it has one. Raises UserError if it is not UTF-8."""
    try:
        # newline='' because Python would turn \r\n into \n: the same bytes must give the same tokens everywhere
        with open(path, encoding='utf-8-sig', newline='') as f:
            return f.read()
    except OSError as e:
        fail(f'cannot read {path} ({e.strerror}); name a text file that exists')
    except UnicodeDecodeError as e:
        fail(f'{path} is not UTF-8 text ({e.reason}: {e.object[e.start]:#04x}); convert it to UTF-8 first')


def gpt2_encoding():
    """GPT-2's BPE, of tiktoken. Raises UserError without its files."""
    try:
        import tiktoken
        return tiktoken.get_encoding('gpt2')
    except ImportError:
        fail('tiktoken is not installed; pip install tiktoken')
    except (OSError, ValueError) as e: # no network, or a damaged download
        url = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/'
        fail(f"cannot download GPT-2's BPE files ({type(e).__name__}); set TIKTOKEN_CACHE_DIR to a folder that holds "
             f'{url}encoder.json named 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 and '
             f'{url}vocab.bpe named 6d1cbeee0f20b3d9449abfede4726ed8212e3aee (each the sha1 of its URL)')


def load_model_tokenizer(model):
    """The tokenizer of a Hugging Face folder or owner/name, and its description. Raises UserError."""
    from jax_pretrained import local_path
    from jax_train_utils import TOKENIZER_FILES, load_tokenizer
    description = {'kind': 'folder', 'path': local_path(model, TOKENIZER_FILES)}
    return load_tokenizer(description), description


def encode_characters(text):
    """(ids, characters): the sorted characters that occur in a text, and the place of each of its characters there."""
    chars = ''.join(sorted(set(text)))
    table = np.zeros(sys.maxunicode + 1, token_dtype(len(chars))) # from code point to id: a gigabyte is too long a list
    table[[ord(c) for c in chars]] = np.arange(len(chars))
    return table[np.frombuffer(text.encode('utf-32-le'), '<u4')], chars


def token_dtype(vocab_size):
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def save_tokens(folder, train_ids, val_ids, vocab_size, tokenizer, masks=()):
    """Writes a data set: train.bin, val.bin, meta.json and, for a tokenizer of the kind 'folder', a copy of its files.

    tokenizer: its description. masks: {file name: bytes}, written as well. Raises UserError."""
    dtype = token_dtype(vocab_size)
    train_ids, val_ids = np.asarray(train_ids, dtype), np.asarray(val_ids, dtype)
    if tokenizer['kind'] == 'folder':
        from jax_train_utils import copy_tokenizer
        copy_tokenizer(tokenizer, os.path.join(folder, 'tokenizer'))
        tokenizer = {'kind': 'folder', 'path': 'tokenizer'}
    meta = {'vocab_size': vocab_size, 'dtype': dtype.name, 'tokenizer': tokenizer, 'train_tokens': len(train_ids),
            'val_tokens': len(val_ids), 'max_id': int(max(train_ids.max(), val_ids.max()))}
    save(folder, {'train.bin': train_ids.tobytes(), 'val.bin': val_ids.tobytes(), **dict(masks),
                  'meta.json': json.dumps(meta, ensure_ascii=False).encode()})


def save(folder, files):
    """Writes the files {name: bytes} aside, then renames them, meta.json last: an interrupted run leaves no half data
    set. Raises UserError."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='tmp-', dir=folder) as tmp:
            for name, content in files.items():
                with open(os.path.join(tmp, name), 'wb') as f:
                    f.write(content)
            if 'meta.json' in files and os.path.exists(os.path.join(folder, 'meta.json')):
                os.remove(os.path.join(folder, 'meta.json')) # an older set's, which the new .bin files do not fit
            for name in files:
                os.replace(os.path.join(tmp, name), os.path.join(folder, name))
    except OSError as e:
        fail(f'cannot write to {folder} ({e.strerror}); free some space or choose another folder with --out_dir')
