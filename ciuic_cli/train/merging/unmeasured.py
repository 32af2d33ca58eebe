"""Lets a merge that was killed after it was published continue: only its KL is still to be measured."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from ciuic_cli.process.atomic_files import write_atomically


class Unmeasured:
    """A file beside the output of a merge, from before it is published until its KL is measured.

    Args:
        out: the output folder, an absolute path.
        method: of the merge. inputs: the folders of the artifact and of the adapter.
    """

    def __init__(self, out: Path, method: str, *inputs: Path) -> None:
        self.out, self.file = out, out.with_name(f".{out.name}.merge.json")
        states = {
            str(file.resolve()): [file.stat().st_size, file.stat().st_mtime_ns]
            for folder in inputs
            for file in sorted(folder.iterdir())
            if file.is_file() and file.name != self.file.name  # the output may lie in the adapter's folder
        }
        self._content = json.dumps({"method": method, "inputs": states}, indent=2).encode()

    def is_left(self) -> bool:
        """Whether a killed merge of the same inputs published the output and did not measure it."""
        with suppress(FileNotFoundError):
            written = self.file.stat().st_mtime_ns
            return self.file.read_bytes() == self._content and self.out.stat().st_ctime_ns >= written
        return False

    def begin(self) -> None:
        """Record what will be published. Raises EnvironmentFault if the file cannot be written."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, self._content)

    def end(self) -> None:
        """Remove the record: the output is measured, or nothing was published."""
        self.file.unlink(missing_ok=True)
