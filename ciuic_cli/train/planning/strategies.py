"""`ciuic plan`: the ways to train a model, with their memory, wire bytes and expected time beside each other.

Every strategy is a run of `ciuic train`; its options are in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ciuic_cli.report.readable import readable_bytes
from ciuic_cli.train.options import TrainOptions, option_name
from ciuic_cli.train.planning.memory_plan import MemoryPlan, PlannedModel, plan_memory
from ciuic_cli.train.planning.step import Batch, Sharding
from ciuic_cli.train.planning.step_time import Counts, StepTime, step_time

EVERY = 4
"""Layers between two checkpoints of activations in the strategies that keep some of them (chosen)."""
EIGHT_BIT, FOUR_BIT = "adamw_8bit", "adamw_torch_4bit"
"""Names in transformers of AdamW with states in 8 bits (of bitsandbytes) and in 4 bits (of torchao)."""
COMPRESSED_BITS = 4.0
"""Bits per weight of the compressed base of a dense model: a quarter of bfloat16."""
CLASSES = ("weights", "adapter", "gradients", "states", "activations", "scratch")
"""The terms of a plan that lie on the device, as `MemoryPlan` has them."""


@dataclass(frozen=True)
class Strategy:
    """A way to train. rows: of a forward pass. compressed: whether the base is compressed 4:1."""

    name: str
    options: TrainOptions
    rows: int
    sharding: Sharding | None = None
    compressed: bool = False

    @property
    def processes(self) -> int:
        return 1 if self.sharding is None else self.sharding.processes

    @property
    def command(self) -> str:
        """The options of `ciuic train` that make the strategy."""
        plain = TrainOptions(Path("none"))
        parts = [] if self.sharding is None else [f"--fsdp --comm {self.sharding.comm}"]
        for name in (
            *("method", "optim", "weights", "activations", "activation_checkpointing", "every_n_layers"),
            *("per_device_train_batch_size", "gradient_accumulation_steps", "lora_r"),
        ):
            value = getattr(self.options, name)
            if value is True:
                parts.append(option_name(name))
            elif value != getattr(plain, name):
                parts.append(f"{option_name(name)} {value}")
        return " ".join(parts)


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy's plan.

    Attributes:
        memory: of one process.
        time: seconds of a step, part by part. slowdown: time per token of all processes together, over that of the
            first strategy in one process.
        limit: bytes that a process may take.
    """

    strategy: Strategy
    memory: MemoryPlan
    time: StepTime
    slowdown: float
    limit: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.limit

    @property
    def bound(self) -> str:
        """What decides the memory and the time, in words."""
        terms = {name: getattr(self.memory, name) for name in CLASSES}
        largest = max(terms, key=lambda name: terms[name])
        fixed = terms["weights"] + terms["adapter"] + terms["states"] + self.memory.process
        if self.fits:
            text = f"{largest} {terms[largest] / max(1, self.memory.total):.0%} of the memory"
        elif fixed > self.limit:
            text = f"weights and states alone take {readable_bytes(fixed)}, whatever the rows"
        else:
            over = self.memory.total - self.limit
            text = f"{readable_bytes(over)} too much; {largest} take {readable_bytes(terms[largest])}"
        return f"{text}; time: {self.time.bound}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, times in seconds."""
        memory = asdict(self.memory)
        sent = memory.pop("sent")
        return {
            "name": self.strategy.name,
            "command": self.strategy.command,
            "processes": self.strategy.processes,
            "compressed_base": self.strategy.compressed,
            "rows_per_pass": self.strategy.rows,
            "bytes": {**memory, "total": self.memory.total},
            "wire_bytes_per_step": sent,
            "seconds": asdict(self.time),
            "slowdown": self.slowdown,
            "fits": self.fits,
            "bound": self.bound,
        }


def strategies(is_artifact: bool, rows: int, gpus: Sequence[int], rank: int) -> list[Strategy]:
    """The strategies for a model, from the plainest to the smallest.

    Args:
        is_artifact: the model is compressed already: its weights cannot be trained.
        rows: per process and step. gpus: numbers of processes. rank: of adapters.
    """
    found = []
    for count in sorted(set(gpus)):
        if count > 1:
            found += (
                [] if is_artifact else [*_sharded(rows, count), *_sharded_lora(rows, count, rank, "LoRA")]
            )
            found += _sharded_lora(rows, count, rank, "LoRA on 4:1", compressed=True)
            continue
        if not is_artifact:
            found += [*_full(rows), *_lora(rows, rank, "LoRA", compressed=False)]
        found += _lora(rows, rank, "LoRA on 4:1", compressed=True)
    return found


