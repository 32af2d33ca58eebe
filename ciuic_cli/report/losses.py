"""Predicted and measured loss of an artifact, read from its memory report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ciuic_cli.artifact.writer import REPORT
from ciuic_cli.checkpoint.folder import read_json
from ciuic_cli.report.schema import MemoryReport

MAX_BYTES = 256 << 20
"""Largest report that is read (chosen): the largest models have some tens of thousands of experts, a few lines each."""


@dataclass(frozen=True)
class Losses:
    """KL divergence from the original, in nats per token.

    predicted: of the whole model. measured, stderr: on held_out_tokens of calibration text, or None. by_tensor:
    predicted, of every compressed tensor that has a prediction. vocabulary_seen: share of the vocabulary in the
    calibration tokens; None if the report does not have it.
    """

    predicted: float
    measured: float | None
    stderr: float | None
    held_out_tokens: int
    by_tensor: dict[str, float]
    vocabulary_seen: float | None = None


def read_losses(folder: Path) -> Losses:
    """The losses in the memory report of an artifact's folder. Raises InputError if it is absent or damaged."""
    return losses_of(MemoryReport.from_dict(read_json(folder, REPORT, MAX_BYTES), folder / REPORT))


def losses_of(report: MemoryReport) -> Losses:
    """The losses in a memory report."""
    return Losses(
        predicted=report.predicted_kl,
        measured=report.measured_kl,
        stderr=report.measured_kl_stderr,
        held_out_tokens=report.statistics.held_out_tokens,
        by_tensor={
            component.name: component.predicted_kl
            for component in report.components
            if component.dense is None and component.unpredicted is None
        },
        vocabulary_seen=report.statistics.vocabulary_seen,
    )
