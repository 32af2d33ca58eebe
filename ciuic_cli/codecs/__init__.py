"""Codes for weights: the trellis code, its stored form, its input transform and its definition."""
