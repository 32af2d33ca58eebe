"""Bits per weight that a group of 16 rows may have. Imported by what must load nothing heavy."""

BITS: tuple[float, ...] = (0, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8)
"""0 is a pruned group."""
