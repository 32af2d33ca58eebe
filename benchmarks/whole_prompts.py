"""Whole prompts of a compressed model and its original, in turns in one process.

    python benchmarks/whole_prompts.py ARTIFACT ORIGINAL [--threads 2] [--tokens 512] [--rounds 21]

A prompt is one forward pass with a new cache and the logits of the last token. Every round has another random prompt,
which both models read. Wall time: minimum, quartiles and median; processor time of all threads, to which waiting
threads of OpenMP add. --account adds where the time goes on one thread: by module, and by torch's profiler.
CIUIC_CPU_KERNELS selects our kernels; ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
keep torch from using AVX-512.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import ciuic_cli  # noqa: F401  registers the plug-in
from ciuic_cli.codecs import native
from ciuic_cli.evaluation.bench_process import cache_keyword

MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens",
    "self_attn", "mlp", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("original")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--account", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        for path in (options.artifact, options.original)
    ]
    print(
        f"{options.tokens} tokens, {options.threads} threads, kernels {native.cpu_kernels()}, torch "
        f"{torch.backends.cpu.get_cpu_capability()}, {options.rounds} rounds"
    )
    if options.account:
        for name, model in zip(("artifact", "original"), models, strict=True):
            account(name, model, options.tokens)
        return
    walls, processors = in_turns(models, options.tokens, options.rounds)
    print(
        "| | wall min | quartile | median | quartile | processor min | median |\n|---|---|---|---|---|---|---|"
    )
    for name, wall, processor in zip(("artifact", "original"), walls, processors, strict=True):
        cells = (min(wall), *statistics.quantiles(wall, n=4), min(processor), statistics.median(processor))
        print(f"| {name} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
    ours, theirs = walls
    ratios = [original / artifact for artifact, original in zip(ours, theirs, strict=True)]
    print(
        f"of the original's speed: by medians {statistics.median(theirs) / statistics.median(ours):.2f}, "
        f"by minima {min(theirs) / min(ours):.2f}, round by round (quartiles) "
        + ", ".join(f"{ratio:.2f}" for ratio in statistics.quantiles(ratios, n=4))
    )


@torch.inference_mode()
def prompt(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): None})


def random_ids(model: Any, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)


def in_turns(models: list[Any], tokens: int, rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """(wall, processor) milliseconds of every prompt, by model; two rounds first that do not count."""
    walls: list[list[float]] = [[] for _ in models]
    processors: list[list[float]] = [[] for _ in models]
    for number in range(rounds + 2):
        for index, model in enumerate(models):
            ids = random_ids(model, tokens, number)
            begin, began = time.perf_counter(), time.process_time()
            prompt(model, ids)
            if number >= 2:
                walls[index].append(1e3 * (time.perf_counter() - begin))
                processors[index].append(1e3 * (time.process_time() - began))
    return walls, processors


def account(name: str, model: Any, tokens: int, rounds: int = 5) -> None:
    """Print the fastest of some prompts by module, and the operations of torch in one of them."""
    torch.set_num_threads(1)
    ids = random_ids(model, tokens, 0)
    prompt(model, ids)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        prompt(model, ids)
    spent: list[dict[str, float]] = []

    def timed(module: Any, kind: str) -> None:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            out = forward(*args, **kwargs)
            spent[-1][kind] += 1e3 * (time.thread_time() - began)
            return out

        module.forward = call

    timed(model, "all")
    for path, module in model.named_modules():
        kind = path.rpartition(".")[2]
        if kind in MODULES:
            timed(module, kind)
    for _ in range(rounds):
        spent.append(defaultdict(float))
        prompt(model, ids)
    fastest = min(spent, key=lambda one: one["all"])
    print(f"{name}, ms of one thread: " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in fastest.items()))
    operations = sorted(profiled.key_averages(), key=lambda one: -one.self_cpu_time_total)[:12]
    print(
        "   torch's operations, ms: "
        + ", ".join(f"{operation.key} {operation.self_cpu_time_total / 1e3:.1f}" for operation in operations)
    )


if __name__ == "__main__":
    main()
