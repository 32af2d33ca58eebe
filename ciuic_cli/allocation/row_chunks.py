"""A weight matrix as prepared row chunks: an embedding or head is processed a few thousand rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import WeightMatrix, chunk_bytes, row_slices
from ciuic_cli.allocation.pool_factors import PoolFactors
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.row_order import stored_order
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.integers import ceil_div
from ciuic_cli.passes.feedback import FactoredInputs, factor_outputs
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.prepare import PreparedMatrix, prepare
from ciuic_cli.process.memory import PARALLEL_WORK_BYTES, limit_freed_memory
from ciuic_cli.process.threads import in_order
from ciuic_cli.profiling.account import counted_here

Result = TypeVar("Result")


def read_matrix(model_map: ModelMap, matrix: WeightMatrix) -> torch.Tensor:
    """A copy of the weight (rows, cols) in float32; raises `InputError` for NaN or infinity."""
    name, expert, slices = matrix.name, matrix.expert, row_slices(matrix)
    if len(slices) == 1 or not model_map.stores_rows(name):
        weight = model_map.read(name) if expert is None else model_map.read_expert(name, expert)
        return weight.to(torch.float32, copy=True)
    # An embedding may be the model's largest weight. So the memory that earlier work has freed is returned first, and
    # the embedding is never in memory in its stored dtype as a whole.
    limit_freed_memory(0)
    weight = torch.empty(matrix.rows, matrix.cols)
    for rows in slices:
        weight[rows] = model_map.read_rows(name, rows.start, rows.stop)
    return weight


@dataclass(frozen=True)
class RowChunk:
    """Rows of a matrix that are processed together.

    Attributes:
        stored: slice of the stored rows.
        rows: (m,) int64, the row of the matrix that each stored row is.
        weight: (m, n) float32.
        prepared: these rows, ready to be rounded.
    """

    stored: slice
    rows: torch.Tensor
    weight: torch.Tensor
    prepared: PreparedMatrix

    @property
    def groups(self) -> slice:
        """Slice of the groups of 16 stored rows."""
        return slice(self.stored.start // TILE, ceil_div(self.stored.stop, TILE))


def map_row_chunks(
    function: Callable[[RowChunk], Result],
    weight: torch.Tensor,
    fisher: KroneckerFisher,
    matrix: WeightMatrix,
    row_class: NDArray[np.uint8] | None = None,
    *,
    factored: FactoredInputs,
    pools: PoolFactors,
) -> Iterator[Result]:
    """The function's results for the row chunks of a matrix, in stored order.

    On a processor `row_chunks_side_by_side` of them are in work at once; on another device one is.

    Args:
        weight: (m, n) float32; weight and fisher as `passes.scale.scaled` returns them if there are input scales. G is
            overwritten if it is full.
        row_class: (m,) uint8 classes by which the stored rows are sorted; None: natural order.
        factored: the factors of this H.
        pools: factors G, unless the rows are split or sorted.
    """
    order = torch.arange(matrix.rows) if row_class is None else torch.from_numpy(stored_order(row_class))
    order = order.to(weight.device)

    def result(stored: slice) -> Result:
        rows = order[stored]
        whole = row_class is None and len(rows) == matrix.rows
        if whole:
            chunk, chunk_fisher, outputs = weight, fisher, pools.outputs(matrix, fisher)
        else:
            chunk, chunk_fisher = weight[rows], fisher.reordered(rows)
            outputs = factor_outputs(chunk_fisher.outputs.float(), overwrite=True)
        found = function(RowChunk(stored, rows, chunk, prepare(chunk, chunk_fisher, factored, outputs)))
        if len(rows) < matrix.rows:
            # Otherwise the heaps of the threads grow by 13 MB with every chunk of 4,096 x 1,536 (measured:
            # docs/experiments/scale/large-matrices.md).
            limit_freed_memory()
        return found

    side_by_side = row_chunks_side_by_side(matrix) if pools.device.type == "cpu" else 1
    return in_order(row_slices(matrix), counted_here(result), side_by_side)


def row_chunks_side_by_side(matrix: WeightMatrix) -> int:
    """How many row chunks a processor works on at once: one for each thread, or if that takes much memory, one with all
    threads."""
    threads = torch.get_num_threads()
    fits = threads * chunk_bytes(matrix) <= PARALLEL_WORK_BYTES
    return threads if fits and threads <= len(row_slices(matrix)) else 1
