"""How far the sweeps over the layers have come: after a kill they go on behind the last finished step.

Every worker marks each step that it has finished with what it then had on disk. Workers may be one step apart when a
run is killed: all go on from the last step that every one of them has marked, so what a step reads must stay until all
have marked it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from ciuic_cli.workers import Workers


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
            marked = {**state, "workers": self.workers.size}
            self.journal.save(self._name(step), json.dumps(marked).encode())

    def last(self, steps: int) -> tuple[int, dict[str, Any]] | None:
        """The last step, of so many, that all workers have marked, and this one's state then."""
        mine = next((step for step in reversed(range(steps)) if self._load(step) is not None), -1)
        common = min(self.workers.gather(mine))
        state = self._load(common) if common >= 0 else None
        usable = state is not None and state["workers"] == self.workers.size
        if not all(self.workers.gather(usable)) or state is None:
            return None
        return common, state

    def _load(self, step: int) -> dict[str, Any] | None:
        data = None if self.journal is None else self.journal.load(self._name(step))
        return None if data is None else dict(json.loads(data))

    def _name(self, step: int) -> str:
        return f"sweeps/{self.workers.rank}-{step:05d}"
