"""Workers of a run as threads of one process, for tests without torch.distributed."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ciuic_cli.process.workers import Workers


class Threads(Workers):
    """`Workers` as threads of this process, with queues in place of torch.distributed. `meeting` is shared by all."""

    def __init__(self, number: int, size: int, meeting: Meeting) -> None:
        super().__init__(number, size)
        self.meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        self.meeting.values[self.number] = value
        self.meeting.barrier.wait()
        found = [self.meeting.values[worker] for worker in range(self.size)]
        self.meeting.barrier.wait()
        return found

    def send(self, tensor: torch.Tensor, worker: int) -> None:
        self.meeting.mail[self.number, worker].put(tensor)

    def receive(self, shape: Sequence[int], device: torch.device, worker: int) -> torch.Tensor:
        tensor: torch.Tensor = self.meeting.mail[worker, self.number].get(timeout=30)
        assert tensor.shape == torch.Size(shape)
        return tensor


class Meeting:
    """What the threads share: a barrier, a slot per thread for `gather`, and a queue per (sender, receiver)."""

    def __init__(self, size: int) -> None:
        self.values: dict[int, Any] = {}
        self.barrier = threading.Barrier(size, timeout=30)
        # Every queue exists before a thread asks for it: two threads that add the same missing queue can each get
        # one of their own, and a message in the lost one never arrives.
        pairs = itertools.product(range(size), repeat=2)
        self.mail: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {pair: queue.Queue() for pair in pairs}
