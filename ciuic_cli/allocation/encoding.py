"""One matrix at a time: its weight and statistics in, its arms or its coded form out."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import Arms, PassOptions, require_weighable
from ciuic_cli.allocation.matrices import CHANNEL_ROLES, WeightMatrix, fisher_of, row_slices
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix, stored_order
from ciuic_cli.codecs.scales import decode_scales
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import (
    BLOCK,
    Feedback,
    KroneckerFisher,
    Prepared,
    input_feedback,
    per_group,
    prepare,
    removal_loss,
    round_prepared,
    round_rows,
    row_scales,
)  # fmt: skip
from ciuic_cli.passes.scale import input_scales, scaled
from ciuic_cli.passes.sort import row_classes, sorting_pays
from ciuic_cli.statistics.files import Statistics

_LOG = logging.getLogger(__name__)
_DAMPED = "%s: a singular Hessian, damped by %.3g of its mean diagonal more than usual"
_FALLBACK = "%s: a Hessian that no damping (%s) makes regular: rounded without error feedback"


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
    arms.input_scale = input_scale
    arms.singular = covered and (bool(damping) or dead or seen < matrix.cols)
    if options.prune == "auto" and matrix.role in CHANNEL_ROLES:
        arms.channels = prune.channel_loss(weight, fisher)
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
        arms.sorted = replace(
            _priced(row_loss, outputs, gone[order], residual, matrix, options),
            row_class=row_class,
            input_scale=input_scale,
            channels=arms.channels,
            singular=arms.singular,
        )
    return arms


def _priced(
    row_loss: torch.Tensor,
    outputs: Feedback,
    gone: torch.Tensor,
    residual: Mapping[int, torch.Tensor],
    matrix: WeightMatrix,
    options: PassOptions,
) -> Arms:
    """The arms of a matrix with its rows in this order: what errors in them cost, and their removal, and what low-rank
    parts leave of them."""
    arms = Arms(matrix, options.widths_for(matrix), options.L, per_group(row_loss), per_group(gone))
    if residual:
        arms.lowrank = lowrank.arms(residual, outputs.noise[: matrix.rows], matrix.cols)
    return arms


def encode_matrix(
    model_map: ModelMap, statistics: Statistics, plan: Plan, matrix: WeightMatrix, *, L: int
) -> PackedMatrix:
    """Round one matrix as the plan says."""
    chosen = plan.matrices[matrix.key]
    fisher, weight = fisher_of(matrix, statistics), read_matrix(model_map, matrix)
    removed = prune.removed_columns(plan.removed, matrix.key, matrix.cols)
    if removed is not None:
        weight = prune.correct_remaining(weight, fisher.inputs, removed)
    weight, fisher = scaled(weight, fisher, chosen.input_scale)
    if len(row_slices(matrix)) > 1:
        return _encode_in_chunks(weight, fisher, chosen, L)
    (chunk,) = row_chunks(weight, fisher, matrix, chosen.row_class)
    prepared, factors = chunk.prepared, None
    if chosen.rank:
        row_weight = prepared.outputs.noise[: matrix.rows]
        factors, product = lowrank.encode(chunk.weight, row_weight, chosen.rank, L=L)
        prepared = prepared.with_weight(chunk.weight - product)
    return round_prepared(
        prepared,
        chosen.row_bits,
        lowrank=factors,
        row_class=chosen.row_class,
        input_scale=chosen.input_scale,
        L=L,
    )


def _encode_in_chunks(
    weight: torch.Tensor, fisher: KroneckerFisher, chosen: MatrixPlan, L: int
) -> PackedMatrix:
    """The same of a matrix that has neither a low-rank part nor feedback between its rows."""
    matrix, known = chosen.matrix, input_feedback(fisher.inputs)
    plain = row_chunks(weight, replace(fisher, contexts=None), matrix, chosen.row_class, known)
    rms = torch.cat([chunk.prepared.rms[: len(chunk.rows)] for chunk in plain])
    base, codes = row_scales(rms, chosen.row_bits, L)
    scales = decode_scales(base, codes)
    tiles = [
        round_rows(chunk.prepared, chosen.row_bits[chunk.groups], scales[chunk.stored], L)
        for chunk in row_chunks(weight, fisher, matrix, chosen.row_class, known)
    ]
    return PackedMatrix(
        matrix.rows, matrix.cols, L, 0, base, chosen.row_bits, codes, np.concatenate(tiles),
        row_class=chosen.row_class, input_scale=chosen.input_scale,
    )  # fmt: skip


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
