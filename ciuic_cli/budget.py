"""The budget: every choice's predicted loss and exact bytes in, the plan with the least loss out.

A multiple-choice knapsack: each item (a group of 16 rows of one matrix) takes exactly one of C options, and
the sum of bytes must not pass the budget. Solved by a Lagrange multiplier (bytes priced at one rate for the
whole model), then the few bytes left over are spent greedily, best loss per byte first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.errors import TargetError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Allocation:
    """choice: (items,) index of the option each item takes; price: loss per byte at the margin."""

    choice: IntArray
    loss: float
    nbytes: int
    price: float


def allocate(loss: FloatArray, nbytes: IntArray, budget: int) -> Allocation:
    """The options with the least total loss whose total bytes are at most `budget`.

    Args:
        loss: (items, options) predicted loss; np.inf forbids an option.
        nbytes: (items, options) exact bytes of each option.
        budget: bytes to spend.

    Raises:
        TargetError: even the smallest options together are over the budget.
    """
    smallest = np.where(np.isinf(loss), np.iinfo(np.int64).max, nbytes).min(axis=1)
    if int(smallest.sum()) > budget:
        raise TargetError(
            f"the budget of {budget} bytes is below the smallest possible {int(smallest.sum())}"
        )
    low, high = 1e-40, 1e40
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        if _spent(nbytes, _choose(loss, nbytes, middle)) > budget:
            low = middle
        else:
            high = middle
    choice = _choose(loss, nbytes, high)
    choice = _spend_rest(loss, nbytes, choice, budget)
    rows = np.arange(len(choice))
    return Allocation(choice, float(loss[rows, choice].sum()), _spent(nbytes, choice), high)


def _choose(loss: FloatArray, nbytes: IntArray, price: float) -> IntArray:
    return np.argmin(loss + price * nbytes, axis=1)


def _spent(nbytes: IntArray, choice: IntArray) -> int:
    return int(nbytes[np.arange(len(choice)), choice].sum())


def _spend_rest(loss: FloatArray, nbytes: IntArray, choice: IntArray, budget: int) -> IntArray:
    """Upgrade items one option at a time, best gain per byte first, while bytes are left."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    left = budget - _spent(nbytes, choice)
    while left > 0:
        gain = loss[rows, choice][:, None] - loss
        extra = nbytes - nbytes[rows, choice][:, None]
        possible = (extra > 0) & (extra <= left) & (gain > 0)
        rate = np.where(possible, gain / np.maximum(extra, 1), 0.0)
        best = rate.argmax(axis=1)
        best_rate = rate[rows, best]
        order = np.argsort(-best_rate, kind="stable")
        upgraded = False
        for item in order:
            if best_rate[item] <= 0:
                break
            step = int(extra[item, best[item]])
            if step <= left:
                choice[item] = best[item]
                left -= step
                upgraded = True
        if not upgraded:
            break
    return choice
