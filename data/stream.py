"""Writes a data set that may be larger than the memory. Pass 1 appends the tokens of units
(documents, or pieces of long ones) to a file, in the order of the source; pass 2 copies them into
train.bin and val.bin. A killed run continues."""
import atexit
import collections
import concurrent.futures
import contextlib
import errno
import functools
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np  # the rest is imported where it is needed: every worker process runs this file
from common import (
    Vocabulary, create_encoder, describe, fail, fill_rows, move_files, remove, remove_data_set,
    row_length, say_stopped, token_dtype, tokenizer_files, unstopped, write_file)
from jax_flags import UserError, read_json, write_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# pass 1 leaves its work in these files until the data set is there; without the first, the others
# are void
SCRATCH = ('source.part.json', 'lengths.part.bin', 'tokens.part.bin')
FILES = 'files.part' # the folder of pass 2


PIPE_ERRORS = EOFError, OSError, pickle.UnpicklingError # the process at the other end has ended


def start_worker():
    """Returns a process of work(). Its own process group, because Ctrl-C in a terminal is the main
    process's business."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, process_group=0)


def work():
    """Answers on stdout every batch on stdin with what create_encoder's function returns or raises,
    until stdin ends. The vocabulary comes first."""
    batches, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr # for what libraries print
    try:
        encoder = functools.cache(functools.partial(create_encoder, pickle.load(batches)))
        while True:
            units = pickle.load(batches)
            try:
                answer = encoder()(units)
            except Exception as e:
                answer = e
            pickle.dump(answer, answers)
            answers.flush()
    except PIPE_ERRORS:
        os._exit(0) # without flushing what nobody reads


def send(worker, content):
    """Writes a value to the stdin of a worker."""
    pickle.dump(content, worker.stdin)
    worker.stdin.flush()


def encode_all(vocabulary, batches, num_proc):
    """Yields what create_encoder's function returns for each batch, in order, computed by num_proc
    processes (threads share a lock in tiktoken's regular expressions)."""
    if num_proc == 1:
        yield from map(create_encoder(vocabulary), batches)
        return
    # the batches that are read already: not all, they would fill the memory
    ahead = collections.deque()
    errors = []
    idle = [None] * num_proc # workers; None is one to start

    def read():
        try:
            yield from batches
        except Exception as e: # raised once what was read before is encoded
            errors.append(e)

    # What a thread does: it gives a batch to a worker that is idle, and waits for the answer.
    def encode(batch):
        worker = idle.pop()
        try:
            if worker is None:
                worker = start_worker()
                send(worker, vocabulary)
            send(worker, batch)
            answer = pickle.load(worker.stdout)
        except PIPE_ERRORS:
            raise ChildProcessError('a worker process was killed; a smaller --num_proc takes less '
                                    'memory') from None
        finally:
            idle.append(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with concurrent.futures.ThreadPoolExecutor(num_proc) as pool: # a thread waits for each worker
        try:
            # Answers leave in the order of the batches; a few are always ahead of them.
            for batch in read():
                ahead.append(pool.submit(encode, batch))
                if len(ahead) > 4 * num_proc:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

            # What reading has raised comes after all that was read before it.
            if errors:
                raise errors[0]
        finally:
            # Whatever has happened, no worker stays.
            pool.shutdown(cancel_futures=True)
            for worker in idle: # all: no task is running
                if worker is None:
                    continue
                with contextlib.suppress(OSError): # it was killed
                    worker.stdin.close()
                worker.wait()


def count_done(lengths_path, tokens_path, width):
    """Cuts the scratch files back to the units that are there whole, and counts these."""
    # A unit is whole if the tokens up to its end are there.
    ends = np.cumsum(np.abs(np.fromfile(lengths_path, np.int32)), dtype=np.int64)
    n_tokens = os.path.getsize(tokens_path) // width
    done = int(np.searchsorted(ends, n_tokens, side='right'))
    n_kept = int(ends[done - 1]) if done else 0

    # What follows it is written again.
    os.truncate(lengths_path, 4 * done)
    os.truncate(tokens_path, width * n_kept)
    return done


def copy_units(path, units, lengths, tokens_path, dtype, block_size):
    """Pass 2: writes the tokens of these units, in this order, or rows of them. Returns how many
    tokens, and the largest."""
    from tqdm import tqdm

    # Where the tokens of each unit are in the file of pass 1.
    lengths = np.abs(lengths)
    taken = lengths[units]
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths)[units]

    # Of a data set of rows, which units fill them, and how far.
    if block_size:
        order, taken = fill_rows(taken, block_size)
        starts = starts[order]

    largest = 0
    # a memmap would keep all that it has read
    with open(tokens_path, 'rb') as tokens, open(path, 'wb') as f:
        for start, n in tqdm(zip(starts, taken, strict=True), total=len(starts),
                             desc=f'writing {os.path.basename(path)}', disable=None):
            tokens.seek(start * dtype.itemsize)
            part = tokens.read(n * dtype.itemsize)
            largest = max(largest, np.frombuffer(part, dtype).max(initial=0))
            f.write(part)
    return os.path.getsize(path) // dtype.itemsize, int(largest)


def discard(folder, paths):
    """Removes the files, and their folder if it is empty then."""
    remove(paths)
    with contextlib.suppress(OSError): # not empty, '.' or a mount point
        os.rmdir(folder)


@contextlib.contextmanager
def locked(folder):
    """Makes the folder, and keeps other processes from working in it. Raises UserError if one
    does."""
    try:
        os.makedirs(folder, exist_ok=True)

        # The lock is on the folder itself, and ends with this process.
        descriptor = os.open(folder, os.O_RDONLY) if fcntl else None
    except OSError as e:
        fail(f'cannot write to {folder!r} ({e.strerror}); choose another --out_dir')
    try:
        if fcntl:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        fail(f'another process prepares a data set in {folder}; wait for it, or choose another '
             '--out_dir')
    except OSError:
        pass # a file system without locks
    try:
        yield
    finally:
        if fcntl:
            os.close(descriptor)


def stream(out_dir, *args, **options):
    """Calls write_data_set with these arguments, with out_dir locked."""
    with locked(out_dir):
        try:
            write_data_set(out_dir, *args, **options)
        except KeyboardInterrupt:
            lengths_path = os.path.join(out_dir, SCRATCH[1])
            if not (os.path.exists(lengths_path) and os.path.getsize(lengths_path)):
                # nothing to continue from
                discard(out_dir, [os.path.join(out_dir, part) for part in SCRATCH])
            raise


def write_data_set(out_dir, name, source, choose, batches, split, *, num_proc, remedy, block_size=0,
                   report=None):
    """Writes a data set that is larger than the memory, and prints its counts. Interrupted at any
    moment and called again with the same arguments, it continues, and writes the same bytes.

    name: the name of the input, for messages.
    source: what tells it from others, such as names and sizes of files, as JSON.
    choose: a function that returns the vocabulary.
    batches: a function of n that yields lists of units, after the first n.
    split: a function from the units' numbers of tokens (negative where is_val) to the units of
    train and val, in order.
    num_proc: the number of processes.
    remedy: the end of the message if the input cannot be read.
    block_size: that of a data set of rows, see fill_rows.
    report: a function that says, once all is read, what it was: {'lines': to print, 'bytes': of the
    texts}.
    Raises UserError."""
    from tqdm import tqdm

    from jax_files.tokenizer_library import warn_of_dropped

    # What an earlier run of the same command has left.
    parts = [os.path.join(out_dir, part) for part in SCRATCH]
    source_path, lengths_path, tokens_path = parts
    vocabulary = None
    done = 0
    if all(os.path.exists(path) for path in parts):
        try:
            state = read_json(source_path)
            saved, vocabulary = state['source'], Vocabulary(**state['vocabulary'])
        except (UserError, LookupError, TypeError):
            fail(f'{source_path} is damaged; delete {", ".join(SCRATCH)} in {out_dir} to start '
                 'over')

        # Work on something else is not continued, and not lost.
        if saved != source:
            fail(f'{out_dir} has the unfinished work on another source, or with another tokenizer '
                 f'({state["name"]}, as it was then); finish that one first, choose another '
                 f'--out_dir, or delete {", ".join(SCRATCH)} there to start over')

    # pass 1, from where an earlier run left it
    try:
        if vocabulary is None:
            vocabulary = choose()
            state = {'name': name, 'source': source, 'vocabulary': vocabulary._asdict(),
                     'units': None}
            for path in (lengths_path, tokens_path):
                open(path, 'wb').close()
            write_json(source_path, state)
        dtype = token_dtype(vocabulary.size)
        done = count_done(lengths_path, tokens_path, dtype.itemsize)
        dropped = collections.Counter()
        if done:
            print(f'continuing after {done:,} documents or pieces', file=sys.stderr)

        # Unless all is tokenized already: a run may have been killed in pass 2.
        if state['units'] is None or done != state['units']:
            with open(lengths_path, 'ab') as lengths_file, open(tokens_path, 'ab') as tokens_file, \
                    tqdm(desc='tokenizing', unit=' characters', unit_scale=True,
                         disable=None) as bar, \
                    contextlib.closing(encode_all(vocabulary, batches(done), num_proc)) as encoded:
                for lengths, tokens, n_characters, left_out in encoded:
                    dropped.update(left_out)
                    # a unit counts as done once its length is on disk, so its tokens have to be
                    # there before
                    for f, array in ((tokens_file, tokens), (lengths_file, lengths)):
                        f.write(array.tobytes())
                        f.flush()
                        os.fsync(f.fileno())
                    bar.update(n_characters)

            # All is tokenized: what was read, to be said at the end, even if that comes in a later
            # run.
            warn_of_dropped(dropped, f'{name}, since document or piece {done:,}' if done else name)
            state['units'] = count_done(lengths_path, tokens_path, dtype.itemsize)
            state['report'] = report() if report else None
            write_json(source_path, state)
    except Exception as e:
        # whatever a network, a disk or a damaged file raises through the libraries
        if vocabulary is not None and all(os.path.exists(path) for path in parts):
            done = count_done(lengths_path, tokens_path, token_dtype(vocabulary.size).itemsize)

        # Scratch files from which nothing can be continued are removed.
        if done == 0:
            discard(out_dir, parts)
        if isinstance(e, UserError) and not done:
            raise
        if isinstance(e, ChildProcessError):
            remedy = 'run it again'
        if done:
            remedy = (f'{done:,} documents or pieces are done: run the same command to continue, '
                      f'or, if an input has changed, delete {", ".join(SCRATCH)} in {out_dir} '
                      'first')
        if isinstance(e, OSError):
            is_full = e.errno in (errno.ENOSPC, errno.EROFS)
            if is_full or str(e.filename).startswith(out_dir):
                remedy = ('free some space and run the same command to continue, or choose another '
                          '--out_dir')
        if isinstance(e, UserError):
            fail(f'{e}; {remedy}')
        fail(f'cannot tokenize {name} ({type(e).__name__}: {e}); {remedy}')

    # pass 2: write aside, then rename, train.bin last: without it there is no data set
    lengths = np.fromfile(lengths_path, np.int32)
    train, val = split(lengths)
    for units in (train, val):
        if np.abs(lengths[units]).sum() < 2: # an input and a target at the very least
            discard(out_dir, parts)
            fail(f'{name} has only {np.abs(lengths).sum():,} tokens, too few for a train and a val '
                 'part; give it more')
    tmp = os.path.join(out_dir, FILES)
    shutil.rmtree(tmp, ignore_errors=True) # of a killed run
    try:
        os.mkdir(tmp)
        val_tokens, val_max = copy_units(
            os.path.join(tmp, 'val.bin'), val, lengths, tokens_path, dtype, block_size)
        train_tokens, train_max = copy_units(
            os.path.join(tmp, 'train.bin'), train, lengths, tokens_path, dtype, block_size)
        files = tokenizer_files(vocabulary)
        files['meta.json'] = describe(
            vocabulary, train_tokens, val_tokens, max(train_max, val_max),
            **row_length(block_size))
        for file, content in files.items():
            write_file(os.path.join(tmp, file), content)
        with unstopped():
            remove_data_set(out_dir)
            move_files(tmp, out_dir, ['train.bin', 'val.bin', *files])
    except OSError as e:
        fail(f'cannot write to {out_dir} ({e.strerror}); free some space and run the same command '
             'to continue')
    finally:
        shutil.rmtree(tmp, ignore_errors=True)

    # The data set is there.
    remove(parts)
    found = state.get('report')
    if found:
        print('\n'.join(found['lines']))
    print(f'train has {train_tokens:,} tokens')
    print(f'val has {val_tokens:,} tokens')
    if found:
        n_tokens = np.abs(lengths).sum()
        print(f'{n_tokens:,} tokens, {found["bytes"] / n_tokens:.2f} bytes per token')


def run(main):
    """Runs a script that uses threads of pyarrow: one of them may still read ahead, and the process
    aborts if it enters Python while that shuts down."""
    code = 0
    try:
        try:
            main()
        except Exception as e:
            code = 1 # unless the hook ends this with another one
            sys.excepthook(type(e), e, e.__traceback__)
    except SystemExit as e:
        code = e.code or 0
    except KeyboardInterrupt as e:
        code = say_stopped(e, 'to continue')
    atexit._run_exitfuncs() # tqdm's semaphore is removed
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == '__main__':
    work()
