"""Whole conversations packed into rows: from the file to the update, each as if it were alone, in several layouts."""
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_devices.choose
from jax_devices.choose import choose_attention
from jax_devices.layout import setup_distributed_training
from jax_flags import UserError
from jax_ops.attention import Scores
from jax_ops.fused_attention import Qkv, chunked_attention, fused_causal_attention, splash_attention, splash_kernel
from jax_ops.sharding import BATCH, create_mesh
from jax_run.data import load_dataset_meta
from jax_run.log import read_metrics
from jax_run.sources import find_starts, open_source
from jax_train_utils import TrainState, estimate_loss_jax, language_model, make_eval_step, split_batch
from jax_transformer import GPT, GPTConfig, MLAConfig, dot_product_attention
from tests.common import (
    INTERRUPTED_PREPARE, RESUME, ROOT, TINY, assert_refused, edit_json, final_state, long, make_step, prepare,
    random_params, start, succeeded, train, wait_for)

BLOCK = 160  # two blocks of chunked attention
ROPE = dict(position='rope', norm='rms', mlp='swiglu', bias=False)
CONFIG = GPTConfig(block_size=BLOCK, vocab_size=41, n_layer=2, n_head=4, n_embd=16)
CONFIGS = {
    'gpt2 with remat': dict(remat='full'), 'llama': dict(ROPE, n_kv_head=2, scan_layers=True),
    'windows, sinks, caps': dict(ROPE, layer_types=('window', 'full'), window=20, sinks=True, attention_cap=2.0),
    'chunks': dict(ROPE, layer_types=('chunk', 'nope'), chunk=16, query_growth=0.1, query_growth_every=8),
    'latent attention': dict(ROPE, mla=MLAConfig(q_rank=8, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6))}


