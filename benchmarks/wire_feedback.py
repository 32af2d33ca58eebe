"""Trains language models in two processes with few bits on the wire, with and without error feedback.

Usage: torchrun --standalone --nproc-per-node 2 benchmarks/wire_feedback.py [--model bigram|llama] [--bits 4]

bigram: a table of logits, one row per preceding byte, learned by SGD: its loss is convex, and rare bytes have small
gradients. llama: the model of benchmarks/low_bit_training.py (0.3 million parameters, reads bytes), learned by AdamW.
All runs see the same batches of the same text. Only gradients are coarse; the model's parameters are gathered in 8
bits, those of the table as they are. Prints the loss on held-out text after the last step, and which share of what few
bits lose feedback recovers.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from low_bit_training import LEARNING_RATE, ROWS, TOKENS, WARMUP, model_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from ciuic_cli.codecs.blockcode.code import BlockCode
from ciuic_cli.process.workers import Workers, join_workers
from ciuic_cli.train.sharding.shards import shard
from ciuic_cli.train.sharding.wire import CompressedAllGather, CountedAllGather, Traffic

RUNS = ("exact", "no feedback", "feedback")


class Bigram(nn.Module):
    """Logits of the next byte, by the byte before: a table of 256 x 256."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)
        nn.init.zeros_(self.table.weight)

    def forward(self, ids: torch.Tensor) -> Any:
        """The mean cross entropy of a batch of rows (rows, tokens)."""
        return nn.functional.cross_entropy(self.table(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Llama(nn.Module):
    """The model of benchmarks/low_bit_training.py."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = model_of(seed)

    def forward(self, ids: torch.Tensor) -> Any:
        """The mean cross entropy of a batch of rows (rows, tokens)."""
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def train(options: argparse.Namespace, seed: int, run: str, workers: Workers) -> float:
    """The held-out loss after the last step."""
    is_bigram = options.model == "bigram"
    model: Any = Bigram() if is_bigram else Llama(seed)
    code = BlockCode(bits=options.bits, block=options.block)
    comm = "fp32" if run == "exact" else "int8"
    mesh = init_device_mesh("cpu", (workers.size,))
    shard(model, mesh, comm, code=code, feedback=run == "feedback")
    for module in model.modules():
        if isinstance(module, FSDPModule) and comm == "int8":
            gather = CountedAllGather if is_bigram else CompressedAllGather
            module.set_custom_all_gather(gather(Traffic()))  # only gradients are coarse
    rate, rows = (10.0, 64) if is_bigram else (LEARNING_RATE, ROWS)
    make = torch.optim.SGD if is_bigram else torch.optim.AdamW
    optimizer = make(model.parameters(), rate, weight_decay=0.0)
    data, heldout = (
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        for path in (options.train, options.heldout)
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(options.steps):
        share = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        optimizer.param_groups[0]["lr"] = rate * share
        starts = torch.randint(0, len(data) - TOKENS, (rows,), generator=generator).tolist()
        mine = starts[workers.number :: workers.size]
        model(torch.stack([data[start : start + TOKENS] for start in mine])).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    windows = heldout[: len(heldout) // TOKENS * TOKENS].view(-1, TOKENS)[:512]
    with torch.no_grad():
        return float(model(windows))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, default=Path("samples/text/calibration.txt"))
    parser.add_argument("--heldout", type=Path, default=Path("samples/text/heldout.txt"))
    parser.add_argument("--model", choices=("bigram", "llama"), default="bigram")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--block", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with join_workers() as workers:
        for seed in range(options.seeds):
            exact, lost, kept = (train(options, seed, run, workers) for run in RUNS)
            if workers.is_leader:
                print(
                    f"seed {seed}: exact {exact:.4f}, no feedback {lost:.4f} ({lost / exact - 1:+.2%}), feedback "
                    f"{kept:.4f} ({kept / exact - 1:+.2%}): it recovers {(lost - kept) / (lost - exact):.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
