"""docs/ARCHITECTURE.md names files, folders and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()

_QUOTED = re.compile(r"`([^`]+)`")
_FOLDER = re.compile(r"(?:\.\./)?\w[\w/]*/")
_FILE = re.compile(r"[\w/]+\.(?:py|cpp|h|cu)")
_NAME = re.compile(r"[A-Za-z_]\w+")
_OUTSIDE = {"from_pretrained"}
"""Names of other libraries."""


def _path(text: str) -> Path | None:
    """The file or folder that the document means: below `ciuic_cli/`, or in the repository's root."""
    return next((path for path in (ROOT / "ciuic_cli" / text, ROOT / text) if path.exists()), None)


def _defines(file: Path, name: str) -> bool:
    """Whether a Python file defines the name at its top level, or a C++ file has a function of that name."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return re.search(rf"^(?:def |class |){name}\b(?: =|:|\(|\[)", source, re.MULTILINE) is not None
    return re.search(rf"^[\w ]+[ *]{name}\(", source, re.MULTILINE) is not None


def _references(line: str) -> tuple[list[str], list[str]]:
    """Paths and names that a line quotes. In the drawing, every word that ends with a slash is a folder."""
    quoted = _QUOTED.findall(line)
    drawn = [] if quoted else re.findall(r"(?<!\S)[a-z]+/(?!\S)", line)
    paths = [text for text in quoted if _FILE.fullmatch(text) or _FOLDER.fullmatch(text)]
    return paths + drawn, [text for text in quoted if _NAME.fullmatch(text) and text not in _OUTSIDE]


def test_the_document_names_much() -> None:
    found = [_references(line) for line in LINES]
    assert sum(len(paths) for paths, _ in found) > 60
    assert sum(len(names) for _, names in found) > 30


@pytest.mark.parametrize("line", [line for line in LINES if any(_references(line))])
def test_what_a_line_names_exists(line: str) -> None:
    """Every path exists, and every name is defined in a file of the same line."""
    paths, names = _references(line)
    found = {path: _path(path) for path in paths}
    assert [path for path, place in found.items() if place is None] == []
    files = [place for place in found.values() if place is not None and place.is_file()]
    assert [name for name in names if not any(_defines(file, name) for file in files)] == []


def test_every_folder_of_the_package_is_named() -> None:
    folders = {path.name for path in (ROOT / "ciuic_cli").iterdir() if path.is_dir()} - {"__pycache__"}
    named = {path.split("/")[0] for line in LINES for path in _references(line)[0]}
    assert folders - named == set()


def test_wrong_names_are_noticed() -> None:
    assert _path("allocation/encoding.py") is None
    assert not _defines(ROOT / "ciuic_cli" / "allocation" / "plan.py", "price_matrix")
    assert not _defines(ROOT / "ciuic_cli" / "native" / "round.cpp", "multiply_group")
