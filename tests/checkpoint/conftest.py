"""Fixtures for tests of the model map: edited copies of the tiny checkpoints, and tokens to run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint


@pytest.fixture(scope="session")
def mapped() -> Callable[[Path], ModelMap]:
    """`mapped(folder)`: the ModelMap of a checkpoint folder."""
    return lambda folder: map_model(open_checkpoint(folder))


@pytest.fixture(scope="session")
def changed() -> Callable[..., Path]:
    """`changed(source, target, edit, **config)`: a copy of `source` at `target` with changed tensors and config.

    `edit` changes the dict of tensors in place. `config` are the changed keys of config.json.
    """

    def copy(
        source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], None], **config: object
    ) -> Path:
        shutil.copytree(source, target)
        tensors = load_file(target / "model.safetensors")
        edit(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        values = {**json.loads((target / "config.json").read_text()), **config}
        (target / "config.json").write_text(json.dumps(values))
        return target

    return copy


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """Two sequences of 40 tokens, none of them special."""
    return torch.randint(3, 263, (2, 40), generator=torch.Generator().manual_seed(0))
