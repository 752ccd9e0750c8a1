"""
Prepare a text for character-level language modeling: every character is a token, no BPE.
Tiny Shakespeare by default, or a text of your own, into a folder of its own:
$ python data/shakespeare_char/prepare.py mytext.txt --out_dir data/mytext
Saves train.bin and val.bin with the ids, and meta.json with the vocabulary.
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

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('input', nargs='?', help='a UTF-8 text file (default: input.txt beside this script, or a download)')
parser.add_argument('--out_dir', default=here, help="where the files go (default: this script's folder)")
parser.error = fail # one line instead of the usage
args = parser.parse_args()

# download the tiny shakespeare dataset, unless a text is there already
input_file_path = args.input or os.path.join(here, 'input.txt')
if args.input is None and not os.path.exists(input_file_path):
    try:
        with urllib.request.urlopen(data_url, timeout=60) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as e:
        fail(f'cannot download {data_url} ({e}); save it by hand as {input_file_path}, or name a text file of your own')
    save(here, {'input.txt': content})

try:
    # newline='' because Python would turn \r\n into \n: the same bytes must give the same tokens everywhere
    with open(input_file_path, encoding='utf-8', newline='') as f:
        data = f.read()
except OSError as e:
    fail(f'cannot read {input_file_path} ({e.strerror}); name a text file that exists')
except UnicodeDecodeError as e:
    fail(f'{input_file_path} is not UTF-8 text ({e.reason}: {e.object[e.start]:#04x}); convert it to UTF-8 first')
n = len(data)
if n - int(n*0.9) < 2: # val needs an input and a target at the very least
    fail(f'{input_file_path} has only {n} characters, too few for a train and a val part; give it more text')
print(f'length of dataset in characters: {n:,}')

# all the unique characters that occur in this text; a character's id is its place among them
chars = ''.join(sorted(set(data)))
vocab_size = len(chars)
print(f'all the unique characters: {ascii(chars[:100])}{"..." if vocab_size > 100 else ""}')
print(f'vocab size: {vocab_size:,}')

# encode with a table from code point to id (a gigabyte of text is too long for a list), then split
dtype = np.uint16 if vocab_size <= 65536 else np.uint32
table = np.zeros(sys.maxunicode + 1, dtype)
table[[ord(c) for c in chars]] = np.arange(vocab_size)
ids = table[np.frombuffer(data.encode('utf-32-le'), '<u4')]
train_ids, val_ids = ids[:int(n*0.9)], ids[int(n*0.9):]

meta = {'vocab_size': vocab_size, 'dtype': np.dtype(dtype).name, 'tokenizer': {'kind': 'char', 'chars': chars},
        'train_tokens': len(train_ids), 'val_tokens': len(val_ids), 'max_id': int(max(train_ids.max(), val_ids.max()))}
save(args.out_dir, {'train.bin': train_ids.tobytes(), 'val.bin': val_ids.tobytes(),
                    'meta.json': json.dumps(meta, ensure_ascii=False).encode()})
print(f'train has {len(train_ids):,} tokens')
print(f'val has {len(val_ids):,} tokens')
if args.input is None:
    print('tiny shakespeare has 1,003,854 and 111,540, with a vocab size of 65')

# length of dataset in characters: 1,115,394
# vocab size: 65
# train has 1,003,854 tokens
# val has 111,540 tokens
