"""What jax_train_utils.py promises on one device and replicated over several; tests/test_parallel.py has the meshes."""
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import pickle
import platform
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_train_utils
from jax_flags import UserError, exit_if_peer_died, exit_on_user_error, is_url, read_flags
from jax_pretrained import load_pretrained
from jax_train_utils import (
    DataParallel, MetricsLog, can_cache_on_cpu, check_agreement, check_device_availability,
    checkpoint_steps, choose_attention, choose_checkpoint, clip_gradients, configure_process, count_windows, cpu_name,
    create_learning_rate_schedule, create_optimizer_with_schedule, default_dtype, describe_data, device_peak_flops,
    enable_compilation_cache, epoch_windows, estimate_loss_jax, finds_accelerator, finish_checkpoints, fit_layout,
    get_batch_jax, get_loss_weights, get_windows, in_all_processes, load_checkpoint, load_dataset, load_dataset_meta,
    load_masks, load_run, load_tokenizer, lock_out_dir, make_eval_step, make_train_step, open_checkpoints,
    opt_state_item, permute_index, plot_losses, read_metrics, save_checkpoint, setup_jax_environment, split_batch,
    strip_partial_utf8)
from jax_transformer import GPT, GPTConfig, MoEConfig, create_train_state, cross_entropy
from tests.common import (
    GOLDEN, ROOT, TINY, apply, column, compiled_once, device_batch, edit_json, fresh_run, host_batch, meta_of,
    next_line, output_of, refusal, run_steps, write_dataset)

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
def read(tmp_path):
    """read_flags of SCRIPT, where the argument CONFIG stands for a config file."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'config.py').write_text('import math\nbatch_size = 4 * 8 # arithmetic\nlearning_rate = 1\n')
    namespace = {}
    exec(SCRIPT, namespace)

    def read(*argv):
        argv = [arg.replace('CONFIG', str(tmp_path / 'config.py')) for arg in argv]
        return read_flags(tmp_path / 'script.py', namespace, argv)
    return read


def test_flags_and_config_files_apply_in_the_order_given(read):
    assert read()[0] == {'batch_size': 12, 'learning_rate': 6e-4, 'start': 'A # b', 'compile': True}
    flags, given = read('--batch_size=3', 'CONFIG', '--compile=False')
    assert flags == {'batch_size': 32, 'learning_rate': 1.0, 'start': 'A # b', 'compile': False}
    assert given == {'batch_size': 32, 'learning_rate': 1.0, 'compile': False}
    assert type(flags['learning_rate']) is float
    assert read('CONFIG', '--batch_size=3')[0]['batch_size'] == 3
    assert read('--batch_size=3', 'CONFIG')[1]['batch_size'] == 32


def test_a_value_may_hold_equals_signs_and_a_prompt_may_look_like_a_number(read):
    assert read('--start=a=b')[0]['start'] == 'a=b'
    assert read('--start=123')[0]['start'] == '123'
    assert read('--start=')[0]['start'] == ''
    assert read('--learning_rate=1e-3')[0]['learning_rate'] == 1e-3


@pytest.mark.parametrize('arg, message', [
    ('--batch_sise=3', 'unknown flag --batch_sise; did you mean --batch_size'),
    ('--zzz=3', '--help lists all'),
    ('--batch_size', '--name=value'),
    ('--batch_size=1.5', '--batch_size takes a value of type int'),
    ('--compile=1', 'type bool'),
    ('--batch_size={[]}', 'type int'),
    ('--batch_size=99999999999', '--batch_size must be below 2..31'),
    ('--batch_size=' + '(' * 1000, 'type int'),
    ('--learning_rate=fast', 'type float'),
    ('--other=4', 'unknown flag'),
    ('nosuchfile.py', 'no config file nosuchfile.py')])
def test_a_flag_that_is_wrong_is_refused_by_name(read, arg, message):
    with pytest.raises(UserError, match=message):
        read(arg)


@pytest.mark.parametrize('path, expected', [
    ('gs://bucket/run', True), ('s3://bucket', True), ('file:///run', True), ('C:\\run', False), ('C:/run', False),
    ('d://run', False), ('D:', False), ('out', False), ('/run/a://b', False), ('a/gs://b', False)])
def test_a_drive_of_windows_is_no_url(path, expected):
    assert is_url(path) == expected


@pytest.mark.parametrize('text, message', [
    ('batch_sise = 3', 'unknown flag --batch_sise'),
    ('batch_size = ', 'SyntaxError'),
    ('batch_size = 1 / 0', 'ZeroDivisionError'),
    ('batch_size = "12"', 'type int')])
def test_a_config_file_that_is_wrong_is_refused(read, tmp_path, text, message):
    (tmp_path / 'config.py').write_text(text)
    with pytest.raises(UserError, match=message):
        read('CONFIG')


BASE = 'import math\nbatch_size = 7\nhelper = 3\n'


@pytest.mark.parametrize('text, expected', [
    ('from base_of_configs import *', {'batch_size': 7}),  # its helper is no mistake of this file
    ('exec(open(PATH).read())\nlearning_rate = 1e-3', {'batch_size': 7, 'learning_rate': 1e-3}),
    ('globals().update(batch_size=7)', {'batch_size': 7}),
    ('def choose():\n    global batch_size\n    batch_size = 7\nchoose()', {'batch_size': 7}),
    ('from base_of_configs import *\nbatch_size = 12', {'batch_size': 12}),  # the default, on purpose
    ('batch_size += 1', {'batch_size': 13}),
    ('(batch_size, start), compile = (1, "a"), False', {'batch_size': 1, 'start': 'a', 'compile': False}),
    ('if True:\n    with open(PATH):\n        try:\n            batch_size = 12\n        finally:\n            pass',
     {'batch_size': 12}),
    ('for batch_size in (3, 12): pass', {'batch_size': 12}),
    ('del batch_size', {})])
def test_a_config_file_gives_what_it_assigns_and_what_it_changes(read, tmp_path, monkeypatch, text, expected):
    (tmp_path / 'base_of_configs.py').write_text(BASE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'base_of_configs', raising=False)
    (tmp_path / 'config.py').write_text(text.replace('PATH', repr(str(tmp_path / 'base_of_configs.py'))))
    assert read('CONFIG')[1] == expected


@pytest.mark.parametrize('text', [
    'def scaled(x):\n    learning_rate = x * 2\n    return learning_rate\nscaled(3)',
    'class Sizes:\n    batch_size = 3',
    '_ = [batch_size for batch_size in range(3)], {start: 1 for start in "ab"}, {start for start in "ab"}',
    '_ = list(batch_size for batch_size in range(3))',
    '_ = (lambda: [learning_rate for learning_rate in range(3)])()'])
def test_a_local_variable_named_like_a_flag_gives_nothing(read, tmp_path, text):
    (tmp_path / 'config.py').write_text(text)
    assert read('--batch_size=3', 'CONFIG')[1] == {'batch_size': 3}


def test_a_flag_without_a_comment_is_refused(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT.replace(' # sequences', ''))
    with pytest.raises(UserError, match='the flag batch_size has no comment'):
        read_flags(script, {}, [])


def test_help_prints_every_knob_with_its_default_and_comment(read, capsys):
    with pytest.raises(SystemExit) as exit:
        read('--help')
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert '--batch_size=12  # sequences\n' in out
    assert '--learning_rate=0.0006  # the highest\n' in out
    assert "--start='A # b'  # the prompt\n" in out
    assert '--compile=True  # no effect\n' in out
    assert 'other' not in out


# -----------------------------------------------------------------------------
# how a script ends


PRINTS = """
import sys
from jax_flags import start_script
start_script()
print('first')  # is read before the script goes on: no line stays in a buffer
sys.stdin.read()  # until the reader has gone
print('second' * {times}, end={end!r})
{then}
"""


@pytest.mark.parametrize('options, times, end, then, code', [
    ([], 10**5, '\n', '', 141),
    (['-u'], 1, '\n', '', 141),
    ([], 1, '\n', '', 141),
    ([], 1, '', '', 0),  # text without a newline stays in the buffer until the interpreter exits
    ([], 1, '', 'raise ValueError("a bug")', 1)])
def test_a_reader_that_goes_away_ends_a_script_quietly(options, times, end, then, code):
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}
    program = PRINTS.format(times=times, end=end, then=then)
    with subprocess.Popen(
            [sys.executable, *options, '-c', program], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert next_line(process.stdout, process) == 'first\n'
        process.stdout.close()
        process.stdin.close()
        err = process.stderr.read()
    assert process.returncode == code
    if then:
        assert err.splitlines()[-1] == 'ValueError: a bug'
    else:
        assert err == ''


def test_a_broken_pipe_elsewhere_stays_a_traceback(capsys):
    error = BrokenPipeError('of a socket')
    exit_on_user_error(BrokenPipeError, error, None)
    assert 'BrokenPipeError: of a socket' in capsys.readouterr().err


@pytest.mark.parametrize('error, lost', [
    (jax.errors.JaxRuntimeError('INTERNAL: the other side has closed the connection'), True),
    (ValueError('UNKNOWN: Gloo all-reduce failed: Connection closed by peer'), True),
    (RuntimeError('the barrier of the save was not reached'), True),
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory'), False), (ValueError('a bug'), False)])
def test_what_the_death_of_another_process_raises_ends_this_one_with_75(monkeypatch, capsys, error, lost):
    codes = []
    monkeypatch.setattr(os, '_exit', codes.append)
    exit_if_peer_died(error)
    assert codes == []  # there are no others
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    exit_if_peer_died(error)
    assert codes == [75] * lost
    assert ('error: process 0 of 2 has lost the others' in capsys.readouterr().err) == lost


@pytest.mark.parametrize('process, seconds', [(0, 3), (1, 0.5)])
@pytest.mark.parametrize('error, code', [(UserError('a mistake'), 2), (ValueError('a bug'), 1)])
def test_one_of_several_processes_that_fails_does_not_wait_for_the_others(monkeypatch, error, code, process, seconds):
    ends = []
    monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(jax, 'process_index', lambda: process)
    monkeypatch.setattr(time, 'sleep', ends.append)
    monkeypatch.setattr(os, '_exit', lambda code: ends.append(f'exit code {code}'))
    with contextlib.suppress(SystemExit):  # os._exit would not have returned
        exit_on_user_error(type(error), error, None)
    assert ends == [seconds, f'exit code {code}']


# -----------------------------------------------------------------------------
# devices


def test_sequences_are_split_over_devices_without_ever_exceeding_the_micro_batch():
    assert split_batch(40, 12, 1) == (40, 12)
    assert split_batch(40, 12, 8) == (5, 12)
    assert split_batch(1, 64, 8) == (1, 8)
    assert split_batch(4, 12, 8) == (1, 6)
    for g, b, n in ((40, 12, 16), (6, 10, 4), (1, 8, 8)):
        n_micro, micro_batch = split_batch(g, b, n)
        assert n_micro * micro_batch * n == g * b
        assert micro_batch <= b
    with pytest.raises(
            UserError, match=r'12 sequences cannot be shared equally by 8 devices.*\[1, 2, 3, 4, 6\].*multiple of 8'):
        split_batch(1, 12, 8)


def test_device_flag():
    assert len(check_device_availability('cpu')) == 8
    assert len(check_device_availability('auto')) == 8
    assert check_device_availability('cpu:3') == [jax.devices()[3]]
    for device, message in (('cpu:8', 'there are 8'), ('cuda', 'jax sees no cuda here, only cpu'), ('mps', 'no MPS'),
                            ('cpu:x', 'device must be')):
        with pytest.raises(UserError, match=message):
            check_device_availability(device)


def test_cpu_computes_in_float32_unless_asked():
    assert setup_jax_environment('cpu')[1:] == ('float32', 'the CPU default')
    assert setup_jax_environment('cpu', 'bfloat16')[1] == 'bfloat16'
    with pytest.raises(UserError, match='dtype must be auto, float32, bfloat16, float16'):
        setup_jax_environment('cpu', 'float64')


@pytest.mark.parametrize('kind, peak', [
    ('NVIDIA H200', 989e12), ('NVIDIA H100 PCIe', 756e12), ('NVIDIA A100-SXM4-40GB', 312e12), ('TPU v4', 275e12),
    ('TPU v5 lite', 197e12), ('cpu', None)])
def test_peak_flops_are_known_or_none(kind, peak):
    assert device_peak_flops(types.SimpleNamespace(device_kind=kind)) == peak


def gpu(**changes):
    """What choose_attention asks of a GPU."""
    client = types.SimpleNamespace(platform_version='PJRT C API\ncuda 13000')
    device = dict(platform='gpu', device_kind='NVIDIA H200', compute_capability='9.0', client=client)
    return types.SimpleNamespace(**device | changes)


LONG = dataclasses.replace(TINY, block_size=160)
LONG_BF16 = dataclasses.replace(LONG, dtype='bfloat16')


def test_auto_picks_attention_and_says_why(monkeypatch):
    cpu = jax.devices()[0]
    assert choose_attention('auto', LONG, cpu)[0] == 'chunked'
    assert choose_attention('auto', dataclasses.replace(LONG, block_size=64), cpu)[0] == 'xla'
    assert choose_attention('xla', LONG, cpu) == ('xla', 'as asked')
    monkeypatch.setattr(jax_train_utils, 'compile_cudnn', lambda *args: None)
    assert choose_attention('auto', LONG_BF16, gpu()) == ('cudnn', 'flash attention')
    with pytest.raises(UserError, match='attention must be auto'):
        choose_attention('flash', LONG, cpu)


@pytest.mark.parametrize('changes, device, why', [
    ({}, gpu(compute_capability='7.5'), '8.0'),
    ({}, gpu(client=types.SimpleNamespace(platform_version='rocm')), 'NVIDIA'),
    (dict(dtype='float32'), gpu(), 'float32'),
    (dict(dropout=0.1), gpu(), 'dropout'),
    (dict(sinks=True), gpu(), 'sinks'),
    (dict(layer_types=('chunk',), chunk=48), gpu(), 'chunks of 48 do not divide'),
    (dict(n_embd=24), gpu(), 'heads of 12'),
    (dict(n_embd=2 * 256), gpu(compute_capability='8.9'), 'heads of 256')])
def test_what_cudnn_cannot_do_falls_back_to_xla_and_is_refused_where_cudnn_was_asked_for(
        monkeypatch, changes, device, why):
    monkeypatch.setattr(jax_train_utils, 'compile_cudnn', lambda *args: None)
    config = dataclasses.replace(LONG_BF16, **changes)
    picked, reason = choose_attention('auto', config, device)
    assert picked == 'xla'
    assert why in reason
    assert choose_attention('auto', dataclasses.replace(config, block_size=2048), device)[0] == 'chunked'
    with pytest.raises(UserError, match=why):
        choose_attention('cudnn', config, device)


@pytest.mark.parametrize('changes', [{}, dict(n_head=4, n_kv_head=2, attention_scale=0.3), dict(
    layer_types=('window', 'full', 'nope', 'chunk'), window=8, chunk=80)])
def test_cudnn_takes_shared_key_heads_windows_and_chunks_and_is_compiled_with_them(monkeypatch, changes):
    compiled = []
    monkeypatch.setattr(jax_train_utils, 'fused_causal_attention', lambda implementation, q, k, v, **options: (
        compiled.append((q.shape[2], k.shape[2], options['scale'], options.get('window'), options.get('chunk'))) or q))
    config = dataclasses.replace(LONG_BF16, **changes)
    device = jax.devices()[0]
    for layer_type in config.layer_types:
        jax_train_utils.compile_cudnn(config, device, layer_type, tensor=2)
    assert {heads[:3] for heads in compiled} == {(config.n_head // 2, config.kv_heads // 2, config.attention_scale)}
    assert {spans[3:] for spans in compiled} == {
        {'window': (8, None), 'chunk': (None, 80)}.get(layer_type, (None, None)) for layer_type in config.layer_types}


def test_a_tpu_takes_splash_attention_for_heads_of_64_and_128():
    tpu = types.SimpleNamespace(platform='tpu')
    config = GPTConfig(block_size=2048, vocab_size=64, n_layer=1, n_head=4, n_kv_head=2, n_embd=256, dtype='bfloat16',
                       layer_types=('window',), window=100, sinks=True)
    assert choose_attention('auto', config, tpu) == ('splash', 'flash attention')
    refused = (dict(head_dim=32), '32 wide'), (dict(dropout=0.1), 'dropout'), (dict(block_size=2049), '128')
    for changes, why in refused:
        picked, reason = choose_attention('auto', dataclasses.replace(config, **changes), tpu)
        assert picked == 'chunked'
        assert why in reason
    with pytest.raises(UserError, match='splash does not work here: it is for TPUs'):
        choose_attention('splash', config, jax.devices()[0])


def test_auto_falls_back_where_cudnn_does_not_compile():
    # there is no such device here, so compiling fails, as with a cuDNN that is too old
    picked, reason = choose_attention('auto', LONG_BF16, gpu())
    assert picked == 'xla'
    assert '; not cudnn: ' in reason
    assert '\n' not in reason


# -----------------------------------------------------------------------------
# the process


STEPS = """
import resource, sys, jax, jax.numpy as jnp
from jax_train_utils import setup_jax_environment
if sys.argv[1] == 'ours':
    setup_jax_environment()
