"""Fault 36: leftovers of earlier runs, and inputs that change between two runs or during one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from attacks import (
    Victim,
    harmless,
    run_with_event,
    seeded,
    snapshot,
    weights,
)

from ciuic_cli.compression.task import Task
from ciuic_cli.errors import InputError
from ciuic_cli.process.signals import interruptible

Make = Callable[..., Victim]


def start_and_stop(v: Victim) -> None:
    """Start a run and interrupt it while it encodes."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_with_event(v, "encode", interrupt)


def change_weights(v: Victim, scale: float = 1.5) -> None:
    """Change weights but keep the file's size and modification time."""
    file = v.shards[0]
    before = file.stat()
    v.edit_tensors(lambda tensors: tensors["lm_head.weight"].mul_(scale))
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@seeded(1, campaign=4)
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (["--seed", 7], "seed: 0 before, 7 now"),
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
        change_weights(v)
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


def test_fault_36_weights_that_change_during_the_run_give_no_output(victim: Make) -> None:
    v = victim(0, "llama")
    with pytest.raises(InputError, match="changed during the run") as caught:
        run_with_event(v, "write", lambda: change_weights(v))
    assert caught.value.file == str(v.shards[0])
    assert [path.name for path in v.folder.iterdir()] == ["model"]


def test_fault_35_a_signal_lost_in_the_last_step_publishes_nothing(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops a KeyboardInterrupt from a `__del__`. The signal is remembered and checked before publishing."""
    v = victim(0, "llama")
    with interruptible() as interruption:
        lost = partial(setattr, interruption, "signal", signal.SIGTERM)
        monkeypatch.setattr(Task, "require_unchanged", lambda task: lost())
        with pytest.raises(KeyboardInterrupt):
            run_with_event(v, "encoding", lambda: None)
        interruption.signal = None
    assert not v.out.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("how", ["removed", "changed"])
def test_fault_36_companions_that_change_during_the_run_give_no_output(
    victim: Make, name: str, how: str
) -> None:
    v = victim(0, "llama")
    place = v.model / name
    if not place.exists():
        place.write_text("{}")

    def change() -> None:
        if how == "removed":
            place.unlink()
        else:
            place.write_text(place.read_text() + " ")

    with pytest.raises(InputError, match="changed during the run") as caught:
        run_with_event(v, "write", change)
    assert caught.value.file == str(place)
    assert [path.name for path in v.folder.iterdir()] == ["model"]


def test_a_refused_run_removes_the_folders_that_it_made(victim: Make) -> None:
    v = victim(0, "llama")
    v.out = v.folder / "a" / "b" / "out"
    with pytest.raises(InputError):
        run_with_event(v, "write", lambda: change_weights(v))
    assert [path.name for path in v.folder.iterdir()] == ["model"]


def test_fault_36_steps_of_an_unknown_run_are_not_used(victim: Make) -> None:
    v = victim(0, "llama")
    start_and_stop(v)
    (v.folder / ".out.ciuic" / "fingerprint.json").write_text("")
    assert v.compress("--seed", 3).code == 0
    whole = v.folder / "whole"
    assert v.compress("--seed", 3, out=whole).code == 0
    assert weights(v.out) == weights(whole)
