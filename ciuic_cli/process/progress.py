"""The type of the functions that long work calls to report its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""`progress(phase, done, total)`: name of the phase, and its work done and in total, in any unit."""


def no_progress(phase: str, done: int, total: int) -> None:
    """A `Progress` that reports nothing."""
