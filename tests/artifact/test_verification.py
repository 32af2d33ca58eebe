"""Fault 39: the checksums reveal any damage to any file of an artifact."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ciuic_cli.artifact import writer
from ciuic_cli.artifact.verification import verify
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.errors import EnvironmentFault, InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of random bytes with their checksums."""
    generator = random.Random(0)
    made = tmp_path / "artifact"
    made.mkdir()
    for name, size in [("config.json", 300), ("model.safetensors", 30_000), ("tokenizer.json", 0)]:
        (made / name).write_bytes(generator.randbytes(size))
    writer.write_checksums(made)
    return made


def damaged(folder: Path) -> bool:
    try:
        return bool(verify(folder).problems)
    except InputError as error:
        assert error.exit_code == 3 and error.remedy
        return True


def test_an_intact_artifact(folder: Path) -> None:
    steps: list[tuple[int, int]] = []
    found = verify(folder, lambda done, total: steps.append((done, total)))
    assert (found.files, found.nbytes, found.problems, found.unlisted) == (3, 30_300, (), ())
    assert steps[-1] == (30_300, 30_300)
    found.require_intact(folder)


def test_single_bit_flips_anywhere_are_found(folder: Path) -> None:
    generator = random.Random(1)
    names = [name for name in os.listdir(folder) if (folder / name).stat().st_size]
    for _ in range(150):
        path = folder / generator.choice(names)
        good = path.read_bytes()
        position = generator.randrange(len(good))
        path.write_bytes(
            good[:position] + bytes([good[position] ^ 1 << generator.randrange(8)]) + good[position + 1 :]
        )
        assert damaged(folder), (path.name, position)
        path.write_bytes(good)
    assert not damaged(folder)


def test_any_bit_flip_in_the_list_is_found(folder: Path) -> None:
    path = folder / CHECKSUMS
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :])
            assert damaged(folder), (position, bit)


def test_problems_are_described(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    (folder / "tokenizer.json").unlink()
    (folder / "extra.safetensors").write_bytes(b"")
    (folder / "README.md").write_text("hello")
    found = verify(folder)
    assert dict(found.problems) == {
        "model.safetensors": "the file has 30001 bytes, not 30000",
        "tokenizer.json": "the file is missing",
        "extra.safetensors": "weights without a checksum: not a file of this artifact",
    }
    assert found.unlisted == ("README.md",)
    with pytest.raises(InputError, match="3 damaged files") as caught:
        found.require_intact(folder)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("content", ["[1]", "{", "null"])
def test_a_list_that_is_not_an_object(folder: Path, content: str) -> None:
    (folder / "ciuic_checksums.json").write_text(content)
    with pytest.raises(InputError, match="JSON") as caught:
        verify(folder)
    assert caught.value.remedy is not None and "artifact" in caught.value.remedy


def test_a_folder_without_checksums(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checksums"):
        verify(tmp_path)


def test_names_in_the_list_cannot_lead_outside(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes(b"s")
    entry = {"sha256": hashlib.sha256(b"s").hexdigest(), "bytes": 1}
    document = {"algorithm": "sha256", "files": {"../secret": entry}}
    (folder / CHECKSUMS).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    problems = dict(verify(folder).problems)
    assert "outside" in problems["../secret"]


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000 + "y", "\ud800"])
def test_names_that_no_file_can_have(folder: Path, name: str) -> None:
    document = json.loads((folder / CHECKSUMS).read_text())
    document["files"][name] = {"sha256": "0" * 64, "bytes": 1}
    (folder / CHECKSUMS).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    assert dict(verify(folder).problems) == {name: "the file is missing"}


def test_an_unreadable_file_is_not_reported_as_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(path: Path, *rest: Any, **named: Any) -> Any:
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *rest, **named)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(EnvironmentFault, match="Permission denied") as caught:
        verify(folder)
    assert caught.value.file == str(folder / "model.safetensors")
    assert "permissions" in str(caught.value.remedy)


@pytest.mark.parametrize("after", [0, 1])
def test_a_disk_error_names_the_list(folder: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The list is read twice, as JSON and byte by byte; each read may fail."""
    read, calls = Path.read_bytes, []

    def refuse(path: Path) -> bytes:
        calls.append(path)
        if len(calls) > after:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(EnvironmentFault, match="Input/output error") as caught:
        verify(folder)
    assert caught.value.file == str(folder / CHECKSUMS)


def test_a_folder_replaced_during_verification_is_not_reported_as_damaged(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").write_bytes(b"other")
    (tmp_path / "new" / CHECKSUMS).unlink()
    writer.write_checksums(tmp_path / "new")

    def replace(done: int, total: int) -> None:
        if (tmp_path / "new").exists():
            folder.rename(tmp_path / "old")
            (tmp_path / "new").rename(folder)

    with pytest.raises(InputError, match="was replaced"):
        verify(folder, replace)
    assert not verify(folder).problems


@pytest.mark.parametrize(
    "files",
    [
        {"a": 1},
        {"a": {"sha256": "zz", "bytes": 1}},
        {"a": {"sha256": "0" * 64, "bytes": -1}},
        {"a": {"sha256": "0" * 64}},
        {"a": {"sha256": "0" * 64, "bytes": True}},
        {"a": {"sha256": "0" * 64, "bytes": 10**400}},
    ],
)
def test_malformed_entries(folder: Path, files: object) -> None:
    document = {"algorithm": "sha256", "files": files}
    (folder / CHECKSUMS).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    with pytest.raises(InputError, match="damaged"):
        verify(folder)
