"""nano_jax.py has the numbers of the product, and of PyTorch, with the same flags and seed; on four devices, too."""
import ast
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nano_jax
from jax_generate import generate
from jax_pretrained import load_pretrained
from jax_run.sources import Windows
from jax_train_utils import create_learning_rate_schedule
from jax_transformer import GPT, GPTConfig, init_params
from tests.common import (
    GOLDEN, ROOT, TEXT, long, random_params, random_tokens, records_of, run_script, succeeded, write_dataset)

FLAGS = {'block_size': 16, 'n_layer': 2, 'n_head': 2, 'n_embd': 32}
# accumulation, clipping, weight decay, and a schedule with a warm-up
TRAINING = {'gradient_accumulation_steps': 2, 'batch_size': 4, 'learning_rate': 1e-2, 'min_lr': 1e-3, 'warmup_iters': 3,
            'max_iters': 20, 'grad_clip': 0.5, 'eval_interval': 10, 'eval_iters': 2, 'log_interval': 1}
TOLERANCE = dict(rtol=0, atol=1e-5)


def make_cfg(**flags):
    return nano_jax.Config(**{**nano_jax.DEFAULTS, **FLAGS, 'vocab_size': 37, **flags})


def make_config(cfg):
    """The product's config of the same model."""
    return GPTConfig(block_size=cfg.block_size, vocab_size=cfg.vocab_size, n_layer=cfg.n_layer, n_head=cfg.n_head,
                     n_embd=cfg.n_embd, bias=cfg.bias)


def product_loss(params, config, x, y):
    return GPT(config).apply({'params': params}, x, y, method='loss').mean()


def assert_trees_agree(one, other, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other)):
        np.testing.assert_allclose(a, b, **tolerance, err_msg=jax.tree_util.keystr(path))


# -----------------------------------------------------------------------------
# one file

def test_it_has_at_most_280_lines_and_imports_jax_numpy_and_the_standard_library_alone():
    source = (ROOT / 'nano_jax.py').read_text(encoding='utf-8')
    assert len(source.splitlines()) <= 280
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition('.')[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition('.')[0])
    assert imported - sys.stdlib_module_names == {'jax', 'numpy', 'tiktoken'}  # tiktoken: of GPT-2's tokens alone


