"""The folder of a run, out_dir: its lock, checkpoints, config.json, tokenizer and metrics."""
import contextlib
import math
import os
import re
import socket
import sys
import time
from pathlib import Path

import jax

from jax_devices.processes import gather_texts, in_all_processes
from jax_flags import (
    TryAgain, UserError, exit_if_peer_died, free_name, note, read_json, refuse, warn, write_json)
from jax_hub.folders import find_config_json, keep_config_json, kept_config_json
from jax_hub.tokenizer_files import copy_tokenizer
from jax_run.checkpoints import (
    FORMAT, add_val_loss, checkpoint_steps, comparable_since, finish_checkpoints, is_checkpoint,
    list_steps, open_checkpoint, open_checkpoints, read_val_loss, run_folder, save_checkpoint,
    split_checkpoint)
from jax_run.data import DataChanged
from jax_run.log import MetricsLog, NotFinite, plot_losses, start_wandb
from jax_train_utils import all_finite


class OutDir:
    """The folder of a run. The constructor locks the folder until close() or the end of the
    process. It raises UserError if Orbax cannot write below the folder, and if the folder holds an
    earlier run that is neither resumed nor to be overwritten (--overwrite), a model, or what this
    run starts from; and as lock_out_dir does."""

    def __init__(self, run):
        self.path = run.flags['out_dir']
        # Orbax takes [ ] for a glob, and completes no checkpoint; TensorStore takes \ for /, and
        # only UTF-8, whose other bytes Python has as \udc80 to \udcff
        if re.search(r'[][\\\udc80-\udcff]', Path(self.path).absolute().as_posix()):
            raise UserError(f'out_dir={self.path}: Orbax loses the checkpoints in a folder that has '
                            '[, ], \\ or bytes other than UTF-8 in its path; choose another')
        self.folder = run_folder(self.path)
        self.run = None  # the Run that is written, with its manifest, from begin() on
        self.manifest = None
        self.checkpoints = None  # Orbax's manager
        self.is_ending = False  # the last checkpoint has been begun
        self.metrics_log = None  # process 0 has one
        self.wandb_run = None  # process 0 has one, with --wandb_log
        self.wandb_id = None
        self.chosen = {}  # what config.json has beside the flags and the manifest
        self.earlier = []  # iterations of the checkpoints that are to be deleted
        if not run.resumed:
            self.earlier = checkpoint_steps(self.path)
        if self.earlier and not run.flags['overwrite']:
            raise UserError(
                f'{self.path} holds a run at iteration {self.earlier[0]}; continue it with '
                '--init_from=resume, choose another --out_dir, or delete its checkpoints with '
                '--overwrite=True')
        # the model that the run starts from, which must not be overwritten
        source = run.model.lora['base'] if run.model.lora else run.model.source
        inside = os.path.join(os.path.realpath(self.path), '')
        settings = {}
        with contextlib.suppress(UserError):  # a damaged config.json is none of a model
            settings = read_json(self.folder.files / 'config.json', optional=True)
        refuse([
            (self.earlier and source and os.path.realpath(source).startswith(inside),
             f'{self.path} holds the model that this run starts from, which --overwrite=True would '
             'delete; choose another --out_dir'),
            ('model_type' in settings,
             f'{self.path} is the folder of a model, and its config.json would be overwritten; '
             'choose another --out_dir')])
        self.lock = lock_out_dir(self.path, run.iter_num if run.resumed else None)

    def begin(self, run, manifest, bpb_bytes):
        """Begins to write a run. Deletes the checkpoints of a run that is overwritten. Opens the
        checkpoints, metrics.jsonl and wandb. Writes config.json with the flags, and the files of
        the tokenizer. If the run starts from a pretrained model, also writes a copy of this model's
        config.json, under another name. run: a Run. manifest: what open_manifest returns.
        bpb_bytes: says which bytes the metric "bits per byte" counts, those of the 'tokens' or
        those of the 'text' (see Data.bpb_bytes)."""
        self.run, self.manifest = run, manifest
        flags = run.flags
        self.checkpoints = open_checkpoints(
            self.path, flags['keep'], since=comparable_since(manifest))
        self.wandb_id = run.resumed['wandb_id'] if run.resumed else None
        is_first = jax.process_index() == 0
        # wandb may refuse: it starts before the earlier run is deleted
        if flags['wandb_log'] and is_first:
            self.wandb_run = start_wandb(
                project=flags['wandb_project'], name=flags['wandb_run_name'], id=self.wandb_id,
                config=flags)
            self.wandb_id = self.wandb_run.id
        for step in self.earlier:
            self.checkpoints.delete(step)
        if not is_first:
            return
        files = self.folder.files
        self.chosen = {'dtype': run.dtype}
        if bpb_bytes != 'tokens':
            self.chosen['bpb_bytes'] = bpb_bytes
        if run.resumed:
            with contextlib.suppress(UserError):  # a damaged one says nothing, and is written anew
                earlier = read_json(files / 'config.json', optional=True)
                say_what_is_counted(earlier.get('bpb_bytes', 'tokens'), bpb_bytes)
        self.write_settings()
        begins_anew = run.iter_num > 0 and comparable_since(manifest) == run.iter_num
        self.metrics_log = MetricsLog(files, run.iter_num, begins_anew=begins_anew)
        self.folder.upload()

    def write_settings(self):
        """Writes config.json, and the files of the tokenizer with the kept config.json."""
        files, model = self.folder.files, self.run.model
        settings = {**self.run.flags, **self.chosen, 'manifest': self.manifest}
        write_json(files / 'config.json', settings)
        if model.tokenizer['kind'] == 'folder':
            copy_tokenizer(model.tokenizer, files / 'tokenizer')
        # the config.json of the pretrained model, or none in place of an earlier run's
        if not self.run.resumed and (model.source or (files / 'tokenizer').exists()):
            keep_config_json(config_json_of(model.source), files)

    def renew(self):
        """Makes the lock, config.json, the tokenizer and metrics.jsonl anew in a folder that was
        deleted or renamed, or that lacks some of these files. Prints a line. Without these files,
        another run could begin in the folder, and no script could read it. Raises UserError if
        another run has begun there."""
        if checkpoint_steps(self.path):
            warn(f'{self.path} lacks config.json or metrics.jsonl: they are written again')
        else:
            warn(f'{self.path} has been deleted or renamed: it is made anew, without the earlier '
                 'checkpoints')
        self.lock.close()
        self.lock = self.folder.lock(f'process {os.getpid()}, which has made the folder anew')
        with contextlib.suppress(UserError):  # the tokenizer may have been in the folder
            self.write_settings()
        self.metrics_log.renew()

    def move_end(self, run, manifest):
        """Records a new number of iterations of the run, in config.json and in all checkpoints that
        are saved from now on. Call this method when --minutes has moved the end of the run. run,
        manifest: the Run and the manifest with the new number. Prints a warning if config.json
        cannot be written."""
        self.run, self.manifest = run, manifest
        if not self.metrics_log:
            return
        settings = {**run.flags, **self.chosen, 'manifest': manifest}
        try:
            write_json(self.folder.files / 'config.json', settings)
        except OSError as error:  # training goes on without it: the checkpoints have the number
            warn(f'cannot write {self.path}/config.json anew: {error.strerror}')

    def is_saving(self):
        """Returns whether a checkpoint is being written in the background, or whether the run has
        begun to save its final checkpoint."""
        return self.is_ending or bool(self.checkpoints and self.checkpoints.is_saving_in_progress())

    def save(self, iter_num, state, best_val_loss, val_loss=None, *, is_last=False):
        """Saves a checkpoint of iteration iter_num. Does nothing at the iteration at which the run
        began: a resumed run has this checkpoint already, and a new run has not been trained yet.

        best_val_loss: the lowest validation loss so far. val_loss: that of this iteration, None
        without an evaluation. is_last: whether this is the last checkpoint.

        Raises UserError if the parameters are not finite, and whenever save_checkpoint does."""
        run = self.run
        self.is_ending = is_last
        if iter_num == run.iter_num:
            return
        if not all_finite(state.params):  # an update can spoil them after a finite loss
            raise UserError(f'parameters are not finite at iteration {iter_num}; any checkpoints '
                            f'in {self.path} are from before')
        files = self.folder.files
        is_whole = (files / 'config.json').exists() and (files / 'metrics.jsonl').exists()
        if self.metrics_log and not is_whole:
            self.renew()
        tokenizer = dict(run.model.tokenizer)
        if 'path' in tokenizer:
            tokenizer['path'] = 'tokenizer'  # beside the checkpoints
        # what the run began from; in a resumed run the flag says 'resume'
        origin = run.flags['init_from']
        if run.resumed:
            origin = run.resumed.get('origin', run.resumed['flags']['init_from'])
        meta = {
            'format': FORMAT, 'model': run.model.config.architecture(),
            'best_val_loss': best_val_loss, 'tokenizer': tokenizer, 'flags': run.flags,
            'versions': self.manifest['versions'], 'wandb_id': self.wandb_id,
            'lora': run.model.lora, 'manifest': self.manifest, 'origin': origin}
        save_checkpoint(self.checkpoints, iter_num, state, val_loss=val_loss, meta=meta)

    def record_val_loss(self, iter_num, val_loss):
        """Adds val_loss to the checkpoint of iteration iter_num, if the run was resumed from that
        checkpoint (see add_val_loss). Adds nothing if this resume has switched --ema off, because
        val_loss is then that of other weights than those that are sampled from the checkpoint.

        Call this method after each evaluation, when metrics.jsonl already has the evaluation. In a
        bucket, first uploads metrics.jsonl and the run's other changed files."""
        if self.metrics_log:
            self.folder.upload()
        if not self.run.resumed or iter_num != self.run.iter_num:
            return
        sampled = self.run.resumed.get('weights', ['params'])[-1]
        if sampled == 'params' or self.run.flags[sampled]:
            add_val_loss(self.checkpoints, iter_num, val_loss, comparable_since(self.manifest))

    def plot(self):
        """Draws loss.png anew."""
        if self.metrics_log:
            plot_losses(self.folder.files)

    @contextlib.contextmanager
    def saved_on_failure(self, what, iter_num, state, best_val_loss):
        """Saves a checkpoint if the with block fails, before the error ends the run. For example,
        memory may run out, wandb may be unreachable, or data may be truncated. Saves nothing after
        NotFinite. Saves nothing if there are several processes: all of them must take part in a
        save, but the others wait for the failed one in a collective operation.

        what: what the block does, for the message. state: the TrainState after iter_num
        iterations."""
        try:
            yield
        except NotFinite:
            raise
        except Exception as error:
            exit_if_peer_died(error)
            if iter_num != self.run.iter_num and jax.process_count() == 1:
                # the state of a step that has failed on the device cannot be read
                with contextlib.suppress(Exception):
                    self.save(iter_num, state, best_val_loss)
                    self.checkpoints.wait_until_finished()
                    note(f'{what} at iteration {iter_num} has failed; the model is saved')
            raise

    def close(self):
        """Closes metrics.jsonl and wandb's run, and gives the lock back. After that, nothing is
        written."""
        if self.metrics_log:
            self.metrics_log.close()
        if self.wandb_run:  # else the next run of this process would continue it
            error = sys.exc_info()[1]
            with contextlib.suppress(Exception):
                self.wandb_run.finish(exit_code=getattr(error, 'code', 1) if error else 0)
        self.folder.upload()
        if self.lock:
            self.lock.close()

    @contextlib.contextmanager
    def writing(self):
        """At the end of the with block, completes the checkpoints saved so far, even if the run
        fails. Raises UserError if a file of the data set changes during the run; the message names
        the checkpoint from which the run can continue."""
        try:
            yield
        except DataChanged as error:
            self.checkpoints.wait_until_finished()
            kept = 'there is no checkpoint yet'
            steps = checkpoint_steps(self.path)
            if steps:
                kept = (f'{self.path} has the checkpoint of iteration {steps[0]}: continue with '
                        '--init_from=resume')
            raise UserError(f'{error}; make the data set again; {kept}') from None
        except Exception as error:
            exit_if_peer_died(error)
            with contextlib.suppress(Exception):  # it is reported below
                self.checkpoints.wait_until_finished()
            steps = checkpoint_steps(self.path)
            if steps and not isinstance(error, UserError):
                warn(f'the last checkpoint is that of iteration {steps[0]}: continue with '
                     f'--init_from=resume --out_dir={self.path}')
            raise
        finally:
            finish_checkpoints(self.checkpoints)
            self.folder.upload()


