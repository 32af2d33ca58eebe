"""Checkpoints, the models that are read: their files, number formats, and the role of every tensor in the model.

Reading order: `folder` (which files may be opened) -> `shards` (which of them hold the tensors) -> `header` (what is in
one file) -> `reader` (an opened `Checkpoint`, which reads tensors) -> `model_map` (a `ModelMap`, which reads parameters
of the model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ciuic_cli.checkpoint.model_map import ModelMap, Parameter, map_model
    from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "ModelMap", "Parameter", "map_model", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    # Lazy imports: the command line uses `folder` and must not import torch and transformers for it.
    if name in ("Checkpoint", "open_checkpoint"):
        from ciuic_cli.checkpoint import reader

        return getattr(reader, name)
    if name in ("ModelMap", "Parameter", "map_model"):
        from ciuic_cli.checkpoint import model_map

        return getattr(model_map, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
