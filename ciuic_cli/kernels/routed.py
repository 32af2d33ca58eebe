"""Routed experts: all (token, expert) pairs of a step in one launch."""

from __future__ import annotations

import torch

from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import activations, product
from ciuic_cli.kernels.launcher import Launcher, launcher_for
from ciuic_cli.kernels.matrix import DeviceStack
from ciuic_cli.kernels.multiply import linear
from ciuic_cli.kernels.product import Pairs

LARGEST_LAUNCH = 512
"""Pairs up to which one launch does them all. Beyond, tokens are gathered expert by expert, which asks the
host."""

_FEW_TOKENS = 16


def experts(
    stack: DeviceStack,
    x: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token times the experts it was sent to.

    A launch sorts its pairs by expert on the device: tokens that share an expert share its decoding, and
    nothing waits for the host, so the step can be captured in a CUDA graph.

    Args:
        stack: E experts (rows, cols).
        x: float32, float16 or bfloat16 [tokens, cols].
        ids: integer [tokens, k], the experts of each token; one outside 0 .. E-1 makes zeros.
        dtype: of the result; default x's.
        positions: int32 [E, rows], where each row of an expert is stored; default: in their own order.

    Returns:
        [tokens, k, rows], the rows of each expert in their own order.

    Raises:
        UsageError: shapes, dtypes or devices that do not fit.
        EnvironmentFault: the kernels cannot be built or launched.
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
    # Stable: the order of a run, and so the fragment that a pair falls into, is the same every time.
    in_order, order = torch.sort(ids.reshape(-1), stable=True)
    if ids.numel() > LARGEST_LAUNCH:
        y = _one_by_one(stack, flat, in_order, order, k, dtype, positions)
    else:
        y = _one_launch(launcher, stack, flat, in_order, order, k, dtype)
        if positions is not None:  # an index as large as y, of eight bytes each: only for few pairs
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
    # Few tokens hardly ever meet at an expert, so the narrowest fragment does; a longer run takes several
    # blocks.
    variants = product.kernels_for(4 if x.shape[0] <= _FEW_TOKENS else 16)
    y = launcher.empty((count, stack.rows), dtype)
    transformed = activations.forward(launcher, x, stack.expert(0).seed, variants[0].mode)
    kernel = product.choose(variants, launcher, [stack.groups], min(count, stack.count))
    product.launch(launcher, kernel, [stack], transformed, [y], pairs=pairs)
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
    hit, counts = torch.unique_consecutive(in_order, return_counts=True)
    for expert, pairs in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        if 0 <= expert < stack.count and not stack.expert(expert).is_zero:
            share = linear([stack.expert(expert)], x[pairs // k], dtype)[0]
            y[pairs] = share if positions is None else share.index_select(-1, positions[expert])
    return y
