"""Sampled digests cover every byte of a small file and read at most 2 MiB of a large one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ciuic_cli.process.digests import sampled_digest


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 2 << 20])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    digests = {sampled_digest(file)}
    positions = sorted({0, size // 3, size // 2, size - 1} & set(range(size)))
    for position in positions:
        data = bytearray(size)
        data[position] = 1
        file.write_bytes(data)
        digests.add(sampled_digest(file))
    assert len(digests) == 1 + len(positions)


def test_a_large_file_is_read_in_samples_from_its_first_bytes_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, size = tmp_path / "file", 4 << 30
    file.touch()
    os.truncate(file, size)
    digests = {sampled_digest(file)}
    for position in (0, size - 1):
        with file.open("r+b") as opened:
            opened.seek(position)
            opened.write(b"x")
        digests.add(sampled_digest(file))
    assert len(digests) == 3
    read = []
    monkeypatch.setattr("hashlib.sha256", lambda: _Counter(read))
    sampled_digest(file)
    assert sum(read) <= 2 << 20


class _Counter:
    def __init__(self, read: list[int]) -> None:
        self.read = read

    def update(self, data: bytes) -> None:
        self.read.append(len(data))

    def hexdigest(self) -> str:
        return ""
