"""Evaluation loss, early stopping, and the reports of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from typer.testing import CliRunner

from ciuic_cli.artifact import publishing
from ciuic_cli.cli.app import app
from ciuic_cli.errors import EnvironmentFault, InputError, UsageError
from ciuic_cli.process import work_folders
from ciuic_cli.recipes import RECIPE
from ciuic_cli.train.history import best_step, has_stopped
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.run_folder import RunFolder

pytest.importorskip("peft")
ADAPTER = "adapter_model.safetensors"


def write(path: Path, numbers: range) -> Path:
    lines = [{"prompt": f"The number after {n} is ", "completion": f"{n + 1}."} for n in numbers]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(folder: Path, **changed: Any) -> TrainOptions:
    """Of a run that becomes worse on other examples: a high rate, constant so that a shorter run has the same steps."""
    return TrainOptions(
        **{
            "train_file": write(folder / "train.jsonl", range(6)),
            "eval_file": write(folder / "eval.jsonl", range(90, 95)),
            "sequence_len": 64, "max_steps": 40, "learning_rate": 5e-2, "lr_scheduler_type": "constant",
            "eval_steps": 2, "save_steps": 100, "per_device_eval_batch_size": 2, "early_stopping_patience": 3,
            "lora_dropout": 0.1, "lora_target_modules": ("o_proj",), **changed,
        }
    )  # fmt: skip


def run(model: Path, out: Path, chosen: TrainOptions, said: list[str] | None = None) -> dict[str, Any]:
    from ciuic_cli.train.engine import train

    return train(
        model, out, chosen, device="cpu", hint=lambda line: (said if said is not None else []).append(line)
    )


@pytest.fixture(scope="module")
def model(artifact: Callable[..., Any]) -> Path:
    return artifact("llama").folder


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[str]]:
    """Report, output and lines of a run that stopped early."""
    folder = tmp_path_factory.mktemp("stopped")
    said: list[str] = []
    return run(model, folder / "adapter", options(folder), said), folder / "adapter", said


def test_a_run_stops_early_and_keeps_the_best_adapter(
    stopped: tuple[dict[str, Any], Path, list[str]], model: Path, tmp_path: Path
) -> None:
    report, out, said = stopped
    losses = {one["step"]: one["loss"] for one in report["evaluations"]}
    best = min(losses, key=lambda step: losses[step])
    assert report["best_step"] == best and report["steps"] == best + 3 * 2 < 40
    assert list(losses) == list(range(2, report["steps"] + 1, 2))
    assert any(
        f"step {best} of 40: evaluation loss {losses[best]:.4f}, the best so far" in line for line in said
    )
    run(model, tmp_path / "best", options(tmp_path, max_steps=best, early_stopping_patience=None))
    assert (tmp_path / "best" / ADAPTER).read_bytes() == (out / ADAPTER).read_bytes()


class Recorder(TrainerCallback):
    """A tracker, as transformers creates them by name. It writes where TensorBoard does."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / "runs" / "today"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "events").open("a") as file:
            file.write(json.dumps(logs) + "\n")


