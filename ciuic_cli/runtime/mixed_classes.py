"""Classes built while a model is loaded: a mixin of this package in front of a transformers class.

No module contains such a class under its name, so copies and pickles store the two base classes and build the class
again. This module also has the mixin of whole models, `CompressedModel`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.artifact.writer import CHECKSUMS, REPORT, REPORT_PAGE
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import round_up
from ciuic_cli.runtime.modules import CompressedEmbedding


class Mixin:
    """Base class of the mixins."""

    _ciuic_original: Any
    """The class behind the mixin. Subclasses inherit it, such as those that FSDP2 gives to sharded modules."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Protocol 2 and later start with a constructor call, which is replaced by one that finds the mixed class.
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        return _new_instance, type(self).__bases__, *reduced[2:]


@functools.cache
def mixed_class(mixin: Any, original: Any) -> Any:
    """The class with the bases (mixin, original); the same object for the same two classes."""
    # transformers finds a model's output class by the class name and writes the name into config.json.
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_ciuic_original": original,
    }
    return type(original.__name__, (mixin, original), names)


def original_class(instance: Mixin) -> Any:
    """The class that the object had before it got the mixin."""
    return type(instance)._ciuic_original


def _new_instance(mixin: Any, original: Any) -> Any:
    cls = mixed_class(mixin, original)
    return cls.__new__(cls)


class CompressedModel(Mixin):
    """Mixin for the classes of models: what transformers' own methods get wrong for a model with compressed weights."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """The dtype of the rows that the embedding returns, and so of the activations.

        transformers takes that of the first floating-point parameter, and `save_pretrained` writes it into config.json.
        If the embedding is compressed, that may be any other: in DeepSeek-V4 it belongs to a hyper-connection, which is
        float32 in every model. OLMo has none.
        """
        embedding = self.get_input_embeddings()
        if isinstance(embedding, CompressedEmbedding):
            rows: torch.dtype = embedding.dtype_of_rows.dtype
            return rows
        others: torch.dtype = super().dtype  # type: ignore[misc]
        return others

    def resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """As transformers', if the number of tokens stays the same. Raises UsageError if it would change."""
        tokens = self.get_input_embeddings().weight.shape[0]
        wanted = tokens if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = round_up(wanted, pad_to_multiple_of)
        if wanted != tokens:
            raise UsageError(
                f"a compressed model keeps its {tokens} tokens; it cannot be resized to {wanted}",
                remedy="resize the original, save it with save_pretrained, and compress that folder",
            )
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *args, **options)  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        """As transformers'. Reports and checksums of an artifact in that folder, which describe other files, go."""
        super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]
        if (Path(save_directory) / CHECKSUMS).is_file():
            for name in (CHECKSUMS, REPORT, REPORT_PAGE):
                (Path(save_directory) / name).unlink(missing_ok=True)


def adapt_model(model: Any) -> None:
    """Give a transformers model the mixin `CompressedModel`, in place. Other modules are not changed."""
    if hasattr(model, "save_pretrained") and not isinstance(model, CompressedModel):
        original: Any = type(model)
        model.__class__ = mixed_class(CompressedModel, original)
