"""Faults 1 to 13: the bytes of a shard."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
from attacks import Victim, names_by_offset, read_shard, seeded, write_shard

Make = Callable[..., Victim]
AGAIN = "download it again"


@seeded(2, campaign=8)
def test_fault_01_empty_file(victim: Make, seed: int) -> None:
    v = victim(seed)
    shard = v.shard()
    shard.write_bytes(b"")
    v.refused("empty", file=shard.name, remedy=AGAIN)


@seeded(2, campaign=8)
def test_fault_02_header_longer_than_the_file(victim: Make, seed: int) -> None:
    v = victim(seed)
    shard = v.shard()
    raw = shard.read_bytes()
    claimed = len(raw) - 8 + v.random.choice([1, 2, v.random.randrange(1, 10**6)])
    shard.write_bytes(claimed.to_bytes(8, "little") + raw[8:])
    v.refused("longer than the file", str(claimed), file=shard.name, remedy=AGAIN)


@seeded(2, campaign=6)
@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 2**40])
def test_fault_03_header_length_2_to_63_allocates_nothing(victim: Make, seed: int, length: int) -> None:
    v = victim(seed)
    shard = v.shard()
    shard.write_bytes(length.to_bytes(8, "little") + shard.read_bytes()[8:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    v.refused(str(length), file=shard.name, remedy=AGAIN)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@seeded(2, campaign=4)
def test_fault_04_header_over_100_mb(victim: Make, seed: int) -> None:
    v = victim(seed)
    shard = v.shard()
    claimed = 100_000_001 + v.random.randrange(10**8)
    shard.write_bytes(claimed.to_bytes(8, "little") + b"{")
    os.truncate(shard, 3 * 10**8)  # sparse: as long as it claims
    v.refused("100000000", str(claimed), file=shard.name, remedy=AGAIN)


@seeded(2, campaign=8)
@pytest.mark.parametrize("way", ["utf8", "cut", "list", "deep", "number", "text", "surrogate"])
def test_fault_05_header_not_utf8_or_not_json(victim: Make, seed: int, way: str) -> None:
    v = victim(seed)
    shard = v.shard()
    header, data = read_shard(shard)
    raw = json.dumps(header).encode()
    place = v.random.randrange(1, len(raw) - 1)
    spoilt = {
        "utf8": raw[:place] + bytes([v.random.choice([0xFF, 0xC0, 0xFE])]) + raw[place + 1 :],
        "cut": raw[:place],
        "list": json.dumps(list(header)).encode(),
        "deep": b"[" * (50_000 + place),
        "number": b'{"w": ' + b"9" * (5000 + place) + b"}",
        "text": v.random.randbytes(40).hex().encode(),
        "surrogate": raw.replace(b'weight"', b'weight\\ud800"', 1),
    }[way]
    write_shard(shard, spoilt, data)
    word = {"utf8": "UTF-8", "surrogate": "not valid Unicode"}.get(way, "JSON")
    v.refused(word, file=shard.name, remedy=AGAIN)


@seeded(2, campaign=8)
def test_fault_06_overlapping_offsets(victim: Make, seed: int) -> None:
    v = victim(seed, "llama")
    shard = v.shard()
    header, data = read_shard(shard)
    names = names_by_offset(header)
    number = v.random.randrange(1, len(names))
    begin, end = header[names[number]]["data_offsets"]
    shift = v.random.randrange(1, begin + 1)
    header[names[number]]["data_offsets"] = [begin - shift, end - shift]
    write_shard(shard, header, data)
    done = v.refused("overlap", file=shard.name, remedy=AGAIN)
    assert done.field("tensor") in names


@seeded(2, campaign=8)
@pytest.mark.parametrize("way", ["hole", "first", "trailing"])
def test_fault_07_holes_or_trailing_bytes(victim: Make, seed: int, way: str) -> None:
    v = victim(seed)
    shard = v.shard()
    header, data = read_shard(shard)
    names = names_by_offset(header)
    extra = v.random.choice([1, 2, 64, v.random.randrange(1, 5000)])
    if way == "trailing":
        write_shard(shard, header, data + v.random.randbytes(extra))
        v.refused(f"{extra} bytes trail", file=shard.name, remedy=AGAIN)
        return
    number = 0 if way == "first" else v.random.randrange(len(names))
    place = header[names[number]]["data_offsets"][0]
    for name in names[number:]:
        header[name]["data_offsets"] = [offset + extra for offset in header[name]["data_offsets"]]
    write_shard(shard, header, data[:place] + bytes(extra) + data[place:])
    v.refused(f"hole of {extra} bytes", file=shard.name, tensor=names[number], remedy=AGAIN)


@seeded(2, campaign=10)
@pytest.mark.parametrize("way", ["shape", "dtype", "span"])
def test_fault_08_shape_times_dtype_differs_from_the_span(victim: Make, seed: int, way: str) -> None:
    v = victim(seed)
    shard = v.shard()
    header, data = read_shard(shard)
    name = v.random.choice(names_by_offset(header))
    entry = header[name]
    if way == "shape":
        axis = v.random.randrange(len(entry["shape"]))
        entry["shape"][axis] += v.random.choice([-1, 1, 1000])
    elif way == "dtype":
        entry["dtype"] = v.random.choice(["F32", "F64", "U8", "F8_E4M3", "I64", "F4"])
    else:
        entry["data_offsets"][1] -= 1
    write_shard(shard, header, data)
    v.refused("needs", "its span has", file=shard.name, tensor=name, remedy=AGAIN)


@seeded(2, campaign=6)
@pytest.mark.parametrize(
    "shape", [[2**40, 2**40], [2**62, 2**62, 0], [2**63 - 1, 3], [2**32, 2**32], [0, 2**63 - 1, 2**63 - 1, 2]]
)
def test_fault_09_shape_product_overflows(victim: Make, seed: int, shape: list[int]) -> None:
    v = victim(seed)
    shard = v.shard()
    header, data = read_shard(shard)
    name = v.random.choice(names_by_offset(header))
    header[name]["shape"] = shape
    write_shard(shard, header, data)
    done = v.refused(file=shard.name, tensor=name, remedy=AGAIN)
    assert "overflows" in done.stderr or "its span has" in done.stderr


@seeded(2, campaign=6)
@pytest.mark.parametrize("dtype", ["F7_X", "bf16", "FLOAT", "", "Q4_K", "\x1b[31mF32"])
def test_fault_10_unknown_dtype_is_named(victim: Make, seed: int, dtype: str) -> None:
    v = victim(seed)
    shard = v.shard()
    header, data = read_shard(shard)
    name = v.random.choice(names_by_offset(header))
    header[name]["dtype"] = dtype
    write_shard(shard, header, data)
    v.refused("unknown dtype", repr(dtype), file=shard.name, tensor=name)


@seeded(2, campaign=12)
def test_fault_11_truncated_shard(victim: Make, seed: int) -> None:
    v = victim(seed)
    shard = v.shard()
    header, data = read_shard(shard)
    lost = v.random.choice([1, len(data), v.random.randrange(1, len(data))])
    os.truncate(shard, shard.stat().st_size - lost)
    v.refused("truncated", file=shard.name, tensor=names_by_offset(header)[-1], remedy=AGAIN)


@seeded(2, campaign=8)
def test_fault_11_truncated_inside_the_header(victim: Make, seed: int) -> None:
    v = victim(seed)
    shard = v.shard()
    header_bytes = int.from_bytes(shard.read_bytes()[:8], "little")
    os.truncate(shard, v.random.randrange(1, 8 + header_bytes))
    v.refused(file=shard.name, remedy=AGAIN)


@seeded(2, campaign=6)
@pytest.mark.parametrize("host", ["git-lfs.github.com", "hawser.github.com"])
def test_fault_12_a_git_lfs_pointer_instead_of_weights(victim: Make, seed: int, host: str) -> None:
    v = victim(seed)
    shard = v.shard()
    digest = v.random.randbytes(32).hex()
    shard.write_text(
        f"version https://{host}/spec/v1\noid sha256:{digest}\nsize {v.random.randrange(10**10)}\n"
    )
    v.refused("git-LFS pointer", file=shard.name, remedy="git lfs pull")


@seeded(2, campaign=8)
@pytest.mark.parametrize("way", ["same", "other", "inner", "metadata"])
def test_fault_13_duplicate_key_in_the_header(victim: Make, seed: int, way: str) -> None:
    v = victim(seed)
    shard = v.shard()
    header, data = read_shard(shard)
    name = v.random.choice(names_by_offset(header))
    text = json.dumps(header)
    again: dict[str, Any] = {**header[name], "dtype": "F16"} if way == "other" else header[name]
    if way == "inner":
        entry = json.dumps(header[name])
        text, name = text.replace(entry, entry[:-1] + ', "dtype": "BF16"}'), "dtype"
    elif way == "metadata":
        text, name = text[:-1] + ', "__metadata__": {"format": "pt"}}', "__metadata__"
    else:
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(again)}}}"
    write_shard(shard, text.encode(), data)
    v.refused("twice", file=shard.name, tensor=name, remedy=AGAIN)
