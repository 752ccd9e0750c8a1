"""Kills training runs and takes their disks away, for minutes to hours, and counts what was lost. Not collected by
pytest; what full campaigns have found is in docs/reliability.md, and each class of failure is a small test of its own.

$ python tests/campaign.py --out=/tmp/campaign                      # everything
$ python tests/campaign.py --out=/tmp/campaign --sections=kill --kills=9 --seed=2

XLA compiles as users have it; --unoptimized switches its optimizations off, which saves compilation.

Every run is a process of its own, forked from this one, which has imported jax but not started it: that saves the
seconds of importing. Prints one line per run that is not as documented, and the table's rows. Exit code 1 if there was
such a run."""
import argparse
import collections
import hashlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', '/tmp/jax_campaign_cache')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
if '--unoptimized' in sys.argv:  # read before jax is imported
    os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import orbax.checkpoint
import tqdm

from jax_devices.layout import setup_distributed_training
from jax_run.checkpoints import checkpoint_steps, checksum, choose_checkpoint, load_checkpoint
from jax_train_utils import create_optimizer_with_schedule, create_train_state
from jax_transformer import GPTConfig
from tests.common import TEXT, free_port, records_of, wait_for, write_dataset

MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--device=cpu',
         '--gradient_accumulation_steps=2', '--dropout=0.1', '--learning_rate=1e-2', '--warmup_iters=2',
         '--init_from=auto']
LONG_RUN = [*MODEL, '--max_iters=600', '--lr_decay_iters=600', '--eval_interval=50', '--eval_iters=2',
            '--save_interval=10']
SHORT_RUN = [*MODEL, '--max_iters=12', '--lr_decay_iters=12', '--eval_interval=4', '--eval_iters=1',
             '--save_interval=2']

rng = random.Random()
failures = []  # what was not as documented, one line each
rows = []  # of the table


def failed(what):
    failures.append(what)
    print(f'FAILED: {what}', flush=True)


def add_row(what, count, result):
    rows.append(f'| {what} | {count} | {result} |')
    print(rows[-1], flush=True)


# -----------------------------------------------------------------------------
# runs

