"""Symmetric matrix products of which only half is computed."""

from __future__ import annotations

import functools

import torch

from ciuic_cli.codecs import native
from ciuic_cli.integers import ceil_div
from ciuic_cli.layerwise.operations.stable_bits import outer_product
from ciuic_cli.profiling.account import count_native
from ciuic_cli.statistics import lower_half

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
        left, right: (t, n) float32; the same tensor object for a Gram matrix.
        dtype: to which factors are rounded.

    Returns:
        (n, n) float32.
    """
    if left is right and left.device.type == "cuda" and dtype != torch.float32:
        rounded_factor = left.to(dtype)
        return torch.mm(rounded_factor.T, rounded_factor, out_dtype=torch.float32)
    cols = left.shape[1]
    moment = torch.empty(cols, cols, device=left.device)
    columns = left.T.contiguous()
    other_columns = columns if left is right else right.T.contiguous()
    count = max(1, min(MAX_BLOCKS, cols // MIN_BLOCK_COLUMNS))
    # Blocks of equal size: the bits of a product with few columns depend on the number of threads.
    step = ceil_div(cols, count)
    for begin in range(0, cols, step):
        end = min(begin + step, cols)
        block = moment[begin:end, :end]
        block.copy_(outer_product(columns[begin:end], other_columns[:end]))
        moment[:begin, begin:end] = block[:, :begin].T
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

    Only its lower half is read and written (`lower_half.py`). The arguments are those of `symmetric_product`, but left
    and right are (t, n), float32 or bfloat16. With `rounded`, factors are rounded to `dtype` on a CPU, too; the sums
    are float32. CPUs with the instructions for it use a kernel of our own, which reads the factors as they lie in
    memory; torch's products need transposed copies (measured: docs/experiments/statistics/native-sums.md).
    """
    factor = left.contiguous()
    other = factor if left is right else right.contiguous()
    rounds = rounded and dtype != torch.float32 and moment.device.type == "cpu"
    if rounds and not _has_kernel(True):  # then the rounded factors are multiplied like factors that are not
        rounds, factor = False, factor.to(dtype)
        other = factor if left is right else other.to(dtype)
    if moment.device.type != "cpu" or not _has_kernel(rounds):
        factor = factor.float()
        other = factor if left is right else other.float()
        lower_half.add(moment, symmetric_product(factor, other, dtype))
        return
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
    """Add Σ w v vᵀ to the lower half of `moment`, over vectors v (t, n) with weights w (t, 1) that are not negative.

    Vectors are float32 or bfloat16, weights float32. The other arguments are those of `add_symmetric_product`. Factors
    that are rounded must be the same on both sides, so they are v √w. Otherwise, on a CPU, one factor is v as it is:
    AMX multiplies bfloat16 numbers faster than float32 ones.
    """
    if rounded or moment.device.type != "cpu":
        factor = vectors * weights.sqrt()
        add_symmetric_product(moment, factor, factor, dtype, rounded=rounded)
    else:
        add_symmetric_product(moment, vectors, vectors * weights, dtype)


def _count(moment: torch.Tensor, tokens: int, rounds: bool, read: int) -> None:
    cols = len(moment)
    dtype = torch.bfloat16 if rounds else torch.float32
    count_native(dtype, tokens * cols * (cols + 1), read + moment.nbytes)


@functools.cache
def _has_kernel(rounded: bool) -> bool:
    return bool(native.interface().ciuic_has_symmetric_sums(rounded))
