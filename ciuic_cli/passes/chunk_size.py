"""How many rows are processed at a time. Rows of an embedding or head are independent; row chunks bound its memory."""

from __future__ import annotations

from collections.abc import Iterator

SCRATCH_ROWS = 4096
"""Rows whose temporaries are in memory at a time; a row chunk has a multiple of it (measured:
docs/experiments/scale/vocabulary-chunks.md)."""
CHUNK_BYTES = 12 << 20
"""Approximate bytes of a row chunk in float32 (measured: docs/experiments/scale/vocabulary-chunks.md)."""


def chunk_rows(cols: int) -> int:
    """Rows of a row chunk of a matrix with this many columns."""
    return max(1, CHUNK_BYTES // (4 * cols * SCRATCH_ROWS)) * SCRATCH_ROWS


def scratch_slices(rows: int) -> Iterator[slice]:
    """Slices of at most SCRATCH_ROWS rows that cover `rows` rows."""
    for begin in range(0, rows, SCRATCH_ROWS):
        yield slice(begin, min(begin + SCRATCH_ROWS, rows))
