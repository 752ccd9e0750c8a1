"""Runs config/five_minutes.py with three seeds, one after the other, and prints the results as a
row for the table of machines (docs/lab_log.md#five-minutes). With --check, repeats the first
iterations of the runs of a saved row, and compares the results with the row.

$ python data/shakespeare_bpe/prepare.py
$ python tools/five_minutes.py --save=mine.json          # 20 minutes, on a quiet machine
$ python tools/five_minutes.py --check=mine.json         # repeats 100 iterations of each seed
$ python tools/five_minutes.py --check=mine.json --all   # repeats all iterations
$ python tools/five_minutes.py --seeds=1,2 --device=cpu --batch_size=6

Other flags, such as --batch_size, are passed to train_jax.py. --save writes a row to a file. The
file has the manifest of the first run, and for each seed the number of iterations, the bits per
byte, the losses of the log, and digests of the weights after 100 iterations and at the end.

On the same kind of machine, with the same versions, --check demands the same bits. Elsewhere it
demands that no loss differs by more than BOUND (jax_run/verify.py). The bits per byte are measured
at the end of a run, so only --all compares them. Exit code: 0 if the results agree, 1 if not, 2 if
the row cannot be checked.
"""
import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from jax_flags import UserError, exit_on_user_error, read_json, write_json

sys.excepthook = exit_on_user_error
CONFIG = 'config/five_minutes.py'
N_CHECKED = 100  # iterations


