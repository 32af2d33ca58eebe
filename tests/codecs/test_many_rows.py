"""Products with many rows of activations: against float64, against few rows, and beside torch's own use of AMX."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ciuic_cli.codecs import native, trellis
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.testing import blob_of, exact_stored, random_matrix, relative_error
from ciuic_cli.runtime.blobs import weight_of


def gaussian(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


@pytest.mark.parametrize("L", [12, 16])
@pytest.mark.parametrize("bits", BITS[1:])
def test_as_exact_as_a_dense_bfloat16_product(bits: float, L: int) -> None:
    """560 columns are an odd number of code tiles and end in a partial block."""
    matrix = random_matrix(50, 560, bits, L=L)
    x = gaussian(70, 560)
    dense = exact_stored(matrix)
    exact = x.double() @ dense.T
    rounded = relative_error(x @ dense.to(torch.bfloat16).T, exact)
    assert relative_error(trellis.matmul(matrix, x), exact) < 1.5 * rounded


@pytest.mark.parametrize(
    "options",
    [{"bits": [4, 0, 8, 3.5, 0]}, {"is_sorted": True, "is_scaled": True}, {"rank": 9}, {"bits": [0]}],
)
@pytest.mark.parametrize("rows", [40, 47, 64, 255, 256, 300, 700])
def test_matrices_of_every_kind_for_any_number_of_rows(rows: int, options: dict[str, Any]) -> None:
    matrix = random_matrix(263, 304, **options)
    x = gaussian(rows, 304)
    y = weight_of(blob_of(matrix)).product(x)
    exact = x.double() @ dense_of(matrix).T
    assert y.shape == exact.shape and y.dtype == torch.bfloat16
    assert torch.equal(y.double(), exact) if not exact.any() else relative_error(y, exact) < 6e-3


def dense_of(matrix: Any) -> torch.Tensor:
    stored = exact_stored(matrix)
    order = matrix.header.order
    if order is None:
        return stored
    dense = torch.empty_like(stored)
    dense[torch.from_numpy(order).long()] = stored
    return dense


@pytest.mark.parametrize("rows", [9, 80, 521])
def test_a_bias_is_added_in_the_order_of_the_results(rows: int) -> None:
    matrix = random_matrix(47, 256)
    bias = torch.linspace(-1, 1, 47)
    order = torch.randperm(47, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = gaussian(rows, 256)
    y = trellis.Factor(matrix, order=order).with_bias(bias).multiply(x)
    assert torch.equal(y[:, order], trellis.matmul(matrix, x) + bias[order])


@pytest.mark.parametrize("rows", [9, 13, 39, 40, 530])
def test_each_row_equals_its_product_alone(rows: int) -> None:
    """In 15 bits: products in bfloat16 differ by their rounding."""
    matrix = random_matrix(75, 530, [4, 0, 3, 8, 2])
    x = gaussian(rows, 530)
    y = trellis.matmul(matrix, x, exact=True)
    for row in (0, 8, rows - 1):
        assert torch.equal(y[row], trellis.matmul(matrix, x[row], exact=True))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("exact", [False, True])
def test_largest_activations_do_not_overflow(bits: float, exact: bool) -> None:
    """The transform of a single one has the same magnitude everywhere, so all of its values are the largest."""
    matrix = random_matrix(48, 512, bits)
    x = torch.eye(512)[torch.arange(0, 512, 17)]
    dense = exact_stored(matrix)
    for some in (x, x[:9], -x):
        y = trellis.matmul(matrix, some, exact=exact)
        assert relative_error(y, some.double() @ dense.T) < 1e-4
        assert torch.equal(y[8], trellis.matmul(matrix, some[8], exact=exact))


def test_rows_do_not_depend_on_each_other_or_on_threads() -> None:
    matrix = random_matrix(528, 512)
    x = gaussian(600, 512)
    whole = trellis.matmul(matrix, x, threads=2)
    assert torch.equal(whole, trellis.matmul(matrix, x, threads=1))
    for begin, end in ((0, 40), (100, 300), (250, 600)):
        assert torch.equal(whole[begin:end], trellis.matmul(matrix, x[begin:end]))


@pytest.mark.skipif(native.cpu_kernels() != "amx", reason="needs a processor with AMX")
def test_torch_finds_its_own_tile_shapes_again() -> None:
    matrix = random_matrix(512, 512)
    x, dense = gaussian(64, 512), gaussian(512, 512)
    expected, ours = x @ dense.T, trellis.matmul(matrix, x)
    for _ in range(5):
        for few in (5, 17, 64):
            trellis.matmul(matrix, x[:few])
            assert torch.equal(x @ dense.T, expected)
        assert torch.equal(trellis.matmul(matrix, x), ours)
