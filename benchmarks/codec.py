"""Quality and speed of the trellis code on Gaussian weights.

    python benchmarks/codec.py quality    # best scale and error per K and L: the tables in codecs/rate_distortion.py
    python benchmarks/codec.py uneven     # rows with a larger variance in some blocks of the input transform
    python benchmarks/codec.py encode     # weights per second, against the straightforward loop in plain_viterbi.cpp
    python benchmarks/codec.py matmul     # products from codes, against torch's bf16 products; decoding

K is bits per weight, L trellis state bits. Errors are mean squared errors on unit Gaussians times 4^K; 1.0 is
Shannon's limit for a Gaussian source. Times are the best of several runs: CPU time of the process for one thread, wall
time for more.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.codecs import native, trellis
from ciuic_cli.codecs.bits import BITS as ALL_BITS
from ciuic_cli.codecs.bits import stored_bits
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.codecs.reference import CODE_SIGMA, TILE_WEIGHTS, levels
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.passes.effective_variance import effective_variance

BITS = ALL_BITS[1:]
WHOLE = [int(bits) for bits in BITS if bits == int(bits) and bits >= 2]
"""Bits per weight that plain_viterbi.cpp supports."""


def row_error(weight: torch.Tensor, scale: torch.Tensor, bits: float, L: int) -> float:
    """Mean squared error times 4^K of a matrix (m, n) with row scales (m,)."""
    groups = [stored_bits(bits)] * (len(weight) // TILE)
    _, decoded = trellis.round_matrix(weight, scale, groups, L=L)
    return float((weight - decoded).double().square().mean()) * 4.0**bits


def gaussian_error(bits: float, L: int, scale: float, tiles: int, seed: int = 0) -> float:
    """Mean squared error times 4^K over `tiles` tiles of unit Gaussians, tail-biting included."""
    weight = torch.randn(TILE * tiles // 4, 4 * TILE, generator=torch.Generator().manual_seed(seed))
    return row_error(weight, torch.full((len(weight),), scale), bits, L)


def quality(lengths: list[int], tiles: int) -> None:
    print("| L | K | best scale | error x 4^K |\n|---|---|---|---|")
    for L in lengths:
        for bits in BITS:
            # More bits need larger scales, because weights beyond the largest level must be rarer.
            shift = {1: -0.14, 1.5: -0.07, 5.5: 0.06, 6: 0.12, 7: 0.2, 8: 0.4}.get(bits, 0.0)
            scales = np.linspace(0.94, 1.26, 9) + shift
            coarse = [gaussian_error(bits, L, float(s), tiles // 2) for s in scales]
            fit = np.polyfit(scales, coarse, 3)
            fine = np.linspace(scales[0], scales[-1], 200)
            best = round(float(fine[np.polyval(fit, fine).argmin()]), 2)
            error = gaussian_error(bits, L, best, tiles, seed=1)
            print(f"| {L} | {bits} | {best} | {error:.4f} |", flush=True)


def uneven(lengths: list[int]) -> None:
    """Rows of 576 columns, nine blocks of 64, some with a larger variance. Prints errors for three scales (the one for
    the mean square, the best of nine, the one that the encoder uses) and the predicted error for the last."""
    blocks, width, rows = 9, 64, 64
    print(
        "| L | K | blocks of larger variance | mean square | best scale | used scale | predicted |\n"
        "|---|---|---|---|---|---|---|"
    )
    draw = torch.randn(rows, blocks, width, generator=torch.Generator().manual_seed(0))
    patterns = ((1, 4), (1, 16), (3, 4), (5, 4))
    for L, bits, (boosted, times) in itertools.product(lengths, (2, 3, 4, 5), patterns):
        variance = torch.ones(blocks)
        variance[:boosted] = times
        weight = (draw * (variance / variance.mean()).sqrt()[:, None]).flatten(1)
        best = SCALE_BY_L[L][bits]  # best scale over rms for rows of even variance
        squares = effective_variance(weight.square().unflatten(1, (blocks, width)).mean(2), width)
        mean = weight.square().mean(1).sqrt()
        others = [
            row_error(weight, best * factor * mean, bits, L)
            for factor in (1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.3)
        ]
        used, predicted = row_error(weight, best * squares.sqrt(), bits, L), float(squares.mean())
        values = (others[0], min(others), used, MSE_BY_L[L][bits] * predicted)
        print(f"| {L} | {bits} | {boosted} of 9, {times} times the variance | ", end="")
        print(" | ".join(f"{value:.2f}" for value in values), "|", flush=True)


def seconds(action: Callable[[], object], threads: int, repeats: int) -> float:
    """The best time of `repeats` runs: CPU time for one thread, wall time for more."""
    clock = time.process_time if threads == 1 else time.perf_counter
    best = float("inf")
    for _ in range(repeats):
        begin = clock()
        action()
        best = min(best, clock() - begin)
    return best


def plain_loop(folder: Path) -> ctypes.CDLL:
    library = folder / "plain_viterbi.so"
    source = Path(__file__).with_name("plain_viterbi.cpp")
    subprocess.run(["g++", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.plain_encode.argtypes = [
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    loaded.plain_encode.restype = None
    return loaded


def encode(lengths: list[int], threads: int) -> None:
    torch.set_num_threads(threads)
    print(f"kernels {native.cpu_kernels()}, {threads} threads; the plain loop runs on one thread")
    print("| L | K | M weights/s | error | plain loop | error | ratio |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_loop(Path(folder))
        for L in lengths:
            for bits in WHOLE:
                tiles = 12 * threads * (1 << (16 - L))
                weight = torch.randn(TILE * tiles // 4, 4 * TILE)
                scales = np.full(weight.shape[0], SCALE_BY_L[L][bits], np.float32)
                row_bits = [stored_bits(bits)] * (weight.shape[0] // TILE)
                decoded = [weight]

                def ours() -> None:
                    decoded[0] = trellis.round_matrix(weight, scales, row_bits, L=L)[1]  # noqa: B023

                fast = seconds(ours, threads, 3)
                error = float((weight - decoded[0]).double().square().mean()) * 4.0**bits
                few = max(2, tiles // 8)
                factor = float(CODE_SIGMA) / SCALE_BY_L[L][bits]
                x = (torch.randn(few, TILE_WEIGHTS) * factor).numpy()
                windows = np.zeros((few, TILE_WEIGHTS), np.int32)
                slow = seconds(
                    lambda: plain.plain_encode(x.ctypes.data, few, bits, L, windows.ctypes.data),  # noqa: B023
                    1,
                    1,
                )
                plain_error = float(np.square((x - levels(windows)) / factor).mean()) * 4.0**bits
                rates = (weight.numel() / fast / 1e6, x.size / slow / 1e6)
                print(
                    f"| {L} | {bits} | {rates[0]:.3f} | {error:.3f} | {rates[1]:.3f} | {plain_error:.3f} "
                    f"| {rates[0] / rates[1]:.1f} |",
                    flush=True,
                )


def matmul(threads: int) -> None:
    torch.set_num_threads(threads)
    print(f"kernels {native.cpu_kernels()}, {threads} threads, bf16 activations")
    print("| rows x cols | batch | torch bf16 ms |" + "".join(f" K={bits} ms (ratio) |" for bits in BITS))
    print("|---|---|---|" + "---|" * len(BITS))
    for rows, cols in ((4096, 4096), (14336, 4096), (1536, 576), (576, 1536)):
        dense = torch.nn.Linear(cols, rows, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        packed = [random_matrix(rows, cols, bits) for bits in BITS]
        repeats = max(5, 40_000_000 * 8 // (rows * cols))
        for batch in (1, 2, 4, 8):
            half = torch.randn(batch, cols).bfloat16()
            peer = seconds(lambda: dense(half), threads, repeats)  # noqa: B023
            cells = []
            for matrix in packed:
                ours = seconds(lambda: trellis.matmul(matrix, half), threads, repeats)  # noqa: B023
                cells.append(f"{ours * 1e3:.3f} ({peer / ours:.2f})")
            print(f"| {rows} x {cols} | {batch} | {peer * 1e3:.3f} | " + " | ".join(cells) + " |", flush=True)
    print("| K | decoding to float32, G weights/s |\n|---|---|")
    for bits in BITS:
        matrix = random_matrix(512, 4096, bits)
        out = torch.zeros(512, 4096)
        arguments = (*matrix.native_arguments, 0, 512, out.data_ptr(), 0, threads)
        took = seconds(lambda: native.interface().ciuic_decode(*arguments), threads, 30)  # noqa: B023
        print(f"| {bits} | {out.numel() / took / 1e9:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["quality", "uneven", "encode", "matmul"])
    parser.add_argument("--L", type=int, nargs="+", default=[16, 14, 12], help="trellis state bits")
    parser.add_argument("--tiles", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what == "quality":
        quality(arguments.L, arguments.tiles)
    elif arguments.what == "uneven":
        uneven(arguments.L)
    elif arguments.what == "encode":
        encode(arguments.L, arguments.threads)
    else:
        matmul(arguments.threads)


if __name__ == "__main__":
    main()
