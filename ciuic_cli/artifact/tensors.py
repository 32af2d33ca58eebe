"""Decodes single tensors of an artifact, without building the model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import open_artifact, require_compressed
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.errors import InputError


def read_tensor(path: str | Path, name: str) -> torch.Tensor:
    """One tensor of an artifact, on the CPU.

    Compressed tensors are decoded to float32 in the shape that the model has; others keep their stored dtype and
    shape. A multi-token-prediction layer's copy of the embedding or head is read where the shared tensor is stored.

    Args:
        path: the artifact's folder, or a hub id.
        name: of the tensor, as in the model.

    Raises:
        InputError: not an artifact, damaged, or no tensor of this name.
    """
    artifact = open_artifact(path)
    classified = classify(meta_model(artifact))
    require_compressed(artifact, {name: tensor for name, (_, tensor) in classified.items()})
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
    value = torch.stack(decoded) if len(blob.shape) == 3 else decoded[0]
    is_transposed = name in classified and classified[name][0].transposed
    return value.mT.contiguous() if is_transposed else value
