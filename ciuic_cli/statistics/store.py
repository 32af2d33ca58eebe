"""Activations and gradients between layers, kept in files: memory stays bounded whatever the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


class TensorFolder:
    """Float32 tensors by name in a folder, written and read whole; nothing stays mapped in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._shapes: dict[str, torch.Size] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        array = tensor.detach().float().contiguous().cpu().numpy()
        (self.folder / name).write_bytes(array.data)  # numpy's tofile does not say why it failed
        self._shapes[name] = tensor.shape

    def get(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        data = np.fromfile(self.folder / name, dtype=np.float32)
        return torch.from_numpy(data).reshape(self._shapes[name]).to(device=device, dtype=dtype)

    def drop(self, name: str) -> None:
        (self.folder / name).unlink()
        del self._shapes[name]
