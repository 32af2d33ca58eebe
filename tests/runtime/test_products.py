"""Products against those of the decoded matrix, for both matrix classes and every code path."""

from __future__ import annotations

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes, relative_error

from ciuic_cli.runtime import products
from ciuic_cli.runtime.matrices import CpuMatrix, Matrix, TorchMatrix

SHAPES = [(100, 70), (16, 16), (1, 3), (263, 576), (640, 1100)]


def both_classes(rows: int, cols: int, rank: int = 0) -> list[tuple[Matrix, torch.Tensor]]:
    pairs: list[tuple[Matrix, torch.Tensor]] = []
    for is_special in (False, True):
        bits, rank_here = [4, 2, 0, 8, 5, 3, 6], min(rank, rows, cols)
        packed = random_codes(rows, cols, bits, rank=rank_here, is_sorted=is_special, is_scaled=is_special)
        exact = dense(packed)
        pairs += [
            (CpuMatrix(packed), exact),
            (TorchMatrix.on_device(packed.header, as_tensor(packed)), exact),
        ]
    return pairs


def activations(batch: int, cols: int) -> torch.Tensor:
    return torch.randn(batch, cols, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_by_panels(shape: tuple[int, int], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PANEL_BYTES", 4 * 16 * 80)  # several panels even for these small matrices
    x = activations(9, shape[1])
    for matrix, exact in both_classes(*shape, rank):
        assert relative_error(products.product(matrix, x), x @ exact.T) < 2e-6


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("batch", [1, 2, 8, 33])
@pytest.mark.parametrize("kind", [0, 2])
def test_products_from_codes(batch: int, rank: int, kind: int) -> None:
    x = activations(batch, 576)
    matrix, exact = both_classes(263, 576, rank)[kind]
    y = products.product(matrix, x, small_batch=40)
    assert y.dtype == torch.float32 and relative_error(y, x @ exact.T) < 5e-4
    assert not torch.equal(y, products.product(matrix, x, small_batch=0))  # the panels were not used


def test_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PANEL_BYTES", 4 * 16 * 80)
    x = activations(3, 70)
    for matrix, exact in both_classes(100, 70, 5):
        for begin, end in ((0, 20), (20, 40), (33, 100), (48, 64)):
            y = products.product(matrix, x, begin, end, small_batch=0)
            assert relative_error(y, x @ exact[begin:end].T) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_a_dense_product(dtype: torch.dtype) -> None:
    x = activations(64, 576).to(dtype)
    matrix, exact = both_classes(263, 576, 7)[0]
    reference = x.double() @ exact.double().T
    rounded = relative_error(x @ exact.to(dtype).T, reference)
    # The transformed activations are rounded in addition to the given ones.
    assert relative_error(products.product(matrix, x), reference) < 1.5 * rounded


@pytest.mark.parametrize("rank", [0, 7])
def test_gradient(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PANEL_BYTES", 4 * 16 * 80)
    grad = activations(5, 100)
    for matrix, exact in both_classes(100, 70, rank):
        assert relative_error(products.gradient(matrix, grad), grad @ exact) < 2e-6
        part = products.gradient(matrix, grad[:, 20:61], 20, 61)
        assert relative_error(part, grad[:, 20:61] @ exact[20:61]) < 2e-6


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("panels", [1, 3, 40])
def test_gradient_in_bfloat16(rank: int, panels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice the error of a dense bfloat16 product, however many panels are summed."""
    monkeypatch.setattr(products, "PANEL_BYTES", 2 * 576 * max(16, 640 // panels))
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    grad = activations(64, 640).bfloat16()
    for matrix, exact in both_classes(640, 576, rank):
        reference = grad.double() @ exact.double()
        rounded = relative_error(grad @ exact.bfloat16(), reference)
        found = products.gradient(matrix, grad)
        assert found.dtype == torch.bfloat16
        assert relative_error(found, reference) < 2 * rounded
        part = products.gradient(matrix, grad[:, 20:601], 20, 601)
        reference = grad[:, 20:601].double() @ exact[20:601].double()
        assert relative_error(part, reference) < 2 * rounded


def test_gradient_of_nothing() -> None:
    for matrix, _ in both_classes(100, 70):
        assert products.gradient(matrix, torch.empty(0, 100)).shape == (0, 70)
    empty = CpuMatrix(random_codes(20, 40, 0))
    assert not products.gradient(empty, activations(3, 20)).any()


@pytest.mark.parametrize("rank", [0, 7])
def test_rows(rank: int) -> None:
    rows = torch.tensor([0, 99, 32, 5, 32])
    for matrix, exact in both_classes(100, 70, rank):
        assert torch.allclose(products.rows_of(matrix, rows), exact[rows], atol=1e-6)


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("small_batch", [0, 40])
def test_activations_of_any_shape(rank: int, small_batch: int) -> None:
    x = activations(6, 576)
    for matrix, _ in both_classes(263, 576, rank):
        flat = products.product(matrix, x, small_batch=small_batch)
        for shape in ((2, 3), (1, 6), (6, 1), (3, 1, 2)):
            y = products.product(matrix, x.reshape(*shape, 576), small_batch=small_batch)
            assert torch.equal(y, flat.reshape(*shape, 263))


def test_nothing_to_multiply() -> None:
    for matrix, _ in both_classes(100, 70):
        assert products.product(matrix, torch.empty(2, 0, 70)).shape == (2, 0, 100)
        assert products.product(matrix, torch.empty(0, 70)).shape == (0, 100)
    empty = CpuMatrix(random_codes(20, 40, 0))
    assert not products.product(empty, activations(3, 40)).any()
