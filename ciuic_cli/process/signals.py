"""SIGINT, SIGTERM and SIGHUP end the work once and for all, and tidily: temporary files go, finished steps stay.

A signal raises KeyboardInterrupt. Python loses one that is raised where nothing can catch it (a `__del__`, a callback)
and libraries may drop one, so the signal is remembered: steps of long work ask with `check`, and the next signal
raises again. While the interruption is on its way out no signal raises, be it the tenth: what is being removed
would stay. Whoever cannot wait has SIGQUIT (Ctrl-\\) and SIGKILL; the next run tidies up after those.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code of an interrupted command."""
_SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""What ends the work, each with the handler that it has where nobody set another."""


class Interruption:
    """What arrived: `signal` is the number of the first signal that is to end the work, or None.

    `deferred` counts the blocks (see there) in which it raises nothing yet.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.deferred = 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived, unless one is on its way out already."""
        if self.signal is not None and not self.deferred and not _is_on_its_way():
            raise KeyboardInterrupt

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.check()


_current: Interruption | None = None


def check() -> None:
    """Raise KeyboardInterrupt if a signal has arrived that had no effect so far; for the steps of long work."""
    if _current is not None:
        _current.check()


def _is_on_its_way() -> bool:
    """Whether what runs now is an `except`, a `finally` or an `__exit__` that a KeyboardInterrupt passes through."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextmanager
def ends_tidily(*, resend: bool = False, last: bool = False) -> Iterator[Interruption]:
    """While it lasts, SIGTERM, SIGHUP and SIGINT raise KeyboardInterrupt in the main thread.

    A signal that the process ignores (nohup) or has a handler for stays as it is; so does every signal outside the
    main thread, where Python cannot handle it. Within another such block it is a part of that one. With `resend`, a
    signal that arrived is raised again at the end, so that the process still ends by it. With `last`, signals
    are ignored afterwards: the process has only to exit, and its code stands.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
        return
    if _current is not None:
        yield _current
        return
    _current = found = Interruption()
    usual = {
        number: signal.signal(number, found._arrived)
        for number, handler in _SIGNALS.items()
        if signal.getsignal(number) is handler
    }
    with _lost_ones_unsaid():
        try:
            yield found
        finally:
            for number, handler in usual.items():
                signal.signal(number, signal.SIG_IGN if last else handler)
            _current = None
            if resend and found.signal is not None:
                signal.raise_signal(signal.Signals(found.signal))


@contextmanager
def deferred() -> Iterator[None]:
    """Signals that arrive meanwhile raise at its end: for short calls that take locks written in Python.

    An exception that arrives when threading.Condition has just been acquired leaves it locked, and whoever needs it
    next waits for ever: a thread pool's workers, for one, when the interruption hits `submit`.
    """
    with ends_tidily(resend=True) as found:
        found.deferred += 1
        try:
            yield
        finally:
            found.deferred -= 1
        found.check()


@contextmanager
def _lost_ones_unsaid() -> Iterator[None]:
    """Python prints a traceback of what is raised where nothing can catch it; an interruption is remembered."""
    usual = sys.unraisablehook

    def say(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            usual(lost)

    sys.unraisablehook = say
    try:
        yield
    finally:
        sys.unraisablehook = usual
