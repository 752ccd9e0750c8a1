"""A new run from the weights of another run, and runs that go on longer or with longer sequences."""
import functools
import json

import jax
import numpy as np
import pytest

from jax_flags import UserError
from jax_hub.tokenizers import HFTokenizer
from jax_pretrained import load_pretrained
from jax_run.checkpoints import choose_checkpoint
from jax_run.load import load_run
from jax_run.log import read_metrics
from jax_run.pretrained import check_tokens
from jax_run.start import check_init_from, merge_resumed_flags, print_what_is_left
from jax_transformer import GPT
from tests.common import (
    MODEL, RESUME, SHORT, assert_refused, copy_folder, prepare, records_of, refusal, run_script, sample, samples_of,
    succeeded, train, write_dataset)

LORA = ['--lora_rank=2', '--lora_alpha=4', '--learning_rate=1e-2', '--decay_lr=False']


@pytest.fixture(scope='module')
def more(dataset):
    """The flags of a short run from another one."""
    return [f'--dataset={dataset}', '--block_size=16', *SHORT, '--max_iters=2', '--eval_interval=2']


def first_and_last(out):
    losses = [record['val_loss'] for record in records_of(out, 'val_loss')]
    return losses[0], losses[-1]


def test_a_new_run_starts_from_the_weights_of_another_one(finished, more, tmp_path):
    first, _ = finished
    said = succeeded(train(tmp_path / 'out', *more, f'--init_from={first}')).stdout
    assert f'initializing from {first}, iteration 20, dropout 0.1, block_size 16' in said
    start, end = first_and_last(tmp_path / 'out')
    assert start == first_and_last(first)[1] and end != start
    assert [record['iter'] for record in records_of(tmp_path / 'out', 'loss')] == [0, 1]
    assert choose_checkpoint(tmp_path / 'out')[1]['flags']['init_from'] == str(first)
    succeeded(train(tmp_path / 'out', *RESUME, '--max_iters=3'))


def test_the_best_checkpoint_of_the_other_run_is_taken_or_the_latest(finished, more, tmp_path):
    first = copy_folder(finished[0], tmp_path)
    folder = first / 'ckpt' / '10'
    (folder / 'checksums.json').write_text('{}')
    (folder / 'metrics' / 'metrics').write_text(json.dumps({'val_loss': 0.0}))
    for which, iteration in (('best', 10), ('latest', 20)):
        said = succeeded(train(tmp_path / which, *more, f'--init_from={first}', f'--checkpoint={which}')).stdout
        assert f'iteration {iteration}, dropout' in said
    assert_refused(train(tmp_path / 'no', *more, f'--init_from={first}', '--checkpoint=last'), 'checkpoint must be one')


def test_lora_trains_updates_of_another_run_and_a_run_from_them_has_them_merged(finished, more, tmp_path):
    base = copy_folder(finished[0], tmp_path)
    succeeded(train(tmp_path / 'lora', *more, *LORA, f'--init_from={base}'))
    start, end = first_and_last(tmp_path / 'lora')
    assert start == first_and_last(base)[1] and end != start
    succeeded(train(tmp_path / 'full', *more, f'--init_from={tmp_path / "lora"}'))
    assert first_and_last(tmp_path / 'full')[0] == pytest.approx(end, abs=1e-5)
    # the base moves
    moved = base.rename(tmp_path / 'moved')
    assert_refused(sample(tmp_path / 'lora'), 'does not exist; name its new place with --base')
    succeeded(sample(tmp_path / 'lora', f'--base={moved}', '--num_samples=1', '--max_new_tokens=2'))
    # the base was trained further, into the same folder: the checkpoint that was updated is meant
    succeeded(train(moved, *RESUME, '--max_iters=21'))
    succeeded(train(tmp_path / 'lora', *RESUME, '--max_iters=3', f'--base={moved}'))


