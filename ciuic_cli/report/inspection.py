"""Description of a checkpoint or artifact from its headers, for `ciuic inspect`.

Nothing is printed and no weight is decoded. The header of each compressed matrix is read too: it holds the bits per
weight of every row group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import (
    Artifact,
    Blob,
    open_artifact,
    require_compressed,
    require_counted,
    require_dense,
    require_expert_ids,
)
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.artifact.writer import REPORT
from ciuic_cli.checkpoint.expert_ids import expert_tables
from ciuic_cli.checkpoint.folder import locate, read_config, require_unreplaced
from ciuic_cli.checkpoint.formats import DTYPE_BITS, TORCH_DTYPES
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter, map_model
from ciuic_cli.checkpoint.mtp import PredictionLayers
from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint
from ciuic_cli.checkpoint.roles import Classification, classify, classify_mtp
from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.errors import InputError
from ciuic_cli.report.losses import Losses, read_losses
from ciuic_cli.runtime.swap import blob_slots, swap_modules

DENSE_BYTES = 2
"""Bytes per parameter of the dense model that ratios refer to (bf16)."""


@dataclass(frozen=True)
class TensorSummary:
    """One parameter, in a checkpoint or an artifact.

    stored: number format ("BF16", "FP4", "trellis"). bits: stored bits per weight, scales included. reason: why a
    parameter of an artifact is stored dense.

    For compressed parameters, widths: number of groups of 16 rows by bits per weight; rank: of the low-rank part (the
    largest of a stack); pruned: share of the row groups that have no bits; predicted_kl: nats per token, from the
    artifact's memory report if it has one.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    stored: str
    parameters: int
    bytes: int
    bits: float
    widths: dict[float, int] = field(default_factory=dict)
    rank: int = 0
    pruned: float = 0.0
    predicted_kl: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class RoleSummary:
    """All parameters of one role: their number, weights, bytes, bits per weight, and predicted KL if known."""

    role: str
    tensors: int
    parameters: int
    bytes: int
    bits: float
    predicted_kl: float | None = None


