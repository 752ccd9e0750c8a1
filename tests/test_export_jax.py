"""The export script."""
import dataclasses
import errno
import itertools
import json
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_flags
from jax_flags import UserError
from jax_hub.tokenizer_files import write_char_tokenizer
from jax_pretrained import load_config, load_pretrained, save_pretrained
from jax_run.checkpoints import choose_checkpoint
from jax_run.load import load_run
from jax_transformer import count_params
from tests.common import (
    GOLDEN, RESUME, TINY, assert_refused, copy_folder, random_params, records_of, run_script, sample, samples_of, start,
    succeeded, train)

INTERRUPTED = """
import os, runpy, signal, sys, time
replace = os.replace
def interrupt(source, target):
    replace(source, target)
    if 'model.tmp-' in str(target):  # a file of the unfinished folder is there
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
os.replace = interrupt  # nothing here imports jax, so that the script handles Ctrl-C as a command does
sys.argv = ['export_jax.py', *sys.argv[1:]]
runpy.run_path('export_jax.py', run_name='__main__')
"""


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_unfinished(finished, tmp_path):
    process = start('-c', INTERRUPTED, f'--out_dir={finished[0]}', f'--folder={tmp_path / "model"}')
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and 'Traceback' not in err, err
    assert not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# newer models

@pytest.fixture(scope='session')
def qwen(tmp_path_factory, flags):
    """The out_dir of a small Qwen3-MoE that was trained for 20 iterations."""
    out = tmp_path_factory.mktemp('qwen') / 'out'
    succeeded(train(out, *flags, '--norm=rms', '--position=rope', '--n_kv_head=1', '--qk_norm=learned', '--mlp=swiglu',
                    '--n_inner=24', '--tied_head=False', '--bias=False', '--n_expert=4', '--n_expert_used=2'))
    return out


@pytest.mark.slow
def test_a_model_with_experts_trains_resumes_and_samples(qwen, tmp_path):
    losses = [record['val_loss'] for record in records_of(qwen, 'val_loss')]
    assert losses[-1] < losses[0] - 0.3
    out = copy_folder(qwen, tmp_path)
    succeeded(train(out, *RESUME, '--max_iters=21'))
    assert choose_checkpoint(out)[0] == 21
    assert_refused(train(out, *RESUME, '--n_expert=2'), 'with n_expert=4, not n_expert=2')
    loss = {}
    for balance in ('0.01', '1000'):
        other = copy_folder(qwen, tmp_path / balance)
        succeeded(train(other, *RESUME, '--max_iters=23', f'--expert_balance={balance}'))
        loss[balance] = records_of(other, 'loss')[-1]['loss']
    assert loss['0.01'] != loss['1000']
    sampled = succeeded(sample(qwen, '--num_samples=2', '--max_new_tokens=12', '--start=the ', '--speed=True'))
    # keys and values of one head of width 8, float32: 64 bytes per token
    assert 'KV cache: 1,024 bytes for a sequence of 16 tokens, 64 per token' in sampled.stderr


@pytest.mark.slow
def test_an_exported_model_gives_the_same_samples(qwen, dataset, tmp_path):
    config, params, _ = load_run(qwen)
    save_pretrained(params, config, tmp_path / 'model')
    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=the ']
    exported = sample('none', f'--init_from={tmp_path / "model"}', f'--dataset={dataset}', *flags)
    assert samples_of(exported) == samples_of(sample(qwen, *flags))


def test_an_export_in_shards_is_the_same_model(finished, tmp_path):
    names = []
    for i, flags in enumerate(([], ['--shard_gb=5e-6'])):
        folder = tmp_path / str(i)
        succeeded(run_script('export_jax.py', f'--out_dir={finished[0]}', f'--folder={folder}', *flags))
        names.append(sorted(path.name for path in folder.glob('*.safetensors*')))
    assert names[0] == ['model.safetensors']
    shards = [path for path in names[1] if path.endswith('.safetensors')]
    assert len(shards) > 1 and 'model.safetensors.index.json' in names[1]
    assert max((tmp_path / '1' / name).stat().st_size for name in shards) < 5_000 + 2_000  # and the header
    whole, split = (load_pretrained(tmp_path / str(i))[1] for i in range(2))
    jax.tree.map(np.testing.assert_array_equal, whole, split)


