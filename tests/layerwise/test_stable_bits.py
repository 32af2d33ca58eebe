"""Products and the gradient of softmax have the same bits for any number of threads, and the right values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ciuic_cli.layerwise.operations import stable_bits as module
from ciuic_cli.layerwise.operations.stable_bits import outer_product, stable_bits
from ciuic_cli.process.threads import parallel_map, threads

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_with_any_number_of_rows_have_few_shapes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, numbers = torch.Generator().manual_seed(0), set()
    pad = torch.nn.functional.pad

    def noted(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        numbers.add(len(x) + sizes[-1])
        return pad(x, sizes)

    monkeypatch.setattr(torch.nn.functional, "pad", noted)
    w = torch.randn(48, 56, generator=random, dtype=dtype)
    for rows in (0, 1, 15, 31, 32, 33, 500, 1000, 1056):
        x = torch.randn(rows, 56, generator=random, dtype=dtype).requires_grad_(True)
        with stable_bits(CPU):
            product = torch.nn.functional.linear(x, w)
            product.sum().backward()
        assert product.shape == (rows, 48) and x.grad is not None and x.grad.shape == x.shape
        torch.testing.assert_close(product, x.detach() @ w.T)
        torch.testing.assert_close(x.grad, torch.ones(rows, 48, dtype=dtype) @ w)
    assert numbers == {32, 64, 512, 1024, 1088}


def test_bfloat16_products_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor needs it, products run with one number of threads, or with one thread beside others."""
    monkeypatch.setattr(module, "_bfloat16_depends_on_threads", lambda: True)
    random, used = torch.Generator().manual_seed(0), []
    x, w, bias = (torch.randn(size, generator=random).bfloat16() for size in ((300, 96), (256, 96), (256,)))
    batches = torch.stack([x, x]), torch.stack([w.T, w.T])
    product = module._bfloat16_product

    def noted(*arguments: Any) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(module, "threads", lambda number: (used.append(number), threads(number))[1])
            return product(*arguments)

    monkeypatch.setattr(module, "_bfloat16_product", noted)

    def products(_: int = 0) -> list[torch.Tensor]:
        with stable_bits(CPU):
            return [
                torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w, bias), torch.bmm(*batches)
            ]  # fmt: skip

    found = []
    for number in (1, 2, 3, 5):
        with threads(number):
            found.append(products())
            assert torch.get_num_threads() == number
    assert used == 4 * 3 * [module._BFLOAT16_THREADS]
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
    exact = x.double() @ w.double().T
    for product_found, expected in zip(
        found[0], (exact, exact + bias.double(), exact.expand(2, -1, -1)), strict=True
    ):
        torch.testing.assert_close(product_found, expected.bfloat16(), rtol=0.02, atol=0.05)
    used.clear()
    list(parallel_map(range(2), products, lambda _: 2))
    assert not used


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
