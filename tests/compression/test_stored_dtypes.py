"""Weights that are kept have all digits of the checkpoint, also where its files have several dtypes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import compress_tiny
from transformers import AutoModelForCausalLM

from ciuic_cli.artifact.reader import open_artifact

NORM = "model.layers.1.input_layernorm.weight"


def mixed(checkpoint: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Give all norms this dtype, with values that bfloat16 rounds; returns the file's tensors."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        if value.dim() == 1:
            random = torch.rand(value.shape, generator=torch.Generator().manual_seed(len(name)))
            tensors[name] = (1 + random / 8).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_keep_the_dtype_of_the_file(
    dtype: torch.dtype, tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    originals = mixed(source, dtype)
    assert json.loads((source / "config.json").read_text())["dtype"] == "bfloat16"
    assert not torch.equal(originals[NORM].bfloat16().to(dtype), originals[NORM])
    report = compress_tiny(source, tmp_path / "out", text)
    artifact = open_artifact(tmp_path / "out")
    stored = {
        name: value
        for shard in artifact.folder.glob("*.safetensors")
        for name, value in load_file(shard).items()
    }
    norms = [name for name, value in originals.items() if value.dim() == 1]
    assert len(norms) == 7 and all(torch.equal(stored[name], originals[name]) for name in norms)
    [row] = [row for row in report.components if row.name == NORM]
    assert row.bytes == 48 * dtype.itemsize
    for requested, expected in ((torch.float32, dtype), (torch.bfloat16, torch.bfloat16)):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=requested)
        norm = model.get_parameter(NORM)
        assert norm.dtype == requested and torch.equal(norm, originals[NORM].to(expected).to(requested))
