"""The Kronecker-factored Fisher information of a weight matrix: the loss that all passes minimise."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ciuic_cli.passes.chunk_size import part_slices


@dataclass(frozen=True)
class Contexts:
    """Context vectors v (m, n) of a head's rows, in bfloat16 as the statistics store them. That of row r is

        v_r = row_factors_r · vectors_r · column_factors

    Attributes:
        vectors: (m, n) bfloat16.
        row_factors: (m,) float32. column_factors: (n,) float32; None: 1.
    """

    vectors: torch.Tensor
    row_factors: torch.Tensor
    column_factors: torch.Tensor | None = None

    def rows(self, which: slice | torch.Tensor) -> Contexts:
        """Those of some rows. which: a slice, or (k,) int64 row numbers."""
        return Contexts(self.vectors[which], self.row_factors[which], self.column_factors)

    def to(self, device: torch.device) -> Contexts:
        """The same on a device; without a copy if they are there."""
        columns = None if self.column_factors is None else self.column_factors.to(device)
        return Contexts(self.vectors.to(device), self.row_factors.to(device), columns)

    def float32(self) -> torch.Tensor:
        """v (m, n) float32, a new tensor: twice the memory of `vectors`."""
        v = self.vectors.to(torch.float32, copy=True).mul_(self.row_factors[:, None])
        return v if self.column_factors is None else v.mul_(self.column_factors)


@dataclass(frozen=True)
class KroneckerFisher:
    """Quadratic loss of one weight matrix W (m outputs, n inputs): an error E causes a KL of ½ tr(Eᵀ G E H) per token.

    Source: K-FAC (Martens & Grosse 2015). Created by `allocation.matrices.fisher_of` from the statistics.

    Attributes:
        inputs: H, (n, n) float32.
        outputs: G, (m, m) float32, or its diagonal, (m,).
        contexts: v (m, n), or None. With contexts the input moment of row r is H + v_r v_rᵀ.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    contexts: Contexts | None = None

    def to(self, device: torch.device) -> KroneckerFisher:
        """The same on a device; itself if it is there."""
        contexts = None if self.contexts is None else self.contexts.to(device)
        return KroneckerFisher(self.inputs.to(device), self.outputs.to(device), contexts)

    def reordered(self, order: torch.Tensor) -> KroneckerFisher:
        """The Fisher information of W[order]; order: (k,) int64, distinct row numbers."""
        outputs = self.outputs[order] if self.outputs.dim() == 1 else _in_order(self.outputs, order)
        contexts = None if self.contexts is None else self.contexts.rows(order)
        return KroneckerFisher(self.inputs, outputs, contexts)


def _in_order(moment: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """moment[order][:, order] (k, k) of a moment (n, n), without a matrix (k, n)."""
    ordered = moment.new_empty(len(order), len(order))
    for part in part_slices(ordered):
        torch.index_select(moment[order[part]], 1, order, out=ordered[part])
    return ordered
