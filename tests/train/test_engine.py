"""Training runs: packing, checkpointed activations, resuming after kills, refusals. Tiny models, float32."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ciuic_cli
from ciuic_cli.errors import EnvironmentFault, InputError, UsageError
from ciuic_cli.process import work_folders
from ciuic_cli.train.examples import IGNORED, Example
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.packing import batch_of, row_of
from ciuic_cli.train.run_folder import COMPLETE, RunFolder

pytest.importorskip("peft")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"The number after {n} is ", "completion": f"{n + 1}."} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def folder(artifact: Callable[..., Any]) -> Path:
    return artifact("deepseek_v3").folder


def options(data: Path, **changed: Any) -> TrainOptions:
    return TrainOptions(
        **{"train_file": data, "sequence_len": 96, "max_steps": 4, "learning_rate": 5e-3, **changed}
    )


def run(folder: Path, out: Path, chosen: TrainOptions) -> dict[str, Any]:
    from ciuic_cli.train.engine import train

    return train(folder, out, chosen, device="cpu")


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_examples_in_one_row_do_not_see_each_other(artifact: Callable[..., Any], family: str) -> None:
    model = ciuic_cli.load(artifact(family).folder, device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (9, 14, 5)]
    examples = [Example(text, text) for text in texts]

    def losses(rows: list[Any]) -> float:
        batch = batch_of(rows, 0)
        with torch.no_grad():
            logits = model(
                **{name: batch[name] for name in ("input_ids", "position_ids")}, use_cache=False
            ).logits
        return float(
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1),
                batch["labels"][:, 1:].flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
        )

    apart = sum(losses([row_of([example])]) for example in examples)
    assert losses([row_of(examples)]) == pytest.approx(apart, rel=1e-4)
    assert losses([row_of(examples[:2]), row_of(examples[2:])]) == pytest.approx(apart, rel=1e-4)
    joined = Example(
        [token for text in texts for token in text],
        [IGNORED, *texts[0][1:], IGNORED, *texts[1][1:], IGNORED, *texts[2][1:]],
    )
    assert abs(losses([row_of([joined])]) - apart) > 2e-3 * apart, "the mask makes no difference"


def test_a_run_learns_and_writes_an_adapter_that_loads(folder: Path, data: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    out = tmp_path / "adapter"
    report = run(folder, out, options(data, max_steps=30, learning_rate=2e-2))
    assert report["losses"][-1] < 0.8 * report["losses"][0]
    assert json.loads((out / "train_report.json").read_text())["losses"] == report["losses"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    model = PeftModel.from_pretrained(ciuic_cli.load(folder, device="cpu"), out)
    names = [name for name, _ in model.named_parameters() if "lora_B" in name]
    assert any("experts" in name for name in names) and any("o_proj" in name for name in names)
    with pytest.raises(InputError, match="the output exists"):
        run(folder, out, options(data))


def test_a_dense_checkpoint_is_trained_as_well(
    tiny_checkpoint: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    report = run(
        tiny_checkpoint("llama"), tmp_path / "adapter", options(data, max_steps=20, learning_rate=2e-2)
    )
    assert report["losses"][-1] < report["losses"][0]


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_activations_change_nothing(
    folder: Path, data: Path, tmp_path: Path, every: int
) -> None:
    plain = run(folder, tmp_path / "plain", options(data))
    chosen = options(data, activation_checkpointing=True, every_n_layers=every)
    assert run(folder, tmp_path / "checkpointed", chosen)["losses"] == plain["losses"]


@pytest.mark.parametrize("every", [0, 2])
def test_packed_rows_train_with_stored_activations(
    tiny_checkpoint: Callable[..., Path], data: Path, tmp_path: Path, every: int
) -> None:
    checkpointing = {"activation_checkpointing": True, "every_n_layers": every} if every else {}
    losses = {}
    for store in (None, "int8", "int8-offload"):
        chosen = options(data, activations=store, **checkpointing)
        losses[store] = run(tiny_checkpoint("llama"), tmp_path / f"{store}", chosen)["losses"]
    assert losses["int8"] == losses["int8-offload"] == pytest.approx(losses[None], rel=0.01)
    assert losses["int8"] != losses[None]


KILLED = """
import os, signal, sys
from transformers import TrainerCallback
from ciuic_cli.cli import app as cli
from ciuic_cli.train import callbacks
from ciuic_cli.train.run_folder import RunFolder

moment, wanted = sys.argv[1], int(sys.argv[2])
mark_complete, meter_ends_step = RunFolder.mark_complete, callbacks.Meter.on_step_end

