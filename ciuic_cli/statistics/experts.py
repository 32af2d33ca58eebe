"""Many experts in bounded memory: the layer's pool in full, and each expert's diagonals.

All experts' full moments of one layer of DeepSeek-V3 (256 experts, 7168 and 2048 wide) would take 127 GB, and as much
on disk for each of its 58 layers. Where they would pass FULL_LIMIT, only the pool of the layer is kept in full, and of
each expert the diagonals of H and G. The expert's own moments are then the pool's correlations with the expert's own
variances, D^½ P D^½. Little is lost where this happens: with so many experts each sees few tokens, and a full moment
would be drawn towards the pool anyway (`Statistics`), because it has more entries than tokens behind it; a diagonal
is settled by a few dozen.
"""

from __future__ import annotations

import torch

FULL_LIMIT = 1 << 27
"""Bytes of all experts' full moments of one stack up to which they are kept."""
DIAGONAL_TOKENS = 64
"""Tokens that the pool counts for beside an expert's own diagonal (its relative variance falls as 2 / tokens)."""


def full_moments_fit(experts: int, rows: int, cols: int) -> bool:
    """Whether every expert (rows, cols) of a stack may have its full H and G."""
    return 4 * experts * (rows * rows + cols * cols) <= FULL_LIMIT


def with_diagonal(pool: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """The moment (n, n) with the correlations of `pool` (n, n) and the variances of `diagonal` (n,)."""
    variance = pool.diagonal()
    root = torch.where(variance > 0, diagonal / variance.clamp_min(1e-38), 0.0).sqrt()
    return root[:, None] * pool * root
