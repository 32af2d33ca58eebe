"""Decodes single tensors of an artifact, without building the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import Artifact, open_artifact, require_compressed
from ciuic_cli.checkpoint.naming import Place, place_of
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.errors import InputError


def read_tensor(path: str | Path, name: str) -> torch.Tensor:
    """One tensor of an artifact, on the CPU.

    Compressed tensors are decoded to float32 in the shape that the model has; others keep their stored dtype and
    shape. A multi-token-prediction layer's copy of the embedding or head, and a tied head, is read where the shared
    tensor is stored.

    Args:
        path: the artifact's folder, or a hub id.
        name: of the tensor, as in the model (`model.layers.1.mlp.experts.gate_up_proj`) or as in the original's files
            (`model.layers.1.mlp.experts.3.gate_proj.weight`, of which only that expert is decoded).

    Raises:
        InputError: not an artifact, damaged, or no tensor of this name.
    """
    artifact = open_artifact(path)
    model = meta_model(artifact)
    classified = classify(model)
    require_compressed(artifact, {name: tensor for name, (_, tensor) in classified.items()})
    place = _place(artifact, model, name)
    stored = place.parameter
    if stored not in artifact.blobs:
        with safe_open(artifact.tensors[stored].file, framework="pt") as file:
            value = file.get_tensor(stored)
        return value if place.expert is None else _rows(value[place.expert], place.part)
    blob = artifact.blobs[stored]
    with blob.matrices() as matrices:
        chosen = matrices if place.expert is None else matrices[place.expert : place.expert + 1]
        decoded = [decode_dense(matrix) for matrix in chosen]
    value = torch.stack(decoded) if len(blob.shape) == 3 and place.expert is None else decoded[0]
    is_transposed = stored in classified and classified[stored][0].transposed
    return _rows(value.mT.contiguous() if is_transposed else value, place.part)


def _rows(value: torch.Tensor, part: tuple[int, int]) -> torch.Tensor:
    number, count = part
    return value if count == 1 else value.chunk(count)[number].clone()


def _place(artifact: Artifact, model: Any, name: str) -> Place:
    """Where the files hold the tensor that is called `name` in the model or in the original's files."""
    shared = {**dict(model.all_tied_weights_keys), **artifact.mtp.shared}
    place = Place(name)
    try:
        if shared.get(name, name) not in artifact.tensors:
            place = place_of(model, name) or place
    except InputError as error:
        raise InputError(error.message, file=artifact.folder, tensor=name, remedy=error.remedy) from error
    stored = place.parameter
    stored = stored if stored in artifact.tensors else shared.get(stored, stored)
    if stored not in artifact.tensors or not (place.expert or 0) < _first_size(artifact, stored):
        raise InputError(
            "the artifact has no such tensor",
            file=artifact.folder,
            tensor=name,
            remedy="`ciuic inspect --tensors` lists them",
        )
    return replace(place, parameter=stored)


def _first_size(artifact: Artifact, name: str) -> int:
    blob = artifact.blobs.get(name)
    return next(iter(artifact.tensors[name].shape if blob is None else blob.shape), 1)
