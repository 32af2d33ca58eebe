"""The memory of a training run, term by term, before anything is allocated: from a config and headers alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.architecture import build_config, build_meta_model
from ciuic_cli.checkpoint.folder import read_config
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.codecs.bits import stored_bits
from ciuic_cli.codecs.sizes import packed_nbytes
from ciuic_cli.codecs.stack import stack_header_nbytes
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.integers import ceil_div
from ciuic_cli.runtime.attention.mla import decoded_bytes
from ciuic_cli.runtime.plugin import finish_modules
from ciuic_cli.runtime.swap import empty_slots, swap_modules
from ciuic_cli.train.memory.choice import checkpointing_options
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.layers import depths_of, shortened
from ciuic_cli.train.planning.product_memory import MatrixKind
from ciuic_cli.train.planning.step import Batch, Sharding, StepBytes, step_bytes
from ciuic_cli.train.targets import lora_config


@dataclass(frozen=True)
class Blobs:
    """The compressed parameters of a model: name -> decoded shape and bytes, and name -> its matrices."""

    sizes: Mapping[str, tuple[tuple[int, ...], int]]
    kinds: Mapping[str, Sequence[MatrixKind]]


@dataclass(frozen=True)
class PlannedModel:
    """A model of which only shapes are known.

    config: content of its config.json. file: where that is, for messages. blobs: None for a dense model.
    """

    config: dict[str, Any]
    file: Path | None = None
    blobs: Blobs | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> PlannedModel:
        """An artifact or a dense checkpoint, of which only headers are read. Raises InputError as `open_artifact`."""
        config = read_config(folder)
        if not is_artifact(config):
            return cls(config, folder / "config.json")
        artifact = open_artifact(folder)
        sizes, kinds = {}, {}
        for name, blob in artifact.blobs.items():
            if artifact.mtp.owns(name):
                continue
            sizes[name] = (blob.shape, blob.entry.nbytes)
            with blob.matrices() as matrices:
                kinds[name] = [MatrixKind.of(matrix.header) for matrix in matrices]
        return cls(config, folder / "config.json", Blobs(sizes, kinds))

    @classmethod
    def at_bits(cls, config: dict[str, Any], bits: float) -> PlannedModel:
        """The model of a config with every compressible matrix at these bits per weight, rows sorted and inputs scaled
        as the compressor does by default."""
        model: Any = build_meta_model(build_config(config), dtype_of(config))
        tied = {target for target, source in model.all_tied_weights_keys.items() if target != source}
        sizes, kinds = {}, {}
        for name, (role, tensor) in classify(model).items():
            if role.compress and name not in tied:
                shape = tuple(tensor.shape)
                kinds[name] = [_kind_at(shape)] * (shape[0] if len(shape) == 3 else 1)
                sizes[name] = (shape, _blob_bytes(shape, bits))
        return cls(config, None, Blobs(sizes, kinds))

    def meta_model(self, dtype: torch.dtype | None = None) -> Any:
        """The model on the meta device, with compressed modules as they are loaded.

        dtype: of its weights; default: that of the config.
        """
        config, dtype = build_config(self.config, self.file), dtype or dtype_of(self.config)
        model: Any = build_meta_model(config, dtype, self.file)
        if self.blobs is not None:
            swap_modules(model, empty_slots(model, self.blobs.sizes), dtype)
            model.tie_weights()
            finish_modules(model, {}, dtype)
        return model


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one process at the peak of a step, term by term.

    Attributes:
        weights: of the model, as it is loaded or trained. adapter: its float32 factors.
        gradients: those that are complete at the peak. states: of the optimizer, and rounding errors of the wire.
        activations: kept for the backward pass. process: what the process needs besides tensors.
        scratch: what else exists at the peak: logits, decoded panels, gathered layers, temporaries.
        residuals: in main memory (on a CPU in the same memory): rounding errors of 8-bit weights.
        moved: activations in main memory; on a CPU, on disk.
        sent: bytes per step to other processes, which are no memory.
    """

    weights: int
    adapter: int
    gradients: int
    states: int
    activations: int
    process: int = 0
    scratch: int = 0
    residuals: int = 0
    moved: int = 0
    sent: int = 0

    @property
    def tensors(self) -> int:
        """All terms that torch's allocator gives out on the device."""
        terms = (self.weights, self.adapter, self.gradients, self.states, self.activations, self.scratch)
        return sum(terms)

    @property
    def total(self) -> int:
        return self.tensors + self.process

    def sentence(self) -> str:
        """One line for people."""
        names = ("weights", "adapter", "gradients", "states", "activations", "scratch", "process")
        return ", ".join(f"{name} {getattr(self, name) / 1e9:.3f} GB" for name in names)


