"""The model of an artifact's config.json, without weights, for comparing its shapes with the stored tensors."""

from __future__ import annotations

from typing import Any

import torch

from ciuic_cli.artifact.reader import Artifact
from ciuic_cli.checkpoint.architecture import build_config, build_meta_model, require_plausible


def meta_model(artifact: Artifact) -> Any:
    """The transformers model on the meta device. Raises InputError if it cannot be built from the config.json."""
    file = artifact.folder / "config.json"
    config = build_config(artifact.config, file)
    require_plausible(config, artifact.shapes, file)
    return build_meta_model(config, torch.bfloat16, file)
