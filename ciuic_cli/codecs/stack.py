"""The stored form of a stack of experts: bytes in, bytes out, every field checked.

"CIUX", u32 count, u32 rows, u32 cols, u64 offsets[count + 1] (from the start, multiples of 16), zero padding to a
multiple of 16, then one matrix blob (packing.py) per expert. All numbers are little endian.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

import numpy as np

from ciuic_cli.codecs.packing import ALIGN, Buffer, PackedMatrix, as_bytes, refusal
from ciuic_cli.errors import InputError

_HEADER = struct.Struct("<4sIII")


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """A compressed 3-D expert parameter: experts of one shape. A pruned one has only zero row groups."""

    experts: tuple[PackedMatrix, ...]

    def __post_init__(self) -> None:
        shapes = {(expert.rows, expert.cols) for expert in self.experts}
        if len(shapes) != 1:
            raise InputError(f"an expert stack needs experts of one shape, not {sorted(shapes)}")
        if any(expert.input_scale is not None for expert in self.experts):
            raise InputError("an expert of a stack has no input scales: all take the same transformed input")

    @property
    def rows(self) -> int:
        return self.experts[0].rows

    @property
    def cols(self) -> int:
        return self.experts[0].cols

    @property
    def nbytes(self) -> int:
        return stack_header_nbytes(len(self.experts)) + sum(expert.nbytes for expert in self.experts)

    def to_bytes(self) -> bytes:
        """The blob, exactly `nbytes` long."""
        count = len(self.experts)
        begin = stack_header_nbytes(count)
        offsets = begin + np.cumsum([0] + [expert.nbytes for expert in self.experts])
        head = _HEADER.pack(b"CIUX", count, self.rows, self.cols) + offsets.astype("<u8").tobytes()
        return b"".join([head, bytes(begin - len(head)), *(expert.to_bytes() for expert in self.experts)])

    @classmethod
    def from_buffer(cls, buf: Buffer, *, where: str) -> ExpertStack:
        """Reads a blob without copying the codes; see `PackedMatrix.from_buffer`.

        Raises:
            InputError: any field is impossible or the length is wrong.
        """
        data = as_bytes(buf, where)
        if data.size < _HEADER.size or bytes(data[:4]) != b"CIUX":
            raise refusal(where, "this is not a compressed expert stack")
        _, count, rows, cols = _HEADER.unpack(data[: _HEADER.size].tobytes())
        begin = stack_header_nbytes(count)
        if count == 0 or begin > data.size:
            raise refusal(where, f"a stack of {count} experts cannot be in {data.size} bytes")
        table = data[_HEADER.size : _HEADER.size + 8 * (count + 1)]
        offsets = [int(offset) for offset in np.frombuffer(table.tobytes(), dtype="<u8")]
        if data[_HEADER.size + table.size : begin].any():
            raise refusal(where, "the padding after the expert offsets is not zero")
        if (
            offsets[0] != begin
            or offsets[-1] != data.size
            or any(a >= b for a, b in itertools.pairwise(offsets))
        ):
            raise refusal(where, "the expert offsets do not cover the stack in order")
        experts = []
        for index, (first, last) in enumerate(itertools.pairwise(offsets)):
            expert = PackedMatrix.from_buffer(data[first:last], where=f"{where}[{index}]")
            if (expert.rows, expert.cols) != (rows, cols):
                raise refusal(
                    where, f"expert {index} is {expert.rows} x {expert.cols}, the stack {rows} x {cols}"
                )
            experts.append(expert)
        try:
            return cls(tuple(experts))
        except InputError as error:
            raise refusal(where, error.message) from error


def stack_header_nbytes(count: int) -> int:
    """Bytes of an expert stack before its first expert."""
    head = _HEADER.size + 8 * (count + 1)
    return head + -head % ALIGN
