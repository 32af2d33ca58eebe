"""Checkpoints of a sharded run: each process writes its shards, and any number of processes may read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write the model, the optimizer's states and `progress`. All processes must call this."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "progress": progress}, checkpoint_id=folder)


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> dict[str, Any]:
    """Read what any number of processes saved into a sharded model and its optimizer; returns the progress."""
    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states, "progress": dict(progress)}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found: dict[str, Any] = state["progress"]
    return found


def whole_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, whole, in main memory of the first process; empty in the others. All must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = get_model_state_dict(model, options=options)
    return found
