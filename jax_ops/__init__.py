"""Kernels and sharding: how the model is computed. A first reader may skip this package.

Each operation's docstring opens with its plain equivalent; the measurements behind the choices are
in docs/performance.md and docs/lab_log.md. Letters of the shapes are those of jax_transformer.py;
in addition I and O are input and output features, R is rows (tokens)."""
