"""Weights and expert stacks on a GPU, multiplied by the kernels in `ciuic_cli.kernels`.

`kernels.DeviceMatrix` and `kernels.DeviceStack` are the data that a launch reads; the two classes here are the
behaviour that the operators call.
"""

from __future__ import annotations

import sys

import torch

from ciuic_cli import kernels
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.stack import StackHeader
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.runtime import products
from ciuic_cli.runtime.weights import PlainStack, SmallBatch, Stack, Weight

_ANY_BATCH = SmallBatch(sys.maxsize, sys.maxsize, sys.maxsize)
"""The kernels' product is the faster one for any batch: it chooses between codes and decoded rows itself."""


def usable(device: torch.device) -> bool:
    """Whether the kernels run on this device; if not, a warning has said why (once per device)."""
    return kernels.available(device)[0]


def weight(header: MatrixHeader, blob: torch.Tensor) -> Weight:
    """The weight in a blob (uint8 [nbytes]) on the device."""
    return GpuMatrix(kernels.DeviceMatrix.on_device(header, blob))


def stack(header: StackHeader, blob: torch.Tensor) -> Stack:
    """The stack in a blob on the device: one launch for all experts if they are uniform, else one for each expert."""
    if kernels.uniform(header):
        return GpuStack(kernels.DeviceStack.on_device(header, blob))
    parts = zip(header.experts, header.experts_in(blob), strict=True)
    matrices = [kernels.DeviceMatrix.on_device(expert, part) for expert, part in parts]
    return PlainStack(tuple(GpuMatrix(matrix) for matrix in matrices), _ANY_BATCH)


class GpuMatrix:
    """A compressed matrix on a GPU: implements `Matrix`, and `Weight` with one launch per product or lookup."""

    def __init__(self, on_device: kernels.DeviceMatrix) -> None:
        self.on_device = on_device
        self.rows, self.cols, self.cols_padded = on_device.rows, on_device.cols, on_device.cols_padded
        self.seed = on_device.seed
        self.is_zero = on_device.is_zero
        self.position = on_device.header.position_on(on_device.blob.device)
        self.input_factors = on_device.input_factors
        self.lowrank: tuple[GpuMatrix, GpuMatrix] | None = None
        if on_device.lowrank is not None:
            right, left = on_device.lowrank
            self.lowrank = (GpuMatrix(right), GpuMatrix(left))

    @property
    def matrix(self) -> GpuMatrix:
        return self

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        first = row_begin // TILE * TILE
        return kernels.decode(self.on_device, first, row_end, dtype)[row_begin - first :]

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return kernels.embedding(self.on_device, rows, torch.float32, transformed=True)

    def small_product(self, x: torch.Tensor) -> torch.Tensor:
        if self.input_factors is not None:
            x = (x * self.input_factors).to(x.dtype)
        return products.to_original_order(
            self, kernels.linear([self.on_device], x, torch.float32, bare=True)[0]
        )

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return products.to_original_order(self, kernels.linear([self.on_device], x)[0])

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `Weight.lookup`. An id outside the table makes zeros, because a check would wait for the device."""
        ids = ids.to(torch.int64)
        if self.lowrank is None:
            return kernels.embedding(self.on_device, self._stored(ids), dtype)
        return products.rows_of(self, ids.reshape(-1)).to(dtype).reshape(*ids.shape, self.cols)

    def _stored(self, ids: torch.Tensor) -> torch.Tensor:
        """The stored rows of the rows `ids`; ids outside the table stay outside."""
        if self.position is None:
            return ids
        inside = (ids >= 0) & (ids < self.rows)
        stored = self.position[ids.clamp(0, self.rows - 1)].to(torch.int64)
        return torch.where(inside, stored, ids)


class GpuStack:
    """Uniform experts on a GPU: implements `Stack` with one launch for all (token, expert) pairs of a decoding step."""

    def __init__(self, on_device: kernels.DeviceStack) -> None:
        self.on_device = on_device
        self.count = on_device.count
        device = on_device.blob.device
        positions = [expert.position_on(device) for expert in on_device.header.experts]
        unsorted = torch.arange(on_device.rows, dtype=torch.int32, device=device)
        self.positions = (  # int32 [experts, rows]: where each row of an expert is stored; None if none is sorted
            torch.stack([unsorted if position is None else position for position in positions])
            if any(position is not None for position in positions)
            else None
        )

    def expert(self, index: int) -> GpuMatrix:
        return GpuMatrix(self.on_device.experts[index])

    def product(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return kernels.experts(self.on_device, x, ids, positions=self.positions)
