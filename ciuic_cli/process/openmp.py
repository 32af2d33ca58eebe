"""How torch's threads wait for their next piece of work."""

from __future__ import annotations

import os
import sys


def sleep_between_work() -> None:
    """Let OpenMP's threads sleep between pieces of work, unless the user's environment says how they wait.

    They spin by default and take the cores from other work: two compressions side by side on two cores then take eight
    times as long as one alone, instead of a little more (measured: docs/experiments/runtime/waiting-threads.md). Waking
    them costs a long computation a few percent, but decoding token by token a third, so only long computations call
    this. OpenMP reads the environment once, while torch is loaded; afterwards this does nothing.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
