"""The folder of the CUDA sources, in a checkout and in an installed package, and their digest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.kernels import sources


def test_in_a_checkout() -> None:
    assert sources.folder() == Path(__file__).parents[2] / "cuda"


def test_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ciuic_cli"
    shutil.copytree(sources.folder(), package / "cuda")
    monkeypatch.setattr(sources, "_PACKAGE", package)
    assert sources.folder() == package / "cuda"


def test_missing_sources_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "ciuic_cli")
    with pytest.raises(EnvironmentFault, match="missing from this installation"):
        sources.folder()


def test_the_digest_covers_the_shared_header(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.digest("linear")
    changed = {**sources.headers(), "trellis_decode.h": "another"}
    sources.digest.cache_clear()
    monkeypatch.setattr(sources, "headers", lambda: changed)
    assert sources.digest("linear") != before
    sources.digest.cache_clear()
