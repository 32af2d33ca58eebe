"""How many rows are processed at a time. Rows of an embedding or head are independent; row chunks bound its memory."""

from __future__ import annotations

from collections.abc import Iterator

SCRATCH_ROWS = 4096
"""Rows whose temporaries are in memory at a time; a row chunk has a multiple of it (measured:
docs/experiments/scale/vocabulary-chunks.md)."""
CHUNK_BYTES = 12 << 20
"""Approximate bytes of a row chunk in float32 (measured: docs/experiments/scale/vocabulary-chunks.md)."""


PART_BYTES = 4 << 20
"""Bytes of the rows, in float32, that a pass over a large matrix takes at a time: its temporaries stay in the cache and
in memory that the process has, instead of being mapped and cleared (measured:
docs/experiments/scale/large-moments.md)."""


def chunk_rows(cols: int) -> int:
    """Rows of a row chunk of a matrix with this many columns."""
    return max(1, CHUNK_BYTES // (4 * cols * SCRATCH_ROWS)) * SCRATCH_ROWS


def scratch_slices(rows: int) -> Iterator[slice]:
    """Slices of at most SCRATCH_ROWS rows that cover `rows` rows."""
    return _slices(rows, SCRATCH_ROWS)


def part_slices(rows: int, cols: int) -> Iterator[slice]:
    """Slices that cover `rows` rows with `cols` columns; each has about PART_BYTES in float32."""
    return _slices(rows, max(1, PART_BYTES // (4 * cols)))


def _slices(rows: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, rows)) for begin in range(0, rows, size))
