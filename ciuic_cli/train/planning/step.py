"""Runs a training step on fake tensors and returns its peak of memory: the model's own code decides what is kept.

Nothing is allocated: fake tensors have shapes and no memory. Weights are those of a model on the meta device, in
compressed modules or dense ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory.activations import ActivationStore
from ciuic_cli.train.memory.weights import LayerwiseOptimizer
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.allocations import LiveBytes, Peak
from ciuic_cli.train.planning.elsewhere import Elsewhere
from ciuic_cli.train.planning.fake_model import make_fake
from ciuic_cli.train.planning.layers import Depths
from ciuic_cli.train.planning.product_memory import MatrixKind
from ciuic_cli.train.planning.refusals import plannable
from ciuic_cli.train.planning.states import (
    PlannedOptimizer,
    keeps_embeddings_in_floats,
    state_bytes,
    update_bytes,
)
from ciuic_cli.train.sharding.shards import local_part, shard
from ciuic_cli.train.sharding.wire import Traffic


@dataclass(frozen=True)
class Batch:
    """rows: of a forward pass. tokens: of its longest row. masked: rows hold several examples, or padding."""

    rows: int
    tokens: int
    masked: bool = True


@dataclass(frozen=True)
class Sharding:
    """processes: that share the model. comm: what crosses the wire, one of `sharding.shards.COMM`."""

    processes: int
    comm: str = "fp32"


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a step of one process.

    Attributes:
        forward: the peak of the forward pass and the loss, beyond weights and states, gradients included.
        backward: the same of every layer's backward pass, the first layer first.
        kept: bytes for the backward pass when the loss is known.
        gradients: all of them together. update: temporaries of the optimizer's step.
        states: of the optimizer.
        weights: of the model on the device between steps, as this process holds them.
        residuals: rounding errors of 8-bit weights. moved: activations that were moved, at most.
        wire_errors: rounding errors of the wire that wait for the next step.
        sent: bytes that this process sends to others.
    """

    forward: Peak
    backward: tuple[Peak, ...]
    kept: int
    gradients: int
    update: int
    states: int
    weights: int
    residuals: int = 0
    moved: int = 0
    wire_errors: int = 0
    sent: int = 0

    @property
    def peak(self) -> Peak:
        """The highest of all peaks."""
        return max((self.forward, *self.backward), key=lambda peak: peak.nbytes)

    def extrapolated(self, more: StepBytes, depths: Depths) -> StepBytes:
        """The step of a model with more layers of the same kinds: every number is linear in their number.

        Peaks are those of layers counted from the first one, and of the last ones counted from the end. In a layer
        between them, activations and gradients are a mean of the two. The last layer of the short model counts only
        from the end, for it has no neighbour that FSDP2 gathers ahead.

        Args:
            more: the step with one more period of layers.
        """
        last = max(2, depths.period)
        return StepBytes(
            forward=_beyond(self.forward, more.forward, depths),
            backward=tuple(
                _beyond(one, other, depths)
                for one, other in (
                    *zip(self.backward[:-1], more.backward[: len(self.backward) - 1], strict=True),
                    *zip(self.backward[-last:], more.backward[-last:], strict=True),
                )
            ),
            **{
                name: depths.beyond(getattr(self, name), getattr(more, name))
                for name in (
                    *("kept", "gradients", "states", "weights", "residuals", "moved", "wire_errors"),
                    *("update", "sent"),
                )
            },
        )


def _beyond(few: Peak, more: Peak, depths: Depths) -> Peak:
    nbytes = depths.beyond(few.nbytes, more.nbytes)
    return Peak(nbytes, min(nbytes, depths.beyond(few.gradients, more.gradients)))


def step_bytes(
    model: Any,
    kinds: Mapping[str, Sequence[MatrixKind]],
    options: TrainOptions,
    batch: Batch,
    *,
    experts: int,
    sharding: Sharding | None = None,
) -> StepBytes:
    """Peak memory of one forward and backward pass, beyond weights and optimizer states.

    Args:
        model: a causal language model of transformers, or a PeftModel of one, on the meta device and in training mode,
            with activation checkpointing as in the run. Its parameters are replaced by fake ones.
        kinds: parameter name -> the matrices in its blob.
        options: which decide about activations, weights and accumulated gradients.
        batch: all of its tokens are taken to be learned.
        experts: of a layer with routed experts, among which tokens are taken to be shared evenly; 1 without any.
        sharding: None for one process. Torch's process group must not be initialised.

    Raises:
        InputError: the model's code needs values of tensors, which fake tensors do not have, or reads a compressed
            weight as a dense one.
    """
    with _fake_mesh(sharding) as mesh, FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with plannable(model):
            return _FakeRun(model, kinds, options, batch, experts, sharding, mesh).step()


