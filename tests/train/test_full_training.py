"""`--method full`: the trained model's folder, 8-bit weights, and continuation after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.errors import UsageError
from ciuic_cli.train.engine import train
from ciuic_cli.train.memory import updates
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.run_folder import RunFolder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"The number after {n} is {n + 1}."}) + "\n" for n in range(24))
    )
    return path


def options(data: Path, **changed: Any) -> TrainOptions:
    chosen = {"method": "full", "sequence_len": 96, "max_steps": 6, "learning_rate": 5e-3, "save_steps": 2}
    return TrainOptions(**{"train_file": data, **chosen, **changed})


@pytest.mark.parametrize("activations", [None, "int8-offload"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_trained_model_is_a_folder_that_transformers_loads(
    tiny_checkpoint: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    weights: str | None,
    activations: str | None,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, out = tiny_checkpoint("deepseek_v3"), tmp_path / "out"
    report = train(source, out, options(data, weights=weights, activations=activations), device="cpu")
    assert report["losses"][-1] < 0.9 * report["losses"][0]
    original, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, out))
    assert model.dtype == original.dtype == torch.bfloat16
    changed = [
        not torch.equal(one, two) for one, two in zip(model.parameters(), original.parameters(), strict=True)
    ]
    assert sum(changed) > 0.9 * len(changed)
    ids = AutoTokenizer.from_pretrained(out)("The number after 3 is 4.", return_tensors="pt").input_ids
    with torch.no_grad():
        before, after = (float(m(input_ids=ids, labels=ids).loss) for m in (original, model))
    assert after < before
    if weights:
        assert report["weights_bytes"] < 2 * report["trained_parameters"]
    assert not RunFolder(out).path.exists()


class Killed(Exception):
    """Stands for the death of the process between two steps."""


@pytest.mark.parametrize(
    "changed",
    [{"weights": "int8", "sync_steps": 3}, {"optim": "adamw_bnb_8bit"}, {"optim": "adamw_torch_4bit"}],
    ids=["8-bit weights", "8-bit states", "4-bit states"],
)
def test_a_killed_run_ends_with_the_same_bytes(
    tiny_checkpoint: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
) -> None:
    if "optim" in changed:
        pytest.importorskip("bitsandbytes")
        pytest.importorskip("torchao")
    monkeypatch.setattr(updates, "SLICE", 4096)  # so that even these parameters are updated slice by slice
    source, chosen = tiny_checkpoint("llama"), options(data, **changed)
    whole = train(source, tmp_path / "whole", chosen, device="cpu")

    def die(_: str, done: int, total: int) -> None:
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        train(source, tmp_path / "killed", chosen, device="cpu", progress=die)
    assert not (tmp_path / "killed").exists()
    continued = train(source, tmp_path / "killed", chosen, device="cpu")
    assert continued["losses"] == whole["losses"]
    name = "model.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_compressed_model_is_refused(artifact: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot train a compressed model"):
        train(artifact("llama").folder, tmp_path / "out", options(data), device="cpu")
