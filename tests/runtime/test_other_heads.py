"""An artifact under another head than that of its language model, such as a classifier's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ciuic_cli.errors import InputError


@pytest.mark.parametrize(
    ("auto", "family"),
    [
        (AutoModelForSequenceClassification, "deepseek_v3"),
        (AutoModelForSequenceClassification, "llama_tied"),
        (AutoModelForTokenClassification, "llama"),
    ],
)
@torch.no_grad()
def test_a_new_head_on_the_compressed_model(
    auto: Any, family: str, artifact: Callable[..., Any], prompt: torch.Tensor, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import logging

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = artifact(family).folder
    with caplog.at_level(logging.WARNING, logger="transformers"):
        model = auto.from_pretrained(folder, dtype=torch.float32)
    assert "newly initialized" in caplog.text or "MISSING" in caplog.text
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    body = getattr(model, model.base_model_prefix)
    assert torch.equal(body(prompt).last_hidden_state, whole.model(prompt).last_hidden_state)
    (output, *_) = model(prompt).to_tuple()
    assert bool(torch.isfinite(output).all())


def test_a_part_of_the_model_itself_must_be_there(
    artifact: Callable[..., Any], make_artifact: Callable[..., Any], tmp_path: Any
) -> None:
    from safetensors.torch import load_file, save_file

    built = make_artifact(artifact("llama").source, tmp_path / "out")
    file = built.folder / "model.safetensors"
    stored = load_file(file)
    del stored["model.norm.weight"]
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="missing"):
        AutoModelForSequenceClassification.from_pretrained(built.folder)
