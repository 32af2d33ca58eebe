"""The interfaces of compressed weights and expert stacks that the operators use, implemented on top of any `Matrix`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ciuic_cli.runtime import products
from ciuic_cli.runtime.matrices import Matrix


class Weight(Protocol):
    """One compressed matrix W (rows, cols)."""

    @property
    def matrix(self) -> Matrix:
        """For gradients and products with part of the rows."""
        ...

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T: [..., cols] to [..., rows] in the dtype of x."""
        ...

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of W: ids integer [...] to `dtype` [..., cols]."""
        ...


class Stack(Protocol):
    """`count` compressed matrices of one shape."""

    count: int

    def expert(self, index: int) -> Matrix: ...

    def product(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, cols], ids integer [T, k]: [T, k, rows] in the dtype of x; zeros where an id is outside the stack."""
        ...


class SmallBatch(NamedTuple):
    """The most rows of x that are multiplied straight from the codes, by the dtype of x."""

    bfloat16: int = products.SMALL_BATCH
    float16: int = products.SMALL_BATCH
    float32: int = products.SMALL_BATCH

    def of(self, dtype: torch.dtype) -> int:
        if dtype == torch.bfloat16:
            return self.bfloat16
        return self.float16 if dtype == torch.float16 else self.float32


SMALL_BATCH = SmallBatch()


class PlainWeight:
    """A weight on top of any `Matrix`."""

    def __init__(self, matrix: Matrix, small_batch: SmallBatch = SMALL_BATCH) -> None:
        self.matrix = matrix
        self.small_batch = small_batch

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y = products.product(self.matrix, x, small_batch=self.small_batch.of(x.dtype))
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `Weight.lookup`. Raises IndexError for an id outside the table."""
        if ids.numel() == 1:
            return self._rows(ids.reshape(1), dtype).reshape(*ids.shape, self.matrix.cols)
        unique, inverse = torch.unique(ids, return_inverse=True)
        return self._rows(unique, dtype)[inverse.reshape(-1)].reshape(*ids.shape, self.matrix.cols)

    def _rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of ids in rising order."""
        if ids.numel() and not 0 <= int(ids[0]) <= int(ids[-1]) < self.matrix.rows:
            raise IndexError(
                f"ids from {int(ids[0])} to {int(ids[-1])}; the embedding has {self.matrix.rows} rows"
            )
        return products.rows_of(self.matrix, ids.to(torch.int64)).to(dtype)


class PlainStack:
    """A stack on top of any matrices: one product per expert that a token is routed to."""

    def __init__(self, experts: tuple[Matrix, ...], small_batch: SmallBatch = SMALL_BATCH) -> None:
        self.experts = experts
        self.small_batch = small_batch
        self.count = len(experts)

    def expert(self, index: int) -> Matrix:
        return self.experts[index]

    def product(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens, k = ids.shape
        rows = self.experts[0].rows
        small_batch = self.small_batch.of(x.dtype)
        y = torch.zeros((tokens * k, rows), dtype=x.dtype, device=x.device)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        used, counts = torch.unique_consecutive(flat[order], return_counts=True)
        for expert, pairs in zip(used.tolist(), order.split(counts.tolist()), strict=True):
            # Ids beyond the last expert are padding; a pruned expert adds nothing.
            if 0 <= expert < self.count and not self.experts[expert].is_zero:
                of_expert = products.product(self.experts[expert], x[pairs // k], small_batch=small_batch)
                y[pairs] = of_expert.to(x.dtype)
        return y.reshape(tokens, k, rows)
