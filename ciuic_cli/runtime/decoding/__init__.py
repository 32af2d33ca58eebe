"""Decoder layers as programs of native steps, for one token at a time on the CPU."""
