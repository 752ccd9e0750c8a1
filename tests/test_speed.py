"""Whatever makes training fast changes how it is computed, not what."""
import dataclasses
import functools
import os
import platform
import runpy
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_train_utils
from jax_train_utils import (choose_attention, create_learning_rate_schedule, create_optimizer_with_schedule, cross_entropy,
                             keep_compiled_programs, make_train_step, setup_jax_environment)
from jax_ops import UserError, drop, element_numbers, matmul
from jax_transformer import GPT, GPTConfig, create_train_state

# 160 positions are one whole chunk of attention and a part of one
CONFIG = GPTConfig(block_size=160, vocab_size=37, n_layer=1, n_head=2, n_embd=16)


@functools.cache
def params_of(config):
    """Parameters far from their small initial values, so that every part of the model matters."""
    params = create_train_state(jax.random.key(0), config, optax.identity()).params
    return jax.tree.map(lambda p: p + 0.3 * np.random.default_rng(p.size).standard_normal(p.shape).astype(np.float32), params)


def compiled(config, loss_chunk=0, deterministic=False):
    """The compiled loss and gradients of a batch of two sequences."""
    def mean_loss(params, idx):
        return GPT(config).apply({'params': params}, idx[:, :-1], deterministic=deterministic, rngs={'dropout': jax.random.key(1)},
                                 row_B=jnp.array([5, 9]), targets_BxT=idx[:, 1:], loss=cross_entropy, loss_chunk=loss_chunk).mean()

    idx = np.random.default_rng(0).integers(config.vocab_size, size=(2, config.block_size + 1))
    params = params_of(dataclasses.replace(config, dropout=0, dtype='float32', attention='xla', remat='none', scan_layers=False))
    return jax.jit(jax.value_and_grad(mean_loss)).lower(params, idx).compile(), (params, idx)


@functools.cache
def loss_and_gradients(config, **how):
    step, args = compiled(config, **how)
    return step(*args)


def assert_same(one, other, tolerance):
    np.testing.assert_allclose(one[0], other[0], rtol=tolerance)
    jax.tree.map_with_path(lambda path, a, b: np.testing.assert_allclose(
        a, b, rtol=0, atol=tolerance * np.abs(a).max(), err_msg=jax.tree_util.keystr(path)), one[1], other[1])


def temporary_bytes(config, **how):
    return compiled(config, **how)[0].memory_analysis().temp_size_in_bytes


# -----------------------------------------------------------------------------
# products


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 0.01)])
@pytest.mark.parametrize('x_shape, y_shape, flip', [((3, 5, 7), (7, 11), False), ((3, 5, 7), (11, 7), True),
                                                    ((3, 5, 7), (3, 11, 7), True), ((3, 5, 70), (3, 70, 2), False)])
def test_products_have_the_values_and_gradients_of_plain_ones(dtype, tolerance, x_shape, y_shape, flip):
    x, y = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((x_shape, y_shape)))
    plain = lambda x, y: jnp.sin(x @ (y.swapaxes(-1, -2) if flip else y)).sum()
    ours = lambda x, y: jnp.sin(matmul(x.astype(dtype), y, flip, jnp.float32)).sum()
    exact = jax.value_and_grad(plain, (0, 1))(x.astype(dtype).astype(jnp.float32), y.astype(dtype).astype(jnp.float32))
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(jax.jit(jax.value_and_grad(ours, (0, 1)))(x, y))):
        assert b.dtype == jnp.float32  # the gradient of a float32 kernel is not rounded to bfloat16
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(a).max() + tolerance)


def test_bfloat16_products_are_summed_in_float32():
    x, y = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 1))
    for product in (matmul(x, y, False, jnp.float32), jax.grad(lambda y: matmul(x.T, y, False, jnp.float32).sum())(jnp.ones((1, 1)))):
        assert product.item() == 4096  # summed in bfloat16, it stops at 256


# -----------------------------------------------------------------------------
# attention


def test_attention_in_chunks_is_attention_with_dropout_too():
    config = dataclasses.replace(CONFIG, dropout=0.2)
    assert_same(loss_and_gradients(config), loss_and_gradients(dataclasses.replace(config, attention='chunked')), 2e-4)
    assert abs(loss_and_gradients(config)[0] - loss_and_gradients(CONFIG)[0]) > 0.01  # it does drop


