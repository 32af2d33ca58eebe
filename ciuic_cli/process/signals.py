"""SIGINT, SIGTERM and SIGHUP end the work once and cleanly: temporary files are removed, finished steps stay.

Inside `interruptible`, a signal raises KeyboardInterrupt in the main thread. That exception can get lost: Python drops
it in a `__del__` or a callback, and libraries may swallow it. So the signal is also remembered. Long work calls
`raise_if_interrupted` between its steps, and the next signal raises again. While a KeyboardInterrupt propagates,
further signals are ignored, so that cleanup completes. SIGQUIT (Ctrl-\\) and SIGKILL end the process at once; the next
run cleans up after them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code of an interrupted command: 128 + SIGINT, as shells report it."""
_SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""The signals that end the work, each with its default handler."""


class Interruption:
    """The state of one `interruptible` block, which owns it.

    `signal` is the number of the first signal that arrived, or None. `deferred` counts the open `defer_signals` blocks,
    in which no signal raises.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.deferred = 0

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived, unless a KeyboardInterrupt propagates already."""
        if self.signal is not None and not self.deferred and not _is_propagating():
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.raise_if_interrupted()


_current: Interruption | None = None


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if a signal has arrived. Called between steps of long work."""
    if _current is not None:
        _current.raise_if_interrupted()


def _is_propagating() -> bool:
    """Whether the running code is an `except`, a `finally` or an `__exit__` that handles a KeyboardInterrupt."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextmanager
def interruptible(*, resend: bool = False, last: bool = False) -> Iterator[Interruption]:
    """In the block, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread.

    A signal that the process ignores (nohup) or that has another handler keeps it. Outside the main thread nothing
    changes, because Python handles signals only there. A nested block yields the outer block's Interruption.

    resend: raise the signal again after the block, so that the process still ends by it.
    last: ignore signals after the block. The process only exits then, and its exit code must stand.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
        return
    if _current is not None:
        yield _current
        return
    _current = interruption = Interruption()
    previous = {
        number: signal.signal(number, interruption._handle)
        for number, handler in _SIGNALS.items()
        if signal.getsignal(number) is handler
    }
    with _unraisable_interrupts_hidden():
        try:
            yield interruption
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_IGN if last else handler)
            _current = None
            if resend and interruption.signal is not None:
                signal.raise_signal(signal.Signals(interruption.signal))


@contextmanager
def defer_signals() -> Iterator[None]:
    """Signals that arrive in the block raise at its end. For short calls that take locks written in Python.

    An exception just after a threading.Condition was acquired leaves it locked forever. An interrupted `submit` would
    block the workers of a thread pool in this way.
    """
    with interruptible(resend=True) as interruption:
        interruption.deferred += 1
        try:
            yield
        finally:
            interruption.deferred -= 1
        interruption.raise_if_interrupted()


@contextmanager
def _unraisable_interrupts_hidden() -> Iterator[None]:
    """Suppress Python's traceback of a KeyboardInterrupt that nothing can catch: the signal is remembered."""
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous
