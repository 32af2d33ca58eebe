"""Several processes, started by torchrun, that share the work of one run.

All workers see the same files: the checkpoint, and the journal beside the output. Worker 0 is the leader: it holds the
lock, decides which steps are left, and writes the artifact. A worker's number is its rank in torch.distributed, which
transports messages. torchrun starts the processes and ends all of them if one fails.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ciuic_cli.errors import EnvironmentFault, WorkerFault

TIMEOUT = timedelta(days=14)
"""How long a worker waits for the others. Longer than any run: workers meet only at the ends of phases."""
ENDING = 1.0
"""Seconds between the moment when a process closes its connections and the one when the system knows that it has ended
(chosen; measured: some milliseconds)."""
_run_numbers = itertools.count()
_NOT_STARTED_RIGHT = "start the processes with torchrun; without it, unset TORCHELASTIC_RUN_ID"


def is_distributed() -> bool:
    """Whether torchrun started more than one process."""
    return is_launched() and _environment_number("WORLD_SIZE") > 1


def is_launched() -> bool:
    """True if torchrun started this process, even if it started no other."""
    return dist.is_torchelastic_launched()


def is_leader() -> bool:
    """Whether this process prints and writes: it is the only one, or number 0."""
    return not is_distributed() or _environment_number("RANK") == 0


def _environment_number(name: str) -> int:
    """A number that torchrun sets in the environment of its processes. Raises EnvironmentFault if it is none."""
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise EnvironmentFault(
            f"torchrun should have set {name} to a number; it is {text!r:.40}", remedy=_NOT_STARTED_RIGHT
        )
    return int(text)


class Workers:
    """The group of `size` processes that share a run, seen from process `number` (from 0). Owned by `join_workers`.

    With size 1 every method works without torch.distributed. All methods that communicate raise EnvironmentFault if
    another worker has ended.
    """

    def __init__(self, number: int = 0, size: int = 1, store: dist.Store | None = None) -> None:
        self.number, self.size, self._store = number, size, store
        self._counters: dict[str, int] = {}
        self._processes: list[tuple[str, int]] = []
        """The machine and the PID of every worker, after `introduce`."""

    def introduce(self) -> None:
        """Tell all workers this one's process, so that `fault` can name those that have ended."""
        self._processes = self.gather((socket.gethostname(), os.getpid()))

    def fault(self, seconds: float = ENDING) -> WorkerFault | None:
        """The error that names the other workers on this machine whose processes have ended; None if all of them live.

        seconds: how long to wait for a process that is ending.
        """
        until = time.monotonic() + seconds
        while True:
            ended = [
                f"rank {number} (process {pid})"
                for number, (machine, pid) in enumerate(self._processes)
                if number != self.number and machine == socket.gethostname() and not _lives(pid)
            ]
            if ended or time.monotonic() >= until:
                break
            time.sleep(0.01)
        return _stopped(f": {', '.join(ended)}") if ended else None

    @property
    def is_leader(self) -> bool:
        return self.number == 0

    def take(self, queue: str, items: Sequence[int]) -> Iterator[int]:
        """Pull items from a queue that all workers share: each item goes to the first worker that is free.

        All workers must pass the same `items` for the same `queue` name.
        """
        while (position := self.add_to_counter(queue, 1) - 1) < len(items):
            yield items[position]

    def add_to_counter(self, name: str, amount: int) -> int:
        """Add to a counter that all workers share. Returns the sum so far."""
        if self._store is None:
            self._counters[name] = self._counters.get(name, 0) + amount
            return self._counters[name]
        return int(self._communicate(lambda store: store.add(name, amount), self._store))

    def barrier(self) -> None:
        """Wait until all workers have reached this call."""
        if self.size > 1:
            self._communicate(dist.barrier)

    def broadcast(self, value: Any) -> Any:
        """The leader's value, in every worker. The other workers' `value` is ignored."""
        return self.gather(value if self.is_leader else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, in the order of their numbers, in every worker."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._communicate(dist.all_gather_object, values, value)
        return values

    def send(self, tensor: torch.Tensor, worker: int) -> None:
        """Send a tensor to this worker, which must `receive` it. An empty tensor is not transferred."""
        if tensor.numel():
            self._communicate(dist.send, tensor.contiguous(), worker)

    def receive(self, shape: Sequence[int], device: torch.device, worker: int) -> torch.Tensor:
        """Receive a float32 tensor of `shape` from this worker."""
        tensor = torch.empty(tuple(shape), device=device)
        if tensor.numel():
            self._communicate(dist.recv, tensor, worker)
        return tensor

    def _communicate(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except RuntimeError as error:  # includes torch's DistError
            raise (self.fault() or _stopped()) from error


def _stopped(which: str = "") -> WorkerFault:
    return WorkerFault(
        f"another worker of this run has stopped{which}",
        remedy="see that worker's error message; the same command continues after the last finished steps",
    )


def _lives(pid: int) -> bool:
    """True if a process of this machine still runs. A zombie, which torchrun has not waited for yet, does not."""
    import psutil  # imported late: every command imports this module

    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False


def _in_thread(action: Callable[[], Any]) -> Any:
    """The result of a call, made in another thread.

    The workers connect so. torch's waits do not let Python handle a signal: a worker whose leader has refused the run,
    or has ended before it connected, would not notice the SIGTERM by which torchrun ends it, and stay until torchrun
    kills it half a minute later. The thread is a daemon's: the process does not wait for it when it ends.
    """
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # the caller raises it
            done.set_exception(error)

    threading.Thread(target=run, name="ciuic-connect", daemon=True).start()
    return done.result()


@contextmanager
def join_workers(*, even_alone: bool = False) -> Iterator[Workers]:
    """The group of workers that torchrun started, connected for the time of the block. Without torchrun, one worker.

    even_alone: make a process group of torch also for a single process that torchrun started.

    Raises EnvironmentFault if the workers cannot connect.
    """
    if not (is_distributed() or (even_alone and is_launched())):
        yield Workers()
        return
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    except (ValueError, RuntimeError) as error:  # torch's DistError is a RuntimeError
        raise EnvironmentFault(
            f"the workers cannot connect: {' '.join(str(error).split()):.300}", remedy=_NOT_STARTED_RIGHT
        ) from error
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(_environment_number("LOCAL_RANK") % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    # A prefix per run: counters of an earlier run in the same processes must not be continued.
    run = dist.PrefixStore(f"ciuic.{next(_run_numbers)}", store)
    group = dist.PrefixStore("group", run)
    _in_thread(
        lambda: dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=TIMEOUT)
    )
    try:
        workers = Workers(rank, size, dist.PrefixStore("work", run))
        workers.introduce()
        yield workers
    finally:
        dist.destroy_process_group()
