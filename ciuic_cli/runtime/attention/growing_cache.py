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


class Part:
    """Cached keys or values: the first `count` tokens of some memory.

    Attributes:
        kind: (shape, strides, dtype, device, requires_grad) of the memory.
        address: of its first byte.
    """

    __slots__ = ("address", "count", "is_inference", "kind", "memory")

    def __init__(self, memory: torch.Tensor, count: int) -> None:
        self.memory, self.count = memory, count
        self.kind = (memory.shape, memory.stride(), memory.dtype, memory.device, memory.requires_grad)
        self.address = memory.data_ptr()
        self.is_inference = memory.is_inference()

    def __reduce__(self) -> Any:
        return Part, (self.memory, self.count)

    def has_room(self, more: int, dim: int) -> bool:
        """Whether `more` tokens may be written behind the cached ones now."""
        enough = self.kind[0][dim] >= self.count + more
        return enough and (not self.is_inference or torch.is_inference_mode_enabled())


class _Growing(DynamicLayer):
    """Keys and values are views of memory that may be longer. They are made when somebody asks for them."""

    def _get(self, name: str, dim: int = 2) -> torch.Tensor | None:
        part: Part | None = self.__dict__.get(f"_{name}")
        if part is None or part.memory.dim() <= dim:
            return None if part is None else part.memory
        return part.memory.narrow(dim, 0, part.count)

    def _set(self, name: str, value: torch.Tensor | None, dim: int = 2) -> None:
        part: Part | None = self.__dict__.get(f"_{name}")
        if value is None:
            self.__dict__[f"_{name}"] = None
        elif part is not None and _begins(value, part.memory, dim):
            part.count = value.shape[dim]
        else:
            self.__dict__[f"_{name}"] = Part(value, value.shape[dim] if value.dim() > dim else 0)

    keys = property(lambda self: self._get("keys"), lambda self, value: self._set("keys", value))
    values = property(lambda self: self._get("values"), lambda self, value: self._set("values", value))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As DynamicLayer.update: the tensors [b, heads, tokens, columns] with the new tokens behind."""
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._grow("keys", key_states)
        self._grow("values", value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Cached tokens."""
        part: Part | None = self.__dict__.get("_keys")
        return 0 if part is None or not self.is_initialized else part.count

    def _grow(self, name: str, new: torch.Tensor, dim: int = 2) -> None:
        """Put the tokens of `new` behind the cached ones.

        The memory behind the cached tokens is free: whoever has a shorter view of it (a cropped cache) is this layer
        itself.
        """
        old = self._get(name, dim)
        if old is None or not old.numel():
            old = new.narrow(dim, 0, 0)
            self.__dict__[f"_{name}"] = Part(old, 0)
        if old.requires_grad or new.requires_grad:
            self._set(name, torch.cat([old, new], dim=dim), dim)
            return
        more = new.shape[dim]
        part = self._reserve(name, more, dim)
        part.memory.narrow(dim, part.count, more).copy_(new)
        part.count += more

    def _reserve(self, name: str, more: int, dim: int = 2) -> Part:
        """The part, with room for `more` tokens in memory that may be written now."""
        part: Part = self.__dict__[f"_{name}"]
        if not part.has_room(more, dim):
            needed = part.count + more
            shape = list(part.memory.shape)
            shape[dim] = needed + max(SPARE_TOKENS, needed // SPARE_SHARE)
            memory = part.memory.new_empty(shape)
            memory.narrow(dim, 0, part.count).copy_(part.memory.narrow(dim, 0, part.count))
            self.__dict__[f"_{name}"] = part = Part(memory, part.count)
        return part


class GrowingLayer(_Growing):
    """DynamicLayer that grows in place."""

    def reserve(self) -> tuple[Part, Part]:
        """(keys, values), each [b, heads, tokens, columns]: the cached tokens, then room for one or more."""
        return self._reserve("keys", 1), self._reserve("values", 1)

    def take_reserved(self, tokens: int = 1) -> None:
        """Count tokens that the caller wrote behind the cached ones in the memory of `reserve`; -1 takes one back."""
        self.__dict__["_keys"].count += tokens
        self.__dict__["_values"].count += tokens


class GrowingIndexedLayer(_Growing, DynamicIndexedLayer):
    """DynamicIndexedLayer (the cache of DeepSeek V3.2's indexer) that grows in place."""

    indexer_keys = property(
        lambda self: self._get("indexer_keys", 1), lambda self, value: self._set("indexer_keys", value, 1)
    )

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """As DynamicIndexedLayer.update_indexer: [b, tokens, columns]."""
        if torch.compiler.is_compiling():
            return super().update_indexer(indexer_key_states)
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        self._grow("indexer_keys", indexer_key_states, 1)
        return self.indexer_keys


_PARTS = {"keys", "values", "indexer_keys"}
_GROWING = {DynamicLayer: GrowingLayer, DynamicIndexedLayer: GrowingIndexedLayer}


def let_grow(cache: Any, layer: int) -> None:
    """Change the class of one layer of a transformers cache, in place. Layers of other kinds stay what they are."""
    layers = getattr(cache, "layers", ())
    if layer < len(layers) and type(layers[layer]) in _GROWING:
        growing = layers[layer]
        growing.__class__ = _GROWING[type(growing)]
        for name in _PARTS & growing.__dict__.keys():
            setattr(growing, name, growing.__dict__.pop(name))  # from the attribute to the property


def _begins(view: torch.Tensor, memory: torch.Tensor, dim: int) -> bool:
    """Whether `view` is the beginning of `memory` along `dim`."""
    return (
        view.dim() == memory.dim()
        and view.data_ptr() == memory.data_ptr()
        and view.stride() == memory.stride()
        and view.dtype == memory.dtype
        and view.device == memory.device
        and view.shape[:dim] == memory.shape[:dim]
    )
