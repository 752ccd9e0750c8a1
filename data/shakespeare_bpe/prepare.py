"""
Prepare Tiny Shakespeare, split as nanoGPT splits it, with a BPE that is learned from its train part:
$ python data/shakespeare_bpe/prepare.py
Saves train.bin and val.bin with the ids, meta.json that says how to read them, and the folder tokenizer.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import SHAKESPEARE, choose_vocabulary, create_parser, download, encode_documents, save_documents
from reading import read_text

here = os.path.dirname(os.path.abspath(__file__))

parser = create_parser(__doc__, here)
parser.add_argument('--tokenizer', default='bpe:1024', help='bpe:N learns N tokens (default: %(default)s)')
parser.add_argument('--tune', action='store_true', help='leave val out: the last tenth of train takes its place, to '
                    'choose settings by')
args = parser.parse_args()

# download the tiny shakespeare dataset, unless it is there already
input_file_path = os.path.join(here, 'input.txt')
download(SHAKESPEARE, input_file_path)
data = read_text(input_file_path)
if args.tune:
    data = data[:int(len(data)*0.9)]
n = len(data)
train_data, val_data = data[:int(n*0.9)], data[int(n*0.9):]

vocabulary = choose_vocabulary(args.tokenizer, lambda: [data], lambda: [train_data])
documents = {'train': encode_documents([train_data], vocabulary), 'val': encode_documents([val_data], vocabulary)}
for split, n in save_documents(args.out_dir, documents, vocabulary).items():
    print(f'{split} has {n:,} tokens')
