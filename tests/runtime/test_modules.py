"""Compressed modules support what nn.Module supports: state dicts, copies, dtypes, representation."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes, relative_error
from torch import nn

from ciuic_cli.runtime import blobs
from ciuic_cli.runtime.modules import (
    CompressedEmbedding,
    CompressedGroupedLinear,
    CompressedLinear,
    blob_parameter,
)

MATRIX = random_codes(48, 40, [4, 2, 6], rank=4, is_sorted=True, is_scaled=True)
OTHER = random_codes(48, 40, [4, 2, 6], rank=4, seed=9, is_sorted=True, is_scaled=True)
X = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))


def parameter() -> nn.Parameter:
    return nn.Parameter(as_tensor(MATRIX), requires_grad=False)


def test_linear_with_bias_keeps_the_dtype() -> None:
    bias = nn.Parameter(torch.randn(48))
    module = CompressedLinear(40, 48, parameter(), bias)
    expected = X @ dense(MATRIX).T + bias
    assert relative_error(module(X), expected) < 1e-3
    assert module(X.reshape(3, 1, 40)).shape == (3, 1, 48)
    for dtype in (torch.bfloat16, torch.float16):
        y = module(X.to(dtype))
        assert y.dtype == dtype and relative_error(y, expected) < 1e-2


def test_activations_that_are_not_contiguous() -> None:
    module = CompressedLinear(40, 48, parameter())
    wide = torch.randn(40, 7).T
    assert not wide.is_contiguous()
    assert relative_error(module(wide), wide @ dense(MATRIX).T) < 1e-3


def test_copies_have_their_own_blobs() -> None:
    module = CompressedLinear(40, 48, parameter())
    before = module(X)
    clone = copy.deepcopy(module)
    assert torch.equal(clone(X), before)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), before)
    clone.load_state_dict({"weight": as_tensor(OTHER)})
    assert relative_error(clone(X), X @ dense(OTHER).T) < 1e-3
    assert torch.equal(module(X), before)


def test_a_blob_that_is_replaced_is_read_again() -> None:
    module = CompressedLinear(40, 48, parameter())
    module(X)
    expected = X @ dense(OTHER).T
    with torch.no_grad():
        module.weight.copy_(as_tensor(OTHER))
    assert relative_error(module(X), expected) < 1e-3
    module.load_state_dict({"weight": as_tensor(MATRIX)})
    module.weight.data = as_tensor(OTHER)
    assert relative_error(module(X), expected) < 1e-3
    module.weight = parameter()
    assert relative_error(module(X), X @ dense(MATRIX).T) < 1e-3


def test_moving_a_module_frees_what_was_parsed() -> None:
    module = CompressedLinear(40, 48, parameter())
    module(X)
    assert id(module.weight) in blobs._parsed
    module._apply(torch.clone)  # like a move to another device
    assert id(module.weight) not in blobs._parsed
    assert relative_error(module(X), X @ dense(MATRIX).T) < 1e-3
    module.to(torch.bfloat16)  # the blob does not move
    assert id(module.weight) in blobs._parsed


def test_embedding() -> None:
    table = dense(MATRIX)
    module = CompressedEmbedding(48, 40, parameter(), torch.float32)
    ids = torch.tensor([[0, 47, 16], [5, 5, 0]])
    assert torch.allclose(module(ids), table[ids], atol=1e-6)
    assert torch.allclose(module(ids.to(torch.int32)), table[ids], atol=1e-6)
    half = module.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16 and torch.equal(half, table[ids].to(torch.bfloat16))
    assert module.weight.dtype == torch.uint8
    assert set(module.state_dict()) == {"weight"}


def test_scaled_embedding_rounds_its_scale() -> None:
    module = CompressedEmbedding(48, 40, parameter(), torch.bfloat16, scale=6.9282)
    rows = dense(MATRIX)[:2].to(torch.bfloat16)
    assert torch.equal(module(torch.tensor([0, 1])), rows * torch.tensor(6.9282, dtype=torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_grouped_linear(tokens: int) -> None:
    """Few rows, straight from the codes, and more rows than `ROWS_WITH_ALL_GROUPS`."""
    module = CompressedGroupedLinear(40, 48, 2, parameter())
    x = torch.randn(2, tokens, 2, 40)
    expected = torch.einsum("bsgc,grc->bsgr", x, dense(MATRIX).reshape(2, 24, 40))
    assert relative_error(module(x), expected) < 1e-3


def test_presented_dtype() -> None:
    module = CompressedLinear(40, 48, parameter())
    module.present(torch.float32)
    assert module.weight.dtype == torch.float32 and module.weight.shape == (48, 40)
    assert module.blob.dtype == torch.uint8 and module.state_dict()["weight"].dtype == torch.uint8
    assert relative_error(module(X), X @ dense(MATRIX).T) < 1e-3
    module.weight = parameter()
    assert module.blob is module._parameters["weight"] and module.weight.shape == (48, 40)


def test_blob_parameters_have_no_gradient_and_repr_shows_their_size() -> None:
    module = CompressedLinear(40, 48, blob_parameter(1000, "meta"))
    assert not module.weight.requires_grad
    assert "bytes=1000" in repr(module) and "in_features=40" in repr(module)
