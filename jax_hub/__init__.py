"""Other people's models: what their folders say, read by transformers where that defines it."""
