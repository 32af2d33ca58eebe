"""Statistics that are killed at any step resume after the last finished step, with the same bytes in the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.layer_stream import LayerStream
from ciuic_cli.process.threads import threads
from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.marks import Marks

STEPS = 2 * 3 + 2
"""Steps of a model of three layers: forward, head, backward, embedding."""
BATCHES = torch.randint(0, 250, (6, 24), generator=torch.Generator().manual_seed(1))


class Killed(BaseException):
    pass


class MemoryJournal:
    """A journal in memory. kill_at: at which step's mark the process dies, and whether the mark is saved before."""

    def __init__(self) -> None:
        self.marks: dict[str, bytes] = {}
        self.kill_at: tuple[int, bool] | None = None

    def load(self, name: str) -> bytes | None:
        return self.marks.get(name)

    def save(self, name: str, data: bytes) -> None:
        dies = self.kill_at is not None and name.endswith(f"-{self.kill_at[0]:05d}")
        if not dies or (self.kill_at and self.kill_at[1]):
            self.marks[name] = data
        if dies:
            self.kill_at = None
            raise Killed


def collect(
    checkpoint: Path, folder: Path, journal: MemoryJournal, chunk: int = 2, gradient_every: int = 2
) -> tuple[dict[str, bytes], list[str]]:
    """Bytes of the statistics' files, and the steps of which progress was reported."""
    folder.mkdir(exist_ok=True)
    reported: list[str] = []
    collect_statistics(
        map_model(open_checkpoint(checkpoint)), BATCHES, folder, device=torch.device("cpu"), seed=0, journal=journal,
        chunk=chunk, gradient_every=gradient_every,
        progress=lambda what, done, total: reported.append(f"{what} {done}"),
    )  # fmt: skip
    assert all(path.is_file() for path in folder.iterdir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}, reported


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("deepseek_v3", num_hidden_layers=3)


def test_every_step_is_marked_and_a_kill_loses_no_marked_step(checkpoint: Path, tmp_path: Path) -> None:
    whole = MemoryJournal()
    expected, reported = collect(checkpoint, tmp_path / "whole", whole)
    assert len(whole.marks) == STEPS
    assert reported == [f"forward {n}" for n in (1, 2, 3)] + [f"backward {n}" for n in (1, 2, 3)]
    steps_with_progress = [step for step in range(STEPS) if step not in (3, STEPS - 1)]
    for step in range(STEPS):
        for marked in (False, True):
            folder, journal = tmp_path / f"{step}-{marked}", MemoryJournal()
            journal.kill_at = (step, marked)
            with pytest.raises(Killed):
                collect(checkpoint, folder, journal)
            found, resumed = collect(checkpoint, folder, journal)
            assert found == expected
            assert len(resumed) == sum(1 for later in steps_with_progress if later >= step + marked)


def test_a_run_that_is_killed_at_every_step(checkpoint: Path, tmp_path: Path) -> None:
    expected, _ = collect(checkpoint, tmp_path / "whole", MemoryJournal())
    folder, journal = tmp_path / "folder", MemoryJournal()
    for step in range(STEPS):
        journal.kill_at = (step, step % 2 == 0)
        with pytest.raises(Killed):
            collect(checkpoint, folder, journal)
    assert collect(checkpoint, folder, journal)[0] == expected


@pytest.mark.parametrize(
    "file",
    [
        "stream-0/hidden/0.0",
        "stream-0/gradient/1.0",
        "lm_head.weight.outputs.safetensors",
        "model.layers.0.self_attn.o_proj.weight.inputs.safetensors",
    ],
)
def test_steps_with_a_damaged_file_are_repeated(checkpoint: Path, tmp_path: Path, file: str) -> None:
    expected, everything = collect(checkpoint, tmp_path / "whole", MemoryJournal())
    folder, journal = tmp_path / "folder", MemoryJournal()
    journal.kill_at = (STEPS - 3, True)
    with pytest.raises(Killed):
        collect(checkpoint, folder, journal)
    damaged = folder / file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    found, repeated = collect(checkpoint, folder, journal)
    assert found == expected
    assert repeated == everything[-len(repeated) :]


def test_only_steps_that_all_workers_marked_count() -> None:
    class Pair(Workers):
        """The first of two workers; the second has marked the steps 0 to 3."""

        def gather(self, value: object) -> list[object]:
            return [value, {0, 1, 2, 3}]

    journal = MemoryJournal()
    for step in range(5):
        Marks(journal, Pair(0, 2)).save(step, {"step": step})
    found = list(Marks(journal, Pair(0, 2)).common_steps(10))
    assert [step for step, _ in found] == [3, 2, 1, 0]
    assert [state["step"] for _, state in found] == [3, 2, 1, 0]
    assert not list(Marks(journal, Workers()).common_steps(10))  # another number of workers has other shares
    assert not list(Marks(None, Workers()).common_steps(10))


def test_marks_of_an_earlier_run_do_not_hide_those_of_the_last_run(checkpoint: Path, tmp_path: Path) -> None:
    """A run is killed late and its files are lost; the next run is killed earlier."""
    expected, _ = collect(checkpoint, tmp_path / "whole", MemoryJournal())
    folder, journal = tmp_path / "folder", MemoryJournal()
    for step in (STEPS - 2, 2):
        journal.kill_at = (step, True)
        with pytest.raises(Killed):
            collect(checkpoint, folder, journal)
        if step != 2:
            shutil.rmtree(folder)
    found, reported = collect(checkpoint, folder, journal)
    assert found == expected
    assert reported == [f"backward {n}" for n in (1, 2, 3)]


def test_threads_that_run_a_segment_each_give_the_same_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=2)
    counts: list[int] = []
    side_by_side = LayerStream.side_by_side

    def recorded(self: LayerStream, number: int, besides: int = 0) -> int:
        counts.append(side_by_side(self, number, besides))
        return counts[-1]

    monkeypatch.setattr(LayerStream, "side_by_side", recorded)
    found = []
    for number in (1, 3):
        with threads(number):
            found.append(collect(checkpoint, tmp_path / str(number), MemoryJournal(), chunk=1)[0])
    assert found[0] == found[1]
    assert counts == 4 * [2] + 4 * [3]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2", "mixtral"])
def test_layers_that_take_all_threads_give_the_same_bytes(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd numbers of tokens and threads: products of MKL and the gradient of softmax depend on their number."""
    monkeypatch.setattr(LayerStream, "side_by_side", lambda self, number, besides=0: 1)
    checkpoint, found = tiny_checkpoint(family), []
    for number in (1, 2, 3, 5):
        with threads(number):
            found.append(collect(checkpoint, tmp_path / str(number), MemoryJournal(), chunk=1)[0])
    assert all(each == found[0] for each in found[1:])
