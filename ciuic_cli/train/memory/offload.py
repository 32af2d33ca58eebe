"""Places for encoded activations outside the device: pinned main memory, or a file.

The backward pass needs tensors in the reverse of the order in which they were put, so reading one fetches those that
were put before it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch

from ciuic_cli.codecs.blockcode.code import Encoded
from ciuic_cli.errors import EnvironmentFault

AHEAD = 4
"""Tensors that are fetched before they are needed. Chosen: about the tensors of a quarter of a layer."""


class Place:
    """Where one encoded tensor lies."""

    def __init__(self, owner: Any, number: int) -> None:
        self._owner, self.number = owner, number

    def get(self) -> Encoded:
        """The tensor, on its device."""
        found: Encoded = self._owner.get(self.number)
        return found

    def free(self) -> None:
        """The tensor is not needed any more."""
        self._owner.free(self.number)


class Offload(Protocol):
    """Takes encoded tensors away from the device."""

    def put(self, encoded: Encoded) -> Place:
        """Take a tensor; its memory on the device is free once the caller drops it."""
        ...


class FileOffload:
    """Encoded tensors of the CPU in a file without a name, which the system removes with the process.

    Args:
        folder: on a disk with room for the activations of a step.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._folder = folder
        self._entries: dict[int, tuple[int, Encoded]] = {}
        self._next_number = self._end = 0

    def put(self, encoded: Encoded) -> Place:
        """Write a tensor behind the others. Raises EnvironmentFault if the disk is full."""
        if not self._entries:
            self._end = 0
        number, self._next_number = self._next_number, self._next_number + 1
        begin = self._end
        for part in (encoded.codes, encoded.scales.view(torch.uint8)):
            self._write(memoryview(part.numpy().data), self._end)
            self._end += part.nbytes
        empty = Encoded(encoded.code, encoded.codes.to("meta"), encoded.scales.to("meta"), encoded.count)
        self._entries[number] = (begin, empty)
        return Place(self, number)

    def _write(self, content: memoryview, offset: int) -> None:
        while content.nbytes:
            try:
                written = os.pwrite(self._file.fileno(), content, offset)
            except OSError as error:
                raise EnvironmentFault(
                    f"activations cannot be written: {error.strerror}",
                    file=self._folder,
                    remedy="free space on the disk, or use --activations int8",
                ) from error
            content, offset = content[written:], offset + written

    def get(self, number: int) -> Encoded:
        """Read a tensor, and let the system read those before it."""
        begin, entry = self._entries[number]
        for earlier in range(number - 1, number - 1 - AHEAD, -1):
            if earlier in self._entries:
                offset, wanted = self._entries[earlier]
                os.posix_fadvise(self._file.fileno(), offset, wanted.nbytes, os.POSIX_FADV_WILLNEED)
        codes = torch.empty(entry.codes.shape, dtype=torch.uint8)
        scales = torch.empty(entry.scales.shape, dtype=torch.bfloat16)
        for part in (codes, scales.view(torch.uint8)):
            self._read(memoryview(part.numpy().data), begin)
            begin += part.nbytes
        return Encoded(entry.code, codes, scales, entry.count)

    def _read(self, target: memoryview, offset: int) -> None:
        while target.nbytes:
            count = os.preadv(self._file.fileno(), [target], offset)
            if count == 0:
                raise EnvironmentFault("stored activations are truncated", file=self._folder)
            target, offset = target[count:], offset + count

    def free(self, number: int) -> None:
        """Forget a tensor."""
        self._entries.pop(number, None)


class PinnedOffload:
    """Encoded tensors of a GPU in pinned main memory; copies run on a stream of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._kept: dict[int, Encoded] = {}
        self._fetched: dict[int, tuple[Encoded, torch.cuda.Event]] = {}
        self._next_number = 0

    def put(self, encoded: Encoded) -> Place:
        """Copy a tensor to main memory."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            parts = []
            for part in (encoded.codes, encoded.scales):
                target = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                target.copy_(part, non_blocking=True)
                part.record_stream(self._stream)
                parts.append(target)
        self._kept[number] = Encoded(encoded.code, parts[0], parts[1], encoded.count)
        return Place(self, number)

    def _fetch(self, number: int) -> None:
        if number in self._fetched or number not in self._kept:
            return
        kept, event = self._kept[number], torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            codes, scales = (part.to(self._device, non_blocking=True) for part in (kept.codes, kept.scales))
            event.record(self._stream)
        self._fetched[number] = (Encoded(kept.code, codes, scales, kept.count), event)

    def get(self, number: int) -> Encoded:
        """A tensor on the GPU; begins to fetch those before it."""
        self._fetch(number)
        encoded, event = self._fetched[number]
        for earlier in range(number - 1, number - 1 - AHEAD, -1):
            self._fetch(earlier)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for part in (encoded.codes, encoded.scales):
            part.record_stream(current)
        return encoded

    def free(self, number: int) -> None:
        """Forget a tensor."""
        self._kept.pop(number, None)
        self._fetched.pop(number, None)


def offload_for(device: torch.device, folder: Path) -> Offload:
    """Pinned memory for a GPU; a file in `folder` for the CPU, whose memory is the device's own."""
    return PinnedOffload(device) if device.type == "cuda" else FileOffload(folder)
