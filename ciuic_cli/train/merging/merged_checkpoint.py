"""An artifact with an adapter folded in, read like a dense checkpoint: every read decodes what it returns, no more.

So `compress` codes a merged model again, and `export_dense` writes it, without a dense copy of it in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import Artifact, Blob, open_artifact, require_compressed
from ciuic_cli.artifact.tensors import decoded_pieces
from ciuic_cli.checkpoint.reader import Checkpoint
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.matrices import CpuMatrix
from ciuic_cli.runtime.products import rows_of
from ciuic_cli.train.merging.changes import Changes, LowRankChange


@dataclass(frozen=True)
class MergedCheckpoint(Checkpoint):
    """A checkpoint whose weights are the decoded ones of `blobs` plus `changes`, in float32.

    transposed: names of tensors that the model holds as (inputs, outputs), and the artifact as (outputs, inputs).
    adapter_files: files from which the changes come.
    """

    blobs: Mapping[str, Blob] = field(default_factory=dict)
    changes: Changes = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    adapter_files: tuple[Path, ...] = ()
    is_stored: ClassVar[bool] = False

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """As `Checkpoint.read`; compressed tensors in float32. Of a stack, `rows` are experts."""
        blob = self.blobs.get(name)
        if blob is None:
            return super().read(name, rows)
        changes = self.changes.get(name, {})
        transposed = name in self.transposed
        first, last = rows or (0, self.tensors[name].shape[0])
        with blob.matrices() as matrices:
            if len(blob.shape) == 3:
                value = torch.stack([_whole(matrices[e], changes.get(e)) for e in range(first, last)])
                return value.mT.contiguous() if transposed else value
            (matrix,), change = matrices, changes.get(None)
            if transposed:
                return _whole(matrix, change).T[first:last].contiguous()
            if rows is None:
                return _whole(matrix, change)
            value = rows_of(CpuMatrix(matrix), torch.arange(first, last))
            return value if change is None else value.add_(change.rows(first, last))

    def files(self) -> list[Path]:
        """The files of the artifact, and those of the adapter."""
        return [*super().files(), *self.adapter_files]


def merged_checkpoint(
    path: str | Path, changes: Changes, adapter_files: tuple[Path, ...] = ()
) -> MergedCheckpoint:
    """The artifact at `path` (a folder or hub id) with these changes.

    Raises:
        InputError: no artifact, or it is damaged.
        UsageError: a change belongs to no matrix of the artifact, or the artifact has pruned experts: they would come
            back as experts of zeros, which a router may choose.
    """
    artifact = open_artifact(path)
    classified = classify(meta_model(artifact))
    require_compressed(artifact, {name: tensor for name, (_, tensor) in classified.items()})
    require_fitting(artifact, changes)
    _refuse_pruned(artifact)
    transposed = frozenset(
        name for name, (role, _) in classified.items() if role.transposed and name in artifact.blobs
    )
    tensors = dict(artifact.tensors)
    for name, blob in artifact.blobs.items():
        shape = (*blob.shape[:-2], blob.shape[-1], blob.shape[-2]) if name in transposed else blob.shape
        tensors[name] = replace(blob.entry, dtype="F32", shape=shape)
    config = {key: value for key, value in artifact.config.items() if key != "quantization_config"}
    return MergedCheckpoint(
        artifact.folder, config, tensors, artifact.file_bytes,
        blobs=artifact.blobs, changes=changes, transposed=transposed, adapter_files=adapter_files,
    )  # fmt: skip


def merged_rows(artifact: Artifact, changes: Changes, name: str) -> Iterator[torch.Tensor]:
    """The rows of a compressed tensor plus its changes: in pieces, as `decoded_pieces` gives them."""
    blob, parts, done = artifact.blobs[name], changes.get(name, {}), 0
    for piece in decoded_pieces(blob):
        expert, begin = divmod(done, blob.shape[-2])
        change = parts.get(expert if len(blob.shape) == 3 else None)
        yield piece if change is None else piece.add_(change.rows(begin, begin + len(piece)))
        done += len(piece)


def require_fitting(artifact: Artifact, changes: Changes) -> None:
    """Raise UsageError for a change whose matrix the artifact does not have, or has in another shape."""
    for name, parts in changes.items():
        blob = artifact.blobs.get(name)
        for expert, change in parts.items():
            shape = (len(change.left), change.right.shape[1])
            if blob is None or blob.shape[-2:] != shape or (expert is None) != (len(blob.shape) == 2):
                raise UsageError(
                    f"the adapter changes a matrix of shape {shape} that the artifact does not have",
                    file=artifact.folder,
                    tensor=name,
                    remedy="merge it into the artifact that it was trained on",
                )


def _refuse_pruned(artifact: Artifact) -> None:
    for name, blob in artifact.blobs.items():
        if len(blob.shape) == 3:
            with blob.matrices() as experts:
                if any(expert.is_zero for expert in experts):
                    raise UsageError(
                        "the artifact has pruned experts, which cannot be coded again",
                        file=artifact.folder,
                        tensor=name,
                        remedy="merge with the method low-rank",
                    )


def _whole(matrix: PackedMatrix, change: LowRankChange | None) -> torch.Tensor:
    weight = decode_dense(matrix)
    if change is not None:
        weight += change.rows(0, len(weight))
    return weight
