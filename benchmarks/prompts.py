"""Products with many rows of activations, as prompts have them, against torch's linear in the same run and dtype.

    python benchmarks/prompts.py [--threads 2] [--size 2048] [--bits 4] [--rows 1,4,16,64,256,512] [--dtype float32]

Our product is the one that a loaded model uses: straight from the codes or by decoded panels, whichever the number of
rows selects. A second column shows the panels. Rounds take turns; times are lower quartiles, of processor time if there
is one thread. Compare ratios.
CIUIC_CPU_KERNELS selects the kernels; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 keeps torch from using AMX.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.runtime.blobs import weight_of
from ciuic_cli.runtime.products import product


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--bits", type=float, default=4)
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,256,512,1024,2048")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", help="of activations, and of torch's weights")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    packed = random_matrix(options.size, options.size, options.bits)
    weight = weight_of(torch.frombuffer(bytearray(packed.to_bytes()), dtype=torch.uint8))
    dtype = getattr(torch, options.dtype)
    dense = torch.randn(options.size, options.size).to(dtype)
    print(
        f"{options.size} x {options.size}, {options.bits} bits, {options.threads} threads, "
        f"kernels {native.cpu_kernels()}\n"
    )
    print(f"| rows of activations | ours ms | panels ms | torch {options.dtype} ms | of torch's speed |")
    print("|---|---|---|---|---|")
    for rows in map(int, options.rows.split(",")):
        x = torch.randn(rows, options.size).to(dtype)
        actions = (
            partial(weight.product, x),
            partial(product, weight.matrix, x, small_batch=0),
            partial(torch.nn.functional.linear, x, dense),
        )
        times: tuple[list[float], ...] = ([], [], [])
        for number in range(options.rounds + 3):
            for action, measured in zip(actions, times, strict=True):
                started = clock()
                action()
                if number >= 3:
                    measured.append(1e3 * (clock() - started))
        ours, panels, theirs = (statistics.quantiles(one, n=4)[0] for one in times)
        print(f"| {rows} | {ours:.3f} | {panels:.3f} | {theirs:.3f} | {theirs / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
