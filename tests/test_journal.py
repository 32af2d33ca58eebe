"""The journal: one process at a time, steps that are finished or absent, and other runs refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.journal import Journal

_HOLD = """
import sys
from pathlib import Path
from ciuic_cli.journal import Journal
with Journal(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_37_a_second_run_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
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
    with Journal(out) as journal:  # the first has ended: the lock is free, whatever its file says
        assert (journal.folder / "lock").read_text() == f"{os.getpid()}\n"


def test_the_lock_of_a_killed_run_does_not_stay(tmp_path: Path) -> None:
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


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="work folder"), Journal(tmp_path / "file" / "out"):
        pass


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300])
def test_steps_come_back_as_they_were_saved(tmp_path: Path, data: bytes) -> None:
    with Journal(tmp_path / "out") as journal:
        assert journal.load("encode/0000001") is None
        journal.save("encode/0000001", data)
    with Journal(tmp_path / "out") as journal:
        assert journal.load("encode/0000001") == data
        journal.save("encode/0000001", b"again")
        assert journal.load("encode/0000001") == b"again"
        assert [path.name for path in (journal.folder / "encode").iterdir()] == ["0000001"]


def test_36_a_torn_or_damaged_step_counts_as_not_done(tmp_path: Path) -> None:
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


def test_going_on_needs_the_same_run(tmp_path: Path) -> None:
    fingerprint = {"seed": 0, "weights": {"a": [1, 2], "b": [3, 4]}, "version": "1"}
    with Journal(tmp_path / "out") as journal:
        assert journal.begin(fingerprint, restart=False) is False
        journal.save("step", b"result")
    with Journal(tmp_path / "out") as journal:
        assert journal.begin(dict(fingerprint), restart=False) is True
        assert journal.load("step") == b"result"
        assert journal.begin(dict(fingerprint), restart=True) is True  # --force keeps what still holds


def test_36_the_differences_are_listed(tmp_path: Path) -> None:
    before = {"seed": 0, "weights": {"a": [1, 2], "b": [3, 4]}, "budget": 7, "same": 1}
    after = {"seed": 5, "weights": {"a": [1, 2], "b": [3, 9], "c": [0, 0]}, "same": 1, "extra": True}
    with Journal(tmp_path / "out") as journal:
        journal.begin(before, restart=False)
        journal.save("step", b"result")
        with pytest.raises(InputError) as caught:
            journal.begin(after, restart=False)
        text = str(caught.value)
        assert "seed: 0 before, 5 now" in text
        assert "weights: b, c changed" in text
        assert "budget: 7 before, None now" in text
        assert "extra: None before, True now" in text
        assert "same" not in text.replace("same command", "")
        assert "--force" in text
        assert journal.load("step") == b"result"  # a refusal destroys nothing


def test_starting_afresh_forgets_every_step_but_not_the_lock(tmp_path: Path) -> None:
    with Journal(tmp_path / "out") as journal:
        journal.begin({"seed": 0}, restart=False)
        journal.save("probe", b"1")
        journal.save("encode/0000000", b"2")
        assert journal.begin({"seed": 1}, restart=True) is False
        assert journal.load("probe") is None
        assert journal.load("encode/0000000") is None
        assert sorted(path.name for path in journal.folder.iterdir()) == ["fingerprint.json", "lock"]
        journal.clear()
        assert [path.name for path in journal.folder.iterdir()] == ["lock"]
        journal.remove()
        assert not journal.folder.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "not json"])
def test_a_torn_fingerprint_is_none(tmp_path: Path, text: str) -> None:
    with Journal(tmp_path / "out") as journal:
        (journal.folder / "fingerprint.json").write_text(text)
        assert journal.begin({"seed": 0}, restart=False) is False


def test_a_kill_during_removal_leaves_no_half_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder loses its name in one step; what then is left of it is swept away by the next run."""
    out = tmp_path / "out"
    with Journal(out) as journal:
        journal.begin({"ratio": 4}, restart=False)
        journal.save("encode/0", b"step")
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", lambda *arguments, **options: None)
            journal.remove()
    assert not journal.folder.exists() and [path.name for path in tmp_path.iterdir()] == [".out.ciuic.ended"]
    with Journal(out) as another:
        assert not another.begin({"ratio": 4}, restart=False)
        another.sweep()
        assert [path.name for path in tmp_path.iterdir()] == [".out.ciuic"]
        another.remove()
    assert list(tmp_path.iterdir()) == []
