"""
Tokenize a text, and save it as a data set. The tokenizer is GPT-2's BPE, unless --tokenizer names
another one, such as that of a model to finetune. The text is Tiny Shakespeare by default. For texts
of your own, give their files and the folder for the data set. Each file is a document:
$ python data/shakespeare/prepare.py mytext.txt --out_dir data/mytext
$ python data/shakespeare/prepare.py one.txt two.txt --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mytexts
Saves train.bin and val.bin with the ids, meta.json that says how to read them, and a copy of the
--tokenizer.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    SHAKESPEARE, TOKENIZER_HELP, choose_vocabulary, count_bytes, create_parser, download, encode_documents,
    save_documents)
from reading import read_text

here = os.path.dirname(os.path.abspath(__file__))

parser = create_parser(__doc__, here)
parser.add_argument('input', nargs='*', help='UTF-8 text files (default: input.txt beside this script, or download it)')
parser.add_argument('--tokenizer', default='gpt2', help=TOKENIZER_HELP)
parser.add_argument('--tune', action='store_true', help='leave val out: the last tenth of train takes its place, to '
                    'choose settings by')
args = parser.parse_args()

# download the tiny shakespeare dataset, unless a text is there already
input_file_paths = args.input or [os.path.join(here, 'input.txt')]
if not args.input:
    download(SHAKESPEARE, input_file_paths[0])
texts = [read_text(path) for path in input_file_paths]

def split(texts):
    """Returns (train; val) of texts: the last tenth of all characters is for validation."""
    n = sum(len(text) for text in texts)
    n_train = int(n*0.9)
    train_texts, val_texts = [], []
    for text in texts:
        train_texts += [text[:n_train]] if text[:n_train] else []
        val_texts += [text[n_train:]] if text[n_train:] else []
        n_train = max(0, n_train - len(text))
    return train_texts, val_texts

if args.tune:
    texts, _ = split(texts)
train_texts, val_texts = split(texts)

vocabulary = choose_vocabulary(args.tokenizer, lambda: texts, lambda: train_texts)
documents = {'train': encode_documents(train_texts, vocabulary), 'val': encode_documents(val_texts, vocabulary)}
if args.tokenizer == 'gpt2': # as nanoGPT's: the end token is only between two documents
    for ids in documents.values():
        ids[-1:] = [part[:-1] for part in ids[-1:]]
n_bytes = {'train': count_bytes(train_texts), 'val': count_bytes(val_texts)}
for split, n in save_documents(args.out_dir, documents, vocabulary, n_bytes=n_bytes).items():
    print(f'{split} has {n:,} tokens')
if not args.input and args.tokenizer == 'gpt2':
    print('tiny shakespeare has 301,966 and 36,059')

# train has 301,966 tokens
# val has 36,059 tokens
