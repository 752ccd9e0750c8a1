"""Runs the scripts under failures for minutes to hours and counts what was lost. Not collected by pytest; the table of
a full campaign is in docs/reliability.md, and each class of failure it has found is a small test of its own.

$ python tests/campaign.py --out=/tmp/campaign                      # everything
$ python tests/campaign.py --out=/tmp/campaign --sections=kill --kills=9 --seed=2

Every run is a process of its own, forked from this one, which has imported jax but not started it: that saves the
seconds of importing. Prints one line per run that is not as documented, and the table's rows. Exit code 1 if there was
such a run."""
import argparse
import collections
import faulthandler
import hashlib
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', '/tmp/jax_campaign_cache')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import orbax.checkpoint
import tokenizers
import tqdm

import jax_files.checkpoints
from jax_devices.parallel import setup_distributed_training
from jax_files.checkpoints import checkpoint_steps, checksum, choose_checkpoint, load_checkpoint
from jax_files.metrics import read_metrics
from jax_flags import config_block
from jax_train_utils import create_optimizer_with_schedule
from jax_transformer import GPTConfig, create_train_state
from tests import hostile
from tests.common import GOLDEN, records_without_times, wait_for, write_text_dataset

MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--device=cpu',
         '--gradient_accumulation_steps=2', '--dropout=0.1', '--learning_rate=1e-2', '--warmup_iters=2']
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
# processes


