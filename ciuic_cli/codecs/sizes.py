"""How many bytes a compressed matrix takes, and where each row group's codes begin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ciuic_cli.codecs.bits import tile_nbytes
from ciuic_cli.codecs.row_order import class_nbytes
from ciuic_cli.codecs.transform import TILE, padded
from ciuic_cli.integers import round_up

FIXED_NBYTES = 32
"""Bytes of a matrix blob before its first array; the struct in layout.py."""

ALIGN = 16
"""Headers are padded to a multiple of this, so that every part of a blob is aligned for the kernels."""


def packed_nbytes(
    rows: int,
    cols: int,
    row_bits: npt.ArrayLike,
    lowrank_bytes: int = 0,
    *,
    is_sorted: bool = False,
    has_input_scale: bool = False,
) -> int:
    """Bytes of a matrix blob: header, padding, low-rank part and codes.

    Args:
        row_bits: uint8 [ceil(rows / 16)], encoded by `codecs.bits.stored_bits`.
        lowrank_bytes: bytes of both factors' blobs.
    """
    header = header_nbytes(rows, cols, is_sorted=is_sorted, has_input_scale=has_input_scale)
    return header + lowrank_bytes + codes_nbytes(row_bits, cols)


def header_nbytes(rows: int, cols: int, *, is_sorted: bool = False, has_input_scale: bool = False) -> int:
    """Bytes before the low-rank part, padding included."""
    end = FIXED_NBYTES + padded(rows) // TILE + rows
    end += (class_nbytes(rows) if is_sorted else 0) + (cols if has_input_scale else 0)
    return aligned(end)


def codes_nbytes(row_bits: npt.ArrayLike, cols: int) -> int:
    """Bytes of the codes of row groups with these bits (uint8, any shape)."""
    return int(tile_nbytes(row_bits).sum()) * (padded(cols) // TILE)


def group_offsets(row_bits: npt.ArrayLike, cols: int) -> npt.NDArray[np.int64]:
    """int64 [groups]: the byte in the codes where each group of 16 rows begins."""
    nbytes = tile_nbytes(row_bits) * (padded(cols) // TILE)
    return np.concatenate([[0], np.cumsum(nbytes)[:-1]]).astype(np.int64)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGN."""
    return round_up(nbytes, ALIGN)
