"""`--max-memory`: the plan against torch's allocator, and the settings that are proposed when a run does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ciuic_cli
from ciuic_cli.errors import InputError, TargetError
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning import step
from ciuic_cli.train.planning.limits import EIGHT_BIT, nearest, planned_batch, require_fits
from ciuic_cli.train.planning.memory_plan import (
    Batch,
    MemoryPlan,
    PlannedModel,
    plan_memory,
)
from ciuic_cli.train.planning.states import state_bytes

pytest.importorskip("peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def options(**changed: Any) -> TrainOptions:
    return TrainOptions(**{"train_file": Path("data.jsonl"), "lora_r": 4, **changed})


@pytest.mark.parametrize(("family", "every"), [("llama", 0), ("llama", 2), ("deepseek_v3", 1)])
def test_the_plan_is_what_the_allocator_gives_out(
    artifact: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str, every: int
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from memory_plan import measured, options_of

    folder = artifact(family, prune=False).folder
    ids = torch.randint(3, 200, (2, 96), generator=torch.Generator().manual_seed(0))
    plan = plan_memory(PlannedModel.of_folder(folder), options_of(every, 4), Batch(2, 96, masked=False))
    found = measured(str(folder), every, 4, ids)
    assert plan.tensors == pytest.approx(found["peak"], rel=0.05)


def test_each_term(artifact: Callable[..., Any]) -> None:
    folder = artifact("deepseek_v3").folder
    model = PlannedModel.of_folder(folder)
    loaded = ciuic_cli.load(folder, device="cpu")
    plan = plan_memory(model, options(), Batch(1, 32))
    tensors = {id(one): one.nbytes for one in (*loaded.parameters(), *loaded.buffers())}
    assert plan.weights == pytest.approx(sum(tensors.values()), rel=0.01)
    twice = plan_memory(model, options(lora_r=8), Batch(1, 32))
    assert twice.adapter == 2 * plan.adapter and plan.gradients <= plan.adapter
    assert plan.states == 2 * plan.adapter
    longer = plan_memory(model, options(), Batch(1, 64))
    assert 1.6 * plan.activations < longer.activations < 2.6 * plan.activations
    accumulated = plan_memory(model, options(gradient_accumulation_steps=2), Batch(1, 32))
    assert plan.tensors < accumulated.tensors <= plan.tensors + plan.adapter


def test_states_of_optimizers() -> None:
    sizes = [10_000, 100]
    assert state_bytes("adamw_torch", sizes) == 8 * 10_100
    assert state_bytes(EIGHT_BIT, sizes) == round(2.04 * 10_000) + 800
    assert state_bytes("sgd", sizes) == 0 and state_bytes("lion_32bit", sizes) == 4 * 10_100


def test_a_batch_is_its_longest_row() -> None:
    def row(*lengths: int) -> dict[str, list[int]]:
        positions = [place for length in lengths for place in range(length)]
        return {"input_ids": positions, "labels": positions, "position_ids": positions}

    assert planned_batch([row(5), row(9)], 1) == Batch(1, 9, masked=False)
    assert planned_batch([row(5), row(9)], 2) == Batch(2, 9, masked=True)
    assert planned_batch([row(5, 2), row(7)], 1) == Batch(1, 7, masked=True)


def _formula(chosen: TrainOptions, batch: Batch) -> MemoryPlan:
    """A plan in which each proposal saves a known share."""
    kept = 1 if not chosen.activation_checkpointing else 1 / (5 - min(chosen.every_n_layers, 4))
    states = 25 * chosen.lora_r if chosen.optim == EIGHT_BIT else 100 * chosen.lora_r
    activations = round(batch.rows * batch.tokens * kept)
    return MemoryPlan(1000, 50 * chosen.lora_r, 50 * chosen.lora_r, states, activations)


def test_each_proposal_fits_and_is_the_nearest() -> None:
    chosen, batch = options(lora_r=8, per_device_train_batch_size=4, sequence_len=1024), Batch(4, 1024)
    found = _formula(chosen, batch)
    assert found.total == 6696
    limit = 4800
    proposed = list(nearest(_formula, chosen, batch, found, limit))
    assert proposed == [
        "--activation-checkpointing --every-n-layers 2 (0.00 GB)",
        "--per-device-train-batch-size 2 --gradient-accumulation-steps 2 (0.00 GB)",
        "--sequence-len 512 (0.00 GB)",
    ]
    tight = list(nearest(_formula, chosen, batch, found, 1700))
    assert (
        len(tight) == 1 and "--sequence-len" in tight[0] and "--lora-r" in tight[0] and EIGHT_BIT in tight[0]
    )
    assert list(nearest(_formula, chosen, batch, found, 900)) == []


def test_what_cannot_fit_is_refused_with_settings_that_do(artifact: Callable[..., Any]) -> None:
    folder = artifact("llama").folder
    model, batch, chosen = (
        PlannedModel.of_folder(folder),
        Batch(4, 256),
        options(per_device_train_batch_size=4),
    )
    plan = plan_memory(model, chosen, batch)
    assert require_fits(model, chosen, batch, plan.total, 0) == plan
    with pytest.raises(TargetError, match="training needs") as error:
        require_fits(model, chosen, batch, plan.total // 2, 0)
    remedy = str(error.value.remedy)
    assert "--per-device-train-batch-size 1" in remedy or "--per-device-train-batch-size 2" in remedy
    assert "--sequence-len" in remedy
    with pytest.raises(TargetError, match="do not fit either"):
        require_fits(model, chosen, batch, plan.weights, 0)
    dense = plan_memory(PlannedModel.at_bits(model.config, 4), replace(chosen, lora_r=1), batch)
    assert dense.weights == pytest.approx(plan.weights, rel=0.35)


def test_an_operator_without_a_plan_is_named_and_other_errors_are_not_hidden(
    artifact: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PlannedModel.of_folder(artifact("llama").folder)

    def reads_a_value(adapted: Any, inputs: dict[str, torch.Tensor], *others: Any) -> torch.Tensor:
        return torch.zeros(int(inputs["input_ids"].sum()), requires_grad=True).sum()

    monkeypatch.setattr(step, "chunked_loss", reads_a_value)
    with pytest.raises(InputError, match=r"aten\._local_scalar_dense.* needs values"):
        plan_memory(model, options(), Batch(1, 32))

    def is_wrong(*_: Any) -> torch.Tensor:
        raise ValueError("a mistake in our code")

    monkeypatch.setattr(step, "chunked_loss", is_wrong)
    with pytest.raises(ValueError, match="a mistake"):
        plan_memory(model, options(), Batch(1, 32))


def test_weights_that_other_code_reads_are_named() -> None:
    """Falcon's linear layers multiply by their weights themselves."""
    from transformers import FalconConfig

    config = FalconConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = PlannedModel.at_bits(config.to_dict(), 4)
    with pytest.raises(InputError, match=r"its code reads \S*weight as a dense matrix"):
        plan_memory(model, options(lora_target_modules=("query_key_value",)), Batch(1, 32))


def test_the_command_ends_with_code_4_before_anything_is_written(
    artifact: Callable[..., Any], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "One two three four five six."}) + "\n")
    command = [
        sys.executable,
        "-m",
        "ciuic_cli",
        "train",
        str(artifact("llama").folder),
        str(tmp_path / "out"),
    ]
    found = subprocess.run(
        [*command, "--train-file", str(data), "--max-memory", "1MB", "--device", "cpu"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert found.returncode == 4, found.stderr
    assert "--max-memory allows 0.00 GB" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
