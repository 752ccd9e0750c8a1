"""Runs config/five_minutes.py with three seeds, one after the other, and prints a row for the table of machines.

$ python data/shakespeare_bpe/prepare.py && python tools/five_minutes.py      # a quarter of an hour, on a quiet machine
$ python tools/five_minutes.py --seeds=1,2 --device=cpu --batch_size=6        # other flags are those of train_jax.py
"""
import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(seed, flags):
    """Trains with a seed; returns (iterations, bits per byte of all of val.bin, the device)."""
    command = [sys.executable, 'train_jax.py', 'config/five_minutes.py', '--overwrite=True', *flags, f'--seed={seed}']
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    device = re.search(r'^(\d+ x .*), compute in (\w+)', done.stdout, re.M)
    n_iters, bits = re.findall(r'^step (\d+): .*val bpb ([\d.]+)', done.stdout, re.M)[-1]
    print(f'seed {seed}: {n_iters} iterations, {bits} bits per byte', file=sys.stderr)
    return int(n_iters), float(bits), f'{device[1]}, {device[2]}'


def cpu_model():
    """Returns the name of the CPU, as Linux knows it."""
    try:
        text = Path('/proc/cpuinfo').read_text()
    except OSError:
        return platform.processor()
    found = re.search(r'^model name\s*: (.*)$', text, re.M)
    return found[1] if found else platform.machine()


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument('--seeds', default='1337,1338,1339')
    args, flags = parser.parse_known_args()
    runs = [run(seed, flags) for seed in args.seeds.split(',')]
    n_iters, bits, devices = zip(*runs)
    settings = ' '.join(flags) or 'as it is'
    print('| machine | cores | device | jax | iterations | bits per byte: median, range | flags |')
    print('|---|---|---|---|---|---|---|')
    print(f'| {cpu_model()} | {os.cpu_count()} | {devices[0]} | {version("jax")} | '
          f'{min(n_iters):,} to {max(n_iters):,} | {statistics.median(bits):.3f}, '
          f'{min(bits):.3f} to {max(bits):.3f} | {settings} |')


if __name__ == '__main__':
    main()
