"""Which of torch's two libraries multiplies x Wᵀ faster in float32 on this processor, MKL or oneDNN?

    python benchmarks/float32_products.py

Prints G operations/s of one thread, the best of some rounds in turns, for SmolLM2's shapes and different numbers of
rows of x. Each product has another matrix W.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ciuic_cli.layerwise.operations.stable_bits import outer_product

SHAPES = ((576, 576), (1536, 576), (576, 1536))
ROWS = (128, 256, 512, 2048)
MATRICES, ROUNDS = 12, 7


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    products: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "oneDNN": outer_product,
        "MKL": lambda x, weight: x @ weight.T,
    }
    for outputs, inputs in SHAPES:
        weights = torch.randn(MATRICES, outputs, inputs, generator=generator)
        for rows in ROWS:
            x = torch.randn(rows, inputs, generator=generator)
            best = dict.fromkeys(products, float("inf"))
            for _ in range(ROUNDS):
                for name, product in products.items():
                    started = time.process_time()
                    for weight in weights:
                        product(x, weight)
                    best[name] = min(best[name], time.process_time() - started)
            work = 2e-9 * MATRICES * rows * outputs * inputs
            print(
                f"{rows} x {inputs} x {outputs}:",
                *(f"{n} {work / s:.1f}" for n, s in best.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
