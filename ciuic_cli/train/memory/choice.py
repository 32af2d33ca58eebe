"""Turns the options of a run into its activation store and its checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ciuic_cli.train.memory.activations import ActivationStore
from ciuic_cli.train.memory.offload import offload_for
from ciuic_cli.train.memory.routing import keep_choices
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.targets import expert_stacks


def activation_store(
    model: Any, options: TrainOptions, device: torch.device, folder: Path
) -> ActivationStore | None:
    """The store that `options` ask for; a file of activations lies in `folder`."""
    if options.activations is None:
        return None
    offload = offload_for(device, folder) if options.activations == "int8-offload" else None
    return ActivationStore(model, offload=offload)


def checkpointing_options(model: Any, options: TrainOptions) -> dict[str, Any] | None:
    """`activation_checkpointing_kwargs` of transformers. With stored activations, experts are not chosen again."""
    if not options.activation_checkpointing:
        return None
    keeps = options.activations is not None and expert_stacks(model)
    return {
        "every_n_layers": options.every_n_layers,
        "use_reentrant": False,
        **({"context_fn": keep_choices} if keeps else {}),
    }
