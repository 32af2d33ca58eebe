"""Fixtures of the fault tests: copies of tiny checkpoints to damage, and one finished artifact."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks import FAMILIES, QUICK, Victim, invoke

WORDS = "river mill evening lamps banks ninety tables under market grain walks cold paper"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words in random order: about a thousand bytes, each a token of the byte-level tokenizer."""
    generator = random.Random(0)
    words = WORDS.split()
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(generator.choice(words) for _ in range(200)) + ".\n", encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files per test, so that a test sees everything that the program leaves there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def victim(tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path) -> Callable[..., Victim]:
    """`victim(seed)`: a checkpoint of a random family, in one shard or several; `victim(seed, family, **options)`: of
    this family."""

    def make(seed: int, family: str | None = None, **options: Any) -> Victim:
        generator = random.Random(seed)
        if family is None:
            family, options = FAMILIES[(seed + generator.randrange(2)) % len(FAMILIES)]
        folder = tmp_path / f"attack-{seed}"
        folder.mkdir()
        made = Victim(folder, text, generator)
        shutil.copytree(tiny_checkpoint(family, **options), made.model)
        return made

    return make


@pytest.fixture(scope="session")
def artifact(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished artifact with experts and low-rank parts, shared by all tests: damage a copy only."""
    out = tmp_path_factory.mktemp("artifact") / "out"
    done = invoke(
        "compress",
        tiny_checkpoint("deepseek_v3"),
        out,
        "--calibration",
        text,
        "--calibration-only",
        "--ratio",
        2,
        "--rank",
        16,
        *QUICK,
    )
    assert done.code == 0, done.stderr
    return out
