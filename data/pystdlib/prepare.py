"""
Prepares the source code of Python's standard library as training data, with a BPE tokenizer that is trained on this
code. No network is needed: a few MB of code come with every Python. Prepares a code base of your own by:
$ python data/pystdlib/prepare.py path/to/code --out_dir data/mycode --tokenizer=bpe:4096
Saves train.bin and val.bin with the ids, meta.json that says how to read them, and the folder tokenizer.
"""
import hashlib
import os
import platform
import sys
import sysconfig

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    TOKENIZER_HELP, choose_vocabulary, count_bytes, create_parser, encode_documents, fail, save_documents)

# not the library itself: installed packages, tests, applications, generated tables
skip = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test', 'idlelib', 'lib2to3',
        'turtledemo', 'ensurepip', 'encodings', 'pydoc_data'}
allowed = bytes(range(32, 127)) + b'\n' # printable ASCII, so the vocabulary stays small

def read_code(root):
    """Returns ({path: text} of the Python files under a folder, a text begins with a line that names the path; the
    number of files that are left out, because they have other characters than printable ASCII and newlines)."""
    files, n_left_out = {}, 0
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
                if not (path.isascii() and path.isprintable()) or code.translate(None, allowed):
                    n_left_out += 1
                elif code:
                    files[path] = f'# ---- {path}\n{code.decode()}' + '\n' * (not code.endswith(b'\n'))
    return files, n_left_out

def main(doc, out_dir, tokenizer):
    parser = create_parser(doc, out_dir, rows=True)
    parser.add_argument('input', nargs='?', help="a folder of Python code (default: this Python's standard library)")
    parser.add_argument('--tokenizer', default=tokenizer, help=f'{TOKENIZER_HELP} (default: {tokenizer})')
    args = parser.parse_args()

    root = args.input or sysconfig.get_paths()['stdlib']
    if not os.path.isdir(root):
        fail(f'{root} is not a folder; name a folder of Python code')
    files, n_left_out = read_code(root)
    # shuffled, so that train and val are alike, but by the hash of the name: the same order on every disk
    texts = [files[path] for path in sorted(files, key=lambda path: hashlib.sha1(path.encode()).digest())]

    # The first nine tenths of the characters are for training, by whole files.
    n = sum(map(len, texts))
    n_train = i = 0
    while i < len(texts) and n_train + len(texts[i]) <= int(n*0.9): # val is the last tenth, by whole files
        n_train += len(texts[i])
        i += 1
    train, val = texts[:i], texts[i:]
    if not train:
        fail(f'{root} has too few Python files of printable ASCII ({len(files)}) for train and val; name a folder with '
             'more')

    vocabulary = choose_vocabulary(args.tokenizer, lambda: texts, lambda: train)
    documents = {'train': encode_documents(train, vocabulary), 'val': encode_documents(val, vocabulary)}
    n_bytes = {'train': count_bytes(train), 'val': count_bytes(val)}
    sizes = save_documents(args.out_dir, documents, vocabulary, args.rows, n_bytes=n_bytes)
    print(f'{len(files)} files of {root}, Python {platform.python_version()}')
    if n_left_out:
        print(f'left out {n_left_out} files with other characters than printable ASCII, such as tabs')
    print(f'length of dataset in characters: {n:,}')
    print(f'vocab size: {vocabulary.size:,}')
    for split, n in sizes.items():
        print(f'{split} has {n:,} tokens')

if __name__ == '__main__':
    main(__doc__, os.path.dirname(os.path.abspath(__file__)), 'bpe:2048')