def test_export_writes_a_folder_that_needs_nothing_else(finished, tmp_path):
    out, _ = finished
    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=the ']
    succeeded(run_script('export_jax.py', f'--out_dir={out}', f'--folder={tmp_path / "model"}'))
    exported = sample('none', f'--init_from={tmp_path / "model"}', *flags)
    assert samples_of(exported) == samples_of(sample(out, *flags))
    assert 'python export_jax.py --init_from=model --gguf=model.gguf' in read_card(tmp_path / 'model')[1]
    assert_refused(run_script('export_jax.py', f'--out_dir={out}', f'--folder={tmp_path}'), 'not an empty folder')
    assert_refused(run_script('export_jax.py', f'--out_dir={out}'), 'name one new folder')
    for name, url in (('folder', 'gs://bucket/m'), ('gguf', 's3://bucket/m.gguf'), ('adapter', 'gs:/bucket/m')):
        assert_refused(run_script('export_jax.py', f'--out_dir={out}', f'--{name}={url}'), f'{name}={url} is not')
    new = f'--folder={tmp_path / "new"}'
    assert_refused(run_script('export_jax.py', f'--out_dir={out}', new, '--shard_gb=0'), 'shard_gb must be more than 0')
    named = run_script('export_jax.py', f'--out_dir={out}', f'--gguf={tmp_path / "model.bin"}')
    assert_refused(named, 'the name of a GGUF file ends in .gguf')
    base = run_script('export_jax.py', f'--init_from={GOLDEN / "letters"}', new, '--base=a')
    assert_refused(base, 'base is for a LoRA run')
    export = run_script('export_jax.py', f'--out_dir={out}', f'--adapter={tmp_path / "adapter"}')
    assert_refused(export, 'was not trained with LoRA, so it has no adapter')


# -----------------------------------------------------------------------------
# the model card

def read_card(folder):
    """(front matter as a dict, text) of a README.md, as the Hugging Face hub reads it."""
    card = pytest.importorskip('huggingface_hub').ModelCard.load(folder / 'README.md')
    return card.data.to_dict(), card.text


def run_next(result):
    """Runs the command that an export prints last."""
    command = shlex.split(result.stdout.strip().split('\n')[-1].removeprefix('next: '))
    assert command[0] == 'python'
    return run_script(*command[1:])


@pytest.mark.slow
def test_the_card_of_a_run_has_its_data_recipe_and_figures(qwen, tmp_path):
    succeeded(run_script('export_jax.py', f'--out_dir={qwen}', f'--folder={tmp_path / "my-model"}', '--dtype=bfloat16'))
    data, text = read_card(tmp_path / 'my-model')
    assert data == {'library_name': 'transformers', 'pipeline_tag': 'text-generation', 'tags': ['qwen3_moe', 'jax']}
    config, params, meta = load_run(qwen)
    rows = [json.loads(line) for line in (qwen / 'metrics.jsonl').read_text().splitlines()]
    evaluated = next(row for row in rows if row['iter'] == meta['iter_num'] and 'val_loss' in row)
    n_tokens = meta['iter_num'] * config.block_size * meta['flags']['batch_size'] * meta['flags'][
        'gradient_accumulation_steps']
    for line in ('# my-model', f'A qwen3_moe of {count_params(params, non_embedding=False):,} parameters in bfloat16',
                 f"iterations, {n_tokens:,} tokens, on the data set {Path(meta['flags']['dataset']).name}",
                 f"| val_loss | {evaluated['val_loss']:.4f} |", f"| learning_rate | {meta['flags']['learning_rate']} |",
                 f"'my-model')('Once upon a time', max_new_tokens={config.block_size // 2})",  # fits the context
                 'python sample_jax.py --init_from=my-model',
                 'python export_jax.py --init_from=my-model --gguf=my-model.gguf'):
        assert line in text, line
    assert 'lora_rank' not in text and 'None' not in text and str(tmp_path.parent) not in text


def test_the_card_of_a_converted_chat_model_says_so(speaking, tmp_path):
    said = succeeded(run_script('export_jax.py', f'--init_from={speaking}', f'--folder={tmp_path / "my-chat"}'))
    data, text = read_card(tmp_path / 'my-chat')
    assert data['tags'] == ['llama', 'jax'] and 'base_model' not in data
    assert 'Converted from letters.' in text and 'iterations' not in text
    assert "('text-generation', 'my-chat')([{'role': 'user', 'content': 'Hello'}]" in text
    assert 'python convert_hf_to_gguf.py my-chat' in text  # it has rope scaling, of which no GGUF is written

    # what the script says: each file with its size, and a command that works
    sizes = {file.name: file.stat().st_size for file in (tmp_path / 'my-chat').iterdir()}
    assert f'saved {tmp_path / "my-chat"}, weights in float32, {sum(sizes.values()):,} bytes\n' in said.stdout
    for name, size in sizes.items():
        assert f'\n  {name}, {size:,} bytes\n' in said.stdout
    assert '--chat=True --start=a' in said.stdout  # this tokenizer has no H
    assert len(samples_of(run_next(said))) == 1


@pytest.mark.slow
def test_the_card_of_a_model_trained_further_names_its_base_on_the_hub(run_copy, tmp_path):
    names = {'owner/base-1B': 'owner/base-1B', 'gpt2': 'openai-community/gpt2', str(tmp_path): None}
    for is_resumed, (base, named) in itertools.product((False, True), names.items()):
        for path in run_copy.glob('ckpt/*/meta/metadata'):
            meta = json.loads(path.read_text())
            meta.pop('origin', None)  # an earlier version wrote none
            meta['flags']['init_from'] = 'resume' if is_resumed else base
            path.write_text(json.dumps(meta | {'origin': base} if is_resumed else meta))
        for path in run_copy.glob('ckpt/*/checksums.json'):
            path.write_text('{}')
        folder = tmp_path / f'model-{base[:5].strip("/")}-{is_resumed}'
        succeeded(run_script('export_jax.py', f'--out_dir={run_copy}', f'--folder={folder}'))
        assert read_card(folder)[0].get('base_model') == named
        assert f'| init_from | {named or tmp_path.name} |' in read_card(folder)[1]  # no path, which may name a user


