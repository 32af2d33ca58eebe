"""Progress display: bars on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich import progress as rich_progress
from rich.console import Console as RichConsole
from rich.text import Text

from ciuic_cli.errors import printable

PLAIN_INTERVAL = 15.0
"""Seconds between progress lines if stderr is not a terminal (chosen)."""


class Bars:
    """A `Progress` that shows one bar per phase, on a terminal."""

    def __init__(self, console: RichConsole) -> None:
        self._display = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.percentage:>3.0f} %", markup=False),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, rich_progress.TaskID] = {}

    def __enter__(self) -> Bars:
        self._display.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._display.__exit__(*exception)

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._display.add_task(printable(phase), total=total)
        self._display.update(self._tasks[phase], completed=done, total=total)


class Lines:
    """A `Progress` for logs. It prints a line at a phase's start and end, and every PLAIN_INTERVAL seconds between."""

    def __init__(self, console: RichConsole, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last: dict[str, float] = {}
        self._finished: set[str] = set()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        ends = done >= total and phase not in self._finished
        if phase not in self._last or ends or (done < total and now - self._last[phase] >= PLAIN_INTERVAL):
            self._last[phase] = now
            share = 100.0 * done / total if total else 100.0
            self._console.print(Text(f"{printable(phase)}: {share:.0f} %"), soft_wrap=True)
        if done >= total:
            self._finished.add(phase)
        else:
            self._finished.discard(phase)
