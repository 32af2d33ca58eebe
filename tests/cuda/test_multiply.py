"""y = W x of every kernel variant against the float64 product with the reference decoder's matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Emulator, on_device

from ciuic_cli.codecs import reference
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.testing import MIXED_BITS, exact_stored, random_matrix, relative_error
from ciuic_cli.codecs.transform import inverse_transform
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import linear, product_launch
from ciuic_cli.kernels.launcher import Limits

# Batch, the kernel for it, and a bound that one wrong weight in a thousand would break.
BATCHES = [
    (1, "linear_bytes_n4", 6e-5),
    (4, "linear_bytes_n4", 6e-5),
    (5, "linear_bytes_n8", 6e-5),
    (8, "linear_bytes_n8", 6e-5),
    (9, "linear_half_n16", 4e-4),
    (16, "linear_half_n16", 4e-4),
    (32, "linear_half_n32", 4e-4),
    (33, "decode_rows", 4e-3),
]
FEW, MANY = 1, 100  # multiprocessors: with many, more warps share the columns of a block


def activations_for(emulator: Emulator, batch: int, cols: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(batch)
    return emulator.tensor(torch.randn(batch, cols, generator=generator).to(dtype))


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize(("batch", "kernel", "bound"), BATCHES)
def test_every_bit_width(
    emulator: Emulator, rng: np.random.Generator, batch: int, kernel: str, bound: float, bits: float
) -> None:
    matrix = random_matrix(45, 208, bits, rng=rng)
    x = activations_for(emulator, batch, 208)
    (y,) = linear([on_device(emulator, matrix)], x)
    assert emulator.launched[-1] == kernel
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < bound


@pytest.mark.parametrize("bits", BITS[1:])
def test_lowrank_part_of_every_bit_width(emulator: Emulator, rng: np.random.Generator, bits: float) -> None:
    matrix = random_matrix(90, 96, 0, rng=rng, rank=20, factor_bits=bits)
    x = activations_for(emulator, 3, 96)
    (y,) = linear([on_device(emulator, matrix)], x)
    assert "lowrank_columns" in emulator.launched
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < 6e-5


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 16), (17, 33), (230, 240), (50, 1100), (33, 4352)])
@pytest.mark.parametrize("multiprocessors", [FEW, MANY])
@pytest.mark.parametrize("batch", [2, 7, 12])
def test_odd_shapes_and_mixed_bits(
    emulator: Emulator, rng: np.random.Generator, rows: int, cols: int, multiprocessors: int, batch: int
) -> None:
    emulator.limits = Limits(99 * 1024, multiprocessors)
    matrix = random_matrix(rows, cols, MIXED_BITS, rng=rng, seed=11, is_scaled=multiprocessors == MANY)
    x = activations_for(emulator, batch, cols)
    (y,) = linear([on_device(emulator, matrix)], x)
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < (6e-5 if batch <= 8 else 4e-4)


@pytest.mark.parametrize("batch", [3, 10, 40])
def test_another_window_length(emulator: Emulator, rng: np.random.Generator, batch: int) -> None:
    matrix = random_matrix(100, 144, MIXED_BITS, rng=rng, L=13)
    x = activations_for(emulator, batch, 144)
    (y,) = linear([on_device(emulator, matrix)], x)
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 8, 16, 50])
def test_sixteen_bit_activations(
    emulator: Emulator, rng: np.random.Generator, dtype: torch.dtype, batch: int
) -> None:
    matrix = random_matrix(64, 96, MIXED_BITS, rng=rng, is_scaled=True)
    x = activations_for(emulator, batch, 96, dtype)
    (y,) = linear([on_device(emulator, matrix)], x)
    assert y.dtype == dtype
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < 5e-3


@pytest.mark.parametrize("batch", [1, 6, 20, 40])
def test_matrices_that_share_their_input(emulator: Emulator, rng: np.random.Generator, batch: int) -> None:
    matrices = [
        random_matrix(115, 144, MIXED_BITS, rng=rng),
        random_matrix(40, 144, 2, rng=rng),
        random_matrix(5, 144, (8, 3), rng=rng),
        random_matrix(33, 144, (3, 0, 5), rng=rng, rank=20),
        random_matrix(33, 144, (3, 0, 5), rng=rng, rank=20, is_scaled=True),
        random_matrix(20, 144, MIXED_BITS, rng=rng, is_scaled=True),
        random_matrix(64, 144, 6, rng=rng, rank=5, seed=9),
        random_matrix(10, 144, 0, rng=rng),
        random_matrix(20, 144, MIXED_BITS, rng=rng, L=13),
    ]
    x = activations_for(emulator, batch, 144)
    outputs = linear([on_device(emulator, matrix) for matrix in matrices], x.reshape(1, batch, 144))
    for matrix, y in zip(matrices, outputs, strict=True):
        assert y.shape == (1, batch, matrix.rows)
        exact = x.double() @ exact_stored(matrix).T
        assert (
            relative_error(y[0], exact) < 5e-3
            if matrix.header.row_bits.any()
            else torch.equal(y[0].double(), exact)
        )
    # Five matrices share seed and L, which makes two launches. Two with input scales, one with another seed and one
    # with another L have launches of their own. Three right factors have launches too.
    if batch <= product_launch.SMALL_BATCH:
        assert sum(name.startswith("linear_") for name in emulator.launched) == 2 + 2 + 1 + 1 + 3


@pytest.mark.parametrize(
    ("blocks", "width", "warps"),
    [(10, 4096, 8), (10, 192, 3), (896, 4096, 4), (8016, 4096, 4), (300, 4096, 8)],
)
def test_as_many_warps_as_run_at_once_share_the_columns(
    emulator: Emulator, blocks: int, width: int, warps: int
) -> None:
    emulator.limits = Limits(227 * 1024, multiprocessors=132)
    assert product_launch.warps_for(product_launch.kernel_for(1), blocks, width, emulator) == warps


def test_a_wide_matrix_of_many_bits_fits_a_small_block(emulator: Emulator, rng: np.random.Generator) -> None:
    emulator.limits = Limits(64 * 1024, FEW)  # sm_75
    matrix = random_matrix(32, 2000, (8, 2), rng=rng)
    x = activations_for(emulator, 8, 2000)
    (y,) = linear([on_device(emulator, matrix)], x)
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < 6e-5


def test_the_largest_sums_do_not_overflow(
    emulator: Emulator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the 8-bit code of the largest byte sum, activations that all become 127, and the most columns of one warp,
    # the sums reach 80 % of the range of 32 bits.
    monkeypatch.setattr(product_launch, "_MAX_WARPS", 1)
    cols = product_launch.WARP_COLUMNS
    byte = int(reference.levels(np.arange(256) * 257).argmax())
    matrix = random_matrix(16, cols, 8, rng=rng)
    matrix.codes[:] = byte
    levels = int(reference.levels(np.array([byte * 257]))[0]) + reference.LEVEL_CENTRE
    assert 0.75 * 2**31 < levels * 127 * cols < 2**31
    x = emulator.tensor(inverse_transform(torch.ones(1, cols), cols))
    (y,) = linear([on_device(emulator, matrix)], x)
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < 6e-5


def test_more_columns_than_a_warp_can_sum_are_refused(
    emulator: Emulator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_launch, "_MAX_WARPS", 1)
    matrix = on_device(emulator, random_matrix(16, product_launch.WARP_COLUMNS + 16, 2, rng=rng))
    with pytest.raises(UsageError, match="columns"):
        linear([matrix], torch.zeros(1, product_launch.WARP_COLUMNS + 16))


def test_panels_cover_the_matrix(
    emulator: Emulator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ciuic_cli.kernels.multiply.PANEL_BYTES", 2 * 144 * 48)
    matrix = random_matrix(115, 144, MIXED_BITS, rng=rng)
    x = activations_for(emulator, 50, 144)
    (y,) = linear([on_device(emulator, matrix)], x)
    assert emulator.launched.count("decode_rows") == 3
    assert relative_error(y, x.double() @ exact_stored(matrix).T) < 4e-3


def test_refusals(emulator: Emulator, rng: np.random.Generator) -> None:
    matrix = on_device(emulator, random_matrix(20, 48, MIXED_BITS, rng=rng))
    other = on_device(emulator, random_matrix(20, 64, MIXED_BITS, rng=rng))
    with pytest.raises(UsageError, match="no matrix"):
        linear([], torch.zeros(1, 48))
    with pytest.raises(UsageError, match="48 columns"):
        linear([matrix], torch.zeros(1, 47))
    with pytest.raises(UsageError, match="the same columns"):
        linear([matrix, other], torch.zeros(1, 48))
    with pytest.raises(UsageError, match="int8"):
        linear([matrix], torch.zeros(1, 48), torch.int8)
    assert emulator.launched == []
    assert linear([matrix], torch.zeros(0, 48))[0].shape == (0, 20)
