"""Measures the memory and the time of a training step in processes of its own, for comparison with its plan.

    python -m ciuic_cli.train.planning.measured SPECIFICATION

SPECIFICATION is the JSON of `measure`; the process prints the JSON of its result. The weights are those of the folder,
or random ones if it has only a config: memory does not depend on their values, except that tokens may not be shared
evenly among experts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from ciuic_cli.checkpoint.architecture import build_config
from ciuic_cli.checkpoint.config.classes import auto_class
from ciuic_cli.checkpoint.folder import read_config
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.memory import configure_allocators, peak_resident_bytes
from ciuic_cli.train import full
from ciuic_cli.train.callbacks import Meter
from ciuic_cli.train.engine import load_for_adapter, with_adapter
from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory.activations import ActivationStore
from ciuic_cli.train.memory.choice import activation_store
from ciuic_cli.train.memory.updates import uncompiled
from ciuic_cli.train.memory.weights import LayerwiseOptimizer, held_bytes
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.memory_plan import checkpointed, dtype_of
from ciuic_cli.train.planning.step import Batch, Sharding
from ciuic_cli.train.sharding.shards import local_bytes, local_part, shard
from ciuic_cli.train.sharding.wire import Traffic
from ciuic_cli.train.trainer import limit_memory

_TIMEOUT = 1800
"""Seconds after which a measurement is given up (chosen)."""


@dataclass(frozen=True)
class Measurement:
    """What a step took, in the process that took most.

    peak: bytes of torch's allocator, with those of weights and states. resident: the process's highest resident bytes.
    seconds: of the step. sent: bytes that the process sent to others in it.
    """

    peak: int
    resident: int
    seconds: float
    sent: int = 0


def measure(
    folder: Path, options: TrainOptions, batch: Batch, sharding: Sharding | None = None
) -> Measurement:
    """Run a few steps in processes of their own, on this machine's CPU.

    Raises:
        EnvironmentFault: a process failed, for example for lack of memory.
    """
    specification = json.dumps({
        "folder": str(folder), "options": {**options.to_dict(), "train_file": "none"}, "batch": asdict(batch),
        "sharding": None if sharding is None else asdict(sharding),
    })  # fmt: skip
    processes = 1 if sharding is None else sharding.processes
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, specification],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **shared, "RANK": str(rank)},
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, messages) in zip(running, outputs, strict=True):
        if process.returncode:
            last = (messages.strip().splitlines() or ["no message"])[-1]
            raise EnvironmentFault(
                f"a step could not be measured: exit code {process.returncode}, {last:.300}",
                remedy="leave out --measure, or plan for less memory with --gpu-memory",
            )
    found = [Measurement(**json.loads(output.splitlines()[-1])) for output, _ in outputs]
    return Measurement(
        *(max(getattr(one, name) for one in found) for name in ("peak", "resident", "seconds", "sent"))
    )


def peak_bytes(action: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator gave out during `action` and had not got back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    kept = profiler.profiler
    if kept is None or kept.kineto_results is None:
        raise RuntimeError("torch's profiler recorded nothing")
    events = [event for event in kept.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


class _Run:
    """A run as `train.engine` and `train.sharding.run` make it, on random tokens."""

    def __init__(
        self, folder: Path, options: TrainOptions, batch: Batch, sharding: Sharding | None, scratch: Path
    ) -> None:
        from transformers import TrainingArguments

        self.options, self.sharding = options, sharding
        torch.manual_seed(0)
        base = _loaded(folder, options)
        limit_memory(base)
        self.model = checkpointed(
            base if options.method == "full" else with_adapter(base, options), base, options
        )
        self._traffic = Traffic()
        if sharding is not None:
            mesh = init_device_mesh("cpu", (sharding.processes,))
            self._traffic = shard(self.model, mesh, sharding.comm)
        self.store: ActivationStore | None = activation_store(
            self.model, options, torch.device("cpu"), scratch
        )
        arguments = TrainingArguments(
            output_dir=str(scratch), optim=options.optim, use_cpu=True, report_to="none"
        )
        if sharding is None:
            trainer = full.trainer_class(options)(
                meter=Meter(torch.device("cpu")), model=self.model, args=arguments
            )
            self.optimizer = trainer.create_optimizer()
        else:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained)
        self._batch = _random_batch(batch, base.config.get_text_config().vocab_size)

    def step(self) -> None:
        """All passes of a step, and the update."""
        self._traffic.forget()
        passes = self.options.gradient_accumulation_steps
        for number in range(passes):
            if self.sharding is not None:
                self.model.set_requires_gradient_sync(number == passes - 1)
            with nullcontext() if self.store is None else self.store:
                if self.sharding is None:
                    inputs = {name: value for name, value in self._batch.items() if name != "labels"}
                    loss = chunked_loss(self.model, inputs, self._batch["labels"])
                else:
                    count = torch.tensor(self._batch["labels"].numel())
                    loss = self.model(**self._batch, use_cache=False, num_items_in_batch=count).loss
            loss.backward()
        if not self.options.weights:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()

    def sent(self) -> int:
        """Bytes that this process sent to others in the last step."""
        return 0 if self.sharding is None else self._traffic.sent(self.sharding.processes)

    def held(self) -> int:
        """Bytes of weights, states and rounding errors between steps."""
        buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        if isinstance(self.optimizer, LayerwiseOptimizer):
            return buffers + sum(self.optimizer.bytes().values())
        if self.sharding is not None:
            return buffers + sum(local_bytes(self.model, self.optimizer).values())
        return (
            buffers
            + sum(local_part(one).nbytes for one in self.model.parameters())
            + held_bytes(self.optimizer.state)
        )


def _loaded(folder: Path, options: TrainOptions) -> Any:
    if any(folder.glob("*.safetensors")):
        if options.method == "full":
            return full.load_for_training(folder, torch.device("cpu"))
        return load_for_adapter(folder, torch.device("cpu"))
    config = build_config(read_config(folder), folder / "config.json")
    dtype = torch.float32 if options.method == "full" else dtype_of(read_config(folder))
    return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)


def _random_batch(batch: Batch, vocabulary: int) -> dict[str, torch.Tensor]:
    """Rows of random tokens; with a mask, each row has two examples."""
    ids = torch.randint(0, vocabulary, (batch.rows, batch.tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(batch.tokens)
    if batch.masked:
        positions = positions % -(-batch.tokens // 2)
    return {"input_ids": ids, "labels": ids, "position_ids": positions.expand(batch.rows, -1).contiguous()}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _measured(run: _Run) -> Measurement:
    """The second step's memory and time, and the third step's allocations."""
    run.step()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size counts from now on
    began = time.monotonic()
    run.step()
    seconds, resident = time.monotonic() - began, peak_resident_bytes()
    held = run.held()
    return Measurement(held + peak_bytes(run.step), resident, seconds, run.sent())


def main() -> None:
    """The process that `measure` starts."""
    specification = json.loads(sys.argv[1])
    configure_allocators()
    sharding = None if specification["sharding"] is None else Sharding(**specification["sharding"])
    if sharding is not None:
        dist.init_process_group("gloo")
    with TemporaryDirectory(prefix="ciuic-") as scratch, uncompiled(torch.device("cpu")):
        run = _Run(
            Path(specification["folder"]), TrainOptions(**specification["options"]),
            Batch(**specification["batch"]), sharding, Path(scratch),
        )  # fmt: skip
        found = _measured(run)
    print(json.dumps(asdict(found)))
    if sharding is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
