"""Recovery: row scales and norms tuned once everything is rounded, so that predictions come nearer to the original's.

Rounding is decided matrix by matrix; what all errors together do to the predictions can be undone in part by what is
stored anyway: a factor for every row of a linear, and for every number of a norm. They follow the gradient of
KL(original || compressed) on calibration text, with Adam (Kingma and Ba, 2015) on the factors, a few sequences a step.
The model is streamed, layer by layer, forward and backward, as for the statistics.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix, bits_of
from ciuic_cli.codecs.scales import encode_scales, finest_steps
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.passes.quantize import BLOCK
from ciuic_cli.statistics.store import TensorFolder
from ciuic_cli.statistics.streaming import Adjust, LayerStream, Override, compute_dtype
from ciuic_cli.statistics.watching import Hook, Key, Product, ProductWatcher, Watched, watched_in
from ciuic_cli.units import PLAIN_ROLES, units_of
from ciuic_cli.workers import Workers

SEQUENCES = 4
"""Sequences of a step."""
LEARNING_RATE = 1e-3
"""The most that a factor changes by in a step, about; falls to 0 with the cosine."""
WARM_UP = 5
"""Steps until the learning rate is reached."""
CHECKS = 4
"""How often KL is measured on held-out text. The factors that gave the least are kept; where it rose twice in a row,
no further step is made."""
BETAS = (0.9, 0.95)
FINE = 40
"""Steps per octave of a row scale below which a factor would be lost in its rounding: such a matrix stays as it is."""

Factors = Mapping[Key, torch.Tensor]
"""By parameter, or expert of one: what its rows (m,), or the numbers of a norm, are multiplied by; float32."""
Coded = Callable[[str, int | None], PackedMatrix | None]
"""The rounded matrix of a parameter, or of one expert; None for what is not rounded."""


def with_row_factors(packed: PackedMatrix, factors: torch.Tensor) -> PackedMatrix:
    """The matrix with each of its rows multiplied, as nearly as row scales can say it; it takes as many bytes.

    factors: (rows,) float32, positive, in the matrix's own order.
    """
    order, coded = packed.order, _coded_rows(packed)
    wish = packed.scales[: packed.rows] * (factors if order is None else factors[order]).numpy()
    steps = finest_steps(wish[coded])
    base, codes = encode_scales(np.where(coded, wish, wish[coded].min()), steps)
    return replace(packed, base=base, row_scale=codes, scale_steps=steps)


def _coded_rows(packed: PackedMatrix) -> NDArray[np.bool_]:
    """(rows,) which of the stored rows have codes; the scales of others mean nothing."""
    return np.repeat(bits_of(packed.row_bits) > 0, BLOCK)[: packed.rows]


def tuned_dense(model_map: ModelMap, name: str, factors: Factors) -> torch.Tensor:
    """A parameter that is stored as it is, in the dtype that it is stored in, with its factors if it has any."""
    value, factor = model_map.read(name), factors.get((name, None))
    return (value if factor is None else value.float() * factor).to(model_map.stored_dtype(name)).contiguous()


def finished(model_map: ModelMap, coded: Coded, factors: Factors) -> Override:
    """Weights as the artifact with these factors has them."""

    def override(name: str, expert: int | None) -> torch.Tensor | None:
        packed, factor = coded(name, expert), factors.get((name, expert))
        if packed is not None:
            return decode_dense(packed if factor is None else with_row_factors(packed, factor))
        return None if factor is None else tuned_dense(model_map, name, factors)

    return override


def tunable(model_map: ModelMap, coded: Coded) -> dict[Key, torch.Size]:
    """What has factors, and of which shape: rows of linears that the layers consist of, and norms.

    A low-rank part has scales of its own, so that a row's would not be its factor: such matrices are left alone. So are
    those with rows too unlike each other for fine scales.
    """
    inside = tuple(model_map.layer_prefixes)
    found: dict[Key, torch.Size] = {}
    for unit in units_of(model_map.parameters.values()):
        if unit.role in PLAIN_ROLES or not unit.name.startswith(inside):
            continue
        packed = coded(unit.name, unit.expert)
        if packed is None or packed.lowrank is not None or packed.is_zero:
            continue
        if finest_steps(packed.scales[: packed.rows][_coded_rows(packed)]) >= FINE:
            found[unit.name, unit.expert] = torch.Size((unit.rows,))
    for parameter in model_map.parameters.values():
        if parameter.role == "norm" and len(parameter.shape) == 1 and not parameter.buffer:
            found[parameter.name, None] = torch.Size(parameter.shape)
    return found


class RowGradients(ProductWatcher):
    """Records, for every row of the watched weights, the loss's gradient in a factor of 1 that it would have."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        super().__init__(watched)
        self.found: dict[Key, torch.Tensor] = {}

    def watch(self, product: Product) -> Hook:
        outputs, rows = product.outputs, product.rows
        if product.bias is not None:
            outputs = outputs - product.bias

        def add(gradient: torch.Tensor) -> None:
            each = (gradient.float() * outputs.float()).flatten(0, -2).sum(0).cpu()
            total = self.found.setdefault(product.key, torch.zeros(product.shape[0]))
            total[rows] += each

        return add


