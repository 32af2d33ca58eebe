"""Properties of the input transform for any shape, memory layout, dtype and seed: orthonormal and invertible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic_cli.codecs.transform import (
    MAX_BLOCK,
    TILE,
    block_width,
    inverse_transform,
    padded,
    signs,
    transform,
)

quick = settings(max_examples=100, deadline=None)
columns = st.integers(1, 2100)
seeds = st.integers(0, 2**32 - 1)


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@quick
@given(cols=columns)
def test_padding_and_blocks_are_the_documented_ones(cols: int) -> None:
    width, block = padded(cols), block_width(cols)
    assert width % TILE == 0 and cols <= width < cols + TILE
    assert width % block == 0 and TILE <= block <= MAX_BLOCK
    assert block == MAX_BLOCK or width % (2 * block) != 0, "a larger block would fit"


@quick
@given(rows=st.integers(1, 5), cols=columns, seed=seeds)
def test_the_inverse_restores_the_input_and_norms_are_kept(rows: int, cols: int, seed: int) -> None:
    x = gaussian(rows, cols, seed=cols)
    basis = transform(x, seed)
    assert basis.shape == (rows, padded(cols)) and basis.dtype == torch.float32
    torch.testing.assert_close(inverse_transform(basis, cols, seed), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(basis.norm(dim=1), x.norm(dim=1), rtol=1e-5, atol=1e-6)
    whole = inverse_transform(basis, padded(cols), seed)
    assert float(whole[:, cols:].abs().sum()) <= 1e-4, "the padding is zeros"


@quick
@given(cols=columns, seed=seeds)
def test_inner_products_are_kept(cols: int, seed: int) -> None:
    x = gaussian(4, cols, seed=cols + 1)
    basis = transform(x, seed)
    torch.testing.assert_close(basis @ basis.T, x @ x.T, rtol=1e-4, atol=1e-4 * cols**0.5)


@quick
@given(tiles=st.integers(1, 70), first=seeds, second=seeds)
def test_signs_are_plus_or_minus_one_and_depend_on_the_seed(tiles: int, first: int, second: int) -> None:
    cols = TILE * tiles
    assert bool((signs(cols, first).abs() == 1).all())
    assert torch.equal(signs(cols, first), signs(cols + TILE, first)[:cols])
    if cols >= 160 and first != second:
        assert not torch.equal(signs(cols, first), signs(cols, second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("function", [transform, lambda x: inverse_transform(x, x.shape[-1])])
@quick
@given(rows=st.integers(2, 40), tiles=st.integers(1, 6), step=st.integers(1, 3))
def test_memory_layout_and_dtype_do_not_matter(
    dtype: torch.dtype, function: object, rows: int, tiles: int, step: int
) -> None:
    assert callable(function)
    x = gaussian(rows, TILE * tiles, seed=rows).to(dtype)
    expected = function(x.to(torch.float32).contiguous())
    strided = torch.empty(rows, TILE * tiles * step, dtype=dtype)[:, ::step].copy_(x)
    for same in (x, x.T.contiguous().T, strided, x.reshape(1, rows, -1)[0]):
        before = same.clone()
        assert torch.equal(function(same), expected)
        assert torch.equal(same, before), "the argument is left alone"
