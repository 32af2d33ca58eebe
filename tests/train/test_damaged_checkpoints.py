"""A dense checkpoint whose weights are incomplete or do not fit to its config.json is not trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ciuic_cli.errors import InputError
from ciuic_cli.train.engine import load_for_adapter
from ciuic_cli.train.full import load_for_training

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


@pytest.mark.parametrize("load", [load_for_adapter, load_for_training])
def test_a_missing_weight(load: Callable[..., object], checkpoint: Path) -> None:
    load(checkpoint, CPU)
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors[NAME]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 tensor.* missing") as caught:
        load(checkpoint, CPU)
    assert caught.value.tensor == NAME


@pytest.mark.parametrize("load", [load_for_adapter, load_for_training])
def test_another_size_in_the_config(load: Callable[..., object], checkpoint: Path) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 96}))
    with pytest.raises(InputError, match="stored with shape"):
        load(checkpoint, CPU)
