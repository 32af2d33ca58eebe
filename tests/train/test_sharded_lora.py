"""LoRA on a compressed model that two processes share: what is gathered, what is trained, what each process holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchrun import torchrun

WORKER = Path(__file__).parent / "sharded_lora_worker.py"
FAMILY = "deepseek_v3"
STEPS, PASSES = 4, 2
"""Of the run with two processes: steps, and passes of a step. A pass gathers twice: forward and backward."""


def run(size: int, *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(
        torchrun(WORKER, size, *arguments, str(size)).strip().splitlines()[-1]
    )
    return result


@pytest.fixture(scope="module")
def runs(artifact: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The reports of one and of two processes, and the folder with their adapters."""
    folder = tmp_path_factory.mktemp("sharded-lora")
    data = folder / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"The number after {n} is {n + 1}."}) + "\n" for n in range(24))
    )
    source = str(artifact(FAMILY).folder)
    return *(run(size, source, str(data), str(folder / str(size))) for size in (1, 2)), folder


def test_two_processes_train_what_one_trains(runs: Any) -> None:
    one, two, folder = runs
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert two["losses"][-1] < 0.97 * two["losses"][0]
    adapters = [load_file(folder / name / "adapter_model.safetensors") for name in ("1", "2")]
    assert adapters[0].keys() == adapters[1].keys() and len(adapters[0]) > 10
    moved = [max(float(value.abs().max()) for value in one.values()) for one in adapters]
    assert min(moved) > 0.01
    for name, value in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], value, rtol=0.1, atol=2e-3)


def test_codes_are_gathered_as_their_bytes(runs: Any, artifact: Callable[..., Any]) -> None:
    _, two, _ = runs
    assert two["calls"] > 100 and two["different"] == 0
    stored = artifact(FAMILY).stored.values()
    shares = [found["parameters"] for found in two["bytes_per_process"]]
    codes = sum(value.nbytes for value in stored)
    adapter = 4 * two["trained_parameters"]
    assert sum(shares) == pytest.approx(codes + adapter, rel=0.01)
    passes = 2 * STEPS * PASSES
    assert two["wire"]["gathered"] <= 1.02 * passes * shares[0]
    assert two["wire"]["reduced"] == pytest.approx(STEPS * adapter, rel=0.1), "only the adapter has gradients"


def test_each_process_holds_its_share(runs: Any) -> None:
    one, two, _ = runs
    (alone,) = one["bytes_per_process"]
    for found in two["bytes_per_process"]:
        for kind in ("parameters", "gradients", "states"):
            assert 0 < found[kind] <= 1.02 * alone[kind] / 2 + 1000
