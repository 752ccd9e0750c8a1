"""
Prepare Python's own standard library for character-level language modeling: a few MB of code that is
on every machine that can run this, so no network is needed. Or train on a code base of your own:
$ python data/pystdlib_char/prepare.py path/to/code --out_dir data/mycode
Saves train.bin and val.bin with the ids, and meta.json with the vocabulary.
"""
import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile

import numpy as np

here = os.path.dirname(os.path.abspath(__file__))
# not the library itself: installed packages, tests, applications, generated tables
skip = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test', 'idlelib', 'lib2to3',
        'turtledemo', 'ensurepip', 'encodings', 'pydoc_data'}
allowed = bytes(range(32, 127)) + b'\n' # printable ASCII, so the vocabulary stays small

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
            if os.path.exists(os.path.join(folder, 'meta.json')):
                os.remove(os.path.join(folder, 'meta.json')) # an older set's, which the new .bin files do not fit
            for name in files:
                os.replace(os.path.join(tmp, name), os.path.join(folder, name))
    except OSError as e:
        fail(f'cannot write to {folder} ({e.strerror}); free some space or choose another folder with --out_dir')

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('input', nargs='?', help='a folder of Python code (default: the standard library of this Python)')
parser.add_argument('--out_dir', default=here, help="where the files go (default: this script's folder)")
parser.error = fail # one line instead of the usage
args = parser.parse_args()

root = args.input or sysconfig.get_paths()['stdlib']
if not os.path.isdir(root):
    fail(f'{root} is not a folder; name a folder of Python code')
files = {}
for folder, subfolders, names in os.walk(root):
    subfolders[:] = [d for d in subfolders if d not in skip]
    for name in names:
        if name.endswith('.py') and not name.startswith('_sysconfigdata'): # generated, and about this very machine
            path = os.path.join(folder, name)
            try:
                with open(path, 'rb') as f:
                    code = f.read().replace(b'\r\n', b'\n') # as it may be on Windows
            except OSError:
                continue # a dangling link, say
            path = os.path.relpath(path, root).replace(os.sep, '/')
            if code and path.isascii() and path.isprintable() and not code.translate(None, allowed):
                files[path] = f'# ---- {path}\n{code.decode()}' + '\n' * (not code.endswith(b'\n'))

# shuffled, so that train and val are alike, but by the hash of the name: the same order on every disk
order = sorted(files, key=lambda path: hashlib.sha1(path.encode()).digest())
n = sum(len(text) for text in files.values())
train_data, val_data = '', ''
for path in order: # val is the last tenth, by whole files
    if not val_data and len(train_data) + len(files[path]) <= int(n*0.9):
        train_data += files[path]
    else:
        val_data += files[path]
if not train_data:
    fail(f'{root} has too few Python files of printable ASCII ({len(files)}) for train and val; name a folder with '
         'more')
chars = ''.join(sorted(set(train_data + val_data)))
print(f'{len(files)} files of {root}, Python {platform.python_version()}')
print(f'length of dataset in characters: {n:,}')
print(f'vocab size: {len(chars)}')

stoi = {ch: i for i, ch in enumerate(chars)}
train_ids = np.array([stoi[c] for c in train_data], dtype=np.uint16)
val_ids = np.array([stoi[c] for c in val_data], dtype=np.uint16)
meta = {'vocab_size': len(chars), 'dtype': 'uint16', 'tokenizer': {'kind': 'char', 'chars': chars},
        'train_tokens': len(train_ids), 'val_tokens': len(val_ids), 'max_id': int(max(train_ids.max(), val_ids.max()))}
save(args.out_dir, {'train.bin': train_ids.tobytes(), 'val.bin': val_ids.tobytes(),
                    'meta.json': json.dumps(meta).encode()})
print(f'train has {len(train_ids):,} tokens')
print(f'val has {len(val_ids):,} tokens')
