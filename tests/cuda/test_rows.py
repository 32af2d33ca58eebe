"""Decoded ranges and embedding rows against the reference decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Emulator, on_device

from ciuic_cli.codecs import reference
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.testing import MIXED_BITS, exact_stored, random_matrix, relative_error
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import decode, embedding


@pytest.mark.parametrize("L", [16, 13])
@pytest.mark.parametrize("bits", BITS[1:])
def test_decode_is_the_reference(emulator: Emulator, rng: np.random.Generator, bits: float, L: int) -> None:
    matrix = random_matrix(21, 144, bits, rng=rng, L=L)
    got = decode(on_device(emulator, matrix))
    torch.testing.assert_close(got, torch.from_numpy(reference.decode(matrix)), rtol=3e-7, atol=0)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 16), (17, 33), (230, 240), (50, 1030)])
def test_decode_of_odd_shapes_and_mixed_bits(
    emulator: Emulator, rng: np.random.Generator, rows: int, cols: int
) -> None:
    matrix = random_matrix(rows, cols, MIXED_BITS, rng=rng)
    got = decode(on_device(emulator, matrix))
    torch.testing.assert_close(got, torch.from_numpy(reference.decode(matrix)), rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_range_in_sixteen_bits(emulator: Emulator, rng: np.random.Generator, dtype: torch.dtype) -> None:
    matrix = random_matrix(100, 80, MIXED_BITS, rng=rng)
    out = emulator.empty((45 * 80,), dtype)
    got = decode(on_device(emulator, matrix), 32, 77, dtype, out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(got, torch.from_numpy(reference.decode(matrix))[32:77].to(dtype))


def test_decode_refusals(emulator: Emulator, rng: np.random.Generator) -> None:
    matrix = on_device(emulator, random_matrix(40, 48, MIXED_BITS, rng=rng))
    for begin, end in ((8, 40), (0, 41), (32, 16), (-16, 16)):
        with pytest.raises(UsageError, match="decode rows"):
            decode(matrix, begin, end)
    with pytest.raises(UsageError, match="float64"):
        decode(matrix, dtype=torch.float64)
    with pytest.raises(UsageError, match="`out`"):
        decode(matrix, out=torch.empty(39 * 48))
    assert emulator.launched == []


@pytest.mark.parametrize("cols", [16, 100, 1024, 1040, 2064])
def test_embedding_rows(emulator: Emulator, rng: np.random.Generator, cols: int) -> None:
    matrix = random_matrix(77, cols, MIXED_BITS, rng=rng, seed=3, is_scaled=cols != 1024)
    tokens = emulator.tensor(torch.tensor([[0, 76, 16], [31, 40, 64]]))
    rows = embedding(on_device(emulator, matrix), tokens, torch.float32)
    exact = exact_stored(matrix)[tokens]
    assert rows.shape == (2, 3, cols)
    assert relative_error(rows, exact) < 1e-6
    assert (
        torch.equal(rows[0, 2], torch.zeros(cols)) and MIXED_BITS[1] == 0
    )  # row 16 belongs to a group of 0 bits


@pytest.mark.parametrize("L", [16, 13])
@pytest.mark.parametrize("bits", BITS[1:])
def test_embedding_of_every_bit_width(
    emulator: Emulator, rng: np.random.Generator, bits: float, L: int
) -> None:
    matrix = random_matrix(32, 48, bits, rng=rng, L=L)
    tokens = emulator.tensor(torch.arange(32))
    rows = embedding(on_device(emulator, matrix), tokens, torch.float32)
    assert relative_error(rows, exact_stored(matrix)) < 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
def test_embedding_dtypes(
    emulator: Emulator, rng: np.random.Generator, dtype: torch.dtype, bound: float
) -> None:
    matrix = random_matrix(33, 80, 4, rng=rng, is_scaled=True)
    tokens = emulator.tensor(torch.arange(33))
    rows = embedding(on_device(emulator, matrix), tokens, dtype)
    assert rows.dtype == dtype and relative_error(rows, exact_stored(matrix)) < bound


def test_embedding_in_the_transformed_basis(emulator: Emulator, rng: np.random.Generator) -> None:
    # Input scales are not applied to transformed rows.
    matrix = random_matrix(33, 70, MIXED_BITS, rng=rng, rank=4, is_scaled=True)
    tokens = emulator.tensor(torch.tensor([32, 5]))
    rows = embedding(on_device(emulator, matrix), tokens, torch.float32, transformed=True)
    torch.testing.assert_close(rows, torch.from_numpy(reference.decode(matrix))[[32, 5]], rtol=3e-7, atol=0)


def test_a_token_outside_the_table_reads_as_zeros(emulator: Emulator, rng: np.random.Generator) -> None:
    table = on_device(emulator, random_matrix(20, 48, 4, rng=rng))
    rows = embedding(table, emulator.tensor(torch.tensor([20, -1, 2**40, 19])), torch.float32)
    assert torch.equal(rows[:3], torch.zeros(3, 48)) and rows[3].abs().min() > 0


def test_embedding_refusals(emulator: Emulator, rng: np.random.Generator) -> None:
    table = on_device(emulator, random_matrix(20, 48, 4, rng=rng))
    with pytest.raises(UsageError, match="int64"):
        embedding(table, torch.tensor([1], dtype=torch.int32), torch.float32)
    with pytest.raises(UsageError, match="decode to"):
        embedding(table, torch.tensor([1]), torch.int8)
    with_lowrank = on_device(emulator, random_matrix(20, 48, 4, rng=rng, rank=2))
    with pytest.raises(UsageError, match="low-rank"):
        embedding(with_lowrank, torch.tensor([1]), torch.float32)
    assert emulator.launched == []
    assert embedding(table, torch.empty(0, dtype=torch.int64), torch.float32).shape == (0, 48)
