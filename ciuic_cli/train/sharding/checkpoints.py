"""Checkpoints of a sharded run: each process writes its shards, and any number of processes may read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.process.file_faults import environment_fault

_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Frozen parameters are those of the model's files: checkpoints do not repeat them."""


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write the trained parameters, the optimizer's states and `progress`. All processes must call this.

    Raises:
        EnvironmentFault: a process could not write.
    """
    weights, states = get_state_dict(model, optimizer, options=_TRAINED)
    try:
        dcp.save({"model": weights, "optimizer": states, "progress": progress}, checkpoint_id=folder)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        if isinstance(cause, OSError):
            raise environment_fault(cause, folder) from error
        raise EnvironmentFault(
            f"rank {rank} cannot write its part of a checkpoint: {' '.join(str(cause).split()):.200}",
            file=folder,
            remedy="check the disk and run the same command again: it continues from the checkpoint before",
        ) from error


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> dict[str, Any]:
    """Read what any number of processes saved into a sharded model and its optimizer; returns the progress.

    Raises:
        InputError: the checkpoint is damaged.
    """
    weights, states = get_state_dict(model, optimizer, options=_TRAINED)
    state: dict[str, Any] = {"model": weights, "optimizer": states, "progress": dict(progress)}
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        raise InputError(
            f"rank {rank} cannot read the checkpoint: {type(cause).__name__}, {' '.join(str(cause).split()):.200}",
            file=folder,
            remedy=f"remove {folder}; the same command then goes on from the checkpoint before it, or from the start",
        ) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_TRAINED,
    )
    found: dict[str, Any] = state["progress"]
    return found


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The first process that failed, and its error."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def whole_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """All trained parameters, whole, in main memory of the first process; empty in the others. All must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    found: dict[str, Any] = get_model_state_dict(model, options=options)
    return found
