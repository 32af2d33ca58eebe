"""The errors that ciuic raises on purpose, each with its exit code and its next step.

They are raised where the fact is known and caught once, in the command line. Anything else that escapes
is a bug of ours (exit code 1).
"""

from __future__ import annotations

import os
import unicodedata

_MAX_SENTENCE = 4096
MAX_NAME = 160
"""Characters of a name that are shown; the middle of a longer one is left out."""

_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def printable(name: object, limit: int = MAX_NAME) -> str:
    """`name` as harmless text of at most `limit` characters and a count of those left out.

    Control characters, escape sequences, bidirectional and other invisible marks become backslash escapes.
    """
    text = str(name)
    cut = len(text) - limit
    if cut > 0:
        # Cut first: escaping a name of a megabyte would only make it longer.
        half = limit // 2
        text = f"{text[:half]}[... {cut} more characters ...]{text[-(limit - half) :]}"
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\\" or unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class CiuicError(Exception):
    """A failure that we foresaw.

    Args:
        message: what is wrong, one sentence.
        file: the file it was found in.
        tensor: the tensor it was found in.
        remedy: what the user can do about it.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = None if file is None else os.fspath(file)
        self.tensor = tensor
        self.remedy = remedy

    def shown(self) -> list[tuple[str, str]]:
        """("error", the message), then those that are known of "file", "tensor" and "try", all harmless to print."""
        places = [("file", self.file), ("tensor", self.tensor)]
        return [
            ("error", printable(self.message, _MAX_SENTENCE)),
            *((label, printable(place, MAX_NAME * 2)) for label, place in places if place),
            *([("try", printable(self.remedy, _MAX_SENTENCE))] if self.remedy else []),
        ]

    def __str__(self) -> str:
        shown = dict(self.shown())
        where = ", ".join(f"{label} {shown[label]}" for label in ("file", "tensor") if label in shown)
        text = f"{shown['error']} ({where})" if where else shown["error"]
        return f"{text}. {shown['try']}" if "try" in shown else text


class UsageError(CiuicError):
    """The command or call itself is wrong: unknown option, contradictory arguments."""

    exit_code = 2


class InputError(CiuicError):
    """A checkpoint, an artifact or a text that we cannot accept."""

    exit_code = 3


class TargetError(CiuicError):
    """The byte target or the quality gate cannot be met."""

    exit_code = 4


class EnvironmentFault(CiuicError):
    """The machine cannot do it: disk, device, memory, lock, missing native library."""

    exit_code = 5
