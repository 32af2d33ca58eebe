"""The planned memory of a LoRA step beside what torch's allocator gave out in that step.

    python benchmarks/memory_plan.py ARTIFACT [--rows 2] [--tokens 512] [--rank 16]
    python benchmarks/memory_plan.py --config config.json --bits 4 --max-memory 11GB

The first form trains for two steps per setting, without activation checkpointing and with it every 1, 2 and 4 layers.
The peak of the second step is measured: bytes of all tensors that exist, and the allocator's own record of the step.
The second form computes a table for a model of which only the config is at hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.integers import parse_size
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.limits import EIGHT_BIT
from ciuic_cli.train.planning.measured import peak_bytes
from ciuic_cli.train.planning.memory_plan import PlannedModel, plan_memory
from ciuic_cli.train.planning.step import Batch

EVERY = (0, 1, 2, 4)
"""Values of --every-n-layers that are compared; 0 is no checkpointing."""


def options_of(every: int, rank: int, **others: Any) -> TrainOptions:
    return TrainOptions(
        train_file=Path("none"), lora_r=rank, lora_alpha=2 * rank, activation_checkpointing=every > 0,
        every_n_layers=max(every, 1), **others,
    )  # fmt: skip


def measured(folder: str, every: int, rank: int, ids: torch.Tensor) -> dict[str, Any]:
    """Peak bytes of the second step, and both losses."""
    from peft import get_peft_model

    from ciuic_cli.runtime.loading import load
    from ciuic_cli.train.loss import chunked_loss
    from ciuic_cli.train.targets import lora_config

    torch.manual_seed(0)
    base = load(folder, "cpu")
    options = options_of(every, rank)
    model = get_peft_model(base, lora_config(base, options))
    model.config.use_cache = False
    if every:
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": False}, every_n_layers=every
        )
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    losses = []

    def step() -> None:
        loss = chunked_loss(model, {"input_ids": ids}, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    existing = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers(), *states)
        if isinstance(tensor, torch.Tensor)
    }
    # Weights that lie in a mapped file share its storage.
    blobs = sum(
        tensor.nbytes for tensor in {id(p): p for p in (*model.parameters(), *model.buffers())}.values()
    )
    held = blobs + sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    return {"peak": held + peak_bytes(step), "losses": losses, "storages": sum(existing.values())}


def compare(arguments: argparse.Namespace) -> None:
    planned = PlannedModel.of_folder(Path(arguments.artifact))
    print("| checkpointing | planned MB | measured MB | ratio | activations MB | loss of step 2 |")
    print("|---|---|---|---|---|---|")
    for every in EVERY:
        command = [sys.executable, *sys.argv, "--every", str(every)]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        batch = Batch(arguments.rows, arguments.tokens, masked=False)
        plan = plan_memory(planned, options_of(every, arguments.rank), batch)
        name = f"every {every} layers" if every else "none"
        print(
            f"| {name} | {plan.tensors / 1e6:.1f} | {found['peak'] / 1e6:.1f} | {plan.tensors / found['peak']:.3f} "
            f"| {plan.activations / 1e6:.1f} | {found['losses'][-1]!r} |",
            flush=True,
        )


def arithmetic(arguments: argparse.Namespace) -> None:
    """The plans of a model at given bits per weight, by rows of a batch's tokens and settings."""
    model = PlannedModel.at_bits(json.loads(Path(arguments.config).read_text()), arguments.bits)
    limit = parse_size(arguments.max_memory)
    print(
        "| tokens | checkpointing | states | weights GB | adapter, gradients, states GB | activations GB | sum GB |"
    )
    print("|---|---|---|---|---|---|---|")
    for tokens in arguments.lengths:
        for every, optim in ((0, "adamw_torch"), (4, "adamw_torch"), (1, "adamw_torch"), (1, EIGHT_BIT)):
            chosen = options_of(every, arguments.rank, optim=optim)
            plan = plan_memory(model, chosen, Batch(1, tokens))
            mark = "" if plan.total <= limit else " (too much)"
            print(
                f"| {tokens} | {f'every {every}' if every else 'none'} | {8 if optim == EIGHT_BIT else 32} bits "
                f"| {plan.weights / 1e9:.2f} | {(plan.adapter + plan.gradients + plan.states) / 1e9:.2f} "
                f"| {plan.activations / 1e9:.2f} | {plan.total / 1e9:.2f}{mark} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--every", type=int, help="only this setting, in this process, as JSON")
    parser.add_argument("--config", help="a config.json: compute a table, measure nothing")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--max-memory", default="11GB")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    arguments = parser.parse_args()
    if arguments.config is not None:
        arithmetic(arguments)
    elif arguments.every is not None:
        ids = torch.randint(
            3, 200, (arguments.rows, arguments.tokens), generator=torch.Generator().manual_seed(0)
        )
        print(json.dumps(measured(arguments.artifact, arguments.every, arguments.rank, ids)))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