class Run:
    """A script in a forked process, with the work folder `cwd`, in which its output is kept as stdout and stderr."""

    def __init__(self, cwd, script, *args, devices=1, name='', prepare=lambda: None):
        cwd.mkdir(parents=True, exist_ok=True)
        self.files = cwd / f'stdout{name}', cwd / f'stderr{name}'
        self.code = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        for number, path in enumerate(self.files, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout.reconfigure(line_buffering=True)
        os.chdir(cwd)
        jax.config.update('jax_num_cpu_devices', devices)
        sys.argv = [str(script), *map(str, args)]
        prepare()
        if callable(script):
            script(*args)
        else:
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

    def kill(self, signum=signal.SIGKILL):
        if self.poll() is None:
            os.kill(self.pid, signum)

    @property
    def out(self):
        return self.files[0].read_text(errors='replace')

    @property
    def err(self):
        return self.files[1].read_text(errors='replace')

    def says(self):
        """The end of what the process printed, in one line."""
        return ' '.join((self.out[-200:] + self.err[-600:]).split())


def train(folder, *args, **options):
    """train_jax.py with out_dir `folder`/out."""
    return Run(folder, 'train_jax.py', f'--out_dir={folder / "out"}', *args, **options)


def finish(run, what):
    """Waits for a run that must end with exit code 0."""
    if run.wait() != 0:
        failed(f'{what}: exit code {run.code}: {run.says()}')
    return run


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
    hash_file = folder / 'hash'
    finish(Run(folder, write_state_hash, folder / 'out', hash_file, name='.hash'), f'hash of {folder}')
    return records_without_times(folder / 'out'), hash_file.read_text()


def damaged_checkpoints(out_dir):
    """Those of the latest two checkpoints of which a file is not as it was written. (An older one may have been killed
    while it was being deleted.)"""
    damaged = []
    for step in checkpoint_steps(out_dir)[:2]:
        folder = out_dir / 'ckpt' / str(step)
        try:
            sums = json.loads((folder / 'checksums.json').read_text())
            if any(checksum(folder / name) != crc for name, crc in sums.items()):
                damaged.append(step)
        except (OSError, ValueError):
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
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    cluster = [f'--coordinator_address=127.0.0.1:{port}', f'--num_processes={n_processes}']
    return [train(folder, *args, *cluster, f'--process_id={i}', devices=devices, name=f'.{i}')
            for i in range(n_processes)]


def has_joined(out_dir, started_at):
    """Whether the processes of a run have found each other: then they lock out_dir. (One that dies before leaves the
    others waiting for it, for 5 minutes.)"""
    lock = out_dir / 'lock'
    return lock.exists() and lock.stat().st_mtime > started_at


def kill_at_random(out_dir, runs):
    """Kills one of the runs at a random moment of the first seconds, or during a save. Returns (the killed run or None
    if the run has finished before, whether a save was under way, the newest complete checkpoint seen before)."""
    during_save = rng.random() < 0.6
    n_saves = rng.randrange(1, 6)
    delay = rng.random() * 0.04 if during_save else rng.random() * 8
    started = time.monotonic()
    started_at = time.time()
    was_saving = False
    newest = -1
    if len(runs) > 1:
        wait_for(f'the processes of {out_dir}', lambda: has_joined(out_dir, started_at), *runs, seconds=400)
        started = time.monotonic()
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
    victim = rng.choice(runs)
    saving = is_saving(out_dir, started_at)
    if any(run.poll() is not None for run in runs):
        return None, False, newest
    victim.kill()
    return victim, saving, newest


def kill_section(work, n_kills, only=''):
    dataset = write_text_dataset(work / 'data' / 'fox')
    layouts = (('1 device', 1, 1), ('8 virtual devices', 1, 8), ('2 processes', 2, 1))
    for i, (name, n_processes, devices) in enumerate(layouts):
        n = n_kills // len(layouts) + (i < n_kills % len(layouts))
        if only and name != only:
            continue
        kill_layout(work / f'kill-{n_processes}x{devices}', name, n, n_processes, devices,
                    [f'--dataset={dataset}', *LONG_RUN, '--init_from=auto'])


def kill_layout(folder, name, n_kills, n_processes, devices, args):
    reference = folder / 'reference'
    for run in start_processes(reference, args, n_processes, devices):
        finish(run, f'{name}, uninterrupted')
    expected = result_of(reference)
    n_killed = n_saving = n_lost = n_damaged = n_runs = n_different = 0
    codes = collections.Counter()  # of processes that lost another one
    victims = collections.Counter()  # numbers of the killed processes
    slowest = 0.0
    current = None
    while n_killed < n_kills or current:
        if current is None:
            n_runs += 1
            current = folder / f'run{n_runs}'
        runs = start_processes(current, args, n_processes, devices)
        victim = None
        if n_killed < n_kills:
            victim, saving, newest = kill_at_random(current / 'out', runs)
        if victim:
            n_killed += 1
            n_saving += saving
            victims[runs.index(victim)] += 1
            killed_at = time.monotonic()
            for run in runs:
                run.wait(120)
                if run is not victim:
                    codes[run.code] += 1
                    slowest = max(slowest, time.monotonic() - killed_at)
                    if run.code not in (0, 75, 134):
                        failed(f'{name}: the other process ended with {run.code}: {run.says()}')
            steps = checkpoint_steps(current / 'out')
            if max([-1, *steps]) < newest:
                n_lost += 1
                failed(f'{name}: checkpoint {newest} is lost, there are {steps}')
            damaged = damaged_checkpoints(current / 'out')
            n_damaged += len(damaged)
            if damaged:
                failed(f'{name}: checkpoints {damaged} of {steps} are damaged after a kill')
            continue
        for run in runs:
            finish(run, name)
        if result_of(current) != expected:
            n_different += 1
            failed(f'{name}: {current} differs from the uninterrupted run')
        shutil.rmtree(current)
        current = None
    others = ', '.join(f'{n} x {code}' for code, n in sorted(codes.items()))
    which = ', '.join(f'{n} of process {i}' for i, n in sorted(victims.items())) + ', ' if n_processes > 1 else ''
    add_row(f'SIGKILL, {name}',
            f'{n_killed} kills in {n_runs} runs, {which}{n_saving} while a checkpoint was being written',
            f'{n_lost} checkpoints lost, {n_damaged} damaged; {n_runs - n_different} of {n_runs} runs ended with the '
            f'bits of the uninterrupted one' + (f'; the other process ended with {others}, after at most '
                                                f'{slowest:.0f} s' if codes else ''))

# -----------------------------------------------------------------------------
# bad inputs

WORDS = ['', ' ', 'x', '-1', '0', '1', '3', '7', '-0.5', '1.5', '1e9', '1e-300', '1e400', 'nan', 'inf', '-inf', 'None',
         'True', 'False', '[]', '{}', '()', '(1,2)', '"', "'", "''", '[[', '0x10', '1_0', '1,2', '--', '=', '../x', '/',
         '.', '~', '/dev/null', '/proc/1', 'a/b/c', 'x' * 300, 'x' * 5000, '9' * 5000, '1+1', 'é☃', '\udcff',
         'a\nb', '\t', '%s', '{0}', '$HOME', '`id`', 'cpu', 'cuda', 'cpu:9', 'tpu:0', 'float32', 'bfloat16', 'full',
         'window', 'chunk', 'rms', 'rope', 'learned', 'swiglu', 'muon', 'wsd', 'auto', 'resume', '64']
INTEGERS = ['-1', '0', '1', '2', '3', '5', '7', '8', '16', '17', '64', '100', '1000', '-7', '4294967296', '9' * 20]
FLOATS = ['-1.0', '0.0', '1.0', '0.5', '0.99', '1', '0', '1e-10', '1e10', '1e38', '1e400', '3', '2.0']
JSON_VALUES = [None, True, -1, 0, 1, 3, 1e99, float('nan'), 10**30, '', 'x', 'é', [], [1], {}, {'kind': 'x'}, [[[]]],
               'float99', '/dev/null', -0.5, 'x' * 1000, {'a': {'b': []}}, 2**31, 50257]
# they would start a run of hours, a network connection or a trace: left out, or given small values only
NOT_VARIED = {'coordinator_address', 'num_processes', 'process_id', 'wandb_log', 'profile', 'out_dir', 'interactive',
              'eval_iters', 'max_iters', 'eval_interval', 'overwrite'}
TINY_RUN = [*MODEL, '--max_iters=1', '--lr_decay_iters=20', '--eval_interval=9', '--eval_iters=1']


def mutated_bytes(content):
    """The content with flipped, removed, repeated or added bytes, or cut short."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 5, 50])):
        at = rng.randrange(len(content) + 1)
        how = rng.randrange(6)
        if how == 0 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del content[at:at + rng.choice([1, 2, 100])]
        elif how == 2:
            content[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
        elif how == 3:
            del content[at:]
        elif how == 4:
            content[at:at] = content[at:at + 20]
        elif at < len(content):
            content[at] = rng.choice([0, 255, 10, 34, 91, 123])
    return bytes(content)


def mutated_json(values):
    """JSON text: the values with some replaced, removed or added at any depth; at times not JSON at all."""
    if rng.random() < 0.1:
        return rng.choice(['', 'null', '[]', '3', '"x"', '{', '[' * 100000, '{"a":' * 100000, '\0', '{"a": 1} x',
                           '\ufeff{}'])
    values = json.loads(json.dumps(values))
    for _ in range(rng.choice([1, 1, 2, 4])):
        node = values
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.6:
                node = node[key]
                continue
            if rng.random() < 0.3:
                del node[key]
            else:
                node[key] = rng.choice(JSON_VALUES)
            break
    text = json.dumps(values)
    return mutated_bytes(text.encode(errors='replace')).decode(errors='replace') if rng.random() < 0.2 else text


def damage_file(path):
    """Changes a file: other bytes, empty, missing, or a folder in its place."""
    how = rng.random()
    if how < 0.8:
        path.write_bytes(mutated_bytes(path.read_bytes()))
    elif how < 0.88:
        path.write_bytes(b'')
    else:
        path.unlink()
        if how > 0.95:
            path.mkdir()


def files_of(folder):
    return sorted(path for path in folder.rglob('*') if path.is_file())


def write_header(path):
    """Changes the JSON header of a safetensors file, or its length."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], 'little')
    header = mutated_json(json.loads(content[8:8 + size])).encode()
    size = rng.choice([len(header)] * 5 + [0, 2**63, len(header) - 1, len(header) + 100])
    path.write_bytes(size.to_bytes(8, 'little') + header + content[8 + size if size < 2**40 else 8:])


def write_text_file(path, text):
    path.write_bytes(text.encode('utf-8', 'surrogateescape'))
    return path


def defaults(script):
    """(name, default) of each flag of a script."""
    for name, value in re.findall(r'^(\w+) *= *(.*?) # ', script.read_text(), flags=re.M):
        if name in config_block(script):
            yield name, eval(value)


class Inputs:
    """Makes bad inputs. Each method prepares a folder and returns (script, arguments, folders that must not change)."""

    def __init__(self, work):
        self.dataset = write_text_dataset(work / 'data' / 'fox')
        self.finished = work / 'finished'
        if not self.finished.exists():
            finish(train(self.finished, f'--dataset={self.dataset}', *SHORT_RUN), 'the run to sample from')
        self.knobs = {script: {name: default for name, default in defaults(ROOT / script) if name not in NOT_VARIED}
                      for script in ('train_jax.py', 'sample_jax.py')}
        self.small = ['--max_new_tokens=3', '--num_samples=1', '--start=the', '--device=cpu:0', '--top_k=5']

    def train_args(self, *args):
        return ['train_jax.py', [f'--dataset={self.dataset}', *TINY_RUN, '--out_dir=out', *args], [self.dataset]]

    def sample_args(self, *args):
        return ['sample_jax.py', [f'--out_dir={self.finished / "out"}', *self.small, *args], [self.finished / 'out']]

    def bad_flag(self, knobs):
        """(name, value) of a flag, mostly a value of its type."""
        name = rng.choice(list(knobs))
        kind = type(knobs[name])
        if rng.random() < 0.2 or kind is str:
            return name, rng.choice(WORDS)
        if kind is bool:
            return name, rng.choice(['True', 'False', '1', '0', 'true', 'no'])
        return name, rng.choice(FLOATS if kind is float else INTEGERS)

    def bad_flags(self, knobs):
        pairs = [self.bad_flag(knobs) for _ in range(rng.choice([1, 1, 2, 3]))]
        return [f'--{name}={value}' for name, value in pairs]

    def flags_of_training(self, folder):
        return self.train_args(*self.bad_flags(self.knobs['train_jax.py']))

    def flags_of_sampling(self, folder):
        return self.sample_args(*self.bad_flags(self.knobs['sample_jax.py']))

    def command_lines(self, folder):
        arg = rng.choice(['--', '-', '---', '--=', '--x', '--max_iters', '--max_iters 3', '-h2', 'nothing.py', '.', '',
                          '--MAX_ITERS=3', '--max-iters=3', '\udcff', '--\udcff=1', '--a=b=c', '/dev/null', '--é=1',
                          '/proc/self/mem', '--out_dir', '--out_dir=', '--out_dir=/dev/null/x', '--out_dir=/proc/x',
                          '--out_dir=s3://b/x', '--out_dir=' + 'x' * 300, '--coordinator_address=auto',
                          '--num_processes=2', '--process_id=0', '--num_processes=-1', '--coordinator_address=x',
                          '--max_iters=-1', '--eval_iters=0', '--eval_interval=0', '--profile=maybe', '--overwrite=2',
                          '--max_iters=1.5', '--wandb_log=yes', '--eval_interval=-3', '--out_dir=a\nb'])
        return rng.choice([self.train_args, self.sample_args])(arg)

    def config_files(self, folder):
        pairs = [self.bad_flag(self.knobs['train_jax.py']) for _ in range(rng.choice([1, 1, 2, 5]))]
        code = ['1/0', 'x.y', '[1', 'open("nothing").read()', 'int("x")', '[0] * 10', 'lambda: 0']
        text = ''.join(f'{name} = {rng.choice(code) if rng.random() < 0.1 else value or repr(value)}\n'
                       for name, value in pairs)
        if rng.random() < 0.3:
            text = mutated_bytes(text.encode(errors='surrogateescape')).decode(errors='surrogateescape')
        return self.train_args(write_text_file(folder / 'config.py', text))

    def datasets(self, folder):
        data = Path(shutil.copytree(self.dataset, folder / 'fox'))
        for _ in range(rng.choice([1, 1, 2])):
            if rng.random() < 0.6:
                meta = json.loads((self.dataset / 'meta.json').read_text())
                if rng.random() < 0.5:
                    meta |= {'max_id': rng.choice([27, 5, 99, None, 'x']), 'train_tokens': 1920, 'val_tokens': 400}
                (data / 'meta.json').write_text(mutated_json(meta))
            else:
                if rng.random() < 0.3:
                    for split in ('train', 'val'):
                        n_tokens = (self.dataset / f'{split}.bin').stat().st_size // 2
                        (data / f'{split}_mask.bin').write_bytes(rng.randbytes(n_tokens))
                damage_file(rng.choice(sorted(data.glob('*.bin'))))
        script, args, kept = self.train_args(f'--dataset={data}')
        return script, args, [*kept, data]

    def checkpoints(self, folder):
        out = Path(shutil.copytree(self.finished / 'out', folder / 'copy'))
        steps = checkpoint_steps(out)
        if rng.random() < 0.2:  # as an earlier version left it
            for step in steps:
                (out / 'ckpt' / str(step) / 'checksums.json').unlink()
        files = files_of(rng.choice([out, out / 'ckpt', out / 'ckpt' / str(steps[0])]))
        for path in rng.sample(files, min(len(files), rng.choice([1, 1, 2, 10]))):
            if path.name == 'metadata' and rng.random() < 0.7:
                path.write_text(mutated_json(json.loads(path.read_text())))
            else:
                damage_file(path)
        if rng.random() < 0.5:
            which = rng.choice(['best', 'latest'])
            return ['sample_jax.py', [f'--out_dir={out}', *self.small, f'--checkpoint={which}'], [out]]
        return ['train_jax.py', [f'--out_dir={out}', '--init_from=resume', '--device=cpu:0', '--max_iters=14'], []]

    def foreign_models(self, folder):
        source = rng.choice(['hf', 'hf_sharded', 'families/llama', 'families/qwen3_moe', 'families/gpt_oss_packed',
                             'families/deepseek_v3', 'nanogpt'])
        model = Path(shutil.copytree(GOLDEN / source, folder / 'model'))
        if source.startswith('families') or rng.random() < 0.3:
            vocab = {c: i for i, c in enumerate('abcdefghijklmnopqrstuvwxyz ')}
            tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [])).save(str(model / 'tokenizer.json'))
            (model / 'tokenizer_config.json').write_text('{"eos_token": "a", "chat_template": "{{ messages }}"}')
            (model / 'generation_config.json').write_text('{"eos_token_id": [1], "temperature": 0.5}')
        path = rng.choice(files_of(model))
        if path.suffix == '.json' and rng.random() < 0.8:
            path.write_text(mutated_json(json.loads(path.read_text())))
        elif path.suffix == '.safetensors' and rng.random() < 0.7:
            write_header(path)
        else:
            damage_file(path)
        where = next(model.rglob('ckpt.pt'), model)
        if rng.random() < 0.7:
            dataset = rng.choice(['', self.dataset])
            return ['sample_jax.py', [f'--init_from={where}', *self.small, f'--dataset={dataset}'],
                    [model, self.dataset]]
        args = [a for a in TINY_RUN if not a.startswith('--n_')]
        return ['train_jax.py', [f'--dataset={self.dataset}', *args, '--out_dir=out', f'--init_from={where}'],
                [model, self.dataset]]

    def prompts(self, folder):
        pieces = ['the ', 'x', 'é', '☃', '\n', '\udc80', '\u202e', '😀', '<|endoftext|>', ' ', '{', '\\', '"']
        if rng.random() < 0.5:
            pieces = ['the ', 'fox', '\n', ' ']  # the model knows their characters
        text = ''.join(rng.choices(pieces, k=rng.choice([0, 1, 1, 3, 40, 3000])))
        if rng.random() < 0.5:
            path = write_text_file(folder / 'prompt.txt', text)
            if rng.random() < 0.4:
                damage_file(path)
            path = rng.choice([path, path, path, folder, 'nothing.txt', '', '/dev/null'])
            return self.sample_args(f'--start=FILE:{path}', f'--each_line={rng.random() < 0.5}')
        return self.sample_args(f'--start={text}', f'--stop={rng.choice(["", "fox", "x" * 50, text[:9]])}',
                                f'--stream={rng.random() < 0.3}')