def say_what_is_counted(earlier, now):
    """Prints a line if a resumed run counts other bytes than before for the metric "bits per byte".
    This can happen if the data set was prepared again before the resume.

    earlier, now: what the metric counted before and what it counts now, each a value of
    Data.bpb_bytes. 'tokens': the bytes that the tokens stand for. 'text': the bytes of the text."""
    if earlier != now:
        print(f'bits per byte count the bytes of the {now} from here on, and counted those of the '
              f'{earlier} before, because the data set was prepared again: do not compare the two')


def config_json_of(source):
    """Returns the path of the config.json of the model that a run starts from, or None if there is
    no such file. source: Model.source."""
    if source is None:
        return None
    if not is_checkpoint(source):
        return find_config_json(source)
    out_dir, _ = split_checkpoint(source)
    kept = kept_config_json(run_folder(out_dir).files)
    return kept if os.path.exists(kept) else None


# -----------------------------------------------------------------------------
# the lock

def lock_out_dir(out_dir, resumed_at=None):
    """Locks out_dir until the lock is closed or the process ends. Process 0 returns the lock, other
    processes return None. The file out_dir/lock says who holds the lock. Raises UserError if
    another run holds the lock. Raises UserError also if a process does not see the lock of process
    0, because the processes then have different folders.

    Renames damaged checkpoints to <iteration>.damaged, so that Orbax does not see them. A
    checkpoint counts as damaged if its metrics are unreadable, or if it is newer than iteration
    resumed_at. (A run resumes from its newest intact checkpoint. So a checkpoint that is newer was
    not intact.) resumed_at: the iteration that the run goes on from. It is None if the run is not
    resumed; then only checkpoints with unreadable metrics count as damaged.

    Raises TryAgain if a newer checkpoint is intact: another run has saved it, and has ended, after
    this run had chosen the checkpoint of iteration resumed_at."""
    run = run_folder(out_dir)
    machine = socket.gethostname()
    mine = f'process {os.getpid()} on {machine} since {time.strftime("%F %T")}'
    holder = gather_texts(mine)[0]

    is_first = jax.process_index() == 0
    held = None
    with in_all_processes():
        if is_first:
            held = run.lock(holder)
    later = None if resumed_at is None else find_later_checkpoint(out_dir, resumed_at)
    if later:
        if held:
            held.close()
        raise TryAgain(f'another run has saved checkpoint {later} of {out_dir} while this command '
                       'started; start the command again')
    with in_all_processes():
        if is_first:
            set_damaged_aside(run, resumed_at)
    with in_all_processes():
        if not is_first:
            see_lock(run, out_dir, holder)
    return held


