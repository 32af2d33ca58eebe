"""Run a causal language model one decoder layer at a time, forward and then backward.

Only one layer's weights are in memory. The model's own forward supplies what surrounds the layers (masks,
rotary embeddings, scaling, the head): its layers are replaced by stand-ins that note what they are called
with, so no family needs code of its own here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ciuic_cli.checkpoint.architecture import config_faults
from ciuic_cli.checkpoint.formats import count_nonfinite
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import InputError
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.expert_offload import ExpertsOnUse
from ciuic_cli.process.memory import (
    PARALLEL_WORK_BYTES,
    limit_freed_memory,
    matrix_bytes,
    return_freed_memory,
)
from ciuic_cli.process.threads import one_thread, parallel_map

Progress = Callable[[str, int, int], None]
"""Called with (what, steps done, steps in all)."""
Override = Callable[[str, int | None], torch.Tensor | None]
"""Other values for a parameter by its name, or for one expert (out, in) of a stack; None leaves it as it is. Called
from several threads."""
Adjust = Callable[[str, nn.Module], AbstractContextManager[None]]
"""Called with a decoder layer's prefix and the layer, filled; active while the layer runs."""
Carry = Callable[[Sequence[int]], None]
"""Runs the chunks of these numbers."""
LOGIT_BYTES = 1 << 27
"""Of float32 logits that exist at a time: longer sequences go through the head in parts."""


class Place(NamedTuple):
    """Which tokens a part of the predictions is of: chunk, sequence in it, and the first of its tokens."""

    chunk: int
    sequence: int
    begin: int

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.chunk}.{self.sequence}.{self.begin}"


Visit = Callable[[Place, torch.Tensor, torch.Tensor], None]
"""Called with hidden (1, tokens, n), which requires a gradient, and logits (1, tokens, vocabulary), which depend on
it."""
Predict = Callable[[int], Iterator[tuple[Place, torch.Tensor, torch.Tensor]]]
"""Gives every part of a chunk in turn, as `Visit` gets them; hidden requires a gradient where gradients are enabled."""