def test_evaluations_do_not_change_the_training(
    stopped: tuple[dict[str, Any], Path, list[str]],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dropout, which draws random numbers. A tracker gets the figures of each step, and its files are kept."""
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", Recorder)
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["recorder"])
    report = run(
        model, tmp_path / "adapter",
        options(
            tmp_path, eval_file=None, eval_steps=50, per_device_eval_batch_size=1, early_stopping_patience=None,
            max_steps=stopped[0]["steps"], report_to="recorder",
        ),
    )  # fmt: skip
    assert report["losses"] == stopped[0]["losses"] and report["evaluations"] == []
    logged = [json.loads(line) for line in (tmp_path / "adapter/runs/today/events").read_text().splitlines()]
    assert [one["loss"] for one in logged if "loss" in one] == report["losses"]
    assert {"memory_bytes", "tokens_per_second", "learning_rate"} <= logged[0].keys()


def test_tensorboard_gets_every_figure_and_its_files_move_to_the_output(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command; killed once, so that there are two files of events."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen, out = options(tmp_path), tmp_path / "adapter"
    arguments = [
        *("--train-file", chosen.train_file, "--eval-file", chosen.eval_file),
        *("--sequence-len", 64, "--max-steps", 6, "--eval-steps", 2, "--save-steps", 2, "--device", "cpu"),
        *("--lora-target-modules", "o_proj", "--report-to", "tensorboard"),
    ]

    def run_command() -> int:
        return int(invoke(model, out, *arguments).exit_code)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "begin", _dies)
        assert run_command() == 5 and not out.exists()
    assert list((RunFolder(out).path / "runs").rglob("events.*"))
    assert run_command() == 0
    report = json.loads((out / "train_report.json").read_text())
    logged: dict[str, dict[int, float]] = {}
    for file in (out / "runs").rglob("events.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            logged.setdefault(tag, {}).update({one.step: one.value for one in events.Scalars(tag)})
    assert logged["train/loss"] == pytest.approx(dict(enumerate(report["losses"], 1)), rel=1e-6)
    evaluated = {one["step"]: one["loss"] for one in report["evaluations"]}
    assert logged["eval/loss"] == pytest.approx(evaluated, rel=1e-6) and list(evaluated) == [2, 4, 6]
    assert {"train/memory_bytes", "train/tokens_per_second", "train/learning_rate"} <= logged.keys()


def _dies(_: object) -> Path:
    raise OSError("the machine went down")


def test_the_evaluation_loss_is_that_of_plain_peft(
    stopped: tuple[dict[str, Any], Path, list[str]], model: Path, tmp_path: Path
) -> None:
    """The mean over all learned tokens: examples of other lengths, in batches of other sizes, weigh by their tokens."""
    import torch
    from peft import PeftModel

    import ciuic_cli
    from ciuic_cli.text.tokenizer import open_tokenizer
    from ciuic_cli.train.examples import Limits, read_examples

    report, out, _ = stopped
    adapted = PeftModel.from_pretrained(ciuic_cli.load(model, device="cpu"), out).eval()
    total = learned = 0.0
    for example in read_examples(
        options(tmp_path).eval_file, open_tokenizer(model), Limits(64, None, 1 << 20), train_on_inputs=False
    ):
        labels = torch.tensor([example.labels])
        with torch.no_grad():
            loss = adapted(input_ids=torch.tensor([example.ids]), labels=labels).loss
        count = int((labels[:, 1:] != -100).sum())
        total, learned = total + float(loss) * count, learned + count
    wanted = next(one["loss"] for one in report["evaluations"] if one["step"] == report["best_step"])
    # Products with few rows round activations to 8 bits, those with many do not.
    assert total / learned == pytest.approx(wanted, rel=3e-3)


def test_a_run_killed_after_its_last_evaluation_ends_with_the_same_bytes(
    stopped: tuple[dict[str, Any], Path, list[str]],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time it is killed when the output has its name, before the run's folder is removed."""

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "begin", _dies)
        with pytest.raises(OSError, match="went down"):
            run(model, tmp_path / "adapter", options(tmp_path))
    assert RunFolder(tmp_path / "adapter").last_checkpoint() is not None
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "remove", _dies)
        with pytest.raises(OSError, match="went down"):
            run(model, tmp_path / "adapter", options(tmp_path))
    with pytest.raises(InputError, match="the output exists"):
        run(model, tmp_path / "adapter", options(tmp_path))
    again = json.loads((tmp_path / "adapter" / "train_report.json").read_text())
    assert again["losses"] == stopped[0]["losses"] and again["evaluations"] == stopped[0]["evaluations"]
    assert (tmp_path / "adapter" / ADAPTER).read_bytes() == (stopped[1] / ADAPTER).read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_reports_beside_the_adapter(stopped: tuple[dict[str, Any], Path, list[str]]) -> None:
    report, out, said = stopped
    stored = json.loads((out / "train_report.json").read_text())
    assert {name: stored[name] for name in report} == report
    assert len(report["memory_bytes"]) == len(report["losses"]) == report["steps"]
    assert min(report["memory_bytes"]) > 10e6 and report["tokens_per_second"] > 0
    recipe = yaml.safe_load((out / RECIPE).read_text())
    again = TrainOptions(**recipe)
    assert again.to_dict() == options(Path(recipe["train_file"]).parent).to_dict()
    page = (out / "train_report.html").read_text()
    assert page.count("<svg") == 2 and "Evaluations" in page and "lora_target_modules" in page
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "some files have modes of their own"
    assert any("tokens/s" in line and "left" in line for line in said)


