"""Tools that training does not need. plan.py and topologies.py are for bench_jax.py --mode=compile,
which compiles a step for devices that this machine does not have. The others are scripts, mostly
for maintainers."""
