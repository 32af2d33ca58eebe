"""The effective variance of a row whose blocks of the Hadamard transform differ in energy.

The transform mixes only the columns of a block (`codecs/transform.py`). So a row is Gaussian with a different variance
in each block, but it has one scale. With a scale for the mean variance, loud blocks exceed the code's range; with a
scale for loud blocks, quiet ones get the error of loud ones. The best scale is about that of a homogeneous row (equal
variance in all blocks) whose variance is the power mean of order 4 of the blocks' mean squares. The error is that of
this homogeneous row at 5 bits, and up to a third less at 3 (measured: docs/experiments/codes/uneven-rows.md).
"""

from __future__ import annotations

import math

import torch

POWER = 4
"""Order of the power mean over blocks. A lower order predicts better at few bits, a higher one at many (measured:
docs/experiments/codes/uneven-rows.md)."""
_TINY = torch.finfo(torch.float32).tiny
"""Floor of divisors, the least normal float32: rows of zeros stay zero."""


def effective_variance(block_squares: torch.Tensor, block_width: int) -> torch.Tensor:
    """Variance (m,) of the homogeneous rows that take the same scale.

    Args:
        block_squares: (m, blocks) mean squares of the weights in each block.
        block_width: columns of a block. Mean squares of narrow blocks differ more by chance, which is allowed for.
    """
    blocks = block_squares.shape[1]
    mean = block_squares.mean(1)
    spread = (block_squares / mean.clamp_min(_TINY)[:, None]).pow(POWER).mean(1)
    return mean * (spread / _spread_by_chance(blocks, block_width)) ** (1 / POWER)


def log_variance_gradient(block_squares: torch.Tensor) -> torch.Tensor:
    """d log(effective variance) / d e_j for mean squares e (m, blocks): e_j^(p-1) / Σ e^p with p = POWER."""
    loudest = block_squares.amax(1, keepdim=True).clamp_min(_TINY)
    share = block_squares / loudest
    return share ** (POWER - 1) / (loudest * (share**POWER).sum(1, keepdim=True)).clamp_min(_TINY)


def _spread_by_chance(blocks: int, block_width: int) -> float:
    """E[(blocks · share)^POWER] for the share of one block in the squared norm of a Gaussian row."""
    a, b = block_width / 2, blocks * block_width / 2  # the share is Beta(a, b - a) distributed
    moment = math.lgamma(a + POWER) - math.lgamma(a) + math.lgamma(b) - math.lgamma(b + POWER)
    return math.exp(moment + POWER * math.log(blocks))
