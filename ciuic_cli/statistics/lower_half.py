"""Symmetric matrices (n, n) of which only the lower half is kept, in the usual layout in memory.

What is above the diagonal is undefined. The system maps a large matrix page by page, when a page is first written; so
the upper half takes no memory as long as nobody writes to it. The native sums of moments do not
(`symmetric_product.py`). With 8,960 rows, 0.13 of 0.32 GB are saved: pages are mapped whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 256
"""Rows of a block. Half of a block's square lies above the diagonal, and takes memory. Chosen, not tuned."""


def blocks(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of the rows of a matrix (n, n), a block of rows at a time, up to the block's last diagonal entry."""
    for begin in range(0, len(matrix), _BLOCK):
        yield matrix[begin : begin + _BLOCK, : begin + _BLOCK]


def zeros(size: int, device: torch.device) -> torch.Tensor:
    """A float32 matrix (size, size) whose lower half is 0."""
    return cleared(torch.empty(size, size, device=device))


def cleared(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix (n, n), after its lower half was set to 0."""
    for block in blocks(matrix):
        block.zero_()
    return matrix


def add(total: torch.Tensor, more: torch.Tensor) -> None:
    """Add the lower half of `more` (n, n) to that of `total`."""
    for block, added in zip(blocks(total), blocks(more), strict=True):
        block += added


def scale(matrix: torch.Tensor, factor: float) -> None:
    """Multiply the lower half of a matrix (n, n) by a number."""
    for block in blocks(matrix):
        block *= factor


def bytes_of(size: int) -> int:
    """Bytes in memory of the lower half of a float32 matrix (size, size)."""
    return 4 * sum(min(begin + _BLOCK, size) * min(_BLOCK, size - begin) for begin in range(0, size, _BLOCK))
