"""Plans for devices that are not here: a step is compiled for them and its program read, nothing
runs. Called by bench_jax.py --mode=compile; no run needs this folder."""
