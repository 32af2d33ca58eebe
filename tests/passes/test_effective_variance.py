"""Rows whose transform blocks differ in energy: the best scale, and the error at that scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.codecs.transform import block_width
from ciuic_cli.codecs.trellis import round_matrix
from ciuic_cli.passes.effective_variance import effective_variance
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.prepare import prepare

L, WIDTH, BLOCKS = 12, 64, 9


def _rows(loud: int, times: float, rows: int = 64) -> torch.Tensor:
    """Gaussian rows of mean variance 1, whose first `loud` blocks have `times` the variance of the others."""
    variance = torch.ones(BLOCKS)
    variance[:loud] = times
    draw = torch.randn(rows, BLOCKS, WIDTH, generator=torch.Generator().manual_seed(0))
    return (draw * (variance / variance.mean()).sqrt()[:, None]).flatten(1)


def _variances(rows: torch.Tensor) -> torch.Tensor:
    return effective_variance(rows.square().unflatten(1, (BLOCKS, WIDTH)).mean(2), WIDTH)


def _error(rows: torch.Tensor, bits: int, rms: torch.Tensor) -> float:
    """Mean squared error relative to that of the code on a unit Gaussian."""
    scale = (rms * SCALE_BY_L[L][bits]).numpy()
    decoded = round_matrix(rows, scale, np.full(len(rows) // 16, bits, np.uint8), L=L)[1]
    return float((decoded - rows).square().mean()) / (MSE_BY_L[L][bits] * 4.0**-bits)


@pytest.mark.parametrize("width", [16, 64, 1024])
def test_homogeneous_rows_have_their_own_variance(width: int) -> None:
    rows = torch.randn(4000, 3, width, generator=torch.Generator().manual_seed(width))
    found = effective_variance(rows.square().mean(2), width)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.01)


def test_a_single_block_has_its_own_variance() -> None:
    squares = torch.rand(10, 1)
    torch.testing.assert_close(effective_variance(squares, 1024), squares[:, 0])


def test_rows_of_zeros_have_no_variance() -> None:
    assert not effective_variance(torch.zeros(2, 3), 64).any()


@pytest.mark.parametrize("cols", [192, 70])
def test_rms_follows_the_transform_blocks_in_any_column_order(cols: int) -> None:
    draw = torch.Generator().manual_seed(cols)
    weight = torch.randn(48, cols, generator=draw) * torch.linspace(0.1, 3.0, cols)
    basis = torch.randn(300, cols, generator=draw) * torch.linspace(2.0, 0.5, cols)
    prepared = prepare(weight.clone(), KroneckerFisher(basis.T @ basis, torch.ones(48)))
    assert prepared.block_order is not None
    assert not torch.equal(prepared.block_order, prepared.block_order.sort().values)
    width = block_width(cols)
    squares = torch.nn.functional.pad(weight, (0, -cols % 16)).square().unflatten(1, (-1, width)).mean(2)
    torch.testing.assert_close(prepared.rms, effective_variance(squares, width).sqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [3, 4, 5])
@pytest.mark.parametrize(("loud", "times"), [(1, 4), (1, 16), (3, 4), (5, 4)])
def test_the_error_is_that_of_the_homogeneous_row(bits: int, loud: int, times: float) -> None:
    rows = _rows(loud, times)
    variances = _variances(rows)
    found = _error(rows, bits, variances.sqrt())
    assert math.log(found / float(variances.mean())) == pytest.approx(0.0, abs=0.45)
    assert found < _error(rows, bits, rows.square().mean(1).sqrt())
    assert found < 1.25 * min(_error(rows, bits, other * variances.sqrt()) for other in (0.8, 1.25))
