"""A sharded training run: `torchrun ... ciuic train MODEL OUT --fsdp`, of all weights or of an adapter.

Every process holds its share of parameters, frozen ones included, of gradients and of optimizer states. The loop is our
own, because accelerate replicates models on a CPU where FSDP2 was asked for. A step takes the same rows for any number
of processes whose batches have the same size together, so that a run may continue with another number of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ciuic_cli.artifact import publishing
from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.errors import UsageError
from ciuic_cli.process.workers import Workers, is_launched, is_leader, join_workers
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.train import full
from ciuic_cli.train.engine import (
    REPORT,
    check_names,
    load_for_adapter,
    tidy_up_after,
    with_adapter,
    write_report,
)
from ciuic_cli.train.examples import IGNORED
from ciuic_cli.train.memory.choice import activation_store, checkpointing_options
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.packing import Row, batch_of
from ciuic_cli.train.preparation import describe, padding_of, read_rows
from ciuic_cli.train.run_folder import RunFolder
from ciuic_cli.train.sharding import checkpoints
from ciuic_cli.train.sharding.ended import naming_ended_workers
from ciuic_cli.train.sharding.shards import COMM, gradient_bytes, local_bytes, shard
from ciuic_cli.train.trainer import limit_memory

CLIP = 1.0
"""Largest Euclidean norm of the gradient, as in transformers' Trainer."""

KEPT = 2
"""Complete checkpoints of a run that are kept: if the newest is damaged, the other one is left."""

Progress = Callable[[str, int, int], None]


def train_sharded(
    model: str | Path,
    out: Path,
    options: TrainOptions,
    comm: str = "fp32",
    *,
    device: str = "auto",
    progress: Progress = lambda what, done, total: None,
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any] | None:
    """Train an adapter, or all weights of a dense checkpoint, in the processes that torchrun started.

    The first one writes `out`: the adapter in PEFT's format, or the model.

    The same call after a crash continues from the last checkpoint: with as many processes and without `comm` "int8",
    it ends with the same bytes.

    Returns:
        The report, in the first process; None in the others.

    Raises:
        UsageError: the process was not started by torchrun, or an option does not work sharded.
        InputError: as `train.engine.train`.
    """
    if not is_launched():
        raise UsageError(
            "--fsdp divides a model among processes",
            remedy="torchrun --standalone --nproc-per-node 2 --no-python ciuic train ... --fsdp",
        )
    if comm not in COMM:
        raise UsageError(f"--comm {comm} is unknown", remedy=f"use one of {', '.join(COMM)}")
    if options.weights or options.optim != "adamw_torch":
        raise UsageError("--fsdp works with --optim adamw_torch, without --weights")
    check_names(options)
    out, folder = Path(os.path.abspath(out)), locate(model)
    # Only the first process: if another one refused the output, torchrun would end this one while it tidies up.
    if is_leader():
        if out.exists() and not publishing.may_replace(out, force=False):
            tidy_up_after(out)
        publishing.require_new(out, folder)
    _, rows = read_rows(folder, options)
    with join_workers(even_alone=True) as workers:
        run = RunFolder(out)
        batch = options.per_device_train_batch_size * options.gradient_accumulation_steps * workers.size
        target = choose_device(device)
        description = {**describe(folder, options, target), "comm": comm, "rows_per_step": batch}
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            del description[name]  # only their product with the number of processes counts
        with run.locked() if workers.is_leader else nullcontext():
            if workers.is_leader:
                run.begin(description, torch.get_num_threads())
            workers.barrier()
            loop = _Loop(folder, options, comm, target, workers, rows, run)
            with naming_ended_workers(workers, run):
                report = loop.train(progress, hint)
                state = checkpoints.whole_model(loop.model)
            if workers.is_leader:
                unfinished = publishing.begin(out)
                if options.method == "full":
                    full.export(loop.model, state, unfinished, folder)
                else:
                    loop.model.save_pretrained(unfinished, state_dict=state, save_embedding_layers=False)
                write_report(unfinished / REPORT, {**report, "options": description})
                publishing.publish(out, force=False)
                run.remove()
            workers.barrier()
    return report if workers.is_leader else None


