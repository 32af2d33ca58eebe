"""Bytes that products with compressed matrices allocate on a CPU, without computing them: for plans of memory.

The numbers follow the code of `runtime.products` and of the operators in `runtime.ops`;
tests/train/test_product_memory.py compares them with what torch's allocator gives out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.transform import TILE, padded
from ciuic_cli.integers import ceil_div
from ciuic_cli.runtime import products
from ciuic_cli.runtime.products import PANEL_BYTES, PANELS_PER_SUM, SCALED_ROWS, SORTED_PANEL_BYTES

_FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class MatrixKind:
    """What the memory of a product depends on: shape, and which parts the matrix has."""

    rows: int
    cols: int
    is_sorted: bool = False
    has_input_scale: bool = False
    rank: int = 0

    @classmethod
    def of(cls, header: MatrixHeader) -> MatrixKind:
        is_sorted, is_scaled = header.row_class is not None, header.input_scale is not None
        return cls(header.rows, header.cols, is_sorted, is_scaled, header.rank)

    @property
    def cols_padded(self) -> int:
        return padded(self.cols)

    def right(self) -> MatrixKind:
        """The right low-rank factor."""
        return MatrixKind(self.rank, self.cols)

    def panel_rows(self, itemsize: int, *, reorders_rows: bool) -> int:
        """Rows of a panel, as `products` chooses them. reorders_rows: whether sorted rows are put into W's order."""
        if reorders_rows and self.is_sorted and itemsize * self.rows * self.cols_padded <= SORTED_PANEL_BYTES:
            return self.rows
        fitting = PANEL_BYTES // (itemsize * self.cols_padded) // TILE * TILE
        return min(self.rows, max(TILE, fitting))


def product_bytes(kind: MatrixKind, batch: int, dtype: torch.dtype, small_batch: int) -> int:
    """The most bytes that `products.product` holds for x (batch, cols) of `dtype`, besides x, the result included."""
    size, own = products.multiply_dtype(torch.empty(0, dtype=dtype)).itemsize, dtype.itemsize
    result = batch * kind.rows * own
    if batch == 0:
        return result
    peak = result
    scaled = 0
    if kind.has_input_scale and (batch > small_batch or kind.rank):
        scaled = batch * kind.cols * own
        peak = max(peak, scaled + min(batch, SCALED_ROWS) * kind.cols * _FLOAT)
    if batch > small_batch:
        transformed = batch * kind.cols_padded * size
        step = kind.panel_rows(size, reorders_rows=True)
        panel = step * kind.cols_padded * size
        y = batch * kind.rows * size
        inner = scaled + transformed
        if step == kind.rows:
            peak = max(peak, inner + (2 * panel if kind.is_sorted else panel), inner + panel + y)
        else:
            peak = max(peak, inner + y + panel + batch * step * size)
            if kind.is_sorted:
                peak = max(peak, inner + 2 * y)
    if kind.rank:
        y = batch * kind.rows * size
        wide = batch * padded(kind.rows) * _FLOAT
        inner = batch * kind.rank * _FLOAT
        left = kind.rank * padded(kind.rows) * _FLOAT
        peak = max(
            peak,
            scaled + y + product_bytes(kind.right(), batch, dtype, small_batch),
            scaled + y + inner + max(left + wide, 2 * wide),
            scaled + y + inner + (2 + kind.is_sorted + (size != _FLOAT)) * wide,
        )
    return peak


def gradient_bytes(kind: MatrixKind, batch: int, dtype: torch.dtype) -> int:
    """The most bytes that `products.gradient` holds for grad (batch, rows), besides grad, the result included."""
    size = products.multiply_dtype(torch.empty(0, dtype=dtype)).itemsize
    result = batch * kind.cols_padded * size
    if batch == 0:
        return result
    step = kind.panel_rows(size, reorders_rows=not kind.rank)
    panel, panels = step * kind.cols_padded * size, ceil_div(kind.rows, step)
    columns = batch * kind.rows * size
    making = copy = columns if size != dtype.itemsize else 0  # of grad: while it is made, and afterwards
    if panels == 1 and not kind.rank:
        peak = max(2 * panel if kind.is_sorted else panel, panel + result)
    else:
        if kind.is_sorted:  # the copy in W's order replaces the one in another dtype
            making, copy = making + columns, columns
        peak = panel + result
        if panels > PANELS_PER_SUM:
            total = batch * kind.cols_padded * _FLOAT
            # A sum is kept while the next panels' share is made; at the end it is cast.
            peak = max(total + panel + result, total + 2 * result)
    if kind.rank:
        wide = batch * padded(kind.rows) * size
        inner = batch * kind.rank * size
        left = kind.rank * padded(kind.rows) * size
        right = gradient_bytes(kind.right(), batch, dtype)
        peak = max(peak, result + wide + left + inner, result + inner + right)
    if kind.has_input_scale and size != _FLOAT:
        peak = max(peak, result + min(batch, SCALED_ROWS) * kind.cols * _FLOAT)
    return max(making, copy + peak)
