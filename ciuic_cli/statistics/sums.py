"""Sums of moments over the segments of the text, with the same bits for any number of workers.

Floating-point sums depend on their order. So the text is always cut into the same chunks, which run through a layer
together, and the same segments of chunks. Each segment is summed by one worker, and the segments' sums are added in the
order of the segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.integers import ceil_div
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process.threads import in_order
from ciuic_cli.process.workers import Workers
from ciuic_cli.profiling.account import counted_here
from ciuic_cli.statistics.moments import Moments
from ciuic_cli.statistics.spare_memory import SpareMemory

SEGMENTS = 8
"""Segments of the text, and so the most workers that have work in the statistics. No measurement is on record."""
CHUNK_SEQUENCES = 4
"""Most sequences that run through a layer at a time. No measurement is on record."""
STORED_ROWS = 4096
"""Rows in each file of `StoredSums`. Chosen, not tuned: 25 MB with 1,536 inputs."""


@dataclass(frozen=True)
class Share:
    """One worker's share of the text.

    chunks: the numbers (LongTensor) of the sequences of each of its chunks. backward: its segments of sequences that
    run forward and backward, one per round, as ranges of chunks. only_forward: those of the other sequences.
    """

    chunks: list[torch.Tensor]
    backward: list[range]
    only_forward: list[range]


def share_of_text(weights: torch.Tensor, gradient_every: int, most: int, workers: Workers) -> Share:
    """This worker's share of a text.

    weights: (sequences,). gradient_every: one of so many sequences runs backward. most: sequences of a chunk.
    """
    numbers = torch.arange(len(weights))
    runs_backward = numbers % gradient_every == 0
    mine: list[torch.Tensor] = []

    def rounds(some: torch.Tensor) -> Iterator[range]:
        chunks = chunks_of(some, weights[some], most)
        for segment in share_of(segments_of(len(chunks)), workers):
            yield range(len(mine), len(mine) + len(segment))
            mine.extend(chunks[number] for number in segment)

    backward, only_forward = list(rounds(numbers[runs_backward])), list(rounds(numbers[~runs_backward]))
    return Share(mine, backward, only_forward)


def gradient_sequences(sequences: int, gradient_every: int) -> int:
    """How many sequences run backward."""
    return ceil_div(sequences, gradient_every)


def chunks_of(numbers: torch.Tensor, weights: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Cut the numbers (s,) of sequences into nearly equal chunks of at most `most`, an even number of them where that
    can be. The sequences of a chunk have the same weight.

    Chunks and segments run side by side: five chunks keep two threads as long as six.
    """
    alike = (numbers[weights == weight] for weight in weights.unique())
    return [chunk for some in alike for chunk in some.tensor_split(chunk_count(len(some), most))]


def chunk_count(sequences: int, most: int) -> int:
    """How many chunks `chunks_of` makes of sequences with the same weight."""
    return min(2 * ceil_div(sequences, 2 * most), sequences)


