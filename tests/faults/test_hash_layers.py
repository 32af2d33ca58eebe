"""Faults 27 and 39 in DeepSeek-V4: tables of expert ids, and sizes in config.json that no run can serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attacks import QUICK, Outcome, harmless, invoke, snapshot
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def v4(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A DeepSeek-V4 checkpoint and its artifact."""
    out = tmp_path_factory.mktemp("v4") / "out"
    source = tiny_checkpoint("deepseek_v4")
    done = invoke("compress", source, out, "--calibration", text, "--calibration-only", "--ratio", 2, *QUICK)
    assert done.code == 0, done.stderr
    return {"checkpoint": source, "artifact": out}


@pytest.fixture(params=["checkpoint", "artifact"])
def copy(request: pytest.FixtureRequest, v4: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the checkpoint or of the artifact, to damage."""
    return Path(shutil.copytree(v4[request.param], tmp_path / request.param))


def attacked(folder: Path, text: Path) -> list[Outcome]:
    """Outcomes of the commands that read weights; asserts that none of them changes a file.

    `bench` is left out: it opens a model as `eval` does, in a process of its own, which takes seconds.
    """
    commands: list[list[object]] = [
        ["inspect", folder],
        ["eval", folder, "--text", text, "--seqlen", 64, "--limit", 1],
    ]
    if folder.name == "checkpoint":
        commands.append(
            ["compress", folder, folder.parent / "new", "--calibration", text, "--calibration-only", *QUICK]
        )
    before = snapshot(folder.parent)
    done = [invoke(*command) for command in commands]
    assert snapshot(folder.parent) == before
    for outcome in done:
        harmless(outcome)
    return done


def change_table(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Change the only table of expert ids; returns its name."""
    tensors = load_file(folder / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("gate.tid2eid"))
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("value", [4, -1, 2**63 - 1])
def test_fault_39_experts_that_are_not_there_are_refused_when_the_model_is_opened(
    copy: Path, text: Path, value: int
) -> None:
    def change(table: torch.Tensor) -> torch.Tensor:
        table[7, 1] = value  # a token that the text does not contain
        return table

    name = change_table(copy, change)
    for done in attacked(copy, text):
        assert done.code == 3 and "expert ids from" in done.stderr and str(value) in done.stderr, done.stderr
        assert (
            name in done.field("tensor") and "model.safetensors" in done.field("file") and done.field("try")
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_fault_39_a_table_of_expert_ids_that_are_no_integers(
    copy: Path, text: Path, dtype: torch.dtype
) -> None:
    name = change_table(copy, lambda table: table.to(dtype))
    for done in attacked(copy, text):
        assert done.code == 3 and name in done.field("tensor") and done.field("try"), done.stderr


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_a_table_of_narrower_integers_is_read(
    v4: dict[str, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    for kind, folder in v4.items():
        copy = Path(shutil.copytree(folder, tmp_path / kind))
        change_table(copy, lambda table: table.to(dtype))
        done = invoke("inspect", copy)
        assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hc_sinkhorn_iters", 2**63),
        ("hc_sinkhorn_iters", 10**6),
        ("sliding_window", 10**30),
        ("compress_rates", {"compressed_sparse_attention": 4, "heavily_compressed_attention": 10**30}),
    ],
)
def test_fault_27_absurd_counts_and_steps(copy: Path, text: Path, key: str, value: object) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, key: value}))
    for done in attacked(copy, text):
        assert done.code == 3 and "which must be between" in done.stderr, done.stderr
        assert "config.json" in done.field("file") and done.field("try")


@pytest.mark.slow
def test_what_transformers_cannot_run_names_the_function_that_failed(copy: Path, text: Path) -> None:
    """A negative number of tokens to choose changes no shape: it shows only when the model runs."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "index_topk": -1}))
    _, *running = attacked(copy, text)
    for done in [*running, invoke("bench", copy, "-p", 16, "-n", 1, "-r", 1)]:
        assert done.code == 3 and "transformers cannot run the model: " in done.stderr, done.stderr
        assert " in DeepseekV4" in done.field("error") and copy.name in done.field("file")
        assert "config.json" in done.field("try") and "another version" in done.field("try")
