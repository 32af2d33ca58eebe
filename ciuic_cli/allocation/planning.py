"""Planning: solve the knapsack, then add low-rank parts and pruned structures where they pay, and solve again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import ArmTable, PassOptions, prunable_structures, require_finite_loss
from ciuic_cli.allocation.group_knapsack import GroupKnapsack
from ciuic_cli.allocation.knapsack import Allocation
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import TargetError
from ciuic_cli.passes import prune


def make_plan(model_map: ModelMap, tables: Sequence[ArmTable], budget: int, options: PassOptions) -> Plan:
    """The plan with the least predicted loss whose safetensors files take at most `budget` bytes.

    tables: the arms of every matrix.

    Raises:
        InputError: a predicted loss that is NaN or infinite.
        TargetError: the budget is too small even with every matrix at its smallest arm.
    """
    for table in tables:
        require_finite_loss(table.loss, table.matrix, model_map)
    if isinstance(options.rank, int):
        tables = [
            replace(table, rank=options.rank)
            if any(part.rank == options.rank for part in table.lowrank)
            else table
            for table in tables
        ]
    pruned: dict[str, NDArray[np.bool_]] = {}
    if isinstance(options.prune, float):
        candidates = {
            table.matrix.key: (table.pruning_loss, TILE * table.matrix.cols)
            for table in tables
            if 0 in table.bits
        }
        pruned = prune.groups_to_prune(candidates, options.prune)
    knapsack = GroupKnapsack(model_map, tables, budget, pruned)
    allocation = knapsack.solve()
    if options.rank == "auto":
        knapsack, allocation = _add_low_rank_parts(knapsack, allocation)
    if options.prune == "auto":
        knapsack, allocation = _prune_structures(knapsack, allocation)
    plan = knapsack.plan(allocation)
    while plan.file_bytes > budget:  # shard headers can be a few bytes longer than they were counted
        knapsack = replace(knapsack, budget=knapsack.budget - (plan.file_bytes - budget))
        plan = knapsack.plan(knapsack.solve())
    return replace(plan, budget=budget)


def _add_low_rank_parts(knapsack: GroupKnapsack, allocation: Allocation) -> tuple[GroupKnapsack, Allocation]:
    """Choose every matrix's rank at the allocation's Lagrange multiplier, and solve again."""
    tables = [_with_best_rank(table, allocation.multiplier) for table in knapsack.tables]
    if any(table.rank for table in tables):
        with_parts = replace(knapsack, tables=tables)
        try:
            return with_parts, with_parts.solve()
        except TargetError:  # the codes alone take nearly all bytes, so the multiplier means nothing
            pass
    return knapsack, allocation


def _with_best_rank(table: ArmTable, multiplier: float) -> ArmTable:
    """The table at the rank with the least loss + multiplier · bytes."""
    candidates = [replace(table, rank=rank) for rank in (0, *(part.rank for part in table.lowrank))]

    def lagrangian(candidate: ArmTable) -> float:
        best = (candidate.loss + multiplier * candidate.nbytes).min(axis=1).sum()
        return float(best) + multiplier * candidate.lowrank_bytes

    return min(candidates, key=lambda candidate: (lagrangian(candidate), candidate.rank))


def _prune_structures(knapsack: GroupKnapsack, allocation: Allocation) -> tuple[GroupKnapsack, Allocation]:
    """Prune every structure whose pruning loss is below its present loss + multiplier · bytes, and solve again."""
    lagrangian = knapsack.lagrangian_of(allocation)
    structures = tuple(
        structure
        for structure in prunable_structures(knapsack.tables)
        if (structure.block is not None or _router_can_mask(structure.down, knapsack.map))
        and structure.loss < lagrangian(structure)
    )
    groups = {table.matrix.key: table.matrix.groups for table in knapsack.tables}
    knapsack = replace(knapsack, structures=structures, pruned=prune.masks(structures, groups))
    tables = [replace(table, rank=0) if knapsack.is_pruned(table) else table for table in knapsack.tables]
    knapsack = replace(knapsack, tables=tables)
    return knapsack, knapsack.solve()


def _router_can_mask(down: str, model_map: ModelMap) -> bool:
    """Whether the router can avoid the expert. It cannot if a table assigns tokens to experts (V4)."""
    return f"{down.partition('.experts.')[0]}.gate.tid2eid" not in model_map.parameters


def with_sorted_rows(tables: Sequence[ArmTable], plan: Plan) -> list[ArmTable]:
    """The tables with rows sorted where that pays, except for matrices whose MLP channels the plan prunes.

    A group of sorted rows is not a block of channels, so such a block could not be pruned.
    """
    in_channels = {
        key
        for structure in plan.pruned_structures
        if structure.block is not None
        for key, _ in structure.members
    }
    return [
        table if table.row_sorted is None or table.matrix.key in in_channels else table.row_sorted
        for table in tables
    ]
