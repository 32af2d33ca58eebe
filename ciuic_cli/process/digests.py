"""The SHA-256 of a file, whole or in samples."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 32, 1 << 16


def file_digest(path: Path) -> str:
    """In hexadecimal digits; raises FileNotFoundError and the system's other errors."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_digest(path: Path) -> str:
    """As `file_digest`, of at most 2 MiB: blocks at even distances from the file's first bytes to its last."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        last = max(0, path.stat().st_size - _SAMPLE_BYTES)
        step = max(_SAMPLE_BYTES, -(-last // (_SAMPLES - 1)))
        for begin in (*range(0, last, step), last):
            file.seek(begin)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