class Run:
    """A script, or a function, in a forked process, whose output is kept in the folder `cwd` as stdout and stderr."""

    def __init__(self, cwd, script, *args, devices=1, name=''):
        cwd.mkdir(parents=True, exist_ok=True)
        self.files = cwd / f'stdout{name}', cwd / f'stderr{name}'
        self.code = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        for number, path in enumerate(self.files, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(cwd)
        jax.config.update('jax_num_cpu_devices', devices)
        if callable(script):
            script(*args)
        else:
            sys.argv = [script, *map(str, args)]
            runpy.run_path(str(ROOT / script), run_name='__main__')
        sys.exit(0)

    def poll(self):
        """The exit code as a shell shows it, or None while the process runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.code = 128 - self.code if self.code < 0 else self.code
        return self.code

    def wait(self, seconds=600):
        """The exit code; -1 for a process that had to be killed after this time."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                failed(f'waited {seconds} s for the end of process {self.pid} in {self.files[0].parent}')
                self.kill()
                self.code = -1
            time.sleep(0.005)
        return self.code

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def err(self):
        return self.files[1].read_text(errors='replace')

    def says(self):
        """The exit code and the end of what the process printed, in one line."""
        return f'exit code {self.code}: ' + ' '.join((self.files[0].read_text()[-200:] + self.err[-600:]).split())


def train(folder, *args, **options):
    """train_jax.py with out_dir `folder`/out."""
    return Run(folder, 'train_jax.py', f'--out_dir={folder / "out"}', *args, **options)


def finish(run, what):
    """Waits for a run that must end with exit code 0."""
    if run.wait() != 0:
        failed(f'{what}: {run.says()}')


def write_state_hash(out_dir, path):
    """Writes the SHA-256 of parameters and optimizer state of the latest checkpoint to a file."""
    step, meta = choose_checkpoint(out_dir)
    parallel = setup_distributed_training(jax.devices()[:1])
    tx = create_optimizer_with_schedule(lambda step: 0.1)
    abstract = parallel.abstract_state(create_train_state, jax.random.key(0), GPTConfig(**meta['model']), tx)
    digest = hashlib.sha256(str(step).encode())
    for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(load_checkpoint(out_dir, step, abstract)):
        digest.update(jax.tree_util.keystr(leaf_path).encode() + np.asarray(leaf).tobytes())
    path.write_text(digest.hexdigest())


def result_of(folder):
    """(records of metrics.jsonl without times, hash of the final state) of the run in a folder."""
    finish(Run(folder, write_state_hash, folder / 'out', folder / 'hash', name='.hash'), f'hash of {folder}')
    return records_of(folder / 'out'), (folder / 'hash').read_text()


def damaged_checkpoints(out_dir):
    """Those of the latest two checkpoints of which a file is not as it was written. (An older one may have been killed
    while it was being deleted.)"""
    damaged = []
    for step in checkpoint_steps(out_dir)[:2]:
        folder = out_dir / 'ckpt' / str(step)
        try:
            sums = json.loads((folder / 'checksums.json').read_text())
            is_damaged = any(checksum(folder / name) != crc for name, crc in sums.items())
        except (OSError, ValueError):
            is_damaged = True
        if is_damaged:
            damaged.append(step)
    return damaged


def is_saving(out_dir, started_at):
    """Whether a checkpoint is being written by a run that has started at this time; a killed one leaves its folder."""
    try:
        return any(path.stat().st_mtime > started_at for path in (out_dir / 'ckpt').glob('*tmp*'))
    except OSError:  # renamed meanwhile
        return False


# -----------------------------------------------------------------------------
# SIGKILL

def start_processes(folder, args, n_processes, devices):
    """Starts a training run of one or several processes."""
    if n_processes == 1:
        return [train(folder, *args, devices=devices)]
    cluster = [f'--coordinator_address=127.0.0.1:{free_port()}', f'--num_processes={n_processes}']
    return [train(folder, *args, *cluster, f'--process_id={i}', devices=devices, name=f'.{i}')
            for i in range(n_processes)]


def kill_at_random(out_dir, runs):
    """Kills one of the runs at a random moment of the first seconds, or during a save. Returns (the killed run or None
    if the run has finished before, whether a save was under way, the newest complete checkpoint seen before)."""
    during_save = rng.random() < 0.6
    n_saves = rng.randrange(1, 6)
    delay = rng.random() * 0.04 if during_save else rng.random() * 8
    started_at = time.time()
    if len(runs) > 1:  # one that dies before they have joined, and lock out_dir, leaves the others waiting 5 minutes
        lock = out_dir / 'lock'
        has_joined = lambda: lock.exists() and lock.stat().st_mtime > started_at
        wait_for(f'the processes of {out_dir}', has_joined, *runs, seconds=400)
    started = time.monotonic()
    was_saving = False
    newest = -1
    while all(run.poll() is None for run in runs):
        saving = is_saving(out_dir, started_at)
        newest = max([newest, *checkpoint_steps(out_dir)])
        n_saves -= saving and not was_saving
        was_saving = saving
        if (saving and n_saves <= 0) if during_save else time.monotonic() - started > delay:
            break
        time.sleep(0.001)
    if during_save:
        time.sleep(delay)
    saving = is_saving(out_dir, started_at)
    if any(run.poll() is not None for run in runs):
        return None, False, newest
    victim = rng.choice(runs)
    victim.kill()
    return victim, saving, newest


def write_text(folder):
    """Makes a data set of characters, and returns the folder."""
    ids, chars = np.unique([*TEXT * 40], return_inverse=True)[::-1]
    write_dataset(folder, ids[:-400], ids[-400:], chars=''.join(chars))
    return folder


# (name, processes, devices of each) of the runs that are killed
LAYOUTS = (('1 device', 1, 1), ('8 virtual devices', 1, 8), ('2 processes', 2, 1))


def kill_section(work, n_kills, only=''):
    dataset = write_text(work / 'data' / 'fox')
    for i, (name, n_processes, devices) in enumerate(LAYOUTS):
        n = n_kills // len(LAYOUTS) + (i < n_kills % len(LAYOUTS))
        if only in ('', name):
            kill_layout(work / f'kill-{n_processes}x{devices}', name, n, n_processes, devices,
                        [f'--dataset={dataset}', *LONG_RUN])


def kill_layout(folder, name, n_kills, n_processes, devices, args):
    reference = folder / 'reference'
    for run in start_processes(reference, args, n_processes, devices):
        finish(run, f'{name}, uninterrupted')
    expected = result_of(reference)
    counts = collections.Counter()
    codes = collections.Counter()  # of processes that lost another one
    slowest = 0.0
    current = None
    while counts['kills'] < n_kills or current:
        if current is None:
            counts['runs'] += 1
            current = folder / f'run{counts["runs"]}'
        runs = start_processes(current, args, n_processes, devices)
        victim = None
        if counts['kills'] < n_kills:
            victim, saving, newest = kill_at_random(current / 'out', runs)
        if victim is None:
            for run in runs:
                finish(run, name)
            if result_of(current) != expected:
                counts['different'] += 1
                failed(f'{name}: {current} differs from the uninterrupted run')
            shutil.rmtree(current)
            current = None
            continue
        counts['kills'] += 1
        counts['saving'] += saving
        killed_at = time.monotonic()
        for run in runs:
            run.wait(120)
            if run is not victim:
                codes[run.code] += 1
                slowest = max(slowest, time.monotonic() - killed_at)
                if run.code not in (0, 75, 134):
                    failed(f'{name}: the other process: {run.says()}')
        steps = checkpoint_steps(current / 'out')
        if max([-1, *steps]) < newest:
            counts['lost'] += 1
            failed(f'{name}: checkpoint {newest} is lost, there are {steps}')
        damaged = damaged_checkpoints(current / 'out')
        counts['damaged'] += len(damaged)
        if damaged:
            failed(f'{name}: checkpoints {damaged} of {steps} are damaged after a kill')
    others = ', '.join(f'{n} x {code}' for code, n in sorted(codes.items()))
    add_row(f'SIGKILL, {name}',
            f'{counts["kills"]} kills in {counts["runs"]} runs, {counts["saving"]} during a save',
            f'{counts["lost"]} checkpoints lost, {counts["damaged"]} damaged; {counts["different"]} runs ended with '
            'other bits than the uninterrupted one' + (
                f'; the other process ended with {others}, after at most {slowest:.0f} s' if codes else ''))


# -----------------------------------------------------------------------------
# disks

def disk_section(work, step):
    """step: pages of 4 kB between two sizes of a full disk."""
    data = f'--dataset={write_text(work / "data" / "fox")}'
    args = [data, *SHORT_RUN]
    reference = work / 'reference'
    finish(train(reference, *args), 'uninterrupted')
    full_disks(work / 'full', args, result_of(reference), step)
    read_only_disks(work / 'readonly', args, [data, *LONG_RUN, '--max_iters=100000', '--save_interval=40'])


def check_refusal(run, what):
    """Checks that the run has ended with one line, behind those on a picture or metrics that could not be written, and
    exit code 2."""
    if run.wait(120) != 2 or not re.fullmatch('(cannot write .*\n|.* lacks its last .*\n)*error: .*\n', run.err):
        failed(f'{what}: {run.says()}')


def mount_tmpfs(mount, size):
    """Mounts a tmpfs of `size` bytes, which takes root."""
    mount.mkdir(parents=True, exist_ok=True)
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', mount], check=True)


def full_disks(folder, args, expected, step):
    """A run on a tmpfs of every size, in steps of `step` pages, up to the one on which it finishes; each is then
    enlarged and the run resumed."""
    code, n = 2, 0
    while code:
        n += 1
        what = f'a disk of {n * step} pages'
        mount_tmpfs(folder / 'out', n * step * 4096)
        run = train(folder, *args)
        code = run.wait(120)
        if code:
            check_refusal(run, what)
        if damaged_checkpoints(folder / 'out'):
            failed(f'{what}: a checkpoint is damaged')
        subprocess.run(['mount', '-o', 'remount,size=64m', folder / 'out'], check=True)
        finish(train(folder, *args), f'after {what}')
        if result_of(folder) != expected:
            failed(f'after {what}: not the bits of the uninterrupted run')
        subprocess.run(['umount', folder / 'out'], check=True)
        shutil.rmtree(folder)
    add_row(f'full disk: tmpfs of {step} to {n * step} pages of 4 kB, then enlarged and resumed', n,
            'all but the largest ended with exit code 2 and one line; the bits of the uninterrupted run')


def read_only_disks(folder, args, endless):
    """An out_dir that is read-only at the start, and a ckpt/ that becomes read-only during a run."""
    mount_tmpfs(folder / 'out', 2**26)
    subprocess.run(['mount', '-o', 'remount,ro', folder / 'out'], check=True)
    check_refusal(train(folder, *args), 'read-only out_dir')
    subprocess.run(['umount', folder / 'out'], check=True)
    mount_tmpfs(folder / 'out' / 'ckpt', 2**26)
    run = train(folder, *endless)
    wait_for('two checkpoints', lambda: len(checkpoint_steps(folder / 'out')) >= 2, run)
    remount = ['mount', '-o', 'remount,ro', folder / 'out' / 'ckpt']
    is_remounted = lambda: not subprocess.run(remount, stderr=subprocess.DEVNULL).returncode
    wait_for('the disk to become read-only', is_remounted, run)  # refused while a checkpoint is being written
    check_refusal(run, 'ckpt becomes read-only')
    if damaged_checkpoints(folder / 'out'):
        failed('ckpt becomes read-only: a checkpoint is damaged')
    subprocess.run(['umount', folder / 'out' / 'ckpt'], check=True)
    add_row('out_dir read-only at the start; ckpt/ made read-only during a run', 2, 'exit code 2, one line')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', required=True, help='work folder, on a local disk')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--sections', default='kill,disk', help='which of these, in this order')
    parser.add_argument('--layout', default='', choices=['', *(name for name, *_ in LAYOUTS)], help='all if empty')
    parser.add_argument('--kills', type=int, default=100)
    parser.add_argument('--pages', type=int, default=1, help='pages of 4 kB between two sizes of a full disk')
    parser.add_argument('--unoptimized', action='store_true', help="switch XLA's optimizations off")
    flags = parser.parse_args()
    rng.seed(flags.seed)
    work = Path(flags.out).resolve()
    sections = flags.sections.split(',')
    if not {*sections} <= {'kill', 'disk'}:
        parser.error(f'--sections={flags.sections}: the sections are kill and disk')
    for name in sections:
        started = time.monotonic()
        if name == 'kill':
            kill_section(work / name, flags.kills, flags.layout)
        else:
            disk_section(work / name, flags.pages)
        print(f'{name}: {time.monotonic() - started:.0f} s', flush=True)
    xla = os.environ.get('XLA_FLAGS') or 'none'
    print(f'\nseed {flags.seed}, {time.strftime("%F")}, jax {jax.__version__}, XLA_FLAGS {xla}, '
          f'{len(failures)} failures\n')
    print('\n'.join(['| what | how many | result |', '|---|---|---|', *rows]))
    sys.exit(bool(failures))


if __name__ == '__main__':
    main()
