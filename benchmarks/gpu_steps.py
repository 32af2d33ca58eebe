"""The record of one step of `make gpu`: figures are written at once, and pieces that have them are skipped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

LIMIT_SECONDS = 460
"""Time limit of a step: eight minutes with a margin."""


class Record:
    """The pieces of one step, in a JSON file.

    A piece that the file has is not repeated, if the file is of the same environment. A piece that fails or has no time
    left is listed under "left_out"; running the step again takes it up.

    Args:
        environment: GPU, versions and digests of the sources; figures of another one are discarded.
    """

    def __init__(self, file: Path, environment: dict[str, Any], limit: float = LIMIT_SECONDS) -> None:
        self._file, self._end = file, time.monotonic() + limit
        self.result: dict[str, Any] = {"environment": environment, "seconds": {}, "pieces": {}}
        with suppress(OSError, ValueError):
            earlier = json.loads(file.read_text())
            if earlier["environment"] == environment:
                self.result = earlier
        self.result["left_out"] = []

    def piece(self, name: str, work: Callable[[], Any], needs: float) -> Any:
        """The figures of a piece, which takes about `needs` seconds; None if it fails or has no time left."""
        pieces = self.result["pieces"]
        if name in pieces:
            return pieces[name]
        if time.monotonic() + needs > self._end:
            self._leave_out(name, "no time left; run the step again")
            return None
        started = time.monotonic()
        try:
            pieces[name] = work()
        except Exception as error:  # any failure: the other pieces still run
            self._leave_out(name, f"{type(error).__name__}: {error}")
            with suppress(Exception):  # fails if the device is in an error state
                torch.cuda.empty_cache()
            return None
        self.result["seconds"][name] = time.monotonic() - started
        self._write()
        return pieces[name]

    def _leave_out(self, name: str, reason: str) -> None:
        print(f"left out: {name}: {reason}", file=sys.stderr)
        self.result["left_out"].append(f"{name}: {reason}")
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.result, indent=1))
