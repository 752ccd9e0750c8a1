"""
Save the openwebtext dataset as GPT-2 BPE tokens, in the train.bin and val.bin that nanoGPT's script writes.
The documents are streamed from the Hugging Face hub, or from a folder of parquet files with a column "text":
$ python data/openwebtext/prepare.py path/to/parquet --out_dir data/mydocs
Interrupted at any moment and started again, it continues where it stopped.
"""
import atexit
import glob
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import threading

import numpy as np  # the rest is imported where it is needed: every worker process imports this file again

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import UserError, create_parser, fail, gpt2_encoding

here = os.path.dirname(os.path.abspath(__file__))
hub_name, n_hub = 'Skylion007/openwebtext', 8_013_769 # the documents it has
batch_size = 1000 # documents that a worker takes at a time
# pass 1 leaves its work in these files until the data set is there; without the first, the others are void
scratch = ('source.part.json', 'lengths.part.bin', 'tokens.part.bin')

def start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN) # Ctrl-C is the main process's business

def encode(texts):
    """A batch of documents -> the number of tokens of each, and all their tokens in a row."""
    import tiktoken
    enc = tiktoken.get_encoding('gpt2') # tiktoken keeps it, so this loads once per worker
    docs = [enc.encode_ordinary(text) + [enc.eot_token] for text in texts] # encode_ordinary ignores any special tokens
    return np.array([len(doc) for doc in docs], np.uint32), np.fromiter(itertools.chain.from_iterable(docs), np.uint16)

def load_documents(files):
    try:
        import datasets
    except ImportError:
        fail('datasets is not installed; pip install datasets')
    datasets.logging.set_verbosity(datasets.logging.CRITICAL) # what goes wrong is reported by us, in one line
    if files is None:
        documents = datasets.load_dataset(hub_name, split='train', streaming=True)
    else:
        data_files = [glob.escape(f) for f in files]
        documents = datasets.load_dataset('parquet', data_files=data_files, split='train', streaming=True,
                                          batch_size=batch_size) # its default stumbles over files without rows
    if 'text' not in (documents.column_names or ['text']):
        raise ValueError(f'there is no column "text", only {", ".join(documents.column_names)}')
    return documents

