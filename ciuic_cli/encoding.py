"""One matrix at a time: its weight and statistics in, its arms or its coded form out."""

from __future__ import annotations

import io
import logging
import math

import numpy as np
import torch

from ciuic_cli.checkpoint.formats import require_finite
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import prepare, round_prepared
from ciuic_cli.planning import CHANNEL_ROLES, PLAIN_ROLES, Arms, PassOptions, Plan, Unit, importance_of
from ciuic_cli.statistics.collect import Statistics

_LOG = logging.getLogger(__name__)
_DAMPED = "%s: a singular Hessian, damped by %.3g of its mean diagonal more than usual"
_FALLBACK = "%s: a Hessian that no damping (%s) makes regular: rounded without error feedback"


def read_unit(model_map: ModelMap, unit: Unit) -> torch.Tensor:
    """The weight (rows, cols) in float32; raises `InputError` for NaN or infinity."""
    name, expert = unit.name, unit.expert
    weight = model_map.read(name) if expert is None else model_map.read_expert(name, expert)
    require_finite(weight, unit.key)
    return weight.float()


def unit_arms(model_map: ModelMap, statistics: Statistics, unit: Unit, options: PassOptions) -> Arms:
    """All arms of one matrix with their predicted loss."""
    weight = read_unit(model_map, unit)
    importance = importance_of(unit, statistics)
    prepared = prepare(weight, importance)
    arms = Arms.of(unit, prepared, options.widths_for(unit), options.window)
    damping = max(prepared.inputs.damping, prepared.outputs.damping)
    if damping:
        _LOG.warning(_FALLBACK if math.isinf(damping) else _DAMPED, unit.key, damping)
    seen = statistics.tokens(unit.name, unit.expert)
    dead = bool((importance.inputs.diagonal() <= 0).any())
    covered = statistics.covers(unit.name)  # else there is no Hessian at all
    arms.singular = covered and (bool(damping) or dead or seen < unit.cols)
    if options.rank != "off" and unit.role not in PLAIN_ROLES:
        ranks = lowrank.RANKS if options.rank == "auto" else (int(options.rank),)
        arms.lowrank = lowrank.arms(weight, prepared.outputs.noise[: unit.rows], ranks)
    if options.prune == "auto" and unit.role in CHANNEL_ROLES:
        arms.channels = prune.channel_loss(weight, importance)
    return arms


def encode_unit(
    model_map: ModelMap, statistics: Statistics, plan: Plan, unit: Unit, *, window: int, threads: int
) -> PackedMatrix:
    """Round one matrix as the plan says."""
    chosen = plan.units[unit.key]
    importance = importance_of(unit, statistics)
    weight = read_unit(model_map, unit)
    removed = prune.removed_columns(plan.removed, unit.key, unit.cols)
    if removed is not None:
        weight = prune.correct_rest(weight, importance.inputs, removed)
    if not chosen.rank:
        return round_prepared(prepare(weight, importance), chosen.row_bits, window=window, threads=threads)
    row_weight = prepare(weight, importance).outputs.noise[: unit.rows]
    factors, product = lowrank.encode(weight, row_weight, chosen.rank, window=window, threads=threads)
    rest = prepare(weight - product, importance)
    return round_prepared(rest, chosen.row_bits, lowrank=factors, window=window, threads=threads)


def arms_to_bytes(arms: Arms) -> bytes:
    """A matrix's arms for the journal; the widths follow from the options."""
    buffer = io.BytesIO()
    ranks = np.array([[arm.rank, arm.nbytes] for arm in arms.lowrank], np.int64).reshape(-1, 2)
    remaining = np.array([arm.remaining for arm in arms.lowrank]).reshape(-1, len(arms.sensitivity))
    np.savez(
        buffer, sensitivity=arms.sensitivity, removal=arms.removal, channels=arms.channels, ranks=ranks,
        remaining=remaining, singular=arms.singular,
    )  # fmt: skip
    return buffer.getvalue()


def arms_from_bytes(data: bytes, unit: Unit, options: PassOptions) -> Arms:
    stored = np.load(io.BytesIO(data), allow_pickle=False)
    candidates = [
        lowrank.LowRankArm(int(rank), int(nbytes), remaining)
        for (rank, nbytes), remaining in zip(stored["ranks"], stored["remaining"], strict=True)
    ]
    return Arms(
        unit, options.widths_for(unit), options.window, stored["sensitivity"], stored["removal"], candidates,
        channels=stored["channels"], singular=bool(stored["singular"]),
    )  # fmt: skip
