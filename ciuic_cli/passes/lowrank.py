"""The low-rank pass: W = L R + residual, so that the code carries less energy.

The code's error in a row is proportional to the row's energy (assuming that its transform blocks have equal energy).
So the best L R is the truncated SVD of diag(√c) W; c is the weight of each row's code error, diag(C) of G = M C Mᵀ
(`BlockLDL.d_diagonal` of the outputs). L and R are trellis-coded as well. The residual is taken against the coded
product, so coding the factors adds no error.
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
from ciuic_cli.codecs.trellis import decode
from ciuic_cli.passes.linear_algebra import orthonormal, singular_values
from ciuic_cli.passes.predicted_loss import group_sums
from ciuic_cli.passes.rounding import round_without_feedback

FACTOR_BITS = 6
"""Bits per weight of the coded factors (chosen, not tuned: at 6 bits coding loses little against the truncation)."""
RANKS = (16, 32, 64)
"""Ranks that `--rank auto` may choose from (chosen, not tuned)."""
_OVERSAMPLING = 16
"""Columns of the random probe beyond the rank."""
_POWER_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class LowRankArm:
    """A low-rank part on offer.

    Attributes:
        rank: rank of the factors.
        nbytes: exact bytes of both coded factors.
        remaining: (groups,) float32, share of each row group's weighted energy that the residual keeps.
    """

    rank: int
    nbytes: int
    remaining: NDArray[np.float32]


def factor(weight: torch.Tensor, row_weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best approximation L R of W (m, n) with errors weighted by row_weight (m,): L (m, rank), R (rank, n).

    Randomised SVD with a fixed seed. Source: Halko, Martinsson, Tropp, "Finding structure with randomness", 2011.
    """
    root = row_weight.clamp_min(row_weight.max() * 1e-6).sqrt()[:, None]
    scaled = weight * root
    generator = torch.Generator().manual_seed(0)
    columns = min(rank + _OVERSAMPLING, *weight.shape)
    probe = torch.randn(weight.shape[1], columns, generator=generator)
    basis = orthonormal(scaled @ probe)
    for _ in range(_POWER_ITERATIONS):
        basis = orthonormal(scaled @ (scaled.T @ basis))
    u, s, vh = singular_values(basis.T @ scaled)
    split = s[:rank].sqrt()
    return (basis @ u[:, :rank]) * split / root, split[:, None] * vh[:rank]


def factor_bytes(rows: int, cols: int, rank: int) -> int:
    """Exact bytes of the coded factors of a matrix (rows, cols)."""
    bits = np.full(rank // TILE, FACTOR_BITS, np.uint8)
    return packed_nbytes(rank, cols, bits) + packed_nbytes(rank, rows, bits)


def residual_energies(
    weight: torch.Tensor, row_weight: torch.Tensor, ranks: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """Energy (m,) of each row of W - L R, by rank; rank 0 is W itself. Ranks that W cannot have are left out."""
    energies = {0: weight.square().sum(1)}
    ranks = tuple(rank for rank in ranks if rank < min(weight.shape))
    if ranks:
        left, right = factor(weight, row_weight, max(ranks))
        energies |= {rank: (weight - left[:, :rank] @ right[:rank]).square().sum(1) for rank in ranks}
    return energies


def arms(energies: Mapping[int, torch.Tensor], row_weight: torch.Tensor, cols: int) -> list[LowRankArm]:
    """The arms of a matrix (m, cols) from its `residual_energies`; row_weight: (m,), in the same row order."""
    whole = group_sums(energies[0] * row_weight)
    offered = []
    for rank, per_row in energies.items():
        if rank:
            residual = group_sums(per_row * row_weight)
            remaining = np.divide(residual, whole, out=np.ones_like(residual), where=whole > 0)
            offered.append(
                LowRankArm(rank, factor_bytes(len(per_row), cols, rank), remaining.astype(np.float32))
            )
    return offered


def encode(
    weight: torch.Tensor, row_weight: torch.Tensor, rank: int, *, L: int
) -> tuple[tuple[PackedMatrix, PackedMatrix], torch.Tensor]:
    """The coded factors (R, Lᵀ) of a weight (m, n), and their product (m, n) as the decoder will see it.

    The argument L is the number of trellis state bits.
    """
    left, right = factor(weight, row_weight, rank)
    coded = tuple(round_without_feedback(part.contiguous(), FACTOR_BITS, L=L) for part in (right, left.T))
    r, lt = (decode(part, original_basis=True) for part in coded)
    return (coded[0], coded[1]), lt.T @ r