def test_attention_in_chunks_is_attention_in_bfloat16():
    low = dataclasses.replace(CONFIG, dtype='bfloat16')
    exact = loss_and_gradients(CONFIG)
    for attention in ('xla', 'chunked'):
        assert_same(exact, loss_and_gradients(dataclasses.replace(low, attention=attention)), 0.05)


def test_attention_in_chunks_never_holds_all_scores():
    config = dataclasses.replace(CONFIG, block_size=512, n_head=8)
    assert temporary_bytes(dataclasses.replace(config, attention='chunked')) < temporary_bytes(config) / 2


def gpu(**what):
    client = types.SimpleNamespace(platform_version='PJRT C API\ncuda 13000')
    return types.SimpleNamespace(**dict(platform='gpu', device_kind='NVIDIA H200', compute_capability='9.0', client=client) | what)


def test_auto_picks_attention_and_says_why(monkeypatch):
    low = dataclasses.replace(CONFIG, dtype='bfloat16')
    cpu = jax.devices()[0]
    assert choose_attention('auto', CONFIG, cpu)[0] == 'chunked'
    assert choose_attention('auto', dataclasses.replace(CONFIG, block_size=64), cpu)[0] == 'xla'
    assert choose_attention('xla', CONFIG, cpu) == ('xla', 'as asked')
    # what cuDNN cannot do is plain XLA, and an error where cuDNN was asked for
    monkeypatch.setattr(jax_train_utils, 'compile_cudnn', lambda config, device: None)
    assert choose_attention('auto', low, gpu()) == ('cudnn', 'flash attention')
    for config, device, why in ((low, gpu(compute_capability='7.5'), '8.0'), (low, gpu(client=types.SimpleNamespace(platform_version='rocm')), 'NVIDIA'),
                                (CONFIG, gpu(), 'float32'), (dataclasses.replace(low, dropout=0.1), gpu(), 'dropout'),
                                (dataclasses.replace(low, n_embd=24), gpu(), 'heads of 12'),
                                (dataclasses.replace(low, n_embd=2 * 256), gpu(compute_capability='8.9'), 'heads of 256'),
                                (low, types.SimpleNamespace(platform='tpu', client=None), 'NVIDIA')):
        picked, reason = choose_attention('auto', config, device)
        assert picked == 'xla' and why in reason
        with pytest.raises(UserError, match=why):
            choose_attention('cudnn', config, device)
    with pytest.raises(UserError, match='attention must be auto'):
        choose_attention('flash', CONFIG, cpu)


def test_auto_falls_back_where_cudnn_does_not_compile():
    low = dataclasses.replace(CONFIG, dtype='bfloat16')
    picked, reason = choose_attention('auto', low, gpu())  # there is no such device: compiling fails, as with a cuDNN that is too old
    assert picked == 'xla' and reason.startswith('not cudnn: ') and '\n' not in reason


def test_cudnn_refuses_to_drop():
    with pytest.raises(UserError, match='cuDNN has no dropout'):
        compiled(dataclasses.replace(CONFIG, attention='cudnn', dropout=0.1))


# -----------------------------------------------------------------------------
# dropout


def test_dropped_elements_have_no_pattern():
    kept = np.asarray(drop(jnp.ones((8, 64, 512)), 0.2, jax.random.split(jax.random.key(0), 8), element_numbers((64, 512)))) > 0
    noise = (kept - 0.8) / 0.4  # mean 0, standard deviation 1
    for axis in (0, 1, 2):  # the mean over any axis is as far from 0 as chance has it
        n = kept.shape[axis]
        assert noise.mean(axis).std() * n**0.5 == pytest.approx(1, abs=0.06)
    for a, b in ((noise[:, :, 1:], noise[:, :, :-1]), (noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise[:, :, 8:], noise[:, :, :-8])):
        assert abs((a * b).mean()) < 5 / a.size**0.5  # neighbours, and rows, do not know each other


# -----------------------------------------------------------------------------
# loss, depth, memory


def test_the_loss_in_chunks_is_the_loss_and_holds_no_logits():
    config = dataclasses.replace(CONFIG, vocab_size=4096)
    assert_same(loss_and_gradients(config), loss_and_gradients(config, loss_chunk=32), 1e-4)
    logits = 4 * 2 * 160 * 4096  # float32 [B, T, V]
    parameters = 4 * 4096 * 16
    assert temporary_bytes(config) > logits > 2 * (temporary_bytes(config, loss_chunk=16) - 2 * parameters)
    with pytest.raises(UserError, match='loss_chunk=33 does not divide block_size=160'):
        make_train_step(config, 0, 1.0, lambda step: 0.1, loss_chunk=33)


