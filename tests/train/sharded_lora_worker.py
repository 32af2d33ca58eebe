"""Runs in each process of test_sharded_lora.py, under torchrun: `ARTIFACT DATA OUT`; process 0 prints a line of JSON.

Every process trains an adapter, and compares the codes with which its modules compute with those of the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_hook

from ciuic_cli.runtime.modules import BlobModule
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.sharding.run import train_sharded


def main(artifact: str, data: str, out: str, size: int) -> None:
    torch.set_num_threads(1)
    files = {
        value.numpy().tobytes()
        for value in load_file(Path(artifact) / "model.safetensors").values()
        if value.dtype == torch.uint8
    }
    found = {"calls": 0, "different": 0}

    def compare(module: Any, arguments: Any, output: Any) -> None:
        if isinstance(module, BlobModule):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dtype == torch.uint8:
                    found["calls"] += 1
                    found["different"] += bytes(parameter.tolist()) not in files

    register_module_forward_hook(compare)
    options = TrainOptions(
        train_file=Path(data), sequence_len=96, max_steps=4, learning_rate=5e-3, save_steps=2, lora_r=4,
        per_device_train_batch_size=1, gradient_accumulation_steps=4 // size, sample_packing=False,
    )  # fmt: skip
    report = train_sharded(artifact, Path(out), options, device="cpu")
    if report is not None:
        print(json.dumps({**report, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
