"""Products with many rows of activations on AMX: against float64, and beside torch's own use of the unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ciuic_cli.codecs import native, trellis
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.testing import blob_of, exact_stored, random_matrix, relative_error
from ciuic_cli.runtime.blobs import weight_of

pytestmark = pytest.mark.skipif(native.cpu_kernels() != "amx", reason="needs a processor with AMX")


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


def test_a_bias_is_added() -> None:
    matrix = random_matrix(48, 256)
    bias = torch.linspace(-1, 1, 48)
    x = gaussian(80, 256)
    y = trellis.Factor(matrix).with_bias(bias).multiply(x)
    assert torch.equal(y, trellis.matmul(matrix, x) + bias)


def test_rows_do_not_depend_on_each_other_or_on_threads() -> None:
    matrix = random_matrix(528, 512)
    x = gaussian(600, 512)
    whole = trellis.matmul(matrix, x, threads=2)
    assert torch.equal(whole, trellis.matmul(matrix, x, threads=1))
    for begin, end in ((0, 40), (100, 300), (250, 600)):
        assert torch.equal(whole[begin:end], trellis.matmul(matrix, x[begin:end]))


def test_torch_finds_its_own_tile_shapes_again() -> None:
    matrix = random_matrix(512, 512)
    x, dense = gaussian(64, 512), gaussian(512, 512)
    expected, ours = x @ dense.T, trellis.matmul(matrix, x)
    for _ in range(5):
        for few in (5, 17, 64):
            trellis.matmul(matrix, x[:few])
            assert torch.equal(x @ dense.T, expected)
        assert torch.equal(trellis.matmul(matrix, x), ours)
