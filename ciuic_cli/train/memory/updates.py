"""Updates by optimizers of other packages, with less memory on a CPU than they take by themselves.

An optimizer with states in few bits decodes the states of the parameter that it updates. On a CPU, torchao's AdamW
then holds 13 float32 copies of it, and bitsandbytes' holds 5: for an embedding, more than all states together. Both
packages update every block of values by itself, so the update of a parameter's slices is that of the whole parameter.
There are two exceptions. A last slice of fewer than 4,096 values keeps float32 states. Where torchao keeps float32
states because a parameter's size is no multiple of its block, only the last slice keeps them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

SLICE = 1 << 18
"""Most values of a slice: a multiple of the blocks of both packages (measured:
docs/experiments/training/sliced-updates.md)."""
_PACKAGES = ("bitsandbytes", "torchao")
"""Packages whose optimizers update every block of values by itself."""


def slice_sizes(size: int) -> list[int]:
    """Numbers of values of the slices of a parameter with `size` values."""
    whole, rest = divmod(size, SLICE)
    return [SLICE] * whole + [rest] * (rest > 0)


def slice_updates(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of bitsandbytes or torchao update large parameters on a CPU slice by slice; leave others alone.

    Call it before the first step. The optimizer's groups and states are those of slices afterwards. Between steps the
    slices hold no memory; in a step they are views of the parameter and of its gradient. The model's `zero_grad` frees
    gradients, as transformers' Trainer calls it; the optimizer's sees slices only.
    """
    if type(optimizer).__module__.partition(".")[0] not in _PACKAGES:
        return
    sliced = []
    for group in optimizer.param_groups:
        parts: list[nn.Parameter] = []
        for parameter in group["params"]:
            slices = [parameter]
            if parameter.numel() > SLICE and parameter.device.type == "cpu" and parameter.is_contiguous():
                slices = [nn.Parameter(parameter.data.new_empty(0)) for _ in slice_sizes(parameter.numel())]
                sliced.append((parameter, slices))
                _keep_override(optimizer, parameter, slices)
            parts += slices
        group["params"] = parts

    def give(*_: Any) -> None:
        for parameter, slices in sliced:
            if parameter.grad is None:
                continue
            parts = zip(slices, _split(parameter.data), _split(parameter.grad), strict=True)
            for one, values, gradient in parts:
                one.data, one.grad = values, gradient

    def take(*_: Any) -> None:
        for _parameter, slices in sliced:
            for one in slices:
                one.grad = None
                one.data = one.data.new_empty(0)

    optimizer.register_step_pre_hook(give)
    optimizer.register_step_post_hook(take)


def _split(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values.reshape(-1).split(SLICE)


def _keep_override(optimizer: Any, parameter: nn.Parameter, slices: list[nn.Parameter]) -> None:
    """Apply bitsandbytes' settings for a parameter to its slices. transformers sets 32 bits for embeddings."""
    manager = getattr(optimizer, "mng", None)
    if manager is not None:
        for module, name, config in manager.module_weight_config_triple:
            if getattr(module, name) is parameter:
                manager.override_config(slices, key_value_dict=config)


def uncompiled(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, torch compiles nothing on a CPU.

    torchao compiles its step for every shape. On a CPU that needs a C++ compiler, and took 41 s for one shape
    (measured: docs/experiments/training/sliced-updates.md).
    """
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else nullcontext()
