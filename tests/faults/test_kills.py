"""Faults 35 and 43: runs killed at every step and at random moments, and what signals leave behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks import BASE_SEED, QUICK, Victim, command, harmless, invoke, old_artifact, seeded, snapshot

from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.verification import verify
from ciuic_cli.process import atomic_files

Make = Callable[..., Victim]
CAMPAIGNS = Path(__file__).parent / "campaigns"


def kills(count: int, seed: int, *options: str, harness: str = "killing.py") -> str:
    done = subprocess.run(
        [sys.executable, str(CAMPAIGNS / harness), "--kills", str(count), "--seed", str(seed), *options],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fault_43_interrupted_runs_lose_nothing() -> None:
    assert "6 kills" in kills(6, BASE_SEED)


@pytest.mark.campaign
def test_fault_35_killed_while_it_tidies_up() -> None:
    """Kill at every file system call from the last parts of the output to the removal of the journal."""
    said = kills(160, 3 + BASE_SEED, "--last")
    assert "had ended before" in said and "new output complete" in said and "no output yet" in said, said


@pytest.mark.campaign
def test_fault_43_two_hundred_interrupted_runs_lose_nothing() -> None:
    said = kills(200, 7 + BASE_SEED)
    resumed = re.search(r"resumed: (\d+)", said)
    assert resumed is not None and int(resumed[1]) > 20, said


@pytest.mark.campaign
def test_fault_43_interrupted_merges_lose_nothing() -> None:
    pytest.importorskip("peft")
    said = kills(20, 11 + BASE_SEED, harness="killing_merging.py")
    assert re.search(r"2\d kills of \d+ merges", said), said


@pytest.mark.campaign
def test_fault_43_interrupted_runs_lose_nothing_that_layers_share() -> None:
    """Gemma 3n's layers leave keys and values for later ones, in memory only."""
    assert "resumed" in kills(60, 9 + BASE_SEED, "--family", "gemma3n_text")


KILL_AT_STEP = """
import os, signal, sys, threading
from ciuic_cli.cli import app as cli
from ciuic_cli.compression import journal

real, count, lock = journal.write_atomically, 0, threading.Lock()
step, how = int(sys.argv[1]), sys.argv[2]

def counted(path, data):
    global count
    with lock:  # matrices are saved by several threads
        count += 1
        mine = count
    if mine == step and how == "torn":
        path.with_name(f".{path.name}.part").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, data)
    if mine == step:
        os.kill(os.getpid(), signal.SIGKILL)

journal.write_atomically = counted
sys.argv[1:3] = []
cli.main()
"""


