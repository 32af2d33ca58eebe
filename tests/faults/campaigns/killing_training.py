"""Kills `ciuic train` and checks what is left: `python tests/faults/campaigns/killing_training.py MODEL --kills 50`.

A run is killed at a random moment, or at its n-th write access to the folder of the output; some runs are killed
several times. Afterwards there must be no output, or the finished one. The same command must then end with the same
bytes as an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import peft
from forked_runs import SIGNALS, ForkedRuns

from ciuic_cli.train import engine, trainer

OPTIONS = (
    *(
        "--sequence-len",
        "64",
        "--max-steps",
        "8",
        "--lora-r",
        "2",
        "--learning-rate",
        "5e-3",
        "--save-steps",
        "2",
    ),
    *("--eval-steps", "3", "--load-best-model-at-end", "--device", "cpu"),
)
"""Checkpoints at steps 2, 3, 4, 6 and 8: evaluations have some of their own."""
DIFFERS = ("train_report.json", "train_report.html")
"""Files that differ between equal runs: they contain run times."""
MOST_KILLS = 3
"""Most kills of one run (chosen)."""


class Harness:
    """One model and its data, the output of an undisturbed run, and counts of outcomes."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        assert peft and engine and trainer  # imported before the forks, which inherit them
        self.random, self.counts = random.Random(seed), Counter[str]()
        data = [
            self._data(folder / "train.jsonl", range(1, 20)),
            self._data(folder / "eval.jsonl", range(50, 54)),
        ]
        self.place = folder / "place"
        self.place.mkdir()
        self.out = self.place / "adapter"
        self.runs = ForkedRuns(
            folder,
            self.place,
            ["train", str(model), str(self.out), "--train-file", data[0], "--eval-file", data[1], *OPTIONS],
        )
        log, started = folder / "accesses", time.monotonic()
        assert self.runs.wait(self.runs.start(count_in=log)) == 0, self.runs.said()
        self.seconds, self.accesses = time.monotonic() - started, int(log.read_text())
        self.expected = self.bytes_of_output()
        shutil.rmtree(self.place)

    @staticmethod
    def _data(file: Path, numbers: range) -> str:
        lines = [{"prompt": f"The number after {n} is ", "completion": f"{n + 1}."} for n in numbers]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(file)

    def bytes_of_output(self) -> dict[str, bytes]:
        """The files of the output. A half-written output lacks some, or has another adapter."""
        files = [path for path in self.out.rglob("*") if path.is_file()]
        assert {"train_report.json", "adapter_model.safetensors", "recipe.yaml"} <= {
            path.name for path in files
        }
        json.loads((self.out / "train_report.json").read_text())
        return {path.name: path.read_bytes() for path in files if path.name not in DIFFERS}

    def attack(self, kills: int, *, at_accesses: bool) -> None:
        """Kill a run this often, then let it end, and compare its output."""
        self.place.mkdir()
        ended = False
        for _ in range(kills):
            ended = ended or self._kill(at_accesses)
        code = self.runs.wait(self.runs.start())
        said = self.runs.said()
        if code == 3 and ended:
            assert "the output exists" in said, said
            self.counts["had ended before"] += 1
        else:
            assert code == 0, f"the rerun ended with {code}: {said}"
            self.counts["continued" if "continuing from step" in said else "from the start"] += 1
        assert self.bytes_of_output() == self.expected, "the output differs from an undisturbed run's"
        left = [path.name for path in self.place.iterdir() if path != self.out]
        assert not left, f"left behind: {left}"
        shutil.rmtree(self.place)

    def _kill(self, at_accesses: bool) -> bool:
        """Kill a run once. Returns whether the output is there, complete."""
        number = signal.SIGKILL if at_accesses else self.random.choice(SIGNALS)
        kill_at = self.random.randrange(1, self.accesses + 1) if at_accesses else 0
        pid = self.runs.start(kill_at=kill_at)
        if not at_accesses:
            time.sleep(self.random.random() * self.seconds)
            os.kill(pid, number)
        code = self.runs.wait(pid)
        self.counts[f"{signal.Signals(number).name}, exit {code}"] += 1
        if not self.out.exists():
            self.runs.check_end(number, code)
            return False
        assert self.bytes_of_output() == self.expected, "the output of a killed run differs"
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        harness = Harness(options.model.resolve(), Path(folder), options.seed)
        print(
            f"an undisturbed run: {harness.seconds:.1f} s, {harness.accesses} write accesses",
            flush=True,
        )
        done = number = 0
        while done < options.kills:
            kills = min(harness.random.randint(1, MOST_KILLS), options.kills - done)
            try:
                harness.attack(kills, at_accesses=bool(number % 2))
            except AssertionError:
                print(f"run {number} (seed {options.seed}) lost something", file=sys.stderr)
                raise
            done, number = done + kills, number + 1
            print(f"{done} kills of {number} runs: all ended in the same bytes", flush=True)
        print(f"{time.monotonic() - started:.0f} s")
        for what, count in sorted(harness.counts.items()):
            print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
