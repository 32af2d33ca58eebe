"""The low-rank pass: W = left · right + residual, so that the residual, which is rounded, has less energy than W.

The code's error in a row is proportional to the row's energy (if its transform blocks have equal energy). So the best
left · right is the truncated SVD of diag(√c) W. Here c is the importance of each row: the diagonal of C of
G = M C Mᵀ, `BlockLDL.d_diagonal` of the outputs. Both factors are trellis-coded. The residual is W minus the product of
the coded factors, so their rounding adds no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.sizes import packed_nbytes
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.codecs.trellis import decode, round_matrix
from ciuic_cli.passes.linear_algebra import orthonormal, singular_values
from ciuic_cli.passes.predicted_loss import group_sums
from ciuic_cli.passes.rounding import Rounder, round_without_feedback

FACTOR_BITS = 6
"""Bits per weight of the coded factors (chosen, not tuned: at 6 bits their error is small against the truncation)."""
RANKS = (16, 32, 64)
"""Ranks that `--rank auto` may choose from (chosen, not tuned)."""
_OVERSAMPLING = 16
"""Columns of the random probe beyond the rank (chosen, not tuned; Halko et al. advise 5 to 10)."""
_POWER_ITERATIONS = 4
"""Power iterations of the randomised SVD (chosen, not tuned)."""
_PRICING_ITERATIONS = 2
"""The same while low-rank parts are priced: the remaining energy is overestimated by up to 2 % (measured:
docs/experiments/scale/arms.md)."""
_RESIDUAL_WEIGHTS = 1 << 16
"""Weights of a residual that are computed at a time, so that they stay in a cache. Chosen, not tuned."""
_IMPORTANCE_FLOOR = 1e-6
"""Least importance of a row, as a share of the largest: the factors are divided by its root (chosen, not tuned)."""


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """A low-rank part that a matrix may get.

    Attributes:
        rank: rank of the factors.
        nbytes: exact bytes of both coded factors.
        remaining: (groups,) float32, share of each row group's energy, rows by importance, that the residual has.
    """

    rank: int
    nbytes: int
    remaining: NDArray[np.float32]


def factor(
    weight: torch.Tensor, importance: torch.Tensor, rank: int, *, iterations: int = _POWER_ITERATIONS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best approximation left · right of W (m, n), rows by importance (m,): left (m, rank), right (rank, n).

    Randomised SVD with a fixed seed and so many power iterations. Source: Halko, Martinsson, Tropp, "Finding structure
    with randomness", 2011.
    """
    root = importance.clamp_min(importance.max() * _IMPORTANCE_FLOOR).sqrt()[:, None]
    scaled = weight * root
    generator = torch.Generator().manual_seed(0)
    columns = min(rank + _OVERSAMPLING, *weight.shape)
    probe = torch.randn(weight.shape[1], columns, generator=generator).to(weight.device)
    basis = orthonormal(scaled @ probe)
    for _ in range(iterations):
        basis = orthonormal(scaled @ (scaled.T @ basis))
    u, s, vh = singular_values(basis.T @ scaled)
    split = s[:rank].sqrt()
    return (basis @ u[:, :rank]) * split / root, split[:, None] * vh[:rank]


def factor_bytes(rows: int, cols: int, rank: int) -> int:
    """Exact bytes of the coded factors of a matrix (rows, cols)."""
    bits = np.full(rank // TILE, FACTOR_BITS, np.uint8)
    return packed_nbytes(rank, cols, bits) + packed_nbytes(rank, rows, bits)


def residual_energies(
    weight: torch.Tensor, importance: torch.Tensor, ranks: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """Energy (m,) of each row of W - left · right, by rank: 0, which is W itself, and those of `ranks` that W can
    have."""
    energies = {0: weight.square().sum(1)}
    ranks = tuple(rank for rank in ranks if rank < min(weight.shape))
    if ranks:
        left, right = factor(weight, importance, max(ranks), iterations=_PRICING_ITERATIONS)
        energies |= {rank: torch.empty_like(energies[0]) for rank in sorted(ranks)}
        rows = max(1, _RESIDUAL_WEIGHTS // weight.shape[1])
        for begin in range(0, len(weight), rows):
            part, done = slice(begin, begin + rows), 0
            residual = weight[part].clone()
            for rank in sorted(ranks):
                residual.addmm_(left[part, done:rank], right[done:rank], alpha=-1)
                energies[rank][part], done = residual.square().sum(1), rank
    return energies


def parts(energies: Mapping[int, torch.Tensor], importance: torch.Tensor, cols: int) -> list[LowRankPart]:
    """The parts that a matrix (m, cols) may get, from its `residual_energies`; importance: (m,), in the same row
    order."""
    whole = group_sums(energies[0] * importance)
    offered = []
    for rank, per_row in energies.items():
        if rank:
            residual = group_sums(per_row * importance)
            remaining = np.divide(residual, whole, out=np.ones_like(residual), where=whole > 0)
            offered.append(
                LowRankPart(rank, factor_bytes(len(per_row), cols, rank), remaining.astype(np.float32))
            )
    return offered


def encode(
    weight: torch.Tensor, importance: torch.Tensor, rank: int, *, L: int, rounder: Rounder = round_matrix
) -> tuple[tuple[PackedMatrix, PackedMatrix], torch.Tensor]:
    """The coded factors (right, left transposed) of a weight (m, n), and their product (m, n) as decoders compute it.

    L: trellis state bits. rounder: for the device on which `weight` is.
    """
    left, right = factor(weight, importance, rank)
    coded = tuple(
        round_without_feedback(part.contiguous(), FACTOR_BITS, L=L, rounder=rounder)
        for part in (right, left.T)
    )
    right, left_transposed = (decode(part, original_basis=True).to(weight.device) for part in coded)
    return (coded[0], coded[1]), left_transposed.T @ right
