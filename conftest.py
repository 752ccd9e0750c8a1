"""Tests run on 8 virtual CPU devices; this must be said before jax starts."""
import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
