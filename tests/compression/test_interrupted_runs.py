"""A stopped run continues to the same bytes; one with other options is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import compress_tiny, weights_of

from ciuic_cli.compression import writing
from ciuic_cli.errors import EnvironmentFault, InputError


def half_of(phase: str) -> Callable[[str, int, int], None]:
    """A progress callback that interrupts the run when half of this phase is done."""

    def interrupt(what: str, done: int, total: int) -> None:
        if what == phase and 2 * done >= total:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("stop_at", ["forward", "arms", "probe", "encode", "write"])
def test_an_interrupted_run_continues_to_the_same_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, stop_at: str
) -> None:
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"
    compress_tiny(source, tmp_path / "whole", text)

    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, progress=half_of(stop_at))
    assert not out.exists()
    hints: list[str] = []
    compress_tiny(source, out, text, hint=hints.append)
    assert any("continuing" in hint for hint in hints)
    assert weights_of(out) == weights_of(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_statistics_go_when_their_matrices_are_coded(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    """Also in a run that is interrupted between two matrices and continued."""
    source, out = tiny_checkpoint("deepseek_v3"), tmp_path / "out"
    compress_tiny(source, tmp_path / "whole", text)
    left: dict[str, list[str]] = {"encode": [], "write": []}

    def moments() -> list[str]:
        return sorted(path.name for path in tmp_path.glob(".out*/statistics/*.safetensors"))

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "encode" and 2 * done >= total:
            left["encode"] = moments()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, progress=interrupt)
    phases: list[str] = []

    def note(what: str, done: int, total: int) -> None:
        phases.append(what)
        if what == "write":
            left["write"] = moments()

    compress_tiny(source, out, text, progress=note)
    assert "forward" not in phases  # they were not collected again
    assert left["encode"] and left["write"] == []
    assert weights_of(out) == weights_of(tmp_path / "whole")


def test_a_damaged_probe_is_measured_again(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"
    compress_tiny(source, tmp_path / "whole", text)
    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, progress=half_of("encode"))
    probe = sorted(tmp_path.glob(".out*/probe/*"))[1]
    saved = probe.read_bytes()
    probe.write_bytes(saved[:-1] + b"?")
    phases: set[str] = set()
    compress_tiny(source, out, text, progress=lambda what, done, total: phases.add(what))
    assert "probe" in phases and "forward" not in phases
    assert weights_of(out) == weights_of(tmp_path / "whole")


def test_statistics_are_collected_again_if_a_code_was_damaged_that_replaced_them(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"
    compress_tiny(source, tmp_path / "whole", text)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, progress=interrupt)
    code = next(tmp_path.glob(".out*/encode/*3"))
    code.write_bytes(code.read_bytes()[:-1] + b"?")
    phases: list[str] = []
    compress_tiny(source, out, text, progress=lambda what, done, total: phases.append(what))
    assert "forward" in phases
    assert weights_of(out) == weights_of(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["changed", "absent"])
def test_statistics_are_collected_again_if_the_list_of_their_files_was_damaged(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, damage: str
) -> None:
    """The files of coded matrices are gone by then, and only the list tells which those were."""
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"
    compress_tiny(source, tmp_path / "whole", text)

    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, progress=half_of("encode"))
    (listing,) = tmp_path.glob(".out*/statistics/statistics.json")
    if damage == "absent":
        listing.unlink()
    else:
        listing.write_bytes(b"\xae" + listing.read_bytes()[1:])
    compress_tiny(source, out, text)
    assert weights_of(out) == weights_of(tmp_path / "whole")


def test_a_run_continues_after_a_disk_fault(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"
    compress_tiny(source, tmp_path / "whole", text)
    encoding: list[str] = []
    read = os.preadv

    def failing(*arguments: Any) -> int:
        if encoding:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(EnvironmentFault, match="cannot read the file") as caught:
        compress_tiny(
            source, out, text, progress=lambda what, *_: encoding.append(what) if what == "encode" else None
        )
    assert caught.value.tensor and "continues" in str(caught.value.remedy)
    encoding.clear()
    hints: list[str] = []
    compress_tiny(source, out, text, hint=hints.append)
    assert any("continuing" in hint for hint in hints)
    assert weights_of(out) == weights_of(tmp_path / "whole")


def test_a_changed_option_is_refused_with_the_difference(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "arms":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_tiny(source, out, text, progress=interrupt)
    with pytest.raises(InputError, match="seed"):
        compress_tiny(source, out, text, seed=1)
    compress_tiny(source, out, text, seed=1, force=True)
    assert out.exists()


def _stopped_after_writing(source: Path, out: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted when its files are written, but not published."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing, "require_loadable", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compress_tiny(source, out, text)


def test_codes_are_on_the_disk_once_and_a_run_continues_from_its_files(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny_checkpoint("deepseek_v3"), tmp_path / "out"
    whole = compress_tiny(source, tmp_path / "whole", text)
    _stopped_after_writing(source, out, text, monkeypatch)
    journal = tmp_path / ".out.ciuic"
    assert max(path.stat().st_size for path in (journal / "encode").iterdir()) < 100  # they had kilobytes
    (file,) = (journal / "files").iterdir()
    assert file.stat().st_size == whole.artifact_bytes
    phases: list[str] = []
    report = compress_tiny(source, out, text, progress=lambda what, done, total: phases.append(what))
    assert "forward" not in phases
    assert weights_of(out) == weights_of(tmp_path / "whole")
    assert report.measured_kl == whole.measured_kl
    assert (out / file.name).stat().st_nlink == 1  # the journal is gone


@pytest.mark.parametrize("damage", ["lost", "changed", "measurement"])
def test_a_damaged_file_is_made_again_from_the_start(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    """The measurement of the rounded weights cannot be repeated either: it needs the codes that only the file has."""
    source, out = tiny_checkpoint("llama_tied"), tmp_path / "out"
    compress_tiny(source, tmp_path / "whole", text)
    _stopped_after_writing(source, out, text, monkeypatch)
    (file,) = (tmp_path / ".out.ciuic" / "files").iterdir()
    if damage == "measurement":
        file = tmp_path / ".out.ciuic" / writing.ROUNDED
    if damage == "lost":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))
    phases: list[str] = []
    compress_tiny(source, out, text, progress=lambda what, done, total: phases.append(what))
    assert "forward" in phases
    assert weights_of(out) == weights_of(tmp_path / "whole")


def test_without_hard_links_files_are_copied(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    source = tiny_checkpoint("llama_tied")
    compress_tiny(source, tmp_path / "whole", text)
    monkeypatch.setattr(os, "link", refuse)
    compress_tiny(source, tmp_path / "out", text)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")
