"""The dtype that a model computes in, also where its embedding is compressed.

transformers calls the dtype of a model's first floating parameter the model's own, and `save_pretrained` writes it
into config.json. That is the embedding's, unless it is a blob; then the next one answers, and DeepSeek-V4 keeps that
one, of a hyper-connection, in float32 whatever the model computes in.
"""

from __future__ import annotations

from typing import Any

import torch

from ciuic_cli.runtime.made import Mixin, made
from ciuic_cli.runtime.modules import CompressedEmbedding


def settle_dtype(model: Any) -> None:
    """Let `model.dtype` of a transformers model be that of its compressed embedding's rows, where it is not."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, CompressedEmbedding) and model.dtype != embedding.dtype_of_rows.dtype:
        own: Any = type(model)
        model.__class__ = made(_DtypeOfRows, own)


class _DtypeOfRows(Mixin):
    """Mixed into a model's class."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """Of the rows that the embedding gives, and so of the activations."""
        found: torch.dtype = self.get_input_embeddings().dtype_of_rows.dtype
        return found