def train(*flags):
    """Runs train_jax.py with `flags`, its arguments, and returns its stdout. If train_jax.py fails,
    ends this program."""
    command = [sys.executable, str(ROOT / 'train_jax.py'), *map(str, flags)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def describe(out_dir):
    """Returns (digest of the weights of the latest checkpoint; {iteration: loss} of the log;
    content of config.json) of the run in out_dir."""
    from jax_run.log import read_metrics
    from jax_run.verify import digest_weights
    losses = {str(record['iter']): record['loss'] for record in read_metrics(out_dir) if 'loss' in record}
    return digest_weights(out_dir), losses, read_json(Path(out_dir, 'config.json'))


def last_evaluation(said):
    """Returns (iteration, bits per byte of val), two texts, of the last evaluation in `said`, the
    stdout of train_jax.py."""
    return re.findall(r'^step (\d+): .*val bpb ([\d.]+)', said, re.M)[-1]


def train_beginning(config, flags, one, n):
    """Repeats the first n iterations of a seed's training. Returns (digest of the weights;
    {iteration: loss}; bits per byte after n iterations; manifest). config: the path of a config
    file. flags: a list of further flags. one: the results of the seed, a dict that run() returns.
    The seed and the learning rate schedule are taken from this dict."""
    with tempfile.TemporaryDirectory() as folder:
        said = train(config, *flags, f"--seed={one['seed']}", '--minutes=0', f'--max_iters={n}',
                     f"--lr_decay_iters={one['lr_decay_iters']}", f"--warmup_iters={one['warmup_iters']}",
                     f"--earlier_ends={one.get('earlier_ends', '')}", '--sample_prompt=', f'--out_dir={folder}/out')
        digest, losses, settings = describe(f'{folder}/out')
    return digest, losses, float(last_evaluation(said)[1]), settings['manifest']


def run(config, seed, flags):
    """Trains with a seed for as long as the config file says. Then starts again, trains only
    N_CHECKED iterations (or as many as the first training made, if fewer), and computes a digest of
    their weights, which the first training does not save. With this digest, --check need not repeat
    the whole training. Returns (results; device; manifest). results: a dict of the seed's results,
    for row['seeds'] in main. device: a text. config: the path of a config file. flags: a list of
    further flags."""
    with tempfile.TemporaryDirectory() as folder:
        said = train(config, *flags, f'--seed={seed}', f'--out_dir={folder}/out')
        digest, losses, settings = describe(f'{folder}/out')
    device = re.search(r'^(\d+ x .*), compute in (\w+)', said, re.M)
    n_iters, bits = last_evaluation(said)
    print(f'seed {seed}: {n_iters} iterations, {bits} bits per byte', file=sys.stderr)
    one = {
        'seed': seed, 'iterations': int(n_iters), 'bits_per_byte': float(bits), 'losses': losses,
        'digest_end': digest, **{name: settings[name] for name in ('lr_decay_iters', 'warmup_iters', 'earlier_ends')}}
    one['digest_begin'], *_ = train_beginning(config, flags, one, min(N_CHECKED, int(n_iters)))
    return one, f'{device[1]}, {device[2]}', settings['manifest']


def cpu_model():
    """Returns the name of the CPU, as Linux knows it."""
    try:
        text = Path('/proc/cpuinfo').read_text()
    except OSError:
        return platform.processor()
    found = re.search(r'^model name\s*: (.*)$', text, re.M)
    return found[1] if found else platform.machine()


def print_row(row):
    """Prints the head of the Markdown table of machines, and below it this machine's row. row: the
    dict that main makes, and that --save writes to a file."""
    n_iters = [one['iterations'] for one in row['seeds']]
    bits = [one['bits_per_byte'] for one in row['seeds']]
    print('| machine | cores | device | jax | iterations | bits per byte: median, range | flags |')
    print('|---|---|---|---|---|---|---|')
    print(f"| {row['machine']} | {row['cores']} | {row['device']} | {row['jax']} | "
          f'{min(n_iters):,} to {max(n_iters):,} | {statistics.median(bits):.3f}, '
          f"{min(bits):.3f} to {max(bits):.3f} | {' '.join(row['flags']) or 'as it is'} |")


def check(row, flags, has_all):
    """Repeats runs on this machine, one for each seed, and compares their results with the results
    in `row`. row: the content of a file that --save has written, here or elsewhere. flags: further
    flags of train_jax.py, such as --device. has_all: whether to train all iterations of each run;
    otherwise trains the first N_CHECKED, or all if a run has fewer.

    Prints what differs from the runs in `row`, such as versions, and a line for each seed. Returns
    the exit code: 0 if all results agree, else 1. Raises UserError if `row` is none, if it has no
    losses, or if the data differ."""
    from jax_run.manifest import find_changed, find_machine, list_changes
    from jax_run.verify import BOUND
    missing = {'config', 'flags', 'manifest', 'seeds'} - row.keys()
    if missing:
        raise UserError(f'this is not what --save has written: it lacks {", ".join(sorted(missing))}')
    code = 0
    for one in row['seeds']:
        # what differs by name
        n = one['iterations'] if has_all else min(N_CHECKED, one['iterations'])
        digest, losses, bits, manifest = train_beginning(row['config'], [*row['flags'], *flags], one, n)
        known = row['manifest']
        changed = find_changed(known, manifest)
        for name in ('seed', 'lr_decay_iters', 'warmup_iters', 'earlier_ends'):  # of the first seed in the row
            changed.get('flags', {}).pop(name, None)
        if one is row['seeds'][0]:
            for line in list_changes(changed, 'the row'):
                print(line)
        of_row, here = [
            [{name: file['samples'] for name, file in data['files'].items()}
             for data in one['data']]
            for one in (known, manifest)]
        if of_row != here:
            raise UserError(f"{row['config']}: the data are not those of the row")

        # the same bits, or losses that are near
        gaps = [abs(loss - losses[i]) for i, loss in one['losses'].items() if i in losses]
        if not gaps:
            raise UserError(f"the row has no losses of seed {one['seed']} to compare")
        if n == one['iterations']:
            gaps.append(abs(bits - one['bits_per_byte']))
        gap = max(gaps)
        what = f"seed {one['seed']}, {n:,} of {one['iterations']:,} iterations"
        is_same = digest == one['digest_end' if has_all else 'digest_begin'] and not gap
        is_elsewhere = find_machine(known) != find_machine(manifest) or 'versions' in changed
        if is_same:
            print(f'{what}: the same bits')
        elif is_elsewhere and gap <= BOUND:
            print(f'{what}: another machine or version, losses within {gap:.2g} (at most {BOUND:g} is expected)')
        else:
            print(f'{what}: differs, losses or bits per byte by up to {gap:.3g}')
            code = 1
    if not has_all and any(one['iterations'] > N_CHECKED for one in row['seeds']):
        print('the bits per byte were not compared, which are measured at the end: --all compares them')
    return code


def read_seeds(text):
    """Returns the whole numbers in the flag --seeds, such as '1337,1338'."""
    try:
        return [int(seed) for seed in text.split(',')]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not numbers such as 1337,1338') from None


def main():
    """Trains with each seed, and prints the results as a row for the table of machines
    (docs/lab_log.md#five-minutes). With --check, repeats the runs of a saved row instead, and
    compares the results with the row, see check."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=read_seeds, default='1337,1338,1339')
    parser.add_argument('--config', default=CONFIG, help=f'another config file than {CONFIG}')
    parser.add_argument('--save', metavar='FILE', type=os.path.expanduser, help='write what --check reads')
    parser.add_argument('--check', metavar='FILE', type=os.path.expanduser,
                        help='train the beginning of each seed of a row again')
    parser.add_argument('--all', action='store_true', help='with --check: train all iterations again')
    args, flags = parser.parse_known_args()
    if args.check:
        sys.exit(check(read_json(Path(args.check)), flags, args.all))
    if args.all:
        parser.error('--all needs --check')
    has_folder = not args.save or os.path.isdir(os.path.dirname(args.save) or '.')
    if not has_folder or args.save and os.path.isdir(args.save):
        parser.error(f'--save={args.save} is not a file in a folder that exists')
    seeds, devices, manifests = zip(*[run(args.config, seed, flags) for seed in args.seeds])
    row = {
        'format': 1, 'config': args.config, 'flags': flags, 'machine': cpu_model(), 'cores': os.cpu_count(),
        'device': devices[0], 'jax': version('jax'), 'seeds': seeds, 'manifest': manifests[0]}
    print_row(row)
    if args.save:
        write_json(args.save, row)


if __name__ == '__main__':
    main()
