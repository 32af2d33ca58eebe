"""Builds the memory report at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.checkpoint.mtp import PredictionLayers
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.evaluation.estimates import Mean
from ciuic_cli.process.memory import peak_resident_bytes
from ciuic_cli.recovery.row_factors import Factors
from ciuic_cli.recovery.tuning import RecoveryResult
from ciuic_cli.report.model_card import name_of
from ciuic_cli.report.schema import (
    BitsPass,
    ComponentReport,
    ExpertReport,
    ForecastReport,
    LowRankPass,
    MemoryReport,
    MtpLayerReport,
    MtpReport,
    PaddingReport,
    Pass,
    PrunePass,
    RecoveryPass,
    RoleReport,
    StatisticsReport,
)
from ciuic_cli.statistics.files import Statistics

TUNED_NORM = "norm: one number per channel, tuned by recovery"
UNPREDICTED = (
    "These layers draft tokens ahead. The model's own predictions do not depend on them, so they have no predicted KL, "
    "and they are coded without calibration."
)


def build_report(
    model_map: ModelMap,
    plan: Plan,
    statistics: Statistics,
    *,
    options: dict[str, Any],
    corrections: Mapping[str, Mapping[str, float]],
    singular: int,
    measured_kl: Mean | None,
    recovered: RecoveryResult | None,
    coded_on: Mapping[str, int],
    held_out_tokens: int,
    vocabulary_seen: float,
    started: float,
    forecast: ForecastReport | None,
) -> MemoryReport:
    """The memory report of a finished run, or of a plan.

    Args:
        options: as settled for this model.
        corrections: by role, "predicted_kl", "measured_kl" and "correction" of the probes.
        singular: number of matrices whose Hessian had not full rank and was damped.
        measured_kl: KL of the finished codes on held_out_tokens of calibration text; None if not measured.
        recovered: None if the run has no recovery.
        coded_on: number of matrices by the machine that coded them; empty in a plan.
        vocabulary_seen: share of the vocabulary that occurs in the calibration tokens.
        started: `time.monotonic()` at the beginning of the run.
        forecast: of the run; None: it was continued.
    """
    original_bytes = 2 * model_map.stored_numel
    source_bytes = model_map.checkpoint.source_bytes
    factors = {} if recovered is None else recovered.factors
    components = _components(model_map, plan, statistics, factors)
    mtp = model_map.mtp
    return MemoryReport(
        parameters=model_map.stored_numel,
        original_bytes=original_bytes,
        source_file_bytes=source_bytes,
        artifact_bytes=plan.file_bytes,
        budget_bytes=plan.budget,
        ratio=original_bytes / plan.file_bytes,
        ratio_to_source_files=source_bytes / plan.file_bytes,
        bits_per_weight=8 * plan.file_bytes / model_map.stored_numel,
        predicted_kl=plan.predicted_kl,
        measured_kl=None if measured_kl is None else measured_kl.value,
        measured_kl_stderr=None if measured_kl is None else measured_kl.stderr,
        components=components,
        passes=_passes(plan, recovered, model_map),
        padding=_padding(plan),
        statistics=StatisticsReport(
            tokens=statistics.total_tokens,
            held_out_tokens=held_out_tokens,
            vocabulary_seen=vocabulary_seen,
            experts_without_tokens=_experts_without_tokens(plan, statistics),
            singular_hessians=singular,
            roles={role: RoleReport(**numbers) for role, numbers in corrections.items()},
        ),
        warnings=tuple(model_map.warnings),
        mtp=_mtp(mtp, components),
        dropped=() if mtp.kept else tuple(mtp.sentences()),
        kept=tuple(mtp.sentences()) if mtp.kept else (),
        options=options,
        coded_on=dict(coded_on) or None,
        seconds=time.monotonic() - started,
        forecast=forecast,
        peak_rss_bytes=peak_resident_bytes(),
        model=name_of(model_map.checkpoint.folder),
        date=datetime.now(UTC).date().isoformat(),
    )


def _components(
    model_map: ModelMap, plan: Plan, statistics: Statistics, factors: Factors
) -> tuple[ComponentReport, ...]:
    plans: dict[str, list[MatrixPlan]] = {}
    for matrix_plan in plan.matrices.values():
        plans.setdefault(matrix_plan.matrix.name, []).append(matrix_plan)
    components = []
    for parameter in model_map.parameters.values():
        if parameter.tied_to or parameter.buffer:
            continue
        if parameter.compress:
            nbytes = plan.blob_bytes[parameter.name]
            components.append(_compressed(parameter, nbytes, plans[parameter.name], statistics))
        else:
            nbytes = parameter.numel * model_map.stored_dtype(parameter.name).itemsize
            reason = TUNED_NORM if (parameter.name, None) in factors else parameter.reason
            components.append(_dense(parameter, nbytes, reason))
    return tuple(components)


def _dense(parameter: Parameter, nbytes: int, reason: str) -> ComponentReport:
    return ComponentReport(
        name=parameter.name,
        role=parameter.role,
        shape=tuple(parameter.shape),
        parameters=parameter.numel,
        bytes=nbytes,
        bits=8.0 * nbytes / max(1, parameter.numel),
        rank=0,
        pruned=0.0,
        predicted_kl=0.0,
        dense=reason,
    )


def _compressed(
    parameter: Parameter, nbytes: int, plans: Sequence[MatrixPlan], statistics: Statistics
) -> ComponentReport:
    """plans: of the parameter's matrix, or of each expert of its stack."""
    group_bits = bits_of(np.concatenate([plan.row_bits for plan in plans]))
    experts = None
    if len(parameter.shape) == 3:
        experts = tuple(
            ExpertReport(
                bits=float(bits_of(plan.row_bits).mean()),
                pruned=plan.is_zero,
                tokens=statistics.tokens(parameter.name, plan.matrix.expert),
                predicted_kl=plan.predicted_kl,
            )
            for plan in plans
        )
    return ComponentReport(
        name=parameter.name,
        role=parameter.role,
        shape=tuple(parameter.shape),
        parameters=parameter.numel,
        bytes=nbytes,
        bits=8.0 * nbytes / parameter.numel,
        widths={f"{bits:g}": int((group_bits == bits).sum()) for bits in np.unique(group_bits)},
        rank=max(plan.rank for plan in plans),
        pruned=float((group_bits == 0).mean()),
        predicted_kl=sum(plan.predicted_kl for plan in plans),
        unpredicted=UNPREDICTED if parameter.role in MTP_ROLES else None,
        experts=experts,
    )


