"""Arms of one matrix as bytes for the journal, in numpy's .npz format, and back."""

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


def arms_to_bytes(arms: Arms) -> bytes:
    """A matrix's arms for the journal; the widths follow from the options."""
    buffer = io.BytesIO()
    fields = _fields(arms)
    if arms.sorted is not None:
        fields |= {_SORTED + name: value for name, value in _fields(arms.sorted).items()}
    np.savez(buffer, allow_pickle=False, **fields)
    return buffer.getvalue()


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


def arms_from_bytes(data: bytes, matrix: WeightMatrix, options: PassOptions) -> Arms:
    stored = dict(np.load(io.BytesIO(data), allow_pickle=False))
    arms = _from_fields(stored, matrix, options)
    beside = {name.removeprefix(_SORTED): value for name, value in stored.items() if name.startswith(_SORTED)}
    return replace(arms, sorted=_from_fields(beside, matrix, options)) if beside else arms


def _from_fields(stored: Mapping[str, NDArray[Any]], matrix: WeightMatrix, options: PassOptions) -> Arms:
    candidates = [
        lowrank.LowRankArm(int(rank), int(nbytes), remaining)
        for (rank, nbytes), remaining in zip(stored["ranks"], stored["remaining"], strict=True)
    ]
    return Arms(
        matrix, options.widths_for(matrix), options.L, stored["sensitivity"], stored["removal"], candidates,
        channels=stored["channels"], singular=bool(stored["singular"]),
        row_class=stored["row_class"] if stored["row_class"].size else None,
        input_scale=stored["input_scale"] if stored["input_scale"].size else None,
    )  # fmt: skip
