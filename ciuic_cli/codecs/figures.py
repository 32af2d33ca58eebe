"""Measured properties of the trellis code on unit Gaussians (benchmarks/codec.py quality, 2,000 tiles, tail-biting included)."""

from __future__ import annotations

# By window length L: best scale of the code relative to the weights' standard deviation, by bits per weight K.
SCALE_BY_WINDOW: dict[int, dict[int, float]] = {
    16: {2: 1.01, 3: 1.07, 4: 1.11, 5: 1.15, 6: 1.17, 8: 1.44},
}

# Mean squared error at that scale, times 4^K: 1.0 is Shannon's limit.
MSE_BY_WINDOW: dict[int, dict[int, float]] = {
    16: {2: 1.102, 3: 1.122, 4: 1.152, 5: 1.191, 6: 1.262, 8: 1.48},
}
