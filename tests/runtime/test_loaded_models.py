"""What programs do to a loaded model: another head, more tokens, a trace, a copy in the artifact's own folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ciuic_cli.artifact.writer import CHECKSUMS, REPORT, REPORT_PAGE
from ciuic_cli.errors import InputError, UsageError


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


def test_the_vocabulary_keeps_its_size(artifact: Callable[..., Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact("llama").folder)
    tokens = model.get_input_embeddings()
    assert model.resize_token_embeddings(263) is tokens and model.resize_token_embeddings() is tokens
    for changed in ({"new_num_tokens": 264}, {"new_num_tokens": 263, "pad_to_multiple_of": 8}):
        with pytest.raises(UsageError, match="263 tokens; it cannot be resized to 264") as caught:
            model.resize_token_embeddings(**changed)
        assert "compress that folder" in (caught.value.remedy or "")


def test_a_trace_is_refused_by_name(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact("llama").folder)
    with pytest.raises(UsageError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, (prompt,))


@torch.no_grad()
def test_a_copy_in_the_artifact_s_own_folder_has_no_old_checksums(
    artifact: Callable[..., Any], make_artifact: Callable[..., Any], prompt: torch.Tensor, tmp_path: Path
) -> None:
    folder = make_artifact(artifact("llama").source, tmp_path / "out").folder
    described = (CHECKSUMS, REPORT, REPORT_PAGE)
    for name in (*described, "notes.txt"):
        (folder / name).write_text("of the artifact")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model(prompt).logits
    model.save_pretrained(folder)
    assert not any((folder / name).exists() for name in described) and (folder / "notes.txt").exists()
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(again(prompt).logits, expected)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / REPORT).write_text("a report without checksums is not ours")
    model.save_pretrained(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / REPORT).exists()
