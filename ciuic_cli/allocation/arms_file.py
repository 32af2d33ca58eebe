"""Serialises the arms of one matrix for the journal, as safetensors: numpy's .npz takes milliseconds to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from ciuic_cli.allocation.arms import ArmTable, PassOptions
from ciuic_cli.allocation.matrices import WeightMatrix
from ciuic_cli.passes import lowrank

_SORTED = "sorted "
"""Prefix of the fields of `ArmTable.row_sorted`."""


def arms_to_bytes(table: ArmTable) -> bytes:
    """The table without bits and L, which follow from the options."""
    fields = _fields(table)
    if table.row_sorted is not None:
        fields |= {_SORTED + name: value for name, value in _fields(table.row_sorted).items()}
    return save({name: np.ascontiguousarray(value) for name, value in fields.items()})


def arms_from_bytes(data: bytes, matrix: WeightMatrix, options: PassOptions) -> ArmTable:
    """The inverse of `arms_to_bytes`, for the same matrix and options."""
    stored = load(data)
    table = _from_fields(stored, matrix, options)
    fields = {name.removeprefix(_SORTED): value for name, value in stored.items() if name.startswith(_SORTED)}
    return replace(table, row_sorted=_from_fields(fields, matrix, options)) if fields else table


def _fields(table: ArmTable) -> dict[str, NDArray[Any]]:
    remaining = np.array([part.remaining for part in table.lowrank]).reshape(-1, len(table.sensitivity))
    return {
        "sensitivity": table.sensitivity,
        "pruning_loss": table.pruning_loss,
        "channels": table.channels,
        "ranks": np.array([[part.rank, part.nbytes] for part in table.lowrank], np.int64).reshape(-1, 2),
        "remaining": remaining,
        "singular": np.array(table.singular),
        "row_class": np.zeros(0, np.uint8) if table.row_class is None else table.row_class,
        "input_scale": np.zeros(0, np.uint8) if table.input_scale is None else table.input_scale,
    }


def _from_fields(stored: Mapping[str, NDArray[Any]], matrix: WeightMatrix, options: PassOptions) -> ArmTable:
    parts = [
        lowrank.LowRankPart(int(rank), int(nbytes), remaining)
        for (rank, nbytes), remaining in zip(stored["ranks"], stored["remaining"], strict=True)
    ]
    return ArmTable(
        matrix, options.bits_for(matrix), options.L, stored["sensitivity"], stored["pruning_loss"], parts,
        channels=stored["channels"], singular=bool(stored["singular"]),
        row_class=stored["row_class"] if stored["row_class"].size else None,
        input_scale=stored["input_scale"] if stored["input_scale"].size else None,
    )  # fmt: skip
