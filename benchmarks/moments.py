"""Times the moments of weight matrices: `python benchmarks/moments.py`.

Milliseconds of processor time, one thread, for a chunk of the calibration text (4 sequences of 512 tokens) as the
statistics of `ciuic compress` record it, for shapes of SmolLM2-135M or those that are named (--shape ROWS COLS).
"""

from __future__ import annotations

import argparse
import time

import torch

from ciuic_cli.layerwise.linear_hooks import Product
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype
from ciuic_cli.statistics.recorder import InputRecorder, OutputRecorder

SEQUENCES, LENGTH = 4, 512
"""A chunk of the statistics has 4 sequences, of 512 tokens by default."""
SHAPES = {"gate, up": (1536, 576), "down": (576, 1536), "q, o": (576, 576), "k, v": (192, 576)}
"""Rows and columns of SmolLM2-135M's matrices."""


def milliseconds(rows: int, cols: int, repeats: int) -> float:
    """The fastest of `repeats` recordings of one chunk, after one that is not timed."""
    generator = torch.Generator().manual_seed(0)
    dtype = compute_dtype(torch.device("cpu"))
    x, gradient = (
        torch.randn(SEQUENCES * LENGTH, size, generator=generator).to(dtype) for size in (cols, rows)
    )
    product = Product(
        ("matrix", None), torch.Size((rows, cols)), slice(0, rows), torch.empty(0), x, torch.empty(0)
    )
    inputs, outputs = InputRecorder([], dtype), OutputRecorder([], dtype)

    def record() -> float:
        began = time.process_time()
        inputs.watch(product)
        outputs.watch(product)(gradient)
        return time.process_time() - began

    record()
    return 1000 * min(record() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("ROWS", "COLS"))
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = SHAPES if options.shape is None else {f"{r} x {c}": (r, c) for r, c in options.shape}
    for name, (rows, cols) in shapes.items():
        print(f"{name:12} {milliseconds(rows, cols, options.repeats):8.1f} ms")


if __name__ == "__main__":
    main()
