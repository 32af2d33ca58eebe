"""Activations and gradients between layers, kept in files: memory stays bounded whatever the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.process.digests import file_digest

Contents = dict[str, tuple[Sequence[int], str]]
"""Shape and digest of each tensor by its name."""


class ActivationStore:
    """Float32 tensors by name in a folder, written and read whole; nothing stays mapped in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._contents: Contents = {}
        self._dropped: list[str] = []

    def put(self, name: str, tensor: torch.Tensor) -> None:
        array = tensor.detach().float().contiguous().cpu().numpy()
        (self.folder / name).write_bytes(array.data)  # numpy's tofile does not say why it failed
        self._contents[name] = (tuple(tensor.shape), hashlib.sha256(array.data).hexdigest())

    def get(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        data = np.fromfile(self.folder / name, dtype=np.float32)
        return torch.from_numpy(data).reshape(tuple(self._contents[name][0])).to(device=device, dtype=dtype)

    def drop(self, name: str) -> None:
        """Forget a tensor, if it is there; its file stays until `sweep`."""
        if self._contents.pop(name, None) is not None:
            self._dropped.append(name)

    def clear(self) -> None:
        """Remove all that is in the folder."""
        for name in [*self._contents]:
            self.drop(name)
        self.sweep()

    def sweep(self) -> None:
        """Remove the files of what was dropped."""
        while self._dropped:
            (self.folder / self._dropped.pop()).unlink()

    def contents(self) -> Contents:
        """What is in the folder, for `holds` and `take`."""
        return dict(self._contents)

    def holds(self, contents: Mapping[str, Any]) -> bool:
        """Whether all that an earlier process had here is still there with the same bytes."""
        return all(has_digest(self.folder / name, digest) for name, (_, digest) in contents.items())

    def take(self, contents: Mapping[str, Any]) -> None:
        """Go on with what an earlier process had here."""
        self._contents = {name: (tuple(shape), digest) for name, (shape, digest) in contents.items()}


def has_digest(path: Path, digest: str) -> bool:
    """Whether the file is there with these bytes."""
    try:
        return file_digest(path) == digest
    except FileNotFoundError:
        return False
