"""Measured properties of the trellis code on unit Gaussians, closing of the circle included.

Figures of `benchmarks/codec.py quality` with 2,000 tiles.
"""

from __future__ import annotations

# By window length L and bits per weight K: best scale of the code relative to the standard deviation.
SCALE_BY_WINDOW: dict[int, dict[int, float]] = {
    12: {2: 1.03, 3: 1.1, 4: 1.14, 5: 1.17, 6: 1.24, 8: 1.44},
    13: {2: 1.03, 3: 1.09, 4: 1.13, 5: 1.17, 6: 1.24, 8: 1.44},
    14: {2: 1.02, 3: 1.08, 4: 1.12, 5: 1.15, 6: 1.23, 8: 1.42},
    15: {2: 1.02, 3: 1.07, 4: 1.1, 5: 1.13, 6: 1.19, 8: 1.34},
    16: {2: 1.01, 3: 1.07, 4: 1.1, 5: 1.12, 6: 1.19, 8: 1.34},
}

# Mean squared error at that scale, times 4^K: 1.0 is Shannon's limit.
MSE_BY_WINDOW: dict[int, dict[int, float]] = {
    12: {2: 1.168, 3: 1.218, 4: 1.292, 5: 1.424, 6: 1.733, 8: 2.497},
    13: {2: 1.151, 3: 1.182, 4: 1.236, 5: 1.369, 6: 1.514, 8: 2.245},
    14: {2: 1.13, 3: 1.159, 4: 1.211, 5: 1.271, 6: 1.403, 8: 1.754},
    15: {2: 1.111, 3: 1.138, 4: 1.164, 5: 1.218, 6: 1.29, 8: 1.531},
    16: {2: 1.101, 3: 1.12, 4: 1.148, 5: 1.19, 6: 1.257, 8: 1.471},
}
