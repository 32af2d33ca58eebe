"""Decoding steps behind contexts: the cache that they find, the bytes that they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.errors import UsageError
from ciuic_cli.evaluation import decode_speed
from ciuic_cli.evaluation.bench_process import cache_keyword, fitted_contexts
from ciuic_cli.evaluation.opening import open_model

Make = Callable[..., Path]


@pytest.mark.parametrize(
    ("family", "prompts"),
    [("llama", [8]), ("deepseek_v3", [8]), ("deepseek_v32", [8]), ("gemma3", [8, 40])],
)
def test_steps_find_the_whole_context(
    family: str, prompts: list[int], tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies lengthen a growing cache; a model with sliding windows computes its whole prompt."""
    monkeypatch.setattr(decode_speed, "_FILLED_FROM", 8)
    monkeypatch.setattr(decode_speed, "STEPS", 2)
    model = open_model(tiny_checkpoint(family), "cpu")
    keyword, calls = cache_keyword(model), []

    def note(_module: Any, _arguments: Any, keywords: dict[str, Any], _output: Any) -> None:
        calls.append((keywords["input_ids"].shape[1], keywords[keyword].get_seq_length()))

    model.register_forward_hook(note, with_kwargs=True)
    with torch.inference_mode():
        found = decode_speed.decode_at(model, keyword, [40], batch_size=2)
    assert calls == [(n, n) for n in prompts] + [(1, 41), (1, 42), (1, 43), (1, 44)]
    assert found[0]["context"] == 40 and found[0]["ms_per_token"] > 0


def test_active_bytes_of_a_dense_model(tiny_checkpoint: Make) -> None:
    """All weights but the embedding table, which a tied head reads."""
    untied, tied = (open_model(tiny_checkpoint(family), "cpu") for family in ("llama", "llama_tied"))

    def all_bytes(model: Any) -> int:
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    assert decode_speed.active_bytes(untied) == all_bytes(untied) - untied.model.embed_tokens.weight.nbytes
    assert decode_speed.active_bytes(tied) == all_bytes(tied)


def test_active_bytes_of_experts(tiny_checkpoint: Make) -> None:
    """A token uses k of E experts."""
    model = open_model(tiny_checkpoint("deepseek_v3"), "cpu")
    every = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    k, count = model.config.num_experts_per_tok, model.config.n_routed_experts
    expected = every - model.model.embed_tokens.weight.nbytes - experts * (1 - k / count)
    assert decode_speed.active_bytes(model) == pytest.approx(expected, abs=1)


def test_contexts_that_fit() -> None:
    where = Path("model")
    assert fitted_contexts(None, None, where) == [128, 2048, 8192]
    assert fitted_contexts(None, 4096, where) == [128, 2048]
    assert fitted_contexts(None, 64, where) == []
    assert fitted_contexts([300], 4096, where) == [300]
    with pytest.raises(UsageError, match="a context of 300 needs 318 positions, the model has 317"):
        fitted_contexts([7, 300], 317, where)


def test_bandwidth_is_one_of_memory() -> None:
    assert 5e8 < decode_speed.memory_bandwidth(torch.device("cpu")) < 2e12
