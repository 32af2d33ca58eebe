"""The log of a run: what transformers' Trainer notes of every step and every evaluation, and what follows from it.

The log is part of every checkpoint, so a resumed run decides as an uninterrupted one does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Log = Sequence[dict[str, Any]]
"""Entries with `step`, and `loss` (of a step) or `eval_loss` (of an evaluation)."""


def steps_of(log: Log) -> list[dict[str, Any]]:
    """The entries of steps."""
    return [entry for entry in log if "loss" in entry]


def evaluations(log: Log) -> list[dict[str, Any]]:
    """The entries of evaluations."""
    return [entry for entry in log if "eval_loss" in entry]


def best_step(log: Log) -> int | None:
    """The step with the lowest evaluation loss, the first of equal ones; None without a finite loss."""
    finite = [entry for entry in evaluations(log) if math.isfinite(entry["eval_loss"])]
    return min(finite, key=lambda entry: entry["eval_loss"])["step"] if finite else None


def has_stopped(log: Log, patience: int) -> bool:
    """Whether the last `patience` evaluations were no better than the best one before them."""
    found = evaluations(log)
    best = best_step(log)
    after = [entry for entry in found if best is None or entry["step"] > best]
    return len(after) >= patience
