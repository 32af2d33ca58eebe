"""Classes made while a model is loaded: a class of transformers with a mixin of ours before it.

No module holds such a class by name. Copies and pickles therefore store the two classes it was made of and make it
again.

One mixin is here: the dtype that a model computes in. transformers takes the dtype of a model's first floating-point
parameter as the model's dtype, and `save_pretrained` writes it into config.json. That parameter is the embedding,
unless it is compressed; then the next parameter answers, and in DeepSeek-V4 that one belongs to a hyper-connection,
which is float32 in every model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ciuic_cli.runtime.modules import CompressedEmbedding


class Mixin:
    """Base class of our mixins."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        how: Any = super().__reduce_ex__(max(2, protocol))
        return _new, type(self).__bases__, *how[2:]


@functools.cache
def made(mixin: Any, own: Any) -> Any:
    """The class (mixin, own); the same object for the same two classes."""
    # The name stays: transformers looks up a model's output class by it and writes it into config.json.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (mixin, own), names)


def own_class(thing: Mixin) -> Any:
    """The class that the object had before the mixin."""
    return type(thing).__bases__[1]


def _new(mixin: Any, own: Any) -> Any:
    kind = made(mixin, own)
    return kind.__new__(kind)


def settle_dtype(model: Any) -> None:
    """Make `model.dtype` the dtype of the compressed embedding's rows."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, CompressedEmbedding) and model.dtype != embedding.dtype_of_rows.dtype:
        own: Any = type(model)
        model.__class__ = made(_DtypeOfRows, own)


class _DtypeOfRows(Mixin):
    """Mixin for model classes."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """The dtype of the rows that the embedding returns, and so of the activations."""
        found: torch.dtype = self.get_input_embeddings().dtype_of_rows.dtype
        return found
