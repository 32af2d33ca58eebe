"""What an adapter adds to each weight of a compressed model, as factors of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import peft  # noqa: F401  before our layers: importing it registers them
import torch

from ciuic_cli.errors import UsageError
from ciuic_cli.train.lora_layers import LoraCompressedExperts, LoraCompressedLinear


@dataclass(frozen=True)
class LowRankChange:
    """left · right is added to a matrix (rows, cols): left float32 (rows, rank), right float32 (rank, cols)."""

    left: torch.Tensor
    right: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.right)

    @property
    def is_zero(self) -> bool:
        """Whether nothing is added, as for an expert that no token of the training text chose."""
        return not (bool(self.left.any()) and bool(self.right.any()))

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows of the product, float32 (end - begin, cols)."""
        return self.left[begin:end] @ self.right


Changes = Mapping[str, Mapping[int | None, LowRankChange]]
"""Parameter name -> expert (None for a matrix) -> change. Changes that are zero are left out."""


def changes_of(adapted: Any) -> dict[str, dict[int | None, LowRankChange]]:
    """The changes of the active adapters of a PeftModel on a compressed model, added up.

    Raises:
        UsageError: the adapter does more than adding a product of two factors.
    """
    found: dict[str, dict[int | None, LowRankChange]] = {}
    for path, module in adapted.named_modules():
        name = path.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, LoraCompressedLinear):
            parameter, parts = f"{name}.weight", _of_linear(module, name)
        elif isinstance(module, LoraCompressedExperts):
            parameter, parts = f"{name}.{module.parameter_name}", _of_experts(module)
        else:
            continue
        kept = {expert: change for expert, change in parts.items() if not change.is_zero}
        if kept:
            found[parameter] = kept
    if not found:
        raise UsageError(
            "the adapter changes no compressed weight",
            remedy="merge it into the model that it was trained on",
        )
    return found


def _of_linear(module: Any, name: str) -> dict[int | None, LowRankChange]:
    lefts, rights = [], []
    for adapter in module.active_adapters:
        if adapter not in module.lora_A:
            continue
        if module.lora_B[adapter].bias is not None or adapter in module.lora_variant:
            raise UsageError(
                "the adapter has biases or is a variant of LoRA, and cannot be merged",
                tensor=name,
                remedy="keep it beside the artifact",
            )
        lefts.append(module.scaling[adapter] * module.lora_B[adapter].weight.detach().float())
        rights.append(module.lora_A[adapter].weight.detach().float())
    return {None: LowRankChange(torch.cat(lefts, 1).cpu(), torch.cat(rights).cpu())} if lefts else {}


def _of_experts(module: Any) -> dict[int | None, LowRankChange]:
    parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for adapter in module.active_adapters:
        if adapter not in module.lora_A:
            continue
        a = module.lora_A[adapter].weight.detach().float()
        b = module.scaling[adapter] * module.lora_B[adapter].weight.detach().float()
        a = a.reshape(module.num_experts, -1, a.shape[1])
        b = b.reshape(b.shape[0], -1, module.num_experts)
        for expert in range(module.num_experts):
            parts.setdefault(expert, []).append((b[:, :, expert], a[expert]))
    return {
        expert: LowRankChange(
            torch.cat([left for left, _ in factors], 1).contiguous().cpu(),
            torch.cat([right for _, right in factors]).cpu(),
        )
        for expert, factors in parts.items()
    }
