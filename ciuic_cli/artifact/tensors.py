"""Decodes tensors of an artifact one at a time, without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import Artifact, Blob, open_artifact, require_compressed
from ciuic_cli.checkpoint.compressible import file_shape
from ciuic_cli.checkpoint.naming import Place, place_of
from ciuic_cli.checkpoint.reader import read_entry
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.errors import InputError

_PIECE_WEIGHTS = 1 << 20
"""Weights that are decoded at a time; bounds scratch memory to about 12 MB. Chosen, not tuned."""


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

    def in_model(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(file_shape(model, stored, tuple(value.shape)))

    if stored not in artifact.blobs:
        value = read_entry(artifact.tensors[stored])
        return in_model(value) if place.expert is None else _rows(value[place.expert], place.part)
    blob = artifact.blobs[stored]
    with blob.matrices() as matrices:
        chosen = matrices if place.expert is None else matrices[place.expert : place.expert + 1]
        decoded = [decode_dense(matrix) for matrix in chosen]
    value = torch.stack(decoded) if len(blob.shape) == 3 and place.expert is None else decoded[0]
    is_transposed = stored in classified and classified[stored][0].transposed
    return in_model(_rows(value.mT.contiguous() if is_transposed else value, place.part))


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


def dense_tensor(artifact: Artifact, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A stored tensor of an opened artifact, on the CPU; a compressed one is decoded.

    Memory peaks at the result, the tensor's codes and a few MB.

    Args:
        name: of a tensor in `artifact.tensors`.
        dtype: of a decoded tensor; a tensor that is stored dense keeps its own.

    Returns:
        The tensor in its stored shape; a decoded one in the blob's, (rows, cols) or (experts, rows, cols).
    """
    blob = artifact.blobs.get(name)
    if blob is None:
        return read_entry(artifact.tensors[name])
    value = torch.empty(blob.shape, dtype=dtype, device="cpu")
    rows, begin = value.view(-1, blob.shape[-1]), 0
    for piece in decoded_pieces(blob):
        rows[begin : begin + len(piece)] = piece
        begin += len(piece)
    return value


def decoded_pieces(blob: Blob) -> Iterator[torch.Tensor]:
    """The decoded rows of a blob in order, float32 (at most so many rows, cols); of a stack, expert after expert."""
    step = max(TILE, _PIECE_WEIGHTS // blob.shape[-1] // TILE * TILE)
    with blob.matrices() as matrices:
        for matrix in matrices:
            for begin in range(0, matrix.rows, step):
                yield decode_dense(matrix, begin, min(begin + step, matrix.rows))
