"""Layers with other values for their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.layer_stream import LayerStream


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
def test_a_value_replaces_the_stored_one_which_is_not_read(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model_map = map_model(open_checkpoint(tiny_checkpoint(family)))
    reads: list[str] = []
    read = ModelMap.read

    def noting(self: ModelMap, name: str) -> torch.Tensor:
        reads.append(name)
        return read(self, name)

    def halved(name: str, expert: int | None) -> torch.Tensor | None:
        parameter = model_map.parameters[name]
        if not parameter.compress or expert == 1:
            return None  # the stored value
        value = read(model_map, name) if expert is None else model_map.read_expert(name, expert)
        return value.float() / 2

    monkeypatch.setattr(ModelMap, "read", noting)
    stream = LayerStream(
        model_map, [torch.zeros(1, 3, dtype=torch.long)], tmp_path,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    stream.override = halved
    changed = 0
    parts = [(prefix, stream.layer_with_weights(number)) for number, prefix in enumerate(stream.prefixes)]
    for prefix, context in [*parts, ("", stream.without_layers())]:
        with context as layer:
            module = layer if isinstance(layer, nn.Module) else stream.model
            for name, tensor in module.named_parameters():
                parameter = model_map.parameters[prefix + name]
                parameter = model_map.parameters[parameter.tied_to or parameter.name]
                expected = read(model_map, parameter.name).float()
                if parameter.compress:
                    changed += 1
                    expected[[e for e in range(len(expected)) if e != 1 or not parameter.is_stack]] /= 2
                assert torch.allclose(parameter.in_memory(tensor).float(), expected, rtol=1e-2), name
                assert not tensor.requires_grad
    assert changed > 5
    replaced = [
        name
        for name, parameter in model_map.parameters.items()
        if parameter.compress and not parameter.is_stack
    ]
    assert not {*reads} & {*replaced}
