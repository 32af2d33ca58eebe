"""Signals that Python loses."""

from __future__ import annotations

import signal


def lose(number: signal.Signals) -> None:
    """A signal arrives in a `__del__`: nothing can catch the KeyboardInterrupt that it raises."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)

    Dying()
