"""The memory of a LoRA run, term by term, before anything is allocated: from a config and headers of files alone."""

from __future__ import annotations

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
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.product_memory import MatrixKind
from ciuic_cli.train.planning.step import step_bytes
from ciuic_cli.train.targets import lora_config

STATE_BYTES = {"8bit": 2.04, "4bit": 1.07, "lion": 4.0, "sgd": 0.0}
"""Bytes of optimizer states per trained parameter, by a part of the optimizer's name in transformers; the first part
that fits counts. Two states of one byte and their block scales; two of half a byte; one or no float32 state. Measured
for 8 and 4 bits with bitsandbytes and torchao."""
ADAM_BYTES = 8.0
"""The same for every other optimizer: Adam's two float32 states, the most that any common optimizer keeps."""
SMALL_STATE = 4096
"""Values of a parameter below which bitsandbytes keeps float32 states (its `min_8bit_size`)."""
_STEP_COPIES = 2
"""Float32 temporaries of the largest trained parameter during torch's Adam step on a CPU."""


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
        model: Any = build_meta_model(build_config(config), _dtype(config))
        tied = {target for target, source in model.all_tied_weights_keys.items() if target != source}
        sizes, kinds = {}, {}
        for name, (role, tensor) in classify(model).items():
            if role.compress and name not in tied:
                shape = tuple(tensor.shape)
                kinds[name] = [_kind_at(shape)] * (shape[0] if len(shape) == 3 else 1)
                sizes[name] = (shape, _blob_bytes(shape, bits))
        return cls(config, None, Blobs(sizes, kinds))

    def meta_model(self) -> Any:
        """The model on the meta device, with compressed modules as they are loaded."""
        config, dtype = build_config(self.config, self.file), _dtype(self.config)
        model: Any = build_meta_model(config, dtype, self.file)
        if self.blobs is not None:
            swap_modules(model, empty_slots(model, self.blobs.sizes), dtype)
            model.tie_weights()
            finish_modules(model, {}, dtype)
        return model


@dataclass(frozen=True)
class Batch:
    """rows: of a forward pass. tokens: of its longest row. masked: rows hold several examples, or padding."""

    rows: int
    tokens: int
    masked: bool = True


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of a step, term by term.

    Attributes:
        weights: of the model, as it is loaded. adapter: its float32 factors.
        gradients: of the adapter, once all exist. states: of the optimizer.
        activations: what else a step holds at its peak: kept activations, temporaries, decoded panels.
        process: what the process needs besides tensors.
    """

    weights: int
    adapter: int
    gradients: int
    states: int
    activations: int
    process: int = 0

    @property
    def tensors(self) -> int:
        """All terms that torch's allocator gives out."""
        return self.weights + self.adapter + self.gradients + self.states + self.activations

    @property
    def total(self) -> int:
        return self.tensors + self.process

    def sentence(self) -> str:
        """One line for people."""
        names = ("weights", "adapter", "gradients", "states", "activations", "process")
        return ", ".join(f"{name} {getattr(self, name) / 1e9:.3f} GB" for name in names)


def plan_memory(model: PlannedModel, options: TrainOptions, batch: Batch, process: int = 0) -> MemoryPlan:
    """The memory of a training run on a CPU.

    The activations are those of a step on fake tensors (`planning.step`).

    Args:
        process: bytes that the process needs besides tensors.

    Raises:
        InputError: the model cannot be built, or its memory depends on values of tensors.
        UsageError: an option does not fit the model.
    """
    from peft import get_peft_model

    base = model.meta_model()
    weights = _unique_bytes(base) + (0 if model.blobs is None else decoded_bytes(base))
    experts = max((getattr(module, "num_experts", 1) or 1 for module in base.modules()), default=1)
    adapted: Any = get_peft_model(base, lora_config(base, options), low_cpu_mem_usage=True)
    adapted.train()
    adapted.config.use_cache = False
    if options.activation_checkpointing:
        adapted.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": False}, every_n_layers=options.every_n_layers
        )
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    adapter = sum(4 * parameter.numel() for parameter in trained)
    step = step_bytes(
        adapted,
        {} if model.blobs is None else model.blobs.kinds,
        rows=batch.rows,
        tokens=batch.tokens,
        experts=experts if isinstance(experts, int) else 1,
        masked=batch.masked,
        accumulates=options.gradient_accumulation_steps > 1,
    )
    update = adapter + 4 * _STEP_COPIES * max(parameter.numel() for parameter in trained)
    peak = max(step.peak, update)
    return MemoryPlan(
        weights=weights,
        adapter=adapter,
        gradients=adapter,
        states=state_bytes(options.optim, [parameter.numel() for parameter in trained]),
        activations=peak - adapter,
        process=process,
    )


def state_bytes(optim: str, sizes: Sequence[int]) -> int:
    """Bytes of the optimizer's states for trained parameters with these numbers of values."""
    each = next((count for part, count in STATE_BYTES.items() if part in optim), ADAM_BYTES)
    full = 4.0 if "lion" in optim else ADAM_BYTES
    return sum(round(size * (full if "8bit" in optim and size < SMALL_STATE else each)) for size in sizes)


def _unique_bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def _dtype(config: dict[str, Any]) -> torch.dtype:
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
