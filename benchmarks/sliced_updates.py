"""Time and temporaries of one update of a parameter by optimizers with states in few bits, by the size of slices.

    python benchmarks/sliced_updates.py [--values 16777216]

One thread; the least processor time of three updates, and the most bytes that torch's allocator gave out in one.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ciuic_cli.train.memory import updates
from ciuic_cli.train.planning.measured import peak_bytes

OPTIMIZERS = ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Values of slices."""
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=1 << 24, help="of the parameter")
    values = parser.parse_args().values
    torch.set_num_threads(1)
    print("| optimizer | values per slice | temporaries MB | CPU ms |\n|---|---|---|---|")
    for optim in OPTIMIZERS:
        for size in (*(size for size in SIZES if size < values), values):
            seconds, taken = _update(optim, values, size)
            name = "all" if size == values else f"{size:,}"
            print(f"| `{optim}` | {name} | {taken / 1e6:.1f} | {1e3 * seconds:.0f} |", flush=True)


def _update(optim: str, values: int, size: int) -> tuple[float, int]:
    """Seconds and bytes of an update in slices of `size`."""
    updates.SLICE = size
    parameter = nn.Parameter(torch.randn(values))
    parameter.grad = torch.randn(values)
    arguments = TrainingArguments(output_dir="build", optim=optim, use_cpu=True, report_to="none")
    kind, chosen = Trainer.get_optimizer_cls_and_kwargs(arguments, nn.Linear(1, 1))  # type: ignore[arg-type]
    optimizer = kind([parameter], **chosen)
    updates.slice_updates(optimizer)
    with updates.uncompiled(CPU):
        optimizer.step()  # makes the states
        return min(_seconds(optimizer) for _ in range(3)), peak_bytes(optimizer.step)


def _seconds(optimizer: torch.optim.Optimizer) -> float:
    began = time.process_time()
    optimizer.step()
    return time.process_time() - began


if __name__ == "__main__":
    main()
