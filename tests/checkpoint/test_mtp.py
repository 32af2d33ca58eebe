"""Which tensors are a multi-token-prediction layer's, what they are, and the section of an artifact about them."""

from __future__ import annotations

from typing import Any

import pytest

from ciuic_cli.checkpoint.mtp import PredictionLayer, PredictionLayers, layer_of
from ciuic_cli.checkpoint.roles import classify_mtp
from ciuic_cli.errors import InputError

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
def test_the_layer_of_a_name(name: str, expected: str | None) -> None:
    assert layer_of(name, 61) == expected


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
def test_roles(name: str, shape: tuple[int, ...], role: str, compress: bool, buffer: bool) -> None:
    found = classify_mtp(name, shape, floating=True)
    assert (found.role, found.compress, found.buffer) == (role, compress, buffer)
    assert bool(found.reason) != compress


def test_a_table_of_integers_is_no_matrix() -> None:
    found = classify_mtp("mtp.0.ffn.gate.tid2eid", (263, 8), floating=False)
    assert (found.role, found.compress, found.buffer) == ("mtp_dense", False, True)


def test_the_section_comes_back_as_it_was() -> None:
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
def test_a_section_in_another_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="section mtp"):
        PredictionLayers.from_dict({**KEPT.as_dict(), **change})


def test_a_section_that_is_no_object_is_refused() -> None:
    for section in ([], "kept", 3):
        with pytest.raises(InputError, match="section mtp"):
            PredictionLayers.from_dict(section)
