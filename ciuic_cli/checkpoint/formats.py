"""Number formats of checkpoints: the dtypes of safetensors, and FP8 and FP4 weights with their scales.

Takes tensors as stored and returns float32. In every layout the weight is the stored number times its scale, in spite
of the name `scale_inv`. These layouts of scales occur:

- DeepSeek-V3 and R1: `weight_scale_inv`, one float32 per block of 128x128 FP8 weights, with partial blocks at the edges
  (arXiv 2412.19437, section 3.3). The config states the block size.
- Other FP8 checkpoints: one scale per tensor or per row.
- DeepSeek-V4: one-byte scales that are powers of two ("ue8m0": byte b means 2^(b-127)). Its experts are FP4: two e2m1
  values per byte, low nibble first, one scale per 32 values of a row (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.errors import InputError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Safetensors dtype -> torch dtype. F4 has none: its packed bytes are read as uint8."""

DTYPE_BITS: dict[str, int] = {"F4": 4, **{name: 8 * dtype.itemsize for name, dtype in TORCH_DTYPES.items()}}
"""Bits per element of every safetensors dtype that can be read."""

FP8_DTYPES = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
"""Stored dtypes of FP8 weights; they need a scale."""
FP4_DTYPES = ("I8", "U8", "F4")
"""Stored dtypes that packed FP4 weights can have. I8 and U8 are FP4 only beside a scale."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "U8")
"""Stored dtypes that scales can have."""
SCALES_ONLY = "F8_E8M0"
"""Stored dtype that only scales have: powers of two without sign."""

FP4_BLOCK = 32
"""Values of a row that share one scale in the microscaling formats."""
_DEFAULT_BLOCK = (128, 128)
"""Rows and columns of an FP8 block if config.json states none: DeepSeek-V3's."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), dtype=torch.float32)
_FINITE_CHUNK = 1 << 22
"""Elements checked at a time by `count_nonfinite`. Chosen, not tuned."""
SCALE_REMEDY = "download the checkpoint again, or use its bf16 version"


def is_integer(dtype: torch.dtype) -> bool:
    """Whether the dtype is an integer type. Booleans are not integers here."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def can_hold(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether numbers stored as `stored` can be read as `dtype`.

    Floats can be read as any float dtype. Integers need a dtype of at least their range. Booleans and complex numbers
    need the same dtype.
    """
    if dtype.is_floating_point or stored.is_floating_point:
        return dtype.is_floating_point and stored.is_floating_point
    if torch.bool in (dtype, stored) or stored.is_complex:
        return dtype == stored
    wide, narrow = torch.iinfo(dtype), torch.iinfo(stored)
    return wide.min <= narrow.min and narrow.max <= wide.max


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
    """8-bit floats of any kind as float32 of the same shape, exactly. Two to three times as fast as `Tensor.to`."""
    flat = stored.contiguous().view(torch.uint8).reshape(-1)
    if flat.storage_offset() % 2:  # a uint16 view needs an even offset
        flat = flat.clone()
    even = flat.numel() // 2 * 2
    values = _look_up(flat[:even].view(torch.uint16), _fp8_pairs(stored.dtype))
    if even < flat.numel():
        values = torch.cat([values, flat[even:].view(stored.dtype).to(torch.float32)])
    return values.reshape(stored.shape)


@functools.cache
def _fp4_pairs() -> npt.NDArray[np.int64]:
    """(256,) table: byte -> its two float32 values as one 8-byte word."""
    byte = torch.arange(256)
    return _FP4_VALUES[torch.stack((byte & 15, byte >> 4), dim=-1)].numpy().view(np.int64).reshape(-1)


@functools.cache
def _fp8_pairs(dtype: torch.dtype) -> npt.NDArray[np.int64]:
    """(65536,) table: two FP8 bytes -> their two float32 values as one 8-byte word."""
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(dtype)
    return pairs.to(torch.float32).numpy().view(np.int64)


def _look_up(codes: torch.Tensor, pairs: npt.NDArray[np.int64]) -> torch.Tensor:
    """(n,) codes -> (2n,) float32. A pair of values moves as one 8-byte word, which makes the look-up fast."""
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

    An FP4 weight has one scale per 32 values of a row. An FP8 weight has one per `weight_block`, with partial blocks at
    the edges. If config.json states no block (None), these are accepted: one scale for the tensor, one per row, one per
    128x128, one per 32 values of a row. Raises InputError, naming `file` and `tensor`, for any other `scale_shape`.
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
        blocks = [_DEFAULT_BLOCK, (1, FP4_BLOCK)]
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
    """Multiply float32 `values` (rows, cols), in place, by the scale of their block; returns `values`.

    `block` is what `scale_block` returned. `values` may be a row range of the weight that begins at row `row_begin`;
    `scales` are those of the whole weight, as stored. Each weight is rounded once, by the float32 product.
    """
    grid = decode_scales(scales)
    rows, cols = values.shape
    grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(grid.shape[0], -1)
    block_rows, block_cols = block
    by_row = grid[torch.arange(row_begin, row_begin + rows) // block_rows]
    whole = cols // block_cols
    # Broadcasting over whole blocks, then over the partial last one, never expands the scales to all weights.
    blocks = values[:, : whole * block_cols].unflatten(1, (whole, block_cols))
    blocks *= by_row[:, :whole].unsqueeze(2)
    if whole * block_cols < cols:
        values[:, whole * block_cols :] *= by_row[:, whole : whole + 1]
    return values


def count_nonfinite(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Number of elements that are NaN or infinite after conversion to `dtype` (0 for integers)."""
    if not tensor.is_floating_point():
        return 0
    # In chunks, because the temporaries of one call would take more memory than the tensor itself.
    chunks = tensor.reshape(-1).split(_FINITE_CHUNK)
    return sum(_count_nonfinite(chunk, dtype) for chunk in chunks if chunk.numel())


def _count_nonfinite(chunk: torch.Tensor, dtype: torch.dtype) -> int:
    if chunk.dtype.itemsize == 1:  # torch does not compare 8-bit floats
        chunk = chunk.to(torch.float32)
    # NaN and infinity show in the minimum or the maximum; these two are ten times as fast as isfinite.
    if bool(torch.stack(chunk.aminmax()).to(dtype).isfinite().all()):
        return 0
    return chunk.numel() - int(chunk.to(dtype).isfinite().sum())


def require_finite(
    tensor: torch.Tensor, name: str, dtype: torch.dtype = torch.float32, *, file: Path | None = None
) -> None:
    """Raise InputError if any element is NaN or infinite in `dtype`. The message names tensor and count."""
    count = count_nonfinite(tensor, dtype)
    if not count:
        return
    advice = (
        "a checkpoint with such values cannot be compressed"
        if count_nonfinite(tensor)
        else "if the values are right, config.json needs a wider dtype"
    )
    raise InputError(
        f"{count} of {tensor.numel()} values are NaN or infinite in {str(dtype).removeprefix('torch.')}",
        file=file,
        tensor=name,
        remedy=f"download the checkpoint again; {advice}",
    )