DEEP = GPTConfig(block_size=32, vocab_size=37, n_layer=4, n_head=2, n_embd=64)


def test_scanned_layers_are_the_layers():
    scanned = dataclasses.replace(DEEP, scan_layers=True)
    assert_same(loss_and_gradients(DEEP), loss_and_gradients(scanned), 1e-4)
    assert set(params_of(scanned)) == {'wte', 'wpe', 'ln_f', 'h_0', 'h_1', 'h_2', 'h_3'}
    dropping = dataclasses.replace(scanned, dropout=0.3)
    loss = loss_and_gradients(dropping)[0]
    assert abs(loss - loss_and_gradients(scanned)[0]) > 0.01 and loss == loss_and_gradients(dataclasses.replace(dropping, remat='full'))[0]


def test_scanned_layers_are_compiled_once_whatever_the_depth():
    def products(n_layer, scan_layers):
        config = dataclasses.replace(CONFIG, n_layer=n_layer, scan_layers=scan_layers)
        params = jax.eval_shape(lambda: create_train_state(jax.random.key(0), config, optax.identity())).params
        run = lambda params: GPT(config).apply({'params': params}, jnp.zeros((1, 8), jnp.int32))
        return jax.jit(run).lower(params).as_text().count('dot_general')

    assert products(2, True) == products(9, True) < products(2, False) < products(9, False)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_remat_keeps_less_and_computes_the_same(scan_layers):
    config = dataclasses.replace(DEEP, scan_layers=scan_layers)
    needs = []
    for remat in ('none', 'dots', 'full'):
        changed = dataclasses.replace(config, remat=remat)
        assert_same(loss_and_gradients(DEEP), loss_and_gradients(changed), 1e-4)
        needs.append(temporary_bytes(changed))
    if scan_layers or jax.__version_info__ >= (0, 11):  # jaxlib 0.10 computes anew, unrolled, before it is needed
        assert needs[0] > max(needs[1:]), needs


# -----------------------------------------------------------------------------
# optimizer and schedules


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest():
    def updates(optimizer):
        tx = create_optimizer_with_schedule(lambda step: 0.1, weight_decay=0.0, optimizer=optimizer)
        state = create_train_state(jax.random.key(0), CONFIG, tx)
        grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), state.params)
        return jax.tree.map(jnp.subtract, state.apply_gradients(grads=grads).params, state.params)

    for (path, muon), adamw in zip(jax.tree_util.tree_leaves_with_path(updates('muon')), jax.tree.leaves(updates('adamw'))):
        if path[-1].key == 'kernel':
            spectrum = np.linalg.svd(muon, compute_uv=False)
            assert spectrum.min() > 0.5 * spectrum.max()  # nearly orthogonal
            assert jnp.sqrt(jnp.square(muon).mean()) == pytest.approx(0.1 * 0.2, rel=0.3)  # a fifth of what Adam's first step is
        else:
            np.testing.assert_allclose(muon, adamw, rtol=1e-5)
    with pytest.raises(UserError, match='optimizer must be one of adamw, muon'):
        create_optimizer_with_schedule(lambda step: 0.1, optimizer='sgd')


def test_muon_in_batches_takes_the_first_step_that_optax_takes_matrix_by_matrix():
    shapes = {'a': (8, 24), 'b': (24, 8), 'c': (8, 24), 'd': (8, 8)}
    params = {name: jax.random.normal(jax.random.key(ord(name)), shape) for name, shape in shapes.items()}
    grads = jax.tree.map(lambda p: jnp.square(p) - 0.5, params)
    ours = create_optimizer_with_schedule(lambda step: 0.1, optimizer='muon')
    optaxs = optax.contrib.muon(0.1, weight_decay=0.1, consistent_rms=0.2)
    kernels = lambda tree: {name: {'kernel': leaf} for name, leaf in tree.items()}
    updates = ours.update(kernels(grads), ours.init(kernels(params)), kernels(params))[0]
    expected = optaxs.update(grads, optaxs.init(params), params)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), updates, kernels(expected))


