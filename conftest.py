"""Tests run on 8 virtual CPU devices, which must be said before jax starts. Most of their time is compilation: LLVM's
optimizations, a third of it, are left out, as nothing here is about speed."""
import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_backend_optimization_level=0'
