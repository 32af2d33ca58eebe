"""Which modules and stacks of a model get an adapter, and the adapter's configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from ciuic_cli.checkpoint.compressible import EXPERT_STACKS
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.modules import CompressedGroupedLinear, CompressedLinear
from ciuic_cli.train.options import TrainOptions

SPLIT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of dense and shared MLPs. In models with expert stacks they get no adapter by default: PEFT takes these
names for the experts' own matrices, which the dense model stores fused, when it loads the adapter there."""


def expert_stacks(model: nn.Module) -> list[str]:
    """Names of the parameters that are expert stacks, compressed or dense."""
    return [
        f"{name}.{stack}"
        for name, module in model.named_modules()
        for stack in EXPERT_STACKS
        if stack in module._parameters and hasattr(module, "num_experts")
    ]


def linear_names(model: Any) -> list[str]:
    """Last parts of the names of all linear layers but the head (and block-diagonal ones), sorted."""
    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | CompressedLinear)
            and not isinstance(module, CompressedGroupedLinear)
            and module is not head
        }
    )


def lora_config(model: Any, options: TrainOptions) -> Any:
    """PEFT's LoraConfig for a loaded model: all linear layers and expert stacks, or those that the options name.

    Raises:
        UsageError: a name matches neither a linear layer nor a stack, dropout is asked for on expert stacks, or the
            rank is larger than that of every weight.
    """
    from peft import LoraConfig

    stacks, linears = expert_stacks(model), linear_names(model)
    if stacks:
        linears = [name for name in linears if name not in SPLIT_PROJECTIONS]
    if options.lora_target_modules:
        known = {*linears, *(stack.rpartition(".")[2] for stack in stacks)}
        unknown = [name for name in options.lora_target_modules if name not in known]
        if unknown:
            raise UsageError(
                f"--lora-target-modules {unknown[0]} is not in the model",
                remedy=f"use some of {', '.join(sorted(known))}",
            )
        linears = [name for name in linears if name in options.lora_target_modules]
        stacks = [stack for stack in stacks if stack.rpartition(".")[2] in options.lora_target_modules]
    if stacks and options.lora_dropout:
        raise UsageError(
            "--lora-dropout does not work on expert stacks",
            remedy="leave it out, or name linear layers only with --lora-target-modules",
        )
    _require_useful_rank(model, options.lora_r, linears, has_stacks=bool(stacks))
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=linears or None,
        target_parameters=sorted({".".join(stack.split(".")[-2:]) for stack in stacks}) or None,
    )


def _require_useful_rank(model: Any, rank: int, linears: list[str], *, has_stacks: bool) -> None:
    sides = [model.get_input_embeddings().embedding_dim] if has_stacks else []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in linears and isinstance(module, nn.Linear | CompressedLinear):
            sides.append(min(module.in_features, module.out_features))
    most = max(sides, default=rank)
    if rank > most:
        raise UsageError(
            f"--lora-r {rank} is more than the rank of any adapted weight, {most}",
            remedy="16 is common; an adapter of a higher rank than the weight's learns nothing more",
        )
