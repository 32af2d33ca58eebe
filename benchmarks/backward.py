"""Time and peak memory of a product's gradient for its input, against torch's bfloat16 product, in one run.

    python benchmarks/backward.py [--threads 1] [--repetitions 30]

The matrix has random codes of 4 bits per weight: every string of bits is valid. Both sides alternate, so that a drift
of the machine affects both. Times are lower quartiles; with one thread they are CPU times, which other processes
disturb least. Compare ratios rather than times. Memory is what torch's allocator held at the peak, the result included.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from cpu import alternate

from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.process.memory import reuse_activations
from ciuic_cli.runtime.matrices import CpuMatrix
from ciuic_cli.runtime.products import gradient
from ciuic_cli.train.planning.measured import peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reuse_activations()  # as loading an artifact does
    print(f"threads {options.threads}, torch {torch.__version__}, {options.rows} x {options.cols}, 4 bits\n")
    matrix = CpuMatrix(random_matrix(options.rows, options.cols, 4))
    dense = matrix.decode(0, matrix.rows, torch.bfloat16)
    print("| rows of the batch | ours ms | torch bf16 ms | ratio | float32 ms | peak MB | result MB |")
    print("|---|---|---|---|---|---|---|")
    for batch in (64, 512, 2048):
        grad = torch.randn(batch, options.rows, dtype=torch.bfloat16)
        action = partial(gradient, matrix, grad)
        ours, theirs = alternate(action, partial(torch.mm, grad, dense), options.repetitions)
        exact, _ = alternate(partial(gradient, matrix, grad.float()), lambda: None, 3)
        result = 2 * batch * options.cols
        print(
            f"| {batch} | {ours * 1e3:.2f} | {theirs * 1e3:.2f} | {ours / theirs:.2f} | {exact * 1e3:.0f} "
            f"| {peak_bytes(action) / 1e6:.1f} | {result / 1e6:.1f} |"
        )


if __name__ == "__main__":
    main()
