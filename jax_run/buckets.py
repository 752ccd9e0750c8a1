"""Runs and data sets in a bucket of Google Cloud Storage, gs://bucket/folder.

Orbax writes the checkpoints into the bucket. gcsfs copies data sets, and the small files of a run,
between the bucket and folders of this machine. google-cloud-storage writes the lease, which lets
only one run at a time use the folder. This module is imported only for gs://, and for
a run that was copied from there."""
import atexit
import base64
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from jax_flags import TryAgain, UserError, lock_file, read_json, write_json

# Seconds without a renewal after which the lease of a run is free.
LEASE = float(os.environ.get('JAX_TRANSFORMER_LEASE', 60))
# Seconds without a byte after which a request has failed.
SILENCE = LEASE / 2

# The object that completes a checkpoint, which Orbax writes last.
COMMITTED = 'commit_success.txt'

# The files of a checkpoint that this machine gets a copy of, below ckpt/<iteration>/.
SMALL = ('checksums.json', 'meta/metadata', 'metrics/metrics', 'metrics/anew')


@functools.cache
def open_clients():
    """Returns (file system of gcsfs; client of google-cloud-storage). Raises UserError if gcsfs or
    google-cloud-storage is not installed."""
    try:
        import aiohttp
        import gcsfs
        from google.cloud import storage
    except ImportError as error:
        raise UserError(f'gs:// needs two packages ({error}): pip install gcsfs '
                        'google-cloud-storage') from None
    logging.getLogger(gcsfs.__name__).setLevel(logging.CRITICAL)  # its errors are reported here, once
    # by itself gcsfs waits 5 minutes for a connection that gives no byte, several times
    silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
    files = gcsfs.GCSFileSystem(use_listings_cache=False, requests_timeout=silence)
    return files, storage.Client(project=None)


