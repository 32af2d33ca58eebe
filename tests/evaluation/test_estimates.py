"""Standard errors of means over tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ciuic_cli.evaluation.estimates import mean_of


def test_windows_are_the_samples_of_the_standard_error() -> None:
    # Tokens of a window are all alike: 20 samples of 50 tokens, not 1000 tokens.
    levels = np.random.default_rng(0).normal(3.0, 0.5, 20)
    found = mean_of([np.full(50, level) for level in levels])
    assert found.value == pytest.approx(levels.mean())
    assert found.stderr == pytest.approx(levels.std(ddof=1) / math.sqrt(20))
    assert found.samples == "windows"


def test_tokens_are_the_samples_where_windows_are_few() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = mean_of([values[:200], values[200:]])
    assert found.stderr == pytest.approx(values.std(ddof=1) / 20)
    assert found.samples == "tokens"


def test_the_standard_error_covers_the_truth() -> None:
    # Correlated tokens and a shorter last window: about 95 % of the intervals must contain the true mean.
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(400):
        levels = generator.normal(0.0, 1.0, 30)
        sizes = [40] * 29 + [17]
        found = mean_of(
            [level + generator.normal(0, 1, size) for level, size in zip(levels, sizes, strict=True)]
        )
        hits += abs(found.value) < 1.96 * found.stderr
    assert 0.90 < hits / 400 < 0.98
