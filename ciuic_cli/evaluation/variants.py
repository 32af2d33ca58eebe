"""Variants of a model, which differ in some weights, run through its layers together: every layer is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.layerwise.logits import VisitLogits
from ciuic_cli.layerwise.overrides import KeptValues, Override, new_values, only, replaced
from ciuic_cli.process.atomic_files import remove_path


@dataclass(frozen=True)
class Variant:
    """keys: the weights that have other values than the original's. chunks: the stream's chunks that run through it."""

    keys: frozenset[Key]
    chunks: range


class Mark(Protocol):
    """Where a run notes how many layers it has finished, so that it continues there after a kill."""

    def load(self) -> Mapping[str, Any] | None: ...

    def save(self, state: Mapping[str, Any]) -> None: ...


class Variants:
    """Variants of a stream's model.

    A layer's other values are computed when the layer is reached, and are in memory only while it runs. Files keep
    those of embedding and head, which run twice, and those of experts.

    Args:
        override: the other values. It is called from several threads, once for each weight whose values are kept or
            stay in memory, more often for the others. Its values are overwritten.
        folder: for the files. limit: the most bytes of them.
    """

    def __init__(
        self, stream: LayerStream, variants: Sequence[Variant], override: Override, folder: Path, limit: int
    ) -> None:
        self._stream, self._variants, self._override = stream, variants, override
        remove_path(folder)  # left by a killed run
        self._kept = KeptValues(override, folder, stream.device, limit)

    def run(self, visit: VisitLogits, progress: Callable[[int, int], None], mark: Mark) -> None:
        """Run all variants forward. `visit` is called as by `LayerStream.run_tail`.

        progress: called with the numbers of finished parts and of all parts: the layers, and what follows them.
        """
        layers = len(self._stream.prefixes)
        self._forward(lambda finished: progress(finished, layers + 1), mark)
        self._tail(visit)
        progress(layers + 1, layers + 1)

    def _forward(self, finished: Callable[[int], None], mark: Mark) -> None:
        """Run everything but the head. finished: called with the number of finished layers."""
        stream = self._stream
        for keys, chunks in self._outside():
            stream.override = only(self._kept, keys)
            stream.begin(chunks)
        for number in range(self._resumed(mark), len(stream.prefixes)):
            self._run_layer(number)
            stream.drop(number)
            mark.save({"finished": number + 1, "hidden": stream.hidden.state()})
            stream.delete_dropped()
            finished(number + 1)

    def _resumed(self, mark: Mark) -> int:
        """The layers that a killed run has finished, whose outputs are then in the stream."""
        state, hidden = mark.load(), self._stream.hidden
        if state is None or self._stream.carries_state or not hidden.is_intact(state["hidden"]):
            return 0
        hidden.clear()  # the first layer's inputs
        hidden.restore(state["hidden"])
        return int(state["finished"])

    def _tail(self, visit: VisitLogits) -> None:
        """Run what follows the last layer."""
        for keys, chunks in self._outside():
            self._stream.override = only(self._kept, keys)
            self._stream.run_tail(visit, chunks)
        self._kept.clear()
        self._stream.hidden.clear()

    def _outside(self) -> Iterator[tuple[frozenset[Key], list[int]]]:
        """The weights in no layer that have other values, each set with the chunks that run with it."""
        layers = tuple(self._stream.prefixes)
        return self._groups(lambda key: not key[0].startswith(layers))

    def _groups(self, takes_part: Callable[[Key], bool]) -> Iterator[tuple[frozenset[Key], list[int]]]:
        """Sets of weights that have other values, among those that take part, each with the chunks of its variants."""
        groups: dict[frozenset[Key], list[int]] = {}
        for variant in self._variants:
            groups.setdefault(frozenset(filter(takes_part, variant.keys)), []).extend(variant.chunks)
        return iter(groups.items())

    def _run_layer(self, number: int) -> None:
        stream, prefix = self._stream, self._stream.prefixes[number]
        groups = [*self._groups(lambda key: key[0].startswith(prefix))]
        changed = frozenset[Key]().union(*(keys for keys, _ in groups))
        # Before the layer is in memory, because a matrix's values take much of it while they are computed.
        values = new_values(stream.map, stream.layer(number), prefix, only(self._override, changed))
        stream.override = only(self._override, ())
        with stream.layer_with_weights(number) as layer:
            for keys, chunks in groups:
                with replaced(stream.map, layer, prefix, values, self._kept, keys), torch.no_grad():
                    stream.run_layer(number, layer, chunks)
        self._kept.clear(prefix)
