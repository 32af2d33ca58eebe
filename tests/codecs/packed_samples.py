"""Random compressed matrices for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ciuic_cli.codecs.packing import PackedMatrix, packed_nbytes, stored_bits
from ciuic_cli.codecs.transform import TILE, padded
from ciuic_cli.codecs.widths import BITS

ALL_BITS = BITS[1:]


def random_matrix(
    rows: int,
    cols: int,
    row_bits: Sequence[float] | float,
    *,
    L: int = 16,
    seed: int = 0,
    rank: int = 0,
    is_sorted: bool = False,
    is_scaled: bool = False,
) -> PackedMatrix:
    """Random codes: every string of bits is a valid path. `row_bits`, bits per weight, repeat over the row groups."""
    rng = np.random.default_rng([seed, rows, cols])
    bits = np.resize(stored_bits(row_bits), padded(rows) // TILE)
    size = packed_nbytes(rows, cols, bits) - packed_nbytes(rows, cols, 0)
    lowrank = None
    if rank:
        lowrank = (random_matrix(rank, cols, 6, L=L, seed=1), random_matrix(rank, rows, 5, L=L, seed=2))
    return PackedMatrix(
        rows=rows,
        cols=cols,
        L=L,
        seed=seed,
        base=0.01,
        row_bits=bits,
        row_scale=rng.integers(0, 40, rows, dtype=np.uint8),
        codes=rng.integers(0, 256, size, dtype=np.uint8),
        lowrank=lowrank,
        row_class=rng.integers(0, 16, rows, dtype=np.uint8) if is_sorted else None,
        input_scale=rng.integers(0, 256, cols, dtype=np.uint8) if is_scaled else None,
        scale_steps=int(rng.integers(16, 272)),
    )