step, x = jax.jit(lambda x: x + 1), jnp.zeros(2**24)
for i in range(30):
    if i == 10:  # the first ones compile, and touch memory for the first time
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()  # frees its 64 MiB before the next step
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path('/sys/kernel/mm/transparent_hugepage/enabled')


@pytest.mark.skipif(
    platform.libc_ver()[0] != 'glibc' or not HUGE_PAGES.exists() or '[madvise]' not in HUGE_PAGES.read_text(),
    reason="needs glibc, and a Linux that gives huge pages on request ('always' would leave nothing to gain)")
def test_freed_memory_is_reused_without_page_faults():
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(('MALLOC_', 'GLIBC_', 'LD_PRELOAD'))}
    faults = {}
    for how in ('ours', 'plain'):
        done = subprocess.run([sys.executable, '-c', STEPS, how], cwd=ROOT, check=True, capture_output=True,
                              timeout=300, env=environment | {'JAX_NUM_CPU_DEVICES': '1'})
        faults[how] = int(done.stdout)
    pages_written = 20 * 2**26 // os.sysconf('SC_PAGE_SIZE')  # by the 20 steps that count
    assert faults['ours'] < pages_written / 4, faults
    assert faults['plain'] > pages_written / 2, faults


@pytest.mark.parametrize('script', ['train_jax.py', 'sample_jax.py', 'bench_jax.py'])
def test_memory_and_platform_are_settled_before_jax_starts(script, monkeypatch, handlers):
    events = []

    def record(owner, name):
        function = getattr(owner, name)

        def recording(*args, **options):
            events.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, recording)

    for owner, name in ((jax_train_utils, 'configure_malloc'), (jax_train_utils, 'initialize_distributed'),
                        (jax.config, 'update'), (jax, 'devices'), (jax, 'process_index'), (jax, 'process_count')):
        record(owner, name)
    hook = sys.excepthook
    monkeypatch.setattr(sys, 'argv', [script, '--device=cpu:99'])
    try:
        with pytest.raises(UserError, match='there is no device cpu:99'):
            runpy.run_path(str(ROOT / script), run_name='__main__')
    finally:
        sys.excepthook = hook
    assert events[:2] == ['update', 'configure_malloc']
    assert 'devices' in events


