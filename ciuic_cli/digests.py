"""The SHA-256 of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_digest(path: Path) -> str:
    """In hexadecimal digits; raises FileNotFoundError and the system's other errors."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
