"""Runs a model layer by layer from its files, for statistics, recovery and evaluation."""
