"""Tests run on 8 virtual CPU devices, which must be said before jax starts. Most of their time is compilation: LLVM's
optimizations, a third of it, are left out, as nothing here is about speed; and what one test has compiled the others load."""
import atexit
import os
import shutil
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_backend_optimization_level=0'
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:  # else this is a worker of the process that made the folder
    os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='jax_tests_')
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    atexit.register(shutil.rmtree, os.environ['JAX_COMPILATION_CACHE_DIR'], ignore_errors=True)
