"""Pricing, probes and coding compute on the device that they are told, and mix it with no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from random_moments import random_contexts
from second_device import DEVICE, OnDevice, SecondDevice
from stand_in_statistics import known_statistics

from ciuic_cli.allocation import pool_factors, pricing, probes
from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.matrices import WeightMatrix, weight_matrices
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.allocation.pool_factors import PoolFactors
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.bits import stored_bits
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.compression.encoding import encode_matrix
from ciuic_cli.kernels import fronts

OPTIONS = PassOptions((2, 4), L=12)


def _moment(size: int) -> torch.Tensor:
    samples = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(size))
    samples *= torch.linspace(0.2, 2.0, size)
    return samples.T @ samples / (3 * size)


def _search(targets: torch.Tensor, bits: float, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The native search for tensors of the stand-in device."""
    assert isinstance(targets, OnDevice)
    codes, decoded = fronts.native_search(targets.cpu(), bits, L)
    return codes.to(DEVICE), decoded.to(DEVICE)


def _plan(matrix: WeightMatrix, scaled: bool) -> Plan:
    bits = stored_bits(np.resize([2, 4, 0, 4], matrix.groups))
    codes = np.arange(matrix.cols, dtype=np.uint8) % 9 + 124 if scaled else None
    classes = np.arange(matrix.rows, dtype=np.uint8) % 3 if scaled else None
    rank = 16 if min(matrix.rows, matrix.cols) > 32 and not scaled else 0
    plan = MatrixPlan(matrix, bits, rank, 0, 0.1, row_class=classes, input_scale=codes, L=12)
    return Plan({matrix.key: plan}, {}, 0, 0, 0.0)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_matrix_gets_the_same_arms_noise_and_loss(
    tiny_checkpoint: Callable[..., Path], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_map = map_model(open_checkpoint(tiny_checkpoint("llama")))
    matrix = next(m for m in weight_matrices(model_map.parameters.values()) if m.role == "down")
    statistics = known_statistics(model_map, inputs=_moment, outputs=_moment)
    plan = _plan(matrix, scaled)
    found = []
    for device in (torch.device("cpu"), DEVICE):
        pools = PoolFactors(statistics, device)
        rounder = partial(
            fronts.round_matrix, search=fronts.native_search if device.type == "cpu" else _search
        )
        with SecondDevice():
            table = pricing.price_matrix(model_map, statistics, matrix, OPTIONS, pools)
            noise = probes.perturbation(model_map, statistics, plan, [matrix], L=12, pools=pools)
            noisy = noise(matrix.name, None)
            assert noisy is not None and noisy.device == device
            packed = encode_matrix(model_map, statistics, plan, matrix, pools=pools, rounder=rounder)
            found.append((table, noisy.cpu(), decode_dense(packed)))
    (table, noisy, decoded), (table_there, noisy_there, decoded_there) = found
    np.testing.assert_allclose(table_there.sensitivity, table.sensitivity, rtol=1e-4)
    np.testing.assert_allclose(table_there.pruning_loss, table.pruning_loss, rtol=1e-4)
    np.testing.assert_allclose(table_there.channels, table.channels, rtol=1e-3)
    assert (table_there.input_scale is None) == (table.input_scale is None)
    torch.testing.assert_close(noisy_there, noisy, rtol=1e-3, atol=1e-4)
    weight = model_map.read(matrix.name).float()
    errors = [float((each - weight).square().mean()) for each in (decoded_there, decoded)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


def test_an_embedding_is_coded_in_row_chunks_there(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ciuic_cli.allocation.matrices.chunk_rows", lambda cols: 96)
    model_map = map_model(open_checkpoint(tiny_checkpoint("llama")))
    matrix = next(m for m in weight_matrices(model_map.parameters.values()) if m.role == "head")
    statistics = known_statistics(
        model_map, inputs=_moment, outputs=lambda rows: torch.linspace(1.0, 2.0, rows)
    )
    contexts = random_contexts(matrix.rows, matrix.cols, 0.1)
    monkeypatch.setattr(statistics, "contexts", lambda name: contexts.vectors, raising=False)
    plan = Plan(
        {matrix.key: MatrixPlan(matrix, np.full(matrix.groups, 4, np.uint8), 0, 0, 0.1, L=12)}, {}, 0, 0, 0.0
    )
    decoded = []
    for device, search in ((torch.device("cpu"), fronts.native_search), (DEVICE, _search)):
        with SecondDevice():
            packed = encode_matrix(
                model_map, statistics, plan, matrix, pools=PoolFactors(statistics, device),
                rounder=partial(fronts.round_matrix, search=search),
            )  # fmt: skip
            decoded.append(decode_dense(packed))
    weight = model_map.read(matrix.name).float()
    errors = [float((each - weight).square().mean()) for each in decoded]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def test_pools_are_factored_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared factors of experts, on the device of the phase."""
    for share, kind in ((pool_factors.share_inputs, "inputs"), (pool_factors.share_outputs, "outputs")):
        pool, ratios = _moment(48), torch.linspace(0.8, 1.2, 48)
        moment = ratios[:, None] * pool * ratios
        results = []
        for device in (torch.device("cpu"), DEVICE):
            with SecondDevice():
                shared = share(pool.to(device))
                assert shared is not None
                arguments = (moment,) if kind == "inputs" else (ratios, moment)
                made = shared.of(*(each.to(device) for each in arguments))
                ldl = made.ldl if kind == "inputs" else made
                assert ldl.d_diagonal.device == device
                results.append(ldl.d_diagonal.cpu())
        torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=0)
