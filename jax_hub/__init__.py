"""Other people's models: configs, weights, tokenizers and chat templates. This code calls the
library transformers to read configs and tokenizers and to render chat templates, because
transformers defines these formats. It reads weights without transformers."""
