"""Fault 20: tensors that are no part of the model are a warning, prediction layers are reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import InputError

Make = Callable[..., Path]
Mapped = Callable[[Path], ModelMap]


def test_20_unexpected_tensors_are_a_warning(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["vision.patch.weight"] = torch.ones(3, 3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)

    model_map = mapped(changed(tiny_checkpoint("llama"), tmp_path / "m", add))
    assert len(model_map.warnings) == 1 and "vision.patch.weight" in model_map.warnings[0]


def test_20_a_multi_token_prediction_layer_is_reported_as_dropped(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = [name for name in tensors if name.startswith("model.layers.2.")]
        for name in last:
            tensors[name.replace("layers.2.", "layers.3.")] = tensors[name].clone()
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(56, 112, dtype=torch.bfloat16)

    source = tiny_checkpoint("deepseek_v3")
    count = sum(name.startswith("model.layers.2.") for name in load_file(source / "model.safetensors"))
    model_map = mapped(changed(source, tmp_path / "m", add, num_nextn_predict_layers=1))
    assert not model_map.warnings
    (sentence,) = model_map.mtp.sentences()
    assert f"model.layers.3: {count + 1} tensors" in sentence and sentence.endswith("dropped")
    assert len(model_map.mtp_tensors) == count + 1

    def add_v4(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.0.attn.wq_a.weight"] = torch.ones(4, 4)
        tensors["mtp.0.norm.weight"] = torch.ones(4)

    v4 = mapped(changed(tiny_checkpoint("deepseek_v4"), tmp_path / "v4", add_v4))
    assert not v4.warnings and v4.mtp.sentences()[0].startswith(
        "multi-token-prediction layer mtp.0: 2 tensors, 80 bytes"
    )


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "mistral", "mixtral"])
def test_a_decoder_layer_that_the_config_does_not_count_is_refused(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make, family: str
) -> None:
    source = tiny_checkpoint(family)
    layers = mapped(source).config.num_hidden_layers
    with pytest.raises(
        InputError, match=f"layers.{layers - 1} is a decoder layer .* counts {layers - 1}"
    ) as found:
        mapped(changed(source, tmp_path / "m", lambda tensors: None, num_hidden_layers=layers - 1))
    assert str(found.value.file).endswith("config.json") and "num_hidden_layers" in str(found.value.remedy)


def test_a_part_of_a_layer_beyond_the_last_is_no_prediction_layer(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.ones(3, 3)

    model_map = mapped(changed(tiny_checkpoint("llama"), tmp_path / "m", add))
    assert not model_map.mtp.layers and "model.layers.9.mlp.up_proj.weight" in model_map.warnings[0]
