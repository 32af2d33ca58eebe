"""How long does attention take that is differentiated? The native kernel in turns with torch's, on a CPU.

    python benchmarks/sequence_attention.py [--threads 1] [--rounds 9]

Prints milliseconds of the processor, least of all rounds, for causal attention of 4 sequences of 512 tokens, and the
errors of bfloat16 against float64. CIUIC_CPU_KERNELS chooses the instruction set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from ciuic_cli.codecs import native
from ciuic_cli.layerwise.operations.sequence_attention import NativeAttention

SHAPES = {"SmolLM2": (9, 3, 64, 64), "Llama": (12, 2, 128, 128), "DeepSeek, expanded": (16, 16, 192, 128)}
"""By model: query heads, key-value heads, widths of keys and values."""
SEQUENCES, TOKENS = 4, 512


def attend(given: list[torch.Tensor], is_native: bool) -> torch.Tensor:
    if not is_native:
        return scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    with NativeAttention():
        return scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)


def milliseconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return 1e3 * (time.process_time() - started)


def both_ways(given: list[torch.Tensor], gradient: torch.Tensor, is_native: bool) -> tuple[float, float]:
    found: list[torch.Tensor] = []
    forward = milliseconds(lambda: found.append(attend(given, is_native)))
    return forward, milliseconds(lambda: torch.autograd.grad(found[0], given, gradient))


def errors(given: list[torch.Tensor], gradient: torch.Tensor, is_native: bool) -> str:
    wide = [each.detach().double().requires_grad_() for each in given]
    expected = attend(wide, False)
    out = attend(given, is_native)
    pairs = zip(
        [out, *torch.autograd.grad(out, given, gradient)],
        [expected, *torch.autograd.grad(expected, wide, gradient.double())],
        strict=True,
    )
    return " ".join(f"{float((a.detach().double() - b).norm() / b.norm()):.1e}" for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"kernels {native.cpu_kernels()}, {arguments.threads} threads; forward and backward, ms")
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for name, (heads, kv, size, columns) in SHAPES.items():
            given = [
                torch.randn(SEQUENCES, TOKENS, h, width, generator=random)
                .to(dtype).transpose(1, 2).requires_grad_()
                for h, width in ((heads, size), (kv, size), (kv, columns))
            ]  # fmt: skip
            gradient = torch.randn(SEQUENCES, heads, TOKENS, columns, generator=random).to(dtype)
            times = {is_native: [(1e9, 1e9)] for is_native in (True, False)}
            for _ in range(arguments.rounds):
                for is_native, of_side in times.items():
                    of_side.append(both_ways(given, gradient, is_native))
            for is_native, of_side in times.items():
                forward, backward = (min(each) for each in zip(*of_side, strict=True))
                side = "native" if is_native else "torch"
                error = f" errors {errors(given, gradient, is_native)}" if dtype == torch.bfloat16 else ""
                print(f"{dtype} {name:20} {side:6} {forward:7.1f} {backward:7.1f}{error}")


if __name__ == "__main__":
    main()
