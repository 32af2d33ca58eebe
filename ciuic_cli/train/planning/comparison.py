"""Planned strategies beside what a step of each takes on this machine's CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.measured import measure
from ciuic_cli.train.planning.step import Batch, Sharding
from ciuic_cli.train.planning.strategies import PlannedStrategy
from ciuic_cli.train.trainer import FREED_BYTES

_TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": 64,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
"""Config of a model that is negligible beside a process (chosen)."""

_SHARED_FREED_BYTES = 150_000_000
"""Freed pages that a process keeps if it shares the model with others, because gathered layers come and go; alone it
keeps FREED_BYTES. Measured: docs/experiments/training/strategies-plan.md."""


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
    if strategy.compressed and not (folder / "memory_report.json").is_file():
        hint(f"{strategy.name}: not measured, for want of an artifact")
        return None
    try:
        freed = FREED_BYTES if strategy.sharding is None else _SHARED_FREED_BYTES
        process = _process_bytes(_with_the_same_libraries(strategy.options), strategy.sharding)
        resident = tensors + process + freed
        if resident * strategy.processes > psutil.virtual_memory().available:
            hint(
                f"{strategy.name}: not measured, {strategy.processes} x {resident / 1e9:.3g} GB are not free"
            )
            return None
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


def _with_the_same_libraries(options: TrainOptions) -> TrainOptions:
    """Options of a step that loads the same libraries; the same ones for many strategies, which are measured once."""
    return replace(
        options, activation_checkpointing=False, gradient_accumulation_steps=1, per_device_train_batch_size=1
    )


@cache
def _process_bytes(options: TrainOptions, sharding: Sharding | None) -> int:
    """Resident bytes of a process besides tensors: the interpreter and the libraries that a strategy loads.

    Measured with a tiny model: a step loads code that importing a library does not.
    """
    with TemporaryDirectory(prefix="ciuic-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_TINY), encoding="utf-8")
        return measure(Path(folder), options, Batch(1, 16), sharding).resident
