"""Measured properties of the trellis code on unit Gaussians, closing of the circle included.

Figures of `benchmarks/codec.py quality`: errors over 8,000 tiles (windows of 12 and 13 bits: 2,000).
"""

from __future__ import annotations

# By window length L and bits per weight K: best scale of the code relative to the standard deviation.
SCALE_BY_WINDOW: dict[int, dict[int, float]] = {
    12: {1: 0.9, 2: 1.03, 3: 1.1, 4: 1.14, 5: 1.17, 6: 1.24, 7: 1.31, 8: 1.44},
    13: {1: 0.89, 2: 1.03, 3: 1.09, 4: 1.13, 5: 1.17, 6: 1.24, 7: 1.32, 8: 1.44},
    14: {1: 0.89, 2: 1.02, 3: 1.08, 4: 1.12, 5: 1.15, 6: 1.23, 7: 1.31, 8: 1.42},
    15: {1: 0.88, 2: 1.02, 3: 1.07, 4: 1.1, 5: 1.13, 6: 1.19, 7: 1.26, 8: 1.34},
    16: {1: 0.89, 2: 1.01, 3: 1.07, 4: 1.1, 5: 1.12, 6: 1.19, 7: 1.25, 8: 1.34},
}

# Mean squared error at that scale, times 4^K: 1.0 is Shannon's limit.
MSE_BY_WINDOW: dict[int, dict[int, float]] = {
    12: {1: 1.136, 2: 1.168, 3: 1.218, 4: 1.292, 5: 1.424, 6: 1.733, 7: 2.809, 8: 2.497},
    13: {1: 1.115, 2: 1.151, 3: 1.182, 4: 1.236, 5: 1.369, 6: 1.514, 7: 1.91, 8: 2.245},
    14: {1: 1.09, 2: 1.126, 3: 1.154, 4: 1.205, 5: 1.262, 6: 1.384, 7: 1.546, 8: 1.671},
    15: {1: 1.082, 2: 1.105, 3: 1.132, 4: 1.159, 5: 1.208, 6: 1.272, 7: 1.394, 8: 1.482},
    16: {1: 1.091, 2: 1.094, 3: 1.113, 4: 1.141, 5: 1.18, 6: 1.238, 7: 1.342, 8: 1.419},
}
