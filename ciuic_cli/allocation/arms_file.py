"""Serialises the arms of one matrix for the journal, in numpy's .npz format."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import Arms, PassOptions
from ciuic_cli.allocation.matrices import WeightMatrix
from ciuic_cli.passes import lowrank

_SORTED = "sorted "
"""Prefix of the fields of `Arms.row_sorted`."""


def arms_to_bytes(arms: Arms) -> bytes:
    """The arms as .npz; bits and L are left out, because they follow from the options."""
    buffer = io.BytesIO()
    fields = _fields(arms)
    if arms.row_sorted is not None:
        fields |= {_SORTED + name: value for name, value in _fields(arms.row_sorted).items()}
    np.savez(buffer, allow_pickle=False, **fields)
    return buffer.getvalue()


def arms_from_bytes(data: bytes, matrix: WeightMatrix, options: PassOptions) -> Arms:
    """The inverse of `arms_to_bytes`, for the same matrix and options."""
    stored = dict(np.load(io.BytesIO(data), allow_pickle=False))
    arms = _from_fields(stored, matrix, options)
    fields = {name.removeprefix(_SORTED): value for name, value in stored.items() if name.startswith(_SORTED)}
    return replace(arms, row_sorted=_from_fields(fields, matrix, options)) if fields else arms


def _fields(arms: Arms) -> dict[str, NDArray[Any]]:
    remaining = np.array([arm.remaining for arm in arms.lowrank]).reshape(-1, len(arms.sensitivity))
    return {
        "sensitivity": arms.sensitivity,
        "removal": arms.removal,
        "channels": arms.channels,
        "ranks": np.array([[arm.rank, arm.nbytes] for arm in arms.lowrank], np.int64).reshape(-1, 2),
        "remaining": remaining,
        "singular": np.array(arms.singular),
        "row_class": np.zeros(0, np.uint8) if arms.row_class is None else arms.row_class,
        "input_scale": np.zeros(0, np.uint8) if arms.input_scale is None else arms.input_scale,
    }


def _from_fields(stored: Mapping[str, NDArray[Any]], matrix: WeightMatrix, options: PassOptions) -> Arms:
    parts = [
        lowrank.LowRankArm(int(rank), int(nbytes), remaining)
        for (rank, nbytes), remaining in zip(stored["ranks"], stored["remaining"], strict=True)
    ]
    return Arms(
        matrix, options.bits_for(matrix), options.L, stored["sensitivity"], stored["removal"], parts,
        channels=stored["channels"], singular=bool(stored["singular"]),
        row_class=stored["row_class"] if stored["row_class"].size else None,
        input_scale=stored["input_scale"] if stored["input_scale"].size else None,
    )  # fmt: skip
