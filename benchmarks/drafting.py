"""Time of decoding steps with 1, 2 and 3 tokens, in turns: a step that checks drafted tokens computes several.

    python benchmarks/drafting.py out/
    python benchmarks/drafting.py --family deepseek_v3 --hidden-size 1024 --layers 4

A drafted token pays if it is accepted more often than (time with one more token + time of the draft) / time - 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from context import FAMILIES, config_of, random_model
from transformers import DynamicCache

from ciuic_cli import load
from ciuic_cli.evaluation.bench_process import cache_keyword

COUNTS = (1, 2, 3)
CONTEXT = 64
"""Tokens in the cache."""


@torch.inference_mode()
def times_of_steps(model: Any, rounds: int) -> dict[int, list[float]]:
    """Tokens of a step -> its milliseconds in each round, after one round of warm-up."""
    vocabulary = model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    cache = DynamicCache(config=model.config)
    held = {cache_keyword(model): cache}
    model(torch.randint(3, vocabulary, (1, CONTEXT), generator=draw), **held)
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for number in range(rounds + 1):
        for count in COUNTS:
            tokens = torch.randint(3, vocabulary, (1, count), generator=draw)
            begin = time.perf_counter()
            model(tokens, **held)
            if number:
                times[count].append(1e3 * (time.perf_counter() - begin))
            cache.crop(CONTEXT - cache.get_seq_length())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--family", choices=FAMILIES, default="deepseek_v3")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.artifact is not None:
        model = load(args.artifact, device="cpu")
    else:
        model = random_model(config_of(args.family, args.hidden_size, args.layers), torch.bfloat16)
    times = times_of_steps(model, args.rounds)
    for count in COUNTS:
        ratio = statistics.median(t / first for t, first in zip(times[count], times[1], strict=True))
        print(f"{count} token(s): {statistics.median(times[count]):.2f} ms, {ratio:.2f} of one token's")


if __name__ == "__main__":
    main()
