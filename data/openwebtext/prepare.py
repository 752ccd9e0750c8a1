"""
Save the openwebtext dataset as GPT-2 BPE tokens, in the train.bin and val.bin that nanoGPT's script writes.
The documents are streamed from the Hugging Face hub, or from a folder of parquet files with a column "text":
$ python data/openwebtext/prepare.py path/to/parquet --out_dir data/mydocs
Interrupted at any moment and started again, it continues where it stopped.
"""
import glob
import itertools
import math
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import Unit, choose_vocabulary, create_parser, fail, positive
from reading import read_column
from stream import run, stream

here = os.path.dirname(os.path.abspath(__file__))
hub_name, n_hub = 'Skylion007/openwebtext', 8_013_769 # the documents it has
batch_size = 1000 # documents that a worker takes at a time

def load_documents(files, done, skipped):
    """Yields the documents after the first `done`. In files rows without a text are no documents: the list `skipped`
    gets them."""
    if files is not None:
        yield from itertools.islice(read_texts(files, skipped), done, None)
        return
    try:
        import datasets
    except ImportError:
        fail('datasets is not installed; pip install datasets')
    datasets.logging.set_verbosity(datasets.logging.CRITICAL) # what goes wrong is reported by us, in one line
    for row in datasets.load_dataset(hub_name, split='train', streaming=True).skip(done):
        yield row['text']

def read_texts(files, skipped):
    """Yields the texts in the column "text" of parquet files, and appends what is none to `skipped`."""
    for path in files:
        for text in read_column(path, 'text'):
            if isinstance(text, str):
                yield text
            else:
                skipped.append(text)

def main():
    parser = create_parser(__doc__, here, rows=True)
    parser.add_argument('input', nargs='?', help=f'a folder of parquet files (default: {hub_name} from the hub)')
    parser.add_argument('--tokenizer', default='gpt2', help='gpt2, or a Hugging Face folder or owner/name')
    parser.add_argument('--num_proc', type=positive, default=os.cpu_count(),
                        help='worker processes (default: one per core)')
    args = parser.parse_args()
    if args.tokenizer == 'char' or args.tokenizer.startswith('bpe:'):
        fail(f'--tokenizer={args.tokenizer}: python data/text/prepare.py learns a vocabulary, and takes parquet files')

    # Parquet files that are here, or the hub.
    files, source = None, hub_name
    if args.input is not None:
        if not os.path.isdir(args.input):
            fail(f'{args.input} is not a folder; name a folder of parquet files')
        names = sorted(glob.glob('**/*.parquet', root_dir=args.input, recursive=True))
        if not names:
            fail(f'{args.input} has no .parquet files; name a folder that has')
        files = [os.path.join(os.path.abspath(args.input), name) for name in names]
        # the folder may move, but not change
        source = [[name, os.path.getsize(f)] for name, f in zip(names, files, strict=True)]

    # What write_data_set asks for as it goes.
    skipped = []
    def batches(done):
        documents = load_documents(files, done, skipped)
        while batch := [Unit(text) for text in itertools.islice(documents, batch_size)]:
            yield batch

    def split(lengths): # as train_test_split(test_size=0.0005, seed=2357, shuffle=True) of datasets, with test as val
        n = len(lengths)
        if files is None and n != n_hub:
            print(f'note: {hub_name} has {n:,} documents now, no longer {n_hub:,}; the counts will differ')
        order = np.random.default_rng(2357).permutation(n)
        n_val = math.ceil(0.0005 * n)
        return order[n_val:], order[:n_val]

    remedy = 'download its parquet files by hand and name their folder'
    if files:
        remedy = 'name a folder of whole parquet files with a column "text"'
    stream(args.out_dir, args.input or hub_name, [source, args.tokenizer], lambda: choose_vocabulary(args.tokenizer),
           batches, split, num_proc=args.num_proc, block_size=args.rows, remedy=remedy)
    if skipped:
        print(f'skipped {len(skipped):,} rows without a text')
    if args.tokenizer == 'gpt2':
        print('the whole of openwebtext has 9,035,582,198 and 4,434,897')

if __name__ == '__main__':
    run(main)

# train.bin is ~17GB, val.bin ~8.5MB
# train has ~9B tokens (9,035,582,198)
# val has ~4M tokens (4,434,897)