@contextlib.contextmanager
def explained(url):
    """Turns an exception of the with block into a UserError of one line. A temporary exception
    (is_temporary) becomes a TryAgain. A UserError passes unchanged. url: the address that the
    message names."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        if is_temporary(error):
            raise TryAgain(f'{url} does not answer ({reason}): start the command again') from error
        raise UserError(
            f'{url} cannot be read or written ({reason}): there must be such a bucket, a network, '
            'and credentials that may get the bucket and read, write and delete its objects, as '
            'of: gcloud auth application-default login') from error


class Folder:
    """A folder of a bucket. Its objects are named relative to the folder."""

    def __init__(self, url):
        bucket, _, self.prefix = url.removeprefix('gs://').strip('/').partition('/')
        if not bucket or not self.prefix:
            raise UserError(f'{url} names no folder of a bucket; a run or a data set is '
                            'gs://bucket/folder')
        self.path = f'{bucket}/{self.prefix}'
        self.url = f'gs://{self.path}'
        with explained(self.url):
            self.files, client = open_clients()
            self.bucket = client.bucket(bucket)  # for the lease

    def list(self):
        """Returns {name: details} of the objects in the folder. details: a dict with 'size' in
        bytes, 'crc32c', 'generation' (version number) and more. Leaves out names with '..', which
        lead out of a folder, and names that end in '/'."""
        with explained(self.url):
            objects = self.files.find(self.path, detail=True)
        found = {}
        for path, details in objects.items():
            name = path.removeprefix(f'{self.path}/')
            if '..' not in name.split('/') and not name.endswith('/'):
                found[name] = details
        return found

    def download(self, name, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with explained(self.url):
            self.files.get_file(f'{self.path}/{name}', str(target))

    def write(self, name, text):
        with explained(self.url):
            self.files.pipe_file(f'{self.path}/{name}', text.encode())


# the names of the clients' exceptions that mean: no answer has come, or try again
NO_ANSWER = {
    'ConnectionError', 'TimeoutError', 'Timeout', 'TransportError', 'RetryError',
    'ClientConnectionError', 'ClientPayloadError', 'ServerError', 'TooManyRequests'}
# what TensorStore's messages say at their beginning in these cases
NO_ANSWER_STATUS = re.compile(r'UNAVAILABLE|DEADLINE_EXCEEDED|HTTP (response )?(code|status):? (5\d\d|429)')


def is_temporary(error):
    """Returns whether a request that raised `error` may succeed later: no answer has come, or the
    answer asks to try again (408, 429, 5xx)."""
    while error is not None:
        code = getattr(error, 'code', None)
        is_status = isinstance(code, int) and (code in (408, 429) or 500 <= code < 600)
        names = {kind.__name__ for kind in type(error).__mro__}
        if is_status or names & NO_ANSWER or NO_ANSWER_STATUS.search(str(error)[:300]):
            return True
        error = error.__cause__
    return False


# -----------------------------------------------------------------------------
# one run at a time

class Lease:
    """The lease of a run: the object `lock` in its folder, whose text names the holder. Each write
    names the generation (version number) that it replaces, so that the bucket refuses one of two
    writers. A thread renews the lease. The lease is free once LEASE seconds have passed since the
    last renewal, by the bucket's clock."""

    def __init__(self, folder):
        self.url = folder.url
        self.bucket = folder.bucket
        self.name = f'{folder.prefix}/lock'
        self.text = ''  # the holder, and a random number that no other lease has
        self.generation = 0
        self.mutex = threading.Lock()  # guards the generation, which the thread and confirm() write
        self.ended = threading.Event()  # it was given back, or another run has taken it

    def wait_until_free(self):
        """Waits until the lease of another run has expired or is given back. Returns the generation
        (version number) of the object `lock`, which the next holder overwrites, or 0 if there is no
        such object. Raises UserError if the other run renews its lease during the wait, because
        that run is alive, or if a third run takes the lease."""
        first = None
        while True:
            text, found = self.read()
            if found is None:
                return 0
            said = f'{self.url} is in use by {text}'
            if first and found.generation != first:
                raise UserError(f'{said}; choose another --out_dir')
            left = LEASE - (self.now() - found.updated).total_seconds()
            if left < 0:
                return found.generation
            if not first:
                print(f'{said}: waiting for up to {left:.0f} s, in case it has died',
                      file=sys.stderr, flush=True)
            first = found.generation
            time.sleep(min(left + 0.1, LEASE / 12))

    def read(self):
        """Returns (text; blob) of the object `lock` as it is now, or ('', None) if there is no such
        object. blob: google-cloud-storage's object."""
        from google.api_core.exceptions import NotFound
        with explained(self.url):
            blob = self.bucket.get_blob(self.name)
            try:
                return (blob.download_as_text(), blob) if blob else ('', None)
            except NotFound:  # it has been renewed meanwhile
                return self.read()

    def now(self):
        """Returns the time by the bucket's clock: the date of an object written now."""
        probe = self.bucket.blob(f'{self.name}.probe')
        with explained(self.url):
            probe.upload_from_string('')
        return probe.updated

    def take(self, holder):
        """Takes the lease, and starts the thread that renews it. If another run holds the lease,
        first waits until that lease has expired or is given back. Raises UserError if the other run
        renews its lease during the wait, because that run is alive, or if another run takes the
        lease first. holder: a text that names this run in the lease."""
        self.text = f'{holder} ({uuid.uuid4().hex})'
        self.generation = self.wait_until_free()
        self.confirm()
        atexit.register(self.close)
        threading.Thread(target=self.renew, daemon=True).start()

    def confirm(self):
        """Renews the lease now, so that no other run can take it for the next LEASE seconds. Raises
        UserError if another run has taken it already."""
        from google.api_core.exceptions import PreconditionFailed
        with self.mutex, explained(self.url):
            blob = self.bucket.blob(self.name)
            try:
                blob.upload_from_string(self.text, if_generation_match=self.generation)
            except PreconditionFailed:
                # Perhaps a write of ours has arrived, and its answer has not.
                text, blob = self.read()
                if text != self.text:
                    self.ended.set()
                    raise UserError(
                        f'another run has taken over {self.url}, as this one gave no sign for '
                        f'{LEASE:g} s: it ends, and what it had not saved is lost') from None
            self.generation = blob.generation

    def renew(self):
        """Renews the lease every LEASE / 4 seconds, until the lease is given back or taken by
        another run. Ignores UserErrors, because the next save raises a UserError if the cause
        lasts."""
        while not self.ended.wait(LEASE / 4):
            with contextlib.suppress(UserError):
                self.confirm()

    def close(self):
        """Gives the lease back, unless another run has taken it. If the bucket does not answer, the
        lease expires by itself."""
        if self.ended.is_set():
            return
        self.ended.set()
        with self.mutex, contextlib.suppress(Exception):
            blob = self.bucket.blob(self.name)
            blob.delete(if_generation_match=self.generation, timeout=5, retry=None)


# -----------------------------------------------------------------------------
# a run

