"""Statistics of a whole model: two sweeps over its layers."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.layer_stream import LayerStream, Place, Progress, compute_dtype
from ciuic_cli.layerwise.linear_hooks import linears_of
from ciuic_cli.process.threads import one_thread
from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics.files import CONTEXTS, EMBEDDING, ENERGY, FREQUENCY, Statistics, StatisticsWriter
from ciuic_cli.statistics.marks import Journal, Marks
from ciuic_cli.statistics.moments import MomentRecorder, Moments
from ciuic_cli.statistics.sums import OrderedSums, segments_of, share_of

CHUNK = 4
"""Sequences that run through a layer at a time."""


def collect_statistics(
    model_map: ModelMap,
    batches: torch.Tensor,
    folder: Path,
    *,
    device: torch.device,
    seed: int,
    progress: Progress,
    chunk: int = CHUNK,
    workers: Workers | None = None,
    journal: Journal | None = None,
) -> Statistics:
    """Record G and H of every compressible matrix over the calibration sequences.

    A forward sweep keeps each layer's input on disk; at the end one label per token is sampled from the
    model's own prediction, and a backward sweep, layer by layer, carries its gradient down. Peak memory is
    one layer, its statistics twice, and one chunk of sequences.

    Args:
        batches: LongTensor (sequences, length).
        folder: receives one safetensors file per parameter and `statistics.json`.
        workers: share the sequences; the files have the same bytes for any number of them. The folder is theirs all.
        journal: with it, sweeps that were killed go on behind the last layer that was finished.
    """
    workers = workers or Workers()
    chunks = batches.split(chunk)
    shares = share_of(segments_of(len(chunks)), workers)
    numbers = [number for share in shares for number in share]
    ends = itertools.accumulate((len(share) for share in shares), initial=0)
    stream = LayerStream(
        model_map, [chunks[number] for number in numbers], folder / f"stream-{workers.rank}",
        device=device, dtype=compute_dtype(device),
    )  # fmt: skip
    writer = StatisticsWriter(folder, batches.numel(), model_map.checkpoint.folder)
    return _Collection(
        model_map, stream, writer, workers, Marks(journal, workers), seed, progress,
        chunk, batches.shape[1], numbers, [range(begin, end) for begin, end in itertools.pairwise(ends)],
    ).run()  # fmt: skip


USUAL_PLACES = 8
"""Places of a token that are as good a guess of what another one costs as the mean over all tokens."""


@dataclass(frozen=True)
class _Collection:
    """One worker's part of the sweeps: its segments of the text, and the matrices whose sums it owns.

    numbers: of this worker's chunks, in the whole text; segments: of its chunks, as the stream counts them.
    """

    map: ModelMap
    stream: LayerStream
    writer: StatisticsWriter
    workers: Workers
    marks: Marks
    seed: int
    progress: Progress
    chunk: int
    length: int
    numbers: list[int]
    segments: list[range]

    def run(self) -> Statistics:
        """The steps in order, from the first that is not finished yet: forward, head, backward, embedding."""
        layers = len(self.stream.prefixes)
        steps: list[tuple[str, Callable[[], None]]] = [
            *(("forward", partial(self.stream.forward_layer, number)) for number in range(layers)),
            ("head", self._head),
            *(("backward", partial(self._layer, number)) for number in reversed(range(layers))),
            ("embedding", self._embedding),
        ]
        begun = self._resumed(len(steps))
        if begun < len(steps):
            self.stream.begin()
        for number, (what, step) in enumerate(steps[begun:], begun):
            step()
            if number >= layers:
                self.stream.sweep()  # all have marked the step before this one, else they would not have met in it
                self.stream.release(2 * layers - number)
            self.marks.save(number, self._state())
            if what in ("forward", "backward"):
                self.progress(what, number % (layers + 1) + 1, layers)
        self.writer.finish(self.workers)
        shutil.rmtree(self.stream.folder)
        return Statistics(self.writer.folder)

    def _state(self) -> dict[str, Any]:
        return {
            "hidden": self.stream.hidden.contents(), "gradient": self.stream.gradient.contents(),
            "written": self.writer.state(),
        }  # fmt: skip

    def _resumed(self, steps: int) -> int:
        """How many steps are finished, with what they left taken over."""
        for step, state in self.marks.found(steps):
            places: dict[str, ActivationStore | StatisticsWriter] = {
                "hidden": self.stream.hidden, "gradient": self.stream.gradient, "written": self.writer,
            }  # fmt: skip
            intact = all(place.holds(state[name]) for name, place in places.items())
            if all(self.workers.gather(intact)):
                for name, place in places.items():
                    place.take(state[name])
                return step + 1
        return 0

    def _sums(self, names: Sequence[str]) -> OrderedSums:
        return OrderedSums(self.workers, names, self.stream.device)

    def _layer(self, number: int) -> None:
        prefix = self.stream.prefixes[number]
        with self.stream.backward_layer(number) as (layer, carry):
            watched = linears_of(layer, prefix, self.map.parameters)
            sums = self._sums([item.name for item in watched])
            for segment in self.segments:
                recorder = MomentRecorder(watched, self.stream.dtype, self.length)
                with recorder:
                    carry(segment)
                sums.add(recorder.moments)
        self.writer.write(sums.totals)

    def _head(self) -> None:
        """G's diagonal and H of the head, and the gradient below it.

        The first worker, which owns them, keeps the rows' contexts and the mean prediction too. The head's diagonal
        is the exact expectation p (1 - p) over the sampled label, so that rare tokens have a smooth estimate instead
        of a few counts.
        """
        device = self.stream.device
        head = self.stream.model.get_output_embeddings()
        name = next(
            (p.tied_to or p.name for p in self.map.parameters.values() if p.role == "head"), "lm_head.weight"
        )
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []

        def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            inputs.append(args[0].detach())
            outputs.append(output)

        handle = head.register_forward_hook(note)
        vocabulary, width = head.weight.shape
        generator = torch.Generator(device=device)

        def nothing() -> tuple[Moments, Moments]:
            """H and G's diagonal; of every row Σ p(1-p) x, and Σ p, Σ p(1-p) and Σ (p(1-p))²."""
            sums = torch.zeros(vocabulary, width, device=device), torch.zeros(3, vocabulary, device=device)
            return _nothing(vocabulary, width, device), Moments(*sums)

        found: list[Moments] = []  # of one segment

        def visit(place: Place, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            probability = logits.detach()[0].float().softmax(-1)
            slope = _slope(logits, outputs.pop())
            if place.begin == 0:
                sequence = self.numbers[place.chunk] * self.chunk + place.sequence
                generator.manual_seed(sequence_seed(self.seed, sequence))
            logits.backward(_gradient(probability, generator)[None].to(logits.dtype))
            moments, rows = found
            x = inputs.pop()[0].float()
            spread = probability * (1 - probability) * slope
            trace = spread.sum(1)
            moments.inputs.addmm_((x * trace[:, None]).T, x)
            moments.outputs += x.square().sum(1) @ spread
            with one_thread():
                moments.energy += float((trace * x.square().sum(1)).sum())
            moments.tokens += x.shape[0]
            rows.inputs.addmm_(spread.T, x)
            rows.outputs += torch.stack((probability.sum(0), spread.sum(0), spread.square().sum(0)))

        sums, of_rows = self._sums([name]), self._sums([name])
        with self.stream.tail(visit) as carry:
            for segment in self.segments:
                found.clear()  # before the next ones are made: contexts are as large as the vocabulary
                found.extend(nothing())
                carry(segment)
                sums.add({(name, None): found[0]} if segment else {})
                of_rows.add({(name, None): found[1]} if segment else {})
        handle.remove()
        if of_rows.totals:
            contexts, fisher = of_rows.totals[name, None], sums.totals[name, None].outputs
            total, spread, squares = contexts.outputs
            with one_thread():
                frequency = total / total.sum()
            self.writer.write_single(FREQUENCY, self._embedding_name(), frequency)
            seen = spread.square() / squares.clamp_min(1e-30)  # contexts, as many as count
            kept = seen / ((seen + 1.0) * spread * fisher).clamp_min(1e-30)
            self.writer.write_single(CONTEXTS, name, contexts.inputs.mul_(kept.sqrt()[:, None]))
        self.writer.write(sums.totals)

    def _embedding(self) -> None:
        """Fisher information of the embedding's rows, from the gradients that arrived below the first layer."""
        name, device = self._embedding_name(), self.stream.device
        vocabulary, width = self.map.parameters[name].shape
        sums, scale = self._sums([name]), self.workers.broadcast(self.stream.embedding_scale)
        for segment in self.segments:
            # Of sums over a token's places: their moment; |s|² and the number of places by token.
            part = Moments(
                torch.zeros(width, width, device=device), torch.zeros(2, vocabulary, device=device)
            )
            for index in segment:
                gradient = self.stream.gradient.get(f"0.{index}", device)
                for tokens, g in zip(self.stream.chunks[index].to(device), gradient, strict=True):
                    _add_places(part, tokens, scale * g.reshape(len(tokens), -1, width).sum(1))
            sums.add({(name, None): part} if segment else {})
        if sums.totals:
            found = sums.totals[name, None]
            energy, places = found.outputs
            with one_thread():
                usual = found.energy / self.writer.tokens
                moment = found.inputs / found.inputs.diagonal().sum().clamp_min(1e-30)
            self.writer.write_single(EMBEDDING, name, moment)
            energy = (energy + USUAL_PLACES * usual) / (places + USUAL_PLACES)
            self.writer.write_single(ENERGY, name, energy)

    def _embedding_name(self) -> str:
        table = self.stream.model.get_input_embeddings()
        owner = next(name for name, module in self.stream.model.named_modules() if module is table)
        parameter = self.map.parameters[f"{owner}.weight"]
        return parameter.tied_to or parameter.name


def sequence_seed(seed: int, sequence: int) -> int:
    """Of what is drawn for one sequence: the same whoever draws it."""
    return (seed << 30) + sequence


def _add_places(sums: Moments, tokens: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add one sequence: tokens (t,), and gradients (t, n) at their places; sums.energy is that of places alone."""
    present = tokens.unique()
    where = (present[:, None] == tokens[None]).to(gradients.dtype)
    together = where @ gradients
    shorter = together / together.norm(dim=1, keepdim=True).clamp_min(1e-30).sqrt()  # tails: see moments.py
    sums.inputs.addmm_(shorter.T, shorter)
    sums.outputs[0, present] += together.square().sum(1)
    sums.outputs[1, present] += where.sum(1)
    with one_thread():
        sums.energy += float(gradients.square().sum())


def _nothing(rows: int, cols: int, device: torch.device) -> Moments:
    return Moments.zeros(rows, cols, device, torch.float32, full_outputs=False)


def _slope(logits: torch.Tensor, output: torch.Tensor) -> torch.Tensor | float:
    """Squares of what logits (1, t, vocabulary) change by with the head's own output, element by element: what some
    models do to it in between (a factor, a soft cap) makes errors of the head matter less."""
    if logits is output:
        return 1.0
    (slope,) = torch.autograd.grad(logits.sum(), output, retain_graph=True)
    return slope[0].float().square()


def _gradient(probability: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """That of the cross entropy with one label per token drawn from the prediction, in the logits (tokens, vocabulary).

    Labels are drawn by inversion: torch.multinomial is many times slower.
    """
    cumulative = probability.cumsum(-1)
    draw = (
        torch.rand((len(probability), 1), generator=generator, device=probability.device) * cumulative[:, -1:]
    )
    labels = torch.searchsorted(cumulative, draw).clamp_(max=probability.shape[1] - 1)[:, 0]
    gradient = probability.clone()
    gradient[torch.arange(len(gradient)), labels] -= 1.0
    return gradient
