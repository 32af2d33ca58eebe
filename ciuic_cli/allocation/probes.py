"""Probes: measured corrections of the predicted loss, by role of matrices. Two similar roles share a probe.

The curvature from a few thousand tokens can be wrong by a factor for a whole role: attention sinks inflate that of down
projections, saturated predictions deflate that of others. So before the budget is spent, a probe perturbs
a role's matrices with noise like the rounding error of a first plan. The ratio of measured to predicted KL multiplies
the role's predictions. A last probe perturbs all roles at once and corrects for the overlap of their losses."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, UNPROBED_ROLES, WeightMatrix, fisher_of
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.allocation.pool_factors import PoolFactors
from ciuic_cli.allocation.row_chunks import RowChunk, map_row_chunks, read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.transform import TILE, inverse_transform
from ciuic_cli.layerwise.overrides import Override
from ciuic_cli.passes import lowrank
from ciuic_cli.passes.feedback import RowFeedback
from ciuic_cli.passes.linear_algebra import solve_transposed
from ciuic_cli.passes.prepare import PreparedMatrix
from ciuic_cli.passes.scale import scaled
from ciuic_cli.profiling.account import measured, step
from ciuic_cli.statistics.files import Statistics

CORRECTION_LIMITS = (0.33, 10.0)
"""Least and largest correction: a few held-out sequences do not support more. The upper limit was measured
(docs/experiments/allocation/saturated-heads.md), the lower one chosen."""
EMBEDDING_PROBE_SHARE = 0.3
"""The correction of an embedding or head is a geometric mean of its probe's ratio, with this share, and the mean
correction of the other roles (measured: docs/experiments/allocation/embedding-share.md)."""
PROBED_WITH = {
    "k": "q",
    "v": "o",
    "up": "gate",
    "shared_expert_up": "shared_expert_gate",
    "expert_up": "expert_gate",
}
"""Roles that a probe perturbs together with another role, because their corrections hardly differ (measured:
docs/experiments/allocation/shared-probes.md)."""
ALL_ROLES = "together"
"""Key of the probe of all roles at once, in the corrections and in the report."""


def probe_matrices(plan: Plan, layers: Sequence[str], most: int) -> list[list[WeightMatrix]]:
    """The matrices that each probe perturbs: those of a role, or of two by PROBED_WITH, and finally all of these.

    A role's probe perturbs at most `most` of its layers, evenly spaced, and the last probe perturbs the same matrices.
    layers: name prefixes of all layers.
    """
    by_role = [_in_some_layers(matrices, layers, most) for matrices in _by_probe(plan).values()]
    return [*by_role, [matrix for matrices in by_role for matrix in matrices]]


def probe_of(role: str) -> str:
    """The name of the probe that perturbs the matrices of a role."""
    return PROBED_WITH.get(role, role)


def _by_probe(plan: Plan) -> dict[str, list[WeightMatrix]]:
    probes: dict[str, list[WeightMatrix]] = {}
    for matrix_plan in plan.matrices.values():
        if matrix_plan.matrix.role in UNPROBED_ROLES:
            continue
        probes.setdefault(probe_of(matrix_plan.matrix.role), []).append(matrix_plan.matrix)
    return probes


def _in_some_layers(matrices: Sequence[WeightMatrix], layers: Sequence[str], most: int) -> list[WeightMatrix]:
    """The matrices in at most `most` layers, and all matrices that are in no layer."""
    layer_of = {
        matrix.key: matrix.name[: len(prefix)]
        for prefix in layers
        for matrix in matrices
        if matrix.name.startswith(prefix)
    }
    present = list(dict.fromkeys(layer_of.values()))
    count = min(most, len(present))
    chosen = {present[(2 * number + 1) * len(present) // (2 * count)] for number in range(count)}
    return [matrix for matrix in matrices if matrix.key not in layer_of or layer_of[matrix.key] in chosen]


def perturbation(
    model_map: ModelMap,
    statistics: Statistics,
    plan: Plan,
    matrices: Iterable[WeightMatrix],
    *,
    L: int,
    pools: PoolFactors | None = None,
) -> Override:
    """An override that adds noise like the plan's rounding error to these matrices.

    pools: keeps factors from one matrix to the next, and says on which device to compute; None: on the CPU.

    Row groups of pruned structures keep their weights, because the loss of a structure is not part of a role's loss of
    rounding. Row groups that the budget pruned become zero. The noise of a row chunk depends only on its first row and
    on the key of its matrix.
    """
    chosen = {(matrix.name, matrix.expert): matrix for matrix in matrices}
    factors = pools or PoolFactors(statistics)

    def override(name: str, expert: int | None) -> torch.Tensor | None:
        matrix = chosen.get((name, expert))
        if matrix is None:
            return None
        with measured("probe", matrix.role):
            return perturbed(matrix)

    def perturbed(matrix: WeightMatrix) -> torch.Tensor:
        matrix_plan = plan.matrices[matrix.key]
        fisher = fisher_of(matrix, statistics).to(factors.device)
        weight = read_matrix(model_map, matrix).to(factors.device)
        weight, fisher = scaled(weight, fisher, matrix_plan.input_scale)
        factored = factors.inputs(matrix, fisher)
        structure_mask = plan.structure_masks.get(matrix.key)

        def add_noise(chunk: RowChunk) -> None:
            generator = torch.Generator().manual_seed(zlib.crc32(matrix.key.encode(), chunk.stored.start))
            prepared, product = chunk.prepared, weight.new_zeros(1)
            if matrix_plan.rank:
                importance = prepared.outputs.d_diagonal[: matrix.rows]
                left, right = lowrank.factor(chunk.weight, importance, matrix_plan.rank)
                product = left @ right
                prepared = prepared.with_weight(chunk.weight - product)
            with step("noise"):
                noisy = with_rounding_noise(prepared, matrix_plan.row_bits[chunk.groups], L, generator)
            noisy += product
            if structure_mask is not None:
                kept = torch.from_numpy(structure_mask[chunk.groups]).repeat_interleave(TILE)[: len(noisy)]
                kept = kept.to(noisy.device)
                noisy[kept] = chunk.weight[kept]
            weight[chunk.rows] = noisy  # no other chunk reads these rows

        row_class = matrix_plan.row_class
        for _ in map_row_chunks(
            add_noise, weight, fisher, matrix, row_class, factored=factored, pools=factors
        ):
            pass
        scale = matrix_plan.input_scale
        return weight if scale is None else weight.mul_(input_factors(scale).to(weight.device))

    return override


def with_rounding_noise(
    prepared: PreparedMatrix, row_bits: NDArray[np.uint8], L: int, generator: torch.Generator
) -> torch.Tensor:
    """The weight (rows, cols) plus Gaussian noise that has the code's variance and is fed back as in rounding.

    Rows of groups with 0 bits become zero.
    """
    error = MSE_BY_L[L]
    variance = torch.tensor(
        [error[bits] * 4.0**-bits if bits else 0.0 for bits in bits_of(row_bits).tolist()],
        device=prepared.weight.device,
    ).repeat_interleave(TILE)
    # Drawn on the CPU, so that a run on another device measures the same noise.
    noise = torch.randn(prepared.weight.shape, generator=generator).to(prepared.weight.device)
    noise *= (variance.sqrt() * prepared.rms)[:, None]
    if prepared.outputs.factor is not None:
        noise = solve_transposed(prepared.outputs.factor, noise)
    if prepared.row_feedback is not None:
        _feed_back_along_rows(noise, prepared.row_feedback)
    if prepared.inputs.factor is not None:
        noise = solve_transposed(prepared.inputs.factor, noise.T).T
    rounded = prepared.weight - noise
    rounded[torch.from_numpy(row_bits == 0).to(rounded.device).repeat_interleave(TILE)] = 0.0
    return inverse_transform(prepared.in_natural_order(rounded[: prepared.rows]), prepared.cols)


def _feed_back_along_rows(noise: torch.Tensor, feedback: RowFeedback) -> None:
    """Apply the row feedback to noise (m, n) in place, from the last block of 16 columns to the first."""
    accumulated = noise.new_zeros(len(noise), 1)  # error along each row's direction
    for begin in reversed(range(0, noise.shape[1], TILE)):
        block = noise[:, begin : begin + TILE]
        block -= feedback.pull[:, begin : begin + TILE] * accumulated
        accumulated += (block * feedback.direction[:, begin : begin + TILE]).sum(1, keepdim=True)


def probe_corrections(
    plan: Plan, probes: Sequence[Sequence[WeightMatrix]], measured: Sequence[float]
) -> dict[str, dict[str, float]]:
    """For each role and for ALL_ROLES: `predicted_kl` and `measured_kl` of its probe, and the `correction` to apply.

    Roles with one probe share its measured KL in proportion to their predicted KL, so that their corrections are equal.
    The correction of every role already contains that of ALL_ROLES. The latter is below 1 where losses overlap: the
    perturbations of several roles flip the same close decisions of a router.

    The correction of an embedding or head is mostly the mean of the other roles (EMBEDDING_PROBE_SHARE): its rows are
    single tokens, and the few held-out sequences contain few of them. So the sum of the corrected losses estimates the
    loss on other text, not on these sequences.

    Args:
        probes: the result of `probe_matrices`.
        measured: KL per token of each probe.
    """
    *by_role, all_at_once = measured
    corrections = {}
    for matrices, kl in zip(probes[:-1], by_role, strict=True):
        predicted: dict[str, float] = {}
        for matrix in matrices:
            predicted[matrix.role] = predicted.get(matrix.role, 0.0) + plan.rounding_kl[matrix.key]
        total = sum(predicted.values())
        for role, own in predicted.items():
            share = own / total if total > 0 else 1 / len(predicted)
            corrections[role] = _correction(own, kl * share)
    corrected = sum(
        plan.rounding_kl[matrix.key] * corrections[matrix.role]["correction"] for matrix in probes[-1]
    )
    overlap = _correction(corrected, all_at_once)
    for entry in corrections.values():
        entry["correction"] *= overlap["correction"]
    mean = _mean_correction(corrections)
    for role in corrections.keys() & EMBEDDING_ROLES:
        probe = corrections[role]["correction"]
        corrections[role]["correction"] = probe**EMBEDDING_PROBE_SHARE * mean ** (1 - EMBEDDING_PROBE_SHARE)
    return {**corrections, ALL_ROLES: overlap}


def role_correction(role: str, corrections: Mapping[str, Mapping[str, float]]) -> float:
    """The correction of a role; for a role that was not probed, the mean correction."""
    return corrections[role]["correction"] if role in corrections else _mean_correction(corrections)


def _mean_correction(corrections: Mapping[str, Mapping[str, float]]) -> float:
    """Mean of the corrections in proportion to predicted KL; embedding and head count only if there are no other
    roles."""
    # A list, because the rounding of the sum depends on the order.
    roles = [role for role in corrections if role != ALL_ROLES]
    others = [role for role in roles if role not in EMBEDDING_ROLES]
    entries = [corrections[role] for role in others or roles]
    predicted = [entry["predicted_kl"] for entry in entries]
    shares = predicted if sum(predicted) > 0 else None
    return float(np.average([entry["correction"] for entry in entries], weights=shares))


def _correction(predicted: float, measured: float) -> dict[str, float]:
    ratio = measured / predicted if predicted > 0 else 1.0
    correction = min(max(ratio, CORRECTION_LIMITS[0]), CORRECTION_LIMITS[1])
    return {"predicted_kl": predicted, "measured_kl": measured, "correction": correction}
