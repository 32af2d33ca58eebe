"""A compressed matrix in memory: its header and its codes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.layout import Buffer, as_bytes, header_to_bytes, read_header
from ciuic_cli.codecs.scales import Bytes
from ciuic_cli.errors import InputError


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A compressed matrix. The codes may be a view of memory that another object owns, such as a mapped file.

    Attributes:
        header: all else. If its `lowrank` is None, it is taken from the factors.
        codes: uint8 [header.codes_nbytes], the tiles.
        lowrank: None, or the factors (right [rank, cols], left transposed [rank, rows]).

    Raises:
        InputError: the codes or the factors do not fit the header.
    """

    header: MatrixHeader
    codes: Bytes
    lowrank: tuple[PackedMatrix, PackedMatrix] | None = None

    def __post_init__(self) -> None:
        size = self.header.codes_nbytes
        if self.codes.dtype != np.uint8 or self.codes.shape != (size,):
            raise InputError(f"codes must be uint8 [{size}], not {self.codes.dtype} {list(self.codes.shape)}")
        if not self.codes.flags.c_contiguous:
            raise InputError("codes must be contiguous")
        if self.lowrank is not None and self.header.lowrank is None:
            right, left = self.lowrank
            object.__setattr__(self, "header", replace(self.header, lowrank=(right.header, left.header)))
        described = self.header.lowrank or ()
        factors = self.lowrank or ()
        if len(described) != len(factors) or any(
            factor.header is not header for factor, header in zip(factors, described, strict=True)
        ):
            raise InputError("the header describes other low-rank factors")

    def __getstate__(self) -> dict[str, Any]:
        """Without `native_arguments`, because the arrays of a copy have other addresses."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def rows(self) -> int:
        return self.header.rows

    @property
    def cols(self) -> int:
        return self.header.cols

    @property
    def is_zero(self) -> bool:
        """Whether the matrix is zero, as a pruned expert is."""
        return self.header.is_zero

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return self.header.nbytes

    @functools.cached_property
    def native_arguments(self) -> tuple[int, ...]:
        """The leading arguments of every native function: addresses of codes, group offsets, bits per weight
        and scales, padded rows, padded columns, L. Valid as long as this object lives."""
        header = self.header
        arrays = (self.codes, header.group_offset, header.row_bits, header.scales)
        return (*(array.ctypes.data for array in arrays), header.rows_padded, header.cols_padded, header.L)

    def to_bytes(self) -> bytes:
        """The blob, exactly `nbytes` long."""
        factors = [factor.to_bytes() for factor in self.lowrank or ()]
        return b"".join([header_to_bytes(self.header), *factors, self.codes.tobytes()])

    @classmethod
    def from_buffer(cls, buf: Buffer, *, where: str) -> PackedMatrix:
        """Reads a blob without copying its codes.

        Args:
            buf: exactly the blob; a uint8 tensor or anything with the buffer protocol. It must not change.
            where: name of the tensor, for messages.

        Raises:
            InputError: a field is impossible or the length is wrong.
        """
        data = as_bytes(buf, where)
        return cls.from_header(read_header(data, where=where), data)

    @classmethod
    def from_header(cls, header: MatrixHeader, blob: Bytes) -> PackedMatrix:
        """The matrix in the blob (uint8 [nbytes]) from which `header` was read; codes are not copied."""
        lowrank = None
        if header.lowrank is not None:
            (right, left), (right_blob, left_blob) = header.lowrank, header.lowrank_in(blob)
            lowrank = (cls.from_header(right, right_blob), cls.from_header(left, left_blob))
        return cls(header, header.codes_in(blob), lowrank)
