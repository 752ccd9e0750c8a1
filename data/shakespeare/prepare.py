"""
Prepare a text with GPT-2's BPE tokens, or with those of the model that is to be finetuned.
Tiny Shakespeare by default, or texts of your own, into a folder of their own; several files are several documents:
$ python data/shakespeare/prepare.py mytext.txt --out_dir data/mytext
$ python data/shakespeare/prepare.py one.txt two.txt --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mytexts
Saves train.bin and val.bin with the ids, meta.json that says how to read them, and a copy of the --tokenizer.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    SHAKESPEARE, create_parser, download, fail, gpt2_encoding, load_model_tokenizer, read_text, save_tokens)

here = os.path.dirname(os.path.abspath(__file__))

parser = create_parser(__doc__, here)
parser.add_argument('input', nargs='*', help='UTF-8 text files (default: input.txt beside this script, or download it)')
parser.add_argument('--tokenizer', help="a Hugging Face folder or owner/name, for its tokens instead of GPT-2's")
args = parser.parse_args()

# download the tiny shakespeare dataset, unless a text is there already
input_file_paths = args.input or [os.path.join(here, 'input.txt')]
if not args.input:
    download(SHAKESPEARE, input_file_paths[0])
texts = [read_text(path) for path in input_file_paths]
# the last tenth of all characters is for validation
n = sum(len(text) for text in texts)
n_train = int(n*0.9)
train_texts, val_texts = [], []
for text in texts:
    train_texts += [text[:n_train]] if text[:n_train] else []
    val_texts += [text[n_train:]] if text[n_train:] else []
    n_train = max(0, n_train - len(text))

if args.tokenizer:
    enc, tokenizer = load_model_tokenizer(args.tokenizer)
    vocab_size = enc.vocab_size
    train_ids = [i for text in train_texts for i in enc.encode_document(text)]
    val_ids = [i for text in val_texts for i in enc.encode_document(text)]
else: # encode with tiktoken gpt2 bpe
    enc, tokenizer = gpt2_encoding(), {'kind': 'gpt2'}
    vocab_size = enc.n_vocab
    train_ids, val_ids = [], []
    for ids, part in ((train_ids, train_texts), (val_ids, val_texts)):
        for text in part:
            ids.extend([enc.eot_token] * (len(ids) > 0)) # between two documents
            ids.extend(enc.encode_ordinary(text))
if min(len(train_ids), len(val_ids)) < 2: # an input and a target at the very least
    fail(f'{", ".join(input_file_paths)} has only {n} characters, too few for a train and a val part; give it more '
         'text')
save_tokens(args.out_dir, train_ids, val_ids, vocab_size, tokenizer)
print(f'train has {len(train_ids):,} tokens')
print(f'val has {len(val_ids):,} tokens')
if not args.input and not args.tokenizer:
    print('tiny shakespeare has 301,966 and 36,059')

# train has 301,966 tokens
# val has 36,059 tokens
