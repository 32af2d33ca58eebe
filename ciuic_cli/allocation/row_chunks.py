"""A weight matrix in row chunks: a vocabulary is worked on a few thousand rows at a time, which bounds memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import WeightMatrix, row_slices
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import stored_order
from ciuic_cli.passes.quantize import BLOCK, Feedback, KroneckerFisher, Prepared, prepare


def read_matrix(model_map: ModelMap, matrix: WeightMatrix) -> torch.Tensor:
    """The weight (rows, cols) in float32, in memory of its own; raises `InputError` for NaN or infinity."""
    name, expert = matrix.name, matrix.expert
    weight = model_map.read(name) if expert is None else model_map.read_expert(name, expert)
    return weight.to(torch.float32, copy=True)


@dataclass(frozen=True)
class RowChunk:
    """Rows of a matrix that are worked on together. stored: which of the stored rows; rows: (m,) which of the matrix's
    these are; weight: (m, n); prepared: the same, ready to be rounded."""

    stored: slice
    rows: torch.Tensor
    weight: torch.Tensor
    prepared: Prepared

    @property
    def groups(self) -> slice:
        """Which of the groups of 16 stored rows."""
        return slice(self.stored.start // BLOCK, -(-self.stored.stop // BLOCK))


def row_chunks(
    weight: torch.Tensor,
    fisher: KroneckerFisher,
    matrix: WeightMatrix,
    row_class: NDArray[np.uint8] | None = None,
    known: tuple[torch.Tensor | None, Feedback] | None = None,
) -> Iterator[RowChunk]:
    """A matrix (m, n) as it is stored, its inputs scaled already, part by part.

    known: what `input_feedback` gives for its H, where that was computed already.
    """
    order = torch.arange(matrix.rows) if row_class is None else torch.from_numpy(stored_order(row_class))
    for stored in row_slices(matrix):
        rows = order[stored]
        whole = row_class is None and len(rows) == matrix.rows
        part, its = (weight, fisher) if whole else (weight[rows], fisher.reordered(rows))
        prepared = prepare(part, its, known)
        known = prepared.blocks, prepared.inputs
        yield RowChunk(stored, rows, part, prepared)
