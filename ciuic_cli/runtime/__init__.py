"""Running an artifact: modules that decode inside their products, and the transformers plug-in."""