def make_rows(n_rows, longest=70, seed=0):
    """(tokens, mask) of rows of conversations of random tokens, of which those from the third on count."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, CONFIG.vocab_size, size=(n_rows, BLOCK + 1)).astype(np.uint16)
    mask = np.ones(tokens.shape, np.uint8)
    for row_tokens, row in zip(tokens, mask):
        at = 0
        while (end := at + rng.integers(4, longest)) <= BLOCK + 1:
            row[at:at + 3] = 2, 0, 0
            at = end
        row_tokens[at:] = row[at:] = 0
        row[at:at + 1] = 2
    return tokens, mask


def read_row(tokens, mask, row):
    """A batch of one row."""
    return open_source(tokens, mask, block_size=BLOCK, seed=0).read(np.array([row]))


# -----------------------------------------------------------------------------
# the files

CHAT = {'role': 'user', 'content': 'a'}


def prepare_chats(lengths, model, folder, *flags):
    """A data set of conversations whose answers have these lengths; each has 4 tokens more. The last is for val."""
    lines = [json.dumps({'messages': [CHAT, {'role': 'assistant', 'content': 'abcdefgh'[n % 8] * int(n)}]})
             for n in lengths]
    (folder / 'chats.jsonl').write_text('\n'.join(lines))
    return prepare('chat', folder / 'chats.jsonl', f'--tokenizer={model}', f'--out_dir={folder / "data"}', *flags)


def read_files(data, split, width):
    tokens, mask = np.fromfile(data / f'{split}.bin', np.uint16), np.fromfile(data / f'{split}_mask.bin', np.uint8)
    return tokens.reshape(-1, width), mask.reshape(-1, width)


def test_rows_hold_whole_conversations_each_in_the_row_with_the_least_room(chatting, tmp_path):
    said = succeeded(prepare_chats([2, 1, 6, 5, 9, 3, 30, 1], chatting, tmp_path, '--rows=12')).stdout
    assert 'in 6 rows; 1 longer than a row were cut, 0 left out' in said
    tokens, mask = read_files(tmp_path / 'data', 'train', 13)
    conversations = []
    for row, row_mask in zip(tokens, mask):
        bounds = [*np.flatnonzero(row_mask == 2), 13]
        conversations.append([row[a:b].tolist() for a, b in zip(bounds, bounds[1:]) if row[a]])
    user, model, end = 38, 39, 37
    whole = lambda n: [user, 0, model, *[n % 8] * n, end]
    assert conversations == [[whole(9)], [whole(30)[:13]], [whole(6)], [whole(5)], [whole(3), whole(2)], [whole(1)]]
    assert load_dataset_meta(tmp_path / 'data')['row_length'] == 13
    digests = load_dataset_meta(tmp_path / 'data')['digests']
    assert digests == {name: hashlib.sha256((tmp_path / 'data' / name).read_bytes()).hexdigest() for name in (
        'train.bin', 'val.bin', 'train_mask.bin', 'val_mask.bin')}


@pytest.mark.slow
@pytest.mark.parametrize('flags', [[], long(['--rows=40'])])
def test_a_killed_preparation_goes_on_with_the_same_bytes(chatting, tmp_path, flags):
    lengths = [n % 30 + 1 for n in range(900)]
    for name in ('whole', 'killed'):
        (tmp_path / name).mkdir()
    said = succeeded(prepare_chats(lengths, chatting, tmp_path / 'whole', *flags)).stdout
    whole, data = tmp_path / 'whole' / 'data', tmp_path / 'killed' / 'data'
    shutil.copy(tmp_path / 'whole' / 'chats.jsonl', tmp_path / 'killed')
    arguments = [tmp_path / 'killed' / 'chats.jsonl', f'--tokenizer={chatting}', f'--out_dir={data}', *flags]
    run = start(ROOT / 'data' / 'chat' / 'prepare.py', *arguments)
    journal = data / 'journal.part.jsonl'
    wait_for('rows', lambda: journal.exists() and journal.stat().st_size, run)
    run.kill()
    run.communicate()
    n_done = journal.read_bytes().count(b'\n')
    assert 0 < n_done < 900 and not (data / 'train.bin').exists()
    for name in ('chats.part.bin', 'journal.part.jsonl'):  # a row that was not whole
        with open(data / name, 'ab') as file:
            file.write(b'{')
    again = succeeded(prepare('chat', *arguments))
    assert f'continuing after {n_done} rows' in again.stderr and again.stdout == said
    assert {path.name: path.read_bytes() for path in data.glob('*.*')} == {
        path.name: path.read_bytes() for path in whole.glob('*.*')}

    # other rows, another template, a file of tokens that is gone, and what another version has
    # written, start over
    for change in ('rows', 'template', 'tokens', 'version'):
        run = start(ROOT / 'data' / 'chat' / 'prepare.py', *arguments)
        wait_for('rows', lambda: journal.exists() and journal.stat().st_size, run)
        run.kill()
        run.communicate()
        if change == 'rows':
            shutil.copy(tmp_path / 'killed' / 'chats.jsonl', tmp_path / 'killed' / 'more.jsonl')
            arguments[0] = tmp_path / 'killed' / 'more.jsonl'
        elif change == 'template':
            settings = chatting / 'tokenizer_config.json'
            templates = json.loads(settings.read_text())['chat_template']
            templates[0]['template'] += '{# other #}'  # which writes the same
            edit_json(settings, chat_template=templates)
        elif change == 'tokens':
            (data / 'chats.part.bin').unlink()
        else:
            source = json.loads((data / 'source.part.json').read_text())
            del source['version']  # an earlier one
            (data / 'source.part.json').write_text(json.dumps(source))
        assert 'continuing' not in succeeded(prepare('chat', *arguments)).stderr
        assert (data / 'train.bin').read_bytes() == (whole / 'train.bin').read_bytes()


@pytest.mark.parametrize('change', ['tokenizer', 'template', 'file'])
def test_work_with_another_tokenizer_template_or_content_is_done_again(chatting, tmp_path, change):
    succeeded(prepare_chats([2, 1, 6], chatting, tmp_path))
    arguments = [tmp_path / 'chats.jsonl', f'--tokenizer={chatting}', '--out_dir']
    run = start('-c', INTERRUPTED_PREPARE, ROOT / 'data' / 'chat' / 'prepare.py', *arguments, tmp_path / 'again')
    run.communicate()
    assert run.returncode == 3 and (tmp_path / 'again' / 'journal.part.jsonl').exists()
    if change == 'tokenizer':
        content = json.loads((chatting / 'tokenizer.json').read_text())
        vocab = content['model']['vocab']
        vocab['a'], vocab['b'] = vocab['b'], vocab['a']
        (chatting / 'tokenizer.json').write_text(json.dumps(content))
    elif change == 'template':
        arguments.insert(2, '--template=plain')
    else:  # in place, and as long as before
        text = arguments[0].read_text()
        arguments[0].write_text(text.replace('"content": "a"', '"content": "b"'))
    for out in ('again', 'anew'):
        succeeded(prepare('chat', *arguments, tmp_path / out))
    before, again, anew = ((tmp_path / out / 'train.bin').read_bytes() for out in ('data', 'again', 'anew'))
    assert again == anew != before


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, 'wait4'), reason='Unix only')
def test_conversations_are_prepared_in_a_few_bytes_of_memory_per_token(chatting, tmp_path):
    n_tokens, peaks = [], []
    for n in (200, 2200):
        line = json.dumps({'messages': [CHAT, {'role': 'assistant', 'content': 'abcdefgh' * 125}]})
        (tmp_path / 'chats.jsonl').write_text(f'{line}\n' * n)
        process = start(ROOT / 'data' / 'chat' / 'prepare.py', tmp_path / 'chats.jsonl', f'--tokenizer={chatting}',
                        f'--out_dir={tmp_path / str(n)}', stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        assert status == 0, process.stderr.read()
        process.stderr.close()
        peaks.append(usage.ru_maxrss * (1 if sys.platform == 'darwin' else 1024))
        n_tokens.append(sum((tmp_path / str(n) / f'{split}.bin').stat().st_size // 2 for split in ('train', 'val')))
    slope = (peaks[1] - peaks[0]) / (n_tokens[1] - n_tokens[0])
    assert slope < 12  # 5, of which 3 are the files, mapped; lists of Python's ints took 30


def test_rows_too_short_for_any_token_that_counts_are_refused(chatting, tmp_path):
    said = succeeded(prepare_chats([2, 1, 2], chatting, tmp_path, '--rows=4')).stdout
    assert '; 1 longer than a row were cut, 0 left out' in said
    assert_refused(prepare_chats([2, 1, 2], chatting, tmp_path, '--rows=2'), 'no token of a part counts')
    assert_refused(prepare_chats([2, 1, 2], chatting, tmp_path, '--rows=-2'), "invalid positive value: '-2'")


def test_an_epoch_holds_every_row_once_and_each_process_reads_its_own_rows():
    tokens, mask = make_rows(7)
    source = open_source(tokens, mask, block_size=BLOCK, seed=5)
    drawn = np.concatenate([source.draw(2 * i + np.arange(2))['x'] for i in range(7)]).reshape(2, 7, BLOCK)
    assert sorted(drawn[0].tolist()) == sorted(drawn[1].tolist()) == sorted(tokens[:, :-1].tolist())
    assert (drawn[0] != drawn[1]).any()
    whole, part = (source.draw(12 + np.arange(4), rows) for rows in (np.arange(4), np.array([2, 3])))
    for name in ('weight', 'start', 'padding'):
        np.testing.assert_array_equal(part[name], whole[name][2:])
    np.testing.assert_array_equal(whole['padding'], whole['x'] == 0)  # a user's text is none
    assert whole['weight'].mean() == pytest.approx(1) and len(np.unique(whole['weight'])) == 2


# -----------------------------------------------------------------------------
# the model

@pytest.mark.slow
@pytest.mark.parametrize('name, attention', [
    *[(name, 'xla') for name in CONFIGS],
    *[(name, 'chunked') for name in ('windows, sinks, caps', 'chunks')]])
def test_a_conversation_in_a_row_has_the_loss_and_the_gradients_that_it_has_alone(name, attention):
    config = dataclasses.replace(CONFIG, **CONFIGS[name], attention=attention)
    params, (tokens, mask) = random_params(config), make_rows(1)
    batch = read_row(tokens, mask, 0)
    bounds = np.append(np.flatnonzero(mask[0] == 2), BLOCK + 1)
    assert len(bounds) > 4

    def total(params, batch):
        loss_BxT = GPT(config).apply({'params': params}, batch['x'], batch['y'], start_BxT=batch.get('start'),
                                     method='loss')
        return (loss_BxT * batch['weight']).sum() / 100, loss_BxT

    def alone(start, end):
        """The conversation at the start of a row of its own; what follows it cannot be seen by it."""
        ids, counts = np.zeros_like(tokens), np.zeros_like(mask)
        ids[0, :end - start], counts[0, :end - start] = tokens[0, start:end], mask[0, start:end]
        only = read_row(ids, counts, 0)
        del only['start']
        return only

    grad = jax.jit(jax.grad(total, has_aux=True))
    gradients, losses = grad(params, batch)
    spans = list(zip(bounds, bounds[1:]))[:-1]  # without the padding
    parts = [grad(params, alone(*span)) for span in spans]
    for (_, loss), (first, end) in zip(parts, spans):
        np.testing.assert_allclose(losses[0, first:end - 1], loss[0, :end - first - 1], atol=1e-5)
    jax.tree.map(lambda got, *each: np.testing.assert_allclose(got, sum(each), atol=1e-5), gradients,
                 *[part for part, _ in parts])
    del batch['start']
    assert abs(np.asarray(grad(params, batch)[1] - losses) * batch['weight']).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize('spans', [dict(window=40), {}])
def test_the_kernel_for_tpus_and_chunked_attention_keep_conversations_apart(spans):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 256, n, 64)).astype(np.float32) for n in (4, 2, 2))
    start = np.sort(rng.choice([0, 30, 31, 140], size=(2, 256)), axis=1)
    start = np.maximum.accumulate(np.where(np.diff(start, axis=1, prepend=-1) > 0, np.arange(256), 0), axis=1)
    index = np.arange(256)
    mask = (index[None, None] <= index[None, :, None]) & (index[None, None] >= start[:, :, None])
    if spans:
        mask = mask & (index[None, None] > index[None, :, None] - 40)

    def values_and_gradients(attention, **options):
        total = lambda q, k, v: jnp.sin(attention(q, k, v, **options)).sum()
        return jax.tree.leaves(jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v))

    scores = Scores(scale=0.1, **spans)
    kernel = splash_kernel(256, 4, scores, interpret=True)
    expected = values_and_gradients(dot_product_attention, scale=0.1, mask_BxTxS=mask)
    chunked = lambda q, k, v: chunked_attention(Qkv(q, k, v, start), scores)
    splash = lambda q, k, v: splash_attention(Qkv(q, k, v, start.astype(np.int32)), scores, kernel=kernel)
    for got in (values_and_gradients(chunked), values_and_gradients(splash)):
        for a, b in zip(got, expected):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize('axes', [dict(tp_size=2, fsdp=2), dict(context=4, tp_size=2)])
@pytest.mark.parametrize('spans', [{}, dict(window=40), dict(chunk=24)])
def test_conversations_stay_apart_on_a_mesh(spans, axes):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(4, 160, n, 8)).astype(np.float32) for n in (4, 2, 2))
    start = find_starts(make_rows(4)[1][:, :-1])
    attention = lambda q, k, v, start=None: fused_causal_attention('chunked', Qkv(q, k, v, start), Scores(**spans))
    n_devices = int(np.prod(list(axes.values())))
    mesh = create_mesh(jax.devices()[:n_devices], **{'tp_size': 1} | axes)

    def on_mesh(q, k, v, start):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attention(q, k, v, start)

    heads, rows = (NamedSharding(mesh, spec) for spec in (P(BATCH, 'context', 'tensor'), P(BATCH, 'context')))
    sharded = jax.jit(on_mesh)(*jax.device_put((q, k, v), heads), jax.device_put(start, rows))
    np.testing.assert_allclose(sharded, jax.jit(attention)(q, k, v, start), atol=1e-5)
    assert abs(np.asarray(sharded) - np.asarray(jax.jit(attention)(q, k, v))).max() > 0.1


@pytest.mark.slow
def test_every_counted_token_weighs_the_same_on_any_micro_batches_and_devices():
    config = dataclasses.replace(CONFIG, **CONFIGS['llama'], n_layer=1, attention='chunked')
    (tokens, mask), curves, evaluated = make_rows(12), [], []
    tx, params = optax.adam(1e-2), random_params(config)
    source = open_source(tokens, mask, block_size=BLOCK, seed=0)

    def draw(i, rows):
        return source.draw(8 * i + np.arange(8), rows)

    initial = TrainState.create(apply_fn=None, params=params, tx=tx)
    for accumulation, layout in ((1, (1,)), (4, (1,)), (1, (4,)), (2, (4, 2, 2)), (1, (4, 1, 1, 1, 2))):
        parallel = setup_distributed_training(jax.devices()[:layout[0]], *layout[1:])
        state = parallel.device_put(initial)
        step = parallel.jit_step(make_step(config, parallel))
        curve = []
        for i in range(3):
            rows = parallel.local_rows(8)
            batch = draw(i, rows) | {'seq_id': rows.astype(np.uint32)}
            shape = split_batch(accumulation, 8 // accumulation, parallel.n_data_shards)
            state, metrics = step(state, parallel.shard_batch(batch, shape))
            curve.append([float(metrics[name]) for name in ('loss', 'grad_norm')])
        curves.append(curve)
        eval_step = parallel.jit_eval_step(make_eval_step(config, language_model))
        loss = estimate_loss_jax(eval_step, state.params, {'val': source}, parallel, batch_size=2, eval_iters=6,
                                 token_bytes=np.arange(41) % 4)
        evaluated.append([loss['val']['loss'], loss['val']['bpb']])
    np.testing.assert_allclose(curves[1:], [curves[0]] * (len(curves) - 1), rtol=1e-4)
    np.testing.assert_allclose(evaluated[1:], [evaluated[0]] * (len(curves) - 1), rtol=1e-4)

    batch = draw(0, np.arange(8))  # the first loss is the mean over the counted tokens of all rows
    loss = GPT(config).apply({'params': params}, batch['x'], batch['y'], start_BxT=batch['start'], method='loss')
    assert curves[0][0][0] == pytest.approx(float(loss[batch['weight'] > 0].mean()), rel=1e-5)


# -----------------------------------------------------------------------------
# the choice of attention, and the script

def test_auto_takes_chunked_attention_for_packed_rows_where_cudnn_would_be_and_says_why(monkeypatch):
    monkeypatch.setattr(jax_devices.choose, 'compile_cudnn', lambda *args: None)
    client = types.SimpleNamespace(platform_version='PJRT C API\ncuda 13000')
    gpu = types.SimpleNamespace(platform='gpu', device_kind='NVIDIA H200', compute_capability='9.0', client=client)
    config = dataclasses.replace(TINY, block_size=2048, dtype='bfloat16')
    assert choose_attention('auto', config, gpu)[0] == 'cudnn'
    assert choose_attention('auto', config, gpu, packed=True) == (
        'chunked', 'never stores the scores; not cudnn: it does not keep the conversations of a row apart')
    with pytest.raises(UserError, match='attention=cudnn does not work here: it does not keep'):
        choose_attention('cudnn', config, gpu, packed=True)
    with pytest.raises(UserError, match='cudnn attention has no sinks, cap of scores or packed rows'):
        fused_causal_attention(
            'cudnn', Qkv(*np.zeros((3, 1, 8, 2, 8), np.float32), np.zeros((1, 8), np.int32)), Scores())


def test_a_run_on_packed_rows_learns_and_resumes_exactly(chatting, tmp_path):
    said = succeeded(prepare_chats(np.random.default_rng(0).integers(1, 12, size=60), chatting, tmp_path,
                                   '--rows=32')).stdout
    assert ' rows; 0 longer than a row were cut, 0 left out' in said
    data = tmp_path / 'data'
    flags = [f'--dataset={data}', f'--init_from={chatting}', '--batch_size=2', '--gradient_accumulation_steps=2',
             '--eval_iters=2', '--eval_interval=3', '--learning_rate=1e-2', '--device=cpu:0', '--dtype=float32',
             '--warmup_iters=0', '--decay_lr=False']
    succeeded(train(tmp_path / 'out', *flags, '--block_size=32', '--max_iters=6'))
    losses = [record['val_loss'] for record in read_metrics(tmp_path / 'out') if 'val_loss' in record]
    assert losses[-1] < losses[0]
    succeeded(train(tmp_path / 'again', *flags, '--block_size=32', '--max_iters=3'))
    succeeded(train(tmp_path / 'again', *RESUME, '--max_iters=6'))
    assert final_state(tmp_path / 'again') == final_state(tmp_path / 'out')
    assert_refused(train(tmp_path / 'none', *flags, '--block_size=16'),
                   'has rows for block_size=32, not ')
    assert not (tmp_path / 'none').exists()
