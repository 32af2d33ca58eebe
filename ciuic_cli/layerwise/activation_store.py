"""Activations and gradients between layers, and values of overrides, kept in files instead of memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.process.digests import file_digest

StoreState = dict[str, tuple[Sequence[int], str]]
"""Shape and SHA-256 of each tensor, by its name."""


class ActivationStore:
    """Float32 tensors by name, one file each in `folder`, written and read whole; none stays in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._state: StoreState = {}
        self._dropped: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def put(self, name: str, tensor: torch.Tensor) -> None:
        array = tensor.detach().float().contiguous().cpu().numpy()
        # Not numpy's tofile: its error does not say why it failed.
        (self.folder / name).write_bytes(array.data)
        self._state[name] = (tuple(tensor.shape), hashlib.sha256(array.data).hexdigest())

    def get(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        data = np.fromfile(self.folder / name, dtype=np.float32)
        return torch.from_numpy(data).reshape(tuple(self._state[name][0])).to(device=device, dtype=dtype)

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