def count_done(lengths_path, tokens_path):
    """Cut the scratch files back to the documents that are there whole, and count these."""
    ends = np.cumsum(np.fromfile(lengths_path, np.uint32), dtype=np.int64)
    done = int(np.searchsorted(ends, os.path.getsize(tokens_path) // 2, side='right'))
    os.truncate(lengths_path, 4 * done)
    os.truncate(tokens_path, 2 * int(ends[done-1]) if done else 0)
    return done

def tokenize(documents, done, lengths_path, tokens_path, num_proc):
    """Pass 1: append the tokens of all documents after the first `done` ones, in the order of the source."""
    from tqdm import tqdm
    ahead = threading.Semaphore(4 * num_proc) # imap reads its input as fast as it can: all of it would end up in memory

    def texts():
        for batch in documents.skip(done).iter(batch_size):
            ahead.acquire()
            yield batch['text']

    # spawn, because a fork in the middle of pyarrow's and the downloader's threads can hang
    with multiprocessing.get_context('spawn').Pool(num_proc, start_worker) as pool, \
            open(lengths_path, 'ab') as lengths_file, open(tokens_path, 'ab') as tokens_file, \
            tqdm(desc='tokenizing', unit=' documents', initial=done, mininterval=1, disable=None) as bar:
        try:
            for lengths, tokens in pool.imap(encode, texts()):
                # a document counts as done once its length is on disk, so its tokens have to be there before
                for f, array in ((tokens_file, tokens), (lengths_file, lengths)):
                    f.write(array.tobytes())
                    f.flush()
                    os.fsync(f.fileno())
                bar.update(len(lengths))
                ahead.release()
        finally:
            ahead.release(1000) # enough for the pool to end, which waits for texts() to come back

def write_split(path, documents, ends, tokens_path):
    """Pass 2: copy the tokens of these documents, in this order. Returns how many tokens."""
    from tqdm import tqdm
    tokens = np.asarray(np.memmap(tokens_path, np.uint16, mode='r'))
    starts = np.concatenate([[0], ends[:-1]])
    with open(path, 'wb') as f:
        for i in tqdm(range(0, len(documents), 10_000), desc=f'writing {os.path.basename(path)}', disable=None):
            batch = documents[i:i+10_000]
            parts = [tokens[a:b] for a, b in zip(starts[batch].tolist(), ends[batch].tolist())]
            f.write(np.concatenate(parts).tobytes())
    return os.path.getsize(path) // 2

def write_json(path, content):
    with open(path + '.tmp', 'w', encoding='utf-8') as f:
        json.dump(content, f)
    os.replace(path + '.tmp', path)

def remove(paths):
    for path in paths:
        if os.path.exists(path):
            os.remove(path)

def main():
    parser = create_parser(__doc__, here)
    parser.add_argument('input', nargs='?', help=f'a folder of parquet files (default: {hub_name} from the hub)')
    parser.add_argument('--num_proc', type=int, default=os.cpu_count(), help='worker processes (default: one per core)')
    args = parser.parse_args()
    if args.num_proc < 1:
        fail(f'--num_proc must be at least 1, not {args.num_proc}')
    files, source = None, hub_name
    if args.input is not None:
        if not os.path.isdir(args.input):
            fail(f'{args.input} is not a folder; name a folder of parquet files')
        names = sorted(glob.glob('**/*.parquet', root_dir=args.input, recursive=True))
        if not names:
            fail(f'{args.input} has no .parquet files; name a folder that has')
        files = [os.path.join(os.path.abspath(args.input), name) for name in names]
        source = [[name, os.path.getsize(f)] for name, f in zip(names, files)] # the folder may move, but not change
    enc = gpt2_encoding() # here, so that no worker stumbles over it

    # pass 1, from where an earlier run left it
    parts = source_path, lengths_path, tokens_path = [os.path.join(args.out_dir, name) for name in scratch]
    state, done = {'source': source, 'input': args.input or hub_name, 'documents': None}, 0
    if all(os.path.exists(path) for path in parts):
        with open(source_path, encoding='utf-8') as f:
            state = json.load(f)
        if state['source'] != source:
            fail(f'{args.out_dir} has the unfinished work on another source ({state["input"]}, as it was then); finish '
                 f'that one first, choose another --out_dir, or delete {", ".join(scratch)} there to start over')
        done = count_done(lengths_path, tokens_path)
    if done == 0 or done != state['documents']:
        try:
            documents = load_documents(files)
            if done == 0:
                os.makedirs(args.out_dir, exist_ok=True)
                for path in (lengths_path, tokens_path):
                    open(path, 'wb').close()
                write_json(source_path, state)
            if done:
                print(f'continuing after {done:,} documents', file=sys.stderr)
            tokenize(documents, done, lengths_path, tokens_path, args.num_proc)
            state['documents'] = count_done(lengths_path, tokens_path)
            write_json(source_path, state)
        except UserError:
            raise
        except Exception as e: # whatever a network, a disk or a damaged file raises through the libraries
            done = count_done(lengths_path, tokens_path) if all(os.path.exists(path) for path in parts) else 0
            if done == 0:
                remove(parts)
            fail(f'cannot tokenize {state["input"]} ({type(e).__name__}: {e}); ' + (
                f'{done:,} documents are done, run the same command to continue once that is mended' if done else
                'download its parquet files by hand and name their folder' if files is None else
                'name a folder of whole parquet files with a column "text"'))

    # the split of datasets' train_test_split(test_size=0.0005, seed=2357, shuffle=True), with test as val
    ends = np.cumsum(np.fromfile(lengths_path, np.uint32), dtype=np.int64)
    n = len(ends)
    n_val = math.ceil(0.0005 * n)
    if n < 2:
        remove(parts)
        fail(f'{state["input"]} has {n} documents, too few for a train and a val part; give it at least 2')
    order = np.random.default_rng(2357).permutation(n)
    if files is None and n != n_hub:
        print(f'note: {hub_name} has {n:,} documents now, no longer {n_hub:,}; the counts will differ')

    # pass 2: write aside, then rename, meta.json last: without it there is no data set
    finals = [os.path.join(args.out_dir, f) for f in ('train.bin', 'val.bin', 'meta.json')]
    train_path, val_path, meta_path = finals
    try:
        val_tokens = write_split(val_path + '.tmp', order[:n_val], ends, tokens_path)
        train_tokens = write_split(train_path + '.tmp', order[n_val:], ends, tokens_path)
        remove([meta_path]) # an older set's, which the new .bin files do not fit
        for path in (train_path, val_path):
            os.replace(path + '.tmp', path)
        write_json(meta_path, {'vocab_size': enc.n_vocab, 'dtype': 'uint16', 'tokenizer': {'kind': 'gpt2'},
                               'train_tokens': train_tokens, 'val_tokens': val_tokens,
                               'max_id': enc.eot_token}) # which ends every document
    except OSError as e:
        fail(f'cannot write to {args.out_dir} ({e.strerror}); free some space and run the same command to continue')
    finally:
        remove([path + '.tmp' for path in finals])
    remove(parts)
    print(f'train has {train_tokens:,} tokens')
    print(f'val has {val_tokens:,} tokens')
    print('the whole of openwebtext has 9,035,582,198 and 4,434,897')

if __name__ == '__main__':
    code = 0
    try:
        try:
            main()
        except Exception as e:
            code = 1 # unless the hook ends this with another one
            sys.excepthook(type(e), e, e.__traceback__)
    except SystemExit as e:
        code = e.code or 0
    except KeyboardInterrupt:
        print('\ninterrupted; run the same command to continue', file=sys.stderr)
        code = 130
    # pyarrow may still read ahead, and the process aborts if one of its threads enters Python while that shuts down
    atexit._run_exitfuncs() # multiprocessing removes its semaphores
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

# train.bin is ~17GB, val.bin ~8.5MB
# train has ~9B tokens (9,035,582,198)
# val has ~4M tokens (4,434,897)
