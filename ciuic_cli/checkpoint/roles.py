"""The role of every parameter in the model, and whether it is compressed.

`classify` takes a meta model and returns a `Classification` per parameter; `classify_mtp` does the same for a tensor of
a multi-token-prediction layer. The class of the module that owns a parameter decides: linears, embeddings and fused
expert stacks of the language model are compressed. Routers, norms, biases, other towers and everything else that is not
a plain matrix product is kept exactly, and the classification gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ciuic_cli.checkpoint.compressible import Use, experts_fault, flat_experts, matrix_fault, parameter_use
from ciuic_cli.checkpoint.config.classes import language_model_prefix
from ciuic_cli.integers import round_up

_TILE = 16
"""Rows and columns of a tile of the trellis code (docs/FORMAT.md). A matrix is padded to whole tiles."""
_PACKED_OVERHEAD = 48
"""Bytes of a packed matrix besides codes and rows: 32 of the header, and up to 16 of padding (docs/FORMAT.md)."""

_LINEAR_ROLES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "qkv_proj": "qkv",
    "o_proj": "o",
    "out_proj": "o",
    "o_a_proj": "o",
    "o_b_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "q_a_proj": "mla",
    "q_b_proj": "mla",
    "kv_a_proj_with_mqa": "mla",
    "kv_b_proj": "mla",
    "kv_proj": "mla",
}
"""Module name -> role, as most families in transformers name their linears."""
_OLD_ATTENTION_ROLES = {"c_attn": "qkv", "query_key_value": "qkv", "dense": "o", "c_proj": "o"}
"""Names in the attention of GPT-2, GPT-NeoX and Falcon."""
_OLD_MLP_ROLES = {
    "c_fc": "up",
    "fc1": "up",
    "dense_h_to_4h": "up",
    "c_proj": "down",
    "fc2": "down",
    "dense_4h_to_h": "down",
}
"""Names in the MLP of the same families."""
MTP_ROLES = ("mtp", "mtp_expert", "mtp_dense")
"""Roles in multi-token-prediction layers: matrices, matrices of routed experts, tensors kept exactly."""
_NO_PLAIN_MODULE = "it is neither a linear nor an embedding"
_EXPERT_ROLES = {"gate_up_proj": "expert_gate_up", "down_proj": "expert_down"}


@dataclass(frozen=True)
class Classification:
    """The role of a tensor.

    Attributes:
        role: a short, stable word for reports.
        compress: whether the tensor is compressed.
        reason: why it is not; empty if it is.
        buffer: whether it is a buffer: no trained weight, and not counted as a parameter.
        transposed: it is compressed as its transpose, because the model has it as (inputs, outputs).
        used_by: the class of its module, for a matrix of the language model that is kept because the class is not
            supported.
    """

    role: str
    compress: bool
    reason: str
    buffer: bool = False
    transposed: bool = False
    used_by: str | None = None


TOWER = "tower"
"""The role of matrices outside the language model."""
_IN_A_TOWER = Classification(TOWER, False, "not part of the language model: kept exactly")
"""Matrices of vision and sound towers, and of what connects them: calibration text does not reach them."""


def classify(model: Any) -> dict[str, tuple[Classification, torch.Tensor]]:
    """Classification and (meta) tensor of every parameter and persistent buffer, by in-memory name.

    The tensor has the shape that is stored: a transposed parameter's is the transpose of the model's. A module that the
    model uses under two names appears once, under its first name.
    """
    head, language_model = _output_embeddings(model), language_model_prefix(model)
    result = {}
    for owner_name, owner in model.named_modules():
        parent = model.get_submodule(owner_name.rpartition(".")[0]) if owner_name else None
        for short, tensor, is_buffer in _stored_tensors(owner):
            name = f"{owner_name}.{short}" if owner_name else short
            if is_buffer:
                # Buffers of routers: the balancing bias, and tables of expert ids (tid2eid).
                classified = Classification(
                    "router" if "bias" in short or "eid" in short else "other",
                    False,
                    "a buffer, not a weight: kept exactly",
                    buffer=True,
                )
            else:
                classified = _classify_parameter(owner_name, owner, parent, short, tensor, head)
                if owner is not head and not name.startswith(language_model):
                    classified = _IN_A_TOWER if classified.compress else replace(classified, used_by=None)
            result[name] = (classified, tensor.mT if classified.transposed else tensor)
    return result


def classify_mtp(name: str, shape: tuple[int, ...], *, floating: bool) -> Classification:
    """The classification of a multi-token-prediction layer's tensor by its name: no module owns it.

    `shape` is the decoded shape; `floating` says whether the decoded values are floats.
    """
    owner, _, short = name.rpartition(".")
    leaf = owner.rpartition(".")[2]
    is_router = leaf in ("gate", "router")
    if is_router or not floating:
        buffer = not floating or short != "weight"
        return Classification(
            "mtp_dense", False, "router: it decides which expert sees a token, kept exactly", buffer
        )
    if len(shape) < 2:
        return Classification("mtp_dense", False, "a vector: too small to matter, kept exactly")
    is_expert = ".experts." in name
    if (short == "weight" and len(shape) == 2) or (is_expert and len(shape) == 3):
        by_size = _classify_by_size("mtp_expert" if is_expert else "mtp", torch.empty(shape, device="meta"))
        return by_size if by_size.compress else replace(by_size, role="mtp_dense")
    return Classification("mtp_dense", False, "not the weight of a linear or an embedding: kept exactly")


def _stored_tensors(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, whether it is a buffer) of the module's parameters and persistent buffers, without submodules."""
    for short, parameter in owner.named_parameters(recurse=False):
        yield short, parameter, False
    for short, buffer in owner.named_buffers(recurse=False):
        if short not in owner._non_persistent_buffers_set:
            yield short, buffer, True


