"""
Tokenize the openwebtext dataset with GPT-2's BPE, and write train.bin and val.bin. By default, both
files have the same content as those of nanoGPT's script, and the documents come from the Hugging
Face hub. To prepare other documents, name a folder or a pattern of parquet files with a column
"text":
$ python data/openwebtext/prepare.py path/to/parquet --out_dir data/mydocs
Interrupted and started again, the script takes from the cache of `datasets` what it has downloaded,
and the tokens if all of them were made.
"""
import glob
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    choose_vocabulary, create_parser, encode_documents, fail, finish_data_set, join, locked_folder, positive)

from jax_flags import require_package

here = os.path.dirname(os.path.abspath(__file__))
hub_name = 'Skylion007/openwebtext'

parser = create_parser(__doc__, here, rows=True)
parser.add_argument('input', nargs='?', help=f'parquet files (default: {hub_name} from the hub)')
parser.add_argument('--tokenizer', default='gpt2', help='gpt2, or a Hugging Face folder or owner/name')
parser.add_argument('--num_proc', type=positive, default=os.cpu_count(), help='processes (default: one per core)')

def tokenize(rows, vocabulary):
    """Returns {'ids', 'len', 'bytes'} of a batch of rows: for each text the token ids, the number of tokens and the
    number of bytes. Rows without a text are left out."""
    texts = [text for text in rows['text'] if text is not None]
    ids = encode_documents(texts, vocabulary, num_threads=1)
    return {'ids': ids, 'len': list(map(len, ids)), 'bytes': [len(text.encode()) for text in texts]}

def main():
    args = parser.parse_args()
    require_package('datasets')
    vocabulary = choose_vocabulary(args.tokenizer)
    os.environ['TOKENIZERS_PARALLELISM'] = 'false' # the processes are parallel
    try:
        from datasets import Features, List, Value, disable_progress_bars, load_dataset, logging
    except ImportError:
        fail('the documents are read by the package datasets: pip install datasets')
    logging.set_verbosity(logging.CRITICAL) # what goes wrong is said below, in one line
    if not sys.stderr.isatty():
        disable_progress_bars()

    # the documents, tokenized; features because int64 would take four times the disk
    features = Features({'ids': List(Value(vocabulary.dtype.name)), 'len': Value('int64'), 'bytes': Value('int64')})
    try:
        if args.input:
            pattern = args.input
            if os.path.exists(args.input): # a name, in which [ is no pattern
                pattern = glob.escape(args.input) + '/**/*.parquet' * os.path.isdir(args.input)
            files = [glob.escape(file) for file in sorted(glob.glob(pattern, recursive=True))] # datasets takes patterns
            dataset = load_dataset('parquet', data_files=files, split='train', columns=['text'])
        else:
            dataset = load_dataset(hub_name, split='train', num_proc=args.num_proc)
        tokens = dataset.map(tokenize, batched=True, fn_kwargs={'vocabulary': vocabulary}, features=features,
                             remove_columns=dataset.column_names, num_proc=args.num_proc, desc='tokenizing')
        # owt by default only contains the 'train' split, so create a test split
        split_dataset = tokens.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    except Exception as e: # no network, no files, no column "text", fewer than two documents
        fail(f'cannot use {args.input or hub_name} ({e.__cause__ or e}); name a folder of parquet files with a column '
             '"text"')
    splits = {'train': split_dataset['train'], 'val': split_dataset['test']}
    if len(tokens) < len(dataset):
        print(f'skipped {len(dataset) - len(tokens):,} rows without a text')

    # concatenate all the ids in each split into one large file
    lengths = {split: rows['len'][:] for split, rows in splits.items()}
    with locked_folder(args.out_dir, is_emptied=True):
        for split, rows in splits.items():
            with open(os.path.join(args.out_dir, f'{split}.part.bin'), 'wb') as f:
                for batch in rows.with_format('numpy').iter(1000):
                    f.write(join(batch['ids'], vocabulary.dtype))
        n_bytes = {split: sum(rows['bytes'][:]) for split, rows in splits.items()}
        for split, n in finish_data_set(args.out_dir, vocabulary, lengths, args.rows, n_bytes=n_bytes).items():
            print(f'{split} has {n:,} tokens')
    if args.tokenizer == 'gpt2':
        print('the whole of openwebtext has 9,035,582,198 and 4,434,897')

if __name__ == '__main__':
    main()

# train.bin is ~17GB, val.bin ~8.5MB
# train has ~9B tokens (9,035,582,198)
# val has ~4M tokens (4,434,897)