def test_a_computation_on_a_cpu_is_done_when_its_call_returns():
    program = '''
from jax_train_utils import configure_process
configure_process('cpu')
import jax, jax.numpy as jnp
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, x: x @ x * 1e-3, x))
x = jnp.ones((500, 500))
jax.block_until_ready(slow(x))
assert slow(x).is_ready()  # so are its temporaries freed
'''
    env = os.environ | {'JAX_NUM_CPU_DEVICES': '1'}
    result = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=env, capture_output=True, text=True,
                            timeout=100)
    assert result.returncode == 0, result.stderr


def test_memory_is_kept_only_where_the_cpu_computes(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax_train_utils, 'configure_malloc', lambda: calls.append(1))
    monkeypatch.setattr(jax, 'config', types.SimpleNamespace(jax_platforms=None, update=lambda *args: None))
    for device, accelerator, expected in (('cpu', True, 1), ('auto', False, 1), ('auto', True, 0), ('cuda', True, 0)):
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(jax_train_utils, 'finds_accelerator', lambda: accelerator)
            configure_process(device)
        assert len(calls) == expected, device
    plugins = []
    monkeypatch.setattr(importlib.metadata, 'entry_points', lambda group: plugins)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert not finds_accelerator(tmp_path)
    (tmp_path / 'nvidia0').touch()
    assert not finds_accelerator(tmp_path)  # JAX is installed for the CPU
    plugins.append('xla_cuda13')
    assert finds_accelerator(tmp_path)
    jax.config.jax_platforms = 'cpu'
    assert not finds_accelerator(tmp_path)


@pytest.mark.parametrize('platform, capability, dtype, reason', [
    ('tpu', None, 'bfloat16', 'TPUs'), ('cpu', None, 'float32', 'CPU'), ('gpu', '9.0', 'bfloat16', '9.0'),
    ('gpu', '7.5', 'float32', '--dtype=float16'), ('gpu', 'gfx90a', 'bfloat16', 'AMD GPU gfx90a')])
def test_the_default_dtype_of_a_device(platform, capability, dtype, reason):
    found, why = default_dtype(types.SimpleNamespace(platform=platform, compute_capability=capability))
    assert found == dtype
    assert reason in why


def test_float32_means_float32_on_accelerators_and_costs_cpus_nothing(monkeypatch):
    settings = {}
    monkeypatch.setattr(jax.config, 'update', lambda name, value: settings.update({name: value}))
    monkeypatch.setattr(jax_train_utils, 'enable_compilation_cache', lambda platform: None)
    for kind, dtype in (('gpu', 'bfloat16'), ('cpu', 'float32')):
        device = types.SimpleNamespace(platform=kind)
        monkeypatch.setattr(jax_train_utils, 'check_device_availability', lambda _: [device])
        setup_jax_environment('auto', dtype)
        assert 'jax_default_matmul_precision' not in settings
    device = types.SimpleNamespace(platform='gpu')
    assert 'full float32' in setup_jax_environment('auto', 'float32')[2]
    assert settings['jax_default_matmul_precision'] == 'highest'


def test_one_of_several_gpus_is_the_only_one_that_is_touched(monkeypatch):
    settings = {}
    monkeypatch.setattr(jax.config, 'update', lambda name, value: settings.update({name: value}))
    configure_process('cuda:1')
    assert settings == {'jax_cuda_visible_devices': '1', 'jax_rocm_visible_devices': '1',
                        'jax_cpu_enable_async_dispatch': False}


def test_deterministic_sets_xlas_flag_before_jax_starts(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=x')
    configure_process('cuda', deterministic=True)
    assert os.environ['XLA_FLAGS'].split() == ['--xla_dump_to=x', '--xla_gpu_deterministic_ops=true']


@pytest.mark.parametrize('layout, given, n_devices, expected', [
    ((4, 2, 1), (), 8, (4, 2, 1)), ((4, 2, 1), (), 16, (4, 2, 1)),  # fits
    ((4, 2, 1), (), 1, (1, 1, 1)), ((4, 2, 1), (), 2, (2, 1, 1)), ((1, 2, 1), (), 1, (1, 1, 1)),
    ((4, 2, 1), ('tensor',), 4, (2, 2, 1)), ((4, 2, 1), ('fsdp',), 4, (4, 1, 1)),
    ((4, 2, 1), ('fsdp', 'tensor'), 4, (4, 2, 1)), ((1, 1, 3), ('expert',), 4, (1, 1, 3))])  # left to be refused
def test_a_resumed_layout_that_does_not_fit_the_machine_becomes_one_that_does(layout, given, n_devices, expected):
    names = ('fsdp', 'tensor', 'expert')
    assert fit_layout(dict(zip(names, layout)), given, n_devices, 48) == dict(zip(names, expected))


# -----------------------------------------------------------------------------
# agreement of several processes, with the texts of another one made up


@pytest.fixture
def other_says(monkeypatch):
    return lambda text: monkeypatch.setattr(jax_train_utils, 'gather_texts', lambda mine: [text, mine])


def test_processes_that_differ_are_named_with_what_differs(other_says):
    other_says('{"batch_size": 4, "seed": 1}')
    check_agreement('flags', {'batch_size': 4, 'seed': 1})
    said = refusal(check_agreement, 'flags', {'batch_size': 8, 'seed': 1})
    assert said == 'processes 0 and 1 have different flags, all must have the same: batch_size is 4 and 8'


def test_a_mistake_of_one_process_is_reported_by_all(other_says):
    def refuse():
        raise UserError('no data')

    other_says('')
    assert in_all_processes(max, 3, 5) == 5
    assert refusal(in_all_processes, refuse) == 'process 1: no data'
    other_says('no data')
    assert refusal(in_all_processes, refuse) == 'no data'
    assert refusal(in_all_processes, max, 3, 5) == 'process 0: no data'


@pytest.fixture
def cache_dir_unset():
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update('jax_compilation_cache_dir', None)
    yield
    jax.config.update('jax_compilation_cache_dir', before[0])
    jax.config.update('jax_persistent_cache_min_compile_time_secs', before[1])


def test_compiled_programs_are_kept_in_a_folder_of_the_users_own(tmp_path, monkeypatch, cache_dir_unset):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    enable_compilation_cache('gpu')
    folder, = (tmp_path / 'jax_transformer').iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.name == f'gpu-jaxlib-{jaxlib.__version__}'
    assert folder.stat().st_mode & 0o077 == 0
    jax.config.update('jax_compilation_cache_dir', '/elsewhere')
    enable_compilation_cache('gpu')
    assert jax.config.jax_compilation_cache_dir == '/elsewhere'


@pytest.mark.parametrize('version, system, n_processes, kept', [
    ('0.10.2', 'linux', 1, True), ('0.12.0.dev20260801', 'linux', 1, True), ('0.10.1', 'linux', 1, False),
    ('0.10.2', 'darwin', 1, False), ('0.10.2', 'linux', 2, False)])
def test_cpus_keep_programs_only_where_they_are_known_to_load(version, system, n_processes, kept, tmp_path, monkeypatch,
                                                              cache_dir_unset):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(jaxlib, '__version__', version)
    monkeypatch.setattr(sys, 'platform', system)
    monkeypatch.setattr(jax, 'process_count', lambda: n_processes)
    enable_compilation_cache('cpu')
    assert bool(jax.config.jax_compilation_cache_dir) == kept
    assert (tmp_path / 'jax_transformer').exists() == kept


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc/cpuinfo')
def test_programs_of_another_number_of_threads_have_another_folder(monkeypatch):
    names = {cpu_name(), cpu_name()}
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(97))
    names.add(cpu_name())
    monkeypatch.setenv('NPROC', '3')
    names.add(cpu_name())
    assert len(names) == 3


