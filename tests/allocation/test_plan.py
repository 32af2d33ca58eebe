"""From arms to the plan: exact bytes, the budget kept and spent, and each kind of arm taken where it pays."""

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

from ciuic_cli.allocation import plan as planning
from ciuic_cli.allocation.arms import Arms, PassOptions, level_uncovered, structures_of
from ciuic_cli.allocation.matrices import EMBEDDING_ROLES, WeightMatrix, weight_matrices
from ciuic_cli.allocation.plan import Plan, check_reachable, largest_bytes, make_plan, stored_tensors
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.artifact.layout import lay_out
from ciuic_cli.artifact.reader import read_blobs
from ciuic_cli.artifact.writer import write_shards
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.packing import PackedMatrix, bits_of, tile_nbytes
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.compression.options import BITS
from ciuic_cli.errors import TargetError, UsageError
from ciuic_cli.passes.lowrank import LowRankArm, factor_bytes
from ciuic_cli.statistics.files import EmbeddingUse, Statistics

MEDIUM = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 48}
"""A "llama" of 1.6 million weights: at four bits, a thousandth of the budget is a few row groups' bits."""


def _map(folder: Path) -> ModelMap:
    return map_model(open_checkpoint(folder))


def _arms(model_map: ModelMap, options: PassOptions, seed: int = 0) -> list[Arms]:
    """Arms whose sensitivities are spread over orders of magnitude, as real ones are."""
    rng = np.random.default_rng(seed)
    made = []
    for matrix in weight_matrices(model_map.parameters.values()):
        sensitivity = rng.lognormal(0, 2, matrix.groups)
        made.append(Arms(matrix, options.widths_for(matrix), options.L, sensitivity, sensitivity.copy()))
    return made


def _budget(model_map: ModelMap, ratio: float) -> int:
    return int(2 * model_map.stored_numel / ratio)