def _options(rows: int, **chosen: Any) -> TrainOptions:
    every = chosen.pop("every", None)
    checkpointing = {} if every is None else {"activation_checkpointing": True, "every_n_layers": every}
    return TrainOptions(Path("none"), per_device_train_batch_size=rows, **checkpointing, **chosen)


def _accumulated(strategy: Strategy, name: str) -> Strategy:
    """The same rows per step, one per pass."""
    options = replace(
        strategy.options, per_device_train_batch_size=1, gradient_accumulation_steps=strategy.rows
    )
    return replace(strategy, name=name, options=options, rows=1)


def _full(rows: int) -> Iterator[Strategy]:
    def one(name: str, **chosen: Any) -> Strategy:
        return Strategy(name, _options(rows, method="full", **chosen), rows)

    plain = one("all weights")
    yield plain
    if rows > 1:
        yield _accumulated(plain, "accumulation")
    yield one("8-bit states", optim=EIGHT_BIT)
    yield one("4-bit states", optim=FOUR_BIT)
    yield one(f"checkpoints every {EVERY} layers", every=EVERY)
    yield one("checkpoints", every=1)
    yield one("8-bit activations", activations="int8")
    yield one("checkpoints, 8-bit activations", every=1, activations="int8")
    yield one("the same, moved from the device", every=1, activations="int8-offload")
    small = {"every": 1, "activations": "int8", "weights": "int8"}
    yield one("8-bit weights, states and activations", **small, optim=EIGHT_BIT)
    yield one("the same with 4-bit states", **small, optim=FOUR_BIT)


def _lora(rows: int, rank: int, name: str, *, compressed: bool) -> Iterator[Strategy]:
    def one(suffix: str, **chosen: Any) -> Strategy:
        options = _options(rows, lora_r=rank, lora_alpha=2 * rank, **chosen)
        return Strategy(name + suffix, options, rows, compressed=compressed)

    yield one("")
    yield one(", checkpoints", every=1)
    smallest = one(", checkpoints, 8-bit activations, states", every=1, activations="int8", optim=EIGHT_BIT)
    yield smallest
    if rows > 1:
        yield _accumulated(smallest, f"{name}, the same with accumulation")


def _sharded(rows: int, count: int) -> Iterator[Strategy]:
    def one(name: str, comm: str, **chosen: Any) -> Strategy:
        options = _options(rows, method="full", **chosen)
        return Strategy(f"{count} processes{name}", options, rows, Sharding(count, comm))

    yield one("", "fp32")
    yield one(", bfloat16", "bf16")
    yield one(", 8-bit wire", "int8")
    smallest = one(", checkpoints, 8-bit activations", "bf16", every=1, activations="int8")
    yield smallest
    if rows > 1:
        yield _accumulated(smallest, f"{count} processes, the same with accumulation")


def _sharded_lora(
    rows: int, count: int, rank: int, name: str, *, compressed: bool = False
) -> Iterator[Strategy]:
    """The base is gathered in its own dtype, or as its codes."""

    def one(suffix: str, **chosen: Any) -> Strategy:
        options = _options(rows, lora_r=rank, lora_alpha=2 * rank, **chosen)
        return Strategy(f"{count} processes, {name}{suffix}", options, rows, Sharding(count), compressed)

    yield one("")
    yield one(", checkpoints, 8-bit activations", every=1, activations="int8")


def plan_strategies(
    model: PlannedModel,
    *,
    limit: int,
    gpus: Sequence[int],
    tokens: int,
    rows: int,
    rank: int,
    process: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[PlannedStrategy]:
    """The plans of all strategies, in their order.

    Args:
        model: of which config and headers are known.
        limit: bytes that a process may take. gpus: numbers of processes. tokens: of a row.
        rows: per process and step. rank: of adapters.
        process: bytes of a process besides tensors.

    Raises:
        InputError: the model cannot be built, or its memory depends on values of tensors.
    """
    chosen = strategies(model.blobs is not None, rows, gpus, rank)
    small = model if model.blobs is not None else PlannedModel.at_bits(model.config, COMPRESSED_BITS)
    counts = Counts.of(PlannedModel(model.config, model.file).meta_model(), tokens)
    found: list[PlannedStrategy] = []
    for number, strategy in enumerate(chosen):
        base = small if strategy.compressed else model
        memory = plan_memory(
            base, strategy.options, Batch(strategy.rows, tokens), process,
            sharding=strategy.sharding, whole=False,
        )  # fmt: skip
        time = step_time(counts, strategy.options, memory, rows * tokens, strategy)
        slowdown = time.total / strategy.processes / (found[0].time.total if found else time.total)
        slowdown *= found[0].strategy.processes if found else strategy.processes
        found.append(PlannedStrategy(strategy, memory, time, slowdown, limit))
        progress("plan strategies", number + 1, len(chosen))
    return found
