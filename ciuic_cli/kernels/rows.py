"""Decoding rows: a range of them for torch's product, single ones for an embedding."""

from __future__ import annotations

import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import ceil_div
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.activations import TYPES, warps_for
from ciuic_cli.kernels.launcher import Launch, launcher_for
from ciuic_cli.kernels.matrix import DeviceMatrix

_DECODE_WARPS = 8
"""Warps per block of `decode_rows` (chosen, not tuned)."""

_EMBEDDING_WARPS = 8
"""Most warps per block of `embedding_rows` (chosen, not tuned)."""

_MAX_GRID_Y = 65535
"""CUDA's limit for a grid's second dimension."""


def decode(
    matrix: DeviceMatrix,
    row_begin: int = 0,
    row_end: int | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stored rows row_begin to row_end - 1 in the transformed basis, without the low-rank part and input scales.

    Args:
        row_begin: a multiple of 16.
        row_end: default: the number of rows.
        dtype: float32, float16 or bfloat16.
        out: contiguous memory of `dtype` with room for the result, 16-byte aligned; default: new memory.

    Returns:
        `dtype` [row_end - row_begin, cols_padded]; a view of `out` if given.

    Raises:
        UsageError: the rows are outside the matrix or do not begin at a group, another dtype, or `out` does not fit.
    """
    row_end = matrix.rows if row_end is None else row_end
    if not 0 <= row_begin <= row_end <= matrix.rows or row_begin % TILE:
        raise UsageError(
            f"cannot decode rows {row_begin} to {row_end} of {matrix.rows}: a range must lie within the rows and "
            f"begin at a multiple of {TILE}"
        )
    if dtype not in TYPES:
        raise UsageError(f"cannot decode to {dtype}")
    launcher = launcher_for(matrix.blob.device)
    count, width = row_end - row_begin, matrix.cols_padded
    if out is None:
        result = launcher.empty((count, width), dtype)
    elif (
        out.dtype != dtype
        or out.device != matrix.blob.device
        or not out.is_contiguous()
        or out.numel() < count * width
        or out.data_ptr() % 16
    ):
        raise UsageError(
            f"`out` must be contiguous {dtype} on the device with {count * width} elements, aligned to 16 bytes"
        )
    else:
        result = out.reshape(-1)[: count * width].reshape(count, width)
    groups = ceil_div(count, TILE)
    for first in range(0, groups, _MAX_GRID_Y):
        rows_before = first * TILE
        begin, end = row_begin + rows_before, min(row_end, row_begin + rows_before + _MAX_GRID_Y * TILE)
        parameters = p.Decode(
            blob=matrix.blob.data_ptr(),
            group_offset=matrix.group_offset.data_ptr(),
            out=result[rows_before:].data_ptr(),
            rows=matrix.rows,
            cols_padded=width,
            row_begin=begin,
            row_end=end,
            out_type=TYPES[dtype],
        )
        grid = (ceil_div(width, 4 * TILE * _DECODE_WARPS), min(groups - first, _MAX_GRID_Y))
        launcher.launch(Launch("decode_rows", grid, 32 * _DECODE_WARPS, 0, parameters, matrix.L))
    return result


def embedding(
    matrix: DeviceMatrix, tokens: torch.Tensor, dtype: torch.dtype, *, transformed: bool = False
) -> torch.Tensor:
    """Some stored rows of a table.

    Args:
        matrix: the table, without a low-rank part unless `transformed`.
        tokens: row numbers, int64 [...] on the matrix's device. A number outside the table gives zeros: an error would
            need a wait for the device.
        dtype: float32, float16 or bfloat16.
        transformed: leave the rows in the transformed basis, without the low-rank part and input scales.

    Returns:
        `dtype` [..., cols], or [..., cols_padded] with `transformed`.

    Raises:
        UsageError: tokens of another dtype or device, another dtype of the result, or a low-rank part.
    """
    if tokens.dtype != torch.int64 or tokens.device != matrix.blob.device:
        raise UsageError(
            f"tokens must be int64 on {matrix.blob.device}, not {tokens.dtype} on {tokens.device}"
        )
    if dtype not in TYPES:
        raise UsageError(f"cannot decode to {dtype}")
    if matrix.lowrank is not None and not transformed:
        raise UsageError(
            "no kernel looks up rows of a table with a low-rank part",
            remedy="Look up transformed rows and add the product of the factors.",
        )
    launcher = launcher_for(matrix.blob.device)
    width = matrix.cols_padded if transformed else matrix.cols
    flat = tokens.reshape(-1).contiguous()
    out = launcher.empty((flat.numel(), width), dtype)
    if flat.numel():
        warps, factors = warps_for(launcher, matrix.cols_padded, _EMBEDDING_WARPS), matrix.input_factors
        parameters = p.Embedding(
            blob=matrix.blob.data_ptr(),
            group_offset=matrix.group_offset.data_ptr(),
            tokens=flat.data_ptr(),
            input_factor=None if transformed or factors is None else factors.data_ptr(),
            out=out.data_ptr(),
            rows=matrix.rows,
            cols=width,
            cols_padded=matrix.cols_padded,
            log2_block=0 if transformed else matrix.header.log2_block,
            seed=matrix.seed,
            out_type=TYPES[dtype],
        )
        shared = warps * p.EXCHANGE_BYTES
        launcher.launch(Launch("embedding_rows", (flat.numel(), 1), 32 * warps, shared, parameters, matrix.L))
    return out.reshape(*tokens.shape, width)
