"""Times what the head's statistics take from logits, by our kernel and by torch: `python benchmarks/predictions.py`.

Nanoseconds of processor time per logit, one thread, the fastest of some turns; for a span of SmolLM2's size by default.
`CIUIC_CPU_KERNELS=avx2` and `portable` select older instructions of the kernel.
"""

from __future__ import annotations

import argparse
import time

import torch

from ciuic_cli.statistics.predictions import Predictions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = args.tokens, args.vocabulary
    generator = torch.Generator().manual_seed(0)
    logits = (3.0 * torch.randn(shape, generator=generator)).bfloat16()
    predictions = Predictions(
        logits, None, torch.rand(args.tokens, 1, generator=generator), torch.ones(args.tokens)
    )
    sums, weights = torch.zeros(4, args.vocabulary), torch.empty(shape, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {"kernel": [], "torch": []}
    for _ in range(args.rounds):
        for name, add in (("kernel", predictions._native), ("torch", predictions._torch)):
            began = time.thread_time()
            add(sums, weights)
            times[name].append(time.thread_time() - began)
    for name, seconds in times.items():
        print(f"{name}: {min(seconds) / logits.numel() * 1e9:.2f} ns per logit")


if __name__ == "__main__":
    main()
