"""Entry point of the process: sets up signals and streams before any slow import."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable

from ciuic_cli.errors import CiuicError
from ciuic_cli.process.libraries import hide_torchao_warnings, import_fault, require_address_space
from ciuic_cli.process.memory import machine_fault
from ciuic_cli.process.signals import INTERRUPTED, interruptible
from ciuic_cli.process.streams import secure_streams

GARBAGE_THRESHOLD = 20_000
"""Objects after whose creation Python looks for garbage, instead of 700. Importing torch and transformers makes a
million that stay; looking through them took 0.5 of 5.4 seconds (measured: docs/experiments/scale/arms.md)."""


def main() -> None:
    """The console script `ciuic`: run one command and exit with its code."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    atexit.register(gc.freeze)  # Python looks through all objects once more at its end, which took 0.7 s
    with interruptible(last=True):
        secure_streams()
        try:
            _command_line()()
        except KeyboardInterrupt:  # before the console exists, or after it is closed
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)


def _command_line() -> Callable[[], None]:
    """The command line's `main`. Ends the process with a message if the machine is not able to import it."""
    try:
        require_address_space()
        hide_torchao_warnings()
        from ciuic_cli.cli.app import main as command_line
    except Exception as error:
        fault = error if isinstance(error, CiuicError) else machine_fault(error) or import_fault(error)
        if fault is None:
            raise
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(fault.exit_code)
    return command_line


if __name__ == "__main__":
    main()
