"""Tables of expert ids: DeepSeek-V4's hash layers read a token's experts from a table (`tid2eid`).

transformers uses the ids as indices without a check, so every table is checked when a model is opened. Reading them
is cheap: a few integers per token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ciuic_cli.checkpoint.formats import TORCH_DTYPES, is_integer
from ciuic_cli.checkpoint.header import TensorEntry
from ciuic_cli.checkpoint.reader import read_entry
from ciuic_cli.checkpoint.roles import Classification
from ciuic_cli.errors import InputError


def expert_tables(classified: Mapping[str, tuple[Classification, torch.Tensor]]) -> dict[str, int]:
    """Name -> number of experts, for every table of expert ids in a model.

    `classified` is what `roles.classify` returns. A table is an integer tensor of a router; the number of experts is
    the number of rows of that router's weight.
    """
    tables = {}
    for name, (classification, tensor) in classified.items():
        weight = classified.get(f"{name.rpartition('.')[0]}.weight")
        if classification.role == "router" and is_integer(tensor.dtype) and weight is not None:
            tables[name] = weight[1].shape[0]
    return tables


def require_expert_table(entry: TensorEntry, experts: int, remedy: str) -> None:
    """Raise InputError, naming file and tensor, unless the stored table holds integers from 0 to `experts` - 1."""
    stored = TORCH_DTYPES.get(entry.dtype)
    if stored is None or not is_integer(stored):
        fault = f"a table of expert ids is stored as {entry.dtype}, which is no integer type"
    else:
        ids = read_entry(entry).numpy()
        if not ids.size or 0 <= ids.min() <= ids.max() < experts:
            return
        fault = f"expert ids from {ids.min()} to {ids.max()}; the layer has {experts} experts"
    raise InputError(fault, file=entry.file, tensor=entry.name, remedy=remedy)
