"""Runs and data sets in a bucket of Google Cloud Storage, gs://bucket/folder.

A bucket has objects, no folders: an object is replaced as a whole, nothing is renamed or appended,
and nothing is locked. So Orbax writes the arrays of a checkpoint there, and the rest is a folder of
this process: a mirror, from which small files are read as on a disk, and whose changes are uploaded.

This module is imported for gs:// alone, and needs google-cloud-storage and gcsfs (with which Orbax
writes). BucketRun has the methods of DiskRun in checkpoints.py."""
import atexit
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
import weakref
from pathlib import Path

from jax_flags import UserError, path_inside, printable, read_json, write_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Seconds without a renewal after which the lease of a run is free.
LEASE = float(os.environ.get('JAX_TRANSFORMER_LEASE', 60))

# Seconds for which a request is tried again while the bucket does not answer.
PATIENCE = float(os.environ.get('JAX_TRANSFORMER_PATIENCE', 300))

# The object that completes a checkpoint, which Orbax writes last.
COMMITTED = 'commit_success.txt'

# The files of a checkpoint that the mirror has, below ckpt/<iteration>/.
SMALL = ('checksums.json', 'meta/metadata', 'metrics/metrics', 'params/_METADATA')

# -----------------------------------------------------------------------------
# requests, and what they raise


@functools.cache
def open_client():
    """Returns the client of google-cloud-storage. Raises UserError without the packages."""
    try:
        import gcsfs  # with which Orbax writes
        from google.cloud import storage
    except ImportError as error:
        raise UserError(f'gs:// needs two packages ({error}): pip install gcsfs '
                        'google-cloud-storage') from None
    logging.getLogger(gcsfs.__name__).setLevel(logging.CRITICAL)  # what it raises is said once
    return storage.Client(project=None)


def patient(seconds=None):
    """Returns the options of a request that is tried again for so many seconds, by default
    PATIENCE. Google's own limit is 120 s."""
    from google.cloud.storage.retry import DEFAULT_RETRY
    seconds = PATIENCE if seconds is None else seconds
    # to connect, and to wait for the next bytes
    timeout = (min(10, seconds), min(30, seconds))
    return {'retry': DEFAULT_RETRY.with_timeout(seconds), 'timeout': timeout}


@contextlib.contextmanager
def explained(url):
    """Turns what a request to the bucket of this URL raises into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = explain(url, error)
        if message is None:
            raise
        raise UserError(message) from error


def explain(url, error):
    """Returns the line for an exception of a request, or None if it is of something else."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import RequestException

    # A request that was tried again for too long has its last reason inside.
    if isinstance(error, exceptions.RetryError) and error.cause:
        error = error.cause
    bucket = 'gs://' + split_url(url)[0]
    reason = printable(' '.join(str(error).split()))
    is_network = isinstance(error, (RequestException, ConnectionError, TimeoutError, TransportError))
    if is_network or isinstance(error, (exceptions.ServerError, exceptions.TooManyRequests)):
        return no_answer(url, reason)
    if isinstance(error, (exceptions.Unauthorized, GoogleAuthError)):
        return (f'{bucket}: the credentials are missing or have expired ({reason}); renew them, as '
                'with: gcloud auth application-default login')
    if isinstance(error, exceptions.Forbidden):
        return (f'{bucket}: no permission ({reason}); the account needs to read, and for a run to '
                'write and delete the objects of the bucket, and to get the bucket')
    if isinstance(error, exceptions.NotFound):
        return f'there is no bucket {bucket}, or {url} has lost objects while it was read ({reason})'
    if isinstance(error, exceptions.GoogleAPICallError):
        return f'{bucket} refuses a request ({reason})'
    return None


def no_answer(url, reason):
    """Returns the line for a bucket that does not answer."""
    return (f'gs://{split_url(url)[0]} does not answer ({reason}); what {url} holds is complete: '
            'continue with --init_from=resume when it does')


