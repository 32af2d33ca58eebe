"""The learning rate of recovery's steps: a linear warm-up, then a cosine to 0."""

from __future__ import annotations

import math

PEAK_LEARNING_RATE = 1e-3
"""Highest learning rate: about the most by which a step changes a factor of 1. Measured on SmolLM2:
docs/experiments/recovery/factors-and-norms.md."""
FULL_RATE_KL = 0.037
"""KL of the rounded model, in nats per token, from which the peak is PEAK_LEARNING_RATE. With less KL there is less to
gain, and the peak falls with the root of the KL, because the loss by noise in a step grows with its square. Measured:
docs/experiments/recovery/step-size.md."""
WARM_UP_STEPS = 5
"""Steps of the linear warm-up. No measurement is on record."""


def learning_rate(step: int, steps: int, kl: float) -> float:
    """The rate of step number `step`, from 0, out of `steps`.

    kl: of the rounded model before recovery, on held-out text, in nats per token.
    """
    peak = PEAK_LEARNING_RATE * min(1.0, math.sqrt(max(kl, 0.0) / FULL_RATE_KL))
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
