"""Compressed weights read as dense ones: metadata, products from the codes, everything else by decoding."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes, relative_error
from torch import nn
from torch.nn import functional as F

from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime import ops
from ciuic_cli.runtime.modules import CompressedLinear
from ciuic_cli.runtime.views.dense_views import Codes, DenseView, Presentation, view_of
from ciuic_cli.runtime.views.viewed_modules import ViewedModule, with_blobs

MATRIX = random_codes(48, 40)
EXPERTS = [random_codes(48, 40) for _ in range(3)]
X = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
XE = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1))
BIAS = torch.arange(48.0)


def blob(codes: Any) -> nn.Parameter:
    return nn.Parameter(as_tensor(codes), requires_grad=False)


def view(*, transposed: bool = False) -> DenseView:
    return view_of(
        blob(MATRIX), Presentation((40, 48) if transposed else (48, 40), torch.float32, transposed)
    )


def stack(*, transposed: bool = False) -> DenseView:
    data = torch.frombuffer(bytearray(ExpertStack(tuple(EXPERTS)).to_bytes()), dtype=torch.uint8)
    shape = (3, 40, 48) if transposed else (3, 48, 40)
    return view_of(nn.Parameter(data, requires_grad=False), Presentation(shape, torch.float32, transposed))


W = dense(MATRIX)
WE = torch.stack([dense(expert) for expert in EXPERTS])


def test_metadata_is_that_of_the_dense_weight() -> None:
    seen = view()
    assert seen.shape == (48, 40) and seen.dtype == torch.float32 and seen.device.type == "cpu"
    assert seen.dim() == seen.ndim == 2 and seen.numel() == 1920 and len(seen) == 48
    assert isinstance(seen, nn.Parameter) and not seen.requires_grad and seen.is_floating_point()
    assert seen.to(torch.bfloat16).dtype == torch.bfloat16 and seen.T.shape == (40, 48)


PRODUCTS: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
    "linear": (lambda: F.linear(X, view(), BIAS), X @ W.T + BIAS),
    "right, transposed by the caller": (lambda: X @ view().T, X @ W.T),
    "right, stored transposed": (lambda: X @ view(transposed=True), X @ W.T),
    "left": (lambda: view() @ X.T, W @ X.T),
    "left of a batch": (lambda: view() @ XE.mT, W @ XE.mT),
    "addmm": (lambda: torch.addmm(BIAS, X, view(transposed=True)), X @ W.T + BIAS),
    "one expert": (lambda: F.linear(X, stack()[torch.tensor(1)]), X @ WE[1].T),
    "one expert, stored transposed": (lambda: X @ stack(transposed=True)[2], X @ WE[2].T),
    "one expert of a view": (lambda: X @ stack().view(-1, 48, 40)[0].T, X @ WE[0].T),
    "all experts": (lambda: torch.bmm(XE, stack(transposed=True)), torch.bmm(XE, WE.mT)),
    "all experts with bias": (
        lambda: torch.baddbmm(BIAS, XE, stack(transposed=True)),
        torch.baddbmm(BIAS, XE, WE.mT),
    ),
    "embedding": (lambda: F.embedding(torch.tensor([3, 0]), view()), W[[3, 0]]),
}


@pytest.mark.parametrize("form", PRODUCTS)
def test_products_use_the_codes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, expected = PRODUCTS[form]

    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("decoded")

    monkeypatch.setattr(Codes, "decode", refuse)
    assert relative_error(compute(), expected) < 1e-3


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: view() * 2, W * 2),
        (lambda: view()[3:5], W[3:5]),
        (lambda: torch.cat([view(), view()]), torch.cat([W, W])),
        (lambda: view().sum(), W.sum()),
        (lambda: torch.ones(48) @ view(), torch.ones(48) @ W),
        (lambda: torch.einsum("ti,oi->to", X, view()), X @ W.T),
        (lambda: stack(transposed=True).sum(0), WE.mT.sum(0)),
        (lambda: stack().view(-1, 40), WE.view(-1, 40)),
        (lambda: view().view(torch.int32).view(torch.float32), W),
    ],
)
def test_anything_else_decodes(compute: Callable[[], Any], expected: torch.Tensor) -> None:
    found = compute()
    assert type(found) is torch.Tensor and relative_error(found, expected) < 1e-5


def test_a_view_cannot_be_written_to() -> None:
    with pytest.raises(TypeError, match="compressed weight"):
        view().mul_(2)


def test_gradients_pass_through_a_product() -> None:
    x = X.clone().requires_grad_()
    F.linear(x, view()).sum().backward()
    assert x.grad is not None and relative_error(x.grad, W.sum(0).expand_as(X)) < 1e-3


def test_a_module_shows_its_weight_after_copies_and_changes_of_dtype() -> None:
    module = CompressedLinear(40, 48, blob(MATRIX))
    module.present(torch.float32)
    for candidate in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert relative_error(candidate.weight + 0, W) < 1e-5
        assert candidate.state_dict()["weight"].dtype == torch.uint8
    assert module.to(torch.bfloat16).weight.dtype == torch.bfloat16


def test_a_tied_weight_shares_the_blob() -> None:
    first, second = CompressedLinear(40, 48, blob(MATRIX)), CompressedLinear(40, 48, blob(MATRIX))
    first.present(torch.float32)
    second.weight = first.weight
    assert second.blob is first.blob


class _Cased(nn.Module):
    """Casts its input to the dtype of its weight, and multiplies by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.weight.dtype) @ self.weight


def test_a_module_of_any_class_keeps_its_code() -> None:
    module: Any = with_blobs(_Cased(), {"weight": blob(MATRIX)}, {"weight": True}, torch.float32)
    assert isinstance(module, _Cased) and isinstance(module, ViewedModule)
    assert module.weight.dtype == torch.uint8  # while it is loaded
    module.present()
    for candidate in (module, copy.deepcopy(module)):
        assert relative_error(candidate(X), X @ W.T) < 1e-3


def test_no_product_decodes_in_a_compressed_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    module = CompressedLinear(40, 48, blob(MATRIX))
    module.present(torch.float32)
    monkeypatch.setattr(Codes, "product", None)
    assert torch.equal(module(X), ops.linear(X, module.blob, 48))