def split_url(url):
    """Returns (bucket, folder in it) of gs://bucket/folder. Raises UserError for another URL."""
    found = re.fullmatch(r'gs://([^/]+)/+(.*[^/])/*', str(url))
    if not found:
        raise UserError(f'{url} names no folder of a bucket; a run or a data set is '
                        'gs://bucket/folder')
    return found[1], found[2]


class Folder:
    """A folder of a bucket: its objects by their names in it. All methods raise UserError if the
    bucket does not answer for PATIENCE, or refuses."""

    def __init__(self, url):
        name, self.prefix = split_url(url)
        self.url = f'gs://{name}/{self.prefix}'
        with explained(self.url):
            self.bucket = open_client().bucket(name)

    def blob(self, name):
        return self.bucket.blob(f'{self.prefix}/{name}')

    def list(self, inside='', seconds=None):
        """Returns {name: blob} of all objects, or of those whose names begin with `inside`; a blob
        has size, crc32c, generation and updated."""
        with explained(self.url):
            start = f'{self.prefix}/{inside}'
            blobs = list(self.bucket.list_blobs(prefix=start, **patient(seconds)))
        found = {}
        for blob in blobs:
            name = blob.name[len(self.prefix) + 1:]
            stands_for_folder = name.endswith('/')
            if not stands_for_folder:
                found[name] = blob
        return found

    def get(self, name, seconds=None):
        """Returns the blob of an object, or None if it is not there."""
        with explained(self.url):
            return self.bucket.get_blob(f'{self.prefix}/{name}', **patient(seconds))

    def put(self, name, data):
        """Writes an object: readers see the old one or the new one. Returns its blob."""
        blob = self.blob(name)
        with explained(self.url):
            blob.upload_from_string(data, checksum='crc32c', **patient())
        return blob

    def delete(self, name):
        """Deletes an object, which need not be there."""
        from google.api_core.exceptions import NotFound
        with explained(self.url), contextlib.suppress(NotFound):
            self.blob(name).delete(**patient())

    def download(self, blob, target):
        """Writes an object to its file below the folder `target`, which appears when it is
        complete: the client compares its checksum. Returns False if the object has been replaced or
        deleted. Raises UserError for a name that leads out of the folder."""
        from google.api_core.exceptions import NotFound
        path = path_inside(target, blob.name[len(self.prefix) + 1:])
        partial = f'{path}.part'
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with explained(self.url):
            try:
                blob.download_to_filename(partial, checksum='crc32c', **patient())
            except NotFound:
                return False
        os.replace(partial, path)
        return True

    def now(self):
        """Returns the time by the bucket's clock, which is that of an object written now. The
        clocks of machines differ."""
        blob = self.put('lock.probe', '')
        self.delete('lock.probe')
        return blob.updated


# -----------------------------------------------------------------------------
# one run at a time

