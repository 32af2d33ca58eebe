"""Which products of torch have other bits with other numbers of threads?

    python benchmarks/thread_bits.py [--products 200] [--dtype bfloat16] [--in-layers]

Multiplies random matrices of random sizes with one thread and with 2 to 64, and prints for each kind of product and of
sizes how many differed from one thread. x is (m, k), W (n, k) and g (m, n). --in-layers: as layers multiply them
(`stable_bits`).
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import torch

from ciuic_cli.layerwise.operations.stable_bits import stable_bits
from ciuic_cli.process.threads import threads

THREADS = (2, 3, 5, 8, 16, 64)
SIZES: dict[str, Callable[[random.Random], tuple[int, int, int]]] = {
    "few rows, others multiples of 64": lambda draw: (
        draw.randrange(1, 64),
        *(64 * draw.randrange(1, 24) for _ in "nk"),
    ),
    "any sizes from 16": lambda draw: tuple(draw.randrange(16, 600) for _ in "mnk"),  # type: ignore[dict-item]
    "multiples of 16 from 128": lambda draw: tuple(16 * draw.randrange(8, 80) for _ in "mnk"),  # type: ignore[dict-item]
}


def onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right.mT, None, "none", [], "")
    return product


ONEDNN = ("x Wᵀ by oneDNN", "g W by oneDNN")
"""Kinds that exist for float32 alone."""
KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x Wᵀ": lambda x, w, g: x @ w.T,
    "g W": lambda x, w, g: g @ w,
    "gᵀ x": lambda x, w, g: g.T @ x,
    "x Wᵀ in a batch of 3": lambda x, w, g: torch.stack(3 * [x]) @ w.T.expand(3, *w.T.shape).contiguous(),
    ONEDNN[0]: lambda x, w, g: onednn(x, w.T),
    ONEDNN[1]: lambda x, w, g: onednn(g, w),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--products", type=int, default=200)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--in-layers", action="store_true")
    arguments = parser.parse_args()
    dtype, cpu = getattr(torch, arguments.dtype), torch.device("cpu")
    kinds = {kind: run for kind, run in KINDS.items() if dtype == torch.float32 or kind not in ONEDNN}
    for title, sizes in SIZES.items():
        draw, generator = random.Random(0), torch.Generator().manual_seed(0)
        changed: Counter[str] = Counter()
        for _ in range(arguments.products):
            m, n, k = sizes(draw)
            factors = [
                torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (n, k), (m, n))
            ]
            for kind, multiply in kinds.items():
                with threads(1), stable_bits(cpu) if arguments.in_layers else nullcontext():
                    alone = multiply(*factors)
                for number in THREADS:
                    with threads(number), stable_bits(cpu) if arguments.in_layers else nullcontext():
                        if not torch.equal(multiply(*factors), alone):
                            changed[kind] += 1
                            break
        print(
            f"{title}: "
            + ", ".join(f"{kind} {changed[kind]}" for kind in kinds)
            + f" of {arguments.products}"
        )


if __name__ == "__main__":
    main()
