"""A compressed matrix on a device: its fields, and how to decode rows of it there.

`CpuMatrix` calls the native library, `TorchMatrix` decodes with torch operations and so runs on any device;
`runtime.gpu` has a third kind. `runtime.blobs` chooses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.packing import UNIT_BYTES, PackedMatrix, bits_of
from ciuic_cli.codecs.reference import CODE_SIGMA, LEVEL_CENTRE, MULTIPLIER
from ciuic_cli.codecs.transform import TILE


class Matrix(Protocol):
    """(T^-1(codes) + L R) S, the stored rows of W. Shapes as in `PackedMatrix`."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def cols_padded(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def is_zero(self) -> bool:
        """No codes and no low-rank part: a pruned expert."""
        ...

    @property
    def position(self) -> torch.Tensor | None:
        """int32 [rows] on the device: where each row of W is stored; None where they are in their own order."""
        ...

    @property
    def input_factors(self) -> torch.Tensor | None:
        """The diagonal S, float32 [cols] on the device; None for ones."""
        ...

    @property
    def lowrank(self) -> tuple[Matrix, Matrix] | None:
        """(R, L transposed), or None."""
        ...

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows in the transformed basis, [rows asked for, cols_padded] of `dtype`, without the low-rank part."""
        ...

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows named by `rows` (int64 [n], in any order), transformed basis, float32 [n, cols_padded]."""
        ...

    def small_product(self, x: torch.Tensor) -> torch.Tensor | None:
        """x W^T straight from the codes for x [..., cols], scaled already: [..., rows] without the low-rank part.

        W's rows are in their own order. float32, or x's dtype where no low-rank part is to be added. None where
        there is no kernel for it.
        """
        ...


class CpuMatrix:
    """On the CPU, by the native library; the codes are the blob's own memory."""

    def __init__(self, packed: PackedMatrix) -> None:
        # The offsets follow from the bits per weight. With bits of its own, a blob that is overwritten behind torch's
        # back decodes to nonsense, but leads no kernel outside its bytes.
        self.packed = replace(packed, row_bits=packed.row_bits.copy(), lowrank=None)
        self.rows, self.cols, self.cols_padded, self.seed = (
            packed.rows,
            packed.cols,
            packed.cols_padded,
            packed.seed,
        )
        self.is_zero = packed.is_zero
        self.position = packed.position_on(torch.device("cpu"))
        order = packed.order
        self.order = None if order is None else torch.from_numpy(order.astype(np.int32))
        self.input_factors = packed.input_factors_on(torch.device("cpu"))
        self.lowrank: tuple[CpuMatrix, CpuMatrix] | None = None
        if packed.lowrank is not None:
            right, left = packed.lowrank
            self.lowrank = (CpuMatrix(right), CpuMatrix(left))

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return trellis.decode(self.packed, row_begin, row_end, dtype)

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return trellis.decode_rows(self.packed, rows)

    def small_product(self, x: torch.Tensor) -> torch.Tensor | None:
        dtype = x.dtype if self.lowrank is None else torch.float32
        return trellis.matmul(self.packed, x, dtype, order=self.order)