@dataclass(frozen=True)
class Result:
    """What was kept: factors, if any; the steps that led there; KL on held-out text without them and with them."""

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
        state: what `run` last gave to save, in an earlier process.
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
        self.map, self.workers = model_map, workers
        self.steps, self.step = len(text) // SEQUENCES, 0
        shapes = tunable(model_map, coded)
        self._factors = {key: nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()}
        self._kept: dict[Key, torch.Tensor] = {}
        self._kls: list[float] = []
        self._optimizer = torch.optim.Adam(list(self._factors.values()), LEARNING_RATE, BETAS)
        if state is not None:
            self._resume(state)
        self._mine = [n for n in range(len(text)) if n % SEQUENCES % workers.size == workers.rank]
        chunks = [text[number : number + 1] for number in self._mine]

        def stream(name: str) -> LayerStream:
            return LayerStream(model_map, chunks, folder / name, device=device, dtype=compute_dtype(device))

        self._original, self._tuned = stream("original"), stream("tuned")
        self._tuned.override, self._tuned.adjust = self._override(coded), adjust
        self._predictions = TensorFolder(folder / "predictions")

    def run(
        self,
        measure: Callable[[Factors], float],
        save: Callable[[bytes], None],
        progress: Callable[[int, int], None],
    ) -> Result:
        """All steps that are left, until held-out KL rises.

        measure: KL of the artifact with such factors on held-out text, in nats per token. save: called with all that
        the next steps depend on. progress: called with the steps done, and all.
        """
        if not self._kls:
            self._kls.append(measure({}))
        if self._goes_on():  # else an earlier process did all
            self._original.forward(lambda what, done, total: None)
            self._tuned.begin()
        while self._goes_on():
            self._advance()
            progress(self.step, self.steps)
            if self.step % -(-self.steps // CHECKS) == 0 or self.step == self.steps:
                factors = {key: factor.detach().clone() for key, factor in self._factors.items()}
                kl = measure(factors)
                if kl < min(self._kls):
                    self._kept = factors
                self._kls.append(kl)
                save(self._state())
        return Result(self._kept, self.step, self._kls[0], min(self._kls))

    def _goes_on(self) -> bool:
        rising = len(self._kls) > 2 and self._kls[-3] < self._kls[-2] < self._kls[-1]
        return self.step < self.steps and not rising

    def _state(self) -> bytes:
        kept = [self._kept.get(key) for key in self._factors]
        own = {
            "step": self.step, "factors": list(self._factors.values()), "adam": self._optimizer.state_dict(),
            "kept": kept, "kls": self._kls,
        }  # fmt: skip
        buffer = io.BytesIO()
        torch.save(own, buffer)
        return buffer.getvalue()

    def _resume(self, state: bytes) -> None:
        found = torch.load(io.BytesIO(state), weights_only=True)
        self.step, self._kls = found["step"], found["kls"]
        for key, value, kept in zip(self._factors, found["factors"], found["kept"], strict=True):
            self._factors[key].data.copy_(value)
            if kept is not None:
                self._kept[key] = kept
        self._optimizer.load_state_dict(found["adam"])

    def _advance(self) -> None:
        """One step."""
        begin = self.step * SEQUENCES
        mine = [place for place, number in enumerate(self._mine) if begin <= number < begin + SEQUENCES]
        self._optimizer.zero_grad()
        self._sweep(mine)
        self._optimizer.param_groups[0]["lr"] = learning_rate(self.step, self.steps)
        self._optimizer.step()
        self.step += 1

    def _sweep(self, mine: Sequence[int]) -> None:
        """The gradients of this step, by all workers: forward, predictions, backward."""
        layers = range(len(self._tuned.prefixes))
        for number in layers:
            self._tuned.forward_layer(number, mine)
        self._predict(mine)
        for number in reversed(layers):
            self._backward(number, mine)
            self._tuned.release(number + 1, mine)
            self._tuned.sweep()
        self._tuned.release(0, mine)
        self._tuned.sweep()

    def _predict(self, mine: Sequence[int]) -> None:
        """The original's predictions, and with them the gradient of KL at the last layer's output."""
        last = len(self._tuned.prefixes)
        tokens = self._tuned.chunks[0].numel() * SEQUENCES
        rows = iter(mine)

        def note(hidden: torch.Tensor, logits: torch.Tensor) -> None:
            self._predictions.put(str(next(rows)), logits[0].float().softmax(-1))

        def compare(hidden: torch.Tensor, logits: torch.Tensor) -> None:
            p = self._predictions.get(str(next(rows)), logits.device)
            logits.backward((kl_gradient(logits.detach()[0].float(), p) / tokens)[None].to(logits.dtype))

        with torch.no_grad(), self._original.tail(note) as carry:
            carry(mine)
        self._original.release(last, mine)
        self._original.sweep()
        rows, found = iter(mine), []
        with self._tuned.tail(compare) as carry:
            norms = self._norms(self._tuned.model, "")
            for place in mine:
                carry([place])
                found.append(_taken(norms))
                self._predictions.drop(str(place))
        self._predictions.sweep()
        self._add(found)

    def _backward(self, number: int, mine: Sequence[int]) -> None:
        prefix, found = self._tuned.prefixes[number], []
        with self._tuned.backward_layer(number) as (layer, carry):
            watched = watched_in(layer, prefix, self.map.parameters)
            norms = self._norms(layer, prefix)
            for place in mine:
                with RowGradients(watched) as rows:
                    carry([place])
                found.append({**rows.found, **_taken(norms)})
        self._add(found)

    def _norms(self, module: nn.Module, prefix: str) -> dict[Key, torch.Tensor]:
        """The norms of a module that are tuned; from here on they require gradients."""
        found = {(prefix + name, None): parameter for name, parameter in module.named_parameters()}
        return {
            key: norm.requires_grad_(True)
            for key, norm in found.items()
            if key in self._factors and norm.dim() == 1
        }

    def _add(self, mine: list[dict[Key, torch.Tensor]]) -> None:
        """Gradients of values times factors, one entry a sequence of this worker: those of all are added in order."""
        everyone = self.workers.gather(mine)
        for place in range(SEQUENCES):
            theirs = everyone[place % self.workers.size]
            for key, gradient in theirs[place // self.workers.size].items():
                factor = self._factors.get(key)
                if factor is None:
                    continue
                gradient = gradient / factor.detach()
                factor.grad = gradient if factor.grad is None else factor.grad + gradient

    def _override(self, coded: Coded) -> Override:
        def override(name: str, expert: int | None) -> torch.Tensor | None:
            packed, factor = coded(name, expert), self._factors.get((name, expert))
            if packed is None:
                return None if factor is None else self.map.read(name).float() * factor.detach()
            weight = decode_dense(packed)
            return weight if factor is None else weight * factor.detach()[:, None]

        return override


def kl_gradient(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Of every token's KL(p || softmax(logits)) in the logits, all (t, vocabulary)."""
    return logits.softmax(-1) - p


def learning_rate(step: int, steps: int) -> float:
    """Of a step of so many, the first being 0: rising at first, then falling to 0 with the cosine."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def _taken(norms: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """value * gradient of norms that have one; they have none from then on."""
    found = {}
    for key, norm in norms.items():
        if norm.grad is not None:
            found[key] = (norm.detach() * norm.grad).float().cpu()
            norm.grad = None
    return found
