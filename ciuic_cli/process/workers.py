"""Several processes on one run, started by torchrun: who takes what, and how they meet.

All of them see the same files: the checkpoint, and the journal beside the output. The first one leads: it holds the
lock, decides what is left to do, and writes the artifact. Transport, start and the end of all when one fails are
torch.distributed's and torchrun's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ciuic_cli.errors import EnvironmentFault

PATIENCE = timedelta(days=14)
"""How long a worker waits for the others: as long as a large model may take."""
_runs = itertools.count()
_NOT_STARTED_RIGHT = "start the processes with torchrun; without it, unset TORCHELASTIC_RUN_ID"


def several() -> bool:
    """Whether torchrun started more processes than this one."""
    return dist.is_torchelastic_launched() and _told("WORLD_SIZE") > 1


def leads() -> bool:
    """Whether this process is the one that speaks: the only one, or the first of several."""
    return not several() or _told("RANK") == 0


def _told(name: str) -> int:
    """A number that torchrun gives its processes."""
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise EnvironmentFault(
            f"torchrun should have set {name} to a number; it is {text!r:.40}", remedy=_NOT_STARTED_RIGHT
        )
    return int(text)


class Workers:
    """One of `size` processes that share the work of a run, the `rank`-th; alone, it does everything."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._counts: dict[str, int] = {}

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def take(self, what: str, items: Sequence[int]) -> Iterator[int]:
        """Items of a list that all workers have alike, each given to the worker that is free first."""
        while (position := self.count(what, 1) - 1) < len(items):
            yield items[position]

    def count(self, what: str, amount: int) -> int:
        """Add to a counter that all workers share; returns the sum so far."""
        if self._store is None:
            self._counts[what] = self._counts.get(what, 0) + amount
            return self._counts[what]
        return int(self._meet(lambda store: store.add(what, amount), self._store))

    def wait(self) -> None:
        """Until all workers are here."""
        if self.size > 1:
            self._meet(dist.barrier)

    def tell(self, value: Any) -> Any:
        """The first worker's value, everywhere."""
        return self.gather(value if self.leads else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._meet(dist.all_gather_object, values, value)
        return values

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        if tensor.numel():
            self._meet(dist.send, tensor.contiguous(), rank)

    def receive(self, shape: Sequence[int], device: torch.device, rank: int) -> torch.Tensor:
        """A float32 tensor that the worker `rank` sends."""
        tensor = torch.empty(tuple(shape), device=device)
        if tensor.numel():
            self._meet(dist.recv, tensor, rank)
        return tensor

    @staticmethod
    def _meet(action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except RuntimeError as error:  # torch's DistError is one
            raise EnvironmentFault(
                "another worker of this run is gone",
                remedy="its own message says why; the same command goes on from the last finished steps",
            ) from error


@contextmanager
def joined() -> Iterator[Workers]:
    """The workers that torchrun started, connected for the time of the block; without torchrun, this process alone."""
    if not several():
        yield Workers()
        return
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
    except (ValueError, RuntimeError) as error:  # torch's DistError is a RuntimeError
        raise EnvironmentFault(
            f"the workers cannot meet: {' '.join(str(error).split()):.300}", remedy=_NOT_STARTED_RIGHT
        ) from error
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(_told("LOCAL_RANK") % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    run = dist.PrefixStore(f"ciuic.{next(_runs)}", store)
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", run), rank=rank, world_size=size, timeout=PATIENCE
    )
    try:
        yield Workers(rank, size, dist.PrefixStore("work", run))
    finally:
        dist.destroy_process_group()
