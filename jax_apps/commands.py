"""The commands of an installation. train-jax, sample-jax, eval-jax, export-jax and plot-jax run the
scripts of this project; prepare-jax NAME runs data/NAME/prepare.py."""
import os
import runpy
import sys

from jax_flags import ROOT, UserError, did_you_mean, find_shipped, start_script


def run_script(name):
    """Runs a script of this project as the main program."""
    runpy.run_path(str(ROOT / name), run_name='__main__')


def train():
    run_script('train_jax.py')


def sample():
    run_script('sample_jax.py')


def evaluate():
    run_script('eval_jax.py')


def export():
    run_script('export_jax.py')


def plot():
    run_script('plot_jax.py')


def prepare():
    """Prepares the data set NAME, the command's first argument. Writes it into --out_dir, by
    default data/NAME in the current folder. Raises UserError for an unknown NAME."""
    start_script()
    name, *arguments = sys.argv[1:] or ['']
    script = find_shipped('data', os.path.join(name, 'prepare.py'))
    if not name or not script.is_file():
        folder = find_shipped('data', 'common.py').parent
        known = sorted(path.parent.name for path in folder.glob('*/prepare.py'))
        raise UserError(f'name a data set, as in prepare-jax shakespeare_char{did_you_mean(name, known)}: '
                        f'{", ".join(known)}')
    sys.argv = [str(script), f'--out_dir={os.path.join("data", name)}', *arguments]
    sys.path.insert(0, str(script.parent))  # as the interpreter does
    runpy.run_path(str(script), run_name='__main__')
