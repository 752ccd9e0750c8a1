"""The machine: its devices and settings, several processes, where a state is, which way it
computes."""
