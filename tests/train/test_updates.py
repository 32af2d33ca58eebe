"""Updates slice by slice: the same bytes as whole parameters, fewer temporaries, and what the plan says of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ciuic_cli.train.engine import train
from ciuic_cli.train.memory import updates
from ciuic_cli.train.memory.updates import slice_updates, uncompiled
from ciuic_cli.train.memory.weights import held_bytes
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.measured import _Run, peak_bytes
from ciuic_cli.train.planning.memory_plan import PlannedModel, plan_memory
from ciuic_cli.train.planning.states import update_bytes
from ciuic_cli.train.planning.step import Batch

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

LOW_BIT = ["adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit"]
CPU = torch.device("cpu")


def make(optim: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir="none", optim=optim, use_cpu=True, report_to="none")
    kind, chosen = Trainer.get_optimizer_cls_and_kwargs(arguments, nn.Linear(1, 1))  # type: ignore[arg-type]
    optimizer: torch.optim.Optimizer = kind(parameters, **chosen)
    return optimizer


def parameters_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if (seed, number) == (1, 0) else gradient
    with uncompiled(CPU):
        optimizer.step()


@pytest.mark.parametrize("optim", LOW_BIT)
def test_slices_are_updated_as_whole_parameters_are(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a state dict was loaded, and where a parameter has no gradient."""
    monkeypatch.setattr(updates, "SLICE", 8192)
    shapes = [(6, 4096), (20, 1024), (70,)]  # the second has a slice of 4,096
    whole, parts = parameters_of(*shapes), parameters_of(*shapes)
    plain, sliced = make(optim, whole), make(optim, parts)
    slice_updates(sliced)
    for seed in range(4):
        if seed == 2:
            again = make(optim, parts)
            slice_updates(again)
            again.load_state_dict(sliced.state_dict())
            sliced = again
        step(plain, whole, seed)
        step(sliced, parts, seed)
        assert all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))
    assert len(sliced.param_groups[0]["params"]) == 3 + 3 + 1
    assert all(one.grad is None for group in sliced.param_groups for one in group["params"][:-1])


@pytest.mark.parametrize("optim", LOW_BIT)
def test_temporaries_are_those_of_a_slice(optim: str) -> None:
    size = 8 * updates.SLICE
    parameters = parameters_of((8, updates.SLICE))
    optimizer = make(optim, parameters)
    slice_updates(optimizer)
    step(optimizer, parameters, 0)
    step(optimizer, parameters, 2)
    with uncompiled(CPU):
        taken = peak_bytes(optimizer.step)
    assert taken <= 1.01 * update_bytes(optim, [size])
    assert taken < 2 * parameters[0].nbytes, "5 or 13 copies of the whole parameter"


def test_other_optimizers_keep_their_parameters() -> None:
    parameters = parameters_of((2, updates.SLICE))
    optimizer = torch.optim.AdamW(parameters)
    slice_updates(optimizer)
    assert optimizer.param_groups[0]["params"] == parameters


def test_every_optimizer_is_sliced_as_the_plan_assumes() -> None:
    from transformers.training_args import OptimizerNames

    found = set()
    for optim in sorted(one.value for one in OptimizerNames):
        if "galore" in optim:
            continue  # needs options that `ciuic train` does not have
        try:
            optimizer = make(optim, parameters_of((2, updates.SLICE)))
        except (ImportError, ValueError, TypeError, RuntimeError):
            assert optim not in LOW_BIT
            continue
        slice_updates(optimizer)
        count = len(optimizer.param_groups[0]["params"])
        whole, parts = (update_bytes(optim, [size]) for size in (2 * updates.SLICE, updates.SLICE))
        assert count == (2 if whole == parts > 0 else 1) or whole == 0, optim
        found |= {optim} if count == 2 else set()
    assert found >= set(LOW_BIT)


@pytest.mark.parametrize("optim", ["adamw_torch", *LOW_BIT])
def test_states_are_planned_as_the_trainer_keeps_them(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings have float32 states with bitsandbytes, because transformers says so, and their slices have, too."""
    monkeypatch.setattr(updates, "SLICE", 8192)
    folder, batch = tiny_checkpoint("llama"), Batch(1, 16)
    options = TrainOptions(tmp_path, method="full", optim=optim)
    run = _Run(folder, options, batch, None, tmp_path)
    with uncompiled(CPU):
        run.step()
    states = run.optimizer.state
    tables = [values for one in states.values() for name, values in one.items() if name.startswith("qmap")]
    planned = plan_memory(PlannedModel.of_folder(folder), options, batch).states
    assert planned == pytest.approx(held_bytes(states) - held_bytes(dict(enumerate(tables))), rel=0.02)


def test_nothing_is_compiled_on_a_cpu(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"Number {n} and {n + 1}."}) + "\n" for n in range(9)))
    options: Any = {"method": "full", "optim": "adamw_torch_4bit", "max_steps": 3, "sequence_len": 64}
    report = train(tiny_checkpoint("llama"), tmp_path / "out", TrainOptions(data, **options), device="cpu")
    assert report["steps"] == 3 and not counters["stats"]
