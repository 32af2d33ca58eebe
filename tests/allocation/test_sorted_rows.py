"""Matrices with sorted rows: arms, plan, codes and probes agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_in_statistics import known_statistics

from ciuic_cli.allocation.arms import ArmTable, PassOptions
from ciuic_cli.allocation.arms_file import arms_from_bytes, arms_to_bytes
from ciuic_cli.allocation.matrices import WeightMatrix, weight_matrices
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.allocation.planning import make_plan, with_sorted_rows
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.allocation.probes import perturbation
from ciuic_cli.allocation.row_chunks import read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.compression.encoding import encode_matrix
from ciuic_cli.compression.options import BITS
from ciuic_cli.statistics.files import Statistics

OPTIONS = PassOptions(BITS, L=12, prune="auto", rank="off")
WIDE = {"hidden_size": 96, "intermediate_size": 176, "head_dim": 24}


def _fisher(rows: int) -> torch.Tensor:
    """A diagonal G that spans orders of magnitude, in random order."""
    return torch.diag(torch.randn(rows, generator=torch.Generator().manual_seed(rows)).mul(2).exp())


@pytest.fixture(scope="module")
def model_map(tiny_checkpoint: Callable[..., Path]) -> ModelMap:
    return map_model(open_checkpoint(tiny_checkpoint("llama", **WIDE)))


@pytest.fixture(scope="module")
def statistics(model_map: ModelMap) -> Statistics:
    return known_statistics(model_map, outputs=_fisher)


@pytest.fixture(scope="module")
def natural(model_map: ModelMap, statistics: Statistics) -> list[ArmTable]:
    return [
        price_matrix(model_map, statistics, matrix, OPTIONS)
        for matrix in weight_matrices(model_map.parameters.values())
    ]


def _plan(model_map: ModelMap, tables: Sequence[ArmTable], ratio: float = 4.0) -> Plan:
    return make_plan(model_map, list(tables), int(2 * model_map.stored_numel / ratio), OPTIONS)


def test_sorting_lowers_the_loss_at_the_same_bytes(model_map: ModelMap, natural: list[ArmTable]) -> None:
    first = _plan(model_map, natural)
    plan = _plan(model_map, with_sorted_rows(natural, first))
    assert plan.file_bytes <= plan.budget == first.budget
    assert plan.predicted_kl < 0.75 * first.predicted_kl
    assert all(
        matrix.row_class is not None for matrix in plan.matrices.values() if matrix.matrix.role != "down"
    )


def test_a_coded_matrix_has_the_planned_bytes_and_decodes_in_natural_order(
    model_map: ModelMap, statistics: Statistics, natural: list[ArmTable]
) -> None:
    plan = _plan(model_map, with_sorted_rows(natural, _plan(model_map, natural)), 3.0)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        matrix = plan.matrices[name].matrix
        packed = encode_matrix(model_map, statistics, plan, matrix)
        assert packed.header.row_class is not None and packed.nbytes == plan.blob_bytes[name]
        weight, order = read_matrix(model_map, matrix), packed.header.order
        assert order is not None
        error = (decode_dense(packed) - weight).square().sum(1) / weight.square().sum(1)
        bits_of_row = dict(
            zip(order.tolist(), bits_of(packed.header.row_bits).repeat(16).tolist(), strict=False)
        )
        for row in range(matrix.rows):  # 4^-K times the code's constant; rows with 0 bits are zero
            bits = bits_of_row[row]
            assert float(error[row]) < (1.001 if bits == 0 else 3.5 * 4.0**-bits), (row, bits)


def test_a_probe_perturbs_in_natural_order(
    model_map: ModelMap, statistics: Statistics, natural: list[ArmTable]
) -> None:
    plan = _plan(model_map, with_sorted_rows(natural, _plan(model_map, natural)), 3.0)
    chosen = plan.matrices["model.layers.0.self_attn.q_proj.weight"]
    assert chosen.row_class is not None
    noisy = perturbation(model_map, statistics, plan, [chosen.matrix], L=12)(chosen.matrix.name, None)
    assert noisy is not None
    weight = read_matrix(model_map, chosen.matrix)
    error = ((noisy - weight).square().sum(1) / weight.square().sum(1)).numpy()
    stored = error[np.argsort(chosen.row_class, kind="stable")]
    means = [
        float(stored[group * 16 : group * 16 + 16].mean()) * 4.0**bits
        for group, bits in enumerate(bits_of(chosen.row_bits).tolist())
        if bits
    ]
    assert len(means) > 3 and min(means) > 0.5 and max(means) < 3.0


def test_matrices_with_pruned_channels_are_not_sorted(model_map: ModelMap, natural: list[ArmTable]) -> None:
    down = next(table for table in natural if table.matrix.role == "down")
    channels = np.full(11, 1e9)
    channels[2] = 0.0
    row_sorted = None if down.row_sorted is None else replace(down.row_sorted, channels=channels)
    changed = replace(down, channels=channels, row_sorted=row_sorted)
    natural = [changed if table is down else table for table in natural]
    layer = down.matrix.key.removesuffix("down_proj.weight")
    first = _plan(model_map, natural, 2.5)
    assert [(s.down, s.block) for s in first.pruned_structures] == [(down.matrix.key, 2)]
    plan = _plan(model_map, with_sorted_rows(natural, first), 2.5)
    assert [(s.down, s.block) for s in plan.pruned_structures] == [(down.matrix.key, 2)]
    for name, chosen in plan.matrices.items():
        if chosen.matrix.role in ("gate", "up"):
            assert (chosen.row_class is None) == name.startswith(layer), name
            if name.startswith(layer):
                assert chosen.row_bits[2] == 0


def test_the_journal_keeps_both_row_orders(natural: list[ArmTable]) -> None:
    tables = next(table for table in natural if table.row_sorted is not None)
    loaded = arms_from_bytes(arms_to_bytes(tables), tables.matrix, OPTIONS)
    assert loaded.row_class is None and loaded.row_sorted is not None and tables.row_sorted is not None
    assert np.array_equal(loaded.sensitivity, tables.sensitivity)
    assert np.array_equal(loaded.row_sorted.sensitivity, tables.row_sorted.sensitivity)
    assert loaded.row_sorted.row_class is not None and tables.row_sorted.row_class is not None
    assert np.array_equal(loaded.row_sorted.row_class, tables.row_sorted.row_class)
    unsorted = ArmTable(WeightMatrix("w", None, "q", 32, 32), (0, 2), 12, np.ones(2), np.ones(2))
    assert arms_from_bytes(arms_to_bytes(unsorted), unsorted.matrix, OPTIONS).row_sorted is None
