"""The prediction against measurement: noise like the code's, one role of matrices at a time.

Curvature from a few thousand tokens can be off by a factor for a whole kind of matrix (attention sinks inflate
down projections, saturated predictions deflate others). Before the budget is spent, every role is perturbed with
noise shaped as rounding would shape it, at the widths of a first plan; the measured KL over the predicted one
corrects that role's sensitivity. Then all roles are perturbed at once, for what their losses have in common.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, UNSEEN_ROLES, WeightMatrix, fisher_of
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.allocation.row_chunks import read_matrix, row_chunks
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import bits_of
from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.transform import inverse_transform
from ciuic_cli.layerwise.layer_stream import Override
from ciuic_cli.passes import lowrank
from ciuic_cli.passes.linear_algebra import solve_transposed
from ciuic_cli.passes.quantize import BLOCK, Prepared, RowFeedback
from ciuic_cli.passes.scale import scaled
from ciuic_cli.statistics.files import Statistics

LIMITS = (0.33, 10.0)
"""Corrections are kept between these: a handful of held-out sequences proves no more."""
OWN_PROBE = 0.3
"""Weight of a vocabulary's own probe, against what is usual of the other roles."""
TOGETHER = "together"
PROBED_LAYERS = 16
"""Layers in which a role's own probe disturbs it. The last probe disturbs all of them."""


def rounding_noise(
    prepared: Prepared, row_bits: NDArray[np.uint8], L: int, generator: torch.Generator
) -> torch.Tensor:
    """A stand-in for the rounded matrix: the weight (m, n) plus Gaussian noise with the code's error, fed back
    on both sides as rounding would feed it."""
    error = MSE_BY_L[L]
    variance = torch.tensor(
        [error[bits] * 4.0**-bits if bits else 0.0 for bits in bits_of(row_bits).tolist()]
    ).repeat_interleave(BLOCK)
    noise = torch.randn(prepared.weight.shape, generator=generator)
    noise *= (variance.sqrt() * prepared.rms)[:, None]
    if prepared.outputs.factor is not None:
        noise = solve_transposed(prepared.outputs.factor, noise)
    if prepared.own is not None:
        _undo_drift(noise, prepared.own)
    if prepared.inputs.factor is not None:
        noise = solve_transposed(prepared.inputs.factor, noise.T).T
    rounded = prepared.weight - noise
    rounded[torch.from_numpy(row_bits == 0).repeat_interleave(BLOCK)] = 0.0
    return inverse_transform(prepared.restored(rounded[: prepared.rows]), prepared.cols)


def _undo_drift(noise: torch.Tensor, own: RowFeedback) -> None:
    """Move the noise (m, n) as rounding moves its targets, block after block, the last one first; in place."""
    drift = torch.zeros(len(noise), 1)
    for begin in reversed(range(0, noise.shape[1], BLOCK)):
        block = noise[:, begin : begin + BLOCK]
        block -= own.pull[:, begin : begin + BLOCK] * drift
        drift += (block * own.direction[:, begin : begin + BLOCK]).sum(1, keepdim=True)


def probes_of(plan: Plan, layers: Sequence[str]) -> list[list[WeightMatrix]]:
    """The matrices that each probe disturbs: one role after the other, and at last all together.

    Of a role, those of at most PROBED_LAYERS layers, evenly spaced. layers: prefixes of all layers' names.
    """
    roles = _by_role(plan)
    return [
        *(_spread(matrices, layers) for matrices in roles.values()),
        [matrix for matrices in roles.values() for matrix in matrices],
    ]


