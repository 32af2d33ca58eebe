"""Fault 21: a tied head that is absent, or stored with equal or different values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ciuic_cli.checkpoint.model_map import ModelMap

Make = Callable[..., Path]
Mapped = Callable[[Path], ModelMap]


def test_21_tied_head_absent_equal_and_different(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make, tokens: torch.Tensor
) -> None:
    source = tiny_checkpoint("llama_tied")
    absent = mapped(source)
    head = absent.parameters["lm_head.weight"]
    assert head.tied_to == "model.embed_tokens.weight" and not head.compress
    assert torch.equal(absent.read("lm_head.weight"), absent.read("model.embed_tokens.weight"))
    embedding = absent.parameters["model.embed_tokens.weight"].numel

    def same(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def different(tensors: dict[str, torch.Tensor]) -> None:
        same(tensors)
        tensors["lm_head.weight"][262, 47] += 1

    def only_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    equal = mapped(changed(source, tmp_path / "same", same))
    assert equal.parameters["lm_head.weight"].tied_to and not equal.warnings
    assert equal.stored_numel == absent.stored_numel
    both = mapped(changed(source, tmp_path / "different", different))
    assert both.parameters["lm_head.weight"].tied_to is None and both.parameters["lm_head.weight"].compress
    assert both.stored_numel == absent.stored_numel + embedding
    assert len(both.warnings) == 1 and "differ" in both.warnings[0]
    assert both.source_config["tie_word_embeddings"] is False and absent.source_config["tie_word_embeddings"]
    assert both.config.tie_word_embeddings is False and absent.config.tie_word_embeddings is True
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "different", dtype="auto")
    model = both.skeleton()
    both.materialise(model, "")
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)
    swapped = mapped(changed(source, tmp_path / "head", only_head))
    assert torch.equal(swapped.read("model.embed_tokens.weight"), absent.read("model.embed_tokens.weight"))
    assert swapped.parameters["model.embed_tokens.weight"].sources == ("lm_head.weight",)
    assert swapped.stored_numel == absent.stored_numel
