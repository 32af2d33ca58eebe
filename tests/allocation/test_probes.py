"""Corrections of the prediction by measured noise, with a meter whose answers are known."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from ciuic_cli.allocation import probes as probing
from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.matrices import WeightMatrix
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.allocation.probes import (
    LIMITS,
    OWN_PROBE,
    PROBED_LAYERS,
    TOGETHER,
    correction_of,
    corrections_of,
    probes_of,
)
from ciuic_cli.passes.prune import Structure
from ciuic_cli.passes.quantize import KroneckerFisher

BITS = np.full(2, 4, np.uint8)


def _plan(predicted: dict[str, float]) -> Plan:
    matrices = {
        f"{role}.weight": MatrixPlan(WeightMatrix(f"{role}.weight", None, role, 32, 32), BITS, 0, 0, loss)
        for role, loss in predicted.items()
    }
    return Plan(matrices, {}, 0, 0, 0.0)


def _corrections(predicted: dict[str, float], answers: list[float]) -> dict[str, dict[str, float]]:
    plan = _plan(predicted)
    return corrections_of(plan, probes_of(plan, ()), answers)


def _deep(layers: int) -> tuple[Plan, list[str]]:
    """A plan with two experts' matrices in each layer, and a head outside of them."""
    matrices = [
        WeightMatrix(f"model.layers.{layer}.mlp.experts.down_proj", expert, "expert_down", 32, 32)
        for layer in range(layers)
        for expert in range(2)
    ]
    matrices.append(WeightMatrix("lm_head.weight", None, "head", 32, 32))
    plans = {matrix.key: MatrixPlan(matrix, BITS, 0, 0, 0.001) for matrix in matrices}
    return Plan(plans, {}, 0, 0, 0.0), [f"model.layers.{layer}." for layer in range(layers)]


