"""`F.linear` of float32 tensors on a CPU without gradients, by the fastest way that this processor has."""

from __future__ import annotations

import functools

import torch

from ciuic_cli.codecs import native
from ciuic_cli.profiling.account import count_native

FEWEST_ROWS = 128
"""Rows from which the matrix unit is taken: for fewer, packing the weights takes longer than their products. Measured:
docs/experiments/statistics/faster-moments.md."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (.., n) times weightᵀ (m, n), plus the bias (m,): float32 (.., m).

    Processors with AMX multiply sums of two bfloat16 numbers, with an error of at most 2^-16 of each product. Others
    take oneDNN's float32: torch itself calls MKL, which is slower on AMD processors. Measured:
    docs/experiments/statistics/faster-moments.md.
    """
    x, weight = x.contiguous(), weight.contiguous()
    rows = x.shape[:-1].numel()
    if rows < FEWEST_ROWS or not _has_kernel():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    columns, depth = weight.shape
    out = torch.empty((*x.shape[:-1], columns))
    status = native.interface().ciuic_dense_product(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, depth, columns, torch.get_num_threads()
    )
    native.check(status, "multiplying float32 matrices")
    count_native(torch.float32, 2 * rows * depth * columns, x.nbytes + weight.nbytes + out.nbytes)
    return out if bias is None else out.add_(bias)


@functools.cache
def _has_kernel() -> bool:
    return bool(native.interface().ciuic_has_dense_product())
