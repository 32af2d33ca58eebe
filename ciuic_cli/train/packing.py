"""Rows of a batch from examples: several examples in one row, each with attention to itself only.

Position ids that begin at 0 again mark where an example begins. transformers derives from them, without an attention
mask, that tokens of one example do not see those of another. Padding is marked as one more example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ciuic_cli.train.examples import IGNORED, Example

Row = dict[str, list[int]]
"""input_ids, labels and position_ids of a row, of one length."""


def pack(examples: Sequence[Example], length: int) -> list[Row]:
    """Rows of at most `length` tokens: the longest example first, each into the first row with room for it.

    The first-fit-decreasing rule needs at most 11/9 of the fewest rows possible, and one more (Johnson 1973).
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        needed = len(example.ids)
        place = next((place for place, free in enumerate(room) if free >= needed), None)
        if place is None:
            rows.append([])
            room.append(length)
            place = len(rows) - 1
        rows[place].append(example)
        room[place] -= needed
    return [row_of(row) for row in rows]


def row_of(examples: Sequence[Example]) -> Row:
    """One row of these examples, in order. The first token of each has no label: nothing of its own precedes it."""
    row: Row = {"input_ids": [], "labels": [], "position_ids": []}
    for example in examples:
        row["input_ids"] += example.ids
        row["labels"] += [IGNORED, *example.labels[1:]]
        row["position_ids"] += range(len(example.ids))
    return row


def batch_of(rows: Sequence[Row], padding: int) -> dict[str, Any]:
    """int64 tensors [rows, longest row]; padding tokens have no label and positions from 0."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        missing = longest - len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [padding] * missing)
        batch["labels"].append(row["labels"] + [IGNORED] * missing)
        batch["position_ids"].append(row["position_ids"] + list(range(missing)))
    return {name: torch.tensor(values) for name, values in batch.items()}
