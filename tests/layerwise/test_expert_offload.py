"""Experts that stay in their own dtype: the same products and gradients, and no copy kept for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ciuic_cli.layerwise.expert_offload import ExpertsOnUse


class Experts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        value = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
        self.stack = nn.Parameter(value.to(dtype), requires_grad=False)
        self.plain = nn.Parameter(torch.ones(12, 12), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.plain)
        return sum((nn.functional.linear(x, self.stack[e]) for e in torch.tensor([0, 2])), torch.zeros(()))


def _offloaded_and_plain(
    module: Experts, x: torch.Tensor, dense: Experts, autocast: bool
) -> list[tuple[torch.Tensor, ...]]:
    found = []
    for model, is_offloaded in ((module, True), (dense, False)):
        leaf = x.clone().requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if is_offloaded:
                with ExpertsOnUse(model):
                    y = model(leaf)
            else:
                y = model(leaf)
        y.float().square().sum().backward()
        assert leaf.grad is not None
        found.append((y, leaf.grad))
    return found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_and_gradients_are_those_of_a_float32_stack(dtype: torch.dtype, autocast: bool) -> None:
    module, dense = Experts(dtype), Experts(dtype)
    dense.stack = nn.Parameter(dense.stack.float(), requires_grad=False)
    (y, gradient), (expected, by_autograd) = _offloaded_and_plain(module, torch.randn(5, 12), dense, autocast)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    assert gradient.dtype == torch.float32 and torch.equal(gradient, by_autograd)


def test_no_expert_is_kept_for_the_backward_pass() -> None:
    module, kept = Experts(torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape), lambda unused: unused
    ):
        x = torch.randn(5, 12, requires_grad=True)
        with ExpertsOnUse(module), torch.autocast("cpu", torch.bfloat16):
            module(x)
    assert torch.Size((8, 12)) not in kept and torch.Size((12, 12)) in kept


def test_other_dtypes_are_an_error_without_it() -> None:
    with pytest.raises(RuntimeError):
        Experts(torch.bfloat16)(torch.randn(5, 12))