def _output_embeddings(model: Any) -> nn.Module | None:
    head = model.get_output_embeddings()
    return head if isinstance(head, nn.Module) else None


def _classify_parameter(
    owner_name: str,
    owner: nn.Module,
    parent: nn.Module | None,
    short: str,
    tensor: torch.Tensor,
    head: nn.Module | None,
) -> Classification:
    leaf = owner_name.rpartition(".")[2]
    if _is_router(leaf, owner, parent):
        return Classification("router", False, "router: it decides which expert sees a token, kept exactly")
    if "bias" in short:
        return Classification("bias", False, "bias: added, not multiplied; kept exactly")
    if not tensor.requires_grad:
        return Classification("other", False, "a table that its class computes, not trained: kept exactly")
    if "norm" in type(owner).__name__.lower() or "norm" in leaf:
        return Classification("norm", False, "norm: one number per channel, kept exactly")
    if isinstance(owner, (nn.Embedding, nn.Linear)) and short == "weight":
        is_embedding = isinstance(owner, nn.Embedding)
        role = "embedding" if is_embedding else "head" if owner is head else _linear_role(owner_name, leaf)
        return _classify_product(role, tensor, matrix_fault(owner), owner, short)
    if tensor.dim() == 3 and _is_expert_stack(owner, leaf):
        role = _EXPERT_ROLES.get(short, f"expert_{short.removesuffix('_proj')}")
        return _classify_product(role, tensor, experts_fault(owner), owner, short)
    if tensor.dim() < 2:
        return Classification("other", False, "a vector: too small to matter, kept exactly")
    is_layer = tensor.dim() == 2 and short == "weight"
    if (is_layer or tensor.dim() == 3) and parameter_use(owner, short) in (Use.ROWS, Use.COLUMNS):
        part = short if short in flat_experts(owner) else leaf.removesuffix("_linear")
        role = _linear_role(owner_name, leaf) if is_layer else f"expert_{part}"
        return _classify_product(role, tensor, _NO_PLAIN_MODULE, owner, short)
    return Classification(
        "other",
        False,
        f"used by {type(owner).__name__} directly, not as a linear or an embedding: kept exactly",
        used_by=type(owner).__name__,
    )


def _is_router(leaf: str, owner: nn.Module, parent: nn.Module | None) -> bool:
    if any("Router" in type(module).__name__ for module in (owner, parent)):
        return True
    has_experts = parent is not None and hasattr(parent, "experts")
    return has_experts and leaf in ("gate", "router")


def _is_expert_stack(owner: nn.Module, leaf: str) -> bool:
    return leaf == "experts" or "Experts" in type(owner).__name__


def _linear_role(owner_name: str, leaf: str) -> str:
    if ".indexer" in owner_name:
        return "indexer"
    if ".compressor" in owner_name:
        return "compressor"
    role = _LINEAR_ROLES.get(leaf, "other")
    if "shared_expert" in owner_name:
        return f"shared_expert_{role}" if role in ("gate", "up", "down") else "shared_expert_router"
    if role == "other":
        table = _OLD_ATTENTION_ROLES if "attn" in owner_name or "attention" in owner_name else _OLD_MLP_ROLES
        return table.get(leaf, role)
    return role


def _classify_product(
    role: str, tensor: torch.Tensor, fault: str | None, owner: nn.Module, short: str
) -> Classification:
    """The classification of a factor of products, by its size.

    fault: why no compressed module can replace the owner, or None. The owner then keeps its class and gets a view of
    the weight, if the source of the class shows how it uses the weight.
    """
    use = Use.ROWS if fault is None else parameter_use(owner, short)
    if use is None:
        kind = type(owner).__name__
        return Classification(role, False, f"used by {kind}, {fault}: kept exactly", used_by=kind)
    if use is not Use.COLUMNS:
        return _classify_by_size(role, tensor)
    by_size = _classify_by_size(role, tensor.mT)
    return replace(by_size, transposed=by_size.compress)


def _classify_by_size(role: str, tensor: torch.Tensor) -> Classification:
    """Compress unless padding to whole tiles would make the packed matrix as large as the original."""
    rows, cols = tensor.shape[-2:]
    padded = round_up(rows, _TILE) * round_up(cols, _TILE)
    # At 4 bits per weight, the packed matrix with its padding must be smaller than the weights at 2 bytes each.
    if padded // 2 + rows + _PACKED_OVERHEAD >= 2 * rows * cols:
        return Classification(
            role, False, f"only {rows} x {cols}: padded to {_TILE} x {_TILE} tiles it would not shrink"
        )
    return Classification(role, True, "")
