"""The budget: every choice's predicted loss and exact bytes in, the plan with the least loss out.

A multiple-choice knapsack: each item (a group of 16 rows of one matrix) takes exactly one of C options, and
the sum of bytes must not pass the budget. Solved by a Lagrange multiplier (bytes priced at one rate for the
whole model), then the few bytes left over are spent greedily, best loss per byte first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.errors import TargetError

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]
_ITEMS = 1 << 15
"""Items looked at together: intermediate results of all of them take several times the tables themselves."""


@dataclass(frozen=True)
class Allocation:
    """choice: (items,) index of the option each item takes; price: loss per byte at the margin."""

    choice: IntArray
    loss: float
    nbytes: int
    multiplier: float


def allocate(loss: FloatArray, nbytes: IntArray, budget: int) -> Allocation:
    """The options with the least total loss whose total bytes are at most `budget`.

    Args:
        loss: (items, options) floating, predicted loss; np.inf forbids an option.
        nbytes: (items, options) integers, exact bytes of each option.
        budget: bytes to spend.

    Raises:
        TargetError: even the smallest options together are over the budget.
    """
    least = smallest(loss, nbytes)
    if least > budget:
        raise TargetError(f"the budget of {budget} bytes is below the smallest possible {least}")
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
    return Allocation(choice, float(loss[rows, choice].sum(dtype=np.float64)), _spent(nbytes, choice), high)


def smallest(loss: FloatArray, nbytes: IntArray) -> int:
    """The bytes of the smallest options that are not forbidden."""
    most = np.iinfo(nbytes.dtype).max
    return sum(
        int(np.where(np.isinf(part), most, size).min(axis=1).sum(dtype=np.int64))
        for part, size in _parts(loss, nbytes)
    )


def _parts(*tables: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    for begin in range(0, len(tables[0]), _ITEMS):
        yield tuple(table[begin : begin + _ITEMS] for table in tables)


def _choose(loss: FloatArray, nbytes: IntArray, multiplier: float) -> IntArray:
    return np.concatenate(
        [np.argmin(part + multiplier * size, axis=1) for part, size in _parts(loss, nbytes)]
        or [np.zeros(0, np.intp)]
    )


def _spent(nbytes: IntArray, choice: IntArray) -> int:
    return int(nbytes[np.arange(len(choice)), choice].sum(dtype=np.int64))


def _best_upgrades(
    loss: FloatArray, nbytes: IntArray, choice: IntArray, left: int
) -> tuple[IntArray, FloatArray, IntArray]:
    """Of each item: the option that gains most per byte, this rate (0: there is none), and its bytes more."""
    found = []
    for part, size, chosen in _parts(loss, nbytes, choice):
        rows = np.arange(len(chosen))
        gain = part[rows, chosen][:, None] - part
        extra = size - size[rows, chosen][:, None]
        possible = (extra > 0) & (extra <= left) & (gain > 0)
        rate = np.where(possible, gain / np.maximum(extra, 1), 0.0)
        best = rate.argmax(axis=1)
        found.append((best, rate[rows, best], extra[rows, best]))
    best, rate, extra = (np.concatenate(column) for column in zip(*found, strict=True))
    return best, rate, extra


def _spend_rest(loss: FloatArray, nbytes: IntArray, choice: IntArray, budget: int) -> IntArray:
    """Upgrade items one option at a time, best gain per byte first, while bytes are left."""
    choice = choice.copy()
    left = budget - _spent(nbytes, choice)
    while left > 0 and len(choice):
        best, rate, extra = _best_upgrades(loss, nbytes, choice, left)
        order = np.argsort(-rate, kind="stable")
        upgraded = False
        for item in order:
            if rate[item] <= 0:
                break
            step = int(extra[item])
            if step <= left:
                choice[item] = best[item]
                left -= step
                upgraded = True
        if not upgraded:
            break
    return choice
