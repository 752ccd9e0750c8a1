"""What jax_train_utils.py promises."""
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_train_utils as utils
from jax_train_utils import *
from jax_pretrained import load_pretrained
from jax_ops import UserError
from jax_transformer import GPT, GPTConfig, create_train_state

TINY = GPTConfig(block_size=16, vocab_size=37, n_layer=2, n_head=2, n_embd=16)

# -----------------------------------------------------------------------------
# flags

SCRIPT = '''"""A script."""
# -----------------------------------------------------------------------------
batch_size = 12 # sequences
learning_rate = 6e-4 # the highest
start = 'A # b' # the prompt
compile = True # no effect
# -----------------------------------------------------------------------------
other = 3 # not a knob
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'config.py').write_text('import math\nbatch_size = 4 * 8 # arithmetic\nlearning_rate = 1\n')
    namespace = {}
    exec(SCRIPT, namespace)

    def read(*argv):
        return utils.read_flags(tmp_path / 'script.py', namespace, [arg.replace('CONFIG', str(tmp_path / 'config.py')) for arg in argv])
    return read


def test_flags_and_config_files_apply_in_the_order_given(script):
    assert script()[0] == {'batch_size': 12, 'learning_rate': 6e-4, 'start': 'A # b', 'compile': True}
    config, given = script('--batch_size=3', 'CONFIG', '--compile=False')
    assert config == {'batch_size': 32, 'learning_rate': 1.0, 'start': 'A # b', 'compile': False}
    assert given == {'batch_size': 32, 'learning_rate': 1.0, 'compile': False} and type(config['learning_rate']) is float
    assert script('CONFIG', '--batch_size=3')[0]['batch_size'] == 3
    assert script('--batch_size=3', 'CONFIG')[1]['batch_size'] == 32


def test_a_value_may_hold_equals_signs_and_a_prompt_may_look_like_a_number(script):
    assert script('--start=a=b')[0]['start'] == 'a=b'
    assert script('--start=123')[0]['start'] == '123'
    assert script('--start=')[0]['start'] == ''
    assert script('--learning_rate=1e-3')[0]['learning_rate'] == 1e-3


@pytest.mark.parametrize('arg, message', [
    ('--batch_sise=3', 'unknown flag --batch_sise; did you mean --batch_size'), ('--zzz=3', '--help lists all'), ('--batch_size', '--name=value'),
    ('--batch_size=1.5', '--batch_size takes a value of type int'), ('--compile=1', 'type bool'), ('--learning_rate=fast', 'type float'),
    ('--other=4', 'unknown flag'), ('nosuchfile.py', 'no config file nosuchfile.py')])
def test_a_flag_that_is_wrong_is_refused_by_name(script, arg, message):
    with pytest.raises(UserError, match=message):
        script(arg)


def test_a_config_file_that_is_wrong_is_refused(script, tmp_path):
    for text, message in (('batch_sise = 3', 'unknown flag --batch_sise'), ('batch_size = ', 'SyntaxError'), ('batch_size = 1 / 0', 'ZeroDivisionError'),
                          ('batch_size = "12"', 'type int')):
        (tmp_path / 'config.py').write_text(text)
        with pytest.raises(UserError, match=message):
            script('CONFIG')


def test_help_prints_every_knob_with_its_default_and_comment(script, capsys):
    with pytest.raises(SystemExit) as exit:
        script('--help')
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert '--batch_size=12  # sequences\n' in out and "--start='A # b'  # the prompt\n" in out and 'other' not in out


# -----------------------------------------------------------------------------
# the end


PRINTS = """
import sys
from jax_train_utils import exit_on_user_error
sys.excepthook = exit_on_user_error
print('first', flush=True)
sys.stdin.read()  # until the reader has gone
print('second' * {times})
{then}
"""


@pytest.mark.parametrize('options, times, then, code', [
    ([], 10**5, '', 141), (['-u'], 1, '', 141), ([], 1, '', 0),  # in a buffer to the very end
    ([], 1, 'raise ValueError("a bug")', 1)])
def test_a_reader_that_goes_away_ends_a_script_quietly(options, times, then, code):
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}
    with subprocess.Popen([sys.executable, *options, '-c', PRINTS.format(times=times, then=then)], cwd=Path(utils.__file__).parent,
                          env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'first\n'
        process.stdout.close()
        process.stdin.close()
        err = process.stderr.read()
    assert process.returncode == code
    assert err.splitlines()[-1:] == ['ValueError: a bug'] if then else err == ''


def test_a_broken_pipe_elsewhere_stays_a_traceback(capsys):
    error = BrokenPipeError('of a socket')
    exit_on_user_error(BrokenPipeError, error, None)
    assert 'BrokenPipeError: of a socket' in capsys.readouterr().err


# -----------------------------------------------------------------------------
# devices


def test_rows_are_shared_by_devices_without_ever_exceeding_the_micro_batch():
    assert split_rows(40, 12, 1) == (40, 12)
    assert split_rows(40, 12, 8) == (5, 12)
    assert split_rows(1, 64, 8) == (1, 8)
    assert split_rows(4, 12, 8) == (1, 6)
    for g, b, n in ((40, 12, 16), (6, 10, 4), (1, 8, 8)):
        n_micro, micro = split_rows(g, b, n)
        assert n_micro * micro * n == g * b and micro <= b
    with pytest.raises(UserError, match=r'12 sequences cannot be shared equally by 8 devices.*\[1, 2, 3, 4, 6\].*multiple of 8'):
        split_rows(1, 12, 8)


def test_device_flag():
    assert len(check_device_availability('cpu')) == len(check_device_availability('auto')) == 8
    assert check_device_availability('cpu:3') == [jax.devices()[3]]
    for device, message in (('cpu:8', 'there are 8'), ('cuda', 'jax sees no cuda here, only cpu'), ('mps', 'no MPS'), ('cpu:x', 'device must be')):
        with pytest.raises(UserError, match=message):
            check_device_availability(device)


def test_cpu_computes_in_float32_unless_asked():
    assert setup_jax_environment('cpu')[1:] == ('float32', 'the CPU default')
    assert setup_jax_environment('cpu', 'bfloat16')[1] == 'bfloat16'
    with pytest.raises(UserError, match='dtype must be auto, float32, bfloat16, float16'):
        setup_jax_environment('cpu', 'float64')


@pytest.mark.parametrize('kind, peak', [('NVIDIA H200', 989e12), ('NVIDIA A100-SXM4-40GB', 312e12), ('TPU v5 lite', 197e12), ('cpu', None),
                                        ('NVIDIA H100 PCIe', 756e12), ('TPU v4', 275e12)])
def test_peak_flops_are_known_or_none(kind, peak):
    class Device:
        device_kind = kind
    assert device_peak_flops(Device) == peak


# -----------------------------------------------------------------------------
# data


def write_dataset(folder, train, val, vocab_size=37, dtype='uint16', chars=None):
    folder.mkdir(exist_ok=True, parents=True)
    np.asarray(train, dtype).tofile(folder / 'train.bin')
    np.asarray(val, dtype).tofile(folder / 'val.bin')
    tokenizer = {'kind': 'char', 'chars': chars or ''.join(chr(48 + i) for i in range(vocab_size))}
    (folder / 'meta.json').write_text(json.dumps({'vocab_size': vocab_size, 'dtype': dtype, 'tokenizer': tokenizer}))
    return folder


def test_targets_are_the_next_tokens_and_batches_a_function_of_seed_and_iteration():
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = get_batch_jax(tokens, 16, 12, 1337, 5)
    assert x.shape == y.shape == (12, 16) and x.dtype == np.int32
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(x, get_batch_jax(tokens, 16, 12, 1337, 5)[0])
    for other in ((1338, 5), (1337, 6)):
        assert not np.array_equal(x, get_batch_jax(tokens, 16, 12, *other)[0])


def test_the_sequences_do_not_depend_on_how_they_are_batched():
    tokens = np.arange(500, dtype=np.uint16)
    one = np.concatenate([get_batch_jax(tokens, 16, 4, 7, i)[0] for i in range(30)])
    np.testing.assert_array_equal(one, np.concatenate([get_batch_jax(tokens, 16, 12, 7, i)[0] for i in range(10)]))


@pytest.mark.parametrize('n', [17, 18, 33, 40, 500])
def test_an_epoch_shows_every_window_once_and_the_next_one_others(n):
    tokens = np.arange(n, dtype=np.uint16)
    n_windows = utils.count_windows(n, 16)
    first, second = (get_batch_jax(tokens, 16, n_windows, 7, i)[0] for i in (0, 1))
    assert len(np.unique(first)) == first.size >= min(n - 1, max(16, n - 3 * 16))
    assert n < 40 or not np.array_equal(np.sort(first, 0), np.sort(second, 0))
    assert first.max() <= n - 2  # there is a target for the last one


@pytest.mark.parametrize('dtype', ['uint16', 'uint32'])
def test_a_dataset_is_read_as_its_meta_json_says(tmp_path, dtype):
    write_dataset(tmp_path, np.arange(30), np.arange(20), dtype=dtype)
    splits, vocab_size, tokenizer = load_dataset(tmp_path, 8)
    assert splits['train'].tolist() == list(range(30)) and splits['val'].tolist() == list(range(20))
    assert vocab_size == 37 and tokenizer['kind'] == 'char'


def test_a_folder_without_meta_json_is_nanogpts_bpe(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    (tmp_path / 'meta.json').unlink()
    assert load_dataset(tmp_path, 8)[1:] == (50257, {'kind': 'gpt2'})


def test_the_tokenizer_of_a_dataset_is_found_without_its_tokens(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    for split in ('train', 'val'):
        (tmp_path / f'{split}.bin').unlink()
    assert load_dataset_meta(tmp_path)['tokenizer']['kind'] == 'char'
    (tmp_path / 'meta.json').unlink()
    with pytest.raises(UserError, match='there is no .*train.bin'):  # else it would pass for nanoGPT's
        load_dataset_meta(tmp_path)


def test_a_dataset_that_cannot_be_used_is_refused(tmp_path):
    good = functools.partial(write_dataset, tmp_path, np.arange(30), np.arange(20))
    with pytest.raises(UserError, match='there is no .*train.bin'):
        load_dataset(tmp_path / 'nothing', 8)
    good()
    (tmp_path / 'prepare.py').touch()
    (tmp_path / 'val.bin').unlink()
    with pytest.raises(UserError, match='no .*val.bin; run: python .*prepare.py'):
        load_dataset(tmp_path, 8)
    good()
    with pytest.raises(UserError, match='val.bin has 20 tokens, and block_size=20 needs 21'):
        load_dataset(tmp_path, 20)
    good()
    (tmp_path / 'train.bin').write_bytes((tmp_path / 'train.bin').read_bytes()[:-1])
    with pytest.raises(UserError, match='59 bytes, not a multiple of 2'):
        load_dataset(tmp_path, 8)
    good(vocab_size=29)
    with pytest.raises(UserError, match='token id 29, outside the vocabulary of 29'):
        load_dataset(tmp_path, 8)
    for meta, message in (('{"vocab_size":', 'damaged'), ('{}', 'damaged'), ('{"vocab_size": 5, "dtype": "int64", "tokenizer": {}}', 'int64'),
                          ('{"vocab_size": 28.5, "dtype": "uint16", "tokenizer": {}}', '28.5'),
                          ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": null}', 'damaged'),
                          ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "word"}}', 'tokenizer is neither'),
                          ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "char", "chars": "ab"}}', 'tokenizer is neither')):
        (tmp_path / 'meta.json').write_text(meta)
        with pytest.raises(UserError, match=message):
            load_dataset(tmp_path, 8)
    (tmp_path / 'meta.json').unlink()
    (tmp_path / 'meta.pkl').touch()
    with pytest.raises(UserError, match='pickle'):
        load_dataset(tmp_path, 8)


def test_characters_the_vocabulary_lacks_are_named():
    tokenizer = load_tokenizer({'kind': 'char', 'chars': '\nabc'})
    assert tokenizer.decode(tokenizer.encode('cab\n')) == 'cab\n' and tokenizer.vocab_size == 4
    with pytest.raises(UserError, match="does not know: 'd' 'x'"):
        tokenizer.encode('axd')
    with pytest.raises(UserError, match='unknown kind'):
        load_tokenizer({'kind': 'words'})


def test_text_that_ends_within_a_character_is_shown_up_to_it():
    import tiktoken
    byte_tokens = tiktoken.Encoding('bytes', pat_str='.', mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={})
    text = 'é 10 € 😀!'
    shown = [whole_characters(byte_tokens.decode(list(text.encode()[:n]))) for n in range(len(text.encode()) + 1)]
    assert all(text.startswith(s) for s in shown) and shown[-1] == text and len(set(shown)) == len(text) + 1


def test_gpt2_bpe_without_a_network_says_what_to_do(monkeypatch):
    import tiktoken

    def fail(name):
        raise ConnectionError('no route')
    monkeypatch.setattr(tiktoken, 'get_encoding', fail)
    with pytest.raises(UserError, match='TIKTOKEN_CACHE_DIR'):
        load_tokenizer({'kind': 'gpt2'})


# -----------------------------------------------------------------------------
# optimizer and schedule


@pytest.mark.parametrize('warmup', [0, 1, 10])
def test_the_schedule_is_nanogpts(warmup):
    def nanogpt(it, top=1e-3, low=1e-4, decay=100):
        if it < warmup:
            return top * (it + 1) / (warmup + 1)
        if it > decay:
            return low
        return low + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (decay - warmup))) * (top - low)

    schedule = create_learning_rate_schedule(1e-3, warmup_iters=warmup, lr_decay_iters=100, min_lr=1e-4)
    np.testing.assert_allclose([schedule(i) for i in range(130)], [nanogpt(i) for i in range(130)], rtol=1e-5)
    assert create_learning_rate_schedule(1e-3, decay_lr=False)(57) == pytest.approx(1e-3)
    with pytest.raises(UserError, match='lr_decay_iters=10 must be more than warmup_iters=10'):
        create_learning_rate_schedule(1e-3, warmup_iters=10, lr_decay_iters=10)


def test_clipping_is_torchs():
    grads = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[4.0]])}
    clipped, norm = clip_gradients(grads, 1.0)
    assert norm == 5 and optax.tree.norm(clipped) == pytest.approx(1, abs=1e-5)
    for unclipped in (clip_gradients(grads, 0.0)[0], clip_gradients(grads, 6.0)[0]):
        np.testing.assert_array_equal(unclipped['a'], grads['a'])


def test_decay_touches_matrices_and_embeddings_only():
    tx = create_optimizer_with_schedule(lambda step: 0.1, weight_decay=0.5)
    state = create_train_state(jax.random.key(0), TINY, tx)
    state = state.replace(params=jax.tree.map(jnp.ones_like, state.params))
    after = state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, state.params)).params
    for path, p in jax.tree_util.tree_leaves_with_path(after):
        np.testing.assert_allclose(p, 0.95 if p.ndim >= 2 else 1.0, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


# -----------------------------------------------------------------------------
# the training step


@functools.cache
def compiled_once(n_devices, config):
    schedule = create_learning_rate_schedule(1e-2, decay_lr=False)
    state = create_train_state(jax.random.key(0), config, create_optimizer_with_schedule(schedule))
    parallel = setup_distributed_training(jax.devices()[:n_devices])
    return parallel, jax.tree.map(np.asarray, state), parallel.train_step(make_train_step(config, 3, 1.0, schedule))


def make_run(n_devices=1, config=TINY):
    """(parallel, fresh state, step) of a tiny run."""
    parallel, state, step = compiled_once(n_devices, config)
    return parallel, parallel.put(state), step


def rows(n_rows, i, config=TINY):
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=4000).astype(np.uint16)
    x, y = get_batch_jax(tokens, config.block_size, n_rows, 0, i)
    return {'x': x, 'y': y, 'row': (i * n_rows + np.arange(n_rows)).astype(np.uint32)}


def train(n_iters, n_devices=1, g=1, b=8, config=TINY):
    parallel, state, step = make_run(n_devices, config)
    log = []
    for i in range(n_iters):
        state, metrics = step(state, parallel.place(rows(g * b, i, config), split_rows(g, b, n_devices)))
        log.append({k: float(v) for k, v in metrics.items()})
    return state, log


@jax.jit
def mean_loss(params, x, y):
    return cross_entropy(GPT(TINY).apply({'params': params}, x), y).mean()


DROPOUT_ON = dataclasses.replace(TINY, dropout=0.2)


def test_micro_steps_make_the_update_of_the_big_batch():
    big, big_log = train(3, g=1, b=8, config=DROPOUT_ON)
    for g, b in ((8, 1), (2, 4)):
        small, log = train(3, g=g, b=b, config=DROPOUT_ON)
        for a, c in zip(big_log, log):
            assert a == pytest.approx(c, rel=1e-4)
        assert jax.tree.all(jax.tree.map(lambda a, c: np.allclose(a, c, atol=2e-4), big.params, small.params))


@pytest.mark.parametrize('n_devices', [2, 8])
def test_several_devices_give_the_curve_of_one(n_devices):
    one, several = (train(30, n, g=2, b=8, config=DROPOUT_ON)[1] for n in (1, n_devices))
    np.testing.assert_allclose([m['loss'] for m in several], [m['loss'] for m in one], atol=2e-4)
    np.testing.assert_allclose([m['grad_norm'] for m in several], [m['grad_norm'] for m in one], rtol=5e-3)


def test_replicas_stay_equal_to_the_bit():
    state, _ = train(5, 8, config=DROPOUT_ON)
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == 8 and all(np.array_equal(copies[0], c) for c in copies)


def test_the_state_is_donated():
    for n_devices in (1, 8):
        parallel, state, step = make_run(n_devices)
        step(state, parallel.place(rows(8, 0), split_rows(1, 8, n_devices)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_the_loss_is_the_mean_over_all_micro_steps_and_devices():
    parallel, state, step = make_run(4)
    batch = rows(16, 0)
    expected = mean_loss(state.params, batch['x'], batch['y'])
    _, metrics = step(state, parallel.place(batch, split_rows(8, 2, 4)))
    assert float(metrics['loss']) == pytest.approx(float(expected), rel=1e-5)


def test_the_logged_learning_rate_is_the_one_applied():
    schedule = create_learning_rate_schedule(1e-2, warmup_iters=3, lr_decay_iters=6, min_lr=1e-3)
    config = TINY
    state = create_train_state(jax.random.key(0), config, optax.sgd(schedule))
    step = jax.jit(make_train_step(config, 0, 0.0, schedule))
    for i in range(8):
        before = state.params
        state, metrics = step(state, DataParallel(jax.devices()[:1]).place(rows(8, i), (1, 8)))
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, before, state.params))
        assert moved / metrics['grad_norm'] == pytest.approx(float(metrics['lr']), rel=1e-3)
        assert metrics['lr'] == pytest.approx(float(schedule(i)))


@pytest.mark.parametrize('name', ['train', 'train_no_bias'])
def test_five_steps_of_adamw_with_clipping_are_torchs(name):
    folder = Path(__file__).parent / 'golden' / name
    golden = np.load(folder / 'steps.npz')
    config, params = load_pretrained(folder / 'ckpt.pt')
    schedule = lambda step: jnp.asarray(golden['lrs'])[step]
    state = create_train_state(jax.random.key(0), config, create_optimizer_with_schedule(schedule)).replace(params=params)
    step = jax.jit(make_train_step(config, 0, 1.0, schedule))
    assert (golden['grad_norms'] > 1).any()  # clipping acts
    for x, y, loss, grad_norm in zip(golden['x'], golden['y'], golden['losses'], golden['grad_norms']):
        batch = {'x': x[None], 'y': y[None], 'row': np.zeros((1, len(x)), np.uint32)}
        state, metrics = step(state, batch)
        assert float(metrics['loss']) == pytest.approx(float(loss), abs=1e-5)
        assert float(metrics['grad_norm']) == pytest.approx(float(grad_norm), abs=1e-5)
    logits = GPT(config).apply({'params': state.params}, golden['x'][0])
    np.testing.assert_allclose(logits, golden['logits_after'], atol=1e-4)


# -----------------------------------------------------------------------------
# float16


HALF = dataclasses.replace(TINY, dtype='float16')


def test_float16_trains_like_float32_and_scales_its_loss():
    full, half = train(10, g=2)[1], train(10, g=2, config=HALF)[1]
    np.testing.assert_allclose([m['loss'] for m in half], [m['loss'] for m in full], atol=0.02)
    assert half[0]['loss_scale'] == 2**16 and 'loss_scale' not in full[0]


def test_an_overflow_skips_the_update_and_halves_the_scale_and_2000_good_steps_double_it():
    parallel, state, step = make_run(config=HALF)
    state = state.replace(loss_scale={'scale': jnp.float32(2.0**40), 'good_steps': jnp.int32(7)})
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, parallel.place(rows(8, 0), (1, 8)))
    assert not np.isfinite(metrics['grad_norm']) and np.isfinite(metrics['loss'])
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    assert state.loss_scale == {'scale': 2.0**39, 'good_steps': 0} and state.step == 0
    state = state.replace(loss_scale={'scale': jnp.float32(8), 'good_steps': jnp.int32(1999)})
    state, metrics = step(state, parallel.place(rows(8, 1), (1, 8)))
    assert state.loss_scale == {'scale': 16, 'good_steps': 0} and state.step == 1 and np.isfinite(metrics['grad_norm'])


# -----------------------------------------------------------------------------
# evaluation


def test_evaluation_is_the_mean_of_the_same_windows_on_any_number_of_devices(tmp_path):
    write_dataset(tmp_path, np.arange(3000) % 37, np.arange(2000) % 31)
    splits = load_dataset(tmp_path, 16)[0]
    results = []
    for n in (1, 2, 8):
        parallel, state, _ = make_run(n, DROPOUT_ON)
        results.append(estimate_loss_jax(parallel.eval_step(make_eval_step(DROPOUT_ON)), state.params, splits, parallel,
                                         block_size=16, batch_size=4, eval_iters=3))
    x, y = get_windows(splits['val'], np.arange(12) * (2000 - 17) // 11, 16)
    expected = mean_loss(state.params, x, y)
    for result in results:
        assert result['val'] == pytest.approx(float(expected), rel=1e-5)
        assert result['train'] == pytest.approx(results[0]['train'], rel=1e-5) and result['train'] != result['val']


# -----------------------------------------------------------------------------
# checkpoints

META = {'model': dataclasses.asdict(dataclasses.replace(TINY, n_embd=256, dtype='float16')), 'iter_num': 0, 'best_val_loss': 1.0, 'tokenizer': {}, 'flags': {}, 'wandb_id': None}


def test_a_checkpoint_holds_the_state_of_its_iteration_although_training_goes_on_while_it_is_written(tmp_path):
    config = dataclasses.replace(TINY, n_embd=256, dtype='float16')  # large enough for writing to take a while
    parallel, state, step = make_run(8, config)
    advance = lambda state, i: step(state, parallel.place(rows(8, i), (1, 1)))[0]
    for i in range(6):
        state = advance(state, i)
    expected = jax.tree.map(np.array, (state.params, optimizer_item(state)))

    state = make_run(8, config)[1]
    manager = open_checkpoints(tmp_path)
    for i in range(10):
        if i in (4, 6):
            save_checkpoint(manager, i, state, META, val_loss=1.0 / i)
        state = advance(state, i)  # donates what is being written
    finish_checkpoints(manager)
    iteration, meta = load_meta(tmp_path)
    tx = create_optimizer_with_schedule(lambda step: 0.1)
    abstract = parallel.abstract(create_train_state, jax.random.key(0), config, tx)
    restored = load_checkpoint(tmp_path, iteration, abstract)
    assert iteration == 6 and meta == json.loads(json.dumps(META))
    jax.tree.map(np.testing.assert_array_equal, (restored.params, optimizer_item(restored)), expected)
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path, 'latest')[1], expected[0])
    assert all(leaf.sharding == NamedSharding(parallel.mesh, P()) for leaf in jax.tree.leaves(restored.params))


def test_the_latest_and_the_best_checkpoint_are_kept(tmp_path):
    _, state, _ = make_run()
    manager = open_checkpoints(tmp_path)
    for i, val_loss in enumerate([3.0, 2.0, 1.0, None, 1.5, None, 1.2, 1.3], start=1):
        save_checkpoint(manager, i, state, META, val_loss)
    finish_checkpoints(manager)
    assert sorted(int(p.name) for p in (tmp_path / 'ckpt').iterdir()) == [3, 8]
    assert load_meta(tmp_path, 'best')[0] == 3 and load_meta(tmp_path, 'latest')[0] == 8


def test_without_an_evaluation_the_latest_is_the_best(tmp_path):
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 4, make_run()[1], META)
    finish_checkpoints(manager)
    assert load_meta(tmp_path, 'best')[0] == 4


def test_an_incomplete_checkpoint_does_not_count(tmp_path):
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 4, make_run()[1], META)
    finish_checkpoints(manager)
    (tmp_path / 'ckpt' / '9.orbax-checkpoint-tmp').mkdir()
    assert load_meta(tmp_path)[0] == 4


def test_a_folder_without_a_usable_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match='no complete checkpoint in .*train one with: python train_jax.py'):
        load_meta(tmp_path)
    assert not list(tmp_path.iterdir())  # looking leaves nothing behind
    (tmp_path / 'ckpt').mkdir()
    with pytest.raises(UserError, match='no complete checkpoint'):
        load_meta(tmp_path)
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 1, make_run()[1], {'some': 'thing'})
    finish_checkpoints(manager)
    with pytest.raises(UserError, match='damaged or not a checkpoint of this program'):
        load_meta(tmp_path)
    with pytest.raises(UserError, match='does not fit'):
        load_checkpoint(tmp_path, 1, make_run(config=dataclasses.replace(TINY, n_embd=32))[1])


def test_a_disk_that_is_full_is_said_in_one_line_and_the_old_checkpoint_stays(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 1, make_run()[1], META)
    manager.wait_until_finished()

    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(ocp.CheckpointManager, 'save', full)
    with pytest.raises(UserError, match='cannot write checkpoint 2 to .* MB are free.*No space left'):
        save_checkpoint(manager, 2, make_run()[1], META)
    assert load_meta(tmp_path)[0] == 1


# -----------------------------------------------------------------------------
# logs


def test_reopened_metrics_hold_each_iteration_once(tmp_path):
    log = MetricsLog(tmp_path)
    for i in range(5):
        log.write({'iter': i, 'loss': float(i)})
    log.write({'iter': 5, 'grad_norm': float('inf')})
    log.file.write('{"iter": 6, "lo')  # killed here
    assert read_metrics(tmp_path)[-1] == {'iter': 5, 'grad_norm': None}
    log = MetricsLog(tmp_path, 3)
    log.write({'iter': 3, 'loss': 3.5})
    assert [r['iter'] for r in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert read_metrics(tmp_path)[-1]['loss'] == 3.5


def test_the_loss_curves_become_a_picture(tmp_path):
    log = MetricsLog(tmp_path)
    for i in range(5):
        log.write({'iter': i, 'loss': 4.0 - i})
    log.write({'iter': 5, 'train_loss': 1.0, 'val_loss': 2.0})
    plot_losses(tmp_path)
    assert (tmp_path / 'loss.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
