"""`runtime.gpu.GpuMatrix` on the emulated GPU: products, gradients and rows against the reference decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Emulator, on_device

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.testing import MIXED_BITS, exact_stored, random_matrix, relative_error
from ciuic_cli.runtime import products
from ciuic_cli.runtime.gpu import GpuMatrix


@pytest.fixture
def packed(rng: np.random.Generator) -> PackedMatrix:
    return random_matrix(115, 144, MIXED_BITS, rng=rng, rank=20, is_scaled=True)


@pytest.fixture
def matrix(emulator: Emulator, packed: PackedMatrix) -> GpuMatrix:
    return GpuMatrix(on_device(emulator, packed))


@pytest.mark.parametrize("batch", [1, 8, 9, 40])
def test_products(emulator: Emulator, packed: PackedMatrix, matrix: GpuMatrix, batch: int) -> None:
    x = emulator.tensor(torch.randn(batch, 144, generator=torch.Generator().manual_seed(batch)))
    exact = x.double() @ exact_stored(packed).T
    bound = {1: 6e-5, 8: 6e-5, 9: 4e-4, 40: 4e-3}[batch]
    assert relative_error(products.product(matrix, x), exact) < bound
    assert relative_error(matrix.product(x), exact) < bound
    part = products.product(matrix, x, 21, 70)
    assert relative_error(part, exact[:, 21:70]) < bound


def test_gradient_and_rows(emulator: Emulator, packed: PackedMatrix, matrix: GpuMatrix) -> None:
    exact = exact_stored(packed)
    grad = torch.randn(3, 115, generator=torch.Generator().manual_seed(0))
    assert relative_error(products.gradient(matrix, grad), grad.double() @ exact) < 1e-5
    rows = emulator.tensor(torch.tensor([114, 0, 40]))
    assert relative_error(products.rows_of(matrix, rows), exact[rows]) < 1e-5


@pytest.mark.parametrize("rank", [0, 20])
def test_rows_that_are_stored_sorted(emulator: Emulator, rng: np.random.Generator, rank: int) -> None:
    packed = random_matrix(115, 144, MIXED_BITS, rng=rng, rank=rank, is_sorted=True, is_scaled=rank > 0)
    matrix = GpuMatrix(on_device(emulator, packed))
    assert packed.header.position is not None
    exact = exact_stored(packed)[torch.from_numpy(packed.header.position)]
    x = emulator.tensor(torch.randn(3, 144, generator=torch.Generator().manual_seed(0)))
    assert relative_error(products.product(matrix, x), x.double() @ exact.T) < 6e-5
    assert relative_error(products.product(matrix, x, 21, 70), x.double() @ exact[21:70].T) < 6e-5
    assert relative_error(matrix.product(x), x.double() @ exact.T) < 6e-5
    rows = emulator.tensor(torch.tensor([114, 0, 40]))
    assert relative_error(products.rows_of(matrix, rows), exact[rows]) < 1e-5
    grad = torch.randn(3, 115, generator=torch.Generator().manual_seed(0))
    assert relative_error(products.gradient(matrix, grad), grad.double() @ exact) < 1e-5


def test_a_matrix_of_no_bits_is_zero(emulator: Emulator, rng: np.random.Generator) -> None:
    matrix = GpuMatrix(on_device(emulator, random_matrix(20, 48, 0, rng=rng)))
    assert matrix.is_zero and not matrix.decode(3, 20).any()
