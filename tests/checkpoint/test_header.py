"""Faults 1 to 13: damaged and malicious headers, each with its message."""

from __future__ import annotations

import json
import os
import random
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ciuic_cli.checkpoint.formats import DTYPE_BITS
from ciuic_cli.checkpoint.header import read_header
from ciuic_cli.errors import InputError


def shard(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with the given header (an object or raw bytes) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert caught.value.exit_code == 3
    assert Path(caught.value.file or "") == path
    assert caught.value.remedy
    return caught.value


def test_reads_what_the_reference_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.arange(15, dtype=torch.float32).reshape(3, 5),
        "b": torch.zeros(7, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "fp8": torch.ones(2, 2).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {name: found.shape for name, found in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert header.tensors["fp8"].dtype == "F8_E4M3" and header.tensors["scalar"].numel == 1
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert sum(found.nbytes for found in header.tensors.values()) == size
    assert header.header_bytes + size == header.file_bytes == (tmp_path / "m.safetensors").stat().st_size


def test_every_dtype_has_the_bits_in_its_name() -> None:
    assert len(DTYPE_BITS) == 20
    for name, bits in DTYPE_BITS.items():
        digits = re.search(r"\d+", name)
        assert bits == (int(digits[0]) if digits else 8), name  # BOOL has no digits


def test_01_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"")
    error = refusal(tmp_path / "m")
    assert "empty" in error.message and "download it again" in (error.remedy or "")


def test_02_header_longer_than_the_file(tmp_path: Path) -> None:
    error = refusal(shard(tmp_path / "m", b"{}", length=1000))
    assert "longer than the file" in error.message and "1000" in error.message


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1])
def test_03_a_length_of_2_to_63_allocates_nothing(tmp_path: Path, length: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert str(length) in refusal(shard(tmp_path / "m", b"{}", length=length)).message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_04_header_over_100_mb_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse: the bytes are "there"
    assert "at most 100000000" in refusal(path).message


def test_05_header_not_utf8_or_not_json(tmp_path: Path) -> None:
    assert "UTF-8" in refusal(shard(tmp_path / "a", b'{"\xff\xfe": 1}')).message
    assert "not JSON" in refusal(shard(tmp_path / "b", b'{"a": ')).message
    assert "not an object" in refusal(shard(tmp_path / "c", b"[1, 2, 3]")).message
    assert "deep" in refusal(shard(tmp_path / "d", b"[" * 200_000)).message
    assert "not JSON" in refusal(shard(tmp_path / "e", b'{"a": ' + b"9" * 5000 + b"}")).message


def test_06_overlapping_offsets(tmp_path: Path) -> None:
    header = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 8, 24)}
    error = refusal(shard(tmp_path / "m", header, bytes(24)))
    assert error.tensor == "b" and "overlap" in error.message and "8" in error.message


def test_06_the_same_bytes_twice(tmp_path: Path) -> None:
    header = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)}
    assert "overlap" in refusal(shard(tmp_path / "m", header, bytes(16))).message


def test_07_holes_and_trailing_bytes(tmp_path: Path) -> None:
    holed = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 20, 36)}
    error = refusal(shard(tmp_path / "hole", holed, bytes(36)))
    assert error.tensor == "b" and "hole of 4 bytes" in error.message
    late = {"a": entry("F32", [4], 4, 20)}
    assert "hole of 4 bytes" in refusal(shard(tmp_path / "late", late, bytes(20))).message
    fine = {"a": entry("F32", [4], 0, 16)}
    assert "3 bytes trail" in refusal(shard(tmp_path / "trail", fine, bytes(19))).message
    assert "5 bytes trail" in refusal(shard(tmp_path / "none", {}, bytes(5))).message


def test_08_shape_times_dtype_differs_from_the_span(tmp_path: Path) -> None:
    error = refusal(shard(tmp_path / "m", {"w": entry("BF16", [3, 5], 0, 32)}, bytes(32)))
    assert error.tensor == "w" and "30 bytes" in error.message and "32" in error.message
    assert "1.5 bytes" in refusal(shard(tmp_path / "n", {"w": entry("F4", [3], 0, 1)}, b"x")).message


@pytest.mark.parametrize("shape", [[2**40, 2**40], [2**62, 2**62, 0], [2**63], [-1, 4], [1.5], ["4"], [True]])
def test_09_shape_product_overflows_or_is_no_size(tmp_path: Path, shape: list[Any]) -> None:
    error = refusal(shard(tmp_path / "m", {"w": entry("F32", shape, 0, 4)}, bytes(4)))
    assert error.tensor == "w" and ("overflow" in error.message or "not a list of sizes" in error.message)


def test_10_unknown_dtype_is_named(tmp_path: Path) -> None:
    error = refusal(shard(tmp_path / "m", {"w": entry("F7_X", [4], 0, 4)}, bytes(4)))
    assert error.tensor == "w" and "F7_X" in error.message


def test_11_truncated_shard(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(100)}, tmp_path / "m.safetensors")
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 7)
    error = refusal(tmp_path / "m.safetensors")
    assert (
        error.tensor == "w" and "truncated" in error.message and "download it again" in (error.remedy or "")
    )


def test_12_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4976698672\n"
    (tmp_path / "m").write_text(pointer)
    error = refusal(tmp_path / "m")
    assert "git-LFS" in error.message and "git lfs pull" in (error.remedy or "")


def test_13_duplicate_key(tmp_path: Path) -> None:
    one = json.dumps(entry("F32", [1], 0, 4))
    error = refusal(shard(tmp_path / "m", f'{{"w": {one}, "w": {one}}}'.encode(), bytes(4)))
    assert error.tensor == "w" and "twice" in error.message
    inner = '{"w": {"dtype": "F32", "dtype": "F16", "shape": [1], "data_offsets": [0, 4]}}'
    assert "twice" in refusal(shard(tmp_path / "n", inner.encode(), bytes(4))).message


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"dtype": "F32", "shape": [1]},
        {**entry("F32", [1], 0, 4), "extra": 1},
        {"dtype": 3, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
    ],
)
def test_malformed_entries_are_named(tmp_path: Path, value: Any) -> None:
    assert refusal(shard(tmp_path / "m", {"w": value}, bytes(4))).tensor == "w"


def test_metadata_must_be_strings(tmp_path: Path) -> None:
    assert "__metadata__" in refusal(shard(tmp_path / "m", {"__metadata__": {"a": 1}})).message
    assert "__metadata__" in refusal(shard(tmp_path / "n", {"__metadata__": []})).message


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m")
    assert "regular file" in refusal(tmp_path / "m").message


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    assert "cannot open" in refusal(tmp_path / "none").message


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, framed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw if framed else raw)
    try:
        header = read_header(path)
    except InputError:
        return
    assert all(found.end <= path.stat().st_size for found in header.tensors.values())


def test_every_flipped_bit_of_a_header_is_refused_or_stays_inside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, path)
    good = path.read_bytes()
    limit = read_header(path).header_bytes
    rng = random.Random(0)
    refused = 0
    for position in range(limit):
        raw = bytearray(good)
        raw[position] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        try:
            assert all(found.end <= len(raw) for found in read_header(path).tensors.values())
        except InputError:
            refused += 1
    assert refused > limit // 2
