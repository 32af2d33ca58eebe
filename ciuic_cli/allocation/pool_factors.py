"""Where a phase factors Fisher information, and the factors of expert pools that it keeps while their stack is in work.

Matrices are taken stack by stack, so few pools have to be kept; `passes/shared_factors.py` says what experts share.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ciuic_cli.allocation.matrices import WeightMatrix
from ciuic_cli.passes.feedback import BlockLDL, FactoredInputs, factor_inputs, factor_outputs
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.shared_factors import SharedInputs, SharedOutputs, share_inputs, share_outputs
from ciuic_cli.statistics.files import Statistics

SHARED_INPUT_ROLES = ("expert_gate_up",)
"""Experts that share the factors of H while arms are priced and probed: their inputs are the layer's hidden state. The
inputs of a down projection are channels of one expert; sharing them would cost 0.23 bits per weight. Coding needs an
expert's own factors, which save another 0.06 bits (measured: docs/experiments/scale/shared-factors.md). Factors of G
are shared by all experts and in all phases, which costs nothing."""
KEPT_POOLS = 2
"""Pools whose factors are kept: threads may still work on a stack when others have begun the next one."""


class PoolFactors:
    """Factors H and G of matrices; experts whose moments are those of their pool but for a diagonal share the pool's.

    Several threads may call the methods. A pool is factored by the first thread that needs it; the others wait.

    Args:
        statistics: of the run. device: where everything is computed.
        for_coding: the factors are for the codes themselves, not for predictions of their loss.
    """

    def __init__(
        self, statistics: Statistics, device: torch.device | None = None, *, for_coding: bool = False
    ) -> None:
        self._statistics, self._for_coding = statistics, for_coding
        self.device = device or torch.device("cpu")
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def inputs(self, matrix: WeightMatrix, fisher: KroneckerFisher) -> FactoredInputs:
        """The factors of H. fisher: of this matrix, on `device`; its H may be overwritten."""
        shares = matrix.role in SHARED_INPUT_ROLES and not self._for_coding
        if shares and self._ratios(matrix, "inputs") is not None:
            shared: SharedInputs | None = self._pool(matrix.name, "inputs", share_inputs)
            if shared is not None:
                return shared.of(fisher.inputs)
        return factor_inputs(fisher.inputs, overwrite=True)

    def outputs(self, matrix: WeightMatrix, fisher: KroneckerFisher) -> BlockLDL:
        """The factors of G for rows in natural order. fisher: of this matrix, on `device`; its G may be overwritten."""
        ratios = self._ratios(matrix, "outputs")
        if ratios is not None:
            shared: SharedOutputs | None = self._pool(matrix.name, "outputs", share_outputs)
            if shared is not None:
                return shared.of(ratios.to(self.device), fisher.outputs)
        return factor_outputs(fisher.outputs.float(), overwrite=True)

    def shares_outputs(self, matrix: WeightMatrix) -> bool:
        """True if the matrix is an expert, and the correlations in its G were collected for its whole pool."""
        return self._ratios(matrix, "outputs") is not None

    def _ratios(self, matrix: WeightMatrix, part: str) -> torch.Tensor | None:
        if matrix.expert is None:
            return None
        return self._statistics.pool_ratios(matrix.name, part, matrix.expert)

    def _pool(self, name: str, part: str, factor: Callable[[torch.Tensor], Any]) -> Any:
        with self._lock:
            if (name, part) not in self._kept:
                pool = self._statistics.pool(name, part)
                assert pool is not None  # an expert's ratios are to it
                while len(self._kept) >= KEPT_POOLS:
                    self._settle()
                    self._kept.popitem(last=False)
                self._kept[name, part] = factor(pool.to(self.device))
                self._settle()
            self._kept.move_to_end((name, part))
            return self._kept[name, part]

    def _settle(self) -> None:
        """Wait for the GPU: threads have streams of their own, and share what is made or freed here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
