"""What is on disk: token files, tokenizers, checkpoints, foreign weights."""
