"""Replaces dense modules of a model by compressed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ciuic_cli.artifact.reader import Blob
from ciuic_cli.checkpoint.compressible import (
    EXPERT_STACKS,
    Use,
    embedding_scale_of,
    experts_fault,
    is_grouped_linear,
    matrix_fault,
    parameter_use,
)
from ciuic_cli.errors import InputError
from ciuic_cli.runtime.experts import CompressedExperts
from ciuic_cli.runtime.modules import (
    CompressedEmbedding,
    CompressedGroupedLinear,
    CompressedLinear,
)
from ciuic_cli.runtime.views.viewed_modules import with_blobs

_REMEDY = "the artifact belongs to another model or version; compress the model again with this version"


@dataclass(frozen=True)
class BlobSlot:
    """A blob that becomes a parameter.

    `shape` is the shape of the dense weight, (rows, cols) or (E, rows, cols). `tensor` is uint8 (nbytes,): the blob
    itself or, before loading, an empty tensor on the meta device.
    """

    shape: tuple[int, ...]
    tensor: torch.Tensor

    def parameter(self) -> nn.Parameter:
        return nn.Parameter(self.tensor, requires_grad=False)


def blob_slots(model: Any, blobs: Mapping[str, Blob]) -> dict[str, BlobSlot]:
    """Parameter name -> slot, for the blobs of an artifact and a transformers model that is still on the meta device.

    If only one of two tied parameters is stored, both get its slot; transformers ties the two parameters later.
    """
    return empty_slots(model, {name: (blob.shape, blob.entry.nbytes) for name, blob in blobs.items()})


def empty_slots(model: Any, blobs: Mapping[str, tuple[tuple[int, ...], int]]) -> dict[str, BlobSlot]:
    """As `blob_slots`, from the shape of each dense weight and the bytes of its blob."""
    slots = {
        name: BlobSlot(shape, torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        for name, (shape, nbytes) in blobs.items()
    }
    for target, source in model.all_tied_weights_keys.items():
        stored = [name for name in (target, source) if name in slots]
        if len(stored) == 1:
            slots[source if stored[0] == target else target] = slots[stored[0]]
    return slots


def swap_modules(model: nn.Module, slots: Mapping[str, BlobSlot], dtype: torch.dtype) -> None:
    """Replace, in place, every module that owns a parameter named in `slots`.

    Args:
        model: any nn.Module; its parameters may be on the meta device.
        slots: parameter name (`model.layers.0.mlp.up_proj.weight`, `...experts.gate_up_proj`) -> slot.
        dtype: dtype of embedding rows.

    Raises:
        InputError: the model has no such parameter, its shape differs, or its module cannot hold codes. The error
            names the tensor.
    """
    by_module: dict[str, dict[str, BlobSlot]] = {}
    for name, slot in slots.items():
        module_name, _, parameter_name = name.rpartition(".")
        by_module.setdefault(module_name, {})[parameter_name] = slot
    for module_name, module_slots in by_module.items():
        try:
            dense = model.get_submodule(module_name)
        except AttributeError as error:
            raise InputError(
                "the model has no module of this name", tensor=module_name, remedy=_REMEDY
            ) from error
        for parameter_name, slot in module_slots.items():
            _check_shape(dense, f"{module_name}.{parameter_name}", parameter_name, slot)
        compressed = _compressed(dense, module_name, module_slots, dtype)
        if compressed is not dense:
            model.set_submodule(module_name, compressed)


def _is_transposed(dense: nn.Module, parameter_name: str) -> bool:
    """Whether the module has the parameter as (inputs, outputs), and the blob as (outputs, inputs)."""
    fault = matrix_fault(dense) if parameter_name == "weight" else experts_fault(dense)
    return fault is not None and parameter_use(dense, parameter_name) is Use.COLUMNS


def _check_shape(dense: nn.Module, name: str, parameter_name: str, slot: BlobSlot) -> None:
    parameter = dense._parameters.get(parameter_name)
    if parameter is None:
        raise InputError("the model has no parameter of this name", tensor=name, remedy=_REMEDY)
    shape = parameter.mT.shape if _is_transposed(dense, parameter_name) else parameter.shape
    if tuple(shape) != slot.shape:
        raise InputError(
            f"the blob holds a matrix of shape {list(slot.shape)}, the model expects {list(shape)}",
            tensor=name,
            remedy=_REMEDY,
        )


def _compressed(dense: nn.Module, name: str, slots: dict[str, BlobSlot], dtype: torch.dtype) -> nn.Module:
    """The compressed module that replaces `dense`, or `dense` itself with blobs in it."""
    if any(stack in slots for stack in EXPERT_STACKS) and experts_fault(dense) is None:
        missing = [stack for stack in EXPERT_STACKS if stack not in slots]
        if missing:
            raise _cannot_hold(dense, name, f"{missing[0]} is not compressed")
        return CompressedExperts(dense, *(slots[stack].parameter() for stack in EXPERT_STACKS))
    if set(slots) != {"weight"} or matrix_fault(dense) is not None:
        unknown = [short for short in slots if parameter_use(dense, short) is None]
        if unknown:
            fault = matrix_fault(dense) or "its weight can be compressed"
            raise _cannot_hold(dense, name, f"{fault}, and its code shows no product with {unknown[0]}")
        blobs = {short: slot.parameter() for short, slot in slots.items()}
        transposed = {short: _is_transposed(dense, short) for short in slots}
        return with_blobs(dense, blobs, transposed, dtype)
    weight = slots["weight"].parameter()
    if isinstance(dense, nn.Embedding):
        return CompressedEmbedding(
            dense.num_embeddings,
            dense.embedding_dim,
            weight,
            dtype,
            embedding_scale_of(dense),
            dense.padding_idx,
        )
    assert isinstance(dense, nn.Linear)
    shape = (dense.in_features, dense.out_features)
    if is_grouped_linear(dense):
        return CompressedGroupedLinear(*shape, int(dense.n_groups), weight)  # type: ignore[arg-type]
    return CompressedLinear(*shape, weight, dense.bias)


def _cannot_hold(dense: nn.Module, name: str, reason: str) -> InputError:
    return InputError(
        f"a module of class {type(dense).__name__} cannot hold a compressed weight: {reason}",
        tensor=name,
        remedy=_REMEDY,
    )
