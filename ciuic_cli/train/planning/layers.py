"""Models with fewer layers: the layers of a model repeat, so two short models tell what a deep one needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ciuic_cli.integers import round_up

REPEATED = 3
"""Least number of equal layers in a short model: one that has such layers on both sides, and its neighbours."""


@dataclass(frozen=True)
class Depths:
    """The numbers of layers of two short models, `run`, and of the whole one. period: layers after which kinds repeat.

    The longer of the two short models has one period more.
    """

    run: tuple[int, int]
    whole: int
    period: int

    def beyond(self, few: int, more: int) -> int:
        """What the whole model has, if the short ones have `few` and `more`; not negative."""
        return max(0, few + (self.whole - self.run[0]) // self.period * (more - few))


def depths_of(model: Any, every: int) -> Depths | None:
    """The depths from which memory is extrapolated; None if the layers are few, or do not repeat.

    Args:
        model: of transformers. every: layers between two checkpoints of activations.
    """
    found = _stack(model)
    if found is None:
        return None
    _, _, layers = found
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds = [(kind, _shapes(layer)) for kind, layer in zip(types, layers, strict=False)]
    candidates = [
        Depths((depth, depth + period), len(layers), period)
        for period, depth in _repetitions(kinds, every)
        if depth + period < len(layers)
    ]
    return min(candidates, key=lambda one: one.run, default=None)


def shortened(model: Any, depth: int) -> Any:
    """The model with its first `depth` layers only, changed in place."""
    found = _stack(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no single stack of layers")
    owner, name, layers = found
    owner._modules[name] = nn.ModuleList(list(layers)[:depth])
    return model


def _repetitions(kinds: list[Any], every: int) -> Iterator[tuple[int, int]]:
    """Periods, in multiples of `every`, and the least depth with REPEATED layers and a period after the other ones."""
    count = len(kinds)
    for period in range(every, count // 2 + 1, every):
        different = [place for place in range(count - period) if kinds[place] != kinds[place + period]]
        start = different[-1] + 1 if different else 0
        yield period, start + (count - start) % period + round_up(REPEATED, period)


def _stack(model: Any) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The list of the decoder's layers, with its owner and name; None if there is not exactly one."""
    found = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]
    return found[0] if len(found) == 1 else None


def _shapes(layer: nn.Module) -> tuple[Any, ...]:
    """Names, shapes and dtypes of parameters. Codes count without their number, which differs from layer to layer."""
    return tuple(
        (name, None if tensor.dtype == torch.uint8 else tuple(tensor.shape), tensor.dtype)
        for name, tensor in layer.named_parameters()
    )
