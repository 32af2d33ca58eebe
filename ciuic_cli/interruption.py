"""SIGTERM and SIGHUP end the work as Ctrl-C does, so that temporary files go and finished steps stay."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """What arrived: `signal` is the number of the first signal that ended the work, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        first = self.signal is None
        self.signal = self.signal or number
        if first or number == signal.SIGINT:  # a second SIGTERM must not cut the tidying up short
            raise KeyboardInterrupt


@contextmanager
def ends_tidily(*, resend: bool = False) -> Iterator[Interruption]:
    """While it lasts, SIGTERM, SIGHUP and SIGINT raise KeyboardInterrupt in the main thread.

    A signal that the process ignores (nohup) or has a handler for stays as it is; so does every signal outside the
    main thread, where Python cannot handle it. With `resend`, a SIGTERM or SIGHUP that arrived is raised again at
    the end, so that the process still ends by it.
    """
    found = Interruption()
    taken = {}
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            taken[signal.SIGINT] = signal.signal(signal.SIGINT, found._arrived)
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                taken[number] = signal.signal(number, found._arrived)
    try:
        yield found
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        if resend and found.signal in _SIGNALS:
            signal.raise_signal(signal.Signals(found.signal))
