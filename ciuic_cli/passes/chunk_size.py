"""How many rows or columns are processed at a time.

Rows of an embedding or head are independent, and row chunks bound its memory. Parts of any large matrix bound the
memory of temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.integers import ceil_div, round_up

SCRATCH_ROWS = 4096
"""Rows whose temporaries are in memory at a time; a row chunk has a multiple of it (measured:
docs/experiments/scale/vocabulary-chunks.md)."""
CHUNK_BYTES = 12 << 20
"""Approximate bytes of a row chunk in float32 (measured: docs/experiments/scale/vocabulary-chunks.md)."""
PART_BYTES = {"cpu": 4 << 20, "gpu": 256 << 20}
"""Bytes in float32 that a pass over a large matrix takes at a time, by kind of device. On a CPU its temporaries stay in
the cache and in memory that the process has, instead of being mapped and cleared (measured:
docs/experiments/scale/large-moments.md). A GPU should have few launches; chosen, not tuned."""
SQUARE = {"cpu": 256, "gpu": 8192}
"""Most rows and columns of a moment that are transposed or reordered at a time, by kind of device. On a CPU they stay
in a cache: 256 is the fastest of 192, 256 and 512 (measured: docs/experiments/scale/arms.md). The size for a GPU is
chosen, for few launches."""


def chunk_rows(cols: int) -> int:
    """Rows of a row chunk of a matrix with this many columns."""
    return max(1, CHUNK_BYTES // (4 * cols * SCRATCH_ROWS)) * SCRATCH_ROWS


def scratch_slices(rows: int) -> Iterator[slice]:
    """Slices of at most SCRATCH_ROWS rows that cover `rows` rows."""
    return _slices(rows, SCRATCH_ROWS)


def part_slices(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix (m, n), each of about PART_BYTES."""
    rows, cols = matrix.shape
    return _slices(rows, max(1, PART_BYTES[device_kind(matrix.device)] // (4 * cols)))


def square_slices(moment: torch.Tensor) -> list[slice]:
    """Slices of the rows or of the columns of a moment (n, n), each of at most SQUARE."""
    return list(_slices(len(moment), SQUARE[device_kind(moment.device)]))


def device_kind(device: torch.device) -> str:
    """ "cpu" or "gpu": the key of the device in tables of sizes."""
    return "cpu" if device.type == "cpu" else "gpu"


def equal_slices(size: int, most: int) -> Iterator[slice]:
    """Slices of `size` columns: as few as possible of at most about `most`, of equal size but for the last.

    They have multiples of 16 columns, as far as `size` has: the bits of products with other sizes may depend on the
    number of threads (docs/experiments/statistics/thread-bits.md).
    """
    return _slices(size, round_up(ceil_div(size, ceil_div(size, most)), TILE))


def _slices(rows: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, rows)) for begin in range(0, rows, size))
