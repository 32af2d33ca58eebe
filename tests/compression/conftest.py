"""The calibration text of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import TEXT


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path
