"""How far the sweeps over the layers have come: after a kill they go on behind the last finished step.

Every worker marks each step that it has finished with what it then had on disk. Workers may be one step apart when a
run is killed: all go on from the last step that every one of them has marked, so what a step reads must stay until all
have marked it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ciuic_cli.process.workers import Workers


class Journal(Protocol):
    """Keeps the results of finished steps by name; a result is either whole or not there."""

    def load(self, name: str) -> bytes | None: ...

    def save(self, name: str, data: bytes) -> None: ...


class Marks:
    """One worker's marks of the steps 0, 1, ... in a journal; without one, nothing is kept or found."""

    def __init__(self, journal: Journal | None, workers: Workers) -> None:
        self.journal, self.workers = journal, workers

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """This worker has finished the step; `state` is what it has on disk."""
        if self.journal is not None:
            self.journal.save(self._name(step), json.dumps(state).encode())

    def found(self, steps: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The steps, of so many, that all workers of a run with as many have marked, the last one first, and this one's
        state then. Of some of them the files may be gone: marks of runs before the last one stay."""
        mine = {step for step in range(steps) if self._load(step) is not None}
        for step in sorted(set.intersection(*self.workers.gather(mine)), reverse=True):
            state = self._load(step)
            assert state is not None
            yield step, state

    def _load(self, step: int) -> dict[str, Any] | None:
        data = None if self.journal is None else self.journal.load(self._name(step))
        return None if data is None else dict(json.loads(data))

    def _name(self, step: int) -> str:
        return f"sweeps/{self.workers.rank}-of-{self.workers.size}-{step:05d}"
