"""Products and the gradient of softmax have the same bits for any number of threads, and the right values."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.layerwise.stable_bits import outer_product, stable_bits
from ciuic_cli.process.threads import threads

CPU = torch.device("cpu")
SHAPES = [(7, 56, 48), (9, 640, 192), (17, 200, 130), (33, 150, 150), (300, 24, 96), (150, 150, 300)]
"""(m, k, n), small or odd."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_products_do_not_depend_on_threads(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    random = torch.Generator().manual_seed(0)
    x, w, bias, g = (torch.randn(size, generator=random) for size in ((m, k), (n, k), (n,), (m, n)))
    batches = torch.randn(3, m, k, generator=random), torch.randn(3, k, n, generator=random)
    cases = (
        lambda: torch.nn.functional.linear(x, w), lambda: torch.nn.functional.linear(x[None], w, bias),
        lambda: g @ w, lambda: g.T @ x, lambda: torch.addmm(g, x, w.T), lambda: torch.bmm(*batches),
    )  # fmt: skip
    exact = (
        x.double() @ w.double().T, x.double() @ w.double().T + bias, g.double() @ w.double(),
        g.double().T @ x.double(), x.double() @ w.double().T + g, torch.bmm(*(each.double() for each in batches)),
    )  # fmt: skip
    for case, expected in zip(cases, exact, strict=True):
        found = []
        for number in (1, 2, 3, 5, 8):
            with threads(number), stable_bits(CPU):
                found.append(case())
        torch.testing.assert_close(found[0].squeeze(0), expected.float(), rtol=1e-4, atol=1e-4)
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_the_gradient_of_softmax_does_not_depend_on_threads() -> None:
    random, found = torch.Generator().manual_seed(0), []
    scores = torch.randn(1, 4, 20, 20, generator=random)
    weights = torch.randn(1, 4, 20, 20, generator=random)
    for number in (1, 2, 3, 5):
        x = scores.clone().requires_grad_(True)
        with threads(number), stable_bits(CPU):
            (x.softmax(-1) * weights).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert all(torch.equal(found[0], other) for other in found[1:])
    exact = scores.double().requires_grad_(True)
    (exact.softmax(-1) * weights).sum().backward()
    assert exact.grad is not None
    torch.testing.assert_close(found[0], exact.grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "cols", "inner"), [(1, 1, 1), (37, 130, 300), (576, 192, 2048)])
def test_outer_products_have_the_precision_of_float32(rows: int, cols: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(inner, rows, generator=generator).T  # not contiguous
    right = torch.randn(cols, inner + 3, generator=generator)[:, 3:]
    found = outer_product(left, right)
    assert found.dtype == torch.float32 and found.shape == (rows, cols)
    exact = left.double() @ right.double().T
    assert float((found - exact).abs().max()) < 1e-5 * inner**0.5
