"""Activations and gradients between layers, kept in files: memory stays bounded whatever the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.digests import file_digest

Contents = dict[str, tuple[Sequence[int], str]]
"""Shape and digest of each tensor by its name."""


class TensorFolder:
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

    def sweep(self) -> None:
        """Remove the files of what was dropped."""
        while self._dropped:
            (self.folder / self._dropped.pop()).unlink()

    def contents(self) -> Contents:
        """What is in the folder, for `restore`."""
        return dict(self._contents)

    def restore(self, contents: Mapping[str, Any]) -> bool:
        """Take over what an earlier process left here; False, and nothing taken, where a file has other bytes."""
        found: Contents = {name: (tuple(shape), digest) for name, (shape, digest) in contents.items()}
        intact = all(has_digest(self.folder / name, digest) for name, (_, digest) in found.items())
        if intact:
            self._contents = found
        return intact


def has_digest(path: Path, digest: str) -> bool:
    """Whether the file is there with these bytes."""
    try:
        return file_digest(path) == digest
    except FileNotFoundError:
        return False
