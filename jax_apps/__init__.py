"""Ways to talk to a model: in a terminal, on a page, by OpenAI's API. Nothing else imports them."""
