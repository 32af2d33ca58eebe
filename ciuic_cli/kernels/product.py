"""One launch of the decoding product: which kernel, how many warps, which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.activations import STEP_COLUMNS, TYPES, Activations
from ciuic_cli.kernels.launcher import Launcher
from ciuic_cli.kernels.matrix import DeviceMatrix, DeviceStack

STAGES = 4
"""Steps of codes in flight per warp; `STAGES` in linear.cu."""

WARP_COLUMNS = 16384
"""Columns up to which a warp's 32-bit sums of 255 * 127 * 4 each cannot overflow."""

_MAX_WARPS = 16
_STATIC_SHARED = 1024  # what the kernels declare besides, rounded up


@dataclass(frozen=True)
class Kernel:
    """A variant of the product in linear.cu."""

    name: str
    groups: int
    """Row groups of a block."""
    pairs: int
    """Activation rows that it multiplies at once."""
    columns: int
    """Columns of its sums: the pairs, and their residuals where there are any."""
    mode: int
    """Form of the activations."""

    def shared_bytes(self, warps: int, max_units: int) -> int:
        """Dynamic shared memory: the rings of codes, and later the warps' sums in their place."""
        ring = STAGES * self.groups * group_slot(max_units)
        sums = self.groups * self.columns * TILE * 4
        return warps * max(ring, sums)


_BYTES_4 = (
    Kernel("linear_bytes_r1_n4", 1, 4, 8, p.TO_BYTES),
    Kernel("linear_bytes_r2_n4", 2, 4, 8, p.TO_BYTES),
)
_BYTES_8 = (
    Kernel("linear_bytes_r1_n8", 1, 8, 16, p.TO_BYTES),
    Kernel("linear_bytes_r2_n8", 2, 8, 16, p.TO_BYTES),
)
_HALF_16 = (
    Kernel("linear_half_r1_n16", 1, 16, 16, p.TO_HALF),
    Kernel("linear_half_r2_n16", 2, 16, 16, p.TO_HALF),
)
_HALF_32 = (Kernel("linear_half_r2_n32", 2, 32, 32, p.TO_HALF),)

BY_BATCH = ((4, _BYTES_4), (8, _BYTES_8), (16, _HALF_16), (32, _HALF_32))
"""Largest batch, and the kernels for it: one group per block, two groups per block."""

LARGEST_BATCH = BY_BATCH[-1][0]


@dataclass(frozen=True)
class Pairs:
    """Which expert multiplies which row of x, sorted by expert: int32 [pairs] each.

    An expert below 0 or not below `experts` makes a row of zeros.
    """

    expert: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    experts: int


def group_slot(max_units: int) -> int:
    """Bytes of a group's share of a ring slot: four tiles, each at an odd multiple of 32 bytes, so that the
    four lie in different banks."""
    return 4 * 32 * (max_units | 1)


def kernels_for(batch: int) -> tuple[Kernel, ...]:
    """The variants for `batch` rows, at most LARGEST_BATCH."""
    return next(kernels for largest, kernels in BY_BATCH if batch <= largest)


def choose(variants: Sequence[Kernel], launcher: Launcher, groups: Sequence[int], repeats: int) -> Kernel:
    """Two groups per block halve the work on activations; one makes twice the blocks, for matrices too
    small to fill the GPU otherwise.

    Args:
        groups: row groups of every part.
        repeats: how often the parts are multiplied in this launch.
    """
    blocks = repeats * sum(-(-count // variants[-1].groups) for count in groups)
    return variants[-1] if 4 * blocks >= 3 * launcher.limits.multiprocessors else variants[0]


def launch(
    launcher: Launcher,
    kernel: Kernel,
    weights: Sequence[DeviceMatrix | DeviceStack],
    x: Activations,
    outputs: Sequence[torch.Tensor],
    addends: Sequence[torch.Tensor | None] | None = None,
    pairs: Pairs | None = None,
) -> None:
    """outputs[i] = weights[i] x (+ addends[i]), all in one launch.

    Args:
        weights: at most MAX_PARTS, of one width, seed and window length.
        x: in the kernel's form.
        outputs: [rows of y, rows] each, contiguous, float32, float16 or bfloat16.
        addends: float32 [rows of y, rows] or None each.
        pairs: for stacks.
    """
    first = weights[0]
    matrix = first if isinstance(first, DeviceMatrix) else first.expert(0)
    width = matrix.cols_padded
    # The ring must hold every part's widest group.
    max_units = max(2, *(part.max_units for part in weights))
    warps = min(_MAX_WARPS, -(-width // STEP_COLUMNS))
    room = launcher.limits.shared_bytes - _STATIC_SHARED
    while warps > 1 and kernel.shared_bytes(warps, max_units) > room:
        warps -= 1
    if -(-width // (STEP_COLUMNS * warps)) * STEP_COLUMNS > WARP_COLUMNS:
        raise UsageError(f"the kernels multiply up to {WARP_COLUMNS * warps} columns here, not {width}")
    if x.values.nbytes >= 1 << 32:
        raise UsageError(f"the kernels take less than 4 GiB of activations, not {x.values.nbytes} bytes")

    parameters = p.Linear(
        x=x.values.data_ptr(),
        x_scale=x.scale.data_ptr(),
        x_sum=x.sums.data_ptr(),
        parts=len(weights),
        cols_padded=width,
        pairs=x.values.shape[0] if pairs is None else pairs.expert.numel(),
        group_slot=group_slot(max_units),
        x_width=x.values.shape[-1],
    )
    if pairs is not None:
        parameters.pair_expert = pairs.expert.data_ptr()
        parameters.pair_x = pairs.x.data_ptr()
        parameters.pair_y = pairs.y.data_ptr()
        parameters.experts = pairs.experts
    blocks = 0
    for index, (weight, y) in enumerate(zip(weights, outputs, strict=True)):
        part = parameters.part[index]
        part.blob = weight.blob.data_ptr()
        part.group_offset = weight.group_offset.data_ptr()
        part.y = y.data_ptr()
        part.y_stride = y.stride(0)
        addend = addends[index] if addends is not None else None
        part.addend = None if addend is None else addend.data_ptr()
        part.rows = weight.rows
        part.groups = weight.groups
        part.first_block = blocks
        part.y_type = TYPES[y.dtype]
        blocks += -(-weight.groups // kernel.groups)
    # With experts every pair may begin a run of its own; without, the batch is cut into full fragments.
    repeats = parameters.pairs if pairs is not None else -(-parameters.pairs // kernel.pairs)
    launcher.launch(
        kernel.name,
        (blocks, repeats),
        32 * warps,
        kernel.shared_bytes(warps, max_units),
        parameters,
        matrix.window_bits,
    )
