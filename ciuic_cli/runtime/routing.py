"""Pruned experts are never chosen: the router's scores for them are masked.

An expert whose down projection is all zeros (every row group has K = 0) contributes nothing; a token that is sent
there loses that share of its output. The blobs alone say which experts these are, so nothing else is stored, and
masking them again is harmless. Two kinds of routers occur in transformers 5:

- with `e_score_correction_bias`, added to the scores only for the choice (DeepSeek-V3, V3.2, V4): the bias of a
  pruned expert becomes NEVER;
- without: its logit does, by a further input that is always 1 (DeepSeek-V2, Mixtral, Qwen). The softmax then runs
  over the experts that are left.

V4's hash routers look experts up in a table by token and have no choice to mask; `planning` removes no expert there.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.runtime.mixed_classes import Mixin, made, own_class

NEVER = -1e4
"""Far below every score and logit, and exact in half precision."""


def pruned_experts(down: Sequence[PackedMatrix]) -> torch.Tensor:
    """Mask (E,) of the experts whose down projection is all zeros, low-rank part included."""
    # On the CPU: while transformers builds a model, tensors come into being on the meta device.
    return torch.tensor([expert.is_zero for expert in down], device="cpu")


def mask_for(pruned: torch.Tensor, *, top_k: int, groups: int = 1, chosen_groups: int = 1) -> torch.Tensor:
    """The pruned experts that can be masked: (E,) bool.

    A router chooses `top_k` experts from the best `chosen_groups` of `groups` groups, and ranks a group by its best
    two. Each group must keep as many as may be chosen from it; one that would not is not masked at all.
    """
    needed = max(2 if groups > 1 else 1, -(-top_k // chosen_groups))
    mask = pruned.clone().reshape(groups, -1)
    mask[(~mask).sum(1) < needed] = False
    return mask.reshape(-1)


def mask_router(router: nn.Module, pruned: torch.Tensor) -> None:
    """Keep a router of transformers, in place, from choosing the experts in `pruned` (E,), as far as it has a choice.

    Called twice with the same experts, the second changes nothing.
    """
    if not _chooses(router) or not pruned.any():
        return
    groups = int(getattr(router, "num_group", None) or 1)
    chosen = int(getattr(router, "topk_group", None) or 1)
    if getattr(router, "topk_method", None) == "greedy":
        groups = chosen = 1
    mask = mask_for(pruned, top_k=int(router.top_k), groups=groups, chosen_groups=chosen)  # type: ignore[arg-type]
    bias = getattr(router, "e_score_correction_bias", None)
    if isinstance(bias, torch.Tensor):
        bias.data[mask.to(bias.device)] = NEVER
        return
    weight = router.get_parameter("weight")
    place = "cpu" if weight.is_meta else weight.device  # meta: offloaded, and brought for each call
    column = torch.where(mask, NEVER, 0.0).to(device=place, dtype=weight.dtype)
    router.register_buffer("masked_logits", column[:, None], persistent=False)
    if not isinstance(router, _MaskedLogits):
        own: Any = type(router)
        _become(router, made(_MaskedLogits, own))


def _chooses(router: nn.Module) -> bool:
    """Whether it is a router as described above; of any other kind nothing is known, and it is left alone."""
    return hasattr(router, "top_k") and hasattr(router, "hidden_dim") and not hasattr(router, "tid2eid")


def unmask_router(router: nn.Module) -> None:
    """Give a router without a bias its own class back (a bias comes back with the router's weights)."""
    if isinstance(router, _MaskedLogits):
        del router.masked_logits
        _become(router, own_class(router))


def _become(router: nn.Module, kind: type) -> None:
    """Change its class; a forward that accelerate keeps behind its hooks (models on several devices) changes too."""
    router.__class__ = kind
    if "_old_forward" in vars(router):
        vars(router)["_old_forward"] = types.MethodType(kind.forward, router)  # type: ignore[attr-defined]


def routers(model: nn.Module, pruned: Mapping[str, torch.Tensor]) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """The router beside each experts module named in `pruned`, with its pruned experts."""
    for experts, mask in pruned.items():
        block = model.get_submodule(experts.rpartition(".")[0])
        for name in ("gate", "router"):
            router = getattr(block, name, None)
            if isinstance(router, nn.Module):
                yield router, mask


def masking(pruned: Mapping[str, torch.Tensor]) -> Callable[[str, nn.Module], AbstractContextManager[None]]:
    """`masking(pruned)(prefix, layer)` is a context in which the layer's routers are masked.

    pruned: mask (E,) by name of the experts module in the whole model.
    """

    @contextmanager
    def masked(prefix: str, layer: nn.Module) -> Iterator[None]:
        own = {name.removeprefix(prefix): mask for name, mask in pruned.items() if name.startswith(prefix)}
        found = list(routers(layer, own))
        for router, mask in found:
            mask_router(router, mask)
        try:
            yield
        finally:
            for router, _ in found:
                unmask_router(router)

    return masked


class _MaskedLogits(Mixin):
    """Mixed into a router's class: its logits are those of W x plus `masked_logits`."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the router's own; one more input, always 1, with `masked_logits` (E, 1) as its weights."""
        own = own_class(self)
        wider = copy.copy(self)
        wider.__class__ = own
        fields = vars(wider)
        fields["_parameters"] = {name: p for name, p in self._parameters.items() if name != "weight"}
        fields["weight"] = torch.cat([self.weight, self.masked_logits.to(self.weight)], dim=1)
        fields["hidden_dim"] = self.hidden_dim + 1
        flat = hidden_states.reshape(-1, self.hidden_dim)
        ones = torch.ones(len(flat), 1, dtype=flat.dtype, device=flat.device)
        return own.forward(wider, torch.cat([flat, ones], dim=1), *args, **kwargs)
