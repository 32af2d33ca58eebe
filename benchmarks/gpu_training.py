"""Training on a GPU: losses of short runs on both devices, and memory and time of a model of a billion weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.train.engine import train
from ciuic_cli.train.options import TrainOptions

_SAMPLES = Path(__file__).resolve().parents[1] / "samples"
_TEXT = _SAMPLES / "text" / "calibration.txt"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

RUNS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, offloaded activations": {"activations": "int8-offload"},
    "full": {"method": "full"},
    "full, 8-bit weights": {"method": "full", "weights": "int8", "optim": "adamw_bnb_8bit"},
}
"""Options of the runs on the sample; those whose name begins with "full" train the dense model."""

_SMALL = {"method": "full", "activation_checkpointing": True, "learning_rate": 1e-5, "sequence_len": 2048}
LARGE: dict[str, dict[str, Any]] = {
    "8-bit weights, states and activations": _SMALL
    | {"weights": "int8", "optim": "adamw_bnb_8bit", "activations": "int8"},
    "float32": _SMALL,
}
"""Options of the runs of the large model, all with checkpoints."""

LARGE_CONFIG: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
"""A Llama of 1.1 billion weights."""


def on_both(
    model: Path, options: dict[str, Any], out: Path, devices: tuple[str, str] = ("cpu", "cuda")
) -> dict[str, Any]:
    """Losses of four steps on each device, and the largest difference."""
    losses = [_run(model, options, out, device)["losses"] for device in devices]
    return {"losses": losses, "largest_difference": max(abs(a - b) for a, b in zip(*losses, strict=True))}


def large(options: dict[str, Any], out: Path, device: str = "cuda") -> dict[str, Any]:
    """Highest memory of torch's allocator in GB, seconds per step and losses of the large model in four steps."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = out / "large"
    if not folder.is_dir():
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**LARGE_CONFIG), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        for name in _TOKENIZER:
            shutil.copy(_SAMPLES / "deepseek-v3-tiny" / name, folder / name)
    if device == "cuda":
        torch.cuda.empty_cache()
    report = _run(folder, options, out, device)
    return {
        "gigabytes": max(report["memory_bytes"]) / 1e9,
        "tokens_per_second": report["tokens_per_second"],
        "losses": report["losses"],
    }


def _run(model: Path, options: dict[str, Any], out: Path, device: str) -> dict[str, Any]:
    data, adapter = out / "text.jsonl", out / "trained"
    out.mkdir(parents=True, exist_ok=True)
    data.write_text(_as_json_lines(_TEXT.read_text()))
    shutil.rmtree(adapter, ignore_errors=True)
    chosen = {"max_steps": 4, "sequence_len": 256, "save_steps": 1000} | options
    report = train(model, adapter, TrainOptions(data, **chosen), device=device)
    shutil.rmtree(adapter)
    return report


def _as_json_lines(text: str) -> str:
    """Rows of at most a few hundred tokens, which every model here takes."""
    parts = (text[begin : begin + 200] for begin in range(0, 200_000, 200))
    return "".join(json.dumps({"text": part}) + "\n" for part in parts if part.strip())
