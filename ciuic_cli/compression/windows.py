"""Windows: how many trellis state bits L each matrix gets, so that the search spends its steps where they pay.

The search goes over 2^L states for every weight, and a longer window has a smaller error: L = 16 instead of 15 takes
twice the time and lowers the squared error by 1 to 3 %, more for more bits. Given the mean number of states per weight,
the longer windows go to the matrices with the most predicted KL per step. All decoders read any L; it stands in a
matrix's header. The matrices of one module, such as an attention or an expert stack, get the same L, so that one launch
of a GPU can multiply them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, WINDOWS, nominal_window


def with_windows(plan: Plan, states: int) -> Plan:
    """The plan with the windows of the least predicted KL whose mean number of states per weight is at most `states`.

    Matrices of multi-token-prediction layers, whose KL is not predicted, have the nominal window. Predicted KL follows
    the windows. states: at least 2^12, the number of the shortest windows.
    """
    modules: dict[str, list[MatrixPlan]] = {}
    for matrix_plan in plan.matrices.values():
        modules.setdefault(_module_of(matrix_plan.matrix.name), []).append(matrix_plan)
    chosen = {name: nominal_window(states) for name, members in modules.items() if _is_mtp(members)}
    steps: list[_Step] = []
    left = 0  # states that may still be given out
    for name, members in modules.items():
        weights = sum(member.matrix.weights for member in members)
        left += weights * (states - (1 << chosen.get(name, WINDOWS[0])))
        if name not in chosen:
            steps += _steps(name, weights, members)
            chosen[name] = WINDOWS[0]
    stopped: set[str] = set()
    for step in sorted(steps, key=lambda step: (-step.gain / step.states, step.module, step.L)):
        # A module's steps come in the order of L, because each gains less per state than the one before.
        if step.module in stopped or step.states > left:
            stopped.add(step.module)
            continue
        left -= step.states
        chosen[step.module] = step.L
    matrices = {
        key: _with_window(matrix_plan, chosen[_module_of(matrix_plan.matrix.name)])
        for key, matrix_plan in plan.matrices.items()
    }
    return replace(plan, matrices=matrices)


@dataclass(frozen=True)
class _Step:
    """A longer window L for a module: the predicted KL that it saves, and the states that it takes."""

    module: str
    L: int
    gain: float
    states: int


def _steps(name: str, weights: int, members: list[MatrixPlan]) -> list[_Step]:
    """The steps to longer windows, each with less gain per state than the one before. Windows that gain less than a
    longer one does from the same start are left out."""
    loss = {L: sum(loss_at(member.code_loss, member.L, L) for member in members) for L in WINDOWS}
    steps: list[_Step] = []
    at = WINDOWS[0]
    while longer := [L for L in WINDOWS if at < L and loss[L] < loss[at]]:
        best = max(longer, key=lambda L: ((loss[at] - loss[L]) / ((1 << L) - (1 << at)), -L))
        steps.append(_Step(name, best, loss[at] - loss[best], weights * ((1 << best) - (1 << at))))
        at = best
    return steps


def loss_at(code_loss: Mapping[float, float], L: int, other: int) -> float:
    """Predicted KL of a matrix's codes with windows of `other` bits, from that by bits per weight with windows of L."""
    return sum(loss * MSE_BY_L[other][bits] / MSE_BY_L[L][bits] for bits, loss in code_loss.items())


def _with_window(matrix_plan: MatrixPlan, L: int) -> MatrixPlan:
    before, after = matrix_plan.code_loss, {}
    for bits, loss in before.items():
        after[bits] = loss_at({bits: loss}, matrix_plan.L, L)
    change = sum(after.values()) - sum(before.values())
    counted = 0.0 if matrix_plan.matrix.role in MTP_ROLES else change
    return replace(matrix_plan, L=L, code_loss=after, predicted_kl=matrix_plan.predicted_kl + counted)


def _module_of(name: str) -> str:
    """The module that contains the parameter's module: "layers.3.self_attn" of "layers.3.self_attn.q_proj.weight"."""
    return name.removesuffix(".weight").rpartition(".")[0]


def _is_mtp(members: list[MatrixPlan]) -> bool:
    return any(member.matrix.role in MTP_ROLES for member in members)
