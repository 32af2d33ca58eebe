"""How much memory a training step takes, from headers and config alone."""
