"""`model.dtype` is the dtype of the activations, even if the first floating-point parameter has another one."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_checkpoints import FAMILIES
from transformers import AutoModelForCausalLM

from ciuic_cli import load
from ciuic_cli.runtime.loading import pack_module_inplace


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_model_dtype_is_the_requested_dtype(
    family: str, dtype: torch.dtype, artifact: Callable[..., Any], prompt: torch.Tensor
) -> None:
    model = load(artifact(family).folder, device="cpu", dtype=dtype)
    assert model.dtype == dtype == model.get_input_embeddings()(prompt).dtype


RUNS_V4 = pytest.mark.skipif(
    transformers.__version__.startswith("5.19."),
    reason="transformers 5.19 fails to run DeepSeek-V4 in bfloat16",
)


@RUNS_V4
def test_a_saved_copy_has_the_same_dtype(
    artifact: Callable[..., Any], prompt: torch.Tensor, tmp_path: Path
) -> None:
    """DeepSeek-V4 keeps its hyper-connections in float32, the first parameters after the embedding."""
    model = load(artifact("deepseek_v4").folder, device="cpu")
    expected = model(prompt).logits
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["dtype"] == "bfloat16" and saved["architectures"] == ["DeepseekV4ForCausalLM"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16 and torch.equal(again(prompt).logits, expected)


@RUNS_V4
def test_copies_and_pickles_are_models_of_the_same_class(
    artifact: Callable[..., Any], prompt: torch.Tensor
) -> None:
    model = load(artifact("deepseek_v4").folder, device="cpu")
    twins = [copy.deepcopy(model)]
    twins += [pickle.loads(pickle.dumps(model, protocol)) for protocol in (0, pickle.HIGHEST_PROTOCOL)]
    expected = model(prompt, output_hidden_states=True)  # transformers looks up recorded outputs by class
    assert len(expected.hidden_states) == 5
    for twin in twins:
        assert type(twin) is type(model) and twin.dtype == torch.bfloat16
        assert torch.equal(twin(prompt).logits, expected.logits)


def test_a_model_that_is_packed_in_place(artifact: Callable[..., Any]) -> None:
    built = artifact("deepseek_v4")
    model = built.dense_model(torch.bfloat16)
    pack_module_inplace(model, {name: blob for name, blob in built.stored.items() if name in built.decoded})
    assert model.dtype == torch.bfloat16 and model.to(torch.float16).dtype == torch.float16
