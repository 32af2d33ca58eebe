"""Row chunks bound scratch memory: rows of an embedding or head are independent, so they can be processed in parts."""

from __future__ import annotations

from collections.abc import Iterator

SCRATCH_ROWS = 4096
"""Rows whose temporaries are held at once; chunks are multiples of it.

Measured: docs/experiments/scale/vocabulary-chunks.md."""
CHUNK_BYTES = 1 << 25
"""Approximate bytes of a chunk of an embedding in float32 (measured: docs/experiments/scale/vocabulary-chunks.md)."""


def chunk_rows(cols: int) -> int:
    """Rows per chunk of a matrix with this many columns: few enough for memory, enough to keep the products large."""
    return max(1, CHUNK_BYTES // (4 * cols * SCRATCH_ROWS)) * SCRATCH_ROWS


def scratch_slices(rows: int) -> Iterator[slice]:
    """Slices of at most SCRATCH_ROWS rows that cover `rows` rows."""
    for begin in range(0, rows, SCRATCH_ROWS):
        yield slice(begin, min(begin + SCRATCH_ROWS, rows))
