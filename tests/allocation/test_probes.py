"""Probes: which matrices they perturb and how, and the corrections from given measurements."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from ciuic_cli.allocation import probes as probes_module
from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.matrices import WeightMatrix
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.allocation.probes import (
    ALL_ROLES,
    CORRECTION_LIMITS,
    EMBEDDING_PROBE_SHARE,
    probe_corrections,
    probe_matrices,
    role_correction,
)
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.prune import Structure

BITS = np.full(2, 4, np.uint8)
MOST = 16
"""Most layers that a probe perturbs."""


def _plan(predicted: dict[str, float]) -> Plan:
    matrices = {
        f"{role}.weight": MatrixPlan(WeightMatrix(f"{role}.weight", None, role, 32, 32), BITS, 0, 0, loss)
        for role, loss in predicted.items()
    }
    return Plan(matrices, {}, 0, 0, 0.0)


def _corrections(predicted: dict[str, float], measured: list[float]) -> dict[str, dict[str, float]]:
    plan = _plan(predicted)
    return probe_corrections(plan, probe_matrices(plan, (), MOST), measured)


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


@pytest.mark.parametrize("layers", [1, 3, MOST, MOST + 1, 80])
def test_a_role_is_perturbed_in_some_layers_and_all_roles_in_the_same(layers: int) -> None:
    plan, prefixes = _deep(layers)
    experts, head, everything = probe_matrices(plan, prefixes, MOST)
    assert [matrix.name for matrix in head] == ["lm_head.weight"]
    assert everything == [*experts, *head]
    perturbed = sorted({int(matrix.name.split(".")[2]) for matrix in experts})
    assert len(perturbed) == min(layers, MOST)
    assert len(experts) == 2 * len(perturbed)
    steps = np.diff([-1, *perturbed, layers])
    assert steps.max() <= 2 * -(-layers // len(perturbed))


def test_the_correction_from_some_layers_applies_to_all() -> None:
    plan, prefixes = _deep(80)
    probes = probe_matrices(plan, prefixes, MOST)
    corrections = probe_corrections(plan, probes, [0.002 * len(probes[0]), 0.001, 0.065])
    assert corrections["expert_down"]["predicted_kl"] == pytest.approx(0.001 * 2 * MOST)
    assert corrections["expert_down"]["correction"] == pytest.approx(2.0)
    assert corrections[ALL_ROLES]["predicted_kl"] == pytest.approx(0.065)


def test_each_role_is_corrected_by_its_probe_and_by_the_overlap() -> None:
    corrections = _corrections({"up": 0.01, "down": 0.02}, [0.02, 0.01, 0.015])
    assert corrections["up"]["correction"] == pytest.approx(2.0 * 0.5)
    assert corrections["down"]["correction"] == pytest.approx(0.5 * 0.5)
    assert corrections[ALL_ROLES] == pytest.approx(
        {"predicted_kl": 0.03, "measured_kl": 0.015, "correction": 0.5}
    )


def test_the_corrected_prediction_of_the_plan_equals_the_measured_kl() -> None:
    predicted = {"q": 0.003, "k": 0.004, "v": 0.005}
    corrections = _corrections(predicted, [0.006, 0.009, 0.0111])
    assert sum(predicted[role] * corrections[role]["correction"] for role in predicted) == pytest.approx(
        0.0111
    )


def test_similar_roles_share_a_probe() -> None:
    plan = _plan({"q": 0.003, "gate": 0.002, "k": 0.001, "up": 0.006, "down": 0.005})
    probes = probe_matrices(plan, (), MOST)
    assert [[matrix.role for matrix in matrices] for matrices in probes[:-1]] == [
        ["q", "k"],
        ["gate", "up"],
        ["down"],
    ]
    corrections = probe_corrections(plan, probes, [0.002, 0.016, 0.005, 0.023])
    assert corrections["q"] == pytest.approx(
        {"predicted_kl": 0.003, "measured_kl": 0.0015, "correction": 0.5}
    )
    assert corrections["k"] == pytest.approx(
        {"predicted_kl": 0.001, "measured_kl": 0.0005, "correction": 0.5}
    )
    assert corrections["up"]["correction"] == corrections["gate"]["correction"] == pytest.approx(2.0)
    alone = _corrections({"up": 0.0, "down": 0.01}, [0.0, 0.02, 0.02])
    assert alone["up"]["correction"] == pytest.approx(1.0) and alone["down"]["correction"] == pytest.approx(
        2.0
    )


def test_most_of_an_embeddings_correction_is_the_mean_of_the_other_roles() -> None:
    predicted = {"embedding": 0.01, "q": 0.01, "o": 0.03, "down": 0.01, "head": 0.01}
    measured = [0.005, 0.02, 0.03, 0.03, 0.08, 0.33]  # the last probe: twice the corrected sum
    corrections = _corrections(predicted, measured)
    mean = (0.08 / 0.05) ** (1 - EMBEDDING_PROBE_SHARE)
    assert corrections["embedding"]["correction"] == pytest.approx(2 * 0.5**EMBEDDING_PROBE_SHARE * mean)
    assert corrections["head"]["correction"] == pytest.approx(2 * 8.0**EMBEDDING_PROBE_SHARE * mean)
    assert [corrections[role]["correction"] for role in ("q", "o", "down")] == pytest.approx([4.0, 2.0, 6.0])
    alone = _corrections({"embedding": 0.01}, [0.02, 0.02])
    assert alone["embedding"]["correction"] == pytest.approx(2.0)


def test_the_loss_of_pruned_structures_does_not_count_as_rounding_loss() -> None:
    plan = _plan({"gate": 0.004, "down": 0.02})
    pruned = Structure("down.weight", 1, (("gate.weight", 1),), 0.015)
    plan = Plan(plan.matrices, {}, 0, 0, 0.0, (pruned,))
    corrections = probe_corrections(plan, probe_matrices(plan, (), MOST), [0.004, 0.005, 0.009])
    assert corrections["gate"]["correction"] == pytest.approx(1.0)
    assert corrections["down"]["predicted_kl"] == pytest.approx(0.005)
    assert corrections[ALL_ROLES]["correction"] == pytest.approx(1.0)


def _perturbed(monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The weight of the plan's only matrix as its probe perturbs it, with white inputs and outputs."""
    fisher = KroneckerFisher(torch.eye(weight.shape[1]), torch.eye(weight.shape[0]))
    monkeypatch.setattr(probes_module, "read_matrix", lambda model_map, matrix: weight.clone())
    monkeypatch.setattr(probes_module, "fisher_of", lambda matrix, statistics: fisher)
    (matrix,) = (matrix_plan.matrix for matrix_plan in plan.matrices.values())
    unused = cast(Any, None)
    noisy = probes_module.perturbation(unused, unused, plan, [matrix], L=16)(matrix.name, None)
    assert noisy is not None
    return noisy


