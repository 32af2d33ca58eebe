"""The CUDA sources: their folder, the choice of one kernel, and their digest."""

from __future__ import annotations

import re
import shutil
import subprocess
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


def kernels_of(unit: str, *options: str) -> list[str]:
    """The kernels that a file defines, as a host compiler's preprocessor finds them."""
    command = [shutil.which("g++") or "c++", "-E", "-P", "-x", "c++", *options, f"-I{sources.folder()}"]
    command += [f"-I{Path(sources.__file__).parents[1] / 'native'}", str(sources.folder() / f"{unit}.cu")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.findall(r"__global__ void[^;{}]*?(\w+)\(const __grid_constant__", text)


@pytest.mark.parametrize("unit", sources.UNITS)
def test_one_kernel_of_a_file_can_be_chosen(unit: str) -> None:
    assert kernels_of(unit) == list(sources.UNITS[unit])
    for kernel in sources.UNITS[unit]:
        assert kernels_of(unit, *sources.choice(kernel)) == [kernel]


def test_the_digest_covers_the_shared_header(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.digest("linear")
    changed = {**sources.headers(), "trellis_decode.h": "another"}
    sources.digest.cache_clear()
    monkeypatch.setattr(sources, "headers", lambda: changed)
    assert sources.digest("linear") != before
    sources.digest.cache_clear()
