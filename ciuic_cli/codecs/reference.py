"""The definition of the trellis code in numpy, for readers and tests. It is slow; at run time only its constants are
used.

The codes of a tile of 16 x 16 weights are a circular string of 256 K bits, K bits per weight. Weight i = 16 row +
column is decoded from its window, the L bits of the string that end before bit floor((i + 1) K). A window is a state of
the tail-biting bit-shift trellis of QTIP (Tseng et al. 2024). Its level is the byte sum of a multiplicative hash. Like
QTIP's "1MAD" this is a pseudo-Gaussian code, but with one odd multiplier and no offset."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ciuic_cli.codecs.bits import TILE_BYTES_PER_BIT, bits_of
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.transform import TILE

MULTIPLIER = 0x83DCD12D
"""Multiplier of the hash; docs/experiments/codes/hash-multiplier.md."""

LEVEL_CENTRE = 510
"""Mean of a byte sum, 4 * 255 / 2."""

CODE_SIGMA = np.float32(147.8)
"""Standard deviation of the levels; a decoded weight is scale / CODE_SIGMA * level."""

TILE_WEIGHTS = TILE * TILE


def levels(windows: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Levels of windows, int32, -510 to 510: byte sum of window * MULTIPLIER mod 2^32, minus LEVEL_CENTRE."""
    product = windows.astype(np.uint64) * np.uint64(MULTIPLIER)
    total = sum((product >> np.uint64(8 * k)) & np.uint64(0xFF) for k in range(4))
    return np.asarray(total).astype(np.int32) - LEVEL_CENTRE


def tile_bits(tile: npt.NDArray[np.uint8], bits: float) -> npt.NDArray[np.uint8]:
    """The circular string of one stored tile (uint8 [32 * bits]): uint8 [256 * bits] of zeros and ones.

    A row has 16 * bits bits of the string: whole 16-bit words, then a byte if `bits` is half an integer. A tile
    stores word 0 of all rows, then word 1 of all rows, and so on.
    """
    whole = int(bits)
    words = tile[: TILE_BYTES_PER_BIT * whole].reshape(whole, TILE, 2)
    big_endian = words.transpose(1, 0, 2)[:, :, ::-1]  # row by row, word by word, most significant byte first
    last_bytes = tile[TILE_BYTES_PER_BIT * whole :].reshape(-1, TILE).T
    return np.unpackbits(np.concatenate([big_endian.reshape(TILE, -1), last_bytes], axis=1).reshape(-1))


def window_ends(bits: float) -> npt.NDArray[np.int64]:
    """int64 [256]: the bit of the tile's string before which each weight's window ends."""
    return np.floor((np.arange(TILE_WEIGHTS) + 1) * bits).astype(np.int64)


def tile_windows(tile: npt.NDArray[np.uint8], bits: float, L: int) -> npt.NDArray[np.int64]:
    """The 256 windows of one stored tile, int64 [256]."""
    string = tile_bits(tile, bits).astype(np.int64)
    ends = window_ends(bits)
    positions = (ends[:, None] - L + np.arange(L)) % string.size
    return string[positions] @ (1 << np.arange(L - 1, -1, -1))


def store_windows(windows: npt.NDArray[np.integer], bits: float) -> npt.NDArray[np.uint8]:
    """Inverse of `tile_windows`: a closed path of 256 windows to a stored tile, uint8 [32 * bits]."""
    ends, whole = window_ends(bits), int(bits)
    string = np.empty(ends[-1], np.uint8)
    for begin, end, window in zip([0, *ends], ends, windows.tolist(), strict=False):
        string[begin:end] = window >> np.arange(end - begin - 1, -1, -1) & 1
    rows = np.packbits(string).reshape(TILE, -1)
    words = rows[:, : 2 * whole].reshape(TILE, whole, 2).transpose(1, 0, 2)[:, :, ::-1]
    return np.concatenate([words.reshape(-1), rows[:, 2 * whole :].T.reshape(-1)])


def decode(packed: PackedMatrix) -> npt.NDArray[np.float32]:
    """The stored rows in the transformed basis, float32 [rows, cols_padded], without the low-rank part."""
    header = packed.header
    blocks = header.cols_padded // TILE
    out = np.zeros((header.rows_padded, header.cols_padded), dtype=np.float32)
    factors = header.scales / CODE_SIGMA
    for group, bits in enumerate(bits_of(header.row_bits).tolist()):
        nbytes = int(TILE_BYTES_PER_BIT * bits)
        for block in range(blocks if bits else 0):
            begin = int(header.group_offset[group]) + block * nbytes
            level = levels(tile_windows(packed.codes[begin : begin + nbytes], bits, header.L))
            rows, cols = slice(TILE * group, TILE * (group + 1)), slice(TILE * block, TILE * (block + 1))
            out[rows, cols] = factors[rows, None] * level.reshape(TILE, TILE).astype(np.float32)
    return out[: header.rows]


def viterbi(x: npt.NDArray[np.float64], bits: int, L: int) -> tuple[npt.NDArray[np.int64], float]:
    """The best closed path for one tile: the Viterbi search, repeated for each of the 2^(L-K) prefixes that it can
    start from.

    Memory and time grow as 2^(2L-K).

    Args:
        x: float [256], targets in units of the level.
        bits: K, an integer.

    Returns:
        (windows int64 [256], sum of squared errors).
    """
    prefixes = 1 << (L - bits)  # of a window: the low bits, which the next window begins with
    states = np.arange(1 << L)
    level = levels(states).astype(np.float64)
    before = states >> bits
    # cost[start, p]: the least cost of a path from prefix `start` to prefix p.
    cost = np.where(np.eye(prefixes, dtype=bool), 0.0, np.inf)
    choice = np.empty((x.size, prefixes, prefixes), dtype=np.uint8)
    for t, target in enumerate(x):
        arriving = cost[:, before] + (level - target) ** 2
        by_high = arriving.reshape(
            prefixes, 1 << bits, prefixes
        )  # start, the high bits of a window, its prefix
        choice[t] = by_high.argmin(axis=1)
        cost = by_high.min(axis=1)
    start = int(np.diagonal(cost).argmin())
    windows = np.empty(x.size, dtype=np.int64)
    prefix = start
    for t in range(x.size - 1, -1, -1):
        windows[t] = (int(choice[t, start, prefix]) << (L - bits)) | prefix
        prefix = int(windows[t]) >> bits
    return windows, float(cost[start, start])
