"""Calibration and evaluation text, and tokenizers."""
