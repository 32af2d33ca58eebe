"""Cache layers that grow in place.

transformers' dynamic cache copies all cached tokens at every step. Here a layer keeps memory for some tokens more than
it has, and a step writes its token behind the others.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

SPARE_SHARE = 8
"""The cached tokens divided by this are spare when memory is taken anew: memory grows by an eighth, and a token is
copied 8 times at most on average. Chosen."""

SPARE_TOKENS = 64
"""The least spare tokens. Chosen."""


class _Growing(DynamicLayer):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As DynamicLayer.update: the tensors [b, heads, tokens, columns] with the new tokens behind."""
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._grown("keys", self.keys, key_states, 2)
        self.values = self._grown("values", self.values, value_states, 2)
        return self.keys, self.values

    def reset(self) -> None:
        self.__dict__.pop("memory", None)
        super().reset()

    def _grown(self, name: str, old: torch.Tensor | None, new: torch.Tensor, dim: int) -> torch.Tensor:
        """`old` and behind it `new` along `dim`: a view of memory that belongs to this layer, if no graph needs a copy.

        The memory behind `old` is free: whoever has a shorter view of it (a cropped cache) is this layer itself.
        """
        if old is None or not old.numel():
            old = new.narrow(dim, 0, 0)
        if old.requires_grad or new.requires_grad:
            return torch.cat([old, new], dim=dim)
        memories: dict[str, torch.Tensor] = self.__dict__.setdefault("memory", {})
        memory = memories.get(name)
        have, needed = old.shape[dim], old.shape[dim] + new.shape[dim]
        if memory is None or not _begins(old, memory, dim) or memory.shape[dim] < needed:
            shape = list(new.shape)
            shape[dim] = needed + max(SPARE_TOKENS, needed // SPARE_SHARE)
            memory = memories[name] = new.new_empty(shape)
            memory.narrow(dim, 0, have).copy_(old)
        memory.narrow(dim, have, new.shape[dim]).copy_(new)
        return memory.narrow(dim, 0, needed)


class GrowingLayer(_Growing):
    """DynamicLayer that grows in place."""


class GrowingIndexedLayer(_Growing, DynamicIndexedLayer):
    """DynamicIndexedLayer (the cache of DeepSeek V3.2's indexer) that grows in place."""

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """As DynamicIndexedLayer.update_indexer: [b, tokens, columns]."""
        if torch.compiler.is_compiling():
            return super().update_indexer(indexer_key_states)
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        self.indexer_keys = self._grown("indexer_keys", self.indexer_keys, indexer_key_states, 1)
        return self.indexer_keys


_GROWING = {DynamicLayer: GrowingLayer, DynamicIndexedLayer: GrowingIndexedLayer}


def let_grow(cache: Any, layer: int) -> None:
    """Change the class of one layer of a transformers cache, in place. Layers of other kinds stay what they are."""
    layers = getattr(cache, "layers", ())
    if layer < len(layers) and type(layers[layer]) in _GROWING:
        layers[layer].__class__ = _GROWING[type(layers[layer])]


def _begins(view: torch.Tensor, memory: torch.Tensor, dim: int) -> bool:
    """Whether `view` is the beginning of `memory` along `dim`, and memory may be written now."""
    return (
        view.data_ptr() == memory.data_ptr()
        and view.stride() == memory.stride()
        and view.dtype == memory.dtype
        and view.device == memory.device
        and view.shape[:dim] == memory.shape[:dim]
        and (torch.is_inference_mode_enabled() or not memory.is_inference())
    )
