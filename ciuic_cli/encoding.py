"""One matrix at a time: its weight and statistics in, its arms or its coded form out."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.arms import Arms, PassOptions, require_weighable
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix, stored_order, stored_position
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import Importance, Prepared, per_group, prepare, removal_loss, round_prepared
from ciuic_cli.passes.scale import input_scales, scaled
from ciuic_cli.passes.sort import row_classes, sorting_pays
from ciuic_cli.planning import Plan, UnitPlan
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.units import CHANNEL_ROLES, Unit, importance_of

_LOG = logging.getLogger(__name__)
_DAMPED = "%s: a singular Hessian, damped by %.3g of its mean diagonal more than usual"
_FALLBACK = "%s: a Hessian that no damping (%s) makes regular: rounded without error feedback"


def read_unit(model_map: ModelMap, unit: Unit) -> torch.Tensor:
    """The weight (rows, cols) in float32; raises `InputError` for NaN or infinity."""
    name, expert = unit.name, unit.expert
    return (model_map.read(name) if expert is None else model_map.read_expert(name, expert)).float()


def unit_arms(model_map: ModelMap, statistics: Statistics, unit: Unit, options: PassOptions) -> Arms:
    """All arms of one matrix with their predicted loss."""
    weight = read_unit(model_map, unit)
    require_weighable(torch.linalg.vector_norm(weight, dim=1).square().numpy(), unit, model_map)
    importance = importance_of(unit, statistics)
    gone = removal_loss(weight, importance)
    require_weighable(gone.numpy(), unit, model_map)
    prepared, input_scale = prepare(weight, importance), None
    covered = statistics.covers(unit.name)  # else there is no Hessian at all
    if covered and unit.expert is None:  # experts take the same transformed input, all of them
        input_scale = input_scales(weight, importance, prepared)
        if input_scale is not None:
            outputs = prepared.outputs
            del prepared  # three times as large as the matrix
            weight, importance = scaled(weight, importance, input_scale)
            prepared = prepare(weight, importance, outputs)
    importance = replace(importance, contexts=None)  # as large as the matrix, and used up
    rest = {}
    if ranks := options.ranks_for(unit):
        rest = lowrank.rests(weight, prepared.outputs.noise[: unit.rows], ranks)
    arms = replace(_priced(prepared, gone, rest, unit, options), input_scale=input_scale)
    damping = max(prepared.inputs.damping, prepared.outputs.damping)
    if damping:
        _LOG.warning(_FALLBACK if math.isinf(damping) else _DAMPED, unit.key, damping)
    seen = statistics.tokens(unit.name, unit.expert)
    dead = bool((importance.inputs.diagonal() <= 0).any())
    arms.singular = covered and (bool(damping) or dead or seen < unit.cols)
    if options.prune == "auto" and unit.role in CHANNEL_ROLES:
        arms.channels = prune.channel_loss(weight, importance)
    row_loss = prepared.row_loss[: unit.rows]
    row_class = row_classes(row_loss)
    if covered and sorting_pays(row_loss, row_class, unit.cols):
        order = torch.from_numpy(stored_order(row_class))
        rest = {rank: per_row[order] for rank, per_row in rest.items()}
        arms.sorted = replace(
            _priced(prepared.reordered(importance, order), gone[order], rest, unit, options),
            row_class=row_class,
            input_scale=input_scale,
            channels=arms.channels,
            singular=arms.singular,
        )
    return arms


def _priced(
    prepared: Prepared, gone: torch.Tensor, rest: Mapping[int, torch.Tensor], unit: Unit, options: PassOptions
) -> Arms:
    """The arms of a matrix with its rows in this order: what removing them costs, what low-rank parts leave of them."""
    widths = options.widths_for(unit)
    arms = Arms(unit, widths, options.window, prepared.sensitivity, per_group(gone))
    if rest:
        arms.lowrank = lowrank.arms(rest, prepared.outputs.noise[: unit.rows], unit.cols)
    return arms


def arranged(
    weight: torch.Tensor, importance: Importance, chosen: UnitPlan
) -> tuple[torch.Tensor, Importance]:
    """A weight (m, n) and its importance as they are stored: inputs scaled, rows in their order."""
    weight, importance = scaled(weight, importance, chosen.input_scale)
    if chosen.row_class is None:
        return weight, importance
    order = torch.from_numpy(stored_order(chosen.row_class))
    return weight[order], importance.reordered(order)


def as_it_was(weight: torch.Tensor, chosen: UnitPlan) -> torch.Tensor:
    """The inverse of `arranged`: a weight (m, n) as the model has it."""
    if chosen.row_class is not None:
        weight = weight[torch.from_numpy(stored_position(chosen.row_class))]
    return weight if chosen.input_scale is None else weight * input_factors(chosen.input_scale)


def encode_unit(
    model_map: ModelMap, statistics: Statistics, plan: Plan, unit: Unit, *, window: int
) -> PackedMatrix:
    """Round one matrix as the plan says."""
    chosen = plan.units[unit.key]
    importance = importance_of(unit, statistics)
    weight = read_unit(model_map, unit)
    removed = prune.removed_columns(plan.removed, unit.key, unit.cols)
    if removed is not None:
        weight = prune.correct_rest(weight, importance.inputs, removed)
    weight, importance = arranged(weight, importance, chosen)
    prepared, factors = prepare(weight, importance), None
    if chosen.rank:
        row_weight = prepared.outputs.noise[: unit.rows]
        factors, product = lowrank.encode(weight, row_weight, chosen.rank, window=window)
        prepared = prepared.with_weight(weight - product)
    return round_prepared(
        prepared,
        chosen.row_bits,
        lowrank=factors,
        row_class=chosen.row_class,
        input_scale=chosen.input_scale,
        window=window,
    )


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
