"""Runs a causal language model one decoder layer at a time, forward and then backward, straight from its files.

A chunk is a batch of sequences that run through a layer together. The methods, in the order of their use:

1. `begin` runs the model on each chunk with stand-ins in place of its decoder layers. In memory: everything but the
   layers (embedding, final norm, and the original's head). It writes the first layer's inputs to disk, and records the
   arguments that the model passes to each layer (masks, rotary embeddings). The model's own code makes them, so any
   family works.
2. `forward_layer` loads one layer and runs it on one chunk after the other, from inputs on disk to outputs on disk.
   `loaded_layer` leaves it to the caller which chunks run when.
3. `tail` runs what follows the last layer, again with everything but the layers in memory. `visit` gets the logits in
   parts of at most `logits.LOGIT_BYTES`. If it computes a gradient, that at the last layer's output is written to disk.
   `run_tail` does so without gradients, and for several chunks at once.
4. `backward_layer` loads one layer, computes its output again from its inputs on disk, and turns the gradient at its
   output on disk into the gradient at its input on disk. In memory: the layer, and autograd's graph of one chunk.
5. `drop` and `delete_dropped` delete files that no later step reads.

Weights are float32, but those of a layer's linears have the dtype of products, as embedding and head in `tail` have.
Expert stacks stay in main memory (`expert_offload.py`). Matrix products are in `dtype`, the residual stream is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ciuic_cli.checkpoint.architecture import config_faults
from ciuic_cli.checkpoint.formats import count_nonfinite
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import InputError
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.chunk_threads import chunks_side_by_side, heads_side_by_side
from ciuic_cli.layerwise.embedding_gradients import embedding_factor, projected, scaled
from ciuic_cli.layerwise.logits import LogitsOfChunk, TokenSpan, VisitLogits, logit_tokens
from ciuic_cli.layerwise.operations.mixed_precision import float32_outputs, mixed_precision
from ciuic_cli.layerwise.operations.stable_bits import stable_bits
from ciuic_cli.layerwise.partial_model import PartialModel
from ciuic_cli.layerwise.stand_ins import (
    StandIn,
    is_of_the_chunk,
    linked_arguments,
    require_layer_by_layer,
)
from ciuic_cli.process.memory import limit_freed_memory, return_freed_memory
from ciuic_cli.process.progress import Progress
from ciuic_cli.process.threads import in_order
from ciuic_cli.profiling.account import counted_here

RunChunks = Callable[[Sequence[int]], None]
"""Runs the chunks with these numbers, one after the other."""


class LayerStream(PartialModel):
    """The layers of one model, run one by one over all chunks of a text.

    Attributes:
        hidden, gradient: float32 tensors on disk. "<n>.<c>" is the input of layer n for chunk c, and the gradient
            there. With n = number of layers it is the last layer's output.
        span_tokens: the most tokens of a sequence whose logits exist at a time.
        embedding_scale: factor between the embedding's rows and the first layer's inputs; set by `begin`.

    Args:
        model_map: where each parameter's weights come from.
        chunks: LongTensors (sequences, length), one for each forward call.
        folder: for `hidden` and `gradient`.
        dtype: of matrix products; the residual stream is float32.
    """

    def __init__(
        self,
        model_map: ModelMap,
        chunks: Sequence[torch.Tensor],
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model_map, device, dtype)
        self.chunks = list(chunks)
        self.folder = folder
        self.hidden = ActivationStore(folder / "hidden")
        self.gradient = ActivationStore(folder / "gradient")
        head = self.model.get_output_embeddings()
        self.span_tokens = logit_tokens(head.weight.shape[0], dtype)
        self._head_name = next(name for name, module in self.model.named_modules() if module is head)
        self.embedding_scale = 1.0
        # Keyword arguments of each layer: by shape of the chunk, and those that differ from chunk to chunk.
        self._shared_arguments: dict[tuple[str, torch.Size], dict[str, Any]] = {}
        self._chunk_arguments: dict[tuple[str, int], dict[str, Any]] = {}
        # Layer -> argument -> the earlier layer, and the part of its output, that the argument is.
        self._links: dict[int, dict[str, tuple[int, int]]] = {}
        self._extras: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._streams_first = False
        self._projects_rows = False  # whether embedding and first layer have different widths

    # --- the steps

    def begin(self, chunks: Sequence[int] | None = None) -> None:
        """Write the first layer's inputs of these chunks (default: all), unless they are there already, and record
        every layer's arguments.

        The head does not run: with a vocabulary of 262,144, the logits of one token take longer than everything else
        here (measured: docs/experiments/scale/head-only-for-logits.md).
        """
        # The original's head is loaded although it does not run: a fault in it is found before hours of work.
        head = self.override is None
        with self.without_layers(head=head) as stand_ins, torch.no_grad(), self._autocast():
            for place, index in enumerate(self._chunks_or_all(chunks)):
                tokens = self.chunks[index]
                self._run_without_layers(tokens, stand_ins)
                first = stand_ins[0].hidden
                assert first is not None
                if place == 0:
                    rows = self.model.get_input_embeddings().weight[tokens.to(self.device)]
                    self._streams_first = first.shape[:2] != tokens.shape and first.shape[1:3] == tokens.shape
                    self._projects_rows = first.shape[-1] != rows.shape[-1]
                    self.embedding_scale = embedding_factor(self._streams_last(first), rows)
                if f"0.{index}" not in self.hidden:
                    self.hidden.put(f"0.{index}", self._streams_last(first))
                for number, (prefix, stand_in) in enumerate(zip(self.prefixes, stand_ins, strict=True)):
                    self._links.setdefault(number, linked_arguments(stand_in, stand_ins[:number]))
                    shared = self._shared_arguments.setdefault((prefix, tokens.shape), stand_in.kwargs)
                    self._chunk_arguments[prefix, index] = {
                        name: value
                        for name, value in stand_in.kwargs.items()
                        if is_of_the_chunk(value, shared[name])
                    }

    def _run_without_layers(self, tokens: torch.Tensor, stand_ins: Sequence[StandIn]) -> None:
        for stand_in in stand_ins:
            stand_in.calls = 0
        with config_faults(self.map.checkpoint.folder / "config.json"):
            self.model.base_model(input_ids=tokens.to(self.device), use_cache=False)
        require_layer_by_layer(stand_ins, type(self.model).__name__, self.map.checkpoint.folder)

    def forward(self, progress: Progress) -> None:
        """Run `begin` and all layers forward; only the last layer's outputs stay in `hidden`."""
        self.begin()
        for number in range(len(self.prefixes)):
            self.forward_layer(number)
            self.drop(number)
            self.delete_dropped()
            progress("forward", number + 1, len(self.prefixes))

    def forward_layer(self, number: int, chunks: Sequence[int] | None = None) -> None:
        """Load a layer, and `run_layer`."""
        with self.layer_with_weights(number) as layer:
            self.run_layer(number, layer, chunks)

    def run_layer(self, number: int, layer: nn.Module, chunks: Sequence[int] | None = None) -> None:
        """Run a loaded layer on these chunks (default: all), from "<number>.<chunk>" in `hidden` to
        "<number + 1>.<chunk>".

        Raises InputError if an output of the original model is NaN or infinite.
        """
        run = counted_here(partial(self._run_chunk, number, layer))
        with self.in_use(self.prefixes[number], layer):
            list(in_order(self._chunks_or_all(chunks), run, self.side_by_side(number)))

    @contextmanager
    def loaded_layer(self, number: int) -> Iterator[tuple[nn.Module, RunChunks]]:
        """Context that yields a layer, and a function that runs it on chunks as `run_layer` does, one after the other.
        Several threads may call it.
        """
        with self.layer_with_weights(number) as layer, self.in_use(self.prefixes[number], layer):

            def run_chunks(chunks: Sequence[int]) -> None:
                for index in chunks:
                    self._run_chunk(number, layer, index)

            yield layer, run_chunks

    def _run_chunk(self, number: int, layer: nn.Module, index: int) -> None:
        prefix, hidden = self.prefixes[number], self.hidden.get(f"{number}.{index}", self.device)
        with torch.no_grad(), self._autocast(), self._blaming_config(prefix):
            output = layer(self._as_the_model(hidden), **self._arguments(number, index))
        if isinstance(output, tuple | list):
            sources = {source for links in self._links.values() for source, _ in links.values()}
            if number in sources:
                self._extras[number, index] = tuple(output[1:])
            output = output[0]
        self._require_finite(output, prefix)
        self.hidden.put(f"{number + 1}.{index}", self._streams_last(output))

    def run_tail(self, visit: VisitLogits, chunks: Sequence[int] | None = None) -> None:
        """Run what follows the last layer on these chunks (default: all), without gradients.

        `visit` gets the logits, span by span. Several threads call it, each with all spans of a chunk in order.
        """
        with self.tail_logits() as logits_of_chunk:

            def run(index: int) -> None:
                with torch.no_grad():
                    for span, hidden, logits in logits_of_chunk(index):
                        visit(span, hidden, logits)
                        del hidden, logits  # frees them before the next ones are made
                limit_freed_memory()

            count = heads_side_by_side(self.map, self.span_tokens, self.device)
            list(in_order(self._chunks_or_all(chunks), counted_here(run), count))

    @contextmanager
    def tail(self, visit: VisitLogits) -> Iterator[RunChunks]:
        """Context that yields a function to run what follows the last layer. `visit` gets the logits, span by span.

        If `visit` leaves a gradient in hidden.grad, it is written as the gradient at the last layer's output.
        """
        last = len(self.prefixes)
        with self.tail_logits() as logits_of_chunk:

            @stable_bits(self.device)
            def run_chunks(chunks: Sequence[int]) -> None:
                for index in chunks:
                    gradients = []
                    for span, hidden, logits in logits_of_chunk(index):
                        visit(span, hidden, logits)
                        gradients.append(hidden.grad)
                        del hidden, logits  # frees them before the next ones are made
                    present = [gradient for gradient in gradients if gradient is not None]
                    if present:
                        shape = (*self.chunks[index].shape, *present[0].shape[2:])
                        self.gradient.put(f"{last}.{index}", torch.cat(present, 1).reshape(shape))

            yield run_chunks

    @contextmanager
    def tail_logits(self) -> Iterator[LogitsOfChunk]:
        """Context that yields a function from a chunk to its spans, hidden states and logits after the last layer."""
        last, model = len(self.prefixes), self.model
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        return_freed_memory()  # of the layers, because the head may be the largest weight of the model
        with self.without_layers(table, head) as stand_ins, float32_outputs(table):

            def logits_of_chunk(index: int) -> Iterator[tuple[TokenSpan, torch.Tensor, torch.Tensor]]:
                hidden = self.hidden.get(f"{last}.{index}", self.device)
                for row, begin in product(range(len(hidden)), range(0, hidden.shape[1], self.span_tokens)):
                    where = slice(row, row + 1), slice(begin, begin + self.span_tokens)
                    part = hidden[where].requires_grad_(torch.is_grad_enabled())
                    stand_ins[-1].replacement = self._as_the_model(part)
                    with self._autocast(), self._blaming_config(self._head_name):
                        tokens = self.chunks[index][where].to(self.device)
                        logits = model(input_ids=tokens, use_cache=False).logits
                    self._require_finite(logits, self._head_name)
                    yield TokenSpan(index, row, begin), part, logits
                    del part, logits  # frees them before the next ones are made

            yield logits_of_chunk

    @contextmanager
    def backward_layer(self, number: int) -> Iterator[tuple[nn.Module, RunChunks]]:
        """Context that yields a layer, and a function that runs it backward on chunks.

        It reads "<number + 1>.<chunk>" in `gradient` and writes "<number>.<chunk>". Several threads may call it.
        """
        prefix = self.prefixes[number]
        with self.layer_with_weights(number) as layer, self.in_use(prefix, layer):

            @stable_bits(self.device)
            def run_chunks(chunks: Sequence[int]) -> None:
                for index in chunks:
                    hidden = self.hidden.get(f"{number}.{index}", self.device).requires_grad_(True)
                    with self._blaming_config(prefix):
                        with self._autocast():
                            output = layer(self._as_the_model(hidden), **self._arguments(number, index))
                        output = self._streams_last(output[0] if isinstance(output, tuple | list) else output)
                        output.backward(self.gradient.get(f"{number + 1}.{index}", self.device, output.dtype))
                    assert hidden.grad is not None
                    self.gradient.put(f"{number}.{index}", hidden.grad)

            yield layer, run_chunks

    @contextmanager
    def embedding_gradients(self, scale: float) -> Iterator[Callable[[int], torch.Tensor]]:
        """Context that yields a function from a chunk to the gradients (sequences, tokens, n) at its embedding rows.

        It reads "0.<chunk>" in `gradient`. scale: `embedding_scale`.
        """
        table = self.model.get_input_embeddings()

        def at_first_layer(index: int) -> torch.Tensor:
            return self.gradient.get(f"0.{index}", self.device)

        if not self._projects_rows:
            yield lambda index: torch.stack([scaled(part, scale) for part in at_first_layer(index)])
            return
        with self.without_layers(head=False) as stand_ins:

            def gradients(index: int) -> torch.Tensor:
                def run() -> None:
                    self._run_without_layers(self.chunks[index], stand_ins)

                return projected(table, stand_ins[0], run, self._as_the_model(at_first_layer(index)))

            yield gradients

    def drop(self, number: int, chunks: Sequence[int] | None = None) -> None:
        """Drop a layer's inputs and the gradients at its output, of these chunks (default: all).

        The number after the last layer drops the last layer's outputs; -1 drops the gradients at the first layer's
        inputs. The files stay until `delete_dropped`.
        """
        for index in self._chunks_or_all(chunks):
            self.hidden.drop(f"{number}.{index}")
            self.gradient.drop(f"{number + 1}.{index}")

    def delete_dropped(self) -> None:
        """Delete the files of what was dropped."""
        self.hidden.delete_dropped()
        self.gradient.delete_dropped()

    @property
    def carries_state(self) -> bool:
        """True if layers get more from earlier layers than the hidden state. It is known after `begin`.

        Such values are in memory only, so a run that is resumed runs all layers forward again.
        """
        values = (value for arguments in self._shared_arguments.values() for value in arguments.values())
        return any(self._links.values()) or any(isinstance(value, MutableMapping) for value in values)

    def side_by_side(self, number: int, besides: int = 0) -> int:
        """How many chunks run through a layer at once (`chunks_side_by_side`); 1 if layers share more than states."""
        if self.carries_state:
            return 1
        tokens = max(chunk.numel() for chunk in self.chunks)
        return chunks_side_by_side(self.map, self.prefixes[number], tokens, self.device, besides=besides)

    # --- running

    def _arguments(self, number: int, index: int) -> dict[str, Any]:
        """Keyword arguments with which the model calls layer `number` on chunk `index`."""
        prefix = self.prefixes[number]
        shared = self._shared_arguments[prefix, self.chunks[index].shape]
        linked = {
            name: self._extras[source, index][part]
            for name, (source, part) in self._links.get(number, {}).items()
        }
        return {**shared, **self._chunk_arguments[prefix, index], **linked}

    def _streams_last(self, hidden: torch.Tensor) -> torch.Tensor:
        """(sequences, tokens, ..) of a layer's hidden state, which Gemma 3n has as (streams, sequences, tokens, n)."""
        return hidden.movedim(0, 2) if self._streams_first else hidden

    def _as_the_model(self, hidden: torch.Tensor) -> torch.Tensor:
        """The inverse of `_streams_last`."""
        return hidden.movedim(2, 0) if self._streams_first else hidden

    def _autocast(self) -> AbstractContextManager[None]:
        """Matrix products in `dtype`; the residual stream stays float32."""
        return mixed_precision(self.device, self.dtype)

    def _chunks_or_all(self, chunks: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.chunks)) if chunks is None else chunks

    def _blaming_config(self, prefix: str) -> AbstractContextManager[None]:
        """Context that turns errors of a layer into an InputError about the model.

        Only for the original's weights. They run first, so a later error comes from an override.
        """
        if self.override is not None:
            return nullcontext()
        return config_faults(self.map.checkpoint.folder / "config.json", prefix.rstrip("."))

    def _require_finite(self, output: torch.Tensor, prefix: str) -> None:
        """Raise InputError for NaN or infinity in the original model. With an override, the measured KL shows them."""
        if self.override is None and count_nonfinite(output):
            raise InputError(
                "the text drives this layer's output to NaN or infinity",
                file=self.map.checkpoint.folder,
                tensor=prefix.rstrip("."),
                remedy="its weights are finite but too large, or config.json is damaged: download both again",
            )
