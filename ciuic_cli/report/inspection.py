"""What a checkpoint or an artifact contains, from its headers, and whether an artifact's bytes are intact.

The pure part of `ciuic inspect`: folders in, dataclasses out; nothing is printed and no weight is decoded.
Of an artifact the first bytes of each compressed matrix are read too: they say which rows have how many bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import (
    Artifact,
    Blob,
    open_artifact,
    require_compressed,
    require_dense,
    require_expert_ids,
)
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.artifact.writer import REPORT
from ciuic_cli.checkpoint.expert_ids import expert_tables
from ciuic_cli.checkpoint.folder import locate, read_config, require_unreplaced
from ciuic_cli.checkpoint.formats import DTYPE_BITS, TORCH_DTYPES
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.mtp import PredictionLayers
from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint
from ciuic_cli.checkpoint.roles import Classification, classify, classify_mtp
from ciuic_cli.codecs.packing import bits_of
from ciuic_cli.errors import InputError
from ciuic_cli.report.losses import Losses, read_losses
from ciuic_cli.runtime.swap import blob_slots, swap_modules

DENSE_BYTES = 2
"""Bytes per parameter of the dense model that ratios refer to (bf16)."""


@dataclass(frozen=True)
class Row:
    """One parameter: `stored` names its number format, `bits` are stored bits per weight, scales included.

    Of a compressed one: `widths` counts its groups of 16 rows by bits per weight, `rank` is that of its
    low-rank part (the largest of a stack), `pruned` the share of its row groups that have no bits; `predicted_kl` is
    what it is predicted to lose, if the artifact's report says so. `reason` says why a parameter of an artifact is
    stored dense.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    stored: str
    parameters: int
    bytes: int
    bits: float
    widths: dict[float, int]
    rank: int = 0
    pruned: float = 0.0
    predicted_kl: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Component:
    """All parameters of one role: how many tensors and weights, their bytes, and bits per weight; predicted loss."""

    role: str
    tensors: int
    parameters: int
    bytes: int
    bits: float
    predicted_kl: float | None = None


@dataclass(frozen=True)
class Description:
    """A checkpoint or an artifact. `bits_per_weight` and `ratio` count all bytes of the safetensors files.

    `parameters` counts tied weights once and buffers not at all; `ratio` is `parameters` at 2 bytes each over
    `file_bytes`. `overhead_bytes` are headers, buffers and tensors that are no part of the model. `losses` are those
    of an artifact with a report.
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
    components: tuple[Component, ...]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    artifact: dict[str, Any] | None = None
    losses: Losses | None = None

    def as_dict(self, tensors: bool = False) -> dict[str, Any]:
        """For JSON; the rows only where `tensors`."""
        result = asdict(self)
        if not tensors:
            del result["rows"]
        if self.losses is not None:
            del result["losses"]["by_tensor"]
        return result


def describe(path: str | Path) -> Description:
    """Describe the checkpoint or artifact in a folder (or of a hub id) from its headers.

    Raises InputError for whatever makes it unreadable (see `open_checkpoint`, `map_model`, `open_artifact`).
    """
    folder = locate(path)
    with require_unreplaced(folder):
        if is_artifact(read_config(folder)):
            return _describe_artifact(open_artifact(folder))
        checkpoint = open_checkpoint(folder)
        return _describe_checkpoint(checkpoint, map_model(checkpoint))


def _describe_checkpoint(checkpoint: Checkpoint, model_map: ModelMap) -> Description:
    rows = []
    for parameter in model_map.parameters.values():
        if parameter.tied_to is not None or parameter.buffer:
            continue
        entries = [checkpoint.entry(name) for name in parameter.sources]
        scales = [
            checkpoint.entry(checkpoint.scales[name])
            for name in parameter.sources
            if name in checkpoint.scales
        ]
        nbytes = sum(entry.nbytes for entry in entries + scales)
        fp4 = any(checkpoint.is_fp4(name) for name in parameter.sources)
        stored = "FP4" if fp4 else "+".join(sorted({entry.dtype for entry in entries}))
        rows.append(
            Row(
                parameter.name,
                parameter.role,
                parameter.shape,
                stored,
                parameter.numel,
                nbytes,
                8 * nbytes / max(1, parameter.numel),
                {},
            )
        )
    return _summarise(
        "checkpoint",
        checkpoint.folder,
        checkpoint.config,
        rows,
        checkpoint.source_bytes,
        len(checkpoint.files()),
        model_map.warnings,
        model_map.mtp,
    )


def _describe_artifact(artifact: Artifact) -> Description:
    model = meta_model(artifact)
    classified = classify(model)
    ties = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if target not in artifact.tensors
    }
    missing = [name for name in classified if name not in artifact.tensors and name not in ties]
    if missing:
        raise InputError(
            f"{len(missing)} tensor(s) of the model are missing: {', '.join(missing[:3])}",
            file=artifact.folder,
            tensor=missing[0],
            remedy="the artifact is damaged; fetch or compress it again",
        )
    predictors = _predictors(artifact, set(classified))
    expected = {name: tensor for name, (_, tensor) in classified.items()}
    require_dense(artifact, expected)
    require_compressed(artifact, expected)
    require_expert_ids(artifact, expert_tables(classified))
    _require_places(artifact, model, set(classified))
    rows = []
    for name, (found, _) in classified.items():
        if name in ties or found.buffer:
            continue
        blob = artifact.blobs.get(name)
        rows.append(_dense_row(artifact, name, found) if blob is None else _packed_row(name, found, blob))
    for name, found in predictors.items():
        if found.buffer:
            continue
        blob = artifact.blobs.get(name)
        rows.append(_dense_row(artifact, name, found) if blob is None else _packed_row(name, found, blob))
    unknown = [name for name in artifact.tensors if name not in classified and name not in predictors]
    warnings = (
        [f"{len(unknown)} tensor(s) are not part of the model: {', '.join(unknown[:3])}"] if unknown else []
    )
    losses = None
    if (artifact.folder / REPORT).exists():
        try:
            losses = read_losses(artifact.folder)
        except InputError as error:  # the report is for people, the weights can do without
            warnings.append(f"no predicted loss is known: {REPORT}: {error.message}")
        else:
            rows = [replace(row, predicted_kl=losses.by_tensor.get(row.name)) for row in rows]
    files = len({entry.file for entry in artifact.tensors.values()})
    return _summarise(
        "artifact",
        artifact.folder,
        artifact.config,
        rows,
        artifact.file_bytes,
        files,
        warnings,
        artifact.mtp,
        artifact.quantization,
        losses,
    )


def _require_places(artifact: Artifact, model: Any, own: set[str]) -> None:
    """Put the compressed modules into the meta model as loading does; raises InputError where they have no place."""
    blobs = {name: blob for name, blob in artifact.blobs.items() if name in own}
    try:
        swap_modules(model, blob_slots(model, blobs), model.dtype)
    except InputError as error:
        raise InputError(
            error.message, file=artifact.folder, tensor=error.tensor, remedy=error.remedy
        ) from error


def _predictors(artifact: Artifact, model: set[str]) -> dict[str, Classification]:
    """The tensors of kept multi-token-prediction layers; `model` are the names of the model's own parameters."""
    found = {}
    for name, entry in artifact.tensors.items():
        if name in model or not artifact.mtp.kept or not artifact.mtp.owns(name):
            continue
        blob, dtype = artifact.blobs.get(name), TORCH_DTYPES.get(entry.dtype)
        floating = blob is not None or dtype is None or dtype.is_floating_point
        found[name] = classify_mtp(name, entry.shape if blob is None else blob.shape, floating=floating)
    return found