@functools.cache
def bucket_run(url):
    """Returns the BucketRun of a URL. The first call makes the BucketRun and copies the small files
    of the run to this machine. Later calls with the same URL return the same object."""
    run = BucketRun(url)
    run.refresh()
    return run


class BucketRun:
    """The folder of a run in a bucket. This class has the same methods as DiskRun. Methods without
    a docstring here are documented in DiskRun (checkpoints.py).

    `files` is a local folder with copies of config.json, metrics.jsonl and tokenizer/. For each
    complete checkpoint, `files` also has copies of the files in SMALL. The process that holds the
    lease writes into `files` and uploads what it has written."""

    more_errors = (Exception,)  # each client raises exceptions of its own
    is_temporary = staticmethod(is_temporary)

    def __init__(self, url):
        self.folder = Folder(url)
        self.files = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, self.files, ignore_errors=True)
        self.lease = None
        self.objects = {}  # the latest result of Folder.list
        self.uploaded = {}  # {name: (size, time of change)} of the files that the bucket has
        self.mutex = threading.Lock()  # guards uploads, which the loop and Orbax's thread make

    @property
    def checkpoints(self):
        """The folder of the checkpoints as Orbax takes it: an epath.Path of gs://.../ckpt."""
        from etils import epath
        return epath.Path(self.folder.url) / 'ckpt'

    def make_checkpoints(self):
        """Returns Orbax's option atomicity_options, as DiskRun.make_checkpoints does, but makes no
        folder, because a bucket has none. The option is None, Orbax's default: a complete
        checkpoint in a bucket is marked by an object COMMITTED."""

    def shown(self, text):
        return str(text).replace(str(self.files), self.folder.url)

    def space(self):
        return ''

    def refresh(self):
        """Brings `files` up to date: copies from the bucket what has changed there. If this process
        holds the lease, copies only the files in SMALL, because this process writes the other files
        itself. Begins again if another run has deleted an object since the objects were listed."""
        objects = self.folder.list()
        shutil.rmtree(self.files / 'ckpt', ignore_errors=True)
        for name, details in objects.items():
            step, in_step = split_object(name)
            if step:
                is_wanted = f'ckpt/{step}/{COMMITTED}' in objects and in_step in SMALL
            elif self.lease:
                is_wanted = False
            else:
                is_wanted = name in ('config.json', 'metrics.jsonl') or name.startswith('tokenizer/')
            path = self.files / name
            is_new = details['generation'] != self.objects.get(name, {}).get('generation')
            if is_wanted and (is_new or not path.exists()):
                try:
                    self.folder.download(name, path)
                except UserError as error:
                    if isinstance(error.__cause__, FileNotFoundError):
                        return self.refresh()
                    raise
                if not step:
                    self.uploaded[name] = file_state(path)
        self.objects = objects

    def upload(self):
        """Uploads changed files, except files of checkpoints, and deletes removed files from the
        bucket. Does nothing if this process does not hold the lease. Raises UserError if another
        run has taken the lease."""
        if not self.lease:
            return
        with self.mutex, explained(self.folder.url):
            self.lease.confirm()
            there = {}
            for path in self.files.rglob('*'):
                name = path.relative_to(self.files).as_posix()
                if path.is_file() and '.tmp' not in name and not split_object(name)[0]:
                    there[name] = file_state(path)
                    if there[name] != self.uploaded.get(name):
                        self.folder.files.put_file(str(path), f'{self.folder.path}/{name}')
            for name in self.uploaded.keys() - there.keys():
                self.folder.files.rm_file(f'{self.folder.path}/{name}')
            self.uploaded = there

    # the lock

    def wait_until_free(self):
        Lease(self.folder).wait_until_free()

    def lock(self, holder):
        """Takes the lease in the name of `holder`. Returns this BucketRun; close() gives the lease
        back."""
        lease = Lease(self.folder)
        lease.take(holder)
        self.refresh()
        self.lease = lease
        return self

    def close(self):
        """Gives the lease back."""
        self.lease.close()
        self.lease = None

    def is_locked_by(self, holder):
        return Lease(self.folder).read()[0].startswith(holder)

    # checkpoints

    def write_checksums(self):
        """Writes the object checksums.json, {file: [size, CRC-32C]} as the bucket reports them,
        into the checkpoint that is being saved. This checkpoint is complete except for the object
        COMMITTED. Uploads the files of the run first, because a committed checkpoint must have its
        metrics.

        Orbax calls this method in one process, before it writes COMMITTED. If this method raises an
        exception, Orbax drops the checkpoint."""
        self.upload()
        objects = self.folder.list()
        sums = {}
        for name, details in objects.items():
            step, in_step = split_object(name)
            is_committed = f'ckpt/{step}/{COMMITTED}' in objects
            if step.isdecimal() and '/' in in_step and not is_committed:
                sums.setdefault(step, {})[in_step] = checksum(details)
        for step in sums:
            self.folder.write(f'ckpt/{step}/checksums.json', json.dumps(sums[step], indent=0))
        self.lease.confirm()

    def differs(self, step, name, expected):
        details = self.objects.get(f'ckpt/{step.name}/{name}')
        return details is None or checksum(details) != expected

    def set_aside(self, step, free):
        folder = f'{self.folder.path}/ckpt'
        with explained(self.folder.url):
            self.folder.files.mv(f'{folder}/{step.name}', f'{folder}/{free.name}', recursive=True)
        self.refresh()

    def write_metrics(self, step, name, text):
        self.lease.confirm()
        self.folder.write(f'ckpt/{step}/metrics/{name}', text)
        self.refresh()


