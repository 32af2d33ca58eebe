"""Compressed weights as their dense selves, for code of models that reads weights instead of calling modules."""
