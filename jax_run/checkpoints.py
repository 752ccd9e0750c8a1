"""Saves and restores a TrainState in out_dir/ckpt/<iteration>. Orbax writes the checkpoint in the
background. A checkpoint is always either complete or absent."""
import itertools
import json
import logging
import math
import operator
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_devices.processes import gather_texts
from jax_flags import (
    TryAgain, UserError, check_choice, did_you_mean, digest, exit_if_peer_died, is_in_bucket,
    lock_file, parse_json, printable, read_json, warn, write_text)
from jax_hub.folders import path_inside
from jax_hub.tokenizers import locate_tokenizer
from jax_transformer import WEIGHTS, GPTConfig

FORMAT = 1  # of checkpoints

# The folders of a checkpoint: each set of weights has its own, so that sampling can restore one
# alone. MODEL_ITEMS are the folders that a model needs. UNFINISHED is the name of a checkpoint that
# Orbax is still writing, in its mode ATOMIC_RENAME.
ITEMS = (*WEIGHTS, 'opt_state', 'meta', 'metrics')
MODEL_ITEMS = (*WEIGHTS, 'meta', 'metrics')
ANEW = 'anew'  # the file of metrics with the loss that add_val_loss has measured anew
UNFINISHED = '*.orbax-checkpoint-tmp'

# The time limit of a save: Orbax's 20 minutes are too short for slow disks, and for a clock that is
# set in between.
SAVE_SECONDS = 10**6

# -----------------------------------------------------------------------------
# where a run is


def run_folder(out_dir):
    """Returns the folder of a run: a BucketRun for gs://bucket/run, else a DiskRun. Both have the
    same methods. Raises UserError for any other URL, and for a bucket that cannot be read."""
    if is_in_bucket('out_dir', out_dir):
        from jax_run.buckets import bucket_run
        return bucket_run(str(out_dir))
    return DiskRun(out_dir)


