"""The model that an artifact's config.json describes, without weights: what its tensors have to fit."""

from __future__ import annotations

from typing import Any

import torch

from ciuic_cli.artifact.reader import Artifact
from ciuic_cli.checkpoint.architecture import build_config, build_meta_model, require_plausible


def meta_model(artifact: Artifact) -> Any:
    """transformers' model on the meta device; raises InputError for a config.json of which none can be built."""
    file = artifact.folder / "config.json"
    config = build_config(artifact.config, file)
    require_plausible(config, artifact.shapes, file)
    return build_meta_model(config, torch.bfloat16, file)
