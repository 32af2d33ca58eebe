"""The knapsack: distance from the optimum, use of the budget, and refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic_cli.allocation.knapsack import allocate
from ciuic_cli.errors import TargetError


def _convex_problem(items: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    bits = np.array([2, 3, 4, 5])
    loss = rng.lognormal(0, 2, items)[:, None] * 4.0**-bits
    nbytes = (rng.integers(1, 4, items)[:, None] * 16 * bits).astype(np.int64)
    return loss, nbytes


@given(
    seed=st.integers(0, 2**32 - 1), items=st.integers(1, 40), share=st.floats(0.0, 1.1), convex=st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_the_loss_is_within_one_upgrade_of_the_optimum(
    seed: int, items: int, share: float, convex: bool
) -> None:
    """Weak duality: for any multiplier, min over choices of loss + multiplier * (bytes - budget) is below the optimum.

    At the multiplier of the solution, the unspent bytes are fewer than the largest step of an item.
    """
    loss, nbytes = _convex_problem(items, seed)
    if not convex:
        loss = np.random.default_rng(seed).lognormal(0, 2, loss.shape)
    least, most = nbytes.min(axis=1).sum(), nbytes.max(axis=1).sum()
    budget = int(least + share * (most - least))
    allocation = allocate(loss, nbytes, budget)
    rows = np.arange(items)
    assert allocation.nbytes == nbytes[rows, allocation.choice].sum() <= budget
    assert allocation.loss == pytest.approx(loss[rows, allocation.choice].sum())
    bound = (loss + allocation.multiplier * nbytes).min(axis=1).sum() - allocation.multiplier * budget
    step = (nbytes.max(axis=1) - nbytes.min(axis=1)).max()
    if allocation.multiplier > 1e-39:  # else the budget does not bind
        assert bound <= allocation.loss * (1 + 1e-9)
        assert allocation.loss <= bound + allocation.multiplier * step * (1 + 1e-6) + 1e-12
    else:
        assert allocation.loss == pytest.approx(loss.min(axis=1).sum())
    better = (loss < loss[rows, allocation.choice][:, None]) & (
        allocation.nbytes - nbytes[rows, allocation.choice][:, None] + nbytes <= budget
    )
    assert not better.any(), "one option that still fits would lower the loss"


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_below_the_true_optimum(seed: int) -> None:
    """Checks the bound of the property above against the optimum found by exhaustive search."""
    loss, nbytes = _convex_problem(6, seed)
    budget = int(nbytes.mean(axis=1).sum())
    best = min(
        sum(loss[i, c] for i, c in enumerate(choice))
        for choice in itertools.product(range(4), repeat=6)
        if sum(nbytes[i, c] for i, c in enumerate(choice)) <= budget
    )
    allocation = allocate(loss, nbytes, budget)
    bound = (loss + allocation.multiplier * nbytes).min(axis=1).sum() - allocation.multiplier * budget
    assert bound - 1e-12 <= best <= allocation.loss + 1e-12


def test_the_budget_is_spent_to_a_thousandth() -> None:
    loss, nbytes = _convex_problem(5000, 1)
    for share in (0.45, 0.6, 0.8):
        budget = int(share * nbytes.max(axis=1).sum())
        allocation = allocate(loss, nbytes, budget)
        assert 0.999 * budget <= allocation.nbytes <= budget


def test_forbidden_options_are_never_taken() -> None:
    loss, nbytes = _convex_problem(50, 2)
    loss[:, 0] = np.inf
    allocation = allocate(loss, nbytes, int(nbytes[:, 1].sum()))
    assert (allocation.choice == 1).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_budget_that_is_too_small_is_refused(dtype: type) -> None:
    loss, nbytes = _convex_problem(10, 3)
    nbytes = nbytes.astype(dtype)
    loss[:, 0] = np.inf
    with pytest.raises(TargetError):
        allocate(loss, nbytes, int(nbytes[:, 1].sum()) - 1)
    loss[:, 0] = 1.0
    with pytest.raises(TargetError):
        allocate(loss, nbytes, int(nbytes[:, 0].sum()) - 1)