def _packed(matrix: WeightMatrix, row_bits: np.ndarray, rank: int = 0) -> PackedMatrix:
    """A matrix of zeros codes in the form that the plan says."""
    codes = np.zeros(int(tile_nbytes(row_bits).sum()) * matrix.padded_cols // 16, np.uint8)
    lowrank = None
    if rank:
        right, left = (
            _packed(WeightMatrix("", None, "", rank, size), np.full(rank // 16, 6, np.uint8))
            for size in (matrix.cols, matrix.rows)
        )
        lowrank = (right, left)
    scale = np.zeros(matrix.rows, np.uint8)
    return PackedMatrix(matrix.rows, matrix.cols, 16, 0, 1.0, row_bits, scale, codes, lowrank)


def _write(model_map: ModelMap, plan: Plan, folder: Path, shard_bytes: int) -> list[Path]:
    parts: dict[str, list[PackedMatrix]] = {}
    for unit_plan in plan.matrices.values():
        packed = _packed(unit_plan.matrix, unit_plan.row_bits, unit_plan.rank)
        parts.setdefault(unit_plan.matrix.name, []).append(packed)

    def payload(name: str) -> bytes:
        if name not in parts:
            value = model_map.read(name).to(model_map.stored_dtype(name)).contiguous()
            return value.reshape(-1).view(torch.uint8).numpy().tobytes()
        if len(model_map.parameters[name].shape) == 3:
            return ExpertStack(tuple(parts[name])).to_bytes()
        return parts[name][0].to_bytes()

    folder.mkdir()
    shards = lay_out(stored_tensors(model_map, plan.blob_bytes), shard_bytes)
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
def test_planned_bytes_are_the_written_ones(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    model_map = _map(tiny_checkpoint(family))
    options = PassOptions(BITS, prune="auto", rank="auto")
    arms = _arms(model_map, options)
    for index, arm in enumerate(arms):  # a low-rank part that leaves nothing wherever one fits
        if min(arm.matrix.rows, arm.matrix.cols) > 16 and arm.matrix.role not in EMBEDDING_ROLES:
            nbytes = factor_bytes(arm.matrix.rows, arm.matrix.cols, 16)
            part = LowRankArm(16, nbytes, np.full(arm.matrix.groups, 1e-9))
            arms[index] = replace(arm, lowrank=[part])
    budget = _budget(model_map, 2.2)
    plan = make_plan(model_map, arms, budget, options)
    assert plan.file_bytes <= budget
    assert any(matrix.rank for matrix in plan.matrices.values())
    files = _write(model_map, plan, tmp_path / "out", shard_bytes=1 << 40)
    assert sum(file.stat().st_size for file in files) == plan.file_bytes
    opened = read_blobs(files)
    for name, nbytes in plan.blob_bytes.items():
        assert opened.blobs[name].shape == model_map.parameters[name].shape
        assert opened.tensors[name].nbytes == nbytes
    stored = {name for name, p in model_map.parameters.items() if p.tied_to is None}
    assert set(opened.tensors) == stored


@pytest.mark.parametrize("shard_bytes", [20_000, 33_000])
def test_shards_are_paid_for_as_well(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(planning, "lay_out", functools.partial(lay_out, shard_bytes=shard_bytes))
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS)
    budget = _budget(model_map, 2.0)
    plan = make_plan(model_map, _arms(model_map, options), budget, options)
    files = _write(model_map, plan, tmp_path / "out", shard_bytes)
    assert len(files) > 1
    assert sum(file.stat().st_size for file in files) == plan.file_bytes <= budget


def test_the_embedding_loses_no_token(tiny_checkpoint: Callable[..., Path]) -> None:
    """Even where its rows seem to cost nothing at all, they keep the smallest width."""
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS, prune="auto")
    arms = _arms(model_map, options)
    for arm in arms:
        if arm.matrix.role in EMBEDDING_ROLES:
            arm.sensitivity[:] = arm.removal[:] = 0.0
            assert 0 not in arm.widths
        else:
            assert 0 in arm.widths
    plan = make_plan(model_map, arms, _budget(model_map, 4.0), options)
    found = {p.matrix.role: p.row_bits for p in plan.matrices.values()}
    assert (found["embedding"] == 2).all()
    assert (found["head"] == 2).all()


def test_the_vocabulary_has_two_bits_unless_only_one_is_asked_for(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    for widths, least in ((BITS, 2), ((1, 4), 4), ((1,), 1)):
        options = PassOptions(widths, prune="off", rank="off")
        found = {
            matrix.role: min(options.widths_for(matrix))
            for matrix in weight_matrices(model_map.parameters.values())
        }
        assert found["embedding"] == found["head"] == least and found["gate"] == 1


def test_free_row_groups_are_pruned_unless_forbidden(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    for prune, expected in (("auto", 0), ("off", 1)):
        options = PassOptions(BITS, prune=prune)
        arms = _arms(model_map, options)
        arms[3].sensitivity[1] = arms[3].removal[1] = 0.0
        plan = make_plan(model_map, arms, _budget(model_map, 3.0), options)
        assert plan.matrices[arms[3].matrix.key].row_bits[1] == expected


class _PlainStatistics:
    """White inputs and outputs: every weight counts the same."""

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


def test_low_rank_is_taken_where_the_matrix_nearly_is(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_map = _map(tiny_checkpoint("llama", **{**MEDIUM, "num_hidden_layers": 1}))
    steep = "model.layers.0.self_attn.q_proj.weight"
    generator = torch.Generator().manual_seed(0)
    nearly = torch.randn(192, 16, generator=generator) @ torch.randn(16, 192, generator=generator)
    nearly += 0.02 * torch.randn(192, 192, generator=generator)
    read = ModelMap.read

    def with_steep(self: ModelMap, name: str) -> torch.Tensor:
        return nearly if name == steep else read(self, name)

    monkeypatch.setattr(ModelMap, "read", with_steep)
    statistics = cast(Statistics, _PlainStatistics(model_map))
    budget = _budget(model_map, 4.0)
    plans = {}
    for rank in ("auto", "off", 32):
        options = PassOptions(BITS, L=12, prune="off", rank=rank)
        arms = [
            price_matrix(model_map, statistics, matrix, options)
            for matrix in weight_matrices(model_map.parameters.values())
        ]
        plans[rank] = make_plan(model_map, arms, budget, options)
    ranks = {key: plan.rank for key, plan in plans["auto"].matrices.items() if plan.rank}
    assert ranks == {steep: 16}
    assert plans["auto"].matrices[steep].lowrank_bytes == factor_bytes(192, 192, 16)
    assert plans["auto"].predicted_kl < 0.9 * plans["off"].predicted_kl
    assert plans["auto"].file_bytes <= budget
    assert not any(plan.rank for plan in plans["off"].matrices.values())
    forced = {plan.rank for plan in plans[32].matrices.values() if plan.matrix.role not in EMBEDDING_ROLES}
    assert forced == {32}
    assert plans[32].file_bytes <= budget


def test_corrections_move_bits_to_the_role_that_costs_more(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama", **MEDIUM))
    options = PassOptions(BITS, prune="off", rank="off")

    def bits_of_down(correction: float) -> float:
        arms = [
            replace(arm, correction=correction) if arm.matrix.role == "down" else arm
            for arm in _arms(model_map, options)
        ]
        plan = make_plan(model_map, arms, _budget(model_map, 4.0), options)
        return float(
            np.mean([bits_of(p.row_bits).mean() for p in plan.matrices.values() if p.matrix.role == "down"])
        )

    low, middle, high = bits_of_down(1 / 3), bits_of_down(1.0), bits_of_down(3.0)
    # A factor of three in price is log4(3) = 0.79 bit at the margin; the rest of the model gives way.
    assert 0.3 < middle - low < 0.8
    assert 0.3 < high - middle < 0.8


def test_channels_that_cost_nothing_leave_gate_and_up(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS)
    arms = _arms(model_map, options)
    down = next(arm for arm in arms if arm.matrix.role == "down")
    costs = np.array([1e9, 0.0, 1e9, 1e9, 1e9, 1e9])  # 88 channels
    arms = [replace(arm, channels=costs) if arm is down else arm for arm in arms]
    layer = down.matrix.key.removesuffix("down_proj.weight")
    found = [s for s in structures_of(arms) if s.down == down.matrix.key]
    assert found[1].members == ((f"{layer}gate_proj.weight", 1), (f"{layer}up_proj.weight", 1))
    plan = make_plan(model_map, arms, _budget(model_map, 2.5), options)
    assert [(s.down, s.block) for s in plan.removed] == [(down.matrix.key, 1)]
    for name in ("gate_proj", "up_proj"):
        assert plan.matrices[f"{layer}{name}.weight"].row_bits[1] == 0
    assert plan.file_bytes <= plan.budget


@pytest.mark.parametrize(("role", "whole"), [("expert", 1), ("mtp_expert", 0)])
def test_experts_that_nothing_is_known_of_are_no_structures(role: str, whole: int) -> None:
    options, nothing = PassOptions(BITS), np.zeros(2)
    matrices = [
        WeightMatrix(f"mlp.experts.{part}", 0, role, 32, 32) for part in ("gate_up_proj", "down_proj")
    ]
    arms = [Arms(matrix, options.widths_for(matrix), options.L, nothing, nothing) for matrix in matrices]
    assert len(structures_of(arms)) == whole


def test_an_expert_that_costs_nothing_goes_as_a_whole(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v3"))
    options = PassOptions(BITS)
    arms = _arms(model_map, options)
    down = next(arm for arm in arms if arm.matrix.role == "expert_down" and arm.matrix.expert == 2)
    down.removal[:] = 1e-12
    plan = make_plan(model_map, arms, _budget(model_map, 2.2), options)
    assert [(s.down, s.block) for s in plan.removed] == [(down.matrix.key, None)]
    assert not plan.matrices[down.matrix.key].row_bits.any()
    assert not plan.matrices[down.matrix.key.replace("down_proj", "gate_up_proj")].row_bits.any()
    assert plan.matrices[down.matrix.key.replace("[2]", "[1]")].row_bits.any()


def test_an_expert_that_goes_takes_its_low_rank_part_along(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v3"))
    options = PassOptions(BITS, rank=16)
    arms = _arms(model_map, options)
    for index, arm in enumerate(arms):
        if arm.matrix.expert is not None:
            nbytes = factor_bytes(arm.matrix.rows, arm.matrix.cols, 16)
            part = LowRankArm(16, nbytes, np.full(arm.matrix.groups, 0.9, np.float32))
            arms[index] = replace(arm, lowrank=[part])
    down = next(arm for arm in arms if arm.matrix.role == "expert_down" and arm.matrix.expert == 2)
    down.removal[:] = 1e-12
    plan = make_plan(model_map, arms, _budget(model_map, 1.5), options)
    assert down.matrix.key in [s.down for s in plan.removed if s.block is None]
    assert plan.matrices[down.matrix.key].is_zero and plan.matrices[down.matrix.key].lowrank_bytes == 0
    assert plan.matrices[down.matrix.key.replace("down_proj", "gate_up_proj")].is_zero
    assert plan.matrices[down.matrix.key.replace("[2]", "[1]")].rank == 16


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_forced_share_is_pruned(tiny_checkpoint: Callable[..., Path], share: float) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(BITS, prune=share)
    arms = _arms(model_map, options)
    plan = make_plan(model_map, arms, _budget(model_map, 2.0), options)
    prunable = [p for p in plan.matrices.values() if p.matrix.role not in EMBEDDING_ROLES]
    total = sum(p.matrix.groups * p.matrix.cols for p in prunable)
    gone = sum(int((p.row_bits == 0).sum()) * p.matrix.cols for p in prunable)
    assert share * total <= gone <= share * total + 88


@pytest.mark.parametrize("widths", [(4,), BITS])
def test_a_target_out_of_reach_names_the_best_ratio(
    tiny_checkpoint: Callable[..., Path], widths: tuple[int, ...]
) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(widths, prune="off")
    with pytest.raises(TargetError) as caught:
        check_reachable(model_map, _budget(model_map, 14.0), options)
    assert caught.value.exit_code == 4
    best = float(str(caught.value.remedy).split("--ratio ")[1].split()[0])
    check_reachable(model_map, _budget(model_map, best), options)
    with pytest.raises(TargetError):
        check_reachable(model_map, _budget(model_map, best + 0.02), options)


def test_a_rank_takes_its_bytes_from_what_can_be_reached(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    with pytest.raises(TargetError) as caught:
        check_reachable(model_map, 1000, PassOptions(BITS, rank="off"))
    assert "--rank" not in str(caught.value.remedy)
    best = float(str(caught.value.remedy).split("--ratio ")[1].split()[0])
    check_reachable(model_map, _budget(model_map, best), PassOptions(BITS))
    with pytest.raises(TargetError) as caught:
        check_reachable(model_map, _budget(model_map, best), PassOptions(BITS, rank=16))
    assert "--rank auto" in str(caught.value.remedy)


def test_a_rank_that_no_matrix_can_have_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    with pytest.raises(UsageError, match="--rank 999999984"):
        check_reachable(model_map, model_map.stored_numel * 2, PassOptions(BITS, rank=999_999_984))


@pytest.mark.parametrize(("rank", "share"), [("off", 0.95), ("auto", 0.0), (16, 0.0)])
def test_no_plan_is_larger_than_the_largest(
    tiny_checkpoint: Callable[..., Path], rank: str | int, share: float
) -> None:
    model_map, options = _map(tiny_checkpoint("llama")), PassOptions(BITS, rank=rank)
    largest = largest_bytes(model_map, options)
    plan = make_plan(model_map, _arms(model_map, options), 1 << 50, options)
    assert share * largest < plan.file_bytes <= largest < 2 * model_map.stored_numel


def test_a_matrix_without_statistics_counts_as_the_median_one(tiny_checkpoint: Callable[..., Path]) -> None:
    arms = _arms(_map(tiny_checkpoint("llama")), PassOptions(BITS))
    lost = arms[3].matrix.name
    covered = [arm for arm in arms if arm.matrix.name != lost]
    before = {arm.matrix.key: arm.removal.copy() for arm in arms}
    shares = arms[3].sensitivity / arms[3].sensitivity.sum()
    arms = level_uncovered(arms, cast(Statistics, SimpleNamespace(covers=lambda name: name != lost)))
    typical = np.median([arm.removal.sum() / arm.matrix.weights for arm in covered])
    assert arms[3].removal.sum() / arms[3].matrix.weights == pytest.approx(typical)
    np.testing.assert_allclose(arms[3].sensitivity / arms[3].sensitivity.sum(), shares)
    assert all((arm.removal == before[arm.matrix.key]).all() for arm in covered)


def test_experts_chosen_by_a_table_are_not_removed(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("deepseek_v4"))  # layer 0 has a hash router
    arms = _arms(model_map, PassOptions(BITS))
    arms = [replace(arm, removal=arm.removal * 1e-9) if arm.matrix.expert == 1 else arm for arm in arms]
    plan = make_plan(model_map, arms, model_map.stored_numel // 2, PassOptions(BITS))
    removed = {structure.down for structure in plan.removed if structure.block is None}
    assert removed >= {f"model.layers.{layer}.mlp.experts.down_proj[1]" for layer in (1, 2, 3)}
    assert not any("layers.0." in down for down in removed)
