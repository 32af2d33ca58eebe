"""The steps of a run: units of work whose results the journal keeps, so that each is done once, by one worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ciuic_cli.compression.journal import Journal
from ciuic_cli.process.memory import limit_freed_memory
from ciuic_cli.process.progress import Progress
from ciuic_cli.process.threads import parallel_map
from ciuic_cli.process.workers import Workers


@dataclass(frozen=True)
class JournalMark:
    """How far one worker's unfinished step has come. task: JSON; a mark of another task does not count."""

    journal: Journal
    name: str
    task: Any

    def load(self) -> Mapping[str, Any] | None:
        """The state that was saved last; None without one."""
        data = self.journal.load(self.name)
        saved = {} if data is None else json.loads(data)
        return saved["state"] if saved.get("task") == self.task else None

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state, JSON, in place of the last one."""
        self.journal.save(self.name, json.dumps({"task": self.task, "state": state}).encode())


class Steps:
    """Numbered steps of several phases ("arms", "probe", "encode"). In `finish`, workers pull missing steps from one
    queue."""

    def __init__(self, journal: Journal, workers: Workers, progress: Progress) -> None:
        self._journal, self._workers, self._progress = journal, workers, progress

    def finish(
        self,
        phase: str,
        work: Sequence[int],
        make: Callable[[int], bytes],
        side_by_side: Callable[[int], int] = lambda number: 1,
        finished: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Make every step of a phase that the journal does not have; returns when all workers are done.

        Steps that run alone come first, then those that run side by side, one thread each; of each kind the largest
        come first, so that all workers finish at about the same time.

        Args:
            work: the work of each step, in any unit; step numbers are its indices.
            make: makes the result of a step from its number.
            side_by_side: how many steps like this one run at once; 1: it runs alone, with all threads and the whole
                memory.
            finished: called when the result of a step is in the journal, also of a step that was there before.
        """

        def make_missing(number: int) -> None:
            if self._journal.load(_name(phase, number)) is None:
                self._journal.save(_name(phase, number), make(number))

        order = sorted(range(len(work)), key=lambda number: (side_by_side(number), -work[number]))
        for number, _ in parallel_map(self._workers.take(phase, order), make_missing, side_by_side):
            limit_freed_memory()
            finished(number)
            self._progress(phase, self._workers.add_to_counter(f"{phase} done", work[number]), sum(work))
        self._workers.barrier()

    def has(self, phase: str, number: int) -> bool:
        """Whether the journal has the step's result, without reading it."""
        return self._journal.has(_name(phase, number))

    def is_intact(self, phase: str, number: int) -> bool:
        """Whether the journal has the step's result as it was saved."""
        return self._journal.load(_name(phase, number)) is not None

    def result(self, phase: str, number: int) -> bytes:
        """The result of a finished step; raises OSError if the journal lost it."""
        data = self._journal.load(_name(phase, number))
        if data is None:
            raise OSError(0, "the journal lost a finished step", str(self._journal.folder))
        return data

    def replace(self, phase: str, number: int, result: bytes) -> None:
        """Save the result of a step, in place of an earlier one."""
        self._journal.save(_name(phase, number), result)


def _name(phase: str, number: int) -> str:
    return f"{phase}/{number:07d}"