class Lease:
    """The object `lock` of a run, which says who writes there. Each write names the generation that
    it replaces, so that of two writers one is refused. A thread renews it; it is free once it has
    not been renewed for LEASE seconds by the bucket's clock."""

    def __init__(self, folder):
        self.folder = folder
        self.id = uuid.uuid4().hex
        self.text = ''
        self.generation = 0
        self.is_held = False
        self.is_lost = False
        self.mutex = threading.Lock()  # of the generation: the thread and confirm() write
        self.ended = threading.Event()
        self.heard_at = time.monotonic()  # when the bucket answered last
        self.is_watched = False  # whether this run waits for the bucket
        self.is_said = False  # whether an error says that it does not answer

    def wait_until_free(self):
        """Waits for the lease of another run until it has run out, and returns the generation under
        which it can be taken; 0 if there is none. Raises UserError if it is renewed meanwhile: that
        run lives."""
        first = None
        while True:
            found = self.folder.get('lock')
            if found is None:
                return 0
            said = self.read()
            holder = f'{self.folder.url} is in use by {printable(said["holder"])}'
            if first and found.generation != first.generation:
                raise UserError(f'{holder}; choose another --out_dir')
            age = (self.folder.now() - found.updated).total_seconds()
            left = said['seconds'] - age
            if left < 0:
                return found.generation
            if first is None:
                print(f'{holder}, which last said so {age:.0f} s ago: waiting for up to '
                      f'{left:.0f} s, in case it has died', file=sys.stderr, flush=True)
            first = found
            time.sleep(min(left + 0.1, said['seconds'] / 12))

    def read(self):
        """Returns {'holder', 'seconds', 'id'} of the lease that is there now; of another object in its
        place the same, as far as it can be read."""
        from google.api_core.exceptions import NotFound
        blob = self.folder.blob('lock')
        said = {'holder': 'an unknown run', 'seconds': LEASE, 'id': ''}
        with explained(self.folder.url):
            try:
                found = json.loads(blob.download_as_bytes(**patient()))
                said['holder'] = str(found['holder'])
                said['seconds'] = min(max(0.0, float(found['seconds'])), 3600.0)
                said['id'] = str(found['id'])
            except (NotFound, ValueError, TypeError, KeyError, RecursionError):
                pass
        return said

    def take(self, holder):
        """Takes the lease, when it is free, and renews it from here on. Raises UserError if another
        run has it."""
        self.text = json.dumps({'holder': holder, 'seconds': LEASE, 'id': self.id})
        self.generation = self.wait_until_free()
        with explained(self.folder.url):
            self.write(patient())
        if self.is_lost:
            raise UserError(f'{self.folder.url} has just been taken by another run; choose another '
                            '--out_dir')
        self.is_held = True
        threading.Thread(target=self.renew, daemon=True).start()
        threading.Thread(target=self.watch, daemon=True).start()

    def write(self, options):
        """Writes the object, if nobody else has; sets is_lost if somebody has. options: of the
        request."""
        from google.api_core.exceptions import PreconditionFailed
        with self.mutex:
            for _ in range(3):
                blob = self.folder.blob('lock')
                try:
                    blob.upload_from_string(self.text, if_generation_match=self.generation,
                                            **options)
                    self.generation = blob.generation
                    self.heard_at = time.monotonic()
                    return
                except PreconditionFailed:
                    # perhaps a write of ours has arrived, and its answer has not
                    found = self.folder.bucket.get_blob(blob.name, **options)
                    if found is None or self.read()['id'] != self.id:
                        break
                    self.generation = found.generation
            self.is_lost = True

    def renew(self):
        """Renews the lease until it is lost or given back. A bucket that does not answer is asked
        again."""
        while not self.ended.wait(LEASE / 4):
            with contextlib.suppress(Exception):  # confirm() meets the same, and says it
                self.write(patient(LEASE / 4))
            if self.is_lost:
                return

    def watch(self):
        """Ends the process once it has waited for PATIENCE for a bucket that does not answer. Orbax
        would wait for a quarter of an hour, also where the process ends."""
        while not self.ended.wait(min(1, PATIENCE / 4)):
            silence = time.monotonic() - self.heard_at
            if self.is_watched and not self.is_lost and silence > PATIENCE + LEASE / 2:
                if not self.is_said:
                    reason = f'for {silence:.0f} s'
                    print(f'error: {no_answer(self.folder.url, reason)}', file=sys.stderr,
                          flush=True)
                sys.stdout.flush()
                os._exit(2)

    def confirm(self):
        """Renews the lease now, after which no other run can take it for LEASE seconds. Raises
        UserError if another one has."""
        if not self.is_lost:
            try:
                with explained(self.folder.url):
                    self.write(patient())
            except UserError:
                self.is_said = True
                raise
        if self.is_lost:
            raise UserError(
                f'another run has taken over {self.folder.url}, because this one gave no sign for '
                f'{LEASE:g} s: it ends, and what it had not saved by then is not saved')

    def release(self):
        """Gives the lease back, unless the bucket does not answer: then it runs out."""
        self.ended.set()
        with self.mutex, contextlib.suppress(Exception):
            if self.is_held and not self.is_lost:
                self.is_held = False
                self.folder.blob('lock').delete(if_generation_match=self.generation, **patient(5))


class Held:
    """What holds a lease: it is given back when this object is deleted, and when the process
    ends."""

    def __init__(self, lease):
        self.close = weakref.finalize(self, lease.release)