def find_later_checkpoint(out_dir, iteration):
    """Returns the iteration of the newest intact checkpoint in out_dir, if it is newer than
    `iteration`, else None. All processes have to call this function."""
    seen_by_first = gather_texts(' '.join(map(str, checkpoint_steps(out_dir))))[0]
    for step in map(int, seen_by_first.split()):
        if step > iteration:
            with contextlib.suppress(UserError):  # it is damaged
                open_checkpoint(run_folder(out_dir), step)
                return step
    return None


def set_damaged_aside(run, resumed_at):
    """Renames the damaged checkpoints of a run, and prints a line for each. A checkpoint counts as
    damaged if its metrics are unreadable, or if it is newer than iteration resumed_at (lock_out_dir
    says why).

    run: a DiskRun or BucketRun. resumed_at: the iteration from which the run resumes. It is None if
    the run is not resumed; then only checkpoints with damaged metrics are renamed. Raises OSError
    as read_val_loss does."""
    folder = run.files / 'ckpt'
    for step in list_steps(folder):
        path = folder / str(step)
        is_newer = resumed_at is not None and step > resumed_at
        if is_newer or read_val_loss(path) == -math.inf:
            free = free_name(path)
            run.set_aside(path, free)
            print(f'{run.shown(path)} is damaged: renamed to {free.name}')


def see_lock(run, out_dir, holder):
    """Raises UserError if this process does not see the lock that process 0 holds. holder: the text
    that process 0 has written into the lock. Waits up to 40 s, because an NFS client may show the
    writes of another machine only 30 s later."""
    for _ in range(400):
        if run.is_locked_by(holder):
            return
        time.sleep(0.1)
    raise UserError(f'{out_dir} is not the folder of process 0: it has to be on a file system '
                    'that all processes share, or in a bucket, gs://bucket/run')