MODEL_STEP = """
import collections, jax, numpy as np
from jax_train_utils import setup_jax_environment
setup_jax_environment('cpu')
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition('/')[2]]))
x = np.random.default_rng(0).normal(size=(300, 70)).astype(np.float32)
y = jax.jit(lambda x: jax.nn.softmax(jax.nn.gelu(x @ x.T)) @ x)(x)
print(events['cache_hits'], events['cache_misses'], np.asarray(y).tobytes().hex())
"""


@pytest.mark.skipif(not can_cache_on_cpu(), reason='CPUs keep no programs here')
def test_a_second_process_loads_what_the_first_has_compiled_and_computes_the_same_bits(tmp_path):
    environment = {name: value for name, value in os.environ.items() if 'CACHE' not in name and name != 'XLA_FLAGS'}
    environment |= {'XDG_CACHE_HOME': str(tmp_path), 'JAX_NUM_CPU_DEVICES': '1'}

    def start(**more):
        return subprocess.Popen([sys.executable, '-c', MODEL_STEP], cwd=ROOT, env=environment | more, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(process):
        """(cache hits, cache misses, the result, stderr)"""
        out, err = output_of(process)
        assert process.returncode == 0, err
        hits, misses, result = out.split()
        return int(hits), int(misses), result, err

    off, cold, side_by_side = map(end, [start(JAX_ENABLE_COMPILATION_CACHE='0'), start(), start()])
    assert off[:2] == (0, 0)
    assert cold[0] + cold[1] == side_by_side[0] + side_by_side[1] > 0
    files = sorted(path for path in tmp_path.rglob('*-cache'))
    kept = [path.read_bytes() for path in files]
    warm = end(start())
    assert warm[0] == len(files) == cold[0] + cold[1]
    assert warm[1] == 0
    assert [path.read_bytes() for path in files] == kept
    files[0].write_bytes(kept[0][:len(kept[0]) // 2])  # a process was killed while it wrote
    files[-1].write_bytes(kept[-1][:100] + bytes([kept[-1][100] ^ 1]) + kept[-1][101:])
    damaged = end(start())
    assert damaged[0] == len(files) - len({files[0], files[-1]})
    assert {process[2] for process in (off, cold, side_by_side, warm, damaged)} == {off[2]}
    assert off[3] == warm[3] == ''
    assert 'Error reading persistent compilation cache' in damaged[3]


# -----------------------------------------------------------------------------
# data


def test_targets_are_the_next_tokens_and_batches_a_function_of_seed_and_iteration():
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = get_batch_jax(tokens, 16, 12, 1337, 5)
    assert x.shape == (12, 16)
    assert x.dtype == np.int32
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(x, get_batch_jax(tokens, 16, 12, 1337, 5)[0])
    for other in ((1338, 5), (1337, 6)):
        assert not np.array_equal(x, get_batch_jax(tokens, 16, 12, *other)[0])


def test_the_sequences_do_not_depend_on_how_they_are_batched():
    tokens = np.arange(500, dtype=np.uint16)
    small = np.concatenate([get_batch_jax(tokens, 16, 4, 7, i)[0] for i in range(30)])
    large = np.concatenate([get_batch_jax(tokens, 16, 12, 7, i)[0] for i in range(10)])
    np.testing.assert_array_equal(small, large)


@pytest.mark.parametrize('n', [17, 18, 33, 40, 500])
def test_an_epoch_shows_every_window_once_and_the_next_one_others(n):
    tokens = np.arange(n, dtype=np.uint16)
    n_windows = count_windows(n, 16)
    first, second = (get_batch_jax(tokens, 16, n_windows, 7, i)[0] for i in (0, 1))
    assert len(np.unique(first)) == first.size  # no token twice
    assert first.size >= min(n - 1, max(16, n - 3 * 16))
    assert first.max() <= n - 2  # the last token has a target
    if n >= 40:
        assert not np.array_equal(np.sort(first, 0), np.sort(second, 0))


def test_the_order_of_the_windows_has_not_changed():
    tokens = np.arange(500, dtype=np.uint16)
    assert [get_batch_jax(tokens, 16, 4, 7, i)[0][:, 0].tolist() for i in (0, 9)] == [
        [242, 178, 370, 82], [462, 286, 126, 414]]


def test_an_epoch_too_large_to_shuffle_in_memory_is_permuted_by_index(monkeypatch):
    for n in (1, 2, 3, 16, 17, 1000, 4097):
        keys = np.random.default_rng(n).integers(2**32, size=6, dtype=np.uint64)
        np.testing.assert_array_equal(np.sort(permute_index(np.arange(n), n, keys)), np.arange(n))
    far = permute_index(np.arange(10**4) + 10**11, 10**12, keys)
    assert len(np.unique(far)) == 10**4
    assert abs(far.mean() / 10**12 - 0.5) < 0.02  # the standard deviation is 0.003
    assert abs(np.corrcoef(far[:-1], far[1:])[0, 1]) < 0.05
    monkeypatch.setattr(jax_train_utils, 'SHUFFLED_IN_MEMORY', 0)
    tokens = np.arange(500, dtype=np.uint16)
    n_windows = count_windows(500, 16)
    first, second = (get_batch_jax(tokens, 16, n_windows, 7, i)[0] for i in (0, 1))
    assert len(np.unique(first)) == first.size
    assert not np.array_equal(first, second)
    # 10^12 tokens: the batch of an iteration takes no memory that grows with them
    n = 10**12
    starts = epoch_windows(n, 1024, 7, 0, np.arange(5))
    assert starts.max() < n - 1024


def test_a_split_of_several_files_is_read_as_one(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    one = load_dataset(tmp_path, 8)[0]['train']
    (tmp_path / 'train.bin').unlink()
    for i, part in enumerate((one[:7], one[7:9], one[9:])):
        part.tofile(tmp_path / f'train_{i:03}.bin')
    several = load_dataset(tmp_path, 8)[0]['train']
    for i in range(5):
        np.testing.assert_array_equal(get_batch_jax(several, 8, 3, 7, i), get_batch_jax(one, 8, 3, 7, i))
    tokenizer = {'kind': 'gpt2'}
    assert describe_data({'train': several}, tokenizer) == describe_data({'train': one}, tokenizer)
    masks = np.ones(30, np.uint8), np.ones(20, np.uint8)
    masks[0][:13].tofile(tmp_path / 'train_mask_000.bin')
    masks[0][13:].tofile(tmp_path / 'train_mask_001.bin')
    masks[1].tofile(tmp_path / 'val_mask.bin')
    assert len(load_masks(tmp_path, load_dataset(tmp_path, 8)[0])['train']) == 30
    (tmp_path / 'train_002.bin').rename(tmp_path / 'train_003.bin')
    assert 'of the numbers [0, 1, 3], not 0 to 2' in refusal(load_dataset, tmp_path, 8)
    one.tofile(tmp_path / 'train.bin')
    (tmp_path / 'train_003.bin').rename(tmp_path / 'train_002.bin')
    assert 'has both train.bin and train_000.bin' in refusal(load_dataset, tmp_path, 8)


@pytest.mark.parametrize('dtype', ['uint16', 'uint32'])
def test_a_dataset_is_read_as_its_meta_json_says(tmp_path, dtype):
    write_dataset(tmp_path, np.arange(30), np.arange(20), dtype=dtype)
    splits, vocab_size, tokenizer = load_dataset(tmp_path, 8)
    assert splits['train'].tolist() == list(range(30))
    assert splits['val'].tolist() == list(range(20))
    assert vocab_size == 37
    assert tokenizer['kind'] == 'char'


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
    with pytest.raises(UserError, match='there is no .*train.bin'):  # an empty folder is no data set of nanoGPT's
        load_dataset_meta(tmp_path)


def test_a_dataset_that_cannot_be_used_is_refused(tmp_path):
    def write(**options):
        write_dataset(tmp_path, np.arange(30), np.arange(20), **options)

    with pytest.raises(UserError, match='there is no .*train.bin'):
        load_dataset(tmp_path / 'nothing', 8)
    write()
    (tmp_path / 'prepare.py').touch()
    (tmp_path / 'val.bin').unlink()
    with pytest.raises(UserError, match='no .*val.bin; run: python .*prepare.py'):
        load_dataset(tmp_path, 8)
    write()
    with pytest.raises(UserError, match='val.bin has 20 tokens, and block_size=20 needs 21'):
        load_dataset(tmp_path, 20)
    write()
    (tmp_path / 'train.bin').write_bytes((tmp_path / 'train.bin').read_bytes()[:-1])
    with pytest.raises(UserError, match='59 bytes, not a multiple of 2'):
        load_dataset(tmp_path, 8)
    write(vocab_size=29)
    with pytest.raises(UserError, match='token id 29, outside the vocabulary of 29'):
        load_dataset(tmp_path, 8)
    write()
    (tmp_path / 'meta.json').unlink()
    (tmp_path / 'meta.pkl').touch()
    with pytest.raises(UserError, match='pickle'):
        load_dataset(tmp_path, 8)


def test_a_dataset_that_prepare_has_counted_is_not_read_at_the_start(tmp_path):
    write_dataset(tmp_path, np.arange(30), np.arange(20), vocab_size=25)
    counted = dict(train_tokens=30, val_tokens=20, max_id=24)  # a lie: ids go to 29
    edit_json(tmp_path / 'meta.json', **counted)
    assert len(load_dataset(tmp_path, 8)[0]['train']) == 30
    edit_json(tmp_path / 'meta.json', max_id=25)
    assert 'has token id 25, outside the vocabulary of 25' in refusal(load_dataset, tmp_path, 8)
    edit_json(tmp_path / 'meta.json', max_id=None)
    assert 'has token id 29, outside' in refusal(load_dataset, tmp_path, 8)
    edit_json(tmp_path / 'meta.json', **counted | {'train_tokens': 31})
    assert 'train.bin has 30 tokens, its meta.json says 31' in refusal(load_dataset, tmp_path, 8)


def test_a_dataset_on_another_drive_than_the_current_folder_is_read(tmp_path, monkeypatch):
    def relpath(path):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")  # as on Windows
    monkeypatch.setattr(os.path, 'relpath', relpath)
    write_dataset(tmp_path, np.arange(30), np.arange(20), vocab_size=30)
    splits, *_ = load_dataset(tmp_path, 8)
    assert len(splits['train']) == 30 and load_masks(tmp_path, splits) == {}


def test_the_fingerprint_of_data_tells_one_token_and_the_tokenizer():
    splits = {'train': np.arange(50, dtype=np.uint16), 'val': np.arange(9, dtype=np.uint16)}
    one = describe_data(splits, {'kind': 'gpt2'})
    assert one == describe_data(splits, {'kind': 'gpt2'})
    other = describe_data(splits | {'val': splits['val'] ^ np.uint16(1)}, {'kind': 'char'})
    assert {name for name in one if one[name] != other[name]} == {'content of val.bin', 'the tokenizer'}
    shorter = describe_data(splits | {'train': splits['train'][:-1]}, {'kind': 'gpt2'})
    assert {name for name in one if one[name] != shorter[name]} == {'tokens in train.bin', 'content of train.bin'}


@pytest.mark.parametrize('meta, message', [
    ('{"vocab_size":', 'damaged'),
    ('[' * 100000, 'damaged'),
    ('{}', 'damaged'),
    ('{"vocab_size": 5, "dtype": "int64", "tokenizer": {}}', 'int64'),
    ('{"vocab_size": 28.5, "dtype": "uint16", "tokenizer": {}}', '28.5'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": null}', 'damaged'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "word"}}', 'tokenizer is none of'),
    ('{"vocab_size": 37, "dtype": "uint16", "tokenizer": {"kind": "char", "chars": "ab"}}', 'tokenizer is none of')])
def test_a_dataset_with_a_damaged_meta_json_is_refused(tmp_path, meta, message):
    write_dataset(tmp_path, np.arange(30), np.arange(20))
    (tmp_path / 'meta.json').write_text(meta)
    with pytest.raises(UserError, match=message):
        load_dataset(tmp_path, 8)


def test_a_meta_pkl_is_converted_by_the_command_that_the_message_gives(tmp_path):
    write_dataset(tmp_path, np.arange(3), np.arange(3))
    (tmp_path / 'meta.json').unlink()
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 3, 'itos': {0: '\n', 1: "'", 2: 'b'}, 'stoi': {}}))
    with pytest.raises(UserError) as error:
        load_dataset_meta(tmp_path)
    command = ' '.join(str(error.value).split()).partition('convert it once: ')[2]
    subprocess.run(command, shell=True, check=True, timeout=100)
    assert load_dataset_meta(tmp_path)['tokenizer'] == {'kind': 'char', 'chars': "\n'b"}


def test_the_loss_of_masked_tokens_counts_the_others_only_however_the_batch_is_split():
    mask = np.random.default_rng(0).integers(2, size=500).astype(np.uint8)
    weights = get_loss_weights(mask, 16, 8, 0, 3, np.arange(8))
    targets = get_batch_jax(mask, 16, 8, 0, 3)[1]
    assert (weights[targets == 0] == 0).all()
    np.testing.assert_allclose(weights.mean(), 1, rtol=1e-6)
    np.testing.assert_array_equal(get_loss_weights(mask, 16, 8, 0, 3, np.arange(2, 5)), weights[2:5])
    # a step with weights has the gradient of the mean over the tokens that count
    config = dataclasses.replace(TINY, n_layer=1)
    schedule = create_learning_rate_schedule(1e-2, decay_lr=False)
    step = make_train_step(config, 0, 0.0, schedule)
    state = create_train_state(jax.random.key(0), config, optax.sgd(1.0))
    tokens = np.random.default_rng(1).integers(37, size=500)
    x, y = get_batch_jax(tokens, 16, 8, 0, 3)
    by_micro_batch = lambda a: a.reshape(2, 4, *a.shape[1:])
    batch = {'x': x, 'y': y, 'seq_id': np.arange(8, dtype=np.uint32), 'weight': weights}
    after, metrics = jax.jit(step)(state, jax.tree.map(by_micro_batch, batch))

    def mean_loss(params):
        return (cross_entropy(GPT(config).apply({'params': params}, x), y) * targets).sum() / targets.sum()

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
    check = lambda before, after, grad: np.testing.assert_allclose(before - after, grad, atol=1e-6)
    jax.tree.map(check, state.params, after.params, grads)


def test_characters_the_vocabulary_lacks_are_named():
    tokenizer = load_tokenizer({'kind': 'char', 'chars': '\nabc'})
    assert tokenizer.decode(tokenizer.encode('cab\n')) == 'cab\n'
    assert tokenizer.vocab_size == 4
    with pytest.raises(UserError, match="does not know: 'd' 'x'"):
        tokenizer.encode('axd')
    with pytest.raises(UserError, match='unknown kind'):
        load_tokenizer({'kind': 'words'})


def test_text_that_ends_within_a_character_is_shown_up_to_it():
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)}
    byte_tokens = tiktoken.Encoding('bytes', pat_str='.', mergeable_ranks=ranks, special_tokens={})
    text = 'é 10 € 😀!'
    data = text.encode()
    shown = [strip_partial_utf8(byte_tokens.decode(list(data[:n]))) for n in range(len(data) + 1)]
    assert all(text.startswith(part) for part in shown)
    assert shown[-1] == text
    assert len(set(shown)) == len(text) + 1


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


