"""Random compressed matrices for tests and benchmarks, and their exact weights. Not used at run time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ciuic_cli.codecs import reference
from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.row_order import CLASSES
from ciuic_cli.codecs.scales import SCALE_STEPS, input_factors
from ciuic_cli.codecs.sizes import codes_nbytes
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.transform import TILE, inverse_transform, padded

MIXED_BITS = (4, 0, 2.5, 8, 1.5, 6, 4.5, 1, 3, 5.5, 2, 7, 3.5, 5)
"""Every number of bits per weight of the format once, in an order in which neighbours differ much."""

assert sorted(MIXED_BITS) == list(BITS)


def random_matrix(
    rows: int,
    cols: int,
    bits: Sequence[float] | float = 4,
    *,
    rng: np.random.Generator | None = None,
    L: int = 16,
    seed: int = 0,
    rank: int = 0,
    factor_bits: Sequence[float] | float = 6,
    is_sorted: bool = False,
    is_scaled: bool = False,
) -> PackedMatrix:
    """A matrix of random codes: every string of bits is a valid tile.

    Its decoded codes look Gaussian, with a standard deviation of 1 to 4 times cols^-1/2; input scales are 0.3 to 3.2.

    Args:
        bits: bits per weight of the row groups, repeated as needed.
        rng: default: a generator that depends on the shape, `L` and `seed` only.
        seed: of the input transform's signs.
        rank: of the low-rank part, whose factors have `factor_bits`; 0 for none.
        is_sorted: rows have random classes.
        is_scaled: there are input scales.
    """
    rng = np.random.default_rng([rows, cols, L, seed]) if rng is None else rng
    row_bits = np.resize(stored_bits(bits), padded(rows) // TILE)
    header = MatrixHeader(
        rows=rows,
        cols=cols,
        L=L,
        seed=seed,
        base=cols**-0.5,
        row_bits=row_bits,
        row_scale=rng.integers(0, 33, rows, dtype=np.uint8),
        row_class=rng.integers(0, CLASSES, rows, dtype=np.uint8) if is_sorted else None,
        input_scale=rng.integers(100, 156, cols, dtype=np.uint8) if is_scaled else None,
        scale_steps=int(rng.integers(SCALE_STEPS[0], SCALE_STEPS[-1] + 1)),
    )
    codes = rng.integers(0, 256, codes_nbytes(row_bits, cols), dtype=np.uint8)
    lowrank = None
    if rank:
        lowrank = (
            random_matrix(rank, cols, factor_bits, rng=rng, L=L, seed=seed),
            random_matrix(rank, rows, factor_bits, rng=rng, L=L, seed=seed + 1),
        )
    return PackedMatrix(header, codes, lowrank)


def tiles_as_matrix(codes: np.ndarray, bits: float, L: int) -> PackedMatrix:
    """Tiles of codes (uint8 [tiles, 32 * bits]) side by side as a matrix (16, 16 * tiles) with all row scales 1."""
    row_bits, row_scale = stored_bits([bits]), np.zeros(TILE, np.uint8)
    header = MatrixHeader(TILE, TILE * len(codes), L, 0, 1.0, row_bits, row_scale)
    return PackedMatrix(header, np.ascontiguousarray(codes).reshape(-1))


def blob_of(packed: PackedMatrix | ExpertStack) -> torch.Tensor:
    """The blob, uint8 [nbytes] on the CPU."""
    return torch.frombuffer(bytearray(packed.to_bytes()), dtype=torch.uint8)


def exact_stored(packed: PackedMatrix) -> torch.Tensor:
    """The stored rows of W by the reference decoder, float64 [rows, cols], low-rank part and input scales included."""
    header = packed.header
    in_basis = torch.from_numpy(reference.decode(packed))
    out = inverse_transform(in_basis, header.cols, header.seed).double()
    if packed.lowrank is not None:
        right, left = (exact_stored(factor) for factor in packed.lowrank)
        out += left.T @ right
    if header.input_scale is not None:
        out *= input_factors(header.input_scale)
    return out


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Euclidean norm of the difference over the norm of `exact`."""
    exact = exact.detach().double()
    return float((value.detach().cpu().double() - exact).norm() / exact.norm())
