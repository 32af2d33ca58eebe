"""Factors and solves panel by panel against LAPACK's."""

from __future__ import annotations

import math

import pytest
import torch

from ciuic_cli.passes import linear_algebra


def _positive(size: int) -> torch.Tensor:
    x = torch.randn(size, size + 20, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    return x @ x.T / size


@pytest.mark.parametrize("size", [0, 1, 16, 128, 193, 300, 700, 1000])
def test_factor_and_solves_equal_those_of_lapack(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_algebra, "_INVERSE_COLUMNS", 2 * linear_algebra.PANEL)
    matrix = _positive(size)
    lower = linear_algebra.cholesky(matrix)
    assert lower is not None
    torch.testing.assert_close(lower, torch.linalg.cholesky(matrix))
    values = torch.randn(size, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(lower @ linear_algebra.solve_lower(lower, values), values)
    torch.testing.assert_close(lower.T @ linear_algebra.solve_transposed(lower, values), values)
    inverse = linear_algebra.inverse_lower(lower)
    torch.testing.assert_close(inverse @ lower, torch.eye(size, dtype=torch.float64))
    assert torch.equal(inverse, inverse.tril())
    product = linear_algebra.times_lower_transposed(values.T, lower)
    torch.testing.assert_close(product, values.T @ lower.T)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 700])
def test_a_matrix_is_transposed_in_its_own_memory(size: int) -> None:
    matrix = torch.arange(size * size).reshape(size, size)
    expected = matrix.T.clone()
    linear_algebra.transpose(matrix)
    assert torch.equal(matrix, expected)


@pytest.mark.parametrize("size", [300, 900])
@pytest.mark.parametrize("place", [(200, 200), (250, 100)])
@pytest.mark.parametrize("wrong", [-1e3, float("nan"), float("inf")])
def test_a_matrix_that_is_not_positive_definite_has_no_factor(
    wrong: float, place: tuple[int, int], size: int
) -> None:
    matrix = _positive(size)
    matrix[place] = wrong
    assert linear_algebra.cholesky(matrix) is None


def test_damping_is_the_least_power_of_ten_that_suffices() -> None:
    matrix = torch.ones(40, 40, dtype=torch.float64)
    matrix[3, 3] -= 0.003
    assert linear_algebra.cholesky(matrix) is None
    lower, damping = linear_algebra.damped_cholesky(matrix)
    assert lower is not None and damping == 1e-2
    torch.testing.assert_close(lower @ lower.T, matrix + 1e-2 * matrix.diagonal().mean() * torch.eye(40))
    assert linear_algebra.damped_cholesky(_positive(40))[1] == 0.0
    assert linear_algebra.damped_cholesky(-matrix) == (None, math.inf)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (20, 20), (48, 300)])
@pytest.mark.parametrize("rank", [1, 16, 48])
def test_singular_values_equal_those_of_lapack(rows: int, cols: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(size, rank, generator=generator) for size in (rows, cols))
    matrix = left * torch.arange(1, rank + 1) ** -2.0 @ right.T
    u, s, vh = linear_algebra.singular_values(matrix)
    assert u.dtype == s.dtype == vh.dtype == torch.float32
    largest = float(s[0])
    torch.testing.assert_close(s, torch.linalg.svdvals(matrix), rtol=1e-5, atol=1e-6 * largest)
    torch.testing.assert_close(u * s @ vh, matrix, rtol=1e-5, atol=2e-6 * largest)
    torch.testing.assert_close(u.T @ u, torch.eye(rows), rtol=0, atol=1e-5)
    kept = int((s > 1e-5 * largest).sum())
    torch.testing.assert_close(vh[:kept] @ vh[:kept].T, torch.eye(kept), rtol=0, atol=1e-4)


def test_a_matrix_of_zeros_has_no_singular_values() -> None:
    u, s, vh = linear_algebra.singular_values(torch.zeros(3, 7))
    assert not s.any() and not vh.any() and torch.isfinite(u).all()
