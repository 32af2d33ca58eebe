"""What comes in: files and headers, number formats, and which tensor plays which role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ciuic_cli.checkpoint.model_map import ModelMap, Parameter, map_model
    from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "ModelMap", "Parameter", "map_model", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    # The imports are lazy: reading a header must not import torch and transformers.
    if name in ("Checkpoint", "open_checkpoint"):
        from ciuic_cli.checkpoint import reader

        return getattr(reader, name)
    if name in ("ModelMap", "Parameter", "map_model"):
        from ciuic_cli.checkpoint import model_map

        return getattr(model_map, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
