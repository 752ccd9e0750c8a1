"""An installation by `pip install .`, and Pythons that lack what this project needs."""
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.common import ROOT, TEXT

SCRIPTS = ['train_jax.py', 'sample_jax.py', 'eval_jax.py', 'export_jax.py', 'bench_jax.py', 'plot_jax.py',
           *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob('data/*/prepare.py'))]


def run(command, folder, **env):
    return subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=600,
                          env={**os.environ, 'JAX_NUM_CPU_DEVICES': '1', **env})


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """The folder of the commands of an environment in which this project is installed, from a copy of the checkout."""
    folder = tmp_path_factory.mktemp('installed')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder / 'venv'], check=True)
    python = folder / 'venv' / 'bin' / 'python'
    site = Path(run([python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))'], folder).stdout.strip())
    (site / 'base.pth').write_text(sysconfig.get_path('purelib') + '\n')  # the packages that it needs are there
    listed = run(['git', 'ls-files', '-co', '--exclude-standard'], ROOT)
    if listed.returncode:
        pytest.skip('not a git checkout')
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith('tests/'):
            (folder / 'source' / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / 'source' / name)
    done = run([sys.executable, '-m', 'pip', '--python', python, 'install', '--no-deps', '--no-build-isolation',
                '--no-index', folder / 'source'], folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / 'source')
    names = {path.name for path in site.iterdir()}
    assert not names & {'data', 'config', 'tools', 'tests', 'peers', 'docs'} and 'train_jax.py' in names
    assert all((site / name / 'py.typed').exists() for name in names if (site / name / '__init__.py').exists()
               and name.startswith('jax_'))
    return python.parent


@pytest.mark.slow
def test_an_installation_trains_samples_and_compares_in_an_empty_folder(installed, tmp_path):
    (tmp_path / 'fox.txt').write_text(TEXT * 200)
    prepared = run([installed / 'prepare-jax', 'shakespeare_char', 'fox.txt'], tmp_path)
    assert prepared.returncode == 0 and (tmp_path / 'data' / 'shakespeare_char' / 'train.bin').exists(), prepared.stderr
    more = run([installed / 'prepare-jax', 'shakespeare_char', 'fox.txt', '--out=other'], tmp_path)
    assert more.returncode == 0 and (tmp_path / 'other' / 'train.bin').exists(), more.stderr
    flags = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--max_iters=10',
             '--lr_decay_iters=10', '--warmup_iters=2', '--eval_interval=5', '--eval_iters=1', '--device=cpu',
             '--out_dir=out']
    trained = run([installed / 'train-jax', 'config/train_shakespeare_char.py', *flags], tmp_path)
    assert trained.returncode == 0 and 'step 10: train loss' in trained.stdout, trained.stderr
    assert trained.stdout.endswith('next: sample-jax --out_dir=out\n')
    sampled = run([installed / 'sample-jax', '--out_dir=out', '--num_samples=1', '--max_new_tokens=4'], tmp_path)
    assert sampled.returncode == 0 and sampled.stdout.count('---------------') == 1
    for command, *more in (('plot-jax', 'out'), ('export-jax', '--out_dir=out', '--folder=model'),
                           ('eval-jax', '--out_dir=out', '--text=fox.txt')):
        done = run([installed / command, *more], tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / 'compare.png').exists() and (tmp_path / 'model' / 'config.json').exists()


@pytest.mark.slow
def test_an_installation_says_what_is_there_and_how_to_make_the_rest(installed, tmp_path):
    for command, said in (
            (['prepare-jax', 'shakespear_char'], 'did you mean shakespeare_char'),
            (['prepare-jax'], 'name a data set, as in prepare-jax shakespeare_char: chat, '),
            (['train-jax', 'config/train_shakespeare_char.py'], 'run: prepare-jax shakespeare_char'),
            (['train-jax', '--dataset=mine'], 'there is no data/mine/train.bin'),
            (['train-jax', 'config/none.py'], 'there is no config file config/none.py')):
        done = run([installed / command[0], *command[1:]], tmp_path)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count('\n') == 1, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_python_without_the_packages_says_in_one_line_how_to_make_an_environment(script, tmp_path):
    arguments = {'eval_jax.py': f'--text={ROOT}/README.md', 'export_jax.py': '--folder=x', 'plot_jax.py': 'out'}
    argument = arguments.get(script)
    done = run(filter(None, [sys.executable, '-S', ROOT / script, argument]), tmp_path, PYTHONPATH='')
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert f'{sys.executable} has no package ' in done.stderr and 'pip install -r requirements_jax.txt' in done.stderr


OLD = """
import sys
sys.version_info = (3, 9, 18, 'final', 0)
import runpy
sys.path[:0] = sys.argv[1:2]
runpy.run_path(sys.argv[2], run_name='__main__')
"""


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_python_that_is_too_old_says_so_in_one_line(script, tmp_path):
    done = run([sys.executable, '-c', OLD, ROOT, ROOT / script], tmp_path)
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert 'and JAX takes 3.11 or newer: activate the environment' in done.stderr
