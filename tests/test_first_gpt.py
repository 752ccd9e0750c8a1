"""notebooks/first_gpt.ipynb runs from top to bottom."""
import json
import os
import shutil

import pytest

from tests.common import ROOT


@pytest.mark.slow
@pytest.mark.long
def test_the_notebook_runs_and_shows_curves_texts_and_an_export(speaking, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip('nbformat'), pytest.importorskip('nbclient')
    pytest.importorskip('ipykernel')
    tree = tmp_path / 'tree'
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns('.*', '*.bin', 'out-*', '__pycache__'))
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
    monkeypatch.setenv('NOTEBOOK_MINUTES', '0.1')
    monkeypatch.setenv('CHAT_MODEL', str(speaking))
    notebook = nbformat.read(tree / 'notebooks' / 'first_gpt.ipynb', 4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': tree / 'notebooks'}})
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
    pictures = [output for output in outputs if 'image/png' in output.get('data', {})]
    text = ''.join(output.get('text', '') for output in outputs)
    assert len(pictures) == 6  # four curves, a comparison, a head
    assert 'conversations' in text and 'Who are you?' in text
    assert '1 x cpu' in text and 'learning_rate' in text and 'bits per byte' in text
    assert 'next: python sample_jax.py --init_from=out-notebook-export' in text
    assert os.path.exists(tree / 'out-notebook-export' / 'model.safetensors')


def test_the_notebook_is_stored_with_all_its_outputs_and_small():
    path = ROOT / 'notebooks' / 'first_gpt.ipynb'
    cells = json.loads(path.read_text())['cells']
    assert path.stat().st_size < 600_000
    assert all(cell['outputs'] for cell in cells if cell['cell_type'] == 'code')
    assert any('image/png' in output.get('data', {}) for cell in cells for output in cell.get('outputs', []))
