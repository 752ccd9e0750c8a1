"""Compares runs: draws their curves in one picture, and prints one table of their differences.

$ python plot_jax.py out-a out-b out-c
$ python plot_jax.py out-* --x=seconds --output=sweep.png

Reads metrics.jsonl, config.json and the manifest of each run, also of a run that is under way."""
import os
import sys

from jax_flags import UserError, read_flags, start_script

# -----------------------------------------------------------------------------
x = 'iterations' # the horizontal axis: 'iterations', 'tokens' or 'seconds' (of training, without evaluations)
output = 'compare.png' # the picture
# -----------------------------------------------------------------------------
start_script()
folders = [arg for arg in sys.argv[1:] if not arg.startswith('-')]
flags, _ = read_flags(
    __file__, globals(), [arg for arg in sys.argv[1:] if arg.startswith('-')], others='OUT_DIR ...')
if not folders:
    raise UserError('name the runs to compare, as in python plot_jax.py out-a out-b')
path = flags['output']
if not os.path.basename(path):
    raise UserError(f'output={path} is no file; name one, as in --output=compare.png')
if not os.path.splitext(path)[1]:
    path += '.png'

from jax_run.compare import compare_runs

figure = compare_runs(folders, flags['x'])
try:
    figure.savefig(path, dpi=120)
except (OSError, ValueError) as error:  # no such folder; no such format
    raise UserError(f'cannot write {path}: {error}') from None
print(f'saved {path}')
