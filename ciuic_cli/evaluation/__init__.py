"""Measures models: KL divergence, perplexity, memory and speed."""
