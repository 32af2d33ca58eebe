"""Decoded rows: a range for the matrix units, single ones for an embedding."""

from __future__ import annotations

import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.activations import TYPES, warps_for
from ciuic_cli.kernels.launcher import launcher_for
from ciuic_cli.kernels.matrix import DeviceMatrix

_DECODE_WARPS = 8
_EMBEDDING_WARPS = 8
_MAX_GRID_Y = 65535


def decode(
    matrix: DeviceMatrix,
    row_begin: int = 0,
    row_end: int | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows row_begin to row_end - 1 in the transformed basis, without the low-rank part.

    Args:
        row_begin: a multiple of 16.
        row_end: default all rows.
        dtype: float32, float16 or bfloat16.
        out: contiguous memory of `dtype` for at least the result's elements, 16-byte aligned.

    Returns:
        [row_end - row_begin, cols_padded] of `dtype`; a view of `out` if given.

    Raises:
        UsageError: rows outside the matrix or not beginning at a group, another dtype, or `out` does not fit.
    """
    row_end = matrix.rows if row_end is None else row_end
    if not 0 <= row_begin <= row_end <= matrix.rows or row_begin % TILE:
        raise UsageError(
            f"cannot decode rows {row_begin} to {row_end} of {matrix.rows}: they must begin at a multiple of "
            f"{TILE}"
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
        raise UsageError(f"`out` must be aligned contiguous {dtype} with {count * width} elements")
    else:
        result = out.reshape(-1)[: count * width].reshape(count, width)
    groups = -(-count // TILE)
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
        grid = (-(-width // (4 * TILE * _DECODE_WARPS)), min(groups - first, _MAX_GRID_Y))
        launcher.launch("decode_rows", grid, 32 * _DECODE_WARPS, 0, parameters, matrix.window_bits)
    return result


def embedding(
    matrix: DeviceMatrix, tokens: torch.Tensor, dtype: torch.dtype, *, transformed: bool = False
) -> torch.Tensor:
    """Rows of the table named by `tokens`, in the original basis, or as stored with `transformed`.

    Args:
        matrix: the table, without a low-rank part unless `transformed`.
        tokens: int64 [...] on the matrix's device. One outside the table gives zeros; the host does not look.
        dtype: float32, float16 or bfloat16.

    Returns:
        [..., cols] of `dtype`; with `transformed` [..., cols_padded], without the low-rank part.

    Raises:
        UsageError: tokens of another dtype or device, another dtype, or a low-rank part.
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
            remedy="Add the product of its factors to the transformed rows.",
        )
    launcher = launcher_for(matrix.blob.device)
    width = matrix.cols_padded if transformed else matrix.cols
    wanted = tokens.reshape(-1).contiguous()
    out = launcher.empty((wanted.numel(), width), dtype)
    if wanted.numel():
        warps, factors = warps_for(launcher, matrix.cols_padded, _EMBEDDING_WARPS), matrix.input_factors
        parameters = p.Embedding(
            blob=matrix.blob.data_ptr(),
            group_offset=matrix.group_offset.data_ptr(),
            tokens=wanted.data_ptr(),
            input_factor=None if transformed or factors is None else factors.data_ptr(),
            out=out.data_ptr(),
            rows=matrix.rows,
            cols=width,
            cols_padded=matrix.cols_padded,
            log2_block=0 if transformed else matrix.log2_block,
            seed=matrix.seed,
            out_type=TYPES[dtype],
        )
        shared = warps * p.EXCHANGE_BYTES
        launcher.launch(
            "embedding_rows", (wanted.numel(), 1), 32 * warps, shared, parameters, matrix.window_bits
        )
    return out.reshape(*tokens.shape, width)
