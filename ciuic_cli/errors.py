"""The errors that ciuic raises on purpose, each with an exit code and a remedy.

They are raised where the fact is known; the command line turns them into exit codes. Any other exception is a bug (exit
code 1).
"""

from __future__ import annotations

import os
import unicodedata

_MAX_SENTENCE = 4096
"""Characters of a message or remedy that are shown (chosen)."""
MAX_NAME = 160
"""Characters of a name that are shown (chosen); the middle of a longer name is cut out."""

_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories without visible characters: controls, formats, surrogates, unassigned, separators."""


def printable(name: object, limit: int = MAX_NAME) -> str:
    """`name` as harmless text: at most `limit` characters, and how many more there are.

    Control characters, escape sequences, bidirectional and other invisible marks become backslash escapes.
    """
    text = str(name)
    excess = len(text) - limit
    if excess > 0:
        # Cut before escaping, which would make a name of a megabyte even longer.
        half = limit // 2
        text = f"{text[:half]}[... {excess} more characters ...]{text[-(limit - half) :]}"
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\\" or unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class CiuicError(Exception):
    """Base class of all expected errors.

    Args:
        message: what is wrong, one sentence.
        file: the file where it was found.
        tensor: the tensor where it was found.
        remedy: what the user can do.
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
        """Pairs of label and text, harmless to print: "error", then "file", "tensor" and "try" if they are known."""
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
    """The command or call is wrong: an unknown option, a value that the option cannot have."""

    exit_code = 2


class InputError(CiuicError):
    """A checkpoint, an artifact or a text is missing, damaged or not supported."""

    exit_code = 3


class TargetError(CiuicError):
    """The byte target or the quality gate cannot be met."""

    exit_code = 4


class EnvironmentFault(CiuicError):
    """The machine cannot do it: a fault of disk, device, memory, lock, or native library."""

    exit_code = 5


class WorkerFault(EnvironmentFault):
    """Another process of the run has ended. The signal by which torchrun then ends this one is not the reason."""
