"""The tests run on 8 virtual CPU devices. Most of their time is compilation: LLVM's optimizations are off, XLA:CPU's
fusion emitters as well where it can do without them (two fifths of the time), a program is one LLVM module, programs
do not name the lines of their source (a tenth, both), and a persistent cache keeps what one test has compiled for the
others. With OPTIMIZED=1 in the environment, programs are compiled as users have them. All must be set before jax is
imported."""
import atexit
import gc
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
if os.environ.get('OPTIMIZED') != '1':
    os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_backend_optimization_level=0'
    if version('jaxlib').startswith('0.10.'):  # a later XLA does not know the flag, and ends the process
        os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
    os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:  # workers inherit the folder of the process that started them
    os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='jax_tests_')
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    atexit.register(shutil.rmtree, os.environ['JAX_COMPILATION_CACHE_DIR'], ignore_errors=True)

gc.set_threshold(20_000, 20, 20)  # JAX's traces allocate much and leave little garbage: 3% of the suite's time
pytest.register_assert_rewrite('tests.common')


@pytest.fixture(autouse=True)
def bounded_memory():
    """Drops the programs that jax holds, 4.5 GB in each of two workers, above 1.6 GB: the cache on disk has them."""
    yield
    statm = Path('/proc/self/statm')  # Linux only
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE') > 1.6e9:
        import jax
        from jax_devices.setup import trim_malloc
        jax.clear_caches()
        gc.collect()
        trim_malloc()


def pytest_addoption(parser):
    parser.addoption('--sweep', type=int, default=12, help='number of random cases in tests/test_sweep.py')
    parser.addoption('--requests', type=int, default=50, help='number of requests at random times to the server')
