"""The operators: torch's checks of their registration, torch.compile, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes, relative_error

from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime import ops
from ciuic_cli.runtime.modules import CompressedEmbedding, CompressedLinear

MATRIX = random_codes(48, 40, [4, 2, 6], rank=4, is_sorted=True, is_scaled=True)
STACK = ExpertStack(tuple(random_codes(24, 40, [4, 3], seed=e, is_sorted=e == 1) for e in range(3)))
X = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[0, 2], [1, 1], [2, 3], [0, 1], [3, 3]])  # expert 3 does not exist

CALLS: dict[str, tuple[Any, ...]] = {
    "linear": (X, as_tensor(MATRIX), 48),
    "grouped_linear": (X.reshape(5, 1, 40).expand(5, 2, 40), as_tensor(MATRIX), 2, 24),
    "embedding": (torch.tensor([[3, 47], [0, 3]]), as_tensor(MATRIX), 40, torch.bfloat16),
    "routed_linear": (X, as_tensor(STACK), IDS, 24),
}


@pytest.mark.parametrize("name", CALLS)
def test_registration(name: str) -> None:
    """Schema, fake implementation and autograd registration, as torch checks them."""
    first, *rest = CALLS[name]
    if first.is_floating_point():
        first = first.clone().requires_grad_()
    torch.library.opcheck(getattr(torch.ops.ciuic, name), (first, *rest))


@pytest.mark.parametrize("name", CALLS)
def test_direct_calls_and_the_dispatcher_agree(name: str) -> None:
    direct = getattr(ops, name)(*CALLS[name])
    assert torch.equal(direct, getattr(torch.ops.ciuic, name)(*CALLS[name]))


def test_gradients() -> None:
    weight = dense(MATRIX)
    experts = torch.stack([dense(expert) for expert in STACK.experts] + [torch.zeros(24, 40)])
    expected = {
        "linear": lambda x: x @ weight.T,
        "grouped_linear": lambda x: torch.einsum("bgc,grc->bgr", x, weight.reshape(2, 24, 40)),
        "routed_linear": lambda x: torch.einsum("tc,tkrc->tkr", x, experts[IDS]),
    }
    for name, reference in expected.items():
        x, *rest = CALLS[name]
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = getattr(ops, name)(ours, *rest), reference(theirs)
        assert relative_error(y, z) < 5e-4
        weights = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
        (y * weights).sum().backward()
        (z * weights).sum().backward()
        assert relative_error(ours.grad, theirs.grad) < 1e-5, name


def test_gradients_in_bfloat16() -> None:
    weight, experts = dense(MATRIX), torch.stack([dense(expert) for expert in STACK.experts])
    experts = torch.cat([experts, torch.zeros(1, 24, 40)])
    for name, exact in {
        "linear": lambda g: g @ weight,
        "grouped_linear": lambda g: torch.einsum("bgr,grc->bgc", g, weight.reshape(2, 24, 40)),
        "routed_linear": lambda g: torch.einsum("tkr,tkrc->tc", g, experts[IDS]),
    }.items():
        x, *rest = CALLS[name]
        ours = x.bfloat16().clone().requires_grad_()
        y = getattr(ops, name)(ours, *rest)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        y.backward(grad)
        assert ours.grad is not None and ours.grad.dtype == torch.bfloat16
        assert relative_error(ours.grad, exact(grad.float())) < 6e-3, name


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def parameter() -> torch.nn.Parameter:
            return torch.nn.Parameter(as_tensor(MATRIX), requires_grad=False)

        self.table = CompressedEmbedding(48, 40, parameter(), torch.float32)
        self.head = CompressedLinear(40, 48, parameter(), torch.nn.Parameter(torch.ones(48)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.head(self.table(ids)))


def test_compiles_without_a_graph_break() -> None:
    model = Small().eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    ids = torch.tensor([[1, 5, 40]])
    with torch.no_grad():
        assert torch.allclose(compiled(ids), model(ids), atol=1e-6)


def test_ids_without_a_row() -> None:
    for ids in (torch.tensor([48]), torch.tensor([-1])):
        with pytest.raises(IndexError, match="48 rows"):
            ops.embedding(ids, as_tensor(MATRIX), 40, torch.float32)


def test_no_ids() -> None:
    assert ops.embedding(torch.empty(2, 0, dtype=torch.long), as_tensor(MATRIX), 40, torch.float32).shape == (
        2,
        0,
        40,
    )
    assert ops.linear(torch.empty(2, 0, 40), as_tensor(MATRIX), 48).shape == (2, 0, 48)
    assert ops.routed_linear(X[:0], as_tensor(STACK), IDS[:0], 24).shape == (0, 2, 24)
