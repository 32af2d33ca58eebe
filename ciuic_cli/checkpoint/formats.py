"""Number formats of checkpoints: FP8 and FP4 with their scales, decoded to float32.

Three layouts of scales occur with 8-bit floats. DeepSeek-V3 and R1 store `weight_scale_inv`, one float32 per
block of 128x128 weights, the last blocks partial (arXiv 2412.19437, section 3.3; the block size stands in the
config). Others store one scale per tensor or per row. DeepSeek-V4 stores powers of two ("ue8m0": the byte b
means 2^(b-127)), and its experts as FP4: two e2m1 values per byte, low nibble first, one scale per 32 values
of a row (OCP Microscaling Formats 1.0).

In every layout the weight is the stored number times its scale, in spite of the name `scale_inv`.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.errors import InputError

FP4_BLOCK = 32
"""Values of a row that share one scale in the microscaling formats."""
_USUAL_BLOCK = (128, 128)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), dtype=torch.float32)
_FINITE_PART = 1 << 22
SCALE_REMEDY = "download the checkpoint again, or use its bf16 version"


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
    codes = packed.contiguous().view(torch.uint8)
    return _look_up(codes.reshape(-1), _fp4_pairs()).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_fp8(stored: torch.Tensor) -> torch.Tensor:
    """8-bit floats of any kind as float32, exactly; two to three times as fast as torch's conversion."""
    flat = stored.contiguous().view(torch.uint8).reshape(-1)
    if flat.storage_offset() % 2:  # a slice that begins in the middle of a pair
        flat = flat.clone()
    even = flat.numel() // 2 * 2
    values = _look_up(flat[:even].view(torch.uint16), _fp8_pairs(stored.dtype))
    if even < flat.numel():
        values = torch.cat([values, flat[even:].view(stored.dtype).to(torch.float32)])
    return values.reshape(stored.shape)


@functools.cache
def _fp4_pairs() -> npt.NDArray[np.int64]:
    byte = torch.arange(256)
    return _FP4_VALUES[torch.stack((byte & 15, byte >> 4), dim=-1)].numpy().view(np.int64).reshape(-1)


@functools.cache
def _fp8_pairs(dtype: torch.dtype) -> npt.NDArray[np.int64]:
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(dtype)
    return pairs.to(torch.float32).numpy().view(np.int64)


def _look_up(codes: torch.Tensor, pairs: npt.NDArray[np.int64]) -> torch.Tensor:
    """Two float32 per code, moved as one 8-byte word."""
    return torch.from_numpy(np.take(pairs, codes.numpy()).view(np.float32))


def scale_block(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    weight_block: tuple[int, int] | None,
    *,
    fp4: bool = False,
    file: Path | None = None,
    tensor: str | None = None,
) -> tuple[int, int]:
    """Rows and columns that share one scale, for a weight of decoded `shape` (rows, columns).

    FP4 has one per 32 values of a row, FP8 one per `weight_block`, the last blocks partial. Where that is None,
    because config.json states no block, one scale for all, one per row, one per 128x128 and one per 32 values of a
    row are accepted. Raises InputError for a scale of any other shape.
    """
    if len(shape) != 2:
        raise InputError(
            f"an FP8 or FP4 weight must have 2 dimensions, not {len(shape)}",
            file=file,
            tensor=tensor,
            remedy=SCALE_REMEDY,
        )
    rows, cols = shape
    if fp4:
        blocks = [(1, FP4_BLOCK)]
    elif weight_block is not None:
        blocks = [weight_block]
    elif math.prod(scale_shape) == 1:
        return max(rows, 1), max(cols, 1)
    elif scale_shape in ((rows,), (rows, 1)):
        return 1, max(cols, 1)
    else:
        blocks = [_USUAL_BLOCK, (1, FP4_BLOCK)]
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
        remedy=SCALE_REMEDY,
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
    by_row = grid[torch.arange(row_begin, row_begin + rows) // block_rows]
    whole = cols // block_cols
    # Broadcast over whole blocks, then over the partial last one: scales are never expanded to all weights.
    blocks = values[:, : whole * block_cols].unflatten(1, (whole, block_cols))
    blocks *= by_row[:, :whole].unsqueeze(2)
    if whole * block_cols < cols:
        values[:, whole * block_cols :] *= by_row[:, whole : whole + 1]
    return values


def count_nonfinite(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """How many elements are NaN or infinite once they are of `dtype` (0 for integers)."""
    if not tensor.is_floating_point():
        return 0
    # In parts: the intermediate results of one call take more than the tensor itself.
    parts = tensor.reshape(-1).split(_FINITE_PART)
    return sum(_count_nonfinite(part, dtype) for part in parts if part.numel())


def _count_nonfinite(part: torch.Tensor, dtype: torch.dtype) -> int:
    if part.dtype.itemsize == 1:  # torch does not compare 8-bit floats
        part = part.to(torch.float32)
    # If any element is not finite, the least or the greatest is not; ten times as fast as to ask each one.
    if bool(torch.stack(part.aminmax()).to(dtype).isfinite().all()):
        return 0
    return part.numel() - int(part.to(dtype).isfinite().sum())


def require_finite(
    tensor: torch.Tensor, name: str, dtype: torch.dtype = torch.float32, *, file: Path | None = None
) -> None:
    """Raise InputError with the tensor's name and the count if any element is NaN or infinite as `dtype`."""
    count = count_nonfinite(tensor, dtype)
    if not count:
        return
    meant = "it cannot be compressed" if count_nonfinite(tensor) else "config.json needs a wider dtype"
    raise InputError(
        f"{count} of {tensor.numel()} values are NaN or infinite in {str(dtype).removeprefix('torch.')}",
        file=file,
        tensor=name,
        remedy=f"download the checkpoint again; if it is meant to be so, {meant}",
    )
