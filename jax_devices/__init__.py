"""The machine: its devices and settings, several processes, the sharding of a state, and the choice
of kernels."""
