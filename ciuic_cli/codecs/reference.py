"""The definition of the code in numpy, for the reader and for tests. Slow; nothing at run time uses it.

A tile of 16 x 16 weights is a circular string of 256 K bits. Weight i = 16 row + column is decoded from the
window of L bits that ends at bit (i + 1) K. Tail-biting bit-shift trellis: QTIP (Tseng et al. 2024); byte
sums of a multiplicative hash as a pseudo-Gaussian code: its "1MAD" code, here with a single odd multiplier
and no offset.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ciuic_cli.codecs.packing import UNIT_BYTES, PackedMatrix, bits_of
from ciuic_cli.codecs.transform import TILE

MULTIPLIER = 0x83DCD12D
LEVEL_CENTRE = 510
CODE_SIGMA = np.float32(147.8)
TILE_WEIGHTS = TILE * TILE


def levels(windows: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """What windows stand for, -510 to 510: byte sum of window * MULTIPLIER mod 2^32, minus 510."""
    product = windows.astype(np.uint64) * np.uint64(MULTIPLIER)
    total = sum((product >> np.uint64(8 * k)) & np.uint64(0xFF) for k in range(4))
    return np.asarray(total).astype(np.int32) - LEVEL_CENTRE


def tile_bits(tile: npt.NDArray[np.uint8], bits: float) -> npt.NDArray[np.uint8]:
    """The circular string of one stored tile (32 * bits bytes): uint8 [256 * bits] of zeros and ones."""
    whole = int(bits)
    words = tile[: UNIT_BYTES * whole].reshape(whole, TILE, 2)
    big_endian = words.transpose(1, 0, 2)[:, :, ::-1]  # row by row, unit by unit, most significant byte first
    rest = tile[UNIT_BYTES * whole :].reshape(-1, TILE).T  # of a row the last byte, if there is half a unit
    return np.unpackbits(np.concatenate([big_endian.reshape(TILE, -1), rest], axis=1).reshape(-1))


def window_ends(bits: float) -> npt.NDArray[np.int64]:
    """Before which bit of its tile's string each weight's window ends, int64 [256]."""
    return np.floor((np.arange(TILE_WEIGHTS) + 1) * bits).astype(np.int64)


def tile_windows(tile: npt.NDArray[np.uint8], bits: float, window: int) -> npt.NDArray[np.int64]:
    """The 256 windows of one stored tile, int64 [256]."""
    string = tile_bits(tile, bits).astype(np.int64)
    ends = window_ends(bits)
    positions = (ends[:, None] - window + np.arange(window)) % string.size
    return string[positions] @ (1 << np.arange(window - 1, -1, -1))


def store_windows(windows: npt.NDArray[np.integer], bits: float) -> npt.NDArray[np.uint8]:
    """A closed path of 256 windows as a stored tile: uint8 [32 * bits]."""
    ends, whole = window_ends(bits), int(bits)
    string = np.empty(ends[-1], np.uint8)
    for begin, end, window in zip([0, *ends], ends, windows.tolist(), strict=False):
        string[begin:end] = window >> np.arange(end - begin - 1, -1, -1) & 1
    rows = np.packbits(string).reshape(TILE, -1)
    words = rows[:, : 2 * whole].reshape(TILE, whole, 2).transpose(1, 0, 2)[:, :, ::-1]
    return np.concatenate([words.reshape(-1), rows[:, 2 * whole :].T.reshape(-1)])


def decode(packed: PackedMatrix) -> npt.NDArray[np.float32]:
    """The matrix in the transformed basis, float32 [rows, cols_padded], without the low-rank part."""
    blocks = packed.cols_padded // TILE
    out = np.zeros((packed.rows_padded, packed.cols_padded), dtype=np.float32)
    factors = packed.scales / CODE_SIGMA
    for group, bits in enumerate(bits_of(packed.row_bits).tolist()):
        nbytes = int(UNIT_BYTES * bits)
        for block in range(blocks if bits else 0):
            begin = int(packed.group_offset[group]) + block * nbytes
            level = levels(tile_windows(packed.codes[begin : begin + nbytes], bits, packed.L))
            rows, cols = slice(TILE * group, TILE * (group + 1)), slice(TILE * block, TILE * (block + 1))
            out[rows, cols] = factors[rows, None] * level.reshape(TILE, TILE).astype(np.float32)
    return out[: packed.rows]


def viterbi(x: npt.NDArray[np.float64], bits: int, window: int) -> tuple[npt.NDArray[np.int64], float]:
    """The best closed path for one tile, by search over all 2^(L-K) overlaps. Memory and time: 2^(2L-K).

    Args:
        x: float [256], targets in units of the level.

    Returns:
        (windows int64 [256], sum of squared errors).
    """
    prefixes = 1 << (window - bits)
    states = np.arange(1 << window)
    level = levels(states).astype(np.float64)
    before = states >> bits
    # cost[start, p]: least cost of a path from overlap `start` to prefix p
    cost = np.where(np.eye(prefixes, dtype=bool), 0.0, np.inf)
    choice = np.empty((x.size, prefixes, prefixes), dtype=np.uint8)
    for t, target in enumerate(x):
        arriving = cost[:, before] + (level - target) ** 2
        by_high = arriving.reshape(prefixes, 1 << bits, prefixes)
        choice[t] = by_high.argmin(axis=1)
        cost = by_high.min(axis=1)
    start = int(np.diagonal(cost).argmin())
    windows = np.empty(x.size, dtype=np.int64)
    prefix = start
    for t in range(x.size - 1, -1, -1):
        windows[t] = (int(choice[t, start, prefix]) << (window - bits)) | prefix
        prefix = int(windows[t]) >> bits
    return windows, float(cost[start, start])
