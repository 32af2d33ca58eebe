"""Packed matrices with random weights or random codes, and their decoded values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.bits import stored_bits
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import decode_scales, encode_scales
from ciuic_cli.codecs.testing import blob_of as as_tensor
from ciuic_cli.codecs.testing import random_matrix as random_codes
from ciuic_cli.codecs.testing import relative_error
from ciuic_cli.codecs.transform import transform

__all__ = ["BITS", "as_tensor", "dense", "pack", "random_codes", "relative_error"]

BITS = (4, 2, 3.5, 5, 6, 8, 1, 7, 2.5, 3, 5.5, 1.5, 4.5)


def pack(
    weight: torch.Tensor,
    bits: list[float] | float = 4,
    *,
    rank: int = 0,
    seed: int = 0,
    L: int = 12,
    is_sorted: bool = False,
) -> PackedMatrix:
    """Encode a matrix (rows, cols).

    Args:
        bits: bits per weight of the row groups, repeated cyclically.
        rank: rank of a low-rank part, or 0.
        is_sorted: assign the rows to random classes and store them sorted by class.
    """
    rows, cols = weight.shape
    if is_sorted:
        row_class = random_classes(rows)
        stored = pack(weight[np.argsort(row_class, kind="stable")], bits, rank=rank, seed=seed, L=L)
        return replace(stored, header=replace(stored.header, row_class=row_class))
    weight = weight.to(torch.float32)
    lowrank = None
    if rank:
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        right, left = pack(v[:rank], 6, seed=seed), pack((u[:, :rank] * s[:rank]).T, 6, seed=seed)
        lowrank = (right, left)
        weight = weight - dense(left).T @ dense(right)
    groups = -(-rows // 16)
    row_bits = np.resize(stored_bits(bits), groups)
    in_basis = transform(weight, seed)
    base, row_scale = encode_scales(in_basis.pow(2).mean(dim=1).sqrt().numpy())
    scales = np.zeros(16 * groups, dtype=np.float32)
    scales[:rows] = decode_scales(base, row_scale)
    in_basis = torch.nn.functional.pad(in_basis, (0, 0, 0, 16 * groups - rows))
    codes, _ = trellis.round_matrix(in_basis, scales, row_bits, L=L)
    return PackedMatrix(MatrixHeader(rows, cols, L, seed, base, row_bits, row_scale), codes, lowrank)


def random_classes(rows: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(rows).integers(0, 16, rows, dtype=np.uint8)


def dense(packed: PackedMatrix) -> torch.Tensor:
    """The decoded matrix, float32 (rows, cols): low-rank part, input scales and the original row order included."""
    result = trellis.decode(packed, original_basis=True)
    if packed.lowrank is not None:
        right, left = packed.lowrank
        result = result + dense(left).T @ dense(right)
    header = packed.header
    if header.input_scale is not None:
        result = result * torch.tensor([2.0 ** ((code - 128) / 16) for code in header.input_scale.tolist()])
    if header.row_class is None:
        return result
    stored = iter(result)
    in_order = torch.empty_like(result)
    for wanted in range(16):
        for row in np.flatnonzero(header.row_class == wanted):
            in_order[row] = next(stored)
    return in_order