def snapshot(folder):
    """{path: (size, time of change)} of all files in a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob('*') if path.is_file()}


def input_section(work, n_inputs, seed=1, chosen='', minutes=1e9):
    """chosen: 'i,j,...' runs these inputs only."""
    deadline = time.monotonic() + 60 * minutes
    inputs = Inputs(work)
    kinds = ['flags_of_training', 'flags_of_sampling', 'command_lines', 'config_files', 'datasets', 'checkpoints',
             'foreign_models', 'prompts']
    codes = collections.defaultdict(collections.Counter)
    log = open(work / 'inputs.log', 'w', buffering=1)
    for i in map(int, chosen.split(',')) if chosen else range(n_inputs):
        if time.monotonic() > deadline:
            break
        rng.seed(f'{seed} {i}')  # each input can be made again alone
        kind = kinds[i % len(kinds)]
        folder = work / 'input' / f'{i}'
        folder.mkdir(parents=True)
        script, args, kept = getattr(inputs, kind)(folder)
        before = [snapshot(each) for each in kept]
        inputs_there = set(folder.rglob('*'))
        if rng.random() < 0.1:  # as a user starts it, without the fork
            done = subprocess.run([sys.executable, ROOT / script, *map(os.fsencode, map(str, args))], cwd=folder,
                                  capture_output=True, text=True, errors='replace', stdin=subprocess.DEVNULL,
                                  timeout=300, env=dict(os.environ, PYTHONDONTWRITEBYTECODE='1'))
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            run = Run(folder, script, *args, prepare=limit_resources)
            code = run.wait(120)
            out, err = run.out, run.err
        wrong = []
        if code not in (0, 2):
            wrong.append(f'exit code {code}')
        if 'Traceback' in err or 'Traceback' in out:
            wrong.append('traceback')
        if code == 2 and len(re.findall('^error: .*\n', err, flags=re.M)) != 1:
            wrong.append('not one line')
        if before != [snapshot(each) for each in kept]:
            wrong.append('an input has changed')
        written = {path.name for path in set(folder.rglob('*')) - inputs_there} - {'stdout', 'stderr'}
        if written and (script == 'sample_jax.py' or code == 2 and kind not in ('checkpoints',)):
            wrong.append(f'written: {sorted(written)[:5]}')
        codes[kind][code] += 1
        shown = f'{script} {" ".join(ascii(str(arg)[:60]) for arg in args[-3:])}: {" ".join(err[-300:].split())}'
        log.write(f'{i} {kind}, exit code {code}: {shown}\n')
        if wrong:
            failed(f'input {i}, {kind} ({", ".join(wrong)}): {shown}')
        else:
            shutil.rmtree(folder)
    for kind, counter in codes.items():
        add_row(f'bad input: {kind.replace("_", " ")}', sum(counter.values()),
                ', '.join(f'{n} x exit code {code}' for code, n in sorted(counter.items())))


def limit_resources():
    """What a wrong flag may take of this machine."""
    resource.setrlimit(resource.RLIMIT_CPU, (100, 110))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))

# -----------------------------------------------------------------------------
# hostile files

BATCH = 250  # inputs that one process reads
HONEST_REFUSED = 3  # exit code of such a process: the mutations would say nothing


def choose_files(n_inputs, chosen):
    """[(reader, its numbers)] in batches: of each reader in turn, or of those that are chosen.

    chosen: 'NAME,NAME:NUMBER,...' are these readers, and these inputs."""
    batches = []
    for first in range(0, n_inputs, BATCH):
        numbers = range(first, min(first + BATCH, n_inputs))
        batches += [(name, numbers) for name in hostile.READERS]
    if not chosen:
        return batches
    wanted = [part.partition(':') for part in chosen.split(',')]
    whole = {name for name, colon, _ in wanted if not colon}
    alone = [(name, [int(number)]) for name, colon, number in wanted if colon]
    return alone + [batch for batch in batches if batch[0] in whole]


def files_section(work, n_inputs, seed=1, chosen='', minutes=1e9):
    """Mutates every kind of file that is read, see tests/hostile.py. n_inputs: of each reader."""
    deadline = time.monotonic() + 60 * minutes
    work.mkdir(parents=True, exist_ok=True)
    honest = work / 'honest'
    finish(Run(work, hostile.make_honest, honest, name='.honest'), 'the honest folders')
    counts = {name: collections.Counter() for name in hostile.READERS}
    found = {}  # {(reader, what findings of one cause have in common): how many}
    # a message may hold half of a character
    log = open(work / 'files.log', 'a', buffering=1, errors='backslashreplace')
    for name, numbers in choose_files(n_inputs, chosen):
        if time.monotonic() > deadline:
            break
        for number, finding, said in read_files(work, name, numbers, seed, honest):
            if finding and finding.kind == 'time':  # other work on this machine may have caused it
                again = read_files(work, name, [number], seed, honest)
                _, finding, said = again[0] if again else (number, finding, said)
            counts[name]['found' if finding else 'read' if said == 'read' else 'refused'] += 1
            log.write(f'{name}:{number} seed {seed}: {finding or said}\n')
            if finding:
                key = name, *finding.key()
                found[key] = found.get(key, 0) + 1
                if found[key] == 1:
                    failed(f'{name}:{number}, seed {seed}: {finding.kind} at {finding.place}: {finding.said}')
    for name, counter in counts.items():
        if counter.total():
            add_row(f'hostile {name}', counter.total(), f'{counter["read"]} read, {counter["refused"]} refused in one '
                    f'line, {counter["found"]} neither')
    add_row('hostile files in all', sum(counter.total() for counter in counts.values()),
            f'{len(found)} different findings')


def read_files(work, name, numbers, seed, honest):
    """[(number, Finding or None, what was said)] of inputs of a reader. One process reads all of them; one that ends
    before, of an input or because a thread still works on one, is replaced by another for those that follow."""
    results = []
    rest = list(numbers)
    while rest:
        folder = work / 'inputs'
        shutil.rmtree(folder, ignore_errors=True)
        report = folder / 'report.jsonl'
        run = Run(folder, read_in_this_process, name, rest, seed, honest, report)
        code = run.wait(60 + (hostile.HANG_S + 5) * len(rest))
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        done = [(number, finding and hostile.Finding(*finding), said) for number, finding, said in lines]
        results += done
        rest = rest[len(done):]
        if code == HONEST_REFUSED:
            failed(f'{name}: {run.says()}')
            break
        if rest and code:
            place, is_late = where_it_hung(run.err)
            kind = 'time' if is_late else f'crash {code}'
            said = f'more than {hostile.HANG_S} s' if is_late else run.says()[-300:]
            results.append((rest[0], hostile.Finding(kind, place, said), said))
            rest = rest[1:]
    return results


def where_it_hung(dump):
    """(the innermost line of the project in a dump of faulthandler, whether it was made when the time was over)."""
    main_thread = dump.rpartition('(most recent call first)')[2]
    lines = re.findall(r'File "(.*)", line (\d+) in (.*)', main_thread)
    places = [f'{Path(path).name}:{line} {name}' for path, line, name in lines if hostile.is_of_project(path)]
    return places[0] if places else '', dump.startswith('Timeout') or '\nTimeout' in dump


def read_in_this_process(name, numbers, seed, honest, report):
    """Makes and reads inputs of a reader, and appends a line of JSON for each to `report`.

    An input that takes HANG_S ends the process, with a dump of where it is: it may be in code that no signal of Python
    interrupts."""
    faulthandler.enable(sys.__stderr__)
    folder = report.parent / 'honest'
    source = hostile.READERS[name].folders.split(',')[0]
    shutil.copytree(honest / source, folder)
    finding, said = hostile.read_input(name, folder)
    if said != 'read':
        print(f'the honest file is refused: {said}', file=sys.stderr)
        sys.exit(HONEST_REFUSED)
    n_threads = threading.active_count()
    with open(report, 'a', buffering=1) as lines:
        for number in numbers:
            folder = report.parent / f'{number}'
            hostile.write_input(name, seed, number, honest, folder)
            faulthandler.dump_traceback_later(hostile.HANG_S, exit=True, file=sys.__stderr__)
            with hostile.limit_memory():
                finding, said = hostile.read_input(name, folder)
            faulthandler.cancel_dump_traceback_later()
            lines.write(json.dumps([number, finding, said]) + '\n')
            shutil.rmtree(folder, ignore_errors=True)
            if threading.active_count() > n_threads + 3:
                break

# -----------------------------------------------------------------------------
# disks and clocks


def jumping_clock():
    """time.time() jumps by up to a day, forwards and backwards, every few calls."""
    real = time.time
    jumps = random.Random(0)
    offset = 0.0

    def jumping():
        nonlocal offset
        if jumps.random() < 0.2:
            offset = jumps.uniform(-86400, 86400)
        return real() + offset
    time.time = jumping


def check_refusal(run, what, message=''):
    """Checks that the run has ended with one line and exit code 2."""
    code = run.wait(120)
    if code != 2 or 'Traceback' in run.err or not re.fullmatch(f'error: .*{message}.*\n', run.err):
        failed(f'{what}: exit code {code}: {run.says()}')
        return False
    return True


def disk_section(work, step):
    """step: pages of 4 kB between two sizes of a full disk; 0 leaves that out."""
    dataset = write_text_dataset(work / 'data' / 'fox')
    args = [f'--dataset={dataset}', *SHORT_RUN, '--init_from=auto']
    reference = work / 'reference'
    shutil.rmtree(reference, ignore_errors=True)
    finish(train(reference, *args), 'uninterrupted')
    expected = result_of(reference)
    if step:
        full_disks(work, args, expected, step)
    other_disks(work, dataset, expected)


def full_disks(work, args, expected, step):
    """A run on a tmpfs of every size, in steps of `step` pages, up to the one on which it finishes; each is then
    enlarged and the run resumed."""
    n = n_refused = 0
    for size in range(step, 10**6, step):
        folder = work / 'full'
        mount = folder / 'out'
        if not mount_tmpfs(mount, size * 4096):
            return
        run = train(folder, *args)
        code = run.wait(120)
        n += 1
        if code:
            n_refused += 1
            check_refusal(run, f'a disk of {size} pages')
        damaged = damaged_checkpoints(mount)
        if damaged:
            failed(f'a disk of {size} pages: checkpoints {damaged} are damaged')
        subprocess.run(['mount', '-o', 'remount,size=64m', mount], check=True)
        if code:
            finish(train(folder, *args), f'after a disk of {size} pages')
            if result_of(folder) != expected:
                failed(f'after a disk of {size} pages: not the bits of the uninterrupted run')
        subprocess.run(['umount', mount], check=True)
        shutil.rmtree(folder)
        if code == 0:
            break
    add_row(f'full disk: tmpfs of {step} to {size} pages of 4 kB, then enlarged and resumed', n,
            f'{n_refused} ended with exit code 2 and one line, {n - n_refused} finished; '
            'all resumed runs have the bits of the uninterrupted one')


def mount_tmpfs(mount, size):
    """Mounts a tmpfs of `size` bytes, which takes root; returns whether that worked."""
    mount.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', mount], stderr=subprocess.PIPE)
    if mounted.returncode:
        failed(f'no tmpfs can be mounted: {mounted.stderr.decode().strip()}')
    return not mounted.returncode


def read_only_disks(work, args, endless):
    """An out_dir that is read-only at the start, and a ckpt/ that becomes read-only during a run."""
    folder = work / 'readonly'
    if not mount_tmpfs(folder / 'out', 2**26):
        return
    subprocess.run(['mount', '-o', 'remount,ro', folder / 'out'], check=True)
    good = check_refusal(train(folder, *args), 'read-only out_dir', 'cannot write')
    subprocess.run(['umount', folder / 'out'], check=True)
    mount_tmpfs(folder / 'out' / 'ckpt', 2**26)
    run = train(folder, *endless, '--save_interval=40')
    wait_for_save(run, folder / 'out')
    remount = ['mount', '-o', 'remount,ro', folder / 'out' / 'ckpt']
    is_remounted = lambda: not subprocess.run(remount, stderr=subprocess.DEVNULL).returncode
    wait_for('the disk to become read-only', is_remounted, run)  # refused while a checkpoint is being written
    good &= check_refusal(run, 'ckpt becomes read-only', 'cannot write')
    good &= not damaged_checkpoints(folder / 'out')
    subprocess.run(['umount', folder / 'out' / 'ckpt'], check=True)
    add_row('out_dir read-only at the start; ckpt/ made read-only during a run', 2,
            'one line, exit code 2' if good else 'FAILED')


def other_disks(work, dataset, expected):
    args = [f'--dataset={dataset}', *SHORT_RUN, '--init_from=auto']
    endless = [f'--dataset={dataset}', *LONG_RUN, '--max_iters=100000', '--init_from=auto']
    read_only_disks(work, args, endless)
    for what in ('out', 'out/ckpt', 'the latest checkpoint', 'out/metrics.jsonl'):
        folder = work / 'deleted'
        run = train(folder, *endless)
        wait_for_save(run, folder / 'out')
        path = folder / what if what.startswith('out') else folder / 'out/ckpt' / str(max(
            checkpoint_steps(folder / 'out')))
        (path.unlink if path.is_file() else lambda: shutil.rmtree(path, ignore_errors=True))()
        deadline = time.monotonic() + 10
        while run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run.kill(signal.SIGTERM)
        code = run.wait(60)
        if code not in (2, 143) or 'Traceback' in run.err:
            failed(f'{what} deleted under a running process: exit code {code}: {run.says()}')
        add_row(f'{what} deleted under a running process', 1, f'exit code {code}: {run.err.strip()[:120]}')
        shutil.rmtree(folder)
    slow_disk(work, args, expected)
    folder = work / 'clock'
    finish(train(folder, *args, '--max_iters=6', prepare=jumping_clock), 'a clock that jumps')
    finish(train(folder, *args, '--max_iters=12', prepare=jumping_clock), 'a clock that jumps, resumed')
    records, state_hash = result_of(folder)
    same = state_hash == expected[1]
    if not same:
        failed('a clock that jumps changes the result')
    add_row('time.time() jumps by up to a day, both ways', 2, 'the same bits' if same else 'FAILED')


def slow_saves():
    """Each save takes 30 s longer, in the thread that writes it."""
    write = jax_files.checkpoints.write_checksums

    def write_slowly(folder):
        time.sleep(30)
        write(folder)
    jax_files.checkpoints.write_checksums = write_slowly


def slow_disk(work, args, expected):
    """A run whose saves take 30 s, two SIGTERMs during the second one, and a resume."""
    folder = work / 'slow'
    started_at = time.time()
    run = train(folder, *args, '--save_interval=1', prepare=slow_saves)
    while run.poll() is None and not (checkpoint_steps(folder / 'out') and is_saving(folder / 'out', started_at)):
        time.sleep(0.01)
    for _ in range(2):
        run.kill(signal.SIGTERM)
        time.sleep(1)
    code = run.wait(200)
    n_saved = len(checkpoint_steps(folder / 'out'))
    good = code == 143 and n_saved == 2 and not damaged_checkpoints(folder / 'out')
    if not good:
        failed(f'a slow disk: exit code {code}, {n_saved} checkpoints: {run.says()}')
    finish(train(folder, *args), 'a slow disk, resumed')
    if result_of(folder) != expected:
        good = failed('after a slow disk: not the bits of the uninterrupted run')
    add_row('saves that take 30 s; two SIGTERMs during one; resumed', 1,
            'exit code 143 after the save, which is whole; the bits of the uninterrupted run' if good else 'FAILED')


def wait_for_save(run, out_dir):
    wait_for(f'two checkpoints in {out_dir}', lambda: len(checkpoint_steps(out_dir)) >= 2, run)

# -----------------------------------------------------------------------------
# a long run


TENSORSTORE_LEAK = 55  # kB per save of this model, with TensorStore 0.1.86: docs/reliability.md


def long_section(work, n_iters):
    dataset = write_text_dataset(work / 'data' / 'fox')
    folder = work / 'long'
    shutil.rmtree(folder, ignore_errors=True)
    run = train(folder, f'--dataset={dataset}', *MODEL, f'--max_iters={n_iters}', f'--lr_decay_iters={n_iters}',
                '--eval_interval=500', '--eval_iters=2', '--save_interval=100')
    samples = []  # (iteration, resident kB, open files)
    while run.poll() is None:
        time.sleep(0.5)
        try:
            status = Path(f'/proc/{run.pid}/status').read_text()
            n_files = len(os.listdir(f'/proc/{run.pid}/fd'))
            lines = run.out.rsplit('\niter ', 1)
            samples.append((int(lines[1].split(':')[0]), int(re.search(r'VmRSS:\s+(\d+)', status)[1]), n_files))
        except (OSError, IndexError, TypeError, ValueError):
            pass
    finish(run, f'{n_iters} iterations')
    iterations = [record['iter'] for record in read_metrics(folder / 'out') if 'loss' in record]
    evaluations = [record['iter'] for record in read_metrics(folder / 'out') if 'val_loss' in record]
    complete = iterations == list(range(n_iters)) and evaluations == list(range(0, n_iters + 1, 500))
    if not complete:
        failed('metrics.jsonl is not complete')
    (folder / 'samples.json').write_text(json.dumps(samples))
    tenth = lambda i, column: np.median([sample[column] for sample in samples if i <= 10 * sample[0] / n_iters < i + 1])
    memory = [tenth(i, 1) for i in (1, 5, 9)]
    files = [int(tenth(i, 2)) for i in (1, 9)]
    leaked = TENSORSTORE_LEAK * n_iters // 100 * 0.4  # between the last two of these
    growth = (memory[2] - leaked) / memory[1] - 1  # loss.png takes its most memory from iteration 10,000 on
    if growth > 0.01:
        failed(f'memory grows by {growth:.1%} without what TensorStore leaks: {memory} kB')
    add_row(f'one run of {n_iters:,} iterations, {n_iters // 100} saves', 1,
            f'median memory in the second, sixth and last tenth {", ".join(f"{x / 1e3:.1f}" for x in memory)}'
            f' MB: from the sixth to the last {growth:+.2%} without the {leaked / 1e3:.1f} MB that TensorStore leaks; '
            f'open files {files[0]} and {files[1]}; metrics.jsonl {"complete" if complete else "NOT complete"}')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', required=True, help='work folder, on a local disk')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--sections', default='kill,input,files,disk,long', help='which of these, in this order')
    parser.add_argument('--layout', default='', help="'1 device', '8 virtual devices' or '2 processes'; all if empty")
    parser.add_argument('--kills', type=int, default=100)
    parser.add_argument('--inputs', type=int, default=1000)
    parser.add_argument('--files', type=int, default=1000, help='hostile files of each kind')
    parser.add_argument('--minutes', type=float, default=1e9, help='of a section of bad inputs or files, at most')
    parser.add_argument('--chosen', default='', help='numbers of inputs, or of files NAME:NUMBER, with commas')
    parser.add_argument('--pages', type=int, default=1, help='pages of 4 kB between two sizes of a full disk')
    parser.add_argument('--iters', type=int, default=20000)
    flags = parser.parse_args()
    sys.stdout.reconfigure(errors='backslashreplace')
    rng.seed(flags.seed)
    sections = dict(kill=(kill_section, flags.kills), input=(input_section, flags.inputs),
                    files=(files_section, flags.files), disk=(disk_section, flags.pages),
                    long=(long_section, flags.iters))
    for name in flags.sections.split(','):
        section, size = sections[name]
        started = time.monotonic()
        inputs = dict(seed=flags.seed, chosen=flags.chosen, minutes=flags.minutes)
        options = {'kill': dict(only=flags.layout), 'input': inputs, 'files': inputs}.get(name, {})
        section(Path(flags.out).resolve() / name, size, **options)
        print(f'{name}: {time.monotonic() - started:.0f} s', flush=True)
    print(f'\nseed {flags.seed}, {time.strftime("%F")}, jax {jax.__version__}, {len(failures)} failures\n')
    print('\n'.join(['| what | how many | result |', '|---|---|---|', *rows]))
    sys.exit(bool(failures))


if __name__ == '__main__':
    main()
