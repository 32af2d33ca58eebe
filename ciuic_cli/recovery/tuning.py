"""Recovery: row scales and norms are tuned after rounding, which brings predictions nearer to the original's.

Rounding is decided matrix by matrix. Tuning numbers that are stored anyway undoes part of what all rounding errors do
together: a factor for every row of a linear, and for every number of a norm. The factors follow the gradient of
KL(original || compressed) on calibration text by Adam (Kingma and Ba, 2015), a few sequences a step. A few tokens carry
most of that KL, and other text has other such tokens, so each token is weighted by the root of its KL (measured:
docs/experiments/recovery/factors-and-norms.md). The model runs layer by layer, forward and backward, as for the
statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.layer_stream import Adjust, LayerStream, Place, Progress, compute_dtype
from ciuic_cli.layerwise.linear_hooks import Hook, Key, LinearHook, Product, WatchedLinear, linears_of
from ciuic_cli.process.workers import Workers
from ciuic_cli.recovery.row_factors import Coded, Factors, tunable

SEQUENCES = 4
"""Sequences of a step."""
LEARNING_RATE = 1e-3
"""The share of itself that a factor changes by in a step, about, at most; falls to 0 with the cosine."""
USUAL_KL = 0.037
"""Nats per token below which steps are smaller: what their noise costs grows with their square, and there is less to
gain. Measured: docs/experiments/recovery/step-size.md."""
WARM_UP = 5
"""Steps until the learning rate is reached."""
CHECKS = 4
"""How often KL is measured on held-out text. The factors that gave the least are kept; where it rose twice in a row,
no further step is made."""
BETAS = (0.9, 0.95)
FLOOR = 1e-3
"""Nats per token, below which a token's KL makes it count no more."""


class RowGradients(LinearHook):
    """Records, for every row of the watched weights, the loss's gradient in a factor of 1 that it would have."""

    def __init__(self, watched: Sequence[WatchedLinear]) -> None:
        super().__init__(watched)
        self.found: dict[Key, torch.Tensor] = {}

    def watch(self, product: Product) -> Hook:
        outputs, rows = product.outputs, product.rows
        if product.has_bias:  # again: the bias may be so much larger that nothing else is left in bfloat16
            outputs = torch.nn.functional.linear(product.x, product.weight)

        def add(gradient: torch.Tensor) -> None:
            each = (gradient.float() * outputs.float()).flatten(0, -2).sum(0).cpu()
            total = self.found.setdefault(product.key, torch.zeros(product.shape[0]))
            total[rows] += each

        return add


@dataclass(frozen=True)
class Result:
    """What was kept: factors, if any; steps made; KL on held-out text, in nats per token, without and with them."""

    factors: dict[Key, torch.Tensor]
    steps: int
    kl_before: float
    kl_after: float


