"""Fault 37: files, folders, links and mounts that are in the way of the output."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from attacks import (
    Outcome,
    Victim,
    command,
    harmless,
    invoke,
    old_artifact,
    run_with_event,
    snapshot,
)

import ciuic_cli
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.compression.journal import Journal
from ciuic_cli.errors import EnvironmentFault, InputError

Make = Callable[..., Victim]


def old_output(v: Victim) -> Path:
    """An output folder with files of the user in it."""
    v.out.mkdir()
    (v.out / "mine.txt").write_text("mine")
    (v.out / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    return v.out


def refused_output(v: Victim, out: Path, *words: str, options: tuple[object, ...] = ()) -> Outcome:
    """Assert that the output is refused with these words before any work, and that nothing changes."""
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
    v.succeeds()
    (v.out / "mine.txt").write_text("mine")
    assert "--force" in refused_output(v, v.out, "exists already").field("try")
    (v.out / CHECKSUMS).unlink()
    assert "--force" in refused_output(v, v.out, "exists already").field("try")
    assert v.compress("--force").code == 0
    assert not (v.out / "mine.txt").exists()
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out"]


def test_fault_37_force_replaces_no_folder_that_was_not_an_artifact(victim: Make) -> None:
    v = victim(0, "llama")
    old_output(v)
    assert "--force" not in refused_output(v, v.out, "exists already").field("try")
    done = refused_output(v, v.out, "did not write it", options=("--force",))
    assert "move this one away" in done.field("try")
    (v.out / "config.json").write_text("{")
    refused_output(v, v.out, "did not write it", options=("--force",))


def test_fault_37_an_empty_output_is_used(victim: Make) -> None:
    v = victim(0, "llama")
    v.out.mkdir()
    v.succeeds()
    assert sorted(path.name for path in v.folder.iterdir()) == ["model", "out"]


ENDINGS = ("partial", "ciuic", "ciuic.ended", "replaced")


@pytest.mark.parametrize("ending", ENDINGS)
def test_fault_37_an_output_named_like_a_working_folder(victim: Make, ending: str) -> None:
    v = victim(0, "llama")
    for options in ((), ("--force",)):
        refused_output(v, v.folder / f".out.{ending}", "keeps for working folders", options=options)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["artifact", "folder", "file", "link"])
def test_fault_37_what_looks_like_a_working_folder_is_not_removed(
    victim: Make, ending: str, kind: str
) -> None:
    """Neither an artifact of an earlier version nor anything else without the mark of a working folder."""
    v = victim(0, "llama")
    mine = v.folder / f".out.{ending}"
    makers: dict[str, Callable[[], object]] = {
        "artifact": lambda: old_artifact(mine),
        "folder": lambda: old_output(v).rename(mine),
        "file": lambda: mine.write_text("mine"),
        "link": lambda: mine.symlink_to(v.text.parent),
    }
    makers[kind]()
    before = snapshot(v.folder)
    if ending in ("partial", "ciuic"):
        refused_output(v, v.out, "taken")
    else:
        v.succeeds()
        shutil.rmtree(v.out)
    assert snapshot(v.folder) == before


def test_fault_37_an_output_around_another_run_is_not_replaced(victim: Make) -> None:
    v = victim(0, "llama")
    old_artifact(v.out)
    with Journal(v.out / "deep" / "inner") as journal:
        journal.save("step", b"result")
        before = snapshot(v.folder)
        done = v.compress("--force")
        assert done.code == 5 and f"PID {os.getpid()}" in done.stderr, done.stderr
        assert done.field("try") and snapshot(v.folder) == before
    done = refused_output(v, v.out, "working folder inside", options=("--force",))
    assert done.field("file") == str(journal.folder)


def test_fault_37_an_output_inside_a_working_folder(victim: Make) -> None:
    v = victim(0, "llama")
    with Journal(v.folder / "x") as journal:
        journal.save("step", b"result")
    refused_output(v, journal.folder / "deep" / "out", "working folder of another run")


def test_fault_37_a_run_that_begins_inside_the_output_survives(victim: Make) -> None:
    v = victim(0, "llama")
    old_artifact(v.out)
    with Journal(v.out / "inner") as journal:
        shutil.move(journal.folder, v.folder / "begun")

        def begin() -> None:
            (v.folder / "begun").rename(journal.folder)

        with pytest.raises(EnvironmentFault, match="another run"):
            run_with_event(v, "write", begin, force=True)
        assert journal.folder.is_dir()


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


def test_fault_37_the_output_holds_what_the_run_reads(victim: Make) -> None:
    v = victim(0, "llama")
    hub = v.folder / "hub"
    blobs, snapshot_ = hub / "blobs", hub / "snapshots" / "r"
    old_artifact(blobs)
    snapshot_.mkdir(parents=True)
    for number, file in enumerate(sorted(v.model.iterdir())):
        file.rename(blobs / str(number))
        (snapshot_ / file.name).symlink_to(f"../../blobs/{number}")
    v.model.rmdir()
    v.model = snapshot_
    for options in ((), ("--force",)):
        refused_output(v, blobs, "the input lies inside the output", options=options)
    old_artifact(v.out)
    text = v.out / "text.txt"
    text.write_text("text")
    options = ("--force", "--calibration", text, "--calibration-only")
    assert "text.txt" in refused_output(v, v.out, "inside the output", options=options).field("file")


def test_fault_37_paths_that_cannot_be_written(victim: Make) -> None:
    v = victim(0, "llama")
    (v.folder / "file").write_text("mine")
    (v.folder / "loop").symlink_to("loop")
    for out, words in {
        v.folder / "file" / "x" / "out": "below a file",
        v.folder / "loop": "circle of symbolic links",
        v.folder / "loop" / "out": "circle of symbolic links",
        v.folder / os.fsdecode(b"\xff"): "not UTF-8",
        v.folder / ("o" * 250): "too long",
        v.folder / ("o" * 300) / "out": "too long",
    }.items():
        for options in ((), ("--force",)):
            refused_output(v, out, words, options=options)
    assert v.compress(out=v.folder / ("o" * 242)).code == 0


def test_fault_37_the_output_of_another_user_in_a_sticky_folder(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(0, "llama")
    old_artifact(v.out)
    v.folder.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: v.out.stat().st_uid + 1)
    refused_output(v, v.out, "another user", options=("--force",))


def mount_points() -> list[str]:
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_fault_37_the_output_is_a_mount_point(victim: Make, options: tuple[str, ...]) -> None:
    v = victim(0, "llama")
    place = next(Path(name) for name in mount_points() if os.path.isdir(name))
    refused_output(v, place, "mounted there", options=options)


def test_fault_37_a_mount_inside_the_output(victim: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """--force would delete the files on the mounted file system and then fail to remove the folder."""
    v = victim(0, "llama")
    old_artifact(out := v.out)
    found = SimpleNamespace(mountpoint=str(out / "data"))
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [found])
    assert str(out / "data") in refused_output(v, out, "mounted there", options=("--force",)).field("file")


@pytest.mark.parametrize(
    ("kind", "force"), [("artifact", False), ("folder", False), ("folder", True), ("file", True)]
)
def test_fault_37_an_output_that_appears_during_the_run_is_not_touched(
    victim: Make, kind: str, force: bool
) -> None:
    v = victim(0, "llama")
    makers: dict[str, Callable[[], object]] = {
        "folder": lambda: old_output(v),
        "artifact": lambda: old_artifact(v.out),
        "file": lambda: v.out.write_text("mine"),
    }
    with pytest.raises(EnvironmentFault, match="appeared while the run was working"):
        run_with_event(v, "write", makers[kind], force=force)
    appeared = v.folder / "appeared"
    v.out.rename(appeared)
    assert sorted(path.name for path in v.folder.iterdir()) == [".out.ciuic", "appeared", "model"]
    makers[kind]()
    assert appeared.is_file() or snapshot(appeared) == snapshot(v.out)
    v.out.rename(v.folder / "again")
    again = v.compress(*(["--force"] if force else []))
    assert again.code == 0 and "continuing" in again.stderr, again.stderr
    assert not (v.folder / ".out.ciuic").exists()


def test_fault_37_an_old_output_that_cannot_be_removed_is_named(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = victim(0, "llama")
    old_artifact(v.out)
    unlink = os.unlink

    def refusing(path: Any, *arguments: Any, **options: Any) -> None:
        if path == CHECKSUMS:
            raise PermissionError(1, os.strerror(1), path)
        unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", refusing)
    done = v.compress("--force")
    assert done.code == 0, done.stderr
    left = v.folder / ".out.partial"
    done.says("cannot be removed", str(left))
    assert invoke("inspect", v.out, "--verify").code == 0
    assert sorted(path.name for path in v.folder.iterdir()) == [".out.partial", "model", "out"]
    again = v.compress("--force")
    assert again.code == 5 and again.field("file") == str(left) and "forward" not in again.stderr


@pytest.mark.parametrize("options", [(), ("--force",)])
@pytest.mark.parametrize("what", ["parent", "output"])
def test_fault_37_the_output_is_read_only(victim: Make, options: tuple[str, ...], what: str) -> None:
    v = victim(0, "llama")
    parent = v.folder / "parent"
    out = parent / "out"
    out.mkdir(parents=True)
    (out / CHECKSUMS).write_text("mine")
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
    old_artifact(elsewhere / "real")
    v.out.symlink_to(elsewhere / "real")
    refused_output(v, v.out, "exists already")
    assert v.compress("--force").code == 0
    assert v.out.is_symlink() and (v.out / "config.json").exists()
    assert [path.name for path in elsewhere.iterdir()] == ["real"]


@pytest.mark.parametrize("existing", [False, True])
def test_fault_37_a_second_run_names_the_first_one(victim: Make, existing: bool) -> None:
    v = victim(0, "llama")
    if existing:
        old_artifact(v.out)
    first = subprocess.Popen(
        command(*v.arguments(), "--nsamples", 64, *(["--force"] if existing else [])),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stderr is not None
        next(line for line in first.stderr if line.startswith("forward"))
        first.send_signal(signal.SIGSTOP)
        for out, options in product((v.out, v.out / "inside"), ((), ("--force",))):
            done = invoke(*v.arguments(out), *options)
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
            # The folder may be exchanged between opening and last read; then the error must say so.
            assert not isinstance(error, InputError) or error.remedy
            continue
        assert torch.isfinite(found(torch.arange(3, 20)[None]).logits).all()
        reads += 1
        time.sleep(0.05)
    assert run.returncode == 0 and reads > 0
    assert invoke("inspect", v.out, "--verify").code == 0
