"""The machine: its devices and settings, several processes, replicated or sharded execution, and the cost of a
compiled program."""
