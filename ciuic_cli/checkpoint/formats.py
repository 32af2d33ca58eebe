"""Number formats of checkpoints: the dtypes of safetensors, and the formats of weights that are stored with scales.

`FORMATS` is the table of the formats with scales. `format_of` finds a tensor's format, `NumberFormat.decode` returns
its numbers as float32, and `apply_scales` multiplies them by their scales. In every layout the weight is the stored
number times its scale, in spite of the name `scale_inv`. These layouts of scales occur:

- DeepSeek-V3 and R1: `weight_scale_inv`, one float32 per block of 128x128 FP8 weights, with partial blocks at the edges
  (arXiv 2412.19437, section 3.3). The config states the block size.
- Other FP8 checkpoints: one scale per tensor or per row.
- DeepSeek-V4: one-byte scales that are powers of two ("ue8m0": byte b means 2^(b-127)). Its experts are FP4: two e2m1
  values per byte, low nibble first, one scale per 32 values of a row (OCP Microscaling Formats 1.0).
- GPT-OSS: the same numbers and scales, "mxfp4", with the groups of 32 values as a dimension of their own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.errors import InputError
from ciuic_cli.integers import ceil_div

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
"""Safetensors dtype -> torch dtype. Dtypes with fewer than 8 bits have none: their packed bytes are read as uint8."""


@dataclass(frozen=True)
class NumberFormat:
    """A format of weights that are stored as codes of a few bits, with scales beside them.

    Codes are packed along a row, the first one in the lowest bits.

    Attributes:
        name: the format's name in reports.
        bits: bits per code, 4 or 8.
        values: the value of each code, from 0 to 2^bits - 1.
        dtypes: safetensors dtypes of this format. A tensor of such a dtype must have a scale; its shape counts values.
        packed_in: integer dtypes that hold codes of this format if the tensor has a scale; its shape counts integers.
        scale_block: rows and columns that share one scale; None if config.json or the scale's shape decides.
        grouped: stored as (experts, outputs, groups, bytes), with a scale per group. Decoded it is a stack of experts
            (experts, inputs, outputs).
    """

    name: str
    bits: int
    values: tuple[float, ...]
    dtypes: tuple[str, ...] = ()
    packed_in: tuple[str, ...] = ()
    scale_block: tuple[int, int] | None = None
    grouped: bool = False

    def decoded_shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in values of a tensor that the header lists with this dtype and shape."""
        if self.grouped and len(shape) == 4:
            experts, outputs, groups, nbytes = shape
            return experts, groups * nbytes * 8 // self.bits, outputs
        if dtype not in self.packed_in or not shape:
            return shape
        return (*shape[:-1], shape[-1] * (DTYPE_BITS[dtype] // self.bits))

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """The values, exactly, as float32: stored (..., n) becomes (..., n * values per element). Scales not applied.

        Two to three times as fast as `Tensor.to` for FP8.
        """
        per_element = 8 * stored.dtype.itemsize // self.bits
        shape = stored.shape if per_element == 1 else (*stored.shape[:-1], per_element * stored.shape[-1])
        data = stored.contiguous().reshape(-1).view(torch.uint8).numpy()
        pair_bytes = 2 * self.bits // 8
        even = len(data) // pair_bytes * pair_bytes
        # A pair of values moves as one 8-byte word, which makes the look-up fast.
        pairs = np.take(_pairs(self.values), data[:even].view(f"<u{pair_bytes}"))
        values = torch.from_numpy(pairs.view(np.float32))
        if even < len(data):  # an odd number of one-byte codes
            values = torch.cat([values, torch.tensor([self.values[data[-1]]])])
        return values.reshape(shape)


@functools.cache
def _pairs(values: tuple[float, ...]) -> npt.NDArray[np.int64]:
    """(len(values)^2,) table: two codes, the first one in the lower bits -> their two float32 values as one word."""
    table = np.array(values, np.float32)
    return (
        np.stack([np.tile(table, len(table)), np.repeat(table, len(table))], axis=-1)
        .view(np.int64)
        .reshape(-1)
    )


def _values_of(dtype: torch.dtype) -> tuple[float, ...]:
    """The values of all 256 codes of an 8-bit float."""
    return tuple(torch.arange(256).to(torch.uint8).view(dtype).to(torch.float32).tolist())


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of e2m1's codes without a sign (OCP Microscaling Formats 1.0, section 5.3.3)."""
FP4_BLOCK = 32
"""Values of a row that share one scale in the microscaling formats."""

FORMATS: tuple[NumberFormat, ...] = (
    *(
        NumberFormat(dtype, 8, _values_of(TORCH_DTYPES[dtype]), dtypes=(dtype,))
        for dtype in ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
    ),
    NumberFormat(
        "FP4", 4, (*_E2M1, *(-value for value in _E2M1)),
        dtypes=("F4",), packed_in=("I8", "U8"), scale_block=(1, FP4_BLOCK),
    ),
    NumberFormat(
        "MXFP4", 4, (*_E2M1, *(-value for value in _E2M1)),
        packed_in=("U8",), scale_block=(1, FP4_BLOCK), grouped=True,
    ),
)  # fmt: skip
"""The formats of weights with scales that can be read. All other code asks this table: a new format is a row here."""

DTYPE_BITS: dict[str, int] = {
    **{dtype: number_format.bits for number_format in FORMATS for dtype in number_format.dtypes},
    **{name: 8 * dtype.itemsize for name, dtype in TORCH_DTYPES.items()},
}
"""Bits per element of every safetensors dtype that can be read."""

SCALE_DTYPES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "U8")
"""Stored dtypes that scales can have."""
SCALES_ONLY = "F8_E8M0"
"""Stored dtype that only scales have: powers of two without sign."""
_DEFAULT_BLOCK = (128, 128)
"""Rows and columns of an FP8 block if config.json states none: DeepSeek-V3's."""
_FINITE_ELEMENTS = 1 << 22
"""Elements checked at a time by `count_nonfinite`; bounds the temporaries. Chosen, not tuned."""
SCALE_REMEDY = "download the checkpoint again, or use its bf16 version"
"""The remedy if a weight and its scale do not fit together."""


def format_of(dtype: str, *, has_scale: bool, grouped: bool = False) -> NumberFormat | None:
    """The format of a tensor with this safetensors dtype; None if it is stored as plain numbers.

    has_scale: whether a scale belongs to the tensor. Integers are packed codes only then. grouped: as `NumberFormat`'s.
    """
    for number_format in FORMATS:
        if number_format.grouped != grouped:
            continue
        if dtype in number_format.dtypes or (has_scale and dtype in number_format.packed_in):
            return number_format
    return None


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a tensor is read: that of the header, or (..., bytes) uint8 for dtypes below 8 bits.

    Raises ValueError if a row of such a tensor does not end with a whole byte.
    """
    if dtype in TORCH_DTYPES:
        return shape
    bits = DTYPE_BITS[dtype] * (shape[-1] if shape else 1)
    if bits % 8:
        raise ValueError(f"a row of {dtype} must fill whole bytes, and {bits} bits do not")
    return (*shape[:-1], bits // 8)


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


def scale_block(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    weight_block: tuple[int, int] | None,
    *,
    fixed: tuple[int, int] | None = None,
    file: Path | None = None,
    tensor: str | None = None,
) -> tuple[int, int]:
    """Rows and columns that share one scale, for a weight of decoded `shape` (rows, columns).

    fixed: the format's own block (`NumberFormat.scale_block`). weight_block: the block that config.json states, for
    formats without one. Blocks at the edges may be partial. If both are None, these are accepted: one scale for the
    tensor, one per row, one per 128x128, one per 32 values of a row. Raises InputError, naming `file` and `tensor`, for
    any other `scale_shape`.
    """
    if len(shape) != 2:
        raise InputError(
            f"a weight with scales must have 2 dimensions, not {len(shape)}",
            file=file,
            tensor=tensor,
            remedy=SCALE_REMEDY,
        )
    rows, cols = shape
    if fixed is not None:
        blocks = [fixed]
    elif weight_block is not None:
        blocks = [weight_block]
    elif math.prod(scale_shape) == 1:
        return max(rows, 1), max(cols, 1)
    elif scale_shape in ((rows,), (rows, 1)):
        return 1, max(cols, 1)
    else:
        blocks = [_DEFAULT_BLOCK, (1, FP4_BLOCK)]
    for block in blocks:
        if scale_shape == (ceil_div(rows, block[0]), ceil_div(cols, block[1])):
            return block
    expected = " or ".join(
        str((ceil_div(rows, block_rows), ceil_div(cols, block_cols))) for block_rows, block_cols in blocks
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


def apply_group_scales(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply `values` (experts, outputs, groups, n) of a grouped format, in place, by `scales` (experts, outputs,
    groups) as stored. Returns them as (experts, inputs, outputs)."""
    values *= decode_scales(scales).unsqueeze(-1)
    return values.flatten(2).mT


def count_nonfinite(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Number of elements that are NaN or infinite after conversion to `dtype` (0 for integers)."""
    if not tensor.is_floating_point():
        return 0
    # In parts, because the temporaries of one call would take more memory than the tensor itself.
    parts = tensor.reshape(-1).split(_FINITE_ELEMENTS)
    return sum(_count_nonfinite(part, dtype) for part in parts if part.numel())


def _count_nonfinite(part: torch.Tensor, dtype: torch.dtype) -> int:
    if part.dtype.itemsize == 1:  # torch does not compare 8-bit floats
        part = part.to(torch.float32)
    # NaN and infinity show in the minimum or the maximum; these two are ten times as fast as isfinite.
    if bool(torch.stack(part.aminmax()).to(dtype).isfinite().all()):
        return 0
    return part.numel() - int(part.to(dtype).isfinite().sum())


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
