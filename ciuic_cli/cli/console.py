"""The only way to the terminal: data goes to stdout, progress and hints to stderr, and no name can harm the terminal.

Everything the program prints goes through `Console`. Tensor and file names come from other people's files,
so control sequences and bidirectional marks are made visible, very long names are shortened, and Rich's markup
is off.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from ciuic_cli.cli.progress import Bars, Lines, Progress
from ciuic_cli.errors import CiuicError, printable
from ciuic_cli.process.signals import raise_if_interrupted

_PIPE_WIDTH = 4096
"""Characters per line where stdout is not a terminal: wide enough that no table is folded (chosen)."""


def to_json(value: object) -> str:
    """ASCII JSON of the value; NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, default=str)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class Console:
    """Where output goes.

    With `json_mode` stdout gets one JSON object and nothing else; `quiet` leaves out progress and hints.
    """

    def __init__(
        self,
        *,
        json_mode: bool = False,
        quiet: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.json_mode = json_mode
        self.quiet = quiet
        self._out = _rich(sys.stdout if stdout is None else stdout, pipe_width=_PIPE_WIDTH)
        self._err = _rich(sys.stderr if stderr is None else stderr, pipe_width=None)

    def data(self, text: str) -> None:
        """A result for people on stdout (nothing in JSON mode). Line breaks stay, other controls do not."""
        if not self.json_mode:
            lines = (printable(line, limit=1 << 20) for line in text.split("\n"))
            self._out.print(Text("\n".join(lines)), soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table on stdout (nothing in JSON mode). Columns of numbers are aligned to the right."""
        if self.json_mode:
            return
        cells = [list(row) for row in rows]
        table = Table(show_edge=False, pad_edge=False)
        for index, column in enumerate(columns):
            numbers = all(isinstance(row[index], (int, float)) or row[index] is None for row in cells)
            table.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(_cell(value)) for value in row))
        # Not the table's own title: Rich would wrap it to the table's width.
        self._out.print(Text(printable(title)), soft_wrap=True)
        self._out.print(table)

    def json(self, value: object) -> None:
        """The one JSON object on stdout (nothing outside JSON mode)."""
        if self.json_mode:
            self._out.file.write(to_json(value) + "\n")
            self._out.file.flush()

    def hint(self, message: str) -> None:
        """A remark on stderr, left out when quiet."""
        if not self.quiet:
            self._err.print(Text(printable(message, limit=4096)), soft_wrap=True)

    def warning(self, message: str) -> None:
        """Something the user should know, on stderr, even when quiet."""
        text = Text.assemble(("warning: ", "yellow"), printable(message, limit=4096))
        self._err.print(text, soft_wrap=True)

    def error(self, error: CiuicError) -> None:
        """The message, file, tensor and remedy of an expected error on stderr."""
        message, *rest = error.shown()
        text = Text.assemble(("error: ", "bold red"), message[1])
        for label, value in rest:
            text.append(f"\n  {label}: {value}")
        self._err.print(text, soft_wrap=True)

    def bug(self, error: BaseException) -> None:
        """The traceback of an unexpected exception on stderr, and that it should be reported."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            self._err.print(Text(printable(line, limit=1024)), soft_wrap=True)
        self.error(CiuicError(f"a bug in ciuic: {type(error).__name__}: {error}", remedy="please report it"))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A `progress(what, done, total)` callable: a bar on a terminal, a line now and then elsewhere.

        All long work calls it at its steps, so it also raises a KeyboardInterrupt that a library swallowed in between.
        """
        with self._shown() as show:

            def step(what: str, done: int, total: int) -> None:
                raise_if_interrupted()
                show(what, done, total)

            yield step

    @contextmanager
    def _shown(self) -> Iterator[Progress]:
        if self.quiet:
            yield lambda what, done, total: None
        elif self._err.is_terminal:
            with Bars(self._err) as bars:
                yield bars
        else:
            yield Lines(self._err)

    def close(self) -> None:
        """Flush stdout, so that a full disk or a closed pipe is noticed here and not at interpreter exit."""
        self._out.file.flush()


class _Sink(RichConsole):
    """Rich's console, except that a closed pipe raises BrokenPipeError: Rich itself would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _rich(stream: TextIO | None, pipe_width: int | None) -> _Sink:
    if stream is None:  # the shell closed it: >&-
        stream = io.StringIO()
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # a terminal without UTF-8 gets escapes, not a traceback
    width = None if stream.isatty() or "COLUMNS" in os.environ else pipe_width
    return _Sink(file=stream, markup=False, highlight=False, emoji=False, width=width)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(value)
