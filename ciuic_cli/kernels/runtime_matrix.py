"""A matrix on a GPU with the methods that `runtime.matrices.Matrix` asks for."""

from __future__ import annotations

import sys

import torch

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.kernels.matrix import DeviceMatrix
from ciuic_cli.kernels.multiply import linear
from ciuic_cli.kernels.rows import decode, embedding


class KernelMatrix:
    """Decodes and multiplies with the CUDA kernels.

    Args:
        packed: the parsed blob; its arrays may lie in host memory and only the small ones are kept in use.
        blob: uint8 [nbytes] on the GPU.
    """

    small_batch = sys.maxsize  # `small_product` is the right way for any batch: it decodes panels itself

    def __init__(self, packed: PackedMatrix, blob: torch.Tensor, view: DeviceMatrix | None = None) -> None:
        self.view = DeviceMatrix(packed, blob) if view is None else view
        self.rows, self.cols, self.cols_padded = self.view.rows, self.view.cols, self.view.cols_padded
        self.seed = self.view.seed
        self.is_zero = self.view.is_zero
        self.position = packed.position_on(blob.device)
        self.input_factors = self.view.input_factors
        self.lowrank: tuple[KernelMatrix, KernelMatrix] | None = None
        if self.view.lowrank is not None:
            right, left = self.view.lowrank
            self.lowrank = (
                KernelMatrix(right.packed, right.blob, right),
                KernelMatrix(left.packed, left.blob, left),
            )

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows in the transformed basis, [rows asked for, cols_padded] of `dtype`, without the low-rank part."""
        first = row_begin // TILE * TILE
        return decode(self.view, first, row_end, dtype)[row_begin - first :]

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows named by `rows` (int64 [n], in any order), transformed basis, float32 [n, cols_padded]."""
        return embedding(self.view, rows, torch.float32, transformed=True)

    def small_product(self, x: torch.Tensor) -> torch.Tensor:
        """The codes times x, scaled already, float32 [..., rows] in W's own order; for any batch."""
        y = linear([self.view], x, torch.float32, bare=True)[0]
        return y if self.position is None else y.index_select(-1, self.position)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The stored rows of W times x, low-rank part and input scales included: [..., rows] of x's dtype."""
        return linear([self.view], x)[0]
