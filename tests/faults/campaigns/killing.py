"""Kills `ciuic compress` and checks what is left: `python tests/faults/campaigns/killing.py --kills 200`.

A run is killed at a random moment, or at its n-th write access to the folder of the output. Afterwards the old
artifact must be intact (or the new one complete), and the same command must then write the same bytes as an undisturbed
run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forked_runs import SIGNALS, ForkedRuns

from ciuic_cli.artifact.verification import verify
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.journal import Journal
from ciuic_cli.compression.pipeline import compress

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "families")]  # for the checkpoints that all tests share

OPTIONS = ("--ratio", "3", "--nsamples", "2", "--seqlen", "128", "--effort", "fast", "--device", "cpu")
DIFFERS = ("memory_report.json", "memory_report.html", "ciuic_checksums.json")
"""Files that differ between equal runs: they contain run times, or checksums of such files."""


@dataclass
class Harness:
    """One model, the output of an undisturbed run on it, and counts of outcomes.

    family: the model's type; "" is a Llama of one layer, the fastest.
    """

    folder: Path
    seed: int = 0
    family: str = ""
    model: Path = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        assert compress is not None  # imported before the forks, which inherit it
        self.random = random.Random(self.seed)
        from tiny_checkpoints import make_checkpoint

        if self.family:
            from tiny_families import make_family

            self.model = make_family(self.family, self.folder / "model")
        else:
            self.model = make_checkpoint("llama_tied", self.folder / "model", num_hidden_layers=1)
        self.text = self.folder / "text.txt"
        self.text.write_text("the quick brown fox jumps over the lazy dog; " * 20)
        map_model(open_checkpoint(self.model))
        started = time.monotonic()
        self.place = self.folder / "place"
        self.place.mkdir()
        self.out = self.place / "out"
        command = [
            "compress",
            str(self.model),
            str(self.out),
            "--calibration",
            str(self.text),
            "--calibration-only",
        ]
        command += OPTIONS
        self.runs = ForkedRuns(self.folder, self.place, command)
        log = self.folder / "accesses"
        assert self.runs.wait(self.runs.start(count_in=log)) == 0, self.runs.said()
        self.seconds = time.monotonic() - started
        self.accesses = int(log.read_text())
        self.expected = self.bytes_of(self.out)
        shutil.rmtree(self.place)

    @staticmethod
    def bytes_of(out: Path) -> dict[str, bytes]:
        verify(out).require_intact(out)
        return {path.name: path.read_bytes() for path in out.iterdir() if path.name not in DIFFERS}

    # --- one attack

    def attack(self, *, old: bool, kill_at: int = 0) -> None:
        """Kill a run at a random moment or at an access; check what is left, run again, check the result.

        old: an output exists already and is to be replaced.
        """
        self.place.mkdir()
        options = ["--force"] if old else []
        if old:
            self.out.mkdir()
            for name in ("old.txt", CHECKSUMS):
                (self.out / name).write_text("old")
        number = signal.SIGKILL if kill_at else self.random.choice(SIGNALS)
        pid = self.runs.start(*options, kill_at=kill_at)
        if not kill_at:
            time.sleep(self.random.random() * self.seconds)
            os.kill(pid, number)
        code = self.runs.wait(pid)
        self.counts[f"{signal.Signals(number).name}, exit {code}"] += 1
        self._check_remains(old, number, code)
        ended = self.out.exists() and not Journal(self.out).folder.exists()
        again = self.runs.wait(self.runs.start(*options))
        if again == 3 and ended and not old:  # the killed run had finished the output
            self.counts["had ended before"] += 1
        else:
            assert again == 0, f"the rerun ended with {again}: {self.runs.said()}"
            self.counts["resumed" if "continuing" in self.runs.said() else "from the start"] += 1
        assert self.bytes_of(self.out) == self.expected, "the output differs from an undisturbed run's"
        left = [path.name for path in self.place.iterdir() if path != self.out]
        assert not left, f"left behind: {left}"
        shutil.rmtree(self.place)

    def _check_remains(self, old: bool, number: int, code: int) -> None:
        self.runs.check_end(number, code)
        if not self.out.exists():
            assert not old or (self.out.with_name(".out.partial") / "old").exists(), (
                "the old artifact is gone"
            )
            self.counts["no output yet"] += 1
        elif (self.out / "old.txt").exists():
            assert {path.name: path.read_text() for path in self.out.iterdir()} == {
                "old.txt": "old",
                CHECKSUMS: "old",
            }
            self.counts["old output intact"] += 1
        else:
            assert self.bytes_of(self.out) == self.expected
            self.counts["new output complete"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--family", default="", help="a model type of transformers; default: a Llama of one layer"
    )
    parser.add_argument(
        "--last", action="store_true", help="kill at each of the last accesses, from the end, twice"
    )
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        harness = Harness(Path(folder), options.seed, options.family)
        print(
            f"an undisturbed run: {harness.seconds:.1f} s, {harness.accesses} write accesses",
            flush=True,
        )
        for number in range(options.kills):
            old, kill_at = bool(harness.random.randrange(2)), 0
            if options.last:
                old, kill_at = bool(number % 2), harness.accesses - number // 2
            elif number % 2:
                kill_at = harness.random.randrange(1, harness.accesses + 1)
            try:
                harness.attack(old=old, kill_at=kill_at)
            except AssertionError:
                print(
                    f"kill {number} (seed {options.seed}, access {kill_at}) lost something", file=sys.stderr
                )
                raise
        seconds = time.monotonic() - started
        print(f"{options.kills} kills in {seconds:.0f} s: nothing lost, every rerun ended in the same bytes")
        for what, count in sorted(harness.counts.items()):
            print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
