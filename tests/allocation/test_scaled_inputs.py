"""Matrices with input scales: arms, plan, codes and probes agree; experts have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_in_statistics import known_statistics

from ciuic_cli.allocation.arms import ArmTable, PassOptions
from ciuic_cli.allocation.arms_file import arms_from_bytes, arms_to_bytes
from ciuic_cli.allocation.matrices import weight_matrices
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.allocation.planning import make_plan
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.allocation.probes import perturbation
from ciuic_cli.allocation.reachable import check_reachable
from ciuic_cli.allocation.row_chunks import read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.compression.encoding import encode_matrix
from ciuic_cli.errors import TargetError
from ciuic_cli.passes.feedback import OUTPUT_DAMPING, damp
from ciuic_cli.statistics.files import Statistics

OPTIONS = PassOptions((3,), L=12, prune="off", rank="off")


def _moment(cols: int) -> torch.Tensor:
    """A diagonal H that spans orders of magnitude."""
    draw = torch.randn(cols, generator=torch.Generator().manual_seed(cols)).mul(3).exp()
    return torch.diag(draw / draw.sum())


def _mapped(checkpoint: Path) -> tuple[ModelMap, Statistics]:
    model_map = map_model(open_checkpoint(checkpoint))
    return model_map, known_statistics(model_map, inputs=_moment)


@pytest.fixture(scope="module")
def dense(tiny_checkpoint: Callable[..., Path]) -> tuple[ModelMap, Statistics]:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    return _mapped(tiny_checkpoint("llama", **sizes))


@pytest.fixture(scope="module")
def tables(dense: tuple[ModelMap, Statistics]) -> list[ArmTable]:
    model_map, statistics = dense
    return [
        price_matrix(model_map, statistics, matrix, OPTIONS)
        for matrix in weight_matrices(model_map.parameters.values())
    ]


@pytest.fixture(scope="module")
def plan(dense: tuple[ModelMap, Statistics], tables: list[ArmTable]) -> Plan:
    return make_plan(dense[0], tables, dense[0].stored_numel, OPTIONS)


def test_every_large_enough_matrix_is_scaled(tables: list[ArmTable]) -> None:
    assert all(
        table.input_scale is not None and len(table.input_scale) == table.matrix.cols for table in tables
    )


def test_a_coded_matrix_has_the_planned_bytes_and_loss(
    dense: tuple[ModelMap, Statistics], plan: Plan
) -> None:
    model_map, statistics = dense
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        chosen = plan.matrices[name]
        packed = encode_matrix(model_map, statistics, plan, chosen.matrix)
        assert chosen.input_scale is not None and packed.header.input_scale is not None
        assert np.array_equal(packed.header.input_scale, chosen.input_scale)
        assert packed.nbytes == plan.blob_bytes[name]
        loss = _loss(statistics, chosen, decode_dense(packed) - read_matrix(model_map, chosen.matrix))
        assert loss == pytest.approx(chosen.predicted_kl, rel=0.15)


def test_a_probe_has_the_planned_loss(dense: tuple[ModelMap, Statistics], plan: Plan) -> None:
    model_map, statistics = dense
    chosen = plan.matrices["model.layers.0.self_attn.q_proj.weight"]
    noisy = perturbation(model_map, statistics, plan, [chosen.matrix], L=12)(chosen.matrix.name, None)
    assert noisy is not None
    loss = _loss(statistics, chosen, noisy - read_matrix(model_map, chosen.matrix))
    assert loss == pytest.approx(chosen.predicted_kl, rel=0.15)


def _loss(statistics: Statistics, chosen: MatrixPlan, error: torch.Tensor) -> float:
    """½ tr(Eᵀ G E H) as the passes predict it: with scaled columns, and H and G (here diagonal) damped."""
    h, g = statistics.input_moment(chosen.matrix.name), statistics.output_fisher(chosen.matrix.name)
    assert h is not None and g is not None and chosen.input_scale is not None
    factors = input_factors(chosen.input_scale)
    h = h * factors * factors[:, None]
    damp(h)
    error = error / factors
    return float(0.5 * (1 + OUTPUT_DAMPING) * ((g @ error @ h) * error).sum())


def test_the_journal_keeps_input_scales(tables: list[ArmTable]) -> None:
    loaded = arms_from_bytes(arms_to_bytes(tables[1]), tables[1].matrix, OPTIONS)
    assert tables[1].input_scale is not None and np.array_equal(loaded.input_scale, tables[1].input_scale)


def test_reachable_sizes_include_input_scales(
    dense: tuple[ModelMap, Statistics], tables: list[ArmTable]
) -> None:
    least = make_plan(
        dense[0], tables, 2 * dense[0].stored_numel, OPTIONS
    ).file_bytes  # only 3 bits are allowed
    scale_bytes = sum(table.matrix.cols for table in tables)
    check_reachable(dense[0], least + 64, OPTIONS)
    with pytest.raises(TargetError):
        check_reachable(dense[0], least - scale_bytes // 2, OPTIONS)


def test_input_scales_with_sorted_rows_and_a_low_rank_part(
    dense: tuple[ModelMap, Statistics], plan: Plan
) -> None:
    model_map, statistics = dense
    chosen = plan.matrices["model.layers.0.self_attn.q_proj.weight"]
    classes = np.arange(chosen.matrix.rows).astype(np.uint8) % 16
    modified = replace(chosen, rank=16, row_class=classes)
    changed = replace(plan, matrices={**plan.matrices, chosen.matrix.key: modified})
    packed = encode_matrix(model_map, statistics, changed, chosen.matrix)
    assert (
        packed.header.rank == 16
        and packed.header.row_class is not None
        and packed.header.input_scale is not None
    )
    weight = read_matrix(model_map, chosen.matrix)
    assert _loss(statistics, chosen, decode_dense(packed) - weight) < 1.25 * chosen.predicted_kl
    noisy = perturbation(model_map, statistics, changed, [chosen.matrix], L=12)(chosen.matrix.name, None)
    assert noisy is not None and _loss(statistics, chosen, noisy - weight) < 1.25 * chosen.predicted_kl


def test_experts_have_none(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map, statistics = _mapped(tiny_checkpoint("deepseek_v3"))
    for matrix in weight_matrices(model_map.parameters.values()):
        if matrix.expert is not None:
            assert price_matrix(model_map, statistics, matrix, OPTIONS).input_scale is None
