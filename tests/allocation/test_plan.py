"""From arms to the plan: exact bytes, use of the budget, and each kind of arm chosen where it pays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from ciuic_cli.allocation import artifact_size
from ciuic_cli.allocation.arms import ArmTable, PassOptions, prunable_structures, rescale_uncovered
from ciuic_cli.allocation.artifact_size import shards_of
from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, WeightMatrix, weight_matrices
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.allocation.planning import make_plan
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.allocation.reachable import largest_bytes
from ciuic_cli.artifact.layout import lay_out
from ciuic_cli.artifact.reader import read_blobs
from ciuic_cli.artifact.writer import write_shards
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.compression.options import BITS
from ciuic_cli.passes.lowrank import LowRankPart, factor_bytes
from ciuic_cli.statistics.files import EmbeddingUse, Statistics

MEDIUM = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 48}
"""Sizes of a "llama" of 1.6 million weights: a thousandth of its budget is a few bits of a row group."""


def _map(folder: Path) -> ModelMap:
    return map_model(open_checkpoint(folder))


def _arms(model_map: ModelMap, options: PassOptions, seed: int = 0) -> list[ArmTable]:
    """Arms whose sensitivities span orders of magnitude, as real ones do."""
    rng = np.random.default_rng(seed)
    made = []
    for matrix in weight_matrices(model_map.parameters.values()):
        sensitivity = rng.lognormal(0, 2, matrix.groups)
        made.append(ArmTable(matrix, options.bits_for(matrix), options.L, sensitivity, sensitivity.copy()))
    return made


def _budget(model_map: ModelMap, ratio: float) -> int:
    return int(2 * model_map.stored_numel / ratio)


def _packed(matrix: WeightMatrix, row_bits: np.ndarray, rank: int = 0) -> PackedMatrix:
    """A matrix of random codes with the bits per weight and the rank of the plan."""
    return random_matrix(matrix.rows, matrix.cols, bits_of(row_bits).tolist(), rank=rank)


def _write(model_map: ModelMap, plan: Plan, folder: Path) -> list[Path]:
    parts: dict[str, list[PackedMatrix]] = {}
    for matrix_plan in plan.matrices.values():
        packed = _packed(matrix_plan.matrix, matrix_plan.row_bits, matrix_plan.rank)
        parts.setdefault(matrix_plan.matrix.name, []).append(packed)

    def payload(name: str) -> bytes:
        if name not in parts:
            value = model_map.read(name).to(model_map.stored_dtype(name)).contiguous()
            return value.reshape(-1).view(torch.uint8).numpy().tobytes()
        if len(model_map.parameters[name].shape) == 3:
            return ExpertStack(tuple(parts[name])).to_bytes()
        return parts[name][0].to_bytes()

    folder.mkdir()
    shards = shards_of(model_map, plan.blob_bytes)
    write_shards(shards, folder, payload, lambda nbytes: None)
    return [folder / shard.file for shard in shards]


@pytest.mark.parametrize("ratio", [2.5, 4.0, 6.0])
@pytest.mark.parametrize("prune", ["off", "auto"])
def test_the_budget_is_kept_and_spent_to_a_thousandth(
    tiny_checkpoint: Callable[..., Path], ratio: float, prune: str
) -> None:
    model_map = _map(tiny_checkpoint("llama", **MEDIUM))
    options = PassOptions(BITS, prune=prune)
    budget = _budget(model_map, ratio)
    plan = make_plan(model_map, _arms(model_map, options), budget, options)
    assert 0.999 * budget <= plan.file_bytes <= budget
    assert plan.budget == budget


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "mixtral", "deepseek_v2", "deepseek_v3"])
def test_planned_bytes_equal_written_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    model_map = _map(tiny_checkpoint(family))
    options = PassOptions(BITS, prune="auto", rank="auto")
    tables = _arms(model_map, options)
    for index, table in enumerate(tables):  # a low-rank part that leaves nothing, wherever one fits
        if min(table.matrix.rows, table.matrix.cols) > 16 and table.matrix.role not in EMBEDDING_ROLES:
            nbytes = factor_bytes(table.matrix.rows, table.matrix.cols, 16)
            part = LowRankPart(16, nbytes, np.full(table.matrix.groups, 1e-9))
            tables[index] = replace(table, lowrank=[part])
    budget = _budget(model_map, 2.2)
    plan = make_plan(model_map, tables, budget, options)
    assert plan.file_bytes <= budget
    assert any(matrix.rank for matrix in plan.matrices.values())
    files = _write(model_map, plan, tmp_path / "out")
    assert sum(file.stat().st_size for file in files) == plan.file_bytes
    opened = read_blobs(files)
    for name, nbytes in plan.blob_bytes.items():
        assert opened.blobs[name].shape == model_map.parameters[name].shape
        assert opened.tensors[name].nbytes == nbytes
    stored = {name for name, p in model_map.parameters.items() if p.tied_to is None}
    assert set(opened.tensors) == stored


@pytest.mark.parametrize("shard_bytes", [20_000, 33_000])
def test_the_budget_includes_the_headers_of_all_shards(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(artifact_size, "lay_out", functools.partial(lay_out, shard_bytes=shard_bytes))
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS)
    budget = _budget(model_map, 2.0)
    plan = make_plan(model_map, _arms(model_map, options), budget, options)
    files = _write(model_map, plan, tmp_path / "out")
    assert len(files) > 1
    assert sum(file.stat().st_size for file in files) == plan.file_bytes <= budget


def test_embedding_rows_are_never_pruned(tiny_checkpoint: Callable[..., Path]) -> None:
    """Rows of predicted loss 0 keep the least bits."""
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS, prune="auto")
    tables = _arms(model_map, options)
    for table in tables:
        if table.matrix.role in EMBEDDING_ROLES:
            table.sensitivity[:] = table.pruning_loss[:] = 0.0
            assert 0 not in table.bits
        else:
            assert 0 in table.bits
    plan = make_plan(model_map, tables, _budget(model_map, 4.0), options)
    row_bits = {p.matrix.role: p.row_bits for p in plan.matrices.values()}
    assert (row_bits["embedding"] == 2).all()
    assert (row_bits["head"] == 2).all()


def test_embedding_and_head_have_at_least_two_bits_unless_only_fewer_are_allowed(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    for bits, least in ((BITS, 2), ((1, 4), 4), ((1,), 1)):
        options = PassOptions(bits, prune="off", rank="off")
        fewest = {
            matrix.role: min(options.bits_for(matrix))
            for matrix in weight_matrices(model_map.parameters.values())
        }
        assert fewest["embedding"] == fewest["head"] == least and fewest["gate"] == 1


def test_row_groups_without_loss_are_pruned_unless_forbidden(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    for prune, expected in (("auto", 0), ("off", 1)):
        options = PassOptions(BITS, prune=prune)
        tables = _arms(model_map, options)
        tables[3].sensitivity[1] = tables[3].pruning_loss[1] = 0.0
        plan = make_plan(model_map, tables, _budget(model_map, 3.0), options)
        assert plan.matrices[tables[3].matrix.key].row_bits[1] == expected


class _WhiteStatistics:
    """White inputs and outputs: all weights have the same Fisher information."""

    def __init__(self, model_map: ModelMap) -> None:
        self.shapes = {name: p.shape for name, p in model_map.parameters.items()}

    def covers(self, name: str) -> bool:
        return True

    def tokens(self, name: str, expert: int | None = None) -> int:
        return 1 << 20

    def input_moment(self, name: str, expert: int | None) -> torch.Tensor:
        return torch.eye(self.shapes[name][-1]) / self.shapes[name][-1]

    def output_fisher(self, name: str, expert: int | None) -> torch.Tensor:
        return torch.ones(self.shapes[name][-2])

    def contexts(self, name: str) -> None:
        return None

    def embedding_use(self, name: str) -> EmbeddingUse | None:
        return None


def test_a_low_rank_part_is_chosen_for_a_nearly_low_rank_matrix(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_map = _map(tiny_checkpoint("llama", **{**MEDIUM, "num_hidden_layers": 1}))
    target = "model.layers.0.self_attn.q_proj.weight"
    generator = torch.Generator().manual_seed(0)
    nearly_low_rank = torch.randn(192, 16, generator=generator) @ torch.randn(16, 192, generator=generator)
    nearly_low_rank += 0.02 * torch.randn(192, 192, generator=generator)
    read = ModelMap.read

    def with_low_rank(self: ModelMap, name: str) -> torch.Tensor:
        return nearly_low_rank if name == target else read(self, name)

    monkeypatch.setattr(ModelMap, "read", with_low_rank)
    statistics = cast(Statistics, _WhiteStatistics(model_map))
    budget = _budget(model_map, 4.0)
    plans = {}
    for rank in ("auto", "off", 32):
        options = PassOptions(BITS, L=12, prune="off", rank=rank)
        tables = [
            price_matrix(model_map, statistics, matrix, options)
            for matrix in weight_matrices(model_map.parameters.values())
        ]
        plans[rank] = make_plan(model_map, tables, budget, options)
    ranks = {key: plan.rank for key, plan in plans["auto"].matrices.items() if plan.rank}
    assert ranks == {target: 16}
    assert plans["auto"].matrices[target].lowrank_bytes == factor_bytes(192, 192, 16)
    assert plans["auto"].predicted_kl < 0.9 * plans["off"].predicted_kl
    assert plans["auto"].file_bytes <= budget
    assert not any(plan.rank for plan in plans["off"].matrices.values())
    ranks = {plan.rank for plan in plans[32].matrices.values() if plan.matrix.role not in EMBEDDING_ROLES}
    assert ranks == {32}
    assert plans[32].file_bytes <= budget


def test_corrections_move_bits_between_roles(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama", **MEDIUM))
    options = PassOptions(BITS, prune="off", rank="off")

    def bits_of_down(correction: float) -> float:
        tables = [
            replace(table, correction=correction) if table.matrix.role == "down" else table
            for table in _arms(model_map, options)
        ]
        plan = make_plan(model_map, tables, _budget(model_map, 4.0), options)
        return float(
            np.mean([bits_of(p.row_bits).mean() for p in plan.matrices.values() if p.matrix.role == "down"])
        )

    low, middle, high = bits_of_down(1 / 3), bits_of_down(1.0), bits_of_down(3.0)
    # A factor of three in loss is worth log4(3) = 0.79 bit, taken from the rest of the model.
    assert 0.3 < middle - low < 0.8
    assert 0.3 < high - middle < 0.8


def test_channels_without_loss_are_pruned_from_gate_and_up(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS)
    tables = _arms(model_map, options)
    down = next(table for table in tables if table.matrix.role == "down")
    losses = np.array([1e9, 0.0, 1e9, 1e9, 1e9, 1e9])  # 88 channels
    tables = [replace(table, channels=losses) if table is down else table for table in tables]
    layer = down.matrix.key.removesuffix("down_proj.weight")
    structures = [s for s in prunable_structures(tables) if s.down == down.matrix.key]
    assert structures[1].members == ((f"{layer}gate_proj.weight", 1), (f"{layer}up_proj.weight", 1))
    plan = make_plan(model_map, tables, _budget(model_map, 2.5), options)
    assert [(s.down, s.block) for s in plan.pruned_structures] == [(down.matrix.key, 1)]
    for name in ("gate_proj", "up_proj"):
        assert plan.matrices[f"{layer}{name}.weight"].row_bits[1] == 0
    assert plan.file_bytes <= plan.budget


@pytest.mark.parametrize(("role", "count"), [("expert", 1), ("mtp_expert", 0)])
def test_experts_without_statistics_cannot_be_pruned(role: str, count: int) -> None:
    options, zeros = PassOptions(BITS), np.zeros(2)
    matrices = [
        WeightMatrix(f"mlp.experts.{part}", 0, role, 32, 32) for part in ("gate_up_proj", "down_proj")
    ]
    tables = [ArmTable(matrix, options.bits_for(matrix), options.L, zeros, zeros) for matrix in matrices]
    assert len(prunable_structures(tables)) == count


def test_an_expert_without_loss_is_pruned_as_a_whole(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v3"))
    options = PassOptions(BITS)
    tables = _arms(model_map, options)
    down = next(table for table in tables if table.matrix.role == "expert_down" and table.matrix.expert == 2)
    down.pruning_loss[:] = 1e-12
    plan = make_plan(model_map, tables, _budget(model_map, 2.2), options)
    assert [(s.down, s.block) for s in plan.pruned_structures] == [(down.matrix.key, None)]
    assert not plan.matrices[down.matrix.key].row_bits.any()
    assert not plan.matrices[down.matrix.key.replace("down_proj", "gate_up_proj")].row_bits.any()
    assert plan.matrices[down.matrix.key.replace("[2]", "[1]")].row_bits.any()


def test_a_pruned_expert_has_no_low_rank_part(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v3"))
    options = PassOptions(BITS, rank=16)
    tables = _arms(model_map, options)
    for index, table in enumerate(tables):
        if table.matrix.expert is not None:
            nbytes = factor_bytes(table.matrix.rows, table.matrix.cols, 16)
            part = LowRankPart(16, nbytes, np.full(table.matrix.groups, 0.9, np.float32))
            tables[index] = replace(table, lowrank=[part])
    down = next(table for table in tables if table.matrix.role == "expert_down" and table.matrix.expert == 2)
    down.pruning_loss[:] = 1e-12
    plan = make_plan(model_map, tables, _budget(model_map, 1.5), options)
    assert down.matrix.key in [s.down for s in plan.pruned_structures if s.block is None]
    assert plan.matrices[down.matrix.key].is_zero and plan.matrices[down.matrix.key].lowrank_bytes == 0
    assert plan.matrices[down.matrix.key.replace("down_proj", "gate_up_proj")].is_zero
    assert plan.matrices[down.matrix.key.replace("[2]", "[1]")].rank == 16


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_share_is_pruned(tiny_checkpoint: Callable[..., Path], share: float) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS, prune=share)
    tables = _arms(model_map, options)
    plan = make_plan(model_map, tables, _budget(model_map, 2.0), options)
    prunable = [p for p in plan.matrices.values() if p.matrix.role not in EMBEDDING_ROLES]
    total = sum(p.matrix.groups * p.matrix.cols for p in prunable)
    pruned = sum(int((p.row_bits == 0).sum()) * p.matrix.cols for p in prunable)
    assert share * total <= pruned <= share * total + 88


@pytest.mark.parametrize(("rank", "share"), [("off", 0.95), ("auto", 0.0), (16, 0.0)])
def test_no_plan_exceeds_largest_bytes(
    tiny_checkpoint: Callable[..., Path], rank: str | int, share: float
) -> None:
    model_map, options = _map(tiny_checkpoint("llama")), PassOptions(BITS, rank=rank)
    largest = largest_bytes(model_map, options)
    plan = make_plan(model_map, _arms(model_map, options), 1 << 50, options)
    assert share * largest < plan.file_bytes <= largest < 2 * model_map.stored_numel


def test_a_matrix_without_statistics_gets_the_median_loss(tiny_checkpoint: Callable[..., Path]) -> None:
    tables = _arms(_map(tiny_checkpoint("llama")), PassOptions(BITS))
    uncovered = tables[3].matrix.name
    covered = [table for table in tables if table.matrix.name != uncovered]
    before = {table.matrix.key: table.pruning_loss.copy() for table in tables}
    shares = tables[3].sensitivity / tables[3].sensitivity.sum()
    tables = rescale_uncovered(
        tables, cast(Statistics, SimpleNamespace(covers=lambda name: name != uncovered))
    )
    median = np.median([table.pruning_loss.sum() / table.matrix.weights for table in covered])
    assert tables[3].pruning_loss.sum() / tables[3].matrix.weights == pytest.approx(median)
    np.testing.assert_allclose(tables[3].sensitivity / tables[3].sensitivity.sum(), shares)
    assert all((table.pruning_loss == before[table.matrix.key]).all() for table in covered)


def test_experts_of_a_hash_router_are_not_pruned(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v4"))  # layer 0 has a hash router
    tables = _arms(model_map, PassOptions(BITS))
    tables = [
        replace(table, pruning_loss=table.pruning_loss * 1e-9) if table.matrix.expert == 1 else table
        for table in tables
    ]
    plan = make_plan(model_map, tables, model_map.stored_numel // 2, PassOptions(BITS))
    pruned = {structure.down for structure in plan.pruned_structures if structure.block is None}
    assert pruned >= {f"model.layers.{layer}.mlp.experts.down_proj[1]" for layer in (1, 2, 3)}
    assert not any("layers.0." in down for down in pruned)
