"""Windows: the best choice for the states, one window per module, predictions that follow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ciuic_cli.allocation.matrices import WeightMatrix
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, WINDOWS, nominal_window
from ciuic_cli.compression.windows import loss_at, with_windows

LOSSES = {
    "layers.0.self_attn.q_proj.weight": (64, {2.0: 0.01}),
    "layers.0.self_attn.o_proj.weight": (32, {4.0: 0.03, 6.0: 0.01}),
    "layers.0.mlp.down_proj.weight": (128, {3.0: 0.05}),
    "layers.1.mlp.down_proj.weight": (128, {5.0: 0.002}),
}
"""By parameter: rows, and KL by bits per weight."""


def _plan(role: str = "attention", base: int = 15) -> Plan:
    matrices = {}
    for name, (rows, losses) in LOSSES.items():
        matrix = WeightMatrix(name, None, role, rows, 32)
        bits = np.full(rows // 16, 4, np.uint8)
        matrices[matrix.key] = MatrixPlan(
            matrix, bits, 0, 0, sum(losses.values()), L=base, code_loss=dict(losses)
        )
    return Plan(matrices, {}, 0, 0, 0.0)


def _mean_states(plan: Plan) -> float:
    plans = plan.matrices.values()
    return sum(each.matrix.weights << each.L for each in plans) / sum(each.matrix.weights for each in plans)


@pytest.mark.parametrize("states", [1 << 12, 6000, 1 << 14, 1 << 15, 40_000, 1 << 16])
def test_no_other_choice_for_the_same_states_has_clearly_less_loss(states: int) -> None:
    """Compared with all choices of windows; a step that does not fit may be left over."""
    plan = with_windows(_plan(), states)
    assert _mean_states(plan) <= states
    modules = [("layers.0.self_attn",), ("layers.0.mlp",), ("layers.1.mlp",)]
    best = float("inf")
    for choice in itertools.product(WINDOWS, repeat=len(modules)):
        windows = dict(zip((name for (name,) in modules), choice, strict=True))
        used = loss = 0.0
        for name, (rows, losses) in LOSSES.items():
            L = windows[name.rsplit(".", 2)[0]]
            used += rows * 32 << L
            loss += sum(kl * MSE_BY_L[L][bits] / MSE_BY_L[15][bits] for bits, kl in losses.items())
        if used <= states * 32 * sum(rows for rows, _ in LOSSES.values()):
            best = min(best, loss)
    shortest = with_windows(_plan(), 1 << 12).predicted_kl
    assert best <= plan.predicted_kl + 1e-12
    assert shortest - plan.predicted_kl >= 0.85 * (shortest - best)


def test_a_module_has_one_window_and_the_most_loss_gets_the_longest() -> None:
    plan = with_windows(_plan(), 1 << 15)
    windows = {key: each.L for key, each in plan.matrices.items()}
    attention = {L for key, L in windows.items() if "self_attn" in key}
    assert len(attention) == 1
    assert windows["layers.0.mlp.down_proj.weight"] > windows["layers.1.mlp.down_proj.weight"]


def test_all_states_give_the_longest_window_and_the_fewest_the_shortest() -> None:
    for states, L in ((1 << 12, 12), (1 << 16, 16)):
        assert {each.L for each in with_windows(_plan(), states).matrices.values()} == {L}


def test_predictions_follow_the_windows() -> None:
    before, after = _plan(), with_windows(_plan(), 1 << 13)
    for key, each in after.matrices.items():
        start = before.matrices[key]
        assert each.predicted_kl == pytest.approx(sum(each.code_loss.values()))
        assert each.predicted_kl == pytest.approx(loss_at(start.code_loss, 15, each.L))
    assert after.predicted_kl > before.predicted_kl


def test_layers_whose_kl_is_not_predicted_have_the_nominal_window() -> None:
    plan = with_windows(_plan(role="mtp"), 20_000)
    assert {each.L for each in plan.matrices.values()} == {nominal_window(20_000)} == {14}
    assert plan.predicted_kl == pytest.approx(_plan().predicted_kl)
