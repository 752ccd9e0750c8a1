"""
Prepare a text for character-level language modeling. Every character is a token; there is no BPE.
The text is Tiny Shakespeare by default. To prepare a text of your own, name its file, and a folder
for the data set:
$ python data/shakespeare_char/prepare.py mytext.txt --out_dir data/mytext
Saves train.bin and val.bin with the ids, and meta.json with the vocabulary.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    SHAKESPEARE, choose_vocabulary, count_bytes, create_parser, download, encode_documents, save_documents)
from reading import read_text

here = os.path.dirname(os.path.abspath(__file__))

parser = create_parser(__doc__, here)
parser.add_argument('input', nargs='?', help='a UTF-8 text file (default: input.txt beside this script, or a download)')
args = parser.parse_args()

# download the tiny shakespeare dataset, unless a text is there already
input_file_path = args.input or os.path.join(here, 'input.txt')
if args.input is None:
    download(SHAKESPEARE, input_file_path)
data = read_text(input_file_path)
n = len(data)

# all the unique characters that occur in this text; a character's id is its place among them
vocabulary = choose_vocabulary('char', lambda: [data])
chars, vocab_size = vocabulary.tokenizer['chars'], vocabulary.size
ids, = encode_documents([data], vocabulary)
n_bytes = {'train': count_bytes([data[:int(n*0.9)]]), 'val': count_bytes([data[int(n*0.9):]])}
sizes = save_documents(
    args.out_dir, {'train': [ids[:int(n*0.9)]], 'val': [ids[int(n*0.9):]]}, vocabulary, n_bytes=n_bytes)

print(f'length of dataset in characters: {n:,}')
print(f'all the unique characters: {ascii(chars[:100])}{"..." if vocab_size > 100 else ""}')
print(f'vocab size: {vocab_size:,}')
for split, n in sizes.items():
    print(f'{split} has {n:,} tokens')
if args.input is None:
    print('tiny shakespeare has 1,003,854 and 111,540, with a vocab size of 65')

# length of dataset in characters: 1,115,394
# vocab size: 65
# train has 1,003,854 tokens
# val has 111,540 tokens