@pytest.fixture
def tuned(speaking, tmp_path):
    """(folder of a data set with the tokens of the model `speaking`, out_dir of a run that trained it further)."""
    data, out = tmp_path / 'data', tmp_path / 'out'
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text(f'{name} hello, again and again. <s> ' * 20)
    texts = tmp_path / 'a.txt', tmp_path / 'b.txt'
    succeeded(prepare('shakespeare', *texts, f'--tokenizer={speaking}', f'--out_dir={data}'))
    succeeded(train(out, f'--dataset={data}', f'--init_from={speaking}', '--block_size=16', *SHORT, '--max_iters=2'))
    return data, out


@pytest.mark.slow
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
    template = HFTokenizer(tmp_path / 'model_elsewhere').chat_template
    assert template and HFTokenizer(tmp_path / 'model').chat_template == template
    config = json.loads((tmp_path / 'model' / 'config.json').read_text())
    assert config['eos_token_id'] == [37]
    assert config['max_position_embeddings'] == 64


def test_a_run_from_a_run_keeps_its_tokenizer_and_config_json(tuned, tmp_path):
    data, first = tuned
    succeeded(train(tmp_path / 'next', f'--dataset={data}', f'--init_from={first}', '--block_size=16', *SHORT,
                    '--max_iters=2'))
    kept = tmp_path / 'next' / 'tokenizer'
    assert (kept / 'tokenizer.json').read_bytes() == (first / 'tokenizer' / 'tokenizer.json').read_bytes()
    succeeded(run_script('export_jax.py', f'--out_dir={tmp_path / "next"}', f'--folder={tmp_path / "hf"}'))
    assert load_pretrained(tmp_path / 'hf')[0].n_layer == load_run(first)[0].n_layer


def test_other_tokens_than_those_of_the_run_are_refused_with_the_remedy(tuned, dataset, finished, tmp_path):
    data, first = tuned
    flags = ['--block_size=16', *SHORT]
    result = train(tmp_path / 'next', f'--dataset={dataset}', f'--init_from={first}', *flags)
    assert_refused(result, f'has other tokens than {first}/tokenizer.*--tokenizer={first}/tokenizer ')
    result = train(first, *RESUME, f'--dataset={dataset}')
    assert_refused(result, f'their ids mean something else; make it with: .*--tokenizer={first}/tokenizer ')
    write_dataset(tmp_path / 'other', range(30), range(30), vocab_size=31)
    assert_refused(train(finished[0], *RESUME, f'--dataset={tmp_path / "other"}'), 'the model knows characters')


def test_weights_of_unknown_tokens_take_data_of_as_many_characters_only():
    data = {'kind': 'char', 'chars': 'abc'}
    assert check_tokens(data, 'mine', None, 'a.pt', 3) == data
    for other, size in ((data, 4), ({'kind': 'gpt2'}, 50257)):
        assert 'beside its weights' in refusal(check_tokens, other, 'mine', None, 'a.pt', size)


@pytest.mark.slow
def test_data_of_other_tokens_than_the_models_is_refused(tuned, speaking, dataset, tmp_path):
    flags = [f'--init_from={speaking}', '--block_size=16', *SHORT, '--max_iters=2']
    assert_refused(train(tmp_path / 'new', f'--dataset={dataset}', *flags), 'has other tokens than .*--tokenizer=')
    tokenizer = tuned[0] / 'tokenizer' / 'tokenizer.json'
    tokenizer.write_text(tokenizer.read_text().replace('"a":0,', '"a":1,').replace('"b":1,', '"b":0,')
                         .replace('"a": 0,', '"a": 1,').replace('"b": 1,', '"b": 0,'))
    meta = json.loads((tuned[0] / 'meta.json').read_text())
    del meta['tokenizer']['digest']  # as data of an earlier version: a digest says what the tokens were made with
    (tuned[0] / 'meta.json').write_text(json.dumps(meta))
    assert_refused(train(tmp_path / 'new', f'--dataset={tuned[0]}', *flags), 'has other tokens than')
    assert_refused(train(tuned[1], *RESUME), 'was trained with other tokens')
    assert not (tmp_path / 'new').exists()


# -----------------------------------------------------------------------------
# longer sequences

