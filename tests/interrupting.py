"""A signal whose KeyboardInterrupt Python drops."""

from __future__ import annotations

import signal


def lose(number: signal.Signals) -> None:
    """Raise the signal inside a `__del__`, where Python drops the KeyboardInterrupt that its handler raises."""

    class RaisesWhenDeleted:
        def __del__(self) -> None:
            signal.raise_signal(number)

    RaisesWhenDeleted()
