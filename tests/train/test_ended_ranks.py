"""`torchrun ... ciuic train --fsdp` when a rank dies, a disk is full, or a checkpoint, data or options do not fit."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

STEPS = 16


class Run:
    """A command that trains `folder`/out, and what it says."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.out, self.folder, data = folder / "out", folder / ".out.ciuic.train", folder / "data.jsonl"
        data.write_text("".join(json.dumps({"text": f"After {n} comes {n + 1}."}) + "\n" for n in range(24)))
        self.command = ["train", str(model), str(self.out), "--train-file", str(data), "--method", "full"]
        self.command += ["--fsdp", "--sequence-len", "64", "--no-sample-packing", "--save-steps", "2"]
        self.command += ["--max-steps", str(STEPS), "--device", "cpu"]

    def start(self, size: int, passes: int, **options: Any) -> subprocess.Popen[str]:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(size),
        ]
        return subprocess.Popen(
            [*torchrun, "-m", "ciuic_cli", *self.command, "--gradient-accumulation-steps", str(passes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            **options,
        )

    def refused(self, size: int = 2, passes: int = 2, **options: Any) -> str:
        """What a run says that ends with an error, on one line."""
        running = self.start(size, passes, **options)
        _, said = running.communicate(timeout=400)
        assert running.returncode != 0 and "a bug in ciuic" not in said, said[-4000:]
        assert not self.out.exists()
        return " ".join(said.split())

    def killed(self, checkpoints: int = 1) -> str:
        """What a run of two processes says after rank 1 was killed, with this many checkpoints."""
        running = self.start(2, 2)
        deadline = time.monotonic() + 300
        while len(list(self.folder.glob("checkpoint-*/complete"))) < checkpoints:
            assert running.poll() is None and time.monotonic() < deadline, running.communicate()
            time.sleep(0.01)
        (rank,) = (
            child
            for child in psutil.Process(running.pid).children(recursive=True)
            if child.environ().get("RANK") == "1"
        )
        rank.send_signal(signal.SIGKILL)
        _, said = running.communicate(timeout=400)
        assert running.returncode != 0 and "a bug in ciuic" not in said, said[-4000:]
        assert f"rank 1 (process {rank.pid})" in said
        return " ".join(said.split())

    def end(self) -> str:
        running = self.start(2, 2)
        _, said = running.communicate(timeout=400)
        assert running.returncode == 0, said[-4000:]
        return said


@pytest.fixture
def run(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Run:
    return Run(tiny_checkpoint("llama"), tmp_path)


def test_a_killed_rank_is_named_and_the_same_command_goes_on(run: Run) -> None:
    said = run.killed()
    assert "another worker of this run has stopped" in said
    (newest,) = sorted(run.folder.glob("checkpoint-*/complete"), key=lambda file: _step(file.parent))[-1:]
    assert f"goes on from the checkpoint of step {_step(newest.parent)}" in said
    assert not run.out.exists()
    assert f"continuing from step {_step(newest.parent)}" in run.end()
    assert len(json.loads((run.out / "train_report.json").read_text())["losses"]) == STEPS
    assert not run.folder.exists()


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


@pytest.mark.campaign
def test_other_sizes_and_damaged_checkpoints_are_refused(run: Run) -> None:
    run.killed(checkpoints=2)
    said = run.refused(size=3)
    assert "rows_per_step: 4, now 6" in said and "remove the folder to begin again" in said
    older, newest = sorted(run.folder.glob("checkpoint-*"), key=_step)[-2:]
    file = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    said = run.refused()
    assert "cannot read the checkpoint" in said and f"remove {newest}" in said.replace(" /", "/").replace(
        "remove/", "remove /"
    )
    shutil.rmtree(newest)
    assert f"continuing from step {_step(older)}" in run.end()


@pytest.mark.campaign
def test_a_full_disk_and_unreadable_data(run: Run) -> None:
    limit = 100_000  # bytes of a file: less than a process's part of a checkpoint
    said = run.refused(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert "File too large" in said and "ulimit -f" in said
    Path(run.command[4]).write_text('{"text": 5}\n')
    run.folder.rename(run.folder.with_name("aside"))
    assert "data.jsonl" in run.refused()
    assert not run.folder.exists()