def segments_of(chunks: int) -> list[range]:
    """Cut chunks 0, 1, ... into at most `SEGMENTS` consecutive, nearly equal, non-empty segments, longer ones first.

    Segments run side by side: while a longer one runs last, the other threads have no work (measured:
    docs/experiments/scale/account.md).
    """
    if not chunks:
        return []
    count = min(SEGMENTS, chunks)
    shorter, longer = divmod(chunks, count)
    sizes = (shorter + (part < longer) for part in range(count))
    return [range(begin, end) for begin, end in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def share_of(segments: Sequence[range], workers: Workers) -> list[range]:
    """This worker's segment in each round. In the last round it is empty if no segment is left."""
    rounds = ceil_div(len(segments), workers.size)
    numbers = [turn * workers.size + workers.number for turn in range(rounds)]
    return [segments[number] if number < len(segments) else range(0) for number in numbers]


class OrderedSums:
    """Sums of moments by matrix. Each parameter has one worker as its owner, whose `totals` receives its sums.

    Args:
        names: all parameters, in the same order for all workers.
        spare: receives the memory of this worker's sums that were added to others or sent.
    """

    def __init__(
        self,
        workers: Workers,
        names: Sequence[str],
        device: torch.device,
        spare: SpareMemory | None = None,
    ) -> None:
        self.workers, self.device, self._spare = workers, device, spare
        self.owner = {name: number % workers.size for number, name in enumerate(names)}
        self.totals: dict[Key, Moments] = {}

    def add_segments(
        self, segments: Sequence[range], record: Callable[[range], Mapping[Key, Moments]], side_by_side: int
    ) -> None:
        """Add what `record` finds in this worker's segments, one per round, and note the segments.

        side_by_side: how many segments run at once.
        """

        def noted(segment: range) -> Mapping[Key, Moments]:
            moments = record(segment)
            # Not those of experts, which are shrunk towards the pool of their stack instead (`files.py`).
            for (_, expert), each in moments.items():
                if expert is None:
                    each.note_segment()
            return moments

        for moments in in_order(segments, counted_here(noted), side_by_side):
            self.add(moments)

    def add(self, moments: Mapping[Key, Moments]) -> None:
        """Add the sums of this worker's segment of one round; all workers must call it once per round.

        The object takes over `moments` and may change them.
        """
        headers = {key: (each.inputs.shape, each.outputs.shape, each.header) for key, each in moments.items()}
        everyone = self.workers.gather(headers)
        for key in _all_keys(everyone):
            owner = self.owner[key[0]]
            for sender, theirs in enumerate(everyone):
                if key not in theirs:
                    continue
                if self.workers.number == sender == owner:
                    self._include(key, moments[key])
                elif self.workers.number == sender:
                    self.workers.send(moments[key].inputs, owner)
                    self.workers.send(moments[key].outputs, owner)
                elif self.workers.number == owner:
                    inputs, outputs, header = theirs[key]
                    self._include(
                        key,
                        Moments(
                            self.workers.receive(inputs, self.device, sender),
                            self.workers.receive(outputs, self.device, sender),
                            *header,
                        ),
                    )
        for key, own in moments.items():
            if self._spare is not None and self.totals.get(key) is not own:
                self._spare.keep(own.inputs, own.outputs)

    def _include(self, key: Key, more: Moments) -> None:
        if key in self.totals:
            self.totals[key].include(more)
        else:
            self.totals[key] = more


class StoredSums(OrderedSums):
    """As `OrderedSums`, for matrices (no stacks) with inputs (rows, columns) as large as the head.

    The inputs in `totals` are empty: those of the totals are in files, from which `load` reads them. In memory at a
    time are the sums of a segment, those that another worker has sent, and a few rows of a total.

    Args:
        folder: an empty folder for the files.
    """

    def __init__(self, workers: Workers, names: Sequence[str], device: torch.device, folder: Path) -> None:
        super().__init__(workers, names, device)
        self._folder = folder
        self._shapes: dict[str, torch.Size] = {}

    def load(self, name: str) -> Moments:
        """The total of a matrix that this worker owns."""
        inputs = torch.empty(self._shapes[name], device=self.device)
        for number, rows in enumerate(inputs.split(STORED_ROWS)):
            rows.copy_(self._read(name, number, rows.shape))
        return replace(self.totals[name, None], inputs=inputs)

    def _include(self, key: Key, more: Moments) -> None:
        name, expert = key
        if expert is not None:
            raise ValueError(f"{name} is a stack")
        is_first = key not in self.totals
        super()._include(key, replace(more, inputs=torch.empty(0)))  # no slice, which would keep its memory
        self._shapes[name] = more.inputs.shape
        for number, rows in enumerate(more.inputs.split(STORED_ROWS)):
            total = rows if is_first else self._read(name, number, rows.shape).add_(rows)
            self._file(name, number).write_bytes(total.contiguous().cpu().numpy().data)

    def _read(self, name: str, number: int, shape: torch.Size) -> torch.Tensor:
        rows = np.fromfile(self._file(name, number), dtype=np.float32)
        return torch.from_numpy(rows).reshape(shape).to(self.device)

    def _file(self, name: str, number: int) -> Path:
        return self._folder / f"{name}.{number}"


def _all_keys(everyone: Sequence[Mapping[Key, object]]) -> Iterator[Key]:
    """The keys of all workers in one order: by name, the pool of a stack before its experts."""
    keys = {key for headers in everyone for key in headers}
    yield from sorted(keys, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
