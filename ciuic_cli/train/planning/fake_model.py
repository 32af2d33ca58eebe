"""A model with fake parameters, and the bytes that operators hold while they compute with its codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ciuic_cli.runtime import blobs
from ciuic_cli.train.planning.product_memory import MatrixKind, gradient_bytes, product_bytes

_COPIED = {torch.ops.c10d._allgather_base_.default: 0, torch.ops.c10d._reduce_scatter_base_.default: 1}
"""Collectives of which torch's gloo, between CPUs, copies an argument, by its position: what is gathered, or summed."""


@dataclass
class FakeBlobs:
    """The blobs of a model on fake tensors.

    Attributes:
        owners: the module of each blob, the parameter's name in it, and the blob's matrices.
        kinds: id of the tensor with which a module computes -> the matrices in it. Ids are of tensors that live as long
            as the model.
    """

    owners: list[tuple[nn.Module, str, Sequence[MatrixKind]]] = field(default_factory=list)
    kinds: dict[int, Sequence[MatrixKind]] = field(default_factory=dict)

    def note(self, *hook_arguments: Any) -> None:
        """Note the tensors in which the blobs lie now."""
        self.kinds.update((id(module._parameters[short]), kinds) for module, short, kinds in self.owners)

    def follow(self, model: nn.Module) -> None:
        """Note the tensors of a sharded model, whose modules compute with others: those that were gathered."""
        self.kinds.clear()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self.note)

    def call_bytes(self, function: Any, arguments: Sequence[Any]) -> int:
        """The most bytes of a call of an operator with codes, or of a collective; 0 for other operators."""
        if function in _COPIED:
            copied = arguments[_COPIED[function]]
            return int(copied.numel() * copied.element_size())
        if function.namespace != "ciuic" or len(arguments) < 2:
            return 0
        kinds = self.kinds.get(id(arguments[1]))
        name = function.name().partition("::")[2].partition(".")[0]
        return 0 if kinds is None else _product_bytes(name, kinds, arguments)


def make_fake(model: nn.Module, kinds: Mapping[str, Sequence[MatrixKind]]) -> FakeBlobs:
    """Replace all parameters and buffers by fake CPU tensors, in place.

    Args:
        kinds: parameter name -> the matrices in its blob.
    """
    made: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []
    found = FakeBlobs()
    for path, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for short, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    keep.append(tensor)
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                tensors[short] = made[id(tensor)]
                name = f"{path}.{short}".replace("base_model.model.", "").replace(".base_layer", "")
                if name in kinds:
                    found.owners.append((module, short, kinds[name]))
    found.note()
    return found


def _product_bytes(name: str, kinds: Sequence[MatrixKind], arguments: Sequence[Any]) -> int:
    """The most bytes of a product with codes, by the operator's name."""
    x = arguments[0]
    limit, batch = blobs.small_batch().of(x.dtype), x.numel() // x.shape[-1]
    if name == "linear":
        return product_bytes(kinds[0], batch, x.dtype, limit)
    if name == "linear_backward":
        return gradient_bytes(kinds[0], batch, x.dtype)
    if name not in ("routed_linear", "routed_linear_backward"):
        return 0
    ids: torch.Tensor = arguments[2]
    share = max(1, ids.numel() // len(kinds))
    size = x.dtype.itemsize
    if name == "routed_linear":
        whole = ids.numel() * kinds[0].rows * size
        chosen = share * kinds[0].cols * size
        return whole + chosen + max(product_bytes(kind, share, x.dtype, limit) for kind in kinds)
    whole = ids.shape[0] * kinds[0].cols * 4
    chosen = share * kinds[0].rows * size
    return whole + chosen + max(gradient_bytes(kind, share, x.dtype) for kind in kinds)
