"""config.json: whether its numbers are plausible, and which class of transformers it describes."""
