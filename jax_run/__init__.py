"""A training run: its start, its data, its checkpoints, its log."""
