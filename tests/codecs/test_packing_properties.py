"""Properties of matrix blobs: exact round trips of any valid fields, and no wrong field that passes unnoticed."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.codecs.header import L_VALUES, MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import MAX_BASE, SCALE_STEPS
from ciuic_cli.codecs.sizes import codes_nbytes
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.codecs.transform import TILE, padded
from ciuic_cli.codecs.trellis import decode
from ciuic_cli.errors import InputError

HEADER_FIELDS = {
    "magic": (0, "<I"),
    "L": (4, "<B"),
    "flags": (5, "<B"),
    "log2(B)": (6, "<B"),
    "scale_steps": (7, "<B"),
    "rows": (8, "<I"),
    "cols": (12, "<I"),
    "seed": (16, "<I"),
    "base": (20, "<I"),
    "rank": (24, "<I"),
    "lowrank_bytes": (28, "<I"),
}
"""Offset and format of every field of the header, as docs/FORMAT.md has them; `base` by its bit pattern."""

quick = settings(max_examples=150, deadline=None)
byte_arrays = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@st.composite
def matrices(draw: st.DrawFn, *, may_have_lowrank: bool = True) -> PackedMatrix:
    """Any valid matrix of at most 50 x 70 weights."""
    rows, cols = draw(st.integers(1, 50)), draw(st.integers(1, 70))
    return draw(matrices_of(rows, cols, may_have_lowrank=may_have_lowrank))


@st.composite
def matrices_of(draw: st.DrawFn, rows: int, cols: int, *, may_have_lowrank: bool) -> PackedMatrix:
    generator = draw(byte_arrays)
    groups = padded(rows) // TILE
    row_bits = stored_bits(draw(st.lists(st.sampled_from(BITS), min_size=groups, max_size=groups)))
    lowrank = None
    optional: dict[str, np.ndarray] = {}
    if may_have_lowrank:
        if draw(st.booleans()):
            rank = draw(st.integers(1, min(rows, cols)))
            right = draw(matrices_of(rank, cols, may_have_lowrank=False))
            lowrank = (right, draw(matrices_of(rank, rows, may_have_lowrank=False)))
        if draw(st.booleans()):
            optional["row_class"] = generator.integers(0, 16, rows, dtype=np.uint8)
        if draw(st.booleans()):
            optional["input_scale"] = generator.integers(0, 256, cols, dtype=np.uint8)
    header = MatrixHeader(
        rows=rows,
        cols=cols,
        L=draw(st.sampled_from(L_VALUES)),
        seed=draw(st.integers(0, 2**32 - 1)),
        base=draw(st.floats(0.0, MAX_BASE, width=32, exclude_min=True)),
        row_bits=row_bits,
        row_scale=generator.integers(0, 256, rows, dtype=np.uint8),
        scale_steps=draw(st.integers(SCALE_STEPS[0], SCALE_STEPS[-1])),
        **optional,
    )
    codes = generator.integers(0, 256, codes_nbytes(row_bits, cols), dtype=np.uint8)
    return PackedMatrix(header, codes, lowrank)


def assert_same_header(first: MatrixHeader, second: MatrixHeader) -> None:
    for field in dataclasses.fields(MatrixHeader):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, tuple):
            for part, other_part in zip(one, other, strict=True):
                assert_same_header(part, other_part)
        elif isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other, err_msg=field.name)
        else:
            assert one == other, field.name


def assert_same(first: PackedMatrix, second: PackedMatrix) -> None:
    assert_same_header(first.header, second.header)
    np.testing.assert_array_equal(first.codes, second.codes)
    for part, other in zip(first.lowrank or (), second.lowrank or (), strict=True):
        assert_same(part, other)


@quick
@given(matrix=matrices())
def test_any_valid_matrix_comes_back_exactly(matrix: PackedMatrix) -> None:
    blob = matrix.to_bytes()
    assert len(blob) == matrix.nbytes
    for buffer in (blob, memoryview(blob), np.frombuffer(blob, np.uint8), torch.tensor(list(blob)).byte()):
        back = PackedMatrix.from_buffer(buffer, where="w")
        assert_same(back, matrix)
        assert back.to_bytes() == blob


@quick
@given(matrix=matrices(), lost=st.integers(1, 200), added=st.binary(min_size=1, max_size=40))
def test_a_blob_of_any_other_length_is_refused(matrix: PackedMatrix, lost: int, added: bytes) -> None:
    blob = matrix.to_bytes()
    for wrong in (blob[: max(0, len(blob) - lost)], blob + added):
        with pytest.raises(InputError, match=r"bytes|not a compressed matrix"):
            PackedMatrix.from_buffer(wrong, where="w")


@settings(quick, max_examples=250)
@given(matrix=matrices(), field=st.sampled_from(sorted(HEADER_FIELDS)), data=st.data())
def test_a_corrupted_header_field_is_refused_or_read_as_it_is(
    matrix: PackedMatrix, field: str, data: st.DataObject
) -> None:
    """Nothing is ignored: what is accepted is written back as the same bytes, and decodes within them."""
    blob = bytearray(matrix.to_bytes())
    headers = [0]
    if matrix.lowrank is not None:
        left = len(blob) - matrix.codes.size - matrix.lowrank[1].nbytes
        headers += [left - matrix.lowrank[0].nbytes, left]
    offset, format_ = HEADER_FIELDS[field]
    at = data.draw(st.sampled_from(headers)) + offset
    (old,) = struct.unpack_from(format_, blob, at)
    largest = (1 << 8 * struct.calcsize(format_)) - 1
    near = st.integers(max(0, old - 17), min(largest, old + 17))
    new = data.draw((near | st.integers(0, largest)).filter(lambda value: value != old))
    struct.pack_into(format_, blob, at, new)
    try:
        found = PackedMatrix.from_buffer(bytes(blob), where="model.weight")
    except InputError as error:
        assert "model.weight" in str(error.tensor) and error.remedy and error.exit_code == 3
        return
    assert field not in ("magic", "log2(B)")
    assert found.to_bytes() == bytes(blob)
    for part in (found, *(found.lowrank or ())):
        assert decode(part).shape == (part.rows, part.header.cols_padded)


RIGHT, LEFT = random_matrix(3, 48).header, random_matrix(3, 40).header
"""The low-rank factors of a 40 x 48 matrix of rank 3."""
ROWS = np.zeros(40, np.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "impossible shape"),
        ({"cols": 2**31}, "impossible shape"),
        ({"L": 11}, "trellis state bits"),
        ({"L": 17}, "trellis state bits"),
        ({"seed": -1}, "impossible seed"),
        ({"seed": 2**32}, "impossible seed"),
        ({"base": 0.0}, "impossible scale base"),
        ({"base": 2 * MAX_BASE}, "impossible scale base"),
        ({"scale_steps": 15}, "impossible scale steps"),
        ({"scale_steps": 272}, "impossible scale steps"),
        ({"row_bits": np.full(2, 4, np.uint8)}, "row_bits"),
        ({"row_bits": np.full(3, 4, np.int64)}, "row_bits"),
        ({"row_bits": np.full(3, 9, np.uint8)}, "bits per weight"),
        ({"row_scale": ROWS[1:]}, "row_scale"),
        ({"row_scale": ROWS.astype(np.float32)}, "row_scale"),
        ({"row_class": ROWS[1:]}, "row_class"),
        ({"row_class": ROWS + np.uint8(16)}, "row classes"),
        ({"input_scale": ROWS}, "input_scale"),
        ({"lowrank": (RIGHT, random_matrix(4, 40).header)}, "ranks 3 and 4"),
        ({"lowrank": (random_matrix(41, 48).header, random_matrix(41, 40).header)}, "rank 41 exceeds"),
        ({"lowrank": (LEFT, RIGHT)}, "do not fit"),
        ({"lowrank": (RIGHT, random_matrix(3, 41).header)}, "do not fit"),
        ({"lowrank": (random_matrix(3, 48, rank=1).header, LEFT)}, "low-rank part itself"),
        ({"lowrank": (random_matrix(3, 48, is_sorted=True).header, LEFT)}, "cannot be sorted"),
        ({"lowrank": (RIGHT, random_matrix(3, 40, is_scaled=True).header)}, "no input scales"),
    ],
)
def test_no_header_is_made_with_one_wrong_field(changes: dict[str, Any], message: str) -> None:
    right = random_matrix(40, 48).header
    assert dataclasses.replace(right, lowrank=(RIGHT, LEFT)).rank == 3
    with pytest.raises(InputError, match=message):
        dataclasses.replace(right, **changes)


def test_codes_and_factors_must_fit_the_header() -> None:
    matrix = random_matrix(40, 48, rank=3)
    header, codes, lowrank = matrix.header, matrix.codes, matrix.lowrank
    assert lowrank is not None
    assert_same(PackedMatrix(header, codes, lowrank), matrix)
    for wrong in (codes[:-1], np.append(codes, codes[:1]), codes.astype(np.int16)):
        with pytest.raises(InputError, match="codes must be"):
            PackedMatrix(header, wrong, lowrank)
    with pytest.raises(InputError, match="contiguous"):
        PackedMatrix(header, np.repeat(codes, 2)[::2], lowrank)
    for factors in (None, lowrank[::-1], (lowrank[0], random_matrix(3, 40))):
        with pytest.raises(InputError, match="other low-rank factors"):
            PackedMatrix(header, codes, factors)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32])
def test_an_array_of_other_numbers_than_bytes_is_no_blob(dtype: type) -> None:
    blob = np.frombuffer(random_matrix(16, 16).to_bytes(), np.uint8)
    with pytest.raises(InputError, match="1-D uint8"):
        PackedMatrix.from_buffer(blob.astype(dtype), where="w")
    with pytest.raises(InputError, match="1-D uint8"):
        PackedMatrix.from_buffer(blob.reshape(-1, 16), where="w")


def test_the_low_rank_part_has_exactly_the_announced_length() -> None:
    """More bytes between the factors and the codes are refused, even if the announced length counts them."""
    matrix = random_matrix(40, 48, rank=3)
    assert matrix.lowrank is not None
    blob = bytearray(matrix.to_bytes())
    announced = sum(part.nbytes for part in matrix.lowrank)
    end = len(blob) - matrix.codes.size
    for extra, message in ((16, "another length than announced"), (8, "impossible low-rank part")):
        longer = blob[:end] + bytes(extra) + blob[end:]
        struct.pack_into("<I", longer, 28, announced + extra)
        with pytest.raises(InputError, match=message):
            PackedMatrix.from_buffer(bytes(longer), where="w")


def test_a_matrix_with_a_low_rank_part_alone_is_not_zero() -> None:
    lowrank = random_matrix(40, 48, 0, rank=3)
    assert lowrank.codes.size == 0 and not lowrank.is_zero
    assert random_matrix(40, 48, 0).is_zero and not random_matrix(40, 48, [0, 1, 0]).is_zero
