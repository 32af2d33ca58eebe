"""Milliseconds per token of `generate`: an artifact with and without native programs, and its original, in turns.

Run it alone on the machine: with other work beside it, waiting threads are measured too.

    python benchmarks/generation.py ARTIFACT ORIGINAL [--threads 2] [--tokens 64] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

import ciuic_cli  # noqa: F401  registers artifacts with transformers
from ciuic_cli.runtime.decoding import layer, step

NAMES = ("whole step", "layer by layer", "module by module", "original")

PROMPT = 16
"""Tokens of the prompt, whose time is part of the result."""


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Two programs for each layer, and torch's attention between them."""
    with mock.patch.object(step.Step, "takes", lambda *_: False):
        yield


@contextmanager
def module_by_module() -> Iterator[None]:
    """Without programs: every layer runs its own forward."""
    with layer_by_layer(), mock.patch.object(layer, "suits", lambda *_: False):
        yield


@torch.inference_mode()
def milliseconds(model: Any, tokens: int) -> float:
    ids = torch.randint(3, 4000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return 1e3 * (time.perf_counter() - begin) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("original")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ours, original = (
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (options.artifact, options.original)
    )
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for round_number in range(options.rounds + 1):
        found = [milliseconds(ours, options.tokens)]
        for way in (layer_by_layer, module_by_module):
            with way():
                found.append(milliseconds(ours, options.tokens))
        found.append(milliseconds(original, options.tokens))
        if round_number:  # the first round makes the programs
            for name, value in zip(NAMES, found, strict=True):
                times[name].append(value)
    base = statistics.median(times["original"])
    for name, values in times.items():
        middle = statistics.median(values)
        spread = f"({min(values):.2f} to {max(values):.2f})"
        print(
            f"{name:18} {middle:7.2f} ms per token {spread}, {base / middle:.2f} times the original's speed"
        )


if __name__ == "__main__":
    main()
