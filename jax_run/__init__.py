"""One run of ours: what it starts from, its data, its checkpoints, its log."""
