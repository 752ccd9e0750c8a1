"""Runs several programs in alternation and compares their throughput: the script behind the ratios in
docs/performance.md. The machine should do nothing else.

$ python peers/alternate.py --rounds=3 \\
    "int8=python bench_jax.py --mode=decode --vocab_size=50257 --batch_size=1 --quantize=int8" \\
    "Hugging Face=torch-venv/bin/python peers/torch_generate.py --dtype=bfloat16 --batch_size=1"

Each argument is a name and a command, run in the current folder, whose last line on stdout is a JSON object with
results.tokens_per_sec. Prints a line per run, with the load average and the memory bandwidth (GB/s, reading) measured
right before; then a table in Markdown with medians and spread. Ratios are to the last program of the same round.
"""
import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from jax_flags import UserError, start_script


def tokens_per_sec(command, metric):
    """What the command reports as `metric`, or else as tokens_per_sec. Raises UserError if it reports neither, or
    cannot be started."""
    try:
        run = subprocess.run(shlex.split(command), capture_output=True, text=True)
    except OSError as error:
        raise UserError(f'cannot start {command} ({error.strerror})') from None
    try:
        results = json.loads(run.stdout.splitlines()[-1])['results']
        found = results[metric] if metric in results else results['tokens_per_sec']
        if not found > 0:
            raise ValueError(f'{found} tokens per second')
        return found
    except (IndexError, KeyError, TypeError, ValueError):
        last_line = (run.stderr.strip() or 'nothing').splitlines()[-1]
        raise UserError(f'{command} reported no tokens_per_sec; '
                        f'exit code {run.returncode}, last line: {last_line}') from None


def spread(values):
    """'median (least to most)', with three digits of the median."""
    median = statistics.median(values)
    digits = max(0, 2 - math.floor(math.log10(median)))
    low, middle, high = (f'{x:,.{digits}f}' for x in (min(values), median, max(values)))
    return f'{middle} ({low} to {high})'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--metric', default='tokens_per_sec', help='the result to compare, as tokens_per_sec_decode '
                        '(without the prompt); a program that does not report it is compared by tokens_per_sec')
    parser.add_argument('programs', nargs='+', metavar='name=command')
    args = parser.parse_args()
    if not all('=' in program for program in args.programs):
        raise UserError('each program must be name=command')
    programs = dict(program.split('=', 1) for program in args.programs)
    if len(programs) < len(args.programs):
        raise UserError('two programs have the same name')
    if args.rounds < 1:
        raise UserError('rounds must be at least 1')

    import jax
    jax.config.update('jax_platforms', 'cpu')  # leaves a GPU's memory to the programs

    from jax_devices.setup import measure_bandwidth

    figures = {name: [] for name in programs}
    for i in range(args.rounds):
        for name, command in programs.items():
            load = os.getloadavg()[0]
            bandwidth = measure_bandwidth(jax.devices()[0])
            figures[name].append(tokens_per_sec(command, args.metric))
            print(f'round {i + 1}  load {load:.1f}  {bandwidth:.1f} GB/s  {name}: {figures[name][-1]:,.4g} tok/s',
                  flush=True)
    reference = figures[list(programs)[-1]]
    print('\n| | tok/s, median (spread) | ratio, median (spread) |\n|---|---|---|')
    for name, values in figures.items():
        ratios = [value / other for value, other in zip(values, reference)]
        print(f'| {name} | {spread(values)} | {spread(ratios)} |')


if __name__ == '__main__':
    start_script()
    main()
