"""Ways to talk to a model: in a terminal, on a page, by OpenAI's API. Also the batch in which
several answers are decoded together, and the commands of the installed package."""
