"""Activations in the transformed basis, in the form that a kernel multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ciuic_cli.codecs.transform import log2_block, padded
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.launcher import Launcher

TYPES = {torch.float32: p.FLOAT, torch.float16: p.HALF, torch.bfloat16: p.BFLOAT}

STEP_COLUMNS = 64
"""Columns that a warp of the product multiplies at a time."""

_MAX_WARPS = 16
_STATIC_SHARED = 1024  # what `transform` declares besides, rounded up


@dataclass(frozen=True)
class Activations:
    """x transformed: one row per token.

    Attributes:
        values: int8 [rows, 2, width] (rounded values, residuals) or float16 [rows, width] with width the
            columns in whole steps of 64, zeros after the last; or bfloat16 [rows, cols_padded].
        scale: float32 [rows]; what a row was divided by.
        sums: int32 [rows, 2], sums of the int8 values; empty for the other forms.
    """

    values: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor


def check(x: torch.Tensor, cols: int, blob: torch.Tensor) -> torch.Tensor:
    """x as [rows, cols] with neighbouring elements in a row.

    Raises:
        UsageError: another width, a dtype that is not float32, float16 or bfloat16, or another device than
            the weights'.
    """
    if x.dim() == 0 or x.shape[-1] != cols:
        raise UsageError(f"expected activations of {cols} columns, got shape {list(x.shape)}")
    if x.dtype not in TYPES:
        raise UsageError(f"activations must be float32, float16 or bfloat16, not {x.dtype}")
    if x.device != blob.device:
        raise UsageError(f"activations are on {x.device}, the weights on {blob.device}")
    flat = x.reshape(-1, cols)
    return flat if flat.stride(1) == 1 or cols == 1 else flat.contiguous()


def forward(
    launcher: Launcher, x: torch.Tensor, seed: int, mode: int, input_factors: torch.Tensor | None = None
) -> Activations:
    """T(x) in the form of `mode`.

    Args:
        x: checked activations [rows, cols].
        input_factors: None, or float32 [cols] that each row of x is multiplied by first.
        mode: TO_BYTES; TO_HALF (each row divided by a power of two); TO_BFLOAT.
    """
    rows, cols = x.shape
    # The kernels of the product read whole steps of 64 columns; beyond cols_padded there are zeros.
    width = padded(cols) if mode == p.TO_BFLOAT else -(-cols // STEP_COLUMNS) * STEP_COLUMNS
    if mode == p.TO_BYTES:
        values = launcher.empty((rows, 2, width), torch.int8)
    else:
        values = launcher.empty((rows, width), torch.float16 if mode == p.TO_HALF else torch.bfloat16)
    scale = launcher.empty((rows if mode != p.TO_BFLOAT else 0,), torch.float32)
    sums = launcher.empty((rows if mode == p.TO_BYTES else 0, 2), torch.int32)
    _launch(
        launcher,
        rows,
        width,
        p.Transform(
            x=x.data_ptr(),
            input_factor=None if input_factors is None else input_factors.data_ptr(),
            out=values.data_ptr(),
            out_scale=scale.data_ptr(),
            out_sum=sums.data_ptr(),
            x_stride=x.stride(0),
            out_stride=width,
            cols=cols,
            cols_padded=padded(cols),
            log2_block=log2_block(padded(cols)),
            seed=seed,
            x_type=TYPES[x.dtype],
            mode=mode,
        ),
    )
    return Activations(values, scale, sums)


def inverse(launcher: Launcher, x: torch.Tensor, cols: int, seed: int) -> torch.Tensor:
    """T^-1 of each row: float [rows, cols_padded] to float32 [rows, cols]."""
    rows, width = x.shape
    out = launcher.empty((rows, cols), torch.float32)
    _launch(
        launcher,
        rows,
        width,
        p.Transform(
            x=x.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=cols,
            cols=cols,
            cols_padded=width,
            log2_block=log2_block(width),
            seed=seed,
            x_type=TYPES[x.dtype],
            mode=p.INVERSE,
        ),
    )
    return out


def warps_for(launcher: Launcher, width: int, most: int = _MAX_WARPS) -> int:
    """Warps for rows of this width: one per chunk, as far as shared memory and `most` allow."""
    fitting = (launcher.limits.shared_bytes - _STATIC_SHARED) // p.EXCHANGE_BYTES
    return max(1, min(-(-width // p.CHUNK), most, fitting))


def _launch(launcher: Launcher, rows: int, width: int, parameters: p.Transform) -> None:
    if rows:
        warps = warps_for(launcher, width)
        launcher.launch("transform", (rows, 1), 32 * warps, warps * p.EXCHANGE_BYTES, parameters, 16)
