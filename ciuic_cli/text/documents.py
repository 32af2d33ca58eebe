"""Text files: the user's, checked, and the package's own."""

from __future__ import annotations

import stat
from importlib import resources
from pathlib import Path

from ciuic_cli.errors import InputError

DOCUMENT_SEPARATOR = "<|doc|>"


MAXIMUM_BYTES = 64 << 20
"""Of a text: hundreds of times what any effort takes. All of it is tokenized, in many times its size of memory."""


def read_text(path: Path) -> str:
    """The text of one UTF-8 file; raises `InputError` if it is missing, empty, too long or not UTF-8."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _unreadable(path, "it is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAXIMUM_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    if len(data) > MAXIMUM_BYTES:
        raise InputError(
            f"the text has more than {MAXIMUM_BYTES:,} bytes", file=path, remedy="name a part of it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.start) from error
    if "\0" in text:  # of UTF-16, or no text at all
        raise _not_utf8(path, data.index(0))
    if not text.strip():
        raise InputError("the text is empty", file=path, remedy="name a file with text in it")
    return text


def _unreadable(path: Path, reason: str) -> InputError:
    return InputError(
        f"the text cannot be read: {reason}", file=path, remedy="name a readable UTF-8 text file"
    )


def _not_utf8(path: Path, byte: int) -> InputError:
    return InputError(
        f"the text is not UTF-8 (byte {byte})",
        file=path,
        remedy="convert it, for example with iconv -t utf-8",
    )


def own_calibration_text() -> str:
    """The calibration mix that ships with the package (sources and licences: data/SOURCES.md)."""
    return _own_text("calibration.txt")


def own_evaluation_text() -> str:
    """The evaluation text that ships with the package (sources and licences: data/SOURCES.md)."""
    return _own_text("eval.txt")


def _own_text(name: str) -> str:
    return resources.files("ciuic_cli.text").joinpath("data", name).read_text(encoding="utf-8")


def documents_of(text: str) -> list[str]:
    """The documents of a text, each ending in an empty line; a text without separators is one document."""
    return [part.strip("\n") + "\n\n" for part in text.split(f"\n{DOCUMENT_SEPARATOR}\n")]
