"""Prepares a matrix for rounding: transforms it, orders its columns, and factors its Fisher information."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ciuic_cli.codecs.transform import TILE, block_width, transform
from ciuic_cli.passes.chunk_size import scratch_slices
from ciuic_cli.passes.effective_variance import effective_variance
from ciuic_cli.passes.feedback import (
    BlockLDL,
    FactoredInputs,
    RowFeedback,
    factor_contexts,
    factor_inputs,
    factor_outputs,
)
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.process.threads import one_thread


@dataclass(frozen=True)
class PreparedMatrix:
    """A matrix (rows, cols) ready to be rounded. m16 and n16 are rows and cols padded to multiples of 16.

    Attributes:
        weight: (m16, n16) float32, transformed, with its blocks of 16 columns in the order `block_order`.
        inputs: the factors of H; outputs: those of G.
        row_feedback: feedback along each row's context, or None.
        input_trace: (m16,) float32, tr(D) of each row, row feedback included.
        block_order: (n16 / 16,) int64; position i of `weight` holds the block block_order[i]. None: the natural order.
    """

    weight: torch.Tensor
    inputs: BlockLDL
    outputs: BlockLDL
    row_feedback: RowFeedback | None
    input_trace: torch.Tensor
    rows: int
    cols: int
    block_order: torch.Tensor | None = None

    @cached_property
    def rms(self) -> torch.Tensor:
        """(m16,) float32 effective standard deviation of each row."""
        tiles = self.weight.square().unflatten(1, (-1, TILE)).mean(2)
        if self.block_order is not None:
            tiles = tiles[:, self.block_order.argsort()]
        width = block_width(self.weight.shape[1])
        return effective_variance(tiles.unflatten(1, (-1, width // TILE)).mean(2), width).sqrt()

    @cached_property
    def row_sensitivity(self) -> torch.Tensor:
        """(m16,) float32 KL per token of each row, per unit of the code's normalised error."""
        return 0.5 * self.outputs.d_diagonal * self.rms.square() * self.input_trace

    def with_weight(self, weight: torch.Tensor) -> PreparedMatrix:
        """Another matrix (rows, cols) with the same, already factored, Fisher information."""
        return replace(self, weight=_with_blocks(_transformed(weight), self.block_order))

    def in_natural_order(self, matrix: torch.Tensor) -> torch.Tensor:
        """Put the columns of a matrix (m, n16) from `block_order` into natural order, in place, and return it."""
        return _with_blocks(matrix, None if self.block_order is None else self.block_order.argsort())


def prepare(
    weight: torch.Tensor,
    fisher: KroneckerFisher,
    factored: FactoredInputs | None = None,
    factored_outputs: BlockLDL | None = None,
) -> PreparedMatrix:
    """Transform a weight (m, n) float32 and its Fisher information, and factor the latter.

    factored, factored_outputs: the factors of this H and this G, if they were computed already.
    """
    rows, cols = weight.shape
    w = _transformed(weight)
    block_order, inputs = factored or factor_inputs(fisher.inputs)
    row_feedback = None
    if fisher.contexts is not None:
        contexts = _transformed(fisher.contexts.float32())
        row_feedback = factor_contexts(inputs, _with_blocks(contexts, block_order))
    with one_thread():
        trace = inputs.d_diagonal.sum()
    input_trace = trace.expand(len(w)) if row_feedback is None else trace + row_feedback.trace
    outputs = factored_outputs or factor_outputs(fisher.outputs.float())
    w = _with_blocks(w, block_order)
    return PreparedMatrix(w, inputs, outputs, row_feedback, input_trace, rows, cols, block_order)


def prepare_without_fisher(weight: torch.Tensor) -> PreparedMatrix:
    """Transform a weight (m, n) float32 for rounding without error feedback; its predicted loss is undefined."""
    rows, cols = weight.shape
    no_feedback = BlockLDL(None, weight.new_ones(1))
    return PreparedMatrix(
        _transformed(weight), no_feedback, no_feedback, None, weight.new_zeros(0), rows, cols
    )


def _transformed(matrix: torch.Tensor) -> torch.Tensor:
    """(m, n) float32 to (m16, n16): padded, and each row transformed."""
    return transform(torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % TILE)))


def _with_blocks(matrix: torch.Tensor, block_order: torch.Tensor | None) -> torch.Tensor:
    """Reorder the blocks of 16 columns of a matrix (m, n16) in place, and return it."""
    if block_order is not None:
        for part in scratch_slices(len(matrix)):
            blocks = matrix[part].unflatten(1, (-1, TILE))
            blocks.copy_(blocks.index_select(1, block_order))
    return matrix
