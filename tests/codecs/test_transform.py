"""The input transform: native code against torch, orthonormality, the inverse, and the signs."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.codecs import transform as t


@pytest.mark.parametrize(
    ("cols", "block"), [(16, 16), (48, 16), (576, 64), (1024, 1024), (1536, 512), (4096, 1024), (832, 64)]
)
def test_block_size(cols: int, block: int) -> None:
    assert 1 << t.log2_block(cols) == block


@pytest.mark.parametrize("cols", [1, 16, 33, 576, 830, 1024, 2048])
@pytest.mark.parametrize("seed", [0, 12345])
def test_native_equals_torch(cols: int, seed: int) -> None:
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (0, t.padded(cols) - cols))
    sign = t.signs(padded.shape[1], seed)
    expected = t._apply_torch(padded, sign, t.log2_block(padded.shape[1]), inverse=False)
    result = t.transform(x, seed)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        t._apply_torch(result, sign, t.log2_block(padded.shape[1]), inverse=True)[:, :cols],
        x,
        rtol=1e-5,
        atol=1e-5,
    )
    torch.testing.assert_close(t.inverse_transform(result, cols, seed), x, rtol=1e-5, atol=1e-5)


def test_definition_on_a_small_block() -> None:
    """Element (i, j) of the Sylvester matrix of a block of 16 is (-1)^popcount(i & j) / 4."""
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)])
    x = torch.randn(3, 16)
    torch.testing.assert_close(t.transform(x, 9), (x * t.signs(16, 9)) @ hadamard.T, rtol=1e-5, atol=1e-6)


def test_products_survive_the_transform() -> None:
    w, x = torch.randn(7, 100, dtype=torch.float64).float(), torch.randn(3, 100)
    torch.testing.assert_close(t.transform(x) @ t.transform(w).T, x @ w.T, rtol=1e-4, atol=1e-4)


def test_signs_are_the_documented_hash() -> None:
    def negative(seed: int, j: int) -> bool:
        h = (seed * 0x9E3779B1 + j) & 0xFFFFFFFF
        h ^= h >> 16
        h = h * 0x85EBCA6B & 0xFFFFFFFF
        h ^= h >> 13
        h = h * 0xC2B2AE35 & 0xFFFFFFFF
        h ^= h >> 16
        return bool(h >> 31)

    for seed in (0, 1, 2**32 - 1):
        expected = [-1.0 if negative(seed, j) else 1.0 for j in range(96)]
        assert t.signs(96, seed).tolist() == expected
        # The native code: the transform of a unit vector begins with its sign.
        assert torch.equal(t.transform(torch.eye(96), seed)[:32, 0].sign(), torch.tensor(expected[:32]))


def test_the_input_is_not_changed() -> None:
    x = torch.randn(2, 64)
    before = x.clone()
    t.transform(x)
    t.inverse_transform(x, 64)
    assert torch.equal(x, before)


def test_other_shapes_and_dtypes() -> None:
    x = torch.randn(2, 3, 40).bfloat16()
    found = t.transform(x)
    assert found.shape == (2, 3, 48) and found.dtype == torch.float32
    torch.testing.assert_close(t.inverse_transform(found, 40), x.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(t.transform(x[:, 1:2]), found[:, 1:2])


@pytest.mark.parametrize("cols", [16, 40, 576, 2048])
def test_bfloat16_is_rounded_once_at_the_end(cols: int) -> None:
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(cols)).bfloat16()
    found = t.transform(x, 7, torch.bfloat16)
    assert found.dtype == torch.bfloat16 and torch.equal(found, t.transform(x, 7).bfloat16())
    back = t.inverse_transform(found, cols, 7).bfloat16()
    assert torch.equal(t.inverse_transform_inplace(found, cols, 7), back)


def test_float16_is_not_transformed_in_bfloat16() -> None:
    x = torch.randn(5, 64).half()
    assert torch.equal(t.transform(x, 7, torch.float16), t.transform(x, 7).half())
    wide = t.transform(x, 7, torch.float16)
    assert torch.equal(
        t.inverse_transform_inplace(wide.clone(), 64, 7), t.inverse_transform(wide, 64, 7).half()
    )
