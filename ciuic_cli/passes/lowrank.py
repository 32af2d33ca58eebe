"""The low-rank pass: W = L R + rest, where the few largest directions leave less for the code to carry.

The code's error in a row is proportional to the row's energy (evenly spread over the transform's blocks, as is assumed
here), so the best L R is the truncated SVD of diag(√c) W, c being the weight that each output row's noise keeps
(`quantize.Feedback.noise`). L and R are trellis-coded themselves; the rest is taken against the coded product, so their
error is not added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.packing import PackedMatrix, packed_nbytes
from ciuic_cli.codecs.trellis import decode
from ciuic_cli.passes.linear_algebra import orthonormal, singular_values
from ciuic_cli.passes.quantize import BLOCK, per_group, round_plain

FACTOR_BITS = 6
RANKS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class LowRankArm:
    """rank; exact bytes of both factors; remaining: (groups,) share of each row group's energy that is left."""

    rank: int
    nbytes: int
    remaining: NDArray[np.float32]


def factor(weight: torch.Tensor, row_weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """L (m, rank), R (rank, n): the best weighted approximation of W (m, n), by randomised SVD with a fixed seed.

    Source: Halko, Martinsson, Tropp, "Finding structure with randomness", 2011, with four power iterations.
    """
    root = row_weight.clamp_min(row_weight.max() * 1e-6).sqrt()[:, None]
    scaled = weight * root
    generator = torch.Generator().manual_seed(0)
    width = min(rank + 16, *weight.shape)
    probe = torch.randn(weight.shape[1], width, generator=generator)
    basis = orthonormal(scaled @ probe)
    for _ in range(4):
        basis = orthonormal(scaled @ (scaled.T @ basis))
    u, s, vh = singular_values(basis.T @ scaled)
    split = s[:rank].sqrt()
    return (basis @ u[:, :rank]) * split / root, split[:, None] * vh[:rank]


def factor_bytes(rows: int, cols: int, rank: int) -> int:
    """Exact bytes of the low-rank part."""
    bits = np.full(rank // BLOCK, FACTOR_BITS, np.uint8)
    return packed_nbytes(rank, cols, bits) + packed_nbytes(rank, rows, bits)


def residuals(
    weight: torch.Tensor, row_weight: torch.Tensor, ranks: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """What each rank would leave of the energy of each row of W, (m,) by rank; rank 0 leaves all of it."""
    found = {0: weight.square().sum(1)}
    ranks = tuple(rank for rank in ranks if rank < min(weight.shape))
    if ranks:
        left, right = factor(weight, row_weight, max(ranks))
        found |= {rank: (weight - left[:, :rank] @ right[:rank]).square().sum(1) for rank in ranks}
    return found


def arms(rest: Mapping[int, torch.Tensor], row_weight: torch.Tensor, cols: int) -> list[LowRankArm]:
    """The arms of a matrix (m, cols) from its `rests`; row_weight: (m,) as in `factor`, rows in the same order."""
    energy = per_group(rest[0] * row_weight)
    found = []
    for rank, per_row in rest.items():
        if rank:
            left = per_group(per_row * row_weight)
            remaining = np.divide(left, energy, out=np.ones_like(left), where=energy > 0)
            found.append(
                LowRankArm(rank, factor_bytes(len(per_row), cols, rank), remaining.astype(np.float32))
            )
    return found


def encode(
    weight: torch.Tensor, row_weight: torch.Tensor, rank: int, *, L: int
) -> tuple[tuple[PackedMatrix, PackedMatrix], torch.Tensor]:
    """The coded factors (R, Lᵀ), and their product (m, n) as the decoder will see it."""
    left, right = factor(weight, row_weight, rank)
    coded = tuple(round_plain(part.contiguous(), FACTOR_BITS, L=L) for part in (right, left.T))
    r, lt = (decode(part, original_basis=True) for part in coded)
    return (coded[0], coded[1]), lt.T @ r