def _spread(matrices: Sequence[WeightMatrix], layers: Sequence[str]) -> list[WeightMatrix]:
    """Those of some layers, and all that lie outside of layers."""
    found = {
        matrix.key: matrix.name[: len(prefix)]
        for prefix in layers
        for matrix in matrices
        if matrix.name.startswith(prefix)
    }
    present = list(dict.fromkeys(found.values()))
    count = min(PROBED_LAYERS, len(present))
    chosen = {present[(2 * number + 1) * len(present) // (2 * count)] for number in range(count)}
    return [matrix for matrix in matrices if found.get(matrix.key) is None or found[matrix.key] in chosen]


def perturbation(
    model_map: ModelMap, statistics: Statistics, plan: Plan, matrices: Iterable[WeightMatrix], *, L: int
) -> Override:
    """The weights of these matrices with noise like the code's at the plan's widths; removed structures stay as they
    are."""
    chosen = {(matrix.name, matrix.expert): matrix for matrix in matrices}

    def override(name: str, expert: int | None) -> torch.Tensor | None:
        matrix = chosen.get((name, expert))
        if matrix is None:
            return None
        arms = plan.matrices[matrix.key]
        fisher, weight = fisher_of(matrix, statistics), read_matrix(model_map, matrix)
        weight, fisher = scaled(weight, fisher, arms.input_scale)
        generator = torch.Generator().manual_seed(zlib.crc32(matrix.key.encode()))
        found, gone = torch.empty_like(weight), plan.gone.get(matrix.key)
        for chunk in row_chunks(weight, fisher, matrix, arms.row_class):
            prepared, exact = chunk.prepared, torch.zeros(1)
            if arms.rank:
                left, right = lowrank.factor(chunk.weight, prepared.outputs.noise[: matrix.rows], arms.rank)
                exact = left @ right
                prepared = prepared.with_weight(chunk.weight - exact)
            noisy = rounding_noise(prepared, arms.row_bits[chunk.groups], L, generator) + exact
            if gone is not None:
                kept = torch.from_numpy(gone[chunk.groups]).repeat_interleave(BLOCK)[: len(noisy)]
                noisy[kept] = chunk.weight[kept]
            found[chunk.rows] = noisy
        return found if arms.input_scale is None else found.mul_(input_factors(arms.input_scale))

    return override


def corrections_of(
    plan: Plan, probes: Sequence[Sequence[WeightMatrix]], measured: Sequence[float]
) -> dict[str, dict[str, float]]:
    """For each role: predicted and measured KL of the matrices that its probe disturbed, and the correction.

    The last entry, `TOGETHER`, is all roles at once: its correction (part of every role's already) is below 1 where
    their losses overlap, as where any disturbance at all tips the same close calls of a router.
    The correction of an embedding or head is mostly the usual one of the other roles (its own counts with exponent
    `OWN_PROBE`): its rows stand for single tokens, a few sequences show few of them, and other texts have others
    (measured: docs/experiments/allocation/embedding-share.md). So the corrected sum is the expected loss on other text,
    not the loss on these sequences.
    Matrices without statistics are left alone (`matrices.UNSEEN_ROLES`).

    Args:
        probes: as `probes_of` has them.
        measured: KL of each of them.
    """
    *single, whole = measured
    found = {}
    for matrices, value in zip(probes[:-1], single, strict=True):
        found[matrices[0].role] = _compared(sum(plan.rounding_kl[matrix.key] for matrix in matrices), value)
    corrected = sum(plan.rounding_kl[matrix.key] * found[matrix.role]["correction"] for matrix in probes[-1])
    together = _compared(corrected, whole)
    for entry in found.values():
        entry["correction"] *= together["correction"]
    usual = _usual(found)
    for role in found.keys() & EMBEDDING_ROLES:
        found[role]["correction"] = found[role]["correction"] ** OWN_PROBE * usual ** (1 - OWN_PROBE)
    return {**found, TOGETHER: together}


def _by_role(plan: Plan) -> dict[str, list[WeightMatrix]]:
    roles: dict[str, list[WeightMatrix]] = {}
    for unit_plan in plan.matrices.values():
        if unit_plan.matrix.role in UNSEEN_ROLES:
            continue
        roles.setdefault(unit_plan.matrix.role, []).append(unit_plan.matrix)
    return roles


def correction_of(role: str, corrections: Mapping[str, Mapping[str, float]]) -> float:
    """A role's correction; of one that was not probed, the usual one."""
    return corrections[role]["correction"] if role in corrections else _usual(corrections)


def _usual(corrections: Mapping[str, Mapping[str, float]]) -> float:
    """That of all roles in sum, vocabularies left out where there are others."""
    roles = corrections.keys() - {TOGETHER}
    found = [corrections[role] for role in roles - {*EMBEDDING_ROLES} or roles]
    predicted = [entry["predicted_kl"] for entry in found]
    weights = predicted if sum(predicted) > 0 else None
    return float(np.average([entry["correction"] for entry in found], weights=weights))


def _compared(predicted: float, measured: float) -> dict[str, float]:
    ratio = measured / predicted if predicted > 0 else 1.0
    correction = min(max(ratio, LIMITS[0]), LIMITS[1])
    return {"predicted_kl": predicted, "measured_kl": measured, "correction": correction}
