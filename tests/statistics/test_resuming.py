"""Sweeps that are killed between any two layers go on behind the last finished one, to the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.marks import Marks

STEPS = 2 * 3 + 2
"""Of a model of three layers: forward, head, backward, embedding."""
BATCHES = torch.randint(0, 250, (6, 24), generator=torch.Generator().manual_seed(1))


class Killed(BaseException):
    pass


class Memory:
    """A journal in memory; `kill_at` says at which step's mark the process dies, before or after it is there."""

    def __init__(self) -> None:
        self.marks: dict[str, bytes] = {}
        self.kill_at: tuple[int, bool] | None = None

    def load(self, name: str) -> bytes | None:
        return self.marks.get(name)

    def save(self, name: str, data: bytes) -> None:
        here = self.kill_at is not None and name.endswith(f"-{self.kill_at[0]:05d}")
        if not here or (self.kill_at and self.kill_at[1]):
            self.marks[name] = data
        if here:
            self.kill_at = None
            raise Killed


def collect(checkpoint: Path, folder: Path, journal: Memory) -> tuple[dict[str, bytes], list[str]]:
    """Bytes of the statistics, and the steps of which progress was reported."""
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    collect_statistics(
        map_model(open_checkpoint(checkpoint)), BATCHES, folder, device=torch.device("cpu"), seed=0, journal=journal,
        progress=lambda what, done, total: said.append(f"{what} {done}"),
    )  # fmt: skip
    assert all(path.is_file() for path in folder.iterdir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}, said


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("deepseek_v3", num_hidden_layers=3)


def test_every_step_is_marked_and_a_kill_at_any_of_them_loses_none_before(
    checkpoint: Path, tmp_path: Path
) -> None:
    whole = Memory()
    expected, said = collect(checkpoint, tmp_path / "whole", whole)
    assert len(whole.marks) == STEPS
    assert said == [f"forward {n}" for n in (1, 2, 3)] + [f"backward {n}" for n in (1, 2, 3)]
    reported = [step for step in range(STEPS) if step not in (3, STEPS - 1)]
    for step in range(STEPS):
        for marked in (False, True):
            folder, journal = tmp_path / f"{step}-{marked}", Memory()
            journal.kill_at = (step, marked)
            with pytest.raises(Killed):
                collect(checkpoint, folder, journal)
            found, rest = collect(checkpoint, folder, journal)
            assert found == expected
            assert len(rest) == sum(1 for later in reported if later >= step + marked)


def test_a_kill_while_the_rest_of_a_killed_run_is_done(checkpoint: Path, tmp_path: Path) -> None:
    expected, _ = collect(checkpoint, tmp_path / "whole", Memory())
    folder, journal = tmp_path / "folder", Memory()
    for step in range(STEPS):
        journal.kill_at = (step, step % 2 == 0)
        with pytest.raises(Killed):
            collect(checkpoint, folder, journal)
    assert collect(checkpoint, folder, journal)[0] == expected


@pytest.mark.parametrize(
    "what", ["stream-0/hidden/0.0", "stream-0/gradient/1.0", "lm_head.weight.safetensors"]
)
def test_what_a_crash_of_the_machine_tore_is_done_again(checkpoint: Path, tmp_path: Path, what: str) -> None:
    expected, everything = collect(checkpoint, tmp_path / "whole", Memory())
    folder, journal = tmp_path / "folder", Memory()
    journal.kill_at = (STEPS - 3, True)
    with pytest.raises(Killed):
        collect(checkpoint, folder, journal)
    torn = folder / what
    torn.write_bytes(torn.read_bytes()[:-1] + b"\xff")
    found, said = collect(checkpoint, folder, journal)
    assert found == expected
    assert said == everything[-len(said) :]


def test_the_last_step_is_one_that_all_workers_marked() -> None:
    class Pair(Workers):
        """The first of two workers, the other of which has marked the steps 0 to 3."""

        def gather(self, value: object) -> list[object]:
            return [value, {0, 1, 2, 3}]

    journal = Memory()
    for step in range(5):
        Marks(journal, Pair(0, 2)).save(step, {"step": step})
    found = list(Marks(journal, Pair(0, 2)).found(10))
    assert [step for step, _ in found] == [3, 2, 1, 0]
    assert [state["step"] for _, state in found] == [3, 2, 1, 0]
    assert not list(Marks(journal, Workers()).found(10))  # another number of workers has other shares
    assert not list(Marks(None, Workers()).found(10))


def test_marks_of_an_earlier_run_hide_none_of_the_last_one(checkpoint: Path, tmp_path: Path) -> None:
    """A run came far, its files were lost; the one after it is killed before it comes as far."""
    expected, _ = collect(checkpoint, tmp_path / "whole", Memory())
    folder, journal = tmp_path / "folder", Memory()
    for step in (STEPS - 2, 2):
        journal.kill_at = (step, True)
        with pytest.raises(Killed):
            collect(checkpoint, folder, journal)
        if step != 2:
            shutil.rmtree(folder)
    found, said = collect(checkpoint, folder, journal)
    assert found == expected
    assert said == [f"backward {n}" for n in (1, 2, 3)]