def test_the_tokens_of_a_run_are_those_of_the_sizes_that_it_had(tmp_path, flags):
    out = tmp_path / 'out'
    succeeded(train(out, *flags, '--max_iters=4', '--batch_size=2', '--gradient_accumulation_steps=1',
                    '--decay_lr=False'))
    succeeded(train(out, *RESUME, '--max_iters=7', '--batch_size=4'))
    meta = choose_checkpoint(out)[1]
    assert (meta['flags']['init_from'], meta['origin']) == ('resume', 'scratch')
    succeeded(run_script('export_jax.py', f'--out_dir={out}', '--checkpoint=latest', f'--folder={tmp_path / "model"}'))
    n_tokens = (4 * 2 + 3 * 4) * meta['flags']['block_size']
    card = (tmp_path / 'model' / 'README.md').read_text()
    assert f'Trained for 7 iterations, {n_tokens:,} tokens' in card
    assert '| learning_rate |' in card and '| lr_decay_iters |' not in card  # this rate stays


def test_a_model_of_gpt2s_tokens_is_exported_with_them(tmp_path, monkeypatch):
    """The files are made by a function of their own, which needs those that tiktoken downloads."""
    config = dataclasses.replace(TINY, vocab_size=50304, n_embd=8, n_head=2)
    save_pretrained(random_params(config), config, tmp_path / 'gpt2')
    writer = 'jax_hub.tokenizer_files.write_gpt2_tokenizer'
    monkeypatch.setattr(writer, lambda folder: write_char_tokenizer('ab', folder))
    succeeded(run_script('export_jax.py', f'--init_from={tmp_path / "gpt2"}', f'--folder={tmp_path / "model"}'))
    assert (tmp_path / 'model' / 'tokenizer.json').exists()

    def no_network(folder):
        raise UserError("tiktoken cannot load GPT-2's BPE")

    monkeypatch.setattr(writer, no_network)
    done = run_script('export_jax.py', f'--init_from={tmp_path / "gpt2"}', f'--folder={tmp_path / "without"}')
    assert "without a tokenizer.json: tiktoken cannot load GPT-2's BPE" in succeeded(done).stderr
    assert 'put its tokenizer.json into this folder' in (tmp_path / 'without' / 'README.md').read_text()


def test_a_published_model_that_has_learned_longer_sequences_is_exported_with_their_length(tmp_path):
    config = dataclasses.replace(TINY, position='rope', norm='rms', bias=False, mlp='swiglu')
    save_pretrained(random_params(config), config, tmp_path / 'model')
    longer = dataclasses.replace(config, block_size=2 * TINY.block_size)
    save_pretrained(random_params(config), longer, tmp_path / 'longer', config_json=tmp_path / 'model/config.json')
    saved = json.loads((tmp_path / 'longer/config.json').read_text())
    assert saved['max_position_embeddings'] == 2 * TINY.block_size
    assert load_config(tmp_path / 'longer').block_size == 2 * TINY.block_size


@pytest.mark.parametrize('n_inner', [0, 24])
def test_a_gpt2_of_another_mlp_width_is_exported_and_read_again(tmp_path, n_inner):
    config = dataclasses.replace(TINY, n_inner=n_inner)
    save_pretrained(random_params(config), config, tmp_path / 'model')
    assert json.loads((tmp_path / 'model/config.json').read_text())['n_inner'] == (n_inner or None)
    found, params = load_pretrained(tmp_path / 'model', 'float32')
    assert found.n_inner == n_inner
    jax.tree.map(np.testing.assert_array_equal, params, random_params(config))


@pytest.mark.parametrize('n_padding', [0, 3])
def test_transformers_is_told_to_sample_no_id_without_a_token(tmp_path, n_padding):
    chars = 'abcdefghijklmnopqrstuvwxyz0123456789 '[:TINY.vocab_size - n_padding]
    write_char_tokenizer(chars, tmp_path)
    save_pretrained(random_params(TINY), TINY, tmp_path / 'model', tokenizer=tmp_path)
    path = tmp_path / 'model/generation_config.json'
    padding = json.loads(path.read_text()).get('suppress_tokens', []) if path.exists() else []
    assert padding == list(range(TINY.vocab_size))[len(chars):]


def test_a_card_that_cannot_be_written_is_named_and_the_model_is_complete(speaking, tmp_path, monkeypatch):
    write_text = jax_flags.write_text

    def disk_is_full(path, text):
        if str(path).endswith('README.md'):
            raise OSError(errno.ENOSPC, 'No space left on device')
        write_text(path, text)

    monkeypatch.setattr(jax_flags, 'write_text', disk_is_full)
    result = run_script('export_jax.py', f'--init_from={speaking}', f'--folder={tmp_path / "model"}')
    assert_refused(result, r'cannot write the README.md of .*\(No space left on device\); the model there is complete')
    assert (tmp_path / 'model' / 'model.safetensors').exists()