def loss_of_each_position(out, dataset, length):
    """The mean loss of the model of a run at each position, [length], over 8 windows of the text it validates on."""
    config, params, _ = load_run(out, 'latest')
    tokens = np.fromfile(dataset / 'val.bin', np.uint16)
    starts = np.arange(8) * 31
    windows = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    loss = jax.jit(functools.partial(GPT(config).apply, method='loss'))
    loss_BxT = loss({'params': params}, windows[:, :-1], windows[:, 1:])
    return np.asarray(loss_BxT).mean(0)


@pytest.mark.slow
def test_a_rope_model_learns_longer_sequences_from_its_run_or_resumed(dataset, tmp_path):
    model = [*MODEL, *SHORT, '--position=rope', f'--dataset={dataset}', '--dropout=0.0']
    short = tmp_path / 'short'
    succeeded(train(short, *model, '--block_size=8', '--max_iters=60', '--lr_decay_iters=60', '--eval_interval=60'))
    start = ['--init_from=' + str(short), '--block_size=32', '--max_iters=40', '--eval_interval=40']
    said = succeeded(train(tmp_path / 'long', *model, *start)).stdout
    assert 'was trained with sequences of 8 tokens and learns to read 32: RoPE keeps theta=10000 and no scaling' in said
    assert load_run(tmp_path / 'long')[0].block_size == 32
    resumed = copy_folder(short, tmp_path / 'resumed')
    said = succeeded(train(resumed, *RESUME, '--block_size=32', '--max_iters=100', '--lr_decay_iters=100')).stdout
    assert 'learns to read 32' in said and load_run(resumed)[0].block_size == 32
    assert 'block_size: 32 from iteration 60 on, 8 before: the best validation loss begins anew' in said
    # every position, seen before or not, is at least as good afterwards
    config, _, _ = load_run(short, 'latest')
    assert config.block_size == 8
    first_8 = loss_of_each_position(short, dataset, 8)
    for out in (tmp_path / 'long', resumed):
        after = loss_of_each_position(out, dataset, 32)
        assert after[:8].mean() < first_8.mean() + 0.05
        assert after[8:].mean() < first_8[-1] + 0.05


def test_learned_positions_end_where_the_run_ended(finished, more, tmp_path):
    longer = [flag.replace('--block_size=16', '--block_size=32') for flag in more]
    assert_refused(train(tmp_path / 'out', *longer, f'--init_from={finished[0]}'), 'knows only 16 positions, which it')
    assert_refused(train(finished[0], *RESUME, '--block_size=32'), 'with another architecture')


# -----------------------------------------------------------------------------
# what a start says

@pytest.mark.parametrize('iter_num, given, changed, said', [
    (20, {}, {}, 'already at iteration 20 (max_iters=20); a longer run: --max_iters=40 --lr_decay_iters=40\n'),
    (30, {}, {}, 'already at iteration 30 (max_iters=20); a longer run: --max_iters=60 --lr_decay_iters=60\n'),
    (20, {}, {'decay_lr': False}, 'already at iteration 20 (max_iters=20); a longer run: --max_iters=40\n'),
    (20, {'max_iters': 50}, {'max_iters': 50}, 'iterations 20 to 50 train at min_lr=0.1, because the schedule ends at '
     'lr_decay_iters=20; a longer one: --lr_decay_iters=50\n'),
    (20, {'max_iters': 50}, {'max_iters': 50, 'lr_schedule': 'constant'}, ''),
    (20, {'max_iters': 50, 'lr_decay_iters': 30}, {'max_iters': 50, 'lr_decay_iters': 30}, ''),
    (10, {}, {}, '')])
def test_a_resumed_run_says_what_it_has_left(capsys, iter_num, given, changed, said):
    flags = {'max_iters': 20, 'lr_decay_iters': 20, 'decay_lr': True, 'lr_schedule': 'cosine', 'min_lr': 0.1}
    print_what_is_left(flags | changed, given, iter_num)
    assert capsys.readouterr().out == said


