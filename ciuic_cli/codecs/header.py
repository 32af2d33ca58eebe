"""The header of a compressed matrix: all fields of its blob except the codes.

Planning, loading and the GPU kernels read only headers and leave the codes where they are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.codecs.bits import BITS, bits_of
from ciuic_cli.codecs.row_order import CLASSES, stored_order, stored_position
from ciuic_cli.codecs.scales import MAX_BASE, SCALE_STEPS, Bytes, decode_scales, input_factors
from ciuic_cli.codecs.sizes import codes_nbytes, group_offsets, packed_nbytes
from ciuic_cli.codecs.transform import TILE, log2_block, padded
from ciuic_cli.errors import InputError

L_VALUES = range(12, 17)
"""Trellis state bits L that the format has."""

MAX_DIMENSION = 2**31 - TILE
"""Largest number of rows or columns: rounded up to a multiple of 16 it still fits 31 bits."""

BAD_BITS = "bits per weight must be one of " + ", ".join(f"{bits:g}" for bits in BITS)

Array = TypeVar("Array", npt.NDArray[np.uint8], torch.Tensor)


@dataclass(frozen=True, eq=False)
class MatrixHeader:
    """Header of a compressed matrix W of `rows` outputs and `cols` inputs; it owns its arrays.

    "Stored rows" are the rows in the order of the codes: W's own order unless `row_class` sorts them. Everything is in
    stored order: `row_bits`, `row_scale`, the low-rank part, and the results of `codecs.trellis` and of the kernels
    unless they say otherwise. Only `row_class` is in W's order.

    Attributes:
        L: trellis state bits, 12 to 16.
        seed: of the input transform's signs.
        base: row scale for code 0; positive, finite, rounded to float32.
        row_bits: uint8 [ceil(rows / 16)], bits per weight of each group of 16 stored rows, encoded by `stored_bits`.
        row_scale: uint8 [rows], codes of the row scales.
        lowrank: None, or the headers of the factors (right [rank, cols], left transposed [rank, rows]); left · right is
            added to the decoded codes.
        row_class: None, or uint8 [rows], 0 to 15: W's rows are stored sorted by class.
        input_scale: None, or uint8 [cols], codes of input scales. Inputs are multiplied by the scales first; codes and
            low-rank part are those of W with its columns divided by the scales.
        scale_steps: steps per octave of the row scales, 16 to 271.

    Raises:
        InputError: a field is impossible.
    """

    rows: int
    cols: int
    L: int
    seed: int
    base: float
    row_bits: Bytes
    row_scale: Bytes
    lowrank: tuple[MatrixHeader, MatrixHeader] | None = None
    row_class: Bytes | None = None
    input_scale: Bytes | None = None
    scale_steps: int = SCALE_STEPS[0]

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "base", float(np.float32(self.base)))  # as it is stored

    @property
    def rows_padded(self) -> int:
        return padded(self.rows)

    @functools.cached_property
    def cols_padded(self) -> int:
        return padded(self.cols)

    @functools.cached_property
    def log2_block(self) -> int:
        """log2 of the Hadamard block size."""
        return log2_block(self.cols_padded)

    @property
    def groups(self) -> int:
        """Number of groups of 16 stored rows."""
        return len(self.row_bits)

    @property
    def rank(self) -> int:
        return 0 if self.lowrank is None else self.lowrank[0].rows

    @property
    def is_zero(self) -> bool:
        """Whether W is zero, as a pruned expert is: it has no codes and no low-rank part."""
        return self.codes_nbytes == 0 and self.lowrank is None

    @functools.cached_property
    def codes_nbytes(self) -> int:
        return codes_nbytes(self.row_bits, self.cols)

    @property
    def lowrank_nbytes(self) -> int:
        return 0 if self.lowrank is None else sum(factor.nbytes for factor in self.lowrank)

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return packed_nbytes(
            self.rows,
            self.cols,
            self.row_bits,
            self.lowrank_nbytes,
            is_sorted=self.row_class is not None,
            has_input_scale=self.input_scale is not None,
        )

    @property
    def codes_begin(self) -> int:
        """The byte of the blob where the codes begin."""
        return self.nbytes - self.codes_nbytes

    def codes_in(self, blob: Array) -> Array:
        """The codes' part of the blob [nbytes], not copied."""
        return blob[self.codes_begin :]

    def lowrank_in(self, blob: Array) -> tuple[Array, Array]:
        """The blobs of the right and of the transposed left factor in the blob [nbytes], not copied; they must
        exist."""
        assert self.lowrank is not None
        right, left = self.lowrank
        end = self.codes_begin
        middle = end - left.nbytes
        return blob[middle - right.nbytes : middle], blob[middle:end]

    @functools.cached_property
    def group_offset(self) -> npt.NDArray[np.int64]:
        """int64 [groups]: the byte of the codes where each group begins."""
        return group_offsets(self.row_bits, self.cols)

    @functools.cached_property
    def scales(self) -> npt.NDArray[np.float32]:
        """float32 [rows_padded], the scales of the stored rows; 0 in the padding."""
        out = np.zeros(self.rows_padded, dtype=np.float32)
        out[: self.rows] = decode_scales(self.base, self.row_scale, self.scale_steps)
        return out

    @functools.cached_property
    def is_coded(self) -> npt.NDArray[np.bool_]:
        """bool [rows]: which stored rows have codes; other rows are zero, and their scales mean nothing."""
        return np.repeat(bits_of(self.row_bits) > 0, TILE)[: self.rows]

    @property
    def order(self) -> npt.NDArray[np.int64] | None:
        """int64 [rows]: for each stored row, its number in W; None if rows are not sorted."""
        return None if self.row_class is None else stored_order(self.row_class)

    @property
    def position(self) -> npt.NDArray[np.int64] | None:
        """int64 [rows]: where each row of W is stored; None if rows are not sorted."""
        return None if self.row_class is None else stored_position(self.row_class)

    def position_on(self, device: torch.device) -> torch.Tensor | None:
        """`position` as int32 on a device."""
        position = self.position
        return None if position is None else torch.from_numpy(position.astype(np.int32)).to(device)

    def input_factors_on(self, device: torch.device) -> torch.Tensor | None:
        """The input scales, float32 [cols] on a device; None if the matrix has none."""
        return None if self.input_scale is None else input_factors(self.input_scale).to(device)