class DiskRun:
    """The folder of a run on a disk.

    `files` is the folder of config.json, metrics.jsonl, tokenizer/ and the small files of complete
    checkpoints: on a disk, the folder of the run itself."""

    more_errors = ()  # what a failed read or write may raise beside OSError

    def is_temporary(self, error):
        """Returns whether a save that failed with `error` may soon succeed. On a disk, returns
        False."""
        return False

    def __init__(self, out_dir):
        self.files = Path(out_dir)
        self.checkpoints = Path(out_dir, 'ckpt').absolute()  # for Orbax

    def make_checkpoints(self):
        """Makes the folder that has all checkpoints. (Orbax would also do this, but would accept a
        file in place of the folder.) Returns the option that makes Orbax write each checkpoint
        under a temporary name, and rename it when it is complete."""
        from orbax.checkpoint import options
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        return options.AtomicityOptions(mode=options.AtomicityMode.ATOMIC_RENAME)

    def shown(self, text):
        """Returns the string to print for the user in place of `text`. text: a path, or a message
        with paths. For a run on a disk, the string is `text` itself. The files of a BucketRun are
        in a temporary folder that the user does not know (self.files); BucketRun.shown replaces its
        path by the run's gs:// URL."""
        return str(text)

    def refresh(self):
        """Does nothing, because the `files` of a run on a disk is always up to date.
        BucketRun.refresh copies the files from the bucket."""

    def upload(self):
        """Does nothing: a run on a disk has its files in place. BucketRun.upload copies changed
        files to the bucket."""

    # the lock

    def wait_until_free(self):
        """Does nothing: when the process of a run on a disk dies, the system frees the run's lock
        at once. In a bucket, a dead run keeps its lease until the lease expires;
        BucketRun.wait_until_free waits for that."""

    def lock(self, holder):
        """Takes the lock and writes the text `holder` into it. Only process 0 calls this. Returns
        the open file; closing it frees the lock. Raises UserError if another run has the lock, or
        if the folder cannot be written."""
        path = self.files / 'lock'
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, 'a')
        except OSError as error:
            raise UserError(f'cannot write to {path.parent}: {error.strerror}; choose another '
                            '--out_dir') from error
        if not lock_file(file):
            raise UserError(f'{path.parent} is in use by {path.read_text()}; choose another '
                            '--out_dir')

        # Say who has it, to the processes that look for it.
        file.truncate(0)
        file.write(holder)
        file.flush()
        os.fsync(file.fileno())  # without it, other NFS clients see the content 30 s later
        return file

    def is_locked_by(self, holder):
        """Returns whether this process sees the same folder as process 0, which has written the
        text `holder` into a file named lock (see the method lock): whether this file is in the
        folder that this process sees."""
        found = os.listdir(self.files) if self.files.is_dir() else ()  # makes NFS look again
        return 'lock' in found and (self.files / 'lock').read_text() == holder

    # checkpoints

    def write_checksums(self):
        """Writes checksums.json, {file: CRC-32}, into the checkpoint that is being saved. This
        checkpoint has all its files, but its folder still has Orbax's temporary name (UNFINISHED).
        Then waits until the checkpoint's files and metrics.jsonl are on the disk.

        Orbax calls this method in one process, before it renames the checkpoint. If this method
        raises an exception, Orbax drops the checkpoint."""
        folder = self.checkpoints
        steps = list(folder.glob(UNFINISHED))
        if not steps:
            raise RuntimeError(f'there is no {UNFINISHED} to write checksums.json into: another '
                               'version of Orbax?')
        for step in steps:
            # The files of all ITEMS. Orbax will still change the files in `step` itself.
            paths = sorted(step.glob('*/**/*'))
            files = [path for path in paths if path.is_file()]
            sums = {path.relative_to(step).as_posix(): checksum(path) for path in files}
            (step / 'checksums.json').write_text(json.dumps(sums, indent=0))

            # All of it is on the disk before the checkpoint gets its name, with the metrics so far:
            # after a loss of power it is complete or absent.
            metrics = self.files / 'metrics.jsonl'
            others = [metrics] if metrics.exists() else []
            for path in [*paths, *step.glob('*'), step, folder, *others]:
                sync(path)

    def differs(self, step, name, expected):
        """Returns whether the file `name` in the checkpoint folder `step` is missing or has
        changed. expected: the file's entry in checksums.json: a CRC-32, or [size, CRC-32C] if the
        checkpoint was written to a bucket and then copied to this disk."""
        path = step / name
        if not path.is_file():
            return True
        is_of_bucket = isinstance(expected, list) and len(expected) == 2
        if is_of_bucket:
            from jax_run.buckets import differs_from_object
            return differs_from_object(path, *expected)
        return checksum(path) != expected

    def set_aside(self, step, free):
        """Renames the folder `step` of a damaged checkpoint to `free`, an unused path."""
        os.rename(step, free)

    def write_metrics(self, step, name, text):
        """Writes `text` into a file of the metrics of checkpoint `step`, 'metrics' or ANEW."""
        write_text(self.checkpoints / str(step) / 'metrics' / name, text)

    def space(self):
        """Returns a text about the free space, for a message. Raises OSError if the folder is
        gone."""
        free = shutil.disk_usage(self.checkpoints).free / 1e6
        return f', where {free:,.0f} MB are free'


# -----------------------------------------------------------------------------
# the manager, and checksums


