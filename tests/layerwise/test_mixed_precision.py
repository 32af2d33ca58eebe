"""Products in bfloat16 beside a float32 stream: models may write a product into a tensor like the layer's input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ciuic_cli.layerwise.operations.mixed_precision import mixed_precision

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
