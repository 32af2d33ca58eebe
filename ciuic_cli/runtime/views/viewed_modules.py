"""Modules that keep their own class and code while a weight of theirs is compressed.

Their code reads `self.weight`, and gets a view of the blob (`dense_views.py`). This serves every class that
`CompressedLinear`, `CompressedEmbedding` and `CompressedExperts` cannot replace, such as Conv1D or transposed experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ciuic_cli.runtime.mixed_classes import Mixin, mixed_class, original_class
from ciuic_cli.runtime.modules import BlobModule
from ciuic_cli.runtime.views.dense_views import Presentation


class ViewedModule(Mixin, BlobModule):
    """Mixin for a module with blobs that its own forward reads as dense weights.

    to_present: what `present` presents. Until then loading fills the parameters, and needs to see the blobs.
    """

    to_present: dict[str, Presentation]

    def present(self) -> None:
        """Let all code, the module's own included, read the blobs as dense weights."""
        self.presented = self.to_present

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward. Experts run one by one: other implementations of transformers gather all weights."""
        original: Any = original_class(self).forward
        if hasattr(self, "_apply_gate"):
            original = inspect.unwrap(original)
        return original(self, *args, **kwargs)


def with_blobs(
    module: nn.Module, blobs: Mapping[str, nn.Parameter], transposed: Mapping[str, bool], dtype: torch.dtype
) -> nn.Module:
    """The module, in place, with these parameters replaced by blobs.

    Args:
        transposed: parameter -> whether the model has it as (inputs, outputs).
        dtype: of the dense weights.
    """
    presented = {
        name: Presentation(tuple(module.get_parameter(name).shape), dtype, transposed[name]) for name in blobs
    }
    for name, blob in blobs.items():
        module._parameters[name] = blob
    original: Any = type(module)
    module.__class__ = mixed_class(ViewedModule, original)
    vars(module)["to_present"] = presented
    return module
