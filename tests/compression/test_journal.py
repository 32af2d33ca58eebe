"""The journal: one process at a time, steps that are finished or absent, and refusal of other runs' journals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ciuic_cli.compression.journal import Journal
from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.process import work_folders
from ciuic_cli.process.atomic_files import remove_path
from ciuic_cli.process.work_folders import MARK

_HOLD = """
import sys
from pathlib import Path
from ciuic_cli.compression.journal import Journal
with Journal(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_37_a_second_run_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", _HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(EnvironmentFault, match=rf"PID {first.pid}\b") as caught, Journal(out):
            pass
        assert caught.value.exit_code == 5
        assert caught.value.file == str(out)
        first.stdin.close()
    with Journal(
        out
    ) as journal:  # the first run has ended: the lock is free, although its file still names the PID
        assert (journal.folder / "lock").read_text() == f"{os.getpid()}\n"


def test_a_killed_run_releases_the_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", _HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
    with Journal(out) as journal:
        assert journal.begin({"seed": 0}, restart=False) is False


def test_two_outputs_do_not_block_each_other(tmp_path: Path) -> None:
    with Journal(tmp_path / "a") as a, Journal(tmp_path / "b") as b:
        a.save("step", b"a")
        assert b.load("step") is None


def test_a_work_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="work folder"), Journal(tmp_path / "file" / "out"):
        pass


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300])
def test_saved_steps_are_loaded_unchanged(tmp_path: Path, data: bytes) -> None:
    with Journal(tmp_path / "out") as journal:
        assert journal.load("encode/0000001") is None
        journal.save("encode/0000001", data)
    with Journal(tmp_path / "out") as journal:
        assert journal.load("encode/0000001") == data
        journal.save("encode/0000001", b"again")
        assert journal.load("encode/0000001") == b"again"
        assert [path.name for path in (journal.folder / "encode").iterdir()] == ["0000001"]


def test_36_a_torn_or_damaged_step_counts_as_absent(tmp_path: Path) -> None:
    with Journal(tmp_path / "out") as journal:
        journal.save("first", b"first result")
        journal.save("second", b"second result")
        path = journal.folder / "second"
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert journal.load("second") is None
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 4
            path.write_bytes(damaged)
            assert journal.load("second") is None
        assert journal.load("first") == b"first result"


def test_a_run_continues_with_the_same_fingerprint(tmp_path: Path) -> None:
    fingerprint = {"seed": 0, "weights": {"a": [1, 2], "b": [3, 4]}, "version": "1"}
    with Journal(tmp_path / "out") as journal:
        assert journal.begin(fingerprint, restart=False) is False
        journal.save("step", b"result")
    with Journal(tmp_path / "out") as journal:
        assert journal.begin(dict(fingerprint), restart=False) is True
        assert journal.load("step") == b"result"
        assert journal.begin(dict(fingerprint), restart=True) is True  # --force keeps steps of the same run


def test_a_run_without_finished_steps_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Journal(tmp_path / "out") as journal:
        journal.begin({"seed": 0}, restart=False)
        (journal.folder / "statistics").mkdir()
        assert not journal.has_steps()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), Journal(tmp_path / "out") as journal:
        journal.begin({"seed": 0}, restart=False)
        journal.save("many/0", b"result")
        assert journal.has_steps()
        raise ZeroDivisionError
    assert journal.load("many/0") == b"result"


def test_36_the_differences_are_listed(tmp_path: Path) -> None:
    before = {
        "options": {"seed": 0, "rank": 1, "ratio": 3.0000012, "share": 0.1},
        "weights": {"a": "1" * 64, "b": "2" * 64},
        "budget": 7,
        "same": 1,
        "chosen": {"seed": 0},
    }
    after = {
        "options": {"seed": 5, "rank": 1, "ratio": 4.9999996, "share": 0.10000001},
        "weights": {"a": "1" * 64, "b": "3" * 64, "c": "4" * 64},
        "same": 1,
        "extra": True,
        "chosen": {"seed": 5},
    }
    with Journal(tmp_path / "out") as journal:
        journal.begin(before, restart=False)
        journal.save("step", b"result")
        with pytest.raises(InputError) as caught:
            journal.begin(after, restart=False)
        text = str(caught.value)
        assert text.count("seed: 0 before, 5 now") == 1 and "rank" not in text
        assert "ratio: 3 before, 5 now" in text and "share: 0.1 before, 0.10000001 now" in text
        assert "b changed; c changed" in text
        assert "budget: 7 before, None now" in text
        assert "extra: None before, True now" in text
        assert "same" not in text.replace("same command", "")
        assert "--force" in text
        assert journal.load("step") == b"result"  # a refusal removes nothing


