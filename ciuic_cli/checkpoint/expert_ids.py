"""Tables of expert ids: DeepSeek-V4's hash layers look the experts of a token up (`tid2eid`) instead of choosing them.

transformers indexes with what the table says, unchecked. Such a table is small, a few numbers for each token of the
vocabulary, and is therefore read as soon as a model is opened.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ciuic_cli.checkpoint.header import TensorEntry
from ciuic_cli.checkpoint.reader import TORCH_DTYPES, is_integer, read_entry
from ciuic_cli.checkpoint.roles import Classification
from ciuic_cli.errors import InputError


def expert_tables(classified: Mapping[str, tuple[Classification, torch.Tensor]]) -> dict[str, int]:
    """The tables among a model's tensors: integers that a router has beside its weight.

    Takes what `classify` returns; returns the number of experts, the rows of that weight, by the table's name.
    """
    tables = {}
    for name, (found, tensor) in classified.items():
        weight = classified.get(f"{name.rpartition('.')[0]}.weight")
        if found.role == "router" and is_integer(tensor.dtype) and weight is not None:
            tables[name] = weight[1].shape[0]
    return tables


def require_experts(entry: TensorEntry, experts: int, remedy: str) -> None:
    """Raises InputError, naming file and tensor, unless the table holds whole numbers from 0 to `experts` - 1."""
    stored = TORCH_DTYPES.get(entry.dtype)
    if stored is None or not is_integer(stored):
        fault = f"a table of expert ids stored as {entry.dtype}, which are no whole numbers"
    else:
        ids = read_entry(entry).numpy()
        if not ids.size or 0 <= ids.min() <= ids.max() < experts:
            return
        fault = f"expert ids from {ids.min()} to {ids.max()}; the layer has {experts} experts"
    raise InputError(fault, file=entry.file, tensor=entry.name, remedy=remedy)