class TorchMatrix:
    """On any device, by torch operations on int64: portable, many times slower than a kernel.

    Args:
        packed: the parsed blob; its arrays may lie elsewhere and are not kept.
        codes: the codes on the device, uint8.
    """

    def __init__(
        self,
        packed: PackedMatrix,
        codes: torch.Tensor,
        lowrank: tuple[TorchMatrix, TorchMatrix] | None = None,
    ) -> None:
        self.rows, self.cols, self.cols_padded, self.seed = (
            packed.rows,
            packed.cols,
            packed.cols_padded,
            packed.seed,
        )
        self.L = packed.L
        self.is_zero = packed.is_zero
        self.position = packed.position_on(codes.device)
        self.input_factors = packed.input_factors_on(codes.device)
        self.row_bits = packed.row_bits.copy()
        self.group_offset = packed.group_offset.copy()
        self.factors = torch.from_numpy(packed.scales / CODE_SIGMA).to(codes.device)
        self.codes = codes
        self.lowrank = lowrank

    @classmethod
    def on_device(cls, packed: PackedMatrix, blob: torch.Tensor) -> TorchMatrix:
        """The matrix whose blob (device tensor) has been parsed from a copy in host memory."""
        codes_begin = blob.numel() - packed.codes.size
        lowrank = None
        if packed.lowrank is not None:
            right, left = packed.lowrank
            left_begin = codes_begin - left.nbytes
            lowrank = (
                cls.on_device(right, blob[left_begin - right.nbytes : left_begin]),
                cls.on_device(left, blob[left_begin:codes_begin]),
            )
        return cls(packed, blob[codes_begin:], lowrank)

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        first, last = row_begin // TILE, -(-row_end // TILE)
        out = self._groups(np.arange(first, last)).reshape(-1, self.cols_padded)
        return out[row_begin - first * TILE : row_end - first * TILE].to(dtype)

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        wanted, inverse = torch.unique(rows // TILE, return_inverse=True)
        out = torch.empty((rows.numel(), self.cols_padded), dtype=torch.float32, device=self.codes.device)
        groups = wanted.cpu().numpy()
        step = max(1, (1 << 20) // (TILE * self.cols_padded))
        for begin in range(0, groups.size, step):
            mine = (inverse >= begin) & (inverse < begin + step)
            out[mine] = self._groups(groups[begin : begin + step])[inverse[mine] - begin, rows[mine] % TILE]
        return out

    def small_product(self, x: torch.Tensor) -> torch.Tensor | None:
        return None

    def _groups(self, groups: np.ndarray) -> torch.Tensor:
        """Row groups by number: float32 [len(groups), 16, cols_padded]."""
        device, blocks = self.codes.device, self.cols_padded // TILE
        out = torch.zeros((groups.size, TILE, self.cols_padded), dtype=torch.float32, device=device)
        widths = bits_of(self.row_bits[groups])
        for bits in sorted(set(widths.tolist()) - {0}):
            chosen = np.flatnonzero(widths == bits)
            nbytes = int(UNIT_BYTES * bits) * blocks
            begins = self.group_offset[groups[chosen]].tolist()
            stored = torch.stack([self.codes[begin : begin + nbytes] for begin in begins])
            levels = _levels(stored.reshape(-1, int(UNIT_BYTES * bits)), bits, self.L)
            rows = (
                levels.reshape(chosen.size, blocks, TILE, TILE).transpose(1, 2).reshape(chosen.size, TILE, -1)
            )
            where = torch.from_numpy(chosen).to(device)
            factors = self.factors.reshape(-1, TILE)[torch.from_numpy(groups[chosen]).to(device)]
            out[where] = rows.to(torch.float32) * factors[:, :, None]
        return out


def _levels(stored: torch.Tensor, bits: float, L: int) -> torch.Tensor:
    """Tiles as stored, uint8 [n, 32 bits], to the code's levels, int64 [n, 16 rows, 16 columns]."""
    whole = int(bits)
    bytes_of = stored[:, : UNIT_BYTES * whole].reshape(-1, whole, TILE, 2).to(torch.int64)
    units = bytes_of[..., 0] | (bytes_of[..., 1] << 8)
    last = units[:, -1:]
    if bits != whole:  # half a unit: the last byte of each row
        rest = stored[:, None, UNIT_BYTES * whole :].to(torch.int64)
        units, last = torch.cat((units, rest << 8), dim=1), ((last << 8) & 0xFFFF) | rest
    # Before a row's first unit is the end of the row above it; the tile is a circle.
    before = torch.cat((last.roll(1, dims=-1), units[:, :-1]), dim=1)
    words = (before << 16) | units
    ends = [int((column + 1) * bits) for column in range(TILE)]
    unit_of = [-(-end // TILE) - 1 for end in ends]
    shift = torch.tensor([TILE * (unit + 1) - end for unit, end in zip(unit_of, ends, strict=True)])
    windows = words[:, unit_of].transpose(1, 2) >> shift.to(stored.device)
    hashed = ((windows & ((1 << L) - 1)) * MULTIPLIER) & 0xFFFFFFFF
    total = sum((hashed >> (8 * byte)) & 0xFF for byte in range(4))
    return total - LEVEL_CENTRE  # type: ignore[return-value]