def test_restarting_removes_every_step_but_not_the_lock(tmp_path: Path) -> None:
    with Journal(tmp_path / "out") as journal:
        journal.begin({"seed": 0}, restart=False)
        journal.save("probe", b"1")
        journal.save("encode/0000000", b"2")
        assert journal.begin({"seed": 1}, restart=True) is False
        assert journal.load("probe") is None
        assert journal.load("encode/0000000") is None
        assert sorted(path.name for path in journal.folder.iterdir()) == [MARK, "fingerprint.json", "lock"]
        journal.clear()
        assert sorted(path.name for path in journal.folder.iterdir()) == [MARK, "lock"]
        journal.remove()
        assert not journal.folder.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "not json", "[" * 100_000, "[]"])
def test_a_torn_fingerprint_counts_as_absent(tmp_path: Path, text: str) -> None:
    with Journal(tmp_path / "out") as journal:
        (journal.folder / "fingerprint.json").write_text(text)
        assert journal.begin({"seed": 0}, restart=False) is False


def test_a_kill_during_removal_leaves_no_partial_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is renamed first; the next run removes it under its new name."""
    out = tmp_path / "out"
    with Journal(out) as journal:
        journal.begin({"ratio": 4}, restart=False)
        journal.save("encode/0", b"step")
        with monkeypatch.context() as patch:
            patch.setattr(work_folders, "remove", lambda folder: None)
            journal.remove()
    assert not journal.folder.exists() and [path.name for path in tmp_path.iterdir()] == [".out.ciuic.ended"]
    with Journal(out) as another:
        assert not another.begin({"ratio": 4}, restart=False)
        another.sweep()
        assert [path.name for path in tmp_path.iterdir()] == [".out.ciuic"]
        another.remove()
    assert list(tmp_path.iterdir()) == []


SPOILS: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: (path / "x").mkdir(parents=True),
    "loop": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "file": lambda path: path.write_text("mine"),
    "link": lambda path: path.symlink_to(path.parents[2] / "elsewhere"),
}


@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize(
    "name",
    [
        "fingerprint.json",
        "lock",
        "sealed",
        "step",
        "many",
        "many/0",
        "many/1",
        ".step.part",
        "many/.1.part",
        "many/x.safetensors",
        MARK,
    ],
)
def test_36_anything_but_a_finished_step_counts_as_absent(tmp_path: Path, name: str, kind: str) -> None:
    """Nothing hangs, nothing outside the journal changes, and every step can be done again."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0").write_text("mine")
    steps = ("step", "sealed", "many/0", "many/1")
    parent = tmp_path / "parent"
    with Journal(parent / "out") as journal:
        journal.begin({"seed": 0}, restart=False)
        for step in steps[:-1]:
            journal.save(step, b"result")
    remove_path(journal.folder / name)
    SPOILS[kind](journal.folder / name)
    with Journal(parent / "out") as journal:
        assert not journal.published()
        resumed = journal.begin({"seed": 0}, restart=False)
        assert resumed == (name != "fingerprint.json")
        paths = list(journal.folder.rglob("*"))
        assert all(path.is_file() or (path.is_dir() and "." not in path.name) for path in paths)
        assert not any(path.is_symlink() for path in paths)
        for step in steps:
            whole = resumed and step != "many/1" and not f"{step}/".startswith(f"{name}/")
            assert journal.load(step) == (b"result" if whole else None)
            journal.save(step, b"again")
            assert journal.load(step) == b"again"
        assert not list(journal.folder.rglob("*.part"))
        journal.remove()
    assert list(parent.iterdir()) == []
    assert (elsewhere / "0").read_text() == "mine"


@pytest.mark.parametrize("kind", [*SPOILS, "files"])
def test_37_what_ciuic_did_not_make_is_no_journal(tmp_path: Path, kind: str) -> None:
    """It is neither used nor removed, also where a journal gets another name before its removal."""
    parent, elsewhere = tmp_path / "parent" / "deep", tmp_path / "elsewhere"
    parent.mkdir(parents=True)
    with Journal(tmp_path / "out") as journal:
        journal.begin({"seed": 0}, restart=False)
        journal.save("step", b"result")
    journal.folder.rename(elsewhere)
    mine = Journal(parent / "out").folder
    if kind == "files":
        mine.mkdir()
        for name in ("lock", "fingerprint.json", "step"):
            (mine / name).write_text("mine")
    else:
        SPOILS[kind](mine)
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="taken") as caught, Journal(parent / "out"):
        pass
    assert caught.value.file == str(mine) and "move it away" in (caught.value.remedy or "")
    assert snapshot(tmp_path) == before
    mine.rename(Journal(parent / "out").ended)
    before = snapshot(tmp_path)
    with Journal(parent / "out") as journal:
        assert journal.begin({"seed": 0}, restart=False) is False
        journal.sweep()
        journal.remove()
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of everything below a folder that is no folder."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {str(path): (path.lstat().st_ino, path.lstat().st_ctime_ns) for path in files}


def test_a_lock_without_a_run_leaves_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
