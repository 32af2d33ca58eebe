"""Matrices with their rows sorted: priced, planned, coded and probed as the blob will have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_in_statistics import known_statistics

from ciuic_cli.allocation.arms import Arms, PassOptions
from ciuic_cli.allocation.arms_file import arms_from_bytes, arms_to_bytes
from ciuic_cli.allocation.matrices import WeightMatrix, weight_matrices
from ciuic_cli.allocation.plan import Plan, make_plan, with_sorted_rows
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.allocation.probes import perturbation
from ciuic_cli.allocation.row_chunks import read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.packing import bits_of
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.compression.encoding import encode_matrix
from ciuic_cli.compression.options import BITS
from ciuic_cli.statistics.files import Statistics

OPTIONS = PassOptions(BITS, L=12, prune="auto", rank="off")
WIDE = {"hidden_size": 96, "intermediate_size": 176, "head_dim": 24}


def _importance(rows: int) -> torch.Tensor:
    """G by which rows differ in importance by orders of magnitude, in no order."""
    return torch.diag(torch.randn(rows, generator=torch.Generator().manual_seed(rows)).mul(2).exp())


@pytest.fixture(scope="module")
def model_map(tiny_checkpoint: Callable[..., Path]) -> ModelMap:
    return map_model(open_checkpoint(tiny_checkpoint("llama", **WIDE)))


@pytest.fixture(scope="module")
def statistics(model_map: ModelMap) -> Statistics:
    return known_statistics(model_map, outputs=_importance)


@pytest.fixture(scope="module")
def natural(model_map: ModelMap, statistics: Statistics) -> list[Arms]:
    return [
        price_matrix(model_map, statistics, matrix, OPTIONS)
        for matrix in weight_matrices(model_map.parameters.values())
    ]


def _plan(model_map: ModelMap, arms: Sequence[Arms], ratio: float = 4.0) -> Plan:
    return make_plan(model_map, list(arms), int(2 * model_map.stored_numel / ratio), OPTIONS)


def test_the_same_bytes_lose_less(model_map: ModelMap, natural: list[Arms]) -> None:
    first = _plan(model_map, natural)
    plan = _plan(model_map, with_sorted_rows(natural, first))
    assert plan.file_bytes <= plan.budget == first.budget
    assert plan.predicted_kl < 0.75 * first.predicted_kl
    assert all(
        matrix.row_class is not None for matrix in plan.matrices.values() if matrix.matrix.role != "down"
    )


def test_a_coded_matrix_has_the_planned_bytes_and_its_own_order(
    model_map: ModelMap, statistics: Statistics, natural: list[Arms]
) -> None:
    plan = _plan(model_map, with_sorted_rows(natural, _plan(model_map, natural)), 3.0)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        matrix = plan.matrices[name].matrix
        packed = encode_matrix(model_map, statistics, plan, matrix, L=12)
        assert packed.row_class is not None and packed.nbytes == plan.blob_bytes[name]
        weight, order = read_matrix(model_map, matrix), packed.order
        assert order is not None
        error = (decode_dense(packed) - weight).square().sum(1) / weight.square().sum(1)
        by_width = dict(zip(order.tolist(), bits_of(packed.row_bits).repeat(16).tolist(), strict=False))
        for row in range(matrix.rows):  # 4^-K, times the code's own constant; 0 bits leave nothing
            bits = by_width[row]
            assert float(error[row]) < (1.001 if bits == 0 else 3.5 * 4.0**-bits), (row, bits)


def test_noise_of_a_probe_is_in_the_matrix_own_order(
    model_map: ModelMap, statistics: Statistics, natural: list[Arms]
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


def test_channels_that_go_together_keep_their_order(model_map: ModelMap, natural: list[Arms]) -> None:
    down = next(arm for arm in natural if arm.matrix.role == "down")
    cheap = np.full(11, 1e9)
    cheap[2] = 0.0
    in_order = None if down.sorted is None else replace(down.sorted, channels=cheap)
    changed = replace(down, channels=cheap, sorted=in_order)
    natural = [changed if arm is down else arm for arm in natural]
    layer = down.matrix.key.removesuffix("down_proj.weight")
    first = _plan(model_map, natural, 2.5)
    assert [(s.down, s.block) for s in first.removed] == [(down.matrix.key, 2)]
    plan = _plan(model_map, with_sorted_rows(natural, first), 2.5)
    assert [(s.down, s.block) for s in plan.removed] == [(down.matrix.key, 2)]
    for name, chosen in plan.matrices.items():
        if chosen.matrix.role in ("gate", "up"):
            assert (chosen.row_class is None) == name.startswith(layer), name
            if name.startswith(layer):
                assert chosen.row_bits[2] == 0


def test_the_journal_keeps_both_ways(natural: list[Arms]) -> None:
    arms = next(arm for arm in natural if arm.sorted is not None)
    back = arms_from_bytes(arms_to_bytes(arms), arms.matrix, OPTIONS)
    assert back.row_class is None and back.sorted is not None and arms.sorted is not None
    assert np.array_equal(back.sensitivity, arms.sensitivity)
    assert np.array_equal(back.sorted.sensitivity, arms.sorted.sensitivity)
    assert back.sorted.row_class is not None and arms.sorted.row_class is not None
    assert np.array_equal(back.sorted.row_class, arms.sorted.row_class)
    alone = Arms(WeightMatrix("w", None, "q", 32, 32), (0, 2), 12, np.ones(2), np.ones(2))
    assert arms_from_bytes(arms_to_bytes(alone), alone.matrix, OPTIONS).sorted is None
