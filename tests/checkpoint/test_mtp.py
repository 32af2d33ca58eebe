"""Tensors without a place in the model (fault 20): multi-token-prediction layers, their record, and leftovers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.checkpoint.mtp import PredictionLayer, PredictionLayers, extra_layer_of
from ciuic_cli.checkpoint.roles import classify_mtp
from ciuic_cli.errors import InputError

Make = Callable[..., Path]
Mapped = Callable[[Path], ModelMap]

KEPT = PredictionLayers(
    (PredictionLayer("model.layers.61", 7, 99),), True, 6, {"model.layers.61.embed_tokens.weight": "e"}
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.61.eh_proj.weight", "model.layers.61"),
        ("model.layers.62.eh_proj.weight", "model.layers.62"),
        ("model.layers.60.mlp.gate.weight", None),
        ("mtp.0.attn.wq_a.weight", "mtp.0"),
        ("model.mtp.layers.1.fc.weight", "model.mtp.layers.1"),
        ("mtp.fc.weight", "mtp"),
        ("vision.patch.weight", None),
        ("model.layers.6.mlp.mtp_like.weight", None),
    ],
)
def test_extra_layer_of_a_name(name: str, expected: str | None) -> None:
    assert extra_layer_of(name, 61) == expected


@pytest.mark.parametrize(
    ("name", "shape", "role", "compress", "buffer"),
    [
        ("model.layers.61.eh_proj.weight", (64, 128), "mtp", True, False),
        ("model.layers.61.mlp.experts.7.up_proj.weight", (64, 128), "mtp_expert", True, False),
        ("model.layers.61.mlp.shared_experts.up_proj.weight", (64, 128), "mtp", True, False),
        ("mtp.0.ffn.experts.7.w1.weight", (64, 128), "mtp_expert", True, False),
        ("mtp.layers.0.mlp.experts.gate_up_proj", (4, 64, 128), "mtp_expert", True, False),
        ("model.layers.61.mlp.gate.weight", (64, 128), "mtp_dense", False, False),
        ("model.layers.61.mlp.gate.e_score_correction_bias", (64,), "mtp_dense", False, True),
        ("mtp.0.hc_head_fn", (64, 128), "mtp_dense", False, False),
        ("model.layers.61.enorm.weight", (128,), "mtp_dense", False, False),
        ("model.layers.61.tiny.weight", (2, 8), "mtp_dense", False, False),
    ],
)
def test_roles_by_name(name: str, shape: tuple[int, ...], role: str, compress: bool, buffer: bool) -> None:
    found = classify_mtp(name, shape, floating=True)
    assert (found.role, found.compress, found.buffer) == (role, compress, buffer)
    assert bool(found.reason) != compress


def test_a_table_of_integers_is_kept_exactly() -> None:
    found = classify_mtp("mtp.0.ffn.gate.tid2eid", (263, 8), floating=False)
    assert (found.role, found.compress, found.buffer) == ("mtp_dense", False, True)


def test_the_section_round_trips() -> None:
    assert PredictionLayers.from_dict(KEPT.as_dict()) == KEPT
    assert PredictionLayers.from_dict(None) == PredictionLayers()
    assert KEPT.owns("model.layers.61.x") and not KEPT.owns("model.layers.610.x")


@pytest.mark.parametrize(
    "change",
    [
        {"kept": 1},
        {"layers": None},
        {"layers": [{"name": "a", "tensors": 1}]},
        {"layers": [{"name": 5, "tensors": 1, "bytes": 1}]},
        {"layers": [{"name": "a", "tensors": -1, "bytes": 1}]},
        {"stored_tensors": True},
        {"shared": {"a": 3}},
        {"shared": [1]},
    ],
)
def test_a_malformed_section_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="section mtp"):
        PredictionLayers.from_dict({**KEPT.as_dict(), **change})


def test_a_section_that_is_no_object_is_refused() -> None:
    for section in ([], "kept", 3):
        with pytest.raises(InputError, match="section mtp"):
            PredictionLayers.from_dict(section)


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
        InputError, match=f"layers.{layers - 1} is a complete decoder layer.* counts only {layers - 1}"
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
