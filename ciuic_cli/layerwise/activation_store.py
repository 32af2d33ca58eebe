"""Activations and gradients between layers, and values of overrides, kept in files instead of memory."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.process.digests import file_digest

_PART = 1 << 20
"""Numbers that are converted, and written or read, at a time. Chosen, not tuned."""
StoreState = dict[str, tuple[Sequence[int], str]]
"""Shape and SHA-256 of each tensor, by its name."""


class ActivationStore:
    """Tensors by name, one file each in `folder`, written and read whole; none stays in memory.

    stored: the dtype to which tensors are converted, and in which the files have them.
    """

    def __init__(self, folder: Path, stored: torch.dtype = torch.float32) -> None:
        self.folder, self.stored = folder, stored
        folder.mkdir(parents=True, exist_ok=True)
        self._state: StoreState = {}
        self._dropped: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def put(self, name: str, tensor: torch.Tensor) -> None:
        digest = hashlib.sha256()
        # Not numpy's tofile: its error does not say why it failed.
        with (self.folder / name).open("wb") as file:
            for part in _parts(tensor.detach().cpu().contiguous()):
                data = part.to(self.stored).view(torch.uint8).numpy().data
                file.write(data)
                digest.update(data)
        self._state[name] = (tuple(tensor.shape), digest.hexdigest())

    def get(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.empty(tuple(self._state[name][0]), dtype=dtype)
        with (self.folder / name).open("rb") as file:
            for part in _parts(tensor):
                stored = part if dtype == self.stored else torch.empty(part.shape, dtype=self.stored)
                if file.readinto(stored.view(torch.uint8).numpy().data) != stored.nbytes:
                    raise OSError(errno.EIO, "the file is shorter than it was written", file.name)
                part.copy_(stored)
        return tensor.to(device)

    def drop(self, name: str) -> None:
        """Forget a tensor, if there is one of this name. Its file stays until `delete_dropped`."""
        if self._state.pop(name, None) is not None:
            self._dropped.append(name)

    def delete_dropped(self) -> None:
        """Delete the files of dropped tensors."""
        while self._dropped:
            (self.folder / self._dropped.pop()).unlink()

    def clear(self) -> None:
        """Drop and delete all tensors."""
        for name in [*self._state]:
            self.drop(name)
        self.delete_dropped()

    def state(self) -> StoreState:
        """Description of all tensors, for `is_intact` and `restore`."""
        return dict(self._state)

    def is_intact(self, state: Mapping[str, Any]) -> bool:
        """Whether all tensors that `state` describes are here with the same bytes."""
        return all(has_digest(self.folder / name, digest) for name, (_, digest) in state.items())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the tensors that `state`, of an earlier process, describes."""
        self._state = {name: (tuple(shape), digest) for name, (shape, digest) in state.items()}


def has_digest(path: Path, digest: str) -> bool:
    """Whether the file exists with this SHA-256."""
    try:
        return file_digest(path) == digest
    except FileNotFoundError:
        return False


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of the numbers of a contiguous tensor, so many at a time that the whole never exists in two dtypes."""
    return tensor.view(-1).split(_PART) if tensor.numel() else []
