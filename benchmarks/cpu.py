"""Speed of the CPU kernels against torch's bfloat16 linear, in one run.

    python benchmarks/cpu.py [--threads 1] [--repetitions 30]

Products with 4-bit codes at batch 1, decoding of whole matrices, and the encoder. Each row alternates the two
contestants, so that a drift of the machine hits both; the ratio of the medians is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.trellis import CODE_SCALE, decode, matmul, round_matrix

WINDOW = 16


def random_matrix(rows: int, cols: int, bits: int) -> PackedMatrix:
    """Random codes decode to Gaussian weights: as good as any for timing."""
    rng = np.random.default_rng(0)
    row_bits = np.full(rows // 16, bits, np.uint8)
    codes = rng.integers(0, 256, rows * cols * bits // 8, dtype=np.uint8)
    return PackedMatrix(
        rows, cols, WINDOW, 0, 0.01, row_bits, np.full(rows, 64, np.uint8), codes, None
    )  # fmt: skip


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], repetitions: int
) -> tuple[float, float]:
    """Median seconds of each, measured in turn after a warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 3):
        for action, kept in zip((ours, theirs), times, strict=True):
            started = time.perf_counter()
            action()
            if repetition >= 3:
                kept.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = native.library().ciuic_cpu_kernels().decode()
    print(f"kernels {kernels}, threads {options.threads}, torch {torch.__version__}")
    print("| product, batch 1 | ours ms | torch bf16 ms | speed-up | G weights/s |\n|---|---|---|---|---|")
    for rows, cols in ((4096, 4096), (14336, 4096), (4096, 14336)):
        dense = torch.randn(rows, cols).to(torch.bfloat16)
        x = torch.randn(1, cols)
        x16 = x.to(torch.bfloat16)
        for bits in (3, 4, 6):
            packed = random_matrix(rows, cols, bits)
            ours, theirs = alternate(
                partial(matmul, packed, x, threads=options.threads),
                partial(torch.nn.functional.linear, x16, dense),
                options.repetitions,
            )
            rate = rows * cols / ours / 1e9
            label = f"{rows} x {cols}, {bits} bits"
            print(f"| {label} | {ours * 1e3:.2f} | {theirs * 1e3:.2f} | {theirs / ours:.2f} | {rate:.1f} |")
    print("\n| encoder, L = 16 | M weights/s |\n|---|---|")
    for bits in (2, 3, 4, 5, 6):
        w = torch.randn(512, 256)
        row_bits = np.full(32, bits, np.uint8)
        started = time.perf_counter()
        round_matrix(
            w, np.full(512, CODE_SCALE[bits], np.float32), row_bits, L=WINDOW, threads=options.threads
        )
        print(f"| {bits} bits | {w.numel() / (time.perf_counter() - started) / 1e6:.3f} |")
    packed = random_matrix(4096, 4096, 4)
    started = time.perf_counter()
    decode(packed, threads=options.threads)
    print(f"\ndecoding to float32: {4096 * 4096 / (time.perf_counter() - started) / 1e9:.2f} G weights/s")


if __name__ == "__main__":
    main()
