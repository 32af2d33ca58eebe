"""Stand-ins for decoder layers: they record the layers' inputs and the arguments with which the model calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ciuic_cli.process.threads import one_thread


class StandIn(nn.Module):
    """Takes a decoder layer's place: records the call's arguments and returns the hidden state, or `replacement`.

    Attributes that the model's own forward reads from the layer come from the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: the layer's weights must not be loaded
        self.hidden: torch.Tensor | None = None
        self.kwargs: dict[str, Any] = {}
        self.replacement: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            raise TypeError("decoder layers are expected to take keyword arguments besides the hidden state")
        self.hidden, self.kwargs = hidden, kwargs
        return hidden if self.replacement is None else self.replacement


@one_thread()
def embedding_factor(hidden: torch.Tensor, rows: torch.Tensor) -> float:
    """The factor by which a model multiplies rows (b, t, n) of its embedding to get the first layer's input `hidden`.

    hidden: (b, t, n), or (b, t, streams, n) in DeepSeek-V4, which copies each row into several residual streams.
    """
    rows = rows.unsqueeze(-2) if hidden.dim() > rows.dim() else rows
    rows = rows.expand_as(hidden)
    return float((hidden * rows).sum() / rows.square().sum().clamp_min(1e-30))


def is_other_tensor(value: Any, other: Any) -> bool:
    """Whether `value` is a tensor that differs from `other`.

    DeepSeek-V4 passes such arguments to its layers: the tokens.
    """
    return isinstance(value, torch.Tensor) and value is not other and not torch.equal(value, other)
