"""Tiny artifacts that vLLM can serve, the tokens that both programs predict, and how far they may differ."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import VOCABULARY, make_checkpoint

from ciuic_cli import compress, read_tensor
from ciuic_cli.artifact.reader import open_artifact

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


def make_case(family: str, folder: Path) -> Case:
    """Both checkpoints of a family of MODELS, in `folder`."""
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