def marked(run, step):
    if (moment, step) == ("unmarked", wanted):
        os.kill(os.getpid(), signal.SIGKILL)
    mark_complete(run, step)
    if (moment, step) == ("saved", wanted):
        os.kill(os.getpid(), signal.SIGKILL)

def ended(meter, args, state, control, **kwargs):
    if (moment, state.global_step) == ("between", wanted):
        os.kill(os.getpid(), signal.SIGKILL)
    return meter_ends_step(meter, args, state, control, **kwargs)

RunFolder.mark_complete, callbacks.Meter.on_step_end = marked, ended
sys.argv[1:3] = []
cli.main()
"""
"""The command, which kills itself when a checkpoint is saved, or written but not marked, or between two checkpoints."""


def test_a_killed_run_ends_with_the_same_bytes(folder: Path, data: Path, tmp_path: Path) -> None:
    """Kills at three moments of a run. It continues where torch has one thread by default.

    A whole run with one thread has other bytes: rows of 78 tokens, where the gradient of softmax depends on it.
    """

    def ended(out: Path, threads: int, moment: str = "never", step: int = 0) -> tuple[int, str]:
        """Exit code of a run that kills itself, and what it said."""
        arguments = [
            *("train", str(folder), str(out), "--train-file", str(data), "--sequence-len", "96"),
            *("--max-steps", "12", "--learning-rate", "5e-3", "--save-steps", "2", "--device", "cpu"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", KILLED, moment, str(step), *arguments],
            capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        return done.returncode, done.stderr

    code, said = ended(tmp_path / "whole", 2)
    assert code == 0, said
    out = tmp_path / "killed"
    checkpoints = RunFolder(out).path
    for threads, moment, step, found in ((2, "saved", 2, 0), (1, "unmarked", 6, 2), (1, "between", 9, 4)):
        code, said = ended(out, threads, moment, step)
        assert code == -signal.SIGKILL, said
        assert (f"continuing from step {found}" in said) == bool(found), said
        assert not out.exists(), "a killed run left an output"
    code, said = ended(out, 1)
    assert code == 0 and "continuing from step 8" in said, said
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not checkpoints.exists()


def test_an_unfinished_run_is_continued_only_with_the_same_options(
    folder: Path, data: Path, tmp_path: Path
) -> None:
    run_folder = RunFolder(tmp_path / "adapter")
    with run_folder.locked():
        assert run_folder.begin({"learning_rate": 1.0, "train_file": str(data)}, threads=3) == 3
        assert run_folder.begin({"learning_rate": 1.0, "train_file": str(data)}, threads=1) == 3
        with pytest.raises(EnvironmentFault, match="another run"), RunFolder(tmp_path / "adapter").locked():
            pass
    with pytest.raises(InputError, match=r"learning_rate: 1\.0, now 0\.005"):
        run(folder, tmp_path / "adapter", options(data))


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path / "adapter")
    with run_folder.locked():
        assert run_folder.last_checkpoint() is None
        for step in (2, 10, 12):
            (run_folder.path / f"checkpoint-{step}").mkdir()
        for step in (2, 10):
            run_folder.mark_complete(step)
        last = run_folder.last_checkpoint()
        assert last is not None and last.name == "checkpoint-10" and (last / COMPLETE).is_file()
        assert not (run_folder.path / "checkpoint-12").exists()
    assert work_folders.is_reserved(run_folder.path.name)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"method": "all"}, "--method all"),
        ({"activations": "int4"}, "--activations int4"),
        ({"weights": "int4", "method": "full"}, "--weights int4"),
        ({"weights": "int8"}, "--method full"),
        ({"weights": "int8", "method": "full", "gradient_accumulation_steps": 2}, "accumulation"),
        ({"sync_steps": 0}, "--sync-steps"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"lora_r": 0}, "--lora-r"),
        ({"lora_dropout": 1.0}, "--lora-dropout"),
        ({"sequence_len": 1}, "--sequence-len"),
        ({"max_steps": 0}, "--max-steps"),
        ({"max_steps": 10**20}, "--max-steps 1000.* is too large"),
        ({"num_train_epochs": -1.0}, "--num-train-epochs"),
    ],
)
def test_options_out_of_range(data: Path, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        options(data, **changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"lora_target_modules": ("absent",)}, "absent is not in the model"),
        ({"lora_dropout": 0.1}, "expert stacks"),
    ],
)
def test_options_that_do_not_fit_the_model(
    folder: Path, data: Path, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        run(folder, tmp_path / "adapter", options(data, **changed))
