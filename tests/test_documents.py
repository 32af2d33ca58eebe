"""The documents name files and constants that exist, their links lead somewhere, and the reference has every option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from ciuic_cli.cli.app import app

ROOT = Path(__file__).parents[1]
FOLDERS = ("autoload", "benchmarks", "ciuic_cli", "cuda", "docs", "samples", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "samples" / "README.md"])
EXPERIMENTS = [
    page for page in DOCUMENTS if page.parent.parent.name == "experiments" and page.parent != ROOT / "docs"
]
SECTIONS = ["Question", "Prediction", "Measurement", "Outcome", "Command"]

_SOURCE = re.compile(r"`([\w./-]+\.(?:py|cpp|h|cu))`")
_DEFINED = re.compile(r"`([A-Za-z_]\w+)`(?: = [\d.]+)? in\s+`([\w/]+(?:\.(?:py|cpp|h|cu)|/))`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _place(name: str) -> Path | None:
    """The file that a document means: from the root, from the package, or by its bare name anywhere."""
    if "/" not in name:
        return next((file for folder in FOLDERS for file in (ROOT / folder).rglob(name)), None)
    return next((path for path in (ROOT / name, ROOT / "ciuic_cli" / name) if path.is_file()), None)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the hub and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_constants_exist(page: Path) -> None:
    text = _text(page)
    assert [name for name in _SOURCE.findall(text) if _place(name) is None] == []
    for name, file in _DEFINED.findall(text):
        place = ROOT / file if file.endswith("/") else _place(file)
        assert place is not None, file
        sources = sorted(place.glob("*.py")) if place.is_dir() else [place]
        assert any(re.search(rf"\b{name}\b", _text(source)) for source in sources), (name, file)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_text(page)):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda page: page.stem)
def test_an_experiment_has_its_parts(page: Path) -> None:
    assert re.findall(r"^## (.+)$", _text(page), re.MULTILINE) == SECTIONS
    assert f"({page.relative_to(ROOT / 'docs' / 'experiments')})" in _text(
        ROOT / "docs" / "experiments" / "README.md"
    )


def test_there_are_experiments() -> None:
    assert len(EXPERIMENTS) > 40


@pytest.mark.parametrize(
    "command", ["compress", "inspect", "eval", "bench", "generate", "chat", "serve", "train", "plan"]
)
def test_the_reference_has_every_option(command: str) -> None:
    reference = _text(ROOT / "docs" / "REFERENCE.md")
    options = [
        option
        for parameter in typer.main.get_command(app).commands[command].params
        for option in parameter.opts
    ]  # type: ignore[attr-defined]
    assert len(options) > 1
    section = re.split(r"^## ", reference, flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(f"`ciuic {command} ")]
    assert [
        option for option in options if option.startswith("-") and not re.search(rf"`{option}\b", text)
    ] == []
