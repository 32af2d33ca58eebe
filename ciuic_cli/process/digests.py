"""SHA-256 digests of files: of all bytes for checksums, of samples to recognise a large file quickly."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ciuic_cli.integers import ceil_div

_SAMPLES, _SAMPLE_BYTES = 32, 1 << 16


def file_digest(path: Path) -> str:
    """SHA-256 of the whole file in hexadecimal. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_digest(path: Path) -> str:
    """SHA-256 of at most 2 MiB of the file in hexadecimal. Raises OSError if the file cannot be read.

    The samples are blocks of 64 KiB at even distances; the first and the last bytes of the file are always included.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        last = max(0, path.stat().st_size - _SAMPLE_BYTES)
        step = max(_SAMPLE_BYTES, ceil_div(last, _SAMPLES - 1))
        for begin in (*range(0, last, step), last):
            file.seek(begin)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
