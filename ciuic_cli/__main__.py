"""The process of `ciuic`: its signals and streams are settled before anything that takes long is imported."""

from __future__ import annotations

import sys

from ciuic_cli.process.signals import INTERRUPTED, interruptible
from ciuic_cli.process.streams import secure_streams


def main() -> None:
    """The console script: runs one command and exits with its code."""
    with interruptible(last=True):
        secure_streams()
        try:
            from ciuic_cli.cli.app import main as command_line

            command_line()
        except KeyboardInterrupt:  # before there was a console, or after its last word
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
