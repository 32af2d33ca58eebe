"""Factors that the experts of a stack share: those of their pool.

A large stack of experts has full moments of the pool P of all experts only. An expert's moment is R P R with a diagonal
R (`statistics/experts.py`). The pool is factored once. Every expert then takes O(n²) operations instead of O(n³), and
the loss of the feedback that is used, under the expert's own moment, is computed exactly:

- Inputs: with L of T P Tᵀ + damping = L D Lᵀ (T is the transform), an error η L⁻¹ loses tr(L⁻¹ Hₜ L⁻ᵀ) = ⟨H, S⟩, where
  Hₜ is the expert's H in the transformed basis and S is (L Lᵀ)⁻¹ in the original one.
- Outputs: G is not transformed, so R M R⁻¹ would be the expert's own factor if damping were in proportion to R². It is
  not: with damping δ of the expert and δ' of the pool the loss of row r counts by
  R_r² (C_rr + Σ_k (M⁻¹)_rk² (δ / R_k² - δ')).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ciuic_cli.codecs.transform import inverse_transform, padded
from ciuic_cli.passes.feedback import (
    BlockLDL,
    FactoredInputs,
    columns_of,
    factor_inputs,
    factor_outputs,
    input_damping,
    output_damping,
)
from ciuic_cli.passes.linear_algebra import inverse_lower
from ciuic_cli.process.threads import one_thread

_RATIO_FLOOR = 1e-3
"""Least R_r, as a share of the root mean square of R: the feedback is divided by it (chosen, not tuned)."""


@dataclass(frozen=True)
class SharedInputs:
    """The factors of a pool's H (n, n), for all experts of its stack. inverse: S of the top of this file, (n, n)
    float32; inverse_trace: tr((L Lᵀ)⁻¹), by which damping counts."""

    factored: FactoredInputs
    inverse: torch.Tensor
    inverse_trace: float

    def of(self, moment: torch.Tensor) -> FactoredInputs:
        """The pool's factors with tr(D) as it is under an expert's H (n, n) float32."""
        ldl = self.factored.ldl
        with one_thread():
            trace = (moment * self.inverse).sum(1).double().sum()
            trace = trace + input_damping(moment.diagonal().sum() / len(ldl.d_diagonal)) * self.inverse_trace
            d_diagonal = ldl.d_diagonal * (trace / ldl.d_diagonal.double().sum()).float()
        return FactoredInputs(self.factored.block_order, replace(ldl, d_diagonal=d_diagonal))


def share_inputs(pool: torch.Tensor) -> SharedInputs | None:
    """Factor a pool's H (n, n) float32; None if it cannot be factored."""
    factored = factor_inputs(pool)
    factor = factored.ldl.factor
    if factor is None:
        return None
    inverted = inverse_lower(factor)
    columns, inverse = columns_of(factored.block_order), torch.empty_like(factor)
    inverse[columns[:, None], columns] = inverted.T @ inverted
    with one_thread():
        trace = float(inverse.diagonal().double().sum())
    inverse = inverse_transform(inverse_transform(inverse, len(pool)).T, len(pool))
    return SharedInputs(factored, inverse, trace)


@dataclass(frozen=True)
class SharedOutputs:
    """The factors of a pool's G (m, m), for all experts of its stack. m16 is m padded to a multiple of 16.

    squares: (M⁻¹)∘(M⁻¹), (m16, m16) float32. damping: δ' of the top of this file.
    """

    ldl: BlockLDL
    squares: torch.Tensor
    damping: float

    def of(self, ratios: torch.Tensor, moment: torch.Tensor) -> BlockLDL:
        """An expert's factors: R M R⁻¹, and the diagonal with which its rows' errors count.

        ratios: the diagonal of R, (m,) float32. moment: the expert's G, R P R, (m, m) float32.
        """
        assert self.ldl.factor is not None
        with one_thread():
            ratios = ratios.clamp_min(_RATIO_FLOOR * ratios.square().mean().sqrt())
            damping = output_damping(moment.diagonal().mean())
        ratios = torch.where(ratios > 0, ratios, 1.0)
        ratios = torch.nn.functional.pad(ratios, (0, padded(len(ratios)) - len(ratios)), value=1.0)
        added = (self.squares * (damping / ratios.square() - self.damping)).sum(1)
        d_diagonal = ratios.square() * (self.ldl.d_diagonal + added)
        factor = ratios[:, None] * self.ldl.factor / ratios
        return BlockLDL(factor, d_diagonal, self.ldl.damping)


def share_outputs(pool: torch.Tensor) -> SharedOutputs | None:
    """Factor a pool's G (m, m) float32; None if it is diagonal or cannot be factored."""
    ldl = factor_outputs(pool)
    if ldl.factor is None:
        return None
    inverted = inverse_lower(ldl.factor)
    with one_thread():
        damping = float(output_damping(pool.diagonal().mean()))
    return SharedOutputs(ldl, inverted.square_(), damping)
