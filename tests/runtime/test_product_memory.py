"""Which rows a product decodes at a time, and from which batch size on: bounded scratch memory, every row once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.codecs.transform import inverse_transform
from ciuic_cli.runtime import products
from ciuic_cli.runtime.matrices import CpuMatrix

TILE = 16
COLS = 64
PANEL_ROWS = 48


def gaussian(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))


class RecordingMatrix:
    """A dense matrix in the transformed basis that records how its rows are asked for."""

    def __init__(self, rows: int) -> None:
        self.rows, self.cols, self.cols_padded, self.seed = rows, COLS, COLS, 0
        self.is_zero, self.position, self.input_factors, self.lowrank = False, None, None, None
        self.weight = gaussian(rows, COLS)
        self.panels: list[tuple[int, int]] = []
        self.small_batches: list[int] = []

    @property
    def dense(self) -> torch.Tensor:
        return inverse_transform(self.weight, COLS)

    def decode(self, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.panels.append((row_begin, row_end))
        return self.weight[row_begin:row_end].to(dtype)

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows]

    def small_product(self, x: torch.Tensor) -> torch.Tensor:
        self.small_batches.append(x.shape[:-1].numel())
        return x @ self.dense.T


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory for 48 rows of float32."""
    monkeypatch.setattr(products, "PANEL_BYTES", 4 * COLS * PANEL_ROWS)


@pytest.mark.parametrize("rows", [47, 48, 49, 64, 96, 1000])
@pytest.mark.parametrize(("cut_begin", "cut_end"), [(0, 0), (5, 0), (16, 3), (31, 1)])
@pytest.mark.parametrize("way", ["product", "gradient"])
def test_panels_fit_the_scratch_memory_and_cover_the_rows_once(
    rows: int, cut_begin: int, cut_end: int, way: str
) -> None:
    begin, end = cut_begin, rows - cut_end
    matrix = RecordingMatrix(rows)
    if way == "product":
        x = gaussian(3, COLS)
        y = products.product(matrix, x, begin, end, small_batch=0)
        torch.testing.assert_close(y, x @ matrix.dense[begin:end].T, rtol=1e-4, atol=1e-4)
    else:
        gradient = gaussian(3, end - begin)
        y = products.gradient(matrix, gradient, begin, end)
        torch.testing.assert_close(y, gradient @ matrix.dense[begin:end], rtol=1e-4, atol=1e-3)
    assert [row for panel in matrix.panels for row in range(*panel)] == list(range(begin, end))
    assert all(stop - start <= PANEL_ROWS for start, stop in matrix.panels)
    assert all(start % TILE == 0 for start, _ in matrix.panels[1:]), "a row group is decoded twice"
    tiles = -(-end // TILE) - begin // TILE
    assert len(matrix.panels) == -(-tiles // (PANEL_ROWS // TILE)), "no more panels than needed"


@pytest.mark.parametrize("small_batch", [0, 1, 8])
def test_batches_up_to_the_limit_are_multiplied_from_the_codes(small_batch: int) -> None:
    for batch in (1, 7, 8, 9):
        matrix = RecordingMatrix(40)
        products.product(matrix, gaussian(batch, COLS), small_batch=small_batch)
        assert matrix.small_batches == [batch] * (batch <= small_batch)
        assert bool(matrix.panels) == (batch > small_batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_holds_one_panel_and_its_sums(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak that the docstring states, measured at torch's allocator."""
    panel, rows, batch = 1 << 20, 2048, 64
    monkeypatch.setattr(products, "PANEL_BYTES", panel)
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    matrix = CpuMatrix(random_matrix(rows, 1024, 4))
    grad = gaussian(batch, rows).to(dtype)
    sums, columns = batch * 1024 * (4 + dtype.itemsize), panel // 1024 * batch
    most = peak_bytes(lambda: products.gradient(matrix, grad))
    copies = 2 if dtype == torch.bfloat16 else 1  # oneDNN brings a bfloat16 panel into its own layout
    assert panel < most < copies * panel + sums + columns + panel // 8


def peak_bytes(action: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator had given out during `action`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = list(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    return max(held)


def test_part_of_the_rows_is_never_multiplied_from_the_codes() -> None:
    matrix = RecordingMatrix(40)
    products.product(matrix, gaussian(1, COLS), 0, 39, small_batch=8)
    assert not matrix.small_batches and matrix.panels


def test_a_zero_matrix_is_neither_decoded_nor_multiplied() -> None:
    matrix = RecordingMatrix(40)
    matrix.is_zero = True
    for batch in (1, 9):
        y = products.product(matrix, gaussian(batch, COLS))
        assert y.shape == (batch, 40) and not y.any()
    assert not matrix.panels and not matrix.small_batches