def _mtp(layers: PredictionLayers, components: Sequence[ComponentReport]) -> MtpReport:
    stored = [component for component in components if component.role in MTP_ROLES]
    return MtpReport(
        kept=layers.kept,
        layers=tuple(
            MtpLayerReport(name=layer.name, tensors=layer.tensors, bytes=layer.nbytes)
            for layer in layers.layers
        ),
        stored_tensors=layers.stored,
        shared=dict(layers.shared),
        parameters=sum(component.parameters for component in stored),
        bytes=sum(component.bytes for component in stored),
    )


def _passes(plan: Plan, recovered: RecoveryResult | None, model_map: ModelMap) -> tuple[Pass, ...]:
    plans = plan.matrices.values()
    pruned = sum(int((chosen.row_bits == 0).sum()) * 16 * chosen.matrix.cols for chosen in plans)
    coded = sum(int(bits_of(chosen.row_bits).sum() * 2 * chosen.matrix.padded_cols) for chosen in plans)
    passes: list[Pass] = [
        PrunePass(weights=pruned, structures=len(plan.pruned_structures), bytes=0),
        LowRankPass(
            matrices=sum(chosen.rank > 0 for chosen in plans),
            bytes=sum(chosen.lowrank_bytes for chosen in plans),
        ),
        BitsPass(
            bytes=coded,
            sorted_matrices=sum(chosen.row_class is not None for chosen in plans),
            scaled_matrices=sum(chosen.input_scale is not None for chosen in plans),
            predicted_kl=plan.predicted_kl,
        ),
    ]
    if recovered is not None:
        matrices = sum(model_map.parameters[name].compress for name, _ in recovered.factors)
        passes.append(
            RecoveryPass(
                bytes=0,
                steps=recovered.steps,
                matrices=matrices,
                norms=len(recovered.factors) - matrices,
                kl_before=recovered.kl_before,
                kl_after=recovered.kl_after,
            )
        )
    return tuple(passes)


def _padding(plan: Plan) -> PaddingReport:
    """Padding of matrices that end inside a tile of 16 x 16."""
    matrices = weights = bits = 0
    for matrix_plan in plan.matrices.values():
        matrix = matrix_plan.matrix
        rows = np.full(matrix.groups, 16)
        rows[-1] -= 16 * matrix.groups - matrix.rows
        padded = 16 * matrix.padded_cols - rows * matrix.cols  # weights per row group that are only padding
        matrices += bool(padded.any())
        weights += int(padded.sum())
        bits += int((padded * bits_of(matrix_plan.row_bits)).sum())
    return PaddingReport(matrices=matrices, weights=weights, bytes=bits // 8)


def _experts_without_tokens(plan: Plan, statistics: Statistics) -> int:
    """Number of expert matrices that no calibration token was routed to; those of MTP layers do not count."""
    matrices = [matrix_plan.matrix for matrix_plan in plan.matrices.values()]
    return sum(
        statistics.tokens(matrix.name, matrix.expert) == 0
        for matrix in matrices
        if matrix.expert is not None and matrix.role not in MTP_ROLES
    )
