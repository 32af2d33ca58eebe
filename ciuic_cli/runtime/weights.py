"""What the operators ask of a compressed weight and of a stack of experts, and how any Matrix gives it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ciuic_cli.codecs.stack import ExpertStack, stack_header_nbytes
from ciuic_cli.runtime import products
from ciuic_cli.runtime.matrices import Matrix


class Weight(Protocol):
    """One compressed matrix W (rows, cols), as the operators use it."""

    matrix: Matrix

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T: [..., cols] to [..., rows] in the dtype of x."""
        ...

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of W: ids integer [...] to [..., cols]."""
        ...


class Stack(Protocol):
    """E compressed matrices of one shape, as the operators use them."""

    count: int

    def expert(self, index: int) -> Matrix: ...

    def product(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, cols], ids integer [T, k]: [T, k, rows] in the dtype of x; zeros where an id is no expert."""
        ...


class PlainWeight:
    """A weight on top of any Matrix."""

    def __init__(self, matrix: Matrix, small_batch: int = products.SMALL_BATCH) -> None:
        self.matrix = matrix
        self.small_batch = small_batch

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y = products.product(self.matrix, x, small_batch=self.small_batch)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Raises IndexError for an id that the table has no row for."""
        wanted, inverse = torch.unique(ids, return_inverse=True)
        if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.matrix.rows:
            raise IndexError(
                f"ids from {int(wanted[0])} to {int(wanted[-1])}; the embedding has {self.matrix.rows} rows"
            )
        table = products.rows_of(self.matrix, wanted.to(torch.int64)).to(dtype)
        return table[inverse.reshape(-1)].reshape(*ids.shape, self.matrix.cols)


class PlainStack:
    """A stack on top of any matrices: expert by expert, only those that are asked for."""

    def __init__(self, experts: tuple[Matrix, ...], small_batch: int = products.SMALL_BATCH) -> None:
        self.experts = experts
        self.small_batch = small_batch
        self.count = len(experts)

    def expert(self, index: int) -> Matrix:
        return self.experts[index]

    def product(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens, k = ids.shape
        rows = self.experts[0].rows
        y = torch.zeros((tokens * k, rows), dtype=x.dtype, device=x.device)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
        for expert, pairs in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
            # Ids beyond the last expert are padding; a pruned expert adds nothing.
            if 0 <= expert < self.count and not self.experts[expert].is_zero:
                share = products.product(self.experts[expert], x[pairs // k], small_batch=self.small_batch)
                y[pairs] = share.to(x.dtype)
        return y.reshape(tokens, k, rows)


def expert_blobs(stack: ExpertStack, blob: torch.Tensor) -> list[torch.Tensor]:
    """The part of a stack's blob that belongs to each expert."""
    sizes = [expert.nbytes for expert in stack.experts]
    begins = np.cumsum([stack_header_nbytes(len(sizes)), *sizes[:-1]]).tolist()
    return [blob[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
