"""Prices the arms of one weight matrix: predicted KL for every number of bits, low-rank part and row order."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from ciuic_cli.allocation.arms import Arms, PassOptions, require_weighable
from ciuic_cli.allocation.matrices import CHANNEL_ROLES, WeightMatrix, fisher_of
from ciuic_cli.allocation.row_chunks import read_matrix, row_chunks
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import stored_order
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import (
    Feedback,
    input_feedback,
    per_group,
    removal_loss,
)  # fmt: skip
from ciuic_cli.passes.scale import input_scales, scaled
from ciuic_cli.passes.sort import row_classes, sorting_pays
from ciuic_cli.statistics.files import Statistics

_LOG = logging.getLogger(__name__)
_DAMPED = "%s: a singular Hessian, damped by %.3g of its mean diagonal more than usual"
_FALLBACK = "%s: a Hessian that no damping (%s) makes regular: rounded without error feedback"


def price_matrix(
    model_map: ModelMap, statistics: Statistics, matrix: WeightMatrix, options: PassOptions
) -> Arms:
    """All arms of one matrix with their predicted loss."""
    fisher, weight = fisher_of(matrix, statistics), read_matrix(model_map, matrix)
    require_weighable(torch.linalg.vector_norm(weight, dim=1).square().numpy(), matrix, model_map)
    gone = removal_loss(weight, fisher)
    require_weighable(gone.numpy(), matrix, model_map)
    known, input_scale = input_feedback(fisher.inputs), None
    covered = statistics.covers(matrix.name)  # else there is no Hessian at all
    if covered and matrix.expert is None:  # experts take the same transformed input, all of them
        input_scale = input_scales(weight, fisher, known[1])
        if input_scale is not None:
            weight, fisher = scaled(weight, fisher, input_scale)
            known = input_feedback(fisher.inputs)
    losses = []
    for chunk in row_chunks(weight, fisher, matrix, known=known):
        prepared = chunk.prepared
        losses.append(prepared.row_loss[: prepared.rows])
    row_loss = torch.cat(losses)
    fisher = replace(fisher, contexts=None)  # as large as the matrix, and used up
    residual = {}
    if ranks := options.ranks_for(matrix):  # the matrix is one chunk
        residual = lowrank.residuals(weight, prepared.outputs.noise[: matrix.rows], ranks)
    arms = _priced(row_loss, prepared.outputs, gone, residual, matrix, options)
    damping = max(prepared.inputs.damping, prepared.outputs.damping)
    if damping:
        _LOG.warning(_FALLBACK if math.isinf(damping) else _DAMPED, matrix.key, damping)
    seen = statistics.tokens(matrix.name, matrix.expert)
    dead = bool((fisher.inputs.diagonal() <= 0).any())
    arms = replace(
        arms, input_scale=input_scale, singular=covered and (bool(damping) or dead or seen < matrix.cols)
    )
    if options.prune == "auto" and matrix.role in CHANNEL_ROLES:
        arms = replace(arms, channels=prune.channel_loss(weight, fisher))
    row_class = row_classes(row_loss)
    if covered and sorting_pays(row_loss, row_class, matrix.cols):
        order = torch.from_numpy(stored_order(row_class))
        residual = {rank: per_row[order] for rank, per_row in residual.items()}
        outputs, row_loss = prepared.outputs, row_loss[order]
        if outputs.factor is not None:  # else rows cost the same wherever they are
            moved = prepared.reordered(fisher, order)
            outputs, row_loss = moved.outputs, moved.row_loss
        elif residual:
            outputs = replace(outputs, noise=outputs.noise[: matrix.rows][order])
        in_order = replace(
            _priced(row_loss, outputs, gone[order], residual, matrix, options),
            row_class=row_class,
            input_scale=input_scale,
            channels=arms.channels,
            singular=arms.singular,
        )
        arms = replace(arms, sorted=in_order)
    return arms


def _priced(
    row_loss: torch.Tensor,
    outputs: Feedback,
    gone: torch.Tensor,
    residual: Mapping[int, torch.Tensor],
    matrix: WeightMatrix,
    options: PassOptions,
) -> Arms:
    """The arms of a matrix with its rows in one order.

    row_loss, gone: (m,) KL per unit of normalised code error, and of leaving the row out. residual: by rank, the share
    of each row's energy that a low-rank part leaves.
    """
    parts = lowrank.arms(residual, outputs.noise[: matrix.rows], matrix.cols) if residual else []
    return Arms(matrix, options.widths_for(matrix), options.L, per_group(row_loss), per_group(gone), parts)
