"""The machine: its devices and settings, several processes, replicated or sharded execution, costs of a program."""
