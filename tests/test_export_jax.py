"""The export script."""
import json
from tests.common import CHAT_TEMPLATE, RESUME, assert_refused, run_script, sample, succeeded, train

import numpy as np

from jax_files.checkpoints import choose_checkpoint, load_run
from jax_files.tokenizers import HFTokenizer
from jax_pretrained import save_pretrained
from tests.common import samples_of

# -----------------------------------------------------------------------------
# newer models

def test_an_exported_model_gives_the_same_samples(qwen, dataset, tmp_path):
    config, params, _ = load_run(qwen)
    save_pretrained(params, config, tmp_path / 'model')
    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=the ', f'--dataset={dataset}']
    exported = sample('none', f'--init_from={tmp_path / "model"}', *flags)
    assert samples_of(exported) == samples_of(sample(qwen, *flags))


def test_export_writes_a_folder_that_needs_nothing_else(qwen, tmp_path):
    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=the ']
    succeeded(run_script('export_jax.py', f'--out_dir={qwen}', f'--folder={tmp_path / "model"}'))
    exported = sample('none', f'--init_from={tmp_path / "model"}', *flags)
    assert samples_of(exported) == samples_of(sample(qwen, *flags))
    assert_refused(run_script('export_jax.py', f'--out_dir={qwen}', f'--folder={tmp_path}'), 'not an empty folder')
    assert_refused(run_script('export_jax.py', f'--out_dir={qwen}'), 'name the new folder')


def test_a_run_with_a_tokenizer_of_its_own_needs_nothing_but_its_folder(tuned, speaking, tmp_path):
    data, out = tuned
    tokens = np.fromfile(data / 'train.bin', np.uint16).tolist()
    assert tokens[0] == 36  # what begins a text of this model
    assert tokens.count(37) == 2 and tokens[-1] == 37  # each document ends
    assert 38 not in tokens[1:]
    moved = tmp_path / 'moved'
    data.rename(tmp_path / 'data_elsewhere')
    out.rename(moved)
    speaking.rename(tmp_path / 'model_elsewhere')
    assert choose_checkpoint(moved)[1]['model']['block_size'] == 64  # the model's context, not the training's
    assert samples_of(sample(moved, '--start=ab c', '--num_samples=1', '--max_new_tokens=20'))[0].startswith('ab c')
    succeeded(train(moved, *RESUME, f'--dataset={tmp_path / "data_elsewhere"}', '--max_iters=3'))
    succeeded(run_script('export_jax.py', f'--out_dir={moved}', f'--folder={tmp_path / "model"}'))
    assert HFTokenizer(tmp_path / 'model').chat_template == CHAT_TEMPLATE
    config = json.loads((tmp_path / 'model' / 'config.json').read_text())
    assert config['eos_token_id'] == [37]
    assert config['max_position_embeddings'] == 64