@pytest.mark.parametrize("layers", [1, 3, PROBED_LAYERS, PROBED_LAYERS + 1, 80])
def test_a_role_is_probed_in_some_layers_and_all_roles_in_all(layers: int) -> None:
    plan, prefixes = _deep(layers)
    experts, head, whole = probes_of(plan, prefixes)
    assert [matrix.name for matrix in head] == ["lm_head.weight"]
    assert {matrix.key for matrix in whole} == set(plan.matrices)
    seen = sorted({int(matrix.name.split(".")[2]) for matrix in experts})
    assert len(seen) == min(layers, PROBED_LAYERS)
    assert len(experts) == 2 * len(seen)
    steps = np.diff([-1, *seen, layers])
    assert steps.max() <= 2 * -(-layers // len(seen))


def test_what_some_layers_showed_corrects_all_of_them() -> None:
    plan, prefixes = _deep(80)
    probes = probes_of(plan, prefixes)
    found = corrections_of(plan, probes, [0.002 * len(probes[0]), 0.001, 0.321])
    assert found["expert_down"]["predicted_kl"] == pytest.approx(0.001 * 2 * PROBED_LAYERS)
    assert found["expert_down"]["correction"] == pytest.approx(2.0)
    assert found[TOGETHER]["predicted_kl"] == pytest.approx(0.321)


def test_each_role_is_corrected_by_its_own_measurement_and_by_the_whole() -> None:
    found = _corrections({"up": 0.01, "down": 0.02}, [0.02, 0.01, 0.015])
    assert found["up"]["correction"] == pytest.approx(2.0 * 0.5)
    assert found["down"]["correction"] == pytest.approx(0.5 * 0.5)
    assert found[TOGETHER] == pytest.approx({"predicted_kl": 0.03, "measured_kl": 0.015, "correction": 0.5})


def test_the_corrected_prediction_of_the_plan_is_what_was_measured() -> None:
    predicted = {"q": 0.003, "k": 0.004, "v": 0.005}
    found = _corrections(predicted, [0.004, 0.002, 0.009, 0.0111])
    assert sum(predicted[role] * found[role]["correction"] for role in predicted) == pytest.approx(0.0111)


def test_most_of_a_vocabularys_correction_is_that_of_the_other_roles() -> None:
    predicted = {"embedding": 0.01, "q": 0.01, "k": 0.03, "v": 0.01, "head": 0.01}
    found = _corrections(predicted, [0.005, 0.02, 0.03, 0.03, 0.08, 0.33])  # the whole: twice the sum
    usual = 0.08 / 0.05
    assert found["embedding"]["correction"] == pytest.approx(2 * 0.5**OWN_PROBE * usual ** (1 - OWN_PROBE))
    assert found["head"]["correction"] == pytest.approx(2 * 8.0**OWN_PROBE * usual ** (1 - OWN_PROBE))
    assert [found[role]["correction"] for role in "qkv"] == pytest.approx([4.0, 2.0, 6.0])
    alone = _corrections({"embedding": 0.01}, [0.02, 0.02])
    assert alone["embedding"]["correction"] == pytest.approx(2.0)


def test_what_removed_structures_cost_is_not_put_down_to_rounding() -> None:
    plan = _plan({"gate": 0.004, "down": 0.02})
    gone = Structure("down.weight", 1, (("gate.weight", 1),), 0.015)
    plan = Plan(plan.matrices, {}, 0, 0, 0.0, (gone,))
    found = corrections_of(plan, probes_of(plan, ()), [0.004, 0.005, 0.009])
    assert found["gate"]["correction"] == pytest.approx(1.0)
    assert found["down"]["predicted_kl"] == pytest.approx(0.005)
    assert found[TOGETHER]["correction"] == pytest.approx(1.0)


def _disturbed(monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A weight as the probe of the only matrix of the plan has it, all errors costing the same."""
    fisher = KroneckerFisher(torch.eye(weight.shape[1]), torch.eye(weight.shape[0]))
    monkeypatch.setattr(probing, "read_matrix", lambda model_map, matrix: weight)
    monkeypatch.setattr(probing, "fisher_of", lambda matrix, statistics: fisher)
    (matrix,) = (chosen.matrix for chosen in plan.matrices.values())
    nothing = cast(Any, None)
    noisy = probing.perturbation(nothing, nothing, plan, [matrix], L=16)(matrix.name, None)
    assert noisy is not None
    return noisy


def test_removed_rows_stay_as_they_are_in_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    matrix = WeightMatrix("gate.weight", None, "gate", 32, 64)
    chosen = MatrixPlan(matrix, np.array([4, 0], np.uint8), 0, 0, 0.0)
    alone = Plan({matrix.key: chosen}, {}, 0, 0, 0.0)
    assert not _disturbed(monkeypatch, weight, alone)[
        16:
    ].any()  # left out by the budget: what the probe measures
    gone = (Structure("down.weight", 1, ((matrix.key, 1),), 0.0),)
    noisy = _disturbed(monkeypatch, weight, Plan({matrix.key: chosen}, {}, 0, 0, 0.0, gone))
    assert torch.equal(noisy[16:], weight[16:]) and not torch.equal(noisy[:16], weight[:16])


def test_a_probe_disturbs_what_the_low_rank_part_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(64, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    weight = low + 0.1 * torch.randn(64, 128, generator=generator)
    matrix = WeightMatrix("q.weight", None, "q", 64, 128)
    bits = np.full(4, 4, np.uint8)
    errors = []
    for rank in (0, 16):
        plan = Plan({matrix.key: MatrixPlan(matrix, bits, rank, 0, 0.0)}, {}, 0, 0, 0.0)
        errors.append(float((_disturbed(monkeypatch, weight, plan) - weight).square().mean()))
    # Energies of 16 + 0.01 and of less than 0.01 of the rest.
    assert errors[1] < 1e-3 * errors[0]


def test_an_indexer_is_not_probed_and_loses_no_row() -> None:
    """Where the text is shorter than its reach it chooses every token: no error in it would show."""
    plan = _plan({"q": 0.01, "indexer": 0.02})
    probes = probes_of(plan, ())
    assert {matrix.role for probe in probes for matrix in probe} == {"q"}
    assert correction_of("indexer", corrections_of(plan, probes, [0.02, 0.02])) == pytest.approx(2.0)
    (indexer,) = (chosen.matrix for chosen in plan.matrices.values() if chosen.matrix.role == "indexer")
    assert 0 not in PassOptions((2, 4)).widths_for(indexer)


def test_corrections_keep_their_limits() -> None:
    found = _corrections({"up": 0.01, "down": 0.01}, [1.0, 1e-6, 0.1033])
    assert found["up"]["correction"] == pytest.approx(LIMITS[1])
    assert found["down"]["correction"] == pytest.approx(LIMITS[0])


def test_a_role_that_is_predicted_to_lose_nothing_stays_as_it_is() -> None:
    assert _corrections({"up": 0.0, "down": 0.01}, [0.0, 0.01, 0.01])["up"]["correction"] == 1.0


def test_multi_token_prediction_layers_are_not_probed_and_count_as_the_others_do() -> None:
    found = _corrections({"up": 0.01, "down": 0.01, "q": 0.01, "mtp": 0.0}, [0.02, 0.01, 0.04, 0.07])
    assert set(found) == {"up", "down", "q", TOGETHER}
    assert correction_of("up", found) == found["up"]["correction"] == pytest.approx(2.0)
    assert correction_of("mtp", found) == pytest.approx(7 / 3)
