"""The one sink: data to stdout, progress and hints to stderr, and no name can turn against the terminal.

Everything the program prints goes through `Console`. Tensor and file names come from other people's files,
so control sequences, bidirectional marks and very long names are made visible and short, and Rich's markup
is off.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import progress as rich_progress
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from ciuic_cli.errors import CiuicError, printable
from ciuic_cli.process.memory import machine_fault
from ciuic_cli.process.signals import INTERRUPTED, Interruption, check, ends_tidily
from ciuic_cli.process.streams import silence_stdout

_BUG = 1
_PLAIN_INTERVAL = 15.0  # seconds between progress lines where stderr is no terminal
_PIPE_WIDTH = 4096  # where stdout is no terminal no table is folded

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: the step's name, and how far it is, in any unit."""


def to_json(value: object) -> str:
    """ASCII JSON of the value; numbers that JSON has not (NaN, infinity) become null."""
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

        All long work calls it at its steps, so it raises the KeyboardInterrupt that was lost in between.
        """
        with self._shown() as show:

            def step(what: str, done: int, total: int) -> None:
                check()
                show(what, done, total)

            yield step

    @contextmanager
    def _shown(self) -> Iterator[Progress]:
        if self.quiet:
            yield lambda what, done, total: None
        elif self._err.is_terminal:
            with _Bars(self._err) as bars:
                yield bars
        else:
            yield _Lines(self._err)

    def close(self) -> None:
        """Flush stdout, so that a full disk or a closed pipe is noticed here and not at interpreter exit."""
        self._out.file.flush()


def run(console: Console, action: Callable[[], object]) -> int:
    """Run a command and turn its errors into a message and an exit code (0, 1 to 5, 130).

    A reader that closes stdout early (`| head`) is no error: the rest is not printed, and the code is 0.
    SIGTERM and SIGHUP end it as Ctrl-C does; one that came to nothing while it worked still makes the code 130. An
    unexpected exception is a bug of ours: its traceback is printed, and the code is 1.
    """
    with ends_tidily() as interruption:
        try:
            action()
            console.close()
            interruption.check()
            return 0
        except SystemExit:
            raise
        except BaseException as error:  # a panic of a Rust library is no Exception
            code = _report(console, error, interruption)
            _flush_or_silence_stdout()
            return code


def _report(console: Console, error: BaseException, interruption: Interruption) -> int:
    # An interrupt inside a library's C code can come out as any other error.
    if isinstance(error, KeyboardInterrupt) or interruption.signal is not None:
        console.hint("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        silence_stdout()
        console.hint("stdout was closed early; the rest is not printed")
        return 0
    fault = error if isinstance(error, CiuicError) else machine_fault(error)
    if fault is None:
        console.bug(error)
        return _BUG
    console.error(fault)
    return fault.exit_code


def _flush_or_silence_stdout() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        silence_stdout()


class _Sink(RichConsole):
    """Rich's console, but a closed pipe is for `run` to handle: Rich would leave with code 1."""

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


class _Bars:
    """One bar per step on a terminal."""

    def __init__(self, console: RichConsole) -> None:
        self._display = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(markup=False),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, rich_progress.TaskID] = {}

    def __enter__(self) -> _Bars:
        self._display.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._display.__exit__(*exception)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._display.add_task(printable(what), total=total)
        self._display.update(self._tasks[what], completed=done, total=total)


class _Lines:
    """A line at the start, at the end, and every few seconds in between, for logs."""

    def __init__(self, console: RichConsole, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last: dict[str, float] = {}
        self._finished: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        ends = done >= total and what not in self._finished
        if what not in self._last or ends or (done < total and now - self._last[what] >= _PLAIN_INTERVAL):
            self._last[what] = now
            share = 100.0 * done / total if total else 100.0
            self._console.print(Text(f"{printable(what)}: {share:.0f} %"), soft_wrap=True)
        if done >= total:
            self._finished.add(what)
        else:
            self._finished.discard(what)
