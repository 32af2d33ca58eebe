"""Keeps an adapter as the low-rank part of each compressed matrix: codes stay as they are, the factors are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.artifact import writer
from ciuic_cli.artifact.layout import StoredTensor, lay_out, stored_bytes
from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import Artifact, open_artifact
from ciuic_cli.artifact.schema import quantization_config
from ciuic_cli.checkpoint.reader import read_entry
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.sizes import packed_nbytes
from ciuic_cli.codecs.stack import ExpertStack, stack_header_nbytes
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.codecs.trellis import decode
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import ceil_div
from ciuic_cli.passes.rounding import round_without_feedback
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.train.merging.changes import Changes, LowRankChange
from ciuic_cli.train.merging.merged_checkpoint import require_fitting

FACTOR_BITS = 8
"""Bits per weight of the coded factors: the most that the format has."""
FACTOR_L = 16
"""Trellis state bits of the coded factors: the most that the format has. They are few, so their search is short."""


def write_low_rank(
    path: str | Path, changes: Changes, folder: Path, progress: Progress = no_progress
) -> tuple[int, int]:
    """Write the artifact at `path` with `changes` as low-rank parts into `folder`, one tensor in memory at a time.

    Checksums are not written: the caller may add files first.

    Returns:
        Bytes of the safetensors files before and after.

    Raises:
        InputError: no artifact, or it is damaged.
        UsageError: a change does not fit its matrix, or its rank is more than the format can store.
    """
    artifact = open_artifact(path)
    require_fitting(artifact, changes)
    shards = lay_out(_stored(artifact, changes))
    total, done = stored_bytes(shards), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("merging", done, total)

    writer.write_shards(shards, folder, _payload(artifact, changes), count)
    writer.write_index(shards, folder)
    weights = sum(
        tensor.numel() for name, (role, tensor) in classify(meta_model(artifact)).items()
        if not role.buffer and name in artifact.tensors
    )  # fmt: skip
    quantization = quantization_config(
        bits_per_weight=8 * total / weights, ratio=2 * weights / total, mtp=artifact.mtp
    )
    writer.write_config(folder, artifact.config, quantization)
    writer.copy_companions(artifact.folder, folder)
    return artifact.file_bytes, total


def with_low_rank(packed: PackedMatrix, change: LowRankChange) -> PackedMatrix:
    """The matrix plus a change, which becomes part of its low-rank part; a present part is coded again.

    Raises UsageError if the ranks add up to more than the smaller side of the matrix.
    """
    header = packed.header
    _require_room(header, change)
    left, right = change.left, change.right
    if header.input_scale is not None:
        right = right / input_factors(header.input_scale)
    if header.order is not None:
        left = left[torch.from_numpy(header.order)]
    # Both factors of a direction get one norm: the codes' relative error is then the same.
    norms = left.norm(dim=0).clamp_min(_TINY), right.norm(dim=1).clamp_min(_TINY)
    balance = (norms[1] / norms[0]).sqrt()
    left, right = left * balance, right / balance[:, None]
    rows = [left.T, right]
    if packed.lowrank is not None:
        old_right, old_left = (decode(factor, original_basis=True) for factor in packed.lowrank)
        rows = [torch.cat((old_left, rows[0])), torch.cat((old_right, rows[1]))]
    coded_left, coded_right = (
        round_without_feedback(part.contiguous(), FACTOR_BITS, L=FACTOR_L) for part in rows
    )
    return PackedMatrix(replace(header, lowrank=None), packed.codes, (coded_right, coded_left))


_TINY = 1e-20
"""Floor of a direction's norms, so that a direction of zeros stays zero (chosen)."""


def _require_room(header: MatrixHeader, change: LowRankChange) -> None:
    if header.rank + change.rank > min(header.rows, header.cols):
        raise UsageError(
            f"a matrix of {header.rows} x {header.cols} has no room for a low-rank part of rank "
            f"{header.rank + change.rank}",
            remedy="merge with the method requantize, or train with a lower --lora-r",
        )


def _bytes_with(header: MatrixHeader, change: LowRankChange | None) -> int:
    if change is None:
        return header.nbytes
    _require_room(header, change)
    rank = header.rank + change.rank
    bits = np.full(ceil_div(rank, TILE), FACTOR_BITS, np.uint8)
    return packed_nbytes(
        header.rows,
        header.cols,
        header.row_bits,
        packed_nbytes(rank, header.cols, bits) + packed_nbytes(rank, header.rows, bits),
        is_sorted=header.row_class is not None,
        has_input_scale=header.input_scale is not None,
    )


def _stored(artifact: Artifact, changes: Changes) -> list[StoredTensor]:
    tensors = []
    for name, entry in artifact.tensors.items():
        blob = artifact.blobs.get(name)
        if blob is None:
            tensors.append(StoredTensor(name, entry.dtype, entry.shape, entry.nbytes))
            continue
        parts = changes.get(name, {})
        with blob.matrices() as matrices:
            if len(blob.shape) == 3:
                size = stack_header_nbytes(len(matrices)) + sum(
                    _bytes_with(matrix.header, parts.get(expert)) for expert, matrix in enumerate(matrices)
                )
            else:
                size = _bytes_with(matrices[0].header, parts.get(None))
        tensors.append(StoredTensor(name, "U8", (size,), size))
    return tensors


def _payload(artifact: Artifact, changes: Changes) -> Callable[[str], bytes]:
    def payload(name: str) -> bytes:
        blob, parts = artifact.blobs.get(name), changes.get(name, {})
        if blob is None:
            tensor = read_entry(artifact.tensors[name])
            return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        with blob.matrices() as matrices:
            merged = [
                matrix if change is None else with_low_rank(matrix, change)
                for matrix, change in (
                    (matrix, parts.get(expert if len(blob.shape) == 3 else None))
                    for expert, matrix in enumerate(matrices)
                )
            ]
            return ExpertStack(tuple(merged)).to_bytes() if len(blob.shape) == 3 else merged[0].to_bytes()

    return payload
