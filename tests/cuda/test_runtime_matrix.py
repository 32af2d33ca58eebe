"""The kernels behind the runtime's products: the same results as the runtime's own CPU path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Emulator
from random_matrices import dense, guarded_offsets, packed, relative_error

from ciuic_cli.kernels.runtime_matrix import KernelMatrix
from ciuic_cli.runtime import products


@pytest.fixture
def matrix(emulator: Emulator, random: np.random.Generator) -> KernelMatrix:
    stored = packed(random, 115, 144, rank=20, is_scaled=True)
    blob = emulator.tensor(torch.frombuffer(bytearray(stored.to_bytes()), dtype=torch.uint8))
    made = KernelMatrix(stored, blob)
    guarded_offsets(emulator, made.view)
    return made


@pytest.mark.parametrize("batch", [1, 8, 9, 40])
def test_products(emulator: Emulator, matrix: KernelMatrix, batch: int) -> None:
    x = emulator.tensor(torch.randn(batch, 144, generator=torch.Generator().manual_seed(batch)))
    exact = x.double() @ dense(matrix.view.packed).T
    bound = {1: 6e-5, 8: 6e-5, 9: 4e-4, 40: 4e-3}[batch]
    assert relative_error(products.product(matrix, x), exact) < bound
    assert relative_error(matrix.product(x), exact) < bound
    part = products.product(matrix, x, 21, 70)
    assert relative_error(part, exact[:, 21:70]) < bound


def test_gradient_and_rows(emulator: Emulator, matrix: KernelMatrix) -> None:
    exact = dense(matrix.view.packed)
    grad = torch.randn(3, 115, generator=torch.Generator().manual_seed(0))
    assert relative_error(products.gradient(matrix, grad), grad.double() @ exact) < 1e-5
    rows = emulator.tensor(torch.tensor([114, 0, 40]))
    assert relative_error(products.rows_of(matrix, rows), exact[rows]) < 1e-5


@pytest.mark.parametrize("rank", [0, 20])
def test_rows_that_are_stored_sorted(emulator: Emulator, random: np.random.Generator, rank: int) -> None:
    stored = packed(random, 115, 144, rank=rank, is_sorted=True, is_scaled=rank > 0)
    blob = emulator.tensor(torch.frombuffer(bytearray(stored.to_bytes()), dtype=torch.uint8))
    made = KernelMatrix(stored, blob)
    guarded_offsets(emulator, made.view)
    assert stored.position is not None
    exact = dense(stored)[torch.from_numpy(stored.position)]
    x = emulator.tensor(torch.randn(3, 144, generator=torch.Generator().manual_seed(0)))
    assert relative_error(products.product(made, x), x.double() @ exact.T) < 6e-5
    assert relative_error(products.product(made, x, 21, 70), x.double() @ exact[21:70].T) < 6e-5
    assert relative_error(products.to_original_order(made, made.product(x)), x.double() @ exact.T) < 6e-5
    rows = emulator.tensor(torch.tensor([114, 0, 40]))
    assert relative_error(products.rows_of(made, rows), exact[rows]) < 1e-5
    grad = torch.randn(3, 115, generator=torch.Generator().manual_seed(0))
    assert relative_error(products.gradient(made, grad), grad.double() @ exact) < 1e-5


def test_a_matrix_of_nothing_is_zero(emulator: Emulator, random: np.random.Generator) -> None:
    stored = packed(random, 20, 48, (0,))
    blob = emulator.tensor(torch.frombuffer(bytearray(stored.to_bytes()), dtype=torch.uint8))
    made = KernelMatrix(stored, blob)
    assert made.is_zero and not made.decode(3, 20).any()
