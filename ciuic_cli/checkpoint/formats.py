"""Number formats of checkpoints: FP8 and FP4 with their scales, decoded to float32.

Three layouts of scales occur with 8-bit floats. DeepSeek-V3 and R1 store `weight_scale_inv`, one float32 per
block of 128x128 weights, the last blocks partial (arXiv 2412.19437, section 3.3; the block size stands in the
config). Others store one scale per tensor or per row. DeepSeek-V4 stores powers of two ("ue8m0": the byte b
means 2^(b-127)), and its experts as FP4: two e2m1 values per byte, low nibble first, one scale per 32 values
of a row (OCP Microscaling Formats 1.0).

In every layout the weight is the stored number times its scale, in spite of the name `scale_inv`.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ciuic_cli.errors import InputError

FP8_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
FP4_BLOCK = 32
"""Values of a row that share one scale in the microscaling formats."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), dtype=torch.float32)
_SCALE_REMEDY = "download the checkpoint again, or use its bf16 version"


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32. One-byte scales (float8_e8m0fnu or uint8) mean 2^(b-127), and NaN for b = 255."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponent = scales.view(torch.uint8).to(torch.int32)
        # ldexp in float32 loses 2^-127 (a subnormal); float64 holds every value and rounds to it exactly.
        values = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent - 127)
        values[exponent == 255] = math.nan
        return values.to(torch.float32)
    return scales.to(torch.float32)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Two e2m1 values per byte, low nibble first: (..., n) bytes -> (..., 2n) float32."""
    codes = packed.contiguous().view(torch.uint8).to(torch.int32)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    return _FP4_VALUES[pairs].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def scale_block(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    weight_block: tuple[int, int],
    *,
    fp4: bool = False,
    file: Path | None = None,
    tensor: str | None = None,
) -> tuple[int, int]:
    """Rows and columns that share one scale, for a weight of decoded `shape` (rows, columns).

    Accepted are one scale for all, one per row, one per `weight_block` (last blocks partial) and one per 32
    values of a row. Raises InputError for a scale of any other shape.
    """
    if len(shape) != 2:
        raise InputError(
            f"an FP8 or FP4 weight must have 2 dimensions, not {len(shape)}",
            file=file,
            tensor=tensor,
            remedy=_SCALE_REMEDY,
        )
    rows, cols = shape
    if math.prod(scale_shape) == 1 and not fp4:
        return max(rows, 1), max(cols, 1)
    if scale_shape in ((rows,), (rows, 1)) and not fp4:
        return 1, max(cols, 1)
    blocks = [(1, FP4_BLOCK)] if fp4 else [weight_block, (1, FP4_BLOCK)]
    for block in blocks:
        if scale_shape == (math.ceil(rows / block[0]), math.ceil(cols / block[1])):
            return block
    expected = " or ".join(
        str((math.ceil(rows / block_rows), math.ceil(cols / block_cols))) for block_rows, block_cols in blocks
    )
    raise InputError(
        f"the scale has shape {scale_shape}; the weight {shape} needs {expected}",
        file=file,
        tensor=tensor,
        remedy=_SCALE_REMEDY,
    )


def apply_scales(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], row_begin: int = 0
) -> torch.Tensor:
    """Multiply float32 `values` (rows, cols), in place, by the scale of each one's block; returns `values`.

    `values` may be the rows from `row_begin` on of a larger weight whose scales are `scales` (2-D, or as
    `scale_block` accepts). One rounding per weight: the product in float32.
    """
    grid = decode_scales(scales)
    rows, cols = values.shape
    grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(grid.shape[0], -1)
    block_rows, block_cols = block
    row_block = torch.arange(row_begin, row_begin + rows) // block_rows
    for index in range(grid.shape[1]):
        # One column of blocks at a time: the expanded scales never take the memory of the weight.
        columns = values[:, index * block_cols : min(cols, (index + 1) * block_cols)]
        columns *= grid[row_block, index].unsqueeze(1)
    return values


def count_nonfinite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinite (0 for integers)."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    if tensor.dtype in FP8_DTYPES:
        tensor = tensor.to(torch.float32)
    return int(tensor.numel() - torch.isfinite(tensor).sum().item())


def require_finite(tensor: torch.Tensor, name: str, *, file: Path | None = None) -> None:
    """Raise InputError with the tensor's name and the count if any element is NaN or infinite."""
    count = count_nonfinite(tensor)
    if count:
        raise InputError(
            f"{count} of {tensor.numel()} weights are NaN or infinite",
            file=file,
            tensor=name,
            remedy="download the checkpoint again; if it is meant to be so, it cannot be compressed",
        )
