"""The byte layout of a matrix blob: headers to bytes and back, every field checked.

All numbers are little endian:

    0  4s magic "CIU1"   4 u8 L   5 u8 flags (bit 0: low-rank part, bit 1: rows are sorted, bit 2: input scales)
    6  u8 log2 of the Hadamard block   7 u8 scale_steps - 16
    8  u32 rows   12 u32 cols   16 u32 seed   20 f32 base   24 u32 rank   28 u32 lowrank_bytes
    32 u8 row_bits[ceil(rows / 16)], u8 row_scale[rows],
       if rows are sorted: u4 row_class[rows], the even row of a byte in its low half,
       if there are input scales: u8 input_scale[cols],
       zero padding to a multiple of 16
    then the low-rank part: blob of the right factor (rank x cols), blob of the left one transposed (rank x rows)
    then the codes: per group of 16 rows, per block of 16 columns, 32 bytes per bit per weight

`MatrixHeader` says what the fields mean, docs/FORMAT.md how to decode them without this package.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.codecs.header import BAD_BITS, MAX_DIMENSION, MatrixHeader
from ciuic_cli.codecs.row_order import class_nbytes, classes_from_bytes, classes_to_bytes
from ciuic_cli.codecs.scales import SCALE_STEPS, Bytes
from ciuic_cli.codecs.sizes import ALIGN, FIXED_NBYTES, header_nbytes
from ciuic_cli.codecs.transform import TILE, log2_block, padded
from ciuic_cli.errors import InputError

_FIXED = struct.Struct("<4sBBBBIIIfII")
assert _FIXED.size == FIXED_NBYTES
_MAGIC = b"CIU1"
_HAS_LOWRANK, _IS_SORTED, _HAS_INPUT_SCALE = 1, 2, 4

Buffer = bytes | bytearray | memoryview | np.ndarray | torch.Tensor


def header_to_bytes(header: MatrixHeader) -> bytes:
    """The blob's bytes before the low-rank part, padding included."""
    fixed = _FIXED.pack(
        _MAGIC,
        header.L,
        _HAS_LOWRANK * (header.lowrank is not None)
        + _IS_SORTED * (header.row_class is not None)
        + _HAS_INPUT_SCALE * (header.input_scale is not None),
        header.log2_block,
        header.scale_steps - SCALE_STEPS[0],
        header.rows,
        header.cols,
        header.seed,
        header.base,
        header.rank,
        header.lowrank_nbytes,
    )
    out = fixed + header.row_bits.tobytes() + header.row_scale.tobytes()
    if header.row_class is not None:
        out += classes_to_bytes(header.row_class)
    if header.input_scale is not None:
        out += header.input_scale.tobytes()
    return out + bytes(-len(out) % ALIGN)


def read_header(buf: Buffer, *, where: str) -> MatrixHeader:
    """Parses the header of a matrix blob, with those of the low-rank part.

    Args:
        buf: exactly the blob. The header copies its arrays, so it keeps `buf` neither alive nor from changing.
        where: name of the tensor, for messages.

    Raises:
        InputError: a field is impossible or the length is wrong.
    """
    data = as_bytes(buf, where)
    header = _read(data, where, is_factor=False)
    if header.nbytes != data.size:
        raise refusal(where, f"{data.size - header.nbytes} bytes follow the compressed matrix")
    return header


def refusal(where: str, message: str) -> InputError:
    return InputError(
        message, tensor=where, remedy="The file is damaged or was not written by ciuic: fetch it again."
    )


