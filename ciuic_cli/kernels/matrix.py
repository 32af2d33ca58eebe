"""Compressed matrices and expert stacks as kernels read them: the blob on the device, and where codes begin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.sizes import ALIGN
from ciuic_cli.codecs.stack import StackHeader
from ciuic_cli.errors import UsageError


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """One matrix on a device, made by `on_device`. The blob is not copied: kernels read the codes in it.

    Beyond the blob it holds 4 bytes per 16 rows, and 4 bytes per column if there are input scales.

    Attributes:
        header: of the matrix.
        blob: uint8 [nbytes] on the device, address a multiple of 16.
        group_offset: int32 [groups] on the device: where a group's codes begin in `blob`, in multiples of 16 bytes.
        input_factors: None, or float32 [cols] on the device: the input scales.
        lowrank: None, or the factors (right, left transposed).
    """

    header: MatrixHeader
    blob: torch.Tensor
    group_offset: torch.Tensor
    input_factors: torch.Tensor | None
    lowrank: tuple[DeviceMatrix, DeviceMatrix] | None

    @classmethod
    def on_device(cls, header: MatrixHeader, blob: torch.Tensor) -> DeviceMatrix:
        """The matrix of `header` in `blob`, uint8 [nbytes] on the device.

        Raises:
            UsageError: the blob has another size or dtype, or does not begin at a multiple of 16 bytes.
        """
        _check_blob(blob, header.nbytes)
        lowrank = None
        if header.lowrank is not None:
            (right, left), (right_blob, left_blob) = header.lowrank, header.lowrank_in(blob)
            lowrank = (cls.on_device(right, right_blob), cls.on_device(left, left_blob))
        offsets = _offsets(header).to(blob.device)
        return cls(header, blob, offsets, header.input_factors_on(blob.device), lowrank)

    @property
    def rows(self) -> int:
        return self.header.rows

    @property
    def cols(self) -> int:
        return self.header.cols

    @property
    def cols_padded(self) -> int:
        return self.header.cols_padded

    @property
    def seed(self) -> int:
        return self.header.seed

    @property
    def L(self) -> int:
        return self.header.L

    @property
    def groups(self) -> int:
        return self.header.groups

    @property
    def is_zero(self) -> bool:
        return self.header.is_zero

    @cached_property
    def max_words(self) -> int:
        """16-bit words of a row of a tile, in the row group with the most bits; the last word may be half full."""
        return _max_words(self.header)


@dataclass(frozen=True, eq=False)
class DeviceStack:
    """A stack of experts on a device that one launch can multiply with, made by `on_device`.

    Attributes:
        header: of the stack.
        blob: uint8 [nbytes] on the device, address a multiple of 16.
        group_offset: int32 [experts, groups] on the device: where a group's codes begin in `blob`, in multiples of
            16 bytes.
    """

    header: StackHeader
    blob: torch.Tensor
    group_offset: torch.Tensor

    @classmethod
    def on_device(cls, header: StackHeader, blob: torch.Tensor) -> DeviceStack:
        """The stack of `header` in `blob`, uint8 [nbytes] on the device.

        Raises:
            UsageError: the blob does not fit, as for a matrix; or the experts are not `uniform`.
        """
        _check_blob(blob, header.nbytes)
        if not uniform(header):
            raise UsageError(
                "one launch for all experts needs one L and one seed, and no low-rank part",
                remedy="Multiply with these experts one by one.",
            )
        table = torch.stack([_offsets(expert) for expert in header.experts])
        return cls(header, blob, table.to(blob.device))

    @property
    def rows(self) -> int:
        return self.header.rows

    @property
    def cols(self) -> int:
        return self.header.cols

    @property
    def cols_padded(self) -> int:
        return self.header.experts[0].cols_padded

    @property
    def seed(self) -> int:
        return self.header.experts[0].seed

    @property
    def L(self) -> int:
        return self.header.experts[0].L

    @property
    def groups(self) -> int:
        """Row groups of one expert."""
        return self.header.experts[0].groups

    @property
    def count(self) -> int:
        return len(self.header.experts)

    @cached_property
    def max_words(self) -> int:
        """As `DeviceMatrix.max_words`, over all experts."""
        return max(_max_words(expert) for expert in self.header.experts)

    @cached_property
    def experts(self) -> tuple[DeviceMatrix, ...]:
        """Each expert as a matrix, made at the first access."""
        parts = zip(self.header.experts, self.header.experts_in(self.blob), strict=True)
        return tuple(DeviceMatrix.on_device(expert, blob) for expert, blob in parts)


def uniform(header: StackHeader) -> bool:
    """Whether a DeviceStack can hold the experts: one L, one seed, no low-rank parts."""
    first = header.experts[0]
    return all(
        expert.L == first.L and expert.seed == first.seed and expert.lowrank is None
        for expert in header.experts
    )


def _max_words(header: MatrixHeader) -> int:
    return math.ceil(bits_of(header.row_bits).max())


def _offsets(header: MatrixHeader) -> torch.Tensor:
    """`DeviceMatrix.group_offset` on the host. Multiples of 16 bytes in 32 bits reach 64 GiB."""
    begins = (header.codes_begin + header.group_offset) // ALIGN
    return torch.from_numpy(begins.astype(np.uint32).view(np.int32))


def _check_blob(blob: torch.Tensor, nbytes: int) -> None:
    if blob.dtype != torch.uint8 or blob.shape != (nbytes,) or not blob.is_contiguous():
        raise UsageError(f"the blob must be contiguous uint8 [{nbytes}], not {blob.dtype} {list(blob.shape)}")
    if blob.data_ptr() % ALIGN:
        raise UsageError(f"the blob must begin at a multiple of {ALIGN} bytes", remedy="Clone the tensor.")