@dataclass(frozen=True)
class Description:
    """A checkpoint or an artifact.

    parameters: tied weights once, buffers not at all. file_bytes: of all safetensors files. bits_per_weight, ratio:
    8 `file_bytes` / `parameters`, and `parameters` at 2 bytes each over `file_bytes`. overhead_bytes: headers, buffers,
    and tensors that do not belong to the model. formats: weights by number format. components: by role, the largest
    first. rows: one per parameter. dropped, kept: sentences about multi-token-prediction layers. artifact: the
    `quantization_config`. losses: from the memory report; both None for checkpoints.
    """

    kind: str
    path: str
    architecture: str
    model_type: str
    parameters: int
    file_bytes: int
    files: int
    bits_per_weight: float
    ratio: float
    overhead_bytes: int
    formats: dict[str, int]
    components: tuple[RoleSummary, ...]
    rows: tuple[TensorSummary, ...]
    warnings: tuple[str, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    artifact: dict[str, Any] | None = None
    losses: Losses | None = None

    def as_dict(self, tensors: bool = False) -> dict[str, Any]:
        """For JSON. tensors: whether to include `rows`."""
        result = asdict(self)
        if not tensors:
            del result["rows"]
        if self.losses is not None:
            del result["losses"]["by_tensor"]
        return result


def describe(path: str | Path) -> Description:
    """Describe the checkpoint or artifact in a folder, or of a hub id, from its headers.

    Raises InputError as `open_checkpoint`, `map_model` and `open_artifact` do, and if the tensors of an artifact do not
    fit the model of its config.json.
    """
    folder = locate(path)
    with require_unreplaced(folder):
        if is_artifact(read_config(folder)):
            return _describe_artifact(open_artifact(folder))
        checkpoint = open_checkpoint(folder)
        return _describe_checkpoint(checkpoint, map_model(checkpoint))


def _describe_checkpoint(checkpoint: Checkpoint, model_map: ModelMap) -> Description:
    rows = [
        _source_row(checkpoint, parameter)
        for parameter in model_map.parameters.values()
        if parameter.tied_to is None and not parameter.buffer
    ]
    return summarise(
        "checkpoint",
        checkpoint.folder,
        checkpoint.config,
        rows,
        file_bytes=checkpoint.source_bytes,
        files=len(checkpoint.files()),
        warnings=model_map.warnings,
        mtp=model_map.mtp,
    )


def _source_row(checkpoint: Checkpoint, parameter: Parameter) -> TensorSummary:
    entries = [checkpoint.entry(name) for name in parameter.sources]
    scales = [
        checkpoint.entry(checkpoint.scales[name]) for name in parameter.sources if name in checkpoint.scales
    ]
    nbytes = sum(entry.nbytes for entry in entries + scales)
    stored = {
        entry.dtype if number_format is None else number_format.name
        for entry, number_format in zip(entries, map(checkpoint.format_of, parameter.sources), strict=True)
    }
    return TensorSummary(
        name=parameter.name,
        role=parameter.role,
        shape=parameter.shape,
        stored="+".join(sorted(stored)),
        parameters=parameter.numel,
        bytes=nbytes,
        bits=8 * nbytes / max(1, parameter.numel),
    )


def _describe_artifact(artifact: Artifact) -> Description:
    model = meta_model(artifact)
    classified = classify(model)
    ties = model.all_tied_weights_keys.keys() - artifact.tensors.keys()
    _require_complete(artifact, [name for name in classified if name not in ties])
    mtp_tensors = _mtp_tensors(artifact, set(classified))
    expected = {name: tensor for name, (_, tensor) in classified.items()}
    require_counted(artifact, sorted(artifact.tensors.keys() - expected.keys()), expected, artifact.mtp)
    require_dense(artifact, expected)
    require_compressed(artifact, expected)
    require_expert_ids(artifact, expert_tables(classified))
    _require_module_for_every_blob(artifact, model, set(classified))
    classifications = {name: classification for name, (classification, _) in classified.items()} | mtp_tensors
    rows = [
        _artifact_row(artifact, name, classification)
        for name, classification in classifications.items()
        if name not in ties and not classification.buffer
    ]
    unknown = [name for name in artifact.tensors if name not in classifications]
    warnings = (
        [f"{len(unknown)} tensor(s) are not part of the model: {', '.join(unknown[:3])}"] if unknown else []
    )
    losses = None
    if (artifact.folder / REPORT).exists():
        try:
            losses = read_losses(artifact.folder)
        except InputError as error:  # the weights can be used without the report
            warnings.append(f"no predicted loss is known: {REPORT}: {error.message}")
        else:
            rows = [replace(row, predicted_kl=losses.by_tensor.get(row.name)) for row in rows]
    return summarise(
        "artifact",
        artifact.folder,
        artifact.config,
        rows,
        file_bytes=artifact.file_bytes,
        files=len({entry.file for entry in artifact.tensors.values()}),
        warnings=warnings,
        mtp=artifact.mtp,
        quantization=artifact.quantization,
        losses=losses,
    )


def _require_complete(artifact: Artifact, names: Iterable[str]) -> None:
    """Raise InputError if the artifact lacks one of the model's parameters."""
    missing = [name for name in names if name not in artifact.tensors]
    if missing:
        raise InputError(
            f"{len(missing)} tensor(s) of the model are missing: {', '.join(missing[:3])}",
            file=artifact.folder,
            tensor=missing[0],
            remedy="the artifact is damaged; fetch or compress it again",
        )


def _require_module_for_every_blob(artifact: Artifact, model: Any, parameters: set[str]) -> None:
    """Swap the compressed modules into the meta model, as loading does; raises InputError if one does not fit."""
    blobs = {name: blob for name, blob in artifact.blobs.items() if name in parameters}
    try:
        swap_modules(model, blob_slots(model, blobs), model.dtype)
    except InputError as error:
        raise InputError(
            error.message, file=artifact.folder, tensor=error.tensor, remedy=error.remedy
        ) from error


def _mtp_tensors(artifact: Artifact, parameters: set[str]) -> dict[str, Classification]:
    """The tensors of kept multi-token-prediction layers. parameters: names of the model's own."""
    tensors = {}
    for name, entry in artifact.tensors.items():
        if name in parameters or not artifact.mtp.kept or not artifact.mtp.owns(name):
            continue
        blob, dtype = artifact.blobs.get(name), TORCH_DTYPES.get(entry.dtype)
        floating = blob is not None or dtype is None or dtype.is_floating_point
        shape = entry.shape if blob is None else blob.shape
        tensors[name] = classify_mtp(name, shape, floating=floating)
    return tensors


def _artifact_row(artifact: Artifact, name: str, classification: Classification) -> TensorSummary:
    blob = artifact.blobs.get(name)
    if blob is not None:
        return _compressed_row(name, classification.role, blob)
    entry = artifact.tensors[name]
    return TensorSummary(
        name=name,
        role=classification.role,
        shape=entry.shape,
        stored=entry.dtype,
        parameters=entry.numel,
        bytes=entry.nbytes,
        bits=float(DTYPE_BITS[entry.dtype]),
        reason=classification.reason or "not compressed",
    )


def _compressed_row(name: str, role: str, blob: Blob) -> TensorSummary:
    counts: Counter[float] = Counter()
    with blob.matrices() as matrices:
        for matrix in matrices:
            values, groups = np.unique(bits_of(matrix.header.row_bits), return_counts=True)
            for bits, count in zip(values.tolist(), groups.tolist(), strict=True):
                counts[bits if bits % 1 else int(bits)] += count
        rank = max(matrix.header.rank for matrix in matrices)
    parameters = int(np.prod(blob.shape))
    return TensorSummary(
        name=name,
        role=role,
        shape=blob.shape,
        stored="trellis",
        parameters=parameters,
        bytes=blob.entry.nbytes,
        bits=8 * blob.entry.nbytes / parameters,
        widths=dict(sorted(counts.items())),
        rank=rank,
        pruned=counts[0] / counts.total(),
    )


def summarise(
    kind: str,
    folder: Path,
    config: dict[str, Any],
    rows: list[TensorSummary],
    *,
    file_bytes: int,
    files: int,
    warnings: Iterable[str],
    mtp: PredictionLayers,
    quantization: dict[str, Any] | None = None,
    losses: Losses | None = None,
) -> Description:
    """The description that follows from the rows. Its sums by role and format are computed here."""
    parameters = sum(row.parameters for row in rows)
    formats: Counter[str] = Counter()
    for row in rows:
        formats[row.stored] += row.parameters
    architectures = config.get("architectures")
    return Description(
        kind=kind,
        path=str(folder),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        model_type=str(config.get("model_type", "")),
        parameters=parameters,
        file_bytes=file_bytes,
        files=files,
        bits_per_weight=8 * file_bytes / max(1, parameters),
        ratio=DENSE_BYTES * parameters / max(1, file_bytes),
        overhead_bytes=file_bytes - sum(row.bytes for row in rows),
        formats=dict(formats.most_common()),
        components=_by_role(rows),
        rows=tuple(rows),
        warnings=tuple(warnings),
        dropped=() if mtp.kept else tuple(mtp.sentences()),
        kept=tuple(mtp.sentences()) if mtp.kept else (),
        artifact=quantization,
        losses=losses,
    )


def _by_role(rows: Iterable[TensorSummary]) -> tuple[RoleSummary, ...]:
    """One summary per role, the largest first."""
    by_role: dict[str, list[TensorSummary]] = {}
    for row in rows:
        by_role.setdefault(row.role, []).append(row)
    summaries = []
    for role, members in by_role.items():
        parameters, nbytes = sum(row.parameters for row in members), sum(row.bytes for row in members)
        predicted = [row.predicted_kl for row in members if row.predicted_kl is not None]
        summaries.append(
            RoleSummary(
                role=role,
                tensors=len(members),
                parameters=parameters,
                bytes=nbytes,
                bits=8 * nbytes / max(1, parameters),
                predicted_kl=sum(predicted) if predicted else None,
            )
        )
    return tuple(sorted(summaries, key=lambda summary: -summary.bytes))
