"""Devices, dtype, malloc and the compilation cache of a process."""
import importlib.metadata
import os
import platform
import runpy
import subprocess
import sys
import types
from pathlib import Path

import jax
import jaxlib
import pytest

import jax_devices.processes
import jax_devices.setup
from jax_devices.setup import (
    can_cache_on_cpu, check_device_availability, configure_process, cpu_name, default_dtype, device_peak_flops,
    enable_compilation_cache, finds_accelerator, setup_jax_environment)
from jax_flags import UserError
from tests.common import ROOT, restored_handlers, start

# -----------------------------------------------------------------------------
# devices

def test_device_flag():
    assert len(check_device_availability('cpu')) == 8
    assert len(check_device_availability('auto')) == 8
    assert check_device_availability('cpu:3') == [jax.devices()[3]]
    for device, message in (('cpu:8', 'there are 8'), ('cuda', 'jax sees no cuda here, only cpu'), ('mps', 'jax-mps'),
                            ('cpu:x', 'device must be')):
        with pytest.raises(UserError, match=message):
            check_device_availability(device)


def test_cpu_computes_in_float32_unless_asked():
    assert setup_jax_environment('cpu')[1:] == ('float32', 'the CPU default')
    assert setup_jax_environment('cpu', 'bfloat16')[1] == 'bfloat16'
    with pytest.raises(UserError, match='dtype must be one of auto, float32, bfloat16, float16'):
        setup_jax_environment('cpu', 'float64')


@pytest.mark.parametrize('kind, peak', [
    ('NVIDIA H200', 989e12), ('NVIDIA H100 PCIe', 756e12), ('NVIDIA A100-SXM4-40GB', 312e12), ('TPU v4', 275e12),
    ('TPU v5 lite', 197e12), ('NVIDIA GH200 480GB', 989e12), ('Tesla T4', 65e12), ('NVIDIA T400', None), ('cpu', None)])
def test_peak_flops_are_known_or_none(kind, peak):
    assert device_peak_flops(types.SimpleNamespace(device_kind=kind)) == peak


# -----------------------------------------------------------------------------
# the process

