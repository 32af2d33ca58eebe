"""Classes built while a model is loaded: a mixin of this package in front of a transformers class.

No module contains such a class under its name, so copies and pickles store the two base classes and build the class
again.

This module also has one such mixin, which fixes `model.dtype`. transformers takes the dtype of a model's first
floating-point parameter as the model's dtype, and `save_pretrained` writes it into config.json. That parameter is
normally the embedding. If the embedding is compressed, the next parameter decides, and in DeepSeek-V4 that one
belongs to a hyper-connection, which is float32 in every model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ciuic_cli.runtime.modules import CompressedEmbedding


class Mixin:
    """Base class of the mixins."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Protocol 2 and later start with a constructor call, which is replaced by one that finds the mixed class.
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        return _new_instance, type(self).__bases__, *reduced[2:]


@functools.cache
def mixed_class(mixin: Any, original: Any) -> Any:
    """The class with the bases (mixin, original); the same object for the same two classes."""
    # transformers finds a model's output class by the class name and writes the name into config.json.
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (mixin, original), names)


def original_class(instance: Mixin) -> Any:
    """The class that the object had before it got the mixin."""
    return type(instance).__bases__[1]


def _new_instance(mixin: Any, original: Any) -> Any:
    cls = mixed_class(mixin, original)
    return cls.__new__(cls)


def fix_model_dtype(model: Any) -> None:
    """Make `model.dtype` the dtype of the compressed embedding's rows, in place."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, CompressedEmbedding):
        return
    # OLMo has no floating-point parameter at all, and asking for the dtype fails.
    has_floats = any(parameter.is_floating_point() for parameter in model.parameters())
    if not has_floats or model.dtype != embedding.dtype_of_rows.dtype:
        original: Any = type(model)
        model.__class__ = mixed_class(_EmbeddingDtype, original)


class _EmbeddingDtype(Mixin):
    """Mixin for model classes whose dtype is that of the embedding's rows."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """The dtype of the rows that the embedding returns, and so of the activations."""
        dtype: torch.dtype = self.get_input_embeddings().dtype_of_rows.dtype
        return dtype
