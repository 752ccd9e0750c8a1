"""
Save FineWeb's sample of 10 billion tokens as GPT-2 BPE tokens, in the order of modded-nanogpt: the files are sorted by
name, and their documents keep their order. The token <|endoftext|> is before each document. val.bin has the first
100 million tokens. The files come from the Hugging Face hub (28 GB), or are on this disk:
$ python data/fineweb/prepare.py path/to/sample/10BT/*.parquet
Saves train.bin and val.bin with the ids, and meta.json that says how to read them.
"""
import itertools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    PARTS, choose_vocabulary, count_bytes, count_bytes_of, create_encoder, create_parser, fail, finish_data_set, join,
    locked_folder, positive, remove)
from reading import read_rows

from tqdm import tqdm

here = os.path.dirname(os.path.abspath(__file__))
hub_name, sample = 'HuggingFaceFW/fineweb', 'sample/10BT'
batch_size = 1000 # documents

def download():
    """Returns the paths of the parquet files of the sample, from the hub or its cache."""
    from huggingface_hub import snapshot_download
    try:
        folder = snapshot_download(hub_name, repo_type='dataset', allow_patterns=f'{sample}/*.parquet')
    except Exception as e: # no network
        fail(f'cannot download {hub_name} ({type(e).__name__}: {e}); name the parquet files of {sample}, downloaded by '
             'hand')
    folder = os.path.join(folder, sample)
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]

def read_texts(paths):
    """Yields the text of each document of the parquet files `paths`. Skips rows without a text, and counts them in
    skipped['rows']."""
    for path in paths:
        for _, row in read_rows(path, ['text']):
            if not isinstance(row, dict) or 'text' not in row:
                only = f', only {", ".join(row):.200}' if isinstance(row, dict) else ''
                fail(f'{path} has no column "text"{only}')
            text = row['text']
            if text is None:
                skipped['rows'] += 1
            elif isinstance(text, str):
                yield text
            else:
                fail(f'{path} has a column "text" of another type, {type(text).__name__}')

def val_bytes(batch, documents, n):
    """Returns how many bytes of text the first n tokens of a batch stand for. The tokens of a batch
    are those of its first text, then those of the second, and so on. batch: a list of texts.
    documents: for each text, an array of token ids. The first ids of each array are those of the
    script's variable `before`, such as <|endoftext|>. They stand for no bytes."""
    ends = list(itertools.accumulate(map(len, documents)))
    whole = sum(end <= n for end in ends)
    n_bytes = count_bytes(batch[:whole])
    if whole == len(batch):
        return n_bytes
    n_left = n - (ends[whole - 1] if whole else 0) - len(before) # tokens of the document that is cut
    return n_bytes + (count_bytes_of(batch[whole], n_left, vocabulary) if n_left > 0 else 0)

parser = create_parser(__doc__, here)
parser.add_argument('input', nargs='*', help=f'parquet files, in this order (default: {hub_name} from the hub)')
parser.add_argument('--tokenizer', default='gpt2', help='gpt2, or a Hugging Face folder or owner/name')
parser.add_argument('--val_tokens', type=positive, default=10**8, help='the first tokens, for val.bin (default: 10**8)')
parser.add_argument('--num_proc', type=positive, default=os.cpu_count(), help='threads (default: one per core)')
args = parser.parse_args()
os.environ['RAYON_NUM_THREADS'] = str(args.num_proc) # threads of the library tokenizers
vocabulary = choose_vocabulary(args.tokenizer)
encode = create_encoder(vocabulary, args.num_proc)
before = vocabulary.begin or vocabulary.end # token that precedes each document

with locked_folder(args.out_dir, is_emptied=True):
    skipped = {'rows': 0}
    texts = iter(tqdm(read_texts(args.input or download()), unit=' documents', disable=None))
    n_left = args.val_tokens # until val.bin is full
    n_bytes = {'train': 0, 'val': 0}
    path = os.path.join(args.out_dir, '{}.part.bin')
    with open(path.format('val'), 'wb') as val, open(path.format('train'), 'wb') as train:
        while batch := list(itertools.islice(texts, batch_size)):
            documents = [join((before, document), vocabulary.dtype) for document in encode(batch)]
            ids = join(documents, vocabulary.dtype)
            val.write(ids[:n_left])
            train.write(ids[n_left:])
            in_val = val_bytes(batch, documents, n_left)
            n_bytes['val'] += in_val
            n_bytes['train'] += count_bytes(batch) - in_val
            n_left = max(0, n_left - len(ids))
    if skipped['rows']:
        print(f"skipped {skipped['rows']:,} rows without a text")
    if not n_bytes['train']:
        remove(args.out_dir, PARTS)
        fail(f'no text is left for train: the first {args.val_tokens:,} tokens are for val; give a smaller '
             '--val_tokens')
    for split, n in finish_data_set(args.out_dir, vocabulary, n_bytes=n_bytes).items():
        print(f'{split} has {n:,} tokens')