class Recovery:
    """Tunes the factors of a rounded model, step by step; several workers share the sequences of each step.

    Args:
        coded: the model as it was rounded.
        adjust: what else its layers have in the artifact.
        text: LongTensor (steps * SEQUENCES, length), of which each step takes the next sequences.
        folder: this worker's own, for activations.
        state: what `run` last gave to keep, in an earlier process.
    """

    def __init__(
        self,
        model_map: ModelMap,
        coded: Coded,
        adjust: Adjust,
        text: torch.Tensor,
        folder: Path,
        *,
        device: torch.device,
        workers: Workers,
        state: bytes | None = None,
    ) -> None:
        self.map, self.coded, self.workers = model_map, coded, workers
        shapes = tunable(model_map, coded)
        self._factors = {key: nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()}
        self._optimizer = torch.optim.Adam([{"params": [*self._factors.values()]}], LEARNING_RATE, BETAS)
        self._kept: dict[Key, torch.Tensor] = {}
        self._kls: list[float] = []
        self._steps, self._step = len(text) // SEQUENCES if shapes else 0, 0
        if state is not None:
            self._resume(state)
        self._tokens = SEQUENCES * text.shape[1]
        self._mine = [
            number
            for number in range(self._step * SEQUENCES, len(text))
            if number % SEQUENCES % workers.size == workers.rank
        ]
        chunks = [text[number : number + 1] for number in self._mine]

        def stream(name: str) -> LayerStream:
            return LayerStream(model_map, chunks, folder / name, device=device, dtype=compute_dtype(device))

        self._original, self._tuned = stream("original"), stream("tuned")
        self._tuned.override, self._tuned.adjust = self._override, adjust
        self._predictions = ActivationStore(folder / "predictions")

    def run(
        self,
        measure: Callable[[Factors], float],
        keep: Callable[[Callable[[], bytes]], None],
        progress: Progress,
    ) -> Result:
        """All steps that are left, until held-out KL rises.

        measure: KL of the artifact with such factors on held-out text, in nats per token. keep: called with what makes
        all that the next steps depend on.
        """
        if not self._kls:
            self._kls.append(measure({}))
        if self._goes_on() and self._mine:  # else an earlier process did all, or other workers do
            self._original.forward(lambda what, done, total: progress("recovery, the original", done, total))
            self._tuned.begin()
        while self._goes_on() and self._advance():
            progress("recovery", self._step, self._steps)
            if self._step % -(-self._steps // CHECKS) == 0 or self._step == self._steps:
                values = {key: factor.detach() for key, factor in self._factors.items()}
                moved = {key: value.clone() for key, value in values.items() if bool((value != 1).any())}
                kl = measure(moved)
                if kl < min(self._kls):
                    self._kept = moved
                self._kls.append(kl)
                keep(self._state)
        return Result(self._kept, self._step, self._kls[0], min(self._kls))

    def _goes_on(self) -> bool:
        rising = len(self._kls) > 2 and self._kls[-3] < self._kls[-2] < self._kls[-1]
        return self._step < self._steps and not rising

    def _state(self) -> bytes:
        """As a safetensors file; tensors of a factor are named after what they are and its number."""
        own = {"step": torch.tensor(self._step), "kls": torch.tensor(self._kls, dtype=torch.float64)}
        for number, (key, factor) in enumerate(self._factors.items()):
            tensors = {"factor": factor.detach(), **self._optimizer.state[factor]}
            if key in self._kept:
                tensors["kept"] = self._kept[key]
            own |= {f"{what}/{number}": tensor for what, tensor in tensors.items()}
        return save(own)

    def _resume(self, state: bytes) -> None:
        found = load(state)
        self._step, self._kls = int(found.pop("step")), found.pop("kls").tolist()
        factors = [*self._factors.items()]
        for name, tensor in found.items():
            what, _, number = name.partition("/")
            key, factor = factors[int(number)]
            if what == "factor":
                factor.data.copy_(tensor)
            elif what == "kept":
                self._kept[key] = tensor
            else:
                self._optimizer.state[factor][what] = tensor

    def _advance(self) -> bool:
        """One step; False without one where a gradient is NaN or infinite."""
        begin = self._step * SEQUENCES
        mine = [place for place, number in enumerate(self._mine) if begin <= number < begin + SEQUENCES]
        self._optimizer.zero_grad()
        self._sweep(mine)
        gradients = [factor.grad for factor in self._factors.values() if factor.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return False
        self._optimizer.param_groups[0]["lr"] = learning_rate(self._step, self._steps, self._kls[0])
        self._optimizer.step()
        self._step += 1
        return True

    def _sweep(self, mine: Sequence[int]) -> None:
        """The gradients of this step, by all workers: forward, predictions, backward."""
        last = len(self._tuned.prefixes)
        for number in range(last if mine else 0):
            self._tuned.forward_layer(number, mine)
        self._add(self._predict(mine) if mine else [])
        self._original.release(last, mine)
        self._original.sweep()
        for number in reversed(range(last)):
            self._add(self._backward(number, mine) if mine else [])
            self._tuned.release(number + 1, mine)
            self._tuned.sweep()
        for number in (0, -1):  # the inputs of the first layer, and the gradients there
            self._tuned.release(number, mine)
        self._tuned.sweep()

    def _predict(self, mine: Sequence[int]) -> list[dict[Key, torch.Tensor]]:
        """The gradients at the last layer's output, from the original's predictions; those of norms behind it."""

        def note(place: Place, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            self._predictions.put(place.name, logits[0].float().softmax(-1))

        def compare(place: Place, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            p = self._predictions.get(place.name, logits.device)
            gradient = root_gradient(logits.detach()[0].float(), p) / self._tokens
            logits.backward(gradient[None].to(logits.dtype))

        with torch.no_grad(), self._original.tail(note) as carry:
            carry(mine)
        found = []
        with self._tuned.tail(compare) as carry:
            norms = self._norms(self._tuned.model, "")
            for place in mine:
                carry([place])
                found.append(_taken(norms))
            self._predictions.clear()
        return found

    def _backward(self, number: int, mine: Sequence[int]) -> list[dict[Key, torch.Tensor]]:
        """The gradients at a layer's input; those of its rows and norms."""
        prefix, found = self._tuned.prefixes[number], []
        with self._tuned.backward_layer(number) as (layer, carry):
            watched = linears_of(layer, prefix, self.map.parameters)
            norms = self._norms(layer, prefix)
            for place in mine:
                with RowGradients(watched) as rows:
                    carry([place])
                of_rows = {key: value for key, value in rows.found.items() if key in self._factors}
                found.append({**of_rows, **_taken(norms)})
        return found

    def _norms(self, module: nn.Module, prefix: str) -> dict[Key, torch.Tensor]:
        """The norms of a module that are tuned; from here on they require gradients.

        No LayerNorm: torch adds up the gradients of its weights by thread, and bits must not depend on their number.
        """
        found: dict[Key, torch.Tensor] = {}
        for name, owner in module.named_modules():
            if isinstance(owner, nn.LayerNorm):
                continue
            for short, parameter in owner.named_parameters(name, recurse=False):
                if (prefix + short, None) in self._factors and parameter.dim() == 1:
                    found[prefix + short, None] = parameter.requires_grad_(True)
        return found

    def _add(self, mine: list[dict[Key, torch.Tensor]]) -> None:
        """Gradients of values times factors, one entry a sequence of this worker: those of all are added in order."""
        everyone = self.workers.gather(mine)
        for place in range(SEQUENCES):
            theirs = everyone[place % self.workers.size]
            for key, gradient in theirs[place // self.workers.size].items():
                factor = self._factors[key]
                gradient = gradient / factor.detach()
                factor.grad = gradient if factor.grad is None else factor.grad + gradient

    def _override(self, name: str, expert: int | None) -> torch.Tensor | None:
        """Weights with the factors as they are now, which need not be those that can be stored."""
        packed, factor = self.coded(name, expert), self._factors.get((name, expert))
        if packed is None:
            return None if factor is None else self.map.read(name).float() * factor.detach()
        weight = decode_dense(packed)
        return weight if factor is None else weight * factor.detach()[:, None]


def root_gradient(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Gradient in the logits of 2 (KL + FLOOR)^½ of every token, KL = KL(p || softmax(logits)); all (t, vocabulary)."""
    log_q = logits.log_softmax(-1)
    kl = (p * (p.clamp_min(1e-30).log() - log_q)).sum(-1, keepdim=True)
    return (log_q.exp() - p) * (kl.clamp_min(0.0) + FLOOR).rsqrt()


def learning_rate(step: int, steps: int, kl: float) -> float:
    """Of a step of so many, the first being 0: rising at first, then falling to 0 with the cosine.

    kl: of the artifact as it was rounded, on held-out text, in nats per token.
    """
    most = LEARNING_RATE * min(1.0, math.sqrt(max(kl, 0.0) / USUAL_KL))
    return most * min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def _taken(norms: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """value * gradient of norms that have one; they have none from then on."""
    found = {}
    for key, norm in norms.items():
        if norm.grad is not None:
            found[key] = (norm.detach() * norm.grad).float().cpu()
            norm.grad = None
    return found
