"""Trains a small model from scratch with weights and optimizer states in few bits, beside float32 AdamW.

Usage: python benchmarks/low_bit_training.py [--train FILE] [--heldout FILE] [--steps 1000] [--seeds 3] [--workers 2]

A model of the Llama kind reads bytes. All runs of a seed begin with the same weights and see the same batches. The loss
is the mean cross entropy on held-out text after the last step. The second table has each run's mean over the seeds of
its loss relative to float32 AdamW's, with the standard error of this mean; the third one, training losses during the
run, as means over the seeds. Every run uses one thread. `--bytes` prints only bytes per parameter, of a model of 6
million parameters after one step.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory import weight_codes
from ciuic_cli.train.memory.adaptive import AdaptiveQuantizer
from ciuic_cli.train.memory.weights import LayerwiseOptimizer, held_bytes

ROWS, TOKENS, WARMUP = 4, 64, 50
LEARNING_RATE = 1e-3
"""Of 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 3e-3, 6e-3 and 1e-2 one of the two with the lowest held-out loss of float32 AdamW.
Measured: docs/experiments/training/low-bit-weights.md."""
CURVE = (100, 200, 400, 600, 800, 1000)
"""Steps at which the third table shows the mean training loss of the last 100."""


def model_of(seed: int, width: int = 96) -> Any:
    """A fresh model; 0.3 million parameters for a width of 96."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=TOKENS, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    """States in float32: 8 bytes per parameter."""
    return torch.optim.AdamW(parameters, weight_decay=0.0, foreach=False)


def adamw8(parameters: list[Any]) -> torch.optim.Optimizer:
    """States in 8 bits, in the library that is faster on a CPU."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, weight_decay=0.0)


def adamw4(parameters: list[Any]) -> torch.optim.Optimizer:
    """States in 4 bits."""
    from torchao.optim import AdamW4bit

    return AdamW4bit(parameters, weight_decay=0.0)


def layerwise(make: Callable[[list[Any]], torch.optim.Optimizer], **options: Any) -> Callable[[Any], Any]:
    """Weights in 8 bits, with the states of `make`."""
    return lambda model: LayerwiseOptimizer(model, make, LEARNING_RATE, **options)


BASE = "float32 AdamW"
"""The run to which others are compared."""

RUNS: dict[str, Callable[[Any], Any]] = {
    BASE: lambda model: adamw(list(model.parameters())),
    "float32 AdamW, first weights changed by 1e-6": lambda model: adamw(list(model.parameters())),
    "float32 weights, 8-bit states": lambda model: adamw8(list(model.parameters())),
    "8-bit weights, float32 states": layerwise(adamw),
    "8-bit weights, float32 states, errors added every step": layerwise(adamw, sync_steps=1),
    "8- and 4-bit weights, 8-bit states": lambda model: LayerwiseOptimizer(
        model, adamw8, LEARNING_RATE, quantizer=AdaptiveQuantizer()
    ),
    "8-bit weights, 8-bit states": layerwise(adamw8),
    "8-bit weights, 8-bit states, errors added every step": layerwise(adamw8, sync_steps=1),
    "8-bit weights, 4-bit states": layerwise(adamw4),
    "8-bit weights, nearest rounding, no residual": layerwise(adamw, sync_steps=10**9),
}


def bytes_of(file: Path) -> torch.Tensor:
    """A text as tokens."""
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()


@dataclass(frozen=True)
class Trained:
    """heldout: loss after the last step. nbytes: per parameter, of weights and states. losses: of all steps."""

    heldout: float
    nbytes: float
    losses: list[float]

    def mean_before(self, step: int) -> float:
        """Mean loss of the 100 steps before this one."""
        return statistics.mean(self.losses[max(0, step - 100) : step])


def train(name: str, seed: int, files: tuple[Path, Path], steps: int) -> Trained:
    """One run. files: training and held-out text."""
    torch.set_num_threads(1)
    data, heldout = map(bytes_of, files)
    code = weight_codes.WEIGHT_CODE
    if "nearest" in name:
        weight_codes.WEIGHT_CODE = type(code)(bits=code.bits, block=code.block)
    model = model_of(seed)
    if "changed" in name:
        changes = torch.Generator().manual_seed(99)
        for parameter in model.parameters():
            parameter.data *= 1 + 1e-6 * torch.randn(parameter.shape, generator=changes)
    optimizer = RUNS[name](model)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for step in range(steps):
        share = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share
        starts = torch.randint(0, len(data) - TOKENS, (ROWS,), generator=generator)
        batch = torch.stack([data[start : start + TOKENS] for start in starts.tolist()])
        loss = chunked_loss(model, {"input_ids": batch}, batch)
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    windows = heldout[: len(heldout) // TOKENS * TOKENS].view(-1, TOKENS)[:512]
    with torch.no_grad():
        found = float(chunked_loss(model, {"input_ids": windows}, windows))
    weight_codes.WEIGHT_CODE = code
    return Trained(found, bytes_per_parameter(model, optimizer), losses)


def bytes_per_parameter(model: Any, optimizer: Any) -> float:
    """Bytes per parameter that weights and optimizer states take on the device, scales and tables included."""
    count = sum(p.numel() for p in model.parameters())
    if isinstance(optimizer, LayerwiseOptimizer):
        found = optimizer.bytes()
        return float(found["weights"] + found["states"]) / count
    return float(sum(p.nbytes for p in model.parameters()) + held_bytes(optimizer.state)) / count


def print_bytes() -> None:
    """One line per run."""
    for name, make in RUNS.items():
        model = model_of(0, 480)
        optimizer = make(model)
        batch = torch.arange(TOKENS)[None]
        chunked_loss(model, {"input_ids": batch}, batch).backward()
        optimizer.step()
        print(f"| {name} | {bytes_per_parameter(model, optimizer):.3f} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, default=Path("samples/text/calibration.txt"))
    parser.add_argument("--heldout", type=Path, default=Path("samples/text/heldout.txt"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="runs beside each other")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--runs", nargs="*", default=[name for name in RUNS if name != BASE])
    arguments = parser.parse_args()
    if arguments.bytes:
        print_bytes()
        return
    files = (arguments.train, arguments.heldout)
    names, seeds = [BASE, *arguments.runs], range(arguments.seeds)
    print("| run | seed | held-out loss | above float32 | bytes per parameter |\n|---|---|---|---|---|")
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        begun = {
            (name, seed): pool.submit(train, name, seed, files, arguments.steps)
            for seed in seeds
            for name in names
        }
        for (name, seed), one in begun.items():
            found, base = one.result(), begun[BASE, seed].result()
            above = f"{found.heldout / base.heldout - 1:+.2%}"
            print(f"| {name} | {seed} | {found.heldout:.4f} | {above} | {found.nbytes:.3f} |", flush=True)
    done = {name: [begun[name, seed].result() for seed in seeds] for name in names}
    print("\n| run | seeds | above float32, mean | standard error |\n|---|---|---|---|")
    for name in arguments.runs:
        ratios = [one.heldout / base.heldout - 1 for one, base in zip(done[name], done[BASE], strict=True)]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        print(f"| {name} | {len(ratios)} | {statistics.mean(ratios):+.2%} | {error:.2%} |")
    points = [step for step in CURVE if step <= arguments.steps]
    print(f"\n| run | {' | '.join(f'to step {step}' for step in points)} |\n|{'---|' * (len(points) + 1)}")
    for name in names:
        means = (statistics.mean(one.mean_before(step) for one in done[name]) for step in points)
        print(f"| {name} | {' | '.join(f'{mean:.4f}' for mean in means)} |")


if __name__ == "__main__":
    main()