def test_the_best_step_and_the_end_of_patience() -> None:
    def log(*losses: float) -> list[dict[str, Any]]:
        return [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses, start=1)]

    nan = float("nan")
    assert best_step([{"step": 1, "loss": 0.0}]) is None and best_step(log(nan, nan)) is None
    assert best_step(log(3, 2, 2, nan, 4)) == 2
    assert not has_stopped(log(3, 2, 2), 2) and has_stopped(log(3, 2, 2, nan), 2)
    assert not has_stopped(log(3, 4, 2, 5), 2) and has_stopped(log(nan, nan), 2) and not has_stopped([], 1)


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"eval_file": None}, UsageError, "--eval-steps needs --eval-file"),
        ({"early_stopping_patience": 0}, UsageError, "--early-stopping-patience must be at least 1"),
        ({"eval_steps": "2.5"}, UsageError, "--eval-steps is '2.5', not a whole number"),
        ({"sample_packing": "yes"}, UsageError, "--sample-packing is 'yes', not true or false"),
        ({"report_to": ("nonesuch",)}, UsageError, "--report-to nonesuch is unknown"),
        ({"report_to": ("none", "wandb")}, Exception, "--report-to"),
        ({"report_to": "comet_ml"}, EnvironmentFault, "--report-to comet_ml needs a package"),
    ],
)
def test_what_is_refused(
    model: Path, tmp_path: Path, changed: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        run(model, tmp_path / "adapter", options(tmp_path, **changed))
    assert not work_folders.work_folder(tmp_path / "adapter", work_folders.TRAINING).exists()


def test_numbers_may_be_text_as_in_yaml(tmp_path: Path) -> None:
    chosen = TrainOptions(
        **yaml.safe_load(
            "{train_file: a.jsonl, learning_rate: 2e-4, lora_r: 8, report_to: none, max_steps: 3.0}"
        )
    )
    assert (chosen.learning_rate, chosen.lora_r, chosen.report_to, chosen.max_steps) == (
        2e-4,
        8,
        ("none",),
        3,
    )
    assert chosen.train_file == Path("a.jsonl") and isinstance(chosen.max_steps, int)


def test_the_command_takes_a_recipe_and_comes_before_it(model: Path, tmp_path: Path) -> None:
    """A result's recipe repeats the run; a key that is unknown or of the wrong type is wrong usage."""
    given = tmp_path / "given.yaml"
    write(tmp_path / "train.jsonl", range(6))
    given.write_text(
        f"train-file: {tmp_path / 'train.jsonl'}\nmax_steps: 5\nlearning_rate: 2e-3\nlora_r: 4\ndevice: cpu\n"
        "sequence_len: 64\nlora_target_modules: [o_proj, q_proj]\n"
    )
    done = invoke(
        model, tmp_path / "first", "--config", given, "--max-steps", 2, "--lora-target-modules", "o_proj"
    )
    assert done.exit_code == 0, done.stderr
    stored = yaml.safe_load((tmp_path / "first" / RECIPE).read_text())
    assert (stored["max_steps"], stored["lora_target_modules"]) == (2, ["o_proj"])
    assert (stored["learning_rate"], stored["lora_r"]) == (2e-3, 4) and "eval_file" not in stored
    done = invoke(model, tmp_path / "second", "--config", tmp_path / "first" / RECIPE, "--quiet")
    assert done.exit_code == 0 and done.stderr == ""
    first, second = (tmp_path / name / ADAPTER for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    for text, message in (
        ("lerning-rate: 1", "did you mean learning_rate?"),
        ("train_file: a\nlearning_rate: many", "--learning-rate is 'many', not a number"),
        ("max_steps: 5", "--train-file is missing"),
    ):
        given.write_text(text)
        done = invoke(model, tmp_path / "third", "--config", given)
        assert done.exit_code == 2 and message in done.stderr, done.stderr


def invoke(model: Path, out: Path, *options: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in ("train", model, out, *options)])
