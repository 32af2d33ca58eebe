"""How long does pricing a low-rank part take, and how many power iterations does its price need?

    python benchmarks/low_rank_pricing.py MODEL [--layer 14]

Prints the least ms of `residual_energies` by shape, one thread, random weights; and the share of the energy of a
layer's matrices that a part of rank 64 has, by power iterations, rows without weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.passes import lowrank

SHAPES = ((576, 576), (1536, 576), (576, 1536))
ITERATIONS = (1, 2, 4, 8)
RANK = max(lowrank.RANKS)


def milliseconds(rows: int, cols: int, rounds: int = 9) -> float:
    generator = torch.Generator().manual_seed(0)
    weight, importance = (
        torch.randn(rows, cols, generator=generator),
        torch.rand(rows, generator=generator),
    )
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        lowrank.residual_energies(weight, importance, lowrank.RANKS)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def share(weight: torch.Tensor, iterations: int) -> float:
    left, right = lowrank.factor(weight, torch.ones(len(weight)), RANK, iterations=iterations)
    return 1 - float((weight - left @ right).square().sum() / weight.square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--layer", type=int, default=14)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows, cols in SHAPES:
        print(f"{rows} x {cols}: {milliseconds(rows, cols):.1f} ms", flush=True)
    model_map = map_model(open_checkpoint(options.model))
    prefix = model_map.layer_prefixes[options.layer]
    for name, parameter in model_map.parameters.items():
        if parameter.compress and len(parameter.shape) == 2 and name.startswith(prefix):
            weight = model_map.read(name).float()
            print(parameter.role, *(f"{share(weight, count):.3f}" for count in ITERATIONS), flush=True)


if __name__ == "__main__":
    main()
