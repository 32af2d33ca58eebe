"""Attention modules of transformers, adapted to compressed projections."""
