"""Tools that training does not need: plans for devices that are not here (bench_jax.py
--mode=compile), and scripts for maintainers."""
