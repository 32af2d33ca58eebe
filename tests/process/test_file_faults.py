"""Failed reads of a file are environment faults that name the file."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ciuic_cli.artifact.reader import read_blobs
from ciuic_cli.checkpoint.folder import read_json
from ciuic_cli.checkpoint.header import read_header
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.process.file_faults import reading


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    save_file({"w": torch.zeros(64, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def failing(number: int, after: int = 0) -> Callable[..., Any]:
    """A system call that works like os.pread `after` times and then fails with the error `number`."""
    calls: list[int] = []
    real = os.pread

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    return call


@pytest.mark.parametrize("after", [0, 1])
def test_a_header_that_cannot_be_read(shard: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(os, "pread", failing(errno.EIO, after))
    with pytest.raises(EnvironmentFault, match="cannot read the file: Input/output error") as caught:
        read_header(shard)
    assert caught.value.file == str(shard) and "disk" in str(caught.value.remedy)


def test_a_file_that_cannot_be_mapped(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", failing(errno.EIO))
    with pytest.raises(EnvironmentFault, match="cannot read the file: Input/output error") as caught:
        read_blobs([shard])
    assert caught.value.file == str(shard)


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, EnvironmentFault), (errno.EACCES, InputError)])
def test_a_config_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", failing(number))
    with pytest.raises(kind, match=f"cannot read the file: {os.strerror(number)}") as caught:
        read_json(tmp_path, "config.json")
    assert str(tmp_path / "config.json") in str(caught.value)


def test_exhausted_memory_is_not_an_error_of_the_file() -> None:
    with pytest.raises(OSError, match="allocate memory"), reading(Path("a")):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
