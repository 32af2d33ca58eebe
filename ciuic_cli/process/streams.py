"""The standard streams of the process: stdout carries only our data, and an unwritable stderr does not stop the work.

`secure_streams` sets both up once, at the start of a command.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def reserve_stdout() -> int:
    """A private descriptor of stdout. Descriptor 1 becomes stderr, so what other code prints goes there."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def secure_streams() -> None:
    """Make `sys.stdout` private (see `reserve_stdout`), and let `sys.stderr` discard what cannot be written.

    A standard stream that the shell closed (`>&-`) becomes /dev/null. Otherwise the next opened file would get its
    number, and messages would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
    sys.stdout = open(reserve_stdout(), "w", **_text_options(sys.stdout))  # noqa: SIM115
    lossy = io.BufferedWriter(_LossyFile(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(lossy, line_buffering=True, **_text_options(sys.stderr))


def silence_stdout() -> None:
    """Send stdout to /dev/null after its reader has gone.

    Python flushes stdout once more at exit, which would print "Exception ignored ...".
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        sys.stdout = io.StringIO()


def _text_options(stream: Any) -> dict[str, Any]:
    """Encoding options of a text stream. None (Python's value for a closed stream) gives Python's defaults."""
    return {} if stream is None else {"encoding": stream.encoding, "errors": stream.errors}


class _LossyFile(io.FileIO):
    """A file that discards bytes that cannot be written."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written
