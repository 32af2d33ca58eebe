"""The process's standard streams: stdout is for our data alone, and nothing that stderr refuses stops the work."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def keep_stdout() -> int:
    """A descriptor of stdout for ourselves; from now on what others print there, native code too, goes to stderr."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def settle_streams() -> None:
    """Make `sys.stdout` ours alone, and give `sys.stderr` what it takes to go on when it cannot be written.

    Where the shell closed a stream (`>&-`), /dev/null takes its number: the next file that is opened would, and
    messages would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = open(keep_stdout(), "w", **_coding(sys.stdout))  # noqa: SIM115
    lossy = io.BufferedWriter(_Lossy(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(lossy, line_buffering=True, **_coding(sys.stderr))


def silence_stdout() -> None:
    """Nobody reads it any more. Python flushes stdout once more at exit; that would print "Exception ignored ..."."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        sys.stdout = io.StringIO()


def _coding(stream: Any) -> dict[str, Any]:
    """How a stream encodes its text; of one that the shell closed, and Python left out, whatever is usual."""
    return {} if stream is None else {"encoding": stream.encoding, "errors": stream.errors}


class _Lossy(io.FileIO):
    """What cannot be written is lost."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written
