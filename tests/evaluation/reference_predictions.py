"""Predictions and windows computed without the package, as references for `ciuic eval`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def dense(folder: Path) -> Any:
    """A checkpoint as transformers loads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_probabilities(model: Any, window: torch.Tensor) -> np.ndarray:
    """(tokens, vocabulary) in float64, without torch's softmax."""
    with torch.no_grad():
        logits = model(window[None]).logits[0, :-1].double().numpy()
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def expected_windows(checkpoint: Path, text: Path, seqlen: int) -> list[torch.Tensor]:
    """BOS (0) and the text's bytes, as the tests' byte-level tokenizer numbers them."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    ids = [vocabulary[character] for character in text.read_text().strip("\n").replace(" ", "Ġ") + "ĊĊ"]
    starts = range(0, len(ids), seqlen - 1)
    windows = [torch.tensor([0, *ids[start : start + seqlen - 1]]) for start in starts]
    return [window for window in windows if len(window) > 32]


def changed_copy(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint in `folder`, with its tensors changed in place by `change`."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
