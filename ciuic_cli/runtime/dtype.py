"""The dtype that a model computes in, also where its embedding is compressed.

transformers calls the dtype of a model's first floating parameter the model's own, and `save_pretrained` writes it
into config.json. That is the embedding's, unless it is a blob; then the next one answers, and DeepSeek-V4 keeps that
one, of a hyper-connection, in float32 whatever the model computes in.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ciuic_cli.runtime.modules import CompressedEmbedding


def settle_dtype(model: Any) -> None:
    """Let `model.dtype` of a transformers model be that of its compressed embedding's rows, where it is not."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, CompressedEmbedding) and model.dtype != embedding.dtype_of_rows.dtype:
        own: Any = type(model)
        model.__class__ = _class_with_dtype(own)


class _DtypeOfRows:
    """Mixed into a model's class."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """Of the rows that the embedding gives, and so of the activations."""
        found: torch.dtype = self.get_input_embeddings().dtype_of_rows.dtype
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and pickles: the class, which no module has by its name, is made again."""
        how: Any = super().__reduce_ex__(max(2, protocol))
        return _new, (type(self).__mro__[2],), *how[2:]


@functools.cache
def _class_with_dtype(own: Any) -> Any:
    # Under the same name: transformers looks up by it what a model can return, and writes it into config.json.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (_DtypeOfRows, own), names)


def _new(own: Any) -> Any:
    kind = _class_with_dtype(own)
    return kind.__new__(kind)
