"""Which rows of the weights have 8 bits while they are trained, and which 4: those with large gradients have 8.

A rounding error e of a weight with gradient g changes the loss by g e to first order, so a group of 16 rows loses in
proportion to its mean g² times its squared rounding error. The knapsack of compression spends the bits where they save
most. A group changes its bits only if that saves `hysteresis` times as much as at the margin: gradients are noisy, and
each change is a rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ciuic_cli.allocation.knapsack import allocate
from ciuic_cli.errors import UsageError
from ciuic_cli.train.memory.weight_codes import NARROW_CODE, ROWS, WEIGHT_CODE

DECAY = 0.9
"""Share of the running mean of g² that a step keeps (chosen, not tuned)."""

MEAN_BITS = 6.0
"""Bits per weight on average, scales not counted (chosen: between those of the two codes)."""

HYSTERESIS = 2.0
"""How many times the margin's saving a change of bits must save (chosen, not tuned)."""


class AdaptiveQuantizer:
    """Chooses 8 or 4 bits for every group of 16 rows of some weights, from their gradients.

    Args:
        bits: of a weight on average, 4 to 8, scales not counted.
        hysteresis: at least 1; 1 lets groups change freely.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(self, bits: float = MEAN_BITS, hysteresis: float = HYSTERESIS) -> None:
        if not 4 <= bits <= 8 or hysteresis < 1:
            raise UsageError(f"bits must be 4 to 8, and hysteresis at least 1, not {bits} and {hysteresis}")
        self.bits, self.hysteresis = bits, hysteresis
        self.importance: dict[str, torch.Tensor] = {}
        """Weight -> running mean of g² of each group, float32 (groups,) in main memory."""

    def observe(self, name: str, gradient: torch.Tensor) -> None:
        """Take the gradient of a weight into its running mean."""
        found = _group_means(gradient).cpu()
        before = self.importance.get(name)
        self.importance[name] = found if before is None else DECAY * before + (1 - DECAY) * found

    def choose(
        self,
        errors: Mapping[str, torch.Tensor],
        now: Mapping[str, torch.Tensor | None],
        sizes: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        """The groups of each weight that have 8 bits, bool (groups,).

        Args:
            errors: of each weight, `narrow_errors`.
            now: the present choice; None: none yet.
            sizes: weight -> elements of each of its groups, integers (groups,).
        """
        loss, nbytes = [], []
        for name, error in errors.items():
            importance = self.importance.get(name, torch.ones(len(error))).double()
            narrow = importance * error
            wide = narrow * (NARROW_LEVELS / WIDE_LEVELS) ** 2
            if (held := now[name]) is not None:
                narrow = torch.where(held, narrow * self.hysteresis, narrow / self.hysteresis)
            loss.append(torch.stack((narrow, wide), 1).numpy())
            elements = np.asarray(sizes[name], np.int64)
            nbytes.append(np.stack((elements // 2, elements), 1))
        budget = int(self.bits / 8 * sum(int(one[:, 1].sum()) for one in nbytes))
        chosen = allocate(np.concatenate(loss), np.concatenate(nbytes), budget).choice == 1
        ends = np.cumsum([len(one) for one in loss])[:-1]
        return {
            name: torch.from_numpy(part.copy())
            for name, part in zip(errors, np.split(chosen, ends), strict=True)
        }


NARROW_LEVELS, WIDE_LEVELS = (2 ** (code.bits - 1) - 1 for code in (NARROW_CODE, WEIGHT_CODE))


def narrow_errors(values: torch.Tensor) -> torch.Tensor:
    """The expected sum of squared rounding errors of each group of 16 rows in 4 bits, float64 (groups,).

    Stochastic rounding with step s has s² / 6, averaged over a step; s is the largest of 64 numbers over the levels.
    """
    rows = values.detach().reshape(values.shape[0], -1)
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % NARROW_CODE.block))
    largest = blocks.view(rows.shape[0], -1, NARROW_CODE.block).abs().amax(2)
    per_row = (largest.double() / NARROW_LEVELS).square().sum(1) * NARROW_CODE.block / 6
    return _by_group(per_row).sum(1).cpu()


def group_sizes(shape: torch.Size) -> list[int]:
    """Elements of each group of 16 rows."""
    columns = shape[1:].numel()
    return [min(ROWS, shape[0] - begin) * columns for begin in range(0, shape[0], ROWS)]


def _group_means(gradient: torch.Tensor) -> torch.Tensor:
    per_row = gradient.detach().reshape(gradient.shape[0], -1).float().square().mean(1)
    counts = _by_group(torch.ones_like(per_row)).sum(1)
    return _by_group(per_row).sum(1) / counts


def _by_group(per_row: torch.Tensor) -> torch.Tensor:
    """Numbers of rows as (groups, 16), with zeros after the last row."""
    return torch.nn.functional.pad(per_row, (0, -len(per_row) % ROWS)).view(-1, ROWS)