def test_schedules_are_what_they_are_called():
    make = functools.partial(create_learning_rate_schedule, 1.0, warmup_iters=10, lr_decay_iters=110, min_lr=0.1)
    at = (0, 5, 10, 60, 90, 100, 110, 200)
    rates = lambda name: [float(make(lr_schedule=name)(i)) for i in at]
    warm = [1 / 11, 6 / 11, 1]
    assert rates('linear') == pytest.approx(warm + [0.55, 0.28, 0.19, 0.1, 0.1])
    assert rates('wsd') == pytest.approx(warm + [1, 1, 0.55, 0.1, 0.1])
    assert rates('constant') == pytest.approx(warm + [1] * 5)
    assert rates('cosine')[:4] == pytest.approx(warm + [0.55])
    assert make(lr_schedule='linear', decay_lr=False)(0) == 1  # nanoGPT's flag wins
    with pytest.raises(UserError, match='lr_schedule must be one of cosine'):
        make(lr_schedule='step')


# -----------------------------------------------------------------------------
# the machine


def test_one_micro_step_is_not_a_loop():
    config = dataclasses.replace(CONFIG, block_size=16, n_layer=1)
    schedule = create_learning_rate_schedule(1e-3, decay_lr=False)
    state = create_train_state(jax.random.key(0), config, create_optimizer_with_schedule(schedule))
    for n_micro, loops in ((1, 0), (2, 1)):
        batch = {'x': jnp.zeros((n_micro, 2, 16), jnp.int32), 'y': jnp.zeros((n_micro, 2, 16), jnp.int32), 'row': jnp.zeros((n_micro, 2), jnp.uint32)}
        assert jax.jit(make_train_step(config, 0, 1.0, schedule)).lower(state, batch).as_text().count('stablehlo.while') == loops


STEPS = """
import resource, sys, jax, jax.numpy as jnp
from jax_train_utils import setup_jax_environment
if sys.argv[1] == 'ours':
    setup_jax_environment()
step, x = jax.jit(lambda x: x + 1), jnp.zeros(2**24)
for i in range(30):
    if i == 10:  # the first ones compile, and touch memory for the first time
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()  # its 64 MiB are free again before the next step
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path('/sys/kernel/mm/transparent_hugepage/enabled')  # 'always' would leave nothing to gain


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc' or not HUGE_PAGES.exists() or '[madvise]' not in HUGE_PAGES.read_text(),
                    reason='glibc, and Linux with huge pages for those who ask')
def test_freed_memory_is_used_again_without_page_faults():
    env = {name: value for name, value in os.environ.items() if not name.startswith(('MALLOC_', 'GLIBC_', 'LD_PRELOAD'))}
    faults = {how: int(subprocess.run([sys.executable, '-c', STEPS, how], cwd=Path(__file__).parent.parent,
                                      env=env | {'JAX_NUM_CPU_DEVICES': '1'}, check=True, capture_output=True).stdout)
              for how in ('ours', 'plain')}
    pages = 20 * 2**26 // os.sysconf('SC_PAGE_SIZE')  # that 20 steps write to
    assert faults['ours'] < pages / 4 < pages / 2 < faults['plain'], faults


@pytest.mark.parametrize('script', ['train_jax.py', 'sample_jax.py', 'bench_jax.py'])
def test_memory_and_platform_are_settled_before_jax_starts(script, monkeypatch):
    events = []

    def record(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **how: (events.append(name), function(*args, **how))[1])

    for owner, name in ((jax_train_utils, 'keep_freed_memory'), (jax_train_utils, 'join_processes'), (jax.config, 'update'),
                        (jax, 'devices'), (jax, 'process_index'), (jax, 'process_count')):
        record(owner, name)
    hook = sys.excepthook
    monkeypatch.setattr(sys, 'argv', [script, '--device=cpu:99'])
    try:
        with pytest.raises(UserError, match='there is no device cpu:99'):
            runpy.run_path(str(Path(__file__).parent.parent / script), run_name='__main__')
    finally:
        sys.excepthook = hook
    assert events[:2] == ['update', 'keep_freed_memory'] and 'devices' in events


def test_compiled_programs_are_kept_for_accelerators_in_a_folder_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update('jax_compilation_cache_dir', None)
        setup_jax_environment('cpu')
        assert jax.config.jax_compilation_cache_dir is None
        keep_compiled_programs('gpu')
        folder, = (tmp_path / 'jax_transformer').iterdir()
        assert jax.config.jax_compilation_cache_dir == str(folder) and folder.name == f'gpu-jaxlib-{jax.lib.__version__}'
        assert folder.stat().st_mode & 0o077 == 0
        jax.config.update('jax_compilation_cache_dir', '/elsewhere')
        keep_compiled_programs('gpu')
        assert jax.config.jax_compilation_cache_dir == '/elsewhere'
    finally:
        jax.config.update('jax_compilation_cache_dir', before)
