"""Weights and expert stacks on a GPU, by the kernels in `ciuic_cli.kernels`."""

from __future__ import annotations

import copy

import numpy as np
import torch

from ciuic_cli import kernels
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime import products
from ciuic_cli.runtime.weights import PlainStack, PlainWeight, Stack, Weight, expert_blobs


def usable(device: torch.device) -> bool:
    """Whether the kernels run on this device; if not, a warning has said why (once per device)."""
    return kernels.available(device)[0]


def weight(packed: PackedMatrix, blob: torch.Tensor) -> Weight:
    """The weight in a blob on the device; `packed` may have been parsed from a copy in host memory."""
    return GpuWeight(kernels.KernelMatrix(_without_codes(packed), blob))


def stack(packed: ExpertStack, blob: torch.Tensor) -> Stack:
    """The stack in a blob on the device: one launch for all experts where they are alike, else one for
    each."""
    lean = ExpertStack(tuple(_without_codes(expert) for expert in packed.experts))
    alike = len({(expert.L, expert.seed) for expert in lean.experts}) == 1
    if alike and all(expert.lowrank is None for expert in lean.experts):
        return GpuStack(kernels.DeviceStack(lean, blob))
    parts = zip(lean.experts, expert_blobs(lean, blob), strict=True)
    experts = tuple(kernels.KernelMatrix(expert, part) for expert, part in parts)
    return PlainStack(experts, kernels.KernelMatrix.small_batch)


class GpuWeight(PlainWeight):
    """One launch for the product, low-rank part included, and one for the rows of an embedding."""

    def __init__(self, matrix: kernels.KernelMatrix) -> None:
        super().__init__(matrix)
        self.kernels = matrix

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return products.to_original_order(self.kernels, self.kernels.product(x))

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `Weight.lookup`; an id that the table has no row for makes zeros, so that nothing waits for
        the host."""
        if self.kernels.lowrank is None:
            return kernels.embedding(self.kernels.view, self._stored(ids.to(torch.int64)), dtype)
        rows = products.rows_of(self.kernels, ids.reshape(-1).to(torch.int64))
        return rows.to(dtype).reshape(*ids.shape, self.kernels.cols)

    def _stored(self, ids: torch.Tensor) -> torch.Tensor:
        """Where the rows named by `ids` are stored; those that the table has not stay outside of it."""
        position = self.kernels.position
        if position is None:
            return ids
        inside = (ids >= 0) & (ids < self.kernels.rows)
        found = position[ids.clamp(0, self.kernels.rows - 1)].to(torch.int64)
        return torch.where(inside, found, ids)


class GpuStack:
    """One launch for all (token, expert) pairs of a step."""

    def __init__(self, on_device: kernels.DeviceStack) -> None:
        self.on_device = on_device
        self.count = on_device.count
        positions = [expert.position_on(on_device.blob.device) for expert in on_device.packed.experts]
        own = torch.arange(on_device.rows, dtype=torch.int32, device=on_device.blob.device)
        self.positions = (  # int32 [experts, rows], or None: where each row of an expert is stored
            torch.stack([own if position is None else position for position in positions])
            if any(position is not None for position in positions)
            else None
        )

    def expert(self, index: int) -> kernels.KernelMatrix:
        view = self.on_device.expert(index)
        return kernels.KernelMatrix(view.packed, view.blob, view)

    def product(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return kernels.experts(self.on_device, x, ids, positions=self.positions)


def _without_codes(packed: PackedMatrix) -> PackedMatrix:
    """The same fields without the host's copy of the blob behind them: codes of the right size that take no
    memory."""
    lean = copy.copy(packed)
    # Not through the constructor: it wants codes that are contiguous, and these are one byte seen many times.
    lean.__dict__.pop("native_arguments", None)  # addresses of the arrays that are replaced
    for name, value in (
        ("codes", np.broadcast_to(np.uint8(0), packed.codes.shape)),
        ("row_bits", packed.row_bits.copy()),
        ("row_scale", packed.row_scale.copy()),
        ("input_scale", None if packed.input_scale is None else packed.input_scale.copy()),
        ("lowrank", packed.lowrank and tuple(_without_codes(part) for part in packed.lowrank)),
    ):
        object.__setattr__(lean, name, value)
    return lean
