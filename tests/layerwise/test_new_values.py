"""Layers with other values for their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.layer_stream import LayerStream


class Reads(NamedTuple):
    """names: the parameters that a model map has read during the test. read: `ModelMap.read` without a note."""

    names: list[str]
    read: Callable[[ModelMap, str], torch.Tensor]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    names: list[str] = []
    read = ModelMap.read

    def noting(self: ModelMap, name: str) -> torch.Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(ModelMap, "read", noting)
    return Reads(names, read)


def _stream(model_map: ModelMap, tokens: torch.Tensor, folder: Path) -> LayerStream:
    return LayerStream(model_map, [tokens], folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_only_the_originals_head_is_read_with_the_first_layers_inputs(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, reads: Reads, family: str, changed: bool
) -> None:
    """A fault in the original's head is found at the start. In a model with other weights it would only take memory."""
    model_map = map_model(open_checkpoint(tiny_checkpoint(family)))
    stream = _stream(model_map, torch.arange(5)[None], tmp_path)
    stream.override = (lambda name, expert: None) if changed else None
    stream.begin()
    embedding = "model.embed_tokens.weight"
    assert embedding in reads.names
    assert ("lm_head.weight" in reads.names) is not changed
    first = stream.hidden.get("0.0", stream.device)[0]
    assert torch.equal(first, reads.read(model_map, embedding).float()[:5])


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
def test_a_value_replaces_the_stored_one_which_is_not_read(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, reads: Reads, family: str
) -> None:
    model_map = map_model(open_checkpoint(tiny_checkpoint(family)))

    def halved(name: str, expert: int | None) -> torch.Tensor | None:
        parameter = model_map.parameters[name]
        if not parameter.compress or expert == 1:
            return None  # the stored value
        value = reads.read(model_map, name) if expert is None else model_map.read_expert(name, expert)
        return value.float() / 2

    stream = _stream(model_map, torch.zeros(1, 3, dtype=torch.long), tmp_path)
    stream.override = halved
    changed = 0
    parts = [(prefix, stream.layer_with_weights(number)) for number, prefix in enumerate(stream.prefixes)]
    for prefix, context in [*parts, ("", stream.without_layers())]:
        with context as layer:
            module = layer if isinstance(layer, nn.Module) else stream.model
            for name, tensor in module.named_parameters():
                parameter = model_map.parameters[prefix + name]
                parameter = model_map.parameters[parameter.tied_to or parameter.name]
                expected = reads.read(model_map, parameter.name).float()
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
    assert not {*reads.names} & {*replaced}
