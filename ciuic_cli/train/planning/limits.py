"""`--max-memory`: refuses a run that cannot fit, and names the nearest settings that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ciuic_cli.errors import TargetError
from ciuic_cli.process.memory import resident_bytes
from ciuic_cli.train.options import TrainOptions, option_name
from ciuic_cli.train.packing import Row
from ciuic_cli.train.planning.memory_plan import Batch, MemoryPlan, PlannedModel, plan_memory
from ciuic_cli.train.trainer import FREED_BYTES

EIGHT_BIT = "adamw_bnb_8bit"
"""Name in transformers of the optimizer that is proposed: AdamW with 8-bit states, of bitsandbytes."""
EVERY = (8, 4, 2, 1)
"""Values of --every-n-layers that are proposed, from the fastest to the smallest (chosen)."""
SHORTEST = 64
"""Shortest rows that are proposed; longer ones are multiples of it (chosen)."""
CUDA_BYTES = 600_000_000
"""Bytes of a CUDA context with torch's libraries, outside its allocator. Estimated."""

Plan = Callable[[TrainOptions, Batch], MemoryPlan]
Setting = tuple[TrainOptions, Batch]


def process_bytes(device: torch.device) -> int:
    """Bytes that the process needs on `device` besides tensors.

    On a CPU, what it has now (the interpreter and its libraries), and the freed pages that layers keep until they give
    them back.
    """
    return CUDA_BYTES if device.type == "cuda" else resident_bytes() + FREED_BYTES


def planned_batch(rows: Sequence[Row], size: int) -> Batch:
    """The largest batch of `size` of these rows. Attention needs a mask if a row holds several examples or padding."""
    lengths = [len(row["input_ids"]) for row in rows]
    packed = any(row["position_ids"].count(0) > 1 for row in rows)
    padded = size > 1 and len(set(lengths)) > 1
    return Batch(size, max(lengths), masked=packed or padded)


def require_fits(
    model: PlannedModel, options: TrainOptions, batch: Batch, limit: int, process: int
) -> MemoryPlan:
    """The plan of a run, if it fits `limit` bytes.

    Raises:
        TargetError: it does not fit; the message has the terms, and the remedy the nearest settings that fit.
        InputError: its memory cannot be planned.
    """

    def plan(chosen: TrainOptions, shape: Batch) -> MemoryPlan:
        return plan_memory(model, chosen, shape, process)

    found = plan(options, batch)
    if found.total <= limit:
        return found
    fitting = list(nearest(plan, options, batch, found, limit))
    remedy = "raise it, or use " + "; or ".join(fitting)
    if not fitting:
        remedy = "raise it, or train a smaller model: the shortest rows, one at a time, do not fit either"
    raise TargetError(
        f"training needs {_size(found.total)} ({found.sentence()}), and --max-memory allows {_size(limit)}",
        file=None if model.file is None else model.file.parent,
        remedy=remedy,
    )


def nearest(plan: Plan, options: TrainOptions, batch: Batch, found: MemoryPlan, limit: int) -> Iterator[str]:
    """The options that fit, nearest first: each alone; if no single change suffices, several together."""

    def first(settings: Iterator[Setting]) -> Setting | None:
        return next((one for one in settings if plan(*one).total <= limit), None)

    alone = [
        first(_checkpointed(options, batch)),
        first(_fewer_rows(options, batch)),
        _longest(plan, options, batch, limit),
        first(_eight_bit(options, batch)) if found.states > found.total - limit else None,
        first(_lower_ranks(options, batch)),
    ]
    settings = [setting for setting in alone if setting is not None]
    if not settings:
        smallest = replace(
            options, activation_checkpointing=True, every_n_layers=1, per_device_train_batch_size=1,
            optim=EIGHT_BIT,
        )  # fmt: skip
        one = replace(batch, rows=1)
        candidates = (
            _longest(plan, replace(smallest, lora_r=rank), one, limit, including=True)
            for rank in (options.lora_r, *_ranks(options))
        )
        settings = [setting for setting in candidates if setting is not None][:1]
    for chosen, shape in settings:
        yield f"{_changes(options, chosen)} ({_size(plan(chosen, shape).total)})"


def _checkpointed(options: TrainOptions, batch: Batch) -> Iterator[Setting]:
    for every in EVERY:
        if not options.activation_checkpointing or every < options.every_n_layers:
            yield replace(options, activation_checkpointing=True, every_n_layers=every), batch


def _fewer_rows(options: TrainOptions, batch: Batch) -> Iterator[Setting]:
    rows = batch.rows
    while rows > 1:
        rows //= 2
        accumulated = options.gradient_accumulation_steps * batch.rows // rows
        chosen = replace(options, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated)
        yield chosen, replace(batch, rows=rows)


def _eight_bit(options: TrainOptions, batch: Batch) -> Iterator[Setting]:
    yield replace(options, optim=EIGHT_BIT), batch


def _lower_ranks(options: TrainOptions, batch: Batch) -> Iterator[Setting]:
    for rank in _ranks(options):
        yield replace(options, lora_r=rank), batch


def _ranks(options: TrainOptions) -> list[int]:
    return [rank for rank in (64, 32, 16, 8, 4, 2, 1) if rank < options.lora_r]


def _longest(
    plan: Plan, options: TrainOptions, batch: Batch, limit: int, *, including: bool = False
) -> Setting | None:
    """The longest rows that fit, in multiples of SHORTEST; with `including`, perhaps the present ones."""

    def setting(tokens: int) -> Setting:
        return replace(options, sequence_len=tokens), replace(batch, tokens=tokens)

    if including and plan(options, batch).total <= limit:
        return options, batch
    low, high = 0, (batch.tokens - 1) // SHORTEST + 1  # in multiples: `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        if plan(*setting(middle * SHORTEST)).total <= limit:
            low = middle
        else:
            high = middle
    return setting(low * SHORTEST) if low else None


def _changes(options: TrainOptions, chosen: TrainOptions) -> str:
    """The options that differ, as on the command line."""
    parts = []
    for name in (
        *("activation_checkpointing", "every_n_layers", "per_device_train_batch_size"),
        *("gradient_accumulation_steps", "sequence_len", "optim", "lora_r"),
    ):
        value = getattr(chosen, name)
        if name == "activation_checkpointing":
            if value and not options.activation_checkpointing:
                parts.append(option_name(name))
                parts.append(f"{option_name('every_n_layers')} {chosen.every_n_layers}")
        elif name == "every_n_layers" and not options.activation_checkpointing:
            continue
        elif value != getattr(options, name):
            parts.append(f"{option_name(name)} {value}")
    return " ".join(parts)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
