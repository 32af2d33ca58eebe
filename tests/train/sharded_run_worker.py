"""Runs in each process of test_sharded_runs.py, under torchrun: `MODE MODEL DATA FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.sharding.run import train_sharded

ROWS_PER_STEP = 4


class Killed(Exception):
    """Stands for the death of all processes between two steps."""


def die(_: str, done: int, total: int) -> None:
    if done == 3:
        raise Killed


def main(mode: str, model: str, data: str, folder: str) -> None:
    torch.set_num_threads(1)
    size = 4 if mode == "continue in four" else 2
    options = TrainOptions(
        train_file=Path(data), method="full", sequence_len=96, max_steps=6, learning_rate=5e-3, save_steps=2,
        per_device_train_batch_size=1, gradient_accumulation_steps=ROWS_PER_STEP // size, sample_packing=False,
    )  # fmt: skip
    if mode != "continue in four":
        train_sharded(model, Path(folder) / "whole", options, device="cpu")
        for name in ("killed", "resharded"):
            try:
                train_sharded(model, Path(folder) / name, options, device="cpu", progress=die)
            except Killed:
                continue
            raise AssertionError("the run was not killed")
        train_sharded(model, Path(folder) / "killed", options, device="cpu")
    else:
        train_sharded(model, Path(folder) / "resharded", options, device="cpu")


if __name__ == "__main__":
    main(*sys.argv[1:])