# -----------------------------------------------------------------------------
# a run

@functools.cache
def bucket_run(url):
    """Returns the BucketRun of a URL, one in this process."""
    run = BucketRun(url)
    run.refresh()
    return run


class BucketRun:
    """The folder of a run in a bucket, with the methods of DiskRun.

    `files` is the mirror: config.json, tokenizer/ and, of each complete checkpoint, SMALL. It is
    read from the bucket by refresh(). The run that holds the lease writes there and uploads."""

    more_errors = (Exception,)  # each of the three clients has its own

    def __init__(self, url):
        self.folder = Folder(url)
        self.url = self.folder.url
        self.files = temporary_folder()
        self.lease = None
        self.objects = {}  # {name: blob} of the bucket
        self.mirrored = {}  # {name: generation} of the files that were read from it
        self.uploaded = {}  # {name: (size, time of change)} of the files that are there
        self.mutex = threading.Lock()  # of uploads: the loop and Orbax's thread make them

    @property
    def checkpoints(self):
        """The folder of the checkpoints, for Orbax."""
        from etils import epath
        return epath.Path(self.url) / 'ckpt'

    def make_checkpoints(self):
        """Makes the folder of the checkpoints: a bucket has none."""

    def atomicity(self):
        """Returns how Orbax completes a checkpoint: by COMMITTED, which is its choice for a bucket."""
        return None

    def shown(self, text):
        """Returns a text for the user in which the bucket stands for its mirror."""
        return str(text).replace(str(self.files), self.url)

    @property
    def is_writer(self):
        """Whether this process holds the lease."""
        return self.lease is not None and self.lease.is_held

    def refresh(self, with_metrics=False):
        """Reads what has changed in the bucket. with_metrics: also metrics.jsonl."""
        for _ in range(5):
            self.objects = self.folder.list()
            if self.update_mirror(with_metrics):
                return
        raise UserError(f'{self.url} changes faster than it can be read; try it again')

    def update_mirror(self, with_metrics):
        """Downloads what has changed since the last time, and removes checkpoints that are gone.
        Returns False if an object has been replaced meanwhile."""
        complete = set()
        for name in self.objects:
            parts = name.split('/')
            if len(parts) == 3 and parts[0] == 'ckpt' and parts[2] == COMMITTED:
                complete.add(parts[1])
        for name, blob in self.objects.items():
            is_wanted = self.is_mirrored(name, complete, with_metrics)
            if not is_wanted or self.mirrored.get(name) == blob.generation:
                continue
            if not self.folder.download(blob, self.files):
                return False
            self.mirrored[name] = blob.generation
            self.uploaded[name] = file_state(self.files / name)
        for path in (self.files / 'ckpt').glob('*'):
            if path.name not in complete:
                shutil.rmtree(path)
                self.forget(f'ckpt/{path.name}/')
        return True

    def is_mirrored(self, name, complete, with_metrics):
        """Returns whether the mirror has this object. complete: the folders of the checkpoints that
        are."""
        top, _, rest = name.partition('/')
        if top == 'ckpt':
            step, _, rest = rest.partition('/')
            return step in complete and rest in SMALL
        if self.is_writer:
            return False  # it has newer ones
        return name == 'config.json' or top == 'tokenizer' or name == 'metrics.jsonl' and with_metrics

    def forget(self, start):
        """Forgets the files of the mirror whose names begin so."""
        for known in (self.mirrored, self.uploaded):
            for name in [name for name in known if name.startswith(start)]:
                del known[name]

    def upload(self):
        """Uploads the files that have changed, and deletes those that are gone, if this process
        holds the lease. Raises UserError if another run has taken it."""
        if not self.is_writer:
            return
        with self.mutex:
            there = {}
            for path in self.files.rglob('*'):
                name = path.relative_to(self.files).as_posix()
                is_partial = '.tmp' in path.name or name.startswith('.')
                if path.is_file() and not is_partial and not name.startswith('ckpt/'):
                    there[name] = file_state(path)
            changed = [name for name in there if self.uploaded.get(name) != there[name]]
            known = [name for name in self.uploaded if not name.startswith('ckpt/')]
            gone = [name for name in known if name not in there]
            if not changed and not gone:
                return
            self.lease.confirm()
            for name in changed:
                self.folder.put(name, (self.files / name).read_bytes())
                self.uploaded[name] = there[name]
            for name in gone:
                self.folder.delete(name)
                self.forget(name)

    # the lock

    def wait_until_free(self):
        """Waits for the lease of a run that died. Raises UserError if another one lives."""
        Lease(self.folder).wait_until_free()

    def lock(self, holder):
        """Takes the lease for this run, and returns what holds it. Raises UserError if another run
        has it, or had it since refresh()."""
        before = self.steps()
        lease = Lease(self.folder)
        lease.take(holder)
        held = Held(lease)
        self.refresh(with_metrics=True)
        if self.steps() != before:
            held.close()
            raise UserError(f'{self.url} has got or lost checkpoints while this run started: start '
                            'it again')
        self.lease = lease
        return held

    def is_locked_by(self, holder):
        """Returns whether process 0, whose name this is, has the lock that this process sees."""
        return Lease(self.folder).read()['holder'] == holder

    def steps(self):
        """Returns the names of the complete checkpoints in the mirror."""
        return sorted(path.name for path in (self.files / 'ckpt').glob('*'))

    # checkpoints

    def write_checksums(self):
        """Writes checksums.json, {file: [size, CRC-32C]} as the bucket says them, into the one
        checkpoint that is complete but for its commit, after the files of the run: what is
        committed has its metrics.

        Orbax calls it in one process, and gives the checkpoint up if this raises."""
        self.upload()
        objects = self.folder.list('ckpt/')
        sums = {}
        committed = set()
        for name, blob in objects.items():
            _, step, rest = name.split('/', 2) if name.count('/') > 1 else ('', '', '')
            if rest == COMMITTED:
                committed.add(step)
            elif step.isdecimal() and '/' in rest:
                sums.setdefault(step, {})[rest] = checksum(blob)
        for step in sums.keys() - committed:
            self.folder.put(f'ckpt/{step}/checksums.json', json.dumps(sums[step], indent=0))
        self.lease.confirm()

    def differs(self, step, name, expected):
        """Returns whether a file of the checkpoint in the folder `step` is not as it was written.
        expected: what checksums.json says of it."""
        blob = self.objects.get(f'ckpt/{step.name}/{name}')
        return blob is None or checksum(blob) != expected

    def set_aside(self, step, free):
        """Renames a damaged checkpoint. step, free: folders of the mirror.

        Its objects are copied, then deleted, the one that completes it first."""
        start = f'ckpt/{step.name}/'
        names = [name for name in self.objects if name.startswith(start)]
        names.sort(key=lambda name: not name.endswith(COMMITTED))
        with explained(self.url):
            for name in names:
                copy = self.folder.blob(f'ckpt/{free.name}/{name.removeprefix(start)}')
                token, _, _ = copy.rewrite(self.objects[name], **patient())
                while token:
                    token, _, _ = copy.rewrite(self.objects[name], token=token, **patient())
        for name in names:
            self.folder.delete(name)
        self.refresh()

    def write_metrics(self, step, text):
        """Writes the metrics of a checkpoint that has none."""
        self.check()
        self.folder.put(f'ckpt/{step}/metrics/metrics', text)
        self.refresh()

    def check(self):
        """Raises UserError if the bucket does not answer or refuses, or if another run has taken this
        one's lease."""
        if self.is_writer:
            self.lease.confirm()
        else:
            self.folder.get('config.json')

    @contextlib.contextmanager
    def waiting(self, until_the_end=False):
        """Marks where this run waits for the bucket, which may have gone: see Lease.watch.
        until_the_end: whether it also waits afterwards, while the process ends."""
        if not self.is_writer:
            yield
            return
        self.lease.is_watched = True
        try:
            yield
        finally:
            self.lease.is_watched = until_the_end

    def space(self):
        """Returns what a message says of the space that is left: nothing."""
        return ''


