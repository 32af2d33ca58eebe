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
from ciuic_cli.allocation.matrices import CHANNEL_ROLES, Unit, importance_of, slabs_of
from ciuic_cli.allocation.plan import Plan, UnitPlan
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix, stored_order
from ciuic_cli.codecs.scales import decode_scales
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import (
    BLOCK,
    Feedback,
    Importance,
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


def read_unit(model_map: ModelMap, unit: Unit) -> torch.Tensor:
    """The weight (rows, cols) in float32, in memory of its own; raises `InputError` for NaN or infinity."""
    name, expert = unit.name, unit.expert
    weight = model_map.read(name) if expert is None else model_map.read_expert(name, expert)
    return weight.to(torch.float32, copy=True)


@dataclass(frozen=True)
class Slab:
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


def slabs(
    weight: torch.Tensor,
    importance: Importance,
    unit: Unit,
    row_class: NDArray[np.uint8] | None = None,
    known: tuple[torch.Tensor | None, Feedback] | None = None,
) -> Iterator[Slab]:
    """A matrix (m, n) as it is stored, its inputs scaled already, part by part.

    known: what `input_feedback` gives for its H, where that was computed already.
    """
    order = torch.arange(unit.rows) if row_class is None else torch.from_numpy(stored_order(row_class))
    for stored in slabs_of(unit):
        rows = order[stored]
        whole = row_class is None and len(rows) == unit.rows
        part, its = (weight, importance) if whole else (weight[rows], importance.reordered(rows))
        prepared = prepare(part, its, known)
        known = prepared.blocks, prepared.inputs
        yield Slab(stored, rows, part, prepared)


def unit_arms(model_map: ModelMap, statistics: Statistics, unit: Unit, options: PassOptions) -> Arms:
    """All arms of one matrix with their predicted loss."""
    importance, weight = importance_of(unit, statistics), read_unit(model_map, unit)
    require_weighable(torch.linalg.vector_norm(weight, dim=1).square().numpy(), unit, model_map)
    gone = removal_loss(weight, importance)
    require_weighable(gone.numpy(), unit, model_map)
    known, input_scale = input_feedback(importance.inputs), None
    covered = statistics.covers(unit.name)  # else there is no Hessian at all
    if covered and unit.expert is None:  # experts take the same transformed input, all of them
        input_scale = input_scales(weight, importance, known[1])
        if input_scale is not None:
            weight, importance = scaled(weight, importance, input_scale)
            known = input_feedback(importance.inputs)
    losses = []
    for slab in slabs(weight, importance, unit, known=known):
        prepared = slab.prepared
        losses.append(prepared.row_loss[: prepared.rows])
    row_loss = torch.cat(losses)
    importance = replace(importance, contexts=None)  # as large as the matrix, and used up
    rest = {}
    if ranks := options.ranks_for(unit):  # of what is one slab
        rest = lowrank.rests(weight, prepared.outputs.noise[: unit.rows], ranks)
    arms = _priced(row_loss, prepared.outputs, gone, rest, unit, options)
    damping = max(prepared.inputs.damping, prepared.outputs.damping)
    if damping:
        _LOG.warning(_FALLBACK if math.isinf(damping) else _DAMPED, unit.key, damping)
    seen = statistics.tokens(unit.name, unit.expert)
    dead = bool((importance.inputs.diagonal() <= 0).any())
    arms.input_scale = input_scale
    arms.singular = covered and (bool(damping) or dead or seen < unit.cols)
    if options.prune == "auto" and unit.role in CHANNEL_ROLES:
        arms.channels = prune.channel_loss(weight, importance)
    row_class = row_classes(row_loss)
    if covered and sorting_pays(row_loss, row_class, unit.cols):
        order = torch.from_numpy(stored_order(row_class))
        rest = {rank: per_row[order] for rank, per_row in rest.items()}
        outputs, row_loss = prepared.outputs, row_loss[order]
        if outputs.factor is not None:  # else rows cost the same wherever they are
            moved = prepared.reordered(importance, order)
            outputs, row_loss = moved.outputs, moved.row_loss
        elif rest:
            outputs = replace(outputs, noise=outputs.noise[: unit.rows][order])
        arms.sorted = replace(
            _priced(row_loss, outputs, gone[order], rest, unit, options),
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
    rest: Mapping[int, torch.Tensor],
    unit: Unit,
    options: PassOptions,
) -> Arms:
    """The arms of a matrix with its rows in this order: what errors in them cost, and their removal, and what low-rank
    parts leave of them."""
    arms = Arms(unit, options.widths_for(unit), options.window, per_group(row_loss), per_group(gone))
    if rest:
        arms.lowrank = lowrank.arms(rest, outputs.noise[: unit.rows], unit.cols)
    return arms


def encode_unit(
    model_map: ModelMap, statistics: Statistics, plan: Plan, unit: Unit, *, window: int
) -> PackedMatrix:
    """Round one matrix as the plan says."""
    chosen = plan.units[unit.key]
    importance, weight = importance_of(unit, statistics), read_unit(model_map, unit)
    removed = prune.removed_columns(plan.removed, unit.key, unit.cols)
    if removed is not None:
        weight = prune.correct_rest(weight, importance.inputs, removed)
    weight, importance = scaled(weight, importance, chosen.input_scale)
    if len(slabs_of(unit)) > 1:
        return _encode_in_slabs(weight, importance, chosen, window)
    (slab,) = slabs(weight, importance, unit, chosen.row_class)
    prepared, factors = slab.prepared, None
    if chosen.rank:
        row_weight = prepared.outputs.noise[: unit.rows]
        factors, product = lowrank.encode(slab.weight, row_weight, chosen.rank, window=window)
        prepared = prepared.with_weight(slab.weight - product)
    return round_prepared(
        prepared,
        chosen.row_bits,
        lowrank=factors,
        row_class=chosen.row_class,
        input_scale=chosen.input_scale,
        window=window,
    )


def _encode_in_slabs(
    weight: torch.Tensor, importance: Importance, chosen: UnitPlan, window: int
) -> PackedMatrix:
    """The same of a matrix that has neither a low-rank part nor feedback between its rows."""
    unit, known = chosen.unit, input_feedback(importance.inputs)
    plain = slabs(weight, replace(importance, contexts=None), unit, chosen.row_class, known)
    deviation = torch.cat([slab.prepared.deviation[: len(slab.rows)] for slab in plain])
    base, codes = row_scales(deviation, chosen.row_bits, window)
    scales = decode_scales(base, codes)
    tiles = [
        round_rows(slab.prepared, chosen.row_bits[slab.groups], scales[slab.stored], window)
        for slab in slabs(weight, importance, unit, chosen.row_class, known)
    ]
    return PackedMatrix(
        unit.rows, unit.cols, window, 0, base, chosen.row_bits, codes, np.concatenate(tiles),
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


def arms_from_bytes(data: bytes, unit: Unit, options: PassOptions) -> Arms:
    stored = dict(np.load(io.BytesIO(data), allow_pickle=False))
    arms = _from_fields(stored, unit, options)
    beside = {name.removeprefix(_SORTED): value for name, value in stored.items() if name.startswith(_SORTED)}
    return replace(arms, sorted=_from_fields(beside, unit, options)) if beside else arms


def _from_fields(stored: Mapping[str, NDArray[Any]], unit: Unit, options: PassOptions) -> Arms:
    candidates = [
        lowrank.LowRankArm(int(rank), int(nbytes), remaining)
        for (rank, nbytes), remaining in zip(stored["ranks"], stored["remaining"], strict=True)
    ]
    return Arms(
        unit, options.widths_for(unit), options.window, stored["sensitivity"], stored["removal"], candidates,
        channels=stored["channels"], singular=bool(stored["singular"]),
        row_class=stored["row_class"] if stored["row_class"].size else None,
        input_scale=stored["input_scale"] if stored["input_scale"].size else None,
    )  # fmt: skip
