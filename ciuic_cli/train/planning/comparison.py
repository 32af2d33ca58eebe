"""Planned strategies beside what a step of each takes on this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.train.planning.limits import process_bytes
from ciuic_cli.train.planning.measured import measure
from ciuic_cli.train.planning.step import Batch
from ciuic_cli.train.planning.strategies import PlannedStrategy


def compared(
    folder: Path,
    planned: Sequence[PlannedStrategy],
    tokens: int,
    progress: Callable[[str, int, int], None],
    hint: Callable[[str], None],
) -> list[dict[str, Any] | None]:
    """Planned and measured bytes, and seconds, of every strategy; None for those that this machine cannot run.

    A strategy on a compressed base needs an artifact, and one that needs more than the free memory is not run.
    """
    found: list[dict[str, Any] | None] = []
    for number, one in enumerate(planned):
        found.append(_compared(folder, one, tokens, hint))
        progress("measure strategies", number + 1, len(planned))
    return found


def _compared(
    folder: Path, one: PlannedStrategy, tokens: int, hint: Callable[[str], None]
) -> dict[str, Any] | None:
    strategy, memory = one.strategy, one.memory
    tensors = memory.tensors + memory.residuals
    resident = tensors + process_bytes(torch.device("cpu"))
    if strategy.compressed and not (folder / "memory_report.json").is_file():
        hint(f"{strategy.name}: not measured, for want of an artifact")
        return None
    if resident * strategy.processes > psutil.virtual_memory().available:
        hint(f"{strategy.name}: not measured, {strategy.processes} x {resident / 1e9:.3g} GB are not free")
        return None
    try:
        measured = measure(folder, strategy.options, Batch(strategy.rows, tokens), strategy.sharding)
    except EnvironmentFault as error:
        hint(f"{strategy.name}: {error}")
        return None
    return {
        "planned": tensors,
        "peak": measured.peak,
        "planned_resident": resident,
        "resident": measured.resident,
        "seconds": measured.seconds,
    }
