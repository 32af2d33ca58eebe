"""Statistics of a whole model: a forward and a backward sweep over its layers, one layer in memory at a time.

The steps, in the order in which `_Collection.run` takes them:

1. forward, layer 0 to last: run every calibration sequence through the layer. Records H of every compressible matrix
   of the layer (`moments.py`) and writes it (`files.py`). The layer's inputs stay on disk for the sequences that also
   run backward: one of `gradient_every`.
2. head: predict every token, draw a label from each prediction, and write the loss's gradient at the last layer's
   output to disk. Records the head's Fisher information (`head_fisher.py`).
3. backward, last layer to 0: run the layer again from its inputs on disk, then backward from the gradient at its
   output; write the gradient at its input to disk. Records and writes G. Inputs and gradients that are not needed any
   more are deleted. A down projection is not multiplied again if no gradient depends on its outputs.
4. embedding: the gradients below layer 0 give the Fisher information of the embedding's rows (`embedding_fisher.py`).

In memory at a time: one layer, one chunk of sequences, and the layer's H or G twice: of the current segment of the
text, and the sum over the earlier ones. Of small layers, every thread runs a segment of its own (`chunk_threads.py`).
Some sums are as large as the head; of these, the one over the earlier segments is on the disk (`StoredSums`).

Workers share the text by segments. The sums of segments are added in their order, so that the files have the same bytes
for any number of workers (`sums.py`). Each finished step is marked in the journal, from which a killed run continues
(`marks.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.layer_stream import LayerStream, RunChunks
from ciuic_cli.layerwise.linear_hooks import (
    Key,
    SkippedProducts,
    Submodules,
    WatchedLinear,
    linears_of,
    submodules_of,
)
from ciuic_cli.layerwise.logits import TokenSpan
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype
from ciuic_cli.process.progress import Progress
from ciuic_cli.process.workers import Workers
from ciuic_cli.profiling.account import measured
from ciuic_cli.statistics.embedding_fisher import (
    add_occurrences,
    embedding_moment,
    empty_embedding_sums,
    token_fisher,
)
from ciuic_cli.statistics.files import (
    CONTEXTS,
    EMBEDDING,
    FREQUENCY,
    OUTPUTS,
    TOKEN_FISHER,
    Statistics,
    StatisticsWriter,
)
from ciuic_cli.statistics.head_fisher import (
    HeadSums,
    context_vectors,
    sequence_seed,
    squared_slope,
    token_frequency,
)
from ciuic_cli.statistics.marks import Journal, Marks
from ciuic_cli.statistics.moments import Moments
from ciuic_cli.statistics.recorder import (
    InputRecorder,
    InputSharing,
    OutputRecorder,
    recorded_input_bytes,
    recorded_output_bytes,
)
from ciuic_cli.statistics.spare_memory import SpareMemory
from ciuic_cli.statistics.sums import (
    CHUNK_SEQUENCES,
    OrderedSums,
    Share,
    StoredSums,
    gradient_sequences,
    share_of_text,
)


def collect_statistics(
    model_map: ModelMap,
    batches: torch.Tensor,
    folder: Path,
    *,
    device: torch.device,
    seed: int,
    progress: Progress,
    weights: torch.Tensor | None = None,
    tall_outputs: bool = True,
    gradient_every: int = 1,
    chunk: int = CHUNK_SEQUENCES,
    workers: Workers | None = None,
    journal: Journal | None = None,
) -> Statistics:
    """Record G and H of every compressible matrix over the calibration sequences.

    Args:
        batches: LongTensor (sequences, length).
        folder: receives one safetensors file per parameter and `statistics.json`; shared by all workers.
        seed: for the sampled labels.
        weights: (sequences,) of the loss on each sequence; default: all equal. In the layers a token counts with the
            root of its energy (`moments.py`), so a sequence counts with the root of its weight there. The frequencies
            of tokens ignore weights.
        tall_outputs: whether G is full, and not a diagonal, where a matrix outside stacks has more rows than columns.
        gradient_every: one of so many sequences, evenly spaced, runs backward and gives G, and what is recorded of head
            and embedding. All sequences give H.
        chunk: most sequences that run through a layer at a time.
        workers: share the sequences; the files have the same bytes for any number of them.
        journal: if given, a killed collection continues after its last finished step.

    Raises:
        InputError: the text drives activations or statistics to NaN or infinity.
    """
    workers = workers or Workers()
    weights = torch.ones(len(batches)) if weights is None else weights / weights.mean()
    share = share_of_text(weights, gradient_every, chunk, workers)
    stream = LayerStream(
        model_map, [batches[numbers] for numbers in share.chunks], folder / f"stream-{workers.number}",
        device=device, dtype=compute_dtype(device),
    )  # fmt: skip
    sequences, length = batches.shape
    tokens_backward = length * gradient_sequences(sequences, gradient_every)
    writer = StatisticsWriter(folder, length * sequences, tokens_backward, model_map.checkpoint.folder)
    return _Collection(
        model_map, stream, writer, workers, Marks(journal, workers), seed, tall_outputs, progress,
        weights.tolist(), share,
    ).run()  # fmt: skip


@dataclass(frozen=True)
class _Collection:
    """One worker's part of both sweeps: its segments of the text, and the matrices whose sums it owns.

    weights: of all sequences, 1 on average. share: the stream's chunks, and their segments. skips: whether layers with
    these submodules skip the down projection's product (`_unread`). firsts: `InputSharing.firsts` of layers with
    these submodules and matrices.
    """

    map: ModelMap
    stream: LayerStream
    writer: StatisticsWriter
    workers: Workers
    marks: Marks
    seed: int
    tall_outputs: bool
    progress: Progress
    weights: list[float]
    share: Share
    skips: dict[Submodules, bool] = field(default_factory=dict)
    firsts: dict[tuple[Submodules, tuple[str, ...]], list[int]] = field(default_factory=dict)

    def run(self) -> Statistics:
        """Take all steps in order, beginning with the first that is not finished."""
        layers = len(self.stream.prefixes)
        only_forward = [index for segment in self.share.only_forward for index in segment]
        steps: list[tuple[str, Callable[[], None]]] = [
            *(("forward", partial(self._record_inputs, number)) for number in range(layers)),
            ("head", self._record_head),
            *(("backward", partial(self._record_outputs, number)) for number in reversed(range(layers))),
            ("embedding", self._record_embedding),
        ]
        first = self._resume(len(steps))
        if first < len(steps):
            with measured("forward", ""):
                self.stream.begin()
            if first > 0 and self.stream.carries_state:
                for number in range(layers):
                    self.stream.forward_layer(number)
            for number in range(min(first, layers)):
                self.stream.drop(number, only_forward)
        for number, (phase, step) in enumerate(steps[first:], first):
            with measured(phase, ""):
                step()
            # Deletes what the previous step dropped. All workers have marked that step, or they would not have met in
            # this one; so none can resume before it.
            self.stream.delete_dropped()
            if number < layers:
                self.stream.drop(number, only_forward)
            else:
                self.stream.drop(2 * layers - number)
            self.marks.save(number, self._state())
            if phase in ("forward", "backward"):
                self.progress(phase, number % (layers + 1) + 1, layers)
        self.writer.finish(self.workers)
        shutil.rmtree(self.stream.folder)
        return Statistics(self.writer.folder)

    def _resume(self, steps: int) -> int:
        """The number of finished steps; restores the state after the last one that is intact for all workers."""
        for step, state in self.marks.common_steps(steps):
            parts: dict[str, ActivationStore | StatisticsWriter] = {
                "hidden": self.stream.hidden, "gradient": self.stream.gradient, "written": self.writer,
            }  # fmt: skip
            intact = all(part.is_intact(state[name]) for name, part in parts.items())
            if all(self.workers.gather(intact)):
                for name, part in parts.items():
                    part.restore(state[name])
                return step + 1
        return 0

    def _state(self) -> dict[str, Any]:
        return {
            "hidden": self.stream.hidden.state(), "gradient": self.stream.gradient.state(),
            "written": self.writer.state(),
        }  # fmt: skip

    def _record_head(self) -> None:
        """Write the gradient below the head, and H, the diagonal of G, contexts and frequencies of the head."""
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
        vocabulary, cols = head.weight.shape
        generator = torch.Generator(device=device)
        current: list[HeadSums] = []  # one entry: the sums of the segment that runs

        def visit(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            slope = squared_slope(logits, outputs.pop())
            x = inputs.pop()[0].float()
            sequence = int(self.share.chunks[span.chunk][span.sequence])
            if span.begin == 0:
                generator.manual_seed(sequence_seed(self.seed, sequence))
            draws = torch.rand((logits.shape[1], 1), generator=generator, device=device)
            weight = self.weights[sequence]
            if weight != 1.0:  # it multiplies squared gradients, as the slope does
                slope = torch.ones(logits.shape[1:], device=device) if slope is None else slope
                slope *= weight
            gradient = current[0].add(x, logits.detach()[0], slope, draws)
            logits.backward(gradient[None])
            if weight != 1.0:
                assert hidden.grad is not None
                hidden.grad *= weight**0.5

        moments = OrderedSums(self.workers, [name], device)
        folder = self.stream.folder / "head"
        folder.mkdir(exist_ok=True)
        rows = StoredSums(self.workers, [name], device, folder)
        with self.stream.tail(visit) as run_chunks:
            for segment in self.share.backward:
                current.clear()  # before the next sums are made: they are as large as the vocabulary
                current.append(HeadSums(vocabulary, cols, device, self.stream.dtype))
                run_chunks(segment)
                moments.add({(name, None): current[0].moments} if segment else {})
                rows.add({(name, None): current[0].rows()} if segment else {})
        handle.remove()
        current.clear()
        if rows.totals:  # this worker owns the head
            row_sums, fisher = rows.load(name), moments.totals[name, None].outputs
            table = self._embedding_name()
            frequency = token_frequency(row_sums, self.map.parameters[table].shape[0])
            self.writer.write_single(FREQUENCY, table, frequency)
            self.writer.write_single(CONTEXTS, name, context_vectors(row_sums, fisher))
        shutil.rmtree(folder)
        self.writer.write(moments.totals)

    def _record_inputs(self, number: int) -> None:
        """Run a layer forward; write its outputs, and H of its matrices."""
        with self.stream.loaded_layer(number) as (layer, run_chunks):
            watched = linears_of(layer, self.stream.prefixes[number], self.map.parameters)
            firsts = self._first_with_inputs(number, layer, watched, run_chunks)
            watched = [item for item in watched if firsts[item.name] == item.name]

            def record(segment: range, spare: SpareMemory) -> dict[Key, Moments]:
                recorder = InputRecorder(watched, self.stream.dtype, spare)
                for index in segment:
                    recorder.weight = self.weights[int(self.share.chunks[index][0])] ** 0.5
                    with recorder:
                        run_chunks([index])
                return recorder.moments

            segments = [*self.share.backward, *self.share.only_forward]
            sums = self._summed(number, watched, segments, record, recorded_input_bytes(watched))
        self.writer.write(sums.totals)
        self.writer.share_inputs(firsts)

    def _first_with_inputs(
        self, number: int, layer: nn.Module, watched: Sequence[WatchedLinear], run_chunks: RunChunks
    ) -> dict[str, str]:
        """The name of the first matrix with the same inputs, by matrix; one with inputs of its own has its own name.

        Tested on one chunk, and once for all layers with the same submodules and matrices: some layers have the
        matrices of an earlier one. All workers take what the leader found.
        """
        names = tuple(item.name.removeprefix(self.stream.prefixes[number]) for item in watched)
        key = submodules_of(layer), names
        if self.workers.is_leader and key not in self.firsts:
            with InputSharing(watched) as sharing:
                run_chunks(self.share.backward[0][:1])
            self.firsts[key] = sharing.firsts()
        found = self.workers.broadcast(self.firsts.get(key))
        return {item.name: watched[first].name for item, first in zip(watched, found, strict=True)}

    def _record_outputs(self, number: int) -> None:
        """Run a layer backward; write the gradient at its input, and G of its matrices."""
        prefix = self.stream.prefixes[number]
        with self.stream.backward_layer(number) as (layer, run_chunks):
            watched = linears_of(layer, prefix, self.map.parameters)
            unread = self._unread(number, layer, watched, run_chunks)

            def record(segment: range, spare: SpareMemory) -> dict[Key, Moments]:
                recorder = OutputRecorder(watched, self.stream.dtype, spare, tall_outputs=self.tall_outputs)
                with SkippedProducts(unread), recorder:
                    run_chunks(segment)
                return recorder.moments

            besides = recorded_output_bytes(watched, tall_outputs=self.tall_outputs)
            sums = self._summed(number, watched, self.share.backward, record, besides)
        self.writer.write(sums.totals)

    def _summed(
        self,
        number: int,
        watched: Sequence[WatchedLinear],
        segments: Sequence[range],
        record: Callable[[range, SpareMemory], dict[Key, Moments]],
        besides: int,
    ) -> OrderedSums:
        """The sums over all segments of what `record` finds in each, while a layer is loaded.

        besides: bytes of the sums of a segment.
        """
        spare = SpareMemory()
        sums = OrderedSums(self.workers, [item.name for item in watched], self.stream.device, spare)
        count = self.stream.side_by_side(number, besides=besides)
        sums.add_segments(segments, lambda segment: record(segment, spare), count)
        return sums

    def _unread(
        self, number: int, layer: nn.Module, watched: Sequence[WatchedLinear], run_chunks: RunChunks
    ) -> list[torch.Tensor]:
        """The weights of down projections whose outputs no gradient depends on: the layer adds them to a residual that
        it returns.

        The test runs one chunk with and without the products. A layer with the same submodules as an earlier one is not
        tested again.
        """
        candidates = [item for item in watched if item.role == "down" and item.tensor.dim() == 2]
        chunks = self.share.backward[0][:1]  # none for a worker without a segment
        parts = submodules_of(layer)
        if candidates and chunks and parts not in self.skips:

            def gradients() -> torch.Tensor:
                run_chunks(chunks)
                return self.stream.gradient.get(f"{number}.{chunks[0]}", torch.device("cpu"))

            expected = gradients()
            with SkippedProducts([item.tensor for item in candidates]):
                self.skips[parts] = torch.equal(gradients(), expected)
        return [item.tensor for item in candidates if self.skips.get(parts)]

    def _record_embedding(self) -> None:
        """Write the Fisher information of the embedding's rows."""
        name, device = self._embedding_name(), self.stream.device
        vocabulary, cols = self.map.parameters[name].shape
        sums = OrderedSums(self.workers, [name], device)
        scale = self.workers.broadcast(self.stream.embedding_scale)
        with self.stream.embedding_gradients(scale) as gradients:
            for segment in self.share.backward:
                segment_sums = empty_embedding_sums(vocabulary, cols, device)
                for index in segment:
                    chunk = self.stream.chunks[index].to(device)
                    for tokens, row_gradients in zip(chunk, gradients(index), strict=True):
                        add_occurrences(segment_sums, tokens, row_gradients)
                sums.add({(name, None): segment_sums} if segment else {})
        if sums.totals:  # this worker owns the embedding
            total = sums.totals[name, None]
            self.writer.write_single(EMBEDDING, name, embedding_moment(total))
            fisher = token_fisher(total, self.writer.tokens[OUTPUTS])
            self.writer.write_single(TOKEN_FISHER, name, fisher)

    def _embedding_name(self) -> str:
        table = self.stream.model.get_input_embeddings()
        owner = next(name for name, module in self.stream.model.named_modules() if module is table)
        parameter = self.map.parameters[f"{owner}.weight"]
        return parameter.tied_to or parameter.name
