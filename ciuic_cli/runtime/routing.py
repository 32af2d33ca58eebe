"""Masks routers so that they never choose a pruned expert.

A pruned expert's down projection is all zeros (every row group has K = 0). It contributes nothing, so a token that is
routed to it loses that share of its output. The blobs show which experts are pruned, so nothing else is stored, and
masking twice is harmless. transformers 5 has two kinds of routers:

- With `e_score_correction_bias`, which is added to the scores only for the choice (DeepSeek-V3, V3.2, V4): the bias
  of a pruned expert becomes MASKED_SCORE.
- Without (DeepSeek-V2, Mixtral, Qwen): MASKED_SCORE is added to the expert's logit, through one more input that is
  always 1. The softmax then runs over the remaining experts.

DeepSeek-V4's hash routers look experts up in a table by token. They make no choice that could be masked, and planning
removes no expert there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.integers import ceil_div
from ciuic_cli.runtime.mixed_classes import Mixin, mixed_class, original_class

MASKED_SCORE = -1e4
"""Score of an expert that must not be chosen: far below every score and logit, finite in float16."""


def pruned_experts(down: Sequence[PackedMatrix]) -> torch.Tensor:
    """Mask (E,) of the experts whose down projection is all zeros, low-rank part included."""
    # device="cpu", because transformers builds models with the meta device as the default.
    return torch.tensor([expert.is_zero for expert in down], device="cpu")


def mask_for(pruned: torch.Tensor, *, top_k: int, groups: int = 1, chosen_groups: int = 1) -> torch.Tensor:
    """The pruned experts that may be masked, bool (E,).

    A router chooses `top_k` experts from the best `chosen_groups` of `groups` groups and ranks a group by its best
    two experts. Each group must keep as many experts as may be chosen from it; otherwise none of its experts is masked.
    """
    needed = max(2 if groups > 1 else 1, ceil_div(top_k, chosen_groups))
    mask = pruned.clone().reshape(groups, -1)
    mask[(~mask).sum(1) < needed] = False
    return mask.reshape(-1)


def mask_router(router: nn.Module, pruned: torch.Tensor) -> None:
    """Mask the experts in `pruned` (E,) for a transformers router, in place, as far as `mask_for` permits.

    Idempotent.
    """
    mask = masked_experts(router, pruned)
    if not mask.any():
        return
    bias = getattr(router, "e_score_correction_bias", None)
    if isinstance(bias, torch.Tensor):
        bias.data[mask.to(bias.device)] = MASKED_SCORE
        return
    weight = router.get_parameter("weight")
    device = "cpu" if weight.is_meta else weight.device  # a meta weight is offloaded and loaded for each call
    column = torch.where(mask, MASKED_SCORE, 0.0).to(device=device, dtype=weight.dtype)
    router.register_buffer("masked_logits", column[:, None], persistent=False)
    if not isinstance(router, _MaskedLogits):
        original: Any = type(router)
        _set_class(router, mixed_class(_MaskedLogits, original))


def masked_experts(router: nn.Module, pruned: torch.Tensor) -> torch.Tensor:
    """The pruned experts that a transformers router can exclude, bool (E,)."""
    if not _chooses(router) or not pruned.any():
        return torch.zeros_like(pruned)
    groups = int(getattr(router, "num_group", None) or 1)
    chosen = int(getattr(router, "topk_group", None) or 1)
    if getattr(router, "topk_method", None) == "greedy":
        groups = chosen = 1
    return mask_for(pruned, top_k=int(router.top_k), groups=groups, chosen_groups=chosen)  # type: ignore[arg-type]


def _chooses(router: nn.Module) -> bool:
    """Whether the module is a router of one of the two kinds above; others are not changed."""
    return hasattr(router, "top_k") and hasattr(router, "hidden_dim") and not hasattr(router, "tid2eid")


def unmask_router(router: nn.Module) -> None:
    """Restore the class of a router without a bias. (A bias is restored when the router's weights are loaded again.)"""
    if isinstance(router, _MaskedLogits):
        del router.masked_logits
        _set_class(router, original_class(router))


def _set_class(router: nn.Module, cls: type) -> None:
    """Change the class, and the forward that accelerate stores behind its hooks (models on several devices)."""
    router.__class__ = cls
    if "_old_forward" in vars(router):
        vars(router)["_old_forward"] = types.MethodType(cls.forward, router)  # type: ignore[attr-defined]


def routers(model: nn.Module, pruned: Mapping[str, torch.Tensor]) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """(router, mask of pruned experts) for every experts module named in `pruned`; the router is its sibling."""
    for experts, mask in pruned.items():
        block = model.get_submodule(experts.rpartition(".")[0])
        for name in ("gate", "router"):
            router = getattr(block, name, None)
            if isinstance(router, nn.Module):
                yield router, mask


def masking(pruned: Mapping[str, torch.Tensor]) -> Callable[[str, nn.Module], AbstractContextManager[None]]:
    """`masking(pruned)(prefix, layer)` is a context manager that masks the routers of one layer.

    Args:
        pruned: name of the experts module in the whole model -> mask (E,). `prefix` is the layer's part of the name.
    """

    @contextmanager
    def masked(prefix: str, layer: nn.Module) -> Iterator[None]:
        in_layer = {
            name.removeprefix(prefix): mask for name, mask in pruned.items() if name.startswith(prefix)
        }
        masked_routers = list(routers(layer, in_layer))
        for router, mask in masked_routers:
            mask_router(router, mask)
        try:
            yield
        finally:
            for router, _ in masked_routers:
                unmask_router(router)

    return masked


class _MaskedLogits(Mixin):
    """Mixin for router classes: the logits are W x + `masked_logits`."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The original forward with one more input, which is always 1 and has `masked_logits` (E, 1) as weights."""
        wider = _Wider(self, torch.cat([self.weight, self.masked_logits.to(self.weight)], dim=1))
        flat = hidden_states.reshape(-1, self.hidden_dim)
        ones = torch.ones(len(flat), 1, dtype=flat.dtype, device=flat.device)
        return original_class(self).forward(wider, torch.cat([flat, ones], dim=1), *args, **kwargs)


class _Wider:
    """A router with other weights (E, hidden_dim + 1); torch.compile follows it, but not a copy."""

    def __init__(self, router: Any, weight: torch.Tensor) -> None:
        self.router = router
        self.weight = weight
        self.hidden_dim = router.hidden_dim + 1

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.router, name)
        if isinstance(value, types.MethodType) and value.__self__ is self.router:
            return types.MethodType(value.__func__, self)
        return value
