"""Text files: those of the user, with checks, and those that ship with the package."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from ciuic_cli.errors import InputError

DOCUMENT_SEPARATOR = "<|doc|>"
"""The line between two documents of a text."""

MAXIMUM_BYTES = 64 << 20
"""Largest accepted text, in bytes. Chosen: no effort level uses a hundredth of it."""


def read_text(path: Path) -> str:
    """The content of a UTF-8 file. Raises InputError if it is missing, unreadable, empty, too long or not UTF-8."""
    with opened(path) as file:
        data = file.read(MAXIMUM_BYTES + 1)
    if len(data) > MAXIMUM_BYTES:
        raise InputError(
            f"the text has more than {MAXIMUM_BYTES:,} bytes", file=path, remedy="give a part of it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.start) from error
    if "\0" in text:  # UTF-16, or a binary file
        raise _not_utf8(path, data.index(0))
    if not text.strip():
        raise _empty(path)
    return text


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, for reading bytes. Raises InputError if it is anything else, is missing or cannot be read.

    Nothing waits for a writer: pipes and devices are refused, and so are files of /proc, which have size 0 and are
    called empty.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _unreadable(path, "it is not a regular file")
            if not status.st_size:
                raise _empty(path)
            yield file
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error


def _empty(path: Path) -> InputError:
    return InputError("the text is empty", file=path, remedy="give a file that contains text")


def _unreadable(path: Path, reason: str) -> InputError:
    return InputError(
        f"the text cannot be read: {reason}", file=path, remedy="give a readable UTF-8 text file"
    )


def _not_utf8(path: Path, byte: int) -> InputError:
    return InputError(
        f"the text is not UTF-8 (byte {byte})",
        file=path,
        remedy="convert it, for example with iconv -t utf-8",
    )


def builtin_calibration_text() -> str:
    """The calibration text that ships with the package (sources and licences: data/SOURCES.md)."""
    return _builtin_text("calibration.txt")


def builtin_evaluation_text() -> str:
    """The evaluation text that ships with the package (sources and licences: data/SOURCES.md)."""
    return _builtin_text("eval.txt")


def _builtin_text(name: str) -> str:
    return resources.files("ciuic_cli.text").joinpath("data", name).read_text(encoding="utf-8")


def split_documents(text: str) -> list[str]:
    """The documents of a text, each with an empty line at its end. A text without separators is one document."""
    return [part.strip("\n") + "\n\n" for part in text.split(f"\n{DOCUMENT_SEPARATOR}\n")]
