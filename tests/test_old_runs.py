"""Folders that earlier commits have left behind are read, resumed and exported as ever."""
import json
import re
import tarfile

import numpy as np
import pytest
from tests.common import GOLDEN, records_of, run_script, sample, samples_of, slow, succeeded, train

ARCHIVES = GOLDEN / 'runs'  # made by make_old_runs.py
PROMPT = ['--start=the quick', '--num_samples=1', '--max_new_tokens=30', '--temperature=0']


@pytest.fixture(params=['4ff2f2c', slow('27b83e3'), slow('b06428c')])
def old(request, tmp_path):
    """(folder, expected) of what a commit has left, unpacked."""
    # Python 3.11 before 3.11.4, as Debian 12's, has no filters
    options = {'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}
    with tarfile.open(ARCHIVES / f'{request.param}.tar.xz') as archive:
        archive.extractall(tmp_path, **options)
    return tmp_path, json.loads((tmp_path / 'expected.json').read_text())


def test_an_old_run_gives_the_text_that_it_gave(old):
    folder, expected = old
    for name in ('out-letters', 'out-words'):
        texts = samples_of(sample(folder / name, '--checkpoint=latest', *PROMPT))
        assert texts == [expected[name]['text'].removesuffix('\n---------------\n')]


def test_an_exported_folder_of_old_gives_the_text_that_it_gave(old):
    folder, expected = old
    texts = samples_of(sample('none', f'--init_from={folder / "exported"}', *PROMPT))
    assert texts == [expected['exported']['text'].removesuffix('\n---------------\n')]


@pytest.mark.parametrize('name', ['out-letters', 'out-words'])
def test_an_old_run_is_resumed_and_ends_with_the_losses_that_it_had(old, name):
    folder, expected = old
    dataset = folder / expected[name]['dataset']
    done = succeeded(train(folder / name, '--init_from=resume', f'--dataset={dataset}', '--max_iters=30',
                           '--device=cpu:0'))
    assert 'error' not in done.stderr
    losses = {record['iter']: record['loss'] for record in records_of(folder / name, 'loss')}
    theirs = expected[name]['losses']
    assert sorted(losses) == sorted(int(i) for i in theirs)
    for i, loss in losses.items():
        np.testing.assert_allclose(loss, theirs[str(i)], atol=2e-5)  # bits differ from CPU to CPU


def test_an_old_run_is_exported(old, tmp_path):
    folder, _ = old
    done = succeeded(run_script('export_jax.py', f'--out_dir={folder / "out-words"}', '--checkpoint=latest',
                                f'--folder={folder / "again"}'))
    assert re.search('saved .*again', done.stdout)
    now, then = (folder / name / 'model.safetensors' for name in ('again', 'exported'))
    assert now.read_bytes() == then.read_bytes()
