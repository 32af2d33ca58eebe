"""What an artifact's memory report says that each tensor loses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciuic_cli.artifact.writer import REPORT
from ciuic_cli.checkpoint.folder import read_json
from ciuic_cli.errors import InputError

MAX_BYTES = 256 << 20
"""Of a report: the largest models have some tens of thousands of experts, a line each."""


@dataclass(frozen=True)
class Losses:
    """KL divergence from the original, in nats per token.

    predicted: of the whole model; measured, stderr: on held_out_tokens of calibration text, or None; by_tensor:
    predicted, of what is compressed.
    """

    predicted: float
    measured: float | None
    stderr: float | None
    held_out_tokens: int
    by_tensor: dict[str, float]


def read_losses(folder: Path) -> Losses:
    """From the artifact's report.

    Raises InputError if it is absent or damaged.
    """
    report = read_json(folder, REPORT, MAX_BYTES)
    try:
        by_tensor = {
            str(row["name"]): _finite(row["predicted_kl"])
            for row in report["components"]
            if "dense" not in row and "unpredicted" not in row
        }
        measured, stderr = (
            None if report[key] is None else _finite(report[key])
            for key in ("measured_kl", "measured_kl_stderr")
        )
        tokens = int(report["statistics"]["held_out_tokens"])
        return Losses(_finite(report["predicted_kl"]), measured, stderr, tokens, by_tensor)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            "this is no memory report", file=folder / REPORT, remedy="fetch the artifact again"
        ) from error


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number
