"""Brings experts from main memory to a GPU ahead of their use, through two pinned buffers.

While the GPU multiplies with one expert, a thread copies the next one into pinned memory, from where the GPU fetches it
on a stream of its own. So a product waits only for what computing does not hide. Experts are used in the order of their
numbers, first every stack of one expert, then those of the next; a backward pass goes the other way. The neighbour in
the present direction is fetched ahead. An expert that no token chose is fetched for nothing.

Device memory: two buffers of the largest expert, 59 MB each for DeepSeek-V3 in bfloat16, and the expert in the dtype of
the product. That layer's attention takes 1.1 GB and its statistics, held twice, 5.8 GB, so 24 GB are enough (computed,
not measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

SLOTS = 2
"""Buffers: one in use, one that is being filled."""


class Lane(Protocol):
    """The way to a device: buffers in numbered slots, and what orders copies and computing."""

    def fill(self, slot: int, expert: torch.Tensor) -> None:
        """Copy a contiguous expert into a slot, after all work enqueued before `release`; called in a thread."""
        ...

    def use(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """The expert in a slot, on the device, with the shape, strides and dtype of `like`; computing waits for it."""
        ...

    def release(self, slot: int) -> None:
        """All work that uses the slot is enqueued."""
        ...


class CudaLane:
    """Pinned memory, a stream for the copies, and events between it and the stream that computes.

    Args:
        nbytes: of the largest expert.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS)]
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._filled = [torch.cuda.Event() for _ in range(SLOTS)]
        self._released = [torch.cuda.Event() for _ in range(SLOTS)]

    def fill(self, slot: int, expert: torch.Tensor) -> None:
        source = expert.reshape(-1).view(torch.uint8)
        self._filled[slot].synchronize()  # the pinned buffer may still be read
        pinned = self._pinned[slot][: len(source)]
        pinned.copy_(source)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._released[slot])
            self._buffers[slot][: len(source)].copy_(pinned, non_blocking=True)
            self._filled[slot].record(self._stream)

    def use(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream(self._device).wait_event(self._filled[slot])
        return in_buffer(self._buffers[slot], like)

    def release(self, slot: int) -> None:
        self._released[slot].record(torch.cuda.current_stream(self._device))


def in_buffer(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of a buffer (uint8), with the shape, strides and dtype of `like`, which fills its memory."""
    return buffer[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


class ExpertTransfer:
    """The experts of some stacks, one after another on a device.

    Args:
        stacks: (experts, m, n) in main memory, contiguous; all with the same number of experts.
        lane: its slots hold the largest expert.
    """

    def __init__(self, stacks: Sequence[torch.Tensor], lane: Lane) -> None:
        self._lane = lane
        self._experts = [expert for experts in zip(*stacks, strict=True) for expert in experts]
        self._number = {expert.data_ptr(): number for number, expert in enumerate(self._experts)}
        self._thread = ThreadPoolExecutor(1, "ciuic-experts")
        self._contents: list[int | None] = [None] * SLOTS
        self._filling: list[Future[None] | None] = [None] * SLOTS
        self._current = 0
        self._last, self._direction = 0, 1
        self.fetched_ahead = 0
        self.waited_for = 0

    def get(self, expert: torch.Tensor) -> torch.Tensor:
        """An expert (m, n), or its transpose, on the device in its own dtype; valid until the next call."""
        number = self._number[expert.data_ptr()]
        if self._contents[self._current] is not None:
            self._lane.release(self._current)
        if number in self._contents:
            slot = self._contents.index(number)
            self.fetched_ahead += 1
        else:
            slot = 1 - self._current
            self._finish(slot)
            self._fill(slot, number)
            self.waited_for += 1
        self._finish(slot)
        found = self._lane.use(slot, expert)
        self._current = slot
        if number != self._last:
            self._last, self._direction = number, 1 if number > self._last else -1
        following = number + self._direction
        if 0 <= following < len(self._experts) and following not in self._contents:
            self._finish(1 - slot)
            self._fill(1 - slot, following)
        return found

    def close(self) -> None:
        """Wait for the last copy."""
        self._thread.shutdown()

    def _fill(self, slot: int, number: int) -> None:
        self._contents[slot] = number
        self._filling[slot] = self._thread.submit(self._lane.fill, slot, self._experts[number])

    def _finish(self, slot: int) -> None:
        """Wait until the slot's copy is enqueued; raises what the thread raised."""
        filling, self._filling[slot] = self._filling[slot], None
        if filling is not None:
            filling.result()


def transfer_to(stacks: Sequence[torch.Tensor], device: torch.device) -> ExpertTransfer | None:
    """A transfer for stacks of a layer in main memory; None where there is nothing to transfer, or no such way."""
    fits = stacks and len({len(stack) for stack in stacks}) == 1 and all(s.is_contiguous() for s in stacks)
    if device.type != "cuda" or not fits or any(stack.device.type != "cpu" for stack in stacks):
        return None
    return ExpertTransfer(stacks, CudaLane(device, max(stack[0].nbytes for stack in stacks)))
