"""The memory report: what each component was, is, and is predicted to lose."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.packing import bits_of
from ciuic_cli.evaluation.estimates import Mean
from ciuic_cli.process.memory import peak_resident_bytes
from ciuic_cli.recovery.row_factors import Factors
from ciuic_cli.recovery.tuning import Result
from ciuic_cli.statistics.files import Statistics

TUNED_NORM = "norm: one number per channel, tuned once all else was rounded"
UNPREDICTED = (
    "They draft tokens ahead; the model's own predictions do not pass through them, so they are no part of the "
    "predicted KL, and they are coded without calibration."
)


def build_report(
    model_map: ModelMap,
    plan: Plan,
    statistics: Statistics,
    *,
    options: dict[str, Any],
    corrections: dict[str, dict[str, float]],
    singular: int,
    measured_kl: Mean | None,
    recovered: Result | None,
    held_out_tokens: int,
    started: float,
) -> dict[str, Any]:
    """The content of memory_report.json. Bytes are exact; KL is in nats per token.

    singular: how many matrices had a Hessian without full rank, which was damped; corrections: measured
    against predicted KL by role; measured_kl: of the finished codes on
    held_out_tokens of calibration text; recovered: None where no recovery was asked for; started: `time.monotonic()` at
    the beginning of the run.
    """
    original = 2 * model_map.stored_numel
    tuned = {} if recovered is None else recovered.factors
    rows = _components(model_map, plan, statistics, tuned)
    return {
        "parameters": model_map.stored_numel,
        "original_bytes": original,
        "source_file_bytes": model_map.checkpoint.source_bytes,
        "artifact_bytes": plan.file_bytes,
        "budget_bytes": plan.budget,
        "ratio": original / plan.file_bytes,
        "ratio_to_source_files": model_map.checkpoint.source_bytes / plan.file_bytes,
        "bits_per_weight": 8 * plan.file_bytes / model_map.stored_numel,
        "predicted_kl": plan.predicted_kl,
        "measured_kl": None if measured_kl is None else measured_kl.value,
        "measured_kl_stderr": None if measured_kl is None else measured_kl.stderr,
        "components": rows,
        "passes": _passes(plan) + ([] if recovered is None else [_recovery(recovered, model_map)]),
        "padding": _padding(plan),
        "statistics": {
            "tokens": statistics.total_tokens,
            "held_out_tokens": held_out_tokens,
            "experts_without_tokens": _untouched(plan, statistics),
            "singular_hessians": singular,
            "roles": corrections,
        },
        "warnings": list(model_map.warnings),
        "mtp": {**model_map.mtp.as_dict(), **_mtp_bytes(rows)},
        "dropped": [] if model_map.mtp.kept else model_map.mtp.sentences(),
        "kept": model_map.mtp.sentences() if model_map.mtp.kept else [],
        "options": options,
        "seconds": time.monotonic() - started,
        "peak_rss_bytes": peak_resident_bytes(),
    }


def _components(
    model_map: ModelMap, plan: Plan, statistics: Statistics, tuned: Factors
) -> list[dict[str, Any]]:
    by_name: dict[str, list[MatrixPlan]] = {}
    for matrix_plan in plan.matrices.values():
        by_name.setdefault(matrix_plan.matrix.name, []).append(matrix_plan)
    rows = []
    for parameter in model_map.parameters.values():
        if parameter.tied_to or parameter.buffer:
            continue
        base: dict[str, Any] = {
            "name": parameter.name,
            "role": parameter.role,
            "shape": list(parameter.shape),
        }
        base["parameters"] = parameter.numel
        if not parameter.compress:
            size = parameter.numel * model_map.stored_dtype(parameter.name).itemsize
            reason = TUNED_NORM if (parameter.name, None) in tuned else parameter.reason
            rows.append(
                {**base, "bytes": size, "bits": 8.0 * size / max(1, parameter.numel), "rank": 0, "pruned": 0.0,
                 "predicted_kl": 0.0, "dense": reason}
            )  # fmt: skip
            continue
        members = by_name[parameter.name]
        size = plan.blob_bytes[parameter.name]
        widths = bits_of(np.concatenate([member.row_bits for member in members]))
        row: dict[str, Any] = {
            **base, "bytes": size, "bits": 8.0 * size / parameter.numel,
            "widths": {f"{k:g}": int((widths == k).sum()) for k in np.unique(widths)},
            "rank": max(member.rank for member in members), "pruned": float((widths == 0).mean()),
            "predicted_kl": sum(member.predicted_kl for member in members),
        }  # fmt: skip
        if parameter.role in MTP_ROLES:
            row["unpredicted"] = UNPREDICTED
        if len(parameter.shape) == 3:
            row["experts"] = [
                {"bits": float(bits_of(member.row_bits).mean()), "pruned": member.is_zero,
                 "tokens": statistics.tokens(parameter.name, member.matrix.expert), "predicted_kl": member.predicted_kl}
                for member in members
            ]  # fmt: skip
        rows.append(row)
    return rows


def _mtp_bytes(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Weights and bytes of the multi-token-prediction layers in the artifact."""
    own = [row for row in rows if row["role"] in MTP_ROLES]
    return {key: sum(row[key] for row in own) for key in ("parameters", "bytes")}


def _passes(plan: Plan) -> list[dict[str, Any]]:
    matrices = plan.matrices.values()
    pruned = sum(int((u.row_bits == 0).sum()) * 16 * u.matrix.cols for u in matrices)
    ranked = [u for u in matrices if u.rank]
    coded = sum(int(bits_of(u.row_bits).sum() * 2 * u.matrix.padded_cols) for u in matrices)
    return [
        {"name": "prune", "weights": pruned, "structures": len(plan.pruned_structures), "bytes": 0},
        {"name": "lowrank", "matrices": len(ranked), "bytes": sum(u.lowrank_bytes for u in matrices)},
        {
            "name": "bits",
            "bytes": coded,
            "sorted_matrices": sum(u.row_class is not None for u in matrices),
            "scaled_matrices": sum(u.input_scale is not None for u in matrices),
            "predicted_kl": plan.predicted_kl,
        },
    ]


def _recovery(recovered: Result, model_map: ModelMap) -> dict[str, Any]:
    """Of the pass that tunes: what has factors now, and KL on held-out text before and after."""
    matrices = sum(model_map.parameters[name].compress for name, _ in recovered.factors)
    return {
        "name": "recovery", "bytes": 0, "steps": recovered.steps, "matrices": matrices,
        "norms": len(recovered.factors) - matrices, "kl_before": recovered.kl_before, "kl_after": recovered.kl_after,
    }  # fmt: skip


def _padding(plan: Plan) -> dict[str, int]:
    """Matrices that end inside a tile, their weights that are only padding, and the bytes of the codes of those."""
    matrices = weights = bits = 0
    for chosen in plan.matrices.values():
        matrix = chosen.matrix
        rows = np.full(matrix.groups, 16)
        rows[-1] -= 16 * matrix.groups - matrix.rows
        extra = 16 * matrix.padded_cols - rows * matrix.cols
        matrices += bool(extra.any())
        weights += int(extra.sum())
        bits += int((extra * bits_of(chosen.row_bits)).sum())
    return {"matrices": matrices, "weights": weights, "bytes": bits // 8}


def _untouched(plan: Plan, statistics: Statistics) -> int:
    matrices = [u.matrix for u in plan.matrices.values() if u.matrix.role not in MTP_ROLES]
    experts = [matrix for matrix in matrices if matrix.expert is not None]
    return sum(statistics.tokens(matrix.name, matrix.expert) == 0 for matrix in experts)
