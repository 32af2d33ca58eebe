"""The planned memory of products against the record of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import encode_input_scales
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.passes.rounding import round_without_feedback
from ciuic_cli.process.processor import multiplies_bfloat16
from ciuic_cli.runtime import products
from ciuic_cli.runtime.matrices import CpuMatrix
from ciuic_cli.runtime.products import gradient
from ciuic_cli.runtime.weights import PlainWeight, SmallBatch
from ciuic_cli.train.planning.product_memory import MatrixKind, gradient_bytes, product_bytes


@pytest.fixture
def peak_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """The meter of the benchmarks."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from backward import peak_bytes

    return peak_bytes


def matrix(rows: int, cols: int, *, is_sorted: bool, scaled: bool, rank: int) -> PackedMatrix:
    packed = random_matrix(rows, cols, 4)
    generator = torch.Generator().manual_seed(0)
    header = packed.header
    if is_sorted:
        classes = torch.randint(0, 16, (rows,), generator=generator, dtype=torch.uint8)
        header = replace(header, row_class=classes.numpy())
    if scaled:
        header = replace(header, input_scale=encode_input_scales(torch.rand(cols, generator=generator) + 0.5))
    factors = None
    if rank:
        right, left = (torch.randn(rank, n, generator=generator) for n in (cols, rows))
        factors = (round_without_feedback(right, 6, L=12), round_without_feedback(left, 6, L=12))
    return PackedMatrix(header, packed.codes, factors)


@pytest.mark.parametrize(
    ("dtype", "is_fast"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("batch", [100, 700])
@pytest.mark.parametrize(
    ("rows", "cols", "parts"),
    [
        (512, 520, {}),
        (1024, 560, {"is_sorted": True}),
        (576, 1536, {"is_sorted": True, "scaled": True}),
        (1536, 576, {"scaled": True, "rank": 16}),
        (9000, 576, {"is_sorted": True, "scaled": True}),
        (9000, 2048, {"is_sorted": True}),
    ],
)
def test_planned_bytes_are_those_of_the_allocator(
    peak_bytes: Callable[[Callable[[], object]], int],
    rows: int,
    cols: int,
    parts: dict[str, bool],
    batch: int,
    dtype: torch.dtype,
    is_fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """is_fast: whether the processor multiplies bfloat16 fast; products are in float32 otherwise."""
    if dtype == torch.bfloat16 and is_fast and batch * rows * cols > 1e9 and not multiplies_bfloat16():
        pytest.skip("this processor would multiply for up to a minute")
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: is_fast)
    packed = matrix(rows, cols, **{"is_sorted": False, "scaled": False, "rank": 0, **parts})
    compressed, kind = CpuMatrix(packed), MatrixKind.of(packed.header)
    weight = PlainWeight(compressed, SmallBatch(48, 48, 48))
    x, grad = torch.randn(batch, cols, dtype=dtype), torch.randn(batch, rows, dtype=dtype)
    forward = peak_bytes(lambda: weight.product(x))
    # For a bfloat16 product oneDNN takes up to 160 kB on Intel's processors and 290 kB on AMD's with AVX-512, by its
    # shape, and with AMX memory like that of a panel.
    scratch = 200_000.0
    if dtype == torch.bfloat16 and is_fast:
        scratch = 300_000.0
        if native.cpu_kernels() == "amx":
            scratch += 1.2 * kind.panel_rows(2, reorders_rows=True) * kind.cols_padded * 2
    assert product_bytes(kind, batch, dtype, 48) == pytest.approx(forward, rel=0.065, abs=scratch)
    backward = peak_bytes(lambda: gradient(compressed, grad))
    assert gradient_bytes(kind, batch, dtype) == pytest.approx(backward, rel=0.065, abs=scratch)
