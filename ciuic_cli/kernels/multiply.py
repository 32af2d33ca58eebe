"""y = x W^T for every batch size: a small batch is multiplied straight from the codes, a large one by decoded
panels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import ceil_div
from ciuic_cli.kernels import activations, product_launch, rows
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.activations import Activations
from ciuic_cli.kernels.launcher import Launch, Launcher, launcher_for
from ciuic_cli.kernels.matrix import DeviceMatrix

PANEL_BYTES = 32 << 20
"""Bytes of a panel, the rows whose weights a large batch decodes at a time (bfloat16). It stays in the level-2 cache of
a large GPU (chosen, not tuned)."""

_LOWRANK_WARPS = 4
"""Warps per block of `lowrank_columns`; chosen, not tuned."""


def linear(
    weights: Sequence[DeviceMatrix],
    x: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    bare: bool = False,
) -> list[torch.Tensor]:
    """x W^T for matrices that share their input (q, k and v; gate and up), with one transform of x.

    Up to SMALL_BATCH rows of x are multiplied straight from the codes, with up to four matrices per launch. Activations
    are int8 with an int8 residual for up to 8 rows, float16 beyond. Larger batches decode W to bfloat16, panel by
    panel.

    Args:
        weights: with the same columns, on one device.
        x: float32, float16 or bfloat16 [..., cols].
        dtype: of the results; default x's.
        bare: multiply with the codes alone, without input scales and low-rank parts.

    Returns:
        [..., rows] for every matrix, its rows as stored.

    Raises:
        UsageError: shapes, dtypes or devices do not fit.
        EnvironmentFault: the kernels cannot be compiled or launched.
    """
    if not weights:
        raise UsageError("there is no matrix to multiply with")
    first = weights[0]
    flat = activations.check(x, first.cols, first.blob)
    for weight in weights[1:]:
        if weight.cols != first.cols or weight.blob.device != first.blob.device:
            raise UsageError("matrices of one product need the same columns and one device")
    dtype = x.dtype if dtype is None else dtype
    if dtype not in activations.TYPES:
        raise UsageError(f"the product cannot be of {dtype}")
    launcher = launcher_for(first.blob.device)
    multiply = _small if flat.shape[0] <= product_launch.SMALL_BATCH else _large
    results: dict[int, torch.Tensor] = {}
    keys = [_launch_key(weight, bare) for weight in weights]
    for key in dict.fromkeys(keys):
        same = [i for i, other in enumerate(keys) if other == key]
        for begin in range(0, len(same), p.MAX_PARTS):
            part = same[begin : begin + p.MAX_PARTS]
            products = multiply(launcher, [weights[i] for i in part], flat, dtype, bare)
            results.update(zip(part, products, strict=True))
    return [results[i].reshape(*x.shape[:-1], weight.rows) for i, weight in enumerate(weights)]


def _launch_key(weight: DeviceMatrix, bare: bool) -> tuple[int, int, int]:
    """Equal for matrices that can share a transform of x and a launch. A matrix with input scales shares with none."""
    return weight.seed, weight.L, 0 if bare or weight.input_factors is None else id(weight)


def _transformed(
    launcher: Launcher, weight: DeviceMatrix, x: torch.Tensor, mode: int, bare: bool
) -> Activations:
    return activations.forward(launcher, x, weight.seed, mode, None if bare else weight.input_factors)


def _small(
    launcher: Launcher, weights: Sequence[DeviceMatrix], x: torch.Tensor, dtype: torch.dtype, bare: bool
) -> list[torch.Tensor]:
    batch = x.shape[0]
    outputs = [launcher.empty((batch, weight.rows), dtype) for weight in weights]
    if batch == 0:
        return outputs
    kernel = product_launch.kernel_for(batch)
    transformed = _transformed(launcher, weights[0], x, kernel.mode, bare)
    addends = [None if bare else _small_lowrank(launcher, weight, x, transformed) for weight in weights]
    product_launch.launch(launcher, kernel, weights, transformed, outputs, addends)
    return outputs


def _small_lowrank(
    launcher: Launcher, weight: DeviceMatrix, x: torch.Tensor, transformed: Activations
) -> torch.Tensor | None:
    """The low-rank part times x, float32 [batch, rows], or None."""
    if weight.lowrank is None:
        return None
    right, left = weight.lowrank
    kernel = product_launch.kernel_for(x.shape[0])
    if right.seed != weight.seed:
        transformed = activations.forward(launcher, x, right.seed, kernel.mode, weight.input_factors)
    z = launcher.empty((x.shape[0], right.rows), torch.float32)
    product_launch.launch(launcher, kernel, [right], transformed, [z])
    summed = launcher.empty((x.shape[0], left.cols_padded), torch.float32)
    parameters = p.LowRank(
        blob=left.blob.data_ptr(),
        group_offset=left.group_offset.data_ptr(),
        z=z.data_ptr(),
        out=summed.data_ptr(),
        rank=left.rows,
        cols_padded=left.cols_padded,
    )
    grid = (ceil_div(left.cols_padded, 64 * _LOWRANK_WARPS), x.shape[0])
    launcher.launch(Launch("lowrank_columns", grid, 32 * _LOWRANK_WARPS, 0, parameters, left.L))
    return activations.inverse(launcher, summed, left.cols, left.seed)


def _large(
    launcher: Launcher, weights: Sequence[DeviceMatrix], x: torch.Tensor, dtype: torch.dtype, bare: bool
) -> list[torch.Tensor]:
    transformed = _transformed(launcher, weights[0], x, p.TO_BFLOAT, bare).values
    outputs = []
    for weight in weights:
        y = launcher.empty((x.shape[0], weight.rows), torch.bfloat16)
        _by_panels(launcher, weight, transformed, y)
        if not bare and weight.lowrank is not None:
            right, left = weight.lowrank
            basis = transformed
            if right.seed != weight.seed:
                basis = activations.forward(launcher, x, right.seed, p.TO_BFLOAT, weight.input_factors).values
            z = launcher.empty((x.shape[0], right.rows), torch.bfloat16)
            _by_panels(launcher, right, basis, z)
            # Decoded rows of `left` are in the transformed basis, so one inverse transform of the sum suffices.
            summed = z @ rows.decode(left, dtype=torch.bfloat16)
            y = y + activations.inverse(launcher, summed, left.cols, left.seed)
        outputs.append(y.to(dtype))
    return outputs


def _by_panels(launcher: Launcher, weight: DeviceMatrix, transformed: torch.Tensor, y: torch.Tensor) -> None:
    """y = transformed W^T, both bfloat16, without the low-rank part."""
    panel = min(weight.rows, max(TILE, PANEL_BYTES // (2 * weight.cols_padded) // TILE * TILE))
    scratch = launcher.empty((panel * weight.cols_padded,), torch.bfloat16)
    for begin in range(0, weight.rows, panel):
        end = min(weight.rows, begin + panel)
        decoded = rows.decode(weight, begin, end, torch.bfloat16, out=scratch)
        torch.mm(transformed, decoded.T, out=y[:, begin:end])