def plan_memory(
    model: PlannedModel,
    options: TrainOptions,
    batch: Batch,
    process: int = 0,
    *,
    sharding: Sharding | None = None,
    whole: bool = True,
) -> MemoryPlan:
    """The memory of a training run on a CPU, of one of its processes.

    The activations are those of a step on fake tensors (`planning.step`).

    Args:
        process: bytes that the process needs besides tensors.
        sharding: how the run is divided.
        whole: run all layers. If not, two models with fewer layers run, and the rest is extrapolated, which takes
            seconds for any depth.

    Raises:
        InputError: the model cannot be built, or its memory depends on values of tensors.
        UsageError: an option does not fit the model.
    """
    dtype = torch.float32 if options.method == "full" else None
    base = model.meta_model(dtype)
    weights, decoded = _unique_bytes(base), 0 if model.blobs is None else decoded_bytes(base)
    depths = (
        None if whole else depths_of(base, options.every_n_layers if options.activation_checkpointing else 1)
    )
    if depths is None:
        step = _step(model, base, options, batch, sharding)
    else:
        shorter = [shortened(model.meta_model(dtype), depth) for depth in depths.run]
        few, more = (_step(model, one, options, batch, sharding) for one in shorter)
        step = few.extrapolated(more, depths)
    peak, gradients = step.peak.nbytes, step.peak.gradients
    update = step.gradients + step.update
    activations = min(step.kept, peak - gradients)
    if update > peak:
        peak, gradients, activations = update, step.gradients, 0
    adapter = step.gradients if options.method == "lora" else 0
    keeps_all = sharding is None and options.weights is None
    return MemoryPlan(
        weights=decoded + (weights if keeps_all else step.weights - adapter),
        adapter=adapter,
        gradients=gradients,
        states=step.states + step.wire_errors,
        activations=activations,
        process=process,
        scratch=peak - gradients - activations,
        residuals=step.residuals,
        moved=step.moved,
        sent=step.sent,
    )


def checkpointed(model: Any, base: Any, options: TrainOptions) -> Any:
    """The model in training mode, with checkpoints of activations as `options` ask for, changed in place.

    Args:
        model: `base`, or the PeftModel of it.
    """
    model.train()
    model.config.use_cache = False
    checkpointing = checkpointing_options(base, options)
    if checkpointing is not None:
        every = checkpointing.pop("every_n_layers")
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=checkpointing, every_n_layers=every
        )
    return model


def _step(
    model: PlannedModel, base: Any, options: TrainOptions, batch: Batch, sharding: Sharding | None
) -> StepBytes:
    """The step of a model on the meta device, with an adapter or without."""
    experts = max((getattr(module, "num_experts", 1) or 1 for module in base.modules()), default=1)
    trained: Any = base
    if options.method == "lora":
        from peft import get_peft_model

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            trained = get_peft_model(base, lora_config(base, options), low_cpu_mem_usage=True)
    return step_bytes(
        checkpointed(trained, base, options),
        {} if model.blobs is None else model.blobs.kinds,
        options,
        batch,
        experts=experts if isinstance(experts, int) else 1,
        sharding=sharding,
    )


def _unique_bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    """The dtype of the weights by a config.json; bfloat16 if it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _kind_at(shape: tuple[int, ...]) -> MatrixKind:
    return MatrixKind(shape[-2], shape[-1], is_sorted=True, has_input_scale=len(shape) == 2)


def _blob_bytes(shape: tuple[int, ...], bits: float) -> int:
    rows, cols = shape[-2:]
    row_bits = np.full(ceil_div(rows, TILE), stored_bits(bits), np.uint8)
    one = packed_nbytes(rows, cols, row_bits, is_sorted=True, has_input_scale=len(shape) == 2)
    return one if len(shape) == 2 else stack_header_nbytes(shape[0]) + prod(shape[:-2]) * one
