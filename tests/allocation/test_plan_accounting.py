"""What a plan says it loses and takes: pruning at its price, each loss counted once, an upper bound of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ciuic_cli.allocation.arms import ArmTable, PassOptions
from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, weight_matrices
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.allocation.planning import make_plan
from ciuic_cli.allocation.reachable import largest_bytes
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.bits import BITS, bits_of
from ciuic_cli.passes.lowrank import LowRankPart, factor_bytes

WIDTHS = BITS[1:]
EXPENSIVE = 1e9
"""KL of pruning that never pays."""


@pytest.fixture(scope="module")
def model_map(tiny_checkpoint: Callable[..., Path]) -> ModelMap:
    return map_model(open_checkpoint(tiny_checkpoint("llama")))


def arms_of(model_map: ModelMap, options: PassOptions) -> list[ArmTable]:
    """Arms with sensitivities over orders of magnitude; pruning a group loses what a code of no bits would."""
    generator = np.random.default_rng(0)
    made = []
    for matrix in weight_matrices(model_map.parameters.values()):
        sensitivity = generator.lognormal(0, 2, matrix.groups)
        made.append(ArmTable(matrix, options.bits_for(matrix), options.L, sensitivity, sensitivity.copy()))
    return made


def half_of_4_bits(model_map: ModelMap) -> int:
    """A budget of about 6.4 bits per weight, overhead included."""
    return int(2 * model_map.stored_numel / 2.5)


def with_channels(tables: list[ArmTable], losses: dict[int, float]) -> tuple[list[ArmTable], str]:
    """The tables with the pruning losses of channel blocks of the first down projection; returns its key too."""
    down = next(table for table in tables if table.matrix.role == "down")
    channels = np.full(-(-down.matrix.cols // 16), EXPENSIVE)
    for block, loss in losses.items():
        channels[block] = loss
    return [
        replace(table, channels=channels) if table is down else table for table in tables
    ], down.matrix.key


def loss_at(table: ArmTable, row_bits: np.ndarray) -> np.ndarray:
    """(groups,) predicted KL of each row group at its bits."""
    columns = [table.bits.index(bits) for bits in bits_of(row_bits).tolist()]
    return np.array([table.loss[group, column] for group, column in enumerate(columns)])


@pytest.mark.parametrize(("factor", "pruned"), [(0.97, True), (1.03, False)])
def test_a_structure_goes_if_it_costs_less_than_its_members_loss_and_bytes(
    model_map: ModelMap, factor: float, pruned: bool
) -> None:
    """Bytes are priced at the Lagrange multiplier. The loss alone is far less than loss and bytes together."""
    options, block = PassOptions(WIDTHS), 1
    budget = half_of_4_bits(model_map)
    tables, down = with_channels(arms_of(model_map, options), {})
    before = make_plan(model_map, tables, budget, options)
    members = [down.replace("down", name) for name in ("gate", "up")]
    loss = price = 0.0
    for table in tables:
        if table.matrix.key in members:
            row_bits = before.matrices[table.matrix.key].row_bits
            loss += loss_at(table, row_bits)[block]
            price += before.multiplier * 2 * table.matrix.padded_cols * float(bits_of(row_bits)[block])
    assert 0 < loss < price
    tables, _ = with_channels(tables, {block: factor * (loss + price)})
    plan = make_plan(model_map, tables, budget, options)
    assert [(structure.down, structure.block) for structure in plan.pruned_structures] == [
        (down, block)
    ] * pruned


def counted(tables: list[ArmTable], plan: Plan) -> float:
    """KL of all kept row groups and of all pruned structures, each once."""
    gone = {member for structure in plan.pruned_structures for member in structure.members}
    total = sum(structure.loss for structure in plan.pruned_structures)
    for table in tables:
        kept = [(table.matrix.key, group) not in gone for group in range(table.matrix.groups)]
        total += float(loss_at(table, plan.matrices[table.matrix.key].row_bits)[kept].sum())
    return total


def test_every_pruned_structure_and_every_group_is_counted_once(model_map: ModelMap) -> None:
    options = PassOptions(WIDTHS)
    tables, down = with_channels(arms_of(model_map, options), {1: 1e-5, 4: 2e-5})
    plan = make_plan(model_map, tables, half_of_4_bits(model_map), options)
    assert {structure.block for structure in plan.pruned_structures} == {1, 4}
    assert plan.predicted_kl == pytest.approx(counted(tables, plan), rel=1e-6)
    assert plan.rounding_kl[down] == pytest.approx(plan.matrices[down].predicted_kl - 3e-5)
    for name in ("gate", "up"):
        assert np.flatnonzero(plan.structure_masks[down.replace("down", name)]).tolist() == [1, 4]


def test_groups_that_are_pruned_by_force_cost_their_pruning_loss(model_map: ModelMap) -> None:
    options = PassOptions(WIDTHS, prune=0.2)
    tables = arms_of(model_map, options)
    plan = make_plan(model_map, tables, half_of_4_bits(model_map), options)
    assert not plan.pruned_structures and any(
        (chosen.row_bits == 0).any() for chosen in plan.matrices.values()
    )
    assert plan.predicted_kl == pytest.approx(counted(tables, plan), rel=1e-6)


def test_layers_that_no_prediction_passes_through_lose_nothing(model_map: ModelMap) -> None:
    options = PassOptions(WIDTHS, prune="off")
    tables = arms_of(model_map, options)
    unseen = replace(tables[4], matrix=replace(tables[4].matrix, role=sorted(MTP_ROLES)[0]))
    plan = make_plan(model_map, [*tables[:4], unseen, *tables[5:]], half_of_4_bits(model_map), options)
    chosen = plan.matrices[unseen.matrix.key]
    assert chosen.predicted_kl == 0.0 and chosen.row_bits.all()
    assert plan.predicted_kl == pytest.approx(counted([*tables[:4], *tables[5:]], plan), rel=1e-6)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_no_plan_is_larger_than_the_largest(model_map: ModelMap, is_sorted: bool, is_scaled: bool) -> None:
    options = PassOptions(WIDTHS, prune="off", rank="off")
    tables = [
        replace(
            table,
            row_class=np.zeros(table.matrix.rows, np.uint8) if is_sorted else None,
            input_scale=np.zeros(table.matrix.cols, np.uint8) if is_scaled else None,
        )
        for table in arms_of(model_map, options)
    ]
    plan = make_plan(model_map, tables, 1 << 50, options)
    largest = largest_bytes(model_map, options)
    assert plan.file_bytes <= largest
    assert (plan.file_bytes == largest) == (is_sorted and is_scaled)


def test_low_rank_parts_that_do_not_fit_beside_the_codes_are_left_out(model_map: ModelMap) -> None:
    """With one width there is nothing to choose, so the multiplier of bytes is nearly 0."""
    options = PassOptions((4,), prune="off", rank="auto")
    tables = arms_of(model_map, options)
    least = make_plan(model_map, tables, 1 << 50, options).file_bytes
    for index, table in enumerate(tables):
        matrix = table.matrix
        if matrix.role not in EMBEDDING_ROLES and min(matrix.rows, matrix.cols) > 16:
            nbytes = factor_bytes(matrix.rows, matrix.cols, 16)
            tables[index] = replace(
                table, lowrank=[LowRankPart(16, nbytes, np.full(matrix.groups, 1e-3, np.float32))]
            )
    plan = make_plan(model_map, tables, least + 16, options)
    assert plan.file_bytes <= least + 16
    assert not any(chosen.rank for chosen in plan.matrices.values())
    enough = make_plan(model_map, tables, 1 << 50, options)
    assert any(chosen.rank for chosen in enough.matrices.values())


def test_every_byte_of_the_budget_is_a_reachable_limit(model_map: ModelMap) -> None:
    """Sizes in the header have more digits in some plans than in others; no plan exceeds its budget because of that."""
    options = PassOptions(WIDTHS, prune="off", rank="off")
    tables = arms_of(model_map, options)
    for budget in range(half_of_4_bits(model_map), half_of_4_bits(model_map) + 24):
        plan = make_plan(model_map, tables, budget, options)
        assert budget - 200 < plan.file_bytes <= plan.budget == budget
