"""Measures what input scales lose if the inverse of H is taken in blocks of inputs, and how long pricing takes.

    python benchmarks/blocks_of_inputs.py MODEL WORK [--nsamples 14] [--layers 7]

Statistics of --nsamples sequences stay in WORK. For each role, means over --layers evenly spaced layers: seconds to
price a matrix (with all threads), and the bits per weight that scales from blocks of a half, a quarter and an eighth of
the inputs need in addition for the same predicted loss; also those from the diagonal of H, and no scales.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, WeightMatrix, weight_matrices
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.options import DEFAULT_BITS
from ciuic_cli.export.gguf.writing import GgufOptions, calibration_text
from ciuic_cli.integers import ceil_div
from ciuic_cli.passes import scale
from ciuic_cli.process.progress import no_progress
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics

PARTS = (2, 4, 8)


def statistics_of(model_map: ModelMap, folder: Path, nsamples: int) -> Statistics:
    if not folder.exists():
        folder.mkdir(parents=True)
        text = calibration_text(model_map, GgufOptions(nsamples=nsamples))
        collect_statistics(
            model_map, text.tokens, folder,
            device=torch.device("cpu"), seed=0, weights=text.weights, progress=no_progress,
        )  # fmt: skip
    return Statistics(folder)


def bits(model_map: ModelMap, statistics: Statistics, matrix: WeightMatrix) -> float:
    """Mean bits per weight that a given predicted loss needs, up to a constant."""
    table = price_matrix(model_map, statistics, matrix, PassOptions(DEFAULT_BITS))
    return float(0.5 * np.log2(np.maximum(table.sensitivity, 1e-300)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nsamples", type=int, default=14)
    parser.add_argument("--layers", type=int, default=7)
    options = parser.parse_args()
    model_map = map_model(open_checkpoint(options.model))
    statistics = statistics_of(model_map, options.work / "statistics", options.nsamples)
    by_role: dict[str, list[WeightMatrix]] = defaultdict(list)
    for matrix in weight_matrices(model_map.parameters.values()):
        if matrix.role not in EMBEDDING_ROLES and matrix.expert is None:
            by_role[matrix.role].append(matrix)
    for role, matrices in by_role.items():
        chosen = matrices[:: ceil_div(len(matrices), options.layers)]
        more: dict[str, list[float]] = defaultdict(list)
        seconds = []
        for matrix in chosen:
            started = time.perf_counter()
            price_matrix(model_map, statistics, matrix, PassOptions(DEFAULT_BITS))
            seconds.append(time.perf_counter() - started)
            with mock.patch.object(scale, "BLOCK_INPUTS", matrix.cols):
                best = bits(model_map, statistics, matrix)
            for part in PARTS:
                with mock.patch.object(scale, "BLOCK_INPUTS", ceil_div(matrix.cols, part)):
                    more[f"1/{part}"].append(bits(model_map, statistics, matrix) - best)
            for name, inverse in (
                ("diagonal", lambda h: 1 / h.diagonal().double().clamp_min(1e-30)),
                ("no scales", lambda h: None),
            ):
                with mock.patch.object(scale, "_inverse_diagonal", inverse):
                    more[name].append(bits(model_map, statistics, matrix) - best)
        found = ", ".join(f"{name} {np.mean(values):+.4f}" for name, values in more.items())
        print(f"{role}: {np.mean(seconds):.2f} s; {found}", flush=True)


if __name__ == "__main__":
    main()