class _FakeRun:
    """A run on fake tensors, up to the step that is counted."""

    def __init__(
        self,
        model: Any,
        kinds: Mapping[str, Sequence[MatrixKind]],
        options: TrainOptions,
        batch: Batch,
        experts: int,
        sharding: Sharding | None,
        mesh: DeviceMesh | None,
    ) -> None:
        self._model, self._batch, self._sharding = model, batch, sharding
        fake = make_fake(model, kinds)
        self._counter = LiveBytes(fake.call_bytes, experts)
        tensors = [*model.parameters(), *model.buffers()]
        self._optimizer: LayerwiseOptimizer | None = None
        self._traffic = Traffic()
        if sharding is not None and mesh is not None:
            self._traffic = shard(model, mesh, sharding.comm)
            fake.follow(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optim, self._sizes = options.optim, [local_part(parameter).numel() for parameter in trained]
        uses_trainer = sharding is None and options.weights is None
        floats = _embeddings(model) if uses_trainer and keeps_embeddings_in_floats(options.optim) else set()
        self._states = state_bytes(
            options.optim,
            (local_part(one).numel() for one in trained if one not in floats),
            (one.numel() for one in trained if one in floats),
        )
        self._gradients = sum(local_part(parameter).nbytes for parameter in trained)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._count_gradient(1))
        self._counter.exclude(tensors if sharding is None else map(local_part, model.parameters()))
        if options.weights is not None:
            make = partial(PlannedOptimizer, optim=options.optim)
            with self._counter:
                self._optimizer = LayerwiseOptimizer(model, make, options.learning_rate)
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._count_gradient(-1))
        self._passes = options.gradient_accumulation_steps
        self._accumulates = self._passes > 1
        self._accumulated = 0
        if self._accumulates and sharding is None:
            with self._counter:
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
            self._accumulated = self._counter.gradients = self._gradients
        self._weights = sum(
            local_part(one).nbytes
            for one in {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
        )
        self._elsewhere = Elsewhere() if options.activations == "int8-offload" else None
        self._store = ActivationStore(model, offload=self._elsewhere) if options.activations else None
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._layers = len(layers)
        for number, layer in enumerate(layers):
            layer.register_forward_hook(self._mark(number))

    def _count_gradient(self, sign: int) -> Callable[[torch.Tensor], None]:
        def count(parameter: torch.Tensor) -> None:
            if not self._accumulates:
                self._counter.gradients += sign * local_part(parameter).nbytes

        return count

    def _mark(self, number: int) -> Callable[..., None]:
        """A forward hook that notes when the layer's backward pass begins."""

        def begins(_: torch.Tensor) -> None:
            self._counter.begin(number)

        def forward(module: nn.Module, arguments: Any, outputs: Any) -> None:
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
            if hidden.requires_grad:
                hidden.register_hook(begins)

        return forward

    def step(self) -> StepBytes:
        """The bytes of a step; of the second one, if rounding errors of the wire are kept from the first."""
        counter, optimizer = self._counter, self._optimizer
        base = counter.live - self._accumulated
        sent = 0
        with counter:
            if self._sharding is not None and self._sharding.comm == "int8":
                self._pass()
                for parameter in self._model.parameters():
                    parameter.grad = None
                counter.gradients = 0
                base = counter.live
            if self._sharding is not None and self._accumulates:
                # Until the last pass, every process has whole gradients of its own.
                self._model.set_requires_gradient_sync(False)
                self._traffic.forget()
                self._pass()
                sent = (self._passes - 1) * self._traffic.sent(self._sharding.processes)
                self._model.set_requires_gradient_sync(True)
                self._accumulated = counter.gradients = counter.live - base
            counter.forget_peaks()
            self._traffic.forget()
            kept = self._pass() - base - self._accumulated
        if self._sharding is not None:
            sent += self._traffic.sent(self._sharding.processes)
        for parameter in self._model.parameters():
            parameter.grad = None
        peaks = {number: Peak(peak.nbytes - base, peak.gradients) for number, peak in counter.peaks.items()}
        low_bit = {"weights": self._weights, "residuals": 0}
        if optimizer is not None:
            low_bit = optimizer.bytes()
            low_bit["weights"] += sum(buffer.nbytes for buffer in self._model.buffers())
        return StepBytes(
            forward=peaks[-1],
            backward=tuple(peaks.get(number, Peak()) for number in range(self._layers)),
            kept=kept,
            gradients=0 if optimizer is not None else self._gradients,
            update=0 if optimizer is not None else update_bytes(self._optim, self._sizes),
            states=self._states,
            weights=low_bit["weights"],
            residuals=low_bit["residuals"],
            moved=0 if self._elsewhere is None else self._elsewhere.most,
            wire_errors=base if self._sharding is not None else 0,
            sent=sent,
        )

    def _pass(self) -> int:
        """Forward and backward; returns the bytes that are alive between them."""
        batch, counter = self._batch, self._counter
        counter.begin(-1)
        ids = torch.zeros((batch.rows, batch.tokens), dtype=torch.int64)
        inputs = {"input_ids": ids, "position_ids": torch.zeros_like(ids)}
        count = batch.rows * (batch.tokens - 1)
        with _attention_mask(batch.masked), nullcontext() if self._store is None else self._store:
            if self._sharding is None:
                learned = (torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
                loss = chunked_loss(self._model, inputs, ids, count, learned)
            else:
                number = torch.zeros((), dtype=torch.int64)
                loss = self._model(**inputs, labels=ids, use_cache=False, num_items_in_batch=number).loss
        kept = counter.live
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        return kept


def _embeddings(model: nn.Module) -> set[torch.Tensor]:
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}


@contextmanager
def _fake_mesh(sharding: Sharding | None) -> Iterator[DeviceMesh | None]:
    """The processes of a sharded run, whose collectives do nothing."""
    if sharding is None:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=sharding.processes, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (sharding.processes,))
    finally:
        dist.destroy_process_group()


@contextmanager
def _attention_mask(masked: bool) -> Iterator[None]:
    """Let transformers make no attention mask unless `masked`.

    It decides by the values of position ids whether rows hold several examples, and takes fake ones for such.
    """
    original = masking_utils.find_packed_sequence_indices
    if not masked:
        vars(masking_utils)["find_packed_sequence_indices"] = lambda position_ids: None
    try:
        yield
    finally:
        vars(masking_utils)["find_packed_sequence_indices"] = original
