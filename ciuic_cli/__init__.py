"""ciuic: compress language models into a byte budget with the least damage to their predictions."""

__version__ = "0.1.0"