class _Memory:
    """The memory of a 1-D uint8 tensor, for numpy. `Tensor.numpy` would forbid that the memory is freed and allocated
    again, as FSDP2 does with shards that it has gathered."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # keeps the memory alive
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": tuple(tensor.shape),
            "data": (tensor.data_ptr(), False),
        }


def as_bytes(buf: Buffer, where: str) -> Bytes:
    """The buffer as uint8 [nbytes] in host memory; copied only from another device."""
    if isinstance(buf, torch.Tensor):
        if buf.dtype != torch.uint8 or buf.dim() != 1:
            raise refusal(where, f"a compressed tensor is 1-D uint8, not {buf.dim()}-D {buf.dtype}")
        return np.asarray(_Memory(buf.detach().cpu().contiguous())) if buf.numel() else np.empty(0, np.uint8)
    if isinstance(buf, np.ndarray):
        if buf.dtype != np.uint8 or buf.ndim != 1:
            raise refusal(where, f"a compressed tensor is 1-D uint8, not {buf.ndim}-D {buf.dtype}")
        return np.ascontiguousarray(buf)
    return np.frombuffer(buf, dtype=np.uint8)


def _read(data: Bytes, where: str, *, is_factor: bool) -> MatrixHeader:
    """The header of the blob at the start of `data`; more bytes may follow the blob."""
    if data.size < _FIXED.size or bytes(data[:4]) != _MAGIC:
        raise refusal(where, "this is not a compressed matrix")
    fields = _FIXED.unpack(data[: _FIXED.size].tobytes())
    _, L, flags, log2, extra_steps, rows, cols, seed, base, rank, lowrank_bytes = fields
    if flags & ~(_HAS_LOWRANK | _IS_SORTED | _HAS_INPUT_SCALE):
        raise refusal(where, "unknown flags; a newer version may have written it")
    if not (1 <= rows <= MAX_DIMENSION and 1 <= cols <= MAX_DIMENSION) or log2 != log2_block(padded(cols)):
        raise refusal(where, f"impossible shape {rows} x {cols} with blocks of 2^{log2}")
    has_lowrank, is_sorted, has_input_scale = (
        bool(flags & flag) for flag in (_HAS_LOWRANK, _IS_SORTED, _HAS_INPUT_SCALE)
    )
    if (
        has_lowrank != (rank > 0)
        or has_lowrank != (lowrank_bytes > 0)
        or lowrank_bytes % ALIGN
        or (is_factor and flags)
    ):
        raise refusal(where, f"impossible low-rank part: rank {rank}, {lowrank_bytes} bytes")
    lowrank_begin = header_nbytes(rows, cols, is_sorted=is_sorted, has_input_scale=has_input_scale)
    codes_begin = lowrank_begin + lowrank_bytes
    if codes_begin > data.size:
        raise refusal(where, f"a {rows} x {cols} matrix cannot be in {data.size} bytes")
    end = _FIXED.size + padded(rows) // TILE
    row_bits = data[_FIXED.size : end].copy()
    if np.isnan(bits_of(row_bits)).any():
        raise refusal(where, BAD_BITS)
    row_scale = data[end : end + rows].copy()
    end += rows
    row_class = None
    if is_sorted:
        stored = data[end : end + class_nbytes(rows)]
        row_class = classes_from_bytes(stored, rows)
        if rows % 2 and stored[-1] >> 4:
            raise refusal(where, "the padding after the classes is not zero")
        end += stored.size
    input_scale = None
    if has_input_scale:
        input_scale = data[end : end + cols].copy()
        end += cols
    if data[end:lowrank_begin].any():
        raise refusal(where, "the padding after the scales is not zero")
    lowrank = _read_lowrank(data[lowrank_begin:codes_begin], rank, where) if has_lowrank else None
    try:
        header = MatrixHeader(
            rows=rows,
            cols=cols,
            L=L,
            seed=seed,
            base=base,
            row_bits=row_bits,
            row_scale=row_scale,
            lowrank=lowrank,
            row_class=row_class,
            input_scale=input_scale,
            scale_steps=SCALE_STEPS[extra_steps],
        )
    except InputError as error:
        raise refusal(where, error.message) from error
    if header.nbytes > data.size:
        raise refusal(where, f"{header.nbytes} bytes expected, {data.size} found")
    return header


def _read_lowrank(data: Bytes, rank: int, where: str) -> tuple[MatrixHeader, MatrixHeader]:
    right = _read(data, f"{where} (right factor)", is_factor=True)
    left = _read(data[right.nbytes :], f"{where} (left factor)", is_factor=True)
    if right.nbytes + left.nbytes != data.size:
        raise refusal(where, "the low-rank part has another length than announced")
    if right.rows != rank:
        raise refusal(where, f"rank {rank} announced, {right.rows} found")
    return right, left
