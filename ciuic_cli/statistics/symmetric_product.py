"""Symmetric matrix products of which only half is computed."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch

from ciuic_cli.codecs import native
from ciuic_cli.integers import ceil_div
from ciuic_cli.layerwise.stable_bits import outer_product
from ciuic_cli.process.threads import one_thread
from ciuic_cli.profiling.account import count_native
from ciuic_cli.statistics import lower_half

MIN_BLOCK_COLUMNS = 128
"""Least columns per block: with fewer, the half that is saved does not pay for several small products. No measurement
is on record."""
MAX_BLOCKS = 8
"""Most blocks per product: with k blocks, (k + 1) / 2k of the product is computed. No measurement is on record."""


def symmetric_product(
    left: torch.Tensor,
    right: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    rounded: bool = False,
) -> torch.Tensor:
    """leftᵀ right, where the caller knows that it is symmetric; the upper triangle is mirrored from the lower.

    The sums are float32. Rounded to bfloat16, a moment with one large direction is no longer positive definite
    (measured: docs/experiments/statistics/float32-moments.md). The same happens if two different factors are rounded
    separately, so `dtype` only applies to leftᵀ left on a GPU, which can multiply bfloat16 factors into float32.

    With `rounded`, factors and result are rounded to `dtype` anyway. So (i, j) has an error of about 2^-8 of the root
    of (i, i) times (j, j) with bfloat16. That is harmless where the diagonal is raised or the rest shrunk afterwards.

    Args:
        left, right: (..., t, n) float32; the same tensor object for a Gram matrix.
        dtype: to which factors are rounded.

    Returns:
        (..., n, n) float32.
    """
    if left is right and left.device.type == "cuda" and dtype != torch.float32 and left.dim() == 2:
        rounded_factor = left.to(dtype)
        return torch.mm(rounded_factor.T, rounded_factor, out_dtype=torch.float32)
    cols = left.shape[-1]
    moment = torch.empty((*left.shape[:-2], cols, cols), device=left.device)
    columns = left.mT.to(dtype if rounded else left.dtype).contiguous()
    other_columns = columns if left is right else right.mT.to(columns.dtype).contiguous()
    count = max(1, min(MAX_BLOCKS, cols // MIN_BLOCK_COLUMNS))
    # Blocks of equal size: the bits of a product with few columns depend on the number of threads.
    step = ceil_div(cols, count)
    for begin in range(0, cols, step):
        end = min(begin + step, cols)
        block = moment[..., begin:end, :end]
        block.copy_(row_products(columns[..., begin:end, :], other_columns[..., :end, :]))
        moment[..., :begin, begin:end] = block[..., :begin].mT
    return moment


def add_symmetric_product(
    moment: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    rounded: bool = False,
) -> None:
    """Add leftᵀ right, where the caller knows that it is symmetric, to `moment` (n, n) float32.

    Only its lower half is read and written (`lower_half.py`). The arguments are those of
    `symmetric_product`, but left and right are (t, n), float32 or bfloat16. CPUs with the instructions for it use a
    kernel of our own, which reads the factors as they lie in memory; torch's products need transposed copies
    (measured: docs/experiments/statistics/native-sums.md).
    """
    rounds = rounded and dtype != torch.float32
    if moment.device.type != "cpu" or not _has_kernel(rounds):
        factor = left.float()
        other = factor if left is right else right.float()
        lower_half.add(moment, symmetric_product(factor, other, dtype, rounded=rounded))
        return
    factor = left.contiguous()
    other = factor if left is right else right.contiguous()
    tokens, cols = factor.shape
    status = native.interface().ciuic_symmetric_sums(
        moment.data_ptr(), cols, factor.data_ptr(), factor.dtype == torch.bfloat16,
        other.data_ptr(), other.dtype == torch.bfloat16, tokens, rounds, torch.get_num_threads(),
    )  # fmt: skip
    native.check(status, "adding moments")
    _count(moment, tokens, rounds, factor.nbytes + (0 if left is right else other.nbytes))


def add_weighted_product(
    moment: torch.Tensor,
    vectors: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    rounded: bool = False,
) -> None:
    """Add Σ XᵀWX over parts X (t, n) of sequences with weights W (t, t) to the lower half of `moment` (n, n) float32.

    On a matrix unit, W is rounded to bfloat16. If W is far from singular, that changes XᵀWX by the same small share in
    every direction. W X is float32, or rounded to `dtype` with `rounded`; see `symmetric_product`.

    Args:
        vectors: (parts, t, n) float32 or bfloat16.
        weights: (parts, t, t) float32, symmetric.
    """
    rounds = rounded and dtype != torch.float32
    parts, length, cols = vectors.shape
    tokens = parts * length
    if moment.device.type == "cpu" and dtype == torch.bfloat16 and _weighs(rounds, length):
        factor, rounded_weights = vectors.contiguous(), weights.to(dtype)
        status = native.interface().ciuic_weighted_sums(
            moment.data_ptr(), cols, factor.data_ptr(), factor.dtype == torch.bfloat16, rounded_weights.data_ptr(),
            length, tokens, rounds, torch.get_num_threads(),
        )  # fmt: skip
        native.check(status, "adding weighted moments")
        count_native(dtype, 2 * tokens * length * cols, rounded_weights.nbytes)
        _count(moment, tokens, rounds, factor.nbytes)
        return
    weighted = weights.to(dtype) @ vectors.to(dtype) if rounds else weights @ vectors.float()
    add_symmetric_product(moment, vectors.flatten(0, 1), weighted.flatten(0, 1), dtype, rounded=rounded)


def _count(moment: torch.Tensor, tokens: int, rounds: bool, read: int) -> None:
    cols = len(moment)
    dtype = torch.bfloat16 if rounds else torch.float32
    count_native(dtype, tokens * cols * (cols + 1), read + moment.nbytes)


@functools.cache
def _has_kernel(rounded: bool) -> bool:
    return bool(native.interface().ciuic_has_symmetric_sums(rounded))


@functools.cache
def _weighs(rounded: bool, length: int) -> bool:
    return bool(native.interface().ciuic_has_weighted_sums(rounded, length))


def row_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left rightᵀ (..., m, n) in the dtype of left (..., m, k) and right (..., n, k), best contiguous."""
    if left.dim() == 2 and left.dtype == torch.float32:
        return outer_product(left, right)
    # The bits of MKL's float32 batches depend on the number of threads. So do those of oneDNN if it multiplies with
    # AMX, because it splits a long sum among the threads.
    with one_thread() if left.dim() == 2 or left.dtype == torch.float32 else nullcontext():
        return left @ right.mT