def test_schedules_are_what_they_are_called():
    make = functools.partial(create_learning_rate_schedule, 1.0, warmup_iters=10, lr_decay_iters=110, min_lr=0.1)
    iterations = (0, 5, 10, 60, 90, 100, 110, 200)
    rates = lambda name: [float(make(lr_schedule=name)(i)) for i in iterations]
    warm_up = [1 / 11, 6 / 11, 1]
    assert rates('linear') == pytest.approx(warm_up + [0.55, 0.28, 0.19, 0.1, 0.1])
    assert rates('wsd') == pytest.approx(warm_up + [1, 1, 0.55, 0.1, 0.1])
    assert rates('constant') == pytest.approx(warm_up + [1] * 5)
    assert rates('cosine')[:4] == pytest.approx(warm_up + [0.55])
    assert make(lr_schedule='linear', decay_lr=False)(0) == 1  # nanoGPT's flag has precedence
    with pytest.raises(UserError, match='lr_schedule must be one of cosine'):
        make(lr_schedule='step')


def test_clipping_is_torchs():
    grads = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[4.0]])}
    clipped, norm = clip_gradients(grads, 1.0)
    assert norm == 5
    assert optax.tree.norm(clipped) == pytest.approx(1, abs=1e-5)
    for max_norm in (0.0, 6.0):
        np.testing.assert_array_equal(clip_gradients(grads, max_norm)[0]['a'], grads['a'])


