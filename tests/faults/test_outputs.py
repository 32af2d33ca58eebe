"""Faults 36 and 37: what an earlier run left behind, and what lies where the output is to go."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attacks import (
    Outcome,
    Victim,
    command,
    harmless,
    invoke,
    seeded,
    snapshot,
    weights,
)

import ciuic_cli
from ciuic_cli.errors import InputError
from ciuic_cli.pipeline import compress

Make = Callable[..., Victim]


# --- 36: resuming


def start_and_stop(v: Victim, *options: object) -> None:
    """A run that is interrupted when its arms are priced."""

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "encode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(
            v.model,
            v.out,
            calibration=[v.text],
            ratio=2.5,
            nsamples=4,
            seqlen=64,
            effort="fast",
            progress=interrupt,
        )


@seeded(1, campaign=4)
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (["--seed", 7], "seed"),
        (["--ratio", 2.4], "budget"),
        (["--bits", "4,5"], "bits"),
        (["--prune", "off"], "prune"),
        (["--seqlen", 60], "seqlen"),
        ("text", "calibration"),
        ("weights", "model.safetensors"),
        ("config", "config"),
    ],
)
def test_fault_36_a_changed_run_is_refused_with_the_difference(
    victim: Make, tmp_path: Path, seed: int, change: object, difference: str
) -> None:
    v = victim(seed, "llama")
    start_and_stop(v)
    options = change if isinstance(change, list) else []
    if change == "text":
        words = v.text.read_text()
        v.text = tmp_path / "other.txt"
        v.text.write_text(words[::-1])
    elif change == "weights":
        v.edit_tensors(lambda tensors: tensors["lm_head.weight"].mul_(1.5))
    elif change == "config":
        v.edit_config(rms_norm_eps=2e-6)
    before = snapshot(v.folder)
    done = v.compress(*options)
    assert done.code == 3, done.stderr
    harmless(done)
    done.says("unfinished run", difference)
    assert "--force" in done.field("try")
    assert snapshot(v.folder) == before
    assert v.compress(*options, "--force").code == 0


@seeded(4, campaign=16)
def test_fault_36_a_torn_journal_goes_on_from_the_last_good_step(victim: Make, seed: int) -> None:
    v = victim(seed, "llama")
    assert v.compress(out=v.folder / "whole").code == 0
    start_and_stop(v)
    journal = v.folder / ".out.ciuic"
    files = sorted(path for path in journal.rglob("*") if path.is_file() and path.stat().st_size)
    for path in v.random.sample(files, v.random.randrange(1, len(files))):
        size = path.stat().st_size
        if v.random.randrange(2):
            os.truncate(path, v.random.randrange(size))
        else:
            damaged = bytearray(path.read_bytes())
            damaged[v.random.randrange(size)] ^= 1 << v.random.randrange(8)
            path.write_bytes(damaged)
    done = v.compress("--force")
    assert done.code == 0, done.stderr
    assert weights(v.out) == weights(v.folder / "whole")
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out", "whole"]


def test_fault_36_steps_of_an_unknown_run_are_not_used(victim: Make) -> None:
    v = victim(0, "llama")
    start_and_stop(v)
    (v.folder / ".out.ciuic" / "fingerprint.json").write_text("")
    assert v.compress("--seed", 3).code == 0
    whole = v.folder / "whole"
    assert v.compress("--seed", 3, out=whole).code == 0
    assert weights(v.out) == weights(whole)


# --- 37: outputs


def old_output(v: Victim) -> Path:
    v.out.mkdir()
    (v.out / "mine.txt").write_text("mine")
    return v.out


def refused_output(v: Victim, out: Path, *words: str, options: tuple[object, ...] = ()) -> Outcome:
    before = snapshot(v.folder)
    done = invoke(*v.arguments(out), *options)
    assert done.code == 3, done.stderr
    harmless(done)
    done.says(*words)
    assert done.field("file") and done.field("try") and "forward" not in done.stderr
    assert snapshot(v.folder) == before
    return done


def test_fault_37_the_output_exists(victim: Make) -> None:
    v = victim(0, "llama")
    old_output(v)
    assert "--force" in refused_output(v, v.out, "exists already").field("try")
    assert v.compress("--force").code == 0
    assert not (v.out / "mine.txt").exists()
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out"]


def test_fault_37_the_output_is_a_file(victim: Make) -> None:
    v = victim(0, "llama")
    v.out.write_text("mine")
    for options in ((), ("--force",)):
        refused_output(v, v.out, "is a file", options=options)


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_fault_37_the_output_is_the_input_or_around_it(victim: Make, options: tuple[str, ...]) -> None:
    v = victim(0, "llama")
    (v.folder / "link").symlink_to("model")
    for out in (
        v.model,
        v.model / "sub" / "out",
        v.folder / "link",
        v.model / ".",
        v.folder / "x" / ".." / "model",
    ):
        refused_output(v, out, "the output is the input", options=options)
    for out in (v.folder, v.folder.parent):
        refused_output(v, out, "the input lies inside the output", options=options)


@pytest.mark.parametrize("options", [(), ("--force",)])
@pytest.mark.parametrize("what", ["parent", "output"])
def test_fault_37_the_output_is_read_only(victim: Make, options: tuple[str, ...], what: str) -> None:
    v = victim(0, "llama")
    parent = v.folder / "parent"
    out = parent / "out"
    out.mkdir(parents=True)
    (out / "mine.txt").write_text("mine")
    if not options and what == "parent":
        shutil.rmtree(out)
    folder = parent if what == "parent" else out
    folder.chmod(0o555)
    try:
        refused_output(
            v, out, "exists already" if what == "output" and not options else "read-only", options=options
        )
    finally:
        folder.chmod(0o755)


def test_fault_37_a_link_keeps_pointing_where_it_does(victim: Make) -> None:
    v = victim(0, "llama")
    elsewhere = v.folder / "disk"
    (elsewhere / "real").mkdir(parents=True)
    (elsewhere / "real" / "old.txt").write_text("old")
    v.out.symlink_to(elsewhere / "real")
    refused_output(v, v.out, "exists already")
    assert v.compress("--force").code == 0
    assert v.out.is_symlink() and (v.out / "config.json").exists()
    assert [path.name for path in elsewhere.iterdir()] == ["real"]


def test_fault_37_a_second_run_names_the_first_one(victim: Make) -> None:
    v = victim(0, "llama")
    first = subprocess.Popen(
        command(*v.arguments(), "--nsamples", 64),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stderr is not None
        next(line for line in first.stderr if line.startswith("forward"))
        first.send_signal(signal.SIGSTOP)
        for options in ((), ("--force",)):
            done = invoke(*v.arguments(), *options)
            assert done.code == 5, done.stderr
            done.says(f"PID {first.pid}")
            assert done.field("try")
    finally:
        first.send_signal(signal.SIGCONT)
        first.terminate()
        first.wait()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_fault_37_file_modes_follow_the_umask(victim: Make, mask: int) -> None:
    v = victim(0, "llama")
    for file in v.model.iterdir():
        file.chmod(0o640)
    earlier = os.umask(mask)
    try:
        v.succeeds()
    finally:
        os.umask(earlier)
    assert stat.S_IMODE(v.out.stat().st_mode) == 0o777 & ~mask
    assert {stat.S_IMODE(file.stat().st_mode) for file in v.out.iterdir()} == {0o666 & ~mask}


@pytest.mark.campaign
def test_fault_37_a_reader_during_a_replacement_sees_one_whole_artifact(victim: Make) -> None:
    v = victim(0, "llama")
    v.succeeds()
    run = subprocess.Popen(
        command(*v.arguments(), "--force", "--seed", 5),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    reads = 0
    while run.poll() is None:
        try:
            found = ciuic_cli.load(v.out)
        except (InputError, OSError) as error:
            # Between its opening and its last read the folder may be exchanged: then it must say so.
            assert not isinstance(error, InputError) or error.remedy
            continue
        assert torch.isfinite(found(torch.arange(3, 20)[None]).logits).all()
        reads += 1
        time.sleep(0.05)
    assert run.returncode == 0 and reads > 0
    assert invoke("inspect", v.out, "--verify").code == 0