def split_object(name):
    """Splits the name of an object into (checkpoint; name in the checkpoint). For example,
    'ckpt/100/meta/metadata' gives ('100', 'meta/metadata'). A name outside of ckpt/, such as
    'config.json', gives ('', 'config.json')."""
    top, _, rest = name.partition('/')
    step, _, in_step = rest.partition('/')
    return (step, in_step) if top == 'ckpt' else ('', name)


def checksum(details):
    """Returns [size in bytes, CRC-32C] of an object, as checksums.json has it. details: the
    metadata of the object, a dict with 'size' and 'crc32c'."""
    return [details['size'], details['crc32c']]


def file_state(path):
    """Returns (size in bytes; time of the last change in ns) of a file. If these values differ
    later, the file has changed."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def differs_from_object(path, size, crc32c):
    """Returns whether a file differs from the object that it was copied from. size: the object's
    size in bytes. crc32c: the object's CRC-32C, base64 of 4 bytes. Without Google's package
    google_crc32c only the sizes are compared."""
    if path.stat().st_size != size:
        return True
    try:
        import google_crc32c
    except ImportError:
        return False
    found = google_crc32c.Checksum()
    with open(path, 'rb') as file:
        for _ in found.consume(file, 2**24):
            pass
    return base64.b64encode(found.digest()).decode() != crc32c


# -----------------------------------------------------------------------------
# data sets

def fetch_dataset(url):
    """Copies the data set gs://bucket/folder to this machine, below JAX_TRANSFORMER_DATA or
    ~/.cache/jax_transformer/data. If a copy of the same objects is there already, copies nothing.
    Returns the local folder, a Path.

    If several processes of a machine call this function, one process fetches the data set and the
    other processes wait. Raises UserError for a data set without train.bin, and if the bucket
    refuses, does not answer, or changes meanwhile."""
    source = Folder(url)
    default = Path.home() / '.cache' / 'jax_transformer' / 'data'
    target = Path(os.environ.get('JAX_TRANSFORMER_DATA', default)) / source.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f'{target}.lock', 'w') as file:
        lock_file(file, wait=True)
        objects = {name: checksum(details) for name, details in source.list().items()
                   if name != 'fetched.json'}  # of a copy that was uploaded
        if 'train.bin' not in objects:
            raise UserError(f'there is no {source.url}/train.bin; upload a data set, as with: '
                            f'gcloud storage cp -r data/mine {source.url}')

        # Written last: the record of what was fetched.
        stamp = target / 'fetched.json'
        fetched = read_json(stamp, optional=True)
        is_there = fetched == objects
        for name, (size, _) in objects.items():
            path = target / name
            is_there = is_there and path.is_file() and path.stat().st_size == size
        if is_there:
            return target

        # Delete the old files, because one that is gone from the bucket would still be read. A run
        # that has opened them can read them until it ends.
        for name in ('fetched.json', *fetched, *objects):
            (target / name).unlink(missing_ok=True)
        n_bytes = sum(size for size, _ in objects.values())
        print(f'fetching {source.url} ({n_bytes / 1e6:,.0f} MB) to {target}')
        for name, sums in objects.items():
            source.download(name, target / name)
            if differs_from_object(target / name, *sums):
                raise UserError(f'{source.url}/{name} has changed while it was fetched; try it '
                                'again')
        write_json(stamp, objects)
    return target
