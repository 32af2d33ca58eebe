"""Products of float32 matrices on the matrix unit, or by oneDNN."""

from __future__ import annotations

import pytest
import torch
from instruction_sets import digests

from ciuic_cli.codecs import native
from ciuic_cli.layerwise.float32_products import linear

ERROR = 2.0**-16
"""Largest error of a product, as a share of the sum of the products' absolute values."""


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 5, 3), (128, 32, 128), (129, 31, 129), (170, 100, 300), (200, 577, 40)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_those_in_float64(
    rows: int, depth: int, columns: int, dtype: torch.dtype, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=generator)
    weight = torch.randn(columns, depth, generator=generator).to(dtype).float()
    bias = torch.randn(columns, generator=generator) if has_bias else None
    found = linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = x.abs().double() @ weight.abs().double().T + 1
    assert found.shape == (rows, columns)
    assert float(((found - exact).abs() / size).max()) < ERROR


def test_leading_dimensions_and_views_are_kept() -> None:
    x, weight = torch.randn(3, 50, 50), torch.randn(50, 20).T
    torch.testing.assert_close(linear(x, weight, None), x @ weight.T, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(linear(x[:, ::2], weight, None), x[:, ::2] @ weight.T, rtol=1e-4, atol=1e-3)


DIGEST = """
import hashlib, torch
from ciuic_cli.codecs import native
from ciuic_cli.layerwise.float32_products import linear
x, weight = (torch.randn(n, 300, generator=torch.Generator().manual_seed(n)) for n in (150, 700))
found = []
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    found.append(hashlib.sha256(linear(x, weight, None).numpy().tobytes()).hexdigest())
print(native.cpu_kernels(), len(set(found)))
"""


def test_any_number_of_threads_gives_the_same_bits() -> None:
    assert set(digests(DIGEST).values()) == {"1"}


def test_the_function_refuses_nonsense() -> None:
    lib = native.interface()
    assert lib.ciuic_dense_product(None, None, None, 1, 1, 1, 1) == -1
    x = torch.zeros(4, 4)
    for sizes in [(0, 4, 4, 1), (4, 0, 4, 1), (4, 4, 0, 1), (4, 4, 4, 0)]:
        assert lib.ciuic_dense_product(x.data_ptr(), x.data_ptr(), x.data_ptr(), *sizes) == -1
