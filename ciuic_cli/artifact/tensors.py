"""One tensor of an artifact as numbers, without a model around it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
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
    blob = np.fromfile(entry.file, dtype=np.uint8, count=entry.nbytes, offset=entry.begin)
    if len(artifact.blobs[name].shape) == 3:
        stack = ExpertStack.from_buffer(blob, where=name)
        return torch.stack([decode_dense(expert) for expert in stack.experts])
    return decode_dense(PackedMatrix.from_buffer(blob, where=name))