def test_rows_of_pruned_structures_are_not_perturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    matrix = WeightMatrix("gate.weight", None, "gate", 32, 64)
    matrix_plan = MatrixPlan(matrix, np.array([4, 0], np.uint8), 0, 0, 0.0)
    unstructured = Plan({matrix.key: matrix_plan}, {}, 0, 0, 0.0)
    # Rows that the budget prunes are zero: the probe measures their loss.
    assert not _perturbed(monkeypatch, weight, unstructured)[16:].any()
    structures = (Structure("down.weight", 1, ((matrix.key, 1),), 0.0),)
    noisy = _perturbed(monkeypatch, weight, Plan({matrix.key: matrix_plan}, {}, 0, 0, 0.0, structures))
    assert torch.equal(noisy[16:], weight[16:]) and not torch.equal(noisy[:16], weight[:16])


def test_a_probe_perturbs_the_residual_of_the_low_rank_part(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(64, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    weight = low + 0.1 * torch.randn(64, 128, generator=generator)
    matrix = WeightMatrix("q.weight", None, "q", 64, 128)
    bits = np.full(4, 4, np.uint8)
    errors = []
    for rank in (0, 16):
        plan = Plan({matrix.key: MatrixPlan(matrix, bits, rank, 0, 0.0)}, {}, 0, 0, 0.0)
        errors.append(float((_perturbed(monkeypatch, weight, plan) - weight).square().mean()))
    # The energies are 16.01 for the matrix and less than 0.01 for the residual.
    assert errors[1] < 1e-3 * errors[0]


def test_an_indexer_is_neither_probed_nor_pruned() -> None:
    """In text shorter than its reach it chooses every token, so a probe would measure no error."""
    plan = _plan({"q": 0.01, "indexer": 0.02})
    probes = probe_matrices(plan, (), MOST)
    assert {matrix.role for probe in probes for matrix in probe} == {"q"}
    assert role_correction("indexer", probe_corrections(plan, probes, [0.02, 0.02])) == pytest.approx(2.0)
    (indexer,) = (p.matrix for p in plan.matrices.values() if p.matrix.role == "indexer")
    assert 0 not in PassOptions((2, 4)).bits_for(indexer)


def test_corrections_are_limited() -> None:
    corrections = _corrections({"up": 0.01, "down": 0.01}, [1.0, 1e-6, 0.1033])
    assert corrections["up"]["correction"] == pytest.approx(CORRECTION_LIMITS[1])
    assert corrections["down"]["correction"] == pytest.approx(CORRECTION_LIMITS[0])


def test_a_role_without_predicted_loss_is_not_corrected() -> None:
    assert _corrections({"up": 0.0, "down": 0.01}, [0.0, 0.01, 0.01])["up"]["correction"] == 1.0


def test_multi_token_prediction_layers_get_the_mean_correction() -> None:
    corrections = _corrections({"up": 0.01, "down": 0.01, "q": 0.01, "mtp": 0.0}, [0.02, 0.01, 0.04, 0.07])
    assert set(corrections) == {"up", "down", "q", ALL_ROLES}
    assert role_correction("up", corrections) == corrections["up"]["correction"] == pytest.approx(2.0)
    assert role_correction("mtp", corrections) == pytest.approx(7 / 3)


def test_the_mean_correction_does_not_depend_on_the_order_of_hashes() -> None:
    """A sum over a set of names would be rounded differently in every process."""
    values = np.random.default_rng(0).lognormal(0, 4, (2, 40)).tolist()
    corrections = {
        f"role{number}": {"predicted_kl": predicted, "measured_kl": 0.0, "correction": correction}
        for number, (predicted, correction) in enumerate(zip(*values, strict=True))
    }
    assert role_correction("mtp", corrections) == np.average(values[1], weights=values[0])