def logit_tokens(vocabulary: int) -> int:
    """Tokens whose logits exist at a time."""
    return max(1, LOGIT_BYTES // (4 * vocabulary))


class _StandIn(nn.Module):
    """In a decoder layer's place: notes the arguments, passes the hidden state on (or puts in another)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: its weights stay where they are
        self.hidden: torch.Tensor | None = None
        self.kwargs: dict[str, Any] = {}
        self.replacement: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            raise TypeError("decoder layers are expected to take keyword arguments besides the hidden state")
        self.hidden, self.kwargs = hidden, kwargs
        return hidden if self.replacement is None else self.replacement


@one_thread()
def _scale(hidden: torch.Tensor, rows: torch.Tensor) -> float:
    """What a model multiplies rows (b, t, n) of its embedding by before the first layer sees them, as hidden states."""
    rows = rows.unsqueeze(-2) if hidden.dim() > rows.dim() else rows  # DeepSeek-V4: several residual streams
    rows = rows.expand_as(hidden)
    return float((hidden * rows).sum() / rows.square().sum().clamp_min(1e-30))


def _differs(value: Any, other: Any) -> bool:
    """Whether a tensor is not the other: what layers get besides the hidden state can be of the tokens (V4)."""
    return isinstance(value, torch.Tensor) and value is not other and not torch.equal(value, other)


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it faster than float32 (twice on recent CPUs), else float32."""
    if device.type == "cuda":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
    return torch.bfloat16 if fast else torch.float32


class LayerStream:
    """The layers of one model, run one by one over all calibration sequences.

    Args:
        model_map: where each parameter's weights come from.
        chunks: LongTensors (sequences, length), one for each forward call.
        folder: for activations between the layers.
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
        self.map = model_map
        self.device = device
        self.dtype = dtype
        self.override: Override | None = None
        self.adjust: Adjust | None = None
        self.model = (
            model_map.skeleton(dtype=torch.float32, experts_implementation="eager")
            .eval()
            .requires_grad_(False)
        )
        self.chunks = list(chunks)
        self.folder = folder
        self.hidden = ActivationStore(folder / "hidden")
        self.gradient = ActivationStore(folder / "gradient")
        self.prefixes = list(model_map.layer_prefixes)
        head = self.model.get_output_embeddings()
        self._head = next(name for name, module in self.model.named_modules() if module is head)
        self.embedding_scale = 1.0
        self._arguments: dict[tuple[str, torch.Size], dict[str, Any]] = {}
        self._own: dict[tuple[str, int], dict[str, Any]] = {}

    def layer(self, prefix: str) -> nn.Module:
        return self.model.get_submodule(prefix.rstrip("."))

    @contextmanager
    def weights(self, prefix: str) -> Iterator[nn.Module]:
        """One decoder layer with its weights, for the time of the block."""
        module = self.layer(prefix)
        self._fill(module, prefix)
        try:
            adjusted = self.adjust(prefix, module) if self.adjust is not None else nullcontext()
            with adjusted, ExpertsOnUse(module):
                yield module
        finally:
            self.map.release(module)
            return_freed_memory()

    @contextmanager
    def surroundings(self) -> Iterator[list[_StandIn]]:
        """Everything but the decoder layers with its weights; the layers are stand-ins."""
        stand_ins, layers = [], []
        for prefix in self.prefixes:
            layers.append(self.layer(prefix))
            stand_ins.append(_StandIn(layers[-1]))
            self.model.set_submodule(prefix.rstrip("."), stand_ins[-1])
        try:
            self._fill(self.model, "")
            yield stand_ins
        finally:
            self.map.release(self.model)
            for prefix, layer in zip(self.prefixes, layers, strict=True):
                self.model.set_submodule(prefix.rstrip("."), layer)

    def _fill(self, module: nn.Module, prefix: str) -> None:
        # Experts are only multiplied with: where products are in bfloat16, a bfloat16 stack gives the same bits. Where
        # they are not, the stack has the model's own dtype, which rounds what replaces it and what was in FP8 or FP4.
        stacks = self.map.dtype if self.dtype == torch.float32 else self.dtype
        self.map.materialise(
            module, prefix, torch.float32, self.device, stack_dtype=stacks, stack_device="cpu"
        )
        module.requires_grad_(False)
        if self.override is not None:
            self._replace(module, prefix, self.override)

    @staticmethod
    def _replace(module: nn.Module, prefix: str, override: Override) -> None:
        """Give the module's parameters, experts one by one, what `override` has for them."""
        places: dict[tuple[str, int | None], torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            experts = enumerate(parameter) if parameter.dim() == 3 else [(None, parameter)]
            places |= {(prefix + name, expert): part for expert, part in experts}

        def alone(key: tuple[str, int | None]) -> bool:
            shape = places[key].shape
            return len(shape) == 2 and matrix_bytes(*shape, full_outputs=True) > PARALLEL_WORK_BYTES

        keys = sorted(places, key=alone)
        for key, value in parallel_map(keys, lambda key: override(*key), alone):
            if value is not None:
                places[key].copy_(value)
            limit_freed_memory()

    def precision(self) -> torch.autocast:
        """Matrix products in `dtype`, the residual stream in float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def arguments(self, prefix: str, index: int) -> dict[str, Any]:
        """Keyword arguments with which the model calls the layer `prefix` on chunk `index`."""
        return {**self._arguments[prefix, self.chunks[index].shape], **self._own[prefix, index]}

    def begin(self) -> None:
        """Embed every chunk: the first layer's inputs, unless they are there still, and every layer's arguments.

        The head is left out: with a vocabulary of 262,144, one token's logits take longer than all else here.
        """
        with self.surroundings() as stand_ins, torch.no_grad(), self.precision():
            for index, tokens in enumerate(self.chunks):
                self.model.base_model(input_ids=tokens.to(self.device), use_cache=False)
                assert stand_ins[0].hidden is not None
                if index == 0:
                    rows = self.model.get_input_embeddings().weight[tokens.to(self.device)]
                    self.embedding_scale = _scale(stand_ins[0].hidden, rows)
                if f"0.{index}" not in self.hidden.contents():
                    self.hidden.put(f"0.{index}", stand_ins[0].hidden)
                for prefix, stand_in in zip(self.prefixes, stand_ins, strict=True):
                    shared = self._arguments.setdefault((prefix, tokens.shape), stand_in.kwargs)
                    self._own[prefix, index] = {
                        name: value
                        for name, value in stand_in.kwargs.items()
                        if _differs(value, shared[name])
                    }

    def forward(self, progress: Progress) -> None:
        """All layers forward; what goes into the head stays in `hidden`."""
        self.begin()
        for number in range(len(self.prefixes)):
            self.forward_layer(number)
            self.release(number)
            self.sweep()
            progress("forward", number + 1, len(self.prefixes))

    def forward_layer(self, number: int, chunks: Sequence[int] | None = None) -> None:
        """One layer forward, for these chunks or all: "<number>.<chunk>" in `hidden` to "<number + 1>.<chunk>"."""
        prefix = self.prefixes[number]
        with self.weights(prefix) as layer, torch.no_grad(), self.precision():
            for index in self._all_unless(chunks):
                hidden = self.hidden.get(f"{number}.{index}", self.device)
                with self._as_configured(prefix):
                    output = layer(hidden, **self.arguments(prefix, index))
                output = output[0] if isinstance(output, tuple) else output
                self._require_finite(output, prefix)
                self.hidden.put(f"{number + 1}.{index}", output)

    def release(self, number: int, chunks: Sequence[int] | None = None) -> None:
        """Forget the inputs of a layer, and the gradients at its output, of these chunks or all; what follows the last
        layer is one too."""
        for index in self._all_unless(chunks):
            self.hidden.drop(f"{number}.{index}")
            self.gradient.drop(f"{number + 1}.{index}")

    def _all_unless(self, chunks: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.chunks)) if chunks is None else chunks

    def sweep(self) -> None:
        """Remove the files of what was released."""
        self.hidden.sweep()
        self.gradient.sweep()

    def _as_configured(self, prefix: str) -> AbstractContextManager[None]:
        """Only the original's weights can be at odds with config.json; changed ones have run as those before."""
        if self.override is not None:
            return nullcontext()
        return config_faults(self.map.checkpoint.folder / "config.json", prefix.rstrip("."))

    def _require_finite(self, output: torch.Tensor, prefix: str) -> None:
        """The original's activations; what changed weights lead to is for the measurement to show."""
        if self.override is None and count_nonfinite(output):
            raise InputError(
                "the text drives this layer's output to NaN or infinity",
                file=self.map.checkpoint.folder,
                tensor=prefix.rstrip("."),
                remedy="its weights are finite but too large, or config.json is damaged: download both again",
            )

    @contextmanager
    def predicting(self) -> Iterator[Predict]:
        """For running what follows the last layer, on one chunk after the other."""
        last, head = len(self.prefixes), self.model.get_output_embeddings()
        size = logit_tokens(head.weight.shape[0])
        with self.surroundings() as stand_ins:
            # As `precision` would round it, but once: for every part of a sequence that takes longer than the product.
            head.weight = nn.Parameter(head.weight.to(self.dtype), requires_grad=False)

            def predict(index: int) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor]]:
                hidden = self.hidden.get(f"{last}.{index}", self.device)
                for row, begin in product(range(len(hidden)), range(0, hidden.shape[1], size)):
                    some = slice(row, row + 1), slice(begin, begin + size)
                    part = hidden[some].requires_grad_(torch.is_grad_enabled())
                    stand_ins[-1].replacement = part
                    with self.precision():
                        tokens = self.chunks[index][some].to(self.device)
                        logits = self.model(input_ids=tokens, use_cache=False).logits
                    self._require_finite(logits, self._head)
                    yield Place(index, row, begin), part, logits
                    del part, logits  # before the next ones

            yield predict

    @contextmanager
    def tail(self, visit: Visit) -> Iterator[Carry]:
        """For running what follows the last layer: `visit` sees every sequence of every chunk, part by part.

        The gradient that it leaves in hidden.grad becomes the last layer's output gradient.
        """
        last = len(self.prefixes)
        with self.predicting() as predict:

            def carry(chunks: Sequence[int]) -> None:
                for index in chunks:
                    gradients = []
                    for place, hidden, logits in predict(index):
                        visit(place, hidden, logits)
                        gradients.append(hidden.grad)
                        del hidden, logits  # before the next ones
                    found = [gradient for gradient in gradients if gradient is not None]
                    if found:
                        shape = (*self.chunks[index].shape, *found[0].shape[2:])
                        self.gradient.put(f"{last}.{index}", torch.cat(found, 1).reshape(shape))

            yield carry

    @contextmanager
    def backward_layer(self, number: int) -> Iterator[tuple[nn.Module, Carry]]:
        """One layer for running it backward: it is recomputed from its input, and the gradient carried down.

        The gradients "<number + 1>.<chunk>" in `gradient` become "<number>.<chunk>".
        """
        prefix = self.prefixes[number]
        with self.weights(prefix) as layer:

            def carry(chunks: Sequence[int]) -> None:
                for index in chunks:
                    hidden = self.hidden.get(f"{number}.{index}", self.device).requires_grad_(True)
                    with self.precision():
                        output = layer(hidden, **self.arguments(prefix, index))
                    output = output[0] if isinstance(output, tuple) else output
                    output.backward(self.gradient.get(f"{number + 1}.{index}", self.device, output.dtype))
                    assert hidden.grad is not None
                    self.gradient.put(f"{number}.{index}", hidden.grad)

            yield layer, carry
