"""A compressed matrix, or a stack of experts, as the kernels see it: the blob on the device and where its
groups begin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ciuic_cli.codecs.packing import PackedMatrix, bits_of
from ciuic_cli.codecs.stack import ExpertStack, stack_header_nbytes
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import UsageError

_UNIT = 16  # group offsets count 16-byte pieces, so that 32 bits reach 64 GiB


def _units(packed: PackedMatrix) -> int:
    """Units of 32 bytes that a tile of its widest row group takes, the last perhaps half full."""
    return math.ceil(bits_of(packed.row_bits).max())


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """One matrix on a device. No part of the blob is copied; the offsets add 4 bytes per 16 rows, input scales 4 bytes
    per column.

    Attributes:
        packed: the parsed blob. Its codes may lie anywhere; they are not read.
        blob: uint8 [nbytes] on the device, address a multiple of 16.
        group_offset: int32 [ceil(rows / 16)] on the device, where a group's codes begin in `blob`, in 16
            bytes.
        input_factors: None, or float32 [cols] on the device, what inputs are multiplied by before the transform.
        lowrank: None or (R, L transposed).

    Raises:
        UsageError: the blob has another size or type than `packed` says, or does not begin at a multiple of
            16 bytes.
    """

    packed: PackedMatrix
    blob: torch.Tensor
    group_offset: torch.Tensor = field(init=False)
    input_factors: torch.Tensor | None = field(init=False)
    lowrank: tuple[DeviceMatrix, DeviceMatrix] | None = field(init=False)

    def __post_init__(self) -> None:
        packed, blob = self.packed, self.blob
        _check_blob(blob, packed.nbytes)
        object.__setattr__(self, "group_offset", _offsets(packed).to(blob.device))
        object.__setattr__(self, "input_factors", packed.input_factors_on(blob.device))
        lowrank = None
        if packed.lowrank is not None:
            right, left = packed.lowrank
            end = packed.nbytes - packed.codes.size
            middle = end - left.nbytes
            lowrank = (
                DeviceMatrix(right, blob[middle - right.nbytes : middle]),
                DeviceMatrix(left, blob[middle:end]),
            )
        object.__setattr__(self, "lowrank", lowrank)

    @property
    def rows(self) -> int:
        return self.packed.rows

    @property
    def cols(self) -> int:
        return self.packed.cols

    @cached_property
    def cols_padded(self) -> int:
        return self.packed.cols_padded

    @cached_property
    def log2_block(self) -> int:
        return self.packed.log2_block

    @property
    def seed(self) -> int:
        return self.packed.seed

    @property
    def window_bits(self) -> int:
        return self.packed.L

    @cached_property
    def groups(self) -> int:
        return self.packed.rows_padded // TILE

    @cached_property
    def max_units(self) -> int:
        return _units(self.packed)

    @cached_property
    def is_zero(self) -> bool:
        return self.packed.is_zero


@dataclass(frozen=True, eq=False)
class DeviceStack:
    """A stack of experts on a device.

    Attributes:
        packed: the parsed blob.
        blob: uint8 [nbytes] on the device, address a multiple of 16.
        group_offset: int32 [experts, ceil(rows / 16)], from the expert's own blob, in 16 bytes.

    Raises:
        UsageError: as `DeviceMatrix`; also where experts differ in window, seed or have a low-rank part,
            which the kernels do not take: such a stack is multiplied expert by expert.
    """

    packed: ExpertStack
    blob: torch.Tensor
    group_offset: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        experts = self.packed.experts
        _check_blob(self.blob, self.packed.nbytes)
        if len({(expert.L, expert.seed) for expert in experts}) != 1 or any(
            expert.lowrank for expert in experts
        ):
            raise UsageError(
                "one launch for all experts needs one window length and one seed, and no low-rank part",
                remedy="Multiply these experts one by one.",
            )
        table = torch.stack([_offsets(expert) for expert in experts])
        object.__setattr__(self, "group_offset", table.to(self.blob.device))

    @property
    def rows(self) -> int:
        return self.packed.rows

    @property
    def cols(self) -> int:
        return self.packed.cols

    @property
    def count(self) -> int:
        return len(self.packed.experts)

    @cached_property
    def max_units(self) -> int:
        return max(_units(expert) for expert in self.packed.experts)

    @cached_property
    def groups(self) -> int:
        return self.packed.experts[0].rows_padded // TILE

    def expert(self, index: int) -> DeviceMatrix:
        """One expert as a matrix of its own; the first call for each makes its offsets."""
        return self._experts[index]

    @cached_property
    def _experts(self) -> list[DeviceMatrix]:
        out, begin = [], stack_header_nbytes(self.count)
        for expert in self.packed.experts:
            out.append(DeviceMatrix(expert, self.blob[begin : begin + expert.nbytes]))
            begin += expert.nbytes
        return out


def _offsets(packed: PackedMatrix) -> torch.Tensor:
    begins = (packed.nbytes - packed.codes.size + packed.group_offset) // _UNIT
    return torch.from_numpy(begins.astype(np.uint32).view(np.int32))


def _check_blob(blob: torch.Tensor, nbytes: int) -> None:
    if blob.dtype != torch.uint8 or blob.shape != (nbytes,) or not blob.is_contiguous():
        raise UsageError(f"the blob must be contiguous uint8 [{nbytes}], not {blob.dtype} {list(blob.shape)}")
    if blob.data_ptr() % _UNIT:
        raise UsageError(f"the blob must begin at a multiple of {_UNIT} bytes", remedy="Clone the tensor.")
