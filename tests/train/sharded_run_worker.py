"""Runs in each process of test_sharded_runs.py, under torchrun: `MODE MODEL DATA FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.sharding.run import Progress, train_sharded

ROWS_PER_STEP = 4


class Killed(Exception):
    """Stands for the death of all processes between two steps."""


def dies_after(step: int) -> Progress:
    def die(_: str, done: int, total: int) -> None:
        if done == step:
            raise Killed

    return die


def run_until_killed(step: int, *arguments: Any) -> None:
    try:
        train_sharded(*arguments, device="cpu", progress=dies_after(step))
    except Killed:
        return
    raise AssertionError("the run was not killed")


def main(mode: str, model: str, data: str, folder: str) -> None:
    torch.set_num_threads(1)
    size = {"one": 1, "two": 2, "four": 4}[mode]
    options = TrainOptions(
        train_file=Path(data), method="full", sequence_len=96, max_steps=6, learning_rate=5e-3, save_steps=2,
        per_device_train_batch_size=1, gradient_accumulation_steps=ROWS_PER_STEP // size, sample_packing=False,
    )  # fmt: skip
    resharded = (model, Path(folder) / "resharded", options)
    if mode == "two":
        train_sharded(model, Path(folder) / "whole", options, device="cpu")
        killed = (model, Path(folder) / "killed", options)
        run_until_killed(3, *killed)
        train_sharded(*killed, device="cpu")
        run_until_killed(3, *resharded)
    elif mode == "one":
        run_until_killed(5, *resharded)
    else:
        train_sharded(*resharded, device="cpu")


if __name__ == "__main__":
    main(*sys.argv[1:])
