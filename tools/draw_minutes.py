"""Draws docs/minutes.png: bits per byte of Tiny Shakespeare's validation text over minutes of wall
time.

$ python tools/draw_minutes.py             # draws the curves of tools/minutes.json
$ python tools/draw_minutes.py --measure   # first measures these curves and writes the file

Each curve is a run of train_jax.py with flags of RUNS; together the runs take 6 minutes on a quiet
machine. Single points, for which there is no curve, are in the constant POINTS.

The minutes include start, compilation and evaluations. Each evaluation is a point of a curve, so
the flags in RUNS ask for more evaluations than the config files do."""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / 'tools' / 'minutes.json'
RUNS = {  # {label: flags of train_jax.py}
    'config/five_minutes.py, 0.9M parameters': 'config/five_minutes.py --eval_interval=500',
    "nanoGPT's CPU recipe, 0.8M parameters":
        'config/train_shakespeare_char.py --device=cpu --eval_iters=20 --block_size=64 --batch_size=12 --n_layer=4 '
        '--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 --eval_interval=200',
    'config/train_shakespeare_char_cpu_fast.py':
        'config/train_shakespeare_char_cpu_fast.py --eval_interval=50'}
POINTS = [  # (minutes, bits per byte, label, where it stands): docs/performance.md#on-a-gpu, nanoGPT's README
    (1.5, 2.12, "nanoGPT's baby GPT, 10.7M\none H100, here", (-130, -30)),
    (3.0, 2.12, 'the same by nanoGPT\none A100, its README', (-78, -30))]


def measure(flags):
    """Trains in a process of its own. Returns [(minutes since the start, bits per byte)], one pair
    for each evaluation except the one before the first update. flags: a text, the arguments of
    train_jax.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, 'train_jax.py', *shlex.split(flags), '--overwrite=True', f'--out_dir={folder}/out']
        environment = dict(os.environ, JAX_ENABLE_COMPILATION_CACHE='0', PYTHONUNBUFFERED='1')
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
        curve = []
        for line in process.stdout:
            found = re.search(r'^step [1-9]\d*: .*val bpb ([\d.]+)', line)
            if found:
                curve.append((round((time.monotonic() - start) / 60, 3), float(found[1])))
        if process.wait():
            sys.exit(f'{shlex.join(command)} failed')
    return curve


def draw(curves):
    """Writes docs/minutes.png from `curves` and POINTS. curves: {label: curve}, each curve as
    measure returns it."""
    figure = Figure(figsize=(7, 3.6), layout='constrained')
    axes = figure.add_subplot(xlabel='minutes of wall time', ylabel='bits per byte (lower is better)', xscale='log')
    for label, curve in curves.items():
        minutes, bits = zip(*curve)
        axes.plot(minutes, bits, label=f'{label}, two CPU cores')
        axes.plot(minutes[-1], bits[-1], 'o', color=axes.lines[-1].get_color(), markersize=5)
        axes.annotate(f'{bits[-1]:.2f}', (minutes[-1], bits[-1]), xytext=(4, 5), textcoords='offset points', fontsize=8)
    for minutes, bits, label, offset in POINTS:
        axes.plot(minutes, bits, 's', color='0.5', markersize=6)
        axes.annotate(label, (minutes, bits), xytext=offset, textcoords='offset points', fontsize=8, color='0.3')
    ticks = [0.1, 0.2, 0.5, 1, 2, 5]
    axes.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.08, 7)
    axes.set_ylim(1.8, 3.6)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(ROOT / 'docs' / 'minutes.png', dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--measure', action='store_true')
    if parser.parse_args().measure:
        curves = {label: measure(flags) for label, flags in RUNS.items()}
        MEASURED.write_text(json.dumps(curves, indent=1) + '\n')
    draw(json.loads(MEASURED.read_text()))


if __name__ == '__main__':
    main()
