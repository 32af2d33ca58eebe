"""Quality and speed of the trellis code on Gaussian weights.

    python benchmarks/codec.py quality    # best scale and normalised error per K and L: the tables in codecs/trellis.py
    python benchmarks/codec.py encode     # encoder, weights per second, against the plain loop in benchmarks/plain_viterbi.cpp
    python benchmarks/codec.py matmul     # decode-matmul against torch bf16 on the same shapes, and decoding to float32

The error is the mean squared error on unit Gaussians times 4^K: 1.0 is Shannon's limit for a Gaussian source.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.codecs import native, trellis
from ciuic_cli.codecs.packing import PackedMatrix, encode_scales
from ciuic_cli.codecs.transform import TILE

BITS = (2, 3, 4, 5, 6, 8)


def gaussian_error(bits: int, window: int, scale: float, tiles: int, seed: int = 0) -> float:
    """Normalised error over `tiles` tiles of unit Gaussians, encoded as the product encodes them (tail-biting included)."""
    weight = torch.randn(TILE * tiles // 4, 4 * TILE, generator=torch.Generator().manual_seed(seed))
    rows = weight.shape[0]
    _, decoded = trellis.round_matrix(weight, np.full(rows, scale, np.float32), [bits] * (rows // TILE), L=window)
    return float((weight - decoded).double().square().mean()) * 4.0**bits


def quality(windows: list[int], tiles: int) -> None:
    print("| L | K | best scale | error x 4^K |\n|---|---|---|---|")
    for window in windows:
        for bits in BITS:
            # The more bits, the rarer a weight beyond the largest level has to be, and the smaller the steps anyway.
            scales = np.linspace(0.94, 1.26, 9) + {6: 0.12, 8: 0.4}.get(bits, 0.0)
            coarse = [gaussian_error(bits, window, float(s), tiles // 2) for s in scales]
            fit = np.polyfit(scales, coarse, 3)
            fine = np.linspace(scales[0], scales[-1], 200)
            best = round(float(fine[np.polyval(fit, fine).argmin()]), 2)
            print(f"| {window} | {bits} | {best} | {gaussian_error(bits, window, best, tiles, seed=1):.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality"])
    parser.add_argument("--windows", type=int, nargs="+", default=[12, 13, 14, 15, 16])
    parser.add_argument("--tiles", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what == "quality":
        quality(arguments.windows, arguments.tiles)


if __name__ == "__main__":
    main()
