"""All output of the program: results to stdout, progress and messages to stderr.

Tensor and file names come from untrusted files. Control sequences and bidirectional marks are therefore made visible,
very long names are shortened, and Rich's markup is off.
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

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from ciuic_cli.cli.progress import Bars, Lines
from ciuic_cli.errors import CiuicError, printable
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.process.signals import raise_if_interrupted

_PIPE_WIDTH = 4096
"""Characters per line if stdout is not a terminal (chosen): wide enough that no table is folded."""
_BETWEEN_COLUMNS = 3
"""Characters between two columns of a table: a line and a space on either side."""


def to_json(value: object) -> str:
    """The value as ASCII JSON. NaN and infinity become null, because JSON has no such numbers."""
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
    """The output streams of one command.

    json_mode: stdout gets one JSON object and nothing else. quiet: no progress and no hints. stdout, stderr: the
    process's streams by default.
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
        """Print a text to stdout, except in JSON mode. Line breaks stay; other control characters are escaped."""
        if not self.json_mode:
            lines = (printable(line, limit=1 << 20) for line in text.split("\n"))
            self._out.print(Text("\n".join(lines)), soft_wrap=True)

    def part(self, text: str) -> None:
        """Print a part of a text to stdout at once, without a line break after it, except in JSON mode."""
        if not self.json_mode:
            self._out.file.write("\n".join(printable(line, limit=1 << 20) for line in text.split("\n")))
            self._out.file.flush()

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        optional: Sequence[str] = (),
    ) -> None:
        """Print a table to stdout, except in JSON mode. Columns of numbers are aligned to the right.

        optional: columns that are left out, the first one first, until the table fits the terminal; a hint names them.
        """
        if self.json_mode:
            return
        cells = [list(row) for row in rows]
        texts = [[_cell(value) for value in row] for row in cells]
        widths = {
            column: max(map(cell_len, (column, *(row[index] for row in texts))))
            for index, column in enumerate(columns)
        }
        left_out: list[str] = []
        for column in optional:
            if sum(widths.values()) + _BETWEEN_COLUMNS * (len(widths) - 1) <= self._out.width:
                break
            del widths[column]
            left_out.append(column)
        table = Table(show_edge=False, pad_edge=False)
        shown = [index for index, column in enumerate(columns) if column in widths]
        for index in shown:
            numbers = all(isinstance(row[index], (int, float)) or row[index] is None for row in cells)
            table.add_column(Text(columns[index]), justify="right" if numbers else "left", overflow="fold")
        for row in texts:
            table.add_row(*(Text(row[index]) for index in shown))
        # Printed separately, because Rich wraps a table's title to the table's width.
        self._out.print(Text(printable(title)), soft_wrap=True)
        self._out.print(table)
        if left_out:
            names = ", ".join(column for column in columns if column in left_out)
            self.hint(
                f"the terminal is too narrow for {names}: --json has them, and so has a pipe (| less -S)"
            )

    def json(self, value: object) -> None:
        """Print the command's JSON object to stdout, in JSON mode only."""
        if self.json_mode:
            self._out.file.write(to_json(value) + "\n")
            self._out.file.flush()

    def hint(self, message: str) -> None:
        """Print a remark to stderr, except when quiet."""
        if not self.quiet:
            self._err.print(Text(printable(message, limit=4096)), soft_wrap=True)

    def warning(self, message: str) -> None:
        """Print a warning to stderr, even when quiet."""
        text = Text.assemble(("warning: ", "yellow"), printable(message, limit=4096))
        self._err.print(text, soft_wrap=True)

    def error(self, error: CiuicError) -> None:
        """Print message, file, tensor and remedy of an expected error to stderr."""
        message, *rest = error.shown()
        text = Text.assemble(("error: ", "bold red"), message[1])
        for label, value in rest:
            text.append(f"\n  {label}: {value}")
        self._err.print(text, soft_wrap=True)

    def bug(self, error: BaseException) -> None:
        """Print the traceback of an unexpected exception to stderr, and ask for a bug report."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            self._err.print(Text(printable(line, limit=1024)), soft_wrap=True)
        self.error(CiuicError(f"a bug in ciuic: {type(error).__name__}: {error}", remedy="please report it"))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Provide a `Progress`: bars on a terminal, a line every few seconds elsewhere.

        It also raises the KeyboardInterrupt of a signal that a library swallowed: all long work calls it at every step.
        """
        with self._shown() as show:

            def report(phase: str, done: int, total: int) -> None:
                raise_if_interrupted()
                show(phase, done, total)

            yield report

    @contextmanager
    def _shown(self) -> Iterator[Progress]:
        if self.quiet:
            yield no_progress
        elif self._err.is_terminal:
            with Bars(self._err) as bars:
                yield bars
        else:
            yield Lines(self._err)

    def close(self) -> None:
        """Flush stdout, so that a full disk or a closed pipe raises here and not at interpreter exit."""
        self._out.file.flush()


class _Sink(RichConsole):
    """A Rich console that raises BrokenPipeError for a closed pipe; Rich itself exits with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _rich(stream: TextIO | None, pipe_width: int | None) -> _Sink:
    if stream is None:  # closed by the shell: >&-
        stream = io.StringIO()
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # no traceback on a terminal without UTF-8
    width = None if stream.isatty() or "COLUMNS" in os.environ else pipe_width
    return _Sink(file=stream, markup=False, highlight=False, emoji=False, width=width)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(value)
