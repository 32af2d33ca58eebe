"""A compressed stack of experts, and the byte layout of its blob.

All numbers are little endian: "CIUX", u32 count, u32 rows, u32 cols, u64 offsets[count + 1] (from the start,
multiples of 16), zero padding to a multiple of 16, then one matrix blob (layout.py) per expert.
"""

from __future__ import annotations

import functools
import itertools
import struct
from dataclasses import dataclass

import numpy as np

from ciuic_cli.codecs.header import Array, MatrixHeader
from ciuic_cli.codecs.layout import Buffer, as_bytes, read_header, refusal
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.sizes import aligned
from ciuic_cli.errors import InputError

_FIXED = struct.Struct("<4sIII")
_MAGIC = b"CIUX"


@dataclass(frozen=True, eq=False)
class StackHeader:
    """The headers of all experts of a stack. They have one shape and no input scales.

    Raises:
        InputError: the experts do not fit each other.
    """

    experts: tuple[MatrixHeader, ...]

    def __post_init__(self) -> None:
        shapes = {(expert.rows, expert.cols) for expert in self.experts}
        if len(shapes) != 1:
            raise InputError(f"an expert stack needs experts of one shape, not {sorted(shapes)}")
        if any(expert.input_scale is not None for expert in self.experts):
            raise InputError("an expert of a stack has no input scales: all share one transformed input")

    @property
    def rows(self) -> int:
        return self.experts[0].rows

    @property
    def cols(self) -> int:
        return self.experts[0].cols

    @functools.cached_property
    def offsets(self) -> list[int]:
        """The byte of the blob where each expert begins, then the blob's length."""
        begin = stack_header_nbytes(len(self.experts))
        return list(itertools.accumulate((expert.nbytes for expert in self.experts), initial=begin))

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return self.offsets[-1]

    def experts_in(self, blob: Array) -> list[Array]:
        """Each expert's blob in the stack's blob [nbytes], not copied."""
        return [blob[begin:end] for begin, end in itertools.pairwise(self.offsets)]


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """A compressed stack of experts of one shape, a 3-D parameter. A pruned expert has only groups of 0 bits."""

    experts: tuple[PackedMatrix, ...]

    def __post_init__(self) -> None:
        _ = self.header  # raises for experts that do not fit each other

    @functools.cached_property
    def header(self) -> StackHeader:
        return StackHeader(tuple(expert.header for expert in self.experts))

    @property
    def rows(self) -> int:
        return self.header.rows

    @property
    def cols(self) -> int:
        return self.header.cols

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return self.header.nbytes

    def to_bytes(self) -> bytes:
        """The blob, exactly `nbytes` long."""
        offsets = self.header.offsets
        head = _FIXED.pack(_MAGIC, len(self.experts), self.rows, self.cols)
        head += np.array(offsets, "<u8").tobytes()
        padding = bytes(offsets[0] - len(head))
        return b"".join([head, padding, *(expert.to_bytes() for expert in self.experts)])

    @classmethod
    def from_buffer(cls, buf: Buffer, *, where: str) -> ExpertStack:
        """Reads a blob without copying the codes; see `PackedMatrix.from_buffer`.

        Raises:
            InputError: a field is impossible or the length is wrong.
        """
        data = as_bytes(buf, where)
        header = read_stack_header(data, where=where)
        parts = zip(header.experts, header.experts_in(data), strict=True)
        return cls(tuple(PackedMatrix.from_header(expert, blob) for expert, blob in parts))


def stack_header_nbytes(count: int) -> int:
    """Bytes of a stack's blob before its first expert."""
    return aligned(_FIXED.size + 8 * (count + 1))


def read_stack_header(buf: Buffer, *, where: str) -> StackHeader:
    """Parses the headers of a stack's blob; see `read_header`.

    Raises:
        InputError: a field is impossible or the length is wrong.
    """
    data = as_bytes(buf, where)
    if data.size < _FIXED.size or bytes(data[:4]) != _MAGIC:
        raise refusal(where, "this is not a compressed expert stack")
    _, count, rows, cols = _FIXED.unpack(data[: _FIXED.size].tobytes())
    table_end = _FIXED.size + 8 * (count + 1)
    begin = stack_header_nbytes(count)
    if count == 0 or begin > data.size:
        raise refusal(where, f"a stack of {count} experts cannot be in {data.size} bytes")
    offsets = np.frombuffer(data[_FIXED.size : table_end].tobytes(), dtype="<u8").tolist()
    if data[table_end:begin].any():
        raise refusal(where, "the padding after the expert offsets is not zero")
    if offsets[0] != begin or offsets[-1] != data.size or any(a >= b for a, b in itertools.pairwise(offsets)):
        raise refusal(where, "the expert offsets do not cover the stack in order")
    experts = []
    for index, (first, last) in enumerate(itertools.pairwise(offsets)):
        expert = read_header(data[first:last], where=f"{where}[{index}]")
        if (expert.rows, expert.cols) != (rows, cols):
            raise refusal(
                where, f"expert {index} is {expert.rows} x {expert.cols}, the stack {rows} x {cols}"
            )
        experts.append(expert)
    try:
        return StackHeader(tuple(experts))
    except InputError as error:
        raise refusal(where, error.message) from error