def checksum(blob):
    """Returns what checksums.json says of an object."""
    return [blob.size, blob.crc32c]


def file_state(path):
    """Returns what changes with a file."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def temporary_folder():
    """Makes a folder that is deleted when this process ends; those of processes that were killed
    are deleted now. Returns its path."""
    if not fcntl:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    # The folder of this user, in which each folder has a lock beside it.
    parent = Path(tempfile.gettempdir(), f'jax_transformer-{os.getuid()}')
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.lstat().st_uid != os.getuid():
        raise UserError(f'{parent} belongs to another user; set TMPDIR to a folder of your own')
    for lock in parent.glob('*.lock'):
        remove_if_abandoned(lock)

    # Another process may take a lock for abandoned before it is held.
    is_mine = False
    while not is_mine:
        file = tempfile.NamedTemporaryFile(dir=parent, suffix='.lock', delete=False)
        fcntl.flock(file, fcntl.LOCK_EX)
        is_mine = os.path.exists(file.name)
    folder = Path(file.name).with_suffix('')
    folder.mkdir()

    def remove():
        shutil.rmtree(folder, ignore_errors=True)
        os.unlink(file.name)
        file.close()

    atexit.register(remove)
    return folder


def remove_if_abandoned(lock):
    """Removes the folder of a process that has ended: nobody holds its lock."""
    with contextlib.suppress(OSError), open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_suffix(''), ignore_errors=True)
        lock.unlink()


# -----------------------------------------------------------------------------
# data sets

def data_cache():
    """Returns the folder of the data sets that were fetched."""
    default = Path.home() / '.cache' / 'jax_transformer' / 'data'
    return Path(os.environ.get('JAX_TRANSFORMER_DATA', default))


def fetch_dataset(url):
    """Copies the data set gs://bucket/folder to this machine, if it is not there yet, and returns
    its folder. What has changed in the bucket since is fetched again.

    Several processes of a machine wait for the one that fetches. Raises UserError for a data set
    that is not there, and if the bucket refuses or does not answer."""
    source = Folder(url)
    bucket, name = split_url(url)
    target = data_cache() / bucket / name
    target.mkdir(parents=True, exist_ok=True)
    with open(target / '.fetch.lock', 'w') as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(5):
            if fetch_changed(source, target):
                return target
    raise UserError(f'{source.url} changes while it is fetched; try it again')


def fetch_changed(source, target):
    """Fetches the objects that `target` does not have as they are, the large ones last. Returns
    False if one was replaced meanwhile."""
    objects = {}
    for name, blob in source.list().items():
        if not name.startswith('.'):  # its own files are
            objects[name] = blob
    if 'train.bin' not in objects:
        raise UserError(f'there is no {source.url}/train.bin; upload a data set, as with: gcloud '
                        f'storage cp -r data/mine {source.url}')

    # What was fetched: {name: [size, CRC-32C]}, of which the files still have the sizes.
    stamp = target / '.fetched.json'
    fetched = read_json(stamp, optional=True)
    missing = []
    for name, blob in objects.items():
        path = target / name
        is_there = path.is_file() and path.stat().st_size == blob.size
        if not is_there or fetched.get(name) != checksum(blob):
            missing.append(name)
    if not missing and fetched.keys() == objects.keys():
        return True

    # A file that is gone from the bucket would be read, too.
    for name in fetched.keys() - objects.keys():
        Path(path_inside(target, name)).unlink(missing_ok=True)
    fetched = {name: sums for name, sums in fetched.items() if name in objects}
    if missing:
        n_bytes = sum(objects[name].size for name in missing)
        print(f'fetching {source.url} ({n_bytes / 1e6:,.0f} MB) to {target}')
    for name in sorted(missing, key=lambda name: objects[name].size):
        fetched.pop(name, None)
        write_json(stamp, fetched)  # it has other bytes from here on
        if not source.download(objects[name], target):
            return False
        fetched[name] = checksum(objects[name])
        write_json(stamp, fetched)
    write_json(stamp, fetched)
    return True
