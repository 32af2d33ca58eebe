"""The stored form of a compressed matrix: bytes in, bytes out, every field checked.

All numbers are little endian. A matrix blob:

    0  4s magic "CIU1"   4 u8 L   5 u8 flags (bit 0: low-rank part, bit 1: rows are sorted, bit 2: input scales)
    6  u8 log2(B)   7 u8 scale_steps - 16
    8  u32 rows   12 u32 cols   16 u32 seed   20 f32 base   24 u32 rank   28 u32 lowrank_bytes
    32 u8 row_bits[ceil(rows / 16)], u8 row_scale[rows],
       where rows are sorted: u4 row_class[rows], the even row of a byte in its low half,
       where there are input scales: u8 input_scale[cols],
       zero padding to a multiple of 16
    then the low-rank part: blob of R (rank x cols), blob of L transposed (rank x rows)
    then the codes: per group of 16 rows, per block of 16 columns, 32 bytes per bit per weight

A byte of row_bits has the whole bits per weight of its group in bits 0 to 3, and half a bit more if bit 7 is set.

A row's scale is base * 2^(row_scale / scale_steps). Each input is multiplied by its scale,
2^((input_scale - 128) / 16), before anything else: all other fields are about the matrix whose columns have been
divided by that, the low-rank part too. Where rows are sorted, all of this but row_class is about the stored rows, the
low-rank part too: the matrix's rows of class 0 in their order, then those of class 1, and so on to 15.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.codecs.scales import MAX_BASE, SCALE_STEPS, Bytes, decode_scales, input_factors
from ciuic_cli.codecs.transform import TILE, log2_block, padded
from ciuic_cli.codecs.widths import BITS
from ciuic_cli.errors import InputError

L_VALUES = range(12, 17)
UNIT_BYTES = 32

_HEADER = struct.Struct("<4sBBBBIIIfII")
ALIGN = 16
_HAS_LOWRANK, _IS_SORTED, _HAS_INPUT_SCALE = 1, 2, 4
_HALF = 0x80
_BAD_BITS = "bits per weight must be one of " + ", ".join(f"{bits:g}" for bits in BITS)
CLASSES = 16
_MAX_DIMENSION = 2**31 - TILE
Buffer = bytes | bytearray | memoryview | np.ndarray | torch.Tensor


def stored_bits(bits: npt.ArrayLike) -> Bytes:
    """How `row_bits` says so many bits per weight: uint8 of the same shape, for numbers in BITS."""
    widths = np.asarray(bits, dtype=np.float64)
    return widths.astype(np.uint8) | np.where(widths % 1 != 0, np.uint8(_HALF), np.uint8(0))


_BITS_OF = np.full(256, np.nan)
_BITS_OF[stored_bits(BITS)] = BITS
_TILE_NBYTES = np.nan_to_num(UNIT_BYTES * _BITS_OF).astype(np.int64)


def bits_of(row_bits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Bits per weight that bytes of `row_bits` stand for; NaN for what stands for none."""
    return np.asarray(_BITS_OF[np.asarray(row_bits, dtype=np.uint8)])


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A compressed matrix of `rows` outputs and `cols` inputs.

    Attributes:
        L: length of the decoder's window in bits, 12 to 16.
        seed: of the input transform's signs.
        base: row scale for code 0; positive, finite, rounded to float32.
        row_bits: uint8 [ceil(rows / 16)], bits per weight of each group of 16 rows as `stored_bits` says them; 0: the
            rows are zero.
        row_scale: uint8 [rows], scale codes.
        codes: uint8, the tiles.
        lowrank: None, or (R [rank, cols], L transposed [rank, rows]); the product L R is added to the matrix.
        row_class: None, or uint8 [rows], 0 to 15: the matrix's rows are stored sorted by it. All else here (and what
            `codecs.trellis` and the kernels do) is about stored rows; `order` and `position` lead to the matrix's own.
        input_scale: None, or uint8 [cols], codes of what each input is multiplied by first: all else here (and what
            `codecs.trellis` and the kernels decode) is about W with its columns divided by that.
        scale_steps: of the scale codes, per octave; 16 to 271.
    """

    rows: int
    cols: int
    L: int
    seed: int
    base: float
    row_bits: Bytes
    row_scale: Bytes
    codes: Bytes
    lowrank: tuple[PackedMatrix, PackedMatrix] | None = None
    row_class: Bytes | None = None
    input_scale: Bytes | None = None
    scale_steps: int = SCALE_STEPS[0]

    def __post_init__(self) -> None:
        _check_fields(self)
        object.__setattr__(self, "base", float(np.float32(self.base)))  # as it is stored

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cached: a copy in other memory has other addresses."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_zero(self) -> bool:
        """Neither codes nor a low-rank part: nothing but zeros, as a pruned expert is."""
        return self.codes.size == 0 and self.lowrank is None

    @property
    def order(self) -> npt.NDArray[np.int64] | None:
        """int64 [rows], which row of the matrix each stored one is; None where they are the same."""
        return None if self.row_class is None else stored_order(self.row_class)

    @property
    def position(self) -> npt.NDArray[np.int64] | None:
        """int64 [rows], where each row of the matrix is stored; None where they are the same."""
        return None if self.row_class is None else stored_position(self.row_class)

    def position_on(self, device: torch.device) -> torch.Tensor | None:
        """`position` as int32 on a device."""
        position = self.position
        return None if position is None else torch.from_numpy(position.astype(np.int32)).to(device)

    def input_factors_on(self, device: torch.device) -> torch.Tensor | None:
        """What each input is multiplied by first, float32 [cols] on a device; None for nothing."""
        return None if self.input_scale is None else input_factors(self.input_scale).to(device)

    @property
    def rows_padded(self) -> int:
        return padded(self.rows)

    @property
    def cols_padded(self) -> int:
        return padded(self.cols)

    @functools.cached_property
    def log2_block(self) -> int:
        """log2 of the Hadamard block size."""
        return log2_block(self.cols_padded)

    @functools.cached_property
    def group_offset(self) -> npt.NDArray[np.int64]:
        """int64 [ceil(rows / 16)], where the codes of each row group begin within `codes`."""
        return group_offsets(self.row_bits, self.cols)

    @functools.cached_property
    def is_coded(self) -> npt.NDArray[np.bool_]:
        """(rows,) which of the stored rows have codes; the scales of others mean nothing."""
        return np.repeat(bits_of(self.row_bits) > 0, TILE)[: self.rows]

    @functools.cached_property
    def scales(self) -> npt.NDArray[np.float32]:
        """float32 [rows_padded], the row scales; 0 in the padding."""
        out = np.zeros(self.rows_padded, dtype=np.float32)
        out[: self.rows] = decode_scales(self.base, self.row_scale, self.scale_steps)
        return out

    @functools.cached_property
    def native_arguments(self) -> tuple[int, ...]:
        """Addresses of codes, group offsets, bits and scales, then padded rows and columns and L: how every
        native function takes a matrix. Valid as long as this object lives."""
        arrays = (self.codes, self.group_offset, self.row_bits, self.scales)
        return (*(array.ctypes.data for array in arrays), self.rows_padded, self.cols_padded, self.L)

    @property
    def rank(self) -> int:
        return 0 if self.lowrank is None else self.lowrank[0].rows

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return packed_nbytes(
            self.rows,
            self.cols,
            self.row_bits,
            self._lowrank_bytes,
            is_sorted=self.row_class is not None,
            has_input_scale=self.input_scale is not None,
        )

    @property
    def _lowrank_bytes(self) -> int:
        return 0 if self.lowrank is None else sum(part.nbytes for part in self.lowrank)

    def to_bytes(self) -> bytes:
        """The blob, exactly `nbytes` long."""
        header = _HEADER.pack(
            b"CIU1",
            self.L,
            _HAS_LOWRANK * (self.lowrank is not None)
            + _IS_SORTED * (self.row_class is not None)
            + _HAS_INPUT_SCALE * (self.input_scale is not None),
            self.log2_block,
            self.scale_steps - SCALE_STEPS[0],
            self.rows,
            self.cols,
            self.seed,
            self.base,
            self.rank,
            self._lowrank_bytes,
        )
        head = header + self.row_bits.tobytes() + self.row_scale.tobytes() + _nibbles(self.row_class)
        if self.input_scale is not None:
            head += self.input_scale.tobytes()
        parts = [head, bytes(-len(head) % ALIGN)]
        if self.lowrank is not None:
            parts += [part.to_bytes() for part in self.lowrank]
        return b"".join([*parts, self.codes.tobytes()])

    @classmethod
    def from_buffer(cls, buf: Buffer, *, where: str) -> PackedMatrix:
        """Reads a blob without copying its codes.

        Args:
            buf: the blob, exactly; a uint8 tensor or anything with the buffer protocol. It must stay
                unchanged.
            where: name of the tensor, for messages.

        Raises:
            InputError: any field is impossible or the length is wrong.
        """
        data = as_bytes(buf, where)
        matrix, end = _read_matrix(data, where, nested=False)
        if end != data.size:
            raise refusal(where, f"{data.size - end} bytes follow the compressed matrix")
        return matrix


def packed_nbytes(
    rows: int,
    cols: int,
    row_bits: npt.ArrayLike,
    lowrank_bytes: int = 0,
    *,
    is_sorted: bool = False,
    has_input_scale: bool = False,
) -> int:
    """Bytes of a matrix blob, header, scales and padding included."""
    head = _HEADER.size + padded(rows) // TILE + rows
    head += (class_nbytes(rows) if is_sorted else 0) + (cols if has_input_scale else 0)
    codes = int(tile_nbytes(row_bits).sum()) * (padded(cols) // TILE)
    return head + -head % ALIGN + lowrank_bytes + codes


def tile_nbytes(row_bits: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """int64: the bytes of a tile of each width; 0 where `bits_of` has none."""
    return np.asarray(_TILE_NBYTES[np.asarray(row_bits, dtype=np.uint8)])


def class_nbytes(rows: int) -> int:
    """Bytes of the classes of so many rows."""
    return -(-rows // 2)


def stored_order(row_class: Bytes) -> npt.NDArray[np.int64]:
    """int64 [rows]: the rows sorted by class, those of one class in their own order."""
    return np.argsort(row_class, kind="stable")


def stored_position(row_class: Bytes) -> npt.NDArray[np.int64]:
    """int64 [rows]: where each row is in `stored_order`."""
    return np.argsort(stored_order(row_class))


def _nibbles(row_class: Bytes | None) -> bytes:
    if row_class is None:
        return b""
    even = np.concatenate([row_class, np.zeros(len(row_class) % 2, np.uint8)]).reshape(-1, 2)
    return (even[:, 0] | even[:, 1] << 4).tobytes()


def _from_nibbles(stored: Bytes, rows: int) -> Bytes:
    return np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)[:rows]


def group_offsets(row_bits: npt.ArrayLike, cols: int) -> npt.NDArray[np.int64]:
    """int64 [groups]: where the codes of each group of 16 rows begin."""
    sizes = tile_nbytes(row_bits) * (padded(cols) // TILE)
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


def refusal(where: str, message: str) -> InputError:
    return InputError(
        message, tensor=where, remedy="The file is damaged or was not written by ciuic: fetch it again."
    )


def as_bytes(buf: Buffer, where: str) -> Bytes:
    if isinstance(buf, torch.Tensor):
        if buf.dtype != torch.uint8 or buf.dim() != 1:
            raise refusal(where, f"a compressed tensor is 1-D uint8, not {buf.dim()}-D {buf.dtype}")
        return buf.detach().cpu().contiguous().numpy()
    if isinstance(buf, np.ndarray):
        if buf.dtype != np.uint8 or buf.ndim != 1:
            raise refusal(where, f"a compressed tensor is 1-D uint8, not {buf.ndim}-D {buf.dtype}")
        return np.ascontiguousarray(buf)
    return np.frombuffer(buf, dtype=np.uint8)


def _check_fields(m: PackedMatrix, where: str = "") -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise InputError(message, tensor=where or None)

    need(
        1 <= m.rows <= _MAX_DIMENSION and 1 <= m.cols <= _MAX_DIMENSION,
        f"impossible shape {m.rows} x {m.cols}",
    )
    need(m.L in L_VALUES, f"impossible window length {m.L}")
    need(0 <= m.seed < 2**32, f"impossible seed {m.seed}")
    need(0.0 < m.base <= MAX_BASE, f"impossible scale base {m.base}")
    need(m.scale_steps in SCALE_STEPS, f"impossible scale steps {m.scale_steps}")
    groups = padded(m.rows) // TILE
    need(m.row_bits.dtype == np.uint8 and m.row_bits.shape == (groups,), f"row_bits must be uint8 [{groups}]")
    need(
        m.row_scale.dtype == np.uint8 and m.row_scale.shape == (m.rows,),
        f"row_scale must be uint8 [{m.rows}]",
    )
    need(not np.isnan(bits_of(m.row_bits)).any(), _BAD_BITS)
    size = packed_nbytes(m.rows, m.cols, m.row_bits) - packed_nbytes(m.rows, m.cols, 0)
    need(m.codes.dtype == np.uint8 and m.codes.shape == (size,), f"codes must be uint8 [{size}]")
    need(m.codes.flags.c_contiguous, "codes must be contiguous")
    if m.row_class is not None:
        need(
            m.row_class.dtype == np.uint8 and m.row_class.shape == (m.rows,),
            f"row_class must be uint8 [{m.rows}]",
        )
        need(int(m.row_class.max()) < CLASSES, f"row classes are below {CLASSES}")
    if m.input_scale is not None:
        need(
            m.input_scale.dtype == np.uint8 and m.input_scale.shape == (m.cols,),
            f"input_scale must be uint8 [{m.cols}]",
        )
    if m.lowrank is not None:
        right, left = m.lowrank
        need(
            right.lowrank is None and left.lowrank is None,
            "a low-rank factor cannot have a low-rank part itself",
        )
        need(right.row_class is None and left.row_class is None, "a low-rank factor's rows cannot be sorted")
        need(right.input_scale is None and left.input_scale is None, "a low-rank factor has no input scales")
        need(right.rows == left.rows, f"ranks {right.rows} and {left.rows} of the low-rank factors differ")
        need(right.rows <= min(m.rows, m.cols), f"rank {right.rows} exceeds the shape {m.rows} x {m.cols}")
        need((right.cols, left.cols) == (m.cols, m.rows), "the low-rank factors do not fit the matrix")


def _read_matrix(data: Bytes, where: str, *, nested: bool) -> tuple[PackedMatrix, int]:
    """The matrix at the start of `data` and the number of bytes it takes."""
    if data.size < _HEADER.size or bytes(data[:4]) != b"CIU1":
        raise refusal(where, "this is not a compressed matrix")
    fields = _HEADER.unpack(data[: _HEADER.size].tobytes())
    _, L, flags, log2, finer, rows, cols, seed, base, rank, lowrank_bytes = fields
    if flags & ~(_HAS_LOWRANK | _IS_SORTED | _HAS_INPUT_SCALE):
        raise refusal(where, "unknown flags; a newer version may have written it")
    if not (1 <= rows <= _MAX_DIMENSION and 1 <= cols <= _MAX_DIMENSION) or log2 != log2_block(padded(cols)):
        raise refusal(where, f"impossible shape {rows} x {cols} with blocks of 2^{log2}")
    has_lowrank, is_sorted, has_input_scale = (
        bool(flags & flag) for flag in (_HAS_LOWRANK, _IS_SORTED, _HAS_INPUT_SCALE)
    )
    if (
        has_lowrank != (rank > 0)
        or has_lowrank != (lowrank_bytes > 0)
        or lowrank_bytes % ALIGN
        or (nested and flags)
    ):
        raise refusal(where, f"impossible low-rank part: rank {rank}, {lowrank_bytes} bytes")
    groups = padded(rows) // TILE
    scales_at = _HEADER.size + groups
    classes_at = scales_at + rows
    optional = {"is_sorted": is_sorted, "has_input_scale": has_input_scale}
    begin = packed_nbytes(rows, cols, 0, **optional)
    if begin + lowrank_bytes > data.size:
        raise refusal(where, f"a {rows} x {cols} matrix cannot be in {data.size} bytes")
    row_bits = data[_HEADER.size : scales_at]
    if np.isnan(bits_of(row_bits)).any():
        raise refusal(where, _BAD_BITS)
    row_class, head_end = None, classes_at
    if is_sorted:
        head_end += class_nbytes(rows)
        row_class = _from_nibbles(data[classes_at:head_end], rows)
        if rows % 2 and data[head_end - 1] >> 4:
            raise refusal(where, "the padding after the classes is not zero")
    input_scale = None
    if has_input_scale:
        input_scale = data[head_end : head_end + cols]
        head_end += cols
    if data[head_end:begin].any():
        raise refusal(where, "the padding after the scales is not zero")
    end = packed_nbytes(rows, cols, row_bits, lowrank_bytes, **optional)
    if end > data.size:
        raise refusal(where, f"{end} bytes expected, {data.size} found")
    lowrank = None
    if has_lowrank:
        lowrank = _read_lowrank(data[begin : begin + lowrank_bytes], where)
        if lowrank[0].rows != rank:
            raise refusal(where, f"rank {rank} announced, {lowrank[0].rows} found")
    try:
        matrix = PackedMatrix(
            rows=rows,
            cols=cols,
            L=L,
            seed=seed,
            base=base,
            row_bits=row_bits,
            row_scale=data[scales_at:classes_at],
            codes=data[begin + lowrank_bytes : end],
            lowrank=lowrank,
            row_class=row_class,
            input_scale=input_scale,
            scale_steps=SCALE_STEPS[finer],
        )
    except InputError as error:
        raise refusal(where, error.message) from error
    return matrix, end


def _read_lowrank(data: Bytes, where: str) -> tuple[PackedMatrix, PackedMatrix]:
    right, middle = _read_matrix(data, f"{where} (right factor)", nested=True)
    left, end = _read_matrix(data[middle:], f"{where} (left factor)", nested=True)
    if middle + end != data.size:
        raise refusal(where, "the low-rank part has another length than announced")
    return right, left
