"""Pricing: the predicted loss of every arm of one weight matrix, from its statistics and weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import ArmTable, PassOptions, require_finite_loss
from ciuic_cli.allocation.matrices import CHANNEL_ROLES, WeightMatrix, fisher_of
from ciuic_cli.allocation.pool_factors import PoolFactors
from ciuic_cli.allocation.row_chunks import RowChunk, map_row_chunks, read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.row_order import stored_order
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.feedback import BlockLDL
from ciuic_cli.passes.predicted_loss import group_sums, pruning_loss
from ciuic_cli.passes.row_sorting import row_classes, sorting_pays
from ciuic_cli.passes.scale import input_scales, scaled
from ciuic_cli.profiling.account import step
from ciuic_cli.statistics.files import Statistics

UNSORTED_POOLED_ROLES = ("expert_down",)
"""Experts whose rows stay in natural order if they share the factors of G, which another order would not share. Their
rows are the layer's hidden state; sorting saves 0.014 bits per weight (measured:
docs/experiments/scale/shared-factors.md)."""
_LOG = logging.getLogger(__name__)
_DAMPED = (
    "%s: the calibration text does not show how much some inputs matter; %.3g of the mean over the inputs is added to "
    "each (damping of a singular Hessian)"
)
_FALLBACK = (
    "%s: its inputs on the calibration text are too extreme for error feedback (no damping, up to %s, makes the "
    "Hessian positive definite); rounded without it"
)


def price_matrix(
    model_map: ModelMap,
    statistics: Statistics,
    matrix: WeightMatrix,
    options: PassOptions,
    pools: PoolFactors | None = None,
) -> ArmTable:
    """All arms of one matrix with their predicted loss.

    pools: keeps factors from one matrix to the next, and says on which device to compute; None: on the CPU.

    Raises:
        InputError: weights are NaN or infinite, or so large that a predicted loss is.
    """
    pools = pools or PoolFactors(statistics)
    fisher = fisher_of(matrix, statistics).to(pools.device)
    weight = read_matrix(model_map, matrix).to(pools.device)
    require_finite_loss(torch.linalg.vector_norm(weight, dim=1).square().cpu().numpy(), matrix, model_map)
    with step("loss of pruning"):
        pruning = pruning_loss(weight, fisher)
    require_finite_loss(pruning.cpu().numpy(), matrix, model_map)
    input_scale = None
    covered = statistics.covers(matrix.name)  # otherwise H is a multiple of the identity
    if covered and matrix.expert is None:  # all experts of a layer take the same transformed input
        with step("input scales"):
            input_scale = input_scales(weight, fisher)
        weight, fisher = scaled(weight, fisher, input_scale)
    channels = np.zeros(0)
    if options.prune == "auto" and matrix.role in CHANNEL_ROLES:
        with step("loss of pruning"):
            channels = prune.channel_loss(weight, fisher)
    dead_inputs = bool((fisher.inputs.diagonal() <= 0).any())
    factored = pools.inputs(matrix, fisher)  # may overwrite H
    chunks = map_row_chunks(_sensitivity, weight, fisher, matrix, factored=factored, pools=pools)
    sensitivities, factors_of_g = zip(*chunks, strict=True)
    sensitivity = torch.cat(sensitivities)
    outputs = factors_of_g[-1]  # only matrices of a single chunk have a full G or low-rank parts
    del fisher  # frees H and G, which were overwritten, and contexts
    energies = {}
    if ranks := options.ranks_for(matrix):
        with step("low-rank parts"):
            energies = lowrank.residual_energies(weight, outputs.d_diagonal[: matrix.rows], ranks)
    damping = max(factored.ldl.damping, outputs.damping)
    if damping:
        _LOG.warning(_FALLBACK if math.isinf(damping) else _DAMPED, matrix.key, damping)
    few_tokens = statistics.tokens(matrix.name, matrix.expert) < matrix.cols
    table = ArmTable(
        matrix,
        options.bits_for(matrix),
        options.L,
        group_sums(sensitivity),
        group_sums(pruning),
        _lowrank_parts(energies, outputs, matrix),
        channels=channels,
        singular=covered and (bool(damping) or dead_inputs or few_tokens),
        input_scale=input_scale,
    )
    row_class = row_classes(sensitivity)
    keeps_order = matrix.role in UNSORTED_POOLED_ROLES and pools.shares_outputs(matrix)
    if covered and not keeps_order and sorting_pays(sensitivity, row_class, matrix.cols):
        in_order = _sorted_table(table, row_class, sensitivity, pruning, energies, outputs)
        table = replace(table, row_sorted=in_order)
    return table


def _sensitivity(chunk: RowChunk) -> tuple[torch.Tensor, BlockLDL]:
    """The sensitivity of the chunk's rows (m,), and the factors of their G."""
    prepared = chunk.prepared
    return prepared.row_sensitivity[: prepared.rows], prepared.outputs


def _sorted_table(
    table: ArmTable,
    row_class: NDArray[np.uint8],
    sensitivity: torch.Tensor,
    pruning: torch.Tensor,
    energies: Mapping[int, torch.Tensor],
    outputs: BlockLDL,
) -> ArmTable:
    """The table with rows sorted by class. All arguments are in natural order.

    Rows keep the sensitivity that they have in natural order. Feedback between rows depends on their order, but the
    best bits of a group of 16 rows hardly do, and factoring G again takes a fifth of the time of pricing (measured:
    docs/experiments/scale/large-matrices.md).

    sensitivity, pruning: (m,) per row, the latter from `pruning_loss`. energies: `lowrank.residual_energies` by rank;
    empty: no low-rank parts. outputs: the factors of G.
    """
    order = torch.from_numpy(stored_order(row_class)).to(sensitivity.device)
    energies = {rank: per_row[order] for rank, per_row in energies.items()}
    if energies:
        outputs = replace(outputs, d_diagonal=outputs.d_diagonal[: table.matrix.rows][order])
    return replace(
        table,
        sensitivity=group_sums(sensitivity[order]),
        pruning_loss=group_sums(pruning[order]),
        lowrank=_lowrank_parts(energies, outputs, table.matrix),
        row_class=row_class,
    )


def _lowrank_parts(
    energies: Mapping[int, torch.Tensor], outputs: BlockLDL, matrix: WeightMatrix
) -> list[lowrank.LowRankPart]:
    return lowrank.parts(energies, outputs.d_diagonal[: matrix.rows], matrix.cols) if energies else []
