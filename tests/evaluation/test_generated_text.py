"""Greedy generation, and the special tokens that it needs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.evaluation.opening import open_model
from ciuic_cli.evaluation.perplexity import generate_text


def test_generated_text_is_greedy_whatever_the_checkpoint_asks_for(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_checkpoint("llama", dtype=torch.float32), folder)  # bf16 has ties
    asked = {"do_sample": True, "temperature": 9.0, "repetition_penalty": 5.0, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The mill", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    expected = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert generate_text(folder, "The mill", device="cpu", max_new_tokens=12) == expected
    assert expected.startswith("The mill")


def test_an_artifact_generates_too(artifact: tuple[Path, Path]) -> None:
    said = generate_text(artifact[1], "The mill", device="cpu", max_new_tokens=4)
    assert said.startswith("The mill")
    assert len(said) > len("The mill")


def test_a_prompt_beyond_the_positions_is_refused(artifact: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="positions"):
        generate_text(artifact[0], "The mill " * 2000, device="cpu")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", ["1", {}, math.nan, 1.5, True, 2**63, -(10**30), [1, "2"], [[1]]])
def test_special_tokens_that_are_none_are_refused(
    tiny_checkpoint: Callable[..., Path], artifact: tuple[Path, Path], tmp_path: Path, key: str, value: object
) -> None:
    """By the file that has them, whether a checkpoint's or an artifact's: generation would fail somewhere in torch."""
    for number, source in enumerate((tiny_checkpoint("llama"), artifact[1])):
        for name in ("generation_config.json", "config.json"):
            folder = tmp_path / f"{number}{name}"
            shutil.copytree(source, folder)
            content = json.loads((source / name).read_text()) if (source / name).exists() else {}
            (folder / name).write_text(json.dumps(content | {key: value}))
            with pytest.raises(InputError, match=f"{key} is ") as caught:
                open_model(folder, "cpu")
            assert caught.value.file == str(folder / name)


@pytest.mark.parametrize("value", [None, 0, -1, 5000, [], [1, 2]])
def test_special_tokens_that_models_have_are_read(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, value: object
) -> None:
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert generate_text(tmp_path / "m", "The mill", device="cpu", max_new_tokens=2).startswith("The mill")
