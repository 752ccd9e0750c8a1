"""20 hostile files of each kind, see tests/hostile.py; tests/campaign.py reads more of them."""
import contextlib
import faulthandler
import shutil
import signal

import pytest

from tests.hostile import (
    HANG_S, HONEST, READERS, limit_memory, make_honest, read_input, write_input)

N_INPUTS = 20
SEED = 0  # of tests/campaign.py --sections=files --seed=0 --files=20, too


@pytest.fixture(scope='session')
def honest(tmp_path_factory, finished):
    """The folder with the honest folders, of which the run is that of other tests."""
    folder = tmp_path_factory.mktemp('hostile') / 'honest'
    shutil.copytree(finished[0], folder / 'run')
    return folder


class TimeIsUp(BaseException):
    """Raised in what takes too long; no reader catches it."""


@contextlib.contextmanager
def limit_time():
    """Interrupts what hangs, or ends this process."""

    def interrupt(*args):
        raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    faulthandler.dump_traceback_later(4 * HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def read_within_limits(name, folder):
    """The Finding of an input, or None."""
    with limit_memory(), limit_time():
        return read_input(name, folder)[0]


@pytest.mark.parametrize('name', READERS)
def test_a_hostile_file_is_read_or_refused_in_one_line(name, honest, tmp_path):
    make_honest(honest, READERS[name].folders.split(','))
    found = {}
    for number in range(N_INPUTS):
        folder = tmp_path / f'{number}'
        write_input(name, SEED, number, honest, folder)
        finding = read_within_limits(name, folder)
        if finding and finding.kind == 'time':  # other work on this machine may have caused it
            shutil.rmtree(folder)
            write_input(name, SEED, number, honest, folder)
            finding = read_within_limits(name, folder)
        if finding:
            found[f'{name}:{number}'] = finding
        shutil.rmtree(folder)
    assert not found


@pytest.mark.parametrize('name', READERS)
def test_the_honest_file_is_read(name, honest, tmp_path):
    folders = READERS[name].folders.split(',')
    make_honest(honest, folders)
    for source in folders:
        shutil.copytree(honest / source, tmp_path / source)
        _, said = read_input(name, tmp_path / source)
        assert said == 'read'


def test_every_honest_folder_is_read_by_a_reader():
    assert {
        source for reader in READERS.values() for source in reader.folders.split(',')
    } == HONEST.keys()


def test_an_input_depends_on_its_seed_and_number_alone(honest, tmp_path):
    make_honest(honest, ['bpe'])
    contents = []
    for place, seed, number in (('a', 1, 7), ('b', 1, 7), ('c', 2, 7), ('d', 1, 8)):
        write_input('tokenizer.json bpe', seed, number, honest, tmp_path / place)
        contents.append((tmp_path / place / 'tokenizer.json').read_bytes())
    assert contents[0] == contents[1] and len(set(contents)) == 3
