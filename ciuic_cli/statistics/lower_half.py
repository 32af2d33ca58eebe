"""Symmetric matrices (n, n) of which only the lower half is used, in the usual layout in memory.

The numbers above the diagonal are undefined. The operating system gives a large matrix its memory page by page, when a
page is first written. So the upper half takes no memory as long as nothing writes to it. Of these functions only
`mirror` does, and the native sums of moments (`symmetric_product.py`) do not. A matrix with 8,960 rows takes 0.20 GB
instead of 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ciuic_cli.process.threads import one_thread

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


def mirror(matrix: torch.Tensor) -> None:
    """Copy the lower half of a matrix (n, n) to the upper one."""
    for begin in range(0, len(matrix), _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        matrix[:begin, rows] = matrix[rows, :begin].T
        corner = matrix[rows, rows]
        corner.copy_(corner.tril() + corner.tril(-1).T)


def add(total: torch.Tensor, more: torch.Tensor) -> None:
    """Add the lower half of `more` (n, n) to that of `total`."""
    for block, added in zip(blocks(total), blocks(more), strict=True):
        block += added


def scale(matrix: torch.Tensor, factor: float) -> None:
    """Multiply the lower half of a matrix (n, n) by a number."""
    for block in blocks(matrix):
        block *= factor


def squared_correlations(matrix: torch.Tensor) -> float:
    """Σ m_ij² / (m_ii m_jj) over all j < i of a matrix (n, n). Rows and columns without a positive diagonal count 0."""
    with one_thread():
        diagonal = matrix.diagonal()
        root = torch.where(diagonal > 0, diagonal.rsqrt(), 0.0)
        total, begin = 0.0, 0
        for block in blocks(matrix):
            end = begin + len(block)
            correlations = (block * root[begin:end, None]).mul_(root[:end]).tril_(begin - 1)
            total += float(correlations.square_().sum())
            begin = end
        return total


def bytes_of(size: int) -> int:
    """Bytes of the lower half of a float32 matrix (size, size), without the rest of each row's last page."""
    return 4 * sum(min(begin + _BLOCK, size) * min(_BLOCK, size - begin) for begin in range(0, size, _BLOCK))
