"""Speed of the CPU kernels against torch's bfloat16 linear and against the processor's limits, in one run.

    python benchmarks/cpu.py [--threads 1] [--repetitions 30]

It times products at batch 1 with the default and with the portable kernels (in a second process), a prompt of 512
tokens, decoding of whole matrices, and the encoder. Activations are bfloat16 on both sides. Each row alternates
between the two, so that a drift of the machine affects both. Times are lower quartiles; with one thread they are CPU
times, which other processes disturb least. Compare ratios rather than times.

The limit is the smaller of two rates: the clock times the weights per cycle that the vector pipes allow for the
kernel's instructions (docs/experiments/runtime/cpu-product.md), and the bandwidth of reading codes from memory. Clock
and bandwidth are measured at the start; both limits are per thread.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.rate_distortion import SCALE_BY_L
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.codecs.trellis import decode, matmul, round_matrix
from ciuic_cli.runtime.matrices import CpuMatrix
from ciuic_cli.runtime.products import product

L = 16
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
PROMPT = 512
WEIGHTS_PER_CYCLE = {
    "amx": {"int8": 16 / 2, "int15": 16 / 3},
    "avx512vnni": {"int8": 16 / 2, "int15": 16 / 3},
    "avx2": {"int8": 16 / 3, "int15": 16 / 3},
    "portable": {"int8": 8 / 3.06, "int15": 8 / 3.06},
}
"""Limit by kernels and precision of the activations, for one thread with the vector pipes of Zen 4."""


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], repetitions: int
) -> tuple[float, float]:
    """Lower quartiles of the seconds of both actions, which alternate after a warm-up of three runs."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 3):
        for action, measured in zip((ours, theirs), times, strict=True):
            started = clock()
            action()
            if repetition >= 3:
                measured.append(clock() - started)
    return statistics.quantiles(times[0], n=4)[0], statistics.quantiles(times[1], n=4)[0]


def measured_limits() -> tuple[float, float]:
    """(clock in Hz, bytes per second that one thread reads from memory)."""
    memory = np.ones(1 << 25, np.uint64)  # 256 MB, far more than the caches hold
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        source = Path(__file__).with_name("cpu_limits.cpp")
        subprocess.run(["g++", "-O2", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.clock_hz.restype = loaded.read_bytes_per_second.restype = ctypes.c_double
        loaded.read_bytes_per_second.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        return loaded.clock_hz(), loaded.read_bytes_per_second(memory.ctypes.data, memory.nbytes)


def print_products(threads: int, repetitions: int, all_bits: tuple[int, ...]) -> None:
    clock, bandwidth = measured_limits()
    kernels = native.cpu_kernels()
    print(f"\nkernels {kernels}; clock {clock / 1e9:.2f} GHz, memory {bandwidth / 1e9:.0f} GB/s per thread\n")
    print(
        "| product, batch 1 | activations | ours ms | torch bf16 ms | speed-up | G weights/s | of its limit |"
    )
    print("|---|---|---|---|---|---|---|")
    for rows, cols in SHAPES:
        dense = torch.randn(rows, cols).to(torch.bfloat16)
        x = torch.randn(1, cols).to(torch.bfloat16)
        for bits in all_bits:
            packed = random_matrix(rows, cols, bits)
            ours, theirs = alternate(
                partial(matmul, packed, x, torch.bfloat16, threads=threads),
                partial(torch.nn.functional.linear, x, dense),
                repetitions,
            )
            precision = "int8" if bits <= 4 else "int15"
            limit = threads * min(clock * WEIGHTS_PER_CYCLE[kernels][precision], bandwidth * 8 / bits)
            rate = rows * cols / ours
            print(
                f"| {rows} x {cols}, {bits} bits | {precision} | {ours * 1e3:.2f} | {theirs * 1e3:.2f} "
                f"| {theirs / ours:.2f} | {rate / 1e9:.1f} | {rate / limit:.0%} |"
            )


def print_prefill(repetitions: int) -> None:
    print(f"\n| product, {PROMPT} tokens, 4 bits | ours ms | torch bf16 ms | of torch's speed |")
    print("|---|---|---|---|")
    for rows, cols in SHAPES:
        dense = torch.randn(rows, cols).to(torch.bfloat16)
        x = torch.randn(PROMPT, cols).to(torch.bfloat16)
        matrix = CpuMatrix(random_matrix(rows, cols, 4))
        ours, theirs = alternate(
            partial(product, matrix, x), partial(torch.nn.functional.linear, x, dense), repetitions // 5 + 2
        )
        print(f"| {rows} x {cols} | {ours * 1e3:.0f} | {theirs * 1e3:.0f} | {theirs / ours:.2f} |")


def print_encoder(threads: int) -> None:
    print("\n| encoder, L = 16 | M weights/s |\n|---|---|")
    for bits in (2, 3, 4, 5, 6):
        w = torch.randn(512, 256)
        row_bits = np.full(32, bits, np.uint8)
        scale = np.full(512, SCALE_BY_L[L][bits], np.float32)
        started = time.perf_counter()
        round_matrix(w, scale, row_bits, L=L, threads=threads)
        print(f"| {bits} bits | {w.numel() / (time.perf_counter() - started) / 1e6:.3f} |")


def print_decoding(threads: int, repetitions: int) -> None:
    packed = random_matrix(1024, 1024, 4)  # one panel
    actions = [
        partial(decode, packed, out_dtype=dtype, threads=threads) for dtype in (torch.float32, torch.bfloat16)
    ]
    rates = [
        packed.rows * packed.cols / seconds / 1e9
        for seconds in alternate(actions[0], actions[1], repetitions)
    ]
    print(f"\ndecoding, G weights/s: {rates[0]:.2f} to float32, {rates[1]:.2f} to bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--portable-products", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.portable_products:
        print_products(options.threads, options.repetitions, (4,))
        return
    print(f"threads {options.threads}, torch {torch.__version__}", flush=True)
    print_products(options.threads, options.repetitions, (2, 3, 4, 6))
    sys.stdout.flush()
    subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--portable-products"],
        env={**os.environ, "CIUIC_CPU_KERNELS": "portable"},
        check=True,
    )
    print_prefill(options.repetitions)
    print_encoder(options.threads)
    print_decoding(options.threads, options.repetitions)


if __name__ == "__main__":
    main()
