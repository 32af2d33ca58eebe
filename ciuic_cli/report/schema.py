"""The memory report: what every component of a model took before and after compression, and what it lost.

The field names are the keys of memory_report.json. `memory_report.schema.json` beside this file is the JSON schema made
from these classes; a test fails when the two differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ciuic_cli.errors import InputError
from ciuic_cli.report.json_form import from_plain, json_schema, to_plain


@dataclass(frozen=True, kw_only=True)
class ExpertReport:
    """One expert of a stack.

    bits: mean bits per weight of its codes. pruned: whether all of it is. tokens: calibration tokens routed to
    it. predicted_kl: nats per token.
    """

    bits: float
    pruned: bool
    tokens: int
    predicted_kl: float


@dataclass(frozen=True, kw_only=True)
class ComponentReport:
    """One stored tensor.

    parameters: weights. bytes: stored bytes, scales and low-rank parts included. bits: stored bits per weight. rank: of
    the low-rank part, the largest of a stack. pruned: share of the groups of 16 rows that have no bits. predicted_kl:
    nats per token.

    widths: number of row groups by bits per weight, for compressed tensors. dense: why the tensor is not compressed.
    unpredicted: why it has no predicted KL. experts: one entry per expert, for stacks.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int
    bits: float
    widths: dict[str, int] | None = None
    rank: int
    pruned: float
    predicted_kl: float
    dense: str | None = None
    unpredicted: str | None = None
    experts: tuple[ExpertReport, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PrunePass:
    """Pruning: pruned weights, and the whole structures (experts, channels) among them."""

    name: Literal["prune"] = "prune"
    weights: int
    structures: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class LowRankPass:
    """Low-rank parts: the matrices that have one, and the bytes of all of them."""

    name: Literal["lowrank"] = "lowrank"
    matrices: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class BitsPass:
    """Trellis codes: their bytes, the matrices with sorted rows or input scales, and the predicted KL of the plan."""

    name: Literal["bits"] = "bits"
    bytes: int
    sorted_matrices: int
    scaled_matrices: int
    predicted_kl: float


@dataclass(frozen=True, kw_only=True)
class RecoveryPass:
    """Recovery: steps made, matrices and norms tuned, and the KL on held-out text before and after."""

    name: Literal["recovery"] = "recovery"
    bytes: int
    steps: int
    matrices: int
    norms: int
    kl_before: float
    kl_after: float


Pass = PrunePass | LowRankPass | BitsPass | RecoveryPass


@dataclass(frozen=True, kw_only=True)
class PaddingReport:
    """Padding to tiles of 16 x 16: the padded matrices, the weights added to them, and the bytes of these weights."""

    matrices: int
    weights: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class RoleReport:
    """A probe of all matrices of one role: predicted and measured KL, and the correction that the plan took from them.

    Two roles with one probe share its measured KL in proportion to their predicted KL. The roles include "together":
    all matrices perturbed at once.
    """

    predicted_kl: float
    measured_kl: float
    correction: float


@dataclass(frozen=True, kw_only=True)
class StatisticsReport:
    """Calibration: tokens seen and held out, expert matrices without tokens, singular Hessians, and probes by role.

    vocabulary_seen: share of the model's vocabulary that occurs in the tokens seen; absent in reports of versions that
    did not count it.
    """

    tokens: int
    held_out_tokens: int
    experts_without_tokens: int
    singular_hessians: int
    roles: dict[str, RoleReport]
    vocabulary_seen: float | None = None


@dataclass(frozen=True, kw_only=True)
class MtpLayerReport:
    """One multi-token-prediction layer of the original: its name, and its tensors and bytes there."""

    name: str
    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MtpReport:
    """The multi-token-prediction layers.

    stored_tensors, parameters, bytes: what the artifact has of them. shared: tensors equal to one of the model's, and
    the name under which both are stored.
    """

    kept: bool
    layers: tuple[MtpLayerReport, ...]
    stored_tensors: int
    shared: dict[str, str]
    parameters: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ForecastReport:
    """Forecast of a whole run: seconds by phase and in total, disk space, and peak memory."""

    seconds: dict[str, float]
    disk_bytes: int
    peak_rss_bytes: int
    total_seconds: float


@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """A prompt with the greedy continuations of original and artifact; None where a model could not make one."""

    prompt: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The content of memory_report.json. Bytes are exact; KL divergences are in nats per token.

    original_bytes: parameters at 2 bytes each. source_file_bytes, artifact_bytes: all safetensors files. budget_bytes:
    what the artifact was allowed to take. measured_kl, measured_kl_stderr: on held-out calibration text, None if not
    measured. dropped, kept: sentences about the multi-token-prediction layers. options: as settled for this run.
    coded_on: number of matrices by the machine that coded them, "cpu" or the name of a GPU; not of a dry run. seconds,
    peak_rss_bytes: of this process. forecast: None if the run was continued. model: the original's name on the hub or
    the name of its folder. date: of the end of the run in UTC, YYYY-MM-DD. samples: of a run with a prompt. Reports of
    older versions lack these three.

    See docs/FORMAT.md for every key.
    """

    parameters: int
    original_bytes: int
    source_file_bytes: int
    artifact_bytes: int
    budget_bytes: int
    ratio: float
    ratio_to_source_files: float
    bits_per_weight: float
    predicted_kl: float
    measured_kl: float | None
    measured_kl_stderr: float | None
    components: tuple[ComponentReport, ...]
    passes: tuple[Pass, ...]
    padding: PaddingReport
    statistics: StatisticsReport
    warnings: tuple[str, ...]
    mtp: MtpReport
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    options: dict[str, Any]
    seconds: float
    peak_rss_bytes: int
    coded_on: dict[str, int] | None = None
    forecast: ForecastReport | None = None
    samples: tuple[SampleReport, ...] | None = None
    model: str | None = None
    date: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report in the types of `json.loads`."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    def to_json(self) -> str:
        """The text of memory_report.json. Raises ValueError if a number is not finite."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, document: object, file: Path | None = None) -> MemoryReport:
        """The report from its JSON form. Keys of later versions are ignored.

        file: named in the error. Raises InputError if a key is missing or has another type.
        """
        try:
            return from_plain(cls, document)
        except ValueError as error:
            raise InputError(
                f"not a memory report: {error}", file=file, remedy="fetch or compress the artifact again"
            ) from error

    @classmethod
    def from_json(cls, text: str, file: Path | None = None) -> MemoryReport:
        """As `from_dict`, from the text of memory_report.json."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"not a memory report: {error}", file=file, remedy="fetch or compress the artifact again"
            ) from error
        return cls.from_dict(document, file)


def schema_text() -> str:
    """The text of memory_report.schema.json."""
    return json.dumps(json_schema(MemoryReport), indent=2) + "\n"
