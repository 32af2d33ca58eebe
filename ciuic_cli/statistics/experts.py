"""Moments of large expert stacks in bounded memory: a full moment for the pool, diagonals for each expert.

The pool of a stack is the sum over all its experts. Full moments of all experts of one DeepSeek-V3 layer (256 experts,
7168 and 2048 wide) would take 127 GB in memory, and as much on disk for each of the 58 layers. If a stack would exceed
`FULL_MOMENTS_BYTES`, H and G of the pool are recorded in full (`moments.py`), and only the diagonals of each expert.
`files.py` combines them into D^½ C D^½, where C is the correlation matrix of the pool and D the expert's diagonal.

This loses little. With so many experts, each sees fewer tokens than a full moment has dimensions, and its moment would
be shrunk towards the pool anyway. A few dozen tokens suffice for a diagonal.
"""

from __future__ import annotations

import torch

FULL_MOMENTS_BYTES = 1 << 27
"""A stack keeps full moments for each expert if all of them take at most this many bytes. No measurement is on record;
see also docs/experiments/scale/expert-statistics.md."""
DIAGONAL_PRIOR_TOKENS = 64
"""Weight, in tokens, of the pool when it is mixed with an expert's diagonal. The relative variance of a diagonal falls
as 2 / tokens. No measurement is on record."""


def full_moments_fit(experts: int, rows: int, cols: int) -> bool:
    """Whether every expert (rows, cols) of a stack gets its full H and G."""
    return 4 * experts * (rows * rows + cols * cols) <= FULL_MOMENTS_BYTES


def root_ratios(pool: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Square roots (n,) of the ratios of an expert's variances (n,) to those of its pool (n,); all float32.

    0 where the pool has no variance.
    """
    return torch.where(pool > 0, expert / pool.clamp_min(1e-38), 0.0).sqrt()
