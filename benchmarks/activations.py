"""Saved bytes and gradient errors of stored activations, on batches of held-out text.

Usage: python benchmarks/activations.py MODEL --text FILE [--batches 8] [--examples 4]

The baseline is transformers' own float32 step: what autograd saves for it, and its gradient. Every other row is a step
of the same model on the same batches; "routed otherwise" counts pairs of token and layer whose experts differ between
the forward pass and the second computation of a checkpointed layer. With several examples in a row, attention has a
mask, which is infinite where it hides tokens: rows without exact masks have no finite gradient.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ciuic_cli.codecs.blockcode.code import BlockCode
from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory.activations import ActivationStore, Policy, default_policy
from ciuic_cli.train.memory.routing import keep_choices


@dataclass
class Row:
    """One way to run a step."""

    name: str
    policy: Policy | None = None
    chunked: bool = True
    checkpointing: bool = False
    keep: bool = True
    dtype: torch.dtype = torch.float32


def exact(module: Any, tensor: torch.Tensor) -> None:
    """Keeps every tensor as it is."""
    return None


def uniform(code: BlockCode) -> Policy:
    """One code for every floating-point tensor of a fair size."""
    return lambda module, tensor: code if tensor.is_floating_point() and tensor.numel() >= 1024 else None


def in_four_bits(module: Any, tensor: torch.Tensor) -> BlockCode | None:
    """A policy that stores in 4 bits each tensor that the default policy stores in 8."""
    return default_policy(module, tensor) and BlockCode(bits=4, stochastic=True, hadamard=True)


ROWS = (
    Row("transformers, float32 (baseline)", exact, chunked=False),
    Row("transformers, bfloat16", exact, chunked=False, dtype=torch.bfloat16),
    Row("chunked loss", exact),
    Row("8 bits everywhere", uniform(BlockCode())),
    Row("8 bits everywhere, transformed", uniform(BlockCode(hadamard=True))),
    Row("**the policy: also exact statistics and masks**", default_policy),
    Row("the policy in 4 bits, stochastic", in_four_bits),
    Row("checkpointing", exact, checkpointing=True),
    Row("checkpointing, 8 bits, experts chosen again", default_policy, checkpointing=True, keep=False),
    Row("**checkpointing, 8 bits**", default_policy, checkpointing=True),
)


@contextmanager
def routes(model: Any) -> Iterator[dict[Any, list[torch.Tensor]]]:
    """The experts that each layer's tokens go to, call by call: the second argument of modules named `experts`."""
    seen: dict[Any, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda module, inputs: seen.setdefault(module, []).append(inputs[1].detach().sort(-1).values)
        )
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
    ]
    yield seen
    for handle in handles:
        handle.remove()


def step(
    model: Any, batch: torch.Tensor, row: Row, others: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, int, tuple[int, int]]:
    """The gradient of all parameters, float32; saved bytes; token-layers that were routed otherwise, and all."""
    inputs = {"input_ids": batch, **others}
    model.zero_grad(set_to_none=True)
    model.train()
    model.gradient_checkpointing_disable()
    if row.checkpointing:
        options = {"use_reentrant": False, **({"context_fn": keep_choices} if row.keep else {})}
        model.gradient_checkpointing_enable(options)
    store = ActivationStore(model, row.policy or exact)
    with routes(model) as seen:
        with store:
            if row.chunked:
                loss = chunked_loss(model, inputs, batch)
            else:
                loss = model(**inputs, labels=batch, use_cache=False).loss
        # In transformers' own step every layer saves a mask.
        saved = store.live_bytes if row.chunked else store.original_bytes
        loss.backward()
    pairs = [calls for calls in seen.values() if len(calls) == 2]
    changed = sum(int((first != second).any(-1).sum()) for first, second in pairs)
    total = sum(len(calls[0]) for calls in pairs)
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return gradient, saved, (changed, total)


def measure(
    model_of: Callable[[torch.dtype], Any],
    batches: list[torch.Tensor],
    rows: tuple[Row, ...],
    others: dict[str, torch.Tensor],
) -> None:
    """Print one line of a table per row. `others` are the model's inputs besides the tokens."""
    print("| step | saved, of float32's bytes | gradient error, mean | worst batch | routed otherwise |")
    print("|---|---|---|---|---|")
    references: list[tuple[torch.Tensor, int]] = []
    for row in rows:
        model = model_of(row.dtype)
        errors, shares, changed, total = [], [], 0, 0
        for number, batch in enumerate(batches):
            gradient, saved, counts = step(model, batch, row, others)
            if len(references) <= number:
                references.append((gradient, saved))
            reference, bytes_of_reference = references[number]
            errors.append(float((gradient - reference).norm() / reference.norm()))
            shares.append(saved / bytes_of_reference)
            changed, total = changed + counts[0], total + counts[1]
        routed = f"{changed} of {total}" if total else ""
        print(
            f"| {row.name} | {max(shares):.4f} | {sum(errors) / len(errors):.4%} | {max(errors):.4%} | {routed} |",
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--examples", type=int, default=1, help="examples of equal length in each row")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = torch.tensor(tokenizer(arguments.text.read_text())["input_ids"])
    size = arguments.rows * arguments.tokens
    batches = [
        ids[n * size : (n + 1) * size].view(arguments.rows, arguments.tokens)
        for n in range(arguments.batches)
    ]

    def model_of(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa")

    others = {}
    if arguments.examples > 1:
        positions = torch.arange(arguments.tokens) % -(-arguments.tokens // arguments.examples)
        others["position_ids"] = positions.repeat(arguments.rows, 1)
    measure(model_of, batches, ROWS, others)


if __name__ == "__main__":
    main()
