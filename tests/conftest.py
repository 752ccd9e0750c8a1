"""Fixtures that several test modules share. A run that no test changes is made once in each test process."""
import shutil

import pytest

from tests.common import GOLDEN, MODEL, SHORT, TEXT, copy_folder, succeeded, train, write_dataset


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Leaves out loss.png, a fifth of the time of a short run in this process, but for runs that tests share."""
    for module in ('log', 'out_dir'):
        monkeypatch.setattr(f'jax_run.{module}.plot_losses', lambda out_dir: None)


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
    """A folder with a data set of characters."""
    folder, chars = tmp_path_factory.mktemp('data') / 'fox', ''.join(sorted(set(TEXT)))
    ids = [chars.index(c) for c in TEXT * 40]
    write_dataset(folder, ids[:-400], ids[-400:], chars=chars)
    return folder


@pytest.fixture(scope='session')
def flags(dataset):
    """Those of a short training run."""
    return [f'--dataset={dataset}', *MODEL, *SHORT]


@pytest.fixture(scope='session')
def finished(tmp_path_factory, flags):
    """(the out_dir of a run of 20 iterations, what it printed)."""
    out = tmp_path_factory.mktemp('finished') / 'out'
    return out, succeeded(train(out, *flags)).stdout


@pytest.fixture
def run_copy(finished, tmp_path):
    """A copy of the finished run, to be changed."""
    return copy_folder(finished[0], tmp_path)


@pytest.fixture
def speaking(tmp_path):
    """The folder of a Llama with a tokenizer of letters."""
    return copy_folder(GOLDEN / 'letters', tmp_path)


@pytest.fixture
def chatting(speaking):
    """The same with a chat template that marks what the model says."""
    return shutil.copytree(GOLDEN / 'letters_marked', speaking, dirs_exist_ok=True)


def pytest_generate_tests(metafunc):
    """Makes the cases of tests/test_sweep.py, --sweep=N of all kinds together."""
    if 'sweep_case' in metafunc.fixturenames:
        share = metafunc.module.SHARES[metafunc.function.__name__]
        metafunc.parametrize('sweep_case', range(round(share * metafunc.config.getoption('--sweep'))))


@pytest.fixture
def batches(monkeypatch):
    """How many answers have had a chunk together, chunk by chunk."""
    from jax_apps.batching import Batch  # here, because most tests need no model
    sizes, decode = [], Batch.decode

    def record(self, rows):
        sizes.append(len(rows))
        decode(self, rows)

    monkeypatch.setattr(Batch, 'decode', record)
    return sizes
