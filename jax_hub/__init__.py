"""Other people's models: configs, weights, tokenizers and chat templates. transformers reads what
it defines."""
