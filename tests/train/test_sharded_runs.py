"""`train_sharded` in two processes: the trained model, exact continuation, and continuation in four processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import torchrun

from ciuic_cli.errors import UsageError
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.sharding.run import train_sharded

WORKER = Path(__file__).parent / "sharded_run_worker.py"


@pytest.fixture(scope="module")
def runs(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Arguments of the worker, after it ran in two processes; and the folder of its outputs."""
    folder = tmp_path_factory.mktemp("sharded")
    data = folder / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"The number after {n} is {n + 1}."}) + "\n" for n in range(24))
    )
    arguments = [str(tiny_checkpoint("deepseek_v3")), str(data), str(folder)]
    torchrun(WORKER, 2, "two", *arguments)
    return arguments, folder


def test_a_killed_run_ends_with_the_same_bytes(runs: Any, tiny_checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    _, folder = runs
    whole = (folder / "whole" / "model.safetensors").read_bytes()
    assert (folder / "killed" / "model.safetensors").read_bytes() == whole
    report = json.loads((folder / "whole" / "train_report.json").read_text())
    assert report["processes"] == 2 and report["losses"][-1] < 0.9 * report["losses"][0]
    assert json.loads((folder / "killed" / "train_report.json").read_text())["losses"] == report["losses"]
    model = AutoModelForCausalLM.from_pretrained(folder / "whole")
    assert model.config.architectures == ["DeepseekV3ForCausalLM"] and model.dtype == torch.bfloat16
    assert sorted(path.name for path in folder.glob(".*")) != [], (
        "the other killed run is still to be continued"
    )
    check_shares(model, report)


def check_shares(model: Any, report: dict[str, Any]) -> None:
    """Weights, gradients and two states of every process: at most 1.02 times their share, and one whole layer."""
    total = 4 * sum(p.numel() for p in model.parameters())
    layer = 4 * max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    for found in report["bytes_per_process"]:
        assert found["gradients"] == found["parameters"]
        held = found["parameters"] + found["gradients"] + found["states"]
        assert held <= 1.02 * 4 * total / report["processes"] + layer


@pytest.mark.campaign
def test_a_run_continues_in_one_process_and_then_in_four(runs: Any) -> None:
    from transformers import AutoModelForCausalLM

    arguments, folder = runs
    torchrun(WORKER, 1, "one", *arguments)
    torchrun(WORKER, 4, "four", *arguments)
    whole, resharded = (
        json.loads((folder / name / "train_report.json").read_text()) for name in ("whole", "resharded")
    )
    assert resharded["processes"] == 4
    assert resharded["losses"][:2] == whole["losses"][:2], "the steps before the first change are the same"
    assert resharded["losses"] == pytest.approx(whole["losses"], rel=1e-3)
    check_shares(AutoModelForCausalLM.from_pretrained(folder / "resharded"), resharded)


def test_without_torchrun_the_message_names_it(tmp_path: Path) -> None:
    options = TrainOptions(train_file=tmp_path / "absent.jsonl", method="full")
    with pytest.raises(UsageError, match="divides a model") as caught:
        train_sharded("absent", tmp_path / "out", options)
    assert "torchrun" in str(caught.value.remedy)
