"""Products with routed experts: all (token, expert) pairs of a forward call in one launch."""

from __future__ import annotations

import torch

from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import activations, product_launch
from ciuic_cli.kernels.launcher import Launcher, launcher_for
from ciuic_cli.kernels.matrix import DeviceStack
from ciuic_cli.kernels.multiply import linear
from ciuic_cli.kernels.product_launch import Pairs

LARGEST_LAUNCH = 512
"""Most pairs of one launch (chosen, not tuned). More are multiplied expert by expert, and the host waits for the
device."""

_FEW_TOKENS = 16
"""Up to this many tokens the kernel with the fewest pairs per block is used, because few tokens share an expert
(chosen, not tuned)."""


def experts(
    stack: DeviceStack,
    x: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token times the experts it is routed to.

    Pairs are sorted by expert on the device, so that an expert is decoded once for the tokens that share it. With up to
    LARGEST_LAUNCH pairs the host does not wait for the device, so a CUDA graph can capture the call.

    Args:
        stack: E experts (rows, cols).
        x: float32, float16 or bfloat16 [tokens, cols].
        ids: integer [tokens, k], the experts of each token; an id outside 0 to E - 1 makes zeros.
        dtype: of the result; default x's.
        positions: int32 [E, rows], where each row of an expert is stored; default: in its own order.

    Returns:
        [tokens, k, rows], the rows of each expert in its order.

    Raises:
        UsageError: shapes, dtypes or devices do not fit.
        EnvironmentFault: the kernels cannot be compiled or launched.
    """
    flat = activations.check(x, stack.cols, stack.blob)
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise UsageError(
            f"expected x [tokens, cols] and ids [tokens, k], got {list(x.shape)} and {list(ids.shape)}"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.device != x.device:
        raise UsageError(f"expert ids must be integers on {x.device}, not {ids.dtype} on {ids.device}")
    dtype = x.dtype if dtype is None else dtype
    if dtype not in activations.TYPES:
        raise UsageError(f"the product cannot be of {dtype}")
    launcher = launcher_for(stack.blob.device)
    tokens, k = ids.shape
    if ids.numel() == 0:
        return launcher.empty((tokens, k, stack.rows), dtype)
    # The sort is stable, so that a pair is in the same fragment every time and results repeat exactly.
    in_order, order = torch.sort(ids.reshape(-1), stable=True)
    if ids.numel() > LARGEST_LAUNCH:
        y = _one_by_one(stack, flat, in_order, order, k, dtype, positions)
    else:
        y = _one_launch(launcher, stack, flat, in_order, order, k, dtype)
        if (
            positions is not None
        ):  # gather takes an index of eight bytes per element of y, so not for many pairs
            y = y.gather(1, positions[ids.reshape(-1).clamp(0, stack.count - 1)].to(torch.int64))
    return y.reshape(tokens, k, stack.rows)


def _one_launch(
    launcher: Launcher,
    stack: DeviceStack,
    x: torch.Tensor,
    in_order: torch.Tensor,
    order: torch.Tensor,
    k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    count = order.numel()
    pairs = Pairs(
        in_order.clamp(-1, stack.count).to(torch.int32),
        (order // k).to(torch.int32),
        order.to(torch.int32),
        stack.count,
    )
    # If more tokens share an expert than a fragment holds, several blocks share the work.
    kernel = product_launch.kernel_for(4 if x.shape[0] <= _FEW_TOKENS else 16)
    y = launcher.empty((count, stack.rows), dtype)
    transformed = activations.forward(launcher, x, stack.seed, kernel.mode)
    product_launch.launch(launcher, kernel, [stack], transformed, [y], pairs=pairs)
    return y


def _one_by_one(
    stack: DeviceStack,
    x: torch.Tensor,
    in_order: torch.Tensor,
    order: torch.Tensor,
    k: int,
    dtype: torch.dtype,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    y = torch.zeros((order.numel(), stack.rows), dtype=dtype, device=x.device)
    used, counts = torch.unique_consecutive(in_order, return_counts=True)
    for expert, pairs in zip(used.tolist(), order.split(counts.tolist()), strict=True):
        if 0 <= expert < stack.count and not stack.experts[expert].is_zero:
            (stored,) = linear([stack.experts[expert]], x[pairs // k], dtype)
            y[pairs] = stored if positions is None else stored.index_select(-1, positions[expert])
    return y
