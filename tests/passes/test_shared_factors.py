"""Factors that experts share with their pool: exact for the pool itself, and the exact loss for any other expert."""

from __future__ import annotations

import pytest
import torch
from random_moments import random_moment

from ciuic_cli.codecs.transform import transform
from ciuic_cli.passes.feedback import (
    BlockLDL,
    columns_of,
    damp,
    factor_inputs,
    factor_outputs,
    output_damping,
    pad_square,
)
from ciuic_cli.passes.shared_factors import share_inputs, share_outputs


def _ratios(size: int, spread: float) -> torch.Tensor:
    return torch.exp(spread * torch.randn(size, generator=torch.Generator().manual_seed(7)))


def _lost(ldl: BlockLDL, moment: torch.Tensor) -> torch.Tensor:
    """diag(L⁻¹ moment L⁻ᵀ): by how much an error of the code in each place counts after feedback through L."""
    assert ldl.factor is not None
    inverse = torch.linalg.inv(ldl.factor.double())
    return (inverse @ moment.double() @ inverse.T).diagonal()


@pytest.mark.parametrize("size", [96, 100])
def test_inputs_lose_what_the_experts_own_moment_says(size: int) -> None:
    pool, ratios = random_moment(size, 1), _ratios(size, 0.3)
    shared = share_inputs(pool)
    assert shared is not None
    moment = ratios[:, None] * pool * ratios
    block_order, ldl = shared.of(moment)
    in_basis = transform(transform(moment).T)
    damp(in_basis)
    columns = columns_of(block_order)
    lost = float(_lost(ldl, in_basis[columns][:, columns]).sum())
    assert float(ldl.d_diagonal.sum()) == pytest.approx(lost, rel=1e-4)
    own = float(factor_inputs(moment).ldl.d_diagonal.sum())
    assert own < lost < 1.2 * own  # the expert's own factors are the best ones
    same = shared.of(pool)
    torch.testing.assert_close(same.ldl.d_diagonal, factor_inputs(pool).ldl.d_diagonal, rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [96, 100])
def test_outputs_lose_what_the_experts_own_moment_says(size: int) -> None:
    pool, ratios = random_moment(size, 2), _ratios(size, 0.5)
    shared = share_outputs(pool)
    assert shared is not None
    moment = ratios[:, None] * pool * ratios
    ldl = shared.of(ratios, moment)
    damped = moment + output_damping(moment.diagonal().mean()) * torch.eye(size)
    torch.testing.assert_close(
        ldl.d_diagonal[:size].double(), _lost(ldl, pad_square(damped))[:size], rtol=1e-3, atol=1e-6
    )
    own = factor_outputs(moment)
    assert float(own.d_diagonal[:size].sum()) <= float(ldl.d_diagonal[:size].sum()) * (1 + 1e-5)
    assert float(ldl.d_diagonal[:size].sum()) < 1.03 * float(own.d_diagonal[:size].sum())
    same = shared.of(torch.ones(size), pool)
    torch.testing.assert_close(same.factor, factor_outputs(pool).factor)
    torch.testing.assert_close(same.d_diagonal, factor_outputs(pool).d_diagonal, rtol=1e-4, atol=0)


def test_channels_without_variance_do_no_harm() -> None:
    pool = random_moment(48, 3)
    pool[5], pool[:, 5] = 0.0, 0.0
    ratios = torch.ones(48)
    ratios[5] = 0.0
    for found in (
        share_inputs(pool).of(pool).ldl,  # type: ignore[union-attr]
        share_outputs(pool).of(ratios, pool),  # type: ignore[union-attr]
    ):
        assert found.factor is not None and bool(torch.isfinite(found.factor).all())
        assert bool((found.d_diagonal > 0).all())
