"""The Kronecker-factored Fisher information of a weight matrix: the loss that all passes minimise."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KroneckerFisher:
    """Quadratic loss of one weight matrix W (m outputs, n inputs): an error E causes a KL of ½ tr(Eᵀ G E H) per token.

    Source: K-FAC (Martens & Grosse 2015). Created by `allocation.matrices.fisher_of` from the statistics.

    Attributes:
        inputs: H, (n, n) float32.
        outputs: G, (m, m) float32, or its diagonal, (m,).
        contexts: v, (m, n) float32, or None. With contexts the input moment of row r is H + v_r v_rᵀ.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    contexts: torch.Tensor | None = None

    def to(self, device: torch.device) -> KroneckerFisher:
        """The same on a device; itself if it is there."""
        contexts = None if self.contexts is None else self.contexts.to(device)
        return KroneckerFisher(self.inputs.to(device), self.outputs.to(device), contexts)

    def reordered(self, order: torch.Tensor) -> KroneckerFisher:
        """The Fisher information of W[order]; order: (k,) int64, distinct row numbers."""
        outputs = self.outputs[order]
        contexts = None if self.contexts is None else self.contexts[order]
        return KroneckerFisher(self.inputs, outputs if outputs.dim() == 1 else outputs[:, order], contexts)
