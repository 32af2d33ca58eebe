"""Blobs: exact round trips on odd shapes, sizes in bytes, and refusal of impossible fields."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.layout import read_header
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import (
    decode_scales,
    encode_input_scales,
    encode_scales,
    finest_steps,
    input_factors,
)
from ciuic_cli.codecs.sizes import packed_nbytes
from ciuic_cli.codecs.stack import ExpertStack, read_stack_header
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.errors import InputError

ODD_SHAPES = [(1, 1), (1, 16), (17, 33), (545, 830), (16, 1024), (40, 3)]


def same_header(a: MatrixHeader, b: MatrixHeader) -> bool:
    fields = ("rows", "cols", "L", "seed", "base", "scale_steps")
    equal = all(getattr(a, f) == getattr(b, f) for f in fields)
    for f in ("row_bits", "row_scale", "row_class", "input_scale"):
        x, y = getattr(a, f), getattr(b, f)
        equal &= (x is None) == (y is None) and (x is None or np.array_equal(x, y))
    if a.lowrank is None or b.lowrank is None:
        return equal and a.lowrank is b.lowrank
    return equal and all(same_header(x, y) for x, y in zip(a.lowrank, b.lowrank, strict=True))


def same(a: PackedMatrix, b: PackedMatrix) -> bool:
    equal = same_header(a.header, b.header) and np.array_equal(a.codes, b.codes)
    return equal and all(same(x, y) for x, y in zip(a.lowrank or (), b.lowrank or (), strict=True))


@pytest.mark.parametrize(("rows", "cols"), ODD_SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_round_trip(rows: int, cols: int, rank: int, is_sorted: bool, is_scaled: bool) -> None:
    matrix = random_matrix(rows, cols, [4, 0, 2, 8, 3], rank=rank, is_sorted=is_sorted, is_scaled=is_scaled)
    blob = matrix.to_bytes()
    assert len(blob) == matrix.nbytes
    assert same(PackedMatrix.from_buffer(blob, where="w"), matrix)
    tensor = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    assert PackedMatrix.from_buffer(tensor, where="w").to_bytes() == blob
    assert same_header(read_header(tensor, where="w"), matrix.header)


def test_layout_of_the_header_and_of_the_parts() -> None:
    matrix = random_matrix(17, 33, [4, 3], L=13, seed=7)
    blob = matrix.to_bytes()
    assert struct.unpack("<4sBBBBIIIfII", blob[:32]) == (
        b"CIU1", 13, 0, 4, matrix.header.scale_steps - 16, 17, 33, 7, matrix.header.base, 0, 0
    )  # fmt: skip
    assert list(blob[32:34]) == [4, 3]
    assert blob[34:51] == matrix.header.row_scale.tobytes()
    assert blob[51:64] == bytes(13)
    assert len(blob) == 64 + 3 * 32 * (4 + 3) == packed_nbytes(17, 33, [4, 3])
    assert matrix.header.group_offset.tolist() == [0, 3 * 32 * 4]


def test_input_scales_follow_the_classes() -> None:
    matrix = random_matrix(17, 33, [4, 3], is_sorted=True, is_scaled=True)
    scales, blob = matrix.header.input_scale, matrix.to_bytes()
    assert scales is not None and blob[5] == 6
    assert blob[60:93] == scales.tobytes() and blob[93:96] == bytes(3)
    assert len(blob) == 96 + 3 * 32 * 7 == packed_nbytes(17, 33, [4, 3], is_sorted=True, has_input_scale=True)
    factors = matrix.header.input_factors_on(torch.device("cpu"))
    assert factors is not None
    assert torch.equal(factors, torch.tensor([2.0 ** ((code - 128) / 16) for code in scales.tolist()]))


def test_input_scales_are_rounded_to_the_nearest() -> None:
    exact = torch.exp(torch.randn(1000, generator=torch.Generator().manual_seed(0)).double())
    rounded = input_factors(encode_input_scales(exact)).double()
    assert float((rounded / exact).log2().abs().max()) <= 1 / 32 + 1e-6
    assert encode_input_scales(torch.tensor([1.0, 2.0, 1e-9, 1e9])).tolist() == [128, 144, 0, 255]


def test_no_expert_and_no_factor_has_input_scales() -> None:
    scaled = random_matrix(32, 48, 4, is_scaled=True)
    with pytest.raises(InputError, match="input scales"):
        ExpertStack((scaled,))
    blob = bytearray(ExpertStack((random_matrix(32, 48, 4),)).to_bytes())
    head, expert = blob[:32], bytearray(scaled.to_bytes())
    head[24:32] = (32 + len(expert)).to_bytes(8, "little")
    with pytest.raises(InputError, match="expert of a stack has no input scales"):
        ExpertStack.from_buffer(bytes(head + expert), where="w")
    with pytest.raises(InputError, match="factor has no input scales"):
        dataclasses.replace(random_matrix(48, 48, 4), lowrank=(scaled, scaled))
    nested = bytearray(random_matrix(32, 48, 4, rank=16).to_bytes())
    nested[nested.index(b"CIU1", 4) + 5] = 4
    with pytest.raises(InputError, match="low-rank"):
        PackedMatrix.from_buffer(bytes(nested), where="w")


def test_sorted_rows_have_four_bits_each_after_the_scales() -> None:
    matrix = random_matrix(17, 33, [4, 3], is_sorted=True)
    row_class, blob = matrix.header.row_class, matrix.to_bytes()
    assert row_class is not None and blob[5] == 2
    pairs = [*row_class.tolist(), 0]
    assert list(blob[51:60]) == [low + 16 * high for low, high in zip(pairs[::2], pairs[1::2], strict=True)]
    assert blob[60:64] == bytes(4)
    assert len(blob) == packed_nbytes(17, 33, [4, 3], is_sorted=True)
    order, position = matrix.header.order, matrix.header.position
    assert order is not None and position is not None
    expected = [row for class_ in range(16) for row in range(17) if row_class[row] == class_]
    assert order.tolist() == expected
    assert order[position].tolist() == list(range(17))


def test_the_decoded_matrix_is_not_in_stored_order() -> None:
    matrix = random_matrix(40, 48, [4, 3, 2], rank=3, is_sorted=True)
    unsorted = dataclasses.replace(matrix.header, row_class=None)
    stored = trellis.decode_dense(dataclasses.replace(matrix, header=unsorted))
    assert matrix.header.order is not None
    assert torch.equal(trellis.decode_dense(matrix)[matrix.header.order], stored)
    assert not torch.equal(trellis.decode_dense(matrix), stored)


def test_reading_copies_the_header_and_not_the_codes() -> None:
    original = random_matrix(64, 64, 4, is_sorted=True, is_scaled=True)
    buffer = np.frombuffer(original.to_bytes(), dtype=np.uint8)
    matrix = PackedMatrix.from_buffer(buffer, where="w")
    assert np.shares_memory(matrix.codes, buffer)
    header = matrix.header
    for array in (header.row_bits, header.row_scale, header.row_class, header.input_scale):
        assert array is not None and not np.shares_memory(array, buffer)


def test_codes_and_factors_must_fit_the_header() -> None:
    matrix, other = random_matrix(40, 48, 4, rank=2), random_matrix(40, 48, 4, rank=2)
    for codes in (matrix.codes[1:], matrix.codes.astype(np.int16), np.repeat(matrix.codes, 2)[::2]):
        with pytest.raises(InputError, match="codes must be"):
            dataclasses.replace(matrix, codes=codes)
    for lowrank in (None, other.lowrank):
        with pytest.raises(InputError, match="other low-rank factors"):
            dataclasses.replace(matrix, lowrank=lowrank)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda matrix: pickle.loads(pickle.dumps(matrix))])
def test_copies_have_memory_of_their_own(duplicate: Callable[[PackedMatrix], PackedMatrix]) -> None:
    matrix = random_matrix(40, 48, [4, 3, 2], rank=2)
    expected = trellis.decode(matrix)  # fills the cached addresses
    twin = duplicate(matrix)
    assert twin.native_arguments[0] != matrix.native_arguments[0]
    assert twin.native_arguments[0] == twin.codes.ctypes.data
    assert torch.equal(trellis.decode(twin), expected) and same(twin, matrix)


def test_expert_stack_round_trip_and_alignment() -> None:
    experts = (random_matrix(20, 40, [4, 2]), random_matrix(20, 40, 0), random_matrix(20, 40, [3, 8], rank=2))
    stack = ExpertStack(experts)
    blob = stack.to_bytes()
    assert len(blob) == stack.nbytes
    offsets = struct.unpack("<4Q", blob[16:48])
    assert all(offset % 16 == 0 for offset in offsets)
    back = ExpertStack.from_buffer(blob, where="experts")
    assert all(same(a, b) for a, b in zip(back.experts, experts, strict=True))
    assert (back.rows, back.cols) == (20, 40)
    headers = read_stack_header(blob, where="experts")
    assert all(same_header(a, b.header) for a, b in zip(headers.experts, experts, strict=True))
    parts = headers.experts_in(np.frombuffer(blob, np.uint8))
    assert [part.tobytes() for part in parts] == [expert.to_bytes() for expert in experts]


def test_experts_of_different_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="one shape"):
        ExpertStack((random_matrix(16, 16, 4), random_matrix(16, 32, 4)))


def damaged(blob: bytes, offset: int, format_: str, value: float) -> bytes:
    changed = bytearray(blob)
    struct.pack_into(format_, changed, offset, value)
    return bytes(changed)


def nested_and_sorted() -> bytes:
    """A right factor that says its rows are sorted; the bytes of its classes are zeros already."""
    return damaged(LOWRANK, 80 + 5, "<B", 2)


def of_rank_two() -> bytes:
    """A right factor that says it has two rows; the scale of its third row becomes padding, so it must be zero."""
    return damaged(damaged(LOWRANK, 80 + 35, "<B", 0), 80 + 8, "<I", 2)


PLAIN = random_matrix(17, 33, [4, 3]).to_bytes()
LOWRANK = random_matrix(40, 48, [4, 3, 2], rank=3).to_bytes()
SORTED = random_matrix(17, 33, [4, 3], is_sorted=True).to_bytes()


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "not a compressed matrix"),
        (PLAIN[:31], "not a compressed matrix"),
        (b"CIU2" + PLAIN[4:], "not a compressed matrix"),
        (damaged(PLAIN, 4, "<B", 11), "trellis state bits"),
        (damaged(PLAIN, 4, "<B", 17), "trellis state bits"),
        (damaged(PLAIN, 5, "<B", 8), "unknown flags"),
        (damaged(PLAIN, 5, "<B", 1), "low-rank"),
        (damaged(PLAIN, 6, "<B", 5), "blocks"),
        (damaged(PLAIN, 8, "<I", 0), "impossible shape"),
        (damaged(PLAIN, 8, "<I", 2**32 - 1), "impossible shape"),
        (damaged(PLAIN, 8, "<I", 2**31 - 16), "cannot be in"),
        (damaged(PLAIN, 12, "<I", 2**31 - 16), "expected"),
        (damaged(PLAIN, 20, "<f", 0.0), "scale base"),
        (damaged(PLAIN, 20, "<f", -1.0), "scale base"),
        (damaged(PLAIN, 20, "<f", float("nan")), "scale base"),
        (damaged(PLAIN, 20, "<f", float("inf")), "scale base"),
        (damaged(PLAIN, 20, "<f", 3e38), "scale base"),
        (damaged(PLAIN, 24, "<I", 1), "low-rank"),
        (damaged(PLAIN, 28, "<I", 16), "low-rank"),
        (damaged(PLAIN, 32, "<B", 9), "bits per weight"),
        (damaged(PLAIN, 32, "<B", 255), "bits per weight"),
        (damaged(PLAIN, 32, "<B", 8), "expected"),
        (damaged(PLAIN, 32, "<B", 3), "follow"),
        (damaged(PLAIN, 60, "<B", 1), "padding"),
        (PLAIN[:-1], "expected"),
        (PLAIN + b"\0", "follow"),
        (damaged(LOWRANK, 24, "<I", 4), "rank"),
        (damaged(LOWRANK, 28, "<I", 2**32 - 16), "cannot be in"),
        (of_rank_two(), "rank 3 announced"),
        (damaged(LOWRANK, 80 + 5, "<B", 1), "low-rank"),
        (nested_and_sorted(), "low-rank"),
        (damaged(SORTED, 59, "<B", SORTED[59] | 16), "padding after the classes"),
        (damaged(SORTED, 63, "<B", 1), "padding after the scales"),
        (damaged(SORTED, 5, "<B", 0), "padding"),
    ],
)  # fmt: skip
def test_impossible_matrices_are_refused(blob: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        PackedMatrix.from_buffer(blob, where="model.weight")
    assert "model.weight" in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_dense_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="1-D uint8"):
        PackedMatrix.from_buffer(torch.zeros(4, 4), where="w")


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, "not a compressed expert stack"),
        (4, "a stack of 253 experts cannot be in"),
        (8, "the stack 235 x 40"),
        (12, "the stack 20 x 215"),
        (16, "expert offsets"),
        (23, "expert offsets"),
        (24, "31 bytes follow"),
        (32, "expert offsets"),
        (40, "padding after the expert offsets"),
        (48, "not a compressed matrix"),
    ],
)
def test_impossible_stacks_are_refused(at: int, message: str) -> None:
    blob = bytearray(ExpertStack((random_matrix(20, 40, 4), random_matrix(20, 40, 2))).to_bytes())
    blob[at] ^= 0xFF
    with pytest.raises(InputError, match=message):
        ExpertStack.from_buffer(bytes(blob), where="experts")


def test_a_stack_that_announces_four_billion_experts_is_refused_without_allocating_for_them() -> None:
    blob = struct.pack("<4sIII", b"CIUX", 2**32 - 1, 16, 16) + bytes(48)
    with pytest.raises(InputError, match="cannot be in"):
        ExpertStack.from_buffer(blob, where="experts")


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["plain", "lowrank", "stack"]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
    header=st.booleans(),
    length=st.floats(0, 1.1),
)
def test_corruption_never_crashes(
    kind: str, flips: list[tuple[float, int]], header: bool, length: float
) -> None:
    """A corrupted blob is refused, or what was read decodes and multiplies without a fault."""
    original = PLAIN if kind == "plain" else LOWRANK
    if kind == "stack":
        original = ExpertStack((random_matrix(20, 40, 4), random_matrix(20, 40, 2, rank=1))).to_bytes()
    blob = bytearray(original)
    for position, change in flips:
        blob[int(position * (64 if header else len(blob)))] ^= change
    if length < 1:
        blob = blob[: int(length * len(blob))]
    elif length > 1.05:
        blob += bytes(16)
    try:
        if kind == "stack":
            matrices = list(ExpertStack.from_buffer(bytes(blob), where="x").experts)
        else:
            matrices = [PackedMatrix.from_buffer(bytes(blob), where="x")]
    except InputError:
        return
    for matrix in matrices:
        assert matrix.cols <= 64 and matrix.rows <= 64
        assert torch.isfinite(trellis.decode(matrix)).all()
        trellis.matmul(matrix, torch.ones(1, matrix.cols))
        for part in matrix.lowrank or ():
            trellis.decode(part)


@pytest.mark.parametrize("steps", [16, 40])
def test_scales_are_within_half_a_step(steps: int) -> None:
    exact = np.exp(np.random.default_rng(0).normal(-4, 1, 200))
    base, codes = encode_scales(exact, steps)
    rounded = decode_scales(base, codes, steps)
    assert rounded.dtype == np.float32
    assert np.abs(np.log2(rounded / exact)).max() <= 0.5 / steps + 1e-6


@pytest.mark.parametrize(("octaves", "steps"), [(0.0, 271), (0.5, 271), (1.0, 255), (2.5, 102), (20.0, 16)])
def test_the_finest_steps_span_all_scales(octaves: float, steps: int) -> None:
    exact = 0.013 * np.exp2(np.linspace(0.0, octaves, 50))
    assert finest_steps(exact) == steps
    if octaves < 15:
        rounded = decode_scales(*encode_scales(exact, steps), steps)
        assert np.abs(np.log2(rounded / exact)).max() <= 0.5 / steps + 1e-6


@pytest.mark.parametrize("exact", [[0.0, 0.0], [0.0, 1.0], [1e-44, 1e-40], [1e-30, 1e30], [3e38]])
def test_extreme_scales_stay_valid(exact: list[float]) -> None:
    base, codes = encode_scales(np.array(exact))
    assert np.isfinite(decode_scales(base, codes)).all()
    rows = len(exact)
    MatrixHeader(rows, 16, 16, 0, base, np.zeros(1, np.uint8), codes)  # refuses impossible scales


def test_scales_must_be_finite() -> None:
    with pytest.raises(InputError):
        encode_scales(np.array([1.0, np.inf]))
