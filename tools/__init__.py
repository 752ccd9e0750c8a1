"""What training does not need: plans for devices that are not here (bench_jax.py --mode=compile), the
report of speed that sample_jax.py prints, and tools for maintainers."""
