"""Planning: solve the knapsack, then add low-rank parts and pruned structures where they pay, and solve again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import Arms, PassOptions, prunable_structures, require_finite_loss
from ciuic_cli.allocation.group_knapsack import GroupKnapsack
from ciuic_cli.allocation.knapsack import Allocation
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import TargetError
from ciuic_cli.passes import prune


def make_plan(model_map: ModelMap, arms: list[Arms], budget: int, options: PassOptions) -> Plan:
    """The plan with the least predicted loss whose safetensors files take at most `budget` bytes.

    arms: the arms of every matrix.

    Raises:
        InputError: a predicted loss that is NaN or infinite.
        TargetError: the budget is too small even with every matrix at its smallest arm.
    """
    for arm in arms:
        require_finite_loss(arm.loss, arm.matrix, model_map)
    if isinstance(options.rank, int):
        arms = [
            replace(arm, rank=options.rank) if any(part.rank == options.rank for part in arm.lowrank) else arm
            for arm in arms
        ]
    forced: dict[str, NDArray[np.bool_]] = {}
    if isinstance(options.prune, float):
        candidates = {arm.matrix.key: (arm.removal, TILE * arm.matrix.cols) for arm in arms if 0 in arm.bits}
        forced = prune.forced_groups(candidates, options.prune)
    knapsack = GroupKnapsack(model_map, arms, budget, forced)
    plan = _choose_arms(knapsack, options)
    while plan.file_bytes > budget:  # shard headers can be a few bytes longer than they were counted
        knapsack.budget -= plan.file_bytes - budget
        plan = knapsack.plan(knapsack.solve())
    return replace(plan, budget=budget)


def _choose_arms(knapsack: GroupKnapsack, options: PassOptions) -> Plan:
    allocation = knapsack.solve()
    if options.rank == "auto":
        allocation = _add_low_rank_parts(knapsack, allocation)
    if options.prune == "auto":
        allocation = _prune_structures(knapsack, allocation)
    return knapsack.plan(allocation)


def _add_low_rank_parts(knapsack: GroupKnapsack, allocation: Allocation) -> Allocation:
    """Choose every matrix's rank at the allocation's Lagrange multiplier, and solve again."""
    without_parts = knapsack.arms
    knapsack.arms = [_with_best_rank(arm, allocation.multiplier) for arm in without_parts]
    if any(arm.rank for arm in knapsack.arms):
        try:
            return knapsack.solve()
        except TargetError:  # the codes alone take (nearly) all bytes, so the multiplier means nothing
            knapsack.arms = [replace(arm, rank=0) for arm in without_parts]
    return allocation


def _with_best_rank(arm: Arms, multiplier: float) -> Arms:
    """The arms at the rank with the least loss + multiplier · bytes."""
    candidates = [replace(arm, rank=rank) for rank in (0, *(part.rank for part in arm.lowrank))]

    def cost(candidate: Arms) -> float:
        best = (candidate.loss + multiplier * candidate.nbytes).min(axis=1).sum()
        return float(best) + multiplier * candidate.lowrank_bytes

    return min(candidates, key=lambda candidate: (cost(candidate), candidate.rank))


def _prune_structures(knapsack: GroupKnapsack, allocation: Allocation) -> Allocation:
    """Prune structures whose removal loses less than keeping costs (loss + multiplier · bytes), and solve again."""
    cost = knapsack.cost_of(allocation)
    knapsack.structures = [
        structure
        for structure in prunable_structures(knapsack.arms)
        if (structure.block is not None or _router_can_mask(structure.down, knapsack.map))
        and structure.loss < cost(structure)
    ]
    groups = {arm.matrix.key: arm.matrix.groups for arm in knapsack.arms}
    knapsack.forced = prune.masks(knapsack.structures, groups)
    knapsack.arms = [replace(arm, rank=0) if knapsack.is_pruned(arm) else arm for arm in knapsack.arms]
    return knapsack.solve()


def _router_can_mask(down: str, model_map: ModelMap) -> bool:
    """Whether the router can avoid the expert. It cannot if a table assigns tokens to experts (V4)."""
    return f"{down.partition('.experts.')[0]}.gate.tid2eid" not in model_map.parameters


def with_sorted_rows(arms: Sequence[Arms], plan: Plan) -> list[Arms]:
    """The arms with rows sorted where that pays, except for matrices whose MLP channels the plan prunes.

    Sorted row groups are not blocks of channels, so sorting would forbid pruning those.
    """
    in_channels = {
        key
        for structure in plan.pruned_structures
        if structure.block is not None
        for key, _ in structure.members
    }
    return [
        arm if arm.row_sorted is None or arm.matrix.key in in_channels else arm.row_sorted for arm in arms
    ]
