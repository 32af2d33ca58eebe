"""Marks of finished steps, from which the statistics' sweeps resume after a kill.

Every worker marks each step that it has finished with what it then has on disk. When a run is killed, workers may be
one step apart. All resume from the last step that every one of them has marked, so the files that a step reads must
stay until all workers have marked that step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ciuic_cli.process.workers import Workers


class Journal(Protocol):
    """Stores the results of finished steps by name; a result is either complete or absent."""

    def load(self, name: str) -> bytes | None: ...

    def save(self, name: str, data: bytes) -> None: ...


class Marks:
    """One worker's marks of the steps 0, 1, ... in a journal. Without a journal nothing is saved or loaded."""

    def __init__(self, journal: Journal | None, workers: Workers) -> None:
        self.journal, self.workers = journal, workers

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Mark a step as finished; `state`, JSON, describes this worker's files."""
        if self.journal is not None:
            self.journal.save(self._name(step), json.dumps(state).encode())

    def common_steps(self, steps: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Steps below `steps` that all workers have marked, last one first, each with this worker's state.

        Only marks of runs with the same number of workers count: others had other shares of the text. The files of a
        mark may be gone, because marks of earlier runs stay in the journal; the caller has to check.
        """
        marked = {step for step in range(steps) if self._load(step) is not None}
        for step in sorted(set.intersection(*self.workers.gather(marked)), reverse=True):
            state = self._load(step)
            assert state is not None
            yield step, state

    def _load(self, step: int) -> dict[str, Any] | None:
        data = None if self.journal is None else self.journal.load(self._name(step))
        return None if data is None else dict(json.loads(data))

    def _name(self, step: int) -> str:
        return f"sweeps/{self.workers.number}-of-{self.workers.size}-{step:05d}"