EXPERTS = dataclasses.replace(TINY, n_layer=1, bias=True, moe=MoEConfig(n_expert=4, n_used=2, width=8))


@pytest.mark.parametrize('config', [TINY, EXPERTS])
def test_decay_touches_matrices_and_embeddings_only(config):
    tx = create_optimizer_with_schedule(lambda step: 0.1, weight_decay=0.5)
    state = create_train_state(jax.random.key(0), config, tx)
    state = state.replace(params=jax.tree.map(jnp.ones_like, state.params))
    after = state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, state.params)).params
    for path, p in jax.tree_util.tree_leaves_with_path(after):
        expected = 0.95 if path[-1].key in ('kernel', 'wte', 'wpe', 'embedding') else 1.0
        np.testing.assert_allclose(p, expected, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize('config', [dataclasses.replace(TINY, n_layer=1), EXPERTS])
def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest(config):
    def updates(optimizer):
        tx = create_optimizer_with_schedule(lambda step: 0.1, weight_decay=0.0, optimizer=optimizer)
        state = create_train_state(jax.random.key(0), config, tx)
        grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), state.params)
        return jax.tree.map(jnp.subtract, state.apply_gradients(grads=grads).params, state.params)

    muon, adamw = updates('muon'), updates('adamw')
    for (path, update), by_adamw in zip(jax.tree_util.tree_leaves_with_path(muon), jax.tree.leaves(adamw)):
        if path[-1].key == 'kernel' and path[-2].key != 'router':
            spectrum = np.linalg.svd(update, compute_uv=False)  # of each expert
            assert (spectrum.min(-1) > 0.5 * spectrum.max(-1)).all()  # nearly orthogonal
            rms = jnp.sqrt(jnp.square(update).mean())
            assert rms == pytest.approx(0.1 * 0.2, rel=0.3)  # a fifth of Adam's first step
        else:
            np.testing.assert_allclose(update, by_adamw, rtol=1e-5)
    with pytest.raises(UserError, match='optimizer must be one of adamw, muon'):
        create_optimizer_with_schedule(lambda step: 0.1, optimizer='sgd')


def test_muon_in_batches_takes_the_first_step_that_optax_takes_matrix_by_matrix():
    shapes = {'a': (8, 24), 'b': (24, 8), 'c': (8, 24), 'd': (8, 8)}
    params = {name: jax.random.normal(jax.random.key(ord(name)), shape) for name, shape in shapes.items()}
    grads = jax.tree.map(lambda p: jnp.square(p) - 0.5, params)
    optaxs = optax.contrib.muon(0.1, weight_decay=0.1, consistent_rms=0.2)
    expected = optaxs.update(grads, optaxs.init(params), params)[0]
    ours = create_optimizer_with_schedule(lambda step: 0.1, optimizer='muon')
    kernels = lambda tree: {name: {'kernel': leaf} for name, leaf in tree.items()}
    updates = ours.update(kernels(grads), ours.init(kernels(params)), kernels(params))[0]
    for name in shapes:
        np.testing.assert_allclose(updates[name]['kernel'], expected[name], rtol=1e-4, atol=1e-6)


# -----------------------------------------------------------------------------
# the training step


DROPOUT_ON = dataclasses.replace(TINY, dropout=0.2)


def mean_loss(params, x, y):
    return cross_entropy(apply(TINY, params, x), y).mean()


def test_micro_steps_make_the_update_of_the_big_batch():
    big, big_log = run_steps((1,), 3, DROPOUT_ON, g=1, b=8)
    for g, b in ((8, 1), (2, 4)):
        small, log = run_steps((1,), 3, DROPOUT_ON, g=g, b=b)
        for expected, metrics in zip(big_log, log):
            assert metrics == pytest.approx(expected, rel=1e-4)
        for expected, got in zip(jax.tree.leaves(big.params), jax.tree.leaves(small.params)):
            np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize('n_devices', [2, 8])
def test_several_devices_give_the_curve_of_one(n_devices):
    one, several = (run_steps((n,), 30, DROPOUT_ON)[1] for n in (1, n_devices))
    np.testing.assert_allclose(column(several, 'loss'), column(one, 'loss'), atol=2e-4)
    np.testing.assert_allclose(column(several, 'grad_norm'), column(one, 'grad_norm'), rtol=5e-3)


def test_replicas_stay_equal_to_the_bit():
    state, _ = run_steps((8,), 5, DROPOUT_ON, g=1)
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == 8
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize('n_devices', [1, 8])
def test_the_state_is_donated(n_devices):
    parallel, state, step = fresh_run((n_devices,), TINY)
    step(state, device_batch(parallel, 1, 8, 0, TINY))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_the_loss_is_the_mean_over_all_micro_steps_and_devices():
    parallel, state, step = fresh_run((4,), TINY)
    batch = host_batch(parallel, 16, 0, TINY)
    expected = mean_loss(state.params, batch['x'], batch['y'])
    _, metrics = step(state, parallel.shard_batch(batch, split_batch(8, 2, 4)))
    assert float(metrics['loss']) == pytest.approx(float(expected), rel=1e-5)


def test_the_logged_learning_rate_is_the_one_applied():
    schedule = create_learning_rate_schedule(1e-2, warmup_iters=3, lr_decay_iters=6, min_lr=1e-3)
    state = create_train_state(jax.random.key(0), TINY, optax.sgd(schedule))
    step = jax.jit(make_train_step(TINY, 0, 0.0, schedule))
    parallel = DataParallel(jax.devices()[:1])
    for i in range(8):
        before = state.params
        state, metrics = step(state, device_batch(parallel, 1, 8, i, TINY))
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, before, state.params))
        assert moved / metrics['grad_norm'] == pytest.approx(float(metrics['lr']), rel=1e-3)
        assert metrics['lr'] == pytest.approx(float(schedule(i)))


@pytest.mark.parametrize('n_micro, n_loops', [(1, 0), (2, 1)])
def test_one_micro_step_is_not_a_loop(n_micro, n_loops):
    _, make, _ = compiled_once((1,), TINY)
    step = make_train_step(TINY, 0, 1.0, create_learning_rate_schedule(1e-3, decay_lr=False))
    tokens = jax.ShapeDtypeStruct((n_micro, 2, 16), jnp.int32)
    batch = {'x': tokens, 'y': tokens, 'seq_id': jax.ShapeDtypeStruct((n_micro, 2), jnp.uint32)}
    lowered = jax.jit(step).lower(jax.eval_shape(make), batch)
    assert lowered.as_text().count('stablehlo.while') == n_loops


@pytest.mark.parametrize('name', ['train', 'train_no_bias'])
def test_five_steps_of_adamw_with_clipping_are_torchs(name):
    golden = np.load(GOLDEN / name / 'steps.npz')
    config, params = load_pretrained(GOLDEN / name / 'ckpt.pt')
    schedule = lambda step: jnp.asarray(golden['lrs'])[step]
    state = create_train_state(jax.random.key(0), config, create_optimizer_with_schedule(schedule))
    state = state.replace(params=params)
    step = jax.jit(make_train_step(config, 0, 1.0, schedule))
    assert (golden['grad_norms'] > 1).any()  # clipping acts
    for x, y, loss, grad_norm in zip(golden['x'], golden['y'], golden['losses'], golden['grad_norms'], strict=True):
        batch = {'x': x[None], 'y': y[None], 'seq_id': np.zeros((1, len(x)), np.uint32)}
        state, metrics = step(state, batch)
        assert float(metrics['loss']) == pytest.approx(float(loss), abs=1e-5)
        assert float(metrics['grad_norm']) == pytest.approx(float(grad_norm), abs=1e-5)
    logits = apply(config, state.params, golden['x'][0])
    np.testing.assert_allclose(logits, golden['logits_after'], atol=1e-4)


# -----------------------------------------------------------------------------
# float16


HALF = dataclasses.replace(TINY, dtype='float16')