def _dense_row(artifact: Artifact, name: str, found: Classification) -> Row:
    entry = artifact.tensors[name]
    reason = found.reason or "not compressed"
    bits = float(DTYPE_BITS[entry.dtype])
    return Row(name, found.role, entry.shape, entry.dtype, entry.numel, entry.nbytes, bits, {}, reason=reason)


def _packed_row(name: str, found: Classification, blob: Blob) -> Row:
    counts: Counter[float] = Counter()
    with blob.matrices() as matrices:
        for matrix in matrices:
            widths, groups = np.unique(bits_of(matrix.row_bits), return_counts=True)
            for width, count in zip(widths.tolist(), groups.tolist(), strict=True):
                counts[width if width % 1 else int(width)] += count
        rank = max(matrix.rank for matrix in matrices)
    parameters = int(np.prod(blob.shape))
    return Row(
        name,
        found.role,
        blob.shape,
        "trellis",
        parameters,
        blob.entry.nbytes,
        8 * blob.entry.nbytes / parameters,
        dict(sorted(counts.items())),
        rank,
        counts[0] / counts.total(),
    )


def _summarise(
    kind: str,
    folder: Path,
    config: dict[str, Any],
    rows: list[Row],
    file_bytes: int,
    files: int,
    warnings: Iterable[str],
    mtp: PredictionLayers,
    artifact: dict[str, Any] | None = None,
    losses: Losses | None = None,
) -> Description:
    parameters = sum(row.parameters for row in rows)
    formats: Counter[str] = Counter()
    for row in rows:
        formats[row.stored] += row.parameters
    names = config.get("architectures")
    return Description(
        kind=kind,
        path=str(folder),
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        model_type=str(config.get("model_type", "")),
        parameters=parameters,
        file_bytes=file_bytes,
        files=files,
        bits_per_weight=8 * file_bytes / max(1, parameters),
        ratio=DENSE_BYTES * parameters / max(1, file_bytes),
        overhead_bytes=file_bytes - sum(row.bytes for row in rows),
        formats=dict(formats.most_common()),
        components=_components(rows),
        rows=tuple(rows),
        warnings=tuple(warnings),
        dropped=() if mtp.kept else tuple(mtp.sentences()),
        kept=tuple(mtp.sentences()) if mtp.kept else (),
        artifact=artifact,
        losses=losses,
    )


def _components(rows: list[Row]) -> tuple[Component, ...]:
    by_role: dict[str, list[Row]] = {}
    for row in rows:
        by_role.setdefault(row.role, []).append(row)
    components = []
    for role, members in by_role.items():
        parameters, nbytes = sum(row.parameters for row in members), sum(row.bytes for row in members)
        known = [row.predicted_kl for row in members if row.predicted_kl is not None]
        bits, loss = 8 * nbytes / max(1, parameters), sum(known) if known else None
        components.append(Component(role, len(members), parameters, nbytes, bits, loss))
    return tuple(sorted(components, key=lambda component: -component.bytes))
