"""One launch of the decoding product: choice of kernel, warps and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ciuic_cli.errors import UsageError
from ciuic_cli.integers import ceil_div
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.activations import STEP_COLUMNS, TYPES, Activations
from ciuic_cli.kernels.launcher import Launch, Launcher
from ciuic_cli.kernels.matrix import DeviceMatrix, DeviceStack

RING_STEPS = 4
"""Steps of codes in flight per warp; RING_STEPS in linear.cu (chosen, not tuned)."""

WARP_COLUMNS = 16384
"""Most columns per warp: a column adds up to 4 * 255 * 127 to a 32-bit sum, which must not overflow."""

_MAX_WARPS = 8
"""Most warps that share the columns of a block (docs/experiments/runtime/gpu-open-choices.md)."""

_LEAST_WARPS = 4
"""Fewest warps that share the columns of a block (docs/experiments/runtime/gpu-open-choices.md)."""

_SUM_ROWS = 20
"""Rows that a column of a warp's sums takes in shared memory; SUM_ROWS in linear.cu."""

_STATIC_SHARED = 1024
"""Bound of the shared memory in bytes that the kernels declare statically."""


@dataclass(frozen=True)
class Kernel:
    """A variant of the product in linear.cu."""

    name: str
    pairs: int
    """Rows of activations that a block multiplies at once."""
    columns: int
    """Columns of a block's sums: its pairs, and as many residuals for int8."""
    mode: int
    """Mode of the transform: the dtype of the activations."""
    warps_per_multiprocessor: int
    """Warps that the registers of a multiprocessor suffice for."""

    def shared_bytes(self, warps: int, max_words: int) -> int:
        """Dynamic shared memory of a block in bytes. Each warp's sums overwrite its ring of codes at the end."""
        return warps * max(RING_STEPS * group_slot(max_words), self.columns * _SUM_ROWS * 4)


BY_BATCH = (
    Kernel("linear_bytes_n4", 4, 8, p.TO_BYTES, 32),
    Kernel("linear_bytes_n8", 8, 16, p.TO_BYTES, 16),
    Kernel("linear_half_n16", 16, 16, p.TO_HALF, 16),
    Kernel("linear_half_n32", 32, 32, p.TO_HALF, 16),
)
"""The variants, by ascending number of rows."""

SMALL_BATCH = BY_BATCH[-1].pairs
"""Most rows of activations that are multiplied straight from the codes (chosen, not measured)."""


@dataclass(frozen=True)
class Pairs:
    """(token, expert) pairs of a launch, sorted by expert: int32 [pairs] each.

    The result of a pair whose expert is not in 0 to experts - 1 is zeros.
    """

    expert: torch.Tensor
    x: torch.Tensor
    """Row of the activations."""
    y: torch.Tensor
    """Row of the result."""
    experts: int
    """Number of experts in the stack."""


def group_slot(max_words: int) -> int:
    """Bytes of one group in one step of the ring: four tiles. They are an odd multiple of 32 bytes apart, so that they
    begin in different banks."""
    return 4 * 32 * (max_words | 1)


def kernel_for(batch: int) -> Kernel:
    """The variant for `batch` rows, at most SMALL_BATCH."""
    return next(kernel for kernel in BY_BATCH if batch <= kernel.pairs)


def warps_for(kernel: Kernel, blocks: int, width: int, launcher: Launcher) -> int:
    """Warps per block: as many as let all blocks run at once, within limits; each has at least a step of columns."""
    places = kernel.warps_per_multiprocessor * launcher.limits.multiprocessors
    wanted = 1 << max(_LEAST_WARPS, places // max(1, blocks)).bit_length() - 1
    return min(_MAX_WARPS, wanted, ceil_div(width, STEP_COLUMNS))


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
        weights: at most MAX_PARTS, with the same columns, seed and L.
        x: made with the kernel's mode.
        outputs: [batch, rows] for each weight, contiguous, float32, float16 or bfloat16.
        addends: float32 [batch, rows] or None for each weight.
        pairs: the products of a stack; None for matrices.

    Raises:
        UsageError: too many columns or activations for the kernels' 32-bit numbers.
    """
    width = weights[0].cols_padded
    # The ring must hold the widest group of every weight.
    max_words = max(2, *(weight.max_words for weight in weights))
    # With experts every pair may be the first of its expert; without, rows of a batch fill whole fragments.
    count = x.values.shape[0] if pairs is None else pairs.expert.numel()
    repeats = count if pairs is not None else ceil_div(count, kernel.pairs)
    working = min(repeats, pairs.experts) if pairs is not None else repeats
    warps = warps_for(kernel, working * sum(weight.groups for weight in weights), width, launcher)
    room = launcher.limits.shared_bytes - _STATIC_SHARED
    while warps > 1 and kernel.shared_bytes(warps, max_words) > room:
        warps -= 1
    if ceil_div(width, STEP_COLUMNS * warps) * STEP_COLUMNS > WARP_COLUMNS:
        raise UsageError(f"the kernels multiply up to {WARP_COLUMNS * warps} columns here, not {width}")
    if x.values.nbytes >= 1 << 32:
        raise UsageError(f"the kernels take less than 4 GiB of activations, not {x.values.nbytes} bytes")

    parameters = p.Linear(
        x=x.values.data_ptr(),
        x_scale=x.scale.data_ptr(),
        x_sum=x.sums.data_ptr(),
        parts=len(weights),
        cols_padded=width,
        pairs=count,
        group_slot=group_slot(max_words),
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
        blocks += weight.groups
    shared = kernel.shared_bytes(warps, max_words)
    launcher.launch(
        Launch(kernel.name, (blocks, repeats), 32 * warps, shared, parameters, weights[0].L, early=True)
    )
