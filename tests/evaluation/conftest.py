"""Fixtures of the evaluation tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ciuic_cli.compression.pipeline import compress


@pytest.fixture(scope="session")
def artifact(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint and its artifact: read them, never write into them."""
    original, out = tiny_checkpoint("llama"), tmp_path_factory.mktemp("artifact") / "out"
    compress(
        original,
        out,
        ratio=3.0,
        calibration=[text],
        calibration_only=True,
        nsamples=4,
        seqlen=64,
        effort="fast",
    )
    return original, out