def test_float16_trains_like_float32_and_scales_its_loss():
    full, half = (run_steps((1,), 10, config)[1] for config in (TINY, HALF))
    np.testing.assert_allclose(column(half, 'loss'), column(full, 'loss'), atol=0.02)
    assert half[0]['loss_scale'] == 2**16
    assert 'loss_scale' not in full[0]


def test_an_overflow_skips_the_update_and_halves_the_scale():
    parallel, state, step = fresh_run((1,), HALF)
    state = state.replace(loss_scale={'scale': jnp.float32(2.0**40), 'good_steps': jnp.int32(7)})
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, device_batch(parallel, 1, 8, 0, HALF))
    assert not np.isfinite(metrics['grad_norm'])
    assert np.isfinite(metrics['loss'])
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    assert state.loss_scale == {'scale': 2.0**39, 'good_steps': 0}
    assert state.step == 0


def test_2000_good_steps_double_the_scale():
    parallel, state, step = fresh_run((1,), HALF)
    state = state.replace(loss_scale={'scale': jnp.float32(8), 'good_steps': jnp.int32(1999)})
    state, metrics = step(state, device_batch(parallel, 1, 8, 1, HALF))
    assert np.isfinite(metrics['grad_norm'])
    assert state.loss_scale == {'scale': 16, 'good_steps': 0}
    assert state.step == 1


# -----------------------------------------------------------------------------
# evaluation


def test_evaluation_is_the_mean_of_the_same_windows_on_any_number_of_devices(tmp_path):
    write_dataset(tmp_path, np.arange(3000) % 37, np.arange(2000) % 31)
    splits = load_dataset(tmp_path, 16)[0]
    results = []
    for n_devices in (1, 2, 8):
        parallel, state, _ = fresh_run((n_devices,), DROPOUT_ON)
        eval_step = parallel.eval_step(make_eval_step(DROPOUT_ON))
        results.append(estimate_loss_jax(
            eval_step, state.params, splits, parallel, block_size=16, batch_size=4, eval_iters=3))
    x, y = get_windows(splits['val'], np.arange(12) * (2000 - 17) // 11, 16)
    expected = mean_loss(state.params, x, y)
    for result in results:
        assert result['val'] == pytest.approx(float(expected), rel=1e-5)
        assert result['train'] == pytest.approx(results[0]['train'], rel=1e-5)
        assert result['train'] != result['val']


def test_an_evaluation_ends_when_a_signal_comes():
    parallel, state, _ = fresh_run((1,), DROPOUT_ON)
    splits = {'train': np.arange(3000) % 37}
    calls = []

    def eval_step(params, batch):
        calls.append(len(calls))
        return 0.0

    evaluate = functools.partial(estimate_loss_jax, eval_step, None, splits, parallel, block_size=16, batch_size=4)
    assert evaluate(eval_iters=1000, stop_signal=lambda: 15 if len(calls) >= 3 else 0) is None
    assert len(calls) <= 5


# -----------------------------------------------------------------------------
# checkpoints


def test_a_checkpoint_holds_the_state_of_its_iteration_while_training_continues_during_the_write(tmp_path):
    config = dataclasses.replace(TINY, n_embd=256, dtype='float16')  # large enough for the write to take a while
    meta = meta_of(config)
    expected = run_steps((8,), 6, config, g=1)[0]
    expected = jax.tree.map(np.array, (expected.params, opt_state_item(expected)))

    parallel, state, step = fresh_run((8,), config)
    manager = open_checkpoints(tmp_path)
    for i in range(10):
        if i in (4, 6):
            save_checkpoint(manager, i, state, meta, val_loss=1.0 / i)
        state, _ = step(state, device_batch(parallel, 1, 8, i, config))  # donates the state that is being written
    finish_checkpoints(manager)
    iteration, meta_again = choose_checkpoint(tmp_path)
    assert iteration == 6
    assert meta_again == json.loads(json.dumps(meta))
    tx = create_optimizer_with_schedule(lambda step: 0.1)
    abstract = parallel.abstract_state(create_train_state, jax.random.key(0), config, tx)
    restored = load_checkpoint(tmp_path, iteration, abstract)
    jax.tree.map(np.testing.assert_array_equal, (restored.params, opt_state_item(restored)), expected)
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path, 'latest')[1], expected[0])
    replicated = NamedSharding(parallel.mesh, P())
    assert all(leaf.sharding == replicated for leaf in jax.tree.leaves(restored.params))


@pytest.fixture
def tiny_state():
    return fresh_run((1,), TINY)[1]


@pytest.mark.parametrize('keep, kept', [(1, [3, 8]), (3, [3, 6, 7, 8])])
def test_the_latest_checkpoints_and_the_best_one_are_kept(tmp_path, tiny_state, keep, kept):
    manager = open_checkpoints(tmp_path, keep)
    for i, val_loss in enumerate([3.0, 2.0, 1.0, None, 1.5, None, 1.2, 1.3], start=1):
        save_checkpoint(manager, i, tiny_state, meta_of(TINY), val_loss)
    finish_checkpoints(manager)
    assert sorted(int(path.name) for path in (tmp_path / 'ckpt').iterdir()) == kept
    assert choose_checkpoint(tmp_path, 'best')[0] == 3
    assert choose_checkpoint(tmp_path, 'latest')[0] == 8


def test_without_an_evaluation_the_latest_is_the_best(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 4, tiny_state, meta_of(TINY))
    finish_checkpoints(manager)
    assert choose_checkpoint(tmp_path, 'best')[0] == 4


def test_an_incomplete_checkpoint_does_not_count(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 4, tiny_state, meta_of(TINY))
    finish_checkpoints(manager)
    (tmp_path / 'ckpt' / '9.orbax-checkpoint-tmp').mkdir()
    assert choose_checkpoint(tmp_path)[0] == 4


@pytest.fixture
def three_checkpoints(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path, keep=3)
    for i in (1, 2, 3):
        save_checkpoint(manager, i, tiny_state, meta_of(TINY), val_loss=1.0 / i)
    finish_checkpoints(manager)
    return tmp_path


def damage(path, how):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if how == 'flip a bit' else content[:len(content) // 2])


@pytest.mark.parametrize('which', ['latest', 'best'])
@pytest.mark.parametrize('how', ['flip a bit', 'cut in half'])
def test_damage_to_any_file_of_a_checkpoint_is_named_and_the_newest_intact_one_is_taken(
        three_checkpoints, capsys, which, how):
    folder = three_checkpoints / 'ckpt' / '3'
    for path in [path for path in folder.glob('*/**/*') if path.is_file()]:
        content = path.read_bytes()
        damage(path, how)
        assert choose_checkpoint(three_checkpoints, which)[0] == 2
        said = capsys.readouterr().err
        assert 'ckpt/3 is damaged' in said and path.name in said and 'taking checkpoint 2 instead' in said
        assert said.count('\n') == 1
        path.write_bytes(content)
    assert choose_checkpoint(three_checkpoints, which)[0] == 3
    assert capsys.readouterr().err == ''
    damage(folder / 'checksums.json', how)
    assert choose_checkpoint(three_checkpoints, which)[0] == 2


def test_without_an_intact_checkpoint_one_line_says_so(three_checkpoints):
    for path in three_checkpoints.glob('ckpt/*/params/_METADATA'):
        damage(path, 'flip a bit')
    said = refusal(choose_checkpoint, three_checkpoints)
    assert all(f'ckpt/{i} is damaged' in said for i in (1, 2, 3)) and 'there is no intact one' in said


def test_damaged_checkpoints_are_renamed_so_that_training_can_save_again(three_checkpoints, tiny_state):
    damage(three_checkpoints / 'ckpt' / '3' / 'params' / '_METADATA', 'flip a bit')
    damage(three_checkpoints / 'ckpt' / '1' / 'metrics' / 'metrics', 'cut in half')  # Orbax cannot read it
    step, _ = choose_checkpoint(three_checkpoints)
    lock_out_dir(three_checkpoints, step)
    names = sorted(path.name for path in (three_checkpoints / 'ckpt').iterdir())
    assert names == ['1.damaged', '2', '3.damaged']
    manager = open_checkpoints(three_checkpoints, keep=1)
    save_checkpoint(manager, 3, tiny_state, meta_of(TINY), val_loss=0.1)
    finish_checkpoints(manager)
    assert checkpoint_steps(three_checkpoints) == [3]
    assert choose_checkpoint(three_checkpoints)[0] == 3


def test_a_checkpoint_of_an_earlier_version_without_checksums_is_read(three_checkpoints):
    latest = three_checkpoints / 'ckpt' / '3'
    (latest / 'checksums.json').unlink()
    edit_json(latest / 'meta' / 'metadata', checksums=None, wandb_id='none')
    assert choose_checkpoint(three_checkpoints)[0] == 3


def test_a_checkpoint_that_has_lost_its_checksums_is_damaged(three_checkpoints, capsys):
    (three_checkpoints / 'ckpt' / '3' / 'checksums.json').unlink()
    assert choose_checkpoint(three_checkpoints)[0] == 2
    assert 'checksums.json is missing' in capsys.readouterr().err


def test_a_save_without_checksums_fails_and_leaves_no_checkpoint(tmp_path, tiny_state, monkeypatch):
    monkeypatch.setattr(jax_train_utils, 'UNFINISHED', '*.another-name')  # of what Orbax has yet to complete
    manager = open_checkpoints(tmp_path)
    with pytest.raises(UserError, match='cannot write .*checksums.json'):
        save_checkpoint(manager, 4, tiny_state, meta_of(TINY))
        finish_checkpoints(manager)
    assert checkpoint_steps(tmp_path) == []


def test_out_dir_is_locked_by_one_process_until_that_ends(tmp_path):
    hold = f'import jax_train_utils, time; lock = jax_train_utils.lock_out_dir({str(tmp_path)!r}); ' \
           'print("held", flush=True); time.sleep(60)'
    holder = subprocess.Popen([sys.executable, '-c', hold], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert next_line(holder.stdout, holder) == 'held\n'
    assert f'is in use by process {holder.pid} on ' in refusal(lock_out_dir, tmp_path)
    holder.kill()
    output_of(holder)
    lock_out_dir(tmp_path).close()


def test_a_folder_without_a_usable_checkpoint_is_refused(tmp_path, tiny_state):
    with pytest.raises(UserError, match='no complete checkpoint in .*train one with: python train_jax.py'):
        choose_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())  # the check itself creates no files
    (tmp_path / 'ckpt').mkdir()
    with pytest.raises(UserError, match='no complete checkpoint'):
        choose_checkpoint(tmp_path)
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 1, tiny_state, {'some': 'thing'})
    finish_checkpoints(manager)
    with pytest.raises(UserError, match='damaged or not a checkpoint of this program'):
        choose_checkpoint(tmp_path)
    with pytest.raises(UserError, match='does not fit'):
        load_checkpoint(tmp_path, 1, fresh_run((1,), dataclasses.replace(TINY, n_embd=32))[1])


