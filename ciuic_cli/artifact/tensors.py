"""Decodes tensors of an artifact one at a time, without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import Artifact, Blob, open_artifact, require_compressed
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
    if name not in artifact.tensors:
        raise InputError(
            "the artifact has no such tensor",
            file=artifact.folder,
            tensor=name,
            remedy="`ciuic inspect --tensors` lists them; a tied head is stored as the embedding",
        )
    value = dense_tensor(artifact, name)
    is_transposed = name in classified and classified[name][0].transposed
    return value.mT.contiguous() if is_transposed else value


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
