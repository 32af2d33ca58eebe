"""The inputs of the first layer, which only the base model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.layer_stream import LayerStream


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_only_the_originals_head_is_read_with_the_first_layers_inputs(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changed: bool,
) -> None:
    """Its faults are found at the start; with other values for weights it would take memory for nothing."""
    model_map = map_model(open_checkpoint(tiny_checkpoint(family)))
    reads: list[str] = []
    read = ModelMap.read

    def noting(self: ModelMap, name: str) -> torch.Tensor:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(ModelMap, "read", noting)
    tokens = torch.arange(5)[None]
    stream = LayerStream(model_map, [tokens], tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    stream.override = (lambda name, expert: None) if changed else None
    stream.begin()
    embedding = "model.embed_tokens.weight"
    assert embedding in reads
    assert ("lm_head.weight" in reads) is not changed
    assert torch.equal(stream.hidden.get("0.0", stream.device)[0], read(model_map, embedding).float()[:5])
