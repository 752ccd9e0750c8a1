"""Other people's models: configs, weights, tokenizers and chat templates. The package transformers
reads what transformers defines."""
