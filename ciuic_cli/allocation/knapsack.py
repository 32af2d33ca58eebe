"""A multiple-choice knapsack: one option per item, least total loss, total bytes within a budget.

An item is a group of 16 rows of one matrix; its options are bits per weight. Bisection finds the Lagrange multiplier
(loss per byte, the same for the whole model). The few bytes left over are spent greedily, on the options that save the
most loss per byte first.
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
_SLICE_ITEMS = 1 << 15
"""Items processed at once (chosen, not tuned). Temporaries of all items would take several times the memory of `loss`
and `nbytes`."""
_MULTIPLIER_RANGE = 1e-40, 1e40
"""Least and largest Lagrange multiplier (loss per byte) of the bisection (chosen: losses are float32, which holds 1e-38
to 3e38)."""
_MULTIPLIER_PRECISION = 1e-9
"""Relative width at which the bisection ends (chosen, not tuned)."""


@dataclass(frozen=True)
class Allocation:
    """A solution of the knapsack.

    Attributes:
        choice: (items,) index of the option that each item takes.
        loss: total loss. nbytes: total bytes.
        multiplier: Lagrange multiplier, loss per byte at the margin.
    """

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
        TargetError: even the smallest options together exceed the budget.
    """
    least = smallest_bytes(loss, nbytes)
    if least > budget:
        raise TargetError(f"the budget of {budget} bytes is below the smallest possible {least}")
    low, high = _MULTIPLIER_RANGE
    while high / low > 1 + _MULTIPLIER_PRECISION:
        middle = (low * high) ** 0.5
        if _total_bytes(nbytes, _choose(loss, nbytes, middle)) > budget:
            low = middle
        else:
            high = middle
    choice = _choose(loss, nbytes, high)
    choice = _spend_leftover(loss, nbytes, choice, budget)
    rows = np.arange(len(choice))
    total_loss = float(loss[rows, choice].sum(dtype=np.float64))
    return Allocation(choice, total_loss, _total_bytes(nbytes, choice), high)


def smallest_bytes(loss: FloatArray, nbytes: IntArray) -> int:
    """Total bytes with every item at its smallest option that is not forbidden."""
    most = np.iinfo(nbytes.dtype).max
    return sum(
        int(np.where(np.isinf(losses), most, sizes).min(axis=1).sum(dtype=np.int64))
        for losses, sizes in _slices(loss, nbytes)
    )


def _slices(*tables: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    for begin in range(0, len(tables[0]), _SLICE_ITEMS):
        yield tuple(table[begin : begin + _SLICE_ITEMS] for table in tables)


def _choose(loss: FloatArray, nbytes: IntArray, multiplier: float) -> IntArray:
    """(items,) the options that minimise loss + multiplier · bytes."""
    return np.concatenate(
        [np.argmin(losses + multiplier * sizes, axis=1) for losses, sizes in _slices(loss, nbytes)]
        or [np.zeros(0, np.intp)]
    )


def _total_bytes(nbytes: IntArray, choice: IntArray) -> int:
    return int(nbytes[np.arange(len(choice)), choice].sum(dtype=np.int64))


def _best_upgrades(
    loss: FloatArray, nbytes: IntArray, choice: IntArray, leftover: int
) -> tuple[IntArray, FloatArray, IntArray]:
    """For each item, of the options that fit: the one that saves the most loss per extra byte, this rate (0: no option
    fits), and its extra bytes."""
    upgrades = []
    for losses, sizes, chosen in _slices(loss, nbytes, choice):
        rows = np.arange(len(chosen))
        saved = losses[rows, chosen][:, None] - losses
        extra = sizes - sizes[rows, chosen][:, None]
        possible = (extra > 0) & (extra <= leftover) & (saved > 0)
        rate = np.where(possible, saved / np.maximum(extra, 1), 0.0)
        best = rate.argmax(axis=1)
        upgrades.append((best, rate[rows, best], extra[rows, best]))
    best, rate, extra = (np.concatenate(column) for column in zip(*upgrades, strict=True))
    return best, rate, extra


def _spend_leftover(loss: FloatArray, nbytes: IntArray, choice: IntArray, budget: int) -> IntArray:
    """Upgrade items, those with the best rate first, until no option fits."""
    choice = choice.copy()
    leftover = budget - _total_bytes(nbytes, choice)
    while leftover > 0 and len(choice):
        best, rate, extra = _best_upgrades(loss, nbytes, choice, leftover)
        order = np.argsort(-rate, kind="stable")
        upgraded = False
        for item in order:
            if rate[item] <= 0:
                break
            if extra[item] <= leftover:
                choice[item] = best[item]
                leftover -= int(extra[item])
                upgraded = True
        if not upgraded:
            break
    return choice
