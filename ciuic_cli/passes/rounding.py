"""Rounding a prepared matrix to the trellis code, with error feedback on both sides."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.bits import bits_of, tile_nbytes
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.rate_distortion import SCALE_BY_L
from ciuic_cli.codecs.scales import decode_scales, encode_scales
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.codecs.trellis import round_matrix
from ciuic_cli.passes.prepare import PreparedMatrix, prepare_without_fisher
from ciuic_cli.profiling.account import step


class Rounder(Protocol):
    """Rounds a matrix with error feedback, as `codecs.trellis.round_matrix`, which is the one for the CPU, documents.

    The other one is `kernels.fronts.DeviceRounder`. Their codes may differ; both decode everywhere.
    """

    def __call__(
        self,
        weight: torch.Tensor,
        scale: NDArray[np.float32],
        row_bits: NDArray[np.uint8],
        *,
        L: int,
        input_feedback: torch.Tensor | None = None,
        output_feedback: torch.Tensor | None = None,
        row_feedback: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[NDArray[np.uint8], torch.Tensor]: ...


def round_prepared(
    prepared: PreparedMatrix,
    row_bits: NDArray[np.uint8],
    *,
    lowrank: tuple[PackedMatrix, PackedMatrix] | None = None,
    row_class: NDArray[np.uint8] | None = None,
    input_scale: NDArray[np.uint8] | None = None,
    L: int,
    rounder: Rounder = round_matrix,
) -> PackedMatrix:
    """Round a matrix with feedback along inputs and outputs.

    Args:
        row_bits: (groups,) uint8 bits per weight of each group of 16 stored rows, as `MatrixHeader.row_bits` has them.
        lowrank: the coded factors of a low-rank part that was subtracted from the matrix before.
        row_class: (rows,) uint8 if the rows of `prepared` were sorted by it.
        input_scale: (cols,) uint8 codes if the columns of `prepared` were divided by it.
        L: trellis state bits.
        rounder: for the device on which `prepared` is.
    """
    base, codes = row_scales(prepared.rms[: prepared.rows], row_bits, L)
    tiles = round_rows(prepared, row_bits, decode_scales(base, codes), L, rounder)
    header = MatrixHeader(
        prepared.rows, prepared.cols, L, 0, base, row_bits, codes, row_class=row_class, input_scale=input_scale
    )  # fmt: skip
    return PackedMatrix(header, tiles, lowrank)


def row_scales(rms: torch.Tensor, row_bits: NDArray[np.uint8], L: int) -> tuple[float, NDArray[np.uint8]]:
    """The best row scales for rows with these effective standard deviations (m,): base and codes of `encode_scales`."""
    scale_per_rms = [SCALE_BY_L[L].get(bits, 0.0) for bits in bits_of(row_bits)]
    return encode_scales(rms.cpu().numpy() * np.array(scale_per_rms, np.float32).repeat(TILE)[: len(rms)])


def round_rows(
    prepared: PreparedMatrix,
    row_bits: NDArray[np.uint8],
    scale: NDArray[np.float32],
    L: int,
    rounder: Rounder = round_matrix,
) -> NDArray[np.uint8]:
    """The codes (bytes,) uint8 of all row groups, tiles in natural order; scale: (rows,) decoded row scales."""
    scales = np.zeros(len(prepared.weight), np.float32)
    scales[: prepared.rows] = scale
    along = prepared.row_feedback
    with step("search"):
        tiles, _ = rounder(
            prepared.weight,
            scales,
            row_bits,
            L=L,
            input_feedback=prepared.inputs.factor,
            output_feedback=prepared.outputs.factor,
            row_feedback=None if along is None else (along.direction, along.pull),
        )
    if prepared.block_order is None:
        return tiles
    return _tiles_in_natural_order(tiles, row_bits, prepared.block_order.cpu().numpy())


def _tiles_in_natural_order(
    tiles: NDArray[np.uint8], row_bits: NDArray[np.uint8], block_order: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Move the tiles of each row group from `block_order` to natural order."""
    natural = np.empty_like(tiles)
    begin = 0
    for nbytes in tile_nbytes(row_bits).tolist():
        end = begin + nbytes * len(block_order)
        natural[begin:end].reshape(len(block_order), -1)[block_order] = tiles[begin:end].reshape(
            len(block_order), -1
        )
        begin = end
    return natural


def round_without_feedback(
    weight: torch.Tensor, bits: int, *, L: int, rounder: Rounder = round_matrix
) -> PackedMatrix:
    """Round a matrix (m, n) float32 with the same bits per weight in all rows, without Fisher information."""
    prepared = prepare_without_fisher(weight)
    return round_prepared(
        prepared, np.full(len(prepared.weight) // TILE, bits, np.uint8), L=L, rounder=rounder
    )