def test_a_disk_that_is_full_is_reported_in_one_line_and_the_old_checkpoint_stays(tmp_path, tiny_state, monkeypatch):
    import orbax.checkpoint as ocp
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 1, tiny_state, meta_of(TINY))
    manager.wait_until_finished()

    def full(*args, **options):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(ocp.CheckpointManager, 'save', full)
    with pytest.raises(UserError, match='cannot write checkpoint 2 to .* MB are free.*No space left') as error:
        save_checkpoint(manager, 2, tiny_state, meta_of(TINY))
    assert '\n' not in str(error.value)
    assert choose_checkpoint(tmp_path)[0] == 1


def test_a_clock_that_is_set_during_a_save_does_not_spoil_it(tmp_path, tiny_state, monkeypatch):
    hours = itertools.count()
    real = time.time
    manager = open_checkpoints(tmp_path)
    monkeypatch.setattr(time, 'time', lambda: real() + 3600 * next(hours))
    save_checkpoint(manager, 1, tiny_state, meta_of(TINY))
    finish_checkpoints(manager)
    assert checkpoint_steps(tmp_path) == [1]
    assert next(hours) > 2


# -----------------------------------------------------------------------------
# logs


def test_reopened_metrics_hold_each_iteration_once(tmp_path):
    log = MetricsLog(tmp_path)
    for i in range(5):
        log.write({'iter': i, 'loss': float(i)})
    log.write({'iter': 5, 'grad_norm': float('inf')})
    log.file.write('{"iter": 6, "lo')  # the process was killed while it wrote this line
    assert read_metrics(tmp_path)[-1] == {'iter': 5, 'grad_norm': None}
    log = MetricsLog(tmp_path, 3)
    log.write({'iter': 3, 'loss': 3.5})
    assert [record['iter'] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert read_metrics(tmp_path)[-1]['loss'] == 3.5


def test_the_picture_of_a_long_run_takes_little_memory(tmp_path):
    n = 20000
    with open(tmp_path / 'metrics.jsonl', 'w') as file:
        for i in range(n):
            file.write(json.dumps({'iter': i, 'loss': 4.0, 'lr': 1e-3, 'grad_norm': 1.0, 'time_ms': 1.0}) + '\n')
    plot_losses(tmp_path)  # imports matplotlib and loads its fonts
    tracemalloc.start()
    plot_losses(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6, peak  # the records themselves take 8 MB


def test_a_deleted_out_dir_is_made_again_for_the_metrics(tmp_path):
    (tmp_path / 'out').mkdir()
    log = MetricsLog(tmp_path / 'out')
    log.write({'iter': 0})
    shutil.rmtree(tmp_path / 'out')
    log.write({'iter': 1})
    log.write({'iter': 2})
    assert read_metrics(tmp_path / 'out') == [{'iter': 1}, {'iter': 2}]
    with warnings.catch_warnings(action='error'):
        plot_losses(tmp_path / 'out')  # of nothing


@pytest.mark.parametrize('line', [b'3', b'[]', b'{"loss": 2}', b'{"iter": "x"}', b'\xff', b'[' * 100000])
def test_metrics_end_at_a_damaged_line(tmp_path, line):
    (tmp_path / 'metrics.jsonl').write_bytes(b'{"iter": 0}\n' + line + b'\n{"iter": 2}\n')
    assert read_metrics(tmp_path) == [{'iter': 0}]


def test_the_loss_curves_become_a_picture(tmp_path):
    log = MetricsLog(tmp_path)
    for i in range(5):
        log.write({'iter': i, 'loss': 4.0 - i})
    log.write({'iter': 5, 'train_loss': 1.0, 'val_loss': 2.0})
    plot_losses(tmp_path)
    assert (tmp_path / 'loss.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


def test_an_evaluation_at_the_iteration_of_a_resume_is_kept_and_not_written_again(tmp_path):
    log = MetricsLog(tmp_path)
    evaluation = {'iter': 2, 'train_loss': 1.0, 'val_loss': 2.0}
    for record in ({'iter': 1, 'loss': 1.5}, evaluation, {'iter': 2, 'loss': 1.4}):
        log.write(record)
    log = MetricsLog(tmp_path, 2)
    for record in (evaluation, {'iter': 2, 'loss': 1.4}, {'iter': 3, 'loss': 1.3}):
        log.write(record)
    assert [record['iter'] for record in read_metrics(tmp_path)] == [1, 2, 2, 3]
    assert [record.get('val_loss') for record in read_metrics(tmp_path)] == [None, 2.0, None, None]


# -----------------------------------------------------------------------------
# signals


SIGNALLED = """
import time
import jax
from jax_train_utils import StopSignal
stop = StopSignal(nothing_to_save={nothing_to_save})
stop.saving = lambda: {saving}
print('ready', flush=True)
{then}
"""
ENDLESS_STEP = 'jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, jax.numpy.sin, x))(1.0).block_until_ready()'


@contextlib.contextmanager
def signalled(nothing_to_save=False, saving=False, then=ENDLESS_STEP):
    """A process with a StopSignal, and a function that sends it a signal and returns the line that it answers."""
    program = SIGNALLED.format(nothing_to_save=nothing_to_save, saving=saving, then=then)
    with subprocess.Popen([sys.executable, '-c', program], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        def send(signum):
            process.send_signal(signum)
            return next_line(process.stderr, process)

        try:
            assert next_line(process.stdout, process) == 'ready\n'
            yield process, send
        finally:
            process.kill()


def test_a_signal_is_answered_at_once_also_during_a_step_and_a_second_one_ends_the_process():
    with signalled() as (process, send):
        assert send(signal.SIGINT) == ('stopping after this iteration, then saving; Ctrl-C again ends at once, '
                                       'without saving\n')
        assert send(signal.SIGINT) == 'ended by Ctrl-C\n'
        assert process.wait(timeout=60) == 128 + signal.SIGINT


def test_a_second_signal_has_to_wait_for_a_save():
    with signalled(saving=True, then='time.sleep(60); time.sleep(60); time.sleep(60)') as (process, send):
        assert send(signal.SIGTERM).startswith('stopping after this iteration, then saving; SIGTERM again ends')
        for _ in range(2):
            assert send(signal.SIGTERM) == 'SIGTERM has to wait: a checkpoint is being written\n'
        assert process.poll() is None


def test_a_signal_while_a_run_starts_ends_it_with_a_line():
    with signalled(nothing_to_save=True, then='time.sleep(60)') as (process, send):
        assert send(signal.SIGINT) == 'stopping: there is nothing to save; Ctrl-C again ends at once\n'
        assert process.wait(timeout=60) == 128 + signal.SIGINT