class _Loop:
    """Model, optimizer, schedule and data of one process."""

    def __init__(
        self,
        folder: Path,
        options: TrainOptions,
        comm: str,
        device: torch.device,
        workers: Workers,
        rows: list[Row],
        run: RunFolder,
    ) -> None:
        from transformers import get_scheduler, set_seed

        set_seed(options.seed)
        self.options, self._workers, self._rows, self._run = options, workers, rows, run
        if options.method == "full":
            base = self.model = full.load_for_training(folder, device)
        else:
            base = load_for_adapter(folder, device)
            set_seed(options.seed)  # the adapter's random factors
            self.model = with_adapter(base, options)
        if device.type == "cpu":
            limit_memory(base)
        self._padding, self._device = padding_of(base), device
        checkpointing = checkpointing_options(base, options)
        if checkpointing is not None:
            every = checkpointing.pop("every_n_layers")
            base.activation_checkpointing_enable(checkpointing, every_n_layers=every)
        self.model.train()
        self.traffic = shard(self.model, init_device_mesh(device.type, (workers.size,)), comm)
        self._store = activation_store(self.model, options, device, run.path)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, options.learning_rate, weight_decay=0.0)
        self._rows_per_step = (
            options.per_device_train_batch_size * options.gradient_accumulation_steps * workers.size
        )
        per_epoch = max(1, len(rows) // self._rows_per_step)
        self.steps = (
            options.max_steps if options.max_steps > 0 else round(options.num_train_epochs * per_epoch)
        )
        self._schedule = get_scheduler(
            options.lr_scheduler_type, self.optimizer, options.warmup_steps, max(1, self.steps)
        )
        self._losses: list[float] = []
        self._gradients = 0
        """Bytes of this process's gradients at the end of the last step."""

    def train(self, progress: Progress, hint: Callable[[str], None]) -> dict[str, Any]:
        """All steps that are left; returns the report."""
        began = time.monotonic()
        done = self._continue(hint)
        for step in range(done, self.steps):
            self._losses.append(self._step(step))
            progress("training", step + 1, self.steps)
            if (step + 1) % self.options.save_steps == 0 and step + 1 < self.steps:
                self._save(step + 1)
        sizes = self._workers.gather(
            {**local_bytes(self.model, self.optimizer), "gradients": self._gradients}
        )
        return {
            "steps": self.steps,
            "losses": self._losses,
            "processes": self._workers.size,
            "bytes_per_process": sizes,
            "wire": vars(self.traffic),
            "trained_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "seconds": round(time.monotonic() - began, 2),
        }

    def _continue(self, hint: Callable[[str], None]) -> int:
        last = self._run.last_checkpoint() if self._workers.is_leader else None
        checkpoint = self._workers.broadcast(last)
        if checkpoint is None:
            return 0
        found = checkpoints.load(checkpoint, self.model, self.optimizer, {"step": 0, "losses": "[]"})
        step, self._losses = int(found["step"]), json.loads(found["losses"])
        # The learning rate came with the optimizer; the schedule is a function of the step.
        place = {"last_epoch": step, "_step_count": step + 1}
        self._schedule.load_state_dict({**self._schedule.state_dict(), **place})
        hint(f"continuing from step {step}")
        return step

    def _save(self, step: int) -> None:
        folder = self._run.path / f"checkpoint-{step}"
        progress = {"step": step, "losses": json.dumps(self._losses)}
        checkpoints.save(folder, self.model, self.optimizer, progress)
        self._workers.barrier()
        if self._workers.is_leader:
            self._run.mark_complete(step)
            self._run.keep_newest(KEPT)

    def _step(self, step: int) -> float:
        """One step on the rows that every process agrees on; returns the mean loss of all tokens."""
        size, options = self._workers.size, self.options
        mine = self._rows_of(step)[self._workers.number :: size]
        parts = [
            batch_of(mine[begin : begin + options.per_device_train_batch_size], self._padding)
            for begin in range(0, len(mine), options.per_device_train_batch_size)
        ]
        learned = torch.tensor(sum(int((part["labels"][:, 1:] != IGNORED).sum()) for part in parts))
        dist.all_reduce(learned)
        total = torch.zeros(())
        for number, part in enumerate(parts):
            self.model.set_requires_gradient_sync(number == len(parts) - 1)
            part = {name: value.to(self._device) for name, value in part.items()}
            with nullcontext() if self._store is None else self._store:
                # FSDP takes the mean over the processes of what they give: each gives its sum · processes / tokens.
                loss = self.model(**part, use_cache=False, num_items_in_batch=learned.to(self._device)).loss
                loss = loss * size
            loss.backward()
            total += loss.detach().cpu() / size
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._gradients = gradient_bytes(self.model)
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total)

    def _rows_of(self, step: int) -> list[Row]:
        """The rows of a step: permutations of all rows, one after another, by the run's seed."""
        count, wanted = len(self._rows), self._rows_per_step
        found: list[Row] = []
        for position in range(step * wanted, (step + 1) * wanted):
            epoch, place = divmod(position, count)
            generator = torch.Generator().manual_seed(self.options.seed + epoch)
            found.append(self._rows[int(torch.randperm(count, generator=generator)[place])])
        return found
