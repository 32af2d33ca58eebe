"""Activations in the transformed basis, in the dtypes that the product's kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ciuic_cli.codecs.transform import log2_block, padded
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import ceil_div, round_up
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.launcher import Launch, Launcher

TYPES = {torch.float32: p.FLOAT, torch.float16: p.HALF, torch.bfloat16: p.BFLOAT}
"""The dtypes of activations and results, and their codes in parameter blocks."""

STEP_COLUMNS = 64
"""Columns that a warp of the product multiplies in one step."""

_MAX_WARPS = 16
"""Most warps per block of the transform (chosen, not tuned)."""

_ANY_L = 16
"""L for which the transform is compiled. It does not depend on L; one value avoids compiling it twice."""

_STATIC_SHARED = 1024
"""Bound of the shared memory in bytes that `transform` declares statically."""


@dataclass(frozen=True)
class Activations:
    """Transformed activations, one row per token.

    Attributes:
        values: int8 [rows, 2, width], quantized values and their residuals; or float16 [rows, width]; or bfloat16
            [rows, cols_padded]. The width is cols rounded up to a multiple of 64, with zeros after the last column.
        scale: float32 [rows], the divisor of each row; empty for bfloat16.
        sums: int32 [rows, 2], sums of the int8 values; empty for the other dtypes.
    """

    values: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor


def check(x: torch.Tensor, cols: int, blob: torch.Tensor) -> torch.Tensor:
    """x as [rows, cols] with the elements of a row side by side.

    Raises:
        UsageError: x has another number of columns, a dtype other than float32, float16 and bfloat16, or is on another
            device than the weights (`blob`).
    """
    if x.dim() == 0 or x.shape[-1] != cols:
        raise UsageError(f"expected activations of {cols} columns, got shape {list(x.shape)}")
    if x.dtype not in TYPES:
        raise UsageError(f"activations must be float32, float16 or bfloat16, not {x.dtype}")
    if x.device != blob.device:
        raise UsageError(f"activations are on {x.device}, the weights are on {blob.device}")
    flat = x.reshape(-1, cols)
    return flat if flat.stride(1) == 1 or cols == 1 else flat.contiguous()


def forward(
    launcher: Launcher, x: torch.Tensor, seed: int, mode: int, input_factors: torch.Tensor | None = None
) -> Activations:
    """T(x), converted as `mode` says.

    Args:
        x: checked activations [rows, cols].
        mode: TO_BYTES (int8 and residuals), TO_HALF (float16, each row divided by a power of two) or TO_BFLOAT.
        input_factors: None, or input scales, float32 [cols], that each row of x is multiplied by first.
    """
    rows, cols = x.shape
    # The product's kernels read whole steps of 64 columns.
    width = padded(cols) if mode == p.TO_BFLOAT else round_up(cols, STEP_COLUMNS)
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
    """T^-1 of each row: floating [rows, cols_padded] to float32 [rows, cols]."""
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


def warps_for(launcher: Launcher, width: int, max_warps: int = _MAX_WARPS) -> int:
    """Warps per block that transforms rows of this width: one per stripe, limited by shared memory and `max_warps`."""
    fitting = (launcher.limits.shared_bytes - _STATIC_SHARED) // p.EXCHANGE_BYTES
    return max(1, min(ceil_div(width, p.STRIPE), max_warps, fitting))


def _launch(launcher: Launcher, rows: int, width: int, parameters: p.Transform) -> None:
    if rows:
        warps = warps_for(launcher, width)
        launcher.launch(
            Launch("transform", (rows, 1), 32 * warps, warps * p.EXCHANGE_BYTES, parameters, _ANY_L)
        )
