"""Options and adapters that libraries would accept, crash on, or take hours for; and `ciuic train --merge`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ciuic_cli.cli.app import app
from ciuic_cli.train.merging import merge as merging

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def model(artifact: Callable[..., Any]) -> Path:
    return artifact("llama").folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = [{"prompt": f"The number after {n} is ", "completion": f"{n + 1}."} for n in range(12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def invoke(command: str, *arguments: object) -> Any:
    done = CliRunner().invoke(app, [str(argument) for argument in (command, *arguments)])
    assert "Traceback" not in done.stderr, done.stderr
    return done


def train(model: Path, out: Path, data: Path, *options: object) -> Any:
    fixed = ("--train-file", data, "--sequence-len", 64, "--max-steps", 2, "--lora-r", 4, "--device", "cpu")
    return invoke("train", model, out, *fixed, *options)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--seed", -1), 2, "--seed must be at least 0"),
        (("--seed", 1 << 32), 2, "--seed must be at least 0 and below 2^32"),
        (
            ("--num-train-epochs", "1e308", "--max-steps", -1),
            2,
            "--num-train-epochs must be positive and at most",
        ),
        (("--lora-r", 10**7), 2, "--lora-r 10000000 is more than the rank of any adapted weight, 48"),
        (("--optim", "magic"), 2, "--optim magic is unknown to transformers"),
        (("--optim", "galore_adamw"), 5, "--optim galore_adamw needs a package that is missing"),
        (("--lr-scheduler-type", "magic"), 2, "--lr-scheduler-type magic is unknown"),
        (
            ("--lr-scheduler-type", "cosine_with_min_lr"),
            2,
            "cosine_with_min_lr cannot be used: One of min_lr",
        ),
        (("--lr-scheduler-type", "reduce_lr_on_plateau"), 2, "reduce_lr_on_plateau cannot be used"),
    ],
    ids=str,
)
def test_options_that_no_run_can_have(
    options: tuple[object, ...], code: int, message: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """Nothing is left that would stand in the way of the corrected command."""
    done = train(model, tmp_path / "adapter", data, *options)
    assert done.exit_code == code and message in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_diverges_ends_without_an_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    done = train(model, tmp_path / "adapter", data, "--learning-rate", "1e308")
    assert done.exit_code == 2 and "the training diverged" in done.stderr and "--learning-rate" in done.stderr
    assert not (tmp_path / "adapter").exists()


def test_the_command_trains_and_merges(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while it measures what it merged, it measures that when it is repeated."""

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    out, options = tmp_path / "adapter", ("--merge", "low-rank", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(merging, "_measured", interrupted)
        assert train(model, out, data, *options).exit_code == 130
    weights = (out / "merged" / "model.safetensors").read_bytes()
    done = train(model, out, data, *options)
    assert done.exit_code == 0 and "only its KL is missing" in done.stderr, done.stderr
    merged = json.loads(done.stdout)["merged"]
    assert 0 <= merged["kl_merged"] < merged["kl_base"]
    assert (out / "merged" / "model.safetensors").read_bytes() == weights
    assert [path.name for path in (*tmp_path.iterdir(), *out.iterdir()) if path.name.startswith(".")] == []
    done = train(model, out, data, *options)
    assert done.exit_code == 3 and "the output exists already" in done.stderr


def test_a_dense_model_is_refused_before_it_is_trained_and_merged(
    tiny_checkpoint: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    done = train(tiny_checkpoint("llama"), tmp_path / "adapter", data, "--merge", "low-rank")
    assert done.exit_code == 3 and "not a ciuic artifact" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def adapter(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "adapter"
    assert train(model, out, data).exit_code == 0
    return out


@pytest.mark.parametrize("method", ["low-rank", "bf16", "requantize"])
@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 1e30},
        {"alpha_pattern": {"q_proj": float("nan")}},
    ],
    ids=str,
)
def test_an_adapter_that_adds_what_no_weight_has(
    change: dict[str, Any], method: str, model: Path, adapter: Path, data: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    file = damaged / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    fixed = ("--train-file", data, "--sequence-len", 64, "--device", "cpu")
    done = invoke("merge", model, damaged, tmp_path / "out", "--method", method, *fixed)
    assert done.exit_code == 3 and "lora_alpha or the factors are damaged" in done.stderr, done.stderr
    assert f"file: {file}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]
