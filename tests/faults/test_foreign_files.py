"""Configs as transformers writes them, what transformers itself cannot run, formats of scales, other tokenizers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attacks import Victim, harmless, invoke

from ciuic_cli.checkpoint.architecture import build_config
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.statistics.files import INDEX, MOMENTS, SINGLE_TENSOR_KINDS, Statistics

Make = Callable[..., Victim]


# --- config.json


def test_floats_as_transformers_writes_them_are_read() -> None:
    limits = [0.0, {"__float__": "Infinity"}]
    config = build_config({"model_type": "mamba2", "time_step_limit": limits})
    assert list(config.time_step_limit) == [0.0, math.inf]


def test_a_config_with_infinity_is_compressed(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_config(limits=[{"__float__": "-Infinity"}, 1.0], more={"deep": [{"__float__": "Infinity"}]})
    v.succeeds()
    assert json.loads((v.out / "config.json").read_text())["limits"] == [{"__float__": "-Infinity"}, 1.0]
    assert invoke("eval", v.out, "--limit", 1, "--seqlen", 64).code == 0


@pytest.mark.parametrize("value", ["Infinity", "NaN"])
def test_a_number_that_must_be_finite_is_named(victim: Make, value: str) -> None:
    v = victim(0, "llama")
    v.edit_config(rms_norm_eps={"__float__": value})
    v.refused("rms_norm_eps", "a finite number", file="config.json")


def test_a_model_that_transformers_cannot_run_is_named_with_the_function(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    def broken(*arguments: object, **options: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(modeling_llama, "rotate_half", broken)
    v = victim(0, "llama")
    done = v.refused(
        "transformers cannot run the model: AttributeError in apply_rotary_pos_emb", "no such thing",
        file="model", remedy="another version", commands=["compress"],
    )  # fmt: skip
    assert "download" not in done.stderr


# --- stored numbers


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_in_a_format_of_scales_is_refused(victim: Make, name: str) -> None:
    v = victim(0, "llama")

    def as_scales(tensors: dict[str, torch.Tensor]) -> None:
        exponents = torch.full(tensors[name].shape, 120, dtype=torch.uint8)
        tensors[name] = exponents.view(torch.float8_e8m0fnu)

    v.edit_tensors(as_scales)
    v.refused("F8_E8M0", "a format of scales", tensor=name, file="model.safetensors", remedy="bf16")


def test_a_model_with_one_position_is_named_and_not_an_option(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_config(max_position_embeddings=1)
    for options in ([], ["--seqlen", 64]):
        done = v.refused("max_position_embeddings = 1", file="config.json", options=options)
        assert "--seqlen" not in done.stderr


# --- the journal's statistics


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0damaged!", b"\xff" * 64])
def test_damaged_statistics_are_called_so(tmp_path: Path, content: bytes) -> None:
    files = {kind: {"a": "a.safetensors"} for kind in (*MOMENTS, *SINGLE_TENSOR_KINDS)}
    index = {
        "tokens": dict.fromkeys(MOMENTS, 1), "files": files, "expert_tokens": {kind: {} for kind in MOMENTS},
    }  # fmt: skip
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "a.safetensors").write_bytes(content)
    statistics = Statistics(tmp_path)
    for read in (statistics.input_moment, statistics.contexts):
        with pytest.raises(EnvironmentFault, match="statistics of this run were damaged") as caught:
            read("a")
        assert str(caught.value.file).endswith("a.safetensors") and "again" in (caught.value.remedy or "")
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(EnvironmentFault, match="statistics of this run were damaged"):
        Statistics(tmp_path)


def test_statistics_damaged_during_the_run_are_not_called_unwritable(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(0, "llama")

    def damaged(folder: Path) -> Statistics:
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"torn")
        return Statistics(folder)

    with monkeypatch.context() as patch:
        patch.setattr("ciuic_cli.compression.run.Statistics", damaged)
        done = v.compress()
    assert done.code == 5 and "statistics of this run were damaged" in done.stderr, done.stderr
    harmless(done)
    assert "cannot write" not in done.stderr
    v.succeeds()


# --- eval --base


def test_a_base_with_another_tokenizer_gives_a_warning(victim: Make, tmp_path: Path) -> None:
    v = victim(0, "llama")
    arguments = ["eval", v.model, "--base", v.model, "--text", v.text, "--limit", 1, "--seqlen", 64]
    assert "tokenizer" not in invoke(*arguments).stderr
    other = tmp_path / "other"
    shutil.copytree(v.model, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    pairs = sorted(vocabulary.items(), key=lambda item: item[1])
    for (token, _), (_, number) in zip(pairs[:200], reversed(pairs[:200]), strict=True):
        vocabulary[token] = number
    (other / "tokenizer.json").write_text(json.dumps(content))
    arguments[3] = other
    done = invoke(*arguments)
    assert done.code == 0, done.stderr
    assert "warning: the tokenizer of" in done.stderr and str(other) in done.stderr.replace("\n", "")


def test_a_base_with_another_vocabulary_is_refused_before_any_work(
    victim: Make, tiny_checkpoint: Callable[..., Path]
) -> None:
    v = victim(0, "llama")
    other = tiny_checkpoint("llama", vocab_size=300)
    done = invoke("eval", v.model, "--base", other, "--text", v.text, "--seqlen", 64)
    assert done.code == 3 and "the vocabularies differ: the base predicts 300" in done.stderr
    assert "windows" not in done.stderr
