"""vLLM on an artifact predicts what it predicts on the same weights in dense form.

`make vllm-check` runs these tests in an environment with vLLM for the CPU. They compute in float32: what is wrong
(parts in another order, a lost bias, an expert that is not masked) changes log-probabilities by more than 0.05.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from tiny_checkpoints import VOCABULARY, make_checkpoint
from vllm_agreement import difference, generated_in_vllm, in_transformers, in_vllm

from ciuic_cli import compress, read_tensor
from ciuic_cli.artifact.reader import open_artifact

pytestmark = pytest.mark.campaign

AGREEMENT = 0.002
"""Largest accepted mean difference of log-probabilities in float32."""
MLA = {
    "hidden_size": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
"""vLLM's MLA on a CPU runs only with DeepSeek's own ranks and head sizes."""
MODELS: dict[str, dict[str, Any]] = {
    "llama_tied": {"hidden_size": 128},
    "qwen2": {"hidden_size": 128},
    "deepseek_v3": {**MLA, "q_lora_rank": 96},
    "qwen2_moe": {"hidden_size": 128},
}
ADDED_TO_CONFIG = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""Keys of DeepSeek's own config.json that transformers does not write."""


@dataclass(frozen=True)
class Case:
    """An artifact, and a checkpoint with the decoded weights of the artifact."""

    artifact: Path
    decoded: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(family: str) -> Case:
        if family not in made:
            made[family] = _case(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


def _case(family: str, folder: Path) -> Case:
    source = make_checkpoint(family, folder / "source", **MODELS[family])
    config = json.loads((source / "config.json").read_text()) | ADDED_TO_CONFIG.get(family, {})
    (source / "config.json").write_text(json.dumps(config))
    _remove_expert(source)
    compress(source, folder / "out", effort="fast", nsamples=4, seqlen=64)
    stored = open_artifact(folder / "out").tensors
    shutil.copytree(source, folder / "decoded")
    tensors = {}
    for name in stored:
        dense = read_tensor(folder / "out", name)
        if ".experts." in name:  # as checkpoints have them
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
            layer, _, stack = name.rpartition(".")
            for number, expert in enumerate(dense):
                halves = expert.chunk(len(parts[stack]))
                for part, half in zip(parts[stack], halves, strict=True):
                    tensors[f"{layer}.{number}.{part}.weight"] = half.contiguous()
        else:
            tensors[name] = dense.contiguous()
    save_file(tensors, folder / "decoded" / "model.safetensors", {"format": "pt"})
    return Case(folder / "out", folder / "decoded")


def _remove_expert(source: Path) -> None:
    """Make the last expert of every layer zero, so that it is pruned, and routers must avoid it."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name}
    for name, tensor in tensors.items():
        if numbers and f".experts.{max(numbers)}.down_proj" in name:
            tensor.zero_()
    save_file(tensors, file, {"format": "pt"})


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (6, 96), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_it_agrees_with_the_decoded_weights(family: str, case: Callable[[str], Case]) -> None:
    folders = case(family)
    of_artifact = in_vllm(folders.artifact, tokens())
    assert difference(of_artifact, in_vllm(folders.decoded, tokens())) < AGREEMENT
    assert difference(of_artifact, in_transformers(folders.artifact, tokens())) < AGREEMENT


def test_deepseek_v3_agrees_with_transformers(case: Callable[[str], Case]) -> None:
    """Merged latent projections, stacks of experts, and a pruned expert that the router avoids."""
    folders = case("deepseek_v3")
    of_artifact = in_vllm(folders.artifact, tokens())
    assert difference(of_artifact, in_transformers(folders.artifact, tokens())) < AGREEMENT
    # The router of the decoded model chooses the expert of zeros: the artifact's must not.
    assert difference(of_artifact, in_vllm(folders.decoded, tokens())) > 10 * AGREEMENT


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_it_agrees_with_transformers_when_compiled(family: str, case: Callable[[str], Case]) -> None:
    """As `vllm serve` runs a model. Without `inductor.keep_order_of_writes` torch reads a router's logits too early."""
    artifact = case(family).artifact
    compiled = in_vllm(artifact, tokens(), enforce_eager=False)
    assert torch.isfinite(compiled).all()
    assert difference(compiled, in_transformers(artifact, tokens())) < AGREEMENT


def test_single_tokens_agree_with_transformers(case: Callable[[str], Case]) -> None:
    """vLLM computes the tokens after a prompt with two dense factors that it makes of `kv_b_proj`."""
    artifact, prompts = case("deepseek_v3").artifact, tokens()[:, :32]
    ids, found = generated_in_vllm(artifact, prompts, 12)
    expected = in_transformers(artifact, torch.cat([prompts, ids], dim=1))[:, prompts.shape[1] - 1 :]
    assert difference(found, expected) < AGREEMENT


def test_a_softmax_router_avoids_a_pruned_expert(case: Callable[[str], Case]) -> None:
    """Experts of a model that vLLM loads by its own loader of experts, behind a router without a correction bias."""
    folders = case("qwen2_moe")
    of_artifact = in_vllm(folders.artifact, tokens())
    assert difference(of_artifact, in_transformers(folders.artifact, tokens())) < AGREEMENT
