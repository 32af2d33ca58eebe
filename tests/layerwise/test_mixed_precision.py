"""Products in bfloat16 beside a float32 stream: models may write a product into a tensor like the layer's input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ciuic_cli.layerwise.mixed_precision import mixed_precision, stable_bits
from ciuic_cli.process.threads import threads

CPU = torch.device("cpu")
ROWS = torch.tensor([2, 0])
Write = Callable[[torch.Tensor, torch.Tensor], object]
WRITES: dict[str, Write] = {
    "assignment": lambda into, product: into.__setitem__(ROWS, product),
    "index_add_": lambda into, product: into.index_add_(0, ROWS, product),
    "index_add_ by name": lambda into, product: into.index_add_(dim=0, index=ROWS, source=product),
    "index_copy_": lambda into, product: into.index_copy_(0, ROWS, product),
    "index_put_": lambda into, product: into.index_put_((ROWS,), product),
    "scatter_add_": lambda into, product: into.scatter_add_(0, ROWS[:, None].expand(2, 4), product),
    "masked_scatter_": lambda into, product: into.masked_scatter_(
        torch.tensor([True, False, True])[:, None], product.flip(0)
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_product_is_written_into_float32(write: Write) -> None:
    x, w = torch.randn(2, 8), torch.randn(8, 4)
    written = torch.zeros(3, 4)
    with mixed_precision(CPU, torch.bfloat16):
        product = x @ w
        write(written, product)
    assert product.dtype == torch.bfloat16 and written.dtype == torch.float32
    assert torch.equal(written[ROWS], product.float()) and not written[1].any()


def test_in_float32_nothing_is_cast() -> None:
    with mixed_precision(CPU, torch.float32):
        assert (torch.randn(2, 8) @ torch.randn(8, 4)).dtype == torch.float32
    with pytest.raises(RuntimeError, match="scalar type"), mixed_precision(CPU, torch.float32):
        torch.zeros(3, 4).index_add_(0, ROWS, torch.ones(2, 4).bfloat16())


SHAPES = [(7, 56, 48), (9, 640, 192), (17, 200, 130), (33, 150, 150), (300, 24, 96), (150, 150, 300)]
"""(m, k, n); the first four gave other bits with two, three or 64 threads of an AMD EPYC without AVX-512."""


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
            with threads(number), mixed_precision(CPU, torch.float32):
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
