"""Kernels and sharding: how the model is computed. A first reader may skip this package.

Each operation's docstring opens with the simple expression that computes the same, such as
x @ kernel. The measurements behind the choices are in docs/performance.md and docs/lab_log.md. The
letters of shapes are those of jax_transformer.py. In addition, I and O are input and output
features, and R is rows (tokens)."""
