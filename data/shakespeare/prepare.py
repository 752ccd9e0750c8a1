"""
Prepare a text with GPT-2's BPE tokens, or with those of the model that is to be finetuned.
Tiny Shakespeare by default, or texts of your own, into a folder of their own; several files are several documents:
$ python data/shakespeare/prepare.py mytext.txt --out_dir data/mytext
$ python data/shakespeare/prepare.py one.txt two.txt --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mytexts
Saves train.bin and val.bin with the ids, meta.json that says how to read them, and a copy of the --tokenizer.
"""
import argparse
import http.client
import json
import os
import sys
import tempfile
import urllib.request

import numpy as np

here = os.path.dirname(os.path.abspath(__file__))
data_url = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'

def fail(message):
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)

def save(folder, files):
    """Write the files aside, then rename them, meta.json last: an interrupted run leaves no half data set."""
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

def gpt2_encoding():
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

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('input', nargs='*', help='UTF-8 text files (default: input.txt beside this script, or download it)')
parser.add_argument('--out_dir', default=here, help="where the files go (default: this script's folder)")
parser.add_argument('--tokenizer', help="a Hugging Face folder or owner/name, for its tokens instead of GPT-2's")
parser.error = fail # one line instead of the usage
args = parser.parse_args()

# download the tiny shakespeare dataset, unless a text is there already
input_file_paths = args.input or [os.path.join(here, 'input.txt')]
if not args.input and not os.path.exists(input_file_paths[0]):
    try:
        with urllib.request.urlopen(data_url, timeout=60) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as e:
        fail(f'cannot download {data_url} ({e}); save it by hand as {input_file_paths[0]}, or name a text file of your '
             'own')
    save(here, {'input.txt': content})

texts = []
for path in input_file_paths:
    try:
        # newline='' because Python would turn \r\n into \n: the same bytes must give the same tokens everywhere
        with open(path, encoding='utf-8', newline='') as f:
            texts.append(f.read())
    except OSError as e:
        fail(f'cannot read {path} ({e.strerror}); name a text file that exists')
    except UnicodeDecodeError as e:
        fail(f'{path} is not UTF-8 text ({e.reason}: {e.object[e.start]:#04x}); convert it to UTF-8 first')
# the last tenth of all characters is for validation
n = sum(len(text) for text in texts)
n_train = int(n*0.9)
train_texts, val_texts = [], []
for text in texts:
    train_texts += [text[:n_train]] if text[:n_train] else []
    val_texts += [text[n_train:]] if text[n_train:] else []
    n_train = max(0, n_train - len(text))

if args.tokenizer:
    sys.path.insert(0, os.path.join(here, '..', '..'))
    from jax_ops import UserError
    from jax_pretrained import local_path
    from jax_train_utils import TOKENIZER_FILES, copy_tokenizer, load_tokenizer
    try:
        tokenizer = {'kind': 'folder', 'path': local_path(args.tokenizer, TOKENIZER_FILES)}
        enc = load_tokenizer(tokenizer)
        train_ids = [i for text in train_texts for i in enc.encode_document(text)]
        val_ids = [i for text in val_texts for i in enc.encode_document(text)]
        copy_tokenizer(tokenizer, os.path.join(args.out_dir, 'tokenizer'))
    except UserError as e:
        fail(str(e))
    vocab_size, tokenizer = enc.vocab_size, {'kind': 'folder', 'path': 'tokenizer'}
else: # encode with tiktoken gpt2 bpe
    enc = gpt2_encoding()
    vocab_size, tokenizer = enc.n_vocab, {'kind': 'gpt2'}
    train_ids, val_ids = [], []
    for ids, part in ((train_ids, train_texts), (val_ids, val_texts)):
        for text in part:
            ids.extend([enc.eot_token] * (len(ids) > 0)) # between two documents
            ids.extend(enc.encode_ordinary(text))
if min(len(train_ids), len(val_ids)) < 2: # an input and a target at the very least
    fail(f'{", ".join(input_file_paths)} has only {n} characters, too few for a train and a val part; give it more '
         'text')

dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
meta = {'vocab_size': vocab_size, 'dtype': dtype.name, 'tokenizer': tokenizer,
        'train_tokens': len(train_ids), 'val_tokens': len(val_ids), 'max_id': max(*train_ids, *val_ids)}
save(args.out_dir, {'train.bin': np.array(train_ids, dtype).tobytes(), 'val.bin': np.array(val_ids, dtype).tobytes(),
                    'meta.json': json.dumps(meta).encode()})
print(f'train has {len(train_ids):,} tokens')
print(f'val has {len(val_ids):,} tokens')
if not args.input and not args.tokenizer:
    print('tiny shakespeare has 301,966 and 36,059')

# train has 301,966 tokens
# val has 36,059 tokens
