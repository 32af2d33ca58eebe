"""Means over tokens of text with an honest standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MINIMUM_CLUSTERS = 8
"""With fewer windows than this the standard error comes from single tokens."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
    """A mean over tokens and its standard error; `samples` says what counted as independent."""

    value: float
    stderr: float
    samples: str


def mean_of(windows: list[Floats]) -> Mean:
    """Mean over all tokens; its standard error treats windows as the samples, or tokens if they are few.

    Tokens of one window are correlated. The mean is a ratio of sums over windows, sum S_i / sum n_i, with the
    variance W/(W-1) sum (S_i - mean n_i)^2 / (sum n_i)^2 (the ratio estimator's, by the delta method).
    """
    values = np.concatenate(windows)
    mean = float(values.mean())
    if len(windows) >= MINIMUM_CLUSTERS:
        count = len(windows)
        residual = np.array([part.sum() - mean * part.size for part in windows])
        variance = count / (count - 1) * float(residual @ residual) / values.size**2
        return Mean(mean, math.sqrt(variance), "windows")
    spread = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return Mean(mean, spread / math.sqrt(values.size), "tokens")
