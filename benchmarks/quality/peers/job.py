"""Shared by the scripts of all peers. It runs in the peer's environment and does not import this package.

A job is one JSON file: `model` (a dense checkpoint folder), `tokens` (safetensors with `tokens`, int64
(sequences, length)), `artifact` and `dense` (folders to write), `threads` and `options` (the contestant's own).
A script writes the peer's own files into `artifact` and float32 weights under the checkpoint's names into `dense`, and
returns the bytes of all stored tensors.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "*.model")


@dataclass(frozen=True)
class Job:
    """The job of a peer's script (see the module's docstring)."""

    model: Path
    tokens: torch.Tensor
    artifact: Path
    dense: Path
    shared: Path
    """A folder that all jobs of this peer on this model share."""
    threads: int
    options: dict[str, Any]

    @staticmethod
    def read(file: Path) -> Job:
        found = json.loads(file.read_text())
        folders = {name: Path(found[name]) for name in ("model", "artifact", "dense", "shared")}
        tokens = load_file(found["tokens"])["tokens"]
        return Job(**folders, tokens=tokens, threads=found["threads"], options=found["options"])


def linear_names(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers that weight-only quantizers quantize: all but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]


def common_group(widths: list[int], wanted: int) -> int:
    """The largest of `wanted`, its half, its quarter, ... that divides every width. Raises ValueError below 16."""
    group = wanted
    while any(width % group for width in widths):
        group //= 2
        if group < 16:
            raise ValueError(f"no group size of 16 or more divides {sorted(set(widths))}")
    return group


def tensor_bytes(folder: Path) -> int:
    """Bytes of all tensors in a folder's safetensors files, headers not counted."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            total += file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
    if not total:
        raise ValueError(f"{folder} has no safetensors files")
    return total


def write_dense(model: Path, weights: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write a float32 checkpoint to `out`: `model` with `weights` in place of its tensors of the same names.

    Raises ValueError if the checkpoint lacks a name or has another shape (the weight would be lost), and if no weight
    differs from the checkpoint's (it would not be the quantized model).
    """
    out.mkdir(parents=True)
    for pattern in BESIDE_WEIGHTS:
        for file in model.glob(pattern):
            shutil.copy(file, out)
    left = dict(weights)
    tensors = {}
    changed = False
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                original = opened.get_tensor(name)
                value = left.pop(name, original)
                if value.shape != original.shape:
                    raise ValueError(f"{name}: {tuple(value.shape)} instead of {tuple(original.shape)}")
                tensors[name] = value.detach().float().contiguous()
                changed = changed or not torch.equal(tensors[name], original.float())
    if left:
        raise ValueError(f"not in the checkpoint: {', '.join(sorted(left)[:3])}")
    if not changed:
        raise ValueError("the quantized model has the original's weights")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def main(work: Callable[[Job], int]) -> None:
    """Run the job named on the command line and write result.json beside it."""
    file = Path(sys.argv[1])
    job = Job.read(file)
    torch.set_num_threads(job.threads)
    for folder in (job.artifact, job.dense):
        shutil.rmtree(folder, ignore_errors=True)
    job.artifact.mkdir(parents=True)
    stored = work(job)
    file.with_name("result.json").write_text(json.dumps({"bytes": stored}))
