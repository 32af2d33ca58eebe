"""Means over the tokens of a text, with standard errors that allow for correlated tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_WINDOWS = 8
"""Least number of windows that count as the independent samples; with fewer, the tokens do. No measurement is on
record."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
    """A mean over tokens and its standard error. samples: what counts as independent, "windows" or "tokens"."""

    value: float
    stderr: float
    samples: str


def mean_of(windows: list[Floats]) -> Mean:
    """The mean over all tokens of all windows, one array (tokens,) each.

    Tokens of one window are correlated, so the windows are the samples: the mean is the ratio Σ S_i / Σ n_i of their
    sums and sizes, with the variance W/(W-1) Σ (S_i - mean · n_i)² / (Σ n_i)² of a ratio estimator (delta method). With
    fewer than MIN_WINDOWS windows the tokens are the samples.
    """
    values = np.concatenate(windows)
    mean = float(values.mean())
    if len(windows) >= MIN_WINDOWS:
        count = len(windows)
        residual = np.array([part.sum() - mean * part.size for part in windows])
        variance = count / (count - 1) * float(residual @ residual) / values.size**2
        return Mean(mean, math.sqrt(variance), "windows")
    deviation = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return Mean(mean, deviation / math.sqrt(values.size), "tokens")