STEPS = """
import resource, sys, jax, jax.numpy as jnp
from jax_devices.setup import setup_jax_environment
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


@pytest.mark.slow
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


@pytest.fixture
def handlers():
    with restored_handlers():
        yield


@pytest.mark.parametrize('script', ['train_jax.py', 'sample_jax.py', 'bench_jax.py'])
def test_memory_and_platform_are_settled_before_jax_starts(script, monkeypatch, handlers):
    events = []

    def record(owner, name):
        function = getattr(owner, name)

        def recording(*args, **options):
            events.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, recording)

    for owner, name in ((jax_devices.setup, 'configure_malloc'), (jax_devices.processes, 'initialize_distributed'),
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


@pytest.mark.slow
def test_a_computation_on_a_cpu_is_done_when_its_call_returns():
    program = '''
from jax_devices.setup import configure_process
configure_process('cpu')
import jax, jax.numpy as jnp
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, x: x @ x * 1e-3, x))
x = jnp.ones((500, 500))
jax.block_until_ready(slow(x))
assert slow(x).is_ready()  # so are its temporaries freed
'''
    env = os.environ | {'JAX_NUM_CPU_DEVICES': '1'}
    result = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=env, capture_output=True, text=True,
                            timeout=300)
    assert result.returncode == 0, result.stderr


def test_an_accelerator_that_does_not_come_up_is_said(monkeypatch, capsys):
    plugin = types.SimpleNamespace(dist=types.SimpleNamespace(name='jax-cuda12-plugin', version='0.7.2'))
    monkeypatch.setattr(jax_devices.setup, 'finds_accelerator', lambda: True)
    monkeypatch.setattr(importlib.metadata, 'entry_points', lambda group: [plugin])
    setup_jax_environment('cpu')
    assert not capsys.readouterr().err  # as asked
    setup_jax_environment('auto')
    said = capsys.readouterr().err
    assert 'jax-cuda12-plugin 0.7.2 are here, but with jaxlib' in said and 'only the CPU came up' in said
    assert f'pip install "jax[cuda12]=={jax.__version__}"' in said


def test_memory_is_kept_only_where_the_cpu_computes(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax_devices.setup, 'configure_malloc', lambda: calls.append(1))
    monkeypatch.setattr(jax, 'config', types.SimpleNamespace(
        jax_platforms=None, update=lambda *args: None, **jax_devices.setup.OWN_SETTINGS))
    for device, accelerator, expected in (('cpu', True, 1), ('auto', False, 1), ('auto', True, 0), ('cuda', True, 0)):
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(jax_devices.setup, 'finds_accelerator', lambda: accelerator)
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
    monkeypatch.setattr(jax_devices.setup, 'enable_compilation_cache', lambda platform: None)
    for kind, dtype in (('gpu', 'bfloat16'), ('cpu', 'float32')):
        device = types.SimpleNamespace(platform=kind)
        monkeypatch.setattr(jax_devices.setup, 'check_device_availability', lambda _: [device])
        setup_jax_environment('auto', dtype)
        assert 'jax_default_matmul_precision' not in settings
    device = types.SimpleNamespace(platform='gpu')
    assert 'full float32' in setup_jax_environment('auto', 'float32')[2]
    assert settings['jax_default_matmul_precision'] == 'highest'


@pytest.mark.parametrize('kind, n_processes, expected', [('cpu', 1, [3]), ('cpu', 2, []), ('gpu', 1, [])])
def test_slow_compilations_raise_no_alarm_in_a_single_process_on_a_cpu(kind, n_processes, expected, monkeypatch):
    levels = []
    monkeypatch.setattr('jaxlib.utils.absl_set_min_log_level', levels.append)
    monkeypatch.setattr(jax, 'process_count', lambda: n_processes)
    monkeypatch.setattr(jax_devices.setup, 'enable_compilation_cache', lambda platform: None)
    device = types.SimpleNamespace(platform=kind)
    monkeypatch.setattr(jax_devices.setup, 'check_device_availability', lambda _: [device])
    setup_jax_environment('auto', 'bfloat16')
    assert levels == expected
    monkeypatch.delattr('jaxlib.utils.absl_set_min_log_level')
    setup_jax_environment('auto', 'bfloat16')  # a later JAX may not have it


def test_one_of_several_gpus_is_the_only_one_that_is_touched(monkeypatch):
    settings = {}
    monkeypatch.setattr(jax.config, 'update', lambda name, value: settings.update({name: value}))
    configure_process('cuda:1')
    assert settings == {'jax_cuda_visible_devices': '1', 'jax_rocm_visible_devices': '1',
                        'jax_cpu_enable_async_dispatch': False}
    visible = types.SimpleNamespace(jax_cuda_visible_devices='1')
    patched = types.SimpleNamespace(config=visible, devices=lambda kind: ['the second GPU'], process_count=lambda: 1)
    monkeypatch.setattr(jax_devices.setup, 'jax', patched)
    assert check_device_availability('cuda:1') == ['the second GPU']  # the only one that jax sees


def test_processes_that_share_all_devices_take_none_by_its_number(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    with pytest.raises(UserError, match='device=cpu:3, but several processes share all devices'):
        check_device_availability('cpu:3')


def test_deterministic_sets_xlas_flag_before_jax_starts(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=x')
    configure_process('cuda', deterministic=True)
    assert os.environ['XLA_FLAGS'].split() == ['--xla_dump_to=x', '--xla_gpu_deterministic_ops=true']


@pytest.mark.parametrize('init_from, is_set', [('resume', True), ('auto', True), ('scratch', False)])
def test_a_run_that_was_deterministic_is_so_when_it_is_resumed(init_from, is_set, tmp_path, monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '')
    configure_process('cuda', False, init_from, tmp_path)
    assert os.environ['XLA_FLAGS'] == ''  # there is no config.json yet
    (tmp_path / 'config.json').write_text('{"deterministic": "yes"}')  # no value of the flag
    configure_process('cuda', False, init_from, tmp_path)
    assert os.environ['XLA_FLAGS'] == ''
    (tmp_path / 'config.json').write_text('{"deterministic": true}')
    configure_process('cuda', False, init_from, tmp_path)
    assert ('--xla_gpu_deterministic_ops=true' in os.environ['XLA_FLAGS']) == is_set


# -----------------------------------------------------------------------------
# the cache of compiled programs

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
from jax_devices.setup import setup_jax_environment
setup_jax_environment('cpu')
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition('/')[2]]))
x = np.random.default_rng(0).normal(size=(300, 70)).astype(np.float32)
y = jax.jit(lambda x: jax.nn.softmax(jax.nn.gelu(x @ x.T)) @ x)(x)
print(events['cache_hits'], events['cache_misses'], np.asarray(y).tobytes().hex())
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_cache_on_cpu(), reason='CPUs keep no programs here')
def test_a_second_process_loads_what_the_first_has_compiled_and_computes_the_same_bits(tmp_path):
    environment = {name: value for name, value in os.environ.items() if 'CACHE' not in name and name != 'XLA_FLAGS'}
    environment |= {'XDG_CACHE_HOME': str(tmp_path), 'JAX_NUM_CPU_DEVICES': '1'}

    def start_step(**more):
        return start('-c', MODEL_STEP, env=environment | more)

    def end(process):
        """(cache hits, cache misses, the result, stderr)"""
        out, err = process.communicate()
        assert process.returncode == 0, err
        hits, misses, result = out.split()
        return int(hits), int(misses), result, err

    off, cold, side_by_side = map(end, [start_step(JAX_ENABLE_COMPILATION_CACHE='0'), start_step(), start_step()])
    assert off[:2] == (0, 0)
    assert cold[0] + cold[1] == side_by_side[0] + side_by_side[1] > 0
    files = sorted(path for path in tmp_path.rglob('*-cache'))
    kept = [path.read_bytes() for path in files]
    warm = end(start_step())
    assert warm[0] == len(files) == cold[0] + cold[1]
    assert warm[1] == 0
    assert [path.read_bytes() for path in files] == kept
    files[0].write_bytes(kept[0][:len(kept[0]) // 2])  # a process was killed while it wrote
    files[-1].write_bytes(kept[-1][:100] + bytes([kept[-1][100] ^ 1]) + kept[-1][101:])
    damaged = end(start_step())
    assert damaged[0] == len(files) - len({files[0], files[-1]})
    assert {process[2] for process in (off, cold, side_by_side, warm, damaged)} == {off[2]}
    assert off[3] == warm[3] == ''
    assert 'Error reading persistent compilation cache' in damaged[3]


@pytest.mark.parametrize('name, value', [
    ('JAX_ENABLE_X64', 'True'), ('JAX_DISABLE_JIT', 'True'), ('JAX_NUMPY_RANK_PROMOTION', 'raise'),
    ('JAX_NUMPY_DTYPE_PROMOTION', 'strict')])
def test_settings_of_jax_for_other_programs_are_not_used_and_said(name, value):
    environment = {**os.environ, 'JAX_NUM_CPU_DEVICES': '1', name: value}
    with start('-c', MODEL_STEP, env=environment) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert err == f'{name}={value} is not used here: it is {jax_devices.setup.OWN_SETTINGS[name.lower()]}\n'
    with start('-c', MODEL_STEP) as process:
        assert process.communicate()[0].split()[2] == out.split()[2]
