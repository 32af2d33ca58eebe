"""One tensor of an artifact as numbers, without a model around it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import open_artifact, require_compressed
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.errors import InputError


def read_tensor(path: str | Path, name: str) -> torch.Tensor:
    """A tensor of an artifact by its name: coded ones decoded, as (rows, cols) or (experts, rows, cols) float32.

    Others come as they are stored. A multi-token-prediction layer's copy of the embedding or head is read where it
    is stored.

    Args:
        path: the artifact's folder, or a hub id.

    Raises:
        InputError: not an artifact, a damaged one, or one without such a tensor.
    """
    artifact = open_artifact(path)
    require_compressed(artifact, meta_model(artifact).state_dict())
    name = artifact.mtp.shared.get(name, name)
    entry = artifact.tensors.get(name)
    if entry is None:
        raise InputError(
            "the artifact has no such tensor",
            file=artifact.folder,
            tensor=name,
            remedy="`ciuic inspect --tensors` lists them; a tied head is stored as the embedding",
        )
    if name not in artifact.blobs:
        with safe_open(entry.file, framework="pt") as file:
            return file.get_tensor(name)
    blob = artifact.blobs[name]
    with blob.matrices() as matrices:
        decoded = [decode_dense(matrix) for matrix in matrices]
    return torch.stack(decoded) if len(blob.shape) == 3 else decoded[0]
