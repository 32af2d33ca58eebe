"""Entry point of the process: sets up signals and streams before any slow import."""

from __future__ import annotations

import sys

from ciuic_cli.process.signals import INTERRUPTED, interruptible
from ciuic_cli.process.streams import secure_streams


def main() -> None:
    """The console script `ciuic`: run one command and exit with its code."""
    with interruptible(last=True):
        secure_streams()
        try:
            from ciuic_cli.cli.app import main as command_line

            command_line()
        except KeyboardInterrupt:  # before the console exists, or after it is closed
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
