"""Moments of several segments of the text, added up in the segments' order, whoever computed them.

Floating-point sums depend on their order. The text is always cut into the same few segments, and what the segments
gave is added one after the other: the result has the same bits for any number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics.moments import Moments

SEGMENTS = 8
"""Parts of the text; more workers than these do not make the statistics faster."""


def segments_of(chunks: int) -> list[range]:
    """The segments of so many chunks: consecutive, nearly equal, none of them empty."""
    count = min(SEGMENTS, chunks)
    bounds = [chunks * part // count for part in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def share_of(segments: Sequence[range], workers: Workers) -> list[range]:
    """This worker's segment in each round; empty where there is none left in the last one."""
    rounds = -(-len(segments) // workers.size)
    mine = [turn * workers.size + workers.rank for turn in range(rounds)]
    return [segments[number] if number < len(segments) else range(0) for number in mine]


class OrderedSums:
    """Sums of moments by matrix; those of one parameter end in the memory of one worker, its owner.

    Args:
        names: the parameters, in the same order everywhere.
    """

    def __init__(self, workers: Workers, names: Sequence[str], device: torch.device) -> None:
        self.workers, self.device = workers, device
        self.owner = {name: place % workers.size for place, name in enumerate(names)}
        self.totals: dict[Key, Moments] = {}

    def add(self, found: Mapping[Key, Moments]) -> None:
        """What this worker's segment of one round gave; all workers come together here."""
        shapes = {key: (own.inputs.shape, own.outputs.shape, own.numbers) for key, own in found.items()}
        everyone = self.workers.gather(shapes)
        for key in _ordered(everyone):
            owner = self.owner[key[0]]
            for rank, theirs in enumerate(everyone):
                if key not in theirs:
                    continue
                if self.workers.rank == rank == owner:
                    self._include(key, found[key])
                elif self.workers.rank == rank:
                    self.workers.send(found[key].inputs, owner)
                    self.workers.send(found[key].outputs, owner)
                elif self.workers.rank == owner:
                    inputs, outputs, numbers = theirs[key]
                    self._include(
                        key,
                        Moments(
                            self.workers.receive(inputs, self.device, rank),
                            self.workers.receive(outputs, self.device, rank),
                            *numbers,
                        ),
                    )

    def _include(self, key: Key, more: Moments) -> None:
        if key in self.totals:
            self.totals[key].include(more)
        else:
            self.totals[key] = more


def _ordered(everyone: Sequence[Mapping[Key, object]]) -> Iterator[Key]:
    keys = {key for found in everyone for key in found}
    yield from sorted(keys, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
