"""The wait policy of OpenMP's threads. A module of its own because it must run before torch is imported."""

from __future__ import annotations

import os
import sys


def sleep_between_work() -> None:
    """Let OpenMP's threads sleep while they wait for work, unless the user has set OMP_WAIT_POLICY.

    By default the threads spin and take the cores from other processes. Two compressions at once on two cores then
    take eight times as long as one alone, instead of a little more (measured:
    docs/experiments/runtime/waiting-threads.md). Waking sleeping threads costs a long computation a few percent, but
    token-by-token decoding a third, so only long computations call this. OpenMP reads the variable once, when torch is
    loaded; after that this function does nothing.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
