"""A compressed matrix on a device, and how its rows are decoded there.

`CpuMatrix` calls the native library; `TorchMatrix` uses torch operations and runs on any device; `runtime.gpu` calls
CUDA kernels. `runtime.blobs` chooses.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.bits import TILE_BYTES_PER_BIT, bits_of
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.reference import CODE_SIGMA, LEVEL_CENTRE, MULTIPLIER
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.integers import ceil_div

_DECODED_WEIGHTS = 1 << 20
"""Weights that `TorchMatrix.decode_rows` decodes at once; bounds scratch memory. Chosen, not tuned."""


class Matrix(Protocol):
    """The stored rows of W, (T^-1(C) + left right) S: decoded codes C, input transform T, low-rank factors, input
    scales S.

    `position` leads from W's rows to the stored ones. See `MatrixHeader`.
    """

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
        """Whether W is zero, as a pruned expert is."""
        ...

    @property
    def position(self) -> torch.Tensor | None:
        """int32 [rows] on the device: where each row of W is stored; None if rows are not sorted."""
        ...

    @property
    def input_factors(self) -> torch.Tensor | None:
        """The diagonal of S, float32 [cols] on the device; None if there are no input scales."""
        ...

    @property
    def lowrank(self) -> tuple[Matrix, Matrix] | None:
        """(right, left transposed), or None."""
        ...

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Stored rows of C, `dtype` [row_end - row_begin, cols_padded]."""
        ...

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The stored rows `rows` (int64 [n], in any order) of C, float32 [n, cols_padded]."""
        ...

    def small_product(self, x: torch.Tensor) -> torch.Tensor | None:
        """x S T^-1(C)^T straight from the codes, for x [..., cols]: [..., rows] in W's order.

        The dtype is float32, or x's if there is no low-rank part to add. None if the device has no kernel for it.
        """
        ...


class CpuMatrix:
    """A matrix on the CPU, decoded by the native library straight from the blob's memory.

    The header is a copy. So a blob that is overwritten behind torch's back decodes to nonsense, but no kernel reads
    outside of it.
    """

    def __init__(self, packed: PackedMatrix) -> None:
        header, cpu = packed.header, torch.device("cpu")
        self.packed = packed
        self.rows, self.cols, self.cols_padded = header.rows, header.cols, header.cols_padded
        self.seed = header.seed
        self.is_zero = header.is_zero
        self.position = header.position_on(cpu)
        order = header.order
        self.input_factors = header.input_factors_on(cpu)
        self.factor = trellis.Factor(
            packed,
            order=None if order is None else torch.from_numpy(order.astype(np.int32)),
            input_factors=self.input_factors,
        )
        self.lowrank: tuple[CpuMatrix, CpuMatrix] | None = None
        if packed.lowrank is not None:
            right, left = packed.lowrank
            self.lowrank = (CpuMatrix(right), CpuMatrix(left))

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return trellis.decode(self.packed, row_begin, row_end, dtype)

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return trellis.decode_rows(self.packed, rows)

    def factor_with(self, bias: torch.Tensor | None) -> trellis.Factor:
        """The factor of products without the low-rank part, with a bias [rows]."""
        return self.factor if bias is None else self.factor.with_bias(bias.detach().to(torch.float32))

    def small_product(self, x: torch.Tensor) -> torch.Tensor | None:
        dtype = x.dtype if self.lowrank is None else torch.float32
        return self.factor.multiply(x, dtype)


class TorchMatrix:
    """A matrix on any device, decoded by torch operations on int64: portable, many times slower than a kernel.

    Args:
        codes: the codes on the device, uint8 [header.codes_nbytes].
        lowrank: the factors, if the header has any.
    """

    def __init__(
        self,
        header: MatrixHeader,
        codes: torch.Tensor,
        lowrank: tuple[TorchMatrix, TorchMatrix] | None = None,
    ) -> None:
        self.header = header
        self.rows, self.cols, self.cols_padded = header.rows, header.cols, header.cols_padded
        self.seed = header.seed
        self.is_zero = header.is_zero
        self.position = header.position_on(codes.device)
        self.input_factors = header.input_factors_on(codes.device)
        self.row_factors = torch.from_numpy(header.scales / CODE_SIGMA).to(codes.device)
        self.codes = codes
        self.lowrank = lowrank

    @classmethod
    def on_device(cls, header: MatrixHeader, blob: torch.Tensor) -> TorchMatrix:
        """The matrix of `header` in a blob, uint8 [nbytes] on the device."""
        lowrank = None
        if header.lowrank is not None:
            (right, left), (right_blob, left_blob) = header.lowrank, header.lowrank_in(blob)
            lowrank = (cls.on_device(right, right_blob), cls.on_device(left, left_blob))
        return cls(header, header.codes_in(blob), lowrank)

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        first, last = row_begin // TILE, ceil_div(row_end, TILE)
        out = self._groups(np.arange(first, last)).reshape(-1, self.cols_padded)
        return out[row_begin - first * TILE : row_end - first * TILE].to(dtype)

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        unique, inverse = torch.unique(rows // TILE, return_inverse=True)
        out = torch.empty((rows.numel(), self.cols_padded), dtype=torch.float32, device=self.codes.device)
        groups = unique.cpu().numpy()
        step = max(1, _DECODED_WEIGHTS // (TILE * self.cols_padded))
        for begin in range(0, groups.size, step):
            decoded = self._groups(groups[begin : begin + step])
            chosen = (inverse >= begin) & (inverse < begin + step)
            out[chosen] = decoded[inverse[chosen] - begin, rows[chosen] % TILE]
        return out

    def small_product(self, x: torch.Tensor) -> torch.Tensor | None:
        return None

    def _groups(self, groups: np.ndarray) -> torch.Tensor:
        """Row groups by number: float32 [len(groups), 16, cols_padded]."""
        device, blocks = self.codes.device, self.cols_padded // TILE
        out = torch.zeros((groups.size, TILE, self.cols_padded), dtype=torch.float32, device=device)
        bits_of_group = bits_of(self.header.row_bits[groups])
        for bits in sorted(set(bits_of_group.tolist()) - {0}):
            chosen = np.flatnonzero(bits_of_group == bits)
            nbytes = int(TILE_BYTES_PER_BIT * bits) * blocks
            begins = self.header.group_offset[groups[chosen]].tolist()
            stored = torch.stack([self.codes[begin : begin + nbytes] for begin in begins])
            levels = _levels(stored.reshape(-1, int(TILE_BYTES_PER_BIT * bits)), bits, self.header.L)
            rows = (
                levels.reshape(chosen.size, blocks, TILE, TILE).transpose(1, 2).reshape(chosen.size, TILE, -1)
            )
            index = torch.from_numpy(chosen).to(device)
            factors = self.row_factors.reshape(-1, TILE)[torch.from_numpy(groups[chosen]).to(device)]
            out[index] = rows.to(torch.float32) * factors[:, :, None]
        return out


def _levels(stored: torch.Tensor, bits: float, L: int) -> torch.Tensor:
    """Levels of stored tiles (uint8 [n, 32 * bits]): int64 [n, 16 rows, 16 columns]; see `codecs.reference`."""
    whole = int(bits)
    as_bytes = stored[:, : TILE_BYTES_PER_BIT * whole].reshape(-1, whole, TILE, 2).to(torch.int64)
    words = as_bytes[..., 0] | (as_bytes[..., 1] << 8)
    last = words[:, -1:]  # the last 16 bits of each row
    if bits != whole:  # half a word per row: a byte
        last_byte = stored[:, None, TILE_BYTES_PER_BIT * whole :].to(torch.int64)
        words, last = torch.cat((words, last_byte << 8), dim=1), ((last << 8) & 0xFFFF) | last_byte
    # The end of the row above precedes a row's first word; the tile is a circle.
    before = torch.cat((last.roll(1, dims=-1), words[:, :-1]), dim=1)
    word_pairs = (before << 16) | words
    ends = [int((column + 1) * bits) for column in range(TILE)]
    word_of = [ceil_div(end, TILE) - 1 for end in ends]
    shift = torch.tensor([TILE * (word + 1) - end for word, end in zip(word_of, ends, strict=True)])
    windows = word_pairs[:, word_of].transpose(1, 2) >> shift.to(stored.device)
    hashed = ((windows & ((1 << L) - 1)) * MULTIPLIER) & 0xFFFFFFFF
    total = sum((hashed >> (8 * byte)) & 0xFF for byte in range(4))
    return total - LEVEL_CENTRE  # type: ignore[return-value]
