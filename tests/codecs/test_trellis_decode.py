"""Native decoding and multiplication against the reference decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ciuic_cli.codecs import reference, trellis
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.testing import random_matrix, tiles_as_matrix
from ciuic_cli.codecs.transform import inverse_transform, transform
from ciuic_cli.errors import UsageError


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize("L", range(12, 17))
def test_decoding_is_exact(bits: int, L: int) -> None:
    matrix = random_matrix(48, 304, bits, L=L, seed=L)
    assert np.array_equal(trellis.decode(matrix).numpy(), reference.decode(matrix))


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (15, 17), (545, 830), (33, 16)])
def test_odd_shapes_and_mixed_bits(rows: int, cols: int) -> None:
    matrix = random_matrix(rows, cols, [5, 0, 2, 8, 3, 4, 6])
    expected = torch.from_numpy(reference.decode(matrix))
    found = trellis.decode(matrix)
    assert torch.equal(found, expected)
    assert torch.equal(trellis.decode(matrix, threads=3), expected)
    assert torch.equal(
        trellis.decode(matrix, original_basis=True), inverse_transform(expected, cols, matrix.header.seed)
    )


def test_row_ranges_and_chosen_rows() -> None:
    matrix = random_matrix(100, 40, [4, 0, 3])
    whole = trellis.decode(matrix)
    for begin, end in [(0, 0), (0, 1), (7, 9), (15, 17), (16, 32), (3, 100), (99, 100)]:
        assert torch.equal(trellis.decode(matrix, begin, end), whole[begin:end])
    rows = torch.tensor([99, 0, 16, 16, 31, 50])
    assert torch.equal(trellis.decode_rows(matrix, rows, threads=2), whole[rows])
    assert trellis.decode_rows(matrix, rows[:0]).shape == (0, 48)
    for dtype in (torch.bfloat16, torch.float16):
        for basis in (False, True):
            expected = trellis.decode(matrix, 3, 77, original_basis=basis).to(dtype)
            assert torch.equal(trellis.decode(matrix, 3, 77, dtype, original_basis=basis), expected)


def test_rows_outside_are_refused() -> None:
    matrix = random_matrix(20, 16, 4)
    with pytest.raises(UsageError, match="outside"):
        trellis.decode(matrix, 0, 21)
    with pytest.raises(UsageError, match="outside"):
        trellis.decode(matrix, -1, 4)
    for row in (-1, 20):
        with pytest.raises(UsageError, match="outside"):
            trellis.decode_rows(matrix, torch.tensor([row]))


def relative_error(matrix: PackedMatrix, x: torch.Tensor, y: torch.Tensor) -> float:
    expected = transform(x, matrix.header.seed).double() @ trellis.decode(matrix).double().T
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize("L", [12, 15, 16])
@pytest.mark.parametrize("batch", [1, 2])
def test_product_error(bits: int, L: int, batch: int) -> None:
    """Unless a product is exact, activations are int8 for up to 4 bits per weight, and have 15 bits otherwise."""
    matrix = random_matrix(96, 832, bits, L=L)
    x = torch.randn(batch, 832, generator=torch.Generator().manual_seed(0))
    coarse = relative_error(matrix, x, trellis.matmul(matrix, x, exact=False))
    assert relative_error(matrix, x, trellis.matmul(matrix, x)) < 1e-6
    assert 2e-3 < coarse < 1e-2 if bits <= 4 else 1e-5 < coarse < 2e-4
    for dtype, chosen in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, False)):
        half = x.to(dtype)
        assert torch.equal(trellis.matmul(matrix, half), trellis.matmul(matrix, half.float(), exact=chosen))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_that_are_not_finite_show(value: float, dtype: torch.dtype) -> None:
    """A NaN or infinity spoils all products of its row, as with a dense matrix, and no other row."""
    matrix = random_matrix(48, 1024, [4, 6, 2])
    x = torch.randn(3, 1024, dtype=dtype)
    x[1, 700] = value
    y = trellis.matmul(matrix, x, dtype)
    assert not torch.isfinite(y[1]).any()
    assert torch.isfinite(y[[0, 2]]).all()


def test_products_in_bfloat16_are_the_rounded_sums() -> None:
    matrix = random_matrix(75, 530, [4, 0, 3, 8, 2])
    x = torch.randn(5, 530, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for batch in (x, x[:1], x[:0], x.T.contiguous().T):
        expected = trellis.matmul(matrix, batch).to(torch.bfloat16)
        assert torch.equal(trellis.matmul(matrix, batch, torch.bfloat16), expected)
    assert trellis.matmul(matrix, x, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("batch", range(1, 10))
@pytest.mark.parametrize("exact", [False, True])
def test_product_of_every_batch_size(batch: int, exact: bool) -> None:
    """The product of each row of a batch equals its product alone, on odd shapes with pruned groups."""
    matrix = random_matrix(75, 530, [4, 0, 3, 8, 2])
    x = torch.randn(batch, 530, generator=torch.Generator().manual_seed(batch))
    y = trellis.matmul(matrix, x, exact=exact)
    assert y.shape == (batch, 75)
    assert relative_error(matrix, x, y) < (1e-6 if exact else 1e-2)
    alone = [trellis.matmul(matrix, row[None], exact=exact, threads=1) for row in x]
    assert torch.equal(y, torch.cat(alone))
    assert (y[:, 16:32] == 0).all()


@pytest.mark.parametrize("shape", [(1, 3), (75, 530), (400, 272)])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7, 8, 49, 100])
def test_products_in_another_order_of_rows(shape: tuple[int, int], batch: int) -> None:
    """Column order[r] of y is the product of stored row r for any number of threads; x may have more dimensions."""
    matrix = random_matrix(*shape, [4, 0, 3, 8, 2])
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1)).to(torch.int32)
    x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(batch))
    for dtype in (torch.float32, torch.bfloat16):
        stored = trellis.matmul(matrix, x, dtype, threads=1)
        for threads in (1, 2, 3):
            y = trellis.matmul(matrix, x[:, None], dtype, order=order, threads=threads)
            assert y.shape == (batch, 1, shape[0]) and y.dtype == dtype
            assert torch.equal(y[:, 0, order], stored)


def test_an_order_that_is_no_permutation_is_refused() -> None:
    matrix, x = random_matrix(20, 32, 4), torch.ones(1, 32)
    right = torch.arange(20, dtype=torch.int32)
    assert torch.equal(trellis.matmul(matrix, x, order=right), trellis.matmul(matrix, x))
    for row, outside in ((0, -1), (19, 20), (7, 2**31 - 1), (7, -(2**31))):
        wrong = right.clone()
        wrong[row] = outside
        with pytest.raises(UsageError, match="out of range"):
            trellis.matmul(matrix, x, order=wrong)
    for unfit in (right[:19], right.to(torch.int64), torch.arange(40, dtype=torch.int32)[::2]):
        with pytest.raises(UsageError, match="order must be contiguous"):
            trellis.matmul(matrix, x, order=unfit)


@pytest.mark.parametrize("exact", [False, True])
def test_products_with_extreme_activations(exact: bool) -> None:
    """An outlier costs precision in its block only; products of zeros, tiny and huge numbers are finite."""
    matrix = random_matrix(32, 2048, 4)
    x = torch.randn(1, 2048)
    x[0, 5] = 3000.0
    assert relative_error(matrix, x, trellis.matmul(matrix, x, exact=exact)) < (1e-6 if exact else 1e-2)
    assert (trellis.matmul(matrix, torch.zeros(1, 2048), exact=exact) == 0).all()
    for size in (1e-42, 1e-38, 1e34):
        assert torch.isfinite(trellis.matmul(matrix, torch.full((1, 2048), size), exact=exact)).all()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_sums_do_not_overflow(exact: bool, sign: float) -> None:
    """The int32 sums stay exact if all activations of a block are largest and all levels are at one extreme."""
    windows = np.full(256, int(reference.levels(np.arange(1 << 16)).argmin()))
    extreme = reference.store_windows(windows & 0xFF, 8)
    matrix = tiles_as_matrix(np.tile(extreme, (16, 1)), 8, L=12)
    target = torch.full((1, 256), sign)  # the transformed activations
    x = inverse_transform(target, 256)
    decoded = trellis.decode(matrix)
    assert decoded.abs().max() > 2.0
    torch.testing.assert_close(
        trellis.matmul(matrix, x, exact=exact), target @ decoded.T, rtol=1e-4, atol=1e-3
    )


def test_products_of_a_wrong_width_are_refused() -> None:
    with pytest.raises(UsageError, match="expected activations"):
        trellis.matmul(random_matrix(16, 32, 4), torch.zeros(1, 33))
    assert trellis.matmul(random_matrix(16, 32, 4), torch.zeros(0, 32)).shape == (0, 16)
