"""The low-rank path beside a compressed product: its sum, gradients, dtypes, and what it keeps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")

from ciuic_cli.train import lora_layers
from ciuic_cli.train.lora_layers import AddLowRank, path_dtype

SCALING = 0.7


def tensors(dtype: torch.dtype, factors: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """y (3, 5, 40), x (3, 5, 24) of `dtype`, A (4, 24), B (40, 4) of `factors`."""
    generator = torch.Generator().manual_seed(0)
    shapes = (((3, 5, 40), dtype), ((3, 5, 24), dtype), ((4, 24), factors), ((40, 4), factors))
    return [torch.randn(shape, generator=generator).to(of).requires_grad_() for shape, of in shapes]


def added(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return AddLowRank.apply(y.clone(), x, a, b, SCALING)  # y is changed in place


def plain(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return y.to(a.dtype) + SCALING * ((x.to(a.dtype) @ a.T) @ b.T)


def set_fast_bfloat16(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    def multiply_dtype(x: torch.Tensor) -> torch.dtype:
        return torch.bfloat16 if fast and x.dtype == torch.bfloat16 else torch.float32

    monkeypatch.setattr(lora_layers, "multiply_dtype", multiply_dtype)


def test_gradients_are_exact() -> None:
    assert torch.autograd.gradcheck(added, tensors(torch.float64, torch.float64))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_and_gradients_in_every_dtype(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fast: bool
) -> None:
    """Errors relative to the norm: of float32, or some roundings of a 16-bit result."""
    set_fast_bfloat16(monkeypatch, fast)
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    inputs = tensors(dtype)
    found, wanted = added(*inputs), plain(*inputs)
    assert found.dtype == dtype
    assert (found.float() - wanted).norm() <= bound * wanted.norm()
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = torch.autograd.grad(found, inputs, grad)
    exact = torch.autograd.grad(wanted, inputs, grad.float())
    for mine, right, tensor in zip(ours, exact, inputs, strict=True):
        assert mine.dtype == tensor.dtype
        assert (mine.float() - right.float()).norm() <= bound * right.float().norm()


def test_bfloat16_is_used_only_where_it_is_fast_and_float16_never(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = torch.empty(0)
    for fast in (True, False):
        set_fast_bfloat16(monkeypatch, fast)
        chosen = {of: path_dtype(torch.empty(0, dtype=of), factor) for of in (torch.bfloat16, torch.float16)}
        assert chosen == {
            torch.bfloat16: torch.bfloat16 if fast else torch.float32,
            torch.float16: torch.float32,
        }


@pytest.mark.parametrize("fast", [False, True])
def test_only_x_and_the_inner_product_are_kept(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    set_fast_bfloat16(monkeypatch, fast)
    y, x, a, b = tensors(torch.bfloat16)
    out, kept = y.clone(), list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = AddLowRank.apply(out, x, a, b, SCALING)
    assert found.data_ptr() == out.data_ptr(), "y was copied"
    assert {t.data_ptr() for t in (x, a, b)} <= {t.data_ptr() for t in kept}
    inner = 3 * 5 * 4 * (2 if fast else 4)
    assert sum(t.nbytes for t in kept) == x.nbytes + a.nbytes + b.nbytes + inner
