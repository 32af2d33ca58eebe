"""Experts with only diagonals beside their pool's moments share the pool's factors; all others share nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ciuic_cli.allocation import pool_factors
from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.matrices import fisher_of, weight_matrices
from ciuic_cli.allocation.pool_factors import PoolFactors
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.passes.feedback import factor_inputs, factor_outputs
from ciuic_cli.statistics import experts
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics


def _collected(model_map: ModelMap, folder: Path) -> Statistics:
    folder.mkdir()
    batches = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    return collect_statistics(
        model_map, batches, folder, device=torch.device("cpu"), seed=0,
        progress=lambda what, done, total: None,
    )  # fmt: skip


def test_a_stack_with_pooled_moments_is_factored_once(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_map = map_model(open_checkpoint(tiny_checkpoint("deepseek_v3")))
    full = _collected(model_map, tmp_path / "full")
    monkeypatch.setattr(experts, "FULL_MOMENTS_BYTES", 1000)
    pooled = _collected(model_map, tmp_path / "pooled")
    calls = {"share_inputs": 0, "share_outputs": 0}
    for name in calls:
        original = getattr(pool_factors, name)

        def counting(pool: torch.Tensor, name: str = name, original: Callable = original) -> object:
            calls[name] += 1
            return original(pool)

        monkeypatch.setattr(pool_factors, name, counting)
    matrices = [m for m in weight_matrices(model_map.parameters.values()) if m.expert is not None]
    stacks = {matrix.name for matrix in matrices}
    factors = PoolFactors(pooled)
    for matrix in matrices:
        table = price_matrix(model_map, pooled, matrix, PassOptions((2, 4), L=12), factors)
        own = price_matrix(model_map, pooled, matrix, PassOptions((2, 4), L=12), PoolFactors(full))
        # The pool's factors predict the expert's loss within a few percent of its own factors, hardly a smaller one.
        assert table.sensitivity.sum() == pytest.approx(own.sensitivity.sum(), rel=0.1)
        assert table.sensitivity.sum() >= own.sensitivity.sum() * (1 - 5e-3)
        assert table.row_sorted is None or matrix.role == "expert_gate_up"
    assert calls == {"share_inputs": len(stacks) // 2, "share_outputs": len(stacks)}
    matrix = next(m for m in matrices if m.role == "expert_gate_up")
    fisher = fisher_of(matrix, pooled)
    own_inputs = factor_inputs(fisher.inputs)
    predicted = factors.inputs(matrix, fisher)
    coding = PoolFactors(pooled, for_coding=True).inputs(matrix, fisher)  # overwrites H
    assert torch.equal(coding.ldl.d_diagonal, own_inputs.ldl.d_diagonal)
    assert not torch.equal(coding.ldl.d_diagonal, predicted.ldl.d_diagonal)
    outputs, own_outputs = factors.outputs(matrix, fisher), factor_outputs(fisher.outputs)
    torch.testing.assert_close(outputs.d_diagonal, own_outputs.d_diagonal, rtol=0.05, atol=0)
    assert not torch.equal(outputs.d_diagonal, own_outputs.d_diagonal)
    assert PoolFactors(full).shares_outputs(matrix) is False
