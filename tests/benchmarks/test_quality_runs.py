"""The quality benchmark: environments, jobs, kept results, and the contestants."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(
        {"a.weight": torch.arange(12.0).reshape(3, 4).bfloat16(), "norm": torch.ones(4)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text("{}")
    return folder


def test_the_reason_is_the_last_line_that_speaks_of_an_error() -> None:
    runs = importlib.import_module("runs")
    log = "Loading: 1%\rLoading: 100%\nERROR: No matching distribution found for x\n\nhint: see above\n"
    assert runs.reason_of(log) == "ERROR: No matching distribution found for x"
    assert runs.reason_of("step 1\rstep 2\n\n") == "step 2"
    assert runs.reason_of("") == "no output"


def test_a_failed_command_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    runs = importlib.import_module("runs")
    command = [sys.executable, "-c", "print('working'); raise SystemExit('error: no compiler')"]
    with pytest.raises(runs.Failure, match="no compiler") as raised:
        runs.run(command, tmp_path / "log.txt", "install", 1)
    assert raised.value.step == "install"


def test_a_peer_that_does_not_install_has_a_row_that_says_so(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, measure = importlib.import_module("runs"), importlib.import_module("measure")
    contestants = importlib.import_module("contestants")
    tried: list[str] = []

    def refuse(command: Any, log: Path, step: str, threads: int | None) -> None:
        tried.append(step)
        raise runs.Failure(step, "ERROR: no such version")

    monkeypatch.setattr(runs, "run", refuse)
    workshop = runs.Workshop(tmp_path / "out", model, torch.zeros(2, 8, dtype=torch.long), 1)
    chosen = [one for one in contestants.peers(200) if one.tool == "hqq"]
    said: list[str] = []
    text = measure.Text("mixed", tmp_path / "no.txt")
    results = measure.measure_all(workshop, measure.Measure((text,), 1024, None), chosen, 12, said.append)
    assert [row["failed"] for row in results["contestants"]] == ["ERROR: no such version"] * 3
    assert tried == ["install"] and len(said) == 3 and "install failed" in said[0]
    assert results["texts"] == []


def test_a_model_is_kept_until_its_inputs_change(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, contestants = (
        importlib.import_module("runs"),
        importlib.import_module("contestants"),
    )
    made: list[list[Any]] = []

    def compress(command: list[Any], log: Path, step: str, threads: int | None) -> None:
        made.append(command)
        out = Path(command[command.index("compress") + 2])
        out.mkdir()
        save_file({"w": torch.zeros(len(made), 8)}, out / "model.safetensors")

    monkeypatch.setattr(runs, "run", compress)
    (four,) = contestants.ours([4.0])
    tokens = torch.zeros(2, 8, dtype=torch.long)
    first = runs.Workshop(tmp_path / "out", model, tokens, 1).make(four)
    again = runs.Workshop(tmp_path / "out", model, tokens, 1).make(four)
    assert first == again and len(made) == 1 and first.stored == 32
    other = contestants.Contestant(four.name, four.tool, {"bpw": 4.0, "arguments": ["--rank", "off"]})
    changed = runs.Workshop(tmp_path / "out", model, tokens, 1).make(other)
    assert changed.stored == 64 and changed.key != first.key
    assert made[1][made[1].index("--rank") :][:2] == ["--rank", "off"]
    runs.Workshop(tmp_path / "out", model, tokens, 1, tmp_path / "text").make(
        contestants.Contestant("other", four.tool, {"bpw": 3.0})
    )
    assert made[2][made[2].index("--calibration") + 1] == tmp_path / "text"
    assert "--calibration-only" in made[2]  # the tokens that the other tools get
    assert "--calibration" not in made[0]


def test_dense_weights_keep_the_checkpoints_names(tmp_path: Path, model: Path) -> None:
    job = importlib.import_module("job")
    job.write_dense(model, {"a.weight": torch.full((3, 4), 0.3)}, tmp_path / "dense")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    assert found["a.weight"].dtype == torch.float32 and float(found["a.weight"][0, 0]) == pytest.approx(0.3)
    assert found["norm"].tolist() == [1.0] * 4
    assert (tmp_path / "dense" / "config.json").is_file()
    # 12 weights of 2 bytes and 4 of 4; the header is not counted.
    assert job.tensor_bytes(model) == 40


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"b.weight": torch.ones(3, 4)}, "not in the checkpoint: b.weight"),
        ({"a.weight": torch.ones(4, 3)}, "a.weight"),
        ({"norm": torch.ones(4)}, "the original's weights"),
    ],
)
def test_dense_weights_that_would_be_lost_are_refused(
    tmp_path: Path, model: Path, weights: dict[str, torch.Tensor], message: str
) -> None:
    job = importlib.import_module("job")
    with pytest.raises(ValueError, match=message):
        job.write_dense(model, weights, tmp_path / "dense")


def test_a_group_divides_every_width() -> None:
    job = importlib.import_module("job")
    assert job.common_group([576, 1536], 128) == 64
    assert job.common_group([256, 1536], 128) == 128
    with pytest.raises(ValueError, match="24"):
        job.common_group([24, 64], 128)


def test_contestants_have_files_of_their_own() -> None:
    contestants, ablation = (importlib.import_module(name) for name in ("contestants", "ablation"))
    everyone = [*contestants.ours([2, 2.5, 4]), *contestants.peers(200), *ablation.variants(4.0)[1:]]
    slugs = [one.slug for one in everyone]
    assert len(set(slugs)) == len(slugs)
    assert contestants.ours([4.0])[0] == ablation.variants(4.0)[0]


def test_every_switch_of_the_ablation_exists() -> None:
    ablation, variant = (importlib.import_module(name) for name in ("ablation", "variant"))
    patches = [patch for one in ablation.SWITCHED.values() for patch in one.get("patches", ())]
    assert patches
    for setting in patches:
        module = importlib.import_module(setting.partition(":")[0])
        name = setting.partition(":")[2].partition("=")[0]
        before = getattr(module, name)
        try:
            variant.patch(setting)
            assert getattr(module, name) != before, f"{setting} switches nothing"
        finally:
            setattr(module, name, before)
    with pytest.raises(SystemExit, match="out of date"):
        variant.patch("ciuic_cli.allocation.probes:NO_SUCH_CONSTANT=1")
    with pytest.raises(SystemExit, match="cannot replace"):
        variant.patch("ciuic_cli.allocation.probes:CORRECTION_LIMITS=1.0")


def test_a_job_is_read_as_it_is_written(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, contestants = (
        importlib.import_module("runs"),
        importlib.import_module("contestants"),
    )
    job = importlib.import_module("job")
    tokens = torch.arange(16).reshape(2, 8)
    workshop = runs.Workshop(tmp_path / "out", model, tokens, 3)
    peer = contestants.Contestant("HQQ 4 bits", "hqq", {"bits": 4, "group": 64})

    def work(command: list[Any], log: Path, step: str, threads: int | None) -> None:
        read = job.Job.read(command[-1])
        assert torch.equal(read.tokens, tokens) and read.model == model and read.threads == 3
        assert read.options == {"bits": 4, "group": 64} and read.shared.is_dir()
        command[-1].with_name("result.json").write_text(json.dumps({"bytes": 7}))

    monkeypatch.setattr(runs.Workshop, "environment", lambda self, tool: Path(sys.executable))
    monkeypatch.setattr(runs, "run", work)
    made = workshop.make(peer)
    assert made.stored == 7 and made.folder.name == "dense"
