"""The working folder of an unfinished training run: what is being run, its checkpoints, and a lock.

A checkpoint counts only once it is marked complete. A killed run continues from the last one that is.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.process import work_folders
from ciuic_cli.process.atomic_files import remove_path, sync_file, sync_folder, write_atomically

COMPLETE = "complete"
"""Name of the empty file in a checkpoint that is written after everything else."""
_RUN = "run.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class RunFolder:
    """The working folder beside the output `out`."""

    def __init__(self, out: Path) -> None:
        self.path = work_folders.work_folder(out, work_folders.TRAINING)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folder and holds its lock. Raises EnvironmentFault if another run has it."""
        work_folders.require_usable(self.path)
        work_folders.create(self.path)
        with (self.path / "lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise EnvironmentFault(
                    "another run is training into this output", file=self.path, remedy="wait until it ends"
                ) from error
            yield

    def begin(self, description: dict[str, Any], threads: int) -> int:
        """Record what is run, or compare it with the run that is to be continued.

        Args:
            description: options and data; a run continues only with the same ones.
            threads: torch's threads now.

        Returns:
            The threads with which the run began. Some gradients, such as softmax's, depend on their number.

        Raises:
            InputError: the description differs; the message names the differences.
        """
        file = self.path / _RUN
        if file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            before, threads = stored["description"], int(stored["threads"])
            changed = [
                f"{name}: {before.get(name)!r}, now {description.get(name)!r}"
                for name in sorted({*before, *description})
                if before.get(name) != description.get(name)
            ]
            if changed:
                raise InputError(
                    f"an unfinished run has other options or data ({'; '.join(changed)})",
                    file=self.path,
                    remedy="give the same ones to continue it, or remove the folder to begin again",
                )
        else:
            stored = {"description": description, "threads": threads}
            write_atomically(file, json.dumps(stored, indent=1).encode())
        return threads

    def description(self) -> Any:
        """What is run, as `begin` recorded it; None if it did not, or if the folder is partly removed."""
        file = self.path / _RUN
        return json.loads(file.read_bytes())["description"] if file.is_file() else None

    def checkpoint_folder(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self.path / f"checkpoint-{step}"

    def _complete_steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        found = (_CHECKPOINT.fullmatch(folder.name) for folder in self.path.iterdir())
        steps = (int(match[1]) for match in found if match)
        return sorted(step for step in steps if (self.checkpoint_folder(step) / COMPLETE).is_file())

    def newest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        steps = self._complete_steps()
        return steps[-1] if steps else None

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint. Removes incomplete ones."""
        complete = {self.checkpoint_folder(step) for step in self._complete_steps()}
        for folder in list(self.path.iterdir()):
            if _CHECKPOINT.fullmatch(folder.name) and folder not in complete:
                remove_path(folder)
        newest = self.newest_step()
        return None if newest is None else self.checkpoint_folder(newest)

    def checkpoint(self, step: int) -> Path:
        """The complete checkpoint of `step`. Raises InputError if it is gone."""
        folder = self.checkpoint_folder(step)
        if not (folder / COMPLETE).is_file():
            raise InputError(
                "the best checkpoint of the run is gone",
                file=folder,
                remedy=f"remove {self.path} to begin again",
            )
        return folder

    def mark_complete(self, step: int) -> None:
        """Sync the checkpoint of `step`, then mark it."""
        folder = self.checkpoint_folder(step)
        for file in folder.rglob("*"):
            if file.is_file():
                sync_file(file)
        sync_folder(folder)
        write_atomically(folder / COMPLETE, b"")
        sync_folder(self.path)

    def keep_newest(self, count: int) -> None:
        """Remove all complete checkpoints but the `count` newest."""
        for step in self._complete_steps()[:-count]:
            remove_path(self.checkpoint_folder(step))

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        work_folders.remove(self.path)
