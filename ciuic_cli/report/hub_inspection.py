"""Description of a model on the hub from its headers, for `ciuic inspect org/name`: no weights are downloaded.

The bits of an artifact's matrices stand in the blobs, all over its files. They are taken from its memory report.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.artifact.writer import REPORT
from ciuic_cli.checkpoint.folder import locate, read_config, read_json
from ciuic_cli.checkpoint.header import TensorEntry, read_header
from ciuic_cli.checkpoint.mtp import PredictionLayers
from ciuic_cli.checkpoint.shards import shard_names
from ciuic_cli.errors import InputError
from ciuic_cli.hub.download import hub_id
from ciuic_cli.hub.headers import headers_only
from ciuic_cli.report.inspection import Description, TensorSummary, describe, summarise
from ciuic_cli.report.losses import MAX_BYTES, losses_of
from ciuic_cli.report.schema import ComponentReport, MemoryReport


def describe_hub(path: str) -> Description:
    """Describe a checkpoint or an artifact on the hub. path: org/name or org/name@revision.

    In offline mode (HF_HUB_OFFLINE) the cached copy is described. Raises InputError as `describe`, and if the hub
    cannot be reached or an artifact has no memory report.
    """
    from huggingface_hub import constants

    found = hub_id(path)
    if found is None or constants.HF_HUB_OFFLINE:
        return describe(locate(path))
    with headers_only(*found) as folder:
        try:
            is_ours = is_artifact(read_config(folder))
            described = _describe_by_report(folder) if is_ours else describe(folder)
        except InputError as error:  # the folder is temporary: name the file on the hub
            place = None if error.file is None else str(error.file).replace(str(folder), path)
            raise InputError(error.message, file=place, tensor=error.tensor, remedy=error.remedy) from error
    return replace(described, path=path)


def _describe_by_report(folder: Path) -> Description:
    """An artifact of which only headers, config.json and the memory report are there."""
    if not (folder / REPORT).is_file():
        raise InputError(
            f"the artifact has no {REPORT}, so its headers alone do not describe it",
            file=folder,
            remedy="download it with `hf download`, and inspect the folder",
        )
    report = MemoryReport.from_dict(read_json(folder, REPORT, MAX_BYTES), folder / REPORT)
    config = read_config(folder)
    headers = [read_header(folder / name) for name in shard_names(folder)[0]]
    entries = {name: entry for header in headers for name, entry in header.tensors.items()}
    rows = []
    for component in report.components:
        entry = entries.get(component.name)
        if entry is None or entry.nbytes != component.bytes:
            raise InputError(
                "the memory report does not fit the files",
                file=folder / REPORT,
                tensor=component.name,
                remedy="the repository mixes two artifacts; upload it again",
            )
        rows.append(_row(component, entry))
    quantization = config["quantization_config"]
    return summarise(
        "artifact",
        folder,
        config,
        rows,
        file_bytes=sum(header.file_bytes for header in headers),
        files=len(headers),
        warnings=(),
        mtp=PredictionLayers.from_dict(quantization.get("mtp"), folder / "config.json"),
        quantization=quantization,
        losses=losses_of(report),
    )


def _row(component: ComponentReport, entry: TensorEntry) -> TensorSummary:
    is_predicted = component.dense is None and component.unpredicted is None
    widths = {float(bits): count for bits, count in (component.widths or {}).items()}
    return TensorSummary(
        name=component.name,
        role=component.role,
        shape=component.shape,
        stored="trellis" if component.dense is None else entry.dtype,
        parameters=component.parameters,
        bytes=component.bytes,
        bits=component.bits,
        widths={int(bits) if bits.is_integer() else bits: count for bits, count in widths.items()},
        rank=component.rank,
        pruned=component.pruned,
        predicted_kl=component.predicted_kl if is_predicted else None,
        reason=component.dense or "",
    )