def test_a_command_trains_logs_as_nanogpt_and_prints_a_sample(dataset, tmp_path):
    # without the repository around it
    script = tmp_path / 'nano_jax.py'
    script.write_text((ROOT / 'nano_jax.py').read_text(encoding='utf-8'))
    result = succeeded(subprocess.run(
        [sys.executable, script, *as_flags({**FLAGS, **TRAINING}), f'--dataset={dataset}', '--max_new_tokens=30',
         '--start=the quick', '--temperature=0'],
        env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'), cwd=tmp_path, capture_output=True, text=True, timeout=300))
    lines = result.stdout.splitlines()
    assert lines[0].startswith('number of parameters: 0.0')
    assert sum(line.startswith('iter ') and ', time ' in line for line in lines) == 20
    assert [line.split(':')[0] for line in lines if line.startswith('step ')] == ['step 0', 'step 10', 'step 20']
    assert lines[-1].startswith('the quick') and len(lines[-1]) > 20


def test_other_data_and_unknown_flags_are_refused_in_a_line(dataset, tmp_path):
    meta = json.loads((dataset / 'meta.json').read_text())
    write_dataset(tmp_path / 'rows', np.zeros(34), np.zeros(34), chars=meta['tokenizer']['chars'], row_length=17)
    result = run_script('nano_jax.py', f'--dataset={tmp_path / "rows"}')
    assert result.returncode == 2 and 'texts of characters or of GPT-2 tokens' in result.stderr
    assert run_script('nano_jax.py', '--lerning_rate=1').returncode == 2
    result = run_script('nano_jax.py', f'--dataset={tmp_path / "none"}')
    assert result.returncode == 2 and 'has no data: run its prepare.py first' in result.stderr
    result = run_script('nano_jax.py', f'--dataset={dataset}', '--batch_size=12')  # the tests have 8 devices
    assert result.returncode == 2 and '8 devices cannot share 12 sequences' in result.stderr


def test_tokens_of_gpt2_need_tiktoken_and_have_a_padded_vocabulary(tmp_path, monkeypatch):
    bpe = types.SimpleNamespace(n_vocab=50257, encode_ordinary=list, decode=list)
    monkeypatch.setitem(sys.modules, 'tiktoken', types.SimpleNamespace(get_encoding={'gpt2': bpe}.get))
    write_dataset(tmp_path, [50256, 0, 7], [1, 2], tokenizer={'kind': 'gpt2'}, vocab_size=50257)
    splits, vocab_size, encode, decode = nano_jax.load_data(tmp_path)
    assert splits['train'].tolist() == [50256, 0, 7] and splits['val'].tolist() == [1, 2]
    assert vocab_size == 50304 and encode('ab') == ['a', 'b'] and decode([50256, 50257, 1]) == [50256, 1]


# -----------------------------------------------------------------------------
# the product's numbers

@pytest.mark.parametrize('bias', [False, True])
def test_new_parameters_are_the_products(bias):
    cfg = make_cfg(bias=bias)
    ours = nano_jax.init_params(jax.random.key(5), cfg)
    theirs = init_params(jax.random.key(5), make_config(cfg))
    # to the bit with the versions of constraints.txt; with jax 0.12 last bits differ
    is_exact = f'jax=={jax.__version__}' in (ROOT / 'constraints.txt').read_text().splitlines()
    tolerance = dict(rtol=0, atol=0 if is_exact else 1e-7)
    assert_trees_agree(ours, theirs, **tolerance)


@pytest.mark.parametrize('bias', [False, True])
def test_logits_and_gradients_are_the_products(bias):
    cfg = make_cfg(bias=bias)
    config = make_config(cfg)
    params = random_params(config)
    x, y = random_tokens(3, 16), random_tokens(3, 16, seed=1)
    logits, _ = nano_jax.forward(params, x, cfg)
    np.testing.assert_allclose(logits, GPT(config).apply({'params': params}, x), rtol=1e-5, atol=1e-5)
    ours = jax.value_and_grad(nano_jax.loss_fn)(params, x, y, cfg)
    theirs = jax.jit(jax.value_and_grad(product_loss), static_argnums=1)(params, config, x, y)
    assert_trees_agree(ours, theirs, **TOLERANCE)


def test_batches_are_the_products_over_three_epochs():
    tokens = np.random.default_rng(0).integers(37, size=500).astype(np.uint16)
    cfg = make_cfg(seed=7)
    starts = nano_jax.shuffled_starts(len(tokens), cfg)
    source = Windows(tokens, block_size=16, seed=7)
    for iter_num in range(10):
        x, y = nano_jax.read_windows(tokens, [next(starts) for _ in range(9)], 16)
        batch = source.draw(iter_num * 9 + np.arange(9))
        np.testing.assert_array_equal(x, batch['x'])
        np.testing.assert_array_equal(y, batch['y'])
    assert source.count_passes(10 * 9) == 3


@pytest.mark.parametrize(
    'flags', [dict(), dict(lr_decay_iters=30), dict(warmup_iters=90), dict(warmup_iters=0)], ids=str)
def test_the_learning_rate_is_the_products(flags):
    cfg = make_cfg(**{**TRAINING, 'max_iters': 50, **flags})
    warmup = 5 if flags.get('warmup_iters') == 90 else cfg.warmup_iters  # one that does not fit, see fitting_warmup
    schedule = create_learning_rate_schedule(
        cfg.learning_rate, warmup_iters=warmup, lr_decay_iters=cfg.lr_decay_iters or 50, min_lr=cfg.min_lr)
    for n in range(60):
        np.testing.assert_allclose(nano_jax.get_lr(n, cfg), schedule(n), rtol=1e-6)


def test_greedy_text_is_the_products():
    cfg = make_cfg(temperature=0.0, max_new_tokens=30, block_size=16)  # beyond block_size, too
    config = make_config(cfg)
    params = random_params(config)
    for prompt in ([3], [1, 2, 3, 4, 5], list(range(20))):
        theirs = generate(params, config, np.array([prompt]), 30, rng=jax.random.key(0), temperature=0)
        assert nano_jax.generate(params, prompt, cfg) == np.ravel(theirs).tolist()


def test_a_cache_and_the_whole_text_have_the_same_logits():
    cfg = make_cfg()
    params = random_params(make_config(cfg))
    ids = random_tokens(2, 16)
    cache = {f'h_{i}': {name: jnp.zeros((2, 16, 2, 16)) for name in 'kv'} for i in range(2)}
    parts = []
    for first, end in ((0, 5), (5, 6), (6, 7), (7, 16)):
        logits, cache = nano_jax.forward(params, ids[:, first:end], cfg, cache, first)
        parts.append(logits)
    whole, _ = nano_jax.forward(params, ids, cfg)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, **TOLERANCE)


def test_each_token_is_computed_once_until_the_window_is_full(monkeypatch):
    cfg = make_cfg(max_new_tokens=15)
    params, fed, forward = random_params(make_config(cfg)), [], nano_jax.forward
    monkeypatch.setattr(nano_jax, 'forward', lambda params, idx, *args: fed.append(idx.size) or forward(
        params, idx, *args))
    nano_jax.generate(params, [1, 2, 3], cfg)
    assert fed == [3] + 13 * [1] + [16]


def test_temperature_and_top_k_change_what_is_drawn():
    params = random_params(make_config(make_cfg()))
    settings = {
        'greedy': dict(temperature=0.0), 'one': dict(top_k=1), 'cold': dict(temperature=1e-4),
        'hot': dict(temperature=9.0), 'seed': dict(temperature=9.0, seed=2)}
    texts = {name: nano_jax.generate(params, [1], make_cfg(max_new_tokens=15, **flags))
             for name, flags in settings.items()}
    assert texts['greedy'] == texts['one'] == texts['cold']
    assert texts['greedy'] != texts['hot'] != texts['seed']


# -----------------------------------------------------------------------------
# PyTorch's numbers

@pytest.mark.parametrize('name', ['train', 'train_no_bias'])
def test_five_updates_have_the_losses_of_pytorch(name):
    golden = np.load(GOLDEN / name / 'steps.npz')
    config, params = load_pretrained(GOLDEN / name / 'ckpt.pt')
    cfg = make_cfg(block_size=config.block_size, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd,
                   vocab_size=config.vocab_size, beta2=0.95, weight_decay=0.1, grad_clip=1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments = {'m': zeros, 'v': zeros, 'n': 0.0}
    for x, y, lr, loss in zip(golden['x'], golden['y'], golden['lrs'], golden['losses']):
        found, grads = jax.value_and_grad(nano_jax.loss_fn)(params, x, y, cfg)
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        params, moments = nano_jax.adamw(params, grads, moments, lr, cfg)
    logits, _ = nano_jax.forward(params, golden['x'][0], cfg)
    np.testing.assert_allclose(logits, golden['logits_after'], atol=1e-4)


# -----------------------------------------------------------------------------
# a whole run beside train_jax.py's, in processes of one device and of four

def as_flags(flags):
    return [f'--{name}={value}' for name, value in flags.items()]


NANO = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
import nano_jax
found = []
make, estimate = nano_jax.make_train_step, nano_jax.estimate_loss
def make_train_step(cfg, mesh):
    step = make(cfg, mesh)
    found.append(mesh.size)
    def recorded(*args):
        *state, loss = step(*args)
        found.append(float(loss))
        return *state, loss
    return recorded
def estimate_loss(*args):
    found.append(['evaluation', float(estimate(*args))])
    return found[-1][1]
nano_jax.make_train_step, nano_jax.estimate_loss = make_train_step, estimate_loss
nano_jax.main()
print(json.dumps(found))
"""


@pytest.mark.parametrize('n_devices', [1, long(4)])
def test_the_losses_of_twenty_updates_and_of_evaluations_are_those_of_train_jax(n_devices, tmp_path):
    chars = ''.join(sorted(set(TEXT)))
    ids = [chars.index(c) for c in TEXT * 40]
    write_dataset(tmp_path / 'fox', ids[:-400], ids[-400:], chars=chars)
    flags = as_flags({'dataset': tmp_path / 'fox', **FLAGS, **TRAINING, 'seed': 3})
    env = dict(os.environ, JAX_NUM_CPU_DEVICES=str(n_devices))

    def run(*command):
        done = subprocess.run([sys.executable, *map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True,
                              timeout=300)
        return succeeded(done).stdout

    out = tmp_path / 'out'
    run('train_jax.py', *flags, '--beta2=0.99', f'--out_dir={out}', '--device=cpu')
    n_found, *found = json.loads(run('-c', NANO, ROOT, *flags, '--max_new_tokens=1').splitlines()[-1])
    assert n_found == n_devices

    losses = [loss for loss in found if not isinstance(loss, list)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    np.testing.assert_allclose(losses, [record['loss'] for record in records_of(out, 'loss')], rtol=0, atol=1e-6)
    evaluations = np.reshape([loss[1] for loss in found if isinstance(loss, list)], (-1, 2))
    theirs = [(record['train_loss'], record['val_loss']) for record in records_of(out, 'val_loss')]
    np.testing.assert_allclose(evaluations, theirs, rtol=0, atol=1e-6)


def test_its_throughput_is_measured_as_that_of_other_programs():
    result = succeeded(run_script('peers/nano_train.py', '--batch_size=8', '--repeats=1'))
    results = json.loads(result.stdout.splitlines()[-1])['results']
    assert results['tokens_per_sec'] == pytest.approx(8 * 64 / results['step_ms'] * 1000)