def steps(count: int, chosen: int) -> list[int]:
    """`chosen` step numbers from 1 to `count`, evenly spaced."""
    return sorted({1 + number * (count - 1) // (chosen - 1) for number in range(chosen)})


STEPS = 64
"""Steps in the journal of a run on this model."""


@pytest.mark.parametrize("how", ["torn", "done"])
@pytest.mark.parametrize(
    "step",
    [
        *steps(STEPS, 2),
        *(
            pytest.param(n, marks=pytest.mark.campaign)
            for n in range(1, STEPS + 1)
            if n not in steps(STEPS, 2)
        ),
    ],
)
def test_fault_35_killed_at_a_step_of_the_journal(victim: Make, step: int, how: str) -> None:
    v = victim(step, "llama_tied")
    options = ["--calibration", v.text, "--calibration-only", "--ratio", 2.5, *QUICK]
    words = [str(word) for word in ("compress", v.model, v.out, *options)]
    done = subprocess.run(
        [sys.executable, "-c", KILL_AT_STEP, str(step), how, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    # The last step announces the output.
    finished = v.out.exists()
    again = v.compress()
    assert again.code == 0, again.stderr
    assert not finished or "written the output already" in again.stderr
    whole = v.folder / "whole"
    assert v.compress(out=whole).code == 0
    for file in whole.glob("*.safetensors"):
        assert (v.out / file.name).read_bytes() == file.read_bytes()
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out", "whole"]


def finish_without_removing_the_journal(v: Victim, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Leave the state of a run that was killed just before it removed its journal; returns the output's snapshot."""
    monkeypatch.setattr("ciuic_cli.compression.journal.Journal.remove", lambda journal: None)
    assert v.compress().code == 0
    monkeypatch.undo()
    return snapshot(v.out)


def test_fault_35_killed_after_the_output_took_its_name(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(0, "llama")
    before = finish_without_removing_the_journal(v, monkeypatch)
    again = v.compress()
    assert again.code == 0 and "written the output already" in again.stderr, again.stderr
    assert snapshot(v.out) == before
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out"]
    assert v.compress().code == 3  # now the journal is gone, and the output counts as an existing one


@pytest.mark.parametrize("damaged", ["model.safetensors", writer.REPORT])
@pytest.mark.parametrize("how", ["removed", "cut"])
def test_fault_35_an_output_damaged_after_a_kill_is_not_taken_for_whole(
    victim: Make, monkeypatch: pytest.MonkeyPatch, damaged: str, how: str
) -> None:
    """Finished steps stay until the output is complete. Only --force writes the output again."""
    v = victim(0, "llama")
    before = finish_without_removing_the_journal(v, monkeypatch)
    if how == "removed":
        (v.out / damaged).unlink()
    else:
        os.truncate(v.out / damaged, 1)
    refused = v.compress()
    assert refused.code == 3 and "damaged since" in refused.stderr and damaged in refused.field("file")
    harmless(refused)
    again = v.compress("--force")
    assert again.code == 0 and "continuing" in again.stderr, again.stderr
    assert snapshot(v.out)["model.safetensors"] == before["model.safetensors"]
    assert verify(v.out).problems == ()
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out"]


def test_fault_35_killed_between_the_two_steps_of_a_replacement(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system cannot exchange two folders atomically, the old one is renamed first."""
    v = victim(0, "llama")
    old_artifact(publishing.begin(v.out).with_name("old"))
    refused = v.compress()
    assert refused.code == 3 and "exists already" in refused.stderr
    assert (v.out / writer.CHECKSUMS).read_text() == "old"
    assert v.compress("--force").code == 0
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out"]


@seeded(1)
def test_fault_34_permissions_that_are_revoked_during_the_run(
    victim: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(seed, "llama")
    real: Callable[..., None] = atomic_files.write_atomically

    def revoked(path: Path, data: bytes) -> None:
        if "encode" in str(path):
            raise PermissionError(13, os.strerror(13), str(path))
        real(path, data)

    monkeypatch.setattr("ciuic_cli.compression.journal.write_atomically", revoked)
    done = v.compress()
    assert done.code == 5 and "Permission denied" in done.stderr and "permissions" in done.field("try")
    harmless(done)
    monkeypatch.undo()
    again = v.compress()
    assert again.code == 0 and "continuing" in again.stderr


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    """Read stderr up to the first line that starts with `word`."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(word):
            return
    raise AssertionError(f"the run ended before it printed {word!r}")


@pytest.mark.parametrize(
    ("number", "dry_run"),
    [
        (signal.SIGTERM, True),
        *(
            pytest.param(number, dry_run, marks=pytest.mark.campaign)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            for dry_run in (False, True)
            if (number, dry_run) != (signal.SIGTERM, True)
        ),
    ],
)
def test_fault_35_signals_leave_no_temporary_files(
    victim: Make, temporary_folder: Path, number: signal.Signals, dry_run: bool
) -> None:
    v = victim(0, "llama")
    options: list[Any] = [
        "--calibration",
        v.text,
        "--calibration-only",
        "--ratio",
        2.5,
        *QUICK,
        *(["--dry-run"] if dry_run else []),
    ]
    run = subprocess.Popen(
        command("compress", v.model, v.out, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(run, "forward" if dry_run else "arms")
    run.send_signal(number)
    _, said = run.communicate()
    assert run.returncode == 130 and "interrupted" in said and "Traceback" not in said, said
    assert not list(temporary_folder.glob("ciuic-*"))
    assert sorted(path.name for path in v.folder.iterdir()) == (
        ["model"] if dry_run else [".out.ciuic", "model"]
    )


IN_PLACE = """
import sys, torch, ciuic_cli
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
say = lambda what, done, total: print(what, file=sys.stderr, flush=True)
text = {"calibration": [sys.argv[2]], "calibration_only": True}
ciuic_cli.apply_ciuic_compression(model, **text, effort="fast", ratio=2.5, progress=say)
"""


def test_fault_35_a_model_compressed_in_place_leaves_no_temporary_files(
    victim: Make, temporary_folder: Path
) -> None:
    v = victim(0, "llama")
    run = subprocess.Popen(
        [sys.executable, "-c", IN_PLACE, str(v.model), str(v.text)], stderr=subprocess.PIPE, text=True
    )
    wait_for(run, "forward")
    run.terminate()
    run.communicate()
    assert run.returncode == -signal.SIGTERM
    assert not list(temporary_folder.glob("ciuic-*"))


@pytest.mark.campaign
def test_fault_35_an_ignored_signal_stays_ignored(victim: Make) -> None:
    v = victim(0, "llama")
    words = command(
        "compress", v.model, v.out, "--calibration", v.text, "--calibration-only", "--ratio", 2.5, *QUICK
    )
    run = subprocess.Popen(["nohup", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(run, "forward")
    run.send_signal(signal.SIGHUP)
    run.communicate()
    assert run.returncode == 0 and v.out.is_dir()


@pytest.mark.campaign
@seeded(2)
def test_fault_43_two_runs_at_once_on_one_output(victim: Make, seed: int) -> None:
    v = victim(seed, "llama")
    words = command(
        "compress", v.model, v.out, "--calibration", v.text, "--calibration-only", "--ratio", 2.5, *QUICK
    )
    runs = [
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [run.communicate()[1] for run in runs]
    codes = sorted(run.returncode for run in runs)
    # The second run meets the first one's lock (5) or its finished output (3).
    assert codes[0] == 0 and codes[1] in (3, 5), said
    assert all("Traceback" not in text for text in said)
    assert invoke("inspect", v.out, "--verify").code == 0
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out"]
