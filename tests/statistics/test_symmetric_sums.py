"""Symmetric products that are added to a moment by the native kernels."""

from __future__ import annotations

import pytest
import torch
from instruction_sets import digests

from ciuic_cli.codecs import native
from ciuic_cli.statistics.symmetric_product import add_symmetric_product, add_weighted_product

SHAPES = [(1, 1), (3, 47), (37, 48), (130, 50), (257, 97), (600, 200)]
"""Tokens and columns: fewer and more than a strip, a step and a part of steps."""
EXACT = 2.0**-16
"""Largest error of a product that is not rounded. AMX has it: two numbers in bfloat16 stand for one in float32."""


def _factors(tokens: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two factors whose product is symmetric: rows of numbers, and the same rows times positive numbers."""
    generator = torch.Generator().manual_seed(tokens + cols)
    left = torch.randn(tokens, cols, generator=generator)
    return left, left * torch.rand(tokens, 1, generator=generator)


def _worst(moment: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of the lower half."""
    return float((moment - exact).tril().abs().max())


@pytest.mark.parametrize(("tokens", "cols"), SHAPES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_equal_those_in_float64(tokens: int, cols: int, rounded: bool, dtype: torch.dtype) -> None:
    left, right = (factor.to(dtype) for factor in _factors(tokens, cols))
    if dtype == torch.bfloat16:
        right = left  # products of two rounded factors would not be symmetric
    begin = torch.randn(cols, cols, generator=torch.Generator().manual_seed(1))
    moment = begin.clone()
    add_symmetric_product(moment, left, right, torch.bfloat16, rounded=rounded)
    exact = begin + left.double().T @ right.double()
    scale = (left.double().square().sum(0).sqrt()[:, None] * right.double().square().sum(0).sqrt()).max()
    assert _worst(moment, exact) / (scale + 1) < (2.0**-7 if rounded else EXACT)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_gram_matrix_is_computed_like_a_product_of_two_factors(rounded: bool) -> None:
    left, _ = _factors(300, 130)
    moments = [torch.zeros(130, 130) for _ in range(2)]
    add_symmetric_product(moments[0], left, left, torch.bfloat16, rounded=rounded)
    add_symmetric_product(moments[1], left, left.clone(), torch.bfloat16, rounded=rounded)
    torch.testing.assert_close(
        *(moment.tril() for moment in moments), rtol=1e-2 if rounded else 1e-5, atol=0.5 if rounded else 1e-4
    )


def test_views_are_read_as_they_are() -> None:
    left, right = _factors(64, 40)
    moments = [torch.zeros(40, 40) for _ in range(2)]
    add_symmetric_product(moments[0], left, right)
    add_symmetric_product(moments[1], left.T.contiguous().T, right.repeat(1, 2)[:, :40])
    assert torch.equal(*(moment.tril() for moment in moments))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_weighted_products_are_right_in_every_direction(
    dtype: torch.dtype, products: torch.dtype, rounded: bool
) -> None:
    """Vectors with a direction of nearly all their squares, and weights of several sizes."""
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(700, 100, generator=generator)
    vectors += 10 * torch.randn(700, 1, generator=generator) * torch.randn(100, generator=generator)
    vectors, weights = vectors.to(dtype), torch.logspace(-3, 3, 700)[:, None]
    begin = torch.randn(100, 100, generator=generator)
    moment = begin.clone()
    add_weighted_product(moment, vectors, weights, products, rounded=rounded)
    exact = vectors.double().T @ (weights.double() * vectors.double())
    found = (moment - begin).double().tril()
    if rounded and products == torch.bfloat16:
        assert _worst(found, exact) < 2.0**-7 * float(exact.diagonal().max())
        return
    inverse = torch.linalg.inv(torch.linalg.cholesky(exact))
    shares = torch.linalg.eigvalsh(inverse @ (found + found.tril(-1).T - exact) @ inverse.T)
    assert float(shares.abs().max()) < 0.02


ERRORS = """
import torch
from ciuic_cli.codecs import native
from ciuic_cli.statistics.symmetric_product import add_symmetric_product
worst = {False: 0.0, True: 0.0}
def note(rounded, moment, exact):
    worst[rounded] = max(worst[rounded], float((moment - exact).tril().abs().max() / exact.abs().max()))
for tokens, cols in [(3, 47), (130, 50), (900, 97)]:
    left = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(0))
    right = left * torch.linspace(0, 1, tokens)[:, None]
    exact = left.double().T @ right.double()
    for rounded in worst:
        moment = torch.zeros(cols, cols)
        add_symmetric_product(moment, left, right, torch.bfloat16, rounded=rounded)
        note(rounded, moment, exact)
print(native.cpu_kernels(), f"{worst[False]},{worst[True]}")
"""


def test_all_instruction_sets_add_the_same_up_to_rounding() -> None:
    for name, errors in digests(ERRORS).items():
        exact, rounded = (float(error) for error in errors.split(","))
        assert exact < EXACT and rounded < 2.0**-7, name


def test_the_function_refuses_nonsense() -> None:
    lib = native.interface()
    assert lib.ciuic_symmetric_sums(None, 16, None, 0, None, 0, 16, 0, 1) == -1
    moment, factor = torch.zeros(4, 4), torch.zeros(2, 4)
    arguments = (factor.data_ptr(), 0, factor.data_ptr(), 0, 2, 0)
    assert lib.ciuic_symmetric_sums(moment.data_ptr(), 0, *arguments, 1) == -1
    assert lib.ciuic_symmetric_sums(moment.data_ptr(), 4, *arguments, 0) == -1
