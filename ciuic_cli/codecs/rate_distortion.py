"""Rate-distortion tables of the trellis code on unit Gaussians, measured with tail-biting tiles.

Scales: measured with `benchmarks/codec.py quality` over 8,000 tiles (2,000 for L = 12 and 13). Errors at these scales:
over 4,000 tiles with the present lead-in (docs/experiments/codes/windows.md), 2,000 for L = 12 and 13. Nothing is
imported here: the command line checks options without loading torch.
"""

from __future__ import annotations

BITS: tuple[float, ...] = (0, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8)
"""Bits per weight of the format. A group of 0 bits has no codes: its rows are zero."""


def _by_bits(*values: float) -> dict[float, float]:
    """One value for each number of bits per weight but 0."""
    return dict(zip(BITS[1:], values, strict=True))


SCALE_BY_L: dict[int, dict[float, float]] = {
    12: _by_bits(0.9, 0.99, 1.03, 1.07, 1.1, 1.12, 1.14, 1.15, 1.17, 1.2, 1.24, 1.31, 1.44),
    13: _by_bits(0.89, 0.98, 1.03, 1.06, 1.09, 1.11, 1.13, 1.15, 1.17, 1.2, 1.24, 1.32, 1.44),
    14: _by_bits(0.89, 0.98, 1.02, 1.06, 1.08, 1.1, 1.12, 1.14, 1.15, 1.19, 1.23, 1.31, 1.42),
    15: _by_bits(0.88, 0.97, 1.02, 1.05, 1.07, 1.08, 1.1, 1.11, 1.13, 1.16, 1.19, 1.26, 1.34),
    16: _by_bits(0.89, 0.97, 1.01, 1.04, 1.07, 1.08, 1.1, 1.11, 1.12, 1.16, 1.19, 1.25, 1.34),
}
"""By trellis state bits L and bits per weight K: the best scale of the code over the weights' standard deviation."""

MSE_BY_L: dict[int, dict[float, float]] = {
    12: _by_bits(1.136, 1.162, 1.168, 1.194, 1.218, 1.248, 1.292, 1.361, 1.424, 1.55, 1.733, 2.809, 2.497),
    13: _by_bits(1.115, 1.139, 1.151, 1.175, 1.182, 1.209, 1.236, 1.292, 1.369, 1.434, 1.514, 1.91, 2.245),
    14: _by_bits(1.097, 1.117, 1.131, 1.142, 1.158, 1.181, 1.209, 1.24, 1.268, 1.331, 1.394, 1.566, 1.697),
    15: _by_bits(1.089, 1.105, 1.111, 1.124, 1.137, 1.155, 1.163, 1.193, 1.214, 1.244, 1.282, 1.408, 1.502),
    16: _by_bits(1.098, 1.106, 1.101, 1.112, 1.12, 1.133, 1.146, 1.163, 1.187, 1.214, 1.248, 1.359, 1.44),
}
"""By L and K: mean squared error at that scale over the weights' variance, times 4^K. Shannon's limit is 1."""

WINDOWS = tuple(MSE_BY_L)
"""Trellis state bits L on offer, ascending."""


def nominal_window(states: int) -> int:
    """The longest window that all weights may have with this mean number of states per weight (at least 2^12)."""
    return max(L for L in WINDOWS if states >= 1 << L)