def test_a_resume_says_which_flags_have_no_effect(monkeypatch, capsys):
    saved = {'minutes': 1.0, 'max_iters': 90}
    flags = {'out_dir': 'out', 'minutes': 0.0, 'max_iters': 10, 'checkpoint': 'best'}
    given = {'minutes': 1.0, 'max_iters': 20, 'checkpoint': 'best'}
    assert merge_resumed_flags(flags, given, saved)['max_iters'] == 90
    assert capsys.readouterr().err == ''  # those of a config file, with which the run began
    monkeypatch.setattr('sys.argv', ['train_jax.py', *(f'--{name}={value}' for name, value in given.items())])
    assert merge_resumed_flags(flags, given, saved)['max_iters'] == 90
    first, second = capsys.readouterr().err.splitlines()
    assert first == 'checkpoint=best has no effect: a resume continues from the latest checkpoint'
    assert second == 'max_iters=20 has no effect: --minutes has set 90; add --minutes=0 to change it'


@pytest.mark.parametrize('source, message', [
    ('resum', 'did you mean resume'), ('gpt2-medum', 'did you mean gpt2-medium'), ('out-mne', 'did you mean out-mine')])
def test_a_start_that_is_not_there_is_refused_with_what_was_meant(tmp_path, monkeypatch, source, message):
    (tmp_path / 'out-mine').mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f'{source} does not exist .{message}'):
        check_init_from(source)
    for fine in ('scratch', 'auto', 'resume', 'gpt2', 'out-mine', 'owner/name'):
        check_init_from(fine)


def test_max_iters_alone_is_a_whole_schedule_which_a_resume_keeps(dataset, tmp_path):
    flags = [flag for flag in MODEL + SHORT if not flag.startswith(('--lr_decay_iters', '--warmup_iters'))]
    short = [*flags, f'--dataset={dataset}', '--min_lr=1e-3']
    alone = succeeded(train(tmp_path / 'alone', *short, '--max_iters=10'))
    assert 'warmup_iters=2000 does not fit into max_iters=10: taking 1' in alone.stdout
    succeeded(train(tmp_path / 'both', *short, '--max_iters=10', '--lr_decay_iters=10', '--warmup_iters=1'))
    assert records_of(tmp_path / 'alone') == records_of(tmp_path / 'both')
    saved = json.loads((tmp_path / 'alone' / 'config.json').read_text())
    assert (saved['lr_decay_iters'], saved['warmup_iters']) == (10, 1)
    constant = succeeded(train(tmp_path / 'constant', *short, '--max_iters=1', '--decay_lr=False')).stdout
    assert 'does not fit' not in constant  # nothing is warmed up

    # longer: what was resolved stays, unless it is asked for anew
    said = succeeded(train(tmp_path / 'alone', *RESUME, '--max_iters=12')).stdout
    assert 'iterations 10 to 12 train at min_lr=0.001' in said
    succeeded(train(tmp_path / 'both', *RESUME, '--max_iters=12', '--lr_decay_iters=0'))
    *_, low, _ = read_metrics(tmp_path / 'alone')
    *_, higher, _ = read_metrics(tmp_path / 'both')
    assert low['lr'] < higher['lr']


def test_what_was_meant_is_named(tmp_path, monkeypatch):
    (tmp_path / 'out-mine' / 'ckpt').mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for script, arguments, said in (
            ('sample_jax.py', ['out-mine'], r'no config file out-mine \(did you mean --out_dir=out-mine\?\)'),
            ('sample_jax.py', ['--out_dir=out-mne'], r'name the out_dir of a run \(did you mean out-mine\?\)'),
            ('train_jax.py', ['--lora_rank=8', '--optimizer=muon'], 'LoRA trains updates of a pretrained model'),
            ('train_jax.py', ['--epochs=3'], 'did you mean --max_iters'),
            ('sample_jax.py', ['--init_from=my/folder'], 'there is no folder my/folder here, and cannot download')):
        assert_refused(run_script(script, *arguments), said)


def test_a_run_knows_what_it_began_from_after_two_resumes(dataset, tmp_path):
    out = tmp_path / 'out'
    succeeded(train(out, f'--dataset={dataset}', *MODEL, *SHORT, '--max_iters=2', '--eval_interval=2'))
    for n in (3, 4):
        succeeded(train(out, *RESUME, f'--max_iters={n}'))
    assert choose_checkpoint(out)[1]['origin'] == 'scratch'