def open_checkpoints(out_dir, keep=2, since=0):
    """Returns Orbax's manager of out_dir/ckpt. The manager keeps the latest `keep` checkpoints and
    the best one, with the lowest validation loss. If losses before and after iteration `since`
    cannot be compared, it keeps the best one of each part.

    since: the iteration from which on validation losses can be compared, see comparable_since.
    Raises UserError if out_dir cannot be written."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers as policies
    quiet_orbax()
    folder = run_folder(out_dir)

    # Which checkpoints to keep. Saves between evaluations have no metrics, so only LatestN keeps
    # them.
    class Best(policies.PreservationPolicy):
        def should_preserve(self, checkpoints, **options):
            before, after = {}, {}  # {step: loss}: losses of the two do not compare
            for info in checkpoints:
                losses = after if info.step > since else before
                if info.metrics:
                    losses[info.step] = info.metrics['val_loss']
            anew = read_val_loss(folder.files / 'ckpt' / str(since), since)
            if math.isfinite(anew):
                after[since] = anew
            # of equal losses the latest
            kept = {min(reversed(losses), key=losses.get) for losses in (before, after) if losses}
            return [info.step in kept for info in checkpoints]

    preservation = policies.AnyPreservationPolicy([policies.LatestN(keep), Best()])

    # If Orbax made folders in the background, threads would wait 5 minutes for one that cannot be
    # made.
    background = ocp.options.AsyncOptions(
        timeout_secs=SAVE_SECONDS,
        create_directories_asynchronously=False,
        post_finalization_callback=folder.write_checksums)

    items = (*WEIGHTS, 'opt_state', 'meta')
    try:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation,
            best_fn=operator.itemgetter('val_loss'),
            best_mode='min',
            cleanup_tmp_directories=True,
            create=True,
            atomicity_options=folder.make_checkpoints(),
            async_options=background)
        return ocp.CheckpointManager(folder.checkpoints, options=options, item_names=items)
    except (OSError, *folder.more_errors) as error:
        reason = getattr(error, 'strerror', None) or str(error)[:200]
        raise UserError(f'cannot write to {out_dir}: {reason}; choose another --out_dir') from error


def quiet_orbax():
    """Silences Orbax's log, because this module itself reports failures. Also hides 'Event loop is
    closed', an error that Orbax's other writes raise after one write has failed."""
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def report(unraisable):
        if str(unraisable.exc_value) != 'Event loop is closed':
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = report


def sync(path):
    """Waits until a file, or the list of names in a folder, is on the disk (fsync). Does nothing on
    Windows."""
    if os.name != 'posix':
        return  # Windows does not open folders
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def checksum(path):
    """Returns the CRC-32 of a file, read 16 MiB at a time."""
    crc = 0
    with open(path, 'rb') as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc


def find_damage(run, path, items=ITEMS):
    """Returns the name of a missing or damaged file in the checkpoint folder `path`. Returns '' if
    all files are intact.

    run: the DiskRun or BucketRun of the checkpoint. items: which of ITEMS to check. If there are
    several processes, each reads some of the files, and all return the same name. A checkpoint
    without checksums.json is not checked here (see read_meta). Raises OSError if a file cannot be
    read, for example without permission: such a checkpoint may be intact."""
    damaged = ''
    try:
        # Each process compares its share of the files.
        sums = json.loads((path / 'checksums.json').read_text())
        others = set(ITEMS) - set(items)
        names = sorted(name for name in sums if name.split('/')[0] not in others)
        for name in names[jax.process_index()::jax.process_count()]:
            if run.differs(path, name, sums[name]):
                damaged = name
                break
    except FileNotFoundError:
        pass
    except (ValueError, AttributeError, RecursionError):
        damaged = 'checksums.json'

    # The first process that found something decides for all.
    return next(filter(None, gather_texts(damaged)), '')


def is_run(source):
    """Returns whether `source` is the out_dir of a run. A gs:// URL is always that of a run or of
    one of its checkpoints, because pretrained models are not read from a bucket."""
    if is_in_bucket('the run', source):
        return not is_checkpoint(source)
    return Path(source, 'ckpt').is_dir()


def is_checkpoint(source):
    """Returns whether `source` is a checkpoint of a run, out_dir/ckpt/ITERATION."""
    path = Path(source)
    if path.parent.name != 'ckpt' or not path.name.isdecimal():
        return False
    out_dir, step = split_checkpoint(source)
    return (run_folder(out_dir).files / 'ckpt' / step).is_dir()


def split_checkpoint(source):
    """Returns (out_dir, iteration as a text) of a checkpoint out_dir/ckpt/ITERATION."""
    folder, step = os.path.split(str(source).rstrip('/'))
    return os.path.dirname(folder), step


def checkpoint_steps(out_dir):
    """Returns the iterations of the complete checkpoints in out_dir, the latest first."""
    run = run_folder(out_dir)
    run.refresh()
    return list_steps(run.files / 'ckpt')


def list_steps(folder):
    """Returns the iterations of the complete checkpoints in the folder ckpt/, the latest first."""
    if not folder.is_dir():
        return []
    # Python also takes digits of other scripts for decimal.
    names = [path.name for path in folder.iterdir()
             if path.name.isascii() and path.name.isdecimal() and path.is_dir()]
    return sorted(map(int, names), reverse=True)


def read_val_loss(step, since=0):
    """Returns the validation loss of the checkpoint in the folder `step`. The best checkpoint is
    the one with the lowest validation loss.

    since: the iteration from which on validation losses can be compared, see comparable_since. The
    loss of the checkpoint at this iteration is the one that add_val_loss has measured anew. Returns
    infinity, the worst loss, for a checkpoint before `since`, and for one without a loss.

    Returns -infinity if the metrics are no JSON with a loss, or if the loss is not finite. This
    value is no loss; callers treat such a checkpoint as damaged. Raises OSError for metrics that
    may not be read, or that the disk cannot read: they may be intact."""
    iteration = int(step.name)
    path = step / 'metrics' / (ANEW if iteration == since else 'metrics')
    if iteration < since or not path.exists():
        return math.inf
    try:
        val_loss = float(parse_json(path.read_bytes(), path)['val_loss'])
    except FileNotFoundError:  # deleted meanwhile
        return math.inf
    except (KeyError, TypeError, ValueError, OverflowError):  # a UserError is a ValueError
        return -math.inf
    return val_loss if math.isfinite(val_loss) else -math.inf


def comparable_since(manifest):
    """Returns the iteration from which on the validation losses of a run can be compared. This is
    the iteration of the last resume that changed the data, the sequences of an evaluation or the
    loss (find_other_losses), or 0 if no resume changed them.

    manifest: the manifest of a checkpoint. If an earlier version wrote the checkpoint, the manifest
    is None, and the result is 0."""
    known = manifest or {}
    changes = [*known.get('earlier_data', []), *known.get('earlier', [])]
    return max([each['until'] for each in changes
                if 'data' in each or 'losses' in each or 'block_size' in each.get('flags', [])],
               default=0)


def read_comparable_since(step):
    """Returns comparable_since of the checkpoint in the folder `step`. Returns 0 if the checkpoint
    is damaged."""
    try:
        return comparable_since(read_json(step / 'meta' / 'metadata').get('manifest'))
    except (AttributeError, KeyError, TypeError, ValueError, OSError):
        return 0


def describe_checkpoint(out_dir, step, meta):
    """Returns {'iteration': step, 'digests': {name: digest}}, by which a result can name the
    checkpoint that it was computed with. The names are 'manifest' and the folders of the
    checkpoint, such as 'params' (see ITEMS). The digest of a folder is that of its checksums. meta:
    the metadata of the checkpoint."""
    sums = read_checksums(run_folder(out_dir).files / 'ckpt' / str(step))
    items = {}
    for name in sorted(sums):
        items.setdefault(name.split('/')[0], []).append([name, sums[name]])
    values = {'manifest': meta.get('manifest'), **items}
    return {'iteration': step,
            'digests': {name: digest(value)[:16] for name, value in values.items()}}


# -----------------------------------------------------------------------------
# saving

def save_checkpoint(manager: Any, iter_num: int, state: Any, meta: dict,
                    val_loss: float | None = None) -> None:
    """Saves the state after iter_num iterations. Returns once the values are copied; they are
    written in the background.

    manager: what open_checkpoints returns. meta: JSON metadata, see OutDir.save. val_loss: the
    validation loss, which makes the checkpoint a candidate for the best; None if there was no
    evaluation. Raises UserError if this checkpoint or the one before it cannot be written (a full
    disk), or if the folder holds later checkpoints. Raises TryAgain instead if a save may soon
    succeed."""
    import orbax.checkpoint as ocp
    if jax.process_count() > 1:
        state = jax.tree.map(as_replicated_global_array, state)
    metrics = None if val_loss is None else {'val_loss': val_loss}
    sets = state.weight_sets()
    trees = {**sets, 'opt_state': opt_state_item(state)}
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    meta = {**meta, 'iter_num': iter_num, 'weights': list(sets), 'checksums': True}
    items = ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta))
    run = run_of(manager)
    try:
        # This also waits for the checkpoint before, and raises the error of its writing.
        saved = manager.save(iter_num, metrics=metrics, args=items)
    except (OSError, ValueError, RuntimeError, *run.more_errors) as error:
        exit_if_peer_died(error)
        kind = TryAgain if run.is_temporary(error) else UserError
        what = f'checkpoint {iter_num}, or the one before it,'
        raise kind(cannot_write(what, manager, error)) from error
    if not saved:
        raise UserError(f'{manager.directory} refuses checkpoint {iter_num}: it holds later ones, '
                        f'{manager.all_steps()}')


def as_replicated_global_array(x):
    """Returns `x` as Orbax expects it. A jax.Array on this process's devices alone becomes a global
    array that is replicated over the devices of all processes. (pmap makes such an `x` if there are
    several processes.) Any other `x` is returned unchanged."""
    if not isinstance(x, jax.Array) or not x.is_fully_addressable:
        return x
    copies = [copy.data for copy in x.addressable_shards]
    mesh = Mesh(np.array(jax.devices(copies[0].device.platform)), ('data',))
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, P()), copies)


def cannot_write(what, manager, error):
    """Returns the message which says that `what`, a text such as 'checkpoint 100', cannot be
    written. manager: what open_checkpoints returns. error: the exception of the write."""
    folder = manager.directory
    run = run_of(manager)
    reason = str(error)[:200]
    try:
        space = run.space()
    except OSError:
        # deleted under the run, or its mount has gone
        return f'cannot write {what} to {folder}, which is not there any more ({reason})'
    held = 'there is no checkpoint yet'
    if list_steps(run.files / 'ckpt'):
        held = 'what it holds is complete, continue with --init_from=resume'
    return f'cannot write {what} to {folder}{space}; {held} ({reason})'


def run_of(manager):
    """Returns the DiskRun or BucketRun that a manager of checkpoints writes to."""
    return run_folder(os.path.dirname(str(manager.directory)))


def add_val_loss(manager, step, val_loss, since):
    """Adds val_loss to checkpoint `step`, so that it can be chosen as the best, in two cases:
    - It was saved without an evaluation, as when a signal stops the run.
    - `since` is `step`: val_loss is the first that compares with those of later checkpoints. The
      checkpoint keeps its earlier loss, too.

    All processes call this function. manager: what open_checkpoints returns. since: the iteration
    from which on validation losses can be compared."""
    run = run_of(manager)
    name = ANEW if since == step else 'metrics'
    path = run.files / 'ckpt' / str(step) / 'metrics' / name
    if jax.process_index() == 0 and (name == ANEW or not path.exists()):
        run.write_metrics(step, name, json.dumps({'val_loss': val_loss}))

    # Wait, so that no process reads the file before it is there.
    gather_texts('')
    run.refresh()
    manager.reload()


def finish_checkpoints(manager):
    """Waits until all checkpoints are on disk, and closes `manager`. Raises UserError if the last
    checkpoint cannot be written. The UserError is a TryAgain if a later save may succeed."""
    run = run_of(manager)
    try:
        manager.wait_until_finished()
        manager.close()
    except (OSError, ValueError, RuntimeError, *run.more_errors) as error:
        exit_if_peer_died(error)
        kind = TryAgain if run.is_temporary(error) else UserError
        raise kind(cannot_write('the last checkpoint', manager, error)) from error


def opt_state_item(state):
    """Returns what a checkpoint keeps of a TrainState in its folder opt_state: {'step',
    'opt_state', 'loss_scale'}."""
    return {'step': state.step, 'opt_state': state.opt_state, 'loss_scale': state.loss_scale}


# -----------------------------------------------------------------------------
# choosing and restoring


def choose_checkpoint(out_dir, which='latest', items=ITEMS):
    """Chooses a checkpoint in out_dir. Returns (iteration; metadata). which: 'latest' or 'best'.
    items: the folders of the checkpoint that must be intact, some of ITEMS.

    If one of these folders is damaged, says so on stderr and chooses the newest intact checkpoint
    instead. If no checkpoint is intact, chooses one that has lost only its checksums. Raises
    UserError if there is no such checkpoint either. Says on stderr also if the best checkpoint is
    chosen and there is a later one."""
    check_choice('checkpoint', which, ('latest', 'best'))
    steps = checkpoint_steps(out_dir)
    run = run_folder(out_dir)
    folder = run.files / 'ckpt'
    if not steps:
        runs = [str(path.parent) for path in Path().glob('*/ckpt') if path.parent != Path(out_dir)]
        raise UserError(f'there is no complete checkpoint in {run.shown(folder)}; name the out_dir '
                        f'of a run{did_you_mean(str(out_dir), runs)}')
    latest = steps[0]

    # The best one first, the others newest first. Sorting is stable: of checkpoints without an
    # evaluation the latest is the best.
    if which == 'best':
        since = read_comparable_since(folder / str(steps[0]))
        steps.sort(key=lambda step: read_val_loss(folder / str(step), since))
        best, *others = steps
        steps = [best, *sorted(others, reverse=True)]

    # Take the first that is intact. If there is none, take the first that has only lost its
    # checksums, as in a copy that lacks all of these small files.
    problems = []
    for is_checked, step in itertools.product((True, False), steps):
        if not is_checked and has_checksums(folder / str(step)):
            continue
        try:
            meta = open_checkpoint(run, step, items, is_checked)
        except UserError as error:
            if is_checked:
                problems.append(str(error))
            continue
        said = ''
        if problems:
            how = 'instead' if is_checked else 'unchecked: only its checksums cannot be read'
            said = f'{"; ".join(problems)}; taking checkpoint {step} {how}'
        elif step < latest:  # a run that overfits has its best checkpoint long before the latest
            said = (f'taking the best checkpoint, iteration {step}; a later one, {latest}, is '
                    'there: --checkpoint=latest')
        if said and jax.process_index() == 0:
            warn(said)
        return step, meta
    raise UserError(f'{"; ".join(problems)}; there is no intact one')


def has_checksums(path):
    """Returns whether all processes can read the checksums of the checkpoint folder `path`."""
    return all(gather_texts('yes' if read_checksums(path) else ''))


def read_checksums(step):
    """Returns the content of checksums.json in the checkpoint folder `step`, or {} if that file is
    missing or damaged."""
    try:
        return read_json(step / 'checksums.json', optional=True)
    except UserError:
        return {}


def open_checkpoint(run, step, items=ITEMS, is_checked=True):
    """Returns the metadata of checkpoint `step`, an iteration. run: a DiskRun or BucketRun. items:
    the folders of the checkpoint that must be intact, some of ITEMS. is_checked: whether the
    checksums of these folders are compared. Raises UserError if one of these folders is damaged, or
    if the checkpoint was written by another program than train_jax.py."""
    path = run.files / 'ckpt' / str(step)
    problem = find_damage(run, path, items) if is_checked else ''
    # A checkpoint with damaged metrics: a resume renames it, whatever its checksums say.
    if not problem and 'metrics' in items and read_val_loss(path) == -math.inf:
        problem = 'metrics/metrics'
    if not problem:
        try:
            return read_meta(path, is_checked)
        except Exception as error:  # a checkpoint of an earlier version, without checksums
            problem = f'{type(error).__name__}: {" ".join(str(error).split())}'
    raise UserError(f'{run.shown(path)} is damaged or not a checkpoint of this program '
                    f'({printable(run.shown(problem))})')


def read_meta(step, is_checked=True):
    """Returns the metadata of the checkpoint in the folder `step`. The path of its tokenizer, which
    is stored relative to out_dir, is joined to out_dir. Raises an exception in three cases: this
    program has not written the checkpoint; this version does not know the checkpoint's model or
    format; or is_checked is true and the checkpoint lacks the checksums that its metadata
    promises."""
    meta = read_json(step / 'meta' / 'metadata')
    if meta.get('format', FORMAT) > FORMAT:  # earlier versions wrote none
        raise ValueError(f"it has format {meta['format']}, of a later version; this one reads "
                         f'{FORMAT}')
    missing = {'model', 'iter_num', 'best_val_loss', 'tokenizer', 'flags', 'wandb_id'} - meta.keys()
    if missing:
        raise ValueError(f'its metadata lacks {sorted(missing)}')
    if str(meta['iter_num']) != step.name:
        raise ValueError(f"it is checkpoint {meta['iter_num']} in a folder of another name")
    GPTConfig(**meta['model'])

    # Earlier versions wrote no checksums; since then the metadata says that they are there.
    must_have_checksums = meta.pop('checksums', False) and is_checked
    if must_have_checksums and not (step / 'checksums.json').exists():
        raise ValueError('its checksums.json is missing')

    # The tokenizer is in the run's folder, wherever that is now.
    out_dir = step.parent.parent
    meta['tokenizer'] = locate_tokenizer(meta['tokenizer'], out_dir)
    if 'path' in meta['tokenizer']:
        path_inside(out_dir, os.path.relpath(meta['tokenizer']['path'], out_dir))
    return meta


def restore_items(out_dir, step, items):
    """Restores items of checkpoint `step` and returns {name: tree}.

    items: {name: abstract tree, with shapes, types and shardings}. Raises UserError if the
    checkpoint does not fit these trees, or is damaged. Raises TryAgain if a run that trains has
    deleted it meanwhile."""
    import orbax.checkpoint as ocp
    quiet_orbax()
    run = run_folder(out_dir)
    folder = run.checkpoints / str(step)
    restored = {}
    with ocp.StandardCheckpointer() as checkpointer:
        for name, tree in items.items():
            try:
                restored[name] = checkpointer.restore(folder / name, tree)
            except Exception as error:
                exit_if_peer_died(error)
                if not (folder / name).exists():
                    raise TryAgain(f'{folder} was deleted by its run: start again') from None
                what = 'the model'
                remedy = ''
                if name == 'opt_state':
                    what = "this version's optimizer"
                    remedy = f'; a new run starts from its weights with --init_from={out_dir}'
                raise UserError(f'{folder / name} does not fit {what}, or is damaged{remedy}: '
                                f'{type(error).__name__}: {error}') from error
    return restored


def load_checkpoint(out_dir: str | Path, step: int, state: Any) -> Any:
    """Returns `state` with the values of checkpoint `step`. state: an abstract TrainState, such as
    Layout.abstract_state makes. Raises UserError if the checkpoint does not fit `state`."""
    restored = restore_items(
        out_dir, step, {**state.weight_sets(), 'opt_state': opt_state_item(state)})
    others = restored.pop('opt_state')
    return state.replace(**restored, **others)
