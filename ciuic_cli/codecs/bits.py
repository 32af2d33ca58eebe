"""Bits per weight that a group of 16 rows may have, and the byte that stands for them in a blob."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ciuic_cli.codecs.rate_distortion import BITS
from ciuic_cli.codecs.scales import Bytes

TILE_BYTES_PER_BIT = 32
"""Bytes of a tile (16 x 16 weights) for each bit per weight."""

_HALF_BIT = 0x80
"""The bit of a `row_bits` byte that adds half a bit per weight; part of the format."""


def stored_bits(bits: npt.ArrayLike) -> Bytes:
    """Bits per weight to bytes of `row_bits`: bits 0 to 3 hold the whole part, bit 7 half a bit more.

    Args:
        bits: numbers of BITS, of any shape.

    Returns:
        uint8 of the same shape.
    """
    values = np.asarray(bits, dtype=np.float64)
    return values.astype(np.uint8) | np.where(values % 1 != 0, np.uint8(_HALF_BIT), np.uint8(0))


_BITS_OF = np.full(256, np.nan)
_BITS_OF[stored_bits(BITS)] = BITS
_TILE_NBYTES = np.nan_to_num(TILE_BYTES_PER_BIT * _BITS_OF).astype(np.int64)


def bits_of(row_bits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Inverse of `stored_bits`: float64 of the same shape; NaN for bytes that the format does not have."""
    return np.asarray(_BITS_OF[np.asarray(row_bits, dtype=np.uint8)])


def tile_nbytes(row_bits: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Bytes of a tile for each byte of `row_bits`: int64; 0 where `bits_of` is NaN."""
    return np.asarray(_TILE_NBYTES[np.asarray(row_bits, dtype=np.uint8)])
