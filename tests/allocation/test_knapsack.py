"""The knapsack against brute force, its promise about bytes, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ciuic_cli.allocation.knapsack import allocate
from ciuic_cli.errors import TargetError


def _convex_problem(items: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    widths = np.array([2, 3, 4, 5])
    loss = rng.lognormal(0, 2, items)[:, None] * 4.0**-widths
    nbytes = (rng.integers(1, 4, items)[:, None] * 16 * widths).astype(np.int64)
    return loss, nbytes


@pytest.mark.parametrize("seed", range(6))
def test_close_to_brute_force(seed: int) -> None:
    loss, nbytes = _convex_problem(6, seed)
    budget = int(nbytes.mean(axis=1).sum())
    best = min(
        sum(loss[i, c] for i, c in enumerate(choice))
        for choice in itertools.product(range(4), repeat=6)
        if sum(nbytes[i, c] for i, c in enumerate(choice)) <= budget
    )
    found = allocate(loss, nbytes, budget)
    assert found.nbytes <= budget
    assert best <= found.loss + 1e-12
    assert found.loss <= 1.25 * best


def test_spends_the_budget_to_a_thousandth() -> None:
    loss, nbytes = _convex_problem(5000, 1)
    for share in (0.45, 0.6, 0.8):
        budget = int(share * nbytes.max(axis=1).sum())
        found = allocate(loss, nbytes, budget)
        assert 0.999 * budget <= found.nbytes <= budget


def test_forbidden_options_are_never_taken() -> None:
    loss, nbytes = _convex_problem(50, 2)
    loss[:, 0] = np.inf
    found = allocate(loss, nbytes, int(nbytes[:, 1].sum()))
    assert (found.choice == 1).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_too_small_a_budget_is_refused(dtype: type) -> None:
    loss, nbytes = _convex_problem(10, 3)
    nbytes = nbytes.astype(dtype)
    loss[:, 0] = np.inf
    with pytest.raises(TargetError):
        allocate(loss, nbytes, int(nbytes[:, 1].sum()) - 1)
    loss[:, 0] = 1.0
    with pytest.raises(TargetError):
        allocate(loss, nbytes, int(nbytes[:, 0].sum()) - 1)
