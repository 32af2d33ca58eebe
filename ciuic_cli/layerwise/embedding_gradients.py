"""Gradients at the rows of the input embedding, from the gradients at the first layer's inputs.

In most models the first layer's input is the row times a constant factor, plus what does not depend on it. Where the
rows have another width (RemBERT, OPT-350M), the model projects them first: then the gradient goes backward through its
own code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ciuic_cli.layerwise.stand_ins import StandIn
from ciuic_cli.process.threads import one_thread


@one_thread()
def embedding_factor(hidden: torch.Tensor, rows: torch.Tensor) -> float:
    """The factor by which a model multiplies rows (b, t, n) of its embedding to get the first layer's input `hidden`.

    hidden: (b, t, n), or (b, t, streams, n) in DeepSeek-V4, which copies each row into several residual streams. 1 if
    it has another width.
    """
    if hidden.shape[-1] != rows.shape[-1] or hidden.numel() % rows.numel():
        return 1.0  # the first layer's input is something else than a row of the embedding
    rows = rows.unsqueeze(-2) if hidden.dim() > rows.dim() else rows
    rows = rows.expand_as(hidden)
    return float((hidden * rows).sum() / rows.square().sum().clamp_min(1e-30))


def scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """The gradient (t, n) at one sequence's rows, from that at the first layer's input (t, n) or (t, streams, n).

    A model with several residual streams copies the row into each: their gradients add up.
    """
    return factor * gradient.reshape(len(gradient), -1, gradient.shape[-1]).sum(1)


def projected(
    table: nn.Module, first_layer: StandIn, run: Callable[[], None], gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient (b, t, n) at the rows that `table` returns while `run` runs the model up to its first layer.

    Args:
        gradient: at the first layer's input, in its shape.
    """
    rows: list[torch.Tensor] = []

    def watch(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        rows.append(output.detach().requires_grad_())
        return rows[-1]

    handle = table.register_forward_hook(watch)
    try:
        with torch.enable_grad():
            run()
            assert first_layer.hidden is not None
            found = torch.autograd.grad(first_layer.hidden, rows[0], gradient.to(first_layer.hidden.dtype))
    finally:
        handle.remove()
    return found[0].float()