def _check(header: MatrixHeader) -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise InputError(message)

    def need_bytes(array: Bytes, length: int, name: str) -> None:
        need(array.dtype == np.uint8 and array.shape == (length,), f"{name} must be uint8 [{length}]")

    rows, cols = header.rows, header.cols
    need(1 <= rows <= MAX_DIMENSION and 1 <= cols <= MAX_DIMENSION, f"impossible shape {rows} x {cols}")
    need(header.L in L_VALUES, f"impossible number of trellis state bits L = {header.L}")
    need(0 <= header.seed < 2**32, f"impossible seed {header.seed}")
    need(0.0 < header.base <= MAX_BASE, f"impossible scale base {header.base}")
    need(header.scale_steps in SCALE_STEPS, f"impossible scale steps {header.scale_steps}")
    need_bytes(header.row_bits, padded(rows) // TILE, "row_bits")
    need_bytes(header.row_scale, rows, "row_scale")
    need(not np.isnan(bits_of(header.row_bits)).any(), BAD_BITS)
    if header.row_class is not None:
        need_bytes(header.row_class, rows, "row_class")
        need(int(header.row_class.max()) < CLASSES, f"row classes must be below {CLASSES}")
    if header.input_scale is not None:
        need_bytes(header.input_scale, cols, "input_scale")
    if header.lowrank is not None:
        right, left = header.lowrank
        need(
            right.lowrank is None and left.lowrank is None,
            "a low-rank factor cannot have a low-rank part itself",
        )
        need(right.row_class is None and left.row_class is None, "a low-rank factor's rows cannot be sorted")
        need(right.input_scale is None and left.input_scale is None, "a low-rank factor has no input scales")
        need(right.rows == left.rows, f"ranks {right.rows} and {left.rows} of the low-rank factors differ")
        need(right.rows <= min(rows, cols), f"rank {right.rows} exceeds the shape {rows} x {cols}")
        need((right.cols, left.cols) == (cols, rows), "the low-rank factors do not fit the matrix")
