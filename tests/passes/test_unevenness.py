"""Rows that are louder in some blocks of the transform: the scale that suits them, and what they cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.codecs.transform import block_width
from ciuic_cli.codecs.trellis import round_matrix
from ciuic_cli.passes.quantize import KroneckerFisher, prepare
from ciuic_cli.passes.unevenness import even_square

WINDOW, WIDTH, BLOCKS = 12, 64, 9


def _rows(loud: int, times: float, rows: int = 64) -> torch.Tensor:
    """Gaussian rows whose first blocks have so many times the variance of the others; 1 on the average."""
    variance = torch.ones(BLOCKS)
    variance[:loud] = times
    draw = torch.randn(rows, BLOCKS, WIDTH, generator=torch.Generator().manual_seed(0))
    return (draw * (variance / variance.mean()).sqrt()[:, None]).flatten(1)


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return even_square(rows.square().unflatten(1, (BLOCKS, WIDTH)).mean(2), WIDTH)


def _error(rows: torch.Tensor, bits: int, rms: torch.Tensor) -> float:
    """Mean squared error, as a share of what the code leaves of a unit Gaussian."""
    scale = (rms * SCALE_BY_L[WINDOW][bits]).numpy()
    decoded = round_matrix(rows, scale, np.full(len(rows) // 16, bits, np.uint8), L=WINDOW)[1]
    return float((decoded - rows).square().mean()) / (MSE_BY_L[WINDOW][bits] * 4.0**-bits)


@pytest.mark.parametrize("width", [16, 64, 1024])
def test_even_rows_count_as_they_are(width: int) -> None:
    rows = torch.randn(4000, 3, width, generator=torch.Generator().manual_seed(width))
    found = even_square(rows.square().mean(2), width)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.01)


def test_a_single_block_is_as_it_is() -> None:
    squares = torch.rand(10, 1)
    torch.testing.assert_close(even_square(squares, 1024), squares[:, 0])


def test_rows_of_zeros_are_nothing() -> None:
    assert not even_square(torch.zeros(2, 3), 64).any()


@pytest.mark.parametrize("cols", [192, 70])
def test_a_prepared_row_has_the_blocks_of_the_transform(cols: int) -> None:
    """Whatever order its tiles lie in."""
    draw = torch.Generator().manual_seed(cols)
    weight = torch.randn(48, cols, generator=draw) * torch.linspace(0.1, 3.0, cols)
    basis = torch.randn(300, cols, generator=draw) * torch.linspace(2.0, 0.5, cols)
    prepared = prepare(weight.clone(), KroneckerFisher(basis.T @ basis, torch.ones(48)))
    assert prepared.blocks is not None and not torch.equal(prepared.blocks, prepared.blocks.sort().values)
    width = block_width(cols)
    squares = torch.nn.functional.pad(weight, (0, -cols % 16)).square().unflatten(1, (-1, width)).mean(2)
    torch.testing.assert_close(prepared.rms, even_square(squares, width).sqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [3, 4, 5])
@pytest.mark.parametrize(("loud", "times"), [(1, 4), (1, 16), (3, 4), (5, 4)])
def test_the_error_is_that_of_the_even_row(bits: int, loud: int, times: float) -> None:
    rows = _rows(loud, times)
    squares = _squares(rows)
    found = _error(rows, bits, squares.sqrt())
    assert math.log(found / float(squares.mean())) == pytest.approx(0.0, abs=0.45)
    assert found < _error(rows, bits, rows.square().mean(1).sqrt())
    assert found < 1.25 * min(_error(rows, bits, other * squares.sqrt()) for other in (0.8, 1.25))
