"""
Prepare Python's own standard library for character-level language modeling: a few MB of code that is
on every machine that can run this, so no network is needed. Or train on a code base of your own:
$ python data/pystdlib_char/prepare.py path/to/code --out_dir data/mycode
Saves train.bin and val.bin with the ids, and meta.json with the vocabulary.
"""
import hashlib
import os
import platform
import sys
import sysconfig

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import create_parser, encode_characters, fail, save_tokens

here = os.path.dirname(os.path.abspath(__file__))
# not the library itself: installed packages, tests, applications, generated tables
skip = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test', 'idlelib', 'lib2to3',
        'turtledemo', 'ensurepip', 'encodings', 'pydoc_data'}
allowed = bytes(range(32, 127)) + b'\n' # printable ASCII, so the vocabulary stays small

parser = create_parser(__doc__, here)
parser.add_argument('input', nargs='?', help='a folder of Python code (default: the standard library of this Python)')
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
n_train = 0
for path in order: # val is the last tenth, by whole files
    if n_train + len(files[path]) > int(n*0.9):
        break
    n_train += len(files[path])
if not n_train:
    fail(f'{root} has too few Python files of printable ASCII ({len(files)}) for train and val; name a folder with '
         'more')

ids, chars = encode_characters(''.join(files[path] for path in order))
train_ids, val_ids = ids[:n_train], ids[n_train:]
save_tokens(args.out_dir, train_ids, val_ids, len(chars), {'kind': 'char', 'chars': chars})
print(f'{len(files)} files of {root}, Python {platform.python_version()}')
print(f'length of dataset in characters: {n:,}')
print(f'vocab size: {len(chars)}')
print(f'train has {len(train_ids):,} tokens')
print(f'val has {len(val_ids):,} tokens')
