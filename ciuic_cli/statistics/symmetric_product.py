"""Symmetric matrix products in float32, of which only half is computed."""

from __future__ import annotations

import torch

from ciuic_cli.integers import ceil_div

MIN_BLOCK_COLUMNS = 128
"""Least columns per block: with fewer, the half that is saved does not pay for several small products. No measurement
is on record."""
MAX_BLOCKS = 8
"""Most blocks per product: with k blocks, (k + 1) / 2k of the product is computed. No measurement is on record."""


def symmetric_product(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """leftᵀ right, where the caller knows that it is symmetric; the upper triangle is mirrored from the lower.

    The sums are float32. Rounded to bfloat16, a moment with one large direction is no longer positive definite
    (measured: docs/experiments/statistics/float32-moments.md). The same happens if two different factors are rounded
    separately, so `dtype` only applies to leftᵀ left on a GPU, which can multiply bfloat16 factors into float32.

    Args:
        left, right: (..., t, n) float32; the same tensor object for a Gram matrix.
        dtype: to which the factor of a Gram matrix is rounded on a GPU.

    Returns:
        (..., n, n) float32.
    """
    if left is right and left.device.type == "cuda" and dtype != torch.float32:
        rounded = left.to(dtype)
        return torch.mm(rounded.T, rounded, out_dtype=torch.float32)
    cols = left.shape[-1]
    moment = torch.empty((*left.shape[:-2], cols, cols), device=left.device)
    count = max(1, min(MAX_BLOCKS, cols // MIN_BLOCK_COLUMNS))
    # Blocks of equal size: the bits of a product with few columns depend on the number of threads.
    step = ceil_div(cols, count)
    for begin in range(0, cols, step):
        end = min(begin + step, cols)
        block = moment[..., begin:end, :end]
        torch.matmul(left[..., begin:end].mT, right[..., :end], out=block)
        moment[..., :begin, begin:end] = block[..., :begin].mT
    return moment
